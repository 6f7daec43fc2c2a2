-- The suite keys: its figures for the contestants of charge.sql, and the replay loops.

\ir charge.sql

INSERT INTO bench.figure (figure, title, unit, above_floor, contestants, target, aim, absolute) VALUES
	('cpu', 'server CPU above the floor', 'us', true, '{floor,hand,idempotency}', 0.5, 0.4, false),
	('wal', 'WAL above the floor', 'bytes', true, '{floor,hand,idempotency}', 0.55, NULL, false),
	('dead', 'dead tuples in the key table', 'tuples', false, '{hand,idempotency}', 0, NULL, true),
	('bytes', 'heap and index per key', 'bytes', false, '{hand,idempotency}', 0.7, NULL, false),
	('bytes_packed', 'the same after VACUUM FULL', 'bytes', false, '{hand,idempotency}', NULL, NULL, false),
	-- samples of the functions bench.replay_*, which the next three figures compare
	('replay_all', 'replay', 'us', false, '{}', NULL, NULL, false),
	('replay', 'replay (hand: bare SELECT)', 'us', false, '{hand,idempotency}', 1.3, NULL, false),
	('replay_request', 'replay, request given (hand: bare SELECT)', 'us', false, '{hand,idempotency}', 1.3, NULL, false),
	('replay_checked', 'replay, request given (hand: SELECT and hash)', 'us', false, '{hand,idempotency}', NULL, NULL, false),
	('throughput_2', 'throughput, 2 clients', 'per second', false, '{floor,hand,idempotency}', NULL, NULL, false),
	('throughput_8', 'throughput, 8 clients', 'per second', false, '{floor,hand,idempotency}', NULL, NULL, false);

-- Replays: each loop reads the stored responses of p_keys repeatedly, until it has read
-- p_times. All keys were charged for customer 1, amount 12.50.

-- The minimum: read the response by primary key.
CREATE FUNCTION bench.replay_select(p_keys text[], p_times integer) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	body jsonb;
BEGIN
	FOR i IN 1 .. p_times LOOP
		SELECT response INTO body FROM bench.hand_key WHERE key = p_keys[1 + i % cardinality(p_keys)];
	END LOOP;
	RETURN body;
END $$;

-- The same, and compare the request.
CREATE FUNCTION bench.replay_select_checked(p_keys text[], p_times integer) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	stored_hash text;
	body jsonb;
BEGIN
	FOR i IN 1 .. p_times LOOP
		SELECT request_hash, response INTO stored_hash, body
		FROM bench.hand_key WHERE key = p_keys[1 + i % cardinality(p_keys)];
		IF stored_hash <> encode(sha256(convert_to(
			jsonb_build_object('customer', 1, 'amount', 12.50)::text, 'UTF8')), 'hex') THEN
			RAISE 'key was used with another request';
		END IF;
	END LOOP;
	RETURN body;
END $$;

CREATE FUNCTION bench.replay_claim(p_keys text[], p_times integer) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	FOR i IN 1 .. p_times LOOP
		op := idempotency.claim('charge.create', p_keys[1 + i % cardinality(p_keys)]);
		IF NOT op.replayed THEN RAISE 'nothing to replay'; END IF;
	END LOOP;
	RETURN op.response;
END $$;

CREATE FUNCTION bench.replay_claim_checked(p_keys text[], p_times integer) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	FOR i IN 1 .. p_times LOOP
		op := idempotency.claim('charge.create', p_keys[1 + i % cardinality(p_keys)],
			jsonb_build_object('customer', 1, 'amount', 12.50));
		IF NOT op.replayed THEN RAISE 'nothing to replay'; END IF;
	END LOOP;
	RETURN op.response;
END $$;

-- Keys for replays: one thousand, in the format of UUIDv7.
CREATE FUNCTION bench.replay_keys() RETURNS text[]
LANGUAGE sql STABLE
BEGIN ATOMIC
	SELECT array_agg(format('01930000-%s-7%s-8%s-%s', 1000 + n,
		100 + n * 7 % 900, 100 + n * 13 % 900, 100000000000 + n * 7919) ORDER BY md5(n::text))
	FROM generate_series(1, 1000) AS n;
END;
