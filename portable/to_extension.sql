/* portable/to_extension.sql: replaces the portable edition by the extension, with all keys */

-- A superuser runs this file in a database whose server has the files of the extension:
--
--	psql --no-psqlrc --file=portable/to_extension.sql
--
-- It is one transaction.  Calls wait for it; those that had begun can fail with an error of
-- the server, because their functions are dropped, and succeed when they are retried in a
-- new session.  Tokens of running leases stay valid, and later tokens are greater than all
-- before, also for keys that were deleted: the sequence continues from the clock, as the
-- tokens of the portable edition do.  Clients, operators and backups keep their privileges.  As
-- uninstall.sql, it fails if other objects depend on the portable edition.

\set to_extension_on_error_stop :ON_ERROR_STOP
\set ON_ERROR_STOP on
\set within_transaction on
-- A snapshot from before the locks would miss keys
BEGIN ISOLATION LEVEL READ COMMITTED;

\ir moved.sql
-- Events cannot be moved.  As in moved.sql, the owner's rights read its tables.
LOCK TABLE idempotency.outbox, idempotency.subscription IN ACCESS EXCLUSIVE MODE;
CREATE MATERIALIZED VIEW idempotency_internal.moved_events AS
	SELECT count(*) AS number FROM (SELECT FROM idempotency.outbox UNION ALL SELECT FROM idempotency.subscription) AS e
	WITH NO DATA;
SELECT format('ALTER MATERIALIZED VIEW idempotency_internal.moved_events OWNER TO %s', c.relowner::regrole)
FROM pg_class AS c WHERE c.oid = 'idempotency.key'::regclass \gexec
REFRESH MATERIALIZED VIEW idempotency_internal.moved_events;
DO $$
BEGIN
	IF (SELECT m.number FROM idempotency_internal.moved_events AS m) > 0 THEN
		RAISE EXCEPTION USING
			ERRCODE = 'object_in_use',
			MESSAGE = 'events and subscriptions cannot be moved to the extension',
			HINT = 'Deliver all events, reap them, and unsubscribe.';
	END IF;
END
$$;
DROP MATERIALIZED VIEW idempotency_internal.moved_events;
\ir uninstall.sql
CREATE EXTENSION idempotency;
INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response, headers, token, attempt,
	leased_at, leased_until, recovery_point, recovery_state, request, retention, finished_by)
SELECT * FROM pg_temp.moved_key;
SELECT setval('idempotency.token', greatest(max(m.token), max(m.finished_by),
	(extract(epoch FROM clock_timestamp()) * 1000000)::bigint)) AS last_token
FROM pg_temp.moved_key AS m;
SELECT CASE g.kind WHEN 'client' THEN idempotency.grant_client(g.role) WHEN 'operator' THEN idempotency.grant_operator(g.role)
	ELSE idempotency.grant_backup(g.role) END
FROM pg_temp.moved_grant AS g;

COMMIT;
\unset within_transaction
\set ON_ERROR_STOP :to_extension_on_error_stop
\unset to_extension_on_error_stop
