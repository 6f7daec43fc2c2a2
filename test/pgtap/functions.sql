-- The public contract: every function, as callers and the planner see it. A new,
-- dropped or changed function fails here until the contract, the reference and the
-- upgrade script agree.

BEGIN;

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, true)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

SELECT plan(8);

CREATE TEMPORARY VIEW function AS
	SELECT
		p.*,
		l.lanname AS language,
		pg_catalog.format('%s(%s)', p.proname, pg_catalog.pg_get_function_arguments(p.oid)) AS signature
	FROM pg_catalog.pg_proc AS p
	JOIN pg_catalog.pg_language AS l ON l.oid = p.prolang
	WHERE p.pronamespace IN ('idempotency'::pg_catalog.regnamespace, 'idempotency_internal'::pg_catalog.regnamespace);

SELECT set_eq(
	$$
		SELECT
			signature,
			pg_catalog.pg_get_function_result(oid) AS result,
			language::text,
			CASE provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END AS volatility,
			CASE proparallel WHEN 's' THEN 'safe' WHEN 'r' THEN 'restricted' ELSE 'unsafe' END AS parallel,
			proisstrict AS strict
		FROM pg_temp.function
		WHERE pronamespace = 'idempotency'::pg_catalog.regnamespace
	$$,
	$$ VALUES
		-- keys
		('claim(scope idempotency.identifier, key idempotency.identifier, request idempotency.document DEFAULT NULL::idempotency.document, lease interval DEFAULT NULL::interval, wait interval DEFAULT NULL::interval, retention interval DEFAULT NULL::interval, fingerprint bytea DEFAULT NULL::bytea)',
			'idempotency.operation', 'c', 'volatile', 'unsafe', false),
		('try_claim(scope idempotency.identifier, key idempotency.identifier, request idempotency.document DEFAULT NULL::idempotency.document, lease interval DEFAULT NULL::interval, wait interval DEFAULT NULL::interval, retention interval DEFAULT NULL::interval, fingerprint bytea DEFAULT NULL::bytea)',
			'idempotency.operation', 'c', 'volatile', 'unsafe', false),
		('complete(scope idempotency.identifier, key idempotency.identifier, response idempotency.document DEFAULT NULL::idempotency.document, status integer DEFAULT 200, headers idempotency.document DEFAULT NULL::idempotency.document, token bigint DEFAULT NULL::bigint, retention interval DEFAULT NULL::interval, omit_large boolean DEFAULT false)',
			'json', 'c', 'volatile', 'unsafe', false),
		('fail(scope idempotency.identifier, key idempotency.identifier, response idempotency.document, status integer, headers idempotency.document DEFAULT NULL::idempotency.document, token bigint DEFAULT NULL::bigint, retention interval DEFAULT NULL::interval, omit_large boolean DEFAULT false)',
			'json', 'c', 'volatile', 'unsafe', false),
		('release(scope idempotency.identifier, key idempotency.identifier, token bigint DEFAULT NULL::bigint)', 'boolean', 'c', 'volatile', 'unsafe', false),
		('renew(scope idempotency.identifier, key idempotency.identifier, token bigint, lease interval)',
			'timestamp with time zone', 'c', 'volatile', 'unsafe', false),
		('checkpoint(scope idempotency.identifier, key idempotency.identifier, token bigint, recovery_point text, state idempotency.document DEFAULT NULL::idempotency.document)',
			'timestamp with time zone', 'c', 'volatile', 'unsafe', false),
		('claim_abandoned(scope idempotency.identifier, lease interval, max integer DEFAULT 1)',
			'SETOF idempotency.abandoned', 'c', 'volatile', 'unsafe', false),
		('run(scope idempotency.identifier, key idempotency.identifier, request idempotency.document, handler regprocedure, wait interval DEFAULT NULL::interval, retention interval DEFAULT NULL::interval)',
			'idempotency.operation', 'c', 'volatile', 'unsafe', false),
		('peek(scope idempotency.identifier, key idempotency.identifier)', 'idempotency.operation', 'c', 'stable', 'unsafe', false),
		('holders()', 'SETOF idempotency.holder', 'sql', 'volatile', 'unsafe', false),
		('holders(scope idempotency.identifier, key idempotency.identifier)', 'SETOF idempotency.holder', 'sql', 'volatile', 'unsafe', false),
		('forget(scope idempotency.identifier, key idempotency.identifier)', 'boolean', 'c', 'volatile', 'unsafe', false),
		('once(scope idempotency.identifier, key idempotency.identifier, retention interval DEFAULT NULL::interval)',
			'boolean', 'c', 'volatile', 'unsafe', false),
		('once_many(scope idempotency.identifier, keys idempotency.identifier[], retention interval DEFAULT NULL::interval)',
			'SETOF text', 'c', 'volatile', 'unsafe', false),

		-- guards
		('require_claim()', 'trigger', 'c', 'volatile', 'unsafe', false),
		('check_commit()', 'boolean', 'c', 'volatile', 'unsafe', false),
		('current_key(scope idempotency.identifier)', 'text', 'c', 'volatile', 'unsafe', false),

		-- outbox
		('publish(topic text, payload idempotency.document, aggregate_id idempotency.identifier DEFAULT NULL::idempotency.identifier, type text DEFAULT NULL::text, headers idempotency.document DEFAULT NULL::idempotency.document, event_id uuid DEFAULT NULL::uuid, deliver_at timestamp with time zone DEFAULT NULL::timestamp with time zone)',
			'uuid', 'c', 'volatile', 'unsafe', false),
		('subscribe(subscription text, topics text[], handler regprocedure DEFAULT NULL::regprocedure, start_at text DEFAULT NULL::text, max_attempts integer DEFAULT NULL::integer, retry_delay interval DEFAULT NULL::interval, max_retry_delay interval DEFAULT NULL::interval, max_lag interval DEFAULT NULL::interval, owner regrole DEFAULT NULL::regrole, partitions integer DEFAULT NULL::integer, dead_letter_retention interval DEFAULT NULL::interval)',
			'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('alter_subscription(subscription text, topics text[] DEFAULT NULL::text[], handler regprocedure DEFAULT NULL::regprocedure, max_attempts integer DEFAULT NULL::integer, retry_delay interval DEFAULT NULL::interval, max_retry_delay interval DEFAULT NULL::interval, max_lag interval DEFAULT NULL::interval, owner regrole DEFAULT NULL::regrole, partitions integer DEFAULT NULL::integer, dead_letter_retention interval DEFAULT NULL::interval)',
			'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('unsubscribe(subscription text)', 'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('pause(subscription text)', 'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('resume(subscription text)', 'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('seek(subscription text, target text)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('seek(subscription text, target timestamp with time zone)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('fetch(subscription text, max_events integer DEFAULT 100, wait interval DEFAULT ''00:00:00''::interval, lease interval DEFAULT ''00:00:30''::interval, max_bytes bigint DEFAULT 10485760)',
			'SETOF idempotency.event', 'plpgsql', 'volatile', 'unsafe', false),
		('has_more(subscription text)', 'boolean', 'plpgsql', 'volatile', 'unsafe', false),
		('ack(subscription text, batch bigint)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('ack(subscription text, batch bigint, events bigint[])', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('nack(subscription text, batch bigint, event_id uuid, error text DEFAULT NULL::text, retry_in interval DEFAULT NULL::interval, dead boolean DEFAULT false)',
			'timestamp with time zone', 'plpgsql', 'volatile', 'unsafe', false),
		('extend(subscription text, batch bigint, lease interval)', 'timestamp with time zone', 'plpgsql', 'volatile', 'unsafe', false),
		('deliver(IN subscription text, IN handler regprocedure DEFAULT NULL::regprocedure, IN max_events integer DEFAULT 100, IN duration interval DEFAULT ''00:01:00''::interval, IN lease interval DEFAULT ''00:01:00''::interval, IN wait interval DEFAULT ''00:00:00''::interval)',
			NULL, 'plpgsql', 'volatile', 'unsafe', false),
		('handler_of(subscription text)', 'text', 'plpgsql', 'volatile', 'unsafe', false),
		('end_event()', 'boolean', 'c', 'volatile', 'unsafe', false),
		('redrive(subscription text)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('redrive(subscription text, event_id uuid)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('discard(subscription text)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),
		('discard(subscription text, event_id uuid)', 'bigint', 'plpgsql', 'volatile', 'unsafe', false),

		-- helpers
		('canonical(document idempotency.document)', 'text', 'c', 'immutable', 'safe', true),
		('fingerprint(document idempotency.document)', 'bytea', 'c', 'immutable', 'safe', true),
		('fingerprint(method text, path text, body idempotency.document)',
			'bytea', 'c', 'immutable', 'safe', false),
		('derive_key(scope idempotency.identifier, key idempotency.identifier, step idempotency.identifier)', 'uuid', 'c', 'immutable', 'safe', true),
		('natural_key(VARIADIC parts idempotency.identifier[])', 'text', 'c', 'immutable', 'safe', false),
		('stable_text(value anyelement)', 'text', 'sql', 'stable', 'safe', true),
		('uuidv7()', 'uuid', 'c', 'volatile', 'safe', false),
		('parse_header(value text)', 'text', 'c', 'immutable', 'safe', false),
		('problem(operation idempotency.operation)', 'json', 'c', 'stable', 'safe', true),
		('problem(sqlstate text)', 'json', 'c', 'stable', 'safe', true),
		('problem_headers(operation idempotency.operation)', 'json', 'c', 'stable', 'safe', true),
		('problem_headers(sqlstate text)', 'json', 'c', 'stable', 'safe', true),

		-- statistics and reaping
		('stats_reset()', 'timestamp with time zone', 'c', 'volatile', 'unsafe', false),
		('reap(max_rows integer DEFAULT 1000)', 'bigint', 'c', 'volatile', 'unsafe', false),

		-- settings
		('configure(name text, value text, scope text DEFAULT ''*''::text)', 'text', 'plpgsql', 'volatile', 'unsafe', false),
		('setting(name text, scope text DEFAULT NULL::text)', 'text', 'plpgsql', 'stable', 'unsafe', false),

		-- privileges
		('grant_client(role regrole)', 'boolean', 'sql', 'volatile', 'unsafe', true),
		('grant_consumer(role regrole)', 'boolean', 'sql', 'volatile', 'unsafe', true),
		('grant_operator(role regrole)', 'boolean', 'sql', 'volatile', 'unsafe', true),
		('grant_backup(role regrole)', 'boolean', 'sql', 'volatile', 'unsafe', true)
	$$,
	'these functions, with these results, languages, volatilities, parallel safeties and strictnesses, and no other');

-- The functions that the server calls, out of sight of \df idempotency.*, and those in C of
-- delivery.  Its functions in SQL are the parts of the folder delivery.
SELECT set_eq(
	$$
		SELECT
			signature,
			pg_catalog.pg_get_function_result(oid) AS result,
			language::text,
			CASE provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' ELSE 'volatile' END AS volatility,
			CASE proparallel WHEN 's' THEN 'safe' WHEN 'r' THEN 'restricted' ELSE 'unsafe' END AS parallel,
			proisstrict AS strict
		FROM pg_temp.function
		WHERE pronamespace = 'idempotency_internal'::pg_catalog.regnamespace
			AND (language = 'c' OR proname IN ('refuse_update', 'grant_privileges'))
	$$,
	$$ VALUES
		-- a support function, a trigger, the function of a view, and a part of three functions
		('single_evaluation(internal)', 'internal', 'c', 'immutable', 'safe', true),
		('refuse_update()', 'trigger', 'plpgsql', 'volatile', 'unsafe', false),
		('stats(OUT datid oid, OUT claims bigint, OUT replays bigint, OUT in_progress bigint, OUT mismatches bigint, OUT takeovers bigint, OUT completions bigint, OUT failures bigint, OUT releases bigint, OUT stale_tokens bigint, OUT refused_commits bigint, '
			'OUT reaped bigint, OUT zombies_reaped bigint, OUT waits bigint, OUT wait_time interval, OUT published bigint, OUT delivered bigint, '
			'OUT acknowledged bigint, OUT failed bigint, OUT batches_expired bigint, OUT dead_letters bigint, OUT redriven bigint, OUT events_reaped bigint, OUT events_dropped bigint, OUT stats_reset timestamp with time zone)',
			'SETOF record', 'c', 'volatile', 'unsafe', false),
		('grant_privileges(role regrole, VARIADIC privileges text[])', 'boolean', 'plpgsql', 'volatile', 'unsafe', true),

		-- what delivery calls
		('check_name(what text, name text)', 'void', 'c', 'stable', 'safe', false),
		('caller()', 'name', 'c', 'stable', 'safe', false),
		('listen(topics text[])', 'void', 'c', 'volatile', 'unsafe', true),
		('wait_for_event(until timestamp with time zone, pause double precision)', 'void', 'c', 'volatile', 'unsafe', true),
		('count_events(kind text, events bigint)', 'void', 'c', 'volatile', 'unsafe', true),
		('lock_number(scope idempotency.identifier, key idempotency.identifier)', 'bigint', 'c', 'volatile', 'unsafe', false),
		('subscriptions_changed()', 'trigger', 'c', 'volatile', 'unsafe', false),
		('wake_relay(subscription text)', 'void', 'c', 'volatile', 'unsafe', true),
		('check_handler(handler text, owner name)', 'void', 'c', 'volatile', 'unsafe', true),
		('is_worker_batch(batch bigint)', 'boolean', 'c', 'volatile', 'unsafe', true),
		('was_given_back(batch bigint)', 'boolean', 'c', 'volatile', 'unsafe', true),
		('is_worker_fetch()', 'boolean', 'c', 'volatile', 'unsafe', false),
		('relay_problem(subscription text)', 'text', 'c', 'volatile', 'safe', true),

		-- what configure() calls
		('setting(name text, scope text DEFAULT ''''::text)', 'text', 'c', 'stable', 'safe', true),
		('check_setting(name text, value text)', 'void', 'c', 'stable', 'safe', true),
		('forget_settings()', 'void', 'c', 'volatile', 'unsafe', false),

		-- the I/O functions of the type document, and its casts
		('document(jsonb)', 'idempotency.document', 'c', 'immutable', 'safe', true),
		('document_in(cstring)', 'idempotency.document', 'c', 'immutable', 'safe', true),
		('document_out(idempotency.document)', 'cstring', 'c', 'immutable', 'safe', true),
		('document_recv(internal)', 'idempotency.document', 'c', 'immutable', 'safe', true),
		('document_send(idempotency.document)', 'bytea', 'c', 'immutable', 'safe', true),
		('document_to_json(idempotency.document)', 'json', 'c', 'immutable', 'safe', true),

		-- the I/O functions of the type identifier
		('identifier(character)', 'idempotency.identifier', 'c', 'immutable', 'safe', true),
		('identifier_in(cstring)', 'idempotency.identifier', 'c', 'immutable', 'safe', true),
		('identifier_out(idempotency.identifier)', 'cstring', 'c', 'immutable', 'safe', true),
		('identifier_recv(internal)', 'idempotency.identifier', 'c', 'immutable', 'safe', true),
		('identifier_send(idempotency.identifier)', 'bytea', 'c', 'immutable', 'safe', true),

		-- the type of the stored key: I/O, order and equality
		('keytext_in(cstring)', 'idempotency.keytext', 'c', 'immutable', 'safe', true),
		('keytext_out(idempotency.keytext)', 'cstring', 'c', 'immutable', 'safe', true),
		('keytext_recv(internal)', 'idempotency.keytext', 'c', 'immutable', 'safe', true),
		('keytext_send(idempotency.keytext)', 'bytea', 'c', 'immutable', 'safe', true),
		('keytext_lt(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_le(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_eq(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_ne(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_ge(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_gt(idempotency.keytext, idempotency.keytext)', 'boolean', 'c', 'immutable', 'safe', true),
		('keytext_cmp(idempotency.keytext, idempotency.keytext)', 'integer', 'c', 'immutable', 'safe', true),
		('keytext_sortsupport(internal)', 'void', 'c', 'immutable', 'safe', true)
	$$,
	'these functions of types, casts, operators, triggers, views and the planner, and no other');

-- Delivery's functions read tables to which consumers have no right.
SELECT set_eq(
	'SELECT proname::text FROM pg_temp.function WHERE prosecdef',
	ARRAY['subscribe', 'alter_subscription', 'unsubscribe', 'pause', 'resume', 'seek', 'fetch', 'has_more', 'ack', 'nack', 'extend', 'handler_of', 'redrive', 'discard', 'configure', 'setting', 'apply_settings', 'holders'],
	'these functions run with the rights of their owner, and no other');

SELECT is_empty(
	'SELECT signature FROM pg_temp.function WHERE proleakproof',
	'no function is LEAKPROOF');

-- Internal functions inherit the search path of those.  deliver() runs with that of the caller,
-- for the handler, and qualifies every name.
SELECT set_eq(
	$$
		SELECT proname::text FROM pg_temp.function
		WHERE language <> 'c' AND (pronamespace = 'idempotency'::pg_catalog.regnamespace OR prorettype = 'trigger'::pg_catalog.regtype)
			AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)
	$$,
	ARRAY['deliver'],
	'every function that is not C and that a role can call pins its search path, temporary schema last');

SELECT isnt_empty(
	$$ SELECT signature FROM pg_temp.function WHERE language <> 'c' $$,
	'at least one function is not C');

SELECT is_empty(
	$$ SELECT signature FROM pg_temp.function WHERE language = 'c' AND probin <> '$libdir/idempotency' $$,
	'every C function is in $libdir/idempotency');

SELECT set_eq(
	$$ SELECT oid FROM pg_temp.function $$,
	$$
		SELECT d.objid
		FROM pg_catalog.pg_depend AS d
		JOIN pg_catalog.pg_extension AS e ON e.oid = d.refobjid
		WHERE e.extname = 'idempotency' AND d.deptype = 'e'
			AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass
			AND d.classid = 'pg_catalog.pg_proc'::pg_catalog.regclass
	$$,
	'the functions of the schemas are those of the extension');

SELECT * FROM finish();
ROLLBACK;
