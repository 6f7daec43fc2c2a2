# 031_injection_outbox.pl
#
# Stops publish(), fetch(), ack(), nack() and the relay between any two of their
# steps.  There they are cancelled, or killed, alone and with the server, or others get
# between: each event that was committed is given, and has its effect once; none that
# was not committed is; and who is stopped in the middle of publish() holds nobody
# else's event back, and does not lose his own.

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

# is_given checks what a consumer gets, now that nothing is in its way.
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

# How many events are removed that two others published, one before and one while it
# is stopped there.  Once it has its number, none that comes later is.
my %removed = ('publish-number' => 2, 'publish-insert' => 1, 'publish-index' => 1, 'publish-end' => 1);

my $published = qr/^\S{36}$/;

foreach my $point (sort keys %removed)
{
	foreach my $end (qw(COMMIT ROLLBACK))
	{
		my $name = "$point, $end";
		begin_events($node, publish(0, 't'));
		is_given('0', "$name: what was there");
		my ($session) = stop_at($node, $point, 'BEGIN;' . publish(1, 't') . $end);

		$node->safe_psql('postgres', publish(2, 't'));
		is_given('2', "$name: another event is given meanwhile");
		is(says($node, 'SELECT idempotency.reap()'), $removed{$point}, "$name: and is removed, if it comes after none");
		is_given('', "$name: nothing more is");
		wake($node, $point);
		like(answer_of($session), $published, "$name: it is published");
		$session->quit;
		$node->safe_psql('postgres', publish(3, 't'));
		is_given($end eq 'COMMIT' ? '1 3' : '3', "$name: it is given, if it was committed");
	}

	# A subscription cannot be made meanwhile: it would not know where it begins.
	begin_events($node);
	my ($session) = stop_at($node, $point, publish(1, 't'));
	is(says($node, qq{$patience SELECT idempotency.subscribe('new', ARRAY['t'])}), '55P03', "$point: nobody subscribes meanwhile");
	wake($node, $point);
	like(answer_of($session), $published, "$point: it is published then");
	$session->quit;
	$node->safe_psql('postgres', q{SELECT idempotency.subscribe('new', ARRAY['t'])});
	$node->safe_psql('postgres', publish(2, 't'));
	is_deeply(drained($node, 'postgres', 100, 's', 'new'), { s => '1 2', new => '2' }, "$point: who subscribes after it has what comes after it");
	$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('new')});

	foreach my $fault (sort keys %faults)
	{
		my $name = "$fault at $point";
		begin_events($node, publish(0, 't'));
		my @stopped = stop_at($node, $point, publish(1, 't'));
		$node->safe_psql('postgres', publish(2, 't'));
		my $again = $faults{$fault}->(@stopped, $point, publish(1, 't'), $published, $name);
		is_given('0 2', "$name: whatever was committed is given, and nothing else");
		like($again->(publish(1, 't')), $published, "$name: published once more");
		$node->safe_psql('postgres', publish(3, 't'));
		is_given('1 3', "$name: it is given then");
		is($node->safe_psql('postgres', 'SELECT count(*) = count(DISTINCT seq) FROM idempotency.outbox'), 't', "$name: no number came twice");
	}
}

# ----------------------------------------------------------------
# A consumer is cancelled, or killed
# ----------------------------------------------------------------

my @events = map { publish($_, 't') } 1 .. 3;
my @out = (@events, $take);

# What is done, on top of what, at which points it is stopped, what the retry of it
# says, and what is given then.
my %steps = (
	'a fetch' => [ $take, \@events, [qw(scan-row fetch-collect fetch-note fetch-give)], '1 2 3', '4' ],
	'an acknowledgement' => [ $acknowledge, \@out, [qw(batch-lock batch-read batch-end batch-wake)], 'acknowledged', '4' ],
	'a rejection' => [ $reject, \@out, [qw(batch-lock batch-read parked-fail event-takeout event-write event-count)], 'rejected', '2x2 4' ],
	'an extension' => [
		q{SELECT idempotency.extend('s', number, '2 hours') > now() FROM batch}, \@out, [qw(batch-lock batch-read extend-write)], 't', '4' ]);

foreach my $step (sort keys %steps)
{
	my ($sql, $before, $points, $says, $given) = @{ $steps{$step} };
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %faults)
		{
			my $name = "$step, $fault at $point";
			begin_events($node, @$before);
			my $again = $faults{$fault}->(stop_at($node, $point, $sql), $point, $sql, $says, $name);
			is($node->safe_psql('postgres', 'SELECT count(*) FROM effect'), 0, "$name: nothing is left of it");
			is($again->($sql), $says, "$name: done once more");
			says($node, $acknowledge);
			is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3', "$name: one effect each");
			$node->safe_psql('postgres', publish(4, 't'));
			is_given($given, "$name: what is given then");
		}
	}
}

# ----------------------------------------------------------------
# Another consumer gets between
# ----------------------------------------------------------------

# Who is stopped, on top of what, where; what others do meanwhile, and are told;
# what he is told when he goes on; and what is given then.
my @over = (@events, q{SELECT take('1 us')});
my @pairs = (
	[ 'two fetch', $take, \@events, 'fetch-collect', [ $take, 'nothing' ], '1 2 3', '' ],
	[ 'two fetch, and one has a batch', $take, \@events, 'fetch-give', [ $take, 'nothing' ], '1 2 3', '' ],
	[ 'an event comes when the batch is complete', $take, \@events, 'fetch-note', [ publish(4, 't') . $take, 'nothing' ], '1 2 3', '4' ],
	[ 'a fetch finds an acknowledgement at it', $acknowledge, \@out, 'batch-read', [ $take, 'nothing' ], 'acknowledged', '' ],
	[ 'a fetch finds an acknowledgement done', $acknowledge, \@out, 'batch-wake', [ $take, 'nothing' ], 'acknowledged', '' ],
	[ 'two acknowledge, and one has to wait', $acknowledge, \@out, 'batch-wake', [ "$patience$acknowledge", '55P03' ], 'acknowledged', '' ],
	[ 'two acknowledge, and one comes late', $acknowledge, \@out, 'batch-lock', [ $acknowledge, 'acknowledged' ], 'IK408', '' ],
	[ 'the batch is given again before it is acknowledged', $acknowledge, \@over, 'batch-lock', [ $take, '1 2 3' ], 'IK408', 'again' ],
	[ 'the batch is acknowledged before one of it is rejected', $reject, \@out, 'batch-lock', [ $acknowledge, 'acknowledged' ], 'IK408', '' ],
	[ 'one of the batch is rejected before it is acknowledged', $acknowledge, \@out, 'batch-lock', [ $reject, 'rejected' ], 'acknowledged', '2x2' ],
	[ 'the batch is to be acknowledged while one of it is rejected', $reject, \@out, 'event-takeout', [ "$patience$acknowledge", '55P03' ], 'rejected', '2x2' ]);

foreach my $pair (@pairs)
{
	my ($name, $sql, $before, $point, $meanwhile, $says, $given) = @$pair;
	begin_events($node, @$before);
	is_overtaken($node, $name, $sql, $point, $meanwhile, $says);
	$node->safe_psql('postgres', 'DELETE FROM batch WHERE number <> (SELECT batch FROM idempotency.position)') if $given eq 'again';
	says($node, $acknowledge);
	is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3', "$name: one effect each");
	is_given($given eq 'again' ? '' : $given, "$name: what is given then");
}

# An event was in flight, and is changed when a fetch has read the index: it sees the old
# row alone.  The other index has the new row get an entry of its own.
{
	my $name = 'an event that was in flight is changed';
	my $publisher = open_session($node);

	begin_events($node, publish(1, 't'), 'CREATE INDEX by_time ON idempotency.outbox (published_at)');
	$publisher->query_safe('BEGIN;' . publish(2, 't'));
	my ($session) = stop_at($node, 'scan-row', $take);
	$publisher->query_safe('COMMIT');
	$node->safe_psql('postgres', q{UPDATE idempotency.outbox SET published_at = published_at + '1 s' WHERE payload->>'n' = '2'});
	wake($node, 'scan-row');
	is(answer_of($session), '1', "$name: who was stopped");
	$_->quit foreach $publisher, $session;
	says($node, $acknowledge);
	is_given('2', "$name: it is given then");
	$node->safe_psql('postgres', 'DROP INDEX idempotency.by_time');
}

# ----------------------------------------------------------------
# The relay
# ----------------------------------------------------------------

# A cancel fails the event that it hits; elsewhere the worker takes the step back, and
# comes again.  What has committed is put out before it takes an interrupt.
my %ends = worker_faults($node);
my %late_ends = late_worker_faults($node);

foreach my $point (
	qw(fetch-collect fetch-note fetch-give relay-handle event-call event-check event-keep
	relay-acknowledge batch-read batch-end batch-wake relay-commit relay-putout))
{
	foreach my $end (sort keys %ends)
	{
		my $name = "the relay, $end at $point";
		$node->safe_psql('postgres', q{TRUNCATE effect;
			SELECT idempotency.subscribe('h', ARRAY['h'], 'handle(idempotency.event)', owner => 'app')});
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
		  or die 'workers stay';

		$node->safe_psql('postgres', "SELECT injection_points_attach('idempotency-$point', 'wait')");
		$node->safe_psql('postgres', join '', map { publish($_, 'h', 'A') } 1 .. 3);
		is_at($node, $point);
		my $pid = $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE wait_event = 'idempotency-$point'");

		$node->safe_psql('postgres', publish(4, 'h', 'A'));
		is(says($node, qq{$patience SELECT idempotency.unsubscribe('h')}), '55P03', "$name: nobody takes the subscription away")
		  if $point ne 'relay-putout';
		($point eq 'relay-putout' ? $late_ends{$end} : $ends{$end})->($pid, $point);
		ok($node->poll_query_until('postgres', 'SELECT count(*) >= 4 FROM effect'), "$name: the events are handled");
		$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
		  or die 'workers stay';
		is($node->safe_psql('postgres', q{SELECT string_agg(n::text, ' ' ORDER BY place) FROM effect}), '1 2 3 4', "$name: once each, in order");
		is( $node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked; SELECT batch IS NULL FROM idempotency.position WHERE subscription = 'h';
				SELECT idempotency.unsubscribe('h')}), "0\nt\nt", "$name: nothing is left");
	}
}

$node->stop;
done_testing();
