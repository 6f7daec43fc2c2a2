"""The calls of the extension, written once for synchronous and asynchronous drivers.

All code that calls the database is a coroutine. With a synchronous driver its awaits never suspend, so run_sync() runs it to its end.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import random
import re
import time
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, AsyncContextManager, Callable, Coroutine, Dict, Generic, Iterable, Iterator, List, NamedTuple, Optional, \
    Sequence, Tuple, TypeVar, Union, overload
from uuid import UUID

if TYPE_CHECKING:
    from typing import Concatenate, ParamSpec

    P = ParamSpec("P")

Key = Union[str, int, UUID]
Duration = Union[timedelta, float, str, None]  # a number is seconds
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

# SQLSTATEs of errors after which the same call with the same key can succeed: lost connections, serialization failures and deadlocks, no
# resources, lock timeouts, shutdown, failover and a session that was idle too long; IK409, another owner is at work; IK410, another owner took
# the lease over, whose result a retry returns; IK408, another consumer has the events of the batch.
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
    return None if value is None else value.isoformat()


def same(value: Any) -> Any:
    return value


def run_sync(coroutine: Coroutine[Any, Any, R]) -> R:
    """Runs a coroutine that never suspends, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("synchronous code called an asynchronous database or function: use await, or async with")


def synchronous(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """Returns an asynchronous method for a synchronous database."""

    @functools.wraps(method)
    def call(self: Any, *arguments: P.args, **named: P.kwargs) -> R:
        return run_sync(method(self, *arguments, **named))

    return call


async def settle(result: Any) -> Any:
    """Returns a result, awaited if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


def named(sql: str) -> str:
    """Returns a statement with the parameters %(p1)s … instead of $1 …."""
    return re.sub(r"\$(\d+)", r"%(p\1)s", sql)


def numbered(values: Any) -> dict:
    """Returns the parameters p1 …."""
    return {f"p{number}": value for number, value in enumerate(values, 1)}


class Block(Generic[T_co]):
    """A context manager for with, and with an asynchronous database for async with."""

    def __init__(self, manager: AsyncContextManager[T_co]):
        self._manager = manager

    async def __aenter__(self) -> T_co:
        return await self._manager.__aenter__()

    async def __aexit__(self, *error: Any) -> Optional[bool]:
        return await self._manager.__aexit__(*error)

    __enter__ = synchronous(__aenter__)
    __exit__ = synchronous(__aexit__)


# How each argument is passed, and its type in SQL: casts that every driver takes.
ARGUMENTS: Dict[str, Tuple[Callable[[Any], Any], str]] = {
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


@contextmanager
def connecting() -> Any:
    """A block that connects: asyncpg raises any OSError, which elsewhere is no sign of a lost connection."""
    try:
        yield
    except (OSError, asyncio.TimeoutError) as error:
        raise ConnectionError(str(error)) from error


def refuse_rollback(connection: Any, failed: bool = False) -> None:
    """Raises an error if a statement of the transaction has failed: COMMIT would roll back, and report no error. connection is one of
    psycopg or psycopg2; others are not judged, except by failed."""
    if failed or getattr(getattr(connection, "info", None), "transaction_status", None) == 3:  # PQTRANS_INERROR
        raise RuntimeError("the transaction is rolled back, because a statement in it had failed")


class Calls:
    """What the transactions of all databases have. connection is the driver's connection, or the session of the ORM: write through it. An
    adapter has rows(), which runs one statement with the parameters $1 …, and open_savepoint()."""

    finished = False  # no statement has failed

    def __init__(self, connection: Any = None):
        self.connection = connection

    async def rows(self, sql: str, values: Sequence[Any]) -> List[Any]:
        raise NotImplementedError

    def open_savepoint(self) -> AsyncContextManager[None]:
        raise NotImplementedError

    def savepoint(self) -> Block[None]:
        """Returns a block that rolls its writes back if it raises an error."""
        return Block(self.open_savepoint())

    async def _rows(self, function: str, columns: str, /, **arguments: Any) -> List[Any]:
        """Calls a function of the extension; None is NULL."""
        texts, values = [], []
        for argument, value in arguments.items():
            passed, cast = ARGUMENTS[argument]
            values.append(passed(value))
            texts.append(f"{argument} => ${len(values)}::{cast}")
        return await self.rows(f"SELECT {columns} FROM idempotency.{function}({', '.join(texts)}) AS r", values)

    async def _value(self, function: str, column: str, /, **arguments: Any) -> Any:
        return (await self._rows(function, column, **arguments))[0][0]


class AsyncTransaction(Calls):
    """The calls in one transaction of an asynchronous database."""

    async def claim(self, scope: Key, key: Key, request: Any, *, lease: Duration = None, wait: Duration = None,
                    retention: Duration = None) -> Operation:
        """Claims an operation, or returns its stored outcome. Raises the driver's error with IK409 while another owner is at work, and with
        IK422 if the key was used with another request. request is any JSON value; None compares nothing."""
        return Operation(*(await self._rows("claim", OPERATION, scope=scope, key=key, request=request, lease=lease, wait=wait,
                                            retention=retention))[0])

    async def try_claim(self, scope: Key, key: Key, request: Any, *, lease: Duration = None, wait: Duration = None,
                        retention: Duration = None) -> Operation:
        """Claims as claim() does, and returns the outcomes "in_progress" and "mismatched" instead of raising them."""
        return Operation(*(await self._rows("try_claim", OPERATION, scope=scope, key=key, request=request, lease=lease, wait=wait,
                                            retention=retention))[0])

    async def complete(self, scope: Key, key: Key, response: Any = None, status: int = 200, headers: Any = None, *,
                       token: Optional[int] = None, retention: Duration = None, omit_large: bool = False) -> Optional[str]:
        """Stores the answer of an operation, and returns its text."""
        return await self._value("complete", "r::text", scope=scope, key=key, response=response, status=status, headers=headers, token=token,
                                 retention=retention, omit_large=omit_large)

    async def fail(self, scope: Key, key: Key, response: Any, status: int, headers: Any = None, *, token: Optional[int] = None,
                   retention: Duration = None, omit_large: bool = False) -> Optional[str]:
        """Stores a final failure, and returns its text. It undoes nothing: use a savepoint()."""
        return await self._value("fail", "r::text", scope=scope, key=key, response=response, status=status, headers=headers, token=token,
                                 retention=retention, omit_large=omit_large)

    async def release(self, scope: Key, key: Key, *, token: Optional[int] = None) -> bool:
        """Gives a claim up, so that the next request runs the operation."""
        return await self._value("release", "r", scope=scope, key=key, token=token)

    async def renew(self, scope: Key, key: Key, token: int, lease: Duration) -> datetime:
        """Restarts a lease, and returns its new end."""
        return await self._value("renew", "r", scope=scope, key=key, token=token, lease=lease)

    async def checkpoint(self, scope: Key, key: Key, token: int, recovery_point: str, state: Any = None) -> bool:
        """Stores a recovery point and a state for the next owner."""
        return await self._value("checkpoint", "r", scope=scope, key=key, token=token, recovery_point=recovery_point, state=state)

    async def derive_key(self, scope: Key, key: Key, step: Key) -> str:
        """Returns the key of one step of an operation, to pass to another service."""
        return await self._value("derive_key", "r::text", scope=scope, key=key, step=step)

    async def once(self, scope: Key, key: Key, retention: Duration = None) -> bool:
        """Stores the key of a message, and returns whether it is new. Write its effect in the same transaction."""
        return await self._value("once", "r", scope=scope, key=key, retention=retention)

    async def once_many(self, scope: Key, keys: Iterable[Key], retention: Duration = None) -> List[Key]:
        """Stores keys, and returns the new ones, each once, in the order of their texts."""
        texts = {name(key): key for key in keys}
        return [texts[row[0]] for row in await self._rows("once_many", "r", scope=scope, keys=texts, retention=retention)]

    async def publish(self, topic: str, payload: Any, *, aggregate_id: Optional[Key] = None, type: Optional[str] = None, headers: Any = None,
                      event_id: Union[UUID, str, None] = None, deliver_at: Optional[datetime] = None) -> str:
        """Publishes an event in this transaction, and returns its id."""
        return await self._value("publish", "r::text", topic=topic, payload=payload, aggregate_id=aggregate_id, type=type, headers=headers,
                                 event_id=event_id, deliver_at=deliver_at)

    async def fetch(self, subscription: str, *, max_events: int = 100, wait: Duration = None, lease: Duration = 30,
                    max_bytes: int = 10485760) -> List[Event]:
        """Returns the next events of a subscription. Commit before handling them."""
        return [Event(*row) for row in await self._rows("fetch", EVENT, subscription=subscription, max_events=max_events, wait=wait, lease=lease,
                                                        max_bytes=max_bytes)]

    async def has_more(self, subscription: str) -> bool:
        """Returns whether a fetch can take events; commit before it."""
        return await self._value("has_more", "r", subscription=subscription)

    async def ack(self, subscription: str, batch: int, events: Optional[Iterable[int]] = None) -> int:
        """Acknowledges the rest of a batch, or the events with these seq, and returns their number."""
        some = {} if events is None else {"events": events}
        return await self._value("ack", "r", subscription=subscription, batch=batch, **some)

    async def nack(self, subscription: str, batch: int, event_id: Union[UUID, str, None], error: Optional[str] = None, *,
                   retry_in: Duration = None, dead: bool = False) -> Optional[datetime]:
        """Reports the failure of an event, and returns the time of its retry. event_id None returns the rest of the batch."""
        return await self._value("nack", "r", subscription=subscription, batch=batch, event_id=event_id, error=error, retry_in=retry_in,
                                 dead=dead)

    async def extend(self, subscription: str, batch: int, lease: Duration) -> datetime:
        """Restarts the lease of a batch, and returns its new end."""
        return await self._value("extend", "r", subscription=subscription, batch=batch, lease=lease)


class Transaction(Calls):
    """The same calls in one transaction of a synchronous database."""

    claim = synchronous(AsyncTransaction.claim)
    try_claim = synchronous(AsyncTransaction.try_claim)
    complete = synchronous(AsyncTransaction.complete)
    fail = synchronous(AsyncTransaction.fail)
    release = synchronous(AsyncTransaction.release)
    renew = synchronous(AsyncTransaction.renew)
    checkpoint = synchronous(AsyncTransaction.checkpoint)
    derive_key = synchronous(AsyncTransaction.derive_key)
    once = synchronous(AsyncTransaction.once)
    once_many = synchronous(AsyncTransaction.once_many)
    publish = synchronous(AsyncTransaction.publish)
    fetch = synchronous(AsyncTransaction.fetch)
    has_more = synchronous(AsyncTransaction.has_more)
    ack = synchronous(AsyncTransaction.ack)
    nack = synchronous(AsyncTransaction.nack)
    extend = synchronous(AsyncTransaction.extend)


class Database(Generic[T_co]):
    """Opens transactions, each on a connection that the driver or the ORM gives. An adapter has open()."""

    is_async = False

    def open(self) -> AsyncContextManager[T_co]:
        """Returns an asynchronous context manager of a transaction, which commits at its end, and rolls back after an error."""
        raise NotImplementedError

    def transaction(self) -> Block[T_co]:
        """Returns a block of a transaction, for with or async with."""
        return Block(self.open())

    def end_thread(self) -> None:
        """Closes what a background thread has opened."""

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
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


@overload
def retrying(work: Callable[[], Coroutine[Any, Any, R]], *, limit: float = 30) -> Coroutine[Any, Any, R]: ...


@overload
def retrying(work: Callable[[], R], *, limit: float = 30) -> R: ...


def retrying(work: Any, *, limit: float = 30) -> Any:
    """Calls work() until it succeeds, with growing pauses, and returns its result; await it if work is a coroutine function. Raises at once what
    is not transient, and limit seconds after the first failure the last error. work must open its own transaction and begin with a claim of
    the same key: an attempt whose answer was lost might have committed."""
    if inspect.iscoroutinefunction(work):
        return retry(work, limit, asyncio.sleep)
    return run_sync(retry(work, limit, block))
