# Fuzz::Session
#
# A psql session that stays open. It sends hundreds of statements at once and reads the
# SQLSTATE of each; it discards results unless the caller asks for one. It dies if the
# server does not respond or the connection is lost.

package Fuzz::Session;

use strict;
use warnings FATAL => 'all';

use IO::Select;
use IPC::Open2;

# The limit for a statement: much longer than its statement_timeout.
my $patience = 180;

# new connects to a database. Texts are sent as escapes, so that psql does not depend on
# an encoding.
sub new
{
	my ($class, $dbname) = @_;
	local $ENV{PGCLIENTENCODING} = 'SQL_ASCII';
	my $pid = open2(my $out, my $in, "exec psql -X -q -A -t -d $dbname 2>/dev/null");
	my $self = bless { pid => $pid, in => $in, out => $out, rest => '', dbname => $dbname }, $class;

	binmode $_ foreach $in, $out;
	$self->{select} = IO::Select->new($out);
	$self->send("\\o /dev/null\n");
	return $self;
}

sub send
{
	my ($self, $text) = @_;
	local $SIG{PIPE} = 'IGNORE';

	print { $self->{in} } $text or die "the connection is lost\n";
	$self->{in}->flush or die "the connection is lost\n";
	return;
}

# line returns the next line of psql's output.
sub line
{
	my ($self) = @_;
	my $end;

	while (($end = index $self->{rest}, "\n") < 0)
	{
		$self->{select}->can_read($patience) or die "no answer for $patience seconds\n";
		sysread($self->{out}, $self->{rest}, 65536, length $self->{rest}) or die "the connection is lost\n";
	}
	return substr substr($self->{rest}, 0, $end + 1, ''), 0, $end;
}

# run runs statements, and returns the SQLSTATE of each.
sub run
{
	my ($self, @statements) = @_;

	$self->send(join '', map { "$_;\n\\echo :SQLSTATE\n" } @statements);
	return map { $self->line } @statements;
}

# ok runs statements that must succeed.
sub ok
{
	my ($self, @statements) = @_;

	foreach my $statement (@statements)
	{
		my ($state) = $self->run($statement);
		die "$state: " . $self->message . " in: $statement\n" if $state ne '00000';
	}
	return;
}

# ask returns the result of a query, lines and columns as psql prints them, without the
# last newline; the SQLSTATE is in $self->{state}.
sub ask
{
	my ($self, $query) = @_;
	my @lines;

	$self->send("\\o\n$query;\n\\echo\n\\echo end of answer :SQLSTATE\n\\o /dev/null\n");
	until (@lines && $lines[-1] =~ /^end of answer (\w+)$/)
	{
		push @lines, $self->line;
	}
	$lines[-1] =~ /(\w+)$/;
	$self->{state} = $1;
	splice @lines, -2;
	return join "\n", @lines;
}

# tell returns the result of a query that must succeed.
sub tell
{
	my ($self, $query) = @_;
	my $answer = $self->ask($query);

	die "$self->{state}: " . $self->message . " in: $query\n" if $self->{state} ne '00000';
	return $answer;
}

# message returns the text of the last error.
sub message
{
	my ($self) = @_;
	my $text = '';

	$self->send("\\echo :LAST_ERROR_MESSAGE\n\\echo end of message\n");
	while ((my $line = $self->line) ne 'end of message')
	{
		$text .= $text eq '' ? $line : " $line";
	}
	return length $text > 300 ? substr($text, 0, 300) . '...' : $text;
}

sub quit
{
	my ($self) = @_;

	close $self->{in};
	close $self->{out};
	waitpid $self->{pid}, 0;
	return;
}

1;
