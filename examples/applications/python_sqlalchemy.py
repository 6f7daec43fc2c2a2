#!/usr/bin/env python3
"""The charge in SQLAlchemy, with an ORM session and psycopg2. README.md describes the command."""

import json
import os
import random
import re
import sys
import time

from sqlalchemy import BigInteger, Column, Text, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, declarative_base

# The same request can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and
# failover; IK409, the first request is in progress.
TRANSIENT = re.compile(r"08|40|53|55P03|57P|58|25006|25P03|IK409")

engine = create_engine("postgresql+psycopg2://")
Base = declarative_base()


class Charge(Base):
    __tablename__ = "charge"
    id = Column(BigInteger, primary_key=True)
    customer = Column(Text)
    amount = Column(BigInteger)


def retrying(work):
    """Calls work(session) until it succeeds, with growing pauses, each time in a new session. Raises what is not transient, and after
    RETRY_SECONDS the last error. work must begin with a claim of the same key: an attempt whose answer was lost might have committed."""
    end = time.monotonic() + float(os.environ.get("RETRY_SECONDS", 30))
    pause = 0.05
    while True:
        try:
            # The block commits when work returns. The pool replaces lost connections.
            with Session(engine) as session, session.begin():
                return work(session)
        except DBAPIError as error:
            if error.orig.pgcode == "25006":  # after a failover, the pool has connections to the former primary, which is read-only
                engine.dispose()
            # Without an SQLSTATE, the connection was not made.
            transient = error.connection_invalidated or not error.orig.pgcode or TRANSIENT.match(error.orig.pgcode)
            if not transient or time.monotonic() + pause > end:
                raise
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, 2)


def charge(key, customer, amount):
    """Charges a customer: key, charge and answer commit in one transaction."""

    def work(session):
        claim = session.execute(text("SELECT replayed, response::text FROM idempotency.claim('charge', :key, :request)"),
                                {"key": key, "request": json.dumps({"customer": customer, "amount": amount})}).one()
        if claim.replayed:
            return claim.response
        made = Charge(customer=customer, amount=amount)
        session.add(made)
        session.flush()
        return session.execute(text("SELECT idempotency.complete('charge', :key, :response, 201)::text"),
                               {"key": key, "response": json.dumps({"charge": made.id})}).scalar_one()

    return retrying(work)


if __name__ == "__main__":
    command, key, customer, amount = sys.argv[1:]
    try:
        print({"charge": charge}[command](key, customer, int(amount)))
    except DBAPIError as error:
        sys.exit(f"{error.orig.pgcode}: {error}")
