-- extension only: functions of the outbox, and their privileges
--
-- Privileges of a role without grants, a client, a consumer and an operator. A hostile
-- search path affects none of them.
--
\set SHOW_CONTEXT never
\pset format unaligned

CREATE ROLE regress_idempotency_nobody;
CREATE ROLE regress_idempotency_client;
CREATE ROLE regress_idempotency_consumer;
CREATE ROLE regress_idempotency_consumer_2;
CREATE ROLE regress_idempotency_operator;
CREATE ROLE "regress idempotency ""quoted""";
SELECT idempotency.grant_client('regress_idempotency_client');
SELECT idempotency.grant_consumer('regress_idempotency_consumer');
SELECT idempotency.grant_consumer('regress_idempotency_consumer_2');
SELECT idempotency.grant_operator('regress_idempotency_operator');

-- Executes a statement, returns its result, and rolls it back.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION
	WHEN SQLSTATE 'P9999' THEN
		RETURN 'accepted';
	WHEN OTHERS THEN
		RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

-- Calls every function, and reads every table.
SELECT idempotency.subscribe('privileges', '{privileges}', owner => 'regress_idempotency_consumer');
CREATE FUNCTION handler(request json) RETURNS json LANGUAGE sql AS 'SELECT request';
CREATE TEMPORARY TABLE door (n serial, statement text);
INSERT INTO door (statement) VALUES
	('SELECT idempotency.claim(''privileges'', ''k'')'),
	('SELECT idempotency.try_claim(''privileges'', ''k'')'),
	('SELECT idempotency.complete(''privileges'', ''k'')'),
	('SELECT idempotency.fail(''privileges'', ''k'', NULL, 400)'),
	('SELECT idempotency.release(''privileges'', ''k'')'),
	('SELECT idempotency.claim(''privileges'', ''k'', lease => ''1 min'')'),
	('SELECT idempotency.renew(''privileges'', ''k'', 1, ''1 min'')'),
	('SELECT idempotency.checkpoint(''privileges'', ''k'', 1, ''charged'')'),
	('SELECT idempotency.claim_abandoned(''privileges'', ''1 min'')'),
	('SELECT idempotency.run(''privileges'', ''k'', NULL, ''handler(json)'')'),
	('SELECT idempotency.peek(''privileges'', ''k'')'),
	('SELECT idempotency.holders()'),
	('SELECT * FROM idempotency.holders(''privileges'', ''k'')'),
	('SELECT idempotency.forget(''privileges'', ''k'')'),
	('SELECT idempotency.once(''privileges'', ''k'')'),
	('SELECT idempotency.once_many(''privileges'', ''{k}''::text[])'),
	('SELECT idempotency.current_key(''privileges'')'),
	('SELECT idempotency.check_commit()'),
	('SELECT idempotency.require_claim()'),
	('SELECT ''{}''::jsonb::idempotency.document'),
	('SELECT idempotency.canonical(''{}'')'),
	('SELECT idempotency.fingerprint(''{}'')'),
	('SELECT idempotency.fingerprint(''POST'', ''/'', ''{}'')'),
	('SELECT idempotency.derive_key(''privileges'', ''k'', ''step'')'),
	('SELECT idempotency.natural_key(''k'')'),
	('SELECT idempotency.stable_text(1.5)'),
	('SELECT idempotency.uuidv7()'),
	('SELECT idempotency.parse_header(''"k"'')'),
	('SELECT idempotency.problem(ROW (''in_progress'', false, NULL, NULL, NULL, NULL, NULL, NULL, NULL, false, NULL, NULL, NULL)::idempotency.operation)'),
	('SELECT idempotency.problem_headers(''IK400'')'),
	('SELECT idempotency.publish(''privileges'', ''{}'')'),
	('SELECT idempotency.subscribe(''privileges 2'', ''{*}'')'),
	('SELECT * FROM idempotency.fetch(''privileges'')'),
	('SELECT idempotency.ack(''privileges'', 1)'),
	('SELECT idempotency.nack(''privileges'', 1, NULL)'),
	('SELECT idempotency.extend(''privileges'', 1, ''1 min'')'),
	('SELECT idempotency.alter_subscription(''privileges'', max_attempts => 3)'),
	('SELECT idempotency.pause(''privileges'')'),
	('SELECT idempotency.resume(''privileges'')'),
	('SELECT idempotency.seek(''privileges'', now())'),
	('SELECT idempotency.seek(''privileges'', ''now''::text)'),
	('CALL idempotency.deliver(''privileges'')'),
	('SELECT idempotency.handler_of(''privileges'')'),
	('SELECT idempotency.end_event()'),
	('SELECT idempotency.discard(''privileges'')'),
	('SELECT idempotency.redrive(''privileges'')'),
	('SELECT idempotency.unsubscribe(''privileges'')'),
	('SELECT idempotency.reap()'),
	('SELECT * FROM idempotency_internal.stats()'),
	('SELECT idempotency.stats_reset()'),
	('SELECT idempotency.grant_client(''regress_idempotency_nobody'')'),
	('SELECT idempotency.grant_consumer(''regress_idempotency_nobody'')'),
	('SELECT idempotency.grant_operator(''regress_idempotency_nobody'')'),
	('SELECT idempotency.grant_backup(''regress_idempotency_nobody'')'),
	('SELECT idempotency_internal.refuse_update()'),
	('SELECT idempotency_internal.grant_privileges(''regress_idempotency_nobody'', ''SELECT ON idempotency.key'')'),
	('SELECT * FROM idempotency.keys'),
	('SELECT * FROM idempotency.keys WHERE scope = ''s'' AND key = ''k'''),
	('SELECT * FROM idempotency.stats'),
	('SELECT * FROM idempotency.reaper'),
	('SELECT * FROM idempotency.zombies'),
	('SELECT * FROM idempotency.subscriptions'),
	('SELECT * FROM idempotency.partitions'),
	('SELECT * FROM idempotency.dead_letters'),
	('SELECT * FROM idempotency.outbox'),
	('SELECT * FROM idempotency.subscription'),
	('SELECT idempotency.has_more(''s'')'),
	('SELECT idempotency.setting(''wait'')'),
	('SELECT idempotency.configure(''wait'', ''1 s'')'),
	('SELECT * FROM idempotency.settings'),
	('INSERT INTO idempotency.configuration VALUES (''wait'', ''*'', ''1 s'')'),
	('SELECT * FROM idempotency.position'),
	('SELECT * FROM idempotency.parked'),
	('INSERT INTO idempotency.outbox (seq, txid, published_at, id, aggregatetype) VALUES (0, ''0'', now(), gen_random_uuid(), ''t'')'),
	('UPDATE idempotency.outbox SET payload = NULL'),
	('UPDATE idempotency.subscription SET owner = current_user'),
	('UPDATE idempotency.position SET batch = NULL'),
	('UPDATE idempotency.partition SET stop = NULL'),
	('DELETE FROM idempotency.parked'),
	('SELECT nextval(''idempotency.outbox_seq'')'),
	('SELECT nextval(''idempotency.token'')'),
	('SELECT * FROM idempotency.token'),
	('SELECT * FROM idempotency.key'),
	('INSERT INTO idempotency.key (created_at, expires_at, scope, key) VALUES (now(), now(), ''s'', ''k'')'),
	('UPDATE idempotency.key SET status = 500'),
	('DELETE FROM idempotency.key'),
	('TRUNCATE idempotency.key'),
	('LOCK TABLE idempotency.key'),
	('DELETE FROM idempotency.keys'),
	('CREATE TABLE idempotency.mine (id int)'),
	('CREATE FUNCTION idempotency.mine() RETURNS int LANGUAGE sql AS ''SELECT 1'''),
	('CREATE TABLE public.mine (document idempotency.document, operation idempotency.operation)'),
	('CREATE TABLE public.mine (abandoned idempotency.abandoned)'),
	('CREATE TABLE public.mine (event idempotency.event)'),
	('SELECT ''{}''::text::idempotency.document');
-- The list is complete except for the I/O functions of the type and the planner's
-- support functions.
SELECT proname AS not_tested FROM pg_proc
	WHERE pronamespace = 'idempotency'::regnamespace
		AND NOT EXISTS (SELECT FROM door WHERE statement LIKE '%idempotency.' || proname || '(%');
-- What the role may not do is counted, and everything else is listed.
CREATE TEMPORARY VIEW tried AS
	SELECT n, statement, regexp_replace(pg_temp.try(statement), '(permission denied for \w+) .*', '\1') AS answer FROM door;
CREATE TEMPORARY VIEW answers AS
	SELECT answer, count(*), string_agg(E'\n\t' || statement, '' ORDER BY n) FILTER (WHERE answer !~ 'permission denied for') AS statements
	FROM tried GROUP BY answer ORDER BY answer COLLATE "C";
GRANT SELECT ON door, tried, answers TO PUBLIC;
SELECT has_schema_privilege('public', 'public', 'CREATE') AS public_may_create \gset
GRANT CREATE ON SCHEMA public TO PUBLIC;

--
-- A role without grants
--

-- The schema is closed to the role;
SET ROLE regress_idempotency_nobody;
SELECT * FROM answers;
RESET ROLE;
-- with USAGE on the schema, every object in it is still closed.
BEGIN;
GRANT USAGE ON SCHEMA idempotency TO regress_idempotency_nobody;
SET LOCAL ROLE regress_idempotency_nobody;
SELECT * FROM answers;
RESET ROLE;
ROLLBACK;

--
-- A client claims, finishes and replays
--

BEGIN;
SET LOCAL ROLE regress_idempotency_client;
SELECT * FROM answers;
ROLLBACK;
SELECT p.oid::regprocedure AS client_may_call FROM pg_proc p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND has_function_privilege('regress_idempotency_client', p.oid, 'EXECUTE')
	ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT c.relname, privilege FROM pg_class c, unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v')
		AND has_table_privilege('regress_idempotency_client', c.oid, privilege) ORDER BY c.relname, privilege;

-- PUBLIC has USAGE on the row types of the tables: every role with USAGE on the schema
-- can create a column of such a type, which then prevents changes of the table.
SET ROLE regress_idempotency_client;
CREATE TEMPORARY TABLE held (k idempotency.key);
RESET ROLE;
BEGIN;
ALTER TABLE idempotency.key ALTER retention TYPE text;
ROLLBACK;
DROP TABLE held;
SET ROLE regress_idempotency_nobody;
CREATE TEMPORARY TABLE held (k idempotency.key);
RESET ROLE;

-- A client passes JSON in every type, as a constant or not.
BEGIN;
SET LOCAL ROLE regress_idempotency_client;
SELECT statement, pg_temp.try(statement) FROM unnest(ARRAY[
	'SELECT idempotency.claim(''privileges'', ''k'', ''{}'')',
	'SELECT idempotency.claim(''privileges'', ''k'', ''{}''::json)',
	'SELECT idempotency.claim(''privileges'', ''k'', ''{}''::jsonb)',
	'SELECT idempotency.claim(''privileges'', ''k'', ''{}''::text)',
	'SELECT idempotency.claim(''privileges'', ''k'', ''{}''::varchar)',
	'SELECT idempotency.claim(''privileges'', ''k'', j) FROM jsonb_build_object(''a'', 1) AS j',
	'SELECT idempotency.claim(''privileges'', ''k'', t) FROM repeat(''1'', 3) AS t',
	'SELECT ''{}''::idempotency.document::json, ''{}''::idempotency.document::jsonb']) AS statement;
-- And scopes and keys.
CREATE FUNCTION pg_temp.all_keys(call text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(DISTINCT pg_temp.try(format(call, key)), ', ') FROM unnest(ARRAY['''k''', '''k''::text', '''k''::varchar', '''k''::bpchar',
		'''k''::name', '1', '1::bigint', '1::smallint', '''a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11''::uuid',
		'(SELECT ''k''::text OFFSET 0)', '(SELECT 1 OFFSET 0)', '(SELECT ''a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11''::uuid OFFSET 0)']) AS key
$$;
SELECT pg_temp.all_keys('SELECT idempotency.try_claim(%1$s, %1$s)') AS claim, pg_temp.all_keys('SELECT idempotency.publish(''t'', ''1'', %s)') AS publish,
	pg_temp.all_keys('SELECT idempotency.once_many(''privileges'', ARRAY[%s])') AS once_many;
SET LOCAL ROLE regress_idempotency_consumer;
SELECT pg_temp.all_keys('SELECT idempotency.once(%1$s, %1$s)') AS once, pg_temp.all_keys('SELECT idempotency.once_many(''privileges'', ARRAY[%s])') AS once_many;
SET LOCAL ROLE regress_idempotency_operator;
SELECT pg_temp.all_keys('SELECT idempotency.peek(%1$s, %1$s)') AS peek, pg_temp.all_keys('SELECT idempotency.forget(%1$s, %1$s)') AS forget,
	pg_temp.try('SELECT idempotency.forget(scope, key) FROM idempotency.keys WHERE key = ''k''::text::idempotency.keytext') AS view,
	pg_temp.try('SELECT count(*) FROM idempotency.keys WHERE key = ''k''::idempotency.keytext::text') AS text,
	pg_temp.try('SELECT idempotency.forget(''s'', ''k''::idempotency.keytext)') AS keytext;
SET LOCAL ROLE regress_idempotency_client;
DO $$
DECLARE
	request jsonb := '{"a": 1}';
	answer text := '{"b": 2}';
BEGIN
	PERFORM idempotency.claim('privileges', 'k', request);
	PERFORM idempotency.complete('privileges', 'k', answer);
	RAISE NOTICE '%', (idempotency.try_claim('privileges', 'k', request)).response;
END
$$;
ROLLBACK;

-- In a SECURITY INVOKER procedure, from claim to commit.
CREATE TABLE charge (id int GENERATED ALWAYS AS IDENTITY, amount int, key text DEFAULT idempotency.current_key('privileges'));
CREATE TRIGGER require_claim BEFORE INSERT ON charge FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('privileges');
GRANT SELECT, INSERT ON charge TO regress_idempotency_client;
CREATE PROCEDURE charge_create(p_key text, p_amount int, INOUT p_response json DEFAULT NULL) LANGUAGE plpgsql SECURITY INVOKER AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('privileges', p_key, json_build_object('amount', p_amount));
	IF NOT op.replayed THEN
		INSERT INTO charge (amount) VALUES (p_amount) RETURNING json_build_object('id', id) INTO p_response;
		PERFORM idempotency.complete('privileges', p_key, p_response, 201);
	ELSE
		p_response := op.response;
	END IF;
END
$$;
SET ROLE regress_idempotency_client;
CALL charge_create('k1', 100);
CALL charge_create('k1', 100);
SELECT * FROM charge;
SELECT outcome, response FROM idempotency.run('privileges', 'k2', '{"a": 1}'::text, 'handler(json)');
SELECT idempotency.once('privileges', 'm1'), idempotency.once('privileges', 'm1');
SELECT * FROM idempotency.once_many('privileges', ARRAY['m1', 'm2']);
SELECT status, response FROM idempotency.peek('privileges', 'k1');
-- With a lease too, from the claim to the outcome.
SELECT token FROM idempotency.claim('privileges', 'k3', '{}', lease => '1 min') \gset
SELECT idempotency.renew('privileges', 'k3', :token, '2 min') > now() AS renewed;
SELECT FROM idempotency.checkpoint('privileges', 'k3', :token, 'charged', '{"charge": 1}');
SELECT idempotency.release('privileges', 'k3', :token);
SELECT key, recovery_point, token FROM idempotency.claim_abandoned('privileges', '1 min') \gset
SELECT :'key' AS key, :'recovery_point' AS recovery_point, idempotency.complete('privileges', 'k3', '3', token => :token);
-- A client's own table can have the guard and a column of the type.
CREATE TABLE public.mine (id int, document idempotency.document, key text DEFAULT idempotency.current_key('privileges'));
CREATE TRIGGER require_claim BEFORE INSERT ON public.mine FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('privileges');
SELECT pg_temp.try('INSERT INTO public.mine VALUES (1)');
DROP TABLE public.mine;
RESET ROLE;

--
-- A consumer subscribes, reads and deduplicates
--

BEGIN;
SET LOCAL ROLE regress_idempotency_consumer;
SELECT * FROM answers;
ROLLBACK;
SELECT p.oid::regprocedure AS consumer_may_call FROM pg_proc p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND has_function_privilege('regress_idempotency_consumer', p.oid, 'EXECUTE')
	ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT c.relname, privilege FROM pg_class c, unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v')
		AND has_table_privilege('regress_idempotency_consumer', c.oid, privilege) ORDER BY c.relname, privilege;

-- From a client's publish() to the acknowledgement.
SET ROLE regress_idempotency_client;
SELECT idempotency.publish('privileges', '{"n": 1}') IS NOT NULL AS published;
SET ROLE regress_idempotency_consumer;
SELECT batch, payload FROM idempotency.fetch('privileges') \gset
SELECT :'payload' AS payload, idempotency.extend('privileges', :batch, '1 min') > now() AS extended;
SELECT idempotency.once('privileges', 'event 1');
SELECT idempotency.nack('privileges', :batch, NULL) IS NOT NULL AS given_back;
SELECT batch FROM idempotency.fetch('privileges') \gset
SELECT idempotency.ack('privileges', :batch);
-- A role that is not a member of the owner gets nothing, whatever was granted to it.
SET ROLE regress_idempotency_consumer_2;
SELECT statement, pg_temp.try(statement) FROM door
	WHERE statement ~ 'idempotency\.(fetch|ack|nack|extend|redrive|unsubscribe)' ORDER BY n;
SELECT idempotency.subscribe('privileges', '{*}');
SELECT idempotency.subscribe('privileges 3', '{*}', owner => 'regress_idempotency_consumer');
RESET ROLE;
-- A member gets the events.
GRANT regress_idempotency_consumer TO regress_idempotency_consumer_2;
SET ROLE regress_idempotency_consumer_2;
SELECT statement, pg_temp.try(statement) FROM door WHERE statement LIKE '%fetch%';
SELECT pg_temp.try($$SELECT idempotency.subscribe('privileges 3', '{*}', owner => 'regress_idempotency_consumer')$$);
RESET ROLE;
REVOKE regress_idempotency_consumer FROM regress_idempotency_consumer_2;
-- A role that can SET ROLE to the owner but does not inherit its privileges gets
-- nothing.
ALTER ROLE regress_idempotency_consumer_2 NOINHERIT;
GRANT regress_idempotency_consumer TO regress_idempotency_consumer_2;
SET ROLE regress_idempotency_consumer_2;
SELECT statement, pg_temp.try(statement) FROM door WHERE statement LIKE '%fetch%';
RESET ROLE;

--
-- An operator reads and evicts
--

-- The result of stats_reset() depends on whether the library is preloaded.
DELETE FROM door WHERE statement LIKE '%stats_reset%';
SET ROLE regress_idempotency_operator;
SELECT * FROM answers;
SELECT scope, key, state, status FROM idempotency.keys WHERE scope = 'privileges' ORDER BY key;
SELECT idempotency.forget('privileges', 'k2');
SELECT count(*) FROM idempotency.keys WHERE scope = 'privileges' AND key = 'k2';
RESET ROLE;
SELECT p.oid::regprocedure AS operator_may_call FROM pg_proc p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND has_function_privilege('regress_idempotency_operator', p.oid, 'EXECUTE')
	ORDER BY p.oid::regprocedure::text COLLATE "C";
SELECT c.relname, privilege FROM pg_class c, unnest('{SELECT,INSERT,UPDATE,DELETE,TRUNCATE,REFERENCES,TRIGGER}'::text[]) AS privilege
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v')
		AND has_table_privilege('regress_idempotency_operator', c.oid, privilege) ORDER BY c.relname, privilege;

-- No grant includes the grant option.
SELECT count(*) AS with_grant_option FROM pg_proc, aclexplode(proacl) AS a
	WHERE pronamespace = 'idempotency'::regnamespace AND a.is_grantable AND a.grantee <> proowner;

-- Every role name is accepted, granting twice changes nothing, and NULL grants nothing.
SELECT idempotency.grant_client('"regress idempotency ""quoted"""');
SELECT idempotency.grant_client('"regress idempotency ""quoted"""');
SELECT idempotency.grant_consumer('"regress idempotency ""quoted"""');
SELECT idempotency.grant_operator('"regress idempotency ""quoted"""');
SELECT has_function_privilege('regress idempotency "quoted"', 'idempotency.release(idempotency.identifier, idempotency.identifier, bigint)', 'EXECUTE') AS client,
	has_function_privilege('regress idempotency "quoted"', 'idempotency.ack(text, bigint, bigint[])', 'EXECUTE') AS consumer,
	has_function_privilege('regress idempotency "quoted"', 'idempotency.forget(idempotency.identifier, idempotency.identifier)', 'EXECUTE') AS operator;
SELECT idempotency.grant_client(NULL), idempotency.grant_consumer(NULL), idempotency.grant_operator(NULL), idempotency.grant_backup(NULL);
SELECT count(*) AS rights_of_public FROM pg_proc
	WHERE pronamespace = 'idempotency'::regnamespace AND has_function_privilege('public', oid, 'EXECUTE');
SELECT idempotency.grant_client('no_such_role');
SELECT idempotency.grant_consumer('public');
SELECT idempotency.grant_operator('public');
SELECT idempotency.grant_backup('public');
-- An OID without a role is not used as a name.
SELECT idempotency.grant_client(1::oid);
\echo :SQLSTATE
SELECT idempotency.grant_consumer(1::oid);
\echo :SQLSTATE
SELECT idempotency.grant_operator(1::oid);
\echo :SQLSTATE
SELECT idempotency.grant_client('-');
\echo :SQLSTATE
SELECT idempotency.grant_consumer('-');
\echo :SQLSTATE
SELECT idempotency.grant_operator('-');
\echo :SQLSTATE

--
-- A hostile search path
--

-- A role that can create a schema can put any object there: functions and operators
-- that match better than PostgreSQL's own, types and tables of the same names. Each of
-- these raises an error when used.
CREATE SCHEMA regress_hostile;
SET search_path = regress_hostile, pg_catalog;
CREATE FUNCTION captured() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE FUNCTION format(text, regrole) RETURNS text LANGUAGE sql AS 'SELECT captured()::text';
CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT captured()::text::timestamptz';
CREATE FUNCTION date_trunc(text, interval) RETURNS interval LANGUAGE sql AS 'SELECT captured()::text::interval';
CREATE FUNCTION isfinite(timestamptz) RETURNS boolean LANGUAGE sql AS 'SELECT captured()::text::boolean';
CREATE FUNCTION pg_size_pretty(bigint) RETURNS text LANGUAGE sql AS 'SELECT captured()::text';
CREATE FUNCTION pg_column_size(json) RETURNS int LANGUAGE sql AS 'SELECT captured()::text::int';
CREATE FUNCTION encode(bytea, text) RETURNS text LANGUAGE sql AS 'SELECT captured()::text';
CREATE FUNCTION after(timestamptz, timestamptz) RETURNS boolean LANGUAGE sql AS 'SELECT captured()::text::boolean';
CREATE FUNCTION minus(timestamptz, timestamptz) RETURNS interval LANGUAGE sql AS 'SELECT captured()::text::interval';
CREATE FUNCTION same(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT captured()::text::boolean';
CREATE FUNCTION same(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT captured()::text::boolean';
CREATE FUNCTION plus(bigint, bigint) RETURNS bigint LANGUAGE sql AS 'SELECT captured()::text::bigint';
CREATE FUNCTION nextval(regclass) RETURNS bigint LANGUAGE sql AS 'SELECT captured()::text::bigint';
CREATE OPERATOR <= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = after);
CREATE OPERATOR >= (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = after);
CREATE OPERATOR < (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = after);
CREATE OPERATOR > (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = after);
CREATE OPERATOR <> (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = after);
CREATE OPERATOR - (LEFTARG = timestamptz, RIGHTARG = timestamptz, FUNCTION = minus);
CREATE OPERATOR = (LEFTARG = text, RIGHTARG = text, FUNCTION = same);
CREATE OPERATOR = (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = same);
CREATE OPERATOR + (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = plus);
CREATE DOMAIN text AS pg_catalog.text CHECK (false);
CREATE DOMAIN interval AS pg_catalog.interval CHECK (false);
CREATE DOMAIN json AS pg_catalog.json CHECK (false);
CREATE DOMAIN int8 AS pg_catalog.int8 CHECK (false);
CREATE DOMAIN regrole AS pg_catalog.regrole CHECK (false);
CREATE DOMAIN document AS pg_catalog.json CHECK (false);
CREATE TYPE operation AS (outcome pg_catalog.text);
CREATE TYPE event AS (batch pg_catalog.text);
CREATE TABLE key (captured boolean NOT NULL CHECK (false));
CREATE TABLE outbox (captured boolean NOT NULL CHECK (false));
CREATE TABLE subscription (captured boolean NOT NULL CHECK (false));
CREATE TABLE position (captured boolean NOT NULL CHECK (false));
CREATE TABLE parked (captured boolean NOT NULL CHECK (false));
CREATE VIEW keys AS SELECT captured()::pg_catalog.text AS state;
CREATE FUNCTION claim(pg_catalog.text, pg_catalog.text) RETURNS void LANGUAGE sql AS 'SELECT captured()';
GRANT USAGE ON SCHEMA regress_hostile TO PUBLIC;

-- They do capture an unqualified call.
SELECT clock_timestamp() IS NULL;
SELECT 'a'::pg_catalog.text = 'a'::pg_catalog.text;
SELECT 'a'::text;

-- They do not capture the extension's functions.
SET ROLE regress_idempotency_client;
BEGIN;
SELECT outcome FROM idempotency.claim('privileges', 'hostile', '{"a": 1}', wait => '1 s', retention => '1 h');
SELECT idempotency.complete('privileges', 'hostile', '{"b": 2}', 200, '{"c": 3}');
SELECT outcome, status, headers, response FROM idempotency.claim('privileges', 'hostile', '{"a": 1}'::pg_catalog.jsonb);
SELECT outcome FROM idempotency.try_claim('privileges', 'hostile', '{"a": 2}'::pg_catalog.text);
SELECT outcome FROM idempotency.try_claim('privileges', 'hostile 2');
SELECT idempotency.fail('privileges', 'hostile 2', '"no"'::pg_catalog.varchar, 400);
SELECT outcome FROM idempotency.try_claim('privileges', 'hostile 3');
SELECT idempotency.release('privileges', 'hostile 3');
SELECT outcome, response FROM idempotency.run('privileges', 'hostile 4', '{"d": 4}'::pg_catalog.json, 'public.handler(pg_catalog.json)');
SELECT idempotency.once('privileges', 'hostile 5'), idempotency.current_key('privileges');
SELECT idempotency.once_many('privileges', ARRAY['hostile 5', 'hostile 6']::pg_catalog.text[]);
SELECT status FROM idempotency.peek('privileges', 'hostile');
INSERT INTO public.charge (amount) VALUES (1);
SELECT token FROM idempotency.claim('privileges', 'hostile 7', '{"a": 1}', lease => '1 min') \gset
SELECT idempotency.renew('privileges', 'hostile 7', :token, '2 min') IS NULL AS refused;
SELECT FROM idempotency.checkpoint('privileges', 'hostile 7', :token, 'charged', '{"e": 5}');
SELECT idempotency.release('privileges', 'hostile 7', :token);
SELECT key, request FROM idempotency.claim_abandoned('privileges', '1 millisecond');
COMMIT;
SELECT pg_catalog.pg_sleep(0.01);
SELECT idempotency.publish('privileges', '{"hostile": 1}', 'a', 'made', '{"h": 1}',
	'00000000-0000-7000-8000-000000000001') AS published;
SELECT idempotency.publish('privileges', '{"hostile": 2}', 'a', 'made', '{"h": 2}',
	'00000000-0000-7000-8000-000000000002') AS published;
SET ROLE regress_idempotency_consumer;
SELECT idempotency.subscribe('privileges', '{priv*,x}', max_attempts => 1) AS is_new;
SELECT idempotency.subscribe('hostile', '{hostile}', max_lag => '1 h') AS is_new;
SELECT batch FROM idempotency.fetch('privileges', 1, '1 ms', '1 h') \gset
SELECT idempotency.nack('privileges', :batch, '00000000-0000-7000-8000-000000000001', 'refused', '0') IS NULL AS dead;
SELECT idempotency.ack('privileges', :batch);
SELECT batch, payload FROM idempotency.fetch('privileges', 1) \gset
SELECT :'payload' AS payload, idempotency.extend('privileges', :batch, '1 h') IS NULL AS refused;
SELECT idempotency.nack('privileges', :batch, NULL) IS NULL AS refused;
RESET ROLE;
SELECT event_id, error, attempts FROM idempotency.dead_letters WHERE subscription OPERATOR(pg_catalog.=) 'privileges';
SET ROLE regress_idempotency_consumer;
SELECT idempotency.redrive('privileges'), idempotency.redrive('privileges', '00000000-0000-7000-8000-000000000001');
SELECT payload, attempt FROM idempotency.fetch('privileges', 10);
SELECT idempotency.unsubscribe('privileges'), idempotency.unsubscribe('hostile');
SET ROLE regress_idempotency_operator;
SELECT key, state, status, response_size IS NOT NULL AS has_response FROM idempotency.keys
	WHERE scope OPERATOR(pg_catalog.=) 'privileges' AND key LIKE 'hostile%' ORDER BY key;
SELECT key, attempt FROM idempotency.zombies WHERE scope OPERATOR(pg_catalog.=) 'privileges';
SELECT idempotency.forget('privileges', 'hostile');
RESET ROLE;
SELECT idempotency.grant_client('regress_idempotency_nobody'), idempotency.grant_operator('regress_idempotency_nobody');
RESET search_path;
SELECT has_function_privilege('regress_idempotency_nobody', 'idempotency.release(idempotency.identifier, idempotency.identifier, bigint)', 'EXECUTE') AS client,
	has_function_privilege('regress_idempotency_nobody', 'idempotency.forget(idempotency.identifier, idempotency.identifier)', 'EXECUTE') AS operator;

-- The same from the temporary schema, which is searched first for tables and types.
CREATE TEMPORARY TABLE key (captured boolean NOT NULL CHECK (false));
CREATE TEMPORARY TABLE keys (captured boolean NOT NULL CHECK (false));
CREATE DOMAIN pg_temp.interval AS pg_catalog.interval CHECK (false);
CREATE DOMAIN pg_temp.document AS pg_catalog.json CHECK (false);
SET ROLE regress_idempotency_client;
BEGIN;
SELECT outcome FROM idempotency.claim('privileges', 'temporary', '{}', retention => '1 h');
SELECT idempotency.complete('privileges', 'temporary', '{}');
COMMIT;
SET ROLE regress_idempotency_operator;
SELECT state FROM idempotency.keys WHERE scope = 'privileges' AND key = 'temporary';
RESET ROLE;
DROP TABLE pg_temp.key, pg_temp.keys;

\if :public_may_create
\else
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
\endif
SET client_min_messages = warning;
DROP SCHEMA regress_hostile CASCADE;
DROP TABLE charge;
DROP PROCEDURE charge_create;
DROP FUNCTION handler;
DROP OWNED BY regress_idempotency_nobody, regress_idempotency_client, regress_idempotency_consumer,
	regress_idempotency_consumer_2, regress_idempotency_operator, "regress idempotency ""quoted""";
DROP ROLE regress_idempotency_nobody, regress_idempotency_client, regress_idempotency_consumer,
	regress_idempotency_consumer_2, regress_idempotency_operator, "regress idempotency ""quoted""";
