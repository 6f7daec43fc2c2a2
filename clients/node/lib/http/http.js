// The header Idempotency-Key (draft-ietf-httpapi-idempotency-key-header), for every framework. README.md
// beside clients/ has the rules, which the middleware of all languages share.

"use strict";

const { createHash } = require("crypto");
const { STATUS_CODES, validateHeaderName, validateHeaderValue } = require("http");
const { isUtf8 } = require("buffer");
const { Failure, finish, isTransient, sqlState, undoable } = require("../core.js");

// Headers of an answer that retries get, unless the option headers names others.
const STORED = ["Cache-Control", "Content-Disposition", "Content-Language", "Content-Location", "Content-Type", "ETag", "Last-Modified", "Link",
	"Location", "Vary"];

// Headers of one answer, one recipient or one connection.
const NEVER = ["connection", "content-length", "date", "idempotent-replayed", "keep-alive", "proxy-authenticate", "proxy-connection",
	"set-cookie", "te", "trailer", "transfer-encoding", "upgrade"];

const OPTIONS = ["db", "headers", "lenient", "maxBody", "omit", "retention", "scope", "wait"];

// Errors of a claim after which the request must change: its body is not JSON (a text that is
// no JSON, a code point or number that jsonb cannot hold, too deep, too large).
const malformed = /^(22P02|22P05|22003|22021|5400[01])$/;

const isJson = (type) => /^(application|text)\/([^;\s]+\+)?json\s*(;|$)/i.test(type ?? "");

// valueOf returns a header; name is in lower case.
const valueOf = (headers, name) => Object.entries(headers).find(([each]) => each.toLowerCase() === name)?.[1];

// isPlain tells whether a body with these headers is stored as it is: JSON that is not compressed.
const isPlain = (headers) => isJson(valueOf(headers, "content-type")) && !valueOf(headers, "content-encoding");

// isFinal tells whether an answer is stored. 408, 425 and 429 ask for the same request again, as 503 does.
const isFinal = (status) => status < 500 && ![408, 425, 429].includes(status);

// Refused is the answer to a request that is refused before its claim.
class Refused extends Error {
	constructor(status, detail) {
		super(detail);
		this.status = status;
	}
}

// ----------------------------------------------------------------
// Requests
// ----------------------------------------------------------------

const percent = (byte) => `%${byte.charCodeAt().toString(16).toUpperCase().padStart(2, "0")}`;

// normalPath returns a path decoded and encoded anew, because some servers have only the decoded one. Its query does
// not depend on the order of different parameters.
function normalPath(path) {
	const [encoded, query] = path.split(/\?(.*)/s);
	const before = encoded.replace(/%([0-9a-f]{2})/gi, (_, hex) => String.fromCharCode(parseInt(hex, 16))).replace(/[^\w.~/:@!$&'()*+,;=-]/g, percent);
	if (!query)
		return before;
	const name = (part) => part.split("=", 1)[0];
	const parts = query.replace(/[^!$-&(-;=?-~]/g, percent).split("&").sort((a, b) => name(a) < name(b) ? -1 : name(a) > name(b) ? 1 : 0);
	return `${before}?${parts.join("&")}`;
}

const sha256 = (bytes) => createHash("sha256").update(bytes).digest("hex");

// documentOf returns the JSON that stands for a body in the fingerprint, as text, or null for
// an empty body.
function documentOf(type, bytes) {
	if (bytes.length === 0)
		return null;
	if (isJson(type)) {
		if (!isUtf8(bytes))
			throw new Refused(400, "The body is not UTF-8.");
		return bytes.toString();
	}
	const media = (type ?? "").split(";", 1)[0].trim().toLowerCase();
	if (media === "application/x-www-form-urlencoded") {
		const fields = Object.create(null);
		for (const [name, value] of new URLSearchParams(`&${bytes}`)) // it would drop a ? at the beginning
			(Object.hasOwn(fields, name) ? fields[name] : fields[name] = []).push(value);
		return JSON.stringify(fields);
	}
	if (media.startsWith("multipart/")) {
		// Each attempt draws another boundary.
		const boundary = /;\s*boundary=(?:"([^"]+)"|([^\s;]+))/i.exec(type);
		if (boundary)
			bytes = Buffer.from(bytes.toString("latin1").replaceAll(`--${boundary[1] ?? boundary[2]}`, "--"), "latin1");
	}
	return JSON.stringify({ type: media, sha256: sha256(bytes) });
}

// pathOf returns a JSON pointer as an array (RFC 6901).
function pathOf(pointer) {
	if (!/^(\/|$)/.test(pointer))
		throw new TypeError(`omit: ${pointer} is no JSON pointer, such as /sent_at`);
	return pointer.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
}

// bodyOf returns the SQL of the body in the fingerprint, without the members that do not count; jsonb keeps
// all digits of numbers. Paths are parameters from $8 on.
function bodyOf(omit) {
	const without = (inner, _, index) => `(SELECT CASE WHEN d #> p IS NULL THEN d ELSE d #- p END
		FROM (SELECT ${inner} AS d, ARRAY(SELECT jsonb_array_elements_text($${8 + index}::text::jsonb)) AS p) AS s)`;
	return omit.length === 0 ? "$5::text" : `${omit.reduce(without, "$5::text::jsonb")}::text`;
}

const CLAIM = (key, omit) => `SELECT ${key} AS key, outcome::text, status, headers::text, response::text, idempotency.problem(op)::text AS problem,
		idempotency.problem_headers(op)::text AS problem_headers
	FROM idempotency.try_claim(scope => $1::text, key => ${key}, fingerprint => idempotency.fingerprint($3::text, $4::text, ${bodyOf(omit)}),
		wait => $6::text::interval, retention => $7::text::interval) AS op`;

// ----------------------------------------------------------------
// Answers
// ----------------------------------------------------------------

// problem is an error answer (RFC 9457).
function problem(status, detail, headers = {}, members = { type: "about:blank" }) {
	const body = JSON.stringify({ ...members, title: STATUS_CODES[status], status, detail });
	return { status, headers: { "Content-Type": "application/problem+json", ...headers }, body: Buffer.from(body) };
}

const isStream = (body) => typeof body?.pipe === "function" || typeof body?.getReader === "function" || typeof body?.[Symbol.asyncIterator] === "function";

function refuseStream() {
	throw new TypeError("a streamed answer cannot be stored and replayed: return the whole body, or stream from a route without idempotency");
}

// answerOf returns what a handler has returned, {status, headers, body} or a Response, as an answer
// whose body is bytes. Without a Content-Type the body is JSON.
async function answerOf(result) {
	if (isStream(result))
		refuseStream();
	if (!["arrayBuffer", "status", "headers", "body"].some((name) => name in Object(result)))
		throw new TypeError("the handler returned no answer: return { status, headers, body }");
	let { status = 200, headers = {}, body } = result;
	if (typeof result.arrayBuffer === "function") {
		headers = Object.fromEntries(result.headers);
		if (result.headers.getSetCookie().length > 0)
			headers["set-cookie"] = result.headers.getSetCookie();
		if (headers["transfer-encoding"] || /^text\/event-stream/.test(headers["content-type"]))
			refuseStream();
		body = new Uint8Array(await result.arrayBuffer());
	}
	if (isStream(body))
		refuseStream();
	for (const [name, value] of Object.entries(headers)) { // what cannot be sent must not be stored
		validateHeaderName(name);
		for (const each of [value].flat())
			validateHeaderValue(name, each);
	}
	const type = valueOf(headers, "content-type");
	if (body === undefined || body === null)
		return { status, headers, body: Buffer.alloc(0) };
	if (body instanceof Uint8Array || body instanceof ArrayBuffer)
		return { status, headers, body: Buffer.from(body) };
	if (type !== undefined && !isJson(type))
		return { status, headers, body: Buffer.from(String(body)) };
	if (type === undefined)
		headers = { "Content-Type": "application/json", ...headers };
	return { status, headers, body: Buffer.from(JSON.stringify(body)) };
}

// stored returns the text of an answer's body in the store: JSON as it is, and other bytes as {"base64"}.
function stored({ headers, body }) {
	if (body.length === 0)
		return null;
	if (isPlain(headers) && !isUtf8(body))
		throw new TypeError("an answer in JSON must be UTF-8");
	return isPlain(headers) ? body.toString() : JSON.stringify({ base64: body.toString("base64") });
}

// replayed returns the answer of a stored row.
function replayed(row) {
	const headers = JSON.parse(row.headers ?? "{}");
	let body = Buffer.from(row.response ?? "");
	if (body.length > 0 && !isPlain(headers))
		body = Buffer.from(JSON.parse(row.response).base64, "base64");
	return { status: row.status, headers: { ...headers, "Idempotent-Replayed": "true" }, body };
}

// ----------------------------------------------------------------
// The operation
// ----------------------------------------------------------------

// idempotency returns run(request, handler), which returns the answer to a request. request has
// method, path (with the query), header(name), type and bytes (the body), and raw, which scope() gets. handler gets
// the session.
function idempotency(options) {
	const { db, scope, lenient = false, omit = [], wait = "0", retention = null, headers: names = STORED } = options;
	const unknown = Object.keys(options).find((name) => !OPTIONS.includes(name));
	if (unknown)
		throw new TypeError(`there is no option ${unknown}: the options are ${OPTIONS.join(", ")}`);
	if (typeof db?.transaction !== "function")
		throw new TypeError("the option db must be an adapter, such as pg(pool)");
	if (typeof scope !== "function")
		throw new TypeError("the option scope must be a function of the request that returns its user or tenant: with one scope for all, " +
			"a client could get the answer of another");
	const allowed = new Set(["content-type", "content-encoding", ...names.map((name) => name.toLowerCase())]);
	const refused = NEVER.find((name) => allowed.has(name));
	if (refused)
		throw new TypeError(`the header ${refused} belongs to one answer or one recipient, and cannot be stored`);
	const paths = omit.map((pointer) => JSON.stringify(pathOf(pointer)));

	// begin claims the operation, and returns its row.
	async function begin(session, request, space, document) {
		const header = request.header("Idempotency-Key") ?? null;
		const unquoted = lenient && /^[\w.:+/=-]+$/.test(header ?? "");
		const [row] = await session.query(CLAIM(unquoted ? "$2::text" : "idempotency.parse_header($2::text)", omit), [space, header, request.method,
			normalPath(request.path), document, String(wait), retention === null ? null : String(retention), ...paths]);
		return row;
	}

	// store stores what retries get of an answer.
	async function store(session, space, key, answer) {
		const kept = Object.entries(answer.headers).filter(([name]) => allowed.has(name.toLowerCase()))
			.map(([name, value]) => [name, Array.isArray(value) ? value.join(", ") : String(value)]);
		await finish(session, answer.status < 400 ? "complete" : "fail", space, key, stored(answer),
			{ status: answer.status, headers: Object.fromEntries(kept), omitLarge: true });
		session.finished = true;
	}

	// handle calls the handler, and undoes its writes if it answers 400 or above.
	async function handle(session, handler) {
		try {
			return await undoable(session, async (inner) => {
				const answer = await answerOf(await handler(inner));
				if (answer.status >= 400)
					throw Object.assign(new Failure(), { answer });
				return answer;
			});
		} catch (error) {
			if (error instanceof Failure)
				return error.answer ?? answerOf({ status: error.status, headers: error.headers, body: error.response });
			throw error;
		}
	}

	async function run(request, handler) {
		const space = await scope(request.raw);
		if (typeof space !== "string" || space === "")
			throw new TypeError("scope() returned no string, or an empty one: with one scope for all, a client could get the answer of another");
		let claiming = true;
		let undone; // the answer to a request whose transaction is rolled back
		const undo = (answer) => {
			undone = answer;
			throw new Error("the transaction is rolled back");
		};
		try {
			const document = documentOf(request.type, request.bytes);
			return await db.transaction(async (session) => {
				const row = await begin(session, request, space, document);
				if (row.outcome === "replayed")
					return replayed(row);
				if (row.problem !== null)
					undo({ status: JSON.parse(row.problem).status, headers: JSON.parse(row.problem_headers), body: Buffer.from(row.problem) });
				claiming = false;
				const answer = await handle(session, handler);
				if (!isFinal(answer.status))
					undo(answer);
				await store(session, space, row.key, answer);
				return answer;
			});
		} catch (error) {
			const answer = undone ?? await refusal(error, claiming).catch((second) => isTransient(second) ? unavailable() : Promise.reject(second));
			if (answer)
				return answer;
			throw error;
		}
	}

	// refusal returns the answer to an error, or undefined if the error is a bug. The client is at fault only
	// for errors of the claim.
	async function refusal(error, claiming) {
		if (error instanceof Refused || claiming && malformed.test(sqlState(error))) {
			const { headers, body } = await badRequest();
			const { type } = JSON.parse(body);
			return problem(error.status ?? 400, error instanceof Refused ? error.message : "The body is not JSON that can be compared.", headers, { type });
		}
		if (claiming && sqlState(error) === "IK400")
			return badRequest();
		return isTransient(error) ? unavailable() : undefined;
	}

	// badRequest is the answer to a missing or malformed header. It links to idempotency.documentation.
	async function badRequest() {
		const [row] = await db.query("SELECT idempotency.problem_headers('IK400')::text AS headers, idempotency.problem('IK400')::text AS body", []);
		return { status: 400, headers: JSON.parse(row.headers), body: Buffer.from(row.body) };
	}

	return { run, maxBody: options.maxBody ?? 1048576 };
}

const unavailable = () => problem(503, "Try again with the same key.", { "Retry-After": "1" });

// ----------------------------------------------------------------
// Requests and answers of node:http, for Express, Koa and Nest
// ----------------------------------------------------------------

// keepBody is the option verify of express.json() and the like: it keeps the bytes, because parsed numbers
// are rounded.
const keepBody = (request, response, bytes) => { request.rawBody = bytes; };

// read returns the bytes of a request's body: those that a parser has kept as rawBody, or the rest of the
// stream.
async function read(request, kept, limit) {
	if (kept !== undefined)
		return Buffer.from(kept);
	if (request.readableDidRead)
		throw new Error("the body was read before: route without a parser, or keep its bytes with express.json({ verify: keepBody }) or rawBody: true");
	if (!/^(identity)?$/i.test(request.headers["content-encoding"] ?? ""))
		return new Refused(415, "The body must not be compressed.");
	const chunks = [];
	let size = 0;
	for await (const chunk of request) {
		size += chunk.length;
		if (size <= limit)
			chunks.push(chunk);
	}
	return size <= limit ? Buffer.concat(chunks) : new Refused(413, `The body exceeds ${limit} bytes.`);
}

// parse returns a body as an application wants it: the value of JSON or of a form, a text, or bytes.
function parse(type, bytes) {
	if (bytes.length === 0)
		return undefined;
	if (isJson(type)) {
		try {
			return JSON.parse(bytes);
		} catch {
			return undefined; // the claim refuses it
		}
	}
	if (/^application\/x-www-form-urlencoded/i.test(type))
		return Object.fromEntries(new URLSearchParams(bytes.toString()));
	return /^text\//i.test(type) ? bytes.toString() : bytes;
}

// fromNode returns a request of node:http for run(). parsed(body) keeps the body for the handler, if no parser has.
async function fromNode(request, { path, rawBody, raw = request, limit, parsed }) {
	const bytes = await read(request, rawBody, limit);
	const type = request.headers["content-type"];
	if (bytes instanceof Refused)
		return { refused: problem(bytes.status, bytes.message) };
	if (rawBody === undefined)
		parsed(parse(type, bytes));
	return { method: request.method, path, header: (name) => request.headers[name.toLowerCase()], type, bytes, raw };
}

// send sends an answer through node:http.
function send(response, { status, headers, body }) {
	response.statusCode = status;
	for (const [name, value] of Object.entries(headers))
		response.setHeader(name, value);
	response.end(body);
}

module.exports = { fromNode, idempotency, keepBody, send };
