"""Views of Django that have their effect exactly once: the header Idempotency-Key (draft-ietf-httpapi-idempotency-key-header) with the
extension idempotency.

    @idempotent()
    def create_charge(request):
        charge = Charge.objects.create(amount=json.loads(request.body)["amount"])
        return JsonResponse({"charge": charge.id}, status=201, headers={"Location": f"/charges/{charge.id}"})

The view writes through Django's connection, in the transaction of the claim: key, effect and answer commit together. The status of the
response decides what is stored:

    below 400               the answer is stored and replayed
    400 to 499              the same, but the writes of the view are undone
    from 500 on, or an exception    nothing is stored or written, and a retry runs the view

Do not use it within ATOMIC_REQUESTS: the answer must be sent after the commit. Options:

    scope       the boundary of keys, or a function of the request, such as its tenant
    lenient     also take a key without quotes, as older clients send it
    wait        how long a duplicate waits for the first request before it gets 409, a timedelta
    retention   how long the answer is replayed, a timedelta
    using       the database
"""

import functools
import http
import json
import re
from datetime import timedelta

from django.db import Error, InterfaceError, OperationalError, connections, transaction
from django.http import HttpResponse

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
    """Ends a block of the transaction with a rollback; carries the response to send."""

    def __init__(self, response):
        self.response = response


def problem(status, detail, headers=None):
    """Returns an error answer (RFC 9457)."""
    body = {"type": "about:blank", "title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return HttpResponse(json.dumps(body), "application/problem+json", status, headers=headers)


def sqlstate(error):
    """Returns the SQLSTATE of an error of the database, or ""."""
    cause = error.__cause__
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None) or ""


def bad_request(state, using):
    """Returns the answer to a request that no claim accepts."""
    if state != "IK400":
        return problem(400, "The body is not JSON that can be compared.")
    # A missing or malformed header: the answer links to idempotency.documentation.
    with connections[using].cursor() as cursor:
        cursor.execute(BAD_KEY)
        return stored(*cursor.fetchone())


def problem_of(error):
    """Returns the answer to an error of the database, or None if the error is a bug."""
    state = sqlstate(error)
    if TRANSIENT.match(state) or not state and isinstance(error, (InterfaceError, OperationalError)):
        return problem(503, "Try again with the same key.", {"Retry-After": "1"})
    return None


def stored(status, headers, body):
    """Returns the response that was stored. Its body is the text, byte for byte."""
    response = HttpResponse(body or b"", status=status)
    del response["Content-Type"]
    for name, value in json.loads(headers).items():
        response[name] = value
    return response


def run(cursor, view, request, arguments, scope, key, header, wait, retention, using):
    """Claims, runs the view and completes, in the open transaction; returns the response, or raises Undo."""
    try:
        body = request.body.decode() or None
        cursor.execute(CLAIM.format(key), (scope, header, request.method, request.get_full_path(), body, wait, retention))
    except (ValueError, Error) as error:
        # Bytes that are not UTF-8, and a NUL byte, which the driver refuses.
        state = "22021" if isinstance(error, ValueError) else sqlstate(error)
        if state == "IK400" or MALFORMED.match(state):
            raise BadRequest(state) from None
        raise
    outcome, status, headers, text, refusal, refusal_headers = cursor.fetchone()
    if refusal is not None:
        return stored(json.loads(refusal)["status"], refusal_headers, refusal)
    if outcome == "replayed":
        return stored(status, headers, text)
    try:
        with transaction.atomic(using=using):
            response = view(request, *arguments[0], **arguments[1])
            if response.status_code >= 400:
                raise Undo(response)
    except Undo as undo:
        response = undo.response
        if response.status_code >= 500:
            raise
    text = response.content.decode() or None
    call = FINISH.format("complete" if response.status_code < 400 else "fail", key)
    cursor.execute(call, (scope, header, text, response.status_code, json.dumps(dict(response.items()))))
    return response


def idempotent(scope="http", lenient=False, wait=timedelta(0), retention=None, using="default"):
    """Decorates a view."""

    def decorate(view):
        @functools.wraps(view)
        def answer(request, *args, **kwargs):
            header = request.headers.get("Idempotency-Key")
            key = "%s" if lenient and re.fullmatch(r"[\w.:+/=-]+", header or "", re.ASCII) else "idempotency.parse_header(%s)"
            boundary = scope(request) if callable(scope) else scope
            try:
                with transaction.atomic(using=using), connections[using].cursor() as cursor:
                    return run(cursor, view, request, (args, kwargs), boundary, key, header, wait, retention, using)
            except Undo as undo:
                return undo.response
            except BadRequest as error:
                return bad_request(error.state, using)
            except Error as error:
                response = problem_of(error)
                if response is None:
                    raise
                return response

        return answer

    return decorate
