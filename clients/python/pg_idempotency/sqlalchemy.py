"""SQLAlchemy 1.4 and 2, with any driver. The calls are in the transaction of the ORM's session, after its pending writes."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Callable

from sqlalchemy import text

from . import core

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


def bound(sql):
    """Returns a statement with the parameters :p1 …; text() would read :p1::text as another parameter."""
    return text(re.sub(r"\$(\d+)::(\w+(\[\])?)", r"CAST(:p\1 AS \2)", sql))


class Transaction(core.Transaction):
    """The calls in a Session; use it alone if your code has begun the transaction."""

    connection: Session

    async def rows(self, sql, values):
        self.connection.flush()
        return [tuple(row) for row in self.connection.execute(bound(sql), core.numbered(values))]

    @asynccontextmanager
    async def open_savepoint(self):
        with self.connection.begin_nested():
            yield


class Database(core.Database[Transaction]):
    """sessions() returns a new Session, as a sessionmaker does."""

    def __init__(self, sessions: Callable[[], Session]):
        self._sessions = sessions

    @asynccontextmanager
    async def open(self):
        with self._sessions() as session, session.begin():
            yield Transaction(session)
            if session.in_transaction():
                core.refuse_rollback(getattr(session.connection().connection, "dbapi_connection", None))


class AsyncTransaction(core.AsyncTransaction):
    """The calls in an AsyncSession."""

    connection: AsyncSession

    async def rows(self, sql, values):
        await self.connection.flush()
        return [tuple(row) for row in await self.connection.execute(bound(sql), core.numbered(values))]

    @asynccontextmanager
    async def open_savepoint(self):
        async with self.connection.begin_nested():
            yield


class AsyncDatabase(core.Database[AsyncTransaction]):
    """sessions() returns a new AsyncSession, as an async_sessionmaker does."""

    is_async = True

    def __init__(self, sessions: Callable[[], AsyncSession]):
        self._sessions = sessions

    @asynccontextmanager
    async def open(self):
        async with self._sessions() as session, session.begin():
            with core.connecting():
                await session.connection()
            yield (tx := AsyncTransaction(session))
            if not tx.finished and session.in_transaction():
                await session.execute(text("SELECT 1"))  # fails if a statement has failed: COMMIT would roll back, and report no error
