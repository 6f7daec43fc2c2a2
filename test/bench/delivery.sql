-- The suite delivery: procedures of the consumers, and what one session cannot see.

\ir ../edition.sql

INSERT INTO bench.figure (figure, title, unit, contestants, at_least, target, absolute) VALUES
	('partitions', '8 consumers of 8 partitions, 20 ms for each event: events, of those of one', 'times', '{idempotency}', true, 6, true),
	('parked', 'CPU of a drain beside one parked event, of a drain without', 'times', '{idempotency}', false, 1.25, true),
	('waiting', 'CPU of a consumer and 50 that wait for other topics, of the one alone', 'times', '{idempotency}', false, 1.5, true),
	('idle', 'CPU of idle databases with a handler each', '% of one', '{idempotency}', false, 1, true);

CREATE TABLE bench.handled (handled_at timestamptz NOT NULL);

-- Subscribes to what is published from now on, with so many partitions.
CREATE FUNCTION bench.subscribe_all(p_partitions integer) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.unsubscribe('bench') WHERE EXISTS (SELECT FROM idempotency.subscriptions WHERE subscription = 'bench');
	TRUNCATE bench.handled;
	PERFORM idempotency.subscribe('bench', '{order.*}', partitions => p_partitions);
END $$;

CREATE PROCEDURE bench.publish_all(p_topic text, p_events integer, p_aggregates integer)
LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1 .. p_events LOOP
		PERFORM idempotency.publish(p_topic, json_build_object('order', i), aggregate_id => (i % p_aggregates)::text);
	END LOOP;
END $$;

-- The handler that takes 20 ms.
CREATE FUNCTION bench.wait(p_event idempotency.event) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_sleep(0.02);
	INSERT INTO bench.handled VALUES (clock_timestamp());
END $$;

-- Events a second from the first to the last.
CREATE FUNCTION bench.handled_rate(p_events integer) RETURNS double precision
LANGUAGE plpgsql AS $$
BEGIN
	IF (SELECT count(*) FROM bench.handled) <> p_events THEN
		RAISE '% events have been handled, not %', (SELECT count(*) FROM bench.handled), p_events;
	END IF;
	RETURN (SELECT (p_events - 1) / extract(epoch FROM max(handled_at) - min(handled_at)) FROM bench.handled);
END $$;

-- Publishes an event, which waits for its next attempt afterwards.
CREATE PROCEDURE bench.park()
LANGUAGE plpgsql AS $$
DECLARE
	event idempotency.event;
BEGIN
	PERFORM idempotency.publish('order.parked', '{}', aggregate_id => 'parked');
	COMMIT;
	SELECT * INTO STRICT event FROM idempotency.fetch('bench');
	PERFORM idempotency.nack('bench', event.batch, event.id, retry_in => '1 hour');
END $$;

-- Drains all, and returns the server's CPU for an event after the first 20 batches.
CREATE PROCEDURE bench.drain(p_events integer, INOUT cpu double precision DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	start double precision;
	drained integer := 0;
	got bigint;
	number bigint;
BEGIN
	LOOP
		SELECT count(*), min(batch) INTO got, number FROM idempotency.fetch('bench');
		EXIT WHEN got = 0;
		COMMIT;
		PERFORM idempotency.ack('bench', number);
		COMMIT;
		drained := drained + got;
		IF start IS NULL AND drained >= 2000 THEN
			start := bench.cpu();
		END IF;
	END LOOP;
	IF drained <> p_events THEN
		RAISE '% events drained, not %', drained, p_events;
	END IF;
	cpu := (bench.cpu() - start) / (drained - 2000);
END $$;

-- Consumes a subscription until the event "stop".
CREATE PROCEDURE bench.consume(p_subscription text)
LANGUAGE plpgsql AS $$
DECLARE
	number bigint;
	stop boolean := false;
BEGIN
	WHILE NOT coalesce(stop, false) LOOP
		SELECT min(batch), bool_or(payload ->> 'order' = 'stop') INTO number, stop FROM idempotency.fetch(p_subscription, wait => '1 minute');
		COMMIT;
		PERFORM idempotency.ack(p_subscription, number) WHERE number IS NOT NULL;
		COMMIT;
	END LOOP;
END $$;

-- Subscriptions to topics of their own.
CREATE FUNCTION bench.subscribe_topics(p_subscriptions integer) RETURNS void
LANGUAGE sql AS $$
	SELECT idempotency.subscribe('topic' || i, ARRAY['topic' || i]) FROM generate_series(0, p_subscriptions) AS i
$$;

-- The CPU of all consumers in microseconds, when they wait: a process that sleeps has counted all.
CREATE FUNCTION bench.consumers_cpu(p_consumers integer) RETURNS double precision
LANGUAGE plpgsql AS $$
BEGIN
	WHILE (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'consumer' AND wait_event_type = 'Extension') < p_consumers LOOP
		PERFORM pg_sleep(0.05), pg_stat_clear_snapshot();
	END LOOP;
	RETURN (SELECT sum(split_part(pg_read_file('/proc/' || pid || '/schedstat', 0, 100, true), ' ', 1)::double precision) / 1000
		FROM pg_stat_activity WHERE application_name = 'consumer');
END $$;

-- Publishes 100 events a second for the first of the consumers, and returns the CPU of all. Then
-- it stops them.
CREATE PROCEDURE bench.feed(p_consumers integer, p_events integer, INOUT cpu double precision DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	before double precision := bench.consumers_cpu(p_consumers);
BEGIN
	FOR i IN 1 .. p_events LOOP
		PERFORM idempotency.publish('topic0', json_build_object('order', i), aggregate_id => i::text);
		COMMIT;
		PERFORM pg_sleep(0.01);
	END LOOP;
	cpu := bench.consumers_cpu(p_consumers) - before;
	PERFORM idempotency.publish('topic' || i, '{"order": "stop"}') FROM generate_series(0, p_consumers - 1) AS i;
END $$;
