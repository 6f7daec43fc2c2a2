--
-- Claims and savepoints: rolling back a savepoint removes its claims and reopens claims
-- that were finished in it; releasing it gives its claims to the parent.
--
\set SHOW_CONTEXT never

CREATE TABLE charge (id int PRIMARY KEY);

-- The state of a key for this transaction: in_progress for an open claim, stored, or
-- absent. The query leaves no trace.
CREATE FUNCTION pg_temp.state_of(p_key text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	state text;
BEGIN
	BEGIN
		state := outcome FROM idempotency.try_claim('savepoint', p_key);
		RAISE EXCEPTION 'undo the claim' USING ERRCODE = 'P9999';
	EXCEPTION WHEN SQLSTATE 'P9999' THEN
		RETURN CASE state WHEN 'claimed' THEN 'absent' WHEN 'replayed' THEN 'stored' ELSE state END;
	END;
END
$$;

-- Rolling back a savepoint removes the claim, and the key can be claimed again.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'rolled back');
SELECT pg_temp.state_of('rolled back');
ROLLBACK TO s;
SELECT pg_temp.state_of('rolled back');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'savepoint';

BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'again', '{"try": 1}');
ROLLBACK TO s;
SELECT outcome FROM idempotency.claim('savepoint', 'again', '{"try": 2}');
SELECT idempotency.complete('savepoint', 'again', '"second try"');
COMMIT;
SELECT outcome, response FROM idempotency.claim('savepoint', 'again', '{"try": 2}');

-- not distributed: locks of keys
-- The lock is released too.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'lock');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
ROLLBACK TO s;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory';
COMMIT;
-- both layouts

-- Finishing the claim then raises IK412.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'lost');
ROLLBACK TO s;
SELECT idempotency.complete('savepoint', 'lost');
\echo :SQLSTATE
ROLLBACK;

-- Releasing a savepoint gives its claim to the parent. The claim is still open: finish
-- it there, or the commit fails.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'handed up');
RELEASE s;
SELECT pg_temp.state_of('handed up');
SELECT idempotency.complete('savepoint', 'handed up', '"done above"');
COMMIT;
SELECT response FROM idempotency.claim('savepoint', 'handed up');

BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'forgotten');
RELEASE s;
COMMIT;
\echo :SQLSTATE

-- If the parent is a savepoint, rolling that back removes the claim.
BEGIN;
SAVEPOINT outer_one;
SAVEPOINT inner_one;
SELECT outcome FROM idempotency.claim('savepoint', 'handed up, then rolled back');
RELEASE inner_one;
ROLLBACK TO outer_one;
SELECT pg_temp.state_of('handed up, then rolled back');
COMMIT;

-- Rolling back a complete() reopens the claim,
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'completed twice');
SAVEPOINT s;
SELECT idempotency.complete('savepoint', 'completed twice', '"first"');
SELECT pg_temp.state_of('completed twice');
ROLLBACK TO s;
SELECT pg_temp.state_of('completed twice');
SELECT idempotency.complete('savepoint', 'completed twice', '"second"');
COMMIT;
SELECT response FROM idempotency.claim('savepoint', 'completed twice');

-- and without another outcome the commit fails.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'complete undone');
SAVEPOINT s;
SELECT idempotency.complete('savepoint', 'complete undone');
ROLLBACK TO s;
COMMIT;
\echo :SQLSTATE
SELECT pg_temp.state_of('complete undone');

-- The same holds for fail() and release().
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'fail undone');
SELECT outcome FROM idempotency.claim('savepoint', 'release undone');
SAVEPOINT s;
SELECT idempotency.fail('savepoint', 'fail undone', NULL, 500);
SELECT idempotency.release('savepoint', 'release undone');
SELECT pg_temp.state_of('fail undone') AS failed, pg_temp.state_of('release undone') AS released;
ROLLBACK TO s;
SELECT pg_temp.state_of('fail undone') AS failed, pg_temp.state_of('release undone') AS released;
SELECT idempotency.complete('savepoint', 'fail undone', '"after all"');
SELECT idempotency.complete('savepoint', 'release undone', '"after all"');
COMMIT;
WITH c AS (SELECT k, idempotency.claim('savepoint', k) AS op FROM unnest('{fail undone,release undone}'::text[]) AS k)
	SELECT k, (op).status, (op).response, (op).failed FROM c;

-- Rolling back an outer savepoint also undoes a complete() in a released inner one.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'released, then undone');
SAVEPOINT outer_one;
SAVEPOINT inner_one;
SELECT idempotency.complete('savepoint', 'released, then undone', '"inner"');
RELEASE inner_one;
SELECT pg_temp.state_of('released, then undone');
ROLLBACK TO outer_one;
SELECT pg_temp.state_of('released, then undone');
SELECT idempotency.complete('savepoint', 'released, then undone', '"outer"');
COMMIT;
SELECT response FROM idempotency.claim('savepoint', 'released, then undone');

-- If the rollback covers the claim and its outcome, both are gone.
BEGIN;
SAVEPOINT outer_one;
SELECT outcome FROM idempotency.claim('savepoint', 'both gone');
SAVEPOINT inner_one;
SELECT idempotency.complete('savepoint', 'both gone');
ROLLBACK TO outer_one;
SELECT pg_temp.state_of('both gone');
COMMIT;

-- Claimed in a savepoint, finished in the same or in a deeper one, released: finished.
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idempotency.claim('savepoint', 'same');
SELECT outcome FROM idempotency.claim('savepoint', 'deeper');
SELECT idempotency.complete('savepoint', 'same', '1');
SAVEPOINT b;
SELECT idempotency.complete('savepoint', 'deeper', '2');
RELEASE a;
COMMIT;
SELECT k, (idempotency.claim('savepoint', k)).response FROM unnest('{same,deeper}'::text[]) AS k;

-- Released and claimed again inside: the rollback restores the first claim with its
-- request.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'first claim', '{"claim": 1}');
SAVEPOINT s;
SELECT idempotency.release('savepoint', 'first claim');
SELECT outcome FROM idempotency.claim('savepoint', 'first claim', '{"claim": 2}');
ROLLBACK TO s;
SELECT idempotency.complete('savepoint', 'first claim', '"first"');
COMMIT;
SELECT outcome FROM idempotency.try_claim('savepoint', 'first claim', '{"claim": 1}');
SELECT outcome FROM idempotency.try_claim('savepoint', 'first claim', '{"claim": 2}');

-- After releasing the savepoint, the second claim counts.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'second claim', '{"claim": 1}');
SAVEPOINT s;
SELECT idempotency.release('savepoint', 'second claim');
SELECT outcome FROM idempotency.claim('savepoint', 'second claim', '{"claim": 2}');
RELEASE s;
SELECT idempotency.complete('savepoint', 'second claim', '"second"');
COMMIT;
SELECT outcome FROM idempotency.try_claim('savepoint', 'second claim', '{"claim": 2}');
SELECT outcome FROM idempotency.try_claim('savepoint', 'second claim', '{"claim": 1}');

-- The server's own errors have the same effect: the savepoint of the failed statement
-- is rolled back, and the claims of other keys stay.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'stays');
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('savepoint', 'goes');
SELECT 1 / 0;
ROLLBACK TO s;
SELECT pg_temp.state_of('stays') AS stays, pg_temp.state_of('goes') AS goes;
SELECT idempotency.complete('savepoint', 'stays');
COMMIT;

-- Savepoints of the same name, rolled back repeatedly.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'many times');
SAVEPOINT s;
SELECT idempotency.complete('savepoint', 'many times', '1');
ROLLBACK TO s;
SELECT idempotency.complete('savepoint', 'many times', '2');
ROLLBACK TO s;
SAVEPOINT s;
SELECT idempotency.complete('savepoint', 'many times', '3');
ROLLBACK TO s;
RELEASE s;
SELECT idempotency.complete('savepoint', 'many times', '4');
COMMIT;
SELECT response FROM idempotency.claim('savepoint', 'many times');

--
-- PL/pgSQL: every block with EXCEPTION is a savepoint
--

-- A claim in the inner block is rolled back with it; the outer block claims again.
BEGIN;
DO $$
DECLARE
	op idempotency.operation;
BEGIN
	BEGIN
		op := idempotency.claim('savepoint', 'block');
		RAISE NOTICE 'inner: %', op.outcome;
		INSERT INTO charge VALUES (1), (1);
	EXCEPTION WHEN unique_violation THEN
		RAISE NOTICE 'caught';
	END;
	op := idempotency.claim('savepoint', 'block');
	RAISE NOTICE 'outer: %', op.outcome;
	PERFORM idempotency.complete('savepoint', 'block', '"outer"');
END
$$;
COMMIT;
SELECT response FROM idempotency.claim('savepoint', 'block');

-- The writes and complete() in the inner block are rolled back; the outer block calls
-- fail().
DO $$
BEGIN
	PERFORM idempotency.claim('savepoint', 'inner fails');
	BEGIN
		INSERT INTO charge VALUES (2);
		PERFORM idempotency.complete('savepoint', 'inner fails', '"success"');
		INSERT INTO charge VALUES (2);
	EXCEPTION WHEN unique_violation THEN
		PERFORM idempotency.fail('savepoint', 'inner fails', '"failure"', 409);
	END;
END
$$;
SELECT status, response, failed FROM idempotency.claim('savepoint', 'inner fails');
SELECT count(*) FROM charge;

-- A block without an error gives its claim to the enclosing function.
CREATE FUNCTION pg_temp.claim_in_block(p_key text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		BEGIN
			RETURN outcome FROM idempotency.claim('savepoint', p_key);
		EXCEPTION WHEN division_by_zero THEN
			RETURN 'never';
		END;
	EXCEPTION WHEN division_by_zero THEN
		RETURN 'never';
	END;
END
$$;
BEGIN;
SELECT pg_temp.claim_in_block('block, no error');
SELECT idempotency.complete('savepoint', 'block, no error');
COMMIT;
SELECT pg_temp.claim_in_block('block, forgotten');

-- Deep nesting: 250 levels with one claim each. Every hundredth level fails after its
-- complete(), which also rolls back the deeper levels.
CREATE FUNCTION pg_temp.nest(level int, depth int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim('savepoint.nest', level::text);
	BEGIN
		INSERT INTO charge VALUES (1000 + level);
		IF level < depth THEN
			PERFORM pg_temp.nest(level + 1, depth);
		END IF;
		PERFORM idempotency.complete('savepoint.nest', level::text, to_json(level));
		IF level % 100 = 0 THEN
			RAISE EXCEPTION 'level %', level USING ERRCODE = 'P0100';
		END IF;
	EXCEPTION WHEN SQLSTATE 'P0100' THEN
		PERFORM idempotency.fail('savepoint.nest', level::text, to_json(SQLERRM), 500);
	END;
END
$$;
SELECT pg_temp.nest(1, 250);
-- Levels 1 to 99 complete, level 100 fails, and the deeper levels leave nothing.
SELECT count(*) FILTER (WHERE status > 0) AS completed, count(*) FILTER (WHERE status < 0) AS failed,
		max(key::text::int) AS deepest
	FROM idempotency.key WHERE scope = 'savepoint.nest';
SELECT count(*), max(id) FROM charge WHERE id > 1000;

-- Two hundred savepoints on one claim, half of them rolled back.
BEGIN;
SELECT outcome FROM idempotency.claim('savepoint', 'two hundred');
DO $$
BEGIN
	FOR i IN 1..200 LOOP
		BEGIN
			PERFORM idempotency.release('savepoint', 'two hundred');
			PERFORM idempotency.claim('savepoint', 'two hundred', to_json(i));
			IF i % 2 = 0 THEN
				RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
			END IF;
		EXCEPTION WHEN SQLSTATE 'P9999' THEN
			NULL;
		END;
	END LOOP;
END
$$;
SELECT idempotency.complete('savepoint', 'two hundred');
COMMIT;
SELECT outcome FROM idempotency.try_claim('savepoint', 'two hundred', '199');
SELECT outcome FROM idempotency.try_claim('savepoint', 'two hundred', '200');

DROP TABLE charge;
