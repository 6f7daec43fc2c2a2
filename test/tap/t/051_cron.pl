# 051_cron.pl
#
# Proves that pg_cron can run deliver() on the portable edition, as on a managed server: in two
# databases, as a role without privileges, while the session of a job is killed and one event
# always fails. Each event is handled once, and that one becomes a dead letter.
#
# pg_cron 1.4 starts a job once a minute at most, so the jobs have the schedule @reboot, and
# the server is started again for each run.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $portable = dirname(__FILE__) . '/../../../portable/idempotency.sql';
my @databases = qw(one two);

my $node = new_node('main');
$node->append_conf('postgresql.conf', sprintf "shared_preload_libraries = 'pg_cron'\ncron.database_name = 'postgres'\ncron.host = '%s'\n", $node->host);
$node->restart;
$node->safe_psql('postgres', 'CREATE EXTENSION pg_cron; CREATE ROLE shop LOGIN');

foreach my $database (@databases)
{
	$node->safe_psql('postgres', "CREATE DATABASE $database");
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr($database), '-f', $portable ], "$database: the portable edition");
	$node->safe_psql($database, q{
		SELECT idempotency.grant_client('shop'), idempotency.grant_consumer('shop');
		GRANT CREATE ON SCHEMA public TO shop;
		SET SESSION AUTHORIZATION shop;
		CREATE TABLE handled (n int PRIMARY KEY, attempt int);
		-- The first delivery of event 5 waits until it is killed, event 7 fails.
		CREATE FUNCTION handle(event idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			IF event.payload::text = '5' AND event.attempt = 1 THEN
				PERFORM pg_sleep(3600);
			END IF;
			INSERT INTO handled VALUES (event.payload::text::int, event.attempt);
			IF event.payload::text = '7' THEN
				RAISE EXCEPTION 'the carrier does not exist';
			END IF;
		END $$;
		SELECT idempotency.subscribe('shipping', '{order.*}', max_attempts => 2, retry_delay => '0');
		SELECT idempotency.publish('order.placed', to_json(n)) FROM generate_series(1, 40) AS n;
	});
	$node->safe_psql('postgres', qq{SELECT cron.schedule_in_database('deliver in $database', '\@reboot',
		\$\$CALL idempotency.deliver('shipping', 'handle(idempotency.event)', max_events => 10, lease => '1 s', wait => '2 s')\$\$,
		'$database', 'shop')});
}

# The first run: the session of each job is killed in the middle of a batch.
$node->restart;
foreach my $database (@databases)
{
	my $waits = "FROM pg_stat_activity WHERE datname = '$database' AND usename = 'shop' AND wait_event = 'PgSleep'";
	$node->poll_query_until('postgres', "SELECT count(*) = 1 $waits") or die "no job waits in $database";
	is($node->safe_psql('postgres', "SELECT pg_terminate_backend(pid, 60000) $waits"), 't', "$database: the session of the job is killed");
	is($node->safe_psql($database, 'SELECT count(*) FROM handled'), 0, "$database: what it had done is rolled back");
}
$node->poll_query_until('postgres', "SELECT count(*) = 2 FROM cron.job_run_details WHERE status = 'failed'")
  or die 'pg_cron does not notice';

# The second one.
$node->restart;
$node->poll_query_until('postgres', "SELECT count(*) = 2 FROM cron.job_run_details WHERE status = 'succeeded'")
  or die $node->safe_psql('postgres', 'SELECT database, status, return_message FROM cron.job_run_details');
foreach my $database (@databases)
{
	is($node->safe_psql($database, 'SELECT count(*), sum(n), max(attempt) FROM handled'), '39|813|2', "$database: each event is handled once");
	is($node->safe_psql($database, 'SELECT payload, error FROM idempotency.dead_letters'), '7|P0001: the carrier does not exist',
		"$database: the one that fails is a dead letter");
}

done_testing();
