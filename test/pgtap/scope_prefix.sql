-- The public contract: a role with idempotency.scope_prefix can access no scope of
-- another tenant, whatever it does in its own session. Roles must log in for that, so
-- this file does not run in a transaction, and psql variables keep its results until
-- the end.

\set ON_ERROR_STOP off
\set VERBOSITY sqlstate
SELECT current_user AS superuser \gset

CREATE ROLE idempotency_tenant1 LOGIN;
SELECT idempotency.grant_client('idempotency_tenant1') \g /dev/null
ALTER ROLE idempotency_tenant1 SET idempotency.scope_prefix = 'tenant1/';

-- With the default session.
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

-- With the setting changed by connection options, in a separate psql: the server can
-- refuse the connection or the call.
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
SELECT is(:'own'::text, 't', 'a scope with the prefix can be used');
SELECT is(:'other'::text, '42501', 'a scope of another tenant cannot be used');
SELECT is(:'peek'::text, '42501', 'nor peeked at');
SELECT is(:'current_key'::text, '42501', 'nor passed to current_key()');
SELECT is(:'after_load'::text, '42501', 'the role cannot change the setting');
SELECT is(:'after_reset'::text, '42501', 'nor reset it');
SELECT is(:'after_authorization'::text, '42501', 'nor avoid it by SET SESSION AUTHORIZATION');
SELECT is(:'before_load'::text, '42501', 'nor change it before the library is loaded');
SELECT is(:'without_options'::text, 'it looked', 'a separate psql can use its own scope');
SELECT matches(:'by_options'::text, '(ERROR|FATAL): +permission denied', 'an option of its connection is refused');
SELECT doesnt_match(:'by_options'::text, '(?n)^it looked$', 'and gives access to no scope');
SELECT matches(:'by_other_options'::text, '(ERROR|FATAL): +permission denied', 'an option with the prefix of another tenant is refused');
SELECT doesnt_match(:'by_other_options'::text, '(?n)^it looked$', 'and gives access to no scope either');
SELECT * FROM finish();
