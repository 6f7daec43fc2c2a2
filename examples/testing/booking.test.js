// node --test booking.test.js: tests the procedure of booking.sql without a server.

"use strict";

const assert = require("node:assert/strict");
const { readFileSync } = require("node:fs");
const { before, beforeEach, test } = require("node:test");
const { PGlite } = require("@electric-sql/pglite");

const script = (name) => readFileSync(`${__dirname}/${name}`, "utf8");
const booking = "SELECT booking_create($1, $2, $3) AS answer";
let db;

before(async () => {
	db = await PGlite.create();
	await db.exec(script("../../portable/idempotency.sql"));
	await db.exec(script("booking.sql"));
});

beforeEach(() => db.exec("TRUNCATE booking, idempotency.key"));

test("a retry gets the same answer and books once", async () => {
	const [first] = (await db.query(booking, ["order-1", "ann", 25])).rows;
	const [retry] = (await db.query(booking, ["order-1", "ann", 25])).rows;
	assert.deepEqual(retry, first);
	assert.equal((await db.query("SELECT * FROM booking")).rows.length, 1);
});

test("another request with the same key is refused", async () => {
	await db.query(booking, ["order-1", "ann", 25]);
	await assert.rejects(db.query(booking, ["order-1", "ann", 26]), { code: "IK422" });
});

test("a crash before the commit leaves no booking and no key", async () => {
	await assert.rejects(
		db.transaction(async (transaction) => {
			await transaction.query(booking, ["order-1", "ann", 25]);
			throw new Error("the service crashes");
		}),
	);
	assert.equal((await db.query("SELECT * FROM booking")).rows.length, 0);
	await db.query(booking, ["order-1", "ann", 25]);
	assert.equal((await db.query("SELECT * FROM booking")).rows.length, 1);
});

test("an expired key is a new operation", async () => {
	await db.query(booking, ["order-1", "ann", 25]);
	await db.query("UPDATE idempotency.key SET expires_at = now() WHERE key = 'order-1'");
	await db.query(booking, ["order-1", "ann", 25]);
	assert.equal((await db.query("SELECT * FROM booking")).rows.length, 2);
});
