--
-- once(): a consumer's inbox. It returns true the first time; once_many() handles many
-- messages in one statement.
--
\set SHOW_CONTEXT never

-- The SQLSTATE, message and detail of a statement.
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

-- It needs no complete(): the record is written at once, and rollback removes it.
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

-- A record has no response.
SELECT key, status, fingerprint, headers, response FROM idempotency.key WHERE scope = 'once' AND key = 'm1';
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.claim('once', 'm1', '{"any": "request"}');
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.try_claim('once', 'm1');
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.peek('once', 'm1');

-- once() and claim() share their records in both directions, so that a key has one
-- effect whichever function is used.
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

-- A key that this transaction holds raises an error.
BEGIN;
SELECT outcome FROM idempotency.claim('once', 'held');
SELECT idempotency.once('once', 'held');
\echo :SQLSTATE
ROLLBACK;

-- The retention comes from the setting or the argument, and must exceed the longest
-- redelivery delay.
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
-- An expired outcome is overwritten too, with all its columns.
BEGIN;
SELECT outcome FROM idempotency.claim('once', 'expired answer', '{"a": 1}', retention => '1 millisecond');
SELECT idempotency.fail('once', 'expired answer', '"no"', 400, '{"X": "1"}');
COMMIT;
SELECT pg_sleep(0.01);
SELECT idempotency.once('once', 'expired answer');
SELECT status, fingerprint, headers, response FROM idempotency.key WHERE scope = 'once' AND key = 'expired answer';

-- The rules for arguments are those of claim().
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

-- once_many() returns the new keys in bytewise order, each once.
SELECT * FROM idempotency.once_many('batch', ARRAY['m3', 'm1', 'm2']);
SELECT * FROM idempotency.once_many('batch', ARRAY['m4', 'm2', 'm0', 'm4', 'm4']);
SELECT * FROM idempotency.once_many('batch', ARRAY['m0', 'm1', 'm2', 'm3', 'm4']);
SELECT * FROM idempotency.once_many('batch', ARRAY['é', 'z', 'a', 'B', 'ab', 'a b', '10', '9', 'Ж']);

-- once(), once_many() and claim() share records, with or without a response.
SELECT idempotency.once('batch', 'm5');
BEGIN;
SELECT outcome FROM idempotency.claim('batch', 'm6');
SELECT idempotency.complete('batch', 'm6', '6');
SELECT * FROM idempotency.once_many('batch', ARRAY['m5', 'm6', 'm7']);
COMMIT;
SELECT idempotency.once('batch', 'm7');
SELECT outcome, status FROM idempotency.claim('batch', 'm7');

-- In a consumer: one statement applies the effect of each new message.
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

-- An empty array is accepted; NULL is not, and neither is an array with an invalid key.
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
-- The lower bound of the array does not matter.
SELECT * FROM idempotency.once_many('batch', '[5:6]={n5,n6}'::text[]);
-- The errors left nothing behind.
SELECT key FROM idempotency.key WHERE scope = 'batch' AND key LIKE 'n%' ORDER BY key;

-- A key that this transaction holds raises an error here too, and no key of the batch
-- is stored.
BEGIN;
SELECT outcome FROM idempotency.claim('batch', 'held');
SAVEPOINT before;
SELECT * FROM idempotency.once_many('batch', ARRAY['before', 'held', 'later']);
\echo :SQLSTATE
ROLLBACK TO before;
SELECT count(*) FROM idempotency.key WHERE scope = 'batch' AND key IN ('before', 'later');
-- The same key in another scope is not affected.
SELECT * FROM idempotency.once_many('batch 2', ARRAY['held']);
ROLLBACK;

-- Expired keys among others are new again.
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['a', 'c', 'e'], '1 millisecond');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['b', 'd'], '1 hour');
SELECT pg_sleep(0.01);
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['f', 'e', 'd', 'c', 'b', 'a'], '2 hours');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['f', 'e', 'd', 'c', 'b', 'a']);
SELECT key, ceil(extract(epoch FROM expires_at - created_at))::int AS seconds
	FROM idempotency.key WHERE scope = 'batch.expired' ORDER BY key;
-- The same holds for keys that this transaction stored.
BEGIN;
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y'], '1 microsecond');
SELECT pg_sleep(0.001);
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y', 'z'], '1 hour');
SELECT * FROM idempotency.once_many('batch.expired', ARRAY['x', 'y', 'z'], '1 hour');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'batch.expired' AND key IN ('x', 'y', 'z');

-- All records of a batch expire at the same time.
SELECT count(*) FROM idempotency.once_many('batch.end', ARRAY['a', 'b', 'c'], '1 month');
SELECT count(DISTINCT expires_at), bool_and(isfinite(expires_at)) FROM idempotency.key WHERE scope = 'batch.end';
SELECT * FROM idempotency.once_many('batch.end', ARRAY['d'], '-1 second');
SELECT expires_at FROM idempotency.key WHERE scope = 'batch.end' AND key = 'd';

-- Two thousand keys in one statement take no lock per key; an overlapping batch returns
-- the other keys.
BEGIN;
SELECT count(*) FROM idempotency.once_many('batch.large', ARRAY(SELECT 'k' || n FROM generate_series(1, 2000) AS n));
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
SELECT count(*) FROM idempotency.once_many('batch.large', ARRAY(SELECT 'k' || n FROM generate_series(3000, 1001, -1) AS n));
SELECT count(*) FROM idempotency.key WHERE scope = 'batch.large';
-- not distributed: locks of keys
-- once() with one key takes one lock, until the transaction ends.
BEGIN;
SELECT idempotency.once('batch.large', 'one');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
-- both layouts

-- An array is refused: by its type, and as the text that many drivers send in an untyped
-- parameter.  The text of an object is refused too, by each function that takes a name.
SELECT split_part(pg_temp.error_of('SELECT idempotency.once(''array'', ARRAY[''m1'', ''m2''])'), '. ', 1) AS error_of;
PREPARE from_driver AS SELECT idempotency.once($1, $2);
EXECUTE from_driver('array', '{"m1","m2"}');
\set VERBOSITY sqlstate
-- Other texts that drivers make of an array are accepted: a known limit.
SELECT idempotency.once('array', 'm1,m2'), idempotency.once('array', '(m1,m2)'), idempotency.once('array', '["m1", "m2"]');
SELECT idempotency.once('array', '[0:1]={m1,m2}');
SELECT idempotency.once('array', a::text) FROM (VALUES (1, '{}'::text[]), (2, '{a}'), (3, '{a,b}'), (4, ARRAY['a b', NULL, ''])) AS v (n, a) ORDER BY n;
\set VERBOSITY default
SELECT key, pg_temp.error_of(format('SELECT idempotency.once(''array'', %L)', key)) AS once, split_part(pg_temp.error_of(format('SELECT %L::text[]', key)), ':', 1) AS array
FROM (VALUES
	(1, '{}'), (2, '{m1}'), (3, '{"m1"}'), (4, '{m1,m2}'), (5, '{"m,1","m\"2","m\\3"}'), (6, '{m\,1, m\}2}'),
	(8, '{ m1 , "m2" }'), (9, '{m1,NULL}'), (10, '{{m1,m2},{m3,m4}}'), (11, '{ { "a" } }'), (12, '{""}'),
	(13, '{8e03978e-40d5-43dd-bc93-6894a57f9324,8E03978E-40D5-43DD-BC93-6894A57F9325}'),
	(14, '{"8e03978e-40d5-43dd-bc93-6894a57f9324"}'), (15, '{order 1}'), (7, '{"m}1"}'),
	(16, '{"{\"id\":1}"}'), (17, '{{order}}'), (18, '[object Object]'), (19, '[object Promise]'),
	-- Keys that only resemble an array.
	(20, '{8e03978e-40d5-43dd-bc93-6894a57f9324}'), (21, '{8E03978E-40D5-43DD-BC93-6894A57F9324}'),
	(22, '{"order": 1}'), (32, '{ "a\"b{" :{}}'), (33, '{m1}/{m2}'), (38, '{"a}'),  (34, '[object store] 17'), (35, '{"a":'), (36, '{"'), (37, ' {m1}'), (23, '{m1'), (24, 'm1}'), (25, '{'), (26, '}'), (27, '['), (28, '[m1,m2]'), (29, '{"m1\'), (30, 'object'), (31, '[Object Object]')
) AS v (n, key) ORDER BY n;
SELECT call, pg_temp.error_of(format(call, key)) FROM (VALUES
	('SELECT outcome FROM idempotency.claim(''array'', %L)'), ('SELECT outcome FROM idempotency.try_claim(''array'', %L)'),
	('SELECT idempotency.once(''array'', %L)'),
	('SELECT idempotency.once_many(''array'', ARRAY[''m1'', %L])'), ('SELECT outcome FROM idempotency.peek(''array'', %L)'),
	('SELECT outcome FROM idempotency.claim(%L, ''k'')'), ('SELECT idempotency.natural_key(''order'', %L)'),
	('SELECT idempotency.derive_key(%L, ''k'', ''step'')'), ('SELECT idempotency.derive_key(''s'', %L, ''step'')'),
	('SELECT idempotency.derive_key(''s'', ''k'', %L)')) AS c (call),
	(VALUES ('{}'), ('[object Object]')) AS k (key);
SELECT outcome FROM idempotency.claim('array', '{8e03978e-40d5-43dd-bc93-6894a57f9324}', lease => '1 min');
SELECT outcome FROM idempotency.claim('array', '[object', lease => '1 min');
SELECT count(*) FILTER (WHERE key LIKE '%m1","m2%') AS arrays FROM idempotency.key WHERE scope = 'array';

-- Read-only transactions.
BEGIN READ ONLY;
SELECT pg_temp.error_of('SELECT idempotency.once(''once'', ''m1'')');
SELECT pg_temp.error_of('SELECT idempotency.once_many(''batch'', ARRAY[''m1''])');
COMMIT;

-- not distributed: the primary key of that layout has another column
-- An administrator's unique index: a conflict there is the server's error, and stores nothing.
CREATE UNIQUE INDEX key_by_key ON idempotency.key (key) WHERE scope LIKE 'index%';
SELECT idempotency.once('index 1', 'k');
SELECT pg_temp.error_of('SELECT idempotency.once(''index 2'', ''k'')');
SELECT pg_temp.error_of('SELECT idempotency.once_many(''index 2'', ARRAY[''a'', ''k''])');
SELECT scope, key FROM idempotency.keys WHERE scope LIKE 'index%';
DROP INDEX idempotency.key_by_key;
-- both layouts
