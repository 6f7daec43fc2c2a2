"""asyncpg. Behind PgBouncer before 1.21 in transaction mode, connect with statement_cache_size=0."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Callable

from . import core


class Transaction(core.AsyncTransaction):
    """The calls on an asyncpg.Connection; use it alone if your code has begun the transaction."""

    async def rows(self, sql, values):
        return [tuple(row) for row in await self.connection.fetch(sql, *values)]

    @asynccontextmanager
    async def open_savepoint(self):
        async with self.connection.transaction():
            yield


class Database(core.Database[Transaction]):
    """acquire() returns an asynchronous context manager of a connection, as the acquire() of an asyncpg.Pool."""

    is_async = True

    def __init__(self, acquire: Callable[[], Any]):
        self._acquire = acquire

    @asynccontextmanager
    async def open(self):
        async with AsyncExitStack() as stack:
            with core.connecting():
                connection = await stack.enter_async_context(self._acquire())
            await stack.enter_async_context(connection.transaction())
            yield (tx := Transaction(connection))
            if not tx.finished:
                await connection.execute("SELECT 1")  # fails if a statement has failed: COMMIT would roll back, and report no error
