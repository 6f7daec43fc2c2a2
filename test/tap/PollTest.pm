# PollTest.pm
#
# Replaces poll_query_until of PostgreSQL::Test::Cluster, which starts a psql every 100 ms:
# the scripts wait for minutes in all, and most of the processor time of a short query
# starts the program. IdempotencyTest.pm uses this file.

package PollTest;

use strict;
use warnings FATAL => 'all';
no warnings 'redefine';

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

# After the first attempt, one session repeats the query, each time in its own transaction. Another
# session follows if the server ends it. Returns 0 after the timeout.
sub poll_query_until
{
	my ($self, $dbname, $query, $expected) = @_;
	my ($session, $stdout, $stderr);
	my $pause = 10_000;

	$expected //= 't';
	for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end; usleep($pause))
	{
		my $first = !defined $stdout;
		$pause = 1.5 * $pause if $pause < 50_000;
		local $SIG{PIPE} = 'IGNORE';

		# No notes of each attempt: they took a third of the time of a script that waits.
		local *PostgreSQL::Test::BackgroundPsql::note = sub { };
		local *PostgreSQL::Test::BackgroundPsql::explain = sub { };
		eval {
			if ($first)
			{
				(undef, $stdout, $stderr) = $self->psql($dbname, $query);
			}
			else
			{
				$session //= $self->background_psql($dbname, on_error_stop => 0);
				$session->set_query_timer_restart();
				$session->{stderr} = '';
				$stdout = $session->query($query);
				$stderr = $session->{stderr};
			}
			1;
		} or do
		{
			($stdout, $stderr) = ('', $@);
			eval { $session->{run}->kill_kill } if $session;
			undef $session;
			next;
		};
		if ($stdout eq $expected && $stderr eq '')
		{
			$session->quit if $session;
			return 1;
		}
	}
	diag("poll_query_until timed out: $query\nexpected: $expected\nlast output: $stdout\n$stderr");
	$session->quit if $session;
	return 0;
}
*PostgreSQL::Test::Cluster::poll_query_until = \&poll_query_until;

1;
