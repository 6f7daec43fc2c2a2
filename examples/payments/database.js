// The database, which is reached through a pooler in transaction mode: each call is one
// statement and one transaction, and leaves nothing in its session.  No statement has a
// name, so none is looked for in a session that has never heard of it.

"use strict";

const { Pool, DatabaseError } = require("pg");

// Errors after which the same request may fare better: of the connection, of the moment,
// and those of an owner who has lost his turn (IK410) or meets somebody else (IK409).
const passing = /^(08|40|53|55P03|57|58|25006|IK409|IK410)/;

// Errors after which a connection is not used again.  All others leave it as it was: to end
// it would let anybody without a token cost the pooler a connection with each request.
const ending = /^(08|25006|53|57P|58|XX)/;

// An error of ours, or of nobody's: what was asked for may have happened or not.
class Unavailable extends Error {}

// PGHOST and the other variables of libpq say where it is.
const pool = new Pool({ max: 20, connectionTimeoutMillis: 10000, query_timeout: 15000 });
pool.on("error", (error) => console.error(`a connection is lost: ${error.message}`));
// one that is lost in use fails its query; unheard, the event would end the process as well
pool.on("connect", (client) => client.on("error", () => {}));

// query runs one statement, and returns its rows.  Throws Unavailable, or a DatabaseError
// that would come again.
async function query(text, ...values) {
	let client;
	let over = false;
	try {
		client = await pool.connect();
		return (await client.query(text, values)).rows;
	} catch (error) {
		over = !(error instanceof DatabaseError) || ending.test(error.code);
		if (over || passing.test(error.code))
			throw new Unavailable(`the database: ${error.message}`);
		throw error;
	} finally {
		client?.release(over);
	}
}

module.exports = { query, Unavailable, close: () => pool.end() };
