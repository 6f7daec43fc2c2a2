-- reaper at rest: expired rows stay
--
-- claim_abandoned(): take over operations whose client never retried. The isolation
-- tests cover concurrent completers.
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

-- Moves the lease on a key into the past by an interval.
CREATE FUNCTION pg_temp.age_lease(p_scope text, p_key text, p_time interval DEFAULT '1 hour') RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.key
		SET created_at = created_at - p_time, leased_at = leased_at - p_time,
			leased_until = leased_until - p_time, expires_at = expires_at - p_time
		WHERE scope = p_scope AND key = p_key
$$;

-- An operation that was claimed with a lease some hours ago, and abandoned.
CREATE FUNCTION pg_temp.abandon(p_scope text, p_key text, p_hours int, p_request json DEFAULT NULL, p_retention interval DEFAULT NULL)
	RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim(p_scope, p_key, p_request, lease => '1 min', retention => p_retention);
	PERFORM pg_temp.age_lease(p_scope, p_key, p_hours * interval '1 hour');
	RETURN op.token;
END
$$;

--
-- Which operations a call takes
--

-- A call takes the oldest leases first, one by default.
SELECT pg_temp.abandon('abandoned', 'first', 1, ' {"amount":  100, "b": 1.50, "b": [ ]}') AS own \gset
SELECT FROM idempotency.checkpoint('abandoned', 'first', :own, 'charged', '{"charge":  7}');
SELECT pg_temp.abandon('abandoned', 'second', 3) > 0 AS abandoned;
SELECT pg_temp.abandon('abandoned', 'third', 2) > 0 AS abandoned;
SELECT scope, key, '[' || request::text || ']' AS request, token > :own AS grown, attempt, recovery_point, state
	FROM idempotency.claim_abandoned('abandoned', '1 min');
SELECT key, state FROM idempotency.keys WHERE scope = 'abandoned' ORDER BY key;
-- The taken operation has a running lease, so the next call takes the next operation.
SELECT key, request, attempt, recovery_point FROM idempotency.claim_abandoned('abandoned', '1 min', 1);
-- After the last operation, calls return nothing, whatever max is.
SELECT key FROM idempotency.claim_abandoned('abandoned', '1 min', 2147483647);
SELECT * FROM idempotency.claim_abandoned('abandoned', '1 min', 100);
SELECT * FROM idempotency.claim_abandoned('nothing of the kind', '1 min', 100);

-- Operations that were taken over before and those that were not are ordered by lease.
-- An operation that fails repeatedly therefore blocks no other operation.
UPDATE idempotency.key SET leased_until = now() - interval '1 s' - (now() - created_at) WHERE scope = 'abandoned';
SELECT key, attempt FROM idempotency.claim_abandoned('abandoned', '1 min', 10);
SELECT idempotency.forget('abandoned', key) FROM idempotency.key WHERE scope = 'abandoned' \g /dev/null

-- A call skips operations that still run, have an outcome, are inbox records, count as
-- absent because they expired, belong to another scope, or have a claim without a
-- lease.
BEGIN;
SELECT outcome FROM idempotency.claim('abandoned', 'runs', lease => '1 min');
SELECT outcome FROM idempotency.claim('abandoned', 'completed', lease => '1 min');
SELECT idempotency.complete('abandoned', 'completed');
SELECT outcome FROM idempotency.claim('abandoned', 'failed');
SELECT idempotency.fail('abandoned', 'failed', NULL, 400);
SELECT idempotency.once('abandoned', 'seen');
SELECT outcome FROM idempotency.claim('abandoned', 'given up', lease => '1 min');
SELECT idempotency.release('abandoned', 'given up');
COMMIT;
SELECT pg_temp.abandon('abandoned', 'long gone', 25) > 0 AS abandoned;
SELECT pg_temp.abandon('abandoned', 'soon gone', 5, NULL, '1 hour') > 0 AS abandoned;
SELECT pg_temp.abandon(s, 'of another scope', 1) > 0 AS abandoned FROM unnest('{abandoned/2,abandone,ABANDONED}'::text[]) AS s;
SELECT * FROM idempotency.claim_abandoned('abandoned', '1 min', 100);
BEGIN;
SELECT pg_temp.abandon('abandoned', 'claimed here', 2) > 0 AS abandoned;
SELECT idempotency.release('abandoned', 'claimed here');
ROLLBACK;
SELECT pg_temp.abandon('abandoned', 'claimed here', 2) > 0 AS abandoned;
BEGIN;
SELECT outcome FROM idempotency.claim('abandoned', 'claimed here');
SELECT * FROM idempotency.claim_abandoned('abandoned', '1 min', 100);
SELECT idempotency.complete('abandoned', 'claimed here', '"done"');
SELECT * FROM idempotency.claim_abandoned('abandoned', '1 min', 100);
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'abandoned' ORDER BY key;
SELECT key, state FROM idempotency.keys WHERE scope IN ('abandoned/2', 'abandone', 'ABANDONED');

-- An operation that its owner released with a checkpoint is available at once, and so
-- is one whose claim is dated in the future because the clock was set back.
SELECT token AS own FROM idempotency.claim('abandoned', 'released', '{"amount": 1}', lease => '1 hour') \gset
SELECT idempotency.checkpoint('abandoned', 'released', :own, 'charged', '{"charge": 7}') IS NOT NULL AS checkpoint, idempotency.release('abandoned', 'released', :own);
SELECT outcome FROM idempotency.claim('abandoned', 'set back', lease => '1 hour');
SELECT pg_temp.age_lease('abandoned', 'set back', '-2 hours');
SELECT key, request, attempt, recovery_point, state
	FROM idempotency.claim_abandoned('abandoned', '1 min', 100);

-- With 200 available, a call returns exactly as many as max allows.
SELECT count(pg_temp.abandon('many', 'k' || n, n, to_json(n))) FROM generate_series(1, 23) AS n;
SELECT count(pg_temp.abandon('many', 'l' || n, 1, to_json(n))) FROM generate_series(1, 227) AS n;
SELECT count(*), count(DISTINCT key), count(DISTINCT token), min(attempt), max(attempt),
		bool_and(request::text = substr(key, 2)) AS own_requests, array_agg(key ORDER BY token) FILTER (WHERE key LIKE 'k%') AS oldest
	FROM idempotency.claim_abandoned('many', '1 min', 200);
SELECT count(*) FROM idempotency.claim_abandoned('many', '1 min', 200);
SELECT state, count(*) FROM idempotency.keys WHERE scope = 'many' GROUP BY state;
--
-- Patterns of scopes
--

-- The scopes that the pattern matches count as one: the oldest leases come first, so that an
-- operation that fails repeatedly blocks no other scope.
SELECT pg_temp.abandon(s, k, h) > 0 AS abandoned FROM (VALUES ('acme/refund/1', 'a', 1), ('acme/refund/2', 'b', 2), ('acme/refund/1', 'c', 3),
	('acme/refund/%', 'd', 4), ('acme/refund/*', 'e', 5), ('acme/refund/\', 'f', 6), ('acme/refund', 'g', 7), ('acme/refund0', 'h', 8), ('acme/pay/refund', 'i', 9), ('acme/refunds/1', 'j', 10)) AS a (s, k, h);
SELECT key FROM idempotency.claim_abandoned('acme/refund/*', '1 min', 4);
UPDATE idempotency.key SET leased_until = now() - interval '1 s', leased_at = now() - interval '1 min' WHERE token IS NOT NULL AND attempt = 2;
SELECT key, attempt FROM idempotency.claim_abandoned('acme/refund/*', '1 min', 100);
UPDATE idempotency.key SET leased_until = now() - interval '1 s', leased_at = now() - interval '1 min' WHERE scope ~ 'refund';
-- Which scopes a pattern matches. A backslash makes a pattern of one scope of any text.
CREATE FUNCTION pg_temp.matched(pattern text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	matched text;
BEGIN
	SELECT string_agg(a.scope, ', ' ORDER BY a.key) INTO matched FROM idempotency.claim_abandoned(pattern, '1 min', 1000) AS a WHERE a.scope ~ 'refund';
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION WHEN SQLSTATE 'P9999' THEN
	RETURN matched;
END
$$;
SELECT p AS pattern, pg_temp.matched('acme/' || p) FROM unnest(ARRAY['*', 'refund/*', 'refund*', '*/refund', '*und/1', 'r*d', 'r**', '*/\*',
	'refund/\*', 'refund/%', 'refund/\%', 're_und', 'refund/\\', '\refund', 'refund/', 'REFUND*']) AS p;
-- not distributed: a pattern names the tenant
SELECT p AS pattern, pg_temp.matched(p) FROM unnest(ARRAY['*', '*/refund', 'a*/refund/1', 'a\cm\e/refund']) AS p;
-- both layouts
-- More operations than a search finds at once, in several scopes
SELECT count(pg_temp.abandon('pattern/' || n % 7, 'k' || n, 1 + n % 20)) FROM generate_series(1, 600) AS n;
SELECT count(*), max(substr(key, 2)::int) AS newest, count(DISTINCT scope) AS scopes FROM idempotency.claim_abandoned('pattern/*', '1 min', 300);
SELECT count(*), min(substr(key, 2)::int) AS oldest FROM idempotency.claim_abandoned('pattern/*', '1 min', 1000);
SELECT idempotency.forget(scope, key) FROM idempotency.key WHERE scope ~ 'refund|pattern' \g /dev/null

--
-- The operation after the takeover
--

-- The lease has the requested length and starts at the takeover. The retention is that
-- of the previous claim, not that of the setting.
SELECT pg_temp.abandon('becomes', 'kept', 2, '{"amount": 1}', '3 hours') AS stale \gset
BEGIN;
SET LOCAL idempotency.retention = '7d';
SELECT token AS own FROM idempotency.claim_abandoned('becomes', '10 min') \gset
COMMIT;
SELECT leased_until - leased_at AS lease, leased_at > now() - interval '1 min' AS from_now_on, retention,
		expires_at = leased_until + interval '3 hours' AS kept, created_at < now() - interval '1 hour' AS first_claim
	FROM idempotency.key WHERE scope = 'becomes';
-- The new owner renews, checkpoints and finishes with the new token; the former owner
-- is fenced off.
SELECT idempotency.renew('becomes', 'kept', :own, '1 min') > now() AS renewed;
SELECT FROM idempotency.checkpoint('becomes', 'kept', :own, 'charged');
BEGIN;
SELECT regexp_replace(pg_temp.error_of(format('SELECT idempotency.complete(''becomes'', ''kept'', token => %s)', :stale)), 'token \d+', 'token N') AS stale;
ROLLBACK;
SELECT idempotency.complete('becomes', 'kept', '"completed"', token => :own);
SELECT outcome, response, expires_at BETWEEN now() + interval '179 min' AND now() + interval '180 min' AS kept
	FROM idempotency.claim('becomes', 'kept', '{"amount": 1}');
SELECT outcome FROM idempotency.try_claim('becomes', 'kept', '{"amount": 2}');
-- An infinite retention stays infinite.
SELECT pg_temp.abandon('becomes', 'for ever', 2, NULL, '-1 second') > 0 AS abandoned;
SELECT token AS own FROM idempotency.claim_abandoned('becomes', '1 min') \gset
SELECT retention, expires_at FROM idempotency.key WHERE scope = 'becomes' AND key = 'for ever';
SELECT idempotency.complete('becomes', 'for ever', token => :own);
SELECT outcome, expires_at FROM idempotency.claim('becomes', 'for ever');

-- The transaction that took the operation can also finish it without the token. If that
-- transaction does not finish it, the commit still succeeds.
SELECT pg_temp.abandon('becomes', k, 1) > 0 AS abandoned FROM unnest('{a,b}'::text[]) AS k;
BEGIN;
SELECT key FROM idempotency.claim_abandoned('becomes', '1 min', 2);
SELECT idempotency.complete('becomes', 'a', '"at once"');
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'becomes' ORDER BY key;

-- Rolling back the transaction or a savepoint undoes the takeover.
SELECT pg_temp.abandon('becomes', 'c', 1) AS stale \gset
BEGIN;
SAVEPOINT before;
SELECT key, attempt FROM idempotency.claim_abandoned('becomes', '1 min');
ROLLBACK TO before;
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT key, attempt FROM idempotency.claim_abandoned('becomes', '1 min');
ROLLBACK;
SELECT token = :stale AS untouched, attempt FROM idempotency.key WHERE scope = 'becomes' AND key = 'c';
SELECT idempotency.complete('becomes', 'c', '"by the former owner"', token => :stale);

-- A call holds only the locks of the operations it took.
SELECT count(pg_temp.abandon('locks', 'k' || n, n)) FROM generate_series(1, 5) AS n;
BEGIN;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
-- extension only: locks of keys
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- both editions
-- A second call in the same transaction takes the next operations.
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
ROLLBACK;

-- Under REPEATABLE READ, a call takes only what its snapshot shows.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
SELECT idempotency.complete('locks', 'k5', '"done"');
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'locks' ORDER BY key;

-- A call opens the guards of the scope, and the last operation becomes the current one.
-- A call that takes nothing changes neither.
CREATE TABLE guarded (key text DEFAULT idempotency.current_key('locks'));
CREATE TRIGGER require_claim BEFORE INSERT ON guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('locks');
BEGIN;
SELECT * FROM idempotency.claim_abandoned('unknown', '1 min');
SAVEPOINT before;
INSERT INTO guarded DEFAULT VALUES;
\echo :SQLSTATE
ROLLBACK TO before;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
INSERT INTO guarded DEFAULT VALUES RETURNING *;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
INSERT INTO guarded DEFAULT VALUES RETURNING *;
ROLLBACK;
DROP TABLE guarded;

--
-- Arguments
--

SELECT call, pg_temp.error_of('SELECT * FROM idempotency.' || call) AS error FROM unnest(ARRAY[
	'claim_abandoned(NULL, ''1 min'')',
	'claim_abandoned('''', ''1 min'')',
	'claim_abandoned(E''a\nb'', ''1 min'')',
	'claim_abandoned(repeat(''s'', 256), ''1 min'')',
	'claim_abandoned(''refund/\\\'', ''1 min'')',
	'claim_abandoned(''locks'', NULL)',
	'claim_abandoned(''locks'', ''0'')',
	'claim_abandoned(''locks'', ''-1 min'')',
	'claim_abandoned(''locks'', ''1 month -31 days'')',
	'claim_abandoned(''locks'', ''30000000000'')',
	'claim_abandoned(''locks'', ''1 min'', NULL)',
	'claim_abandoned(''locks'', ''1 min'', 0)',
	'claim_abandoned(''locks'', ''1 min'', -1)']) AS call;
SELECT idempotency.claim_abandoned('locks', NULL);
\echo :SQLSTATE
SELECT idempotency.claim_abandoned('locks', '1 min', 0);
\echo :SQLSTATE
BEGIN READ ONLY;
SELECT * FROM idempotency.claim_abandoned('locks', '1 min');
\echo :SQLSTATE
ROLLBACK;

-- A scope outside the prefix is refused, even if it is empty.
SET idempotency.scope_prefix = 'abandoned/';
SELECT pg_temp.error_of('SELECT * FROM idempotency.claim_abandoned(''locks'', ''1 min'')');
SELECT key FROM idempotency.claim_abandoned('abandoned/2', '1 min');
SELECT key FROM idempotency.claim_abandoned('abandoned/*', '1 min');
-- not distributed: a pattern names the tenant
SELECT pattern, pg_temp.error_of(format('SELECT * FROM idempotency.claim_abandoned(%L, ''1 min'')', pattern))
	FROM unnest(ARRAY['*', 'abandoned*', '*abandoned/', 'aband\oned/*', 'abandoned\/\*']) AS pattern;
-- The prefix is compared with what all matches begin with, not with the pattern.
SET idempotency.scope_prefix = 'a*/';
SELECT pattern, pg_temp.error_of(format('SELECT * FROM idempotency.claim_abandoned(%L, ''1 min'')', pattern))
	FROM unnest(ARRAY['a*/', 'a*/*', 'a\*/*']) AS pattern;
-- both layouts
RESET idempotency.scope_prefix;

-- The select list accepts the call and gives the same result.
SELECT (idempotency.claim_abandoned('ABANDONED', '1 min', 10)).key;

-- extension only: types of the library
-- The row type belongs to the extension.
BEGIN;
ALTER TYPE idempotency.abandoned ALTER ATTRIBUTE key TYPE bigint;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.abandoned DROP ATTRIBUTE state;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;
-- both editions

DELETE FROM idempotency.key WHERE scope IN ('abandoned', 'abandoned/2', 'abandone', 'ABANDONED', 'many', 'limit', 'becomes', 'locks');
