-- extension only: the outbox
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
SELECT n, aggregatetype, aggregateid, type, payload, headers, attempt FROM got ORDER BY n;
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
SELECT pg_temp.age_batch('fetch');
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

-- fetch() passes events of unwanted topics once, and also rolled-back events, before
-- and after VACUUM, and unused numbers. In the end the position lists none of them.
CREATE FUNCTION pg_temp.position() RETURNS text LANGUAGE sql AS $$
	SELECT format('%s behind the last event, %s in flight, batch: %s',
			(SELECT max(seq) FROM idempotency.outbox) - passed, cardinality(inflight) / 3, coalesce(batch::text, 'none'))
		FROM idempotency.position WHERE subscription = 'fetch'
$$;
SELECT pg_temp.fetch('fetch'), pg_temp.position();
SELECT pg_temp.publish('{1,2,3}', 'fetchtoo'), pg_temp.publish('{4}', 'Fetch');
SELECT pg_temp.position();
SELECT pg_temp.fetch('fetch'), pg_temp.position();
BEGIN;
SELECT pg_temp.publish('{5}');
ROLLBACK;
SELECT pg_temp.publish('{101}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch'), pg_temp.position();
BEGIN;
SELECT pg_temp.publish('{6,7}');
ROLLBACK;
VACUUM idempotency.outbox;
SELECT nextval('idempotency.outbox_seq') IS NOT NULL AS burned;
SELECT pg_temp.publish('{102}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch');
SELECT pg_temp.publish('{103}');
SELECT pg_temp.fetch('fetch'), pg_temp.ack('fetch'), pg_temp.position();
-- Each subscription has one row, whatever the calls.
SELECT count(*), min(version) > 50 AS grown FROM idempotency.position WHERE subscription = 'fetch';
-- An unwanted event that stops a full batch from advancing is left for the next batch.
SELECT pg_temp.publish('{104,105,106}');
SELECT pg_temp.fetch('fetch', 2), pg_temp.publish('{8,9}', 'fetch.not'), pg_temp.ack('fetch'), pg_temp.position();
SELECT pg_temp.fetch('fetch', 2), pg_temp.ack('fetch'), pg_temp.position();
SELECT pg_temp.fetch('fetch', 2), pg_temp.position();

-- The position of a restored database refers to transactions of another cluster. All of
-- them count as ended, and no in-flight event is held back or lost. The order of the
-- first calls does not matter, nor that transaction ids start again.
CREATE FUNCTION pg_temp.from_another_cluster() RETURNS void
	LANGUAGE sql SET session_replication_role = replica AS $$
	UPDATE idempotency.outbox SET txid = (txid::text::bigint + 1000000000000)::text::xid8 WHERE aggregatetype = 'restore';
	UPDATE idempotency.position SET system_identifier = 1,
			inflight = ARRAY(SELECT CASE WHEN (n - 1) % 3 = 0 THEN i + 1000000000000 * sign(i)::bigint ELSE i END FROM unnest(inflight) WITH ORDINALITY AS u (i, n) ORDER BY n),
			batch_inflight = CASE WHEN batch IS NOT NULL THEN
				ARRAY(SELECT CASE WHEN (n - 1) % 3 = 0 THEN i + 1000000000000 * sign(i)::bigint ELSE i END FROM unnest(batch_inflight) WITH ORDINALITY AS u (i, n) ORDER BY n) END
		WHERE subscription = 'restore';
$$;
CREATE FUNCTION pg_temp.in_flight(p_first int) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_temp.publish(ARRAY[p_first + 1], 'restore');
	RETURN pg_temp.fetch('restore');
END
$$;
SELECT idempotency.subscribe('restore', '{restore}');
SELECT pg_temp.publish('{1}', 'restore');
SELECT pg_temp.in_flight(1), pg_temp.from_another_cluster();
SELECT pg_temp.ack('restore'), pg_temp.fetch('restore'), pg_temp.ack('restore');
SELECT pg_temp.publish('{11}', 'restore');
SELECT pg_temp.in_flight(11), pg_temp.from_another_cluster();
SELECT pg_temp.age_batch('restore'), pg_temp.fetch('restore');
SELECT pg_temp.age_batch('restore'), pg_temp.fetch('restore'), pg_temp.ack('restore');
SELECT pg_temp.fetch('restore'), pg_temp.ack('restore');
SELECT pg_temp.publish('{21}', 'restore');
SELECT pg_temp.in_flight(21), pg_temp.from_another_cluster();
SELECT idempotency.extend('restore', pg_temp.batch('restore'), '1 min') > now() AS extended, idempotency.nack('restore', pg_temp.batch('restore'), NULL) <= clock_timestamp() AS given_back;
SELECT pg_temp.fetch('restore', 1), pg_temp.ack('restore'), pg_temp.fetch('restore'), pg_temp.ack('restore');
SELECT pg_temp.publish('{31}', 'restore');
SELECT pg_temp.in_flight(31), pg_temp.ack('restore'), pg_temp.from_another_cluster();
SELECT pg_temp.publish('{33}', 'restore');
SELECT pg_temp.fetch('restore', 1), pg_temp.ack('restore'), pg_temp.fetch('restore'), pg_temp.ack('restore');
-- Events acknowledged in the other cluster are not redelivered.
SELECT pg_temp.publish('{41,42,43}', 'restore');
SELECT pg_temp.fetch('restore', 2), pg_temp.ack('restore'), pg_temp.from_another_cluster();
SELECT pg_temp.fetch('restore'), pg_temp.ack('restore'), pg_temp.fetch('restore');
SELECT cardinality(inflight) AS in_flight FROM idempotency.position WHERE subscription = 'restore';
-- The same within this cluster, with the position of another outbox.
SELECT pg_temp.publish('{51}', 'restore');
SELECT pg_temp.in_flight(51), pg_temp.from_another_cluster();
UPDATE idempotency.position SET relation = 1, system_identifier = (SELECT system_identifier FROM pg_control_system()) WHERE subscription = 'restore';
SELECT pg_temp.ack('restore'), pg_temp.fetch('restore'), pg_temp.ack('restore');
-- A sequence that has assigned no number is behind every position, even the first.
BEGIN;
ALTER SEQUENCE idempotency.outbox_seq RESTART;
UPDATE idempotency.position SET passed = 1, inflight = '{}', relation = 1 WHERE subscription = 'restore';
SELECT pg_temp.error_of($$SELECT idempotency.fetch('restore')$$);
ROLLBACK;

-- A sequence that was set back below the position is not detected: events with those
-- numbers are not delivered.
SELECT last_value AS last FROM idempotency.outbox_seq \gset
DELETE FROM idempotency.outbox;
ALTER SEQUENCE idempotency.outbox_seq RESTART;
SELECT pg_temp.publish('{53}', 'restore'), pg_temp.fetch('restore');
DELETE FROM idempotency.outbox;
SELECT setval('idempotency.outbox_seq', :last) = :last AS set;

-- A gap in the numbers that can no longer be filled is given up, and existing events
-- within it are delivered.
SELECT pg_temp.publish('{61,62}', 'restore');
SELECT min(seq) AS first, max(seq) AS last FROM idempotency.outbox WHERE payload::text IN ('61', '62') AND aggregatetype = 'restore' \gset
UPDATE idempotency.position SET passed = :last + 5, inflight = ARRAY[-1, :first, :last + 3] WHERE subscription = 'restore';
SELECT setval('idempotency.outbox_seq', :last + 5) IS NOT NULL AS set;
SELECT pg_temp.fetch('restore', 1), pg_temp.ack('restore');
SELECT pg_temp.publish('{63}', 'restore');
SELECT pg_temp.fetch('restore', 1), pg_temp.ack('restore'), pg_temp.fetch('restore', 1), pg_temp.ack('restore'), pg_temp.fetch('restore', 1);
SELECT cardinality(inflight) AS in_flight FROM idempotency.position WHERE subscription = 'restore';

-- A malformed list of transactions is refused.
UPDATE idempotency.position SET inflight = '{1,2}' WHERE subscription = 'restore';
SELECT idempotency.fetch('restore');
\echo :SQLSTATE
UPDATE idempotency.position SET inflight = '{1,NULL,2}' WHERE subscription = 'restore';
SELECT idempotency.fetch('restore');
SELECT idempotency.unsubscribe('restore');

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
SELECT pg_temp.publish(array_agg(n), 'common') FROM generate_series(1, 1000) AS n;
SELECT clock_timestamp() AS before \gset
SELECT count(*) FROM idempotency.fetch('patient', wait => '10 min');
SELECT clock_timestamp() - :'before' < '5 min' AS soon;
SELECT idempotency.unsubscribe('patient');
DELETE FROM idempotency.outbox WHERE aggregatetype = 'common';
-- One call reads a bounded number of rows that are unwanted or not yet visible, so that
-- statement_timeout cannot stall a subscription.
CREATE FUNCTION pg_temp.entries_read() RETURNS bigint LANGUAGE sql AS $$
	SELECT pg_stat_get_xact_tuples_returned('idempotency.outbox_pkey'::regclass)
$$;
SELECT idempotency.subscribe('patient', '{rare}'), idempotency.subscribe('common', '{common}');
BEGIN;
SELECT pg_temp.publish(array_agg(n), 'common') FROM generate_series(1, 130000) AS n;
PREPARE TRANSACTION 'regress_fetch';
SELECT pg_temp.publish('{131}', 'rare');
SELECT lag_events FROM idempotency.subscriptions WHERE subscription = 'patient';
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*) FROM idempotency.fetch('patient', wait => '10 min');
SELECT pg_temp.entries_read() - :before BETWEEN 100000 AND 101000 AS bounded;
COMMIT;
SELECT pg_temp.fetch('patient');
SELECT pg_temp.ack('patient');
SELECT pg_temp.fetch('common');
SELECT pg_temp.fetch('common');
COMMIT PREPARED 'regress_fetch';
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*) FROM idempotency.fetch('patient', wait => '10 min');
SELECT pg_temp.entries_read() - :before BETWEEN 100000 AND 101000 AS bounded;
COMMIT;
SELECT pg_temp.publish('{132}', 'rare');
SELECT pg_temp.fetch('patient');
SELECT pg_temp.ack('patient'), idempotency.unsubscribe('patient');
-- A redelivered batch is found without reading the events that were in flight beside
-- it.
SELECT pg_temp.fetch('common', 1);
SELECT pg_temp.age_batch('common');
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT pg_temp.fetch('common', 1);
SELECT pg_temp.entries_read() - :before < 1000 AS few;
COMMIT;
SELECT idempotency.unsubscribe('common');
TRUNCATE idempotency.outbox;

-- Thousands of numbers without a row: the next call gives them up, and delivers a row
-- that was inserted under one of them since.
SELECT idempotency.subscribe('holes', '{hole}');
SELECT last_value AS last FROM idempotency.outbox_seq \gset
SELECT count(idempotency.publish('hole', to_json(n))) FROM generate_series(1, 6000) AS n;
CREATE TEMPORARY TABLE missing AS SELECT * FROM idempotency.outbox WHERE seq % 2 = 0 ORDER BY seq;
DELETE FROM idempotency.outbox WHERE seq % 2 = 0;
VACUUM idempotency.outbox;
SELECT count(*), pg_temp.ack('holes') FROM idempotency.fetch('holes', 10000);
SELECT cardinality(inflight) / 3 BETWEEN 2999 AND 3000 AS holes FROM idempotency.position WHERE subscription = 'holes';
INSERT INTO idempotency.outbox SELECT * FROM missing ORDER BY seq OFFSET 1000 LIMIT 1;
SELECT payload::text::int BETWEEN 2001 AND 2002 AS came FROM idempotency.fetch('holes', 10000);
SELECT pg_temp.ack('holes');
SELECT inflight FROM idempotency.position WHERE subscription = 'holes';
DROP TABLE missing;
SELECT idempotency.unsubscribe('holes');
TRUNCATE idempotency.outbox;

-- Batch numbers fit in 53 bits, because JSON numbers are often read as doubles.
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

-- The event type belongs to the extension.
SELECT pg_temp.publish('{113}');
BEGIN;
ALTER TYPE idempotency.event ADD ATTRIBUTE more text;
SELECT pg_temp.error_of($$SELECT idempotency.fetch('fetch')$$), pg_temp.error_of($$SELECT * FROM idempotency.fetch('fetch')$$);
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.event ALTER ATTRIBUTE seq TYPE text;
SELECT pg_temp.error_of($$SELECT * FROM idempotency.fetch('fetch')$$);
ROLLBACK;
SELECT pg_temp.fetch('fetch');

-- A number that a consumer has met without an event is given up: an event that a restore
-- inserts under it again is not delivered to that consumer.
SELECT pg_temp.ack('fetch'), pg_temp.publish('{121, 122}');
CREATE TEMPORARY TABLE deleted AS SELECT * FROM idempotency.outbox WHERE payload::text = '121';
DELETE FROM idempotency.outbox WHERE payload::text = '121';
SELECT pg_temp.drain('fetch');
SELECT pg_temp.publish('{123}');
SELECT pg_temp.drain('fetch');
INSERT INTO idempotency.outbox SELECT * FROM deleted;
SELECT pg_temp.drain('fetch');

SELECT idempotency.unsubscribe('fetch');
