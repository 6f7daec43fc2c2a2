-- The least that the portable edition can cost: two functions with the arguments and the
-- rights of its claim() and complete() that only insert and update a row, of a table with the
-- columns of an outcome, and of a copy of the edition's table. They check nothing, and nothing
-- prevents the commit of an open claim.

CREATE TABLE bench.outcome (
	created_at timestamptz NOT NULL,
	expires_at timestamptz NOT NULL,
	status smallint,
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	fingerprint bytea,
	response json,
	headers json,
	PRIMARY KEY (key, scope)
) WITH (fillfactor = 85);
CREATE TABLE bench.wide_outcome (LIKE idempotency.key INCLUDING ALL) WITH (fillfactor = 85);

DO $do$
DECLARE
	name text;
BEGIN
	FOREACH name IN ARRAY '{outcome,wide_outcome}'::text[] LOOP
		EXECUTE format($create$
CREATE FUNCTION bench.claim_%1$s(
	scope text, key text, request anycompatible DEFAULT NULL,
	lease interval DEFAULT NULL, wait interval DEFAULT NULL, retention interval DEFAULT NULL,
	fingerprint bytea DEFAULT NULL)
	RETURNS idempotency.operation
	LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	INSERT INTO bench.%1$s (created_at, expires_at, scope, key)
	VALUES (now(), '-infinity', scope, key)
	ON CONFLICT DO NOTHING;
	RETURN '(claimed,f,,1,,,,,,f,,,)'::idempotency.operation;
END $$;
CREATE FUNCTION bench.complete_%1$s(
	scope text, key text, response anycompatible DEFAULT NULL,
	status integer DEFAULT 200, headers anycompatible DEFAULT NULL,
	token bigint DEFAULT NULL, retention interval DEFAULT NULL)
	RETURNS json
	LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
	UPDATE bench.%1$s AS k SET
		expires_at = now() + interval '24 hours', status = complete_%1$s.status, response = complete_%1$s.response
	WHERE k.scope = complete_%1$s.scope AND k.key = complete_%1$s.key;
	RETURN response;
END $$;
		$create$, name);
		EXECUTE replace(replace(replace(pg_get_functiondef('bench.charge_2'::regproc), 'charge_2', 'charge_' || name),
			'idempotency.claim(', format('bench.claim_%s(', name)), 'idempotency.complete(', format('bench.complete_%s(', name));
	END LOOP;
END $do$;

-- without removes one promise of the edition from this database.
CREATE PROCEDURE bench.without(promise text) LANGUAGE plpgsql AS $$
DECLARE
	definition text;
BEGIN
	CASE promise
		WHEN 'fingerprint' THEN
			CREATE OR REPLACE FUNCTION idempotency_internal.fingerprint(document jsonb) RETURNS bytea
				LANGUAGE sql STABLE PARALLEL SAFE RETURN NULL::bytea;
		WHEN 'guard' THEN
			DROP TRIGGER require_outcome ON idempotency.key;
		WHEN 'checks' THEN
			CREATE OR REPLACE FUNCTION idempotency_internal.is_plain(result text) RETURNS boolean
				LANGUAGE sql STABLE PARALLEL SAFE RETURN true;
		WHEN 'bounded_wait' THEN
			CREATE OR REPLACE FUNCTION idempotency_internal.announce(scope text, key text) RETURNS boolean
				LANGUAGE sql STABLE PARALLEL SAFE RETURN true;
		WHEN 'replay' THEN
			FOR definition IN
				SELECT regexp_replace(pg_get_functiondef(p.oid), 'SELECT k\.expires_at.*?;', '')
				FROM pg_proc AS p
				WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname = 'claim' AND p.prosrc ~ 'SELECT k\.expires_at'
			LOOP
				EXECUTE definition;
			END LOOP;
	END CASE;
END $$;
