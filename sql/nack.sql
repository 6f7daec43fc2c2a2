--
-- nack(), redrive() and dead_letters: events that failed.  When they come again, for
-- how long, and what becomes of the later events of the same aggregate.
--
\set SHOW_CONTEXT never

-- What a statement comes to: its SQLSTATE, message and detail, without the number
-- of a batch.
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

-- Events are known by numbers: their payloads, and the ends of their ids.
CREATE FUNCTION pg_temp.id(n int) RETURNS uuid LANGUAGE sql AS $$
	SELECT lpad(n::text, 32, '0')::uuid
$$;
CREATE FUNCTION pg_temp.publish(numbers int[], aggregate text DEFAULT NULL, topic text DEFAULT 'nack') RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, to_json(n), aggregate, event_id => pg_temp.id(n))) FROM unnest(numbers) AS n
$$;

-- The next batch, in order, with the attempt where it is not the first.
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
CREATE FUNCTION pg_temp.give_back(subscription text) RETURNS boolean LANGUAGE sql AS $$
	SELECT idempotency.nack(subscription, pg_temp.batch(subscription), NULL) <= clock_timestamp()
$$;
-- All that is to come, batch after batch.
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
-- What became of an event that failed.
CREATE FUNCTION pg_temp.nack(subscription text, n int, retry_in interval DEFAULT '0', error text DEFAULT 'it failed') RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN t <= clock_timestamp() THEN 'again now' WHEN t > clock_timestamp() THEN 'again later' ELSE 'dead' END
	FROM idempotency.nack(subscription, pg_temp.batch(subscription), pg_temp.id(n), error, retry_in) AS t
$$;
-- Makes it so much later: for the lease of the batch that is out, and for the
-- retries.
CREATE FUNCTION pg_temp.pass(p_subscription text, p_time interval DEFAULT '1 day') RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.position SET leased_at = leased_at - p_time, leased_until = leased_until - p_time
		WHERE subscription = p_subscription;
	UPDATE idempotency.parked SET retry_at = retry_at - p_time WHERE subscription = p_subscription;
$$;
CREATE FUNCTION pg_temp.parked(p_subscription text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload || CASE WHEN dead_at IS NOT NULL THEN ' dead' WHEN retry_at IS NULL THEN ' waits' ELSE ' comes' END, ', ' ORDER BY seq)
	FROM idempotency.parked WHERE subscription = p_subscription
$$;

--
-- One event fails
--

-- It leaves the batch, whose others go on; it comes again in its own time, before
-- what is new, and says how often it was tried.
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
SELECT pg_temp.pass('nack');
SELECT pg_temp.fetch('nack');
SELECT error, attempts, first_failed_at = last_failed_at AS once, last_failed_at BETWEEN now() - interval '1 min' AND clock_timestamp() AS now
	FROM idempotency.parked WHERE subscription = 'nack';
SELECT last_error, last_error_at BETWEEN now() - interval '1 min' AND clock_timestamp() AS now
	FROM idempotency.subscriptions WHERE subscription = 'nack';
-- What succeeds in the end leaves nothing.
SELECT pg_temp.ack('nack');
SELECT pg_temp.parked('nack'), pg_temp.fetch('nack');

-- It may fail more often; the last error stays, and the times of the first and the
-- last.
SELECT pg_temp.publish('{6}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', 'one'), pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', 'two'), pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 6, '0', NULL), pg_temp.ack('nack');
SELECT error, attempts, first_failed_at < last_failed_at AS longer FROM idempotency.parked WHERE subscription = 'nack';
SELECT last_error FROM idempotency.subscription WHERE subscription = 'nack';
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack'), pg_temp.parked('nack');

-- What comes again is a copy: the outbox need not have it any more.
BEGIN;
SELECT outcome FROM idempotency.claim('nack', 'copy');
SELECT idempotency.complete('nack', 'copy');
SELECT idempotency.publish('nack', '{"b" : 1,  "a":[ ]}', 'order ''7''', 'placed', '{"trace": "☃"}', pg_temp.id(7));
COMMIT;
SELECT f.aggregatetype, f.aggregateid, f.type, f.payload, f.headers, f.attempt, f.id, f.seq = o.seq AND f.published_at = o.published_at AS same
	FROM idempotency.fetch('nack') AS f JOIN idempotency.outbox AS o USING (id);
SELECT seq, published_at FROM idempotency.outbox WHERE id = pg_temp.id(7) \gset
SELECT pg_temp.nack('nack', 7), pg_temp.ack('nack');
DELETE FROM idempotency.outbox WHERE id = pg_temp.id(7);
SELECT f.aggregatetype, f.aggregateid, f.type, f.payload, f.headers, f.attempt, f.id, f.seq = :seq AND f.published_at = :'published_at' AS same
	FROM idempotency.fetch('nack') AS f;
SELECT pg_temp.ack('nack');
-- So is one of nothing but a topic.
SELECT idempotency.publish('nack', NULL, event_id => pg_temp.id(8));
SELECT payload, headers, attempt FROM idempotency.fetch('nack');
SELECT pg_temp.nack('nack', 8), pg_temp.ack('nack');
SELECT aggregatetype, aggregateid, type, payload, headers, attempt, id FROM idempotency.fetch('nack');
SELECT pg_temp.ack('nack');

-- It is undone with its transaction, or its savepoint.
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

-- Whatever else is done to the batch, what failed is no part of it any more: it does
-- not come again before its time, and the rest does.
SELECT pg_temp.publish('{11,12,13}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 12, '1 hour');
SELECT idempotency.extend('nack', pg_temp.batch('nack'), '1 min') > now() AS extended;
SELECT pg_temp.pass('nack', '2 min');
SELECT pg_temp.fetch('nack');
SELECT pg_temp.nack('nack', 11, '1 hour');
SELECT pg_temp.pass('nack', '2 min');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 13, '1 hour');
SELECT pg_temp.pass('nack', '2 min');
SELECT pg_temp.fetch('nack'), pg_temp.parked('nack');
SELECT pg_temp.pass('nack', '2 hours');
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack');
-- A batch of which all has failed may be acknowledged.
SELECT pg_temp.publish('{14,15}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 14), pg_temp.nack('nack', 15), pg_temp.ack('nack');
SELECT pg_temp.fetch('nack'), pg_temp.ack('nack');
-- One that was given back comes again without what failed, which comes but once.
SELECT pg_temp.publish('{16,17,18}');
SELECT pg_temp.fetch('nack'), pg_temp.nack('nack', 17, '1 hour'), pg_temp.give_back('nack');
SELECT pg_temp.fetch('nack'), pg_temp.give_back('nack');
SELECT pg_temp.pass('nack');
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
-- When it comes again
--

-- After each failure twice as long as after the one before, up to a limit; from half
-- of it to the whole, as chance will have it.
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
		PERFORM pg_temp.pass('backoff');
	END LOOP;
END
$$;
SELECT attempt, delay >= least(100, 10 * 2 ^ (attempt - 1)) / 2 * interval '1 s' AS half,
		delay < least(100, 10 * 2 ^ (attempt - 1)) * interval '1 s' + interval '2 s' AS whole
	FROM backoff WHERE attempt <= 5 ORDER BY attempt;
SELECT count(*), count(DISTINCT delay) > 40 AS differ, min(delay) BETWEEN '50 s' AND '75 s' AS sooner, max(delay) BETWEEN '75 s' AND '102 s' AS later
	FROM backoff WHERE attempt > 5;

-- The first delay may be none, or longer than the longest, which wins.
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '0', max_retry_delay => '1 hour', max_attempts => 1000);
SELECT pg_temp.fetch('backoff'), pg_temp.nack('backoff', 20, NULL), pg_temp.ack('backoff');
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '1 hour', max_retry_delay => '2 s', max_attempts => 1000);
SELECT pg_temp.fetch('backoff');
SELECT t BETWEEN now() + interval '1 s' AND clock_timestamp() + interval '2 s' AS longest
	FROM idempotency.nack('backoff', pg_temp.batch('backoff'), pg_temp.id(20), 'no') AS t;
SELECT pg_temp.ack('backoff'), pg_temp.pass('backoff');
SELECT idempotency.subscribe('backoff', '{backoff}', retry_delay => '100000 years', max_retry_delay => '170000000 years', max_attempts => 1000);
SELECT pg_temp.fetch('backoff');
SELECT t BETWEEN now() + interval '49 years' AND now() + interval '101 years' AS some_day
	FROM idempotency.nack('backoff', pg_temp.batch('backoff'), pg_temp.id(20), 'no') AS t;
SELECT pg_temp.ack('backoff');
SELECT idempotency.unsubscribe('backoff');

-- The consumer may say when: exactly then, whatever the limit.
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
-- Who waits for events gets it at that moment.
SELECT payload, attempt FROM idempotency.fetch('retry_in', wait => '1 min');
SELECT clock_timestamp() - last_failed_at BETWEEN '50 ms' AND '30 s' AS waited FROM idempotency.parked WHERE subscription = 'retry_in';
SELECT idempotency.unsubscribe('retry_in');

--
-- Dead letters
--

-- After so many failures it is tried no more.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 2);
SELECT pg_temp.publish('{30,31,32}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 30, error => 'first'), pg_temp.nack('dead', 32, error => 'first'), pg_temp.ack('dead');
SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'dead';
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 30, '1 hour', 'second'), pg_temp.nack('dead', 32, NULL, 'second'), pg_temp.ack('dead');
SELECT event_id, topic, aggregate_id, type, payload, headers, error, attempts, first_failed_at < last_failed_at AS longer, seq = (SELECT seq FROM idempotency.outbox WHERE id = event_id) AS same
	FROM idempotency.dead_letters WHERE subscription = 'dead' ORDER BY seq;
SELECT pg_temp.pass('dead'), pg_temp.fetch('dead');

-- An operator may give one once more, as if it had never failed, ...
SELECT idempotency.redrive('dead', pg_temp.id(32));
SELECT idempotency.redrive('dead', pg_temp.id(32)), idempotency.redrive('dead', pg_temp.id(31)), idempotency.redrive('dead', pg_temp.id(99));
SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'dead';
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 32, error => 'third'), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 32, error => 'fourth'), pg_temp.ack('dead');
SELECT payload, error, attempts FROM idempotency.dead_letters WHERE subscription = 'dead' ORDER BY seq;
-- ... or all of them, and of one subscription only.
SELECT idempotency.subscribe('dead too', '{dead}', start_at => 'beginning', max_attempts => 1);
SELECT pg_temp.fetch('dead too'), pg_temp.nack('dead too', 30), pg_temp.ack('dead too');
BEGIN;
SELECT idempotency.redrive('dead');
ROLLBACK;
SELECT pg_temp.fetch('dead');
SELECT idempotency.redrive('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead');
SELECT pg_temp.parked('dead'), pg_temp.parked('dead too'), idempotency.redrive('dead');
-- They go with their subscription.
SELECT idempotency.unsubscribe('dead too');
SELECT count(*) FROM idempotency.parked WHERE subscription = 'dead too';

-- One that died in a batch which is given again is not given with it; nor is one that
-- an operator redrives meanwhile, before the batch is done.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 1);
SELECT pg_temp.publish('{33,34}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 33);
SELECT pg_temp.pass('dead');
SELECT pg_temp.fetch('dead'), idempotency.redrive('dead');
SELECT pg_temp.pass('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead'), pg_temp.parked('dead');

-- How often it may fail is what holds when it fails.
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 5);
SELECT pg_temp.publish('{35}', topic => 'dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT idempotency.subscribe('dead', '{dead}', max_attempts => 2);
SELECT pg_temp.fetch('dead'), pg_temp.nack('dead', 35), pg_temp.ack('dead');
SELECT idempotency.redrive('dead');
SELECT pg_temp.fetch('dead'), pg_temp.ack('dead'), pg_temp.parked('dead');

--
-- Aggregates: their events come in the order in which they were published
--

-- What came later waits: in the batch, among what comes again, and what is yet to be
-- published, whatever its topic.  Other aggregates go on, and events of none.
SELECT idempotency.subscribe('order', '{order,other}');
SELECT pg_temp.publish('{40,41}', 'A', 'order'), pg_temp.publish('{42}', 'B', 'order'), pg_temp.publish('{43}', 'A', 'other'), pg_temp.publish('{44}', NULL, 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 41, '1 hour'), pg_temp.parked('order');
SELECT pg_temp.nack('order', 44, '1 hour');
SELECT pg_temp.pass('order', '1 min'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.publish('{45}', 'A', 'other'), pg_temp.publish('{46}', 'B', 'order'), pg_temp.publish('{47}', NULL, 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{48}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.parked('order');
-- They come when it has come, and no sooner than it is acknowledged.
SELECT pg_temp.pass('order'), pg_temp.fetch('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{49}', 'A', 'order');
SELECT pg_temp.pass('order'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.parked('order');
SELECT pg_temp.publish('{50}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.parked('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

-- Two of an aggregate fail, the later one first or the earlier; the later one waits
-- for the earlier, whatever it was promised.
SELECT pg_temp.publish('{51,52,53}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 52), pg_temp.nack('order', 51, '1 hour'), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order');
SELECT pg_temp.pass('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 52, '1 hour'), pg_temp.parked('order');
-- The one that waits is not in the batch any more.
SELECT pg_temp.error_of('SELECT pg_temp.nack(''order'', 53)');
SELECT pg_temp.ack('order');
SELECT pg_temp.pass('order'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

-- What was let go comes in its order though not all of it fits, and waits again if
-- one fails again.
SELECT pg_temp.publish('{54,55,56,57}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 54), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order', 2), pg_temp.nack('order', 55, '1 hour'), pg_temp.parked('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order');
SELECT pg_temp.pass('order'), pg_temp.fetch('order', 2), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 2), pg_temp.ack('order');
SELECT pg_temp.parked('order');

-- A dead letter lets the aggregate go on: what waited, and what is in the batch.
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
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 64), pg_temp.pass('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

-- Dead letters of an aggregate come in their order when all are redriven, whatever
-- the order in which they died, and however the server looks for them; what is new
-- waits for them.
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
-- They wait for an earlier one that is to come again, and come after it.
SELECT pg_temp.publish('{70,71,72}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 72), pg_temp.nack('order', 71);
SELECT idempotency.subscribe('order', '{order,other}', max_attempts => 2);
SELECT pg_temp.nack('order', 70, '1 hour'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT idempotency.redrive('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order');
SELECT pg_temp.pass('order'), pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');
RESET enable_indexscan;
RESET enable_bitmapscan;
RESET jit;
DISCARD PLANS;

-- A batch that was given back after a failure comes before what failed of the same
-- aggregate; so does one whose lease ran out.
SELECT pg_temp.publish('{80,81,82}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 81), pg_temp.give_back('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order');
SELECT pg_temp.publish('{83,84,85}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 84), pg_temp.pass('order');
SELECT pg_temp.drain('order'), pg_temp.parked('order');
-- What a fetch let wait behind an earlier one comes once, though its batch was given
-- back.
SELECT pg_temp.publish('{86}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 86), pg_temp.ack('order');
SELECT pg_temp.publish('{87}', 'A', 'order');
SELECT pg_temp.fetch('order'), pg_temp.parked('order'), pg_temp.give_back('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.ack('order');
SELECT pg_temp.fetch('order', 1), pg_temp.parked('order');

-- The aggregate is data like any other.
SELECT pg_temp.publish('{90,91}', '%', 'order'), pg_temp.publish('{92}', '_', 'order'), pg_temp.publish('{93}', ' %', 'order'), pg_temp.publish('{94}', repeat('☃', 255), 'order'), pg_temp.publish('{95}', repeat('☃', 254), 'order');
SELECT pg_temp.fetch('order'), pg_temp.nack('order', 90), pg_temp.nack('order', 94), pg_temp.parked('order');
SELECT pg_temp.ack('order'), pg_temp.fetch('order'), pg_temp.ack('order');
SELECT pg_temp.fetch('order'), pg_temp.ack('order'), pg_temp.parked('order');

--
-- What is refused; it changes nothing
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
	'nack(''nobody'', CURRENT, pg_temp.id(100))',
	'nack(NULL, CURRENT, pg_temp.id(100))',
	'nack('''', CURRENT, pg_temp.id(100))',
	'redrive(''nobody'')',
	'redrive(NULL)',
	'redrive(repeat(''s'', 256))']) AS call;
SELECT pg_temp.parked('order'), pg_temp.pass('order', '1 min'), pg_temp.fetch('order');
BEGIN READ ONLY;
SELECT idempotency.nack('order', pg_temp.batch('order'), pg_temp.id(100));
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.redrive('order');
ROLLBACK;
-- A batch that is lost dooms nothing: the work of the transaction may be kept.
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

-- They are parked behind the one that failed a thousand at a time: a fetch that gives
-- nothing says how far it has come, whether it may wait or not, and the next goes on.
SELECT idempotency.subscribe('many', '{many}', retry_delay => '1 hour');
SELECT count(idempotency.publish('many', to_json(n), 'hot')) FROM generate_series(1, 2500) AS n;
SELECT id AS first FROM idempotency.fetch('many', 1) \gset
SELECT idempotency.nack('many', pg_temp.batch('many'), :'first', 'it failed') > now() AS later, pg_temp.ack('many');
SELECT count(*) FROM idempotency.fetch('many', wait => '10 min');
SELECT parked, waiting, lag_events FROM idempotency.subscriptions WHERE subscription = 'many';
SELECT count(*) FROM idempotency.fetch('many', 5);
SELECT parked, waiting, lag_events FROM idempotency.subscriptions WHERE subscription = 'many';
-- What was not committed is done again.
BEGIN;
SELECT count(*) FROM idempotency.fetch('many');
ROLLBACK;
SELECT count(*) FROM idempotency.fetch('many');
SELECT parked, waiting, lag_events FROM idempotency.subscriptions WHERE subscription = 'many';
-- What is neither of the aggregate nor behind it comes with the rest.
SELECT idempotency.publish('many', '0') IS NOT NULL AS published;
SELECT pg_temp.drain('many');

-- When it is done they go a hundred at a time, and those that wait are not read for that,
-- be they given again, be they acknowledged, all of one aggregate, or does one fail again.
CREATE FUNCTION pg_temp.parked_read() RETURNS bigint LANGUAGE sql AS $$
	SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid))::bigint FROM pg_index WHERE indrelid = 'idempotency.parked'::regclass
$$;
-- (As many of other aggregates are to come in a year.)
INSERT INTO idempotency.parked (subscription, seq, published_at, id, aggregatetype, aggregateid, attempts, retry_at)
	SELECT 'many', -n, now(), pg_temp.id(n), 'many', 'other ' || n, 1, now() + interval '1 year' FROM generate_series(1, 2500) AS n;
ANALYZE idempotency.parked;
SELECT pg_temp.pass('many');
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many');
SELECT pg_temp.ack('many');
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many', 1000);
BEGIN;
SELECT pg_temp.parked_read() AS before \gset
SELECT pg_temp.ack('many');
SELECT pg_temp.parked_read() - :before < 1500 AS few;
COMMIT;
SELECT id AS first FROM idempotency.fetch('many', 1) \gset
BEGIN;
SELECT pg_temp.parked_read() AS before \gset
SELECT idempotency.nack('many', pg_temp.batch('many'), :'first', 'it failed', '0') IS NOT NULL AS again;
SELECT pg_temp.parked_read() - :before < 1500 AS few;
COMMIT;
SELECT pg_temp.ack('many');
SELECT parked, waiting FROM idempotency.subscriptions WHERE subscription = 'many';
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('many', 1000);
SELECT pg_temp.ack('many');
SELECT parked, waiting FROM idempotency.subscriptions WHERE subscription = 'many';

SELECT idempotency.unsubscribe('nack'), idempotency.unsubscribe('dead'), idempotency.unsubscribe('order'), idempotency.unsubscribe('many');
SELECT count(*) FROM idempotency.parked WHERE subscription IN ('nack', 'dead', 'order');
