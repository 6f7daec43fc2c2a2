# RelayTest.pm
#
# Helpers for tests of the relay: a server, a role that owns subscriptions, and a
# handler whose action the event names. The runner puts this directory into @INC.

package RelayTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw($handlers $subscribe relay_node as_app fails_with_app publish done
  becomes_true idle waits_in_handler);

my $node;

# The payload of an event names the handler's action. The handler stores what it did in
# a table, unless that is rolled back.
our $handlers = q{
	CREATE TABLE done (n bigint GENERATED ALWAYS AS IDENTITY, topic text, seq bigint, id uuid, what text, attempt int,
		at timestamptz DEFAULT clock_timestamp(), lag interval, note text);
	CREATE TABLE parent (id int PRIMARY KEY);
	CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED);
	CREATE TABLE single (id int, CONSTRAINT one UNIQUE (id) DEFERRABLE INITIALLY IMMEDIATE);
	INSERT INTO single VALUES (0);
	CREATE TABLE flag (name text);

	CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		what text := e.payload ->> 'do';
		said text;
	BEGIN
		INSERT INTO done (topic, seq, id, what, attempt, lag)
			VALUES (e.topic, e.seq, e.id, what, e.attempt, clock_timestamp() - e.published_at);
		CASE split_part(what, ' ', 1)
		WHEN 'fail' THEN RAISE EXCEPTION 'no: %', what USING ERRCODE = 'P0042', DETAIL = 'in detail';
		WHEN 'once' THEN
			IF e.attempt = 1 THEN RAISE EXCEPTION 'the first time'; END IF;
		WHEN 'sleep' THEN PERFORM pg_sleep(600);
		WHEN 'nap' THEN PERFORM pg_sleep(split_part(what, ' ', 2)::float8);
		WHEN 'dawdle' THEN
			IF NOT EXISTS (SELECT FROM flag) THEN PERFORM pg_sleep(0.05); END IF;
		WHEN 'deaf' THEN
			LOOP
				BEGIN PERFORM pg_sleep(600); EXCEPTION WHEN query_canceled THEN NULL; END;
			END LOOP;
		WHEN 'await' THEN
			WHILE NOT EXISTS (SELECT FROM flag) LOOP PERFORM pg_sleep(0.01); END LOOP;
		WHEN 'set' THEN SET work_mem = '33MB'; SET search_path = nowhere; SET LOCAL DateStyle = 'German';
			SET default_transaction_isolation = 'serializable'; SET default_transaction_read_only = on;
		WHEN 'execute' THEN EXECUTE substr(what, 9);
		WHEN 'claim' THEN PERFORM idempotency.claim('open', e.seq::text);
		WHEN 'complete' THEN
			PERFORM idempotency.claim('complete', e.seq::text);
			PERFORM idempotency.complete('complete', e.seq::text);
		WHEN 'lost' THEN PERFORM idempotency.complete('lost', 'no owner');
		WHEN 'caught' THEN
			BEGIN PERFORM idempotency.complete('lost', 'no owner'); EXCEPTION WHEN OTHERS THEN NULL; END;
		WHEN 'commit' THEN COMMIT;
		WHEN 'publish' THEN PERFORM idempotency.publish('again', '{"do": "published"}');
		WHEN 'temporary' THEN
			CREATE TEMPORARY TABLE scratch (id int) ON COMMIT DROP;
			INSERT INTO scratch VALUES (1);
		WHEN 'orphan' THEN INSERT INTO child VALUES (split_part(what, ' ', 2)::int);
		WHEN 'family' THEN
			INSERT INTO child VALUES (split_part(what, ' ', 2)::int);
			INSERT INTO parent VALUES (split_part(what, ' ', 2)::int);
		WHEN 'twice' THEN
			BEGIN
				INSERT INTO single VALUES (0);
				said := 'too late';
			EXCEPTION WHEN unique_violation THEN
				said := 'at once';
			END;
		WHEN 'show' THEN
			said := format('%s %s %s %s %s %s %s %s', current_setting('work_mem'), current_setting('search_path'), current_setting('DateStyle'),
				current_user, session_user, current_setting('is_superuser'), current_setting('transaction_isolation'),
				coalesce(idempotency.current_key('complete'), 'no claim'));
		WHEN 'left' THEN
			said := (SELECT count(*) FROM pg_prepared_statements) || ' ' || (SELECT count(*) FROM pg_cursors) || ' ' ||
				(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid < 3);
		WHEN 'memory' THEN said := sum(total_bytes) FROM pg_backend_memory_contexts;
		ELSE NULL;
		END CASE;
		UPDATE public.done AS d SET note = said WHERE d.seq = e.seq AND said IS NOT NULL;
	END $$;
};

# The subscription to all topics.
our $subscribe = q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '100 ms', max_attempts => 3)};

# relay_node creates a server with additional settings, where app owns the subscription
# to all topics. The reaper rarely runs, so that it does not find the events first.
sub relay_node
{
	my ($conf) = @_;
	$conf //= '';
	$node = new_node('main', init => { allows_streaming => 1 }, conf => q{
		shared_preload_libraries = 'idempotency'
		idempotency.reaper_naptime = '1h'
		restart_after_crash = on
		max_prepared_transactions = 10
		log_statement = none
		log_line_prefix = '%m [%p] %e %q%a '
	} . "\n$conf\n");
	watch_log($node);
	$node->safe_psql('postgres', q{
		CREATE ROLE app LOGIN;
		CREATE ROLE friend;
		CREATE ROLE boss SUPERUSER;
		GRANT friend, boss TO app;
		GRANT pg_read_all_stats TO app;
		SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
		GRANT CREATE ON SCHEMA public TO app});
	as_app($handlers);
	as_app($subscribe);
	return $node;
}

# as_app runs SQL as the role that owns the subscriptions.
sub as_app
{
	my ($sql, $dbname) = @_;
	return $node->safe_psql($dbname // 'postgres', $sql, extra_params => [ '--username', 'app' ]);
}

# fails_with_app does the same and returns stderr.
sub fails_with_app
{
	return ($node->psql('postgres', $_[0], extra_params => [ '--username', 'app' ]))[2];
}

# publish publishes events that the handler acts on, in one transaction:
# publish('order', 'fail', aggregate => 'A').
sub publish
{
	my ($topic, $do, %opt) = @_;
	my $aggregate = defined $opt{aggregate} ? "'$opt{aggregate}'" : 'NULL';
	my @all = ref $do ? @$do : ($do);
	my $list = join ', ', map { "'$_'" } @all;
	return as_app(qq{SELECT count(idempotency.publish('$topic', json_build_object('do', what), $aggregate))
		FROM unnest(ARRAY[$list]) AS what}, $opt{dbname});
}

# done returns what the handler has done, in order.
sub done
{
	my ($condition) = @_;
	return $node->safe_psql('postgres', "SELECT string_agg(what, ' ' ORDER BY n) FROM done WHERE $condition");
}

# becomes_true waits until a query, run by the superuser, returns true.
sub becomes_true
{
	my ($query, $name, $dbname) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return ok($node->poll_query_until($dbname // 'postgres', $query), $name)
	  || diag($node->safe_psql($dbname // 'postgres', 'TABLE idempotency.parked; TABLE idempotency.position; TABLE idempotency.subscription'));
}

# idle waits until no worker is connected.
sub idle
{
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
	  or die 'workers do not exit';
}

# waits_in_handler waits until a worker runs a handler that sleeps, and returns the
# worker's process ID.
sub waits_in_handler
{
	return worker_pid($node, 'idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
}

1;
