-- portable only: privileges, search paths and the commit guard, which are its own
--
-- The portable edition: the privileges of its objects, the rights with which it runs, and
-- attempts to bypass the commit guard.
--
\set SHOW_CONTEXT never

-- The SQLSTATE and message of a statement, which is rolled back.
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
GRANT CREATE ON SCHEMA public TO PUBLIC;
CREATE ROLE regress_idempotency_nobody;
CREATE ROLE regress_idempotency_client;
CREATE ROLE regress_idempotency_operator;
CREATE ROLE regress_idempotency_backup;
SELECT idempotency.grant_client('regress_idempotency_client');
SELECT idempotency.grant_operator('regress_idempotency_operator');
SELECT idempotency.grant_backup('regress_idempotency_backup');

--
-- Privileges
--

-- The owner is no superuser, and PUBLIC has no privilege.
SELECT rolsuper FROM pg_namespace JOIN pg_roles AS r ON r.oid = nspowner WHERE nspname = 'idempotency';
SELECT count(*) AS public_functions FROM pg_proc AS p, aclexplode(coalesce(proacl, acldefault('f', proowner))) AS a
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 0;
SELECT count(*) AS public_relations FROM pg_class, aclexplode(relacl) AS a
	WHERE relnamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 0;
-- Roles for monitoring see no keys, no events and no error texts.
SELECT p.oid::regprocedure::text AS granted_to_pg_monitor FROM pg_proc AS p, aclexplode(proacl) AS a
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 'pg_monitor'::regrole
	UNION ALL
	SELECT c.oid::regclass::text FROM pg_class AS c, aclexplode(relacl) AS a
	WHERE relnamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 'pg_monitor'::regrole
	ORDER BY 1;

-- Every function that runs with the owner's rights has a fixed search path. Every other
-- function in the schema that clients can use contains only qualified names: see
-- 035_shadows.pl.
SELECT p.oid::regprocedure AS without_search_path FROM pg_proc AS p
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND prosecdef
		AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)
	ORDER BY p.proname;
-- A function that forbids plans forbids JIT: what it forbids but needs costs more than any
-- limit of JIT, which takes longer than the query. So does holders_of(), whose estimates are far too high.
SELECT p.oid::regprocedure AS with_jit FROM pg_proc AS p
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%'
		AND (p.proname = 'holders_of' OR EXISTS (SELECT FROM unnest(proconfig) AS s WHERE s ~ '^enable_.*=off$'))
		AND NOT 'jit=off' = ANY (proconfig);
-- With standard_conforming_strings = off, which any session can set, a backslash is itself only in E''.
SELECT p.oid::regprocedure AS with_a_bare_backslash FROM pg_proc AS p
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND regexp_replace(prosrc, 'E''([^''\\]|\\.|'''')*''', '', 'g') ~ '\\';
-- None takes a value of a type of its caller's, except arrays, which PL/pgSQL does not check.
SELECT p.oid::regprocedure AS of_any_type FROM pg_proc AS p
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND prosecdef
		AND EXISTS (SELECT FROM unnest(proargtypes) AS t (oid) JOIN pg_type USING (oid)
			WHERE typtype = 'p' OR typtype = 'd' AND typbasetype::regtype::text NOT IN ('json', 'text'));
-- not distributed: it has no outbox
SELECT DISTINCT p.proname AS with_the_rights_of_the_caller FROM pg_proc AS p
	WHERE pronamespace = 'idempotency'::regnamespace AND NOT prosecdef AND prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql');
-- both layouts

-- What each role can do.
CREATE TEMPORARY TABLE door (n serial, statement text);
INSERT INTO door (statement) VALUES
	('SELECT idempotency.once(''portable'', ''k'')'),
	('SELECT idempotency.peek(''portable'', ''k'')'),
	('SELECT idempotency.forget(''portable'', ''k'')'),
	('SELECT idempotency.reap()'),
	('SELECT count(*) FROM idempotency.keys'),
	('SELECT count(*) FROM idempotency.key'),
	('DELETE FROM idempotency.key'),
	('SELECT idempotency_internal.put(NULL, NULL, NULL)'),
	('SELECT idempotency.grant_client(''regress_idempotency_nobody'')');
GRANT SELECT ON door TO PUBLIC;
SET ROLE regress_idempotency_nobody;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_idempotency_client;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_idempotency_backup;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
SET ROLE regress_idempotency_operator;
SELECT statement, pg_temp.try(statement) FROM door ORDER BY n;
RESET ROLE;

-- A scope prefix prevents mistakes, and separates no roles: each can change it.
SET ROLE regress_idempotency_client;
SET idempotency.scope_prefix = 'tenant1/';
SELECT pg_temp.try('SELECT idempotency.once(''tenant2/mail'', ''k'')');
SET idempotency.scope_prefix = 'tenant2/';
SELECT pg_temp.try('SELECT idempotency.once(''tenant2/mail'', ''k'')');
RESET idempotency.scope_prefix;
RESET ROLE;

--
-- Code of a client never runs with the rights of the owner
--

SET ROLE regress_idempotency_client;
CREATE FUNCTION public.who(text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'code of the client runs as %', current_user;
END
$$;
CREATE FUNCTION public.same(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT public.who($1) IS NULL';
CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = public.same);
SET search_path = public, pg_catalog;
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'path', '{"a": [1.50, "b"]}', lease => '1 min');
SELECT idempotency.complete('portable', 'path', '{"c": 3}');
SELECT idempotency.once('portable', 'path 2'), idempotency.canonical('{"b": 1e21, "a": "\u0001"}');
COMMIT;
RESET search_path;
-- The handler of run() has the rights of the caller.
CREATE FUNCTION public.who_runs(json) RETURNS json LANGUAGE sql AS 'SELECT to_json(current_user::text)';
SELECT response FROM idempotency.run('portable', 'run', NULL, 'public.who_runs(json)');
RESET ROLE;

--
-- The commit guard
--

-- SET CONSTRAINTS fires it early, and does not turn it off.
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'early');
SET CONSTRAINTS ALL IMMEDIATE;
COMMIT;
BEGIN;
SET CONSTRAINTS ALL IMMEDIATE;
SELECT outcome FROM idempotency.claim('portable', 'immediate');
COMMIT;
-- A complete() that the guard has seen and that is then rolled back is seen again.
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'undone');
SAVEPOINT s;
SELECT idempotency.complete('portable', 'undone');
SET CONSTRAINTS ALL IMMEDIATE;
ROLLBACK TO s;
COMMIT;
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'again');
SELECT idempotency.complete('portable', 'again', '1');
SET CONSTRAINTS ALL IMMEDIATE;
SET CONSTRAINTS ALL DEFERRED;
SELECT outcome FROM idempotency.claim('portable', 'again 2');
COMMIT;
-- A client can change the settings that hold the results of the transaction, and gains
-- nothing.
CREATE TABLE guarded (id int);
CREATE TRIGGER require_claim BEFORE INSERT ON guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('portable');
BEGIN;
SELECT idempotency.once('portable 2', 'k');
SELECT length(set_config('idempotency_internal.results', chr(30) || 'portable' || chr(31) || 'kforged', true)) > 0 AS forged;
SELECT idempotency.current_key('portable') IS NULL AS no_key;
INSERT INTO guarded VALUES (1);
ROLLBACK;
SELECT key, state FROM idempotency.keys WHERE scope = 'portable' ORDER BY key;

--
-- The fast path of canonical() agrees with the other one
--

CREATE FUNCTION pg_temp.value(seed integer) RETURNS jsonb LANGUAGE sql AS $$
	SELECT (ARRAY['0', '-0.0', '12.50', '-3.10', '1.000', '100', '1e20', '1e21', '999999999999999999999', '999999999999999999999.5',
		'0.000001', '0.0000010', '0.0000009', '1e-7', '1e399', '0.' || repeat('12', 150), repeat('9', 300), '123456789012345678.90',
		'true', 'null', '""', '"a, "', '", "', E'"\\""', '"\u0001"', '"é"', '"\ue000"', '"\ud83d\ude00"', '{}', '[]', '[1.0]', '{"b": 1.0, "a": 2}'])
		[1 + (hashint4(seed) & 1073741823) % 32]::jsonb
$$;
CREATE FUNCTION pg_temp.name(seed integer) RETURNS text LANGUAGE sql AS $$
	SELECT (ARRAY['', 'a', 'b', 'aa', 'a b', 'a!', 'a"', 'B', 'customer', 'amount', E'\\', E'\x01', 'é', 'ééé', E'\ue000', E'\U0001F600', 'a: ', ', '])
		[1 + (hashint4(seed + 1000000) & 1073741823) % 18]
$$;
SELECT count(*) AS objects, count(*) FILTER (WHERE idempotency_internal.canonical(d.value) <> idempotency_internal.canonical_any(d.value)) AS differ
	FROM generate_series(1, 3000) AS n,
		LATERAL (SELECT coalesce(jsonb_object_agg(pg_temp.name(n * 10 + m), pg_temp.value(n * 10 + m)), '{}') AS value
			FROM generate_series(1, n % 6) AS m) AS d;

--
-- Settings are read in subtransactions, which no parallel query can begin
--

SELECT count(set_config(name, 'on', false)) AS forced FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');
SET idempotency.max_response_size = '2kB';
SET idempotency.retention = '1 h';
SET idempotency.wait = '1 s';
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'parallel', lease => '1 min');
SELECT length(idempotency.complete('portable', 'parallel', to_json(repeat('x', 1500)))::text);
COMMIT;
RESET idempotency.max_response_size;
RESET idempotency.retention;
RESET idempotency.wait;
SELECT count(set_config(name, reset_val, false)) AS reset FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query');

-- not distributed: a guard of leases
--
-- Text that is no JSON fails a call that was noted: an earlier proof does not suffice
--

CREATE FUNCTION pg_temp.caught(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
SELECT token AS own FROM idempotency.claim('portable', 'malformed', lease => '1 min') \gset
BEGIN;
SELECT n, idempotency.renew('portable', 'malformed', :own, '1 min') > now() AS renewed, pg_temp.caught('SELECT idempotency.' || replace(call, 'OWN', :'own')) AS error,
		pg_temp.caught('SELECT idempotency.check_commit()') AS commit
	FROM unnest(ARRAY['complete(''portable'', ''malformed'', ''{'', token => OWN)', 'complete(''portable'', ''malformed'', headers => ''{'', token => OWN)',
		'fail(''portable'', ''malformed'', ''{'', 500, token => OWN)', 'fail(''portable'', ''malformed'', NULL, 500, ''{'', token => OWN)',
		'checkpoint(''portable'', ''malformed'', OWN, ''sent'', ''{'')']) WITH ORDINALITY AS c (call, n);
\set VERBOSITY terse
COMMIT;
-- In the transaction that claimed, each call about the key counts; a call about another key does not.
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'malformed here', lease => '1 min');
SELECT outcome FROM idempotency.claim('portable', 'other');
SELECT idempotency.complete('portable', 'other', '1');
SELECT pg_temp.caught($$SELECT idempotency.complete('portable', 'malformed here', '{')$$) AS error;
COMMIT;
\set VERBOSITY default
-- So does a call without a claim, after a lease was granted.
BEGIN;
SELECT outcome FROM idempotency.claim('portable', 'beside', lease => '1 min');
SAVEPOINT here;
SELECT idempotency.complete('portable', 'never claimed', '1');
ROLLBACK TO here;
SELECT pg_temp.caught('SELECT idempotency.check_commit()') IN ('IK410', 'IK412') AS refused;
ROLLBACK;
-- both layouts

--
-- Conditions that exclude a row are tested before a call, and rows of once_many() are not cached
--

CREATE FUNCTION relevant(id int) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN id = 2; END';
CREATE TABLE message AS SELECT n AS id FROM generate_series(1, 3) AS n, generate_series(1, 100);
ANALYZE message;
SELECT DISTINCT id FROM message WHERE idempotency.once('portable order', id) AND relevant(id);
SELECT key FROM idempotency.key WHERE scope = 'portable order';
SELECT count(*) FROM message, LATERAL idempotency.once_many('portable many', ARRAY[id::text]);
DROP TABLE message;
DROP FUNCTION relevant;

--
-- Tokens: random, and growing from owner to owner of a key
--

-- The tests have replaced the function, for the expected output.
BEGIN;
ALTER FUNCTION idempotency_internal.new_token(bigint) RENAME TO test_token;
ALTER FUNCTION idempotency_internal.random_token(bigint) RENAME TO new_token;

-- The low bits are random, a double holds each token, and it grows even if the clock was set back.
SELECT count(DISTINCT t & 131071) > 90 AS are_random, max(t) < 1::bigint << 53 AS are_exact
	FROM (SELECT idempotency_internal.new_token(NULL) AS t FROM generate_series(1, 100)) AS n;
SELECT min(t) > 1::bigint << 52 AND count(DISTINCT t) > 90 AS grow
	FROM (SELECT idempotency_internal.new_token(1::bigint << 52) AS t FROM generate_series(1, 100)) AS n;

-- The next owner of a key has a greater one, however the row of the former owner ended.
CREATE FUNCTION pg_temp.grows(ending text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	last bigint := 0;
	next bigint;
BEGIN
	FOR i IN 1 .. 20 LOOP
		next := (idempotency.claim('portable token', ending, lease => '1 min')).token;
		IF next <= last THEN
			RETURN false;
		END IF;
		last := next;
		EXECUTE format('SELECT idempotency.' || ending, 'portable token', ending, last);
	END LOOP;
	RETURN true;
END $$;
SELECT e.ending, pg_temp.grows(e.ending) FROM (VALUES ('release(%L, %L, %s)'),
	('forget(%1$L, %2$L) FROM idempotency.complete(%1$L, %2$L, token => %3$s)'), ('complete(%L, %L, token => %s, retention => ''1 us'')')) AS e (ending);
ROLLBACK;

-- not distributed: the primary key of that layout has another column
-- Rows whose token is of this moment are left for a later reap().
BEGIN;
INSERT INTO idempotency.key (scope, key, created_at, expires_at, token, finished_by, attempt, leased_at, leased_until)
SELECT 'portable reap', g, now(), '-infinity', CASE g % 2 WHEN 0 THEN idempotency_internal.random_token(NULL) END,
	CASE g % 2 WHEN 1 THEN idempotency_internal.random_token(NULL) END, 1, now(), '-infinity' FROM generate_series(1, 4) AS g;
UPDATE idempotency.key AS k SET token = k.token + (1::bigint << 40), finished_by = k.finished_by + (1::bigint << 40)
	WHERE k.scope = 'portable reap' AND k.key IN ('1', '2');
UPDATE idempotency.key AS k SET token = 1 WHERE k.scope = 'portable reap' AND k.key = '4';
SELECT idempotency.reap(NULL) IS NOT NULL AS reaped;
SELECT key FROM idempotency.key WHERE scope = 'portable reap' AND key <> '3' ORDER BY key;
ROLLBACK;
-- both layouts

--
-- The tests install it with default privileges for a role, which have no effect
--

SELECT p.oid::regprocedure AS functions FROM pg_proc AS p, aclexplode(p.proacl) AS a
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 'regress_portable_anybody'::regrole;
SELECT c.oid::regclass AS relations FROM pg_class AS c, aclexplode(c.relacl) AS a
	WHERE relnamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 'regress_portable_anybody'::regrole;

-- not distributed: it has no outbox
-- A setting that the server accepts, and a call refuses.
SET idempotency.outbox_retention = 'soon';
SELECT idempotency.reap();
RESET idempotency.outbox_retention;
-- both layouts

DELETE FROM idempotency.key WHERE scope LIKE 'portable%';
DROP TABLE guarded;
-- not distributed: it has no outbox
-- A tool that compares schemas, and drops what it does not know without CASCADE, drops no table.
SELECT c.relname, pg_temp.try(format('SET client_min_messages = error; DROP TABLE %s', c.oid::regclass)) AS dropped
	FROM pg_class AS c
	WHERE c.relkind = 'r' AND c.relnamespace = 'idempotency'::regnamespace AND c.relname <> 'token' ORDER BY c.relname;

-- both layouts

-- A restore without privileges lets PUBLIC execute every function; the first grant revokes that.
BEGIN;
SET LOCAL allow_system_table_mods = on;
UPDATE pg_proc SET proacl = NULL WHERE pronamespace::regnamespace::text LIKE 'idempotency%';
SELECT idempotency.grant_client('regress_idempotency_client');
SELECT count(*) AS public_functions FROM pg_proc AS p, aclexplode(coalesce(proacl, acldefault('f', proowner))) AS a
	WHERE pronamespace::regnamespace::text LIKE 'idempotency%' AND a.grantee = 0;
SET ROLE regress_idempotency_client;
SELECT statement, pg_temp.try(statement) FROM door WHERE statement ~ 'once|forget' ORDER BY n;
ROLLBACK;

SET client_min_messages = warning;
DROP OWNED BY regress_idempotency_nobody, regress_idempotency_client, regress_idempotency_operator, regress_idempotency_backup CASCADE;
RESET client_min_messages;
DROP ROLE regress_idempotency_nobody, regress_idempotency_client, regress_idempotency_operator, regress_idempotency_backup;
REVOKE CREATE ON SCHEMA public FROM PUBLIC;
