-- The provider that charges cards, in a separate database: it stands for an external
-- service. Like such services, it takes an idempotency key with each request, and
-- charges once for each key.

CREATE SCHEMA provider;

CREATE TABLE provider.charge (
	id bigint GENERATED ALWAYS AS IDENTITY (START WITH 9001),
	key uuid PRIMARY KEY,
	amount numeric(12, 2) NOT NULL,
	asked integer NOT NULL DEFAULT 1
);

CREATE FUNCTION provider.charge_card(p_key uuid, p_amount numeric) RETURNS bigint
LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
	INSERT INTO provider.charge (key, amount) VALUES (p_key, p_amount)
	ON CONFLICT (key) DO UPDATE SET asked = charge.asked + 1
	RETURNING id
$$;
