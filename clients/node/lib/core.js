// The functions of the schema idempotency, for any driver or ORM with an adapter of adapters.js. The
// first argument is an adapter, which runs a call in a transaction of its own, or a session
// of one, which runs the call in its transaction.

"use strict";

const { isTransient, retrying, sqlState } = require("./errors.js");
const { jsonText, keyText, parsed, plainText, requestText } = require("./values.js");

// What claim and try_claim return, in types that every driver reads.
const OPERATION = `outcome::text, replayed, token::text, attempt, recovery_point, state::text, status, headers::text, response::text,
	failed, retry_after::text, expires_at::text`;

// What fetch returns, and in seconds its second argument, the lease.
const EVENT = `batch::text, seq::text, id::text, topic, aggregate_id, type, payload::text, headers::text, attempt,
	extract(epoch FROM $2::text::interval)::text AS seconds`;

// Failure is the final failure of an operation, such as a declined card: the writes of the handler
// are undone, and retries get its response.
class Failure extends Error {
	constructor(response, status = 422, headers = undefined) {
		super(`the operation failed with status ${status}`);
		Object.assign(this, { name: "Failure", response, status, headers });
	}
}

// How the server reads arguments that are no text, and lists, which are sent as JSON.
const TYPES = { lease: "interval", wait: "interval", retention: "interval", status: "integer", max_events: "integer", token: "bigint", batch: "bigint",
	omit_large: "boolean", dead: "boolean", event_id: "uuid", deliver_at: "timestamptz" };
const LISTS = { keys: "text", events: "bigint" };

// call calls a function of the schema with arguments by name, and returns rows. What is undefined is NULL.
function call(session, name, args, columns) {
	const passed = Object.keys(args).map((arg, index) => {
		const text = `$${index + 1}::text`;
		if (LISTS[arg])
			return `${arg} => ARRAY(SELECT jsonb_array_elements_text(${text}::jsonb)::${LISTS[arg]})`;
		return `${arg} => ${text}${TYPES[arg] ? `::${TYPES[arg]}` : ""}`;
	});
	return session.query(`SELECT ${columns} FROM idempotency.${name}(${passed.join(", ")}) AS result`, Object.values(args).map(plainText));
}

// callOne calls a function that returns one value, and returns it: as text, or as column says.
const callOne = async (session, name, args, column = "result::text") => (await call(session, name, args, `${column} AS value`))[0].value;

const named = (scope, key) => ({ scope: keyText("the scope", scope), key: keyText("the key", key) });

function operation(row) {
	return {
		outcome: row.outcome,
		replayed: row.replayed,
		failed: row.failed,
		status: row.status ?? undefined,
		headers: parsed(row.headers),
		response: parsed(row.response),
		responseText: row.response ?? undefined,
		token: row.token ?? undefined,
		attempt: row.attempt ?? undefined,
		recoveryPoint: row.recovery_point ?? undefined,
		state: parsed(row.state),
		retryAfter: row.retry_after === null ? undefined : Number(row.retry_after),
		expiresAt: row.expires_at ?? undefined,
	};
}

async function claimWith(name, session, scope, key, options = {}) {
	const { lease: duration, wait, retention } = options;
	const [row] = await call(session, name, { ...named(scope, key), request: requestText(options), lease: duration, wait, retention }, OPERATION);
	return operation(row);
}

// claim claims an operation, or returns its stored outcome.
const claim = (session, scope, key, options) => claimWith("claim", session, scope, key, options);

// tryClaim is claim that returns the outcomes in_progress and mismatched instead of an error.
const tryClaim = (session, scope, key, options) => claimWith("try_claim", session, scope, key, options);

// finish stores an outcome, and returns the text of its response. name is complete or fail.
const finish = async (session, name, scope, key, response, { status, headers, token, retention, omitLarge = false } = {}) =>
	callOne(session, name, { ...named(scope, key), response, status, headers: jsonText("the headers", headers), token, retention, omit_large: omitLarge });

// complete stores the success of an operation, and returns the response as a retry gets it.
const complete = async (session, scope, key, response, options) =>
	parsed(await finish(session, "complete", scope, key, jsonText("the response", response), options));

// fail stores the final failure of an operation; options.status is required.
const fail = async (session, scope, key, response, options) =>
	parsed(await finish(session, "fail", scope, key, jsonText("the response", response), options));

// release gives a claim up without an outcome.
async function release(session, scope, key, { token } = {}) {
	await callOne(session, "release", { ...named(scope, key), token });
}

// once returns true if the key is new, and stores it.
const once = async (session, scope, key, { retention } = {}) => callOne(session, "once", { ...named(scope, key), retention }, "result");

// onceMany stores keys, and returns the new ones.
async function onceMany(session, scope, keys, { retention } = {}) {
	const texts = JSON.stringify(keys.map((key) => keyText("the key", key)));
	const rows = await call(session, "once_many", { scope: keyText("the scope", scope), keys: texts, retention }, "result AS key");
	return rows.map(({ key }) => key);
}

// deriveKey returns the key of a step of an operation, such as that for a provider.
const deriveKey = async (session, scope, key, step) =>
	callOne(session, "derive_key", { ...named(scope, key), step: keyText("the step", step) });

// publish publishes an event in the transaction, and returns its id.
const publish = async (session, topic, payload, { aggregateId, type, headers, eventId, deliverAt } = {}) =>
	callOne(session, "publish", { topic, payload: jsonText("the payload", payload),
		aggregate_id: aggregateId === undefined ? undefined : keyText("the aggregate", aggregateId), type, headers: jsonText("the headers", headers),
		event_id: eventId, deliver_at: deliverAt instanceof Date ? deliverAt.toISOString() : deliverAt });

// undoable runs work after a savepoint, which undoes its writes if it throws a Failure. Without a
// Failure, an ORM's pending writes are sent before it returns.
async function undoable(session, work) {
	if (session.savepoint)
		return session.savepoint(work);
	await session.query("SAVEPOINT idempotency", []);
	try {
		const result = await work(session);
		await session.flush?.();
		return result;
	} catch (error) {
		if (error instanceof Failure) {
			session.clear?.();
			await session.query("ROLLBACK TO SAVEPOINT idempotency", []);
		}
		throw error;
	}
}

// store stores the result of work, or its Failure, and returns the operation as a retry gets it.
async function store(session, scope, key, claimed, options, work) {
	let name = "complete";
	let { status } = options;
	let { headers } = options;
	let response;
	try {
		response = await undoable(session, work);
	} catch (error) {
		if (!(error instanceof Failure))
			throw error;
		name = "fail";
		({ status, headers, response } = error);
	}
	const text = await finish(session, name, scope, key, jsonText("the response", response),
		{ ...options, status: status ?? 200, headers, token: claimed.token });
	session.finished = true; // no statement of the transaction has failed
	return { ...claimed, status: status ?? 200, headers, failed: name === "fail", response: parsed(text), responseText: text ?? undefined };
}

// run runs work once: the claim, the writes of work and its result commit in one transaction, and
// a retry gets the result. work gets the ORM's transaction, and the session for calls of this package.
function run(db, scope, key, options, work) {
	const { request, wait, retention, ...others } = options;
	const claiming = "request" in options ? { request, wait, retention } : { wait, retention };
	return db.transaction(async (session) => {
		const claimed = await claim(session, scope, key, claiming);
		return claimed.replayed ? claimed : store(session, scope, key, claimed, others, (inner) => work(inner.tx, inner));
	});
}

// Lease is what the work of lease() gets.
class Lease {
	#db;
	#scope;
	#key;
	#duration;
	#timer;
	#end;
	#fault;
	#completing = false;
	#aborts = new AbortController();

	constructor(db, scope, key, duration, seconds, claimed) {
		this.#db = db;
		this.#scope = scope;
		this.#key = key;
		this.#duration = duration;
		this.token = claimed.token;
		this.attempt = claimed.attempt;
		this.recoveryPoint = claimed.recoveryPoint;
		this.state = claimed.state;
		this.signal = this.#aborts.signal;
		this.outcome = undefined;
		this.#end = Date.now() + 1000 * seconds;
		const beat = async () => {
			const sent = Date.now();
			try {
				await this.renew(db);
				this.#end = sent + 1000 * seconds;
			} catch (error) {
				// A heartbeat that could not be sent is repeated until the lease ends.
				if (sqlState(error) === "IK410" || Date.now() > this.#end)
					return this.#aborts.abort(error);
			}
			if (this.#timer)
				this.#timer = setTimeout(beat, 1000 * seconds / 3);
		};
		this.#timer = setTimeout(beat, 1000 * seconds / 3);
	}

	// stop ends the heartbeat.
	stop() {
		clearTimeout(this.#timer);
		this.#timer = undefined;
	}

	// renew restarts the lease; in a transaction, it refuses a former owner before it writes.
	async renew(session) {
		await callOne(session, "renew", { ...named(this.#scope, this.#key), token: this.token, lease: this.#duration });
	}

	// refuseInside throws if the transaction of complete() is open, which holds the key: a call would wait for its own caller.
	#refuseInside() {
		if (this.#completing)
			throw new Error("complete() is running, and holds the key: write with its transaction, and call checkpoint() before it");
	}

	// checkpoint stores where the next owner continues.
	async checkpoint(recoveryPoint, state) {
		this.#refuseInside();
		await callOne(this.#db, "checkpoint", { ...named(this.#scope, this.#key), token: this.token, recovery_point: recoveryPoint,
			state: jsonText("the state", state) });
		Object.assign(this, { recoveryPoint, state });
	}

	// deriveKey returns the key of a step, which the next owner sends, too.
	deriveKey(step) {
		return deriveKey(this.#db, this.#scope, this.#key, step);
	}

	// complete runs work in a transaction that stores its result, or its Failure: the last step. work
	// gets the ORM's transaction and the session.
	async complete(work, options = {}) {
		this.#refuseInside();
		this.stop(); // the transaction locks the key, and a heartbeat would wait for it
		this.#completing = true;
		try {
			this.outcome = await this.#db.transaction(async (session) => {
				await this.renew(session);
				return store(session, this.#scope, this.#key, this, options, (inner) => work(inner.tx, inner));
			});
		} catch (error) {
			this.#fault = error;
			throw error;
		} finally {
			this.#completing = false;
		}
		return this.outcome.response;
	}

	// end stores the response of work that has not called complete(). If that failed, its error is no success.
	async end(response, options) {
		if (this.outcome === undefined && this.#fault)
			throw this.#fault;
		if (this.outcome === undefined)
			await this.complete(() => response, options);
	}
}

// lease runs work once, outside of a transaction, with a heartbeat at a third of the lease.
// work(lease) calls what lies outside of the database, and ends with lease.complete(), or returns the
// response. lease.signal aborts when the lease is lost. If work fails, the next request continues at
// once, at the checkpoint.
async function lease(db, scope, key, options, work) {
	if (options.lease === undefined)
		throw new TypeError("lease: the option lease is missing, such as '30 seconds'");
	const [{ seconds }] = await db.query("SELECT extract(epoch FROM $1::text::interval)::text AS seconds", [plainText(options.lease)]);
	const claimed = await claim(db, scope, key, options);
	if (claimed.replayed)
		return claimed;
	const held = new Lease(db, scope, key, options.lease, Number(seconds), claimed);
	try {
		await held.end(await work(held), options);
	} catch (error) {
		if (error instanceof Failure && held.outcome === undefined) {
			await held.complete(() => { throw error; }, options);
		} else {
			await giveUp(db, scope, key, held);
			throw error;
		}
	} finally {
		held.stop();
	}
	return { outcome: claimed.outcome, replayed: false, attempt: claimed.attempt, ...picked(held.outcome) };
}

const picked = ({ status, headers, failed, response, responseText }) => ({ status, headers, failed, response, responseText });

// giveUp ends a lease whose work failed. The checkpoint keeps the request, with which a recovery
// job can continue: a provider might have been asked.
async function giveUp(db, scope, key, held) {
	held.stop();
	try {
		if (held.recoveryPoint === undefined)
			await held.checkpoint("failed");
		await release(db, scope, key, { token: held.token });
	} catch {
		// Lost, or out of reach: the lease expires.
	}
}

// consume calls handler(event) for the events of a subscription, until the signal aborts or, with
// untilEmpty, none is left. An error of the handler is reported with nack: the event is retried later, and
// with error.dead it is a dead letter at once. After the abort, an event whose handler fails goes back, and counts no attempt. Lost
// connections are retried without end, after the abort for a lease.
async function consume(db, subscription, handler, options = {}) {
	const { maxEvents = 10, wait = "5 seconds", lease: duration = "1 minute", signal, untilEmpty = false } = options;
	// untilAborted retries without end, and after the abort returns another value instead of an error.
	const untilAborted = (work, otherwise) => retrying(work, { seconds: Infinity, signal })
		.catch((error) => signal?.aborted ? otherwise : Promise.reject(error));
	while (!signal?.aborted) {
		const batch = await untilAborted(() => call(db, "fetch", { subscription, lease: duration, wait: untilEmpty ? 0 : wait, max_events: maxEvents }, EVENT), []);
		if (batch.length > 0)
			await handle(db, subscription, handler, batch, duration, signal);
		else if (untilEmpty && !await untilAborted(() => callOne(db, "has_more", { subscription }, "result"), true))
			return;
	}
}

function event(row) {
	return {
		seq: row.seq,
		id: row.id,
		topic: row.topic,
		aggregateId: row.aggregate_id ?? undefined,
		type: row.type ?? undefined,
		payload: parsed(row.payload),
		headers: parsed(row.headers),
		attempt: row.attempt,
	};
}

// handle handles a batch, with a heartbeat, and acknowledges it. If another consumer has got it
// meanwhile (IK408), that one handles what is left.
async function handle(db, subscription, handler, batch, duration, signal) {
	const number = batch[0].batch;
	const seconds = Number(batch[0].seconds);
	const lost = new AbortController();
	const ending = signal ? AbortSignal.any([signal, lost.signal]) : lost.signal;
	const beats = setInterval(() => callOne(db, "extend", { subscription, batch: number, lease: duration })
		.catch((error) => sqlState(error) === "IK408" && lost.abort(error)), 1000 * seconds / 3);
	const left = new Set(); // aggregates whose events have left the batch
	const done = []; // numbers of events to acknowledge
	// settle reports a result, retried after the abort for a lease. It returns false if another consumer has the batch.
	function settle(name, args) {
		const started = Date.now();
		return retrying(() => callOne(db, name, { subscription, batch: number, ...args }).then(() => true, (error) => {
			if (sqlState(error) === "IK408")
				return false;
			throw error;
		}), { seconds: Infinity, ended: () => ending.aborted && Date.now() > started + 1000 * seconds });
	}
	try {
		for (const row of batch) {
			if (left.has(row.aggregate_id))
				continue;
			if (ending.aborted)
				break;
			try {
				await handler(event(row), { signal: ending });
				done.push(row.seq);
			} catch (error) {
				if (ending.aborted && error?.dead !== true)
					break;
				const message = String(error?.message ?? error).replaceAll("\0", "\ufffd");
				if (!await settle("nack", { event_id: row.id, error: message, dead: error?.dead === true }))
					return;
				if (row.aggregate_id !== null)
					left.add(row.aggregate_id);
			}
		}
		if (lost.signal.aborted)
			return;
		if (!ending.aborted)
			await settle("ack", {});
		else if (await settle("ack", { events: JSON.stringify(done) }))
			await settle("nack", { event_id: null }); // the rest, without counting an attempt
	} finally {
		clearInterval(beats);
	}
}

module.exports = {
	Failure, claim, complete, consume, deriveKey, fail, finish, isTransient, lease, once, onceMany, publish, release, retrying, run, sqlState,
	tryClaim, undoable,
};
