--
-- run(): claim, call the handler and complete; or replay.
--
\set SHOW_CONTEXT never

CREATE TABLE charge (id int PRIMARY KEY, amount int);
CREATE TABLE call (handler text, request json);

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

-- A handler takes the request, does its work, and returns the response.
CREATE FUNCTION charge_create(request idempotency.document) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO call VALUES ('charge_create', request);
	INSERT INTO charge SELECT r.id, r.amount FROM json_to_record(request) AS r (id int, amount int);
	RETURN json_build_object('charged', request::json -> 'amount');
END
$$;

--
-- Success
--

-- The first call runs the handler, and stores the response with status 200.
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.run('run', 'k1', '{"id": 1, "amount": 100}', 'charge_create(idempotency.document)');
-- Later calls replay the response without calling the handler.
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.run('run', 'k1', '{"amount": 100, "id": 1}', 'charge_create(idempotency.document)');
SELECT outcome, status, response FROM idempotency.run('run', 'k1', NULL, 'charge_create(idempotency.document)');
SELECT outcome, status, response FROM idempotency.claim('run', 'k1');
SELECT * FROM charge;
SELECT count(*) FROM call;

-- The same key with another request.
SELECT idempotency.run('run', 'k1', '{"id": 1, "amount": 999}', 'charge_create(idempotency.document)');
\echo :SQLSTATE
SELECT count(*) FROM call;

-- A key that this transaction holds.
BEGIN;
SELECT outcome FROM idempotency.claim('run', 'held');
SELECT idempotency.run('run', 'held', '{}', 'charge_create(idempotency.document)');
\echo :SQLSTATE
ROLLBACK;

-- run() needs no complete(), and the transaction can continue.
BEGIN;
SELECT outcome, response FROM idempotency.run('run', 'k2', '{"id": 2, "amount": 200}', 'charge_create(idempotency.document)');
SELECT outcome, response FROM idempotency.run('run', 'k2', '{"id": 2, "amount": 200}', 'charge_create(idempotency.document)');
SELECT idempotency.complete('run', 'k2');
ROLLBACK;
SELECT idempotency.peek('run', 'k2') IS NULL AS absent;

-- The request can have any JSON type; the handler gets the original bytes.
SELECT (idempotency.run('run', 'k3', '{"id": 3,   "amount": 300}'::json, 'charge_create(idempotency.document)')).response;
SELECT (idempotency.run('run', 'k4', '{"id": 4,   "amount": 400}'::jsonb, 'charge_create(idempotency.document)')).response;
SELECT (idempotency.run('run', 'k5', '{"id": 5,   "amount": 500}'::text, 'charge_create(idempotency.document)')).response;
PREPARE untyped AS SELECT (idempotency.run($1, $2, $3, $4)).response;
EXECUTE untyped('run', 'k6', '{"id": 6,   "amount": 600}', 'charge_create(idempotency.document)');
DEALLOCATE untyped;
SELECT request FROM call ORDER BY (request ->> 'id')::int;

-- Retention and wait have the same meaning as in claim().
SELECT outcome FROM idempotency.run('run', 'kept', '{"id": 50}', 'charge_create(idempotency.document)', retention => '1 hour');
SELECT ceil(extract(epoch FROM expires_at - created_at))::int AS seconds FROM idempotency.key WHERE scope = 'run' AND key = 'kept';
SELECT outcome, expires_at FROM idempotency.run('run', 'for ever', '{"id": 7}', 'charge_create(idempotency.document)', retention => '-1 second');
SELECT outcome FROM idempotency.run('run', 'expired', '{"id": 8}', 'charge_create(idempotency.document)', retention => '1 millisecond');
SELECT pg_sleep(0.01);
SELECT outcome FROM idempotency.run('run', 'expired', '{"id": 9}', 'charge_create(idempotency.document)');
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	$$SELECT idempotency.run('run', 'bad', NULL, 'charge_create(idempotency.document)', retention => '0')$$,
	$$SELECT idempotency.run('run', 'bad', NULL, 'charge_create(idempotency.document)', wait => '-1 s')$$,
	$$SELECT idempotency.run('run', '', NULL, 'charge_create(idempotency.document)')$$,
	$$SELECT idempotency.run(NULL, 'bad', NULL, 'charge_create(idempotency.document)')$$]) AS s;

--
-- Errors
--

-- An error of the handler propagates and stores nothing: the retry runs the handler.
SELECT idempotency.run('run', 'error', '{"id": 1, "amount": 1}', 'charge_create(idempotency.document)');
\echo :SQLSTATE
SELECT count(*) FROM call WHERE request ->> 'id' = '1';
SELECT idempotency.peek('run', 'error') IS NULL AS absent;
BEGIN;
SAVEPOINT s;
SELECT idempotency.run('run', 'error', '{"id": 1, "amount": 1}', 'charge_create(idempotency.document)');
ROLLBACK TO s;
SELECT outcome, response FROM idempotency.run('run', 'error', '{"id": 10, "amount": 1}', 'charge_create(idempotency.document)');
COMMIT;
-- The same if the caller catches the error around run().
DO $$
BEGIN
	PERFORM idempotency.run('run', 'caught', '{"id": 1, "amount": 1}', 'charge_create(idempotency.document)');
EXCEPTION WHEN unique_violation THEN
	RAISE NOTICE 'caught';
END
$$;
SELECT idempotency.peek('run', 'caught') IS NULL AS absent;

-- An error that the handler raises as final is stored as a failure with its message,
-- and the earlier writes of the handler are rolled back.
CREATE FUNCTION charge_declined(request idempotency.document) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO call VALUES ('charge_declined', request);
	RAISE EXCEPTION 'card declined' USING ERRCODE = 'IKFIN', DETAIL = 'The limit of "1,000" is exceeded.', HINT = 'Pay less.';
END
$$;
SELECT outcome, replayed, status, headers, failed, expires_at > now() AS retained,
		response ->> 'title' AS title, response ->> 'detail' AS detail, response ->> 'status' AS response_status
	FROM idempotency.run('run', 'declined', '{"amount": 1}', 'charge_declined(idempotency.document)');
SELECT outcome, replayed, status, headers, failed, expires_at > now() AS retained,
		response ->> 'title' AS title, response ->> 'detail' AS detail, response ->> 'status' AS response_status
	FROM idempotency.run('run', 'declined', '{"amount": 1}', 'charge_declined(idempotency.document)');
SELECT outcome, status, failed, response ->> 'title' AS title FROM idempotency.claim('run', 'declined');
SELECT count(*) FROM call WHERE handler = 'charge_declined';
-- The first response and the replay have the same bytes.
BEGIN;
SELECT response AS first_response, headers AS first_headers
	FROM idempotency.run('run', 'declined twice', NULL, 'charge_declined(idempotency.document)') \gset
SELECT outcome, response::text = :'first_response' AS same_response, headers::text = :'first_headers' AS same_headers
	FROM idempotency.run('run', 'declined twice', NULL, 'charge_declined(idempotency.document)');
ROLLBACK;

-- Without a detail, the response has none.
CREATE FUNCTION say_no(request json) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION USING ERRCODE = 'IKFIN', MESSAGE = E'no "way"\n\\o/';
END
$$;
SELECT response ->> 'title' AS title, response -> 'detail' IS NULL AS no_detail
	FROM idempotency.run('run', 'say no', NULL, 'say_no(json)');

-- The failure is stored in the calling transaction, whose own writes stay.
BEGIN;
INSERT INTO charge VALUES (20, 20);
SELECT outcome, failed FROM idempotency.run('run', 'stays', NULL, 'charge_declined(idempotency.document)');
COMMIT;
SELECT count(*) FROM charge WHERE id = 20;

-- A setting chooses the final errors: business errors, and not server errors.
CREATE FUNCTION charge_twice(request json) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO charge VALUES (1, 1);
	RETURN 'true';
END
$$;
BEGIN;
SET LOCAL idempotency.final_errors = 'IKFIN, 23505,P0402';
SELECT outcome, failed, status, response ->> 'title' AS title, response ->> 'detail' AS detail
	FROM idempotency.run('run', 'final 23505', NULL, 'charge_twice(json)');
SELECT outcome, failed FROM idempotency.run('run', 'final IKFIN', NULL, 'charge_declined(idempotency.document)');
SET LOCAL idempotency.final_errors = '23505';
SAVEPOINT s;
SELECT outcome, failed FROM idempotency.run('run', 'not final', NULL, 'charge_declined(idempotency.document)');
\echo :SQLSTATE
ROLLBACK TO s;
SET LOCAL idempotency.final_errors = '';
SELECT outcome, failed FROM idempotency.run('run', 'not final', NULL, 'charge_twice(json)');
\echo :SQLSTATE
ROLLBACK;

-- extension only: settings that the library defines
-- Errors that describe the state of the server must not be stored, because a retry
-- might succeed.
SELECT e AS final_errors, pg_temp.error_of(format('SET idempotency.final_errors = %L', e)) AS set
	FROM unnest(ARRAY['00000', '08006', '25006', '40001', '40P01', '53200', '55P03', '57014', '58030', '72000',
		'F0000', 'HV000', 'IK409', 'IK428', 'IKFIN', 'XX000', 'P0001, 40001', 'ikfin', 'P001', 'P00011',
		'unique_violation', '23505;IKFIN', ' 22012 , 23514 ', '']) AS e;
SET idempotency.final_errors = '40001';
\echo :SQLSTATE
SET idempotency.final_errors = 'no such';
RESET idempotency.final_errors;
-- both editions

-- Cancelling the statement stores no outcome.
CREATE FUNCTION sleep_long(request json) RETURNS json LANGUAGE sql AS 'SELECT to_json(pg_sleep(60)::text)';
SET statement_timeout = '50ms';
SELECT idempotency.run('run', 'cancelled', NULL, 'sleep_long(json)');
\echo :SQLSTATE
RESET statement_timeout;
SELECT idempotency.peek('run', 'cancelled') IS NULL AS absent;

--
-- Handlers
--

-- The argument can be json, the language SQL, and the result idempotency.document.
CREATE FUNCTION in_sql(request json) RETURNS json LANGUAGE sql AS $$
	INSERT INTO charge SELECT (request ->> 'id')::int, 0 RETURNING json_build_object('id', id)
$$;
CREATE FUNCTION echo(request idempotency.document) RETURNS idempotency.document LANGUAGE sql AS 'SELECT request';
SELECT outcome, response FROM idempotency.run('run', 'in sql', '{"id": 30}', 'in_sql(json)');
SELECT outcome, response FROM idempotency.run('run', 'in sql', '{"id": 30}', 'in_sql(json)');
SELECT outcome, response FROM idempotency.run('run', 'echo', '{ "b": 1,"a":2 }', 'echo(idempotency.document)');
SELECT outcome, response FROM idempotency.run('run', 'echo', '{ "b": 1,"a":2 }', 'echo(idempotency.document)');
-- A regprocedure with a signature chooses between overloads.
CREATE FUNCTION echo(request text) RETURNS text LANGUAGE sql AS 'SELECT request';
SELECT outcome, response FROM idempotency.run('run', 'echo 2', '2', 'echo(idempotency.document)');

-- NULL is a valid response.
CREATE FUNCTION nothing(request json) RETURNS json LANGUAGE sql AS 'SELECT NULL::json';
CREATE FUNCTION strict_one(request json) RETURNS json LANGUAGE sql STRICT AS 'SELECT ''"called"''::json';
WITH r AS (SELECT n, k, idempotency.run('run', k, request, handler::regprocedure) AS op
	FROM (VALUES (1, 'nothing', '{}'::json, 'nothing(json)'), (2, 'nothing', '{}', 'nothing(json)'),
			(3, 'strict', '{}', 'strict_one(json)')) AS v (n, k, request, handler))
	SELECT k AS key, (op).outcome, (op).status, (op).response, (op).response IS NULL AS no_response FROM r ORDER BY n;
-- Without a request, a strict handler would not be called, and yet a success stored.
-- Such a call is refused, and stores nothing.
SELECT idempotency.run('run', 'strict 2', NULL, 'strict_one(json)');
\echo :SQLSTATE
SELECT idempotency.peek('run', 'strict 2') IS NULL AS absent;
-- A handler that is not strict gets NULL.
CREATE FUNCTION was_null(request json) RETURNS json LANGUAGE sql AS 'SELECT to_json(request IS NULL)';
SELECT response FROM idempotency.run('run', 'was null', NULL, 'was_null(json)');

-- A response that is too large raises an error, and stores nothing.
CREATE FUNCTION too_large(request json) RETURNS json LANGUAGE sql AS $$ SELECT to_json(repeat('x', 1048576)) $$;
SELECT idempotency.run('run', 'too large', NULL, 'too_large(json)');
\echo :SQLSTATE
SELECT idempotency.peek('run', 'too large') IS NULL AS absent;

-- Within the handler, the guard is open and current_key() returns the key.
CREATE TABLE guarded (id int, key text DEFAULT idempotency.current_key('run'));
CREATE TRIGGER require_claim BEFORE INSERT ON guarded
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('run');
CREATE FUNCTION write_guarded(request json) RETURNS json LANGUAGE sql AS
	'INSERT INTO guarded VALUES (1) RETURNING to_json(key)';
SELECT response FROM idempotency.run('run', 'guarded', NULL, 'write_guarded(json)');
SELECT response FROM idempotency.run('run', 'guarded', NULL, 'write_guarded(json)');
SELECT * FROM guarded;

-- A handler can run other operations, whose failures do not fail the handler.
CREATE FUNCTION nested(request json) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	inner_op idempotency.operation;
	declined_op idempotency.operation;
BEGIN
	inner_op := idempotency.run('run.nested', 'inner', request, 'in_sql(json)');
	declined_op := idempotency.run('run.nested', 'declined', request, 'charge_declined(idempotency.document)');
	RETURN json_build_array(inner_op.outcome, inner_op.response, declined_op.outcome, declined_op.status);
END
$$;
SELECT outcome, response FROM idempotency.run('run', 'nested', '{"id": 40}', 'nested(json)');
SELECT outcome, response FROM idempotency.run('run', 'nested', '{"id": 40}', 'nested(json)');
SELECT key, state, status FROM idempotency.keys WHERE scope = 'run.nested' ORDER BY key;
SELECT outcome, response FROM idempotency.run('run', 'nested again', '{"id": 40}', 'nested(json)');
-- Within the handler, its own key is in progress,
CREATE FUNCTION recursive(request json) RETURNS json LANGUAGE sql AS $$
	SELECT response FROM idempotency.run('run', 'recursive', request, 'recursive(json)'::regprocedure)
$$;
SELECT idempotency.run('run', 'recursive', NULL, 'recursive(json)');
\echo :SQLSTATE
-- and the handler cannot finish it, because run() does.
CREATE FUNCTION completes(request json) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.complete('run', 'completes', '"by the handler"');
	RETURN '"by run"';
END
$$;
SELECT idempotency.run('run', 'completes', NULL, 'completes(json)');
\echo :SQLSTATE
-- An open claim of the handler makes the commit fail.
CREATE FUNCTION claims(request json) RETURNS json LANGUAGE sql AS
	$$ SELECT to_json((idempotency.claim('run', 'left open')).outcome) $$;
SELECT idempotency.run('run', 'claims', NULL, 'claims(json)');
\echo :SQLSTATE
-- After an IK412 inside a final error, the transaction still cannot commit.
-- extension only: errors that are caught
CREATE FUNCTION loses(request json) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		PERFORM idempotency.complete('run', 'never claimed');
	EXCEPTION WHEN OTHERS THEN
		RAISE EXCEPTION 'final' USING ERRCODE = 'IKFIN';
	END;
END
$$;
SELECT idempotency.run('run', 'loses', NULL, 'loses(json)');
\echo :SQLSTATE
DROP FUNCTION loses;
-- both editions

-- A key that is the text of an object is refused, and the handler is not called.
SELECT pg_temp.error_of($$SELECT outcome FROM idempotency.run('run', '{}', '{"id": 900, "amount": 1}', 'charge_create(idempotency.document)')$$);
SELECT count(*) FROM charge WHERE id = 900;

-- An invalid handler is refused, even if an outcome is stored.
CREATE FUNCTION no_argument() RETURNS json LANGUAGE sql AS 'SELECT NULL::json';
CREATE FUNCTION two_arguments(a json, b json DEFAULT NULL) RETURNS json LANGUAGE sql AS 'SELECT a';
CREATE FUNCTION jsonb_argument(a jsonb) RETURNS json LANGUAGE sql AS 'SELECT a::json';
CREATE FUNCTION any_argument(a anyelement) RETURNS json LANGUAGE sql AS 'SELECT NULL::json';
CREATE FUNCTION text_result(a json) RETURNS text LANGUAGE sql AS 'SELECT a::text';
CREATE FUNCTION jsonb_result(a json) RETURNS jsonb LANGUAGE sql AS 'SELECT a::jsonb';
CREATE FUNCTION no_result(a json) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION set_result(a json) RETURNS SETOF json LANGUAGE sql AS 'SELECT a';
CREATE FUNCTION variadic_argument(VARIADIC a json[]) RETURNS json LANGUAGE sql AS 'SELECT a[1]';
CREATE PROCEDURE a_procedure(a json) LANGUAGE sql AS '';
CREATE FUNCTION first_of(state json, a json) RETURNS json LANGUAGE sql AS 'SELECT coalesce(state, a)';
CREATE AGGREGATE an_aggregate(json) (SFUNC = first_of, STYPE = json);
SELECT h AS handler, pg_temp.error_of(format('SELECT idempotency.run(''run'', ''bad'', NULL, %L)', h)) AS run
	FROM unnest(ARRAY['no_argument()', 'two_arguments(json,json)', 'jsonb_argument(jsonb)', 'any_argument(anyelement)',
		'text_result(json)', 'jsonb_result(json)', 'no_result(json)', 'set_result(json)', 'variadic_argument(json[])',
		'a_procedure(json)', 'an_aggregate(json)', 'no_such_function(json)', '0']) AS h;
SELECT idempotency.run('run', 'k1', NULL, 'text_result(json)');
\echo :SQLSTATE
SELECT idempotency.run('run', 'bad', NULL, NULL);
\echo :SQLSTATE
SELECT idempotency.run('run', 'bad', NULL, 0::regprocedure);
\echo :SQLSTATE
SELECT idempotency.peek('run', 'bad') IS NULL AS absent;

--
-- Privileges
--

-- The handler runs with the rights of the caller, who needs EXECUTE on it.
CREATE ROLE regress_idempotency_caller;
CREATE ROLE regress_idempotency_owner;
SELECT idempotency.grant_client('regress_idempotency_caller');
CREATE FUNCTION who(request json) RETURNS json LANGUAGE sql AS 'SELECT to_json(current_user::text)';
CREATE FUNCTION who_definer(request json) RETURNS json LANGUAGE sql SECURITY DEFINER AS 'SELECT to_json(current_user::text)';
ALTER FUNCTION who_definer OWNER TO regress_idempotency_owner;
CREATE FUNCTION forbidden(request json) RETURNS json LANGUAGE sql AS 'SELECT NULL::json';
REVOKE ALL ON FUNCTION forbidden FROM PUBLIC;
SET ROLE regress_idempotency_caller;
SELECT response FROM idempotency.run('run', 'who', NULL, 'who(json)');
-- A SECURITY DEFINER handler runs with the rights of its owner.
SELECT response FROM idempotency.run('run', 'who definer', NULL, 'who_definer(json)');
SELECT current_user;
SELECT idempotency.run('run', 'forbidden', NULL, 'forbidden(json)');
\echo :SQLSTATE
SELECT idempotency.run('run', 'k1', NULL, 'forbidden(json)');
\echo :SQLSTATE
SELECT idempotency.run('run', 'no right', '{"id": 60}', 'in_sql(json)');
\echo :SQLSTATE
RESET ROLE;
-- The function's SET clauses apply to the call.
CREATE FUNCTION with_setting(request json) RETURNS json LANGUAGE sql SET work_mem = '12345kB' AS
	$$ SELECT to_json(current_setting('work_mem')) $$;
SELECT response FROM idempotency.run('run', 'setting', NULL, 'with_setting(json)');

-- Read-only transactions.
BEGIN READ ONLY;
SELECT idempotency.run('run', 'k1', NULL, 'charge_create(idempotency.document)');
\echo :SQLSTATE
ROLLBACK;

DROP OWNED BY regress_idempotency_caller, regress_idempotency_owner;
DROP ROLE regress_idempotency_caller, regress_idempotency_owner;
SET client_min_messages = warning;
DROP TABLE charge, call, guarded CASCADE;
DROP AGGREGATE an_aggregate(json);
DROP PROCEDURE a_procedure;
DROP FUNCTION charge_create, charge_declined, say_no, charge_twice, sleep_long, in_sql,
	echo(idempotency.document), echo(text), nothing, strict_one, was_null, too_large, write_guarded, nested,
	recursive, completes, claims, no_argument, two_arguments, jsonb_argument, any_argument, text_result,
	jsonb_result, no_result, set_result, variadic_argument, first_of, who, forbidden, with_setting;
