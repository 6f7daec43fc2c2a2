--
-- once(): a consumer's inbox.  True the first time, and one statement for many
-- messages.
--
\set SHOW_CONTEXT never

-- What a statement comes to: its SQLSTATE, message and detail.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
	RETURN SQLSTATE || ': ' || message || coalesce('. ' || nullif(detail, ''), '');
END
$$;

--
-- One key
--

SELECT idempotency.once('once', 'm1');
SELECT idempotency.once('once', 'm1');
SELECT idempotency.once('once', 'm2');
SELECT idempotency.once('once 2', 'm1');

-- It needs no complete(): the record is written at once, and goes with the
-- transaction.
BEGIN;
SELECT idempotency.once('once', 'rolled back');
SELECT idempotency.once('once', 'rolled back');
ROLLBACK;
SELECT idempotency.once('once', 'rolled back');
BEGIN;
SAVEPOINT s;
SELECT idempotency.once('once', 'savepoint');
ROLLBACK TO s;
SELECT idempotency.once('once', 'savepoint');
COMMIT;
SELECT idempotency.once('once', 'savepoint');

-- A record has no answer.
SELECT key, status, fingerprint, headers, response FROM idempotency.key WHERE scope = 'once' AND key = 'm1';
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.claim('once', 'm1', '{"any": "request"}');
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.try_claim('once', 'm1');
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.peek('once', 'm1');

-- What claim() and complete() stored has been seen, too; and the other way round,
-- so that a key has one effect whichever is used.
BEGIN;
SELECT outcome FROM idempotency.claim('once', 'completed');
SELECT idempotency.complete('once', 'completed');
COMMIT;
SELECT idempotency.once('once', 'completed');
BEGIN;
SELECT idempotency.once('once', 'own');
SELECT idempotency.once('once', 'own');
SELECT outcome FROM idempotency.claim('once', 'own');
COMMIT;

-- A key that this transaction holds is neither new nor seen.
BEGIN;
SELECT outcome FROM idempotency.claim('once', 'held');
SELECT idempotency.once('once', 'held');
\echo :SQLSTATE
ROLLBACK;

-- How long: the setting, or the argument, which must outlast every redelivery.
SELECT idempotency.once('once', 'kept a day'), idempotency.once('once', 'kept an hour', '1 hour'),
	idempotency.once('once', 'kept for ever', '-1 second');
SELECT key, ceil(extract(epoch FROM expires_at - created_at))::int AS seconds
	FROM idempotency.key WHERE scope = 'once' AND key LIKE 'kept a%' ORDER BY key;
SELECT expires_at FROM idempotency.key WHERE scope = 'once' AND key = 'kept for ever';

-- An expired record counts as absent, and is overwritten in place.
SELECT idempotency.once('once', 'expired', '1 millisecond');
SELECT pg_sleep(0.01);
SELECT idempotency.once('once', 'expired', '1 hour');
SELECT idempotency.once('once', 'expired', '1 hour');
SELECT count(*) FROM idempotency.key WHERE scope = 'once' AND key = 'expired';
-- So is an expired answer, of which nothing stays.
BEGIN;
SELECT outcome FROM idempotency.claim('once', 'expired answer', '{"a": 1}', retention => '1 millisecond');
SELECT idempotency.fail('once', 'expired answer', '"no"', 400, '{"X": "1"}');
COMMIT;
SELECT pg_sleep(0.01);
SELECT idempotency.once('once', 'expired answer');
SELECT status, fingerprint, headers, response FROM idempotency.key WHERE scope = 'once' AND key = 'expired answer';

-- Arguments are held to the same rules as those of claim().
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.once(NULL, ''key''::text)',
	'SELECT idempotency.once(''once'', NULL::text)',
	'SELECT idempotency.once(''once'', '''')',
	'SELECT idempotency.once(''once'', repeat(''k'', 256))',
	'SELECT idempotency.once(''once'', E''\x07'')',
	'SELECT idempotency.once(''once'', ''key'', ''0'')',
	'SELECT idempotency.once(''once'', ''key'', ''-1 day'')',
	'SELECT idempotency.once(''once'', ''key'', ''300000 years'')']) AS s;

--
-- Many keys
--

-- Those that are new come back, in bytewise order, each once.
SELECT * FROM idempotency.once_many('batch', ARRAY['m3', 'm1', 'm2']);
SELECT * FROM idempotency.once_many('batch', ARRAY['m4', 'm2', 'm0', 'm4', 'm4']);
SELECT * FROM idempotency.once_many('batch', ARRAY['m0', 'm1', 'm2', 'm3', 'm4']);
SELECT * FROM idempotency.once_many('batch', ARRAY['é', 'z', 'a', 'B', 'ab', 'a b', '10', '9', 'Ж']);

-- One key or many, an answer or none: it is one effect.
SELECT idempotency.once('batch', 'm5');
BEGIN;
SELECT outcome FROM idempotency.claim('batch', 'm6');
SELECT idempotency.complete('batch', 'm6', '6');
SELECT * FROM idempotency.once_many('batch', ARRAY['m5', 'm6', 'm7']);
COMMIT;
SELECT idempotency.once('batch', 'm7');
SELECT outcome, status FROM idempotency.claim('batch', 'm7');

-- In a consumer: the effect of each message that is new, in one statement.
CREATE TABLE message (id text, amount int);
INSERT INTO message VALUES ('p1', 10), ('p2', 20), ('p3', 30);
CREATE TABLE effect (id text, amount int);
INSERT INTO effect SELECT m.* FROM message m
	JOIN idempotency.once_many('consumer', ARRAY(SELECT id FROM message)) AS new_id ON new_id = m.id;
INSERT INTO message VALUES ('p4', 40);
INSERT INTO effect SELECT m.* FROM message m
	JOIN idempotency.once_many('consumer', ARRAY(SELECT id FROM message)) AS new_id ON new_id = m.id;
SELECT count(*), sum(amount) FROM effect;
DROP TABLE message, effect;

-- No keys are no error; no array is, and so is a key that is none.
SELECT * FROM idempotency.once_many('batch', '{}'::text[]);
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.once_many(''batch'', NULL::text[])',
	'SELECT idempotency.once_many(NULL, ''{a}''::text[])',
	'SELECT idempotency.once_many('''', ''{}''::text[])',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1'', NULL, ''n2''])',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1'', ''''])',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1'', repeat(''k'', 256)])',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1'', E''\n''])',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1''], ''-1 day'')',
	'SELECT idempotency.once_many(''batch'', ARRAY[''n1''], ''0'')']) AS s;
SELECT * FROM idempotency.once_many('batch', '{{n1,n2},{n3,n4}}'::text[]);
\echo :SQLSTATE
-- Other bounds than 1 are no other dimension.
SELECT * FROM idempotency.once_many('batch', '[5:6]={n5,n6}'::text[]);
-- An error left nothing behind.
SELECT key FROM idempotency.key WHERE scope = 'batch' AND key LIKE 'n%' ORDER BY key;

-- A key that this transaction holds is an error here, too, and then none of the
-- batch is remembered.
BEGIN;
SELECT outcome FROM idempotency.claim('batch', 'held');
SAVEPOINT before;
SELECT * FROM idempotency.once_many('batch', ARRAY['before', 'held', 'later']);
\echo :SQLSTATE
ROLLBACK TO before;
SELECT count(*) FROM idempotency.key WHERE scope = 'batch' AND key IN ('before', 'held', 'later');
-- Not so a key of that name in another scope.
SELECT * FROM idempotency.once_many('batch 2', ARRAY['held']);
ROLLBACK;

-- Expired ones are new again, among others that are not.
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['a', 'c', 'e'], '1 millisecond');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['b', 'd'], '1 hour');
SELECT pg_sleep(0.01);
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['f', 'e', 'd', 'c', 'b', 'a'], '2 hours');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['f', 'e', 'd', 'c', 'b', 'a']);
SELECT key, ceil(extract(epoch FROM expires_at - created_at))::int AS seconds
	FROM idempotency.key WHERE scope = 'batch.expired' ORDER BY key;
-- The same for those of this very transaction.
BEGIN;
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y'], '1 microsecond');
SELECT pg_sleep(0.001);
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y', 'z'], '1 hour');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y', 'z'], '1 hour');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'batch.expired' AND key IN ('x', 'y', 'z');

-- Every record of a batch ends at the same moment.
SELECT count(*) FROM idempotency.once_many('batch.end', ARRAY['a', 'b', 'c'], '1 month');
SELECT count(DISTINCT expires_at), bool_and(isfinite(expires_at)) FROM idempotency.key WHERE scope = 'batch.end';
SELECT * FROM idempotency.once_many('batch.end', ARRAY['d'], '-1 second');
SELECT expires_at FROM idempotency.key WHERE scope = 'batch.end' AND key = 'd';

-- Ten thousand keys in one statement take none of the locks of keys; a batch that
-- overlaps finds the rest.
BEGIN;
SELECT count(*) FROM idempotency.once_many('batch.large', ARRAY(SELECT 'k' || n FROM generate_series(1, 10000) AS n));
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;
SELECT count(*) FROM idempotency.once_many('batch.large', ARRAY(SELECT 'k' || n FROM generate_series(15000, 5001, -1) AS n));
SELECT count(*) FROM idempotency.key WHERE scope = 'batch.large';
-- One key takes one, until the transaction ends.
BEGIN;
SELECT idempotency.once('batch.large', 'one');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- An array is no key: neither by its type, nor as the text that many drivers send
-- for one, in a parameter without a type.
SELECT pg_temp.error_of('SELECT idempotency.once(''array'', ARRAY[''m1'', ''m2''])');
PREPARE from_driver AS SELECT idempotency.once($1, $2);
EXECUTE from_driver('array', '{"m1","m2"}');
\set VERBOSITY sqlstate
-- (What drivers make of an array by themselves is a text like any other: a limit.)
SELECT idempotency.once('array', 'm1,m2'), idempotency.once('array', '(m1,m2)'), idempotency.once('array', '["m1", "m2"]');
SELECT idempotency.once('array', '[0:1]={m1,m2}');
SELECT idempotency.once('array', a::text) FROM (VALUES (1, '{}'::text[]), (2, '{a}'), (3, '{a,b}'), (4, ARRAY['a b', NULL, ''])) AS v (n, a) ORDER BY n;
\set VERBOSITY default
SELECT key, pg_temp.error_of(format('SELECT idempotency.once(''array'', %L)', key)) AS once, split_part(pg_temp.error_of(format('SELECT %L::text[]', key)), ':', 1) AS array
FROM (VALUES
	(1, '{}'), (2, '{m1}'), (3, '{"m1"}'), (4, '{m1,m2}'), (5, '{"m,1","m\"2","m\\3"}'), (6, '{m\,1, m\}2}'),
	(8, '{ m1 , "m2" }'), (9, '{m1,NULL}'), (10, '{{m1,m2},{m3,m4}}'), (11, '{ { "a" } }'), (12, '{""}'),
	(13, '{8e03978e-40d5-43dd-bc93-6894a57f9324,8E03978E-40D5-43DD-BC93-6894A57F9325}'),
	(14, '{"8e03978e-40d5-43dd-bc93-6894a57f9324"}'), (15, '{order 1}'),
	-- ones that are keys
	(20, '{8e03978e-40d5-43dd-bc93-6894a57f9324}'), (21, '{8E03978E-40D5-43DD-BC93-6894A57F9324}'),
	(22, '{"order": 1}'), (23, '{"order":"1"}'), (24, '{m1}/{m2}'), (7, ' {m1}'), (25, '{m1'), (26, 'm1}'), (27, '{m1,}'), (28, '{,m1}'),
	(29, '{,}'), (30, '{"m1}'), (31, '{m1\}'), (32, '{"m1""m2"}'), (33, '{m1}}'), (34, '{{m1}'), (35, '{m1}{m2}'),
	(36, '{"m1"m2}'), (37, '{m1"m2"}'), (38, '{m1{m2}}'), (39, '['), (40, '[m1,m2]'), (41, '{"m1\')
) AS v (n, key) ORDER BY n;
-- One that is too long for a key is said to be an array too.
SELECT pg_temp.error_of('SELECT idempotency.once(''array'', (SELECT array_agg(gen_random_uuid()) FROM generate_series(1, 1000))::text)');
SELECT count(*) FILTER (WHERE key LIKE '%m1","m2%') AS arrays FROM idempotency.key WHERE scope = 'array';

-- Where nothing can be written.
BEGIN READ ONLY;
SELECT pg_temp.error_of('SELECT idempotency.once(''once'', ''m1'')');
SELECT pg_temp.error_of('SELECT idempotency.once_many(''batch'', ARRAY[''m1''])');
COMMIT;
