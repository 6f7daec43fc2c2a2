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

-- The columns of each relation and type, in their order; "!" is NOT NULL.
\pset format unaligned
SELECT c.relname, c.relkind, string_agg(format('%s %s%s%s', a.attname, format_type(a.atttypid, a.atttypmod),
		CASE WHEN a.attcollation <> t.typcollation THEN ' COLLATE ' || l.collname END, CASE WHEN a.attnotnull THEN '!' END), E',\n  ' ORDER BY a.attnum) AS columns
	FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_collation l ON l.oid = a.attcollation
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind NOT IN ('i', 'S') AND a.attnum > 0 AND NOT a.attisdropped
	GROUP BY c.oid, c.relname, c.relkind ORDER BY c.relname COLLATE "C";
SELECT enum_range(NULL::idempotency.outcome);
-- Tables are plain heaps, without defaults and rules; the unique index decides conflicts.
SELECT c.relname, c.relpersistence, m.amname, c.relrowsecurity, c.relhasrules, (SELECT count(*) FROM pg_attrdef WHERE adrelid = c.oid) AS defaults
	FROM pg_class c JOIN pg_am m ON m.oid = c.relam
	WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind = 'r' ORDER BY c.relname COLLATE "C";
SELECT pg_get_indexdef(i.indexrelid), i.indisprimary, i.indisvalid
	FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace ORDER BY i.indexrelid::regclass::text COLLATE "C";
SELECT pg_get_triggerdef(g.oid), g.tgenabled
	FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace AND NOT g.tgisinternal ORDER BY g.tgrelid::regclass::text COLLATE "C", g.tgname;
-- Numbers of events and tokens are drawn one by one, and never reused; regress/guard changes the increment.
SELECT seqrelid::regclass, format_type(seqtypid, NULL), seqmin, seqmax, seqcache, seqcycle
	FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid
	WHERE c.relnamespace = 'idempotency'::regnamespace ORDER BY c.relname COLLATE "C";
-- The input types have the storage of json and text. The usual types of callers cast to them
-- implicitly, and no operator takes them, so that the casts change no other query.
SELECT t.typname, (t.typlen, t.typbyval, t.typalign, t.typstorage) = (b.typlen, b.typbyval, b.typalign, b.typstorage) AS same_storage,
		t.typispreferred, (SELECT count(*) FROM pg_operator WHERE t.oid IN (oprleft, oprright)) AS operators
	FROM (VALUES ('document', 'json'), ('identifier', 'text')) AS v (input, base)
		JOIN pg_type t ON t.oid = ('idempotency.' || v.input)::regtype JOIN pg_type b ON b.oid = v.base::regtype ORDER BY t.typname;
SELECT format_type(castsource, NULL) AS source, format_type(casttarget, NULL) AS target, castcontext, castmethod
	FROM pg_cast JOIN member m ON m.classid = 'pg_cast'::regclass AND m.objid = pg_cast.oid
	ORDER BY format_type(casttarget, NULL) COLLATE "C", format_type(castsource, NULL) COLLATE "C";
-- The settings.
LOAD 'idempotency';
SELECT name, boot_val, unit, vartype, context, min_val, max_val, short_desc <> '' AS described
	FROM pg_settings WHERE name LIKE 'idempotency.%' ORDER BY name COLLATE "C";
\pset format aligned

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
