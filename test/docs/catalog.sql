-- The facts that docs/reference/ must contain: a heading, and a line under it;
-- columns in order.

LOAD 'idempotency'; -- for its settings

BEGIN;

CREATE ROLE docs_client;
CREATE ROLE docs_consumer;
CREATE ROLE docs_operator;
CREATE ROLE docs_backup;
SELECT idempotency.grant_client('docs_client') \g /dev/null
SELECT idempotency.grant_consumer('docs_consumer') \g /dev/null
SELECT idempotency.grant_operator('docs_operator') \g /dev/null
SELECT idempotency.grant_backup('docs_backup') \g /dev/null

-- Functions: the line with the properties of the function.
SELECT
	p.proname AS heading,
	pg_catalog.format('%s, parallel %s. For %s.',
		CASE p.provolatile WHEN 'i' THEN 'Immutable' WHEN 's' THEN 'Stable' ELSE 'Volatile' END,
		CASE p.proparallel WHEN 's' THEN 'safe' WHEN 'r' THEN 'restricted' ELSE 'unsafe' END,
		coalesce((
			SELECT pg_catalog.string_agg(who.they, ' and ' ORDER BY who.they)
			FROM (VALUES ('clients', 'docs_client'), ('consumers', 'docs_consumer'), ('operators', 'docs_operator'))
				AS who (they, role)
			WHERE pg_catalog.has_function_privilege(who.role, p.oid, 'EXECUTE')), 'superusers')) AS line,
	0 AS position
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'idempotency'::pg_catalog.regnamespace

UNION ALL

-- The tables and views that a privilege group can read: one line, ordered by name.
SELECT
	'grant_' || may.they,
	'SELECT on ' || pg_catalog.string_agg(pg_catalog.format('`%s`', c.relname), ', ' ORDER BY c.relname) || ';',
	0
FROM (VALUES ('client', 'docs_client'), ('consumer', 'docs_consumer'), ('operator', 'docs_operator'), ('backup', 'docs_backup')) AS may (they, role)
JOIN pg_catalog.pg_class AS c ON pg_catalog.has_table_privilege(may.role, c.oid, 'SELECT')
WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
GROUP BY may.they

UNION ALL

-- Columns of tables, views and composite types.
SELECT
	c.relname,
	pg_catalog.format('| `%s` | `%s` |', a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod)),
	a.attnum
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace
	AND c.relkind IN ('r', 'p', 'v', 'm', 'c', 'f')
	AND a.attnum > 0 AND NOT a.attisdropped

UNION ALL

-- Types that are not row types.
SELECT t.typname, '', 0
FROM pg_catalog.pg_type AS t
WHERE t.typnamespace = 'idempotency'::pg_catalog.regnamespace
	AND t.typtype <> 'c' AND t.typelem = 0

UNION ALL

-- Sequences.
SELECT c.relname, '', 0
FROM pg_catalog.pg_class AS c
WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace AND c.relkind = 'S'

UNION ALL

-- Settings: default, unit, range, and the roles that can set them.
SELECT
	s.name,
	pg_catalog.format('Default: %s. %s. %s',
		coalesce('`' || nullif(pg_catalog.current_setting(s.name), '') || '`', 'empty'),
		CASE s.unit WHEN 's' THEN 'In seconds' WHEN 'ms' THEN 'In milliseconds' WHEN 'B' THEN 'In bytes'
			ELSE CASE s.vartype WHEN 'integer' THEN 'A number' ELSE 'A text' END END
			|| coalesce(', from ' || s.min_val || ' to ' || s.max_val, ''),
		CASE s.context WHEN 'user' THEN 'Any role can set it.' WHEN 'superuser' THEN 'Superusers set it.'
			WHEN 'sighup' THEN 'Set for the whole server; a reload is enough.'
			WHEN 'postmaster' THEN 'Set for the whole server; it takes a restart.' END),
	0
FROM pg_catalog.pg_settings AS s
WHERE s.name LIKE 'idempotency.%'

ORDER BY heading, position, line;

ROLLBACK;
