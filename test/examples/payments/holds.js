// Two ways to block a request and to detect that it is blocked: in the proxy, and in
// the database.

"use strict";

const { spawn } = require("child_process");
const { until } = require("./chromium");
const service = require("./service");

// Gate blocks callers of pass() until open() is called; reached resolves when the first
// one waits.
class Gate {
	constructor() {
		this.reached = new Promise((done) => { this.arrive = done; });
		this.opened = new Promise((done) => { this.open = done; });
		this.pass = () => {
			this.arrive();
			return this.opened;
		};
	}
}

// Lock blocks all writes of charges, with a table lock that its own session holds until
// release() or until the database crashes.
class Lock {
	static async take() {
		const lock = new Lock();
		lock.session = spawn("psql", ["-X", "-q", "-A", "-t"], { stdio: ["pipe", "pipe", "ignore"] });
		lock.session.stdin.on("error", () => {});
		lock.session.stdin.write("BEGIN; LOCK TABLE payments.charge IN SHARE MODE; SELECT true;\n");
		await new Promise((done, failed) => {
			lock.session.stdout.once("data", done);
			lock.session.once("exit", () => failed(new Error("no lock")));
		});
		return lock;
	}

	// contended waits until a session waits for the lock: a charge is in progress.
	contended() {
		return until("a charge waits for the lock", async () => (await service.query(
			`SELECT true FROM pg_locks WHERE relation = 'payments.charge'::regclass AND NOT granted`)).length > 0);
	}

	release() {
		this.session.stdin.end();
	}
}

module.exports = { Gate, Lock };
