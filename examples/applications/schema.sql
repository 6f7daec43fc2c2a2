-- The tables of the applications. The role of an application needs
-- idempotency.grant_client and idempotency.grant_consumer, and rights on these tables.

CREATE TABLE charge (
	id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer text NOT NULL,
	amount   bigint NOT NULL CHECK (amount > 0)
);

CREATE TABLE purchase (
	id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	item            text NOT NULL,
	amount          bigint NOT NULL CHECK (amount > 0),
	provider_charge text NOT NULL UNIQUE
);

-- A write on another connection than that of the claim would commit alone: refuse it.
CREATE TRIGGER charge_needs_a_claim BEFORE INSERT OR UPDATE OR DELETE ON charge
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim();
CREATE TRIGGER purchase_needs_a_claim BEFORE INSERT OR UPDATE OR DELETE ON purchase
	FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim();
