-- extension only: settings that the library defines
--
-- idempotency.scope_prefix applies to a login, whatever options the client passes at
-- connection. This test logs in as its own role, so the server must allow that without
-- a password, as the server of `make test` does.
--
\set SHOW_CONTEXT never

CREATE ROLE regress_idempotency_login LOGIN;
SELECT idempotency.grant_client('regress_idempotency_login');
ALTER ROLE regress_idempotency_login SET idempotency.scope_prefix = 'tenant1/';
ALTER ROLE regress_idempotency_login SET idempotency.retention = '2h';
SELECT current_user AS superuser, current_setting('shared_preload_libraries') LIKE '%idempotency%' AS preloaded \gset

-- A session of that role has the role's settings from the first call on.
\c - regress_idempotency_login
\set SHOW_CONTEXT never
BEGIN;
SELECT outcome FROM idempotency.claim('tenant1/charge', 'k');
SELECT idempotency.complete('tenant1/charge', 'k');
SELECT extract(epoch FROM expires_at - now())::int BETWEEN 3600 AND 10800 AS two_hours FROM idempotency.peek('tenant1/charge', 'k');
ROLLBACK;
SELECT outcome FROM idempotency.try_claim('tenant2/charge', 'k');
\echo :SQLSTATE
SHOW idempotency.scope_prefix;

-- It cannot change them permanently, neither before nor after the library is loaded.
ALTER ROLE regress_idempotency_login SET idempotency.scope_prefix = '';
ALTER ROLE regress_idempotency_login RESET idempotency.scope_prefix;
ALTER ROLE regress_idempotency_login RESET ALL;
\c - regress_idempotency_login
\set SHOW_CONTEXT never
ALTER ROLE regress_idempotency_login SET idempotency.scope_prefix = '';
ALTER ROLE regress_idempotency_login RESET idempotency.scope_prefix;
ALTER ROLE regress_idempotency_login RESET ALL;
SELECT outcome FROM idempotency.try_claim('tenant2/charge', 'k');
\echo :SQLSTATE

-- It cannot replace or remove the prefix by connection options.  Where the library is
-- preloaded, such a connection fails (test/pgtap/scope_prefix.sql), and this test ends.
\if :preloaded
	\c - :superuser
	DROP OWNED BY regress_idempotency_login;
	DROP ROLE regress_idempotency_login;
	\quit
\endif
\c -reuse-previous=on "user=regress_idempotency_login options='-c idempotency.scope_prefix=tenant2/'"
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT idempotency.peek('tenant2/charge', 'k') IS NULL AS absent;
\c -reuse-previous=on "user=regress_idempotency_login options='-c idempotency.scope_prefix='"
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT idempotency.peek('tenant2/charge', 'k') IS NULL AS absent;

-- The setting for the role in this database has precedence; it can also remove the
-- others.
\c - :superuser
SELECT current_database() AS database \gset
ALTER DATABASE :"database" SET idempotency.scope_prefix = 'tenant0/';
ALTER ROLE regress_idempotency_login IN DATABASE :"database" SET idempotency.scope_prefix = 'tenant3/';
\c -reuse-previous=on "user=regress_idempotency_login options='-c idempotency.scope_prefix=tenant2/'"
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT idempotency.peek('tenant3/charge', 'k') IS NULL AS absent;
SELECT idempotency.peek('tenant0/charge', 'k') IS NULL AS absent;
SELECT idempotency.peek('tenant1/charge', 'k') IS NULL AS absent;
SELECT idempotency.peek('tenant2/charge', 'k') IS NULL AS absent;
SHOW idempotency.scope_prefix;
\c - :superuser
ALTER ROLE regress_idempotency_login IN DATABASE :"database" SET idempotency.scope_prefix = '';
\c -reuse-previous=on "user=regress_idempotency_login options=''"
SELECT idempotency.peek('tenant2/charge', 'k') IS NULL AS absent;
SHOW idempotency.scope_prefix;
-- Without that one, the setting for the role has precedence over the one for the
-- database.
\c - :superuser
ALTER ROLE regress_idempotency_login IN DATABASE :"database" RESET idempotency.scope_prefix;
\c -reuse-previous=on "user=regress_idempotency_login options='-c idempotency.scope_prefix=tenant0/'"
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT idempotency.peek('tenant1/charge', 'k') IS NULL AS absent;
SELECT idempotency.peek('tenant0/charge', 'k') IS NULL AS absent;
\c - :superuser
ALTER ROLE regress_idempotency_login RESET idempotency.scope_prefix;
\c -reuse-previous=on "user=regress_idempotency_login options='-c idempotency.scope_prefix=tenant1/'"
\set SHOW_CONTEXT never
\set VERBOSITY sqlstate
SET client_min_messages = error;
SELECT idempotency.peek('tenant0/charge', 'k') IS NULL AS absent;
SELECT idempotency.peek('tenant1/charge', 'k') IS NULL AS absent;

\c - :superuser
ALTER DATABASE :"database" RESET idempotency.scope_prefix;
DROP OWNED BY regress_idempotency_login;
DROP ROLE regress_idempotency_login;
