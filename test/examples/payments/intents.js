// The intents of the proxy test, determined by a seed: charges and orders, each with a
// unique key and a unique amount, so that every charge identifies its intent.

"use strict";

const { dice, pick } = require("./dice");

// How an intent is sent:
//	plain   by one client, which retries until the response
//	twins   by two concurrent clients
//	reuse   by one client, which later sends another body with the same key
//	rivals  by two concurrent clients with different bodies, of which one must fail
const manners = [["plain", 75], ["twins", 12], ["reuse", 8], ["rivals", 5]];
const orders = 10; // percent
const items = ["book", "lamp", "chair", "pen"];

// intent returns the intent i: { name, path, key, manner, bodies }. Only the first body
// may be charged, or either one among rivals.
function intent(seed, i) {
	const next = dice(seed, "intent", i);
	const manner = pick(manners, next());
	const order = next() * 100 < orders;
	const key = uuid(next);
	const bodies = [body(2 * i, order, next)];
	if (manner === "reuse" || manner === "rivals")
		bodies.push(body(2 * i + 1, order, next));
	return { i, path: order ? "/orders" : "/charges", key, manner, bodies };
}

// body returns the body for the nth amount, in cents.
function body(n, order, next) {
	const sum = { amount: n + 1, currency: "EUR" };
	return order ? { ...sum, item: items[Math.floor(next() * items.length)] } : sum;
}

// uuid returns a random key, as a client creates it for an intent.
function uuid(next) {
	const hex = Array.from({ length: 4 }, () => Math.floor(next() * 2 ** 32).toString(16).padStart(8, "0")).join("");
	return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-4${hex.slice(13, 16)}-8${hex.slice(17, 20)}-${hex.slice(20)}`;
}

module.exports = { intent };
