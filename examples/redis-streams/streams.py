#!/usr/bin/env python3
"""Redis Streams between two databases, with psycopg 3 and redis-py. README.md describes the commands relay and consume."""

import os
import random
import re
import sys
import time

import psycopg
import redis

# The same call can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and failover;
# IK408, another relay has the events of the batch; IK409, an earlier call for the same event is in progress.
TRANSIENT = re.compile(r"08|40|53|55P03|57P|58|25006|25P03|IK408|IK409")
# The event itself is wrong: invalid data, a violated constraint, an error that the function raises.
POISON = re.compile(r"22|23|P0|IKFIN")
FIELDS = ("id", "topic", "aggregate_id", "type", "payload", "headers")


def repeating(work):
    """Calls work(connection, broker) for ever; after a transient error with new connections and growing pauses. Raises other errors."""
    pause = 0.05
    while True:
        try:
            with psycopg.connect(autocommit=True) as connection, redis.Redis.from_url(os.environ["REDIS"], decode_responses=True) as broker:
                while True:
                    work(connection, broker)
                    pause = 0.05
        except (psycopg.Error, redis.RedisError) as error:
            state = getattr(error, "sqlstate", None)
            # Without an SQLSTATE, a connection was lost or not made.
            if not (TRANSIENT.match(state) if state else isinstance(error, (psycopg.OperationalError, redis.RedisError))):
                raise
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, 2)


def relay(connection, broker, subscription):
    """Adds a batch to the streams events:TOPIC, in one MULTI: no event overtakes an earlier one."""
    broker.ping()  # while Redis is away, no delivery is counted
    events = connection.execute("SELECT batch, id::text, topic, aggregate_id, type, payload::text, headers::text "
                                "FROM idempotency.fetch(%s, wait => '10 seconds', lease => %s)",
                                (subscription, os.environ.get("LEASE", "30 seconds"))).fetchall()
    if not events:
        return
    batch, chunk, left = events[0][0], broker.pipeline(), set()
    for event in events:
        chunk.xadd(f"events:{event[2]}", {name: value for name, value in zip(FIELDS, event[1:]) if value is not None})
    try:
        results = chunk.execute(raise_on_error=False)
    except redis.RedisError:
        connection.execute("SELECT idempotency.nack(%s, %s, NULL)", (subscription, batch))  # counts as no event's failure
        raise
    for (_, event, _, aggregate, *_), result in zip(events, results):
        if isinstance(result, redis.ResponseError) and aggregate not in left:
            connection.execute("SELECT idempotency.nack(%s, %s, %s, %s)", (subscription, batch, event, str(result)))
            left.update({aggregate} - {None})  # later events of the aggregate leave the batch
    connection.execute("SELECT idempotency.ack(%s, %s)", (subscription, batch))


def consume(connection, broker, stream, group, function):
    """Calls a function for each message, which commits its effect, and acknowledges the message afterwards."""
    def read(after, **options):
        # One name for all: what an earlier process has read and not acknowledged comes first.
        return [message for _, messages in broker.xreadgroup(group, "consumer", {stream: after}, count=100, **options) for message in messages]

    if not any(known["name"] == group for known in (broker.xinfo_groups(stream) if broker.exists(stream) else [])):
        broker.xgroup_create(stream, group, id="0", mkstream=True)
    for number, fields in read("0") or read(">", block=5000):
        try:
            connection.execute(f"SELECT {function}(%s::uuid, %s, %s, %s, %s::json, %s::json)", [fields.get(name) for name in FIELDS])
        except psycopg.Error as error:
            if not POISON.match(error.sqlstate or ""):
                raise
            broker.xadd(f"{stream}:dead", {**fields, "error": str(error)})
        broker.xack(stream, group, number)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    repeating(lambda connection, broker: {"relay": relay, "consume": consume}[command](connection, broker, *arguments))
