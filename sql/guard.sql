--
-- A transaction that claimed a key and did not complete, fail or release it fails at
-- commit, and its writes are rolled back.
--
\set SHOW_CONTEXT never

CREATE TABLE charge (id int);

-- At COMMIT.
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'open');
INSERT INTO charge VALUES (1);
COMMIT;
\echo :SQLSTATE
SELECT count(*) FROM charge;

-- At the end of a statement that is its own transaction.
SELECT outcome FROM idempotency.claim('guard', 'open');
\echo :SQLSTATE
SELECT outcome FROM idempotency.try_claim('guard', 'open');

-- At the end of several statements that are sent together.
INSERT INTO charge VALUES (2) \; SELECT outcome FROM idempotency.claim('guard', 'open');
SELECT count(*) FROM charge;
SELECT outcome FROM idempotency.claim('guard', 'sent as one', '"request"') \; SELECT idempotency.complete('guard', 'sent as one', '1');
SELECT response FROM idempotency.claim('guard', 'sent as one');

-- ROLLBACK needs no outcome, and neither does an error.
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'open');
ROLLBACK;
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'open');
SELECT 1 / 0;
COMMIT;

-- The next transaction starts without claims.
BEGIN;
INSERT INTO charge VALUES (3);
COMMIT;
SELECT count(*) FROM charge;

-- With several open claims, the error names the oldest and counts the others.
BEGIN;
SELECT (idempotency.claim('guard', k)).outcome FROM unnest('{a,b,c}'::text[]) AS k;
COMMIT;
\echo :SQLSTATE
BEGIN;
SELECT (idempotency.claim('guard', k)).outcome FROM unnest('{a,b,c,d}'::text[]) AS k;
SELECT idempotency.complete('guard', 'a');
SELECT idempotency.release('guard', 'c');
COMMIT;
BEGIN;
SELECT (idempotency.claim('guard', k)).outcome FROM unnest('{a,b,c}'::text[]) AS k;
SELECT idempotency.complete('guard', k) FROM unnest('{a,b}'::text[]) AS k;
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'guard' AND key IN ('a', 'b', 'c', 'd');

-- Each way to finish closes a claim; a replay and a refused call open none.
BEGIN;
SELECT (idempotency.claim('guard', k)).outcome FROM unnest('{x,y,z}'::text[]) AS k;
SELECT idempotency.complete('guard', 'x'), idempotency.fail('guard', 'y', NULL, 400), idempotency.release('guard', 'z');
COMMIT;
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'x');
SELECT outcome FROM idempotency.try_claim('guard', 'sent as one', '"other"');
SELECT idempotency.once('guard', 'message');
COMMIT;

-- Releasing a savepoint keeps the claim open; rolling it back removes the claim.
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('guard', 'open');
RELEASE s;
COMMIT;
BEGIN;
SAVEPOINT s;
SELECT outcome FROM idempotency.claim('guard', 'open');
ROLLBACK TO s;
COMMIT;

--
-- DO blocks and procedures
--

DO $$
BEGIN
	PERFORM idempotency.claim('guard', 'do');
END
$$;
\echo :SQLSTATE

-- The check also covers COMMIT inside a procedure; earlier commits stay.
DO $$
BEGIN
	PERFORM idempotency.claim('guard', 'do 1');
	PERFORM idempotency.complete('guard', 'do 1', '"first"');
	COMMIT;
	PERFORM idempotency.claim('guard', 'do 2');
	COMMIT;
	RAISE EXCEPTION 'never reached';
END
$$;
\echo :SQLSTATE
SELECT key, response FROM idempotency.key WHERE scope = 'guard' AND key LIKE 'do%' ORDER BY key;

CREATE PROCEDURE charge_many(p_forget int) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..3 LOOP
		PERFORM idempotency.claim('guard.many', i::text);
		INSERT INTO charge VALUES (100 + i);
		IF i <> p_forget THEN
			PERFORM idempotency.complete('guard.many', i::text, to_json(i));
		END IF;
		COMMIT;
	END LOOP;
END
$$;
CALL charge_many(p_forget => 2);
\echo :SQLSTATE
SELECT key FROM idempotency.key WHERE scope = 'guard.many' ORDER BY key;
SELECT id FROM charge WHERE id > 100 ORDER BY id;

-- ROLLBACK inside gives up the claims.
CREATE PROCEDURE charge_undone() LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim('guard', 'undone');
	INSERT INTO charge VALUES (200);
	ROLLBACK;
	PERFORM idempotency.claim('guard', 'undone');
	INSERT INTO charge VALUES (201);
	PERFORM idempotency.complete('guard', 'undone', '"second"');
	COMMIT;
END
$$;
CALL charge_undone();
SELECT response FROM idempotency.claim('guard', 'undone');
SELECT id FROM charge WHERE id >= 200;

-- COMMIT AND CHAIN is checked too.
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'chained');
COMMIT AND CHAIN;
\echo :SQLSTATE
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'chained');
SELECT idempotency.complete('guard', 'chained');
COMMIT AND CHAIN;
SELECT outcome FROM idempotency.claim('guard', 'chained');
COMMIT;

--
-- Code that runs at commit
--

-- A deferred trigger runs before the check, and can complete an open claim,
CREATE FUNCTION complete_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.complete('guard', NEW.key, to_json(NEW.key));
	RETURN NULL;
END
$$;
CREATE TABLE late (key text);
CREATE CONSTRAINT TRIGGER complete_late AFTER INSERT ON late
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION complete_late();
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'late');
INSERT INTO late VALUES ('late');
COMMIT;
SELECT response FROM idempotency.claim('guard', 'late');
-- or fail by completing a key that is not claimed,
INSERT INTO late VALUES ('never claimed');
\echo :SQLSTATE
-- or claim a key, which the check then covers.
CREATE FUNCTION claim_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim('guard', NEW.key);
	RETURN NULL;
END
$$;
DROP TRIGGER complete_late ON late;
CREATE CONSTRAINT TRIGGER claim_late AFTER INSERT ON late
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION claim_late();
INSERT INTO late VALUES ('claimed late');
\echo :SQLSTATE
SELECT count(*) FROM late;

-- A cursor WITH HOLD runs at commit too.
BEGIN;
DECLARE held CURSOR WITH HOLD FOR SELECT outcome FROM idempotency.claim('guard', 'cursor');
COMMIT;
\echo :SQLSTATE

--
-- Two-phase commit
--

-- PREPARE TRANSACTION with an open claim is refused.
BEGIN;
INSERT INTO charge VALUES (300);
SELECT outcome FROM idempotency.claim('guard', 'prepared');
PREPARE TRANSACTION 'regress_idempotency_guard';
\echo :SQLSTATE
BEGIN;
SELECT (idempotency.claim('guard', k)).outcome FROM unnest('{prepared 1,prepared 2,prepared 3}'::text[]) AS k;
PREPARE TRANSACTION 'regress_idempotency_guard';
ROLLBACK PREPARED 'regress_idempotency_guard';
SELECT count(*) FROM charge WHERE id = 300;

--
-- Tests that roll back: check_commit() and SET CONSTRAINTS ALL IMMEDIATE raise what COMMIT would
--

SELECT idempotency.check_commit();
BEGIN;
SELECT outcome FROM idempotency.claim('guard', 'checked');
SAVEPOINT s;
SELECT idempotency.check_commit();
\echo :SQLSTATE
ROLLBACK TO s;
SET CONSTRAINTS ALL IMMEDIATE;
\echo :SQLSTATE
ROLLBACK TO s;
-- nothing else, and not of other constraints
SET CONSTRAINTS ALL DEFERRED;
SET CONSTRAINTS claim_late IMMEDIATE;
SELECT idempotency.complete('guard', 'checked');
SELECT idempotency.check_commit();
SET CONSTRAINTS ALL IMMEDIATE;
SET CONSTRAINTS ALL DEFERRED;
-- and again, whatever was checked before
SELECT outcome FROM idempotency.claim('guard', 'checked later');
SAVEPOINT s;
SELECT idempotency.check_commit();
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idempotency.release('guard', 'checked later');
SELECT idempotency.check_commit();
ROLLBACK;
-- not distributed: a guard of leases
-- A lease may stay open, but the last call about it must have succeeded.
ALTER SEQUENCE idempotency.token INCREMENT 1 RESTART 1000001;
BEGIN;
SELECT token AS own FROM idempotency.claim('guard', 'leased', lease => '1 min') \gset
SELECT idempotency.check_commit();
SAVEPOINT s;
SELECT idempotency.complete('guard', 'leased', '1', status => 1000, token => :own);
ROLLBACK TO s;
SELECT idempotency.check_commit();
\echo :SQLSTATE
ROLLBACK TO s;
SET CONSTRAINTS ALL IMMEDIATE;
\echo :SQLSTATE
ROLLBACK TO s;
SELECT idempotency.complete('guard', 'leased', '1', token => :own);
SELECT idempotency.check_commit();
ROLLBACK;
-- both layouts

DROP TABLE charge, late;
DROP FUNCTION complete_late, claim_late;
DROP PROCEDURE charge_many, charge_undone;
