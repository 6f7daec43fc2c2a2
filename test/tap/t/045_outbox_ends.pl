# 045_outbox_ends.pl
#
# Proves that nothing of the outbox keeps others waiting: SIGTERM ends the reaper in the
# middle of a batch, for DROP DATABASE ... FORCE and a fast shutdown as well; a subscription
# whose backlog is behind one failed event gets on under statement_timeout; and a fetch()
# that waits holds no table, so that the extension can be dropped or replaced under it,
# which it says clearly.

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
# A fetch that waits
# ----------------------------------------------------------------

# waiting begins a fetch that finds nothing, and returns the session when it sleeps.
sub waiting
{
	my $session = open_session($node, dbname => 'dropped');
	$session->query_until(qr/begun/, "\\echo begun\nSELECT count(*) FROM idempotency.fetch('s', wait => '1 hour');\n");
	$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE query LIKE '%1 hour%' AND wait_event_type IN ('Extension', 'IPC') AND pid <> pg_backend_pid()})
	  or die 'it does not sleep';
	return $session;
}

# said returns what a session has said by its end.
sub said
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
		WHERE c.relnamespace = 'idempotency'::regnamespace AND l.pid <> pg_backend_pid()}), 'it holds no table between two looks');
$node->safe_psql('dropped', 'DROP EXTENSION idempotency');
like(said($session), $gone, 'the extension is dropped while a fetch waits');

$node->safe_psql('dropped', $create);
$session = waiting();
$node->safe_psql('dropped', "BEGIN; DROP EXTENSION idempotency; $create; SELECT FROM idempotency.publish('t', '1'); COMMIT");
like(said($session), $gone, 'or made anew');
is($node->safe_psql('dropped', q{SELECT count(*) FROM idempotency.fetch('s')}), '1', 'where the next call gets the event');

# A transaction that drops it, and is not through yet, when the fetch looks.
$session = waiting();
my $dropper = open_session($node, dbname => 'dropped');
$dropper->query_safe('BEGIN; DROP EXTENSION idempotency');
$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted}) or die 'it does not look again';
$dropper->query_safe('COMMIT');
$dropper->quit;
like(said($session), $gone, 'or just being dropped');

# One that comes back is as if nothing had been.
$node->safe_psql('dropped', $create);
$session = waiting();
$dropper = open_session($node, dbname => 'dropped');
$dropper->query_safe('BEGIN; DROP EXTENSION idempotency');
$node->poll_query_until('dropped', q{SELECT count(*) = 1 FROM pg_locks WHERE NOT granted}) or die 'it does not look again';
$dropper->query_safe('ROLLBACK');
$dropper->quit;
$node->safe_psql('dropped', q{SELECT FROM idempotency.publish('t', '1')});
is($session->query_until(qr/^1$/m, "\n") =~ /^1$/m ? 'it' : '', 'it', 'or not dropped after all');
$session->quit;

# ----------------------------------------------------------------
# A backlog behind a failed event
# ----------------------------------------------------------------

# A statement may park 1000 events and no more; where each takes a while, 20,000 would not be
# parked within any statement_timeout.
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
is("$lag after $fetches", '0 after 20', 'each fetch does its part, and keeps it');
$node->safe_psql('postgres', 'DROP DATABASE dropped');
log_since();

# ----------------------------------------------------------------
# The reaper
# ----------------------------------------------------------------

# A trigger after the write, which does no harm otherwise, makes a batch last for ever.
# hold does so in a database, and waits until the reaper is at it.
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
		WHERE backend_type = 'idempotency reaper' AND datname = '$dbname' AND wait_event = 'PgSleep'}) or die 'it does not come';
	return;
}

my $minutes = 60_000 * $PostgreSQL::Test::Utils::timeout_default / 60;
hold('ended');
is($node->safe_psql('postgres', qq{SELECT pg_terminate_backend(pid, $minutes) FROM pg_stat_activity
		WHERE backend_type = 'idempotency reaper' AND wait_event = 'PgSleep'}), 't', 'the reaper ends in the middle of a batch');
$node->safe_psql('ended', 'DROP TRIGGER hold ON idempotency.reaper');
ok($node->poll_query_until('ended', 'SELECT count(*) = 0 FROM idempotency.key'), 'and does it again');
hold('forced');
$node->safe_psql('postgres', 'DROP DATABASE forced WITH (FORCE)');
pass('a database can be dropped beside it');
unlike(log_since(), qr/(?:WARNING|FATAL|PANIC):|background worker/, 'and the log is quiet');
hold('shut');
$node->stop('fast');
pass('and a fast shutdown does not wait for it');

done_testing();
