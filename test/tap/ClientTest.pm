# ClientTest.pm
#
# Replaces psql() and poll_query_until() of PostgreSQL::Test::Cluster: they start the program
# psql for each call, which takes two thirds of the processor time of a short query, and the
# scripts make thousands of calls. Here each call has a new session too, but the script itself
# sends the statements, and prints what `psql -XAtq` would. psql still runs what this file does
# not understand: commands of psql, other options, COPY FROM STDIN, and errors of a connection.
# IdempotencyTest.pm uses this file.

package ClientTest;

use strict;
use warnings FATAL => 'all';
no warnings 'redefine';

use IO::Socket::UNIX;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

my $program = \&PostgreSQL::Test::Cluster::psql;

# connect_as starts a session, and adds the notices of the login to a text. Returns nothing if the
# server does not accept it at once.
sub connect_as
{
	my ($node, $dbname, $user, $notices) = @_;
	my %startup = (user => $user // $ENV{PGUSER} // scalar(getpwuid $<), database => $dbname,
		application_name => $ENV{PGAPPNAME} // 'psql', options => $ENV{PGOPTIONS} // '');
	my $socket = IO::Socket::UNIX->new(Peer => $node->host . '/.s.PGSQL.' . $node->port) or return;
	my $body = pack('N', 3 << 16) . join('', map { "$_\0$startup{$_}\0" } keys %startup) . "\0";

	syswrite $socket, pack('N', 4 + length $body) . $body;
	while (my ($type, $content) = message($socket))
	{
		return $socket if $type eq 'Z';
		$$notices .= report($content) if $type eq 'N' && $notices;
		return if $type eq 'E' || $type eq 'R' && unpack('N', $content) != 0;
	}
	return;
}

# message returns type and content of the server's next message, or nothing at the end.
sub message
{
	my ($socket) = @_;
	(read($socket, my $head, 5) // 0) == 5 or return;
	my ($type, $length) = unpack 'aN', $head;
	my $content = '';
	(read($socket, $content, $length - 4) // 0) == $length - 4 or return;
	return ($type, $content);
}

# report returns an error or a notice as psql prints it.
sub report
{
	my ($content, $verbose) = @_;
	my %field = map { substr($_, 0, 1) => substr $_, 1 } split /\0/, $content;
	my $text = "psql:<stdin>:1: $field{S}:  " . ($verbose ? "$field{C}: " : '') . "$field{M}\n";

	$text .= "DETAIL:  $field{D}\n" if defined $field{D};
	$text .= "HINT:  $field{H}\n" if defined $field{H};
	$text .= "CONTEXT:  $field{W}\n" if defined $field{W} && ($verbose || $field{S} !~ /^(?:NOTICE|INFO|WARNING|DEBUG|LOG)/);
	return $text;
}

# statement executes one statement. Returns psql's exit code for it, its output and errors. A
# failed statement has no rows.
sub statement
{
	my ($socket, $sql, $verbose) = @_;
	my ($rc, $out, $rows, $err) = (0, '', '', '');

	syswrite $socket, 'Q' . pack('N', 5 + length $sql) . "$sql\0";
	while (my ($type, $content) = message($socket))
	{
		return ($rc, $out . ($rc ? '' : $rows), $err) if $type eq 'Z';
		if ($type eq 'D')
		{
			my ($at, @values) = (2);
			foreach (1 .. unpack 'n', $content)
			{
				my $length = unpack 'l>', substr $content, $at, 4;
				$length = 0 if $length < 0; # null
				push @values, substr $content, $at + 4, $length;
				$at += 4 + $length;
			}
			$rows .= join('|', @values) . "\n" if @values;
		}
		$out .= $content if $type eq 'd';
		$err .= report($content, $verbose) if $type eq 'E' || $type eq 'N';
		$rc = 3 if $type eq 'E';
	}
	return (2, $out, "${err}psql:<stdin>:1: server closed the connection unexpectedly\npsql:<stdin>:1: error: connection to server was lost\n");
}

# statements splits SQL as psql does. Returns nothing if psql itself must run it.
sub statements
{
	my ($sql) = @_;
	my @parts = ('');

	return if !defined $sql || utf8::is_utf8($sql) || $sql =~ m{\\|/\*|\bBEGIN\s+ATOMIC\b|\bSTDIN\b|\bLISTEN\b|\bRULE\b}i;
	while ($sql =~ /\G('[^']*'|"[^"]*"|\$(\w*)\$.*?\$\2\$|--[^\n]*|;|[^-;'"\$]+|.)/gs)
	{
		if ($1 eq ';') { push @parts, '' } elsif ($1 !~ /^--/) { $parts[-1] .= $1 }
	}
	return map { s/^\s+|\s+$//gr } grep { /\S/ } @parts;
}

# psql replaces the function of Cluster.pm, with the same arguments and results.
sub psql
{
	my ($self, $dbname, $sql, %params) = @_;
	my @options = @{ $params{extra_params} // [] };
	my ($user, $verbose);

	while (@options >= 2 && "@options[0, 1]" =~ /^(?:-U|--username) (.+)|^-v VERBOSITY=(verbose)$/)
	{
		($user, $verbose) = ($1 // $user, $2 // $verbose);
		splice @options, 0, 2;
	}
	my @parts = @options || !defined $dbname || grep({ defined $params{$_} } qw(connstr replication timeout)) ? () : statements($sql);
	local $SIG{PIPE} = 'IGNORE';
	my $notices = '';
	my $socket = @parts ? connect_as($self, $dbname, $user, \$notices) : undef;
	return $program->(@_) unless $socket;

	my ($rc, $stdout, $stderr) = (0, '', $notices);
	foreach my $part (@parts)
	{
		my ($code, $out, $err) = statement($socket, $part, $verbose);
		$stdout .= $out;
		$stderr .= $err;
		$rc = $code if $code == 2 || $code && ($params{on_error_stop} // 1);
		last if $rc;
	}
	finish($socket);
	chomp($stdout, $stderr);
	${ $params{stdout} } = $stdout if $params{stdout};
	${ $params{stderr} } = $stderr if $params{stderr};
	die "error running SQL: '$stderr'\nwith sql '$sql'" if $rc && $params{on_error_die};
	return wantarray ? ($rc, $stdout, $stderr) : $rc;
}

# finish ends a session, and waits until its process has ended.
sub finish
{
	my ($socket) = @_;
	syswrite $socket, 'X' . pack 'N', 4;
	1 while read $socket, my $rest, 1;
	close $socket;
	return;
}

# poll_query_until replaces the function of Cluster.pm. One session repeats the query, each time in its own
# transaction. Another session follows if the server ends it. Returns 0 after the timeout.
sub poll_query_until
{
	my ($self, $dbname, $query, $expected) = @_;
	my ($socket, $rc, $stdout, $stderr);
	my $pause = 10_000;

	$expected //= 't';
	local $SIG{PIPE} = 'IGNORE';
	for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end; usleep($pause))
	{
		$pause = 1.5 * $pause if $pause < 50_000;
		if (!$socket)
		{
			$socket = connect_as($self, $dbname) // next;
			statement($socket, 'SET statement_timeout = ' . 1000 * $PostgreSQL::Test::Utils::timeout_default);
		}
		($rc, $stdout, $stderr) = statement($socket, $query);
		undef $socket if $rc == 2;
		chomp $stdout;
		next unless $stdout eq $expected && $stderr eq '';
		finish($socket);
		return 1;
	}
	diag("poll_query_until timed out: $query\nexpected: $expected\nlast output: " . ($stdout // '') . "\n" . ($stderr // ''));
	return 0;
}

{
	no strict 'refs';
	*{"PostgreSQL::Test::Cluster::$_"} = \&{$_} foreach qw(psql poll_query_until);
}

1;
