// The database, which is reached through a pooler in transaction mode: each call is one
// statement and one transaction, and leaves nothing in its session.  No statement has a
// name, so none is looked for in a session that has never heard of it.

"use strict";

const { Pool, DatabaseError } = require("pg");

// Errors after which the same request may fare better: of the connection, of the moment,
// and those of an owner who has lost his turn (IK410) or meets somebody else (IK409).
const passing = /^(08|40|53|55P03|57|58|25006|IK409|IK410)/;

// An error of ours, or of nobody's: what was asked for may have happened or not.
class Unavailable extends Error {}

// PGHOST and the other variables of libpq say where it is.
const pool = new Pool({ max: 20, connectionTimeoutMillis: 10000, query_timeout: 15000 });
pool.on("error", (error) => console.error(`a connection is lost: ${error.message}`));

// query runs one statement, and returns its rows.  Throws Unavailable, or a DatabaseError
// that would come again.
async function query(text, ...values) {
	try {
		return (await pool.query(text, values)).rows;
	} catch (error) {
		if (!(error instanceof DatabaseError) || passing.test(error.code))
			throw new Unavailable(`the database: ${error.message}`);
		throw error;
	}
}

module.exports = { query, Unavailable, close: () => pool.end() };
