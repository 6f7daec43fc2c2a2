# 022_outbox_restore.pl
#
# Proves that the outbox outlives its cluster: after a dump and restore, whatever
# the format and wherever the transaction ids of the new cluster begin, after
# pg_upgrade, after the promotion of a standby and after a recovery to a point in
# time, and when transaction ids begin anew, each subscription goes on where it was.  What it has acknowledged is not
# given again; everything else that was committed is given, in order, each event
# once: also what was in flight when the subscription passed it, what lies behind
# a hole, what is parked, and a batch that is out.  What was not committed is
# never given, and holds back nothing.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;

# No worker is to look after the age of transaction ids.
my $conf = "autovacuum_freeze_max_age = 2000000000\n";

# moved makes a server whose next transaction has that id.
sub moved
{
	my ($name, $epoch, $xid, %opt) = @_;
	my $node = new_node($name, conf => $conf, %opt);

	$node->stop;
	set_next_xid($node, $epoch, $xid);
	$node->start;
	is($node->safe_psql('postgres', 'SELECT pg_current_xact_id()'), $epoch * 2**32 + $xid, "$name: where transaction ids begin");
	return $node;
}

my $node = moved('main', 3, 20_000_000, init => { allows_streaming => 1, has_archiving => 1 });

# ----------------------------------------------------------------
# A database with a past
# ----------------------------------------------------------------

# event publishes one; odd and even numbers have topics of their own.
sub event
{
	my ($n) = @_;
	return publish($n, $n % 2 ? 'odd.t' : 'even.t');
}

# subscribed is the SQL that makes subscriptions.
sub subscribed
{
	return join '', map { "SELECT idempotency.subscribe('$_', ARRAY['*']); " } @_;
}

# fetched is the SQL that fetches a batch and shows what is in it.
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

# A position in the middle.
my ($half) = split /\|/, $node->safe_psql('postgres', fetched('half', 4, '1 hour'));
$node->safe_psql('postgres', "SELECT idempotency.ack('half', $half)");

# 11 and 15, 17 commit after others have passed them, 12 never does; 13 and 16
# are rolled back, and nobody ever has 14.
my ($first, $never, $third) = map { open_session($node) } 1 .. 3;
$first->query_safe('BEGIN; ' . event(11));
$never->query_safe('BEGIN; ' . event(12));
$node->safe_psql('postgres', 'BEGIN; ' . event(13) . q{ROLLBACK; SELECT nextval('idempotency.outbox_seq')});
$third->query_safe('BEGIN; ' . event(15) . 'SAVEPOINT s; ' . event(16) . 'ROLLBACK TO s; SAVEPOINT t; ' . event(17) . 'RELEASE t');
$node->safe_psql('postgres', event($_)) foreach 18 .. 20;

my $passed = '1 2 3 4 5 6 7 8 9 10 18 19 20';
is_deeply(drained($node, 'postgres', 4, qw(read flight flight_one odd)),
	{ read => $passed, flight => $passed, flight_one => $passed, odd => '1 3 5 7 9 19' }, 'source: what is in flight is passed');
my %out;
foreach (['flight_out', 20, '1 hour', $passed], ['out', 5, '1 hour', '1 2 3 4 5'], ['expired', 5, '1 ms', '1 2 3 4 5'])
{
	my ($subscription, $max, $lease, $events) = @$_;
	($out{$subscription}, my $got) = split /\|/, $node->safe_psql('postgres', fetched($subscription, $max, $lease));
	is($got, $events, "source: $subscription has a batch out");
}
$node->safe_psql('postgres', subscribed('late'));
$_->query_safe('COMMIT') foreach $first, $third;
$node->safe_psql('postgres', event($_)) foreach 21, 22;
is_deeply(drained($node, 'postgres', 2, 'read'), { read => '11 15 17 21 22' }, 'source: one subscription has got what was in flight');
$node->safe_psql('postgres', 'VACUUM idempotency.outbox');

# Events that failed: 23 is due in an hour and 24, 27 wait for it, 25 is in the
# batch that is out, 26 is a dead letter.
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
	'23 1, 24 0 waits, 25 1, 26 2 dead, 27 0 waits', 'source: they are parked in all states');

# A number that is drawn, and gone with its transaction.
$never->query_safe(event(28));
is($node->safe_psql('postgres', 'SELECT max(seq), count(*) FROM idempotency.outbox; SELECT last_value FROM idempotency.outbox_seq'),
	"27|23\n28", 'source: events, and numbers');

# ----------------------------------------------------------------
# What must be left of it
# ----------------------------------------------------------------

# rows_of returns the rows of all tables, whole, but for a position that workers
# may move.
sub rows_of
{
	my ($server, $dbname) = @_;
	my $rows = join ' UNION ALL ', map { "SELECT '$_', t::text FROM idempotency.$_ AS t" } qw(outbox subscription position parked);
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
	expired => $all,
	late => "$flight $rest",
	odd => "$flight 21",
	unread => $all,
	fresh => $all);
my @everyone = sort keys %expected;

# out_again deals with the batches that were out: either their
# consumers come back, or their leases end.  Returns what comes again.
sub out_again
{
	my ($server, $dbname, $acknowledge, $name) = @_;
	my %again = (flight_out => "$passed ", out => '1 2 3 4 5 ', failed => '25x2');

	if ($acknowledge)
	{
		is($server->safe_psql($dbname, fetched($_, 100, '1 hour')), '|', "$name: $_ is leased as it was") foreach sort keys %again;
		$server->safe_psql($dbname, "SELECT idempotency.extend('$_', $out{$_}, '1 hour'), idempotency.ack('$_', $out{$_})") foreach sort keys %again;
		return (flight_out => '', out => '', failed => '');
	}
	$server->safe_psql($dbname, q{UPDATE idempotency.position SET leased_until = leased_at + interval '1 us' WHERE leased_until IS NOT NULL});
	fails_with($server, "SELECT idempotency.ack('expired', 1)", 'IK408', "$name: no other batch is taken for it", dbname => $dbname);
	return %again;
}

# restored checks a database that has the past of the source.  %opt: "max" events
# a batch; "acknowledge" what was out; "lived" on after the dump.
sub restored
{
	my ($server, $dbname, $name, %opt) = @_;
	my %expected = $opt{lived} ? %{ $opt{lived} } : %expected;
	$name .= ", $opt{max} at a time" . ($opt{acknowledge} ? ', acknowledged late' : '');
	is(rows_of($server, $dbname), $before, "$name: every row is there");
	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('fresh', ARRAY['*'], start_at => 'beginning')});

	# What was not acknowledged comes, in order, and nothing twice.
	my %again = out_again($server, $dbname, $opt{acknowledge}, $name);
	my %due = (%expected, failed => '');
	$due{$_} = $again{$_} . $due{$_} foreach keys %again;
	is_deeply(drained($server, $dbname, $opt{max}, sort keys %due), \%due, "$name: each subscription goes on where it was");

	# What had failed comes when its time has come, and what waited, behind it.
	$server->safe_psql($dbname, q{UPDATE idempotency.parked SET retry_at = clock_timestamp() WHERE retry_at IS NOT NULL});
	is_deeply(drained($server, $dbname, $opt{max}, 'failed'), { failed => '23x2 24 27' }, "$name: parked events come when they are due");
	is($server->safe_psql($dbname, q{SELECT seq, attempts, error FROM idempotency.dead_letters; SELECT idempotency.redrive('failed')}),
		"26|2|no 26\n1", "$name: the dead letter is there");
	is_deeply(drained($server, $dbname, $opt{max}, 'failed'), { failed => '26' }, "$name: and is given once more");

	lives_on($server, $dbname, $name, $opt{max});

	fails_with($server, q{SELECT idempotency.fetch('handled')}, '55000', "$name: what has a handler is not fetched", dbname => $dbname);
	fails_with($server, q{SET ROLE stranger; SELECT idempotency.fetch('unread')}, '42501', "$name: a stranger may not read", dbname => $dbname);
	is($server->safe_psql($dbname, q{SET ROLE reader; SELECT count(*) FROM idempotency.fetch('unread')}), 0, "$name: the owner may");
}

# lives_on checks that new transactions are told from those of the source.  One
# inserts a row of the source, as the end of a restore would.
sub lives_on
{
	my ($server, $dbname, $name, $max) = @_;
	my @names = ('failed', grep { $_ ne 'odd' } @everyone);
	my ($open, $restore) = map { open_session($server, dbname => $dbname) } 1 .. 2;
	my $last = $server->safe_psql($dbname, 'SELECT last_value FROM idempotency.outbox_seq');

	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('failed', ARRAY['*'])});
	$open->query_safe('BEGIN; ' . event(100));
	$restore->query_safe(q{BEGIN; INSERT INTO idempotency.outbox SELECT nextval('idempotency.outbox_seq'), txid, published_at,
		id, 'even.t', NULL, NULL, '{"n": 108}', NULL FROM idempotency.outbox WHERE seq = 17});
	$server->safe_psql($dbname, q{SELECT idempotency.subscribe('now', ARRAY['*'])});
	$server->safe_psql($dbname, event(102) . 'BEGIN; ' . event(104) . 'ROLLBACK; ' . event(106));
	is($server->safe_psql($dbname, qq{SELECT string_agg(payload->>'n', ' ' ORDER BY seq), min(seq) > $last FROM idempotency.outbox WHERE payload->>'n' LIKE '10_'}),
		'102 106|t', "$name: no number comes a second time");
	push @names, 'now';
	is_deeply(drained($server, $dbname, $max, @names), { map { $_ => '102 106' } @names }, "$name: new events come to all");
	$open->query_safe('COMMIT');
	is_deeply(drained($server, $dbname, $max, 'odd', @names), { odd => '', map { $_ => '100' } @names }, "$name: also one that was in flight");
	$restore->query_safe('COMMIT');
	is_deeply(drained($server, $dbname, $max, 'odd', @names), { odd => '', map { $_ => '108' } @names }, "$name: and one that is restored late");
	is($server->safe_psql($dbname, q{SELECT string_agg(subscription, ' ') FROM idempotency.position WHERE inflight <> array[]::int8[] AND subscription NOT IN ('odd', 'handled')}),
		'', "$name: nothing is in flight any more");
	$_->quit foreach $open, $restore;
}

# ----------------------------------------------------------------
# Dump and restore
# ----------------------------------------------------------------

# Far below the transactions of the source, and far above them.
my %clusters = (
	below => moved('below', 0, 100_000),
	above => moved('above', 9, 1_000_000_000));
$_->safe_psql('postgres', $roles) foreach values %clusters;

# dumps runs pg_dump, which must end well and say nothing.
sub dumps
{
	my ($name, @arguments) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->command_checks_all([ 'pg_dump', @arguments ], 0, [qr/\A\z/], [qr/\A\z/], $name);
}

dumps('dump as plain text', '--file', "$dir/plain", 'postgres');
dumps('dump as archive', '--format=custom', '--file', "$dir/custom", 'postgres');
dumps('dump as directory, in parallel', '--format=directory', '--jobs=2', '--file', "$dir/directory", 'postgres');
dumps('dump the schema', '--schema-only', '--file', "$dir/schema", 'postgres');
dumps('dump the data', '--data-only', '--file', "$dir/data", 'postgres');

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
		$server->command_ok([ @$_, '--dbname', $dump ], "$dump: $_->[0] ends well") foreach @{ $dumps{$dump}->{commands} };
		restored($server, $dump, "$where, $dump", %{ $dumps{$dump} });
	}
	$server->stop;
}

# ----------------------------------------------------------------
# Copies of the cluster
# ----------------------------------------------------------------

# One standby follows to the end; the other one, and the archive, only to here.
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

# The source lives on: some get all, and one event more.
$node->safe_psql('postgres', event(201));
is_deeply(drained($node, 'postgres', 2, 'read', 'flight'), { map { $_ => "$expected{$_} 201" } 'read', 'flight' }, 'source: it lives on');
$node->safe_psql('postgres', 'BEGIN; ' . fetched('half', 100, '1 hour') . '; ROLLBACK');
my $segment = $node->safe_psql('postgres', 'SELECT pg_walfile_name(pg_switch_wal())');
$node->poll_query_until('postgres', "SELECT last_archived_wal >= '$segment' FROM pg_stat_archiver") or die 'the log is not archived';
my $here = $before;
my $later = rows_of($node, 'postgres');
my %later = map { $_ => "$expected{$_} 201" } @everyone;
@later{qw(read flight)} = ('', '');
$node->stop('immediate');
wait_for_end($never);

$copy{synchronous}->promote;
$copy{synchronous}->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$copy{synchronous}->reload;
$before = $later;
restored($copy{synchronous}, 'postgres', 'promoted, synchronous', max => 2, lived => \%later);
$copy{synchronous}->stop;

# What the primary has done since then is lost, and nothing else.
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

# It takes no more than that the source was stopped in good order.
my $upgraded = PostgreSQL::Test::Cluster->new('upgraded');
$upgraded->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$upgraded->append_conf('postgresql.conf', "autovacuum = off\n$conf");
$_->append_conf('postgresql.conf', "shared_preload_libraries = 'idempotency'\n") foreach $node, $upgraded;
$node->append_conf('postgresql.conf', "synchronous_standby_names = ''\n");
$node->start;
$node->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$node->stop;

my $bindir = $node->config_data('--bindir');
chdir $dir;
command_ok([ 'pg_upgrade', '--no-sync', '--old-datadir', $node->data_dir, '--new-datadir', $upgraded->data_dir,
	'--old-bindir', $bindir, '--new-bindir', $bindir, '--socketdir', $upgraded->host,
	'--old-port', $node->port, '--new-port', $upgraded->port ], 'pg_upgrade ends well');
$upgraded->start;
$before = $later;
restored($upgraded, 'postgres', 'upgraded', max => 3, lived => \%later);
$upgraded->safe_psql('postgres', publish(300, 'handled'));
ok($upgraded->poll_query_until('postgres', q{SELECT string_agg(n::text, ' ') = '300' FROM handled}), 'upgraded: workers serve what has a handler');
$upgraded->stop;

# ----------------------------------------------------------------
# Transaction ids that begin anew
# ----------------------------------------------------------------

# A cluster can be moved by no more than half the way round at a time, when it has
# been frozen.
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
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '2 4' }, 'round: two are in flight');
is($round->safe_psql('postgres', q{SELECT inflight[1] < 2^32, inflight[4] > 2^32 FROM idempotency.position}), 't|t', 'round: from before and after the ids began anew');
$young->query_safe('COMMIT');
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '3' }, 'round: the younger is given');
$old->query_safe('COMMIT');
$round->safe_psql('postgres', event(5));
is_deeply(drained($round, 'postgres', 1, 'round'), { round => '1 5' }, 'round: and the older');
$_->quit foreach $old, $young;
$round->stop;
done_testing();
