"""Flask: a decorator for views, with any synchronous Database."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Callable

import flask
from werkzeug.exceptions import HTTPException

from .core import Database, Transaction, run_sync
from .http import Answer, Request, Rules, refuse_stream

if TYPE_CHECKING:
    from typing import Unpack

    from .http import Options


def idempotent(db: Database[Transaction], **options: Unpack[Options]) -> Callable[[Callable[..., Any]], Callable[..., flask.Response]]:
    """Decorates a view, which gets the transaction as the keyword argument tx, and writes through tx.connection. The scope gets
    flask.request. Options: http.Rules."""
    rules = Rules(db, **options)

    def decorate(view: Callable[..., Any]) -> Callable[..., flask.Response]:
        @functools.wraps(view)
        def answer(*args: Any, **kwargs: Any) -> flask.Response:
            def handle(tx: Any) -> Answer:
                try:
                    made = flask.make_response(view(*args, tx=tx, **kwargs))
                except HTTPException as error:
                    found = flask.current_app.handle_user_exception(error)  # by a handler of the application, or the error
                    made = flask.make_response(found.get_response() if isinstance(found, HTTPException) else found)
                if made.is_streamed or made.direct_passthrough:
                    refuse_stream()
                return Answer(made.status_code, made.headers.items(), made.get_data(), made)

            request = flask.request
            asks = Request(request, request.method, request.script_root + request.path, request.query_string.decode("latin-1"), request.headers.get("Idempotency-Key"),
                           request.headers.get("Content-Type", ""), request.get_data())
            found = run_sync(rules.answer(asks, handle))
            if found.native is not None:
                return found.native
            made = flask.Response(found.body, found.status)
            made.headers.clear()
            made.headers.extend(list(found.headers))
            return made

        return answer

    return decorate
