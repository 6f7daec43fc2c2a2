// What the services of Node do, whatever the framework: clients/README.md describes the paths.

"use strict";

const { readFileSync } = require("fs");
const { Readable } = require("stream");
const { setTimeout: sleep } = require("timers/promises");
const { Failure, claim, consume, isTransient, lease, once, onceMany, publish, retrying, run, sqlState } = require("../../../../clients/node");

// The service with a client: { idempotent, plain }, the handlers of paths. Those of idempotent get the parsed
// body, the query, and the transaction; each has its options.
module.exports = function service(client, unavailable) {
	const { db, insert, elsewhere } = client;
	const troubled = async (session) => (await session.query("SELECT count(*) > 0 AS trouble FROM trouble"))[0].trouble;

	async function charge({ body }, tx, session) {
		const { customer, amount, action } = body;
		if (action === "elsewhere")
			try {
				await elsewhere(customer, amount);
				throw new Error("a bug after the write");
			} catch (error) {
				return { status: 500, body: { error: sqlState(error) } };
			}
		const id = Number(await insert(tx, customer, amount));
		await session.query("SELECT pg_sleep($1::text::integer)::text", [action === "slow" ? "1" : "0"]);
		if (/^[0-9A-Z]{5}$/.test(action))
			await session.query("SELECT fail_with($1::text)::text", [action]);
		if (action === "duplicate")
			try {
				await session.query("SELECT fail_with('23505')::text");
			} catch (error) {
				return { status: 409, body: { error: "duplicate" } };
			}
		if (action === "missing")
			readFileSync("/nonexistent/file");
		if (action === "decline")
			return { status: 402, body: { error: "card_declined" } };
		if (action === "overload")
			return { status: 503, body: { error: "overload" } };
		if (action === "limit")
			return { status: 429, headers: { "Retry-After": "7" }, body: { error: "limit" } };
		if (action === "crash" && await troubled(session))
			throw new Error("a bug");
		return { status: 201, headers: { Location: `/charges/${id}` }, body: { id, customer } };
	}

	async function answer({ query }, tx) {
		await insert(tx, "answer", 1);
		const headers = { ETag: '"1"', "Set-Cookie": "session=1", "X-Request-Id": String(Math.random()) };
		if (query.encoding !== undefined)
			headers["Content-Encoding"] = query.encoding;
		if (query.body === undefined)
			return { status: 204, headers };
		return { headers: { ...headers, "Content-Type": query.type }, body: Buffer.from(query.body, "base64url") };
	}

	async function stream(request, tx) {
		await insert(tx, "stream", 1);
		return { headers: { "Content-Type": "text/plain" }, body: Readable.from(["a", "b"]) };
	}

	const runs = ({ key, ...request }) => run(db, "run", key, { request, status: request.action === "decline" ? 402 : 200 }, async (tx, session) => {
		await insert(tx, request.customer, request.amount);
		if (request.action === "decline")
			throw new Failure({ error: "card_declined" }, 402);
		if (request.action)
			await session.query("SELECT fail_with($1::text)::text", [request.action]);
		return { customer: request.customer };
	});

	const plain = {
		async "/run"(body) {
			const { replayed, failed, status, response } = await runs(body);
			return { replayed, failed, status, response };
		},

		// The third attempt succeeds.
		async "/retrying"({ key, ...request }) {
			let attempts = 0;
			const { response } = await retrying(() => {
				attempts++;
				return runs({ key, ...request, action: attempts < 3 ? "40001" : undefined });
			});
			return { attempts, response };
		},

		"/open": ({ key, customer, amount }) => db.transaction(async (session) => {
			await claim(session, "open", key);
			await insert(session.tx, customer, amount);
		}),

		"/once": ({ key, fail }) => db.transaction(async (session) => {
			const fresh = await once(session, "once", key);
			if (fail)
				await session.query("SELECT fail_with('23505')::text").catch(() => {});
			else if (fresh)
				await insert(session.tx, "once", 1);
			return { new: fresh };
		}),

		"/once_many": async ({ keys }) => ({ new: await onceMany(db, "once", keys) }),

		async "/lease"({ key, customer, amount, action }) {
			let state = null;
			const result = await lease(db, "lease", key, { request: { customer, amount }, lease: "1 second", wait: "0" }, async (held) => {
				state = held.state ?? null;
				if (action === "decline")
					throw new Failure({ error: "card_declined" }, 402);
				await held.checkpoint("charged", { charge: "ch_1" });
				while (action === "hold" && await troubled(db)) {
					held.signal.throwIfAborted();
					await sleep(50);
				}
				if (action === "crash" && await troubled(db))
					throw new Error("a bug");
				const completed = held.complete(async (tx, session) => {
					await insert(tx, customer, amount);
					if (action === "ignore")
						await session.query("SELECT fail_with('23505')::text");
					return { customer };
				});
				await (action === "ignore" ? completed.catch(() => {}) : completed);
			});
			return { replayed: result.replayed, attempt: result.attempt ?? null, state, response: result.response };
		},

		"/publish": async ({ topic, payload, aggregate }) => ({ published: /^[0-9a-f-]{36}$/.test(await publish(db, topic, payload, { aggregateId: aggregate })) }),

		async "/consume"({ subscription, stop }) {
			const handled = [];
			const stopping = new AbortController();
			await consume(db, subscription, async ({ payload: { customer }, attempt, id }) => {
				if (stop) {
					stopping.abort();
					stopping.signal.throwIfAborted();
				}
				if (customer === "poison")
					throw Object.assign(new Error("poison \0"), { dead: true });
				if (customer === "flaky" && attempt === 1)
					throw new Error("flaky");
				await db.transaction(async (session) => {
					if (await once(session, "consume", id))
						await insert(session.tx, customer, 1);
				});
				handled.push({ customer, attempt });
			}, { untilEmpty: true, signal: stopping.signal });
			return { handled };
		},
	};

	const idempotent = {
		"/charges": [{}, charge],
		"/lenient": [{ scope: () => "lenient", lenient: true }, charge],
		"/scopeless": [{ scope: () => "" }, charge],
		"/waiting": [{ wait: "30 seconds" }, charge],
		"/unavailable": [{ db: unavailable.db }, charge],
		"/omitting": [{ omit: ["/sent_at", "/meta/trace"] }, charge],
		"/answer": [{}, answer],
		"/listed": [{ headers: ["X-Request-Id"] }, answer],
		"/stream": [{}, stream],
	};

	// The routes for a framework: user(request) returns its header X-User.
	const routes = (user) => Object.entries(idempotent).map(([path, [options, handler]]) =>
		[path, { db, scope: (request) => user(request) ?? "http", ...options }, handler]);

	// call answers a path of plain with { status, body }.
	async function call(path, body) {
		try {
			return { status: 200, body: await plain[path](body) };
		} catch (error) {
			return { status: isTransient(error) ? 503 : 500, body: { error: sqlState(error) ?? String(error) } };
		}
	}

	return { call, paths: Object.keys(plain), routes };
};
