# 009_one_write.pl
#
# Proves that an operation on a new key costs one heap insert and one index insert, and
# leaves no dead tuple. An expired key is overwritten by one update; a heartbeat is one
# update and touches no index. A claim that is not completed, a replay and a duplicate
# write nothing, not even a transaction ID. The test reads the WAL and the server's
# statistics.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# No background process writes WAL (wal_level minimal avoids the snapshots for a
# standby), so an unchanged position means that nothing was written. Checksums, the
# default of newer servers, would log hint bits.
my ($help) = run_command([ 'initdb', '--help' ]);
my @checksums = $help =~ /(--no-data-checksums)/;
my $node = new_node('main', init => { extra => [ '--encoding=UTF8', '--locale=C', @checksums ] }, conf => q{
wal_level = minimal
max_wal_senders = 0
checkpoint_timeout = 1h
max_wal_size = 4GB
log_statement = none
});
$node->safe_psql('postgres', q{CREATE EXTENSION pgstattuple;
	CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS 'SELECT $1';
	CREATE FUNCTION final(json) RETURNS json LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION USING ERRCODE = 'IKFIN'; END $$});

# The first rows of a table and its index are written differently. These rows also fill
# the caches, because building a cache prunes catalogs.
$node->safe_psql('postgres', q{SELECT idempotency.once('w', 'warm 1');
	BEGIN; SELECT idempotency.claim('w', 'warm 2'); SELECT idempotency.complete('w', 'warm 2'); COMMIT;
	SELECT idempotency.once_many('w', array['warm 3', 'warm 4'])});
$node->safe_psql('postgres', 'VACUUM idempotency.key; VACUUM');

my %file = map { split /\|/ } split /\n/, $node->safe_psql('postgres', q{
	SELECT pg_relation_filenode(oid) || '|heap' FROM pg_class WHERE oid = 'idempotency.key'::regclass
	UNION ALL SELECT pg_relation_filenode(indexrelid) || CASE WHEN indisprimary THEN '|index' ELSE '|leases' END
		FROM pg_index WHERE indrelid = 'idempotency.key'::regclass
	UNION ALL SELECT pg_relation_filenode(reltoastrelid) || '|toast' FROM pg_class WHERE oid = 'idempotency.key'::regclass});

# records returns the kinds of the WAL records of the key table between two positions,
# in order.
sub records
{
	my ($from, $to) = @_;
	my ($out, $err) = run_command([ 'pg_waldump', '--path', $node->data_dir . '/pg_wal',
			'--start', $from, '--end', $to ]);
	my @records;
	foreach (split /\n/, $out)
	{
		my ($manager, $kind) = /^rmgr: (\w+) .* desc: (\S+)/ or die "cannot read $_";
		push @records, "$manager $kind" if $manager eq 'Transaction';
		/rel \d+\/\d+\/(\d+)/ or next;
		push @records, "$file{$1} $kind" =~ s/\+INIT//r if exists $file{$1};
	}
	return join(', ', @records);
}

# One session, with filled caches, makes every call.
my $session = open_session($node);
$session->query_safe('SET synchronous_commit = off');
my $lsn = 'SELECT pg_current_wal_insert_lsn()';

# writes runs SQL, which succeeds or fails with that SQLSTATE, and compares the WAL that
# it wrote with the expected records.
sub writes
{
	my ($sql, $expected, $name, $sqlstate) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $from = $session->query_safe($lsn);
	if (defined $sqlstate)
	{
		session_fails($session, $sql, $sqlstate, "$name: refused");
	}
	else
	{
		$session->query_safe($sql);
	}
	my $to = $session->query_safe($lsn);

	# pg_waldump cannot read WAL that is only in the buffers.
	$session->query_safe('SELECT txid_current(); CHECKPOINT') if $from ne $to;
	is($from eq $to ? 'nothing' : records($from, $to), $expected, $name);
}

# writes_nothing checks that SQL writes no WAL and assigns no transaction ID.
sub writes_nothing
{
	my ($sql, $name, $sqlstate) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $next = q{SELECT pg_snapshot_xmax(pg_current_snapshot())};
	my $xid = $session->query_safe($next);
	writes($sql, 'nothing', $name, $sqlstate);
	is($session->query_safe($next), $xid, "$name: no transaction id");
}

my $one = 'heap INSERT, index INSERT_LEAF, Transaction COMMIT';
my $two = 'heap INSERT, index INSERT_LEAF, ' . $one;

# ----------------------------------------------------------------
# One insert each
# ----------------------------------------------------------------

writes(q{BEGIN; SELECT idempotency.claim('w', 'a', '{"n":1}'); SELECT idempotency.complete('w', 'a', '{"n":1}', 201, '{}'); COMMIT},
	$one, 'claim and complete');
writes(q{BEGIN; SELECT idempotency.try_claim('w', 'b'); SELECT idempotency.fail('w', 'b', '{}', 400); COMMIT},
	$one, 'try_claim and fail');
writes(q{SELECT idempotency.run('w', 'c', '1', 'handler(json)')}, $one, 'run');
writes(q{SELECT idempotency.run('w', 'd', '1', 'final(json)')}, $one, 'run with a final error');
writes(q{SELECT idempotency.once('w', 'e')}, $one, 'once');
writes(q{BEGIN; SELECT idempotency.claim('w', 'f'); SELECT idempotency.claim('w', 'g');
	SELECT idempotency.complete('w', 'g'); SELECT idempotency.complete('w', 'f'); COMMIT}, $two, 'two claims');
writes(q{BEGIN; SAVEPOINT s; SELECT idempotency.claim('w', 'h'); ROLLBACK TO s;
	SELECT idempotency.claim('w', 'h'); SAVEPOINT t; SELECT idempotency.complete('w', 'h'); RELEASE t; COMMIT},
	$one, 'a claim repeated after a savepoint');
writes(q{BEGIN; SELECT idempotency.claim('w', 'i', retention => '1 microsecond'); SELECT idempotency.complete('w', 'i'); COMMIT},
	$one, 'an operation that expires');
writes(q{BEGIN; SELECT idempotency.claim('w', 'toasted'); SELECT idempotency.complete('w', 'toasted',
	(SELECT json_agg(md5(i::text))::text FROM generate_series(1, 100) AS i)); COMMIT},
	'toast INSERT, toast INSERT, heap INSERT, index INSERT_LEAF, Transaction COMMIT', 'an operation with a large response');

# A batch inserts each row speculatively and then confirms it.
writes(q{SELECT idempotency.once_many('w', array['x', 'z', 'y', 'x'])},
	join(', ', ('heap INSERT, index INSERT_LEAF, heap HEAP_CONFIRM') x 3, 'Transaction COMMIT'), 'a batch');

# ----------------------------------------------------------------
# Nothing
# No write

writes_nothing(q{BEGIN; SELECT idempotency.claim('w', 'n', '{"n":1}'); ROLLBACK}, 'a claim that is rolled back');
writes_nothing(q{BEGIN; SELECT idempotency.claim('w', 'n'); COMMIT}, 'a claim that is not completed', 'IK428');
writes_nothing(q{SELECT idempotency.claim('w', 'n')}, 'a claim alone', 'IK428');
writes_nothing(q{BEGIN; SELECT idempotency.claim('w', 'n'); SELECT idempotency.release('w', 'n'); COMMIT},
	'a claim that is released');
writes_nothing(q{BEGIN; SAVEPOINT s; SELECT idempotency.claim('w', 'n'); ROLLBACK TO s; COMMIT},
	'a claim that is rolled back to a savepoint');
writes_nothing(q{SELECT idempotency.claim('w', 'a', '{"n":1}'), idempotency.try_claim('w', 'b')}, 'a replay');
writes_nothing(q{SELECT idempotency.claim('w', 'a', '{"n":2}')}, 'a mismatch', 'IK422');
writes_nothing(q{SELECT idempotency.run('w', 'c', '1', 'handler(json)')}, 'a replay of run');
writes_nothing(q{SELECT idempotency.once('w', 'e')}, 'a known message');
writes_nothing(q{SELECT idempotency.once_many('w', array['y', 'x', 'e'])}, 'a batch of known messages');
writes_nothing(q{SELECT idempotency.peek('w', 'a'), idempotency.peek('w', 'n'), idempotency.forget('w', 'n')},
	'peek and forget of absent keys');
writes_nothing(q{SELECT idempotency.complete('w', 'n')}, 'complete without a claim', 'IK412');

# Duplicates of an open claim: they wait, time out, or return at once.
my $owner = open_session($node);
$owner->query_safe(q{BEGIN; SELECT idempotency.claim('w', 'owned')});
writes_nothing(q{SELECT idempotency.try_claim('w', 'owned')}, 'a duplicate that does not wait');
writes_nothing(q{SELECT idempotency.claim('w', 'owned', wait => '20 ms')}, 'a duplicate that waits', 'IK409');
$owner->query_safe('ROLLBACK');
$owner->quit;

# ----------------------------------------------------------------
# An expired key, and the statistics of it all
# ----------------------------------------------------------------

# counted returns the statistics of the key table, and its dead tuples.
sub counted
{
	return $node->safe_psql('postgres', q{
		SELECT n_tup_ins, n_tup_upd, n_tup_del, n_dead_tup, (SELECT dead_tuple_count FROM pgstattuple('idempotency.key'))
		FROM pg_stat_all_tables WHERE relid = 'idempotency.key'::regclass});
}

$session->query_safe('SELECT pg_stat_force_next_flush()');
is(counted(), '17|0|0|0|0', 'seventeen inserts, no update, and no dead tuple');

writes(q{BEGIN; SELECT idempotency.claim('w', 'i'); SELECT idempotency.complete('w', 'i', '2'); COMMIT},
	'heap HOT_UPDATE, Transaction COMMIT', 'an expired key is overwritten by one update, and no index is touched');
$session->query_safe('SELECT pg_stat_force_next_flush()');
is(counted(), '17|1|0|1|1', 'the update leaves one dead tuple');

# ----------------------------------------------------------------
# A lease, whose row is also in the index of leases
# ----------------------------------------------------------------

$session->query_safe(q{SELECT idempotency.claim('w', 'warm 5', lease => '1 hour')});
my $leased = 'index INSERT_LEAF, leases INSERT_LEAF, Transaction COMMIT';
my $row = q{FROM idempotency.key WHERE key = 'j'};
my $again = q{idempotency.try_claim('w', 'j', '{"n":1}', lease => '1 hour')};
writes("SELECT $again", "heap INSERT, $leased", 'a claim with a lease');
writes("SELECT idempotency.renew(scope, key, token, '2 hours') $row", 'heap HOT_UPDATE, Transaction COMMIT',
	'a heartbeat');
writes("SELECT idempotency.checkpoint(scope, key, token, 'here', '{\"a\":1}') $row", 'heap HOT_UPDATE, Transaction COMMIT',
	'a checkpoint');
writes_nothing("SELECT $again", 'a duplicate of a leased operation');

# The index of leases contains the token, which a release and a takeover change.
writes("SELECT idempotency.release(scope, key, token) $row", "heap UPDATE, $leased", 'a lease that is released');
writes("SELECT $again", "heap UPDATE, $leased", 'a takeover');
writes("SELECT idempotency.complete(scope, key, '1', token => token) $row",
	'heap UPDATE, index INSERT_LEAF, Transaction COMMIT', 'complete with a token');
writes_nothing("SELECT $again", 'a replay of a leased operation');
$session->query_safe('SELECT pg_stat_force_next_flush()');

$node->safe_psql('postgres', 'VACUUM idempotency.key; SELECT pg_stat_reset()');
$session->query_safe(q{DO $$
BEGIN
	FOR i IN 1 .. 1000 LOOP
		PERFORM idempotency.claim('w', 'loop ' || i, '{"n":1}');
		IF i % 10 = 0 THEN PERFORM idempotency.release('w', 'loop ' || i); CONTINUE; END IF;
		PERFORM idempotency.complete('w', 'loop ' || i, '1');
		PERFORM idempotency.claim('w', 'loop ' || i, '{"n":1}');
	END LOOP;
END $$; SELECT pg_stat_force_next_flush()});
is(counted(), '900|0|0|0|0', 'nine hundred operations are nine hundred inserts');

$session->quit;
$node->stop;
done_testing();
