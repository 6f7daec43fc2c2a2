--
-- When an operation was created, and when its outcome expires: created_at stays that of the
-- first owner, and complete() and fail() can override the claim's retention.
--
\set SHOW_CONTEXT never

-- Makes the key an hour old: a lease on it is over.
CREATE FUNCTION pg_temp.age(p_key text) RETURNS void LANGUAGE sql AS $$
	UPDATE idempotency.key SET created_at = created_at - interval '1 hour', leased_at = leased_at - interval '1 hour',
			leased_until = leased_until - interval '1 hour'
		WHERE scope = 'times' AND key = p_key
$$;
-- The age of the operation in hours, and for how many hours its outcome stays.
CREATE FUNCTION pg_temp.times(p_key text, OUT state text, OUT hours_old int, OUT hours_kept int) LANGUAGE sql AS $$
	SELECT state, round(extract(epoch FROM now() - created_at) / 3600), round(extract(epoch FROM expires_at - now()) / 3600)
		FROM idempotency.keys WHERE scope = 'times' AND key = p_key
$$;

-- created_at: the owner of a lease completes, fails, checkpoints, renews and releases.
SELECT token FROM idempotency.claim('times', 'completed', lease => '2 hours') \gset
SELECT pg_temp.age('completed');
SELECT idempotency.renew('times', 'completed', :token, '3 hours') > now() AS renewed;
SELECT FROM idempotency.checkpoint('times', 'completed', :token, 'charged');
SELECT * FROM pg_temp.times('completed');
SELECT idempotency.complete('times', 'completed', token => :token);
SELECT * FROM pg_temp.times('completed');
SELECT token FROM idempotency.claim('times', 'failed', lease => '2 hours') \gset
SELECT pg_temp.age('failed');
SELECT idempotency.fail('times', 'failed', '"no"', 400, token => :token);
SELECT * FROM pg_temp.times('failed');
SELECT token FROM idempotency.claim('times', 'released', lease => '2 hours') \gset
SELECT FROM idempotency.checkpoint('times', 'released', :token, 'charged');
SELECT pg_temp.age('released');
SELECT idempotency.release('times', 'released', :token);
SELECT outcome, token FROM idempotency.claim('times', 'released', lease => '1 hour') \gset
SELECT * FROM pg_temp.times('released');
SELECT idempotency.complete('times', 'released', token => :token);
SELECT * FROM pg_temp.times('released');

-- The next owner, with a lease and without one, in two transactions and in one.
SELECT (idempotency.claim('times', 'taken over ' || i, lease => '1 minute')).outcome, pg_temp.age('taken over ' || i)
	FROM generate_series(1, 6) AS i;
SELECT outcome, token FROM idempotency.claim('times', 'taken over 1', lease => '1 hour') \gset
SELECT :'outcome' AS outcome, idempotency.complete('times', 'taken over 1', token => :token);
BEGIN;
SELECT outcome FROM idempotency.claim('times', 'taken over 2');
SELECT idempotency.complete('times', 'taken over 2');
SELECT outcome FROM idempotency.claim('times', 'taken over 3', lease => '1 hour');
SELECT idempotency.fail('times', 'taken over 3', NULL, 400);
COMMIT;
SELECT token FROM idempotency.claim_abandoned('times', '1 hour') WHERE key = 'taken over 4' \gset
SELECT idempotency.complete('times', 'taken over 4', token => :token);
SELECT idempotency.once('times', 'taken over 5');
SELECT idempotency.once_many('times', '{taken over 6}');
SELECT i, t.* FROM generate_series(1, 6) AS i, pg_temp.times('taken over ' || i) AS t ORDER BY i;

-- The next operation under an expired key is a new one.
BEGIN;
SELECT outcome FROM idempotency.claim('times', 'reused');
SELECT idempotency.complete('times', 'reused');
COMMIT;
SELECT pg_temp.age('reused');
UPDATE idempotency.key SET expires_at = now() - interval '1 minute' WHERE scope = 'times' AND key = 'reused';
BEGIN;
SELECT outcome FROM idempotency.claim('times', 'reused');
SELECT idempotency.complete('times', 'reused');
COMMIT;
SELECT * FROM pg_temp.times('reused');

-- retention: that of the call, of the claim, of the setting, in this order.
SET idempotency.retention = '3h';
BEGIN;
SELECT (idempotency.claim('times', 'kept ' || i, retention => '5 hours')).outcome FROM generate_series(1, 6) AS i;
SELECT idempotency.complete('times', 'kept 1');
SELECT idempotency.complete('times', 'kept 2', retention => '7 hours');
SELECT idempotency.fail('times', 'kept 3', NULL, 400, retention => '1 hour');
SELECT idempotency.complete('times', 'kept 4', retention => '-1 second');
SELECT idempotency.complete('times', 'kept 5', retention => NULL);
SELECT idempotency.complete('times', 'kept 6', NULL, 200, NULL, NULL, '9 hours');
COMMIT;
SELECT token FROM idempotency.claim('times', 'kept 7', lease => '1 hour', retention => '5 hours') \gset
SELECT idempotency.complete('times', 'kept 7', token => :token, retention => '11 hours');
SELECT token FROM idempotency.claim('times', 'kept 8', lease => '1 hour') \gset
SELECT idempotency.fail('times', 'kept 8', NULL, 400, token => :token, retention => '-1 second');
SELECT i, t.* FROM generate_series(1, 8) AS i, pg_temp.times('kept ' || i) AS t ORDER BY i;
RESET idempotency.retention;

-- An invalid retention is refused, and the claim stays open.
BEGIN;
SELECT outcome FROM idempotency.claim('times', 'invalid');
SAVEPOINT s;
SELECT idempotency.complete('times', 'invalid', retention => '0');
ROLLBACK TO s;
SELECT idempotency.fail('times', 'invalid', NULL, 400, retention => '-2 seconds');
ROLLBACK TO s;
SELECT idempotency.complete('times', 'invalid', retention => '178000000 years');
ROLLBACK TO s;
SELECT idempotency.complete('times', 'invalid', retention => '1 hour');
COMMIT;

-- The fingerprint of a stored request is in the result of peek(), and nowhere else.
BEGIN;
SELECT fingerprint IS NULL AS hidden FROM idempotency.claim('times', 'fingerprint', '{"a": 1}');
SELECT idempotency.complete('times', 'fingerprint');
COMMIT;
SELECT outcome, fingerprint = idempotency.fingerprint('{"a": 1}') AS stored FROM idempotency.peek('times', 'fingerprint');
SELECT outcome, fingerprint IS NULL AS hidden FROM idempotency.claim('times', 'fingerprint', '{"a": 1}');
SELECT outcome, fingerprint IS NULL AS hidden FROM idempotency.try_claim('times', 'fingerprint', '{"a": 2}');
SELECT outcome, fingerprint FROM idempotency.peek('times', 'completed');
SELECT outcome FROM idempotency.claim('times', 'leased', fingerprint => '\x000102030405060708090a0b0c0d0e0f', lease => '1 hour');
SELECT outcome, fingerprint FROM idempotency.peek('times', 'leased');
SELECT outcome, fingerprint IS NULL AS hidden FROM idempotency.try_claim('times', 'leased');
SELECT idempotency.forget('times', 'leased');

DELETE FROM idempotency.key WHERE scope = 'times';
