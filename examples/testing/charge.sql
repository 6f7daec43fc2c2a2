-- A procedure, and its table: what charge.test.js tests.
CREATE TABLE charge (id bigint GENERATED ALWAYS AS IDENTITY, customer text NOT NULL, amount bigint NOT NULL);

CREATE FUNCTION charge_create(key text, customer text, amount bigint) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
	body json;
BEGIN
	op := idempotency.claim('charge.create', key, json_build_object('customer', customer, 'amount', amount));
	IF op.replayed THEN
		RETURN op.response;
	END IF;
	INSERT INTO charge (customer, amount) VALUES (charge_create.customer, charge_create.amount)
	RETURNING json_build_object('charge', charge.id) INTO body;
	RETURN idempotency.complete('charge.create', key, body, 201);
END
$$;
