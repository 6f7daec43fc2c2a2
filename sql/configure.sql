--
-- configure(): settings of the database and of scopes, and what precedes them.
--
\set SHOW_CONTEXT never

-- How many hours a key is retained
CREATE FUNCTION pg_temp.retained(scope text, key text, retention interval DEFAULT NULL) RETURNS numeric LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim(scope, key, retention => retention);
	PERFORM idempotency.complete(scope, key);
	RETURN (SELECT round(extract(epoch FROM k.expires_at - clock_timestamp()) / 3600) FROM idempotency.keys AS k WHERE k.scope = $1 AND k.key = $2);
END $$;
CREATE FUNCTION pg_temp.retained_once(scope text, key text) RETURNS numeric LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.once(scope, key);
	RETURN (SELECT round(extract(epoch FROM k.expires_at - clock_timestamp()) / 3600) FROM idempotency.keys AS k WHERE k.scope = $1 AND k.key = $2);
END $$;

SELECT pg_temp.retained('refund/eu', 'default'), pg_temp.retained_once('refund/eu', 'default once');

-- The database, in a session that has used the setting before
SELECT idempotency.configure('retention', '48 h');
SELECT pg_temp.retained('refund/eu', 'database'), pg_temp.retained_once('refund/eu', 'database once');

-- A pattern of scopes; the one with the most characters applies
SELECT idempotency.configure('idempotency.retention', '30 h', scope => 'refund/*');
SELECT idempotency.configure('retention', '40 h', 'refund/*u');
SELECT idempotency.configure('retention', '50 h', E'odd\\*%_\\\\''*');
SELECT * FROM idempotency.settings;
SELECT s.scope, pg_temp.retained(s.scope, 'scope'), pg_temp.retained_once(s.scope, 'scope once'), idempotency.setting('retention', s.scope)
FROM (VALUES ('refund/us'), ('refund/eu'), ('refund'), (E'odd*%_\\''x'), (E'odd-%_\\''x')) AS s (scope);
SELECT idempotency.setting('idempotency.retention');

-- Argument, then session, then scope
SELECT pg_temp.retained('refund/eu', 'argument', '3 h');
SET idempotency.retention = '5 h';
SELECT pg_temp.retained('refund/eu', 'session'), pg_temp.retained_once('refund/eu', 'session once'), idempotency.setting('retention', 'refund/eu');
RESET idempotency.retention;
CREATE FUNCTION pg_temp.seven() RETURNS numeric LANGUAGE sql SET idempotency.retention = '7 h' AS $$SELECT pg_temp.retained('refund/eu', 'function')$$;
SELECT pg_temp.seven(), pg_temp.retained('refund/eu', 'behind a function');

-- A replaced value, one that is rolled back, and one that is removed
BEGIN;
SELECT idempotency.configure('retention', '60 h', 'refund/*u');
SELECT pg_temp.retained('refund/eu', 'replaced');
SAVEPOINT s;
SELECT idempotency.configure('retention', NULL, 'refund/*u');
SELECT pg_temp.retained('refund/eu', 'removed');
ROLLBACK TO s;
SELECT pg_temp.retained('refund/eu', 'not removed');
ROLLBACK;
SELECT pg_temp.retained('refund/eu', 'rolled back');
SELECT idempotency.configure('retention', NULL, 'refund/*u'), idempotency.configure('retention', NULL, 'no such');
SELECT pg_temp.retained('refund/eu', 'less specific');

-- Forever, a calendar month, and leases
SELECT idempotency.configure('retention', '-1', 'forever'), idempotency.configure('retention', '1 month', 'month');
SELECT pg_temp.retained('forever', 'k') IS NULL AS forever, pg_temp.retained('month', 'k') >= 28 * 24 AS month;
BEGIN;
SELECT token > 0 AS leased FROM idempotency.claim('forever', 'lease', lease => '1 min');
SELECT expires_at FROM idempotency.keys WHERE scope = 'forever' AND key = 'lease';
ROLLBACK;

-- Under any search path and format of intervals
CREATE SCHEMA shadow;
CREATE FUNCTION shadow.like(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE OPERATOR shadow.~~ (LEFTARG = text, RIGHTARG = text, FUNCTION = shadow.like);
SET search_path = shadow, pg_catalog;
SET intervalstyle = 'sql_standard';
SELECT idempotency.configure('retention', '1 day -2 hours', 'mixed');
RESET intervalstyle;
SELECT pg_temp.retained('mixed', 'k'), pg_temp.retained('other', 'k');
RESET search_path;
DROP SCHEMA shadow CASCADE;

-- The other settings
SELECT idempotency.configure('wait', '20ms'), idempotency.configure('wait', '1 s', 'slow');
SELECT idempotency.setting('wait'), idempotency.setting('wait', 'slow');
SELECT idempotency.configure('max_response_size', '2kB', 'small'), idempotency.configure('max_payload_size', '2kB'),
	idempotency.configure('documentation', '/docs'), idempotency.configure('final_errors', 'PY402'), idempotency.configure('outbox_retention', '0');
BEGIN;
SELECT outcome FROM idempotency.claim('large', 'k');
SELECT length(idempotency.complete('large', 'k', to_json(repeat('x', 3000)))::text);
SELECT outcome FROM idempotency.claim('small', 'k');
SELECT idempotency.complete('small', 'k', to_json(repeat('x', 3000)));
ROLLBACK;
-- not distributed: it has no outbox
SELECT idempotency.publish('t', to_json(repeat('x', 3000)));
-- both layouts
SELECT idempotency.problem('IK409') ->> 'type';
CREATE FUNCTION pay(request json) RETURNS json LANGUAGE plpgsql AS $$BEGIN RAISE 'declined' USING ERRCODE = 'PY402'; END$$;
SELECT failed, response ->> 'title' FROM idempotency.run('run', 'k', NULL, 'pay(json)');
-- not distributed: it has no outbox
SELECT idempotency.publish('t', '1') IS NOT NULL AS published;
SELECT idempotency.reap() > 0 AS reaped;
SELECT count(*) FROM idempotency.outbox;
-- both layouts
SELECT name, scope, value FROM idempotency.settings WHERE name <> 'retention';

-- What cannot be stored
SELECT idempotency.configure('retention', 'thirty days');
SELECT idempotency.configure('retention', '');
SELECT idempotency.configure('retention', '1 day', NULL);
SELECT idempotency.configure('retention', '1 day', E'a\\');
SELECT idempotency.configure('retention', '1 day', E'a\n');
SELECT idempotency.configure('retension', '1 day');
SELECT idempotency.configure('scope_prefix', 't/');
SELECT idempotency.configure(NULL, '1 day');
SELECT idempotency.configure('documentation', '/docs', 'a');
\set VERBOSITY terse
SELECT idempotency.configure('final_errors', '40001');
SELECT idempotency.configure('retention', '0');
SELECT idempotency.configure('retention', '-2', 'a');
SELECT idempotency.configure('wait', '25 days');
SELECT idempotency.configure('wait', '-1');
SELECT idempotency.configure('max_response_size', '1kb and a half', 'a');
SELECT idempotency.configure('max_response_size', '1000');
SELECT idempotency.configure('max_payload_size', '1GB');
SELECT idempotency.configure('outbox_retention', '-2');
SELECT idempotency.configure('documentation', '<>');
INSERT INTO idempotency.configuration VALUES ('retention', 'direct', 'never');
UPDATE idempotency.configuration SET value = '0' WHERE name = 'retention';
BEGIN READ ONLY;
SELECT idempotency.configure('retention', '1 day');
ROLLBACK;
SELECT idempotency.setting('retension');
SELECT idempotency.setting('retention', '');

-- Changes without configure() apply, too
INSERT INTO idempotency.configuration VALUES ('retention', 'direct', '9 h');
SELECT pg_temp.retained('direct', 'k');
TRUNCATE idempotency.configuration;
SELECT pg_temp.retained('direct', 'k2'), pg_temp.retained('refund/eu', 'truncated');

-- Only the owner configures; clients read what applies, and operators what is stored
CREATE ROLE regress_idempotency_client;
SELECT idempotency.grant_client('regress_idempotency_client');
CREATE ROLE regress_idempotency_operator;
SELECT idempotency.grant_operator('regress_idempotency_operator');
SET ROLE regress_idempotency_client;
SELECT idempotency.setting('wait', 'any');
SELECT idempotency.configure('retention', '1 day');
SELECT * FROM idempotency.settings;
SET ROLE regress_idempotency_operator;
SELECT * FROM idempotency.settings;
SELECT idempotency.configure('retention', '1 day');
RESET ROLE;
DROP OWNED BY regress_idempotency_client, regress_idempotency_operator;
DROP ROLE regress_idempotency_client, regress_idempotency_operator;

DROP FUNCTION pay(json);
DELETE FROM idempotency.key WHERE scope NOT IN (SELECT '');

-- A fixed snapshot would undo what others have stored since; also for changes of the table itself
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idempotency.configure('retention', '2 h');
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
TRUNCATE idempotency.configuration;
ROLLBACK;
