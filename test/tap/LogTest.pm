# LogTest.pm
#
# What the TAP tests of the background workers share: what the log of their server has
# got, and whether it would alarm anybody.  The runner puts this directory into @INC.

package LogTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw($alarm $too_late watch_log log_since log_comes log_waiting sent visits is_quiet);

# What a log has got where all is well does not match this.
our $alarm = qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  (?:background worker|subscription|(?!parameter).*idempotency)/;

# What alarms nobody where databases are dropped or closed: a reaper that was sent there
# before, and found no way in.
our $too_late = qr/LOG:  background worker "idempotency reaper" \(PID \d+\) exited with exit code 1/;

my $node;
my $log_from; # where the log begins that was not looked at yet

# watch_log says whose log is looked at, from now on.
sub watch_log
{
	($node) = @_;
	$log_from = -s $node->logfile;
	return;
}

# log_waiting returns what was not looked at yet, and leaves it so.
sub log_waiting
{
	return slurp_file($node->logfile, $log_from);
}

# log_since returns what the log has got since it was looked at last.
sub log_since
{
	my $log = log_waiting();
	$log_from += length $log;
	return $log;
}

# log_comes waits for a line in the part of the log that was not looked at yet.
sub log_comes
{
	my ($pattern, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return ok($node->wait_for_log($pattern, $log_from), $name);
}

# sent returns how many reapers have been sent to a database since a point in the log,
# which a server says at debug1.
sub sent
{
	my ($at, $oid, $from) = @_;
	return scalar(() = slurp_file($at->logfile, $from) =~ /starting background worker process "idempotency reaper for database $oid"/g);
}

# visits waits until so many reapers have been sent to a database from now on, and the
# last but one has left.  Returns where the log began.
sub visits
{
	my ($count, $at, $dbname) = @_;
	$at //= $node;
	my $oid = $at->safe_psql($dbname // 'postgres', 'SELECT oid FROM pg_database WHERE datname = current_database()');
	my $from = -s $at->logfile;
	my $sent = 0;
	foreach (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
	{
		$sent = sent($at, $oid, $from);
		return $from if $sent > $count;
		usleep(10_000);
	}
	die "$sent visits instead of $count";
}

# is_quiet checks that the log has got nothing that would alarm anybody, but what the
# pattern allows.
sub is_quiet
{
	my ($name, $allowed) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @alarms = grep { $_ =~ $alarm } split /\n/, log_since();

	@alarms = grep { $_ !~ $allowed } @alarms if defined $allowed;
	is(scalar(@alarms), 0, "$name: the log is quiet") or diag(join "\n", @alarms);
}

1;
