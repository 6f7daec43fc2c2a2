-- extension only: settings that the library defines
--
-- The settings idempotency.*: defaults, ranges, and the roles that can set them.
--
\set SHOW_CONTEXT never

LOAD 'idempotency';

-- Defaults, in readable units.
SHOW idempotency.retention;
SHOW idempotency.wait;
SHOW idempotency.max_response_size;
SHOW idempotency.scope_prefix;
SHOW idempotency.final_errors;
SHOW idempotency.documentation;
SHOW idempotency.outbox_retention;
SELECT name, unit, context, vartype, boot_val FROM pg_settings WHERE name LIKE 'idempotency.%' ORDER BY name COLLATE "C";
SELECT count(*) AS without_description FROM pg_settings WHERE name LIKE 'idempotency.%' AND short_desc = '';

-- Units are accepted.
SET idempotency.retention = '7d'; SHOW idempotency.retention;
SET idempotency.retention = '90min'; SHOW idempotency.retention;
SET idempotency.retention = 3600; SHOW idempotency.retention;
SET idempotency.retention = -1; SHOW idempotency.retention;
SET idempotency.wait = '2min'; SHOW idempotency.wait;
SET idempotency.wait = 250; SHOW idempotency.wait;
SET idempotency.wait = 0; SHOW idempotency.wait;
SET idempotency.max_response_size = '64kB'; SHOW idempotency.max_response_size;
SET idempotency.max_response_size = 1048577; SHOW idempotency.max_response_size;
SET idempotency.outbox_retention = '36h'; SHOW idempotency.outbox_retention;
SET idempotency.outbox_retention = 90; SHOW idempotency.outbox_retention;
SET idempotency.outbox_retention = 0; SHOW idempotency.outbox_retention;
SET idempotency.outbox_retention = -1; SHOW idempotency.outbox_retention;

-- So is every SQL interval.
SET idempotency.retention = '30 days'; SHOW idempotency.retention;
BEGIN;
SET LOCAL timezone = 'UTC';
CREATE FUNCTION pg_temp.retention_set(setting text) RETURNS interval LANGUAGE plpgsql AS $$
DECLARE
	retained interval;
BEGIN
	PERFORM set_config('idempotency.retention', setting, true), idempotency.once('intervals', setting);
	SELECT expires_at - created_at INTO retained FROM idempotency.key WHERE scope = 'intervals' AND key = setting;
	RETURN make_interval(secs => round(extract(epoch FROM retained)));
END
$$;
SELECT setting, pg_temp.retention_set(setting)
	FROM unnest('{30 days,7d,36 hours,90 minutes,1 day 12:00,P3D,PT45M,2.5 hours,1 week,@ 2 h,1h 30min,86400, 3600 ,1e2,1 s}'::text[]) AS setting;
SET LOCAL idempotency.retention = '1 month';
SELECT outcome FROM idempotency.claim('settings', 'month');
SELECT idempotency.complete('settings', 'month');
SELECT created_at + interval '1 month' - expires_at BETWEEN '-1 min' AND '1 min' AS calendar_month FROM idempotency.key WHERE scope = 'settings' AND key = 'month';
SET LOCAL idempotency.retention = '-1 second';
SELECT idempotency.once('intervals', 'for ever');
SELECT expires_at FROM idempotency.key WHERE scope = 'intervals' AND key = 'for ever';
ROLLBACK;
SET idempotency.wait = '2 minutes'; SHOW idempotency.wait;
SET idempotency.wait = '1 day'; SHOW idempotency.wait;
SET idempotency.outbox_retention = '2 weeks'; SHOW idempotency.outbox_retention;
SET idempotency.handler_timeout = '1.5 minutes'; SHOW idempotency.handler_timeout;

-- Out of range, or invalid.
\set VERBOSITY sqlstate
SET idempotency.retention = -2;
SET idempotency.retention = '-7d';
SET idempotency.retention = '70 years';
SET idempotency.retention = '-30 days';
SET idempotency.retention = '30 days ago';
SET idempotency.retention = '30 dayz';
SET idempotency.retention = '';
SET idempotency.retention = ' ';
SET idempotency.retention = '178000000 years';
SET idempotency.retention = '1 month -31 days';
SET idempotency.retention = '500 milliseconds';
SET idempotency.retention = '100000d';
SET idempotency.retention = 'for ever';
SET idempotency.wait = -1;
SET idempotency.wait = '25d';
SET idempotency.wait = '25 days';
SET idempotency.wait = '1 month';
SET idempotency.wait = '-1 second';
SET idempotency.wait = 'five seconds';
SET idempotency.max_response_size = 1023;
SET idempotency.max_response_size = '1GB';
SET idempotency.max_response_size = -1;
SET idempotency.max_response_size = '2 kib';
SET idempotency.outbox_retention = -2;
SET idempotency.outbox_retention = '70 years';
SET idempotency.handler_timeout = -1;
SET idempotency.handler_timeout = 'a minute';
SET idempotency.outbox_retention = 'for ever';
\set VERBOSITY default
SET idempotency.retention = 0;
SET idempotency.retention = '400ms';
SET idempotency.retention = 'for ever';
SET idempotency.wait = '25 days';
SET idempotency.wait = 'soon';
SET idempotency.max_response_size = '2 kib';
SET idempotency.outbox_retention = '-2 days';
-- The earlier value still applies.
SHOW idempotency.retention;
RESET ALL;

-- The limits are within the range.
SET idempotency.retention = 2147483647; SHOW idempotency.retention;
SET idempotency.retention = 1; SHOW idempotency.retention;
SET idempotency.wait = '24 days';
SET idempotency.max_response_size = 1024; SHOW idempotency.max_response_size;
RESET ALL;
BEGIN;
SET LOCAL idempotency.retention = 2147483647;
SELECT outcome FROM idempotency.claim('settings', 'longest');
SELECT idempotency.complete('settings', 'longest');
SELECT ceil(extract(epoch FROM expires_at - created_at))::bigint AS seconds FROM idempotency.key WHERE scope = 'settings';
ROLLBACK;

-- The prefix is reserved: a misspelt setting raises an error.
SET idempotency.retentoin = '7d';
\echo :SQLSTATE

--
-- Where to set a value
--

-- A function can set the retention of the operations that it claims.
CREATE FUNCTION keep(p_key text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim('settings', p_key);
	PERFORM idempotency.complete('settings', p_key);
END
$$;
SELECT keep('by default');
ALTER FUNCTION keep SET idempotency.retention = '7d';
SELECT keep('by function');
SET idempotency.retention = '2h';
SELECT keep('by function over session');
ALTER FUNCTION keep RESET idempotency.retention;
SELECT keep('by session');
ALTER FUNCTION keep SET idempotency.retention = -1;
SELECT keep('for ever');
RESET idempotency.retention;
SELECT key, ceil(extract(epoch FROM expires_at - created_at))::int AS seconds
	FROM idempotency.key WHERE scope = 'settings' AND isfinite(expires_at) ORDER BY key;
SELECT key, expires_at FROM idempotency.key WHERE scope = 'settings' AND NOT isfinite(expires_at);
-- Invalid values are refused there too.
ALTER FUNCTION keep SET idempotency.retention = 0;
\echo :SQLSTATE
SELECT proconfig FROM pg_proc WHERE proname = 'keep';
ALTER FUNCTION keep RESET idempotency.retention;

-- A claim keeps the retention of the function that made it, even if it is completed
-- outside.
CREATE FUNCTION claim_only(p_key text) RETURNS text LANGUAGE sql SET idempotency.retention = '3h' AS
	$$ SELECT outcome FROM idempotency.claim('settings', p_key) $$;
BEGIN;
SELECT claim_only('claimed inside');
SELECT idempotency.complete('settings', 'claimed inside');
COMMIT;
SELECT ceil(extract(epoch FROM expires_at - created_at))::int AS seconds
	FROM idempotency.key WHERE scope = 'settings' AND key = 'claimed inside';

-- A role and a database can have settings; their sessions start with them.
SELECT current_database() AS database, current_user AS superuser \gset
ALTER ROLE :"superuser" IN DATABASE :"database" SET idempotency.retention = '5h';
ALTER DATABASE :"database" SET idempotency.wait = '7s';
ALTER DATABASE :"database" SET idempotency.retention = '6h';
ALTER DATABASE :"database" SET idempotency.outbox_retention = '3d';
\c -
\set SHOW_CONTEXT never
SELECT keep('by role');
SHOW idempotency.retention;
SHOW idempotency.wait;
SHOW idempotency.outbox_retention;
SELECT ceil(extract(epoch FROM expires_at - created_at))::int AS seconds FROM idempotency.key WHERE scope = 'settings' AND key = 'by role';
ALTER ROLE :"superuser" IN DATABASE :"database" RESET idempotency.retention;
ALTER DATABASE :"database" RESET idempotency.wait;
ALTER DATABASE :"database" RESET idempotency.retention;
ALTER DATABASE :"database" RESET idempotency.outbox_retention;
\set VERBOSITY sqlstate
ALTER DATABASE :"database" SET idempotency.wait = -1;
ALTER ROLE :"superuser" SET idempotency.scope_prefix = 'no end';
\set VERBOSITY default

--
-- The scope prefix
--

-- A prefix must end in a separator, so that "tenant1" cannot access the scopes of
-- "tenant10".
SET idempotency.scope_prefix = 'tenant1';
\echo :SQLSTATE
SET idempotency.scope_prefix = 'tenant1/ ';
SET idempotency.scope_prefix = 'tenant1/'; SHOW idempotency.scope_prefix;
SET idempotency.scope_prefix = 'tenant1:'; SHOW idempotency.scope_prefix;
SET idempotency.scope_prefix = ''; SHOW idempotency.scope_prefix;

-- Every scope must begin with the prefix, whatever the function.
CREATE FUNCTION pg_temp.sqlstate_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION
	WHEN SQLSTATE 'P9999' THEN
		RETURN 'accepted';
	WHEN OTHERS THEN
		RETURN SQLSTATE;
END
$$;
CREATE FUNCTION handler(request json) RETURNS json LANGUAGE sql AS 'SELECT request';
CREATE TEMPORARY TABLE door (n int, call text);
INSERT INTO door VALUES
	(1, 'claim(%L, ''k'')'),
	(2, 'try_claim(%L, ''k'')'),
	(3, 'complete(%L, ''k'')'),
	(4, 'fail(%L, ''k'', NULL, 400)'),
	(5, 'release(%L, ''k'')'),
	(6, 'run(%L, ''k'', NULL, ''handler(json)'')'),
	(7, 'peek(%L, ''k'')'),
	(8, 'forget(%L, ''k'')'),
	(9, 'once(%L, ''k'')'),
	(10, 'once_many(%L, ARRAY[''k''])'),
	(11, 'once_many(%L, ''{}''::text[])'),
	(12, 'current_key(%L)'),
	(13, 'claim(%L, ''k'', lease => ''1 min'')'),
	(14, 'try_claim(%L, ''k'', lease => ''1 min'')'),
	(15, 'complete(%L, ''k'', token => 1)'),
	(16, 'renew(%L, ''k'', 1, ''1 min'')'),
	(17, 'checkpoint(%L, ''k'', 1, ''charged'')'),
	(18, 'claim_abandoned(%L, ''1 min'')'),
	(19, 'setting(''wait'', %L)'),
	(20, 'holders(%L, ''k'')');
-- The list has every function that takes a scope, except the pure ones.
SELECT oid::regprocedure AS not_tested FROM pg_proc
	WHERE pronamespace = 'idempotency'::regnamespace AND 'scope' = ANY (proargnames) AND provolatile <> 'i'
		AND proname <> 'configure' -- the owner's, for all scopes
		AND NOT EXISTS (SELECT FROM door WHERE call LIKE proname || '(%');
BEGIN;
SET LOCAL idempotency.scope_prefix = 'tenant1/';
SELECT split_part(call, '(', 1) AS function,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'tenant1/charge')) AS inside,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'tenant1/')) AS prefix_itself,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'tenant2/charge')) AS outside,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'tenant1')) AS cut,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'tenant10/charge')) AS longer,
		pg_temp.sqlstate_of('SELECT idempotency.' || format(call, 'TENANT1/charge')) AS other_case
	FROM door ORDER BY n;
ROLLBACK;
BEGIN;
SET LOCAL idempotency.scope_prefix = 'tenant1/';
SELECT idempotency.claim('tenant2/charge', 'k');
\echo :SQLSTATE
ROLLBACK;

-- Only a superuser can set the prefix; the bound role cannot, by any means.
CREATE ROLE regress_idempotency_tenant;
SELECT idempotency.grant_client('regress_idempotency_tenant');
SET idempotency.scope_prefix = 'tenant1/';
SET ROLE regress_idempotency_tenant;
SELECT pg_temp.sqlstate_of('SELECT idempotency.peek(''tenant2/charge'', ''k'')');
SET idempotency.scope_prefix = 'tenant2/';
\echo :SQLSTATE
RESET idempotency.scope_prefix;
SELECT set_config('idempotency.scope_prefix', '', false);
ALTER ROLE regress_idempotency_tenant SET idempotency.scope_prefix = '';
\echo :SQLSTATE
CREATE FUNCTION pg_temp.escape() RETURNS text LANGUAGE sql SET idempotency.scope_prefix = '' AS
	$$ SELECT (idempotency.peek('tenant2/charge', 'k')).outcome $$;
\echo :SQLSTATE
SHOW idempotency.scope_prefix;
-- A caller of reap() cannot set the retention of events.
SET idempotency.outbox_retention = 0;
\echo :SQLSTATE
-- The role can set the other settings for itself,
SET idempotency.retention = '1h';
SET idempotency.wait = '1s';
SET idempotency.final_errors = 'P0001';
SET idempotency.max_response_size = '2kB';
-- and for its functions.
CREATE FUNCTION pg_temp.short() RETURNS text LANGUAGE sql SET idempotency.retention = '1min' AS
	$$ SELECT current_setting('idempotency.retention') $$;
SELECT pg_temp.short();
RESET ROLE;
RESET ALL;

-- The prefix applies to the login, so SET ROLE and SECURITY DEFINER do not avoid it. A
-- session that has not loaded the library yet cannot set it in advance either.
CREATE FUNCTION peek_definer(scope text) RETURNS text LANGUAGE sql SECURITY DEFINER AS
	$$ SELECT (idempotency.peek(scope, 'k')).outcome $$;
ALTER DATABASE :"database" SET idempotency.scope_prefix = 'tenant1/';
\c -
\set SHOW_CONTEXT never
SET ROLE regress_idempotency_tenant;
-- If the library is loaded, SET fails; if not, the server warns later and drops the value.
SET client_min_messages = error;
DO $$BEGIN SET idempotency.scope_prefix = 'tenant2/'; EXCEPTION WHEN insufficient_privilege THEN END$$;
SELECT idempotency.peek('tenant2/charge', 'k');
SELECT peek_definer('tenant2/charge');
SELECT idempotency.peek('tenant1/charge', 'k') IS NULL AS absent;
SHOW idempotency.scope_prefix;
RESET ALL;
SHOW idempotency.scope_prefix;
DISCARD ALL;
SHOW idempotency.scope_prefix;
RESET ROLE;
ALTER DATABASE :"database" RESET idempotency.scope_prefix;

-- What configure() stores precedes the value of the database, and that of a role precedes both.
ALTER DATABASE :"database" SET idempotency.retention = '3h';
ALTER DATABASE :"database" SET idempotency.max_response_size = '3kB';
\c -
\set SHOW_CONTEXT never
SELECT idempotency.setting('retention');
SELECT idempotency.configure('retention', '4h'), idempotency.configure('retention', '5h', 'a*');
SELECT idempotency.setting('retention'), idempotency.setting('retention', 'a'), idempotency.setting('max_response_size');
ALTER ROLE CURRENT_USER IN DATABASE :"database" SET idempotency.retention = '6h';
\c -
\set SHOW_CONTEXT never
SELECT idempotency.setting('retention'), idempotency.setting('retention', 'a');
SHOW idempotency.retention;
ALTER ROLE CURRENT_USER IN DATABASE :"database" RESET idempotency.retention;
ALTER DATABASE :"database" RESET idempotency.max_response_size;
ALTER DATABASE :"database" RESET idempotency.retention;
TRUNCATE idempotency.configuration;
\c -
\set SHOW_CONTEXT never

DROP OWNED BY regress_idempotency_tenant;
DROP ROLE regress_idempotency_tenant;
DROP FUNCTION keep, claim_only, handler, peek_definer;
