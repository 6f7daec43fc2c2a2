-- The public contract: which transactions can commit. An open claim and a lost claim
-- make COMMIT and PREPARE TRANSACTION fail. These tests are transactions themselves, so
-- this file does not run in one.

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, false)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

-- Errors here are intended; an unexpected success fails its test.
\set ON_ERROR_STOP off
\set VERBOSITY sqlstate

SELECT plan(15);

CREATE TABLE public.charge (customer integer);

-- IK428

SELECT idempotency.claim('commit', 'alone') \g /dev/null
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a statement that only claims cannot commit');

BEGIN;
SELECT idempotency.claim('commit', 'open') \g /dev/null
INSERT INTO public.charge VALUES (1);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a transaction with an open claim cannot commit');

BEGIN;
SELECT idempotency.claim('commit', 'prepared') \g /dev/null
INSERT INTO public.charge VALUES (2);
PREPARE TRANSACTION 'idempotency_open';
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a transaction with an open claim cannot be prepared');

BEGIN;
SAVEPOINT inner_block;
SELECT idempotency.claim('commit', 'inner') \g /dev/null
RELEASE inner_block;
INSERT INTO public.charge VALUES (3);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a claim of a released savepoint is still open');

BEGIN;
SELECT idempotency.claim('commit', 'undone') \g /dev/null
SAVEPOINT inner_block;
SELECT idempotency.complete('commit', 'undone') \g /dev/null
ROLLBACK TO inner_block;
INSERT INTO public.charge VALUES (4);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a claim whose complete() was rolled back is open again');

-- A test that rolls back

BEGIN;
SELECT idempotency.claim('commit', 'tested') \g /dev/null
SELECT throws_ok('SELECT idempotency.check_commit()', 'IK428', NULL, 'a test that rolls back meets IK428 by check_commit()');
SELECT throws_ok('SET CONSTRAINTS ALL IMMEDIATE', 'IK428', NULL, 'and by SET CONSTRAINTS ALL IMMEDIATE');
ROLLBACK;

-- IK412

BEGIN;
INSERT INTO public.charge VALUES (5);
DO $$
BEGIN
	PERFORM idempotency.complete('commit', 'lost');
EXCEPTION WHEN SQLSTATE 'IK412' THEN
	NULL;
END $$;
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK412', 'after a caught call without a claim the transaction cannot commit');

BEGIN;
INSERT INTO public.charge VALUES (6);
SAVEPOINT inner_block;
SELECT idempotency.release('commit', 'lost') \g /dev/null
ROLLBACK TO inner_block;
PREPARE TRANSACTION 'idempotency_lost';
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK412', 'nor be prepared, even after a rollback to a savepoint');

SELECT is_empty('SELECT customer FROM public.charge', 'none of these transactions had an effect');
SELECT is_empty('SELECT key FROM idempotency.keys', 'nor a key');

-- Transactions that can commit.

\set ON_ERROR_STOP on

BEGIN;
SELECT idempotency.claim('commit', 'completed') \g /dev/null
SELECT idempotency.claim('commit', 'failed') \g /dev/null
SELECT idempotency.claim('commit', 'released') \g /dev/null
SAVEPOINT inner_block;
SELECT idempotency.claim('commit', 'rolled back') \g /dev/null
ROLLBACK TO inner_block;
SELECT idempotency.complete('commit', 'completed') \g /dev/null
SELECT idempotency.fail('commit', 'failed', '{}', 402) \g /dev/null
SELECT idempotency.release('commit', 'released') \g /dev/null
INSERT INTO public.charge VALUES (7);
COMMIT;
SELECT results_eq(
	'SELECT key, state FROM idempotency.keys ORDER BY key',
	$$ VALUES ('completed'::idempotency.keytext, 'completed'), ('failed', 'failed') $$,
	'a transaction commits after its claims are completed, failed, released or rolled back');
SELECT results_eq('SELECT customer FROM public.charge', ARRAY[7], 'together with its effect');

BEGIN;
SELECT idempotency.claim('commit', 'given up') \g /dev/null
SELECT idempotency.once('commit', 'message') \g /dev/null
ROLLBACK;
SELECT is_empty(
	$$ SELECT key FROM idempotency.keys WHERE key IN ('given up', 'message') $$,
	'a rolled-back outcome is not stored');

SELECT is(idempotency.once('commit', 'message'), true, 'and its key can be claimed again');

SELECT * FROM finish();
DROP TABLE public.charge;
