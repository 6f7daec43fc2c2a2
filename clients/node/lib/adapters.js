// One adapter for each driver and ORM. A session has the transaction of the ORM as tx, and query(text,
// values), which returns rows; the adapter itself is a session in autocommit, with
// transaction(work), which calls work(session) in a transaction of the ORM. with(tx) is the session of a
// transaction that the application began.

"use strict";

// adapter makes an adapter from three functions: begin(work) calls work(tx) in a transaction;
// run(tx, text, values) returns rows; more(tx) returns further members of a session. Unless the driver reports that a
// COMMIT has rolled back, because a statement had failed, a last statement does.
function adapter(root, begin, run, { more = () => ({}), reports = false } = {}) {
	const session = (tx) => ({ tx, query: (text, values = []) => run(tx, text, values), ...more(tx, session) });
	const transaction = (work) => begin(async (tx) => {
		const current = session(tx);
		const result = await work(current);
		if (!reports && !current.finished)
			await current.query("SELECT 1 AS committing");
		return result;
	});
	return { ...session(root), with: session, transaction };
}

// pieces splits a statement at its parameters, for drivers with placeholders of their own. Returns the texts
// between them, and the values in the order of the text.
function pieces(text, values) {
	const parts = text.split(/\$(\d+)/);
	return [parts.filter((_, index) => index % 2 === 0), parts.filter((_, index) => index % 2 === 1).map((number) => values[number - 1])];
}

const question = (text, values) => pieces(text, values).map((part, index) => index === 0 ? part.join("?") : part);

// pg takes a Pool of node-pg. tx is its client. The pool replaces an idle client whose connection is lost, but without a
// listener the event ends the process.
const pg = (pool) => adapter(pool.listenerCount("error") > 0 ? pool : pool.on("error", () => {}), async (work) => {
	const client = await pool.connect();
	let broken;
	const lost = (error) => { broken = error; }; // a lost connection also fails the query in progress
	client.on("error", lost);
	try {
		await client.query("BEGIN");
		const result = await work(client);
		if ((await client.query("COMMIT")).command === "ROLLBACK")
			throw new Error("the transaction was rolled back, because a statement in it had failed");
		return result;
	} catch (error) {
		await client.query("ROLLBACK").catch(lost);
		throw error;
	} finally {
		client.off("error", lost);
		client.release(broken);
	}
}, async (client, text, values) => (await client.query(text, values)).rows, { reports: true });

// postgres takes the sql of postgres.js. A failed statement fails the transaction of sql.begin() even if
// the handler catches the error; in a savepoint it does not.
const postgres = (sql) => adapter(sql, (work) => sql.begin(work), (tx, text, values) => tx.unsafe(text, values),
	{ more: (tx, session) => tx.savepoint ? { savepoint: (work) => tx.savepoint((inner) => work(session(inner))) } : {}, reports: true });

// prisma takes a PrismaClient, and the options of its $transaction.
const prisma = (client, options) => adapter(client, (work) => client.$transaction(work, options),
	(tx, text, values) => tx.$queryRawUnsafe(text, ...values));

// drizzle takes a database, and the function sql of drizzle-orm.
const drizzle = (db, sql) => adapter(db, (work) => db.transaction(work), async (tx, text, values) => {
	const [parts, ordered] = pieces(text, values);
	const result = await tx.execute(sql(parts, ...ordered));
	return result.rows ?? result;
});

// kysely takes a Kysely, and the class CompiledQuery of kysely.
const kysely = (db, CompiledQuery) => adapter(db, (work) => db.transaction().execute(work),
	async (tx, text, values) => (await tx.executeQuery(CompiledQuery.raw(text, values))).rows);

// typeorm takes a DataSource. tx is the EntityManager of the transaction.
const typeorm = (dataSource) => adapter(dataSource.manager, (work) => dataSource.transaction(work),
	(manager, text, values) => manager.query(text, values));

// sequelize takes a Sequelize. tx is the transaction, which each call of a model needs.
const sequelize = (db) => adapter(undefined, (work) => db.transaction(work),
	(transaction, text, bind) => db.query(text, { bind, transaction, type: "SELECT" }));

// mikroorm takes the MikroORM. tx is a fork of its EntityManager. Entities are flushed before the
// outcome is stored; to use the id of a new one in an answer, call tx.flush() first.
const mikroorm = (orm) => adapter(orm.em, (work) => orm.em.fork().transactional(work), (em, text, values) =>
	em.getConnection().execute(...question(text, values), "all", em.getTransactionContext()),
{ more: (em) => em === orm.em ? {} : { flush: () => em.flush(), clear: () => em.clear() } });

// knex takes a Knex, also that of Objection.
const knex = (db) => adapter(db, (work) => db.transaction(work), async (tx, text, values) => (await tx.raw(...question(text, values))).rows);

module.exports = { drizzle, knex, kysely, mikroorm, pg, postgres, prisma, sequelize, typeorm };
