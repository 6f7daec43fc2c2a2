// Orders: executed by the holder of the lease, a request or the completer.
//
// No transaction is open while the provider works. A lease protects the order
// meanwhile; if this process dies, the lease expires, and the next one takes over.

"use strict";

const { query, Unavailable } = require("./database");

const heartbeat = 3000; // ms; a third of payments.lease_time()
const completion = 2000;

// charge asks the provider to charge, under a key that is the same for every attempt.
// Returns the number of the charge, or the reason of a final refusal, which only 402
// means. 400 and 422 (this key with another request) are errors of this service:
// storing them would refuse a valid charge. They are reported, and the order waits for
// the fix.
async function charge(order) {
	let response, body;
	try {
		response = await fetch(`${process.env.PROVIDER_URL}/charges`, {
			method: "POST",
			headers: { "Content-Type": "application/json", "Idempotency-Key": `"${order.provider_key}"` },
			body: JSON.stringify({ amount: Number(order.amount), currency: order.currency }),
			signal: AbortSignal.timeout(30000),
		});
		body = await response.json();
	} catch (error) {
		throw new Unavailable(`the provider: ${error.message}`);
	}
	if (response.status === 201)
		return { id: body.id };
	if (response.status === 402)
		return { refused: body.detail || "The provider refuses the charge." };
	throw new Unavailable(`the provider: status ${response.status}, ${JSON.stringify(body).slice(0, 200)}`);
}

// startHeartbeat renews a lease at intervals, and returns the function that stops it. A
// failed renewal has no effect here: the last call checks the token.
function startHeartbeat(lease) {
	let renewal = null;
	const timer = setInterval(() => {
		renewal ??= query("SELECT payments.order_renew($1)", lease).catch(() => {}).finally(() => { renewal = null; });
	}, heartbeat);
	return async () => {
		clearInterval(timer);
		await renewal;
	};
}

// carryOut does the remaining steps of an order, and returns the answer. After an
// error, the lease is released or expires. The heartbeat stops before the call that
// ends the lease: a later renewal would pass a stale token.
async function carryOut(order) {
	const stopHeartbeat = startHeartbeat(order.lease);
	try {
		let id = order.provider_charge;
		if (id === null) {
			const charged = await charge(order);
			if (charged.refused) {
				await stopHeartbeat();
				return (await query("SELECT * FROM payments.order_refuse($1, $2)", order.lease, charged.refused))[0];
			}
			id = charged.id;
			await query("SELECT payments.order_charged($1, $2)", order.lease, id);
		}
		await stopHeartbeat();
		return (await query("SELECT * FROM payments.order_finish($1, $2)", order.lease, id))[0];
	} catch (error) {
		await stopHeartbeat();
		await query("SELECT payments.order_yield($1)", order.lease).catch(() => {});
		throw error;
	}
}

// place begins an order, and executes it if the claim was granted.
async function place(bearer, header, { amount, currency, item }) {
	const [begun] = await query(
		`SELECT (answer).*, (lease).*, lease::text AS lease
		 FROM payments.order_begin($1, $2, $3, $4, $5)`,
		bearer, header, amount, currency, item);
	return begun.lease === null ? begun : carryOut(begun);
}

// complete executes abandoned orders, until none is left or one fails.
async function complete() {
	let found, results;
	do {
		found = await query("SELECT lease.*, lease::text AS lease FROM payments.orders_abandoned() AS lease");
		results = await Promise.allSettled(found.map(carryOut));
		for (const { reason } of results.filter((result) => result.status === "rejected"))
			console.error(`completer: ${reason.message}`);
	} while (found.length > 0 && results.every((result) => result.status === "fulfilled"));
}

// startCompleter runs complete at intervals, and returns the function that stops it.
function startCompleter() {
	let busy = null;
	const timer = setInterval(() => {
		busy ??= complete().catch((error) => console.error(`completer: ${error.message}`))
			.finally(() => { busy = null; });
	}, completion);
	return async () => {
		clearInterval(timer);
		await busy;
	};
}

module.exports = { place, startCompleter };
