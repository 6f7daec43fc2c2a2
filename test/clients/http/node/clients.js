// The drivers and ORMs with which the services write: each makes an adapter, insert(tx, customer, amount), which
// returns the charge's id, and elsewhere(customer, amount), which writes on another connection. An ORM writes
// with its own means.

"use strict";

const adapters = require("../../../../clients/node");

const environment = (host) => ({ host, port: Number(process.env.PGPORT), user: process.env.PGUSER, database: process.env.PGDATABASE });

// makePool makes a Pool of node-pg whose clients do not end the process when the connection of one in use is lost.
function makePool(host) {
	const pool = new (require("pg").Pool)({ ...environment(host), max: 20 });
	pool.on("connect", (client) => client.on("error", () => {}));
	pool.on("error", () => {});
	return pool;
}

const INSERT = "INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id";

const clients = {
	pg(host) {
		const pool = makePool(host);
		const insert = async (client, customer, amount) => (await client.query(INSERT, [customer, amount])).rows[0].id;
		return { db: adapters.pg(pool), insert, elsewhere: (...charge) => insert(pool, ...charge) };
	},

	postgres(host) {
		const sql = require("postgres")({ ...environment(host), path: `${host}/.s.PGSQL.${process.env.PGPORT}`, max: 20, prepare: false, onnotice() {} });
		const insert = async (tx, customer, amount) => (await tx`INSERT INTO charge (customer, amount) VALUES (${customer}, ${amount}) RETURNING id`)[0].id;
		return { db: adapters.postgres(sql), insert, elsewhere: (...charge) => insert(sql, ...charge) };
	},

	prisma(host) {
		const prisma = require.resolve("../prisma/node_modules/@prisma/client");
		const { PrismaClient } = require(prisma);
		const { PrismaPg } = require("../prisma/node_modules/@prisma/adapter-pg");
		const client = new PrismaClient({ adapter: new PrismaPg({ ...environment(host), max: 20 }), log: [] });
		const insert = async (tx, customer, amount) => (await tx.charge.create({ data: { customer, amount } })).id;
		return { db: adapters.prisma(client, { maxWait: 30000, timeout: 60000 }), insert, elsewhere: (...charge) => insert(client, ...charge) };
	},

	drizzle(host) {
		const { drizzle } = require("drizzle-orm/node-postgres");
		const { bigint, pgTable, serial, text } = require("drizzle-orm/pg-core");
		const charges = pgTable("charge", { id: serial().primaryKey(), customer: text(), amount: bigint({ mode: "number" }) });
		const db = drizzle({ client: makePool(host) });
		const insert = async (tx, customer, amount) => (await tx.insert(charges).values({ customer, amount }).returning({ id: charges.id }))[0].id;
		return { db: adapters.drizzle(db, require("drizzle-orm").sql), insert, elsewhere: (...charge) => insert(db, ...charge) };
	},

	async kysely(host) {
		const { CompiledQuery, Kysely, PostgresDialect } = await import("kysely");
		const db = new Kysely({ dialect: new PostgresDialect({ pool: makePool(host) }) });
		const insert = async (tx, customer, amount) => (await tx.insertInto("charge").values({ customer, amount }).returning("id").executeTakeFirst()).id;
		return { db: adapters.kysely(db, CompiledQuery), insert, elsewhere: (...charge) => insert(db, ...charge) };
	},

	async typeorm(host) {
		const { DataSource, EntitySchema } = require("typeorm");
		const Charge = new EntitySchema({ name: "charge", columns: { id: { type: Number, primary: true, generated: true }, customer: { type: String }, amount: { type: "bigint" } } });
		const source = new DataSource({ type: "postgres", ...environment(process.env.PGHOST), username: process.env.PGUSER, entities: [Charge], poolSize: 20,
			logging: false, poolErrorHandler() {} });
		await source.initialize();
		if (host !== process.env.PGHOST) // a source that cannot connect cannot be initialized
			source.driver.master = makePool(host);
		const insert = async (manager, customer, amount) => (await manager.getRepository(Charge).save({ customer, amount })).id;
		return { db: adapters.typeorm(source), insert, elsewhere: (...charge) => insert(source.manager, ...charge) };
	},

	sequelize(host) {
		const { BIGINT, Sequelize, TEXT } = require("sequelize");
		const db = new Sequelize(process.env.PGDATABASE, process.env.PGUSER, "", { dialect: "postgres", host, port: process.env.PGPORT, logging: false, pool: { max: 20 } });
		const Charge = db.define("charge", { customer: TEXT, amount: BIGINT }, { freezeTableName: true, timestamps: false });
		const insert = async (transaction, customer, amount) => (await Charge.create({ customer, amount }, { transaction })).id;
		return { db: adapters.sequelize(db), insert, elsewhere: (...charge) => insert(undefined, ...charge) };
	},

	async mikroorm(host) {
		const { EntitySchema, MikroORM } = require("@mikro-orm/postgresql");
		const Charge = new EntitySchema({ name: "charge", tableName: "charge",
			properties: { id: { type: "number", primary: true }, customer: { type: "string" }, amount: { type: "bigint" } } });
		const orm = MikroORM.initSync({ entities: [Charge], host, port: Number(process.env.PGPORT), user: process.env.PGUSER, dbName: process.env.PGDATABASE, pool: { max: 20 } });
		async function insert(em, customer, amount) {
			const charge = em.create(Charge, { customer, amount });
			await em.persistAndFlush(charge);
			return charge.id;
		}
		return { db: adapters.mikroorm(orm), insert, elsewhere: (...charge) => insert(orm.em.fork(), ...charge) };
	},

	knex(host) {
		const db = require("knex")({ client: "pg", connection: environment(host), pool: { min: 0, max: 20 } });
		const insert = async (tx, customer, amount) => (await tx("charge").insert({ customer, amount }).returning("id"))[0].id;
		return { db: adapters.knex(db), insert, elsewhere: (...charge) => insert(db, ...charge) };
	},
};

module.exports = (name, host) => clients[name](host);
