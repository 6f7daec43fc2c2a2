-- extension only: the list of objects
--
-- What psql shows to a person: functions with named arguments in a consistent order,
-- views with readable ages and sizes, and a plan that finds a key.
--
\set SHOW_CONTEXT never

-- The longest signature fits the available width.
\pset format wrapped
\pset columns 100
\df idempotency.claim
\pset format aligned
\df idempotency.once*
\df idempotency.fetch

-- All arguments of functions that users call by name have names.
SELECT p.oid::regprocedure AS without_names
	FROM pg_proc AS p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND p.pronargs > 0 AND coalesce(p.proargnames[1], '') = '';

-- The key is the first argument, and so are the subscription and the name of a setting.
SELECT p.oid::regprocedure AS in_another_order
	FROM pg_proc AS p
	WHERE p.pronamespace = 'idempotency'::regnamespace
		AND ('key' = ANY (p.proargnames) AND p.proargnames[:2] <> '{scope,key}'
			OR 'scope' = ANY (p.proargnames) AND p.proargnames[1] <> 'scope' AND p.proname NOT IN ('configure', 'setting')
			OR 'subscription' = ANY (p.proargnames) AND p.proargnames[1] <> 'subscription');

-- The important columns come first, and times for machines last.
SELECT c.relname, string_agg(a.attname, ', ' ORDER BY a.attnum) FILTER (WHERE a.attnum <= 6) AS first_columns
	FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'v' AND a.attnum > 0
	GROUP BY c.relname ORDER BY c.relname COLLATE "C";

-- Ages are in whole seconds, however long; beside each is the time from which the age
-- counts.
SELECT outcome FROM idempotency.claim('psql', 'leased', lease => '1 millisecond');
SELECT idempotency.subscribe('psql', '{psql}');
SELECT idempotency.publish('psql', '{}') IS NOT NULL AS published;
SELECT pg_sleep(0.01);
SELECT bool_and(age = date_trunc('second', age) AND expires_in = date_trunc('second', expires_in)) AS keys
	FROM idempotency.keys WHERE scope = 'psql';
SELECT bool_and(age = date_trunc('second', age) AND overdue = date_trunc('second', overdue)
		AND expires_in = date_trunc('second', expires_in)) AS zombies
	FROM idempotency.zombies WHERE scope = 'psql';
SELECT s.lag = date_trunc('second', s.lag) AS lag, p.lag_events, s.lag = p.lag AS same
	FROM idempotency.subscriptions AS s JOIN idempotency.partitions AS p USING (subscription) WHERE subscription = 'psql';
SELECT idempotency.unsubscribe('psql');

-- The index finds one of many keys without forcing the plan: for a literal, for a
-- parameter in a generic plan, and for a PL/pgSQL variable, which is text and gets a
-- cast.
SELECT count(*) FROM idempotency.once_many('psql', (SELECT array_agg('key-' || i) FROM generate_series(1, 3000) AS i));
ANALYZE idempotency.key;
EXPLAIN (COSTS OFF) SELECT * FROM idempotency.keys WHERE scope = 'psql' AND key = 'key-77';
SET plan_cache_mode = force_generic_plan;
PREPARE look AS SELECT * FROM idempotency.keys WHERE scope = $1 AND key = $2;
EXPLAIN (COSTS OFF) EXECUTE look('psql', 'key-77');
PREPARE look_text(text, text) AS SELECT * FROM idempotency.keys WHERE scope = $1 AND key = $2::idempotency.keytext;
EXPLAIN (COSTS OFF) EXECUTE look_text('psql', 'key-77');
EXECUTE look_text('psql', 'no such key');
RESET plan_cache_mode;
DEALLOCATE ALL;
DELETE FROM idempotency.key WHERE scope = 'psql';
DELETE FROM idempotency.outbox WHERE aggregatetype = 'psql';
