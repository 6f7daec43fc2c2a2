/* portable/moved.sql: what to_extension.sql and from_extension.sql move, and its locks */

-- A superuser runs it: no object of another role may capture a name, until the end of the
-- transaction.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Lock the views before the tables, as their readers do: a reader that waits for a table
-- would be in a deadlock with the command that drops the view.  LOCK TABLE on a view would
-- also lock the table.
ALTER VIEW idempotency.settings RESET (security_barrier);
ALTER VIEW idempotency.keys RESET (security_barrier);
ALTER VIEW idempotency.zombies RESET (security_barrier);
ALTER VIEW idempotency.subscriptions RESET (security_barrier);
ALTER VIEW idempotency.partitions RESET (security_barrier);
ALTER VIEW idempotency.dead_letters RESET (security_barrier);

-- Wait for the transactions that have claimed keys, published or fetched, and keep others out.
-- Handlers claim, publish and acknowledge in any order: in a deadlock, they fail and are repeated.
SET LOCAL deadlock_timeout = '10s';
LOCK TABLE idempotency.key, idempotency.configuration, idempotency.subscription, idempotency.partition, idempotency.position, idempotency.parked, idempotency.outbox
	IN ACCESS EXCLUSIVE MODE;

-- The columns that both editions have, in their order.  An open claim is never committed, so the
-- lock leaves none to move.
--
-- The owner of a table can have made a view of it, or an index or a type whose functions run
-- when it is read.  REFRESH runs them with the rights of the owner, from which no statement can
-- switch to others.  The types are those of the server, whatever the table has.
DO $$
DECLARE
	moved record;
BEGIN
	FOR moved IN
		SELECT v.name, format('idempotency.%I', v.name)::regclass AS relation, v.columns
		FROM (VALUES
			('key', 'created_at::timestamptz, expires_at::timestamptz, status::smallint, scope::text, key::text, fingerprint::bytea,
				response::json, headers::json, token::bigint, attempt::integer, leased_at::timestamptz, leased_until::timestamptz,
				recovery_point::text, recovery_state::json, request::json, retention::interval, finished_by::bigint'),
			('configuration', 'name::text, scope::text, value::text'),
			('outbox', 'seq::bigint, txid::xid8, published_at::timestamptz, id::uuid, bucket::integer, bytes::integer, deliver_at::timestamptz,
				aggregatetype::text, aggregateid::text, type::text, payload::json, headers::json'),
			('subscription', 'subscription::text, owner::name, topics::text[], patterns::text[], handler::text, start_at::text,
				max_attempts::integer, retry_delay::interval, max_retry_delay::interval, max_lag::interval, dead_letter_retention::interval,
				paused_at::timestamptz, created_at::timestamptz'),
			('partition', 'subscription::text, partition::integer, generation::integer, remainder::integer, modulus::integer,
				stop::pg_snapshot, stop_born::xid8, stop_mark::bigint, stop_top::bigint'),
			('position', 'subscription::text, partition::integer, version::bigint, changed_at::timestamptz, system_identifier::bigint,
				relation::oid, base::pg_snapshot, born::xid8, mark::bigint, top::bigint, xids::xid8[], froms::bigint[], range_from::bigint,
				upto::pg_snapshot, upto_born::xid8, upto_mark::bigint, reached::bigint, former_base::pg_snapshot,
				former_top::bigint, skip::bigint, ended::boolean, events::bigint[], size::integer, retried::boolean, failures::integer,
				alone::boolean, batch::bigint, leased_at::timestamptz, leased_until::timestamptz, holder::integer,
				acknowledged::bigint, failed::bigint, failing_since::timestamptz'),
			('parked', 'subscription::text, partition::integer, seq::bigint, published_at::timestamptz, id::uuid, bucket::integer,
				bytes::integer, queue::text, aggregatetype::text, aggregateid::text, type::text, payload::json, headers::json,
				attempts::integer, alone::boolean, error::text, first_failed_at::timestamptz, last_failed_at::timestamptz,
				retry_at::timestamptz, dead_at::timestamptz')) AS v (name, columns)
	LOOP
		EXECUTE format('CREATE MATERIALIZED VIEW idempotency_internal.moved AS SELECT %s FROM %s WITH NO DATA', moved.columns, moved.relation);
		EXECUTE (SELECT format('ALTER MATERIALIZED VIEW idempotency_internal.moved OWNER TO %s', c.relowner::regrole)
			FROM pg_class AS c WHERE c.oid = moved.relation);
		REFRESH MATERIALIZED VIEW idempotency_internal.moved;
		EXECUTE format('CREATE TEMPORARY TABLE %I ON COMMIT DROP AS SELECT * FROM idempotency_internal.moved', 'moved_' || moved.name);
		DROP MATERIALIZED VIEW idempotency_internal.moved;
	END LOOP;
END
$$;

-- Positions of this outbox are valid for the next one, which gets its rows with their transactions
-- and numbers.  The batch of a worker has no lease, and is given back.
CREATE TEMPORARY TABLE moved_number ON COMMIT DROP AS SELECT pg_sequence_last_value('idempotency.outbox_seq') AS last;
UPDATE pg_temp.moved_position AS n SET relation = 0
FROM pg_control_system() AS c
WHERE n.system_identifier = c.system_identifier AND n.relation = 'idempotency.outbox'::regclass;
UPDATE pg_temp.moved_position AS n SET size = 0, batch = NULL, leased_at = NULL, leased_until = NULL, holder = NULL
WHERE n.leased_until = 'infinity';

-- Clients may call claim(), consumers fetch(), operators forget(), and backups read the table
CREATE TEMPORARY TABLE moved_grant ON COMMIT DROP AS
	SELECT DISTINCT CASE p.proname WHEN 'claim' THEN 'client' WHEN 'fetch' THEN 'consumer' ELSE 'operator' END AS kind,
		a.grantee::regrole AS role
	FROM pg_proc AS p, aclexplode(p.proacl) AS a
	WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname IN ('claim', 'fetch', 'forget')
		AND a.grantee NOT IN (0, p.proowner)
	UNION
	SELECT 'backup', a.grantee::regrole
	FROM pg_class AS c, aclexplode(c.relacl) AS a
	WHERE c.oid = 'idempotency.key'::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner);
GRANT SELECT ON moved_grant TO PUBLIC;
