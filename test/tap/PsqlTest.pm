# PsqlTest.pm
#
# Makes calls of psql cheap: a TAP script makes hundreds, and most of the processor time
# of such a call starts the program. One psql per script stays, and connects for each
# call, so that every call still has its own session. A psql that fails ends, as always,
# and the next call starts another one. IdempotencyTest.pm uses this file.

package PsqlTest;

use strict;
use warnings FATAL => 'all';
no warnings 'redefine';

use IO::Select;
use IO::Socket::UNIX;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils ();
use Test::More;
use Time::HiRes qw(time usleep);

my $ipc_run = \&IPC::Run::run;

# The psql that stays: its harness and streams, the environment of libpq, and the process
# that has started it.
my ($run, $in, $out, $err, $environment, $owner);
my $marks = 0;

# Where psql is connected between the calls: a socket of this script.
my $nowhere = PostgreSQL::Test::Utils::tempdir_short();
my $listener = IO::Socket::UNIX->new(Local => "$nowhere/.s.PGSQL.1", Listen => 1) or die "$nowhere: $!";
my $select = IO::Select->new($listener);
my $idle;

# environment returns what psql reads from the environment.
sub environment
{
	return join "\0", map { "$_=$ENV{$_}" } grep { /^(?:PG|LD_|LC_|LANG|TZ)/ && !/^PG(?:HOST|PORT)$/ } sort keys %ENV;
}

# script_of returns what the psql that stays must read for a call: the connection string
# and the script; and the status of the call if its last statement fails. Returns nothing
# for a call with commands of psql other than \echo, or data on stdin, which can leave
# something behind; with options or streams that Cluster.pm does not use; or with a name
# that \connect changes.
sub script_of
{
	my ($command, @streams) = @_;
	return unless ref $command eq 'ARRAY' && @streams == 6 && "@streams[0, 2, 4]" eq '< > 2>' && 3 == grep { ref eq 'SCALAR' } @streams;
	my ($psql, $format, $d, $connection, $f, $stdin, @options) = @$command;
	my $sql = ${ $streams[1] };
	my %set = (ON_ERROR_STOP => 0, ON_ERROR_ROLLBACK => 'off', VERBOSITY => 'default');

	return unless defined $stdin && "$format $d $f $stdin" eq '-XAtq -d -f -' && $psql =~ /psql$/;
	return unless defined $sql && $sql =~ s/^\\echo \w+$//gmr !~ /\\|\bSTDIN\b/i;
	while (my ($option, $value) = splice @options, 0, 2)
	{
		if ($option =~ /^(?:-U|--username)$/ && $value =~ /^\w+$/) { $connection .= " user=$value" }
		elsif ($option eq '-d') { $connection = $value }
		elsif ($option eq '-v' && $value =~ /^(\w+)=(\w+)$/ && exists $set{$1}) { $set{$1} = $2 }
		else { return }
	}

	# After a single statement, psql does not have to end at an error.
	my $failed = 0;
	($failed, $set{ON_ERROR_STOP}) = (3 << 8, 0) if $set{ON_ERROR_STOP} && $sql !~ /;\s*\S|\\/;
	return ($connection, join('', map { "\\set $_ $set{$_}\n" } sort keys %set) . "$sql\n;\n", $failed) unless $connection =~ /["\\]/;
	return;
}

# reads makes psql read lines and then print a mark, and returns what psql has printed
# before on stdout and stderr, and whether the last statement failed, or nothing if psql
# has ended.
sub reads
{
	my ($lines, $accept) = @_;
	my $mark = 'psql: ' . ++$marks;
	local $SIG{PIPE} = 'IGNORE';

	$in .= "$lines\\echo $mark :ERROR\n\\warn $mark\n";
	return unless eval {
		if ($accept)
		{
			$run->pump_nb until $select->can_read(0.001);
			$accept->();
		}
		$run->pump until $out =~ /^$mark \S+\n\z/m && $err =~ /^$mark\n\z/m;
		1;
	};
	my @printed = ($out =~ s/^$mark \S+\n\z//mr, $err =~ s/^$mark\n\z//mr, scalar($out =~ /^$mark true\n\z/m));
	($out, $err) = ('', '');
	return @printed;
}

# accept_idle makes a connection of psql succeed: the server says AuthenticationOk and
# ReadyForQuery.
sub accept_idle
{
	$idle = $listener->accept or die $!;
	sysread $idle, my $startup, 10_000;
	syswrite $idle, pack 'a N N a N a', 'R', 8, 0, 'Z', 5, 'I';
	return;
}

# run replaces IPC::Run::run, with which Cluster.pm calls psql. If there is no connection,
# the real one reports it.
sub run
{
	my ($connection, $script, $failed) = script_of(@_) or goto &$ipc_run;
	my ($command, undef, undef, undef, $stdout, undef, $stderr) = @_;
	my $connect = "\\set ON_ERROR_STOP 1\n";

	if ($run && $owner == $$ && $environment eq environment())
	{
		$connect .= "\\connect '" . ($connection =~ s/'/''/gr) . "'\n";
	}
	else
	{
		($in, $out, $err, $environment, $owner) = ('', '', '', environment(), $$);
		$run = IPC::Run::start([ $command->[0], '-XAtq', '-d', $connection, '-f', '-' ], '<', \$in, '>', \$out, '2>', \$err);
	}
	my $connected = reads($connect);
	my @printed = reads($script) if $connected;
	my $status = 0;
	if (!@printed)
	{
		my $harness = $run;
		undef $run;
		eval { $harness->finish };
		goto &$ipc_run unless $connected;
		@printed = ($out, $err);
		$status = $harness->full_result(0);
	}
	else
	{
		$status = $failed if pop @printed;
		reads("\\connect 'host=$nowhere port=1'\n", \&accept_idle);
	}
	($$stdout, $$stderr) = @printed;
	$? = $status;
	return $status == 0;
}
*IPC::Run::run = \&run;

# poll_query_until replaces that of Cluster.pm, which starts a psql for each attempt: after
# the first one, one session repeats the query, each time in its own transaction. Another
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
