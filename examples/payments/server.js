// The service: HTTP, and one call of a stored function for each request. It has no
// state, so it can die at any moment, and several instances can run.
//
// README.md lists the environment.

"use strict";

const { createHash } = require("crypto");
const { readFileSync } = require("fs");
const http = require("http");
const path = require("path");

const database = require("./database");
const orders = require("./orders");

const { query, Unavailable } = database;
const maxBody = 16 * 1024;
const timeout = 30000; // ms, for a request to arrive
const tokenPattern = "[\\w.~+/-]+=*"; // RFC 6750: no character needs an escape

// ---------------------------------------------------------------------------
// Answers: { status, headers, body, replayed }
// ---------------------------------------------------------------------------

// A Problem is an error answer (RFC 9457) that does not come from a stored function.
class Problem extends Error {
	constructor(status, detail, headers = {}) {
		super(detail);
		this.status = status;
		this.headers = { "Content-Type": "application/problem+json", ...headers };
		this.body = JSON.stringify({ type: "about:blank", title: http.STATUS_CODES[status], status, detail });
	}
}

const unauthorized = (detail, challenge) => new Problem(401, detail, { "WWW-Authenticate": challenge });

// badKey is the answer to a key that the database refuses. For a malformed header it
// quotes the parser's position; the parser's other texts are for callers of functions.
const badKey = (detail = "") => new Problem(400, detail.startsWith("At character")
	? `The header Idempotency-Key is malformed. ${detail}`
	: "The header Idempotency-Key is required: a string of 1 to 255 characters, in double quotes.");

// problemOf converts an error into an answer.
function problemOf(error) {
	if (error instanceof Problem)
		return error;
	if (error.code === "IK400")
		return badKey(error.detail);
	if (error.code === "PY401")
		return unauthorized("The bearer token is unknown.", "Bearer error=\"invalid_token\"");
	console.error(error instanceof Unavailable ? error.message : error);
	if (error instanceof Unavailable)
		return new Problem(503, "Try again with the same key.", { "Retry-After": "1" });
	return new Problem(500, "Internal error.");
}

// json is an answer to a read request, which is not stored.
const json = (body) => ({ status: 200, headers: { "Content-Type": "application/json" }, body });

// ---------------------------------------------------------------------------
// Requests
// ---------------------------------------------------------------------------

// bearerOf returns the hash of the token; the database gets only the hash.
function bearerOf(request) {
	const match = new RegExp(`^Bearer +(${tokenPattern})$`, "i").exec(request.headers.authorization || "");
	if (!match)
		throw unauthorized("A bearer token is required.", "Bearer");
	return createHash("sha256").update(match[1]).digest();
}

// keyOf returns the unparsed Idempotency-Key header: the database parses it.
const keyOf = (request) => request.headers["idempotency-key"];

// bodyOf reads a JSON object.
async function bodyOf(request) {
	if (!/^application\/json *(;|$)/i.test(request.headers["content-type"] || ""))
		throw new Problem(415, "The body must be application/json.");
	const chunks = [];
	let size = 0;
	try {
		for await (const chunk of request)
			if ((size += chunk.length) <= maxBody) // read the rest, so that the client reads the answer
				chunks.push(chunk);
	} catch {
		throw new Problem(400, "The body is incomplete.");
	}
	if (size > maxBody)
		throw new Problem(413, `The body can have ${maxBody} bytes at most.`);
	let body;
	try {
		body = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(Buffer.concat(chunks)));
	} catch {
		throw new Problem(400, "The body is not JSON.");
	}
	if (typeof body !== "object" || body === null || Array.isArray(body))
		throw new Problem(400, "The body is not an object.");
	return body;
}

const isAmount = (value) => Number.isSafeInteger(value) && value > 0;
const isCurrency = (value) => typeof value === "string" && /^[A-Z]{3}$/.test(value);
const isText = (value) => typeof value === "string" && /^[^\p{Cc}\p{Cs}]{1,200}$/u.test(value);

// check checks each member of a body. Misspelt members are refused, because ignoring
// them could charge wrongly.
function check(body, members) {
	for (const name of Object.keys(body))
		if (!Object.hasOwn(members, name))
			throw new Problem(400, `There is no member "${name.slice(0, 50)}".`);
	for (const [name, isRight] of Object.entries(members))
		if (!isRight(body[name]))
			throw new Problem(400, `The member "${name}" is missing or invalid.`);
}

// ---------------------------------------------------------------------------
// Resources
// ---------------------------------------------------------------------------

async function createCharge(request) {
	const bearer = bearerOf(request);
	const body = await bodyOf(request);
	check(body, {
		amount: isAmount,
		currency: isCurrency,
		description: (value) => value === undefined || value === null || isText(value),
	});
	const [answer] = await query("SELECT * FROM payments.charge_create($1, $2, $3, $4, $5)",
		bearer, keyOf(request), body.amount, body.currency, body.description);
	return answer;
}

async function createOrder(request) {
	const bearer = bearerOf(request);
	const body = await bodyOf(request);
	check(body, { amount: isAmount, currency: isCurrency, item: isText });
	return orders.place(bearer, keyOf(request), body);
}

async function listCharges(request, url) {
	const limit = url.searchParams.get("limit") ?? "20";
	if (!/^([1-9]\d?|100)$/.test(limit))
		throw new Problem(400, "limit must be a number from 1 to 100.");
	const [found] = await query("SELECT payments.charges($1, $2)::text AS body", bearerOf(request), limit);
	return json(found.body);
}

async function showCharge(request, url) {
	const id = url.pathname.slice("/charges/".length);
	const [found] = await query("SELECT payments.charge_show($1, $2)::text AS body", bearerOf(request), id);
	if (found.body === null)
		throw new Problem(404, "There is no such charge.");
	return json(found.body);
}

// file is a constant answer. Its policy allows no other origin.
function file(name, type, change = (text) => text) {
	const headers = {
		"Content-Type": type,
		"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; " +
			"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	};
	const body = change(readFileSync(path.join(__dirname, name), "utf8"));
	return () => ({ status: 200, headers, body });
}

const description = file("openapi.json", "application/json");
const routes = [
	[/^\/charges$/, { GET: listCharges, POST: createCharge }],
	[/^\/charges\/[1-9]\d{0,17}$/, { GET: showCharge }],
	[/^\/orders$/, { POST: createOrder }],
	[/^\/openapi\.json$/, { GET: description }],
];

// The page pays on behalf of one tenant, until its keys expire.
if (process.env.PAYMENTS_TOKEN) {
	if (!new RegExp(`^${tokenPattern}$`).test(process.env.PAYMENTS_TOKEN))
		throw new Error("PAYMENTS_TOKEN is not a bearer token");
	const retention = JSON.parse(description().body)["x-idempotency-retention"];
	routes.push(
		[/^\/$/, { GET: file("page/index.html", "text/html; charset=utf-8", (text) => text
			.replace("{token}", process.env.PAYMENTS_TOKEN).replace("{retention}", retention)) }],
		[/^\/pay\.js$/, { GET: file("page/pay.js", "text/javascript; charset=utf-8") }],
		[/^\/pay\.css$/, { GET: file("page/pay.css", "text/css; charset=utf-8") }]);
}

// answer routes a request, and returns the answer.
async function answer(request) {
	let url;
	try {
		url = new URL(request.url, "http://localhost");
	} catch {
		throw new Problem(400, "The URL is malformed.");
	}
	const [, methods] = routes.find(([pattern]) => pattern.test(url.pathname)) || [];
	if (!methods)
		throw new Problem(404, "There is no such resource.");
	const method = request.method === "HEAD" ? "GET" : request.method;
	if (!Object.hasOwn(methods, method))
		throw new Problem(405, `${request.method} is not allowed here.`,
			{ Allow: Object.keys(methods).join(", ").replace("GET", "GET, HEAD") });
	return methods[method](request, url);
}

// send sends an answer: a stored one byte for byte, with a header that marks the
// replay.
function send(request, response, { status, headers, body, replayed }) {
	response.writeHead(status, {
		...headers,
		"Content-Length": Buffer.byteLength(body),
		"Cache-Control": "no-store",
		"X-Content-Type-Options": "nosniff",
		...(replayed && { "Idempotent-Replayed": "true" }),
	});
	response.end(request.method === "HEAD" ? undefined : body);
}

// ---------------------------------------------------------------------------
// The server
// ---------------------------------------------------------------------------

const pending = new WeakMap(); // number of requests of a connection, because requests can be pipelined
const count = (socket, change) => pending.set(socket, (pending.get(socket) ?? 0) + change);
const timeouts = { headersTimeout: timeout, requestTimeout: timeout, connectionsCheckingInterval: 1000 };
const server = http.createServer(timeouts, async (request, response) => {
	count(request.socket, 1);
	response.once("close", () => count(request.socket, -1));
	const given = await answer(request).catch(problemOf);
	try {
		send(request, response, given);
	} catch (error) { // an invalid stored answer must not end the service and its other requests
		send(request, response, problemOf(error));
	}
});

// A request that is not HTTP gets a problem too, except after a pending request, whose
// client would take the problem as its answer.
server.on("clientError", (error, socket) => {
	const { status, headers, body } = new Problem({ HPE_HEADER_OVERFLOW: 431, ERR_HTTP_REQUEST_TIMEOUT: 408 }[error.code] || 400,
		"This is not an HTTP request.");
	if (pending.get(socket) > 0 || !socket.writable)
		socket.destroy();
	else
		socket.end(`HTTP/1.1 ${status} ${http.STATUS_CODES[status]}\r\nContent-Type: ${headers["Content-Type"]}\r\n` +
			`Content-Length: ${Buffer.byteLength(body)}\r\nConnection: close\r\n\r\n${body}`);
});

const stopCompleter = orders.startCompleter();
server.listen(Number(process.env.PORT || 0), "127.0.0.1", () => {
	console.log(`listening on http://127.0.0.1:${server.address().port}`);
});

for (const signal of ["SIGTERM", "SIGINT"])
	process.once(signal, () => {
		server.close(async () => {
			await stopCompleter();
			await database.close();
		});
		server.closeIdleConnections();
	});
