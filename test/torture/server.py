"""
server.py
    Servers of the test: start, stop, kill and promote.

A server is a child of this process, so that this process can wait for its end. It
listens only on a socket in its directory. fsync is off: only processes are killed, and
the page cache survives them.
"""

import ctypes
import glob
import os
import shutil
import signal
import subprocess
import time

import psycopg2

SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "fsync": "off",
    "max_connections": "60",
    "max_prepared_transactions": "60",
    "max_worker_processes": "16",
    "shared_buffers": "16MB",
    "min_wal_size": "2MB",
    "max_wal_size": "32MB",
    "max_wal_senders": "4",
    "autovacuum_naptime": "2s",
    "deadlock_timeout": "50ms",
    "log_line_prefix": "%m [%p] %e %q%a ",
    "log_checkpoints": "off",
    "log_min_error_statement": "panic",
    "shared_preload_libraries": "idempotency",
    "idempotency.reaper_naptime": "100ms",
    "idempotency.retention": "946080000",  # 30 years: longer than any jump of the clock
    "idempotency.outbox_retention": "0",
    "idempotency.wait": "1s",
}

# Time limit in seconds of all server actions; slow ones have longer limits.
PATIENCE = max(60, int(os.environ.get("PG_TEST_TIMEOUT_DEFAULT") or 0))


LIBC = ctypes.CDLL(None)


def die_with_us():
    """die_with_us makes the kernel kill the calling process when its parent ends."""
    pr_set_pdeathsig = 1
    LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)


class ServerError(Exception):
    """A server that does not behave as expected."""


def wait_for(what, condition, seconds=PATIENCE, interval=0.01):
    """wait_for returns the result of the condition as soon as it is true."""
    end = time.monotonic() + seconds
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > end:
            raise ServerError(f"timed out waiting until {what}")
        time.sleep(interval)


def parents():
    """parents maps each process to its parent."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="ascii", errors="replace") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(path.split("/")[2])] = int(fields[1])
    return found


class Server:
    """One server, running or not."""

    def __init__(self, bindir, directory, wal=None, environment=None):
        self.bindir = bindir
        self.directory = directory
        self.data = os.path.join(directory, "data")
        self.wal = wal
        self.log = os.path.join(directory, "log")
        self.environment = {**os.environ, **(environment or {})}
        self.process = None
        os.makedirs(directory, exist_ok=True)

    def program(self, name, *arguments):
        """program runs one of the server's programs and waits for it."""
        done = subprocess.run([os.path.join(self.bindir, name), *arguments],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise ServerError(f"{name}: {done.stdout}")

    def configure(self, settings):
        """configure adds settings; the last one of a name counts."""
        with open(os.path.join(self.data, "postgresql.conf"), "a", encoding="ascii") as conf:
            for name, value in settings.items():
                conf.write(f"{name} = '{value}'\n")

    def initialize(self, settings):
        """initialize creates a cluster."""
        self.program(os.environ.get("INITDB") or "initdb", "--pgdata", self.data, "--username=postgres", "--auth=trust",
                     "--encoding=UTF8", "--locale=C", "--no-sync", "--wal-segsize=1")
        self.configure({**SETTINGS, "unix_socket_directories": self.directory, **settings})

    def copy_from(self, template, settings):
        """copy_from creates a cluster as a copy of a stopped one."""
        shutil.copytree(template.data, self.data, symlinks=True)
        os.chmod(self.data, 0o700)
        if self.wal is not None:
            shutil.copytree(os.path.join(self.data, "pg_wal"), self.wal, dirs_exist_ok=True)
            shutil.rmtree(os.path.join(self.data, "pg_wal"))
            os.symlink(self.wal, os.path.join(self.data, "pg_wal"))
        self.configure({"unix_socket_directories": self.directory, **settings})

    def back_up_from(self, primary, settings):
        """back_up_from creates a standby of a running server."""
        shutil.rmtree(self.data, ignore_errors=True)
        self.program("pg_basebackup", "--pgdata", self.data, "--host", primary.directory,
                     "--username=postgres", "--checkpoint=fast", "--wal-method=stream", "--no-sync",
                     "--no-manifest")
        self.configure({"unix_socket_directories": self.directory, **settings,
                        "primary_conninfo": f"host={primary.directory} user=postgres"})
        with open(os.path.join(self.data, "standby.signal"), "w", encoding="ascii"):
            pass

    def dsn(self, user="postgres", database="postgres"):
        """dsn returns the connection string of a client."""
        return f"host={self.directory} port=5432 user={user} dbname={database} connect_timeout=30"

    def connect(self, user="postgres"):
        """connect opens a connection with autocommit."""
        connection = psycopg2.connect(self.dsn(user))
        connection.autocommit = True
        return connection

    def query(self, sql, *arguments):
        """query runs one statement in a new connection."""
        connection = self.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, arguments or None)
                return cursor.fetchall() if cursor.description else None
        finally:
            connection.close()

    def answers(self):
        """answers returns whether the server accepts connections."""
        try:
            self.query("SELECT 1")
            return True
        except psycopg2.Error:
            return False

    def spawn(self):
        """spawn starts the server and does not wait for it."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [os.path.join(self.bindir, "postgres"), "-D", self.data], env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=die_with_us)

    def start(self):
        """start starts the server, which can wait for processes of the previous one."""
        def is_up():
            if self.process is None or self.process.poll() is not None:
                self.spawn()
            return self.answers()
        wait_for("the server is up", is_up, interval=0.02)

    def is_running(self):
        """is_running returns whether the postmaster runs."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number):
        """signal sends the postmaster a signal."""
        if self.is_running():
            os.kill(self.process.pid, number)

    def wait_for_end(self):
        """wait_for_end waits until the postmaster has exited."""
        if self.process is not None:
            self.process.wait(PATIENCE)

    def kill_all(self):
        """kill_all kills the server like the loss of its machine: no process detects another's death.

        A backend that detects the postmaster's death stops waiting for the standby: it commits,
        and others can read a commit that no standby has.
        """
        if self.process is None:
            return
        postmaster = self.process.pid
        self.signal(signal.SIGSTOP)
        children = [pid for pid, parent in parents().items() if parent == postmaster]
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.signal(signal.SIGKILL)
        self.wait_for_end()
        wait_for("its processes have exited", lambda: not set(children) & set(parents()))

    def stop(self):
        """stop shuts the server down."""
        self.signal(signal.SIGINT)
        self.wait_for_end()

    def remove_data(self):
        """remove_data stops the server and removes all files except its log."""
        self.kill_all()
        shutil.rmtree(self.data, ignore_errors=True)
        if self.wal is not None:
            shutil.rmtree(self.wal, ignore_errors=True)
