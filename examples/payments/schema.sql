-- Payments: what stands behind the service of this directory.
--
-- Every write of the service is one call of one function below.  The function finds the
-- tenant, claims the key that his client has sent, does the work, and stores the answer:
-- status, headers and body.  The service passes that on as it is.
--
-- Run it once, as a superuser, all of it or nothing: psql -1 -v ON_ERROR_STOP=1 -f schema.sql

CREATE EXTENSION idempotency;

-- payments_owner owns everything and cannot log in.  payments_app is what the service logs
-- in as: it may call the functions that are granted to it at the end, and nothing else.
CREATE ROLE payments_owner NOLOGIN;
CREATE ROLE payments_app LOGIN;
ALTER ROLE payments_app SET statement_timeout = '10s';

CREATE SCHEMA payments AUTHORIZATION payments_owner;
GRANT USAGE ON SCHEMA payments TO payments_app;
SELECT idempotency.grant_client('payments_owner');

SET ROLE payments_owner;
ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC;

-- ---------------------------------------------------------------------------
-- Tables
-- ---------------------------------------------------------------------------

-- A tenant is an account of this service.  His name is part of every scope, so that his
-- keys are his own, and must leave room in the 255 characters of one.  Of his bearer token
-- only the hash is kept.
CREATE TABLE payments.tenant (
	name       text PRIMARY KEY CHECK (name ~ '^[[:alnum:]./_-]{1,200}$'),
	token_hash bytea NOT NULL UNIQUE CHECK (length(token_hash) = 32)
);

CREATE TABLE payments.charge (
	id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	tenant      text NOT NULL REFERENCES payments.tenant,
	amount      bigint NOT NULL CHECK (amount > 0),   -- in cents
	currency    text NOT NULL,
	description text,
	created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX ON payments.charge (tenant, id);

CREATE TABLE payments.orders (
	id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	tenant          text NOT NULL REFERENCES payments.tenant,
	amount          bigint NOT NULL CHECK (amount > 0),
	currency        text NOT NULL,
	item            text NOT NULL,
	provider_key    uuid NOT NULL UNIQUE,   -- under which it was charged
	provider_charge text NOT NULL UNIQUE,
	created_at      timestamptz NOT NULL DEFAULT now()
);

-- Nobody writes here without a claimed key: not even a procedure that is written next year.
CREATE TRIGGER charge_needs_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON payments.charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charges/*');
CREATE TRIGGER orders_need_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON payments.orders
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('orders/*');

-- ---------------------------------------------------------------------------
-- Answers
-- ---------------------------------------------------------------------------

-- What the service sends.
CREATE TYPE payments.answer AS (
	status   integer,
	headers  json,
	body     text,
	replayed boolean
);

-- The answer to whoever was not granted the operation: the stored one, byte for byte, or
-- why there is none yet.  A lease says how long its owner may take; a transaction does not.
CREATE FUNCTION payments.answer_to(op idempotency.operation) RETURNS payments.answer
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT CASE op.outcome
		WHEN 'replayed' THEN
			(op.status, op.headers, op.response, true)::payments.answer
		WHEN 'in_progress' THEN
			(409, json_build_object('Content-Type', 'application/problem+json',
				'Retry-After', greatest(1, ceil(coalesce(extract(epoch FROM op.retry_after), 1)))::text),
				idempotency.problem(op), false)::payments.answer
		WHEN 'mismatched' THEN
			(422, '{"Content-Type": "application/problem+json"}', idempotency.problem(op), false)::payments.answer
	END
$$;

-- A refusal for ever, to be stored by fail().
CREATE FUNCTION payments.refusal(p_detail text) RETURNS json
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT json_build_object('type', 'about:blank', 'title', 'Payment Required', 'status', 402, 'detail', p_detail)
$$;

CREATE FUNCTION payments.shown(c payments.charge) RETURNS json
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT json_build_object('id', c.id, 'amount', c.amount, 'currency', c.currency,
		'description', c.description, 'created_at', c.created_at)
$$;

-- The tenant to whom a bearer token belongs, by its SHA-256: so no token comes into a log
-- of this server.
CREATE FUNCTION payments.tenant_of(p_bearer bytea) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	tenant text;
BEGIN
	SELECT t.name INTO tenant FROM payments.tenant t WHERE t.token_hash = p_bearer;
	IF NOT FOUND THEN
		RAISE EXCEPTION 'unknown bearer token' USING ERRCODE = 'PY401';
	END IF;
	RETURN tenant;
END $$;

-- ---------------------------------------------------------------------------
-- Charges: all of the effect is in this database, so the claim has no lease
-- ---------------------------------------------------------------------------

-- Charges, once for all requests with this key.  p_header is the Idempotency-Key header as
-- it came, NULL if none did.
CREATE FUNCTION payments.charge_create(p_bearer bytea, p_header text,
	p_amount bigint, p_currency text, p_description text) RETURNS payments.answer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET idempotency.retention = '24h'
AS $$
DECLARE
	tenant text := payments.tenant_of(p_bearer);
	scope  text := 'charges/' || tenant;
	key    text := idempotency.parse_header(p_header);
	op     idempotency.operation;
	charge payments.charge;
	answer payments.answer;
BEGIN
	op := idempotency.try_claim(scope, key,
		json_build_object('amount', p_amount, 'currency', p_currency, 'description', p_description),
		wait => '1 second');
	IF op.outcome NOT IN ('claimed', 'taken_over') THEN
		RETURN payments.answer_to(op);
	END IF;

	answer.replayed := false;
	IF p_amount > 1000000 THEN
		answer.status := 402;
		answer.headers := '{"Content-Type": "application/problem+json"}';
		answer.body := idempotency.fail(scope, key,
			payments.refusal('A charge can be 10000.00 at most.'), answer.status, answer.headers);
		RETURN answer;
	END IF;

	INSERT INTO payments.charge (tenant, amount, currency, description)
	VALUES (tenant, p_amount, p_currency, p_description)
	RETURNING * INTO charge;

	answer.status := 201;
	answer.headers := json_build_object('Content-Type', 'application/json', 'Location', '/charges/' || charge.id);
	answer.body := idempotency.complete(scope, key, payments.shown(charge), answer.status, answer.headers);
	RETURN answer;
END $$;

-- The last charges of a tenant, newest first.
CREATE FUNCTION payments.charges(p_bearer bytea, p_limit integer) RETURNS json
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	whose text := payments.tenant_of(p_bearer);
BEGIN
	RETURN (
		SELECT json_build_object('charges', coalesce(json_agg(payments.shown(c) ORDER BY c.id DESC), '[]'))
		FROM (
			SELECT * FROM payments.charge AS c
			WHERE c.tenant = whose
			ORDER BY c.id DESC LIMIT p_limit
		) AS c
	);
END $$;

-- One charge of a tenant; NULL if he has none of that number.
CREATE FUNCTION payments.charge_show(p_bearer bytea, p_id bigint) RETURNS json
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	whose text := payments.tenant_of(p_bearer);
BEGIN
	RETURN (
		SELECT payments.shown(c) FROM payments.charge AS c
		WHERE c.tenant = whose AND c.id = p_id
	);
END $$;

-- ---------------------------------------------------------------------------
-- Orders: a provider charges as well, so the claim has a lease
-- ---------------------------------------------------------------------------

-- How long the owner of an order may be silent.  The service renews three times as often.
CREATE FUNCTION payments.lease() RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT interval '10 seconds' $$;

-- An order that somebody is to carry out.  He hands it back with every call.
CREATE TYPE payments.turn AS (
	scope           text,
	key             text,
	token           bigint,   -- proves that the order is his
	provider_key    uuid,     -- what the provider knows this charge by, in every turn the same
	provider_charge text,     -- what it has charged in an earlier turn; NULL: nothing is known
	tenant          text,
	amount          bigint,
	currency        text,
	item            text
);

CREATE FUNCTION payments.turn_of(p_scope text, p_key text, p_request json, op idempotency.operation)
RETURNS payments.turn
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT (p_scope, p_key, op.token, idempotency.derive_key(p_scope, p_key, 'charge'),
		op.state ->> 'provider_charge', substr(p_scope, length('orders/') + 1),
		p_request ->> 'amount', p_request ->> 'currency', p_request ->> 'item')::payments.turn
$$;

-- Begins an order.  Either there is an answer, or the caller gets his turn: he calls the
-- provider, outside of any transaction, and then order_finish() or order_refuse().
CREATE FUNCTION payments.order_begin(p_bearer bytea, p_header text,
	p_amount bigint, p_currency text, p_item text,
	OUT answer payments.answer, OUT turn payments.turn)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET idempotency.retention = '24h'
AS $$
DECLARE
	scope   text := 'orders/' || payments.tenant_of(p_bearer);
	key     text := idempotency.parse_header(p_header);
	request json := json_build_object('amount', p_amount, 'currency', p_currency, 'item', p_item);
	op      idempotency.operation;
BEGIN
	-- The provider remembers a key for longer than we do.  What was ordered with it long ago
	-- is still what it stands for: another order needs another key.
	IF EXISTS (SELECT FROM payments.orders AS o
		WHERE o.provider_key = idempotency.derive_key(scope, key, 'charge')
			AND (o.amount, o.currency, o.item) IS DISTINCT FROM (p_amount, p_currency, p_item)) THEN
		op.outcome := 'mismatched';
	ELSE
		op := idempotency.try_claim(scope, key, request, lease => payments.lease());
	END IF;
	IF op.outcome NOT IN ('claimed', 'taken_over') THEN
		answer := payments.answer_to(op);
		RETURN;
	END IF;

	-- From here on the provider may have charged, so the order must never be forgotten:
	-- one with a checkpoint survives order_yield(), and a completer finds it.
	IF op.outcome = 'claimed' THEN
		PERFORM idempotency.checkpoint(scope, key, op.token, 'charging');
	END IF;
	turn := payments.turn_of(scope, key, request, op);
END $$;

-- The heartbeat.
CREATE FUNCTION payments.order_renew(turn payments.turn) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.renew(turn.scope, turn.key, turn.token, payments.lease())
$$;

-- Notes what the provider has charged: whoever is next need not ask it again.
CREATE FUNCTION payments.order_charged(turn payments.turn, p_provider_charge text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.checkpoint(turn.scope, turn.key, turn.token, 'charged',
		json_build_object('provider_charge', p_provider_charge))
$$;

-- Writes the order and its answer.  Whoever has lost his turn cannot (IK410).
CREATE FUNCTION payments.order_finish(turn payments.turn, p_provider_charge text) RETURNS payments.answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	placed payments.orders;
	answer payments.answer;
BEGIN
	PERFORM idempotency.renew(turn.scope, turn.key, turn.token, payments.lease());

	-- What the provider has charged is one order, however late somebody asks again.
	INSERT INTO payments.orders (tenant, amount, currency, item, provider_key, provider_charge)
	VALUES (turn.tenant, turn.amount, turn.currency, turn.item, turn.provider_key, p_provider_charge)
	ON CONFLICT (provider_key) DO UPDATE SET provider_key = excluded.provider_key
	RETURNING * INTO placed;

	answer.status := 201;
	answer.headers := '{"Content-Type": "application/json"}';
	answer.body := idempotency.complete(turn.scope, turn.key,
		json_build_object('id', placed.id, 'amount', placed.amount, 'currency', placed.currency,
			'item', placed.item, 'provider_charge', placed.provider_charge, 'created_at', placed.created_at),
		answer.status, answer.headers, turn.token);
	answer.replayed := false;
	RETURN answer;
END $$;

-- The provider has refused, for ever: that is the answer.
CREATE FUNCTION payments.order_refuse(turn payments.turn, p_detail text) RETURNS payments.answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	answer payments.answer;
BEGIN
	answer.status := 402;
	answer.headers := '{"Content-Type": "application/problem+json"}';
	answer.body := idempotency.fail(turn.scope, turn.key, payments.refusal(p_detail),
		answer.status, answer.headers, turn.token);
	answer.replayed := false;
	RETURN answer;
END $$;

-- Gives the turn away, since something is in the way for now: the next one need not wait
-- for the end of the lease.
CREATE FUNCTION payments.order_yield(turn payments.turn) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.release(turn.scope, turn.key, turn.token)
$$;

-- For the completer: orders whose owner has died or given his turn away.  One of a tenant,
-- and of ten tenants at most, each time others: what the provider does not take now keeps
-- nobody else waiting.
CREATE FUNCTION payments.orders_abandoned() RETURNS SETOF payments.turn
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT turn.*
	FROM (SELECT name FROM payments.tenant ORDER BY random()) AS tenant,
		idempotency.claim_abandoned('orders/' || tenant.name, lease => payments.lease()) AS a,
		payments.turn_of(a.scope, a.key, a.request, a.operation) AS turn
	LIMIT 10
$$;

-- ---------------------------------------------------------------------------
-- What the service may do
-- ---------------------------------------------------------------------------

GRANT EXECUTE ON FUNCTION
	payments.charge_create(bytea, text, bigint, text, text),
	payments.charges(bytea, integer),
	payments.charge_show(bytea, bigint),
	payments.order_begin(bytea, text, bigint, text, text),
	payments.order_renew(payments.turn),
	payments.order_charged(payments.turn, text),
	payments.order_finish(payments.turn, text),
	payments.order_refuse(payments.turn, text),
	payments.order_yield(payments.turn),
	payments.orders_abandoned()
TO payments_app;

RESET ROLE;
