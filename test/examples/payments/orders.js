// Orders: the provider charges outside of the database. Still there is exactly one
// charge and one order, whatever process dies or is slow, and even if no client
// retries.
//
// The provider of examples/payments/run replies long after it has charged. A service
// that is killed once the charge is in the provider's file therefore dies between
// charge and checkpoint.

"use strict";

const http = require("http");
const { readFileSync } = require("fs");
const {
	assert, atEnd, chargedAtProvider, check, isProblem, killService, main, newKey, request, retry, script, service, session, sleep,
	sql, sqlstate, stored, until,
} = require("./common");

const [, providerUrl] = /^PROVIDER_URL=(.*)$/m.exec(readFileSync(`${process.env.PAYMENTS_DIR}/service-environment`, "utf8"));

let amounts = 1000;
const newOrder = () => ({ amount: amounts++, currency: "EUR", item: "a book" });
const placed = (order) => Number(sql(`SELECT count(*) FROM payments.orders WHERE amount = ${order.amount}`));
const charged = (order) => chargedAtProvider(({ amount }) => amount === order.amount).length;

// once checks that an order exists once, and was charged once.
function once(order) {
	assert.equal(placed(order), 1, "orders");
	assert.equal(charged(order), 1, "charges at the provider");
}

// provider is an additional provider: it answers requests for the orders that it is
// notified of, and forwards all others to the common provider.
async function provider() {
	const theirs = { asked: {}, answers: {} };
	const server = http.createServer(async (asking, response) => {
		let text = "";
		for await (const chunk of asking)
			text += chunk;
		const { amount } = JSON.parse(text);
		const key = asking.headers["idempotency-key"];
		(theirs.asked[amount] ||= []).push(key);
		let status, body;
		if (theirs.answers[amount]) {
			[status, body] = await theirs.answers[amount](theirs.asked[amount].length);
		} else {
			const answer = await fetch(`${providerUrl}/charges`, { method: "POST", headers: { "Idempotency-Key": key }, body: text });
			[status, body] = [answer.status, await answer.json()];
		}
		response.writeHead(status, { "Content-Type": "application/json" });
		response.end(JSON.stringify(body));
	});
	await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
	atEnd(() => server.closeAllConnections());
	theirs.url = `http://127.0.0.1:${server.address().port}`;
	return theirs;
}

// The service is killed after two cards are charged. One client retries; for the other
// one the completer finishes the order.
async function killed() {
	const [returns, leaves] = [newOrder(), newOrder()];
	const key = newKey();
	const lost = [request("POST", "/orders", { key, body: returns }), request("POST", "/orders", { key: newKey(), body: leaves })]
		.map((sent) => sent.then(() => "answered", () => "lost"));
	await until("two charges", () => charged(returns) + charged(leaves) === 2);
	killService();
	await check("killed between charge and checkpoint: the responses are lost", async () => {
		assert.deepEqual(await Promise.all(lost), ["lost", "lost"]);
		assert.equal(placed(returns) + placed(leaves), 0);
	});
	await script("restart-service");
	await check("the client retries: one charge, one order", async () => {
		const answer = await retry("POST", "/orders", { key, body: returns });
		assert.equal(answer.status, 201, answer.body.toString());
		assert.deepEqual(stored(await retry("POST", "/orders", { key, body: returns })), stored(answer));
		once(returns);
	});
	await check("no client retries: the completer finishes the order", async () => {
		await until("the order", () => placed(leaves) === 1);
		once(leaves);
	});
}

// A worker has stored the charge and stalls. The next owner does not call the provider,
// and the worker cannot finish.
async function stalled({ url }) {
	const order = newOrder();
	const key = newKey();
	const bearer = `sha256('${process.env.PAYMENTS_TOKEN}')`;
	const [lease] = sql(`SELECT lease::text, payments.order_charged(lease, 'ch_noted')
		FROM payments.order_begin(${bearer}, '${key}', ${order.amount}, 'EUR', 'a book')`, "payments_app").split("|");
	await check("a worker stalls: 409 during its lease, then another owner continues from its checkpoint", async () => {
		const first = await request("POST", "/orders", { url, key, body: order });
		if (first.status !== 201) { // otherwise this machine was stalled for longer than the lease
			isProblem(first, 409);
			assert.match(first.headers["retry-after"], /^([1-9]|10)$/);
		}
		const answer = await retry("POST", "/orders", { url, key, body: order });
		assert.equal(answer.status, 201);
		assert.equal(JSON.parse(answer.body).provider_charge, "ch_noted");
		assert.equal(charged(order), 0);
	});
	await check("the stalled worker continues and is rejected", () => {
		for (const call of [`order_renew('${lease}')`, `order_charged('${lease}', 'ch_x')`, `order_finish('${lease}', 'ch_x')`,
			`order_refuse('${lease}', 'x')`, `order_yield('${lease}')`])
			assert.equal(sqlstate(`SELECT payments.${call}`, "payments_app"), "IK410", call);
		assert.equal(placed(order), 1);
	});
}

// The provider waits until two heartbeats were seen.
async function slow({ url }, theirs) {
	const order = newOrder();
	const key = newKey();
	const lease = () => sql(`SELECT token || '|' || leased_until FROM idempotency.key WHERE key = '${key.slice(1, -1)}'`);
	let finish;
	const enough = new Promise((resolve) => { finish = resolve; });
	theirs.answers[order.amount] = async () => {
		await enough;
		return [201, { id: "ch_slow" }];
	};
	await check("a slow provider: the heartbeat keeps the order", async () => {
		const first = retry("POST", "/orders", { url, key, body: order });
		await until("the provider is called", () => theirs.asked[order.amount]);
		// A takeover also changes the end of the lease, but changes the token too.
		const ends = {};
		await until("two heartbeats of one owner", () => {
			const [token, end] = lease().split("|");
			return (ends[token] ||= new Set()).add(end).size > 2;
		});
		finish();
		assert.equal((await first).status, 201);
		assert.equal(new Set(theirs.asked[order.amount]).size, 1);
		assert.equal(placed(order), 1);
	});
}

// The last call of the order takes longer than two heartbeats, because another session
// holds its place in the unique index. A concurrent renewal would wait for the call and
// then fail with a stale token.
async function finishing({ url }, theirs) {
	const order = newOrder();
	const key = newKey();
	const holder = session();
	const waiting = (call, more) => sql(`SELECT count(*) FROM pg_stat_activity WHERE state = 'active'
		AND wait_event_type = 'Lock' AND query LIKE '%payments.${call}(%' ${more}`);
	theirs.answers[order.amount] = () => [201, { id: "ch_finishing" }];
	await check("the heartbeat stops before the order is finished", async () => {
		await holder.say(`SET session_replication_role = replica; BEGIN;
			INSERT INTO payments.orders (tenant, amount, currency, item, provider_key, provider_charge)
			VALUES ('shop', 1, 'EUR', 'held', idempotency.derive_key('orders/shop', '${key.slice(1, -1)}', 'charge'), 'ch_held')`);
		const answer = retry("POST", "/orders", { url, key, body: order });
		await until("the end of the order waits for longer than two heartbeats",
			() => waiting("order_finish", "AND clock_timestamp() - query_start > interval '7 s'") === "1");
		assert.equal(waiting("order_renew", ""), "0", "concurrent renewals");
		await holder.say("ROLLBACK");
		assert.equal((await answer).status, 201);
		assert.equal(placed(order), 1);
	});
}

// The provider is unavailable, or fails; the service shuts down.
async function trouble(steady, theirs) {
	await check("an unavailable provider: 503, and the next attempt continues at once", async () => {
		const away = await service({ PROVIDER_URL: "http://127.0.0.1:1" });
		const order = newOrder();
		const key = newKey();
		theirs.answers[order.amount] = () => [201, { id: "ch_away" }];
		const answer = await request("POST", "/orders", { url: away.url, key, body: order });
		isProblem(answer, 503);
		assert.equal(answer.headers["retry-after"], "1");
		away.process.kill("SIGKILL");
		assert.equal((await retry("POST", "/orders", { url: steady.url, key, body: order })).status, 201);
		assert.equal(placed(order), 1);
	});
	await check("a provider that fails first is called again with the same key", async () => {
		const order = newOrder();
		theirs.answers[order.amount] = (times) => [[404, {}], [500, {}]][times - 1] || [201, { id: "ch_third" }];
		assert.equal((await retry("POST", "/orders", { url: steady.url, key: newKey(), body: order })).status, 201);
		// The completer of the other service might have been faster, and called the
		// other provider.
		const keys = [...theirs.asked[order.amount],
			...chargedAtProvider(({ amount }) => amount === order.amount).map((charge) => `"${charge.key}"`)];
		assert.ok(keys.length >= 2);
		assert.equal(new Set(keys).size, 1);
		assert.equal(placed(order), 1);
	});
	await check("an error of the provider about our request is reported, and is no refusal", async () => {
		const order = newOrder();
		const key = newKey();
		const answers = [[400, { title: "Bad Request" }], [422, {}], [201, { id: "ch_mended" }]];
		theirs.answers[order.amount] = (times) => answers[Math.min(times, 3) - 1];
		isProblem(await request("POST", "/orders", { url: steady.url, key, body: order }), 503);
		assert.match(steady.errors(), /the provider: status 400, \{"title":"Bad Request"\}/);
		assert.equal((await retry("POST", "/orders", { url: steady.url, key, body: order })).status, 201);
		assert.equal(placed(order), 1);
	});
	await check("an order belongs to its tenant, whatever the tenant's name", async () => {
		sql("INSERT INTO payments.tenant VALUES ('shop/eu', sha256('slash'))");
		const order = newOrder();
		theirs.answers[order.amount] = () => [201, { id: "ch_slash" }];
		assert.equal((await retry("POST", "/orders", { url: steady.url, token: "slash", key: newKey(), body: order })).status, 201);
		assert.equal(sql(`SELECT tenant FROM payments.orders WHERE amount = ${order.amount}`), "shop/eu");
	});
	await check("SIGTERM: requests in progress are finished", async () => {
		const { url, process } = await service({ PROVIDER_URL: theirs.url });
		const order = newOrder();
		theirs.answers[order.amount] = async (times) => {
			if (times === 1)
				process.kill("SIGTERM");
			await sleep(500);
			return [201, { id: "ch_last" }];
		};
		const ended = new Promise((resolve) => process.once("exit", (code, signal) => resolve(code ?? signal)));
		assert.equal((await request("POST", "/orders", { url, key: newKey(), body: order })).status, 201);
		assert.equal(await ended, 0);
	});
}

main("orders", async () => {
	const theirs = await provider();
	const steady = await service({ PROVIDER_URL: theirs.url });
	await Promise.all([killed(), stalled(steady), slow(steady, theirs), finishing(steady, theirs),
		trouble(steady, theirs)]);
	await check("one charge for each key, one order for each charge", () => {
		const charges = chargedAtProvider();
		assert.equal(new Set(charges.map(({ key }) => key)).size, charges.length);
		assert.equal(sql("SELECT count(*) - count(DISTINCT provider_charge) FROM payments.orders"), "0");
		assert.equal(sql("SELECT count(*) FROM idempotency.zombies"), "0");
		console.log(`     ${sql("SELECT count(*) FROM payments.orders")} orders placed, ${charges.length} cards charged by the provider`);
	});
});
