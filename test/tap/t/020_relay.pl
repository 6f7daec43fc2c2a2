# 020_relay.pl
#
# Proves that relay workers give every event to its handler, in order, and that
# what a handler writes happens once, whatever it does: errors, sleep, session
# settings, claims, other roles, the end of its session; and whatever others do to
# it, to its role and to its database.  That nobody waits for anybody else's
# handler, that workers are there within moments and leave again, and that a stop, a
# crash or a restore of the server loses nothing and repeats nothing.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);

# The reaper comes seldom, so that it is not what finds the events.
my $node = new_node('main', init => { allows_streaming => 1 }, conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '1h'
restart_after_crash = on
max_prepared_transactions = 10
log_statement = none
});

# Where the log begins that was not looked at yet.
my $log_from = -s $node->logfile;

# is_quiet checks that the log has got nothing that would alarm anybody, but
# what the pattern allows.
sub is_quiet
{
	my ($name, $allowed) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $log = slurp_file($node->logfile, $log_from);
	my @alarms = grep { /(?:WARNING|ERROR|FATAL|PANIC):|LOG:  (?:background worker|(?!parameter).*idempotency)/ } split /\n/, $log;

	@alarms = grep { $_ !~ $allowed } @alarms if defined $allowed;
	$log_from += length $log;
	is(scalar(@alarms), 0, "$name: the log is quiet") or diag(join "\n", @alarms);
}

# log_since returns what the log has got since it was looked at last.
sub log_since
{
	my $log = slurp_file($node->logfile, $log_from);
	$log_from += length $log;
	return $log;
}

# reload changes settings of the server.
sub reload
{
	my (%settings) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $_ = '$settings{$_}'") foreach keys %settings;
	$node->reload;
	foreach my $name (keys %settings)
	{
		$node->poll_query_until('postgres', "SELECT current_setting('$name') = '$settings{$name}'") or die $name;
	}
}

# as_app runs SQL as the role that owns the subscriptions.
sub as_app
{
	my ($sql, $dbname) = @_;
	return $node->safe_psql($dbname // 'postgres', $sql, extra_params => [ '--username', 'app' ]);
}

# comes waits until a query, run by the superuser, says true.
sub comes
{
	my ($query, $name, $dbname) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return ok($node->poll_query_until($dbname // 'postgres', $query), $name)
	  || diag($node->safe_psql($dbname // 'postgres', 'TABLE idempotency.parked; TABLE idempotency.position; TABLE idempotency.subscription'));
}

# publish publishes events that the handler does something with, in a
# transaction of their own: publish('order', 'fail', aggregate => 'A').
sub publish
{
	my ($topic, $do, %opt) = @_;
	my $aggregate = defined $opt{aggregate} ? "'$opt{aggregate}'" : 'NULL';
	my @all = ref $do ? @$do : ($do);
	my $list = join ', ', map { "'$_'" } @all;
	return as_app(qq{SELECT count(idempotency.publish('$topic', json_build_object('do', what), $aggregate))
		FROM unnest(ARRAY[$list]) AS what}, $opt{dbname});
}

# idle waits until no worker is connected.
sub idle
{
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'})
	  or die 'workers stay';
}

# pid_of waits for a process and returns its number.
sub pid_of
{
	my ($type, $and) = @_;
	$and = defined $and ? "AND $and" : '';
	for (1 .. 18_000)
	{
		my $pid = $node->safe_psql('postgres', "SELECT min(pid) FROM pg_stat_activity WHERE backend_type = '$type' $and");
		return $pid if $pid;
		usleep(10_000);
	}
	die "there is no $type";
}

# done returns what the handler has done, in the order in which it did.
sub done
{
	my ($condition) = @_;
	return $node->safe_psql('postgres', "SELECT string_agg(what, ' ' ORDER BY n) FROM done WHERE $condition");
}

# ----------------------------------------------------------------
# The handlers
# ----------------------------------------------------------------

# What an event's payload tells the handler to do; what it did stands in a table,
# unless that was rolled back.
my $schema = q{
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
			VALUES (e.aggregatetype, e.seq, e.id, what, e.attempt, clock_timestamp() - e.published_at);
		CASE split_part(what, ' ', 1)
		WHEN 'fail' THEN RAISE EXCEPTION 'no: %', what USING ERRCODE = 'P0042', DETAIL = 'in detail';
		WHEN 'once' THEN
			IF e.attempt = 1 THEN RAISE EXCEPTION 'the first time'; END IF;
		WHEN 'kill' THEN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(60);
		WHEN 'sleep' THEN PERFORM pg_sleep(600);
		WHEN 'nap' THEN PERFORM pg_sleep(split_part(what, ' ', 2)::float8);
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
		WHEN 'lost' THEN PERFORM idempotency.complete('lost', 'nobody''s');
		WHEN 'caught' THEN
			BEGIN PERFORM idempotency.complete('lost', 'nobody''s'); EXCEPTION WHEN OTHERS THEN NULL; END;
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
			said := format('%s %s %s %s %s %s %s', current_setting('work_mem'), current_setting('search_path'), current_setting('DateStyle'),
				current_user, session_user, current_setting('is_superuser'), current_setting('transaction_isolation'));
		WHEN 'left' THEN
			said := (SELECT count(*) FROM pg_prepared_statements) || ' ' || (SELECT count(*) FROM pg_cursors) || ' ' ||
				(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory' AND objsubid < 3);
		WHEN 'memory' THEN said := sum(total_bytes) FROM pg_backend_memory_contexts;
		ELSE NULL;
		END CASE;
		UPDATE public.done AS d SET note = said WHERE d.seq = e.seq AND said IS NOT NULL;
	END $$;
};
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE friend;
	CREATE ROLE boss SUPERUSER;
	GRANT friend, boss TO app;
	GRANT pg_read_all_stats TO app;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
	GRANT CREATE ON SCHEMA public TO app});
as_app($schema);

# ----------------------------------------------------------------
# Who is who
# ----------------------------------------------------------------

my $subscribe = q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '100 ms', max_attempts => 3)};
as_app($subscribe);
publish('a', 'nap 1');
comes(q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idempotency relay' AND datname = 'postgres' AND usename = 'app'
	AND application_name = 'idempotency relay' AND query = 'serving subscription "all"'}, 'a worker is there, as the owner, and says for what');
comes(q{SELECT count(*) = 1 FROM done}, 'the handler gets the event');
my $event = $node->pg_version >= 17 ? 'IdempotencyRelayLauncher' : 'Extension';
is($node->safe_psql('postgres', q{SELECT datname, application_name, wait_event_type, wait_event FROM pg_stat_activity
		WHERE backend_type = 'idempotency relay launcher'}), "|idempotency relay launcher|Extension|$event",
	'the launcher has no database, waits, and says for what');
idle();
pass('the worker leaves');
is_quiet('who is who');

# ----------------------------------------------------------------
# Order, and once
# ----------------------------------------------------------------

# From several sessions at once, with rollbacks of all kinds.
my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('postgres', q{CREATE TABLE committed (id uuid); GRANT ALL ON committed TO app});
append_to_file("$dir/publish.sql", <<'SQL');
\set kind random(1, 10)
\set nap random(0, 3000)
BEGIN;
INSERT INTO committed SELECT idempotency.publish('storm', '{"do": "x"}', 'A' || :client_id) FROM generate_series(1, 5);
SAVEPOINT s;
INSERT INTO committed SELECT idempotency.publish('storm', '{"do": "x"}') FROM generate_series(1, 3);
\if :kind < 4
ROLLBACK TO s;
\endif
\sleep :nap us
\if :kind = 10
ROLLBACK;
\else
COMMIT;
\endif
SQL
$node->command_ok([ $node->installed_command('pgbench'), '-n', '-c', '6', '-T', '8', '--username', 'app', '-f', "$dir/publish.sql", $node->connstr('postgres') ],
	'a storm of publishers');
comes(q{SELECT (SELECT count(*) FROM done WHERE topic = 'storm') >= (SELECT count(*) FROM committed)}, 'the relay keeps up');
is($node->safe_psql('postgres', q{SELECT count(*) > 1000, count(*) FILTER (WHERE c.id IS NULL), count(*) FILTER (WHERE d.id IS NULL),
		count(*) - count(DISTINCT id) FROM committed AS c FULL JOIN (SELECT * FROM done WHERE topic = 'storm') AS d USING (id)}), 't|0|0|0',
	'every event that was committed had its effect, once, and no other');
is($node->safe_psql('postgres', q{SELECT count(*) FROM (SELECT d.seq, o.txid, o.aggregateid,
		max(d.seq) OVER (PARTITION BY o.txid ORDER BY n) AS in_transaction, max(d.seq) OVER (PARTITION BY o.aggregateid ORDER BY n) AS in_aggregate
		FROM done AS d JOIN idempotency.outbox AS o USING (seq) WHERE topic = 'storm') AS o
		WHERE seq < in_transaction OR (aggregateid IS NOT NULL AND seq < in_aggregate)}), '0',
	'those of a transaction and of an aggregate in their order');
is_quiet('a storm');

# Nobody waits for a transaction that stays open, and it loses nothing.
my $session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{BEGIN; SELECT idempotency.publish('late', '{"do": "late"}')});
publish('late', 'early');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'late'}, 'nobody waits for an open transaction');
idle();
$session->query_safe('COMMIT');
$session->quit;
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'late'}, 'whose events come when it commits');

# A commit of two phases tells nobody; it is found when the launcher looks.
as_app(q{BEGIN; SELECT idempotency.publish('prepared', '{"do": "prepared"}'); PREPARE TRANSACTION 'p'});
publish('prepared', 'early');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'prepared'}, 'nobody waits for a prepared transaction');
idle();
as_app(q{COMMIT PREPARED 'p'});
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'prepared'}, 'whose events come, too');

# A rollback wakes nobody.
idle();
as_app(q{BEGIN; SELECT idempotency.publish('never', '{"do": "never"}'); ROLLBACK});

# ----------------------------------------------------------------
# In time
# ----------------------------------------------------------------

# Each time there is no worker, and the next look of the launcher is 10 seconds off.
foreach my $i (1 .. 20)
{
	idle();
	publish('idle', $i);
}
comes(q{SELECT count(*) = 20 FROM done WHERE topic = 'idle'}, 'events that find nobody at work');
cmp_ok($node->safe_psql('postgres', q{SELECT max(extract(epoch FROM lag)) FROM done WHERE topic = 'idle'}), '<', 4, 'fetch their worker themselves');

# A retry is on time, though nobody publishes and no worker is connected.
publish('retry', 'once');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'retry'}, 'a retry comes by itself');
is($node->safe_psql('postgres', q{SELECT attempt, lag BETWEEN '50 ms' AND '4 s' FROM done WHERE topic = 'retry'}), '2|t', 'on time');
as_app(q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '3 s', max_attempts => 3)});
publish('retry 2', 'once');
comes(q{SELECT count(*) = 1 FROM idempotency.parked}, 'the next one is parked for longer');
idle();
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'retry 2'}, 'and comes as well');
is($node->safe_psql('postgres', q{SELECT attempt, lag BETWEEN '1500 ms' AND '6 s' FROM done WHERE topic = 'retry 2'}), '2|t', 'on time');
as_app($subscribe);

# ----------------------------------------------------------------
# Errors
# ----------------------------------------------------------------

publish('errors', [ 'one', 'fail', 'two', 'once', 'three' ]);
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'errors'}, 'an event that fails always becomes a dead letter');
comes(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'one that fails once does not');
is(done(q{topic = 'errors'}), 'one two three once', 'what failed left nothing behind, the others were not disturbed');
is($node->safe_psql('postgres', q{SELECT error, attempts, last_failed_at - first_failed_at BETWEEN '100 ms' AND '20 s' FROM idempotency.dead_letters}),
	"P0042: no: fail\nDETAIL:  in detail|3|t", 'the error is kept, and how often, and when');
is($node->safe_psql('postgres', q{SELECT last_error FROM idempotency.subscriptions}), "P0042: no: fail\nDETAIL:  in detail", 'the subscription shows it');
like(log_since(), qr/LOG:  event \S+ of subscription "all" is a dead letter now\n\S.*DETAIL:  P0042: no: fail/, 'and the log');

# Redriven, it is given once more, at once.
$node->safe_psql('postgres', q{CREATE OR REPLACE FUNCTION handled_again() RETURNS void LANGUAGE sql AS ''});
idle();
is(as_app(q{SELECT idempotency.redrive('all')}), '1', 'redrive');
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'errors' AND attempts = 3 AND last_failed_at > clock_timestamp() - interval '10 s'},
	'wakes a worker, and it fails again');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');

# Within an aggregate, later events wait for the one that failed; when that is
# dead, they go on.
publish('order', [ 'one', 'fail', 'two', 'three' ], aggregate => 'A');
publish('order', [ 'four', 'five' ], aggregate => 'B');
publish('order', [ 'six' ], aggregate => 'A');
comes(q{SELECT count(*) = 6 FROM done WHERE topic = 'order'}, 'the aggregate goes on without the dead letter');
is(done(q{topic = 'order' AND what IN ('one', 'two', 'three', 'six')}), 'one two three six', 'in its order');
is($node->safe_psql('postgres', q{SELECT bool_and(n > (SELECT n FROM done WHERE what = 'five')) FROM done WHERE topic = 'order' AND what IN ('two', 'three', 'six')}),
	't', 'when the others had theirs long since');
publish('order 2', [ 'one', 'once', 'two' ], aggregate => 'A');
comes(q{SELECT count(*) = 3 FROM done WHERE topic = 'order 2'}, 'the aggregate goes on after a retry');
is(done(q{topic = 'order 2'}), 'one once two', 'in its order');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');
log_since();

# ----------------------------------------------------------------
# What handlers do
# ----------------------------------------------------------------

# All in one batch, each beside its neighbours.
my @does = ('execute SET ROLE friend', 'execute SET ROLE boss', 'execute SET SESSION AUTHORIZATION boss', 'execute RESET ROLE',
	'execute SET LOCAL ROLE boss', 'execute RESET SESSION AUTHORIZATION', 'execute LISTEN nobody', 'commit', 'claim', 'orphan 1', 'execute SELECT 1/0');
publish('does', [ map { ($_, 'show') } 'set', 'temporary', 'temporary', 'complete', 'publish', 'family 2', 'family 3', 'twice', 'twice', @does,
		'execute PREPARE p AS SELECT 1', 'execute DECLARE c CURSOR WITH HOLD FOR SELECT 1', 'execute DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$' ]);
comes(q{SELECT count(*) = 23 FROM done WHERE topic = 'does' AND what = 'show'}, 'whatever they do, the others have their turn');
my $plain = '4MB "$user", public ISO, MDY app app off read committed';
is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT note, ', ') FROM done WHERE topic = 'does' AND what = 'show'}), $plain,
	'nothing of a session gets into the next event');
comes(q{SELECT count(*) = 11 FROM idempotency.dead_letters WHERE topic = 'does'}, 'what must not be is an error');
is($node->safe_psql('postgres', q{SELECT string_agg(substr(error, 1, 5), ' ' ORDER BY seq) FROM idempotency.dead_letters WHERE topic = 'does'}),
	'42501 42501 42501 42501 42501 42501 0A000 2D000 IK428 23503 22012', 'of its own');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'does' AND what = 'temporary'}), '2', 'a temporary table goes with its event');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'again'}), '1', 'a handler may publish');
is($node->safe_psql('postgres', q{SELECT count(*), (SELECT string_agg(DISTINCT note, ' ') FROM done WHERE what = 'twice') FROM child}), '2|at once',
	'a constraint is deferred, or not, as it was declared');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE scope IN ('complete', 'open')}), '1', 'a claim is completed, or it is none');
comes(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'all is done');
publish('left', 'left');
comes(q{SELECT note = '0 0 0' FROM done WHERE topic = 'left'}, 'nothing else of a session is left when the batch is done');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# The settings of the owner and of the database apply, but for what delivery relies
# upon.
$node->safe_psql('postgres', q{ALTER ROLE app SET work_mem = '7MB'; ALTER ROLE app SET role = 'friend';
	ALTER ROLE app SET default_transaction_isolation = 'serializable'; ALTER ROLE app SET default_transaction_read_only = on;
	ALTER DATABASE postgres SET DateStyle = 'German'; ALTER ROLE app SET statement_timeout = '1ms'; ALTER ROLE app SET synchronous_commit = off});
idle();
{
	local $ENV{PGOPTIONS} = '-c default_transaction_read_only=off -c default_transaction_isolation=read\ committed -c statement_timeout=0 -c role=none';
	publish('settings', [ 'nap 0.1', 'show' ]);
}
comes(q{SELECT note = '7MB "$user", public German, DMY app app off read committed' FROM done WHERE what = 'show'}, 'the settings of the owner and of the database apply');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL; ALTER DATABASE postgres RESET ALL});
idle();
$node->safe_psql('postgres', 'DELETE FROM done');

# A claim that was lost dooms the transaction; the events beside it come alone.
publish('doom', [ (map { "before $_" } 1 .. 10), 'lost', 'caught', (map { "after $_" } 1 .. 10) ]);
comes(q{SELECT count(*) = 20 FROM done WHERE topic = 'doom'}, 'a lost claim dooms nobody else');
comes(q{SELECT count(*) = 2 FROM idempotency.dead_letters WHERE topic = 'doom'}, 'but the event');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'doom'}), '20|20|1', 'each of the others once, at its first attempt');
is($node->safe_psql('postgres', q{SELECT string_agg(substr(error, 1, 23) || ' ' || attempts, ', ' ORDER BY seq) FROM idempotency.dead_letters WHERE topic = 'doom'}),
	'IK410: this transaction 3, IK410: cannot commit af 3', 'with its own error');
comes(q{SELECT singles = 0 FROM idempotency.position ORDER BY version DESC LIMIT 1}, 'and batches are large again');
like(log_since(), qr/dead letter/, 'which the log has');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# ----------------------------------------------------------------
# Handlers that do not end, and those that end their worker
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{ALTER ROLE app SET idempotency.handler_timeout = '200ms'});
idle();
as_app(q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '100 ms', max_attempts => 2)});
publish('slow', [ 'one', 'sleep', 'two' ]);
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'slow'}, 'a handler that sleeps for ever is cancelled');
is(done(q{topic = 'slow'}), 'one two', 'the others are not');
is($node->safe_psql('postgres', q{SELECT error, attempts FROM idempotency.dead_letters}), '57014: canceling statement due to statement timeout|2', 'which is its error');
like(fails_with_app(q{SET idempotency.handler_timeout = 0}), qr/permission denied/, 'its owner cannot have it otherwise');
log_since();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# One that does not heed a cancel is ended with its worker.
publish('deaf', [ 'one', 'deaf', 'two' ]);
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'deaf'}, 'a handler that does not heed that ends with its worker');
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'deaf'}, 'the others have their turn');
is($node->safe_psql('postgres', q{SELECT error, attempts FROM idempotency.dead_letters}), 'the worker ended while it handled this event|2', 'which is its error');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq) FROM done WHERE topic = 'deaf'}), '2|2', 'once each');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL; DELETE FROM idempotency.parked; DELETE FROM done});
as_app($subscribe);
log_since();

# One that ends its session, among many others.
publish('poison', [ (map { "before $_" } 1 .. 30), 'kill', (map { "after $_" } 1 .. 100) ]);
comes(q{SELECT count(*) = 130 FROM done WHERE topic = 'poison'}, 'a handler that ends its session keeps nobody');
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'poison'}, 'and becomes a dead letter');
is($node->safe_psql('postgres', q{SELECT error, attempts, payload ->> 'do' FROM idempotency.dead_letters}), 'the worker ended while it handled this event|3|kill',
	'after as many attempts as any other');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt), count(*) FILTER (WHERE what LIKE 'kill') FROM done WHERE topic = 'poison'}), '130|1|0',
	'what it wrote is rolled back, the others had their effects once');
my $log = log_since();
is(scalar(() = $log =~ /terminating background worker/g), 4, 'it ended four workers: the first with others about it, then alone');
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'which alarms nobody');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# A worker that somebody else ends, at work and at rest, and a cancel.
publish('ended', [ 'one', 'await', 'two' ]);
my $pid = pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'ended' AND what = 'one'}, 'somebody ends a worker: another takes over');
$pid = pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
comes(q{SELECT count(*) = 1 FROM idempotency.parked WHERE error LIKE '57014: canceling statement due to user request%'}, 'somebody cancels a handler: it has failed');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
comes(q{SELECT count(*) = 3 FROM done WHERE topic = 'ended'}, 'all have their turn');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'ended'}), '3|2', 'once');
publish('rest', 'one');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'rest'}, 'a worker that rests');
$node->safe_psql('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
publish('rest', 'two');
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'rest'}, 'does not mind a cancel');
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
publish('rest', 'three');
comes(q{SELECT count(*) = 3 FROM done WHERE topic = 'rest'}, 'nor anybody that it is ended');
$log = log_since();
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'which alarms nobody');
$pid = pid_of('idempotency relay launcher');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die;
publish('rest', 'four');
comes(q{SELECT count(*) = 4 FROM done WHERE topic = 'rest'}, 'the launcher is ended, and started again');
unlike(log_since(), qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'which alarms nobody');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done; DELETE FROM flag');

# ----------------------------------------------------------------
# Subscriptions that cannot be served
# ----------------------------------------------------------------

as_app(q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what) VALUES ('other', e.seq, e.payload ->> 'do'); END $$});
$node->safe_psql('postgres', q{CREATE ROLE other LOGIN; GRANT other TO app; GRANT ALL ON done TO other; CREATE ROLE third LOGIN; CREATE ROLE third2 LOGIN});
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', owner => 'other')});
my $again = q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', owner => 'other', retry_delay => '100 ms')};
my $unfit = 0;
foreach my $case (
	[ 'DROP FUNCTION other', q{42883: handler public.other(idempotency.event) does not exist},
		q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what) VALUES ('other', (e).seq, (e).payload ->> 'do') $$;
			ALTER FUNCTION other OWNER TO app} ],
	[ 'REVOKE EXECUTE ON FUNCTION other FROM PUBLIC', '42501: permission denied for function other', 'GRANT EXECUTE ON FUNCTION other TO other' ],
	[ 'DROP FUNCTION other; CREATE FUNCTION other(json) RETURNS void LANGUAGE sql AS $$ $$', q{42883: handler public.other(idempotency.event) does not exist},
		q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what) VALUES ('other', (e).seq, (e).payload ->> 'do') $$;
			DROP FUNCTION other(json); ALTER FUNCTION other OWNER TO app} ],
	[ 'DROP FUNCTION other; CREATE FUNCTION other(idempotency.event) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$', '42P13: function other(idempotency.event) cannot handle events',
		q{DROP FUNCTION other; CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what) VALUES ('other', (e).seq, (e).payload ->> 'do') $$;
			ALTER FUNCTION other OWNER TO app} ],
	($node->pg_version >= 17 ? () : [ 'ALTER ROLE other NOLOGIN', 'role "other" is not permitted to log in', 'ALTER ROLE other LOGIN' ]),
	[ 'ALTER ROLE other SUPERUSER', 'owner "other" is a superuser', 'ALTER ROLE other NOSUPERUSER' ],
	[ 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC', 'role "other" has no CONNECT privilege on the database', 'GRANT CONNECT ON DATABASE postgres TO PUBLIC',
		'GRANT CONNECT ON DATABASE postgres TO app' ],
	[ 'ALTER ROLE other RENAME TO another', 'role "other" does not exist', 'ALTER ROLE another RENAME TO other' ])
{
	my ($there, $problem, $back, $first) = @$case;
	$unfit++;
	idle();
	$node->safe_psql('postgres', "BEGIN; $first; $there; COMMIT") if defined $first;
	$node->safe_psql('postgres', $there) unless defined $first;
	publish('unfit', $unfit);
	comes(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'unfit'}, "$there: the other subscription is served");
	comes(qq{SELECT last_error = \$p\$$problem\$p\$ FROM idempotency.subscription WHERE subscription = 'other'}, 'this one says why not');
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'it is no fault of the event');
	usleep(2_500_000) if $unfit == 1; # it is tried again after a second
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency relay cannot serve subscription \d+ of database "postgres"/g), $problem =~ /does not exist$/ && $there =~ /RENAME/ ? 0 : 1,
		'the log says it once') unless $there =~ /RENAME/;
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'and nothing else');
	$node->safe_psql('postgres', $back);
	as_app($again) if $unfit % 2; # or else it takes a moment longer
	comes(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'other'}, 'mended, it goes on');
}
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), min(what), max(attempt) FROM done WHERE topic = 'other'}), "$unfit|1|", 'where it stood');

# A handler that is dropped, and one that is replaced, while its worker is at it.
publish('unfit', [ 'one', 'await', 'two' ]);
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what) VALUES ('other', e.seq, e.payload ->> 'do');
		IF e.payload ->> 'do' = 'stay' THEN PERFORM pg_advisory_xact_lock(7); END IF; END $$});
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
idle();
$session = open_session($node);
$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(7)');
publish('unfit', [ 'first', 'stay', 'second', 'third' ]);
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted}) or die;
$node->safe_psql('postgres', 'DROP FUNCTION other');
$session->query_safe('COMMIT');
$session->quit;
comes(q{SELECT last_error LIKE '42883: handler%' FROM idempotency.subscription WHERE subscription = 'other'}, 'a handler is dropped in the middle of a batch');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'no event has failed');
as_app(q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what) VALUES ('other', e.seq, e.payload ->> 'do'); END $$});
as_app($again);
comes(q{SELECT count(*) = 4 FROM done WHERE topic = 'other' AND what IN ('first', 'stay', 'second', 'third')}, 'all are given to the new one');

# Another owner, and none: to fetch, and gone.
idle();
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)')});
publish('unfit', 'owner');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'owner'}, 'with another owner it goes on');
idle();
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'])});
publish('unfit', 'fetch');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'unfit' AND what = 'fetch'}, 'without a handler it is not served');
is(as_app(q{SELECT payload ->> 'do' FROM idempotency.fetch('other')}), 'fetch', 'and can be fetched');
is(as_app(q{SELECT idempotency.unsubscribe('other')}), 't', 'unsubscribe');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');
log_since();

# In the middle of the work.
foreach my $round (1 .. 5)
{
	as_app(q{SELECT idempotency.subscribe('brief', ARRAY['brief'], 'other(idempotency.event)')});
	as_app(q{SELECT count(idempotency.publish('brief', '{"do": "brief"}')) FROM generate_series(1, 500)});
	$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM done WHERE topic = 'other'}) or die;
	is(as_app(q{SELECT idempotency.unsubscribe('brief')}), 't', 'unsubscribe in the middle of the work') if $round == 1;
	as_app(q{SELECT idempotency.unsubscribe('brief')}) if $round > 1;
	is($node->safe_psql('postgres', q{WITH d AS (DELETE FROM done RETURNING *) SELECT count(*) - count(DISTINCT (topic, seq)) FROM d}), '0', 'nothing comes twice');
}
comes(q{SELECT pg_sleep(0.3) IS NULL OR count(*) = 0 FROM idempotency.parked}, 'and nobody is left');
idle();
is_quiet('subscriptions come and go');
$node->safe_psql('postgres', 'DELETE FROM done');

# By the handler itself, with which all else in the batch ends.
as_app(q{CREATE FUNCTION brief(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO done (topic, seq, what) VALUES ('brief', e.seq, e.payload ->> 'do');
		CASE e.payload ->> 'do'
		WHEN 'fail' THEN RAISE EXCEPTION 'no';
		WHEN 'enough' THEN PERFORM idempotency.unsubscribe('itself');
		ELSE NULL;
		END CASE;
	END $$;
	SELECT idempotency.subscribe('itself', ARRAY['itself'], 'brief(idempotency.event)')});
publish('itself', [ 'fail', 'one', 'enough', 'two' ]);
comes(q{SELECT NOT EXISTS (SELECT FROM idempotency.subscription WHERE subscription = 'itself')}, 'a handler may remove its subscription');
comes(q{SELECT count(*) = 3 FROM done WHERE topic = 'itself' AND what <> 'fail'}, 'the other one goes on');
idle();
is(done(q{topic = 'brief'}), 'one enough', 'what it did before is done, and nothing after it');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked WHERE subscription = 'itself'}), '0', 'and nothing is left');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');
log_since();

# Many at once: more than a transaction can note.
as_app(q{SELECT count(idempotency.subscribe('many ' || i, ARRAY['many'], 'other(idempotency.event)')) FROM generate_series(1, 20) AS i});
publish('many', 'many');
comes(q{SELECT count(*) = 20 FROM done WHERE topic = 'other'}, 'twenty subscriptions made in one transaction are served');
as_app(q{SELECT count(idempotency.unsubscribe('many ' || i)) FROM generate_series(1, 20) AS i});
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), count(*) FROM done WHERE topic = 'other'}), '1|20', 'once each');
$node->safe_psql('postgres', 'DELETE FROM done');
idle();
is_quiet('many at once');

# fails_with_app runs SQL as the owner, and returns what it says on stderr.
sub fails_with_app
{
	return ($node->psql('postgres', $_[0], extra_params => [ '--username', 'app' ]))[2];
}

# ----------------------------------------------------------------
# Slots
# ----------------------------------------------------------------

# Never more workers than there may be, and all have their turn: subscriptions and
# databases with much to do, and with little.
$node->safe_psql('postgres', 'CREATE DATABASE second');
$node->safe_psql('second', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
	GRANT CREATE ON SCHEMA public TO app});
as_app($schema, 'second');
reload('idempotency.relay_workers' => 0);
as_app(q{SELECT idempotency.subscribe('s' || i, ARRAY['s' || i], 'handle(idempotency.event)', retry_delay => '500 ms') FROM generate_series(1, 4) AS i});
as_app(q{SELECT idempotency.subscribe('t' || i, ARRAY['t' || i], 'handle(idempotency.event)') FROM generate_series(1, 2) AS i}, 'second');
as_app(q{SELECT idempotency.unsubscribe('all')});
publish('s1', [ map { 'nap 0.1' } 1 .. 200 ]);
as_app(q{SELECT idempotency.publish('s2', json_build_object('do', CASE i % 10 WHEN 5 THEN 'once' ELSE 'nap 0.05' END), 'A' || i % 7) FROM generate_series(1, 200) AS i});
publish('t1', [ map { 'nap 0.1' } 1 .. 200 ], dbname => 'second');
is($node->safe_psql('postgres', q{SELECT pg_sleep(1), count(*) FROM done}), '|0', 'relay_workers = 0: nobody is served');
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}), '0', 'nobody comes');
reload('idempotency.relay_workers' => 1);
comes(q{SELECT count(*) > 0 FROM done WHERE topic = 's1'}, 'the first of the large ones');
comes(q{SELECT count(*) > 0 FROM done WHERE topic = 's2'}, 'and the second');
comes(q{SELECT count(*) > 0 FROM done WHERE topic = 't1'}, 'and that of the other database', 'second');
my $began = time;
publish('s3', 'x');
publish('t2', 'x', dbname => 'second');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 's3'}, 'a small one');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 't2'}, 'in either database', 'second');
is($node->safe_psql('postgres', q{SELECT count(*) < 200 FROM done WHERE topic = 's1'}) . $node->safe_psql('second', q{SELECT count(*) < 200 FROM done WHERE topic = 't1'}), 'tt',
	'does not wait for the large ones to end');
is($node->safe_psql('postgres', q{SELECT max(seq) = min(seq) + count(*) - 1 AND count(*) = count(DISTINCT seq) FROM done WHERE topic = 's1'}), 't',
	'which are cut in the middle of a batch, and go on behind it');
my $most = 0;
reload('idempotency.relay_workers' => 3);
for (1 .. 100)
{
	my $now = $node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
	$most = $now if $now > $most;
	last if $most > 3;
	usleep(10_000);
}
is($most, 3, 'three workers when there may be three');
reload('idempotency.relay_workers' => 2);
comes(q{SELECT count(*) <= 2 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}, 'two, when there may be but two');
reload('idempotency.relay_workers' => 8);
comes(q{SELECT count(*) = 400 FROM done WHERE topic IN ('s1', 's2')}, 'in the end all is done');
comes(q{SELECT count(*) = 200 FROM done WHERE topic = 't1'}, 'there as well', 'second');
is($node->safe_psql('postgres', q{SELECT bool_and(ordered) FROM (SELECT n = max(n) OVER (PARTITION BY topic, aggregateid ORDER BY seq) AS ordered
		FROM done JOIN idempotency.outbox USING (seq)) AS o}), 't', 'in order, in spite of retries');
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'once');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'and nothing is left');
reload('idempotency.relay_workers' => 2);
as_app(q{SELECT idempotency.unsubscribe('s' || i) FROM generate_series(1, 4) AS i});
idle();
is_quiet('slots');

# No slot of the server's is free: it is said once, and tried again.
$node->safe_psql('postgres', q{DELETE FROM done; GRANT ALL ON done TO app});
as_app($subscribe);
idle();
my $query = open_session($node);
my $lock = open_session($node);
$query->query_safe(q{
	CREATE TABLE numbers AS SELECT generate_series(1, 2000) AS n;
	ALTER TABLE numbers SET (parallel_workers = 8);
	CREATE FUNCTION wait_for_lock(int) RETURNS int LANGUAGE plpgsql PARALLEL SAFE AS $$ BEGIN
		WHILE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 11) LOOP PERFORM pg_sleep(0.01); END LOOP;
		RETURN $1; END $$;
	SET max_parallel_workers_per_gather = 8;
	SET parallel_leader_participation = off;
	SET parallel_setup_cost = 0;
	SET parallel_tuple_cost = 0});
$lock->query_safe('SELECT pg_advisory_lock(11)');
$query->query_until(qr/go/, "\\echo go\nSELECT count(wait_for_lock(n)) FROM numbers;\n");
comes(q{SELECT count(*) >= 4 FROM pg_stat_activity WHERE backend_type = 'parallel worker'}, 'parallel workers have all slots');
publish('slot', 'x');
ok($node->wait_for_log(qr/no background worker slot is free for the idempotency relay/, $log_from), 'the log says that there is no slot');
is($node->safe_psql('postgres', q{SELECT pg_sleep(1), count(*) FROM done}), '|0', 'the event waits');
$lock->query_safe('SELECT pg_advisory_unlock(11)');
comes(q{SELECT count(*) = 1 FROM done}, 'it comes when there is one');
$log = log_since();
is(scalar(() = $log =~ /no background worker slot is free for the idempotency relay/g), 1, 'it was said once');
$query->quit;
$lock->quit;
idle();
$node->safe_psql('postgres', 'DELETE FROM done');

# ----------------------------------------------------------------
# Databases
# ----------------------------------------------------------------

# The settings choose.
reload('idempotency.databases' => 'second');
publish('databases', 'x');
publish('t2', 'chosen', dbname => 'second');
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'chosen'}, 'a database that is chosen', 'second');
is($node->safe_psql('postgres', 'SELECT pg_sleep(1), count(*) FROM done'), '|0', 'another one is not served');
reload('idempotency.databases' => '');
comes(q{SELECT count(*) = 1 FROM done}, 'all are, again');
idle();

# DROP DATABASE, and its copy, in the middle of endless work.
my $endless = q{
	SELECT idempotency.subscribe('endless', ARRAY['endless'], 'handle(idempotency.event)');
	SELECT count(idempotency.publish('endless', '{"do": "nap 0.01"}')) FROM generate_series(1, 20000)};
as_app($endless, 'second');
comes(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work', 'second');
is(($node->psql('postgres', 'CREATE DATABASE copy TEMPLATE second'))[2], '', 'CREATE DATABASE copies a database in the middle of the work');
comes(q{SELECT count(*) > (SELECT count(*) FROM idempotency.outbox) - 20100 AND EXISTS (SELECT FROM done WHERE topic = 'endless' AND at > pg_postmaster_start_time())
	FROM done WHERE topic = 'endless'}, 'the copy is served as well', 'copy');
is($node->safe_psql('copy', q{SELECT count(*) - count(DISTINCT seq) FROM done WHERE topic = 'endless'}), '0', 'once each');
foreach my $database ('second', 'copy')
{
	comes(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, "$database is at work", $database);
	is(($node->psql('postgres', "DROP DATABASE $database"))[2], '', "DROP DATABASE in the middle of the work");
}
is_quiet('databases', qr/exited with exit code 1|terminating background worker|database .* does not exist/);

# DROP EXTENSION, too.
$node->safe_psql('postgres', 'DELETE FROM done');
as_app(q{SELECT idempotency.unsubscribe('all')});
as_app($endless);
comes(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work');
# (it waits for the batch, and handlers depend on it)
is(($node->psql('postgres', 'DROP EXTENSION idempotency CASCADE'))[2] =~ s/^.*NOTICE:.*\n?(?:DETAIL:.*\n?(?:drop cascades.*\n?)*)?//mr, '', 'DROP EXTENSION in the middle of the work');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die 'workers stay';
is_quiet('DROP EXTENSION');
$node->safe_psql('postgres', q{DROP TABLE done, parent, child, single, flag, committed; CREATE EXTENSION idempotency;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app')});
as_app($schema);
as_app($subscribe);
publish('anew', 'x');
comes(q{SELECT count(*) = 1 FROM done}, 'a new one is served');
is_quiet('CREATE EXTENSION');

# A restore: the events that were not passed, and those to come.
idle();
reload('idempotency.relay_workers' => 0);
publish('restored', [ 'one', 'two' ]);
$node->command_ok([ 'pg_dump', '--file', "$dir/dump", 'postgres' ], 'dump');
$node->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
reload('idempotency.relay_workers' => 2);
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'restored'}, 'the original goes on');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", 'restored' ], 'restore');
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'restored'}, 'the restored database is served', 'restored');
publish('restored', 'three', dbname => 'restored');
comes(q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two three' FROM done WHERE topic = 'restored'}, 'it goes on there', 'restored');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'restored'}), '2', 'and not here');
$node->safe_psql('postgres', 'DROP DATABASE restored');
$node->safe_psql('postgres', 'DELETE FROM done');
is_quiet('restore', qr/exited with exit code 1|terminating background worker/);

# ----------------------------------------------------------------
# Memory
# ----------------------------------------------------------------

idle();
as_app(q{SELECT count(idempotency.publish('memory', json_build_object('do', CASE WHEN i % 10000 = 0 THEN 'memory' WHEN i % 100 = 50 THEN 'once' ELSE 'x' END), 'M' || i))
	FROM generate_series(1, 60000) AS i});
comes(q{SELECT count(*) = 60000 FROM done}, 'many events');
my @memory = split /\n/, $node->safe_psql('postgres', q{SELECT note::bigint / 1024 FROM done WHERE note IS NOT NULL ORDER BY seq});
cmp_ok($memory[-1] - $memory[0], '<', 500, "a worker that has handled many needs no more memory: @memory kB");
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'once each');
$node->safe_psql('postgres', 'DELETE FROM done');

# ----------------------------------------------------------------
# Stops and crashes
# ----------------------------------------------------------------

# stops stops the server in the middle of a handler, and starts it again.
sub stops
{
	my ($mode, $attempt) = @_;
	idle();
	$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
	publish('stop', [ (map { "before $_" } 1 .. 5), 'await', (map { "after $_" } 1 .. 5) ]);
	publish('stop', 'alone', aggregate => 'A');
	pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
	log_since();
	my $at = time;
	$node->stop($mode);
	cmp_ok(time - $at, '<', 20, "$mode stop in the middle of a handler");
	unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'quietly') unless $mode eq 'immediate';
	$node->start;
	is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'stop'}), '0', 'what was not committed did not happen') if $mode ne 'immediate';
	$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
	comes(q{SELECT count(*) = 12 FROM done WHERE topic = 'stop'}, 'all have their turn after the restart');
	is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'stop'}), "12|12|$attempt", 'once each');
}
stops('fast', 1);
stops('smart', 1);
stops('immediate', 1);

# One event alone: a stop is not its fault, a crash may be.
foreach my $case ([ 'fast', 1 ], [ 'immediate', 2 ])
{
	my ($mode, $attempt) = @$case;
	idle();
	$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
	publish('alone', 'await');
	pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
	$node->stop($mode);
	$node->start;
	$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
	comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone'}, "an event alone is handled after a stop: $mode");
	is($node->safe_psql('postgres', q{SELECT attempt FROM done WHERE topic = 'alone'}), $attempt, "at attempt $attempt");
}

# kill -9 of a worker: all restart, and the registry begins anew.
idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
publish('crash', [ (map { "before $_" } 1 .. 20), 'await', (map { "after $_" } 1 .. 50) ]);
$pid = pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep'});
ok(kill(9, $pid), 'kill -9 of a worker');
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die 'the server does not come back';
comes(q{SELECT count(*) = 20 FROM done WHERE what LIKE 'before %'}, 'the server comes back, and with it the relay');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
comes(q{SELECT count(*) = 71 FROM done WHERE topic = 'crash'}, 'all have their turn');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'crash'}), '71|1', 'once each');

# At rest a stop is at once.
foreach my $mode ('fast', 'smart')
{
	publish('rest', 'x');
	comes(q{SELECT count(*) > 0 FROM done WHERE topic = 'rest'}, 'a worker that rests');
	log_since();
	$began = time;
	$node->stop($mode);
	cmp_ok(time - $began, '<', 10, "$mode stop");
	unlike(log_since(), qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'quietly');
	$node->start;
}

# ----------------------------------------------------------------
# A standby
# ----------------------------------------------------------------

idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
$node->backup('base');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($node, 'base', has_streaming => 1);
$standby->start;
reload('idempotency.relay_workers' => 0);
publish('promoted', [ 'one', 'two' ]);
$node->wait_for_catchup($standby);
is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'}), '0', 'there is no relay on a standby');
$node->stop('immediate');
$standby->promote;
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two' FROM done}), 'promoted, it serves what was left');
$standby->safe_psql('postgres', q{SELECT idempotency.publish('promoted', '{"do": "three"}')}, extra_params => [ '--username', 'app' ]);
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two three' FROM done}), 'and what comes');
$standby->stop;

done_testing();
