// The payments service under test, according to the environment: its address, its data
// and its provider's data, and its faults.

"use strict";

const { execFile } = require("child_process");
const { readFileSync } = require("fs");
const { join } = require("path");
const { promisify } = require("util");

const run = promisify(execFile);
const { PAYMENTS_URL: url, PAYMENTS_TOKEN: token, PAYMENTS_DIR: directory,
	PAYMENTS_PROVIDER_STATE: providerState } = process.env;
if (!url)
	throw new Error("start me with examples/payments/run -- command");

// kill ends the service with SIGKILL.
function kill() {
	process.kill(Number(readFileSync(join(directory, "service.pid"), "utf8")), "SIGKILL");
}

// restart starts the killed service, and returns once it responds.
async function restart() {
	await run(join(directory, "restart-service"));
}

// restartDatabase crashes the database, starts it, and returns once it accepts
// connections.
async function restartDatabase() {
	await run(join(directory, "restart-database"));
}

// query returns the rows of a query as objects.
async function query(sql) {
	const { stdout } = await run("psql", ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1",
		"-c", `SELECT coalesce(json_agg(answer), '[]') FROM (${sql}) AS answer`], { maxBuffer: 2 ** 26 });
	return JSON.parse(stdout);
}

// provided returns the provider's charges, oldest first.
function provided() {
	return readFileSync(providerState, "utf8").split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

module.exports = { url, token, kill, restart, restartDatabase, query, provided };
