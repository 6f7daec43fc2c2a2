--
-- One session across changes: settings that change how values are read, and DISCARD.
-- reinstalled drops and recreates the extension.
--
\set SHOW_CONTEXT never

-- What a session can keep: prepared statements, compiled functions, a trigger.
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
DROP TABLE guarded;

-- DISCARD leaves no state behind, and removes none that is needed.
SELECT operate('k3', '3');
DISCARD PLANS;
SELECT operate('k3', '3');
DISCARD ALL;
SELECT operate('k3', '3');
SELECT idempotency.current_key('session');

-- Settings that change the meaning of a text.
SET datestyle = 'German';
SET intervalstyle = 'iso_8601';
SET timezone = 'Asia/Kathmandu';
SET lc_messages = 'C';
SET bytea_output = 'escape';
SET xmloption = 'document';
SET transform_null_equals = on;
SET extra_float_digits = -15;
BEGIN;
SELECT outcome FROM idempotency.claim('session', 'styles', '{"n": 0.1234567890123456789}', retention => 'P1DT1H');
SELECT idempotency.complete('session', 'styles', '{"n": 0.1234567890123456789}');
COMMIT;
RESET ALL;
SELECT outcome, response FROM idempotency.claim('session', 'styles', '{"n": 0.1234567890123456789}');
SELECT outcome FROM idempotency.try_claim('session', 'styles', '{"n": 0.1234567890123456780}');
SELECT expires_at - created_at BETWEEN interval '24 hours 59 minutes' AND interval '25 hours' AS a_day_and_an_hour
	FROM idempotency.key WHERE scope = 'session' AND key = 'styles';

DROP FUNCTION operate, handler, guard;
