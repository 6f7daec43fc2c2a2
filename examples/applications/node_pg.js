#!/usr/bin/env node
// The application in Node, with node-pg. README.md describes its commands.

"use strict";

const { setTimeout: sleep } = require("timers/promises");
const { Client } = require("pg");

// The same request can succeed later: lost connections, serialization failures and
// deadlocks, no resources, lock timeouts, shutdown and failover; IK409, the first request
// is in progress; IK410, another owner took the lease over, whose result a retry returns;
// IK408, another consumer has the events of the batch.
const transient = /^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410|E[A-Z]+$)/;

// The provider neither did nor refused what it was asked for.
class Unavailable extends Error {}

// retrying calls work(client) until it succeeds, with growing pauses, each time on a new
// connection. Throws what is not transient, and RETRY_SECONDS after the first failure the last error. work
// must begin with a claim of the same key, or with a fetch: an attempt whose answer was lost
// might have committed.
async function retrying(work) {
	let end;
	for (let pause = 50; ; pause = Math.min(2 * pause, 2000)) {
		const client = new Client();
		client.on("error", () => {}); // a lost connection also fails the query in progress
		try {
			await client.connect();
			return await work(client);
		} catch (error) {
			end ??= Date.now() + 1000 * (process.env.RETRY_SECONDS ?? 30);
			// Errors of the connection have no SQLSTATE, but a code such as EPIPE, or none.
			const again = error.code ? transient.test(error.code) : error instanceof Unavailable || /Connection terminated/.test(error.message);
			if (!again || Date.now() + pause > end)
				throw error;
		} finally {
			client.end().catch(() => {}); // not awaited: after a lost connection it might not settle
		}
		await sleep(pause * (0.5 + Math.random() / 2));
	}
}

// transaction runs work(client) in a transaction.
async function transaction(client, work) {
	await client.query("BEGIN");
	try {
		const result = await work();
		await client.query("COMMIT");
		return result;
	} catch (error) {
		await client.query("ROLLBACK").catch(() => {});
		throw error;
	}
}

// charge charges a customer: key, charge and answer commit in one transaction.
const charge = (key, customer, amount) => retrying((client) => transaction(client, async () => {
	const { rows: [claim] } = await client.query("SELECT replayed, response::text FROM idempotency.claim('charge', $1, $2)",
		[key, { customer, amount }]);
	if (claim.replayed)
		return claim.response;
	const { rows: [made] } = await client.query("INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", [customer, amount]);
	const { rows: [done] } = await client.query("SELECT idempotency.complete('charge', $1, $2, 201)::text AS response",
		[key, { charge: Number(made.id) }]);
	return done.response;
}));

// askProvider charges at the provider, which itself takes an idempotency key. Returns its
// charge, or null if it refuses.
async function askProvider(key, amount) {
	let response, body;
	try {
		response = await fetch(`${process.env.PROVIDER}/charges`, {
			method: "POST",
			headers: { "Content-Type": "application/json", "Idempotency-Key": `"${key}"` },
			body: JSON.stringify({ amount }),
			signal: AbortSignal.timeout(10000), // shorter than the lease, which the owner must not lose
		});
		body = await response.json();
	} catch (error) {
		throw new Unavailable(`the provider: ${error.message}`);
	}
	if (response.status !== 201 && response.status !== 402)
		throw new Unavailable(`the provider answers ${response.status}`);
	return response.status === 201 ? body.id : null;
}

// order orders an item, which the provider charges. No transaction is open meanwhile; a
// lease protects the order.
const order = (key, item, amount) => retrying(async (client) => {
	const lease = process.env.LEASE ?? "30 seconds";
	const { rows: [claim] } = await client.query(
		`SELECT replayed, response::text, token, idempotency.derive_key('order', $1, 'charge') AS provider_key, state ->> 'charge' AS charge
		 FROM idempotency.claim('order', $1, $2, lease => $3)`, [key, { item, amount }, lease]);
	if (claim.replayed)
		return claim.response;
	let charged;
	try {
		// After a takeover, the former owner might have got as far as the checkpoint.
		charged = claim.charge ?? await askProvider(claim.provider_key, amount);
	} catch (error) {
		// The checkpoint keeps the request: the provider might have charged it.
		await client.query("SELECT idempotency.checkpoint('order', $1, $2, 'asked'), idempotency.release('order', $1, $2)", [key, claim.token]);
		throw error;
	}
	if (charged === null) {
		const { rows: [refused] } = await client.query("SELECT idempotency.fail('order', $1, $2, 402, token => $3)::text AS response",
			[key, { error: "card_declined" }, claim.token]);
		return refused.response;
	}
	await client.query("SELECT idempotency.checkpoint('order', $1, $2, 'charged', $3)", [key, claim.token, { charge: charged }]);
	return transaction(client, async () => {
		// Refuses a former owner before it writes, and holds off a takeover until the commit.
		await client.query("SELECT idempotency.renew('order', $1, $2, $3)", [key, claim.token, lease]);
		const { rows: [made] } = await client.query("INSERT INTO purchase (item, amount, provider_charge) VALUES ($1, $2, $3) RETURNING id",
			[item, amount, charged]);
		const { rows: [done] } = await client.query("SELECT idempotency.complete('order', $1, $2, 201, token => $3)::text AS response",
			[key, { order: Number(made.id) }, claim.token]);
		return done.response;
	});
});

// consume handles a batch of messages that a queue delivers at least once: each has its
// effect once.
async function consume(messages) {
	await retrying((client) => transaction(client, async () => {
		const { rows } = await client.query("SELECT once_many AS id FROM idempotency.once_many('consumer', $1, '30 days')",
			[messages.map(({ id }) => id)]);
		const fresh = new Set(rows.map(({ id }) => id));
		for (const { id, customer, amount } of messages)
			if (fresh.delete(id))
				await client.query("INSERT INTO charge (customer, amount) VALUES ($1, $2)", [customer, amount]);
	}));
	// Acknowledge after the commit: a batch that is lost before is delivered again.
	return JSON.stringify({ acknowledged: messages.length });
}

// events charges orders at the provider, one for each event of a subscription. As many of
// these consumers as the subscription has partitions work at the same time.
async function events(subscription) {
	// Longer than the provider needs for a batch: afterwards, another consumer gets its events.
	const lease = process.env.LEASE ?? "3 minutes";
	for (;;)
		await retrying(async (client) => {
			// Committed at once, so that the delivery counts even if this program dies.
			const { rows: batch } = await client.query(`SELECT batch, id, aggregate_id, payload
				FROM idempotency.fetch($1, max_events => 10, wait => '10 seconds', lease => $2)`, [subscription, lease]);
			const left = new Set(); // aggregates whose events have left the batch
			for (const { batch: number, id, aggregate_id, payload } of batch) {
				if (left.has(aggregate_id))
					continue;
				let error, dead = false;
				try {
					// The provider recognizes a redelivered event by its id.
					if (await askProvider(id, payload.amount) === null)
						[error, dead] = ["card_declined", true];
				} catch ({ message }) {
					error = message;
				}
				if (error) {
					await client.query("SELECT idempotency.nack($1, $2, $3, $4, dead => $5)", [subscription, number, id, error, dead]);
					if (aggregate_id)
						left.add(aggregate_id);
				}
			}
			if (batch.length)
				await client.query("SELECT idempotency.ack($1, $2)", [subscription, batch[0].batch]);
		});
}

async function main([command, key, name, amount]) {
	if (command === "events")
		return events(key);
	if (command !== "consume")
		return { charge, order }[command](key, name, Number(amount));
	const lines = require("fs").readFileSync(0, "utf8").trim().split("\n");
	return consume(lines.map((line) => JSON.parse(line)));
}

main(process.argv.slice(2)).then(console.log).catch((error) => {
	console.error(`${error.code}: ${error.message}`);
	process.exitCode = 1;
});
