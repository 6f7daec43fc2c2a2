--
-- claim_abandoned(): a completer takes over the operations that nobody came back
-- for.  (What completers do to each other is the matter of the isolation tests.)
--
\set SHOW_CONTEXT never

-- What a statement comes to: its SQLSTATE, message and detail.
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

-- Makes it so much later for the lease on a key.
CREATE FUNCTION pg_temp.pass(p_scope text, p_key text, p_time interval DEFAULT '1 hour') RETURNS void LANGUAGE sql AS $$
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
	PERFORM pg_temp.pass(p_scope, p_key, p_hours * interval '1 hour');
	RETURN op.token;
END
$$;

--
-- What is taken
--

-- Those of the oldest owners first, one unless told, and each with what claim() would answer.
SELECT pg_temp.abandon('abandoned', 'first', 1, ' {"amount":  100, "b": 1.50, "b": [ ]}') AS own \gset
SELECT idempotency.checkpoint('abandoned', 'first', :own, 'charged', '{"charge":  7}');
SELECT pg_temp.abandon('abandoned', 'second', 3) > 0 AS abandoned;
SELECT pg_temp.abandon('abandoned', 'third', 2) > 0 AS abandoned;
SELECT scope, key, '[' || request::text || ']' AS request, (operation).outcome, (operation).replayed, (operation).token > :own AS grown,
		(operation).attempt, (operation).recovery_point, (operation).state, (operation).status, (operation).response,
		(operation).failed, (operation).retry_after, (operation).expires_at
	FROM idempotency.claim_abandoned('abandoned', '1 min');
SELECT key, state FROM idempotency.keys WHERE scope = 'abandoned' ORDER BY key;
-- Its lease runs, so that the next call takes the next one.
SELECT key, request, (operation).attempt, (operation).recovery_point FROM idempotency.claim_abandoned('abandoned', '1 min', 1);
-- There is none left after the last, however many are wanted.
SELECT key FROM idempotency.claim_abandoned('abandoned', '1 min', 2147483647);
SELECT * FROM idempotency.claim_abandoned('abandoned', '1 min', 100);
SELECT * FROM idempotency.claim_abandoned('nothing of the kind', '1 min', 100);

-- One that was taken over stands behind those that were not, or before it: an operation
-- that fails again and again is in nobody's way.
UPDATE idempotency.key SET leased_until = now() - interval '1 s' - (now() - created_at) WHERE scope = 'abandoned';
SELECT key, (operation).attempt FROM idempotency.claim_abandoned('abandoned', '1 min', 10);
SELECT idempotency.forget('abandoned', key) FROM idempotency.key WHERE scope = 'abandoned' \g /dev/null

-- Everything else is left alone: what runs, what is finished, what was only seen, what
-- ran out so long ago that it counts as absent, what another scope has, and what is
-- claimed without a lease.
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

-- What was given up with a checkpoint is taken at once, and so is what was claimed
-- before the clock was set back.
SELECT token AS own FROM idempotency.claim('abandoned', 'released', '{"amount": 1}', lease => '1 hour') \gset
SELECT idempotency.checkpoint('abandoned', 'released', :own, 'charged', '{"charge": 7}'), idempotency.release('abandoned', 'released', :own);
SELECT outcome FROM idempotency.claim('abandoned', 'set back', lease => '1 hour');
SELECT pg_temp.pass('abandoned', 'set back', '-2 hours');
SELECT key, request, (operation).attempt, (operation).recovery_point, (operation).state
	FROM idempotency.claim_abandoned('abandoned', '1 min', 100);

-- 200 in one call, and not one more than asked for.
SELECT count(pg_temp.abandon('many', 'k' || n, n, to_json(n))) FROM generate_series(1, 23) AS n;
SELECT count(pg_temp.abandon('many', 'l' || n, 1, to_json(n))) FROM generate_series(1, 227) AS n;
SELECT count(*), count(DISTINCT key), count(DISTINCT (operation).token), min((operation).attempt), max((operation).attempt),
		bool_and(request::text = substr(key, 2)) AS own_requests, array_agg(key ORDER BY (operation).token) FILTER (WHERE key LIKE 'k%') AS oldest
	FROM idempotency.claim_abandoned('many', '1 min', 200);
SELECT count(*) FROM idempotency.claim_abandoned('many', '1 min', 200);
SELECT state, count(*) FROM idempotency.keys WHERE scope = 'many' GROUP BY state;
-- LIMIT comes too late: what counts is max.
SELECT count(pg_temp.abandon('limit', 'k' || n, n)) FROM generate_series(1, 5) AS n;
SELECT key FROM idempotency.claim_abandoned('limit', '1 min', 3) LIMIT 1;
SELECT state, count(*) FROM idempotency.keys WHERE scope = 'limit' GROUP BY state ORDER BY state;

--
-- What becomes of it
--

-- The lease is the one that was asked for, and from when it was taken on; the
-- retention is that of the last claim before, the setting notwithstanding.
SELECT pg_temp.abandon('becomes', 'kept', 2, '{"amount": 1}', '3 hours') AS stale \gset
BEGIN;
SET LOCAL idempotency.retention = '7d';
SELECT (operation).token AS own FROM idempotency.claim_abandoned('becomes', '10 min') \gset
COMMIT;
SELECT leased_until - leased_at AS lease, leased_at > now() - interval '1 min' AS from_now_on, retention,
		expires_at = leased_until + interval '3 hours' AS kept, created_at < now() - interval '1 hour' AS first_claim
	FROM idempotency.key WHERE scope = 'becomes';
-- It is renewed, noted and finished with its token, and the former owner is fenced out.
SELECT idempotency.renew('becomes', 'kept', :own, '1 min') > now() AS renewed;
SELECT idempotency.checkpoint('becomes', 'kept', :own, 'charged');
BEGIN;
SELECT regexp_replace(pg_temp.error_of(format('SELECT idempotency.complete(''becomes'', ''kept'', token => %s)', :stale)), 'token \d+', 'token N') AS stale;
ROLLBACK;
SELECT idempotency.complete('becomes', 'kept', '"completed"', token => :own);
SELECT outcome, response, expires_at BETWEEN now() + interval '179 min' AND now() + interval '180 min' AS kept
	FROM idempotency.claim('becomes', 'kept', '{"amount": 1}');
SELECT outcome FROM idempotency.try_claim('becomes', 'kept', '{"amount": 2}');
-- For ever is for ever.
SELECT pg_temp.abandon('becomes', 'for ever', 2, NULL, '-1 second') > 0 AS abandoned;
SELECT (operation).token AS own FROM idempotency.claim_abandoned('becomes', '1 min') \gset
SELECT retention, expires_at FROM idempotency.key WHERE scope = 'becomes' AND key = 'for ever';
SELECT idempotency.complete('becomes', 'for ever', token => :own);
SELECT outcome, expires_at FROM idempotency.claim('becomes', 'for ever');

-- In the transaction that took it, it is finished without its token as well, and one
-- that is not holds up no commit.
SELECT pg_temp.abandon('becomes', k, 1) > 0 AS abandoned FROM unnest('{a,b}'::text[]) AS k;
BEGIN;
SELECT key FROM idempotency.claim_abandoned('becomes', '1 min', 2);
SELECT idempotency.complete('becomes', 'a', '"at once"');
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'becomes' ORDER BY key;

-- Rolled back, by a savepoint or wholly, it is as abandoned as before.
SELECT pg_temp.abandon('becomes', 'c', 1) AS stale \gset
BEGIN;
SAVEPOINT before;
SELECT key, (operation).attempt FROM idempotency.claim_abandoned('becomes', '1 min');
ROLLBACK TO before;
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT key, (operation).attempt FROM idempotency.claim_abandoned('becomes', '1 min');
ROLLBACK;
SELECT token = :stale AS untouched, attempt FROM idempotency.key WHERE scope = 'becomes' AND key = 'c';
SELECT idempotency.complete('becomes', 'c', '"by the former owner"', token => :stale);

-- A call holds the locks of what it took, and of nothing else.
SELECT count(pg_temp.abandon('locks', 'k' || n, n)) FROM generate_series(1, 5) AS n;
BEGIN;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- Within the transaction, another call goes on where this one stopped.
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
ROLLBACK;

-- Under REPEATABLE READ it takes what the snapshot shows.
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT key FROM idempotency.claim_abandoned('locks', '1 min', 2);
SELECT idempotency.complete('locks', 'k5', '"done"');
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'locks' ORDER BY key;

-- It opens the guards of the scope, and the last operation is the current one; a call
-- that takes nothing changes neither.
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
-- The arguments
--

SELECT call, pg_temp.error_of('SELECT * FROM idempotency.' || call) AS error FROM unnest(ARRAY[
	'claim_abandoned(NULL, ''1 min'')',
	'claim_abandoned('''', ''1 min'')',
	'claim_abandoned(E''a\nb'', ''1 min'')',
	'claim_abandoned(repeat(''s'', 256), ''1 min'')',
	'claim_abandoned(''locks'', NULL)',
	'claim_abandoned(''locks'', ''0'')',
	'claim_abandoned(''locks'', ''-1 min'')',
	'claim_abandoned(''locks'', ''1 month -31 days'')',
	'claim_abandoned(''locks'', ''300000 years'')',
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

-- A scope outside of the prefix is refused, whether there is anything in it or not.
SET idempotency.scope_prefix = 'abandoned/';
SELECT pg_temp.error_of('SELECT * FROM idempotency.claim_abandoned(''locks'', ''1 min'')');
SELECT key FROM idempotency.claim_abandoned('abandoned/2', '1 min');
RESET idempotency.scope_prefix;

-- In the select list it gives the same.
SELECT (idempotency.claim_abandoned('ABANDONED', '1 min', 10)).key;

-- The type of its rows is the extension's.
BEGIN;
ALTER TYPE idempotency.abandoned ALTER ATTRIBUTE key TYPE bigint;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.abandoned DROP ATTRIBUTE operation;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;

DELETE FROM idempotency.key WHERE scope IN ('abandoned', 'abandoned/2', 'abandone', 'ABANDONED', 'many', 'limit', 'becomes', 'locks');
