-- The suite leases: an operation with an effect outside the database, in three
-- transactions: claim, renew, and complete together with the business insert. The floor
-- is the business insert alone.

CREATE EXTENSION idempotency;

INSERT INTO bench.figure (figure, title, unit, above_floor, contestants, target, absolute) VALUES
	('cpu', 'claim, renew, complete: server CPU above the floor', 'us', true, '{floor,hand,idempotency}', NULL, false),
	('wal', 'claim, renew, complete: WAL above the floor', 'bytes', true, '{floor,hand,idempotency}', NULL, false),
	('hot', 'updates that touch no index', '%', false, '{hand,idempotency}', NULL, false),
	('dead', 'dead tuples in the key table', 'tuples', false, '{hand,idempotency}', NULL, false),
	('bytes', 'heap and index per key', 'bytes', false, '{hand,idempotency}', NULL, false),
	('wake_preloaded', 'a waiter wakes up, preloaded: median', 'ms', false, '{idempotency}', NULL, true),
	('wake_preloaded_p99', 'a waiter wakes up, preloaded: p99', 'ms', false, '{idempotency}', 5, true),
	('wake_polling', 'a waiter wakes up, polling: median', 'ms', false, '{idempotency}', NULL, true),
	('wake_polling_p99', 'a waiter wakes up, polling: p99', 'ms', false, '{idempotency}', NULL, true);

-- The business table: the result of the call to the provider.
CREATE TABLE bench.charge (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer integer NOT NULL,
	amount numeric(12, 2) NOT NULL,
	created_at timestamptz NOT NULL DEFAULT now()
);

-- floor
CREATE FUNCTION bench.finish_0(p_key text, p_token bigint, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	body json;
BEGIN
	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;
	RETURN body;
END $$;

-- hand: an INSERT and two UPDATEs, written carefully. One index finds abandoned leases
-- and, a day later, rows to delete; completing does not change that index. The owner
-- makes the token, which costs the server nothing. It stores no request. It uses
-- clock_timestamp() instead of now(), which is the same for all transactions of one
-- message.
CREATE TABLE bench.hand_key (
	key text PRIMARY KEY,
	request_hash text NOT NULL,
	state text NOT NULL,
	owner bigint NOT NULL,
	lease_until timestamptz NOT NULL,
	response jsonb,
	created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON bench.hand_key (lease_until);

CREATE FUNCTION bench.claim_1(p_key text, p_owner bigint, p_customer integer, p_amount numeric) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	hash text := encode(sha256(convert_to(
		jsonb_build_object('customer', p_customer, 'amount', p_amount)::text, 'UTF8')), 'hex');
	stored record;
BEGIN
	INSERT INTO bench.hand_key (key, request_hash, state, owner, lease_until)
	VALUES (p_key, hash, 'in_progress', p_owner, clock_timestamp() + interval '30 seconds')
	ON CONFLICT (key) DO NOTHING;
	IF FOUND THEN RETURN 'claimed'; END IF;

	SELECT request_hash, state INTO stored FROM bench.hand_key WHERE key = p_key;
	IF stored.request_hash <> hash THEN
		RAISE 'key % was used with another request', p_key;
	ELSIF stored.state = 'completed' THEN
		RETURN stored.state;
	END IF;

	UPDATE bench.hand_key SET owner = p_owner, lease_until = clock_timestamp() + interval '30 seconds'
	WHERE key = p_key AND state = 'in_progress' AND lease_until < clock_timestamp();
	IF NOT FOUND THEN
		RAISE 'request % is in progress', p_key;
	END IF;
	RETURN 'taken_over';
END $$;

CREATE FUNCTION bench.renew_1(p_key text, p_owner bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	UPDATE bench.hand_key SET lease_until = clock_timestamp() + interval '30 seconds'
	WHERE key = p_key AND owner = p_owner AND state = 'in_progress';
	IF NOT FOUND THEN
		RAISE 'the lease of % is lost', p_key;
	END IF;
END $$;

CREATE FUNCTION bench.finish_1(p_key text, p_owner bigint, p_customer integer, p_amount numeric) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
	body jsonb;
BEGIN
	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING jsonb_build_object('id', id, 'status', 'created') INTO body;

	UPDATE bench.hand_key SET state = 'completed', response = body
	WHERE key = p_key AND owner = p_owner AND state = 'in_progress';
	IF NOT FOUND THEN
		RAISE 'the lease of % is lost', p_key;
	END IF;
	RETURN body;
END $$;

-- idempotency
CREATE FUNCTION bench.finish_2(p_key text, p_token bigint, p_customer integer, p_amount numeric) RETURNS json
LANGUAGE plpgsql AS $$
DECLARE
	body json;
BEGIN
	INSERT INTO bench.charge (customer, amount) VALUES (p_customer, p_amount)
	RETURNING json_build_object('id', id, 'status', 'created') INTO body;

	RETURN idempotency.complete('charge.create', p_key, body, 201, token => p_token);
END $$;

-- The percentage of HOT updates among the updates of a contestant's table. A table
-- without updates has none.
CREATE FUNCTION bench.hot_share(p_table regclass) RETURNS double precision
LANGUAGE sql STABLE
RETURN 100.0 * pg_stat_get_tuples_hot_updated(p_table) / nullif(pg_stat_get_tuples_updated(p_table), 0);

-- ---------------------------------------------------------------------------
-- Waiting sessions: each waits for one owner, which starts its work when the session
-- waits.
-- ---------------------------------------------------------------------------

CREATE TABLE bench.waiting (
	key text PRIMARY KEY,
	started_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	returned_at timestamptz
);

-- Returns when the key has a lease.
CREATE PROCEDURE bench.await_owner(p_key text)
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
	WHILE (idempotency.peek('wake', p_key)).outcome IS DISTINCT FROM 'in_progress' LOOP
		IF clock_timestamp() > deadline THEN
			RAISE 'no session claims %', p_key;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.001);
	END LOOP;
END $$;

-- Returns when a session is about to wait for the key.
CREATE PROCEDURE bench.await_waiter(p_key text)
LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '30 seconds';
BEGIN
	WHILE NOT EXISTS (SELECT FROM bench.waiting WHERE key = p_key) LOOP
		IF clock_timestamp() > deadline THEN
			RAISE 'no session waits for %', p_key;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.001);
	END LOOP;
END $$;

-- Waits for the owner of the key, and records the time when the wait ended.
CREATE FUNCTION bench.wait_for(p_key text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	IF NOT (idempotency.claim('wake', p_key, wait => interval '30 seconds')).replayed THEN
		RAISE 'nothing to replay for %', p_key;
	END IF;
	UPDATE bench.waiting SET returned_at = clock_timestamp() WHERE key = p_key;
END $$;

-- Converts the records of the waiting sessions into samples, in milliseconds: from the
-- owner's commit, whose time the server stores with track_commit_timestamp, to the end
-- of the wait, both by the server's clock. Each waiting session counts.
CREATE PROCEDURE bench.sample_waiters(p_round integer, p_figure text, p_waiters bigint)
LANGUAGE plpgsql AS $$
DECLARE
	latencies double precision[] := array_agg(
			1000 * extract(epoch FROM w.returned_at - pg_xact_commit_timestamp(k.xmin)))
		FROM bench.waiting AS w
		JOIN idempotency.key AS k ON k.scope = 'wake' AND k.key = w.key::idempotency.keytext
		WHERE pg_xact_commit_timestamp(k.xmin) > w.started_at;
BEGIN
	IF coalesce(cardinality(latencies), 0) <> p_waiters THEN
		RAISE '% waiters have waited, not %', cardinality(latencies), p_waiters;
	END IF;
	INSERT INTO bench.sample
	SELECT p_round, p_figure || part, 'idempotency', percentile_cont(share) WITHIN GROUP (ORDER BY latency)
	FROM unnest(latencies) AS latency, (VALUES ('', 0.5), ('_p99', 0.99)) AS p (part, share)
	GROUP BY part, share;
	TRUNCATE bench.waiting;
END $$;
