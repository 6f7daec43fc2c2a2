# InjectionTest.pm
#
# Helpers for tests that stop the library between two steps. These tests need a server
# with injection points, as `make sanitize KIND=injection` builds it. On another server
# they skip, or fail if INJECTION_POINTS is set. The runner puts this directory into
# @INC.

package InjectionTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(injection_node begin_events result_of is_at stop_at wake cancel answer_of faults late_faults);

# injection_node creates a server as new_node() does, or skips the whole script.
sub injection_node
{
	my ($name, %opt) = @_;
	if (!check_pg_config('#define USE_INJECTION_POINTS 1'))
	{
		die 'the server is built without injection points' if $ENV{INJECTION_POINTS};
		plan skip_all => 'the server is built without injection points, see test/servers/sanitize/README.md';
	}

	# Cluster.pm disables restart_after_crash.
	my $node = new_node($name, %opt, conf => "restart_after_crash = on\n" . ($opt{conf} // ''));
	$node->safe_psql('postgres', 'CREATE EXTENSION injection_points');
	return $node;
}

# begin_events recreates the subscription s without events, then runs SQL. The DELETE is
# needed because reap() skips the events if another process locks the tables.
sub begin_events
{
	my ($node, @sql) = @_;
	$node->safe_psql('postgres', join ';', q{SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscription},
		q{SELECT idempotency.reap(); DELETE FROM idempotency.outbox; SELECT idempotency.subscribe('s', ARRAY['t'])}, @sql);
	return;
}

# result_of returns the result of a statement, or its SQLSTATE.
sub result_of
{
	my ($node, $sql) = @_;
	my ($rc, $stdout, $stderr) = $node->psql('postgres', $sql, extra_params => [ '-v', 'VERBOSITY=sqlstate' ]);

	return $rc == 0 ? $stdout : $stderr =~ s/.*ERROR:  (\w+).*/$1/sr;
}

# is_at waits until a process waits at a point: the process with that ID, or any
# process.
sub is_at
{
	my ($node, $point, $pid) = @_;
	my $whose = defined $pid ? "pid = $pid" : 'true';

	$node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'idempotency-$point' AND $whose")
	  or die "no process waits at $point";
	return;
}

# stops_at runs SQL in a session and returns once the session waits at a point, where no
# other process waits. answer_of() returns the result.
sub stops_at
{
	my ($node, $session, $point, $sql) = @_;
	my $pid = backend_pid($session);

	$session->query_safe("SELECT injection_points_set_local(), injection_points_attach('idempotency-$point', 'wait')");
	$session->query_until(qr/begun/, "\\echo begun\n$sql;\n");
	is_at($node, $point, $pid);
	return $pid;
}

# stop_at does so in a new session; returns the session and the process ID of its
# backend.
sub stop_at
{
	my ($node, $point, $sql) = @_;
	my $session = open_session($node);

	return ($session, stops_at($node, $session, $point, $sql));
}

# wake lets the processes that wait at a point continue, and removes the point.
sub wake
{
	my ($node, $point) = @_;
	$node->safe_psql('postgres',
		"SELECT injection_points_detach('idempotency-$point'), injection_points_wakeup('idempotency-$point')");
	return;
}

# cancel removes a point and cancels the process that waits there. The wait handles
# interrupts unless the library holds them off at the point.
sub cancel
{
	my ($node, $pid, $point) = @_;
	$node->safe_psql('postgres', "SELECT injection_points_detach('idempotency-$point'), pg_cancel_backend($pid)");
	return;
}

# interrupt cancels or terminates a process at a point that holds off interrupts. It
# checks that the process still waits, then lets the process continue.
sub interrupt
{
	my ($node, $pid, $point, $what) = @_;

	$node->safe_psql('postgres', "SELECT pg_${what}_backend($pid), pg_sleep(0.1)");
	is_at($node, $point, $pid);
	wake($node, $point);
	return;
}

# answer_of returns the output of a session that was woken, or the result of SQL in that
# session. SQLSTATEs of errors come last.
sub answer_of
{
	my ($session, $sql) = @_;
	my $answer = $session->query($sql // "\\echo");
	my @states = $session->{stderr} =~ /ERROR:  (\w{5}):/g;

	$session->{stderr} = '';
	return join ' ', grep { length } split(/\s+/, $answer), @states;
}

# last_statement returns a function that runs SQL in the session, ends the session, and
# returns the result.
sub last_statement
{
	my ($session) = @_;
	return sub {
		my $answer = answer_of($session, $_[0]);
		$session->quit;
		return $answer;
	};
}

# is_cancelled cancels a session at a point. It checks that the session reports the
# cancel and has released all locks. Excluded are the locks that the server keeps to the
# end of the transaction: the transaction ID and the sequences in use.
sub is_cancelled
{
	my ($node, $session, $pid, $point, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	cancel($node, $pid, $point);
	is(answer_of($session), '57014', "$name: the statement is cancelled");
	is( $node->safe_psql('postgres', qq{SELECT count(*) FROM pg_locks WHERE pid = $pid AND locktype NOT IN ('virtualxid', 'transactionid')
			AND relation NOT IN (SELECT oid FROM pg_class WHERE relkind = 'S') IS NOT FALSE}), 0, "$name: the session holds no lock");
	return;
}

# faults returns the faults of a session by name, as functions. Their arguments are: the
# stopped session, the process ID of its backend, the point, the statement that is
# stopped, its result (a string or a pattern), and the name of the test. A fault returns
# when the server is available, with a function that repeats a statement in another
# session.
#
# After a cancel the same session repeats the statement and rolls it back. The session
# is then cancelled in a savepoint, and repeats the statement in the same transaction.
# current_key() reports a mark that the savepoint left behind.
sub faults
{
	my ($node) = @_;
	my $another = sub { result_of($node, $_[0]) };

	return (
		'a cancel' => sub {
			my ($session, $pid, $point, $sql, $result, $name) = @_;
			is_cancelled($node, $session, $pid, $point, $name);
			like(answer_of($session, "BEGIN; $sql; ROLLBACK"), ref $result ? $result : qr/^\Q$result\E$/, "$name: the session repeats the statement");
			stops_at($node, $session, $point, "BEGIN; SAVEPOINT a; $sql");
			is_cancelled($node, $session, $pid, $point, "$name, in a savepoint");
			my $again = last_statement($session);
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

# late_faults returns the faults of a session after its commit. There a backend handles
# no interrupt: the server holds interrupts off from before the transaction leaves the
# list of running transactions until its locks are released. A termination takes effect
# when the session continues. A cancel comes too late for the statement and does not
# affect the next one.
sub late_faults
{
	my ($node) = @_;
	my $another = sub { result_of($node, $_[0]) };

	return (
		faults($node),
		'a cancel' => sub {
			my ($session, $pid, $point, $sql, $result, $name) = @_;
			interrupt($node, $pid, $point, 'cancel');
			unlike(answer_of($session), qr/\b57014$/, "$name: the statement is not cancelled");
			return last_statement($session);
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

1;
