"""Handlers for Starlette and FastAPI that have their effect exactly once: the header Idempotency-Key
(draft-ietf-httpapi-idempotency-key-header) with the extension idempotency, through psycopg 3.

    @app.post("/charges")
    @idempotent(connect)
    async def create_charge(request: Request, connection) -> Response:
        await connection.execute("INSERT INTO charge …")
        return JSONResponse({"charge": 1}, status_code=201, headers={"Location": "/charges/1"})

The handler writes through the connection that it gets, which is in a transaction: key, effect and answer commit together. The status of
the response decides what is stored:

    below 400               the answer is stored and replayed
    400 to 499              the same, but the writes of the handler are undone
    from 500 on, or an exception    nothing is stored or written, and a retry runs the handler

connect() returns an asynchronous context manager of a connection, such as that of psycopg_pool's AsyncConnectionPool.connection; behind
PgBouncer in transaction mode, with prepare_threshold=None. Options:

    scope       the boundary of keys, or a function of the request, such as its tenant
    lenient     also take a key without quotes, as older clients send it
    wait        how long a duplicate waits for the first request before it gets 409, a timedelta
    retention   how long the answer is replayed, a timedelta
"""

import functools
import http
import json
import re
from datetime import timedelta

import psycopg
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

# SQLSTATEs of errors after which the same request can succeed.
TRANSIENT = re.compile(r"08|40|53|55P03|57|58|25006|IK409|IK410")

# SQLSTATEs of a claim whose request has a body that is not JSON: a text that is no JSON, a code point or number that jsonb cannot hold,
# too deep, too large.
MALFORMED = re.compile(r"22P02|22P05|22003|22021|5400[01]")

CLAIM = """SELECT outcome::text, status, headers::text, response::text, idempotency.problem(op)::text,
        idempotency.problem_headers(op)::text
    FROM idempotency.try_claim(scope => %s, key => {}, fingerprint => idempotency.fingerprint(%s, %s, %s),
        wait => %s, retention => %s) AS op"""
BAD_KEY = "SELECT 400, idempotency.problem_headers('IK400')::text, idempotency.problem('IK400')::text"
FINISH = "SELECT idempotency.{}(scope => %s, key => {}, response => %s, status => %s, headers => %s, omit_large => true)"


class BadRequest(Exception):
    """The claim fails because of the request: the header (IK400) or the body."""

    def __init__(self, state):
        self.state = state


class Undo(Exception):
    """Ends a block of the connection with a rollback; carries the response to send."""

    def __init__(self, response):
        self.response = response


def problem(status, detail, headers=None):
    """Returns an error answer (RFC 9457)."""
    body = {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Response(json.dumps(body), status, headers, "application/problem+json")


def problem_of(error):
    """Returns the answer to an error of the database, or None if the error is a bug."""
    if TRANSIENT.match(error.sqlstate or "") or error.sqlstate is None and isinstance(error, psycopg.OperationalError):
        return problem(503, "Try again with the same key.", {"Retry-After": "1"})
    return None


def stored(status, headers, body):
    """Returns the response that was stored. Its body is the text, byte for byte."""
    return Response(body, status, json.loads(headers))


async def run(connection, handler, request, scope, key, header, wait, retention):
    """Claims, runs the handler and completes, in the connection's transaction; returns the response, or raises Undo."""
    path = request.url.path + ("?" + request.url.query if request.url.query else "")
    try:
        body = (await request.body()).decode() or None
        found = await connection.execute(CLAIM.format(key), (scope, header, request.method, path, body, wait, retention))
    except (UnicodeDecodeError, psycopg.Error) as error:
        # psycopg itself refuses a NUL byte, without an SQLSTATE.
        state = getattr(error, "sqlstate", None) or ("22021" if isinstance(error, (UnicodeDecodeError, psycopg.DataError)) else "")
        if state == "IK400" or MALFORMED.match(state):
            raise BadRequest(state) from None
        raise
    outcome, status, headers, text, refusal, refusal_headers = await found.fetchone()
    if refusal is not None:
        return stored(json.loads(refusal)["status"], refusal_headers, refusal)
    if outcome == "replayed":
        return stored(status, headers, text)
    try:
        async with connection.transaction():
            try:
                response = await handler(request, connection)
            except HTTPException as error:
                response = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
            if response.status_code >= 400:
                raise Undo(response)
    except Undo as undo:
        response = undo.response
        if response.status_code >= 500:
            raise
    text = response.body.decode() or None
    headers = {name: ", ".join(response.headers.getlist(name)) for name in response.headers.keys() if name != "content-length"}
    call = FINISH.format("complete" if response.status_code < 400 else "fail", key)
    await connection.execute(call, (scope, header, text, response.status_code, json.dumps(headers)))
    return response


def idempotent(connect, scope="http", lenient=False, wait=timedelta(0), retention=None):
    """Decorates a handler of request and connection."""

    def decorate(handler):
        @functools.wraps(handler)
        async def answer(request: Request):
            header = ", ".join(request.headers.getlist("Idempotency-Key")) or None
            key = "%s" if lenient and re.fullmatch(r"[\w.:+/=-]+", header or "", re.ASCII) else "idempotency.parse_header(%s)"
            boundary = scope(request) if callable(scope) else scope
            try:
                async with connect() as connection:
                    try:
                        async with connection.transaction():
                            return await run(connection, handler, request, boundary, key, header, wait, retention)
                    except BadRequest as error:
                        if error.state != "IK400":
                            return problem(400, "The body is not JSON that can be compared.")
                        # A missing or malformed header: the answer links to idempotency.documentation.
                        return stored(*await (await connection.execute(BAD_KEY)).fetchone())
            except Undo as undo:
                return undo.response
            except psycopg.Error as error:
                response = problem_of(error)
                if response is None:
                    raise
                return response

        # FastAPI reads the parameters from the signature: the request alone.
        del answer.__wrapped__
        answer.__annotations__ = {"request": Request}
        return answer

    return decorate
