-- test/stress/schema.sql
--
-- Functions that the clients of the stress test call, and their business tables. No
-- table has a unique key: only the extension ensures that a key has one effect. One
-- table is guarded by statement, the other by row. The setting stress.break makes a
-- function wrong on purpose, so that the test can show that it detects the mistake.

\ir ../edition.sql
CREATE SCHEMA stress;

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

-- broken returns, sometimes, that the caller must make the mistake p_what.
CREATE FUNCTION stress.broken(p_what text) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
	SELECT current_setting('stress.break', true) IS NOT DISTINCT FROM p_what
		AND random() < 0.5
$$;

-- plant stores an expired record for the clients to find.
CREATE FUNCTION stress.plant(p_scope text, p_key text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency.claim(p_scope, p_key, retention => '1 microsecond');
	PERFORM idempotency.complete(p_scope, p_key, '{"stale": true}');
END
$$;

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
