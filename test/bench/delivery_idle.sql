-- A database with one handler, for the figure idle of the suite delivery.
CREATE EXTENSION idempotency;
DO $$ BEGIN
	PERFORM idempotency.grant_consumer('idle_consumer');
END $$;
CREATE SCHEMA handlers AUTHORIZATION idle_consumer;
CREATE TABLE handlers.handled (event bigint);
ALTER TABLE handlers.handled OWNER TO idle_consumer;
CREATE FUNCTION handlers.handle(event idempotency.event) RETURNS void LANGUAGE sql AS 'INSERT INTO handlers.handled VALUES (event.seq)';
DO $$ BEGIN
	PERFORM idempotency.subscribe('idle', '{order.*}', 'handlers.handle(idempotency.event)', owner => 'idle_consumer');
END $$;
