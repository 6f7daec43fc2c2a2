# 015_reaper.pl
#
# Proves that the reaper worker deletes expired keys and nothing else: under load, with
# any settings, locks and altered tables, and across crashes during its work. Its
# counters are exact, and new rows reuse the space, so that the table does not grow.
# `make soak` runs more load. The short part takes 20 seconds, because it waits for what
# the reaper must not do.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Cluster.pm disables restart_after_crash, which one test needs. debug1 logs the start
# of a worker.
my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '300ms'
restart_after_crash = on
max_connections = 40
log_statement = none
log_min_messages = debug1
});
$node->safe_psql('postgres', 'ALTER ROLE ALL SET log_min_messages = warning');

watch_log($node);

# gone waits until all expired rows are deleted.
sub gone
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until('postgres',
			q{SELECT NOT EXISTS (SELECT FROM idempotency.key WHERE expires_at <= clock_timestamp())}),
		$name);
}

# reaped returns how many rows and zombies were deleted, according to the table reaper
# and to the counters.
sub reaped
{
	return $node->safe_psql('postgres', q{SELECT rows_reaped, r.zombies_reaped, s.reaped, s.zombies_reaped
		FROM idempotency.reaper AS r, idempotency.stats AS s WHERE datname = current_database()});
}

# ----------------------------------------------------------------
# Expired and unexpired keys
# ----------------------------------------------------------------

# Unexpired rows of every kind.
my $live = q{SELECT scope, key, status, expires_at, token, recovery_point, response::text FROM idempotency.key
	WHERE scope = 'live' ORDER BY key};
$node->safe_psql('postgres', q{
	BEGIN;
	SELECT idempotency.claim('live', 'completed', '{"n": 1}');
	SELECT idempotency.complete('live', 'completed', '{"n" :1}');
	SELECT idempotency.claim('live', 'failed');
	SELECT idempotency.fail('live', 'failed', '"no"', 402);
	SELECT idempotency.claim('live', 'for ever', retention => '-1 second');
	SELECT idempotency.complete('live', 'for ever', to_json(repeat('x', 100000)));
	COMMIT;
	SELECT idempotency.once('live', 'message');
	SELECT idempotency.claim('live', 'leased', lease => '1 hour', retention => '1 microsecond');
	SELECT idempotency.claim('live', 'abandoned', lease => '1 millisecond');
	SELECT token FROM idempotency.claim('live', 'released', lease => '1 hour') \gset
	SELECT idempotency.checkpoint('live', 'released', :token, 'charged');
	SELECT idempotency.release('live', 'released', :token)});
my $alive = $node->safe_psql('postgres', $live);
is(scalar(split /\n/, $alive), 7, 'there are unexpired rows of every kind');

is(expire_keys($node, 2000, 'first '), 2000, 'two thousand rows expire');
$node->safe_psql('postgres', q{
	SELECT idempotency.claim('expired', 'zombie ' || i, lease => '1 millisecond', retention => '1 microsecond')
	FROM generate_series(1, 30) AS i;
	BEGIN;
	SELECT idempotency.claim('expired', 'large', retention => '1 microsecond');
	SELECT idempotency.complete('expired', 'large', (SELECT json_agg(md5(i::text)) FROM generate_series(1, 20000) AS i));
	COMMIT});
gone('expired rows are deleted');
is($node->safe_psql('postgres', $live), $alive, 'unexpired rows are unchanged');
is(reaped(), '2031|30|2031|30', 'the counters match');
is($node->safe_psql('postgres', q{SELECT last_reaped_at > pg_postmaster_start_time(), last_reaped_rows > 0,
		scan_started_at > pg_postmaster_start_time() FROM idempotency.reaper}), 't|t|t', 'the times of the round are stored');

# An idle round writes nothing.
wait_for_reapers(2);
my $idle = q{SELECT xmin, ctid FROM idempotency.reaper};
my $before = $node->safe_psql('postgres', $idle);
wait_for_reapers(5);
is($node->safe_psql('postgres', $idle), $before, 'an idle round writes nothing');
is_quiet('deleting and idle');

# ----------------------------------------------------------------
# Under load
# ----------------------------------------------------------------

my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('postgres', q{
	CREATE TABLE charge (key text, answer text);
	CREATE TABLE seen (key text);
	CREATE TABLE brief (key text)});

# Keys that do not expire: one effect each, and the same response.
append_to_file("$dir/lasting.sql", <<'SQL');
\set key random(1, 4000)
\set answer random(1, 1000000000)
BEGIN;
SELECT replayed::int AS replayed FROM idempotency.claim('load', :key::text, '{"a":1}', wait => '180 s') \gset
\if :replayed
\else
INSERT INTO charge VALUES (:key::text, :answer::text);
SELECT idempotency.complete('load', :key::text, :answer::text);
\endif
COMMIT;
SQL

# Keys that expire at once and are claimed again while the reaper deletes them.
append_to_file("$dir/brief.sql", <<'SQL');
\set key random(1, 300)
BEGIN;
SELECT replayed::int AS replayed
	FROM idempotency.claim('brief', :key::text, wait => '180 s', retention => '5 ms') \gset
\if :replayed
\else
INSERT INTO brief VALUES (:key::text);
SELECT idempotency.complete('brief', :key::text, '1');
\endif
COMMIT;
SQL
append_to_file("$dir/leased.sql", <<'SQL');
\set key random(1, 100)
SELECT coalesce(token, 0) AS token
	FROM idempotency.claim('leased', :key::text, lease => '1 s', wait => '180 s', retention => '5 ms') \gset
SELECT CASE WHEN :token > 0 THEN idempotency.complete('leased', :key::text, '1', token => :token) END;
SQL
append_to_file("$dir/batches.sql", <<'SQL');
SELECT count(*) FROM idempotency.once_many('batch', array(SELECT 'k' || random() FROM generate_series(1, 20)), '10 ms');
INSERT INTO seen SELECT k FROM idempotency.once_many('lasting', array(
	SELECT (extract(epoch FROM clock_timestamp()) * 1000 + i)::int8::text FROM generate_series(1, 10) AS i)) AS k;
SQL
$node->command_checks_all([ $node->installed_command('pgbench'), '-n', '-c', '8', '-t', soak(300, 2000), '--max-tries=1000',
		'-f', "$dir/lasting.sql\@4", '-f', "$dir/brief.sql\@6", '-f', "$dir/leased.sql\@4", '-f', "$dir/batches.sql\@3",
		$node->connstr('postgres') ],
	0, [qr/number of failed transactions: 0/], [qr/^(?!.*error)/s], 'clients and reaper do not block each other');
gone('the reaper keeps up with the clients');
is($node->safe_psql('postgres', q{SELECT count(*) > 50, count(*) FILTER (WHERE c.key IS NULL), count(*) FILTER (WHERE k.key IS NULL),
		count(*) FILTER (WHERE c.answer <> k.response::text), count(*) - count(DISTINCT c.key)
		FROM (SELECT * FROM idempotency.key WHERE scope = 'load') AS k FULL JOIN charge AS c USING (key)}),
	't|0|0|0|0', 'no unexpired key is lost, and each had one effect');
is($node->safe_psql('postgres', q{SELECT count(*) > 10, count(*) - count(DISTINCT s.key), count(*) FILTER (WHERE k.key IS NULL)
		FROM seen AS s LEFT JOIN (SELECT * FROM idempotency.key WHERE scope = 'lasting') AS k USING (key)}),
	't|0|0', 'no unexpired message is lost');
is($node->safe_psql('postgres', q{SELECT count(*) > 100 FROM brief}), 't', 'the expiring keys had their effects');
is($node->safe_psql('postgres', q{SELECT reaped > 500 FROM idempotency.stats WHERE datname = 'postgres'}), 't',
	'many expired keys were deleted');
is($node->safe_psql('postgres', $live), $alive, 'unexpired rows are unchanged');
$node->safe_psql('postgres', q{CREATE EXTENSION amcheck});
is(($node->psql('postgres', q{SELECT bt_index_check('idempotency.key_pkey', true)}))[2], '', 'every row is in the index');
is_quiet('under load');

# ----------------------------------------------------------------
# Reuse of space
# ----------------------------------------------------------------

# Each round inserts as many new rows as the last round deleted.
$node->safe_psql('postgres', q{DELETE FROM idempotency.key WHERE scope <> 'live'; VACUUM FULL idempotency.key});
my @sizes;
foreach my $round (1 .. soak(6, 12))
{
	expire_keys($node, 20_000, "round $round ");
	$node->poll_query_until('postgres', q{SELECT count(*) = 7 FROM idempotency.key}) or die "round $round is not deleted";
	$node->safe_psql('postgres', 'VACUUM idempotency.key');
	push @sizes, $node->safe_psql('postgres', q{SELECT pg_relation_size('idempotency.key') / 8192});
}
cmp_ok($sizes[-1], '<=', 1.1 * $sizes[1], "the table does not grow: @sizes blocks");
is_quiet('round by round');

# ----------------------------------------------------------------
# Locks
# ----------------------------------------------------------------

# A locked table: the worker exits and is started again.
my $session = open_session($node);
$session->query_safe('BEGIN; LOCK TABLE idempotency.key IN SHARE MODE');
wait_for_reapers(5);
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE NOT granted}), '0',
	'the worker exits, and does not queue for a locked table');
$session->query_safe('COMMIT');

# A lock on the reaper's row and on the reaper's table.
$session->query_safe('BEGIN; SELECT FROM idempotency.reaper FOR UPDATE');
is(expire_keys($node, 10, 'row '), 10, 'rows expire while the row of the reaper is locked');
wait_for_reapers(2);
$session->query_safe('COMMIT');
gone('rows are deleted once the row of the reaper is unlocked');
$session->query_safe('BEGIN; LOCK TABLE idempotency.reaper');
expire_keys($node, 10, 'table ');
wait_for_reapers(3);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'table %'}), '10',
	'the worker deletes nothing while its table is locked');
$session->query_safe('COMMIT');
gone('the worker continues once its table is unlocked');

# A call of reap() in a session.
$session->query_safe('BEGIN; SELECT idempotency.reap()');
expire_keys($node, 10, 'manual ');
wait_for_reapers(3);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'manual %'}), '10',
	'reap() blocks the worker');
$session->query_safe('COMMIT');
gone('the worker continues after reap() commits');

# A key that is claimed.
$session->query_safe(q{BEGIN; SELECT idempotency.claim('expired', 'mine 1')});
expire_keys($node, 3, 'mine ');
gone('the worker deletes an expired outcome beside the claim of its key');
$session->query_safe(q{SELECT idempotency.complete('expired', 'mine 1', '"mine"'); COMMIT});
is($node->safe_psql('postgres', q{SELECT response FROM idempotency.peek('expired', 'mine 1')}), '"mine"', 'the claim stores its outcome');
$node->safe_psql('postgres', q{SELECT idempotency.forget('expired', 'mine 1')});
is_quiet('locks');

# ----------------------------------------------------------------
# Settings intended for clients
# ----------------------------------------------------------------

my %hostile = (
	default_transaction_read_only => 'on',
	default_transaction_isolation => 'serializable',
	default_transaction_deferrable => 'on',
	statement_timeout => '1',
	lock_timeout => '1',
	idle_in_transaction_session_timeout => '1',
	search_path => 'nowhere',
	session_replication_role => 'replica');
foreach my $whose ('ROLE ALL', 'ROLE CURRENT_USER', 'DATABASE postgres', 'SYSTEM')
{
	# The sessions of the test must not apply these settings.
	local $ENV{PGOPTIONS} = join ' ', '-c default_transaction_isolation=read\ committed',
	  map { "-c $_=off" } qw(default_transaction_read_only default_transaction_deferrable);
	$ENV{PGOPTIONS} .= " -c $_=0" foreach grep { /timeout/ } keys %hostile;

	foreach my $setting (sort keys %hostile)
	{
		$node->safe_psql('postgres', "ALTER $whose SET $setting = '$hostile{$setting}'");
	}
	$node->reload;
	expire_keys($node, 10, "$whose ");
	gone("settings of $whose do not affect the worker");
	foreach my $setting (sort keys %hostile)
	{
		$node->safe_psql('postgres', "ALTER $whose RESET $setting");
	}
	$node->reload;
}
is_quiet('settings');

# ----------------------------------------------------------------
# Tables that differ from those of CREATE EXTENSION
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'ALTER TABLE idempotency.key ENABLE ROW LEVEL SECURITY');
log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log reports an altered table');
wait_for_reapers(2);

# A survey opens other tables only: what the log has said of this one stays said.
change_settings($node, 'idempotency.reaper_naptime' => '0');
$node->safe_psql('postgres', q{BEGIN; SELECT idempotency.publish('request a visit', '{}'); ROLLBACK});
wait_for_reapers(0);
change_settings($node, 'idempotency.reaper_naptime' => '300ms');
wait_for_reapers(2);
my $log = log_since();
is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, 'an altered table is logged once');
like($log, qr/DETAIL:  .*"idempotency\.key" has been altered.*row-level security/, 'the log has the reason');
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'the log has no other message');
$node->safe_psql('postgres', 'ALTER TABLE idempotency.key DISABLE ROW LEVEL SECURITY');
expire_keys($node, 10, 'altered ');
gone('a repaired table is reaped again');
is_quiet('repaired');

# A table layout of another version.
foreach my $change (['ALTER TABLE idempotency.reaper RENAME COLUMN scan_block TO block', 'ALTER TABLE idempotency.reaper RENAME COLUMN block TO scan_block'],
	['ALTER TABLE idempotency.reaper RENAME TO old', 'ALTER TABLE idempotency.old RENAME TO reaper'],
	['ALTER TABLE idempotency.key RENAME COLUMN token TO ticket', 'ALTER TABLE idempotency.key RENAME COLUMN ticket TO token'])
{
	my ($there, $back) = @$change;
	$node->safe_psql('postgres', $there);
	log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log reports an altered table');
	wait_for_reapers(1);
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, "$there: logged once");
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'the log has no other message');
	$node->safe_psql('postgres', $back);
	expire_keys($node, 10, 'layout ');
	gone('the original layout is reaped again');
	log_since();
}

# The reaper's position cannot be stored: nothing is deleted, because the next round
# would find the same dead rows again.
$node->safe_psql('postgres', q{CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'});
my $swallow = 'TRIGGER swallow BEFORE %s ON idempotency.reaper FOR EACH ROW EXECUTE FUNCTION nothing()';
my $rule = 'RULE swallow AS ON %s TO idempotency.reaper DO INSTEAD NOTHING';
foreach my $change ([ $swallow, 'INSERT', '55000' ], [ $swallow, 'UPDATE', '55000' ], [ $rule, 'INSERT', '55000' ], [ $rule, 'UPDATE', '0A000' ],
	[ $rule, 'DELETE', '55000' ])
{
	my ($what, $on, $state) = @$change;
	my ($kind) = $what =~ /^(\w+)/;
	my $name = lc "$kind on $on";
	$node->safe_psql('postgres', sprintf "CREATE $what", $on);
	expire_keys($node, 10, 'unwritten ');
	log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log reports the failure');
	wait_for_reapers(1);
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, "$name: logged once");
	like($log, $state eq '55000' ? qr/DETAIL:  .*"idempotency\.reaper" has been altered/ : qr/DETAIL:  .*ON CONFLICT/, 'the log has the reason');
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'the log has no other message');
	fails_with($node, 'SELECT idempotency.reap()', $state, "$name: reap() fails");
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'unwritten %'}), '10', 'nothing was deleted');
	$node->safe_psql('postgres', "DROP $kind swallow ON idempotency.reaper");
	gone("$name: reaped again once it is dropped");
	log_since();
}

# ----------------------------------------------------------------
# Stops, crashes and terminations
# ----------------------------------------------------------------

# backlog expires many rows, and returns once the reaper has started to delete them.
my $backlog = 0;
my $rows = soak(100_000, 200_000);
sub backlog
{
	change_settings($node, 'idempotency.reaper_naptime' => '0');
	$backlog++;
	foreach my $part (1 .. $rows / 50_000) { expire_keys($node, 50_000, "backlog $backlog $part ") }
	$before = (split /\|/, reaped())[0];
	change_settings($node, 'idempotency.reaper_naptime' => '300ms');
	$node->poll_query_until('postgres', qq{SELECT rows_reaped > $before FROM idempotency.reaper})
		or die 'the reaper does not start';
	return $before;
}

# left returns how many rows were deleted since $before, and how many are left.
sub left
{
	my ($before) = @_;
	return split /\|/, $node->safe_psql('postgres', qq{SELECT rows_reaped - $before, (SELECT count(*) FROM idempotency.key WHERE scope = 'expired')
		FROM idempotency.reaper});
}

# stops stops the server while the reaper works. On a loaded machine, the reaper can have
# deleted all rows before; then it repeats that.
sub stops
{
	my ($mode) = @_;
	my ($removed, $left);

	foreach (1 .. 10)
	{
		$before = backlog();
		log_since();
		$node->stop($mode);
		unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, "a $mode stop logs no warning or error") if $mode eq 'fast';
		without_reaper();
		$node->start;
		($removed, $left) = left($before);
		is($removed + $left, $rows, "$mode stop after $removed rows: deleted and remaining rows add up");
		last if $left > 0;
	}
	cmp_ok($left, '>', 0, 'the stop interrupted the work');
}

stops('immediate');
is($node->safe_psql('postgres', $live), $alive, 'unexpired rows are unchanged');
change_settings($node, 'idempotency.reaper_naptime' => '300ms');
gone('the remaining rows are deleted after the restart');
is((left($before))[0], $rows, 'the counters match after the restart');
is(($node->psql('postgres', q{SELECT bt_index_check('idempotency.key_pkey', true)}))[2], '', 'every row is in the index');

# kill -9 of the worker, or of the next one if it has just exited: all backends restart.
$before = backlog();
my $pid;
do { $pid = $node->safe_psql('postgres', q{SELECT min(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) } until $pid && kill(9, $pid);
pass('kill -9 of the worker');
kill9($node, $pid);
gone('the remaining rows are deleted after the crash');
is((left($before))[0], $rows, 'the counters match after the crash');
is($node->safe_psql('postgres', $live), $alive, 'unexpired rows are unchanged');

# SIGTERM of the worker and of the launcher.
log_since();
$before = backlog();
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'});
gone('another worker continues after a termination');
is((left($before))[0], $rows, 'the counters match after a termination');
is_quiet('a terminated worker');
my $launcher = worker_pid($node, 'idempotency launcher');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($launcher)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $launcher)")
	or die 'the launcher does not exit';
isnt(worker_pid($node, 'idempotency launcher'), $launcher, 'a terminated launcher is restarted');
expire_keys($node, 10, 'again ');
gone('the restarted launcher starts workers');
unlike(log_since(), qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'the log has no warning or error');

# A cancel does not stop the worker.
$before = backlog();
$node->safe_psql('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'});
gone('the worker continues after a cancel');
is((left($before))[0], $rows, 'the counters match after a cancel');

stops('fast');

$node->stop;
done_testing();
