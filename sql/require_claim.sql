--
-- require_claim(): a table with this trigger refuses writes of a transaction that has
-- not claimed a key in the scope. current_key() returns that key.
--
\set SHOW_CONTEXT never

CREATE TABLE charge (
	id int PRIMARY KEY,
	amount int,
	key text DEFAULT idempotency.current_key('charge.create')
);
CREATE TRIGGER require_claim BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge.create');

-- Executes a statement, returns its result, and rolls it back.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION
	WHEN SQLSTATE 'P9999' THEN
		RETURN 'accepted';
	WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
		RETURN SQLSTATE || ': ' || message || coalesce('. ' || nullif(detail, ''), '');
END
$$;

--
-- The guard
--

-- A write without a claim fails.
INSERT INTO charge VALUES (1, 100);
\echo :SQLSTATE

-- After a claim, every write succeeds, also after complete().
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k1');
INSERT INTO charge VALUES (1, 100);
INSERT INTO charge VALUES (2, 200), (3, 300);
UPDATE charge SET amount = amount + 1;
SELECT idempotency.complete('charge.create', 'k1');
DELETE FROM charge WHERE id = 3;
COMMIT;
SELECT * FROM charge ORDER BY id;

-- The next transaction needs its own claim.
UPDATE charge SET amount = 0;

-- A claim in another scope does not count, nor one in a scope with the same prefix.
BEGIN;
SELECT (idempotency.claim(s, 'k2')).outcome FROM unnest('{refund,charge.create.more,charge,CHARGE.CREATE}'::text[]) AS s;
INSERT INTO charge VALUES (4, 400);
ROLLBACK;

-- A forgotten claim does not cover writes.
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'forgotten');
SELECT idempotency.complete('charge.create', 'forgotten');
SELECT idempotency.forget('charge.create', 'forgotten'), idempotency.current_key('charge.create') IS NULL AS no_key;
INSERT INTO charge VALUES (4, 400);
ROLLBACK;

-- After fail() the guard stays open to the end of the transaction, as after complete().
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k3');
SELECT idempotency.fail('charge.create', 'k3', '"reason"', 402);
SELECT pg_temp.try('INSERT INTO charge VALUES (5, 500)');
ROLLBACK;

--
-- The last call for the scope decides
--

BEGIN;
-- A replay closes the guard, because the earlier transaction made these writes.
SELECT outcome FROM idempotency.claim('charge.create', 'k1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS replayed;
-- A new claim opens it.
SELECT outcome FROM idempotency.claim('charge.create', 'k4');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS claimed, idempotency.current_key('charge.create');
-- A replay closes it again,
SELECT outcome FROM idempotency.claim('charge.create', 'k1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS replayed, idempotency.current_key('charge.create');
-- but not a replay in another scope.
SELECT outcome FROM idempotency.claim('charge.create', 'k5');
SELECT outcome FROM idempotency.claim('other', 'k1');
SELECT idempotency.complete('other', 'k1');
SELECT outcome FROM idempotency.claim('other', 'k1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS claimed;
ROLLBACK;

-- release() closes it, because later writes would commit without a key.
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k6');
SELECT idempotency.release('charge.create', 'k6');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS released, idempotency.current_key('charge.create');
SELECT outcome FROM idempotency.claim('charge.create', 'k6');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS claimed, idempotency.current_key('charge.create');
ROLLBACK;

-- try_claim() opens and closes it like claim(): in_progress and mismatched close it.
BEGIN;
SELECT outcome FROM idempotency.try_claim('charge.create', 'k7', '{"a": 1}');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS claimed, idempotency.current_key('charge.create');
SELECT outcome FROM idempotency.try_claim('charge.create', 'k7', '{"a": 1}');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS in_progress, idempotency.current_key('charge.create');
SELECT idempotency.complete('charge.create', 'k7');
SELECT outcome FROM idempotency.try_claim('charge.create', 'k8');
SELECT outcome FROM idempotency.try_claim('charge.create', 'k7', '{"a": 2}');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS mismatched, idempotency.current_key('charge.create');
ROLLBACK;

-- once() opens it the first time, and closes it the second time.
BEGIN;
SELECT idempotency.once('charge.create', 'm1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS new, idempotency.current_key('charge.create');
SELECT idempotency.once('charge.create', 'm1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS seen, idempotency.current_key('charge.create');
-- A batch opens it if any key was new; then no single key is the current one.
SELECT * FROM idempotency.once_many('charge.create', ARRAY['m1', 'm2', 'm3']);
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS some_new, idempotency.current_key('charge.create');
SELECT * FROM idempotency.once_many('charge.create', ARRAY['m1', 'm2']);
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS none_new, idempotency.current_key('charge.create');
ROLLBACK;

-- peek() claims nothing, and changes nothing.
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k9');
SELECT outcome FROM idempotency.peek('charge.create', 'k1');
SELECT pg_temp.try('INSERT INTO charge VALUES (6, 600)') AS still_claimed;
ROLLBACK;

--
-- Savepoints
--

-- Rolling back a savepoint removes the claims made in it, and restores the ones lost in
-- it.
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idempotency.claim('charge.create', 'k10');
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS in_savepoint, idempotency.current_key('charge.create');
ROLLBACK TO a;
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS rolled_back, idempotency.current_key('charge.create');
SELECT outcome FROM idempotency.claim('charge.create', 'k11');
SAVEPOINT b;
SELECT outcome FROM idempotency.claim('charge.create', 'k1');
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS replayed, idempotency.current_key('charge.create');
ROLLBACK TO b;
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS restored, idempotency.current_key('charge.create');
SELECT idempotency.release('charge.create', 'k11');
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS released;
ROLLBACK TO b;
SELECT pg_temp.try('INSERT INTO charge VALUES (7, 700)') AS restored, idempotency.current_key('charge.create');
-- After releasing the savepoint, its last call counts.
SELECT outcome FROM idempotency.claim('charge.create', 'k12');
SAVEPOINT c;
SELECT outcome FROM idempotency.claim('charge.create', 'k13');
SAVEPOINT d;
SELECT outcome FROM idempotency.claim('charge.create', 'k14');
RELEASE c;
SELECT idempotency.current_key('charge.create');
ROLLBACK TO b;
SELECT idempotency.current_key('charge.create');
ROLLBACK;
SELECT idempotency.current_key('charge.create');

--
-- All forms of writing
--

-- Each form without a claim and with one. The rows 1 and 2 exist; a plain INSERT into a
-- view writes to its table.
CREATE VIEW charge_view AS SELECT * FROM charge;
CREATE FUNCTION charge_by_function() RETURNS void LANGUAGE sql AS 'INSERT INTO charge VALUES (8, 800)';
CREATE TABLE way (n int, what text, statement text);
INSERT INTO way VALUES
	(1, 'INSERT', 'INSERT INTO charge VALUES (8, 800)'),
	(2, 'UPDATE', 'UPDATE charge SET amount = 0'),
	(3, 'DELETE', 'DELETE FROM charge'),
	(4, 'TRUNCATE', 'TRUNCATE charge'),
	(5, 'INSERT of no row', 'INSERT INTO charge SELECT 8, 800 WHERE false'),
	(6, 'UPDATE of no row', 'UPDATE charge SET amount = 0 WHERE false'),
	(7, 'ON CONFLICT DO NOTHING', 'INSERT INTO charge VALUES (1, 0) ON CONFLICT DO NOTHING'),
	(8, 'ON CONFLICT DO UPDATE', 'INSERT INTO charge VALUES (1, 0) ON CONFLICT (id) DO UPDATE SET amount = 0'),
	(9, 'MERGE that inserts', 'MERGE INTO charge USING (VALUES (8)) AS v (id) ON charge.id = v.id
		WHEN NOT MATCHED THEN INSERT VALUES (v.id, 0)'),
	(10, 'MERGE that updates', 'MERGE INTO charge USING (VALUES (1)) AS v (id) ON charge.id = v.id
		WHEN MATCHED THEN UPDATE SET amount = 0'),
	(11, 'MERGE that deletes', 'MERGE INTO charge USING (VALUES (1)) AS v (id) ON charge.id = v.id
		WHEN MATCHED THEN DELETE'),
	(12, 'WITH', 'WITH w AS (INSERT INTO charge VALUES (8, 800) RETURNING id) SELECT * FROM w'),
	(13, 'a view', 'INSERT INTO charge_view VALUES (8, 800)'),
	(14, 'a function', 'SELECT charge_by_function()'),
	(15, 'SELECT', 'SELECT * FROM charge'),
	(16, 'SELECT FOR UPDATE', 'SELECT * FROM charge FOR UPDATE');

SELECT what, pg_temp.try(statement) AS statement_trigger FROM way ORDER BY n;
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k20');
SELECT what, pg_temp.try(statement) AS with_claim FROM way ORDER BY n;
ROLLBACK;

-- COPY too.
COPY charge (id, amount) FROM stdin;
8	800
\.
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k21');
COPY charge (id, amount) FROM stdin;
8	800
9	900
\.
SELECT id, amount, key FROM charge WHERE id IN (8, 9) ORDER BY id;
ROLLBACK;

-- FOR EACH ROW checks each written row, and returns the row unchanged if there is a
-- claim. TRUNCATE needs its own trigger, and a statement that finds no row is not
-- checked.
DROP TRIGGER require_claim ON charge;
CREATE TRIGGER require_claim BEFORE INSERT OR UPDATE OR DELETE ON charge
	FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('charge.create');
SELECT what, pg_temp.try(statement) AS row_trigger FROM way ORDER BY n;
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k22');
SELECT what, pg_temp.try(statement) AS with_claim FROM way ORDER BY n;
INSERT INTO charge VALUES (8, 800), (9, 900) RETURNING *;
UPDATE charge SET amount = amount + 5 WHERE id = 8 RETURNING *;
DELETE FROM charge WHERE id = 9 RETURNING *;
INSERT INTO charge VALUES (8, 0) ON CONFLICT (id) DO UPDATE SET amount = charge.amount + 10 RETURNING *;
MERGE INTO charge USING (VALUES (1, 11), (10, 1000)) AS v (id, amount) ON charge.id = v.id
	WHEN MATCHED THEN UPDATE SET amount = v.amount
	WHEN NOT MATCHED THEN INSERT VALUES (v.id, v.amount);
SELECT * FROM charge ORDER BY id;
ROLLBACK;

-- AFTER works too, FOR EACH ROW and FOR EACH STATEMENT.
DROP TRIGGER require_claim ON charge;
CREATE TRIGGER require_claim AFTER INSERT OR UPDATE OR DELETE ON charge
	FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('charge.create');
SELECT what, pg_temp.try(statement) AS after_row FROM way WHERE n <= 3 ORDER BY n;
DROP TRIGGER require_claim ON charge;
CREATE TRIGGER require_claim AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge.create');
SELECT what, pg_temp.try(statement) AS after_statement FROM way WHERE n <= 4 ORDER BY n;
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'k23');
SELECT what, pg_temp.try(statement) AS with_claim FROM way WHERE n <= 4 ORDER BY n;
ROLLBACK;

-- With session_replication_role = replica, only ENABLE ALWAYS triggers fire.
SET session_replication_role = replica;
SELECT what, pg_temp.try(statement) AS replica FROM way WHERE n <= 4 ORDER BY n;
ALTER TABLE charge ENABLE ALWAYS TRIGGER require_claim;
SELECT what, pg_temp.try(statement) AS replica_always FROM way WHERE n <= 4 ORDER BY n;
RESET session_replication_role;
-- A disabled trigger checks nothing.
ALTER TABLE charge DISABLE TRIGGER require_claim;
SELECT what, pg_temp.try(statement) AS disabled FROM way WHERE n <= 4 ORDER BY n;
ALTER TABLE charge ENABLE ALWAYS TRIGGER require_claim;

-- A cascade from a table without the trigger is checked like any write.
CREATE TABLE customer (id int PRIMARY KEY);
CREATE TABLE account (id int PRIMARY KEY, customer int REFERENCES customer ON DELETE CASCADE ON UPDATE CASCADE);
INSERT INTO customer VALUES (1), (2);
INSERT INTO account VALUES (10, 1);
CREATE TRIGGER require_claim BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON account
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('account');
SELECT s AS statement, pg_temp.try(s) FROM unnest(ARRAY[
	'DELETE FROM customer WHERE id = 1',
	'UPDATE customer SET id = 3 WHERE id = 1',
	'TRUNCATE customer CASCADE']) AS s;
BEGIN;
SELECT outcome FROM idempotency.claim('account', 'k1');
SELECT s AS statement, pg_temp.try(s) FROM unnest(ARRAY[
	'DELETE FROM customer WHERE id = 1',
	'UPDATE customer SET id = 3 WHERE id = 1',
	'TRUNCATE customer CASCADE']) AS s;
ROLLBACK;

-- FOR EACH ROW on a partitioned table is cloned to its partitions, so that a direct
-- write to a partition is checked too.
CREATE TABLE payment (id int, amount int) PARTITION BY RANGE (id);
CREATE TABLE payment_1 PARTITION OF payment FOR VALUES FROM (1) TO (100);
CREATE TABLE payment_2 PARTITION OF payment FOR VALUES FROM (100) TO (200);
CREATE TRIGGER require_claim BEFORE INSERT OR UPDATE OR DELETE ON payment
	FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('payment');
CREATE TABLE payment_3 PARTITION OF payment FOR VALUES FROM (200) TO (300);
BEGIN;
SELECT outcome FROM idempotency.claim('payment', 'k1');
INSERT INTO payment VALUES (1, 1), (101, 2), (201, 3);
UPDATE payment SET id = 102 WHERE id = 1;
SELECT idempotency.complete('payment', 'k1');
COMMIT;
SELECT tableoid::regclass AS partition, * FROM payment ORDER BY id;
SELECT s AS statement, pg_temp.try(s) FROM unnest(ARRAY[
	'INSERT INTO payment VALUES (2, 1)',
	'INSERT INTO payment_1 VALUES (2, 1)',
	'INSERT INTO payment_3 VALUES (202, 1)',
	'UPDATE payment_2 SET amount = 0 WHERE id = 101',
	'UPDATE payment SET id = 3 WHERE id = 101',
	'DELETE FROM payment_3']) AS s;
COPY payment_1 FROM stdin;
2	1
\.

--
-- The scope of a guard
--

-- The argument is a pattern: * matches any characters, and a backslash escapes the next one.
-- No argument means any scope.
CREATE TABLE pattern_star (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_star FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('tenant1/*');
CREATE TABLE pattern_all (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_all FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('*');
CREATE TABLE pattern_none (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_none FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim();
CREATE TABLE pattern_inside (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_inside FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('*/charge');
CREATE TABLE pattern_escaped (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_escaped FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('tenant1/\*');
CREATE TABLE pattern_like (id int);
CREATE TRIGGER g BEFORE INSERT ON pattern_like FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('tenant_/%');

CREATE FUNCTION pg_temp.open_for(scope text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	pattern text;
	result text := '';
BEGIN
	IF scope IS NOT NULL THEN
		PERFORM idempotency.claim(scope, 'key');
	END IF;
	FOREACH pattern IN ARRAY '{star,all,none,inside,escaped,like}'::text[] LOOP
		IF pg_temp.try(format('INSERT INTO pattern_%s VALUES (1)', pattern)) = 'accepted' THEN
			result := result || ' ' || pattern;
		END IF;
	END LOOP;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION WHEN SQLSTATE 'P9999' THEN
	RETURN result;
END
$$;
SELECT s AS claimed_scope, pg_temp.open_for(s) AS open
	FROM unnest(ARRAY[NULL, 'tenant1/charge', 'tenant1/', 'tenant1', 'tenant10/charge', 'Tenant1/charge',
		'*/charge', 'tenant1/*', 'tenant_/%', 'x']) AS s;
INSERT INTO pattern_star VALUES (1);
INSERT INTO pattern_none VALUES (1);

-- If a pattern covers several scopes, the last call for any of them decides.
BEGIN;
SELECT outcome FROM idempotency.claim('tenant1/a', 'k1');
SELECT idempotency.complete('tenant1/a', 'k1');
SELECT outcome FROM idempotency.claim('tenant1/b', 'k1');
SELECT pg_temp.try('INSERT INTO pattern_star VALUES (1)') AS claimed_in_b;
SELECT outcome FROM idempotency.claim('tenant1/a', 'k1');
SELECT pg_temp.try('INSERT INTO pattern_star VALUES (1)') AS then_replayed_in_a;
SELECT outcome FROM idempotency.claim('tenant2/a', 'k1');
SELECT pg_temp.try('INSERT INTO pattern_star VALUES (1)') AS then_claimed_elsewhere,
	pg_temp.try('INSERT INTO pattern_none VALUES (1)') AS any_scope;
ROLLBACK;

-- The trigger takes at most one argument.
CREATE TABLE two_arguments (id int);
CREATE TRIGGER g BEFORE INSERT ON two_arguments FOR EACH STATEMENT
	EXECUTE FUNCTION idempotency.require_claim('a', 'b');
INSERT INTO two_arguments VALUES (1);
\echo :SQLSTATE
-- A pattern that ends in a backslash is refused, as by claim_abandoned().
CREATE TABLE bad_pattern (id int);
CREATE TRIGGER g BEFORE INSERT ON bad_pattern FOR EACH STATEMENT
	EXECUTE FUNCTION idempotency.require_claim('guard\');
INSERT INTO bad_pattern VALUES (1);

-- INSTEAD OF would drop the write silently, even with a claim. The same guard on the
-- underlying table works.
CREATE TABLE behind_view (id int);
CREATE VIEW before_table AS SELECT id FROM behind_view;
CREATE TRIGGER g INSTEAD OF INSERT OR UPDATE OR DELETE ON before_table
	FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('charge.create');
INSERT INTO behind_view VALUES (1);
INSERT INTO before_table VALUES (2);
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'instead');
SELECT s AS statement, pg_temp.try(s) FROM unnest(ARRAY[
	'INSERT INTO before_table VALUES (2)',
	'UPDATE before_table SET id = 3',
	'DELETE FROM before_table']) AS s;
DROP TRIGGER g ON before_table;
CREATE TRIGGER g BEFORE INSERT ON behind_view FOR EACH STATEMENT
	EXECUTE FUNCTION idempotency.require_claim('charge.create');
INSERT INTO before_table VALUES (2);
SELECT * FROM behind_view ORDER BY id;
ROLLBACK;
DROP VIEW before_table;
DROP TABLE behind_view;

-- extension only: the error is that of PL/pgSQL
-- The function works only as a trigger.
SELECT idempotency.require_claim();
\echo :SQLSTATE
-- both editions

-- The error names the table with its schema.
CREATE SCHEMA "Guarded";
CREATE TABLE "Guarded"."Charge" (id int);
CREATE TRIGGER g BEFORE INSERT ON "Guarded"."Charge" FOR EACH STATEMENT
	EXECUTE FUNCTION idempotency.require_claim('charge.create');
INSERT INTO "Guarded"."Charge" VALUES (1);

--
-- current_key()
--

-- As a column default, current_key() stores the key to which a row belongs.
SELECT id, key FROM charge ORDER BY id;
-- Without a claim it returns NULL; each scope has its own key.
SELECT idempotency.current_key('charge.create');
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'a');
SELECT outcome FROM idempotency.claim('refund', 'b');
SELECT idempotency.current_key('charge.create'), idempotency.current_key('refund'), idempotency.current_key('other');
SELECT outcome FROM idempotency.claim('charge.create', 'c');
SELECT idempotency.complete('charge.create', 'c');
SELECT idempotency.current_key('charge.create');
ROLLBACK;
-- Its argument is a scope and not a pattern.
SELECT pg_temp.try('SELECT idempotency.current_key(NULL)');
SELECT pg_temp.try('SELECT idempotency.current_key('''')');
BEGIN;
SELECT outcome FROM idempotency.claim('charge.create', 'a');
SELECT idempotency.current_key('charge.*');
ROLLBACK;

DROP TABLE charge, way, account, customer, payment, pattern_star, pattern_all, pattern_none, pattern_inside,
	pattern_escaped, pattern_like, two_arguments, bad_pattern CASCADE;
DROP FUNCTION charge_by_function;
DROP TABLE "Guarded"."Charge";
DROP SCHEMA "Guarded";
