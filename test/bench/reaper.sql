-- The suite reaper: a table full of expired keys, and the ways to empty it. The
-- contestants are those of charge.sql; the hand-written one deletes by its index on
-- expires_at.

\ir charge.sql
\ir reaper_pages.sql

INSERT INTO bench.figure (figure, title, unit, contestants, target, absolute) VALUES
	('reap_cpu', 'reap() and VACUUM: server CPU per key', 'us', '{hand,idempotency}', NULL, false),
	('reap_wal', 'reap() and VACUUM: WAL per key', 'bytes', '{hand,idempotency}', NULL, false),
	('reap_time', 'reap() and VACUUM: duration', 's', '{hand,idempotency}', NULL, false),
	('worker_cpu', 'worker and VACUUM: server CPU per key', 'us', '{hand,idempotency}', NULL, false),
	('worker_wal', 'worker and VACUUM: WAL per key', 'bytes', '{hand,idempotency}', NULL, false),
	('worker_time', 'worker and VACUUM: duration', 's', '{hand,idempotency}', NULL, false),
	('alone', 'p99 of a claim, nothing is reaped', 'us', '{hand,idempotency}', NULL, false),
	('beside', 'p99 of a claim while the worker (hand: DELETE) runs', 'us', '{hand,idempotency}', NULL, false),
	('slower', 'the second, of the first', 'times', '{hand,idempotency}', 1.2, true),
	('size', 'heap and index after three periods, of one period''s', 'times', '{hand,idempotency}', 1.3, true);
INSERT INTO bench.figure (figure, title, unit, contestants, reference, target) VALUES
	('reap_pages', 'reap() of 50,000 expired keys: pages read', 'pages', '{idempotency,portable}', 'idempotency', 2),
	('idle_pages', 'reap() of a table without expired keys: buffers used', 'buffers', '{idempotency,portable}', 'idempotency', 2);

-- ---------------------------------------------------------------------------
-- Tables full of keys
-- ---------------------------------------------------------------------------

-- That many expired keys, followed by as many live ones in the order of their expiry,
-- as rows of both tables.
CREATE UNLOGGED TABLE bench.full AS
SELECT n, idempotency.uuidv7()::text AS key, sha256(n::text::bytea) AS fingerprint,
	json_build_object('id', n, 'status', 'created') AS response,
	now() - interval '1 day' AS created_at,
	now() + n * interval '1 ms' + CASE
		WHEN n <= current_setting('bench.expired')::integer THEN interval '-12 hours'
		ELSE interval '12 hours' END AS expires_at
FROM generate_series(1, 2 * current_setting('bench.expired')::integer) AS n;

-- Fills the key table of a contestant with the expired keys, and that many live ones.
CREATE PROCEDURE bench.fill(p_contestant text, p_live integer)
LANGUAGE plpgsql AS $$
DECLARE
	keys integer := current_setting('bench.expired')::integer + p_live;
BEGIN
	IF p_contestant = 'hand' THEN
		INSERT INTO bench.hand_key (key, request_hash, state, response, created_at, expires_at)
		SELECT key, encode(fingerprint, 'hex'), 'completed', response::jsonb, created_at, expires_at
		FROM bench.full WHERE n <= keys;
	ELSE
		INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response)
		SELECT created_at, expires_at, 201, 'charge.create', key, fingerprint, response
		FROM bench.full WHERE n <= keys;
	END IF;
END $$;

-- Raises an error unless all expired keys are gone and all live keys remain.
CREATE PROCEDURE bench.check_reaped(p_contestant text, p_live integer)
LANGUAGE plpgsql AS $$
DECLARE
	expired bigint;
	live bigint;
BEGIN
	EXECUTE format('SELECT count(*) FILTER (WHERE expires_at <= now()), count(*) FILTER (WHERE expires_at > now()) FROM %s',
		bench.key_table(p_contestant)) INTO expired, live;
	IF expired > 0 OR live < p_live THEN
		RAISE '% expired keys are left, and % live ones, not %', expired, live, p_live;
	END IF;
END $$;

-- ---------------------------------------------------------------------------
-- Resources
-- ---------------------------------------------------------------------------

-- The CPU time in microseconds of all server processes that have ended.
CREATE FUNCTION bench.ended_cpu() RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
	postmaster text := split_part(pg_read_file('postmaster.pid'), E'\n', 1);
	ticks text[] := string_to_array(
		regexp_replace(pg_read_file('/proc/' || postmaster || '/stat'), '^.*\) ', ''), ' ');
BEGIN
	RETURN (ticks[14]::double precision + ticks[15]::double precision) * 10000;
END $$;

CREATE TABLE bench.lap (
	cpu double precision NOT NULL,
	position pg_lsn NOT NULL,
	began_at timestamptz NOT NULL,
	ended_at timestamptz
);

-- The resources that this backend, and workers that have ended, have used. The
-- scheduler's count is exact up to the last sleep.
CREATE FUNCTION bench.used_cpu() RETURNS double precision
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(0.001);
	RETURN bench.cpu() + bench.ended_cpu();
END $$;

CREATE PROCEDURE bench.begin_lap()
LANGUAGE sql
BEGIN ATOMIC
	DELETE FROM bench.lap;
	INSERT INTO bench.lap VALUES (bench.used_cpu(), pg_current_wal_insert_lsn(), clock_timestamp(), NULL);
END;

-- Waits until the earlier sessions have ended, which can be a moment after they
-- disappear from pg_stat_activity.
CREATE PROCEDURE bench.await_ended()
LANGUAGE plpgsql AS $$
DECLARE
	ended double precision;
BEGIN
	CALL bench.wait_until_alone();
	LOOP
		ended := bench.ended_cpu();
		PERFORM pg_sleep(0.25);
		EXIT WHEN bench.ended_cpu() = ended;
	END LOOP;
END $$;

CREATE PROCEDURE bench.end_lap()
LANGUAGE sql
BEGIN ATOMIC
	UPDATE bench.lap SET ended_at = clock_timestamp();
END;

-- Converts a lap that ends now into samples of the figures by_cpu, by_wal and by_time.
CREATE PROCEDURE bench.sample_lap(p_round integer, p_by text, p_contestant text, p_keys integer)
LANGUAGE plpgsql AS $$
BEGIN
	CALL bench.end_lap();
	INSERT INTO bench.sample
	SELECT p_round, p_by || part, p_contestant, value
	FROM bench.lap,
		LATERAL (VALUES
			('_cpu', (bench.used_cpu() - cpu) / p_keys),
			('_wal', ((pg_current_wal_insert_lsn() - position) / p_keys)::double precision),
			('_time', extract(epoch FROM ended_at - began_at)::double precision)) AS v (part, value);
END $$;

-- Calls reap() until no expired row is left, each call in its own transaction.
CREATE PROCEDURE bench.reap_all()
LANGUAGE plpgsql AS $$
DECLARE
	batch CONSTANT integer := 1000;
	reaped bigint;
BEGIN
	LOOP
		reaped := idempotency.reap(batch);
		COMMIT;
		EXIT WHEN reaped < batch;
	END LOOP;
END $$;

-- Waits until the worker has deleted that many keys, and exited.
CREATE PROCEDURE bench.await_worker(p_keys integer)
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '10 minutes';
BEGIN
	LOOP
		EXIT WHEN (SELECT sum(rows_reaped) FROM idempotency.reaper) >= p_keys;
		IF clock_timestamp() > deadline THEN
			RAISE 'the worker has reaped only % keys', (SELECT sum(rows_reaped) FROM idempotency.reaper);
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
	WHILE EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idempotency reaper') LOOP
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END $$;

-- ---------------------------------------------------------------------------
-- Latency and size
-- ---------------------------------------------------------------------------

-- The log of pgbench for one run.
CREATE TABLE bench.latency (
	ended_at double precision NOT NULL,
	us double precision NOT NULL
);

-- The 99th percentile of the log from its second second on, or of the lap.
CREATE FUNCTION bench.p99_alone() RETURNS double precision
LANGUAGE sql STABLE
BEGIN ATOMIC
	SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY us)
	FROM bench.latency
	WHERE ended_at > (SELECT min(ended_at) + 1 FROM bench.latency);
END;

CREATE FUNCTION bench.p99_in_lap() RETURNS double precision
LANGUAGE sql STABLE
BEGIN ATOMIC
	SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY us)
	FROM bench.latency, bench.lap
	WHERE latency.ended_at BETWEEN extract(epoch FROM lap.began_at) AND extract(epoch FROM lap.ended_at);
END;

-- The sizes of the key tables at the end of each retention period.
CREATE TABLE bench.size (
	period integer NOT NULL,
	contestant text NOT NULL,
	bytes bigint NOT NULL,
	PRIMARY KEY (period, contestant)
);

-- No key expires in the first period, so at its end the table has the rows of one
-- period. From the third on, the size no longer grows.
CREATE PROCEDURE bench.sample_sizes(p_rounds integer)
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.sample
	SELECT round, 'size', s.contestant, s.bytes / one.bytes::double precision
	FROM generate_series(1, p_rounds) AS round
	JOIN bench.size AS s ON s.period = 2 + round
	JOIN bench.size AS one ON one.period = 1 AND one.contestant = s.contestant;
END;
