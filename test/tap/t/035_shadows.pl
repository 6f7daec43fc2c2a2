# 035_shadows.pl
#
# Proves that objects of other roles cannot capture the extension. The test creates
# objects under every name of PostgreSQL's own functions, operators, types, relations
# and collations. It puts them first in the search path of sessions and workers, during
# installation and use. It also tests implicit casts between foreign types and the
# extension's types, a pre-existing schema idempotency, and default privileges.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '1s'
log_statement = none
});

# The objects of the extension in a database, as a table.
my $member = q{SET search_path = pg_catalog, pg_temp; CREATE TEMPORARY VIEW member AS SELECT d.classid, d.objid FROM pg_depend AS d
	JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency';};

# ----------------------------------------------------------------
# Shadows of all objects
# ----------------------------------------------------------------

# The server's own aclinsert() fails with "no longer supported" for any argument. So
# does every shadow, with the signature of the object that it shadows. All of them are
# in "public", as if PUBLIC could create objects there.
$node->safe_psql('postgres', 'CREATE DATABASE shadows');
my $made = $node->safe_psql('shadows', q{
	CREATE FUNCTION pg_temp.try(statement text) RETURNS int LANGUAGE plpgsql AS $$
	BEGIN
		EXECUTE statement;
		RETURN 1;
	EXCEPTION WHEN OTHERS THEN
		RETURN 0;
	END $$;
	CREATE TEMPORARY TABLE shadow AS
	SELECT 'function' AS kind, pg_temp.try(format('CREATE FUNCTION public.%I(%s) RETURNS %s%s LANGUAGE internal AS ''aclinsert''', proname,
			array_to_string(ARRAY(SELECT format_type(t, NULL) FROM unnest(proargtypes::oid[]) AS t), ', '),
				CASE WHEN proretset THEN 'SETOF ' END, format_type(prorettype, NULL))) AS made
	FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
	UNION ALL
	SELECT 'operator', pg_temp.try(format('CREATE FUNCTION public.op_%1$s(%2$s) RETURNS %3$s LANGUAGE internal AS ''aclinsert'';
			CREATE OPERATOR public.%4$s (FUNCTION = public.op_%1$s, RIGHTARG = %6$s%5$s)', oid, concat_ws(', ', nullif(oprleft::regtype::text, '-'), oprright::regtype),
			oprresult::regtype, oprname, ', LEFTARG = ' || nullif(oprleft::regtype::text, '-'), oprright::regtype))
	FROM pg_operator WHERE oprnamespace = 'pg_catalog'::regnamespace
	UNION ALL
	SELECT 'relation', pg_temp.try(format('CREATE TABLE public.%I (captured bool NOT NULL CHECK (false))', relname))
	FROM pg_class WHERE relkind IN ('r', 'v') AND relnamespace = 'pg_catalog'::regnamespace
	UNION ALL
	SELECT 'relation', pg_temp.try(format('CREATE TABLE public.%I (captured bool NOT NULL CHECK (false))', name))
	FROM unnest('{key,keys,outbox,subscription,subscriptions,partition,partitions,position,parked,reaper,stats,zombies,dead_letters,token,outbox_seq}'::text[]) AS name
	UNION ALL
	SELECT 'collation', pg_temp.try(format('CREATE COLLATION public.%I FROM "POSIX"', name)) FROM unnest('{C,default}'::text[]) AS name;
	INSERT INTO shadow
	SELECT 'type', pg_temp.try(format('CREATE DOMAIN public.%I AS pg_catalog.%1$I CHECK (false)', typname))
	FROM pg_type WHERE typnamespace = 'pg_catalog'::regnamespace AND typtype IN ('b', 'r') AND typcategory <> 'A'
		AND typname !~ '^pg_|^any|^_';
	SELECT string_agg(kind || ' ' || sum, ', ' ORDER BY kind) FROM (SELECT kind, sum(made) FROM shadow GROUP BY kind) AS s});
note($made);
my %made = reverse map { reverse split / / } split /, /, $made;
cmp_ok($made{function}, '>', 2500, "functions are shadowed: $made{function}");
cmp_ok($made{operator}, '>', 700, "operators: $made{operator}");
cmp_ok($made{type}, '>', 50, "types: $made{type}");
cmp_ok($made{relation}, '>', 100, "relations: $made{relation}");
$node->safe_psql('postgres', q{ALTER DATABASE shadows SET search_path = public, pg_catalog});
fails_with($node, q{SELECT now()}, '0A000', 'shadow functions capture unqualified names', dbname => 'shadows', like => qr/aclinsert/);
fails_with($node, q{SELECT 1 OPERATOR(public.+) 1}, '0A000', 'shadow operators are called', dbname => 'shadows', like => qr/aclinsert/);
fails_with($node, q{SELECT '1'::text}, '23514', 'shadow types are used', dbname => 'shadows');

# Installation: no object of the extension depends on a shadow.
is($node->safe_psql('shadows', 'CREATE EXTENSION idempotency'), '', 'the extension is created among shadows');
my $members = qq{$member SELECT count(*) FROM member};
is($node->safe_psql('shadows', $members), $node->safe_psql('postgres', $members), 'all objects of the extension exist');
is($node->safe_psql('shadows', qq{$member
		SELECT pg_describe_object(d.classid, d.objid, d.objsubid), pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid)
		FROM pg_depend AS d, LATERAL pg_identify_object(d.refclassid, d.refobjid, 0) AS i
		WHERE i.schema = 'public' AND EXISTS (SELECT FROM member AS m WHERE m.classid = d.classid AND m.objid = d.objid)}), '',
	'no object of the extension depends on a shadow');
my $definitions = q{SET search_path = pg_catalog; SELECT pg_get_functiondef(oid) FROM pg_proc
	WHERE pronamespace IN ('idempotency'::regnamespace, 'idempotency_internal'::regnamespace) ORDER BY oid::regprocedure::text;
	SELECT relname, pg_get_viewdef(oid) FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'v' ORDER BY relname;
	SELECT attrelid::regclass::text, attname, format_type(atttypid, NULL), attcollation::regcollation FROM pg_attribute WHERE attrelid IN (SELECT oid FROM pg_class
		WHERE relnamespace = 'idempotency'::regnamespace) AND attnum > 0 ORDER BY attrelid::regclass::text, attnum;
	SELECT oid::regoperator, oprcode, oprrest, oprjoin FROM pg_operator WHERE oprcode::text LIKE 'idempotency_internal.%' ORDER BY oid::regoperator::text};
is($node->safe_psql('shadows', $definitions), $node->safe_psql('postgres', $definitions), 'every definition equals that in another database');

# Use: every function of the extension by its name. The roles have their own search
# path, with a temporary schema first.
my $mask = q{SET search_path = pg_temp, public, pg_catalog;
	CREATE TEMPORARY TABLE key (captured pg_catalog.bool NOT NULL CHECK (false)); CREATE TEMPORARY TABLE subscription (LIKE pg_temp.key INCLUDING ALL);
	CREATE TEMPORARY TABLE pg_class (LIKE pg_temp.key INCLUDING ALL); CREATE DOMAIN pg_temp.document AS pg_catalog.json CHECK (false);
	CREATE DOMAIN pg_temp.interval AS pg_catalog.interval CHECK (false); CREATE DOMAIN pg_temp.text AS pg_catalog.text CHECK (false);};
my @use = split /\n(?!\t)/, <<'SQL';
SELECT idempotency.grant_client('user'), idempotency.grant_consumer('user'), idempotency.grant_operator('user')
SELECT (idempotency.claim('s', 'k', '{"a": 1}', wait => '1 s', retention => '1 h')).outcome
SELECT idempotency.complete('s', 'k', '{"b": 2}', 200, '{"c": 3}')
SELECT (idempotency.try_claim('s', 'k', '{"a": 1}')).response, idempotency.problem(idempotency.try_claim('s', 'k', '{"a": 2}')), idempotency.problem_headers('IK422')
SELECT idempotency.fail('s', 'f', '1', 400) FROM idempotency.claim('s', 'f')
SELECT idempotency.release('s', 'r') FROM idempotency.claim('s', 'r')
SELECT idempotency.checkpoint('s', 'l', token, 'p', '{}'), idempotency.renew('s', 'l', token, '1 min'), idempotency.release('s', 'l', token)
	FROM idempotency.claim('s', 'l', '{}', lease => '1 min')
SELECT idempotency.complete('s', key, '1', token => token) FROM idempotency.claim_abandoned('s', '1 min')
SELECT outcome FROM idempotency.run('s', 'run', '{}', 'app.handler(pg_catalog.json)')
SELECT idempotency.configure('retention', '2 h', 's*'), idempotency.configure('wait', '2 s'), idempotency.setting('wait', 's')
SELECT idempotency.once('s', 'o'), idempotency.once('s', 'o')
SELECT idempotency.configure('retention', NULL, 's*')
SELECT idempotency.once_many('s', ARRAY['o', 'p'])
SELECT idempotency.current_key('s'), (idempotency.peek('s', 'k')).status, idempotency.check_commit()
SELECT kind FROM idempotency.holders()
SELECT kind FROM idempotency.holders('s', 'k')
INSERT INTO app.guarded VALUES (1)
SELECT idempotency.subscribe('sub', '{t*}', start_at => 'beginning', max_attempts => 1, max_lag => '1 h')
SELECT idempotency.publish('t', '{"n": 1}', 'a', 'made', '{"h": 1}', '00000000-0000-7000-8000-000000000001'), idempotency.publish('t', '{"n": 2}')
SELECT idempotency.extend('sub', batch, '1 h'), idempotency.nack('sub', batch, id, 'no') FROM idempotency.fetch('sub', 1, '0', '1 min')
SELECT idempotency.redrive('sub'), idempotency.redrive('sub', '00000000-0000-7000-8000-000000000001')
SELECT idempotency.has_more('sub')
SELECT idempotency.ack('sub', batch) FROM idempotency.fetch('sub', 1)
SELECT idempotency.alter_subscription('sub', handler => 'app.handle(idempotency.event)', partitions => 2)
SELECT idempotency.pause('sub'), idempotency.resume('sub'), idempotency.handler_of('sub'), idempotency.end_event(), idempotency.discard('sub')
SELECT idempotency.seek('sub', '2000-01-01'::pg_catalog.timestamptz), idempotency.seek('sub', 'beginning')
SELECT idempotency.alter_subscription('sub', handler => '-')
COMMIT
CALL idempotency.deliver('sub', 'app.handle(idempotency.event)')
BEGIN
SELECT idempotency.canonical('{"b": 1, "a": 1.0}'), idempotency.fingerprint('{}'), idempotency.fingerprint('GET', '/', '{}'),
	'{}'::pg_catalog.jsonb::idempotency.document
SELECT idempotency.derive_key('s', 'k', 'p'), idempotency.natural_key('a', 'b'), idempotency.stable_text(pg_catalog.now()), idempotency.uuidv7(), idempotency.parse_header('"k"')
SELECT 'a'::idempotency.keytext OPERATOR(pg_catalog.<) 'b', ('a'::idempotency.keytext)::pg_catalog.text, '{}'::pg_catalog.text::idempotency.document, '{}'::idempotency.document::pg_catalog.jsonb
SELECT scope, key, state, status, age, expires_in, response_size, fingerprint FROM idempotency.keys WHERE key OPERATOR(pg_catalog.=) 'k'
SELECT * FROM idempotency.zombies
SELECT * FROM idempotency.stats
SELECT idempotency.stats_reset() FROM idempotency.stats
SELECT * FROM idempotency.subscriptions
SELECT * FROM idempotency.settings
SELECT * FROM idempotency.partitions
SELECT * FROM idempotency.dead_letters
SELECT idempotency.forget('s', 'k'), idempotency.reap(10)
SELECT idempotency.unsubscribe('sub')
SQL
$node->safe_psql('postgres', 'CREATE ROLE "user" LOGIN');
my $granted = shift @use;

# make_app gives a database the objects that role "user" uses.
sub make_app
{
	my ($dbname) = @_;
	$node->safe_psql($dbname, qq{CREATE SCHEMA app; CREATE TABLE app.guarded (i pg_catalog.int4); CREATE TABLE app.done (n pg_catalog.text);
		CREATE FUNCTION app.handler(pg_catalog.json) RETURNS pg_catalog.json LANGUAGE sql AS 'SELECT \$1';
		CREATE FUNCTION app.handle(e idempotency.event) RETURNS pg_catalog.void LANGUAGE sql SET search_path = pg_catalog, pg_temp
			AS 'INSERT INTO app.done VALUES ((e).payload::text)';
		CREATE TRIGGER guard BEFORE INSERT ON app.guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('s');
		GRANT USAGE ON SCHEMA app TO "user"; GRANT ALL ON app.guarded, app.done TO "user"; GRANT ALL ON ALL FUNCTIONS IN SCHEMA idempotency TO "user";
		GRANT TEMPORARY ON DATABASE $dbname TO "user"; $granted});
	return;
}

# all_works uses all functions of the extension in a database, under each search path.
sub all_works
{
	my ($dbname, @paths) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	foreach my $path (@paths)
	{
		my ($rc, $out, $err) = $node->psql($dbname, join(";\n", ($path =~ /temp/ ? $mask : ()), "SET search_path = $path", 'BEGIN', @use, 'COMMIT;'),
			on_error_stop => 0, extra_params => [ '-v', 'VERBOSITY=verbose', '--username', 'user' ]);
		is($err, '', "$dbname: all functions work under $path");
		like($out, qr/^claimed$/m, 'a claim works among shadows');
		fails_with($node, join(";\n", ($path =~ /temp/ ? $mask : ()), "SET search_path = $path", 'UPDATE idempotency.outbox SET seq = NULL'), '0A000',
			'UPDATE of events is refused', dbname => $dbname);
		is($node->safe_psql($dbname, 'SELECT pg_catalog.count(*) FROM app.done'), '2', 'events are delivered');
		$node->safe_psql($dbname, 'DELETE FROM idempotency.key; DELETE FROM idempotency.outbox; DELETE FROM app.done');
	}
	return;
}

# workers_work checks that the relay delivers and the reaper deletes.
sub workers_work
{
	my ($dbname) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $from = -s $node->logfile;
	$node->safe_psql($dbname, q{SELECT idempotency.subscribe('relay', '{*}', 'app.handle(idempotency.event)', owner => 'user');
		SELECT idempotency.publish('t', '1'), idempotency.once('s', 'brief', '1 microsecond')});
	ok($node->poll_query_until($dbname, q{SELECT pg_catalog.count(*) OPERATOR(pg_catalog.=) 1 FROM app.done}), "$dbname: a relay worker works there");
	ok($node->poll_query_until($dbname, q{SELECT rows_reaped OPERATOR(pg_catalog.>) 0 FROM idempotency.reaper}), 'the reaper works there');
	unlike(slurp_file($node->logfile, $from), qr/LOG:  idempotency \w+ cannot/, 'the workers log no failure');
	return;
}

make_app('shadows');
all_works('shadows', 'public, pg_catalog', 'pg_temp, public, pg_catalog', 'public, idempotency, pg_catalog');
my $text = join "\n", @use, 'idempotency.grant_ idempotency.require_claim(';
my @unused = grep { index($text, "idempotency.$_") < 0 } split /\n/, $node->safe_psql('postgres', q{SELECT proname FROM pg_proc
	WHERE pronamespace = 'idempotency'::regnamespace AND proname !~ '^grant_'});
is("@unused", '', 'every function was called');
my @unread = grep { index($text, "idempotency.$_") < 0 } split /\n/, $node->safe_psql('postgres', q{SELECT relname FROM pg_class
	WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'v'});
is("@unread", '', 'every view was read');

workers_work('shadows');
is($node->safe_psql('shadows', q{SELECT idempotency.unsubscribe('relay'); DROP FUNCTION app.handle; DROP TABLE app.guarded;
	DROP EXTENSION idempotency}), 't', 'the extension is dropped among shadows');

# ----------------------------------------------------------------
# The portable edition
# ----------------------------------------------------------------

# Its functions run with the rights of their owner, and those that each operation calls have
# the search path of their client: the same shadows, which no statement must reach.
# A type "record" is a shadow, too: PL/pgSQL looks it up as any other type.
$node->safe_psql('postgres', 'CREATE DATABASE portable TEMPLATE shadows; ALTER DATABASE portable SET search_path = public, pg_catalog');
$node->safe_psql('portable', 'DROP SCHEMA app CASCADE; CREATE DOMAIN public.record AS pg_catalog.text CHECK (false)');
$node->command_ok([ 'psql', '--no-psqlrc', '--quiet', '--set=ON_ERROR_STOP=1', '--dbname', $node->connstr('portable'), '--file', '../../portable/idempotency.sql' ],
	'the portable edition is installed among shadows');
$node->safe_psql('portable', q{CREATE SCHEMA app; CREATE TABLE app.guarded (i pg_catalog.int4);
	CREATE FUNCTION app.handler(pg_catalog.json) RETURNS pg_catalog.json LANGUAGE sql AS 'SELECT $1';
	CREATE TRIGGER guard BEFORE INSERT ON app.guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('s');
	CREATE TABLE app.done (n pg_catalog.text);
	CREATE FUNCTION app.handle(e idempotency.event) RETURNS pg_catalog.void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS 'INSERT INTO app.done VALUES ((e).payload::text)';
	GRANT USAGE ON SCHEMA app TO "user"; GRANT ALL ON app.guarded, app.done TO "user"; GRANT TEMPORARY ON DATABASE portable TO "user";
	GRANT EXECUTE ON FUNCTION idempotency.configure TO "user";
	SELECT idempotency.grant_client('user'), idempotency.grant_consumer('user'), idempotency.grant_operator('user')});
my @portable = map { s/,\s*'[{][}]'::pg_catalog.jsonb::idempotency.document//r }
  grep { !/idempotency\.(?:stats|keytext)|'::idempotency\.keytext/ } @use;
push @portable, split /\n/, <<'SQL';
COMMIT
BEGIN
SELECT outcome FROM idempotency.claim('s', 'plain')
SELECT idempotency.complete('s', 'plain', '{"b": 2}'::pg_catalog.json), idempotency.claim('s', 'plain')
COMMIT
BEGIN
SELECT outcome FROM idempotency.claim('s', 'first', '{"b": 1.50, "a": [{"c": "\u0001"}]}'::pg_catalog.jsonb)
SELECT idempotency.complete('s', 'first', '{"b": 2}'::pg_catalog.jsonb, 201)
COMMIT
SELECT (idempotency.claim('s', 'first', '{"b": 1.5, "a": [{"c": "\u0001"}]}'::pg_catalog.text)).response
SELECT (idempotency.try_claim('s', 'first', '{"b": 1.5}'::pg_catalog.text)).outcome
SELECT (idempotency.claim('s', 'lease', lease => '1 min')).outcome
SELECT idempotency.claim('s', 'open')
SQL
# With the library, its settings have values, and the edition takes the slower paths.
$node->append_conf('postgresql.conf', "shared_preload_libraries = ''");
$node->restart;
foreach my $layout ('public, pg_catalog', 'pg_temp, public, pg_catalog', 'public, idempotency, pg_catalog', 'distributed')
{
	my $path = $layout;
	# the functions of the distributed layout, without Citus
	if ($path eq 'distributed')
	{
		$node->command_ok([ 'psql', '--no-psqlrc', '--quiet', '--dbname', $node->connstr('portable'), '--file', '../../portable/citus.sql' ], 'citus.sql');
		$node->safe_psql('portable', q{SET search_path = pg_catalog, pg_temp;
			SELECT idempotency_internal.add_tenant('text', 'pg_catalog."default"', '0'); SELECT idempotency_internal.make_again()});
		$path = 'public, pg_catalog';
		@portable = grep { !/idempotency\.(?:subscri|alter_s|unsubscri|partitions|publish|fetch|pause|seek|deliver|redrive|dead_letters|has_more|holders|.?ack)/ } @portable;
	}
	my ($rc, $out, $err) = $node->psql('portable', join(";\n", ($path =~ /temp/ ? $mask : ()), "SET search_path = $path", 'BEGIN', @portable, 'COMMIT;'),
		on_error_stop => 0, extra_params => [ '-v', 'VERBOSITY=terse', '--username', 'user' ]);
	like($err, qr/\A\S*\s*ERROR:  cannot commit a transaction with an open idempotency claim$/m, "no shadow captures the portable edition under $path");
	is(() = $err =~ /ERROR/g, 1, 'no other statement fails');
	like($out, qr/^claimed\n.*^\{"b": 2\}$/ms, 'operations succeed among shadows');
	$node->safe_psql('portable', 'DELETE FROM idempotency.key' . ($layout eq 'distributed' ? '' : '; DELETE FROM idempotency.outbox'));
}
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idempotency'");
$node->restart;

# ----------------------------------------------------------------
# Scripts that a superuser runs
# ----------------------------------------------------------------

# succeeds runs a script of the portable edition as a superuser.
sub succeeds
{
	my ($dbname, $script, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->command_ok([ 'psql', '--no-psqlrc', '--quiet', '--set=owner=edition_owner', '--dbname', $node->connstr($dbname), '--file', "../../portable/$script.sql" ],
		"$dbname: $test");
	return;
}

# Each runs among the shadows, with keys and grants to move.
$node->safe_psql('postgres', q{CREATE ROLE edition_owner; CREATE DATABASE scripts TEMPLATE shadows; ALTER DATABASE scripts SET search_path = public, pg_catalog});
my $stored = q{SELECT idempotency.once('s', 'stored')};
succeeds('scripts', 'idempotency', 'the portable edition is installed');
succeeds('scripts', 'uninstall', 'it is removed');
succeeds('scripts', 'idempotency', 'it is installed again');
is($node->safe_psql('scripts', "SELECT idempotency.grant_client('user'), idempotency.grant_operator('user'); $stored"), "t|t\nt", 'a key is stored');
succeeds('scripts', $_, "$_ moves the key") foreach 'to_extension', 'from_extension', 'to_extension', 'from_extension';
is($node->safe_psql('scripts', $stored, extra_params => [ '--username', 'user' ]), 'f', 'the key and the grant are there');
succeeds('scripts', 'citus', 'the functions of the distributed layout are added');
$node->safe_psql('scripts', q{DROP FUNCTION idempotency.distribute});
succeeds('scripts', 'uninstall', 'all is removed');

# The role that owns the portable edition can change all of its objects. Whatever reads its
# table as a superuser runs functions that this role has put there.
my $planted = q{SET ROLE edition_owner; CREATE SCHEMA planted;
	CREATE FUNCTION planted.escalate() RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		BEGIN RESET ROLE; EXCEPTION WHEN OTHERS THEN NULL; END;
		IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN ALTER ROLE edition_owner SUPERUSER; END IF;
	END $$;
	CREATE FUNCTION planted.code(text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS 'BEGIN PERFORM planted.escalate(); RETURN $1; END'};
my %plants = (
	'an index' => q{CREATE INDEX ON idempotency.key ((scope || planted.code('x')))},
	'an index of some rows' => q{CREATE INDEX ON idempotency.key (scope) WHERE scope <> planted.code('x')},
	'statistics' => q{CREATE STATISTICS planted.statistics ON (scope || planted.code('x')), key FROM idempotency.key},
	'a type' => q{CREATE TYPE planted.type AS (a text); CREATE FUNCTION planted.text(planted.type) RETURNS text LANGUAGE sql AS 'SELECT planted.code(($1).a)';
		CREATE CAST (planted.type AS text) WITH FUNCTION planted.text(planted.type) AS ASSIGNMENT; DROP VIEW idempotency.keys, idempotency.zombies;
		CREATE VIEW idempotency.keys AS SELECT 1; CREATE VIEW idempotency.zombies AS SELECT 1;
		ALTER TABLE idempotency.key DROP COLUMN finished_by, ADD COLUMN finished_by bigint, ALTER COLUMN recovery_point TYPE planted.type USING ROW(recovery_point)},
	'a view' => q{ALTER TABLE idempotency.key RENAME TO real_key; CREATE VIEW idempotency.key AS SELECT created_at, expires_at, status, planted.code(scope) AS scope,
		key, fingerprint, response, headers, token, attempt, leased_at, leased_until, recovery_point, recovery_state, request, retention, finished_by FROM idempotency.real_key});
foreach my $plant (sort keys %plants)
{
	$node->safe_psql('postgres', 'CREATE DATABASE planted; GRANT CREATE ON DATABASE planted TO edition_owner');
	$node->command_ok([ 'psql', '--no-psqlrc', '--quiet', '--dbname', $node->connstr('planted'), '--command', 'SET ROLE edition_owner',
			'--file', '../../portable/idempotency.sql' ], "$plant: the edition is installed");
	$node->safe_psql('planted', "$stored; $planted; $plants{$plant}");
	my ($rc, $out, $err) = (0, '', '');
	IPC::Run::run([ $node->installed_command('psql'), '--no-psqlrc', '--quiet', '--dbname', $node->connstr('planted'), '--file', '../../portable/to_extension.sql' ],
		'>', \$out, '2>', \$err);
	is($node->safe_psql('planted', q{SELECT rolsuper FROM pg_roles WHERE rolname = 'edition_owner'}), 'f', "$plant: the owner does not become a superuser");
	my @errors = $err =~ /(?<=ERROR:  )([^\n]*)/g;
	is("@errors", $plant eq 'a view' ? 'cannot drop desired object(s) because other objects depend on them' : '', "$plant: the keys are moved, except from a view");
	$node->safe_psql('postgres', 'ALTER ROLE edition_owner NOSUPERUSER; DROP DATABASE planted');
}

# ----------------------------------------------------------------
# Casts
# ----------------------------------------------------------------

# The owner of a type can create casts to and from it. A role without privileges on a
# type of the extension cannot create casts to that type, and no role can create casts
# between types of other roles.
my @types = qw(idempotency.document idempotency.identifier idempotency.keytext text varchar json jsonb interval int4 int8 uuid bool timestamptz bytea text[]);
my @as_caster = (dbname => 'casts', extra_params => [ '--username', 'caster' ]);
$node->safe_psql('postgres', 'CREATE ROLE caster LOGIN; CREATE DATABASE casts');
$node->safe_psql('casts', q{CREATE EXTENSION idempotency; GRANT CREATE ON SCHEMA public TO caster; GRANT USAGE ON SCHEMA idempotency TO caster});
make_app('casts');

# A role cannot create a function with a type on which it has no privilege, hence WITH
# INOUT.
$node->safe_psql('casts', q{CREATE TYPE mine AS ENUM ('1')}, @as_caster[2, 3]);
foreach my $type ('document', 'identifier', 'keytext')
{
	fails_with($node, "CREATE CAST ($_) WITH INOUT AS IMPLICIT", '42501', "a plain role cannot create a cast ($_)", @as_caster)
	  foreach "mine AS idempotency.$type", "idempotency.$type AS mine";
}
$node->safe_psql('casts', q{SELECT idempotency.grant_client('caster')});
fails_with($node, 'CREATE CAST (mine AS idempotency.keytext) WITH INOUT AS IMPLICIT', '42501', 'a client cannot create a cast to the type of keys', @as_caster);
$node->safe_psql('casts', q{GRANT USAGE ON TYPE idempotency.keytext TO caster});
fails_with($node, "CREATE CAST ($_) WITH INOUT AS IMPLICIT", '42501', "a role with all grants cannot create a cast ($_)", @as_caster)
  foreach map { ("bytea AS idempotency.$_", "idempotency.$_ AS int4") } 'document', 'identifier', 'keytext';
fails_with($node, 'CREATE CAST (mine AS idempotency.document) WITHOUT FUNCTION AS IMPLICIT', '42501', 'a role with all grants cannot create a binary cast', @as_caster);
fails_with($node, 'DROP CAST (json AS idempotency.document)', '42501', 'a role with all grants cannot drop a cast', @as_caster);

# The owner of a type can create all casts between it and other types; each raises an
# error when it is called.
my $number = 0;
$node->safe_psql('casts', join('', map {
		my ($from, $to) = @$_;
		$number++;
		"CREATE FUNCTION public.cast_$number($from) RETURNS $to LANGUAGE plpgsql AS \$\$ BEGIN RAISE 'captured %', current_user; END \$\$;
			CREATE CAST ($from AS $to) WITH FUNCTION public.cast_$number($from) AS IMPLICIT;\n"
	} map { ([ 'public.mine', $_ ], [ $_, 'public.mine' ]) } @types), @as_caster[2, 3]);
is($node->safe_psql('casts', q{SELECT count(*) FROM pg_cast WHERE 'mine'::regtype IN (castsource, casttarget) AND castcontext = 'i'}), 2 * @types,
	'the owner of a type creates all casts to and from it');
fails_with($node, "SELECT idempotency.canonical('1'::public.mine)", 'P0001', 'the casts capture sessions that use the type', dbname => 'casts',
	like => qr/captured user/, extra_params => [ '--username', 'user' ]);
fails_with($node, "SELECT 'k'::idempotency.keytext = '1'::public.mine", 'P0001', 'the casts capture comparisons with the type', dbname => 'casts', like => qr/captured/,
	extra_params => [ '--username', 'user' ]);
all_works('casts', 'public, pg_catalog', 'pg_catalog', 'public, idempotency, pg_catalog');
workers_work('casts');

# ----------------------------------------------------------------
# A pre-existing schema
# ----------------------------------------------------------------

# Mallory owns the database, and a schema with the names of the extension's objects.
$node->safe_psql('postgres', 'CREATE ROLE mallory LOGIN; CREATE DATABASE trap OWNER mallory');
my @as_mallory = (dbname => 'trap', extra_params => [ '--username', 'mallory' ]);
my $trap = q{CREATE SCHEMA idempotency;
	CREATE TYPE idempotency.document AS (a int);
	CREATE TABLE idempotency.key (scope text, key text, PRIMARY KEY (scope, key));
	CREATE SEQUENCE idempotency.token;
	CREATE VIEW idempotency.keys AS SELECT 1 AS one;
	CREATE FUNCTION idempotency.claim(scope text, key text) RETURNS record LANGUAGE sql AS 'SELECT 1, 2';
	CREATE FUNCTION idempotency.keytext_eq(int, int) RETURNS boolean LANGUAGE sql AS 'SELECT true';
	CREATE OPERATOR idempotency.= (LEFTARG = int, RIGHTARG = int, FUNCTION = idempotency.keytext_eq)};
$node->safe_psql('trap', $trap, extra_params => [ '--username', 'mallory' ]);
my $state = q{SELECT oid, nspowner FROM pg_namespace WHERE nspname = 'idempotency'; SELECT oid, relname, relowner FROM pg_class
	WHERE relnamespace = 'idempotency'::regnamespace ORDER BY 1;
	SELECT oid, proname, prosrc FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace ORDER BY 1; SELECT count(*) FROM pg_extension;
		SELECT count(*) FROM pg_operator; SELECT count(*) FROM pg_type};
my $before = $node->safe_psql('trap', $state);
fails_with($node, $_->[0], $_->[1], $_->[0], dbname => 'trap')
  foreach [ 'CREATE EXTENSION idempotency', '42P06' ], [ 'CREATE EXTENSION IF NOT EXISTS idempotency CASCADE', '42P06' ],
	[ q{CREATE EXTENSION idempotency VERSION '1.0'}, '42P06' ],
	[ 'CREATE EXTENSION idempotency SCHEMA idempotency', '0A000' ], [ 'CREATE EXTENSION idempotency SCHEMA public', '0A000' ],
	[ 'SET search_path = idempotency; CREATE EXTENSION idempotency', '42P06' ];
is($node->safe_psql('trap', $state), $before, 'an existing schema blocks the installation and is unchanged');
fails_with($node, 'CREATE EXTENSION idempotency', '42501', 'the owner of the schema cannot create the extension', @as_mallory);

# The schema of the functions that the server calls.
$node->safe_psql('trap', 'DROP SCHEMA idempotency CASCADE; CREATE SCHEMA idempotency_internal', extra_params => [ '--username', 'mallory' ]);
fails_with($node, 'CREATE EXTENSION idempotency', '42P06', 'an existing schema idempotency_internal blocks the installation', dbname => 'trap');
is($node->safe_psql('trap', q{SELECT nspname FROM pg_namespace WHERE nspname LIKE 'idempotency%'}), 'idempotency_internal', 'nothing is left of it');
$node->safe_psql('trap', 'DROP SCHEMA idempotency_internal', extra_params => [ '--username', 'mallory' ]);

# A schema that is being created concurrently.
my $maker = open_session($node, @as_mallory);
$maker->query_safe("SET client_min_messages = warning; BEGIN; $trap");
my $superuser = open_session($node, dbname => 'trap');
$superuser->query_until(qr/go/, "\\echo go\nCREATE EXTENSION idempotency;\n\\echo :SQLSTATE\n");
$node->poll_query_until('trap', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted}) or die;
$maker->query_safe('COMMIT');
like($superuser->query('SELECT 1'), qr/^(?:23505|42P06)\n/, 'a schema that is created concurrently blocks the installation');
is($node->safe_psql('trap', q{SELECT count(*) FROM pg_extension WHERE extname = 'idempotency'}), '0', 'the extension does not exist');
$maker->query_safe('DROP SCHEMA idempotency CASCADE');
$superuser->{stderr} = '';
$superuser->query_safe('CREATE EXTENSION idempotency');
$superuser->quit;
$maker->quit;

# After the installation, the owner of the database has no privileges on the extension.
fails_with($node, $_, '42501', "mallory is denied: $_", @as_mallory)
  foreach 'DROP EXTENSION idempotency CASCADE', 'ALTER EXTENSION idempotency UPDATE', 'DROP SCHEMA idempotency CASCADE', 'ALTER SCHEMA idempotency RENAME TO mine',
	'ALTER SCHEMA idempotency OWNER TO mallory', 'GRANT ALL ON SCHEMA idempotency TO mallory WITH GRANT OPTION',
		'CREATE FUNCTION idempotency.f() RETURNS int LANGUAGE sql AS $$SELECT 1$$',
	'CREATE TABLE idempotency.mine (i int)', 'DROP FUNCTION idempotency.uuidv7()', 'ALTER FUNCTION idempotency.uuidv7() OWNER TO mallory', 'DROP TABLE idempotency.key',
	'ALTER TABLE idempotency.key OWNER TO mallory', 'ALTER TABLE idempotency.key DISABLE ROW LEVEL SECURITY',
		'CREATE TRIGGER t BEFORE INSERT ON idempotency.parked EXECUTE FUNCTION idempotency.require_claim()',
	'CREATE RULE r AS ON INSERT TO idempotency.position DO INSTEAD NOTHING', 'DROP OPERATOR pg_catalog.= (idempotency.keytext, idempotency.keytext)',
		'DROP CAST (json AS idempotency.document)',
	'DROP TYPE idempotency.document CASCADE', 'ALTER TYPE idempotency.operation DROP ATTRIBUTE token',
		'DROP OPERATOR CLASS idempotency.keytext_ops USING btree', 'SELECT idempotency.grant_client(\'mallory\')',
	q{ALTER DATABASE trap SET session_preload_libraries = 'x'}, q{ALTER DATABASE trap SET idempotency.scope_prefix = 'x/'}, q{ALTER DATABASE trap SET idempotency.handler_timeout = 0},
	'REASSIGN OWNED BY postgres TO mallory', 'TRUNCATE idempotency.outbox', 'COMMENT ON EXTENSION idempotency IS $$mine$$',
		'CREATE PUBLICATION p FOR ALL TABLES', 'BEGIN; LOCK TABLE idempotency.key';

# ----------------------------------------------------------------
# Default privileges
# ----------------------------------------------------------------

# rights_in returns every privilege on every object of the extension in a database, one
# line per grant. An object without an access control list has the server's default.
sub rights_in
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, qq{$member
		SELECT o.kind || ' ' || o.name || ': ' || CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END || ' ' || a.privilege_type || CASE WHEN a.is_grantable THEN '*' ELSE '' END
		FROM (
			SELECT 'pg_namespace'::regclass, oid, 'schema', nspname, coalesce(nspacl, acldefault('n', nspowner)) FROM pg_namespace
			UNION ALL SELECT 'pg_class'::regclass, oid, 'relation', oid::regclass::text, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)) FROM pg_class
			UNION ALL SELECT 'pg_class'::regclass, attrelid, 'column', attrelid::regclass || '.' || attname, attacl FROM pg_attribute
			UNION ALL SELECT 'pg_proc'::regclass, oid, 'function', oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)) FROM pg_proc
			UNION ALL SELECT 'pg_type'::regclass, t.oid, 'type', t.oid::regtype::text, coalesce(typacl, acldefault('T', typowner)) FROM pg_type AS t
				LEFT JOIN pg_class AS c ON c.oid = t.typrelid WHERE t.typcategory <> 'A' AND coalesce(c.relkind, 'c') = 'c'
		) AS o (classid, objid, kind, name, acl) JOIN member USING (classid, objid), aclexplode(o.acl) AS a
		ORDER BY o.kind, o.name, 1});
}

# too_much returns the privileges in a database that are not in another list.
sub too_much
{
	my ($dbname, $expected) = @_;
	my %expected = map { $_ => 1 } split /\n/, $expected;
	return join "\n", grep { !$expected{$_} } split /\n/, rights_in($dbname);
}

# For each kind of default privileges of the installing role, and all of them together,
# the privileges equal those of an installation without any.
my @kinds = qw(SCHEMAS TABLES SEQUENCES FUNCTIONS TYPES);
my %defaults = map { $_ => qq{ALTER DEFAULT PRIVILEGES GRANT ALL ON $_ TO PUBLIC; ALTER DEFAULT PRIVILEGES GRANT ALL ON $_ TO anybody, "any ""one"", else" WITH GRANT OPTION} } @kinds;
$defaults{all} = join '; ', values %defaults;
$node->safe_psql('postgres', 'CREATE ROLE anybody LOGIN; CREATE ROLE "any ""one"", else"; CREATE ROLE dumped');
my $rights = rights_in('postgres');
my $owner = $node->safe_psql('postgres', 'SELECT current_user');
is(join(' ', sort keys %{ { map { (/^(\w+)/)[0] => 1 } split /\n/, $rights } }), 'function relation schema type', 'objects of all kinds have rights');
is(join(' ', sort keys %{ { map { (/: (\w+) /)[0] => 1 } split /\n/, $rights } }), join(' ', sort $owner, 'pg_monitor'), 'only the owner and pg_monitor have privileges');
foreach my $kind (@kinds, 'all')
{
	my $dbname = 'generous_' . lc $kind;
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE template0");
	$node->safe_psql($dbname, "$defaults{$kind}; CREATE EXTENSION idempotency");
	is(too_much($dbname, $rights), '', "default privileges on $kind grant nothing here");
	is(rights_in($dbname), $rights, "default privileges on $kind revoke nothing");
}
fails_with($node, $_, '42501', "role anybody is denied: $_", dbname => 'generous_all', extra_params => [ '--username', 'anybody' ])
  foreach q{SELECT idempotency.peek('s', 'k')}, 'SELECT * FROM idempotency.key', 'CREATE TABLE idempotency.mine (i int)', q{SELECT nextval('idempotency.token')},
	'CREATE TABLE public.mine (d idempotency.document)';

# A dump contains later grants and no others; default privileges do not matter where it
# is restored.
my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('generous_all', q{SELECT idempotency.grant_client('dumped'), idempotency.grant_consumer('dumped'), idempotency.grant_operator('dumped')});
my $dumped = rights_in('generous_all');
$node->command_ok([ 'pg_dump', '--file', "$dir/dump", 'generous_all' ], 'dump');
my $dump = slurp_file("$dir/dump");
like($dump, qr/^GRANT .* idempotency\..* TO dumped;$/m, 'the dump contains the later grant');
is(join("\n", $dump =~ /^((?:GRANT|REVOKE) .* (?:SCHEMA idempotency|idempotency\.).*)(?<! TO dumped;)$/mg), '', 'the dump contains no other GRANT or REVOKE');
foreach my $dbname ('restored_plain', 'restored_generous')
{
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE template0");
	$node->safe_psql($dbname, $defaults{all}) if $dbname =~ /generous/;
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", '--dbname', $dbname ], "$dbname: restored");
	is(rights_in($dbname), $dumped, "$dbname: the privileges equal those of the source");
}

$node->stop;
done_testing();
