"""psycopg 3. Behind PgBouncer before 1.21 in transaction mode, connect with prepare_threshold=None."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, AsyncContextManager, Callable, ContextManager, Coroutine, Union

from psycopg.rows import tuple_row

from . import core

if TYPE_CHECKING:
    from psycopg import AsyncConnection, Connection


class Transaction(core.Transaction):
    """The calls on a psycopg.Connection; use it alone if your code has begun the transaction."""

    connection: Connection[Any]

    async def rows(self, sql, values):
        with self.connection.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(core.named(sql), core.numbered(values)).fetchall()

    @asynccontextmanager
    async def open_savepoint(self):
        with self.connection.transaction():
            yield


class Database(core.Database[Transaction]):
    """connect() returns a context manager of a connection: the connection() of a ConnectionPool, or partial(psycopg.connect, "…")."""

    def __init__(self, connect: Callable[[], ContextManager[Connection[Any]]]):
        self._connect = connect

    @asynccontextmanager
    async def open(self):
        with self._connect() as connection, connection.transaction():
            yield Transaction(connection)
            core.refuse_rollback(connection)


class AsyncTransaction(core.AsyncTransaction):
    """The calls on a psycopg.AsyncConnection."""

    connection: AsyncConnection[Any]

    async def rows(self, sql, values):
        async with self.connection.cursor(row_factory=tuple_row) as cursor:
            await cursor.execute(core.named(sql), core.numbered(values))
            return await cursor.fetchall()

    @asynccontextmanager
    async def open_savepoint(self):
        async with self.connection.transaction():
            yield


class AsyncDatabase(core.Database[AsyncTransaction]):
    """connect() returns an asynchronous context manager of a connection, or a coroutine for one: the connection() of an AsyncConnectionPool, or
    partial(psycopg.AsyncConnection.connect, "…")."""

    is_async = True

    def __init__(self, connect: Callable[[], Union[AsyncContextManager[AsyncConnection[Any]], Coroutine[Any, Any, AsyncConnection[Any]]]]):
        self._connect = connect

    @asynccontextmanager
    async def open(self):
        async with await core.settle(self._connect()) as connection, connection.transaction():
            yield AsyncTransaction(connection)
            core.refuse_rollback(connection)
