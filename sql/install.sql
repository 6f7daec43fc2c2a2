-- extension only: the install script
--
-- The objects that CREATE EXTENSION creates, their privileges, and that DROP EXTENSION
-- removes all of them.
--
\set SHOW_CONTEXT never

-- The extension has a fixed schema, and ALTER EXTENSION cannot move it.
SELECT e.extversion, e.extrelocatable, n.nspname
	FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
	WHERE e.extname = 'idempotency';
ALTER EXTENSION idempotency SET SCHEMA public;

-- The objects. From PostgreSQL 17 on, \dx+ also lists row and array types.
CREATE TEMPORARY VIEW member AS
	SELECT d.classid, d.objid, pg_describe_object(d.classid, d.objid, 0) AS object
		FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
		WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
			AND e.extname = 'idempotency'
			AND NOT EXISTS (SELECT FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
				WHERE d.classid = 'pg_type'::regclass AND t.oid = d.objid
					AND (t.typelem <> 0 OR c.relkind <> 'c'));
SELECT object FROM member ORDER BY object COLLATE "C";

-- The planner's properties of each function: only helpers are parallel safe, the pure
-- ones are immutable, and peek() is stable.
SELECT p.proname, p.provolatile, p.proparallel, p.proisstrict
	FROM member m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
	WHERE p.pronamespace = 'idempotency'::regnamespace
	ORDER BY p.proname COLLATE "C", p.oid::regprocedure::text COLLATE "C";

-- The table of outcomes and its unique index, which decides conflicts.
\d idempotency.key

-- pg_dump dumps every table and sequence with its data.
SELECT unnest(extconfig)::regclass AS dumped, unnest(extcondition) AS condition
	FROM pg_extension WHERE extname = 'idempotency';
SELECT m.object AS forgotten
	FROM member m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
	WHERE c.relkind IN ('r', 'p', 'S')
		AND NOT EXISTS (SELECT FROM pg_extension e
			WHERE e.extname = 'idempotency' AND c.oid = ANY (e.extconfig));

-- Every object, column and index has a comment.
SELECT object AS without_comment FROM member WHERE obj_description(objid, classid::regclass::name) IS NULL;
SELECT c.relname, a.attname AS without_comment
	FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v', 'c')
		AND a.attnum > 0 AND NOT a.attisdropped AND col_description(c.oid, a.attnum) IS NULL;
SELECT i.indexrelid::regclass AS without_comment
	FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND obj_description(i.indexrelid, 'pg_class') IS NULL;

-- PUBLIC has no privileges, neither by GRANT nor by default.
SELECT m.object, a.privilege_type AS granted_to_public
	FROM member m
		LEFT JOIN pg_namespace n ON m.classid = 'pg_namespace'::regclass AND n.oid = m.objid
		LEFT JOIN pg_class c ON m.classid = 'pg_class'::regclass AND c.oid = m.objid
		LEFT JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
		LEFT JOIN pg_type t ON m.classid = 'pg_type'::regclass AND t.oid = m.objid,
		aclexplode(CASE
			WHEN n.oid IS NOT NULL THEN coalesce(n.nspacl, acldefault('n', n.nspowner))
			WHEN c.oid IS NOT NULL THEN coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner))
			WHEN p.oid IS NOT NULL THEN coalesce(p.proacl, acldefault('f', p.proowner))
			WHEN t.oid IS NOT NULL THEN coalesce(t.typacl, acldefault('T', t.typowner))
		END) AS a
	WHERE a.grantee = 0;
-- Row types of tables and views keep the server's default, because a REVOKE on one of
-- them makes pg_dump warn.
SELECT t.typname AS usable_by_public FROM pg_type t
	WHERE t.typnamespace = 'idempotency'::regnamespace AND has_type_privilege('public', t.oid, 'USAGE')
		AND NOT EXISTS (SELECT FROM pg_type r JOIN pg_class c ON c.oid = r.typrelid
			WHERE c.relkind IN ('r', 'v') AND t.oid IN (r.oid, r.typarray));

-- No function runs with the rights of its owner, and no search path affects any of
-- them.
SELECT p.oid::regprocedure AS security_definer
	FROM member m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
	WHERE p.prosecdef;
SELECT p.oid::regprocedure AS without_search_path
	FROM member m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND p.oid = m.objid
		JOIN pg_language l ON l.oid = p.prolang
	WHERE l.lanname NOT IN ('c', 'internal')
		AND ('search_path=pg_catalog, pg_temp' = ANY (p.proconfig)) IS NOT TRUE;

-- Objects that depend on the extension prevent DROP EXTENSION.
CREATE TABLE audited (key text DEFAULT idempotency.current_key('install'));
DROP EXTENSION idempotency;
DROP TABLE audited;

-- DROP EXTENSION removes every catalog row: the counts equal those before CREATE
-- EXTENSION.
CREATE TEMPORARY TABLE catalog_rows (moment text, catalog regclass, rows bigint);
CREATE FUNCTION pg_temp.count_catalogs(moment text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	catalog regclass;
	rows bigint;
BEGIN
	FOR catalog IN
		SELECT oid FROM pg_class
			WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r'
				AND NOT relisshared AND relname NOT LIKE 'pg_statistic%'
	LOOP
		EXECUTE format('SELECT count(*) FROM %s', catalog) INTO rows;
		INSERT INTO catalog_rows VALUES (moment, catalog, rows);
	END LOOP;
END
$$;

DROP EXTENSION idempotency;
SELECT pg_temp.count_catalogs('before');
CREATE EXTENSION idempotency;
SELECT pg_temp.count_catalogs('installed');
DROP EXTENSION idempotency;
SELECT pg_temp.count_catalogs('after');

SELECT count(*) > 0 AS made_something
	FROM catalog_rows b JOIN catalog_rows i USING (catalog)
	WHERE b.moment = 'before' AND i.moment = 'installed' AND b.rows <> i.rows;
SELECT catalog, b.rows AS before, a.rows AS after
	FROM catalog_rows b JOIN catalog_rows a USING (catalog)
	WHERE b.moment = 'before' AND a.moment = 'after' AND b.rows <> a.rows;
SELECT count(*) AS schemas FROM pg_namespace WHERE nspname LIKE 'idempotency%';

-- Without the extension, the library reports what is missing.
CREATE FUNCTION by_hand(text, text) RETURNS text LANGUAGE c AS '$libdir/idempotency', 'idempotency_peek';
SELECT by_hand('install', 'key');
\echo :SQLSTATE
DROP FUNCTION by_hand;

-- An existing schema of that name aborts the installation, regardless of its owner, because
-- objects in it could shadow those of the extension.
CREATE SCHEMA idempotency;
CREATE EXTENSION idempotency;
\echo :SQLSTATE
DROP SCHEMA idempotency;

-- The schema cannot be chosen.
CREATE EXTENSION idempotency SCHEMA public;
\echo :SQLSTATE

-- Only a superuser can install the extension; the privilege CREATE on the database is
-- not enough.
CREATE ROLE regress_idempotency_owner;
SELECT current_database() AS database \gset
GRANT CREATE ON DATABASE :"database" TO regress_idempotency_owner;
SET ROLE regress_idempotency_owner;
CREATE EXTENSION idempotency;
\echo :SQLSTATE
RESET ROLE;
REVOKE CREATE ON DATABASE :"database" FROM regress_idempotency_owner;
DROP ROLE regress_idempotency_owner;

-- Reinstall for the following tests.
CREATE EXTENSION idempotency;
