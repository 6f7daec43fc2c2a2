"""Idempotency keys in PostgreSQL: a client of the extension idempotency, and of its portable edition.

The modules psycopg, asyncpg, sqlalchemy and django have the Database of each driver or ORM; starlette, flask and django the decorators.
"""

from .core import JSON, AsyncTransaction, Database, Event, Operation, Transaction, is_transient, retrying, sqlstate
from .work import AsyncLease, DeadLetter, Lease, LeaseLost, consume, lease

__all__ = ["JSON", "AsyncLease", "AsyncTransaction", "Database", "DeadLetter", "Event", "Lease", "LeaseLost", "Operation", "Transaction", "consume",
           "is_transient", "lease", "retrying", "sqlstate"]
__version__ = "1.0.0"
