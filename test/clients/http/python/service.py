"""What the services of Python do, whatever the framework: clients/README.md describes the paths. With a synchronous database no await
suspends, and a framework calls run_sync()."""

import asyncio
import base64
import contextlib
import json
import random
import re
import threading

from pg_idempotency import DeadLetter, consume, is_transient, lease, retrying, sqlstate
from pg_idempotency.core import retry, run_sync, settle


class Service:
    """The handlers with a client. Each of routes gets the parsed body, the query and the transaction, and returns status, headers and body: bytes, a
    value of JSON, None, or an iterator of a stream."""

    def __init__(self, client, unavailable):
        self.db, self.insert, self.elsewhere = client
        self.paths = {f"/{name}": getattr(self, name) for name in ("run", "retrying", "open", "once", "once_many", "lease", "publish", "consume")}
        self.handlers = {
            "/charges": ({}, self.charge),
            "/lenient": ({"scope": lambda request: "lenient", "lenient": True}, self.charge),
            "/scopeless": ({"scope": lambda request: ""}, self.charge),
            "/waiting": ({"wait": "30 seconds"}, self.charge),
            "/unavailable": ({"db": unavailable[0]}, self.charge),
            "/omitting": ({"omit": ["/sent_at", "/meta/trace"]}, self.charge),
            "/answer": ({}, self.answer),
            "/listed": ({"headers": ["X-Request-Id"]}, self.answer),
            "/stream": ({}, self.stream),
        }

    def routes(self):
        """Returns path, database, options and handler of each endpoint."""
        for path, (options, handler) in self.handlers.items():
            options = {"db": self.db, "scope": lambda request: request.headers.get("X-User") or "http", **options}
            yield path, options.pop("db"), options, handler

    async def query(self, tx, sql, *values):
        return (await tx.rows(sql, values))[0][0]

    async def troubled(self):
        async with self.db.open() as tx:
            return await self.query(tx, "SELECT count(*) > 0 FROM trouble")

    # The handlers behind the header Idempotency-Key

    async def charge(self, body, query, tx):
        charge, action = (body["customer"], body["amount"]), body.get("action")
        if action == "elsewhere":
            try:
                await self.elsewhere(*charge)
            except Exception as error:
                return 500, {}, {"error": sqlstate(error)}
            raise RuntimeError("a bug after the write")
        number = await self.insert(tx, *charge)
        await self.query(tx, "SELECT pg_sleep($1::integer)::text", 1 if action == "slow" else 0)
        if re.fullmatch("[0-9A-Z]{5}", action or ""):
            await self.query(tx, "SELECT fail_with($1::text)::text", action)
        if action == "duplicate":
            try:
                await self.query(tx, "SELECT fail_with('23505')::text")
            except Exception:
                return 409, {}, {"error": "duplicate"}
        if action == "missing":
            open("/nonexistent/file")
        if action == "decline":
            return 402, {}, {"error": "card_declined"}
        if action == "overload":
            return 503, {}, {"error": "overload"}
        if action == "limit":
            return 429, {"Retry-After": "7"}, {"error": "limit"}
        if action == "crash" and await self.query(tx, "SELECT count(*) > 0 FROM trouble"):
            raise RuntimeError("a bug")
        return 201, {"Location": f"/charges/{number}"}, {"id": number, "customer": charge[0]}

    async def answer(self, body, query, tx):
        await self.insert(tx, "answer", 1)
        headers = {"ETag": '"1"', "Set-Cookie": "session=1", "X-Request-Id": str(random.random())}
        if "encoding" in query:
            headers["Content-Encoding"] = query["encoding"]
        if "body" not in query:
            return 204, headers, None
        return 200, {**headers, "Content-Type": query["type"]}, base64.urlsafe_b64decode(query["body"] + "==")

    async def stream(self, body, query, tx):
        await self.insert(tx, "stream", 1)
        return 200, {"Content-Type": "text/plain"}, iter([b"a", b"b"])

    # The functions of the package

    async def call(self, path, body):
        """Returns status and body."""
        try:
            return 200, await self.paths[path](body)
        except Exception as error:
            return (503 if is_transient(error) else 500), {"error": sqlstate(error) or str(error)}

    async def _run(self, key, request):
        async with self.db.open() as tx:
            operation = await settle(tx.claim("run", key, request))
            if operation.replayed:
                return operation
            try:
                async with tx.savepoint():
                    await self.insert(tx, request["customer"], request["amount"])
                    if request.get("action") == "decline":
                        raise ValueError("card_declined")
                    if request.get("action"):
                        await self.query(tx, "SELECT fail_with($1::text)::text", request["action"])
            except ValueError as error:
                text = await settle(tx.fail("run", key, {"error": str(error)}, 402))
                return operation._replace(failed=True, status=402, response=text)
            text = await settle(tx.complete("run", key, {"customer": request["customer"]}))
            return operation._replace(status=200, response=text)

    async def run(self, body):
        operation = await self._run(body.pop("key"), body)
        return {"replayed": operation.replayed, "failed": operation.failed, "status": operation.status, "response": operation.json()}

    async def retrying(self, body):
        key, attempts = body.pop("key"), []

        async def attempt():
            attempts.append(1)
            return await self._run(key, {**body, **({"action": "40001"} if len(attempts) < 3 else {})})

        operation = await settle(retrying(attempt if self.db.is_async else lambda: run_sync(attempt())))
        return {"attempts": len(attempts), "response": operation.json()}

    async def open(self, body):
        async with self.db.open() as tx:
            await settle(tx.claim("open", body["key"], None))
            await self.insert(tx, body["customer"], body["amount"])

    async def once(self, body):
        async with self.db.open() as tx:
            new = await settle(tx.once("once", body["key"]))
            if body.get("fail"):
                with contextlib.suppress(Exception):
                    await self.query(tx, "SELECT fail_with('23505')::text")
            elif new:
                await self.insert(tx, "once", 1)
        return {"new": new}

    async def once_many(self, body):
        async with self.db.open() as tx:
            return {"new": await settle(tx.once_many("once", body["keys"]))}

    async def lease(self, body):
        request, action = {"customer": body["customer"], "amount": body["amount"]}, body.get("action")
        held = lease(self.db, "lease", body["key"], request, lease=1, wait=0)
        if self.db.is_async:
            async with held:
                response = await self._hold(held, request, action)
        else:
            with held:
                response = run_sync(self._hold(held, request, action))
        return {"replayed": held.replayed, "attempt": held.attempt, "state": json.loads(held.state or "null"), "response": json.loads(response)}

    async def _hold(self, held, request, action):
        if held.replayed:
            return held.response
        if action == "decline":
            return await settle(held.fail({"error": "card_declined"}, 402))
        await settle(held.checkpoint("charged", {"charge": "ch_1"}))
        while action == "hold" and await self.troubled():
            held.check()
            await self.db.sleep(0.05)
        if action == "crash" and await self.troubled():
            raise RuntimeError("a bug")
        if action == "ignore":
            with contextlib.suppress(Exception):
                async with held.transaction() as tx:
                    await self.insert(tx, *request.values())
                    await settle(held.complete({"customer": request["customer"]}, tx=tx))
                    raise RuntimeError("a bug")
            return "null"
        async with held.transaction() as tx:
            await self.insert(tx, *request.values())
            return await settle(held.complete({"customer": request["customer"]}, tx=tx))

    async def publish(self, body):
        async with self.db.open() as tx:
            found = await settle(tx.publish(body["topic"], body["payload"], aggregate_id=body["aggregate"]))
        return {"published": bool(re.fullmatch("[0-9a-f-]{36}", found))}

    async def consume(self, body):
        handled, stop = [], asyncio.Event() if self.db.is_async else threading.Event()

        async def handle(event):
            customer = event.json()["customer"]
            if body.get("stop"):
                stop.set()
                raise RuntimeError("stopped")
            if customer == "poison":
                raise DeadLetter("poison \0 \udcff")
            if customer == "flaky" and event.attempt == 1:
                raise RuntimeError("flaky")
            async with self.db.open() as tx:
                if await settle(tx.once("consume", event.id)):
                    await self.insert(tx, customer, 1)
            handled.append({"customer": customer, "attempt": event.attempt})

        handler = handle if self.db.is_async else lambda event: run_sync(handle(event))
        await settle(consume(self.db, body["subscription"], handler, until_empty=True, stop=stop))
        return {"handled": handled}
