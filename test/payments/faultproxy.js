// An HTTP proxy on loopback that does to requests what a network can do to them.
//
// Whoever makes it says which fault befalls each request, by a function; seeded() is
// one that draws by a seed.  The proxy reads the whole request first, and the whole
// answer before it passes on any of it, so that it knows what it cuts:
//
//	pass           nothing happens
//	refuse         the connection is reset as soon as it is there, before any request
//	cut_before     the connection is reset, and the service never hears of the request
//	cut_within     the service gets half of the request, and then nothing
//	lose_answer    the service has answered, so it has committed, and nobody hears of it
//	truncate       a part of the answer arrives
//	delay          the request waits, or the answer, or both
//	twice_at_once  the service gets the request twice at the same time
//	twice_in_turn  it gets it once more after it has answered
//
// It emits "answer" for every answer that the service finished, also for those that
// the client never gets.  A client that goes away ends nothing: what it has sent is on
// its way.

"use strict";

const http = require("http");
const { EventEmitter } = require("events");
const { setTimeout: sleep } = require("timers/promises");
const { dice, pick } = require("./dice");

class FaultProxy extends EventEmitter {
	// The constructor takes the service's URL and two functions: fault(request) returns
	// { kind, roll, before, after } for a request { key, nth, method, path }, where nth
	// counts the requests with that key, roll says where to cut and which of two answers
	// to pass on, and before and after are functions to await for a delay; refuse(n)
	// tells whether connection n is reset.
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

	// open begins to listen, and returns the URL for clients.
	async open() {
		await new Promise((done) => this.server.listen(0, "127.0.0.1", done));
		return `http://127.0.0.1:${this.server.address().port}`;
	}

	// close resets what is open.
	close() {
		this.server.close();
		this.server.closeAllConnections();
		this.agent.destroy();
	}

	count(kind) {
		this.counts[kind] = (this.counts[kind] ?? 0) + 1;
	}

	// serve takes one request, and lets its fault befall it.
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

	// exchange sends a request to the service, and returns the answer, or null if none
	// came whole.  Given a length, it sends so much of the body and hangs up.
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

// wholeBody reads a request or an answer to its end, and returns its body, or null if
// it broke off.
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

// sendPart sends the head of an answer and less than all of its body, and hangs up.
function sendPart(response, answer, roll) {
	response.sendDate = false;
	response.writeHead(answer.status, answer.headers);
	response.flushHeaders();
	response.write(answer.body.subarray(0, Math.floor(roll * answer.body.length)),
		() => response.socket?.destroy());
}

// The odds that a network which means ill gives a request, in percent.
const odds = [["pass", 55], ["cut_before", 6], ["cut_within", 5], ["lose_answer", 10], ["truncate", 6],
	["delay", 6], ["twice_at_once", 6], ["twice_in_turn", 6]];
const refused = 0.05;
const kinds = ["refuse", ...odds.map(([kind]) => kind)];

// seeded returns what a FaultProxy asks for, drawn by a seed: the fate of a request
// depends on its key and on how many there were with it, not on what else is going on.
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
