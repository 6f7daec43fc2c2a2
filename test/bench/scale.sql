-- The suite scale: the cost of one charge of charge.sql with that many stored keys, in
-- order of time (v7), random (v4), or in order of time in 2,000 scopes, right after a
-- checkpoint, and while expired keys are deleted. The driver passes kinds and sizes in the
-- settings bench.kinds and bench.sizes.

\ir charge.sql

-- The number of stored keys for each figure.
CREATE TABLE bench.measured (
	figure text NOT NULL,
	part text NOT NULL,
	kind text NOT NULL,
	keys integer NOT NULL
);
INSERT INTO bench.measured
SELECT part || '_' || kind || '_' || keys, part, kind, keys
FROM unnest(string_to_array(current_setting('bench.kinds'), ' ')) WITH ORDINALITY AS k (kind, i),
	unnest(string_to_array(current_setting('bench.sizes'), ' ')::integer[]) AS s (keys),
	unnest('{wal,cpu,reaped_wal,reaped_cpu,bytes}'::text[]) WITH ORDINALITY AS p (part, j)
ORDER BY j, i, keys;

INSERT INTO bench.figure (figure, title, unit, above_floor, contestants)
SELECT figure,
	format('%s, %s keys: %s', replace(kind, 'v', 'UUIDv'), keys, title), unit, above_floor, contestants
FROM bench.measured
JOIN (VALUES
	('wal', 'WAL above the floor', 'bytes', true, '{floor,hand,idempotency}'::text[]),
	('cpu', 'server CPU above the floor', 'us', true, '{floor,hand,idempotency}'),
	('reaped_wal', 'WAL above the floor, beside the reaper', 'bytes', true, '{floor,hand,idempotency}'),
	('reaped_cpu', 'server CPU above the floor, beside the reaper', 'us', true, '{floor,hand,idempotency}'),
	('bytes', 'heap and index per key', 'bytes', false, '{hand,idempotency}')
) AS t (part, title, unit, above_floor, contestants) USING (part);

-- A new key. That of the kind scopes begins with the scope and a slash; the hand-written
-- table stores both in one column.
CREATE FUNCTION bench.new_key(p_kind text) RETURNS text
LANGUAGE sql
RETURN CASE p_kind
	WHEN 'v7' THEN idempotency.uuidv7()::text
	WHEN 'v4' THEN gen_random_uuid()::text
	ELSE 'tenant-' || (1000 + floor(random() * 2000))::integer || '/' || idempotency.uuidv7()
END;

-- A charge in a scope, otherwise as bench.charge_2.
CREATE FUNCTION bench.charge_scoped(p_scope text, p_key text, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
	body json;
BEGIN
	op := idempotency.claim(p_scope, p_key, jsonb_build_object('customer', p_customer, 'amount', p_amount));
	IF op.replayed THEN RETURN op.response; END IF;

	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;

	RETURN idempotency.complete(p_scope, p_key, body, 201);
END $$;

CREATE FUNCTION bench.new_keys(p_kind text, p_keys integer) RETURNS text[]
LANGUAGE sql
RETURN (SELECT array_agg(bench.new_key(p_kind)) FROM generate_series(1, p_keys));

-- Adds that many keys to the table of a contestant, as if each had been claimed at its
-- time. The first expires at that time, and each of the others an interval later.
CREATE PROCEDURE bench.add_keys(
	p_contestant text, p_kind text, p_keys bigint, p_first_expires timestamptz, p_apart interval)
LANGUAGE plpgsql AS $$
BEGIN
	IF p_contestant = 'hand' THEN
		INSERT INTO bench.hand_key
		SELECT bench.new_key(p_kind), encode(sha256(n::text::bytea), 'hex'), 'completed',
			jsonb_build_object('id', n, 'status', 'created'),
			clock_timestamp(), p_first_expires + (n - 1) * p_apart
		FROM generate_series(1, p_keys) AS n;
	ELSE
		INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, fingerprint, response)
		SELECT clock_timestamp(), p_first_expires + (n - 1) * p_apart, 201,
			CASE p_kind WHEN 'scopes' THEN split_part(name, '/', 1) ELSE 'charge.create' END,
			CASE p_kind WHEN 'scopes' THEN split_part(name, '/', 2) ELSE name END,
			sha256(n::text::bytea), json_build_object('id', n, 'status', 'created')
		FROM (SELECT n, bench.new_key(p_kind) AS name FROM generate_series(1, p_keys) AS n OFFSET 0) AS new;
	END IF;
END $$;

-- Fills the tables of both contestants to that size, some keys at a time. The keys expire
-- one after the other within the period, which begins when about all are there, as in a
-- table of that size with that retention.
CREATE PROCEDURE bench.grow(p_kind text, p_from integer, p_to integer, p_period interval)
LANGUAGE plpgsql AS $$
DECLARE
	step CONSTANT integer := 100000;
	began CONSTANT timestamptz := clock_timestamp();
	size CONSTANT integer := p_to - p_from;
	apart CONSTANT interval := p_period / size;
	seconds_a_key double precision := 0.000005; -- less than it takes: some have expired then
	done integer := 0;
	keys integer;
	expires timestamptz;
BEGIN
	WHILE done < size LOOP
		keys := least(size - done, step);
		expires := began + make_interval(secs => seconds_a_key * size) + done * apart;
		CALL bench.add_keys('hand', p_kind, keys, expires, apart);
		COMMIT;
		CALL bench.add_keys('idempotency', p_kind, keys, expires, apart);
		COMMIT;
		done := done + keys;
		seconds_a_key := extract(epoch FROM clock_timestamp() - began) / done;
	END LOOP;
END $$;

-- Deletes the expired keys of the hand-written table, as the worker does those of the
-- extension, until bench.reaping is empty.
CREATE TABLE bench.reaping (yes boolean NOT NULL);
CREATE PROCEDURE bench.reap_hand()
LANGUAGE plpgsql AS $$
BEGIN
	WHILE EXISTS (SELECT FROM bench.reaping) LOOP
		DELETE FROM bench.hand_key WHERE expires_at < now();
		COMMIT;
		PERFORM pg_sleep(0.1);
	END LOOP;
END $$;

-- Raises an error unless the worker has deleted keys since that number.
CREATE PROCEDURE bench.check_reaped(p_before bigint)
LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT coalesce(sum(rows_reaped), 0) <= p_before FROM idempotency.reaper) THEN
		RAISE 'the worker has deleted no key';
	END IF;
END $$;

-- Makes new charges, each in its own transaction. The server makes them in a loop that
-- is the same for all contestants.
CREATE PROCEDURE bench.charge(p_contestant text, p_keys text[])
LANGUAGE plpgsql AS $$
DECLARE
	key text;
BEGIN
	FOREACH key IN ARRAY p_keys LOOP
		IF p_contestant = 'floor' THEN
			PERFORM bench.charge_0(key, 1, 12.50);
		ELSIF p_contestant = 'hand' THEN
			PERFORM bench.charge_1(key, 1, 12.50);
		ELSIF position('/' IN key) > 0 THEN
			PERFORM bench.charge_scoped(split_part(key, '/', 1), split_part(key, '/', 2), 1, 12.50);
		ELSE
			PERFORM bench.charge_2(key, 1, 12.50);
		END IF;
		COMMIT;
	END LOOP;
END $$;

-- Measures the CPU of that many charges, for the figures of a prefix. It sleeps because the
-- scheduler's count of CPU time is exact only up to the last sleep.
CREATE PROCEDURE bench.measure(
	p_round integer, p_prefix text, p_contestant text, p_kind text, p_stored integer, p_charges integer)
LANGUAGE plpgsql AS $$
DECLARE
	keys text[] := bench.new_keys(p_kind, p_charges);
	cpu double precision;
	used double precision;
	stored bigint;
BEGIN
	PERFORM pg_sleep(0.001);
	cpu := bench.cpu();
	CALL bench.charge(p_contestant, keys);
	PERFORM pg_sleep(0.001);
	used := bench.cpu() - cpu;

	INSERT INTO bench.sample VALUES
		(p_round, format('%scpu_%s_%s', p_prefix, p_kind, p_stored), p_contestant, used / p_charges);
	IF p_contestant <> 'floor' AND p_prefix = '' THEN
		EXECUTE format('SELECT count(*) FROM %s', bench.key_table(p_contestant)) INTO stored;
		INSERT INTO bench.sample VALUES
			(p_round, format('bytes_%s_%s', p_kind, p_stored), p_contestant,
				pg_total_relation_size(bench.key_table(p_contestant))::double precision / stored);
	END IF;
END $$;

-- The WAL that the last call of bench.measure() has written, without that of other processes.
CREATE EXTENSION pg_stat_statements;
CREATE PROCEDURE bench.measure_wal(
	p_round integer, p_prefix text, p_contestant text, p_kind text, p_stored integer, p_charges integer)
LANGUAGE sql
BEGIN ATOMIC
	INSERT INTO bench.sample
	SELECT p_round, format('%swal_%s_%s', p_prefix, p_kind, p_stored), p_contestant,
		sum(wal_bytes)::double precision / p_charges
	FROM pg_stat_statements
	WHERE query LIKE 'CALL bench.measure(%';
	SELECT pg_stat_statements_reset();
END;

-- The data of the plot.
CREATE VIEW bench.scale AS
	SELECT m.kind, r.contestant, m.keys,
		round(max(r.value) FILTER (WHERE m.part = 'wal')::numeric) AS wal_bytes,
		round(max(r.value) FILTER (WHERE m.part = 'cpu')::numeric, 1) AS cpu_us,
		round(max(r.value) FILTER (WHERE m.part = 'reaped_wal')::numeric) AS reaped_wal_bytes,
		round(max(r.value) FILTER (WHERE m.part = 'reaped_cpu')::numeric, 1) AS reaped_cpu_us,
		round(max(r.value) FILTER (WHERE m.part = 'bytes')::numeric) AS bytes_per_key
	FROM bench.measured AS m
	JOIN bench.result AS r USING (figure)
	WHERE r.contestant <> 'floor'
	GROUP BY m.kind, r.contestant, m.keys
	ORDER BY m.kind DESC, r.contestant, m.keys;
