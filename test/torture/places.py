"""
places.py
    Faults outside of a server: a full disk, a killed pooler, the promotion of a standby.
"""

import os
import re
import shutil
import signal
import subprocess
import time

import psycopg2

import plan
from faults import Fault
from server import Server, die_with_us, wait_for


class FullDisk(Fault):
    """A temporarily full disk: that of the data, or that of the WAL."""

    allowed = {"53100"}
    padding = 1500
    rest = 0.01
    phases = ("claim", "write", "complete", "commit", "procedure", "checkpoint", "takeover", "fetch", "handle", "ack")

    def __init__(self, world, template):
        super().__init__(world, template)
        self.rng = plan.chance(world.seed, "disks")
        self.disks = os.environ["TORTURE_DISKS"]  # data and wal, two small disks
        self.seen = 0

    def make_server(self):
        for disk in ("data", "wal"):
            shutil.rmtree(os.path.join(self.disks, disk, "x"), ignore_errors=True)
        server = super().make_server()
        server.data = os.path.join(self.disks, "data", "x")
        server.wal = os.path.join(self.disks, "wal", "x")
        return server

    def ballast(self):
        """ballast returns the file that fills a disk."""
        return os.path.join(self.disks, self.disk, "ballast")

    def strike(self, session):
        return self.strike_pid(None)

    def strike_pid(self, pid):
        self.disk = self.rng.choice(["data", "wal"])
        self.seen = self.world.errors["53100"]
        with open(self.ballast(), "wb") as file:
            status = os.statvfs(self.ballast())
            block = 1 << 22
            while block >= status.f_frsize:
                try:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, block)
                except OSError:
                    block //= 2
        return True

    def recover(self):
        end = time.monotonic() + 3
        noticed = False
        while time.monotonic() < end and not noticed:
            if self.disk == "wal":
                try:
                    self.server.query("SELECT pg_switch_wal()")  # so that the server needs a new segment
                except psycopg2.Error:
                    pass
            time.sleep(0.05)
            noticed = self.world.errors["53100"] > self.seen or not self.server.is_running()
        os.unlink(self.ballast())
        self.world.counts["disks noticed"] += noticed
        self.world.counts[f"disk of {self.disk} noticed"] += noticed
        self.server.start()  # if it has ended

    def is_expected(self, line):
        # The last message is what the server logs in the same case without a reason.
        return re.search(r"No space left on device|was terminated by signal 6|could not write init file", line)


class KillPooler(Fault):
    """kill -9 of the PgBouncer of all clients."""

    allowed = {"08P01"}
    pooler = None

    def set_up(self):
        super().set_up()
        directory = self.world.directory
        with open(os.path.join(directory, "users"), "w", encoding="ascii") as users:
            users.write('"app" ""\n')
        with open(os.path.join(directory, "pgbouncer.ini"), "w", encoding="ascii") as ini:
            ini.write(f"""
[databases]
postgres = host={self.server.directory} port=5432 dbname=postgres pool_size=20
[pgbouncer]
listen_port = 6432
listen_addr =
unix_socket_dir = {directory}
auth_type = trust
auth_file = {directory}/users
pool_mode = transaction
max_client_conn = 100
logfile = {directory}/pgbouncer.log
""")
        self.spawn()

    def spawn(self):
        """spawn starts the pooler."""
        self.pooler = subprocess.Popen(
            ["pgbouncer", "--quiet", os.path.join(self.world.directory, "pgbouncer.ini")],
            start_new_session=True, preexec_fn=die_with_us)

    def dsn(self):
        return f"host={self.world.directory} port=6432 user=app dbname=postgres connect_timeout=30"

    def strike(self, session):
        return self.strike_pid(None)

    def strike_pid(self, pid):
        self.pooler.kill()
        return True

    def recover(self):
        self.pooler.wait()
        self.spawn()

        def answers():
            try:
                psycopg2.connect(self.dsn()).close()
                return True
            except psycopg2.Error:
                return False
        wait_for("the pooler accepts connections", answers)

    def tear_down(self):
        if self.pooler is not None:
            self.pooler.kill()
            self.pooler.wait()
        super().tear_down()


class Promotion(Fault):
    """The primary is lost with all processes, and its standby is promoted."""

    phases = tuple(p for p in plan.PHASES if p not in ("handler", "reaper"))
    allowed = {"25006", "08P01"}
    patience = None  # a commit that is cancelled while it waits for the standby guarantees nothing
    synchronous = None
    traceable = False  # replication slots are lost with the server

    def __init__(self, world, template):
        super().__init__(world, template)
        self.rng = plan.chance(world.seed, "promotions")
        self.standby = None
        self.number = 0
        self.files = []

    def make_server(self):
        """make_server returns the next server; each has its own directory."""
        self.number += 1
        server = Server(self.template.bindir, os.path.join(self.world.directory, f"server{self.number}"))
        self.files.append(server.log)
        return server

    def set_up(self):
        names = {"synchronous_standby_names": "*"} if self.synchronous else {}
        self.settings = {"wal_log_hints": "on", **names}
        super().set_up()
        self.add_standby()

    def add_standby(self):
        """add_standby gives the primary a standby, and waits until it has caught up."""
        self.standby = self.make_server()
        self.standby.back_up_from(self.server, self.settings)
        self.standby.start()
        state = "sync" if self.synchronous else "async"
        wait_for("the standby follows", lambda: self.server.query(
            "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = %s", state))

    def strike(self, session):
        return self.strike_pid(None)

    def strike_pid(self, pid):
        if not self.synchronous:
            self.fall_behind()
        self.server.kill_all()
        return True

    def recover(self):
        former = self.server
        self.standby.query("SELECT pg_promote(true, 60)")
        self.world.epoch += 1  # before clients can connect
        self.server = self.standby
        self.world.journal.note("promoted", epoch=self.world.epoch)
        shutil.rmtree(former.data, ignore_errors=True)
        self.add_standby()

    def logs(self):
        return self.files

    def tear_down(self):
        for server in (self.server, self.standby):
            if server is not None:
                server.remove_data()


class SyncPromotion(Promotion):
    """A synchronous standby: no acknowledged commit is lost."""

    synchronous = True


class AsyncPromotion(Promotion):
    """An asynchronous standby with a lag: key and effect are lost together."""

    lossy = True
    synchronous = False

    def fall_behind(self):
        """fall_behind stops the stream once the standby has everything up to the mark."""
        self.world.journal.note("mark", epoch=self.world.epoch)
        [(lsn,)] = self.ask("SELECT pg_current_wal_insert_lsn()")
        wait_for("the standby has caught up", lambda: self.ask(
            "SELECT 1 FROM pg_stat_replication WHERE flush_lsn >= %s::pg_lsn", lsn))
        [(sender,)] = self.ask("SELECT pid FROM pg_stat_replication")
        os.kill(sender, signal.SIGSTOP)
        time.sleep(0.02 + 0.3 * self.rng.random())
