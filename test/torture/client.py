"""
client.py
    Clients: each executes its operations in order, and retries each one until it has
    the response.

The journal contains each step of a client before the call, and its result right after
the call. An attempt can fail in any way; the next one starts with a claim, which
determines the state of the operation.
"""

import threading
import time

import psycopg2

import plan
from session import Session, Stopped, Unknown

CLAIM = ("SELECT replayed, concat_ws('|', status, headers, response) AS answer"
         " FROM idempotency.claim(%s, %s, %s, wait => '500 ms')")
WRITE = ("INSERT INTO torture.effect SELECT %s, %s, %s,"
         " idempotency.publish('torture', %s, %s), %s")
COMPLETE = "SELECT complete::text FROM idempotency.complete(%s, %s, %s, 201, '{ }', token => %s)"

ATTEMPTS = 10  # before a client defers an operation to the end of the round


class Client(threading.Thread):
    """A client; its operations with leases are in owner.py, consumers in consumer.py."""

    def __init__(self, world, number):
        super().__init__(name=f"client {number}", daemon=True)
        self.world = world
        self.number = number
        self.session = Session(world)
        self.progress = 0  # number of the next operation; infinite at the end
        self.at = 0  # the last operation that it tried
        self.reliable = False  # causes no faults by itself
        self.prepared = {}  # undecided transactions: gid to decision, key, answer, attempt, known
        self.failure = None

    # -- the sequence of operations

    def run(self):
        """run tries the operations until the faults have ended."""
        try:
            while not self.world.closing.is_set():
                if plan.is_wanted(self.world.seed, self.progress, self.number):
                    self.world.await_others(self)
                    self.try_operation(self.progress)
                self.progress += 1
                self.at = self.progress
        except Stopped:
            pass
        except Exception as error:  # pylint: disable=broad-except
            self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
        finally:
            self.progress = float("inf")
            self.session.close()

    def try_operation(self, number):
        """try_operation tries one operation until it has a response or too many attempts."""
        kind = plan.type_of(self.world.seed, number, self.world.types)
        for count in range(ATTEMPTS):
            if self.try_once(kind, number, count) or self.world.closing.is_set():
                break
        time.sleep(plan.chance(self.world.seed, "rest", number, self.number).random() * self.world.rest)

    def try_once(self, kind, number, count):
        """try_once makes one attempt; true if the operation has ended."""
        rng = plan.chance(self.world.seed, "attempt", number, self.number, count)
        attempt = f"{number}.{self.number}.{count}"
        try:
            self.decide_prepared()
            return self.world.attempts_at[kind](self, plan.keys_of(kind, number), attempt, rng)
        except (psycopg2.Error, Unknown) as error:
            state = self.session.recover(error)
            self.note("error", attempt=attempt, state=state)
            self.world.check_error(state, error)
            time.sleep(0.005 + 0.02 * rng.random())
            return False

    def note(self, what, **record):
        """note writes to the journal, with the client and its server."""
        return self.world.journal.note(what, client=self.number, epoch=self.session.epoch, **record)

    # -- operations of one transaction

    def answered(self, key, answer, attempt, how):
        """answered writes the response of a key to the journal; always true."""
        self.note("answer", key=key, answer=answer, attempt=attempt, how=how)
        return True

    def begin(self, kind, key, attempt, rng, isolation="READ COMMITTED"):
        """begin opens a transaction and claims; returns the answer if it is replayed."""
        self.note("want", key=key, attempt=attempt)
        self.session.run(f"BEGIN ISOLATION LEVEL {isolation}")
        [(replayed, answer, *_)] = self.session.call("claim", CLAIM, kind, key, plan.request_of(key, rng))
        if not replayed:
            return None
        self.session.commit()
        return answer

    def write(self, key, attempt, token=None, aggregate=None, n=None):
        """write writes the effect and publishes an event."""
        payload = '{"key": "%s", "n": %s}' % (key, "null" if n is None else n)
        self.session.call("write", WRITE, key, attempt, token, payload, aggregate, self.world.padding)

    def complete(self, kind, key, attempt, token=None):
        """complete stores a unique response and returns it."""
        body = '{"attempt" :  "%s"}' % attempt
        self.session.call("complete", COMPLETE, kind, key, body, token)
        return "201|{ }|" + body

    def plain(self, keys, attempt, rng):
        """plain is the whole operation in one transaction."""
        answer = self.begin("plain", keys[0], attempt, rng)
        if answer is not None:
            return self.answered(keys[0], answer, attempt, "replay")
        self.write(keys[0], attempt)
        answer = self.complete("plain", keys[0], attempt)
        self.session.commit()
        return self.answered(keys[0], answer, attempt, "owner")

    def procedure(self, keys, attempt, rng):
        """procedure is the whole operation in one call."""
        self.note("want", key=keys[0], attempt=attempt)
        [(replayed, answer)] = self.session.call(
            "procedure", "SELECT replayed, answer FROM torture.pay(%s, %s, %s, %s)",
            keys[0], attempt, plan.request_of(keys[0], rng), self.world.padding)
        return self.answered(keys[0], answer, attempt, "replay" if replayed else "owner")

    def decline(self, keys, attempt, rng):
        """decline rolls its writes back and stores a final failure."""
        answer = self.begin("decline", keys[0], attempt, rng)
        if answer is not None:
            return self.answered(keys[0], answer, attempt, "replay")
        body = '{"declined" :  "%s"}' % attempt
        self.session.run("SAVEPOINT s")
        self.write(keys[0], attempt)
        self.session.run("ROLLBACK TO s")
        self.session.call("complete", "SELECT fail::text FROM idempotency.fail('decline', %s, %s, 402)", keys[0], body)
        self.session.commit()
        return self.answered(keys[0], "402|" + body, attempt, "owner")

    def deadlock(self, keys, attempt, rng):
        """deadlock increments two rows, which it locks in any order; its event has the count."""
        answer = self.begin("deadlock", keys[0], attempt, rng)
        if answer is not None:
            return self.answered(keys[0], answer, attempt, "replay")
        rows = ["deadlock 1", "deadlock 2"]
        rng.shuffle(rows)
        count = {}
        for row in rows:
            [(count[row],)] = self.session.call(
                "write", "UPDATE torture.counter SET n = n + 1 WHERE id = %s RETURNING n", row)
        self.write(keys[0], attempt, aggregate="deadlock 1", n=count["deadlock 1"])
        answer = self.complete("deadlock", keys[0], attempt)
        self.session.commit()
        return self.answered(keys[0], answer, attempt, "owner")

    def serial(self, keys, attempt, rng):
        """serial reads two rows and changes one, so that concurrent ones conflict."""
        answer = self.begin("serial", keys[0], attempt, rng, "SERIALIZABLE")
        if answer is not None:
            return self.answered(keys[0], answer, attempt, "replay")
        self.session.run("SELECT sum(n) FROM torture.counter WHERE id LIKE 'serial%'")
        self.session.call("write", "UPDATE torture.counter SET n = n + 1 WHERE id = %s",
                          rng.choice(["serial 1", "serial 2"]))
        self.write(keys[0], attempt)
        answer = self.complete("serial", keys[0], attempt)
        self.session.commit()
        return self.answered(keys[0], answer, attempt, "owner")

    # -- the inbox

    def inbox(self, keys, attempt, _rng):
        """inbox has its effect if the key is new."""
        self.note("want", key=keys[0], attempt=attempt)
        self.session.run("BEGIN")
        [(new, *_)] = self.session.call("once", "SELECT once FROM idempotency.once('inbox', %s)", keys[0])
        if new:
            self.write(keys[0], attempt)
        self.session.commit()
        return self.answered(keys[0], "seen", attempt, "owner" if new else "replay")

    def batch(self, keys, attempt, rng):
        """batch has the effects of its new keys."""
        for key in keys:
            self.note("want", key=key, attempt=attempt)
        order = rng.sample(keys, len(keys))
        self.session.run("BEGIN")
        self.session.run("SET LOCAL lock_timeout = '2s'")
        rows = self.session.call("once", "SELECT once_many FROM idempotency.once_many('batch', %s)", order)
        new = [row[0] for row in rows]
        for key in new:
            self.write(key, attempt)
        self.session.commit()
        for key in keys:
            self.answered(key, "seen", attempt, "owner" if key in new else "replay")
        return True

    # -- two-phase commit, whose second phase can be deferred

    def decide_prepared(self):
        """decide_prepared ends transactions that are, or might be, prepared."""
        for gid, (decision, key, answer, attempt, _) in list(self.prepared.items()):
            since = self.note("deciding", key=key, attempt=attempt)
            try:
                self.session.call("decide", f"{decision} PREPARED '{gid}'")
                if decision == "COMMIT":
                    self.answered(key, answer, attempt, "owner")
            except psycopg2.Error as error:
                if error.pgcode != "42704":  # it has ended, or was never prepared
                    raise
                self.session.recover(error)
                self.note("gone", key=key, attempt=attempt, since=since)
            del self.prepared[gid]

    def two_phases(self, keys, attempt, rng):
        """two_phases prepares a transaction, then ends it."""
        answer = self.begin("prepared", keys[0], attempt, rng)
        if answer is not None:
            return self.answered(keys[0], answer, attempt, "replay")
        self.write(keys[0], attempt)
        answer = self.complete("prepared", keys[0], attempt)
        decision = "COMMIT" if self.reliable else rng.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"])
        self.prepared[attempt] = (decision, keys[0], answer, attempt, False)
        self.world.decisions[attempt] = self.prepared[attempt]
        self.session.call("prepare", f"PREPARE TRANSACTION '{attempt}'")
        self.prepared[attempt] = (decision, keys[0], answer, attempt, True)
        self.note("prepared", key=keys[0], attempt=attempt, decision=decision)
        self.session.call("prepared", "SELECT 1")
        time.sleep(0.02 * rng.random())
        self.decide_prepared()
        return decision == "COMMIT"
