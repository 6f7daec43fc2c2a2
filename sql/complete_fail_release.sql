--
-- complete(), fail() and release(): the three ways to finish a claim, and the error for
-- a transaction that does not hold the claim.
--
\set SHOW_CONTEXT never

CREATE TABLE charge (id int PRIMARY KEY, amount numeric NOT NULL);

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
-- complete() stores a success
--

-- The default status is 200, also for NULL. complete() returns the response byte for
-- byte as every retry gets it.
BEGIN;
SELECT (idempotency.claim('complete', k)).outcome FROM unnest('{a,b,c,d}'::text[]) AS k;
SELECT idempotency.complete('complete', 'a');
SELECT idempotency.complete('complete', 'b', '{"id" :   2}', 201);
SELECT idempotency.complete('complete', 'c', '[3]', NULL, '{"ETag": "3"}');
SELECT idempotency.complete(scope => 'complete', key => 'd', headers => '{}', response => 'null');
COMMIT;
WITH c AS (SELECT k, idempotency.claim('complete', k) AS op FROM unnest('{a,b,c,d}'::text[]) AS k)
	SELECT k AS key, (op).outcome, (op).replayed, (op).status, (op).headers, (op).response, (op).failed FROM c;
-- SQL NULL means no response; JSON null is a response.
SELECT key, response IS NULL AS no_response, headers IS NULL AS no_headers
	FROM idempotency.key WHERE scope = 'complete' ORDER BY key;

-- The response can be json, jsonb, text, varchar or an untyped parameter.
BEGIN;
SELECT (idempotency.claim('complete', k)).outcome FROM unnest('{json,jsonb,text,varchar,parameter}'::text[]) AS k;
SELECT idempotency.complete('complete', 'json', '{"b":1,  "a":2}'::json, 200, '{"b":1,  "a":2}'::json);
SELECT idempotency.complete('complete', 'jsonb', '{"b":1,  "a":2}'::jsonb, 200, '{"b":1,  "a":2}'::jsonb);
SELECT idempotency.complete('complete', 'text', '{"b":1,  "a":2}'::text, 200, '{"b":1,  "a":2}'::text);
SELECT idempotency.complete('complete', 'varchar', '{"b":1,  "a":2}'::varchar, 200, '{"b":1,  "a":2}'::varchar);
PREPARE untyped AS SELECT idempotency.complete($1, $2, $3, $4, $5);
EXECUTE untyped('complete', 'parameter', '{"b":1,  "a":2}', 200, '{"b":1,  "a":2}');
DEALLOCATE untyped;
WITH c AS (SELECT k, idempotency.try_claim('complete', k) AS op FROM unnest('{json,jsonb,text,varchar,parameter}'::text[]) AS k)
	SELECT k AS key, (op).response, (op).headers FROM c;
COMMIT;

--
-- fail() stores a final failure, which retries replay
--

BEGIN;
SELECT (idempotency.claim('fail', k)).outcome FROM unnest('{a,b}'::text[]) AS k;
SELECT idempotency.fail('fail', 'a', '{"title": "card declined"}', 402, '{"Content-Type": "application/problem+json"}');
SELECT idempotency.fail('fail', 'b', NULL, 404);
COMMIT;
WITH c AS (SELECT k, idempotency.claim('fail', k) AS op FROM unnest('{a,b}'::text[]) AS k)
	SELECT k AS key, (op).outcome, (op).replayed, (op).status, (op).headers, (op).response, (op).failed FROM c;

-- A failure has no default status.
BEGIN;
SELECT outcome FROM idempotency.claim('fail', 'c');
SELECT idempotency.fail('fail', 'c', '"reason"', NULL);
\echo :SQLSTATE
ROLLBACK;

-- fail() commits all earlier writes of the transaction. Therefore the writes belong in
-- an inner block, whose error rolls them back, and fail() is called outside that block.
CREATE FUNCTION charge_create(p_key text, p_id int, p_amount numeric) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('charge.limited', p_key, jsonb_build_object('id', p_id, 'amount', p_amount));
	IF op.replayed THEN
		RETURN op.response;
	END IF;
	BEGIN
		INSERT INTO charge VALUES (p_id, p_amount);
		IF p_amount > 1000 THEN
			RAISE EXCEPTION 'limit exceeded' USING ERRCODE = 'P0402';
		END IF;
		RETURN idempotency.complete('charge.limited', p_key, json_build_object('id', p_id), 201);
	EXCEPTION WHEN SQLSTATE 'P0402' THEN
		RETURN idempotency.fail('charge.limited', p_key, json_build_object('error', SQLERRM), 402);
	END;
END
$$;
SELECT charge_create('k1', 1, 100);
SELECT charge_create('k1', 1, 100);
SELECT charge_create('k2', 2, 5000);
SELECT charge_create('k2', 2, 5000);
SELECT * FROM charge;
SELECT key, state, status FROM idempotency.keys WHERE scope = 'charge.limited' ORDER BY key;
-- An unexpected error stores nothing, so the retry runs the operation.
SELECT charge_create('k3', 1, 100);
DELETE FROM charge;
SELECT charge_create('k3', 1, 100);

--
-- Accepted outcomes
--

-- An HTTP status: 100 to 599.
BEGIN;
SELECT outcome FROM idempotency.claim('status', 'a');
SELECT s AS status, pg_temp.error_of(format('SELECT idempotency.complete(''status'', ''a'', status => %s)', s)) AS complete,
		pg_temp.error_of(format('SELECT idempotency.fail(''status'', ''a'', NULL, %s)', s)) AS fail
	FROM unnest('{99,600,0,-1,2147483647}'::int[]) AS s;
SELECT (idempotency.claim('status', k)).outcome FROM unnest('{b,c,d}'::text[]) AS k;
SELECT idempotency.complete('status', 'a', status => 100);
SELECT idempotency.complete('status', 'b', status => 599);
SELECT idempotency.fail('status', 'c', NULL, 100);
SELECT idempotency.fail('status', 'd', NULL, 599);
COMMIT;
SELECT key, state, status FROM idempotency.keys WHERE scope = 'status' ORDER BY key;

-- Headers are a JSON object.
BEGIN;
SELECT outcome FROM idempotency.claim('headers', 'a');
SELECT h AS headers, pg_temp.error_of(format('SELECT idempotency.complete(''headers'', ''a'', headers => %L)', h)) AS complete,
		pg_temp.error_of(format('SELECT idempotency.fail(''headers'', ''a'', NULL, 400, %L)', h)) AS fail
	FROM unnest(ARRAY['[]', '[{}]', '"X: 1"', ' 42', 'null', 'true']) AS h;
SELECT idempotency.complete('headers', 'a', headers => E' \n\t\r{"X": 1}');
COMMIT;
SELECT headers::text = E' \n\t\r{"X": 1}' AS same FROM idempotency.claim('headers', 'a');

-- Input that is not JSON raises PostgreSQL's own error.
BEGIN;
SELECT outcome FROM idempotency.claim('json', 'a');
\set VERBOSITY sqlstate
SAVEPOINT before;
SELECT idempotency.complete('json', 'a', '{"id": }');
ROLLBACK TO before;
SELECT idempotency.complete('json', 'a', '{}', 200, 'X: 1'::text);
ROLLBACK TO before;
\set VERBOSITY default
SELECT idempotency.complete('json', 'a', '{}');
COMMIT;

-- Response and headers together can have idempotency.max_response_size bytes, counted
-- as passed.
BEGIN;
SET LOCAL idempotency.max_response_size = '1kB';
SELECT (idempotency.claim('size', k)).outcome FROM unnest('{exact,with headers,multi-byte,too large}'::text[]) AS k;
SELECT octet_length(idempotency.complete('size', 'exact', to_json(repeat('x', 1022)))::text);
SELECT octet_length(idempotency.complete('size', 'with headers', to_json(repeat('x', 1010)), 200, '{"X": "1"}  ')::text);
SELECT octet_length(idempotency.complete('size', 'multi-byte', to_json(repeat('ж', 511)))::text);
SAVEPOINT before;
SELECT idempotency.complete('size', 'too large', to_json(repeat('x', 1023)));
\echo :SQLSTATE
ROLLBACK TO before;
SELECT idempotency.complete('size', 'too large', to_json(repeat('x', 1011)), 200, '{"X": "1"}  ');
ROLLBACK TO before;
SELECT idempotency.complete('size', 'too large', to_json(repeat('ж', 512)));
ROLLBACK TO before;
SELECT idempotency.complete('size', 'too large', NULL, headers => json_build_object('X', repeat('x', 1020)));
ROLLBACK TO before;
SELECT idempotency.fail('size', 'too large', to_json(repeat('x', 1023)), 400);
ROLLBACK TO before;
-- The claim stays open.
SELECT idempotency.fail('size', 'too large', '"the answer is too large"', 500);
COMMIT;
SELECT key, abs(status) AS status, octet_length(response::text) AS bytes FROM idempotency.key WHERE scope = 'size' ORDER BY key;

-- With omit_large, such an outcome is stored without its response, and its headers say so,
-- also those that jsonb would refuse. The call returns the response all the same.
BEGIN;
SET LOCAL idempotency.max_response_size = '1kB';
SELECT (idempotency.claim('omit', k)).outcome FROM unnest('{fits,response,headers,no headers,failure,no jsonb,empty}'::text[]) AS k;
SELECT octet_length(idempotency.complete('omit', 'fits', to_json(repeat('x', 1010)), 201, '{"X": "1"}  ', omit_large => true)::text);
SELECT octet_length(idempotency.complete('omit', 'response', to_json(repeat('x', 1011)), 201, '{"Location":  "/1"}', omit_large => true)::text);
SELECT idempotency.complete('omit', 'headers', '1', 201, json_build_object('X', repeat('x', 1020)), omit_large => true);
SELECT octet_length(idempotency.complete('omit', 'no headers', to_json(repeat('x', 1023)), omit_large => true)::text);
SELECT octet_length(idempotency.fail('omit', 'failure', to_json(repeat('x', 1023)), 402, omit_large => true)::text);
SELECT octet_length(idempotency.complete('omit', 'no jsonb', to_json(repeat('x', 1023)), 200, '{"X": {"\u0000": 1e999999}} ', omit_large => true)::text);
SELECT octet_length(idempotency.complete('omit', 'empty', to_json(repeat('x', 1023)), 200, '{ }', omit_large => true)::text);
COMMIT;
SELECT token AS own FROM idempotency.claim('omit', 'leased', lease => '1 min') \gset
SELECT octet_length(idempotency.complete('omit', 'leased', to_json(repeat('x', 1048576)), token => :own, omit_large => true)::text);
SELECT key, abs(status) AS status, status < 0 AS failed, octet_length(response::text) AS bytes, headers
	FROM idempotency.key WHERE scope = 'omit' ORDER BY key;
SELECT outcome, status, response IS NULL AS omitted, headers ->> 'Idempotency-Response' AS why FROM idempotency.claim('omit', 'leased');
-- Only the size is forgiven; NULL is false.
BEGIN;
SELECT outcome FROM idempotency.claim('omit', 'wrong');
SAVEPOINT before;
SELECT idempotency.complete('omit', 'wrong', to_json(repeat('x', 1048576)), headers => '[]', omit_large => true);
ROLLBACK TO before;
SELECT idempotency.complete('omit', 'wrong', to_json(repeat('x', 1048576)), omit_large => NULL);
ROLLBACK;

-- The default limit is 1 MB, and every byte is replayed.
BEGIN;
SELECT outcome FROM idempotency.claim('size', '1 MB');
SELECT pg_temp.error_of($$SELECT idempotency.complete('size', '1 MB', to_json(repeat('x', 1048575)))$$);
SELECT octet_length(idempotency.complete('size', '1 MB', to_json(string_agg(md5(n::text), '')::char(1048574)))::text)
	FROM generate_series(1, 32768) AS n;
COMMIT;
SELECT octet_length(response::text) AS bytes, md5(response::text) = md5('"' || m || '"') AS same
	FROM idempotency.claim('size', '1 MB'),
		(SELECT string_agg(md5(n::text), '')::char(1048574)::text AS m FROM generate_series(1, 32768) AS n) AS made;

--
-- release() gives up the claim
--

-- release() stores nothing, and the next retry runs.
BEGIN;
SELECT outcome FROM idempotency.claim('release', 'a', '{"amount": 1}');
SELECT idempotency.release('release', 'a');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'release';
BEGIN;
SELECT outcome FROM idempotency.claim('release', 'a', '{"amount": 2}');
ROLLBACK;

-- The same transaction can claim the key again, with another request.
BEGIN;
SELECT outcome FROM idempotency.claim('release', 'b', '{"amount": 1}');
SELECT idempotency.release('release', 'b');
SELECT outcome FROM idempotency.claim('release', 'b', '{"amount": 2}');
SELECT idempotency.complete('release', 'b', '"second"');
COMMIT;
SELECT outcome, response FROM idempotency.try_claim('release', 'b', '{"amount": 2}');
SELECT outcome, response FROM idempotency.try_claim('release', 'b', '{"amount": 1}');

-- not distributed: locks of keys
-- The lock is held until the transaction ends, because the earlier writes can still
-- commit.
BEGIN;
SELECT outcome FROM idempotency.claim('release', 'c');
SELECT idempotency.release('release', 'c');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND granted;
COMMIT;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
-- both layouts

--
-- Without a claim held by this transaction: IK412
--

-- The complete error for a key that was never claimed.
SELECT idempotency.complete('lost', 'unknown', '{}');
\echo :SQLSTATE
SELECT idempotency.fail('lost', 'unknown', '{}', 400);
\echo :SQLSTATE
SELECT idempotency.release('lost', 'unknown');
\echo :SQLSTATE

-- An outcome that is already committed cannot be completed again, even with the same
-- response.
BEGIN;
SELECT outcome FROM idempotency.claim('lost', 'done');
SELECT idempotency.complete('lost', 'done', '"first"');
COMMIT;
SELECT idempotency.complete('lost', 'done', '"first"');
SELECT idempotency.fail('lost', 'done', '"first"', 400);
SELECT idempotency.release('lost', 'done');
-- A replay is not a claim.
BEGIN;
SELECT outcome FROM idempotency.claim('lost', 'done');
SELECT idempotency.complete('lost', 'done', '"second"');
ROLLBACK;
-- The hint is for the key that was replayed, until another call about the scope.
BEGIN;
SELECT outcome FROM idempotency.try_claim('lost', 'done', retention => '1 day');
SELECT idempotency.current_key('lost') IS NULL AS none;
SAVEPOINT s;
SELECT idempotency.release('lost', 'done');
ROLLBACK TO s;
SELECT idempotency.fail('lost', 'don', '"second"', 400);
ROLLBACK TO s;
SELECT idempotency.fail('another', 'done', '"second"', 400);
ROLLBACK TO s;
SELECT idempotency.once('lost', 'message');
SELECT idempotency.complete('lost', 'done', '"second"');
ROLLBACK;

-- Claims that this transaction already finished, in every combination.
CREATE TEMPORARY TABLE ending (n int, name text, statement text);
INSERT INTO ending VALUES
	(1, 'complete', $$SELECT idempotency.complete('lost', 'twice', '{}')$$),
	(2, 'fail', $$SELECT idempotency.fail('lost', 'twice', '{}', 400)$$),
	(3, 'release', $$SELECT idempotency.release('lost', 'twice')$$);
CREATE FUNCTION pg_temp.twice(first text, second text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	state text;
BEGIN
	PERFORM idempotency.claim('lost', 'twice');
	EXECUTE first;
	EXECUTE second;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
BEGIN;
SELECT a.name AS first, b.name AS second, pg_temp.twice(a.statement, b.statement) AS comes_to
	FROM ending a, ending b ORDER BY a.n, b.n;
ROLLBACK;

-- Another key or scope.
BEGIN;
SELECT outcome FROM idempotency.claim('lost', 'mine');
SELECT pg_temp.error_of($$SELECT idempotency.complete('lost', 'MINE')$$);
SELECT pg_temp.error_of($$SELECT idempotency.complete('lost ', 'mine')$$);
ROLLBACK;

-- Invalid arguments are reported first.
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.complete(NULL, ''key'')',
	'SELECT idempotency.complete(''lost'', '''')',
	'SELECT idempotency.fail(''lost'', E''\n'', NULL, 400)',
	'SELECT idempotency.fail('''', ''key'', NULL, 400)',
	'SELECT idempotency.release(''lost'', NULL)',
	'SELECT idempotency.release(repeat(''s'', 256), ''key'')']) AS s;

-- extension only: errors that are caught
--
-- After IK412 the transaction cannot commit, because its writes had no claim
--

-- If an EXCEPTION block catches the error, COMMIT raises it again.
DELETE FROM charge;
BEGIN;
DO $$
BEGIN
	INSERT INTO charge VALUES (10, 10);
	BEGIN
		PERFORM idempotency.complete('lost', 'caught', '{}');
	EXCEPTION WHEN OTHERS THEN
		RAISE NOTICE 'caught %', SQLSTATE;
	END;
END
$$;
-- Statements before COMMIT still succeed.
SELECT count(*) FROM charge;
COMMIT;
\echo :SQLSTATE
SELECT count(*) FROM charge;

-- both editions
-- The same holds for fail() and release(), and for a statement that is its own
-- transaction.
CREATE FUNCTION pg_temp.catch_error(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN 'caught ' || SQLSTATE;
END
$$;
-- extension only: errors that are caught
SELECT pg_temp.catch_error($$SELECT idempotency.fail('lost', 'caught', '{}', 400)$$);
SELECT pg_temp.catch_error($$SELECT idempotency.release('lost', 'caught')$$);

-- Rolling back to a savepoint does not help: the claim for the writes is gone.
BEGIN;
INSERT INTO charge VALUES (11, 11);
SAVEPOINT before;
SELECT idempotency.complete('lost', 'savepoint', '{}');
ROLLBACK TO before;
SELECT outcome FROM idempotency.claim('lost', 'savepoint');
SELECT idempotency.complete('lost', 'savepoint', '{}');
COMMIT;
\echo :SQLSTATE
SELECT count(*) FROM charge;

-- The error names the first of several.
BEGIN;
SELECT pg_temp.catch_error($$SELECT idempotency.release('lost', 'first')$$),
	pg_temp.catch_error($$SELECT idempotency.release('lost', 'second')$$);
COMMIT;

-- PREPARE TRANSACTION fails as well.
BEGIN;
INSERT INTO charge VALUES (12, 12);
SELECT pg_temp.catch_error($$SELECT idempotency.complete('lost', 'prepared', '{}')$$);
PREPARE TRANSACTION 'regress_idempotency_doomed';
\echo :SQLSTATE
SELECT count(*) FROM charge;
ROLLBACK PREPARED 'regress_idempotency_doomed';
-- both editions

-- The next transaction is not affected.
BEGIN;
SELECT outcome FROM idempotency.claim('lost', 'next');
SELECT idempotency.complete('lost', 'next', '{}');
COMMIT;

-- Other errors of complete() that are caught do not prevent the commit.
BEGIN;
SELECT outcome FROM idempotency.claim('lost', 'can commit');
SELECT pg_temp.catch_error($$SELECT idempotency.complete('lost', 'can commit', status => 99)$$);
SELECT pg_temp.catch_error($$SELECT idempotency.complete('lost', 'can commit', headers => '[]')$$);
SELECT pg_temp.catch_error($$SELECT idempotency.complete('lost', 'can commit', to_json(repeat('x', 2000000)))$$);
SELECT idempotency.complete('lost', 'can commit', '{}');
COMMIT;
SELECT outcome, status FROM idempotency.claim('lost', 'can commit');

--
-- Read-only transactions and recovery
--

BEGIN READ ONLY;
SELECT pg_temp.error_of($$SELECT idempotency.complete('lost', 'key')$$);
SELECT pg_temp.error_of($$SELECT idempotency.fail('lost', 'key', NULL, 400)$$);
SELECT pg_temp.error_of($$SELECT idempotency.release('lost', 'key')$$);
COMMIT;

DROP FUNCTION charge_create;
DROP TABLE charge;
