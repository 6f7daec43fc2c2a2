// Tests of what the cases of conformance.json do not reach. test/clients/pack runs them with the installed package
// and a database.

"use strict";

const assert = require("node:assert");
const { after, test } = require("node:test");
const { Pool } = require("pg");
const idempotency = require("pg-idempotency");
const { idempotent, keepBody } = require("pg-idempotency/express");

const { Failure, claim, complete, consume, fail, isTransient, lease, once, onceMany, pg, publish, release, retrying, run, sqlState, tryClaim } = idempotency;
const pool = new Pool();
const db = pg(pool);
after(() => pool.end());

const untouched = { query: () => assert.fail("a query was sent") };
const refused = (call, message) => assert.rejects(call, (error) => error instanceof TypeError && error.code === "IK400" && message.test(error.message));

test("values that cannot be keys are refused before the query", async () => {
	for (const [key, message] of [[{}, /object/], [["a"], /object/], [Promise.resolve("a"), /await/], [2 ** 53, /BigInt/], [1.5, /BigInt/],
		[undefined, /undefined/], [null, /null/], [true, /boolean/], [NaN, /BigInt/], [Symbol("a"), /symbol/]]) {
		await refused(async () => once(untouched, "test", key), message);
		await refused(async () => claim(untouched, key, "key"), message);
		await refused(async () => onceMany(untouched, "test", ["a", key]), message);
	}
});

test("values that are no JSON are refused before the query", async () => {
	await refused(async () => claim(untouched, "test", "key", { request: undefined }), /undefined/);
	await refused(async () => claim(untouched, "test", "key", { request: Promise.resolve() }), /await/);
	await refused(async () => publish(untouched, "test", () => {}), /function/);
	await assert.rejects(async () => complete(untouched, "test", "key", 1n), /BigInt/);
});

test("BigInts and integers are keys", async () => {
	assert.strictEqual(await once(db, "test", 12345678901234567890n), true);
	assert.strictEqual(await once(db, "test", "12345678901234567890"), false);
	assert.strictEqual(await once(db, "test", 42), true);
	assert.strictEqual(await once(db, "test", "42"), false);
});

test("a claim with a lease, its token, and a duplicate", async () => {
	const owner = await claim(db, "test", "lease", { request: { a: [1] }, lease: "30 seconds" });
	assert.strictEqual(owner.outcome, "claimed");
	assert.match(owner.token, /^\d+$/);
	const duplicate = await tryClaim(db, "test", "lease", { request: { a: [1] }, wait: 0 });
	assert.strictEqual(duplicate.outcome, "in_progress");
	assert.ok(Number.isInteger(duplicate.retryAfter) && duplicate.retryAfter <= 30, String(duplicate.retryAfter));
	assert.strictEqual((await tryClaim(db, "test", "lease", { request: { a: 1 } })).outcome, "mismatched");
	await release(db, "test", "lease", { token: owner.token });
	const next = await claim(db, "test", "lease", { request: { a: [1] }, lease: 30 });
	await assert.rejects(complete(db, "test", "lease", null, { token: owner.token }), (error) => sqlState(error) === "IK410");
	assert.deepStrictEqual(await fail(db, "test", "lease", [{ big: 1 }], { status: 409, headers: { A: "b" }, token: next.token }), [{ big: 1 }]);
	const replay = await claim(db, "test", "lease");
	assert.deepStrictEqual([replay.replayed, replay.failed, replay.status, replay.headers, replay.response, replay.responseText],
		[true, true, 409, { A: "b" }, [{ big: 1 }], '[{"big":1}]']);
});

test("run keeps what the options say, and arrays of one element", async () => {
	const first = await run(db, "test", "run", { request: [{ a: 1 }], status: 201, headers: { Location: "/1" } }, async () => [{ line: 1 }]);
	const second = await run(db, "test", "run", { request: [{ a: 1 }] }, () => assert.fail("called again"));
	assert.deepStrictEqual([first.status, first.headers, first.response], [201, { Location: "/1" }, [{ line: 1 }]]);
	assert.deepStrictEqual([second.status, second.headers, second.response], [201, { Location: "/1" }, [{ line: 1 }]]);
	await assert.rejects(run(db, "test", "run", { request: { a: 1 } }, () => {}), (error) => sqlState(error) === "IK422");
});

test("work of a lease can return its response, and fail for good", async () => {
	assert.deepStrictEqual((await lease(db, "test", "returns", { lease: "30 seconds" }, async () => ({ a: 1 }))).response, { a: 1 });
	assert.deepStrictEqual((await lease(db, "test", "returns", { lease: "30 seconds" }, () => assert.fail())).response, { a: 1 });
	const failed = await lease(db, "test", "fails", { lease: "30 seconds" }, async (held) => held.complete(() => { throw new Failure({ no: 1 }, 402); }));
	assert.deepStrictEqual([failed.failed, failed.status, failed.response], [true, 402, { no: 1 }]);
	await assert.rejects(lease(db, "test", "no", {}, () => {}), /the option lease/);
	for (const inside of [(held) => held.checkpoint("late"), (held) => held.complete(() => {})])
		await assert.rejects(lease(db, "test", "nested", { lease: "30 seconds" }, (held) => held.complete(() => inside(held))), /complete\(\) is running/);
});

test("a session of a transaction that the application began", async () => {
	const client = await pool.connect();
	await client.query("BEGIN");
	assert.strictEqual(await once(db.with(client), "test", "own"), true);
	await client.query("ROLLBACK");
	client.release();
	assert.strictEqual(await once(db, "test", "own"), true);
});

test("a consumer that the server refuses for good ends with the error", async () => {
	for (const [wrong, code] of [[{ user: "absent" }, "28000"], [{ database: "nothing" }, "3D000"]]) {
		const refusing = new Pool(wrong);
		await assert.rejects(consume(pg(refusing), "package", () => {}), { code });
		await refusing.end();
	}
});

test("a transaction whose statement has failed is not committed silently", async () => {
	await assert.rejects(db.transaction((session) => session.query("SELECT 1/0").catch(() => "caught")), /rolled back/);
});

test("the SQLSTATE of wrapped errors, and codes that are none", () => {
	const state = { code: "40001" };
	for (const error of [state, { cause: state }, { parent: state }, { original: state }, { code: "P2010", meta: { driverAdapterError: { cause: { originalCode: "40001" } } } },
		{ driverError: { code: "40001" } }, { cause: { cause: state } }, { code: "XX000", cause: state }])
		assert.strictEqual(sqlState(error), "40001", JSON.stringify(error));
	const loop = { code: "EPIPE" };
	loop.cause = loop;
	for (const error of [loop, { code: "P2010" }, { code: "ECONNREFUSED" }, new Error("x"), null, undefined, "40001"])
		assert.strictEqual(sqlState(error), undefined);
	for (const error of [loop, state, { code: "CONNECTION_CLOSED" }, { code: "IK409" }, new Error("Connection terminated unexpectedly")])
		assert.ok(isTransient(error), String(error.code ?? error));
	for (const error of [{ code: "23505" }, { code: "IK428" }, { code: "IK422" }, new TypeError("bug"), { code: "P2010" }])
		assert.ok(!isTransient(error), String(error.code ?? error));
});

test("retrying stops: at an error that is not transient, after its seconds, and at the signal", async () => {
	let calls = 0;
	const failing = (code) => retrying(async () => { calls++; throw Object.assign(new Error(code), { code }); }, { seconds: 0.2 });
	await assert.rejects(failing("23505"));
	assert.strictEqual(calls, 1);
	await assert.rejects(failing("40001"), { code: "40001" });
	assert.ok(calls > 2);
	await assert.rejects(retrying(async () => { throw Object.assign(new Error("x"), { code: "40001" }); }, { signal: AbortSignal.abort() }));
});

// A subscription of this program's role; the portable edition has no role for consumers.
test("consume keeps a batch while it works, and returns the rest when it is stopped", { skip: process.env.EDITION === "portable" }, async () => {
	await db.query("SELECT idempotency.subscribe('package', ARRAY['package'], retry_delay => '0')");
	for (const number of [1, 2, 3])
		await publish(db, "package", { number });
	const stop = new AbortController();
	const handled = [];
	await consume(db, "package", async ({ payload: { number }, attempt }, { signal }) => {
		handled.push([number, attempt]);
		if (number === 1)
			await new Promise((resolve) => setTimeout(resolve, 1500)); // longer than the lease
		assert.ok(!signal.aborted);
		if (number === 2)
			stop.abort();
	}, { signal: stop.signal, lease: "1 second", wait: "10 seconds" });
	assert.deepStrictEqual(handled, [[1, 1], [2, 1]]);

	// No attempt is counted for what was returned; another consumer waits for events, and stops.
	const second = new AbortController();
	await consume(db, "package", async ({ payload: { number }, attempt }) => {
		handled.push([number, attempt]);
		second.abort();
	}, { signal: second.signal });
	assert.deepStrictEqual(handled.slice(2), [[3, 1]]);
	const [{ unsubscribed }] = await db.query("SELECT idempotency.unsubscribe('package') AS unsubscribed");
	assert.ok(unsubscribed);
});

test("bodies that a parser has read, that are too large, or compressed; paths; headers that cannot be sent", async () => {
	const express = require("express");
	const app = express();
	app.set("env", "test"); // an error is answered without a log
	const route = (maxBody) => idempotent({ db, scope: () => "bodies", maxBody }, ({ body }) => ({ body: { body } }));
	app.post("/kept", express.json({ verify: keepBody }), route());
	app.post("/read", express.json(), route());
	app.post("/small", route(10));
	app.post("/path/:name", route());
	const refusing = { "/character": () => ({ headers: { Location: "/\u0451" } }), "/undefined": () => ({ headers: { Location: undefined } }),
		"/nothing": () => {}, "/value": () => ({ charge: 1 }), "/generator": async function* () { yield 1; } };
	for (const [path, handler] of Object.entries(refusing))
		app.post(path, idempotent({ db, scope: () => "bodies" }, handler));
	app.use((error, request, response, next) => response.status(500).send(error.message));
	const server = app.listen(0);
	const post = async (path, headers = {}, body = '{"a": 12345678901234567890}') => {
		const answer = await fetch(`http://127.0.0.1:${server.address().port}${path}`,
			{ method: "POST", body, headers: { "Content-Type": "application/json", "Idempotency-Key": `"${path}"`, ...headers } });
		return [answer.status, answer.headers.get("Content-Type"), await answer.text()];
	};
	try {
		assert.deepStrictEqual(await post("/kept"), [200, "application/json", '{"body":{"a":12345678901234567000}}']);
		assert.strictEqual((await post("/kept", {}, '{"a": 12345678901234567891}'))[0], 422); // parsed, both are equal
		const [status, , text] = await post("/read");
		assert.strictEqual(status, 500);
		assert.match(text, /keepBody/);
		assert.deepStrictEqual((await post("/small")).slice(0, 2), [413, "application/problem+json"]);
		assert.strictEqual((await post("/small", {}, "[1]"))[0], 200);
		// A path is compared decoded, as other languages have it.
		await pool.query(`SELECT idempotency.complete('bodies', 'path', '1', 200, '{"Content-Type": "application/json"}')
			FROM idempotency.claim('bodies', 'path',
			fingerprint => idempotency.fingerprint('POST', '/path/%C3%A9!', '{"a": 12345678901234567890}'))`);
		assert.strictEqual((await post("/path/%c3%a9%21", { "Idempotency-Key": '"path"' }))[0], 200);
		assert.strictEqual((await post("/path/%c3%a8%21", { "Idempotency-Key": '"path"' }))[0], 422);
		// What is no answer, or cannot be sent, is not stored.
		for (const path of Object.keys(refusing)) {
			assert.strictEqual((await post(path))[0], 500);
			assert.strictEqual(await once(db, "bodies", path), true);
		}
		assert.deepStrictEqual((await post("/small", { "Content-Encoding": "gzip" })).slice(0, 2), [415, "application/problem+json"]);
	} finally {
		server.close();
	}
});

test("a route of Nest that sends its answer itself is refused before the claim", { skip: process.env.LANGUAGES !== "all" }, async () => {
	require("reflect-metadata");
	const { Post, Res } = require("@nestjs/common");
	const { IdempotencyInterceptor } = require("pg-idempotency/nest");
	class Charges {
		whole() {}
		itself() {}
	}
	for (const [name, parameter] of [["whole", Res({ passthrough: true })], ["itself", Res()]]) {
		parameter(Charges.prototype, name, 0);
		Post(name)(Charges.prototype, name, Object.getOwnPropertyDescriptor(Charges.prototype, name));
	}
	const reached = new Error("the claim");
	const interceptor = new IdempotencyInterceptor({ db: { transaction: () => Promise.reject(reached) }, scope: () => "nest" });
	const call = (name) => interceptor.intercept({ getClass: () => Charges, getHandler: () => Charges.prototype[name],
		switchToHttp: () => ({ getRequest: () => ({ headers: {}, method: "POST", url: "/" }), getResponse() {} }) });
	await assert.rejects(call("whole"), reached);
	await assert.rejects(call("itself"), /passthrough/);
});

test("a pool survives the loss of an idle connection", async () => {
	const idle = new Pool();
	await once(pg(idle), "test", "idle");
	idle.emit("error", new Error("Connection terminated unexpectedly")); // without a listener, it throws
	await idle.end();
});

test("options that would be dangerous are refused when the route is made", () => {
	const scope = () => "a";
	for (const [options, message] of [[{ db }, /scope/], [{ db, scope: "http" }, /scope/], [{ scope }, /adapter/], [{ db: pool, scope }, /adapter/],
		[{ db, scope, headers: ["Set-Cookie"] }, /set-cookie/], [{ db, scope, headers: ["DATE"] }, /date/], [{ db, scope, omit: ["sent_at"] }, /JSON pointer/],
		[{ db, scope, lenent: true }, /lenent/]])
		assert.throws(() => idempotent(options, () => {}), message);
});
