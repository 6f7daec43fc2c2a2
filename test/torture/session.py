"""
session.py
    The actions of a client between faults: connect, call, detect a failure, reconnect.

Every statement belongs to a phase of an operation. A fault is aimed at a phase: it
strikes the first client that reaches the phase, right before the statement, while the
statement runs, or right after it.
"""

import re
import threading
import time

import psycopg2

# A delay within the statement makes it slow, where the fault would otherwise come too
# late. Its argument makes the planner execute it after the call.
DELAY = "pg_catalog.pg_sleep(CASE WHEN \"{}\" IS NULL THEN 0.2 ELSE 0.2 END) AS delay"


class Stopped(Exception):
    """The round has ended, and clients stop."""


class Unknown(Exception):
    """The server has committed locally, without the standby."""


class Aim:
    """A fault that waits for a client in its phase."""

    def __init__(self, fault, phase, moment, delay):
        self.fault = fault
        self.phase = phase  # its phase, or "any"
        self.at = phase  # the phase in which it struck
        self.moment = moment  # before, during, after
        self.delay = delay  # in seconds, if during
        self.taken = False
        self.struck = False
        self.done = threading.Event()

    def act(self, session):
        """act applies the fault and records whether it struck."""
        self.fault.note(self)
        try:
            self.struck = self.fault.strike(session)
        except (psycopg2.Error, ProcessLookupError, AttributeError):
            pass  # the session has ended already

    def finish(self):
        """finish marks the fault as ended."""
        self.done.set()

    def lingering(self, session, sql):
        """lingering makes a statement slow, where the fault would otherwise come too late."""
        if not self.fault.slow:
            return sql
        if self.at in ("commit", "prepare"):
            session.run("INSERT INTO torture.delay DEFAULT VALUES")
            return sql
        called = re.search(r" FROM (?:idempotency|torture)\.(\w+)\(", sql)
        if called:
            return f"{sql}, {DELAY.format(called[1])}"
        return f"{sql} RETURNING pg_catalog.pg_sleep(0.2)" if sql.startswith("INSERT") else sql

    def strike(self, session, run, sql):
        """strike runs a statement and applies the fault at its moment."""
        if self.moment == "before":
            self.act(session)
            return run(sql)
        if self.moment == "after":
            try:
                return run(sql)
            finally:
                self.act(session)

        text = self.lingering(session, sql)

        def during():
            time.sleep(self.delay)
            self.act(session)

        thread = threading.Thread(target=during)
        thread.start()
        try:
            return run(text)
        finally:
            thread.join()


class Session:
    """A connection of one client to the present server."""

    def __init__(self, world):
        self.world = world
        self.connection = None
        self.epoch = 0
        self.since = None  # start time of the present statement

    def connect(self):
        """connect opens a connection, and retries until it succeeds."""
        self.close()
        while True:
            if self.world.stopped.is_set():
                raise Stopped
            self.epoch = self.world.epoch
            try:
                self.connection = psycopg2.connect(self.world.dsn())
                self.connection.autocommit = True
            except psycopg2.Error:
                time.sleep(0.02)
                continue
            if self.epoch == self.world.epoch:
                return
            self.close()  # a promotion occurred meanwhile

    def close(self):
        """close closes the connection, if there is one."""
        if self.connection is not None:
            try:
                self.connection.close()
            except psycopg2.Error:
                pass
        self.connection = None

    def pid(self):
        """pid returns the process ID of the session's backend."""
        pid = self.connection.info.backend_pid
        if pid == 0:  # for libpq no backend; for kill() the whole process group
            raise ProcessLookupError("the connection is lost")
        return pid

    def run(self, sql, arguments=()):
        """run runs one statement and returns its rows."""
        if self.world.stopped.is_set():
            raise Stopped
        if self.connection is None or self.connection.closed:
            self.connect()
        self.since = time.monotonic()
        try:
            with self.connection.cursor() as cursor:
                cursor.execute(sql, arguments or None)
                return cursor.fetchall() if cursor.description else cursor.statusmessage
        finally:
            self.since = None

    def call(self, phase, sql, *arguments):
        """call runs the statement of a phase, with its fault."""
        if self.connection is None or self.connection.closed:
            self.connect()
        aim = self.world.take(phase)
        if aim is None:
            return self.run(sql, arguments)
        try:
            return aim.fault.around(aim, self, lambda text: self.run(text, arguments), sql)
        finally:
            aim.finish()

    def commit(self, phase="commit"):
        """commit commits, and checks that the server confirms it."""
        del self.connection.notices[:]
        if self.call(phase, "COMMIT") != "COMMIT":
            raise Unknown("COMMIT has rolled back")
        self.check_notices()

    def check_notices(self):
        """check_notices throws Unknown if the commit did not wait for the standby."""
        if any("might not have been replicated" in notice for notice in self.connection.notices):
            raise Unknown("not replicated")

    def recover(self, error):
        """recover makes the session usable after an error, and returns its SQLSTATE."""
        state = getattr(error, "pgcode", None) or "lost"
        if self.connection is None or self.connection.closed:
            return state
        if isinstance(error, (psycopg2.OperationalError, psycopg2.InterfaceError)) and state == "lost":
            self.close()
            return state
        try:
            self.run("ROLLBACK")
            self.run("RESET statement_timeout")
        except psycopg2.Error:
            self.close()
        return state
