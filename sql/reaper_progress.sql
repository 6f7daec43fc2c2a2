-- extension only: the reaper's progress, its table and its settings
-- reaper at rest: the test reaps
--
-- The table reaper shows the progress of reap(), where it continues, and who can change it.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key;
TRUNCATE idempotency.reaper;

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

-- Without work, reap() writes nothing.
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.reaper;

-- It counts the rows, and the abandoned operations among them.
SELECT pg_temp.expired('a', 10);
SELECT outcome FROM idempotency.claim('reap', 'old lease', lease => '1 ms', retention => '1 microsecond');
SELECT pg_sleep(0.01);
SELECT idempotency.reap(3);
SELECT idempotency.reap(0);
SELECT idempotency.reap(NULL);
SELECT rows_reaped, zombies_reaped, last_reaped_rows, last_reaped_at > now() - interval '1 min' AS just_now
	FROM idempotency.reaper;

-- In the caller's transaction.
TRUNCATE idempotency.reaper;
SELECT pg_temp.expired('a', 10);
BEGIN;
SELECT idempotency.reap(4);
SAVEPOINT s;
SELECT idempotency.reap();
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
ROLLBACK TO s;
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
COMMIT;
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
SELECT count(*), (SELECT rows_reaped FROM idempotency.reaper) FROM idempotency.key;

-- At most a fraction of the lock table, whatever the argument.
SELECT current_setting('max_locks_per_transaction')::int * current_setting('max_connections')::int AS few_locks \gset
SELECT pg_temp.expired('c', :few_locks) = :few_locks AS expired;
BEGIN;
SELECT n BETWEEN 100 AND :few_locks - 1 AS some FROM idempotency.reap(:few_locks) AS n;
SELECT count(*) < :few_locks / 2 AS few FROM pg_locks WHERE pid = pg_backend_pid();
COMMIT;
DO $$ BEGIN
	WHILE idempotency.reap(2147483647) > 0 LOOP
		COMMIT;
	END LOOP;
END $$;

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
SELECT scan_block AS began_at FROM idempotency.reaper \gset
UPDATE idempotency.key SET expires_at = now() WHERE key LIKE 'late%';
VACUUM idempotency.key;
SELECT FROM pg_temp.fill('new', 300, '1 hour');
SELECT FROM pg_temp.fill('brief', 300, '1 microsecond');
SELECT idempotency.reap(NULL);
SELECT kind, count FROM pg_temp.kinds ORDER BY 1;
SELECT scan_block = :began_at AS where_it_began, last_scan_duration > '0' AS scanned FROM idempotency.reaper;

-- The table can have become shorter than the stored position, or empty.
UPDATE idempotency.reaper SET expiry_block = 1000000, scan_block = 4294967295;
SELECT pg_temp.expired('more', 5);
SELECT idempotency.reap(NULL);
UPDATE idempotency.reaper SET expiry_block = -1, scan_block = 9223372036854775807;
SELECT pg_temp.expired('more', 5);
SELECT idempotency.reap(NULL);
TRUNCATE idempotency.key;
SELECT idempotency.reap();

-- A position of another cluster or another table is ignored.
TRUNCATE idempotency.reaper;
INSERT INTO idempotency.reaper
	SELECT 7, 0, 7, now(), 7, 7, 7, now(), NULL::interval, 7, 'idempotency.key'::regclass
	UNION ALL SELECT 7, 0, 7, now(), 7, 7, 7, now(), NULL, system_identifier, 7 FROM pg_control_system();
SELECT pg_temp.expired('other', 5);
SELECT idempotency.reap();
SELECT rows_reaped, expiry_block FROM idempotency.reaper ORDER BY rows_reaped;

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

-- The setting that the launcher uses is checked even without a launcher.
ALTER SYSTEM SET idempotency.reaper_naptime = '99ms';
ALTER SYSTEM SET idempotency.databases = 'one two';
SET idempotency.reaper_naptime = '1s';
SELECT boot_val, setting = '1000' AS changed FROM pg_settings WHERE name = 'idempotency.reaper_naptime';
SELECT boot_val AS databases FROM pg_settings WHERE name = 'idempotency.databases';

TRUNCATE idempotency.key;
TRUNCATE idempotency.reaper;
