// Two ways to stop a request in the middle, and to learn that it is there: on its way
// through the proxy, and inside the database.

"use strict";

const { spawn } = require("child_process");
const { until } = require("./chromium");
const service = require("./service");

// Gate lets nobody through pass() until open() is called; reached resolves when the
// first one stands before it.
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

// Lock keeps everybody from writing charges, by a table lock that a session of its own
// holds until release() or until the database crashes.
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

	// contended returns when somebody waits for the lock: a charge is half done.
	contended() {
		return until("a charge waits for the lock", async () => (await service.query(
			`SELECT true FROM pg_locks WHERE relation = 'payments.charge'::regclass AND NOT granted`)).length > 0);
	}

	release() {
		this.session.stdin.end();
	}
}

module.exports = { Gate, Lock };
