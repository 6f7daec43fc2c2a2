# 036_rights.pl
#
# Proves that a role can use exactly the functions, relations, sequences, types,
# operators and casts of the extension that it was granted. The objects come from the
# catalog, so that new ones are tested too. Tests plain roles with USAGE on the schema,
# clients, consumers and operators. Also proves that a client with a scope prefix
# reaches no other scope through any function. test/pgtap/privileges.sql lists the
# expected grants.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => 'log_statement = none');
my @roles = qw(plain client consumer operator);
$node->safe_psql('postgres', join ';', (map { "CREATE ROLE $_ LOGIN" } @roles), (map { "GRANT USAGE ON SCHEMA idempotency TO $_" } @roles), q{
	SELECT idempotency.grant_client('client'), idempotency.grant_consumer('consumer'), idempotency.grant_operator('operator');
	GRANT CREATE ON SCHEMA public TO plain, client, consumer, operator;
	BEGIN;
	SELECT idempotency.claim('t2/x', 'k', '1'), idempotency.complete('t2/x', 'k', '"secret"');
	COMMIT;
	SELECT token FROM idempotency.claim('t2/x', 'leased', '"secret"', lease => '1 microsecond');
	SELECT idempotency.subscribe('everything', '{*}', start_at => 'beginning'), idempotency.publish('t', '"secret"');

	-- The result of a statement as a role; the statement is rolled back.
	CREATE FUNCTION try(role name, statement text) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		state text := '';
	BEGIN
		EXECUTE format('SET LOCAL ROLE %I', role);
		EXECUTE statement;
		RAISE EXCEPTION 'undo' USING ERRCODE = 'P9999';
	EXCEPTION WHEN OTHERS THEN
		state := SQLSTATE;
		RETURN CASE state WHEN 'P9999' THEN 'done' ELSE state END;
	END $$;
	CREATE VIEW member AS SELECT d.classid, d.objid FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
		WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency';

	-- Every way to use an object and the privilege that it needs; NULL: no role has it.
	CREATE VIEW door AS
	-- A function of the server needs USAGE on its schema, which no role has.
	SELECT 'function ' || p.oid::regprocedure AS object, CASE p.pronamespace WHEN 'idempotency'::regnamespace THEN 'EXECUTE' END AS "right", p.oid,
		CASE p.prokind WHEN 'p' THEN format('CALL %s(%s)', p.oid::regproc, (SELECT string_agg(format('NULL::%s', format_type(t, NULL)), ', ') FROM unnest(p.proargtypes::oid[]) AS t))
			ELSE format('SELECT %s(%s) FROM (SELECT %s OFFSET 0) AS a', p.oid::regproc,
			(SELECT string_agg(CASE WHEN p.provariadic <> 0 AND n = p.pronargs THEN 'VARIADIC ' ELSE '' END || 'a' || n, ', ')
				FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a (t, n)),
			(SELECT string_agg(format('NULL::%s AS a%s', format_type(t, NULL), n), ', ') FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a (t, n))) END AS statement
	FROM pg_proc AS p JOIN member ON objid = p.oid AND classid = 'pg_proc'::regclass WHERE 'internal'::regtype <> ALL (p.proargtypes::oid[])
	UNION ALL
	SELECT 'function ' || p.oid::regprocedure, NULL, p.oid, replace(way, '%s', p.oid::regprocedure::text)
	FROM pg_proc AS p JOIN member ON objid = p.oid AND classid = 'pg_proc'::regclass, unnest(ARRAY['ALTER ROUTINE %s OWNER TO CURRENT_USER',
		'ALTER ROUTINE %s SECURITY DEFINER',
		'ALTER ROUTINE %s SET search_path = public', 'DROP ROUTINE %s CASCADE', 'COMMENT ON ROUTINE %s IS NULL']) AS way
	UNION ALL
	SELECT 'relation ' || c.relname, split_part(way, ':', 1), c.oid, replace(replace(split_part(way, ':', 2), '%s', c.oid::regclass::text), '%c',
			coalesce((SELECT quote_ident(attname) FROM pg_attribute WHERE attrelid = c.oid AND attnum = 1), 'none'))
	FROM pg_class AS c JOIN member ON objid = c.oid AND classid = 'pg_class'::regclass, unnest(ARRAY['SELECT:SELECT * FROM %s',
		'SELECT:EXPLAIN SELECT * FROM %s',  'SELECT:SELECT ctid FROM ONLY %s', 'SELECT:SELECT count(*) FROM %s',
		'INSERT:INSERT INTO %s DEFAULT VALUES', 'UPDATE:UPDATE %s SET %c = DEFAULT', 'DELETE:DELETE FROM %s',
		'TRUNCATE:TRUNCATE %s', 'TRUNCATE:TRUNCATE %s CASCADE', 'TRIGGER:CREATE TRIGGER t AFTER INSERT ON %s EXECUTE FUNCTION suppress_redundant_updates_trigger()']) AS way
	WHERE c.relkind IN ('r', 'v') AND NOT (c.relkind = 'v' AND way !~ '^SELECT:SELECT (.*\*|count)') AND NOT (c.relnatts = 0 AND way ~ '^UPDATE')
	UNION ALL
	SELECT 'relation ' || c.relname, NULL, c.oid, replace(way, '%s', c.oid::regclass::text)
	FROM pg_class AS c JOIN member ON objid = c.oid AND classid = 'pg_class'::regclass, unnest(ARRAY['ALTER TABLE %s OWNER TO CURRENT_USER',
		'DROP TABLE %s CASCADE', 'ALTER TABLE %s RENAME TO mine',
		'CREATE RULE r AS ON UPDATE TO %s DO INSTEAD NOTHING', 'ALTER TABLE %s ENABLE ROW LEVEL SECURITY', 'ALTER TABLE %s DISABLE TRIGGER ALL',
			'CREATE INDEX ON %s ((1))',
		'CREATE POLICY p ON %s', 'ALTER TABLE %s ADD mine int', 'ALTER TABLE %s SET UNLOGGED', 'CREATE TABLE public.child () INHERITS (%s)',
		'COMMENT ON TABLE %s IS NULL', 'LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', 'REINDEX TABLE %s']) AS way
	WHERE c.relkind = 'r'
	UNION ALL
	SELECT 'sequence ' || c.relname, NULL, c.oid, replace(way, '%s', c.oid::regclass::text)
	FROM pg_class AS c JOIN member ON objid = c.oid AND classid = 'pg_class'::regclass, unnest(ARRAY['SELECT nextval(''%s'')',
		'SELECT setval(''%s'', 1)', 'SELECT * FROM %s',
		'ALTER SEQUENCE %s RESTART', 'ALTER SEQUENCE %s CYCLE', 'DROP SEQUENCE %s', 'ALTER SEQUENCE %s OWNED BY NONE']) AS way
	WHERE c.relkind = 'S'
	UNION ALL
	SELECT 'type ' || t.oid::regtype, split_part(way, ':', 1), t.oid, replace(split_part(way, ':', 2), '%s', t.oid::regtype::text)
	FROM pg_type AS t JOIN member ON objid = t.oid AND classid = 'pg_type'::regclass LEFT
		JOIN pg_class AS c ON c.oid = t.typrelid, unnest(ARRAY['USAGE:CREATE TABLE public.mine (m %s)',
		'USAGE:CREATE TABLE public.mine (m %s[])', 'USAGE:CREATE FUNCTION public.mine(%s) RETURNS int LANGUAGE sql AS ''SELECT 1''',
			'USAGE:CREATE TYPE public.mine AS (m %s)',
		':DROP TYPE %s CASCADE', ':ALTER TYPE %s OWNER TO CURRENT_USER', ':ALTER TYPE %s RENAME TO mine']) AS way
	WHERE t.typelem = 0 AND coalesce(c.relkind, 'c') = 'c'
	UNION ALL
	SELECT 'operator ' || o.oid::regoperator, 'EXECUTE', o.oprcode, format('SELECT a OPERATOR(pg_catalog.%s) b
		FROM (SELECT NULL::%s AS a, NULL::%s AS b OFFSET 0) AS v', oprname, oprleft::regtype, oprright::regtype)
	FROM pg_operator AS o JOIN member ON objid = o.oid AND classid = 'pg_operator'::regclass
	UNION ALL
	SELECT 'operator ' || o.oid::regoperator, NULL, o.oprcode, format('DROP OPERATOR pg_catalog.%s (%s, %s) CASCADE', oprname, oprleft::regtype, oprright::regtype)
	FROM pg_operator AS o JOIN member ON objid = o.oid AND classid = 'pg_operator'::regclass
	UNION ALL
	SELECT 'cast ' || castsource::regtype || ' to ' || casttarget::regtype, NULL, k.oid, format('DROP CAST (%s AS %s)', castsource::regtype, casttarget::regtype)
	FROM pg_cast AS k JOIN member ON objid = k.oid AND classid = 'pg_cast'::regclass
	UNION ALL
	SELECT way, NULL, 0, way FROM unnest(ARRAY['DROP EXTENSION idempotency', 'ALTER EXTENSION idempotency UPDATE', 'DROP SCHEMA idempotency CASCADE',
		'DROP SCHEMA idempotency_internal CASCADE', 'CREATE FUNCTION idempotency_internal.mine() RETURNS int LANGUAGE sql AS ''SELECT 1''',
		'CREATE TABLE idempotency.mine (i int)',
		'ALTER SCHEMA idempotency OWNER TO CURRENT_USER', 'DROP OPERATOR CLASS idempotency.keytext_ops USING btree CASCADE',
		'COMMENT ON SCHEMA idempotency IS NULL', 'CREATE OPERATOR idempotency.= (LEFTARG = int, RIGHTARG = int, FUNCTION = int4eq)',
			'ALTER EXTENSION idempotency DROP FUNCTION idempotency.uuidv7()']) AS way;

	CREATE FUNCTION has(role name, "right" text, object text, oid oid) RETURNS boolean LANGUAGE sql AS $$
		SELECT CASE split_part(object, ' ', 1)
			WHEN 'function' THEN has_function_privilege(role, oid, 'EXECUTE')
			WHEN 'operator' THEN has_function_privilege(role, oid, 'EXECUTE')
			WHEN 'relation' THEN has_table_privilege(role, oid, "right")
			WHEN 'type' THEN has_type_privilege(role, oid, 'USAGE')
		END
	$$});

# ----------------------------------------------------------------
# Every object
# ----------------------------------------------------------------

# A permitted call can fail for other reasons, but not for lack of privileges.
my $tried = 'SELECT *, has(role, nullif("right", \'\'), object, oid) AND "right" <> \'\' AS may, try(role, statement) AS came
	FROM door, unnest(ARRAY[\'%s\']::name[]) AS role';
foreach my $role (@roles)
{
	my $rows = "WITH t AS MATERIALIZED (@{[sprintf $tried, $role]})";
	is($node->safe_psql('postgres', qq{$rows SELECT object, statement, came FROM t WHERE NOT coalesce(may, false) AND came NOT IN ('42501')}), '',
		"$role: objects without grant are denied with a privilege error");
	is($node->safe_psql('postgres', qq{$rows SELECT object, statement, came FROM t WHERE may AND came = '42501'
		AND statement !~ 'subscri|fetch|ack|nack|extend|redrive|discard|seek|pause|resume|deliver|handler_of'}), '',
		"$role: granted objects are not denied");
	my ($refused, $open) = split /\|/, $node->safe_psql('postgres', qq{$rows SELECT count(*) FILTER (WHERE came = '42501'), count(*) FILTER (WHERE may) FROM t});
	note("$role: $refused denied, $open permitted");
	cmp_ok($refused, '>', 500, "$role: many objects were tested");
	cmp_ok($open, $role eq 'plain' ? '==' : '>', 0, "$role: " . ($role eq 'plain' ? 'no object is permitted' : 'some objects are permitted'));
}

# Where the server counts them as members, arrays and row types of relations are
# excluded: they have no privileges of their own.
is($node->safe_psql('postgres', q{SELECT pg_describe_object(classid, objid, 0) FROM member
		WHERE classid IN ('pg_proc'::regclass, 'pg_class'::regclass, 'pg_type'::regclass, 'pg_operator'::regclass, 'pg_cast'::regclass)
			AND NOT (classid = 'pg_type'::regclass AND EXISTS (SELECT FROM pg_type AS t LEFT JOIN pg_class AS c ON c.oid = t.typrelid
				WHERE t.oid = objid AND (t.typelem <> 0 OR c.relkind <> 'c')))
			AND NOT EXISTS (SELECT FROM door WHERE door.oid = objid OR object LIKE 'operator %' AND object = 'operator ' || objid::regoperator)
			AND NOT (classid = 'pg_proc'::regclass AND 'internal'::regtype = ANY ((SELECT proargtypes::oid[] FROM pg_proc WHERE pg_proc.oid = objid)::oid[]))}), '',
	'every object of the extension was tested');

# As for all types, input and output need no privilege: they disclose nothing.
is($node->safe_psql('postgres', q{SELECT try('plain', 'SELECT ''a''::idempotency.keytext'), try('plain', 'SELECT ''{}''::idempotency.document')}), 'done|done',
	'a value of a type can be written with USAGE on the schema');

# Indirect access: a view, a function, a default of other roles.
$node->safe_psql('postgres', q{CREATE VIEW public.window AS SELECT * FROM idempotency.keys; CREATE VIEW public.own WITH (security_barrier) AS SELECT *
	FROM idempotency.stats;
	CREATE TABLE public.audited (i int, k text DEFAULT idempotency.current_key('s')); GRANT ALL ON public.audited TO plain});
fails_with($node, $_, '42501', "plain is denied: $_", extra_params => [ '--username', 'plain' ])
  foreach 'SELECT * FROM public.window', 'INSERT INTO public.audited (i) VALUES (1)', 'CREATE TABLE public.copy (LIKE idempotency.key INCLUDING ALL);
	INSERT INTO public.copy SELECT * FROM idempotency.key',
	'CREATE VIEW public.mine AS SELECT * FROM idempotency.key; SELECT * FROM public.mine', q{SELECT query_to_xml('TABLE idempotency.key', true, true, '')},
	q{SELECT * FROM pg_stats WHERE tablename = 'key' UNION ALL SELECT * FROM pg_stats WHERE 1 / (SELECT count(*) FROM idempotency.key) = 0};
is($node->safe_psql('postgres', q{ANALYZE idempotency.key; SELECT count(*) FROM pg_stats
	WHERE schemaname = 'idempotency'}, extra_params => [ '--username', 'client' ]) =~ s/\n//r, '0',
	'plain sees no column statistics');

# ----------------------------------------------------------------
# Scopes of other clients
# ----------------------------------------------------------------

# A call of each function of the catalog that takes a scope, with that scope and
# otherwise valid arguments.
$node->safe_psql('postgres', q{
	CREATE ROLE tenant LOGIN;
	ALTER ROLE tenant SET idempotency.scope_prefix = 't1/';
	SELECT idempotency.grant_client('tenant'), idempotency.grant_consumer('tenant'), idempotency.grant_operator('tenant');
	CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS 'SELECT $1'});
my %value = (key => q{'k'}, keys => q{ARRAY['k']}, request => q{'1'}, response => q{'1'}, status => '200', token => '(SELECT 1)',
	lease => q{'1 min'}, max => '1', handler => q{'handler(json)'},
	recovery_point => q{'p'}, step => q{'s'});
my $taking = q{SELECT p.proname, array_to_string(p.proargnames[1:p.pronargs - p.pronargdefaults], ' ') FROM pg_proc AS p
	WHERE p.pronamespace = 'idempotency'::regnamespace AND %s AND has_function_privilege('tenant', p.oid, 'EXECUTE') ORDER BY p.oid::regprocedure::text};
my @calls = map { [ split /\|/ ] } split /\n/, $node->safe_psql('postgres', sprintf $taking, q{'scope' = ANY (p.proargnames)});
cmp_ok(scalar @calls, '>=', 14, 'functions take a scope: ' . join ' ', map { $_->[0] } @calls);
my $digest = q{SELECT md5(string_agg(k::text, '' ORDER BY scope, key)) FROM idempotency.key AS k};
my $before = $node->safe_psql('postgres', $digest);
foreach (@calls)
{
	my ($name, $arguments) = @$_;
	foreach my $scope ('t2/x', 't1', 'T1/x', ' t1/x', 't1//../t2/x' =~ s/^t1/t2/r, '')
	{
		# A pure function of its arguments reveals nothing about any scope; nor do the settings that a superuser has given to scopes.
		next if $name eq 'derive_key' || $name eq 'setting';

		my $call = "idempotency.$name(" . join(', ', map { $_ eq 'scope' ? "'$scope'" : $value{$_} // die "what is $_ of $name()?" } split / /, $arguments) . ')';
		fails_with($node, "SELECT * FROM $call", $scope eq '' ? 'IK400' : '42501', "refused: $call", extra_params => [ '--username', 'tenant' ]);
		fails_with($node, "BEGIN; SELECT idempotency.claim('t1/x', 'k'); SELECT * FROM $call", $scope eq '' ? 'IK400' : '42501',
			"denied after the first call: $call", extra_params => [ '--username', 'tenant' ])
		  if $scope eq 't2/x';
	}
}
is($node->safe_psql('postgres', $digest), $before, 'no row has changed');

# Functions without a scope, and why they reach no keys of other clients.
my %harmless = (
	(map { $_ => 'a pure function' } qw(canonical fingerprint natural_key stable_text uuidv7 parse_header)),
	(map { $_ => 'reads a setting' } qw(problem problem_headers)), (map { $_ => 'checks its own transaction' } qw(require_claim check_commit end_event)), publish => 'writes an event', holders => 'shows sessions, for operators', stats_reset => 'counts', reap => 'deletes expired rows',
	(map { $_ => 'is about the own subscription' } qw(subscribe alter_subscription unsubscribe fetch has_more ack nack extend pause resume seek redrive discard handler_of deliver)));
my @unknown = grep { !$harmless{$_} } map { (split /\|/)[0] } split /\n/, $node->safe_psql('postgres',
	sprintf $taking, q{'scope' <> ALL (coalesce(p.proargnames, '{}'))});
is("@unknown", '', 'every function without a scope is known to reach no key');

# An event has the scope of its claim, which the client owns; a subscription belongs to
# its owner.
is($node->safe_psql('postgres', q{BEGIN; SELECT outcome FROM idempotency.claim('t1/x', 'e'); SELECT idempotency.publish('t', '1') IS NOT NULL;
	SELECT idempotency.complete('t1/x', 'e'); COMMIT},
		extra_params => [ '--username', 'tenant' ]) =~ s/\n+/ /gr, 'claimed t ', 'a tenant publishes under its own claim');
is($node->safe_psql('postgres', q{SELECT headers ->> 'idempotency-scope' FROM idempotency.outbox ORDER BY seq DESC LIMIT 1}), 't1/x', 'the event has the scope of the claim');
fails_with($node, "SELECT * FROM idempotency.$_", '42501', "a tenant does not reach another's subscription: $_", extra_params => [ '--username', 'tenant' ])
  foreach q{fetch('everything')}, q{ack('everything', 1)}, q{nack('everything', 1, NULL)}, q{extend('everything', 1, '1 min')}, q{redrive('everything')}, q{unsubscribe('everything')},
	q{subscribe('everything', '{x}')}, q{alter_subscription('everything')}, q{pause('everything')}, q{resume('everything')}, q{seek('everything', 'now')}, q{discard('everything')},
	q{handler_of('everything')}, q{has_more('everything')};

$node->stop;
done_testing();
