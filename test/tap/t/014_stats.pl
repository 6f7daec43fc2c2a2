# 014_stats.pl
#
# Proves that idempotency.stats counts every result once, in its own database and no
# other. It counts under concurrency, and even if the transaction rolls back, fails or
# is cancelled. Counters disappear with their database and restart at zero with the
# server. Also tests who can read and reset them, and that without preloading nothing
# is counted, no worker runs, and all else works.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The reaper must not change counters during the test. Cluster.pm disables
# restart_after_crash, which one test needs.
my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = 0
restart_after_crash = on
max_prepared_transactions = 5
});

my @counters = qw(claims replays in_progress mismatches takeovers completions failures releases
  stale_tokens refused_commits reaped zombies_reaped waits);

# counters returns the counters of a database, by name.
sub counters
{
	my ($dbname) = @_;
	my $row = $node->safe_psql('postgres',
		'SELECT ' . join(', ', @counters) . " FROM idempotency.stats WHERE datname = '$dbname'");
	my %value;
	@value{@counters} = split /\|/, $row;
	return \%value;
}

# counts runs SQL in one session, which continues after an error, and checks how much
# each counter of the database grew. Counters that $expected does not name must not
# grow. %opt: dbname, sqlstate of the one error.
sub counts
{
	my ($name, $sql, $expected, %opt) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $dbname = $opt{dbname} // 'postgres';
	my $before = counters($dbname);
	my (undef, undef, $stderr) = $node->psql($dbname, $sql, on_error_stop => 0,
		extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	my $after = counters($dbname);
	my %grown = map { $_ => $after->{$_} - $before->{$_} } grep { $after->{$_} != $before->{$_} } @counters;

	is_deeply(\%grown, $expected, "$name: counts") or diag($stderr);
	if ($opt{sqlstate}) { error_is($stderr, $opt{sqlstate}, "$name: fails") }
	else { is($stderr, '', "$name: succeeds") }
}

# ----------------------------------------------------------------
# Calls and their counters
# ----------------------------------------------------------------

is($node->safe_psql('postgres', q{SELECT datid = (SELECT oid FROM pg_database WHERE datname = 'postgres'),
		claims, waits, wait_time, stats_reset BETWEEN pg_postmaster_start_time() AND clock_timestamp() FROM idempotency.stats}),
	't|0|0|00:00:00|t', 'the database of the caller has a row before anything is counted');

$node->safe_psql('postgres', q{
	CREATE FUNCTION handler(idempotency.document) RETURNS json LANGUAGE plpgsql AS $$
	BEGIN
		IF $1::text = '"no"' THEN RAISE 'no' USING ERRCODE = 'IKFIN'; END IF;
		IF $1::text = '"busy"' THEN RAISE 'busy'; END IF;
		RETURN '1'::json;
	END $$});

my $charge = q{SELECT idempotency.claim('s', '%s', '{"a": 1}'); SELECT idempotency.complete('s', '%1$s', '1')};
my $complete = sub { sprintf "BEGIN; $charge; COMMIT", $_[0] };

counts('claim and complete', $complete->('k1'), { claims => 1, completions => 1 });
counts('replay', q{SELECT idempotency.claim('s', 'k1', '{"a": 1}')}, { replays => 1 });
counts('replay by try_claim', q{SELECT idempotency.try_claim('s', 'k1')}, { replays => 1 });
counts('mismatch', q{SELECT idempotency.claim('s', 'k1', '{"a": 2}')}, { mismatches => 1 }, sqlstate => 'IK422');
counts('mismatch by try_claim', q{SELECT idempotency.try_claim('s', 'k1', '{"a": 2}')}, { mismatches => 1 });
counts('claim and fail', q{BEGIN; SELECT idempotency.claim('s', 'k2'); SELECT idempotency.fail('s', 'k2', '0', 402); COMMIT},
	{ claims => 1, failures => 1 });
counts('replay of a failure', q{SELECT idempotency.claim('s', 'k2')}, { replays => 1 });
counts('claim and release', q{BEGIN; SELECT idempotency.claim('s', 'k3'); SELECT idempotency.release('s', 'k3'); COMMIT},
	{ claims => 1, releases => 1 });
counts('claimed here already', q{BEGIN; SELECT idempotency.try_claim('s', 'k3'); SELECT idempotency.try_claim('s', 'k3')},
	{ claims => 1, in_progress => 1 });
counts('nothing to complete', q{SELECT idempotency.complete('s', 'k3')}, { stale_tokens => 1 }, sqlstate => 'IK412');
counts('nothing to release', q{SELECT idempotency.release('s', 'k3')}, { stale_tokens => 1 }, sqlstate => 'IK412');
counts('no key', q{SELECT idempotency.claim('s', NULL)}, {}, sqlstate => 'IK400');
counts('no status', q{BEGIN; SELECT idempotency.claim('s', 'k3'); SELECT idempotency.fail('s', 'k3', '1', 1)},
	{ claims => 1 }, sqlstate => '22023');
counts('peek and forget', q{SELECT idempotency.peek('s', 'k1'); SELECT idempotency.forget('s', 'k2')}, {});

counts('run', q{SELECT idempotency.run('s', 'r1', '1', 'handler(idempotency.document)')}, { claims => 1, completions => 1 });
counts('replay by run', q{SELECT idempotency.run('s', 'r1', '1', 'handler(idempotency.document)')}, { replays => 1 });
counts('run with a final error', q{SELECT idempotency.run('s', 'r2', '"no"', 'handler(idempotency.document)')}, { claims => 1, failures => 1 });
counts('run with another error', q{SELECT idempotency.run('s', 'r3', '"busy"', 'handler(idempotency.document)')}, { claims => 1 },
	sqlstate => 'P0001');

counts('once', q{SELECT idempotency.once('m', '1')}, { claims => 1, completions => 1 });
counts('once again', q{SELECT idempotency.once('m', '1')}, { replays => 1 });
counts('once_many', q{SELECT idempotency.once_many('m', array['1', '2', '3', '3', '4'])},
	{ claims => 3, completions => 3, replays => 1 });
counts('once of a key that is claimed', q{BEGIN; SELECT idempotency.claim('m', '5'); SELECT idempotency.once('m', '5')},
	{ claims => 1, in_progress => 1 }, sqlstate => 'IK409');
counts('once_many of no keys', q{SELECT idempotency.once_many('m', array[]::text[])}, {});

# Leases.
counts('claim with a lease', q{SELECT idempotency.claim('l', 'k1', '{"a": 1}', lease => '1 hour')}, { claims => 1 });
counts('leased by another', q{SELECT idempotency.try_claim('l', 'k1', '{"a": 1}', lease => '1 hour')}, { in_progress => 1 });
counts('leased by another, error', q{SELECT idempotency.claim('l', 'k1', wait => '0')}, { in_progress => 1 },
	sqlstate => 'IK409');
counts('leased by another, with another request', q{SELECT idempotency.try_claim('l', 'k1', '{"a": 2}')}, { mismatches => 1 });
my $token = $node->safe_psql('postgres', q{SELECT token FROM idempotency.claim('l', 'k2', lease => '1 ms')});
counts('takeover', q{SELECT pg_sleep(0.01); SELECT idempotency.claim('l', 'k2', lease => '1 ms')}, { takeovers => 1 });
counts('stale token', "SELECT idempotency.complete('l', 'k2', '1', token => $token)", { stale_tokens => 1 },
	sqlstate => 'IK410');
counts('stale token of a heartbeat', "SELECT idempotency.renew('l', 'k2', $token, '1 s')", { stale_tokens => 1 },
	sqlstate => 'IK410');
counts('stale token of a checkpoint', "SELECT idempotency.checkpoint('l', 'k2', $token, 'here')", { stale_tokens => 1 },
	sqlstate => 'IK410');
counts('heartbeat without a lease', q{BEGIN; SELECT idempotency.claim('l', 'k3'); SELECT idempotency.renew('l', 'k3', NULL, '1 s')},
	{ claims => 1, stale_tokens => 1 }, sqlstate => 'IK412');
counts('abandoned', q{SELECT pg_sleep(0.01); SELECT idempotency.claim_abandoned('l', '1 hour', 10)}, { takeovers => 1 });
counts('no more abandoned', q{SELECT idempotency.claim_abandoned('l', '1 hour', 10)}, {});
counts('completed with its token', q{SELECT idempotency.complete('l', 'k1', '1',
	token => (SELECT token FROM idempotency.key WHERE key = 'k1' AND scope = 'l'))}, { completions => 1 });
my $last = $node->safe_psql('postgres', q{SELECT finished_by FROM idempotency.key WHERE key = 'k1' AND scope = 'l'});
counts('a heartbeat that comes after the completion of its own owner', "SELECT idempotency.renew('l', 'k1', $last, '1 s')", {},
	sqlstate => 'IK410');
counts('a second completion by the same owner', "SELECT idempotency.complete('l', 'k1', '2', token => $last)", {},
	sqlstate => 'IK410');
counts('a heartbeat of another owner', sprintf("SELECT idempotency.renew('l', 'k1', %d, '1 s')", $last - 1), { stale_tokens => 1 },
	sqlstate => 'IK410');

# ----------------------------------------------------------------
# Transactions that do not commit
# ----------------------------------------------------------------

counts('rolled back', sprintf("BEGIN; $charge; ROLLBACK", 'k5'), { claims => 1, completions => 1 });
counts('rolled back to a savepoint', sprintf("BEGIN; SAVEPOINT a; $charge; ROLLBACK TO a; COMMIT", 'k5'),
	{ claims => 1, completions => 1 });
counts('failed', sprintf("BEGIN; $charge; SELECT 1/0", 'k5'), { claims => 1, completions => 1 }, sqlstate => '22012');
counts('not completed', q{SELECT idempotency.claim('s', 'k5')}, { claims => 1, refused_commits => 1 }, sqlstate => 'IK428');
counts('caught', q{DO $$ BEGIN PERFORM idempotency.claim('s', 'k1', '{"a": 2}'); EXCEPTION WHEN OTHERS THEN NULL; END $$},
	{ mismatches => 1 });
counts('prepared', sprintf("BEGIN; $charge; PREPARE TRANSACTION 'p'", 'k5'), { claims => 1, completions => 1 });
counts('commit prepared', q{COMMIT PREPARED 'p'}, {});
counts('prepared with an open claim', q{BEGIN; SELECT idempotency.claim('s', 'k6'); PREPARE TRANSACTION 'q'}, { claims => 1, refused_commits => 1 },
	sqlstate => 'IK428');

# ----------------------------------------------------------------
# Waits
# ----------------------------------------------------------------

my $owner = open_session($node);
$owner->query_safe(q{BEGIN; SELECT idempotency.claim('s', 'owned')});

# waited returns the total duration of all waits in milliseconds.
sub waited
{
	return $node->safe_psql('postgres', q{SELECT extract(epoch FROM wait_time) * 1000 FROM idempotency.stats
		WHERE datname = 'postgres'});
}

# waits is counts() for SQL that waits at least so many milliseconds. The time limit can
# start before the wait does, by an amount that depends on the machine.
sub waits
{
	my ($name, $sql, $ms, $expected, $sqlstate) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $before = waited();
	counts($name, $sql, { waits => 1, %$expected }, sqlstate => $sqlstate);
	my $time = waited() - $before;
	cmp_ok($time, '>=', $ms, "$name: at least the duration of the wait");
	cmp_ok($time, '<', 60_000, "$name: not much more than the duration of the wait");
}

counts('no wait', q{SELECT idempotency.try_claim('s', 'owned')}, { in_progress => 1 });
foreach (
	[ 'owned', 'an owner in a transaction' ],
	[ 'leased', 'an owner with a lease', q{SELECT idempotency.claim('s', 'leased', lease => '1 hour')} ])
{
	my ($key, $what, $setup) = @$_;
	$node->safe_psql('postgres', $setup) if $setup;
	waits("wait for $what, timed out", "SELECT idempotency.claim('s', '$key', wait => '500 ms')", 100,
		{ in_progress => 1 }, 'IK409');
	waits("wait for $what as a value", "SELECT idempotency.try_claim('s', '$key', wait => '500 ms')", 100,
		{ in_progress => 1 });
	waits("wait for $what, cancelled", "SET statement_timeout = 500; SELECT idempotency.claim('s', '$key', wait => '1 min')",
		100, {}, '57014');
}

# A wait that ends with a result because the other transaction ends.
my $waiter = open_session($node);
my $before = counters('postgres');
$waiter->query_until(qr/waiting/, qq{\\echo waiting\nSELECT outcome FROM idempotency.try_claim('s', 'owned', wait => '1 min');\n});
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND objsubid = 18756})
  or die 'no session waits';
$owner->query_safe(q{SELECT idempotency.complete('s', 'owned'); COMMIT});
is($waiter->query_safe('SELECT 1'), "replayed\n1", 'a wait that returns a result');
my $after = counters('postgres');
is($after->{waits} - $before->{waits}, 1, 'a wait that returns a result: counts');
$_->quit foreach $owner, $waiter;

# ----------------------------------------------------------------
# Concurrent clients
# ----------------------------------------------------------------

my $script = $node->basedir . '/once.sql';
append_to_file($script, "SELECT idempotency.once('many', :client_id || ' ' || random());\nSELECT idempotency.once('many', 'one');\n");
$node->safe_psql('postgres', q{SELECT idempotency.once('many', 'one')});
$before = counters('postgres');
$node->command_ok([ $node->installed_command('pgbench'), '-n', '-c', '8', '-j', '2', '-t', '250', '-f', $script, 'postgres' ],
	'eight concurrent clients');
$after = counters('postgres');
is_deeply({ map { $_ => $after->{$_} - $before->{$_} } qw(claims completions replays) },
	{ claims => 2000, completions => 2000, replays => 2000 }, 'every result of the concurrent clients is counted');

# ----------------------------------------------------------------
# Databases
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE other');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.stats WHERE datname = 'other'}), '0',
	'a database that has counted nothing has no row');
$node->safe_psql('other', 'CREATE EXTENSION idempotency');
my $here = counters('postgres');
$node->safe_psql('other', $complete->('k1'));
is_deeply(counters('postgres'), $here, 'another database counts for itself');
is($node->safe_psql('postgres', q{SELECT claims, completions, replays FROM idempotency.stats WHERE datname = 'other'}),
	'1|1|0', 'the view shows the other database');
is($node->safe_psql('other', q{SELECT string_agg(datname, ' ' ORDER BY datname COLLATE "C") FROM idempotency.stats}),
	'other postgres', 'the view of the other database shows this one');
counts('the other database', q{SELECT idempotency.claim('s', 'k1', '{"a": 1}')}, { replays => 1 }, dbname => 'other');

# A reset affects one database.
my $since = $node->safe_psql('postgres', q{SELECT stats_reset FROM idempotency.stats WHERE datname = 'other'});
my $at = $node->safe_psql('other', 'SELECT idempotency.stats_reset()');
is($node->safe_psql('postgres', qq{SELECT claims, completions, replays, waits, wait_time, stats_reset = '$at' AND stats_reset > '$since'
		FROM idempotency.stats WHERE datname = 'other'}), '0|0|0|0|00:00:00|t', 'reset');
is_deeply(counters('postgres'), $here, 'the reset of another database changes no counter here');
$node->safe_psql('postgres', 'SELECT idempotency.stats_reset()');
is($node->safe_psql('postgres', q{SELECT claims, completions, replays, waits, wait_time FROM idempotency.stats
		WHERE datname = 'postgres'}), '0|0|0|0|00:00:00', 'a reset of this database');
is($node->safe_psql('postgres', q{BEGIN READ ONLY; SELECT count(*) FROM idempotency.stats; SELECT idempotency.stats_reset() IS NOT NULL}),
	"2\nt", 'the view and the reset in a read-only transaction');

# Events that max_lag drops are counted at once, even if the transaction rolls back.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('late', '{*}', max_lag => '1 ms'), idempotency.publish('t', '1')});
$node->safe_psql('postgres', q{SELECT pg_sleep(0.01); BEGIN; SELECT idempotency.reap(); ROLLBACK});
is($node->safe_psql('postgres', q{SELECT events_dropped FROM idempotency.stats WHERE datname = 'postgres'}), '1', 'dropped events are counted at once');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.fetch('late'); SELECT idempotency.unsubscribe('late')}), "1\nt",
	'the events are delivered after the rollback');

# A database that is renamed, and one that is copied.
$node->safe_psql('other', $complete->('k2'));
$node->safe_psql('postgres', 'ALTER DATABASE other RENAME TO renamed');
is(counters('renamed')->{claims}, 1, 'a database that is renamed keeps its counters');
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE renamed');
is($node->safe_psql('copy', q{SELECT datname, claims FROM idempotency.stats WHERE datname IN ('renamed', 'copy')
		ORDER BY datname}), "copy|0\nrenamed|1", 'the counters of a copy start at zero');

# A database that is dropped.
$node->safe_psql('postgres', 'DROP DATABASE renamed');
is($node->safe_psql('postgres', q{SELECT string_agg(datname, ' ' ORDER BY datname COLLATE "C") FROM idempotency.stats}),
	'copy postgres', 'a database that is dropped has no row');

# ----------------------------------------------------------------
# Privileges
# ----------------------------------------------------------------

my $read = 'SELECT claims FROM idempotency.stats';
my $reset = 'SELECT idempotency.stats_reset()';
my @keys = ('SELECT * FROM idempotency.keys', 'SELECT * FROM idempotency.key', q{SELECT idempotency.peek('s', 'k1')},
	q{SELECT idempotency.claim('s', 'k1')}, q{SELECT idempotency.forget('s', 'k1')});

$node->safe_psql('postgres', q{
	CREATE ROLE plain LOGIN; CREATE ROLE client LOGIN; CREATE ROLE operator LOGIN; CREATE ROLE monitor LOGIN;
	GRANT pg_monitor TO monitor;
	SELECT idempotency.grant_client('client'), idempotency.grant_operator('operator')});

# can tries each statement as a role and checks that it is permitted or denied.
sub can
{
	my ($role, $allowed, @statements) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	foreach my $statement (@statements)
	{
		my (undef, undef, $stderr) = $node->psql('postgres', $statement,
			extra_params => [ '-v', 'VERBOSITY=verbose', '-U', $role ]);
		if ($allowed) { is($stderr, '', "$role can: $statement") }
		else { error_is($stderr, '42501', "$role cannot: $statement") }
	}
}

can('plain', 0, $read, $reset, 'SELECT * FROM idempotency_internal.stats()');
can('client', 0, $read, $reset);
can('monitor', 1, $read);
can('monitor', 0, 'SELECT * FROM idempotency_internal.stats()', $reset, @keys);
can('operator', 1, $read, $reset);

# ----------------------------------------------------------------
# Restart and crash
# ----------------------------------------------------------------

$node->restart;
is($node->safe_psql('postgres', 'SELECT datname, claims, replays FROM idempotency.stats'), 'postgres|0|0',
	'counters start at zero after a restart');
$node->safe_psql('postgres', $complete->('after'));

my $victim = open_session($node);
$victim->query_safe(sprintf "BEGIN; $charge", 'victim');
my $pid = $victim->query_safe('SELECT pg_backend_pid()');
is(counters('postgres')->{claims}, 2, 'counters of a backend are visible before it is killed');
kill 'KILL', $pid or die "kill: $!";
$victim->{run}->finish;
$node->poll_query_until('postgres', 'SELECT 1', '1') or die 'the server did not recover';
is($node->safe_psql('postgres', 'SELECT datname, claims, replays FROM idempotency.stats'), 'postgres|0|0',
	'counters start at zero after a crash');
counts('after the crash', q{SELECT idempotency.claim('s', 'after', '{"a": 1}')}, { replays => 1 });
$node->stop;

# ----------------------------------------------------------------
# Without preloading
# ----------------------------------------------------------------

foreach my $setting ("shared_preload_libraries = ''", "shared_preload_libraries = ''\nsession_preload_libraries = 'idempotency'")
{
	my $how = $setting =~ /session/ ? 'loaded by the session' : 'loaded by the first call';
	$node->append_conf('postgresql.conf', $setting);
	$node->start;
	is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.stats'), '0', "$how: no rows");
	is($node->safe_psql('postgres', $complete->($how) . "; SELECT count(*) FROM idempotency.stats"),
		"(claimed,f,,1,,,,,,f,,,)\n1\n0", "$how: claims work and are not counted");
	is($node->safe_psql('postgres', "SELECT outcome FROM idempotency.claim('s', '$how', '{\"a\": 1}')"), 'replayed',
		"$how: outcomes are stored");
	fails_with($node, 'SELECT idempotency.stats_reset()', '55000', "$how: stats_reset is rejected",
		like => qr/is not preloaded.*HINT:.*shared_preload_libraries/s);
	can('monitor', 1, $read);
	can('plain', 0, $read, $reset);
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency%'}), '0',
		"$how: no worker reaps or calls a handler");
	$node->stop;
}

done_testing();
