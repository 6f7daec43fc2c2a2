-- reaper at rest: expired rows stay
--
-- Leases: claims that survive commit, with heartbeats, checkpoints, takeovers and
-- outcomes, as one session sees them. The isolation tests cover concurrent sessions.
--
\set SHOW_CONTEXT never

-- The SQLSTATE, message and detail of a statement, without the token.
CREATE FUNCTION pg_temp.error_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	message text;
	detail text;
BEGIN
	EXECUTE statement;
	RETURN 'no error';
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS message = MESSAGE_TEXT, detail = PG_EXCEPTION_DETAIL;
	RETURN SQLSTATE || ': ' || message || coalesce('. ' || regexp_replace(nullif(detail, ''), 'token -?\d+', 'token N'), '');
END
$$;

-- A claim with a lease of one minute, and its token.
CREATE FUNCTION pg_temp.lease(key text, request json DEFAULT NULL) RETURNS bigint LANGUAGE sql AS $$
	SELECT token FROM idempotency.claim('lease', lease.key, request, lease => '1 min')
$$;

-- Moves the lease on a key into the past by an interval.
CREATE FUNCTION pg_temp.age_lease(p_key text, p_time interval DEFAULT '1 hour') RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.key
		SET created_at = created_at - p_time, leased_at = leased_at - p_time,
			leased_until = leased_until - p_time, expires_at = expires_at - p_time
		WHERE scope = 'lease' AND key = p_key
$$;

--
-- Outcomes
--

-- A claim with a lease returns a token and is stored when its transaction commits,
-- which does not require complete().
BEGIN;
SELECT outcome, replayed, token > 0 AS token, attempt, recovery_point, state, status, headers, response, failed,
		retry_after, expires_at
	FROM idempotency.claim('lease', 'new', '{"amount": 100}', lease => '1 min');
COMMIT;
SELECT outcome, replayed, token > 0 AS token, attempt, recovery_point, state, status, headers, response, failed,
		retry_after, expires_at
	FROM idempotency.try_claim('lease', 'new for try_claim', lease => '1 min');
SELECT key, state FROM idempotency.keys WHERE scope = 'lease' ORDER BY key;

-- While the lease runs, other claims with or without a lease get in_progress or an
-- error. The result says how long the lease can last, and does not reveal the token.
SELECT outcome, replayed, token, attempt, recovery_point, state, status, headers, response, failed,
		retry_after BETWEEN 30 AND 60 AS retry_after, expires_at
	FROM idempotency.try_claim('lease', 'new', '{"amount": 100}', lease => '1 min');
SELECT outcome, token, attempt, retry_after BETWEEN 30 AND 60 AS retry_after
	FROM idempotency.try_claim('lease', 'new', '{"amount": 100}');
-- A caller that waits for retry_after finds the lease ended: it is rounded up.
SELECT op.retry_after >= extract(epoch FROM k.leased_until - clock_timestamp()) AS covers_lease
	FROM idempotency.peek('lease', 'new') AS op, idempotency.key AS k WHERE k.scope = 'lease' AND k.key = 'new';
BEGIN;
UPDATE idempotency.key SET leased_until = leased_until + interval '100 years' WHERE scope = 'lease' AND key = 'new';
SELECT outcome, retry_after FROM idempotency.peek('lease', 'new');
ROLLBACK;
SELECT pg_temp.error_of('SELECT idempotency.claim(''lease'', ''new'', wait => ''0'')'),
	pg_temp.error_of('SELECT idempotency.claim(''lease'', ''new'', lease => ''1 min'', wait => ''1 microsecond'')');
DO $$
DECLARE
	hint text;
BEGIN
	PERFORM idempotency.claim('lease', 'new', wait => '0');
EXCEPTION WHEN SQLSTATE 'IK409' THEN
	GET STACKED DIAGNOSTICS hint = PG_EXCEPTION_HINT;
	RAISE NOTICE '%', regexp_replace(hint, '\d+', 'NN');
END
$$;
-- The same holds in the transaction that took the lease, also after a renewal there.
BEGIN;
SELECT pg_temp.lease('twice') > 0 AS leased;
SELECT outcome, attempt, retry_after FROM idempotency.try_claim('lease', 'twice', lease => '1 min', wait => '1 hour');
SAVEPOINT before;
SELECT idempotency.claim('lease', 'twice');
ROLLBACK TO before;
COMMIT;
SELECT token FROM idempotency.key WHERE scope = 'lease' AND key = 'new' \gset
BEGIN;
SELECT idempotency.renew('lease', 'new', :token, '1 min') > now() AS renewed;
SELECT idempotency.claim('lease', 'new', '{"amount": 100}', wait => '1 hour');
ROLLBACK;

-- A different request gets a mismatch while the lease runs and after it expired,
-- because waiting could not help.
SELECT outcome, token, attempt, retry_after FROM idempotency.try_claim('lease', 'new', '{"amount": 999}', wait => '1 hour');
SELECT idempotency.claim('lease', 'new', '{"amount": 999}', lease => '1 min');
\echo :SQLSTATE
SELECT pg_temp.age_lease('new for try_claim');
SELECT outcome FROM idempotency.try_claim('lease', 'new for try_claim', '{"amount": 1}', lease => '1 min');
SELECT pg_temp.age_lease('new for try_claim');
SELECT outcome FROM idempotency.try_claim('lease', 'new for try_claim', '{"amount": 2}', lease => '1 min');

-- After the lease expired, the next request takes over, with the next attempt number
-- and a greater token.
SELECT pg_temp.lease('lapsed') AS first \gset
SELECT pg_temp.age_lease('lapsed');
SELECT outcome, replayed, token > :first AS grown, attempt, recovery_point, state, failed, retry_after, expires_at
	FROM idempotency.claim('lease', 'lapsed', lease => '1 min');
SELECT pg_temp.age_lease('lapsed');
SELECT outcome, attempt FROM idempotency.try_claim('lease', 'lapsed', lease => '1 min');
SELECT outcome, attempt FROM idempotency.try_claim('lease', 'lapsed', lease => '1 min');

-- A duplicate with the same request sees the checkpoint of the running owner, and none of
-- its token. Another request, or none where the owner passed one, sees nothing of it.
SELECT pg_temp.lease('progress', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'progress', :own, 'started', '{"job":  17}');
SELECT outcome, token, attempt, recovery_point, state, retry_after > 0 AS runs
	FROM idempotency.try_claim('lease', 'progress', '{"amount": 1.0}');
SELECT outcome, token, attempt, recovery_point, state FROM idempotency.try_claim('lease', 'progress', '{"amount": 2}');
SELECT outcome, token, attempt, recovery_point, state FROM idempotency.try_claim('lease', 'progress');
SELECT outcome, recovery_point, state FROM idempotency.try_claim('lease', 'progress', fingerprint => idempotency.fingerprint('{"amount": 1}'), lease => '1 min');
SELECT outcome, recovery_point, state, fingerprint IS NOT NULL AS compared FROM idempotency.peek('lease', 'progress');
SELECT pg_temp.age_lease('progress');
SELECT outcome, recovery_point, state FROM idempotency.peek('lease', 'progress');
-- Without a request, every caller could be the owner's retry.
SELECT pg_temp.lease('progress of any') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'progress of any', :own, 'started', '17');
SELECT outcome, recovery_point, state FROM idempotency.try_claim('lease', 'progress of any', '{"amount": 2}');
SELECT outcome, recovery_point, state FROM idempotency.try_claim('lease', 'progress of any');
SELECT outcome, recovery_point, state FROM idempotency.peek('lease', 'progress of any');
SELECT idempotency.release('lease', 'progress of any', :own);
SELECT outcome, recovery_point, state, retry_after FROM idempotency.peek('lease', 'progress of any');

-- The clock decides the end of a lease, also within a transaction; a waiting claim
-- takes over at that moment.
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'clock', lease => '1 millisecond');
COMMIT;
BEGIN;
SELECT pg_sleep(0.01);
SELECT outcome, attempt FROM idempotency.claim('lease', 'clock', lease => '200 milliseconds', wait => '0');
COMMIT;
SELECT leased_until AS until FROM idempotency.key WHERE scope = 'lease' AND key = 'clock' \gset
SELECT outcome, attempt FROM idempotency.claim('lease', 'clock', lease => '1 min', wait => '1 min');
SELECT leased_at - :'until' BETWEEN '0' AND '30 s' AS waited FROM idempotency.key WHERE scope = 'lease' AND key = 'clock';
-- A shorter wait ends without a takeover.
SELECT clock_timestamp() AS before \gset
SELECT outcome FROM idempotency.try_claim('lease', 'clock', lease => '1 min', wait => '50 ms');
SELECT clock_timestamp() - :'before' BETWEEN '50 ms' AND '30 s' AS waited;

-- A clock that was set back leaves leases that begin in the future. Their elapsed time
-- is unknown, so they count as expired.
SELECT pg_temp.lease('set back') AS first \gset
SELECT pg_temp.age_lease('set back', '-1 hour');
SELECT outcome, retry_after FROM idempotency.peek('lease', 'set back');
SELECT outcome, attempt, token > :first AS grown FROM idempotency.claim('lease', 'set back', lease => '1 min');

-- A claim with a lease replays a stored outcome, and stores no lease.
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'stored');
SELECT idempotency.complete('lease', 'stored', '"done"', 201);
COMMIT;
SELECT outcome, replayed, token, attempt, recovery_point, state, status, response, retry_after, expires_at > now() AS retained
	FROM idempotency.claim('lease', 'stored', lease => '1 min');

-- Rolling back a claim removes the lease; its token is not reused.
BEGIN;
SELECT pg_temp.lease('rolled back') AS first \gset
ROLLBACK;
SELECT outcome, attempt, token > :first AS grown FROM idempotency.claim('lease', 'rolled back', lease => '1 min');

--
-- Arguments
--

-- NULL means a transactional claim. A lease can be any interval with a start and an
-- end. (A clock of milliseconds, as in PGlite, can make the hint that of autocommit.)
BEGIN;
SELECT outcome, token, attempt FROM idempotency.claim('lease', 'no lease', lease => NULL);
\set VERBOSITY terse
COMMIT;
\set VERBOSITY default
\echo :SQLSTATE
-- After an error with a token, the transaction cannot commit.
BEGIN;
SELECT l AS lease, pg_temp.error_of(format('SELECT idempotency.claim(''lease'', ''length'', lease => %L)', l)) AS claim,
		pg_temp.error_of(format('SELECT idempotency.try_claim(''lease'', ''length'', lease => %L)', l)) AS try_claim,
		pg_temp.error_of(format('SELECT idempotency.renew(''lease'', ''new'', %s, %L)', :token, l)) AS renew
	FROM unnest('{0,-1 microsecond,-1 day,-1 month,1 day -25 hours,24 days 1 microsecond,1 month,178000000 years,2562047788 hours}'::text[]) AS l;
ROLLBACK;
SELECT l AS lease, (idempotency.claim('lease', 'length ' || l, lease => l::interval)).outcome
	FROM unnest('{1 microsecond,24 days,1 day -1 hour}'::text[]) AS l;
SELECT key, leased_until = leased_at + substr(key, 8)::interval AS as_said
	FROM idempotency.key WHERE scope = 'lease' AND key LIKE 'length %' ORDER BY key;
SELECT idempotency.claim('lease', 'length', lease => '0');
SELECT idempotency.claim('lease', 'length', lease => '30000000000');
-- Infinity, an interval value since PostgreSQL 17, has no end.
SELECT pg_temp.error_of('SELECT idempotency.claim(''lease'', ''length'', lease => ''infinity'')') ~ '^(22023|22007):' AS refused;

-- A heartbeat must pass a length.
SELECT idempotency.renew('lease', 'new', :token, NULL);
\echo :SQLSTATE

-- A checkpoint needs a name, and the size limit of responses applies to its state.
SELECT FROM idempotency.checkpoint('lease', 'new', :token, NULL);
\echo :SQLSTATE
SELECT FROM idempotency.checkpoint('lease', 'new', :token, '');
SELECT FROM idempotency.checkpoint('lease', 'new', :token, repeat('x', 256));
\echo :SQLSTATE
BEGIN;
SET LOCAL idempotency.max_response_size = '1kB';
SELECT FROM idempotency.checkpoint('lease', 'new', :token, 'fits', to_json(repeat('x', 1022)));
SELECT FROM idempotency.checkpoint('lease', 'new', :token, 'does not', to_json(repeat('x', 1023)));
\echo :SQLSTATE
ROLLBACK;
-- The size limit also applies to a request that a lease stores; a request that is only
-- compared can be larger.
BEGIN;
SET LOCAL idempotency.max_response_size = '1kB';
SELECT outcome FROM idempotency.claim('lease', 'size', to_json(repeat('x', 1022)), lease => '1 min');
SELECT outcome FROM idempotency.try_claim('lease', 'size 2', to_json(repeat('x', 1023)));
SELECT idempotency.claim('lease', 'size 3', to_json(repeat('x', 1023)), lease => '1 min');
\echo :SQLSTATE
ROLLBACK;

-- The rules for scope and key are the same as everywhere.
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.%s', call)) AS error FROM unnest(ARRAY[
	'renew(NULL, ''k'', 1, ''1 min'')',
	'renew(''s'', '''', 1, ''1 min'')',
	'checkpoint('''', ''k'', 1, ''p'')',
	'checkpoint(''s'', NULL, 1, ''p'')',
	'release(''s'', E''a\tb'', 1)',
	'complete(''s'', repeat(''k'', 256), token => 1)']) AS call;
ROLLBACK;

--
-- Finishing a lease
--

-- An open lease does not prevent the commit; an open claim without a lease does.
BEGIN;
SELECT pg_temp.lease('beside') > 0 AS leased;
SELECT outcome FROM idempotency.claim('lease', 'beside 2');
\set VERBOSITY terse
COMMIT;
\set VERBOSITY default
\echo :SQLSTATE

-- The transaction that took the lease can finish it without the token, like every
-- claim, or with it;
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'at once', '{"a": 1}', lease => '1 min');
SELECT idempotency.complete('lease', 'at once', '"done at once"', 201, '{"X": "1"}');
COMMIT;
SELECT status, headers, response FROM idempotency.claim('lease', 'at once', '{"a": 1}');
BEGIN;
SELECT pg_temp.lease('at once 2') AS own \gset
SELECT idempotency.fail('lease', 'at once 2', '"no"', 402, NULL, :own);
COMMIT;
SELECT status, response, failed FROM idempotency.claim('lease', 'at once 2');
BEGIN;
SELECT pg_temp.lease('at once 3') > 0 AS leased;
SELECT idempotency.release('lease', 'at once 3');
COMMIT;
SELECT count(*) FROM idempotency.key WHERE scope = 'lease' AND key = 'at once 3';
-- a later transaction needs the token.
SELECT pg_temp.lease('later', '{"a": 1}') AS own \gset
SELECT idempotency.complete('lease', 'later', '{"id" :   1}', 201, '{"X" : "1"}', :own);
SELECT outcome, status, headers, response, failed, attempt, retry_after FROM idempotency.claim('lease', 'later', '{"a": 1}');
SELECT outcome FROM idempotency.try_claim('lease', 'later', '{"a": 2}');
SELECT pg_temp.lease('later 2') AS own \gset
SELECT idempotency.fail('lease', 'later 2', '"no"', 402, token => :own);
SELECT outcome, status, response, failed FROM idempotency.claim('lease', 'later 2');
SELECT pg_temp.lease('later 3') AS own \gset
SELECT idempotency.release('lease', 'later 3', :own);
SELECT outcome, attempt FROM idempotency.claim('lease', 'later 3', lease => '1 min');

-- An owner with an expired lease can finish while no other owner took over, because no
-- other owner has started. It can also renew the lease and continue.
SELECT pg_temp.lease('late') AS own \gset
SELECT pg_temp.age_lease('late');
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'late';
SELECT FROM idempotency.checkpoint('lease', 'late', :own, 'charged');
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'late';
SELECT idempotency.renew('lease', 'late', :own, '1 min') > now() AS renewed;
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'late';
SELECT pg_temp.age_lease('late');
SELECT idempotency.complete('lease', 'late', '"late"', token => :own);
SELECT outcome, response FROM idempotency.claim('lease', 'late');

-- The checks on the outcome are the same. After such an error the owner still holds the
-- lease and can try again.
SELECT pg_temp.lease('bad outcome') AS own \gset
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''bad outcome'', status => 99, token => %s)', :own)),
	pg_temp.error_of(format('SELECT idempotency.fail(''lease'', ''bad outcome'', NULL, NULL, token => %s)', :own)),
	pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''bad outcome'', headers => ''[]'', token => %s)', :own));
SELECT idempotency.complete('lease', 'bad outcome', '"good"', token => :own);
COMMIT;

--
-- Fencing
--

-- After a takeover, the former owner cannot finish, renew or checkpoint. Its writes
-- cannot commit, even if it catches the error.
CREATE TABLE effect (by_owner int);
SELECT pg_temp.lease('fenced') AS stale \gset
SELECT pg_temp.age_lease('fenced');
SELECT pg_temp.lease('fenced') AS current \gset
CREATE FUNCTION pg_temp.caught(p_call text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect VALUES (1);
	RETURN pg_temp.error_of('SELECT idempotency.' || p_call);
END
$$;
BEGIN;
SELECT split_part(call, '(', 1) AS call, pg_temp.error_of(format('SELECT idempotency.' || call, :stale)) FROM unnest(ARRAY[
	'complete(''lease'', ''fenced'', token => %s)', 'fail(''lease'', ''fenced'', NULL, 400, token => %s)',
	'release(''lease'', ''fenced'', %s)', 'renew(''lease'', ''fenced'', %s, ''1 min'')', 'checkpoint(''lease'', ''fenced'', %s, ''p'')']) AS call;
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''fenced'', token => %s)', :stale));
\echo :SQLSTATE
SELECT pg_temp.caught(format('fail(''lease'', ''fenced'', NULL, 400, token => %s)', :stale));
\echo :SQLSTATE
SELECT pg_temp.caught(format('release(''lease'', ''fenced'', %s)', :stale));
\echo :SQLSTATE
SELECT pg_temp.caught(format('renew(''lease'', ''fenced'', %s, ''1 min'')', :stale));
\echo :SQLSTATE
SELECT pg_temp.caught(format('checkpoint(''lease'', ''fenced'', %s, ''p'')', :stale));
\echo :SQLSTATE
-- A savepoint, the right token afterwards, or PREPARE TRANSACTION do not help.
BEGIN;
SAVEPOINT before;
SELECT pg_temp.caught(format('renew(''lease'', ''fenced'', %s, ''1 min'')', :stale));
ROLLBACK TO before;
INSERT INTO effect VALUES (2);
SELECT idempotency.complete('lease', 'fenced', '"owner"', token => :current);
COMMIT;
\echo :SQLSTATE
BEGIN;
SELECT pg_temp.caught(format('complete(''lease'', ''fenced'', token => %s)', :stale));
PREPARE TRANSACTION 'regress_idempotency_fenced';
\echo :SQLSTATE
SELECT count(*) > 0 AS prepared FROM pg_prepared_xacts WHERE gid = 'regress_idempotency_fenced' \gset
\if :prepared
ROLLBACK PREPARED 'regress_idempotency_fenced';
\endif
-- both editions
SELECT count(*) AS effects FROM effect;
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'fenced';

-- Other tokens are refused: NULL, 0, negative, not yet assigned, or of another key.
-- Every token is refused for a key that is absent or claimed without a lease.
SELECT pg_temp.lease('fenced, other') AS other \gset
BEGIN;
SELECT what, key, pg_temp.error_of(format('SELECT idempotency.complete(''lease'', %L, token => %L)', key, token)) AS error
	FROM (VALUES
		(1, 'none', 'fenced', NULL),
		(2, '0', 'fenced', 0),
		(3, 'negative', 'fenced', -:current),
		(4, 'the largest', 'fenced', 9223372036854775807),
		(5, 'the next', 'fenced', :current + 1000000),
		(6, 'of another key', 'fenced', :other),
		(7, 'of an unknown key', 'unknown', :current),
		(8, 'of a key with another case', 'FENCED', :current)) AS v (n, what, key, token) ORDER BY n;
ROLLBACK;
BEGIN;
SELECT v.call, pg_temp.error_of(format('SELECT idempotency.' || v.call, 'fenced', 'NULL')) AS no_token,
		pg_temp.error_of(format('SELECT idempotency.' || v.call, 'fenced', 0)) AS zero,
		pg_temp.error_of(format('SELECT idempotency.' || v.call, 'unknown', :current)) AS unknown
	FROM (VALUES
		(1, 'complete(''lease'', %L, token => %s)'),
		(2, 'fail(''lease'', %L, NULL, 400, token => %s)'),
		(3, 'release(''lease'', %L, %s)'),
		(4, 'renew(''lease'', %L, %s, ''1 min'')'),
		(5, 'checkpoint(''lease'', %L, %s, ''p'')')) AS v (n, call) ORDER BY n;
ROLLBACK;
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'transactional');
SELECT pg_temp.error_of('SELECT idempotency.complete(''lease'', ''transactional'', token => 1)'),
	pg_temp.error_of('SELECT idempotency.release(''lease'', ''transactional'', 1)');
ROLLBACK;
-- The complete error.
SELECT idempotency.complete('lease', 'unknown', token => 9223372036854775807);
\echo :SQLSTATE
SELECT idempotency.renew('lease', 'fenced', NULL, '1 min');
\echo :SQLSTATE

-- A finished operation cannot be finished again, even with the right token: a retry
-- would write twice.
SELECT idempotency.complete('lease', 'fenced', '"owner"', token => :current);
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''fenced'', ''"again"'', token => %s)', :current));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''fenced'', ''"again"'', token => %s)', :current));
-- both editions
BEGIN;
SELECT pg_temp.lease('finished here') AS own \gset
SELECT idempotency.complete('lease', 'finished here', '1', token => :own);
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''finished here'', ''2'', token => %s)', :own));
ROLLBACK;
SELECT pg_temp.lease('released') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'released', :own, 'charged');
SELECT idempotency.release('lease', 'released', :own);
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.release(''lease'', ''released'', %s)', :own)),
	pg_temp.error_of(format('SELECT idempotency.renew(''lease'', ''released'', %s, ''1 min'')', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('release(''lease'', ''released'', %s)', :own));
SELECT pg_temp.caught(format('renew(''lease'', ''released'', %s, ''1 min'')', :own));
-- both editions
SELECT response FROM idempotency.claim('lease', 'fenced');
SELECT count(*) AS effects FROM effect;

-- A claim without a lease has no heartbeat and no checkpoint; the attempt loses the
-- claim.
-- extension only: errors that are caught
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'transactional');
SELECT pg_temp.error_of('SELECT idempotency.renew(''lease'', ''transactional'', NULL, ''1 min'')'),
	pg_temp.error_of('SELECT idempotency.checkpoint(''lease'', ''transactional'', NULL, ''p'')');
SELECT idempotency.complete('lease', 'transactional');
COMMIT;
\echo :SQLSTATE
-- both editions
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'transactional');
SELECT idempotency.renew('lease', 'transactional', NULL, '1 min');
\echo :SQLSTATE
ROLLBACK;

--
-- Heartbeats
--

-- The new lease starts at the call, and can be longer or shorter. The row stays for the
-- same retention after the new end.
SELECT pg_temp.lease('heartbeat') AS own \gset
SELECT leased_at, leased_until, expires_at, created_at FROM idempotency.key WHERE scope = 'lease' AND key = 'heartbeat' \gset before_
BEGIN;
SELECT pg_sleep(0.01);
SELECT idempotency.renew('lease', 'heartbeat', :own, '1 hour') AS until \gset
SELECT leased_until = :'until' AS as_returned, leased_at > now() AS not_of_the_transaction,
		leased_until = leased_at + interval '1 hour' AS for_an_hour, expires_at = leased_until + interval '24 hours' AS kept,
		created_at = :'before_created_at' AS first_claim, attempt, token = :own AS same_token
	FROM idempotency.key WHERE scope = 'lease' AND key = 'heartbeat';
COMMIT;
SELECT idempotency.renew('lease', 'heartbeat', :own, '1 second') < :'until' AS shorter;
SELECT leased_until = leased_at + interval '1 second' AS for_a_second, expires_at = leased_until + interval '24 hours' AS kept
	FROM idempotency.key WHERE scope = 'lease' AND key = 'heartbeat';
-- The claiming transaction needs no token;
BEGIN;
SELECT pg_temp.lease('heartbeat 2') AS own \gset
SELECT idempotency.renew('lease', 'heartbeat 2', NULL, '2 min') > now() + interval '1 min' AS renewed;
SELECT FROM idempotency.checkpoint('lease', 'heartbeat 2', NULL, 'begun');
SELECT idempotency.renew('lease', 'heartbeat 2', :own, '3 min') > now() + interval '2 min' AS renewed;
COMMIT;
SELECT recovery_point, leased_until > now() + interval '2 min' AS renewed FROM idempotency.key WHERE scope = 'lease' AND key = 'heartbeat 2';
-- a later transaction does, and a heartbeat there is not a claim.
BEGIN;
SELECT idempotency.renew('lease', 'heartbeat 2', :own, '1 min') > now() AS renewed;
SELECT pg_temp.error_of('SELECT idempotency.complete(''lease'', ''heartbeat 2'')');
ROLLBACK;

--
-- Checkpoints
--

-- The next owner gets the last checkpoint, with its state byte for byte. It stays until
-- that owner sets another.
SELECT pg_temp.lease('steps', '{"amount": 1}') AS first \gset
SELECT idempotency.checkpoint('lease', 'steps', :first, 'begun', '{"n": 1}') AS ends \gset
SELECT leased_until = :'ends' AS ends_with_lease FROM idempotency.key WHERE scope = 'lease' AND key = 'steps';
SELECT FROM idempotency.checkpoint('lease', 'steps', :first, 'charged', '  { "b" : 1.50,"a":  [ ],  "b": 1e2, "c": "\u0041\/é" }  ');
SELECT outcome, recovery_point, state, attempt FROM idempotency.try_claim('lease', 'steps', lease => '1 min');
SELECT outcome, recovery_point, state, attempt FROM idempotency.peek('lease', 'steps');
SELECT pg_temp.age_lease('steps');
SELECT outcome, attempt, recovery_point, '[' || state::text || ']' AS state, token AS second
	FROM idempotency.claim('lease', 'steps', lease => '1 min') \gset taken_
\echo :taken_outcome :taken_attempt :taken_recovery_point :taken_state
SELECT pg_temp.age_lease('steps');
SELECT outcome, attempt, recovery_point, '[' || state::text || ']' AS state FROM idempotency.claim('lease', 'steps', lease => '1 min');
-- NULL removes the state: the state of an earlier checkpoint does not fit this one.
SELECT token AS third FROM idempotency.key WHERE scope = 'lease' AND key = 'steps' \gset
SELECT FROM idempotency.checkpoint('lease', 'steps', :third, 'booked');
SELECT pg_temp.age_lease('steps');
SELECT outcome, attempt, recovery_point, state FROM idempotency.claim('lease', 'steps', lease => '1 min');
-- JSON null is a state.
SELECT token AS fourth FROM idempotency.key WHERE scope = 'lease' AND key = 'steps' \gset
SELECT FROM idempotency.checkpoint('lease', 'steps', :fourth, 'Überweisung 42', 'null');
SELECT pg_temp.age_lease('steps');
SELECT outcome, attempt, recovery_point, state FROM idempotency.claim('lease', 'steps', lease => '1 min');
-- The state can be any JSON, in any type that holds JSON, and nothing else.
SELECT token AS fifth FROM idempotency.key WHERE scope = 'lease' AND key = 'steps' \gset
SELECT FROM idempotency.checkpoint('lease', 'steps', :fifth, 'json', '{"b":1,  "a":2}'::json);
SELECT FROM idempotency.checkpoint('lease', 'steps', :fifth, 'text', '[1,  2]'::text);
SELECT FROM idempotency.checkpoint('lease', 'steps', :fifth, 'jsonb', jsonb_build_object('b', 1, 'a', 2));
SELECT pg_temp.error_of(format('SELECT idempotency.checkpoint(''lease'', ''steps'', %s, ''no json'', ''x'')', :fifth));
SELECT recovery_point, recovery_state FROM idempotency.key WHERE scope = 'lease' AND key = 'steps';
-- A checkpoint does not extend the lease.
SELECT leased_until AS until, expires_at AS expires FROM idempotency.key WHERE scope = 'lease' AND key = 'steps' \gset
SELECT FROM idempotency.checkpoint('lease', 'steps', :fifth, 'x');
SELECT leased_until = :'until' AND expires_at = :'expires' AS same FROM idempotency.key WHERE scope = 'lease' AND key = 'steps';
-- Storing the outcome removes lease and checkpoint.
SELECT idempotency.complete('lease', 'steps', '"done"', token => :fifth);
SELECT outcome, attempt, recovery_point, state, response FROM idempotency.claim('lease', 'steps', '{"amount": 1}', lease => '1 min');

--
-- Releasing a lease
--

-- Without a checkpoint, nothing stays. With a checkpoint, it stays for the next owner,
-- which can start at once.
SELECT pg_temp.lease('given up') AS own \gset
SELECT idempotency.release('lease', 'given up', :own);
SELECT count(*) AS rows FROM idempotency.key WHERE scope = 'lease' AND key = 'given up';
SELECT pg_temp.lease('given up', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'given up', :own, 'charged', '{"charge": 7}');
SELECT idempotency.release('lease', 'given up', :own);
SELECT state, expires_in BETWEEN '23:59:00' AND '24:00:00' AS kept FROM idempotency.keys WHERE scope = 'lease' AND key = 'given up';
SELECT outcome, attempt, retry_after, recovery_point FROM idempotency.peek('lease', 'given up');
SELECT outcome FROM idempotency.try_claim('lease', 'given up', '{"amount": 2}', lease => '1 min');
SELECT outcome, attempt, recovery_point, state, token > :own AS grown
	FROM idempotency.claim('lease', 'given up', '{"amount": 1}', lease => '1 min', wait => '0');
-- The same holds within one transaction, repeatedly.
BEGIN;
SELECT pg_temp.lease('given up here') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'given up here', :own, 'begun');
SELECT idempotency.release('lease', 'given up here');
SELECT outcome, attempt, recovery_point, token AS next FROM idempotency.claim('lease', 'given up here', lease => '1 min') \gset taken_
\echo :taken_outcome :taken_attempt :taken_recovery_point
SELECT idempotency.release('lease', 'given up here', :taken_next);
SELECT outcome, attempt, recovery_point FROM idempotency.claim('lease', 'given up here');
SELECT idempotency.complete('lease', 'given up here', '"done"');
COMMIT;
SELECT outcome, response FROM idempotency.claim('lease', 'given up here');

--
-- Retention
--

-- The retention of the last owner's claim applies, starting at complete().
SELECT token AS own FROM idempotency.claim('lease', 'kept', lease => '1 min', retention => '1 hour') \gset
SELECT retention, expires_at = leased_until + interval '1 hour' AS kept FROM idempotency.key WHERE scope = 'lease' AND key = 'kept';
SELECT pg_temp.age_lease('kept', '30 min');
SELECT token AS own, attempt FROM idempotency.claim('lease', 'kept', lease => '1 min', retention => '2 hours') \gset
SELECT retention, expires_at = leased_until + interval '2 hours' AS kept FROM idempotency.key WHERE scope = 'lease' AND key = 'kept';
SELECT idempotency.renew('lease', 'kept', :own, '10 min') > now() AS renewed;
SELECT retention, expires_at = leased_until + interval '2 hours' AS kept FROM idempotency.key WHERE scope = 'lease' AND key = 'kept';
SELECT idempotency.complete('lease', 'kept', token => :own);
SELECT expires_at BETWEEN now() + interval '119 min' AND now() + interval '121 min' AS kept, created_at < now() - interval '1 min' AS first_claim
	FROM idempotency.key WHERE scope = 'lease' AND key = 'kept';
-- Infinite retention.
SELECT token AS own FROM idempotency.claim('lease', 'for ever', lease => '1 min', retention => '-1 second') \gset
SELECT retention, expires_at FROM idempotency.key WHERE scope = 'lease' AND key = 'for ever';
SELECT idempotency.renew('lease', 'for ever', :own, '1 min') > now() AS renewed;
SELECT retention, expires_at FROM idempotency.key WHERE scope = 'lease' AND key = 'for ever';
SELECT idempotency.checkpoint('lease', 'for ever', :own, 'charged') IS NOT NULL AS checkpoint, idempotency.release('lease', 'for ever', :own);
SELECT retention, expires_at FROM idempotency.key WHERE scope = 'lease' AND key = 'for ever';
SELECT outcome, attempt, token AS own FROM idempotency.claim('lease', 'for ever', lease => '1 min', retention => '-1 second') \gset
SELECT idempotency.complete('lease', 'for ever', token => :own);
SELECT expires_at FROM idempotency.peek('lease', 'for ever');
-- The setting, as of the claim.
BEGIN;
SET LOCAL idempotency.retention = '90min';
SELECT pg_temp.lease('setting') AS own \gset
COMMIT;
SELECT idempotency.complete('lease', 'setting', token => :own);
SELECT expires_in BETWEEN '01:29:00' AND '01:30:00' AS kept FROM idempotency.keys WHERE scope = 'lease' AND key = 'setting';

-- A lease that is abandoned for longer than its retention counts as absent. The next
-- owner is the first, can pass another request, and gets no checkpoint. The former
-- owner is fenced off.
SELECT pg_temp.lease('forgotten', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'forgotten', :own, 'charged', '{"charge": 7}');
SELECT pg_temp.age_lease('forgotten', '25 hours');
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'forgotten';
SELECT idempotency.peek('lease', 'forgotten') IS NULL AS absent;
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.renew(''lease'', ''forgotten'', %s, ''1 min'')', :own)),
	pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''forgotten'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('renew(''lease'', ''forgotten'', %s, ''1 min'')', :own));
SELECT pg_temp.caught(format('complete(''lease'', ''forgotten'', token => %s)', :own));
-- both editions
BEGIN;
SELECT outcome, attempt, recovery_point FROM idempotency.claim('lease', 'forgotten');
ROLLBACK;
SELECT outcome, attempt, recovery_point, state, token > :own AS grown
	FROM idempotency.claim('lease', 'forgotten', '{"amount": 2}', lease => '1 min');
SELECT attempt, recovery_point, recovery_state, request, created_at > now() - interval '1 min' AS new
	FROM idempotency.key WHERE scope = 'lease' AND key = 'forgotten';
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''forgotten'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''forgotten'', token => %s)', :own));
-- both editions

--
-- Request
--

-- The request is stored unchanged while the lease exists; its fingerprint is stored
-- with the outcome.
SELECT pg_temp.lease('request', ' {"b":  1, "a": 2.50}') AS own \gset
SELECT '[' || request::text || ']' AS request FROM idempotency.key WHERE scope = 'lease' AND key = 'request';
SELECT idempotency.complete('lease', 'request', token => :own);
SELECT request IS NULL AS gone, fingerprint = idempotency.fingerprint('{"a":2.5,"b":1}') AS same FROM idempotency.key WHERE scope = 'lease' AND key = 'request';

-- A claim without a request matches every stored one and keeps it. The first claim with
-- a request fixes the fingerprint for later claims.
SELECT pg_temp.lease('request, late') > 0 AS leased;
SELECT outcome FROM idempotency.try_claim('lease', 'request, late', '{"amount": 1}');
SELECT request, fingerprint FROM idempotency.key WHERE scope = 'lease' AND key = 'request, late';
SELECT pg_temp.age_lease('request, late');
SELECT outcome FROM idempotency.claim('lease', 'request, late', '{"amount": 1}', lease => '1 min');
SELECT request, fingerprint = idempotency.fingerprint('{"amount": 1}') AS bound FROM idempotency.key WHERE scope = 'lease' AND key = 'request, late';
SELECT pg_temp.age_lease('request, late');
SELECT outcome FROM idempotency.try_claim('lease', 'request, late', '{"amount": 2}', lease => '1 min');
SELECT outcome, attempt FROM idempotency.try_claim('lease', 'request, late', lease => '1 min');
SELECT request, fingerprint = idempotency.fingerprint('{"amount": 1}') AS bound FROM idempotency.key WHERE scope = 'lease' AND key = 'request, late';
-- The same holds for a fingerprint: no request is stored until a claim passes one.
SELECT outcome FROM idempotency.claim('lease', 'digest', lease => '1 min', fingerprint => idempotency.fingerprint('{"amount": 1}'));
SELECT request, fingerprint IS NOT NULL AS bound FROM idempotency.key WHERE scope = 'lease' AND key = 'digest';
SELECT pg_temp.age_lease('digest');
SELECT outcome FROM idempotency.try_claim('lease', 'digest', '{"amount": 2}', lease => '1 min');
SELECT outcome, attempt FROM idempotency.try_claim('lease', 'digest', '{"amount" : 1.0}', lease => '1 min');
SELECT request, fingerprint = idempotency.fingerprint('{"amount": 1}') AS bound FROM idempotency.key WHERE scope = 'lease' AND key = 'digest';

--
-- Claims without a lease
--

-- Such a claim waits for a running lease. It takes over an expired one with its
-- checkpoint but without a token, because the transaction itself is its lease. It
-- writes nothing before complete().
SELECT pg_temp.lease('within', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'within', :own, 'charged', '{"charge": 7}');
SELECT pg_temp.age_lease('within');
SELECT ctid AS old_ctid, xmin AS old_xmin FROM idempotency.key WHERE scope = 'lease' AND key = 'within' \gset
BEGIN;
SELECT outcome, replayed, token, attempt, recovery_point, state, retry_after, expires_at
	FROM idempotency.claim('lease', 'within', '{"amount": 1}');
-- extension only: the place of the row
SELECT ctid = :'old_ctid' AND xmin = :'old_xmin' AS untouched FROM idempotency.key WHERE scope = 'lease' AND key = 'within';
-- both editions
SELECT outcome FROM idempotency.try_claim('lease', 'within', '{"amount": 1}', lease => '1 min');
\set VERBOSITY terse
COMMIT;
\set VERBOSITY default
\echo :SQLSTATE
-- Rolling it back or releasing it leaves the lease unchanged, and the lease's owner can
-- still finish.
BEGIN;
SELECT outcome, attempt FROM idempotency.claim('lease', 'within');
ROLLBACK;
BEGIN;
SELECT outcome, attempt FROM idempotency.claim('lease', 'within');
SELECT idempotency.release('lease', 'within');
COMMIT;
-- extension only: the place of the row
SELECT ctid = :'old_ctid' AND xmin = :'old_xmin' AS untouched, attempt, recovery_point FROM idempotency.key WHERE scope = 'lease' AND key = 'within';
-- both editions
BEGIN;
SELECT idempotency.renew('lease', 'within', :own, '1 min') > now() AS renewed;
ROLLBACK;
-- complete() stores the outcome with the existing fingerprint and with the retention of
-- this claim.
BEGIN;
SELECT outcome, attempt FROM idempotency.claim('lease', 'within', retention => '2 hours');
SELECT idempotency.complete('lease', 'within', '"within"', 201);
COMMIT;
SELECT outcome, status, response, expires_at BETWEEN now() + interval '119 min' AND now() + interval '120 min' AS kept
	FROM idempotency.claim('lease', 'within', '{"amount": 1}', lease => '1 min');
SELECT outcome FROM idempotency.try_claim('lease', 'within', '{"amount": 2}');
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''within'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''within'', token => %s)', :own));
-- both editions
-- The first request determines the fingerprint of the outcome.
SELECT pg_temp.lease('within 2') > 0 AS leased;
SELECT pg_temp.age_lease('within 2');
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'within 2', '{"amount": 1}');
SELECT idempotency.complete('lease', 'within 2');
COMMIT;
SELECT outcome FROM idempotency.try_claim('lease', 'within 2', '{"amount": 2}');
-- In the transaction that took over, the token of the former owner is stale too.
SELECT pg_temp.lease('within 4') AS own \gset
SELECT pg_temp.age_lease('within 4');
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'within 4');
SELECT split_part(v.call, '(', 1) AS function, pg_temp.error_of(format('SELECT idempotency.' || v.call, :own)) AS error
	FROM (VALUES
		(1, 'renew(''lease'', ''within 4'', %s, ''1 min'')'),
		(2, 'checkpoint(''lease'', ''within 4'', %s, ''p'')'),
		(3, 'complete(''lease'', ''within 4'', token => %s)'),
		(4, 'fail(''lease'', ''within 4'', NULL, 400, token => %s)'),
		(5, 'release(''lease'', ''within 4'', %s)')) AS v (n, call) ORDER BY n;
ROLLBACK;
-- fail() stores a failure in the same way.
SELECT pg_temp.lease('within 3') > 0 AS leased;
SELECT pg_temp.age_lease('within 3');
BEGIN;
SELECT outcome FROM idempotency.claim('lease', 'within 3');
SELECT idempotency.fail('lease', 'within 3', '"no"', 402);
COMMIT;
SELECT outcome, failed, status FROM idempotency.claim('lease', 'within 3');

-- run() makes such a claim.
CREATE FUNCTION handler(request json) RETURNS json LANGUAGE sql AS 'SELECT request';
SELECT pg_temp.lease('run', '{"amount": 1}') AS own \gset
SELECT pg_temp.error_of('SELECT idempotency.run(''lease'', ''run'', ''{"amount": 1}'', ''handler(json)'', wait => ''0'')'),
	pg_temp.error_of('SELECT idempotency.run(''lease'', ''run'', ''{"amount": 2}'', ''handler(json)'', wait => ''0'')');
SELECT pg_temp.age_lease('run');
SELECT outcome, replayed, token, attempt, status, response, expires_at > now() AS retained
	FROM idempotency.run('lease', 'run', '{"amount": 1}', 'handler(json)');
SELECT outcome, response FROM idempotency.run('lease', 'run', '{"amount": 1}', 'handler(json)');
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''run'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''run'', token => %s)', :own));
-- both editions
DROP FUNCTION handler;

--
-- once() and forget() with leases
--

-- once() waits for a running lease, here until the timeout; once_many() does not wait.
-- Both errors leave nothing behind.
SELECT pg_temp.lease('inbox') AS own \gset
BEGIN;
SET LOCAL idempotency.wait = '10ms';
SELECT pg_temp.error_of('SELECT idempotency.once(''lease'', ''inbox'')'),
	pg_temp.error_of('SELECT * FROM idempotency.once_many(''lease'', ARRAY[''inbox before'', ''inbox'', ''inboxes''])');
COMMIT;
SELECT key, state FROM idempotency.keys WHERE scope = 'lease' AND key LIKE 'inbox%';
-- In the transaction that holds the lease, both raise an error too.
BEGIN;
SELECT pg_temp.lease('inbox here') AS own_here \gset
SELECT pg_temp.error_of('SELECT idempotency.once(''lease'', ''inbox here'')'),
	pg_temp.error_of('SELECT * FROM idempotency.once_many(''lease'', ARRAY[''inbox here''])');
ROLLBACK;
-- For an expired lease once() returns true, and the former owner is fenced off.
SELECT pg_temp.age_lease('inbox');
SELECT idempotency.once('lease', 'inbox'), idempotency.once('lease', 'inbox');
SELECT state, status FROM idempotency.keys WHERE scope = 'lease' AND key = 'inbox';
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.renew(''lease'', ''inbox'', %s, ''1 min'')', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('renew(''lease'', ''inbox'', %s, ''1 min'')', :own));
-- both editions
SELECT pg_temp.lease('inbox 2') AS own \gset
SELECT pg_temp.age_lease('inbox 2');
SELECT * FROM idempotency.once_many('lease', ARRAY['inbox', 'inbox 2', 'inbox 3']);
SELECT * FROM idempotency.once_many('lease', ARRAY['inbox', 'inbox 2', 'inbox 3']);
SELECT outcome, status, response FROM idempotency.claim('lease', 'inbox 2', lease => '1 min');
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''inbox 2'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''inbox 2'', token => %s)', :own));
-- both editions

-- forget() evicts a running or expired lease. Its owner is fenced off, and the next
-- owner is the first.
SELECT pg_temp.lease('evicted', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'evicted', :own, 'charged');
SELECT idempotency.forget('lease', 'evicted'), idempotency.forget('lease', 'evicted');
BEGIN;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''evicted'', token => %s)', :own));
ROLLBACK;
-- extension only: errors that are caught
SELECT pg_temp.caught(format('complete(''lease'', ''evicted'', token => %s)', :own));
-- both editions
SELECT outcome, attempt, recovery_point, token > :own AS grown FROM idempotency.claim('lease', 'evicted', '{"amount": 2}', lease => '1 min');
SELECT pg_temp.age_lease('evicted');
SELECT idempotency.forget('lease', 'evicted');
SELECT pg_temp.lease('evicted') > 0 AS leased;
SELECT pg_temp.age_lease('evicted', '25 hours');
SELECT idempotency.forget('lease', 'evicted');
-- A transaction cannot evict a lease that it holds.
BEGIN;
SELECT pg_temp.lease('evicted') > 0 AS leased;
SELECT idempotency.forget('lease', 'evicted');
ROLLBACK;

--
-- Savepoints
--

-- Rolling back a savepoint removes the leases that were taken in it,
BEGIN;
SAVEPOINT before;
SELECT pg_temp.lease('savepoint') AS own \gset
ROLLBACK TO before;
SELECT idempotency.peek('lease', 'savepoint') IS NULL AS absent;
SELECT outcome, attempt, token > :own AS grown FROM idempotency.claim('lease', 'savepoint', lease => '1 min');
ROLLBACK TO before;
SELECT pg_temp.error_of(format('SELECT idempotency.complete(''lease'', ''savepoint'', token => %s)', :own));
ROLLBACK;
-- and their locks;
BEGIN;
SAVEPOINT before;
SELECT pg_temp.lease('savepoint') > 0 AS leased;
-- extension only: locks of keys
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- both editions
ROLLBACK TO before;
SELECT count(*) AS key_locks FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;
-- releasing the savepoint keeps them.
BEGIN;
SAVEPOINT before;
SELECT pg_temp.lease('savepoint') AS own \gset
RELEASE before;
SELECT outcome FROM idempotency.try_claim('lease', 'savepoint', lease => '1 min');
COMMIT;
SELECT state FROM idempotency.keys WHERE scope = 'lease' AND key = 'savepoint';
-- Rolling back a heartbeat, a checkpoint, a takeover or an outcome undoes it, and the
-- owner continues from the earlier state.
BEGIN;
SAVEPOINT before;
SELECT idempotency.renew('lease', 'savepoint', :own, '1 hour') > now() AS renewed;
SELECT FROM idempotency.checkpoint('lease', 'savepoint', :own, 'undone');
ROLLBACK TO before;
SELECT recovery_point, leased_until < now() + interval '2 min' AS as_before FROM idempotency.key WHERE scope = 'lease' AND key = 'savepoint';
SELECT idempotency.complete('lease', 'savepoint', '"undone"', token => :own);
ROLLBACK TO before;
SELECT FROM idempotency.checkpoint('lease', 'savepoint', :own, 'charged');
SAVEPOINT checkpointed;
SELECT idempotency.release('lease', 'savepoint', :own);
SELECT outcome, attempt FROM idempotency.claim('lease', 'savepoint', lease => '1 min');
ROLLBACK TO checkpointed;
SELECT idempotency.renew('lease', 'savepoint', :own, '1 min') > now() AS renewed;
COMMIT;
SELECT attempt, recovery_point, token = :own AS same_token FROM idempotency.key WHERE scope = 'lease' AND key = 'savepoint';
SELECT idempotency.complete('lease', 'savepoint', '"done"', token => :own);
-- The same holds in the transaction that took the lease: the rollback opens the claim
-- again.
BEGIN;
SELECT pg_temp.lease('reopened') AS own \gset
SAVEPOINT before;
SELECT idempotency.complete('lease', 'reopened', '"undone"');
ROLLBACK TO before;
SELECT idempotency.release('lease', 'reopened', :own);
ROLLBACK TO before;
SELECT idempotency.complete('lease', 'reopened', '"done"');
COMMIT;
SELECT outcome, response FROM idempotency.claim('lease', 'reopened');

-- Under every isolation level a transaction sees its own lease.
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT pg_temp.lease('serializable') AS own \gset
SELECT idempotency.renew('lease', 'serializable', :own, '1 min') > now() AS renewed;
SELECT FROM idempotency.checkpoint('lease', 'serializable', :own, 'begun');
SELECT idempotency.complete('lease', 'serializable', '"done"', token => :own);
SELECT outcome, response FROM idempotency.claim('lease', 'serializable');
COMMIT;
SELECT pg_temp.lease('repeatable read') AS own \gset
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) > 0 AS snapshot FROM idempotency.key;
SELECT FROM idempotency.checkpoint('lease', 'repeatable read', :own, 'begun');
SELECT idempotency.renew('lease', 'repeatable read', :own, '1 min') > now() AS renewed;
SELECT idempotency.complete('lease', 'repeatable read', '"done"', token => :own);
COMMIT;

--
-- Guards
--

CREATE TABLE guarded (key text DEFAULT idempotency.current_key('lease'));
CREATE TRIGGER require_claim BEFORE INSERT ON guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('lease');
-- A claim with a lease opens the guard, like one without. So do a heartbeat and a
-- checkpoint in a later transaction, because each holds the operation until the
-- transaction ends.
BEGIN;
SELECT pg_temp.lease('guarded') AS own \gset
INSERT INTO guarded DEFAULT VALUES;
COMMIT;
INSERT INTO guarded DEFAULT VALUES;
\echo :SQLSTATE
BEGIN;
SELECT idempotency.renew('lease', 'guarded', :own, '1 min') > now() AS renewed, idempotency.current_key('lease');
INSERT INTO guarded DEFAULT VALUES;
COMMIT;
BEGIN;
SELECT idempotency.checkpoint('lease', 'guarded', :own, 'charged') IS NOT NULL AS checkpoint, idempotency.current_key('lease');
INSERT INTO guarded DEFAULT VALUES;
-- The guard stays open after complete(), and closes with release().
SAVEPOINT before;
SELECT idempotency.complete('lease', 'guarded', token => :own);
INSERT INTO guarded DEFAULT VALUES;
ROLLBACK TO before;
SELECT idempotency.release('lease', 'guarded', :own), idempotency.current_key('lease');
INSERT INTO guarded DEFAULT VALUES;
\echo :SQLSTATE
ROLLBACK TO before;
SELECT idempotency.renew('lease', 'guarded', :own, '1 min') > now() AS renewed;
COMMIT;
-- A call that is not granted closes the guard: another owner's lease, a replay, or a
-- lost lease.
BEGIN;
SELECT outcome, idempotency.current_key('lease') FROM idempotency.try_claim('lease', 'guarded', lease => '1 min');
SAVEPOINT before;
INSERT INTO guarded DEFAULT VALUES;
ROLLBACK TO before;
SELECT outcome FROM idempotency.claim('lease', 'stored', lease => '1 min');
INSERT INTO guarded DEFAULT VALUES;
ROLLBACK;
BEGIN;
SELECT pg_temp.error_of('SELECT idempotency.renew(''lease'', ''guarded'', 0, ''1 min'')');
INSERT INTO guarded DEFAULT VALUES;
\echo :SQLSTATE
ROLLBACK;
-- A takeover opens it.
SELECT pg_temp.age_lease('guarded');
BEGIN;
SELECT outcome, idempotency.current_key('lease') FROM idempotency.claim('lease', 'guarded', lease => '1 min');
INSERT INTO guarded DEFAULT VALUES;
COMMIT;
SELECT key, count(*) FROM guarded GROUP BY key;
DROP TABLE guarded;

--
-- Storage
--

-- complete() clears the columns of the lease.
SELECT count(*) AS finished, count(token) AS token, count(attempt) AS attempt, count(leased_at) AS leased_at,
		count(leased_until) AS leased_until, count(recovery_point) AS recovery_point, count(recovery_state) AS state,
		count(request) AS request, count(retention) AS retention
	FROM idempotency.key WHERE scope = 'lease' AND key IN ('late', 'fenced', 'steps', 'within', 'kept', 'for ever', 'savepoint');
-- Rows without a lease use no space for these columns: a page holds as many rows as in
-- a table without them.
BEGIN;
TRUNCATE idempotency.key;
SELECT count(*) FROM idempotency.once_many('lease', ARRAY(SELECT to_char(n, 'FM00000000') FROM generate_series(1, 500) AS n));
-- extension only: the size of a row
SELECT count(*) AS rows_on_a_page, 8168 / (4 + 24 + 8 + 8 + 6 + 9 + 1) AS expected FROM idempotency.key WHERE ctid < '(1,0)';
-- both editions
TRUNCATE idempotency.key;
WITH c AS MATERIALIZED (SELECT n, (idempotency.claim('lease', to_char(n, 'FM00000000'), '1', lease => '1 min')).token FROM generate_series(1, 500) AS n)
	SELECT count(idempotency.complete('lease', to_char(n, 'FM00000000'), 'null', token => token)) FROM c;
ROLLBACK;

-- A heartbeat writes one row version and no index entry, and so does a checkpoint.
CREATE FUNCTION pg_temp.writes(OUT inserted bigint, OUT updated bigint, OUT hot bigint, OUT deleted bigint)
	LANGUAGE sql AS $$
	SELECT pg_stat_get_xact_tuples_inserted('idempotency.key'::regclass),
		pg_stat_get_xact_tuples_updated('idempotency.key'::regclass),
		pg_stat_get_xact_tuples_hot_updated('idempotency.key'::regclass),
		pg_stat_get_xact_tuples_deleted('idempotency.key'::regclass)
$$;
BEGIN;
TRUNCATE idempotency.key;
-- not distributed: claims write once more
SELECT * FROM pg_temp.writes() \gset before_
SELECT pg_temp.lease('hot') AS own \gset
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated, hot - :before_hot AS hot, deleted - :before_deleted AS deleted FROM pg_temp.writes();
SELECT count(idempotency.renew('lease', 'hot', :own, '1 min')) AS renewals FROM generate_series(1, 5);
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated, hot - :before_hot AS hot, deleted - :before_deleted AS deleted FROM pg_temp.writes();
SELECT FROM idempotency.checkpoint('lease', 'hot', :own, 'charged', '{"charge": 7}');
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated, hot - :before_hot AS hot, deleted - :before_deleted AS deleted FROM pg_temp.writes();
-- A release, a takeover and an outcome also write one row version.
SELECT idempotency.release('lease', 'hot', :own);
SELECT outcome, token AS own FROM idempotency.claim('lease', 'hot', lease => '1 min') \gset
SELECT idempotency.complete('lease', 'hot', token => :own);
SELECT inserted - :before_inserted AS inserted, updated - :before_updated AS updated, deleted - :before_deleted AS deleted FROM pg_temp.writes();
-- both layouts
ROLLBACK;

-- A heartbeat, a checkpoint or a takeover does not rewrite a TOASTed request; the
-- request is deleted with the lease.
SELECT format('SELECT coalesce(string_agg(DISTINCT chunk_id::text, '','' ORDER BY chunk_id::text), ''none'') FROM %s', reltoastrelid::regclass) AS chunks,
		reltoastrelid::regclass AS toast
	FROM pg_class WHERE oid = 'idempotency.key'::regclass \gset
SELECT string_agg(md5(n::text), '') AS noise FROM generate_series(1, 10000) AS n \gset
SELECT (:chunks) AS other_chunks \gset
SELECT pg_temp.lease('large', to_json(:'noise'::text)) AS own \gset
SELECT (:chunks) AS before, pg_relation_size(:'toast') AS bytes \gset
SELECT :'before' <> :'other_chunks' AS out_of_line;
SELECT count(idempotency.renew('lease', 'large', :own, '1 min')) AS renewals FROM generate_series(1, 50);
SELECT FROM idempotency.checkpoint('lease', 'large', :own, 'charged', '{"charge": 7}');
SELECT pg_temp.age_lease('large');
SELECT outcome, attempt, token AS own FROM idempotency.claim('lease', 'large', to_json(:'noise'::text), lease => '1 min') \gset taken_
\echo :taken_outcome :taken_attempt
SELECT (:chunks) = :'before' AS same_chunks, pg_relation_size(:'toast') <= :bytes AS not_grown;
SELECT md5(request #>> '{}') = md5(:'noise') AS same FROM idempotency.key WHERE scope = 'lease' AND key = 'large';
-- Each checkpoint stores its state anew and deletes the old state.
SELECT FROM idempotency.checkpoint('lease', 'large', :taken_own, 'large state', to_json(reverse(:'noise'::text)));
SELECT idempotency.renew('lease', 'large', :taken_own, '1 min') > now() AS renewed;
SELECT cardinality(string_to_array((:chunks), ',')) - cardinality(string_to_array(:'before', ',')) AS more_out_of_line;
SELECT md5(recovery_state #>> '{}') = md5(reverse(:'noise')) AS same FROM idempotency.key WHERE scope = 'lease' AND key = 'large';
SELECT idempotency.complete('lease', 'large', '"small"', token => :taken_own);
SELECT (:chunks) = :'other_chunks' AS all_gone;

-- Leases work after an administrator changed the table.
SELECT pg_temp.lease('maintained', '{"amount": 1}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'maintained', :own, 'charged', '{"charge": 7}');
VACUUM FULL idempotency.key;
SELECT idempotency.renew('lease', 'maintained', :own, '1 min') > now() AS renewed;
CLUSTER idempotency.key USING key_pkey;
ALTER TABLE idempotency.key SET WITHOUT CLUSTER;
REINDEX TABLE CONCURRENTLY idempotency.key;
SELECT idempotency.renew('lease', 'maintained', :own, '1 min') > now() AS renewed;
CREATE INDEX key_leased_until ON idempotency.key (leased_until);
SELECT idempotency.renew('lease', 'maintained', :own, '2 min') > now() AS renewed;
SET enable_seqscan = off;
SELECT key, recovery_point FROM idempotency.key WHERE leased_until BETWEEN now() + interval '90 s' AND now() + interval '3 min' AND key = 'maintained';
RESET enable_seqscan;
DROP INDEX idempotency.key_leased_until;
SELECT idempotency.complete('lease', 'maintained', token => :own);
SELECT outcome FROM idempotency.try_claim('lease', 'maintained', '{"amount": 2}');

--
-- Views
--

SELECT idempotency.forget('lease', key) FROM idempotency.key WHERE scope = 'lease' \g /dev/null
-- extension only: the type of the keys
\d idempotency.zombies
-- both editions
SELECT pg_temp.lease('running', '{"request": "secret"}') AS running \gset
SELECT pg_temp.lease('checkpointed') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'checkpointed', :own, 'charged', '{"state": "secret"}');
SELECT pg_temp.lease('given back') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'given back', :own, 'begun');
SELECT idempotency.release('lease', 'given back', :own);
SELECT pg_temp.lease('expired', '{"request": "secret"}') AS own \gset
SELECT FROM idempotency.checkpoint('lease', 'expired', :own, 'booked', '{"state": "secret"}');
SELECT pg_temp.age_lease('expired', '3 hours');
SELECT token AS own FROM idempotency.claim('lease', 'expired, twice', lease => '1 min', retention => '-1 second') \gset
SELECT pg_temp.age_lease('expired, twice');
SELECT outcome FROM idempotency.claim('lease', 'expired, twice', lease => '1 min', retention => '-1 second');
SELECT pg_temp.age_lease('expired, twice', '2 hours');
SELECT pg_temp.lease('begins in an hour') > 0 AS leased;
SELECT pg_temp.age_lease('begins in an hour', '-1 hour');
SELECT pg_temp.lease('long gone') > 0 AS leased;
SELECT pg_temp.age_lease('long gone', '25 hours');
SELECT idempotency.once('lease', 'seen');
SELECT key, state, status, response_size, fingerprint IS NOT NULL AS fingerprint FROM idempotency.keys WHERE scope = 'lease' ORDER BY key;
SELECT key, attempt, recovery_point, round(extract(epoch FROM age) / 3600) AS hours_old,
		round(extract(epoch FROM overdue) / 3600) AS hours_overdue, round(extract(epoch FROM expires_in) / 3600) AS expires_in_hours,
		leased_until < now() AS over,
		concat(extract(microseconds FROM age)::int % 1000000, extract(microseconds FROM overdue)::int % 1000000,
			extract(microseconds FROM expires_in)::int % 1000000) AS fractions
	FROM idempotency.zombies WHERE scope = 'lease' ORDER BY key;
-- Neither view shows a request, a state or a token.
SELECT count(*) AS leaks FROM idempotency.keys AS k WHERE scope = 'lease' AND k::text ~ 'secret';
SELECT count(*) AS leaks FROM idempotency.zombies AS z WHERE scope = 'lease' AND z::text ~ 'secret';
-- A heartbeat or a takeover makes an expired lease run again.
SELECT token AS own FROM idempotency.key WHERE scope = 'lease' AND key = 'expired' \gset
SELECT idempotency.renew('lease', 'expired', :own, '1 min') > now() AS renewed;
SELECT outcome FROM idempotency.claim('lease', 'expired, twice', lease => '1 min');
SELECT key FROM idempotency.zombies WHERE scope = 'lease' ORDER BY key;

--
-- Read-only transactions and recovery
--

BEGIN READ ONLY;
-- A function that writes refuses before it looks at its arguments.
SELECT call, pg_temp.error_of('SELECT idempotency.' || call) FROM unnest(ARRAY[
	'claim(''lease'', '''', lease => ''1 min'')',
	'try_claim(''lease'', '''', lease => ''1 min'')',
	'claim_abandoned(''lease'', ''1 min'', 0)',
	'once(''lease'', '''')',
	'once_many(''lease'', ARRAY[''''])',
	'forget(''lease'', '''')',
	'reap(-1)',
	'renew(''lease'', ''running'', 1, ''1 min'')',
	'checkpoint(''lease'', ''running'', 1, ''p'')',
	'complete(''lease'', ''running'', token => 1)',
	'release(''lease'', ''running'', 1)']) AS call;
SELECT outcome, attempt, token FROM idempotency.peek('lease', 'running');
ROLLBACK;
-- extension only: errors that are caught
BEGIN READ ONLY;
SELECT pg_temp.error_of('SELECT idempotency.renew(''lease'', ''running'', 1, ''1 min'')');
COMMIT;
-- both editions
SELECT idempotency.complete('lease', 'running', token => :running);

-- An error that the server raises before the call has no effect, because the function
-- did not run.
BEGIN;
SELECT left(pg_temp.error_of('SELECT idempotency.complete(''lease'', ''running'', ''{bad''::json, token => 0)'), 5) AS error;
COMMIT;
\echo :SQLSTATE

-- extension only: the sequence of the tokens
-- Afterwards lastval() returns the token.
SELECT outcome FROM idempotency.claim('lease', 'last value', lease => '1 min');
SELECT lastval() = currval('idempotency.token') AS of_the_token;
-- both editions

DROP TABLE effect;
DELETE FROM idempotency.key WHERE scope = 'lease';
