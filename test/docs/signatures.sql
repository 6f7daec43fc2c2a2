-- The signatures of all functions that users call, in the format of docs/reference.md:
-- names of the schema unqualified, defaults without their type.

SELECT
	pg_catalog.format('%s(%s) RETURNS %s', p.proname,
		pg_catalog.regexp_replace(
			pg_catalog.replace(pg_catalog.pg_get_function_arguments(p.oid), 'idempotency.', ''),
			'::[^,]+', '', 'g'),
		pg_catalog.replace(pg_catalog.pg_get_function_result(p.oid), 'idempotency.', ''))
	COLLATE "C" AS signature
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'idempotency'::pg_catalog.regnamespace
	AND NOT EXISTS (
		SELECT
		FROM pg_catalog.pg_type AS t
		WHERE p.oid IN (t.typinput, t.typoutput, t.typreceive, t.typsend))
	-- A function that implements an operator is described with the operator,
	AND NOT EXISTS (SELECT FROM pg_catalog.pg_operator AS o WHERE o.oprcode = p.oid)
	AND NOT EXISTS (SELECT FROM pg_catalog.pg_amproc AS a WHERE a.amproc = p.oid)
	-- and a support function is called only by the planner.
	AND NOT EXISTS (SELECT FROM pg_catalog.pg_proc AS s WHERE s.prosupport = p.oid)
	AND pg_catalog.obj_description(p.oid, 'pg_proc') NOT LIKE 'internal:%'
ORDER BY signature;
