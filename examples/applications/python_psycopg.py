#!/usr/bin/env python3
"""The application in Python, with psycopg 3. README.md describes its commands."""

import json
import os
import random
import re
import sys
import time
import urllib.error
import urllib.request

import psycopg

# The same request can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and
# failover; IK409, the first request is in progress; IK410, another owner took the lease over, whose result a retry returns; IK408, another
# consumer has the events of the batch.
TRANSIENT = re.compile(r"08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410")


class Unavailable(Exception):
    """The provider neither did nor refused what it was asked for."""


def retrying(work):
    """Calls work(connection) until it succeeds, with growing pauses, each time on a new connection. Raises what is not transient, and
    RETRY_SECONDS after the first failure the last error. work must begin with a claim of the same key, or with a fetch: an attempt whose answer was lost
    might have committed."""
    end = None
    pause = 0.05
    while True:
        try:
            with psycopg.connect(autocommit=True) as connection:
                return work(connection)
        except (psycopg.Error, Unavailable) as error:
            end = end or time.monotonic() + float(os.environ.get("RETRY_SECONDS", 30))
            state = getattr(error, "sqlstate", None)
            # Without an SQLSTATE, the connection was lost or not made.
            transient = TRANSIENT.match(state) if state else isinstance(error, (psycopg.OperationalError, Unavailable))
            if not transient or time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, 2)


def charge(key, customer, amount):
    """Charges a customer: key, charge and answer commit in one transaction."""
    def work(connection):
        with connection.transaction():
            replayed, response = connection.execute(
                "SELECT replayed, response::text FROM idempotency.claim('charge', %s, %s)",
                (key, json.dumps({"customer": customer, "amount": amount}))).fetchone()
            if replayed:
                return response
            number, = connection.execute("INSERT INTO charge (customer, amount) VALUES (%s, %s) RETURNING id",
                                         (customer, amount)).fetchone()
            return connection.execute("SELECT idempotency.complete('charge', %s, %s, 201)::text",
                                      (key, json.dumps({"charge": number}))).fetchone()[0]

    return retrying(work)


def ask_provider(key, amount):
    """Charges at the provider, which itself takes an idempotency key. Returns its charge, or None if it refuses."""
    request = urllib.request.Request(os.environ["PROVIDER"] + "/charges", json.dumps({"amount": amount}).encode(),
                                     {"Content-Type": "application/json", "Idempotency-Key": f'"{key}"'})
    try:
        # Shorter than the lease, so that the owner does not lose it meanwhile.
        with urllib.request.urlopen(request, timeout=10) as response:
            return json.load(response)["id"]
    except urllib.error.HTTPError as error:
        if error.code == 402:
            return None
        raise Unavailable(f"the provider answers {error.code}") from None
    except OSError as error:
        raise Unavailable(f"the provider: {error}") from None


def order(key, item, amount):
    """Orders an item, which the provider charges. No transaction is open meanwhile; a lease protects the order."""
    lease = os.environ.get("LEASE", "30 seconds")

    def work(connection):
        replayed, response, token, provider_key, provider_charge = connection.execute(
            "SELECT replayed, response::text, token, idempotency.derive_key('order', %s, 'charge'), state ->> 'charge' "
            "FROM idempotency.claim('order', %s, %s, lease => %s)",
            (key, key, json.dumps({"item": item, "amount": amount}), lease)).fetchone()
        if replayed:
            return response
        try:
            # After a takeover, the former owner might have got as far as the checkpoint.
            provider_charge = provider_charge or ask_provider(provider_key, amount)
        except Unavailable:
            # The checkpoint keeps the request: the provider might have charged it.
            connection.execute("SELECT idempotency.checkpoint('order', %s, %s, 'asked'), idempotency.release('order', %s, %s)",
                               (key, token, key, token))
            raise
        if provider_charge is None:
            return connection.execute("SELECT idempotency.fail('order', %s, %s, 402, token => %s)::text",
                                      (key, json.dumps({"error": "card_declined"}), token)).fetchone()[0]
        connection.execute("SELECT idempotency.checkpoint('order', %s, %s, 'charged', %s)",
                           (key, token, json.dumps({"charge": provider_charge})))
        with connection.transaction():
            # Refuses a former owner before it writes, and holds off a takeover until the commit.
            connection.execute("SELECT idempotency.renew('order', %s, %s, %s)", (key, token, lease))
            number, = connection.execute("INSERT INTO purchase (item, amount, provider_charge) VALUES (%s, %s, %s) RETURNING id",
                                         (item, amount, provider_charge)).fetchone()
            return connection.execute("SELECT idempotency.complete('order', %s, %s, 201, token => %s)::text",
                                      (key, json.dumps({"order": number}), token)).fetchone()[0]

    return retrying(work)


def consume(messages):
    """Handles a batch of messages that a queue delivers at least once: each has its effect once."""

    def work(connection):
        with connection.transaction():
            new = {row[0] for row in connection.execute("SELECT * FROM idempotency.once_many('consumer', %s, '30 days')",
                                                        ([message["id"] for message in messages],))}
            for message in messages:
                if message["id"] in new:
                    new.remove(message["id"])
                    connection.execute("INSERT INTO charge (customer, amount) VALUES (%s, %s)", (message["customer"], message["amount"]))

    retrying(work)
    # Acknowledge after the commit: a batch that is lost before is delivered again.
    return json.dumps({"acknowledged": len(messages)})


def events(subscription):
    """Charges orders at the provider, one for each event of a subscription. As many of these consumers as the subscription has partitions
    work at the same time."""
    # Longer than the provider needs for a batch: afterwards, another consumer gets its events.
    lease = os.environ.get("LEASE", "3 minutes")

    def work(connection):
        # Committed at once, so that the delivery counts even if this program dies.
        batch = connection.execute("SELECT batch, id, aggregate_id, payload FROM idempotency.fetch(%s, max_events => 10, "
                                   "wait => '10 seconds', lease => %s)", (subscription, lease)).fetchall()
        left = set()  # aggregates whose events have left the batch
        for number, event, aggregate, payload in batch:
            if aggregate in left:
                continue
            error, dead = None, False
            try:
                # The provider recognizes a redelivered event by its id.
                if ask_provider(event, payload["amount"]) is None:
                    error, dead = "card_declined", True
            except Unavailable as unavailable:
                error = str(unavailable)
            if error:
                connection.execute("SELECT idempotency.nack(%s, %s, %s, %s, dead => %s)", (subscription, number, event, error, dead))
                if aggregate:
                    left.add(aggregate)
        if batch:
            connection.execute("SELECT idempotency.ack(%s, %s)", (subscription, batch[0][0]))

    while True:
        retrying(work)


def main(command, *arguments):
    if command == "events":
        return events(*arguments)
    if command == "consume":
        return consume([json.loads(line) for line in sys.stdin])
    key, name, amount = arguments
    return {"charge": charge, "order": order}[command](key, name, int(amount))


if __name__ == "__main__":
    try:
        print(main(*sys.argv[1:]))
    except (psycopg.Error, Unavailable) as error:
        sys.exit(f"{getattr(error, 'sqlstate', None)}: {error}")
