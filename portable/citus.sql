/* portable/citus.sql: distributes the portable edition over a Citus cluster */

-- The role that installed idempotency.sql runs this file on the coordinator, and then
-- distributes the keys with the rows that they protect:
--
--	psql --no-psqlrc --file=portable/citus.sql
--	psql --command="SELECT idempotency.distribute('api.charge')"
--
-- The key table gets a column with the tenant of each key, which is the scope up to its
-- first slash, and the functions are made again from their own definitions: every query
-- gets a condition on that column, by which Citus finds the node.  idempotency.sql marks
-- what else differs: a comment that begins with "distributed:" becomes code, and code
-- marked "not distributed" is removed.

\set citus_on_error_stop :ON_ERROR_STOP
\set ON_ERROR_STOP on
\if :{?within_transaction}
\else
BEGIN;
\endif
SET LOCAL search_path = pg_catalog, pg_temp;

-- ---------------------------------------------------------------------------
-- The distributed layout, which plain PostgreSQL can have, too
-- ---------------------------------------------------------------------------

-- The definition of a function for the distributed layout.  "home" is the tenant of the
-- call, and "this_transaction" an id of the transaction.  Citus finds the shard without
-- planning the query if both are parameters, and a function that reads the transaction id
-- would run on the node of the shard, in another transaction.
CREATE FUNCTION idempotency_internal.distributed_definition(function regprocedure)
	RETURNS text
	LANGUAGE plpgsql STABLE
AS $$
DECLARE
	routine pg_proc;
	definition text := pg_get_functiondef(function);
	scope text;
	id text;
	declared text;
BEGIN
	SELECT * INTO routine FROM pg_proc AS p WHERE p.oid = function;
	-- Already made
	IF definition ~ E'\\n\\t(home|this_transaction) CONSTANT ' THEN
		RETURN definition;
	END IF;
	definition := regexp_replace(definition, E'[ \\t]*?-- not distributed:\\n.*?-- both layouts\\n', '', 'g');
	definition := regexp_replace(definition, E'[^\\n]*-- not distributed\\n', '', 'g');
	definition := replace(definition, '-- distributed: ', '');

	-- Citus 13.2.1 and 13.2.2 keep a plan of each execution of a generic one, see claim_first()
	IF (routine.provolatile = 'v' OR routine.proname = 'peek')
		AND NOT (routine.prosecdef AND routine.proname IN ('claim', 'try_claim', 'complete', 'require_outcome')) THEN
		definition := regexp_replace(definition, E'(\\n SET search_path TO [^\\n]*)', E'\\1\n SET plan_cache_mode TO ''force_custom_plan''');
	END IF;

	IF routine.proname IN ('require_outcome', 'refuse_commit') THEN
		definition := replace(definition, 'idempotency.key AS k', 'idempotency_internal.open_claim AS k');
	ELSIF definition ~ E'idempotency\\.key AS|INTO idempotency\\.key' THEN
		scope := (ARRAY['p_scope', 'scope', 'new.scope', 'written.scope'])[
			(SELECT min(array_position('{p_scope,scope,new,written}', a.name)) FROM unnest(routine.proargnames) AS a (name))];
		definition := regexp_replace(definition, E'\\mk\\.scope (=|OPERATOR\\(pg_catalog\\.=\\)) ', E'k.tenant \\1 home AND k.scope \\1 ', 'g');
	END IF;
	IF routine.prolang = (SELECT l.oid FROM pg_language AS l WHERE l.lanname = 'plpgsql') AND routine.proname !~ '^(transaction_id|note_)' THEN
		IF definition ~ E'pg_current_xact_id\\(\\)' THEN
			id := 'idempotency_internal.transaction_id()';
		ELSIF definition ~ E'pg_current_xact_id_if_assigned\\(\\)' THEN
			id := 'idempotency_internal.transaction_id_if_assigned()';
		END IF;
		definition := regexp_replace(definition, E'(pg_catalog\\.)?pg_current_xact_id(_if_assigned)?\\(\\)', 'this_transaction', 'g');
	END IF;

	-- A block around the body declares what the queries use.
	declared := concat(
		E'\n\thome CONSTANT ' || (SELECT format('%I.%I', t.typnamespace::regnamespace, t.typname)
				|| coalesce((SELECT format(' COLLATE %I.%I', c.collnamespace::regnamespace, c.collname) FROM pg_collation AS c WHERE c.oid = a.attcollation), '')
			FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid WHERE a.attrelid = 'idempotency.key'::regclass AND a.attname = 'tenant') || ' := idempotency_internal.tenant(' || scope || ');',
		E'\n\tthis_transaction CONSTANT pg_catalog.xid8 := ' || id || ';');
	IF declared <> '' THEN
		definition := regexp_replace(definition, E'(AS \\$function\\$)(.*?)\\s*\\$function\\$\\s*$',
			E'\\1\nDECLARE' || replace(declared, E'\\', E'\\\\') || E'\nBEGIN\\2;\nEND\n$function$');
	END IF;
	RETURN definition;
END
$$;
COMMENT ON FUNCTION idempotency_internal.distributed_definition(regprocedure) IS
	'the definition of a function for the distributed layout';

-- Gives the key table and the functions the distributed layout.  "node" is an expression
-- for the number of the node, which makes transaction ids unique over nodes.
CREATE FUNCTION idempotency_internal.add_tenant(tenant_type text, tenant_collation text, node text)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	variant text;
BEGIN
	EXECUTE format('CREATE FUNCTION idempotency_internal.tenant(scope text) RETURNS %1$s LANGUAGE sql IMMUTABLE PARALLEL SAFE
		RETURN split_part(scope, ''/'', 1)::%1$s', tenant_type);
	COMMENT ON FUNCTION idempotency_internal.tenant(text) IS 'the tenant of a scope';
	EXECUTE format('ALTER TABLE idempotency.key ADD COLUMN tenant %s %s', tenant_type, 'COLLATE ' || tenant_collation);
	COMMENT ON COLUMN idempotency.key.tenant IS 'the scope up to its first slash';

	-- There is no outbox, because its positions compare the transactions of one server
	IF EXISTS (SELECT FROM idempotency.outbox) OR EXISTS (SELECT FROM idempotency.subscription) THEN
		PERFORM idempotency_internal.raise('0A000', 'keys cannot be distributed while the outbox is in use',
			'The outbox of one server cannot follow transactions on others.', 'Deliver all events, reap them, and unsubscribe.');
	END IF;
	EXECUTE (SELECT 'DROP FUNCTION ' || string_agg(p.oid::regprocedure::text, ', ') FROM pg_proc AS p
		WHERE p.pronamespace = 'idempotency'::regnamespace AND p.proname IN ('publish', 'subscribe'));
	UPDATE idempotency.key AS k SET tenant = idempotency_internal.tenant(k.scope);
	ALTER TABLE idempotency.key DROP CONSTRAINT key_pkey;
	ALTER TABLE idempotency.key ADD CONSTRAINT key_pkey PRIMARY KEY (tenant, scope, key);
	COMMENT ON INDEX idempotency.key_pkey IS 'decides which claim succeeds';
	DROP TRIGGER require_outcome ON idempotency.key;
	DROP TRIGGER require_proof ON idempotency.key;

	-- Transactions.  These functions are called under the search path of a client, so every
	-- name in them is qualified.
	FOREACH variant IN ARRAY '{_if_assigned,""}'::text[] LOOP
		EXECUTE format('CREATE FUNCTION idempotency_internal.transaction_id%s() RETURNS xid8 LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS %L',
			variant, format('
		BEGIN
			RETURN CASE WHEN pg_catalog.pg_current_xact_id%1$s() IS NOT NULL
				THEN ((%2$s)::pg_catalog.int8 OPERATOR(pg_catalog.<<) 48
					OPERATOR(pg_catalog.|) pg_catalog.pg_current_xact_id%1$s()::pg_catalog.text::pg_catalog.int8)::pg_catalog.text::pg_catalog.xid8
				END;
		END', variant, node));
	END LOOP;
	COMMENT ON FUNCTION idempotency_internal.transaction_id() IS 'an id of this transaction that no transaction of another node has';
	COMMENT ON FUNCTION idempotency_internal.transaction_id_if_assigned() IS 'the same, or NULL if it has none yet';

	-- The commit guard.  A distributed table has no triggers, so each node has a table of its own
	-- for the claims of transactions that run there.  The first claim on a node creates it, so
	-- that a node can be added at any time.  It is empty unless a transaction is open.
	CREATE FUNCTION idempotency_internal.create_open_claim() RETURNS void
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp AS $function$
		BEGIN
			BEGIN
				CREATE UNLOGGED TABLE idempotency_internal.open_claim (
					scope text COLLATE "C",
					key text COLLATE "C",
					claim_retention interval NOT NULL DEFAULT '0',
					claimed_in xid8,
					proven_in xid8,
					PRIMARY KEY (scope, key)
				);
				CREATE CONSTRAINT TRIGGER require_outcome AFTER INSERT OR UPDATE ON idempotency_internal.open_claim
					DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
					EXECUTE FUNCTION idempotency_internal.require_outcome();
				PERFORM idempotency_internal.restrict_privileges('TABLE', 'idempotency_internal.open_claim', NULL);
			EXCEPTION
				WHEN duplicate_table OR unique_violation THEN
					NULL; -- another transaction has created it, and has committed
			END;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.create_open_claim() IS 'create the table of the open claims of this node';
	-- claimed_in marks the claim of a key that had no row, by the number of the transaction on this
	-- node.
	CREATE FUNCTION idempotency_internal.note_open(p_scope text, p_key text, is_new boolean) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		BEGIN
			IF pg_catalog.to_regclass('idempotency_internal.open_claim') IS NULL THEN
				PERFORM idempotency_internal.create_open_claim();
			END IF;
			INSERT INTO idempotency_internal.open_claim (scope, key, claimed_in)
			VALUES (p_scope, p_key, CASE WHEN is_new THEN pg_catalog.pg_current_xact_id() END);
			RETURN true;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.note_open(text, text, boolean) IS 'note a claim that must be completed';
	CREATE FUNCTION idempotency_internal.note_closed(p_scope text, p_key text, is_new boolean) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		BEGIN
			IF pg_catalog.to_regclass('idempotency_internal.open_claim') IS NULL THEN
				RETURN false;
			END IF;
			DELETE FROM idempotency_internal.open_claim AS k
			WHERE k.scope OPERATOR(pg_catalog.=) p_scope COLLATE pg_catalog."C" AND k.key OPERATOR(pg_catalog.=) p_key COLLATE pg_catalog."C"
				AND (NOT is_new OR k.claimed_in OPERATOR(pg_catalog.=) pg_catalog.pg_current_xact_id());
			RETURN FOUND;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.note_closed(text, text, boolean) IS
		'note that a claim has been completed, failed or released; false if none was open, or with is_new, none of a key without a row';

	-- An advisory lock of this node would not meet those of others: every wait is bounded by
	-- lock_timeout, also where the row lies.
	CREATE OR REPLACE FUNCTION idempotency_internal.announce(scope text, key text) RETURNS boolean
		LANGUAGE sql VOLATILE PARALLEL UNSAFE AS 'SELECT false';
	DROP FUNCTION idempotency_internal.lock_number(text, text);
	DROP SEQUENCE idempotency_internal.secret;
	CREATE OR REPLACE FUNCTION idempotency_internal.key_locks(scope text, key text, all_keys boolean)
		RETURNS TABLE (pid integer, virtual_transaction text, is_granted boolean, wait_start timestamptz)
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
	BEGIN
		PERFORM idempotency_internal.raise('0A000', 'idempotency.holders() is not available on Citus', 'The locks of a key are on the node of its row.',
			'Read the views citus_lock_waits and citus_locks.');
	END
	$function$;

	CREATE FUNCTION idempotency_internal.set_lock_timeout(value text) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		BEGIN
			PERFORM pg_catalog.set_config('lock_timeout', value, true);
			RETURN true;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.set_lock_timeout(text) IS 'set lock_timeout until the end of the transaction';

	-- The statements of a charge, and of a replay.  They are called under the search path of a
	-- client, so every name in them is qualified.
	--
	-- Citus 13.2.1 and 13.2.2 cache the plan of a query on the node of the row once for each
	-- execution, until the session ends.  They do not if the query calls a volatile function, or
	-- if its text contains the tenant; each execution of the latter is also planned once only.
	CREATE FUNCTION idempotency_internal.claim_first(p_scope text, p_key text, p_fingerprint bytea, granted text, refuse boolean)
		RETURNS idempotency.operation
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		DECLARE
			stored pg_catalog.record;
			result pg_catalog.text;
			done pg_catalog.bool;
		BEGIN
			IF pg_catalog.current_setting('lock_timeout') OPERATOR(pg_catalog.<>) '0'
				OR pg_catalog.current_setting('idempotency.wait', true) OPERATOR(pg_catalog.<>) ''
				OR idempotency_internal.configured('wait', p_scope) IS NOT NULL THEN
				RETURN NULL;
			END IF;
			BEGIN
				IF refuse THEN
					SET LOCAL lock_timeout = 5000;
				ELSE
					SET LOCAL lock_timeout = 1;
				END IF;
				INSERT INTO idempotency.key (tenant, created_at, expires_at, scope, key, fingerprint, claimed_in, claim_retention)
				VALUES (home, pg_catalog.clock_timestamp(), '-infinity', p_scope, p_key, p_fingerprint,
					pg_catalog.pg_current_xact_id(), idempotency_internal.configured_retention(p_scope))
				ON CONFLICT DO NOTHING;
				done := FOUND;
				SET LOCAL lock_timeout = 0;
			EXCEPTION
				WHEN lock_not_available THEN
					RETURN '(in_progress,f,,,,,,,,f,,,)'::idempotency.operation;
			END;
			IF done THEN
				done := idempotency_internal.note_open(p_scope, p_key, true);
				result := pg_catalog.set_config('idempotency_internal.results', granted, true);
				RETURN '(claimed,f,,1,,,,,,f,,,)'::idempotency.operation;
			END IF;

			EXECUTE pg_catalog.format('SELECT expires_at, status, fingerprint, response, headers, token, claim_retention FROM idempotency.key'
				' WHERE tenant OPERATOR(pg_catalog.=) %L AND scope OPERATOR(pg_catalog.=) %L AND key OPERATOR(pg_catalog.=) %L',
				home, p_scope, p_key)
			INTO stored;
			IF stored.token IS NULL AND stored.claim_retention IS NULL
				AND stored.expires_at OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()
				AND (stored.fingerprint OPERATOR(pg_catalog.=) p_fingerprint) IS NOT FALSE
			THEN
				result := pg_catalog.set_config('idempotency_internal.results',
					pg_catalog.replace(granted, E'\x1Fk', E'\x1Fr'), true);
				RETURN idempotency_internal.replayed(stored.status, stored.headers, stored.response, stored.expires_at, NULL);
			END IF;
			RETURN NULL;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.claim_first(text, text, bytea, text, boolean) IS
		'the first claim of a transaction, without a lease: claimed, replayed, in_progress after a wait, or NULL';
	-- The row exists, as claim_first() has written it, so this is an update: Citus plans an INSERT
	-- faster than an UPDATE.  Without an open claim, it could wait for another transaction.
	CREATE FUNCTION idempotency_internal.complete_first(p_scope text, p_key text, p_status integer, p_response json) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		DECLARE
			now pg_catalog.timestamptz := pg_catalog.clock_timestamp();
		BEGIN
			IF NOT idempotency_internal.note_closed(p_scope, p_key, true) THEN
				RETURN false;
			END IF;
			INSERT INTO idempotency.key AS k (tenant, created_at, expires_at, status, scope, key, response)
			VALUES (home, coalesce(now, pg_catalog.clock_timestamp()), idempotency_internal.retention_end(idempotency_internal.configured_retention(p_scope), now), p_status, p_scope, p_key, p_response)
			ON CONFLICT (tenant, scope, key) DO UPDATE SET
				created_at = excluded.created_at,
				expires_at = excluded.expires_at,
				status = excluded.status,
				response = excluded.response,
				claim_retention = NULL;
			RETURN true;
		END
	$function$;
	COMMENT ON FUNCTION idempotency_internal.complete_first(text, text, integer, json) IS
		'complete a claim of this transaction on a key that had no row';
	CREATE OR REPLACE FUNCTION idempotency_internal.is_granted(scope text, mark text, key text) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE AS $function$
		BEGIN
			PERFORM FROM idempotency.key AS k
			WHERE k.scope = is_granted.scope COLLATE "C" AND k.key = is_granted.key COLLATE "C" AND is_granted.mark IN ('k', 'b')
				AND pg_current_xact_id_if_assigned() IN (k.claimed_in, k.proven_in) AND idempotency_internal.is_written_here(k.xmin);
			RETURN FOUND;
		END
	$function$;
	-- it records key by key, which may not read the whole table each time
	ALTER FUNCTION idempotency_internal.record_many(text, text[], interval) SET enable_seqscan = off;
	ALTER FUNCTION idempotency_internal.record_many(text, text[], interval) SET jit = off;
	-- The numbers of both transactions are those of the node of the row.  An UPDATE calls it
	-- there only if it claims to be immutable.
	ALTER FUNCTION idempotency_internal.is_written_here(xid) IMMUTABLE;
	-- complete() adds a retention of the row, on the node of the row, where only a function that
	-- claims to be immutable may do so.  PL/pgSQL, because the server would not inline it in SQL.
	CREATE OR REPLACE FUNCTION idempotency_internal.retention_end(retention interval, since timestamptz) RETURNS timestamptz
		LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE AS $function$
		BEGIN
			RETURN CASE WHEN retention OPERATOR(pg_catalog.=) pg_catalog.interval '-1 s' THEN pg_catalog.timestamptz 'infinity'
				ELSE since OPERATOR(pg_catalog.+) retention END;
		END
	$function$;
END
$$;
COMMENT ON FUNCTION idempotency_internal.add_tenant(text, text, text) IS 'give the key table the distributed layout';

-- Takes all rights to an object from everybody but its owner, except those in "granted".  Each
-- node creates objects with default privileges, which are the same on all nodes.
CREATE FUNCTION idempotency_internal.restrict_privileges(kind text, name text, granted aclitem[])
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
	statement text;
BEGIN
	FOR statement IN
		SELECT s.statement FROM (
			SELECT 1, format('REVOKE ALL ON %s %s FROM PUBLIC', kind, name)
			UNION
			SELECT 2, format('REVOKE ALL ON %s %s FROM %s', kind, name, a.grantee::regrole)
			FROM pg_default_acl AS d CROSS JOIN LATERAL aclexplode(d.defaclacl) AS a
			WHERE d.defaclrole = quote_ident(current_user)::regrole AND a.grantee NOT IN (0, d.defaclrole)
			UNION
			SELECT 3, format('GRANT %s ON %s %s TO %s', a.privilege_type, kind, name, a.grantee::regrole)
			FROM aclexplode(granted) AS a
			WHERE a.grantee NOT IN (0, quote_ident(current_user)::regrole)
		) AS s (step, statement)
		ORDER BY s.step
	LOOP
		EXECUTE statement;
	END LOOP;
END
$$;
COMMENT ON FUNCTION idempotency_internal.restrict_privileges(text, text, aclitem[]) IS
	'take all rights to an object from everybody but its owner, except those in a list';

-- Makes every function and view again, which creates it on all nodes, and gives all objects the
-- privileges there that they have here.  Functions of the layout have none here.
CREATE FUNCTION idempotency_internal.make_again()
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	made record;
BEGIN
	FOR made IN
		SELECT p.oid::regprocedure AS function, CASE p.pronamespace WHEN 'idempotency'::regnamespace THEN p.proacl END AS acl
		FROM pg_proc AS p
		WHERE p.pronamespace IN ('idempotency'::regnamespace, 'idempotency_internal'::regnamespace)
			AND p.proname <> ALL (idempotency_internal.delivery_routines())
		ORDER BY p.oid
	LOOP
		EXECUTE idempotency_internal.distributed_definition(made.function);
		PERFORM idempotency_internal.restrict_privileges('FUNCTION', made.function::text, made.acl);
	END LOOP;
	FOR made IN
		SELECT c.oid::regclass AS relation, c.relkind = 'v' AS is_view, pg_get_viewdef(c.oid) AS query, c.relacl AS acl FROM pg_class AS c
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'v')
			AND c.relname IN ('key', 'keys', 'zombies')
	LOOP
		IF made.is_view THEN
			EXECUTE format('CREATE OR REPLACE VIEW %s AS %s', made.relation, made.query);
		END IF;
		PERFORM idempotency_internal.restrict_privileges('TABLE', made.relation::text, made.acl);
	END LOOP;
	PERFORM idempotency_internal.restrict_privileges('SCHEMA', n.nspname, n.nspacl)
	FROM pg_namespace AS n
	WHERE n.nspname IN ('idempotency', 'idempotency_internal');
END
$$;
COMMENT ON FUNCTION idempotency_internal.make_again() IS 'make all functions again in the distributed layout';

-- ---------------------------------------------------------------------------
-- The cluster
-- ---------------------------------------------------------------------------

CREATE FUNCTION idempotency_internal.distribute(colocate_with regclass)
	RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
AS $$
DECLARE
	distribution record;
BEGIN
	IF to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
		PERFORM idempotency_internal.raise('0A000', 'the extension citus is not installed in this database', NULL,
			'Run CREATE EXTENSION citus, and add the nodes.');
	ELSIF EXISTS (SELECT FROM pg_depend AS d
		WHERE d.classid = 'pg_class'::regclass AND d.objid = 'idempotency.key'::regclass AND d.deptype = 'e') THEN
		PERFORM idempotency_internal.raise('0A000', 'keys of an extension cannot be distributed', NULL,
			'Install portable/idempotency.sql with psql instead of pg_tle.');
	ELSIF (SELECT c.relowner <> quote_ident(current_user)::regrole FROM pg_class AS c WHERE c.oid = 'idempotency.key'::regclass) THEN
		PERFORM idempotency_internal.raise('42501', 'must be owner of table idempotency.key', NULL,
			'Call idempotency.distribute() as the role that installed portable/idempotency.sql.');
	END IF;
	SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type, quote_ident(n.nspname) || '.' || quote_ident(c.collname) AS "collation"
	INTO distribution
	FROM pg_dist_partition AS p
	JOIN pg_attribute AS a ON a.attrelid = p.logicalrelid AND a.attname = column_to_column_name(p.logicalrelid, p.partkey)
	LEFT JOIN pg_collation AS c ON c.oid = a.attcollation
	LEFT JOIN pg_namespace AS n ON n.oid = c.collnamespace
	WHERE p.logicalrelid = colocate_with AND p.partmethod = 'h';
	IF NOT FOUND THEN
		PERFORM idempotency_internal.raise('42809', format('table "%s" has no distribution column', colocate_with), NULL,
			'Call create_distributed_table() for it first.');
	ELSIF EXISTS (SELECT FROM pg_dist_partition AS p WHERE p.logicalrelid = 'idempotency.key'::regclass) THEN
		PERFORM idempotency_internal.raise('42P16', 'the keys are distributed already', NULL,
			'Colocate other tables with idempotency.key: create_distributed_table(..., colocate_with => ''idempotency.key'').');
	END IF;

	-- One connection to each node, because the commands depend on each other
	SET LOCAL citus.multi_shard_modify_mode = 'sequential';
	PERFORM idempotency_internal.add_tenant(distribution.type, distribution."collation",
		'SELECT n.groupid FROM pg_catalog.pg_dist_local_group AS n');
	PERFORM create_distributed_table('idempotency.key', 'tenant', colocate_with => colocate_with::text);

	-- The functions name these types only in their bodies, where Citus does not see them
	CREATE FUNCTION idempotency_internal.types(idempotency.document, idempotency.identifier, idempotency.keytext)
		RETURNS void LANGUAGE sql AS '';
	DROP FUNCTION idempotency_internal.types(idempotency.document, idempotency.identifier, idempotency.keytext);

	-- lock_timeout applies on the node of the row, too
	CREATE OR REPLACE FUNCTION idempotency_internal.set_lock_timeout(value text) RETURNS boolean
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SET citus.propagate_set_commands = 'local' AS $function$
		BEGIN
			EXECUTE pg_catalog.format('SET LOCAL lock_timeout = %L', value);
			RETURN true;
		END
	$function$;
	ALTER FUNCTION idempotency_internal.claim_first(text, text, bytea, text, boolean) SET citus.propagate_set_commands = 'local';

	-- Each shard in a transaction of its own, on its node.  Of a shard it reads 256 blocks from a
	-- multiple of them, or 1/256 of its blocks if these are more, and with NULL all of them.  The
	-- place is a random one, because no node has a position for the shards of the others.
	CREATE OR REPLACE FUNCTION idempotency.reap(max_rows integer DEFAULT 1000) RETURNS bigint
		LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
		DECLARE
			shard record;
			answer record;
			reaped bigint := 0;
		BEGIN
			IF max_rows < 0 THEN
				PERFORM idempotency_internal.raise('22023', 'max_rows must not be negative', NULL,
					'Pass NULL for as many as one transaction may.');
			ELSIF current_setting('transaction_read_only') = 'on' THEN
				PERFORM idempotency_internal.raise_read_only('reap');
			END IF;
			FOR shard IN
				SELECT shard_name(s.logicalrelid, s.shardid) AS name, n.nodename, n.nodeport
				FROM pg_dist_shard AS s
				JOIN pg_dist_placement AS p USING (shardid)
				JOIN pg_dist_node AS n USING (groupid)
				WHERE s.logicalrelid = 'idempotency.key'::regclass AND n.noderole = 'primary'
				ORDER BY random()
			LOOP
				EXIT WHEN reaped >= max_rows;
				SELECT r.success, r.result INTO answer
				FROM master_run_on_worker(ARRAY[shard.nodename], ARRAY[shard.nodeport], ARRAY[format(
					$query$WITH size AS MATERIALIZED (
						SELECT s.blocks, CASE WHEN %2$L IS NULL THEN s.blocks ELSE greatest(s.blocks / 256, 256) END AS stretch
						FROM (SELECT pg_catalog.pg_relation_size(%1$L) / pg_catalog.current_setting('block_size')::bigint AS blocks) AS s
					), part AS MATERIALIZED (
						SELECT pg_catalog.floor(pg_catalog.random() * pg_catalog.ceil(s.blocks::double precision / greatest(s.stretch, 1)::double precision))::bigint * s.stretch AS first,
							s.stretch
						FROM size AS s
					), d AS (
						DELETE FROM %1$s AS k WHERE k.ctid = ANY (ARRAY(
							SELECT e.ctid FROM %1$s AS e
							WHERE e.ctid >= (SELECT pg_catalog.format('(%%s,0)', p.first)::tid FROM part AS p)
								AND e.ctid < (SELECT pg_catalog.format('(%%s,0)', p.first + p.stretch)::tid FROM part AS p)
								AND e.expires_at <= pg_catalog.statement_timestamp()
								AND (coalesce(e.token, e.finished_by) >= idempotency_internal.token_time() << 17) IS NOT TRUE
							LIMIT %3$L FOR UPDATE SKIP LOCKED))
						RETURNING 1
					) SELECT pg_catalog.count(*) FROM d$query$, shard.name, max_rows, max_rows - reaped)], false) AS r;
				IF NOT answer.success THEN
					RAISE EXCEPTION USING MESSAGE = format('could not delete expired keys on %s:%s', shard.nodename, shard.nodeport),
						DETAIL = answer.result;
				END IF;
				reaped := reaped + answer.result::bigint;
			END LOOP;
			RETURN reaped;
		END
	$function$;
	PERFORM idempotency_internal.make_again();
END
$$;
COMMENT ON FUNCTION idempotency_internal.distribute(regclass) IS 'distribute the keys';

CREATE FUNCTION idempotency.distribute(colocate_with regclass)
	RETURNS void
	LANGUAGE sql VOLATILE PARALLEL UNSAFE SET search_path = pg_catalog, pg_temp
AS 'SELECT idempotency_internal.distribute($1)';
COMMENT ON FUNCTION idempotency.distribute(regclass) IS
	'distribute the keys over the nodes of a Citus cluster, with the rows of a table';

DO $$
BEGIN
	PERFORM idempotency_internal.restrict_privileges('FUNCTION', f.name, NULL)
	FROM unnest(ARRAY['idempotency.distribute(regclass)', 'idempotency_internal.distribute(regclass)',
		'idempotency_internal.distributed_definition(regprocedure)', 'idempotency_internal.add_tenant(text, text, text)',
		'idempotency_internal.restrict_privileges(text, text, aclitem[])', 'idempotency_internal.make_again()']) AS f (name);
END
$$;

\if :{?within_transaction}
\else
COMMIT;
\endif
\set ON_ERROR_STOP :citus_on_error_stop
\unset citus_on_error_stop
