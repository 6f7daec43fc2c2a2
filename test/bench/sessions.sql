-- The suite sessions: its figures for the contestants of charge.sql, and what sessions
-- wait for. The driver passes the numbers of clients and duplicates in settings.

\ir charge.sql

INSERT INTO bench.figure (figure, title, unit, contestants)
SELECT figure, format(title, current_setting('bench.clients'), current_setting('bench.storm')), unit, contestants
FROM (VALUES
	('throughput', 'throughput, %1$s clients of PgBouncer', 'per second', '{floor,hand,idempotency}'::text[]),
	('p50', 'latency: median', 'us', '{floor,hand,idempotency}'),
	('p99', 'latency: p99', 'us', '{floor,hand,idempotency}'),
	('storm', 'the last of %2$s duplicates returns after the first operation', 'ms', '{hand,idempotency}')
) AS f (figure, title, unit, contestants);

-- The states in which active sessions were found.
CREATE UNLOGGED TABLE bench.wait (
	contestant text NOT NULL,
	wait text NOT NULL
);

CREATE PROCEDURE bench.watch(p_contestant text, p_seconds integer)
LANGUAGE plpgsql AS $$
DECLARE
	until CONSTANT timestamptz := clock_timestamp() + make_interval(secs => p_seconds);
BEGIN
	WHILE clock_timestamp() < until LOOP
		INSERT INTO bench.wait
		SELECT p_contestant, coalesce(wait_event_type || ': ' || wait_event, 'no wait')
		FROM pg_stat_activity
		WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid();
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END $$;

-- What each contestant waited for, in per cent of its samples.
CREATE VIEW bench.wait_event AS
	SELECT contestant, wait,
		round(100.0 * count(*) / sum(count(*)) OVER (PARTITION BY contestant), 1) AS "%"
	FROM bench.wait
	GROUP BY contestant, wait
	ORDER BY contestant, count(*) DESC;
