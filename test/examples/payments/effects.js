// Compares the charges in the database and at the provider with the intents and the
// responses.

"use strict";

const service = require("./service");

// look reads all charges, all orders, and all charges of the provider.
async function look() {
	const [charges, orders] = await Promise.all([
		service.query("SELECT id, amount, currency FROM payments.charge ORDER BY id"),
		service.query("SELECT id, amount, currency, provider_charge FROM payments.orders ORDER BY id")]);
	return { charges, orders, provided: service.provided() };
}

// since returns the rows that were added after an earlier look.
function since(before, after) {
	const fresh = {};
	for (const [kind, rows] of Object.entries(after)) {
		const old = new Set(before[kind].map(({ id }) => id));
		fresh[kind] = rows.filter(({ id }) => !old.has(id));
	}
	return fresh;
}

// checkCharges reports to the ledger every intent that was not charged exactly once, and every
// charge without intent. No two intents have the same amount.
function checkCharges(intents, ledger, { charges, orders, provided }) {
	const rows = { "/charges": byAmount(charges), "/orders": byAmount(orders) };
	const cards = byAmount(provided);
	for (const wanted of intents) {
		const answer = ledger.answer(wanted.key);
		const row = one(wanted, rows[wanted.path], answer?.id, ledger, "row");
		if (row !== undefined && row.amount !== answer?.amount)
			ledger.fault(`${wanted.key}: charged ${row.amount}, with response ${answer?.amount}`);
		if (wanted.path === "/orders")
			one(wanted, cards, answer?.provider_charge, ledger, "charge of the provider");
	}
	for (const left of [rows["/charges"], rows["/orders"], cards])
		for (const [amount] of left)
			ledger.fault(`${amount} was charged without intent`);
}

// one checks the charges of one intent: exactly one, with a valid amount, and the one
// in the response. Returns that charge.
function one({ key, manner, bodies }, left, id, ledger, what) {
	const found = bodies.flatMap(({ amount }, i) => (left.get(amount) ?? []).map((thing) => ({ i, thing })));
	for (const { amount } of bodies)
		left.delete(amount);
	if (found.length !== 1)
		ledger.fault(`${key}: ${found.length} times a ${what}`);
	else if (found[0].i > 0 && manner !== "rivals")
		ledger.fault(`${key}: a ${what} for the body that was rejected`);
	else if (found[0].thing.id !== id)
		ledger.fault(`${key}: the ${what} is ${found[0].thing.id}, and the response has ${id}`);
	else
		return found[0].thing;
}

function byAmount(rows) {
	const map = new Map();
	for (const row of rows)
		map.set(row.amount, [...map.get(row.amount) ?? [], row]);
	return map;
}

module.exports = { look, since, checkCharges };
