-- extension only: checks of an altered table
-- reaper at rest: expired rows stay
--
-- The table of outcomes after changes by an administrator: the changes that work, and
-- those that are refused because the extension writes rows without the executor.
--
\set SHOW_CONTEXT never

CREATE FUNCTION operate(p_key text, p_answer json DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('store', p_key);
	IF op.replayed THEN
		RETURN 'replayed ' || coalesce(md5(op.response::text), 'nothing');
	END IF;
	PERFORM idempotency.complete('store', p_key, p_answer);
	RETURN 'completed';
END
$$;

--
-- Large responses
--

-- A compressible response and an incompressible one: both are returned complete.
SELECT operate('compressed', to_json(repeat('x', 1000000)));
SELECT string_agg(md5(n::text), '') AS noise FROM generate_series(1, 10000) AS n \gset
SELECT operate('noise', to_json(:'noise'::text));
SELECT operate('compressed') = 'replayed ' || md5(to_json(repeat('x', 1000000))::text) AS same;
SELECT operate('noise') = 'replayed ' || md5(to_json(:'noise'::text)::text) AS same;
SELECT key, octet_length(response::text) AS bytes, pg_column_size(response) < 100000 AS compressed
	FROM idempotency.key WHERE scope = 'store' ORDER BY key;
-- The same holds for headers.
BEGIN;
SELECT outcome FROM idempotency.claim('store', 'large headers');
SELECT idempotency.complete('store', 'large headers', NULL, 200, json_build_object('X', :'noise'::text));
COMMIT;
SELECT md5(headers ->> 'X') = md5(:'noise') AS same FROM idempotency.claim('store', 'large headers');

-- Overwriting an expired row and deleting a forgotten row also delete its TOAST data.
SELECT format('SELECT count(DISTINCT chunk_id) FROM %s', reltoastrelid::regclass) AS out_of_line
	FROM pg_class WHERE oid = 'idempotency.key'::regclass \gset
SELECT (:out_of_line) AS before \gset
BEGIN;
SELECT outcome FROM idempotency.claim('store', 'shrinks', retention => '1 millisecond');
SELECT octet_length(idempotency.complete('store', 'shrinks', to_json(:'noise'::text))::text);
COMMIT;
SELECT (:out_of_line) - :before AS more_out_of_line;
SELECT pg_sleep(0.01);
SELECT operate('shrinks', '"small"');
SELECT response FROM idempotency.claim('store', 'shrinks');
SELECT (:out_of_line) - :before AS more_out_of_line;
SELECT idempotency.forget('store', 'noise');
SELECT (:out_of_line) - :before AS more_out_of_line;
SELECT operate('noise', '"small"');
-- A response can come from a TOASTed column of another table.
CREATE TABLE toasted (body json);
ALTER TABLE toasted ALTER body SET STORAGE EXTERNAL;
INSERT INTO toasted VALUES (to_json(:'noise'::text));
BEGIN;
SELECT outcome FROM idempotency.claim('store', 'from a table');
SELECT octet_length(idempotency.complete('store', 'from a table', body)::text) FROM toasted;
COMMIT;
DROP TABLE toasted;
SELECT md5(response #>> '{}') = md5(:'noise') AS same FROM idempotency.claim('store', 'from a table');

--
-- Accepted changes, in the same session
--

SELECT operate('maintained', '"before"');
VACUUM FULL idempotency.key;
SELECT operate('maintained'), operate('after VACUUM FULL');
CLUSTER idempotency.key USING key_pkey;
ALTER TABLE idempotency.key SET WITHOUT CLUSTER;
SELECT operate('maintained'), operate('after CLUSTER');
REINDEX TABLE idempotency.key;
SELECT operate('maintained'), operate('after REINDEX');
REINDEX TABLE CONCURRENTLY idempotency.key;
SELECT operate('maintained'), operate('after REINDEX CONCURRENTLY');
ALTER TABLE idempotency.key SET TABLESPACE pg_default;
SELECT operate('maintained'), operate('after SET TABLESPACE');
ANALYZE idempotency.key;
VACUUM (FREEZE) idempotency.key;
SELECT operate('maintained'), operate('after VACUUM');
ALTER TABLE idempotency.key SET (fillfactor = 70, autovacuum_enabled = off);
SELECT operate('maintained'), operate('after SET (...)');
ALTER TABLE idempotency.key RESET (fillfactor, autovacuum_enabled);
ALTER TABLE idempotency.key ALTER response SET STORAGE EXTERNAL;
SELECT operate('maintained'), operate('after SET STORAGE', to_json(:'noise'::text));
SELECT operate('after SET STORAGE') = 'replayed ' || md5(to_json(:'noise'::text)::text) AS same;
ALTER TABLE idempotency.key ALTER response SET STORAGE EXTENDED;
ALTER TABLE idempotency.key REPLICA IDENTITY FULL;
SELECT operate('maintained'), operate('after REPLICA IDENTITY');
ALTER TABLE idempotency.key REPLICA IDENTITY DEFAULT;
COMMENT ON TABLE idempotency.key IS 'remembered outcomes; read them through idempotency.keys';

-- Without a replica identity, a published table accepts only new rows. The server's own
-- error prevents overwriting and deleting, and nothing is lost.
BEGIN;
SELECT outcome FROM idempotency.claim('store', 'published', retention => '1 millisecond');
SELECT idempotency.complete('store', 'published', '"expired"');
COMMIT;
SELECT pg_sleep(0.01);
BEGIN;
SET LOCAL client_min_messages = error; -- wal_level may be too low
CREATE PUBLICATION regress_idempotency FOR TABLE idempotency.key;
RESET client_min_messages;
ALTER TABLE idempotency.key REPLICA IDENTITY NOTHING;
SELECT operate('published and new');
SELECT * FROM idempotency.once_many('store', ARRAY['maintained', 'published and new, once']);
SAVEPOINT published;
SELECT operate('published', '"overwritten"');
\echo :SQLSTATE
ROLLBACK TO published;
SELECT * FROM idempotency.once_many('store', ARRAY['published']);
\echo :SQLSTATE
ROLLBACK TO published;
SELECT idempotency.forget('store', 'maintained');
\echo :SQLSTATE
ROLLBACK TO published;
SELECT operate('maintained') = 'replayed ' || md5('"before"') AS same;
SELECT response FROM idempotency.key WHERE scope = 'store' AND key = 'published';
ALTER TABLE idempotency.key REPLICA IDENTITY DEFAULT;
SELECT operate('published', '"overwritten"');
ROLLBACK;

-- Every write maintains the indexes that an administrator added.
CREATE INDEX key_expires_at ON idempotency.key (expires_at);
CREATE INDEX key_status ON idempotency.key (status) WHERE status < 0;
CREATE INDEX key_upper ON idempotency.key (upper(key));
CREATE INDEX key_created_at ON idempotency.key USING brin (created_at);
SELECT operate('Indexed');
BEGIN;
SELECT outcome FROM idempotency.claim('store', 'Indexed failure', retention => '1 millisecond');
SELECT idempotency.fail('store', 'Indexed failure', NULL, 418);
COMMIT;
SELECT count(*) FROM idempotency.once_many('store', ARRAY['Indexed once', 'Indexed once 2']);
SELECT idempotency.once('store', 'Indexed 3');
SET enable_seqscan = off;
SELECT count(*) FROM idempotency.key WHERE scope = 'store' AND upper(key) LIKE 'INDEXED%' AND upper(key) >= 'INDEXED' AND upper(key) < 'INDEXEE';
SELECT key FROM idempotency.key WHERE status = -418;
SELECT pg_sleep(0.01);
-- After overwriting, the indexes find the row by its new values and not by the old
-- ones.
SELECT operate('Indexed failure');
SELECT key FROM idempotency.key WHERE status = -418;
SELECT key FROM idempotency.key WHERE upper(key) = 'INDEXED FAILURE' AND status > 0;
SELECT key FROM idempotency.key WHERE expires_at > now() AND key = 'Indexed failure';
SELECT idempotency.forget('store', 'Indexed');
SELECT count(*) FROM idempotency.key WHERE scope = 'store' AND upper(key) = 'INDEXED';
RESET enable_seqscan;
-- A violation of an administrator's unique index raises the server's error, and does
-- not count as a duplicate key.
CREATE UNIQUE INDEX key_one_teapot ON idempotency.key (status) WHERE abs(status) = 418;
BEGIN;
SELECT (idempotency.claim('store', k)).outcome FROM unnest('{teapot,another teapot}'::text[]) AS k;
SELECT idempotency.fail('store', 'teapot', NULL, 418);
SELECT idempotency.fail('store', 'another teapot', NULL, 418);
\echo :SQLSTATE
ROLLBACK;
DROP INDEX idempotency.key_expires_at, idempotency.key_status, idempotency.key_upper, idempotency.key_created_at,
	idempotency.key_one_teapot;
-- An index function that catches its own error does not prevent the commit, with a
-- token or without.
CREATE FUNCTION number_or_x(value text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		RETURN value::int::text;
	EXCEPTION WHEN invalid_text_representation THEN
		RETURN 'x';
	END;
END
$$;
CREATE INDEX key_number_or_x ON idempotency.key (number_or_x(scope));
SELECT token FROM idempotency.claim('store', 'leased, indexed', lease => '1 minute') \gset
BEGIN;
SELECT idempotency.renew('store', 'leased, indexed', :token, '2 minutes') > now() AS renewed;
SELECT FROM idempotency.checkpoint('store', 'leased, indexed', :token, 'half');
COMMIT;
BEGIN;
SELECT idempotency.complete('store', 'leased, indexed', '"done"', token => :token);
COMMIT;
SELECT outcome, response FROM idempotency.claim('store', 'leased, indexed');
SELECT operate('indexed by a function', '1'), operate('indexed by a function');
-- A stale token still does, before and after such a function ran.
BEGIN;
SELECT operate('lost with the transaction');
DO $$
BEGIN
	PERFORM idempotency.complete('store', 'leased, indexed', token => 0);
EXCEPTION WHEN SQLSTATE 'IK410' THEN
	PERFORM operate('lost as well');
END
$$;
COMMIT;
\echo :SQLSTATE
SELECT count(*) FROM idempotency.key WHERE scope = 'store' AND key LIKE 'lost%';
DROP INDEX idempotency.key_number_or_x;
DROP FUNCTION number_or_x;

-- A primary key that is rebuilt manually: while there are two indexes, both decide
-- conflicts; afterwards only the new one.
BEGIN;
CREATE UNIQUE INDEX key_rebuilt ON idempotency.key (key, scope);
SELECT operate('maintained') = 'replayed ' || md5('"before"') AS same, operate('two indexes');
SELECT * FROM idempotency.once_many('store', ARRAY['maintained', 'two indexes', 'two indexes, once']);
ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey, ADD PRIMARY KEY USING INDEX key_rebuilt;
SELECT operate('maintained') = 'replayed ' || md5('"before"') AS same, operate('two indexes'), operate('rebuilt');
SELECT * FROM idempotency.once_many('store', ARRAY['maintained', 'two indexes', 'two indexes, once', 'rebuilt', 'rebuilt, once']);
SELECT idempotency.forget('store', 'two indexes'), idempotency.forget('store', 'maintained');
SELECT operate('two indexes');
ROLLBACK;

-- TRUNCATE deletes all outcomes.
BEGIN;
TRUNCATE idempotency.key;
SELECT operate('maintained', '"after"');
SELECT operate('maintained') = 'replayed ' || md5('"after"') AS same;
ROLLBACK;
SELECT operate('maintained') = 'replayed ' || md5('"before"') AS same;

--
-- Refused changes
--

-- The result of a claim, a peek, a batch, a lease and a completer after a change of the
-- table, which is then rolled back.
CREATE FUNCTION altered(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text := '';
	detail text;
	call text;
BEGIN
	PERFORM operate('maintained');
	-- The views would prevent changes of its columns.
	ALTER EXTENSION idempotency DROP VIEW idempotency.keys;
	ALTER EXTENSION idempotency DROP VIEW idempotency.zombies;
	DROP VIEW idempotency.keys, idempotency.zombies;
	EXECUTE statement;
	FOREACH call IN ARRAY ARRAY[
		'SELECT operate(''altered'')',
		'SELECT idempotency.peek(''store'', ''maintained'')',
		'SELECT idempotency.once_many(''store'', ARRAY[''altered''])',
		'SELECT idempotency.forget(''store'', ''maintained'')',
		'SELECT idempotency.claim(''store'', ''leased'', lease => ''1 min'')',
		'SELECT idempotency.claim_abandoned(''store'', ''1 min'')']
	LOOP
		BEGIN
			EXECUTE call;
			result := result || ' accepted';
		EXCEPTION WHEN OTHERS THEN
			GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
			result := result || ' ' || SQLSTATE;
		END;
	END LOOP;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION WHEN SQLSTATE 'P9999' THEN
	RETURN ltrim(result) || coalesce(': ' || detail, '');
END
$$;
CREATE ACCESS METHOD heap_of_others TYPE TABLE HANDLER heap_tableam_handler;
CREATE FUNCTION trigger_of_others() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TABLE others (scope text COLLATE "C", key idempotency.keytext, PRIMARY KEY (scope, key));
CREATE TABLE partitioned (LIKE idempotency.key) PARTITION BY LIST (status);
SET client_min_messages = warning;
SELECT statement, altered(statement) FROM unnest(ARRAY[
	'SELECT ''nothing was altered''',
	'ALTER TABLE idempotency.key SET UNLOGGED',
	'ALTER TABLE idempotency.key SET ACCESS METHOD heap_of_others',
	'ALTER TABLE partitioned ATTACH PARTITION idempotency.key DEFAULT',
	'CREATE TABLE child () INHERITS (idempotency.key)',
	'ALTER TABLE idempotency.key ENABLE ROW LEVEL SECURITY',
	'ALTER TABLE idempotency.key FORCE ROW LEVEL SECURITY',
	'CREATE TRIGGER t BEFORE INSERT ON idempotency.key FOR EACH ROW EXECUTE FUNCTION trigger_of_others()',
	'CREATE TRIGGER t AFTER DELETE ON idempotency.key FOR EACH STATEMENT EXECUTE FUNCTION trigger_of_others()',
	'CREATE RULE r AS ON DELETE TO idempotency.key DO INSTEAD NOTHING',
	'CREATE TABLE referencing (scope text, key idempotency.keytext, FOREIGN KEY (key, scope) REFERENCES idempotency.key)',
	'ALTER TABLE idempotency.key ADD FOREIGN KEY (scope, key) REFERENCES others NOT VALID',
	'ALTER TABLE idempotency.key ADD UNIQUE (created_at, scope, key) DEFERRABLE INITIALLY DEFERRED',
	'ALTER TABLE idempotency.key ADD CHECK (status <> 418)',
	'ALTER TABLE idempotency.key ADD COLUMN note text',
	'ALTER TABLE idempotency.key ADD COLUMN twice int GENERATED ALWAYS AS (status * 2) STORED',
	'ALTER TABLE idempotency.key ALTER status SET DEFAULT 200',
	'ALTER TABLE idempotency.key RENAME COLUMN status TO state',
	'ALTER TABLE idempotency.key DROP COLUMN headers',
	'ALTER TABLE idempotency.key ALTER headers TYPE jsonb USING headers::jsonb',
	'ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey',
	'ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope) DEFERRABLE',
	'ALTER TABLE idempotency.key RENAME TO renamed',
	'ALTER TABLE idempotency.key SET SCHEMA public'
	]) AS statement;
-- A different primary key would find other rows, or allow two rows for one key.
SELECT statement, split_part(altered(statement), ':', 1) AS altered FROM unnest(ARRAY[
	'ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (scope, key)',
	'ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope, created_at)',
	'ALTER TABLE idempotency.key ALTER key TYPE text COLLATE "POSIX"'
	]) AS statement;
-- Only leases need these objects: a completer the index of operations in progress,
-- every owner the sequence of tokens.
SELECT statement, altered(statement) FROM unnest(ARRAY[
	'DROP INDEX idempotency.key_abandoned',
	'ALTER INDEX idempotency.key_abandoned RENAME TO renamed',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON idempotency.key (scope) WHERE token IS NOT NULL',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON idempotency.key (scope, token) WHERE token IS NULL',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON idempotency.key (scope, expires_at) WHERE token IS NOT NULL',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON others (scope, key)',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON idempotency.key (scope, token) WHERE token IS NOT NULL AND attempt > 1',
	'DROP INDEX idempotency.key_abandoned; CREATE INDEX key_abandoned ON idempotency.key (scope, token) WHERE token IS NOT NULL',
	'ALTER SEQUENCE idempotency.token RENAME TO renamed',
	'ALTER SEQUENCE idempotency.token SET SCHEMA public',
	'ALTER SEQUENCE idempotency.token SET UNLOGGED',
	'ALTER SEQUENCE idempotency.token CACHE 20',
	'ALTER SEQUENCE idempotency.token INCREMENT -1',
	'ALTER SEQUENCE idempotency.token CYCLE',
	'ALTER EXTENSION idempotency DROP SEQUENCE idempotency.token; DROP SEQUENCE idempotency.token',
	'ALTER SEQUENCE idempotency.token RENAME TO renamed; CREATE VIEW idempotency.token AS SELECT 1'
	]) AS statement;
RESET client_min_messages;

-- The complete errors.
BEGIN;
ALTER TABLE idempotency.key ENABLE ROW LEVEL SECURITY;
SELECT operate('altered');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
ALTER SEQUENCE idempotency.token RENAME TO renamed;
SELECT idempotency.claim('store', 'leased', lease => '1 min');
\echo :SQLSTATE
ROLLBACK;
BEGIN;
ALTER SEQUENCE idempotency.token CACHE 20;
SELECT idempotency.claim('store', 'leased', lease => '1 min');
\echo :SQLSTATE
ROLLBACK;
-- Releasing a lease with a checkpoint draws no token either.
BEGIN;
SELECT token FROM idempotency.claim('store', 'leased', lease => '1 min') \gset
SELECT FROM idempotency.checkpoint('store', 'leased', :token, 'here');
ALTER SEQUENCE idempotency.token CYCLE;
SELECT idempotency.release('store', 'leased', :token);
ROLLBACK;
SELECT operate('maintained') = 'replayed ' || md5('"before"') AS same;

-- Tokens are random numbers between the values of the sequence, which are far apart.
BEGIN;
CREATE TEMPORARY TABLE given (n int, token bigint) ON COMMIT DROP;
INSERT INTO given SELECT n, (idempotency.claim('store', n::text, lease => '1 min')).token FROM generate_series(1, 100) AS n;
SELECT count(DISTINCT (token - 1) % 131072) > 90 AS are_random, bool_and(token > former) AS grow
	FROM (SELECT token, lag(token, 1, 0::bigint) OVER (ORDER BY n) AS former FROM given) AS g;
ALTER SEQUENCE idempotency.token RESTART 9223372036854775807;
SELECT token FROM idempotency.claim('store', 'the last', lease => '1 min');
ROLLBACK;

-- A sequence that was set back is not detected: it assigns a token twice.
BEGIN;
ALTER SEQUENCE idempotency.token INCREMENT 1;
SELECT token FROM idempotency.claim('store', 'leased', lease => '1 min') \gset
SELECT setval('idempotency.token', :token, false) = :token AS set_back;
SELECT token = :token AS given_twice FROM idempotency.claim('store', 'leased, too', lease => '1 min');
ROLLBACK;

DROP TABLE others, partitioned;
DROP ACCESS METHOD heap_of_others;
DROP FUNCTION altered, trigger_of_others, operate;
