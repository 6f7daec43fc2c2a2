// One attempt of a request, as a client makes it: the whole response, or nothing.

"use strict";

const http = require("http");

// Time limit of an attempt, as in any client.
const patience = 15000;

// Client sends requests to one address, over persistent connections.
class Client {
	constructor(address, token) {
		this.address = new URL(address);
		this.token = token;
		this.agent = new http.Agent({ keepAlive: true });
	}

	close() {
		this.agent.destroy();
	}

	// post sends a body with a key, and resolves to { status, headers, body }, or to
	// null if no whole response arrived.
	post(path, key, body) {
		return this.send("POST", path, { "Content-Type": "application/json",
			"Idempotency-Key": `"${key}"` }, JSON.stringify(body));
	}

	get(path) {
		return this.send("GET", path, {}, "");
	}

	send(method, path, headers, body) {
		return new Promise((done) => {
			const request = http.request({ host: this.address.hostname, port: this.address.port, path,
				method, agent: this.agent, timeout: patience,
				headers: { Authorization: `Bearer ${this.token}`, "Content-Length": Buffer.byteLength(body),
					...headers } });
			request.on("timeout", () => request.destroy());
			request.on("error", () => done(null));
			request.on("response", (response) => {
				const parts = [];
				response.on("data", (part) => parts.push(part));
				response.on("error", () => done(null));
				response.on("close", () => done(response.complete ? { status: response.statusCode,
					headers: response.rawHeaders, body: Buffer.concat(parts) } : null));
			});
			request.end(body);
		});
	}
}

// Headers of this connection or this attempt, which are not part of the stored
// response.
const passing = new Set(["date", "connection", "keep-alive", "idempotent-replayed"]);

// header returns the value of a header in the raw list, or undefined.
function header(answer, name) {
	const at = answer.headers.findIndex((word, i) => i % 2 === 0 && word.toLowerCase() === name);
	return at < 0 ? undefined : answer.headers[at + 1];
}

// stored returns everything that a replay must repeat to the byte: the status, the
// headers in order, and the body.
function stored(answer) {
	const headers = [];
	for (let i = 0; i < answer.headers.length; i += 2)
		if (!passing.has(answer.headers[i].toLowerCase()))
			headers.push(`${answer.headers[i]}: ${answer.headers[i + 1]}`);
	return [answer.status, ...headers, "", answer.body.toString("latin1")].join("\n");
}

module.exports = { Client, header, stored };
