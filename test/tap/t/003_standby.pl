# 003_standby.pl
#
# Proves that a hot standby and a read-only transaction answer peek() and reject every
# change with PostgreSQL's own error. Also proves that a promoted standby continues as
# the old primary: keys exist, replays are identical, prepared claims block duplicates,
# and new claims work.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node('primary',
	init => { allows_streaming => 1 },
	conf => 'max_prepared_transactions = 5');
$primary->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'base', has_streaming => 1);
$standby->start;

$primary->safe_psql('postgres', q{
	CREATE TABLE charge (key text);
	CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS $$ SELECT '{"done" :true}'::json $$;
	BEGIN;
	SELECT idempotency.claim('s', 'completed', '{"amount": 1}');
	SELECT idempotency.complete('s', 'completed', '{"n" :  1} ', 201, ' {"A":"b" }');
	COMMIT;
	BEGIN;
	SELECT idempotency.claim('s', 'failed', retention => '-1 second');
	SELECT idempotency.fail('s', 'failed', '[ ]', 402);
	COMMIT;
	BEGIN;
	SELECT idempotency.claim('s', 'large');
	SELECT idempotency.complete('s', 'large', (SELECT json_agg(md5(i::text))::text FROM generate_series(1, 20000) AS i));
	COMMIT;
	BEGIN;
	SELECT idempotency.claim('s', 'expiring', retention => '1 microsecond');
	SELECT idempotency.complete('s', 'expiring', '1');
	COMMIT;
	SELECT idempotency.once('s', 'once'); SELECT idempotency.once_many('s', array['once 1', 'once 2']);
	BEGIN;
	SELECT idempotency.claim('s', 'rolled back');
	SELECT idempotency.complete('s', 'rolled back');
	ROLLBACK});
$primary->wait_for_catchup($standby);

# An open session on the standby sees rows appear and disappear.
my $reader = open_session($standby);
my $look = q{SELECT coalesce(response::text, 'nothing') FROM idempotency.peek('s', 'late')};
is($reader->query_safe($look), 'nothing', 'standby: not yet there');
$primary->safe_psql('postgres', q{BEGIN; SELECT idempotency.claim('s', 'late');
	SELECT idempotency.complete('s', 'late', '{ }'); COMMIT});
$primary->wait_for_catchup($standby);
is($reader->query_safe($look), '{ }', 'standby: an open session sees a new key');
$primary->safe_psql('postgres', 'REINDEX TABLE idempotency.key; VACUUM FULL idempotency.key');
$primary->wait_for_catchup($standby);
is($reader->query_safe($look), '{ }', 'standby: an open session sees the key after VACUUM FULL on the primary');
$primary->safe_psql('postgres', q{SELECT idempotency.forget('s', 'late')});
$primary->wait_for_catchup($standby);
is($reader->query_safe($look), 'nothing', 'standby: an open session sees the key disappear');

# From here on one transaction is prepared, and one is open.
$primary->safe_psql('postgres', q{BEGIN; SELECT idempotency.claim('s', 'prepared');
	INSERT INTO charge VALUES ('prepared');
	SELECT idempotency.complete('s', 'prepared', '"p"'); PREPARE TRANSACTION 'prepared'});

my $open = open_session($primary);
$open->query_safe(q{BEGIN; SELECT idempotency.claim('s', 'open'); INSERT INTO charge VALUES ('open');
	SELECT idempotency.complete('s', 'open', '1')});
$primary->wait_for_catchup($standby);

# Calls that change something, and the function name in PostgreSQL's error.
my %changes = (
	q{claim('s', 'new')} => 'claim',
	q{claim('s', 'completed')} => 'claim',
	q{try_claim('s', 'new')} => 'try_claim',
	q{try_claim('s', 'completed')} => 'try_claim',
	q{complete('s', 'new')} => 'complete',
	q{fail('s', 'new', '{}', 400)} => 'fail',
	q{release('s', 'new')} => 'release',
	q{forget('s', 'completed')} => 'forget',
	q{claim('s', 'new', lease => '1 min')} => 'claim',
	q{claim_abandoned('s', '1 min')} => 'claim_abandoned',
	q{renew('s', 'leased', 1, '1 min')} => 'renew',
	q{checkpoint('s', 'leased', 1, 'here')} => 'checkpoint',
	q{complete('s', 'leased', token => 1)} => 'complete',
	q{reap()} => 'reap',
	q{once('s', 'new')} => 'once',
	q{once('s', 'once')} => 'once',
	q{once_many('s', array['new', 'once 1'])} => 'once_many',
	q{once_many('s', array[]::text[])} => 'once_many',
	q{run('s', 'new', '{}', 'handler(json)')} => 'run',
	q{run('s', 'completed', '{"amount":1}', 'handler(json)')} => 'run');

# refuses checks that a server rejects all of them, after the statements in $before.
sub refuses
{
	my ($node, $before, $where) = @_;
	foreach my $call (sort keys %changes)
	{
		fails_with($node, "$before SELECT idempotency.$call", '25006', "$where: $call",
			like => qr/cannot execute idempotency\.$changes{$call}\(\) in a read-only transaction/);
	}
}

# answers checks the results of peek() on a server, after the statements in $before.
sub answers
{
	my ($node, $before, $where) = @_;
	my $peek = sub { $node->safe_psql('postgres', qq{$before SELECT outcome, replayed, status, headers, response, failed,
			expires_at, num_nonnulls(token, attempt, recovery_point, state, retry_after)
		FROM idempotency.peek('s', '$_[0]')}) };

	like($peek->('completed'), qr/^replayed\|t\|201\| \{"A":"b" \}\|\{"n" :  1\} \|f\|20[^|]*\|0$/, "$where: a success");
	is($peek->('failed'), 'replayed|t|402||[ ]|t||0', "$where: a failure");
	like($peek->('once'), qr/^replayed\|t\|\|\|\|f\|20[^|]*\|0$/, "$where: an inbox record");
	like($peek->('once 2'), qr/^replayed\|t\|\|\|\|f\|20[^|]*\|0$/, "$where: one of a batch");
	is($peek->($_), '|||||||0', "$where: peek returns nothing for a key: $_")
	  foreach 'expiring', 'rolled back', 'prepared', 'open', 'absent';
	is( $node->safe_psql('postgres', qq{$before SELECT length((op).response::text), md5((op).response::text)
			FROM (SELECT idempotency.peek('s', 'large') AS op OFFSET 0) AS p}),
		$primary->safe_psql('postgres', q{SELECT length(t), md5(t)
			FROM (SELECT json_agg(md5(i::text))::text AS t FROM generate_series(1, 20000) AS i) AS l}),
		"$where: a large response");
}

# 1. A read-only transaction on the primary.
refuses($primary, 'BEGIN READ ONLY;', 'read only');
refuses($primary, 'SET default_transaction_read_only = on;', 'read only by default');
answers($primary, 'BEGIN READ ONLY;', 'read only');
answers($primary, 'BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE;', 'deferrable');
is( $primary->safe_psql('postgres', q{BEGIN; SELECT outcome FROM idempotency.claim('s', 'becomes read only');
		SELECT idempotency.complete('s', 'becomes read only', '1');
		SET TRANSACTION READ ONLY;
		SELECT response FROM idempotency.peek('s', 'becomes read only'); ROLLBACK}),
	"claimed\n1\n1", 'a transaction that became read only sees its own outcome');

# 2. The standby, next to the primary.
refuses($standby, '', 'standby');
answers($standby, '', 'standby');
answers($standby, 'BEGIN ISOLATION LEVEL REPEATABLE READ;', 'standby, repeatable read');
is(answers_of($standby), answers_of($primary), 'standby: every answer is that of the primary');
is( $standby->safe_psql('postgres', q{SELECT key, state, status FROM idempotency.keys ORDER BY key}),
	"completed|completed|201\nexpiring|expired|200\nfailed|failed|402\nlarge|completed|200\n"
	. "once|seen|\nonce 1|seen|\nonce 2|seen|", 'standby: the view shows all keys');

# 3. Promotion: the primary is lost, with the transaction that is open there.
my $before = answers_of($primary);
my $replays = q{WITH k AS (SELECT key, idempotency.claim(scope, key) AS op
	FROM idempotency.key WHERE expires_at > clock_timestamp() ORDER BY key) SELECT key, (op).* FROM k};
my $replayed = $primary->safe_psql('postgres', $replays);
is(scalar(split /\n/, $replayed), 6, 'the primary replays six keys');
$primary->stop('immediate');
$standby->promote;

is(answers_of($standby), $before, 'promoted: every answer is the same');
is($standby->safe_psql('postgres', $replays), $replayed, 'promoted: every replay is the same');
is($standby->safe_psql('postgres', q{SELECT outcome FROM idempotency.claim('s', 'completed', '{"amount":1.0}')}),
	'replayed', 'promoted: the same request replays');
fails_with($standby, q{SELECT idempotency.claim('s', 'completed', '{"amount":2}')}, 'IK422',
	'promoted: another request is rejected');
is($standby->safe_psql('postgres', q{SELECT idempotency.once('s', 'once'),
		array(SELECT idempotency.once_many('s', array['once 1', 'once 3']))}), 'f|{"once 3"}',
	'promoted: messages in the inbox are duplicates');

foreach my $key ('expiring', 'open', 'rolled back', 'late', 'new')
{
	is( $standby->safe_psql('postgres', qq{BEGIN; SELECT outcome FROM idempotency.claim('s', '$key');
			SELECT idempotency.complete('s', '$key', '2'); COMMIT;
			SELECT response FROM idempotency.claim('s', '$key')}),
		"claimed\n2\n2", "promoted: $key can be claimed");
}
is($reader->query_safe($look), '2', 'promoted: the open session sees the result');
is($reader->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('s', 'by the reader');
		SELECT idempotency.complete('s', 'by the reader'); COMMIT}), "claimed\n", 'promoted: the open session can claim');

is($standby->safe_psql('postgres', q{SELECT outcome FROM idempotency.try_claim('s', 'prepared')}),
	'in_progress', 'promoted: a prepared claim blocks duplicates');
fails_with($standby, q{SELECT idempotency.claim('s', 'prepared', wait => '50 ms')}, 'IK409',
	'promoted: a prepared key cannot be claimed');
$standby->safe_psql('postgres', q{COMMIT PREPARED 'prepared'});
is( $standby->safe_psql('postgres', q{SELECT outcome, response FROM idempotency.claim('s', 'prepared');
		SELECT key FROM charge}), qq{replayed|"p"\nprepared}, 'promoted: a prepared key replays after COMMIT PREPARED');

$reader->quit;
eval { $open->quit };
$standby->stop;
done_testing();
