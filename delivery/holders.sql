-- ---------------------------------------------------------------------------
-- Who holds a key, and who waits for it: holders()
-- ---------------------------------------------------------------------------

CREATE TYPE idempotency.holder AS (
	kind text,
	pid integer,
	prepared text,
	role name,
	since timestamptz,
	age interval,
	state text,
	query text,
	client text,
	application text,
	waits_for integer[]
);
COMMENT ON TYPE idempotency.holder IS 'a transaction that holds a key or waits for it, as from holders()';
COMMENT ON COLUMN idempotency.holder.kind IS 'holds, waits, or prepared: a prepared transaction, which holds';
COMMENT ON COLUMN idempotency.holder.pid IS 'process of the session; NULL: prepared';
COMMENT ON COLUMN idempotency.holder.prepared IS 'name for COMMIT PREPARED and ROLLBACK PREPARED';
COMMENT ON COLUMN idempotency.holder.role IS 'role of the session, or owner of the prepared transaction';
COMMENT ON COLUMN idempotency.holder.since IS 'when the transaction began or was prepared, or the wait began';
COMMENT ON COLUMN idempotency.holder.age IS 'time since the transaction began, or was prepared';
COMMENT ON COLUMN idempotency.holder.state IS 'what the session does, as in pg_stat_activity';
COMMENT ON COLUMN idempotency.holder.query IS 'its last statement; in the portable edition, only if its owner can see it';
COMMENT ON COLUMN idempotency.holder.client IS 'address of the client; NULL: a local socket';
COMMENT ON COLUMN idempotency.holder.application IS 'application_name';
COMMENT ON COLUMN idempotency.holder.waits_for IS 'processes that it waits for; 0 is a prepared transaction';

-- extension only
CREATE FUNCTION idempotency_internal.lock_number(scope idempotency.identifier, key idempotency.identifier)
	RETURNS bigint
	LANGUAGE C VOLATILE PARALLEL UNSAFE AS 'MODULE_PATHNAME', 'idempotency_lock_number';
COMMENT ON FUNCTION idempotency_internal.lock_number(idempotency.identifier, idempotency.identifier) IS
	'the number of the lock of a key';

-- The class of these locks is that of keys/lock.c.
-- portable only
-- A transaction that inserts a key has its advisory lock, and the row of a stored key the ID of the
-- transaction that locked it.  All others wait for the ID of one of these.
-- both editions
CREATE FUNCTION idempotency_internal.key_locks(scope text, key text, all_keys boolean)
	RETURNS TABLE (pid integer, virtual_transaction text, is_granted boolean, wait_start timestamptz)
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
#variable_conflict use_column
DECLARE
	number bigint;
BEGIN
	IF NOT all_keys THEN
		-- portable only
		IF NOT idempotency_internal.names_are_valid(scope, key) THEN
			PERFORM idempotency_internal.check_names(scope, key);
		END IF;
		-- both editions
		number := idempotency_internal.lock_number(scope, key);
	END IF;
	RETURN QUERY
	-- extension only
	SELECT l.pid, l.virtualtransaction, l.granted, l.waitstart
	FROM pg_locks AS l
	WHERE l.locktype = 'advisory' AND l.objsubid = 18756
		AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
		AND (all_keys OR l.classid::bigint << 32 | l.objid::bigint = number);
	-- portable only
	WITH lock AS MATERIALIZED (
		SELECT l.* FROM pg_locks AS l
		WHERE l.database IS NULL OR l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
	), owner AS (
		SELECT DISTINCT l.pid, l.virtualtransaction FROM lock AS l
		WHERE l.granted AND CASE
			WHEN all_keys THEN l.relation = 'idempotency.key'::regclass AND l.mode IN ('RowShareLock', 'RowExclusiveLock')
			WHEN l.locktype = 'advisory' THEN l.objsubid = 1 AND l.classid::bigint << 32 | l.objid::bigint = number
			ELSE l.transactionid = (SELECT k.xmax FROM idempotency.key AS k
				WHERE k.scope = key_locks.scope COLLATE "C" AND k.key = key_locks.key COLLATE "C")
		END
	), waiter AS (
		SELECT l.pid, l.virtualtransaction, l.waitstart FROM lock AS l
		WHERE NOT l.granted AND l.transactionid IN (
			SELECT x.transactionid FROM lock AS x JOIN owner AS o ON o.virtualtransaction = x.virtualtransaction WHERE x.granted)
	)
	SELECT o.pid, o.virtualtransaction, true, NULL::timestamptz FROM owner AS o
	WHERE NOT EXISTS (SELECT FROM waiter AS w WHERE w.virtualtransaction = o.virtualtransaction)
	UNION ALL
	SELECT w.pid, w.virtualtransaction, false, w.waitstart FROM waiter AS w;
	-- both editions
END
$$;
COMMENT ON FUNCTION idempotency_internal.key_locks(text, text, boolean) IS 'locks of a key, or of all keys';

CREATE FUNCTION idempotency_internal.holders_of(scope text, key text, all_keys boolean)
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE
	SET jit = off -- which takes longer than reading the locks, whose number the planner overestimates
AS $$
	SELECT CASE WHEN NOT l.is_granted THEN 'waits' WHEN l.pid IS NULL THEN 'prepared' ELSE 'holds' END,
		l.pid, x.gid, coalesce(a.usename, x.owner), coalesce(l.wait_start, a.xact_start, x.prepared),
		clock_timestamp() - coalesce(a.xact_start, x.prepared), a.state, a.query, host(a.client_addr), a.application_name,
		CASE WHEN NOT l.is_granted THEN pg_blocking_pids(l.pid) END
	FROM idempotency_internal.key_locks($1, $2, $3) AS l
	LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
	LEFT JOIN pg_prepared_xacts AS x ON l.pid IS NULL AND EXISTS (SELECT FROM pg_locks AS t
		WHERE t.pid IS NULL AND t.virtualtransaction = l.virtual_transaction AND t.transactionid = x.transaction)
	ORDER BY l.is_granted DESC, 5, 2
$$;
COMMENT ON FUNCTION idempotency_internal.holders_of(text, text, boolean) IS 'holders()';

CREATE FUNCTION idempotency.holders()
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
	SELECT * FROM idempotency_internal.holders_of(NULL, NULL, true)
$$;
COMMENT ON FUNCTION idempotency.holders() IS 'transactions that hold keys, and those that wait for them';

-- extension only
CREATE FUNCTION idempotency.holders(scope idempotency.identifier, key idempotency.identifier)
-- portable only
CREATE FUNCTION idempotency.holders(scope text, key text)
-- both editions
	RETURNS SETOF idempotency.holder
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
	SELECT * FROM idempotency_internal.holders_of($1::text, $2::text, false)
$$;
-- extension only
COMMENT ON FUNCTION idempotency.holders(idempotency.identifier, idempotency.identifier) IS
-- portable only
COMMENT ON FUNCTION idempotency.holders(text, text) IS
-- both editions
	'the transaction that holds a key, and those that wait for it';

