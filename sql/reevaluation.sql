-- extension only: planner support
--
-- Functions that write are refused where the server might evaluate them twice for one
-- row. The check is made at planning, so EXPLAIN is enough here. The isolation test
-- once-update shows that the other forms are evaluated once.
--
\set SHOW_CONTEXT never

CREATE TABLE account (id int PRIMARY KEY, balance int, note text);
CREATE TABLE other (id int PRIMARY KEY, x int);

CREATE FUNCTION pg_temp.planned(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE 'EXPLAIN ' || statement;
	RETURN 'planned';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

UPDATE account SET balance = balance + 50 WHERE id = 7 AND idempotency.once('inbox', 'm1');

-- The forms of a statement
SELECT form, pg_temp.planned(form)
FROM (VALUES
	(1, $$UPDATE account SET balance = 0 WHERE id = 7 AND idempotency.once('inbox', 'm1') RETURNING 1$$),
	(2, $$UPDATE account SET balance = CASE WHEN idempotency.once('inbox', 'm1') THEN 1 END WHERE id = 7 RETURNING 1$$),
	(3, $$UPDATE account SET balance = 0 WHERE id = 7 RETURNING 1, idempotency.once('inbox', 'm1')$$),
	(4, $$DELETE FROM account WHERE id = 7 AND idempotency.once('inbox', 'm1') RETURNING 1$$),
	(5, $$SELECT 1 FROM account WHERE id = 7 AND idempotency.once('inbox', 'm1') FOR UPDATE$$),
	(6, $$SELECT 1, idempotency.once('inbox', 'm1') FROM account WHERE id = 7 FOR UPDATE$$),
	(7, $$SELECT 1 FROM account WHERE id = 7 ORDER BY idempotency.once('inbox', 'm1') FOR SHARE$$),
	(8, $$SELECT 1 FROM account WHERE id = 7 FOR UPDATE LIMIT CASE WHEN idempotency.once('inbox', 'm1') THEN 1 END$$),
	(9, $$UPDATE account SET balance = 0 FROM idempotency.once('inbox', 'm1') AS new WHERE id = 7 AND new RETURNING 1$$),
	(10, $$UPDATE account SET balance = 0 FROM idempotency.once_many('inbox', ARRAY['7']) AS new WHERE id = new::int RETURNING 1$$),
	(11, $$UPDATE account SET balance = 0 FROM (SELECT idempotency.once('inbox', 'm1') AS new) s WHERE id = 7 AND new RETURNING 1$$),
	(12, $$UPDATE account SET balance = 0 FROM (SELECT 1 WHERE idempotency.once('inbox', 'm1')) s WHERE id = 7 RETURNING 1$$),
	(13, $$UPDATE account SET balance = 0 FROM (SELECT 1 WHERE idempotency.once('inbox', 'm1') OFFSET 0) s WHERE id = 7 RETURNING 1$$),
	(14, $$UPDATE account SET balance = 0 FROM (SELECT idempotency.once('inbox', 'm1') AS new UNION ALL SELECT false) s WHERE id = 7 AND new RETURNING 1$$),
	(15, $$UPDATE account SET balance = 0 FROM (SELECT idempotency.once('inbox', 'm1') AS new UNION SELECT false) s WHERE id = 7 AND new RETURNING 1$$),
	(16, $$UPDATE account SET balance = 0 FROM (SELECT * FROM idempotency.once_many('inbox', ARRAY['7']) AS a UNION ALL SELECT * FROM idempotency.once_many('inbox', ARRAY['7']) AS b) s WHERE id = s.a::int RETURNING 1$$),
	(17, $$UPDATE account SET balance = 0 FROM (VALUES (idempotency.once('inbox', 'm1'))) AS v (new) WHERE id = 7 AND new RETURNING 1$$),
	(18, $$UPDATE account SET balance = 0 FROM (VALUES (idempotency.once('inbox', 'm1')), (false)) AS v (new) WHERE id = 7 AND new RETURNING 1$$),
	(19, $$WITH n AS MATERIALIZED (SELECT idempotency.once('inbox', 'm1') AS new) UPDATE account SET balance = 0 FROM n WHERE id = 7 AND new RETURNING 1$$),
	(20, $$WITH n AS (SELECT idempotency.once('inbox', 'm1') AS new) UPDATE account SET balance = 0 FROM n WHERE id = 7 AND new RETURNING 1$$),
	(21, $$WITH n AS (SELECT idempotency.once('inbox', 'm1') AS new) UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT new FROM n) RETURNING 1$$),
	(22, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET balance = 0 WHERE id::text IN (SELECT new FROM n) RETURNING 1$$),
	(23, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET balance = 0 WHERE id = 7 AND (id::text IN (SELECT new FROM n) OR id = 1) RETURNING 1$$),
	(24, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT true FROM n WHERE new = id::text) RETURNING 1$$),
	(25, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET note = (SELECT new FROM n WHERE n.new = account.id::text) WHERE id = 7 RETURNING 1$$),
	(26, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET balance = 0 FROM (SELECT * FROM n UNION ALL SELECT '1') s WHERE id::text = s.new RETURNING 1$$),
	(27, $$UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(28, $$UPDATE account SET balance = 0 WHERE id = 7 AND EXISTS (SELECT WHERE idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(29, $$UPDATE account SET balance = CASE WHEN (SELECT idempotency.once('inbox', 'm1')) THEN 1 END WHERE id = 7 RETURNING 1$$),
	(30, $$UPDATE account SET (balance, note) = (SELECT 1, idempotency.once('inbox', 'm1')::text) WHERE id = 7 RETURNING 1$$),
	(31, $$UPDATE account SET balance = (SELECT x FROM other WHERE other.id = account.id AND idempotency.once('inbox', 'm1')) WHERE id = 7 RETURNING 1$$),
	(32, $$UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT idempotency.once('inbox', account.id::text)) RETURNING 1$$),
	(33, $$UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT (SELECT idempotency.once('inbox', 'm1')) FROM other WHERE other.id = account.id) RETURNING 1$$),
	(34, $$UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT idempotency.once('inbox', other.id::text) FROM other WHERE other.id = 7) RETURNING 1$$),
	(35, $$UPDATE account SET balance = 0 WHERE id::text IN (SELECT idempotency.once_many('inbox', ARRAY['7'])) RETURNING 1$$),
	(36, $$UPDATE account SET balance = 0 WHERE id = 7 AND id NOT IN (SELECT 1 WHERE idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(37, $$UPDATE account SET balance = 0 WHERE id IN (SELECT 7 WHERE idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(38, $$UPDATE account SET balance = 0 WHERE id = 7 AND (id::text IN (SELECT idempotency.once_many('inbox', ARRAY['7'])) OR id = 1) RETURNING 1$$),
	(39, $$UPDATE account SET balance = 0 WHERE id = 7 AND id::text = ANY (ARRAY(SELECT idempotency.once_many('inbox', ARRAY['7']))) RETURNING 1$$),
	(40, $$UPDATE account SET balance = 0 FROM other o, LATERAL idempotency.once('inbox', o.id::text) AS new WHERE account.id = o.id AND o.id = 7 AND new RETURNING 1$$),
	(41, $$UPDATE account SET balance = 0 FROM other o, LATERAL (SELECT idempotency.once('inbox', o.id::text) AS new) n WHERE account.id = o.id AND o.id = 7 AND new RETURNING 1$$),
	(42, $$UPDATE account SET balance = 0 FROM other o, LATERAL (SELECT idempotency.once('inbox', o.id::text) AS new UNION ALL SELECT false) n WHERE account.id = o.id AND o.id = 7 AND new RETURNING 1$$),
	(43, $$UPDATE account SET balance = 0 FROM other o JOIN other p ON idempotency.once('inbox', 'm1') WHERE account.id = o.id AND o.id = 7 AND p.id = 7 RETURNING 1$$),
	(44, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id AND idempotency.once('inbox', 'm1') WHEN MATCHED THEN UPDATE SET balance = 0$$),
	(45, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED AND idempotency.once('inbox', 'm1') THEN UPDATE SET balance = 0$$),
	(46, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED THEN UPDATE SET note = idempotency.once('inbox', 'm1')::text$$),
	(47, $$MERGE INTO account a USING (SELECT 7 AS id, idempotency.once('inbox', 'm1') AS new) AS v ON a.id = v.id WHEN MATCHED AND new THEN UPDATE SET note = 'x'$$),
	(48, $$MERGE INTO account a USING idempotency.once_many('inbox', ARRAY['7']) AS v ON a.id::text = v WHEN MATCHED THEN UPDATE SET note = 'x'$$),
	(49, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED AND (SELECT idempotency.once('inbox', 'm1')) THEN UPDATE SET balance = 0$$),
	(50, $$MERGE INTO account a USING (VALUES (7)) AS v (id) ON a.id = v.id WHEN MATCHED THEN UPDATE SET note = (SELECT idempotency.once('inbox', 'm1'))$$),
	(51, $$INSERT INTO account VALUES (7, 1, 'x') ON CONFLICT (id) DO UPDATE SET balance = 0 WHERE idempotency.once('inbox', 'm1') RETURNING 1$$),
	(52, $$INSERT INTO account VALUES (7, 1, 'x') ON CONFLICT (id) DO UPDATE SET note = idempotency.once('inbox', 'm1')::text RETURNING 1$$),
	(53, $$INSERT INTO account SELECT 7, 1, idempotency.once('inbox', 'm1')::text ON CONFLICT (id) DO UPDATE SET note = excluded.note RETURNING 1$$),
	(54, $$INSERT INTO account SELECT id + 10, 1, idempotency.once('inbox', 'm1')::text FROM account WHERE id = 7 FOR UPDATE$$),
	(55, $$SELECT 1, idempotency.once('inbox', 'm1') FROM (SELECT * FROM account WHERE id = 7) s FOR UPDATE$$),
	(56, $$SELECT 1, idempotency.once('inbox', 'm1') FROM (SELECT * FROM account WHERE id = 7 FOR UPDATE) s$$),
	(57, $$SELECT 1 FROM account, idempotency.once('inbox', 'm1') AS new WHERE id = 7 AND new FOR UPDATE$$),
	(58, $$SELECT 1 FROM account, idempotency.once('inbox', 'm1') AS new WHERE id = 7 AND new FOR UPDATE OF account$$),
	(59, $$SELECT 1 FROM account WHERE id = 7 AND (SELECT idempotency.once('inbox', 'm1')) FOR UPDATE$$),
	(60, $$SELECT 1, idempotency.once('inbox', 'm1') FROM account, other WHERE account.id = 7 AND other.id = 7 FOR UPDATE OF account$$),
	(61, $$SELECT 1, idempotency.once('inbox', 'm1') FROM other CROSS JOIN (SELECT * FROM account WHERE id = 7) s WHERE other.id = 7 FOR UPDATE OF s$$),
	(62, $$WITH x AS (SELECT id FROM account WHERE id = 7 FOR UPDATE) SELECT 1, idempotency.once('inbox', 'm1') FROM x$$),
	(63, $$WITH x AS (UPDATE account SET balance = 0 WHERE id = 7 RETURNING id) SELECT 1, idempotency.once('inbox', 'm1') FROM x$$),
	(64, $$UPDATE account SET balance = 0 FROM (SELECT o.id, (SELECT idempotency.once('inbox', 'm1')) AS new FROM other o) s WHERE account.id = 7 AND s.id = 7 AND new RETURNING 1$$),
	(65, $$UPDATE account SET balance = 0 FROM (SELECT o.id, (SELECT idempotency.once('inbox', o.id::text)) AS new FROM other o) s WHERE account.id = 7 AND s.id = 7 AND new RETURNING 1$$),
	(66, $$UPDATE account SET balance = 0 FROM (SELECT o.id FROM other o WHERE (SELECT idempotency.once('inbox', o.id::text))) s WHERE account.id = 7 AND s.id = 7 RETURNING 1$$),
	(67, $$UPDATE account SET balance = 0 FROM (SELECT r AS new FROM idempotency.once('inbox', 'm1') AS r UNION ALL SELECT false) s WHERE id = 7 AND new RETURNING 1$$),
	(68, $$UPDATE account SET balance = 0 FROM (SELECT new FROM (SELECT idempotency.once('inbox', 'm1') AS new UNION ALL SELECT false) u) s WHERE id = 7 AND new RETURNING 1$$),
	(69, $$UPDATE account SET balance = 0 FROM (SELECT new FROM (SELECT idempotency.once('inbox', 'm1') AS new UNION ALL SELECT false) u OFFSET 0) s WHERE id = 7 AND new RETURNING 1$$),
	(70, $$UPDATE account SET balance = 0 FROM (VALUES (idempotency.once('inbox', 'm1')) UNION ALL VALUES (false)) AS s (new) WHERE id = 7 AND new RETURNING 1$$),
	(71, $$UPDATE account SET balance = 0 FROM (SELECT 7 AS id UNION ALL SELECT 8) AS s JOIN other ON idempotency.once('inbox', 'm1') WHERE account.id = s.id AND s.id = 7 AND other.id = 7 RETURNING 1$$),
	(72, $$UPDATE account SET balance = 0 FROM (SELECT 7 AS id UNION ALL SELECT 8) AS s, idempotency.once('inbox', 'm1') AS new WHERE account.id = s.id AND s.id = 7 AND new RETURNING 1$$),
	(73, $$UPDATE account SET balance = 0 FROM (SELECT 7 AS id UNION ALL SELECT 8) AS s, LATERAL idempotency.once('inbox', s.id::text) AS new WHERE account.id = s.id AND s.id = 7 AND new RETURNING 1$$),
	(74, $$UPDATE account SET balance = 0 FROM other o LEFT JOIN idempotency.once('inbox', 'm1') AS new ON true WHERE account.id = o.id AND o.id = 7 AND new RETURNING 1$$),
	(75, $$UPDATE account SET balance = 0 FROM other o LEFT JOIN (SELECT idempotency.once('inbox', 'm1') AS new) s ON true WHERE account.id = o.id AND o.id = 7 AND new RETURNING 1$$),
	(76, $$UPDATE account SET balance = 0 FROM other o LEFT JOIN LATERAL (SELECT 1 AS a WHERE idempotency.once('inbox', o.id::text)) s ON true WHERE account.id = o.id AND o.id = 7 RETURNING 1$$),
	(77, $$UPDATE account SET balance = 0 WHERE id = 7 AND EXISTS (SELECT FROM other WHERE other.id = account.id AND idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(78, $$UPDATE account SET balance = 0 WHERE id = 7 AND EXISTS (SELECT idempotency.once('inbox', 'm1') FROM other WHERE other.id = account.id) RETURNING 1$$),
	(79, $$UPDATE account SET balance = 0 WHERE id = 7 AND (1, 2) < (SELECT 1, 3 WHERE idempotency.once('inbox', 'm1')) RETURNING 1$$),
	(80, $$UPDATE account SET balance = 0 WHERE id = 7 AND (idempotency.once('inbox', 'm1'), 2) = (SELECT true, 2) RETURNING 1$$),
	(81, $$UPDATE account SET balance = 0 WHERE id = 7 AND (SELECT count(*) FROM (SELECT idempotency.once('inbox', 'm1') UNION ALL SELECT true) u) = 2 RETURNING 1$$),
	(82, $$UPDATE account SET balance = 0 WHERE id = 7 AND coalesce((SELECT idempotency.once('inbox', 'm1') FROM other o WHERE o.id = 7), true) RETURNING 1$$),
	(83, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) SELECT 1 FROM (SELECT id FROM account WHERE (SELECT true FROM n WHERE new = account.id::text) FOR UPDATE) AS s$$),
	(84, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new), m AS (SELECT new FROM n), u AS (UPDATE account SET balance = 0 WHERE EXISTS (SELECT FROM m WHERE new = id::text) RETURNING id) SELECT 1 FROM u$$),
	(85, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new), m AS (SELECT new FROM n) UPDATE account SET balance = 0 FROM (SELECT new FROM m WHERE new > '') AS s WHERE id::text = s.new RETURNING 1$$),
	(86, $$WITH n AS (SELECT idempotency.once_many('inbox', ARRAY['7']) AS new) UPDATE account SET balance = 0 WHERE id::text IN (SELECT new FROM n UNION ALL SELECT '8') RETURNING 1$$)
) AS v (n, form) ORDER BY n;

-- Each function: as a condition if it returns one value, and in a correlated
-- sub-select.
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
	pg_temp.planned(format('DELETE FROM account WHERE (SELECT count(*) FROM idempotency.%I(%s) WHERE account.id = 7) = 0', name, arguments)) AS subselect,
	pg_temp.planned(format('UPDATE account SET note = r::text FROM idempotency.%I(%s) AS r', name, arguments)) AS from
FROM call ORDER BY name COLLATE "C";

-- The functions above are all volatile ones, except these.
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'idempotency'::regnamespace AND p.provolatile = 'v' AND p.prokind = 'f'
	AND NOT EXISTS (SELECT FROM call AS c WHERE c.name = p.proname)
ORDER BY 1;
SELECT p.proname FROM pg_proc AS p
WHERE p.pronamespace = 'idempotency'::regnamespace
	AND (p.prosupport = 'idempotency_internal.single_evaluation'::regproc) <> EXISTS (SELECT FROM call AS c WHERE c.name = p.proname);

-- Functions that only read are allowed everywhere.
SELECT pg_temp.planned('UPDATE account SET note = (idempotency.peek(''s'', ''k'')).outcome WHERE idempotency.current_key(''s'') IS NULL');

-- A policy, a default and a view are part of the query. A function in SQL or PL/pgSQL
-- is not, and hides the call.
CREATE TABLE guarded (id int, at text DEFAULT idempotency.publish('t', '1')::text);
SELECT pg_temp.planned('INSERT INTO guarded VALUES (1)'), pg_temp.planned('UPDATE guarded SET at = DEFAULT');
CREATE VIEW called AS SELECT id, idempotency.once('inbox', id::text) AS new FROM other;
SELECT pg_temp.planned('UPDATE account SET balance = 0 FROM called WHERE account.id = called.id AND new'), pg_temp.planned('SELECT * FROM called FOR UPDATE');
CREATE ROLE regress_reevaluation;
GRANT ALL ON guarded TO regress_reevaluation;
SELECT idempotency.grant_client('regress_reevaluation');
CREATE POLICY once ON guarded USING (idempotency.once('inbox', id::text));
ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
SET ROLE regress_reevaluation;
SELECT pg_temp.planned('SELECT * FROM guarded'), pg_temp.planned('DELETE FROM guarded'), pg_temp.planned('SELECT * FROM guarded FOR SHARE');
-- Callers need no privilege on the support function.
SELECT has_function_privilege(oid, 'EXECUTE') FROM pg_proc WHERE proname = 'single_evaluation';
RESET ROLE;
CREATE FUNCTION wrapped(message text) RETURNS boolean LANGUAGE sql AS $$ SELECT idempotency.once('inbox', message) $$;
CREATE FUNCTION wrapped_too(message text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RETURN idempotency.once('inbox', message); END $$;
SELECT pg_temp.planned('UPDATE account SET balance = 0 WHERE wrapped(''m1'')'), pg_temp.planned('UPDATE account SET balance = 0 WHERE wrapped_too(''m1'')');

-- In PL/pgSQL, at the first call.
CREATE FUNCTION apply(message text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	changed bigint;
BEGIN
	UPDATE account SET balance = balance + 50 WHERE id = 7 AND idempotency.once('inbox', message);
	GET DIAGNOSTICS changed = ROW_COUNT;
	RETURN changed;
END
$$;
SELECT apply('m1');
SELECT count(*) AS keys FROM idempotency.key WHERE scope = 'inbox';

DROP TABLE guarded;
DROP FUNCTION wrapped, wrapped_too, apply;
DROP VIEW called;
DROP TABLE account, other;
DROP OWNED BY regress_reevaluation;
DROP ROLE regress_reevaluation;

-- One call per column: the first would claim, and the others would find the key in
-- progress.
SELECT (idempotency.try_claim('inbox', 'm1', lease => '1 hour')).*;
SELECT call, pg_temp.planned(format('SELECT (idempotency.%s).*', call)) AS columns,
	pg_temp.planned(format('SELECT (c.c).* FROM (SELECT idempotency.%s AS c OFFSET 0) AS c', call)) AS once
FROM unnest(ARRAY['claim(''inbox'', ''m1'')', 'try_claim(''inbox'', ''m1'')', 'run(''inbox'', ''m1'', NULL, ''now()'')', 'fetch(''s'')',
	'claim_abandoned(''inbox'', ''1 hour'')']) AS call;
SELECT pg_temp.planned($$SELECT (idempotency.claim('inbox', 'm1')).outcome, (idempotency.claim('inbox', 'm2')).token$$) AS two_calls,
	pg_temp.planned($$SELECT (idempotency.claim('inbox', 'm1')).outcome, 1$$) AS one_column,
	pg_temp.planned($$SELECT (idempotency.peek('inbox', 'm1')).*$$) AS reads_only;
