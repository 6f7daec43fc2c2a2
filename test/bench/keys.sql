-- The contestants of the suite keys.  Each does the same work, one charge, in
-- one function and one transaction, and answers with the same JSON.  Their
-- numbers, 0 to 2, are those of the scripts that pgbench plays.

CREATE EXTENSION idempotency;

INSERT INTO bench.figure (figure, title, unit, above_floor, contestants, target, aim, absolute) VALUES
	('cpu', 'server CPU above the floor', 'us', true, '{floor,hand,idempotency}', 0.5, 0.4, false),
	('wal', 'WAL above the floor', 'bytes', true, '{floor,hand,idempotency}', 0.55, NULL, false),
	('dead', 'dead tuples in the key table', 'tuples', false, '{hand,idempotency}', 0, NULL, true),
	('bytes', 'heap and index per key', 'bytes', false, '{hand,idempotency}', 0.7, NULL, false),
	('bytes_packed', 'the same after VACUUM FULL', 'bytes', false, '{hand,idempotency}', NULL, NULL, false),
	-- samples of the functions bench.replay_*, which the next three compare
	('replay_all', 'replay', 'us', false, '{}', NULL, NULL, false),
	('replay', 'replay (hand: bare SELECT)', 'us', false, '{hand,idempotency}', 1.3, NULL, false),
	('replay_request', 'replay, request given (hand: bare SELECT)', 'us', false, '{hand,idempotency}', 1.3, NULL, false),
	('replay_checked', 'replay, request given (hand: SELECT and hash)', 'us', false, '{hand,idempotency}', NULL, NULL, false),
	('throughput_2', 'throughput, 2 clients', 'per second', false, '{floor,hand,idempotency}', NULL, NULL, false),
	('throughput_8', 'throughput, 8 clients', 'per second', false, '{floor,hand,idempotency}', NULL, NULL, false);

-- The business table.
CREATE TABLE bench.charge (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer integer NOT NULL,
	amount numeric(12, 2) NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now()
);

-- floor: the business insert, and nothing for retries.
CREATE FUNCTION bench.charge_0(p_key text, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	body json;
BEGIN
	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;
	RETURN body;
END $$;

-- hand: the pattern that one finds in articles and in production, with care
-- taken: one look at the clock, no statement too many, no exception block.
CREATE TABLE bench.hand_key (
	key text PRIMARY KEY,
	request_hash text NOT NULL,
	state text NOT NULL,
	response jsonb,
	created_at timestamptz NOT NULL DEFAULT now(),
	expires_at timestamptz NOT NULL
);
CREATE INDEX ON bench.hand_key (expires_at);

CREATE FUNCTION bench.charge_1(p_key text, p_customer integer, p_amount numeric) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	hash text := encode(sha256(convert_to(
		jsonb_build_object('customer', p_customer, 'amount', p_amount)::text, 'UTF8')), 'hex');
	stored record;
	body jsonb;
BEGIN
	INSERT INTO bench.hand_key (key, request_hash, state, expires_at)
	VALUES (p_key, hash, 'in_progress', now() + interval '24 hours')
	ON CONFLICT (key) DO NOTHING;

	IF NOT FOUND THEN
		SELECT request_hash, state, response INTO stored FROM bench.hand_key WHERE key = p_key;
		IF stored.request_hash <> hash THEN
			RAISE 'key % was used with another request', p_key;
		ELSIF stored.state <> 'completed' THEN
			RAISE 'request % is in progress', p_key;
		END IF;
		RETURN stored.response;
	END IF;

	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING jsonb_build_object('id', id, 'status', 'created') INTO body;

	UPDATE bench.hand_key SET state = 'completed', response = body WHERE key = p_key;
	RETURN body;
END $$;

-- idempotency: the procedure of the README.
CREATE FUNCTION bench.charge_2(p_key text, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
	body json;
BEGIN
	op := idempotency.claim('charge.create', p_key,
		jsonb_build_object('customer', p_customer, 'amount', p_amount));
	IF op.replayed THEN RETURN op.response; END IF;

	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;

	RETURN idempotency.complete('charge.create', p_key, body, 201);
END $$;

-- Replays: each loop reads the stored answers of p_keys again and again, until
-- it has read p_times.  All keys were charged for customer 1, amount 12.50.

-- The least that one can do: read the answer by primary key.
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

-- The same, with the check that the request is the same.
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

-- What the driver asks of a contestant's key table.
CREATE FUNCTION bench.key_table(p_contestant text) RETURNS regclass
LANGUAGE sql IMMUTABLE
RETURN CASE p_contestant
	WHEN 'hand' THEN 'bench.hand_key'
	WHEN 'idempotency' THEN 'idempotency.key'
END::regclass;

-- Keys to be replayed: a thousand, in the shape of UUIDv7.
CREATE FUNCTION bench.replay_keys() RETURNS text[]
LANGUAGE sql STABLE
BEGIN ATOMIC
	SELECT array_agg(format('01930000-%s-7%s-8%s-%s', 1000 + n,
		100 + n * 7 % 900, 100 + n * 13 % 900, 100000000000 + n * 7919) ORDER BY md5(n::text))
	FROM generate_series(1, 1000) AS n;
END;
