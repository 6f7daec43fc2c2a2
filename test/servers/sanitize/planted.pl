# planted.pl
#
# Makes an error of planted.c in a server started like those of the TAP tests.
# test/servers/sanitize/run puts this file beside the TAP tests, names the error in PLANTED, and
# searches for the report.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use Test::More;

my $node = new_node('planted');

# The error can end the session, and the server.
my ($rc, $stdout, $stderr) = $node->psql('postgres', $ENV{PLANTED});
ok(1, 'the error is made');
diag($stderr);

done_testing();
