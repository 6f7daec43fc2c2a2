# 015_wakeup.pl
#
# Proves that a claim which waits for the owner of a lease is answered as soon as
# the owner's change is committed, and not before: where the library is preloaded,
# by a broadcast, however many wait; where it is not, and where nothing is
# broadcast, by looking again within about a second.  And that a wait is cut short
# by a cancel, a timeout, and the end of the session or the server.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my ($node, $how);
my $keys = 0;

# lease leaves a key that another owner has leased; returns the key and the token.
sub lease
{
	my ($length) = @_;
	my $key = 'key ' . ++$keys;
	my $token = $node->safe_psql('postgres', sprintf q{SELECT token FROM idempotency.claim('w', '%s', lease => '%s')},
		$key, $length // '1 hour');
	return ($key, $token);
}

# waiter starts a session that waits for a key, and returns it asleep.
sub waiter
{
	my ($key, $wait) = @_;
	my $session = open_session($node);
	my $pid = $session->query_safe('SELECT pg_backend_pid()');

	$wait //= '1 min';
	$session->query_until(qr/begins/,
		"\\echo begins\nSELECT outcome, clock_timestamp() FROM idempotency.try_claim('w', '$key', lease => '1 hour', wait => '$wait');\n");
	$node->poll_query_until('postgres',
		"SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") or die "$key: nobody waits";
	return { session => $session, pid => $pid };
}

# answer returns the outcome that a waiter got, and when.
sub answer
{
	my ($waiter) = @_;
	my ($outcome, $when) = $waiter->{session}->query_safe(q{\echo over}) =~ /^(\w+)\|(.*)$/m;
	return ($outcome // 'nothing', $when);
}

# answered checks what a waiter is told when somebody runs SQL, and that he is
# told within so many seconds of its end.  Returns how many it took.
sub answered
{
	my ($name, $waiter, $sql, $expected, $within) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($done) = $node->safe_psql('postgres', "$sql;\nSELECT 'at ' || clock_timestamp()") =~ /^at (.*)$/m;
	my ($outcome, $when) = answer($waiter);
	$waiter->{session}->quit;

	is($outcome, $expected, "$how: $name: what the waiter is told");
	my $took = $when ? $node->safe_psql('postgres', "SELECT extract(epoch FROM timestamptz '$when' - '$done')") : 'inf';
	cmp_ok($took, '<', $within, "$how: $name: and when");
	return $took;
}

# The changes of an owner that concern who waits, and what the waiter is told.
my @changes = (
	[ 'complete', q{SELECT idempotency.complete('w', 'KEY', '1', token => TOKEN)}, 'replayed' ],
	[ 'fail', q{SELECT idempotency.fail('w', 'KEY', '1', 402, token => TOKEN)}, 'replayed' ],
	[ 'release', q{SELECT idempotency.release('w', 'KEY', token => TOKEN)}, 'claimed' ],
	[ 'release after a checkpoint', q{SELECT idempotency.checkpoint('w', 'KEY', TOKEN, 'here');
		SELECT idempotency.release('w', 'KEY', token => TOKEN)}, 'taken_over' ],
	[ 'forget', q{SELECT idempotency.forget('w', 'KEY')}, 'claimed' ],
	[ 'complete in a subtransaction', q{BEGIN; SAVEPOINT a; SELECT idempotency.complete('w', 'KEY', '1', token => TOKEN);
		RELEASE a; COMMIT}, 'replayed' ],
	[ 'complete after a rollback to a savepoint', q{BEGIN; SAVEPOINT a; SELECT idempotency.release('w', 'KEY', token => TOKEN);
		ROLLBACK TO a; SELECT idempotency.complete('w', 'KEY', '1', token => TOKEN); COMMIT}, 'replayed' ]);

foreach my $preload ('idempotency', '')
{
	$how = $preload ? 'preloaded' : 'not preloaded';
	$node = new_node('server' . length $preload,
		conf => "shared_preload_libraries = '$preload'\nmax_prepared_transactions = 5\n");

	# Without a broadcast a waiter would look half a second later, on the average.
	my @took;
	foreach (@changes, $preload ? @changes : ())
	{
		my ($name, $sql, $outcome) = @$_;
		my ($key, $token) = lease();
		my $waiter = waiter($key);
		usleep(500_000);
		push @took, answered($name, $waiter, $sql =~ s/KEY/$key/gr =~ s/TOKEN/$token/gr, $outcome, 10);
	}
	my $median = (sort { $a <=> $b } @took)[ @took / 2 ];
	note("$how: the median wake-up took $median s");
	cmp_ok($median, '<', 0.2, "$how: waiters are woken") if $preload;

	# What is not committed answers nobody, nor does a heartbeat.
	my ($key, $token) = lease();
	my $waiter = waiter($key, '3 s');
	my $complete = "SELECT idempotency.complete('w', '$key', '1', token => $token)";
	$node->safe_psql('postgres', $_) foreach "BEGIN; $complete; ROLLBACK", "BEGIN; SAVEPOINT a; $complete; ROLLBACK TO a; COMMIT",
		"SELECT idempotency.renew('w', '$key', $token, '1 hour')";
	is((answer($waiter))[0], 'in_progress', "$how: a rollback and a heartbeat answer nobody");
	$waiter->{session}->quit;

	# COMMIT PREPARED and the end of a lease broadcast nothing.
	($key, $token) = lease();
	$waiter = waiter($key);
	$node->safe_psql('postgres',
		"BEGIN; SELECT idempotency.complete('w', '$key', '1', token => $token); PREPARE TRANSACTION 'p'");
	usleep(200_000);
	answered('commit prepared', $waiter, q{COMMIT PREPARED 'p'}, 'replayed', 10);

	($key, $token) = lease('1 s');
	$waiter = waiter($key);
	answered('the lease runs out', $waiter, 'SELECT pg_sleep(1)', 'taken_over', 10);

	# Many wait for one key, and somebody for another.
	($key, $token) = lease();
	my ($other) = lease();
	my @waiters = map { waiter($key) } 1 .. 8;
	my $patient = waiter($other, '2 s');
	$node->safe_psql('postgres', "SELECT idempotency.complete('w', '$key', '1', token => $token)");
	is(join(' ', map { (answer($_))[0] } @waiters), join(' ', ('replayed') x 8), "$how: all who wait for a key are answered");
	is((answer($patient))[0], 'in_progress', "$how: who waits for another is not");
	$_->{session}->quit foreach @waiters, $patient;

	# How a wait is cut short.
	($key, $token) = lease();
	$waiter = waiter($key);
	my $session = $waiter->{session};
	$node->safe_psql('postgres', "SELECT pg_cancel_backend($waiter->{pid})");
	session_fails($session, '\echo over', '57014', "$how: a cancel ends a wait");
	$session->query_safe('BEGIN; SAVEPOINT a; SET LOCAL statement_timeout = 200');
	session_fails($session, "SELECT idempotency.claim('w', '$key', wait => '1 min')", '57014',
		"$how: so does statement_timeout");
	is($session->query_safe("ROLLBACK TO a; SELECT outcome FROM idempotency.try_claim('w', '$key', wait => '300 ms'); COMMIT"),
		'in_progress', "$how: the transaction may wait again");
	$session->quit;

	$waiter = waiter($key);
	is($node->safe_psql('postgres', "SELECT pg_terminate_backend($waiter->{pid}, 10000)"), 't',
		"$how: the end of its session ends a wait");
	$waiter->{session}->{run}->finish;

	$waiter = waiter($key);
	ok($node->stop('fast'), "$how: so does the end of the server");
	$waiter->{session}->{run}->finish;
}
done_testing();
