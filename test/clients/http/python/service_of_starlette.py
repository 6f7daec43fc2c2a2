import asyncio
import json
import socket

import uvicorn
from pg_idempotency.starlette import idempotent
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


def made(status, headers, body):
    """Returns the response of Starlette."""
    if body is None or isinstance(body, bytes):
        return Response(body, status, headers)
    if hasattr(body, "__next__"):
        return StreamingResponse(body, status, headers)
    return JSONResponse(body, status, headers)


async def parsed(request):
    """Returns the body if it is JSON."""
    return json.loads(await request.body() or b"null") if "json" in request.headers.get("Content-Type", "") else None


def run(app):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print(listener.getsockname()[1], flush=True)
    asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve(sockets=[listener]))


def functions(service):
    """Returns path and endpoint of each function of the package."""
    for path in service.paths:
        async def call(request, path=path):
            status, body = await service.call(path, await request.json())
            return JSONResponse(body, status)

        yield path, call


def serve(service):
    def endpoint(db, options, handler):
        @idempotent(db, **options)
        async def answer(request, tx):
            return made(*await handler(await parsed(request), request.query_params, tx))

        return answer

    endpoints = [(path, endpoint(db, options, handler)) for path, db, options, handler in service.routes()]
    run(Starlette(routes=[Route(path, each, methods=["POST"]) for path, each in [*endpoints, *functions(service)]]))
