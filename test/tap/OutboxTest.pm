# OutboxTest.pm
#
# What the TAP tests of the outbox share: consumers in PL/pgSQL, clusters whose
# transaction ids begin elsewhere, and what it takes to outlive a crash.  The
# runner puts this directory into @INC.

package OutboxTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(outbox_tools drained publish set_next_xid backend_pid
  wait_for_end wait_until_up kill9 restart_after_kill9);

# outbox_tools makes the consumer that the tests use: drain() gives a table what
# fetch() gives, and acknowledges it, batch by batch until there is nothing more,
# each step in a transaction of its own.
sub outbox_tools
{
	my ($node, $dbname) = @_;
	$node->safe_psql($dbname // 'postgres', q{
		CREATE TABLE got (place int8 GENERATED ALWAYS AS IDENTITY, subscription text, batch int8,
			seq int8, id uuid, n int, attempt int);
		CREATE PROCEDURE drain(name text, max_events int DEFAULT 100) LANGUAGE plpgsql AS $$
		DECLARE
			given int8;
		BEGIN
			LOOP
				WITH event AS MATERIALIZED (SELECT * FROM idempotency.fetch(name, max_events)),
					noted AS (INSERT INTO got (subscription, batch, seq, id, n, attempt)
						SELECT name, batch, seq, id, (payload->>'n')::int, attempt FROM event)
				SELECT max(batch) INTO given FROM event;
				EXIT WHEN given IS NULL;
				COMMIT;
				PERFORM idempotency.ack(name, given);
				COMMIT;
			END LOOP;
		END $$});
	return;
}

# drained drains subscriptions, and returns a reference to a hash: for each the
# "n" of its events in the order in which they came, followed by the attempt if
# it was not the first: '1 2 3x2'.
sub drained
{
	my ($node, $dbname, $max, @subscriptions) = @_;
	my $calls = join ' ', map { "CALL drain('$_', $max);" } @subscriptions;
	my %got = map { $_ => '' } @subscriptions;

	foreach (split /\n/, $node->safe_psql($dbname, qq{TRUNCATE got; $calls
		SELECT subscription, string_agg(n || CASE WHEN attempt > 1 THEN 'x' || attempt ELSE '' END, ' ' ORDER BY place)
		FROM got GROUP BY subscription}))
	{
		my ($subscription, $events) = split /\|/;
		$got{$subscription} = $events;
	}
	return \%got;
}

# publish returns the SQL that publishes the event with that "n".
sub publish
{
	my ($n, $topic, $aggregate) = @_;
	my $about = defined $aggregate ? ", '$aggregate'" : '';
	$topic //= 't';
	return qq[SELECT idempotency.publish('$topic', '{"n": $n}'$about); ];
}

# set_next_xid lets the next transaction of a stopped cluster have that id.
sub set_next_xid
{
	my ($node, $epoch, $xid) = @_;
	my $segment = sprintf '%s/pg_xact/%04X', $node->data_dir, int($xid / 1048576);

	# The server wants to find what became of the transactions just before.
	append_to_file($segment, "\0" x (262144 - (-s $segment // 0)));
	system_or_bail($node->installed_command('pg_resetwal'),
		'-e', $epoch, '-x', $xid, '-D', $node->data_dir);
	return;
}

# backend_pid returns the process ID of a session's backend.
sub backend_pid
{
	my ($session) = @_;
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$pid =~ s/\D//g;
	return $pid;
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

# wait_until_up waits for the end of a recovery.  (psql dies of what it is sent if
# it is turned away before it has read it.)
sub wait_until_up
{
	my ($node) = @_;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if (eval { $node->psql('postgres', 'SELECT 1') } // -1) == 0;
		usleep(100_000);
	}
	die 'the server did not recover';
}

# kill9 kills backends of a server that restarts after a crash, and returns when it has
# recovered.  It knows of a crash when it has buried the process; there is none if one has
# just ended by itself.
sub kill9
{
	my ($node, @pids) = @_;

	kill 9, @pids;
	foreach my $pid (@pids)
	{
		usleep(10_000) while kill 0, $pid;
	}
	wait_until_up($node);
	return;
}

# restart_after_kill9 kills the postmaster, and starts the server again as soon
# as its backends have let go of the shared memory.  With it are killed processes that
# are stopped at a point where our code does not sleep: it is the wait at the point, and
# nothing else, that would find the postmaster gone there.
sub restart_after_kill9
{
	my ($node, @pids) = @_;
	my $postmaster = slurp_file($node->data_dir . '/postmaster.pid') =~ s/\n.*//sr;

	kill 'STOP', @pids;
	$node->kill9;
	kill 9, @pids;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if !kill(0, $postmaster) && $node->start(fail_ok => 1);
		$node->{_pid} = undef;
		usleep(100_000);
	}
	die 'the server did not start';
}

1;
