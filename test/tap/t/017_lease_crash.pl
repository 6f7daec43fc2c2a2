# 017_lease_crash.pl
#
# Proves that a committed lease, and nothing uncommitted, survives the failure of its
# owner or of the server. The test uses kill -9 of a backend or of the postmaster, and
# an immediate stop, in each phase of an operation. The next owner takes over at the
# last committed checkpoint. The new token is greater than every token that any session
# was shown, the former owner is rejected, and each step has its effect once. Also
# proves that an owner whose session or statement is terminated blocks no other
# session, and that a promoted standby continues as the old primary.
#
# The script takes more than 15 seconds: in each phase of an operation the server
# crashes and recovers, in three ways.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

# Cluster.pm disables restart_after_crash, which one test needs.
my $node = new_node('main', init => { allows_streaming => 1 }, conf => q{
restart_after_crash = on
max_connections = 40
wal_writer_delay = '10s'
shared_preload_libraries = 'idempotency'
});

# An operation of two steps: the first ends with a checkpoint, the second with
# complete().
$node->safe_psql('postgres', 'CREATE TABLE step (key text, number int, by text)');

# The greatest token that any session was shown, committed or not.
my $greatest = 0;

# token stores a token, which must be greater than all earlier ones by the number of the sequence, not
# only by the 17 random bits below it, and returns it.
sub token
{
	my ($token, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	cmp_ok(int(($token - 1) / 131072), '>', int(($greatest - 1) / 131072), "$name: the token is greater than all earlier tokens") if defined $name;
	die "no token: $token" unless $token =~ /^\d+$/;
	$greatest = $token if $token > $greatest;
	return $token;
}

my $claim = q{SELECT token FROM idempotency.claim('s', '%s', '{"amount": 1}', lease => '1 hour')};

# first_step and second_step are the SQL of the two steps, without the commits.
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

# The phases in which the owner fails. "reach" is what the owner's session does after
# the claim, "left" the state of the key: nothing, a lease that is "leased" or "over",
# or an outcome that is "stored". "attempt" is the attempt of the lease; "done" is the
# number of committed steps.
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

# steps_of is the SQL that returns which owner did which step of a key; steps runs it.
sub steps_of
{
	my ($key) = @_;
	return "SELECT string_agg(number || ' ' || by, ', ' ORDER BY number, by) FROM step WHERE key = '$key'";
}

sub steps
{
	my ($server, $key) = @_;
	return $server->safe_psql('postgres', steps_of($key));
}

# lease_over is the SQL that ends the lease of a key; lease_ends runs it.
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

# refused checks that a token is rejected and that writes under it are rolled back.
sub refused
{
	my ($server, $key, $token, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($rc, $stdout, $stderr) = $server->psql('postgres', join('; ', steps_of($key),
			"SELECT idempotency.renew('s', '$key', $token, '1 hour')", second_step($key, $token, 'former'), 'COMMIT', steps_of($key)),
		extra_params => [ '-v', 'VERBOSITY=verbose' ], on_error_stop => 0);
	my ($before, $after) = split /\n/, $stdout, -1;

	is(join(' ', $stderr =~ /ERROR:  (\w+): /g), 'IK410 IK410', "$name: the former owner can neither renew nor complete");
	is($after, $before, "$name: the write of the former owner is rolled back");
	return;
}

# check_operation checks what a failed owner left behind; then the next owner takes over
# and finishes.
sub check_operation
{
	my ($server, $phase, $key, $token, $name) = @_;
	my ($left, $done) = @{ $phases{$phase} }{qw(left done)};
	my $kept = $left eq 'leased' || $left eq 'over' ? $phases{$phase}->{attempt} // 1 : 0;
	my $owner = join ', ', map { "$_ owner" } 1 .. $done;
	my $answer = '201|{"by": "owner"}';

	my ($steps, $lease) = split /\n/, $server->safe_psql('postgres', steps_of($key) . "; SELECT outcome, attempt FROM idempotency.peek('s', '$key')"), -1;
	is($steps, $owner, "$name: exactly the committed steps exist");
	if ($left ne 'stored')
	{
		my ($outcome, $attempt) = split /\|/, $lease // '';
		is(($outcome // '') . ($attempt // ''), $kept ? "in_progress$kept" : '', "$name: the state of the lease");
		if ($left eq 'leased')
		{
			fails_with($server, sprintf("$claim", $key) =~ s/'1 hour'/'1 hour', wait => '10 ms'/r, 'IK409', "$name: the lease is live");
		}
		my ($got, $new, $at, $point, $state) = split /\|/, $server->safe_psql('postgres', ($left eq 'leased' ? lease_over($key) . '; ' : '')
			. sprintf $claim =~ s/SELECT token/SELECT outcome, token, attempt, recovery_point, state/r, $key);
		is(join(' ', $got, $at, grep { length } $point, $state),
			($kept ? 'taken_over ' : 'claimed ') . ($kept + 1) . ($done ? ' charged {"by" :  "owner"}' : ''),
			"$name: the next owner starts at the last checkpoint");
		token($new, $name);
		refused($server, $key, $token, $name);
		my $output = $server->safe_psql('postgres', join('; ', $point ? () : (first_step($key, $new, 'next'), 'COMMIT'),
			second_step($key, $new, 'next'), 'COMMIT', steps_of($key)));
		is($output =~ s/.*\n//sr, join(', ', $done ? '1 owner' : '1 next', '2 next'), "$name: each step is done once");
		$answer = '201|{"by": "next"}';
		refused($server, $key, $new, "$name, finished");
	}
	refused($server, $key, $token, "$name, in the end");
	is($server->safe_psql('postgres', "SELECT outcome, status, response FROM idempotency.claim('s', '$key', '{\"amount\":1}', lease => '1 hour')"),
		"replayed|$answer", "$name: the response is replayed");
	return;
}

# ----------------------------------------------------------------
# Crashes of the server, with one owner in each phase
# ----------------------------------------------------------------

my %crashes = (
	'kill -9 of the postmaster' => sub {
		my $postmaster = slurp_file($node->data_dir . '/postmaster.pid') =~ s/\n.*//sr;
		$node->kill9;
		# The postmaster's parent must notice its end, and the backends must detach from
		# the shared memory.
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

# In the third kind of crash all owners are killed, and in each phase another session waits for
# the owner, and has to reconnect.
foreach my $crash (sort(keys %crashes), 'kill -9 of each backend')
{
	my (%session, %token, %waiter, %pid);
	foreach my $phase (sort keys %phases)
	{
		my $key = "$crash $phase";
		$session{$phase} = open_session($node);
		$pid{$phase} = backend_pid($session{$phase}) unless $crashes{$crash};
		$token{$phase} = $phases{$phase}->{reach}->($session{$phase}, $key);
		next if $crashes{$crash};
		$waiter{$phase} = open_session($node);
		$waiter{$phase}->query_until(qr/waits/, "\\echo waits\nSELECT outcome FROM idempotency.claim('s', '$key', lease => '1 hour', wait => '10 min');\n");
	}
	if ($crashes{$crash}) { $crashes{$crash}->() }
	else
	{
		my $started = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');
		kill9($node, values %pid);
		is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'), $started, "$crash: the server has recovered by itself");
	}
	wait_for_end($_) foreach values %session, values %waiter;
	check_operation($node, $_, "$crash $_", $token{$_}, "$crash, $_") foreach sort keys %phases;
}

# ----------------------------------------------------------------
# An owner that continues after the crash, before another session takes over
# ----------------------------------------------------------------

{
	my $token = token($node->safe_psql('postgres', sprintf $claim, 'continues'));
	$node->safe_psql('postgres', first_step('continues', $token, 'owner') . '; COMMIT');
	my $until = $node->safe_psql('postgres', q{SELECT leased_until FROM idempotency.key WHERE key::text = 'continues'});
	$node->stop('immediate');
	$node->start;
	is($node->safe_psql('postgres', q{SELECT leased_until FROM idempotency.key WHERE key::text = 'continues'}), $until,
		'the owner continues: the end of the lease is unchanged');
	is($node->safe_psql('postgres', "SELECT idempotency.renew('s', 'continues', $token, '2 hours') > '$until'"), 't',
		'the owner renews the lease');
	lease_ends($node, 'continues');
	$node->safe_psql('postgres', second_step('continues', $token, 'owner') . '; COMMIT');
	is(steps($node, 'continues'), '1 owner, 2 owner', 'the owner finishes after the lease expired');
	is($node->safe_psql('postgres', sprintf $claim =~ s/SELECT token/SELECT outcome/r, 'continues'), 'replayed', 'the operation is replayed');
}

# ----------------------------------------------------------------
# No token is issued twice, whatever part of the WAL a crash loses
# ----------------------------------------------------------------

# After a checkpoint the sequence logs its next value. No commit flushes that record if
# the claim is not committed, or committed asynchronously. An owner without a reply to
# its COMMIT learns from the next heartbeat whether it committed. The pages that a claim
# writes are already in the WAL. Otherwise its full-page images would fill WAL pages,
# which are written at once.
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
		ok($lost, "$name: the claim is lost") if $how eq 'not committed';
		lease_ends($node, $key) unless $lost;
		my $next = token($node->safe_psql('postgres', sprintf $claim, $key), $name);
		fails_with($node, "SELECT idempotency.renew('s', '$key', $token, '1 hour')", 'IK410', "$name: the former owner is rejected")
		  or note("the new owner has token $next, the former one $token");
	}
}

# ----------------------------------------------------------------
# An owner whose session or statement is terminated
# ----------------------------------------------------------------

foreach my $phase (sort keys %phases)
{
	my $key = "terminated $phase";
	my $session = open_session($node);
	my $pid = backend_pid($session);
	my $token = $phases{$phase}->{reach}->($session, $key);
	$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 60000)");
	wait_for_end($session);
	check_operation($node, $phase, $key, $token, "terminated, $phase");
}

{
	my $owner = open_session($node);
	my $token = token($owner->query_safe(sprintf $claim, 'canceled'));
	$owner->query_safe(first_step('canceled', $token, 'owner') . '; COMMIT; ' . second_step('canceled', $token, 'owner')
		. "; SET LOCAL statement_timeout = '10ms'");
	session_fails($owner, 'SELECT pg_sleep(60)', '57014', 'statement_timeout cancels the owner after complete');
	key_is_unlocked('canceled', $owner);
	check_operation($node, 'in complete', 'canceled', $token, 'statement_timeout in complete');
	$owner->quit;
}

# key_is_unlocked checks that a failed transaction has released the key before the
# session sends ROLLBACK.
sub key_is_unlocked
{
	my ($key, $owner) = @_;
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE objsubid = 18756}), 0, "$key: the key is not locked");
	is($node->safe_psql('postgres', "SELECT outcome, attempt FROM idempotency.peek('s', '$key')"), 'in_progress|1', "$key: the lease is live");
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

# Results on the standby.
is($standby->safe_psql('postgres', q{SELECT outcome, replayed, token, attempt, recovery_point, retry_after BETWEEN 3000 AND 3600
		FROM idempotency.peek('s', 'kept')}), 'in_progress|f||1||t', 'standby: a lease is in progress, and the standby returns no details');
is($standby->safe_psql('postgres', q{SELECT state FROM idempotency.keys WHERE key = 'kept'}), 'in_progress', 'standby: the view shows it');
lease_ends($node, 'kept');
$node->wait_for_catchup($standby);
is($standby->safe_psql('postgres', q{SELECT outcome, attempt, retry_after FROM idempotency.peek('s', 'kept')}), 'in_progress|1|0',
	'standby: an expired lease is in progress too');
is($standby->safe_psql('postgres', q{SELECT key, attempt, recovery_point FROM idempotency.zombies WHERE key = 'kept'}), 'kept|1|here', 'standby: an expired lease is a zombie');
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

# Promotion: the primary is lost, with all sessions.
$node->stop('immediate');
wait_for_end($session{$_}) foreach sort keys %session;
$standby->promote;
$standby->safe_psql('postgres', q{ALTER SYSTEM RESET synchronous_standby_names});
$standby->reload;
is($standby->safe_psql('postgres', "SELECT idempotency.renew('s', 'kept', $kept, '1 hour') > now()"), 't', 'promoted: an owner continues with its token');
lease_ends($standby, 'kept');
my ($outcome, $next, $point) = split /\|/, $standby->safe_psql('postgres',
	sprintf $claim =~ s/SELECT token/SELECT outcome, token, recovery_point/r, 'kept');
is("$outcome $point", 'taken_over here', 'promoted: the operation is taken over at its checkpoint');
token($next, 'promoted');
check_operation($standby, $_, "standby $_", $token{$_}, "promoted, $_") foreach sort keys %phases;

$standby->stop;
done_testing();
