"""The service of test/middleware/run with FastAPI."""

import asyncio
import functools
import os
import re
import socket
import sys

import psycopg
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../examples/middleware"))
from idempotent_starlette import idempotent  # noqa: E402

app = FastAPI()


class Connect:
    """What a pool's connection() returns: connects, and closes at the end of the block."""

    def __init__(self, host):
        self.host = host

    async def __aenter__(self):
        self.connection = await psycopg.AsyncConnection.connect(host=self.host, autocommit=True, prepare_threshold=None)
        return self.connection

    async def __aexit__(self, *error):
        await self.connection.close()


async def charge(request, connection):
    body = await request.json()
    action = body.get("action")
    if action == "elsewhere":
        try:
            async with connect() as other:
                await other.execute("INSERT INTO charge (customer, amount) VALUES (%s, %s)", (body["customer"], body["amount"]))
        except psycopg.Error as error:
            return JSONResponse({"error": error.sqlstate}, 500)
        raise RuntimeError("a bug after the write")
    cursor = await connection.execute("INSERT INTO charge (customer, amount) VALUES (%s, %s) RETURNING id", (body["customer"], body["amount"]))
    number, = await cursor.fetchone()
    await connection.execute("SELECT pg_sleep(%s)", (1 if action == "slow" else 0,))
    if re.fullmatch("[0-9A-Z]{5}", action or ""):
        await connection.execute("SELECT fail_with(%s)", (action,))
    if action == "decline":
        return JSONResponse({"error": "card_declined"}, 402)
    if action == "overload":
        return JSONResponse({"error": "overload"}, 503)
    cursor = await connection.execute("SELECT count(*) > 0 FROM trouble")
    if action == "crash" and (await cursor.fetchone())[0]:
        raise RuntimeError("a bug")
    return JSONResponse({"id": number, "customer": body["customer"]}, 201, {"Location": f"/charges/{number}"})


@app.exception_handler(RuntimeError)
async def internal_error(request: Request, error: RuntimeError):
    return JSONResponse({"error": str(error)}, 500)


connect = functools.partial(Connect, os.environ["PGHOST"])
app.post("/charges")(idempotent(connect)(charge))
app.post("/lenient")(idempotent(connect, lenient=True, scope="lenient")(charge))
app.post("/waiting")(idempotent(connect, wait="30 seconds")(charge))
app.post("/unavailable")(idempotent(functools.partial(Connect, "/nonexistent"))(charge))

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="critical")).serve(sockets=[listener]))
