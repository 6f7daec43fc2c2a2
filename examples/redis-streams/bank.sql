-- The publisher's side: a bank that publishes its bookings.
--
-- Run it with psql as a superuser, in a database that has the extension. Each booking
-- changes the account and publishes an event in the same transaction, so that both
-- commit or neither does. The relay needs a role that can use one subscription, and no
-- privilege on any table.

-- No object of another role captures a name
SET search_path = pg_catalog, pg_temp;

SELECT 'CREATE ROLE relay LOGIN' WHERE pg_catalog.to_regrole('relay') IS NULL \gexec

CREATE SCHEMA bank;

CREATE TABLE bank.account (
	account integer PRIMARY KEY,
	balance bigint NOT NULL DEFAULT 0,
	version bigint NOT NULL DEFAULT 0
);

CREATE TABLE bank.entry (
	event uuid NOT NULL,
	account integer NOT NULL REFERENCES bank.account,
	version bigint NOT NULL,
	amount bigint NOT NULL
);

-- Books an amount, and publishes the booking. The account is the aggregate: its row
-- lock makes the bookings of one account wait for each other, so that its events are
-- published in commit order.
CREATE FUNCTION bank.book(p_account integer, p_amount bigint) RETURNS uuid
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_version bigint;
	v_event uuid;
BEGIN
	UPDATE bank.account SET balance = balance + p_amount, version = version + 1
	WHERE account = p_account
	RETURNING version INTO STRICT v_version;

	v_event := idempotency.publish('account.booked',
		json_build_object('account', p_account, 'version', v_version, 'amount', p_amount),
		aggregate_id => p_account::text, type => 'booked');

	INSERT INTO bank.entry (event, account, version, amount)
	VALUES (v_event, p_account, v_version, p_amount);
	RETURN v_event;
END $$;

SELECT idempotency.grant_consumer('relay');
SELECT idempotency.subscribe('redis', '{account.*}', owner => 'relay', partitions => 4);
