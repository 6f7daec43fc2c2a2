-- The public contract: events, used by publishers and consumers in separate
-- transactions. These tests are transactions themselves, so this file does not run in
-- one.

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, false)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

-- Errors here are intended; an unexpected success fails its test.
\set ON_ERROR_STOP off
\set VERBOSITY sqlstate

SELECT plan(145);

-- refused tests that a statement fails with a SQLSTATE and a hint.
CREATE FUNCTION pg_temp.refused(statement text, sqlstate text, description text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	state text := 'no error';
	hint text := '';
BEGIN
	BEGIN
		EXECUTE statement;
	EXCEPTION WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, hint = PG_EXCEPTION_HINT;
	END;
	RETURN is(state || CASE WHEN hint ~ '^[A-Z].*[.]$' THEN ', with a hint' ELSE ', without a hint' END,
		sqlstate || ', with a hint', description);
END $$;

-- fetched fetches a batch, and returns its number and the payloads of its events in
-- order, with the attempt unless it is the first.
CREATE FUNCTION pg_temp.fetched(
	subscription text, max_events integer DEFAULT 100, wait interval DEFAULT '0', OUT batch bigint, OUT events text)
LANGUAGE sql AS $$
	SELECT max(e.batch), coalesce(string_agg(
		coalesce(e.payload #>> '{}', 'none') || CASE WHEN e.attempt > 1 THEN '#' || e.attempt ELSE '' END, ' ' ORDER BY e.ordinality), '')
	FROM idempotency.fetch(subscription, max_events, wait) WITH ORDINALITY AS e
$$;

-- drained acknowledges all remaining events, and returns them, each batch in brackets.
CREATE FUNCTION pg_temp.drained(subscription text, max_events integer DEFAULT 100) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
	got record;
	all_events text := '';
BEGIN
	LOOP
		got := pg_temp.fetched(subscription, max_events);
		EXIT WHEN got.batch IS NULL;
		PERFORM idempotency.ack(subscription, got.batch);
		all_events := all_events || '[' || got.events || ']';
	END LOOP;
	RETURN all_events;
END $$;

-- later moves the batch of a subscription and its retries into the past by an interval.
CREATE FUNCTION pg_temp.later(p_subscription text, p_time interval) RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.position SET leased_at = leased_at - p_time, leased_until = leased_until - p_time
	WHERE subscription = p_subscription AND batch IS NOT NULL;
	UPDATE idempotency.parked SET retry_at = retry_at - p_time
	WHERE subscription = p_subscription AND retry_at IS NOT NULL
$$;

-- id returns the id of the event with payload n.
CREATE FUNCTION pg_temp.id(n integer) RETURNS uuid IMMUTABLE LANGUAGE sql AS $$
	SELECT pg_catalog.format('00000000-0000-7000-8000-%s', pg_catalog.lpad(n::text, 12, '0'))::uuid
$$;
CREATE FUNCTION pg_temp.published(topic text, n integer, aggregate text DEFAULT NULL) RETURNS uuid LANGUAGE sql AS $$
	SELECT idempotency.publish(topic, n::text, aggregate, event_id => pg_temp.id(n))
$$;

-- delay returns the time from the last failure of an event to its retry.
CREATE FUNCTION pg_temp.delay(n integer) RETURNS interval LANGUAGE sql AS $$
	SELECT retry_at - last_failed_at FROM idempotency.parked WHERE id = pg_temp.id(n)
$$;

-- ---------------------------------------------------------------------------
-- subscribe
-- ---------------------------------------------------------------------------

SELECT idempotency.publish('order.placed', '0') \g /dev/null
SELECT is(idempotency.subscribe('orders', ARRAY['order.*']), true, 'subscribe returns true for a new subscription');
SELECT is(idempotency.subscribe('all', ARRAY['*'], start_at => 'beginning'), true, 'and for another one');
SELECT is(idempotency.subscribe('orders', ARRAY['order.*'], start_at => 'beginning'), false, 'and false for an existing one');
SELECT is(pg_temp.drained('all'), '[0]', 'a subscription from the beginning gets the events in the outbox');
SELECT is(pg_temp.drained('orders'), '', 'a subscription from now gets events published later');

SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.subscribe(%s)', arguments), sqlstate, 'subscribe refuses ' || what)
FROM (VALUES
	($$NULL, '{*}'$$, 'IK400', 'a missing name'),
	($$'', '{*}'$$, 'IK400', 'an empty name'),
	($$repeat('n', 256), '{*}'$$, 'IK400', 'a name of more than 255 characters'),
	($$E'a\tb', '{*}'$$, 'IK400', 'a control character'),
	($$'s', NULL$$, '22023', 'missing topics'),
	($$'s', '{}'$$, '22023', 'no topics'),
	($$'s', '{a,NULL}'$$, '22023', 'a topic that is NULL'),
	($$'s', '{{a},{b}}'$$, '22023', 'topics of two dimensions'),
	($$'s', '{""}'$$, 'IK400', 'an empty topic'),
	($$'s', ARRAY['a\']$$, '22023', 'a trailing backslash'),
	($$'s', '{*}', start_at => 'tomorrow'$$, '22023', 'an invalid start'),
	($$'s', '{*}', max_attempts => 0$$, '22023', 'no attempts'),
	($$'s', '{*}', max_attempts => NULL$$, '22023', 'an unknown number of attempts'),
	($$'s', '{*}', retry_delay => '-1 second'$$, '22023', 'a negative delay'),
	($$'s', '{*}', max_retry_delay => NULL$$, '22023', 'a missing maximum delay'),
	($$'s', '{*}', max_lag => '-1 second'$$, '22023', 'a negative lag')
) AS v (arguments, sqlstate, what);
SELECT is_empty($$ SELECT subscription FROM idempotency.subscription WHERE subscription = 's' $$, 'a refused call creates nothing');

-- ---------------------------------------------------------------------------
-- publish
-- ---------------------------------------------------------------------------

SELECT is(pg_temp.published('order.placed', 1, 'order-1'), pg_temp.id(1), 'publish returns the given id');
SELECT matches(idempotency.publish('order.placed', '{"n":  2}', 'order-1', 'placed', '{"trace": 1}')::text,
	'^........-....-7', 'or makes one');
SELECT results_eq(
	$$
		SELECT seq > 0, txid IS NOT NULL, published_at BETWEEN now() - interval '1 minute' AND clock_timestamp(),
			id, aggregatetype, aggregateid, type, payload::text, headers::text
		FROM idempotency.outbox ORDER BY seq DESC OFFSET 1 LIMIT 1
	$$,
	$$ VALUES (true, true, true, pg_temp.id(1), 'order.placed' COLLATE "C", 'order-1' COLLATE "C", NULL COLLATE "C",
		'1', NULL) $$,
	'an event is a row of the outbox');
SELECT results_eq(
	$$ SELECT type::text COLLATE "default", payload::text, headers::text FROM idempotency.outbox ORDER BY seq DESC LIMIT 1 $$,
	$$ VALUES ('placed', '{"n":  2}', '{"trace": 1}') $$, 'byte for byte');

BEGIN;
SELECT pg_temp.published('order.placed', 3) \g /dev/null
SELECT is(pg_temp.drained('orders'), '[1 {"n":  2}]', 'no event is delivered before its transaction commits');
ROLLBACK;
SELECT is(pg_temp.drained('orders'), '[1 {"n":  2}]', 'a rolled-back acknowledgement has no effect');
SELECT is(pg_temp.drained('orders'), '', 'no event of a rolled-back transaction is delivered');

SELECT lives_ok($$ SELECT idempotency.publish('order.placed', NULL) $$, 'an event can have no payload');
SELECT is(pg_temp.drained('orders'), '[none]', 'and is delivered without one');
SELECT lives_ok($$ SELECT idempotency.publish('order.placed', '"x"'), idempotency.publish('order.placed', '"x"'::json),
	idempotency.publish('order.placed', '"x"'::jsonb), idempotency.publish('order.placed', '"x"'::text) $$,
	'a payload can be json, jsonb, text or a literal');
SELECT is(pg_temp.drained('orders'), '[x x x x]', 'and is delivered unchanged');

SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.publish(%s)', arguments), sqlstate, 'publish refuses ' || what)
FROM (VALUES
	($$NULL, '1'$$, 'IK400', 'a missing topic'),
	($$'', '1'$$, 'IK400', 'an empty topic'),
	($$repeat('t', 256), '1'$$, 'IK400', 'a topic of more than 255 characters'),
	($$'t', '1', ''$$, 'IK400', 'an empty aggregate'),
	($$'t', '1', repeat('t', 256)$$, 'IK400', 'an aggregate of more than 255 characters'),
	($$'t', '1', NULL, ''$$, 'IK400', 'an empty type'),
	($$'t', '1', headers => '[]'$$, '22023', 'headers that are not an object')
) AS v (arguments, sqlstate, what);
SELECT is(idempotency.publish(repeat('t', 255), '1', repeat('t', 255), repeat('t', 255), event_id => pg_temp.id(4)),
	pg_temp.id(4), '255 characters are fine');

-- An event that is published under a claim has the claim's scope and key in its
-- headers.

BEGIN;
SELECT idempotency.claim('order.create', 'k"1"') \g /dev/null
SELECT pg_temp.published('order.placed', 5) \g /dev/null
SELECT idempotency.publish('order.placed', '6', headers => ' { "trace": 1 } ') \g /dev/null
SELECT idempotency.publish('order.placed', '7', headers => '{"idempotency-key": "mine"}') \g /dev/null
SELECT idempotency.complete('order.create', 'k"1"') \g /dev/null
COMMIT;
SELECT results_eq(
	$$ SELECT headers::jsonb FROM idempotency.fetch('orders') $$,
	$$ VALUES ('{"idempotency-scope": "order.create", "idempotency-key": "k\"1\""}'::jsonb),
		('{"idempotency-scope": "order.create", "idempotency-key": "k\"1\"", "trace": 1}'),
		('{"idempotency-scope": "order.create", "idempotency-key": "mine"}') $$,
	'the headers name scope and key of the claim, unless the caller sets them');
SELECT pg_temp.later('orders', '1 hour') \g /dev/null
SELECT is(pg_temp.drained('orders'), '[5 6 7]', 'a batch without an acknowledgement is redelivered');

-- ---------------------------------------------------------------------------
-- fetch, ack, extend
-- ---------------------------------------------------------------------------

SELECT count(pg_temp.published('order.placed', n)) FROM generate_series(11, 15) AS n \g /dev/null
SELECT results_eq(
	$$ SELECT count(*), count(DISTINCT batch), min(batch) > 0, bool_and(attempt = 1), array_agg(id ORDER BY seq)
		FROM idempotency.fetch('orders') $$,
	$$ SELECT 5::bigint, 1::bigint, true, true, array_agg(pg_temp.id(n) ORDER BY n) FROM generate_series(11, 15) AS n $$,
	'the events of one batch have its number, and are in order of publication');
SELECT batch AS first FROM idempotency.position WHERE subscription = 'orders' \gset
SELECT is(pg_temp.drained('orders'), '', 'while a batch is in flight, fetch returns no other');
SELECT pg_temp.later('orders', '20 seconds') \g /dev/null
SELECT is(pg_temp.drained('orders'), '', 'until its lease expires');
SELECT cmp_ok(idempotency.extend('orders', :first, '1 hour'), '>', now() + interval '59 minutes', 'extend returns the new end of the lease');
SELECT pg_temp.later('orders', '59 minutes') \g /dev/null
SELECT is(pg_temp.drained('orders'), '', 'an extended lease runs longer');
SELECT pg_temp.later('orders', '2 minutes') \g /dev/null
SELECT batch AS second, events FROM pg_temp.fetched('orders', 1) \gset
SELECT is(:'events'::text, '11 12 13 14 15', 'after the lease, the whole batch is redelivered');
SELECT isnt(:first, :second, 'under another number');
SELECT is(pg_temp.drained('all', 2), '[1 {"n":  2}][none x][x x][x 1][5 6][7 11][12 13][14 15]',
	'another subscription has its own position, topics and batch size');

BEGIN;
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.ack(%L, %s)', 'orders', :first), 'IK408',
	'a consumer that lost the batch cannot acknowledge it');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.nack(%L, %s, NULL)', 'orders', :first), 'IK408', 'nor return it');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.nack(%L, %s, %L)', 'orders', :first, pg_temp.id(11)), 'IK408',
	'nor fail an event');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.extend(%L, %s, %L)', 'orders', :first, '1 min'), 'IK408',
	'nor extend it');
SELECT pg_temp.published('other', 16) \g /dev/null
COMMIT;
SELECT is(:'SQLSTATE'::text, '00000', 'but its transaction can commit');
SELECT is(pg_temp.drained('all'), '[16]', 'together with the events that it published');
SELECT is(idempotency.ack('orders', :second)::text, '', 'the current consumer can acknowledge it');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.ack(%L, %s)', 'orders', :second), 'IK408', 'once');
SELECT is(pg_temp.drained('orders'), '', 'and the position is after the batch');

BEGIN;
SELECT pg_temp.published('order.placed', 17) \g /dev/null
COMMIT;
BEGIN;
SELECT is((pg_temp.fetched('orders')).events, '17', 'a batch is fetched');
ROLLBACK;
SELECT is(pg_temp.drained('orders'), '[17]', 'and after the rollback fetched again');

SELECT is((pg_temp.fetched('orders', wait => '10 ms')).events, '', 'a wait without events ends');
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.refused($$ SELECT * FROM idempotency.fetch('orders') $$, '25001', 'a fixed snapshot gets no events');
COMMIT;
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), sqlstate, call || ' is refused')
FROM (VALUES
	($$fetch('unknown')$$, '42704'), ($$ack('unknown', 1)$$, '42704'), ($$nack('unknown', 1, NULL)$$, '42704'),
	($$extend('unknown', 1, '1 min')$$, '42704'), ($$redrive('unknown')$$, '42704'),
	($$fetch(NULL)$$, 'IK400'), ($$unsubscribe('')$$, 'IK400'),
	($$fetch('orders', 0)$$, '22023'), ($$fetch('orders', NULL)$$, '22023'),
	($$fetch('orders', lease => NULL)$$, '22023'), ($$fetch('orders', lease => '0')$$, '22023'),
	($$fetch('orders', wait => '-1 ms')$$, '22023'),
	($$ack('orders', NULL)$$, '22023'), ($$ack('orders', 0)$$, 'IK408'), ($$ack('orders', -1)$$, 'IK408'),
	($$nack('orders', NULL, NULL)$$, '22023'), ($$nack('orders', 1, NULL, retry_in => '-1 ms')$$, '22023'),
	($$extend('orders', NULL, '1 min')$$, '22023'), ($$extend('orders', 1, NULL)$$, '22023')
) AS v (call, sqlstate);

-- ---------------------------------------------------------------------------
-- nack: failed events, and later events of the aggregate
-- ---------------------------------------------------------------------------

SELECT pg_temp.published('order.placed', 21, 'a'), pg_temp.published('order.placed', 22, 'b'),
	pg_temp.published('order.paid', 23, 'a'), pg_temp.published('order.placed', 24) \g /dev/null
SELECT batch, events FROM pg_temp.fetched('orders') \gset
SELECT is(:'events'::text, '21 22 23 24', 'a batch has events of two aggregates, and of none');
SELECT idempotency.nack('orders', :batch, pg_temp.id(21), 'no answer') \g /dev/null
SELECT ok(pg_temp.delay(21) BETWEEN '450 ms' AND '1 second', 'the first delay is between half of retry_delay and all of it');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.nack(%L, %s, %L)', 'orders', :batch, pg_temp.id(n)), '22023', what)
FROM (VALUES (21, 'an event can fail only once in a batch'), (23, 'later events of the aggregate have left the batch'),
	(11, 'an event outside the batch cannot fail')) AS v (n, what);
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT is(pg_temp.drained('orders'), '', 'the event, and the later one of its aggregate, wait');
SELECT pg_temp.published('order.placed', 25, 'a'), pg_temp.published('order.placed', 26, 'b') \g /dev/null
SELECT is(pg_temp.drained('orders'), '[26]', 'so does an event published later; other aggregates are delivered');
SELECT pg_temp.later('orders', '1 minute') \g /dev/null
SELECT batch, events FROM pg_temp.fetched('orders') \gset
SELECT is(:'events'::text, '21#2', 'it is redelivered as its second attempt');
SELECT idempotency.nack('orders', :batch, pg_temp.id(21), 'no answer') \g /dev/null
SELECT ok(pg_temp.delay(21) BETWEEN '950 ms' AND '2 seconds', 'the delay doubles');
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT pg_temp.later('orders', '1 minute') \g /dev/null
SELECT is(pg_temp.drained('orders'), '[21#3][23 25]', 'after its success, the waiting events follow in order');
SELECT is_empty('SELECT seq FROM idempotency.parked', 'no event is parked any more');

SELECT pg_temp.published('order.placed', 27) \g /dev/null
SELECT batch FROM pg_temp.fetched('orders') \gset
SELECT ok(idempotency.nack('orders', :batch, NULL) <= clock_timestamp(), 'a whole batch can be returned');
SELECT batch, events FROM pg_temp.fetched('orders') \gset
SELECT is(:'events'::text, '27', 'and is redelivered at once as the same attempt');
SELECT idempotency.nack('orders', :batch, pg_temp.id(27), retry_in => '1 hour') \g /dev/null
SELECT ok(pg_temp.delay(27) BETWEEN '59 minutes' AND '1 hour', 'a consumer can say when to retry');
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT pg_temp.later('orders', '1 hour') \g /dev/null
SELECT is(pg_temp.drained('orders'), '[27#2]', 'and then the event is redelivered');

-- ---------------------------------------------------------------------------
-- Dead letters
-- ---------------------------------------------------------------------------

SELECT is(idempotency.subscribe('orders', ARRAY['order.*'], max_attempts => 2, retry_delay => '1 hour',
	max_retry_delay => '1 minute'), false, 'the options of a subscription can be changed');
SELECT pg_temp.published('order.placed', 31, 'a'), pg_temp.published('order.placed', 32, 'a'), pg_temp.published('order.placed', 33, 'c') \g /dev/null
SELECT batch, events FROM pg_temp.fetched('orders') \gset
SELECT idempotency.nack('orders', :batch, pg_temp.id(31), 'broken') \g /dev/null
SELECT ok(pg_temp.delay(31) BETWEEN '29 s' AND '1 minute', 'no delay exceeds max_retry_delay');
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT pg_temp.later('orders', '1 hour') \g /dev/null
SELECT batch, events FROM pg_temp.fetched('orders') \gset
SELECT is(:'events'::text, '31#2', 'the last attempt');
SELECT is(idempotency.nack('orders', :batch, pg_temp.id(31), 'still broken'), NULL, 'after max_attempts there is no further retry');
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT is(pg_temp.drained('orders'), '[32]', 'and its aggregate is unblocked');
SELECT results_eq(
	$$
		SELECT subscription::text COLLATE "default", event_id, topic::text COLLATE "default", aggregate_id::text COLLATE "default",
			type, error, attempts, first_failed_at < last_failed_at, published_at < first_failed_at, payload::text, headers::text,
			seq = (SELECT max(seq) - 2 FROM idempotency.outbox)
		FROM idempotency.dead_letters
	$$,
	$$ VALUES ('orders', pg_temp.id(31), 'order.placed', 'a', NULL::text COLLATE "C", 'still broken', 2, true, true, '31',
		NULL::text, true) $$,
	'the event is a dead letter, with its last error');
SELECT is(idempotency.redrive('orders', pg_temp.id(32)), 0::bigint, 'redrive ignores an event that is not a dead letter');
SELECT is(idempotency.redrive('all'), 0::bigint, 'redrive ignores a dead letter of another subscription');
SELECT is(idempotency.redrive('orders', pg_temp.id(31)), 1::bigint, 'redrive redrives a dead letter');
SELECT is_empty('SELECT event_id FROM idempotency.dead_letters', 'which then is no longer a dead letter');
SELECT is(pg_temp.drained('orders'), '[31]', 'it is delivered as its first attempt');

SELECT count(pg_temp.published('order.placed', n)) FROM generate_series(34, 36) AS n \g /dev/null
SELECT idempotency.subscribe('orders', ARRAY['order.*'], max_attempts => 1) \g /dev/null
SELECT batch FROM pg_temp.fetched('orders') \gset
SELECT is(idempotency.nack('orders', :batch, pg_temp.id(n), retry_in => '0'), NULL, 'with one attempt, the first failure is the last')
FROM generate_series(34, 36) AS n;
SELECT idempotency.ack('orders', :batch) \g /dev/null
SELECT is(idempotency.redrive('orders'), 3::bigint, 'all of them can be redriven');
SELECT is(pg_temp.drained('orders'), '[34 35 36]', 'in order of publication');

-- ---------------------------------------------------------------------------
-- Topics
-- ---------------------------------------------------------------------------

SELECT idempotency.subscribe('topic: ' || pattern, ARRAY[pattern, 'none']) FROM (VALUES
	('a.b'), ('a.*'), ('*.b'), ('*b*'), ('a\*b'), ('*'), ('A.B'), ('a''"%_?[]')) AS v (pattern) \g /dev/null
SELECT idempotency.publish(topic, to_json(topic)) FROM (VALUES
	('a.b'), ('a.b.c'), ('a.'), ('a'), ('a*b'), ('A.B'), ('a''"%_?[]')) AS v (topic) \g /dev/null
SELECT is(pg_temp.drained('topic: ' || pattern), expected, pattern || ' is ' || expected) FROM (VALUES
	('a.b', '[a.b]'), ('a.*', '[a.b a.b.c a.]'), ('*.b', '[a.b]'), ('*b*', '[a.b a.b.c a*b]'), ('a\*b', '[a*b]'),
	('*', '[a.b a.b.c a. a a*b A.B a''"%_?[]]'), ('A.B', '[A.B]'), ('a''"%_?[]', '[a''"%_?[]]')) AS v (pattern, expected);

-- ---------------------------------------------------------------------------
-- Handlers, and unsubscribe
-- ---------------------------------------------------------------------------

CREATE ROLE outbox_owner LOGIN;
SELECT idempotency.grant_consumer('outbox_owner') \g /dev/null
CREATE SCHEMA outbox_handlers;
CREATE FUNCTION outbox_handlers.handle(event idempotency.event) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION outbox_handlers.wrong(event json) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION outbox_handlers.secret(event idempotency.event) RETURNS void LANGUAGE sql AS '';
REVOKE ALL ON FUNCTION outbox_handlers.secret FROM PUBLIC;
GRANT USAGE ON SCHEMA outbox_handlers TO outbox_owner;

SELECT pg_temp.refused(
	$$ SELECT idempotency.subscribe('handled', '{*}', 'outbox_handlers.handle(idempotency.event)') $$, '42501',
	'no handler runs as a superuser');
SELECT pg_temp.refused(
	$$ SELECT idempotency.subscribe('handled', '{*}', 'outbox_handlers.wrong(json)', owner => 'outbox_owner') $$, '42P13',
	'a handler takes an event');
SELECT throws_ok(
	$$ SELECT idempotency.subscribe('handled', '{*}', 'outbox_handlers.secret(idempotency.event)', owner => 'outbox_owner') $$,
	'42501', NULL, 'its owner must have EXECUTE on the handler');
SELECT is(idempotency.subscribe('handled', '{*}', 'outbox_handlers.handle(idempotency.event)', owner => 'outbox_owner'), true,
	'a subscription with a handler');
SELECT pg_temp.refused(pg_catalog.format('SELECT idempotency.%s', call), '55000', 'is not fetched: ' || call)
FROM (VALUES ($$fetch('handled')$$), ($$ack('handled', 1)$$), ($$nack('handled', 1, NULL)$$), ($$extend('handled', 1, '1 min')$$))
	AS v (call);
SELECT is(idempotency.subscribe('handled', '{*}', owner => 'outbox_owner'), false, 'unless subscribe() removes the handler');
SELECT is(pg_temp.drained('handled'), '', 'its position was kept');

SELECT is(idempotency.unsubscribe(subscription), true, 'it can be given up: ' || subscription)
FROM idempotency.subscription ORDER BY subscription;
SELECT is(idempotency.unsubscribe('orders'), false, 'once');
SELECT is_empty(
	$$ SELECT subscription FROM idempotency.subscription UNION ALL SELECT subscription FROM idempotency.position
		UNION ALL SELECT subscription FROM idempotency.parked $$,
	'and all its data are deleted');

SELECT * FROM finish();
DROP OWNED BY outbox_owner;
DROP ROLE outbox_owner;
DROP SCHEMA outbox_handlers CASCADE;
