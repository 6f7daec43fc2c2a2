// The SQLSTATE of an error, whatever has wrapped it, and the errors after which the same
// call can succeed.

"use strict";

const { setTimeout: sleep } = require("timers/promises");

// Where drivers and ORMs keep the error that they wrap: Drizzle and Prisma in cause, Sequelize
// in parent and original, TypeORM in driverError, Prisma also in meta.
const inside = (error) => [error.meta?.driverAdapterError, error.cause, error.parent, error.original, error.driverError];

// Codes of five characters that are no SQLSTATE: EPIPE, and Prisma's own such as P2010.
const isState = (code) => typeof code === "string" && /^[0-9A-Z]{5}$/.test(code) && !/^(E|P[1-9])/.test(code);

// chain returns an error and all errors that it wraps, the innermost first.
function chain(error, seen = new Set()) {
	if (error === null || typeof error !== "object" || seen.has(error))
		return [];
	seen.add(error);
	return [...inside(error).flatMap((each) => chain(each, seen)), error];
}

// sqlState returns the SQLSTATE of an error, or undefined.
function sqlState(error) {
	for (const each of chain(error)) {
		const state = [each.originalCode, each.code].find(isState);
		if (state !== undefined)
			return state;
	}
}

// The same request can succeed later: lost connections, serialization failures and deadlocks, no
// resources, lock timeouts, shutdown, failover and a session that was idle too long; IK409, the first request is in progress; IK410,
// another owner took the lease over; IK408, another consumer has the events of the batch.
const transientState = /^(08|40|53|55P03|57P|58|25006|25P03|IK408|IK409|IK410)/;

// Codes of Node's network (EACCES and ENOENT: of a socket's file), of postgres.js, and of Prisma for a lost connection, a
// full pool or a conflict.
const transientCode = /^(E(AI_AGAIN|CONN[A-Z]+|HOST[A-Z]+|NET[A-Z]+|NOTFOUND|PIPE|TIMEDOUT)|CONNECT(ION)?_[A-Z]+|P1001|P1002|P1008|P1017|P2024|P2028|P2034)$/;
const transientText = /Connection terminated|connection timeout|Can't reach database|DatabaseNotReachable|timeout exceeded when trying to connect|Timeout acquiring a connection|is not queryable/;

// isTransient tells whether a call that failed with this error can succeed later.
function isTransient(error) {
	const state = sqlState(error);
	if (state !== undefined)
		return transientState.test(state);
	return chain(error).some(({ code, kind, message, syscall }) => transientCode.test(code) || syscall === "connect" || transientText.test(kind) || transientText.test(message));
}

// retrying calls work until it succeeds, with growing pauses. Throws an error that is not
// transient at once, and the last one after `seconds`, after an abort, or if ended() is true. work must begin with a claim of
// the same key, or with a fetch: an attempt whose answer was lost might have committed.
async function retrying(work, { seconds = 30, signal, ended = () => false } = {}) {
	const end = Date.now() + 1000 * seconds;
	for (let pause = 50; ; pause = Math.min(2 * pause, 2000)) {
		try {
			return await work();
		} catch (error) {
			const ends = !isTransient(error) || Date.now() + pause > end || ended();
			if (ends || !await sleep(pause * (0.5 + Math.random() / 2), true, { signal }).catch(() => false))
				throw error;
		}
	}
}

module.exports = { isTransient, retrying, sqlState };
