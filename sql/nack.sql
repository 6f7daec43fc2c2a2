--
-- nack(), redrive() and dead_letters: failed events, when they are redelivered and how
-- often, and the later events of the same aggregate.
--
\set SHOW_CONTEXT never

-- The SQLSTATE, message and detail of a statement, without the batch number.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
	RETURN SQLSTATE || ': ' || message || coalesce('. ' || regexp_replace(nullif(detail, ''), 'batch -?\d+', 'batch N'), '');
END
$$;

-- Events are identified by numbers: their payloads, and the last digits of their ids.
CREATE FUNCTION pg_temp.id(n int) RETURNS uuid LANGUAGE sql AS $$
	SELECT lpad(n::text, 32, '0')::uuid
$$;
CREATE FUNCTION pg_temp.publish(numbers int[], aggregate text DEFAULT NULL, topic text DEFAULT 'nack') RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, to_json(n), aggregate, event_id => pg_temp.id(n))) FROM unnest(numbers) AS n
$$;

-- The next batch, in order, with the attempt unless it is the first.
CREATE FUNCTION pg_temp.fetch(subscription text, max_events int DEFAULT 100) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload || CASE WHEN attempt > 1 THEN ' (attempt ' || attempt || ')' ELSE '' END, ', ')
	FROM idempotency.fetch(subscription, max_events)
$$;
CREATE FUNCTION pg_temp.batch(p_subscription text) RETURNS bigint LANGUAGE sql AS $$
	SELECT batch FROM idempotency.position WHERE subscription = p_subscription
$$;
CREATE FUNCTION pg_temp.ack(subscription text) RETURNS void LANGUAGE sql AS $$
	SELECT idempotency.ack(subscription, pg_temp.batch(subscription))
$$;
CREATE FUNCTION pg_temp.return_batch(subscription text) RETURNS boolean LANGUAGE sql AS $$
	SELECT idempotency.nack(subscription, pg_temp.batch(subscription), NULL) <= clock_timestamp()
$$;
-- All remaining events, batch by batch.
CREATE FUNCTION pg_temp.drain(subscription text, max_events int DEFAULT 100) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	got text;
	batch text;
BEGIN
	LOOP
		batch := pg_temp.fetch(subscription, max_events);
		EXIT WHEN batch IS NULL;
		got := concat_ws(', ', got, batch);
		PERFORM pg_temp.ack(subscription);
	END LOOP;
	RETURN got;
END
$$;
-- The state of a failed event.
CREATE FUNCTION pg_temp.nack(subscription text, n int, retry_in interval DEFAULT '0', error text DEFAULT 'it failed') RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN t <= clock_timestamp() THEN 'again now' WHEN t > clock_timestamp() THEN 'again later' ELSE 'dead' END
	FROM idempotency.nack(subscription, pg_temp.batch(subscription), pg_temp.id(n), error, retry_in) AS t
$$;
-- Moves the lease of the current batch and the retry times into the past by an
-- interval.
CREATE FUNCTION pg_temp.age_batch(p_subscription text, p_time interval DEFAULT '1 day') RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.position SET leased_at = leased_at - p_time, leased_until = leased_until - p_time
		WHERE subscription = p_subscription;
	UPDATE idempotency.parked SET retry_at = retry_at - p_time WHERE subscription = p_subscription;
$$;
CREATE FUNCTION pg_temp.parked(p_subscription text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload || CASE WHEN dead_at IS NOT NULL THEN ' dead' WHEN retry_at IS NULL THEN ' waits' ELSE ' comes' END, ', ' ORDER BY seq)
	FROM idempotency.parked WHERE subscription = p_subscription
$$;

--
-- One failed event
--

-- nack() removes the event from the batch; the other events stay. The event is
-- redelivered after its delay, before newer events, with its attempt number.
SELECT idempotency.subscribe('nack', '{nack}', retry_delay => '1 hour');
SELECT pg_temp.publish('{1,2,3}');
SELECT pg_temp.fetch('nack');
SELECT pg_temp.nack('nack', 2, NULL, 'the "mail" server said: no');
SELECT pg_temp.ack('nack');
SELECT pg_temp.fetch('nack');
SELECT pg_temp.publish('{4}');
SELECT pg_temp.fetch('nack');
SELECT pg_temp.ack('nack');
SELECT pg_temp.publish('{5}');
SELECT pg_temp.age_batch('nack');
SELECT pg_temp.fetch('nack');
SELECT error, attempts, first_failed_at = last_failed_at AS once, last_failed_at BETWEEN now() - interval '1 min' AND clock_timestamp() AS now
	FROM idempotency.parked WHERE subscription = 'nack';
SELECT last_error, last_error_at BETWEEN now() - interval '1 min' AND clock_timestamp() AS now
	FROM idempotency.subscriptions WHERE subscription = 'nack';
-- A later success leaves no row.
SELECT pg_temp.ack('nack');
SELECT pg_temp.parked('nack'), pg_temp.fetch('nack');

-- Repeated failures keep the last error, of which 8 kB in whole characters, and the times of
-- the first and the last failure.
SELECT pg_temp.publish('{6}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', 'one'), pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', 'x' || repeat('ä', 10000)), pg_temp.ack('nack');
SELECT octet_length(error), error = 'x' || repeat('ä', 4095) AS beginning FROM idempotency.parked WHERE subscription = 'nack';
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', NULL), pg_temp.ack('nack');
SELECT error, attempts, first_failed_at < last_failed_at AS longer FROM idempotency.parked WHERE subscription = 'nack';
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack'), pg_temp.parked('nack');

-- The redelivered event is a copy; the outbox does not need to have it any more.
BEGIN;
SELECT outcome FROM idempotency.claim('nack', 'copy');
SELECT idempotency.complete('nack', 'copy');
SELECT idempotency.publish('nack', '{"b" : 1,  "a":[ ]}', 'order ''7''', 'placed', '{"trace": "☃"}', pg_temp.id(7));
COMMIT;
SELECT f.topic, f.aggregate_id, f.type, f.payload, f.headers, f.attempt, f.id, f.seq = o.seq AND f.published_at = o.published_at AS same
	FROM idempotency.fetch('nack') AS f JOIN idempotency.outbox AS o USING (id);
SELECT seq, published_at FROM idempotency.outbox WHERE id = pg_temp.id(7) \gset
SELECT pg_temp.nack('nack', 7), pg_temp.ack('nack');
DELETE FROM idempotency.outbox WHERE id = pg_temp.id(7);
SELECT f.topic, f.aggregate_id, f.type, f.payload, f.headers, f.attempt, f.id, f.seq = :seq AND f.published_at = :'published_at' AS same
	FROM idempotency.fetch('nack') AS f;
SELECT pg_temp.ack('nack');
-- The same holds for an event that has only a topic.
SELECT idempotency.publish('nack', NULL, event_id => pg_temp.id(8));
SELECT payload, headers, attempt FROM idempotency.fetch('nack');
SELECT pg_temp.nack('nack', 8), pg_temp.ack('nack');
SELECT topic, aggregate_id, type, payload, headers, attempt, id FROM idempotency.fetch('nack');
SELECT pg_temp.ack('nack');

-- Rolling back the transaction or a savepoint undoes nack().
SELECT pg_temp.publish('{9,10}');
SELECT pg_temp.fetch('nack');
BEGIN;
SELECT pg_temp.nack('nack', 9), pg_temp.parked('nack');
ROLLBACK;
SELECT pg_temp.parked('nack');
BEGIN;
SAVEPOINT s;
SELECT pg_temp.nack('nack', 9);
ROLLBACK TO s;
SELECT pg_temp.nack('nack', 10);
COMMIT;
SELECT pg_temp.parked('nack');
SELECT pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack');

-- Whatever happens to the rest of the batch, the failed event is no longer part of it:
-- the event is redelivered only after its delay, and the rest as usual.
SELECT pg_temp.publish('{11,12,13}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 12, '1 hour');
SELECT idempotency.extend('nack', pg_temp.batch('nack'), '1 min') > now() AS extended;
SELECT pg_temp.age_batch('nack', '2 min');
SELECT pg_temp.fetch('nack');
SELECT pg_temp.nack('nack', 11, '1 hour');
SELECT pg_temp.age_batch('nack', '2 min');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 13, '1 hour');
SELECT pg_temp.age_batch('nack', '2 min');
SELECT pg_temp.fetch('nack'), pg_temp.parked('nack');
SELECT pg_temp.age_batch('nack', '2 hours');
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack');
-- A batch whose events all failed can be acknowledged.
SELECT pg_temp.publish('{14,15}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 14), pg_temp.nack('nack', 15), pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack');
-- A returned batch is redelivered without the failed event, which is delivered once.
SELECT pg_temp.publish('{16,17,18}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 17, '1 hour'), pg_temp.return_batch('nack');
SELECT pg_temp.fetch('nack'), pg_temp.return_batch('nack');
SELECT pg_temp.age_batch('nack');
CREATE TEMPORARY TABLE delivered (n int, attempt int);
DO $$
BEGIN
	LOOP
		INSERT INTO delivered SELECT payload::text::int, attempt FROM idempotency.fetch('nack', 1);
		EXIT WHEN NOT FOUND;
		PERFORM pg_temp.ack('nack');
	END LOOP;
END
$$;
SELECT * FROM delivered ORDER BY n, attempt;
SELECT pg_temp.parked('nack'), pg_temp.fetch('nack');

--
-- Delays
--

-- Each delay is twice the one before, up to a limit, with random jitter between half
-- and the full value.
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '10 s', max_retry_delay => '100 s', max_attempts => 1000);
SELECT pg_temp.publish('{20}', topic => 'backoff');
CREATE TEMPORARY TABLE backoff (attempt int, delay interval);
DO $$
DECLARE
	e idempotency.event;
	now timestamptz;
BEGIN
	FOR i IN 1 .. 70 LOOP
		SELECT * INTO e FROM idempotency.fetch('backoff');
		now := clock_timestamp();
		INSERT INTO backoff VALUES (e.attempt, idempotency.nack('backoff', e.batch, e.id, 'no') - now);
		PERFORM idempotency.ack('backoff', e.batch);
		PERFORM pg_temp.age_batch('backoff');
	END LOOP;
END
$$;
SELECT attempt, delay >= least(100, 10 * 2 ^ (attempt - 1)) / 2 * interval '1 s' AS half,
		delay < least(100, 10 * 2 ^ (attempt - 1)) * interval '1 s' + interval '2 s' AS whole
	FROM backoff WHERE attempt <= 5 ORDER BY attempt;
SELECT count(*), count(DISTINCT delay) > 40 AS differ, min(delay) BETWEEN '50 s' AND '75 s' AS sooner, max(delay) BETWEEN '75 s' AND '102 s' AS later
	FROM backoff WHERE attempt > 5;

-- The first delay can be zero, or longer than the limit, which then applies.
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '0', max_retry_delay => '1 hour', max_attempts => 1000);
SELECT pg_temp.fetch('backoff'), pg_temp.nack('backoff', 20, NULL), pg_temp.ack('backoff');
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '1 hour', max_retry_delay => '2 s', max_attempts => 1000);
SELECT pg_temp.fetch('backoff');
SELECT t BETWEEN now() + interval '1 s' AND clock_timestamp() + interval '2 s' AS longest
	FROM idempotency.nack('backoff', pg_temp.batch('backoff'), pg_temp.id(20), 'no') AS t;
SELECT pg_temp.ack('backoff'), pg_temp.age_batch('backoff');
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '100000 years', max_retry_delay => '170000000 years', max_attempts => 1000);
SELECT pg_temp.fetch('backoff');
SELECT t BETWEEN now() + interval '49 years' AND now() + interval '101 years' AS some_day
	FROM idempotency.nack('backoff', pg_temp.batch('backoff'), pg_temp.id(20), 'no') AS t;
SELECT pg_temp.ack('backoff');
SELECT idempotency.unsubscribe('backoff');

-- The consumer can set the exact time, even beyond the limit.
SELECT idempotency.subscribe('retry_in', '{retry_in}', retry_delay => '1 day', max_retry_delay => '1 day');
SELECT pg_temp.publish('{21}', topic => 'retry_in');
SELECT pg_temp.fetch('retry_in');
SELECT i AS retry_in, pg_temp.error_of(format('SELECT pg_temp.nack(''retry_in'', 21, %L)', i)) FROM unnest('{-1 microsecond,-1 month,1 day -25 hours}'::text[]) AS i;
BEGIN;
SELECT t BETWEEN now() + interval '30 days' AND clock_timestamp() + interval '30 days' AS then
	FROM idempotency.nack('retry_in', pg_temp.batch('retry_in'), pg_temp.id(21), 'no', '30 days') AS t;
ROLLBACK;
SELECT t BETWEEN now() AND clock_timestamp() AS now
	FROM idempotency.nack('retry_in', pg_temp.batch('retry_in'), pg_temp.id(21), 'no', '0') AS t;
SELECT pg_temp.ack('retry_in');
SELECT pg_temp.fetch('retry_in'), pg_temp.nack('retry_in', 21, '50 ms'), pg_temp.ack('retry_in');
-- A waiting fetch() gets the event at that time.
SELECT payload, attempt FROM idempotency.fetch('retry_in', wait => '1 min');
SELECT clock_timestamp() - last_failed_at BETWEEN '50 ms' AND '30 s' AS waited FROM idempotency.parked WHERE subscription = 'retry_in';
SELECT idempotency.unsubscribe('retry_in');

--
-- Dead letters
--

-- After the maximum number of attempts, the event becomes a dead letter.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 2);
SELECT pg_temp.publish('{30,31,32}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 30, error => 'first'), pg_temp.nack('dead', 32, error => 'first'), pg_temp.ack('dead');
SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'dead';
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 30, '1 hour', 'second'), pg_temp.nack('dead', 32, NULL, 'second'), pg_temp.ack('dead');
SELECT event_id, topic, aggregate_id, type, payload, headers, error, attempts, first_failed_at < last_failed_at AS longer, seq = (SELECT seq FROM idempotency.outbox WHERE id = event_id) AS same
	FROM idempotency.dead_letters WHERE subscription = 'dead' ORDER BY seq;
SELECT pg_temp.age_batch('dead'), pg_temp.fetch('dead');

-- nack() can bury an event at once; later events of its aggregate leave the batch, and follow.
SELECT idempotency.subscribe('buried', '{buried}', max_attempts => 9);
SELECT pg_temp.publish('{36,37}', 'A', topic => 'buried'), pg_temp.publish('{38}', 'B', topic => 'buried');
SELECT pg_temp.fetch('buried');
SELECT idempotency.nack('buried', pg_temp.batch('buried'), pg_temp.id(36), 'no such order', dead => true) IS NULL AS never, pg_temp.parked('buried');
SELECT idempotency.ack('buried', pg_temp.batch('buried')) AS acknowledged, pg_temp.fetch('buried'), pg_temp.ack('buried');
-- Dead letters that are of no use can be discarded: one, or all.
SELECT idempotency.discard('buried', pg_temp.id(37)), idempotency.discard('buried', pg_temp.id(36)), idempotency.discard('buried'), pg_temp.parked('buried');
SELECT idempotency.unsubscribe('buried');

-- An operator can redrive one dead letter, with its attempts reset,
SELECT idempotency.redrive('dead', pg_temp.id(32));
SELECT idempotency.redrive('dead', pg_temp.id(32)), idempotency.redrive('dead', pg_temp.id(31)), idempotency.redrive('dead', pg_temp.id(99));
SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'dead';
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 32, error => 'third'), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 32, error => 'fourth'), pg_temp.ack('dead');
SELECT payload, error, attempts FROM idempotency.dead_letters WHERE subscription = 'dead' ORDER BY seq;
-- or all dead letters of one subscription.
SELECT idempotency.subscribe('dead too', '{dead}', start_at => 'beginning', max_attempts => 1);
SELECT pg_temp.fetch('dead too'), pg_temp.nack('dead too', 30), pg_temp.ack('dead too');
BEGIN;
SELECT idempotency.redrive('dead');
ROLLBACK;
SELECT pg_temp.fetch('dead');
SELECT idempotency.redrive('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead');
SELECT pg_temp.parked('dead'), pg_temp.parked('dead too'), idempotency.redrive('dead');
-- Dropping the subscription deletes them.
SELECT idempotency.unsubscribe('dead too');
SELECT count(*) FROM idempotency.parked WHERE subscription = 'dead too';

-- An event that became a dead letter in a batch is not redelivered with the batch, even
-- if an operator redrives it before the batch is acknowledged.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 1);
SELECT pg_temp.publish('{33,34}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 33);
SELECT pg_temp.age_batch('dead');
SELECT pg_temp.fetch('dead'), idempotency.redrive('dead');
SELECT pg_temp.age_batch('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead'), pg_temp.parked('dead');

-- The limit at the time of the failure applies.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 5);
SELECT pg_temp.publish('{35}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 2);
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT idempotency.redrive('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead'), pg_temp.parked('dead');

--
-- Aggregates: events are delivered in order of publication
--

-- Later events of the aggregate wait: those in the batch, those to be redelivered, and
-- unpublished ones, whatever their topic. Events of other aggregates and of none are
-- delivered.
SELECT idempotency.subscribe('order', '{order,other}');
SELECT pg_temp.publish('{40,41}', 'A', 'order'), pg_temp.publish('{42}', 'B', 'order'), pg_temp.publish('{43}', 'A', 'other'), pg_temp.publish('{44}', NULL, 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 41, '1 hour'), pg_temp.parked('order');
SELECT pg_temp.nack('order', 44, '1 hour');
SELECT pg_temp.age_batch('order', '1 min'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.publish('{45}', 'A', 'other'), pg_temp.publish('{46}', 'B', 'order'), pg_temp.publish('{47}', NULL, 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{48}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.parked('order');
-- They are delivered after the failed event is acknowledged, and not before.
SELECT pg_temp.age_batch('order'), pg_temp.fetch('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{49}', 'A', 'order');
SELECT pg_temp.age_batch('order'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.parked('order');
SELECT pg_temp.publish('{50}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

-- Two events of an aggregate fail, in either order. The later one waits for the earlier
-- one, even if its own delay is shorter.
SELECT pg_temp.publish('{51,52,53}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 52), pg_temp.nack('order', 51, '1 hour'), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order');
SELECT pg_temp.age_batch('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 52, '1 hour'), pg_temp.parked('order');
-- The waiting event is no longer in the batch: nothing changes.
SELECT pg_temp.error_of('SELECT pg_temp.nack(''order'', 53)');
SELECT pg_temp.ack('order');
SELECT pg_temp.age_batch('order'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.parked('order');

-- Unblocked events are delivered in order even if they exceed one batch, and wait again
-- after another failure.
SELECT pg_temp.publish('{54,55,56,57}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 54), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order', 2), pg_temp.nack('order', 55, '1 hour'), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order');
SELECT pg_temp.age_batch('order'), pg_temp.fetch('order', 2), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 2), pg_temp.ack('order');
SELECT pg_temp.parked('order');

-- A dead letter unblocks its aggregate: the events that wait for it.
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 2);
SELECT pg_temp.publish('{60,61}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 60), pg_temp.ack('order');
SELECT pg_temp.publish('{62}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 60), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.publish('{63}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 1);
SELECT pg_temp.publish('{64,65}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 64), pg_temp.age_batch('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

-- Like after a failure, the later events of the aggregate have left the batch, so that
-- ack() does not include what the consumer has skipped. They are delivered again at once,
-- with the same attempt, parked ones included.
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 1);
SELECT pg_temp.publish('{180,181,182,183}', 'A', 'order'), pg_temp.publish('{184}', 'B', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 181), pg_temp.parked('order');
SELECT pg_temp.error_of('SELECT pg_temp.nack(''order'', 182)');
SELECT pg_temp.age_batch('order', '2 min'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 182), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order'), idempotency.redrive('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order');

-- An event that fails after an earlier one was redriven waits for the earlier one that
-- remains in the batch, whatever becomes of the batch.
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 2);
SELECT pg_temp.publish('{185,186,187}', 'A', 'order');
SELECT pg_temp.fetch('order', 1), pg_temp.nack('order', 185), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 185), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), idempotency.redrive('order'), pg_temp.nack('order', 187), pg_temp.parked('order');
BEGIN;
SELECT pg_temp.return_batch('order'), pg_temp.parked('order'), pg_temp.drain('order', 1);
ROLLBACK;
SELECT pg_temp.age_batch('order', '2 min'), pg_temp.drain('order', 1), pg_temp.parked('order');
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 1);

-- Redriven dead letters of an aggregate are delivered in their original order, whatever
-- the order of their failures and the server's plan; newer events wait for them.
SELECT pg_temp.publish('{66,67}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 67), pg_temp.nack('order', 66), pg_temp.ack('order');
SET enable_indexscan = off;
SET enable_bitmapscan = off;
SET jit = off;
DISCARD PLANS;
SELECT idempotency.redrive('order');
SELECT pg_temp.publish('{68}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
-- They follow an earlier event, whose retry is due then.
SELECT pg_temp.publish('{70,71,72}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 72), pg_temp.nack('order', 71);
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 2);
SELECT pg_temp.nack('order', 70, '1 hour'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT idempotency.redrive('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
RESET enable_indexscan;
RESET enable_bitmapscan;
RESET jit;
DISCARD PLANS;

-- A batch that was returned after a failure is delivered before the failed event of the
-- same aggregate; so is a batch whose lease expired.
SELECT pg_temp.publish('{80,81,82}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 81), pg_temp.return_batch('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{83,84,85}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 84), pg_temp.age_batch('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order');
-- An event that fetch() parked behind an earlier one is delivered once, although its
-- batch was returned.
SELECT pg_temp.publish('{86}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 86), pg_temp.ack('order');
SELECT pg_temp.publish('{87}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.parked('order'), pg_temp.return_batch('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.parked('order');

-- An aggregate id can be any text.
SELECT pg_temp.publish('{90,91}', '%', 'order'), pg_temp.publish('{92}', '_', 'order'), pg_temp.publish('{93}', ' %', 'order'), pg_temp.publish('{94}', repeat('☃', 255), 'order'), pg_temp.publish('{95}', repeat('☃', 254), 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 90), pg_temp.nack('order', 94), pg_temp.parked('order');
SELECT pg_temp.ack('order'), pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

--
-- Refused calls change nothing
--

SELECT pg_temp.publish('{100,101}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 101);
SELECT pg_temp.error_of(format('SELECT idempotency.%s', replace(call, 'CURRENT', pg_temp.batch('order')::text))) AS error FROM unnest(ARRAY[
	'nack(''order'', CURRENT, pg_temp.id(101))',
	'nack(''order'', CURRENT, pg_temp.id(99))',
	'nack(''order'', CURRENT + 1, pg_temp.id(100))',
	'nack(''order'', CURRENT + 1, NULL)',
	'nack(''order'', 0, pg_temp.id(100))',
	'nack(''order'', NULL, pg_temp.id(100))',
	'nack(''nack'', CURRENT, pg_temp.id(100))',
	'nack(''unknown'', CURRENT, pg_temp.id(100))',
	'nack(NULL, CURRENT, pg_temp.id(100))',
	'nack('''', CURRENT, pg_temp.id(100))',
	'discard(''unknown'')',
	'redrive(''unknown'')',
	'redrive(NULL)',
	'redrive(repeat(''s'', 256))']) AS call;
SELECT pg_temp.parked('order'), pg_temp.age_batch('order', '1 min'), pg_temp.fetch('order');
BEGIN READ ONLY;
SELECT idempotency.nack('order', pg_temp.batch('order'), pg_temp.id(100));
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.redrive('order');
ROLLBACK;
-- Losing a batch does not prevent the commit of the transaction's other work.
BEGIN;
SAVEPOINT s;
SELECT idempotency.nack('order', 1, pg_temp.id(100));
\echo :SQLSTATE
ROLLBACK TO s;
SELECT pg_temp.ack('order');
COMMIT;
SELECT pg_temp.fetch('order'), pg_temp.ack('order');

--
-- Many events of one aggregate
--

-- fetch() parks events behind a failed one, a bounded number per call. A call that returns no
-- event reports its progress, whether or not it can wait, and the next call continues.
SELECT idempotency.subscribe('many', '{many}', retry_delay => '1 hour');
SELECT count(idempotency.publish('many', to_json(n), 'hot')) FROM generate_series(1, 2500) AS n;
SELECT id AS first FROM idempotency.fetch('many', 1) \gset
SELECT idempotency.nack('many', pg_temp.batch('many'), :'first', 'it failed') > now() AS later, pg_temp.ack('many');
SELECT count(*) FROM idempotency.fetch('many', wait => '10 min');
SELECT scheduled, waiting, lag_events FROM idempotency.subscriptions JOIN idempotency.partitions USING (subscription) WHERE subscription = 'many';
SELECT count(*) FROM idempotency.fetch('many', 5);
SELECT scheduled, waiting, lag_events FROM idempotency.subscriptions JOIN idempotency.partitions USING (subscription) WHERE subscription = 'many';
-- Rolled-back progress is repeated.
BEGIN;
SELECT count(*) FROM idempotency.fetch('many');
ROLLBACK;
SELECT count(*) FROM idempotency.fetch('many');
SELECT scheduled, waiting, lag_events FROM idempotency.subscriptions JOIN idempotency.partitions USING (subscription) WHERE subscription = 'many';
-- Events of other aggregates and earlier events are delivered with the rest.
SELECT idempotency.publish('many', '0') IS NOT NULL AS published;
SELECT pg_temp.drain('many');

-- When the failed event is due, the batch has those behind it, too. Neither redelivery,
-- acknowledgement nor another failure reads all waiting events.
CREATE FUNCTION pg_temp.parked_read() RETURNS bigint LANGUAGE sql AS $$
	SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid))::bigint FROM pg_index WHERE indrelid = 'idempotency.parked'::regclass
$$;
-- The events of other aggregates are due in a year.
INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, queue, aggregatetype, aggregateid, attempts, alone, retry_at)
	SELECT 'many', 0, -n, now(), pg_temp.id(n), 0, 0, 'other ' || n, 'many', 'other ' || n, 1, false, now() + interval '1 year' FROM generate_series(1, 2500) AS n;
ANALYZE idempotency.parked;
SELECT pg_temp.age_batch('many');
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many');
SELECT pg_temp.ack('many');
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many', 10);
VACUUM idempotency.parked;
BEGIN;
SELECT pg_temp.parked_read() AS before \gset
SELECT pg_temp.ack('many');
SELECT pg_temp.parked_read() - :before < 100 AS few;
COMMIT;
SELECT id AS first FROM idempotency.fetch('many', 1) \gset
VACUUM idempotency.parked;
BEGIN;
SELECT pg_temp.parked_read() AS before \gset
SELECT idempotency.nack('many', pg_temp.batch('many'), :'first', 'it failed', '0') IS NOT NULL AS again;
SELECT pg_temp.parked_read() - :before < 100 AS few;
COMMIT;
SELECT pg_temp.ack('many');
SELECT scheduled, waiting FROM idempotency.subscriptions WHERE subscription = 'many';
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many', 1000);
SELECT pg_temp.ack('many');
SELECT scheduled, waiting FROM idempotency.subscriptions WHERE subscription = 'many';

-- The log has a line when events begin to fail, and one when they do no longer, a minute later at the
-- earliest.
SET timezone = 'UTC';
SELECT idempotency.subscribe('loud', '{loud}', max_attempts => 2);
SELECT pg_temp.publish('{901,902}', topic => 'loud');
SELECT pg_temp.fetch('loud');
SET client_min_messages = log;
SELECT pg_temp.nack('loud', 901, error => 'the first'), pg_temp.nack('loud', 902);
SELECT pg_temp.fetch('loud', 1), pg_temp.ack('loud');
UPDATE idempotency.position SET failing_since = '2026-01-01 00:00+00' WHERE subscription = 'loud';
SELECT pg_temp.publish('{903}', topic => 'loud');
SELECT pg_temp.fetch('loud', 1), pg_temp.nack('loud', 902);
SELECT pg_temp.drain('loud');
SELECT pg_temp.publish('{904,905}', topic => 'loud');
SELECT pg_temp.fetch('loud'), pg_temp.nack('loud', 904, error => 'once more');
UPDATE idempotency.position SET failing_since = '2026-01-02 00:00+00' WHERE subscription = 'loud';
SELECT pg_temp.nack('loud', 905, error => 'beside another one');
SELECT pg_temp.drain('loud');
RESET client_min_messages;
RESET timezone;
SELECT failing_since FROM idempotency.position WHERE subscription = 'loud';

SELECT idempotency.unsubscribe('loud'), idempotency.unsubscribe('nack'), idempotency.unsubscribe('dead'), idempotency.unsubscribe('order'), idempotency.unsubscribe('many');
SELECT count(*) FROM idempotency.parked WHERE subscription IN ('nack', 'dead', 'order');
