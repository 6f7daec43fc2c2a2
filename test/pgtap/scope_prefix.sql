-- The public contract: a role with idempotency.scope_prefix names no scope of
-- others, whatever it does to its own session.  Roles have to log in for that,
-- so that this file is no transaction, and its results are kept in psql's
-- variables until the end.

\set ON_ERROR_STOP off
\set VERBOSITY sqlstate
SELECT current_user AS superuser \gset

CREATE ROLE idempotency_tenant1 LOGIN;
SELECT idempotency.grant_client('idempotency_tenant1') \g /dev/null
ALTER ROLE idempotency_tenant1 SET idempotency.scope_prefix = 'tenant1/';

-- As it comes.
\connect - idempotency_tenant1
SELECT idempotency.once('tenant1/mailer', 'm-1') AS own \gset
SELECT idempotency.once('tenant10/mailer', 'm-1') \g /dev/null
\set other :SQLSTATE
SELECT idempotency.peek('mailer', 'm-1') \g /dev/null
\set peek :SQLSTATE
SELECT idempotency.current_key('mailer') \g /dev/null
\set current_key :SQLSTATE
SET idempotency.scope_prefix = '';
\set after_load :SQLSTATE
RESET idempotency.scope_prefix;
SELECT idempotency.peek('mailer', 'm-1') \g /dev/null
\set after_reset :SQLSTATE
SET SESSION AUTHORIZATION DEFAULT;
SELECT idempotency.peek('mailer', 'm-1') \g /dev/null
\set after_authorization :SQLSTATE

-- With the setting changed before the library is loaded.
\connect - idempotency_tenant1
SET idempotency.scope_prefix = '';
SELECT idempotency.peek('mailer', 'm-1') \g /dev/null
\set before_load :SQLSTATE

-- With the setting changed by the connection's own options, in a psql of its own:
-- the server may refuse the connection as well as the call.
\connect - :superuser
\setenv PGHOST :HOST
\setenv PGPORT :PORT
\setenv PGDATABASE :DBNAME
\setenv PGUSER idempotency_tenant1
\setenv PGOPTIONS '-c idempotency.scope_prefix='
\set by_options `psql -X -A -t -c "SELECT 'it looked' FROM idempotency.peek('mailer', 'm-1')" 2>&1`
\setenv PGOPTIONS '-c idempotency.scope_prefix=tenant2/'
\set by_other_options `psql -X -A -t -c "SELECT 'it looked' FROM idempotency.peek('tenant2/mailer', 'm-1')" 2>&1`
\setenv PGOPTIONS
\set without_options `psql -X -A -t -c "SELECT 'it looked' FROM idempotency.peek('tenant1/mailer', 'm-2')" 2>&1`

\set ON_ERROR_STOP on
DROP OWNED BY idempotency_tenant1;
DROP ROLE idempotency_tenant1;

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, false)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

SELECT plan(13);
SELECT is(:'own'::text, 't', 'a scope with the prefix is open');
SELECT is(:'other'::text, '42501', 'a scope of another tenant is not');
SELECT is(:'peek'::text, '42501', 'nor to look at');
SELECT is(:'current_key'::text, '42501', 'nor to ask for a key');
SELECT is(:'after_load'::text, '42501', 'the role cannot change the setting');
SELECT is(:'after_reset'::text, '42501', 'nor reset it to nothing');
SELECT is(:'after_authorization'::text, '42501', 'nor lose it with its own authorization');
SELECT is(:'before_load'::text, '42501', 'nor change it before the library is loaded');
SELECT is(:'without_options'::text, 'it looked', 'a psql of its own looks at what is its own');
SELECT matches(:'by_options'::text, '(ERROR|FATAL): +permission denied', 'an option of its connection is refused');
SELECT doesnt_match(:'by_options'::text, 'it looked', 'and opens no scope');
SELECT matches(:'by_other_options'::text, '(ERROR|FATAL): +permission denied', 'as is one that names another tenant');
SELECT doesnt_match(:'by_other_options'::text, 'it looked', 'which opens no scope either');
SELECT * FROM finish();
