"""Django: transactions of a database of the settings, and a decorator for views."""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Callable

from django.db import connections, transaction
from django.http import HttpResponse, UnreadablePostError

from . import core
from .http import Answer, Request, Rules, refuse_stream

if TYPE_CHECKING:
    from typing import Unpack

    from .http import Options


def refuse_rollback(using: str) -> None:
    """Raises an error if the end of atomic() would roll back, and report no error."""
    core.refuse_rollback(connections[using].connection, transaction.get_rollback(using=using))


def body_of(request: Any) -> bytes:
    """Returns the whole body. Django takes what a lost connection has sent for all of it."""
    if len(request.body) < int(request.META.get("CONTENT_LENGTH") or 0):
        raise UnreadablePostError("the connection was lost before the end of the body")
    return request.body


class Transaction(core.Transaction):
    """The calls on Django's connection; use it alone inside atomic()."""

    def __init__(self, using: str = "default"):
        super().__init__(connections[using])
        self._using = using

    async def rows(self, sql, values):
        with self.connection.cursor() as cursor:
            cursor.execute(core.named(sql), core.numbered(values))
            return cursor.fetchall()

    @asynccontextmanager
    async def open_savepoint(self):
        with transaction.atomic(using=self._using):
            yield
            refuse_rollback(self._using)


class Database(core.Database[Transaction]):
    """The database `using` of the settings."""

    def __init__(self, using: str = "default"):
        self._using = using

    @asynccontextmanager
    async def open(self):
        if not transaction.get_autocommit(using=self._using) and not connections[self._using].in_atomic_block:
            raise RuntimeError(f'the database "{self._using}" has AUTOCOMMIT off: atomic() would not commit')
        with transaction.atomic(using=self._using, durable=True):
            yield Transaction(self._using)
            refuse_rollback(self._using)

    def end_thread(self):
        connections[self._using].close()


def idempotent(db: core.Database[Transaction] = Database(), **options: Unpack[Options]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a view, which writes through Django's ORM. Do not use it within ATOMIC_REQUESTS: the answer is sent after the commit.
    Options: http.Rules."""
    rules = Rules(db, **options)

    def decorate(view: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(view)
        def answer(request, *args, **kwargs):
            def handle(tx: Any) -> Answer:
                request.idempotency = tx
                made = view(request, *args, **kwargs)
                if callable(getattr(made, "render", None)):  # of a template, or of Django REST framework
                    made = made.render()
                if made.streaming:
                    refuse_stream()
                return Answer(made.status_code, made.items(), made.content, made)

            asks = Request(request, request.method, request.path, request.META.get("QUERY_STRING", ""), request.headers.get("Idempotency-Key"),
                           request.headers.get("Content-Type", ""), body_of(request))
            found = core.run_sync(rules.answer(asks, handle))
            if found.native is not None:
                return found.native
            made = HttpResponse(found.body, status=found.status)
            del made["Content-Type"]
            for name, value in found.headers:
                made[name] = value
            return made

        return answer

    return decorate
