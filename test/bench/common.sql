-- The common parts of all suites of test/bench: samples, and their evaluation for the
-- report. A suite adds rows to bench.figure; its driver adds samples.

CREATE SCHEMA bench;

-- The measured figures. If a figure names a reference, contestants are compared with
-- that one in the same round. "above_floor": the contestant "floor" measures the cost
-- of the work alone, which is subtracted from the others before the comparison.
CREATE TABLE bench.figure (
	position integer GENERATED ALWAYS AS IDENTITY,
	figure text PRIMARY KEY,
	title text NOT NULL,
	unit text NOT NULL,
	above_floor boolean NOT NULL DEFAULT false,
	contestants text[] NOT NULL,
	reference text NOT NULL DEFAULT 'hand',
	-- The maximum, or minimum, of the extension's ratio to the reference, or of its
	-- value for an absolute figure.
	target numeric,
	aim numeric,
	absolute boolean NOT NULL DEFAULT false,
	at_least boolean NOT NULL DEFAULT false
);

-- The samples. A round can have several.
CREATE TABLE bench.sample (
	round integer NOT NULL,
	figure text NOT NULL REFERENCES bench.figure,
	contestant text NOT NULL,
	value double precision NOT NULL
);

-- The resources that a backend had used at the end of a contestant's turn; the next
-- mark is at the end of the next turn.
CREATE TABLE bench.mark (
	position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	pid integer NOT NULL,
	turn integer NOT NULL,
	cpu double precision NOT NULL
);

-- The CPU time in microseconds, user and system, of the calling backend. The
-- scheduler's count is exact up to the backend's last sleep, which ended when the
-- client sent this query; without it, /proc/self/stat counts ticks.
CREATE FUNCTION bench.cpu() RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
	precise text := pg_read_file('/proc/self/schedstat', 0, 100, true);
	ticks text[];
BEGIN
	IF precise IS NOT NULL THEN
		RETURN split_part(precise, ' ', 1)::double precision / 1000;
	END IF;
	-- The name of the process can contain any character, and ends at the last bracket.
	ticks := string_to_array(regexp_replace(pg_read_file('/proc/self/stat'), '^.*\) ', ''), ' ');
	RETURN (ticks[12]::double precision + ticks[13]::double precision) * 10000;
END $$;

CREATE FUNCTION bench.mark(p_turn integer) RETURNS void
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.mark (pid, turn, cpu) VALUES (pg_backend_pid(), p_turn, bench.cpu());
END;

-- Converts the marks of one backend into samples, one per turn, so that a disturbance
-- affects one sample and not the round.
CREATE PROCEDURE bench.sample_marks(
	p_round integer, p_figure text, p_contestants text[], p_operations integer)
LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT count(DISTINCT pid) <> 1 OR count(*) < 2 FROM bench.mark) THEN
		RAISE 'there are no marks, or marks of several backends';
	END IF;

	INSERT INTO bench.sample
	SELECT p_round, p_figure, p_contestants[turn + 1], used / p_operations
	FROM (SELECT turn, cpu - lag(cpu) OVER (ORDER BY position) AS used FROM bench.mark) AS turns
	WHERE used IS NOT NULL;
	TRUNCATE bench.mark;
END $$;

-- The key table of a contestant; every suite has both tables.
CREATE FUNCTION bench.key_table(p_contestant text) RETURNS regclass
LANGUAGE sql STABLE
RETURN (CASE p_contestant
	WHEN 'hand' THEN 'bench.hand_key'
	WHEN 'idempotency' THEN 'idempotency.key'
END)::text::regclass;

-- Waits until no other client is connected: a session reports its statistics at its end
-- at the latest, which is after its client exited.
CREATE PROCEDURE bench.wait_until_alone()
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
	WHILE EXISTS (
		SELECT FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid())
	LOOP
		IF clock_timestamp() > deadline THEN
			RAISE 'another session does not leave';
		END IF;
		PERFORM pg_sleep(0.01), pg_stat_clear_snapshot();
	END LOOP;
END $$;

-- The dead tuples of a table that got p_rows rows since it was empty.
CREATE FUNCTION bench.dead_tuples(p_table regclass, p_rows bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
	IF pg_stat_get_live_tuples(p_table) <> p_rows THEN
		RAISE '% has % rows, not %', p_table, pg_stat_get_live_tuples(p_table), p_rows;
	END IF;
	RETURN pg_stat_get_dead_tuples(p_table);
END $$;

-- Missing measurements.
CREATE FUNCTION bench.missing(p_rounds integer) RETURNS SETOF text
LANGUAGE sql
BEGIN ATOMIC
	SELECT format('%s of %s in round %s', f.figure, c.contestant, r.round)
	FROM bench.figure AS f
	CROSS JOIN LATERAL unnest(f.contestants) AS c(contestant)
	CROSS JOIN LATERAL generate_series(1, p_rounds) AS r(round)
	WHERE NOT EXISTS (
		SELECT FROM bench.sample AS s
		WHERE s.figure = f.figure AND s.contestant = c.contestant AND s.round = r.round);
END;

-- The median of each round, minus the floor if requested.
CREATE VIEW bench.net AS
	WITH median AS (
		SELECT round, figure, contestant, percentile_cont(0.5) WITHIN GROUP (ORDER BY value) AS value
		FROM bench.sample
		GROUP BY round, figure, contestant
	)
	SELECT m.round, m.figure, m.contestant,
		m.value - CASE WHEN f.above_floor AND m.contestant <> 'floor' THEN floor.value ELSE 0 END AS value
	FROM median AS m
	JOIN bench.figure AS f USING (figure)
	LEFT JOIN median AS floor
		ON floor.figure = m.figure AND floor.contestant = 'floor' AND floor.round = m.round;

-- The median of all rounds. A ratio is the median of the ratios of each round, so that
-- a temporary slowdown of the machine affects both sides.
CREATE VIEW bench.result AS
	SELECT n.figure, n.contestant,
		percentile_cont(0.5) WITHIN GROUP (ORDER BY n.value) AS value,
		percentile_cont(0.5) WITHIN GROUP (ORDER BY n.value / nullif(reference.value, 0))
			FILTER (WHERE n.contestant <> 'floor' OR NOT f.above_floor) AS ratio,
		min(n.value) AS lowest,
		max(n.value) AS highest,
		min(n.value / nullif(reference.value, 0)) AS least,
		max(n.value / nullif(reference.value, 0)) AS most
	FROM bench.net AS n
	JOIN bench.figure AS f USING (figure)
	LEFT JOIN bench.net AS reference
		ON reference.figure = n.figure AND reference.contestant = f.reference AND reference.round = n.round
	GROUP BY n.figure, n.contestant;

CREATE VIEW bench.csv AS
	SELECT f.figure, c.contestant,
		round(m.value::numeric, 3) AS value, f.unit, round(m.ratio::numeric, 3) AS ratio
	FROM bench.figure AS f
	CROSS JOIN LATERAL unnest(f.contestants) WITH ORDINALITY AS c(contestant, position)
	JOIN bench.result AS m ON m.figure = f.figure AND m.contestant = c.contestant
	ORDER BY f.position, c.position;

-- One line per figure: the contestants' values, the extension's ratio to the reference,
-- the spread over the rounds of the ratio or of the absolute value, and whether the
-- target is met; the last two are those of the portable edition, if it is measured.
CREATE VIEW bench.report AS
	SELECT f.title AS "median", f.unit,
		max(v.shown) FILTER (WHERE v.contestant = 'floor') AS floor,
		max(v.shown) FILTER (WHERE v.contestant = 'hand') AS hand,
		max(v.shown) FILTER (WHERE v.contestant = 'pgq') AS pgq,
		max(v.shown) FILTER (WHERE v.contestant = 'idempotency') AS idempotency,
		max(v.ratio) FILTER (WHERE v.contestant = 'idempotency') AS ratio,
		max(v.shown) FILTER (WHERE v.contestant = 'portable') AS portable,
		max(v.ratio) FILTER (WHERE v.contestant = 'portable') AS portable_ratio,
		max(v.spread) FILTER (WHERE v.contestant = v.judge) AS spread,
		CASE
			WHEN f.target IS NULL THEN NULL
			WHEN f.at_least THEN '>= ' || f.target
			ELSE '<= ' || f.target || coalesce(', aim ' || f.aim, '')
		END AS target,
		max(CASE
			WHEN f.target IS NULL THEN NULL
			WHEN f.at_least AND v.judged >= f.target OR NOT f.at_least AND v.judged <= f.target THEN 'reached'
			ELSE 'missed'
		END) FILTER (WHERE v.contestant = v.judge) AS verdict
	FROM bench.figure AS f
	JOIN LATERAL (
		SELECT m.contestant, CASE WHEN 'portable' = ANY (f.contestants) THEN 'portable' ELSE 'idempotency' END AS judge,
			CASE WHEN f.absolute THEN m.value ELSE m.ratio END AS judged,
			round(m.value::numeric, CASE WHEN m.value < 100 THEN 2 ELSE 0 END)::text AS shown,
			round(m.ratio::numeric, p.digits)::text AS ratio,
			CASE
				WHEN f.absolute THEN round(m.lowest::numeric, 2) || ' to ' || round(m.highest::numeric, 2)
				ELSE round(m.least::numeric, p.digits) || ' to ' || round(m.most::numeric, p.digits)
			END AS spread
		FROM bench.result AS m
		CROSS JOIN LATERAL (SELECT CASE WHEN m.ratio > 0 AND m.ratio < 0.1 THEN 4 ELSE 2 END) AS p(digits)
		WHERE m.figure = f.figure AND m.contestant = ANY (f.contestants)
	) AS v ON true
	GROUP BY f.position, f.title, f.unit, f.target, f.aim, f.at_least
	ORDER BY f.position;

-- The columns of the report that this suite fills.
CREATE FUNCTION bench.report_columns() RETURNS text
LANGUAGE sql
BEGIN ATOMIC
	SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum)
	FROM pg_attribute
	WHERE attrelid = 'bench.report'::regclass
		AND (attname NOT IN ('floor', 'hand', 'pgq', 'portable', 'portable_ratio')
			OR EXISTS (SELECT FROM bench.figure AS f WHERE split_part(attname, '_', 1) = ANY (f.contestants)));
END;
