# 022_outbox_restore.pl
#
# Proves that each subscription continues at its position in another cluster: after a
# dump and restore in every format, with lower and higher transaction IDs, after
# pg_upgrade, promotion of a standby, point-in-time recovery, and a wraparound of
# transaction IDs. Acknowledged events are not delivered again. Every other committed
# event is delivered once and in order: also events that were in flight when the
# subscription passed them, events after a sequence gap, parked events, and events of an
# unacknowledged batch. Uncommitted events are never delivered, and block no other
# event.
#
# The script takes half a minute, because it restores into seven clusters, one of them by
# pg_upgrade.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;

# Autovacuum must not freeze transaction IDs.
my $conf = "autovacuum_freeze_max_age = 2000000000\n";

# moved creates a server whose next transaction has that ID.
sub moved
{
	my ($name, $epoch, $xid, %opt) = @_;
	my $node = new_node($name, conf => $conf, %opt);

	$node->stop;
	set_next_xid($node, $epoch, $xid);
	$node->start;
	is($node->safe_psql('postgres', 'SELECT pg_current_xact_id()'), $epoch * 2**32 + $xid, "$name: the next transaction ID");
	return $node;
}

my $node = moved('main', 3, 20_000_000, init => { allows_streaming => 1, has_archiving => 1 });

# ----------------------------------------------------------------
# A database with a history
# ----------------------------------------------------------------

# event publishes an event; odd and even numbers have different topics.
sub event
{
	my ($n) = @_;
	return publish($n, $n % 2 ? 'odd.t' : 'even.t');
}

# subscribed is the SQL that creates subscriptions.
sub subscribed
{
	return join '', map { "SELECT idempotency.subscribe('$_', ARRAY['*']); " } @_;
}

# fetched is the SQL that fetches a batch and shows its events.
sub fetched
{
	my ($subscription, $max, $lease) = @_;
	return qq{SELECT max(batch), string_agg(payload->>'n', ' ' ORDER BY seq) FROM idempotency.fetch('$subscription', $max, lease => '$lease')};
}

my $roles = 'CREATE ROLE reader LOGIN; CREATE ROLE stranger;';
outbox_tools($node);
$node->safe_psql('postgres', $roles . q{
	SELECT idempotency.grant_consumer('reader'), idempotency.grant_consumer('stranger');
	CREATE TABLE handled (n int);
	GRANT INSERT ON handled TO reader;
	CREATE FUNCTION handle(idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO handled VALUES (($1.payload->>'n')::int) $$;
	SELECT idempotency.subscribe('handled', ARRAY['handled'], 'handle(idempotency.event)', owner => 'reader');
	SELECT idempotency.subscribe('odd', ARRAY['od*.t']);
	SELECT idempotency.subscribe('unread', ARRAY['*'], start_at => 'beginning', max_lag => '1 year', owner => 'reader')}
	. ';' . subscribed(qw(read half flight flight_one flight_out out expired)));
$node->safe_psql('postgres', event($_)) foreach 1 .. 10;

# A position between two events.
my ($half) = split /\|/, $node->safe_psql('postgres', fetched('half', 4, '1 hour'));
$node->safe_psql('postgres', "SELECT idempotency.ack('half', $half)");

# 11, 15 and 17 commit after subscriptions have passed them; 12 never commits. 13 and 16
# are rolled back, and 14 is a sequence gap.
my ($first, $never, $third) = map { open_session($node) } 1 .. 3;
$first->query_safe('BEGIN; ' . event(11));
$never->query_safe('BEGIN; ' . event(12));
$node->safe_psql('postgres', 'BEGIN; ' . event(13) . q{ROLLBACK; SELECT nextval('idempotency.outbox_seq')});
$third->query_safe('BEGIN; ' . event(15) . 'SAVEPOINT s; ' . event(16) . 'ROLLBACK TO s; SAVEPOINT t; ' . event(17) . 'RELEASE t');
$node->safe_psql('postgres', event($_)) foreach 18 .. 20;

my $passed = '1 2 3 4 5 6 7 8 9 10 18 19 20';
is_deeply(drained($node, 'postgres', 4, qw(read flight flight_one odd)),
	{ read => $passed, flight => $passed, flight_one => $passed, odd => '1 3 5 7 9 19' }, 'source: subscriptions pass events in flight');
my %out;
foreach (['flight_out', 20, '1 hour', $passed], ['out', 5, '1 hour', '1 2 3 4 5'], ['expired', 5, '1 ms', '1 2 3 4 5'])
{
	my ($subscription, $max, $lease, $events) = @$_;
	($out{$subscription}, my $got) = split /\|/, $node->safe_psql('postgres', fetched($subscription, $max, $lease));
	is($got, $events, "source: $subscription has an unacknowledged batch");
}
$node->safe_psql('postgres', subscribed('late'));
$_->query_safe('COMMIT') foreach $first, $third;
$node->safe_psql('postgres', event($_)) foreach 21, 22;
is_deeply(drained($node, 'postgres', 2, 'read'), { read => '11 15 17 21 22' }, 'source: one subscription has received the events that were in flight');
$node->safe_psql('postgres', 'VACUUM idempotency.outbox');

# Failed events: 23 is due in an hour and 24 and 27 wait for it, 25 is in the
# unacknowledged batch, 26 is a dead letter.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('failed', ARRAY['job'], max_attempts => 2, retry_delay => '2 hours');}
	. join '', map { publish($_, 'job', $_ == 25 ? 'L' : $_ == 26 ? 'M' : 'K') } 23 .. 27);
$node->safe_psql('postgres', q{
	CREATE FUNCTION nack(n int, batch int8, retry_in interval) RETURNS timestamptz LANGUAGE sql AS
		$$ SELECT idempotency.nack('failed', batch, (SELECT id FROM idempotency.outbox WHERE seq = n), 'no ' || n, retry_in) $$});
($out{failed}, my $got) = split /\|/, $node->safe_psql('postgres', fetched('failed', 100, '1 hour'));
$node->safe_psql('postgres', "SELECT nack(23, $out{failed}, NULL), nack(25, $out{failed}, '0'), nack(26, $out{failed}, '0');
	SELECT idempotency.ack('failed', $out{failed})");
($out{failed}, my $again) = split /\|/, $node->safe_psql('postgres', fetched('failed', 100, '1 hour'));
$node->safe_psql('postgres', "SELECT nack(26, $out{failed}, NULL)");
is("$got, $again", '23 24 25 26 27, 25 26', 'source: events fail');
is($node->safe_psql('postgres', q{SELECT string_agg(seq || ' ' || attempts || CASE WHEN dead_at IS NOT NULL THEN ' dead'
		WHEN retry_at IS NULL THEN ' waits' ELSE '' END, ', ' ORDER BY seq) FROM idempotency.parked}),
	'23 1, 24 0 waits, 25 1, 26 2 dead, 27 0 waits', 'source: events are parked in all states');

# One that has nothing to read.
$node->safe_psql('postgres', subscribed('current'));

# A sequence number that is drawn by a transaction that rolls back.
$never->query_safe(event(28));
is($node->safe_psql('postgres', 'SELECT max(seq), count(*) FROM idempotency.outbox; SELECT last_value FROM idempotency.outbox_seq'),
	"27|23\n28", 'source: events and sequence numbers');

# ----------------------------------------------------------------
# The expected state of a copy
# ----------------------------------------------------------------

# rows_of returns all rows of all tables, except a position that workers can move.
sub rows_of
{
	my ($server, $dbname) = @_;
	my $rows = join ' UNION ALL ', map { "SELECT '$_', t::text FROM idempotency.$_ AS t" } qw(outbox subscription partition position parked);
	return $server->safe_psql($dbname, "$rows ORDER BY 1, 2") =~ s/^position\|\(handled,.*\n//mr;
}

my $before = rows_of($node, 'postgres');
my $flight = '11 15 17';
my $rest = '21 22 23 24 25 26 27';
my $all = "1 2 3 4 5 6 7 8 9 10 $flight 18 19 20 $rest";
my %expected = (
	read => '23 24 25 26 27',
	half => $all =~ s/^1 2 3 4 //r,
	flight => "$flight $rest",
	flight_one => "$flight $rest",
	flight_out => "$flight $rest",
	out => $all =~ s/^1 2 3 4 5 //r,
	expired => $all =~ s/^1 2 3 4 5 /1x2 2x2 3x2 4x2 5x2 /r,
	late => "$flight $rest",
	odd => "$flight 21",
	unread => $all,
	current => '',
	fresh => $all);
my @everyone = sort keys %expected;

# redelivered ends the unacknowledged batches: their consumers acknowledge them late, or
# their leases expire. Returns the events that are redelivered.
sub redelivered
{
	my ($server, $dbname, $acknowledge, $name) = @_;
	# A batch that comes back has failed once more.
	my $twice = sub { join '', map { "${_}x2 " } split / /, $_[0] };
	my %again = (flight_out => $twice->($passed), out => $twice->('1 2 3 4 5'), failed => '25x3');

	if ($acknowledge)
	{
		is($server->safe_psql($dbname, fetched($_, 100, '1 hour')), '|', "$name: $_ has the same lease") foreach sort keys %again;
		$server->safe_psql($dbname, "SELECT idempotency.extend('$_', $out{$_}, '1 hour'), idempotency.ack('$_', $out{$_})") foreach sort keys %again;
		return (flight_out => '', out => '', failed => '');
	}
	$server->safe_psql($dbname, q{UPDATE idempotency.position SET leased_until = leased_at + interval '1 us' WHERE leased_until IS NOT NULL});
	fails_with($server, "SELECT idempotency.ack('expired', 1)", 'IK408', "$name: another batch number is rejected", dbname => $dbname);
	return %again;
}

# restored checks a database with the history of the source. %opt: "max" events per
# batch; "acknowledge": the consumers acknowledge late; "lived": the source continued
# after the dump.
sub restored
{
	my ($server, $dbname, $name, %opt) = @_;
	my %expected = $opt{lived} ? %{ $opt{lived} } : %expected;
	$name .= ", $opt{max} at a time" . ($opt{acknowledge} ? ', acknowledged late' : '');
	is(rows_of($server, $dbname), $before, "$name: every row is there");
	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('fresh', ARRAY['*'], start_at => 'beginning')});

	# Unacknowledged events are delivered in order, and no event twice.
	my %again = redelivered($server, $dbname, $opt{acknowledge}, $name);
	my %due = (%expected, failed => '');
	$due{$_} = $again{$_} . $due{$_} foreach keys %again;
	my $got = drained($server, $dbname, $opt{max}, sort keys %due);
	# These read on in a snapshot from before events that were in flight, which come last or in between.
	$_ = join ' ', sort { ($a =~ /(\d+)/)[0] <=> ($b =~ /(\d+)/)[0] } split / / foreach @$got{qw(out expired)}, @due{qw(out expired)};
	is_deeply($got, \%due, "$name: each subscription continues at its position");

	# Failed events are redelivered when they are due, followed by the events behind
	# them.
	$server->safe_psql($dbname, q{UPDATE idempotency.parked SET retry_at = clock_timestamp() WHERE retry_at IS NOT NULL});
	is_deeply(drained($server, $dbname, $opt{max}, 'failed'), { failed => '23x2 24 27' }, "$name: parked events are redelivered when they are due");
	is($server->safe_psql($dbname, q{SELECT seq, attempts, error FROM idempotency.dead_letters; SELECT idempotency.redrive('failed')}),
		"26|2|no 26\n1", "$name: the dead letter is kept");
	is_deeply(drained($server, $dbname, $opt{max}, 'failed'), { failed => '26' }, "$name: a redriven event is delivered");

	new_events_arrive($server, $dbname, $name, $opt{max});

	fails_with($server, q{SET ROLE stranger; SELECT idempotency.fetch('unread')}, '42501', "$name: a role without rights cannot read", dbname => $dbname);
	is($server->safe_psql($dbname, q{SET ROLE reader; SELECT count(*) FROM idempotency.fetch('unread')}), 0, "$name: the owner can read");
}

# new_events_arrive checks that new transactions are not confused with those of the
# source.
sub new_events_arrive
{
	my ($server, $dbname, $name, $max) = @_;
	my @names = ('failed', grep { $_ ne 'odd' } @everyone);
	my $open = open_session($server, dbname => $dbname);
	my $last = $server->safe_psql($dbname, 'SELECT last_value FROM idempotency.outbox_seq');

	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('failed', ARRAY['*'])});
	$open->query_safe('BEGIN; ' . event(100));
	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('now', ARRAY['*'])});
	$server->safe_psql($dbname, event(102) . 'BEGIN; ' . event(104) . 'ROLLBACK; ' . event(106));
	is($server->safe_psql($dbname, qq{SELECT string_agg(payload->>'n', ' ' ORDER BY seq), min(seq) > $last FROM idempotency.outbox WHERE payload->>'n' LIKE '10_'}),
		'102 106|t', "$name: no sequence number is repeated");
	push @names, 'now';
	is_deeply(drained($server, $dbname, $max, @names), { map { $_ => '102 106' } @names }, "$name: new events reach all subscriptions");
	$open->query_safe('COMMIT');
	is_deeply(drained($server, $dbname, $max, 'odd', @names), { odd => '', map { $_ => '100' } @names }, "$name: an event that was in flight is delivered");
	$open->quit;
}

# ----------------------------------------------------------------
# Dump and restore
# ----------------------------------------------------------------

# Transaction IDs far below those of the source, and far above.
my %clusters = (
	below => moved('below', 0, 100_000),
	above => moved('above', 9, 1_000_000_000));
$_->safe_psql('postgres', $roles) foreach values %clusters;

dumps($node, 'dump as plain text', '--file', "$dir/plain", 'postgres');
dumps($node, 'dump as archive', '--format=custom', '--file', "$dir/custom", 'postgres');
dumps($node, 'dump as directory, in parallel', '--format=directory', '--jobs=2', '--file', "$dir/directory", 'postgres');
dumps($node, 'dump the schema', '--schema-only', '--file', "$dir/schema", 'postgres');
dumps($node, 'dump the data', '--data-only', '--file', "$dir/data", 'postgres');

my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file');
my @restore = ('pg_restore', '--exit-on-error');

# The dumps, and how the events are read afterwards.
my %dumps = (
	plain => { commands => [ [ @psql, "$dir/plain" ] ], max => 2 },
	custom => { commands => [ [ @restore, "$dir/custom" ] ], max => 1, acknowledge => 1 },
	directory => { commands => [ [ @restore, '--jobs=2', "$dir/directory" ] ], max => 100 },
	parts => { commands => [ [ @psql, "$dir/schema" ], [ @psql, "$dir/data" ] ], max => 3, acknowledge => 1 });

foreach my $where (sort keys %clusters)
{
	my $server = $clusters{$where};
	foreach my $dump (sort keys %dumps)
	{
		$server->safe_psql('postgres', "CREATE DATABASE $dump TEMPLATE template0");
		$server->command_ok([ @$_, '--dbname', $dump ], "$dump: $_->[0] succeeds") foreach @{ $dumps{$dump}->{commands} };
		restored($server, $dump, "$where, $dump", %{ $dumps{$dump} });
	}
	$server->stop;
}

# ----------------------------------------------------------------
# Copies of the cluster
# ----------------------------------------------------------------

# One standby follows to the end; the other one and the archive stop here.
$node->backup('base');
my %copy;
foreach my $name (qw(synchronous asynchronous))
{
	$copy{$name} = PostgreSQL::Test::Cluster->new($name);
	$copy{$name}->init_from_backup($node, 'base', has_streaming => 1);
	$copy{$name}->start;
	$node->wait_for_catchup($copy{$name});
}
$copy{asynchronous}->stop;
$node->safe_psql('postgres', q{SELECT pg_create_restore_point('here')});
$node->safe_psql('postgres', q{ALTER SYSTEM SET synchronous_standby_names = 'synchronous'});
$node->reload;
$node->poll_query_until('postgres', q{SELECT sync_state = 'sync' FROM pg_stat_replication}) or die 'the standby is not synchronous';

# The source continues: some subscriptions read all events and one new event.
$node->safe_psql('postgres', event(201));
is_deeply(drained($node, 'postgres', 2, 'read', 'flight'), { map { $_ => "$expected{$_} 201" } 'read', 'flight' }, 'source: subscriptions continue');
$node->safe_psql('postgres', 'BEGIN; ' . fetched('half', 100, '1 hour') . '; ROLLBACK');
my $segment = $node->safe_psql('postgres', 'SELECT pg_walfile_name(pg_switch_wal())');
$node->poll_query_until('postgres', "SELECT last_archived_wal >= '$segment' FROM pg_stat_archiver") or die 'the WAL is not archived';
my $here = $before;
my $later = rows_of($node, 'postgres');
my %later = map { $_ => "$expected{$_} 201" =~ s/^ //r } @everyone;
@later{qw(read flight)} = ('', '');
$node->stop('immediate');
wait_for_end($never);

$copy{synchronous}->promote;
$copy{synchronous}->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$copy{synchronous}->reload;
$before = $later;
restored($copy{synchronous}, 'postgres', 'promoted, synchronous', max => 2, lived => \%later);
$copy{synchronous}->stop;

# Only what the primary did since then is lost.
$before = $here;
$copy{asynchronous}->start;
$copy{asynchronous}->promote;
restored($copy{asynchronous}, 'postgres', 'promoted, asynchronous', max => 100, acknowledge => 1);
$copy{asynchronous}->stop;

my $past = PostgreSQL::Test::Cluster->new('past');
$past->init_from_backup($node, 'base', has_restoring => 1, standby => 0);
$past->append_conf('postgresql.conf', "recovery_target_name = 'here'\nrecovery_target_timeline = 'current'\nrecovery_target_action = 'promote'\n");
$past->start;
$past->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()') or die 'the recovery does not end';
restored($past, 'postgres', 'recovered', max => 1);
$past->stop;

# ----------------------------------------------------------------
# pg_upgrade
# ----------------------------------------------------------------

# pg_upgrade only needs a clean shutdown of the source.
my $upgraded = PostgreSQL::Test::Cluster->new('upgraded');
$upgraded->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$upgraded->append_conf('postgresql.conf', "autovacuum = off\n$conf");
$_->append_conf('postgresql.conf', "shared_preload_libraries = 'idempotency'\n") foreach $node, $upgraded;
$node->append_conf('postgresql.conf', "synchronous_standby_names = ''\n");
$node->start;
$node->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$node->stop;

chdir $dir;
upgrade_ok($node, $upgraded, 'pg_upgrade succeeds');
$upgraded->start;
$before = $later;
restored($upgraded, 'postgres', 'upgraded', max => 3, lived => \%later);
$upgraded->safe_psql('postgres', publish(300, 'handled'));
ok($upgraded->poll_query_until('postgres', q{SELECT string_agg(n::text, ' ') = '300' FROM handled}), 'upgraded: workers serve a subscription with a handler');
$upgraded->stop;

# ----------------------------------------------------------------
# Wraparound of transaction IDs
# ----------------------------------------------------------------

# A cluster can advance by at most half of the ID space at a time, after a freeze.
my $round = new_node('round', conf => $conf);
$round->safe_psql('postgres', q{UPDATE pg_database SET datallowconn = true});
foreach my $xid (1_500_000_000, 3_000_000_000, 2**32 - 60)
{
	$round->command_ok([ 'vacuumdb', '--all', '--freeze', '--quiet' ], 'freeze');
	$round->stop;
	set_next_xid($round, 0, $xid);
	$round->start;
}
outbox_tools($round);
$round->safe_psql('postgres', subscribed('round'));
my ($old, $young) = map { open_session($round) } 1 .. 2;
$old->query_safe('BEGIN; ' . event(1));
$round->safe_psql('postgres', q{DO $$ BEGIN FOR i IN 1 .. 100 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$});
$round->safe_psql('postgres', event(2));
$young->query_safe('BEGIN; ' . event(3));
$round->safe_psql('postgres', event(4));
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '2 4' }, 'round: two transactions are in flight');
is($round->safe_psql('postgres', q{SELECT xids[1]::text::int8 < 2^32, xids[cardinality(xids)]::text::int8 > 2^32 FROM idempotency.position}), 't|t', 'round: one from before and one from after the wraparound');
$young->query_safe('COMMIT');
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '3' }, 'round: the event of the younger transaction is delivered');
$old->query_safe('COMMIT');
$round->safe_psql('postgres', event(5));
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '1 5' }, 'round: the event of the older transaction is delivered');
$_->quit foreach $old, $young;
$round->stop;
done_testing();
