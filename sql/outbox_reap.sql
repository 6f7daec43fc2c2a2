-- extension only: the outbox
-- reaper at rest: the test reaps
--
-- reap() deletes events that every subscription has acknowledged and that are old
-- enough, and no others. A subscription without a consumer is advanced past old events.
-- The view subscriptions shows the progress of each.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key, idempotency.reaper, idempotency.outbox, idempotency.subscription, idempotency.position, idempotency.parked;
ALTER SEQUENCE idempotency.outbox_seq RESTART;

-- Publishes events of a topic, with no publication time given.
CREATE FUNCTION pg_temp.publish(events int, topic text DEFAULT 'order', aggregate text DEFAULT NULL) RETURNS bigint
	LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, json_build_object('n', i), aggregate)) FROM generate_series(1, events) AS i
$$;
-- Moves the publication times into the past by an interval.
CREATE FUNCTION pg_temp.age(first bigint, last bigint, age interval) RETURNS bigint
	LANGUAGE sql SET session_replication_role = replica AS $$
	WITH aged AS (
		UPDATE idempotency.outbox SET published_at = clock_timestamp() - age WHERE seq BETWEEN first AND last RETURNING 1)
	SELECT count(*) FROM aged
$$;
-- The events in the outbox: numbers, or ranges of numbers.
CREATE FUNCTION pg_temp.remaining_events() RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(CASE WHEN count = 1 THEN first::text ELSE first || '-' || last END, ' ' ORDER BY first)
	FROM (
		SELECT min(seq) AS first, max(seq) AS last, count(*) FROM (
			SELECT seq, seq - row_number() OVER (ORDER BY seq) AS run FROM idempotency.outbox) AS o
		GROUP BY run) AS r
$$;
-- The numbers of a batch, which stays in flight.
CREATE FUNCTION pg_temp.fetched(subscription text, max_events int DEFAULT 1000, lease interval DEFAULT '1 min') RETURNS text
	LANGUAGE sql AS $$
	SELECT coalesce(min(seq) || '-' || max(seq) || ', ' || count(*) || ' events', 'nothing')
	FROM idempotency.fetch(subscription, max_events, lease => lease)
$$;
CREATE FUNCTION pg_temp.acked(name text) RETURNS void LANGUAGE sql AS $$
	SELECT idempotency.ack(name, batch) FROM idempotency.position WHERE subscription = name
$$;
-- Executes one statement as a role, and returns its result.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

-- Without work, reap() writes nothing.
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.reaper;

--
-- Age
--

-- Without a subscription, only the age decides, starting at the lowest number.
SELECT pg_temp.publish(10);
SELECT idempotency.reap();
SELECT pg_temp.age(1, 3, '25 hours'), pg_temp.age(4, 4, '23 hours'), pg_temp.age(5, 6, '25 hours');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT events_reaped, events_deleted_upto, rows_reaped FROM idempotency.reaper;
SELECT pg_temp.age(4, 4, '25 hours'), pg_temp.remaining_events();
SELECT idempotency.reap(), pg_temp.remaining_events();

-- The setting gives the minimum age; infinite and zero are allowed.
SET idempotency.outbox_retention = '2d';
SELECT pg_temp.age(7, 7, '47 hours');
SELECT idempotency.reap();
SELECT pg_temp.age(7, 7, '49 hours');
SELECT idempotency.reap(), pg_temp.remaining_events();
SET idempotency.outbox_retention = -1;
SELECT pg_temp.age(8, 8, '1000 years');
SELECT idempotency.reap();
SET idempotency.outbox_retention = 0;
SELECT idempotency.reap(), pg_temp.remaining_events();

-- The clock can have been set back: an event from the future counts as young for as
-- long as it is ahead, and blocks nothing afterwards.
SET idempotency.outbox_retention = '1h';
SELECT pg_temp.publish(3), pg_temp.age(11, 11, '-59 min'), pg_temp.age(12, 13, '61 min');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.age(11, 11, '-61 min');
SELECT idempotency.reap(), pg_temp.remaining_events();

-- The large payload is deleted from the TOAST table too.
SET idempotency.outbox_retention = 0;
SELECT FROM idempotency.publish('large', (SELECT json_agg(md5(i::text)) FROM generate_series(1, 20000) AS i));
CREATE FUNCTION pg_temp.large_values(OUT n bigint) LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE 'SELECT count(DISTINCT chunk_id) FROM ' || (SELECT reltoastrelid::regclass FROM pg_class
		WHERE oid = 'idempotency.outbox'::regclass) INTO n;
END
$$;
SELECT pg_temp.large_values();
SELECT idempotency.reap(), pg_temp.large_values();

--
-- Events that are still needed
--

-- The slowest subscription limits the deletion.
SELECT idempotency.subscribe('fast', '{*}'), idempotency.subscribe('slow', '{*}'), idempotency.subscribe('other', '{other}');
SELECT pg_temp.publish(10);
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('fast'), pg_temp.fetched('slow', 4), pg_temp.fetched('other');
-- A batch in flight can be redelivered, even if all other subscriptions have
-- acknowledged it.
SELECT pg_temp.acked('fast'), idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.acked('slow'), idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('slow', 1, '1 microsecond'), pg_sleep(0.01);
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('slow', 100), pg_temp.acked('slow');
SELECT idempotency.reap(), pg_temp.remaining_events();
-- A dropped subscription needs no events.
SELECT pg_temp.fetched('fast'), pg_temp.fetched('slow', 3), pg_temp.acked('slow');
SELECT pg_temp.publish(5);
SELECT pg_temp.fetched('fast'), pg_temp.acked('fast'), pg_temp.fetched('other');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT idempotency.unsubscribe('slow');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT idempotency.unsubscribe('other');

-- A failed event is a copy, which is redelivered after the original is deleted.
SELECT idempotency.unsubscribe('fast'), idempotency.subscribe('failing', '{*}', max_attempts => 2);
SELECT pg_temp.publish(2, 'order', 'a1');
SELECT batch, (array_agg(id ORDER BY seq))[1] AS id FROM idempotency.fetch('failing') GROUP BY batch \gset
SELECT idempotency.nack('failing', :batch, :'id', 'no', '0') IS NOT NULL AS again, idempotency.ack('failing', :batch);
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT batch, id, seq, payload FROM idempotency.fetch('failing') \gset
SELECT :seq AS seq, :'payload' AS payload;
SELECT idempotency.nack('failing', :batch, :'id', 'no more') IS NULL AS dead, idempotency.ack('failing', :batch);
SELECT pg_temp.fetched('failing'), pg_temp.acked('failing');
SELECT idempotency.redrive('failing'), idempotency.reap();
SELECT pg_temp.fetched('failing'), pg_temp.acked('failing');
SELECT count(*) FROM idempotency.parked;

-- A new subscription gets the events that still exist.
SET idempotency.outbox_retention = '1h';
SELECT pg_temp.publish(4), pg_temp.age(32, 33, '2 hours');
SELECT pg_temp.fetched('failing'), pg_temp.acked('failing');
SELECT idempotency.subscribe('early', '{*}', start_at => 'beginning');
SELECT idempotency.reap(), pg_temp.fetched('early'), pg_temp.acked('early');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT idempotency.subscribe('late', '{*}', start_at => 'beginning');
SELECT pg_temp.fetched('late'), pg_temp.acked('late');
SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscriptions;

--
-- Events in flight
--

-- The event of an open transaction stays, and so do the events behind it. It is
-- delivered after the commit, and deleted after its acknowledgement.
SET idempotency.outbox_retention = 0;
SELECT idempotency.reap();
BEGIN;
SELECT pg_temp.publish(1, 'open');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(3);
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT idempotency.subscribe('reader', '{*}', start_at => 'beginning');
SELECT pg_temp.fetched('reader'), pg_temp.acked('reader');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT lag_events, lag FROM idempotency.subscriptions;
COMMIT PREPARED 'regress_outbox_reap';
SELECT lag_events, lag BETWEEN '0' AND '1 min' AS soon FROM idempotency.subscriptions;
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('reader');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.acked('reader');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT lag_events, lag FROM idempotency.subscriptions;
SELECT events_deleted_upto FROM idempotency.reaper;
-- The event of an aborted transaction blocks nothing.
BEGIN;
SELECT pg_temp.publish(1, 'open');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(3);
SELECT pg_temp.fetched('reader'), pg_temp.acked('reader');
SELECT idempotency.reap(), pg_temp.remaining_events();
ROLLBACK PREPARED 'regress_outbox_reap';
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('reader');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT idempotency.unsubscribe('reader');

-- reap() does not delete events that its own transaction published; it deletes those of
-- others.
SELECT pg_temp.publish(3);
BEGIN;
SELECT pg_temp.publish(2), idempotency.reap(), pg_temp.remaining_events();
COMMIT;
BEGIN;
SELECT pg_temp.publish(1), idempotency.reap(), pg_temp.remaining_events();
ROLLBACK;
SELECT pg_temp.publish(1);
SELECT idempotency.reap(), pg_temp.remaining_events();

-- Unused numbers are passed too.
SELECT setval('idempotency.outbox_seq', 100);
SELECT pg_temp.publish(1);
SELECT idempotency.reap();
SELECT events_deleted_upto FROM idempotency.reaper;
-- The sequence can be set back while no subscription depends on the numbers.
SELECT setval('idempotency.outbox_seq', 50);
SELECT pg_temp.publish(1), pg_temp.remaining_events();
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT events_deleted_upto FROM idempotency.reaper;

--
-- Restored and foreign positions
--

-- A restore loads the events first and the state of the sequence last. In between, no
-- subscription seems to need the events.
BEGIN;
SELECT pg_temp.publish(5);
SELECT setval('idempotency.outbox_seq', 1, false);
COMMIT;
SELECT idempotency.reap(), pg_temp.remaining_events();
-- A subscription without a position gets its position later.
SELECT idempotency.subscribe('restored', '{*}'), pg_temp.remaining_events();
DELETE FROM idempotency.position;
SELECT setval('idempotency.outbox_seq', 56);
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT lag_events, lag FROM idempotency.subscriptions;
-- The position of another cluster counts: up to 56, except 52 and 53, of transaction
-- 4000000000 there.
INSERT INTO idempotency.position (subscription, version, passed, inflight, singles, system_identifier, relation)
	VALUES ('restored', 7, 56, '{4000000000,52,53}', 0, 7, 7);
SET session_replication_role = replica;
UPDATE idempotency.outbox SET txid = '4000000000' WHERE seq = 53;
RESET session_replication_role;
SELECT lag_events, lag BETWEEN '0' AND '1 min' AS soon FROM idempotency.subscriptions;
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT string_agg(seq::text, ' ' ORDER BY seq) FROM idempotency.fetch('restored');
SELECT pg_temp.acked('restored'), idempotency.reap(), pg_temp.remaining_events();
-- An impossible position does not say which events are needed. Until it is repaired or
-- its subscription dropped, the call deletes neither events nor keys.
SELECT pg_temp.publish(1), count(*) FROM idempotency.once_many('outbox_reap', ARRAY['expired'], '1 microsecond');
UPDATE idempotency.position SET passed = 1000, system_identifier = 7;
SELECT idempotency.reap();
\echo :SQLSTATE
UPDATE idempotency.position SET passed = 57, inflight = '{1}';
SELECT idempotency.reap();
\echo :SQLSTATE
SELECT count(*) AS keys, pg_temp.remaining_events() FROM idempotency.key;
SELECT idempotency.unsubscribe('restored');
SELECT idempotency.reap(), pg_temp.remaining_events();

--
-- Batch size, and the caller's transaction
--

SELECT pg_temp.publish(2500);
SELECT idempotency.reap(3), idempotency.reap(0), idempotency.reap(1);
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.outbox;
SELECT idempotency.reap(NULL);
-- Expired rows and events share the limit.
SELECT pg_temp.publish(10);
SELECT count(*) FROM idempotency.once_many('outbox_reap', ARRAY(SELECT i::text FROM generate_series(1, 10) AS i), '1 microsecond');
SELECT idempotency.reap(8);
SELECT count(*) AS keys, pg_temp.remaining_events() FROM idempotency.key;
SELECT idempotency.reap(9);
SELECT count(*) AS keys, pg_temp.remaining_events() FROM idempotency.key;
SELECT idempotency.reap(10);
SELECT count(*) AS keys, pg_temp.remaining_events() FROM idempotency.key;
SELECT rows_reaped, events_reaped FROM idempotency.reaper;

SELECT pg_temp.publish(10);
BEGIN;
SELECT idempotency.reap(4);
SAVEPOINT s;
SELECT idempotency.reap();
SELECT count(*), (SELECT events_reaped FROM idempotency.reaper) FROM idempotency.outbox;
ROLLBACK TO s;
SELECT count(*), (SELECT events_reaped FROM idempotency.reaper) FROM idempotency.outbox;
COMMIT;
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
SELECT count(*), (SELECT events_reaped FROM idempotency.reaper) FROM idempotency.outbox;
DO $$ BEGIN
	PERFORM idempotency.reap(2);
	COMMIT;
	PERFORM idempotency.reap(2);
	ROLLBACK;
END $$;
SELECT count(*) FROM idempotency.outbox;

-- A fixed snapshot might hide a new subscription, so only keys are deleted.
SELECT count(*) FROM idempotency.once_many('outbox_reap', ARRAY['a', 'b'], '1 microsecond');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idempotency.reap(), pg_temp.remaining_events() IS NOT NULL AS events;
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT idempotency.reap(), pg_temp.remaining_events() IS NOT NULL AS events;
COMMIT;
BEGIN READ ONLY;
SELECT idempotency.reap();
\echo :SQLSTATE
ROLLBACK;
SELECT idempotency.reap(), pg_temp.remaining_events();

--
-- A limit for a subscription without a consumer
--

TRUNCATE idempotency.outbox, idempotency.reaper;
ALTER SEQUENCE idempotency.outbox_seq RESTART;
SET client_min_messages = log;
SELECT idempotency.subscribe('limited', '{order}', max_lag => '1 hour'), idempotency.subscribe('unlimited', '{order}');
SELECT pg_temp.publish(4), pg_temp.publish(2, 'other'), pg_temp.publish(4);
SELECT idempotency.reap();
SELECT pg_temp.age(1, 5, '61 min'), pg_temp.age(6, 10, '59 min');
-- The server log reports it at once, even if the transaction rolls back.
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
SELECT idempotency.reap();
SELECT subscription, passed, inflight[2:] FROM idempotency.position ORDER BY subscription;
SELECT subscription, lag_events, date_trunc('minute', lag) AS lag, max_lag FROM idempotency.subscriptions ORDER BY subscription;
-- No other event is too old, so nothing is written.
SELECT version FROM idempotency.position WHERE subscription = 'limited' \gset
SELECT idempotency.reap();
SELECT version = :version AS unchanged FROM idempotency.position WHERE subscription = 'limited';
-- Events that are young enough are delivered once each; unwanted events are skipped.
SELECT pg_temp.fetched('limited', 2);
-- A batch in flight stays with its consumer even if its events become too old,
SELECT pg_temp.age(6, 9, '61 min');
SELECT idempotency.reap();
SELECT pg_temp.acked('limited'), pg_temp.fetched('limited', 2, '1 microsecond'), pg_sleep(0.01);
SELECT batch FROM idempotency.position WHERE subscription = 'limited' \gset
-- until its lease has expired and all its events are too old.
SELECT idempotency.reap();
SELECT batch = :batch AS still_out FROM idempotency.position WHERE subscription = 'limited';
SELECT pg_temp.age(10, 10, '61 min');
SELECT idempotency.reap();
\set VERBOSITY terse
SELECT idempotency.ack('limited', :batch);
\echo :SQLSTATE
\set VERBOSITY default
SELECT pg_temp.fetched('limited');
SELECT subscription, passed, inflight[2:] FROM idempotency.position ORDER BY subscription;
-- The other subscription lost nothing.
SELECT pg_temp.fetched('unlimited'), pg_temp.acked('unlimited');
SELECT idempotency.reap(), pg_temp.remaining_events();

-- Unwanted events count too: reap() reads no event to decide.
SELECT pg_temp.publish(3, 'other'), pg_temp.age(11, 13, '2 hours');
SELECT idempotency.reap();
SELECT passed FROM idempotency.position WHERE subscription = 'limited';
SELECT pg_temp.fetched('unlimited');

-- Parked events stay, and so do the events that wait behind them.
SELECT pg_temp.publish(3, 'order', 'a1');
SELECT max(batch) AS batch FROM idempotency.fetch('limited', 2, lease => '1 microsecond') \gset
SELECT idempotency.nack('limited', :batch, id, 'no', '1 hour') IS NOT NULL AS parked FROM idempotency.outbox WHERE seq = 14;
SELECT pg_sleep(0.01), pg_temp.age(14, 16, '2 hours');
SELECT seq, retry_at IS NULL AS waits FROM idempotency.parked ORDER BY seq;
SELECT idempotency.reap();
SELECT seq, retry_at IS NULL AS waits FROM idempotency.parked ORDER BY seq;
SELECT passed, inflight[2:], batch FROM idempotency.position WHERE subscription = 'limited';
SET client_min_messages = warning;
SELECT idempotency.unsubscribe('unlimited');
SET client_min_messages = log;
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT lag_events, lag, parked, waiting, dead FROM idempotency.subscriptions;
UPDATE idempotency.parked SET retry_at = now() WHERE seq = 14;
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
SELECT count(*) FROM idempotency.parked;

-- Events that failed in a given-up batch are still redelivered, once.
SELECT pg_temp.publish(1, 'order'), pg_temp.publish(3, 'order', 'a2');
SELECT max(batch) AS batch FROM idempotency.fetch('limited', lease => '1 microsecond') \gset
SELECT idempotency.nack('limited', :batch, id, 'no', '0') IS NOT NULL AS parked FROM idempotency.outbox WHERE seq = 19;
SELECT pg_sleep(0.01), pg_temp.age(17, 20, '2 hours');
SELECT idempotency.reap();
SELECT pg_temp.fetched('limited', 1), pg_temp.acked('limited') FROM generate_series(1, 2);
SELECT pg_temp.fetched('limited');
SELECT count(*) FROM idempotency.parked;

-- An event that was in flight when its number was passed is treated the same.
BEGIN;
SELECT pg_temp.publish(2, 'order');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(2);
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
SELECT idempotency.reap();
COMMIT PREPARED 'regress_outbox_reap';
SELECT pg_temp.age(21, 21, '2 hours');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
SELECT idempotency.reap(), pg_temp.remaining_events();
SELECT passed, inflight[2:] FROM idempotency.position WHERE subscription = 'limited';

-- Many such events, together with the lease of a batch: in batches, with a message for
-- each.
SELECT pg_temp.publish(12000), pg_temp.age(25, 12023, '2 hours');
SELECT pg_temp.fetched('limited', 5, '1 microsecond'), pg_sleep(0.01);
SET client_min_messages = warning;
SELECT idempotency.reap(NULL) > 1000 AS many;
SET client_min_messages = log;
SELECT passed, inflight[2:], batch FROM idempotency.position WHERE subscription = 'limited';
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
-- No age, and ages outside the range of the calendar.
SET client_min_messages = warning;
SELECT idempotency.subscribe('limited', '{order}', max_lag => '0');
SET client_min_messages = log;
SELECT pg_temp.publish(1), pg_sleep(0.01);
SELECT idempotency.reap(1);
SET client_min_messages = warning;
SELECT idempotency.subscribe('limited', '{order}', max_lag => '170000000 years');
SELECT pg_temp.publish(1);
SET client_min_messages = log;
SELECT idempotency.reap(1);
SELECT pg_temp.fetched('limited'), pg_temp.acked('limited');
RESET client_min_messages;
SELECT idempotency.unsubscribe('limited');
SELECT idempotency.reap(NULL) > 0 AS some;
SELECT idempotency.reap(NULL) >= 0, idempotency.reap(NULL) >= 0, idempotency.reap(NULL) >= 0, pg_temp.remaining_events();

--
-- Rows that no subscription can read
--

-- The view and the deletion of events read them once, not once per subscription, whether
-- their transaction is open or aborted. max_lag reads them once for each of its
-- subscriptions, in batches.
CREATE FUNCTION pg_temp.entries_read() RETURNS bigint LANGUAGE sql AS $$
	SELECT pg_stat_get_xact_tuples_returned('idempotency.outbox_pkey'::regclass)
$$;
SELECT count(idempotency.subscribe('unread ' || n, '{*}', max_lag => '1 ms')) AS unread,
	count(idempotency.subscribe('reader ' || n, '{*}')) AS readers FROM generate_series(1, 20) AS n;
BEGIN;
SELECT pg_temp.publish(20000);
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(1);
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*), min(lag_events) AS least, max(lag_events) AS most FROM idempotency.subscriptions;
SELECT pg_temp.entries_read() - :before < 50000 AS read_once;
COMMIT;
SET client_min_messages = warning;
-- A call of reap() moves subscriptions for a limited time.
DO $$
BEGIN
	FOR i IN 1 .. 100 LOOP
		EXIT WHEN (SELECT count(*) = 20 FROM idempotency.subscriptions WHERE lag_events = 0 AND subscription LIKE 'unread %');
		PERFORM idempotency.reap();
		COMMIT;
	END LOOP;
END $$;
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT idempotency.reap();
SELECT pg_temp.entries_read() - :before < 50000 AS few;
COMMIT;
SELECT count(*) AS moved_on FROM idempotency.subscriptions WHERE lag_events = 0 AND subscription LIKE 'unread %';
SELECT count(idempotency.unsubscribe('unread ' || n)) AS unsubscribed FROM generate_series(1, 20) AS n;
-- Consumers pass them, and list them as in flight.
SELECT count(pg_temp.fetched('reader ' || n)) AS fetched FROM generate_series(1, 20) AS n;
SELECT count(*) AS acked FROM (SELECT pg_temp.acked('reader ' || n) FROM generate_series(1, 20) AS n OFFSET 0) AS a;
SELECT count(*) AS in_flight FROM idempotency.position WHERE subscription LIKE 'reader %' AND cardinality(inflight) = 3;
SELECT idempotency.reap();
ROLLBACK PREPARED 'regress_outbox_reap';
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT count(*), min(lag_events) AS least, max(lag_events) AS most FROM idempotency.subscriptions;
SELECT pg_temp.entries_read() - :before < 50000 AS read_once;
COMMIT;
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT idempotency.reap();
SELECT pg_temp.entries_read() - :before < 50000 AS read_once, pg_temp.remaining_events();
COMMIT;
-- The next subscription starts after them.
BEGIN;
SELECT pg_temp.entries_read() AS before \gset
SELECT idempotency.reap();
SELECT pg_temp.entries_read() - :before < 1000 AS few;
COMMIT;
RESET client_min_messages;
SELECT count(idempotency.unsubscribe(subscription)) FROM idempotency.subscription;

-- Numbers that were deleted before a subscription started are not counted in its lag.
SELECT setval('idempotency.outbox_seq', nextval('idempotency.outbox_seq') + 500) IS NOT NULL AS skipped;
SELECT pg_temp.publish(1), idempotency.subscribe('fresh', '{*}', start_at => 'beginning');
SELECT lag_events FROM idempotency.subscriptions;
SELECT idempotency.unsubscribe('fresh'), idempotency.reap(), pg_temp.remaining_events();

--
-- The view
--

SELECT idempotency.subscribe('viewed', '{order.*, "it''s"}', max_attempts => 1, max_lag => '1 day');
\x
SELECT subscription, owner = current_user AS mine, topics, handler, lag_events, lag, parked, waiting, dead, oldest_parked_at,
	last_error, last_error_at, batch_leased_at, batch_leased_until, max_lag, created_at > now() - interval '1 min' AS just_now
	FROM idempotency.subscriptions;
\x
SELECT pg_temp.publish(1, 'order.placed', 'a1'), pg_temp.publish(2, 'order.paid', 'a2'), pg_temp.publish(1, 'order.paid', 'a1'),
	pg_temp.publish(1, 'order.paid', 'a3');
SELECT lag_events, lag BETWEEN '0' AND '1 min' AS lag FROM idempotency.subscriptions;
SELECT DISTINCT batch FROM idempotency.fetch('viewed', lease => '1 hour') \gset
SELECT lag_events, lag BETWEEN '0' AND '1 min' AS lag, now() - batch_leased_at < '1 min' AS out,
	batch_leased_until - batch_leased_at AS lease FROM idempotency.subscriptions;
SELECT idempotency.nack('viewed', :batch, id, 'dead: secret') IS NULL AS dead FROM idempotency.outbox WHERE aggregateid = 'a3';
SELECT idempotency.subscribe('viewed', '{order.*, "it''s"}', max_attempts => 5, max_lag => '1 day');
WITH first AS (SELECT id FROM idempotency.outbox WHERE type IS NULL AND aggregateid = 'a1' ORDER BY seq LIMIT 1)
	SELECT idempotency.nack('viewed', :batch, id, 'no: secret', '1 hour') IS NOT NULL AS again FROM first;
SELECT idempotency.ack('viewed', :batch);
SELECT lag_events, lag, parked, waiting, dead, now() - oldest_parked_at < '1 min' AS oldest, last_error,
	now() - last_error_at < '1 min' AS just_now, batch_leased_at, batch_leased_until FROM idempotency.subscriptions;

-- The view reads neither events that all subscriptions acknowledged nor those of open
-- transactions; a plan that reads all events would show here.
SELECT pg_temp.publish(5000, 'order.many');
SELECT pg_temp.fetched('viewed', 10000), pg_temp.acked('viewed');
ANALYZE idempotency.outbox;
CREATE FUNCTION pg_temp.rows_read() RETURNS TABLE (node text, relation text, few boolean) LANGUAGE plpgsql AS $$
DECLARE
	plan jsonb;
BEGIN
	EXECUTE 'EXPLAIN (ANALYZE, TIMING OFF, SUMMARY OFF, FORMAT JSON) TABLE idempotency.subscriptions' INTO plan;
	RETURN QUERY
		WITH RECURSIVE nodes (node) AS (
			SELECT plan->0->'Plan'
			UNION ALL
			SELECT child.node FROM nodes, jsonb_array_elements(nodes.node->'Plans') AS child (node))
		SELECT nodes.node->>'Node Type', nodes.node->>'Relation Name',
			coalesce((nodes.node->>'Rows Removed by Filter')::numeric, 0) + (nodes.node->>'Actual Rows')::numeric <= 1
		FROM nodes WHERE nodes.node->>'Relation Name' = 'outbox';
END
$$;
SELECT DISTINCT replace(node, 'Index Only', 'Index') AS node, few FROM pg_temp.rows_read();
BEGIN;
SELECT pg_temp.publish(1, 'order.late');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(3000, 'order.many');
SELECT pg_temp.fetched('viewed', 10000), pg_temp.acked('viewed');
SELECT lag_events, lag FROM idempotency.subscriptions;
-- The same with events of others before and after these.
UPDATE idempotency.position SET inflight[3] = passed WHERE subscription = 'viewed';
SELECT DISTINCT replace(node, 'Index Only', 'Index') AS node, few FROM pg_temp.rows_read();
COMMIT PREPARED 'regress_outbox_reap';
SELECT lag_events, lag IS NOT NULL AS late FROM idempotency.subscriptions;

-- One snapshot covers positions and events.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT lag_events, lag IS NOT NULL AS late FROM idempotency.subscriptions;
COMMIT;

--
-- Privileges
--

CREATE ROLE regress_outbox_reap_operator;
CREATE ROLE regress_outbox_reap_consumer;
CREATE ROLE regress_outbox_reap_monitor IN ROLE pg_monitor;
SELECT idempotency.grant_operator('regress_outbox_reap_operator'), idempotency.grant_consumer('regress_outbox_reap_consumer');
-- Error texts can contain personal data; so can dead letters.
SET ROLE regress_outbox_reap_monitor;
SELECT subscription, parked, dead, last_error, last_error_at IS NOT NULL AS failed FROM idempotency.subscriptions;
SELECT pg_temp.try('TABLE idempotency.dead_letters');
SET ROLE regress_outbox_reap_consumer;
SELECT pg_temp.try('TABLE idempotency.subscriptions'), pg_temp.try('SELECT idempotency.reap()');
SET ROLE regress_outbox_reap_operator;
SELECT subscription, parked, dead, last_error, last_error_at IS NOT NULL AS failed FROM idempotency.subscriptions;
SELECT error FROM idempotency.dead_letters;
RESET ROLE;

-- An operator deletes events that are not needed, and cannot decide which those are.
SELECT pg_temp.fetched('viewed'), pg_temp.acked('viewed');
SET ROLE regress_outbox_reap_operator;
SELECT idempotency.reap(NULL) > 1000 AS many;
SELECT pg_temp.try('SET idempotency.outbox_retention = 0'), pg_temp.try('DELETE FROM idempotency.outbox'),
	pg_temp.try('UPDATE idempotency.position SET passed = 0');
RESET ROLE;

-- A hostile search path has no effect.
SELECT sum(idempotency.reap(NULL)) > 0 AS more FROM generate_series(1, 9);
SELECT pg_temp.publish(3, 'order.many');
SELECT pg_temp.fetched('viewed'), pg_temp.acked('viewed'), pg_temp.publish(3, 'order.many');
SELECT pg_temp.age(min(seq), max(seq), '2 days') FROM idempotency.outbox;
SELECT count(*) FROM idempotency.outbox;
CREATE SCHEMA regress_outbox_reap;
CREATE FUNCTION regress_outbox_reap.captured(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE FUNCTION regress_outbox_reap.captured(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE FUNCTION regress_outbox_reap.captured_too(bigint, bigint) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'captured'; END $$;
CREATE OPERATOR regress_outbox_reap.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = regress_outbox_reap.captured);
CREATE OPERATOR regress_outbox_reap.> (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = regress_outbox_reap.captured);
CREATE OPERATOR regress_outbox_reap.= (LEFTARG = text, RIGHTARG = text, FUNCTION = regress_outbox_reap.captured);
CREATE OPERATOR regress_outbox_reap.+ (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = regress_outbox_reap.captured_too);
CREATE TABLE regress_outbox_reap.subscription (captured boolean NOT NULL CHECK (false));
GRANT USAGE ON SCHEMA regress_outbox_reap TO regress_outbox_reap_operator;
\c -
SET search_path = regress_outbox_reap, pg_catalog;
SET ROLE regress_outbox_reap_operator;
SELECT idempotency.reap();
SELECT lag_events, lag, last_error FROM idempotency.subscriptions;
RESET ROLE;
RESET search_path;
SELECT count(*) FROM idempotency.outbox;
SET client_min_messages = warning;
DROP SCHEMA regress_outbox_reap CASCADE;
RESET client_min_messages;
DROP OWNED BY regress_outbox_reap_operator, regress_outbox_reap_consumer;
DROP ROLE regress_outbox_reap_operator, regress_outbox_reap_consumer, regress_outbox_reap_monitor;
SELECT idempotency.unsubscribe('viewed');

--
-- Tables that were altered after installation
--

SET idempotency.outbox_retention = 0;
SELECT FROM idempotency.publish('order', '{}');
ALTER TABLE idempotency.outbox ENABLE ROW LEVEL SECURITY;
SELECT idempotency.reap();
\echo :SQLSTATE
ALTER TABLE idempotency.outbox DISABLE ROW LEVEL SECURITY;
ALTER TABLE idempotency.position RENAME TO pos;
SELECT idempotency.reap();
ALTER TABLE idempotency.pos RENAME TO position;
SELECT FROM idempotency.publish('order', '{}');
ALTER TABLE idempotency.subscription RENAME TO sub;
SELECT idempotency.reap();
\echo :SQLSTATE
ALTER TABLE idempotency.sub RENAME TO subscription;
-- Nor without the sequence, or with another relation in its place.
ALTER SEQUENCE idempotency.outbox_seq RENAME TO seq;
SELECT idempotency.reap();
\echo :SQLSTATE
CREATE TABLE idempotency.outbox_seq (last_value bigint, is_called boolean);
SELECT idempotency.reap();
\echo :SQLSTATE
DROP TABLE idempotency.outbox_seq;
ALTER SEQUENCE idempotency.seq RENAME TO outbox_seq;
-- Published without a replica identity, no row can be deleted, and none is.
SET client_min_messages = error;
CREATE PUBLICATION regress_outbox_reap FOR TABLE idempotency.outbox;
RESET client_min_messages;
ALTER TABLE idempotency.outbox REPLICA IDENTITY NOTHING;
SELECT idempotency.reap();
\echo :SQLSTATE
-- A publication of inserts only has no effect.
ALTER PUBLICATION regress_outbox_reap SET (publish = 'insert');
SELECT idempotency.reap();
ALTER TABLE idempotency.outbox REPLICA IDENTITY DEFAULT;
DROP PUBLICATION regress_outbox_reap;
RESET idempotency.outbox_retention;

TRUNCATE idempotency.key, idempotency.reaper, idempotency.outbox, idempotency.subscription, idempotency.position, idempotency.parked;
