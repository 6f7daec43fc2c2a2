"""
consumer.py
    Consumers that fetch events. Some write the effects in one transaction,
    acknowledge in another one, and deduplicate with once(); others do both in one
    transaction. The third way, a handler in the server, is in schema.sql.
"""

import threading
import time

import psycopg2

import plan
from session import Session, Stopped, Unknown

FETCH = ("SELECT batch, id, aggregate_id, payload ->> 'n', attempt"
         " FROM idempotency.fetch(%s, %s, wait => '100 ms', lease => '400 ms')")
HANDLED = "INSERT INTO torture.handled (subscription, event, aggregate, n) SELECT %s, %s, %s, %s::bigint"


class Consumer(threading.Thread):
    """One of the consumers of a subscription."""

    def __init__(self, world, subscription, number):
        super().__init__(name=f"consumer {subscription} {number}", daemon=True)
        self.world = world
        self.subscription = subscription
        self.session = Session(world)
        self.rng = plan.chance(world.seed, self.name)

    def run(self):
        """run handles batches until the round ends."""
        work = self.in_two if self.subscription == "once" else self.in_one
        try:
            while not self.world.stopped.is_set():
                try:
                    work()
                except (psycopg2.Error, Unknown) as error:
                    state = self.session.recover(error)
                    self.world.check_error(state, error)
                    time.sleep(0.02 * self.rng.random())
        except Stopped:
            pass
        except Exception as error:  # pylint: disable=broad-except
            self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
        finally:
            self.session.close()

    def fetch(self):
        """fetch returns the events of a batch, and its number."""
        since = self.world.journal.written
        rows = self.session.call("fetch", FETCH, self.subscription, self.rng.choice([1, 3, 20, 100]))
        if rows:
            self.note("given", [row[1] for row in rows], since=since)
        return rows, rows[0][0] if rows else None

    def ack(self, batch):
        """ack acknowledges, unless the batch was redelivered."""
        self.session.call("ack", "SELECT 1 FROM idempotency.ack(%s, %s)", self.subscription, batch)

    def note(self, what, events, **record):
        """note writes the state of events to the journal."""
        self.world.journal.note(what, subscription=self.subscription, events=events, epoch=self.session.epoch, **record)

    def in_two(self):
        """in_two handles a batch and commits, and then acknowledges it."""
        rows, batch = self.fetch()
        if not rows:
            return
        choice = self.rng.random()
        done = []
        self.session.run("BEGIN")
        for _, event, aggregate, n, attempt in (row[:5] for row in rows):
            if choice > 0.95 and attempt == 1 and event == rows[-1][1]:
                self.session.run("SELECT idempotency.nack('once', %s, %s, 'not the first time')", (batch, event))
                continue
            done.append(event)
            [(new, *_)] = self.session.call("once", "SELECT once FROM idempotency.once('consumer', %s)", event)
            if new:
                self.session.call("handle", HANDLED, self.subscription, event, aggregate, n)
        self.session.commit()
        if choice < 0.05:
            time.sleep(0.6)  # longer than the lease: the batch is redelivered
        elif choice < 0.1:
            return  # including this case
        self.ack(batch)
        self.note("acked", done)

    def in_one(self):
        """in_one fetches, handles and acknowledges in one transaction."""
        self.session.run("BEGIN")
        rows, batch = self.fetch()
        if not rows:
            self.session.run("ROLLBACK")
            return
        for _, event, aggregate, n, *_ in rows:
            self.session.call("handle", HANDLED, self.subscription, event, aggregate, n)
        if self.rng.random() < 0.05:
            time.sleep(0.6)
        self.ack(batch)
        self.session.commit()
        self.note("acked", [row[1] for row in rows])
