// The first charge: README.md shows this file.

import express from "express";
import driver from "pg";
import { pg } from "pg-idempotency";
import { idempotent } from "pg-idempotency/express";

const db = pg(new driver.Pool());
const app = express();
app.post("/charges", idempotent({ db, scope: (request) => request.get("X-User") ?? "guest" }, async (request, tx) => {
	const { customer, amount } = request.body;
	const { rows } = await tx.query("INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id", [customer, amount]);
	return { status: 201, body: { charge: rows[0].id } };
}));
app.listen(process.env.PORT ?? 3000);
