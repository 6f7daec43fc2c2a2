# 031_injection_outbox.pl
#
# Stops publish() between any two of its steps, and the commit of a transaction that has
# published before it wakes consumers. There they are cancelled, or killed alone or with the
# server, or another session acts in between. Each committed event is delivered once, an
# uncommitted one never. A session that is stopped inside publish() holds back no other event,
# and does not lose its own. A worker is stopped around its calls of a handler: each event has its
# effect once, in order. Delivery itself is SQL, which has no such points.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use InjectionTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = injection_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '0'
idempotency.outbox_retention = '0'
});
outbox_tools($node);
my %faults = faults($node);

# is_given checks the events that a consumer receives after the fault.
sub is_given
{
	my ($given, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(drained($node, 'postgres', 100, 's')->{s}, $given, $name);
	return;
}

# ----------------------------------------------------------------
# publish()
# ----------------------------------------------------------------

my $published = qr/^\S{36}$/;

foreach my $point (qw(publish-number publish-insert publish-index publish-end))
{
	foreach my $end (qw(COMMIT ROLLBACK))
	{
		my $name = "$point, $end";
		begin_events($node, publish(0, 't'));
		is_given('0', "$name: an earlier event is delivered");
		my ($session) = stop_at($node, $point, 'BEGIN;' . publish(1, 't') . $end);

		$node->safe_psql('postgres', publish(2, 't'));
		is_given('2', "$name: another event is delivered meanwhile");
		result_of($node, 'SELECT idempotency.reap()');
		is_given('', "$name: no other event is delivered");
		wake($node, $point);
		like(answer_of($session), $published, "$name: the event is published");
		$session->quit;
		$node->safe_psql('postgres', publish(3, 't'));
		is_given($end eq 'COMMIT' ? '1 3' : '3', "$name: the event is delivered if it was committed");
	}

	# A subscription that begins meanwhile gets the event, which commits after it.
	begin_events($node);
	my ($session) = stop_at($node, $point, publish(1, 't'));
	$node->safe_psql('postgres', q{SELECT idempotency.subscribe('new', ARRAY['t'])});
	wake($node, $point);
	like(answer_of($session), $published, "$point: the event is published then");
	$session->quit;
	is_deeply(drained($node, 'postgres', 100, 's', 'new'), { s => '1', new => '1' }, "$point: a new subscription receives it");
	$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('new')});

	foreach my $fault (sort keys %faults)
	{
		my $name = "$fault at $point";
		begin_events($node, publish(0, 't'));
		my @stopped = stop_at($node, $point, publish(1, 't'));
		$node->safe_psql('postgres', publish(2, 't'));
		my $again = $faults{$fault}->(@stopped, $point, publish(1, 't'), $published, $name);
		is_given('0 2', "$name: exactly the committed events are delivered");
		like($again->(publish(1, 't')), $published, "$name: the retry publishes");
		$node->safe_psql('postgres', publish(3, 't'));
		is_given('1 3', "$name: the retried event is delivered");
		is($node->safe_psql('postgres', 'SELECT count(*) = count(DISTINCT seq) FROM idempotency.outbox'), 't', "$name: no sequence number is repeated");
	}
}

# ----------------------------------------------------------------
# A worker
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{
	CREATE TABLE effect (place int8 GENERATED ALWAYS AS IDENTITY, n int);
	CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE sql AS $$INSERT INTO public.effect (n) SELECT (e.payload->>'n')::int$$;
	CREATE ROLE app LOGIN;
	SELECT idempotency.grant_consumer('app');
	GRANT ALL ON effect TO app});
# A cancel fails the event whose handler runs; elsewhere the worker rolls back, and tries again.
my %ends = (
	'a cancel' => sub { cancel($node, @_) },
	'kill -9 of the worker' => sub { kill9($node, $_[0]) },
	'kill -9 of the postmaster' => sub { restart_after_kill9($node) },
	'the end of the worker' => sub {
		my ($pid, $point) = @_;
		$node->safe_psql('postgres', "SELECT injection_points_detach('idempotency-$point'), pg_terminate_backend($pid)");
	},
	'nothing' => sub { wake($node, $_[1]) });
my $no_worker = q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'};

foreach my $point (qw(event-call event-check event-keep relay-commit))
{
	foreach my $end (sort keys %ends)
	{
		my $name = "the relay, $end at $point";
		$node->safe_psql('postgres', q{TRUNCATE effect;
			SELECT idempotency.subscribe('h', ARRAY['h'], 'handle(idempotency.event)', owner => 'app', retry_delay => '0')});
		$node->poll_query_until('postgres', $no_worker) or die 'workers do not exit';
		$node->safe_psql('postgres', "SELECT injection_points_attach('idempotency-$point', 'wait')");
		$node->safe_psql('postgres', join '', map { publish($_, 'h', 'A') } 1 .. 3);
		is_at($node, $point);
		my $pid = $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE wait_event = 'idempotency-$point'");

		$node->safe_psql('postgres', publish(4, 'h', 'A'));
		$ends{$end}->($pid, $point);
		ok($node->poll_query_until('postgres', 'SELECT count(*) >= 4 FROM effect'), "$name: the events are handled");
		$node->poll_query_until('postgres', $no_worker) or die 'workers do not exit';
		is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3 4', "$name: once each, in order");
		is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked; SELECT count(*) FROM idempotency.position WHERE subscription = 'h' AND batch IS NOT NULL;
				SELECT idempotency.unsubscribe('h')}), "0\n0\nt", "$name: nothing is left behind");
	}
}

# ----------------------------------------------------------------
# The commit, before it wakes consumers
# ----------------------------------------------------------------

my %late_faults = late_faults($node);

foreach my $fault (sort keys %late_faults)
{
	my $name = "$fault at commit-request";
	begin_events($node);
	my @stopped = stop_at($node, 'commit-request', publish(1, 't'));
	is_given('1', "$name: the event is visible already");
	my $again = $late_faults{$fault}->(@stopped, 'commit-request', publish(1, 't'), $published, $name);
	like($again->(publish(2, 't')), $published, "$name: the next event");
	is_given('2', "$name: it is delivered, and the first one is not again");
}

# ----------------------------------------------------------------
# The commit, before it wakes those that wait for a lease
# ----------------------------------------------------------------

my $key = q{idempotency.claim('s', 'k', lease => '1 hour')};
my $complete = q{SELECT idempotency.complete('s', 'k', '1', token => (SELECT max(token) FROM owner))};
my $lease = "DELETE FROM idempotency.key; TRUNCATE owner; INSERT INTO owner SELECT token FROM $key";
$node->safe_psql('postgres', 'CREATE TABLE owner (token int8)');

foreach my $fault (sort keys %late_faults)
{
	my $name = "the end of a lease, $fault at commit-wake";
	$node->safe_psql('postgres', $lease);
	my @stopped = stop_at($node, 'commit-wake', $complete);
	is(result_of($node, "SELECT outcome FROM $key"), 'replayed', "$name: other sessions see the outcome");
	my $again = $late_faults{$fault}->(@stopped, 'commit-wake', $complete, '1', $name);
	is($again->("SELECT outcome FROM $key"), 'replayed', "$name: the outcome stays");
}

# A session that waits for the end of a lease returns even without a wakeup.
$node->safe_psql('postgres', $lease);
my $sleeper = open_session($node);
$sleeper->query_until(qr/begun/, "\\echo begun\nSELECT outcome FROM idempotency.claim('s', 'k', lease => '1 hour', wait => '1 hour');\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'IdempotencyLease'})
  or die 'no session waits';
my ($owner) = stop_at($node, 'commit-wake', $complete);
is(answer_of($sleeper), 'replayed', 'a wait returns without a wakeup');
wake($node, 'commit-wake');
$_->quit foreach $owner, $sleeper;

$node->stop;
done_testing();
