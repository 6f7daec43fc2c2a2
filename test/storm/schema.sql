-- test/storm/schema.sql
--
-- Functions that the workers of the storm call, and their tables. Every step of an
-- operation is logged in its own transaction, under the lock of its key. The log of a
-- key, ordered by ID, is therefore that key's history. (A transaction holds the lock
-- to its end.) The setting stress.break makes a function wrong on purpose, so that the
-- test can show that it detects the mistake.

\ir ../edition.sql
CREATE SCHEMA storm;
CREATE SCHEMA provider;

-- No session waits long for a key: its owner might be stalled.
SELECT format('ALTER DATABASE %I SET idempotency.wait = %L', current_database(), '300ms')
\gexec

-- ---------------------------------------------------------------------------
-- The provider: an external service, to which each worker has a separate connection. It
-- charges once for each key.
-- ---------------------------------------------------------------------------

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
-- The business tables. They have no unique key: only the extension ensures that a key
-- has one effect. One table is guarded, the other is not.
-- ---------------------------------------------------------------------------

CREATE TABLE storm.orders (
	key text NOT NULL,
	amount integer NOT NULL,
	worker bigint NOT NULL,
	charge bigint NOT NULL
);
CREATE TABLE storm.bookings (LIKE storm.orders INCLUDING ALL);
CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON storm.bookings
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('storm/charge');

-- The mark of a server that has not crashed since the mark was set.
CREATE UNLOGGED TABLE storm.alive ();

CREATE TABLE storm.log (
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
CREATE INDEX ON storm.log (key, id);

-- broken returns, sometimes, that the caller must make the mistake p_what.
CREATE FUNCTION storm.broken(p_what text) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp
AS $$
	SELECT current_setting('stress.break', true) IS NOT DISTINCT FROM p_what
		AND random() < 0.3
$$;

-- spoil changes the row of a lease in a forbidden way.
CREATE FUNCTION storm.spoil(p_key text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF storm.broken('early') THEN
		UPDATE idempotency.key SET leased_until = '-infinity'
		WHERE scope = 'storm/charge' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF storm.broken('checkpoint') THEN
		UPDATE idempotency.key SET recovery_point = NULL, recovery_state = NULL
		WHERE scope = 'storm/charge' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF storm.broken('reap') THEN
		DELETE FROM idempotency.key
		WHERE scope = 'storm/charge' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	ELSIF storm.broken('block') THEN
		UPDATE idempotency.key SET leased_until = '9999-01-01'
		WHERE scope = 'storm/charge' AND key = p_key::idempotency.keytext AND token IS NOT NULL;
	END IF;
END
$$;

-- ---------------------------------------------------------------------------
-- The steps of a worker
-- ---------------------------------------------------------------------------

-- granted logs a claim that was granted. It reads the end of the lease from its row,
-- because no call returns it to the microsecond.
CREATE FUNCTION storm.granted(p_key text, p_worker bigint, op idempotency.operation) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	begun timestamptz := clock_timestamp();
	ends timestamptz;
BEGIN
	IF op.token IS NOT NULL THEN
		SELECT k.leased_at, k.leased_until INTO STRICT begun, ends FROM idempotency.key AS k
		WHERE k.scope = 'storm/charge' AND k.key = p_key::idempotency.keytext AND k.token = op.token;
	END IF;
	INSERT INTO storm.log (key, event, worker, token, attempt, at, until, point, state)
	VALUES (p_key, op.outcome, p_worker, op.token, op.attempt, begun, ends, op.recovery_point, op.state);
END
$$;

-- claim claims, with a lease unless that is NULL, or returns why not.
CREATE FUNCTION storm.claim(p_key text, p_worker bigint, p_request text, p_lease interval,
	p_wait interval, p_try boolean) RETURNS idempotency.operation
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	op idempotency.operation;
BEGIN
	PERFORM storm.spoil(p_key);
	IF p_try THEN
		op := idempotency.try_claim('storm/charge', p_key, p_request, lease => p_lease, wait => p_wait);
	ELSE
		op := idempotency.claim('storm/charge', p_key, p_request, lease => p_lease, wait => p_wait);
	END IF;
	IF op.outcome IN ('claimed', 'taken_over') THEN
		PERFORM storm.granted(p_key, p_worker, op);
	END IF;
	RETURN op;
END
$$;

-- claim_abandoned takes over abandoned operations.
CREATE FUNCTION storm.claim_abandoned(p_worker bigint, p_lease interval, p_max integer)
	RETURNS SETOF idempotency.abandoned
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	found idempotency.abandoned;
	op idempotency.operation;
BEGIN
	FOR found IN SELECT * FROM idempotency.claim_abandoned('storm/charge', p_lease, p_max) LOOP
		op.outcome := 'taken_over';
		op.token := found.token;
		op.attempt := found.attempt;
		op.recovery_point := found.recovery_point;
		op.state := found.state;
		PERFORM storm.granted(found.key, p_worker, op);
		RETURN NEXT found;
	END LOOP;
END
$$;

CREATE FUNCTION storm.renew(p_key text, p_worker bigint, p_token bigint, p_lease interval) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	ends timestamptz := idempotency.renew('storm/charge', p_key, p_token, p_lease);
BEGIN
	INSERT INTO storm.log (key, event, worker, token, until)
	VALUES (p_key, 'renewed', p_worker, p_token, ends);
END
$$;

CREATE FUNCTION storm.checkpoint(p_key text, p_worker bigint, p_token bigint, p_point text, p_state text)
	RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency.checkpoint('storm/charge', p_key, p_token, p_point, p_state);
	INSERT INTO storm.log (key, event, worker, token, point, state)
	VALUES (p_key, 'checkpoint', p_worker, p_token, p_point, p_state);
END
$$;

CREATE FUNCTION storm.release(p_key text, p_worker bigint, p_token bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	PERFORM idempotency.release('storm/charge', p_key, p_token);
	INSERT INTO storm.log (key, event, worker, token) VALUES (p_key, 'released', p_worker, p_token);
END
$$;

-- finish stores the outcome. The token is NULL for a claim without a lease.
CREATE FUNCTION storm.finish(p_key text, p_worker bigint, p_token bigint, p_failed boolean,
	p_status integer, p_headers text, p_response text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF storm.broken('answer') THEN
		p_response := json_build_object('attempt', p_worker, 'broken', true);
	END IF;
	IF p_token IS NOT NULL AND storm.broken('token') THEN
		UPDATE idempotency.key
		SET token = NULL, status = p_status, headers = p_headers::json, response = p_response::json,
			expires_at = clock_timestamp() + interval '1 day'
		WHERE scope = 'storm/charge' AND key = p_key::idempotency.keytext;
	ELSIF p_failed THEN
		PERFORM idempotency.fail('storm/charge', p_key, p_response, p_status, p_headers, p_token);
	ELSE
		PERFORM idempotency.complete('storm/charge', p_key, p_response, p_status, p_headers, p_token);
	END IF;
	INSERT INTO storm.log (key, event, worker, token, at)
	VALUES (p_key, 'finished', p_worker, p_token, clock_timestamp());
END
$$;

-- overtaken returns whether a later step of the operation invalidated that token, or
-- the grant itself did not commit.
CREATE FUNCTION storm.overtaken(p_key text, p_token bigint) RETURNS boolean
LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$
	SELECT NOT EXISTS (
		SELECT FROM storm.log AS mine
		WHERE mine.key = p_key AND mine.token = p_token AND mine.event IN ('claimed', 'taken_over')
			AND NOT EXISTS (
				SELECT FROM storm.log AS later
				WHERE later.key = p_key AND later.id > mine.id
					AND later.event IN ('claimed', 'taken_over', 'released', 'evicted', 'finished')))
$$;

-- ---------------------------------------------------------------------------
-- Others
-- ---------------------------------------------------------------------------

-- evict deletes an operation that is leased. It needs a fixed snapshot, under which
-- forget() fails with 40001 for a row that changed since peek().
CREATE FUNCTION storm.evict(p_key text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	IF (idempotency.peek('storm/charge', p_key)).outcome IS DISTINCT FROM 'in_progress'
		OR NOT idempotency.forget('storm/charge', p_key) THEN
		RETURN false;
	END IF;
	INSERT INTO storm.log (key, event) VALUES (p_key, 'evicted');
	RETURN true;
END
$$;

-- plant stores an expired row for the workers to find: an outcome, or an abandoned
-- lease.
CREATE FUNCTION storm.plant(p_scope text, p_key text, p_leased boolean) RETURNS void
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
