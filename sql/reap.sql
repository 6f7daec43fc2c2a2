-- reaper at rest: the test reaps
--
-- reap() deletes expired rows, and no others; reaper_progress has the table of its progress.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key;

-- Stores that number of rows, which are expired when the function returns.
CREATE FUNCTION pg_temp.expired(prefix text, keys int) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idempotency.once_many('reap', ARRAY(SELECT prefix || i FROM generate_series(1, keys) AS i), '1 microsecond')
$$;

-- Executes one statement as a role, and returns its result.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

-- The number of values in the TOAST table.
CREATE FUNCTION pg_temp.large_values(OUT n bigint) LANGUAGE plpgsql AS $$
DECLARE
	toast regclass := (SELECT reltoastrelid FROM pg_class WHERE oid = 'idempotency.key'::regclass);
BEGIN
	EXECUTE 'SELECT count(DISTINCT chunk_id) FROM ' || toast INTO n;
END
$$;

-- Without work, reap() writes nothing.
SELECT idempotency.reap();

--
-- Deleted rows
--

-- One record of every kind, expired and not expired.
DO $$ BEGIN
	PERFORM idempotency.claim('reap', k, '{"n": 1}', retention => CASE WHEN k LIKE 'old%' THEN interval '1 microsecond' END)
		FROM unnest('{old completed,completed,old failed,failed}'::text[]) AS k;
	PERFORM idempotency.complete('reap', k, '{"answer": 1}') FROM unnest('{old completed,completed}'::text[]) AS k;
	PERFORM idempotency.fail('reap', k, '"no"', 422) FROM unnest('{old failed,failed}'::text[]) AS k;
	PERFORM idempotency.claim('reap', 'for ever', retention => '-1 second');
	PERFORM idempotency.complete('reap', 'for ever', to_json(repeat('large ', 10000)));
	PERFORM idempotency.claim('reap', 'old and large', retention => '1 microsecond');
	PERFORM idempotency.complete('reap', 'old and large',
		(SELECT json_agg(md5(i::text))::text FROM generate_series(1, 3000) AS i));
END $$;
SELECT idempotency.once('reap', 'old message', '1 microsecond'), idempotency.once('reap', 'message');
SELECT outcome FROM idempotency.claim('reap', 'old lease', lease => '1 ms', retention => '1 microsecond');
SELECT outcome FROM idempotency.claim('reap', 'leased', lease => '1 hour', retention => '1 microsecond');
SELECT outcome FROM idempotency.claim('reap', 'abandoned', lease => '1 ms');
SELECT token FROM idempotency.claim('reap', 'released', lease => '1 hour') \gset
SELECT FROM idempotency.checkpoint('reap', 'released', :token, 'charged', '{"charge": 1}');
SELECT idempotency.release('reap', 'released', :token);
SELECT pg_sleep(0.01);
SELECT key, state FROM idempotency.keys ORDER BY key;
SELECT pg_temp.large_values();

SELECT idempotency.reap();
SELECT key, state FROM idempotency.keys ORDER BY key;

-- The remaining rows are unchanged.
SELECT outcome, response FROM idempotency.claim('reap', 'completed', '{"n": 1}');
SELECT length(response::text) FROM idempotency.peek('reap', 'for ever');
SELECT outcome, attempt, recovery_point, state FROM idempotency.claim('reap', 'released', lease => '1 hour');
SELECT idempotency.once('reap', 'message'), idempotency.once('reap', 'old message');
-- The large response is deleted from the TOAST table too.
SELECT pg_temp.large_values();

-- A deleted key is new.
BEGIN;
SELECT outcome FROM idempotency.try_claim('reap', 'old completed', '{"n": 2}');
ROLLBACK;
SELECT outcome, attempt FROM idempotency.claim('reap', 'old lease', lease => '1 ms');

--
-- Batch size
--

TRUNCATE idempotency.key;
SELECT pg_temp.expired('a', 10);
SELECT idempotency.reap(3);
SELECT count(*) FROM idempotency.key;
SELECT idempotency.reap(0);
SELECT idempotency.reap(-1);
\echo :SQLSTATE
SELECT count(*) FROM idempotency.key;
SELECT idempotency.reap(NULL);
SELECT count(*) FROM idempotency.key;

-- The default is one thousand.
SELECT pg_temp.expired('b', 2200);
SELECT idempotency.reap();
SELECT idempotency.reap();
SELECT idempotency.reap();
SELECT idempotency.reap();

DO $$ BEGIN
	WHILE idempotency.reap(2147483647) > 0 LOOP
		COMMIT;
	END LOOP;
END $$;
SELECT count(*) FROM idempotency.key;


--
-- In the caller's transaction
--

TRUNCATE idempotency.key;
SELECT pg_temp.expired('a', 10);
BEGIN;
SELECT idempotency.reap(4);
SAVEPOINT s;
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.key;
ROLLBACK TO s;
SELECT count(*) FROM idempotency.key;
COMMIT;
SELECT count(*) FROM idempotency.key;
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
SELECT count(*) FROM idempotency.key;

-- A key that this transaction claimed is in use, although its own lock does not block
-- it.
BEGIN;
SELECT outcome FROM idempotency.claim('reap', 'a9', retention => '1 hour');
SELECT idempotency.reap();
SELECT idempotency.complete('reap', 'a9', '"done"');
SELECT idempotency.reap();
COMMIT;
SELECT key, state FROM idempotency.keys;
-- An outcome that this transaction stored and that expired at once is deleted.
BEGIN;
SELECT pg_temp.expired('b', 3);
SELECT idempotency.reap();
COMMIT;

-- The deletion of an outcome takes no lock on its key.
SELECT pg_temp.expired('c', 3);
BEGIN;
SELECT idempotency.reap();
SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- Every isolation level works; a read-only transaction does not.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.expired('d', 3);
SELECT idempotency.reap(), idempotency.reap();
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.expired('e', 3);
SELECT idempotency.reap(), idempotency.reap();
COMMIT;
BEGIN READ ONLY;
SELECT idempotency.reap();
\echo :SQLSTATE
ROLLBACK;

-- Within a query, and within a procedure that commits.
SELECT pg_temp.expired('f', 30);
SELECT sum(idempotency.reap(7)) FROM generate_series(1, 3);
DO $$ BEGIN
	PERFORM idempotency.reap(5);
	COMMIT;
	PERFORM idempotency.reap(5);
	ROLLBACK;
END $$;
SELECT count(*) FROM idempotency.key WHERE key LIKE 'f%';


-- not distributed: it writes to the table
--
-- The part of the table that a call reads
--

TRUNCATE idempotency.key;
-- Stores rows that fill a third of a block each.
CREATE FUNCTION pg_temp.fill(prefix text, rows int, retention interval) RETURNS void LANGUAGE sql AS $$
	INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, response)
	SELECT now(), now() + retention, 200, 'reap', prefix || i, to_json(repeat('x', 1700)) FROM generate_series(1, rows) AS i
$$;
-- Calls reap() in a transaction of its own, and returns what it deleted and the blocks that it read.
CREATE PROCEDURE pg_temp.reap(INOUT reaped bigint, INOUT blocks bigint) LANGUAGE plpgsql AS $$
DECLARE
	stored bigint := (SELECT count(*) FROM idempotency.key);
	plan json;
BEGIN
	COMMIT;
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT idempotency.reap(1000)' INTO plan;
	COMMIT;
	reaped := stored - (SELECT count(*) FROM idempotency.key);
	blocks := (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::bigint + (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::bigint;
END
$$;

-- Blocks of live rows, then of expired rows, then of live rows.
SELECT FROM pg_temp.fill('early', 3000, '1 hour');
SELECT FROM pg_temp.fill('expired', 3000, '-1 second');
SELECT FROM pg_temp.fill('late', 3000, '1 hour');
SELECT pg_relation_size('idempotency.key') / 8192 BETWEEN 2000 AND 3100 AS blocks;
SELECT idempotency.reap(0);
-- Each call reads blocks in which rows expired, and about 256 others; now and then the catalog.
DO $$
DECLARE
	reaped bigint;
	blocks bigint;
	rows bigint := 0;
	calls int := 0;
	large int := 0;
BEGIN
	-- plans and the catalog
	CALL pg_temp.reap(reaped, blocks);
	rows := rows + reaped;
	FOR i IN 1 .. 20 LOOP
		CALL pg_temp.reap(reaped, blocks);
		calls := calls + (rows < 3000)::int;
		rows := rows + reaped;
		large := large + (blocks - 6 * reaped > 600)::int;
	END LOOP;
	RAISE NOTICE '% rows; some calls: %; few blocks: %', rows, calls BETWEEN 4 AND 15, large < 5;
END
$$;
SELECT rtrim(key, '0123456789') AS kind, count(*) FROM idempotency.key GROUP BY 1 ORDER BY 1;

-- NULL: the whole table.
SELECT FROM pg_temp.fill('last', 1, '-1 second');
SELECT idempotency.reap(NULL);
-- both layouts

--
-- A published table
--

TRUNCATE idempotency.key;
-- Published without a replica identity, no row can be deleted, and none is.
SET client_min_messages = error;
CREATE PUBLICATION regress_reaper FOR TABLE idempotency.key;
RESET client_min_messages;
ALTER TABLE idempotency.key REPLICA IDENTITY NOTHING;
SELECT count(*) FROM idempotency.once_many('reap', ARRAY['published'], '1 microsecond');
SELECT idempotency.reap();
\echo :SQLSTATE
ALTER TABLE idempotency.key REPLICA IDENTITY DEFAULT;
DROP PUBLICATION regress_reaper;
SELECT idempotency.reap();

TRUNCATE idempotency.key;
