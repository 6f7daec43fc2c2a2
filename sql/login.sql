--
-- idempotency.scope_prefix binds a login, whatever the client asks for when it
-- connects.  This test logs in as a role of its own, so the server must let it do
-- so without a password, as the server of `make test` does.
--
\set SHOW_CONTEXT never

CREATE ROLE regress_idempotency_login LOGIN;
SELECT idempotency.grant_client('regress_idempotency_login');
ALTER ROLE regress_idempotency_login SET idempotency.scope_prefix = 'tenant1/';
ALTER ROLE regress_idempotency_login SET idempotency.retention = '2h';
SELECT current_user AS superuser \gset

-- A session of that role has its settings, from the first call on.
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

-- It cannot change them for good, before the library is loaded or after.
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

-- Nor does it get around them by asking for another prefix, or for none, when it
-- connects.
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

-- Of several, the one for the role in this database counts; it may also lift the
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
-- Without one for the role in this database, the one for the role comes before the
-- one for the database.
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
