# 045_outbox_ends.pl
#
# Proves that the outbox does not block other processes. SIGTERM ends the reaper during
# a batch, also for DROP DATABASE ... FORCE and a fast shutdown. A subscription with a
# backlog behind one failed event makes progress under statement_timeout. A waiting
# fetch() holds no lock on a table, so that the extension can be dropped or recreated
# meanwhile; the fetch then fails with a clear error.

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

# ----------------------------------------------------------------
# A waiting fetch
# ----------------------------------------------------------------

# waiting starts a fetch that finds no event, and returns the session once it waits.
sub waiting
{
	my $session = open_session($node, dbname => 'dropped');
	$session->query_until(qr/begun/, "\\echo begun\nSELECT count(*) FROM idempotency.fetch('s', wait => '1 hour');\n");
	$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE query LIKE '%1 hour%' AND wait_event_type IN ('Extension', 'IPC') AND pid <> pg_backend_pid()})
	  or die 'the fetch does not wait';
	return $session;
}

# result returns the stderr of a session, and ends the session.
sub result
{
	my ($session) = @_;
	$session->query_until(qr/over/, "\\echo over\n");
	my $stderr = $session->{stderr};
	$session->quit;
	return $stderr;
}

my $create = q{CREATE EXTENSION idempotency; SELECT idempotency.subscribe('s', '{*}')};
my $gone = qr/ERROR:  55000: extension "idempotency" (?:is not installed in this database|was dropped or replaced during the call)/;
$node->safe_psql('postgres', 'CREATE DATABASE dropped');
$node->safe_psql('dropped', $create);
my $session = waiting();
ok($node->poll_query_until('dropped', q{SELECT count(*) = 0 FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
		WHERE c.relnamespace = 'idempotency'::regnamespace AND l.pid <> pg_backend_pid()}), 'a waiting fetch holds no lock on a table between two polls');
$node->safe_psql('dropped', 'DROP EXTENSION idempotency');
like(result($session), $gone, 'the extension is dropped while a fetch waits');

$node->safe_psql('dropped', $create);
$session = waiting();
$node->safe_psql('dropped', "BEGIN; DROP EXTENSION idempotency; $create; SELECT FROM idempotency.publish('t', '1'); COMMIT");
like(result($session), $gone, 'the extension is recreated while a fetch waits');
is($node->safe_psql('dropped', q{SELECT count(*) FROM idempotency.fetch('s')}), '1', 'the next call in the recreated extension gets the event');

# A transaction that drops the extension and is still open when the fetch polls.
$session = waiting();
my $dropper = open_session($node, dbname => 'dropped');
$dropper->query_safe('BEGIN; DROP EXTENSION idempotency');
$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted}) or die 'the fetch does not poll again';
$dropper->query_safe('COMMIT');
$dropper->quit;
like(result($session), $gone, 'the extension is being dropped when a fetch polls');

# A drop that is rolled back does not affect the fetch.
$node->safe_psql('dropped', $create);
$session = waiting();
$dropper = open_session($node, dbname => 'dropped');
$dropper->query_safe('BEGIN; DROP EXTENSION idempotency');
$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted}) or die 'the fetch does not poll again';
$dropper->query_safe('ROLLBACK');
$dropper->quit;
$node->safe_psql('dropped', q{SELECT FROM idempotency.publish('t', '1')});
is($session->query_until(qr/^1$/m, "\n") =~ /^1$/m ? 'it' : '', 'it', 'a fetch continues when the drop is rolled back');
$session->quit;

# ----------------------------------------------------------------
# A backlog behind a failed event
# ----------------------------------------------------------------

# A statement parks at most 1000 events. If each takes a while, 20,000 events could not
# be parked within any statement_timeout.
$node->safe_psql('dropped', q{
	SELECT idempotency.subscribe('hot', '{hot}', retry_delay => '1 hour');
	SELECT count(idempotency.publish('hot', to_json(n), 'a')) FROM generate_series(1, 20000) AS n});
$node->safe_psql('dropped', q{
	SELECT batch, id FROM idempotency.fetch('hot', 1) \gset
	SELECT idempotency.nack('hot', :batch, :'id', 'no'), idempotency.ack('hot', :batch)});
my $fetches = 0;
my $lag = 20000;
while ($lag > 0 && $fetches < 50)
{
	$node->safe_psql('dropped', q{SELECT count(*) FROM idempotency.fetch('hot', wait => '1 hour')});
	$fetches++;
	my $left = $node->safe_psql('dropped', q{SELECT lag_events FROM idempotency.subscriptions WHERE subscription = 'hot'});
	last if $left >= $lag;
	$lag = $left;
}
is("$lag after $fetches", '0 after 20', 'each fetch parks a part of the backlog and commits it');
$node->safe_psql('postgres', 'DROP DATABASE dropped');
log_since();

# ----------------------------------------------------------------
# The reaper
# ----------------------------------------------------------------

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
