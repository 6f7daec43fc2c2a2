// A card provider, which stands for an external one: it charges long before it answers.
//
// It stores each charge under its key, in a file that is synced before the answer: a
// request with a known key returns the existing charge. README.md lists the
// environment.

"use strict";

const { closeSync, fsyncSync, openSync, readFileSync, writeSync } = require("fs");
const http = require("http");

const state = process.env.STATE || "/dev/null";
const delay = Number(process.env.DELAY || 0);
const most = 500000;

const file = openSync(state, "a");
const charges = new Map(readFileSync(state, "utf8").split("\n").filter(Boolean)
	.map(JSON.parse).map((charge) => [charge.key, charge]));

// charge makes a charge, after a delay.
async function charge(key, amount, currency) {
	const made = { id: `ch_${charges.size + 1}`, key, amount, currency };
	writeSync(file, `${JSON.stringify(made)}\n`);
	if (state !== "/dev/null")
		fsyncSync(file);
	charges.set(key, made);
	await new Promise((resolve) => setTimeout(resolve, delay));
	return made;
}

// answer returns the status and the body for a request.
async function answer(request) {
	const [, key] = /^"([\w-]{1,255})"$/.exec(request.headers["idempotency-key"] || "") || [];
	let text = "";
	for await (const chunk of request)
		text += chunk;
	if (request.method !== "POST" || request.url !== "/charges")
		return [404, { title: "Not Found" }];
	const { amount, currency } = JSON.parse(text);
	if (!key || !Number.isSafeInteger(amount) || typeof currency !== "string")
		return [400, { title: "Bad Request" }];
	if (amount > most)
		return [402, { title: "Payment Required", detail: "The card is declined." }];

	const made = charges.get(key) || await charge(key, amount, currency);
	if (made.amount !== amount || made.currency !== currency)
		return [422, { title: "Unprocessable Content" }];
	return [201, made];
}

const server = http.createServer(async (request, response) => {
	const [status, body] = await answer(request).catch(() => [400, { title: "Bad Request" }]);
	response.writeHead(status, { "Content-Type": status < 400 ? "application/json" : "application/problem+json" });
	response.end(JSON.stringify(body));
});
server.listen(Number(process.env.PORT || 0), "127.0.0.1", () => {
	console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
process.once("SIGTERM", () => {
	server.close(() => closeSync(file));
	server.closeIdleConnections();
});
