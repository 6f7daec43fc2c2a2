# 031_injection_outbox.pl
#
# Stops publish(), fetch(), ack(), nack() and the relay between any two of their steps.
# There they are cancelled, or killed alone or with the server, or another session acts
# in between. Each committed event is delivered and has its effect once, an uncommitted
# one never. A session that is stopped inside publish() holds back no other event, and
# does not lose its own.

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
consumer_tools($node);
my %faults = faults($node);

$node->safe_psql('postgres', q{
	CREATE FUNCTION reject() RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idempotency.nack('s', (SELECT number FROM batch LIMIT 1), id, 'no', '0')
			FROM idempotency.outbox WHERE payload->>'n' = '2';
		RETURN 'rejected';
	END $$});

my $take = 'SELECT take()';
my $acknowledge = 'SELECT acknowledge()';
my $reject = 'SELECT reject()';
my $patience = q{SET idempotency.wait = '50ms'; };

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

# How many events the reaper deletes of two others, one published before and one while
# publish() is stopped at the point. Once publish() has drawn its sequence number, the
# reaper deletes no later event.
my %removed = ('publish-number' => 2, 'publish-insert' => 1, 'publish-index' => 1, 'publish-end' => 1);

my $published = qr/^\S{36}$/;

foreach my $point (sort keys %removed)
{
	foreach my $end (qw(COMMIT ROLLBACK))
	{
		my $name = "$point, $end";
		begin_events($node, publish(0, 't'));
		is_given('0', "$name: an earlier event is delivered");
		my ($session) = stop_at($node, $point, 'BEGIN;' . publish(1, 't') . $end);

		$node->safe_psql('postgres', publish(2, 't'));
		is_given('2', "$name: another event is delivered meanwhile");
		is(result_of($node, 'SELECT idempotency.reap()'), $removed{$point}, "$name: the reaper deletes events before the drawn number");
		is_given('', "$name: no other event is delivered");
		wake($node, $point);
		like(answer_of($session), $published, "$name: the event is published");
		$session->quit;
		$node->safe_psql('postgres', publish(3, 't'));
		is_given($end eq 'COMMIT' ? '1 3' : '3', "$name: the event is delivered if it was committed");
	}

	# subscribe() waits meanwhile, because the start of the subscription is not yet
	# known.
	begin_events($node);
	my ($session) = stop_at($node, $point, publish(1, 't'));
	is(result_of($node, qq{$patience SELECT idempotency.subscribe('new', ARRAY['t'])}), '55P03', "$point: subscribe waits meanwhile");
	wake($node, $point);
	like(answer_of($session), $published, "$point: the event is published then");
	$session->quit;
	$node->safe_psql('postgres', q{SELECT idempotency.subscribe('new', ARRAY['t'])});
	$node->safe_psql('postgres', publish(2, 't'));
	is_deeply(drained($node, 'postgres', 100, 's', 'new'), { s => '1 2', new => '2' }, "$point: a new subscription receives later events");
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
# A consumer is cancelled or killed
# ----------------------------------------------------------------

my @events = map { publish($_, 't') } 1 .. 3;
my @out = (@events, $take);

# For each step: its SQL, its preparation, the points where it is stopped, the result of
# the retry, and the events that are delivered then.
my %steps = (
	'a fetch' => [ $take, \@events, [qw(scan-row fetch-collect fetch-write fetch-end)], '1 2 3', '4' ],
	'an acknowledgement' => [ $acknowledge, \@out, [qw(batch-lock batch-read batch-end batch-wake)], 'acknowledged', '4' ],
	'a rejection' => [ $reject, \@out, [qw(batch-lock batch-read parked-fail event-parked event-write event-count)], 'rejected', '2x2 4' ],
	'an extension' => [
		q{SELECT idempotency.extend('s', number, '2 hours') > now() FROM batch}, \@out, [qw(batch-lock batch-read extend-write)], 't', '4' ]);

foreach my $step (sort keys %steps)
{
	my ($sql, $before, $points, $result, $given) = @{ $steps{$step} };
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %faults)
		{
			my $name = "$step, $fault at $point";
			begin_events($node, @$before);
			my $again = $faults{$fault}->(stop_at($node, $point, $sql), $point, $sql, $result, $name);
			is($node->safe_psql('postgres', 'SELECT count(*) FROM effect'), 0, "$name: nothing is left behind");
			is($again->($sql), $result, "$name: the retry");
			result_of($node, $acknowledge);
			is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3', "$name: one effect each");
			$node->safe_psql('postgres', publish(4, 't'));
			is_given($given, "$name: the events that are delivered then");
		}
	}
}

# ----------------------------------------------------------------
# Another consumer acts in between
# ----------------------------------------------------------------

# The stopped SQL, its preparation, the point; the SQL and result of the other session;
# the result of the stopped session; and the events that are delivered then.
my @over = (@events, q{SELECT take('1 us')});
my @pairs = (
	[ 'two fetch', $take, \@events, 'fetch-collect', [ $take, 'nothing' ], '1 2 3', '' ],
	[ 'two fetch, and one has a batch', $take, \@events, 'fetch-end', [ $take, 'nothing' ], '1 2 3', '' ],
	[ 'an event is published when the batch is complete', $take, \@events, 'fetch-write', [ publish(4, 't') . $take, 'nothing' ], '1 2 3', '4' ],
	[ 'a fetch finds an acknowledgement in progress', $acknowledge, \@out, 'batch-read', [ $take, 'nothing' ], 'acknowledged', '' ],
	[ 'a fetch finds an acknowledgement done', $acknowledge, \@out, 'batch-wake', [ $take, 'nothing' ], 'acknowledged', '' ],
	[ 'two acknowledge, and one has to wait', $acknowledge, \@out, 'batch-wake', [ "$patience$acknowledge", '55P03' ], 'acknowledged', '' ],
	[ 'two acknowledge, and one is late', $acknowledge, \@out, 'batch-lock', [ $acknowledge, 'acknowledged' ], 'IK408', '' ],
	[ 'the batch is redelivered before it is acknowledged', $acknowledge, \@over, 'batch-lock', [ $take, '1 2 3' ], 'IK408', 'again' ],
	[ 'the batch is acknowledged before one of its events is rejected', $reject, \@out, 'batch-lock', [ $acknowledge, 'acknowledged' ], 'IK408', '' ],
	[ 'one event of the batch is rejected before it is acknowledged', $acknowledge, \@out, 'batch-lock', [ $reject, 'rejected' ], 'acknowledged', '2x2' ],
	[ 'the batch is acknowledged while one of its events is being rejected', $reject, \@out, 'event-parked', [ "$patience$acknowledge", '55P03' ], 'rejected', '2x2' ]);

foreach my $pair (@pairs)
{
	my ($name, $sql, $before, $point, $meanwhile, $result, $given) = @$pair;
	begin_events($node, @$before);
	check_race($node, $name, $sql, $point, $meanwhile, $result);
	$node->safe_psql('postgres', 'DELETE FROM batch WHERE number <> (SELECT batch FROM idempotency.position)') if $given eq 'again';
	result_of($node, $acknowledge);
	is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3', "$name: one effect each");
	is_given($given eq 'again' ? '' : $given, "$name: the events that are delivered then");
}

# ----------------------------------------------------------------
# The relay
# ----------------------------------------------------------------

# A cancel fails the event whose handler runs; elsewhere the worker rolls the step back
# and retries. A committed step is counted before an interrupt is handled.
my %ends = worker_faults($node);
my %late_ends = late_worker_faults($node);

foreach my $point (
	qw(fetch-collect fetch-write fetch-end relay-handle event-call event-check event-keep
	relay-acknowledge batch-read batch-end batch-wake relay-commit relay-set))
{
	foreach my $end (sort keys %ends)
	{
		my $name = "the relay, $end at $point";
		$node->safe_psql('postgres', q{TRUNCATE effect;
			SELECT idempotency.subscribe('h', ARRAY['h'], 'handle(idempotency.event)', owner => 'app')});
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
		  or die 'workers do not exit';

		$node->safe_psql('postgres', "SELECT injection_points_attach('idempotency-$point', 'wait')");
		$node->safe_psql('postgres', join '', map { publish($_, 'h', 'A') } 1 .. 3);
		is_at($node, $point);
		my $pid = $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE wait_event = 'idempotency-$point'");

		$node->safe_psql('postgres', publish(4, 'h', 'A'));
		is(result_of($node, qq{$patience SELECT idempotency.unsubscribe('h')}), '55P03', "$name: unsubscribe waits")
		  if $point ne 'relay-set';
		($point eq 'relay-set' ? $late_ends{$end} : $ends{$end})->($pid, $point);
		ok($node->poll_query_until('postgres', 'SELECT count(*) >= 4 FROM effect'), "$name: the events are handled");
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
		  or die 'workers do not exit';
		is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3 4', "$name: once each, in order");
		is( $node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked; SELECT batch IS NULL FROM idempotency.position WHERE subscription = 'h';
				SELECT idempotency.unsubscribe('h')}), "0\nt\nt", "$name: nothing is left behind");
	}
}

$node->stop;
done_testing();
