// The responses by key: every complete response of the service, delivered or lost, and
// every one that a client received. Reports violations.

"use strict";

const { header, stored } = require("./client");

class Ledger {
	constructor() {
		this.first = new Map(); // key -> the bytes that every final response must repeat
		this.fresh = new Map(); // key -> final responses that are no replays
		this.replays = 0;
		this.refusals = 0;
		this.statuses = {};
		this.faults = [];
	}

	fault(text) {
		this.faults.push(text);
	}

	// served records a response that leaves the service.
	served(key, answer) {
		this.statuses[answer.status] = (this.statuses[answer.status] ?? 0) + 1;
		if (answer.status !== 201) {
			this.refused(key, answer);
			return;
		}
		this.compare(key, answer);
		if (header(answer, "idempotent-replayed") === "true")
			this.replays++;
		else
			this.fresh.set(key, (this.fresh.get(key) ?? 0) + 1);
		if (this.fresh.get(key) > 1)
			this.fault(`${key}: executed ${this.fresh.get(key)} times, according to the service`);
	}

	// delivered records a response that a client received.
	delivered(key, answer) {
		if (answer.status === 201)
			this.compare(key, answer);
	}

	// compare compares a final response with the first one for its key.
	compare(key, answer) {
		const bytes = stored(answer);
		if (!this.first.has(key))
			this.first.set(key, bytes);
		else if (this.first.get(key) !== bytes)
			this.fault(`${key}: answered\n${this.first.get(key)}\nand then\n${bytes}`);
	}

	// refused records a response that is not final for its key: the service is busy or
	// unavailable (409, 503), or the key belongs to another request (422). Others are
	// violations.
	refused(key, answer) {
		if (![409, 422, 503].includes(answer.status))
			this.fault(`${key}: status ${answer.status}, ${answer.body}`);
		else if (!/^application\/problem\+json/.test(header(answer, "content-type")))
			this.fault(`${key}: status ${answer.status} is ${header(answer, "content-type")}`);
		else if (answer.status === 409 && !/^[0-9]+$/.test(header(answer, "retry-after")))
			this.fault(`${key}: status 409, and Retry-After is ${header(answer, "retry-after")}`);
		if (answer.status === 422)
			this.refusals++;
	}

	// answer returns the final response for a key as JSON.
	answer(key) {
		const bytes = this.first.get(key);
		return bytes === undefined ? undefined : JSON.parse(bytes.slice(bytes.indexOf("\n\n") + 2));
	}
}

module.exports = { Ledger };
