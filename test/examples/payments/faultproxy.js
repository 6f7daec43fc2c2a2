// An HTTP proxy on loopback with the faults of a network. The caller passes a function
// that selects the fault of each request; seeded() selects by a seed. The proxy reads
// the whole request first, and the whole response before it forwards any part of it:
//
//	pass           no fault
//	refuse         the connection is reset before any request
//	cut_before     the connection is reset, and the service does not receive the request
//	cut_within     the service receives only half of the request
//	lose_answer    the service has committed and answered, and the response is dropped
//	truncate       a part of the response arrives
//	delay          the request, the response, or both are delayed
//	twice_at_once  the service receives the request twice at the same time
//	twice_in_turn  the service receives the request again after its response
//
// It emits "answer" for every complete response of the service, even if the client does
// not receive it. A client that disconnects does not abort its request.

"use strict";

const http = require("http");
const { EventEmitter } = require("events");
const { setTimeout: sleep } = require("timers/promises");
const { dice, pick } = require("./dice");

class FaultProxy extends EventEmitter {
	// The constructor takes the service's URL and two functions. fault(request) returns
	// { kind, roll, before, after } for a request { key, nth, method, path }: nth
	// counts the requests with that key, roll selects where to cut and which of two
	// responses to forward, and before and after are async functions for a delay.
	// refuse(n) returns whether connection n is reset.
	constructor(service, { fault, refuse = () => false }) {
		super();
		this.service = new URL(service);
		this.fault = fault;
		this.counts = {};
		this.seen = new Map();
		this.agent = new http.Agent({ keepAlive: true });
		this.server = http.createServer((request, response) => this.serve(request, response));
		let connections = 0;
		this.server.on("connection", (socket) => {
			if (refuse(connections++)) {
				this.count("refuse");
				socket.resetAndDestroy();
			}
		});
	}

	// open starts to listen, and returns the URL for clients.
	async open() {
		await new Promise((done) => this.server.listen(0, "127.0.0.1", done));
		return `http://127.0.0.1:${this.server.address().port}`;
	}

	// close resets all open connections.
	close() {
		this.server.close();
		this.server.closeAllConnections();
		this.agent.destroy();
	}

	count(kind) {
		this.counts[kind] = (this.counts[kind] ?? 0) + 1;
	}

	// serve handles one request with its fault.
	async serve(incoming, response) {
		const body = await wholeBody(incoming);
		if (body === null)
			return;
		const key = /^"(.*)"$/.exec(incoming.headers["idempotency-key"])?.[1];
		const nth = this.seen.get(key) ?? 0;
		this.seen.set(key, nth + 1);
		const request = { key, nth, method: incoming.method, path: incoming.url,
			headers: incoming.rawHeaders, body };
		const fault = this.fault(request);
		this.count(fault.kind);
		const answer = await this[fault.kind](request, fault);
		if (answer === null)
			response.socket?.resetAndDestroy();
		else if (fault.kind === "truncate")
			sendPart(response, answer, fault.roll);
		else
			sendAll(response, answer);
	}

	pass(request) {
		return this.exchange(request);
	}

	cut_before() {
		return null;
	}

	async cut_within(request) {
		await this.exchange(request, Math.floor(request.body.length / 2));
		return null;
	}

	async lose_answer(request) {
		await this.exchange(request);
		return null;
	}

	truncate(request) {
		return this.exchange(request);
	}

	async delay(request, { before, after }) {
		await before?.();
		const answer = await this.exchange(request);
		await after?.();
		return answer;
	}

	async twice_at_once(request, { roll }) {
		const answers = await Promise.all([this.exchange(request), this.exchange(request)]);
		return answers[roll < 0.5 ? 0 : 1];
	}

	async twice_in_turn(request, { roll }) {
		const answers = [await this.exchange(request), await this.exchange(request)];
		return answers[roll < 0.5 ? 0 : 1];
	}

	// exchange sends a request to the service, and returns the response, or null if it
	// was not complete. With a length, it sends only so much of the body and
	// disconnects.
	exchange(request, length = request.body.length) {
		return new Promise((done) => {
			const outgoing = http.request({ host: this.service.hostname, port: this.service.port,
				method: request.method, path: request.path, headers: request.headers,
				agent: this.agent });
			outgoing.on("error", () => done(null));
			outgoing.on("response", async (incoming) => {
				const body = await wholeBody(incoming);
				if (body === null)
					return done(null);
				const answer = { status: incoming.statusCode, headers: incoming.rawHeaders, body };
				this.emit("answer", request, answer);
				done(answer);
			});
			if (length < request.body.length)
				outgoing.write(request.body.subarray(0, length), () => outgoing.destroy());
			else
				outgoing.end(request.body);
		});
	}
}

// wholeBody reads a request or a response to its end, and returns its body, or null if
// it was interrupted.
function wholeBody(message) {
	return new Promise((done) => {
		const parts = [];
		message.on("data", (part) => parts.push(part));
		message.on("error", () => done(null));
		message.on("close", () => done(message.complete ? Buffer.concat(parts) : null));
	});
}

function sendAll(response, answer) {
	response.sendDate = false;
	response.writeHead(answer.status, answer.headers);
	response.end(answer.body);
}

// sendPart sends the head of a response and a part of its body, and disconnects.
function sendPart(response, answer, roll) {
	response.sendDate = false;
	response.writeHead(answer.status, answer.headers);
	response.flushHeaders();
	response.write(answer.body.subarray(0, Math.floor(roll * answer.body.length)),
		() => response.socket?.destroy());
}

// The probabilities of faults, in percent.
const odds = [["pass", 55], ["cut_before", 6], ["cut_within", 5], ["lose_answer", 10], ["truncate", 6],
	["delay", 6], ["twice_at_once", 6], ["twice_in_turn", 6]];
const refused = 0.05;
const kinds = ["refuse", ...odds.map(([kind]) => kind)];

// seeded returns the functions of a FaultProxy, determined by a seed: the fault of a
// request depends on its key and its number with that key, not on other requests.
function seeded(seed, longest = 50) {
	return {
		refuse: (connection) => dice(seed, "connection", connection)() < refused,
		fault: ({ key, nth }) => {
			const next = dice(seed, "request", key, nth);
			const kind = pick(odds, next());
			const [roll, early, late] = [next(), next(), next()];
			return { kind, roll, before: () => sleep(early * longest), after: () => sleep(late * longest) };
		},
	};
}

module.exports = { FaultProxy, kinds, seeded };
