// The drivers and ORMs with which the services write: each makes an adapter, insert(tx, customer, amount), which
// returns the charge's id, and elsewhere(customer, amount), which writes on another connection. An ORM writes
// with its own means.

"use strict";

const adapters = require("../../../../clients/node");

const environment = (host) => ({ host, port: Number(process.env.PGPORT), user: process.env.PGUSER, database: process.env.PGDATABASE });
const INSERT = "INSERT INTO charge (customer, amount) VALUES ($1, $2) RETURNING id";

const clients = {
	pg(host) {
		const { Pool } = require("pg");
		const pool = new Pool({ ...environment(host), max: 20 });
		const insert = async (client, customer, amount) => (await client.query(INSERT, [customer, amount])).rows[0].id;
		return { db: adapters.pg(pool), insert, elsewhere: (...charge) => insert(pool, ...charge) };
	},

	postgres(host) {
		const sql = require("postgres")({ ...environment(host), path: `${host}/.s.PGSQL.${process.env.PGPORT}`, max: 20, prepare: false, onnotice() {} });
		const insert = async (tx, customer, amount) => (await tx`INSERT INTO charge (customer, amount) VALUES (${customer}, ${amount}) RETURNING id`)[0].id;
		return { db: adapters.postgres(sql), insert, elsewhere: (...charge) => insert(sql, ...charge) };
	},
};

module.exports = (name, host) => clients[name](host);
