"""Work that outlives a transaction: operations under a lease, and consumers of events."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, Coroutine, Generic, Optional, TypeVar, Union, overload

from .core import AsyncTransaction, Block, Calls, Database, Duration, Event, Key, Operation, Transaction, is_transient, name, retry, run_sync, seconds, \
    settle, sqlstate, synchronous


class LeaseLost(Exception):
    """The lease has ended, or another owner has taken the operation over: stop, and write nothing."""

    sqlstate = "IK410"


class DeadLetter(Exception):
    """Raised by a handler of consume(): no retry can succeed, and the event becomes a dead letter at once."""


class Heartbeat:
    """Awaits beat() every `pause` seconds between start() and stop(): in a task, or with a synchronous database in a thread."""

    def __init__(self, db: Database, pause: float, beat: Any):
        self._db, self._pause, self._beat = db, pause, beat
        self._stopped: Any = asyncio.Event() if db.is_async else threading.Event()
        self._worker: Any = None

    def start(self) -> None:
        if self._db.is_async:
            self._worker = asyncio.ensure_future(self._in_task())
        else:
            self._worker = threading.Thread(target=self._in_thread, daemon=True)
            self._worker.start()

    async def _in_task(self) -> None:
        while not self._stopped.is_set():
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), self._pause)
                return
            await self._beat()

    def _in_thread(self) -> None:
        while not self._stopped.wait(self._pause):
            run_sync(self._beat())
        self._db.end_thread()

    async def stop(self) -> None:
        self._stopped.set()
        if self._db.is_async:
            await asyncio.wait([self._worker])
        else:
            self._worker.join()


if TYPE_CHECKING:
    Attributes = Operation
else:

    class Attributes:
        """The attributes of self.operation."""

        def __getattr__(self, attribute):
            if attribute in Operation._fields or attribute == "json":
                return getattr(self.operation, attribute)
            raise AttributeError(attribute)


L = TypeVar("L")
Tx = TypeVar("Tx", Transaction, AsyncTransaction)


class Held(Block[L], Attributes, Generic[L, Tx]):
    """An operation under a lease, as lease() returns it: a context manager.

    Its block begins with the claim, which has committed. A heartbeat renews the lease at every third of it. The attributes are those of
    Operation; if replayed is true, return the stored answer, and write nothing. End the operation by complete() or fail(): without, or with
    an error, the operation is released, so that the next request continues it, after a takeover with the last checkpoint.

    If the lease is lost, check() raises LeaseLost, and so does the end of the block. An asynchronous block is cancelled at once."""

    def __init__(self, db: Database[Tx], scope: Key, key: Key, request: Any, lease: Duration, wait: Duration, retention: Duration):
        super().__init__(self._open())
        self._db: Database[Any] = db
        self.scope, self.key, self._request = name(scope), name(key), request
        self._lease, self._wait, self._retention = seconds(lease), wait, retention
        self._owner: Any = None
        self._renewed = 0.0
        self._writing = self._done = self._lost = self._checkpoint = False

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[Any]:
        started = time.monotonic()
        async with self._db.open() as tx:
            self.operation = await settle(tx.claim(self.scope, self.key, self._request, lease=self._lease, wait=self._wait,
                                                   retention=self._retention))
        if self.operation.replayed:
            yield self
            return
        self._renewed = started
        self._owner = asyncio.current_task() if self._db.is_async else None
        heartbeat = Heartbeat(self._db, self._lease / 3, self._beat)
        heartbeat.start()
        try:
            yield self
            if not self._done:
                self.check()
                raise RuntimeError("the block of the lease ended without complete() or fail()")
        except BaseException as error:
            owner, self._owner = self._owner, None  # the heartbeat must not cancel what follows
            await heartbeat.stop()
            await self._give_up()
            if self._lost and isinstance(error, asyncio.CancelledError):
                if hasattr(owner, "uncancel"):  # from Python 3.11 on
                    owner.uncancel()
                raise LeaseLost(f'the lease of "{self.key}" is lost') from error
            raise
        await heartbeat.stop()

    async def _beat(self) -> None:
        """Renews the lease. A transaction of transaction() holds the key meanwhile, and with it the lease."""
        if self._writing or self._done or self._lost:
            return
        started = time.monotonic()
        try:
            async with self._db.open() as tx:
                await settle(tx.renew(self.scope, self.key, self.operation.token, self._lease))
            self._renewed = started
        except Exception as error:
            gone = sqlstate(error) == "IK410" or time.monotonic() > self._renewed + self._lease
            if gone and not self._done and not self._writing:
                self._lost = True
                if self._owner:
                    self._owner.cancel()

    async def _give_up(self) -> None:
        """Releases the operation after an error. A checkpoint keeps the request for the next owner, and for claim_abandoned()."""
        with suppress(Exception):
            async with self._db.open() as tx:
                owned = self.scope, self.key, self.operation.token
                if self.operation.recovery_point is None and not self._checkpoint:
                    await settle(tx.checkpoint(*owned, "failed"))
                await settle(tx.release(self.scope, self.key, token=self.operation.token))

    # What the owner calls

    def check(self) -> None:
        """Raises LeaseLost if the lease is lost."""
        if self._lost:
            raise LeaseLost(f'the lease of "{self.key}" is lost')

    @asynccontextmanager
    async def _owned(self) -> AsyncIterator[Any]:
        self.check()
        if self._writing:
            raise RuntimeError("a transaction of the lease is open, and holds the key: pass it on as tx")
        self._writing = True
        started = time.monotonic()
        try:
            async with self._db.open() as tx:
                await settle(tx.renew(self.scope, self.key, self.operation.token, self._lease))
                yield tx
            self._renewed = started
        except BaseException:
            self._done = False  # what complete() has stored is rolled back
            raise
        finally:
            self._writing = False

    def transaction(self) -> Block[Tx]:
        """Returns a block of a transaction that begins by renewing the lease: a former owner is refused before it writes. Call complete() or
        fail() in it with this transaction as tx."""
        return Block(self._owned())

    async def _in(self, tx: Any, call: Callable[[Any], Any]) -> Any:
        if tx is not None:
            return await settle(call(tx))
        async with self._owned() as tx:
            return await settle(call(tx))

    async def _end(self, tx: Any, function: str, *answer: Any) -> Any:
        text = await self._in(tx, lambda tx: getattr(tx, function)(self.scope, self.key, *answer, token=self.operation.token, omit_large=True))
        self._done = True
        return text


class AsyncLease(Held["AsyncLease", AsyncTransaction]):
    """A lease for async with."""

    async def complete(self, response: Any = None, status: int = 200, headers: Any = None, tx: Optional[Calls] = None) -> Optional[str]:
        """Stores the answer, in the transaction tx or in its own, and returns its text."""
        return await self._end(tx, "complete", response, status, headers)

    async def fail(self, response: Any, status: int, headers: Any = None, tx: Optional[Calls] = None) -> Optional[str]:
        """Stores a final failure, in the transaction tx or in its own, and returns its text."""
        return await self._end(tx, "fail", response, status, headers)

    async def checkpoint(self, recovery_point: str, state: Any = None, tx: Optional[Calls] = None) -> bool:
        """Stores a recovery point and a state for the next owner."""
        self._checkpoint = True
        return await self._in(tx, lambda tx: tx.checkpoint(self.scope, self.key, self.operation.token, recovery_point, state))

    async def derive_key(self, step: Key) -> str:
        """Returns the key of one step, to pass to another service: the same for every owner."""
        async with self._db.open() as tx:
            return await settle(tx.derive_key(self.scope, self.key, step))


class Lease(Held["Lease", Transaction]):
    """A lease for with."""

    complete = synchronous(AsyncLease.complete)
    fail = synchronous(AsyncLease.fail)
    checkpoint = synchronous(AsyncLease.checkpoint)
    derive_key = synchronous(AsyncLease.derive_key)


@overload
def lease(db: Database[Transaction], scope: Key, key: Key, request: Any, *, lease: Duration = 30, wait: Duration = None,
          retention: Duration = None) -> Lease: ...


@overload
def lease(db: Database[AsyncTransaction], scope: Key, key: Key, request: Any, *, lease: Duration = 30, wait: Duration = None,
          retention: Duration = None) -> AsyncLease: ...


def lease(db: Database[Any], scope: Key, key: Key, request: Any, *, lease: Duration = 30, wait: Duration = None,
          retention: Duration = None) -> Union[Lease, AsyncLease]:
    """Claims an operation under a lease of some seconds, for work outside of a transaction, such as a call to a payment provider."""
    return (AsyncLease if db.is_async else Lease)(db, scope, key, request, lease, wait, retention)


# ----------------------------------------------------------------
# Events
# ----------------------------------------------------------------


class Gone(Exception):
    """IK408: another consumer has the batch."""


class Consumer:
    """A loop over the events of a subscription."""

    def __init__(self, db: Database, subscription: str, handler: Any, max_events: int, wait: Any, lease: Any, stop: Any, until_empty: bool):
        self._db, self._subscription, self._handler = db, subscription, handler
        self._max_events, self._wait, self._lease = max_events, 0 if until_empty else wait, seconds(lease)
        self._stop, self._until_empty = stop, until_empty

    def _stopping(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    async def _do(self, call: Any, limit: float = 0) -> Any:
        """Returns the result of a call in a transaction, which is retried, and when the consumer stops no longer than the limit in seconds."""
        started = time.monotonic()

        async def work() -> Any:
            try:
                async with self._db.open() as tx:
                    return await settle(call(tx))
            except Exception as error:
                if sqlstate(error) == "IK408":
                    raise Gone() from None
                raise

        return await retry(work, float("inf"), self._db.sleep, lambda: self._stopping() and time.monotonic() > started + limit)

    async def run(self) -> None:
        while not self._stopping():
            try:
                # Committed at once, so that the delivery counts even if this program dies.
                events = await self._do(lambda tx: tx.fetch(self._subscription, max_events=self._max_events, wait=self._wait, lease=self._lease))
                if not events and self._until_empty and not await self._do(lambda tx: tx.has_more(self._subscription)):
                    return
            except Exception as error:
                if self._stopping() and is_transient(error):
                    return
                raise
            if events:
                with suppress(Gone):
                    await self._batch(events)

    async def _batch(self, events: Any) -> None:
        batch = events[0].batch
        gone = False

        async def beat() -> None:
            nonlocal gone
            try:
                async with self._db.open() as tx:
                    await settle(tx.extend(self._subscription, batch, self._lease))
            except Exception as error:
                gone = gone or sqlstate(error) == "IK408"

        heartbeat = Heartbeat(self._db, self._lease / 3, beat)
        heartbeat.start()
        done: list = []
        left: set = set()  # aggregates whose events have left the batch
        try:
            for event in events:
                if gone:
                    raise Gone()
                if self._stopping():
                    break
                if event.aggregate_id is None or event.aggregate_id not in left:
                    await self._handle(event, done, left)
        except BaseException:
            # The consumer must end: the others can have the rest at once.
            with suppress(Exception):
                await self._give_back(batch, done)
            raise
        finally:
            await heartbeat.stop()
        if self._stopping():
            await self._give_back(batch, done)
        else:
            await self._do(lambda tx: tx.ack(self._subscription, batch), self._lease)

    async def _handle(self, event: Any, done: list, left: set) -> None:
        try:
            await settle(self._handler(event))
            done.append(event.seq)
        except Exception as error:
            dead = isinstance(error, DeadLetter)
            if self._stopping() and not dead:
                return  # the event goes back with the rest, and counts no attempt
            message = (str(error) or type(error).__name__).replace("\0", "\ufffd").encode(errors="replace").decode()
            await self._do(lambda tx: tx.nack(self._subscription, event.batch, event.id, message, dead=dead), self._lease)
            left.add(event.aggregate_id)

    async def _give_back(self, batch: int, done: list) -> None:
        async def work(tx: Any) -> Any:
            await settle(tx.ack(self._subscription, batch, done))
            return await settle(tx.nack(self._subscription, batch, None))

        await self._do(work, self._lease)


@overload
def consume(db: Database[Transaction], subscription: str, handler: Callable[[Event], object], *, max_events: int = 10, wait: Duration = 5,
            lease: Duration = 30, stop: Optional[threading.Event] = None, until_empty: bool = False) -> None: ...


@overload
def consume(db: Database[AsyncTransaction], subscription: str, handler: Callable[[Event], object], *, max_events: int = 10, wait: Duration = 5,
            lease: Duration = 30, stop: Union[asyncio.Event, threading.Event, None] = None,
            until_empty: bool = False) -> Coroutine[Any, Any, None]: ...


def consume(db: Database[Any], subscription: str, handler: Callable[[Event], object], *, max_events: int = 10, wait: Duration = 5,
            lease: Duration = 30, stop: Any = None, until_empty: bool = False) -> Any:
    """Calls handler(event) for each event of a subscription until stop, a threading.Event or asyncio.Event, is set, or with until_empty until
    none is left; await it with an asynchronous database. An event is handled at least once: call once() with its id in the transaction of its
    effect, or pass the id on as the idempotency key. If the handler raises an error, the event is retried later, and dead-lettered after the
    last attempt or by DeadLetter. A heartbeat extends the lease of the batch. Lost connections are retried without end."""
    return db.run(Consumer(db, subscription, handler, max_events, wait, lease, stop, until_empty).run())
