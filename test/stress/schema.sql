-- test/stress/schema.sql
--
-- Functions that the clients of the stress test call, and their business tables. No
-- table has a unique key: only the extension ensures that a key has one effect. Some are
-- guarded, by statement or by row. The setting stress.break makes a function wrong on
-- purpose, so that the test can show that it detects the mistake.

\ir ../edition.sql
CREATE SCHEMA stress;

-- broken returns, sometimes, that the caller must make the mistake p_what.
CREATE FUNCTION stress.broken(p_what text) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
	SELECT current_setting('stress.break', true) IS NOT DISTINCT FROM p_what
		AND random() < 0.3
$$;

-- plant stores an expired row for the clients to find: an outcome, or an abandoned lease.
CREATE FUNCTION stress.plant(p_scope text, p_key text, p_leased boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF p_leased THEN
		PERFORM idempotency.claim(p_scope, p_key, lease => '1 microsecond', retention => '1 microsecond');
	ELSE
		PERFORM idempotency.claim(p_scope, p_key, retention => '1 microsecond');
		PERFORM idempotency.complete(p_scope, p_key, '{"stale": true}');
	END IF;
END
$$;

-- ---------------------------------------------------------------------------
-- Retries
-- ---------------------------------------------------------------------------

CREATE TABLE stress.charges (
	key text NOT NULL,
	amount integer NOT NULL CHECK (amount > 0),
	attempt bigint NOT NULL
);
CREATE TABLE stress.deliveries (LIKE stress.charges INCLUDING ALL);

CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON stress.charges
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('stress/charge');
CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON stress.deliveries
	FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('stress/inbox');

-- undo makes the mistakes that a savepoint rolls back: claim, write, complete.
CREATE FUNCTION stress.undo(p_key text, p_request text, p_attempt bigint, p_wait interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('stress/charge', p_key, p_request, wait => p_wait);
	IF NOT op.replayed THEN
		INSERT INTO stress.charges VALUES (p_key, 1, p_attempt);
		PERFORM idempotency.complete('stress/charge', p_key, '{"undone": true}');
	END IF;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'ST002';
EXCEPTION
	WHEN SQLSTATE 'ST002' THEN
		NULL;
END
$$;

-- charge is the plain stored procedure. p_ending selects its end; an outcome of NULL
-- stands for a claim that was released.
CREATE FUNCTION stress.charge(
	p_key text, p_request text, p_amount integer, p_attempt bigint,
	p_wait interval, p_ending text, p_delay double precision,
	p_status integer, p_headers text, p_response text)
	RETURNS idempotency.operation
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	op idempotency.operation;
BEGIN
	IF stress.broken('claim') THEN
		INSERT INTO stress.charges VALUES (p_key, p_amount, p_attempt);
		op.outcome := NULL;
		RETURN op;
	END IF;

	IF p_ending = 'undo' THEN
		PERFORM stress.undo(p_key, p_request, p_attempt, p_wait);
	END IF;

	op := idempotency.claim('stress/charge', p_key, p_request, wait => p_wait);
	IF op.replayed THEN
		RETURN op;
	END IF;
	PERFORM pg_sleep(p_delay);

	IF p_ending = 'release' THEN
		PERFORM idempotency.release('stress/charge', p_key);
		op.outcome := NULL;
		RETURN op;
	END IF;

	BEGIN
		IF NOT stress.broken('effect') THEN
			INSERT INTO stress.charges VALUES (p_key, p_amount, p_attempt);
		END IF;
		IF p_ending = 'decline' AND NOT stress.broken('failure') THEN
			RAISE check_violation;
		END IF;
	EXCEPTION
		WHEN check_violation THEN
			NULL;
	END;

	IF p_ending = 'raise' THEN
		RAISE EXCEPTION 'a transient failure' USING ERRCODE = 'ST001';
	ELSIF p_ending = 'forget' THEN
		RETURN op;
	ELSIF p_ending = 'decline' THEN
		PERFORM idempotency.fail('stress/charge', p_key, p_response, p_status, p_headers);
	ELSE
		PERFORM idempotency.complete('stress/charge', p_key, p_response, p_status, p_headers);
	END IF;

	op.status := p_status;
	op.headers := p_headers;
	op.response := p_response;
	op.failed := p_ending = 'decline';
	IF stress.broken('answer') THEN
		op.response := json_build_object('attempt', p_attempt, 'broken', true);
	END IF;
	RETURN op;
END
$$;

-- charge_each commits after each key, inside one CALL. (A procedure with its own
-- search_path cannot; every name in it is qualified.)
CREATE PROCEDURE stress.charge_each(p_keys text[], p_requests text[], p_amounts integer[], p_attempt bigint)
LANGUAGE plpgsql
AS $$
BEGIN
	FOR i IN 1 .. pg_catalog.cardinality(p_keys) LOOP
		PERFORM stress.charge(p_keys[i], p_requests[i], p_amounts[i], p_attempt, NULL, 'succeed', 0,
			201, NULL, pg_catalog.format('{"attempt": %s, "each": true}', p_attempt));
		COMMIT;
	END LOOP;
END
$$;

-- handle is the handler of run(). It reads its attempt from settings, because the
-- request is the same in all attempts.
CREATE FUNCTION stress.handle(p_request idempotency.document) RETURNS json
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	attempt bigint := current_setting('stress.attempt');
	ending text := current_setting('stress.ending');
BEGIN
	INSERT INTO stress.charges
	VALUES (p_request::json ->> 'key', (p_request::json ->> 'amount')::numeric, attempt);
	PERFORM pg_sleep(current_setting('stress.delay')::double precision);
	IF ending = 'decline' THEN
		RAISE EXCEPTION 'declined by attempt %', attempt USING ERRCODE = 'IKFIN';
	ELSIF ending = 'raise' THEN
		RAISE EXCEPTION 'a transient failure' USING ERRCODE = 'ST001';
	END IF;
	RETURN format('{"by":"run",  "attempt":%s}', attempt);
END
$$;

-- deliver is the plain consumer of one message.
CREATE FUNCTION stress.deliver(
	p_key text, p_amount integer, p_attempt bigint, p_ending text, p_delay double precision)
	RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF p_ending = 'undo' THEN
		BEGIN
			IF idempotency.once('stress/inbox', p_key) THEN
				INSERT INTO stress.deliveries VALUES (p_key, 1, p_attempt);
			END IF;
			RAISE EXCEPTION 'undo' USING ERRCODE = 'ST002';
		EXCEPTION
			WHEN SQLSTATE 'ST002' THEN
				NULL;
		END;
	END IF;

	IF NOT idempotency.once('stress/inbox', p_key) AND NOT stress.broken('inbox') THEN
		RETURN false;
	END IF;
	PERFORM pg_sleep(p_delay);
	INSERT INTO stress.deliveries VALUES (p_key, p_amount, p_attempt);
	IF p_ending = 'raise' THEN
		RAISE EXCEPTION 'a transient failure' USING ERRCODE = 'ST001';
	END IF;
	RETURN true;
END
$$;

-- deliver_many consumes a batch, and returns the messages that were new.
CREATE FUNCTION stress.deliver_many(p_keys text[], p_amounts integer[], p_attempt bigint, p_delay double precision)
	RETURNS SETOF text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	fresh text[] := ARRAY(SELECT idempotency.once_many('stress/inbox', p_keys));
BEGIN
	PERFORM pg_sleep(p_delay);
	INSERT INTO stress.deliveries
	SELECT DISTINCT m.key, m.amount, p_attempt
	FROM unnest(p_keys, p_amounts) AS m (key, amount)
	WHERE m.key = ANY (fresh);
	RETURN QUERY SELECT unnest(fresh);
END
$$;

-- ---------------------------------------------------------------------------
-- Leases: the provider, an external service, to which each worker has a separate connection.
-- It charges once for each key.
-- ---------------------------------------------------------------------------

CREATE SCHEMA provider;

CREATE TABLE provider.charges (
	id bigint GENERATED ALWAYS AS IDENTITY,
	key uuid PRIMARY KEY,
	memo text NOT NULL,
	amount integer NOT NULL,
	declined boolean NOT NULL,
	asked integer NOT NULL
);

CREATE FUNCTION provider.charge(p_key uuid, p_memo text, p_amount integer)
	RETURNS provider.charges
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
	INSERT INTO provider.charges (key, memo, amount, declined, asked)
	VALUES (p_key, p_memo, p_amount, p_amount % 8 = 0, 1)
	ON CONFLICT (key) DO UPDATE SET asked = charges.asked + 1
	RETURNING *
$$;

-- ---------------------------------------------------------------------------
-- The business tables of leases. One is guarded, the other is not.
-- ---------------------------------------------------------------------------

CREATE TABLE stress.orders (
	key text NOT NULL,
	amount integer NOT NULL,
	attempt bigint NOT NULL,
	charge bigint NOT NULL
);
CREATE TABLE stress.bookings (LIKE stress.orders INCLUDING ALL);
CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON stress.bookings
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('stress/lease');

-- The mark of a server that has not crashed since the mark was set.
CREATE UNLOGGED TABLE stress.alive ();

-- Every step of an operation, in its own transaction, under the lock of its key. The log of a
-- key, ordered by ID, is therefore that key's history. (A transaction holds the lock to its end.)
CREATE TABLE stress.log (
	id bigint GENERATED ALWAYS AS IDENTITY,
	key text NOT NULL,
	event text NOT NULL,
	worker bigint,
	token bigint,
	attempt integer,
	at timestamptz,
	until timestamptz,
	point text,
	state text
);
CREATE INDEX ON stress.log (key, id);

-- spoil changes the row of a lease in a forbidden way.
CREATE FUNCTION stress.spoil(p_key text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF stress.broken('early') THEN
		UPDATE idempotency.key SET leased_until = '-infinity'
		WHERE scope = 'stress/lease' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF stress.broken('checkpoint') THEN
		UPDATE idempotency.key SET recovery_point = NULL, recovery_state = NULL
		WHERE scope = 'stress/lease' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF stress.broken('reap') THEN
		DELETE FROM idempotency.key
		WHERE scope = 'stress/lease' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF stress.broken('block') THEN
		UPDATE idempotency.key SET leased_until = '9999-01-01'
		WHERE scope = 'stress/lease' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	END IF;
END
$$;

-- ---------------------------------------------------------------------------
-- The steps of a worker
-- ---------------------------------------------------------------------------

-- granted logs a claim that was granted. It reads the end of the lease from its row,
-- because no call returns it to the microsecond.
CREATE FUNCTION stress.granted(p_key text, p_worker bigint, op idempotency.operation) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun timestamptz := clock_timestamp();
	ends timestamptz;
BEGIN
	IF op.token IS NOT NULL THEN
		SELECT k.leased_at, k.leased_until INTO STRICT begun, ends FROM idempotency.key AS k
		WHERE k.scope = 'stress/lease' AND k.key = p_key::idempotency.keytext AND k.token = op.token;
	END IF;
	INSERT INTO stress.log (key, event, worker, token, attempt, at, until, point, state)
	VALUES (p_key, op.outcome, p_worker, op.token, op.attempt, begun, ends, op.recovery_point, op.state);
END
$$;

-- claim claims, with a lease unless that is NULL, or returns why not.
CREATE FUNCTION stress.claim(p_key text, p_worker bigint, p_request text, p_lease interval,
	p_wait interval, p_try boolean) RETURNS idempotency.operation
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	op idempotency.operation;
BEGIN
	PERFORM stress.spoil(p_key);
	IF p_try THEN
		op := idempotency.try_claim('stress/lease', p_key, p_request, lease => p_lease, wait => p_wait);
	ELSE
		op := idempotency.claim('stress/lease', p_key, p_request, lease => p_lease, wait => p_wait);
	END IF;
	IF op.outcome IN ('claimed', 'taken_over') THEN
		PERFORM stress.granted(p_key, p_worker, op);
	END IF;
	RETURN op;
END
$$;

-- claim_abandoned takes over abandoned operations.
CREATE FUNCTION stress.claim_abandoned(p_worker bigint, p_lease interval, p_max integer)
	RETURNS SETOF idempotency.abandoned
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	found idempotency.abandoned;
	op idempotency.operation;
BEGIN
	FOR found IN SELECT * FROM idempotency.claim_abandoned('stress/lease', p_lease, p_max) LOOP
		op.outcome := 'taken_over';
		op.token := found.token;
		op.attempt := found.attempt;
		op.recovery_point := found.recovery_point;
		op.state := found.state;
		PERFORM stress.granted(found.key, p_worker, op);
		RETURN NEXT found;
	END LOOP;
END
$$;

CREATE FUNCTION stress.renew(p_key text, p_worker bigint, p_token bigint, p_lease interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	ends timestamptz := idempotency.renew('stress/lease', p_key, p_token, p_lease);
BEGIN
	INSERT INTO stress.log (key, event, worker, token, until)
	VALUES (p_key, 'renewed', p_worker, p_token, ends);
END
$$;

CREATE FUNCTION stress.checkpoint(p_key text, p_worker bigint, p_token bigint, p_point text, p_state text)
	RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency.checkpoint('stress/lease', p_key, p_token, p_point, p_state);
	INSERT INTO stress.log (key, event, worker, token, point, state)
	VALUES (p_key, 'checkpoint', p_worker, p_token, p_point, p_state);
END
$$;

CREATE FUNCTION stress.release(p_key text, p_worker bigint, p_token bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency.release('stress/lease', p_key, p_token);
	INSERT INTO stress.log (key, event, worker, token) VALUES (p_key, 'released', p_worker, p_token);
END
$$;

-- finish stores the outcome. The token is NULL for a claim without a lease.
CREATE FUNCTION stress.finish(p_key text, p_worker bigint, p_token bigint, p_failed boolean,
	p_status integer, p_headers text, p_response text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF stress.broken('answer') THEN
		p_response := json_build_object('attempt', p_worker, 'broken', true);
	END IF;
	IF p_token IS NOT NULL AND stress.broken('token') THEN
		UPDATE idempotency.key
		SET token = NULL, status = p_status, headers = p_headers::json, response = p_response::json,
			expires_at = clock_timestamp() + interval '1 day'
		WHERE scope = 'stress/lease' AND key = p_key::idempotency.keytext;
	ELSIF p_failed THEN
		PERFORM idempotency.fail('stress/lease', p_key, p_response, p_status, p_headers, p_token);
	ELSE
		PERFORM idempotency.complete('stress/lease', p_key, p_response, p_status, p_headers, p_token);
	END IF;
	INSERT INTO stress.log (key, event, worker, token, at)
	VALUES (p_key, 'finished', p_worker, p_token, clock_timestamp());
END
$$;

-- overtaken returns whether a later step of the operation invalidated that token, or
-- the grant itself did not commit.
CREATE FUNCTION stress.overtaken(p_key text, p_token bigint) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
	SELECT NOT EXISTS (
		SELECT FROM stress.log AS mine
		WHERE mine.key = p_key AND mine.token = p_token AND mine.event IN ('claimed', 'taken_over')
			AND NOT EXISTS (
				SELECT FROM stress.log AS later
				WHERE later.key = p_key AND later.id > mine.id
					AND later.event IN ('claimed', 'taken_over', 'released', 'evicted', 'finished')))
$$;

-- ---------------------------------------------------------------------------
-- Evictions
-- ---------------------------------------------------------------------------

-- evict deletes an operation that is leased. It needs a fixed snapshot, under which
-- forget() fails with 40001 for a row that changed since peek().
CREATE FUNCTION stress.evict(p_key text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF (idempotency.peek('stress/lease', p_key)).outcome IS DISTINCT FROM 'in_progress'
		OR NOT idempotency.forget('stress/lease', p_key) THEN
		RETURN false;
	END IF;
	INSERT INTO stress.log (key, event) VALUES (p_key, 'evicted');
	RETURN true;
END
$$;
