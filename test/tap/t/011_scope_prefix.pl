# 011_scope_prefix.pl
#
# Proves that idempotency.scope_prefix, once a superuser has set it for a login
# role, binds every session of that role in every function that takes a scope,
# and that the role has no way to lift it: whether the library is preloaded, or
# comes with the first call, to find what the role has set before.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $guc = 'idempotency.scope_prefix';
my ($node, $library);

# session runs SQL in a new session of a login role, and returns what it printed
# after a line that says "tried".  Statements before that may fail, and leave
# their transaction usable.
sub session
{
	my ($sql, %opt) = @_;
	my $connstr = $node->connstr($opt{dbname} // 'postgres');
	$connstr .= " options='$opt{options}'" if defined $opt{options};
	my (undef, $out, $err) = eval {
		$node->psql('postgres', "\\set ON_ERROR_ROLLBACK on\n$sql", on_error_stop => 0,
			extra_params => [ '-d', $connstr, '-U', $opt{role} // 'tenant' ]);
	};

	# Who is not let in may be gone before he has been sent anything.
	return 'no connection' if $@ =~ /Broken pipe/;
	die $@ if $@;
	note($err) if $err;
	return 'no connection' if $err =~ /connection to server .* failed/;
	return $out =~ /^tried\n(.*)\z/ms ? $1 : "did not get there: $out $err";
}

# The other tenant's scope must be refused by the very first call already.
my $probes = join("\n", '\echo tried', map { "SELECT probe(\$\$$_\$\$);" }
	q{SELECT idempotency.peek('t2/x', 'k')}, q{SELECT idempotency.once('t2/x', 'k')},
	q{SELECT (idempotency.peek('t1/x', 'k')).response}, q{SELECT idempotency.claim('t2/x', 'k')}, q{SHOW } . $guc);
my $bound = qq(42501\n42501\n"t1"\n42501\nt1/);

# is_bound checks that a session which first tries something is bound after it.
sub is_bound
{
	my ($name, $try, %opt) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(session("$try;\n$probes", %opt), $bound, "$library: $name");
}

# set_up makes a server with a tenant that is bound, another tenant, and a role
# that is free; and something to read in the scope of each tenant.
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
			GRANT EXECUTE ON FUNCTION idempotency.forget TO tenant;
			CREATE SCHEMA tenant AUTHORIZATION tenant;
			CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS 'SELECT $1';
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

# Statements by which it might lift it in its later sessions.
my @lasting = map { [ $_ =~ s/ \Q$guc\E.*//sr, $_ ] } (
	"ALTER ROLE tenant SET $guc = ''", "ALTER ROLE tenant SET $guc = 't2/'", "ALTER ROLE tenant RESET $guc",
	'ALTER ROLE tenant RESET ALL', "ALTER ROLE tenant IN DATABASE own SET $guc = ''",
	"ALTER ROLE CURRENT_USER IN DATABASE postgres SET $guc = ''", "ALTER DATABASE own SET $guc = ''",
	"ALTER ROLE ALL SET $guc = ''", "ALTER SYSTEM SET $guc = ''", "GRANT SET ON PARAMETER $guc TO tenant");

# A function with a setting of its own, made and called by the role.
my $sneak = sub {
	my ($name, $clause) = @_;
	return qq{DROP FUNCTION IF EXISTS tenant.$name; CREATE FUNCTION tenant.$name() RETURNS text LANGUAGE plpgsql $clause AS \$\$
		BEGIN RETURN probe('SELECT (idempotency.peek(''t2/x'', ''k'')).response'); END \$\$};
};

# Every function that takes a scope, and what it says about a scope of one's own.
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

	# Values in the options of the connection; to be refused is as good.
	foreach my $options ("-c $guc=", "-c $guc=t2/", "--$guc=t2/" =~ tr/_/-/r, "-c role=free -c $guc=")
	{
		foreach my $try ([ 'nothing else', '' ], grep { $_->[0] =~ /RESET|LOCAL|savepoint|rolled back/ } @tries)
		{
			my $got = session("$try->[1];\n$probes", options => $options);
			is($got eq 'no connection' ? $bound : $got, $bound, "$library: PGOPTIONS '$options' and $try->[0]");
		}
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
		is_bound("the next session after $name, when the library was there", '');
		is_bound("after $name, in the role's own database", '', dbname => 'own');
	}

	# Every function, about scopes that are and are not its own.
	foreach my $call (sort keys %calls)
	{
		my $about = sub { session("\\echo tried\nSELECT probe(\$\$SELECT idempotency." . $call =~ s/S/'$_[0]'/r . '$$)') };
		like($about->('t1/x'), $calls{$call}, "$library: $call about its own");
		is($about->($_), '42501', "$library: $call about $_") foreach 't2/x', 't1', 't1x/', 'T1/x', ' t1/x';
	}
	is(session("\\echo tried\nSELECT probe('SELECT count(*) FROM idempotency.$_')"), '42501',
		"$library: no look at idempotency.$_") foreach qw(key keys);

	# Others are bound by theirs, or not at all; a superuser may bind himself.
	is(session(qq{\\echo tried\nSELECT idempotency.once('t2/x', 'k'), probe(\$\$SELECT idempotency.peek('t1/x', 'k')\$\$)},
			role => 'other'), 'f|42501', "$library: the other tenant has its own scopes");
	is(session(qq{\\echo tried\nSELECT idempotency.once('t2/x', 'k'), idempotency.once('t1/x', 'k')}, role => 'free'),
		'f|f', "$library: a free role has all");
	fails_with($node, "SET $guc = 't1/'; SELECT idempotency.peek('t2/x', 'k')", '42501', "$library: a superuser binds himself");
	is($node->safe_psql('postgres', "$_; SELECT idempotency.peek('t1/x', 'k') IS NULL, idempotency.peek('t2/x', 'k') IS NULL"),
		'f|f', "$library: who sets it for others is not bound by it, in $_")
	  foreach "ALTER ROLE other SET $guc = 't2/'", "ALTER ROLE other IN DATABASE own SET $guc = 't2/'",
		"ALTER DATABASE own SET $guc = 't1/'", "ALTER DATABASE own RESET $guc";

	# A prefix that could not be is refused, or keeps the role out: it never opens.
	$node->psql('postgres', "ALTER ROLE tenant SET $guc = 't1'");
	like(session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.peek('t2/x', 'k')\$\$)}), qr/^(42501|22023)$/,
		"$library: a prefix without an end does not open other scopes");
	fails_with($node, "$load; ALTER ROLE tenant SET $guc = 't1'", '22023', "$library: and is refused where the library knows",
		like => qr/A scope prefix must end in/);

	# One for the whole server binds the role that has none of its own.  Where the
	# library comes late, whoever brings another value is refused all scopes.
	$node->append_conf('postgresql.conf', "$guc = 't1/'");
	$node->restart;
	foreach my $options ('', "-c $guc=t2/", "-c $guc=")
	{
		my $got = session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.peek('t2/x', 'k')\$\$)},
			role => 'free', options => $options);
		like($got, qr/^(42501|no connection)$/, "$library: a prefix in postgresql.conf, with the options '$options'");
	}
	is(session(qq{\\echo tried\nSELECT probe(\$\$SELECT idempotency.once('t1/x', 'k')\$\$)}, role => 'free'), 'false',
		"$library: and its own scopes are open");
	$node->stop;
}
done_testing();
