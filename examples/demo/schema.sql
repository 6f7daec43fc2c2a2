-- A small payments service, whose clients retry.
--
-- Each client call is one function: it claims the idempotency key, does its work and
-- completes the key, in one transaction. The key and the charge commit together or not
-- at all.

CREATE EXTENSION IF NOT EXISTS idempotency;

CREATE SCHEMA payments;

CREATE TABLE payments.account (
	customer integer PRIMARY KEY,
	balance numeric(12, 2) NOT NULL
);

-- idempotency_key has a default: each charge stores the key of the request that made
-- it.
CREATE TABLE payments.charge (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer integer NOT NULL REFERENCES payments.account,
	amount numeric(12, 2) NOT NULL CHECK (amount > 0),
	currency text NOT NULL,
	idempotency_key text NOT NULL DEFAULT idempotency.current_key('charge.create')
);

-- No charge without a claimed key: every write to this table fails with IK403 unless
-- this transaction has claimed a key in scope charge.create.
CREATE TRIGGER charge_needs_a_claim
	BEFORE INSERT OR UPDATE OR DELETE ON payments.charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge.create');

-- The ledger is partitioned by currency. A charge in a currency without a partition
-- fails with an error of PostgreSQL.
CREATE TABLE payments.ledger (
	charge bigint NOT NULL,
	currency text NOT NULL,
	amount numeric(12, 2) NOT NULL
) PARTITION BY LIST (currency);

CREATE TABLE payments.ledger_eur PARTITION OF payments.ledger FOR VALUES IN ('EUR');

-- Debits an account. Insufficient funds are a final answer and not an unexpected error,
-- so the error has its own SQLSTATE.
CREATE FUNCTION payments.debit(p_customer integer, p_amount numeric) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	UPDATE payments.account SET balance = balance - p_amount
	WHERE customer = p_customer AND balance >= p_amount;

	IF NOT FOUND THEN
		RAISE EXCEPTION 'insufficient funds' USING ERRCODE = 'PY402';
	END IF;
END $$;

-- Charges a customer, once, however often it is called with the same key.
--
--	* A retry of a finished request gets the stored answer, byte for byte.
--	* The same key with another customer, amount or currency raises IK422.
--	* A declined card is a final answer too, and is stored. The work is in an inner
--	block,
--	  so that it is rolled back while the claim stays. That block catches the one error
--	  that is known to be final, and never OTHERS.
--	* Any other error aborts the transaction: nothing is stored, and the next retry does
--	  the work.
--	* The event is published exactly if the transaction commits.
CREATE FUNCTION payments.charge_create(p_key text, p_customer integer, p_amount numeric,
	p_currency text DEFAULT 'EUR') RETURNS json
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	op idempotency.operation;
	new_id bigint;
BEGIN
	op := idempotency.claim('charge.create', p_key,
		jsonb_build_object('customer', p_customer, 'amount', p_amount, 'currency', p_currency));
	IF op.replayed THEN
		RETURN op.response;
	END IF;

	BEGIN
		INSERT INTO payments.charge (customer, amount, currency)
		VALUES (p_customer, p_amount, p_currency)
		RETURNING id INTO new_id;

		INSERT INTO payments.ledger (charge, currency, amount)
		VALUES (new_id, p_currency, p_amount);

		PERFORM payments.debit(p_customer, p_amount);

		PERFORM idempotency.publish('charge.created',
			json_build_object('charge', new_id, 'customer', p_customer, 'amount', p_amount),
			aggregate_id => 'customer ' || p_customer);
	EXCEPTION WHEN SQLSTATE 'PY402' THEN
		RETURN idempotency.fail('charge.create', p_key,
			json_build_object('error', 'card_declined', 'at', clock_timestamp()), 402);
	END;

	RETURN idempotency.complete('charge.create', p_key,
		json_build_object('charge', new_id, 'amount', p_amount, 'currency', p_currency,
			'at', clock_timestamp()), 201);
END $$;

-- The same, without the call of complete(). The calling transaction cannot commit
-- (IK428), so the first test finds the bug, and not the first retry.
CREATE FUNCTION payments.charge_create_hastily(p_key text, p_customer integer, p_amount numeric)
	RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	op idempotency.operation;
	new_id bigint;
BEGIN
	op := idempotency.claim('charge.create', p_key);
	IF op.replayed THEN
		RETURN (op.response ->> 'charge')::bigint;
	END IF;

	INSERT INTO payments.charge (customer, amount, currency)
	VALUES (p_customer, p_amount, 'EUR')
	RETURNING id INTO new_id;
	RETURN new_id;
END $$;

-- A consumer of a queue that delivers every message at least once; it adds a loyalty
-- point for each. No answer is needed, so once() is enough: it returns true only the
-- first time.
CREATE TABLE payments.loyalty_point (
	message integer NOT NULL
);

CREATE FUNCTION payments.point_earned(p_message integer) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF NOT idempotency.once('loyalty', p_message::text) THEN
		RETURN false;
	END IF;

	INSERT INTO payments.loyalty_point (message) VALUES (p_message);
	RETURN true;
END $$;

-- ---------------------------------------------------------------------------
-- Orders that are paid by card
-- ---------------------------------------------------------------------------

-- The provider charges the card. No transaction or rollback of this database affects
-- the provider. Therefore the claim has a lease, and the order takes three
-- transactions, between which its worker can die at any moment:
--
--	order_begin		claims the key; others wait, or take over when the lease has expired
--	(the provider charges the card, once for the key that is derived from ours)
--	order_charged	stores the charge, so that the next worker continues from there
--	order_finish	writes the order and completes the key, in one transaction
--
-- Each call passes the token of its claim. After a takeover the token is stale, and the
-- writes of that worker cannot commit.
CREATE TABLE payments.orders (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	request text NOT NULL,
	customer integer NOT NULL,
	amount numeric(12, 2) NOT NULL,
	card_charge bigint NOT NULL,
	placed_by text NOT NULL DEFAULT current_setting('application_name')
);

CREATE FUNCTION payments.order_begin(p_key text, p_customer integer, p_amount numeric,
	p_lease interval DEFAULT '30 seconds', p_wait interval DEFAULT NULL) RETURNS idempotency.operation
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.claim('order.place', p_key,
		jsonb_build_object('customer', p_customer, 'amount', p_amount), lease => p_lease, wait => p_wait)
$$;

CREATE FUNCTION payments.order_charged(p_key text, p_token bigint, p_card_charge bigint) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
	SELECT idempotency.checkpoint('order.place', p_key, p_token, 'charged',
		json_build_object('card_charge', p_card_charge))
$$;

CREATE FUNCTION payments.order_finish(p_key text, p_token bigint, p_customer integer, p_amount numeric,
	p_card_charge bigint) RETURNS json
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	new_id bigint;
BEGIN
	INSERT INTO payments.orders (request, customer, amount, card_charge)
	VALUES (p_key, p_customer, p_amount, p_card_charge)
	RETURNING id INTO new_id;

	RETURN idempotency.complete('order.place', p_key,
		json_build_object('order', new_id, 'amount', p_amount, 'card_charge', p_card_charge,
			'at', clock_timestamp()), 201, token => p_token);
END $$;

-- A consumer of the events sends receipts. With deliver() each event has its effect
-- once. once() is for consumers that call fetch() themselves: the receipt can be
-- committed before the acknowledgement.
CREATE TABLE payments.receipt (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	charge bigint NOT NULL,
	customer integer NOT NULL,
	amount numeric(12, 2) NOT NULL CHECK (amount < 90)
);

CREATE FUNCTION payments.send_receipt(event idempotency.event) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
	IF idempotency.once('receipts', event.id::text) THEN
		INSERT INTO payments.receipt (charge, customer, amount)
		SELECT p.charge, p.customer, p.amount
		FROM json_to_record(event.payload) AS p (charge bigint, customer integer, amount numeric);
	END IF;
END $$;

-- A handler keeps the monthly accounts: background workers call it as the owner of the
-- subscription. Its writes happen once, because they commit together with the position
-- after the event.
CREATE ROLE bookkeeper LOGIN;
CREATE SCHEMA books AUTHORIZATION bookkeeper;
SELECT idempotency.grant_consumer('bookkeeper');

SET ROLE bookkeeper;
CREATE TABLE books.revenue (
	customer integer PRIMARY KEY,
	charges integer NOT NULL,
	amount numeric(12, 2) NOT NULL
);

CREATE FUNCTION books.book(event idempotency.event) RETURNS void
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
	INSERT INTO books.revenue AS r (customer, charges, amount)
	SELECT p.customer, 1, p.amount
	FROM json_to_record(event.payload) AS p (customer integer, amount numeric)
	ON CONFLICT (customer) DO UPDATE
		SET charges = r.charges + 1, amount = r.amount + excluded.amount
$$;
RESET ROLE;
