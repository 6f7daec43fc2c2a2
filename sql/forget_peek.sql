-- reaper at rest: expired rows stay
--
-- peek() reads and forget() evicts a record; neither claims the key.
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

BEGIN;
SELECT (idempotency.claim('peek', k)).outcome FROM unnest('{done,failed,kept for ever}'::text[]) AS k;
SELECT idempotency.complete('peek', 'done', '{ "b":1, "a":2 }', 201, '{"X":"1"}');
SELECT idempotency.fail('peek', 'failed', '"no"', 402);
SELECT idempotency.release('peek', 'kept for ever');
SELECT outcome FROM idempotency.claim('peek', 'kept for ever', retention => '-1 second');
SELECT idempotency.complete('peek', 'kept for ever');
COMMIT;

--
-- peek()
--

-- peek() returns the stored outcome byte for byte, without comparing requests.
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.peek('peek', 'done');
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS retained
	FROM idempotency.peek('peek', 'failed');
SELECT outcome, expires_at FROM idempotency.peek('peek', 'kept for ever');

-- Without a record it returns NULL: as a value, and as one row of NULLs in FROM.
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
SELECT * FROM idempotency.peek('peek', 'unknown');
SELECT idempotency.peek('PEEK', 'done') IS NULL AS absent;

-- It claims nothing: complete() finds no claim, and commit succeeds.
BEGIN;
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- It does not see an open claim, but sees one that this transaction completed.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'open');
SELECT idempotency.peek('peek', 'open') IS NULL AS absent;
SELECT idempotency.complete('peek', 'open', '1');
SELECT response FROM idempotency.peek('peek', 'open');
ROLLBACK;
SELECT idempotency.peek('peek', 'open') IS NULL AS absent;

-- It uses the snapshot of its statement, like a query.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'same statement');
WITH done AS MATERIALIZED (SELECT idempotency.complete('peek', 'same statement', '1'))
SELECT idempotency.peek('peek', 'same statement') IS NULL AS absent FROM done;
SELECT response FROM idempotency.peek('peek', 'same statement');
ROLLBACK;

-- An expired record counts as absent.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'expired', retention => '1 millisecond');
SELECT idempotency.complete('peek', 'expired', '1');
COMMIT;
SELECT pg_sleep(0.01);
SELECT idempotency.peek('peek', 'expired') IS NULL AS absent;

-- It works in a read-only transaction.
BEGIN READ ONLY;
SELECT status FROM idempotency.peek('peek', 'done');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT status FROM idempotency.peek('peek', 'done');
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
COMMIT;

-- Scope and key are checked as everywhere.
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.peek(NULL, ''key'')',
	'SELECT idempotency.peek(''peek'', NULL)',
	'SELECT idempotency.peek(''peek'', '''')',
	'SELECT idempotency.peek(repeat(''s'', 256), ''key'')',
	'SELECT idempotency.peek(''peek'', E''\t'')']) AS s;

--
-- forget()
--

-- forget() returns true if it removed a record; the next claim runs.
SELECT idempotency.forget('peek', 'done');
SELECT idempotency.forget('peek', 'done');
SELECT idempotency.forget('peek', 'unknown');
SELECT idempotency.peek('peek', 'done') IS NULL AS absent;
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'done';
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'done', '{"another": "request"}');
SELECT idempotency.complete('peek', 'done', '"again"');
COMMIT;
SELECT response FROM idempotency.peek('peek', 'done');

-- It removes an inbox record, and one with infinite retention.
SELECT idempotency.once('peek', 'message'), idempotency.once('peek', 'message');
SELECT idempotency.forget('peek', 'message'), idempotency.forget('peek', 'kept for ever');
SELECT idempotency.once('peek', 'message');

-- It removes an expired record, but returns false.
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'expired';
SELECT idempotency.forget('peek', 'expired');
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'expired';

-- Rollback undoes it.
BEGIN;
SELECT idempotency.forget('peek', 'failed');
SELECT idempotency.peek('peek', 'failed') IS NULL AS absent;
ROLLBACK;
SELECT status FROM idempotency.peek('peek', 'failed');
BEGIN;
SAVEPOINT s;
SELECT idempotency.forget('peek', 'failed');
ROLLBACK TO s;
COMMIT;
SELECT status FROM idempotency.peek('peek', 'failed');

-- One transaction can forget a key, claim it and forget it again.
BEGIN;
SELECT idempotency.forget('peek', 'failed');
SELECT outcome FROM idempotency.claim('peek', 'failed');
SELECT idempotency.complete('peek', 'failed', '"second"');
SELECT idempotency.forget('peek', 'failed');
SELECT idempotency.forget('peek', 'failed');
SELECT outcome FROM idempotency.claim('peek', 'failed');
SELECT idempotency.complete('peek', 'failed', '"third"');
COMMIT;
SELECT response FROM idempotency.peek('peek', 'failed');
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'failed';

-- It refuses a key that this transaction holds.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'held');
SELECT idempotency.forget('peek', 'held');
\echo :SQLSTATE
ROLLBACK;

-- It is not a claim: complete() finds none, and commit succeeds. It keeps the lock of
-- the key only if it removed a record.
BEGIN;
SELECT idempotency.forget('peek', 'unknown');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idempotency.forget('peek', 'failed');
-- extension only: locks of keys
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
-- both editions
COMMIT;

SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.forget(NULL, ''key'')',
	'SELECT idempotency.forget(''peek'', NULL)',
	'SELECT idempotency.forget('''', ''key'')',
	'SELECT idempotency.forget(''peek'', repeat(''k'', 256))',
	'SELECT idempotency.forget(''peek'', E''\x1b[0m'')']) AS s;
BEGIN READ ONLY;
SELECT idempotency.forget('peek', 'done');
\echo :SQLSTATE
ROLLBACK;

-- A deletion leaves a line in the log with the role that called, and a call that deletes
-- nothing leaves none.
CREATE ROLE regress_forget;
SELECT idempotency.grant_operator('regress_forget');
SET ROLE regress_forget;
SET client_min_messages = log;
SELECT idempotency.forget('peek', 'done'), idempotency.forget('peek', 'done');
RESET client_min_messages;
RESET ROLE;
DROP OWNED BY regress_forget;
DROP ROLE regress_forget;
