--
-- subscribe() and unsubscribe(): options, topic patterns, start positions, owners and
-- handlers.
--
\set SHOW_CONTEXT never

-- The SQLSTATE, message and detail of a statement, which is rolled back.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'UNDO1';
EXCEPTION
	WHEN SQLSTATE 'UNDO1' THEN
		RETURN 'accepted';
	WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
		RETURN SQLSTATE || ': ' || message || coalesce('. ' || nullif(detail, ''), '');
END
$$;

CREATE FUNCTION pg_temp.publish(numbers int[], topic text DEFAULT 'subscribe', aggregate text DEFAULT NULL) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(idempotency.publish(topic, to_json(n), aggregate)) FROM unnest(numbers) AS n
$$;
CREATE FUNCTION pg_temp.fetch(subscription text, max_events int DEFAULT 100) RETURNS text LANGUAGE sql AS $$
	SELECT string_agg(payload::text, ', ') FROM idempotency.fetch(subscription, max_events)
$$;
CREATE FUNCTION pg_temp.ack(p_subscription text) RETURNS void LANGUAGE sql AS $$
	SELECT idempotency.ack(p_subscription, batch) FROM idempotency.position WHERE subscription = p_subscription
$$;
CREATE FUNCTION pg_temp.options(p_subscription text) RETURNS text LANGUAGE sql AS $$
	SELECT format('%s, owner %s, handler %s, %s attempts, %s to %s, max_lag %s',
			topics, CASE owner::text WHEN session_user THEN 'session_user' ELSE owner::text END, coalesce(handler, 'none'), max_attempts, retry_delay, max_retry_delay, coalesce(max_lag::text, 'none'))
		FROM idempotency.subscription WHERE subscription = p_subscription
$$;

DELETE FROM idempotency.outbox;
CREATE ROLE regress_subscribe_owner LOGIN;
CREATE ROLE regress_subscribe_member LOGIN;
CREATE ROLE regress_subscribe_group;
CREATE ROLE "regress subscribe ""other""" LOGIN;
GRANT regress_subscribe_owner, regress_subscribe_group TO regress_subscribe_member;
SELECT idempotency.grant_consumer('regress_subscribe_owner'), idempotency.grant_consumer('regress_subscribe_member'),
	idempotency.grant_consumer('regress_subscribe_group'), idempotency.grant_consumer('"regress subscribe ""other"""');

--
-- Options
--

SET ROLE regress_subscribe_owner;
SELECT idempotency.subscribe('subscribe', '{subscribe}') AS is_new;
RESET ROLE;
SELECT pg_temp.options('subscribe');
SELECT created_at BETWEEN now() - interval '1 hour' AND clock_timestamp() AS now
	FROM idempotency.subscription WHERE subscription = 'subscribe';

-- A second call changes the options that are named, and keeps the position.
SELECT pg_temp.publish('{1,2}');
SELECT pg_temp.fetch('subscribe', 1), pg_temp.ack('subscribe');
SELECT created_at AS created_before FROM idempotency.subscription WHERE subscription = 'subscribe' \gset
SELECT idempotency.subscribe('subscribe', '{sub*,"a,b"}', max_attempts => 1, retry_delay => '0', max_retry_delay => '1 month 2 days',
	max_lag => '7 days', owner => 'regress_subscribe_group') AS is_new;
SELECT pg_temp.try($$SELECT idempotency.subscribe('subscribe', '{*}', start_at => 'beginning')$$), pg_temp.try($$SELECT idempotency.subscribe('subscribe', '{*}', start_at => 'now')$$);
SELECT pg_temp.options('subscribe');
SELECT created_at = :'created_before' AS same_time FROM idempotency.subscription WHERE subscription = 'subscribe';
SELECT pg_temp.fetch('subscribe'), pg_temp.ack('subscribe');
SET ROLE regress_subscribe_member;
SELECT idempotency.subscribe('subscribe', '{subscribe}', max_attempts => 10, max_lag => '-1 second') AS is_new;
RESET ROLE;
SELECT pg_temp.options('subscribe');
-- alter_subscription() changes nothing else, and takes a value for "none".
BEGIN;
SELECT idempotency.alter_subscription('subscribe', max_attempts => 3, max_lag => '-1 second'), pg_temp.options('subscribe');
SELECT idempotency.alter_subscription('subscribe', topics => '{a,b}', owner => 'regress_subscribe_owner'), pg_temp.options('subscribe');
ROLLBACK;
SELECT pg_temp.try($$SELECT idempotency.alter_subscription('unknown', max_attempts => 3)$$);
-- The current batch stays in flight, and parked events stay parked and are redelivered,
-- whatever the topics. The new topics apply to later events.
SELECT pg_temp.publish('{3,4}');
SELECT batch, id FROM idempotency.fetch('subscribe', 1) \gset
SELECT idempotency.nack('subscribe', :batch, :'id', 'no', '0') <= clock_timestamp() AS again;
SELECT idempotency.subscribe('subscribe', '{other}') AS is_new, pg_temp.publish('{5}', 'other');
SELECT idempotency.ack('subscribe', :batch);
SELECT pg_temp.fetch('subscribe'), pg_temp.ack('subscribe');
-- A batch that was built is redelivered as it was.
SELECT idempotency.subscribe('subscribe', '{subscribe,other}'), pg_temp.publish('{6}'), pg_temp.publish('{7}', 'other');
SELECT pg_temp.fetch('subscribe');
SELECT idempotency.subscribe('subscribe', '{other}');
UPDATE idempotency.position SET leased_at = leased_at - interval '1 day', leased_until = leased_until - interval '1 day'
	WHERE subscription = 'subscribe';
SELECT pg_temp.fetch('subscribe'), pg_temp.ack('subscribe');
-- Unwanted events that were passed are not delivered later.
SELECT idempotency.subscribe('subscribe', '{*}'), pg_temp.publish('{6}');
SELECT pg_temp.fetch('subscribe'), pg_temp.ack('subscribe');

-- A refused call changes nothing.
SELECT pg_temp.try(format('SELECT idempotency.subscribe(%s)', arguments)) AS outcome, arguments FROM unnest(ARRAY[
	'NULL, ''{*}''',
	''''', ''{*}''',
	'repeat(''s'', 255), ''{*}''',
	'repeat(''é'', 256), ''{*}''',
	'E''a\nb'', ''{*}''',
	'''s'', NULL',
	'''s'', ''{}''',
	'''s'', ''{{a},{b}}''',
	'''s'', ''{a,NULL}''',
	'''s'', ''{a,""}''',
	'''s'', ARRAY[repeat(''t'', 255)]',
	'''s'', ARRAY[''a'', repeat(''t'', 256)]',
	'''s'', ARRAY[E''a\tb'']',
	'''s'', ARRAY[''a\'']',
	'''s'', ARRAY[''a\\'']',
	'''s'', ARRAY[''a\\\'']',
	'''s'', ARRAY[''\'']',
	'''s'', ''{*}'', start_at => ''beginning''',
	'''s'', ''{*}'', start_at => ''Now''',
	'''s'', ''{*}'', start_at => ''''',
	'''s'', ''{*}'', start_at => NULL',
	'''s'', ''{*}'', max_attempts => 0',
	'''s'', ''{*}'', max_attempts => -1',
	'''s'', ''{*}'', max_attempts => NULL',
	'''s'', ''{*}'', max_attempts => 2147483647',
	'''s'', ''{*}'', retry_delay => ''-1 microsecond''',
	'''s'', ''{*}'', retry_delay => NULL',
	'''s'', ''{*}'', max_retry_delay => ''-1 s''',
	'''s'', ''{*}'', max_retry_delay => NULL',
	'''s'', ''{*}'', max_lag => ''-1 s''',
	'''s'', ''{*}'', partitions => 0',
	'''s'', ''{*}'', partitions => 257',
	'''s'', ''{*}'', dead_letter_retention => ''-1 h''',
	'''s'', ''{*}'', owner => ''no such role''',
	'''s'', ''{*}'', owner => 4294967295::oid::regrole']) AS arguments;
SELECT count(*) FROM idempotency.subscription WHERE subscription LIKE 's%';
BEGIN READ ONLY;
SELECT idempotency.subscribe('s', '{*}');
\echo :SQLSTATE
ROLLBACK;
BEGIN READ ONLY;
SELECT idempotency.unsubscribe('subscribe');
\echo :SQLSTATE
ROLLBACK;

-- subscribe() is transactional.
BEGIN;
SELECT idempotency.subscribe('s', '{s}', start_at => 'beginning');
SELECT pg_temp.publish('{6}', 's');
SAVEPOINT a;
SELECT idempotency.unsubscribe('s');
SELECT idempotency.subscribe('s', '{other}');
ROLLBACK TO a;
SELECT pg_temp.options('s');
ROLLBACK;
SELECT pg_temp.options('s'), pg_temp.try('SELECT idempotency.fetch(''s'')');

-- Names can contain any character.
CREATE TEMPORARY TABLE names (n int PRIMARY KEY, name text);
INSERT INTO names VALUES (1, repeat('n', 255)), (2, repeat('é', 255)), (3, $$it's "quoted" \ and %s, %I, $1$$), (4, '*'), (5, '_%'), (6, 'Subscribe'), (7, 'subscribe ');
SELECT n, idempotency.subscribe(name, ARRAY['names']) FROM names ORDER BY n;
SELECT pg_temp.publish('{7}', 'names');
SELECT n, pg_temp.fetch(name), pg_temp.ack(name) FROM names ORDER BY n;
SELECT n, idempotency.unsubscribe(name), idempotency.unsubscribe(name) FROM names ORDER BY n;

--
-- Patterns
--

-- The topics that each pattern matches; every character except "*" and the backslash
-- stands for itself.
DELETE FROM idempotency.outbox;
CREATE TEMPORARY TABLE topics (topic text);
INSERT INTO topics VALUES ('order'), ('order.placed'), ('order.placed.twice'), ('Order.placed'), ('order*'), ('order\'), ('order\*'), ('*'), ('**'), ('\'),
	('a'), ('aa'), ('aab'), ('abab'), ('ab%'), ('a_b'), ('ä'), ('äöä'), ('it''s'), ('"q"'), ('x y');
SELECT count(idempotency.publish(topic, '1')) FROM topics;
CREATE FUNCTION pg_temp.matching_topics(VARIADIC patterns text[]) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	PERFORM idempotency.subscribe('meant', patterns, start_at => 'beginning');
	SELECT string_agg(topic, '  ' ORDER BY seq) INTO result FROM idempotency.fetch('meant');
	PERFORM idempotency.unsubscribe('meant');
	RETURN coalesce(result, '(none)');
END
$$;
SELECT pattern, pg_temp.matching_topics(pattern) FROM unnest(ARRAY['order', 'order.*', 'order*', '*.placed', '*.placed*', 'order.*.*', '*', '**', 'a*', '*a', '*a*', 'a*b', '*ab', '*ab*ab*', 'aab*',
	'\*', '\\', 'order\*', 'order\\\*', 'order\\*', '\**', '*\*', '\o\r\d\e\r', 'a\b*', '*\\', '*\\*', 'a%', 'a_b', 'ab\%', 'ä', 'ä*', '*ä', '*ö*', 'it''s', '"q"', 'x*y', '?', 'orde', 'rder', '.*',
	'none*']) WITH ORDINALITY AS u (pattern, n) ORDER BY n;
-- Several patterns match each topic once.
SELECT pg_temp.matching_topics('a', 'order*', '*a', 'none'), pg_temp.matching_topics('none', 'ä');
-- A pattern with much backtracking terminates.
SET statement_timeout = '20 s';
SELECT count(idempotency.publish(repeat('a', 255), '1'));
SELECT pg_temp.matching_topics(repeat('a*', 127) || 'b'), length(pg_temp.matching_topics(repeat('a*', 127)));
RESET statement_timeout;

--
-- Start position
--

-- Now: after the committed events. Beginning: from the first event in the outbox.
DELETE FROM idempotency.outbox;
SELECT pg_temp.publish('{1,2}');
SELECT idempotency.subscribe('now', '{subscribe}'), idempotency.subscribe('beginning', '{subscribe}', start_at => 'beginning'),
	idempotency.subscribe('as now', '{subscribe}', start_at => NULL);
SELECT pg_temp.publish('{3}');
SELECT pg_temp.fetch('now'), pg_temp.fetch('beginning'), pg_temp.fetch('as now');
-- Events that its own transaction publishes, before or after, commit with it.
SELECT idempotency.unsubscribe('now'), idempotency.unsubscribe('beginning'), idempotency.unsubscribe('as now');
BEGIN;
SELECT pg_temp.publish('{4}');
SAVEPOINT a;
SELECT pg_temp.publish('{5}');
ROLLBACK TO a;
SAVEPOINT b;
SELECT pg_temp.publish('{6}');
SELECT idempotency.subscribe('now', '{subscribe}'), idempotency.subscribe('beginning', '{subscribe}', start_at => 'beginning');
SELECT pg_temp.fetch('now'), pg_temp.fetch('beginning'), pg_temp.ack('beginning');
RELEASE b;
SELECT pg_temp.publish('{7}');
COMMIT;
SELECT pg_temp.fetch('now'), pg_temp.fetch('beginning');
SELECT idempotency.unsubscribe('now'), idempotency.unsubscribe('beginning');
-- Rolled-back events, or an empty outbox, do no harm, with or without VACUUM.
BEGIN;
SELECT pg_temp.publish('{8,9}');
ROLLBACK;
SELECT idempotency.subscribe('now', '{subscribe}'), pg_temp.publish('{10}');
SELECT pg_temp.fetch('now'), idempotency.unsubscribe('now');
DELETE FROM idempotency.outbox;
SELECT idempotency.subscribe('now', '{subscribe}'), pg_temp.publish('{11}');
SELECT pg_temp.fetch('now'), idempotency.unsubscribe('now');
DELETE FROM idempotency.outbox;
VACUUM idempotency.outbox;
SELECT idempotency.subscribe('now', '{subscribe}'), idempotency.subscribe('beginning', '{subscribe}', start_at => 'beginning'), pg_temp.publish('{12}');
SELECT pg_temp.fetch('now'), pg_temp.fetch('beginning');
SELECT idempotency.unsubscribe('now'), idempotency.unsubscribe('beginning');

-- unsubscribe() deletes all data of the subscription; a new one of the same name starts
-- afresh.
SELECT idempotency.subscribe('again', '{subscribe}', max_attempts => 2);
SELECT pg_temp.publish('{21,22}', aggregate => 'a'), pg_temp.publish('{23}');
SELECT batch, id FROM idempotency.fetch('again', 1) \gset
SELECT idempotency.nack('again', :batch, :'id', 'no', '0') <= clock_timestamp() AS again, idempotency.ack('again', :batch);
SELECT pg_temp.fetch('again');
SELECT p.batch, (SELECT count(*) FROM idempotency.parked WHERE subscription = 'again') AS parked
	FROM idempotency.subscription AS s JOIN idempotency.position AS p USING (subscription) WHERE subscription = 'again' \gset old_
SELECT :old_parked AS parked;
SELECT idempotency.unsubscribe('again');
SELECT count(*) FROM idempotency.parked WHERE subscription = 'again';
SELECT count(*) FROM idempotency.position WHERE subscription = 'again';
SELECT call, pg_temp.try(format('SELECT idempotency.%s', format(call, :old_batch))) FROM unnest(ARRAY['fetch(''again'')', 'ack(''again'', %s)',
	'nack(''again'', %s, NULL)', 'extend(''again'', %s, ''1 h'')', 'redrive(''again'')']) AS call;
SELECT idempotency.subscribe('again', '{subscribe}', start_at => 'beginning');
SELECT regexp_replace(pg_temp.try(format('SELECT idempotency.ack(''again'', %s)', :old_batch)), '\d{5,}', 'N') AS stale;
SELECT pg_temp.fetch('again'), pg_temp.ack('again'), idempotency.unsubscribe('again');
SELECT pg_temp.try(format('SELECT idempotency.unsubscribe(%s)', n)) FROM unnest('{"NULL",'''',"repeat(''s'', 256)"}'::text[]) AS n;

--
-- Owners
--

-- The owner is the caller, or a role of which the caller is a member.
CREATE TEMPORARY TABLE calls (n serial, call text);
INSERT INTO calls (call) VALUES ('subscribe(''subscribe'', ''{*}'')'), ('fetch(''subscribe'')'), ('ack(''subscribe'', 1)'), ('nack(''subscribe'', 1, NULL)'),
	('extend(''subscribe'', 1, ''1 h'')'), ('redrive(''subscribe'')'), ('unsubscribe(''subscribe'')'),
	('subscribe(''theirs'', ''{*}'', owner => ''regress_subscribe_owner'')'),
	('subscribe(''theirs'', ''{*}'', owner => ''regress_subscribe_group'')'),
	('subscribe(''theirs'', ''{*}'', owner => ''"regress subscribe ""other"""'')'),
	('subscribe(''theirs'', ''{*}'', owner => NULL)');
GRANT SELECT ON calls TO PUBLIC;
SELECT idempotency.subscribe('subscribe', '{*}', owner => 'regress_subscribe_owner');
SET ROLE regress_subscribe_owner;
SELECT n, regexp_replace(pg_temp.try('SELECT idempotency.' || call), ', batch.*', '') AS owner FROM calls ORDER BY n;
SET ROLE regress_subscribe_member;
SELECT n, regexp_replace(pg_temp.try('SELECT idempotency.' || call), ', batch.*', '') AS member FROM calls ORDER BY n;
SET ROLE "regress subscribe ""other""";
SELECT n, pg_temp.try('SELECT idempotency.' || call) AS other FROM calls ORDER BY n;
SELECT idempotency.subscribe('quoted', '{*}');
RESET ROLE;
SELECT pg_temp.options('quoted');
-- If the owner is renamed or dropped, the subscription has no owner; a superuser can
-- set another.
ALTER ROLE "regress subscribe ""other""" RENAME TO regress_subscribe_renamed;
SET ROLE regress_subscribe_renamed;
SELECT pg_temp.try('SELECT idempotency.fetch(''quoted'')');
RESET ROLE;
-- A role that gets the name becomes the owner.
BEGIN;
CREATE ROLE "regress subscribe ""other""";
SELECT idempotency.grant_consumer('"regress subscribe ""other"""');
SET LOCAL ROLE "regress subscribe ""other""";
SELECT pg_temp.try('SELECT idempotency.fetch(''quoted'')');
ROLLBACK;
SELECT idempotency.subscribe('quoted', '{*}', owner => 'regress_subscribe_renamed');
SET ROLE regress_subscribe_renamed;
SELECT pg_temp.try('SELECT idempotency.fetch(''quoted'')');
SELECT idempotency.unsubscribe('quoted');
RESET ROLE;

-- Calls that change or delete what others rely on leave a line in the log each; those that
-- change nothing do not.
SET ROLE regress_subscribe_member;
SET client_min_messages = log;
SELECT idempotency.subscribe('logged', '{logged}', max_attempts => 1), idempotency.subscribe('logged', '{logged}', max_attempts => 1);
SELECT idempotency.subscribe('logged', '{logged}', max_attempts => 1, retry_delay => '1000 ms'), idempotency.subscribe('logged', '{logged}', max_attempts => 1, max_lag => '1 h');
SELECT idempotency.subscribe('logged', '{logged}', max_attempts => 1, owner => 'regress_subscribe_group');
RESET ROLE;
SELECT pg_temp.publish('{1,2}', 'logged');
RESET client_min_messages;
SELECT count(idempotency.nack('logged', batch, id)) AS again FROM idempotency.fetch('logged');
SET client_min_messages = log;
SET ROLE regress_subscribe_member;
SELECT idempotency.redrive('logged', '00000000-0000-0000-0000-000000000000'), idempotency.redrive('logged');
SELECT idempotency.unsubscribe('logged'), idempotency.unsubscribe('logged');
RESET client_min_messages;
RESET ROLE;

--
-- Handlers
--

CREATE FUNCTION public.handle(event idempotency.event) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE SCHEMA regress_subscribe;
CREATE FUNCTION regress_subscribe."Handle ""it"".(x)"(idempotency.event) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION public.handle_json(json) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION public.handle_two(idempotency.event, int DEFAULT 1) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION public.handle_out(idempotency.event) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION public.handle_set(idempotency.event) RETURNS SETOF void LANGUAGE sql AS 'SELECT';
CREATE PROCEDURE public.handle_procedure(idempotency.event) LANGUAGE plpgsql AS 'BEGIN END';
CREATE FUNCTION public.handle_forbidden(idempotency.event) RETURNS void LANGUAGE plpgsql AS 'BEGIN END';
REVOKE EXECUTE ON FUNCTION public.handle_forbidden FROM PUBLIC;
SELECT handler, pg_temp.try(format('SELECT idempotency.subscribe(''handled'', ''{*}'', %L, owner => ''regress_subscribe_owner'')', handler)) AS outcome
	FROM unnest(ARRAY['public.handle(idempotency.event)', 'regress_subscribe."Handle ""it"".(x)"(idempotency.event)', 'public.handle_json(json)',
		'public.handle_two(idempotency.event, integer)', 'public.handle_out(idempotency.event)', 'public.handle_set(idempotency.event)',
		'public.handle_procedure(idempotency.event)', 'public.nothing(idempotency.event)', 'pg_catalog.count("any")']) AS handler;
SELECT pg_temp.try('SELECT idempotency.subscribe(''handled'', ''{*}'', 4294967295::oid::regprocedure, owner => ''regress_subscribe_owner'')');
-- extension only: workers run the handler as the owner
SELECT rolname AS superuser FROM pg_roles WHERE rolname = current_user \gset
SELECT replace(pg_temp.try('SELECT idempotency.subscribe(''handled'', ''{*}'', ''public.handle(idempotency.event)'')'), :'superuser', 'superuser');
SELECT CASE WHEN current_setting('server_version_num')::int < 170000 THEN result LIKE '42501:%cannot own a subscription%' ELSE result = 'accepted' END AS as_the_server_can
	FROM pg_temp.try('SELECT idempotency.subscribe(''handled'', ''{*}'', ''public.handle(idempotency.event)'', owner => ''regress_subscribe_group'')') AS result;
BEGIN;
SELECT idempotency.subscribe('handled', '{*}', 'public.handle(idempotency.event)', owner => 'regress_subscribe_owner'),
	replace(pg_temp.try('SELECT idempotency.alter_subscription(''handled'', owner => current_user::regrole)'), :'superuser', 'superuser') AS owner,
	pg_temp.try('SELECT idempotency.alter_subscription(''handled'', handler => ''public.handle_forbidden(idempotency.event)'')') AS handler;
ROLLBACK;
-- both editions
SET ROLE regress_subscribe_owner;
SELECT pg_temp.try('SELECT idempotency.subscribe(''handled'', ''{*}'', ''public.handle(idempotency.event)'')');
RESET ROLE;

-- The handler is stored with its schema and quotes; the owner's rights on the schema do
-- not matter.
SELECT pg_temp.publish('{31}', 'handled');
BEGIN;
SELECT idempotency.subscribe('handled', '{handled}', start_at => 'beginning', handler => 'regress_subscribe."Handle ""it"".(x)"(idempotency.event)', owner => 'regress_subscribe_owner');
SELECT handler FROM idempotency.subscription WHERE subscription = 'handled';
-- '-' stands for no handler.
SELECT idempotency.alter_subscription('handled', handler => '-'), pg_temp.options('handled'), pg_temp.fetch('handled');
SELECT idempotency.subscribe('handled', '{handled}', 'public.handle(idempotency.event)', owner => 'regress_subscribe_owner'), idempotency.unsubscribe('handled');
ROLLBACK;

DROP FUNCTION public.handle, regress_subscribe."Handle ""it"".(x)", public.handle_json, public.handle_two, public.handle_out, public.handle_set, public.handle_forbidden;
DROP PROCEDURE public.handle_procedure;
DROP SCHEMA regress_subscribe;
SELECT idempotency.unsubscribe('subscribe');
DELETE FROM idempotency.outbox;
DROP OWNED BY regress_subscribe_owner, regress_subscribe_member, regress_subscribe_group, regress_subscribe_renamed;
DROP ROLE regress_subscribe_owner, regress_subscribe_member, regress_subscribe_group, regress_subscribe_renamed;
