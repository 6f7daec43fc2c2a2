// The service of test/middleware/run with Express.

"use strict";

const express = require("express");
const { Pool } = require("pg");
const idempotent = require("../../examples/middleware/idempotent_express.js");

async function charge(request, client) {
	const { customer, amount, action } = request.body;
	if (action === "elsewhere")
		try {
			await pool.query("INSERT INTO charge (customer, amount) VALUES ($1, $2)", [customer, amount]);
			throw new Error("a bug after the write");
		} catch (error) {
			return { status: 500, body: { error: error.code } };
		}
	const { rows } = await client.query("INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", [customer, amount]);
	await client.query("SELECT pg_sleep($1)", [action === "slow" ? 1 : 0]);
	if (/^[0-9A-Z]{5}$/.test(action))
		await client.query("SELECT fail_with($1)", [action]);
	if (action === "decline")
		return { status: 402, body: { error: "card_declined" } };
	if (action === "overload")
		return { status: 503, body: { error: "overload" } };
	const { rows: [{ trouble }] } = await client.query("SELECT count(*) > 0 AS trouble FROM trouble");
	if (action === "crash" && trouble)
		throw new Error("a bug");
	return { status: 201, headers: { Location: `/charges/${rows[0].id}` }, body: { id: rows[0].id, customer } };
}

const pool = new Pool({ max: 20 });
const app = express();
app.set("env", "test"); // an error is answered without a log
app.use(express.json({ verify: idempotent.keepBody }));
app.post("/charges", idempotent({ pool }, charge));
app.post("/lenient", idempotent({ pool, lenient: true, scope: "lenient" }, charge));
app.post("/waiting", idempotent({ pool, wait: "30 seconds" }, charge));
app.post("/unavailable", idempotent({ pool: new Pool({ host: "/nonexistent" }) }, charge));
app.use((error, request, response, next) => response.status(error.status ?? 500).json({ error: error.message }));
const server = app.listen(0, "127.0.0.1", () => console.log(server.address().port));
