# 034_injection_subscriptions.pl
#
# Stops subscribe(), unsubscribe(), redrive(), what becomes of failed events, the
# removal of events, and what is done after a commit between any two of their steps.
# There they are cancelled, or killed, alone and with the server, or others get between:
# nothing is left of what did not commit, and what did stays, though nobody was told;
# each subscription gets each of its events once, and none is removed before.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use InjectionTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Nobody reaps but us.
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
# What is changed beside the giving
# ----------------------------------------------------------------

# stored returns all that is stored of events, subscriptions and effects.
sub stored
{
	return $node->safe_psql('postgres', join ';', map { "SELECT r FROM $_ AS r ORDER BY r::text" }
		qw(idempotency.subscription idempotency.position idempotency.parked idempotency.outbox idempotency.reaper effect));
}

# are_given checks what each subscription gets, now that nothing is in the way, and
# that there are no others, nor anything of them.
sub are_given
{
	my ($given, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @names = sort keys %$given;

	is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT s, ' ') FROM (SELECT subscription FROM idempotency.subscription
		UNION ALL SELECT subscription FROM idempotency.position UNION ALL SELECT subscription FROM idempotency.parked) AS t(s)}), "@names", "$name: who is there");
	is_deeply(drained($node, 'postgres', 100, @names), $given, "$name: what is given then");
	is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency.parked WHERE dead_at IS NULL'), 0, "$name: and nothing is left of it");
	return;
}

# of_batch returns the SQL that calls a function for the batch that is out.
sub of_batch
{
	my ($call) = @_;
	return "SELECT idempotency.$call FROM idempotency.position WHERE subscription = 's'";
}

# nack returns the SQL that rejects the event with that "n", and answers whether it is
# a dead letter.
sub nack
{
	my ($n) = @_;
	return of_batch("nack('s', batch, (SELECT id FROM idempotency.outbox WHERE payload->>'n' = '$n'), 'no', '0') IS NULL");
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
	q{UPDATE idempotency.outbox SET published_at = now() - interval '1 hour' WHERE payload->>'n' = '1'});

my @batch = qw(batch-lock batch-read);
my @change = qw(subscribe-lock subscribe-look);
my @remove = qw(events-lock events-look events-remove events-save events-count);

# What is done, on top of what, at which points it is stopped, what the retry of it
# says, and what is given then, when the batch that is out has ended.
my %changes = (
	'a subscription' => [ $subscribe, \@events,
		[ @change, qw(subscribe-hold subscribe-note subscribe-start start-await start-snapshot start-scan subscribe-place subscribe-tell) ],
		't', { s => '1 2 3 4', new => '4' } ],
	'a subscription from the beginning' => [ $beginning, \@events, [qw(subscribe-place subscribe-tell)], 't', { s => '1 2 3 4', new => '1 2 3 4' } ],
	'a change of a subscription' => [ q{SELECT idempotency.subscribe('s', ARRAY['u'])}, \@events,
		[ @change, qw(subscribe-change subscribe-tell) ], 'f', { s => '' } ],
	'its end' => [ $unsubscribe, [ @out, nack(2) ],
		[qw(unsubscribe-lock unsubscribe-look unsubscribe-delete unsubscribe-position unsubscribe-parked unsubscribe-tell)], 't', {} ],
	'a redrive' => [ $redrive, \@dead, [qw(redrive-lock redrive-takeout parked-order redrive-tell)], '1', { s => '2 4' } ],
	'a batch given back' => [ $give_back, \@out, [ @batch, qw(parked-again parked-order batch-end batch-wake) ], 'f', { s => '1 2 3 4' } ],
	'a rejection in an aggregate' => [ nack(1), [ @family, $take ], [qw(parked-fail event-takeout parked-wait parked-hold event-write)], 'f', { s => '1x2 4 2 3' } ],
	'another rejection in it' => [ nack(2), [ @retried, $ack, $take ], [ @batch, qw(parked-fail event-takeout parked-hold event-write event-count) ], 'f', { s => '2x2 4 3' } ],
	'the last rejection' => [ nack(1), [ @mortal, nack(2), nack(3) ], [ @batch, qw(parked-fail event-takeout parked-letgo event-write event-count) ], 't', { s => '4' } ],
	'an acknowledgement in an aggregate' => [ $ack, \@retried, [ @batch, qw(parked-done parked-letgo batch-end batch-wake) ], '', { s => '2 3 4' } ],
	'the removal of events' => [ $reap, \@had, \@remove, '3', { s => '4' } ],
	'the removal of late ones' => [ $reap, \@late, [ qw(lag-lock lag-look lag-pass lag-count), @remove ], '1', { s => '2 3 4' } ],
	'the removal of those in a late batch' => [ $reap, [ @late, q{UPDATE idempotency.outbox SET published_at = now() - interval '1 hour'}, q{SELECT take('1 us')} ],
		[ qw(lag-lock lag-look lag-pass lag-count), @remove ], '3', { s => '4' } ]);

foreach my $change (sort keys %changes)
{
	my ($sql, $before, $points, $says, $given) = @{ $changes{$change} };
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %faults)
		{
			my $name = "$change, $fault at $point";
			begin_events($node, @$before);
			my $stored = stored();
			my $again = $faults{$fault}->(stop_at($node, $point, $sql), $point, $sql, $says, $name);
			is(stored(), $stored, "$name: nothing is left of it");
			is($again->($sql), $says, "$name: done once more");
			$node->safe_psql('postgres', "$ack AND batch IS NOT NULL;" . publish(4, 't'));
			are_given($given, $name);
		}
	}
}

# Who is stopped, on top of what, where; what others do meanwhile, and are told; what he
# is told when he goes on; and what is given then.
my $four = publish(4, 't') . 'SELECT 4';
my @meanwhile = (
	[ 'two subscribe', $subscribe, \@events, 'subscribe-lock', [ $subscribe, 't' ], 'f', { s => '1 2 3', new => '' } ],
	[ 'two subscribe, and one has to wait', $subscribe, \@events, 'subscribe-tell', [ "$patience$subscribe", '55P03' ], 't', { s => '1 2 3', new => '' } ],
	[ 'an event comes before a subscription begins', $subscribe, \@events, 'subscribe-start', [ $four, '4' ], 't', { s => '1 2 3 4', new => '' } ],
	(map { [ "an event comes to a subscription at $_", $subscribe, \@events, $_, [ $four, '4' ], 't', { s => '1 2 3 4', new => '4' } ] }
		qw(start-await start-snapshot start-scan subscribe-place subscribe-tell)),
	(map { [ "an old event is changed when a subscription is at $_", $subscribe, \@events, $_,
		[ "UPDATE idempotency.outbox SET payload = payload WHERE payload->>'n' = '2'", '' ], 't', { s => '1 2 3', new => '' } ] }
		qw(start-await start-snapshot start-scan subscribe-place)),
	[ 'events are removed before a subscription holds them', $beginning, \@had, 'subscribe-hold', [ $reap, '3' ], 't', { s => '', new => '' } ],
	(map { [ "events are to be removed from a subscription at $_", $beginning, \@had, $_, [ $reap, '0' ], 't', { s => '', new => '1 2 3' } ] }
		qw(subscribe-note subscribe-start subscribe-place subscribe-tell)),
	(map { [ "somebody is to subscribe, and the reaper is at $_", $reap, \@had, $_, [ "$patience$beginning", '55P03' ], '3', { s => '' } ] }
		qw(events-look events-remove events-save events-count)),
	[ 'somebody subscribes before the reaper has its lock', $reap, \@had, 'events-lock', [ $beginning, 't' ], '0', { s => '', new => '1 2 3' } ],
	[ 'two remove events', $reap, \@had, 'events-remove', [ "SET lock_timeout = '50ms'; $reap", '55P03' ], '3', { s => '' } ],
	[ 'an event comes when the reaper has looked', $reap, \@had, 'events-remove', [ $four, '4' ], '3', { s => '4' } ],
	[ 'an event is given when the reaper has looked', $reap, [ @had, publish(4, 't') ], 'events-remove', [ $take, '4' ], '3', { s => '' } ],
	[ 'a late consumer comes before the reaper has his lock', $reap, \@late, 'lag-lock', [ $take, '1 2 3' ], '0', { s => '' } ],
	[ 'a late consumer finds the reaper at it', $reap, \@late, 'lag-look', [ $take, 'nothing' ], '1', { s => '2 3' } ],
	[ 'two unsubscribe', $unsubscribe, \@out, 'unsubscribe-lock', [ $unsubscribe, 't' ], 'f', {} ],
	[ 'a consumer comes before the end of the subscription', $unsubscribe, \@events, 'unsubscribe-lock', [ $take, '1 2 3' ], 't', {} ],
	[ 'a consumer finds the end of the subscription', $unsubscribe, \@events, 'unsubscribe-position', [ $take, 'nothing' ], 't', {} ],
	[ 'the subscription ends before an acknowledgement', $ack, \@out, 'batch-lock', [ $unsubscribe, 't' ], '42704', {} ],
	[ 'the subscription is to end at an acknowledgement', $ack, \@out, 'batch-end', [ "$patience$unsubscribe", '55P03' ], '', { s => '' } ],
	[ 'two redrive', $redrive, \@dead, 'redrive-lock', [ $redrive, '1' ], '0', { s => '2' } ],
	[ 'a consumer finds a redrive at it', $redrive, \@dead, 'parked-order', [ "$four; $take", "4\nnothing" ], '1', { s => '2 4' } ],
	[ 'the subscription ends before a redrive', $redrive, \@dead, 'redrive-lock', [ $unsubscribe, 't' ], '0', {} ]);

foreach my $case (@meanwhile)
{
	my ($name, $sql, $before, $point, $meanwhile, $says, $given) = @$case;
	begin_events($node, @$before);
	is_overtaken($node, $name, $sql, $point, $meanwhile, $says);
	are_given($given, $name);
}

# An event was in flight, and is changed when a subscription knows how far to look: its
# new row lies behind that.
{
	my $name = 'an event that was in flight is changed';
	my @wide = map { "SELECT idempotency.publish('t', json_build_object('n', $_, 'wide', repeat('w', 1900)))" } 1 .. 4;
	my $publisher = open_session($node);

	$node->safe_psql('postgres', 'TRUNCATE idempotency.outbox');
	begin_events($node, @wide[ 0 .. 2 ]);
	$publisher->query_safe("BEGIN; $wide[3]");
	my ($session) = stop_at($node, 'start-scan', $subscribe);
	$publisher->query_safe('COMMIT');
	is( $node->safe_psql('postgres', q{UPDATE idempotency.outbox SET published_at = now() WHERE payload->>'n' = '4'
			RETURNING ctid >= '(1,0)'}), 't', "$name: its page was full");
	wake($node, 'start-scan');
	is(answer_of($session), 't', "$name: who was stopped");
	$_->quit foreach $publisher, $session;
	are_given({ s => '1 2 3 4', new => '4' }, $name);
}

# ----------------------------------------------------------------
# After the commit
# ----------------------------------------------------------------

# It is done when others are to be told of it.
my %after = late_faults($node);

# Who is stopped, on top of what, where; what others find meanwhile, though the locks
# are still held; what a retry says; and what is given then.
$node->safe_psql('postgres', 'CREATE TABLE owner (token int8)');
my $key = q{idempotency.claim('s', 'k', lease => '1 hour', wait => '0')};
my @leased = ("DELETE FROM idempotency.key; TRUNCATE owner; INSERT INTO owner SELECT token FROM $key");
my $complete = q{SELECT idempotency.complete('s', 'k', '1', token => (SELECT max(token) FROM owner))};
my @commits = (
	[ 'an event', publish(1, 't'), [], [qw(commit-wake commit-ring)], [ $take, '1' ], undef, { s => '4' } ],
	[ 'an acknowledgement', $acknowledge, \@out, ['commit-wake'], [ 'SELECT batch IS NULL FROM idempotency.position', 't' ], 'IK408', { s => '4' } ],
	[ 'a redrive', $redrive, \@dead, [qw(commit-wake commit-tell)], [ 'SELECT count(*) FROM idempotency.dead_letters', '0' ], '0', { s => '2 4' } ],
	[ 'a subscription', $subscribe, [], ['commit-tell'], [ 'SELECT count(*) FROM idempotency.position', '2' ], 'f', { s => '4', new => '4' } ],
	[ 'its end', $unsubscribe, \@out, ['commit-tell'], [ $take, '42704' ], 'f', {} ],
	[ 'the end of a lease', $complete, \@leased, ['commit-wake'], [ "SELECT outcome FROM $key", 'replayed' ], 'IK410', { s => '4' } ]);

foreach my $commit (@commits)
{
	my ($what, $sql, $before, $points, $meanwhile, $says, $given) = @$commit;
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %after)
		{
			my $name = "$what, $fault at $point";
			begin_events($node, @$before);
			my @stopped = stop_at($node, $point, $sql);
			is(says($node, $meanwhile->[0]), $meanwhile->[1], "$name: others find it done");
			my $stored = stored();
			my $again = $after{$fault}->(@stopped, $point, $sql, $says, $name);
			is(stored(), $stored, "$name: it stays done");
			my $retry = $again->(defined $says ? $sql : 'SELECT');
			is($retry, $says, "$name: a retry") if defined $says;
			$node->safe_psql('postgres', "$ack AND batch IS NOT NULL;" . publish(4, 't'));
			are_given($given, $name);
		}
	}
}

# Who sleeps until a lease has ended is answered though nobody wakes him.
begin_events($node, @leased);
my $sleeper = open_session($node);
$sleeper->query_until(qr/begun/, "\\echo begun\nSELECT outcome FROM idempotency.claim('s', 'k', lease => '1 hour', wait => '1 hour');\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'IdempotencyLease'})
  or die 'nobody sleeps';
my ($owner) = stop_at($node, 'commit-wake', $complete);
is(answer_of($sleeper), 'replayed', 'nobody waits for a wake-up that does not come');
wake($node, 'commit-wake');
$_->quit foreach $owner, $sleeper;

# ----------------------------------------------------------------
# The relay
# ----------------------------------------------------------------

# What the relay is not told of it finds: a handler's subscription, and its event, have
# committed, and whoever did it is stopped, or dies, before he tells.
my $handled = q{SELECT idempotency.subscribe('h', ARRAY['h'], 'handle(idempotency.event)', start_at => 'beginning', owner => 'app')};
my %untold = (
	'commit-tell' => [ $handled, publish(1, 'h', 'A') ],
	'commit-ring' => [ publish(1, 'h', 'A'), $handled ]);

foreach my $point (sort keys %untold)
{
	my ($sql, @before) = @{ $untold{$point} };
	foreach my $fault (sort keys %after)
	{
		my $name = "the relay is not told, $fault at $point";
		begin_events($node, @before);
		$after{$fault}->(stop_at($node, $point, $sql), $point, $sql, undef, $name)->('SELECT');
		ok($node->poll_query_until('postgres', 'SELECT count(*) >= 1 FROM effect'), "$name: the event is handled");
		is($node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('h'); SELECT count(*) FROM effect}), "t\n1", "$name: once");
	}
}

# ----------------------------------------------------------------
# The worker of the reaper
# ----------------------------------------------------------------

# It goes on where it is when it is told to end, so that it does not leave before its
# commit.
my %ends = (worker_faults($node), 'the end of the worker' => sub { interrupt($node, @_, 'terminate') });
my $reaped = q{SELECT coalesce(sum(rows_reaped), 0), coalesce(sum(events_reaped), 0) FROM idempotency.reaper};

# nap sets how often the reaper comes; '0' is never.
sub nap
{
	my ($naptime) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET idempotency.reaper_naptime = '$naptime'");
	$node->reload;
	return;
}

foreach my $point (qw(reap-lock reap-delete reap-save reap-forget lag-lock lag-look lag-pass lag-count), @remove)
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
		nap('100ms');
		is_at($node, $point);
		$ends{$end}->($node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE wait_event = 'idempotency-$point'"), $point);
		ok( $node->poll_query_until('postgres', 'SELECT (SELECT count(*) FROM idempotency.key) = 0 AND (SELECT count(*) FROM idempotency.outbox) = 1'),
			"$name: all goes but what somebody has not had");
		nap('0');
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'})
		  or die 'the worker stays';
		is($node->safe_psql('postgres', $reaped), join('|', $rows + 1, $events + 5), "$name: each is counted once");
		are_given({ s => '6', late => '' }, $name);
	}
}

$node->stop;
done_testing();
