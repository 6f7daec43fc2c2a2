# 002_crash.pl
#
# Proves that a crash keeps key and effect together. Before the commit neither exists
# and the retry runs; after the commit both exist and the retry replays. Prepared
# transactions survive and block duplicates until they end. A crash under load leaves no
# key without effect, and no effect without key.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Cluster.pm disables restart_after_crash, which one test needs.
my $node = new_node('main', conf => q{
restart_after_crash = on
max_prepared_transactions = 10
max_connections = 40
});
$node->safe_psql('postgres', 'CREATE TABLE charge (key text, answer text)');

# charge is the SQL of one operation up to its commit.
sub charge
{
	my ($key) = @_;
	return qq{BEGIN;
		SELECT outcome FROM idempotency.claim('crash', '$key', '{"amount": 1}');
		INSERT INTO charge VALUES ('$key', '{"n" :  1}');
		SELECT idempotency.complete('crash', '$key', '{"n" :  1}', 201, '{"A" : 1}')};
}

# charges returns the number of effects of a key.
sub charges
{
	my ($key) = @_;
	return $node->safe_psql('postgres', "SELECT count(*) FROM charge WHERE key = '$key'");
}

# is_absent checks that an operation left nothing behind and that a retry runs.
sub is_absent
{
	my ($key, $when) = @_;
	is(charges($key), 0, "$when: no effect");
	is($node->safe_psql('postgres', "SELECT idempotency.peek('crash', '$key') IS NULL"),
		't', "$when: no key");
	is($node->safe_psql('postgres', charge($key) . '; COMMIT'), qq(claimed\n{"n" :  1}), "$when: the retry runs");
	is(charges($key), 1, "$when: the retry has its effect");
}

# is_stored checks that an operation is stored and not repeated.
sub is_stored
{
	my ($key, $when) = @_;
	is(charges($key), 1, "$when: one effect");
	is( $node->safe_psql('postgres', qq{SELECT outcome, status, headers, response, failed
			FROM idempotency.claim('crash', '$key', '{"amount":1.0}')}),
		'replayed|201|{"A" : 1}|{"n" :  1}|f', "$when: the retry replays");
	fails_with($node, qq{SELECT idempotency.claim('crash', '$key', '{"amount":2}')}, 'IK422',
		"$when: another request is rejected");
}

# 1. The whole server, at each stage of an operation.
my %session = map { $_ => open_session($node) } qw(claimed completed once);
$session{claimed}->query_safe(q{BEGIN; SELECT idempotency.claim('crash', 'claimed');
	INSERT INTO charge VALUES ('claimed', '')});
$session{completed}->query_safe(charge('completed'));
$session{once}->query_safe(q{BEGIN; INSERT INTO charge VALUES ('once', '');
	SELECT idempotency.once('crash', 'once'); SELECT idempotency.once_many('crash', array['o1', 'o2'])});
is( $node->safe_psql('postgres', q{SELECT outcome FROM idempotency.try_claim('crash', 'completed')}),
	'in_progress', 'before the crash the key is taken');
$node->safe_psql('postgres', charge('committed') . '; COMMIT');

$node->stop('immediate');
$node->start;
is_absent('claimed', 'crash after claim');
is_absent('completed', 'crash between complete and commit');
is_absent('once', 'crash after once');
is($node->safe_psql('postgres', q{SELECT idempotency.once_many('crash', array['o1', 'o2', 'o1'])}),
	"o1\no2", 'crash after once: the batch is new');
is_stored('committed', 'crash after commit');

# 2. One backend, killed with SIGKILL.
my $victim = open_session($node);
$victim->query_safe(charge('killed'));
my $pid = $victim->query_safe('SELECT pg_backend_pid()');
$pid =~ s/\D//g;
my $started = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');
ok(kill(9, $pid), 'kill -9 of the backend that holds a claim');
like(wait_for_end($victim), qr/server closed the connection|terminating connection/,
	'the session ends');
kill9($node, $pid); # the postmaster can notice it later than the client
is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'),
	$started, 'the server has recovered by itself');
is_absent('killed', 'kill -9 of a backend');
is_stored('committed', 'kill -9 of a backend');

# 3. Prepared transactions.
foreach my $key (qw(to_commit to_roll_back awaited))
{
	$node->safe_psql('postgres', charge($key) . "; PREPARE TRANSACTION '$key'");
}
$node->safe_psql('postgres', q{BEGIN; SELECT idempotency.once('crash', 'prepared once');
	PREPARE TRANSACTION 'prepared once'});
prepared_blocks('before the crash');
$node->stop('immediate');
$node->start;
prepared_blocks('after the crash');

# prepared_blocks checks that no other session can claim a prepared key.
sub prepared_blocks
{
	my ($when) = @_;
	foreach my $key ('to_commit', 'to_roll_back', 'prepared once')
	{
		is( $node->safe_psql('postgres', "SELECT outcome FROM idempotency.try_claim('crash', '$key')"),
			'in_progress', "$when: $key is in progress");
		fails_with($node, "SELECT idempotency.claim('crash', '$key', wait => '50 ms')",
			'IK409', "$when: a claim of $key times out");
		fails_with($node, "SET idempotency.wait = '50ms'; SELECT idempotency.once('crash', '$key')",
			'IK409', "$when: once of $key times out");
		is($node->safe_psql('postgres', "SELECT idempotency.peek('crash', '$key') IS NULL"),
			't', "$when: $key is not visible");
	}
	fails_with($node, q{SET lock_timeout = '50ms'; SELECT idempotency.once_many('crash', array['a', 'to_commit'])},
		'55P03', "$when: a batch waits as well, until lock_timeout");
	return;
}

# A session that waits for a prepared transaction returns its result.
my $waiter = open_session($node);
$waiter->query_until(qr/begun/, qq{\\echo begun
	SELECT outcome, response FROM idempotency.claim('crash', 'awaited', wait => '180 s');\n});
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND objsubid = 18756})
	or die 'no session waits for the key';
$node->safe_psql('postgres', "COMMIT PREPARED '$_'") foreach 'awaited', 'to_commit', 'prepared once';
$node->safe_psql('postgres', "ROLLBACK PREPARED 'to_roll_back'");
is($waiter->query('SELECT 1'), qq{replayed|{"n" :  1}\n1}, 'a waiter replays after COMMIT PREPARED');
$waiter->quit;
is_stored('awaited', 'after COMMIT PREPARED');
is_stored('to_commit', 'after COMMIT PREPARED');
is_absent('to_roll_back', 'after ROLLBACK PREPARED');
is($node->safe_psql('postgres', q{SELECT idempotency.once('crash', 'prepared once')}),
	'f', 'after COMMIT PREPARED: once returns false');
is($node->safe_psql('postgres', 'SELECT count(*) FROM pg_locks WHERE objsubid = 18756'),
	0, 'no key stays locked');

# 4. A crash under a load of clients that retry each other's keys.
my $script = PostgreSQL::Test::Utils::tempdir . '/load.sql';
append_to_file($script, <<'SQL');
\set key random(1, 1000000)
BEGIN;
SELECT replayed::int AS replayed FROM idempotency.claim('load', (:key % 5000)::text) \gset
\if :replayed
COMMIT;
\else
INSERT INTO charge VALUES ('load ' || (:key % 5000)::text, :key::text);
SELECT idempotency.complete('load', (:key % 5000)::text, :key::text);
COMMIT;
\endif
SQL
$node->append_conf('postgresql.conf', 'log_statement = none');
foreach my $round (1 .. 2)
{
	$node->restart;
	my $output = '';
	my $load = IPC::Run::start([ 'pgbench', '-n', '-c', '8', '-T', '60', '-f', $script,
			$node->connstr('postgres') ], '>&', \$output);
	$node->poll_query_until('postgres',
		"SELECT count(*) >= 1500 * $round FROM idempotency.key WHERE scope = 'load'")
	  or die "no progress: $output";
	$node->stop('immediate');
	$load->finish;
	$node->start;
	unlike($output, qr/ERROR/, "round $round: no client failed before the crash");

	# No operation is lost or repeated, and every response belongs to its effect.
	is( $node->safe_psql('postgres', q{
			SELECT count(*) FILTER (WHERE c.key IS NULL), count(*) FILTER (WHERE k.key IS NULL),
				count(*) FILTER (WHERE c.answer <> k.response::text),
				count(*) - count(DISTINCT coalesce('load ' || k.key, c.key)), count(*) >= 1500
			FROM (SELECT * FROM idempotency.key WHERE scope = 'load') AS k
			FULL JOIN (SELECT * FROM charge WHERE key LIKE 'load %') AS c ON c.key = 'load ' || k.key}),
		'0|0|0|0|t', "round $round: each key has one effect, each effect its key");
}

$node->stop;
done_testing();
