-- portable only: the extension stores no numbers of transactions
--
-- Rows that a dump brought from another server: they bear numbers that transactions of this
-- server get later.
--
\set SHOW_CONTEXT never

-- The outcome of a query about such a row, which is rolled back.
CREATE FUNCTION pg_temp.try(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	answer text;
BEGIN
	EXECUTE statement INTO answer;
	RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
EXCEPTION
	WHEN SQLSTATE 'P9999' THEN
		RETURN coalesce(answer, 'NULL');
	WHEN OTHERS THEN
		RETURN SQLSTATE || ': ' || SQLERRM;
END
$$;
-- The number of this transaction in the key table.
CREATE FUNCTION pg_temp.this_transaction() RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	number text;
BEGIN
	EXECUTE format('SELECT %s()', coalesce(to_regproc('idempotency_internal.transaction_id'), 'pg_current_xact_id')) INTO number;
	RETURN number;
END
$$;
-- Whether reap() deletes a row.
CREATE FUNCTION pg_temp.reaps(scope text, key text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.reap(NULL);
	RETURN NOT EXISTS (SELECT FROM idempotency.keys AS k WHERE k.scope = reaps.scope AND k.key = reaps.key);
END
$$;
-- The detail with which the commit guard refuses a transaction.
CREATE FUNCTION pg_temp.refusal() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	detail text;
BEGIN
	SET CONSTRAINTS ALL IMMEDIATE;
	RETURN 'accepted';
EXCEPTION
	WHEN OTHERS THEN
		GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL;
		RETURN SQLSTATE || ': ' || regexp_replace(detail, '_in [0-9]+', '_in N');
END
$$;
CREATE TEMPORARY TABLE attempt (n serial, statement text);
INSERT INTO attempt (statement) VALUES
	('SELECT idempotency.complete(%1$L, %2$L, ''"stolen"'')'),
	('SELECT idempotency.complete(%1$L, %2$L, ''"stolen"'', 201, ''{}'')'),
	('SELECT idempotency.fail(%1$L, %2$L, ''"stolen"'', 422)'),
	('SELECT idempotency.release(%1$L, %2$L)'),
	('SELECT idempotency.renew(%1$L, %2$L, NULL, ''1 h'')'),
	('SELECT idempotency.checkpoint(%1$L, %2$L, NULL, ''stolen'')'),
	('SELECT outcome FROM idempotency.claim(%1$L, %2$L, lease => ''1 h'', wait => ''0'')'),
	('SELECT outcome FROM idempotency.try_claim(%1$L, %2$L)'),
	('SELECT idempotency.once(%1$L, %2$L)'),
	('SELECT idempotency.once_many(%1$L, ARRAY[%2$L])'),
	('SELECT idempotency.forget(%1$L, %2$L)'),
	('SELECT count(*) FROM idempotency.claim_abandoned(%1$L, ''1 h'', 1000) AS a WHERE a.key = %2$L'),
	('SELECT pg_temp.reaps(%1$L, %2$L)'),
	('SELECT idempotency.current_key(%1$L) FROM set_config(''idempotency_internal.results'', chr(30) || %1$L || chr(31) || ''k'' || %2$L, true)'),
	('INSERT INTO guarded SELECT FROM set_config(''idempotency_internal.results'', chr(30) || %1$L || chr(31) || ''b'' || %2$L, true)');
CREATE TABLE guarded ();
CREATE TRIGGER require_claim BEFORE INSERT ON guarded FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim();

SELECT count(o.token) AS operations
	FROM unnest('{leased,abandoned,expired}'::text[], '{1 d,1 ms,1 ms}'::interval[], '{1 d,1 d,1 ms}'::interval[]) AS s (state, lease, retention),
		unnest('{claimed_in,proven_in}'::text[]) AS c (name), generate_series(1, 400) AS n,
		LATERAL idempotency.claim(concat('restored ', s.state), concat(c.name, ' ', n), lease => s.lease, retention => s.retention) AS o;
SELECT count(idempotency.once('restored finished', c.name || ' ' || n)) AS messages
	FROM unnest('{claimed_in,proven_in}'::text[]) AS c (name), generate_series(1, 400) AS n;
UPDATE idempotency.key AS k SET
		claimed_in = CASE WHEN k.key LIKE 'claimed_in %' THEN t.number END,
		proven_in = CASE WHEN k.key LIKE 'proven_in %' THEN t.number END
	FROM (SELECT n AS of_key, (pg_temp.this_transaction() + n)::text::xid8 AS number FROM generate_series(1, 400) AS n) AS t
	WHERE k.scope LIKE 'restored %' AND split_part(k.key, ' ', 2)::integer = t.of_key;

-- A transaction whose number each of the four rows bears, and which has claimed none of them.
BEGIN;
SELECT count(*) AS rows FROM idempotency.key
	WHERE scope LIKE 'restored %' AND pg_temp.this_transaction()::text::xid8 IN (claimed_in, proven_in);
-- Both columns have one answer.
CREATE TEMPORARY TABLE answer AS
	SELECT a.n, substring(a.statement FROM '[.]([a-z_]+)[(]') AS call, split_part(k.scope, ' ', 2) AS state,
		replace(pg_temp.try(format(a.statement, k.scope, k.key)), k.key, 'KEY') AS answer
	FROM idempotency.key AS k, attempt AS a
	WHERE k.scope LIKE 'restored %' AND pg_temp.this_transaction()::text::xid8 IN (k.claimed_in, k.proven_in);
SELECT coalesce(call, 'require_claim') AS call,
		string_agg(DISTINCT answer, ' or ') FILTER (WHERE state = 'abandoned') AS abandoned,
		string_agg(DISTINCT answer, ' or ') FILTER (WHERE state = 'expired') AS expired,
		string_agg(DISTINCT answer, ' or ') FILTER (WHERE state = 'finished') AS finished,
		string_agg(DISTINCT answer, ' or ') FILTER (WHERE state = 'leased') AS leased
	FROM (SELECT n, call, state, CASE WHEN answer ~ '^IK4(03|12): ' THEN left(answer, 5) ELSE answer END AS answer FROM answer) AS a
	GROUP BY n, call ORDER BY n;
ROLLBACK;
-- A deferred trigger can complete such an operation after the commit guard has seen it open.
CREATE TABLE deferred (scope text, key text);
CREATE FUNCTION pg_temp.complete_deferred() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idempotency.complete(new.scope, new.key);
	RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER complete_deferred AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION pg_temp.complete_deferred();
BEGIN;
CREATE TEMPORARY TABLE open ON COMMIT DROP AS SELECT k.scope, k.key FROM idempotency.key AS k
	WHERE k.scope = 'restored abandoned' AND pg_temp.this_transaction()::text::xid8 = k.proven_in;
SELECT c.outcome FROM open, idempotency.claim(open.scope, open.key) AS c;
INSERT INTO deferred SELECT * FROM open;
COMMIT;
SELECT state FROM idempotency.keys JOIN deferred USING (scope, key);

-- A transaction that has claimed the key itself, also in a subtransaction, after it has seen
-- others' numbers.
BEGIN;
SELECT age('3'::xid) > 0 AS without_a_number;
SELECT pg_temp.this_transaction() > 0 AS with_a_number;
SAVEPOINT a;
SAVEPOINT b;
SELECT outcome FROM idempotency.claim('restored own', 'leased', lease => '1 h');
RELEASE b;
SELECT idempotency.once('restored own 2', 'k');
RELEASE a;
SELECT idempotency.current_key('restored own'), idempotency.current_key('restored own 2');
SELECT pg_temp.try($$SELECT idempotency.claim('restored own', 'leased')$$);
SELECT pg_temp.try($$SELECT idempotency.once_many('restored own', '{leased}'::text[])$$);
SELECT pg_temp.try($$SELECT idempotency.forget('restored own', 'leased')$$);
INSERT INTO guarded SELECT;
SELECT idempotency.complete('restored own', 'leased');
COMMIT;

-- Numbers of writers: this transaction, a subtransaction, an earlier one, the least number, a
-- frozen row of older servers, and one that seems to be later.
BEGIN;
SELECT pg_current_xact_id()::text::bigint AS top \gset
SAVEPOINT s;
CREATE TEMPORARY TABLE written ();
INSERT INTO written DEFAULT VALUES;
SELECT idempotency_internal.is_written_here(:'top') AS top, idempotency_internal.is_written_here(xmin) AS subtransaction,
	xmin <> :'top' AS another_number FROM written;
RELEASE s;
SELECT idempotency_internal.is_written_here(xmin) AS subtransaction FROM written;
SELECT idempotency_internal.is_written_here((:top - 1)::text::xid) AS earlier, idempotency_internal.is_written_here('3') AS least,
	idempotency_internal.is_written_here('2') AS frozen;
SELECT left(pg_temp.try(format($$SELECT idempotency_internal.is_written_here('%s')$$, :top + 1000000)), 5) AS later;
ROLLBACK;
SELECT idempotency_internal.is_written_here('3') AS without_a_number;

DELETE FROM idempotency.key WHERE scope LIKE 'restored%';
DROP TABLE guarded, deferred;
