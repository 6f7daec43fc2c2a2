// postgres.js, with tagged templates and the functions that it calls within a
// transaction or a savepoint.

"use strict";

const postgres = require("postgres");
const { serve } = require("./client.js");

// block begins a transaction or a savepoint, and returns its sql, and the functions that
// end it.
async function block(begin) {
	let end;
	const left = new Promise((resolve, reject) => (end = { commit: resolve, rollback: reject }));
	let entered;
	const inside = new Promise((resolve) => (entered = resolve));
	const done = begin((tx) => {
		entered(tx);
		return left;
	});
	done.catch(() => {});
	return {
		sql: await Promise.race([inside, done]),
		commit: () => (end.commit(), done),
		rollback: () => (end.rollback(), done.catch(() => {})),
	};
}

async function makeSession(host, prepare) {
	const sql = postgres({ host, port: process.env.PGPORT, max: 1, prepare, onnotice() {} });
	const blocks = [];
	const current = () => blocks.at(-1)?.sql ?? sql;
	return {
		begin: async () => blocks.push(await block((inside) => sql.begin(inside))),
		savepoint: async () => blocks.push(await block((inside) => current().savepoint(inside))),
		commit: () => blocks.pop().commit(),
		undo: () => blocks.pop().rollback(),
		rollback: async () => { while (blocks.length) await blocks.pop().rollback(); },
		query(text, values) {
			const parts = text.split(/\$\d+/);
			return current()(Object.assign(parts, { raw: parts }), ...values).values();
		},
	};
}

serve(makeSession, postgres({ max: 0 }).json);
