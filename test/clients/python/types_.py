"""test/clients/pack_python has mypy check this file with the types of the installed package. A "type: ignore" stands at each mistake that mypy
must find."""

from functools import partial
from typing import List, Optional

import flask
import psycopg
from pg_idempotency import AsyncLease, Event, JSON, Lease, Operation, consume, lease, retrying, sqlstate
from pg_idempotency import asyncpg, flask as of_flask, starlette
from pg_idempotency.core import Key
from pg_idempotency.psycopg import AsyncDatabase, AsyncTransaction, Database, Transaction
from typing_extensions import assert_type

db = Database(partial(psycopg.connect, ""))
async_db = AsyncDatabase(partial(psycopg.AsyncConnection.connect, ""))


def charge(key: str) -> Optional[str]:
    with db.transaction() as tx:
        assert_type(tx, Transaction)
        operation = tx.claim("charge", key, {"amount": 25}, wait="2 seconds")
        assert_type(operation, Operation)
        assert_type(operation.attempt, Optional[int])
        assert_type(tx.once_many("mailer", ["a", 7]), List[Key])
        tx.connection.execute("SELECT 1").fetchone()
        tx.claim("charge", {"a": 1}, None)  # type: ignore[arg-type]
        tx.claim("charge", key)  # type: ignore[call-arg]
        tx.complete("charge", key, JSON("{}"), "201")  # type: ignore[arg-type]
        operation.respnse  # type: ignore[attr-defined]
        with tx.savepoint():
            return tx.complete("charge", key, {"charge": 1}, 201)


async def charge_async(key: str) -> bool:
    async with async_db.transaction() as tx:
        assert_type(tx, AsyncTransaction)
        assert_type(await tx.claim("charge", key, None), Operation)
        tx.once("charge", key).bit_length()  # type: ignore[attr-defined]
        return await tx.once("charge", key)


assert_type(retrying(partial(charge, "k")), Optional[str])


async def order() -> None:
    assert_type(await retrying(partial(charge_async, "k")), bool)
    async with lease(async_db, "order", "k", None) as held:
        assert_type(held, AsyncLease)
        assert_type(await held.derive_key("charge"), str)
        async with held.transaction() as tx:
            assert_type(await held.complete({"order": 1}, tx=tx), Optional[str])
    await consume(async_db, "billing", handle, until_empty=True)


def order_sync() -> None:
    with lease(db, "order", "k", None, lease=30) as held:
        assert_type(held, Lease)
        assert_type(held.state, Optional[str])
        assert_type(held.checkpoint("charged", {"charge": 1}), bool)
        with held.transaction() as tx:
            assert_type(held.complete({"order": 1}, tx=tx), Optional[str])
    assert_type(consume(db, "billing", handle), None)
    lease(db, "order", "k", None, lease=[30])  # type: ignore[call-overload]


def handle(event: Event) -> None:
    assert_type(event.aggregate_id, Optional[str])
    assert_type(sqlstate(ValueError(event.json())), Optional[str])


def user(request: flask.Request) -> str:
    return request.headers["X-User"]


@of_flask.idempotent(db, scope=user, lenient=True)
def create(tx: Transaction) -> str:
    return "created"


of_flask.idempotent(db)  # type: ignore[call-arg]
of_flask.idempotent(db, scope=user, lenent=True)  # type: ignore[call-arg]
of_flask.idempotent(async_db, scope=user)  # type: ignore[arg-type]
starlette.idempotent(async_db, scope=lambda request: "user", headers=["ETag"])
