// A worker: an instance of the service that the front starts, kills and freezes.

"use strict";

const { spawn } = require("child_process");
const { openSync, readFileSync, writeFileSync } = require("fs");
const http = require("http");
const path = require("path");

const directory = process.env.PAYMENTS_DIR;
const log = openSync(path.join(directory, "service.log"), "a");

class Worker {
	constructor(name) {
		this.name = name;
		this.state = "stopped"; // ready, killed or frozen later
		this.busy = 0; // number of payments in progress
	}

	// start starts the process, and returns when it listens. The file tells
	// examples/payments/run to end it.
	async start() {
		const settings = readFileSync(path.join(directory, "service-environment"), "utf8").trim().split("\n")
			.map((line) => line.split(/=(.*)/, 2));
		this.process = spawn("node", [path.join(__dirname, "../server.js")], {
			env: { ...process.env, ...Object.fromEntries(settings), PORT: "0" },
			stdio: ["ignore", "pipe", log],
		});
		writeFileSync(path.join(directory, `worker-${this.name}.pid`), String(this.process.pid));
		const said = await new Promise((resolve) => this.process.stdout.once("data", resolve));
		[, this.port] = /:(\d+)\s*$/.exec(said);
		this.state = "ready";
	}

	kill() {
		this.state = "killed";
		this.process.kill("SIGKILL");
	}

	freeze() {
		this.state = "frozen";
		this.process.kill("SIGSTOP");
	}

	thaw() {
		this.state = "ready";
		this.process.kill("SIGCONT");
	}

	// exchange sends a request to the process, and returns the answer; undefined if the
	// process ends meanwhile, or does not run.
	exchange({ method, url, headers }, body) {
		const counts = method === "POST" ? 1 : 0;
		this.busy += counts;
		return new Promise((resolve) => {
			const request = http.request({ host: "127.0.0.1", port: this.port, method, path: url, headers, agent: false });
			request.on("error", () => resolve());
			request.on("response", (response) => {
				const chunks = [];
				response.on("data", (chunk) => chunks.push(chunk));
				response.on("error", () => resolve());
				response.on("end", () => resolve({ status: response.statusCode, headers: response.headers, body: Buffer.concat(chunks) }));
			});
			request.end(body);
		}).finally(() => { this.busy -= counts; });
	}
}

module.exports = { Worker };
