# 024_outbox_flat.pl
#
# Proves that the cost of delivery does not depend on how long another transaction stays
# open. After 500 batches under another session's snapshot, or beside open
# transactions that have published, a batch reads as many buffers as at the beginning;
# the same holds after 500 failures. A position takes two row versions per batch, whose
# space is reused, and a session's memory does not grow with the number of fetches.
# The views have no plan that reads a backlog, or that is compiled, before the first ANALYZE.
# `make soak` runs 2,000 batches and more fetches. The script takes more than 15 seconds,
# because a cost that grows shows itself only after many batches.
#
# The test measures no time, only the shared buffers that a statement reads, according
# to EXPLAIN.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
synchronous_commit = off
max_prepared_transactions = 10
checkpoint_timeout = 1h
log_statement = none
});

$node->safe_psql('postgres', q{
	CREATE TABLE cost (place int8 GENERATED ALWAYS AS IDENTITY, subscription text, statement text, buffers int, rows int);

	CREATE TYPE looked AS (buffers int, rows int);

	-- The number of shared buffers that a statement reads, and of rows that it returns.
	CREATE FUNCTION buffers(statement text) RETURNS looked LANGUAGE plpgsql AS $$
	DECLARE
		plan json;
	BEGIN
		EXECUTE 'EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, SUMMARY OFF, FORMAT JSON) ' || statement INTO plan;
		plan := plan->0->'Plan';
		RETURN ((plan->>'Shared Hit Blocks')::int + (plan->>'Shared Read Blocks')::int, (plan->>'Actual Rows')::numeric::int);
	END $$;

	-- Fetches and acknowledges so many batches of five, each step in its own
	-- transaction, and stores the cost. The first event of a batch fails.
	CREATE PROCEDURE batches(name text, count int, fails boolean DEFAULT false) LANGUAGE plpgsql AS $$
	DECLARE
		f looked;
		n looked;
		a looked;
		given int8;
	BEGIN
		FOR i IN 1 .. count LOOP
			f := buffers(format('SELECT * FROM idempotency.fetch(%L, 5)', name));
			COMMIT;
			SELECT batch INTO given FROM idempotency.position WHERE subscription = name ORDER BY version DESC LIMIT 1;
			IF fails THEN
				n := buffers(format('SELECT idempotency.nack(%L, %s, id, ''no'', ''1 us'')'
					' FROM idempotency.outbox WHERE seq = (SELECT events[1] FROM idempotency.position'
					' WHERE subscription = %1$L ORDER BY version DESC LIMIT 1)', name, given));
				COMMIT;
			END IF;
			a := buffers(format('SELECT idempotency.ack(%L, %s)', name, given));
			COMMIT;
			INSERT INTO cost (subscription, statement, buffers, rows)
			VALUES (name, 'fetch', f.buffers, f.rows), (name, 'nack', n.buffers, n.rows), (name, 'ack', a.buffers, a.rows);
			COMMIT;
		END LOOP;
	END $$});

# is_flat runs so many batches, and compares the cost of the last hundred with that of a
# hundred near the beginning.
sub is_flat
{
	my ($name, $count, $fails) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my %is;

	$node->safe_psql('postgres', qq{
		SELECT idempotency.subscribe('$name', ARRAY['*'], max_attempts => 1000000);
		SELECT count(idempotency.publish('t', '{}')) FROM generate_series(1, 5 * $count);
		CALL batches('$name', $count, @{[ $fails ? 'true' : 'false' ]})}, timeout => $PostgreSQL::Test::Utils::timeout_default);
	foreach (split /\n/, $node->safe_psql('postgres', qq{
		SELECT statement, min(rows), max(rows), avg(buffers) FILTER (WHERE batch BETWEEN 101 AND 200),
			avg(buffers) FILTER (WHERE batch > $count - 100)
		FROM (SELECT *, row_number() OVER (PARTITION BY statement ORDER BY place) AS batch FROM cost WHERE subscription = '$name') AS c
		WHERE buffers IS NOT NULL GROUP BY statement}))
	{
		my ($statement, @numbers) = split /\|/;
		$is{$statement} = \@numbers;
	}
	is(join(' ', sort keys %is), $fails ? 'ack fetch nack' : 'ack fetch', "$name: all statements are measured");
	is("@{ $is{fetch} }[0, 1]", '5 5', "$name: each fetch returns five events");
	foreach my $statement (sort keys %is)
	{
		my ($first, $last) = @{ $is{$statement} }[2, 3];
		note(sprintf '%s: %s reads %.1f buffers at first, %.1f in the end', $name, $statement, $first, $last);
		cmp_ok($last, '<', 1.25 * $first + 4, "$name: $statement is flat");
	}
	return;
}

# idle_is_cheap fetches where there is no event, and checks the cost once the caches of
# the session are filled.
sub idle_is_cheap
{
	my ($name, $subscription) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @looks = split /\n/, $node->safe_psql('postgres', qq{SELECT buffers, rows FROM buffers('SELECT * FROM idempotency.fetch(''$subscription'')'); } x 3);
	my ($buffers, $rows) = split /\|/, $looks[2];

	is($rows, 0, "$name: there is no event");
	cmp_ok($buffers, '<', 40, "$name: a fetch without events is cheap");
	return;
}

# pages returns the number of pages of a relation.
sub pages
{
	my ($relation) = @_;
	return $node->safe_psql('postgres', "SELECT pg_relation_size('idempotency.$relation') / current_setting('block_size')::int");
}

# ----------------------------------------------------------------
# Buffers
# ----------------------------------------------------------------

# versions returns how often a position was written, according to the statistics.
sub versions
{
	my ($subscription) = @_;
	return $node->safe_psql('postgres', "SELECT version FROM idempotency.position WHERE subscription = '$subscription'");
}

my $batches = soak(500, 2000);
my $before = $node->safe_psql('postgres', q{SELECT idempotency.subscribe('alone', ARRAY['*'])}) && versions('alone');
is_flat('alone', $batches);
is(versions('alone') - $before, 2 * $batches, 'a batch takes two versions of the position');
cmp_ok(pages($_), '<', 20, "$_: space is reused without VACUUM") foreach 'position', 'position_pkey';

# These sessions act until the end of the test.
my %elsewhere = (
	'a snapshot' => [ 'BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1' ],
	'a transaction that has published' => [ 'BEGIN; SELECT pg_current_xact_id(); ' . publish(1) ],
	'many transactions' => [ map { 'BEGIN; SAVEPOINT a; ' . publish($_) . 'RELEASE a; SELECT 1' } 1 .. 10 ]);
foreach my $elsewhere (sort keys %elsewhere)
{
	my @sessions = map { open_session($node) } @{ $elsewhere{$elsewhere} };

	$node->safe_psql('postgres', 'VACUUM');
	$sessions[$_]->query_safe($elsewhere{$elsewhere}[$_]) foreach 0 .. $#sessions;
	is_flat($elsewhere, $batches);
	cmp_ok(pages('position'), '>', $batches / 50, "$elsewhere: no version could be removed") if $elsewhere eq 'a snapshot';
	idle_is_cheap($elsewhere, $elsewhere);
	$_->query_safe('COMMIT') foreach @sessions;
	$_->quit foreach @sessions;
}

$node->safe_psql('postgres', 'VACUUM');
is_flat('failures', $batches, 1);

# Transactions in flight are read once when they are met, and once when they end,
# however many there are, even without other events.
my $open = open_session($node);
my $many = q{SELECT count(idempotency.publish('many', '{}')) FROM generate_series(1, 20000)};
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('idle', ARRAY['*'])});
$open->query_safe("BEGIN; $many");
idle_is_cheap('20,000 events in flight', 'idle');
$open->query_safe('ROLLBACK');
idle_is_cheap('20,000 events rolled back', 'idle');
$open->query_safe('BEGIN; ' . publish(1, 'few') . 'SELECT 1');
$node->safe_psql('postgres', $many);
$open->query_safe(publish(2, 'few'));
$node->safe_psql('postgres', publish(3, 'few') . q{SELECT idempotency.subscribe('few', ARRAY['few'], start_at => 'beginning');
	SELECT count(*) FROM idempotency.fetch('few')});
is($node->safe_psql('postgres', q{SELECT idempotency.ack('few', batch) FROM idempotency.position WHERE subscription = 'few'}), '1', 'one event is delivered');
$open->query_safe('ROLLBACK');
$open->quit;
idle_is_cheap('two events rolled back, and 20,000 between them', 'few');

# ----------------------------------------------------------------
# Memory
# ----------------------------------------------------------------

memory_tools($node);
$node->safe_psql('postgres', q{
	-- Fetches so many times, each in its own transaction; every fourth fetch finds two
	-- events, of which one sometimes fails.
	CREATE PROCEDURE fetches(name text, count int) LANGUAGE plpgsql AS $$
	DECLARE
		given int8;
		first uuid;
	BEGIN
		FOR i IN 1 .. count LOOP
			IF i % 4 = 0 THEN
				PERFORM idempotency.publish('memory', json_build_object('n', i, 'rest', repeat('x', 1000)), (i % 10)::text, 'type', '{"a": "b"}');
				PERFORM idempotency.publish('memory', '{}');
				COMMIT;
			END IF;
			SELECT max(batch), (array_agg(id))[1] INTO given, first FROM idempotency.fetch(name, 2);
			IF given IS NOT NULL THEN
				IF i % 100 = 0 THEN
					PERFORM idempotency.nack(name, given, first, 'no', '0');
				END IF;
				PERFORM idempotency.ack(name, given);
			END IF;
			COMMIT;
		END LOOP;
	END $$;

	-- The same in blocks, most of which fail.
	CREATE PROCEDURE blocks(name text, count int) LANGUAGE plpgsql AS $$
	DECLARE
		given int8;
	BEGIN
		FOR i IN 1 .. count LOOP
			BEGIN
				IF i % 4 = 0 THEN
					PERFORM idempotency.publish('memory', '{}', (i % 10)::text);
				END IF;
				SELECT max(batch) INTO given FROM idempotency.fetch(name, 2);
				PERFORM idempotency.ack(name, coalesce(given, 1));
			EXCEPTION WHEN SQLSTATE 'IK408' THEN NULL;
			END;
			COMMIT;
			PERFORM idempotency.publish('memory', '{}') WHERE i % 3 = 0;
			COMMIT;
		END LOOP;
	END $$});

# keeps_its_memory calls a procedure in one session, part by part, and compares the
# memory after the first part with the memory after the last. PL/pgSQL keeps a few bytes
# for each COMMIT until the CALL ends.
sub keeps_its_memory
{
	my ($procedure, $count) = @_;
	my @calls = ("CALL $procedure('$procedure', $count / 20);") x 20;

	$calls[0] .= "SELECT measure('$procedure', 0);";
	$calls[-1] .= "SELECT measure('$procedure', 1);";
	$node->safe_psql('postgres', "SELECT idempotency.subscribe('$procedure', ARRAY['memory'])");
	my $before = versions($procedure);
	$node->safe_psql('postgres', join("\n", @calls), timeout => 2 * $PostgreSQL::Test::Utils::timeout_default);
	my $versions = versions($procedure) - $before;
	note("$procedure: $versions versions of the position");

	# A leak of 8 bytes per fetch, the smallest allocation, is at least 45 kB.
	memory_is_flat($node, $procedure, 24 * 1024, $procedure);
	cmp_ok($versions, '>', $count / 4, "$procedure: many fetches returned events");
	return;
}
keeps_its_memory('fetches', soak(8_000, 100_000));
keeps_its_memory('blocks', soak(6_000, 50_000));

# ----------------------------------------------------------------
# Views without statistics
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE fresh');
$node->safe_psql('fresh', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.subscribe('s' || n, '{t*}', partitions => 8) FROM generate_series(1, 20) AS n;
	SELECT idempotency.publish('t', '1', n::text) FROM generate_series(1, 20000) AS n});
foreach my $view (qw(partitions subscriptions))
{
	my $plan = $node->safe_psql('fresh', "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) SELECT * FROM idempotency.$view");
	my ($cost, $hit, $read) = map { $plan =~ /"$_": ([0-9.]+)/ } 'Total Cost', 'Shared Hit Blocks', 'Shared Read Blocks';

	cmp_ok($cost, '<', $node->safe_psql('fresh', 'SHOW jit_above_cost'), "$view is not compiled");
	cmp_ok($hit + $read, '<', 5000, "$view does not read the backlog of each partition");
}

$node->stop;
done_testing();
