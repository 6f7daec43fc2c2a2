-- schema.sql
--
-- Tables and functions of the torture clients. No table of effects has a unique key:
-- repeated effects must be visible.

CREATE ROLE app LOGIN;
CREATE EXTENSION idempotency;
SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app'), idempotency.grant_operator('app');
CREATE SCHEMA torture AUTHORIZATION app;
SET ROLE app;

-- One row per effect; "event" is the ID of its event. The padding fills a disk soon.
CREATE TABLE torture.effect (key text, attempt text, token bigint, event uuid, padding text);
ALTER TABLE torture.effect ALTER padding SET STORAGE PLAIN;

-- The first of the two steps of an operation under a lease.
CREATE TABLE torture.step (key text, attempt text, token bigint, state text);

-- Rows with contention: locked in any order, they cause deadlocks; read and written by
-- serializable transactions, conflicts.
CREATE TABLE torture.counter (id text PRIMARY KEY, n bigint NOT NULL DEFAULT 0);
INSERT INTO torture.counter VALUES ('deadlock 1'), ('deadlock 2'), ('serial 1'), ('serial 2');

-- One row for each event that a subscription has handled, in order.
CREATE TABLE torture.handled (place bigint GENERATED ALWAYS AS IDENTITY,
	subscription text, event uuid, aggregate text, n bigint);

-- A transaction that inserts into delay has a slow COMMIT or PREPARE TRANSACTION, so that
-- a cancel can interrupt it.
CREATE TABLE torture.delay ();
CREATE FUNCTION torture.delay() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(0.2);
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER delay AFTER INSERT ON torture.delay
	DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION torture.delay();

-- pay is a whole operation in one statement.
CREATE FUNCTION torture.pay(p_key text, p_attempt text, p_request text, p_padding text,
	OUT replayed boolean, OUT answer text)
LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation := idempotency.claim('procedure', p_key, p_request, wait => '500 ms');
	body text := format('{"attempt" :  "%s"}', p_attempt);
BEGIN
	replayed := op.replayed;
	IF op.replayed THEN
		answer := concat_ws('|', op.status, op.headers, op.response);
		RETURN;
	END IF;
	INSERT INTO torture.effect
		VALUES (p_key, p_attempt, NULL, idempotency.publish('torture', json_build_object('key', p_key)), p_padding);
	PERFORM idempotency.complete('procedure', p_key, body, 201, '{ }');
	answer := concat_ws('|', 201, '{ }', body);
END $$;

-- handle is the handler of a subscription. It sleeps at some events, so that faults can
-- strike it, and fails at others the first time.
CREATE FUNCTION torture.handle(e idempotency.event) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
	chance int := abs(hashtext(e.id::text)) % 100;
BEGIN
	INSERT INTO torture.handled (subscription, event, aggregate, n)
		VALUES ('relayed', e.id, e.aggregate_id, (e.payload ->> 'n')::bigint);
	IF chance < 12 THEN PERFORM pg_sleep(0.01); END IF;
	IF chance = 99 AND e.attempt = 1 THEN RAISE EXCEPTION 'not the first time'; END IF;
END $$;

-- Two subscriptions that are fetched, and one with a handler. No event ever becomes a
-- dead letter.
SELECT idempotency.subscribe(name, ARRAY[topics], handler::regprocedure,
	max_attempts => 2147483647, retry_delay => '20 ms', max_retry_delay => '200 ms', partitions => partitions)
FROM (VALUES ('once', '*', NULL, 2),
	('together', 'torture', NULL, 1),
	('relayed', 'tor*', 'torture.handle(idempotency.event)', 2)) AS s (name, topics, handler, partitions);
