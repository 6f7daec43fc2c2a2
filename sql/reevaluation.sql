-- extension only: the planner hook
--
-- A call that writes runs once for each row, or is refused. test/fuzz/run plans compares the
-- calls with the rows, for random statements; EXPLAIN is enough here.
--
\set SHOW_CONTEXT never

CREATE TABLE account (id int PRIMARY KEY, balance int, note text);
CREATE TABLE other (id int PRIMARY KEY, x int);
INSERT INTO account VALUES (1, 0), (2, 0), (3, 0);

CREATE FUNCTION pg_temp.planned(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE 'EXPLAIN ' || statement;
	RETURN 'planned';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

-- The hints: without arguments of a row, with them, of a WITH query, and of columns.
UPDATE account SET balance = balance + 50 WHERE id = 7 AND idempotency.once('inbox', 'm1');
UPDATE account SET balance = balance + 50 WHERE id = 7 AND idempotency.once('inbox', id);
WITH n AS (SELECT idempotency.once('inbox', 'm1') AS new) SELECT new FROM n LIMIT 1;
SELECT (idempotency.try_claim('inbox', 'm1', lease => '1 hour')).*;

-- Allowed
\pset format unaligned
SELECT form, pg_temp.planned(form)
FROM (VALUES
	(1, $$SELECT idempotency.once('inbox', 'm1') ORDER BY 1$$),
	(2, $$SELECT idempotency.once('inbox', id) FROM other WHERE x IN (SELECT balance FROM account) ORDER BY id$$),
	(3, $$SELECT count(idempotency.once('inbox', id)) FROM (SELECT o.id FROM other o JOIN account USING (id) LIMIT 5) s$$),
	(4, $$SELECT idempotency.once_many('inbox', ARRAY[id::text]) FROM other$$),
	(5, $$INSERT INTO account SELECT id, 1, idempotency.once('inbox', id)::text FROM other$$),
	(6, $$INSERT INTO account VALUES (7, 1, idempotency.once('inbox', 'm1')), (8, 1, idempotency.once('inbox', 'm2'))$$),
	(7, $$INSERT INTO account AS a VALUES (7, 1, 'x') ON CONFLICT (id) DO UPDATE SET balance = 0 RETURNING idempotency.once('inbox', a.id)$$),
	(8, $$DELETE FROM account WHERE id = 7 RETURNING idempotency.once('inbox', id)$$),
	(9, $$UPDATE account SET balance = 0 FROM idempotency.once('inbox', 'm1') AS new WHERE id = 7 AND new$$),
	(10, $$UPDATE account SET balance = 0 FROM idempotency.once_many('inbox', ARRAY(SELECT id::text FROM other)) AS new WHERE id = new::int$$),
	(11, $$MERGE INTO account a USING idempotency.once_many('inbox', ARRAY['7']) AS v ON a.id::text = v WHEN MATCHED THEN UPDATE SET note = 'x'$$),
	(12, $$SELECT * FROM idempotency.claim('inbox', 'm1') LIMIT 1$$),
	(13, $$UPDATE account SET (balance, note) = (SELECT 1, idempotency.once('inbox', 'm1')::text) WHERE id = 7$$),
	(14, $$UPDATE account SET balance = 0 WHERE EXISTS (SELECT FROM idempotency.once('inbox', 'm1') AS new WHERE new)$$),
	(15, $$UPDATE account SET balance = 0 WHERE id::text = ANY (ARRAY(SELECT idempotency.once_many('inbox', ARRAY['7'])))$$),
	(16, $$WITH n AS (SELECT id, idempotency.once('inbox', id) AS new FROM other), m AS (SELECT id, true AS new FROM n WHERE new) INSERT INTO account SELECT id FROM m WHERE new ORDER BY id$$),
	(17, $$WITH n AS (INSERT INTO account SELECT id, 1, idempotency.once('inbox', id)::text FROM other RETURNING id, note) UPDATE other SET x = 0 FROM n WHERE other.id = n.id AND EXISTS (SELECT FROM n WHERE note = 'true')$$),
	(18, $$WITH n AS (SELECT id FROM account ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED) SELECT id, idempotency.once('inbox', id) FROM n$$),
	(19, $$WITH n AS (UPDATE account SET balance = 0 WHERE id = 7 RETURNING idempotency.once('inbox', 'm1')) SELECT 1$$),
	(20, $$SELECT (idempotency.claim('inbox', 'm1')).outcome, (idempotency.claim('inbox', 'm2')).token, (idempotency.peek('inbox', 'm1')).*$$),
	(21, $$WITH n AS (SELECT id, idempotency.once('inbox', id) AS new FROM other), m AS (INSERT INTO account SELECT id FROM n) SELECT count(*) FILTER (WHERE new), (SELECT count(*) FROM other) FROM n$$),
	(22, $$WITH n AS (SELECT id, idempotency.once('inbox', id) AS new FROM other), m AS (SELECT id FROM n WHERE new), p AS (SELECT id, idempotency.publish('t', '1') FROM m) SELECT id, idempotency.once('done', id) FROM p$$),
	(23, $$WITH n AS (SELECT id, idempotency.once('inbox', id) AS new FROM other), m AS (SELECT id FROM n WHERE new) SELECT id, idempotency.once('done', id) FROM m$$)
) AS v (n, form) ORDER BY n;

-- Refused
SELECT form, pg_temp.planned(form)
FROM (VALUES
	(1, $$UPDATE account SET balance = CASE WHEN idempotency.once('inbox', 'm1') THEN 1 END WHERE id = 7$$),
	(2, $$SELECT 1 FROM account WHERE id = 7 AND idempotency.once('inbox', 'm1')$$),
	(3, $$SELECT 1 WHERE idempotency.once('inbox', 'm1')$$),
	(4, $$SELECT id FROM account ORDER BY id LIMIT CASE WHEN idempotency.once('inbox', 'm1') THEN 1 END$$),
	(5, $$SELECT id FROM account LEFT JOIN other USING (id) GROUP BY id HAVING idempotency.once('inbox', 'm1')$$),
	(6, $$SELECT 1 FROM account JOIN other ON idempotency.once('inbox', 'm1')$$),
	(7, $$SELECT idempotency.once('inbox', id) FROM account LIMIT 1$$),
	(8, $$SELECT idempotency.once('inbox', id) FROM account FOR UPDATE$$),
	(9, $$SELECT DISTINCT idempotency.once('inbox', id) FROM account$$),
	(10, $$SELECT max(idempotency.once('inbox', id)::text) FROM account GROUP BY GROUPING SETS ((id), ())$$),
	(11, $$SELECT idempotency.once('inbox', id), rank() OVER () FROM account$$),
	(12, $$SELECT idempotency.once('inbox', id) FROM account JOIN other USING (id)$$),
	(13, $$SELECT idempotency.once('inbox', a.id) FROM account a, other$$),
	(14, $$SELECT idempotency.once('inbox', 'm1') UNION ALL SELECT false$$),
	(15, $$WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3 AND (SELECT idempotency.once('inbox', 'm1'))) SELECT n FROM r$$),
	(16, $$SELECT new FROM other, idempotency.once('inbox', other.id) AS new$$),
	(17, $$SELECT new FROM other, LATERAL idempotency.once_many('inbox', ARRAY(SELECT other.id::text)) AS new$$),
	(18, $$SELECT new FROM (SELECT idempotency.once('inbox', 'm1') AS new) s$$),
	(19, $$SELECT new FROM (SELECT new FROM idempotency.once('inbox', 'm1') AS new) s$$),
	(20, $$SELECT new FROM other, (VALUES (idempotency.once('inbox', 'm1'))) AS v (new)$$),
	(21, $$SELECT (SELECT idempotency.once('inbox', account.id)) FROM account$$),
	(22, $$SELECT (SELECT new FROM idempotency.once('inbox', account.id) AS new) FROM account$$),
	(23, $$SELECT (SELECT (SELECT idempotency.once('inbox', 'm1')) FROM other WHERE other.id = account.id) FROM account$$),
	(24, $$SELECT 1 FROM account WHERE id::text IN (SELECT idempotency.once_many('inbox', ARRAY['7']))$$),
	(25, $$SELECT 1 FROM account WHERE id NOT IN (SELECT 1 FROM idempotency.once('inbox', 'm1'))$$),
	(26, $$SELECT EXISTS (SELECT idempotency.once('inbox', 'm1'))$$),
	(27, $$INSERT INTO account VALUES (7, 1, idempotency.once('inbox', 'm1')) ON CONFLICT DO NOTHING$$),
	(28, $$INSERT INTO account AS a VALUES (7, 1, 'x') ON CONFLICT (id) DO UPDATE SET balance = 0 WHERE idempotency.once('inbox', 'm1')$$),
	(29, $$INSERT INTO account SELECT id, idempotency.once('inbox', id)::int FROM other LIMIT 1$$),
	(30, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id AND idempotency.once('inbox', 'm1') WHEN MATCHED THEN UPDATE SET balance = 0$$),
	(31, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED AND idempotency.once('inbox', 'm1') THEN UPDATE SET balance = 0$$),
	(32, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED THEN UPDATE SET note = idempotency.once('inbox', 'm1')$$),
	(33, $$WITH n AS (SELECT idempotency.complete('inbox', 'm1', token => 7)) DELETE FROM account$$),
	(34, $$WITH n AS (SELECT idempotency.publish('t', '1') AS id), m AS (SELECT id FROM n) DELETE FROM account$$),
	(35, $$SELECT (idempotency.try_claim('inbox', 'm1')).outcome::text, (idempotency.try_claim('inbox', 'm1')).token$$),
	(36, $$DELETE FROM other RETURNING (idempotency.claim('inbox', id)).*$$),
	(37, $$SELECT 1 FROM account, idempotency.once('inbox', 'm1') AS new WHERE id = 7 AND new ORDER BY id FOR UPDATE OF account SKIP LOCKED$$),
	(38, $$SELECT new FROM idempotency.once_many('inbox', ARRAY['7', '8']) AS new LIMIT 1$$),
	(39, $$SELECT new FROM idempotency.once('inbox', 'm1') AS new OFFSET 1$$),
	(40, $$INSERT INTO account SELECT id, 1, idempotency.once('inbox', id)::text FROM other ON CONFLICT DO NOTHING$$),
	(41, $$INSERT INTO account SELECT new::int FROM idempotency.once_many('inbox', ARRAY['7']) AS new ON CONFLICT DO NOTHING$$),
	(42, $$SELECT idempotency.publish('t', '1'), unnest(ARRAY[1, 2])$$),
	(43, $$SELECT id, idempotency.once('inbox', id), unnest('{}'::int[]) FROM other$$),
	(44, $$SELECT idempotency.once_many('inbox', ARRAY['1']), idempotency.publish('t', '1')$$),
	(45, $$SELECT idempotency.publish('t', '1')::text BETWEEN '0' AND 'f'$$),
	(46, $$SELECT idempotency.publish('t', '1')::text IN (note, id::text) FROM account$$)
) AS v (n, form) ORDER BY n;

-- Refused: to read a WITH query that calls, other than alone, and all of it
SELECT form, pg_temp.planned('WITH n AS (SELECT id, idempotency.once(''inbox'', id) AS new FROM other) ' || form) AS rows,
	pg_temp.planned('WITH n AS MATERIALIZED (SELECT id::int, true AS new FROM idempotency.once_many(''inbox'', ARRAY[''7'']) AS id) ' || form) AS function
FROM (VALUES
	(1, $$SELECT a.id FROM account a JOIN n USING (id)$$),
	(2, $$SELECT a.id FROM account a, n WHERE a.id < 0$$),
	(3, $$SELECT a.id FROM account a LEFT JOIN n ON true$$),
	(4, $$SELECT id FROM account WHERE id IN (SELECT id FROM n WHERE new)$$),
	(5, $$SELECT id FROM account WHERE id NOT IN (SELECT id FROM n)$$),
	(6, $$SELECT EXISTS (SELECT FROM n)$$),
	(7, $$SELECT (SELECT count(*) FROM n)$$),
	(8, $$SELECT id FROM n WHERE id IN (SELECT id FROM account)$$),
	(9, $$SELECT id FROM (SELECT id FROM n) AS s$$),
	(10, $$SELECT id FROM n UNION ALL SELECT id FROM n$$),
	(11, $$SELECT id FROM n LIMIT 1$$),
	(12, $$SELECT DISTINCT true FROM n WHERE new$$),
	(13, $$SELECT id FROM account, LATERAL (SELECT FROM n WHERE n.id = account.id) AS s$$),
	(14, $$UPDATE account a SET balance = 0 FROM n WHERE a.id = n.id$$),
	(15, $$UPDATE account a SET balance = 0 WHERE id IN (SELECT id FROM n)$$),
	(16, $$DELETE FROM account a USING n WHERE a.id = n.id$$),
	(17, $$MERGE INTO account a USING n ON a.id = n.id WHEN MATCHED THEN DELETE$$),
	(18, $$INSERT INTO account SELECT id FROM n ON CONFLICT DO NOTHING$$),
	(19, $$INSERT INTO account SELECT id FROM other WHERE id IN (SELECT id FROM n)$$),
	(20, $$INSERT INTO account VALUES ((SELECT id FROM n))$$),
	(21, $$, m AS (SELECT id FROM n WHERE new) SELECT a.id FROM account a JOIN m USING (id)$$),
	(22, $$, m AS (UPDATE account a SET balance = 0 FROM n WHERE a.id = n.id RETURNING a.id) SELECT id FROM m$$),
	(23, $$SELECT id FROM idempotency.once_many('inbox', ARRAY(SELECT id::text FROM n)) AS id$$)
) AS v (n, form) ORDER BY n;

\pset format aligned
-- Each function, as a condition if it returns one value, and in FROM.
CREATE TEMP TABLE call (name text, arguments text, rows boolean DEFAULT false);
INSERT INTO call VALUES
	('claim', $$'s', 'k'$$), ('try_claim', $$'s', 'k'$$), ('complete', $$'s', 'k'$$), ('fail', $$'s', 'k', NULL, 400$$),
	('release', $$'s', 'k'$$), ('renew', $$'s', 'k', 1, '1 s'$$), ('checkpoint', $$'s', 'k', 1, 'p'$$),
	('run', $$'s', 'k', '1', 'now()'$$), ('forget', $$'s', 'k'$$), ('once', $$'s', 'k'$$), ('publish', $$'t', '1'$$),
	('subscribe', $$'s', ARRAY['*']$$), ('unsubscribe', $$'s'$$), ('ack', $$'s', 1$$), ('nack', $$'s', 1, NULL$$),
	('extend', $$'s', 1, '1 s'$$), ('redrive', $$'s'$$), ('reap', '');
INSERT INTO call VALUES ('claim_abandoned', $$'s', '1 s'$$, true), ('once_many', $$'s', ARRAY['k']$$, true), ('fetch', $$'s'$$, true);
INSERT INTO call VALUES ('alter_subscription', $$'s'$$), ('pause', $$'s'$$), ('resume', $$'s'$$), ('seek', $$'s', 'now'::text$$), ('discard', $$'s'$$);
SELECT name,
	CASE WHEN NOT rows THEN pg_temp.planned(format('UPDATE account SET balance = 0 WHERE idempotency.%I(%s) IS NULL', name, arguments)) END AS condition,
	pg_temp.planned(format('UPDATE account SET note = r::text FROM idempotency.%I(%s) AS r', name, arguments)) AS from
FROM call ORDER BY name COLLATE "C";

-- The functions above are all volatile ones, except these.
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'idempotency'::regnamespace AND p.provolatile = 'v' AND p.prokind = 'f'
	AND NOT EXISTS (SELECT FROM call AS c WHERE c.name = p.proname)
ORDER BY 1;
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'idempotency'::regnamespace
	AND (p.prosupport = 'idempotency_internal.single_evaluation'::regproc AND p.procost = 10000) <> EXISTS (SELECT FROM call AS c WHERE c.name = p.proname);

-- Functions that only read are allowed everywhere.
SELECT pg_temp.planned('UPDATE account SET note = (idempotency.peek(''s'', ''k'')).outcome WHERE idempotency.current_key(''s'') IS NULL');

-- A default, a view, a rule and a policy are part of the query.
CREATE TABLE guarded (id int, at text DEFAULT idempotency.publish('t', '1')::text);
CREATE VIEW called AS SELECT id, idempotency.once('inbox', id::text) AS new FROM other;
SELECT pg_temp.planned('INSERT INTO guarded VALUES (1), (2)'), pg_temp.planned('UPDATE guarded SET at = DEFAULT'), pg_temp.planned('SELECT * FROM called');
CREATE RULE log AS ON INSERT TO other DO ALSO INSERT INTO guarded VALUES (NEW.id, NEW.x);
SELECT pg_temp.planned('INSERT INTO other VALUES (1, idempotency.once(''inbox'', 1)::int)');
DROP RULE log ON other;
CREATE ROLE regress_reevaluation;
GRANT ALL ON guarded TO regress_reevaluation;
SELECT idempotency.grant_client('regress_reevaluation');
CREATE POLICY once ON guarded USING (idempotency.once('inbox', id::text));
ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
SET ROLE regress_reevaluation;
SELECT pg_temp.planned('SELECT * FROM guarded'), pg_temp.planned('DELETE FROM guarded'), pg_temp.planned('INSERT INTO guarded VALUES (1)');
-- Callers need no privilege on the support function.
SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc WHERE proname = 'single_evaluation';
RESET ROLE;

-- A function in SQL that the planner inlines is part of the query. Others hide the call.
CREATE FUNCTION wrapped(message text) RETURNS boolean LANGUAGE sql AS $$ SELECT idempotency.once('inbox', message) $$;
CREATE FUNCTION hidden(message text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN idempotency.once('inbox', message); END $$;
SELECT pg_temp.planned('UPDATE account SET balance = 0 WHERE wrapped(''m1'')') AS wrapped, pg_temp.planned('SELECT wrapped(id::text) FROM other') AS allowed,
	pg_temp.planned('UPDATE account SET balance = 0 WHERE hidden(''m1'')') AS hidden;

-- A function that is not VOLATILE is run while the query is planned.
ALTER FUNCTION hidden STABLE;
SELECT count(*) FROM account WHERE note = hidden('m1')::text AND id = 1;
ALTER FUNCTION hidden VOLATILE PARALLEL SAFE;

-- A query in parallel workers
BEGIN;
SET LOCAL parallel_setup_cost = 0;
SET LOCAL parallel_tuple_cost = 0;
SET LOCAL min_parallel_table_scan_size = 0;
SELECT count(*) FROM account WHERE hidden('m1');
\echo :SQLSTATE
ROLLBACK;

-- A cursor, and the query of a loop, are read ahead, in part, or twice.
DO $$ DECLARE m record; BEGIN FOR m IN SELECT id, idempotency.once('bound', id) AS new FROM account LOOP EXIT; END LOOP; END $$;
BEGIN;
DECLARE held NO SCROLL CURSOR WITH HOLD FOR SELECT idempotency.once('bound', '4');
COMMIT;
PREPARE prepared AS SELECT idempotency.once('bound', '4');
EXECUTE prepared;
DEALLOCATE prepared;
-- The server stores the rows of a function in FROM.
BEGIN;
DECLARE stored SCROLL CURSOR WITH HOLD FOR SELECT * FROM idempotency.once_many('bound', ARRAY['5', '6']);
FETCH stored;
COMMIT;
FETCH BACKWARD 0 FROM stored;
FETCH ALL FROM stored;
CLOSE stored;

-- In PL/pgSQL, at the first call
CREATE FUNCTION apply(message text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE account SET balance = balance + 50 WHERE id = 7 AND idempotency.once('inbox', message);
END
$$;
SELECT apply('m1');
SELECT count(*) AS keys FROM idempotency.key WHERE scope = 'inbox';

DROP FUNCTION wrapped, hidden, apply;
DROP VIEW called;
DROP TABLE guarded, account, other;
DROP OWNED BY regress_reevaluation;
DROP ROLE regress_reevaluation;
DELETE FROM idempotency.key WHERE scope = 'bound';
