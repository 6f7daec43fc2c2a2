// A storm: clients that charge, retry, collide and lose leases, and consumers that fail now and then.

"use strict";

const { setTimeout: sleep } = require("timers/promises");
const { Pool } = require("pg");

// The schema of the storm: two subscriptions, of which a worker and a client consume.
const schema = `
	CREATE ROLE shipping LOGIN;
	CREATE FUNCTION ship(event idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF event.payload ->> 'carrier' = 'pigeon' THEN
			RAISE EXCEPTION 'no carrier "pigeon" for %', event.aggregate_id;
		END IF;
	END $$;
	SELECT idempotency.subscribe('mail', ARRAY['order.*'], owner => 'shipping', retry_delay => '2 seconds');
	SELECT idempotency.subscribe('shipping', ARRAY['order.*'], 'ship(idempotency.event)', owner => 'shipping', max_attempts => 2, retry_delay => '1 second', partitions => 2);`;

// storm begins, and returns the function that ends it.
function storm() {
	const pool = new Pool({ max: 12 });
	const known = []; // [scope, key, amount] of the last charges
	let charges = 0, over = false;

	// within runs some calls in a transaction. Refused calls belong to the storm.
	async function within(calls) {
		const client = await pool.connect();
		try {
			await client.query("BEGIN");
			await calls(client);
			await client.query("COMMIT");
		} catch (error) {
			await client.query("ROLLBACK");
			if (!/^IK/.test(error.code))
				throw error;
		} finally {
			client.release();
		}
	}

	const clients = {
		charge: () => within(async (client) => {
			const [scope, amount, key] = [["acme/charge", "globex/charge", "acme/refund"][charges % 3], charges++, `${Date.now()}-${charges}`];
			await client.query("SELECT idempotency.claim($1, $2, $3::json)", [scope, key, { amount }]);
			await client.query("SELECT idempotency.publish('order.placed', $1::json, aggregate_id => $2)", [{ carrier: charges % 40 ? "post" : "pigeon" }, `order-${charges}`]);
			await client.query(`SELECT idempotency.${charges % 15 ? "complete" : "fail"}($1, $2, '{"charge": 1}', $3)`, [scope, key, charges % 15 ? 201 : 402]);
			known.push([scope, key, amount]);
			known.splice(0, known.length - 50);
		}),

		// One of twenty retries comes with another amount.
		async retry() {
			const [scope, key, amount] = known[Math.floor(Math.random() * known.length)] ?? ["none", "none", 1];
			await pool.query("SELECT idempotency.peek($1, $2)", [scope, key]);
			if (scope !== "none")
				await pool.query("SELECT idempotency.try_claim($1, $2, $3::json)", [scope, key, { amount: amount + (Math.random() < 0.05) }]);
		},

		async collide() {
			const key = `copies-${Math.random()}`;
			await Promise.all([1, 2, 3].map(() => within(async (client) => {
				const { rows: [{ outcome }] } = await client.query("SELECT outcome FROM idempotency.try_claim('acme/charge', $1, wait => '400 ms')", [key]);
				if (outcome === "claimed") {
					await client.query("SELECT pg_sleep($1)", [Math.random() * 0.6]);
					await client.query("SELECT idempotency.complete('acme/charge', $1)", [key]);
				}
			})));
		},

		// The first owner of the lease is lost, and sometimes the second.
		async import() {
			const key = `file-${Math.random()}`;
			await pool.query("SELECT idempotency.claim('import', $1, lease => '1 second')", [key]);
			await sleep(1500);
			const { rows: [{ token }] } = await pool.query("SELECT token FROM idempotency.claim('import', $1, lease => '1 minute')", [key]);
			if (Math.random() < 0.8)
				await pool.query("SELECT idempotency.complete('import', $1, token => $2)", [key, token]);
		},

		async mail() {
			const { rows } = await pool.query("SELECT batch, id, aggregate_id FROM idempotency.fetch('mail', max_events => 200, wait => '1 second')");
			await sleep(300 + 600 * Math.random()); // the work
			for (const { batch, id, aggregate_id: order } of rows.filter(() => Math.random() < 0.02))
				await pool.query("SELECT idempotency.nack('mail', $1, $2, $3)", [batch, id, `550 the mailbox of ${order} is full`]);
			if (rows.length)
				await pool.query("SELECT idempotency.ack('mail', $1)", [rows[0].batch]);
		},
	};
	const pauses = { charge: () => 40 + 30 * Math.sin(Date.now() / 9000), retry: () => 20, collide: () => 500, import: () => 500, mail: () => 50 };
	const running = ["charge", "charge", "retry", "retry", "collide", "import", "mail", "mail"].map(async (name) => {
		while (!over) {
			await clients[name]();
			await sleep(pauses[name]());
		}
	});
	return async () => {
		over = true;
		await Promise.all(running);
		await pool.end();
	};
}

module.exports = { schema, storm };
