-- The consumer's side: account statements, in a separate database.
--
-- Run it with psql as a superuser, in a database that has the extension. The consumer
-- connects as a role that can call only one function, which is SECURITY DEFINER.

-- No object of another role captures a name
SET search_path = pg_catalog, pg_temp;

SELECT 'CREATE ROLE statement_writer LOGIN'
WHERE pg_catalog.to_regrole('statement_writer') IS NULL \gexec

CREATE SCHEMA statement;

CREATE TABLE statement.account (
	account integer PRIMARY KEY,
	balance bigint NOT NULL,
	version bigint NOT NULL
);

CREATE TABLE statement.line (
	line bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	event uuid NOT NULL,
	account integer NOT NULL,
	version bigint NOT NULL,
	amount bigint NOT NULL
);

-- Applies an event once: returns true the first time, false for a copy.
--
-- once() and the writes are one transaction. The retention must exceed the longest
-- delay of a copy: the consumer was stopped, dead letters were redriven, or a stream
-- was restored.
CREATE FUNCTION statement.consume(p_event uuid, p_topic text, p_aggregate text, p_type text,
	p_payload json, p_headers json) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
	v_account integer := p_payload->>'account';
	v_version bigint := p_payload->>'version';
	v_amount bigint := p_payload->>'amount';
BEGIN
	IF NOT idempotency.once('statement', p_event::text, retention => '30 days') THEN
		RETURN false;
	END IF;

	INSERT INTO statement.line (event, account, version, amount)
	VALUES (p_event, v_account, v_version, v_amount);

	INSERT INTO statement.account AS a (account, balance, version)
	VALUES (v_account, v_amount, v_version)
	ON CONFLICT (account) DO UPDATE
	SET balance = a.balance + excluded.balance, version = excluded.version;
	RETURN true;
END $$;

REVOKE ALL ON FUNCTION statement.consume FROM PUBLIC;
GRANT USAGE ON SCHEMA statement TO statement_writer;
GRANT EXECUTE ON FUNCTION statement.consume TO statement_writer;
