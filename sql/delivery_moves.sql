--
-- Partitions, positions and parked events that move: several partitions, restores, seek, max_lag.
--
\set SHOW_CONTEXT never

CREATE FUNCTION pg_temp.publish(numbers int[], aggregate text DEFAULT NULL, deliver_at timestamptz DEFAULT NULL) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish('t', to_json(n), aggregate, event_id => lpad(n::text, 32, '0')::uuid, deliver_at => deliver_at)) FROM unnest(numbers) AS n
$$;
-- One fetch, acknowledged.
CREATE FUNCTION pg_temp.take(subscription text, max_events int DEFAULT 100) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	got text;
	number bigint;
BEGIN
	SELECT string_agg(payload::text, ', '), min(batch) INTO got, number FROM idempotency.fetch(subscription, max_events);
	PERFORM idempotency.ack(subscription, number) WHERE number IS NOT NULL;
	RETURN got;
END
$$;
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;

-- A fetch returns nothing only if there is nothing: it begins the next window, and the next partitions.
SELECT idempotency.subscribe('m', '{t}', partitions => 2);
SELECT pg_temp.publish('{1,2,3}', 'a');
SELECT pg_temp.take('m', 1);
SELECT pg_temp.publish('{4}', 'a');
SELECT pg_temp.take('m', 1), pg_temp.take('m', 1), pg_temp.take('m', 1);
SELECT idempotency.alter_subscription('m', partitions => 1), idempotency.alter_subscription('m', partitions => 3);
SELECT pg_temp.publish('{5}', 'a');
SELECT pg_temp.take('m');
SELECT pg_temp.error_of(format('SELECT idempotency.alter_subscription(''m'', partitions => %s)', n)),
	pg_temp.error_of(format('SELECT idempotency.subscribe(''n'', ''{t}'', partitions => %s)', n))
FROM unnest('{0,257,2147483647}'::int[]) AS n;

-- Events that are not due do not hold back partitions after a change, and come when they are due.
SELECT pg_temp.publish('{6}', 'a', clock_timestamp() + interval '1 year');
SELECT pg_temp.take('m');
SELECT idempotency.alter_subscription('m', partitions => 2), pg_temp.publish('{7}', 'a', '-infinity'), pg_temp.publish('{8}', 'a');
SELECT pg_temp.take('m');
UPDATE idempotency.parked SET retry_at = clock_timestamp();
SELECT pg_temp.take('m');

-- Partitions of another cluster cannot end at a snapshot of this one: they read what the dump has before.
SELECT pg_temp.publish('{1,2}');
ALTER TABLE idempotency.outbox DISABLE TRIGGER refuse_update;
UPDATE idempotency.outbox SET txid = (txid::text::bigint + 1000000000)::text::xid8;
ALTER TABLE idempotency.outbox ENABLE TRIGGER refuse_update;
UPDATE idempotency.position SET system_identifier = 1, xids = '{}', froms = '{}', born = (born::text::bigint + 1000000000)::text::xid8,
	base = format('%s:%s:', pg_snapshot_xmin(base)::text::bigint + 1000000000, pg_snapshot_xmax(base)::text::bigint + 1000000000)::pg_snapshot;
SELECT idempotency.alter_subscription('m', partitions => 1);
SELECT pg_temp.publish('{3}');
SELECT array_agg(n ORDER BY n) FROM (SELECT unnest(string_to_array(concat_ws(', ', pg_temp.take('m'), pg_temp.take('m'), pg_temp.take('m')), ', ')) AS n) AS taken;
SELECT pg_temp.take('m');

-- After a restore, the sequence can be behind what was read, skipped or parked, all of which the outbox has lost.
CREATE FUNCTION pg_temp.fetch_behind(last bigint, mark bigint, top bigint, skip bigint) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	UPDATE idempotency.position AS n SET system_identifier = 1, range_from = 0, xids = '{}', froms = '{}',
		(mark, top, skip) = ROW (fetch_behind.mark, fetch_behind.top, fetch_behind.skip);
	PERFORM setval('idempotency.outbox_seq', last - 1);
	PERFORM FROM idempotency.fetch('m');
	RAISE 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLERRM;
END
$$;
SELECT pg_temp.publish('{1}');
SELECT batch, id, seq FROM idempotency.fetch('m') \gset
SELECT idempotency.nack('m', :batch, :'id', dead => true), idempotency.ack('m', :batch);
TRUNCATE idempotency.outbox;
SELECT pg_temp.fetch_behind(:seq, 0, 0, 0);
SELECT idempotency.discard('m');
SELECT pg_temp.fetch_behind(:seq, 0, 0, 0), pg_temp.fetch_behind(:seq, :seq, 0, 0), pg_temp.fetch_behind(:seq, 0, :seq, 0), pg_temp.fetch_behind(:seq, 0, 0, :seq) \gx
SELECT setval('idempotency.outbox_seq', :seq) = :seq AS corrected;
UPDATE idempotency.position SET system_identifier = 1;
SELECT pg_temp.publish('{2}');
SELECT pg_temp.take('m');

-- A batch number does not repeat, whatever the session has made of random().
SELECT pg_temp.publish('{1}'), setseed(0.5);
SELECT batch FROM idempotency.fetch('m') \gset
SELECT idempotency.nack('m', :batch, NULL) IS NOT NULL AS released, setseed(0.5);
SELECT batch <> :batch AS is_new FROM idempotency.fetch('m');
SELECT idempotency.seek('m', 'now');

-- seek() deletes parked events that the log has. Of an aggregate whose first one it deletes, the next one comes.
SELECT clock_timestamp() AS earlier \gset
SELECT pg_temp.publish('{1,2}', 'b');
SELECT batch, id FROM idempotency.fetch('m', 1) \gset
SELECT idempotency.nack('m', :batch, :'id', 'no', '1 day') IS NOT NULL AS parked, idempotency.ack('m', :batch);
SELECT pg_temp.take('m');
DELETE FROM idempotency.outbox WHERE payload::text = '2';
SELECT idempotency.seek('m', :'earlier');
SELECT pg_temp.take('m'), pg_temp.take('m');
SELECT count(*) FROM idempotency.parked;

-- Those of a topic that is no longer subscribed stay: the log does not deliver them.
SELECT pg_temp.publish('{1}');
SELECT batch, id FROM idempotency.fetch('m') \gset
SELECT idempotency.nack('m', :batch, :'id', dead => true), idempotency.ack('m', :batch), idempotency.alter_subscription('m', '{u}');
SELECT idempotency.seek('m', 'beginning');
SELECT count(*) FROM idempotency.parked;
SELECT idempotency.alter_subscription('m', '{t}'), idempotency.seek('m', 'beginning');
SELECT count(*) FROM idempotency.parked;
SELECT idempotency.seek('m', 'now');

-- max_lag drops nothing in a partition that has read all of its events.
SELECT idempotency.alter_subscription('m', partitions => 2);
SELECT pg_temp.take('m');
SELECT pg_temp.publish('{1}', 'a');
SELECT pg_temp.take('m');
SELECT idempotency.alter_subscription('m', max_lag => '0');
SELECT FROM idempotency.reap();
SELECT count(*) FROM idempotency.position WHERE skip > 0;
SELECT pg_temp.publish('{2}', 'a');
SELECT FROM idempotency.reap();
SELECT count(*) FROM idempotency.position WHERE skip > 0;
SELECT pg_temp.take('m');

-- A batch that ack() or nack() has emptied is not out: the next fetch() gets what follows.  Until then, its
-- number can be acknowledged.
SELECT idempotency.alter_subscription('m', max_lag => '-1 s', partitions => 1), pg_temp.publish('{1}', 'a'), pg_temp.publish('{2,3}', 'b');
SELECT pg_temp.take('m', 3);
SELECT pg_temp.publish('{1}', 'a'), pg_temp.publish('{2,3}', 'b');
SELECT batch AS first, idempotency.ack('m', batch, ARRAY[seq]) FROM idempotency.fetch('m', 1) \gset
SELECT idempotency.ack('m', :first) AS late, batch_events, attempt, leased_until FROM idempotency.partitions;
SELECT batch AS first, idempotency.ack('m', batch, ARRAY[seq]) FROM idempotency.fetch('m', 1) \gset
SELECT payload, idempotency.nack('m', batch, id, dead => true) FROM idempotency.fetch('m', 1);
SELECT idempotency.discard('m'), pg_temp.error_of(format('SELECT idempotency.ack(%L, %s)', 'm', :first));

-- A deferred constraint that is dropped while deliver() runs fails no event.
CREATE TABLE referenced (n int PRIMARY KEY);
CREATE TABLE effect (n int, attempt int, CONSTRAINT later FOREIGN KEY (n) REFERENCES referenced DEFERRABLE INITIALLY DEFERRED,
	CONSTRAINT sooner UNIQUE (n, attempt) DEFERRABLE);
CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF e.payload::text = '1' THEN
		ALTER TABLE effect DROP CONSTRAINT later, DROP CONSTRAINT sooner, ADD CONSTRAINT other FOREIGN KEY (n) REFERENCES referenced DEFERRABLE INITIALLY DEFERRED;
	END IF;
	INSERT INTO effect VALUES (e.payload::text::int, e.attempt);
	INSERT INTO referenced SELECT e.payload::text::int WHERE e.payload::text <> '3';
END
$$;
SELECT idempotency.alter_subscription('m', max_lag => '-1 s', partitions => 1, max_attempts => 1), pg_temp.publish('{1,2,3,4}');
CALL idempotency.deliver('m', 'handle(idempotency.event)');
SELECT * FROM effect ORDER BY n;
SELECT event_id, attempts, error FROM idempotency.dead_letters;
DROP TABLE effect, referenced;
DROP FUNCTION handle(idempotency.event);

-- The second event finds each constraint as it is at first: deferred, or immediate.
CREATE TABLE referenced (n int PRIMARY KEY);
CREATE TABLE effect (n int REFERENCES referenced DEFERRABLE INITIALLY DEFERRED, event int UNIQUE DEFERRABLE);
CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (e.payload::text::int, e.payload::text::int);
	INSERT INTO referenced SELECT e.payload::text::int;
	BEGIN
		INSERT INTO effect VALUES (e.payload::text::int, e.payload::text::int);
	EXCEPTION WHEN unique_violation THEN
		INSERT INTO effect VALUES (e.payload::text::int, -e.payload::text::int);
	END;
END
$$;
SELECT pg_temp.publish('{1,2}');
CALL idempotency.deliver('m', 'handle(idempotency.event)');
-- also if most of them are immediate at first
ALTER TABLE effect ADD UNIQUE (event, n) DEFERRABLE;
SELECT pg_temp.publish('{3,4}');
CALL idempotency.deliver('m', 'handle(idempotency.event)');
-- and if a constraint of another table has the same name, and is deferred at first
ALTER TABLE effect DROP CONSTRAINT effect_event_n_key;
CREATE TABLE twin (n int, CONSTRAINT effect_event_key FOREIGN KEY (n) REFERENCES referenced DEFERRABLE INITIALLY DEFERRED);
SELECT pg_temp.publish('{5,6}');
CALL idempotency.deliver('m', 'handle(idempotency.event)');
SELECT * FROM effect ORDER BY abs(event), event;
DROP TABLE twin, effect, referenced;
DROP FUNCTION handle(idempotency.event);

-- deliver() goes on until it has read all of the log, of which one fetch() reads 100,000 numbers.
CREATE TABLE effect (n int);
CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE sql AS 'INSERT INTO effect VALUES (e.payload::text::int)';
SELECT idempotency.publish('other', '0') IS NOT NULL AS published, setval('idempotency.outbox_seq', nextval('idempotency.outbox_seq') + 500000) > 0 AS moved, pg_temp.publish('{5}');
SELECT idempotency.has_more('m'), pg_temp.take('m'), idempotency.has_more('m');
CALL idempotency.deliver('m', 'handle(idempotency.event)');
SELECT * FROM effect;
SELECT idempotency.has_more('m');
DROP TABLE effect;
DROP FUNCTION handle(idempotency.event);

SELECT idempotency.unsubscribe('m');
TRUNCATE idempotency.outbox;
