-- The suite reaper, in the database of each edition: the pages that calls of reap() read. A count
-- does not depend on the load of the machine.

-- 150,000 live keys, which lie behind 50,000 expired ones.
CREATE PROCEDURE bench.fill_pages()
LANGUAGE sql AS $$
	TRUNCATE idempotency.key;
	INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response)
	SELECT now(), now() + CASE WHEN n <= 50000 THEN interval '-12 hours' ELSE interval '12 hours' END, 201, 'charge.create',
		idempotency.uuidv7()::text, sha256(n::text::bytea), json_build_object('id', n, 'status', 'created')
	FROM generate_series(1, 200000) AS n;
$$;

CREATE TABLE bench.reap (
	rows bigint NOT NULL
);

-- One call, in a transaction of its own: what it deleted, the buffers that it used, and those that were
-- not in memory.
CREATE PROCEDURE bench.reap_once(INOUT rows bigint, INOUT buffers bigint, INOUT pages bigint)
LANGUAGE plpgsql AS $$
DECLARE
	plan json;
BEGIN
	COMMIT;
	EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) INSERT INTO bench.reap SELECT idempotency.reap(1000)' INTO plan;
	COMMIT;
	DELETE FROM bench.reap AS r RETURNING r.rows INTO rows;
	pages := (plan -> 0 -> 'Plan' ->> 'Shared Read Blocks')::bigint;
	buffers := pages + (plan -> 0 -> 'Plan' ->> 'Shared Hit Blocks')::bigint;
END $$;

-- Deletes the expired keys, after a restart of the server, and calls reap() ten times more.
CREATE PROCEDURE bench.sample_pages(p_round integer, p_contestant text)
LANGUAGE plpgsql AS $$
DECLARE
	removed bigint;
	buffers bigint;
	missed bigint;
	pages bigint := 0;
	rows bigint := 0;
	idle bigint := 0;
BEGIN
	LOOP
		CALL bench.reap_once(removed, buffers, missed);
		rows := rows + removed;
		pages := pages + missed;
		EXIT WHEN removed < 1000;
	END LOOP;
	IF rows <> 50000 THEN
		RAISE '% rows were deleted', rows;
	END IF;
	FOR i IN 1 .. 10 LOOP
		CALL bench.reap_once(removed, buffers, missed);
		idle := idle + buffers;
	END LOOP;
	INSERT INTO bench.sample VALUES (p_round, 'reap_pages', p_contestant, pages), (p_round, 'idle_pages', p_contestant, idle / 10.0);
END $$;
