// The database, through a pooler in transaction mode: each call is one statement and
// one transaction, and leaves no state in its session. Statements are unnamed, because
// a session of the pooler might not have a named one.

"use strict";

const { Pool, DatabaseError } = require("pg");

// Errors after which the same request can succeed: connection errors, transient errors,
// a lost lease (IK410), and an operation in progress (IK409).
const transient = /^(08|40|53|55P03|57|58|25006|IK409|IK410)/;

// Errors after which a connection is closed. After all others it is reused: otherwise
// clients without a token could cost the pooler a connection per request.
const fatal = /^(08|25006|53|57P|58|XX)/;

// An error after which the effect of the request is unknown.
class Unavailable extends Error {}

// PGHOST and the other variables of libpq name the server.
const pool = new Pool({ max: 20, connectionTimeoutMillis: 10000, query_timeout: 15000 });
pool.on("error", (error) => console.error(`a connection is lost: ${error.message}`));
// A connection that is lost in use fails its query; without a listener, the event would
// also end the process.
pool.on("connect", (client) => client.on("error", () => {}));

// query runs one statement, and returns its rows. Throws Unavailable, or a
// DatabaseError that a retry would get too.
async function query(text, ...values) {
	let client;
	let over = false;
	try {
		client = await pool.connect();
		return (await client.query(text, values)).rows;
	} catch (error) {
		over = !(error instanceof DatabaseError) || fatal.test(error.code);
		if (over || transient.test(error.code))
			throw new Unavailable(`the database: ${error.message}`);
		throw error;
	} finally {
		client?.release(over);
	}
}

module.exports = { query, Unavailable, close: () => pool.end() };
