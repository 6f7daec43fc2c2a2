// Functions that the tests of examples/payments share: checks and their count, a client
// that receives raw bytes, a client that retries, the database, and additional
// services. They run under examples/payments/run.

"use strict";

const assert = require("assert/strict");
const { execFile, execFileSync, spawn } = require("child_process");
const { randomUUID } = require("crypto");
const { readFileSync } = require("fs");
const http = require("http");
const path = require("path");
const { promisify } = require("util");

const { PAYMENTS_URL, PAYMENTS_TOKEN, PAYMENTS_DIR, PAYMENTS_PROVIDER_STATE } = process.env;
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// ---------------------------------------------------------------------------
// Checks
// ---------------------------------------------------------------------------

let passed = 0;
let failed = 0;
const endings = [];

// check runs one check, which throws if it fails.
async function check(name, run) {
	try {
		await run();
		passed++;
	} catch (error) {
		failed++;
		console.log(`     WRONG: ${name}\n${String(error.stack).replace(/^/gm, "       ")}`);
	}
}

// atEnd registers a function to call after all checks.
const atEnd = (ending) => endings.push(ending);

// main runs the checks of a test, and prints the result.
async function main(name, run) {
	const began = Date.now();
	try {
		await run();
	} catch (error) {
		failed++;
		console.log(error);
	}
	endings.forEach((ending) => ending());
	console.log(`     ${name}: ${passed} checks passed, ${failed} failed, in ${((Date.now() - began) / 1000).toFixed(1)} s`);
	process.exit(failed === 0 && passed > 0 ? 0 : 1);
}

// until repeats a query until its result is true, and fails after 60 seconds.
async function until(what, ask) {
	for (const end = Date.now() + 60000; !(await ask()); await sleep(50))
		assert.ok(Date.now() < end, `not within 60 s: ${what}`);
}

// ---------------------------------------------------------------------------
// Clients
// ---------------------------------------------------------------------------

const newKey = () => `"${randomUUID()}"`;

// request sends one request on a new connection, and returns status, headers and body.
// "key" is the whole header; "body" is sent unchanged if it is a string or a buffer.
function request(method, where, { url = PAYMENTS_URL, token = PAYMENTS_TOKEN, key, body, headers = {} } = {}) {
	const bytes = body === undefined || typeof body === "string" || Buffer.isBuffer(body) ? body : JSON.stringify(body);
	return new Promise((resolve, reject) => {
		const sent = http.request(url + where, {
			method,
			agent: false,
			headers: {
				...(token && { "Authorization": `Bearer ${token}` }),
				...(body !== undefined && { "Content-Type": "application/json" }),
				...(key !== undefined && { "Idempotency-Key": key }),
				...headers,
			},
		}, (response) => {
			const chunks = [];
			response.on("data", (chunk) => chunks.push(chunk));
			response.on("error", reject);
			response.on("end", () => resolve({
				status: response.statusCode,
				headers: response.headers,
				raw: response.rawHeaders,
				body: Buffer.concat(chunks),
			}));
		});
		sent.on("error", reject);
		sent.end(bytes);
	});
}

// stored is what a replay must repeat of a response: everything except headers of the
// connection and the time.
function stored({ status, raw, body }) {
	const headers = [];
	for (let i = 0; i < raw.length; i += 2)
		if (!["Date", "Connection", "Idempotent-Replayed"].includes(raw[i]))
			headers.push(`${raw[i]}: ${raw[i + 1]}`);
	return { status, headers, body: body.toString("latin1") };
}

// retry sends a request until its response is final, as the draft specifies: after a
// lost connection, 409 and 503 it retries with the same key.
async function retry(method, where, options) {
	for (const end = Date.now() + 90000; ; await sleep(100)) {
		const answer = await request(method, where, options).catch((error) => ({ error }));
		if (![409, 503, undefined].includes(answer.status))
			return answer;
		assert.ok(Date.now() < end, `no final response within 90 s: ${answer.error || answer.status}`);
	}
}

// isProblem checks that a response is an RFC 9457 problem with this status.
function isProblem(answer, status) {
	assert.equal(answer.status, status, answer.body.toString());
	assert.equal(answer.headers["content-type"], "application/problem+json");
	const problem = JSON.parse(answer.body);
	assert.equal(problem.status, status);
	assert.equal(problem.type, "about:blank");
	assert.ok(problem.title && problem.detail);
	return problem;
}

// ---------------------------------------------------------------------------
// The database, and services
// ---------------------------------------------------------------------------

const psqlOptions = ["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate"];

// sql runs statements as superuser or as another role, and returns the unaligned
// result.
function sql(statements, role = process.env.PGUSER) {
	return execFileSync("psql", [...psqlOptions, "-U", role, "-c", statements],
		{ encoding: "utf8", stdio: ["ignore", "pipe", "pipe"] }).trim();
}

// sqlstate runs a statement that must fail, and returns its SQLSTATE.
function sqlstate(statement, role) {
	try {
		sql(statement, role);
		return "no error";
	} catch (error) {
		return (/ERROR: +(\w+)/.exec(error.stderr) || [null, error.stderr])[1];
	}
}

// session is a psql that stays open; say() returns its output.
function session() {
	const psql = spawn("psql", psqlOptions, { stdio: ["pipe", "pipe", "inherit"] });
	atEnd(() => psql.kill("SIGKILL"));
	return {
		say: (statement) => new Promise((resolve, reject) => {
			const mark = randomUUID();
			let text = "";
			const fail = () => reject(new Error(`psql has ended: ${statement}`));
			psql.once("exit", fail);
			const listen = (chunk) => {
				text += chunk;
				if (text.includes(mark)) {
					psql.stdout.off("data", listen);
					psql.off("exit", fail);
					resolve(text.slice(0, text.indexOf(mark)).trim());
				}
			};
			psql.stdout.on("data", listen);
			psql.stdin.write(`${statement};\n\\echo ${mark}\n`);
		}),
	};
}

// script runs one of the scripts in PAYMENTS_DIR.
const script = (name) => promisify(execFile)(path.join(PAYMENTS_DIR, name));

// killService kills the service that examples/payments/run started.
const killService = () => process.kill(Number(readFileSync(path.join(PAYMENTS_DIR, "service.pid"), "utf8")), "SIGKILL");

// service starts another service, with changes in its environment. Returns its URL, its
// process, and errors(), the contents of its stderr.
async function service(changed = {}) {
	const settings = readFileSync(path.join(PAYMENTS_DIR, "service-environment"), "utf8").trim().split("\n")
		.map((line) => [line.slice(0, line.indexOf("=")), line.slice(line.indexOf("=") + 1)]);
	const started = spawn("node", [path.join(__dirname, "../../../examples/payments/server.js")], {
		env: { ...process.env, ...Object.fromEntries(settings), PORT: "0", ...changed },
		stdio: ["ignore", "pipe", "pipe"],
	});
	atEnd(() => started.kill("SIGKILL"));
	let said = "";
	started.stderr.on("data", (text) => { said += text; });
	const url = await new Promise((resolve, reject) => {
		started.stdout.once("data", (line) => resolve(/http:\S+/.exec(line)[0]));
		started.once("exit", () => reject(new Error("the service did not start")));
	});
	return { url, process: started, errors: () => said };
}

// chargedAtProvider returns the provider's charges with matching keys.
const chargedAtProvider = (fits = () => true) => readFileSync(PAYMENTS_PROVIDER_STATE, "utf8").split("\n").filter(Boolean)
	.map((line) => JSON.parse(line)).filter(fits);

module.exports = {
	assert, atEnd, chargedAtProvider, check, isProblem, killService, main, newKey, request, retry, script, service, session,
	sleep, sql, sqlstate, stored, until,
};
