# ClockTest.pm
#
# Starts servers with a clock that the test sets, by clock.c. The runner puts this directory
# into @INC.

package ClockTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Basename;
use PostgreSQL::Test::Utils;

our @EXPORT = qw(start_with_clock write_clock set_clock);

my $clock = PostgreSQL::Test::Utils::tempdir . '/clock';
my $library = "$clock.so";
system_or_bail('cc', '-shared', '-fPIC', '-o', $library, dirname(__FILE__) . '/clock.c');
append_to_file($clock, pack 'q2', 0, 0);

# start_with_clock starts a server with the clock. Only the server has it, not the programs that
# connect to it.
sub start_with_clock
{
	my ($node) = @_;
	local %ENV = (%ENV,
		LD_PRELOAD => join(' ', grep { defined } $library, $ENV{LD_PRELOAD}),
		CLOCK_FILE => $clock);
	$node->start;
	return;
}

# write_clock writes the two numbers of the clock, in place.
sub write_clock
{
	my ($offset, $standstill) = @_;
	open my $file, '+<:raw', $clock or die "$clock: $!";
	syswrite($file, pack 'q2', $offset, $standstill) == 16 or die "$clock: $!";
	close $file;
	return;
}

# set_clock sets the clock to an offset in seconds from the true time.
sub set_clock
{
	my ($seconds) = @_;
	write_clock($seconds, 0);
	return;
}

1;
