// test/clients/pack compiles this file with the types of the installed package.

import express from "express";
import type { Request } from "express";
import { CompiledQuery, Kysely, type Generated } from "kysely";
import { DataSource, type EntityManager } from "typeorm";
import { drizzle as drizzleOf } from "drizzle-orm/node-postgres";
import { pgTable, text } from "drizzle-orm/pg-core";
import { sql } from "drizzle-orm";
import { consume, drizzle, kysely, lease, pg, retrying, run, typeorm, type Adapter, type PgClient } from "pg-idempotency";
import { idempotent } from "pg-idempotency/express";
import { idempotent as fastify } from "pg-idempotency/fastify";
import { idempotent as hono } from "pg-idempotency/hono";
import { IdempotencyInterceptor, transaction } from "pg-idempotency/nest";

declare const pool: { connect(): Promise<PgClient>; query(text: string): Promise<unknown> };
const db: Adapter<PgClient> = pg(pool);

const app = express();
app.post("/charges", idempotent({ db, scope: (request: Request) => request.get("X-User") ?? "guest", omit: ["/at"] }, async (request, tx) => {
	const { rows } = await tx.query("SELECT $1::text AS a", [request.body]);
	return { status: 201, body: rows[0] };
}));
// @ts-expect-error: the scope is required
idempotent({ db }, async () => ({}));
// @ts-expect-error: an object is no key
run(db, "scope", {}, {}, async () => 1);

export const name: Promise<string | undefined> = run(db, "scope", "key", { request: {} }, async (tx) => (await tx.query("SELECT 1")).rows[0].name as string)
	.then(({ response }) => response);
export const leased = retrying(() => lease(db, "scope", 1n, { lease: 30 }, async (held) => held.complete(async (tx) => tx.query("SELECT 1"))));
export const consuming = consume<{ amount: number }>(db, "billing", async ({ payload }) => payload.amount.toFixed(), { untilEmpty: true });

const charges = pgTable("charge", { customer: text() });
drizzle(drizzleOf("postgresql:///"), sql).transaction(({ tx }) => tx.insert(charges).values({ customer: "ann" }));
declare const queries: Kysely<{ charge: { id: Generated<number>; customer: string } }>;
kysely(queries, CompiledQuery).transaction(({ tx }) => tx.insertInto("charge").values({ customer: "ann" }).execute());
typeorm(new DataSource({ type: "postgres" })).transaction(async ({ tx }) => tx.query("SELECT 1"));

fastify({ db, scope: (request) => String(request.headers["x-user"]) }, async () => ({ body: {} }));
hono({ db, scope: (c) => c.req.header("X-User") ?? "guest" }, async (c) => c.json({}, 201));
export class Idempotent extends IdempotencyInterceptor<EntityManager> {
	constructor(source: DataSource) {
		super({ db: typeorm(source), scope: (request) => request.user.id });
	}
}
export const manager = () => transaction<EntityManager>().query("SELECT 1");
