# 017_lease_crash.pl
#
# Proves that a lease outlives whatever becomes of its owner and of the server,
# as far as it was committed, and no further: after kill -9 of a backend, of the
# postmaster, and an immediate stop, in each phase of an operation, the next owner
# takes over at the last committed checkpoint; his token is greater than any that
# was ever shown to anybody; the former owner is refused; and each step has its
# effect once.  Also that an owner whose session is ended, or whose statement is,
# blocks nobody, and that a promoted standby is as good as the server before.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

# Cluster.pm switches restart_after_crash off, and one test needs it.
my $node = new_node('main', init => { allows_streaming => 1 }, conf => q{
restart_after_crash = on
max_connections = 40
wal_writer_delay = '10s'
shared_preload_libraries = 'idempotency'
});

# An operation of two steps: the first ends with a checkpoint, the second with
# complete().
$node->safe_psql('postgres', 'CREATE TABLE step (key text, number int, by text)');

# The greatest token that anybody was shown, committed or not.
my $greatest = 0;

# token notes a token, which must be greater than all before, and returns it.
sub token
{
	my ($token, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	cmp_ok($token, '>', $greatest, "$name: the token is greater than all before") if defined $name;
	die "no token: $token" unless $token =~ /^\d+$/;
	$greatest = $token if $token > $greatest;
	return $token;
}

my $claim = q{SELECT token FROM idempotency.claim('s', '%s', '{"amount": 1}', lease => '1 hour')};

# first and second are the SQL of the two steps, up to where they commit.
sub first_step
{
	my ($key, $token, $by) = @_;
	return qq{BEGIN; INSERT INTO step VALUES ('$key', 1, '$by');
		SELECT idempotency.checkpoint('s', '$key', $token, 'charged', '{"by" :  "$by"}')};
}

sub second_step
{
	my ($key, $token, $by) = @_;
	return qq{BEGIN; INSERT INTO step VALUES ('$key', 2, '$by');
		SELECT idempotency.complete('s', '$key', '{"by": "$by"}', 201, token => $token)};
}

# The phases in which the owner is hit: what he has done by then, in his own
# session, after the claim, and what is left of it.  "left" is the state of the
# key: nothing, a lease that is "leased" or "over", or an outcome that is "stored";
# "attempt" is that of the lease, and "done" are the steps that have committed.
my %phases = (
	'before the claim is committed' => { left => 'nothing', done => 0,
		reach => sub { my ($s, $key) = @_; token($s->query_safe('BEGIN; ' . sprintf $claim, $key)) } },
	'after the claim' => { left => 'leased', done => 0,
		reach => sub { my ($s, $key) = @_; token($s->query_safe(sprintf $claim, $key)) } },
	'in the business write' => { left => 'leased', done => 0,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe("BEGIN; SELECT idempotency.renew('s', '$key', $token, '2 hours'); INSERT INTO step VALUES ('$key', 1, 'owner')");
			return $token;
		} },
	'before the checkpoint is committed' => { left => 'leased', done => 0,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner'));
			return $token;
		} },
	'after the checkpoint' => { left => 'leased', done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . '; COMMIT');
			return $token;
		} },
	'in complete' => { left => 'leased', done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . '; COMMIT; ' . second_step($key, $token, 'owner'));
			return $token;
		} },
	'after a takeover' => { left => 'leased', attempt => 2, done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . '; COMMIT; ' . lease_over($key));
			return token($s->query_safe(sprintf $claim, $key));
		} },
	'in a takeover' => { left => 'over', attempt => 2, done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . '; COMMIT; ' . lease_over($key));
			token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(lease_over($key));
			return token($s->query_safe('BEGIN; ' . sprintf $claim, $key));
		} },
	'in release' => { left => 'leased', done => 0,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe("BEGIN; INSERT INTO step VALUES ('$key', 1, 'owner'); SELECT idempotency.release('s', '$key', $token)");
			return $token;
		} },
	'in release with a checkpoint' => { left => 'leased', done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . "; COMMIT; BEGIN; SELECT idempotency.release('s', '$key', $token)");
			return $token;
		} },
	'in fail' => { left => 'leased', done => 1,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner')
				. qq{; COMMIT; BEGIN; SELECT idempotency.fail('s', '$key', '{"by": "owner"}', 422, token => $token)});
			return $token;
		} },
	'after complete' => { left => 'stored', done => 2,
		reach => sub {
			my ($s, $key) = @_;
			my $token = token($s->query_safe(sprintf $claim, $key));
			$s->query_safe(first_step($key, $token, 'owner') . '; COMMIT; ' . second_step($key, $token, 'owner') . '; COMMIT');
			return $token;
		} });

# steps returns who has done which step of a key.
sub steps
{
	my ($server, $key) = @_;
	return $server->safe_psql('postgres', "SELECT string_agg(number || ' ' || by, ', ' ORDER BY number, by) FROM step WHERE key = '$key'");
}

# lease_over is the SQL that lets the lease of a key be over; lease_ends does so.
sub lease_over
{
	my ($key) = @_;
	return qq{UPDATE idempotency.key SET leased_at = now() - interval '2 min',
		leased_until = now() - interval '1 min' WHERE key::text = '$key'};
}

sub lease_ends
{
	my ($server, $key) = @_;
	$server->safe_psql('postgres', lease_over($key));
	return;
}

# refused checks that a token is worth nothing, and that what was written with it
# is gone.
sub refused
{
	my ($server, $key, $token, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $before = steps($server, $key);

	fails_with($server, "SELECT idempotency.renew('s', '$key', $token, '1 hour')", 'IK410', "$name: no heartbeat for the former owner");
	my ($rc, $stdout, $stderr) = $server->psql('postgres', second_step($key, $token, 'former') . '; COMMIT',
		extra_params => [ '-v', 'VERBOSITY=verbose' ], on_error_stop => 0);
	like($stderr, qr/ERROR:  IK410: the lease on this idempotency key is lost/, "$name: nor can he complete");
	is(steps($server, $key), $before, "$name: and what he wrote is gone");
	return;
}

# goes_on checks what is left of an operation after its owner was hit, has it
# taken over, and finished.
sub goes_on
{
	my ($server, $phase, $key, $token, $name) = @_;
	my ($left, $done) = @{ $phases{$phase} }{qw(left done)};
	my $kept = $left eq 'leased' || $left eq 'over' ? $phases{$phase}->{attempt} // 1 : 0;
	my $owner = join ', ', map { "$_ owner" } 1 .. $done;
	my $answer = '201|{"by": "owner"}';

	is(steps($server, $key), $owner, "$name: the steps that were committed are there, and no other");
	if ($left ne 'stored')
	{
		my ($outcome, $attempt) = split /\|/, $server->safe_psql('postgres', "SELECT outcome, attempt FROM idempotency.peek('s', '$key')");
		is(($outcome // '') . ($attempt // ''), $kept ? "in_progress$kept" : '', "$name: what is left of the lease");
		if ($left eq 'leased')
		{
			fails_with($server, sprintf("$claim", $key) =~ s/'1 hour'/'1 hour', wait => '10 ms'/r, 'IK409', "$name: the lease goes on");
			lease_ends($server, $key);
		}
		my ($got, $new, $at, $point, $state) = split /\|/, $server->safe_psql('postgres',
			sprintf $claim =~ s/SELECT token/SELECT outcome, token, attempt, recovery_point, state/r, $key);
		is(join(' ', $got, $at, grep { length } $point, $state),
			($kept ? 'taken_over ' : 'claimed ') . ($kept + 1) . ($done ? ' charged {"by" :  "owner"}' : ''),
			"$name: the next owner, and where he begins");
		token($new, $name);
		refused($server, $key, $token, $name);
		$server->safe_psql('postgres', first_step($key, $new, 'next') . '; COMMIT') unless $point;
		$server->safe_psql('postgres', second_step($key, $new, 'next') . '; COMMIT');
		is(steps($server, $key), join(', ', $done ? '1 owner' : '1 next', '2 next'), "$name: each step once");
		$answer = '201|{"by": "next"}';
		refused($server, $key, $new, "$name, finished");
	}
	refused($server, $key, $token, "$name, in the end");
	is($server->safe_psql('postgres', "SELECT outcome, status, response FROM idempotency.claim('s', '$key', '{\"amount\":1}', lease => '1 hour')"),
		"replayed|$answer", "$name: the answer is remembered");
	return;
}

# wait_for_end reads a session to its end.
sub wait_for_end
{
	my ($session) = @_;
	eval {
		$session->{stdin} .= "SELECT 1;\n\\q\n";
		$session->{run}->finish;
	};
	return;
}

# wait_until_up waits for the end of a recovery.
sub wait_until_up
{
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if $node->psql('postgres', 'SELECT 1') == 0;
		usleep(100_000);
	}
	die 'the server did not recover';
}

# backend_pid returns the process ID of a session's backend.
sub backend_pid
{
	my ($session) = @_;
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$pid =~ s/\D//g;
	return $pid;
}

# ----------------------------------------------------------------
# Crashes of the server, with one owner in each phase
# ----------------------------------------------------------------

my %crashes = (
	'kill -9 of the postmaster' => sub {
		my $postmaster = slurp_file($node->data_dir . '/postmaster.pid') =~ s/\n.*//sr;
		$node->kill9;
		# Its parent has to notice first, and its backends let go of the shared memory.
		foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
		{
			return if !kill(0, $postmaster) && $node->start(fail_ok => 1);
			$node->{_pid} = undef;
			usleep(100_000);
		}
		die 'the server did not start';
	},
	'immediate stop' => sub {
		$node->stop('immediate');
		$node->start;
	});

foreach my $crash (sort keys %crashes)
{
	my (%session, %token);
	foreach my $phase (sort keys %phases)
	{
		$session{$phase} = open_session($node);
		$token{$phase} = $phases{$phase}->{reach}->($session{$phase}, "$crash $phase");
	}
	$crashes{$crash}->();
	wait_for_end($session{$_}) foreach sort keys %session;
	goes_on($node, $_, "$crash $_", $token{$_}, "$crash, $_") foreach sort keys %phases;
}

# ----------------------------------------------------------------
# Crashes of one backend
# ----------------------------------------------------------------

foreach my $phase (sort keys %phases)
{
	my $key = "backend $phase";
	my $session = open_session($node);
	my $pid = backend_pid($session);
	my $token = $phases{$phase}->{reach}->($session, $key);
	my $started = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');

	# Somebody else waits for the owner, and has to connect again.
	my $waiter = open_session($node);
	$waiter->query_until(qr/waits/, "\\echo waits\nSELECT outcome FROM idempotency.claim('s', '$key', lease => '1 hour', wait => '10 min');\n");

	ok(kill(9, $pid), "kill -9 of the backend, $phase");
	wait_for_end($_) foreach $session, $waiter;
	wait_until_up();
	is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'), $started,
		"kill -9 of the backend, $phase: the server has recovered by itself");
	goes_on($node, $phase, $key, $token, "kill -9 of the backend, $phase");
}

# ----------------------------------------------------------------
# An owner who comes back after the crash, before anybody else
# ----------------------------------------------------------------

{
	my $token = token($node->safe_psql('postgres', sprintf $claim, 'comes back'));
	$node->safe_psql('postgres', first_step('comes back', $token, 'owner') . '; COMMIT');
	my $until = $node->safe_psql('postgres', q{SELECT leased_until FROM idempotency.key WHERE key::text = 'comes back'});
	$node->stop('immediate');
	$node->start;
	is($node->safe_psql('postgres', q{SELECT leased_until FROM idempotency.key WHERE key::text = 'comes back'}), $until,
		'the owner comes back: his lease is as long as it was');
	is($node->safe_psql('postgres', "SELECT idempotency.renew('s', 'comes back', $token, '2 hours') > '$until'"), 't',
		'and can be renewed');
	lease_ends($node, 'comes back');
	$node->safe_psql('postgres', second_step('comes back', $token, 'owner') . '; COMMIT');
	is(steps($node, 'comes back'), '1 owner, 2 owner', 'and he finishes, late as he is');
	is($node->safe_psql('postgres', sprintf $claim =~ s/SELECT token/SELECT outcome/r, 'comes back'), 'replayed', 'and it is replayed');
}

# ----------------------------------------------------------------
# No token comes a second time, whatever part of the log a crash loses
# ----------------------------------------------------------------

# A checkpoint makes the sequence write to the log for the next token; no commit
# takes that to disk if the claim is not committed, or not yet.  (Whether one whose
# COMMIT was not answered has committed, an owner finds out by his next heartbeat.)
# The pages that a claim writes to are in the log already, so that its own records
# fill none of the log's pages, which would be written at once.
$node->safe_psql('postgres', sprintf $claim, 'token');
foreach my $crash (sort keys %crashes)
{
	foreach my $how ('not committed', 'committed asynchronously')
	{
		my $name = "$crash, $how, and lost";
		my $key = "token $crash $how";
		my $session = open_session($node);
		$session->query_safe(q{CHECKPOINT; UPDATE idempotency.key SET created_at = created_at + interval '1 us' WHERE key::text = 'token'});
		$session->query_safe($how eq 'not committed' ? 'BEGIN' : 'SET synchronous_commit = off');
		my $token = token($session->query_safe(sprintf $claim, $key));
		$crashes{$crash}->();
		wait_for_end($session);

		my $lost = $node->safe_psql('postgres', "SELECT idempotency.peek('s', '$key') IS NULL") eq 't';
		ok($lost, "$name: nothing is left of the claim") if $how eq 'not committed';
		lease_ends($node, $key) unless $lost;
		my $next = token($node->safe_psql('postgres', sprintf $claim, $key), $name);
		fails_with($node, "SELECT idempotency.renew('s', '$key', $token, '1 hour')", 'IK410', "$name: the former owner is refused")
		  or note("the new owner has token $next, the former one $token");
	}
}

# ----------------------------------------------------------------
# An owner whose session, or statement, is ended
# ----------------------------------------------------------------

foreach my $phase (sort keys %phases)
{
	my $key = "terminated $phase";
	my $session = open_session($node);
	my $pid = backend_pid($session);
	my $token = $phases{$phase}->{reach}->($session, $key);
	$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 60000)");
	wait_for_end($session);
	goes_on($node, $phase, $key, $token, "terminated, $phase");
}

{
	my $owner = open_session($node);
	my $token = token($owner->query_safe(sprintf $claim, 'canceled'));
	$owner->query_safe(first_step('canceled', $token, 'owner') . '; COMMIT; ' . second_step('canceled', $token, 'owner')
		. "; SET LOCAL statement_timeout = '10ms'");
	session_fails($owner, 'SELECT pg_sleep(60)', '57014', 'the owner runs into his statement_timeout after complete');
	lease_ends_elsewhere('canceled', $owner);
	goes_on($node, 'in complete', 'canceled', $token, 'statement_timeout in complete');
	$owner->quit;
}

# lease_ends_elsewhere checks that a failed transaction holds the key no longer,
# though its session has not said ROLLBACK.
sub lease_ends_elsewhere
{
	my ($key, $owner) = @_;
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE objsubid = 18756}), 0, "$key: the key is not locked");
	is($node->safe_psql('postgres', "SELECT outcome, attempt FROM idempotency.peek('s', '$key')"), 'in_progress|1', "$key: the lease goes on");
	$owner->query_safe('ROLLBACK');
	return;
}

# ----------------------------------------------------------------
# A standby
# ----------------------------------------------------------------

my $standby = synchronous_standby($node);

my (%session, %token);
foreach my $phase (sort keys %phases)
{
	$session{$phase} = open_session($node);
	$token{$phase} = $phases{$phase}->{reach}->($session{$phase}, "standby $phase");
}
my $kept = token($node->safe_psql('postgres', sprintf $claim, 'kept'));
$node->safe_psql('postgres', qq{SELECT idempotency.checkpoint('s', 'kept', $kept, 'here', '[ 1 ]');
	SELECT idempotency.once('s', 'the last to arrive')});
$node->wait_for_catchup($standby);

# What it answers while it follows.
is($standby->safe_psql('postgres', q{SELECT outcome, replayed, token, attempt, recovery_point, retry_after BETWEEN '50 min' AND '1 hour'
		FROM idempotency.peek('s', 'kept')}), 'in_progress|f||1||t', 'standby: a lease is in progress, and no more is told');
is($standby->safe_psql('postgres', q{SELECT state FROM idempotency.keys WHERE key = 'kept'}), 'in_progress', 'standby: the view shows it');
lease_ends($node, 'kept');
$node->wait_for_catchup($standby);
is($standby->safe_psql('postgres', q{SELECT outcome, attempt, retry_after FROM idempotency.peek('s', 'kept')}), 'in_progress|1|00:00:00',
	'standby: and so is one that is over');
is($standby->safe_psql('postgres', q{SELECT key, attempt, recovery_point FROM idempotency.zombies WHERE key = 'kept'}), 'kept|1|here', 'standby: which is a zombie');
my %refused = (
	q{claim('s', 'kept', lease => '1 hour')} => 'claim',
	q{claim('s', 'new', lease => '1 hour')} => 'claim',
	q{try_claim('s', 'kept', lease => '1 hour')} => 'try_claim',
	qq{renew('s', 'kept', $kept, '1 hour')} => 'renew',
	qq{checkpoint('s', 'kept', $kept, 'there')} => 'checkpoint',
	qq{complete('s', 'kept', token => $kept)} => 'complete',
	qq{release('s', 'kept', $kept)} => 'release',
	q{claim_abandoned('s', '1 hour')} => 'claim_abandoned',
	q{reap(1000)} => 'reap');
fails_with($standby, "SELECT idempotency.$_", '25006', "standby: $_",
	like => qr/cannot execute idempotency\.$refused{$_}\(\) in a read-only transaction/) foreach sort keys %refused;

# Promotion: the primary is lost, with all who were at it.
$node->stop('immediate');
wait_for_end($session{$_}) foreach sort keys %session;
$standby->promote;
$standby->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$standby->reload;
is($standby->safe_psql('postgres', "SELECT idempotency.renew('s', 'kept', $kept, '1 hour') > now()"), 't', 'promoted: an owner comes back with his token');
lease_ends($standby, 'kept');
my ($outcome, $next, $point) = split /\|/, $standby->safe_psql('postgres',
	sprintf $claim =~ s/SELECT token/SELECT outcome, token, recovery_point/r, 'kept');
is("$outcome $point", 'taken_over here', 'promoted: and is taken over where he was');
token($next, 'promoted');
goes_on($standby, $_, "standby $_", $token{$_}, "promoted, $_") foreach sort keys %phases;

$standby->stop;
done_testing();
