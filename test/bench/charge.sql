-- One charge: the contestants of the suites keys, reaper and scale. Each does the same
-- work in one function and one transaction, and returns the same JSON. Their numbers, 0
-- to 2, are those in the pgbench scripts.

CREATE EXTENSION idempotency;

-- The business table.
CREATE TABLE bench.charge (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer integer NOT NULL,
	amount numeric(12, 2) NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now()
);

-- floor: the business insert, without retry protection.
CREATE FUNCTION bench.charge_0(p_key text, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	body json;
BEGIN
	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;
	RETURN body;
END $$;

-- hand: the pattern found in articles and in production, written carefully: one call of
-- the clock, no unnecessary statement, no exception block.
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

-- idempotency: the procedure in the README.
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
