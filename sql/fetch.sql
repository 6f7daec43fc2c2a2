-- reaper at rest: events that are put back stay
--
-- fetch(), ack(), extend(), and returning a batch, as one session sees them. The
-- isolation tests cover concurrent publishers and consumers; the nack test covers
-- failed events.
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

-- Events are identified by numbers, which are their payloads.
CREATE FUNCTION pg_temp.publish(numbers int[], topic text DEFAULT 'fetch') RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, to_json(n))) FROM unnest(numbers) AS n
$$;
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
-- Moves the lease of the current batch into the past by an interval.
CREATE FUNCTION pg_temp.age_batch(p_subscription text, p_time interval DEFAULT '1 day') RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.position SET leased_at = leased_at - p_time, leased_until = leased_until - p_time
		WHERE subscription = p_subscription
$$;

SELECT idempotency.subscribe('fetch', '{fetch}');

--
-- Batches
--

-- A batch contains all published events, unchanged and in order of publication.
SELECT pg_temp.fetch('fetch');
SELECT idempotency.publish('fetch', '{"b" : 1,  "a":[ ]}', 'order 7', 'placed', '{"trace" : "a1"}', 'f0000000-0000-0000-0000-000000000001');
SELECT idempotency.publish('fetch', NULL) IS NOT NULL AS published;
SELECT pg_temp.publish('{3,1,2}');
CREATE TEMPORARY TABLE got AS SELECT row_number() OVER () AS n, * FROM idempotency.fetch('fetch');
SELECT n, topic, aggregate_id, type, payload, headers, attempt FROM got ORDER BY n;
SELECT count(DISTINCT batch) AS batches, min(batch) > 0 AS positive, min(batch) = pg_temp.batch('fetch') AS returned FROM got;
SELECT bool_and(got.seq = o.seq AND got.published_at = o.published_at) AS same, count(*),
		array_agg(got.seq ORDER BY n) = array_agg(got.seq ORDER BY got.seq) AS ordered
	FROM got JOIN idempotency.outbox AS o USING (id);
SELECT pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch');

-- A batch has at most max events, 100 by default.
SELECT pg_temp.publish(array_agg(n)) FROM generate_series(1, 105) AS n;
SELECT pg_temp.fetch('fetch', 3), pg_temp.ack('fetch');
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idempotency.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch', 1), pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch', 2147483647), pg_temp.ack('fetch');

-- fetch() works wherever a set of rows is allowed, and always takes the whole batch,
-- even if the query reads only a part of it.
SELECT pg_temp.publish('{1,2,3}');
WITH f AS (SELECT idempotency.fetch('fetch') AS event) SELECT (event).payload FROM f WHERE (event).payload::text = '1';
SELECT idempotency.nack('fetch', pg_temp.batch('fetch'), NULL) IS NOT NULL AS returned;
SELECT (f).payload FROM idempotency.fetch('fetch') AS f WHERE (f).payload::text <> '2';
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');

--
-- One batch at a time
--

-- While the lease of a batch runs, no transaction gets events. Afterwards fetch()
-- redelivers the whole batch under another number.
SELECT pg_temp.publish('{11,12,13}');
SELECT pg_temp.fetch('fetch'), pg_temp.publish('{14}');
SELECT pg_temp.batch('fetch') AS old \gset
SELECT pg_temp.fetch('fetch');
SELECT leased_until - leased_at AS lease, leased_until - clock_timestamp() BETWEEN '1 s' AND '30 s' AS left FROM idempotency.position WHERE subscription = 'fetch';
SELECT pg_temp.age_batch('fetch', '31 s');
SELECT pg_temp.fetch('fetch', 1), pg_temp.batch('fetch') <> :old AS another;
SELECT pg_temp.error_of('SELECT idempotency.ack(''fetch'', ' || :old || ')');
SELECT pg_temp.error_of('SELECT idempotency.extend(''fetch'', ' || :old || ', ''1 h'')');
SELECT pg_temp.error_of('SELECT idempotency.nack(''fetch'', ' || :old || ', NULL)');
-- A late consumer can still acknowledge a batch that was not redelivered.
SELECT pg_temp.age_batch('fetch'), pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');

-- The consumer chooses the length of the lease, and can extend it from now on, even
-- after the lease expired.
SELECT pg_temp.publish('{21,22}');
SELECT count(*) FROM idempotency.fetch('fetch', lease => '1 h');
SELECT pg_temp.age_batch('fetch', '59 min'), pg_temp.fetch('fetch');
SELECT idempotency.extend('fetch', pg_temp.batch('fetch'), '10 min') AS until \gset
SELECT leased_until = :'until' AS stored, leased_until - clock_timestamp() BETWEEN '9 min' AND '10 min' AS extended
	FROM idempotency.position WHERE subscription = 'fetch';
SELECT pg_temp.age_batch('fetch', '9 min'), pg_temp.fetch('fetch');
SELECT pg_temp.age_batch('fetch', '9 min');
SELECT idempotency.extend('fetch', pg_temp.batch('fetch'), '1 min') > now() AS extended, pg_temp.fetch('fetch');
SELECT l AS lease, pg_temp.error_of(format('SELECT idempotency.extend(''fetch'', %s, %L)', pg_temp.batch('fetch'), l)) AS extend,
		pg_temp.error_of(format('SELECT idempotency.fetch(''fetch'', lease => %L)', l)) AS fetch
	FROM unnest('{0,-1 microsecond,-1 month,25 days,NULL}'::text[]) AS l;
SELECT pg_temp.age_batch('fetch'), pg_temp.fetch('fetch'), pg_temp.ack('fetch');
-- A clock that was set back leaves a lease that begins in the future: the lease counts
-- as expired.
SELECT pg_temp.publish('{23}');
SELECT pg_temp.fetch('fetch'), pg_temp.age_batch('fetch', '-1 day');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');

-- A returned batch is redelivered at once and in order, before or together with newer
-- events, and not counted as a failure.
SELECT pg_temp.publish('{31,32}');
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.batch('fetch') AS old \gset
SELECT t BETWEEN now() AND clock_timestamp() AS now FROM idempotency.nack('fetch', :old, NULL) AS t;
SELECT pg_temp.error_of('SELECT idempotency.ack(''fetch'', ' || :old || ')');
SELECT pg_temp.publish('{33}');
SELECT pg_temp.drain('fetch');
SELECT count(*) FROM idempotency.parked WHERE subscription = 'fetch';

-- Only the current batch can be acknowledged, and only once.
SELECT pg_temp.publish('{41}');
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.batch('fetch') AS batch \gset
SELECT pg_temp.error_of(format('SELECT idempotency.%s', call)) AS error FROM unnest(ARRAY[
	'ack(''fetch'', ' || :batch || ' - 1)',
	'ack(''fetch'', 0)',
	'ack(''fetch'', NULL)',
	'ack(''unknown'', ' || :batch || ')',
	'ack('''', ' || :batch || ')',
	'ack(NULL, ' || :batch || ')',
	'extend(''unknown'', ' || :batch || ', ''1 min'')',
	'extend(''fetch'', NULL, ''1 min'')',
	'extend(''fetch'', 0, ''1 min'')']) AS call;
SELECT idempotency.ack('fetch', :batch);
SELECT pg_temp.error_of('SELECT idempotency.ack(''fetch'', ' || :batch || ')');
SELECT pg_temp.error_of('SELECT idempotency.ack(''fetch'', 0)');
-- That error does not prevent the commit.
SELECT pg_temp.publish('{42}');
BEGIN;
SAVEPOINT s;
SELECT idempotency.ack('fetch', 1);
\echo :SQLSTATE
ROLLBACK TO s;
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
COMMIT;
SELECT pg_temp.fetch('fetch');

-- Each subscription has its own position.
SELECT idempotency.subscribe('fetch too', '{fetch}');
SELECT pg_temp.publish('{51,52,53}');
SELECT pg_temp.fetch('fetch', 2), pg_temp.fetch('fetch too', 1);
SELECT pg_temp.error_of('SELECT idempotency.ack(''fetch'', pg_temp.batch(''fetch too''))');
SELECT pg_temp.ack('fetch too'), pg_temp.fetch('fetch too'), pg_temp.ack('fetch'), pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.ack('fetch too'), pg_temp.fetch('fetch'), pg_temp.fetch('fetch too');
SELECT idempotency.unsubscribe('fetch too');

--
-- Transactions and rollback
--

-- Rolling back a fetch undoes it; rolling back an ack leaves the batch in flight.
SELECT pg_temp.publish('{61,62}');
BEGIN;
SELECT pg_temp.fetch('fetch');
ROLLBACK;
BEGIN;
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
ROLLBACK;
SELECT pg_temp.fetch('fetch');
BEGIN;
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
ROLLBACK;
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
-- The same holds for savepoints.
SELECT pg_temp.publish('{63,64,65}');
BEGIN;
SAVEPOINT s;
SELECT pg_temp.fetch('fetch', 1);
ROLLBACK TO s;
SELECT pg_temp.fetch('fetch', 2);
SAVEPOINT s;
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
ROLLBACK TO s;
SELECT pg_temp.fetch('fetch');
SAVEPOINT s;
SELECT pg_temp.ack('fetch');
RELEASE s;
COMMIT;
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch');

-- One transaction can fetch and acknowledge several batches and commit them with its
-- own work.
SELECT pg_temp.publish('{71,72,73,74,75}');
BEGIN;
SELECT pg_temp.fetch('fetch', 2), pg_temp.ack('fetch'), pg_temp.fetch('fetch', 2), pg_temp.ack('fetch'), pg_temp.fetch('fetch', 2), pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch');
COMMIT;
SELECT pg_temp.fetch('fetch');

-- Events that the fetching transaction publishes are delivered only after its commit;
-- rolled-back events are never delivered.
SELECT pg_temp.publish('{81}');
BEGIN;
SELECT pg_temp.publish('{82}');
SAVEPOINT s;
SELECT pg_temp.publish('{83}');
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
ROLLBACK TO s;
SELECT pg_temp.publish('{84}');
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
COMMIT;
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch');
BEGIN;
SELECT pg_temp.publish('{85}');
SAVEPOINT s;
SELECT pg_temp.publish('{86}'), pg_temp.fetch('fetch');
RELEASE s;
SELECT pg_temp.publish('{87}'), pg_temp.fetch('fetch');
COMMIT;
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
BEGIN;
SELECT pg_temp.publish('{88}'), pg_temp.fetch('fetch');
ROLLBACK;
SELECT pg_temp.publish('{89}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
-- A batch that was fetched beside such events is redelivered without them.
SELECT pg_temp.publish('{91}');
BEGIN;
SELECT pg_temp.publish('{92,93}');
SELECT pg_temp.fetch('fetch');
COMMIT;
SELECT pg_temp.age_batch('fetch'), pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch', 1);
SELECT pg_temp.age_batch('fetch'), pg_temp.fetch('fetch');
SELECT pg_temp.ack('fetch'), pg_temp.fetch('fetch'), pg_temp.ack('fetch');
SELECT pg_temp.fetch('fetch');

-- fetch() refuses a fixed snapshot, which would hide newer events; ack() accepts it.
SELECT pg_temp.publish('{95,96}');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idempotency.fetch('fetch');
\echo :SQLSTATE
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idempotency.fetch('fetch');
ROLLBACK;
SELECT pg_temp.fetch('fetch', 1);
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idempotency.extend('fetch', pg_temp.batch('fetch'), '1 h') > now() AS extended;
COMMIT;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.ack('fetch');
COMMIT;
BEGIN ISOLATION LEVEL READ UNCOMMITTED;
SELECT pg_temp.fetch('fetch');
COMMIT;
BEGIN READ ONLY;
SELECT idempotency.fetch('fetch');
ROLLBACK;
BEGIN READ ONLY;
SELECT pg_temp.ack('fetch');
\echo :SQLSTATE
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.extend('fetch', 1, '1 min');
\echo :SQLSTATE
ROLLBACK;
SELECT pg_temp.ack('fetch');

--
-- Position
--

-- fetch() passes events of unwanted topics, rolled-back events, before and after VACUUM,
-- and unused numbers.
SELECT pg_temp.fetch('fetch'), pg_temp.publish('{1,2,3}', 'fetchtoo'), pg_temp.publish('{4}', 'Fetch');
SELECT pg_temp.fetch('fetch');
BEGIN;
SELECT pg_temp.publish('{5}');
ROLLBACK;
SELECT pg_temp.publish('{101}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
BEGIN;
SELECT pg_temp.publish('{6,7}');
ROLLBACK;
VACUUM idempotency.outbox;
SELECT nextval('idempotency.outbox_seq') IS NOT NULL AS burned;
SELECT pg_temp.publish('{102}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
-- Each partition has one row, whatever the calls.
SELECT count(*), min(version) > 50 AS grown FROM idempotency.position WHERE subscription = 'fetch';

-- A number that a consumer has met without an event is given up: an event that a restore
-- inserts under it again is not delivered to that consumer.
SELECT pg_temp.publish('{121, 122}');
CREATE TEMPORARY TABLE deleted AS SELECT * FROM idempotency.outbox WHERE payload::text = '121';
DELETE FROM idempotency.outbox WHERE payload::text = '121';
SELECT pg_temp.drain('fetch');
INSERT INTO idempotency.outbox SELECT * FROM deleted;
SELECT pg_temp.publish('{123}');
SELECT pg_temp.drain('fetch');

-- A sequence that is behind the events is reported, and nothing is passed.
SELECT last_value AS last FROM idempotency.outbox_seq \gset
ALTER SEQUENCE idempotency.outbox_seq RESTART;
SELECT pg_temp.error_of($$SELECT idempotency.fetch('fetch')$$);
SELECT setval('idempotency.outbox_seq', :last) = :last AS set;
SELECT pg_temp.publish('{124}');
SELECT pg_temp.drain('fetch');

--
-- Waiting, and refused arguments
--

-- fetch() waits until an event arrives or the wait ends; NULL means no wait.
SELECT pg_temp.publish('{111}');
SELECT payload FROM idempotency.fetch('fetch', wait => '30 s');
SELECT clock_timestamp() AS before \gset
SELECT count(*) FROM idempotency.fetch('fetch', wait => '60 ms');
SELECT clock_timestamp() - :'before' BETWEEN '60 ms' AND '30 s' AS waited;
SELECT pg_temp.ack('fetch');
SELECT count(*) FROM idempotency.fetch('fetch', wait => '1 microsecond');
SET statement_timeout = '30 s';
SELECT count(*) FROM idempotency.fetch('fetch', wait => NULL);
SELECT count(*) FROM idempotency.fetch('fetch', wait => '0');
RESET statement_timeout;
-- It also wakes when a lease ends,
SELECT pg_temp.publish('{112}');
SELECT count(*) FROM idempotency.fetch('fetch', lease => '80 ms');
SELECT payload FROM idempotency.fetch('fetch', wait => '30 s');
SELECT pg_temp.ack('fetch');
-- and returns early after passing many unwanted events, so that the commit stores the
-- progress.
SELECT idempotency.subscribe('patient', '{rare}');
SELECT pg_temp.publish(array_agg(n), 'common') FROM generate_series(1, 1100) AS n;
SELECT clock_timestamp() AS before \gset
SELECT count(*) FROM idempotency.fetch('patient', wait => '10 min');
SELECT clock_timestamp() - :'before' < '5 min' AS soon;
-- One call reads a bounded number of rows that are unwanted or not visible yet, so that
-- statement_timeout cannot stall a subscription.
CREATE FUNCTION pg_temp.entries_read() RETURNS bigint LANGUAGE sql AS $$
	SELECT pg_stat_get_xact_tuples_returned('idempotency.outbox_pkey'::regclass)
$$;
CREATE FUNCTION pg_temp.bulk(numbers int) RETURNS void LANGUAGE sql AS $$
	INSERT INTO idempotency.outbox (seq, txid, published_at, id, bucket, bytes, aggregatetype)
	SELECT nextval('idempotency.outbox_seq'), pg_current_xact_id(), now(), gen_random_uuid(), 0, 0, 'common' FROM generate_series(1, numbers)
$$;
BEGIN;
SELECT pg_temp.bulk(130000);
PREPARE TRANSACTION 'regress_fetch';
SELECT pg_temp.publish('{131}', 'rare');
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*) FROM idempotency.fetch('patient');
SELECT pg_temp.entries_read() - :before BETWEEN 90000 AND 110000 AS bounded;
COMMIT;
SELECT pg_temp.fetch('patient');
SELECT pg_temp.ack('patient');
COMMIT PREPARED 'regress_fetch';
SELECT pg_temp.publish('{132}', 'rare');
SELECT pg_temp.fetch('patient'), pg_temp.fetch('patient');
SELECT pg_temp.ack('patient'), idempotency.unsubscribe('patient');
TRUNCATE idempotency.outbox;

-- Batch numbers fit in 53 bits, because JSON numbers are often read as doubles.
SELECT pg_temp.fetch('fetch'), pg_temp.fetch('fetch');
SELECT pg_temp.publish(array_agg(n)) FROM generate_series(1, 30) AS n;
CREATE TEMPORARY TABLE batches (batch bigint);
DO $$
DECLARE
	fetched bigint;
BEGIN
	FOR n IN 1 .. 30 LOOP
		SELECT batch INTO fetched FROM idempotency.fetch('fetch', 1);
		PERFORM idempotency.ack('fetch', fetched);
		INSERT INTO batches VALUES (fetched);
	END LOOP;
END
$$;
SELECT bool_and(batch BETWEEN 1 AND 9007199254740991) AS exact, count(DISTINCT batch), max(batch) > 4294967296 AS large FROM batches;
DROP TABLE batches;

-- Each transaction that fetched leaves its own id to the next call.
SELECT pg_temp.fetch('fetch');
SELECT pg_temp.fetch('fetch');
-- Cancelling a statement ends a wait.
SET statement_timeout = '50 ms';
SELECT idempotency.fetch('fetch', wait => '1 hour');
\echo :SQLSTATE
RESET statement_timeout;

SELECT pg_temp.error_of(format('SELECT idempotency.fetch(%s)', arguments)) AS error FROM unnest(ARRAY[
	'NULL',
	'''''',
	'repeat(''s'', 256)',
	'E''a\tb''',
	'''unknown''',
	'''Fetch''',
	'''fetch'', 0',
	'''fetch'', -1',
	'''fetch'', NULL',
	'''fetch'', wait => ''-1 s''',
	'''fetch'', wait => ''-1 day 1 hour''']) AS arguments;

SELECT idempotency.unsubscribe('fetch');

-- The first call passes numbers that have no events at once.
TRUNCATE idempotency.outbox;
SELECT setval('idempotency.outbox_seq', nextval('idempotency.outbox_seq') + 1000000) > 0 AS raised;
SELECT idempotency.subscribe('empty', '{high}', start_at => 'beginning');
SELECT pg_temp.fetch('empty');
SELECT pg_temp.publish('{130}', 'high');
SELECT idempotency.subscribe('high', '{high}', start_at => 'beginning');
SELECT payload FROM idempotency.fetch('high');
SELECT pg_temp.fetch('empty');
SELECT idempotency.unsubscribe('empty');
SELECT idempotency.unsubscribe('high');

-- A batch of a large window reads its own events, in any state of the statistics.
SELECT idempotency.subscribe('window', '{common}');
SELECT pg_temp.bulk(50000);
SELECT batch FROM idempotency.fetch('window', 1) \gset
SELECT idempotency.ack('window', :batch);
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*) FROM idempotency.fetch('window', 100);
SELECT pg_temp.entries_read() - :before <= 300 AS few;
ROLLBACK;
ANALYZE idempotency.outbox;
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*) FROM idempotency.fetch('window', 100);
SELECT pg_temp.entries_read() - :before <= 300 AS few;
ROLLBACK;
SELECT idempotency.unsubscribe('window');
TRUNCATE idempotency.outbox;
