-- extension only: the statement CREATE EXTENSION
--
-- The extension is dropped and recreated in a session that has used it.
--
\set SHOW_CONTEXT never

-- What a session can keep of the extension: prepared statements, compiled functions, a
-- trigger. Variables, parameters and result columns of a dropped type are PostgreSQL's
-- own limit; therefore this test uses a record and texts.
CREATE FUNCTION operate(p_key text, p_answer json) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	op record;
BEGIN
	op := idempotency.claim('session', p_key, p_answer);
	IF op.replayed THEN
		RETURN op.response;
	END IF;
	PERFORM idempotency.complete('session', p_key, p_answer);
	RETURN NULL;
END
$$;
CREATE FUNCTION handler(request json) RETURNS json LANGUAGE sql AS 'SELECT request';
PREPARE look(text) AS SELECT outcome::text, response FROM idempotency.try_claim('session', $1);
PREPARE run(text, text) AS SELECT outcome::text, response FROM idempotency.run('session', $1, $2, 'handler(json)');

SELECT operate('k1', '"first"');
SELECT operate('k1', '"first"');
EXECUTE look('k1');
EXECUTE run('k2', '2');
SELECT idempotency.once('session', 'm1');
SELECT * FROM idempotency.once_many('session', ARRAY['m1', 'm2']);
SELECT idempotency.forget('session', 'm2');
CREATE TABLE guarded (id int);
CREATE FUNCTION guard() RETURNS void LANGUAGE sql AS $$
	CREATE TRIGGER require_claim BEFORE INSERT ON guarded
		FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('session')
$$;
SELECT guard();
INSERT INTO guarded VALUES (1);
\echo :SQLSTATE
DROP TRIGGER require_claim ON guarded;


-- The extension was recreated under the same name: no record is left, and every call
-- works.
DROP EXTENSION idempotency;
SELECT operate('k1', '"gone"');
CREATE EXTENSION idempotency;
SELECT operate('k1', '"second"');
SELECT operate('k1', '"second"');
EXECUTE look('k1');
EXECUTE run('k2', '22');
EXECUTE run('k2', '22');
SELECT idempotency.once('session', 'm1');
SELECT * FROM idempotency.once_many('session', ARRAY['m1', 'm2']);
SELECT idempotency.forget('session', 'm2');
SELECT count(*) FROM idempotency.key;
SELECT guard();
INSERT INTO guarded VALUES (1);
\echo :SQLSTATE
DROP TABLE guarded;

-- In one transaction, and rolled back.
BEGIN;
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
SELECT operate('k1', '"third"');
EXECUTE look('k1');
ROLLBACK;
EXECUTE look('k1');
SELECT operate('k1', '"second"');

-- A claim that is open when the extension is dropped cannot be completed.
BEGIN;
SELECT outcome FROM idempotency.claim('session', 'open');
DROP EXTENSION idempotency;
COMMIT;
\echo :SQLSTATE
EXECUTE look('k1');
-- A key of the old table is claimed and completed in the new one.
BEGIN;
SELECT outcome FROM idempotency.claim('session', 'across');
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
SELECT idempotency.complete('session', 'across', '"in the new one"');
COMMIT;
SELECT response FROM idempotency.claim('session', 'across');
SELECT count(*) FROM idempotency.key;

-- A variable of a dropped type is the server's own limit: the session must reconnect.
CREATE FUNCTION typed() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	request idempotency.document := '{}';
BEGIN
	RETURN request::text;
END
$$;
SELECT typed();
DROP EXTENSION idempotency;
CREATE EXTENSION idempotency;
\set VERBOSITY sqlstate
SELECT typed();
\set VERBOSITY default
\c -
SELECT typed();

DROP FUNCTION operate, handler, guard, typed;
