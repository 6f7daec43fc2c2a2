-- The public contract: outcomes and SQLSTATEs, shown by a small shop with two tenants
-- in one session.

BEGIN;

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, true)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

SELECT plan(121);

CREATE SCHEMA shop;

CREATE TABLE shop.charge (
	tenant text NOT NULL,
	amount numeric NOT NULL CHECK (amount > 0),
	key text NOT NULL DEFAULT idempotency.current_key('tenant1/charge.create')
);

CREATE FUNCTION shop.charge_create(p_tenant text, p_key text, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	scope text := p_tenant || '/charge.create';
	op idempotency.operation;
BEGIN
	op := idempotency.claim(scope, p_key, json_build_object('amount', p_amount));
	IF op.replayed THEN
		RETURN op.response;
	END IF;

	BEGIN
		INSERT INTO shop.charge VALUES (p_tenant, p_amount, p_key);
	EXCEPTION WHEN check_violation THEN
		RETURN idempotency.fail(scope, p_key, '{"error":  "bad amount"}', 402);
	END;

	RETURN idempotency.complete(scope, p_key, json_build_object('charged', p_amount), 201,
		'{"Location":  "/charge"}');
END $$;

-- caught runs a statement that must fail, and returns its error.
CREATE FUNCTION pg_temp.caught(statement text, OUT state text, OUT detail text, OUT hint text)
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	state := 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS
		state = RETURNED_SQLSTATE, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
END $$;

-- refused tests that a statement fails with a SQLSTATE and a hint.
CREATE FUNCTION pg_temp.refused(statement text, sqlstate text, description text) RETURNS text
LANGUAGE sql AS $$
	SELECT is(
		c.state || CASE WHEN c.hint ~ '^[A-Z].*[.]$' THEN ', with a hint' ELSE ', without a hint' END,
		sqlstate || ', with a hint', description)
	FROM pg_temp.caught(statement) AS c
$$;

-- claimed, replayed, and the stored response.

SELECT is(shop.charge_create('tenant1', 'order-1', 25)::text, '{"charged" : 25}', 'the first call runs');
SELECT is(shop.charge_create('tenant1', 'order-1', 25.00)::text, '{"charged" : 25}', 'a retry gets the same bytes');
SELECT is(shop.charge_create('tenant2', 'order-1', 30)::text, '{"charged" : 30}',
	'the same key in another scope is another operation');
SELECT is(shop.charge_create('tenant1', 'order-2', -1)::text, '{"error":  "bad amount"}', 'a final failure is returned');
SELECT is(shop.charge_create('tenant1', 'order-2', -1)::text, '{"error":  "bad amount"}', 'and replayed to the retry');
SELECT results_eq(
	'SELECT tenant, amount FROM shop.charge ORDER BY tenant',
	$$ VALUES ('tenant1', 25::numeric), ('tenant2', 30) $$,
	'each effect happened once, and that of the failure not at all');

SELECT results_eq(
	$$
		SELECT outcome::text, replayed, status, headers::text, response::text, failed,
			expires_at > now() + interval '23 hours'
		FROM idempotency.claim('tenant1/charge.create', 'order-1', '{"amount": 25}')
	$$,
	$$ VALUES ('replayed', true, 201, '{"Location":  "/charge"}', '{"charged" : 25}', false, true) $$,
	'claim replays the stored outcome, byte for byte');

SELECT results_eq(
	$$
		SELECT outcome::text, replayed, status, headers::text, response::text, failed
		FROM idempotency.try_claim('tenant1/charge.create', 'order-2')
	$$,
	$$ VALUES ('replayed', true, 402, NULL, '{"error":  "bad amount"}', true) $$,
	'try_claim replays a failure, to a caller without a request');

SELECT results_eq(
	$$ SELECT outcome::text, replayed, status, failed FROM idempotency.peek('tenant1/charge.create', 'order-1') $$,
	$$ VALUES ('replayed', true, 201, false) $$,
	'peek sees it');

SELECT ok(idempotency.peek('tenant1/charge.create', 'order-9') IS NULL, 'peek returns NULL without a record');

-- mismatched: IK422

SELECT pg_temp.refused(
	$$ SELECT idempotency.claim('tenant1/charge.create', 'order-1', '{"amount": 26}') $$,
	'IK422', 'claim refuses a key with another request');

SELECT is(
	op::text, '(mismatched,f,,,,,,,,f,,,)', 'try_claim returns mismatched, and does not reveal the response')
FROM idempotency.try_claim('tenant1/charge.create', 'order-1', '{"amount": 26}') AS op;

SELECT is(
	idempotency.problem(op) ->> 'status', '422', 'its problem document has status 422')
FROM idempotency.try_claim('tenant1/charge.create', 'order-1', '{"amount": 26}') AS op;

-- in_progress: IK409

SELECT is(op::text, '(claimed,f,,1,,,,,,f,,,)', 'a new key is claimed')
FROM idempotency.try_claim('tenant1/charge.create', 'order-3') AS op;

SELECT is(op::text, '(in_progress,f,,,,,,,,f,,,)', 'and then in progress')
FROM idempotency.try_claim('tenant1/charge.create', 'order-3') AS op;

SELECT is(idempotency.problem(op) ->> 'status', '409', 'its problem document has status 409')
FROM idempotency.try_claim('tenant1/charge.create', 'order-3') AS op;

SELECT pg_temp.refused(
	$$ SELECT idempotency.claim('tenant1/charge.create', 'order-3') $$, 'IK409', 'claim refuses it');
SELECT pg_temp.refused(
	$$ SELECT idempotency.once('tenant1/charge.create', 'order-3') $$, 'IK409', 'so does once');
SELECT pg_temp.refused(
	$$ SELECT idempotency.once_many('tenant1/charge.create', ARRAY['order-8', 'order-3']) $$,
	'IK409', 'and once_many');
SELECT pg_temp.refused(
	$$ SELECT idempotency.forget('tenant1/charge.create', 'order-3') $$, 'IK409', 'and forget');
SELECT lives_ok(
	$$ SELECT idempotency.release('tenant1/charge.create', 'order-3') $$, 'its owner can release it');

SELECT is((pg_temp.caught($$ SELECT shop.charge_create('tenant1', 'order-1', 26) $$)).detail,
	'Scope "tenant1/charge.create", key "order-1".', 'an error about an operation names it');

-- IK400: scopes and keys; 22023: fingerprints

SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), 'IK400', call || ' is refused')
FROM (VALUES
	($$claim(NULL, 'k')$$), ($$claim('', 'k')$$), ($$claim('s', NULL)$$), ($$claim('s', '')$$),
	($$claim(repeat('s', 256), 'k')$$), ($$claim('s', repeat('k', 256))$$),
	($$claim(E'tab\there', 'k')$$), ($$claim('s', E'line\n')$$), ($$claim('s', E'delete\x7f')$$),
	($$try_claim('s', NULL)$$), ($$complete('s', NULL)$$), ($$fail(NULL, 'k', '{}', 402)$$),
	($$release('s', '')$$), ($$peek('s', NULL)$$), ($$forget('s', NULL)$$),
	($$once('s', NULL::text)$$), ($$once_many('s', NULL::text[])$$), ($$once_many('s', ARRAY['a', NULL])$$),
	($$run('s', NULL, '{}', 'pg_catalog.to_json(anyelement)')$$), ($$current_key(NULL)$$),
	($$parse_header(NULL)$$), ($$parse_header('bare')$$), ($$parse_header('""')$$),
	($$natural_key(VARIADIC '{}'::text[])$$), ($$derive_key('s', 'k', '')$$)) AS v (call);

SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), '22023', call || ' is refused')
FROM (VALUES
	($$claim('s', 'k', '{}', fingerprint => sha256('x'))$$),
	($$claim('s', 'k', fingerprint => '\x00112233445566778899aabbccddee')$$),
	($$claim('s', 'k', fingerprint => decode(repeat('00', 65), 'hex'))$$)) AS v (call);

SELECT lives_ok(
	$$ SELECT idempotency.peek(repeat('s', 255), repeat(U&'\00E9', 255)) $$, '255 characters are not too many');

-- IK403: the guard

CREATE TRIGGER charge_needs_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON shop.charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('tenant1/*');

SELECT lives_ok(
	$$ SELECT shop.charge_create('tenant1', 'order-4', 5) $$, 'a guarded table accepts writes with a claim');
SELECT lives_ok(
	$$ INSERT INTO shop.charge VALUES ('tenant1', 6) $$, 'also after complete()');
SELECT results_eq(
	'SELECT key FROM shop.charge WHERE amount = 6', ARRAY['order-4'], 'current_key is the default of the column');
SELECT is(shop.charge_create('tenant1', 'order-4', 5)::text, '{"charged" : 5}', 'a replay');
SELECT pg_temp.refused(
	$$ INSERT INTO shop.charge VALUES ('tenant1', 7, 'x') $$, 'IK403', 'closes the guard');
SELECT is(idempotency.current_key('tenant1/charge.create'), NULL, 'and clears current_key');
SELECT pg_temp.refused(
	'UPDATE shop.charge SET amount = 8', 'IK403', 'it refuses updates of existing rows too');
SELECT is((pg_temp.caught('DELETE FROM shop.charge')).detail,
	'The last claim of this transaction in scope "tenant1/*" was not granted, or was released or forgotten.',
	'and names the scope of the missing claim');

-- once, and the records that it shares with claim

SELECT is(idempotency.once('tenant1/mailer', 'm-1'), true, 'once is true the first time');
SELECT is(idempotency.once('tenant1/mailer', 'm-1'), false, 'and false the second');
SELECT results_eq(
	$$ SELECT * FROM idempotency.once_many('tenant1/mailer', ARRAY['m-3', 'm-1', 'm-2', 'm-3']) $$,
	ARRAY['m-2', 'm-3'], 'once_many gives the new keys, each once, in order');
SELECT is(op::text LIKE '(replayed,t,,,,,,,,f,,%)', true, 'claim replays an inbox record, without a status')
FROM idempotency.claim('tenant1/mailer', 'm-1') AS op;

-- run

CREATE FUNCTION shop.transfer(request idempotency.document) RETURNS json
LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO shop.charge VALUES ('tenant1', (request::json ->> 'amount')::numeric);
	IF (request::json ->> 'amount')::numeric > 1000 THEN
		RAISE EXCEPTION 'limit exceeded' USING ERRCODE = 'IKFIN', DETAIL = 'The limit is 1000.';
	END IF;
	RETURN '{"transferred":  true}';
END $$;
CREATE FUNCTION shop.no_handler(integer) RETURNS json LANGUAGE sql AS $$ SELECT '1'::json $$;

ALTER TABLE shop.charge ALTER key SET DEFAULT idempotency.current_key('tenant1/transfer');

SELECT results_eq(
	$$
		SELECT outcome::text, replayed, status, response::text, failed, expires_at IS NOT NULL
		FROM idempotency.run('tenant1/transfer', 't-1', '{"amount": 100}', 'shop.transfer(idempotency.document)')
	$$,
	$$ VALUES ('claimed', false, 200, '{"transferred":  true}', false, true) $$,
	'run calls the handler and returns the stored outcome');
SELECT results_eq(
	$$
		SELECT outcome::text, response::text
		FROM idempotency.run('tenant1/transfer', 't-1', '{"amount": 100}', 'shop.transfer(idempotency.document)')
	$$,
	$$ VALUES ('replayed', '{"transferred":  true}') $$, 'and replays');
SELECT results_eq(
	$$
		SELECT outcome::text, failed, status, headers ->> 'Content-Type', response ->> 'title', response ->> 'detail'
		FROM idempotency.run('tenant1/transfer', 't-2', '{"amount": 2000}', 'shop.transfer(idempotency.document)')
	$$,
	$$ VALUES ('claimed', true, 422, 'application/problem+json', 'limit exceeded', 'The limit is 1000.') $$,
	'a final error is stored as a problem document');
SELECT throws_ok(
	$$ SELECT idempotency.run('tenant1/transfer', 't-3', '{"amount": -1}', 'shop.transfer(idempotency.document)') $$,
	'23514', NULL, 'other errors propagate');
SELECT ok(idempotency.peek('tenant1/transfer', 't-3') IS NULL, 'and store nothing');
SELECT results_eq(
	$$ SELECT amount, key FROM shop.charge WHERE amount NOT IN (5, 6, 25, 30) $$,
	$$ VALUES (100::numeric, 't-1') $$, 'only the success had an effect');

SELECT pg_temp.refused(
	$$ SELECT idempotency.run('s', 'k', '{}', 'shop.no_handler(integer)') $$, '42P13', 'a handler with another signature');
SELECT pg_temp.refused(
	$$ SELECT idempotency.run('s', 'k', '{}', 1::oid::regprocedure) $$, '42883', 'a missing handler');
SELECT pg_temp.refused(
	$$ SELECT idempotency.run('s', 'k', '{}', NULL) $$, '22023', 'no handler');

-- arguments and settings out of range

SELECT pg_temp.refused(
	pg_catalog.format('SELECT idempotency.claim(''s'', ''k''); SELECT idempotency.%s', call), sqlstate, call || ' is refused')
FROM (VALUES
	('22023', $$claim('s', 'k2', wait => '-1 second')$$),
	('22023', $$claim('s', 'k2', retention => '0')$$),
	('22023', $$claim('s', 'k2', retention => '-2 seconds')$$),
	('22023', $$once('s', 'k2', '-1 day')$$),
	('22023', $$complete('s', 'k', status => 99)$$),
	('22023', $$complete('s', 'k', status => 600)$$),
	('22023', $$complete('s', 'k', headers => '[]')$$),
	('22023', $$fail('s', 'k', '{}', NULL)$$),
	('54000', $$complete('s', 'k', to_json(repeat('x', 1024 * 1024)))$$),
	('2202E', $$once_many('s', ARRAY[['a'], ['b']])$$)) AS v (sqlstate, call);

SELECT throws_ok(
	$$ SELECT idempotency.claim('s', 'k', retention => '101 years') $$,
	'22023', NULL, 'a retention above 100 years');
SELECT throws_ok(
	$$ SELECT idempotency.claim('s', 'k', 'no JSON') $$, '22P02', NULL, 'a request that is not JSON');
SELECT throws_ok(
	$$ SELECT idempotency.claim('s', 'k', '"\u0000"') $$, '22P05', NULL, 'a request with a character that jsonb cannot hold');

SELECT throws_ok(pg_catalog.format('SET LOCAL %s', assignment), '22023', NULL, assignment || ' is refused')
FROM (VALUES
	('idempotency.retention = 0'), ('idempotency.retention = -2'), ('idempotency.wait = -1'),
	('idempotency.max_response_size = 1000'), ($$idempotency.scope_prefix = 'tenant1'$$),
	($$idempotency.documentation = 'https://example.com/>'$$), ($$idempotency.final_errors = '40001'$$), ($$idempotency.final_errors = 'IK409'$$),
	($$idempotency.final_errors = 'ikfin'$$)) AS v (assignment);

-- retention

SELECT is((idempotency.claim('s', 'forever', retention => '-1 second')).outcome, 'claimed', 'a claim with infinite retention');
SELECT lives_ok($$ SELECT idempotency.complete('s', 'forever') $$, 'is completed');
SELECT is((idempotency.peek('s', 'forever')).expires_at, NULL, 'and never expires');

SELECT is(idempotency.once('s', 'briefly', '1 millisecond'), true, 'a record with a short retention');
SELECT pg_catalog.pg_sleep(0.005) \g /dev/null
SELECT ok(idempotency.peek('s', 'briefly') IS NULL, 'counts as absent afterwards');
SELECT results_eq(
	$$ SELECT state FROM idempotency.keys WHERE scope = 's' AND key = 'briefly' $$,
	ARRAY['expired'], 'although its row exists');
SELECT is(idempotency.forget('s', 'briefly'), false, 'and forget returns false for it');

-- the view, and forget

SELECT results_eq(
	$$ SELECT scope, key, state, status FROM idempotency.keys
		WHERE scope LIKE 'tenant1/%' AND key IN ('order-1', 'order-2', 'm-1') ORDER BY key $$,
	$$ VALUES
		('tenant1/mailer' COLLATE "C", 'm-1'::idempotency.keytext, 'seen', NULL),
		('tenant1/charge.create', 'order-1', 'completed', 201),
		('tenant1/charge.create', 'order-2', 'failed', 402) $$,
	'the view keys shows the stored records');
SELECT is(idempotency.forget('tenant1/charge.create', 'order-2'), true, 'forget evicts a record');
SELECT is(idempotency.forget('tenant1/charge.create', 'order-2'), false, 'once');
SELECT is((idempotency.try_claim('tenant1/charge.create', 'order-2')).outcome, 'claimed', 'and its key is new');
SELECT lives_ok($$ SELECT idempotency.release('tenant1/charge.create', 'order-2') $$, 'and released');

-- read-only transactions

SAVEPOINT writable;
SET LOCAL transaction_read_only = on;
SELECT throws_ok(pg_catalog.format('SELECT idempotency.%s', call), '25006', NULL, call || ' needs to write')
FROM (VALUES
	($$claim('s', 'k')$$), ($$try_claim('s', 'k')$$), ($$once('s', 'k')$$), ($$once_many('s', ARRAY['k'])$$),
	($$complete('s', 'k')$$), ($$fail('s', 'k', '{}', 402)$$), ($$release('s', 'k')$$), ($$forget('s', 'k')$$),
	($$run('s', 'k', '{}', 'shop.transfer(idempotency.document)')$$)) AS v (call);
SELECT is((idempotency.peek('tenant1/charge.create', 'order-1')).status, 201, 'peek only reads');
ROLLBACK TO writable;

-- a table that was altered: 55000

SAVEPOINT unaltered;
ALTER TABLE idempotency.key ADD extra integer;
SELECT pg_temp.refused($$ SELECT idempotency.claim('s', 'k') $$, '55000', 'an additional column is refused');
ROLLBACK TO unaltered;
SELECT is((idempotency.try_claim('s', 'k')).outcome, 'claimed', 'and calls succeed after its removal');
SELECT idempotency.release('s', 'k') \g /dev/null

-- IK412, after which the transaction cannot commit (see commit.sql): the last tests of
-- this file

SELECT pg_temp.refused(
	$$ SELECT idempotency.complete('tenant1/charge.create', 'order-1') $$, 'IK412', 'complete without a claim');
SELECT pg_temp.refused(
	$$ SELECT idempotency.fail('tenant1/charge.create', 'order-7', '{}', 402) $$, 'IK412', 'fail without a claim');
SELECT pg_temp.refused(
	$$ SELECT idempotency.release('tenant1/charge.create', 'order-7') $$, 'IK412', 'release without a claim');

SELECT * FROM finish();
ROLLBACK;
