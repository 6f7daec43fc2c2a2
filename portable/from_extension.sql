/* portable/from_extension.sql: replaces the extension by the portable edition, with all keys */

-- A superuser runs this file, and names the role that will own the portable edition:
--
--	psql --no-psqlrc --set=owner=idempotency_owner --file=portable/from_extension.sql
--
-- As to_extension.sql, it is one transaction, tokens of running leases stay valid, and roles
-- keep their privileges.  Events and subscriptions are dropped: deliver all events before.

\set from_extension_on_error_stop :ON_ERROR_STOP
\set ON_ERROR_STOP on
\set within_transaction on
-- A snapshot from before the locks would miss keys
BEGIN ISOLATION LEVEL READ COMMITTED;

\ir moved.sql
DROP EXTENSION idempotency;
SELECT format('GRANT CREATE ON DATABASE %I TO %I', current_database(), :'owner') \gexec
SET LOCAL ROLE :"owner";
\ir idempotency.sql
RESET ROLE;
INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response, headers, token, attempt,
	leased_at, leased_until, recovery_point, recovery_state, request, retention, finished_by)
SELECT * FROM pg_temp.moved_key;
SET LOCAL ROLE :"owner";
SELECT CASE g.kind WHEN 'client' THEN idempotency.grant_client(g.role) WHEN 'operator' THEN idempotency.grant_operator(g.role)
	ELSE idempotency.grant_backup(g.role) END
FROM pg_temp.moved_grant AS g;

COMMIT;
\unset within_transaction
\set ON_ERROR_STOP :from_extension_on_error_stop
\unset from_extension_on_error_stop
