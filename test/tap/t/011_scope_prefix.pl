# 011_scope_prefix.pl
#
# Proves that idempotency.scope_prefix, set by a superuser for a login role, applies to
# every session of that role. It applies in every function that takes a scope, and the
# role cannot lift it. This holds whether the library is preloaded or loaded by the
# first call, after the role has changed settings.
#
# The script takes 20 seconds, because each of 500 attempts needs its own session.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $guc = 'idempotency.scope_prefix';
my ($node, $library);

# session runs SQL in a new session of a login role, and returns what it printed after a
# line "tried". Statements before that can fail, and leave their transaction usable.
sub session
{
	my ($sql, %opt) = @_;
	my $connstr = $node->connstr($opt{dbname} // 'postgres');
	$connstr .= " options='$opt{options}'" if defined $opt{options};
	my (undef, $out, $err) = eval {
		$node->psql('postgres', $sql, on_error_stop => 0,
			extra_params => [ '-d', $connstr, '-U', $opt{role} // 'tenant', '-v', 'ON_ERROR_ROLLBACK=on' ]);
	};

	# The connection of a rejected role can be closed before psql has sent anything.
	return 'no connection' if $@ =~ /Broken pipe/;
	die $@ if $@;
	note($err) if $err;
	return 'no connection' if $err =~ /connection to server .* failed/;
	return $out =~ /^tried\n(.*)\z/ms ? $1 : "did not get there: $out $err";
}

# The very first call must already reject the scope of the other tenant.
my $probes = join("\n", '\echo tried', map { "SELECT probe(\$\$$_\$\$);" }
	q{SELECT idempotency.peek('t2/x', 'k')}, q{SELECT idempotency.once('t2/x', 'k')},
	q{SELECT (idempotency.peek('t1/x', 'k')).response}, q{SELECT idempotency.claim('t2/x', 'k')}, q{SHOW } . $guc);
my $bound = qq(42501\n42501\n"t1"\n42501\nt1/);

# is_bound checks that a session is bound to its prefix after the given statements.
sub is_bound
{
	my ($name, $try, %opt) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(session("$try;\n$probes", %opt), $bound, "$library: $name");
}

# set_up creates a server with a tenant that has a prefix, another tenant, and a role
# without prefix, and a key in the scope of each tenant.
sub set_up
{
	my ($preload) = @_;
	$library = $preload || 'not preloaded';
	my $server = new_node('server' . length $preload, conf => $preload ? "$preload = 'idempotency'\n" : '');
	foreach my $dbname (qw(postgres own))
	{
		$server->safe_psql('postgres', q{CREATE ROLE tenant LOGIN; CREATE ROLE other LOGIN; CREATE ROLE free LOGIN;
			GRANT free, other TO tenant; CREATE DATABASE own OWNER tenant}) if $dbname eq 'postgres';
		$server->safe_psql('own', 'CREATE EXTENSION idempotency') if $dbname eq 'own';
		$server->safe_psql($dbname, q{
			SELECT idempotency.grant_client(r) FROM unnest(ARRAY['tenant', 'other', 'free']::regrole[]) AS r;
			SELECT idempotency.grant_consumer(r) FROM unnest(ARRAY['tenant', 'free']::regrole[]) AS r;
			GRANT EXECUTE ON FUNCTION idempotency.forget TO tenant;
			CREATE SCHEMA tenant AUTHORIZATION tenant;
			CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS 'SELECT $1';
			CREATE FUNCTION tenant.handle(idempotency.event) RETURNS void LANGUAGE sql AS '';
			ALTER FUNCTION tenant.handle OWNER TO tenant;
			GRANT USAGE ON SCHEMA tenant TO free;
			CREATE FUNCTION probe(query text) RETURNS text LANGUAGE plpgsql AS $$
			DECLARE answer text;
			BEGIN
				EXECUTE query INTO answer;
				RETURN answer;
			EXCEPTION WHEN OTHERS THEN
				RETURN SQLSTATE;
			END $$});
		$server->safe_psql($dbname, qq{BEGIN; SELECT idempotency.claim('$_/x', 'k');
			SELECT idempotency.complete('$_/x', 'k', '"$_"'); COMMIT}) foreach qw(t1 t2);
	}
	$server->safe_psql('postgres', qq{ALTER ROLE tenant SET $guc = 't1/'; ALTER ROLE other SET $guc = 't2/'});
	return $server;
}

# Statements by which a role might lift its prefix in a session.
my $load = q{SELECT idempotency.peek('t1/x', 'k')};
my @tries = (
	[ 'nothing tried', '' ],
	[ 'SET', "SET $guc = 't2/'" ],
	[ 'SET to nothing', "SET $guc = ''" ],
	[ 'SET to its default', "SET $guc TO DEFAULT" ],
	[ 'RESET', "SET $guc = ''; RESET $guc" ],
	[ 'RESET ALL', 'RESET ALL' ],
	[ 'DISCARD ALL', 'DISCARD ALL' ],
	[ 'set_config', "SELECT set_config('$guc', 't2/', false), set_config('$guc', '', false)" ],
	[ 'update of pg_settings', "UPDATE pg_settings SET setting = '' WHERE name = '$guc'" ],
	[ 'SET LOCAL', "BEGIN; SET LOCAL $guc = ''" ],
	[ 'local set_config', "BEGIN; SELECT set_config('$guc', '', true)" ],
	[ 'SET in savepoints', "BEGIN; SET $guc = ''; SAVEPOINT a; SET LOCAL $guc = 't2/'; SAVEPOINT b; SET $guc = '';
		ROLLBACK TO b; RELEASE a" ],
	[ 'SET that was rolled back', "BEGIN; SET $guc = ''; ROLLBACK" ],
	[ 'SET in a block', "DO \$\$BEGIN SET $guc = ''; EXCEPTION WHEN OTHERS THEN NULL; END\$\$" ],
	[ 'SET ROLE free', 'SET ROLE free' ],
	[ 'SET ROLE to the other tenant', 'SET ROLE other' ],
	[ 'SET ROLE, then SET', "SET ROLE free; SET $guc = ''; RESET ROLE" ],
	[ 'SET SESSION AUTHORIZATION', 'SET SESSION AUTHORIZATION other' ],
	[ 'LOAD', "SET $guc = ''; LOAD 'idempotency'" ]);

# Statements by which a role might lift its prefix in later sessions.
my @lasting = map { [ $_ =~ s/ \Q$guc\E.*//sr, $_ ] } (
	"ALTER ROLE tenant SET $guc = ''", "ALTER ROLE tenant SET $guc = 't2/'", "ALTER ROLE tenant RESET $guc",
	'ALTER ROLE tenant RESET ALL', "ALTER ROLE tenant IN DATABASE own SET $guc = ''",
	"ALTER ROLE CURRENT_USER IN DATABASE postgres SET $guc = ''", "ALTER DATABASE own SET $guc = ''",
	"ALTER ROLE ALL SET $guc = ''", "ALTER SYSTEM SET $guc = ''", "GRANT SET ON PARAMETER $guc TO tenant");

# A function with its own setting, created and called by the role.
my $sneak = sub {
	my ($name, $clause) = @_;
	return qq{DROP FUNCTION IF EXISTS tenant.$name; CREATE FUNCTION tenant.$name() RETURNS text LANGUAGE plpgsql $clause AS \$\$
		BEGIN RETURN probe('SELECT (idempotency.peek(''t2/x'', ''k'')).response'); END \$\$};
};

# Every function that takes a scope, and its result for a scope of the role.
my %calls = (
	q{claim(S, 'k')} => qr/replayed/, q{try_claim(S, 'k')} => qr/replayed/, q{complete(S, 'k')} => qr/without a claim/,
	q{fail(S, 'k', '1', 400)} => qr/without a claim/, q{release(S, 'k')} => qr/without a claim/, q{peek(S, 'k')} => qr/replayed/,
	q{forget(S, 'none')} => qr/^false/, q{once(S, 'k')} => qr/^false/, q{once_many(S, array['k'])} => qr/^$/,
	q{once_many(S, array[]::text[])} => qr/^$/, q{run(S, 'k', '1', 'handler(json)')} => qr/replayed/,
	q{current_key(S)} => qr/^$/);

foreach my $preload ('', 'shared_preload_libraries', 'session_preload_libraries')
{
	$node = set_up($preload);
	is_bound(@$_) foreach @tries;
	is_bound("$_->[0], after the first call", "$load; $_->[1]") foreach @tries;

	# Values in the options of the connection; a rejected connection also passes.
	foreach my $options ("-c $guc=", "-c $guc=t2/", "--$guc=t2/" =~ tr/_/-/r, "-c role=free -c $guc=")
	{
		foreach my $try ([ 'nothing else', '' ], grep { $_->[0] =~ /RESET|LOCAL|savepoint|rolled back/ } @tries)
		{
			my $got = session("$try->[1];\n$probes", options => $options);
			is($got eq 'no connection' ? $bound : $got, $bound, "$library: PGOPTIONS '$options' and $try->[0]");
		}
	}

	# A parallel worker, whose leader has loaded the library but not applied the prefix yet. A
	# function can be marked as parallel safe although it calls one that is not.
	my $parallel = $node->safe_psql('postgres', q{SELECT name FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query')});
	foreach my $options (undef, "-c $guc=", "-c $guc=t2/")
	{
		my $got = session(qq{SELECT idempotency.natural_key('a'); SET $parallel = on;
			CREATE FUNCTION pg_temp.worker() RETURNS text LANGUAGE plpgsql PARALLEL SAFE AS
				'BEGIN RETURN (idempotency.peek(''t2/x'', ''k'')).response; END';
			\\echo tried\nSELECT pg_temp.worker();} . $probes =~ s/\\echo tried//r, options => $options);
		is($got eq 'no connection' ? $bound : $got, $bound, "$library: a parallel worker, with the options '" . ($options // '') . "'");
	}

	foreach my $way ("SET $guc = 't2/'", "SET $guc = ''", "SET $guc FROM CURRENT")
	{
		my $in_advance = $way =~ /CURRENT/ ? "SET $guc = 't2/';" : '';
		is(session("$in_advance @{[$sneak->('sneak', $way)]};\n\\echo tried\nSELECT probe('SELECT tenant.sneak()')")
			  =~ s/42883/42501/r, '42501', "$library: a function with $way");
		is(session("$load;\n\\echo tried\nSELECT probe('SELECT tenant.sneak()')") =~ s/42883/42501/r, '42501',
			"$library: a function with $way, called after the first call");
		is_bound("a function with $way, after it was called", 'SELECT tenant.sneak()');
	}

	foreach (@lasting)
	{
		my ($name, $sql) = @$_;
		session($sql);
		is_bound("the next session after $name", '');
		session("$load; $sql");
		is_bound("the next session after $name, with the library loaded", '');
		is_bound("after $name, in the role's own database", '', dbname => 'own');
	}

	# Every function, with scopes inside and outside the prefix.
	foreach my $call (sort keys %calls)
	{
		my $about = sub { session(join "\n", '\echo tried', map { 'SELECT probe($$SELECT idempotency.' . $call =~ s/S/'$_'/r . '$$);' } @_) };
		like($about->('t1/x'), $calls{$call}, "$library: $call in its own scope");
		is($about->('t2/x', 't1', 't1x/', 'T1/x', ' t1/x'), join("\n", (42501) x 5), "$library: $call in other scopes");
	}
	is(session("\\echo tried\nSELECT probe('SELECT count(*) FROM idempotency.$_')"), '42501',
		"$library: idempotency.$_ is not readable") foreach qw(key keys);

	# A handler runs with the settings of the subscription's owner: it is the login role that
	# has the prefix.
	my $subscribe = q{probe($$SELECT idempotency.subscribe('s', '{t}', 'tenant.handle(idempotency.event)'OWNER)$$)};
	is(session("$_->[1];\n\\echo tried\nSELECT " . $subscribe =~ s/OWNER/$_->[2]/r), $_->[3], "$library: a handler of the tenant's, $_->[0]")
	  foreach [ 'as another role', '', ", owner => 'free'", 42501 ], [ 'as another tenant', '', ", owner => 'other'", 42501 ],
	  [ 'after SET ROLE', 'SET ROLE free', '', 42501 ], [ 'as the tenant', '', '', 'true' ];
	is(session("\\echo tried\nSELECT " . $subscribe =~ s/OWNER/, owner => 'free'/r), 42501, "$library: the owner of a handler's subscription does not change");

	# Other roles have their own prefix or none; a superuser can set a prefix for
	# itself.
	is(session(qq{\\echo tried\nSELECT idempotency.once('t2/x', 'k'), probe(\$\$SELECT idempotency.peek('t1/x', 'k')\$\$)},
			role => 'other'), 'f|42501', "$library: the other tenant has its own scopes");
	is(session(qq{\\echo tried\nSELECT idempotency.once('t2/x', 'k'), idempotency.once('t1/x', 'k')}, role => 'free'),
		'f|f', "$library: a role without prefix has all scopes");
	fails_with($node, "SET $guc = 't1/'; SELECT idempotency.peek('t2/x', 'k')", '42501', "$library: a superuser sets its own prefix");
	is($node->safe_psql('postgres', "$_; SELECT idempotency.peek('t1/x', 'k') IS NULL, idempotency.peek('t2/x', 'k') IS NULL"),
		'f|f', "$library: a role that sets the prefix of others is not bound by it, in $_")
	  foreach "ALTER ROLE other SET $guc = 't2/'", "ALTER ROLE other IN DATABASE own SET $guc = 't2/'",
		"ALTER DATABASE own SET $guc = 't1/'", "ALTER DATABASE own RESET $guc";

	# An invalid prefix is rejected, or the role cannot connect: it never gives access.
	$node->psql('postgres', "ALTER ROLE tenant SET $guc = 't1'");
	like(session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.peek('t2/x', 'k')\$\$)}), qr/^(42501|22023)$/,
		"$library: a prefix without an end does not open other scopes");
	fails_with($node, "$load; ALTER ROLE tenant SET $guc = 't1'", '22023', "$library: a prefix without an end is rejected if the library is loaded",
		like => qr/A scope prefix must end in/);

	# A session without a prefix does not lend that to the owner of a table which it analyzes.
	$node->safe_psql('postgres', q{CREATE TABLE trap (i int); INSERT INTO trap VALUES (1); ALTER TABLE trap OWNER TO tenant;
		CREATE FUNCTION trap(int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN
			RAISE NOTICE '%', public.probe('SELECT (idempotency.peek(''t2/x'', ''k'')).response'); RETURN $1; END $$;
		CREATE INDEX ON trap (trap(i))});
	my (undef, undef, $analyzed) = $node->psql('postgres', 'ANALYZE trap');
	is($analyzed, "psql:<stdin>:1: NOTICE:  42501", "$library: no scope is accessible in a security-restricted operation");
	$node->safe_psql('postgres', 'DROP TABLE trap; DROP FUNCTION trap');

	# A prefix for the whole server applies to a role without its own. If the library is
	# loaded later, a session with another value is denied all scopes.
	$node->append_conf('postgresql.conf', "$guc = 't1/'");
	$node->restart;
	foreach my $options ('', "-c $guc=t2/", "-c $guc=")
	{
		my $got = session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.peek('t2/x', 'k')\$\$)},
			role => 'free', options => $options);
		like($got, qr/^(42501|no connection)$/, "$library: a prefix in postgresql.conf, with the options '$options'");
	}
	is(session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.once('t1/x', 'k')\$\$)}, role => 'free'), 'false',
		"$library: the role's own scopes are accessible");
	$node->stop;
}
done_testing();
