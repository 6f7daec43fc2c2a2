// node-pg. A statement with a name is prepared; one without is not.

"use strict";

const { createHash } = require("crypto");
const { Client } = require("pg");
const { serve } = require("./client.js");

async function makeSession(host, prepared) {
	const client = new Client({ host });
	await client.connect();
	const run = (text) => () => client.query(text);
	return {
		begin: run("BEGIN"),
		commit: run("COMMIT"),
		rollback: run("ROLLBACK"),
		savepoint: run("SAVEPOINT s"),
		undo: run("ROLLBACK TO SAVEPOINT s"),
		async query(text, values) {
			const name = prepared ? createHash("md5").update(text).digest("hex") : undefined;
			return (await client.query({ name, text, values, rowMode: "array" })).rows;
		},
	};
}

serve(makeSession, JSON.stringify);
