-- The public contract: claims with a lease, used by workers and completers in separate
-- transactions. These tests are transactions themselves, so this file does not run in
-- one.

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, false)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

-- Errors here are intended; an unexpected success fails its test.
\set ON_ERROR_STOP off
\set VERBOSITY sqlstate

SELECT plan(79);

CREATE TABLE public.payment (by_owner integer);

-- refused tests that a statement fails with a SQLSTATE and a hint.
CREATE FUNCTION pg_temp.refused(statement text, sqlstate text, description text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	state text := 'no error';
	hint text := '';
BEGIN
	BEGIN
		EXECUTE statement;
	EXCEPTION WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, hint = PG_EXCEPTION_HINT;
	END;
	RETURN is(state || CASE WHEN hint ~ '^[A-Z].*[.]$' THEN ', with a hint' ELSE ', without a hint' END,
		sqlstate || ', with a hint', description);
END $$;

-- later moves the lease on a key into the past by an interval.
CREATE FUNCTION pg_temp.later(p_key text, p_time interval) RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.key
	SET leased_at = leased_at - p_time, leased_until = leased_until - p_time, expires_at = expires_at - p_time
	WHERE scope = 'payment' AND key = p_key
$$;

-- claimed, and committed without an outcome.

SELECT op.token AS first, op::text AS shown
FROM idempotency.claim('payment', 'order-1', '{"amount": 25}', lease => '1 min') AS op \gset
SELECT is(:'shown', '(claimed,f,' || :'first' || ',1,,,,,,f,,,)', 'a claim with a lease returns its token and the attempt');
SELECT cmp_ok(:first, '>', 0, 'tokens are positive');
SELECT results_eq(
	$$ SELECT state FROM idempotency.keys WHERE scope = 'payment' AND key = 'order-1' $$,
	ARRAY['in_progress'], 'the transaction committed, and the operation is in progress');

-- in_progress: IK409, and mismatched: IK422

SELECT matches(op::text, '^\(in_progress,f,,1,,,,,,f,00:0[01]:[0-9.]+,,\)$', 'a duplicate gets the remaining time of the lease, and nothing else')
FROM idempotency.try_claim('payment', 'order-1', '{"amount": 25}', lease => '1 min') AS op;
SELECT is((idempotency.try_claim('payment', 'order-1')).outcome, 'in_progress', 'a duplicate without a lease gets the same');
SELECT is(idempotency.problem(op) ->> 'status', '409', 'the problem document says 409')
FROM idempotency.try_claim('payment', 'order-1') AS op;
SELECT is(op::text, '(mismatched,f,,,,,,,,f,,,)', 'another request is mismatched at once')
FROM idempotency.try_claim('payment', 'order-1', '{"amount": 26}', wait => '1 day') AS op;
SELECT pg_temp.refused(
	$$ SELECT idempotency.claim('payment', 'order-1', lease => '1 min', wait => '0') $$, 'IK409', 'claim refuses the duplicate');
SELECT pg_temp.refused(
	$$ SELECT idempotency.claim('payment', 'order-1', '{"amount": 26}') $$, 'IK422', 'claim refuses another request');
SELECT pg_temp.refused(
	$$ SELECT idempotency.once_many('payment', ARRAY['order-1']) $$, 'IK409', 'once_many does not wait');
SELECT matches(op::text, '^\(in_progress,f,,1,,,,,,f,00:0[01]:[0-9.]+,,"\\\\x[0-9a-f]{64}"\)$', 'peek shows the lease and the fingerprint, and no token')
FROM idempotency.peek('payment', 'order-1') AS op;

-- Heartbeat and checkpoint.

SELECT cmp_ok(idempotency.renew('payment', 'order-1', :first, '1 hour'), '>', now() + interval '59 min',
	'renew returns the new end of the lease');
SELECT lives_ok(
	pg_catalog.format($$ SELECT idempotency.checkpoint('payment', 'order-1', %s, 'charged', '{"charge":  7}') $$, :first),
	'a checkpoint is stored');
SELECT results_eq(
	$$ SELECT recovery_point, recovery_state::text FROM idempotency.key WHERE scope = 'payment' AND key = 'order-1' $$,
	$$ VALUES ('charged', '{"charge":  7}') $$, 'byte for byte');

-- taken_over

SELECT is_empty('SELECT key FROM idempotency.zombies', 'the view zombies does not show a running lease');
SELECT pg_temp.later('order-1', '2 hours') \g /dev/null
SELECT results_eq(
	'SELECT key, attempt, recovery_point FROM idempotency.zombies',
	$$ VALUES ('order-1'::idempotency.keytext, 1, 'charged') $$, 'the view zombies shows an expired lease');
SELECT op.token AS second, op::text AS shown
FROM idempotency.claim('payment', 'order-1', '{"amount": 25}', lease => '1 min') AS op \gset
SELECT is(:'shown', '(taken_over,f,' || :'second' || ',2,charged,"{""charge"":  7}",,,,f,,,)',
	'the next owner gets a token, the attempt, the recovery point and its state');
SELECT cmp_ok(:second, '>', :first, 'tokens grow');

-- IK410: an owner is fenced off after a takeover.

BEGIN;
INSERT INTO public.payment VALUES (1);
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.complete('payment', 'order-1', '1', token => %s) $$, :first),
	'IK410', 'a former owner cannot complete');
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.fail('payment', 'order-1', '1', 402, token => %s) $$, :first),
	'IK410', 'nor fail');
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.release('payment', 'order-1', %s) $$, :first),
	'IK410', 'nor release');
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.renew('payment', 'order-1', %s, '1 min') $$, :first),
	'IK410', 'nor renew');
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.checkpoint('payment', 'order-1', %s, 'p') $$, :first),
	'IK410', 'a former owner cannot checkpoint');
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK410', 'its writes cannot commit, although it caught every error');
BEGIN;
INSERT INTO public.payment VALUES (1);
SAVEPOINT inner_block;
SELECT idempotency.renew('payment', 'order-1', :first, '1 min') \g /dev/null
ROLLBACK TO inner_block;
PREPARE TRANSACTION 'idempotency_stale';
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK410', 'its transaction cannot be prepared');
SELECT is_empty('SELECT by_owner FROM public.payment', 'a former owner has no effect');
BEGIN;
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), state, call || ' is refused')
FROM (VALUES
	($$complete('payment', 'order-1')$$, 'IK412'), ($$complete('payment', 'order-1', token => NULL)$$, 'IK412'),
	($$complete('payment', 'order-1', token => 0)$$, 'IK410'), ($$complete('payment', 'order-1', token => -1)$$, 'IK410'),
	($$complete('payment', 'order-9', token => 1)$$, 'IK410'), ($$fail('payment', 'order-1', '{}', 402)$$, 'IK412'),
	($$release('payment', 'order-1')$$, 'IK412'), ($$renew('payment', 'order-1', NULL, '1 min')$$, 'IK412'),
	($$checkpoint('payment', 'order-1', NULL, 'p')$$, 'IK412')) AS v (call, state);
ROLLBACK;

-- The owner finishes together with its writes.

BEGIN;
SELECT idempotency.renew('payment', 'order-1', :second, '1 min') \g /dev/null
INSERT INTO public.payment VALUES (2);
SELECT is(idempotency.complete('payment', 'order-1', '{"paid":  true}', 201, '{"X": "1"}', :second)::text,
	'{"paid":  true}', 'complete returns the response');
COMMIT;
SELECT results_eq('SELECT by_owner FROM public.payment', ARRAY[2], 'the effect happened once');
SELECT results_eq(
	$$ SELECT outcome::text, replayed, token, attempt, recovery_point, status, headers::text, response::text, retry_after
		FROM idempotency.claim('payment', 'order-1', '{"amount": 25}', lease => '1 min') $$,
	$$ VALUES ('replayed', true, NULL::bigint, NULL::integer, NULL, 201, '{"X": "1"}', '{"paid":  true}', NULL::interval) $$,
	'the outcome is replayed');
BEGIN;
INSERT INTO public.payment VALUES (3);
SELECT idempotency.complete('payment', 'order-1', '{"paid":  true}', 201, token => :second) \g /dev/null
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK410', 'a token can finish an operation only once');
SELECT results_eq('SELECT by_owner FROM public.payment', ARRAY[2], 'so the effect does not happen twice');

-- A late owner without a takeover.

SELECT token AS late FROM idempotency.claim('payment', 'order-2', lease => '1 min') \gset
SELECT pg_temp.later('order-2', '1 hour') \g /dev/null
SELECT is((idempotency.peek('payment', 'order-2')).retry_after, '0'::interval, 'an expired lease has no remaining time');
SELECT lives_ok(
	pg_catalog.format($$ SELECT idempotency.fail('payment', 'order-2', '{"error": 1}', 402, token => %s) $$, :late),
	'its owner can still finish');
SELECT results_eq(
	$$ SELECT outcome::text, failed, status FROM idempotency.claim('payment', 'order-2') $$,
	$$ VALUES ('replayed', true, 402) $$, 'and stores the outcome');

-- release

SELECT token AS own FROM idempotency.claim('payment', 'order-3', lease => '1 min') \gset
SELECT idempotency.release('payment', 'order-3', :own) \g /dev/null
SELECT ok(idempotency.peek('payment', 'order-3') IS NULL, 'a released lease leaves no row');
SELECT token AS own FROM idempotency.claim('payment', 'order-3', '{"amount": 30}', lease => '1 hour') \gset
SELECT idempotency.checkpoint('payment', 'order-3', :own, 'charged') \g /dev/null
SELECT idempotency.release('payment', 'order-3', :own) \g /dev/null
SELECT results_eq(
	$$ SELECT state FROM idempotency.keys WHERE scope = 'payment' AND key = 'order-3' $$,
	ARRAY['released'], 'a lease that is released with a checkpoint stays for the next owner');
SELECT is_empty('SELECT key FROM idempotency.zombies', 'the view zombies does not show the new owner');
BEGIN;
SELECT pg_temp.refused(pg_catalog.format($$ SELECT idempotency.renew('payment', 'order-3', %s, '1 min') $$, :own),
	'IK410', 'the token of the released lease is stale');
ROLLBACK;

-- A claim without a lease takes over within its transaction.

BEGIN;
SELECT is(op::text, '(taken_over,f,,2,charged,,,,,f,,,)', 'a claim without a lease takes over, without a token')
FROM idempotency.claim('payment', 'order-3') AS op;
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'and must finish in its transaction');

-- claim_abandoned

SELECT results_eq(
	$$ SELECT scope, key, request::text, token > 0, attempt, recovery_point
		FROM idempotency.claim_abandoned('payment', '1 min', 10) $$,
	$$ VALUES ('payment', 'order-3', '{"amount": 30}', true, 2, 'charged') $$,
	'a completer gets an abandoned operation with its request');
SELECT is_empty(
	$$ SELECT key FROM idempotency.claim_abandoned('payment', '1 min', 10) $$, 'no other completer gets it');
SELECT is_empty(
	$$ SELECT key FROM idempotency.claim_abandoned('refund', '1 min', 10) $$, 'a call takes operations of its scope only');

-- once, forget

SELECT pg_temp.later('order-3', '1 hour') \g /dev/null
SELECT is(idempotency.once('payment', 'order-3'), true, 'once treats an expired lease as absent');
SELECT token AS own FROM idempotency.claim('payment', 'order-4', lease => '1 min') \gset
SELECT is(idempotency.forget('payment', 'order-4'), true, 'forget evicts a running lease');
SELECT idempotency.complete('payment', 'order-4', token => :own) \g /dev/null
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK410', 'its owner has lost it');

-- Retention.

SELECT token AS own FROM idempotency.claim('payment', 'order-5', lease => '1 min', retention => '1 hour') \gset
SELECT idempotency.checkpoint('payment', 'order-5', :own, 'charged') \g /dev/null
SELECT pg_temp.later('order-5', '62 min') \g /dev/null
SELECT ok(idempotency.peek('payment', 'order-5') IS NULL, 'after its retention an abandoned lease counts as absent');
SELECT matches(op::text, '^\(claimed,f,\d+,1,,,,,,f,,,\)$', 'the next owner is the first')
FROM idempotency.claim('payment', 'order-5', lease => '1 min') AS op;

-- A transaction with an open lease can be prepared.

BEGIN;
SELECT token AS own FROM idempotency.claim('payment', 'order-6', lease => '1 min') \gset
PREPARE TRANSACTION 'idempotency_lease';
SELECT is((idempotency.try_claim('payment', 'order-6')).outcome, 'in_progress', 'a prepared lease is in progress');
COMMIT PREPARED 'idempotency_lease';
SELECT lives_ok(
	pg_catalog.format($$ SELECT idempotency.complete('payment', 'order-6', token => %s) $$, :own), 'and can be finished with its token');

-- The guard.

CREATE TRIGGER payment_needs_a_claim
	BEFORE INSERT ON public.payment
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('payment');
BEGIN;
SELECT token AS own FROM idempotency.claim('payment', 'order-7', lease => '1 min') \gset
SELECT lives_ok('INSERT INTO public.payment VALUES (7)', 'a claim with a lease opens the guard');
COMMIT;
SELECT pg_temp.refused('INSERT INTO public.payment VALUES (7)', 'IK403', 'and only for its transaction');
BEGIN;
SELECT idempotency.renew('payment', 'order-7', :own, '1 min') \g /dev/null
SELECT lives_ok('INSERT INTO public.payment VALUES (7)', 'renew opens it too');
SELECT is(idempotency.current_key('payment'), 'order-7', 'and sets the current key');
COMMIT;
BEGIN;
SELECT idempotency.checkpoint('payment', 'order-7', :own, 'charged') \g /dev/null
SELECT lives_ok('INSERT INTO public.payment VALUES (7)', 'checkpoint opens it too');
COMMIT;

-- Arguments out of range.

BEGIN;
SELECT token AS own FROM idempotency.claim('payment', 'order-8', lease => '1 min') \gset
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), sqlstate, call || ' is refused')
FROM (VALUES
	('22023', $$claim('s', 'k', lease => '0')$$),
	('22023', $$try_claim('s', 'k', lease => '-1 second')$$),
	('22023', $$renew('payment', 'order-8', NULL, NULL)$$),
	('22023', $$renew('payment', 'order-8', NULL, '0')$$),
	('22023', $$checkpoint('payment', 'order-8', NULL, NULL)$$),
	('22023', $$checkpoint('payment', 'order-8', NULL, '')$$),
	('54000', $$checkpoint('payment', 'order-8', NULL, 'p', to_json(repeat('x', 1024 * 1024)))$$),
	('54000', $$claim('s', 'k', to_json(repeat('x', 1024 * 1024)), lease => '1 min')$$),
	('22023', $$claim_abandoned('payment', NULL)$$),
	('22023', $$claim_abandoned('payment', '0')$$),
	('22023', $$claim_abandoned('payment', '1 min', 0)$$),
	('IK400', $$renew('payment', NULL, 1, '1 min')$$),
	('IK400', $$checkpoint('', 'k', 1, 'p')$$),
	('IK400', $$claim_abandoned('', '1 min')$$)) AS v (sqlstate, call);
SELECT is(idempotency.complete('payment', 'order-8', '1')::text, '1', 'after these errors, the claim is still valid');
COMMIT;

SELECT * FROM finish();
DROP TABLE public.payment;
