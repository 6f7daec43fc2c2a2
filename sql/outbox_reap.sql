-- reaper at rest: the test reaps
--
-- reap() deletes events that every subscription has passed and that are old enough, and
-- no others. A subscription without a consumer is moved past old events. The views show the
-- progress of each.
--
\set SHOW_CONTEXT never

-- extension only: the settings of the library are in force before it is loaded
LOAD 'idempotency';
-- both editions
TRUNCATE idempotency.outbox, idempotency.subscription, idempotency.partition, idempotency.position, idempotency.parked;
-- reap() counts keys as well
DELETE FROM idempotency.key;
ALTER SEQUENCE idempotency.outbox_seq RESTART;

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
CREATE FUNCTION pg_temp.remaining() RETURNS text LANGUAGE sql AS $$
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
CREATE FUNCTION pg_temp.acked(name text) RETURNS bigint LANGUAGE sql AS $$
	SELECT idempotency.ack(name, batch) FROM idempotency.position WHERE subscription = name
$$;
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'accepted';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

--
-- Age
--

-- Without a subscription, only the age decides.
SELECT idempotency.reap(), pg_temp.publish(10);
SELECT idempotency.reap();
SELECT pg_temp.age(1, 3, '25 hours'), pg_temp.age(4, 4, '23 hours'), pg_temp.age(5, 6, '25 hours');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.age(4, 4, '25 hours'), idempotency.reap(), pg_temp.remaining();

-- The setting gives the minimum age; infinite and zero are allowed.
SET idempotency.outbox_retention = '2d';
SELECT pg_temp.age(7, 7, '47 hours'), idempotency.reap();
SELECT pg_temp.age(7, 7, '49 hours');
SELECT idempotency.reap(), pg_temp.remaining();
SET idempotency.outbox_retention = -1;
SELECT pg_temp.age(8, 8, '1000 years');
SELECT idempotency.reap();
SET idempotency.outbox_retention = 0;
SELECT idempotency.reap(), pg_temp.remaining();
-- An event from the far future, after the clock went back, is not young.
SET idempotency.outbox_retention = '1h';
SELECT pg_temp.publish(1), pg_temp.age(11, 11, '-2 hours'), idempotency.reap(), pg_temp.remaining();
SELECT setval('idempotency.outbox_seq', 10);
SET idempotency.outbox_retention = 0;

--
-- Events that are still needed
--

-- The slowest subscription limits the deletion.
SELECT idempotency.subscribe('fast', '{*}'), idempotency.subscribe('slow', '{*}'), idempotency.subscribe('other', '{other}');
SELECT pg_temp.publish(10);
SELECT pg_temp.age(11, 20, '2 min');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.fetched('fast'), pg_temp.fetched('slow', 4), pg_temp.fetched('other');
-- A batch in flight can be redelivered, even if all other subscriptions have
-- acknowledged it.
SELECT pg_temp.acked('fast'), idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.acked('slow'), idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.fetched('slow', 1, '1 microsecond'), pg_sleep(0.01);
SELECT idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.fetched('slow', 100), pg_temp.acked('slow');
SELECT pg_temp.fetched('slow', 100), pg_temp.acked('slow');
SELECT idempotency.reap(), pg_temp.remaining();
-- A dropped subscription needs no events.
SELECT pg_temp.publish(5);
SELECT pg_temp.age(21, 25, '2 min');
SELECT pg_temp.fetched('fast'), pg_temp.acked('fast'), pg_temp.fetched('other');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT idempotency.unsubscribe('slow'), idempotency.reap(), pg_temp.remaining();
SELECT idempotency.unsubscribe('other'), idempotency.unsubscribe('fast');
-- A position passes events that others want after a minute.
SELECT idempotency.subscribe('other', '{other}');
SELECT pg_temp.fetched('other');
SELECT pg_temp.publish(3);
SELECT pg_temp.fetched('other');
SELECT pg_temp.age(26, 28, '2 min'), idempotency.reap();
SELECT pg_temp.fetched('other');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT idempotency.unsubscribe('other'), setval('idempotency.outbox_seq', 25);

-- A failed event is a copy, which is redelivered after the original is deleted.
SELECT idempotency.subscribe('failing', '{*}', max_attempts => 2, retry_delay => '0', dead_letter_retention => '1 hour');
SELECT pg_temp.publish(2, 'order', 'a1');
SELECT batch, (array_agg(id ORDER BY seq))[1] AS id FROM idempotency.fetch('failing') GROUP BY batch \gset
SELECT idempotency.nack('failing', :batch, :'id', 'no') IS NOT NULL AS again, pg_temp.acked('failing');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT pg_temp.fetched('failing');
SELECT idempotency.nack('failing', batch, :'id', 'no more') IS NULL AS dead FROM idempotency.position WHERE subscription = 'failing';
SELECT pg_temp.acked('failing'), pg_temp.fetched('failing'), pg_temp.acked('failing');
-- Dead letters are deleted after their own retention.
SELECT idempotency.reap(), count(*) FROM idempotency.dead_letters;
UPDATE idempotency.parked SET dead_at = dead_at - interval '2 hours';
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.parked;

-- A new subscription gets the events that still exist.
SET idempotency.outbox_retention = '1h';
SELECT pg_temp.publish(4);
SELECT pg_temp.fetched('failing'), pg_temp.acked('failing');
SELECT max(seq) AS last FROM idempotency.outbox \gset
SELECT pg_temp.age(:last - 3, :last - 2, '2 hours');
SELECT idempotency.subscribe('early', '{*}', start_at => 'beginning');
SELECT idempotency.reap(), pg_temp.fetched('early') <> 'nothing' AS all, pg_temp.acked('early');
SELECT idempotency.reap(), pg_temp.remaining() = format('%s-%s', :last - 1, :last) AS young;
SELECT idempotency.unsubscribe('failing'), idempotency.unsubscribe('early');

--
-- Events in flight
--

-- The event of an open transaction is delivered after the commit, and deleted after its
-- acknowledgement.
SET idempotency.outbox_retention = 0;
SELECT idempotency.reap(), pg_temp.remaining();
SELECT idempotency.subscribe('reader', '{*}');
BEGIN;
SELECT pg_temp.publish(1, 'open');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(3);
SELECT pg_temp.fetched('reader'), pg_temp.acked('reader');
SELECT idempotency.reap(), pg_temp.remaining();
COMMIT PREPARED 'regress_outbox_reap';
SELECT count(*), idempotency.reap() FROM idempotency.outbox;
SELECT count(*) FROM idempotency.outbox;
SELECT lag_events > 0 AS behind, lag BETWEEN '0' AND '1 min' AS soon FROM idempotency.partitions;
SELECT count(*) FROM idempotency.fetch('reader');
SELECT idempotency.reap(), pg_temp.acked('reader');
SELECT idempotency.reap() > 0 AS some, pg_temp.remaining();
SELECT lag_events, lag FROM idempotency.partitions;
-- The event of an aborted transaction blocks nothing.
BEGIN;
SELECT pg_temp.publish(1, 'open');
PREPARE TRANSACTION 'regress_outbox_reap';
SELECT pg_temp.publish(3);
SELECT count(*), pg_temp.acked('reader') FROM idempotency.fetch('reader');
ROLLBACK PREPARED 'regress_outbox_reap';
SELECT pg_temp.fetched('reader');
SELECT idempotency.reap(), pg_temp.remaining();
SELECT idempotency.unsubscribe('reader');
SELECT idempotency.reap();

--
-- The caller's transaction
--

-- Expired rows and events share the limit.
SELECT pg_temp.publish(10);
SELECT count(*) FROM idempotency.once_many('outbox_reap', ARRAY(SELECT i::text FROM generate_series(1, 10) AS i), '1 microsecond');
SELECT idempotency.reap(8), idempotency.reap(20), pg_temp.remaining();
-- A rollback brings both back.
SELECT pg_temp.publish(10);
BEGIN;
SELECT idempotency.reap();
ROLLBACK;
SELECT count(*) FROM idempotency.outbox;
-- A fixed snapshot might hide a new subscription.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idempotency.reap();
ROLLBACK;
SELECT idempotency.reap(), pg_temp.remaining();

--
-- A limit for a subscription without a consumer
--

TRUNCATE idempotency.outbox;
ALTER SEQUENCE idempotency.outbox_seq RESTART;
SET client_min_messages = log;
SELECT idempotency.subscribe('limited', '{order}', max_lag => '1 hour'), idempotency.subscribe('unlimited', '{order}');
SELECT pg_temp.publish(4), pg_temp.publish(2, 'other'), pg_temp.publish(4);
SELECT idempotency.reap();
SELECT pg_temp.age(1, 5, '61 min'), pg_temp.age(6, 10, '59 min');
-- The server log reports it.
SELECT idempotency.reap();
SELECT subscription, lag_events, date_trunc('minute', lag) AS lag FROM idempotency.partitions ORDER BY subscription;
-- No other event is too old, so nothing is written or locked.
SELECT n.version, a.xmax AS locked_by FROM idempotency.position AS n JOIN idempotency.partition AS a USING (subscription) WHERE subscription = 'limited' \gset
SELECT idempotency.reap();
SELECT n.version = :version AND a.xmax = :'locked_by' AS unchanged
FROM idempotency.position AS n JOIN idempotency.partition AS a USING (subscription) WHERE subscription = 'limited';
SELECT pg_temp.fetched('limited', 2);
-- A batch in flight stays with its consumer even if its events become too old.
SELECT pg_temp.age(6, 9, '61 min');
SELECT idempotency.reap();
SELECT pg_temp.acked('limited'), pg_temp.fetched('limited'), pg_temp.acked('limited');
-- The other subscription lost nothing.
SELECT pg_temp.fetched('unlimited'), pg_temp.acked('unlimited');
SELECT idempotency.reap(), pg_temp.remaining();
RESET client_min_messages;
SELECT idempotency.unsubscribe('limited'), idempotency.unsubscribe('unlimited');

--
-- The views
--

SELECT idempotency.subscribe('viewed', '{order.*, "it''s"}', max_attempts => 1, max_lag => '1 day', partitions => 2);
\x
SELECT subscription, lag, scheduled, waiting, dead, last_error, last_error_at, oldest_parked_at, owner = current_user AS mine, topics, handler, partitions,
	max_attempts, retry_delay, max_retry_delay, max_lag, dead_letter_retention, paused_at, created_at > now() - interval '1 min' AS just_now
	FROM idempotency.subscriptions;
SELECT * FROM idempotency.partitions ORDER BY partition;
\x
SELECT pg_temp.publish(1, 'order.placed', 'a1'), pg_temp.publish(2, 'order.paid', 'a4'), pg_temp.publish(1, 'order.paid', 'a1'), pg_temp.publish(1, 'order.paid', 'a3');
SELECT state, lag_events > 0 AS behind, lag BETWEEN '0' AND '1 min' AS lag FROM idempotency.partitions ORDER BY partition;
SELECT batch AS first FROM idempotency.fetch('viewed', 1, lease => '1 hour') \gset
SELECT DISTINCT batch AS second FROM idempotency.fetch('viewed', lease => '1 hour') \gset
SELECT batch_events > 0 AS is_out, attempt, holder = pg_backend_pid() AS mine, now() - leased_at < '1 min' AS out, leased_until - leased_at AS lease FROM idempotency.partitions ORDER BY partition;
SELECT idempotency.nack('viewed', :first, id, 'dead: secret') IS NULL AS dead
	FROM idempotency.outbox WHERE seq = (SELECT events[1] FROM idempotency.position WHERE batch = :first);
SELECT idempotency.ack('viewed', :first) AS first, idempotency.ack('viewed', :second) > 0 AS second;
SELECT lag, scheduled, waiting, dead, last_error, now() - last_error_at < '1 min' AS just_now FROM idempotency.subscriptions;
SELECT sum(acknowledged) > 1 AS acknowledged, sum(failed) AS failed FROM idempotency.partitions;
SELECT idempotency.pause('viewed');
SELECT DISTINCT state FROM idempotency.partitions;
SELECT idempotency.resume('viewed'), idempotency.alter_subscription('viewed', partitions => 3);
SELECT state, count(*) FROM idempotency.partitions GROUP BY state ORDER BY state;

--
-- Privileges
--

CREATE ROLE regress_outbox_reap_operator;
CREATE ROLE regress_outbox_reap_consumer;
SELECT idempotency.grant_operator('regress_outbox_reap_operator'), idempotency.grant_consumer('regress_outbox_reap_consumer');
-- Error texts can contain personal data; so can dead letters.
CREATE ROLE regress_outbox_reap_monitor IN ROLE pg_monitor;
SET ROLE regress_outbox_reap_monitor;
SELECT subscription, dead, last_error, last_error_at IS NOT NULL AS failed FROM idempotency.subscriptions;
SELECT count(*) FROM idempotency.partitions;
SELECT count(*) FROM idempotency.holders();
SELECT pg_temp.try('TABLE idempotency.dead_letters'), pg_temp.try('SELECT idempotency.holders(''s'', ''k'')');
RESET ROLE;
DROP ROLE regress_outbox_reap_monitor;
SET ROLE regress_outbox_reap_consumer;
SELECT pg_temp.try('TABLE idempotency.subscriptions'), pg_temp.try('SELECT idempotency.reap()');
SET ROLE regress_outbox_reap_operator;
SELECT subscription, dead, last_error, last_error_at IS NOT NULL AS failed FROM idempotency.subscriptions;
SELECT count(*) FROM idempotency.partitions;
SELECT error FROM idempotency.dead_letters;
SELECT pg_temp.try('DELETE FROM idempotency.outbox'), pg_temp.try('UPDATE idempotency.position SET batch = NULL');
RESET ROLE;
DROP OWNED BY regress_outbox_reap_operator, regress_outbox_reap_consumer;
DROP ROLE regress_outbox_reap_operator, regress_outbox_reap_consumer;
SELECT idempotency.unsubscribe('viewed');

-- extension only: checks of an altered table
SET idempotency.outbox_retention = 0;
SELECT FROM idempotency.publish('order', '{}');
ALTER TABLE idempotency.position RENAME TO pos;
SELECT pg_temp.try('SELECT idempotency.reap()');
ALTER TABLE idempotency.pos RENAME TO position;
-- A table in a publication without a replica identity loses no row.
SET client_min_messages = error;
CREATE PUBLICATION regress_outbox_reap FOR TABLE idempotency.outbox;
RESET client_min_messages;
ALTER TABLE idempotency.outbox REPLICA IDENTITY NOTHING;
SELECT pg_temp.try('SELECT idempotency.reap()');
ALTER TABLE idempotency.outbox REPLICA IDENTITY DEFAULT;
DROP PUBLICATION regress_outbox_reap;
-- both editions
RESET idempotency.outbox_retention;
TRUNCATE idempotency.outbox;
