"""
round.py
    One round: a server, clients, faults of one kind, an end without faults, and the
    check.

Everything follows from the seed of the round, so that a round can be repeated without
the rounds before it.
"""

import collections
import json
import os
import re
import threading
import time

import psycopg2

import check
import plan
from client import Client
from consumer import Consumer
from journal import Journal, load
from owner import ATTEMPTS_AT
from server import PATIENCE, ServerError

# Errors that calls can meet at any time: in progress, lost lease, conflict, deadlock, a
# subscription in use, and every kind of lost connection.
ORDINARY = {"IK409", "IK408", "IK410", "40001", "40P01", "55P03", "lost", "57P01", "57P02", "57P03"}

STATE = """
SELECT json_build_object(
    'effects', (SELECT coalesce(json_agg(json_build_object('key', key, 'attempt', attempt, 'token', token,
        'event', event)), '[]') FROM torture.effect),
    'steps', (SELECT coalesce(json_agg(s), '[]') FROM torture.step AS s),
    'handled', (SELECT coalesce(json_agg(h), '[]') FROM torture.handled AS h),
    'counters', (SELECT json_object_agg(id, n) FROM torture.counter),
    'prepared', (SELECT count(*) FROM pg_prepared_xacts),
    'outbox', (SELECT json_agg(o) FROM (SELECT seq, txid::text, id FROM idempotency.outbox) AS o),
    'positions', (SELECT json_agg(p) FROM idempotency.position AS p),
    'seen', (SELECT json_agg(key) FROM idempotency.key WHERE scope = 'consumer'),
    'reaper', (SELECT json_agg(r) FROM idempotency.reaper AS r),
    'parked', (SELECT json_agg(p) FROM idempotency.parked AS p),
    'keys', (SELECT coalesce(json_object_agg(key, CASE WHEN (op).status IS NULL THEN 'seen'
            ELSE concat_ws('|', (op).status, (op).headers, (op).response) END), '{}')
        FROM (SELECT key::text, idempotency.peek(scope, key) AS op FROM idempotency.key
            WHERE scope = ANY (%s) OFFSET 0) AS k WHERE (op).outcome = 'replayed'))
"""
DELIVERED = """
SELECT (SELECT count(*) FROM torture.effect) * 3 - count(*) FROM torture.handled
"""


class World:
    """State that all threads of a round share."""

    def __init__(self, kind, seed, number, directory, make_fault):
        self.kind = kind
        self.seed = f"{seed}/{kind}/{number}"
        self.directory = directory
        self.journal = Journal(os.path.join(directory, "journal"))
        self.epoch = 0
        self.counts = collections.Counter()
        self.phases = collections.Counter()  # faults by phase
        self.errors = collections.Counter()
        self.failures = []
        self.closing = threading.Event()
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.aim = None
        self.clients = []
        self.attempts_at = ATTEMPTS_AT
        self.decisions = {}  # of all transactions that were prepared
        self.leases = {}  # ends of all known leases
        self.reached = 0  # operations at the end of the faults
        self.fault = make_fault(self)
        self.types = self.fault.types
        self.rest = self.fault.rest
        self.padding = "x" * self.fault.padding
        self.allowed = ORDINARY | self.fault.allowed

    def dsn(self):
        """dsn returns the present connection string of clients."""
        return self.fault.dsn()

    def take(self, phase):
        """take returns the fault that is aimed at this phase, once."""
        aim = self.aim
        if aim is None or aim.phase not in (phase, "any") or not aim.fault.is_due():
            return None
        with self.lock:
            if aim.taken or self.aim is not aim:
                return None
            aim.taken = True
            aim.at = phase
            return aim

    def await_others(self, client):
        """await_others makes a client wait for clients that are far behind."""
        while client.progress > min(c.progress for c in self.clients) + plan.WINDOW:
            if self.closing.is_set():
                return
            time.sleep(0.002)

    def fail(self, message):
        """fail records an error."""
        with self.lock:
            self.failures.append(message)

    def check_error(self, state, error):
        """check_error counts an error, and fails if it is not permitted."""
        with self.lock:
            self.errors[state] += 1
        if state not in self.allowed and not (state == "55000" and "is busy" in str(error)):
            self.fail(f"unexpected error {state}: {error}")


# The activity of processes, and the locks that they wait for.
ACTIVITY = ("SELECT pid, backend_type, state, wait_event_type, wait_event, query, pg_blocking_pids(pid)"
            " FROM pg_stat_activity WHERE state IS DISTINCT FROM 'idle'")


def cpu_of(pid):
    """cpu_of returns the ticks that a process has used, and the kernel function that it waits in."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat, open(f"/proc/{pid}/wchan", encoding="ascii") as place:
            return [*stat.read().rsplit(")", 1)[1].split()[11:13], place.read()]
    except OSError:
        return None


class Watch(threading.Thread):
    """Cancels hanging statements: a clock that is set back delays the server's own timeouts."""

    def __init__(self, world, sessions):
        super().__init__(daemon=True)
        self.world = world
        self.sessions = sessions
        self.described = None

    def describe(self, since):
        """describe writes the activity of all processes, once for a statement that ignores cancels."""
        if self.described == since:
            return
        self.described = since
        rows = self.world.fault.server.query(ACTIVITY)
        self.world.journal.note("hang", activity=[[*row, cpu_of(row[0])] for row in rows])

    def run(self):
        """run polls twice per second."""
        patience = self.world.fault.patience
        while patience and not self.world.stopped.wait(0.5):
            for session in self.sessions:
                since = session.since
                if since is not None and time.monotonic() - since > 4 * patience:
                    try:
                        self.describe(since)
                    except psycopg2.Error:
                        pass
                if since is not None and time.monotonic() - since > patience:
                    try:
                        session.connection.cancel()
                        self.world.counts["hangs cancelled"] += 1
                    except (psycopg2.Error, AttributeError):
                        pass


def settle(world):
    """settle finishes every operation, one after the other."""
    finisher = Client(world, 99)
    finisher.reliable = True
    for client in world.clients:
        finisher.prepared.update(client.prepared)
    if world.fault.lossy:  # a decision can be lost too; then the prepared transaction exists again
        for (gid,) in world.fault.server.query("SELECT gid FROM pg_prepared_xacts"):
            finisher.prepared[gid] = world.decisions[gid]
    for number in range(world.reached):
        kind = plan.type_of(world.seed, number, world.types)
        if kind in plan.ANSWERED and any(plan.is_wanted(world.seed, number, c) for c in range(plan.CLIENTS)):
            finish(world, finisher, kind, number)
    finisher.session.close()


def finish(world, finisher, kind, number):
    """finish tries an operation until it has ended."""
    end = time.monotonic() + PATIENCE
    count = 0
    while not finisher.try_once(kind, number, count):
        count += 1
        if time.monotonic() > end:
            raise ServerError(f"operation {number} ({kind}) does not end")


def await_delivery(world):
    """await_delivery waits until every event was handled, or none for a long time.

    COMMIT PREPARED wakes no worker: one comes with the survey of the next minute."""
    server = world.fault.server
    left, since = None, time.monotonic()
    while True:
        [(now,)] = server.query(DELIVERED)
        if now <= 0:
            return
        if now != left:
            left, since = now, time.monotonic()
        elif time.monotonic() - since > 90:
            return  # the checker reports the missing ones
        time.sleep(0.05)


def play(world, count):
    """play runs clients and faults, and then finishes all operations."""
    world.clients = [Client(world, number) for number in range(plan.CLIENTS)]
    consumers = [Consumer(world, name, number) for name, number in
                 (("once", 1), ("once", 2), ("together", 1), ("together", 2))]
    for thread in world.clients + consumers:
        thread.start()
    Watch(world, [thread.session for thread in world.clients + consumers]).start()
    try:
        world.fault.inject(count)
        world.closing.set()
        world.reached = int(max(c.at for c in world.clients))
        for client in world.clients:
            client.join(120)
            if client.is_alive():
                raise ServerError(f"{client.name} hangs")
        world.fault.end_faults()
        settle(world)
        await_delivery(world)
    finally:
        world.closing.set()
        world.stopped.set()
        for thread in world.clients + consumers:
            thread.join(30)


def read_log(world):
    """read_log counts unexpected errors in the servers' logs."""
    for path in world.fault.logs():
        with open(path, encoding="utf-8", errors="replace") as log:
            for line in log:
                error = re.search(r"PANIC|TRAP|terminated by signal (4|6|7|8|11)\b|\] XX\d{3} ", line)
                if error and not world.fault.is_expected(line):
                    world.fail(f"server log: {line.strip()}")


def tally(world, records, state):
    """tally counts the events of a round."""
    counts = world.counts
    answers = [r for r in records if r["what"] == "answer"]
    tokens = [r for r in records if r["what"] == "token"]
    counts["intents"] = sum(r["what"] in ("want", "claiming", "completing") for r in records)
    counts["effects"] = len(state["effects"])
    counts["acknowledged"] = len(answers)
    counts["replays"] = sum(r["how"] == "replay" for r in answers)
    counts["takeovers"] = sum(r["outcome"] == "taken_over" for r in tokens)
    counts["stale tokens rejected"] = sum(r["what"] == "refused" for r in records)
    counts["prepared"] = sum(r["what"] == "prepared" for r in records)
    counts["deliveries"] = len(state["handled"])
    counts["deadlocks"] = world.errors["40P01"]
    counts["serialization failures"] = world.errors["40001"]
    if world.fault.lossy:
        stored = state["keys"]
        counts["tokens issued twice"] = len(tokens) - len({r["token"] for r in tokens})
        counts["answers lost"] = sum(stored.get(r["key"]) != r["answer"] for r in answers)


def run_round(world, count):
    """run_round runs a round and checks it; returns the errors."""
    journal = os.path.join(world.directory, "journal")
    try:
        world.fault.set_up()
        world.fault.server.query("SELECT 1")
        play(world, count)
        [(state,)] = world.fault.server.query(STATE, list(plan.ANSWERED))
        with open(os.path.join(world.directory, "state"), "w", encoding="utf-8") as file:
            json.dump(state, file)
        records = load(journal)
        if state["prepared"]:
            world.fail(f"{state['prepared']} transactions are still prepared")
        for name, message in check.verdict(records, state, world.fault.steady, world.fault.lossy):
            world.fail(f"[{name}] {message}")
        tally(world, records, state)
        read_log(world)
        if world.failures:
            world.fault.trace()
    except (ServerError, psycopg2.Error, OSError) as error:
        world.fail(f"{type(error).__name__}: {error}")
    finally:
        world.fault.tear_down()
        world.journal.close()
    return world.failures
