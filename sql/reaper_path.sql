--
-- reap() writes its books in the name of the table's owner.  What an administrator
-- has put upon the table finds its functions where the owner would look for them,
-- and not where whoever calls reap() has put others of the same name.
--
\set SHOW_CONTEXT never

TRUNCATE idempotency.key, idempotency.reaper;

-- Rows that have run out when this returns.
CREATE FUNCTION expired(prefix text) RETURNS bigint LANGUAGE sql AS $$
	SELECT count(*) FROM idempotency.once_many('reaper path', ARRAY(SELECT prefix || i FROM generate_series(1, 3) AS i), '1 microsecond')
$$;

-- A trigger of somebody who trusts in the search path: upper() is pg_catalog's.
CREATE TABLE heard (who name, what text, path text);
CREATE FUNCTION hear() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
	INSERT INTO public.heard VALUES (current_user, upper(tg_op), current_setting('search_path'));
	IF upper('captured') <> 'CAPTURED' THEN
		RAISE NOTICE 'captured';
	END IF;
	RETURN NULL;
END $$;
CREATE TRIGGER hear AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION hear();

-- A caller who has an upper() of his own, before that of pg_catalog: it would run
-- with the rights of the table's owner.
CREATE ROLE regress_reaper_path;
SELECT idempotency.grant_operator('regress_reaper_path');
CREATE SCHEMA regress_reaper_path AUTHORIZATION regress_reaper_path;
SET ROLE regress_reaper_path;
CREATE FUNCTION regress_reaper_path.upper(text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
	RETURN format('captured, as %s', CASE WHEN current_user = 'regress_reaper_path' THEN 'oneself' ELSE 'somebody else' END);
END $$;
SET search_path = regress_reaper_path, pg_catalog;
SELECT upper('captured');
RESET ROLE;

-- The first time in a session, when all is planned: a row comes to the books.
SELECT public.expired('a');
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
SHOW search_path;
RESET ROLE;
-- And once it is planned: the row is changed.
SELECT public.expired('b');
SET ROLE regress_reaper_path;
SELECT idempotency.reap();
SHOW search_path;
RESET ROLE;
-- In a session that begins with it, too, within a transaction.
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

-- Where the trigger fails, the caller has his search path again, and his rights.
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

-- Nothing that it leaves behind gets out of the call: no temporary table in the
-- caller's session, and no trigger for later, which would run with the caller's rights.
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
