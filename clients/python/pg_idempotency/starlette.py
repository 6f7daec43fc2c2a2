"""Starlette and FastAPI: a decorator for handlers, and an ASGI middleware."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Callable, Coroutine
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .core import AsyncTransaction, Database
from .http import Answer, Rules, refuse_stream
from .http import Request as Asked

if TYPE_CHECKING:
    from typing import Unpack

    from .http import Options

    Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def asked(request: Request) -> Asked:
    """Returns what the rules need of a request. Its body stays readable."""
    key = ", ".join(request.headers.getlist("Idempotency-Key")) or None
    raw = request.scope.get("raw_path")  # the path of a mounted application may be a part
    path = unquote(raw.partition(b"?")[0].decode("latin-1")) if raw else request.scope["path"]
    return Asked(request, request.method, path, request.scope["query_string"].decode("latin-1"), key,
                 request.headers.get("Content-Type", ""), await request.body())


def response(answer: Answer) -> Response:
    """Returns the response to send."""
    if answer.native is not None:
        return answer.native
    made = Response(answer.body, answer.status)
    for name, value in answer.headers:
        made.headers[name] = value
    return made


def idempotent(db: Database[AsyncTransaction], **options: Unpack[Options]) -> Callable[[Callable[[Request, Any], Any]], Handler]:
    """Decorates a handler(request, tx) of Starlette, which returns a Response. It writes through tx.connection. Options: http.Rules."""
    rules = Rules(db, **options)

    def decorate(handler: Callable[[Request, Any], Any]) -> Handler:
        @functools.wraps(handler)
        async def answer(request: Request) -> Response:
            async def handle(tx: Any) -> Answer:
                try:
                    made = await handler(request, tx)
                except HTTPException as error:
                    made = JSONResponse({"detail": error.detail}, error.status_code, getattr(error, "headers", None))
                if not hasattr(made, "body"):
                    refuse_stream()
                return Answer(made.status_code, made.headers.items(), made.body, made)

            return response(await rules.answer(await asked(request), handle))

        # FastAPI reads the parameters from the signature: the request alone.
        del answer.__wrapped__
        answer.__annotations__ = {"request": Request}
        return answer

    return decorate


def transaction(request: Request) -> Any:
    """A dependency of FastAPI: the transaction of IdempotencyMiddleware. Write through its connection."""
    return request.scope["pg_idempotency"]


def writes(request: Request) -> bool:
    return request.method in ("POST", "PATCH")


class IdempotencyMiddleware:
    """Makes requests idempotent: with when, those for which when(request) is true, otherwise POST and PATCH. What the application does after
    its answer, such as background tasks, it does after the commit. Options: http.Rules."""

    def __init__(self, app: Any, db: Database[AsyncTransaction], *, when: Callable[[Request], bool] = writes, **options: Unpack[Options]):
        self._app, self._when, self._rules = app, when, Rules(db, **options)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        if scope["type"] != "http" or not self._when(request):
            await self._app(scope, receive, send)
            return
        asks = await asked(request)
        committed = asyncio.Event()
        application: Any = None

        async def handle(tx: Any) -> Answer:
            nonlocal application
            start: dict = {}
            chunks: list = []
            answered = asyncio.Event()
            unread = True

            async def again() -> dict:
                nonlocal unread
                if unread:
                    unread = False
                    return {"type": "http.request", "body": asks.body, "more_body": False}
                return await receive()  # the end of the connection

            async def keep(message: dict) -> None:
                if message["type"] == "http.response.start":
                    start.update(message)
                elif message["type"] == "http.response.body":
                    if message.get("more_body") and b"content-length" not in dict(start["headers"]):
                        refuse_stream()
                    chunks.append(message.get("body", b""))
                    if not message.get("more_body"):
                        answered.set()
                        await committed.wait()

            application = asyncio.ensure_future(self._app({**scope, "pg_idempotency": tx}, again, keep))
            whole = asyncio.ensure_future(answered.wait())
            await asyncio.wait([application, whole], return_when=asyncio.FIRST_COMPLETED)
            whole.cancel()
            if application.done():
                await application  # raises its error
            made = Response(b"".join(chunks), start["status"])
            made.raw_headers = list(start["headers"])
            return Answer(made.status_code, made.headers.items(), bytes(made.body), made)

        try:
            answer = await self._rules.answer(asks, handle)
            await response(answer)(scope, receive, send)
            if answer.native is not None:
                committed.set()
                await application
        finally:
            if application and not application.done():
                application.cancel()
                await asyncio.wait([application])
