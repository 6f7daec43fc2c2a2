// Orders: carried out by whoever has the turn, a request or the completer.
//
// No transaction is open while the provider works.  What holds the order meanwhile is a
// lease; if this process dies, the lease runs out, and the next one goes on.

"use strict";

const { query, Unavailable } = require("./database");

const heartbeat = 3000; // ms; a third of payments.lease()
const completion = 2000;

// charge asks the provider to charge, under the key that is the same in every turn.
// Returns the number of the charge, or why it is refused for ever, which only 402 says.  400
// and 422 (our key with another request) are faults of ours: to store them would refuse what
// may be charged.  They are reported, and the order waits until they are mended.
async function charge(turn) {
	let response, body;
	try {
		response = await fetch(`${process.env.PROVIDER_URL}/charges`, {
			method: "POST",
			headers: { "Content-Type": "application/json", "Idempotency-Key": `"${turn.provider_key}"` },
			body: JSON.stringify({ amount: Number(turn.amount), currency: turn.currency }),
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

// startHeartbeat renews a turn again and again, and returns what ends that.  A renewal that
// fails changes nothing: the last call finds out whose turn it is.
function startHeartbeat(turn) {
	let renewal = null;
	const timer = setInterval(() => {
		renewal ??= query("SELECT payments.order_renew($1)", turn).catch(() => {}).finally(() => { renewal = null; });
	}, heartbeat);
	return async () => {
		clearInterval(timer);
		await renewal;
	};
}

// carryOut does what is left to do of an order, and returns the answer.  On an error the
// order is left as it is: with a turn that is given away, or one that runs out.  The heartbeat
// ends before the call that ends the turn: a renewal after it would show a token that is over.
async function carryOut(turn) {
	const stopHeartbeat = startHeartbeat(turn.turn);
	try {
		let id = turn.provider_charge;
		if (id === null) {
			const charged = await charge(turn);
			if (charged.refused) {
				await stopHeartbeat();
				return (await query("SELECT * FROM payments.order_refuse($1, $2)", turn.turn, charged.refused))[0];
			}
			id = charged.id;
			await query("SELECT payments.order_charged($1, $2)", turn.turn, id);
		}
		await stopHeartbeat();
		return (await query("SELECT * FROM payments.order_finish($1, $2)", turn.turn, id))[0];
	} catch (error) {
		await stopHeartbeat();
		await query("SELECT payments.order_yield($1)", turn.turn).catch(() => {});
		throw error;
	}
}

// place begins an order, and carries it out if that is for us to do.
async function place(bearer, header, { amount, currency, item }) {
	const [begun] = await query(
		`SELECT (answer).*, (turn).*, turn::text AS turn
		 FROM payments.order_begin($1, $2, $3, $4, $5)`,
		bearer, header, amount, currency, item);
	return begun.turn === null ? begun : carryOut(begun);
}

// complete carries out what nobody has come back for, until there is none, or one is not
// to be had now.
async function complete() {
	let turns, results;
	do {
		turns = await query("SELECT turn.*, turn::text AS turn FROM payments.orders_abandoned() AS turn");
		results = await Promise.allSettled(turns.map(carryOut));
		for (const { reason } of results.filter((result) => result.status === "rejected"))
			console.error(`completer: ${reason.message}`);
	} while (turns.length > 0 && results.every((result) => result.status === "fulfilled"));
}

// startCompleter lets it look every now and then, and returns what ends that.
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
