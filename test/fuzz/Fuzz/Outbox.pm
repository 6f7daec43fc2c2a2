# Fuzz::Outbox
#
# Compares the outbox with a model: four publishers with savepoints, prepared
# transactions and rollbacks, and a consumer that acknowledges, nacks, returns, is late
# and rolls back. The model knows which events can and must be delivered: each committed
# event once, unless it is a dead letter; no rolled-back event; the right attempt; and
# the events of an aggregate in order.

package Fuzz::Outbox;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;
use Fuzz::Session;

my $publishers = 4;
my $max_attempts = 3;

# begin empties the outbox, recreates the subscription, and returns an empty model.
sub begin
{
	my ($admin, $consumer, $sessions) = @_;

	$admin->ok('TRUNCATE idempotency.outbox, idempotency.position, idempotency.parked, idempotency.subscription');
	$consumer->ok("SELECT idempotency.subscribe('s', '{*}', max_attempts => $max_attempts)");
	return { admin => $admin, consumer => $consumer, publishers => [ map { { session => $_ } } @$sessions ],
		events => {}, held => [], batch => undef, count => 0, log => [] };
}

sub note
{
	my ($model, @what) = @_;
	push @{ $model->{log} }, join ' ', @what;
	return;
}

# ----------------------------------------------------------------
# Publishers
# ----------------------------------------------------------------

# add publishes an event in the transaction of a publisher, and begins that if needed.
sub add
{
	my ($model, $publisher, $aggregate) = @_;
	my $name = 'e' . ++$model->{count};
	my $about = defined $aggregate ? "'$aggregate'" : 'NULL';

	$publisher->{session}->ok("SELECT idempotency.publish('t', '\"$name\"', $about)");
	$model->{events}{$name} = { aggregate => $aggregate, attempts => 0 };
	note($model, "publish $name", $aggregate // '');
	return $name;
}

sub publish
{
	my ($model, $publisher) = @_;
	my $aggregate = pick('A', 'B', 'C', undef);

	$publisher->{session}->ok('BEGIN') unless $publisher->{open};
	$publisher->{open} //= [];

	# Transactions of one aggregate run one after the other.
	return if defined $aggregate && $publisher->{session}->tell("SELECT pg_try_advisory_xact_lock(ascii('$aggregate'))") ne 't';
	push @{ $publisher->{open} }, add($model, $publisher, $aggregate);
	return;
}

sub savepoint
{
	my ($model, $publisher) = @_;

	return unless $publisher->{open};
	$publisher->{session}->ok('SAVEPOINT s');
	my @names = map { add($model, $publisher) } 1 .. between(1, 2);
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

# finish ends a publisher's transaction, sometimes in two phases with a check in
# between.
sub finish
{
	my ($model, $publisher, $end) = @_;
	my @names = @{ $publisher->{open} // return };
	my $session = $publisher->{session};

	if (chance(20))
	{
		$session->ok(q{PREPARE TRANSACTION 'fuzz'});
		fetch($model) unless defined $model->{batch};
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

# fetch fetches a batch, and checks that each of its events is allowed now. Returns the
# number of events.
sub fetch
{
	my ($model) = @_;
	my $most = pick(1, 2, 3, 5, 100);
	my @rows = split /\n/, $model->{consumer}->tell("SELECT batch, seq, payload #>> '{}', attempt FROM idempotency.fetch('s', $most)");

	foreach (@rows)
	{
		my ($batch, $seq, $name, $attempt) = split /\|/;
		my $event = $model->{events}{$name};
		my $expected = $event->{attempts} + 1;

		note($model, "got $_");
		$model->{batch} = $batch;
		$event->{seq} = $seq;
		die "$name was " . ($event->{fate} // 'not committed') . "\n" if ($event->{fate} // '') ne 'committed';
		die "$name is a dead letter\n" if $event->{dead};
		die "$name was acknowledged\n" if $event->{done};
		die "attempt $attempt of $name, not $expected\n" if $attempt != $expected;
	}
	$model->{held} = [ map { (split /\|/)[2] } @rows ] if @rows;
	return scalar @rows;
}

sub ack
{
	my ($model) = @_;

	return unless defined $model->{batch};
	$model->{consumer}->ok("SELECT idempotency.ack('s', $model->{batch})");
	note($model, "ack @{$model->{held}}");
	foreach my $name (@{ $model->{held} })
	{
		my $event = $model->{events}{$name};
		my @later = grep { $_->{done} && $_->{seq} > $event->{seq} && ($_->{aggregate} // '') eq ($event->{aggregate} // '-') && !$_->{was_dead} } values %{ $model->{events} };

		die "$name was acknowledged twice\n" if $event->{done};
		die "$name came after a later one of its aggregate\n" if @later && !$event->{was_dead};
		$event->{done} = 1;
	}
	$model->{batch} = undef;
	$model->{held} = [];
	return;
}

# nack fails an event of the batch; the later events of the same aggregate leave the
# batch with it.
sub nack
{
	my ($model) = @_;
	my @held = @{ $model->{held} };

	return unless @held && defined $model->{batch};
	my $at = int rand @held;
	my $name = $held[$at];
	my $event = $model->{events}{$name};
	my $dead = $model->{consumer}->tell("SELECT idempotency.nack('s', $model->{batch}, id, 'error', '0') IS NULL FROM idempotency.outbox
		WHERE payload #>> '{}' = '$name'");

	$event->{attempts}++;
	note($model, "nack $name: " . ($dead eq 't' ? 'dead' : 'again'));
	die "$name is dead: $dead, after $event->{attempts} attempts\n" if ($dead eq 't') != ($event->{attempts} >= $max_attempts);
	$event->{dead} = $event->{was_dead} = 1 if $dead eq 't';
	$model->{held} = [ map { $held[$_] } grep {
			my $other = $model->{events}{ $held[$_] };
			$_ != $at && !($dead ne 't' && $_ > $at && defined $event->{aggregate} && ($other->{aggregate} // '') eq $event->{aggregate})
		} 0 .. $#held ];
	return;
}

sub give_back
{
	my ($model) = @_;

	return unless defined $model->{batch};
	$model->{consumer}->ok("SELECT idempotency.nack('s', $model->{batch}, NULL)");
	note($model, "give back @{$model->{held}}");
	$model->{batch} = undef;
	$model->{held} = [];
	return;
}

# expire lets the lease of the batch expire: the same events are redelivered under
# another number, and the former number is refused.
sub expire
{
	my ($model) = @_;
	my $old = $model->{batch} // return;
	my $held = join ' ', sort @{ $model->{held} };

	$model->{admin}->ok(q{UPDATE idempotency.position SET leased_at = now() - interval '2 h', leased_until = now() - interval '1 h'});
	note($model, "expired: $held");
	$model->{batch} = undef;
	$model->{held} = [];
	my $came = fetch($model);
	return if $held eq '';
	my $again = join ' ', sort @{ $model->{held} };
	die "given again were $again, not $held\n" if !$came || $again ne $held;
	my ($state) = $model->{consumer}->run("SELECT idempotency.ack('s', $old)");
	die "$state for a batch that is not current\n" if $state ne 'IK408';
	return;
}

sub rolled_back
{
	my ($model) = @_;

	$model->{consumer}->ok('BEGIN', q{SELECT * FROM idempotency.fetch('s')}, 'ROLLBACK') unless defined $model->{batch};
	return;
}

sub second
{
	my ($model) = @_;

	return fetch($model) unless defined $model->{batch};
	die "two batches are out\n" if $model->{consumer}->tell(q{SELECT count(*) FROM idempotency.fetch('s')}) ne '0';
	return;
}

sub redrive
{
	my ($model) = @_;
	my @dead = grep { $_->{dead} } values %{ $model->{events} };
	my $count = $model->{admin}->tell(q{SELECT idempotency.redrive('s')});

	note($model, "redrive: $count");
	die "$count were redriven, not " . @dead . "\n" if $count != @dead;
	@$_{qw(dead attempts)} = (0, 0) foreach @dead;
	return;
}

# ----------------------------------------------------------------
# A round
# ----------------------------------------------------------------

my @steps = ((sub { publish($_[0], $_[1]) }) x 8, (sub { finish(@_, 'COMMIT') }) x 3, sub { finish(@_, 'ROLLBACK') }, \&savepoint, (\&second) x 6, (\&ack) x 5, (\&nack) x 8,
	\&give_back, \&expire, \&rolled_back, \&redrive, sub { $_[0]{admin}->ok('VACUUM idempotency.outbox') });

# drain commits open transactions and fetches until no event is left.
sub drain
{
	my ($model) = @_;

	finish($model, $_, 'COMMIT') foreach @{ $model->{publishers} };
	for (my $empty = 0; $empty < 3;)
	{
		$empty++ unless defined $model->{batch} || fetch($model);
		ack($model);
	}
	foreach my $name (sort keys %{ $model->{events} })
	{
		my $event = $model->{events}{$name};
		die "$name is missing\n" if ($event->{fate} // '') eq 'committed' && !$event->{done} && !$event->{dead};
	}
	return;
}

# play plays that many rounds, and returns a summary line. Dies with the error and the
# preceding steps.
sub play
{
	my ($admin, $rounds, $steps) = @_;
	my $dbname = $admin->{dbname};
	my ($published, $done, $dead) = (0, 0, 0);

	$admin->ok('CREATE EXTENSION idempotency');
	my ($consumer, @sessions) = map { Fuzz::Session->new($dbname) } 0 .. $publishers;
	foreach my $round (1 .. $rounds)
	{
		my $model = begin($admin, $consumer, \@sessions);
		eval {
			pick(@steps)->($model, pick(@{ $model->{publishers} })) foreach 1 .. $steps;
			drain($model);
			1;
		} or die join "\n\t", "round $round: $@after:", @{ $model->{log} }, '';
		$published += $model->{count};
		$done += grep { $_->{done} } values %{ $model->{events} };
		$dead += grep { $_->{was_dead} } values %{ $model->{events} };
	}
	$_->quit foreach $admin, $consumer, @sessions;
	return "$rounds rounds of $steps steps, $published events published, $done acknowledged, $dead once dead";
}

1;
