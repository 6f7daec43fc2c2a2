# Fuzz::Watch
#
# Invariants that hold for every call: an error changes no row, no lock is left, the
# tables are consistent, and the session does not grow.

package Fuzz::Watch;

use strict;
use warnings FATAL => 'all';

use JSON::PP;

my @tables = qw(key outbox subscription position parked reaper);

# The allowed growth of a session after warm-up: bytes used in its memory contexts, since their
# blocks double in size, and kB
# according to the kernel.
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

# digest returns a digest of all tables.
sub digest
{
	my ($self) = @_;
	return $self->{session}->tell($self->{digest});
}

# locks returns the locks that the session holds after its transaction.
sub locks
{
	my ($self) = @_;
	return $self->{session}->tell(q{SELECT string_agg(locktype || ' ' || coalesce(relation::regclass::text, '') || ' ' || mode, ', ')
		FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> 'virtualxid' AND relation IS DISTINCT FROM 'pg_locks'::regclass});
}

# The conditions that no row can meet.
my %broken = (
	'a key that a claim would refuse' => q{FROM idempotency.key WHERE length(scope) NOT BETWEEN 1 AND 255 OR length(key::text) NOT BETWEEN 1 AND 255
		OR scope ~ '[\x01-\x1f\x7f]' OR key::text ~ '[\x01-\x1f\x7f]'},
	'half a lease' => q{FROM idempotency.key WHERE num_nulls(token, attempt, leased_at, leased_until) NOT IN (0, 4)},
	'a lease with an outcome' => q{FROM idempotency.key WHERE token IS NOT NULL AND num_nonnulls(status, response, headers) > 0},
	'an outcome with what only a lease has' => q{FROM idempotency.key WHERE token IS NULL AND num_nonnulls(recovery_point, recovery_state, request, retention) > 0},
	'a status that cannot be replayed' => q{FROM idempotency.key WHERE abs(status) NOT BETWEEN 100 AND 599},
	'an outcome that expired before it was stored' => q{FROM idempotency.key WHERE expires_at < created_at - interval '1 minute'},
	'headers that are no object' => q{FROM idempotency.key WHERE json_typeof(headers) <> 'object'},
	'a key that peek() does not find' => q{FROM idempotency.key AS k WHERE expires_at > clock_timestamp() + interval '1 minute'
		AND idempotency.peek(scope, key::text) IS NULL},
	'an event without a number' => q{FROM idempotency.outbox WHERE seq > (SELECT last_value FROM idempotency.outbox_seq)},
	'an event without a topic' => q{FROM idempotency.outbox WHERE length(aggregatetype) NOT BETWEEN 1 AND 255},
	'a subscription that is nowhere' => q{FROM idempotency.subscription FULL JOIN idempotency.partition USING (subscription)
		FULL JOIN idempotency.position USING (subscription, partition) WHERE created_at IS NULL OR modulus IS NULL OR version IS NULL},
	'half a batch' => q{FROM idempotency.position WHERE num_nulls(batch, leased_at, leased_until, holder) NOT IN (0, 4)},
	'a position ahead of all events' => q{FROM idempotency.position WHERE greatest(mark, top) > (SELECT last_value FROM idempotency.outbox_seq)},
	'a parked event without a subscription' => q{FROM idempotency.parked WHERE subscription NOT IN (SELECT subscription FROM idempotency.subscription)},
	'a dead letter that is given again' => q{FROM idempotency.parked WHERE num_nonnulls(retry_at, dead_at) > 1});

# broken returns the invalid rows, and the views that cannot be read.
sub broken
{
	my ($self) = @_;
	my @wrong = grep { $self->{session}->tell("SELECT count(*) $broken{$_}") ne '0' } sort keys %broken;

	$self->{session}->tell("SELECT count(*) FROM (SELECT * FROM idempotency.$_ OFFSET 0) AS v") foreach qw(keys zombies subscriptions dead_letters stats);
	return join ', ', @wrong;
}

# The memory of a session in bytes, and in kB according to the kernel, without shared
# memory.
sub memory
{
	my ($self) = @_;
	return split /\|/, $self->{session}->tell(q{WITH status AS MATERIALIZED (SELECT pg_read_file('/proc/self/status') AS s)
		SELECT (SELECT sum(used_bytes) FROM pg_backend_memory_contexts),
			(SELECT substring(s FROM 'VmRSS:\s+(\d+)')::int8 - substring(s FROM 'RssShmem:\s+(\d+)')::int8 FROM status)});
}

# contexts returns the bytes of the session's memory contexts by name.
sub contexts
{
	my ($self) = @_;
	my $names = $self->{session}->tell(q{SELECT json_object_agg(name, bytes) FROM
		(SELECT name, sum(used_bytes) AS bytes FROM pg_backend_memory_contexts GROUP BY name) AS c});

	return decode_json($names);
}

# warm records the size of the session after its caches are filled.
sub warm
{
	my ($self) = @_;
	($self->{bytes}, $self->{resident}) = $self->memory;
	$self->{contexts} = $self->contexts;
	return;
}

# growth returns the three contexts that have grown most, as text.
sub growth
{
	my ($self) = @_;
	my $now = $self->contexts;
	my %more = map { $_ => $now->{$_} - ($self->{contexts}{$_} // 0) } keys %$now;
	my @most = grep { $_ } (sort { $more{$b} <=> $more{$a} } keys %more)[0 .. 2];

	return join ', ', map { sprintf '%s %d kB', $_, $more{$_} / 1024 } @most;
}

# grown returns the growth as text, and whether it exceeds the limit.
sub grown
{
	my ($self) = @_;
	my ($bytes, $resident) = $self->memory;

	$bytes -= $self->{bytes};
	$resident -= $self->{resident};
	return (sprintf('%d kB in contexts (%s), %d kB resident', $bytes / 1024, $self->growth, $resident), $bytes > $most_bytes || $resident > $most_resident);
}

1;
