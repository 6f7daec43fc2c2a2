#!/usr/bin/env node
// Redis Streams between two databases, with node-pg and node-redis. README.md describes the commands relay and consume.

"use strict";

const { setTimeout: sleep } = require("timers/promises");
const { Client } = require("pg");
const { createClient } = require("redis");

// The same call can succeed later: lost connections, serialization failures and deadlocks, no resources, lock timeouts, shutdown and failover;
// IK408, another relay has the events of the batch; IK409, an earlier call for the same event is in progress.
const transient = /^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|E[A-Z]+$)/;
// The event itself is wrong: invalid data, a violated constraint, an error that the function raises.
const poison = /^(22|23|P0|IKFIN)/;
const fields = ["id", "topic", "aggregate_id", "type", "payload", "headers"];

// repeating calls work(client, broker) for ever; after a transient error with new connections and growing pauses. Throws other errors.
async function repeating(work) {
	for (let pause = 50; ; pause = Math.min(2 * pause, 2000)) {
		const client = new Client();
		const [, path] = process.env.REDIS.split("unix://");
		const broker = createClient({ url: path ? undefined : process.env.REDIS, socket: { path, reconnectStrategy: false } });
		for (const connection of [client, broker])
			connection.on("error", () => {}); // a lost connection also fails the command in progress
		try {
			await client.connect();
			await broker.connect();
			for (;; pause = 50)
				await work(client, broker);
		} catch (error) {
			// Errors of connections have no SQLSTATE, but a code such as EPIPE, or none.
			if (error.code ? !transient.test(error.code) : error instanceof TypeError || error instanceof ReferenceError)
				throw error;
		} finally {
			client.end().catch(() => {});
			if (broker.isOpen)
				broker.destroy();
		}
		await sleep(pause * (0.5 + Math.random() / 2));
	}
}

// relay adds a batch to the streams events:TOPIC, in one MULTI: no event overtakes an earlier one.
async function relay(client, broker, subscription) {
	await broker.ping(); // while Redis is away, no delivery is counted
	const { rows: events } = await client.query(`SELECT batch, id, topic, aggregate_id, type, payload::text, headers::text
		FROM idempotency.fetch($1, wait => '10 seconds', lease => $2)`, [subscription, process.env.LEASE ?? "30 seconds"]);
	if (events.length === 0)
		return;
	const [{ batch }] = events, chunk = broker.multi(), left = new Set();
	for (const event of events)
		chunk.xAdd(`events:${event.topic}`, "*", Object.fromEntries(fields.map((name) => [name, event[name]]).filter(([, value]) => value !== null)));
	const replies = await chunk.exec().catch(async (error) => {
		if (error.replies)
			return error.replies; // Redis has executed the MULTI and refused some
		await client.query("SELECT idempotency.nack($1, $2, NULL)", [subscription, batch]); // counts as no event's failure
		throw error;
	});
	for (const [number, { id, aggregate_id }] of events.entries())
		if (replies[number] instanceof Error && !left.has(aggregate_id)) {
			await client.query("SELECT idempotency.nack($1, $2, $3, $4)", [subscription, batch, id, replies[number].message]);
			left.add(aggregate_id ?? id); // later events of the aggregate leave the batch
		}
	await client.query("SELECT idempotency.ack($1, $2)", [subscription, batch]);
}

// consume calls a function for each message, which commits its effect, and acknowledges the message afterwards.
async function consume(client, broker, stream, group, call) {
	// One name for all: what an earlier process has read and not acknowledged comes first.
	const read = async (id, options) => (await broker.xReadGroup(group, "consumer", { key: stream, id }, { COUNT: 100, ...options }))?.[0].messages ?? [];
	await broker.xGroupCreate(stream, group, "0", { MKSTREAM: true }).catch((error) => {
		if (!error.message.startsWith("BUSYGROUP"))
			throw error;
	});
	let messages = await read("0");
	if (messages.length === 0)
		messages = await read(">", { BLOCK: 5000 });
	for (const { id, message } of messages) {
		try {
			await client.query(`SELECT ${call}($1::uuid, $2, $3, $4, $5::json, $6::json)`, fields.map((name) => message[name] ?? null));
		} catch (error) {
			if (!poison.test(error.code))
				throw error;
			await broker.xAdd(`${stream}:dead`, "*", { ...message, error: error.message });
		}
		await broker.xAck(stream, group, id);
	}
}

const [command, ...arguments_] = process.argv.slice(2);
repeating((client, broker) => ({ relay, consume })[command](client, broker, ...arguments_)).catch((error) => {
	console.error(error);
	process.exit(1);
});
