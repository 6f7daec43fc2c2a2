/* portable/moved.sql: what to_extension.sql and from_extension.sql move, and its locks */

-- Lock the views before the table, as their readers do: a reader that waits for the table
-- would be in a deadlock with the command that drops the view.  LOCK TABLE on a view would
-- also lock the table.
ALTER VIEW idempotency.keys RESET (security_barrier);
ALTER VIEW idempotency.zombies RESET (security_barrier);

-- Wait for the transactions that have claimed keys, and keep others out
LOCK TABLE idempotency.key IN ACCESS EXCLUSIVE MODE;

-- The columns that both editions have.  An open claim is never committed, so the lock leaves
-- none to move.
CREATE TEMPORARY TABLE moved_key ON COMMIT DROP AS
	SELECT created_at, expires_at, status, scope, key::text, fingerprint, response, headers, token, attempt,
		leased_at, leased_until, recovery_point, recovery_state, request, retention, finished_by
	FROM idempotency.key;

-- Clients may call claim(), operators forget(), and backups read the table
CREATE TEMPORARY TABLE moved_grant ON COMMIT DROP AS
	SELECT DISTINCT CASE p.proname WHEN 'claim' THEN 'client' ELSE 'operator' END AS kind, a.grantee::regrole AS role
	FROM pg_catalog.pg_proc AS p, pg_catalog.aclexplode(p.proacl) AS a
	WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname IN ('claim', 'forget')
		AND a.grantee NOT IN (0, p.proowner)
	UNION
	SELECT 'backup', a.grantee::regrole
	FROM pg_catalog.pg_class AS c, pg_catalog.aclexplode(c.relacl) AS a
	WHERE c.oid = 'idempotency.key'::regclass AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner);
GRANT SELECT ON moved_grant TO PUBLIC;
