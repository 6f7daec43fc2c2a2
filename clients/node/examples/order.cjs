// node order.cjs KEY AMOUNT: an order that a provider charges. README.md shows this file. Its provider
// knows each key once, as a provider with idempotency keys does.

"use strict";

const { Pool } = require("pg");
const { lease, pg, retrying } = require("pg-idempotency");

const pool = new Pool();
const db = pg(pool);

const provider = { charge: async (amount, idempotencyKey) => `ch_${idempotencyKey}` };

const order = (key, amount) => retrying(() => lease(db, "order", key, { request: { amount }, lease: "30 seconds" }, async (held) => {
	const charge = held.state?.charge ?? await provider.charge(amount, await held.deriveKey("charge"), held.signal);
	await held.checkpoint("charged", { charge });
	return held.complete(async (tx) => {
		const { rows } = await tx.query("INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", [charge, amount]);
		return { order: rows[0].id, charge };
	});
}));

const [key, amount] = process.argv.slice(2);
order(key, Number(amount)).then(({ response }) => console.log(JSON.stringify(response))).finally(() => pool.end());
