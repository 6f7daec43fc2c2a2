-- reaper at rest: expired rows stay
--
-- claim() and try_claim(): every result that a single session can get, and every
-- refused argument. The isolation tests cover concurrent sessions.
--
\set SHOW_CONTEXT never

-- The SQLSTATE, message and detail of a statement.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
	RETURN SQLSTATE || ': ' || message || coalesce('. ' || nullif(detail, ''), '');
END
$$;

--
-- Outcomes
--

-- A new key is claimed; nothing is stored until complete().
BEGIN;
SELECT * FROM idempotency.claim('claim', 'new', '{"amount": 100}');
-- extension only: when the row is written
SELECT count(*) FROM idempotency.key WHERE scope = 'claim';
-- both editions
SELECT idempotency.complete('claim', 'new', '{"id": 1}', 201, '{"Location": "/charges/1"}');
SELECT count(*) FROM idempotency.key WHERE scope = 'claim';
COMMIT;

BEGIN;
SELECT * FROM idempotency.try_claim('claim', 'new for try_claim');
ROLLBACK;

-- A stored outcome is replayed to the same request and to a claim without a request.
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.claim('claim', 'new', '{"amount": 100}');
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.claim('claim', 'new');
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.try_claim('claim', 'new', '{"amount": 100}');
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.try_claim('claim', 'new');

-- A stored failure is replayed as a failure.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'declined');
SELECT idempotency.fail('claim', 'declined', '{"error": "card declined"}', 402);
COMMIT;
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.claim('claim', 'declined');
SELECT outcome, replayed, status, headers, response, failed FROM idempotency.try_claim('claim', 'declined');

-- The same key with another request is a client bug: an error, or a row that does not
-- reveal the stored response.
SELECT * FROM idempotency.claim('claim', 'new', '{"amount": 999}');
\echo :SQLSTATE
SELECT * FROM idempotency.try_claim('claim', 'new', '{"amount": 999}');

-- A key that this transaction already holds is in progress.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'held');
SAVEPOINT before;
SELECT * FROM idempotency.claim('claim', 'held');
\echo :SQLSTATE
ROLLBACK TO before;
-- try_claim() reports that without an error, without waiting, and without comparing the
-- request,
SELECT * FROM idempotency.try_claim('claim', 'held', '{"another": "request"}', wait => '1 hour');
-- and the transaction can continue.
SELECT idempotency.complete('claim', 'held', '"done"');
SELECT outcome, response FROM idempotency.claim('claim', 'held');
COMMIT;
SELECT outcome, response FROM idempotency.claim('claim', 'held');

-- Scopes are independent, and text is neither case-folded nor trimmed.
BEGIN;
SELECT s AS scope, k AS key, (idempotency.claim(s, k)).outcome
	FROM (VALUES ('claim 2', 'new'), ('CLAIM', 'new'), ('claim', 'NEW'), ('claim', ' new'),
		('claim', 'new '), ('clai', 'mnew')) AS v (s, k);
ROLLBACK;

-- Rolling back a claim removes it.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'rolled back');
ROLLBACK;
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'rolled back');
ROLLBACK;

-- (claim(...)).* calls the function once per column, and the second call finds the key
-- extension only: planner support
-- claimed. Call claim() in FROM or in an assignment instead.
SELECT (idempotency.claim('claim', 'star')).*;
-- both editions

-- Under every isolation level, a transaction sees the outcomes that it stored,
-- including those of released savepoints, and not those that it rolled back.
CREATE FUNCTION pg_temp.in_savepoints() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	result text;
BEGIN
	BEGIN
		PERFORM idempotency.claim('claim', 'own');
		PERFORM idempotency.complete('claim', 'own', '"released"');
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	BEGIN
		PERFORM idempotency.claim('claim', 'taken back');
		PERFORM idempotency.complete('claim', 'taken back');
		RAISE division_by_zero;
	EXCEPTION WHEN division_by_zero THEN
		NULL;
	END;
	result := concat_ws(', ', (idempotency.claim('claim', 'own')).outcome, (idempotency.claim('claim', 'taken back')).outcome);
	PERFORM idempotency.complete('claim', 'taken back');
	RETURN result;
END
$$;
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_temp.in_savepoints();
ROLLBACK;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT pg_temp.in_savepoints();
SELECT outcome, response FROM idempotency.claim('claim', 'own');
ROLLBACK;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.in_savepoints();
SELECT outcome, response FROM idempotency.claim('claim', 'own');
ROLLBACK;

-- An operation on a new key takes one insert, in complete(), and leaves no dead row.
CREATE FUNCTION pg_temp.writes(OUT inserted bigint, OUT updated bigint, OUT deleted bigint)
	LANGUAGE sql AS $$
	SELECT pg_stat_get_xact_tuples_inserted('idempotency.key'::regclass),
		pg_stat_get_xact_tuples_updated('idempotency.key'::regclass),
		pg_stat_get_xact_tuples_deleted('idempotency.key'::regclass)
$$;
BEGIN;
SELECT * FROM pg_temp.writes() \gset before_
SELECT outcome FROM idempotency.claim('claim', 'one insert');
-- extension only: when the row is written
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated,
	deleted - :before_deleted AS deleted FROM pg_temp.writes();
-- both editions
SELECT idempotency.complete('claim', 'one insert');
-- extension only: when the row is written
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated,
	deleted - :before_deleted AS deleted FROM pg_temp.writes();
-- both editions
COMMIT;
-- extension only: when the row is written
SELECT ctid IS NOT NULL AS stored, xmax FROM idempotency.key WHERE scope = 'claim' AND key = 'one insert';
-- both editions

--
-- Scope and key
--

-- NULL, empty, too long, or with a control character (C0, DEL or C1): both functions
-- raise IK400.
SELECT what, pg_temp.error_of(format('SELECT idempotency.claim(%L, %L)', s, k)) AS claim
	FROM (VALUES
		(1, 'scope NULL', NULL, 'key'),
		(2, 'scope empty', '', 'key'),
		(3, 'scope of 256', repeat('s', 256), 'key'),
		(4, 'scope of 256, multi-byte', repeat('ж', 256), 'key'),
		(5, 'scope with newline', E'a\nb', 'key'),
		(6, 'key NULL', 'claim', NULL),
		(7, 'key empty', 'claim', ''),
		(8, 'key of 256', 'claim', repeat('k', 256)),
		(9, 'key of 256, multi-byte', 'claim', repeat('鍵', 256)),
		(10, 'key of 100,000', 'claim', repeat('k', 100000)),
		(11, 'key with tab', 'claim', E'\tkey'),
		(12, 'key with U+0001', 'claim', E'key\x01'),
		(13, 'key with U+001F', 'claim', E'k\x1Fey'),
		(14, 'key with DEL', 'claim', E'key\x7F'),
		(15, 'key with U+0085 behind multi-byte', 'claim', E'clé\u0085'),
		(16, 'key with U+009F', 'claim', E'\u009F'),
		(17, 'both', NULL, NULL),
		(18, 'array of 256', 'claim', '{' || repeat('k', 254) || '}')) AS v (n, what, s, k)
	ORDER BY n;
SELECT what, pg_temp.error_of(format('SELECT idempotency.try_claim(%L, %L)', s, k)) AS try_claim
	FROM (VALUES
		(1, 'scope NULL', NULL, 'key'),
		(2, 'scope empty', '', 'key'),
		(3, 'scope of 256', repeat('s', 256), 'key'),
		(4, 'scope with newline', E'a\nb', 'key'),
		(5, 'key NULL', 'claim', NULL),
		(6, 'key empty', 'claim', ''),
		(7, 'key of 256', 'claim', repeat('k', 256)),
		(8, 'key with U+009F', 'claim', E'\u009F')) AS v (n, what, s, k)
	ORDER BY n;

-- The complete errors.
SELECT idempotency.claim('claim', NULL);
SELECT idempotency.claim(repeat('s', 256), 'key');
SELECT idempotency.claim('claim', E'key\n');
\echo :SQLSTATE

-- 255 characters are accepted, whatever their length in bytes, as is every character
-- that is not a control character, even if one of its bytes looks like one.
BEGIN;
SELECT what, (idempotency.claim(s, k)).outcome
	FROM (VALUES
		(1, 'one character', 's', 'k'),
		(2, '255', repeat('s', 255), repeat('k', 255)),
		(3, '255 of two bytes', repeat('ж', 255), repeat('ж', 255)),
		(4, '255 of four bytes', repeat('🔑', 255), repeat('🔑', 255)),
		(5, 'no-break space', 'claim', E'\u00A0'),
		(6, 'U+00C2, whose bytes begin like a C1 control''s', 'claim', E'\u00C2\u00A0'),
		(7, 'bytes 80 to 9F inside a character', 'claim', E'\u4E9F\u0400'),
		(8, 'quotes, backslash, percent', 'claim', E'''"\\%s%_'),
		(9, 'spaces only', 'claim', '   ')) AS v (n, what, s, k)
	ORDER BY n;
SELECT what, idempotency.complete(s, k, to_json(what)) AS completed
	FROM (VALUES
		('255 of two bytes', repeat('ж', 255), repeat('ж', 255)),
		('255 of four bytes', repeat('🔑', 255), repeat('🔑', 255))) AS v (what, s, k);
SELECT response FROM idempotency.try_claim(repeat('🔑', 255), repeat('🔑', 255));
SELECT response FROM idempotency.try_claim(repeat('ж', 255), repeat('ж', 255));
ROLLBACK;

--
-- Request
--

-- json, jsonb, text, varchar, an untyped literal and an untyped parameter are all
-- accepted. The order of members, white space and the spelling of numbers do not change
-- the fingerprint.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"amount": 100, "currency": "EUR"}');
SELECT idempotency.complete('claim', 'typed');
COMMIT;
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"currency":"EUR","amount":1e2}'::json);
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"currency":"EUR","amount":100.00}'::jsonb);
SELECT outcome FROM idempotency.claim('claim', 'typed', '{ "amount" : 100, "currency" : "EUR" }'::text);
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"amount":100,"currency":"\u0045UR"}'::varchar);
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"amount":100,"currency":"EUR"}'::varchar(50));
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"amount":100,"currency":"EUR"}'::idempotency.document);
SELECT outcome FROM idempotency.claim('claim', 'typed', jsonb_build_object('amount', 100, 'currency', 'EUR'));
SELECT (idempotency.claim('claim', 'typed', row_to_json(r))).outcome
	FROM (SELECT 100 AS amount, 'EUR' AS currency) AS r;
SELECT outcome FROM idempotency.claim(scope => 'claim', key => 'typed', request => '{"currency":"EUR","amount":100}');
PREPARE untyped AS SELECT outcome FROM idempotency.claim($1, $2, $3);
EXECUTE untyped('claim', 'typed', '{"currency": "EUR", "amount": 100}');
EXECUTE untyped('claim', 'typed', NULL);
EXECUTE untyped('claim', 'typed', '{"currency": "EUR", "amount": 101}');
DEALLOCATE untyped;
SELECT outcome FROM idempotency.claim('claim', 'typed', '{"amount": 100, "currency": "USD"}'::jsonb);

-- JSON null is a request; SQL NULL means no request.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'json null', 'null');
SELECT idempotency.complete('claim', 'json null');
SELECT outcome FROM idempotency.try_claim('claim', 'json null', 'null');
SELECT outcome FROM idempotency.try_claim('claim', 'json null', '{}');
SELECT outcome FROM idempotency.try_claim('claim', 'json null', NULL);
ROLLBACK;

-- Input that is not JSON raises PostgreSQL's own error.
\set VERBOSITY sqlstate
SELECT idempotency.claim('claim', 'not json', '{"amount": }');
SELECT idempotency.claim('claim', 'not json', 'amount'::text);
SELECT idempotency.claim('claim', 'not json', '');
SELECT idempotency.claim('claim', 'not json', 42);
-- So does a number outside the range of numeric.
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''not numeric'', ''{"amount": 1e131072}'')');
SELECT pg_temp.error_of('SELECT idempotency.try_claim(''claim'', ''not numeric'', ''{"amount": 1e-16384}'')');
\set VERBOSITY default

-- A claim without a fingerprint matches every request, earlier and later.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'no request');
SELECT idempotency.complete('claim', 'no request');
COMMIT;
SELECT outcome FROM idempotency.claim('claim', 'no request', '{"any": "thing"}');
SELECT outcome FROM idempotency.claim('claim', 'no request', fingerprint => '\x000102030405060708090a0b0c0d0e0f');

-- The caller can pass a digest of 16 to 64 bytes instead.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'digest', fingerprint => '\x000102030405060708090a0b0c0d0e0f');
SELECT idempotency.complete('claim', 'digest');
COMMIT;
SELECT outcome FROM idempotency.try_claim('claim', 'digest', fingerprint => '\x000102030405060708090a0b0c0d0e0f');
SELECT outcome FROM idempotency.try_claim('claim', 'digest', fingerprint => '\x000102030405060708090a0b0c0d0e00');
SELECT outcome FROM idempotency.try_claim('claim', 'digest', fingerprint => '\x000102030405060708090a0b0c0d0e0f00');
SELECT outcome FROM idempotency.try_claim('claim', 'digest');
SELECT outcome FROM idempotency.try_claim('claim', 'digest', '{}');
BEGIN;
SELECT outcome FROM idempotency.claim('claim', '64 bytes', fingerprint => sha512('request'));
ROLLBACK;
-- fingerprint() computes the same fingerprint as claim().
SELECT outcome FROM idempotency.claim('claim', 'typed',
	fingerprint => idempotency.fingerprint('{"currency": "EUR", "amount": 100}'));

SELECT idempotency.claim('claim', 'digest', '{}', fingerprint => '\x000102030405060708090a0b0c0d0e0f');
\echo :SQLSTATE
SELECT idempotency.claim('claim', 'digest', fingerprint => '\x000102030405060708090a0b0c0d0e');
\echo :SQLSTATE
SELECT pg_temp.error_of('SELECT idempotency.try_claim(''claim'', ''digest'', ''{}'', fingerprint => sha256(''x''))');
SELECT bytes, pg_temp.error_of(format('SELECT idempotency.try_claim(''claim'', ''digest'', fingerprint => %L)',
		decode(repeat('00', bytes), 'hex'))) AS try_claim
	FROM unnest('{0,1,15,65,1000}'::int[]) AS bytes;

-- A replay returns the stored response byte for byte: white space, the order of
-- members, duplicate members, escapes and the spelling of numbers are kept.
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'bytes');
SELECT idempotency.complete('claim', 'bytes',
	'  { "b" : 1.50,"a":  [ ],  "b": 1e2, "c": "\u0041\/é\ud83d\ude00", "d": -0.0 }  ', 200,
	'{"X-Second":"2",   "X-First" : "1"}');
COMMIT;
SELECT '[' || response::text || ']' AS response, '[' || headers::text || ']' AS headers
	FROM idempotency.claim('claim', 'bytes');
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'lines');
SELECT idempotency.complete('claim', 'lines', E'{\n\t"a": 1,\r\n\t"b": 2\n}\n');
COMMIT;
SELECT response::text = E'{\n\t"a": 1,\r\n\t"b": 2\n}\n' AS same FROM idempotency.claim('claim', 'lines');

--
-- Retention
--

-- One operation, and its retention.
CREATE FUNCTION pg_temp.complete_operation(key text, retention interval, request json DEFAULT NULL) RETURNS void
	LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.claim('claim', key, request, retention => retention);
	PERFORM idempotency.complete('claim', key, '"' || key || '"');
END
$$;
CREATE FUNCTION pg_temp.seconds_kept(key text, retention interval) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
	PERFORM pg_temp.complete_operation(key, retention);
	RETURN (SELECT ceil(extract(epoch FROM expires_at - created_at))
		FROM idempotency.key k WHERE k.scope = 'claim' AND k.key = seconds_kept.key);
END
$$;

-- The default is 24 hours, from the setting; the argument overrides it.
SELECT r AS retention, pg_temp.seconds_kept('kept ' || n, r)
	FROM (VALUES (1, NULL::interval), (2, '1 second'), (3, '36 hours'), (4, '100 years')) AS v (n, r)
	ORDER BY n;

-- Days and months follow the calendar.
CREATE TEMPORARY TABLE calendar AS
	SELECT r, 'calendar ' || r AS key
		FROM unnest('{1 day,7 days,1 day -1 hour,1 month,1 year 1 day,100 years}'::interval[]) AS r;
SELECT r, pg_temp.complete_operation(key, r) FROM calendar;
SELECT r, expires_at BETWEEN created_at + r - interval '5 seconds' AND created_at + r AS as_said
	FROM calendar JOIN idempotency.key USING (key) WHERE scope = 'claim' ORDER BY r;

-- -1 second means infinite retention.
SELECT pg_temp.complete_operation('for ever', '-1 second');
SELECT outcome, expires_at FROM idempotency.claim('claim', 'for ever');

-- The setting applies where the claim passes no retention.
BEGIN;
SET LOCAL idempotency.retention = '1h';
SELECT pg_temp.seconds_kept('setting', NULL);
SELECT pg_temp.seconds_kept('argument over setting', '2 hours');
SET LOCAL idempotency.retention = -1;
SELECT pg_temp.complete_operation('setting for ever', NULL);
SELECT outcome, expires_at FROM idempotency.claim('claim', 'setting for ever');
ROLLBACK;

-- Retentions that are not a length of time, or that end outside the range of
-- timestamps.
SELECT idempotency.claim('claim', 'retention', retention => '0');
\echo :SQLSTATE
SELECT r AS retention,
		pg_temp.error_of(format('SELECT idempotency.claim(''claim'', ''retention'', retention => %L)', r)) AS claim,
		pg_temp.error_of(format('SELECT idempotency.try_claim(''claim'', ''retention'', retention => %L)', r)) AS try_claim
	FROM (VALUES (1, '-1 microsecond'), (2, '-2 seconds'), (3, '-1 day'), (4, '-1 month'),
		(5, '1 month -30 days'), (6, '100 years 1 day'), (7, '178000000 years'), (8, '2562047788 hours')) AS v (n, r)
	ORDER BY n;

--
-- Expiry
--

-- An expired key counts as absent immediately: for replays, for other requests, for
-- peek() and for once().
SELECT pg_temp.complete_operation('expired', '1 millisecond', '{"amount": 1}');
SELECT pg_sleep(0.01);
SELECT count(*) AS rows FROM idempotency.key WHERE scope = 'claim' AND key = 'expired';
SELECT idempotency.peek('claim', 'expired') IS NULL AS absent;
BEGIN;
SELECT outcome, status, response FROM idempotency.try_claim('claim', 'expired', '{"amount": 2}');
ROLLBACK;

-- The next operation overwrites the row by one HOT update, and the fingerprint is that
-- of the new request.
SELECT ctid AS old_ctid, xmin AS old_xmin FROM idempotency.key WHERE scope = 'claim' AND key = 'expired' \gset
BEGIN;
SELECT * FROM pg_temp.writes() \gset before_
SELECT outcome, status, response FROM idempotency.claim('claim', 'expired', '{"amount": 2}');
SELECT idempotency.complete('claim', 'expired', '"second"');
-- extension only: when the row is written
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated,
	deleted - :before_deleted AS deleted FROM pg_temp.writes();
-- both editions
SELECT xmin = pg_current_xact_id()::xid AS written_by_us FROM idempotency.key WHERE scope = 'claim' AND key = 'expired';
COMMIT;
SELECT ctid <> :'old_ctid' AS another_version, xmin <> :'old_xmin' AS another_writer, response,
		created_at > now() - interval '1 minute' AS new_date
	FROM idempotency.key WHERE scope = 'claim' AND key = 'expired';
SELECT outcome, response FROM idempotency.try_claim('claim', 'expired', '{"amount": 2}');
SELECT outcome, response FROM idempotency.try_claim('claim', 'expired', '{"amount": 1}');

-- The same, several times within one transaction.
BEGIN;
SELECT pg_temp.complete_operation('expires at once', '1 microsecond', '1');
SELECT pg_sleep(0.001);
SELECT pg_temp.complete_operation('expires at once', '1 microsecond', '2');
SELECT pg_sleep(0.001);
SELECT pg_temp.complete_operation('expires at once', '1 hour', '3');
SELECT outcome FROM idempotency.try_claim('claim', 'expires at once', '3');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'claim' AND key = 'expires at once';
SELECT outcome FROM idempotency.try_claim('claim', 'expires at once', '3');

-- A rolled-back or released claim on an expired key leaves the row unchanged.
SELECT pg_temp.complete_operation('released', '1 millisecond');
SELECT pg_sleep(0.01);
SELECT ctid AS old_ctid, xmin AS old_xmin FROM idempotency.key WHERE scope = 'claim' AND key = 'released' \gset
BEGIN;
SELECT outcome FROM idempotency.claim('claim', 'released');
SELECT idempotency.release('claim', 'released');
COMMIT;
-- extension only: when the row is written
SELECT ctid = :'old_ctid' AS same_version, xmin = :'old_xmin' AS same_writer
	FROM idempotency.key WHERE scope = 'claim' AND key = 'released';
-- both editions

--
-- Wait
--

-- The wait matters only while another transaction holds the key; its value is always
-- checked.
SELECT idempotency.claim('claim', 'wait', wait => '-1 second');
\echo :SQLSTATE
SELECT pg_temp.error_of('SELECT idempotency.try_claim(''claim'', ''wait'', wait => ''-1 microsecond'')');
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''wait'', wait => ''-1 month'')');
SELECT pg_temp.error_of('SELECT idempotency.try_claim(''claim'', ''wait'', wait => ''24 days 1 microsecond'')');
-- A client sends nanoseconds as a bare number, which is seconds.
SELECT idempotency.claim('claim', 'wait', wait => '5000000000');
BEGIN;
SELECT w AS wait, (idempotency.claim('claim', 'wait ' || w, wait => w::interval)).outcome
	FROM unnest('{0,1 microsecond,24 days,1 day -1 second}'::text[]) AS w;
ROLLBACK;

--
-- Read-only transactions and recovery
--

BEGIN READ ONLY;
SAVEPOINT before;
SELECT idempotency.claim('claim', 'read only');
\echo :SQLSTATE
ROLLBACK TO before;
SELECT idempotency.try_claim('claim', 'read only');
\echo :SQLSTATE
ROLLBACK TO before;
-- The call fails even if an outcome is stored, because the client cannot know that.
SELECT idempotency.claim('claim', 'new');
ROLLBACK TO before;
SELECT status, response FROM idempotency.peek('claim', 'new');
COMMIT;

-- extension only: types of the library
-- The result type belongs to the extension.
BEGIN;
ALTER TYPE idempotency.operation ALTER ATTRIBUTE attempt TYPE text;
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''type'')');
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.operation ADD ATTRIBUTE more text;
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''type'')');
ROLLBACK;
-- both editions

-- SELECT f() INTO op, without "* FROM", puts the text of the whole composite into the
-- first field. That fails at the first call, for each function that returns a
-- composite: otherwise a variable with shifted fields would not distinguish a replay
-- from a claim.
CREATE FUNCTION into_its_own() RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION pg_temp.select_into(type text, call text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('CREATE OR REPLACE FUNCTION into_its_own() RETURNS void LANGUAGE plpgsql AS %L',
		format('DECLARE it idempotency.%I; BEGIN SELECT idempotency.%s INTO it; END', type, call));
	PERFORM into_its_own();
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END
$$;
CREATE FUNCTION handle(json) RETURNS json LANGUAGE sql AS 'SELECT $1';
SELECT outcome, token > 0 AS leased FROM idempotency.claim('claim', 'into', lease => '1 microsecond');
-- extension only: the outbox
BEGIN;
SELECT idempotency.subscribe('claim', '{*}', start_at => 'now');
SELECT idempotency.publish('into', '1') IS NOT NULL AS published;
COMMIT;
-- both editions
SELECT type, call, pg_temp.select_into(type, call) FROM (VALUES
	('operation', $$claim('claim', 'new')$$),
	('operation', $$try_claim('claim', 'new')$$),
	('operation', $$peek('claim', 'new')$$),
	('operation', $$run('claim', 'new', NULL, 'handle(json)')$$),
	('abandoned', $$claim_abandoned('claim', '1 minute')$$)) AS v (type, call);
-- extension only: the outbox
SELECT pg_temp.select_into('event', $$fetch('claim')$$);
-- both editions
-- Scalar variables accept the shifted value: a known limit.
DO $$
DECLARE
	outcome text;
	replayed boolean;
BEGIN
	SELECT idempotency.claim('claim', 'new') INTO outcome, replayed;
	RAISE NOTICE '% %', outcome LIKE '(replayed,t,%)', replayed;
END $$;
-- extension only: the outbox
SELECT idempotency.unsubscribe('claim');
-- both editions
DROP FUNCTION into_its_own, handle;
