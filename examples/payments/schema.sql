-- Payments: the database of the service in this directory.
--
-- Every write of the service is one call of one function below. The function finds the
-- tenant, claims the key that the client has sent, does the work, and stores the
-- answer: status, headers and body. The service returns the answer unchanged.
--
-- Run it once as a superuser, in one transaction: psql -1 -v ON_ERROR_STOP=1 -f
-- schema.sql

-- No object of another role captures a name
SET search_path = pg_catalog, pg_temp;

CREATE EXTENSION idempotency;

-- payments_owner owns all objects and cannot log in. The service logs in as
-- payments_app, which can call only the functions granted to it at the end.
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

-- A tenant is an account of this service. Its name is part of every scope, so that each
-- tenant has its own keys, and must be short enough for the 255 characters of a scope.
-- Only the hash of its bearer token is stored.
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
	provider_key    uuid NOT NULL UNIQUE,   -- the key of the charge at the provider
	provider_charge text NOT NULL UNIQUE,
	created_at      timestamptz NOT NULL DEFAULT now()
);

-- No write to these tables without a claimed key, also for procedures added later.
CREATE TRIGGER charge_needs_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON payments.charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charges/*');
CREATE TRIGGER orders_need_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON payments.orders
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('orders/*');

-- ---------------------------------------------------------------------------
-- Answers
-- ---------------------------------------------------------------------------

-- The answer that the service sends.
CREATE TYPE payments.answer AS (
	status   integer,
	headers  json,
	body     text,
	replayed boolean
);

-- The answer if the claim was not granted: the stored one, byte for byte, or the reason
-- why there is none yet. A lease says how long its owner can take; a transaction does
-- not.
CREATE FUNCTION payments.answer_to(op idempotency.operation) RETURNS payments.answer
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT CASE op.outcome
		WHEN 'replayed' THEN
			(op.status, op.headers, op.response, true)::payments.answer
		WHEN 'in_progress' THEN
			(409, idempotency.problem_headers(op), idempotency.problem(op), false)::payments.answer
		WHEN 'mismatched' THEN
			(422, idempotency.problem_headers(op), idempotency.problem(op), false)::payments.answer
	END
$$;

-- A final refusal, for fail().
CREATE FUNCTION payments.refusal(p_detail text) RETURNS json
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT json_build_object('type', 'about:blank', 'title', 'Payment Required', 'status', 402, 'detail', p_detail)
$$;

CREATE FUNCTION payments.as_json(c payments.charge) RETURNS json
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT json_build_object('id', c.id, 'amount', c.amount, 'currency', c.currency,
		'description', c.description, 'created_at', c.created_at)
$$;

-- The tenant of a bearer token, by its SHA-256, so that no log of this server contains
-- a token.
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

-- Charges once for all requests with this key. p_header is the unparsed Idempotency-Key
-- header, or NULL.
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
	answer.body := idempotency.complete(scope, key, payments.as_json(charge), answer.status, answer.headers);
	RETURN answer;
END $$;

-- The last charges of a tenant, newest first.
CREATE FUNCTION payments.charges(p_bearer bytea, p_limit integer) RETURNS json
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	owner text := payments.tenant_of(p_bearer);
BEGIN
	RETURN (
		SELECT json_build_object('charges', coalesce(json_agg(payments.as_json(c) ORDER BY c.id DESC), '[]'))
		FROM (
			SELECT * FROM payments.charge AS c
			WHERE c.tenant = owner
			ORDER BY c.id DESC LIMIT p_limit
		) AS c
	);
END $$;

-- One charge of a tenant; NULL if the tenant has no charge with that number.
CREATE FUNCTION payments.charge_show(p_bearer bytea, p_id bigint) RETURNS json
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	owner text := payments.tenant_of(p_bearer);
BEGIN
	RETURN (
		SELECT payments.as_json(c) FROM payments.charge AS c
		WHERE c.tenant = owner AND c.id = p_id
	);
END $$;

-- ---------------------------------------------------------------------------
-- Orders: a provider charges as well, so the claim has a lease
-- ---------------------------------------------------------------------------

-- The length of a lease. The service renews three times as often.
CREATE FUNCTION payments.lease_time() RETURNS interval
LANGUAGE sql IMMUTABLE AS $$ SELECT interval '10 seconds' $$;

-- An order that is being executed, with its lease. The service passes it to every call.
CREATE TYPE payments.order_lease AS (
	scope           text,
	key             text,
	token           bigint,   -- proves the ownership of the order
	provider_key    uuid,     -- identifies the charge at the provider, the same for every attempt
	provider_charge text,     -- the provider's charge of an earlier attempt; NULL if unknown
	tenant          text,
	amount          bigint,
	currency        text,
	item            text
);

CREATE FUNCTION payments.order_lease_of(p_scope text, p_key text, p_request json, p_token bigint, p_state json)
RETURNS payments.order_lease
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
	SELECT (p_scope, p_key, p_token, idempotency.derive_key(p_scope, p_key, 'charge'),
		p_state ->> 'provider_charge', substr(p_scope, length('orders/') + 1),
		p_request ->> 'amount', p_request ->> 'currency', p_request ->> 'item')::payments.order_lease
$$;

-- Begins an order. Returns an answer, or a lease: then the caller calls the provider,
-- outside any transaction, and then order_finish() or order_refuse().
CREATE FUNCTION payments.order_begin(p_bearer bytea, p_header text,
	p_amount bigint, p_currency text, p_item text,
	OUT answer payments.answer, OUT lease payments.order_lease)
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
	-- The provider keeps a key longer than this database. A key that was used for an
	-- order long ago still stands for that order: another order needs another key.
	IF EXISTS (SELECT FROM payments.orders AS o
		WHERE o.provider_key = idempotency.derive_key(scope, key, 'charge')
			AND (o.amount, o.currency, o.item) IS DISTINCT FROM (p_amount, p_currency, p_item)) THEN
		op.outcome := 'mismatched';
	ELSE
		op := idempotency.try_claim(scope, key, request, lease => payments.lease_time());
	END IF;
	IF op.outcome NOT IN ('claimed', 'taken_over') THEN
		answer := payments.answer_to(op);
		RETURN;
	END IF;

	-- From now on the provider can have charged, so the order must not be lost: with a
	-- checkpoint it survives order_yield(), and a completer finds it.
	IF op.outcome = 'claimed' THEN
		PERFORM idempotency.checkpoint(scope, key, op.token, 'charging');
	END IF;
	lease := payments.order_lease_of(scope, key, request, op.token, op.state);
END $$;

-- The heartbeat.
CREATE FUNCTION payments.order_renew(lease payments.order_lease) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.renew(lease.scope, lease.key, lease.token, payments.lease_time())
$$;

-- Stores the provider's charge, so that the next owner does not ask the provider again.
CREATE FUNCTION payments.order_charged(lease payments.order_lease, p_provider_charge text) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.checkpoint(lease.scope, lease.key, lease.token, 'charged',
		json_build_object('provider_charge', p_provider_charge))
$$;

-- Stores the order and its answer. A caller that has lost the lease gets IK410.
CREATE FUNCTION payments.order_finish(lease payments.order_lease, p_provider_charge text) RETURNS payments.answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	placed payments.orders;
	answer payments.answer;
BEGIN
	PERFORM idempotency.renew(lease.scope, lease.key, lease.token, payments.lease_time());

	-- A charge of the provider belongs to one order, however late a retry comes.
	INSERT INTO payments.orders (tenant, amount, currency, item, provider_key, provider_charge)
	VALUES (lease.tenant, lease.amount, lease.currency, lease.item, lease.provider_key, p_provider_charge)
	ON CONFLICT (provider_key) DO UPDATE SET provider_key = excluded.provider_key
	RETURNING * INTO placed;

	answer.status := 201;
	answer.headers := '{"Content-Type": "application/json"}';
	answer.body := idempotency.complete(lease.scope, lease.key,
		json_build_object('id', placed.id, 'amount', placed.amount, 'currency', placed.currency,
			'item', placed.item, 'provider_charge', placed.provider_charge, 'created_at', placed.created_at),
		answer.status, answer.headers, lease.token);
	answer.replayed := false;
	RETURN answer;
END $$;

-- The provider has refused finally: store that as the answer.
CREATE FUNCTION payments.order_refuse(lease payments.order_lease, p_detail text) RETURNS payments.answer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	answer payments.answer;
BEGIN
	answer.status := 402;
	answer.headers := '{"Content-Type": "application/problem+json"}';
	answer.body := idempotency.fail(lease.scope, lease.key, payments.refusal(p_detail),
		answer.status, answer.headers, lease.token);
	answer.replayed := false;
	RETURN answer;
END $$;

-- Releases the lease after a temporary error, so that the next owner need not wait for
-- its end.
CREATE FUNCTION payments.order_yield(lease payments.order_lease) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.release(lease.scope, lease.key, lease.token)
$$;

-- For the completer: abandoned and released orders. It takes one order per tenant, for
-- at most ten random tenants per call, so that a charge that the provider does not
-- accept now delays no other tenant.
CREATE FUNCTION payments.orders_abandoned() RETURNS SETOF payments.order_lease
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	tenant payments.tenant;
	orders integer := 0;
BEGIN
	FOR tenant IN SELECT * FROM payments.tenant ORDER BY random() LOOP
		RETURN QUERY
			SELECT l.*
			FROM idempotency.claim_abandoned('orders/' || tenant.name, lease => payments.lease_time()) AS a,
				payments.order_lease_of(a.scope, a.key, a.request, a.token, a.state) AS l;
		orders := orders + FOUND::integer;
		EXIT WHEN orders = 10;
	END LOOP;
END $$;

-- ---------------------------------------------------------------------------
-- Privileges of the service
-- ---------------------------------------------------------------------------

GRANT EXECUTE ON FUNCTION
	payments.charge_create(bytea, text, bigint, text, text),
	payments.charges(bytea, integer),
	payments.charge_show(bytea, bigint),
	payments.order_begin(bytea, text, bigint, text, text),
	payments.order_renew(payments.order_lease),
	payments.order_charged(payments.order_lease, text),
	payments.order_finish(payments.order_lease, text),
	payments.order_refuse(payments.order_lease, text),
	payments.order_yield(payments.order_lease),
	payments.orders_abandoned()
TO payments_app;

RESET ROLE;
