"""
cluster.py
    A Citus cluster on this machine: a coordinator and two workers.

All nodes listen on sockets in one directory, and on no network. fsync is off: only
processes are killed, and the page cache survives them.
"""

import ctypes
import os
import signal
import subprocess
import time

import psycopg2

COORDINATOR = 5432
WORKERS = (5433, 5434)
PORTS = (COORDINATOR,) + WORKERS
DATABASE = "app"

SETTINGS = {
    "listen_addresses": "",
    "shared_preload_libraries": "citus",
    "fsync": "off",
    "max_connections": "200",
    "max_prepared_transactions": "200",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "max_worker_processes": "40",
    "shared_buffers": "32MB",
    "deadlock_timeout": "200ms",
    "log_min_error_statement": "panic",
    "citus.enable_statistics_collection": "off",
    "citus.recover_2pc_interval": "2s",
    "citus.defer_shard_delete_interval": "5s",
}

LIBC = ctypes.CDLL(None)


def die_with_us():
    """die_with_us makes the kernel kill the calling process when its parent ends."""
    pr_set_pdeathsig = 1
    LIBC.prctl(pr_set_pdeathsig, signal.SIGKILL)


class Cluster:
    """The three nodes. Their processes are children of this process."""

    def __init__(self, directory, bindir):
        self.directory = directory
        self.bindir = bindir
        self.processes = {}

    def create(self):
        """create makes the three nodes, and joins them."""
        for port in PORTS:
            data = self.data(port)
            self.run("initdb", f"--pgdata={data}", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C",
                     "--no-sync")
            with open(os.path.join(data, "postgresql.conf"), "a", encoding="utf-8") as configuration:
                for name, value in {**SETTINGS, "port": port, "unix_socket_directories": self.directory,
                                    "citus.local_hostname": self.directory}.items():
                    configuration.write(f"{name} = '{value}'\n")
            self.start(port)
            self.execute(port, f"CREATE DATABASE {DATABASE}", database="postgres")
            self.execute(port, "CREATE EXTENSION citus")
        self.execute(COORDINATOR, "SELECT citus_set_coordinator_host(%s, %s)", self.directory, COORDINATOR)
        for port in WORKERS:
            self.execute(COORDINATOR, "SELECT citus_add_node(%s, %s)", self.directory, port)

    def data(self, port):
        """data returns the directory of a node."""
        return os.path.join(self.directory, f"data{port}")

    def run(self, program, *arguments, **environment):
        """run runs one of the server's programs, and returns its output."""
        done = subprocess.run([os.path.join(self.bindir, program), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              check=False, env={**os.environ, **environment}, text=True)
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout}")
        return done.stdout

    def psql(self, port, *arguments, **environment):
        """psql runs psql on a node."""
        return self.run("psql", "--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", f"--host={self.directory}", f"--port={port}",
                        "--username=postgres", f"--dbname={DATABASE}", *arguments, **environment)

    def start(self, port):
        """start starts a node, and waits until it accepts connections."""
        deadline = time.monotonic() + 60
        process = None
        while True:
            # It ends at once while a process of the killed server still uses the shared memory.
            if process is None or process.poll() is not None:
                with open(os.path.join(self.directory, f"log{port}"), "ab") as log:
                    process = subprocess.Popen([os.path.join(self.bindir, "postgres"), "-D", self.data(port)],
                                               stdout=log, stderr=log, preexec_fn=die_with_us)
                self.processes[port] = process
            try:
                self.connect(port, database="postgres").close()
                return
            except psycopg2.OperationalError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def kill(self, port):
        """kill kills a node as the kernel would, and starts it again."""
        self.processes[port].kill()
        self.processes[port].wait()
        self.start(port)

    def stop(self):
        """stop stops all nodes."""
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        for process in self.processes.values():
            process.wait()

    def connect(self, port, database=DATABASE, user="postgres"):
        """connect returns a session of its own."""
        return psycopg2.connect(host=self.directory, port=port, dbname=database, user=user)

    def query(self, port, statement, *values, database=DATABASE):
        """query returns the rows of a statement that is a transaction of its own."""
        session = self.connect(port, database)
        try:
            session.autocommit = True
            cursor = session.cursor()
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []
        finally:
            session.close()

    execute = query

    def home(self, tenant):
        """home returns the shard of a tenant, and the port of its node."""
        return self.query(COORDINATOR, """SELECT s.shardid, n.nodeport
            FROM pg_dist_placement AS s JOIN pg_dist_node AS n USING (groupid)
            WHERE s.shardid = get_shard_id_for_distribution_column('api.charge', %s)""", tenant)[0]

    def move(self, shard, port, mode):
        """move moves a shard, with those that are colocated with it, away from a node."""
        target = WORKERS[1] if port == WORKERS[0] else WORKERS[0]
        self.query(COORDINATOR, "SELECT citus_move_shard_placement(%s, %s, %s, %s, %s, %s)",
                   shard, self.directory, port, self.directory, target, mode)
