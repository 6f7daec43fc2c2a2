# planted.pl
#
# Makes an error of planted.c in a server as TAP tests have them.  test/sanitize/run
# puts this beside them, says which one in PLANTED, and looks for the report.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use Test::More;

my $node = new_node('planted');

# The session may not survive it, nor the server.
my ($rc, $stdout, $stderr) = $node->psql('postgres', $ENV{PLANTED});
ok(1, 'the error is made');
diag($stderr);

done_testing();
