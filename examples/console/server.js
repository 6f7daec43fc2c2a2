// The console: a page for operators, with the queries and calls behind it. The privileges of its role
// in the database decide what the page shows, and which buttons it has. README.md lists the environment.

"use strict";

const { createHash, randomBytes, timingSafeEqual } = require("crypto");
const { readFileSync } = require("fs");
const http = require("http");
const { Pool } = require("pg");

const token = randomBytes(24).toString("base64url"); // which other users of this machine do not know
const sample = 10000; // rows of the table of keys that are read without a key, at most

// connect returns a pool of connections with these settings, and a limit of seconds for a statement.
function connect(limit, settings) {
	const pool = new Pool({ max: 4, connectionTimeoutMillis: 5000, query_timeout: 1000 * (limit + 5),
		options: `-c statement_timeout=${limit}s -c search_path=pg_catalog,pg_temp -c default_transaction_isolation=read\\ committed ${settings}` });
	pool.on("error", () => {}); // the next query reports it
	return pool;
}

const [reader, writer] = [connect(3, "-c default_transaction_read_only=on"), connect(30, "")];

// reason returns the text of an error; that of several addresses has only a code.
const reason = (error) => error.message || error.code;

// read returns the rows of a query, with the types of JSON.
const read = async (sql, ...values) => (await reader.query(`SELECT coalesce(json_agg(q), '[]') AS rows FROM (${sql}) AS q`, values)).rows[0].rows;

// The role, and what it can use: relations and functions of the schema, and for the extension, the activity of other roles.
const access = `SELECT current_user AS role, current_database() AS database, pg_is_in_recovery() AS standby, (
		SELECT json_object_agg(name, may AND has_schema_privilege(s.oid, 'USAGE')) FROM (
			SELECT relname AS name, has_table_privilege(oid, 'SELECT') AS may FROM pg_class WHERE relnamespace = s.oid AND relkind IN ('r', 'v')
			UNION ALL SELECT proname, bool_or(has_function_privilege(oid, 'EXECUTE')) FROM pg_proc WHERE pronamespace = s.oid GROUP BY proname
			UNION ALL SELECT 'pg_read_all_stats', pg_has_role('pg_read_all_stats', 'USAGE') FROM pg_class WHERE relnamespace = s.oid AND relname = 'stats'
		) AS object) AS may
	FROM pg_namespace AS s WHERE nspname = 'idempotency'`;

// The panels: what each one needs, and its query. Those whose need does not exist are of the other edition.
const panels = {
	stats: ["stats", "SELECT s.*, extract(epoch FROM wait_time) AS seconds_waited FROM idempotency.stats AS s WHERE datname = current_database()"],
	claims: ["holders", `SELECT count(*) FILTER (WHERE kind <> 'waits') AS open, count(*) FILTER (WHERE kind = 'waits') AS waiting,
			extract(epoch FROM max(age) FILTER (WHERE kind <> 'waits')) AS oldest FROM idempotency.holders()`],
	processes: ["pg_read_all_stats", `SELECT kind, (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency ' || kind) AS running
		FROM unnest('{launcher,reaper,relay}'::text[]) AS kind
		UNION ALL SELECT 'slots_missed', count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %' AND query LIKE 'no background worker slot %'`],
	reaper: ["reaper", `SELECT rows_reaped AS keys, events_reaped AS events FROM idempotency.reaper AS r, pg_control_system() AS c
		WHERE r.system_identifier = c.system_identifier AND relation = 'idempotency.key'::regclass`],
	tables: ["subscriptions", `SELECT relname AS name, pg_total_relation_size(relid) / 1e6 AS size, n_live_tup AS live, n_dead_tup AS dead
		FROM pg_stat_user_tables WHERE schemaname = 'idempotency' AND relname IN ('key', 'outbox', 'parked')`],
	subscriptions: ["subscriptions", `SELECT subscription, CASE WHEN paused_at IS NOT NULL THEN 'paused' WHEN oldest_parked_at IS NOT NULL THEN 'failing' ELSE 'delivering' END AS state,
			round(extract(epoch FROM lag), 1) AS lag, scheduled AS retried, waiting AS blocked, dead, round(extract(epoch FROM clock_timestamp() - oldest_parked_at), 1) AS failing_for,
			left(last_error, 500) AS last_error, handler, owner, EXISTS (SELECT FROM pg_roles AS r WHERE r.rolname = owner AND pg_has_role(r.oid, 'USAGE')) AS mine
		FROM idempotency.subscriptions ORDER BY subscription LIMIT 100`],
	partitions: ["partitions", `SELECT subscription, partition, state, extract(epoch FROM lag) AS lag, lag_events AS events, batch_events AS batch, attempt, holder AS process,
			leased_until::timestamptz(0)::text, acknowledged, failed FROM idempotency.partitions ORDER BY subscription, partition LIMIT 200`],
	dead_letters: ["dead_letters", `SELECT subscription, event_id, topic, aggregate_id AS aggregate, attempts, last_failed_at::timestamptz(0)::text AS last_failed, left(error, 500) AS error,
			EXISTS (SELECT FROM idempotency.subscriptions AS s JOIN pg_roles AS r ON r.rolname = s.owner WHERE s.subscription = d.subscription AND pg_has_role(r.oid, 'USAGE')) AS mine
		FROM idempotency.dead_letters AS d ORDER BY subscription, seq LIMIT 20`],
	holders: ["holders", `SELECT kind, pid AS process, prepared, role, date_trunc('second', max(age)) AS age, state, array_to_string(waits_for, ', ') AS waits_for, application,
			left(query, 200) AS statement FROM idempotency.holders() GROUP BY kind, pid, prepared, role, state, waits_for, application, query
			ORDER BY kind = 'waits', max(age) DESC NULLS LAST, pid LIMIT 50`],
};

// state returns the role, and the rows of each panel, or an error.
async function state() {
	const [who = refuse("This database has no schema idempotency.")] = await read(access);
	const shown = Object.entries(panels).filter(([, [needs]]) => needs in who.may).map(async ([name, [needs, sql]]) => [name, who.may[needs]
		? await read(sql).then((rows) => ({ rows }), (error) => ({ error: reason(error) })) : { error: `Role ${who.role} has no privilege on ${needs}.` }]);
	return { ...who, panels: Object.fromEntries(await Promise.all(shown)) };
}

// keys finds keys by the primary key, or among the first rows of the table, of which it returns the number by scope and state.
const keys = async ({ key = null, scope = null, state = null }) => ({ sample,
	groups: await read(`SELECT scope, state, count(*) AS number FROM (SELECT scope, state FROM idempotency.keys LIMIT ${sample}) AS k
		GROUP BY scope, state ORDER BY number DESC, scope, state LIMIT 40`),
	rows: await read(`SELECT key, scope, state, status, age, expires_in, response_size AS response
		FROM (SELECT * FROM idempotency.keys WHERE ${key === null ? "$1::text IS NULL" : "key = $1"} LIMIT ${sample}) AS k
		WHERE ($2::text IS NULL OR scope = $2) AND ($3::text IS NULL OR state = $3) LIMIT 20`, key, scope, state) });

// The types of the arguments of each action. The second one of redrive and discard is optional.
const actions = { pause: ["text"], resume: ["text"], redrive: ["text", "uuid"], discard: ["text", "uuid"], forget: ["text", "text"] };

// act calls the function of an action, and logs it in ASCII, so that a key with a line break or an escape sequence forges no line.
async function act({ action, values }) {
	if (!Object.hasOwn(actions, action) || !Array.isArray(values) || !values.every((value, i) => typeof value === "string" && actions[action][i]))
		throw new Error("There is no such action.");
	const entry = { time: new Date(), role: null, action, values };
	try {
		entry.role = (await read("SELECT current_user AS role"))[0].role;
		const call = `idempotency.${action}(${values.map((_, i) => `$${i + 1}::${actions[action][i]}`).join(", ")})`;
		return Object.assign(entry, (await writer.query(`SELECT ${call} AS result`, values)).rows[0]);
	} catch (error) {
		entry.error = `${error.code}: ${reason(error)}`;
		throw error;
	} finally {
		console.log(JSON.stringify(entry).replace(/[^ -~]/g, (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`));
	}
}

const files = { "/": ["index.html", "text/html"], "/console.js": ["console.js", "text/javascript"], "/console.css": ["console.css", "text/css"] };
const hash = (text = "") => createHash("sha256").update(text).digest();
const refuse = (text) => { throw Object.assign(new Error(text), { status: 403 }); };

// answer returns the answer to a request. Another site can make a browser send requests, also under a name of its own for
// 127.0.0.1, but not with the token. The page has no secret: it gets the token from the address, after its #.
async function answer(request) {
	const { method, headers } = request, { pathname, searchParams } = new URL(request.url, "http://localhost"), reads = { "/state": state, "/keys": keys };
	if (!/^(127\.0\.0\.1|localhost)(:\d+)?$/.test(headers.host) || ![undefined, `http://${headers.host}`].includes(headers.origin))
		refuse("This request comes from another site.");
	if (method === "GET" && Object.hasOwn(files, pathname))
		return { body: readFileSync(`${__dirname}/${files[pathname][0]}`), type: `${files[pathname][1]}; charset=utf-8` };
	if (!timingSafeEqual(hash(headers.authorization), hash(`Bearer ${token}`)))
		refuse("Open the address that the server has printed: it has the token.");
	if (method === "GET" && Object.hasOwn(reads, pathname))
		return { body: JSON.stringify(await reads[pathname](Object.fromEntries(searchParams))) };
	if (method !== "POST" || pathname !== "/action" || !headers.origin || headers["content-type"] !== "application/json")
		refuse("There is no such request.");
	let text = "";
	for await (const chunk of request.setEncoding("utf8"))
		if ((text += chunk).length > 16384)
			refuse("The body is too large.");
	return { body: JSON.stringify(await act(JSON.parse(text))) };
}

const server = http.createServer(async (request, response) => {
	const { body, type = "application/json", status = 200 } = await answer(request).catch((error) => ({ status: error.status ?? 500, body: JSON.stringify({ error: reason(error) }) }));
	response.writeHead(status, { "Content-Type": type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Content-Security-Policy":
		"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'" });
	response.end(body);
});
server.listen(Number(process.env.PORT || 0), "127.0.0.1", () => console.log(`listening on http://127.0.0.1:${server.address().port}/#token=${token}`));
