-- The public contract: which transactions may end.  A claim that is still open,
-- and a lost one, make COMMIT and PREPARE TRANSACTION fail.  These tests are
-- themselves transactions, so that this file is none.

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, false)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

-- What fails here fails on purpose; what does not fails its test.
\set ON_ERROR_STOP off
\set VERBOSITY sqlstate

SELECT plan(13);

CREATE TABLE public.charge (customer integer);

-- IK428

SELECT idempotency.claim('commit', 'alone') \g /dev/null
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a statement that only claims cannot commit');

BEGIN;
SELECT idempotency.claim('commit', 'open') \g /dev/null
INSERT INTO public.charge VALUES (1);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'nor can a transaction with an open claim');

BEGIN;
SELECT idempotency.claim('commit', 'prepared') \g /dev/null
INSERT INTO public.charge VALUES (2);
PREPARE TRANSACTION 'idempotency_open';
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'nor can it be prepared');

BEGIN;
SAVEPOINT inner_block;
SELECT idempotency.claim('commit', 'inner') \g /dev/null
RELEASE inner_block;
INSERT INTO public.charge VALUES (3);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'a claim of a released savepoint is open as well');

BEGIN;
SELECT idempotency.claim('commit', 'undone') \g /dev/null
SAVEPOINT inner_block;
SELECT idempotency.complete('commit', 'undone') \g /dev/null
ROLLBACK TO inner_block;
INSERT INTO public.charge VALUES (4);
COMMIT;
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK428', 'and so is one whose completion was rolled back');

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
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK412', 'a call without a claim that was caught dooms the transaction');

BEGIN;
INSERT INTO public.charge VALUES (6);
SAVEPOINT inner_block;
SELECT idempotency.release('commit', 'lost') \g /dev/null
ROLLBACK TO inner_block;
PREPARE TRANSACTION 'idempotency_lost';
SELECT is(:'LAST_ERROR_SQLSTATE'::text, 'IK412', 'rolled back or not, and it cannot be prepared either');

SELECT is_empty('SELECT customer FROM public.charge', 'not one of these transactions left an effect');
SELECT is_empty('SELECT key FROM idempotency.keys', 'nor a key');

-- What may commit.

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
	'claims that are completed, failed, released or rolled back let the transaction commit');
SELECT results_eq('SELECT customer FROM public.charge', ARRAY[7], 'with its effect');

BEGIN;
SELECT idempotency.claim('commit', 'given up') \g /dev/null
SELECT idempotency.once('commit', 'message') \g /dev/null
ROLLBACK;
SELECT is_empty(
	$$ SELECT key FROM idempotency.keys WHERE key IN ('given up', 'message') $$,
	'what is rolled back is not remembered');

SELECT is(idempotency.once('commit', 'message'), true, 'and can be done again');

SELECT * FROM finish();
DROP TABLE public.charge;
