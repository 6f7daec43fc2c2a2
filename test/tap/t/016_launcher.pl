# 016_launcher.pl
#
# Proves that the launcher starts the reaper in every database with the extension, also
# in one that gets it later. It skips templates, closed databases, and those that the
# settings exclude. The launcher blocks nothing: while it works, databases are dropped
# and copied, the extension is dropped, and the server is stopped. A worker that hangs
# or dies blocks nothing either, not even the relay. On a standby the launcher starts
# only after promotion. The log has no unexpected warning or error.
#
# The script takes a minute, because a reaper must work while its database is dropped,
# copied or renamed, and because the launcher waits for workers that hang. `make soak`
# has five times as many keys.

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
idempotency.reaper_naptime = '200ms'
log_statement = none
log_min_messages = debug1
max_worker_processes = 6
wal_level = logical
});
$node->safe_psql('postgres', 'ALTER ROLE ALL SET log_min_messages = warning');

watch_log($node);
$LogTest::keeps_awake = 1;

# left returns how many of them are left.
sub left
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'});
}

# gone waits until none is left.
sub gone
{
	my ($dbname, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until($dbname, q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}), $name);
}

# drop_databases drops databases that the test no longer needs: the server visits each of
# the others in every cycle.
sub drop_databases
{
	$node->safe_psql('postgres', qq{DROP DATABASE "} . s/"/""/gr . '"') foreach @_;
	return;
}

# visited returns the databases for which workers were started since an offset in the
# log, each once, by current name; "-" for a dropped one.
sub visited
{
	my ($from) = @_;
	my %oids = map { $_ => 1 }
	  slurp_file($node->logfile, $from) =~ /starting background worker process "idempotency reaper for database (\d+)"/g;
	my %names = map { split /\|/ } split /\n/, $node->safe_psql('postgres', 'SELECT oid, datname FROM pg_database');

	return join ' ', sort map { $names{$_} // '-' } keys %oids;
}

# ----------------------------------------------------------------
# Processes in pg_stat_activity
# ----------------------------------------------------------------

my $processes = q{SELECT backend_type, application_name, datname, usename FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %' ORDER BY 1};
like($node->safe_psql('postgres', $processes), qr/^idempotency launcher\|idempotency launcher\|\|/m, 'the launcher has a name, and no database');
my $event = $node->pg_version >= 17 ? qr/^Extension\|IdempotencyLauncherMain$/ : qr/^Extension\|Extension$/;
like($node->safe_psql('postgres', q{SELECT wait_event_type, wait_event FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}),
	$event, 'the launcher shows its wait event');

# The worker exists only for a short time.
expire_keys($node, 100_000, 'k', 'postgres');
$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'
	AND datname = 'postgres' AND application_name = 'idempotency reaper' AND query = 'removing expired idempotency keys'})
	or die 'no worker is visible';
pass('the worker has a name and a database');
gone('postgres', 'the worker deletes expired rows');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'})
	or die 'the worker does not exit';
pass('the worker exits');

# ----------------------------------------------------------------
# Databases
# ----------------------------------------------------------------

$node->safe_psql('postgres', "CREATE DATABASE $_") foreach 'one', 'two', 'bare', 'closed', 'pattern', '"Odd, ""name"""';
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach 'one', 'two', 'closed', 'pattern', 'Odd, "name"';
expire_keys($node, 10, 'k', $_) foreach 'one', 'two', 'Odd, "name"';
gone($_, "database $_ is reaped") foreach 'one', 'two', 'Odd, "name"';

# The first call after CREATE EXTENSION notifies the launcher. The next regular visit
# would come much later, ten cycles after the last.
change_settings($node, 'idempotency.reaper_naptime' => '2s');
wait_for_reapers(1);
$node->safe_psql('postgres', 'CREATE DATABASE later');
wait_for_reapers(1);
my $began = time;
$node->safe_psql('later', 'CREATE EXTENSION idempotency');
expire_keys($node, 10, 'k', 'later');
gone('later', 'a new extension is detected');
cmp_ok(time - $began, '<', 10, 'a new extension is detected soon');
$node->safe_psql('later', 'DROP EXTENSION idempotency');
wait_for_reapers(2);
$began = time;
$node->safe_psql('later', 'CREATE EXTENSION idempotency');
expire_keys($node, 10, 'k', 'later');
gone('later', 'a recreated extension is detected');
cmp_ok(time - $began, '<', 10, 'a recreated extension is detected soon');
change_settings($node, 'idempotency.reaper_naptime' => '200ms');

# A database without the extension is visited rarely.
my $from = wait_for_reapers(5);
unlike(visited($from), qr/bare.*bare/, 'a database without the extension is visited rarely');
like(visited(wait_for_reapers(12)), qr/\bbare\b/, 'a database without the extension is visited');

# Templates and closed databases are not visited, even with the extension.
expire_keys($node, 10, 'k', $_) foreach 'closed', 'pattern';
gone($_, "$_ is reaped") foreach 'closed', 'pattern';
$node->safe_psql('postgres', q{ALTER DATABASE closed ALLOW_CONNECTIONS false; ALTER DATABASE pattern IS_TEMPLATE true});
wait_for_reapers(2);
$from = wait_for_reapers(12);
is(visited($from), 'Odd, "name" bare later one postgres two', 'neither templates nor closed databases are visited');
$node->safe_psql('postgres', q{ALTER DATABASE closed ALLOW_CONNECTIONS true; ALTER DATABASE pattern IS_TEMPLATE false});
expire_keys($node, 10, 'k', $_) foreach 'closed', 'pattern';
gone($_, "$_ is visited again") foreach 'closed', 'pattern';

# A database that a failed DROP DATABASE left invalid.
$node->safe_psql('postgres', 'CREATE DATABASE broken');
my $broken = $node->psql('postgres', q{UPDATE pg_database SET datconnlimit = -2 WHERE datname = 'broken'});
wait_for_reapers(2);
unlike(visited(wait_for_reapers(12)), qr/broken/, 'an invalid database is not visited');
$node->safe_psql('postgres', 'DROP DATABASE broken');
is_quiet('choice of databases', $too_late);

# The setting idempotency.databases.
change_settings($node, 'idempotency.databases' => 'one, "Odd, ""name""", nowhere');
wait_for_reapers(2, $node, 'one'); # a cycle that began earlier visits the databases of its own list
expire_keys($node, 10, 'k', $_) foreach 'one', 'two', 'Odd, "name"';
gone($_, "listed database $_ is reaped") foreach 'one', 'Odd, "name"';
is(left('two'), '10', 'an unlisted database is not reaped');
change_settings($node, 'idempotency.databases' => 'TWO');
gone('two', 'a database is listed in upper case');
expire_keys($node, 10, 'k', 'one');
change_settings($node, 'idempotency.databases' => '');
gone('one', 'with an empty list all databases are reaped');
is_quiet('idempotency.databases');

# No cycles, and frequent cycles.
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
$from = -s $node->logfile;
expire_keys($node, 10, 'k', 'one');
my $launcher = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
kill 'HUP', $launcher foreach 1 .. 3;
is($node->safe_psql('one', q{SELECT pg_sleep(0.5), count(*) FROM idempotency.key}), '|10', 'with naptime 0 nothing is reaped');
is(visited($from), '', 'with naptime 0 no worker starts');
is($node->safe_psql('one', 'SELECT idempotency.reap()'), '10', 'with naptime 0 reap() works');
expire_keys($node, 10, 'k', 'one');
change_settings($node, 'idempotency.reaper_naptime' => '200ms');
gone('one', 'reaped again with another naptime');

# Parallel workers occupy all slots: this is logged once, and the launcher retries.
is_quiet('naptime');
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
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
$query->query_until(qr/begun/, "\\echo begun\nSELECT sum(wait_for_lock(n)) FROM numbers;\n");
$node->poll_query_until('postgres', q{SELECT count(*) = 4 FROM pg_stat_activity WHERE backend_type = 'parallel worker'}) or die;
change_settings($node, 'idempotency.reaper_naptime' => '200ms');
log_comes(qr/LOG:  no background worker slot is free for the idempotency reaper/, 'the log reports that no slot is free');
usleep(500_000);
my $said = () = log_unread() =~ /LOG:  no background worker slot is free/g;
is($said, 1, 'a lack of slots is logged once');
$lock->query_safe('SELECT pg_advisory_unlock(1)');
expire_keys($node, 10, 'k', 'one');
gone('one', 'the reaper starts once a slot is free');
is_quiet('slots', qr/no background worker slot is free/);
$_->quit foreach $query, $lock;

# ----------------------------------------------------------------
# Databases that are created, dropped, copied or renamed
# ----------------------------------------------------------------

# A database with a large backlog, as a template for others.
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->safe_psql('postgres', 'CREATE DATABASE backlog');
$node->safe_psql('backlog', 'CREATE EXTENSION idempotency');
$node->safe_psql('backlog', q{INSERT INTO idempotency.key (created_at, expires_at, scope, key)
	SELECT now(), now(), 'expired', 'k' || i FROM generate_series(1, } . soak(50_000, 1_000_000) . q{) AS i});
$node->safe_psql('backlog', q{SELECT idempotency.once('live', 'message')});
$node->safe_psql('postgres', 'ALTER DATABASE backlog ALLOW_CONNECTIONS false');

# busy copies that database and waits until a reaper works in the copy.
sub busy
{
	my ($dbname) = @_;
	change_settings($node, 'idempotency.reaper_naptime' => '0');
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE backlog");
	change_settings($node, 'idempotency.reaper_naptime' => '200ms');
	$node->poll_query_until('postgres', qq{SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = '$dbname'
		AND backend_type = 'idempotency reaper'}) or die "no reaper works in $dbname";
}

foreach my $drop ('DROP DATABASE %s', 'DROP DATABASE %s WITH (FORCE)')
{
	busy('dropped');
	$began = time;
	$node->safe_psql('postgres', sprintf $drop, 'dropped');
	cmp_ok(time - $began, '<', 5, sprintf("$drop while the reaper works, in time", 'a database'));
	wait_for_reapers(2);
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.stats WHERE datname IS NULL OR datname = 'dropped'}), '0',
		'no files of the dropped database are left');
}
drop_databases('bare', 'closed', 'pattern', 'later', 'Odd, "name"');
is_quiet('DROP DATABASE', $too_late);

# Repeatedly, at random moments.
foreach my $round (1 .. soak(4, 15))
{
	$node->safe_psql('postgres', 'CREATE DATABASE brief TEMPLATE one');
	usleep(int rand 150_000);
	$node->safe_psql('postgres', 'DROP DATABASE brief');
}
pass('databases are created and dropped repeatedly');
is_quiet('databases created and dropped', $too_late);

busy('original');
$node->safe_psql('postgres', 'CREATE DATABASE copy TEMPLATE original');
pass('CREATE DATABASE TEMPLATE while the reaper works');
gone($_, "$_ is reaped completely") foreach 'original', 'copy';
is($node->safe_psql($_, 'SELECT scope, key FROM idempotency.key'), 'live|message', "$_ keeps its unexpired row") foreach 'original', 'copy';
is($node->safe_psql($_, 'SELECT count(*), sum(rows_reaped) > 0 FROM idempotency.reaper'), '1|t', "$_ has one row in table reaper, with counters")
  foreach 'original', 'copy';
drop_databases('copy');
is_quiet('CREATE DATABASE TEMPLATE', $too_late);

busy('renamed');
$node->safe_psql('postgres', 'ALTER DATABASE renamed RENAME TO other');
gone('other', 'a database is renamed while the reaper works');
drop_databases('other');
is_quiet('ALTER DATABASE RENAME', $too_late);

busy('without');
$node->safe_psql('without', 'DROP EXTENSION idempotency');
pass('DROP EXTENSION while the reaper works');
wait_for_reapers(2);
is($node->safe_psql('without', 'CREATE EXTENSION idempotency; SELECT count(*) FROM idempotency.key'), '0', 'CREATE EXTENSION after DROP EXTENSION');
expire_keys($node, 10, 'k', 'without');
gone('without', 'the recreated extension is detected');
is_quiet('DROP EXTENSION');
foreach my $round (1 .. soak(4, 20))
{
	$node->safe_psql('without', 'DROP EXTENSION idempotency; CREATE EXTENSION idempotency');
	expire_keys($node, 10, 'k', 'without') if $round % 2;
}
pass('DROP EXTENSION repeatedly, at random moments');
$node->safe_psql('without', 'BEGIN; DROP EXTENSION idempotency; ROLLBACK');
is_quiet('DROP EXTENSION again and again');

# let_sleep makes the workers of a database sleep in a trigger of each batch.
sub let_sleep
{
	my ($dbname, $seconds) = @_;
	$node->safe_psql($dbname, qq{
		CREATE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN PERFORM pg_sleep($seconds); RETURN NULL; END \$\$;
		CREATE TRIGGER sleep AFTER INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION sleep()});
	return;
}

# sleeping returns the process ID of the worker that sleeps there, or 0.
sub sleeping
{
	my ($dbname) = @_;
	return $node->safe_psql('postgres', qq{SELECT coalesce(min(pid), 0) FROM pg_stat_activity
		WHERE datname = '$dbname' AND backend_type = 'idempotency reaper' AND wait_event = 'PgSleep'});
}

# stop_sleeping stops a worker while it sleeps, and returns its process ID. There it holds
# nothing that other processes need, except the locks on its rows. Anywhere else it could hold
# the lock of a page.
sub stop_sleeping
{
	my ($dbname) = @_;
	my $pid;
	for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end && !$pid; usleep(10_000))
	{
		$pid = sleeping($dbname);
	}
	is(kill('STOP', $pid || die 'the worker does not sleep'), 1, "a worker in database $dbname is stopped");
	is(sleeping($dbname), $pid, 'it sleeps in the trigger');
	return $pid;
}

# Two workers: a small database does not wait for a large one, whose worker is stopped
# meanwhile.
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->safe_psql('postgres', 'CREATE DATABASE large TEMPLATE backlog');
let_sleep('large', 3);
change_settings($node, 'idempotency.reaper_naptime' => '200ms');
my $worker = stop_sleeping('large');
expire_keys($node, 10, 'k', 'one');
gone('one', 'a small database is reaped');
cmp_ok(left('large'), '>', 0, 'a large database still has expired rows');
$node->safe_psql('large', q{CREATE OR REPLACE FUNCTION sleep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'});
kill 'CONT', $worker;
gone('large', 'the large database is reaped completely');

# ----------------------------------------------------------------
# A worker that hangs
# ----------------------------------------------------------------

# has_pending_sigterm returns whether a stopped process has a pending SIGTERM.
sub has_pending_sigterm
{
	my ($pid) = @_;
	my ($signals) = slurp_file("/proc/$pid/status") =~ /^ShdPnd:\s*[0-9a-f]*([0-9a-f]{8})$/m;
	return hex($signals) >> (SIGTERM - 1) & 1;
}

drop_databases('without', 'large');
is_quiet('before a worker hangs', $too_late);
$node->safe_psql('one', q{
	CREATE ROLE consumer LOGIN;
	SELECT idempotency.grant_consumer('consumer');
	CREATE TABLE handled ();
	GRANT INSERT ON handled TO consumer;
	CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE sql AS 'INSERT INTO public.handled DEFAULT VALUES';
	SELECT idempotency.subscribe('events', '{t}', 'handle(idempotency.event)', owner => 'consumer')});
$node->safe_psql('postgres', 'CREATE DATABASE hung');
$node->safe_psql('hung', 'CREATE EXTENSION idempotency');
let_sleep('hung', 5);
expire_keys($node, 10, 'k', 'hung');
my $hung = stop_sleeping('hung');

# The relay does not wait for the worker.
my $published = time;
$node->safe_psql('one', q{SELECT idempotency.publish('t', '{}')});
$node->poll_query_until('one', 'SELECT count(*) = 1 FROM handled') or die 'the event is not handled';
cmp_ok(time - $published, '<', 4, 'an event is handled while a visit hangs');
is(has_pending_sigterm($hung), 0, 'the event is handled before the hanging worker receives SIGTERM');

# The launcher waits four seconds for the worker, terminates it, and continues.
$began = time;
expire_keys($node, 10, 'k', 'one');
gone('one', 'another database is reaped while a worker hangs');
cmp_ok(time - $began, '<', 40, 'another database is reaped soon');
is(has_pending_sigterm($hung), 1, 'the hanging worker received SIGTERM');

# From now on the hanging worker delays no cycle, and no other worker starts in its
# database, even if the database is removed from the list and added again.
$began = time;
$from = wait_for_reapers(10);
cmp_ok(time - $began, '<', 40, 'later cycles do not wait for the hanging worker');
unlike(visited($from), qr/\bhung\b/, 'no other worker starts in its database');
expire_keys($node, 10, 'k', 'one');
gone('one', 'another database is reaped in later cycles');
change_settings($node, 'idempotency.databases' => 'postgres, one');
wait_for_reapers(3);
is(visited(wait_for_reapers(3)), 'one postgres', 'the database of the hanging worker is removed from the list');
expire_keys($node, 10, 'k', 'two');
change_settings($node, 'idempotency.databases' => '');
gone('two', 'another database is reaped with an empty list');
unlike(visited(wait_for_reapers(10)), qr/\bhung\b/, 'no worker starts in the database that was listed again');
is($node->safe_psql('hung', q{SELECT idempotency.once('live', 'message'), count(*) FROM idempotency.key WHERE scope = 'expired'}), 't|10',
	'clients of its database continue, and uncommitted deletions are not visible');
is(sleeping('hung'), $hung, 'the worker still hangs');

# The worker continues and exits at once. Its database is visited again once it is
# listed.
change_settings($node, 'idempotency.databases' => 'postgres, one');
wait_for_reapers(3);
$launcher = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
is(kill('CONT', $hung), 1, 'the worker continues');
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $hung)") or die 'the worker does not exit';
is(left('hung'), '10', 'the worker rolled back');
wait_for_reapers(3);
$node->safe_psql('hung', 'DROP TRIGGER sleep ON idempotency.reaper');
expire_keys($node, 10, 'k', 'hung');
change_settings($node, 'idempotency.databases' => '');
gone('hung', 'the database of the hanging worker is reaped again');
is($node->safe_psql('hung', 'SELECT rows_reaped FROM idempotency.reaper'), '10', 'the counters of the reaper match');
is($node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}), $launcher,
	'the launcher is the same process');
is_quiet('a hanging worker');
drop_databases('hung');

# A worker that is terminated while it connects changes nothing: its database is visited
# in the next cycles too. The worker is stopped while it waits for a catalog that its
# connection reads.
$lock = open_session($node);
change_settings($node, 'idempotency.databases' => 'postgres, one');
$from = -s $node->logfile;
$lock->query_safe('BEGIN; LOCK TABLE pg_db_role_setting IN ACCESS EXCLUSIVE MODE');
my $connecting;
for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end && !$connecting; usleep(10_000))
{
	my $pids = $lock->query_safe(q{SELECT pid FROM pg_locks WHERE NOT granted AND relation = 'pg_db_role_setting'::regclass});
	($connecting) = grep { slurp_file("/proc/$_/cmdline") =~ /idempotency reaper/ && kill 'STOP', $_ } $pids =~ /^(\d+)$/mg;
}
my ($slow) = slurp_file($node->logfile, $from) =~ /.*starting background worker process "idempotency reaper for database (\d+)"/s;
for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; time < $end && !has_pending_sigterm($connecting); usleep(10_000)) { }
is(kill('CONT', $connecting), 1, 'a connecting worker received SIGTERM');
$from = -s $node->logfile;
$lock->query_safe('COMMIT');
$lock->quit;
my $other = $node->safe_psql('postgres', "SELECT datname FROM pg_database WHERE datname IN ('postgres', 'one') AND oid <> $slow");
wait_for_reapers(3, $node, $other);
cmp_ok(reaper_starts($node, $slow, $from), '>=', 2, 'a database whose worker was terminated while it connected is visited as before');
change_settings($node, 'idempotency.databases' => '');
is_quiet('a slow connection', qr/terminating background worker|exited with exit code 1|lock timeout/);

# ----------------------------------------------------------------
# A worker that fails with an error
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE failing');
$node->safe_psql('failing', q{
	CREATE EXTENSION idempotency;
	CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'planned failure'; END $$;
	CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION fail()});
my $failing = $node->safe_psql('postgres', q{SELECT oid FROM pg_database WHERE datname = 'failing'});
my $first = -s $node->logfile;
expire_keys($node, 10, 'k', 'failing');
$node->wait_for_log(qr/ERROR:  planned failure/, $first);
expire_keys($node, 10, 'k', 'one');
gone('one', 'another database is reaped while a worker fails');

# No client of that database notifies the launcher, so it is due every tenth cycle.
my $visits = 3;
wait_for_reapers(0, $node, 'failing');
$began = time;
wait_for_reapers($visits - 1, $node, 'failing');
cmp_ok(time - $began, '>', 3.5, 'the database of the failed worker is visited again, every tenth cycle of 200 ms');
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) or die;
my @died = slurp_file($node->logfile, $first) =~ /\[(\d+)\] .*ERROR:  planned failure/g;
cmp_ok(scalar(@died), '>', $visits, 'each visit logs the error');
is(scalar(keys %{ { map { $_ => 1 } @died } }), scalar(@died), 'each error is logged once');
is(left('failing'), '10', 'a failed worker deletes nothing');
is($node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'}), $launcher,
	'the launcher is the same process');
$node->safe_psql('failing', 'DROP TRIGGER fail ON idempotency.reaper');
change_settings($node, 'idempotency.reaper_naptime' => '200ms');
gone('failing', 'the repaired database is reaped');
is($node->safe_psql('failing', 'SELECT rows_reaped FROM idempotency.reaper'), '10', 'the counters of the reaper match');
is_quiet('a failing worker', qr/ERROR:  planned failure|$too_late/);
$node->safe_psql('postgres', 'DROP DATABASE failing');

# ----------------------------------------------------------------
# Table reaper in copies and replicas
# ----------------------------------------------------------------

# A restore while the reaper visits the new database.
my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('original', q{SELECT count(*) FROM idempotency.once_many('live', array(SELECT 'k' || i FROM generate_series(1, 20000) AS i))});
$node->command_ok([ 'pg_dump', '--file', "$dir/dump", 'original' ], 'dump');
foreach my $round (1 .. 3)
{
	$node->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", 'restored' ], 'restore while the reaper runs');
	expire_keys($node, 10, 'k', 'restored');
	gone('restored', 'the restored database is reaped');
	is($node->safe_psql('restored', q{SELECT count(*), count(*) FILTER (WHERE relation = 'idempotency.key'::regclass AND rows_reaped = 10)
			FROM idempotency.reaper}), '2|1', 'the restored database has a new row in table reaper');
	$node->safe_psql('postgres', 'DROP DATABASE restored');
}

# Logical replication of all tables between two databases that are both reaped.
$node->safe_psql('postgres', 'CREATE DATABASE publisher; CREATE DATABASE subscriber');
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach 'publisher', 'subscriber';
expire_keys($node, 10, 'k', 'subscriber');
gone('subscriber', 'the subscriber is reaped');
$node->safe_psql('publisher', q{CREATE PUBLICATION everything FOR ALL TABLES; SELECT idempotency.once('live', 'message');
	SELECT pg_create_logical_replication_slot('replica', 'pgoutput')});
expire_keys($node, 10, 'k', 'publisher');
gone('publisher', 'the publisher is reaped');
my $connstr = $node->connstr('publisher');
$node->safe_psql('subscriber', qq{CREATE SUBSCRIPTION replica CONNECTION \$c\$$connstr\$c\$ PUBLICATION everything
	WITH (create_slot = false, slot_name = 'replica')});
expire_keys($node, 1000, 'k', 'publisher');
gone('publisher', 'the publisher is reaped with a subscriber');
$node->safe_psql('publisher', q{SELECT idempotency.once('live', 'the last')});
ok($node->poll_query_until('subscriber', q{SELECT count(*) = 1 FROM idempotency.key WHERE key = 'the last'}), 'the subscriber receives rows');
gone('subscriber', 'the subscriber has no expired row left');
$node->poll_query_until('subscriber', q{SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel}) or die 'the tables are not all synchronized';
is($node->safe_psql('subscriber', q{SELECT sum(rows_reaped) FILTER (WHERE relation <> 'idempotency.key'::regclass) FROM idempotency.reaper}),
	$node->safe_psql('publisher', 'SELECT rows_reaped FROM idempotency.reaper'), 'the subscriber has the row of the publisher beside its own');
$node->safe_psql('subscriber', 'DROP SUBSCRIPTION replica');
is_quiet('copies and replicas', qr/exited with exit code 1|tablesync|logical replication|out of background worker slots|no background worker slot is free|pg_\d+_sync_/);

# ----------------------------------------------------------------
# Shutdown
# ----------------------------------------------------------------

# stops checks that the server stops in time while the reaper works. On a loaded machine,
# the reaper can have deleted all rows before; then it repeats that.
sub stops
{
	my ($mode) = @_;
	my $left;
	foreach (1 .. 10)
	{
		drop_databases("stop_$mode") if defined $left;
		busy("stop_$mode");
		is_quiet("before a stop, $mode", qr/"logical replication worker"/); # the subscription was just dropped
		my $at = time;
		$node->stop($mode);
		cmp_ok(time - $at, '<', 20, "$mode shutdown in time");
		# The server's logical replication launcher exits in the same way, and the last
		# client can disconnect before its backend has exited.
		is_quiet("$mode stop", qr/LOG:  background worker "(?:idempotency|logical replication) launcher" \(PID \d+\) exited with exit code 1|FATAL:  terminating connection due to administrator command/);
		without_reaper();
		$node->start;
		$left = left("stop_$mode");
		last if $left > 0;
	}
	cmp_ok($left, '>', 0, 'the shutdown interrupted the work');
	change_settings($node, 'idempotency.reaper_naptime' => '200ms');
	gone("stop_$mode", 'the reaper continues after the restart');
}
stops('fast');
stops('smart');

# Shutdown while the launcher sleeps, and with naptime 0.
foreach my $naptime ('1h', '0')
{
	change_settings($node, 'idempotency.reaper_naptime' => $naptime);
	$began = time;
	$node->restart;
	cmp_ok(time - $began, '<', 20, "shutdown with naptime $naptime");
}

# ----------------------------------------------------------------
# A standby
# ----------------------------------------------------------------

# The base backup copies all databases.
$node->safe_psql('postgres', q{SELECT format('DROP DATABASE %I', datname) FROM pg_database
	WHERE datname NOT IN ('postgres', 'one') AND NOT datistemplate \gexec});
$node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
expire_keys($node, 1000, 'k', 'one');
$node->wait_for_catchup($standby);
change_settings($node, 'idempotency.reaper_naptime' => '200ms');
$standby->safe_psql('postgres', 'SELECT pg_reload_conf()');
is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'}), '0',
	'there is no launcher on a standby');
fails_with($standby, 'SELECT idempotency.reap()', '25006', 'reap() is rejected on a standby', dbname => 'one');
$node->poll_query_until('one', q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}) or die;
# The reaper commits asynchronously.
$node->wait_for_catchup($standby, 'replay', $node->lsn('insert'));
is($standby->safe_psql('one', q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'}), '0', 'the standby replays the deletions');
is($standby->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper'),
	$node->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper'), 'the standby replays table reaper');

change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->safe_psql('one', q{SELECT count(*) FROM idempotency.once_many('expired', array(SELECT 'k' || i FROM generate_series(1, 500) AS i), '1 microsecond')});
$node->wait_for_catchup($standby);
my $before = $standby->safe_psql('one', 'SELECT rows_reaped FROM idempotency.reaper');
my $standby_from = -s $standby->logfile;
$node->stop('immediate');
$standby->append_conf('postgresql.auto.conf', "idempotency.reaper_naptime = '100ms'");
$standby->reload;
is($standby->safe_psql('one', q{SELECT count(*) FROM idempotency.key WHERE scope = 'expired'}), '500', 'the standby deletes nothing');
$standby->promote;
ok($standby->poll_query_until('one', q{SELECT count(*) = 0 FROM idempotency.key WHERE scope = 'expired'}), 'a promoted standby deletes expired rows');
is($standby->safe_psql('one', "SELECT count(*), sum(rows_reaped) - $before FROM idempotency.reaper"), '1|500',
	'a promoted standby keeps the row of the primary in table reaper');
unlike(slurp_file($standby->logfile, $standby_from), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'the log of the standby has no warning or error');
$standby->stop;

done_testing();
