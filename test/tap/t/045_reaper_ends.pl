# 045_reaper_ends.pl
#
# Proves that a batch of the reaper blocks no other process: SIGTERM ends it, also for
# DROP DATABASE ... FORCE and a fast shutdown, and the next reaper repeats it.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '100ms'
log_statement = none
});
watch_log($node);

# A trigger after the write, which is harmless otherwise, makes a batch last forever.
# hold creates it in a database, and waits until the reaper runs it.
sub hold
{
	my ($dbname) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->safe_psql($dbname, q{
		CREATE EXTENSION idempotency;
		CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM pg_catalog.pg_sleep(86400);
			RETURN NULL;
		END $$;
		CREATE TRIGGER hold AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION hold();
		SELECT idempotency.once('s', 'k', '1 microsecond')});
	$node->poll_query_until('postgres', qq{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE backend_type = 'idempotency reaper' AND datname = '$dbname' AND wait_event = 'PgSleep'}) or die 'the reaper does not start';
	return;
}

my $minutes = 60_000 * $PostgreSQL::Test::Utils::timeout_default / 60;
hold('ended');
is($node->safe_psql('postgres', qq{SELECT pg_terminate_backend(pid, $minutes) FROM pg_stat_activity
		WHERE backend_type = 'idempotency reaper' AND wait_event = 'PgSleep'}), 't', 'the reaper ends during a batch');
$node->safe_psql('ended', 'DROP TRIGGER hold ON idempotency.reaper');
ok($node->poll_query_until('ended', 'SELECT count(*) = 0 FROM idempotency.key'), 'the next reaper deletes the rows');
hold('forced');
$node->safe_psql('postgres', 'DROP DATABASE forced WITH (FORCE)');
pass('a database can be dropped while the reaper runs');
unlike(log_since(), qr/(?:WARNING|FATAL|PANIC):|background worker/, 'the log has no warning or error');
hold('shut');
$node->stop('fast');
pass('a fast shutdown does not wait for the reaper');

done_testing();
