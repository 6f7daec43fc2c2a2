/* portable/uninstall.sql: removes the portable edition with all stored keys and events */

-- The role that installed it runs this file, which is one statement.  Stored keys are
-- lost: retries of their operations run again.  It fails if other objects depend on the
-- edition, such as a trigger of require_claim() or a default with current_key(): drop them
-- before.
--
--	psql --no-psqlrc --set=ON_ERROR_STOP=1 --file=portable/uninstall.sql

DO $$
DECLARE
	path CONSTANT pg_catalog.text := pg_catalog.current_setting('search_path');
	command text;
	routines text;
BEGIN
	IF EXISTS (SELECT FROM pg_catalog.pg_extension AS e WHERE e.extname OPERATOR(pg_catalog.=) 'idempotency') THEN
		RAISE EXCEPTION USING
			ERRCODE = 'wrong_object_type',
			MESSAGE = 'idempotency is installed as an extension in this database',
			HINT = 'DROP EXTENSION idempotency removes it, with all stored keys.';
	END IF;

	PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
	DROP VIEW idempotency.settings, idempotency.keys, idempotency.zombies, idempotency.subscriptions, idempotency.partitions, idempotency.dead_letters;
	DROP TRIGGER refuse_update ON idempotency.outbox;
	DROP TRIGGER apply_settings ON idempotency.configuration;
	-- The triggers of this version and layout
	FOR command IN
		SELECT pg_catalog.format('DROP TRIGGER %I ON idempotency.key', t.tgname)
		FROM pg_catalog.pg_trigger AS t
		WHERE t.tgrelid OPERATOR(pg_catalog.=) 'idempotency.key'::pg_catalog.regclass AND NOT t.tgisinternal
	LOOP
		EXECUTE command;
	END LOOP;
	DROP TABLE IF EXISTS idempotency_internal.open_claim; -- only with the layout of citus.sql
	SELECT pg_catalog.string_agg(p.oid::pg_catalog.regprocedure::pg_catalog.text, ', ') INTO routines
	FROM pg_catalog.pg_proc AS p
	WHERE p.pronamespace OPERATOR(pg_catalog.=) ANY ('{idempotency,idempotency_internal}'::pg_catalog.regnamespace[]::pg_catalog.oid[]);
	BEGIN
		EXECUTE 'DROP ROUTINE ' OPERATOR(pg_catalog.||) routines;
	EXCEPTION
		-- The context of the error is the list of all routines
		WHEN dependent_objects_still_exist THEN
			GET STACKED DIAGNOSTICS command = MESSAGE_TEXT, routines = PG_EXCEPTION_DETAIL;
			RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = command, DETAIL = routines,
				HINT = 'Drop these objects, run the script again, and create them again afterwards.';
	END;
	DROP TABLE idempotency.key, idempotency.configuration, idempotency.parked, idempotency.position, idempotency.partition, idempotency.subscription,
		idempotency.outbox, idempotency_internal.probe;
	DROP SEQUENCE idempotency.outbox_seq;
	-- The sequences, too
	FOR command IN
		SELECT pg_catalog.format('DROP SEQUENCE idempotency_internal.%I', c.relname)
		FROM pg_catalog.pg_class AS c
		WHERE c.relnamespace OPERATOR(pg_catalog.=) 'idempotency_internal'::pg_catalog.regnamespace
			AND c.relkind OPERATOR(pg_catalog.=) 'S'
	LOOP
		EXECUTE command;
	END LOOP;
	DROP TYPE idempotency.event, idempotency.holder, idempotency.abandoned, idempotency.operation, idempotency.outcome;
	DROP DOMAIN idempotency.document, idempotency.identifier, idempotency.keytext;
	DROP SCHEMA idempotency, idempotency_internal;
	PERFORM pg_catalog.set_config('search_path', path, true);
END
$$;
