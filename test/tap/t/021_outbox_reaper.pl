# 021_outbox_reaper.pl
#
# Proves that the reaper deletes the events that every subscription has received, and
# nothing else: under load, during a restore, across crashes and disturbances. It moves
# an unread subscription past events older than max_lag, and no other subscription.
# A visit does not read all events that are kept. `make soak` runs more load. The short
# part takes 20 seconds, because it waits for intervals that pass.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $conf = q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '300ms'
restart_after_crash = on
max_prepared_transactions = 10
max_connections = 40
log_statement = none
log_min_messages = debug1
};
my $node = new_node('main', conf => $conf);
$node->safe_psql('postgres', 'ALTER ROLE ALL SET log_min_messages = warning');

watch_log($node);

# publish publishes so many events of a topic, in one transaction.
sub publish
{
	my ($events, $topic, $dbname) = @_;
	$topic //= 'order';
	return $node->safe_psql($dbname // 'postgres',
		qq{SELECT count(idempotency.publish('$topic', json_build_object('n', i))) FROM generate_series(1, $events) AS i});
}

# read_all has a subscription read all its events, and returns their number.
sub read_all
{
	my ($subscription) = @_;
	return $node->safe_psql('postgres', "SELECT drain('$subscription')");
}

# left returns how many events there are.
sub left
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname // 'postgres', 'SELECT count(*) FROM idempotency.outbox');
}

# gone waits until so many events are left.
sub gone
{
	my ($name, $count, $dbname) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $rest = $count // 0;
	ok($node->poll_query_until($dbname // 'postgres', "SELECT count(*) = $rest FROM idempotency.outbox"), $name);
}

# reaped returns how many events the reaper has deleted, according to its table and to
# its counter.
sub reaped
{
	return $node->safe_psql('postgres', q{SELECT r.events_reaped, s.events_reaped
		FROM idempotency.reaper AS r, idempotency.stats AS s WHERE datname = current_database()});
}

$node->safe_psql('postgres', q{
	CREATE TABLE published (id uuid PRIMARY KEY, at timestamptz NOT NULL);
	CREATE TABLE delivered (subscription text, id uuid, seq bigint, PRIMARY KEY (subscription, id));
	-- A batch of a subscription, fetched and acknowledged in one transaction.
	CREATE FUNCTION consume(name text, events int) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		batch bigint;
		count bigint;
	BEGIN
		WITH got AS MATERIALIZED (SELECT * FROM idempotency.fetch(name, events)),
			noted AS (INSERT INTO delivered SELECT name, e.id, e.seq FROM got AS e)
		SELECT min(got.batch), count(*) INTO batch, count FROM got;
		IF batch IS NOT NULL THEN
			PERFORM idempotency.ack(name, batch);
		END IF;
		RETURN count;
	END $$;
	CREATE FUNCTION drain(name text) RETURNS bigint LANGUAGE plpgsql AS $$
	DECLARE
		batch bigint;
		n bigint;
		total bigint := 0;
	BEGIN
		LOOP
			SELECT min(e.batch), count(*) INTO batch, n FROM idempotency.fetch(name, 10000) AS e;
			EXIT WHEN n = 0;
			PERFORM idempotency.ack(name, batch);
			total := total + n;
		END LOOP;
		RETURN total;
	END $$;
});

# ----------------------------------------------------------------
# Retention
# ----------------------------------------------------------------

# Without a subscription, one day.
publish(10);
$node->safe_psql('postgres', q{SET session_replication_role = replica; UPDATE idempotency.outbox SET published_at = now() - interval '25 hours' WHERE seq <= 4});
gone('events of yesterday are deleted', 6);
wait_for_reapers(3);
is(left(), '6', 'events of today are not deleted');
is(reaped(), '4|4', 'the counters match');

# The setting applies per database, and when it changes.
$node->safe_psql('postgres', 'CREATE DATABASE brief');
$node->safe_psql('brief', 'CREATE EXTENSION idempotency');
$node->safe_psql('postgres', 'ALTER DATABASE brief SET idempotency.outbox_retention = 0');
publish(5, 'order', 'brief');
gone('retention 0 for a database deletes its events at once', 0, 'brief');
is(left(), '6', 'events of other databases are kept');
change_settings($node, 'idempotency.outbox_retention' => -1);
$node->safe_psql('postgres', q{SET session_replication_role = replica; UPDATE idempotency.outbox SET published_at = '2000-01-01'});
wait_for_reapers(3);
is(left(), '6', 'with retention -1 events are kept');
change_settings($node, 'idempotency.outbox_retention' => 0);
gone('with retention 0 events are deleted at once');
$node->safe_psql('postgres', 'DROP DATABASE brief');
wait_for_reapers(2); # the first may have been on its way to that database
is_quiet('retention', $too_late);

# An idle round writes nothing.
my $trace = q{SELECT xmin, ctid FROM idempotency.reaper};
my $before = $node->safe_psql('postgres', $trace);
wait_for_reapers(5);
is($node->safe_psql('postgres', $trace), $before, 'an idle round writes nothing');

# ----------------------------------------------------------------
# Subscriptions
# ----------------------------------------------------------------

# More events than one batch or one visit handles.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('fast', '{*}'), idempotency.subscribe('slow', '{*}')});
publish(30_000);
is(read_all('fast'), '30000', 'one subscription reads all events');
wait_for_reapers(3);
is(left(), '30000', 'events are kept while another subscription needs them');
my ($batch) = $node->safe_psql('postgres', q{SELECT DISTINCT batch FROM idempotency.fetch('slow', 1000, lease => '1 hour')});
wait_for_reapers(2);
is(left(), '30000', 'events of an unacknowledged batch are kept');
$node->safe_psql('postgres', "SELECT idempotency.ack('slow', $batch)");
gone('acknowledged events are deleted', 29_000);
is(read_all('slow'), '29000', 'the slow subscription reads the remaining events');
gone('the remaining events are deleted');
is(reaped(), '30010|30010', 'all events are counted once');
is_quiet('subscriptions');

# ----------------------------------------------------------------
# Cost
# ----------------------------------------------------------------

# A visit ends at the first young event. It does read entries of the index again that a
# snapshot keeps, although their events are deleted.
my $entries = q{SELECT pg_stat_force_next_flush(); SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'outbox_pkey'};
change_settings($node, 'idempotency.outbox_retention' => '1h');
publish(20_000);
read_all($_) foreach qw(fast slow);
my $read = $node->safe_psql('postgres', $entries);
wait_for_reapers(5);
cmp_ok($node->safe_psql('postgres', $entries) - $read, '<', 1000, 'no visit reads all young events');
change_settings($node, 'idempotency.outbox_retention' => 0);
my $held = open_session($node);
$held->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idempotency.outbox');
gone('events that are visible to a snapshot are deleted');
$held->query_safe('COMMIT');

# ----------------------------------------------------------------
# Concurrent publishers, consumers and subscribers
# ----------------------------------------------------------------

my $dir = $node->basedir;
append_to_file("$dir/publish.sql", <<'SQL');
\set events random(1, 3)
BEGIN;
WITH event AS MATERIALIZED (SELECT idempotency.publish('order', '{}') AS id, clock_timestamp() AS at FROM generate_series(1, :events))
	INSERT INTO published SELECT * FROM event;
\set what random(1, 20)
\if :what = 1
SELECT pg_sleep(0.05);
\endif
\if :what <= 3
ROLLBACK;
\else
COMMIT;
\endif
SQL
append_to_file("$dir/consume_fast.sql", "SELECT consume('fast', 100);\n");
append_to_file("$dir/consume_slow.sql", "\\sleep 5 ms\nSELECT consume('slow', 100);\n");
append_to_file("$dir/subscribe.sql", <<'SQL');
\set n random(1, 1000000000)
BEGIN;
SELECT idempotency.subscribe('beginning ' || :n, '{*}', start_at => 'beginning');
INSERT INTO left_then SELECT 'beginning ' || :n, o.id FROM idempotency.outbox AS o;
SELECT idempotency.subscribe('now ' || :n, '{*}');
\sleep 20 ms
COMMIT;
INSERT INTO subscribed SELECT start || :n, clock_timestamp() FROM (VALUES ('now '), ('beginning ')) AS v (start);
\sleep 100 ms
SELECT consume('beginning ' || :n, 5);
SELECT consume('now ' || :n, 5);
SQL
$node->safe_psql('postgres', 'CREATE TABLE subscribed (subscription text PRIMARY KEY, at timestamptz NOT NULL);
	CREATE TABLE left_then (subscription text, id uuid)');
$node->command_checks_all([ $node->installed_command('pgbench'), '-n', '-c', '9', '-t', soak(150, 1000), '--random-seed=1', '--max-tries=1000',
		'-f', "$dir/publish.sql\@400", '-f', "$dir/consume_fast.sql\@200", '-f', "$dir/consume_slow.sql\@200", '-f', "$dir/subscribe.sql\@10",
		$node->connstr('postgres') ],
	0, [qr/number of failed transactions: 0/], [qr/^(?!.*error)/s], 'clients do not block each other');
my @all = split /\n/, $node->safe_psql('postgres', 'SELECT subscription FROM idempotency.subscription ORDER BY 1');
cmp_ok(scalar(@all), '>', 6, 'subscriptions were created');
foreach my $subscription (@all)
{
	1 while $node->safe_psql('postgres', "SELECT consume('$subscription', 10000)") > 0;
}
is($node->safe_psql('postgres', q{SELECT count(*) > 500, count(*) FILTER (WHERE f.id IS NULL), count(*) FILTER (WHERE s.id IS NULL),
		(SELECT count(*) FROM delivered LEFT JOIN published USING (id) WHERE published.id IS NULL)
		FROM published AS p
		LEFT JOIN delivered AS f ON f.id = p.id AND f.subscription = 'fast'
		LEFT JOIN delivered AS s ON s.id = p.id AND s.subscription = 'slow'}),
	't|0|0|0', 'every committed event reached the old subscriptions');
is($node->safe_psql('postgres', q{SELECT count(*) FROM subscribed JOIN published ON published.at > subscribed.at
		LEFT JOIN delivered USING (subscription, id) WHERE delivered.id IS NULL}),
	'0', 'a new subscription receives every later event');
# The events that are left can have gaps: one of a late transaction stays, those around it are deleted.
is($node->safe_psql('postgres', q{SELECT count(*) > 0, count(*) FILTER (WHERE d.id IS NULL) FROM left_then AS l LEFT JOIN delivered AS d USING (subscription, id)}),
	't|0', 'a subscription from the beginning receives every event that was left');
gone('no event is left once all subscriptions have received it');
is($node->safe_psql('postgres', q{SELECT count(*), count(*) FILTER (WHERE lag IS NOT NULL OR lag_events > 0) FROM idempotency.partitions}),
	@all . '|0', 'no subscription lags');
$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscription WHERE subscription LIKE '% %'});
$node->safe_psql('postgres', q{CREATE EXTENSION amcheck});
is(($node->psql('postgres', q{SELECT bt_index_check('idempotency.outbox_pkey', true)}))[2], '', 'every event is in the index');
is_quiet('under load');

# ----------------------------------------------------------------
# Between two reads of the positions
# ----------------------------------------------------------------

# One subscription advances while reap() reads the positions. Another one stays at the
# common position, and is read first.
append_to_file("$dir/reap.sql", "SELECT idempotency.reap(1000);\n");
append_to_file("$dir/constant.sql", <<'SQL');
SELECT idempotency.publish('position', '{}');
SELECT batch FROM idempotency.fetch('moving') \gset
SELECT idempotency.ack('moving', :batch);
\sleep 2 ms
SELECT batch FROM idempotency.fetch('constant') \gset
SELECT idempotency.ack('constant', :batch);
SQL
$node->safe_psql('postgres', q{CREATE DATABASE positions});
$node->safe_psql('positions', q{ALTER DATABASE positions SET idempotency.outbox_retention = 0; CREATE EXTENSION idempotency;
	SELECT idempotency.subscribe('constant', '{*}'), idempotency.subscribe('moving', '{*}')});
my $reaping = IPC::Run::start([ $node->installed_command('pgbench'), '-n', '-T', '600', '-f', "$dir/reap.sql", $node->connstr('positions') ], '>&', \my $said);
$node->command_checks_all([ $node->installed_command('pgbench'), '-n', '-t', '300', '-f', "$dir/constant.sql", $node->connstr('positions') ],
	0, [qr{300/300}], [qr/^(?!.*error)/s], 'no event is deleted that a subscription needs');
$reaping->kill_kill;
$node->safe_psql('postgres', 'DROP DATABASE positions');
log_since();

# ----------------------------------------------------------------
# A subscription that is not read
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{SELECT idempotency.stats_reset(),
	idempotency.subscribe('left "alone"', '{order}', max_lag => '2 seconds'),
	idempotency.subscribe('read', '{order}', max_lag => '2 seconds')});
publish(3, 'other');
publish(20);
my $last = $node->safe_psql('postgres', 'SELECT max(seq) FROM idempotency.outbox');
($batch) = $node->safe_psql('postgres', q{SELECT DISTINCT batch FROM idempotency.fetch('read', lease => '1 hour')});
read_all($_) foreach qw(fast slow);
$node->poll_query_until('postgres', q{SELECT lag IS NULL FROM idempotency.subscriptions WHERE subscription = 'left "alone"'})
	or die 'the subscription is not moved';
my $log = log_since();
like($log, qr/LOG:  idempotency subscription "left "alone"" dropped events older than its max_lag, up to number $last$/m, 'the log reports the moved subscription');
unlike($log, qr/LOG:  idempotency subscription "(?!left "alone"")/, 'no other subscription is moved');
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'the log has no other message');
is($node->safe_psql('postgres', q{SELECT events_dropped FROM idempotency.stats WHERE datname = 'postgres'}), '20', 'dropped events are counted');
wait_for_reapers(3);
is(left(), '20', 'events of an unacknowledged batch are kept');
is($node->safe_psql('postgres', "SELECT idempotency.ack('read', $batch)"), '20', 'an old batch can be acknowledged');
$node->safe_psql('postgres', q{SELECT idempotency.subscribe(s, '{order}', max_lag => '1 hour') FROM unnest('{"left \"alone\"",read}'::text[]) AS s});
publish(2);
is(read_all('left "alone"'), '2', 'later events are delivered');
read_all($_) foreach qw(fast slow read);
gone('no subscription retains the events');
is($node->safe_psql('postgres', q{SELECT published, delivered, acknowledged, failed, dead_letters, redriven, events_dropped
		FROM idempotency.stats WHERE datname = 'postgres'}),
	'25|74|74|0|0|0|20', 'all counters match');
$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('left "alone"'), idempotency.unsubscribe('read')});
is_quiet('max_lag');

# Failures are counted too.
$node->safe_psql('postgres', q{SELECT idempotency.stats_reset(), idempotency.subscribe('failing', '{*}', max_attempts => 2);
	SELECT FROM idempotency.publish('order', '1');
	SELECT batch, id FROM idempotency.fetch('failing') \gset
	SELECT idempotency.nack('failing', :batch, :'id', 'no', '0'), idempotency.ack('failing', :batch);
	SELECT batch, id FROM idempotency.fetch('failing') \gset
	SELECT idempotency.nack('failing', :batch, :'id', 'no'), idempotency.ack('failing', :batch);
	SELECT idempotency.redrive('failing'), idempotency.redrive('failing')});
is($node->safe_psql('postgres', q{SELECT published, delivered, acknowledged, failed, dead_letters, redriven, events_dropped
		FROM idempotency.stats WHERE datname = 'postgres'}),
	'1|2|0|2|1|1|0', 'failures, dead letters and redriven events are counted');
$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('failing')});
read_all($_) foreach qw(fast slow);

# ----------------------------------------------------------------
# Locks
# ----------------------------------------------------------------

# The worker exits, is started again, and queues for no lock.
my $session = open_session($node);
foreach my $lock ((map { "LOCK TABLE idempotency.$_" } 'outbox IN SHARE MODE', 'subscription', 'partition', 'position', 'parked'),
	map { "ALTER SEQUENCE idempotency.outbox_seq $_" } 'CACHE 1', 'OWNER TO CURRENT_USER')
{
	publish(10);
	$session->query_safe("BEGIN; $lock");
	wait_for_reapers(4);
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE NOT granted}), '0', "the reaper does not queue for $lock");
	$session->query_safe('COMMIT');
	read_all($_) foreach qw(fast slow);
	gone('the reaper continues once the lock is released');
}

# A transaction that subscribes, and a locked row.
publish(10);
$session->query_safe(q{BEGIN; SELECT idempotency.subscribe('pending', '{*}', start_at => 'beginning')});
read_all($_) foreach qw(fast slow);
wait_for_reapers(3);
is(left(), '10', 'nothing is deleted while a transaction subscribes');
$session->query_safe('ROLLBACK');
gone('the reaper continues when the subscription rolls back');
publish(10);
$session->query_safe('BEGIN; SELECT FROM idempotency.outbox WHERE seq = (SELECT min(seq) + 3 FROM idempotency.outbox) FOR UPDATE');
read_all($_) foreach qw(fast slow);
gone('a locked row is kept', 1);
$session->query_safe('COMMIT');
gone('it is deleted once it is unlocked');
is_quiet('locks', qr{events of idempotency subscription "failing" fail});

# Altered tables do not affect the deletion of keys.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('broken', '{*}', max_lag => '1 hour')});
publish(10);
foreach my $change (
	[ 'ALTER TABLE idempotency.position RENAME COLUMN base TO start', 'ALTER TABLE idempotency.position RENAME COLUMN start TO base' ],
	[ 'ALTER TABLE idempotency.subscription RENAME TO subs', 'ALTER TABLE idempotency.subs RENAME TO subscription' ])
{
	my ($there, $back) = @$change;
	$node->safe_psql('postgres', $there);
	log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log reports the altered table');
	$node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.once_many('expired', ARRAY['a', 'b'], '1 microsecond')});
	ok($node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM idempotency.key}), "$there: keys are deleted");
	wait_for_reapers(1);
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, 'an altered table is logged once');
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'the log has no other message');
	$node->safe_psql('postgres', $back);
	is(read_all('broken'), '10', 'the events are read after the repair');
	read_all($_) foreach qw(fast slow);
	gone('the reaper continues after the repair');
	log_since();
	publish(10);
}
$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('broken')});
read_all($_) foreach qw(fast slow);
gone('the reaper continues without the broken subscription');

# ----------------------------------------------------------------
# During a restore
# ----------------------------------------------------------------

# The reaper runs between any two steps of the restore; retention 0 keeps no event
# longer than a subscription needs it.
publish(50);
$node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.fetch('fast', 20, lease => '1 hour')});
my $fast = $node->safe_psql('postgres', q{SELECT batch FROM idempotency.position WHERE subscription = 'fast'});
read_all('slow');
$node->command_ok([ 'pg_dump', '--no-sync', '--file', "$dir/dump.sql", $node->connstr('postgres') ], 'the database is dumped');
my $dump = slurp_file("$dir/dump.sql");
my $slowly = $dump =~ s/^\\\.$/\\.\nSELECT pg_sleep(0.5);/mgr;
cmp_ok(($slowly =~ tr/\n//) - ($dump =~ tr/\n//), '>=', 4, 'the restore has many steps');
append_to_file("$dir/slowly.sql", $slowly);
my $other = PostgreSQL::Test::Cluster->new('other');
$other->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$other->append_conf('postgresql.conf', "autovacuum = off\n$conf\nidempotency.outbox_retention = 0\n");
$other->start;
$other->safe_psql('postgres', 'CREATE DATABASE restored');
my $from = -s $other->logfile;
$other->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$dir/slowly.sql", $other->connstr('restored') ], 'the database is restored');
cmp_ok(scalar(() = slurp_file($other->logfile, $from) =~ /starting background worker process "idempotency reaper for database/g), '>', 10,
	'the reaper visits the database during the restore');
wait_for_reapers(3, $other, 'restored');
unlike(slurp_file($other->logfile, $from), $unexpected, 'the reaper logs nothing during the restore');
is($other->safe_psql('restored', 'SELECT count(*) FROM idempotency.outbox'), '50', 'the restore keeps all events that a subscription needs');
is($other->safe_psql('restored', "SELECT idempotency.ack('fast', $fast)"), '20', 'the unacknowledged batch can be acknowledged');
is($other->safe_psql('restored', "SELECT drain('slow'), drain('fast')"), '0|30', 'each subscription continues at its position');
ok($other->poll_query_until('restored', 'SELECT count(*) = 0 FROM idempotency.outbox'), 'acknowledged events are deleted in the copy');
is($other->safe_psql('restored', q{SELECT events_reaped FROM idempotency.reaper, pg_control_system() AS c
		WHERE reaper.system_identifier = c.system_identifier}), '50', 'deleted events are counted in the copy');
$other->stop;
$node->safe_psql('postgres', "SELECT idempotency.ack('fast', $fast)");
read_all('fast');
gone('acknowledged events are deleted in the source');
log_since();

# ----------------------------------------------------------------
# Across crashes
# ----------------------------------------------------------------

# Each way to interrupt the reaper during a backlog: no event is deleted that a
# subscription needs, and the counters match.
my %end = (
	'killed' => sub {
		my $pid;
		do { $pid = $node->safe_psql('postgres', q{SELECT min(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) } until $pid;
		kill9($node, $pid);
	},
	'crashed' => sub { $node->stop('immediate'); $node->start },
	'restarted' => sub { $node->restart });
foreach my $way (sort keys %end)
{
	change_settings($node, 'idempotency.reaper_naptime' => 0);
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'})
	  or die "$way: the reaper does not pause";
	publish(16_000);
	read_all('fast');
	$node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.fetch('slow', 14000, lease => '1 hour')});
	$node->safe_psql('postgres', q{SELECT idempotency.ack('slow', batch) FROM idempotency.position WHERE subscription = 'slow'});
	my $count = $node->safe_psql('postgres', q{SELECT sum(events_reaped) FROM idempotency.reaper});
	change_settings($node, 'idempotency.reaper_naptime' => '300ms');
	$node->poll_query_until('postgres', qq{SELECT sum(events_reaped) > $count + 1000 FROM idempotency.reaper}) or die "$way: the reaper does not start";
	$end{$way}->();
	is($node->safe_psql('postgres', qq{SELECT (SELECT sum(events_reaped) - $count FROM idempotency.reaper) + count(*) FROM idempotency.outbox}),
		'16000', "$way: deleted and remaining events add up");
	gone("$way: the reaper continues", 2000);
	wait_for_reapers(2);
	is(read_all('slow'), '2000', "$way: the needed events are kept");
	gone("$way: acknowledged events are deleted");
}
log_since();

# ----------------------------------------------------------------
# Without the extension
# ----------------------------------------------------------------

publish(10_000);
read_all($_) foreach qw(fast slow);
$node->safe_psql('postgres', 'DROP EXTENSION idempotency');
wait_for_reapers(2);
is_quiet('without the extension');
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');
publish(10);
gone('a recreated extension is reaped');
is_quiet('with a recreated extension');

$node->stop;
done_testing();
