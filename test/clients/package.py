#!/usr/bin/python3
"""test/clients/package.py

Tests of what clients/conformance.json cannot ask for of the package for Python: types of arguments, blocks and errors, a consumer that is
stopped. test/clients/pack_python runs it with the package that it has installed, beside a server.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import sys
import threading
import time
import traceback
import uuid
from datetime import datetime, timedelta, timezone

import asyncpg
import django
import django.conf
import flask
import psycopg
from django.db import IntegrityError, connection
from django.db.transaction import atomic
from django.http import HttpResponse, UnreadablePostError
from django.template import engines
from django.template.response import SimpleTemplateResponse
from django.test import RequestFactory
from pg_idempotency import JSON, DeadLetter, LeaseLost, consume, is_transient, lease, retrying, sqlstate
from pg_idempotency.core import run_sync
from pg_idempotency.django import idempotent as django_idempotent
from pg_idempotency.flask import idempotent as flask_idempotent
from pg_idempotency.psycopg import AsyncDatabase, Database
from pg_idempotency.starlette import IdempotencyMiddleware, transaction
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.routing import Route


django.conf.settings.configure(
    ALLOWED_HOSTS=["*"], DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": os.environ["PGDATABASE"]}},
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}])
django.setup()


def insert(tx, customer):
    return tx.connection.execute("INSERT INTO charge (customer, amount) VALUES (%s, 1)", (customer,))


DATABASES = {"synchronous": lambda: Database(psycopg.connect), "asynchronous": lambda: AsyncDatabase(psycopg.AsyncConnection.connect)}


async def settle(result):
    return await result if inspect.isawaitable(result) else result


class Tests:
    """The cases, each in its own scope. With a synchronous database, no await suspends."""

    def __init__(self, kind, case):
        self.db = DATABASES[kind]()
        self.scope = f"{kind}/{case}/{uuid.uuid4()}"

    @contextlib.asynccontextmanager
    async def transaction(self):
        """A transaction, opened as an application does: with or async with."""
        if self.db.is_async:
            async with self.db.transaction() as tx:
                yield tx
        else:
            with self.db.transaction() as tx:
                yield tx

    async def do(self, name, *arguments, **options):
        """Returns the result of one call in its own transaction."""
        async with self.transaction() as tx:
            return await settle(getattr(tx, name)(*arguments, **options))

    async def charges(self):
        async with self.transaction() as tx:
            return (await tx.rows("SELECT count(*) FROM charge WHERE customer = $1::text", [self.scope]))[0][0]

    async def fails(self, state, awaitable):
        try:
            await awaitable
        except Exception as error:
            assert sqlstate(error) == state, (sqlstate(error), error)
            return error
        raise AssertionError(f"no error with SQLSTATE {state}")

    async def charge(self, key="k", amount=1, crash=False):
        """Charges once, and returns the outcome and the response."""
        async with self.transaction() as tx:
            operation = await settle(tx.claim(self.scope, key, {"amount": amount}))
            if not operation.replayed:
                await settle(insert(tx, self.scope))
                text = await settle(tx.complete(self.scope, key, JSON('{"paid":  25.10}'), 201, {"Location": "/1"}))
                if crash:
                    raise RuntimeError("a bug")
                return operation.outcome, text
            assert (operation.status, json.loads(operation.headers)) == (201, {"Location": "/1"}), operation
            return operation.outcome, operation.response

    async def once_and_replayed(self):
        try:
            await self.charge(crash=True)
            raise AssertionError("no error")
        except RuntimeError:
            assert await self.charges() == 0
        assert await self.charge() == ("claimed", '{"paid":  25.10}')
        assert await self.charge() == ("replayed", '{"paid":  25.10}')
        assert await self.charges() == 1
        await self.fails("IK422", self.charge(amount=2))
        assert (await self.do("try_claim", self.scope, "k", {"amount": 2})).outcome == "mismatched"
        # Each value is a key of its own, and no object is one.
        for key in (42, uuid.UUID(int=7), "ë" * 255):
            assert await self.do("once", self.scope, key)
            assert not await self.do("once", self.scope, str(key), timedelta(days=1))
        for key in (None, True, 1.5, ["a"], {}, b"k"):
            try:
                await self.do("once", self.scope, key)
                raise AssertionError(f"{key!r} is a key")
            except TypeError:
                pass
        await self.fails("IK400", self.do("once", self.scope, ""))
        await self.fails("IK428", self.do("claim", self.scope, "open", None))

    async def failure(self):
        async with self.transaction() as tx:
            await settle(tx.claim(self.scope, "k", None))
            try:
                if self.db.is_async:
                    async with tx.savepoint():
                        await settle(insert(tx, self.scope))
                        raise KeyError("declined")
                with tx.savepoint():
                    await settle(insert(tx, self.scope))
                    raise KeyError("declined")
            except KeyError:
                await settle(tx.fail(self.scope, "k", {"error": "declined"}, 402))
        operation = await self.do("claim", self.scope, "k", None)
        assert operation.failed and operation.status == 402 and operation.json() == {"error": "declined"}, operation
        assert await self.charges() == 0

    async def failed_statement(self):
        """A transaction whose statement has failed is not committed silently."""
        try:
            async with self.transaction() as tx:
                assert await settle(tx.once(self.scope, "k"))
                with contextlib.suppress(psycopg.Error):
                    await settle(tx.connection.execute("SELECT 1/0"))
            raise AssertionError("no error")
        except RuntimeError as error:
            assert "rolled back" in str(error), error
        assert await self.do("once", self.scope, "k")

    async def once_many(self):
        ids = ["b", 7, "a", "b"]
        assert await self.do("once_many", self.scope, ids, timedelta(days=30)) == [7, "a", "b"]
        assert await self.do("once_many", self.scope, [*ids, "c"]) == ["c"]
        assert await self.do("once_many", self.scope, []) == []

    async def wait_for_the_owner(self):
        async with self.transaction() as tx:
            assert (await settle(tx.claim(self.scope, "k", "mine", lease=timedelta(seconds=30)))).token
        operation = await self.do("try_claim", self.scope, "k", "mine")
        assert operation.outcome == "in_progress" and 0 < operation.retry_after <= 30 and isinstance(operation.retry_after, int), operation
        error = await self.fails("IK409", self.do("claim", self.scope, "k", None, wait=0))
        assert is_transient(error)
        # the rollback after a lost connection can hide it
        try:
            try:
                raise ConnectionResetError
            finally:
                raise RuntimeError("no rollback")
        except RuntimeError as hiding:
            assert is_transient(hiding)
        # libpq has no SQLSTATE for what the server says before it accepts a connection; some errors hide the SQLSTATE of another
        hidden = RuntimeError()
        hidden.__context__ = asyncpg.AdminShutdownError()
        for lost in (psycopg.OperationalError("Connection refused"), asyncpg.InterfaceError("connection is closed"), hidden,
                     asyncpg.InternalClientError("cannot switch to state 3; another operation (17) is in progress")):
            assert is_transient(lost), lost
        for final in (RuntimeError(), psycopg.OperationalError('FATAL:  password authentication failed for user "a"'),
                      asyncpg.InvalidPasswordError(), asyncpg.InternalClientError("unexpected error while performing authentication: x")):
            assert not is_transient(final), final
        attempts = []

        async def attempt():
            attempts.append(1)
            return await self.do("claim", self.scope, "k", "mine" if len(attempts) < 3 else "another", wait=0)

        async def retried():
            return await settle(retrying(attempt if self.db.is_async else lambda: run_sync(attempt())))

        await self.fails("IK422", retried())
        assert len(attempts) == 3, attempts

    async def background_tasks(self):
        """What an application does after its answer, it does after the commit, and not if that fails."""
        if not self.db.is_async:
            return
        seen = []

        async def later():
            seen.append(await self.charges())

        async def handler(request):
            tx = transaction(request)
            await insert(tx, self.scope)
            if request.url.path == "/open":
                await tx.claim(self.scope, "open", None)
            return Response(status_code=201, background=BackgroundTask(later))

        async def receive():
            return {"type": "http.request", "body": b""}

        async def send(message):
            sent.append(message)

        routes = [Route(path, handler, methods=["POST"]) for path in ("/", "/open")]
        app, sent = IdempotencyMiddleware(Starlette(routes=routes), self.db, scope=lambda request: self.scope), []

        def post(path, key):
            return app({"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [(b"idempotency-key", key)]}, receive, send)

        await post("/", b'"k"')
        await post("/", b'"k"')
        assert [message["status"] for message in sent[::2]] == [201, 201] and seen == [1], (sent, seen)
        await self.fails("IK428", post("/open", b'"k2"'))
        assert seen == [1], seen

    # Answers of the frameworks

    async def answers_of_flask(self):
        if self.db.is_async:
            return
        app = flask.Flask(__name__)
        app.logger.disabled = True
        app.register_error_handler(410, lambda error: ({"gone": True}, 410))

        @app.post("/<int:status>")
        @flask_idempotent(self.db, scope=lambda request: self.scope)
        def answer(status, tx):
            insert(tx, self.scope)
            if status >= 400:
                flask.abort(status)
            made = flask.Response(status=status)
            made.headers["Content-Disposition"] = 'attachment; filename="\u0451"'
            return made

        def post(status):
            made = app.test_client().post(f"/{status}", headers={"Idempotency-Key": f'"{status}"'})
            return made.status_code, made.get_data(), made.headers.get("Idempotent-Replayed")

        # A refusal is an answer, as the application makes it.
        for status, part in ((410, b'"gone"'), (404, b"Not Found")):
            first, second = post(status), post(status)
            assert first[0] == status and part in first[1] and first[2] is None, first
            assert second == (*first[:2], "true"), second
        # What cannot be sent is not stored.
        assert post(200)[0] == 500
        assert await self.charges() == 0
        assert await self.do("once", self.scope, "200")

    async def answers_of_django(self):
        if self.db.is_async:
            return
        factory = RequestFactory()

        def post(view, body="a=1", length=None):
            asked = factory.post("/", body, content_type="application/x-www-form-urlencoded", HTTP_IDEMPOTENCY_KEY='"k"')
            asked.META["CONTENT_LENGTH"] = length or asked.META["CONTENT_LENGTH"]
            return django_idempotent(scope=lambda request: self.scope)(view)(asked)

        def template(request):
            return SimpleTemplateResponse(engines["django"].from_string("hello"), status=201)

        def swallowed(request):
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO charge (customer, amount) VALUES (%s, 1)", [self.scope])
            with contextlib.suppress(IntegrityError), atomic(savepoint=False), connection.cursor() as cursor:
                cursor.execute("INSERT INTO charge VALUES (0)")
            return HttpResponse()

        # A body that the connection has cut is no request; writes that Django has undone are no success.
        for error, arguments in ((UnreadablePostError, (template, "a=1", 4)), (RuntimeError, (swallowed,))):
            try:
                post(*arguments)
                raise AssertionError(f"no {error}")
            except error:
                assert await self.charges() == 0
        for replayed in (None, "true"):
            made = post(template)
            assert (made.status_code, made.content, made.get("Idempotent-Replayed")) == (201, b"hello", replayed), made
        connection.close()

    # Leases

    @contextlib.asynccontextmanager
    async def lease(self, **options):
        held = lease(self.db, self.scope, "k", {"item": 1}, **options)
        if self.db.is_async:
            async with held:
                yield held
        else:
            with held:
                yield held

    async def pause(self, condition):
        """Waits until a condition holds; an asynchronous case lets its heartbeat run."""
        end = time.monotonic() + 60
        while not await settle(condition()):
            assert time.monotonic() < end, "not in time"
            await self.db.sleep(0.02)

    async def lease_is_renewed(self):
        async with self.lease(lease=1) as held:
            assert held.outcome == "claimed" and held.attempt == 1
            key = await settle(held.derive_key("pay"))
            assert key == await settle(self.do("derive_key", self.scope, "k", "pay"))
            await settle(held.checkpoint("paid", {"payment": 7}))
            end = time.monotonic() + 2.5
            await self.pause(lambda: time.monotonic() > end)
            assert (await self.do("try_claim", self.scope, "k", {"item": 1})).outcome == "in_progress"
            held.check()
            if self.db.is_async:
                async with held.transaction() as tx:
                    await settle(insert(tx, self.scope))
                    assert await held.complete({"order": 1}, 201, tx=tx) == '{"order": 1}'
            else:
                with held.transaction() as tx:
                    await settle(insert(tx, self.scope))
                    assert held.complete({"order": 1}, 201, tx=tx) == '{"order": 1}'
        async with self.lease(lease=1) as held:
            assert held.replayed and held.status == 201 and held.json() == {"order": 1}
        assert await self.charges() == 1

    async def lease_of_failed_work(self):
        try:
            async with self.lease() as held:
                raise KeyError("the provider is down")
        except KeyError:
            pass
        async with self.lease() as held:
            assert (held.outcome, held.recovery_point, held.attempt) == ("taken_over", "failed", 2), held.operation
            await settle(held.fail({"error": "declined"}, 402))
        operation = await self.do("claim", self.scope, "k", {"item": 1})
        assert operation.failed and operation.status == 402
        self.scope += "/forgotten"
        try:
            async with self.lease():
                pass
            raise AssertionError("a lease without an outcome")
        except RuntimeError as error:
            assert "without complete" in str(error)

    async def lease_in_its_transaction(self):
        """A transaction of the lease inside of another one would wait for itself."""
        try:
            async with self.lease() as held:
                if self.db.is_async:
                    async with held.transaction():
                        await held.complete()
                else:
                    with held.transaction():
                        held.complete()
            raise AssertionError("no error")
        except RuntimeError as error:
            assert "as tx" in str(error), error

    async def lease_is_lost(self):
        """Another owner takes over while the heartbeat cannot renew, and the first one must not complete."""
        ran_on = False
        try:
            async with self.lease(lease=1) as held:
                # Another owner, whose token is not the one of this lease.
                held.operation = held.operation._replace(token=held.operation.token - 1)
                await self.pause(lambda: held._lost)
                ran_on = self.db.is_async
                await settle(held.complete({"order": 1}))
            raise AssertionError("no error")
        except LeaseLost as error:
            assert sqlstate(error) == "IK410" and is_transient(error)
        assert not ran_on
        assert (await self.do("try_claim", self.scope, "k", None)).outcome != "replayed"

    # Events

    async def refused_connection(self):
        """A consumer that the server refuses for good ends with the error."""
        connect = psycopg.AsyncConnection.connect if self.db.is_async else psycopg.connect
        for wrong in ({"user": "absent"}, {"dbname": "nothing"}):
            try:
                await settle(consume(type(self.db)(functools.partial(connect, **wrong)), self.scope, print, until_empty=True))
                raise AssertionError("no error")
            except psycopg.OperationalError as error:
                assert "does not exist" in str(error), error

    async def events(self):
        if os.environ.get("EDITION") == "portable":
            return  # the role of the clients is no consumer there
        name = self.scope
        async with self.transaction() as tx:
            await tx.rows("SELECT idempotency.subscribe($1::text, ARRAY[$1::text], max_attempts => 3, retry_delay => '0')", [name])
        later = datetime.now(timezone.utc) + timedelta(days=1)
        async with self.transaction() as tx:
            ids = [await settle(tx.publish(name, JSON(f'{{"n":  {n}.0}}'), aggregate_id=n // 2, type="t", headers={"h": 1})) for n in range(6)]
            await settle(tx.publish(name, None, deliver_at=later, event_id=uuid.uuid4()))
        seen, failures, stop = [], {0: 1, 2: 9}, threading.Event()

        async def handle(event):
            number = int(event.json()["n"])
            seen.append(number)
            assert event.id in ids and event.topic == name and event.payload == f'{{"n":  {number}.0}}', event
            if number == 4:
                raise DeadLetter("no retry")
            if failures.get(number, 0) > 0:
                failures[number] -= 1
                raise ValueError("later")

        handler = handle if self.db.is_async else lambda event: run_sync(handle(event))
        await settle(consume(self.db, name, handler, until_empty=True, lease=5))
        assert sorted(seen) == [0, 0, 1, 2, 2, 2, 3, 4, 5], seen
        assert seen.index(1) > 1 and seen.index(3) > seen.index(2), seen
        # A consumer that stops gives the rest back, and what it has handled is not delivered again.
        async with self.transaction() as tx:
            for n in range(3):
                await settle(tx.publish(name, {"n": n}))
        seen.clear()

        async def last(event):
            seen.append(event.seq)
            stop.set()

        await settle(consume(self.db, name, last if self.db.is_async else lambda event: run_sync(last(event)), stop=stop))
        assert len(seen) == 1
        rest = await self.do("fetch", name)
        assert len(rest) == 2 and seen[0] not in [event.seq for event in rest] and {event.attempt for event in rest} == {1}, rest
        await self.do("ack", name, rest[0].batch)
        await self.fails("IK408", self.do("ack", name, rest[0].batch + 1))


CASES = [name for name, value in vars(Tests).items() if inspect.iscoroutinefunction(value) and not inspect.signature(value).parameters.keys() - {"self"}
         and name not in ("charges", "charge")]


def main():
    passed = True
    for kind in DATABASES:
        for case in CASES:
            tests = Tests(kind, case)
            try:
                work = getattr(tests, case)()
                asyncio.run(work) if tests.db.is_async else run_sync(work)
            except Exception:
                passed = False
                traceback.print_exc()
                print(f"wrong: {kind}, {case}", file=sys.stderr)
    return passed


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
