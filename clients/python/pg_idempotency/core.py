"""The calls of the extension, written once for synchronous and asynchronous drivers.

All code that calls the database is a coroutine. With a synchronous driver its awaits never suspend, so run_sync() runs it to its end.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import re
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Iterator, NamedTuple, Optional
from uuid import UUID

# SQLSTATEs of errors after which the same call with the same key can succeed: lost connections, serialization failures and deadlocks, no
# resources, lock timeouts, shutdown, failover and a session that was idle too long; IK409, another owner is at work; IK410, another owner took the lease over, whose result a
# retry returns; IK408, another consumer has the events of the batch.
TRANSIENT = re.compile(r"08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410")

# Of these, those that say that the connection is lost.
LOST = re.compile(r"08|57P")

# What libpq, which has no SQLSTATE for it, says of a connection that is refused for good.
REFUSED = re.compile(r"authentication failed|no password supplied|no pg_hba\.conf entry|(role|database) .* does not exist|no such (user|database)|"
                     "not permitted to log in")


class JSON(str):
    """A text that is JSON, and passed byte for byte. Every other value is encoded, a str as a JSON string."""


class BadKey(TypeError):
    """A scope or key that is no text, with the SQLSTATE that the server has for it."""

    sqlstate = "IK400"


class Operation(NamedTuple):
    """The result of a claim. headers, response and state are texts, byte for byte."""

    outcome: str
    replayed: bool
    token: Optional[int]
    attempt: Optional[int]
    recovery_point: Optional[str]
    state: Optional[str]
    status: Optional[int]
    headers: Optional[str]
    response: Optional[str]
    failed: bool
    retry_after: Optional[int]
    expires_at: Optional[datetime]

    def json(self) -> Any:
        """Returns the response, parsed; numbers with a fraction are Decimal."""
        return parse(self.response)


class Event(NamedTuple):
    """An event of a subscription. payload and headers are texts, byte for byte."""

    batch: int
    seq: int
    id: str
    topic: str
    aggregate_id: Optional[str]
    type: Optional[str]
    payload: Optional[str]
    headers: Optional[str]
    attempt: int
    published_at: datetime

    def json(self) -> Any:
        """Returns the payload, parsed; numbers with a fraction are Decimal."""
        return parse(self.payload)


def parse(text: Optional[str]) -> Any:
    """Returns the value of a JSON text, None for None."""
    return None if text is None else json.loads(text, parse_float=Decimal)


def to_json(value: Any) -> Optional[str]:
    """Returns the JSON text of an argument. None is no value, as NULL is."""
    if value is None or isinstance(value, JSON):
        return value
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def name(value: Any) -> str:
    """Returns the text of a scope or key. The text of any other value, such as a coroutine that was not awaited, would be one key for all
    operations."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    if isinstance(value, UUID):
        return str(value)
    raise BadKey(f"a scope or key is a str, an int or a UUID, not {type(value).__name__}")


def seconds(value: Any) -> float:
    """Returns the seconds of a timedelta or a number."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    raise TypeError(f"pass a timedelta or a number of seconds, not {type(value).__name__}")


def interval(value: Any) -> Optional[str]:
    """Returns the text of a duration: a timedelta, a number of seconds, or a text such as "30 seconds"."""
    return value if value is None or isinstance(value, str) else f"{seconds(value):f} seconds"


def moment(value: Optional[datetime]) -> Optional[str]:
    """Returns the text of a time, whose zone must be known."""
    if value is not None and value.tzinfo is None:
        raise ValueError("pass a datetime with a time zone")
    return value and value.isoformat()


def same(value: Any) -> Any:
    return value


def run_sync(coroutine: Any) -> Any:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("synchronous code called an asynchronous database or function: use await, or async with")


async def settle(result: Any) -> Any:
    """Returns a result, awaited if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


def named(sql: str) -> str:
    """Returns a statement with the parameters %(p1)s … instead of $1 …."""
    return re.sub(r"\$(\d+)", r"%(p\1)s", sql)


def numbered(values: Any) -> dict:
    """Returns the parameters p1 …."""
    return {f"p{number}": value for number, value in enumerate(values, 1)}


class Block:
    """A context manager for with, and with an asynchronous database for async with."""

    def __init__(self, manager: Any):
        self._manager = manager

    def __enter__(self) -> Any:
        return run_sync(self._manager.__aenter__())

    def __exit__(self, *error: Any) -> Any:
        return run_sync(self._manager.__aexit__(*error))

    async def __aenter__(self) -> Any:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await self._manager.__aexit__(*error)


# How each argument is passed, and its type in SQL: casts that every driver takes.
ARGUMENTS = {
    **dict.fromkeys(("scope", "key", "step"), (name, "text")),
    "aggregate_id": (lambda value: None if value is None else name(value), "text"),
    **dict.fromkeys(("request", "response", "headers", "state", "payload"), (to_json, "text")),
    **dict.fromkeys(("lease", "wait", "retention", "retry_in"), (interval, "text::interval")),
    "keys": (lambda keys: [name(key) for key in keys], "text[]"),
    "event_id": (lambda value: value and str(value), "text::uuid"),
    "events": (list, "bigint[]"),
    "deliver_at": (moment, "text::timestamptz"),
    **dict.fromkeys(("token", "batch", "max_bytes"), (same, "bigint")),
    **dict.fromkeys(("status", "max_events"), (same, "integer")),
    **dict.fromkeys(("omit_large", "dead"), (same, "boolean")),
    **dict.fromkeys(("recovery_point", "subscription", "topic", "type", "error"), (same, "text")),
}
OPERATION = "outcome::text, replayed, token, attempt, recovery_point, state::text, status, headers::text, response::text, " \
    "failed, retry_after, expires_at"
EVENT = "batch, seq, id::text, topic, aggregate_id, type, payload::text, headers::text, attempt, published_at"


def first(rows: Any) -> Any:
    return rows[0][0]


def operation(rows: Any) -> Operation:
    return Operation(*rows[0])


@contextmanager
def connecting() -> Any:
    """A block that connects: asyncpg raises any OSError, which elsewhere is no sign of a lost connection."""
    try:
        yield
    except (OSError, asyncio.TimeoutError) as error:
        raise ConnectionError(str(error)) from error


def refuse_rollback(connection: Any) -> None:
    """Raises an error if a statement of the transaction has failed: COMMIT would roll back, and report no error. connection is one of
    psycopg or psycopg2; others are not judged."""
    if getattr(getattr(connection, "info", None), "transaction_status", None) == 3:  # PQTRANS_INERROR
        raise RuntimeError("the transaction is rolled back, because a statement in it had failed")


class Transaction:
    """The calls in one transaction of a database. connection is the driver's connection, or the session of the ORM: write through it.

    With an asynchronous database every method returns an awaitable. An adapter has rows(), which runs one statement with the parameters $1 …,
    and open_savepoint()."""

    is_async = False
    finished = False  # no statement has failed

    def __init__(self, connection: Any = None):
        self.connection = connection

    async def rows(self, sql: str, values: Any) -> Any:
        raise NotImplementedError

    def open_savepoint(self) -> Any:
        raise NotImplementedError

    def savepoint(self) -> Block:
        """Returns a block that rolls its writes back if it raises an error."""
        return Block(self.open_savepoint())

    async def _read(self, sql: str, values: Any, read: Any) -> Any:
        return read(await self.rows(sql, values))

    def _call(self, function: str, columns: str, read: Any, /, **arguments: Any) -> Any:
        """Calls a function of the extension; None is NULL."""
        texts, values = [], []
        for argument, value in arguments.items():
            passed, cast = ARGUMENTS[argument]
            values.append(passed(value))
            texts.append(f"{argument} => ${len(values)}::{cast}")
        found = self._read(f"SELECT {columns} FROM idempotency.{function}({', '.join(texts)}) AS r", values, read)
        return found if self.is_async else run_sync(found)

    def claim(self, scope, key, request, *, lease=None, wait=None, retention=None) -> Any:
        """Claims an operation, or returns its stored outcome. Raises the driver's error with IK409 while another owner is at work, and with
        IK422 if the key was used with another request. request is any JSON value; None compares nothing."""
        return self._call("claim", OPERATION, operation, scope=scope, key=key, request=request, lease=lease, wait=wait, retention=retention)

    def try_claim(self, scope, key, request, *, lease=None, wait=None, retention=None) -> Any:
        """Claims as claim() does, and returns the outcomes "in_progress" and "mismatched" instead of raising them."""
        return self._call("try_claim", OPERATION, operation, scope=scope, key=key, request=request, lease=lease, wait=wait, retention=retention)

    def complete(self, scope, key, response=None, status=200, headers=None, *, token=None, retention=None, omit_large=False) -> Any:
        """Stores the answer of an operation, and returns its text."""
        return self._call("complete", "r::text", first, scope=scope, key=key, response=response, status=status, headers=headers, token=token,
                          retention=retention, omit_large=omit_large)

    def fail(self, scope, key, response, status, headers=None, *, token=None, retention=None, omit_large=False) -> Any:
        """Stores a final failure, and returns its text. It undoes nothing: use a savepoint()."""
        return self._call("fail", "r::text", first, scope=scope, key=key, response=response, status=status, headers=headers, token=token,
                          retention=retention, omit_large=omit_large)

    def release(self, scope, key, *, token=None) -> Any:
        """Gives a claim up, so that the next request runs the operation."""
        return self._call("release", "r", first, scope=scope, key=key, token=token)

    def renew(self, scope, key, token, lease) -> Any:
        """Restarts a lease, and returns its new end."""
        return self._call("renew", "r", first, scope=scope, key=key, token=token, lease=lease)

    def checkpoint(self, scope, key, token, recovery_point, state=None) -> Any:
        """Stores a recovery point and a state for the next owner."""
        return self._call("checkpoint", "r", first, scope=scope, key=key, token=token, recovery_point=recovery_point, state=state)

    def derive_key(self, scope, key, step) -> Any:
        """Returns the key of one step of an operation, to pass to another service."""
        return self._call("derive_key", "r::text", first, scope=scope, key=key, step=step)

    def once(self, scope, key, retention=None) -> Any:
        """Stores the key of a message, and returns whether it is new. Write its effect in the same transaction."""
        return self._call("once", "r", first, scope=scope, key=key, retention=retention)

    def once_many(self, scope, keys, retention=None) -> Any:
        """Stores keys, and returns the new ones, each once, in the order of their texts."""
        texts = {name(key): key for key in keys}
        return self._call("once_many", "r", lambda rows: [texts[row[0]] for row in rows], scope=scope, keys=texts, retention=retention)

    def publish(self, topic, payload, *, aggregate_id=None, type=None, headers=None, event_id=None, deliver_at=None) -> Any:
        """Publishes an event in this transaction, and returns its id."""
        return self._call("publish", "r::text", first, topic=topic, payload=payload, aggregate_id=aggregate_id, type=type, headers=headers,
                          event_id=event_id, deliver_at=deliver_at)

    def fetch(self, subscription, *, max_events=100, wait=None, lease=30, max_bytes=10485760) -> Any:
        """Returns the next events of a subscription. Commit before handling them."""
        return self._call("fetch", EVENT, lambda rows: [Event(*row) for row in rows], subscription=subscription, max_events=max_events, wait=wait,
                          lease=lease, max_bytes=max_bytes)

    def has_more(self, subscription) -> Any:
        """Returns whether a fetch can take events; commit before it."""
        return self._call("has_more", "r", first, subscription=subscription)

    def ack(self, subscription, batch, events=None) -> Any:
        """Acknowledges the rest of a batch, or the events with these seq, and returns their number."""
        some = {} if events is None else {"events": events}
        return self._call("ack", "r", first, subscription=subscription, batch=batch, **some)

    def nack(self, subscription, batch, event_id, error=None, *, retry_in=None, dead=False) -> Any:
        """Reports the failure of an event, and returns the time of its retry. event_id None returns the rest of the batch."""
        return self._call("nack", "r", first, subscription=subscription, batch=batch, event_id=event_id, error=error, retry_in=retry_in, dead=dead)

    def extend(self, subscription, batch, lease) -> Any:
        """Restarts the lease of a batch, and returns its new end."""
        return self._call("extend", "r", first, subscription=subscription, batch=batch, lease=lease)


class Database:
    """Opens transactions, each on a connection that the driver or the ORM gives. An adapter has open()."""

    is_async = False

    def open(self) -> Any:
        """Returns an asynchronous context manager of a Transaction, which commits at its end, and rolls back after an error."""
        raise NotImplementedError

    def transaction(self) -> Block:
        """Returns a block of a transaction, for with or async with."""
        return Block(self.open())

    def end_thread(self) -> None:
        """Closes what a background thread has opened."""

    def run(self, coroutine: Any) -> Any:
        """Returns the result of a coroutine; with an asynchronous database, the coroutine."""
        return coroutine if self.is_async else run_sync(coroutine)

    async def sleep(self, pause: float) -> None:
        await asyncio.sleep(pause) if self.is_async else time.sleep(pause)


# ----------------------------------------------------------------
# Errors
# ----------------------------------------------------------------


def causes(error: Any, hidden: bool = False) -> Iterator[BaseException]:
    """Yields an error and those that it wraps, and with hidden also those during whose handling it was raised: a rollback that fails hides why."""
    while error is not None:
        yield error
        error = getattr(error, "orig", None) or error.__cause__ or (error.__context__ if hidden else None)


def own_state(error: BaseException) -> Optional[str]:
    """Returns the SQLSTATE that the error itself has, or None."""
    states = (getattr(error, attribute, None) for attribute in ("sqlstate", "pgcode"))
    return next((state for state in states if isinstance(state, str)), None)


def sqlstate(error: Optional[BaseException]) -> Optional[str]:
    """Returns the SQLSTATE of an error of any driver or ORM, or None."""
    return next(filter(None, map(own_state, causes(error))), None)


def is_lost(error: BaseException) -> bool:
    """Returns whether an error without SQLSTATE says that the connection was lost, or could not be made for now."""
    names, module, text = {each.__name__ for each in type(error).__mro__}, type(error).__module__, str(error)
    if "OperationalError" in names:
        return not REFUSED.search(text)
    if module == "sqlalchemy.exc":  # a pool without a free connection; a session that goes on after its connection was lost
        return "TimeoutError" in names or getattr(error, "code", None) == "8s2b"
    # asyncpg gets the server's last message while no call waits for one, and the next call fails.
    return "ConnectionError" in names or "InterfaceError" in names and "closed" in text or "InternalClientError" in names and "state" in text


def is_transient(error: Optional[BaseException]) -> bool:
    """Returns whether the same call with the same key can succeed later."""
    state = sqlstate(error)
    if state:
        return bool(TRANSIENT.match(state))
    return any(LOST.match(own_state(each) or "") or is_lost(each) for each in causes(error, hidden=True))


async def retry(work: Any, limit: float, sleep: Any, ended: Any = lambda: False) -> Any:
    """Awaits work() until it succeeds, as retrying() does, or until ended() is true."""
    end, pause = None, 0.05
    while True:
        try:
            return await settle(work())
        except Exception as error:
            end = end or time.monotonic() + limit
            if not is_transient(error) or time.monotonic() + pause > end or ended():
                raise
        await sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, 2)


async def block(pause: float) -> None:
    time.sleep(pause)


def retrying(work: Any, *, limit: float = 30) -> Any:
    """Calls work() until it succeeds, with growing pauses, and returns its result; await it if work is a coroutine function. Raises at once what
    is not transient, and limit seconds after the first failure the last error. work must open its own transaction and begin with a claim of
    the same key: an attempt whose answer was lost might have committed."""
    if inspect.iscoroutinefunction(work):
        return retry(work, limit, asyncio.sleep)
    return run_sync(retry(work, limit, block))
