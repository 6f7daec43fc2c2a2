-- extension only: checks of an altered table
-- reaper at rest: expired rows stay
--
-- Altered columns in the tables that the library writes itself. Whatever column has
-- another type or NULLs, each call returns an error or a result, and the server does
-- not crash.
--
\set SHOW_CONTEXT never

SELECT idempotency.publish('altered', '1') IS NOT NULL AS published;
SELECT count(*) FROM idempotency.once_many('altered', ARRAY['expired'], '1 microsecond');
SELECT idempotency.reap();
UPDATE idempotency.reaper SET last_scan_duration = '1 minute' WHERE relation = 'idempotency.key'::regclass;

-- The distinct SQLSTATEs of all calls that read the tables; "-" for no error.
CREATE FUNCTION states() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	call text;
	states text[] := '{}';
BEGIN
	FOREACH call IN ARRAY ARRAY[$q$publish('altered', '2')$q$, $q$reap()$q$]
	LOOP
		BEGIN
			EXECUTE 'SELECT idempotency.' || call;
			states := states || '-'::text;
		EXCEPTION WHEN OTHERS THEN
			states := states || CASE WHEN SQLSTATE = '55000' THEN '55000' WHEN SQLSTATE ~ '^(22|23|42)' THEN 'refused' ELSE SQLSTATE END;
		END;
	END LOOP;
	RETURN (SELECT string_agg(DISTINCT s, ' ' ORDER BY s) FROM unnest(states) AS s);
END
$$;

-- The result of a change to a table, which is then rolled back. The views that use the
-- column are dropped first, because they would prevent the change.
CREATE FUNCTION changed(VARIADIC changes text[] DEFAULT '{}') RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	change text;
BEGIN
	ALTER EXTENSION idempotency DROP VIEW idempotency.subscriptions;
	ALTER EXTENSION idempotency DROP VIEW idempotency.partitions;
	DROP VIEW idempotency.subscriptions, idempotency.partitions;
	FOREACH change IN ARRAY changes LOOP
		EXECUTE change;
	END LOOP;
	RAISE SQLSTATE 'Z0001' USING MESSAGE = states();
EXCEPTION WHEN SQLSTATE 'Z0001' THEN
	RETURN SQLERRM;
END
$$;

SELECT changed() AS untouched;

-- A by-reference type becomes a small by-value type, and the reverse.
SELECT c.relname, a.attname, changed(format('ALTER TABLE %s ALTER %I DROP DEFAULT, ALTER %2$I TYPE %s', c.oid::regclass, a.attname,
		CASE WHEN t.typbyval THEN format('text USING %I::text', a.attname) ELSE 'bigint USING 5' END)) AS retyped
	FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid JOIN pg_type AS t ON t.oid = a.atttypid
	WHERE c.oid = ANY ('{idempotency.outbox,idempotency.reaper}'::regclass[])
		AND a.attnum > 0 ORDER BY c.relname, a.attname;

-- NULL in columns that were NOT NULL.
SELECT c.relname, a.attname, changed(format('ALTER TABLE %s ALTER %I DROP NOT NULL', c.oid::regclass, a.attname),
		format('UPDATE %s SET %I = NULL', c.oid::regclass, a.attname)) AS emptied
	FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
	WHERE c.oid = ANY ('{idempotency.reaper}'::regclass[])
		AND a.attnum > 0 AND a.attnotnull
		AND NOT EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND a.attnum = ANY (i.indkey))
	ORDER BY c.relname, a.attname;

DROP FUNCTION states, changed;
DELETE FROM idempotency.outbox;
DELETE FROM idempotency.reaper;
