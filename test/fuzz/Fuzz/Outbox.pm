# Fuzz::Outbox
#
# Compares delivery with a model that predicts each call: publishers with savepoints, prepared
# transactions and rollbacks, and consumers of two subscriptions with partitions, one after the
# other, that acknowledge, nack, return, are late, redrive, discard, pause, change partitions and
# roll back. test/delivery.py has concurrent sessions.
#
# The model knows, for each subscription, which events can be delivered, and with which
# attempt: committed ones that its topics match, that are not done and not dead. A partition has
# one batch out. A batch whose lease ended, or that was returned, comes again as it was; after
# the second lease its events come one by one. An event of an aggregate comes after all earlier
# ones, unless one of the two was a dead letter. At the end of a round each event is done or
# dead.
#
# A new call is a function in @steps that calls it and changes the model.

package Fuzz::Outbox;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;
use Fuzz::Session;

my $publishers = 4;
my %topics = (all => '*', some => 'x.*');

# begin recreates the subscriptions, and returns an empty model.
sub begin
{
	my ($admin, $consumer, $sessions) = @_;
	my %subscriptions = map { $_ => { name => $_, max => between(1, 3), lists => {}, late => [], states => {} } } sort keys %topics;

	foreach my $it (map { $subscriptions{$_} } sort keys %subscriptions)
	{
		$consumer->ok("SELECT idempotency.unsubscribe('$it->{name}')");
		subscribe($consumer, $it);
	}
	return { admin => $admin, consumer => $consumer, publishers => [ map { { session => $_ } } @$sessions ],
		subscriptions => \%subscriptions, events => {}, order => {}, count => 0, log => [] };
}

sub subscribe
{
	my ($consumer, $it) = @_;

	$consumer->ok("SELECT idempotency.subscribe('$it->{name}', '{$topics{$it->{name}}}', max_attempts => $it->{max}, retry_delay => '0', partitions => @{[between(1, 3)]})");
	return;
}

sub note
{
	my ($model, @what) = @_;
	push @{ $model->{log} }, join ' ', @what;
	return;
}

# wants returns whether a subscription wants an event.
sub wants
{
	my ($it, $event) = @_;
	return $it->{name} eq 'all' || $event->{topic} =~ /^x/;
}

# state returns what has become of an event in a subscription.
sub state
{
	my ($it, $name) = @_;
	return $it->{states}{$name} //= { attempts => 0, dead => 0, was_dead => 0, done => 0, alone => 0 };
}

# ----------------------------------------------------------------
# Publishers
# ----------------------------------------------------------------

# add publishes events in the transaction of a publisher, which is begun if needed, and
# returns their names. The transactions of one aggregate run one after the other.
sub add
{
	my ($model, $publisher, $many) = @_;
	my $aggregate = pick('A', 'A', 'B', undef);
	my @names;

	$publisher->{session}->ok('BEGIN') unless $publisher->{open};
	$publisher->{open} //= [];
	return if defined $aggregate && $publisher->{session}->tell("SELECT pg_try_advisory_xact_lock(ascii('$aggregate'))") ne 't';
	foreach (1 .. $many)
	{
		my $name = 'e' . ++$model->{count};
		my $topic = pick('x.1', 'y.1');

		$publisher->{session}->ok("SELECT idempotency.publish('$topic', '\"$name\"', " . (defined $aggregate ? "'$aggregate'" : 'NULL') . ')');
		$model->{events}{$name} = { aggregate => $aggregate, topic => $topic, fate => 'not committed' };
		push @{ $model->{order}{$aggregate} }, $name if defined $aggregate;
		note($model, "publish $name", $aggregate // '', $topic);
		push @names, $name;
	}
	return @names;
}

sub publish
{
	my ($model, $publisher) = @_;
	my @names = add($model, $publisher, pick(1, 2, 5));

	push @{ $publisher->{open} }, @names;
	return;
}

sub savepoint
{
	my ($model, $publisher) = @_;

	return unless $publisher->{open};
	$publisher->{session}->ok('SAVEPOINT s');
	my @names = add($model, $publisher, between(1, 2));
	if (chance(60))
	{
		$publisher->{session}->ok('ROLLBACK TO s');
		$model->{events}{$_}{fate} = 'rolled back' foreach @names;
		note($model, "rolled back to a savepoint: @names");
		return;
	}
	$publisher->{session}->ok('RELEASE s');
	push @{ $publisher->{open} }, @names;
	return;
}

# finish ends a publisher's transaction, sometimes in two phases with deliveries in between.
sub finish
{
	my ($model, $publisher, $end) = @_;
	my @names = @{ $publisher->{open} // return };
	my $session = $publisher->{session};

	if (chance(20))
	{
		$session->ok(q{PREPARE TRANSACTION 'fuzz'});
		fetch($model, $model->{subscriptions}{$_}) foreach sort keys %topics;
		$session->ok("$end PREPARED 'fuzz'");
	}
	else
	{
		$session->ok($end);
	}
	$model->{events}{$_}{fate} = $end eq 'COMMIT' ? 'committed' : 'rolled back' foreach @names;
	$publisher->{open} = undef;
	note($model, "$end: @names");
	return;
}

# ----------------------------------------------------------------
# The consumer
# ----------------------------------------------------------------

# A list, by partition, is what a partition has read and not settled: "events", of which the
# first "size" are in the batch "batch" if that is out; "failures", how often its lease has ended;
# "alone", whether its events come one by one; and "expired", whether the lease has ended.

# lists returns the lists of a subscription; with a batch that is out, if "out".
sub lists
{
	my ($it, $out) = @_;
	return grep { !$out || defined $_->{batch} } map { $it->{lists}{$_} } sort keys %{ $it->{lists} };
}

# held returns the names of the events of a batch.
sub held
{
	my ($list) = @_;
	return @{ $list->{events} }[ 0 .. $list->{size} - 1 ];
}

# over ends a batch in the model; its list stays if it has events.
sub over
{
	my ($it, $list) = @_;

	push @{ $it->{late} }, $list->{batch};
	$list->{batch} = undef;
	delete $it->{lists}{ $list->{partition} } unless @{ $list->{events} };
	return;
}

# settle takes events out of a list.
sub settle
{
	my ($list, @names) = @_;
	my %gone = map { $_ => 1 } @names;

	$list->{size} -= grep { $gone{$_} } held($list);
	$list->{events} = [ grep { !$gone{$_} } @{ $list->{events} } ];
	return;
}

# fail counts a failure of an event. The later events of its aggregate leave the list with it.
# Returns whether it is dead.
sub fail
{
	my ($model, $it, $list, $name, $is_final, $was_alone) = @_;
	my $aggregate = $model->{events}{$name}{aggregate};
	my $state = state($it, $name);
	my ($at) = grep { $list->{events}[$_] eq $name } 0 .. $#{ $list->{events} };
	my @leaving = ($name, grep { defined $aggregate && ($model->{events}{$_}{aggregate} // '') eq $aggregate } @{ $list->{events} }[ $at + 1 .. $#{ $list->{events} } ]);

	state($it, $_)->{attempts} += $list->{failures} foreach @leaving;
	$state->{attempts}++;
	$state->{alone} = $was_alone;
	$state->{dead} = $state->{was_dead} = 1 if $is_final || $state->{attempts} >= $it->{max};
	settle($list, @leaving);
	return $state->{dead};
}

# expire applies that the lease of a batch ended without ack or nack.
sub expire
{
	my ($model, $it, $list) = @_;

	if ($list->{size} > 0 && $list->{alone})
	{
		my ($name) = held($list);
		note($model, "$it->{name} lost $name, alone: " . (fail($model, $it, $list, $name, 0, 1) ? 'dead' : 'again'));
	}
	elsif ($list->{size} > 0)
	{
		$list->{failures}++;
		$list->{alone} = $list->{failures} >= 2;
		note($model, "$it->{name} lost @{[held($list)]}");
	}
	over($it, $list);
	return;
}

# check dies unless an event can be delivered now, in a batch after the events in %$before.
sub check
{
	my ($model, $it, $name, $attempt, $before) = @_;
	my $event = $model->{events}{$name};
	my $state = state($it, $name);

	die "$name was $event->{fate}\n" if $event->{fate} ne 'committed';
	die "$it->{name} does not want $name\n" unless wants($it, $event);
	die "$name is a dead letter\n" if $state->{dead};
	die "$name was acknowledged\n" if $state->{done};
	die "$name is twice in a batch\n" if $before->{$name};
	die "attempt $attempt of $name\n" if $attempt;
	return if $state->{was_dead} || !defined $event->{aggregate};
	foreach my $earlier (@{ $model->{order}{ $event->{aggregate} } })
	{
		my $other = $model->{events}{$earlier};

		last if $earlier eq $name;
		next if $other->{fate} ne 'committed' || !wants($it, $other) || $before->{$earlier};
		die "$name came before $earlier of the same aggregate\n" unless state($it, $earlier)->{done} || state($it, $earlier)->{was_dead};
	}
	return;
}

# fetch fetches a batch, and checks its events: none of a partition whose batch is out and has events;
# those of the list that the partition has. Returns the number of events.
sub fetch
{
	my ($model, $it, $wait) = @_;
	my ($most, $lease) = (pick(1, 2, 3, 5, 100), pick('1 microsecond', '1 hour', '1 hour'));
	my @rows = map { [ split /\|/ ] } split /\n/,
	  $model->{consumer}->tell("SELECT batch & 1023, batch, payload #>> '{}', attempt, id, seq FROM idempotency.fetch('$it->{name}', $most, '@{[$wait // 0]}', '$lease')");
	my %batch = map { split /\|/ } split /\n/, $model->{admin}->tell("SELECT partition, coalesce(batch, 0) FROM idempotency.position WHERE subscription = '$it->{name}'");
	my %before;

	die "$it->{name} is paused\n" if @rows && $it->{paused};
	foreach my $list (grep { ($_->{expired} || !$_->{size}) && $_->{batch} != ($batch{ $_->{partition} } // 0) } lists($it, 1))
	{
		expire($model, $it, $list);
	}
	if (!@rows)
	{
		my @there = grep { @{ $_->{events} } && (!defined $_->{batch} || $_->{expired} || !$_->{size}) } lists($it);
		die "$it->{name} did not get @{$there[0]{events}}\n" if @there && !$it->{paused};
		return 0;
	}
	my ($partition, $number) = @{ $rows[0] };
	my @names = map { $_->[2] } @rows;
	my $list = $it->{lists}{$partition};
	die "two batches of a partition of $it->{name} are out\n" if $list && defined $list->{batch};
	if (!$list)
	{
		my $alone = (grep { state($it, $_)->{alone} } @names) > 0;
		die "@names came with one that comes alone\n" if $alone && @names > 1;
		$list = $it->{lists}{$partition} = { partition => $partition, events => [@names], failures => 0, alone => $alone };
	}
	$list->{size} = $list->{alone} ? 1 : @{ $list->{events} };
	@{$list}{qw(batch expired)} = ($number, $lease ne '1 hour');
	my $held = join ' ', $list->{alone} ? held($list) : sort(held($list));
	my $again = join ' ', $list->{alone} ? @names : sort @names;
	die "redelivered were $again, not $held\n" if $again ne $held;
	foreach (@rows)
	{
		my (undef, undef, $name, $attempt, $id, $seq) = @$_;

		note($model, "$it->{name} got $name (attempt $attempt) in partition $partition");
		check($model, $it, $name, $attempt != state($it, $name)->{attempts} + $list->{failures} + 1 && $attempt, \%before);
		@{ $model->{events}{$name} }{qw(id seq)} = ($id, $seq);
		$before{$name} = 1;
	}
	return scalar @rows;
}

# ack acknowledges a batch, or a part of it.
sub ack
{
	my ($model, undef, $it) = @_;
	my $list = pick(lists($it, 1)) // return;
	my @names = held($list);
	my $part = @names && chance(20);

	@names = grep { chance(50) } @names if $part;
	my $seqs = $part ? ", ARRAY[@{[join ', ', map { $model->{events}{$_}{seq} } @names]}]::bigint[]" : '';
	my $count = $model->{consumer}->tell("SELECT idempotency.ack('$it->{name}', $list->{batch}$seqs)");
	note($model, "$it->{name} ack @names");
	die "acknowledged were $count\n" if $count != @names;
	state($it, $_)->{done} = 1 foreach @names;
	settle($list, @names);
	over($it, $list) unless $part;
	return;
}

# nack fails an event of the batch. Sometimes that is rolled back.
sub nack
{
	my ($model, undef, $it) = @_;
	my $list = pick(lists($it, 1)) // return;
	my @held = held($list) or return;
	my $name = $held[ chance(40) ? 0 : int rand @held ];
	my $retry = pick('NULL', q{'0'}, q{'2 ms'});
	my $final = chance(10);
	my $call = "SELECT idempotency.nack('$it->{name}', $list->{batch}, '$model->{events}{$name}{id}', 'error', $retry, @{[$final ? 'true' : 'false']}) IS NULL";

	if (chance(15))
	{
		$model->{consumer}->ok('BEGIN', $call, 'ROLLBACK');
		note($model, "$it->{name} nack $name, rolled back");
		return;
	}
	my $dead = $model->{consumer}->tell($call) eq 't';
	note($model, "$it->{name} nack $name: " . ($dead ? 'dead' : 'again'));
	my $expected = fail($model, $it, $list, $name, $final, 0);
	die "$name is dead: $dead, after @{[state($it, $name)->{attempts}]} of $it->{max} attempts\n" if $dead != $expected;
	return;
}

sub give_back
{
	my ($model, undef, $it) = @_;
	my $list = pick(lists($it, 1)) // return;

	$model->{consumer}->ok("SELECT idempotency.nack('$it->{name}', $list->{batch}, NULL)");
	note($model, "$it->{name} give back @{[held($list)]}");
	over($it, $list);
	return;
}

# late acknowledges a batch that is not the current one.
sub late
{
	my ($model, undef, $it) = @_;
	my @late = @{ $it->{late} } or return;
	my ($state) = $model->{consumer}->run("SELECT idempotency.ack('$it->{name}', @{[pick(@late)]})");

	die "$state for a batch that is not current\n" if $state ne 'IK408';
	return;
}

sub extend
{
	my ($model, undef, $it) = @_;

	my $list = pick(lists($it, 1)) // return;
	my $lease = pick('1 microsecond', '1 hour');
	$model->{consumer}->ok("SELECT idempotency.extend('$it->{name}', $list->{batch}, '$lease')");
	$list->{expired} = $lease ne '1 hour';
	return;
}

sub rolled_back
{
	my ($model, undef, $it) = @_;

	$model->{consumer}->ok('BEGIN', qq{SELECT * FROM idempotency.fetch('$it->{name}')}, 'ROLLBACK');
	return;
}

# redrive delivers all dead letters again, or one, and now what waits for its next attempt; or it discards them.
sub redrive
{
	my ($model, undef, $it) = @_;
	my $what = chance(20) ? 'discard' : 'redrive';
	my @dead = grep { state($it, $_)->{dead} } sort keys %{ $it->{states} };

	@dead = (pick(@dead)) if @dead && chance(50);
	my $which = @dead == 1 ? ", '$model->{events}{$dead[0]}{id}'" : '';
	my $waiting = $what eq 'discard' ? 0 : $model->{consumer}->tell("SELECT count(*) FROM idempotency.parked
		WHERE subscription = '$it->{name}' AND retry_at > clock_timestamp() AND first_failed_at IS NOT NULL");
	my $count = $model->{consumer}->tell("SELECT idempotency.$what('$it->{name}'$which)");
	note($model, "$it->{name} $what @dead");
	die "$count were found by $what, not " . @dead . "\n" if $count < @dead || $count > @dead + $waiting;
	@{ state($it, $_) }{qw(dead attempts alone done)} = (0, 0, 0, $what eq 'discard') foreach @dead;
	return;
}

# options changes the maximum number of attempts, which applies from the next failure on, and the
# number of partitions.
sub options
{
	my ($model, undef, $it) = @_;

	$it->{max} = between(1, 3);
	subscribe($model->{consumer}, $it);
	note($model, "$it->{name} max_attempts $it->{max}");
	return;
}

sub pause
{
	my ($model, undef, $it) = @_;

	$it->{paused} = chance(30);
	my $call = $it->{paused} ? 'pause' : 'resume';
	$model->{consumer}->ok("SELECT idempotency.$call('$it->{name}')");
	note($model, "$it->{name} $call");
	return;
}

# ----------------------------------------------------------------
# A round
# ----------------------------------------------------------------

# Each function gets the model, a publisher and a subscription; those that are listed more
# often are called more often.
my @steps = (
	(\&publish) x 6, (sub { finish(@_[ 0, 1 ], 'COMMIT') }) x 3, sub { finish(@_[ 0, 1 ], 'ROLLBACK') }, \&savepoint,
	(sub { fetch(@_[ 0, 2 ]) }) x 10, (\&ack) x 3, (\&nack) x 10, (\&give_back) x 4, \&late, \&extend, \&rolled_back, (\&redrive) x 4, (\&options) x 3, (\&pause) x 2,
	sub { $_[0]{admin}->ok('SELECT idempotency.reap()') }, sub { $_[0]{admin}->ok('VACUUM idempotency.outbox') });

# drain commits open transactions, and fetches until no event is left.
sub drain
{
	my ($model) = @_;

	finish($model, $_, 'COMMIT') foreach @{ $model->{publishers} };
	foreach my $it (map { $model->{subscriptions}{$_} } sort keys %topics)
	{
		my @wanted = grep { $model->{events}{$_}{fate} eq 'committed' && wants($it, $model->{events}{$_}) } sort keys %{ $model->{events} };

		$model->{consumer}->ok("SELECT idempotency.resume('$it->{name}')");
		$it->{paused} = 0;
		for (my $empty = 0; $empty < 2;)
		{
			ack($model, undef, $it) while lists($it, 1);
			$empty = fetch($model, $it, '5 ms') ? 0 : $empty + 1;
		}
		foreach my $name (@wanted)
		{
			die "$it->{name} never got $name\n" unless state($it, $name)->{done} || state($it, $name)->{dead};
		}
		my $dead = $model->{admin}->tell("SELECT string_agg(payload #>> '{}', ' ' ORDER BY payload #>> '{}' COLLATE \"C\") FROM idempotency.dead_letters WHERE subscription = '$it->{name}'");
		my $expected = join ' ', grep { state($it, $_)->{dead} } @wanted;
		die "dead letters are $dead, not $expected\n" if $dead ne $expected;
		# a partition without events can be 1,000 numbers behind
		$model->{consumer}->ok("SELECT idempotency.seek('$it->{name}', 'now')");
	}
	$model->{admin}->ok('SELECT idempotency.reap()');
	my $left = $model->{admin}->tell('SELECT count(*) FROM idempotency.outbox');
	die "$left events remain in the outbox\n" if $left;
	return;
}

# play plays that many rounds, and returns a summary line. Dies with the error and the
# preceding steps.
sub play
{
	my ($admin, $rounds, $steps) = @_;
	my $dbname = $admin->{dbname};
	my ($published, $done, $dead) = (0, 0, 0);

	if (($ENV{EDITION} // '') eq 'portable')
	{
		system('psql', '-XqAt', '-v', 'ON_ERROR_STOP=1', '-d', $dbname, '-f', 'portable/idempotency.sql') == 0 or die "portable/idempotency.sql failed\n";
	}
	else
	{
		$admin->ok('CREATE EXTENSION idempotency');
	}
	$admin->ok("ALTER DATABASE $dbname SET idempotency.outbox_retention = 0", q{SET idempotency.outbox_retention = 0});
	my ($consumer, @sessions) = map { Fuzz::Session->new($dbname) } 0 .. $publishers;
	foreach my $round (1 .. $rounds)
	{
		my $model = begin($admin, $consumer, \@sessions);
		eval {
			pick(@steps)->($model, pick(@{ $model->{publishers} }), $model->{subscriptions}{ pick(sort keys %topics) }) foreach 1 .. $steps;
			drain($model);
			1;
		} or die join "\n\t", "round $round: $@after:", @{ $model->{log} }, '';
		my @states = map { values %{ $_->{states} } } values %{ $model->{subscriptions} };
		$published += $model->{count};
		$done += grep { $_->{done} } @states;
		$dead += grep { $_->{was_dead} } @states;
	}
	$_->quit foreach $admin, $consumer, @sessions;
	return "$rounds rounds of $steps steps, $published events published, $done deliveries acknowledged, $dead once dead";
}

1;
