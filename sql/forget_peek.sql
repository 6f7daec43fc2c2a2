--
-- peek() looks and forget() evicts, neither of them claims.
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

-- It gives what is stored, byte for byte, whatever the request was.
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS remembered
	FROM idempotency.peek('peek', 'done');
SELECT outcome, replayed, status, headers, response, failed, expires_at > now() AS remembered
	FROM idempotency.peek('peek', 'failed');
SELECT outcome, expires_at FROM idempotency.peek('peek', 'kept for ever');

-- NULL where there is nothing: as a value, and as one row of NULLs in FROM.
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
SELECT * FROM idempotency.peek('peek', 'unknown');
SELECT idempotency.peek('PEEK', 'done') IS NULL AS absent;

-- It claims nothing: there is nothing to complete, and nothing to miss at commit.
BEGIN;
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
COMMIT;

-- An open claim is invisible, one that this transaction completed is not.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'open');
SELECT idempotency.peek('peek', 'open') IS NULL AS absent;
SELECT idempotency.complete('peek', 'open', '1');
SELECT response FROM idempotency.peek('peek', 'open');
ROLLBACK;
SELECT idempotency.peek('peek', 'open') IS NULL AS absent;

-- It reads as of its statement, like any query in it.
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

-- It works where nothing can be written.
BEGIN READ ONLY;
SELECT status FROM idempotency.peek('peek', 'done');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY;
SELECT status FROM idempotency.peek('peek', 'done');
SELECT idempotency.peek('peek', 'unknown') IS NULL AS absent;
COMMIT;

-- A scope and a key are checked as always.
SELECT pg_temp.error_of(s) FROM unnest(ARRAY[
	'SELECT idempotency.peek(NULL, ''key'')',
	'SELECT idempotency.peek(''peek'', NULL)',
	'SELECT idempotency.peek(''peek'', '''')',
	'SELECT idempotency.peek(repeat(''s'', 256), ''key'')',
	'SELECT idempotency.peek(''peek'', E''\t'')']) AS s;

--
-- forget()
--

-- True if there was something to forget; the next claim runs.
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

-- An inbox record, and one that is kept for ever.
SELECT idempotency.once('peek', 'message'), idempotency.once('peek', 'message');
SELECT idempotency.forget('peek', 'message'), idempotency.forget('peek', 'kept for ever');
SELECT idempotency.once('peek', 'message');

-- An expired record is removed, but it was forgotten already.
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'expired';
SELECT idempotency.forget('peek', 'expired');
SELECT count(*) FROM idempotency.key WHERE scope = 'peek' AND key = 'expired';

-- It goes with its transaction.
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

-- In one transaction it can be forgotten, claimed and forgotten again.
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

-- What this transaction holds is not there to be forgotten.
BEGIN;
SELECT outcome FROM idempotency.claim('peek', 'held');
SELECT idempotency.forget('peek', 'held');
\echo :SQLSTATE
ROLLBACK;

-- It is no claim: there is nothing to complete, and nothing to miss at commit; the
-- key's lock is held only where something was removed.
BEGIN;
SELECT idempotency.forget('peek', 'unknown');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
SELECT idempotency.forget('peek', 'failed');
SELECT count(*) AS key_locks FROM pg_locks
	WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid = 18756;
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
