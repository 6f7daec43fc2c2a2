# 015_reaper.pl
#
# Proves that the reaper removes what has run out, and nothing else, on its own:
# amid a storm of claims, whatever settings, locks and changes of the tables it
# meets, and across crashes in the middle of its work; that it adds up exactly;
# and that new rows get the room, so that the table does not grow.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Cluster.pm switches restart_after_crash off, and one test needs it.  The server
# says in its log when it starts a worker.
my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '100ms'
restart_after_crash = on
max_connections = 40
log_statement = none
log_min_messages = debug1
});
$node->safe_psql('postgres', 'ALTER ROLE ALL SET log_min_messages = warning');

watch_log($node);

# expire stores so many records that have run out.
sub expire
{
	my ($prefix, $rows) = @_;
	return $node->safe_psql('postgres', qq{SELECT count(*) FROM idempotency.once_many('expired',
		array(SELECT '$prefix' || i FROM generate_series(1, $rows) AS i), '1 microsecond')});
}

# gone waits until nothing is left of what had run out.
sub gone
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until('postgres',
			q{SELECT NOT EXISTS (SELECT FROM idempotency.key WHERE expires_at <= clock_timestamp())}),
		$name);
}

# reaped returns how many rows the reaper says it has removed, zombies, and those
# that its counters say.
sub reaped
{
	return $node->safe_psql('postgres', q{SELECT rows_reaped, r.zombies_reaped, s.reaped, s.zombies_reaped
		FROM idempotency.reaper AS r, idempotency.stats AS s WHERE datname = current_database()});
}

# reload changes a setting of the server.
sub reload
{
	my ($setting, $value) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $setting = $value");
	$node->reload;
}

# ----------------------------------------------------------------
# What it removes
# ----------------------------------------------------------------

# Whatever these rows are, they live.
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
is(scalar(split /\n/, $alive), 7, 'rows of every kind live');

is(expire('first ', 2000), 2000, 'two thousand rows run out');
$node->safe_psql('postgres', q{
	SELECT idempotency.claim('expired', 'zombie ' || i, lease => '1 millisecond', retention => '1 microsecond')
	FROM generate_series(1, 30) AS i;
	BEGIN;
	SELECT idempotency.claim('expired', 'large', retention => '1 microsecond');
	SELECT idempotency.complete('expired', 'large', (SELECT json_agg(md5(i::text)) FROM generate_series(1, 20000) AS i));
	COMMIT});
gone('and are removed');
is($node->safe_psql('postgres', $live), $alive, 'the others are what they were');
is(reaped(), '2031|30|2031|30', 'it says how many');
is($node->safe_psql('postgres', q{SELECT last_reaped_at > pg_postmaster_start_time(), last_reaped_rows > 0,
		round_started_at > pg_postmaster_start_time() FROM idempotency.reaper}), 't|t|t', 'and when');

# Nothing to do, nothing written.
visits(2);
my $idle = q{SELECT xmin, ctid FROM idempotency.reaper};
my $before = $node->safe_psql('postgres', $idle);
visits(5);
is($node->safe_psql('postgres', $idle), $before, 'it comes again, and writes nothing when there is nothing to do');
is_quiet('at work and idle');

# ----------------------------------------------------------------
# Amid clients
# ----------------------------------------------------------------

my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('postgres', q{
	CREATE TABLE charge (key text, answer text);
	CREATE TABLE seen (key text);
	CREATE TABLE brief (key text)});

# Keys that stay: one effect each, and its answer for ever after.
append_to_file("$dir/lasting.sql", <<'SQL');
\set key random(1, 4000)
\set answer random(1, 1000000000)
BEGIN;
SELECT replayed::int AS replayed FROM idempotency.claim('storm', :key::text, '{"a":1}', wait => '180 s') \gset
\if :replayed
\else
INSERT INTO charge VALUES (:key::text, :answer::text);
SELECT idempotency.complete('storm', :key::text, :answer::text);
\endif
COMMIT;
SQL

# Keys that run out at once and are claimed again and again, while the reaper is
# at them.
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
$node->command_checks_all([ $node->installed_command('pgbench'), '-n', '-c', '8', '-T', '10', '--max-tries=1000',
		'-f', "$dir/lasting.sql\@4", '-f', "$dir/brief.sql\@6", '-f', "$dir/leased.sql\@4", '-f', "$dir/batches.sql\@3",
		$node->connstr('postgres') ],
	0, [qr/number of failed transactions: 0/], [qr/^(?!.*error)/s], 'clients and reaper do not disturb each other');
gone('and the reaper keeps up');
is($node->safe_psql('postgres', q{SELECT count(*) > 50, count(*) FILTER (WHERE c.key IS NULL), count(*) FILTER (WHERE k.key IS NULL),
		count(*) FILTER (WHERE c.answer <> k.response::text), count(*) - count(DISTINCT c.key)
		FROM (SELECT * FROM idempotency.key WHERE scope = 'storm') AS k FULL JOIN charge AS c USING (key)}),
	't|0|0|0|0', 'no lasting key is lost, and each had one effect');
is($node->safe_psql('postgres', q{SELECT count(*) > 10, count(*) - count(DISTINCT s.key), count(*) FILTER (WHERE k.key IS NULL)
		FROM seen AS s LEFT JOIN (SELECT * FROM idempotency.key WHERE scope = 'lasting') AS k USING (key)}),
	't|0|0', 'nor a message');
is($node->safe_psql('postgres', q{SELECT count(*) > 100 FROM brief}), 't', 'the brief keys had their effects');
is($node->safe_psql('postgres', q{SELECT reaped > 500 FROM idempotency.stats WHERE datname = 'postgres'}), 't',
	'and were removed in great numbers');
is($node->safe_psql('postgres', $live), $alive, 'what lives is what it was');
$node->safe_psql('postgres', q{CREATE EXTENSION amcheck});
is(($node->psql('postgres', q{SELECT bt_index_check('idempotency.key_pkey', true)}))[2], '', 'every row is in the index');
is_quiet('amid clients');

# ----------------------------------------------------------------
# Room
# ----------------------------------------------------------------

# Each round brings as many new rows as the last has left room for.
$node->safe_psql('postgres', q{DELETE FROM idempotency.key WHERE scope <> 'live'; VACUUM FULL idempotency.key});
my @sizes;
foreach my $round (1 .. 12)
{
	expire("round $round ", 20_000);
	$node->poll_query_until('postgres', q{SELECT count(*) = 7 FROM idempotency.key}) or die "round $round is not removed";
	$node->safe_psql('postgres', 'VACUUM idempotency.key');
	push @sizes, $node->safe_psql('postgres', q{SELECT pg_relation_size('idempotency.key') / 8192});
}
cmp_ok($sizes[-1], '<=', 1.1 * $sizes[1], "the table stays as large as it was: @sizes blocks");
is_quiet('round by round');

# ----------------------------------------------------------------
# Whoever is in its way
# ----------------------------------------------------------------

# A locked table: it leaves, and tries again.
my $session = open_session($node);
$session->query_safe('BEGIN; LOCK TABLE idempotency.key IN SHARE MODE');
visits(5);
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_locks WHERE NOT granted}), '0',
	'it comes and goes, and does not queue for a locked table');
$session->query_safe('COMMIT');

# Its own row and its own table.
$session->query_safe('BEGIN; SELECT FROM idempotency.reaper FOR UPDATE');
is(expire('row ', 10), 10, 'rows run out while its row is locked');
visits(2);
$session->query_safe('COMMIT');
gone('they are removed when it is free');
$session->query_safe('BEGIN; LOCK TABLE idempotency.reaper');
expire('table ', 10);
visits(3);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'table %'}), '10',
	'it does nothing without its table');
$session->query_safe('COMMIT');
gone('and goes on with it');

# A reaper by hand.
$session->query_safe('BEGIN; SELECT idempotency.reap()');
expire('hand ', 10);
visits(3);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'hand %'}), '10',
	'there is one reaper at a time');
$session->query_safe('COMMIT');
gone('it goes on after the other');

# A row that somebody is at, and one that he has claimed.
$session->query_safe(q{BEGIN; SELECT idempotency.claim('expired', 'mine 1')});
expire('mine ', 3);
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idempotency.key WHERE key LIKE 'mine %'})
	or die 'it removes nothing beside a claim';
$session->query_safe(q{SELECT idempotency.release('expired', 'mine 1'); COMMIT});
gone('a claimed key is left until the claim is over');
is_quiet('in its way');

# ----------------------------------------------------------------
# Settings that are meant for clients
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
	# We ourselves are not to be disturbed either.
	local $ENV{PGOPTIONS} = join ' ', '-c default_transaction_isolation=read\ committed',
	  map { "-c $_=off" } qw(default_transaction_read_only default_transaction_deferrable);
	$ENV{PGOPTIONS} .= " -c $_=0" foreach grep { /timeout/ } keys %hostile;

	foreach my $setting (sort keys %hostile)
	{
		$node->safe_psql('postgres', "ALTER $whose SET $setting = '$hostile{$setting}'");
	}
	$node->reload;
	expire("$whose ", 10);
	gone("settings of $whose do not disturb it");
	foreach my $setting (sort keys %hostile)
	{
		$node->safe_psql('postgres', "ALTER $whose RESET $setting");
	}
	$node->reload;
}
is_quiet('settings');

# ----------------------------------------------------------------
# Tables that are not as the extension made them
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'ALTER TABLE idempotency.key ENABLE ROW LEVEL SECURITY');
log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log says that it leaves them alone');
visits(2);
my $log = log_since();
is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, 'an altered table is said once');
like($log, qr/DETAIL:  .*"idempotency\.key" is not as the extension made it.*row-level security/, 'and why');
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'and nothing else');
$node->safe_psql('postgres', 'ALTER TABLE idempotency.key DISABLE ROW LEVEL SECURITY');
expire('altered ', 10);
gone('mended, it is visited again');
is_quiet('mended');

# A layout of another version.
foreach my $change (['ALTER TABLE idempotency.reaper RENAME COLUMN round_block TO block', 'ALTER TABLE idempotency.reaper RENAME COLUMN block TO round_block'],
	['ALTER TABLE idempotency.reaper RENAME TO old', 'ALTER TABLE idempotency.old RENAME TO reaper'],
	['ALTER TABLE idempotency.key RENAME COLUMN token TO ticket', 'ALTER TABLE idempotency.key RENAME COLUMN ticket TO token'])
{
	my ($there, $back) = @$change;
	$node->safe_psql('postgres', $there);
	log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log says that it leaves them alone');
	visits(1);
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, "$there: said once");
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'and nothing else');
	$node->safe_psql('postgres', $back);
	expire('layout ', 10);
	gone('and back');
	log_since();
}

# A hand that cannot be written down: then nothing is removed, for the reaper would find
# no more of it than before.
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
	expire('unwritten ', 10);
	log_comes(qr/idempotency reaper leaves database "postgres" alone/, 'the log says that it leaves them alone');
	visits(1);
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency reaper leaves/g), 1, "$name: said once");
	like($log, $state eq '55000' ? qr/DETAIL:  .*"idempotency\.reaper" is not as the extension made it/ : qr/DETAIL:  .*ON CONFLICT/, 'and why');
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):|LOG:  background worker/, 'and nothing else');
	fails_with($node, 'SELECT idempotency.reap()', $state, "$name: nor does reap()");
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE key LIKE 'unwritten %'}), '10', 'nothing was removed');
	$node->safe_psql('postgres', "DROP $kind swallow ON idempotency.reaper");
	gone("$name, dropped");
	log_since();
}

# ----------------------------------------------------------------
# Ends of all kinds
# ----------------------------------------------------------------

# backlog makes much work, which does not begin before the caller has seen it.
my $backlog = 0;
sub backlog
{
	reload('idempotency.reaper_naptime', "'0'");
	$backlog++;
	foreach my $part (1 .. 4) { expire("backlog $backlog $part ", 50_000) }
	$before = (split /\|/, reaped())[0];
	reload('idempotency.reaper_naptime', "'100ms'");
	$node->poll_query_until('postgres', qq{SELECT rows_reaped > $before FROM idempotency.reaper})
		or die 'the reaper does not begin';
	return $before;
}

# left returns how many rows were removed since $before, and are left.
sub left
{
	my ($before) = @_;
	return split /\|/, $node->safe_psql('postgres', qq{SELECT rows_reaped - $before, (SELECT count(*) FROM idempotency.key WHERE scope = 'expired')
		FROM idempotency.reaper});
}

# pid_of waits for a process and returns its number.
sub pid_of
{
	my ($type) = @_;
	$node->poll_query_until('postgres', "SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = '$type'")
		or die "there is no $type";
	return $node->safe_psql('postgres', "SELECT min(pid) FROM pg_stat_activity WHERE backend_type = '$type'");
}

# without_reaper makes the server start without the reaper, so that one can count.
sub without_reaper
{
	my $file = $node->data_dir . '/postgresql.auto.conf';
	my $conf = slurp_file($file) =~ s/^idempotency\.reaper_naptime.*/idempotency.reaper_naptime = 0/mr;

	open my $out, '>', $file or die $!;
	print $out $conf;
	close $out or die $!;
}

# An immediate stop.
$before = backlog();
$node->stop('immediate');
without_reaper();
$node->start;
my ($removed, $left) = left($before);
is($removed + $left, 200_000, "stopped after $removed rows: what was removed and what is left add up");
cmp_ok($left, '>', 0, 'in the middle of the work');
is($node->safe_psql('postgres', $live), $alive, 'what lives is there');
reload('idempotency.reaper_naptime', "'100ms'");
gone('the rest is removed after the restart');
is((left($before))[0], 200_000, 'and it adds up');
is(($node->psql('postgres', q{SELECT bt_index_check('idempotency.key_pkey', true)}))[2], '', 'every row is in the index');

# kill -9 of the worker, or if it has just left of the next one: all restart.
$before = backlog();
my $pid;
do { $pid = $node->safe_psql('postgres', q{SELECT min(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'}) } until $pid && kill(9, $pid);
pass('kill -9 of the worker');
$node->poll_query_until('postgres', 'SELECT true') or die 'the server does not come back';
gone('the server comes back, and the rest is removed');
is((left($before))[0], 200_000, 'and it adds up');
is($node->safe_psql('postgres', $live), $alive, 'what lives is there');

# SIGTERM of the worker, and of the launcher.
log_since();
$before = backlog();
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper'});
gone('the worker is terminated, another goes on');
is((left($before))[0], 200_000, 'and it adds up');
is_quiet('a worker that is terminated');
my $launcher = pid_of('idempotency launcher');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($launcher)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $launcher)")
	or die 'the launcher does not go';
isnt(pid_of('idempotency launcher'), $launcher, 'the launcher is terminated, and started again');
expire('again ', 10);
gone('and sends its workers');
unlike(log_since(), qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'the log has no alarm of it');

# A cancel is no reason to stop.
$before = backlog();
$node->safe_psql('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'});
gone('cancelled, it goes on');
is((left($before))[0], 200_000, 'and it adds up');

# A fast stop in the middle of it is one.
$before = backlog();
log_since();
$node->stop('fast');
unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'a fast stop is quiet');
without_reaper();
$node->start;
($removed, $left) = left($before);
is($removed + $left, 200_000, "after $removed rows: it adds up");
cmp_ok($left, '>', 0, 'in the middle of the work');

$node->stop;
done_testing();
