-- The public contract: every object of the extension except functions, its comment, and
-- the data that pg_dump must dump.

BEGIN;

SELECT pg_catalog.set_config('search_path', e.extnamespace::pg_catalog.regnamespace::text, true)
FROM pg_catalog.pg_extension AS e
WHERE e.extname = 'pgtap' \g /dev/null

SELECT plan(38);

-- The objects that CREATE EXTENSION creates, without dependent ones: array types, row
-- types of relations, indexes, rules and constraints.
CREATE TEMPORARY VIEW member AS
	SELECT
		d.classid,
		d.objid,
		o.type,
		pg_catalog.replace(o.identity, 'pg_catalog.', '') AS identity
	FROM pg_catalog.pg_extension AS e
	JOIN pg_catalog.pg_depend AS d
		ON d.refobjid = e.oid AND d.refclassid = 'pg_catalog.pg_extension'::pg_catalog.regclass
	CROSS JOIN LATERAL pg_catalog.pg_identify_object(d.classid, d.objid, 0) AS o
	WHERE e.extname = 'idempotency' AND d.deptype = 'e'
		-- From PostgreSQL 17 on, array types and row types of relations are members.
		AND NOT EXISTS (
			SELECT FROM pg_catalog.pg_type AS t
			LEFT JOIN pg_catalog.pg_class AS c ON c.oid = t.typrelid
			WHERE d.classid = 'pg_catalog.pg_type'::pg_catalog.regclass AND t.oid = d.objid
				AND (t.typcategory = 'A' OR c.relkind <> 'c'));

CREATE TEMPORARY VIEW relation AS
	SELECT c.*
	FROM pg_catalog.pg_class AS c
	WHERE c.relnamespace = 'idempotency'::pg_catalog.regnamespace;

CREATE TEMPORARY VIEW relation_column AS
	SELECT
		c.relname,
		c.relkind,
		a.attrelid,
		a.attnum,
		a.attname::text COLLATE "default" AS attname,
		a.attnotnull,
		a.attcollation,
		pg_catalog.format_type(a.atttypid, a.atttypmod) AS type
	FROM pg_temp.relation AS c
	JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
	WHERE a.attnum > 0 AND NOT a.attisdropped AND c.relkind NOT IN ('i', 'S');

-- The extension itself.

SELECT has_extension('idempotency');

SELECT is(extversion, '1.0', 'the version equals that of the control file')
FROM pg_catalog.pg_extension WHERE extname = 'idempotency';

SELECT is(extrelocatable, false, 'the schema is fixed')
FROM pg_catalog.pg_extension WHERE extname = 'idempotency';

SELECT set_eq(
	$$ SELECT type, identity FROM pg_temp.member WHERE type <> 'function' $$,
	$$ VALUES
		('schema', 'idempotency'),
		('schema', 'idempotency_internal'),
		('type', 'idempotency.identifier'),
		('type', 'idempotency.document'),
		('type', 'idempotency.keytext'),
		('type', 'idempotency.outcome'),
		('type', 'idempotency.operation'),
		('type', 'idempotency.abandoned'),
		('type', 'idempotency.event'),
		('table', 'idempotency.key'),
		('sequence', 'idempotency.token'),
		('view', 'idempotency.keys'),
		('view', 'idempotency.zombies'),
		('table', 'idempotency.configuration'),
		('view', 'idempotency.settings'),
		('table', 'idempotency.outbox'),
		('sequence', 'idempotency.outbox_seq'),
		('table', 'idempotency.subscription'),
		('table', 'idempotency.partition'),
		('table', 'idempotency."position"'),
		('table', 'idempotency_internal.probe'),
		('table', 'idempotency.parked'),
		('view', 'idempotency.dead_letters'),
		('view', 'idempotency.partitions'),
		('view', 'idempotency.subscriptions'),
		('table', 'idempotency.reaper'),
		('view', 'idempotency.stats'),
		('procedure', 'idempotency.deliver(text,regprocedure,integer,interval,interval,interval)'),
		('cast', '(text AS idempotency.identifier)'),
		('cast', '(character varying AS idempotency.identifier)'),
		('cast', '(character AS idempotency.identifier)'),
		('cast', '(name AS idempotency.identifier)'),
		('cast', '(uuid AS idempotency.identifier)'),
		('cast', '(smallint AS idempotency.identifier)'),
		('cast', '(integer AS idempotency.identifier)'),
		('cast', '(bigint AS idempotency.identifier)'),
		('cast', '(idempotency.identifier AS text)'),
		('cast', '(idempotency.keytext AS idempotency.identifier)'),
		('cast', '(json AS idempotency.document)'),
		('cast', '(jsonb AS idempotency.document)'),
		('cast', '(text AS idempotency.document)'),
		('cast', '(character varying AS idempotency.document)'),
		('cast', '(idempotency.document AS json)'),
		('cast', '(idempotency.document AS jsonb)'),
		('cast', '(idempotency.keytext AS text)'),
		('cast', '(text AS idempotency.keytext)'),
		('operator', '<(idempotency.keytext,idempotency.keytext)'),
		('operator', '<=(idempotency.keytext,idempotency.keytext)'),
		('operator', '=(idempotency.keytext,idempotency.keytext)'),
		('operator', '<>(idempotency.keytext,idempotency.keytext)'),
		('operator', '>=(idempotency.keytext,idempotency.keytext)'),
		('operator', '>(idempotency.keytext,idempotency.keytext)'),
		('operator class', 'idempotency.keytext_ops USING btree'),
		('operator family', 'idempotency.keytext_ops USING btree')
	$$,
	'these objects, besides the functions, and no other');

SELECT set_eq(
	$$
		SELECT c.oid FROM pg_temp.relation AS c WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
	$$,
	$$
		SELECT objid FROM pg_temp.member
		WHERE classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND identity <> 'idempotency_internal.probe'
	$$,
	'the relations of the schema are those of the extension');

-- pg_dump: a key that a restore loses can cause a double charge.

SELECT set_eq(
	$$
		SELECT config.oid
		FROM pg_catalog.pg_extension AS e
		CROSS JOIN LATERAL pg_catalog.unnest(e.extconfig) AS config(oid)
		WHERE e.extname = 'idempotency'
	$$,
	$$ SELECT c.oid FROM pg_temp.relation AS c WHERE c.relkind IN ('r', 'p', 'S') $$,
	'every table and sequence is registered for pg_dump');

SELECT is_empty(
	$$
		SELECT condition
		FROM pg_catalog.pg_extension AS e
		CROSS JOIN LATERAL pg_catalog.unnest(e.extcondition) AS condition
		WHERE e.extname = 'idempotency' AND condition <> ''
	$$,
	'with all rows');

-- Comments.

SELECT is_empty(
	$$
		SELECT type, identity FROM pg_temp.member
		WHERE pg_catalog.obj_description(objid, classid::pg_catalog.regclass::name) IS NULL
	$$,
	'every object of the extension has a comment');

SELECT is_empty(
	$$
		SELECT relname, attname FROM pg_temp.relation_column
		WHERE pg_catalog.col_description(attrelid, attnum) IS NULL
	$$,
	'every column has a comment');

SELECT is_empty(
	$$
		SELECT relname FROM pg_temp.relation
		WHERE relkind = 'i' AND pg_catalog.obj_description(oid, 'pg_class') IS NULL
	$$,
	'every index has a comment');

-- The composite that every call returns: callers rely on the order of its columns too.

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'operation' ORDER BY attnum
	$$,
	$$ VALUES
		('outcome', 'idempotency.outcome'),
		('replayed', 'boolean'),
		('token', 'bigint'),
		('attempt', 'integer'),
		('recovery_point', 'text'),
		('state', 'json'),
		('status', 'integer'),
		('headers', 'json'),
		('response', 'json'),
		('failed', 'boolean'),
		('retry_after', 'interval'),
		('expires_at', 'timestamp with time zone'),
		('fingerprint', 'bytea')
	$$,
	'the columns of operation');
SELECT enum_has_labels('idempotency', 'outcome', ARRAY['claimed', 'taken_over', 'replayed', 'in_progress', 'mismatched'],
	'whose outcome is an enum');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'abandoned' ORDER BY attnum
	$$,
	$$ VALUES
		('token', 'bigint'),
		('scope', 'text'),
		('key', 'text'),
		('request', 'json'),
		('attempt', 'integer'),
		('recovery_point', 'text'),
		('state', 'json')
	$$,
	'the columns of abandoned, the result for completers');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'keys' ORDER BY attnum
	$$,
	$$ VALUES
		('scope', 'text'),
		('key', 'idempotency.keytext'),
		('state', 'text'),
		('status', 'integer'),
		('age', 'interval'),
		('expires_in', 'interval'),
		('response_size', 'text'),
		('fingerprint', 'text'),
		('created_at', 'timestamp with time zone'),
		('expires_at', 'timestamp with time zone')
	$$,
	'the columns of keys, without a response');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'zombies' ORDER BY attnum
	$$,
	$$ VALUES
		('scope', 'text'),
		('key', 'idempotency.keytext'),
		('attempt', 'integer'),
		('recovery_point', 'text'),
		('age', 'interval'),
		('overdue', 'interval'),
		('expires_in', 'interval'),
		('leased_until', 'timestamp with time zone')
	$$,
	'the columns of zombies, without token, request and state');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'stats' ORDER BY attnum
	$$,
	$$ VALUES
		('datid', 'oid'),
		('datname', 'name'),
		('claims', 'bigint'),
		('replays', 'bigint'),
		('in_progress', 'bigint'),
		('mismatches', 'bigint'),
		('takeovers', 'bigint'),
		('completions', 'bigint'),
		('failures', 'bigint'),
		('releases', 'bigint'),
		('stale_tokens', 'bigint'),
		('reaped', 'bigint'),
		('zombies_reaped', 'bigint'),
		('waits', 'bigint'),
		('wait_time', 'interval'),
		('published', 'bigint'),
		('delivered', 'bigint'),
		('acknowledged', 'bigint'),
		('failed', 'bigint'),
		('dead_letters', 'bigint'),
		('redriven', 'bigint'),
		('events_reaped', 'bigint'),
		('events_dropped', 'bigint'),
		('stats_reset', 'timestamp with time zone')
	$$,
	'the columns of stats');

-- The columns that a consumer gets: handlers receive them as one row.

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'event' ORDER BY attnum
	$$,
	$$ VALUES
		('batch', 'bigint'),
		('seq', 'bigint'),
		('id', 'uuid'),
		('topic', 'text'),
		('aggregate_id', 'text'),
		('type', 'text'),
		('payload', 'json'),
		('headers', 'json'),
		('attempt', 'integer'),
		('published_at', 'timestamp with time zone')
	$$,
	'the columns of event');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'dead_letters' ORDER BY attnum
	$$,
	$$ VALUES
		('subscription', 'text'),
		('event_id', 'uuid'),
		('topic', 'text'),
		('aggregate_id', 'text'),
		('type', 'text'),
		('error', 'text'),
		('attempts', 'integer'),
		('first_failed_at', 'timestamp with time zone'),
		('last_failed_at', 'timestamp with time zone'),
		('published_at', 'timestamp with time zone'),
		('payload', 'json'),
		('headers', 'json'),
		('seq', 'bigint')
	$$,
	'the columns of dead_letters');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'subscriptions' ORDER BY attnum
	$$,
	$$ VALUES
		('subscription', 'text'),
		('lag', 'interval'),
		('scheduled', 'bigint'),
		('waiting', 'bigint'),
		('dead', 'bigint'),
		('last_error', 'text'),
		('last_error_at', 'timestamp with time zone'),
		('oldest_parked_at', 'timestamp with time zone'),
		('owner', 'name'),
		('topics', 'text[]'),
		('handler', 'text'),
		('partitions', 'integer'),
		('max_attempts', 'integer'),
		('retry_delay', 'interval'),
		('max_retry_delay', 'interval'),
		('max_lag', 'interval'),
		('dead_letter_retention', 'interval'),
		('paused_at', 'timestamp with time zone'),
		('created_at', 'timestamp with time zone')
	$$,
	'the columns of subscriptions');

SELECT results_eq(
	$$
		SELECT attname, type FROM pg_temp.relation_column
		WHERE relname = 'partitions' ORDER BY attnum
	$$,
	$$ VALUES
		('subscription', 'text'),
		('partition', 'integer'),
		('partitions', 'integer'),
		('state', 'text'),
		('lag', 'interval'),
		('lag_events', 'bigint'),
		('batch_events', 'integer'),
		('attempt', 'integer'),
		('holder', 'integer'),
		('leased_at', 'timestamp with time zone'),
		('leased_until', 'timestamp with time zone'),
		('acknowledged', 'bigint'),
		('failed', 'bigint')
	$$,
	'the columns of partitions');

-- The event log: readers that use logical decoding know its columns by name.

SELECT results_eq(
	$$
		SELECT attname, type, attnotnull, collname::text COLLATE "default"
		FROM pg_temp.relation_column
		LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = attcollation
		WHERE relname = 'outbox' ORDER BY attnum
	$$,
	$$ VALUES
		('seq', 'bigint', true, NULL),
		('txid', 'xid8', true, NULL),
		('published_at', 'timestamp with time zone', true, NULL),
		('id', 'uuid', true, NULL),
		('bucket', 'integer', true, NULL),
		('bytes', 'integer', true, NULL),
		('deliver_at', 'timestamp with time zone', false, NULL),
		('aggregatetype', 'text', true, 'C'),
		('aggregateid', 'text', false, 'C'),
		('type', 'text', false, 'C'),
		('payload', 'json', false, NULL),
		('headers', 'json', false, NULL)
	$$,
	'the columns of outbox');

SELECT results_eq(
	$$
		SELECT pg_catalog.pg_get_indexdef(i.indexrelid), i.indisprimary, i.indisvalid
		FROM pg_catalog.pg_index AS i
		WHERE i.indrelid = 'idempotency.outbox'::pg_catalog.regclass
	$$,
	$$ VALUES ('CREATE UNIQUE INDEX outbox_pkey ON idempotency.outbox USING btree (seq)', true, true) $$,
	'one index: publish() writes one row and one index entry');

SELECT results_eq(
	$$
		SELECT c.relname::text COLLATE "default", c.relkind::text, c.relpersistence::text, am.amname = 'heap',
			c.relrowsecurity, c.relhastriggers, c.relhasrules
		FROM pg_temp.relation AS c
		JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
		WHERE c.relname IN ('outbox', 'subscription', 'partition', 'position', 'parked') AND c.relkind = 'r'
		ORDER BY c.relname COLLATE "C"
	$$,
	$$ VALUES
		('outbox', 'r', 'p', true, false, true, false),
		('parked', 'r', 'p', true, false, false, false),
		('partition', 'r', 'p', true, false, false, false),
		('position', 'r', 'p', true, false, false, false),
		('subscription', 'r', 'p', true, false, true, false)
	$$,
	'the tables of the outbox are plain permanent heaps');

SELECT results_eq(
	$$
		SELECT tgrelid::pg_catalog.regclass::text COLLATE "default", pg_catalog.pg_get_triggerdef(oid), tgenabled::text
		FROM pg_catalog.pg_trigger
		WHERE tgrelid IN (SELECT oid FROM pg_temp.relation)
		ORDER BY 1
	$$,
	$$ VALUES ('idempotency.configuration',
		'CREATE TRIGGER apply_settings AFTER INSERT OR DELETE OR UPDATE OR TRUNCATE ON idempotency.configuration FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.apply_settings()',
		'A'),
		('idempotency.outbox',
		'CREATE TRIGGER refuse_update BEFORE UPDATE ON idempotency.outbox FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.refuse_update()',
		'O'),
		('idempotency.subscription',
		'CREATE TRIGGER changed AFTER INSERT OR DELETE OR UPDATE OR TRUNCATE ON idempotency.subscription FOR EACH STATEMENT EXECUTE FUNCTION idempotency_internal.subscriptions_changed()',
		'O') $$,
	'three triggers: one checks settings, one refuses UPDATE of events, and one tells workers of changes');

SELECT is_empty(
	$$
		SELECT adrelid::pg_catalog.regclass, adnum FROM pg_catalog.pg_attrdef
		WHERE adrelid = 'idempotency.outbox'::pg_catalog.regclass
	$$,
	'only publish() assigns event numbers');

SELECT results_eq(
	$$
		SELECT pg_catalog.format_type(seqtypid, NULL), seqincrement, seqmin, seqcache, seqcycle
		FROM pg_catalog.pg_sequence WHERE seqrelid = 'idempotency.outbox_seq'::pg_catalog.regclass
	$$,
	$$ VALUES ('bigint', 1::bigint, 1::bigint, 1::bigint, false) $$,
	'event numbers are drawn one by one, and never reused');

-- The table whose primary key decides conflicts.

SELECT results_eq(
	$$
		SELECT attname, type, attnotnull, collname::text COLLATE "default"
		FROM pg_temp.relation_column
		LEFT JOIN pg_catalog.pg_collation AS c ON c.oid = attcollation
		WHERE relname = 'key' ORDER BY attnum
	$$,
	$$ VALUES
		('created_at', 'timestamp with time zone', true, NULL),
		('scope', 'text', true, 'C'),
		('key', 'idempotency.keytext', true, NULL),
		('fingerprint', 'bytea', false, NULL),
		('response', 'json', false, NULL),
		('headers', 'json', false, NULL),
		('status', 'smallint', false, NULL),
		('expires_at', 'timestamp with time zone', true, NULL),
		('leased_at', 'timestamp with time zone', false, NULL),
		('leased_until', 'timestamp with time zone', false, NULL),
		('token', 'bigint', false, NULL),
		('retention', 'interval', false, NULL),
		('attempt', 'integer', false, NULL),
		('recovery_point', 'text', false, 'default'),
		('recovery_state', 'json', false, NULL),
		('request', 'json', false, NULL),
		('finished_by', 'bigint', false, NULL)
	$$,
	'the columns of key');

SELECT results_eq(
	$$
		SELECT pg_catalog.pg_get_indexdef(i.indexrelid), i.indisprimary, i.indisvalid
		FROM pg_catalog.pg_index AS i
		WHERE i.indrelid = 'idempotency.key'::pg_catalog.regclass
		ORDER BY i.indisprimary DESC
	$$,
	$$ VALUES
		('CREATE UNIQUE INDEX key_pkey ON idempotency.key USING btree (key, scope)', true, true),
		('CREATE INDEX key_abandoned ON idempotency.key USING btree (scope, token) WHERE (token IS NOT NULL)', false, true)
	$$,
	'two indexes: the primary key, and a partial one for operations in progress');

SELECT results_eq(
	$$
		SELECT pg_catalog.format_type(seqtypid, NULL), seqincrement, seqmin, seqmax, seqcycle
		FROM pg_catalog.pg_sequence WHERE seqrelid = 'idempotency.token'::pg_catalog.regclass
	$$,
	$$ VALUES ('bigint', 1::bigint, 1::bigint, 9223372036854775807, false) $$,
	'tokens increase, and are never reused');

SELECT results_eq(
	$$
		SELECT c.relkind::text, c.relpersistence::text, am.amname = 'heap', c.relrowsecurity, c.relhastriggers, c.relhasrules
		FROM pg_temp.relation AS c
		JOIN pg_catalog.pg_am AS am ON am.oid = c.relam
		WHERE c.relname = 'key'
	$$,
	$$ VALUES ('r', 'p', true, false, false, false) $$,
	'it is a plain permanent heap');

SELECT is_empty(
	$$ SELECT 1 FROM pg_catalog.pg_attrdef WHERE adrelid = 'idempotency.key'::pg_catalog.regclass $$,
	'without defaults');

-- The input type for JSON.

SELECT results_eq(
	$$
		SELECT typlen, typbyval, typalign::text, typstorage::text, typcollation
		FROM pg_catalog.pg_type WHERE oid = 'idempotency.document'::pg_catalog.regtype
	$$,
	$$
		SELECT typlen, typbyval, typalign::text, typstorage::text, typcollation
		FROM pg_catalog.pg_type WHERE oid = 'pg_catalog.json'::pg_catalog.regtype
	$$,
	'document has the storage of json');

SELECT set_eq(
	$$
		SELECT
			pg_catalog.format_type(castsource, NULL) AS source,
			pg_catalog.format_type(casttarget, NULL) AS target,
			castcontext::text,
			castmethod::text
		FROM pg_catalog.pg_cast
		WHERE 'idempotency.document'::pg_catalog.regtype IN (castsource, casttarget)
	$$,
	$$ VALUES
		('json', 'idempotency.document', 'i', 'b'),
		('jsonb', 'idempotency.document', 'i', 'f'),
		('text', 'idempotency.document', 'i', 'i'),
		('character varying', 'idempotency.document', 'i', 'i'),
		('idempotency.document', 'json', 'i', 'f'),
		('idempotency.document', 'jsonb', 'i', 'i')
	$$,
	'the usual types of callers cast to it implicitly');

-- The input type for scopes and keys.

SELECT results_eq(
	$$
		SELECT typlen, typbyval, typalign::text, typstorage::text, typcategory::text, typispreferred
		FROM pg_catalog.pg_type WHERE oid = 'idempotency.identifier'::pg_catalog.regtype
	$$,
	$$
		SELECT typlen, typbyval, typalign::text, typstorage::text, typcategory::text, false
		FROM pg_catalog.pg_type WHERE oid = 'pg_catalog.text'::pg_catalog.regtype
	$$,
	'identifier has the storage of text');

SELECT set_eq(
	$$
		SELECT
			pg_catalog.format_type(castsource, NULL) AS source,
			pg_catalog.format_type(casttarget, NULL) AS target,
			castcontext::text,
			castmethod::text
		FROM pg_catalog.pg_cast
		WHERE 'idempotency.identifier'::pg_catalog.regtype IN (castsource, casttarget)
	$$,
	$$ VALUES
		('text', 'idempotency.identifier', 'i', 'b'),
		('character varying', 'idempotency.identifier', 'i', 'b'),
		('character', 'idempotency.identifier', 'i', 'f'),
		('name', 'idempotency.identifier', 'i', 'i'),
		('uuid', 'idempotency.identifier', 'i', 'i'),
		('smallint', 'idempotency.identifier', 'i', 'i'),
		('integer', 'idempotency.identifier', 'i', 'i'),
		('bigint', 'idempotency.identifier', 'i', 'i'),
		('idempotency.keytext', 'idempotency.identifier', 'i', 'i'),
		('idempotency.identifier', 'text', 'i', 'b')
	$$,
	'texts, UUIDs and integers cast to it implicitly; text and varchar without a function');

SELECT is_empty(
	$$ SELECT oid FROM pg_catalog.pg_operator WHERE 'idempotency.identifier'::pg_catalog.regtype IN (oprleft, oprright) $$,
	'no operator takes it, so that its casts change no other query');

-- The settings.

LOAD 'idempotency';

SELECT set_eq(
	$$
		SELECT name, boot_val, unit, vartype, context, min_val, max_val
		FROM pg_catalog.pg_settings
		WHERE name LIKE 'idempotency.%'
	$$,
	$$ VALUES
		('idempotency.retention', '1d', NULL, 'string', 'user', NULL, NULL),
		('idempotency.wait', '5s', NULL, 'string', 'user', NULL, NULL),
		('idempotency.max_payload_size', '1MB', NULL, 'string', 'user', NULL, NULL),
		('idempotency.max_response_size', '1MB', NULL, 'string', 'user', NULL, NULL),
		('idempotency.scope_prefix', '', NULL, 'string', 'superuser', NULL, NULL),
		('idempotency.final_errors', 'IKFIN', NULL, 'string', 'user', NULL, NULL),
		('idempotency.documentation', '', NULL, 'string', 'user', NULL, NULL),
		('idempotency.outbox_retention', '1d', NULL, 'string', 'superuser', NULL, NULL),
		('idempotency.relay_workers', '2', NULL, 'integer', 'sighup', '0', '1024'),
		('idempotency.handler_timeout', '1min', NULL, 'string', 'superuser', NULL, NULL),
		('idempotency.reaper_naptime', '10000', 'ms', 'integer', 'sighup', '0', '2147483647'),
		('idempotency.databases', '', NULL, 'string', 'sighup', NULL, NULL)
	$$,
	'these settings, with these defaults, units and ranges, and no other');

SELECT is_empty(
	$$
		SELECT name FROM pg_catalog.pg_settings
		WHERE name LIKE 'idempotency.%' AND coalesce(short_desc, '') = ''
	$$,
	'every setting has a description');

SELECT * FROM finish();
ROLLBACK;
