-- reaper at rest: expired rows stay
--
-- The view keys: stored records for operators, without bodies.
--
\set SHOW_CONTEXT never

-- extension only: the type of the keys
\d idempotency.keys

-- both editions
-- One record in every state.
BEGIN;
SELECT (idempotency.claim('keys', k, '{"request": "of this row"}')).outcome FROM unnest('{completed,failed,nothing}'::text[]) AS k;
SELECT idempotency.complete('keys', 'completed', '{"card": "4242-secret"}', 201, '{"X-Header": "secret"}');
SELECT idempotency.fail('keys', 'failed', '{"reason": "secret"}', 402);
SELECT idempotency.complete('keys', 'nothing');
SELECT outcome FROM idempotency.claim('keys', 'for ever', retention => '-1 second');
SELECT idempotency.complete('keys', 'for ever', 'true');
SELECT outcome FROM idempotency.claim('keys', 'expired', retention => '1 millisecond');
SELECT idempotency.fail('keys', 'expired', NULL, 500);
SELECT idempotency.once('keys', 'seen');
SELECT idempotency.once('keys', 'seen and expired', '1 millisecond');
COMMIT;
SELECT pg_sleep(0.01);

SELECT key, state, status, response_size IS NOT NULL AS has_response,
		fingerprint = encode(idempotency.fingerprint('{"request": "of this row"}'), 'hex') AS fingerprint_in_hex
	FROM idempotency.keys WHERE scope = 'keys' ORDER BY key;

-- Times come from the record, in whole seconds relative to now.
SELECT k.key, v.created_at = k.created_at AND v.expires_at = k.expires_at AS same_times,
		v.age BETWEEN '0 s' AND '1 min' AS age,
		v.expires_in BETWEEN '23:58:00' AND '24:00:00' AS expires_in_a_day,
		v.expires_in <= '0 s' AS over,
		extract(microseconds FROM v.age)::int % 1000000 AS fraction
	FROM idempotency.keys v JOIN idempotency.key k USING (scope, key) WHERE scope = 'keys' ORDER BY k.key;

-- The size is human-readable.
SELECT key, response_size ~ '^[0-9]+ (bytes|kB|MB)$' AS readable FROM idempotency.keys
	WHERE scope = 'keys' AND response_size IS NOT NULL ORDER BY key;

-- The view shows no body, header or request.
SELECT count(*) AS leaks FROM idempotency.keys AS k WHERE scope = 'keys' AND k::text ~* 'secret|card|x-header|of this row';
SELECT count(*) AS kept FROM idempotency.key AS k WHERE scope = 'keys' AND k::text ~* 'secret';

-- An open claim is absent, because nothing is stored for it.
BEGIN;
SELECT outcome FROM idempotency.claim('keys', 'open');
-- extension only: when the row is written
SELECT count(*) FROM idempotency.keys WHERE scope = 'keys' AND key = 'open';
-- both editions
ROLLBACK;

-- No view can be updated, also by a superuser.
SELECT table_name FROM information_schema.views WHERE table_schema = 'idempotency' AND 'YES' IN (is_updatable, is_insertable_into);
DELETE FROM idempotency.keys;
\echo :SQLSTATE

-- The index finds one key, and one scope.
SET enable_seqscan = off;
SET enable_bitmapscan = off;
-- extension only: the type of the keys
EXPLAIN (COSTS OFF) SELECT state FROM idempotency.keys WHERE scope = 'keys' AND key = 'completed';
-- both editions
EXPLAIN (COSTS OFF) SELECT state FROM idempotency.keys WHERE scope = 'keys';
-- The index also finds a prefix of scopes under every locale, because the column is
-- COLLATE "C".
EXPLAIN (COSTS OFF) SELECT state FROM idempotency.keys WHERE scope LIKE 'tenant1/%';
RESET enable_seqscan;
RESET enable_bitmapscan;
