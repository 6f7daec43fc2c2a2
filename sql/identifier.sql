--
-- Scopes and keys of several types: idempotency.identifier binds without a cast, and its
-- casts change no other query.
--
\set SHOW_CONTEXT never
\pset null NULL

CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	EXECUTE statement INTO result;
	RETURN coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
	RETURN sqlstate || ': ' || sqlerrm;
END $$;

-- Each type of scope and key binds as a literal and as a typed parameter, and one value
-- names one operation whatever its type is.
CREATE DOMAIN pg_temp.order_id AS bigint CHECK (VALUE > 0);
CREATE DOMAIN pg_temp.order_name AS varchar(40);
CREATE DOMAIN pg_temp.order_uuid AS uuid;
CREATE TEMPORARY TABLE bound AS
	SELECT n, v.key, v.type, same FROM (VALUES
		(1, '42', 'text', '42'), (2, '42', 'varchar', '42'), (3, '42', 'varchar(5)', '42'), (4, '42', 'bpchar(5)', '42'),
		(5, '42', 'name', '42'), (6, '42', 'int2', '42'), (7, '42', 'int4', '42'), (8, '42', 'int8', '42'),
		(9, '-9223372036854775808', 'int8', '-9223372036854775808'), (10, '0', 'int4', '0'),
		(11, 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11', 'uuid', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'),
		(12, '7', 'pg_temp.order_id', '7'), (13, 'o-7', 'pg_temp.order_name', 'o-7'),
		(14, 'a0eebc999c0b4ef8bb6d6bb9bd380a11', 'pg_temp.order_uuid', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'),
		(15, '42', 'idempotency.identifier', '42'), (16, '42', 'idempotency.keytext', '42')) AS v (n, key, type, same);
SELECT type, pg_temp.try(format('SELECT idempotency.once(''identifier'' || %s, %L::%s)', n, key, type)) AS first,
		idempotency.once('identifier' || n, same) AS second_as_text
	FROM bound ORDER BY n;
-- extension only: numbers as scopes
SELECT type, pg_temp.try(format('SELECT idempotency.once_many(%L::%s, ARRAY[''k''])', key, type)) AS scope
	FROM bound ORDER BY n;
-- both editions

-- Untyped parameters, as most drivers send them, typed ones, and both together.
BEGIN;
PREPARE untyped AS SELECT outcome FROM idempotency.try_claim($1, $2);
-- extension only: the type of the parameters
SELECT parameter_types FROM pg_prepared_statements WHERE name = 'untyped';
-- both editions
EXECUTE untyped('identifier', 'untyped');
PREPARE typed(text, uuid) AS SELECT outcome FROM idempotency.try_claim($1, $2);
EXECUTE typed('identifier', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11');
PREPARE mixed(bigint) AS SELECT outcome FROM idempotency.try_claim($2, $1);
EXECUTE mixed(17, 'identifier');
SELECT outcome FROM idempotency.try_claim('identifier'::varchar, 18::smallint, '{"a": 1}'::text);
ROLLBACK;
DEALLOCATE ALL;

-- Every function that takes a key takes a number.
BEGIN;
SELECT outcome FROM idempotency.claim('1', 2);
SELECT idempotency.current_key('1'), pg_typeof(idempotency.current_key('1'));
SELECT idempotency.complete('1', 2, '"done"');
SELECT outcome, response FROM idempotency.peek('1', 2);
SELECT outcome FROM idempotency.claim('1', 3);
SELECT idempotency.fail('1', 3, '"failed"', 400);
SELECT outcome FROM idempotency.claim('1', 4);
SELECT idempotency.release('1', 4);
SELECT token FROM idempotency.claim('1', 5, lease => '1 min') \gset
SELECT idempotency.renew('1', 5, :token, '1 min') > now() AS renewed;
SELECT FROM idempotency.checkpoint('1', 5, :token, 'charged');
SELECT idempotency.release('1', 5, :token);
COMMIT;
SELECT scope, key, recovery_point FROM idempotency.claim_abandoned('1', '1 min');
CREATE FUNCTION identifier_handler(json) RETURNS json LANGUAGE sql AS 'SELECT ''"handled"''::json';
SELECT outcome, response FROM idempotency.run('1', 6, NULL, 'identifier_handler(json)');
SELECT idempotency.once('1', 7), idempotency.once('1', '7');
SELECT idempotency.derive_key('1', 2, '3') = idempotency.derive_key('1', '2', '3') AS same;

-- An operator passes the columns of the view, and applications their own columns.
SELECT count(*) AS keys, sum(idempotency.forget(scope, key)::int) AS forgotten
	FROM idempotency.keys WHERE scope = '1';

-- extension only: numbers as scopes
-- A scope can be a number as well.
SELECT call, pg_temp.try('SELECT ' || call) FROM unnest(ARRAY[
	'outcome FROM idempotency.claim(1, 2)', 'idempotency.current_key(1)', 'pg_typeof(idempotency.current_key(1))',
	'idempotency.complete(1, 2, ''"done"'')', 'response FROM idempotency.peek(1, 2)',
	'outcome FROM idempotency.claim(1, 3)', 'idempotency.fail(1, 3, ''"failed"'', 400)',
	'outcome FROM idempotency.claim(1, 4)', 'idempotency.release(1, 4)',
	'outcome FROM idempotency.claim(1, 5, lease => ''1 min'')',
	'idempotency.renew(1, 5, token, ''1 min'') > now() FROM idempotency.key WHERE scope = ''1'' AND key = ''5''',
	'idempotency.checkpoint(1, 5, token, ''charged'') > now() FROM idempotency.key WHERE scope = ''1'' AND key = ''5''',
	'idempotency.release(1, 5, token) FROM idempotency.key WHERE scope = ''1'' AND key = ''5''',
	'outcome FROM idempotency.try_claim(1, 8)', 'idempotency.release(1, 8)',
	'response FROM idempotency.run(1, 6, NULL, ''identifier_handler(json)'')',
	'idempotency.once(1, 7)', 'idempotency.once(1, ''7'')', 'idempotency.once_many(1, ARRAY[9])', 'idempotency.forget(1, 9)',
	'idempotency.derive_key(1, 2, 3) = idempotency.derive_key(''1'', ''2'', ''3'')']) AS call;
SELECT scope, key, recovery_point FROM idempotency.claim_abandoned(1, '1 min');
SELECT idempotency.natural_key('order', 42, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid)
	= idempotency.natural_key(VARIADIC ARRAY['order', '42', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11']) AS same;
SELECT idempotency.publish('identifier', '{}', 42) IS NOT NULL AS published;
SELECT aggregateid FROM idempotency.outbox WHERE aggregatetype = 'identifier';
DELETE FROM idempotency.outbox WHERE aggregatetype = 'identifier';
-- both editions
DROP FUNCTION identifier_handler;

-- Arrays of every type bind to once_many(): typed, untyped, empty and NULL.
SELECT idempotency.once_many('identifier', ARRAY[1, 2, 3]);
SELECT idempotency.once_many('identifier', ARRAY[3, 4]::bigint[]);
SELECT idempotency.once_many('identifier', ARRAY[4, 5]::smallint[]);
SELECT idempotency.once_many('identifier', ARRAY['a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11']::uuid[]);
SELECT idempotency.once_many('identifier', ARRAY['5', 'six']::text[]);
SELECT idempotency.once_many('identifier', ARRAY['six', 'seven']::varchar[]);
SELECT idempotency.once_many('identifier', ARRAY['seven', 'eight']::varchar(10)[]);
SELECT idempotency.once_many('identifier', ARRAY['eight', 'nine ']::bpchar(10)[]);
SELECT idempotency.once_many('identifier', ARRAY['nine', 'ten']::name[]);
-- extension only: the type of the parameters
SELECT idempotency.once_many('identifier', '{ten,"a,b"}');
-- both editions
SELECT idempotency.once_many('identifier', array_agg(i)) FROM generate_series(101, 102) AS i;
SELECT idempotency.once_many('identifier', '{}');
SELECT idempotency.once_many('identifier', ARRAY[]::uuid[]);
SELECT idempotency.once_many('identifier', ARRAY[1, NULL]);
SELECT idempotency.once_many('identifier', ARRAY[ARRAY[1], ARRAY[2]]);
PREPARE untyped AS SELECT * FROM idempotency.once_many($1, $2);
-- extension only: the type of the parameters
SELECT parameter_types FROM pg_prepared_statements WHERE name = 'untyped';
-- both editions
EXECUTE untyped('identifier', '{11,twelve}');
PREPARE typed(text, bigint[]) AS SELECT * FROM idempotency.once_many($1, $2);
EXECUTE typed('identifier', ARRAY[11, 12]);
DEALLOCATE ALL;

-- extension only: the text of the errors
-- Values whose text has several forms do not bind: one value would be several keys.  An
-- array is no key.
SELECT argument, pg_temp.try(format('SELECT idempotency.once(''identifier'', %s)', argument))
	FROM unnest(ARRAY['25.00', '1e3::float8', 'now()', 'true', '''{}''::json', '''\x00''::bytea', '''{a}''::text[]', '''{1}''::int[]']) AS argument;

-- The checks of scopes and keys hold for each type.
SELECT argument, pg_temp.try(format('SELECT idempotency.once(%s)', argument))
	FROM unnest(ARRAY[$$NULL, 'k'$$, $$'identifier', NULL$$, $$'identifier', NULL::uuid$$, $$'identifier', NULL::bigint$$, $$'identifier', ''$$,
		$$'identifier', '   '::bpchar(3)$$, $$'identifier', E'a\tb'::varchar$$, $$'identifier', repeat('k', 256)$$,
		$$'identifier', '{a,b}'::varchar$$, $$''::name, 'k'$$]) AS argument;
-- both editions

-- In PL/pgSQL, a variable of the type accepts and compares as text does.
DO $$
DECLARE
	id idempotency.identifier := 42;
	value text := id;
BEGIN
	RAISE NOTICE '% % % % %', id, value, id = '42', id || '!', length(id);
	id := 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid;
	RAISE NOTICE '% %', id, id = value;
END $$;

-- No query without the extension's functions changes its meaning: no operator takes the
-- type, and no function but the extension's own.
SELECT o.oid::regoperator AS operator FROM pg_operator AS o
	WHERE 'idempotency.identifier'::regtype IN (oprleft, oprright);
SELECT p.oid::regprocedure AS other_function FROM pg_proc AS p
	WHERE 'idempotency.identifier'::regtype = ANY (proargtypes) AND NOT EXISTS (SELECT FROM pg_depend AS d
		WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e');
SELECT statement, pg_temp.try(statement) FROM unnest(ARRAY[
	$$SELECT 'a'::text = 1$$, $$SELECT 'a'::text = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid$$, $$SELECT 1 < 'a'::text$$,
	$$SELECT 'a'::text || 1$$, $$SELECT 'a' || 'b'$$, $$SELECT 1 || 'b'$$, $$SELECT 'a'::name || 'b'::varchar$$,
	$$SELECT min(v) FROM (VALUES ('b'::text), ('a')) AS t (v)$$, $$SELECT min('a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid)$$,
	$$SELECT pg_typeof(coalesce('a'::text, 'b'))$$, $$SELECT pg_typeof(coalesce('a'::varchar, 'b'::text))$$,
	$$SELECT length(42)$$, $$SELECT upper('a'::name)$$, $$SELECT 1::text = '1'$$, $$SELECT '1' = 1$$,
	$$SELECT 'a'::varchar IN ('a', 'b'::text)$$]) AS statement;

DELETE FROM idempotency.key WHERE scope LIKE 'identifier%' OR scope IN (SELECT same FROM bound) OR key = 'k';

--
-- A column with a collation of its own
--

CREATE TABLE collated (scope text COLLATE "POSIX", key text COLLATE "POSIX");
INSERT INTO collated VALUES ('collated', 'ä');
BEGIN;
SELECT (idempotency.claim(scope, key, '{"a": 1}')).outcome, idempotency.current_key(scope) FROM collated;
SELECT idempotency.complete(scope, key, '1') FROM collated;
COMMIT;
BEGIN;
SELECT (idempotency.claim(scope, key || 2, wait => '1 s')).outcome FROM collated;
SELECT idempotency.fail(scope, key || 2, '2', 400) FROM collated;
COMMIT;
BEGIN;
SELECT (idempotency.claim(scope, key || 3)).outcome FROM collated;
SELECT idempotency.release(scope, key || 3) FROM collated;
COMMIT;
WITH c AS (SELECT idempotency.try_claim(scope, key, '{"a": 1}') AS op FROM collated) SELECT (op).outcome, (op).response FROM c;
SELECT outcome, response FROM collated, idempotency.peek(scope, key || 2);
WITH c AS (SELECT idempotency.claim(scope, key || 'l', lease => '1 min') AS op FROM collated)
	SELECT (op).outcome, (op).token AS collated_token FROM c \gset
SELECT idempotency.renew(scope, key || 'l', :collated_token, '1 min') > now() AS renewed FROM collated;
SELECT idempotency.checkpoint(scope, key || 'l', :collated_token, 'p') > now() AS checkpoint FROM collated;
SELECT idempotency.release(scope, key || 'l', :collated_token) FROM collated;
WITH c AS (SELECT idempotency.claim_abandoned(scope, '1 min') AS a FROM collated)
	SELECT (a).key, (a).token AS collated_token FROM c \gset
SELECT idempotency.complete(scope, key || 'l', '3', token => :collated_token) FROM collated;
SELECT idempotency.once(scope, key || 'o'), idempotency.once(scope, key || 'o') FROM collated;
SELECT idempotency.once_many(scope, ARRAY[key || 'o', key || 'p']) FROM collated;
SELECT idempotency.forget(scope, key || 'p') FROM collated;
SELECT key, state FROM idempotency.keys WHERE scope = 'collated' ORDER BY key;
DROP TABLE collated;
DELETE FROM idempotency.key WHERE scope = 'collated';

-- Results: each function that users call has one that every driver reads.
SELECT p.oid::regprocedure AS without_result
	FROM pg_proc AS p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND p.prokind = 'f' AND p.prorettype = 'void'::regtype;
