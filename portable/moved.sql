/* portable/moved.sql: what to_extension.sql and from_extension.sql move, and its locks */

-- A superuser runs it: no object of another role may capture a name, until the end of the
-- transaction.
SET LOCAL search_path = pg_catalog, pg_temp;

-- Lock the views before the table, as their readers do: a reader that waits for the table
-- would be in a deadlock with the command that drops the view.  LOCK TABLE on a view would
-- also lock the table.
ALTER VIEW idempotency.keys RESET (security_barrier);
ALTER VIEW idempotency.zombies RESET (security_barrier);

-- Wait for the transactions that have claimed keys, and keep others out
LOCK TABLE idempotency.key IN ACCESS EXCLUSIVE MODE;

-- The columns that both editions have.  An open claim is never committed, so the lock leaves
-- none to move.
--
-- The owner of the table can have made a view of it, or an index or a type whose functions run
-- when it is read.  REFRESH runs them with the rights of the owner, from which no statement can
-- switch to others.  The types are those of the server, whatever the table has.
CREATE MATERIALIZED VIEW idempotency_internal.moved_key AS
	SELECT created_at::timestamptz, expires_at::timestamptz, status::smallint, scope::text, key::text, fingerprint::bytea,
		response::json, headers::json, token::bigint, attempt::integer, leased_at::timestamptz, leased_until::timestamptz,
		recovery_point::text, recovery_state::json, request::json, retention::interval, finished_by::bigint
	FROM idempotency.key
	WITH NO DATA;
SELECT format('ALTER MATERIALIZED VIEW idempotency_internal.moved_key OWNER TO %s', c.relowner::regrole)
FROM pg_class AS c WHERE c.oid = 'idempotency.key'::regclass \gexec
REFRESH MATERIALIZED VIEW idempotency_internal.moved_key;
CREATE TEMPORARY TABLE moved_key ON COMMIT DROP AS SELECT * FROM idempotency_internal.moved_key;
DROP MATERIALIZED VIEW idempotency_internal.moved_key;

-- Clients may call claim(), operators forget(), and backups read the table
CREATE TEMPORARY TABLE moved_grant ON COMMIT DROP AS
	SELECT DISTINCT CASE p.proname WHEN 'claim' THEN 'client' ELSE 'operator' END AS kind, a.grantee::regrole AS role
	FROM pg_proc AS p, aclexplode(p.proacl) AS a
	WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname IN ('claim', 'forget')
		AND a.grantee NOT IN (0, p.proowner)
	UNION
	SELECT 'backup', a.grantee::regrole
	FROM pg_class AS c, aclexplode(c.relacl) AS a
	WHERE c.oid = 'idempotency.key'::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner);
GRANT SELECT ON moved_grant TO PUBLIC;
