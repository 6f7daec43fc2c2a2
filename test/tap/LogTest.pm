# LogTest.pm
#
# Helpers for tests of the background workers: reading the server's log, and checking
# that it has no unexpected warning or error. The runner puts this directory into @INC.

package LogTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw($unexpected $too_late watch_log log_since log_comes log_unread reaper_starts wait_for_reapers is_quiet worker_pid expire_keys without_reaper);

# A clean log does not match this.
our $unexpected = qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  (?:background worker|subscription|(?!parameter|idempotency\.\w+\(\) by role).*idempotency)/;

# Expected where databases are dropped or closed: a reaper was started for the database
# before, and cannot connect.
our $too_late = qr/LOG:  background worker "idempotency reaper" \(PID \d+\) exited with exit code 1/;

my $node;
my $log_from; # offset of the unread part of the log

# watch_log sets the server whose log is read from now on.
sub watch_log
{
	($node) = @_;
	$log_from = -s $node->logfile;
	return;
}

# log_unread returns the unread part of the log and leaves it unread.
sub log_unread
{
	return slurp_file($node->logfile, $log_from);
}

# log_since returns the unread part of the log and marks it as read.
sub log_since
{
	my $log = log_unread();
	$log_from += length $log;
	return $log;
}

# log_comes waits for a line in the unread part of the log.
sub log_comes
{
	my ($pattern, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return ok($node->wait_for_log($pattern, $log_from), $name);
}

# reaper_starts returns how many reapers were started for a database since an offset in
# the log, which the server logs at debug1.
sub reaper_starts
{
	my ($at, $oid, $from) = @_;
	return scalar(() = slurp_file($at->logfile, $from) =~ /starting background worker process "idempotency reaper for database $oid"/g);
}

our $keeps_awake = 0;

# wait_for_reapers waits until so many reapers were started for a database from now on,
# and the last but one has exited. Returns the offset where the log began. With $keeps_awake,
# calls of new sessions keep the default database from being quiet, and thus visited rarely.
sub wait_for_reapers
{
	my ($count, $at, $dbname) = @_;
	$at //= $node;
	my $oid = $at->safe_psql($dbname // 'postgres', 'SELECT oid FROM pg_database WHERE datname = current_database()');
	my $from = -s $at->logfile;
	my ($read, $sent) = ($from, 0);
	foreach (1 .. 50 * $PostgreSQL::Test::Utils::timeout_default)
	{
		# Only what is new, up to the end of a line.
		my $new = slurp_file($at->logfile, $read) =~ s/[^\n]*\z//r;
		$read += length $new;
		$sent += () = $new =~ /starting background worker process "idempotency reaper for database $oid"/g;
		return $from if $sent > $count;
		usleep(20_000);
		$at->safe_psql('postgres', q{SELECT idempotency.peek('no', 'key')}) if $keeps_awake && !defined $dbname && $_ % 10 == 0;
	}
	die "$sent reapers instead of $count";
}

# is_quiet checks that the unread part of the log has no warning or error but those that
# the pattern allows.
sub is_quiet
{
	my ($name, $allowed) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @unexpected = grep { $_ =~ $unexpected } split /\n/, log_since();

	@unexpected = grep { $_ !~ $allowed } @unexpected if defined $allowed;
	is(scalar(@unexpected), 0, "$name: the log has no unexpected message") or diag(join "\n", @unexpected);
}

# worker_pid waits for a process and returns its ID.
sub worker_pid
{
	my ($node, $type, $and) = @_;
	$and = defined $and ? "AND $and" : '';
	for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end; usleep(10_000))
	{
		my $pid = $node->safe_psql('postgres', "SELECT min(pid) FROM pg_stat_activity WHERE backend_type = '$type' $and");
		return $pid if $pid;
	}
	die "there is no $type";
}

# expire_keys stores so many inbox records that have expired.
sub expire_keys
{
	my ($node, $rows, $prefix, $dbname) = @_;
	return $node->safe_psql($dbname // 'postgres', qq{SELECT count(*) FROM idempotency.once_many('expired',
		array(SELECT '$prefix' || i FROM generate_series(1, $rows) AS i), '1 microsecond')});
}

# without_reaper disables the reaper at the next start of the stopped server, so that the
# remaining rows can be counted.
sub without_reaper
{
	return $node->adjust_conf('postgresql.auto.conf', 'idempotency.reaper_naptime', 0);
}

1;
