-- extension only: checks of altered types
--
-- The row types that the functions return belong to the extension: a change is an error, and
-- not a shifted column.
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

-- The result type belongs to the extension.
BEGIN;
ALTER TYPE idempotency.operation ALTER ATTRIBUTE attempt TYPE text;
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''type'')');
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.operation ADD ATTRIBUTE more text;
SELECT pg_temp.error_of('SELECT idempotency.claim(''claim'', ''type'')');
ROLLBACK;

-- The row type belongs to the extension.
BEGIN;
ALTER TYPE idempotency.abandoned ALTER ATTRIBUTE key TYPE bigint;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;
BEGIN;
ALTER TYPE idempotency.abandoned DROP ATTRIBUTE state;
SELECT pg_temp.error_of('SELECT idempotency.claim_abandoned(''locks'', ''1 min'')');
ROLLBACK;
