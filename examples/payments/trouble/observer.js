// The observer reads the tables, and reports what happens to the leases of orders.
//
// It reads idempotency.key itself, which only its owner and superusers can: no function
// shows the token of another's lease.

"use strict";

const { query } = require("../database");

// The leases of the orders in progress, and of the given ones, which can be finished. A
// lease that was released has the end 0.
const look = `
	SELECT (SELECT count(*)::integer FROM payments.charge) AS charges,
		(SELECT count(*)::integer FROM payments.orders) AS orders,
		(SELECT stale_tokens::integer FROM idempotency.stats WHERE datname = current_database()) AS stale,
		(SELECT coalesce(json_agg(json_build_object(
				'key', key, 'token', coalesce(token, finished_by), 'attempt', attempt, 'point', recovery_point,
				'end', round(1000 * extract(epoch FROM greatest(leased_until, 'epoch'))),
				'expired', leased_until < clock_timestamp(), 'finished', token IS NULL) ORDER BY leased_at), '[]')
			FROM idempotency.key
			WHERE scope = 'orders/shop' AND (token IS NOT NULL OR key::text = ANY ($1))) AS leases`;

// changes returns what has happened to a lease since the last look.
function* changes(lease, last) {
	if (!last)
		yield lease.attempt > 1 ? "taken over" : "granted";
	else if (lease.token !== last.token)
		yield "taken over";
	else if (lease.end > last.end)
		yield "renewed";
	if (lease.finished)
		yield "finished";
	else if (last && lease.end === 0 && last.end !== 0)
		yield "released";
	else if (last && lease.expired && !last.expired)
		yield "expired";
	else if (last && lease.point !== last.point)
		yield "charged";
}

class Observer {
	constructor(report) {
		this.report = report;
		this.seen = { rows: { "/charges": 0, "/orders": 0 }, leases: [] };
		this.stale = Infinity; // the counter of stale tokens
	}

	// look reads the tables once. While the database restarts, it keeps what it has seen.
	async look() {
		const { leases } = this.seen;
		const [found] = await query(look, leases.map(({ key }) => key)).catch(() => []);
		if (!found)
			return;
		for (const lease of found.leases)
			for (const change of changes(lease, leases.find(({ key }) => key === lease.key)))
				this.report({ kind: "lease", change, ...lease });
		if (found.stale > this.stale && !this.fenced) // a rejected owner calls more than once
			this.report({ kind: "fenced" });
		this.fenced = found.stale > this.stale;
		this.stale = found.stale;
		this.seen = {
			rows: { "/charges": found.charges, "/orders": found.orders },
			leases: found.leases.filter(({ finished }) => !finished),
		};
	}
}

module.exports = { Observer };
