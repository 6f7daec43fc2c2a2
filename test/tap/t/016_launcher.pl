# 016_launcher.pl
#
# Proves that the launcher sends the reaper where it belongs, and only there: to
# every database with the extension, also one that gets it later; not to
# templates, closed databases, or those that the settings leave out; and that it
# keeps nobody waiting: databases are dropped and copied, the extension is dropped,
# and the server is stopped, in the middle of its work; nor does a worker that hangs,
# or one that dies.
# On a standby it sleeps until the promotion.  And that all of it says nothing that
# would alarm anybody.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use POSIX qw(SIGTERM);
use Test::More;
use Time::HiRes qw(usleep time);

my $node = new_node('main', init => { allows_streaming => 1 }, conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '100ms'
log_statement = none
log_min_messages = debug1
max_worker_processes = 7
wal_level = logical
});
$node->safe_psql('postgres', 'ALTER ROLE ALL SET log_min_messages = warning');

watch_log($node);

# reload changes settings of the server.
sub reload
{
	my (%settings) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $_ = '$settings{$_}'") foreach keys %settings;
	$node->reload;
}

# expire stores so many records that have run out.
sub expire
{
	my ($dbname, $rows) = @_;
	return $node->safe_psql($dbname, qq{SELECT count(*) FROM idempotency.once_many('expired',
		array(SELECT 'k' || i FROM generate_series(1, $rows) AS i), '1 microsecond')});
}

# left returns how many there are yet.
sub left
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'});
}

# gone waits until none are left.
sub gone
{
	my ($dbname, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until($dbname, q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}), $name);
}

# visited returns the databases to which workers were sent since a point in the
# log, each once, by name as of now; "-" for one that is gone.
sub visited
{
	my ($from) = @_;
	my %oids = map { $_ => 1 }
	  slurp_file($node->logfile, $from) =~ /starting background worker process "idempotency reaper for database (\d+)"/g;
	my %names = map { split /\|/ } split /\n/, $node->safe_psql('postgres', 'SELECT oid, datname FROM pg_database');

	return join ' ', sort map { $names{$_} // '-' } keys %oids;
}

# ----------------------------------------------------------------
# Who is who
# ----------------------------------------------------------------

my $who = q{SELECT backend_type, application_name, datname, usename FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %' ORDER BY 1};
like($node->safe_psql('postgres', $who), qr/^idempotency launcher\|idempotency launcher\|\|/m, 'the launcher has a name, and no database');
my $event = $node->pg_version >= 17 ? qr/^Extension\|IdempotencyLauncher(?:Nap|Visit)$/ : qr/^Extension\|Extension$/;
like($node->safe_psql('postgres', q{SELECT wait_event_type, wait_event FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}),
	$event, 'it waits, and says for what');

# The worker is there for moments.
expire('postgres', 100_000);
$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'
	AND datname = 'postgres' AND application_name = 'idempotency reaper' AND query = 'removing expired idempotency keys'})
	or die 'the worker is not to be seen';
pass('so has the worker, and its database');
gone('postgres', 'which does its work');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'})
	or die 'the worker stays';
pass('and leaves');

# ----------------------------------------------------------------
# Where
# ----------------------------------------------------------------

$node->safe_psql('postgres', "CREATE DATABASE $_") foreach 'one', 'two', 'bare', 'closed', 'pattern', '"Odd, ""name"""';
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach 'one', 'two', 'closed', 'pattern', 'Odd, "name"';
expire($_, 10) foreach 'one', 'two', 'Odd, "name"';
gone($_, "database $_ is reaped") foreach 'one', 'two', 'Odd, "name"';

# An extension that comes later is noticed by its first use: long before the next
# visit that is due anyway, ten tours after the last.
reload('idempotency.reaper_naptime' => '2s');
visits(1);
$node->safe_psql('postgres', 'CREATE DATABASE later');
visits(1);
my $began = time;
$node->safe_psql('later', 'CREATE EXTENSION idempotency');
expire('later', 10);
gone('later', 'an extension that comes later is noticed');
cmp_ok(time - $began, '<', 10, 'soon');
$node->safe_psql('later', 'DROP EXTENSION idempotency');
visits(2);
$began = time;
$node->safe_psql('later', 'CREATE EXTENSION idempotency');
expire('later', 10);
gone('later', 'so is one that comes again');
cmp_ok(time - $began, '<', 10, 'soon');
reload('idempotency.reaper_naptime' => '100ms');

# One without is visited now and then.
my $from = visits(5);
unlike(visited($from), qr/bare.*bare/, 'a database without the extension is visited seldom');
like(visited(visits(21)), qr/\bbare\b/, 'but it is');

# Templates and closed databases are not visited, whatever is in them.
expire($_, 10) foreach 'closed', 'pattern';
gone($_, "$_ is reaped") foreach 'closed', 'pattern';
$node->safe_psql('postgres', q{ALTER DATABASE closed ALLOW_CONNECTIONS false; ALTER DATABASE pattern IS_TEMPLATE true});
visits(2);
$from = visits(21);
is(visited($from), 'Odd, "name" bare later one postgres two', 'neither templates nor closed databases are visited');
$node->safe_psql('postgres', q{ALTER DATABASE closed ALLOW_CONNECTIONS true; ALTER DATABASE pattern IS_TEMPLATE false});
expire($_, 10) foreach 'closed', 'pattern';
gone($_, "$_ is visited again") foreach 'closed', 'pattern';

# A database that a failed DROP DATABASE has left behind.
$node->safe_psql('postgres', 'CREATE DATABASE broken');
my $broken = $node->psql('postgres', q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'broken'});
visits(2);
unlike(visited(visits(21)), qr/broken/, 'an invalid database is not visited');
$node->safe_psql('postgres', 'DROP DATABASE broken');
is_quiet('here and there', $too_late);

# The settings choose.
reload('idempotency.databases' => 'one, "Odd, ""name""", nowhere');
$node->poll_query_until('postgres', q{SELECT setting <> '' FROM pg_settings WHERE name = 'idempotency.databases'}) or die;
expire($_, 10) foreach 'one', 'two', 'Odd, "name"';
gone($_, "$_ is chosen") foreach 'one', 'Odd, "name"';
is(left('two'), '10', 'two is not');
reload('idempotency.databases' => 'TWO');
gone('two', 'two is, by another spelling');
expire('one', 10);
reload('idempotency.databases' => '');
gone('one', 'all are');
is_quiet('the settings choose');

# No naps at all, and short ones.
reload('idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT setting = '0' FROM pg_settings WHERE name = 'idempotency.reaper_naptime'}) or die;
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
$from = -s $node->logfile;
expire('one', 10);
my $launcher = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
kill 'HUP', $launcher foreach 1 .. 3;
is($node->safe_psql('one', q{SELECT pg_sleep(0.5), count(*) FROM idempotency.key}), '|10', 'switched off, nothing is reaped');
is(visited($from), '', 'and nobody sent');
is($node->safe_psql('one', 'SELECT idempotency.reap()'), '10', 'but by hand');
expire('one', 10);
reload('idempotency.reaper_naptime' => '100ms');
gone('one', 'switched on again');

# No slot for a worker, since parallel workers have them all: said once, and
# tried again.
is_quiet('naps');
my ($query, $lock) = map { open_session($node) } 1 .. 2;
$query->query_safe(q{
	CREATE TABLE numbers AS SELECT generate_series(1, 2000) AS n;
	ALTER TABLE numbers SET (parallel_workers = 4);
	CREATE FUNCTION wait_for_lock(int) RETURNS int LANGUAGE plpgsql PARALLEL SAFE AS $$ BEGIN
		WHILE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 1) LOOP PERFORM pg_sleep(0.01); END LOOP;
		RETURN $1; END $$;
	SET max_parallel_workers_per_gather = 4;
	SET parallel_leader_participation = off;
	SET parallel_setup_cost = 0;
	SET parallel_tuple_cost = 0});
$lock->query_safe('SELECT pg_advisory_lock(1)');
reload('idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT setting = '0' FROM pg_settings WHERE name = 'idempotency.reaper_naptime'}) or die;
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
$query->query_until(qr/begun/, "\\echo begun\nSELECT sum(wait_for_lock(n)) FROM numbers;\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 4 FROM pg_stat_activity WHERE backend_type = 'parallel worker'}) or die;
reload('idempotency.reaper_naptime' => '100ms');
log_comes(qr/LOG:  no background worker slot is free for the idempotency reaper/, 'the log says that there is no slot');
usleep(500_000);
my $said = () = log_waiting() =~ /LOG:  no background worker slot is free/g;
is($said, 1, 'a lack of slots is said once');
$lock->query_safe('SELECT pg_advisory_unlock(1)');
expire('one', 10);
gone('one', 'and overcome');
is_quiet('slots', qr/no background worker slot is free/);
$_->quit foreach $query, $lock;

# ----------------------------------------------------------------
# Databases that come and go
# ----------------------------------------------------------------

# A database with much to do, as a pattern for others.
reload('idempotency.reaper_naptime' => '0');
$node->safe_psql('postgres', 'CREATE DATABASE backlog');
$node->safe_psql('backlog', 'CREATE EXTENSION idempotency');
$node->safe_psql('backlog', q{INSERT INTO idempotency.key (created_at, expires_at, scope, key)
	SELECT now(), now(), 'expired', 'k' || i FROM generate_series(1, 1000000) AS i});
$node->safe_psql('backlog', q{SELECT idempotency.once('live', 'message')});
$node->safe_psql('postgres', 'ALTER DATABASE backlog ALLOW_CONNECTIONS false');

# busy makes a copy and waits until the reaper works there.
sub busy
{
	my ($dbname) = @_;
	reload('idempotency.reaper_naptime' => '0');
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE backlog");
	reload('idempotency.reaper_naptime' => '100ms');
	$node->poll_query_until('postgres', qq{SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = '$dbname'
		AND backend_type = 'idempotency reaper'}) or die "nobody works in $dbname";
}

foreach my $drop ('DROP DATABASE %s', 'DROP DATABASE %s WITH (FORCE)')
{
	busy('dropped');
	$began = time;
	$node->safe_psql('postgres', sprintf $drop, 'dropped');
	cmp_ok(time - $began, '<', 5, sprintf("$drop in the middle of the work, in time", 'a database'));
	visits(2);
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.stats WHERE datname IS NULL OR datname = 'dropped'}), '0',
		'nothing is left of it');
}
is_quiet('DROP DATABASE', $too_late);

# Over and over, whenever it comes.
foreach my $round (1 .. 15)
{
	$node->safe_psql('postgres', 'CREATE DATABASE brief TEMPLATE one');
	usleep(int rand 150_000);
	$node->safe_psql('postgres', 'DROP DATABASE brief');
}
pass('databases come and go');
is_quiet('databases that come and go', $too_late);

busy('original');
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
pass('CREATE DATABASE TEMPLATE in the middle of the work');
gone($_, "$_ is reaped to the end") foreach 'original', 'copy';
is($node->safe_psql($_, 'SELECT scope, key FROM idempotency.key'), 'live|message', "$_ keeps what lives") foreach 'original', 'copy';
is($node->safe_psql($_, 'SELECT count(*), sum(rows_reaped) > 0 FROM idempotency.reaper'), '1|t', "$_ goes on where the pattern stood")
  foreach 'original', 'copy';
is_quiet('CREATE DATABASE TEMPLATE', $too_late);

busy('renamed');
$node->safe_psql('postgres', 'ALTER DATABASE renamed RENAME TO other');
gone('other', 'a database is renamed in the middle of the work');
is_quiet('ALTER DATABASE RENAME', $too_late);

busy('without');
$node->safe_psql('without', 'DROP EXTENSION idempotency');
pass('DROP EXTENSION in the middle of the work');
visits(2);
is($node->safe_psql('without', 'CREATE EXTENSION idempotency; SELECT count(*) FROM idempotency.key'), '0', 'and CREATE EXTENSION');
expire('without', 10);
gone('without', 'which is noticed');
is_quiet('DROP EXTENSION');
foreach my $round (1 .. 20)
{
	$node->safe_psql('without', 'DROP EXTENSION idempotency; CREATE EXTENSION idempotency');
	expire('without', 10) if $round % 2;
}
pass('DROP EXTENSION, whenever it comes');
$node->safe_psql('without', 'BEGIN; DROP EXTENSION idempotency; ROLLBACK');
is_quiet('DROP EXTENSION again and again');

# Two at a time: nobody waits for the large one to end.
busy('large');
expire('one', 10);
gone('one', 'a small database is reaped');
cmp_ok(left('large'), '>', 0, 'while a large one is at it');
gone('large', 'which goes on');

# ----------------------------------------------------------------
# A worker that hangs
# ----------------------------------------------------------------

# told_to_go tells whether a process that is stopped will find a SIGTERM.
sub told_to_go
{
	my ($pid) = @_;
	my ($signals) = slurp_file("/proc/$pid/status") =~ /^ShdPnd:\s*[0-9a-f]*([0-9a-f]{8})$/m;
	return hex($signals) >> (SIGTERM - 1) & 1;
}

# It is stopped while it sleeps in a trigger, where it holds nothing that other
# processes could need, but the lock on ten keys that have run out.
is_quiet('before a worker hangs', $too_late);
$node->safe_psql('postgres', 'CREATE DATABASE hung');
$node->safe_psql('hung', q{
	CREATE EXTENSION idempotency;
	CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(5); RETURN NULL; END $$;
	CREATE TRIGGER sleep AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION sleep()});
my $asleep = q{SELECT coalesce(min(pid), 0) FROM pg_stat_activity
	WHERE datname = 'hung' AND backend_type = 'idempotency reaper' AND wait_event = 'PgSleep'};
expire('hung', 10);
$node->poll_query_until('postgres', "SELECT ($asleep) > 0") or die 'the worker does not sleep';
my $hung = $node->safe_psql('postgres', $asleep);
is(kill('STOP', $hung), 1, 'a worker is stopped');
is($node->safe_psql('postgres', $asleep), $hung, 'in its sleep');

# The launcher waits for it, tells it to go, waits once more, and goes on.
$began = time;
expire('one', 10);
gone('one', 'a worker hangs: another database is reaped');
cmp_ok(time - $began, '<', 40, 'soon');
is(told_to_go($hung), 1, 'the worker has been told to go');

# From now on it is in nobody's way, and nobody else is sent to its database, be it
# taken off the list and put on it again meanwhile.
$began = time;
$from = visits(10);
cmp_ok(time - $began, '<', 40, 'no tour waits for it any more');
unlike(visited($from), qr/\bhung\b/, 'nobody else is sent');
expire('one', 10);
gone('one', 'while it hangs still');
reload('idempotency.databases' => 'postgres, one');
visits(3);
is(visited(visits(3)), 'one postgres', 'its database is taken off the list');
expire('two', 10);
reload('idempotency.databases' => '');
gone('two', 'and put on it again');
unlike(visited(visits(10)), qr/\bhung\b/, 'nor is anybody sent then');
is($node->safe_psql('hung', q{SELECT idempotency.once('live', 'message'), count(*) FROM idempotency.key WHERE scope = 'expired'}), 't|10',
	'clients of its database go on, and what it has not committed is there');
is($node->safe_psql('postgres', $asleep), $hung, 'all the time it hangs');

# It goes on, and leaves at once; its database is visited again, when it is on the list.
reload('idempotency.databases' => 'postgres, one');
visits(3);
$launcher = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
is(kill('CONT', $hung), 1, 'it goes on');
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $hung)") or die 'the worker stays';
is(left('hung'), '10', 'and has undone what it was at');
visits(3);
reload('idempotency.databases' => '');
$node->safe_psql('hung', 'DROP TRIGGER sleep ON idempotency.reaper');
expire('hung', 10);
gone('hung', 'its database is visited again');
is($node->safe_psql('hung', 'SELECT rows_reaped FROM idempotency.reaper'), '10', 'and the books are right');
is($node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}), $launcher,
	'by the same launcher');
is_quiet('a worker that hangs');

# ----------------------------------------------------------------
# A worker that dies of an error
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE failing');
$node->safe_psql('failing', q{
	CREATE EXTENSION idempotency;
	CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no books today'; END $$;
	CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION fail()});
my $failing = $node->safe_psql('postgres', q{SELECT oid FROM pg_database WHERE datname = 'failing'});
my $first = -s $node->logfile;
expire('failing', 10);
$node->wait_for_log(qr/ERROR:  no books today/, $first);
expire('one', 10);
gone('one', 'a worker dies: another database is reaped');

# Nobody calls from there any more, so that it is due in every tenth tour.
visits(2);
$from = visits(31);
my $visits = sent($node, $failing, $from);
cmp_ok($visits, '>=', 2, 'its database is visited again');
cmp_ok($visits, '<=', 4, 'but seldom');
reload('idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT setting = '0' FROM pg_settings WHERE name = 'idempotency.reaper_naptime'}) or die;
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
my @died = slurp_file($node->logfile, $first) =~ /\[(\d+)\] .*ERROR:  no books today/g;
cmp_ok(scalar(@died), '>', $visits, 'each visit says so');
is(scalar(keys %{ { map { $_ => 1 } @died } }), scalar(@died), 'once');
is(left('failing'), '10', 'and leaves all as it was');
is($node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}), $launcher,
	'the launcher is the same');
$node->safe_psql('failing', 'DROP TRIGGER fail ON idempotency.reaper');
reload('idempotency.reaper_naptime' => '100ms');
gone('failing', 'mended, its database is reaped');
is($node->safe_psql('failing', 'SELECT rows_reaped FROM idempotency.reaper'), '10', 'and the books are right');
is_quiet('a worker that dies', qr/ERROR:  no books today|$too_late/);
$node->safe_psql('postgres', 'DROP DATABASE failing');

# ----------------------------------------------------------------
# Its books, elsewhere
# ----------------------------------------------------------------

# A restore, while the reaper comes to the new database as well.
my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('original', q{SELECT count(*) FROM idempotency.once_many('live', array(SELECT 'k' || i FROM generate_series(1, 20000) AS i))});
$node->command_ok([ 'pg_dump', '--file', "$dir/dump", 'original' ], 'dump');
foreach my $round (1 .. 3)
{
	$node->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", 'restored' ], 'restore while the reaper is about');
	expire('restored', 10);
	gone('restored', 'which works there');
	is($node->safe_psql('restored', q{SELECT count(*), count(*) FILTER (WHERE relation = 'idempotency.key'::regclass AND rows_reaped = 10)
			FROM idempotency.reaper}), '2|1', 'and keeps books of its own');
	$node->safe_psql('postgres', 'DROP DATABASE restored');
}

# Logical replication of all tables, between two databases that are both reaped.
$node->safe_psql('postgres', 'CREATE DATABASE publisher; CREATE DATABASE subscriber');
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach 'publisher', 'subscriber';
expire('subscriber', 10);
gone('subscriber', 'the subscriber has books of its own');
$node->safe_psql('publisher', q{CREATE PUBLICATION everything FOR ALL TABLES; SELECT idempotency.once('live', 'message');
	SELECT pg_create_logical_replication_slot('books', 'pgoutput')});
expire('publisher', 10);
gone('publisher', 'so has the publisher');
my $connstr = $node->connstr('publisher');
$node->safe_psql('subscriber', qq{CREATE SUBSCRIPTION books CONNECTION \$c\$$connstr\$c\$ PUBLICATION everything
	WITH (create_slot = false, slot_name = 'books')});
expire('publisher', 1000);
gone('publisher', 'the publisher goes on');
$node->safe_psql('publisher', q{SELECT idempotency.once('live', 'the last')});
ok($node->poll_query_until('subscriber', q{SELECT count(*) = 1 FROM idempotency.key WHERE key = 'the last'}), 'the subscriber follows');
gone('subscriber', 'and has nothing left to remove');
$node->poll_query_until('subscriber', q{SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel}) or die 'the tables are not all there';
is($node->safe_psql('subscriber', q{SELECT sum(rows_reaped) FILTER (WHERE relation <> 'idempotency.key'::regclass) FROM idempotency.reaper}),
	$node->safe_psql('publisher', 'SELECT rows_reaped FROM idempotency.reaper'), 'it has the books of the publisher beside its own');
$node->safe_psql('subscriber', 'DROP SUBSCRIPTION books');
is_quiet('books elsewhere', qr/exited with exit code 1|tablesync|logical replication|out of background worker slots|pg_\d+_sync_/);

# ----------------------------------------------------------------
# Stops
# ----------------------------------------------------------------

# stops checks that the server stops in time, in the middle of the work.
sub stops
{
	my ($mode) = @_;
	busy("stop_$mode");
	is_quiet("before a stop, $mode", qr/"logical replication worker"/); # its subscription was just dropped
	my $at = time;
	$node->stop($mode);
	cmp_ok(time - $at, '<', 20, "$mode stop in time");
	# (the server's own launcher leaves in the same way; and the last client may have
	# gone before its session has)
	is_quiet("$mode stop", qr/LOG:  background worker "(?:idempotency|idempotency relay|logical replication) launcher" \(PID \d+\) exited with exit code 1|FATAL:  terminating connection due to administrator command/);
	$node->start;
	cmp_ok(left("stop_$mode"), '>', 0, 'in the middle of the work');
	gone("stop_$mode", 'which goes on after the restart');
}
stops('fast');
stops('smart');

# In the middle of a nap, and switched off.
foreach my $naptime ('1h', '0')
{
	reload('idempotency.reaper_naptime' => $naptime);
	$began = time;
	$node->restart;
	cmp_ok(time - $began, '<', 20, "stop at a nap of $naptime");
}

# ----------------------------------------------------------------
# A standby
# ----------------------------------------------------------------

$node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
expire('one', 1000);
$node->wait_for_catchup($standby);
reload('idempotency.reaper_naptime' => '100ms');
$standby->safe_psql('postgres', 'SELECT pg_reload_conf()');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'}), '0',
	'there is no launcher on a standby');
fails_with($standby, 'SELECT idempotency.reap()', '25006', 'nor does it reap by hand', dbname => 'one');
$node->poll_query_until('one', q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}) or die;
$node->wait_for_catchup($standby);
is($standby->safe_psql('one', q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'}), '0', 'it follows the primary');
is($standby->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper'),
	$node->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper'), 'its books too');

reload('idempotency.reaper_naptime' => '0');
$node->safe_psql('one', q{SELECT count(*) FROM idempotency.once_many('expired', array(SELECT 'k' || i FROM generate_series(1, 500) AS i), '1 microsecond')});
$node->wait_for_catchup($standby);
my $before = $standby->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper');
my $standby_from = -s $standby->logfile;
$node->stop('immediate');
$standby->append_conf('postgresql.auto.conf', "idempotency.reaper_naptime = '100ms'");
$standby->reload;
is($standby->safe_psql('one', q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'}), '500', 'it sleeps');
$standby->promote;
ok($standby->poll_query_until('one', q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}), 'promoted, it reaps');
is($standby->safe_psql('one', "SELECT count(*), sum(rows_reaped) - $before FROM idempotency.reaper"), '1|500',
	'and keeps the books of the primary');
unlike(slurp_file($standby->logfile, $standby_from), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'quietly');
$standby->stop;

done_testing();
