# 052_alerts.pl
#
# Causes the fault of each alert of examples/monitoring/alerts.yaml on a server, whose clock the
# test sets, and lets prometheus-postgres-exporter give its metrics before, during and after it.
# promtool evaluates the alerts with them: exactly the expected ones fire.

use strict;
use warnings FATAL => 'all';

use ClockTest;
use ExporterTest;
use IdempotencyTest;
use JSON::PP;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# ----------------------------------------------------------------
# The faults
# ----------------------------------------------------------------

# fetched is the SQL that fetches a batch into :batch and :id.
sub fetched
{
	my ($subscription, $lease) = @_;
	return sprintf "SELECT max(batch) AS batch, min(id::text) AS id FROM idempotency.fetch('%s', lease => '%s') \\gset\n", $subscription, $lease // '1 hour';
}

# acknowledged is the SQL that fetches a batch and acknowledges it, after some calls.
sub acknowledged
{
	my ($subscription, $calls) = @_;
	return fetched($subscription) . ($calls // '') . "SELECT idempotency.ack('$subscription', :batch);\n";
}

my $handled = q{EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idempotency relay' AND wait_event = 'PgSleep')};
my $missed = q{EXISTS (SELECT FROM pg_stat_activity WHERE query = 'no background worker slot is free for the idempotency relay')};

# A fault has the name of its subscription, which gets two events of one aggregate before; SQL;
# a condition to wait for; and the alerts that it causes, each with a label: the subscription, the
# process, the table, or else the database.
my @faults = (
	# Subscriptions that make no progress: one worker fails, one hangs, and one has no slot.
	[ 'unread', '', '', SubscriptionLags => 'unread', NoProgress => 'unread' ],
	[ 'holds', fetched('holds', '20 hours'), '', SubscriptionLags => 'holds', NoProgress => 'holds' ],
	[ 'dies', fetched('dies', '1 s'), '', SubscriptionLags => 'dies', NoProgress => 'dies', BatchOverdue => 'dies' ],
	[ 'fails', '', q{(SELECT scheduled = 1 FROM idempotency.subscriptions WHERE subscription = 'fails')}, EventFails => 'fails', NoProgress => 'fails' ],
	[ 'hangs', '', $handled, SubscriptionLags => 'hangs', NoProgress => 'hangs' ],
	[ 'waits', '', $missed, SubscriptionLags => 'waits', NoProgress => 'waits', SlotsMissed => 'relay' ],
	[ 'blocks', acknowledged('blocks', q{SELECT idempotency.nack('blocks', :batch, :'id', 'no', '20 hours');}), '',
		EventFails => 'blocks', NoProgress => 'blocks' ],
	[ 'buries', acknowledged('buries', q{SELECT idempotency.nack('buries', :batch, :'id', 'no', dead => true);}) x 2, '',
		DeadLetters => 'buries', NoProgress => 'buries' ],
	[ 'paused', q{SELECT idempotency.pause('paused')}, '', Paused => 'paused' ],
	[ 'drops', 'SELECT pg_sleep(0.01); SELECT idempotency.reap()', '', EventsDropped => 'postgres' ],

	# Those that make progress.
	[ 'works', acknowledged('works') ],
	[ 'expires', fetched('expires', '1 us') . 'SELECT pg_sleep(0.01);' . acknowledged('expires'), '', BatchesExpire => 'postgres' ],

	# Keys.
	[ '', q{SELECT idempotency.claim('open', 'key')}, '', RefusedCommits => 'postgres' ],
	[ '', q{SELECT idempotency.complete('no', 'claim')}, '', StaleTokens => 'postgres' ],
	[ '', q{BEGIN; SELECT idempotency.claim('two', 'key', '1'), idempotency.complete('two', 'key'); COMMIT; SELECT idempotency.claim('two', 'key', '2')}, '', Mismatches => 'postgres' ],
	[ '', q{SELECT idempotency.claim('short', 'key', lease => '1 us');} x 10, '', Takeovers => 'postgres' ],
	[ '', q{SELECT idempotency.claim('given', 'up', lease => '1 us', retention => '1 us');
		SELECT idempotency.once_many('old', array(SELECT i::text FROM generate_series(1, 100) AS i), '1 us');
		SELECT pg_sleep(0.01); SELECT idempotency.reap()},
		'', OperationGivenUp => 'postgres', DeadRows => 'key' ],
	[ '', "\\c other\nSELECT idempotency.once('not', 'reaped')" ], # NothingReaped, after two days

	# A prepared transaction stops nothing but its key.
	[ 'prepared', q{VACUUM idempotency.parked; BEGIN; SELECT idempotency.publish('prepared', '{}'), idempotency.once('prepared', 'key');
		PREPARE TRANSACTION 'p';} . acknowledged('prepared'), '', ClaimOpen => 'postgres', Waiters => 'postgres' ],
);
my @subscriptions = grep { $_ } map { $_->[0] } @faults;

# ----------------------------------------------------------------
# The server
# ----------------------------------------------------------------

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->append_conf('postgresql.conf', q{
autovacuum = off
jit = off
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = 0
idempotency.handler_timeout = 0
max_prepared_transactions = 1
max_logical_replication_workers = 0
max_worker_processes = 0
log_statement = none
});

# becomes waits until a condition is true.
sub becomes
{
	my ($condition) = @_;
	$node->poll_query_until('postgres', "SELECT $condition") or die "never true: $condition";
	return;
}

# caused publishes two events to the subscription of a fault, and causes it.
sub caused
{
	my ($name, $sql, $condition) = @{ $_[0] };
	$node->safe_psql('postgres', "SELECT idempotency.publish('$name', '{}', 'a') FROM generate_series(1, 2)") if $name;
	$node->psql('postgres', $sql, on_error_stop => 0) if $sql;
	becomes($condition) if $condition;
	return;
}

# snapshot returns the values of all series. Unless the exporter cannot read a database, it calls
# the exporter until it has connected to all of them, after a restart of the server.
sub snapshot
{
	my ($unreadable) = @_;
	foreach (1 .. 100)
	{
		my %value = map { /^((?:idempotency|pg_exporter_last)_\S+) (\S+)$/ ? ($1 => $2) : () } split /\n/, metrics();
		return \%value if $unreadable || (grep { /^idempotency_stats_/ } keys %value) && $value{pg_exporter_last_scrape_error} == 0;
	}
	die 'the exporter cannot read: ' . exporter_log();
}

start_with_clock($node);
$node->safe_psql('postgres', q{
	CREATE EXTENSION idempotency;
	CREATE DATABASE other;
	CREATE ROLE prometheus LOGIN IN ROLE pg_monitor;
	CREATE ROLE app LOGIN;
	CREATE FUNCTION fails(idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
	CREATE FUNCTION hangs(idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1000000); END $$;
	CREATE FUNCTION waits(idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN END $$;
	ALTER FUNCTION fails OWNER TO app; ALTER FUNCTION hangs OWNER TO app; ALTER FUNCTION waits OWNER TO app});
$node->safe_psql('postgres', join ';', map {
	"SELECT idempotency.subscribe('$_', '{$_}', max_lag => " . (/drops/ ? "'1 us'" : 'NULL') . ", owner => 'app', retry_delay => '1 hour', handler => "
	  . (/fails|hangs|waits/ ? "'$_(idempotency.event)'" : 'NULL') . ')' } @subscriptions);
$node->safe_psql('other', 'CREATE EXTENSION idempotency');
outbox_tools($node);
start_exporter($node, 'prometheus', 'postgres', 'other');

# ----------------------------------------------------------------
# Snapshots
# ----------------------------------------------------------------

my %at;

# Without a slot for the launcher, and then with one and another.
caused([ 'waits' ]);
set_clock(600);
$at{launcher} = snapshot();
$node->stop;
$node->append_conf('postgresql.conf', 'max_worker_processes = 2');
start_with_clock($node);
becomes(q{(SELECT sum(acknowledged) = 2 FROM idempotency.partitions WHERE subscription = 'waits')});
$node->safe_psql('other', 'SELECT count(*) FROM idempotency.stats');
$at{before} = snapshot();

caused($_) foreach @faults;
my $script = PostgreSQL::Test::Utils::tempdir . '/wait.sql';
append_to_file($script, q{SELECT idempotency.once('prepared', 'key')});
my $waiting;
{
	local $ENV{PGOPTIONS} = '-c idempotency.wait=20d';
	$waiting = IPC::Run::start([ $node->installed_command('pgbench'), '-n', '-c', '21', '-t', '1', '-f', $script, $node->connstr('postgres') ], '>&', \my $output);
}
becomes('(SELECT count(*) = 21 FROM pg_locks WHERE NOT granted)');

# A survey of a database, which a change of a subscription requests, gets no slot either, and does not hide that the relay waits.
my $both = '';
foreach (1 .. 100)
{
	last if $both = $node->safe_psql('postgres', q{SELECT idempotency.resume('unread') \g /dev/null
		SELECT query FROM pg_stat_activity WHERE query LIKE 'no background worker slot % idempotency reaper%'});
}
like($both, qr/idempotency relay/, 'the workers that wait for a slot are shown together');
becomes($missed);
set_clock(1200);
$at{faults} = snapshot();

# All faults end.
set_clock(90_000);
$node->safe_psql('postgres', q{
	CREATE OR REPLACE FUNCTION fails(idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN END $$;
	CREATE OR REPLACE FUNCTION hangs(idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN END $$;
	SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency relay';
	SELECT idempotency.resume('paused'), idempotency.redrive('buries')});
$node->safe_psql('postgres', q{COMMIT PREPARED 'p'});
$waiting->finish;
for my $name (@subscriptions)
{
	$node->safe_psql('postgres', "CALL drain('$name')");
	becomes("(SELECT lag IS NULL AND scheduled + waiting + dead = 0 FROM idempotency.subscriptions WHERE subscription = '$name')");
}
$node->safe_psql('postgres', 'VACUUM idempotency.key, idempotency.parked');
$node->safe_psql('other', $_) foreach 'SELECT idempotency.reap()', 'VACUUM idempotency.key';

# The exporter cannot connect to a database, and has lost its privileges.
$node->safe_psql('postgres', q{REVOKE CONNECT ON DATABASE other FROM PUBLIC;
	SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'other'});
$at{closed} = snapshot(1);
$node->safe_psql('postgres', 'GRANT CONNECT ON DATABASE other TO PUBLIC; REVOKE pg_monitor FROM prometheus');
$at{blind} = snapshot(1);
$node->safe_psql('postgres', 'GRANT pg_monitor TO prometheus');
$at{after} = snapshot();

# ----------------------------------------------------------------
# The alerts
# ----------------------------------------------------------------

# A label is the name of a subscription, unless it is one of these.
my %kind = (postgres => 'datname', other => 'datname', relay => 'kind', launcher => 'kind', key => 'relname');

# sample returns what promtool has to find for an alert.
sub sample
{
	my ($alert, $label) = @_;
	my $kind = $kind{$label} // 'subscription';
	my %labels = (alertname => "Idempotency$alert", $label ? ($kind => $label, $kind =~ /subscription|relname/ ? (datname => 'postgres') : ()) : ());
	return { labels => '{' . join(',', map { qq($_="$labels{$_}") } keys %labels) . '}', value => 1 };
}

# group returns a group of tests: some alerts fire during a fault, and none before and after it.
# The metrics of the three snapshots that match a pattern last for 76 steps each, those of the
# last one for "steps". While the fault lasts, a counter grows in each step as it did from the
# first snapshot to the second.
sub group
{
	my ($name, $before, $during, $after, $unit, $steps, $filter, @fires) = @_;
	my @steps = (76, 76, $steps);
	my (@series, @samples);
	my %names = map { %$_ } $before, $during, $after;
	for my $series (grep { $_ =~ $filter } sort keys %names)
	{
		my @value = map { $_->{$series} } $before, $during, $after;
		my $grows = $series =~ /_total\{/ && defined $value[0] && defined $value[1] && $value[1] > $value[0] ? $value[1] - $value[0] : 0;
		$value[2] += $grows * ($steps[1] - 1) if defined $value[2];
		push @series, { series => $series, values => join ' ', map { defined $value[$_]
			? sprintf('%s+%sx%d', $value[$_], $_ == 1 ? $grows : 0, $steps[$_] - 1) : "_x$steps[$_]" } 0 .. 2 };
	}
	push @samples, sample(splice @fires, 0, 2) while @fires;
	my $end = -1;
	return { name => $name, interval => "1$unit", input_series => \@series, promql_expr_test => [ map {
		{ expr => q(count by (alertname, datname, subscription, kind, relname) (ALERTS{alertstate="firing"})),
			eval_time => ($end += $steps[$_]) . $unit, exp_samples => $_ == 1 ? \@samples : [] } } 0 .. 2 ] };
}

my @groups = (
	[ 'faults', @at{qw(before faults after)}, 'm', 76, qr//, NoCounters => 'launcher', map { @$_[ 3 .. $#$_ ] } @faults ],
	[ 'nothing reaped', @at{qw(before faults after)}, 'h', 45, qr/claims_total|rows_reaped/, NothingReaped => 'other' ],
	[ 'launcher', @at{qw(before launcher before)}, 'm', 76, qr//, NoLauncher => 'launcher', SubscriptionLags => 'waits', NoProgress => 'waits' ],
	[ 'closed', @at{qw(after closed after)}, 'm', 76, qr//, Unreadable => '' ],
	[ 'blind', @at{qw(after blind after)}, 'm', 76, qr//, Unreadable => '', NoCounters => '', NoCounters => 'launcher' ]);
my @tests = map { group(@$_) } @groups;

# Another server, with the same name in its network and databases of the same names, has a
# reaper that works; then neither counters nor a launcher, because its library is not preloaded.
my %elsewhere = ('faults' => [ qr/process_running.*launcher/, '_x76 0x75 _x76' ], 'nothing reaped' => [ qr/rows_reaped/, '0+1x196' ]);
foreach my $test (grep { $elsewhere{ $_->{name} } } @tests)
{
	my ($filter, $values) = @{ $elsewhere{ $test->{name} } };
	push @{ $test->{input_series} }, map { { series => s/\{/{instance="elsewhere",/r, values => $values } } grep { $_ =~ $filter } keys %{ $at{before} };
}

my %caused = map { ("Idempotency$_" => 1) } map { @$_[ 7 .. $#$_ ] } @groups;
is_deeply([ grep { !$caused{$_} } slurp_file("$monitoring/alerts.yaml") =~ /- alert: (\w+)/g ], [], 'the faults cause every alert');

my $tests = PostgreSQL::Test::Utils::tempdir . '/tests.yaml';
append_to_file($tests, encode_json({ rule_files => [ "$monitoring/alerts.yaml" ], evaluation_interval => '15m', tests => \@tests }));
my ($out, $err) = run_command([ 'promtool', 'test', 'rules', $tests ]);
is($out, "Unit Testing:  $tests\n  SUCCESS\n", 'exactly the expected alerts fire, during their faults only') or diag($err);
done_testing();
