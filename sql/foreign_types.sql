--
-- Values of a client's own types: their casts, constraints and functions never run with the
-- rights of another role. In the portable edition functions run with those of its owner. The
-- planner runs immutable functions too, so each call is made with each kind of plan.
--
\set SHOW_CONTEXT never
CREATE ROLE regress_foreign_types;
SELECT idempotency.grant_client('regress_foreign_types');
CREATE SCHEMA foreign_types AUTHORIZATION regress_foreign_types;
GRANT USAGE ON SCHEMA foreign_types TO PUBLIC;

SET ROLE regress_foreign_types;
SET search_path = foreign_types, pg_catalog;
-- Sequences keep the calls of a transaction that is rolled back.
CREATE SEQUENCE own_rights;
CREATE SEQUENCE other_rights;
GRANT ALL ON own_rights, other_rights TO PUBLIC;
CREATE FUNCTION spy() RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
	PERFORM nextval('foreign_types.' || CASE current_user WHEN 'regress_foreign_types' THEN 'own_rights' ELSE 'other_rights' END);
	RETURN true;
END
$$;
CREATE FUNCTION immutable_spy() RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN foreign_types.spy(); END';

CREATE TYPE label AS ENUM ('{}');
CREATE TYPE pair AS (a text, b text);
CREATE FUNCTION bound_distance(text, text) RETURNS float8 LANGUAGE sql IMMUTABLE AS 'SELECT foreign_types.immutable_spy()::int::float8';
CREATE TYPE span AS RANGE (subtype = text, subtype_diff = bound_distance);
DO $$
DECLARE
	cast_from text;
	cast_to text;
	checked text;
BEGIN
	FOREACH cast_from IN ARRAY '{label,pair,span,label[]}'::text[] LOOP
		FOREACH cast_to IN ARRAY '{text,json,jsonb,varchar}'::text[] LOOP
			EXECUTE format('CREATE FUNCTION cast_to_%3$s(%1$s) RETURNS %2$s LANGUAGE sql IMMUTABLE AS %4$L', cast_from, cast_to,
				cast_to, 'SELECT CASE WHEN foreign_types.immutable_spy() THEN ''{}'' END::pg_catalog.' || cast_to);
			EXECUTE format('CREATE CAST (%1$s AS %2$s) WITH FUNCTION cast_to_%2$s(%1$s) AS IMPLICIT', cast_from, cast_to);
		END LOOP;
	END LOOP;
	FOREACH checked IN ARRAY '{text,json,jsonb,pair,text[],idempotency.document}'::text[] LOOP
		EXECUTE format('CREATE FUNCTION is_valid(%s) RETURNS boolean LANGUAGE sql AS ''SELECT foreign_types.spy()''', checked);
		EXECUTE format('CREATE DOMAIN %I AS %s CHECK (is_valid(VALUE))', 'of ' || checked, checked);
	END LOOP;
END
$$;
CREATE DOMAIN nested AS "of json" CHECK (is_valid(VALUE::json));

CREATE TABLE value (value text);
INSERT INTO value VALUES ('''{}''::label'), ('NULL::label'), ('ROW(''{}'', ''{}'')::pair'), ('span(''a'', ''b'')'), ('ROW(1, 2)'), ('ARRAY[''{}''::label]'), ('ARRAY[ROW(''{}'', ''{}'')::"of pair"]'),
	('''{}''::"of text"'), ('''{}''::"of json"'), ('''{}''::"of jsonb"'), ('''{}''::"of idempotency.document"'), ('''{}''::nested'),
	('ROW(''{}'', ''{}'')::"of pair"'), ('''{}''::"of text[]"'), ('ARRAY[''{}''::"of text"]'),
	('NULL::"of text"'), ('NULL::"of json"'), ('NULL::"of jsonb"'), ('NULL::"of idempotency.document"'), ('NULL::nested'), ('NULL::"of pair"'),
	('''{}''::json'), ('''{}''::jsonb'), ('''{}''::text'), ('''{}''::varchar'), ('''{}''::varchar(9)'), ('''{}''::char(2)'), ('1'), ('NULL'), ('''{}''');
CREATE TABLE call (call text);
INSERT INTO call VALUES ('claim(''types'', ''k'', %s)'), ('try_claim(''types'', ''k'', %s)'), ('claim(''types'', ''k'', %s, lease => ''1 s'')'),
	('canonical(%s)'), ('fingerprint(%s)'), ('fingerprint(''GET'', ''/'', %s)'), ('complete(''types'', ''open'', %s)'),
	('complete(''types'', ''open'', %1$s, 200, %1$s)'), ('fail(''types'', ''open'', %s, 400)'), ('fail(''types'', ''open'', %1$s, 400, %1$s)'),
	('checkpoint(''types'', ''leased'', NULL, ''p'', %s)'), ('once_many(''types'', ARRAY[%s])'), ('once_many(''types'', %s)'),
	('once(''types'', (%s)::text)'), ('run(''types'', ''run'', %s, ''pg_catalog.json_strip_nulls(pg_catalog.json)'')');

CREATE TABLE made (mode text, call text, other_rights boolean, accepted boolean);
DO $$
DECLARE
	mode text;
	call text;
	outcome text;
	before int8;
BEGIN
	FOREACH mode IN ARRAY '{auto,force_custom_plan,force_generic_plan}'::text[] LOOP
		PERFORM set_config('plan_cache_mode', mode, true);
		FOR call IN SELECT format(c.call, v.value) FROM value AS v, call AS c LOOP
			before := (SELECT last_value + is_called::int FROM other_rights);
			BEGIN
				PERFORM idempotency.claim('types', 'open'), idempotency.claim('types', 'leased', lease => '1 min');
				EXECUTE 'SELECT ' || 'idempotency.' || call;
				RAISE SQLSTATE 'P9999';
			EXCEPTION WHEN OTHERS THEN
				outcome := SQLSTATE;
			END;
			INSERT INTO made VALUES (mode, call, before <> (SELECT last_value + is_called::int FROM other_rights), outcome = 'P9999');
		END LOOP;
	END LOOP;
END
$$;
SELECT mode, call AS with_other_rights FROM made WHERE other_rights;
SELECT count(*) AS calls, count(*) FILTER (WHERE other_rights) AS with_other_rights, count(DISTINCT split_part(call, '(', 1)) FILTER (WHERE accepted) >= 9 AS accepted_by_most,
	(SELECT is_called FROM own_rights) AS with_own_rights, (SELECT is_called FROM other_rights) AS any_with_other_rights FROM made;

-- A guarded table, and keys and scopes, can have such types as well.
CREATE TABLE guarded (a "of text", b "of pair", c label);
CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON guarded FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('types');
BEGIN;
SELECT idempotency.once('types'::"of text", 'k'::"of text"), (idempotency.claim('types'::"of text", 'c'::"of text")).outcome,
	(idempotency.peek('types'::"of text", 'k'::"of text")).outcome;
INSERT INTO guarded VALUES ('a', ROW('a', 'b'), '{}');
UPDATE guarded SET a = 'b';
DELETE FROM guarded;
SELECT is_called FROM other_rights;
ROLLBACK;

RESET search_path;
RESET ROLE;
SET client_min_messages = warning;
DROP OWNED BY regress_foreign_types CASCADE;
DROP ROLE regress_foreign_types;
