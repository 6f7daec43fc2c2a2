# 039_settings.pl
#
# Proves that safety settings fail closed. A database, a role, a function, a session or
# the server can store an invalid value while the library is not loaded. Then every
# operation that needs the setting is rejected, in every session, until the value is
# valid. Valid intervals that were stored so apply. All of this holds whether the
# library is preloaded or loaded by the first call.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => "max_worker_processes = 16\ntimezone = UTC\n");
my $retained = q{SELECT round(extract(epoch FROM expires_at - created_at) / 3600, 1) FROM idempotency.key WHERE key = '%s'};
my $key = 0;

# as returns the psql options for a role with connection options, in a database.
sub as
{
	my ($dbname, %opt) = @_;
	my $connstr = $node->connstr($dbname) . " user=" . ($opt{role} // 'app');
	$connstr .= " options='$opt{options}'" if defined $opt{options};
	return (dbname => $dbname, extra_params => [ '-d', $connstr ]);
}

# refused runs SQL that must fail with 22023 (or another SQLSTATE) and name the setting.
sub refused
{
	my ($name, $setting, $sql, $where, $sqlstate) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @params = @{ { @$where }->{extra_params} };
	my ($rc, $out, $err) = eval {
		$node->psql('postgres', "\\set VERBOSITY verbose\n$sql", @$where, on_error_stop => 1, extra_params => [ '-v', 'VERBOSITY=verbose', @params ]);
	};

	# With the library preloaded, a client with such an option cannot connect. Its
	# connection can be closed before psql has sent anything.
	my $refused = $@ ? $@ =~ /Broken pipe/ : $err =~ /FATAL:  invalid value for parameter "idempotency\.$setting"/;
	return ok(1, "$name: no connection") if $refused && "@params" =~ /options=/;
	die $@ if $@;
	return error_is($err =~ s/^.*WARNING:.*\n(?:DETAIL: .*\n|HINT: .*\n|LOCATION: .*\n)*//mgr, $sqlstate // '22023', $name, qr/"idempotency\.$setting"/);
}

# The library is not loaded when the values are stored here, so they are not checked.
my %database = (
	interval => q{SET idempotency.retention = '30 days'},
	month => q{SET idempotency.retention = '1 month'},
	bad => q{SET idempotency.retention = '30 dayz'},
	zero => q{SET idempotency.retention = 0},
	size => q{SET idempotency.max_response_size = '10 kib'},
	errors => q{SET idempotency.final_errors = 'ikfin'},
	patience => q{SET idempotency.wait = 'a while'},
	link => q{SET idempotency.documentation = 'https://example.com/>'},
	events => q{SET idempotency.outbox_retention = '3 fortnights'},
	good => q{SET idempotency.outbox_retention = '30 days'});
$node->safe_psql('postgres', 'CREATE ROLE app LOGIN; CREATE ROLE hasty LOGIN; CREATE ROLE tenant LOGIN; CREATE ROLE handler LOGIN; CREATE ROLE operator LOGIN');
foreach my $dbname (sort keys %database)
{
	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->safe_psql($dbname, q{CREATE EXTENSION idempotency;
		SELECT idempotency.grant_client(r) FROM unnest('{app,hasty,tenant,handler}'::regrole[]) AS r;
		SELECT idempotency.grant_consumer('handler'), idempotency.grant_operator('operator');
		CREATE FUNCTION echo(json) RETURNS json LANGUAGE sql AS 'SELECT $1';
		CREATE FUNCTION kept(key text) RETURNS boolean LANGUAGE sql AS $$ SELECT idempotency.once('s', key) $$;
		BEGIN; SELECT idempotency.claim('s', 'stored', retention => '1 day'), idempotency.complete('s', 'stored', '1'); COMMIT});
	$node->safe_psql('postgres', "ALTER DATABASE $dbname $database{$dbname}");
}
$node->safe_psql('postgres', q{ALTER ROLE hasty SET idempotency.retention = 'soon'; ALTER ROLE hasty IN DATABASE month SET idempotency.retention = '2 days';
	ALTER ROLE tenant SET idempotency.scope_prefix = 't1'; ALTER ROLE handler SET idempotency.retention = 'until then'});
$node->safe_psql($_, q{ALTER FUNCTION kept SET idempotency.retention = '90 minutes'; SET check_function_bodies = off;
	CREATE FUNCTION lost(key text) RETURNS boolean LANGUAGE sql SET idempotency.retention = 'for a while' AS $$ SELECT idempotency.once('s', key) $$})
  foreach 'bad', 'month';
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_db_role_setting WHERE setconfig::text LIKE '%idempotency.%'}), 14, 'all values were stored');

foreach my $preload ('', 'shared_preload_libraries', 'session_preload_libraries')
{
	my $library = $preload || 'not preloaded';
	$node->adjust_conf('postgresql.conf', $_, undef) foreach 'shared_preload_libraries', 'session_preload_libraries';
	$node->append_conf('postgresql.conf', "$preload = 'idempotency'\nidempotency.reaper_naptime = 0\nidempotency.relay_workers = 2\n") if $preload;
	$node->restart;
	my $run = sub { my ($dbname, $sql, %opt) = @_; return $node->safe_psql('postgres', $sql, as($dbname, %opt)) };

	# Stored valid values apply.
	$key++;
	$run->('interval', "SELECT idempotency.once('s', 'k$key')");
	is($run->('interval', sprintf($retained, "k$key"), role => 'postgres'), '720.0', "$library: 30 days are 30 days");
	$run->('month', "BEGIN; SELECT idempotency.claim('s', 'k$key'), idempotency.complete('s', 'k$key'); COMMIT");
	is($run->('month', qq{SELECT expires_at - created_at > '27 days' FROM idempotency.key WHERE key = 'k$key'}, role => 'postgres'), 't', "$library: a month is a month");
	$run->('month', "SELECT idempotency.once('s', 'h$key')", role => 'hasty');
	is($run->('month', sprintf($retained, "h$key"), role => 'postgres'), '48.0', "$library: the most specific value applies, whatever the others are");

	# An operation that needs an invalid retention fails.
	foreach my $where ([ 'a database', as('bad') ], [ 'a database, with 0', as('zero') ], [ 'a role', as('interval', role => 'hasty') ],
		[ 'a role that is a superuser', as('bad', role => 'postgres') ],
		[ 'options', as('interval', options => '-c idempotency.retention=long') ])
	{
		my ($level, @where) = @$where;
		refused("$library, $level: $_", 'retention', "SELECT idempotency.$_", \@where)
		  foreach q{claim('s', 'new')}, q{try_claim('s', 'new')}, q{once('s', 'new')}, q{once_many('s', ARRAY['new'])}, q{run('s', 'new', '1', 'echo(json)')}, q{claim('s', 'new', lease => '1 min')},
			q{claim('s', 'stored')};
	}
	is($run->($_, q{SELECT count(*) FROM idempotency.key WHERE key = 'new'}, role => 'postgres'), 0, "$library: nothing was stored in $_") foreach 'bad', 'zero', 'interval';

	# An operation that does not need it succeeds.
	is($run->('bad', q{SELECT outcome FROM idempotency.peek('s', 'stored'); SELECT outcome FROM idempotency.claim('s', 'stored', retention => '1 day')}), "replayed\nreplayed",
		"$library: operations without the setting succeed");

	# Until the value is valid: in a session, a transaction, a function.
	$key++;
	$run->('bad', "SET idempotency.retention = '5 hours'; SELECT idempotency.once('s', 'k$key')");
	is($run->('bad', sprintf($retained, "k$key"), role => 'postgres'), '5.0', "$library: a session sets a valid value");
	refused("$library: RESET restores the invalid value", 'retention', "SELECT idempotency.once('s', 'r$key', '1 h'); SET idempotency.retention = '5 hours'; RESET idempotency.retention; SELECT idempotency.once('s', 'k')",
		[ as('bad') ]);
	refused("$library: the end of a transaction restores the invalid value", 'retention', "BEGIN; SET LOCAL idempotency.retention = '5 hours'; SELECT idempotency.once('s', 'l$key'); COMMIT; SELECT idempotency.once('s', 'k')", [ as('bad') ]);
	refused("$library: a rollback to a savepoint restores the invalid value", 'retention', "BEGIN; SAVEPOINT s; SET idempotency.retention = '5 hours'; SELECT idempotency.once('s', 's$key'); ROLLBACK TO s; SELECT idempotency.once('s', 'k')", [ as('bad') ]);
	$run->('bad', "SELECT kept('f$key')");
	is($run->('bad', sprintf($retained, "f$key"), role => 'postgres'), '1.5', "$library: a function with its own valid value succeeds");
	refused("$library: the function's value ends with it", 'retention', "SELECT kept('g$key'); SELECT idempotency.once('s', 'k')", [ as('bad') ]);
	refused("$library: a function's refused value", 'retention', "SELECT lost('k')", [ as('month') ]);
	refused("$library: the same, after the first call", 'retention', "SELECT idempotency.once('s', 'm$key'); SELECT lost('k')", [ as('month') ]);
	$run->('month', "SELECT idempotency.once('s', 'n$key')");

	# If the library is loaded, a command that sets an invalid value is rejected, and
	# the previous value stays.
	refused("$library: $_, with the library loaded", 'retention', "LOAD 'idempotency'; $_", [ as('month', role => 'postgres') ])
	  foreach q{SET idempotency.retention = 'long'}, q{ALTER ROLE app SET idempotency.retention = 'long'}, q{ALTER DATABASE month SET idempotency.retention = '0'},
		q{ALTER FUNCTION echo SET idempotency.retention = 'long'}, q{SELECT set_config('idempotency.retention', 'long', true)};

	# Parallel workers start in such a session.
	is($run->('bad', qq{SELECT idempotency.once('s', 'p$key', '1 h'); DO \$\$ BEGIN PERFORM set_config(name, 'on', false) FROM pg_settings WHERE name IN ('force_parallel_mode', 'debug_parallel_query'); END \$\$;
			SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0; SET min_parallel_table_scan_size = 0; SELECT count(*) > 100 FROM pg_proc}), "t\nt", "$library: parallel workers start");

	# The other settings.
	refused("$library: a response without a valid limit", 'max_response_size', "BEGIN; SELECT idempotency.claim('s', 'new'); SELECT idempotency.complete('s', 'new', '1')", [ as('size') ]);
	is($run->('size', qq{BEGIN; SELECT outcome FROM idempotency.claim('s', 'k$key'); SELECT idempotency.complete('s', 'k$key', NULL); COMMIT}), "claimed\n", "$library: an operation without response needs no limit");
	refused("$library: run(), without a valid list of final errors", 'final_errors', "SELECT idempotency.run('s', 'new', '1', 'echo(json)')", [ as('errors') ]);
	is($run->('patience', "SELECT idempotency.once('s', 'k$key')"), 't', "$library: an invalid wait falls back to the default");
	is($run->('link', q{SELECT idempotency.problem('IK400') ->> 'type'}), 'about:blank', "$library: an invalid link is not in any answer");
	is($run->('link', q{SELECT idempotency.problem('IK400') ->> 'type'}, options => '-c idempotency.documentation=/keys'), '/keys', "$library: a client sets a valid one");
	refused("$library: a prefix without delimiter", 'scope_prefix', "SELECT idempotency.peek('$_', 'k')", [ as('interval', role => 'tenant') ]) foreach 't1', 't1/', 't2/';

	# Events are kept if no valid retention is known, even if a client hides the invalid
	# value with its own.
	my $reap = sub { my ($dbname, %opt) = @_; return $node->psql('postgres', 'SELECT idempotency.reap()', as($dbname, role => 'operator', %opt)) };
	foreach my $where ([ 'events' ], [ 'good' ], [ 'good', options => '-c idempotency.outbox_retention=0' ], [ 'good', options => '-c idempotency.outbox_retention=' ])
	{
		my ($dbname, %opt) = @$where;
		my $id = $run->($dbname, q{SELECT idempotency.publish('t', '1')}, role => 'postgres');
		$run->($dbname, qq{SET session_replication_role = replica; UPDATE idempotency.outbox SET published_at = now() - interval '20 days' WHERE id = '$id'}, role => 'postgres');
		$reap->($dbname, %opt);
		is($run->($dbname, qq{SELECT count(*) FROM idempotency.outbox WHERE id = '$id'}, role => 'postgres'), 1, "$library: an event of $database{$dbname} is kept, with options " . ($opt{options} // 'none'));
		$run->($dbname, q{SET idempotency.outbox_retention = '1 day'; SELECT idempotency.reap()}, role => 'postgres');
		is($run->($dbname, qq{SELECT count(*) FROM idempotency.outbox WHERE id = '$id'}, role => 'postgres'), 0, "$library: a superuser with a valid value deletes the event");
	}

	# A handler has the settings of its owner.
	if ($preload eq 'shared_preload_libraries')
	{
		$run->('interval', q{CREATE FUNCTION handle(idempotency.event) RETURNS void LANGUAGE sql AS $$ SELECT idempotency.once('handled', $1.id::text) $$;
			SELECT idempotency.subscribe('handled', '{t}', 'handle(idempotency.event)', max_attempts => 1, owner => 'handler');
			SELECT idempotency.publish('t', '1')}, role => 'postgres');
		ok($node->poll_query_until('interval', q{SELECT last_error LIKE '%"idempotency.retention": "until then"%' FROM idempotency.subscriptions}), 'a handler that needs the setting fails with the reason');
		$run->('interval', q{SELECT idempotency.unsubscribe('handled')}, role => 'postgres');
	}

	# The configuration file of the server.
	$node->append_conf('postgresql.conf', "idempotency.retention = 'a year'\n");
	$node->restart;
	refused("$library: an invalid value in postgresql.conf", 'retention', q{SELECT idempotency.once('s', 'new')}, [ as('postgres', role => 'postgres') ]);
	$node->adjust_conf('postgresql.conf', 'idempotency.retention', q{'1 year'}, 1);
	$node->reload;
	$key++;
	ok($node->poll_query_until('postgres', "SELECT current_setting('idempotency.retention') = '1 year'"), "$library: the file is reloaded");
	$run->('postgres', "SELECT idempotency.once('s', 'k$key')", role => 'postgres');
	is($run->('postgres', qq{SELECT expires_at - created_at > '364 days' FROM idempotency.key WHERE key = 'k$key'}, role => 'postgres'), 't', "$library: the value of the reloaded file applies");
	$node->adjust_conf('postgresql.conf', 'idempotency.retention', undef);
}

$node->stop;
done_testing();
