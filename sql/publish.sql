-- extension only: the outbox
--
-- publish(): its arguments, the stored event, rollback, and the requirements on the
-- table and the sequence.
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

-- The events of this file in the outbox, in order.
CREATE FUNCTION pg_temp.events() RETURNS TABLE (topic text, aggregate_id text, type text, payload json, headers json) LANGUAGE sql AS $$
	SELECT aggregatetype, aggregateid, type, payload, headers FROM idempotency.outbox
		WHERE aggregatetype LIKE 'publish%' ORDER BY seq
$$;
-- The headers that an event gets.
CREATE FUNCTION pg_temp.headers(given idempotency.document DEFAULT NULL) RETURNS text LANGUAGE sql AS $$
	SELECT idempotency.publish('headers', '1', headers => given);
	SELECT headers::text FROM idempotency.outbox ORDER BY seq DESC LIMIT 1
$$;

--
-- The stored event
--

SELECT idempotency.publish('publish', '{"b" : 1,  "a":[ ]}', 'order 7', 'placed', '{ "trace" : "a1" }', '00000000-0000-0000-0000-0000000000aa');
SELECT idempotency.publish('publish', NULL) IS NOT NULL AS published;
SELECT idempotency.publish('publish', 'null') IS NOT NULL AS published;
SELECT * FROM pg_temp.events();
SELECT bool_and(txid::text::bigint BETWEEN 3 AND pg_snapshot_xmax(pg_current_snapshot())::text::bigint) AS transaction_noted,
		bool_and(published_at BETWEEN now() - interval '1 hour' AND now()) AS time_noted
	FROM idempotency.outbox WHERE aggregatetype = 'publish';

-- Without an id, the event gets a new id, ordered by time, which publish() returns.
CREATE TEMPORARY TABLE ids AS SELECT n, idempotency.publish('publish ids', to_json(n)) AS id FROM generate_series(1, 50) AS n;
SELECT count(DISTINCT id), bool_and(substr(id::text, 15, 1) = '7') AS version_7 FROM ids;
SELECT count(*), bool_and(n = payload::text::int) AS returned, array_agg(id ORDER BY seq) = array_agg(id ORDER BY id) AS ordered
	FROM ids JOIN idempotency.outbox USING (id);
-- publish() does not look up a given id. Publishing the same id again makes two events,
-- which consumers recognise as one.
SELECT idempotency.publish('publish', '"again"', event_id => '00000000-0000-0000-0000-0000000000aa');
SELECT count(*), count(DISTINCT seq) FROM idempotency.outbox WHERE id = '00000000-0000-0000-0000-0000000000aa';

-- The time is that of the call, not that of the start of the transaction.
BEGIN;
SELECT count(pg_sleep(0.002)), count(idempotency.publish('publish time', '1')) FROM generate_series(1, 3);
SELECT count(DISTINCT published_at), min(published_at) > now() AS later FROM idempotency.outbox WHERE aggregatetype = 'publish time';
COMMIT;

-- Payload and headers can be json, jsonb, text or a literal. All are kept byte for
-- byte, except jsonb, which has its own format.
DELETE FROM idempotency.outbox;
SELECT count(idempotency.publish('publish', '{"n" :1, "n": 2}'::json, headers => '{"n" :1, "n": 2}'::json)),
		count(idempotency.publish('publish', '{"n" :1, "n": 2}'::jsonb, headers => '{"n" :1, "n": 2}'::jsonb)),
		count(idempotency.publish('publish', '{"n" :1, "n": 2}'::text, headers => '{"n" :1, "n": 2}'::text)),
		count(idempotency.publish('publish', to_json(ARRAY[1.50, 1e3]), headers => json_build_object('n', 1)));
PREPARE untyped AS SELECT count(idempotency.publish('publish', $1, headers => $2));
EXECUTE untyped(' "untyped" ', ' { } ');
SELECT payload, headers FROM pg_temp.events();
SELECT pg_temp.error_of(format('SELECT idempotency.publish(%L, %L)', 'publish', p)) FROM unnest('{"",x,"{\"a\":}","1 2"}'::text[]) AS p;
SELECT pg_temp.error_of($$SELECT idempotency.publish('publish', '{"a":}'::text)$$);

-- A large payload is returned byte for byte, compressible or not, from the table or by
-- fetch(), whatever its source.
SELECT idempotency.subscribe('publish', '{publish large}');
SELECT string_agg(md5(n::text), '') AS noise FROM generate_series(1, 35000) AS n \gset
CREATE TEMPORARY TABLE large (name text, body json);
ALTER TABLE large ALTER body SET STORAGE EXTERNAL;
INSERT INTO large VALUES ('compressible', format('{"x" :  "%s"}', repeat('x', 1048576))::json), ('noise', format('{"x" :  "%s"}', :'noise')::json);
SELECT pg_temp.error_of($$SELECT idempotency.publish('publish large', to_json(repeat('x', 1048575)))$$), pg_temp.error_of($$SELECT idempotency.publish('publish large', to_json(repeat('x', 1048575 - 12)), headers => '{"h": "large"}')$$);
BEGIN;
SELECT idempotency.publish('publish large', to_json(repeat('x', 1048574))) IS NOT NULL AS largest;
ROLLBACK;
SET idempotency.max_payload_size = '4MB';
SELECT count(idempotency.publish('publish large', body, type => name, headers => json_build_object('h', body))) FROM large;
DROP TABLE large;
RESET idempotency.max_payload_size;
SELECT type, octet_length(payload::text), md5(payload::text) = md5(format('{"x" :  "%s"}', CASE type WHEN 'noise' THEN :'noise' ELSE repeat('x', 1048576) END)) AS same,
		md5(headers -> 'h' ->> 'x') = md5(payload ->> 'x') AS headers_same
	FROM idempotency.fetch('publish');
SELECT idempotency.ack('publish', batch) FROM idempotency.position WHERE subscription = 'publish';
SELECT idempotency.unsubscribe('publish');

--
-- Names
--

-- Names of 255 characters are stored and found, whatever characters they contain.
DELETE FROM idempotency.outbox;
CREATE TEMPORARY TABLE names (n int PRIMARY KEY, name text);
INSERT INTO names VALUES (1, repeat('n', 255)), (2, repeat('é', 255)), (3, repeat('😀', 255)), (4, $$it's "quoted" \ and %s, %I, $1$$), (5, '*'), (6, '\*'), (7, ' '),
	(8, '_%'), (9, '{a,b}'), (10, 'NULL');
SELECT count(idempotency.publish(name, to_json(n), name, name)) FROM names;
SELECT n, aggregatetype = name AND aggregateid = name AND type = name AS same
	FROM names LEFT JOIN idempotency.outbox ON payload::text::int = n ORDER BY n;
SELECT pg_temp.error_of(format('SELECT idempotency.publish(%s)', arguments)) AS error FROM unnest(ARRAY[
	'NULL, ''1''',
	''''', ''1''',
	'repeat(''t'', 256), ''1''',
	'repeat(''é'', 256), ''1''',
	'E''a\nb'', ''1''',
	'E''a\x7f'', ''1''',
	'''publish'', ''1'', ''''',
	'''publish'', ''1'', repeat(''a'', 256)',
	'''publish'', ''1'', E''a\tb''',
	'''publish'', ''1'', type => ''''',
	'''publish'', ''1'', type => repeat(''t'', 256)',
	'''publish'', ''1'', type => E''\x01''',
	'''publish'', ''1'', headers => ''[]''',
	'''publish'', ''1'', headers => ''"{}"''',
	'''publish'', ''1'', headers => ''null''',
	'''publish'', ''1'', headers => '' 1 ''',
	'''publish'', ''1'', headers => ''{''',
	'''publish'', ''1'', event_id => ''x''']) AS arguments;
SELECT count(*) FROM idempotency.outbox;

--
-- Headers
--

-- Without a claim, the headers are those passed.
SELECT pg_temp.headers(), pg_temp.headers(' {} '), pg_temp.headers('{"a" : "}"}');

-- Inside a claim, the headers name its scope and key,
BEGIN;
SELECT outcome FROM idempotency.claim('publish', 'key "1" \ é');
SELECT pg_temp.headers();
SELECT pg_temp.headers(' { } ');
SELECT pg_temp.headers(E' \n{ "a" : "}" }\t ');
-- unless the caller passes these headers: both or one of them, at any place.
SELECT pg_temp.headers('{"idempotency-scope":1,"idempotency-key" : null}');
SELECT pg_temp.headers('{"idempotency-key": "mine"}');
SELECT pg_temp.headers(E'{"a": [{"b": "\\\\"}, "]"], "idempotency-scope"\t\n: "mine"}');
-- A member of that name at a deeper level, as a value, as a part of a name or in
-- another spelling does not count.
SELECT pg_temp.headers('{"a": {"idempotency-scope": 1}, "b": [{"idempotency-key": 1}]}');
SELECT pg_temp.headers('{"a": "idempotency-scope", "b": ["idempotency-key"], "c": "\"idempotency-key\": 1"}');
SELECT pg_temp.headers('{"Idempotency-Key": 1, "idempotency-key2": 2, "x-idempotency-scope": 3, "\"idempotency-scope": 4, "idempotency-scope\"": 5}');
SELECT (pg_temp.headers('{"idempotency\u002dkey": "mine"}')::jsonb) ->> 'idempotency-key' AS the_callers_counts;
-- After complete(), the current claim is still the one of the headers.
SELECT idempotency.complete('publish', 'key "1" \ é', '1');
SELECT pg_temp.headers();
COMMIT;
-- It ends with the transaction,
SELECT pg_temp.headers();
-- and with the rollback of the claim; a replay is not a claim.
SELECT idempotency.once('publish 3', 'stored');
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('publish', '2');
SELECT pg_temp.headers();
ROLLBACK TO s;
SELECT pg_temp.headers();
SELECT outcome FROM idempotency.claim('publish', 'key "1" \ é');
SELECT pg_temp.headers();
SELECT outcome FROM idempotency.claim('publish', '3');
SELECT outcome FROM idempotency.claim('publish 2', '3');
SELECT pg_temp.headers();
SELECT outcome FROM idempotency.claim('publish 3', 'stored');
SELECT pg_temp.headers();
SAVEPOINT s;
SELECT idempotency.once_many('publish 2', '{m1,m2}'::text[]);
SELECT pg_temp.headers();
ROLLBACK TO s;
SELECT idempotency.release('publish 2', '3');
SELECT pg_temp.headers();
ROLLBACK;
-- A lease that this transaction took counts as a claim, and so does a key of once().
BEGIN;
SELECT outcome FROM idempotency.claim('publish', '4', lease => '1 min');
SELECT pg_temp.headers();
SELECT idempotency.once('publish', 'm1');
SELECT pg_temp.headers();
SELECT idempotency.once('publish', 'm1');
SELECT pg_temp.headers();
SELECT idempotency.once_many('publish', '{m1,m2}'::text[]);
SELECT pg_temp.headers();
ROLLBACK;

--
-- Rollback
--

DELETE FROM idempotency.outbox;
BEGIN;
SELECT idempotency.publish('publish', '"rolled back"') IS NOT NULL AS published;
ROLLBACK;
BEGIN;
SELECT idempotency.publish('publish', '1') IS NOT NULL AS published;
SAVEPOINT a;
SELECT idempotency.publish('publish', '"undone"') IS NOT NULL AS published;
SAVEPOINT b;
SELECT idempotency.publish('publish', '"undone, too"') IS NOT NULL AS published;
RELEASE b;
ROLLBACK TO a;
SELECT idempotency.publish('publish', '2') IS NOT NULL AS published;
SAVEPOINT c;
SELECT idempotency.publish('publish', '3') IS NOT NULL AS published;
RELEASE c;
COMMIT;
DO $$ BEGIN
	PERFORM idempotency.publish('publish', '4');
	BEGIN
		PERFORM idempotency.publish('publish', '"caught"');
		RAISE EXCEPTION 'no';
	EXCEPTION WHEN raise_exception THEN
		PERFORM idempotency.publish('publish', '5');
	END;
END $$;
SELECT payload FROM pg_temp.events();
-- All events of one transaction have its id, whatever the savepoint.
SELECT count(DISTINCT txid), bool_and(seq > 0) FROM idempotency.outbox WHERE payload::text IN ('1', '2', '3');

-- publish() writes, so a read-only transaction gets an error before a number is
-- assigned.
SELECT last_value, is_called FROM idempotency.outbox_seq \gset before_
BEGIN READ ONLY;
SELECT idempotency.publish('', '1');
\echo :SQLSTATE
ROLLBACK;
SELECT last_value = :before_last_value AS none_drawn FROM idempotency.outbox_seq;
-- Every isolation level works.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idempotency.publish('publish', '6') IS NOT NULL AS published;
COMMIT;

--
-- The table and the sequence
--

-- publish() checks the properties that delivery needs before it inserts the event.
CREATE FUNCTION pg_temp.altered(alteration text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE alteration;
	result := pg_temp.error_of('SELECT idempotency.publish(''publish'', ''"refused"'')');
	RAISE EXCEPTION USING MESSAGE = result, ERRCODE = 'UNDO1';
EXCEPTION WHEN SQLSTATE 'UNDO1' THEN
	RETURN SQLERRM;
END
$$;
CREATE FUNCTION pg_temp.trigger() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
SELECT n, pg_temp.altered(alteration) FROM unnest(ARRAY[
	'ALTER SEQUENCE idempotency.outbox_seq CACHE 20',
	'ALTER SEQUENCE idempotency.outbox_seq INCREMENT 2',
	'ALTER SEQUENCE idempotency.outbox_seq INCREMENT -1',
	'ALTER SEQUENCE idempotency.outbox_seq CYCLE',
	'ALTER SEQUENCE idempotency.outbox_seq SET UNLOGGED',
	'ALTER SEQUENCE idempotency.outbox_seq RENAME TO renamed',
	'ALTER TABLE idempotency.outbox SET UNLOGGED',
	'ALTER TABLE idempotency.outbox ADD COLUMN mine text',
	'DELETE FROM idempotency.outbox; ALTER TABLE idempotency.outbox ALTER aggregateid SET NOT NULL',
	'ALTER TABLE idempotency.outbox ALTER aggregatetype DROP NOT NULL',
	'ALTER TABLE idempotency.outbox RENAME payload TO body',
	'ALTER TABLE idempotency.outbox ALTER payload SET DEFAULT ''{}''',
	'ALTER TABLE idempotency.outbox ADD CHECK (seq > 0)',
	'ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_pkey',
	'ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_pkey, ADD PRIMARY KEY (id)',
	'ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_pkey, ADD PRIMARY KEY (seq, id)',
	'ALTER TABLE idempotency.outbox ENABLE ROW LEVEL SECURITY',
	'CREATE RULE mine AS ON INSERT TO idempotency.outbox DO INSTEAD NOTHING',
	'CREATE TRIGGER mine BEFORE INSERT ON idempotency.outbox FOR EACH ROW EXECUTE FUNCTION pg_temp.trigger()',
	'CREATE TRIGGER mine AFTER INSERT ON idempotency.outbox FOR EACH STATEMENT EXECUTE FUNCTION pg_temp.trigger()',
	'DROP TRIGGER refuse_update ON idempotency.outbox',
	'CREATE TABLE inherits () INHERITS (idempotency.outbox)']) WITH ORDINALITY AS u (alteration, n) ORDER BY n;
-- The hint for a dropped trigger is the statement that creates it again.
BEGIN;
DROP TRIGGER refuse_update ON idempotency.outbox;
DO $$
DECLARE
	hint text;
BEGIN
	PERFORM idempotency.publish('publish', '1');
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
	EXECUTE substring(hint FROM 'CREATE TRIGGER .*\)');
END
$$;
SELECT idempotency.publish('publish', '1') IS NOT NULL AS published;
ROLLBACK;
-- publish() is the only writer of events: UPDATE is refused, also for a superuser and where
-- MERGE or INSERT ... ON CONFLICT does it.
UPDATE idempotency.outbox SET payload = '"changed"';
\echo :SQLSTATE
SELECT name, pg_temp.error_of(statement) FROM (VALUES
	('no row', 'UPDATE idempotency.outbox SET published_at = now() WHERE false'),
	('only', 'UPDATE ONLY idempotency.outbox SET seq = seq + 1'),
	('on conflict', 'INSERT INTO idempotency.outbox SELECT * FROM idempotency.outbox ON CONFLICT (seq) DO UPDATE SET type = ''x'''),
	('merge', 'MERGE INTO idempotency.outbox AS o USING idempotency.outbox AS n ON o.seq = n.seq WHEN MATCHED THEN UPDATE SET type = ''x''')) AS u (name, statement);
-- COPY works, as a restore uses it, and so does a session that replicates.
COPY idempotency.outbox (seq, txid, published_at, id, bucket, bytes, aggregatetype, payload) FROM stdin;
-1	3	2026-01-01 00:00:00+00	00000000-0000-0000-0000-0000000000cc	0	0	restored	"restored"
\.
DELETE FROM idempotency.outbox WHERE seq = -1 RETURNING aggregatetype;
SET session_replication_role = replica;
BEGIN;
UPDATE idempotency.outbox SET type = 'replicated';
SELECT DISTINCT type FROM idempotency.outbox;
ROLLBACK;
RESET session_replication_role;
SELECT idempotency.publish('publish', '"published"') IS NOT NULL AS published;
DELETE FROM idempotency.outbox WHERE payload::text = '"published"';
-- Harmless changes are accepted: other storage settings, and another index, which gets
-- its entry.
CREATE INDEX outbox_mine ON idempotency.outbox ((payload::text));
ALTER TABLE idempotency.outbox SET (fillfactor = 90);
SELECT idempotency.publish('publish', '"indexed"') IS NOT NULL AS published;
SET enable_seqscan = off;
SELECT aggregatetype FROM idempotency.outbox WHERE payload::text = '"indexed"';
RESET enable_seqscan;
DROP INDEX idempotency.outbox_mine;
ALTER TABLE idempotency.outbox RESET (fillfactor);
-- A constraint that refuses an event leaves its number unused.
CREATE UNIQUE INDEX outbox_mine ON idempotency.outbox (id);
SELECT idempotency.publish('publish', '7', event_id => '00000000-0000-0000-0000-0000000000bb');
SELECT pg_temp.error_of('SELECT idempotency.publish(''publish'', ''8'', event_id => ''00000000-0000-0000-0000-0000000000bb'')');
DROP INDEX idempotency.outbox_mine;
SELECT idempotency.publish('publish', '9') IS NOT NULL AS published;
SELECT payload FROM pg_temp.events() WHERE payload::text > '5';

-- lastval() returns the last number drawn from any sequence, here the number of the
-- event.
CREATE TEMP TABLE numbered (n serial, what text);
INSERT INTO numbered (what) SELECT 'and publishes' FROM idempotency.publish('publish', '10');
SELECT lastval() = currval('numbered_n_seq') AS mine;
SELECT idempotency.publish('publish', '11') IS NOT NULL AS published;
SELECT lastval() = currval('idempotency.outbox_seq') AS of_the_event;

DELETE FROM idempotency.outbox;
