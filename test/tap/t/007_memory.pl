# 007_memory.pl
#
# Proves that a session's memory does not grow with the number of operations: committed
# claims; PL/pgSQL blocks with EXCEPTION, a third of which fail; replays in one
# transaction; savepoints; and inbox records, singly and in batches. The memory contexts
# and the kernel's count at the end equal those after a first small part of the work.
#
# `make soak` runs ten times as many operations: one million claims and replays.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The lock table must have space for the keys of the savepoints.
my $node = new_node('main', conf => q{
synchronous_commit = off
max_wal_size = 4GB
checkpoint_timeout = 1h
log_statement = none
max_locks_per_transaction = 1000
max_connections = 20
});

memory_tools($node);
$node->safe_psql('postgres', q{

	-- One operation after another, each in its own transaction.
	CREATE PROCEDURE pairs(first int, last int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN first .. last LOOP
			PERFORM idempotency.claim('pairs', 'key ' || i, '{"amount": 1}');
			PERFORM idempotency.complete('pairs', 'key ' || i, '{"done": true}', 201, '{"A": "b"}');
			COMMIT;
		END LOOP;
	END $$;

	-- The same in blocks, a third of which fail.
	CREATE PROCEDURE exceptions(first int, last int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN first .. last LOOP
			BEGIN
				PERFORM idempotency.claim('exceptions', 'key ' || i, '{"amount": 1}');
				IF i % 6 = 0 THEN RAISE division_by_zero; END IF;
				PERFORM idempotency.complete('exceptions', 'key ' || i, '{"done": true}');
				IF i % 6 = 3 THEN RAISE division_by_zero; END IF;
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
			COMMIT;
		END LOOP;
	END $$;

	-- One stored outcome, repeatedly.
	CREATE PROCEDURE replays(first int, last int) LANGUAGE plpgsql AS $$
	DECLARE op idempotency.operation;
	BEGIN
		FOR i IN first .. last LOOP
			op := idempotency.claim('pairs', 'key 1', '{"amount": 1.0}');
			ASSERT op.replayed;
		END LOOP;
	END $$;

	-- Inbox records: singly, duplicates, and in overlapping batches.
	CREATE PROCEDURE inbox(first int, last int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN first .. last LOOP
			ASSERT idempotency.once('inbox', i::text);
			ASSERT NOT idempotency.once('inbox', i::text);
			IF i % 10 = 0 THEN
				PERFORM idempotency.once_many('batch', array(SELECT j::text FROM generate_series(i - 19, i) AS j));
				COMMIT;
			END IF;
		END LOOP;
	END $$;

	-- A transaction with many savepoints, each with its own operation.
	CREATE PROCEDURE savepoints(first int, last int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN first .. last LOOP
			BEGIN
				PERFORM idempotency.claim('savepoints', i::text, '{"amount": 1}');
				PERFORM idempotency.complete('savepoints', i::text, '1');
			EXCEPTION WHEN division_by_zero THEN NULL;
			END;
		END LOOP;
	END $$});

# is_flat calls a procedure in one session for "count" operations in "parts" equal
# parts. It compares the memory after the first part with the memory after the last. It
# measures between the CALLs, because PL/pgSQL keeps a few bytes for each COMMIT until
# the CALL ends. "around" is SQL before and after all calls.
sub is_flat
{
	my ($name, $procedure, $count, $parts, @around) = @_;
	my $size = $count / $parts;
	my @calls = map { sprintf("CALL $procedure(%d, %d);", ($_ - 1) * $size + 1, $_ * $size) } 1 .. $parts;
	my $measure = "SELECT measure('$procedure', %d);";

	$calls[0] .= sprintf $measure, 0;
	$calls[-1] .= sprintf $measure, 1;
	$node->safe_psql('postgres', join("\n", $around[0] // '', @calls, $around[1] // ''),
		timeout => 3 * $PostgreSQL::Test::Utils::timeout_default);

	# A leak of 8 bytes per operation, the smallest allocation, in the shortest of these
	# loops, is 72 kB.
	memory_is_flat($node, $procedure, 48 * 1024, $name);
}

# count_is compares the number of keys of a scope.
sub count_is
{
	my ($scope, $expected) = @_;
	is($node->safe_psql('postgres', "SELECT count(*) FROM idempotency.key WHERE scope = '$scope'"),
		$expected, "$scope: each operation is stored");
}

my $many = soak(1, 10);
is_flat('pairs', 'pairs', $many * 100_000, 20);
count_is('pairs', $many * 100_000);
is_flat('replays in one transaction', 'replays', $many * 100_000, 20, 'BEGIN;', 'COMMIT;');
is_flat('blocks with EXCEPTION', 'exceptions', $many * 24_000, 20);
count_is('exceptions', $many * 16_000);
is_flat('inbox records', 'inbox', $many * 20_000, 20);
count_is($_, $many * 20_000 + ($_ eq 'batch' ? 10 : 0)) foreach qw(inbox batch);
is_flat('savepoints', 'savepoints', $many * 10_000, 10);
count_is('savepoints', $many * 10_000);

$node->stop;
done_testing();
