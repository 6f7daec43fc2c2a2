# 020_relay.pl
#
# Proves that relay workers deliver every event to its handler in order. A handler's
# writes happen once despite errors, sleeps, session settings, claims, other roles, and
# the end of its session. No subscription waits for the handler of another one; workers
# start within seconds and exit when idle. 040_relay_trouble.pl tests disturbances from
# outside.
#
# The script takes more than 15 seconds, because handlers sleep, exceed their time limit
# and fail until the relay retries after seconds.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Utils;
use RelayTest;
use Test::More;
use Time::HiRes qw(time usleep);

my $node = relay_node();

# ----------------------------------------------------------------
# Processes in pg_stat_activity
# ----------------------------------------------------------------

publish('a', 'nap 1');
becomes_true(q{SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idempotency relay' AND datname = 'postgres' AND usename = 'app'
	AND application_name = 'idempotency relay' AND query = 'serving subscription "all"'}, 'a worker runs as the owner and shows its subscription');
becomes_true(q{SELECT count(*) = 1 FROM done}, 'the handler gets the event');
my $event = $node->pg_version >= 17 ? 'IdempotencyLauncherMain' : 'Extension';
is($node->safe_psql('postgres', q{SELECT datname, application_name, wait_event_type, wait_event FROM pg_stat_activity
		WHERE backend_type = 'idempotency launcher'}), "|idempotency launcher|Extension|$event",
	'the launcher has no database, waits, and shows its wait event');
idle();
pass('the worker exits');
is_quiet('processes');

# ----------------------------------------------------------------
# Order, exactly once
# ----------------------------------------------------------------

# From several concurrent sessions, with rollbacks of all kinds.
my $dir = PostgreSQL::Test::Utils::tempdir;
$node->safe_psql('postgres', q{CREATE TABLE committed (id uuid); GRANT ALL ON committed TO app});
append_to_file("$dir/publish.sql", <<'SQL');
\set kind random(1, 10)
\set nap random(0, 3000)
BEGIN;
INSERT INTO committed SELECT idempotency.publish('load', '{"do": "x"}', 'A' || :client_id) FROM generate_series(1, 5);
SAVEPOINT s;
INSERT INTO committed SELECT idempotency.publish('load', '{"do": "x"}') FROM generate_series(1, 3);
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
$node->command_ok([ $node->installed_command('pgbench'), '-n', '-c', '6', '-t', soak(40, 80), '--username', 'app', '-f', "$dir/publish.sql", $node->connstr('postgres') ],
	'concurrent publishers');
becomes_true(q{SELECT (SELECT count(*) FROM done WHERE topic = 'load') >= (SELECT count(*) FROM committed)}, 'the relay keeps up');
is($node->safe_psql('postgres', q{SELECT count(*) > 1000, count(*) FILTER (WHERE c.id IS NULL), count(*) FILTER (WHERE d.id IS NULL),
		count(*) - count(DISTINCT id) FROM committed AS c FULL JOIN (SELECT * FROM done WHERE topic = 'load') AS d USING (id)}), 't|0|0|0',
	'every committed event had its effect once, and no other event had one');
is($node->safe_psql('postgres', q{SELECT count(*) FROM (SELECT d.seq, o.txid, o.aggregateid,
		max(d.seq) OVER (PARTITION BY o.txid ORDER BY n) AS in_transaction, max(d.seq) OVER (PARTITION BY o.aggregateid ORDER BY n) AS in_aggregate
		FROM done AS d JOIN idempotency.outbox AS o USING (seq) WHERE topic = 'load') AS o
		WHERE seq < in_transaction OR (aggregateid IS NOT NULL AND seq < in_aggregate)}), '0',
	'the events of a transaction and of an aggregate are in order');
is_quiet('concurrent publishers');

# An open transaction delays no other event, and its own events are not lost.
my $session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{BEGIN; SELECT idempotency.publish('late', '{"do": "late"}')});
publish('late', 'early');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'late'}, 'other events do not wait for an open transaction');
idle();
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'late'}, 'events of an open transaction are delivered after its commit');

# COMMIT PREPARED wakes no worker; a survey finds the events, here that of a new launcher.
as_app(q{BEGIN; SELECT idempotency.publish('prepared', '{"do": "prepared"}'); PREPARE TRANSACTION 'p'});
publish('prepared', 'early');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'prepared'}, 'other events do not wait for a prepared transaction');
idle();
as_app(q{COMMIT PREPARED 'p'});
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency launcher'});
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'prepared'}, 'events of a prepared transaction are delivered after its commit');

# A batch is acknowledged in parts. The writes of the first event are committed and
# unlocked while a later event runs. No event counts as an additional attempt, and the
# order is kept.
publish('parts', [ 'nap 0.3', 'await', 'two', 'three' ], aggregate => 'A');
waits_in_handler();
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'parts'}, 'handled events are committed while a later event runs');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 4 FROM done WHERE topic = 'parts'}, 'the remaining events of the batch are delivered');
is(done(q{topic = 'parts' AND attempt = 1}), 'nap 0.3 await two three', 'the batch is handled in order, at the first attempt');
publish('parts 2', [ 'nap 0.3', 'once', 'nap 0.3', 'two', 'once', 'nap 0.3', 'three' ], aggregate => 'A');
becomes_true(q{SELECT count(*) = 7 FROM done WHERE topic = 'parts 2'}, 'a batch with errors is delivered');
is(done(q{topic = 'parts 2'}), 'nap 0.3 once nap 0.3 two once nap 0.3 three', 'a batch with errors is handled in order');
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'each event is handled once');
$node->safe_psql('postgres', 'DELETE FROM flag');

# A rollback wakes no worker.
idle();
as_app(q{BEGIN; SELECT idempotency.publish('never', '{"do": "never"}'); ROLLBACK});

# ----------------------------------------------------------------
# Latency
# ----------------------------------------------------------------

# Each time no worker runs. The launcher's periodic check, every ten seconds, would also
# find the event: an event that wakes the launcher must be delivered sooner.
foreach my $i (1 .. 20)
{
	idle();
	publish('idle', $i);
}
becomes_true(q{SELECT count(*) = 20 FROM done WHERE topic = 'idle'}, 'events are delivered when no worker runs');
cmp_ok($node->safe_psql('postgres', q{SELECT max(extract(epoch FROM lag)) FROM done WHERE topic = 'idle'}), '<', 4, 'a worker starts within seconds');

# A commit wakes the subscriptions whose patterns might match its events, whatever the
# patterns look like, and no other. A subscription that is woken without a matching
# event moves its position past the event.
my @patterns = ([ 'exact', 'exact' ], [ 'to.the.dot.*', 'to.the.dot.x' ], [ 'to.another.*', 'to.another.' ], [ 'to/a/*', 'to/a/slash' ], [ 'in.the.mid*', 'in.the.middle' ],
	[ 'nodot*', 'nodots' ], [ '*.end', 'at.the.end' ], [ 'both.*.ends', 'both.of.the.ends' ], [ 'escaped\\\\*', 'escaped*' ], [ 'escaped.\\\\**', 'escaped.*.x' ],
	[ '\\\\e\\\\x\\\\a.\\\\ct', 'exa.ct' ], [ 'Žluťoučký.*', 'Žluťoučký.kůň' ], [ 'never", "second.*', 'second.x' ], [ 'x.y', 'x.y' ]);
as_app("SELECT idempotency.subscribe('p$_', '{\"$patterns[$_][0]\"}', 'handle(idempotency.event)')") foreach 0 .. $#patterns;
as_app(q{SELECT idempotency.unsubscribe('all')});
idle();
foreach my $i (0 .. $#patterns)
{
	my ($pattern, $topic) = @{ $patterns[$i] };
	publish($topic, "pattern $i");
	becomes_true(qq{SELECT count(*) = 1 FROM done WHERE what = 'pattern $i'}, "$topic wakes a subscription to $pattern");
	idle();
}
is($node->safe_psql('postgres', q{SELECT max(lag) < '4 s' FROM done WHERE what LIKE 'pattern %'}), 't', 'each of them is woken within seconds');
# A changed topic list applies to the next event.
as_app(q{SELECT idempotency.alter_subscription('p13', topics => '{changed.*}')});
idle();
publish('changed.x', 'changed');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE what = 'changed'}, 'a changed topic list applies to the next event');

# Workers start only for patterns that can match: '*.end' and 'nodot*' can match all.
idle();
change_settings($node, 'log_min_messages' => 'debug1');
my $starts = sub { scalar(() = slurp_file($node->logfile, $_[0]) =~ /starting background worker process "idempotency relay for database/g) };
my $from = -s $node->logfile;
publish('exact', 'first');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE what = 'first'}, 'an event of a topic');
idle();
cmp_ok($starts->($from), '<', 8, 'an event wakes no subscription to other topics');
as_app("SELECT idempotency.unsubscribe('p$_')") foreach 0 .. $#patterns;
as_app($subscribe);

# While a table is locked, workers start at increasing intervals.
idle();
$session = open_session($node);
$session->query_safe('BEGIN; LOCK TABLE idempotency.position IN ACCESS EXCLUSIVE MODE');
($from, my $at) = (-s $node->logfile, time);
publish('held', 'held');
usleep(10_000) until $starts->($from) >= 7 || time - $at > $PostgreSQL::Test::Utils::timeout_default;
cmp_ok(time - $at, '>=', 6, 'workers for a locked table start at increasing intervals');
$session->query_safe('ROLLBACK');
$session->quit;
becomes_true(q{SELECT count(*) = 1 FROM done WHERE what = 'held'}, 'the subscription is served once the table is not locked');
change_settings($node, 'log_min_messages' => 'warning');

# A retry is on time, although no event is published and no worker is connected.
publish('retry', 'once');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'retry'}, 'a retry needs no other event');
is($node->safe_psql('postgres', q{SELECT attempt, lag BETWEEN '50 ms' AND '4 s' FROM done WHERE topic = 'retry'}), '2|t', 'the retry is on time');
as_app(q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '3 s', max_attempts => 3)});
publish('retry 2', 'once');
becomes_true(q{SELECT count(*) = 1 FROM idempotency.parked}, 'a later retry is parked');
idle();
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'retry 2'}, 'the later retry is delivered');
is($node->safe_psql('postgres', q{SELECT attempt, lag BETWEEN '1500 ms' AND '6 s' FROM done WHERE topic = 'retry 2'}), '2|t', 'the later retry is on time');
as_app($subscribe);

# ----------------------------------------------------------------
# Errors
# ----------------------------------------------------------------

publish('errors', [ 'one', 'fail', 'two', 'once', 'three' ]);
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'errors'}, 'an event that always fails becomes a dead letter');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'an event that fails once does not become a dead letter');
is(done(q{topic = 'errors'}), 'one two three once', 'failed events leave nothing behind, and the others are handled');
is($node->safe_psql('postgres', q{SELECT error, attempts, last_failed_at - first_failed_at BETWEEN '100 ms' AND '20 s' FROM idempotency.dead_letters}),
	"P0042: no: fail\nDETAIL:  in detail|3|t", 'the dead letter has the error, the attempts, and the time');
is($node->safe_psql('postgres', q{SELECT last_error FROM idempotency.subscriptions}), "P0042: no: fail\nDETAIL:  in detail", 'the subscription shows the error');
like(log_since(), qr/LOG:  event \S+ of subscription "all" is a dead letter now\n\S.*DETAIL:  P0042: no: fail/, 'the log has the dead letter');

# The event that failed is reported, not the one before it that has the same id. What is behind an event that
# leaves the batch with it leaves the batch, too.
as_app(q{SELECT count(idempotency.publish('twins', json_build_object('do', what), aggregate, event_id => lpad(id, 32, '0')::uuid))
	FROM (VALUES ('one', '1', NULL), ('once', '1', 'A'), ('two', '1', 'B'), ('three', '2', 'B')) AS e (what, id, aggregate)});
becomes_true(q{SELECT count(DISTINCT what) = 4 FROM done WHERE topic = 'twins'}, 'events with the same id are delivered');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'events with the same id fail together, and are retried');
is(join(' ', sort split / /, done(q{topic = 'twins'})), 'once one three two', 'events with the same id are handled once each, the failed ones in any order');
is(done(q{topic = 'twins' AND what IN ('two', 'three')}), 'two three', 'an aggregate with one of them is in order');

# A redriven event is delivered again at once.
idle();
is(as_app(q{SELECT idempotency.redrive('all')}), '1', 'redrive');
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'errors' AND attempts = 3 AND last_failed_at > clock_timestamp() - interval '10 s'},
	'redrive wakes a worker, and the event fails again');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');

# Within an aggregate, later events wait for a failed event until it is a dead letter.
as_app(q{SELECT count(idempotency.publish('order', json_build_object('do', what), aggregate)) FROM (VALUES ('one', 'A'), ('fail', 'A'), ('two', 'A'),
	('three', 'A'), ('four', 'B'), ('five', 'B'), ('six', 'A')) AS e (what, aggregate)});
becomes_true(q{SELECT count(*) = 6 FROM done WHERE topic = 'order'}, 'the aggregate continues without the dead letter');
is(done(q{topic = 'order' AND what IN ('one', 'two', 'three', 'six')}), 'one two three six', 'the aggregate is in order');
is($node->safe_psql('postgres', q{SELECT bool_and(n > (SELECT n FROM done WHERE what = 'five')) FROM done WHERE topic = 'order' AND what IN ('two', 'three', 'six')}),
	't', 'other aggregates did not wait');
publish('order 2', [ 'one', 'once', 'two' ], aggregate => 'A');
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'order 2'}, 'the aggregate continues after a retry');
is(done(q{topic = 'order 2'}), 'one once two', 'the aggregate is in order after a retry');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');
log_since();

# ----------------------------------------------------------------
# Actions of handlers
# ----------------------------------------------------------------

# All in one batch.
my @does = ('execute SET ROLE friend', 'execute SET ROLE boss', 'execute SET SESSION AUTHORIZATION boss', 'execute RESET ROLE',
	'execute SET LOCAL ROLE boss', 'execute RESET SESSION AUTHORIZATION', 'execute LISTEN nobody', 'commit', 'claim', 'orphan 1', 'execute SELECT 1/0');
publish('does', [ map { ($_, 'show') } 'set', 'temporary', 'temporary', 'complete', 'publish', 'family 2', 'family 3', 'twice', 'twice', @does,
		('execute PREPARE p AS SELECT 1') x 2, ('execute DECLARE c CURSOR WITH HOLD FOR SELECT 1') x 2 ]);
becomes_true(q{SELECT count(*) = 24 FROM done WHERE topic = 'does' AND what = 'show'}, 'misbehaving handlers do not block other events');
my $plain = '4MB "$user", public ISO, MDY app app off read committed no claim';
is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT note, ', ') FROM done WHERE topic = 'does' AND what = 'show'}), $plain,
	'no session state reaches the next event');
is($node->safe_psql('postgres', q{SELECT max(attempt), count(*) FILTER (WHERE what LIKE 'execute%') FROM done WHERE topic = 'does'}), '1|4',
	'all other events succeed at the first attempt');
becomes_true(q{SELECT count(*) = 11 FROM idempotency.dead_letters WHERE topic = 'does'}, 'forbidden actions fail');
is($node->safe_psql('postgres', q{SELECT string_agg(substr(error, 1, 5), ' ' ORDER BY seq) FROM idempotency.dead_letters WHERE topic = 'does'}),
	'42501 42501 42501 42501 42501 42501 0A000 2D000 IK428 23503 22012', 'each forbidden action has its own error');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'does' AND what = 'temporary'}), '2', 'a temporary table is dropped after its event');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'again'}), '1', 'a handler can publish');
is($node->safe_psql('postgres', q{SELECT count(*), (SELECT string_agg(note || ' ' || attempt, ', ') FROM done WHERE what = 'twice') FROM child}), '2|at once 1, at once 1',
	'a constraint is deferred, or not, as it was declared');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE scope IN ('complete', 'open')}), '1', 'only completed claims are stored');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'no event is left to retry');
idle();
publish('left', [ 'execute PREPARE p AS SELECT 1', 'execute DECLARE c CURSOR WITH HOLD FOR SELECT 1', 'execute DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$',
		(map { 'x' } 1 .. 110), 'left' ]);
becomes_true(q{SELECT note = '0 0 0' FROM done WHERE topic = 'left' AND what = 'left'}, 'no other session state is left after the batch');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# Actions that are deferred to the end of the transaction: a WITH HOLD cursor, and
# deferred triggers. They run at the end of the event, as they would at a commit, and
# cannot become another role there. SET CONSTRAINTS, whose effect would reach other
# events, is refused.
as_app(q{
	CREATE FUNCTION become() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO public.done (topic, what) VALUES ('later', current_user);
		SET work_mem = '55MB';
		SET ROLE boss;
		RETURN 1;
	END $$;
	CREATE TABLE deferred (id int, left_over int);
	CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.left_over > 0 THEN
			INSERT INTO public.deferred VALUES (NEW.id, NEW.left_over - 1);
		ELSIF NEW.id = 0 THEN
			PERFORM public.become();
		ELSE
			INSERT INTO public.child VALUES (NEW.id);
			INSERT INTO public.parent VALUES (NEW.id);
		END IF;
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER later AFTER INSERT ON deferred DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION later()});
publish('later', [ 'execute DECLARE c CURSOR WITH HOLD FOR SELECT public.become()', 'execute INSERT INTO public.deferred VALUES (0, 2)', 'show',
		'execute INSERT INTO public.deferred VALUES (5, 2)', 'execute SET CONSTRAINTS ALL DEFERRED', 'twice', 'execute SET CONSTRAINTS ALL IMMEDIATE', 'family 6',
		(map { 'x' } 1 .. 60), 'show' ]);
becomes_true(q{SELECT count(*) = 3 FROM idempotency.dead_letters WHERE topic = 'later'}, 'a deferred action cannot become another role');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'all other events are handled');
is($node->safe_psql('postgres', q{SELECT substr(error, 1, 5), payload ->> 'do' FROM idempotency.dead_letters WHERE seq = (SELECT min(seq) FROM idempotency.dead_letters)}),
	'42501|execute INSERT INTO public.deferred VALUES (0, 2)', 'the deferred error is the error of its event');
is($node->safe_psql('postgres', q{SELECT count(*), min(error) FROM idempotency.dead_letters WHERE payload ->> 'do' LIKE '%SET CONSTRAINTS%'}),
	'2|0A000: SET CONSTRAINTS is not supported in the handler of a subscription', 'SET CONSTRAINTS is refused');
is($node->safe_psql('postgres', q{SELECT string_agg(note, ', ') FROM done WHERE what = 'show'}), "$plain, $plain", 'deferred actions do not affect another event');
is($node->safe_psql('postgres', q{SELECT max(attempt), string_agg(note, ', ') FILTER (WHERE what = 'twice'), count(*) FILTER (WHERE topic = 'later' AND what = 'app') FROM done}),
	'1|at once|0', 'a constraint is deferred as it was declared, and a cursor is closed');
is($node->safe_psql('postgres', q{SELECT string_agg(id::text, ' ' ORDER BY id) FROM child WHERE id > 4}), '5 6', 'a deferred trigger can queue another one');
as_app('DROP TABLE deferred');
log_since();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# A deferred action fails at the end of its event, so that the other events of the batch
# are not called again. The sequence of the rows counts the calls of the handler, rolled
# back or not.
my $called = $node->safe_psql('postgres', 'SELECT last_value FROM done_n_seq');
publish('alone', [ 'show', 'orphan 1', 'claim', 'show' ]);
becomes_true(q{SELECT count(*) = 2 FROM idempotency.dead_letters WHERE topic = 'alone'}, 'a deferred error fails its event');
is($node->safe_psql('postgres', "SELECT last_value - $called FROM done_n_seq"), 2 * 3 + 2, 'a deferred error repeats no other event');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# The settings of the owner and of the database apply, except those that delivery relies
# on.
$node->safe_psql('postgres', q{ALTER ROLE app SET work_mem = '7MB'; ALTER ROLE app SET role = 'friend';
	ALTER ROLE app SET default_transaction_isolation = 'serializable'; ALTER ROLE app SET default_transaction_read_only = on;
	ALTER DATABASE postgres SET DateStyle = 'German'; ALTER ROLE app SET statement_timeout = '1ms'; ALTER ROLE app SET synchronous_commit = off});
idle();
{
	local $ENV{PGOPTIONS} = '-c default_transaction_read_only=off -c default_transaction_isolation=read\ committed -c statement_timeout=0 -c role=none';
	publish('settings', [ 'nap 0.1', 'show' ]);
}
becomes_true(q{SELECT note = '7MB "$user", public German, DMY app app off read committed no claim' FROM done WHERE what = 'show'}, 'the settings of the owner and of the database apply');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL; ALTER DATABASE postgres RESET ALL});
idle();
$node->safe_psql('postgres', 'DELETE FROM done');

# A lost claim makes the transaction fail at commit; the other events of the batch are
# then delivered one by one.
publish('lost claim', [ (map { "before $_" } 1 .. 10), 'lost', 'caught', (map { "after $_" } 1 .. 10) ]);
becomes_true(q{SELECT count(*) = 20 FROM done WHERE topic = 'lost claim'}, 'a lost claim fails no other event');
becomes_true(q{SELECT count(*) = 2 FROM idempotency.dead_letters WHERE topic = 'lost claim'}, 'a lost claim fails its own event');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'lost claim'}), '20|20|1', 'each other event is handled once, at its first attempt');
is($node->safe_psql('postgres', q{SELECT string_agg(substr(error, 1, 23) || ' ' || attempts, ', ' ORDER BY seq) FROM idempotency.dead_letters WHERE topic = 'lost claim'}),
	'IK412: this transaction 3, IK412: cannot commit af 3', 'a lost claim has its own error');

# Behind an event that has left the batch, too.
as_app(q{SELECT count(idempotency.publish('lost behind', json_build_object('do', what), aggregate)) FROM (VALUES ('once', 'A'), ('two', 'A'), ('lost', 'B'), ('three', 'C')) AS e (what, aggregate)});
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'lost behind'}, 'a lost claim behind an event that failed fails no other event');
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'lost behind'}, 'a lost claim behind an event that failed fails its own event');
as_app($subscribe); # a survey, after which the log has some again, comes at once
log_comes(qr/dead letters? now/, 'the log has the dead letter, or counts it');
log_since();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# ----------------------------------------------------------------
# Handlers that hang, and handlers that terminate their worker
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{ALTER ROLE app SET idempotency.handler_timeout = '200ms'});
idle();
as_app(q{SELECT idempotency.subscribe('all', ARRAY['*'], 'handle(idempotency.event)', retry_delay => '100 ms', max_attempts => 2)});
publish('slow', [ 'one', 'sleep', 'two' ]);
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'slow'}, 'a handler that never ends is cancelled');
is(done(q{topic = 'slow'}), 'one two', 'other handlers are not cancelled');
is($node->safe_psql('postgres', q{SELECT error, attempts FROM idempotency.dead_letters}), '57014: canceling statement due to statement timeout|2', 'the dead letter has the timeout error');
like(fails_with_app(q{SET idempotency.handler_timeout = 0}), qr/permission denied/, 'the owner cannot change handler_timeout');
log_since();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# A handler that ignores a cancel is terminated with its worker.
publish('deaf', [ 'one', 'deaf', 'two' ]);
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'deaf'}, 'a handler that ignores a cancel is terminated with its worker');
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'deaf'}, 'the other events are handled');
is($node->safe_psql('postgres', q{SELECT error, attempts FROM idempotency.dead_letters}), 'the worker ended while it handled this event|3', 'the dead letter has the error of a terminated worker');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq) FROM done WHERE topic = 'deaf'}), '2|2', 'each other event is handled once');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL; DELETE FROM idempotency.parked; DELETE FROM done});
as_app($subscribe);
log_since();

# A handler that terminates its worker, among many other events.
$node->safe_psql('postgres', q{ALTER ROLE app SET idempotency.handler_timeout = '1s'});
idle();
publish('poison', [ (map { "before $_" } 1 .. 30), 'deaf', (map { "after $_" } 1 .. 100) ]);
becomes_true(q{SELECT count(*) = 130 FROM done WHERE topic = 'poison'}, 'a handler that terminates its worker does not block other events');
becomes_true(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'poison'}, 'its event becomes a dead letter');
is($node->safe_psql('postgres', q{SELECT error, attempts, payload ->> 'do' FROM idempotency.dead_letters}), 'the worker ended while it handled this event|3|deaf',
	'after the normal number of attempts');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq), count(*) FILTER (WHERE what LIKE 'deaf') FROM done WHERE topic = 'poison'}), '130|130|0',
	'its writes are rolled back, and the other events had their effects once');
my $log = log_since();
is(scalar(() = $log =~ /terminating background worker/g), 3, 'the handler terminates three workers: twice in a batch, then alone');
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'terminated workers log no warning or error');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL});
as_app($subscribe);
idle();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# The log gets a few of many dead letters, the beginning of a long error, and the number of
# the others.
as_app(q{CREATE FUNCTION flood(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '%', repeat('é', 20000); END $$;
	SELECT idempotency.subscribe('flood', ARRAY['flood'], 'flood(idempotency.event)', max_attempts => 1);
	SELECT count(idempotency.publish('flood', '{}')) FROM generate_series(1, 500)});
becomes_true(q{SELECT count(*) = 500 FROM idempotency.dead_letters WHERE subscription = 'flood'}, 'all events are dead letters');
is($node->safe_psql('postgres', q{SELECT max(octet_length(error)) BETWEEN 8000 AND 8192 FROM idempotency.dead_letters}), 't', 'a part of a long error is kept');
idle();
as_app(q{SELECT idempotency.alter_subscription('flood', max_attempts => 2)}); # the survey, which counts them, comes at once
log_comes(qr/LOG:  \d+ more events of subscription "flood" are dead letters now/, 'the log has the number of the dead letters that it does not have');
my ($flood, $counted) = ('', 0);
for (my $looks = 0; $counted < 500 && $looks < 10 * $PostgreSQL::Test::Utils::timeout_default; $looks++)
{
	usleep(100_000) if $looks;
	$flood .= log_since();
	$counted = () = $flood =~ /LOG:  event \S+ of subscription "flood" is a dead letter now/g;
	$counted += $1 while $flood =~ /LOG:  (\d+) more events of subscription "flood"/g;
}
is($counted, 500, 'the log counts every dead letter');
cmp_ok(length $flood, '<', 100_000, 'many dead letters do not flood the log');
as_app(q{SELECT idempotency.unsubscribe('flood'); DROP FUNCTION flood});

# A crash of the server that the handler has not caused buries no event, even at its only
# attempt: the batch has failed, not the event.
as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r);
publish('crash', 'await');
waits_in_handler();
$node->stop('immediate');
$node->start;
waits_in_handler();
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'a crash of the server buries no event');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT attempt = 2 FROM done WHERE topic = 'crash'}, 'the event is handled after the crash');
as_app($subscribe);
$node->safe_psql('postgres', 'DELETE FROM done; DELETE FROM flag');
log_since();

# Another session terminates a worker, busy and idle, and cancels a handler.
publish('ended', [ 'one', 'await', 'two' ]);
my $pid = waits_in_handler();
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die;
$pid = waits_in_handler();
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked WHERE attempts > 0}), '0', 'another worker takes over from a terminated worker, and no event has failed');
$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
becomes_true(q{SELECT count(*) = 1 FROM idempotency.parked WHERE error LIKE '57014: canceling statement due to user request%'}, 'a cancelled handler has failed');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'ended'}, 'all events are handled');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'ended'}), '3|2', 'all events are handled once');
publish('rest', 'one');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'rest'}, 'a worker becomes idle');
$node->safe_psql('postgres', q{SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
publish('rest', 'two');
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'rest'}, 'an idle worker ignores a cancel');
$node->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
publish('rest', 'three');
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'rest'}, 'events are delivered after an idle worker is terminated');
$log = log_since();
unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'a terminated idle worker logs no warning or error');
$pid = worker_pid($node, 'idempotency launcher');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die;
publish('rest', 'four');
becomes_true(q{SELECT count(*) = 4 FROM done WHERE topic = 'rest'}, 'the terminated launcher is restarted');
unlike(log_since(), qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'a terminated launcher logs no warning or error');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done; DELETE FROM flag');

# ----------------------------------------------------------------
# Memory
# ----------------------------------------------------------------

idle();
as_app(q{SELECT count(idempotency.publish('memory', json_build_object('do', CASE WHEN i % 2000 = 0 THEN 'memory' WHEN i % 100 = 50 THEN 'once' ELSE 'x' END), 'M' || i))
	FROM generate_series(1, 10000) AS i});
becomes_true(q{SELECT count(*) = 10000 FROM done}, 'many events are handled');
my @memory = split /\n/, $node->safe_psql('postgres', q{SELECT note::bigint / 1024 FROM done WHERE note IS NOT NULL ORDER BY seq});
# Retries, which come late, need plans of a megabyte.
cmp_ok($memory[-1] - $memory[0], '<', 3000, "the memory of a worker does not grow with the number of events: @memory kB");
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'each of many events is handled once');
$node->safe_psql('postgres', 'DELETE FROM done');

done_testing();
