"""The header Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), for every framework: what is claimed, stored and answered.

A framework's module makes a Request, calls Rules.answer() with a function that runs the handler, and sends the Answer.
"""

from __future__ import annotations

import base64
import hashlib
import http
import json
import re
from typing import TYPE_CHECKING, Any, Callable, Iterable, NamedTuple, Optional
from urllib.parse import parse_qsl, quote

from .core import Database, Duration, interval, is_transient, name, settle, sqlstate

if TYPE_CHECKING:
    from typing import Required, TypedDict

    class Options(TypedDict, total=False):
        scope: Required[Callable[[Any], Any]]
        lenient: bool
        headers: Iterable[str]
        omit: Iterable[str]
        wait: Duration
        retention: Duration

# Headers of an answer that retries get, unless the option headers names others.
STORED = ("Cache-Control", "Content-Disposition", "Content-Language", "Content-Location", "Content-Type", "ETag", "Last-Modified", "Link",
          "Location", "Vary")

# Headers of one answer, one recipient or one connection.
NEVER = {"connection", "content-length", "date", "idempotent-replayed", "keep-alive", "proxy-authenticate", "proxy-connection", "set-cookie",
         "te", "trailer", "transfer-encoding", "upgrade"}

# SQLSTATEs of a claim whose request has a body that is not JSON: a text that is no JSON, a code point or number that jsonb cannot hold,
# too deep, too large.
MALFORMED = re.compile(r"22P02|22P05|22003|22021|5400[01]")

CLAIM = """SELECT outcome::text, status, headers::text, response::text, idempotency.problem(op)::text, idempotency.problem_headers(op)::text
    FROM idempotency.try_claim(scope => $1::text, key => {key}, fingerprint => idempotency.fingerprint($3::text, $4::text, {body}),
        wait => $6::text::interval, retention => $7::text::interval) AS op"""
# A body without a member that does not count; jsonb keeps all digits of numbers.
OMIT = """(SELECT CASE WHEN d #> p IS NULL THEN d ELSE d #- p END FROM (SELECT {body} AS d, ${number}::text[] AS p) AS s)"""
BAD_KEY = "SELECT idempotency.problem('IK400')::text, idempotency.problem_headers('IK400')::text"
FINISH = "SELECT idempotency.{}(scope => $1::text, key => {}, response => $3::text, status => $4::integer, headers => $5::text, " \
    "omit_large => true)::text"


class Request(NamedTuple):
    """What the rules need of a request. native is the framework's object, which scope() gets; path is decoded, and query as sent."""

    native: Any
    method: str
    path: str
    query: str
    key: Optional[str]
    type: str
    body: bytes


class Answer(NamedTuple):
    """An answer to send. native is the framework's response, if the handler made it."""

    status: int
    headers: Iterable
    body: bytes
    native: Any = None


class Refused(Exception):
    """The request is refused before or by its claim; carries the detail, None for a missing or malformed header."""


class Undo(Exception):
    """Ends a block with a rollback; carries the answer to send."""


def refuse_stream() -> None:
    """Raises the error of an answer that cannot be stored before it is sent."""
    raise TypeError("a streamed answer cannot be stored and replayed: return the whole body, or stream from a route without idempotency")


def problem(status: int, detail: str, headers: Any = (), type: str = "about:blank") -> Answer:
    """Returns an error answer (RFC 9457)."""
    body = {"type": type, "title": http.HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Answer(status, {"Content-Type": "application/problem+json", **dict(headers)}.items(), json.dumps(body).encode())


def is_json(content_type: str) -> bool:
    return bool(re.match(r"(application|text)/([^;\s]+\+)?json\s*(;|$)", content_type, re.IGNORECASE))


def document(content_type: str, body: bytes) -> Optional[str]:
    """Returns the JSON text that stands for a body in the fingerprint, None for an empty body."""
    if not body:
        return None
    if is_json(content_type):
        try:
            return body.decode()
        except UnicodeDecodeError:
            raise Refused("The body is not UTF-8.") from None
    media = content_type.split(";")[0].strip().lower()
    if media == "application/x-www-form-urlencoded":
        fields: dict = {}
        for field, value in parse_qsl(body.decode(errors="replace"), keep_blank_values=True):
            fields.setdefault(field, []).append(value)
        return json.dumps(fields)
    boundary = re.search(r';\s*boundary=(?:"([^"]+)"|([^\s;]+))', content_type, re.IGNORECASE)
    if media.startswith("multipart/") and boundary:
        # Each attempt draws another boundary.
        body = body.replace(b"--" + (boundary[1] or boundary[2]).encode("latin-1"), b"--")
    return json.dumps({"type": media, "sha256": hashlib.sha256(body).hexdigest()})


def pointer_path(pointer: str) -> list:
    """Returns a JSON pointer (RFC 6901) as an array."""
    if not re.match(r"/|$", pointer):
        raise ValueError(f"omit: {pointer} is no JSON pointer, such as /sent_at")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def value_of(headers: Iterable, name: str) -> str:
    """Returns a header; name is in lower case."""
    return next((value for header, value in headers if header.lower() == name), "")


def is_plain(headers: Iterable) -> bool:
    """Returns whether a body with these headers is stored as it is: JSON that is not compressed."""
    return is_json(value_of(headers, "content-type")) and not value_of(headers, "content-encoding")


def is_final(status: int) -> bool:
    """Returns whether an answer is stored. 408, 425 and 429 ask for the same request again, as 503 does."""
    return status < 500 and status not in (408, 425, 429)


def stored(status: int, headers: Optional[str], response: Optional[str]) -> Answer:
    """Returns the answer that a row has: JSON as it is, other bytes as {"base64"}."""
    found = json.loads(headers or "{}").items()
    body = (response or "").encode()
    if body and not is_plain(found):
        body = base64.b64decode(json.loads(body)["base64"])
    return Answer(status, [*found, ("Idempotent-Replayed", "true")], body)


class Rules:
    """The rules for the requests of one endpoint or application. The modules of the frameworks take these options:

    scope       required: a function that returns the boundary of the keys of a request, such as its user or tenant
    lenient     also take a key without quotes, as older clients send it
    headers     names of the headers of an answer that are stored
    omit        JSON pointers of the members of the body that do not count, such as /sent_at
    wait        how long a duplicate waits for the first request before it gets 409: a timedelta, seconds, or a text such as "2 seconds"
    retention   how long the answer is replayed, in the same form
    """

    def __init__(self, db: Database[Any], *, scope: Callable[[Any], Any], lenient: bool = False, headers: Iterable[str] = STORED,
                 omit: Iterable[str] = (), wait: Duration = 0, retention: Duration = None):
        if not callable(scope):
            raise TypeError("scope is a function of the request that returns its user or tenant: with one scope for all, a client could get the "
                            "answer of another")
        self._headers = {"content-type", "content-encoding", *(each.lower() for each in headers)}
        if self._headers & NEVER:
            raise ValueError(f"headers of one answer or one recipient cannot be stored: {', '.join(self._headers & NEVER)}")
        self._db, self._scope, self._lenient, self._omit = db, scope, lenient, [pointer_path(each) for each in omit]
        self._wait, self._retention = interval(wait), interval(retention)
        self._body = "$5::text"
        for number, _ in enumerate(self._omit, 8):
            self._body = OMIT.format(body="$5::text::jsonb" if number == 8 else self._body, number=number)
        self._body += "::text" if self._omit else ""

    async def answer(self, request: Request, handle: Callable[[Any], Any]) -> Answer:
        """Returns the answer to a request: the stored one, an error, or that of handle(tx), which is called at most once. What is stored has
        committed."""
        scope = name(await settle(self._scope(request.native)))
        if not scope:
            raise ValueError("scope() returned an empty text: with one scope for all, a client could get the answer of another")
        try:
            try:
                async with self._db.open() as tx:
                    return await self._run(tx, request, scope, handle)
            except Refused as refused:
                # The answer links to idempotency.documentation.
                async with self._db.open() as tx:
                    (body, headers), = await tx.rows(BAD_KEY, [])
                if refused.args[0] is None:
                    return Answer(400, json.loads(headers).items(), body.encode())
                return problem(400, refused.args[0], json.loads(headers), json.loads(body)["type"])
        except Undo as undo:
            return undo.args[0]
        except Exception as error:
            if not is_transient(error):
                raise
            return problem(503, "Try again with the same key.", {"Retry-After": "1"})

    async def _claim(self, tx: Any, request: Request, scope: str, key: str) -> Any:
        query = re.sub("[^!$-&(-;=?-~]", lambda found: f"%{ord(found[0]):02X}", request.query)
        query = "&".join(sorted(query.split("&"), key=lambda part: part.split("=")[0]))
        path = quote(request.path, safe="/:@!$&'()*+,;=~") + ("?" + query if query else "")
        body = document(request.type, request.body)
        try:
            return (await tx.rows(CLAIM.format(key=key, body=self._body), [
                scope, request.key, request.method, path, body, self._wait, self._retention,
                *self._omit]))[0]
        except Exception as error:
            # Some drivers refuse a NUL byte themselves, and have no SQLSTATE for it.
            state = sqlstate(error) or ("22021" if isinstance(error, ValueError) or type(error).__name__ == "DataError" else "")
            if state == "IK400" or MALFORMED.match(state):
                raise Refused(None if state == "IK400" else "The body is not JSON that can be compared.") from None
            raise

    async def _run(self, tx: Any, request: Request, scope: str, handle: Any) -> Answer:
        """Claims, calls the handler and stores its answer, in the open transaction; returns the answer, or raises Undo with it."""
        unquoted = self._lenient and re.fullmatch(r"[\w.:+/=-]+", request.key or "", re.ASCII)
        key = "$2::text" if unquoted else "idempotency.parse_header($2::text)"
        outcome, status, headers, response, refusal, refusal_headers = await self._claim(tx, request, scope, key)
        if outcome == "replayed":
            return stored(status, headers, response)
        if refusal is not None:
            raise Undo(Answer(json.loads(refusal)["status"], json.loads(refusal_headers).items(), refusal.encode()))
        try:
            async with tx.open_savepoint():
                answer = await settle(handle(tx))
                if answer.status >= 400:
                    raise Undo(answer)
        except Undo as undo:
            answer = undo.args[0]
            if not is_final(answer.status):
                raise
        kept: dict = {}
        for header, value in answer.headers:
            f"{header}{value}".encode("latin-1")  # what cannot be sent must not be stored
            if header.lower() in self._headers:
                kept[header] = f"{kept[header]}, {value}" if header in kept else value
        text = None
        if answer.body:
            text = answer.body.decode() if is_plain(kept.items()) else json.dumps({"base64": base64.b64encode(answer.body).decode()})
        await tx.rows(FINISH.format("complete" if answer.status < 400 else "fail", key),
                      [scope, request.key, text, answer.status, json.dumps(kept)])
        tx.finished = True
        return answer
