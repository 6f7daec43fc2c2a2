-- reaper at rest: the test reaps
--
-- reap() deletes expired rows, and no others; the table reaper shows its progress.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key;
-- extension only: progress of the reaper
TRUNCATE idempotency.reaper;
-- both editions

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
-- extension only: progress of the reaper
SELECT count(*) FROM idempotency.reaper;
-- both editions

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
SELECT idempotency.checkpoint('reap', 'released', :token, 'charged', '{"charge": 1}');
SELECT idempotency.release('reap', 'released', :token);
SELECT pg_sleep(0.01);
SELECT key, state FROM idempotency.keys ORDER BY key;
SELECT pg_temp.large_values();

SELECT idempotency.reap();
SELECT key, state FROM idempotency.keys ORDER BY key;
-- extension only: progress of the reaper
SELECT rows_reaped, zombies_reaped, last_reaped_rows, last_reaped_at > now() - interval '1 min' AS just_now
	FROM idempotency.reaper;
-- both editions

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
-- extension only: progress of the reaper
TRUNCATE idempotency.reaper;
-- both editions
SELECT pg_temp.expired('a', 10);
SELECT idempotency.reap(3);
SELECT count(*) FROM idempotency.key;
SELECT idempotency.reap(0);
SELECT idempotency.reap(-1);
\echo :SQLSTATE
SELECT count(*) FROM idempotency.key;
SELECT idempotency.reap(NULL);
SELECT count(*) FROM idempotency.key;
-- extension only: progress of the reaper
SELECT rows_reaped, zombies_reaped, last_reaped_rows FROM idempotency.reaper;
-- both editions

-- The default is one thousand.
SELECT pg_temp.expired('b', 2200);
SELECT idempotency.reap();
SELECT idempotency.reap();
SELECT idempotency.reap();
SELECT idempotency.reap();

-- extension only: locks of keys
-- At most a fraction of the lock table, whatever the argument.
SELECT current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int AS few_locks \gset
SELECT pg_temp.expired('c', :few_locks) = :few_locks AS expired;
BEGIN;
SELECT n BETWEEN 100 AND :few_locks - 1 AS some FROM idempotency.reap(:few_locks) AS n;
SELECT count(*) < :few_locks / 2 AS few FROM pg_locks WHERE pid = pg_backend_pid();
COMMIT;
-- both editions
DO $$ BEGIN
	WHILE idempotency.reap(2147483647) > 0 LOOP
		COMMIT;
	END LOOP;
END $$;
SELECT count(*) FROM idempotency.key;

-- extension only: progress of the reaper
--
-- Where the scan continues
--

-- About 125 blocks of live rows, then of expired rows, then of live rows again.
TRUNCATE idempotency.key;
TRUNCATE idempotency.reaper;
CREATE FUNCTION pg_temp.fill(kind text, rows int, retention interval) RETURNS void LANGUAGE sql AS $$
	SELECT idempotency.claim('fill', kind || i, retention => fill.retention),
		idempotency.complete('fill', kind || i,
			(SELECT to_json(string_agg(md5(i::text || j), '')) FROM generate_series(1, 50) AS j))
	FROM generate_series(1, rows) AS i
$$;
SELECT FROM pg_temp.fill('early', 500, '1 hour');
SELECT FROM pg_temp.fill('expired', 500, '1 microsecond');
SELECT FROM pg_temp.fill('late', 500, '1 hour');
CREATE VIEW pg_temp.kinds AS
	SELECT rtrim(key::text, '0123456789') AS kind, count(*),
		(min(ctid)::text::point)[0]::int / 100 AS from_hundred, (max(ctid)::text::point)[0]::int / 100 AS to_hundred
		FROM idempotency.key GROUP BY 1;
TABLE pg_temp.kinds ORDER BY 1;

-- The scan reaches the blocks with expired rows, and continues from there.
SELECT idempotency.reap(100);
SELECT expiry_block BETWEEN 125 AND 160 AS amid, scan_block BETWEEN 125 AND 160 AS amid FROM idempotency.reaper;
SELECT idempotency.reap(100);
SELECT expiry_block BETWEEN 150 AND 185 AS amid, scan_block BETWEEN 125 AND 160 AS amid FROM idempotency.reaper;
SELECT idempotency.reap();
SELECT expiry_block BETWEEN 185 AND 255 AS at_border FROM idempotency.reaper;
TABLE pg_temp.kinds ORDER BY 1;
SELECT idempotency.reap();

-- The remaining rows expire, and new rows reuse the space; no expired row stays.
UPDATE idempotency.key SET expires_at = now() WHERE key LIKE 'late%';
VACUUM idempotency.key;
SELECT FROM pg_temp.fill('new', 300, '1 hour');
SELECT FROM pg_temp.fill('brief', 300, '1 microsecond');
SELECT idempotency.reap(2000);
SELECT kind, count FROM pg_temp.kinds ORDER BY 1;
SELECT scan_block BETWEEN 125 AND 160 AS where_it_began, last_scan_duration > '0' AS scanned FROM idempotency.reaper;

-- The table can have become shorter than the stored position, or empty.
UPDATE idempotency.reaper SET expiry_block = 1000000, scan_block = 4294967295;
SELECT pg_temp.expired('more', 5);
SELECT idempotency.reap();
UPDATE idempotency.reaper SET expiry_block = -1, scan_block = 9223372036854775807;
SELECT pg_temp.expired('more', 5);
SELECT idempotency.reap();
TRUNCATE idempotency.key;
SELECT idempotency.reap();

-- A position of another cluster or another table is ignored.
TRUNCATE idempotency.reaper;
INSERT INTO idempotency.reaper
	SELECT 7, 0, 7, now(), 7, 7, 7, now(), NULL::interval, 7, 7, 'idempotency.key'::regclass
	UNION ALL SELECT 7, 0, 7, now(), 7, 7, 7, now(), NULL, 7, system_identifier, 7 FROM pg_control_system();
SELECT pg_temp.expired('other', 5);
SELECT idempotency.reap();
SELECT rows_reaped, expiry_block FROM idempotency.reaper ORDER BY rows_reaped;
-- both editions

--
-- In the caller's transaction
--

TRUNCATE idempotency.key;
-- extension only: progress of the reaper
TRUNCATE idempotency.reaper;
-- both editions
SELECT pg_temp.expired('a', 10);
BEGIN;
SELECT idempotency.reap(4);
SAVEPOINT s;
SELECT idempotency.reap();
-- extension only: progress of the reaper
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
-- both editions
ROLLBACK TO s;
-- extension only: progress of the reaper
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
-- both editions
COMMIT;
-- extension only: progress of the reaper
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
-- both editions
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
-- extension only: progress of the reaper
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
-- both editions

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

-- extension only: the table of the reaper
--
-- Privileges
--

CREATE ROLE regress_reaper_nobody;
CREATE ROLE regress_reaper_client;
CREATE ROLE regress_reaper_operator;
CREATE ROLE regress_reaper_monitor IN ROLE pg_monitor;
SELECT idempotency.grant_client('regress_reaper_client');
SELECT idempotency.grant_operator('regress_reaper_operator');
GRANT USAGE ON SCHEMA idempotency TO regress_reaper_nobody;
CREATE TEMPORARY TABLE door (n serial, statement text);
INSERT INTO door (statement) VALUES ('SELECT idempotency.reap()'), ('TABLE idempotency.reaper'),
	('INSERT INTO idempotency.reaper DEFAULT VALUES'), ('UPDATE idempotency.reaper SET rows_reaped = 0'),
	('DELETE FROM idempotency.reaper'), ('TRUNCATE idempotency.reaper'), ('LOCK TABLE idempotency.reaper');
GRANT SELECT ON door TO PUBLIC;
SET ROLE regress_reaper_nobody;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_reaper_client;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_reaper_monitor;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_reaper_operator;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
RESET ROLE;

-- Triggers that an administrator adds to the table run as its owner, not as the caller.
CREATE TABLE who (name name, restricted boolean);
CREATE FUNCTION who() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO public.who VALUES (current_user, pg_temp.try('CREATE TEMPORARY TABLE t ()') LIKE '42501%');
	RETURN NULL;
END $$;
CREATE TRIGGER who AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION who();
SELECT pg_temp.expired('g', 3);
SET ROLE regress_reaper_operator;
SELECT idempotency.reap();
SELECT current_user;
RESET ROLE;
SELECT name = (SELECT relowner::regrole::name FROM pg_class WHERE oid = 'idempotency.reaper'::regclass) AS owner, restricted FROM who;
DROP TRIGGER who ON idempotency.reaper;
DROP TABLE who;
DROP FUNCTION who;

-- A hostile search path has no effect.
CREATE SCHEMA regress_reaper_hostile;
CREATE FUNCTION regress_reaper_hostile.captured(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE FUNCTION regress_reaper_hostile.captured_too(bigint, bigint) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE OPERATOR regress_reaper_hostile.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = regress_reaper_hostile.captured);
CREATE OPERATOR regress_reaper_hostile.+ (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = regress_reaper_hostile.captured_too);
CREATE TABLE regress_reaper_hostile.reaper (captured boolean NOT NULL CHECK (false));
GRANT USAGE ON SCHEMA regress_reaper_hostile TO regress_reaper_operator;
SELECT pg_temp.expired('h', 3);
\c -
SET search_path = regress_reaper_hostile, pg_catalog;
SET ROLE regress_reaper_operator;
SELECT idempotency.reap();
SELECT rows_reaped > 0 AS counted FROM idempotency.reaper;
RESET ROLE;
RESET search_path;
SET client_min_messages = warning;
DROP SCHEMA regress_reaper_hostile CASCADE;
RESET client_min_messages;
DROP OWNED BY regress_reaper_nobody, regress_reaper_client, regress_reaper_operator;
DROP ROLE regress_reaper_nobody, regress_reaper_client, regress_reaper_operator, regress_reaper_monitor;

--
-- Tables that were altered after installation
--

ALTER TABLE idempotency.reaper RENAME TO reaped;
SELECT idempotency.reap();
\echo :SQLSTATE
ALTER TABLE idempotency.reaped RENAME TO reaper;
ALTER TABLE idempotency.key ENABLE ROW LEVEL SECURITY;
SELECT idempotency.reap();
\echo :SQLSTATE
ALTER TABLE idempotency.key DISABLE ROW LEVEL SECURITY;
SELECT idempotency.reap();

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

-- The setting that the launcher uses is checked even without a launcher.
ALTER SYSTEM SET idempotency.reaper_naptime = '99ms';
ALTER SYSTEM SET idempotency.databases = 'one two';
SET idempotency.reaper_naptime = '1s';
SELECT boot_val, setting = '1000' AS changed FROM pg_settings WHERE name = 'idempotency.reaper_naptime';
SELECT boot_val AS databases FROM pg_settings WHERE name = 'idempotency.databases';
-- both editions

TRUNCATE idempotency.key;
-- extension only: progress of the reaper
TRUNCATE idempotency.reaper;
-- both editions
