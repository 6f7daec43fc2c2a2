#!/usr/bin/env python3
"""The charge in Django, with its ORM and psycopg2. README.md describes the command."""

import json
import os
import random
import re
import sys
import time

import django
from django.conf import settings

# An application has these in its settings; libpq reads the other variables.
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}})
django.setup()

from django.db import Error, InterfaceError, OperationalError, connection, models, transaction  # noqa: E402  Django is configured now

# The same request can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and
# failover; IK409, the first request is in progress.
TRANSIENT = re.compile(r"08|40|53|55P03|57P|58|25006|25P03|IK409")


class Charge(models.Model):
    customer = models.TextField()
    amount = models.BigIntegerField()

    class Meta:
        app_label = "application"
        db_table = "charge"


def sqlstate(error):
    """Returns the SQLSTATE of the driver's error that Django wraps, or None."""
    return getattr(error.__cause__, "pgcode", None)


def retrying(work):
    """Calls work() until it succeeds, with growing pauses, each time on a new connection. Raises what is not transient, and after
    RETRY_SECONDS the last error. work must begin with a claim of the same key: an attempt whose answer was lost might have committed."""
    end = time.monotonic() + float(os.environ.get("RETRY_SECONDS", 30))
    pause = 0.05
    while True:
        try:
            return work()
        except Error as error:
            connection.close()  # after a failover, a connection to the former primary would stay read-only
            state = sqlstate(error)
            # Without an SQLSTATE, the connection was lost or not made.
            transient = TRANSIENT.match(state) if state else isinstance(error, (OperationalError, InterfaceError))
            if not transient or time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, 2)


def call(sql, arguments):
    """Returns the row of a function of the extension."""
    with connection.cursor() as cursor:
        cursor.execute(sql, arguments)
        return cursor.fetchone()


def charge(key, customer, amount):
    """Charges a customer: key, charge and answer commit in one transaction."""

    # durable: the answer must not leave before the commit, and a retry needs a new transaction.
    @transaction.atomic(durable=True)
    def work():
        replayed, response = call("SELECT replayed, response::text FROM idempotency.claim('charge', %s, %s)",
                                  [key, json.dumps({"customer": customer, "amount": amount})])
        if replayed:
            return response
        made = Charge.objects.create(customer=customer, amount=amount)
        return call("SELECT idempotency.complete('charge', %s, %s, 201)::text", [key, json.dumps({"charge": made.id})])[0]

    return retrying(work)


if __name__ == "__main__":
    command, key, customer, amount = sys.argv[1:]
    try:
        print({"charge": charge}[command](key, customer, int(amount)))
    except Error as error:
        sys.exit(f"{sqlstate(error)}: {error}")
