// node migrate.js pg|knex SCRIPT THEN: runs a script and then a statement in one migration: first in a transaction that it
// rolls back, and then in one that it commits.

"use strict";

const { readFileSync } = require("fs");
const [tool, file, then] = process.argv.slice(2);
const script = readFileSync(file, "utf8");

const tools = {
	async pg(fails) {
		const client = new (require("pg").Client)();
		await client.connect();
		await client.query("BEGIN");
		await client.query(script);
		await client.query(then);
		await client.query(fails ? "ROLLBACK" : "COMMIT");
		await client.end();
	},

	async knex(fails) {
		const knex = require("knex")({ client: "pg", connection: {} });
		const up = async (transaction) => {
			await transaction.raw(script);
			await transaction.raw(then);
			if (fails)
				throw new Error("the migration fails");
		};
		await knex.migrate
			.latest({ migrationSource: { getMigrations: async () => ["idempotency"], getMigrationName: (name) => name, getMigration: async () => ({ up, down: up }) } })
			.catch((error) => fails || Promise.reject(error));
		await knex.destroy();
	},
};

tools[tool](true).then(() => tools[tool](false)).catch((error) => {
	console.error(error.message);
	process.exit(1);
});
