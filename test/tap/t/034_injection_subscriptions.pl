# 034_injection_subscriptions.pl
#
# Stops subscribe(), unsubscribe(), redrive(), the parking of failed events, the
# deletion of events, and the work after a commit between any two of their steps. There
# they are cancelled, or killed alone or with the server, or another session acts in
# between. Uncommitted changes leave nothing behind; committed changes stay, although no
# process was notified. Each subscription receives each of its events once, and no event
# is deleted before.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use InjectionTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Only the test calls the reaper.
my $node = injection_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '0'
idempotency.outbox_retention = '0'
});
consumer_tools($node);
my %faults = faults($node);

my @events = map { publish($_, 't') } 1 .. 3;
my $take = 'SELECT take()';
my $acknowledge = 'SELECT acknowledge()';
my @out = (@events, $take);
my $patience = q{SET idempotency.wait = '50ms'; };

# ----------------------------------------------------------------
# Changes beside delivery
# ----------------------------------------------------------------

# stored returns all stored events, subscriptions and effects.
sub stored
{
	return $node->safe_psql('postgres', join ';', map { "SELECT r FROM $_ AS r ORDER BY r::text" }
		qw(idempotency.subscription idempotency.position idempotency.parked idempotency.outbox idempotency.reaper effect));
}

# are_given checks the events that each subscription receives after the fault, and that
# no other subscription has rows.
sub are_given
{
	my ($given, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @names = sort keys %$given;

	is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT s, ' ') FROM (SELECT subscription FROM idempotency.subscription
		UNION ALL SELECT subscription FROM idempotency.position UNION ALL SELECT subscription FROM idempotency.parked) AS t(s)}), "@names", "$name: the subscriptions");
	is_deeply(drained($node, 'postgres', 100, @names), $given, "$name: the events that are delivered then");
	is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.parked WHERE dead_at IS NULL'), 0, "$name: no parked event is left");
	return;
}

# of_batch returns the SQL that calls a function for the unacknowledged batch.
sub of_batch
{
	my ($call) = @_;
	return "SELECT idempotency.$call FROM idempotency.position WHERE subscription = 's'";
}

# nack returns the SQL that rejects the event with that "n", and returns whether it is a
# dead letter.
sub nack
{
	my ($n) = @_;
	return of_batch("nack('s', batch, (SELECT id FROM idempotency.outbox WHERE payload->>'n' = '$n'), 'no', '0') IS NULL");
}

# as_published_before returns the SQL that makes events an hour old, past the trigger that
# refuses to change them.
sub as_published_before
{
	my ($where) = @_;
	return "SET session_replication_role = replica; UPDATE idempotency.outbox SET published_at = now() - interval '1 hour' $where; RESET session_replication_role";
}

my $ack = of_batch("ack('s', batch)");
my $give_back = of_batch("nack('s', batch, NULL) IS NULL");
my $subscribe = q{SELECT idempotency.subscribe('new', ARRAY['t'])};
my $beginning = q{SELECT idempotency.subscribe('new', ARRAY['t'], start_at => 'beginning')};
my $unsubscribe = q{SELECT idempotency.unsubscribe('s')};
my $redrive = q{SELECT idempotency.redrive('s')};
my $reap = 'SELECT idempotency.reap()';
my @family = map { publish($_, 't', 'A') } 1 .. 3;
my @retried = (@family, $take, nack(1), $ack, $take);
my @mortal = (q{SELECT idempotency.subscribe('s', ARRAY['t'], max_attempts => 1)}, @family, $take);
my @dead = (@mortal, nack(2), $ack);
my @had = (@out, $ack);
my @late = (@events, q{SELECT idempotency.subscribe('s', ARRAY['t'], max_lag => '30 minutes')},
	as_published_before(q{WHERE payload->>'n' = '1'}));

my @batch = qw(batch-lock batch-read);
my @change = qw(subscribe-lock subscribe-look);
my @remove = qw(events-lock events-look events-remove events-save events-count);

# For each change: its SQL, its preparation, the points where it is stopped, the result
# of the retry, and the events that are delivered once the unacknowledged batch has
# ended.
my %changes = (
	'a subscription' => [ $subscribe, \@events,
		[ @change, qw(subscribe-keep subscribe-write subscribe-start start-await start-snapshot start-scan subscribe-position subscribe-notify) ],
		't', { s => '1 2 3 4', new => '4' } ],
	'a subscription from the beginning' => [ $beginning, \@events, [qw(subscribe-position subscribe-notify)], 't', { s => '1 2 3 4', new => '1 2 3 4' } ],
	'a change of a subscription' => [ q{SELECT idempotency.subscribe('s', ARRAY['u'])}, \@events,
		[ @change, qw(subscribe-write subscribe-notify) ], 'f', { s => '' } ],
	'its end' => [ $unsubscribe, [ @out, nack(2) ],
		[qw(unsubscribe-lock unsubscribe-look unsubscribe-delete unsubscribe-notify)], 't', {} ],
	'a redrive' => [ $redrive, \@dead, [qw(redrive-lock redrive-update parked-order redrive-notify)], '1', { s => '2 4' } ],
	'a batch given back' => [ $give_back, \@out, [ @batch, qw(parked-add parked-order batch-end batch-wake) ], 'f', { s => '1 2 3 4' } ],
	'a rejection in an aggregate' => [ nack(1), [ @family, $take ], [qw(parked-fail event-parked parked-add parked-hold event-write)], 'f', { s => '1x2 4 2 3' } ],
	'another rejection in it' => [ nack(2), [ @retried, $ack, $take ], [ @batch, qw(parked-fail event-parked parked-hold event-write event-count) ], 'f', { s => '2x2 4 3' } ],
	'the last rejection' => [ nack(1), [ @mortal, nack(2), nack(3) ], [ @batch, qw(parked-fail event-parked parked-release event-write event-count) ], 't', { s => '4' } ],
	'an acknowledgement in an aggregate' => [ $ack, \@retried, [ @batch, qw(parked-acknowledge parked-release batch-end batch-wake) ], '', { s => '2 3 4' } ],
	'the removal of events' => [ $reap, \@had, \@remove, '3', { s => '4' } ],
	'the removal of late ones' => [ $reap, \@late, [ qw(lag-lock lag-look lag-pass lag-count), @remove ], '1', { s => '2 3 4' } ],
	'the removal of those in a late batch' => [ $reap, [ @late, as_published_before(''), q{SELECT take('1 us')} ],
		[ qw(lag-lock lag-look lag-pass lag-count), @remove ], '3', { s => '4' } ]);

foreach my $change (sort keys %changes)
{
	my ($sql, $before, $points, $result, $given) = @{ $changes{$change} };
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %faults)
		{
			my $name = "$change, $fault at $point";
			begin_events($node, @$before);
			my $stored = stored();
			my $again = $faults{$fault}->(stop_at($node, $point, $sql), $point, $sql, $result, $name);
			is(stored(), $stored, "$name: nothing is left behind");
			is($again->($sql), $result, "$name: the retry");
			$node->safe_psql('postgres', "$ack AND batch IS NOT NULL;" . publish(4, 't'));
			are_given($given, $name);
		}
	}
}

# The stopped SQL, its preparation, the point; the SQL and result of the other session;
# the result of the stopped session; and the events that are delivered then.
my $four = publish(4, 't') . 'SELECT 4';
my @meanwhile = (
	[ 'two subscribe', $subscribe, \@events, 'subscribe-lock', [ $subscribe, 't' ], 'f', { s => '1 2 3', new => '' } ],
	[ 'two subscribe, and one has to wait', $subscribe, \@events, 'subscribe-notify', [ "$patience$subscribe", '55P03' ], 't', { s => '1 2 3', new => '' } ],
	[ 'an event is published before a subscription starts', $subscribe, \@events, 'subscribe-start', [ $four, '4' ], 't', { s => '1 2 3 4', new => '' } ],
	(map { [ "an event is published for a subscription at $_", $subscribe, \@events, $_, [ $four, '4' ], 't', { s => '1 2 3 4', new => '4' } ] }
		qw(start-await start-snapshot start-scan subscribe-position subscribe-notify)),
	[ 'events are deleted before a subscription retains them', $beginning, \@had, 'subscribe-keep', [ $reap, '3' ], 't', { s => '', new => '' } ],
	(map { [ "the reaper keeps events for a subscription at $_", $beginning, \@had, $_, [ $reap, '0' ], 't', { s => '', new => '1 2 3' } ] }
		qw(subscribe-write subscribe-start subscribe-position subscribe-notify)),
	(map { [ "subscribe waits for the reaper at $_", $reap, \@had, $_, [ "$patience$beginning", '55P03' ], '3', { s => '' } ] }
		qw(events-look events-remove events-save events-count)),
	[ 'a session subscribes before the reaper has its lock', $reap, \@had, 'events-lock', [ $beginning, 't' ], '0', { s => '', new => '1 2 3' } ],
	[ 'two reapers delete events', $reap, \@had, 'events-remove', [ "SET lock_timeout = '50ms'; $reap", '55P03' ], '3', { s => '' } ],
	[ 'an event is published after the reaper has read the positions', $reap, \@had, 'events-remove', [ $four, '4' ], '3', { s => '4' } ],
	[ 'an event is delivered after the reaper has read the positions', $reap, [ @had, publish(4, 't') ], 'events-remove', [ $take, '4' ], '3', { s => '' } ],
	[ 'a late consumer fetches before the reaper has its lock', $reap, \@late, 'lag-lock', [ $take, '1 2 3' ], '0', { s => '' } ],
	[ 'a late consumer finds the reaper in progress', $reap, \@late, 'lag-look', [ $take, 'nothing' ], '1', { s => '2 3' } ],
	[ 'two unsubscribe', $unsubscribe, \@out, 'unsubscribe-lock', [ $unsubscribe, 't' ], 'f', {} ],
	[ 'a consumer fetches before the subscription is deleted', $unsubscribe, \@events, 'unsubscribe-lock', [ $take, '1 2 3' ], 't', {} ],
	[ 'a consumer finds the deletion of the subscription in progress', $unsubscribe, \@events, 'unsubscribe-notify', [ $take, 'nothing' ], 't', {} ],
	[ 'the subscription is deleted before an acknowledgement', $ack, \@out, 'batch-lock', [ $unsubscribe, 't' ], '42704', {} ],
	[ 'unsubscribe waits for an acknowledgement', $ack, \@out, 'batch-end', [ "$patience$unsubscribe", '55P03' ], '', { s => '' } ],
	[ 'two redrive', $redrive, \@dead, 'redrive-lock', [ $redrive, '1' ], '0', { s => '2' } ],
	[ 'a consumer finds a redrive in progress', $redrive, \@dead, 'parked-order', [ "$four; $take", "4\nnothing" ], '1', { s => '2 4' } ],
	[ 'the subscription is deleted before a redrive', $redrive, \@dead, 'redrive-lock', [ $unsubscribe, 't' ], '0', {} ]);

foreach my $case (@meanwhile)
{
	my ($name, $sql, $before, $point, $meanwhile, $result, $given) = @$case;
	begin_events($node, @$before);
	check_race($node, $name, $sql, $point, $meanwhile, $result);
	are_given($given, $name);
}

# ----------------------------------------------------------------
# After the commit
# ----------------------------------------------------------------

# The change is committed before other processes are notified.
my %after = late_faults($node);

# The stopped SQL; what other sessions read meanwhile, although the locks are still
# held; the result of a retry; and the events that are delivered then.
$node->safe_psql('postgres', 'CREATE TABLE owner (token int8)');
my $key = q{idempotency.claim('s', 'k', lease => '1 hour', wait => '0')};
my @leased = ("DELETE FROM idempotency.key; TRUNCATE owner; INSERT INTO owner SELECT token FROM $key");
my $complete = q{SELECT idempotency.complete('s', 'k', '1', token => (SELECT max(token) FROM owner))};
my @commits = (
	[ 'an event', publish(1, 't'), [], [qw(commit-wake commit-request)], [ $take, '1' ], undef, { s => '4' } ],
	[ 'an acknowledgement', $acknowledge, \@out, ['commit-wake'], [ 'SELECT batch IS NULL FROM idempotency.position', 't' ], 'IK408', { s => '4' } ],
	[ 'a redrive', $redrive, \@dead, [qw(commit-wake commit-change)], [ 'SELECT count(*) FROM idempotency.dead_letters', '0' ], '0', { s => '2 4' } ],
	[ 'a subscription', $subscribe, [], ['commit-change'], [ 'SELECT count(*) FROM idempotency.position', '2' ], 'f', { s => '4', new => '4' } ],
	[ 'the deletion of a subscription', $unsubscribe, \@out, ['commit-change'], [ $take, '42704' ], 'f', {} ],
	[ 'the end of a lease', $complete, \@leased, ['commit-wake'], [ "SELECT outcome FROM $key", 'replayed' ], 'IK410', { s => '4' } ]);

foreach my $commit (@commits)
{
	my ($what, $sql, $before, $points, $meanwhile, $result, $given) = @$commit;
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %after)
		{
			my $name = "$what, $fault at $point";
			begin_events($node, @$before);
			my @stopped = stop_at($node, $point, $sql);
			is(result_of($node, $meanwhile->[0]), $meanwhile->[1], "$name: other sessions see the change");
			my $stored = stored();
			my $again = $after{$fault}->(@stopped, $point, $sql, $result, $name);
			is(stored(), $stored, "$name: the change stays");
			my $retry = $again->(defined $result ? $sql : 'SELECT');
			is($retry, $result, "$name: a retry") if defined $result;
			$node->safe_psql('postgres', "$ack AND batch IS NOT NULL;" . publish(4, 't'));
			are_given($given, $name);
		}
	}
}

# A session that waits for the end of a lease returns even without a wakeup.
begin_events($node, @leased);
my $sleeper = open_session($node);
$sleeper->query_until(qr/begun/, "\\echo begun\nSELECT outcome FROM idempotency.claim('s', 'k', lease => '1 hour', wait => '1 hour');\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'IdempotencyLease'})
  or die 'no session waits';
my ($owner) = stop_at($node, 'commit-wake', $complete);
is(answer_of($sleeper), 'replayed', 'a wait returns without a wakeup');
wake($node, 'commit-wake');
$_->quit foreach $owner, $sleeper;

# ----------------------------------------------------------------
# The relay
# ----------------------------------------------------------------

# The relay detects changes without notification: a subscription with a handler and its
# event are committed, and the committing session is stopped or killed before it
# notifies the launcher.
my $handled = q{SELECT idempotency.subscribe('h', ARRAY['h'], 'handle(idempotency.event)', start_at => 'beginning', owner => 'app')};
my %untold = (
	'commit-change' => [ $handled, publish(1, 'h', 'A') ],
	'commit-request' => [ publish(1, 'h', 'A'), $handled ]);

foreach my $point (sort keys %untold)
{
	my ($sql, @before) = @{ $untold{$point} };
	foreach my $fault (sort keys %after)
	{
		my $name = "the relay is not notified, $fault at $point";
		begin_events($node, @before);
		$after{$fault}->(stop_at($node, $point, $sql), $point, $sql, undef, $name)->('SELECT');
		ok($node->poll_query_until('postgres', 'SELECT count(*) >= 1 FROM effect'), "$name: the event is handled");
		is($node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('h'); SELECT count(*) FROM effect}), "t\n1", "$name: the event is handled once");
	}
}

# ----------------------------------------------------------------
# The worker of the reaper
# ----------------------------------------------------------------

my %ends = worker_faults($node);
my $reaped = q{SELECT coalesce(sum(rows_reaped), 0), coalesce(sum(events_reaped), 0) FROM idempotency.reaper};

# set_naptime sets the interval of the reaper; '0' disables it.
sub set_naptime
{
	my ($naptime) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET idempotency.reaper_naptime = '$naptime'");
	$node->reload;
	return;
}

foreach my $point (qw(reap-lock reap-delete reap-save reap-end lag-lock lag-look lag-pass lag-count), @remove)
{
	foreach my $end (sort keys %ends)
	{
		my $name = "the reaper, $end at $point";
		begin_events($node, @events, q{SELECT idempotency.subscribe('late', ARRAY['u'], max_lag => '0')}, publish(4, 'u'), publish(5, 'u'),
			q{SELECT FROM idempotency.fetch('late', 1, lease => '1 us')}, $take, $ack,
			q{DELETE FROM idempotency.key; SELECT idempotency.once('s', 'k'); UPDATE idempotency.key SET expires_at = now() - interval '1 hour'},
			publish(6, 't'));
		my ($rows, $events) = split /\|/, $node->safe_psql('postgres', $reaped);

		$node->safe_psql('postgres', "SELECT injection_points_attach('idempotency-$point', 'wait')");
		set_naptime('100ms');
		is_at($node, $point);
		$ends{$end}->($node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE wait_event = 'idempotency-$point'"), $point);
		ok( $node->poll_query_until('postgres', 'SELECT (SELECT count(*) FROM idempotency.key) = 0 AND (SELECT count(*) FROM idempotency.outbox) = 1'),
			"$name: all rows are deleted except events that a subscription needs");
		set_naptime('0');
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'})
		  or die 'the worker does not exit';
		is($node->safe_psql('postgres', $reaped), join('|', $rows + 1, $events + 5), "$name: each deletion is counted once");
		are_given({ s => '6', late => '' }, $name);
	}
}

$node->stop;
done_testing();
