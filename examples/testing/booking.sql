-- A procedure, and its table: what booking.test.js tests.
CREATE TABLE booking (id bigint GENERATED ALWAYS AS IDENTITY, customer text NOT NULL, amount bigint NOT NULL);

CREATE FUNCTION booking_create(key text, customer text, amount bigint) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
	body json;
BEGIN
	op := idempotency.claim('booking.create', key, json_build_object('customer', customer, 'amount', amount));
	IF op.replayed THEN
		RETURN op.response;
	END IF;
	INSERT INTO booking (customer, amount) VALUES (booking_create.customer, booking_create.amount)
	RETURNING json_build_object('booking', booking.id) INTO body;
	RETURN idempotency.complete('booking.create', key, body, 201);
END
$$;
