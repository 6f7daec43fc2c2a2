// Handlers for Express that have their effect exactly once: the header Idempotency-Key
// (draft-ietf-httpapi-idempotency-key-header) with the extension idempotency.
//
//	const idempotent = require("./idempotent_express");
//	app.use(express.json({ verify: idempotent.keepBody }));
//	app.post("/charges", idempotent({ pool }, async (request, client) => {
//		const { rows: [charge] } = await client.query("INSERT INTO charge …", [request.body.amount]);
//		return { status: 201, headers: { Location: `/charges/${charge.id}` }, body: charge };
//	}));
//
// The handler writes through the client that it gets, which is in a transaction: key,
// effect and answer commit together. The result decides what is stored:
//
//	below 400	the answer is stored and replayed
//	400 to 499	the same, but the writes of the handler are undone
//	from 500 on, or an error	nothing is stored or written, and a retry runs the handler
//
// Options:
//
//	pool		pg.Pool; behind PgBouncer in transaction mode, too
//	scope		the boundary of keys, or a function of the request, such as its tenant
//	lenient		also take a key without quotes, as older clients send it
//	wait		how long a duplicate waits for the first request before it gets 409: an interval,
//			such as "2 seconds"; a number is seconds, not milliseconds
//	retention	how long the answer is replayed, in the same form

"use strict";

const { isUtf8 } = require("buffer");
const { STATUS_CODES } = require("http");

// Errors after which the same request can succeed.
const transient = /^(08|40|53|55P03|57|58|25006|IK409|IK410|E[A-Z]+$)/;

const CLAIM = (key) => `SELECT outcome, status, headers::text, response::text, idempotency.problem(op)::text AS problem,
		idempotency.problem(op) -> 'status' AS refused, idempotency.problem_headers(op) AS problem_headers
	FROM idempotency.try_claim(scope => $1, key => ${key}, fingerprint => idempotency.fingerprint($3, $4, $5),
		wait => $6, retention => $7) AS op`;

// problem is an error answer (RFC 9457).
function problem(status, detail, headers = {}) {
	const body = JSON.stringify({ type: "about:blank", title: STATUS_CODES[status], status, detail });
	return { status, headers: { "Content-Type": "application/problem+json", ...headers }, body };
}

const unavailable = () => problem(503, "Try again with the same key.", { "Retry-After": "1" });

// badKey is the answer to a missing or malformed header. It links to idempotency.documentation.
async function badKey(client) {
	const { rows: [answer] } = await client.query("SELECT idempotency.problem_headers($1) AS headers, idempotency.problem($1)::text AS body",
		["IK400"]);
	return { status: 400, ...answer };
}

// Errors of a claim after which the request must change: its body is not JSON (a text that
// is no JSON, a code point or number that jsonb cannot hold, too deep, too large).
const malformed = /^(22P02|22P05|22003|22021|5400[01])$/;

// problemOf returns the answer to an error, or undefined if the error is a bug. The client
// is at fault only for errors of the claim.
async function problemOf(error, client) {
	if (error.ofClaim && error.code === "IK400")
		return badKey(client);
	if (error.ofClaim && malformed.test(error.code))
		return problem(400, "The body is not JSON that can be compared.");
	if (transient.test(error.code) || /Connection terminated|timeout/.test(error.message))
		return unavailable();
}

// claim claims the operation, and returns its row.
async function claim(client, options, request) {
	const header = request.get("Idempotency-Key");
	const unquoted = options.lenient && /^[\w.:+/=-]+$/.test(header ?? "");
	const scope = typeof options.scope === "function" ? await options.scope(request) : options.scope ?? "http";
	if (typeof scope !== "string")
		throw new Error("the scope is no string");
	if (request.idempotentBody === undefined && (request.get("Transfer-Encoding") || Number(request.get("Content-Length"))))
		throw new Error("the body was not kept: use express.json({ verify: idempotent.keepBody }), and JSON");
	try {
		const { rows } = await client.query(CLAIM(unquoted ? "$2" : "idempotency.parse_header($2)"), [scope, header ?? null,
			request.method, request.originalUrl, request.idempotentBody ?? null, options.wait ?? "0", options.retention ?? null]);
		return { scope, header, unquoted, ...rows[0] };
	} catch (error) {
		throw Object.assign(error, { ofClaim: true });
	}
}

// finish stores an answer: complete or fail.
async function finish(client, operation, answer) {
	const name = answer.status < 400 ? "complete" : "fail";
	const key = operation.unquoted ? "$2" : "idempotency.parse_header($2)";
	await client.query(`SELECT idempotency.${name}(scope => $1, key => ${key}, response => $3, status => $4, headers => $5,
		omit_large => true)`,
		[operation.scope, operation.header, answer.body, answer.status, JSON.stringify(answer.headers)]);
}

// run runs the handler in the client's transaction, which it ends, and returns the
// answer.
async function run(client, options, handler, request) {
	await client.query("BEGIN");
	const operation = await claim(client, options, request);
	if (operation.problem !== null) {
		await client.query("ROLLBACK");
		return { status: operation.refused, headers: operation.problem_headers, body: operation.problem };
	}
	if (operation.outcome === "replayed") {
		await client.query("COMMIT");
		return { status: operation.status, headers: JSON.parse(operation.headers), body: operation.response };
	}
	await client.query("SAVEPOINT handler");
	const { status = 200, headers = {}, body } = await handler(request, client);
	const answer = { status, headers, body: body === undefined ? null : JSON.stringify(body) };
	if (body !== undefined && !headers["Content-Type"])
		answer.headers = { "Content-Type": "application/json", ...headers };
	if (status >= 500) {
		await client.query("ROLLBACK");
		return answer;
	}
	if (status >= 400)
		await client.query("ROLLBACK TO SAVEPOINT handler");
	await finish(client, operation, answer);
	await client.query("COMMIT");
	return answer;
}

// idempotent returns a handler for Express.
function idempotent(options, handler) {
	return async (request, response, next) => {
		let client, answer;
		let broken = false;
		try {
			client = await options.pool.connect();
			client.on("error", () => {}); // a lost connection also fails the query in progress
			answer = await run(client, options, handler, request);
		} catch (error) {
			await client?.query("ROLLBACK").catch(() => { broken = true; });
			answer = await problemOf(error, client);
			if (!answer)
				return next(error);
		} finally {
			client?.removeAllListeners("error");
			client?.release(broken);
		}
		response.status(answer.status).set(answer.headers);
		response.end(answer.body ?? undefined);
	};
}

// keepBody is the option "verify" of express.json(): it keeps the bytes for the
// fingerprint, because parsed numbers are rounded.
idempotent.keepBody = (request, response, buffer) => {
	if (!isUtf8(buffer))
		throw Object.assign(new Error("The body is not UTF-8."), { status: 400 });
	request.idempotentBody = buffer.toString();
};

module.exports = idempotent;
