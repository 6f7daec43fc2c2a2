-- extension only: locks and memory of the library
--
-- The locks that one transaction can hold, and the memory that it keeps.
--
\set SHOW_CONTEXT never

-- Each claim holds a lock until its transaction ends, and the lock table is limited.
-- Beyond the limit, an error names the setting to raise, and only the savepoint is
-- lost.
BEGIN;
SELECT outcome FROM idempotency.claim('limits', 'kept');
DO $$
DECLARE
	message text;
	detail text;
	hint text;
BEGIN
	FOR i IN 1..10000000 LOOP
		PERFORM idempotency.claim('limits', 'many');
		PERFORM idempotency.release('limits', 'many');
		PERFORM idempotency.claim('limits', 'many ' || i);
		PERFORM idempotency.release('limits', 'many ' || i);
	END LOOP;
	RAISE 'never reached';
EXCEPTION WHEN out_of_memory THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RAISE NOTICE '%: %', SQLSTATE, message;
	RAISE NOTICE '%', regexp_replace(detail, '\d+', 'N');
	RAISE NOTICE '%', hint;
END
$$;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
SELECT idempotency.complete('limits', 'kept');
COMMIT;
SELECT outcome FROM idempotency.claim('limits', 'kept');

-- A transaction keeps none for the operations that it finished.
CREATE FUNCTION work_in_transaction(p_times int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..p_times LOOP
		PERFORM idempotency.claim('limits', 'same');
		PERFORM idempotency.release('limits', 'same');
		BEGIN
			PERFORM idempotency.claim('limits', 'same');
			PERFORM idempotency.release('limits', 'same');
		EXCEPTION WHEN division_by_zero THEN
			NULL;
		END;
	END LOOP;
END
$$;
BEGIN;
SELECT work_in_transaction(100);
SELECT used_bytes AS before FROM pg_backend_memory_contexts WHERE name = 'TopTransactionContext' \gset
SELECT work_in_transaction(2000);
SELECT used_bytes - :before < 8192 AS flat FROM pg_backend_memory_contexts WHERE name = 'TopTransactionContext';
COMMIT;
DROP FUNCTION work_in_transaction;
