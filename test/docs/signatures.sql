-- The signatures of all functions that users call, in the format of docs/reference/functions.md:
-- names of the schema unqualified, defaults without their type.

SELECT
	pg_catalog.format('%s(%s)%s', p.proname,
		pg_catalog.regexp_replace(
			pg_catalog.replace(pg_catalog.pg_get_function_arguments(p.oid), 'idempotency.', ''),
			'::[^,]+|\mIN ', '', 'g'),
		' RETURNS ' || pg_catalog.replace(pg_catalog.pg_get_function_result(p.oid), 'idempotency.', ''))
	COLLATE "C" AS signature
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'idempotency'::pg_catalog.regnamespace
ORDER BY signature;
