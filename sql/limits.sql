--
-- Many claims: the number that one transaction can hold, and the memory of a session.
--
\set SHOW_CONTEXT never

-- One thousand open claims, completed in the order of claiming.
BEGIN;
SELECT count((idempotency.claim('limits', 'open ' || n)).outcome) FROM generate_series(1, 1000) AS n;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
SELECT count(idempotency.complete('limits', 'open ' || n, to_json(n))::text) FROM generate_series(1, 1000) AS n;
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'limits' AND key LIKE 'open%';


-- A session keeps no memory for finished operations, whatever their outcome.
CREATE PROCEDURE work(p_round int, p_times int) LANGUAGE plpgsql AS $$
DECLARE
	name text;
	own bigint;
BEGIN
	FOR i IN 1..p_times LOOP
		name := p_round || '/' || i;
		PERFORM idempotency.claim('limits', name, '{"a": 1}');
		PERFORM idempotency.complete('limits', name, '{"b": 2}', 200, '{"c": 3}');
		COMMIT;
		PERFORM idempotency.claim('limits', name, '{"a": 1}');
		PERFORM idempotency.try_claim('limits', name, '{"a": 2}');
		PERFORM idempotency.try_claim('limits', name || ' rolled back');
		PERFORM idempotency.once('limits', name || ' once');
		ROLLBACK;
		own := (idempotency.claim('limits', name || ' leased', '{"a": 1}', lease => '1 microsecond')).token;
		COMMIT;
		PERFORM idempotency.renew('limits', name || ' leased', own, '1 microsecond');
		PERFORM idempotency.checkpoint('limits', name || ' leased', own, 'begun', '{"b": 2}');
		COMMIT;
		SELECT token INTO own FROM idempotency.claim_abandoned('limits', '1 min');
		PERFORM idempotency.try_claim('limits', name || ' leased', lease => '1 min');
		PERFORM idempotency.complete('limits', name || ' leased', '{"b": 2}', token => own);
		COMMIT;
	END LOOP;
END
$$;
CREATE FUNCTION memory() RETURNS bigint LANGUAGE sql AS 'SELECT sum(used_bytes)::bigint FROM pg_backend_memory_contexts';
CALL work(1, 60);
SELECT memory() AS before \gset
CALL work(2, 600);
SELECT memory() - :before < 16384 AS flat;


DROP PROCEDURE work;
DROP FUNCTION memory;
