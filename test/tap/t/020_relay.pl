# 020_relay.pl
#
# Proves that relay workers give every event to its handler, in order, and that
# what a handler writes happens once, whatever it does: errors, sleep, session
# settings, claims, other roles, the end of its session.  That nobody waits for
# anybody else's handler, and that workers are there within moments and leave again.
# What happens around them is for 040_relay_trouble.pl.

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
# Who is who
# ----------------------------------------------------------------

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

# A batch is acknowledged in parts: what the first event has written is committed, and locked
# no longer, while a later one is at work.  None counts as an attempt, and the order stays.
publish('parts', [ 'nap 0.3', 'await', 'two', 'three' ], aggregate => 'A');
waits_in_handler();
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'parts'}, 'what was handled is committed while a later event is at work');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
comes(q{SELECT count(*) = 4 FROM done WHERE topic = 'parts'}, 'the rest comes');
is(done(q{topic = 'parts' AND attempt = 1}), 'nap 0.3 await two three', 'in order, at the first attempt');
publish('parts 2', [ 'nap 0.3', 'once', 'nap 0.3', 'two', 'once', 'nap 0.3', 'three' ], aggregate => 'A');
comes(q{SELECT count(*) = 7 FROM done WHERE topic = 'parts 2'}, 'beside errors, too');
is(done(q{topic = 'parts 2'}), 'nap 0.3 once nap 0.3 two once nap 0.3 three', 'in order');
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'once');
$node->safe_psql('postgres', 'DELETE FROM flag');

# A rollback wakes nobody.
idle();
as_app(q{BEGIN; SELECT idempotency.publish('never', '{"do": "never"}'); ROLLBACK});

# ----------------------------------------------------------------
# In time
# ----------------------------------------------------------------

# Each time there is no worker, and nobody else looks.
my $reaper_launcher = pid_of('idempotency launcher');
kill 'STOP', $reaper_launcher;
foreach my $i (1 .. 20)
{
	idle();
	publish('idle', $i);
}
comes(q{SELECT count(*) = 20 FROM done WHERE topic = 'idle'}, 'events that find nobody at work');
cmp_ok($node->safe_psql('postgres', q{SELECT max(extract(epoch FROM lag)) FROM done WHERE topic = 'idle'}), '<', 4, 'fetch their worker, in moments');

# A commit wakes those subscriptions that may want what it has published, whatever their
# patterns look like, and no other.  Those that are woken and find nothing for them pass
# the event.
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
	comes(qq{SELECT count(*) = 1 FROM done WHERE what = 'pattern $i'}, "$topic wakes a subscription to $pattern");
	idle();
}
# Which subscriptions have come to the last event.
my $passed = q{SELECT string_agg(subscription, ' ') FILTER (WHERE passed >= (SELECT max(seq) FROM idempotency.outbox)) FROM
	(SELECT DISTINCT ON (subscription) * FROM idempotency.position ORDER BY subscription, version DESC) AS p};
is($node->safe_psql('postgres', $passed), 'p13 p5 p6', 'an event wakes the one that wants it, and those of which only that much can be told that it may be for them');
# What a rollback to a savepoint takes back changes nothing of that.
as_app(q{BEGIN; SAVEPOINT a; SELECT idempotency.subscribe('p13', '{other}', 'handle(idempotency.event)'); ROLLBACK TO a;
	SELECT idempotency.unsubscribe('p0'); ROLLBACK TO a; COMMIT});
publish('x.y', 'topics are back');
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'topics are back'}, 'a rollback takes new topics back');
publish('exact', 'subscription is back');
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'subscription is back'}, 'and brings back a subscription that was removed');
idle();
kill 'CONT', $reaper_launcher;

# Neither does the survey start a worker for what nobody wants, for a hole that nothing fills
# any more, or for a transaction that is open; for what was published unheard it does.
as_app(q{SELECT idempotency.unsubscribe('p' || i) FROM unnest(ARRAY[5, 6]) AS i}); # they may want anything
as_app(q{BEGIN; SELECT idempotency.publish('x.y', '{"do": "unheard"}'); PREPARE TRANSACTION 'unheard'});
$session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{BEGIN; SELECT idempotency.publish('x.y', '{"do": "open"}')});
$node->safe_psql('postgres', q{SELECT nextval('idempotency.outbox_seq')});
publish('x.y', 'before');
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'before'}, 'an event behind a hole, and two that are not committed');
publish('nobody wants this', 'x');
idle();
comes(q{SELECT cardinality(inflight) = 6 FROM idempotency.position WHERE subscription = 'p13' ORDER BY version DESC LIMIT 1}, 'the hole is given up');
reload('log_min_messages' => 'debug1');
reload('idempotency.reaper_naptime' => '100ms');
my $relays = sub { scalar(() = slurp_file($node->logfile, $_[0]) =~ /starting background worker process "idempotency relay for database/g) };
my $from = visits(2);
is($relays->($from), 0, 'no worker is started for that, though the survey looks');
as_app(q{COMMIT PREPARED 'unheard'});
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'unheard'}, 'what was published unheard is found');
$session->query_safe('ROLLBACK');
$session->quit;
comes(q{SELECT inflight = '{}' FROM idempotency.position WHERE subscription = 'p13' ORDER BY version DESC LIMIT 1}, 'what was rolled back is forgotten');
idle();
$from = visits(2);
is($relays->($from), 0, 'and starts no worker any more');

# Topics that are changed wake from then on.
as_app(q{SELECT idempotency.subscribe('p13', '{changed.*}', 'handle(idempotency.event)')});
idle();
publish('changed.x', 'changed');
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'changed'}, 'topics that are changed wake from then on');

# While a prepared transaction has a subscription's lock, workers that come in vain come
# less and less often: eight take 3 s of waiting for the lock and 6 s between them, at
# least.
idle();
as_app(q{BEGIN; SELECT idempotency.redrive('p13'); PREPARE TRANSACTION 'r'});
$from = -s $node->logfile;
my $at = time;
publish('changed.x', 'held');
usleep(10_000) until $relays->($from) >= 8 || time - $at > $PostgreSQL::Test::Utils::timeout_default;
cmp_ok(time - $at, '>=', 9, 'workers wait longer and longer for a subscription');
as_app(q{ROLLBACK PREPARED 'r'});
comes(q{SELECT count(*) = 1 FROM done WHERE what = 'held'}, 'and serve it when it is free');
reload('log_min_messages' => 'warning');
reload('idempotency.reaper_naptime' => '1h');
as_app("SELECT idempotency.unsubscribe('p$_')") foreach grep { $_ != 5 && $_ != 6 } 0 .. $#patterns;
as_app($subscribe);
kill 'STOP', $reaper_launcher;

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
kill 'CONT', $reaper_launcher;
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
idle();
is(as_app(q{SELECT idempotency.redrive('all')}), '1', 'redrive');
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'errors' AND attempts = 3 AND last_failed_at > clock_timestamp() - interval '10 s'},
	'wakes a worker, and it fails again');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');

# Within an aggregate, later events wait for the one that failed; when that is
# dead, they go on.
as_app(q{SELECT count(idempotency.publish('order', json_build_object('do', what), aggregate)) FROM (VALUES ('one', 'A'), ('fail', 'A'), ('two', 'A'),
	('three', 'A'), ('four', 'B'), ('five', 'B'), ('six', 'A')) AS e (what, aggregate)});
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
		('execute PREPARE p AS SELECT 1') x 2, ('execute DECLARE c CURSOR WITH HOLD FOR SELECT 1') x 2 ]);
comes(q{SELECT count(*) = 24 FROM done WHERE topic = 'does' AND what = 'show'}, 'whatever they do, the others have their turn');
my $plain = '4MB "$user", public ISO, MDY app app off read committed';
is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT note, ', ') FROM done WHERE topic = 'does' AND what = 'show'}), $plain,
	'nothing of a session gets into the next event');
is($node->safe_psql('postgres', q{SELECT max(attempt), count(*) FILTER (WHERE what LIKE 'execute%') FROM done WHERE topic = 'does'}), '1|4',
	'nor does anything else: all succeed at once');
comes(q{SELECT count(*) = 11 FROM idempotency.dead_letters WHERE topic = 'does'}, 'what must not be is an error');
is($node->safe_psql('postgres', q{SELECT string_agg(substr(error, 1, 5), ' ' ORDER BY seq) FROM idempotency.dead_letters WHERE topic = 'does'}),
	'42501 42501 42501 42501 42501 42501 0A000 2D000 IK428 23503 22012', 'of its own');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'does' AND what = 'temporary'}), '2', 'a temporary table goes with its event');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'again'}), '1', 'a handler may publish');
is($node->safe_psql('postgres', q{SELECT count(*), (SELECT string_agg(note || ' ' || attempt, ', ') FROM done WHERE what = 'twice') FROM child}), '2|at once 1, at once 1',
	'a constraint is deferred, or not, as it was declared');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.key WHERE scope IN ('complete', 'open')}), '1', 'a claim is completed, or it is none');
comes(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'all is done');
idle();
publish('left', [ 'execute PREPARE p AS SELECT 1', 'execute DECLARE c CURSOR WITH HOLD FOR SELECT 1', 'execute DO $$ BEGIN PERFORM pg_advisory_lock(1); END $$',
		(map { 'x' } 1 .. 60), 'left' ]);
comes(q{SELECT note = '0 0 0' FROM done WHERE topic = 'left' AND what = 'left'}, 'nothing else of a session is left when the batch is done');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# What would wait for the end of the transaction: a cursor that is to be held, triggers
# that defer what they do, and SET CONSTRAINTS.  None gets out of the event, where it
# could become another role; and it does what it does at a commit.
as_app(q{
	CREATE FUNCTION become() RETURNS int LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO public.done (topic, what) VALUES ('later', current_user);
		SET work_mem = '55MB';
		SET ROLE boss;
		RETURN 1;
	END $$;
	CREATE TABLE deferred (id int, left_over int);
	CREATE FUNCTION later() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		SET CONSTRAINTS ALL DEFERRED;
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
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'later'}, 'what is deferred may not become another role');
comes(q{SELECT count(*) = 0 FROM idempotency.parked WHERE dead_at IS NULL}, 'all else is done');
is($node->safe_psql('postgres', q{SELECT substr(error, 1, 5), payload ->> 'do' FROM idempotency.dead_letters}), '42501|execute INSERT INTO public.deferred VALUES (0, 2)',
	'it is the error of its event');
is($node->safe_psql('postgres', q{SELECT string_agg(note, ', ') FROM done WHERE what = 'show'}), "$plain, $plain", 'and nothing of it gets into another');
is($node->safe_psql('postgres', q{SELECT max(attempt), string_agg(note, ', ') FILTER (WHERE what = 'twice'), count(*) FILTER (WHERE topic = 'later' AND what = 'app') FROM done}),
	'1|at once|0', 'a constraint is again as it was declared, and a cursor is closed');
is($node->safe_psql('postgres', q{SELECT string_agg(id::text, ' ' ORDER BY id) FROM child WHERE id > 4}), '5 6', 'a trigger may defer what it does once more');
as_app('DROP TABLE deferred');
log_since();
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# What would wait for the end of the transaction fails at the end of the event, so
# that those beside it need not be given again.  The numbers of the rows tell how
# often the handler was called, rolled back or not.
my $called = $node->safe_psql('postgres', 'SELECT last_value FROM done_n_seq');
publish('alone', [ 'show', 'orphan 1', 'claim', 'show' ]);
comes(q{SELECT count(*) = 2 FROM idempotency.dead_letters WHERE topic = 'alone'}, 'what is deferred fails its event');
is($node->safe_psql('postgres', "SELECT last_value - $called FROM done_n_seq"), 2 * 3 + 2, 'and no other is given again for that');
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
	'IK412: this transaction 3, IK412: cannot commit af 3', 'with its own error');
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
as_app($subscribe =~ s/100 ms/2 s/r);
is(as_app(q{SELECT idempotency.redrive('all')}), '1', 'redriven');
comes(q{SELECT count(*) = 1 FROM idempotency.parked WHERE attempts = 1}, 'it does it again');
reload('idempotency.relay_workers' => 0);
idle();
$node->poll_query_until('postgres', q{SELECT retry_at < clock_timestamp() FROM idempotency.parked}) or die;
publish('poison', [ map { "beside $_" } 1 .. 20 ]);
log_since();
reload('idempotency.relay_workers' => 2);
comes(q{SELECT count(*) = 150 FROM done WHERE topic = 'poison'}, 'beside others that are due');
comes(q{SELECT count(*) = 1 FROM idempotency.dead_letters WHERE topic = 'poison'}, 'and is dead again');
is(scalar(() = log_since() =~ /terminating background worker/g), 2, 'but it is known by now, and is given alone');
as_app($subscribe);
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');

# A worker that somebody else ends, at work and at rest, and a cancel.
publish('ended', [ 'one', 'await', 'two' ]);
my $pid = waits_in_handler();
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'ended' AND what = 'one'}, 'somebody ends a worker: another takes over');
$pid = waits_in_handler();
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

done_testing();
