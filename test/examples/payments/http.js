// The HTTP interface of examples/payments: every status, header and body that a client
// can receive, compared with the IETF draft and with the description that the service
// publishes.

"use strict";

const { execFileSync, spawnSync } = require("child_process");
const { readFileSync } = require("fs");
const net = require("net");
const {
	assert, check, isProblem, killService, main, newKey, request, retry, script, service, session, sql, sqlstate, stored, until,
} = require("./common");
const { Description } = require("./openapi");

const { PAYMENTS_URL, PAYMENTS_TOKEN, PAYMENTS_OTHER_TOKEN, PAYMENTS_DIR } = process.env;
const charge = { amount: 2500, currency: "EUR", description: "a book" };
const order = { amount: 2500, currency: "EUR", item: "a book" };
const charges = () => Number(sql("SELECT count(*) FROM payments.charge"));
let description;

// ask sends a request whose response must be described.
async function ask(method, where, options) {
	const answer = await request(method, where, options);
	description.check(method, where, answer);
	return answer;
}

const post = (where, key, body, options) => ask("POST", where, { key, body, ...options });

// ---------------------------------------------------------------------------
// One effect, one response
// ---------------------------------------------------------------------------

// isReplayed checks that a second request returns the first response.
function isReplayed(first, second) {
	assert.equal(first.headers["idempotent-replayed"], undefined);
	assert.equal(second.headers["idempotent-replayed"], "true");
	assert.deepEqual(stored(second), stored(first));
}

async function replays() {
	for (const [name, where, body, status] of [
		["a charge", "/charges", charge, 201],
		["a charge without a description", "/charges", { amount: 1, currency: "EUR" }, 201],
		["a charge with characters to escape", "/charges", { ...charge, description: "a \"book\" \\ \u20ac 'x'; \u{1f4d6}" }, 201],
		["a refused charge", "/charges", { ...charge, amount: 1000001 }, 402],
		["an order", "/orders", order, 201],
		["a refused order", "/orders", { ...order, amount: 500001 }, 402],
	])
		await check(`${name}: the retry gets the same bytes`, async () => {
			const before = charges();
			const key = newKey();
			const first = await post(where, key, body);
			assert.equal(first.status, status, first.body.toString());
			isReplayed(first, await post(where, key, body));
			isReplayed(first, await post(where, key, JSON.stringify(body, null, 3)));
			assert.equal(charges() - before, where === "/charges" && status === 201 ? 1 : 0);
			if (status === 402)
				isProblem(first, 402);
		});

	await check("a replay comes from the database: another service returns it", async () => {
		const other = await service();
		const key = newKey();
		isReplayed(await post("/charges", key, charge), await post("/charges", key, charge, { url: other.url }));
		other.process.kill();
	});

	await check("Location is the URL of the charge", async () => {
		const made = await post("/charges", newKey(), charge);
		const found = await ask("GET", made.headers.location);
		assert.deepEqual(JSON.parse(found.body), JSON.parse(made.body));
		assert.equal(made.headers.location, `/charges/${JSON.parse(made.body).id}`);
		isProblem(await ask("GET", "/charges/999999999"), 404);
	});

	await check("forty concurrent requests: one charge", async () => {
		const before = charges();
		const key = newKey();
		const answers = await Promise.all(Array.from({ length: 40 }, () => retry("POST", "/charges", { key, body: charge })));
		assert.equal(charges() - before, 1);
		assert.equal(answers.filter((answer) => !answer.headers["idempotent-replayed"]).length, 1);
		answers.forEach((answer) => assert.deepEqual(stored(answer), stored(answers[0])));
	});
}

async function tenants() {
	await check("another tenant's key is another key", async () => {
		const key = newKey();
		const [mine, theirs] = [await post("/charges", key, charge),
			await post("/charges", key, { ...charge, amount: 7 }, { token: PAYMENTS_OTHER_TOKEN })];
		assert.equal(mine.headers["idempotent-replayed"] || theirs.headers["idempotent-replayed"], undefined);
		isProblem(await ask("GET", mine.headers.location, { token: PAYMENTS_OTHER_TOKEN }), 404);
		const list = JSON.parse((await ask("GET", "/charges", { token: PAYMENTS_OTHER_TOKEN })).body).charges;
		assert.deepEqual(list, [JSON.parse(theirs.body)]);
	});

	await check("the list: newest first, and the requested number", async () => {
		const newest = JSON.parse((await post("/charges", newKey(), charge)).body);
		const list = JSON.parse((await ask("GET", "/charges?limit=3")).body).charges;
		assert.equal(list.length, 3);
		assert.deepEqual(list[0], newest);
		assert.ok(list[0].id > list[1].id && list[1].id > list[2].id);
		for (const limit of ["0", "101", "-1", "x", "", "1e1"])
			isProblem(await ask("GET", `/charges?limit=${limit}`), 400);
	});

	await check("tenant names are short enough for a scope", async () => {
		const insert = (name) => `INSERT INTO payments.tenant VALUES ('${name}', sha256('long'))`;
		for (const name of ["", "a b", "a\n", "x".repeat(201)])
			assert.equal(sqlstate(insert(name)), "23514", name);
		sql(insert("x".repeat(200)));
		for (const [where, body] of [["/charges", charge], ["/orders", order]])
			assert.equal((await post(where, newKey(), body, { token: "long" })).status, 201);
	});

	await check("an unknown client gets 401", async () => {
		for (const [method, where] of [["POST", "/charges"], ["POST", "/orders"], ["GET", "/charges"], ["GET", "/charges/1"]])
			for (const headers of [{}, { Authorization: "Bearer" }, { Authorization: "Bearer wrong" },
				{ Authorization: `Basic ${PAYMENTS_TOKEN}` }, { Authorization: `Bearer ${PAYMENTS_TOKEN} x` }]) {
				const body = method === "POST" ? (where === "/orders" ? order : charge) : undefined;
				const answer = await ask(method, where, { token: null, key: newKey(), body, headers });
				isProblem(answer, 401);
				assert.equal(answer.headers["www-authenticate"],
					headers.Authorization === "Bearer wrong" ? "Bearer error=\"invalid_token\"" : "Bearer");
			}
	});
}

// ---------------------------------------------------------------------------
// The header
// ---------------------------------------------------------------------------

async function header() {
	const before = charges();
	for (const where of ["/charges", "/orders"])
		await check(`${where}: a key that is missing or malformed`, async () => {
			const body = where === "/orders" ? order : charge;
			for (const key of [undefined, "", "   ", "\"\"", `"${"x".repeat(256)}"`])
				assert.match(isProblem(await post(where, key, body), 400).detail, /^The header [\w-]+ is required: a string of 1 to 255 char/);
			for (const key of ["8e03978e-40d5", "'a'", "\"a", "a\"", "\"a\"b", "\"a\" \"b\"", "\"a\", \"b\"",
				"\"\\x\"", "\"\u00e9\"", "?1", "42", ":YQ==:", "(\"a\")", "\"a\";X", "\"a\";x=", ["\"a\"", "\"b\""]])
				assert.match(isProblem(await post(where, key, body), 400).detail,
					/^The header Idempotency-Key is malformed\. At character \d+: [^.]+\.$/);
		});
	assert.equal(charges(), before);

	await check("one key in several notations", async () => {
		const name = newKey().slice(1, -1);
		const first = await post("/charges", `"${name}\\"\\\\ b"`, charge);
		assert.equal(first.status, 201);
		for (const key of [`  "${name}\\"\\\\ b"  `, `"${name}\\"\\\\ b";v=1`, `"${name}\\"\\\\ b"; v="x";w=?0`])
			isReplayed(first, await post("/charges", key, charge));
		assert.equal((await post("/charges", `"${name}\\" b"`, charge)).headers["idempotent-replayed"], undefined);
		assert.equal((await post("/charges", `"${name.padEnd(255, "x")}"`, charge)).status, 201);
	});

	for (const [where, body] of [["/charges", charge], ["/orders", order]])
		await check(`${where}: a key that was used with another request`, async () => {
			const key = newKey();
			const first = await post(where, key, body);
			for (const other of [{ ...body, amount: 2501 }, { ...body, currency: "USD" }])
				assert.match(isProblem(await post(where, key, other), 422).detail, /another request/);
			isReplayed(first, await post(where, key, body));
		});

	await check("a charge and an order can have the same key", async () => {
		const key = newKey();
		assert.equal((await post("/charges", key, charge)).status, 201);
		assert.equal((await post("/orders", key, order)).headers["idempotent-replayed"], undefined);
	});
}

// ---------------------------------------------------------------------------
// In progress, unavailable
// ---------------------------------------------------------------------------

async function inProgress() {
	await check("a charge that is in progress in another transaction", async () => {
		const other = session();
		await other.say("BEGIN");
		assert.equal(await other.say("SELECT outcome FROM idempotency.claim('charges/shop', 'held')"), "claimed");
		const answer = await post("/charges", "\"held\"", charge);
		isProblem(answer, 409);
		assert.equal(answer.headers["retry-after"], "1");
		await other.say("ROLLBACK");
		assert.equal((await post("/charges", "\"held\"", charge)).headers["idempotent-replayed"], undefined);
	});

	await check("an order under another lease", async () => {
		sql("SELECT outcome FROM idempotency.claim('orders/shop', 'leased', lease => '200 seconds')");
		const answer = await post("/orders", "\"leased\"", order);
		isProblem(answer, 409);
		const after = Number(answer.headers["retry-after"]);
		assert.ok(after > 100 && after <= 200, `Retry-After: ${after}`);
		sql("SELECT idempotency.forget('orders/shop', 'leased')");
	});
}

// charging returns whether a charge waits for a lock on its table.
const charging = () => sql("SELECT count(*) FROM pg_locks WHERE relation = 'payments.charge'::regclass AND NOT granted") !== "0";

// counted starts a service whose connections to the pooler are counted.
async function counted() {
	const connections = [];
	const between = net.createServer((socket) => {
		connections.push(socket);
		const pooler = net.connect(`${PAYMENTS_DIR}/.s.PGSQL.6432`);
		for (const [from, to] of [[socket, pooler], [pooler, socket]]) {
			from.on("error", () => {});
			from.on("close", () => to.destroy());
			from.pipe(to);
		}
	});
	await new Promise((resolve) => between.listen(0, "127.0.0.1", resolve));
	return { connections, ...await service({ PGHOST: "127.0.0.1", PGPORT: String(between.address().port) }) };
}

async function unavailable() {
	await check("no database: 503 for every request that needs it", async () => {
		const { url, process } = await service({ PGHOST: "/nonexistent" });
		for (const answer of [await post("/charges", newKey(), charge, { url }), await post("/orders", newKey(), order, { url }),
			await ask("GET", "/charges", { url }), await ask("GET", "/charges/1", { url })]) {
			isProblem(answer, 503);
			assert.equal(answer.headers["retry-after"], "1");
		}
		process.kill();
	});

	await check("an invalid result: 500, and the service continues", async () => {
		const definition = sql("SELECT pg_get_functiondef('payments.charges'::regproc)");
		sql(definition.replace(/AS (\$\w*\$)[^]*\1/, "AS 'BEGIN RETURN NULL; END'"));
		isProblem(await request("GET", "/charges"), 500);
		sql(definition);
		assert.equal((await request("GET", "/charges")).status, 200);
	});

	await check("an internal error: 500 without details, and not stored", async () => {
		const key = newKey();
		for (const [name, method, where, body] of [["charge_create", "POST", "/charges", charge], ["order_begin", "POST", "/orders", order],
			["charges", "GET", "/charges"], ["charge_show", "GET", "/charges/1"]]) {
			sql(`ALTER FUNCTION payments.${name} RENAME TO ${name}_away`);
			const answer = await ask(method, where, { key, body });
			sql(`ALTER FUNCTION payments.${name}_away RENAME TO ${name}`);
			assert.doesNotMatch(JSON.stringify(isProblem(answer, 500)), /payments|function/);
			if (body)
				assert.equal((await post(where, key, body)).headers["idempotent-replayed"], undefined);
		}
	});

	await check("bad requests cost no connection to the pooler, and a lost one costs its query alone", async () => {
		const { url, process, connections } = await counted();
		assert.equal((await post("/charges", newKey(), charge, { url })).status, 201);
		const before = connections.length;
		for (let i = 0; i < 25; i++) {
			isProblem(await post("/charges", "malformed", charge, { url }), 400);
			isProblem(await post("/charges", newKey(), charge, { url, token: "wrong" }), 401);
		}
		assert.ok(connections.length - before < 5, `${connections.length - before} new ones`); // the completer may need one

		const other = session();
		await other.say("BEGIN");
		await other.say("LOCK TABLE payments.charge IN SHARE MODE");
		const lost = post("/charges", "\"lost\"", charge, { url });
		await until("the charge waits", () => charging());
		connections.forEach((socket) => socket.destroy());
		isProblem(await lost, 503);
		await other.say("ROLLBACK");
		assert.equal((await retry("POST", "/charges", { url, key: "\"lost\"", body: charge })).status, 201);
		process.kill();
	});

	await check("the service killed, the database crashed, both again: each key charges once", async () => {
		const before = charges();
		const keys = Array.from({ length: 60 }, newKey);
		let over = false;
		const clients = Array.from({ length: 6 }, async (_, i) => {
			const answers = [];
			for (let k = i; k < keys.length || !over; k += 6)
				answers.push([keys[k] ||= newKey(), await retry("POST", "/charges", { key: keys[k], body: charge })]);
			return answers;
		});
		killService();
		await script("restart-service");
		await script("restart-database");
		over = true;
		const answers = (await Promise.all(clients)).flat();
		for (const [key, answer] of answers) {
			assert.equal(answer.status, 201, answer.body.toString());
			const again = await retry("POST", "/charges", { key, body: charge });
			assert.deepEqual(stored(again), stored(answer));
		}
		assert.equal(charges() - before, answers.length);
		assert.equal(new Set(answers.map(([, answer]) => JSON.parse(answer.body).id)).size, answers.length);
	});
}

// ---------------------------------------------------------------------------
// Invalid requests
// ---------------------------------------------------------------------------

// raw sends bytes, closes its side of the connection or not, and returns the reply.
const raw = (bytes, { url = PAYMENTS_URL, end = true } = {}) => new Promise((resolve, reject) => {
	const socket = net.connect(Number(new URL(url).port), "127.0.0.1", () => (end ? socket.end(bytes) : socket.write(bytes)));
	let text = "";
	socket.on("data", (chunk) => { text += chunk; });
	socket.on("end", () => resolve(text));
	socket.on("error", reject);
});

// late sends requests that do not arrive completely, while others do, and returns how
// and when they end.
async function late() {
	const { url, process } = await service({});
	const header = ["POST /charges HTTP/1.1", "Host: x", `Authorization: Bearer ${PAYMENTS_TOKEN}`, "Idempotency-Key: \"late\"",
		"Content-Type: application/json", "Content-Length: 1000"].join("\r\n");
	const began = Date.now();
	const ends = await Promise.all([header, `${header}\r\n\r\n{`].map((bytes) => raw(bytes, { url, end: false }).catch(() => "")));
	process.kill();
	return [...ends, (Date.now() - began) / 1000];
}

async function hostile() {
	const before = charges();
	for (const where of ["/charges", "/orders"]) {
		await check(`${where}: a body that is too large`, async () => {
			for (const size of [16 * 1024 + 1, 4 * 1024 * 1024])
				isProblem(await post(where, newKey(), "x".repeat(size)), 413);
			isProblem(await post(where, newKey(), "x".repeat(100000), { headers: { "Transfer-Encoding": "chunked" } }), 413);
		});
		await check(`${where}: a body that is no JSON object`, async () => {
			for (const body of ["", "{", "nonsense", "[]", "null", "1", "\"a\"", "{\"amount\": 01}", Buffer.from([0x7b, 0xff, 0x7d]), "{}{}"])
				isProblem(await post(where, newKey(), body), 400);
			for (const type of ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
				isProblem(await post(where, newKey(), charge, { headers: { "Content-Type": type } }), 415);
		});
	}
	await check("unknown paths and methods", async () => {
		for (const where of ["/x", "/charges/", "/charges/0", "/charges/1x", "/charges/99999999999999999999", "/../etc/passwd", "/%00", "/page/pay.js"])
			isProblem(await request("GET", where), 404);
		for (const [method, where, allowed] of [["DELETE", "/charges", "GET, HEAD, POST"], ["PUT", "/charges/1", "GET, HEAD"], ["GET", "/orders", "POST"],
			["POST", "/", "GET, HEAD"], ["PATCH", "/openapi.json", "GET, HEAD"], ["OPTIONS", "/charges", "GET, HEAD, POST"]]) {
			const answer = await request(method, where);
			isProblem(answer, 405);
			assert.equal(answer.headers.allow, allowed);
		}
		isProblem(await request("GET", "//"), 400);
		assert.equal((await request("HEAD", "/charges")).body.length, 0);
	});
	await check("invalid HTTP", async () => {
		assert.match(await raw("nonsense\r\n\r\n"), /^HTTP\/1.1 400 [^]*application\/problem\+json[^]*"status":400/);
		assert.match(await raw(`GET / HTTP/1.1\r\nHost: x\r\nX: ${"x".repeat(20000)}\r\n\r\n`), /^HTTP\/1.1 431 [^]*"status":431/);
	});
	assert.equal(charges(), before);

	await check("invalid HTTP after a request: no response to it is mistaken for that of the request", async () => {
		const body = JSON.stringify({ ...charge, description: "before nonsense" });
		const key = newKey();
		assert.equal(await raw(["POST /charges HTTP/1.1", "Host: x", `Authorization: Bearer ${PAYMENTS_TOKEN}`, `Idempotency-Key: ${key}`,
			"Content-Type: application/json", `Content-Length: ${body.length}`, "", `${body}nonsense`, "", ""].join("\r\n")).catch(() => ""), "");
		assert.equal((await retry("POST", "/charges", { key, body })).status, 201);
	});
	await check("invalid HTTP after two requests, of which the first is answered", async () => {
		const body = JSON.stringify({ ...charge, description: "second" });
		const key = newKey();
		const first = (await request("GET", "/pay.css")).body.toString();
		const other = session();
		await other.say("BEGIN");
		await other.say("LOCK TABLE payments.charge IN SHARE MODE");
		const socket = net.connect(Number(new URL(PAYMENTS_URL).port), "127.0.0.1");
		let text = "";
		socket.on("data", (chunk) => { text += chunk; });
		socket.on("error", () => {});
		socket.write(["GET /pay.css HTTP/1.1", "Host: x", "", "POST /charges HTTP/1.1", "Host: x", `Authorization: Bearer ${PAYMENTS_TOKEN}`,
			`Idempotency-Key: ${key}`, "Content-Type: application/json", `Content-Length: ${body.length}`, "", body].join("\r\n"));
		await until("the second one is in progress", () => charging());
		await until("the first one is answered", () => text.endsWith(first));
		const ended = new Promise((resolve) => socket.once("close", resolve));
		socket.write("nonsense\r\n\r\n");
		await ended;
		assert.ok(text.endsWith(first), text.slice(-400));
		await other.say("ROLLBACK");
		assert.equal((await retry("POST", "/charges", { key, body })).status, 201);
	});
	await check("the bodies that the description allows, and no others", async () => {
		const amounts = [0, -1, 1, 2.5, 1e3, 1e16, 9007199254740991, "1", null, true, [1], {}];
		const currencies = ["EUR", "eur", "EU", "EURO", "", 1, null];
		const texts = ["a", "", "x".repeat(200), "x".repeat(201), "\u{1f4d6}".repeat(200), "a\u0000b", "a\nb", "\ud800", "'; --", 1, null, {}];
		for (const [where, valid] of [["/charges", charge], ["/orders", order]]) {
			const text = where === "/orders" ? "item" : "description";
			const bodies = [...amounts.map((amount) => ({ ...valid, amount })), ...currencies.map((currency) => ({ ...valid, currency })),
				...texts.map((value) => ({ ...valid, [text]: value })), ...Object.keys(valid).map((name) => ({ ...valid, [name]: undefined })),
				{ ...valid, more: 1 }, JSON.parse(`{"__proto__": {}, "amount": 1, "currency": "EUR", "${text}": "a"}`)]
				.map((body) => JSON.parse(JSON.stringify(body)));
			for (const body of bodies) {
				const answer = await post(where, newKey(), body);
				assert.equal(answer.status !== 400, description.accepts("POST", where, body),
					`${where} ${JSON.stringify(body).slice(0, 80)}: ${answer.status}`);
			}
		}
	});
}

// ---------------------------------------------------------------------------
// Privileges, retention, the page, and the whole description
// ---------------------------------------------------------------------------

async function rights() {
	await check("the role of the service can call its functions, and nothing else", () => {
		for (const statement of ["SELECT FROM payments.charge", "SELECT FROM payments.tenant", "DELETE FROM payments.orders",
			"INSERT INTO payments.charge (tenant, amount, currency) VALUES ('shop', 1, 'EUR')", "SELECT FROM idempotency.key",
			"SELECT idempotency.claim('charges/shop', 'x')", "SELECT payments.tenant_of('x')", "CREATE TABLE payments.t ()",
			"SET ROLE payments_owner"])
			assert.equal(sqlstate(statement, "payments_app"), "42501", statement);
		assert.equal(sql(`SELECT string_agg(proname, ' ' ORDER BY proname) FROM pg_proc
			WHERE pronamespace = 'payments'::regnamespace AND has_function_privilege('payments_app', oid, 'EXECUTE')`),
			"charge_create charge_show charges order_begin order_charged order_finish order_refuse order_renew order_yield orders_abandoned");
		assert.equal(sql(`SELECT count(*) FROM pg_proc WHERE pronamespace = 'payments'::regnamespace
			AND (NOT prosecdef AND has_function_privilege('payments_app', oid, 'EXECUTE')
				OR has_function_privilege('public', oid, 'EXECUTE'))`), "0");
	});
	await check("no write without a claim", () => {
		assert.equal(sqlstate("INSERT INTO payments.charge (tenant, amount, currency) VALUES ('shop', 1, 'EUR')"), "IK403");
		assert.equal(sqlstate("DELETE FROM payments.orders"), "IK403");
	});
}

async function retention(published) {
	await check("a key is retained as long as the description says", async () => {
		for (const [where, body, scope] of [["/charges", charge, "charges/shop"], ["/orders", order, "orders/shop"]]) {
			const key = newKey();
			const first = await post(where, key, body);
			const condition = `WHERE scope = '${scope}' AND key = '${key.slice(1, -1)}'`;
			assert.equal(sql(`SELECT round(extract(epoch FROM expires_at - created_at) / 60) FROM idempotency.keys ${condition}`),
				String(published / 60));
			sql(`UPDATE idempotency.key SET expires_at = now() ${condition}`);
			if (where === "/orders") // an order does not change
				for (const other of [{ ...body, item: "a lamp" }, { ...body, amount: 2501 }])
					assert.match(isProblem(await post(where, key, other), 422).detail, /another request/);
			const second = await post(where, key, body);
			assert.equal(second.headers["idempotent-replayed"], undefined);
			// The provider has not expired the key: its charge stays one order.
			assert[where === "/charges" ? "notEqual" : "equal"](second.body.toString(), first.body.toString());
		}
		assert.match(description.document.info.description, new RegExp(`${published / 3600} hours`));
		assert.match((await request("GET", "/")).body.toString(), new RegExp(`data-retention="${published}"`));
	});
}

async function files() {
	await check("the page loads nothing from other servers", async () => {
		for (const [where, type] of [["/", "text/html"], ["/pay.js", "text/javascript"], ["/pay.css", "text/css"]]) {
			const answer = await request("GET", where, { token: null });
			assert.equal(answer.status, 200);
			assert.ok(answer.headers["content-type"].startsWith(type));
			assert.match(answer.headers["content-security-policy"], /default-src 'none'/);
			assert.doesNotMatch(answer.body.toString(), /https?:\/\/|\/\/[a-z]+\./);
		}
	});
	if (spawnSync("curl", ["--version"]).error)
		console.log("     curl is not installed: the printed request is not tested");
	else await check("the request for curl that run prints", () => {
		const [, command] = /^a request +(curl [^]*?)\nthe log /m.exec(readFileSync(`${PAYMENTS_DIR}/welcome`, "utf8"));
		const send = () => execFileSync("sh", ["-c", command],
			{ encoding: "utf8", env: { ...process.env, no_proxy: "*" }, stdio: ["ignore", "pipe", "ignore"] });
		const before = charges();
		assert.match(send(), /^HTTP\/1.1 201 [^]*\{"id"/);
		assert.match(send(), /^HTTP\/1.1 201 [^]*^Idempotent-Replayed: true[^]*\{"id"/m);
		assert.equal(charges() - before, 1);
	});
	await check("without a token there is no page", async () => {
		const { url, process } = await service({ PAYMENTS_TOKEN: "" });
		isProblem(await request("GET", "/", { url }), 404);
		process.kill();
	});
}

main("http", async () => {
	description = new Description(JSON.parse((await request("GET", "/openapi.json", { token: null })).body));
	const lateOnes = late();
	await replays();
	await tenants();
	await header();
	await inProgress();
	await unavailable();
	await hostile();
	await rights();
	await retention(description.document["x-idempotency-retention"]);
	await files();
	await check("an incomplete request times out, without effect", async () => {
		const [header, body, seconds] = await lateOnes;
		assert.ok(seconds > 25 && seconds < 60, `after ${seconds} s`); // 30, as described; Node's own is 60 and more
		assert.match(header, /^HTTP\/1.1 408 [^]*application\/problem\+json[^]*"status":408/);
		assert.equal(body, ""); // the connection is closed
		assert.equal((await post("/charges", "\"late\"", charge)).headers["idempotent-replayed"], undefined);
	});
	await check("every described response was seen", () => {
		assert.deepEqual(description.statuses().filter((status) => !description.seen.has(status)), []);
	});
	console.log(`     ${description.seen.size} described responses seen; ${charges()} charges made`);
});
