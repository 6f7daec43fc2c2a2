/* portable/to_extension.sql: replaces the portable edition by the extension, with all keys, events and subscriptions */

-- A superuser runs this file in a database whose server has the files of the extension:
--
--	psql --no-psqlrc --file=portable/to_extension.sql
--
-- It is one transaction.  Calls wait for it; those that had begun can fail with an error of
-- the server, because their functions are dropped, and succeed when they are retried in a
-- new session.  Tokens of running leases stay valid, and later tokens are greater than all
-- before, also for keys that were deleted: the sequence continues from the clock, as the
-- tokens of the portable edition do.  Subscriptions continue where they were, and batches can be
-- acknowledged.  Clients, consumers, operators and backups keep their privileges.  As
-- uninstall.sql, it fails if other objects depend on the portable edition, such as handlers, which
-- have the type of events: drop them before, and create them again; the subscriptions keep their names.

\set to_extension_on_error_stop :ON_ERROR_STOP
\set ON_ERROR_STOP on
\set within_transaction on
-- A snapshot from before the locks would miss keys
BEGIN ISOLATION LEVEL READ COMMITTED;

\ir moved.sql
CREATE TEMPORARY TABLE moved_token ON COMMIT DROP AS
	SELECT (extract(epoch FROM clock_timestamp() - timestamptz '2025-01-01 00:00:00+00') * 61.03515625)::bigint
		+ coalesce(pg_sequence_last_value('idempotency_internal.token_offset'), 0) + 1 << 17 AS next;
\ir uninstall.sql
CREATE EXTENSION idempotency;
\ir moved_in.sql
SELECT setval('idempotency.token', greatest(max(m.token), max(m.finished_by),
	(SELECT t.next FROM pg_temp.moved_token AS t))) AS last_token
FROM pg_temp.moved_key AS m;
SELECT CASE g.kind WHEN 'client' THEN idempotency.grant_client(g.role) WHEN 'consumer' THEN idempotency.grant_consumer(g.role)
	WHEN 'operator' THEN idempotency.grant_operator(g.role) ELSE idempotency.grant_backup(g.role) END
FROM pg_temp.moved_grant AS g;

COMMIT;
\unset within_transaction
\set ON_ERROR_STOP :to_extension_on_error_stop
\unset to_extension_on_error_stop
