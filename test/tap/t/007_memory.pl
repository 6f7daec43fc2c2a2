# 007_memory.pl
#
# Proves that a session's memory does not grow with the number of operations:
# a million claims completed, each committed; two hundred thousand in PL/pgSQL
# blocks with EXCEPTION, a third of which fail; a million replays in one
# transaction; a hundred thousand savepoints, ten thousand in a transaction; and
# inbox records, one by one and in batches.  What the session has in all its
# memory contexts, and by the kernel's count, is the same at the end as after a
# first small part of the work.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The lock table must hold the savepoints' keys.
my $node = new_node('main', conf => q{
synchronous_commit = off
max_wal_size = 4GB
checkpoint_timeout = 1h
log_statement = none
max_locks_per_transaction = 1000
max_connections = 20
});

$node->safe_psql('postgres', q{
	CREATE TABLE measured (variant text, part int, used int8, total int8, rss int8);

	-- What this session has at the moment: bytes in use and bytes allocated in
	-- all memory contexts, and what the kernel counts, in kB, but for shared
	-- memory, which a session has as soon as it looks at it.
	CREATE FUNCTION measure(variant text, part int) RETURNS void LANGUAGE sql AS $$
		WITH status AS MATERIALIZED (SELECT pg_read_file('/proc/self/status') AS s)
		INSERT INTO measured
		SELECT variant, part, sum(used_bytes), sum(total_bytes),
			(SELECT substring(s FROM 'VmRSS:\s+(\d+)')::int8 - substring(s FROM 'RssShmem:\s+(\d+)')::int8 FROM status)
		FROM pg_backend_memory_contexts
	$$;

	-- One operation after another, each in a transaction of its own.
	CREATE PROCEDURE pairs(first int, last int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN first .. last LOOP
			PERFORM idempotency.claim('pairs', 'key ' || i, '{"amount": 1}');
			PERFORM idempotency.complete('pairs', 'key ' || i, '{"done": true}', 201, '{"A": "b"}');
			COMMIT;
		END LOOP;
	END $$;

	-- The same in a block, which a third of them leave by an error.
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

	-- One stored outcome again and again.
	CREATE PROCEDURE replays(first int, last int) LANGUAGE plpgsql AS $$
	DECLARE op idempotency.operation;
	BEGIN
		FOR i IN first .. last LOOP
			op := idempotency.claim('pairs', 'key 1', '{"amount": 1.0}');
			ASSERT op.replayed;
		END LOOP;
	END $$;

	-- Inbox records: one by one, known ones, and in batches that overlap.
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

	-- A transaction with many savepoints, each with an operation of its own.
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

# is_flat calls a procedure in one session for "count" operations, in "parts"
# equal parts, and compares what the session had after the first part with what
# it had after the last.  (PL/pgSQL itself keeps a few bytes for each COMMIT
# until the CALL ends, so it is measured in between.)  "around" is put around
# all of it.
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

	my ($used, $total, $rss) = split /\|/, $node->safe_psql('postgres', qq{
		SELECT b.used - a.used, b.total - a.total, b.rss - a.rss
		FROM measured AS a JOIN measured AS b USING (variant)
		WHERE variant = '$procedure' AND a.part = 0 AND b.part = 1});
	note("$name: used $used, total $total bytes, resident $rss kB more");

	# A leak of one byte an operation, in the least of these loops, is 90 kB.
	cmp_ok($used, '<', 48 * 1024, "$name: no more bytes are in use");
	cmp_ok($total, '<', 256 * 1024, "$name: nor allocated");
	# AddressSanitizer keeps what was freed for a while, to know it again.
	cmp_ok($rss, '<', 4 * 1024, "$name: nor does the kernel know of more") unless $ENV{ASAN_OPTIONS};
}

# count_is compares how many keys a scope has.
sub count_is
{
	my ($scope, $expected) = @_;
	is($node->safe_psql('postgres', "SELECT count(*) FROM idempotency.key WHERE scope = '$scope'"),
		$expected, "$scope: each operation is stored");
}

is_flat('a million pairs', 'pairs', 1_000_000, 20);
count_is('pairs', 1_000_000);
is_flat('a million replays in one transaction', 'replays', 1_000_000, 20, 'BEGIN;', 'COMMIT;');
is_flat('blocks with EXCEPTION', 'exceptions', 200_000, 20);
count_is('exceptions', 133_334);
is_flat('inbox records', 'inbox', 200_000, 20);
count_is($_, 200_000 + ($_ eq 'batch' ? 10 : 0)) foreach qw(inbox batch);
is_flat('savepoints', 'savepoints', 100_000, 10);
count_is('savepoints', 100_000);

$node->stop;
done_testing();
