# InjectionTest.pm
#
# What the tests share that stop our code between two steps.  They need a server
# that is built with injection points, as `make sanitize KIND=injection` does;
# with any other they skip, unless INJECTION_POINTS says that there must be some.
# The runner puts this directory into @INC.

package InjectionTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdempotencyTest;
use OutboxTest qw(outbox_tools backend_pid wait_for_end kill9 restart_after_kill9);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(injection_node consumer_tools begin_events says stop_at stops_at is_at wake interrupt answer_of
  goes_on is_overtaken faults late_faults worker_faults late_worker_faults);

# injection_node makes a server as new_node() does, or skips the whole script.
sub injection_node
{
	my ($name, %opt) = @_;
	if (!check_pg_config('#define USE_INJECTION_POINTS 1'))
	{
		die 'the server is built without injection points' if $ENV{INJECTION_POINTS};
		plan skip_all => 'the server is built without injection points, see test/sanitize/README.md';
	}

	# Cluster.pm switches restart_after_crash off.
	my $node = new_node($name, %opt, conf => "restart_after_crash = on\n" . ($opt{conf} // ''));
	$node->safe_psql('postgres', 'CREATE EXTENSION injection_points');
	return $node;
}

# consumer_tools makes a consumer that has its effects in the transaction in which it
# acknowledges the batch.  take() fetches one and notes it; its events say which have
# come again, as "2x2".
sub consumer_tools
{
	my ($node) = @_;
	outbox_tools($node);
	$node->safe_psql('postgres', q{
		CREATE TABLE effect (place int8 GENERATED ALWAYS AS IDENTITY, n int);
		CREATE TABLE batch (number int8);
		CREATE FUNCTION take(lease interval DEFAULT '1 hour') RETURNS text LANGUAGE sql AS $$
			WITH event AS MATERIALIZED (SELECT * FROM idempotency.fetch('s', lease => lease)),
				noted AS (INSERT INTO batch SELECT DISTINCT batch FROM event)
			SELECT coalesce(string_agg(payload->>'n' || CASE WHEN attempt > 1 THEN 'x' || attempt ELSE '' END, ' ' ORDER BY seq), 'nothing')
			FROM event $$;
		CREATE FUNCTION acknowledge() RETURNS text LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO effect (n) SELECT n FROM generate_series(1, 3) AS n;
			PERFORM idempotency.ack('s', (SELECT number FROM batch LIMIT 1));
			RETURN 'acknowledged';
		END $$;
		CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE sql AS
			$$INSERT INTO public.effect (n) SELECT (e.payload->>'n')::int$$;
		CREATE ROLE app LOGIN;
		SELECT idempotency.grant_client('app');
		GRANT ALL ON effect TO app});
	return;
}

# begin_events makes the subscription s anew, on top of nothing, and runs SQL.  reap()
# leaves the events if somebody else is at the tables just then.
sub begin_events
{
	my ($node, @sql) = @_;
	$node->safe_psql('postgres', join ';', q{SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscription},
		q{SELECT idempotency.reap(); DELETE FROM idempotency.outbox; TRUNCATE effect, batch; SELECT idempotency.subscribe('s', ARRAY['t'])}, @sql);
	return;
}

# says returns what a statement answers, or its SQLSTATE.
sub says
{
	my ($node, $sql) = @_;
	my ($rc, $stdout, $stderr) = $node->psql('postgres', $sql, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);

	return $rc == 0 ? $stdout : $stderr =~ s/.*ERROR:  (\w+).*/$1/sr;
}

# is_at waits until a process waits at a point: the one of that ID, or any.
sub is_at
{
	my ($node, $point, $pid) = @_;
	my $whose = defined $pid ? "pid = $pid" : 'true';

	$node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'idempotency-$point' AND $whose")
	  or die "nobody is at $point";
	return;
}

# stops_at runs SQL in a session that is stopped at a point, in which no other one
# is.  What it says comes with answer_of().
sub stops_at
{
	my ($node, $session, $point, $sql) = @_;
	my $pid = backend_pid($session);

	$session->query_safe("SELECT injection_points_set_local(), injection_points_attach('idempotency-$point', 'wait')");
	$session->query_until(qr/begun/, "\\echo begun\n$sql;\n");
	is_at($node, $point, $pid);
	return $pid;
}

# stop_at opens a session for that, and returns it and the ID of its backend.
sub stop_at
{
	my ($node, $point, $sql) = @_;
	my $session = open_session($node);

	return ($session, stops_at($node, $session, $point, $sql));
}

# wake lets whoever waits at a point go on, to be stopped there no more.
sub wake
{
	my ($node, $point) = @_;
	$node->safe_psql('postgres',
		"SELECT injection_points_detach('idempotency-$point'), injection_points_wakeup('idempotency-$point')");
	return;
}

# cancel cancels whatever a process does at a point, at which nobody is stopped any more.
# The wait there serves interrupts, unless our code stands where they are put off.
sub cancel
{
	my ($node, $pid, $point) = @_;
	$node->safe_psql('postgres', "SELECT injection_points_detach('idempotency-$point'), pg_cancel_backend($pid)");
	return;
}

# interrupt cancels or ends whoever waits at a point where that is not taken, and lets him
# go on when it is seen that he does not.
sub interrupt
{
	my ($node, $pid, $point, $what) = @_;

	$node->safe_psql('postgres', "SELECT pg_${what}_backend($pid), pg_sleep(0.1)");
	is_at($node, $point, $pid);
	wake($node, $point);
	return;
}

# answer_of returns what a session that was woken has said, or what it says to SQL,
# errors by their SQLSTATE, which come last.
sub answer_of
{
	my ($session, $sql) = @_;
	my $answer = $session->query($sql // "\\echo");
	my @states = $session->{stderr} =~ /ERROR:  (\w{5}):/g;

	$session->{stderr} = '';
	return join ' ', grep { length } split(/\s+/, $answer), @states;
}

# goes_on returns a function by which a session does some SQL, as its last, and which
# returns what is said.
sub goes_on
{
	my ($session) = @_;
	return sub {
		my $answer = answer_of($session, $_[0]);
		$session->quit;
		return $answer;
	};
}

# is_overtaken checks what is said where a session is stopped at a point and somebody
# gets between: [ SQL, answer ] of the other one, the id of an event left out;
# and the answer of the one who was stopped, once he goes on.
sub is_overtaken
{
	my ($node, $name, $sql, $point, $meanwhile, $says) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($session) = stop_at($node, $point, $sql);

	is(says($node, $meanwhile->[0]) =~ s/^\S{36}\n//r, $meanwhile->[1], "$name: meanwhile");
	wake($node, $point);
	is(answer_of($session), $says, "$name: who was stopped");
	$session->quit;
	return;
}

# is_cancelled cancels what a session does at a point, and checks that it is told so and
# has let go of everything, but of what the server keeps to the end of the transaction:
# its number, and the sequences that it has used.
sub is_cancelled
{
	my ($node, $session, $pid, $point, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	cancel($node, $pid, $point);
	is(answer_of($session), '57014', "$name: it is told so");
	is( $node->safe_psql('postgres', qq{SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype NOT IN ('virtualxid', 'transactionid')
			AND relation NOT IN (SELECT oid FROM pg_class WHERE relkind = 'S') IS NOT FALSE}), 0, "$name: it holds no lock");
	return;
}

# faults returns what may befall a session, by name: functions that are given the
# session that is stopped, its backend's ID, the point, what it does there, what that
# says, as it is or as a pattern, and the name of the test.  They return when the server
# is back, with a function by which it is done once more, by another session.
#
# Whoever is cancelled goes on: he does it once more, and takes that back; then he is
# cancelled in a savepoint, and does it once more in the same transaction.  What a mark
# names that is left of the savepoint would be said as well.
sub faults
{
	my ($node) = @_;
	my $another = sub { says($node, $_[0]) };

	return (
		'a cancel' => sub {
			my ($session, $pid, $point, $sql, $says, $name) = @_;
			is_cancelled($node, $session, $pid, $point, $name);
			like(answer_of($session, "BEGIN; $sql; ROLLBACK"), ref $says ? $says : qr/^\Q$says\E$/, "$name: it can do it");
			stops_at($node, $session, $point, "BEGIN; SAVEPOINT a; $sql");
			is_cancelled($node, $session, $pid, $point, "$name, in a savepoint");
			my $again = goes_on($session);
			return sub { $again->("ROLLBACK TO a; SELECT idempotency.current_key('s'); $_[0]; COMMIT") };
		},
		'the end of the backend' => sub {
			my ($session, $pid) = @_;
			$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 60000)");
			wait_for_end($session);
			return $another;
		},
		'kill -9 of the backend' => sub {
			my ($session, $pid) = @_;
			kill9($node, $pid);
			wait_for_end($session);
			return $another;
		},
		'kill -9 of the postmaster' => sub {
			my ($session) = @_;
			restart_after_kill9($node);
			wait_for_end($session);
			return $another;
		});
}

# late_faults returns what may befall a session behind the commit.  There a backend takes
# no interrupt, since the server puts them off from before the end in the list of running
# transactions until the locks are released.  It ends when it goes on; and a cancel comes
# too late for the statement, and hits none after it.
sub late_faults
{
	my ($node) = @_;
	my $another = sub { says($node, $_[0]) };

	return (
		faults($node),
		'a cancel' => sub {
			my ($session, $pid, $point, $sql, $says, $name) = @_;
			interrupt($node, $pid, $point, 'cancel');
			unlike(answer_of($session), qr/\b57014$/, "$name: it is not told so");
			return goes_on($session);
		},
		'the end of the backend' => sub {
			my ($session, $pid, $point) = @_;
			interrupt($node, $pid, $point, 'terminate');
			wait_for_end($session);
			return $another;
		},
		'kill -9 of the postmaster' => sub {
			my ($session, $pid) = @_;
			restart_after_kill9($node, $pid);
			wait_for_end($session);
			return $another;
		});
}

# worker_faults returns what may befall a worker, by name: functions that are given its
# ID, and the point at which it is stopped.
sub worker_faults
{
	my ($node) = @_;

	return (
		'a cancel' => sub { cancel($node, @_) },
		'kill -9 of the worker' => sub { kill9($node, $_[0]) },
		'kill -9 of the postmaster' => sub { restart_after_kill9($node) },
		'the end of the worker' => sub {
			my ($pid, $point) = @_;
			$node->safe_psql('postgres', "SELECT injection_points_detach('idempotency-$point'), pg_terminate_backend($pid)");
		},
		'nothing' => sub { wake($node, $_[1]) });
}

# late_worker_faults returns those of a worker that takes no interrupt there.
sub late_worker_faults
{
	my ($node) = @_;

	return (
		worker_faults($node),
		'a cancel' => sub { interrupt($node, @_, 'cancel') },
		'kill -9 of the postmaster' => sub { restart_after_kill9($node, $_[0]) },
		'the end of the worker' => sub { interrupt($node, @_, 'terminate') });
}

1;
