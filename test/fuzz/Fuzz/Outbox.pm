# Fuzz::Outbox
#
# Compares delivery with a model: publishers with savepoints, prepared transactions and
# rollbacks, and a consumer of two subscriptions that acknowledges, nacks, returns, is late,
# redrives and rolls back. It uses nothing but public functions.
#
# The model knows, for each subscription, which events can be delivered, and with which
# attempt: committed ones that its topics match, that are not done and not dead. While a batch
# is out, no other one is. An event of an aggregate comes after all earlier ones, unless one
# of the two was a dead letter. At the end of a round each event is done or dead, and the
# outbox is empty.
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
	my %subscriptions = map { $_ => { name => $_, max => between(1, 3), batch => undef, held => [], late => [], states => {} } } sort keys %topics;

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

	$consumer->ok("SELECT idempotency.subscribe('$it->{name}', '{$topics{$it->{name}}}', max_attempts => $it->{max}, retry_delay => '0')");
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
	return $it->{states}{$name} //= { attempts => 0, dead => 0, was_dead => 0, done => 0 };
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
	die "attempt $attempt of $name, not @{[$state->{attempts} + 1]}\n" if $attempt != $state->{attempts} + 1;
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

# fetch fetches a batch, and checks its events: none while a batch is out; those of the batch
# that is out, under another number, if its lease has ended. Returns the number of events.
sub fetch
{
	my ($model, $it, $wait) = @_;
	my ($most, $lease, $out) = (pick(1, 2, 3, 5, 100), pick('1 microsecond', '1 hour', '1 hour'), $it->{batch});
	my @rows = split /\n/,
	  $model->{consumer}->tell("SELECT batch, payload #>> '{}', attempt, id FROM idempotency.fetch('$it->{name}', $most, '@{[$wait // 0]}', '$lease')");
	my %before;

	die "two batches of $it->{name} are out\n" if defined $out && !$it->{expired} && @rows;
	return 0 if defined $out && !$it->{expired};
	foreach (@rows)
	{
		my ($batch, $name, $attempt, $id) = split /\|/;

		note($model, "$it->{name} got $name (attempt $attempt)");
		check($model, $it, $name, $attempt, \%before);
		@{ $model->{events}{$name} }{qw(id)} = ($id);
		$before{$name} = 1;
		$it->{batch} = $batch;
	}
	my ($held, $again) = map { join ' ', sort @$_ } $it->{held}, [ keys %before ];
	die "redelivered were $again, not $held\n" if $held ne '' && $again ne $held;
	push @{ $it->{late} }, $out if defined $out;
	$it->{batch} = undef unless @rows;
	$it->{expired} = $lease ne '1 hour';
	$it->{held} = [ map { (split /\|/)[1] } @rows ];
	return scalar @rows;
}

# over ends the batch in the model.
sub over
{
	my ($it) = @_;

	push @{ $it->{late} }, $it->{batch};
	$it->{batch} = undef;
	$it->{held} = [];
	return;
}

sub ack
{
	my ($model, undef, $it) = @_;

	return unless defined $it->{batch};
	$model->{consumer}->ok("SELECT idempotency.ack('$it->{name}', $it->{batch})");
	note($model, "$it->{name} ack @{$it->{held}}");
	state($it, $_)->{done} = 1 foreach @{ $it->{held} };
	over($it);
	return;
}

# nack fails an event of the batch. The later events of its aggregate leave the batch with
# it. Sometimes that is rolled back.
sub nack
{
	my ($model, undef, $it) = @_;
	my @held = @{ $it->{held} } or return;
	my $at = chance(40) ? 0 : int rand @held;
	my $name = $held[$at];
	my ($event, $state) = ($model->{events}{$name}, state($it, $name));
	my $retry = pick('NULL', q{'0'}, q{'2 ms'});
	my $call = "SELECT idempotency.nack('$it->{name}', $it->{batch}, '$event->{id}', 'error', $retry) IS NULL";

	if (chance(15))
	{
		$model->{consumer}->ok('BEGIN', $call, 'ROLLBACK');
		note($model, "$it->{name} nack $name, rolled back");
		return;
	}
	my $dead = $model->{consumer}->tell($call) eq 't';
	$state->{attempts}++;
	note($model, "$it->{name} nack $name: " . ($dead ? 'dead' : 'again'));
	die "$name is dead: $dead, after $state->{attempts} of $it->{max} attempts\n" if $dead != ($state->{attempts} >= $it->{max});
	$state->{dead} = $state->{was_dead} = 1 if $dead;
	$it->{held} = [ map { $held[$_] } grep {
			$_ < $at || ($_ > $at && (!defined $event->{aggregate} || ($model->{events}{ $held[$_] }{aggregate} // '') ne $event->{aggregate}))
		} 0 .. $#held ];
	return;
}

sub give_back
{
	my ($model, undef, $it) = @_;

	return unless defined $it->{batch};
	$model->{consumer}->ok("SELECT idempotency.nack('$it->{name}', $it->{batch}, NULL)");
	note($model, "$it->{name} give back @{$it->{held}}");
	over($it);
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

	return unless defined $it->{batch};
	my $lease = pick('1 microsecond', '1 hour');
	$model->{consumer}->ok("SELECT idempotency.extend('$it->{name}', $it->{batch}, '$lease')");
	$it->{expired} = $lease ne '1 hour';
	return;
}

sub rolled_back
{
	my ($model, undef, $it) = @_;

	$model->{consumer}->ok('BEGIN', qq{SELECT * FROM idempotency.fetch('$it->{name}')}, 'ROLLBACK');
	return;
}

# redrive delivers all dead letters again, or one.
sub redrive
{
	my ($model, undef, $it) = @_;
	my @dead = grep { state($it, $_)->{dead} } sort keys %{ $it->{states} };

	@dead = (pick(@dead)) if @dead && chance(50);
	my $which = @dead == 1 ? ", '$model->{events}{$dead[0]}{id}'" : '';
	my $count = $model->{consumer}->tell("SELECT idempotency.redrive('$it->{name}'$which)");
	note($model, "$it->{name} redrive @dead");
	die "$count were redriven, not " . @dead . "\n" if $count != @dead;
	@{ state($it, $_) }{qw(dead attempts)} = (0, 0) foreach @dead;
	return;
}

# options changes the maximum number of attempts, which applies from the next failure on.
sub options
{
	my ($model, undef, $it) = @_;

	$it->{max} = between(1, 3);
	subscribe($model->{consumer}, $it);
	note($model, "$it->{name} max_attempts $it->{max}");
	return;
}

# ----------------------------------------------------------------
# A round
# ----------------------------------------------------------------

# Each function gets the model, a publisher and a subscription; those that are listed more
# often are called more often.
my @steps = (
	(\&publish) x 6, (sub { finish(@_[ 0, 1 ], 'COMMIT') }) x 3, sub { finish(@_[ 0, 1 ], 'ROLLBACK') }, \&savepoint,
	(sub { fetch(@_[ 0, 2 ]) }) x 10, (\&ack) x 3, (\&nack) x 10, (\&give_back) x 4, \&late, \&extend, \&rolled_back, (\&redrive) x 4, (\&options) x 3,
	sub { $_[0]{admin}->ok('SELECT idempotency.reap()') }, sub { $_[0]{admin}->ok('VACUUM idempotency.outbox') });

# drain commits open transactions, and fetches until no event is left.
sub drain
{
	my ($model) = @_;

	finish($model, $_, 'COMMIT') foreach @{ $model->{publishers} };
	foreach my $it (map { $model->{subscriptions}{$_} } sort keys %topics)
	{
		my @wanted = grep { $model->{events}{$_}{fate} eq 'committed' && wants($it, $model->{events}{$_}) } sort keys %{ $model->{events} };

		ack($model, undef, $it);
		for (my $empty = 0; $empty < 2;)
		{
			$empty = fetch($model, $it, '5 ms') ? 0 : $empty + 1;
			ack($model, undef, $it);
		}
		foreach my $name (@wanted)
		{
			die "$it->{name} never got $name\n" unless state($it, $name)->{done} || state($it, $name)->{dead};
		}
		my $dead = $model->{admin}->tell("SELECT string_agg(payload #>> '{}', ' ' ORDER BY payload #>> '{}' COLLATE \"C\") FROM idempotency.dead_letters WHERE subscription = '$it->{name}'");
		my $expected = join ' ', grep { state($it, $_)->{dead} } @wanted;
		die "dead letters are $dead, not $expected\n" if $dead ne $expected;
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

	$admin->ok('CREATE EXTENSION idempotency', "ALTER DATABASE $dbname SET idempotency.outbox_retention = 0", q{SET idempotency.outbox_retention = 0});
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
