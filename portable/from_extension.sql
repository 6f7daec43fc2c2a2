/* portable/from_extension.sql: replaces the extension by the portable edition, with all keys, events and subscriptions */

-- A superuser runs this file, and names the role that will own the portable edition:
--
--	psql --no-psqlrc --set=owner=idempotency_owner --file=portable/from_extension.sql
--
-- As to_extension.sql, it is one transaction, tokens of running leases and numbers of batches stay
-- valid, subscriptions continue where they were, and roles keep their privileges.  Handlers are
-- dropped before and created again.  There are no workers then: call deliver() for them.

\set from_extension_on_error_stop :ON_ERROR_STOP
\set ON_ERROR_STOP on
\set within_transaction on
-- A snapshot from before the locks would miss keys
BEGIN ISOLATION LEVEL READ COMMITTED;

\ir moved.sql
CREATE TEMPORARY TABLE moved_token ON COMMIT DROP AS SELECT pg_sequence_last_value('idempotency.token') AS last;
GRANT SELECT ON moved_token TO PUBLIC;
DROP EXTENSION idempotency;
SELECT format('GRANT CREATE ON DATABASE %I TO %I', current_database(), :'owner') \gexec
SET LOCAL ROLE :"owner";
\ir idempotency.sql
RESET ROLE;
\ir moved_in.sql
SET LOCAL ROLE :"owner";
-- Tokens that are ahead of the clock: those of the portable edition begin behind them
SELECT setval('idempotency_internal.token_offset', (t.last >> 17) + 2 - n.now) AS token_offset
FROM pg_temp.moved_token AS t, idempotency_internal.token_time() AS n (now)
WHERE (t.last >> 17) + 2 > n.now;
SELECT CASE g.kind WHEN 'client' THEN idempotency.grant_client(g.role) WHEN 'consumer' THEN idempotency.grant_consumer(g.role)
	WHEN 'operator' THEN idempotency.grant_operator(g.role) ELSE idempotency.grant_backup(g.role) END
FROM pg_temp.moved_grant AS g;

COMMIT;
\unset within_transaction
\set ON_ERROR_STOP :from_extension_on_error_stop
\unset from_extension_on_error_stop
