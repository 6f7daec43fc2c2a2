-- The public contract: privileges. Five roles access every object: a role without
-- grants, a client, a consumer, an operator and a backup. A new object fails here until the lists
-- below say which roles can use it.

BEGIN;

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, true)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

SELECT plan(64);

CREATE ROLE idempotency_plain;
CREATE ROLE idempotency_client;
CREATE ROLE idempotency_consumer;
CREATE ROLE idempotency_operator;
CREATE ROLE idempotency_backup;
CREATE ROLE "idempotency ""odd"", role";
SELECT idempotency.grant_client('idempotency_client') \g /dev/null
SELECT idempotency.grant_consumer('idempotency_consumer') \g /dev/null
SELECT idempotency.grant_operator('idempotency_operator') \g /dev/null
SELECT idempotency.grant_backup('idempotency_backup') \g /dev/null
SELECT idempotency.grant_client('"idempotency ""odd"", role"') \g /dev/null

CREATE TEMPORARY VIEW looker AS
	SELECT *
	FROM (VALUES
		('plain', 'idempotency_plain'),
		('client', 'idempotency_client'),
		('consumer', 'idempotency_consumer'),
		('operator', 'idempotency_operator'),
		('backup', 'idempotency_backup')) AS l (who, role);

-- The types with their own access lists. An array uses the list of its element type.
-- Row types of tables and views keep the server's default, because pg_dump warns about
-- any other.
CREATE TEMPORARY VIEW extension_type AS
	SELECT t.*
	FROM pg_catalog.pg_type AS t
	LEFT JOIN pg_catalog.pg_class AS c ON c.oid = t.typrelid AND c.relkind IN ('r', 'v')
	WHERE t.typnamespace = 'idempotency'::pg_catalog.regnamespace AND t.typcategory <> 'A' AND c.oid IS NULL;

-- Every access list of the extension; the server's default if none is set.
CREATE TEMPORARY VIEW access AS
	SELECT 'schema ' || n.nspname AS object, a.*
	FROM pg_catalog.pg_namespace AS n
	CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(n.nspacl, pg_catalog.acldefault('n', n.nspowner))) AS a
	WHERE n.nspname IN ('idempotency', 'idempotency_internal')
	UNION ALL
	SELECT 'function ' || p.oid::pg_catalog.regprocedure, a.*
	FROM pg_catalog.pg_proc AS p
	CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a
	WHERE p.pronamespace IN ('idempotency'::pg_catalog.regnamespace, 'idempotency_internal'::pg_catalog.regnamespace)
	UNION ALL
	SELECT 'relation ' || c.relname, a.*
	FROM pg_catalog.pg_class AS c
	CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(c.relacl,
		pg_catalog.acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner))) AS a
	WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace AND c.relkind NOT IN ('i', 'I', 'c')
	UNION ALL
	SELECT 'column ' || c.relname || '.' || t.attname, a.*
	FROM pg_catalog.pg_class AS c
	JOIN pg_catalog.pg_attribute AS t ON t.attrelid = c.oid
	CROSS JOIN LATERAL pg_catalog.aclexplode(t.attacl) AS a
	WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace
	UNION ALL
	SELECT 'type ' || t.typname, a.*
	FROM pg_temp.extension_type AS t
	CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(t.typacl, pg_catalog.acldefault('T', t.typowner))) AS a;

-- The complete lists.

SELECT is_empty(
	$$ SELECT object, privilege_type FROM pg_temp.access WHERE grantee = 0 $$,
	'PUBLIC has no privileges');

SELECT is_empty(
	$$
		SELECT object, privilege_type FROM pg_temp.access
		WHERE is_grantable AND grantee::pg_catalog.regrole::text LIKE '%idempotency_%'
	$$,
	'no role has a grant option');

SELECT set_eq(
	$$
		SELECT DISTINCT pg_catalog.split_part(object, ' ', 1) AS kind FROM pg_temp.access
	$$,
	$$ VALUES ('schema'), ('function'), ('relation'), ('type') $$,
	'the access lists of all kinds of objects were checked, and no column has one');

SELECT is_empty(
	$$
		SELECT d.oid
		FROM pg_catalog.pg_default_acl AS d
		WHERE d.defaclnamespace = 'idempotency'::pg_catalog.regnamespace
	$$,
	'the schema has no default privileges');

-- Functions: the roles with EXECUTE.

SELECT set_eq(
	$$
		SELECT p.oid::pg_catalog.regprocedure::text AS function, coalesce(
			pg_catalog.string_agg(l.who, ' ' ORDER BY l.who), '') AS may_execute
		FROM pg_catalog.pg_proc AS p
		LEFT JOIN pg_temp.looker AS l ON pg_catalog.has_function_privilege(l.role, p.oid, 'EXECUTE')
		WHERE p.pronamespace IN ('idempotency'::pg_catalog.regnamespace, 'idempotency_internal'::pg_catalog.regnamespace)
		GROUP BY p.oid
		-- of the internal functions, those that any role can call
		HAVING p.pronamespace = 'idempotency'::pg_catalog.regnamespace OR count(l.who) > 0
	$$,
	$$ VALUES
		('idempotency.claim(idempotency.identifier,idempotency.identifier,idempotency.document,interval,interval,interval,bytea)', 'client'),
		('idempotency.try_claim(idempotency.identifier,idempotency.identifier,idempotency.document,interval,interval,interval,bytea)', 'client'),
		('idempotency.complete(idempotency.identifier,idempotency.identifier,idempotency.document,integer,idempotency.document,bigint,interval,boolean)', 'client'),
		('idempotency.fail(idempotency.identifier,idempotency.identifier,idempotency.document,integer,idempotency.document,bigint,interval,boolean)', 'client'),
		('idempotency.release(idempotency.identifier,idempotency.identifier,bigint)', 'client'),
		('idempotency.renew(idempotency.identifier,idempotency.identifier,bigint,interval)', 'client'),
		('idempotency.checkpoint(idempotency.identifier,idempotency.identifier,bigint,text,idempotency.document)', 'client'),
		('idempotency.claim_abandoned(idempotency.identifier,interval,integer)', 'client'),
		('idempotency.run(idempotency.identifier,idempotency.identifier,idempotency.document,regprocedure,interval,interval)', 'client'),
		('idempotency.peek(idempotency.identifier,idempotency.identifier)', 'client operator'),
		('idempotency.holders()', 'operator'),
		('idempotency.holders(idempotency.identifier,idempotency.identifier)', 'operator'),
		('idempotency.forget(idempotency.identifier,idempotency.identifier)', 'operator'),
		('idempotency.once(idempotency.identifier,idempotency.identifier,interval)', 'client consumer'),
		('idempotency.once_many(idempotency.identifier,idempotency.identifier[],interval)', 'client consumer'),
		('idempotency.require_claim()', 'client'),
		('idempotency.check_commit()', 'client'),
		('idempotency.current_key(idempotency.identifier)', 'client'),
		('idempotency.publish(text,idempotency.document,idempotency.identifier,text,idempotency.document,uuid,timestamp with time zone)', 'client'),
		('idempotency.subscribe(text,text[],regprocedure,text,integer,interval,interval,interval,regrole,integer,interval)', 'consumer'),
		('idempotency.alter_subscription(text,text[],regprocedure,integer,interval,interval,interval,regrole,integer,interval)', 'consumer'),
		('idempotency.unsubscribe(text)', 'consumer'),
		('idempotency.pause(text)', 'consumer operator'),
		('idempotency.resume(text)', 'consumer operator'),
		('idempotency.seek(text,timestamp with time zone)', 'consumer operator'),
		('idempotency.seek(text,text)', 'consumer operator'),
		('idempotency."fetch"(text,integer,interval,interval,bigint)', 'consumer'),
		('idempotency.has_more(text)', 'consumer'),
		('idempotency.ack(text,bigint)', 'consumer'),
		('idempotency.ack(text,bigint,bigint[])', 'consumer'),
		('idempotency.nack(text,bigint,uuid,text,interval,boolean)', 'consumer'),
		('idempotency.extend(text,bigint,interval)', 'consumer'),
		('idempotency.deliver(text,regprocedure,integer,interval,interval,interval)', 'consumer'),
		('idempotency.handler_of(text)', 'consumer'),
		('idempotency.end_event()', 'consumer'),
		('idempotency.redrive(text)', 'consumer operator'),
		('idempotency.redrive(text,uuid)', 'consumer operator'),
		('idempotency.discard(text)', 'consumer operator'),
		('idempotency.discard(text,uuid)', 'consumer operator'),
		('idempotency.canonical(idempotency.document)', 'client'),
		('idempotency.fingerprint(idempotency.document)', 'client'),
		('idempotency.fingerprint(text,text,idempotency.document)', 'client'),
		('idempotency.derive_key(idempotency.identifier,idempotency.identifier,idempotency.identifier)', 'client'),
		('idempotency.natural_key(idempotency.identifier[])', 'client'),
		('idempotency.stable_text(anyelement)', 'client'),
		('idempotency.uuidv7()', 'client'),
		('idempotency.parse_header(text)', 'client'),
		('idempotency.problem(idempotency.operation)', 'client'),
		('idempotency.problem(text)', 'client'),
		('idempotency.problem_headers(idempotency.operation)', 'client'),
		('idempotency.problem_headers(text)', 'client'),
		('idempotency_internal.stats()', 'operator'),
		('idempotency_internal.relay_problem(text)', 'operator'),
		('idempotency.stats_reset()', 'operator'),
		('idempotency.reap(integer)', 'operator'),
		('idempotency.configure(text,text,text)', ''),
		('idempotency.setting(text,text)', 'client consumer operator'),
		('idempotency.grant_client(regrole)', ''),
		('idempotency.grant_consumer(regrole)', ''),
		('idempotency.grant_operator(regrole)', ''),
		('idempotency.grant_backup(regrole)', ''),
		('idempotency_internal.document(jsonb)', 'client'),
		('idempotency_internal.document_in(cstring)', 'client'),
		('idempotency_internal.document_out(idempotency.document)', 'client'),
		('idempotency_internal.document_to_json(idempotency.document)', 'client'),
		('idempotency_internal.identifier(character)', 'client consumer operator'),
		('idempotency_internal.identifier_in(cstring)', 'client consumer operator'),
		('idempotency_internal.keytext_in(cstring)', 'operator'),
		('idempotency_internal.keytext_out(idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_lt(idempotency.keytext,idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_le(idempotency.keytext,idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_eq(idempotency.keytext,idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_ne(idempotency.keytext,idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_ge(idempotency.keytext,idempotency.keytext)', 'operator'),
		('idempotency_internal.keytext_gt(idempotency.keytext,idempotency.keytext)', 'operator')
	$$,
	'functions: nothing for a plain role, the sets of clients, consumers and operators');

-- Relations, types, the schema.

SELECT set_eq(
	$$
		SELECT c.relname::text AS relation, l.who, pg_catalog.string_agg(p.privilege, ' ' ORDER BY p.privilege) AS may
		FROM pg_catalog.pg_class AS c
		CROSS JOIN pg_temp.looker AS l
		CROSS JOIN pg_catalog.unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER'])
			AS p (privilege)
		WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace
			AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
			AND (pg_catalog.has_table_privilege(l.role, c.oid, p.privilege)
				OR p.privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
					AND pg_catalog.has_any_column_privilege(l.role, c.oid, p.privilege))
		GROUP BY c.relname, l.who
	$$,
	$$ VALUES ('keys', 'operator', 'SELECT'), ('zombies', 'operator', 'SELECT'), ('stats', 'operator', 'SELECT'),
		('reaper', 'operator', 'SELECT'), ('subscriptions', 'operator', 'SELECT'), ('partitions', 'operator', 'SELECT'),
		('dead_letters', 'operator', 'SELECT'), ('settings', 'operator', 'SELECT'),
		('key', 'backup', 'SELECT'), ('outbox', 'backup', 'SELECT'), ('subscription', 'backup', 'SELECT'), ('partition', 'backup', 'SELECT'),
		('position', 'backup', 'SELECT'), ('parked', 'backup', 'SELECT'), ('reaper', 'backup', 'SELECT'), ('configuration', 'backup', 'SELECT') $$,
	'relations: an operator can read the views, a backup the tables, and nothing else');

SELECT set_eq(
	$$
		SELECT c.relname::text, l.who, p.privilege
		FROM pg_catalog.pg_class AS c
		CROSS JOIN pg_temp.looker AS l
		CROSS JOIN (VALUES ('USAGE'), ('SELECT'), ('UPDATE')) AS p (privilege)
		WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace AND c.relkind = 'S'
			AND pg_catalog.has_sequence_privilege(l.role, c.oid, p.privilege)
	$$,
	$$ VALUES ('token', 'backup', 'SELECT'), ('outbox_seq', 'backup', 'SELECT') $$,
	'sequences: a backup can read them, and nobody else');

SELECT set_eq(
	$$
		SELECT t.typname::text AS type, coalesce(pg_catalog.string_agg(l.who, ' ' ORDER BY l.who), '') AS may_use
		FROM pg_temp.extension_type AS t
		LEFT JOIN pg_temp.looker AS l ON pg_catalog.has_type_privilege(l.role, t.oid, 'USAGE')
		GROUP BY t.oid, t.typname
	$$,
	$$ VALUES
		('identifier', 'client consumer operator'),
		('document', 'client operator'),
		('keytext', ''),
		('outcome', 'client operator'),
		('operation', 'client operator'),
		('holder', 'operator'),
		('abandoned', 'client'),
		('event', 'consumer')
	$$,
	'types: those of arguments and results, for clients, consumers and operators');

SELECT set_eq(
	$$
		SELECT l.who, p.privilege
		FROM pg_temp.looker AS l
		CROSS JOIN (VALUES ('USAGE'), ('CREATE')) AS p (privilege)
		WHERE pg_catalog.has_schema_privilege(l.role, 'idempotency', p.privilege)
	$$,
	$$ VALUES ('client', 'USAGE'), ('consumer', 'USAGE'), ('operator', 'USAGE'), ('backup', 'USAGE') $$,
	'the schema: USAGE without CREATE for clients, consumers, operators and backups');

SELECT is_empty(
	$$
		SELECT l.who, p.privilege
		FROM pg_temp.looker AS l
		CROSS JOIN (VALUES ('USAGE'), ('CREATE')) AS p (privilege)
		WHERE pg_catalog.has_schema_privilege(l.role, 'idempotency_internal', p.privilege)
	$$,
	'the schema of what the server calls: no privileges');

SELECT set_eq(
	$$
		SELECT c.oid::pg_catalog.regclass::text FROM pg_catalog.pg_class AS c
		WHERE c.relnamespace = 'idempotency_internal'::pg_catalog.regnamespace
	$$,
	ARRAY['idempotency_internal.probe'],
	'it has functions, and no relation but an empty one');

SELECT results_eq(
	$$
		SELECT pg_catalog.count(*)
		FROM pg_temp.access
		WHERE grantee = '"idempotency ""odd"", role"'::pg_catalog.regrole
	$$,
	$$
		SELECT pg_catalog.count(*)
		FROM pg_temp.access
		WHERE grantee = 'idempotency_client'::pg_catalog.regrole
	$$,
	'a role whose name needs quotes gets the same privileges');

-- Roles for monitoring.

SELECT set_eq(
	$$
		SELECT object, privilege_type FROM pg_temp.access
		WHERE grantee = 'pg_monitor'::pg_catalog.regrole
	$$,
	$$ VALUES
		('schema idempotency', 'USAGE'),
		('relation stats', 'SELECT'),
		('relation reaper', 'SELECT'),
		('relation subscriptions', 'SELECT'),
		('relation partitions', 'SELECT'),
		('function idempotency.holders()', 'EXECUTE'),
		('function idempotency_internal.relay_problem(text)', 'EXECUTE'),
		('function idempotency_internal.stats()', 'EXECUTE')
	$$,
	'pg_monitor can read the counters and the progress of the reaper and of the subscriptions, and nothing else');

-- The privileges in use. A refused call fails before its arguments are checked.

CREATE FUNCTION pg_temp.as_role(role text, statement text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE pg_catalog.format('SET LOCAL ROLE %I', role);
	EXECUTE statement;
	RESET ROLE;
END $$;

CREATE FUNCTION pg_temp.refused(role text, statement text) RETURNS text
LANGUAGE sql AS $$
	SELECT throws_ok(
		pg_catalog.format('SELECT pg_temp.as_role(%L, %L)', role, statement),
		'42501', NULL, pg_catalog.format('%s may not: %s', role, statement))
$$;

CREATE FUNCTION pg_temp.allowed(role text, statement text) RETURNS text
LANGUAGE sql AS $$
	SELECT lives_ok(
		pg_catalog.format('SELECT pg_temp.as_role(%L, %L)', role, statement),
		pg_catalog.format('%s may: %s', role, statement))
$$;

SELECT pg_temp.refused('idempotency_plain', $$SELECT idempotency.claim('s', 'k')$$);
SELECT pg_temp.refused('idempotency_plain', $$SELECT idempotency.once('s', 'k')$$);
SELECT pg_temp.refused('idempotency_plain', $$SELECT idempotency.peek('s', 'k')$$);
SELECT pg_temp.refused('idempotency_plain', $$SELECT idempotency.canonical('{}')$$);
SELECT pg_temp.refused('idempotency_plain', $$SELECT * FROM idempotency.keys$$);
SELECT pg_temp.refused('idempotency_plain', $$SELECT * FROM idempotency.key$$);

SELECT pg_temp.allowed('idempotency_client', $$SELECT idempotency.claim('s', 'k', jsonb_build_object('a', 1))$$);
SELECT pg_temp.allowed('idempotency_client', $$SELECT idempotency.complete('s', 'k', '{"done": true}', 201)$$);
SELECT pg_temp.allowed('idempotency_client', $$SELECT idempotency.peek('s', 'k')$$);
SELECT pg_temp.allowed('idempotency_client', $$SELECT * FROM idempotency.once_many('s', ARRAY['a', 'b'])$$);
SELECT pg_temp.allowed('idempotency_client',
	$$SELECT idempotency.problem(idempotency.try_claim('s', 'k', '{"a": 2}'))$$);
SELECT pg_temp.allowed('idempotency_client', $$
	SELECT idempotency.checkpoint('s', 'leased', token, 'begun'), idempotency.renew('s', 'leased', token, '1 min'),
		idempotency.release('s', 'leased', token)
	FROM idempotency.claim('s', 'leased', lease => '1 min')$$);
SELECT pg_temp.allowed('idempotency_client', $$SELECT * FROM idempotency.claim_abandoned('s', '1 min')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT idempotency.forget('s', 'k')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT * FROM idempotency.keys$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT * FROM idempotency.zombies$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT nextval('idempotency.token')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT * FROM idempotency.key$$);
SELECT pg_temp.refused('idempotency_client', $$DELETE FROM idempotency.key$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT idempotency.grant_client('idempotency_plain')$$);
SELECT pg_temp.refused('idempotency_client', $$CREATE TABLE idempotency.mine ()$$);
SELECT pg_temp.allowed('idempotency_client', $$SELECT idempotency.publish('order.placed', '{}')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT idempotency.subscribe('s', '{*}')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT * FROM idempotency.fetch('s')$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT * FROM idempotency.outbox$$);
SELECT pg_temp.refused('idempotency_client', $$SELECT nextval('idempotency.outbox_seq')$$);

SELECT pg_temp.allowed('idempotency_consumer', $$SELECT idempotency.subscribe('mine', '{*}', start_at => 'beginning')$$);
SELECT pg_temp.allowed('idempotency_consumer', $$SELECT idempotency.ack('mine', batch) FROM idempotency.fetch('mine')$$);
SELECT pg_temp.allowed('idempotency_consumer', $$SELECT idempotency.redrive('mine')$$);
SELECT pg_temp.allowed('idempotency_consumer', $$SELECT * FROM idempotency.once_many('mine', ARRAY['a', 'b'])$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT idempotency.publish('order.placed', '{}')$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT idempotency.claim('s', 'k')$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT * FROM idempotency.outbox$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT * FROM idempotency.parked$$);
SELECT pg_temp.refused('idempotency_consumer', $$UPDATE idempotency.subscription SET owner = current_user$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT * FROM idempotency.dead_letters$$);

SELECT idempotency.subscribe('another''s', '{*}') \g /dev/null
SELECT pg_temp.refused('idempotency_consumer', $$SELECT * FROM idempotency.fetch('another''s')$$);
SELECT pg_temp.refused('idempotency_consumer', $$SELECT idempotency.unsubscribe('another''s')$$);

SELECT pg_temp.allowed('idempotency_operator', $$SELECT * FROM idempotency.keys$$);
SELECT pg_temp.allowed('idempotency_operator', $$SELECT * FROM idempotency.zombies$$);
SELECT pg_temp.allowed('idempotency_operator', $$SELECT idempotency.peek('s', 'k')$$);
SELECT pg_temp.allowed('idempotency_operator', $$SELECT idempotency.forget('s', 'k')$$);
SELECT pg_temp.allowed('idempotency_operator', $$SELECT * FROM idempotency.dead_letters$$);
SELECT pg_temp.refused('idempotency_operator', $$SELECT idempotency.claim('s', 'k')$$);
SELECT pg_temp.refused('idempotency_operator', $$SELECT idempotency.renew('s', 'leased', 1, '1 min')$$);
SELECT pg_temp.refused('idempotency_operator', $$SELECT * FROM idempotency.claim_abandoned('s', '1 min')$$);
SELECT pg_temp.refused('idempotency_operator', $$SELECT * FROM idempotency.key$$);
SELECT pg_temp.refused('idempotency_operator', $$SELECT idempotency.grant_operator('idempotency_plain')$$);

-- A role that writes to a guarded table needs no privilege on the guard. It is refused
-- because of the missing claim, not because of a privilege.

CREATE SCHEMA shop;
CREATE TABLE shop.charge (customer integer);
CREATE TRIGGER charge_needs_a_claim
	BEFORE INSERT ON shop.charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge.create');
GRANT USAGE ON SCHEMA shop TO idempotency_plain;
GRANT INSERT ON shop.charge TO idempotency_plain;

SELECT throws_ok(
	$$ SELECT pg_temp.as_role('idempotency_plain', 'INSERT INTO shop.charge VALUES (1)') $$,
	'IK403', NULL, 'the guard of a table refuses a write of a plain role');

-- A privilege that a SECURITY DEFINER procedure provides ends with the procedure.

CREATE FUNCTION shop.charge_create(p_key text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	op idempotency.operation := idempotency.claim('charge.create', p_key);
BEGIN
	IF NOT op.replayed THEN
		INSERT INTO shop.charge VALUES (1);
		PERFORM idempotency.complete('charge.create', p_key);
	END IF;
	RETURN op.replayed;
END $$;

SELECT pg_temp.allowed('idempotency_plain', $$SELECT shop.charge_create('order-1')$$);
SELECT results_eq(
	'SELECT customer FROM shop.charge', ARRAY[1],
	'a SECURITY DEFINER procedure works for a plain role');

SELECT * FROM finish();
ROLLBACK;
