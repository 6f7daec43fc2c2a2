"""
faults.py
    Kinds of faults: the server of a round, how the fault strikes the server or its
    clients, and the recovery. Faults with several servers, or outside of a server, are
    in places.py.
"""

import os
import signal
import struct
import time

import psycopg2

import plan
from server import PATIENCE, Server, ServerError, wait_for
from session import Aim

# Store the history of every row, and write it to a file if the round fails.
TRACE = os.environ.get("TRACE")

PIDS = "SELECT pid FROM pg_stat_activity WHERE backend_type = %s"
BUSY = " AND wait_event = 'PgSleep'"


class Fault:
    """Common behaviour of all kinds of faults: one server."""

    types = plan.TYPES
    phases = plan.PHASES
    allowed = frozenset()  # SQLSTATEs that it can cause
    settings = {}
    rest = 0.04  # seconds maximum delay between two operations of a client
    padding = 0  # additional bytes of each effect
    patience = 45  # seconds after which a statement counts as hanging and is cancelled
    slow = False  # statements are made slow
    steady = True  # the clock is not changed
    lossy = False  # commits can be lost, key and effect together
    traceable = True  # one server executes the whole round

    def __init__(self, world, template):
        self.world = world
        self.template = template
        self.server = None
        self.control = None

    # -- the server

    def set_up(self):
        """set_up creates the server and starts it."""
        self.server = self.make_server()
        traced = {"wal_level": "logical"} if self.is_traced() else {}
        self.server.copy_from(self.template, {**self.settings, **traced})
        self.server.start()
        if self.is_traced():
            self.server.query("SELECT pg_create_logical_replication_slot('trace', 'test_decoding')")

    def make_server(self):
        """make_server returns a server without files."""
        return Server(self.template.bindir, os.path.join(self.world.directory, "server"))

    def dsn(self):
        """dsn returns the present connection string of clients."""
        return self.server.dsn("app")

    def logs(self):
        """logs returns the files of the servers' logs."""
        return [self.server.log] if self.server else []

    def is_expected(self, _line):
        """is_expected returns whether the fault explains an error in the log."""
        return False

    def end_faults(self):
        """end_faults ends faults that last beyond the last strike."""

    def is_traced(self):
        """is_traced returns whether the history of every row is stored."""
        return TRACE and self.traceable

    def trace(self):
        """trace writes the history of every row, if it was stored."""
        if not self.is_traced():
            return
        with open(os.path.join(self.world.directory, "trace"), "w", encoding="utf-8") as file:
            for (line,) in self.server.query("SELECT data FROM pg_logical_slot_peek_changes('trace', NULL, NULL,"
                                             " 'include-timestamp', 'on')"):
                file.write(line + "\n")

    def tear_down(self):
        """tear_down stops the server and keeps its log."""
        if self.server is not None:
            self.server.remove_data()

    def ask(self, sql, *arguments):
        """ask runs SQL as superuser, in a persistent connection."""
        for attempt in (1, 2):
            try:
                if self.control is None or self.control.closed:
                    self.control = self.server.connect()
                with self.control.cursor() as cursor:
                    cursor.execute(sql, arguments or None)
                    return cursor.fetchall()
            except psycopg2.Error:
                self.control = None
                if attempt == 2:
                    raise
        return None

    # -- faults

    def aim(self, phase, moment, delay):
        """aim makes one fault."""
        return Aim(self, phase, moment, delay)

    def is_due(self):
        """is_due returns whether a fault would have an effect now."""
        return True

    def note(self, aim):
        """note writes the time of the fault to the journal."""
        self.world.journal.note("fault", kind=self.world.kind, phase=aim.at, moment=aim.moment)

    def around(self, aim, session, run, sql):
        """around runs the statement that a fault is aimed at."""
        return aim.strike(session, run, sql)

    def strike(self, session):
        """strike applies the fault to a session; true if it did."""
        return self.strike_pid(session.pid())

    def strike_pid(self, pid):
        """strike_pid applies the fault to a process."""
        raise NotImplementedError

    def strike_worker(self, aim):
        """strike_worker waits for a background worker and applies the fault to it."""
        name = "idempotency relay" if aim.phase == "handler" else f"idempotency {aim.phase}"
        sql = PIDS + (BUSY if aim.phase == "handler" else "")
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                rows = self.ask(sql, name)
            except psycopg2.Error:
                rows = []
            if rows:
                if aim.phase != "handler":
                    time.sleep(aim.delay / 2)
                self.note(aim)
                try:
                    aim.struck = self.strike_pid(rows[0][0])
                except ProcessLookupError:
                    aim.struck = False
                return
            time.sleep(0.003)
        raise ServerError(f"there is no {name}")

    def recover(self):
        """recover waits until clients can continue."""
        if not self.server.is_running():
            raise ServerError("the server has ended")
        wait_for("the server accepts connections", self.server.answers)

    def inject(self, count):
        """inject applies faults until so many have struck."""
        world = self.world
        for phase, moment, delay in plan.aims_of(world.seed, world.kind, self.phases, 6 * count):
            if world.counts["faults"] >= count or world.failures:
                return
            aim = self.aim(phase, moment, delay)
            if phase in plan.WORKER_PHASES:
                self.strike_worker(aim)
            else:
                self.await_strike(aim)
            self.recover()
            world.counts["faults" if aim.struck else "missed"] += 1
            if aim.struck:
                world.phases[aim.at] += 1
                world.counts["aimed elsewhere"] += aim.at != phase
            time.sleep(15 * delay)
        if world.counts["faults"] < count:
            raise ServerError(f"only {world.counts['faults']} of {count} faults have struck")

    def await_strike(self, aim):
        """await_strike waits until a client reaches the phase; after a timeout, any phase."""
        self.world.aim = aim
        if not aim.done.wait(6):
            aim.phase = "any"
            if not aim.done.wait(PATIENCE):
                raise ServerError("no client is active")
        self.world.aim = None


class KillBackend(Fault):
    """kill -9 of a backend, after which the server terminates all sessions and recovers."""

    def strike_pid(self, pid):
        os.kill(pid, signal.SIGKILL)
        return True

    def recover(self):
        time.sleep(0.01)  # until the server has detected it
        super().recover()


class KillWorker(KillBackend):
    """kill -9 of a background worker."""

    phases = ("handler", "relay", "reaper", "launcher")


class Terminate(Fault):
    """pg_terminate_backend()."""

    function = "pg_terminate_backend"

    def strike_pid(self, pid):
        return self.ask(f"SELECT {self.function}(%s)", pid)[0][0]


class Cancel(Terminate):
    """A cancel request, and for background workers pg_cancel_backend(); it counts if a statement was cancelled."""

    function = "pg_cancel_backend"
    allowed = {"57014"}
    phases = tuple(p for p in plan.PHASES if p not in ("prepared", "decide", "reaper"))
    slow = True

    def aim(self, phase, moment, delay):
        return Aim(self, phase, "during", 4 * delay)

    def strike(self, session):
        session.connection.cancel()
        return True

    def around(self, aim, session, run, sql):
        try:
            result = aim.strike(session, run, sql)
            aim.struck = False
            return result
        except psycopg2.Error as error:
            aim.struck = error.pgcode == "57014"
            raise


class Timeout(Cancel):
    """statement_timeout, and for handlers idempotency.handler_timeout; it counts if a timeout occurred."""

    phases = tuple(p for p in Cancel.phases if p not in ("commit", "prepare"))

    def around(self, aim, session, run, sql):
        session.run(f"SET statement_timeout = '{1 + int(2000 * aim.delay)} ms'")
        try:
            self.note(aim)
            result = run(aim.lingering(session, sql))
            session.run("RESET statement_timeout")
            return result
        except psycopg2.Error as error:
            aim.struck = error.pgcode == "57014"
            raise

    def strike_worker(self, aim):
        [(now,)] = self.ask("SELECT clock_timestamp()")
        self.note(aim)
        self.server.query("ALTER SYSTEM SET idempotency.handler_timeout = '5 ms'")
        self.ask("SELECT pg_reload_conf()")
        wait_for("a handler has timed out", lambda: self.ask(
            "SELECT 1 FROM idempotency.parked WHERE error LIKE '57014:%%' AND last_failed_at > %s", now), interval=0.003)
        self.server.query("ALTER SYSTEM RESET idempotency.handler_timeout")
        self.ask("SELECT pg_reload_conf()")
        aim.struck = True


class Restart(Fault):
    """A signal that ends the postmaster, and a restart."""

    number = None

    def strike(self, session):
        return self.strike_pid(None)

    def strike_pid(self, pid):
        self.server.signal(self.number)
        return True

    def recover(self):
        self.server.wait_for_end()
        self.server.start()


class KillPostmaster(Restart):
    """kill -9 of the postmaster: its backends detect it one after the other."""

    number = signal.SIGKILL


class Immediate(Restart):
    """An immediate shutdown."""

    number = signal.SIGQUIT


class Fast(Restart):
    """A fast shutdown."""

    number = signal.SIGINT


class Prepared(Restart):
    """Any of these while a transaction is prepared."""

    types = {"prepared": 70, "plain": 10, "deadlock": 10, "sweep": 5, "reap": 5}
    phases = ("prepared", "prepared", "prepared", "decide", "commit", "prepare", "claim")

    def __init__(self, world, template):
        super().__init__(world, template)
        self.rng = plan.chance(world.seed, "signals")

    def kept(self):
        """kept returns how many transactions are prepared."""
        return sum(gid[4] for client in self.world.clients for gid in list(client.prepared.values()))

    def is_due(self):
        return self.kept() > 0

    def strike_pid(self, pid):
        kept = self.kept()
        self.world.counts["prepared over a crash"] += kept
        self.server.signal(self.rng.choice([signal.SIGKILL, signal.SIGQUIT, signal.SIGINT]))
        return kept > 0


class Conflict(Fault):
    """No fault, but clients that conflict with each other."""

    types = plan.CONFLICTS
    phases = ()
    rest = 0.002

    def inject(self, count):
        errors = self.world.errors
        wait_for(f"there were {count} deadlocks and conflicts",
                 lambda: self.world.failures or min(errors["40P01"], errors["40001"]) >= count, PATIENCE + count)
        self.world.counts["faults"] = min(errors["40P01"], errors["40001"])


class ClockJump(Fault):
    """Changes of the server's clock, through a preloaded library."""

    jumps = {"0": 0, "+1 s": 1, "-1 s": -1, "+1 h": 3600, "-1 h": -3600, "+3 days": 259200, "-10 years": -315360000}
    steady = False
    patience = 3  # the server's own timeouts depend on the clock
    allowed = {"57014"}

    def __init__(self, world, template):
        super().__init__(world, template)
        self.rng = plan.chance(world.seed, "clock")
        self.clock = os.path.join(world.directory, "clock")
        self.last = "0"

    def set_clock(self, jump):
        """set_clock sets the server's clock, in place."""
        with open(self.clock, "r+b") as file:
            file.write(struct.pack("=qq", self.jumps[jump], 0))

    def make_server(self):
        with open(self.clock, "wb") as file:
            file.write(struct.pack("=qq", 0, 0))
        server = super().make_server()
        preloaded = [os.environ["CLOCK_LIBRARY"], os.environ.get("LD_PRELOAD", "")]
        server.environment.update(LD_PRELOAD=" ".join(preloaded), CLOCK_FILE=self.clock)
        return server

    def set_up(self):
        super().set_up()
        [(now,)] = self.server.query("SELECT extract(epoch FROM clock_timestamp())::float8")
        self.set_clock("+3 days")
        [(then,)] = self.server.query("SELECT extract(epoch FROM clock_timestamp())::float8")
        self.set_clock("0")
        if not 259000 < then - now < 260000:
            raise ServerError("the clock of the server cannot be set")

    def strike(self, session):
        return self.strike_pid(None)

    def strike_pid(self, pid):
        jump = self.rng.choice([name for name in self.jumps if name != self.last])
        self.world.journal.note("clock", jump=jump)
        self.set_clock(jump)
        self.world.counts["clock to " + jump] += 1
        self.last = jump
        return True

    def end_faults(self):
        # Events that failed in the future are redelivered in the future. A handler that
        # was asleep when the clock was set back sleeps until then, in steps of ten
        # minutes.
        self.set_clock("+3 days")
        time.sleep(0.5)
        self.server.query("SELECT pg_cancel_backend(pid) FROM pg_stat_activity"
                          " WHERE backend_type = 'idempotency relay' AND wait_event = 'PgSleep'")
