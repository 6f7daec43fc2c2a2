// node migrate.js pg|knex SCRIPT THEN: runs a script and then a statement in one migration, whose
// transaction it rolls back if the environment has FAIL.

"use strict";

const { readFileSync } = require("fs");
const [tool, file, then] = process.argv.slice(2);
const script = readFileSync(file, "utf8");

const tools = {
	async pg() {
		const client = new (require("pg").Client)();
		await client.connect();
		await client.query("BEGIN");
		await client.query(script);
		await client.query(then);
		await client.query(process.env.FAIL ? "ROLLBACK" : "COMMIT");
		await client.end();
	},

	async knex() {
		const knex = require("knex")({ client: "pg", connection: {} });
		const up = async (transaction) => {
			await transaction.raw(script);
			await transaction.raw(then);
			if (process.env.FAIL)
				throw new Error("the migration fails");
		};
		await knex.migrate
			.latest({ migrationSource: { getMigrations: async () => ["idempotency"], getMigrationName: (name) => name, getMigration: async () => ({ up, down: up }) } })
			.catch((error) => process.env.FAIL || Promise.reject(error));
		await knex.destroy();
	},
};

tools[tool]().catch((error) => {
	console.error(error.message);
	process.exit(1);
});
