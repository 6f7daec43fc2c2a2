-- extension only: search paths of the background worker
-- reaper at rest: the test reaps
--
-- reap() updates its progress table as the owner of that table. Triggers on the table
-- find their functions by the owner's search path, and not by the caller's, which can
-- contain other functions of the same name.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key, idempotency.reaper;

-- Stores that number of rows, which are expired when the function returns.
CREATE FUNCTION expired(prefix text) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idempotency.once_many('reaper path', ARRAY(SELECT prefix || i FROM generate_series(1, 3) AS i), '1 microsecond')
$$;

-- A trigger that relies on the search path: upper() means pg_catalog.upper().
CREATE TABLE heard (who name, what text, path text);
CREATE FUNCTION hear() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO public.heard VALUES (current_user, upper(tg_op), current_setting('search_path'));
	IF upper('captured') <> 'CAPTURED' THEN
		RAISE NOTICE 'captured';
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER hear AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION hear();

-- A caller with its own upper() ahead of pg_catalog, which would run with the rights of
-- the table's owner.
CREATE ROLE regress_reaper_path;
SELECT idempotency.grant_operator('regress_reaper_path');
CREATE SCHEMA regress_reaper_path AUTHORIZATION regress_reaper_path;
SET ROLE regress_reaper_path;
CREATE FUNCTION regress_reaper_path.upper(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
	RETURN format('captured, as %s', CASE WHEN current_user = 'regress_reaper_path' THEN 'the caller' ELSE 'another role' END);
END $$;
SET search_path = regress_reaper_path, pg_catalog;
SELECT upper('captured');
RESET ROLE;

-- The first call in a session plans the statements and inserts the row.
SELECT public.expired('a');
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
SHOW search_path;
RESET ROLE;
-- The second call uses the plans and updates the row.
SELECT public.expired('b');
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
SHOW search_path;
RESET ROLE;
-- In a session that starts with that search path too, within a transaction.
\c -
SELECT public.expired('c');
SET search_path = regress_reaper_path, pg_catalog;
SET ROLE regress_reaper_path;
BEGIN;
SET LOCAL search_path = pg_temp, regress_reaper_path, pg_catalog;
SELECT idempotency.reap();
SHOW search_path;
COMMIT;
SHOW search_path;
SELECT upper('captured');
RESET ROLE;
SELECT who = (SELECT relowner::regrole::name FROM pg_class WHERE oid = 'idempotency.reaper'::regclass) AS owner, what, path
	FROM public.heard;

-- If the trigger fails, the search path and the role of the caller are restored.
CREATE OR REPLACE FUNCTION public.hear() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	RAISE EXCEPTION 'heard % along %', upper(tg_op), current_setting('search_path');
END $$;
SELECT public.expired('d');
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
SHOW search_path;
BEGIN;
SAVEPOINT before;
SELECT idempotency.reap();
ROLLBACK TO before;
SHOW search_path;
SELECT current_user, upper('captured');
COMMIT;
RESET ROLE;

-- The trigger leaves nothing behind after the call: neither a temporary table in the
-- caller's session nor a deferred trigger, which would run with the caller's rights.
CREATE OR REPLACE FUNCTION public.hear() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	CREATE TEMPORARY TABLE left_behind ();
	RETURN NULL;
END $$;
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
RESET ROLE;
DROP TRIGGER hear ON idempotency.reaper;
CREATE CONSTRAINT TRIGGER hear AFTER INSERT OR UPDATE ON idempotency.reaper DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION public.hear();
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
RESET ROLE;

RESET search_path;
DROP TRIGGER hear ON idempotency.reaper;
DROP FUNCTION hear, expired;
DROP TABLE heard;
SELECT idempotency.reap();
SET client_min_messages = warning;
DROP SCHEMA regress_reaper_path CASCADE;
RESET client_min_messages;
DROP OWNED BY regress_reaper_path;
DROP ROLE regress_reaper_path;
TRUNCATE idempotency.key, idempotency.reaper;
