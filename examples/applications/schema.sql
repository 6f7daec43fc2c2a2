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
