# 043_foreign.pl
#
# Shows a limit that docs/internals/guarantees.md states: postgres_fdw commits on its
# server before the local commit is rejected, so the remote write stays. A client that
# completes its claim has both, or neither if it rolls back. A require_claim trigger on
# the foreign table checks only writes through the foreign table.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $other = new_node('other');
my ($host, $port) = ($other->host, $other->port);

$other->safe_psql('postgres', 'CREATE TABLE effect (key text)');
$node->safe_psql('postgres', qq{
	CREATE EXTENSION postgres_fdw;
	CREATE SERVER other FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '$host', port '$port', dbname 'postgres');
	CREATE USER MAPPING FOR CURRENT_USER SERVER other;
	IMPORT FOREIGN SCHEMA public LIMIT TO (effect) FROM SERVER other INTO public});

sub effects
{
	return $other->safe_psql('postgres', q{SELECT string_agg(key, ' ' ORDER BY key) FROM effect});
}

my $work = q{SELECT idempotency.claim('s', '%1$s'); INSERT INTO effect VALUES ('%1$s')};
$node->safe_psql('postgres', 'BEGIN; ' . sprintf($work, 'whole') . q{; SELECT idempotency.complete('s', 'whole', '1'); COMMIT});
is(effects(), 'whole', 'an operation that is completed has its remote effect');
$node->safe_psql('postgres', 'BEGIN; ' . sprintf($work, 'undone') . '; ROLLBACK');
is(effects(), 'whole', 'an operation that is rolled back has no remote effect');

fails_with($node, 'BEGIN; ' . sprintf($work, 'forgotten') . '; COMMIT', 'IK428', 'an operation that is not completed is rejected');
is(effects(), 'forgotten whole', 'the remote effect of a rejected commit stays');
is($node->safe_psql('postgres', q{SELECT outcome FROM idempotency.try_claim('s', 'forgotten', lease => '1 min')}),
	'claimed', 'the rejected operation stores no key');

$node->safe_psql('postgres', q{CREATE TRIGGER guard BEFORE INSERT ON effect FOR EACH ROW EXECUTE FUNCTION idempotency.require_claim('s')});
fails_with($node, q{INSERT INTO effect VALUES ('unclaimed')}, 'IK403', 'require_claim on the foreign table rejects writes through it');
$other->safe_psql('postgres', q{INSERT INTO effect VALUES ('past it')});
is(effects(), 'forgotten past it whole', 'require_claim does not reject direct remote writes');

done_testing();
