# Fuzz::Watch
#
# What must hold whatever is called: no row has changed where an error says that
# nothing happened, no lock is left, the tables make sense, and the session does not
# grow.

package Fuzz::Watch;

use strict;
use warnings FATAL => 'all';

my @tables = qw(key outbox subscription position parked reaper);

# Bytes that a session may have more in the end than when it was warm, in its memory
# contexts, and kB that the kernel may know of.
my $most_bytes = 2 * 1024 * 1024;
my $most_resident = 48 * 1024;

# new watches a session, whose database has the extension.
sub new
{
	my ($class, $session) = @_;
	my $self = bless { session => $session }, $class;
	my $digest = join ' UNION ALL ', map { "SELECT '$_' AS t, count(*) AS rows, coalesce(sum(hashtextextended(t::text, 0)), 0) AS sum
		FROM idempotency.$_ AS t" } @tables;

	$self->{digest} = "SELECT string_agg(t || ':' || rows || ':' || sum, ' ') FROM ($digest) AS d";
	return $self;
}

# digest returns what all tables hold, in short.
sub digest
{
	my ($self) = @_;
	return $self->{session}->tell($self->{digest});
}

# locks returns the locks that the session has though its transaction is over.
sub locks
{
	my ($self) = @_;
	return $self->{session}->tell(q{SELECT string_agg(locktype || ' ' || coalesce(relation::regclass::text, '') || ' ' || mode, ', ')
		FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> 'virtualxid' AND relation IS DISTINCT FROM 'pg_locks'::regclass});
}

# What no row may be.
my %broken = (
	'a key that a claim would refuse' => q{FROM idempotency.key WHERE length(scope) NOT BETWEEN 1 AND 255 OR length(key::text) NOT BETWEEN 1 AND 255
		OR scope ~ '[\x01-\x1f\x7f]' OR key::text ~ '[\x01-\x1f\x7f]'},
	'half a lease' => q{FROM idempotency.key WHERE num_nulls(token, attempt, leased_at, leased_until) NOT IN (0, 4)},
	'a lease with an outcome' => q{FROM idempotency.key WHERE token IS NOT NULL AND num_nonnulls(status, response, headers) > 0},
	'an outcome with what only a lease has' => q{FROM idempotency.key WHERE token IS NULL AND num_nonnulls(recovery_point, recovery_state, request, retention) > 0},
	'a status that nobody could replay' => q{FROM idempotency.key WHERE abs(status) NOT BETWEEN 100 AND 599},
	'an outcome that was never remembered' => q{FROM idempotency.key WHERE expires_at < created_at - interval '1 minute'},
	'headers that are no object' => q{FROM idempotency.key WHERE json_typeof(headers) <> 'object'},
	'a key that peek() does not find' => q{FROM idempotency.key AS k WHERE expires_at > clock_timestamp() + interval '1 minute'
		AND idempotency.peek(scope, key::text) IS NULL},
	'an event without a number' => q{FROM idempotency.outbox WHERE seq > (SELECT last_value FROM idempotency.outbox_seq)},
	'an event without a topic' => q{FROM idempotency.outbox WHERE length(aggregatetype) NOT BETWEEN 1 AND 255},
	'a subscription that is nowhere' => q{FROM idempotency.subscription FULL JOIN idempotency.position USING (subscription) WHERE number IS NULL OR passed IS NULL},
	'half a batch' => q{FROM idempotency.position WHERE num_nulls(batch, batch_passed, batch_inflight, batch_parked, leased_at, leased_until) NOT IN (0, 6)},
	'a position ahead of all events' => q{FROM idempotency.position WHERE greatest(passed, batch_passed) > (SELECT last_value FROM idempotency.outbox_seq)},
	'an event parked for nobody' => q{FROM idempotency.parked WHERE subscription NOT IN (SELECT subscription FROM idempotency.subscription)},
	'a dead letter that is given again' => q{FROM idempotency.parked WHERE num_nonnulls(retry_at, dead_at) > 1});

# broken returns what is wrong with the rows, and whether every view can be read.
sub broken
{
	my ($self) = @_;
	my @wrong = grep { $self->{session}->tell("SELECT count(*) $broken{$_}") ne '0' } sort keys %broken;

	$self->{session}->tell("SELECT count(*) FROM (SELECT * FROM idempotency.$_ OFFSET 0) AS v") foreach qw(keys zombies subscriptions dead_letters stats);
	return join ', ', @wrong;
}

# The memory of a session in bytes, and what the kernel counts in kB, but for shared
# memory.
sub memory
{
	my ($self) = @_;
	return split /\|/, $self->{session}->tell(q{WITH status AS MATERIALIZED (SELECT pg_read_file('/proc/self/status') AS s)
		SELECT (SELECT sum(total_bytes) FROM pg_backend_memory_contexts),
			(SELECT substring(s FROM 'VmRSS:\s+(\d+)')::int8 - substring(s FROM 'RssShmem:\s+(\d+)')::int8 FROM status)});
}

# warm notes how large the session is, now that it knows what it calls.
sub warm
{
	my ($self) = @_;
	($self->{bytes}, $self->{resident}) = $self->memory;
	return;
}

# grown returns how much it has grown, as text, and whether that is too much.
sub grown
{
	my ($self) = @_;
	my ($bytes, $resident) = $self->memory;

	$bytes -= $self->{bytes};
	$resident -= $self->{resident};
	return (sprintf('%d kB in contexts, %d kB resident', $bytes / 1024, $resident), $bytes > $most_bytes || $resident > $most_resident);
}

1;
