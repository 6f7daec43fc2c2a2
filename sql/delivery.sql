--
-- The outbox in SQL, as one session sees it. test/delivery.py covers concurrent publishers
-- and consumers.
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
CREATE FUNCTION pg_temp.id(n int) RETURNS uuid LANGUAGE sql AS $$SELECT lpad(n::text, 32, '0')::uuid$$;
CREATE FUNCTION pg_temp.publish(numbers int[], aggregate text DEFAULT NULL, topic text DEFAULT 't') RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, to_json(n), aggregate, event_id => pg_temp.id(n))) FROM unnest(numbers) AS n
$$;
CREATE FUNCTION pg_temp.fetch(subscription text, max_events int DEFAULT 100) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload || CASE WHEN attempt > 1 THEN ' (attempt ' || attempt || ')' ELSE '' END, ', ')
	FROM idempotency.fetch(subscription, max_events)
$$;
CREATE FUNCTION pg_temp.batch(p_subscription text) RETURNS bigint LANGUAGE sql AS $$
	SELECT max(batch) FROM idempotency.position WHERE subscription = p_subscription
$$;
CREATE FUNCTION pg_temp.ack(subscription text) RETURNS bigint LANGUAGE sql AS $$SELECT idempotency.ack(subscription, pg_temp.batch(subscription))$$;
CREATE FUNCTION pg_temp.nack(subscription text, n int, retry_in interval DEFAULT '0', dead boolean DEFAULT false) RETURNS text LANGUAGE sql AS $$
	SELECT CASE WHEN t <= clock_timestamp() THEN 'again now' WHEN t > clock_timestamp() THEN 'again later' ELSE 'dead' END
	FROM idempotency.nack(subscription, pg_temp.batch(subscription), pg_temp.id(n), 'it failed', retry_in, dead) AS t
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
		got := concat_ws(' | ', got, batch);
		PERFORM pg_temp.ack(subscription);
	END LOOP;
	RETURN got;
END
$$;
-- Ends the leases of a subscription, and makes its retries due.
CREATE FUNCTION pg_temp.age(p_subscription text) RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.position SET leased_at = leased_at - interval '1 day', leased_until = leased_until - interval '1 day' WHERE subscription = p_subscription;
	UPDATE idempotency.parked SET retry_at = retry_at - interval '1 day' WHERE subscription = p_subscription;
$$;
CREATE FUNCTION pg_temp.parked(p_subscription text) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload || CASE WHEN dead_at IS NOT NULL THEN ' dead' WHEN retry_at IS NULL THEN ' waits' ELSE ' scheduled' END, ', ' ORDER BY seq)
	FROM idempotency.parked WHERE subscription = p_subscription
$$;

--
-- Publishing
--

TRUNCATE idempotency.outbox;
-- reap() counts keys as well
DELETE FROM idempotency.key;
BEGIN;
SELECT outcome FROM idempotency.claim('delivery', 'k');
SELECT idempotency.publish('order.placed', '{"b" : 1,  "a":[ ]}', 'order 7', 'placed', '{"trace" : "a1"}', pg_temp.id(1));
SELECT idempotency.publish('order.placed', NULL, 7, event_id => pg_temp.id(2)), idempotency.publish('order.placed', '1'::jsonb, pg_temp.id(7), event_id => pg_temp.id(3));
SELECT idempotency.complete('delivery', 'k');
COMMIT;
SELECT aggregatetype, aggregateid, type, payload, headers, id, bytes, bucket >= 0 AS hashed FROM idempotency.outbox ORDER BY seq;
SELECT e AS event, pg_temp.error_of('SELECT idempotency.publish(' || e || ')') AS error FROM unnest(ARRAY[
	'NULL, ''{}''', ''''', ''{}''', '''t'', ''{''', '''t'', ''{}'', ''''', '''t'', ''{}'', type => repeat(''t'', 256)', 'E''t\n'', ''{}''', '''t'', ''{}'', headers => ''[]''',
	'''t'', to_json(repeat(''x'', 1048576))']) AS e;
SET idempotency.max_payload_size = '2MB';
SELECT pg_temp.error_of('SELECT idempotency.publish(''t'', to_json(repeat(''x'', 1048576)))');
RESET idempotency.max_payload_size;
UPDATE idempotency.outbox SET payload = NULL;
TRUNCATE idempotency.outbox;

--
-- Batches
--

SELECT idempotency.subscribe('s', '{t}', max_attempts => 2, retry_delay => '1 hour') AS is_new;
SELECT pg_temp.fetch('s');
SELECT pg_temp.publish('{3,1,2}'), pg_temp.publish('{9}', topic => 'tt');
SELECT pg_temp.fetch('s', 2), pg_temp.fetch('s');
SELECT batch BETWEEN 1 AND 9007199254740991 AS exact, size, holder = pg_backend_pid() AS mine, round(extract(epoch FROM leased_until - leased_at)) AS lease FROM idempotency.position;
SELECT pg_temp.ack('s'), pg_temp.drain('s'), pg_temp.fetch('s');
SELECT pg_temp.error_of('SELECT idempotency.' || c) AS error FROM unnest(ARRAY['ack(''s'', 1)', 'ack(''s'', NULL)', 'ack(''x'', 1)', 'extend(''s'', 1, ''1 s'')',
	'nack(''s'', 1, NULL)', 'fetch(''s'', 0)', 'fetch(''s'', lease => ''0'')', 'fetch(''s'', wait => ''-1 s'')', 'fetch(''s'', max_bytes => 0)', 'fetch('''')']) AS c;
-- A fixed snapshot shows neither what was published nor what was read or deleted after it.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.error_of('SELECT idempotency.' || c) AS error FROM unnest(ARRAY['fetch(''s'')', 'subscribe(''new'', ''{t}'')', 'subscribe(''s'', ''{t}'')',
	'alter_subscription(''s'', partitions => 2)', 'seek(''s'', ''beginning'')', 'seek(''s'', ''now'')', 'redrive(''s'')', 'discard(''s'')', 'pause(''s'')',
	'resume(''s'')', 'unsubscribe(''s'')', 'unsubscribe(''unknown'')', 'has_more(''s'')']) AS c;
ROLLBACK;

-- Events of the own transaction come after its commit, also those of a fetch in between.
BEGIN;
SELECT pg_temp.publish('{1}'), pg_temp.fetch('s');
SAVEPOINT s;
SELECT pg_temp.publish('{2}'), pg_temp.fetch('s');
ROLLBACK TO s;
SELECT pg_temp.publish('{3}'), pg_temp.fetch('s');
COMMIT;
SELECT pg_temp.drain('s');

-- A part can be acknowledged; a batch that is given back comes again, without an attempt.
SELECT pg_temp.publish('{1,2,3,4}');
SELECT pg_temp.fetch('s');
SELECT idempotency.ack('s', pg_temp.batch('s'), ARRAY(SELECT seq FROM idempotency.outbox WHERE payload::text IN ('1', '3') ORDER BY seq DESC LIMIT 2)) AS acknowledged;
SELECT idempotency.nack('s', pg_temp.batch('s'), NULL) IS NOT NULL AS given_back;
SELECT pg_temp.fetch('s', 1), pg_temp.ack('s');

-- A batch ends at max_bytes; one event always fits.
SELECT pg_temp.publish('{100001,100002,100003}');
SELECT string_agg(payload::text, ', ') FROM idempotency.fetch('s', max_bytes => 12);
SELECT pg_temp.ack('s');
SELECT string_agg(payload::text, ', ') FROM idempotency.fetch('s', max_bytes => 1);
SELECT pg_temp.ack('s');
SELECT pg_temp.drain('s');

-- deliver_at: not before, and without an order.
SELECT count(idempotency.publish('t', to_json(n), 'a', deliver_at => CASE n WHEN 1 THEN now() + interval '1 day' WHEN 2 THEN now() - interval '1 day' END)) FROM generate_series(1, 3) AS n;
SELECT pg_temp.drain('s'), pg_temp.parked('s');
SELECT pg_temp.age('s');
SELECT pg_temp.drain('s');

-- Full batches from the middle of a window: nothing overtakes an event that waits, comes too early or is too much.
SELECT pg_temp.publish('{1}', 'a'), pg_temp.publish('{2}', 'b'), pg_temp.publish('{3}', 'a'), pg_temp.publish('{4,5,6,100001,100002,7}');
SELECT idempotency.publish('t', '8', deliver_at => now() + interval '1 day') IS NOT NULL AS published, pg_temp.publish('{9,10}');
SELECT pg_temp.fetch('s', 1), pg_temp.nack('s', 1, '1 hour'), pg_temp.ack('s');
SELECT pg_temp.fetch('s', 1), pg_temp.ack('s'), pg_temp.fetch('s', 1), pg_temp.ack('s'), pg_temp.parked('s');
SELECT pg_temp.fetch('s', 2), pg_temp.age('s');
SELECT pg_temp.fetch('s', 2), pg_temp.ack('s');
SELECT string_agg(payload::text, ', ') FROM idempotency.fetch('s', 3, max_bytes => 12);
SELECT pg_temp.ack('s'), pg_temp.fetch('s', 1), pg_temp.ack('s');
SELECT pg_temp.fetch('s', 2), pg_temp.ack('s'), pg_temp.parked('s');
SELECT pg_temp.age('s');
SELECT pg_temp.drain('s'), pg_temp.parked('s');

--
-- Failures
--

-- nack removes later events of the aggregate; they come in order.
SELECT pg_temp.publish('{1,2,3}', 'a'), pg_temp.publish('{4}');
SELECT pg_temp.fetch('s'), pg_temp.nack('s', 1, NULL), pg_temp.ack('s'), pg_temp.parked('s');
SELECT pg_temp.publish('{5}', 'a');
SELECT pg_temp.drain('s'), pg_temp.parked('s');
SELECT pg_temp.age('s');
SELECT pg_temp.drain('s'), pg_temp.parked('s');
-- Also if the event is dead: a consumer that skips or ignores them loses nothing.
SELECT pg_temp.publish('{1,2,3}', 'a');
SELECT pg_temp.fetch('s'), pg_temp.nack('s', 1, dead => true), pg_temp.ack('s'), pg_temp.parked('s');
SELECT pg_temp.drain('s'), event_id, topic, error, attempts FROM idempotency.dead_letters;
SELECT idempotency.redrive('s', pg_temp.id(2)), idempotency.redrive('s'), pg_temp.drain('s'), pg_temp.parked('s');
SELECT pg_temp.publish('{1}');
SELECT pg_temp.fetch('s'), pg_temp.nack('s', 1, dead => true), pg_temp.nack('s', 1) AS again;
SELECT pg_temp.error_of('SELECT idempotency.' || c) AS error FROM unnest(ARRAY['ack(''s'', 1, NULL)', 'redrive(''s'', NULL)', 'discard(''s'', NULL)']) AS c;
SELECT idempotency.discard('s', pg_temp.id(2)), idempotency.discard('s'), pg_temp.ack('s'), pg_temp.parked('s');

-- What waits for its next attempt is due, and keeps its attempts; what its publisher has put off is not.
SELECT count(idempotency.publish('t', to_json(5), event_id => pg_temp.id(5), deliver_at => clock_timestamp() + interval '1 hour')), pg_temp.publish('{1,2}', 'a'), pg_temp.publish('{3,4}');
SELECT pg_temp.fetch('s'), pg_temp.nack('s', 1, '1 hour'), pg_temp.nack('s', 3, '1 hour'), pg_temp.nack('s', 4, dead => true), pg_temp.ack('s'), pg_temp.parked('s');
SELECT idempotency.redrive('s', pg_temp.id(1)), idempotency.redrive('s', pg_temp.id(2)), pg_temp.drain('s'), pg_temp.parked('s');
SELECT idempotency.redrive('s', pg_temp.id(5)), idempotency.redrive('s'), pg_temp.drain('s'), pg_temp.parked('s');
DELETE FROM idempotency.parked WHERE id = pg_temp.id(5);

-- The order holds if an event is redriven while later ones are out, fail and are given back.
SELECT pg_temp.publish('{1,2,3}', 'c');
SELECT pg_temp.fetch('s', 1), pg_temp.nack('s', 1, dead => true), pg_temp.ack('s'), pg_temp.fetch('s');
SELECT idempotency.redrive('s', pg_temp.id(1)), pg_temp.nack('s', 3), idempotency.nack('s', pg_temp.batch('s'), NULL) IS NOT NULL AS given_back;
SELECT pg_temp.drain('s', 1);

-- A batch whose lease ends has failed; from the second time on its events go out one by one, and
-- the one that fails by itself becomes a dead letter. Its followers come.
SELECT pg_temp.publish('{1,2}', 'a'), pg_temp.publish('{3}', 'b');
SELECT pg_temp.fetch('s'), pg_temp.age('s');
SELECT pg_temp.fetch('s', 1), pg_temp.age('s');
SELECT pg_temp.fetch('s'), pg_temp.age('s');
SELECT pg_temp.fetch('s'), pg_temp.parked('s');
SELECT pg_temp.ack('s'), pg_temp.drain('s');
SELECT regexp_replace(error, '\d+', 'N') AS error, attempts FROM idempotency.dead_letters;
SELECT failed, acknowledged > 10 AS acknowledged FROM idempotency.partitions;
SELECT idempotency.discard('s');

-- Events with the same id fail together, because each of them can be the one that failed.
SELECT count(idempotency.publish('t', to_json(n), event_id => pg_temp.id(1))) FROM generate_series(1, 2) AS n;
SELECT pg_temp.fetch('s'), pg_temp.nack('s', 1), pg_temp.ack('s'), pg_temp.drain('s');

-- max_attempts 1 is one delivery that failed by itself, and the text of an error is bounded.
SELECT idempotency.alter_subscription('s', max_attempts => 1);
SELECT pg_temp.publish('{1}');
SELECT pg_temp.fetch('s'), pg_temp.age('s');
SELECT pg_temp.fetch('s'), pg_temp.parked('s');
SELECT idempotency.nack('s', pg_temp.batch('s'), pg_temp.id(1), repeat('€', 9000)) IS NULL AS dead, pg_temp.ack('s');
SELECT octet_length(error) FROM idempotency.dead_letters;
SELECT idempotency.discard('s');

--
-- deliver
--

CREATE TABLE carrier (name int PRIMARY KEY);
CREATE TABLE parcel (n int, carrier int REFERENCES carrier DEFERRABLE INITIALLY DEFERRED);
CREATE FUNCTION ship(event idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	IF event.payload::text = '13' THEN
		RAISE EXCEPTION 'never' USING ERRCODE = 'IKFIN';
	ELSIF event.payload::text = '14' THEN
		PERFORM idempotency.claim('delivery', 'open');
	END IF;
	ASSERT event.payload::text <> '17', 'not this one';
	INSERT INTO parcel VALUES (event.payload::text::int, event.payload::text::int % 10);
END
$$;
INSERT INTO carrier SELECT generate_series(0, 8);
CREATE ROLE regress_delivery_owner LOGIN;
SELECT idempotency.grant_client('regress_delivery_owner'), idempotency.grant_consumer('regress_delivery_owner');
GRANT ALL ON carrier, parcel TO regress_delivery_owner;
SELECT idempotency.alter_subscription('s', max_attempts => 2, handler => 'ship(idempotency.event)', partitions => 2, owner => 'regress_delivery_owner');
SELECT pg_temp.publish('{11,12,13,14,18,19}'), pg_temp.publish('{21,29,22}', 'a');
CALL idempotency.deliver('s', 'ship(idempotency.event)', max_events => 4);
SELECT array_agg(n ORDER BY n) FROM parcel;
SELECT payload, error, attempts, dead_at IS NOT NULL AS dead, retry_at > now() + interval '20 min' AS later FROM idempotency.parked ORDER BY payload::text;
INSERT INTO carrier VALUES (9);
SELECT pg_temp.age('s');
SET ROLE regress_delivery_owner;
CALL idempotency.deliver('s');
BEGIN;
CALL idempotency.deliver('s');
ROLLBACK;
RESET ROLE;
SELECT array_agg(n ORDER BY n), (SELECT array_agg(payload::text ORDER BY payload::text) FROM idempotency.dead_letters) AS dead FROM parcel;
SELECT idempotency.discard('s');
-- The event that failed, and not the one before it that has its id, is the dead letter.
SELECT count(idempotency.publish('t', to_json(n), event_id => pg_temp.id(13))) FROM unnest('{15,13,16}'::int[]) AS n;
SELECT pg_temp.publish('{17}');
CALL idempotency.deliver('s', 'ship(idempotency.event)');
SELECT pg_temp.age('s'), pg_temp.parked('s');
CALL idempotency.deliver('s', 'ship(idempotency.event)');
SELECT array_agg(n ORDER BY n) FILTER (WHERE n BETWEEN 13 AND 17), pg_temp.parked('s') FROM parcel;
SELECT error FROM idempotency.dead_letters WHERE payload::text = '17';
SELECT idempotency.discard('s');
CALL idempotency.deliver('s', 'pg_catalog.abs(int)');
CALL idempotency.deliver('s', 0);

-- Events share transactions. Each is handled once, whatever takes it out of the batch: events with one id fail together, with
-- what is behind each of them; a token that is not current fails its event only; a handler can nack another event.
CREATE TABLE handled (place int GENERATED ALWAYS AS IDENTITY, n int);
CREATE TABLE token AS SELECT k::int, (idempotency.claim('delivery', k, lease => '1 hour')).token - (k = '32')::int AS token FROM unnest('{31,32,33}'::text[]) AS k;
CREATE TABLE paid (n int);
CREATE TRIGGER guarded BEFORE INSERT ON paid FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('delivery');
CREATE FUNCTION handle(event idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	number int := event.payload::text;
BEGIN
	INSERT INTO handled (n) VALUES (number);
	IF number = 21 AND event.attempt = 1 THEN
		RAISE EXCEPTION 'boom';
	ELSIF number BETWEEN 31 AND 33 THEN
		PERFORM idempotency.complete('delivery', t.k::text, token => t.token) FROM token AS t WHERE t.k = number;
	ELSIF number = 41 THEN
		PERFORM idempotency.claim('delivery', '41');
		PERFORM idempotency.complete('delivery', '41');
	ELSIF number = 51 THEN
		PERFORM idempotency.nack('once', event.batch, pg_temp.id(52));
	END IF;
	IF number BETWEEN 41 AND 49 THEN
		INSERT INTO paid VALUES (number);
	END IF;
END
$$;
CREATE FUNCTION pg_temp.handled() RETURNS int[] LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM handled RETURNING place, n) SELECT array_agg(n ORDER BY place) FROM gone
$$;
SELECT idempotency.subscribe('once', '{once}', max_attempts => 2, retry_delay => '0');
SELECT idempotency.publish('once', '21', 'a', event_id => pg_temp.id(1)) IS NOT NULL
	AND idempotency.publish('once', '22', 'b', event_id => pg_temp.id(1)) IS NOT NULL AS same_id, pg_temp.publish('{23}', 'b', 'once');
CALL idempotency.deliver('once', 'handle(idempotency.event)');
SELECT pg_temp.handled();
SELECT pg_temp.publish('{31,32,33}', topic => 'once');
CALL idempotency.deliver('once', 'handle(idempotency.event)');
SELECT pg_temp.handled(), pg_temp.parked('once'), idempotency.discard('once');
-- What an event has claimed opens no guarded table for the next one.
SELECT pg_temp.publish('{41,42}', topic => 'once');
CALL idempotency.deliver('once', 'handle(idempotency.event)');
SELECT pg_temp.handled(), left(error, 30) AS error, idempotency.discard('once') FROM idempotency.dead_letters WHERE subscription = 'once';
SELECT pg_temp.publish('{51,52}', topic => 'once');
CALL idempotency.deliver('once', 'handle(idempotency.event)');
SELECT pg_temp.handled(), idempotency.unsubscribe('once');
-- A copy that seek() leaves, because its topic is left out, does not come beside the event in the log.
SELECT idempotency.subscribe('twice', '{twice*}', start_at => 'beginning'), pg_temp.publish('{61}', topic => 'twice a'), pg_temp.publish('{62}', topic => 'twice b');
SELECT idempotency.nack('twice', batch, id, retry_in => '0') IS NOT NULL AS failed FROM idempotency.fetch('twice') WHERE payload::text = '62';
SELECT pg_temp.ack('twice'), idempotency.alter_subscription('twice', '{twice a}'), idempotency.seek('twice', 'beginning') IS NOT NULL AS moved,
	idempotency.alter_subscription('twice', '{twice*}'), pg_temp.age('twice');
SELECT pg_temp.drain('twice'), idempotency.unsubscribe('twice');
DROP FUNCTION handle;
DROP TABLE handled, token, paid;
DELETE FROM idempotency.key WHERE scope = 'delivery';

--
-- Subscriptions
--

SELECT idempotency.subscribe('s', '{t}', start_at => 'beginning');
SELECT pg_temp.error_of('SELECT idempotency.' || c) AS error FROM unnest(ARRAY['subscribe('''', ''{t}'')', 'subscribe(''x'', ''{}'')', 'subscribe(''x'', NULL)', 'subscribe(''x'', ''{NULL}'')',
	'subscribe(''x'', ''{t\\}'')', 'subscribe(''x'', ''{t}'', start_at => ''soon'')', 'subscribe(''x'', ''{t}'', partitions => 257)', 'subscribe(''x'', ''{t}'', max_attempts => 0)',
	'subscribe(''x'', ''{t}'', retry_delay => ''-1 s'')', 'subscribe(''x'', ''{t}'', ''pg_catalog.abs(int)'')', 'alter_subscription(''x'')', 'seek(''s'', ''somewhen'')', 'seek(''s'', NULL::text)']) AS c;
SELECT pg_temp.error_of('SELECT idempotency.subscribe(''x'', array_fill(''t''::text, ARRAY[' || n || ']))') FROM generate_series(1000, 1001) AS n;
SELECT idempotency.unsubscribe('x'), idempotency.unsubscribe('s');
-- Only what is named changes.
SELECT idempotency.subscribe('s', '{t}', 'ship(idempotency.event)', max_attempts => 3, retry_delay => '0', max_lag => '1 day', start_at => 'beginning', owner => 'regress_delivery_owner') AS is_new;
SELECT idempotency.subscribe('s', '{t,u}') AS is_new, idempotency.alter_subscription('s', max_attempts => 4, max_lag => '-1 s');
SELECT owner, topics, handler, partitions, max_attempts, retry_delay, max_lag FROM idempotency.subscriptions;
-- Patterns
SELECT p AS pattern, (SELECT array_agg(t) FROM unnest(ARRAY['a', 'a.b', 'a_b', 'a%b', 'a*b', E'a\\b', 'axb']) AS t WHERE t LIKE ANY (idempotency_internal.patterns_of(ARRAY[p]))) AS topics
	FROM unnest(ARRAY['*', 'a*', 'a_b', 'a%b', 'a\*b', 'a\\b', 'a\xb', '*.*', 'a\_b']) AS p;

-- From the beginning, from a time, from now; pause and resume.
TRUNCATE idempotency.outbox;
SELECT pg_temp.publish('{1,2}');
SELECT clock_timestamp() AS between_them FROM pg_sleep(0.002) \gset
SELECT pg_temp.publish('{3,4}');
SELECT pg_temp.drain('s');
SELECT idempotency.seek('s', 'beginning'), pg_temp.fetch('s');
SELECT pg_temp.batch('s') AS batch \gset
SELECT idempotency.seek('s', :'between_them'::timestamptz), pg_temp.error_of('SELECT idempotency.ack(''s'', ' || :batch || ')');
SELECT pg_temp.drain('s');
SELECT idempotency.seek('s', :'between_them'), idempotency.pause('s');
SELECT pg_temp.fetch('s'), state FROM idempotency.partitions;
SELECT idempotency.resume('s'), pg_temp.drain('s');
SELECT pg_temp.publish('{5}');
SELECT idempotency.seek('s', 'now'), pg_temp.publish('{6}');
SELECT pg_temp.drain('s');

-- A change of the number of partitions: those of before deliver first, and leave their parked events to
-- those after it.
SELECT pg_temp.publish('{1,2}', 'a'), pg_temp.publish('{3,4}', 'b');
SELECT pg_temp.fetch('s', 1), pg_temp.nack('s', 1, '1 hour'), pg_temp.ack('s');
SELECT idempotency.alter_subscription('s', partitions => 3);
SELECT pg_temp.publish('{5}', 'a'), pg_temp.publish('{6}', 'b');
SELECT partition, partitions, state FROM idempotency.partitions ORDER BY partitions, partition;
SELECT pg_temp.drain('s'), pg_temp.parked('s');
SELECT partition, partitions, state FROM idempotency.partitions ORDER BY partition;
SELECT pg_temp.age('s');
SELECT pg_temp.drain('s');

-- After a restore, ids of transactions are those of another cluster: nothing is lost or held back.
SELECT idempotency.alter_subscription('s', partitions => 1);
SELECT pg_temp.fetch('s');
SELECT pg_temp.publish('{1,2,3,4,5}');
SELECT pg_temp.fetch('s', 2);
ALTER TABLE idempotency.outbox DISABLE TRIGGER refuse_update;
UPDATE idempotency.outbox SET txid = (txid::text::bigint + 1000000000)::text::xid8;
UPDATE idempotency.position SET system_identifier = 1,
	base = regexp_replace(replace(regexp_replace(base::text, '^(\d+):(\d+):.*$', '1000000000:\2:'), ':', ':'), ':(\d+):', ':1000000000:')::pg_snapshot, upto = NULL, reached = mark,
	xids = '{}', froms = '{}', born = '1000000000', top = (SELECT min(seq) - 1 FROM idempotency.outbox WHERE payload::text = '1' AND seq > mark), events = '{}', size = 0, batch = NULL;
ALTER TABLE idempotency.outbox ENABLE TRIGGER refuse_update;
SELECT pg_temp.publish('{6}');
SELECT pg_temp.fetch('s', 4), pg_temp.ack('s'), pg_temp.publish('{7}');
SELECT pg_temp.drain('s');
SELECT setval('idempotency.outbox_seq', 1);
SELECT pg_temp.error_of('SELECT idempotency.fetch(''s'')');
-- as the hint says
SELECT setval('idempotency.outbox_seq', (SELECT max(n) FROM (SELECT seq FROM idempotency.outbox UNION ALL
	SELECT seq FROM idempotency.parked UNION ALL SELECT greatest(top, mark, skip) FROM idempotency.position) AS numbers (n))) > 0 AS corrected;
SELECT pg_temp.drain('s');

--
-- The reaper
--

SET idempotency.outbox_retention = 0;
SELECT idempotency.reap() > 5 AS reaped;
SELECT count(*) FROM idempotency.outbox;
SELECT pg_temp.publish('{1,2,3}');
SELECT pg_temp.fetch('s', 1);
SELECT idempotency.reap();
SELECT count(*) FROM idempotency.outbox;
SELECT pg_temp.nack('s', 1, dead => true), pg_temp.ack('s'), pg_temp.fetch('s', 1), pg_temp.ack('s'), pg_temp.drain('s');
SELECT idempotency.reap(2), idempotency.reap();
SELECT count(*) FROM idempotency.outbox;
-- dead letters after their retention, and events that are older than max_lag
SELECT idempotency.alter_subscription('s', dead_letter_retention => '0', max_lag => '0');
SELECT pg_temp.publish('{1,2}');
SELECT idempotency.reap(), pg_temp.parked('s'), pg_temp.fetch('s');
SELECT count(*) FROM idempotency.outbox;
RESET idempotency.outbox_retention;

--
-- Calls that change or delete what others rely on leave a line in the log each; those that
-- change nothing do not.
--

SELECT current_user AS superuser \gset
CREATE ROLE regress_delivery_logged;
SELECT idempotency.grant_consumer('regress_delivery_logged');
GRANT regress_delivery_logged TO :"superuser";
SET ROLE regress_delivery_logged;
SET client_min_messages = log;
SELECT idempotency.subscribe('logged', '{logged}', max_attempts => 1), idempotency.subscribe('logged', '{logged}', max_attempts => 1),
	idempotency.alter_subscription('logged', max_attempts => 1), idempotency.resume('logged'), idempotency.redrive('logged'), idempotency.discard('logged');
SELECT idempotency.subscribe('logged', '{logged}', retry_delay => '2 s');
SELECT idempotency.alter_subscription('logged', partitions => 2), idempotency.alter_subscription('logged', partitions => 1);
SELECT idempotency.pause('logged'), idempotency.pause('logged'), idempotency.resume('logged'), idempotency.resume('logged');
RESET client_min_messages;
RESET ROLE;
SELECT pg_temp.publish('{1,2}', topic => 'logged');
-- the first call ends the two former generations of partitions
SELECT coalesce(pg_temp.fetch('logged'), pg_temp.fetch('logged'), pg_temp.fetch('logged')) AS fetched;
SELECT pg_temp.nack('logged', 1), pg_temp.nack('logged', 2);
SET ROLE regress_delivery_logged;
SET client_min_messages = log;
SELECT idempotency.redrive('logged', pg_temp.id(1)), idempotency.discard('logged', pg_temp.id(2)), idempotency.redrive('logged');
SELECT idempotency.seek('logged', 'now');
SELECT idempotency.unsubscribe('logged'), idempotency.unsubscribe('logged');
RESET client_min_messages;
RESET ROLE;

--
-- Tables that their owner has altered: a write that is discarded is an error, and no event is lost
--

SELECT idempotency.subscribe('altered', '{altered}', max_attempts => 1);
SELECT pg_temp.publish('{1,2}', 'a', 'altered');
CREATE FUNCTION discard_row() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TRIGGER x BEFORE INSERT OR UPDATE OR DELETE ON idempotency.position FOR EACH ROW EXECUTE FUNCTION discard_row();
SELECT pg_temp.error_of('SELECT * FROM idempotency.fetch(''altered'')'), pg_temp.error_of('SELECT idempotency.subscribe(''new'', ''{altered}'')');
DROP TRIGGER x ON idempotency.position;
SELECT pg_temp.fetch('altered');
CREATE TRIGGER x BEFORE INSERT ON idempotency.parked FOR EACH ROW EXECUTE FUNCTION discard_row();
SELECT pg_temp.error_of('SELECT idempotency.nack(''altered'', pg_temp.batch(''altered''), pg_temp.id(1))');
DROP TRIGGER x ON idempotency.parked;
SELECT idempotency.nack('altered', pg_temp.batch('altered'), pg_temp.id(1)), idempotency.ack('altered', pg_temp.batch('altered'));
SELECT pg_temp.fetch('altered'), (SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'altered') AS dead, idempotency.unsubscribe('altered');
DROP FUNCTION discard_row;

--
-- Privileges
--

CREATE ROLE regress_delivery_client;
CREATE ROLE regress_delivery_consumer LOGIN;
CREATE ROLE regress_delivery_other;
CREATE ROLE regress_delivery_operator;
SELECT idempotency.grant_client('regress_delivery_client'), idempotency.grant_consumer('regress_delivery_consumer'),
	idempotency.grant_consumer('regress_delivery_other'), idempotency.grant_operator('regress_delivery_operator');
CREATE TEMPORARY TABLE door (n serial, statement text);
INSERT INTO door (statement) VALUES ('SELECT idempotency.publish(''t'', ''{}'')'), ('SELECT idempotency.subscribe(''mine'', ''{t}'')'), ('SELECT idempotency.fetch(''mine'')'),
	('SELECT idempotency.seek(''mine'', ''now'')'), ('SELECT idempotency.redrive(''mine'')'), ('CALL idempotency.deliver(''mine'', ''ship(idempotency.event)'')'), ('SELECT count(*) FROM idempotency.subscriptions'),
	('SELECT count(*) FROM idempotency.partitions'), ('SELECT count(*) FROM idempotency.outbox'), ('SELECT count(*) FROM idempotency.position'), ('SELECT idempotency_internal.subscription_of(''mine'')');
GRANT SELECT ON door TO PUBLIC;
SET ROLE regress_delivery_consumer;
SELECT statement, pg_temp.error_of(statement) FROM door ORDER BY n;
SET ROLE regress_delivery_other;
SELECT statement, pg_temp.error_of(statement) FROM door WHERE statement LIKE '%mine%' ORDER BY n;
SELECT pg_temp.error_of('SELECT idempotency.subscribe(''theirs'', ''{t}'', owner => ''regress_delivery_consumer'')');
SET ROLE regress_delivery_client;
SELECT statement, pg_temp.error_of(statement) FROM door ORDER BY n;
SET ROLE regress_delivery_operator;
SELECT statement, pg_temp.error_of(statement) FROM door ORDER BY n;
RESET ROLE;
-- The stored handler of another role does not run with the caller's rights.
SELECT idempotency.alter_subscription('mine', handler => 'ship(idempotency.event)');
CALL idempotency.deliver('mine');
-- Nor does one whose owner cannot act as the owner of the subscription: its body can be replaced.
ALTER FUNCTION ship(idempotency.event) OWNER TO regress_delivery_other;
SET ROLE regress_delivery_consumer;
CALL idempotency.deliver('mine');
SELECT pg_temp.error_of('SELECT idempotency.alter_subscription(''mine'', handler => ''ship(idempotency.event)'')');
RESET ROLE;
ALTER FUNCTION ship(idempotency.event) OWNER TO CURRENT_USER;
-- A command that runs the code of a table's owner, such as ANALYZE, gives it nothing of the caller's.
CREATE TABLE trap (i int);
CREATE FUNCTION trap(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
	statement text;
BEGIN
	FOREACH statement IN ARRAY ARRAY['alter_subscription(''mine'', owner => ''regress_delivery_other'')', 'subscribe(''trapped'', ''{t}'')', 'fetch(''mine'')',
		'ack(''mine'', 1)', 'seek(''mine'', ''now'')', 'handler_of(''mine'')', 'has_more(''mine'')', 'unsubscribe(''mine'')'] LOOP
		BEGIN
			EXECUTE 'SELECT idempotency.' || statement;
			RAISE NOTICE '%: no error', statement;
		EXCEPTION WHEN insufficient_privilege THEN
			RAISE NOTICE '%: refused', statement;
		END;
	END LOOP;
	RETURN i;
END
$$;
ALTER TABLE trap OWNER TO regress_delivery_other;
INSERT INTO trap VALUES (1);
CREATE INDEX ON trap (trap(i));
ANALYZE trap;
SELECT owner FROM idempotency.subscriptions WHERE subscription = 'mine';
DROP TABLE trap;
DROP FUNCTION trap(int);
SELECT idempotency.unsubscribe('mine'), idempotency.unsubscribe('s');
DROP OWNED BY regress_delivery_owner, regress_delivery_logged, regress_delivery_client, regress_delivery_consumer, regress_delivery_other, regress_delivery_operator;
DROP ROLE regress_delivery_owner, regress_delivery_logged, regress_delivery_client, regress_delivery_consumer, regress_delivery_other, regress_delivery_operator;
DROP TABLE parcel, carrier;
DROP FUNCTION ship(idempotency.event);
TRUNCATE idempotency.outbox;
