# 010_locks.pl
#
# Proves that the extension uses few entries of the shared lock table: none for each of
# the ten thousand keys of a batch, none for a replay, one for a claim. If claims fill
# the table, the error names the remedy, and the transaction, the session and all others
# continue. A client cannot compute the lock number of a key and so search for a
# colliding key in another scope.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The smallest possible lock table: about ten locks per session.
my $node = new_node('main', conf => q{
max_locks_per_transaction = 10
max_connections = 10
max_worker_processes = 2
max_prepared_transactions = 2
log_statement = none
});
my $session = open_session($node);
$session->query_safe(q{
	CREATE TABLE charge (key text);
	CREATE FUNCTION locks(OUT all_locks int, OUT of_keys int) LANGUAGE sql AS $$
		SELECT count(*), count(*) FILTER (WHERE locktype = 'advisory' AND objsubid = 18756)
		FROM pg_locks WHERE pid = pg_backend_pid() AND locktype <> 'virtualxid' $$;
	SELECT idempotency.peek('warm', 'up')});

# held returns the session's locks, all of them and those of keys, without the locks
# that the query itself takes.
my ($idle) = split /\|/, $session->query_safe('SELECT * FROM locks()');
sub held
{
	my ($all, $of_keys) = split /\|/, $session->query_safe('SELECT * FROM locks()');
	return ($all - $idle, $of_keys);
}

# few_locks checks that a transaction holds locks on the table, its index and itself,
# and the expected number of locks on keys.
sub few_locks
{
	my ($expected, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($all, $of_keys) = held();
	is($of_keys, $expected, "$name: locks of keys");
	cmp_ok($all, '<=', $expected + 4, "$name: few other locks");
}

my $batch = q{SELECT count(*) FROM idempotency.once_many('l', array(SELECT 'message ' || i FROM generate_series(%d, %d) AS i))};

# ----------------------------------------------------------------
# Batches, replays, claims
# ----------------------------------------------------------------

is($session->query_safe('BEGIN; ' . sprintf($batch, 1, 10_000)), 10_000, 'ten thousand keys are new');
few_locks(0, 'a batch of ten thousand');
is($session->query_safe(sprintf $batch, 5_001, 15_000), 5_000, 'five thousand keys of an overlapping batch are new');
few_locks(0, 'a second batch');
is($session->query_safe(q{SAVEPOINT s; } . sprintf($batch, 15_001, 25_000) . q{; ROLLBACK TO s; }
	. sprintf($batch, 15_001, 25_000)), "10000\n10000", 'a third batch, twice');
few_locks(0, 'with savepoints');
$session->query_safe('COMMIT');
is(join('|', held()), '0|0', 'no lock is left after the commit of batches');
is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT key) FROM idempotency.key'), '25000|25000',
	'all keys are stored');

# A batch that overwrites as many expired keys.
is( $session->query_safe(q{SELECT count(*) FROM idempotency.once_many('x', array(SELECT i::text FROM generate_series(1, 10000) AS i),
		'1 microsecond'); BEGIN; SELECT count(*) FROM idempotency.once_many('x', array(SELECT i::text FROM generate_series(1, 10000) AS i))}),
	"10000\n10000", 'ten thousand expired keys are new again');
few_locks(0, 'a batch of expired keys');
$session->query_safe('COMMIT');

$session->query_safe(q{BEGIN; SELECT count(idempotency.claim('l', 'message ' || i)) FROM generate_series(1, 10000) AS i});
few_locks(0, 'ten thousand replays');
$session->query_safe(q{SELECT count(idempotency.once('l', 'message ' || i)), count(idempotency.peek('l', 'message ' || i)),
	count(idempotency.try_claim('l', 'message ' || i)), bool_or(idempotency.forget('l', 'absent ' || i))
	FROM generate_series(1, 10000) AS i});
few_locks(0, 'ten thousand known messages, peeks, and absent keys forgotten');
$session->query_safe('COMMIT');

$session->query_safe(q{BEGIN; SELECT idempotency.claim('l', 'claim ' || i) FROM generate_series(1, 20) AS i});
few_locks(20, 'twenty claims');
$session->query_safe(q{SELECT idempotency.complete('l', 'claim ' || i) FROM generate_series(1, 10) AS i;
	SELECT idempotency.release('l', 'claim ' || i) FROM generate_series(11, 20) AS i});
few_locks(20, 'completed and released claims keep their locks until commit');
$session->query_safe(q{SAVEPOINT s; SELECT idempotency.claim('l', 'more ' || i) FROM generate_series(1, 10) AS i; ROLLBACK TO s});
few_locks(20, 'a rollback to a savepoint releases its locks');
$session->query_safe('COMMIT');
is(join('|', held()), '0|0', 'no lock is left after the commit of claims');

# A claim that returns in_progress keeps no lock: a lock on the table would block VACUUM
# FULL.
my $owner = open_session($node);
my $modes = q{SELECT string_agg(DISTINCT mode, ', ') FROM pg_locks
	WHERE pid = pg_backend_pid() AND relation = 'idempotency.key'::regclass};
$owner->query_safe(q{BEGIN; SELECT idempotency.claim('l', 'held')});
is($owner->query_safe($modes), 'RowExclusiveLock', 'a claim holds the lock on the table');
foreach my $call (q{try_claim('l', 'held')}, q{try_claim('l', 'held', lease => '1 min')},
	q{try_claim('l', 'held', wait => '10 ms')})
{
	is($session->query_safe("BEGIN; SELECT outcome FROM idempotency.$call"), 'in_progress', "$call returns in_progress");
	is($session->query_safe($modes), '', "$call: leaves no lock on the table");
	$session->query_safe('ROLLBACK');
}

# The log names the process that holds the key, and the client does not see it.
my $pid = $owner->query_safe('SELECT pg_backend_pid()');
is($node->safe_psql('postgres', q{SELECT kind, pid, left(query, 23), age > '0', since IS NOT NULL FROM idempotency.holders('l', 'held')}),
	"holds|$pid|SELECT pg_backend_pid()|t|t", 'an operator finds it');
my $from = -s $node->logfile;
my ($status, $out, $err) = $node->psql('postgres', q{SELECT idempotency.claim('l', 'held', wait => '0')});
like($err, qr/an operation with this idempotency key is in progress/, 'a duplicate is refused');
unlike($err, qr/\b$pid\b/, 'the client does not learn the process of the owner');
like(slurp_file($node->logfile, $from), qr/Scope "l", key "held"\. Process $pid holds it\./, 'the log names it');
$owner->query_safe(q{SELECT idempotency.complete('l', 'held'); PREPARE TRANSACTION 'held'});
$owner->query_safe('BEGIN'); # the number of the session's transaction is not that of the prepared one
my $xid = $node->safe_psql('postgres', 'SELECT transaction FROM pg_prepared_xacts');
$from = -s $node->logfile;
$node->psql('postgres', q{SELECT idempotency.claim('l', 'held', wait => '0')});
like(slurp_file($node->logfile, $from), qr/The prepared transaction with ID $xid holds it\./, 'the log names a prepared transaction');
$owner->query_safe('ROLLBACK');
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'held'});
$owner->quit;

# ----------------------------------------------------------------
# The number of a lock
# ----------------------------------------------------------------

# number_of returns the number of the lock of one key.
sub number_of
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{BEGIN; SELECT FROM idempotency.claim('t1/orders', 'order-1');
		SELECT classid::bigint << 32 | objid::bigint FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 18756; ROLLBACK});
}

my $number = number_of('postgres');
like($number, qr/^-?\d+$/, 'the lock of a key has a number');
is(number_of('postgres'), $number, 'the lock number is the same in every session');
isnt($number, $node->safe_psql('postgres', q{SELECT hashtextextended('order-1' COLLATE "C", hashtextextended('t1/orders' COLLATE "C", 0))}),
	'the lock number is no hash that a client can compute');
$node->safe_psql('postgres', 'CREATE DATABASE second');
$node->safe_psql('second', 'CREATE EXTENSION idempotency');
isnt(number_of('second'), $number, 'the lock number differs in another database');

my $other = new_node('other');
isnt($other->safe_psql('postgres', q{BEGIN; SELECT FROM idempotency.claim('t1/orders', 'order-1');
	SELECT classid::bigint << 32 | objid::bigint FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 18756}),
	$number, 'the lock number differs in another cluster');
$other->stop;

# ----------------------------------------------------------------
# A full lock table
# ----------------------------------------------------------------

my $hint = qr/^HINT:  .*idempotency\.once_many\(\).*max_locks_per_transaction/m;
my $flood = q{SELECT count(idempotency.%s('l', 'flood ' || i)) FROM generate_series(1, 100000) AS i};

# all_continue checks that this session and another one can use all functions.
sub all_continue
{
	my ($after) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(join('|', held()), '0|0', "$after: no lock is left");
	is($session->query(q{BEGIN; INSERT INTO charge VALUES ('after'); SELECT outcome FROM idempotency.claim('l', 'after');
			SELECT idempotency.complete('l', 'after', '1'); COMMIT; SELECT outcome FROM idempotency.claim('l', 'after');
			SELECT idempotency.forget('l', 'after')}),
		"claimed\n1\nreplayed\nt", "$after: the session continues");
	is($node->safe_psql('postgres', q{SELECT idempotency.once('l', 'flood 1'), idempotency.forget('l', 'flood 1'),
			(SELECT count(*) FROM idempotency.key WHERE key LIKE 'flood%')}), 't|t|0', "$after: another session continues");
}

foreach my $call (qw(claim try_claim once))
{
	session_fails($session, sprintf($flood, $call), '53200', "too many of $call", $hint);
	all_continue("after too many of $call");
	session_fails($session, 'BEGIN; ' . sprintf($flood, $call) . '; COMMIT', '53200',
		"too many of $call in a transaction", qr/too many idempotency claims at once.*^DETAIL:  Scope "l", key "flood \d+"/ms);
	all_continue("after too many of $call in a transaction");
}

# While the table is full, other sessions get the same error, not a wrong result.
my $filler = open_session($node);
$filler->query_safe(q{BEGIN; DO $$BEGIN FOR i IN 1 .. 100000 LOOP PERFORM pg_advisory_xact_lock(1, i); END LOOP;
	EXCEPTION WHEN out_of_memory THEN NULL; END$$});
$filler->query_safe(q{DO $$BEGIN FOR i IN 1 .. 100000 LOOP
	BEGIN PERFORM pg_advisory_xact_lock(1, i); EXCEPTION WHEN out_of_memory THEN EXIT; END; END LOOP; END$$});
$session->query_safe('BEGIN');
session_fails($session, q{SELECT idempotency.claim('l', 'other')}, '53200', 'one claim more, with the table filled by another', $hint);
$session->query_safe('ROLLBACK');
$filler->query_safe('ROLLBACK');
all_continue('after the table was full');
$filler->quit;

# A transaction that catches the error continues with its earlier claims.
is( $session->query(q{BEGIN; SELECT outcome FROM idempotency.claim('l', 'kept');
		DO $$BEGIN PERFORM count(idempotency.claim('l', 'flood ' || i)) FROM generate_series(1, 100000) AS i;
			EXCEPTION WHEN out_of_memory THEN INSERT INTO charge VALUES ('caught'); END$$;
		SELECT outcome FROM idempotency.claim('l', 'another');
		SELECT idempotency.complete('l', 'kept', '1'), idempotency.complete('l', 'another', '2'); COMMIT}),
	"claimed\nclaimed\n1|2", 'an error that is caught leaves the transaction whole');
is( $node->safe_psql('postgres', q{SELECT (SELECT array_agg(response::text ORDER BY key) FROM idempotency.key WHERE key IN
		('kept', 'another')), (SELECT array_agg(key) FROM charge WHERE key = 'caught'),
		(SELECT count(*) FROM idempotency.key WHERE key LIKE 'flood%')}), '{2,1}|{caught}|0', 'the outcomes of that transaction are stored');
all_continue('after an error that was caught');

# A batch succeeds where as many claims cannot.
is($session->query_safe(sprintf $batch, 100_001, 200_000), 100_000, 'a batch of a hundred thousand fits');
is($session->query_safe('SELECT * FROM locks()'), "$idle|0", 'a batch of a hundred thousand leaves no lock');

$session->quit;
$node->stop;
done_testing();
