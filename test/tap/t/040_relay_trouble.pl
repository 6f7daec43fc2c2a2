# 040_relay_trouble.pl
#
# Proves that relay workers continue after disturbances of the worker, a subscription,
# its handler, its owner and its database. All subscriptions and databases get workers.
# A shutdown, a crash, a restore or a promotion loses and repeats nothing.
#
# The script takes a minute or two, because the relay retries after seconds.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use List::Util qw(uniq);
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RelayTest;
use Test::More;
use Time::HiRes qw(usleep time);

my $node = relay_node('idempotency.relay_subscriptions = 40');
my ($pid, $session, $log);
my $dir = PostgreSQL::Test::Utils::tempdir;

# ----------------------------------------------------------------
# Subscriptions that cannot be served
# ----------------------------------------------------------------

as_app(q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt); END $$});
$node->safe_psql('postgres', q{CREATE ROLE other LOGIN; GRANT other TO app; GRANT ALL ON done TO other;});
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', owner => 'other')});
my $again = q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', owner => 'other', retry_delay => '100 ms')};
my $unfit = 0;
foreach my $case (
	[ 'DROP FUNCTION other', q{42883: handler public.other(idempotency.event) does not exist},
		q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', (e).seq, (e).payload ->> 'do', (e).attempt) $$;
			ALTER FUNCTION other OWNER TO app} ],
	[ 'REVOKE EXECUTE ON FUNCTION other FROM PUBLIC', '42501: permission denied for function other', 'GRANT EXECUTE ON FUNCTION other TO other' ],
	[ 'DROP FUNCTION other; CREATE FUNCTION other(json) RETURNS void LANGUAGE sql AS $$ $$', q{42883: handler public.other(idempotency.event) does not exist},
		q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', (e).seq, (e).payload ->> 'do', (e).attempt) $$;
			DROP FUNCTION other(json); ALTER FUNCTION other OWNER TO app} ],
	[ 'DROP FUNCTION other; CREATE FUNCTION other(idempotency.event) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$', '42P13: function other(idempotency.event) cannot handle events',
		q{DROP FUNCTION other; CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', (e).seq, (e).payload ->> 'do', (e).attempt) $$;
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
	# In one transaction, because the relay would report a state between two statements.
	$node->safe_psql('postgres', join '; ', 'BEGIN', $first // (), $there, 'COMMIT');
	publish('unfit', $unfit);
	becomes_true(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'unfit'}, "$there: the other subscription is delivered");
	becomes_true(qq{SELECT last_error = \$p\$$problem\$p\$ FROM idempotency.subscription WHERE subscription = 'other'}, 'the subscription shows the reason');
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'no event has failed');
	usleep(2_500_000) if $unfit == 1; # the launcher retries after a second
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency relay cannot serve subscription "other" of database "postgres"/g), 1, 'the log reports it once') unless $there =~ /RENAME/;
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'the log has no other message');
	$node->safe_psql('postgres', "BEGIN; $back; COMMIT");
	as_app($again) if $unfit % 2; # without it the retry comes later
	becomes_true(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'other'}, 'the repaired subscription continues');
}
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), min(what), max(attempt) FROM done WHERE topic = 'other'}), "$unfit|1|1", 'the repaired subscription continues at its position');

# A handler that is dropped, and one that is replaced, while its worker runs it.
publish('unfit', [ 'one', 'await', 'two' ]);
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt);
		IF e.payload ->> 'do' = 'stay' THEN PERFORM pg_advisory_xact_lock(7); RAISE EXCEPTION 'of old'; END IF; END $$});
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
idle();
$session = open_session($node);
$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(7)');
publish('unfit', 'stay');
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted}) or die;
$node->safe_psql('postgres', 'DROP FUNCTION other');
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT last_error LIKE '42883: handler%' FROM idempotency.subscription WHERE subscription = 'other'}, 'a handler is dropped during a batch');
publish('unfit', [ 'first', 'second', 'third' ]);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'no event has failed');
as_app(q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt); END $$});
as_app($again);
becomes_true(q{SELECT count(*) = 4 FROM done WHERE topic = 'other' AND what IN ('first', 'stay', 'second', 'third')}, 'all events are delivered to the new handler');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done WHERE topic = 'other'}), '1', 'all events are at their first attempt');

# A handler that is replaced during a batch, by one in another language: the worker's
# cached call is no longer valid.
$node->safe_psql('postgres', q{DELETE FROM done WHERE topic = 'other'});
idle();
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt);
		IF e.payload ->> 'do' = 'hold' THEN PERFORM pg_advisory_xact_lock(8); PERFORM FROM pg_am; END IF; END $$}); # the worker processes the invalidation
$session = open_session($node);
$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(8)');
publish('unfit', [ 'hold', 'next' ]);
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 8 AND NOT granted}) or die;
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS
	$$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt) $$});
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'other'}, 'a handler is replaced during a batch');
is($node->safe_psql('postgres', q{SELECT string_agg(what || attempt, ' ' ORDER BY n) FROM done WHERE topic = 'other'}), 'hold1 next1', 'a replaced handler fails no event');

# Another owner; then no handler: the subscription is fetched.
idle();
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)')});
publish('unfit', 'owner');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'owner'}, 'a subscription with a new owner continues');
idle();
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'])});
publish('unfit', 'fetch');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'unfit' AND what = 'fetch'}, 'a subscription without a handler is not delivered by the relay');
is(as_app(q{SELECT payload ->> 'do' FROM idempotency.fetch('other')}), 'fetch', 'a subscription without a handler can be fetched');
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', max_attempts => 1)});
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'fetch' AND attempt = 1}, 'an event that a consumer did not acknowledge is delivered to the handler at its first attempt');

# The same while the worker is running: it sleeps for a moment after an event.
idle();
$session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{DO $$ BEGIN
		PERFORM idempotency.publish('unfit', '{"do": "running"}');
		COMMIT;
		WHILE NOT EXISTS (SELECT FROM done WHERE topic = 'other' AND what = 'running') LOOP PERFORM pg_sleep(0.005); END LOOP;
	END $$});
$session->query_safe(q{BEGIN; SELECT idempotency.subscribe('other', ARRAY['unfit'])});
publish('unfit', 'taken');
like($session->query_safe(q{SELECT payload ->> 'do' FROM idempotency.fetch('other')}), qr/taken/, 'a consumer fetches between two handlers');
$session->query_safe(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', max_attempts => 1); COMMIT});
$session->quit;
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'taken' AND attempt = 1}, 'the same while the worker is running');
is(as_app(q{SELECT idempotency.unsubscribe('other')}), 't', 'unsubscribe');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');
log_since();

# While events are delivered.
foreach my $round (1 .. 5)
{
	as_app(q{SELECT idempotency.subscribe('brief', ARRAY['brief'], 'other(idempotency.event)')});
	as_app(q{SELECT count(idempotency.publish('brief', '{"do": "brief"}')) FROM generate_series(1, 500)});
	$node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM done WHERE topic = 'other'}) or die;
	is(as_app(q{SELECT idempotency.unsubscribe('brief')}), 't', 'unsubscribe while events are delivered') if $round == 1;
	as_app(q{SELECT idempotency.unsubscribe('brief')}) if $round > 1;
	is($node->safe_psql('postgres', q{WITH d AS (DELETE FROM done RETURNING *) SELECT count(*) - count(DISTINCT (topic, seq)) FROM d}), '0', 'no event is repeated');
}
becomes_true(q{SELECT pg_sleep(0.3) IS NULL OR count(*) = 0 FROM idempotency.parked}, 'no parked event is left');
idle();
is_quiet('subscriptions created and deleted');
$node->safe_psql('postgres', 'DELETE FROM done');

# By the handler itself, which ends the batch.
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
becomes_true(q{SELECT NOT EXISTS (SELECT FROM idempotency.subscription WHERE subscription = 'itself')}, 'a handler can delete its subscription');
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'itself' AND what <> 'fail'}, 'the other subscription continues');
idle();
is(done(q{topic = 'brief'}), 'one enough', 'earlier events of the batch are done, and no later one');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked WHERE subscription = 'itself'}), '0', 'nothing is left of the subscription');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked; DELETE FROM done');
log_since();

# More subscriptions at once than a transaction remembers individually.
as_app(q{SELECT count(idempotency.subscribe('many ' || i, ARRAY['many'], 'other(idempotency.event)')) FROM generate_series(1, 20) AS i});
idle();
change_settings($node, 'log_min_messages' => 'debug1');
my $starts = -s $node->logfile;
publish('many', 'many');
becomes_true(q{SELECT count(*) = 20 FROM done WHERE topic = 'other'}, 'twenty subscriptions made in one transaction are delivered');
cmp_ok(scalar(() = slurp_file($node->logfile, $starts) =~ /starting background worker process "idempotency relay for database/g), '<=', 10,
	'fewer workers than subscriptions, because a worker continues with the next subscription');
change_settings($node, 'log_min_messages' => 'warning');
as_app(q{SELECT count(idempotency.unsubscribe('many ' || i)) FROM generate_series(1, 20) AS i});
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), count(*) FROM done WHERE topic = 'other'}), '1|20', 'each of them receives the event once');
$node->safe_psql('postgres', 'DELETE FROM done');
idle();
is_quiet('many subscriptions');

# ----------------------------------------------------------------
# Terminated workers
# ----------------------------------------------------------------

# Before the handler has seen the unacknowledged batch. No event has failed, even if the
# batch has a single event with a single attempt.
as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r);
$node->safe_psql('postgres', 'DELETE FROM flag');
publish('between', 'await');
waits_in_handler();
publish('between', 'x');
change_settings($node, 'idempotency.relay_workers' => 0);
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
idle();
is($node->safe_psql('postgres', q{SELECT count(*) FROM done}), '1', 'a worker exits between two batches');
change_settings($node, 'idempotency.relay_workers' => 2);
becomes_true(q{SELECT count(*) = 2 FROM done}, 'the next worker delivers the remaining event');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done}), '1', 'the remaining event is at its first attempt');
as_app($subscribe);
idle();
$node->safe_psql('postgres', 'DELETE FROM done; DELETE FROM flag');
log_since();

# While the worker waits for a lock on the subscription.
$session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{BEGIN; SELECT idempotency.redrive('all')});
publish('waits', 'x');
becomes_true(q{SELECT bool_or(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_stat_activity USING (pid)
	WHERE backend_type = 'idempotency relay' AND locktype = 'advisory' AND NOT granted}, 'a worker is terminated while it waits');
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT count(*) = 1 FROM done}, 'the subscription is delivered by another worker');
idle();

# While another session has locked a table: no signal would end a wait for it any more.
publish('locked', [ 'await', 'x' ]);
my $locked = waits_in_handler();
$session = open_session($node);
$session->query_safe('BEGIN; LOCK TABLE idempotency.position IN SHARE MODE');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($locked)");
becomes_true("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $locked)", 'a terminated worker does not wait for the lock of a table');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'locked'}, 'another worker handles the events');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done}), '1', 'no event has failed');
idle();
$node->safe_psql('postgres', 'DELETE FROM flag');

# The same while another session has locked the row of the position.
publish('row', [ 'await', 'x' ]);
$locked = waits_in_handler();
$session = open_session($node);
$session->query_safe(q{BEGIN; SELECT FROM idempotency.position WHERE subscription = 'all' FOR UPDATE});
$node->safe_psql('postgres', "SELECT pg_terminate_backend($locked)");
becomes_true("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $locked)", 'a terminated worker does not wait for the lock of a row');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
$session->query_safe('COMMIT');
$session->quit;
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'row'}, 'another worker handles the events after the row is unlocked');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done}), '1', 'no event has failed while the row was locked');
idle();
$node->safe_psql('postgres', 'DELETE FROM flag');
is_quiet('terminated workers', qr/exited with exit code 1|terminating background worker/);
$node->safe_psql('postgres', 'DELETE FROM done');

# ----------------------------------------------------------------
# Limits
# ----------------------------------------------------------------

# Never more workers than permitted, and all subscriptions and databases get one, with
# large and small backlogs. The large ones last until a flag is set.
$node->safe_psql('postgres', 'CREATE DATABASE second');
$node->safe_psql('second', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
	GRANT CREATE ON SCHEMA public TO app});
as_app($handlers, 'second');
change_settings($node, 'idempotency.relay_workers' => 0);
as_app(q{SELECT idempotency.subscribe('s' || i, ARRAY['s' || i], 'handle(idempotency.event)', retry_delay => '500 ms') FROM generate_series(1, 4) AS i});
as_app(q{SELECT idempotency.subscribe('t' || i, ARRAY['t' || i], 'handle(idempotency.event)') FROM generate_series(1, 2) AS i}, 'second');
as_app(q{SELECT idempotency.unsubscribe('all')});
publish('s1', [ ('dawdle') x 2000 ]);
as_app(q{SELECT idempotency.publish('s2', json_build_object('do', CASE i % 100 WHEN 5 THEN 'once' ELSE 'dawdle' END), 'A' || i % 7) FROM generate_series(1, 2000) AS i});
publish('t1', [ ('dawdle') x 2000 ], dbname => 'second');
is($node->safe_psql('postgres', q{SELECT pg_sleep(1), count(*) FROM done}), '|0', 'relay_workers = 0: no event is delivered');
is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}), '0', 'relay_workers = 0: no worker starts');
change_settings($node, 'idempotency.relay_workers' => 1);
becomes_true(q{SELECT count(*) > 0 FROM done WHERE topic = 's1'}, 'the first large backlog is delivered');
becomes_true(q{SELECT count(*) > 0 FROM done WHERE topic = 's2'}, 'the second large backlog is delivered');
becomes_true(q{SELECT count(*) > 0 FROM done WHERE topic = 't1'}, 'the large backlog of the other database is delivered', 'second');
my $began = time;
publish('s3', 'x');
publish('t2', 'x', dbname => 'second');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 's3'}, 'a small backlog is delivered');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 't2'}, 'a small backlog of the other database is delivered', 'second');
is($node->safe_psql('postgres', q{SELECT count(*) < 2000 FROM done WHERE topic = 's1'}) . $node->safe_psql('second', q{SELECT count(*) < 2000 FROM done WHERE topic = 't1'}), 'tt',
	'a small backlog does not wait for the large ones');
is($node->safe_psql('postgres', q{SELECT max(seq) = min(seq) + count(*) - 1 AND count(*) = count(DISTINCT seq) FROM done WHERE topic = 's1'}), 't',
	'large backlogs are interrupted during a batch, and continue after it');
my $most = 0;
change_settings($node, 'idempotency.relay_workers' => 3);
for (1 .. 100)
{
	my $now = $node->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'});
	$most = $now if $now > $most;
	last if $most > 3;
	usleep(10_000);
}
is($most, 3, 'three workers with relay_workers = 3');
change_settings($node, 'idempotency.relay_workers' => 2);
becomes_true(q{SELECT count(*) <= 2 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}, 'two workers with relay_workers = 2');
change_settings($node, 'idempotency.relay_workers' => 8);
$node->safe_psql($_, q{INSERT INTO flag VALUES ('go')}) foreach 'postgres', 'second';
becomes_true(q{SELECT count(*) = 4000 FROM done WHERE topic IN ('s1', 's2')}, 'all events are handled');
becomes_true(q{SELECT count(*) = 2000 FROM done WHERE topic = 't1'}, 'all events of the other database are handled', 'second');
is($node->safe_psql('postgres', q{SELECT bool_and(ordered) FROM (SELECT n = max(n) OVER (PARTITION BY topic, aggregateid ORDER BY seq) AS ordered
		FROM done JOIN idempotency.outbox USING (seq)) AS o}), 't', 'events are in order, with retries');
is($node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT seq) FROM done}), '0', 'all events are handled once');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'no parked event is left');
change_settings($node, 'idempotency.relay_workers' => 1);
as_app(q{SELECT idempotency.unsubscribe('s' || i) FROM generate_series(3, 4) AS i});

# A subscription that repeatedly finds only events that do not match keeps no worker.
$node->safe_psql('postgres', q{DELETE FROM done;
	CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM idempotency.publish('absent', '{}'); RETURN NULL; END $$;
	CREATE TRIGGER more AFTER UPDATE ON idempotency.position FOR EACH STATEMENT EXECUTE FUNCTION more()});
publish('s1', 'x');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 's1'}, 'one subscription is delivered');
publish('s2', 'x');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 's2'}, 'the other subscription gets a worker');
$node->safe_psql('postgres', 'DROP FUNCTION more() CASCADE; DELETE FROM flag');
change_settings($node, 'idempotency.relay_workers' => 2);
as_app(q{SELECT idempotency.unsubscribe('s' || i) FROM generate_series(1, 2) AS i});
idle();
is_quiet('limits');

# No background worker slot is free: this is logged once for each kind of worker, and
# retried. A visit of a database can be due; then it gets the next slot, before a relay.
$node->safe_psql('postgres', q{DELETE FROM done; GRANT ALL ON done TO app});
as_app($subscribe);
idle();
my $lock = open_session($node);
$lock->query_safe(q{
	CREATE TABLE numbers AS SELECT generate_series(1, 2000) AS n;
	ALTER TABLE numbers SET (parallel_workers = 8);
	CREATE FUNCTION wait_for_lock(int) RETURNS int LANGUAGE plpgsql PARALLEL SAFE AS $$ BEGIN
		WHILE EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 11) LOOP PERFORM pg_sleep(0.01); END LOOP;
		RETURN $1; END $$;
	SELECT pg_advisory_lock(11)});
my (@queries, $full);
while (!$full && @queries < 10)
{
	# A worker that is about to end has a slot, which the next query gets.
	push @queries, open_session($node);
	$queries[-1]->query_safe(q{
		SET max_parallel_workers_per_gather = 8;
		SET parallel_leader_participation = off;
		SET parallel_setup_cost = 0;
		SET parallel_tuple_cost = 0});
	$queries[-1]->query_until(qr/go/, "\\echo go\nSELECT count(wait_for_lock(n)) FROM numbers;\n");
	foreach (1 .. 20)
	{
		$full = $node->safe_psql('postgres', q{SELECT count(*) FILTER (WHERE backend_type = 'parallel worker') =
			current_setting('max_worker_processes')::int - count(*) FILTER (WHERE backend_type ~ 'launcher') FROM pg_stat_activity WHERE backend_type !~ 'autovacuum'}) eq 't';
		last if $full;
		usleep(100_000);
	}
}
ok($full, 'parallel workers have all slots');
publish('slot', 'x');
log_comes(qr/no background worker slot is free for the idempotency (?:relay|reaper)/, 'the log reports that no slot is free');
is($node->safe_psql('postgres', q{SELECT pg_sleep(1), count(*) FROM done}), '|0', 'the event waits');
$lock->query_safe('SELECT pg_advisory_unlock(11)');
becomes_true(q{SELECT count(*) = 1 FROM done}, 'the event is delivered once a slot is free');
$log = log_since();
my @kinds = $log =~ /no background worker slot is free for the idempotency (\w+)/g;
is(join(' ', sort @kinds), join(' ', uniq(sort @kinds)), 'the lack of slots is logged once for each kind');
$_->quit foreach @queries, $lock;
idle();
$node->safe_psql('postgres', 'DELETE FROM done');

# One slot is left beside this launcher and the server's own. Visits and relays alternate:
# a relay that always has more to do leaves the slot to a visit, and visits that follow
# each other leave it to a relay. So do relays among each other.
my $slots = $node->safe_psql('postgres', 'SHOW max_worker_processes');
$node->safe_psql('postgres', $_) foreach q{ALTER SYSTEM SET max_worker_processes = 3}, q{ALTER SYSTEM SET idempotency.reaper_naptime = '100ms'};
$node->restart;
log_since();
as_app(q{SELECT idempotency.subscribe('pair', ARRAY['pair'], 'handle(idempotency.event)');
	SELECT count(idempotency.publish('long', '{"do": "dawdle"}')) FROM generate_series(1, 2000)});
publish('pair', 'x');
expire_keys($node, 10, 'k', 'postgres');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.key}, 'a visit gets the slot of a relay');
my $handled = $node->safe_psql('postgres', 'SELECT count(*) FROM done');
cmp_ok($handled, '<', 2000, 'the relay has more to do');
becomes_true("SELECT count(*) > $handled FROM done", 'the relay gets the slot of a visit');
expire_keys($node, 10, 'k', 'postgres');
becomes_true(q{SELECT count(*) = 0 FROM idempotency.key}, 'the next visit gets it back');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'pair'}, 'another subscription gets it too');
cmp_ok($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'long'}), '<', 2000, 'the relay still has more to do');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 2000 FROM done WHERE topic = 'long'}, 'the relay handles all events');
as_app(q{SELECT idempotency.unsubscribe('pair')});
$node->safe_psql('postgres', $_) foreach qq{ALTER SYSTEM SET max_worker_processes = $slots}, q{ALTER SYSTEM SET idempotency.reaper_naptime = '1h'};
$node->restart;
idle();
is_quiet('one slot', qr/no background worker slot is free|exited with exit code 1|terminating (?:background worker|connection)/);
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');

# This server has 40 slots for subscriptions. A client that creates one more gets a
# warning; the log reports it once, and the subscription shows it. Subscriptions without a
# slot get one when others are deleted.
as_app(q{SELECT count(idempotency.subscribe('slot ' || i, ARRAY['slot'], 'other(idempotency.event)')) FROM generate_series(1, 46) AS i});
log_comes(qr/LOG:  idempotency relay does not serve further subscriptions/, 'the log reports that no slot of the relay is free');
like(fails_with_app(qq{SELECT idempotency.subscribe('late $_', ARRAY['late'], 'other(idempotency.event)')}),
	qr/WARNING:  no slot is free for another subscription with a handler\n.*DETAIL:  All 40 slots/, 'subscribe warns') foreach 1 .. 3;
becomes_true(q{SELECT count(*) = 3 FROM idempotency.subscription WHERE subscription LIKE 'late %' AND last_error = 'no slot is free: idempotency.relay_subscriptions is 40'},
	'the subscription shows why it is not served');
idle();
publish('late', 'late');
idle();
is(done(q{topic = 'other'}), '', 'a subscription without a slot is not delivered');

# Another database still gets its own share, and no more.
unlike(($node->psql('second', q{SELECT idempotency.subscribe('share ' || i, ARRAY['share'], 'handle(idempotency.event)') FROM generate_series(1, 10) AS i},
	extra_params => [ '--username', 'app' ]))[2], qr/WARNING/, 'another database gets its share');
publish('share', 'x', dbname => 'second');
becomes_true(q{SELECT count(*) = 10 FROM done WHERE topic = 'share'}, 'the other database is delivered', 'second');
becomes_true(q{SELECT count(*) >= 14 FROM idempotency.subscription WHERE last_error LIKE 'no slot is free: %'}, 'subscriptions that lost their slot show it');
is($node->safe_psql('second', q{SELECT count(*) FROM idempotency.subscription WHERE last_error LIKE 'no slot is free: %'}), '0', 'the other database keeps its slots');
is(scalar(() = log_since() =~ /does not serve further/g), 1, 'the lack of slots of the relay is logged once');
as_app(q{SELECT count(idempotency.unsubscribe('share ' || i)) FROM generate_series(1, 10) AS i}, 'second');
as_app(q{SELECT count(idempotency.unsubscribe('slot ' || i)) FROM generate_series(1, 46) AS i});
becomes_true(q{SELECT count(*) = 3 FROM done WHERE topic = 'other'}, 'subscriptions that get a slot are delivered');
as_app(qq{SELECT idempotency.unsubscribe('late $_')}) foreach 1 .. 3;
idle();
is_quiet('slots');
$node->safe_psql('postgres', 'DELETE FROM done');

# ----------------------------------------------------------------
# Databases
# ----------------------------------------------------------------

# The setting idempotency.databases.
change_settings($node, 'idempotency.databases' => 'second');
publish('databases', 'x');
publish('t2', 'chosen', dbname => 'second');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE what = 'chosen'}, 'a listed database is served', 'second');
is($node->safe_psql('postgres', 'SELECT pg_sleep(1), count(*) FROM done'), '|0', 'an unlisted database is not served');
change_settings($node, 'idempotency.databases' => '');
becomes_true(q{SELECT count(*) = 1 FROM done}, 'with an empty list all databases are served');
idle();

# DROP DATABASE and a copy of the database, while endless work runs.
my $endless = q{
	SELECT idempotency.subscribe('endless', ARRAY['endless'], 'handle(idempotency.event)');
	SELECT count(idempotency.publish('endless', '{"do": "nap 0.01"}')) FROM generate_series(1, 20000)};
as_app($endless, 'second');
becomes_true(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work', 'second');
is(($node->psql('postgres', 'CREATE DATABASE copy TEMPLATE second'))[2], '', 'CREATE DATABASE copies a database while events are delivered');
becomes_true(q{SELECT count(*) > (SELECT count(*) FROM idempotency.outbox) - 20100 AND EXISTS (SELECT FROM done WHERE topic = 'endless' AND at > pg_postmaster_start_time())
	FROM done WHERE topic = 'endless'}, 'the copy is served', 'copy');
is($node->safe_psql('copy', q{SELECT count(*) - count(DISTINCT seq) FROM done WHERE topic = 'endless'}), '0', 'each event of the copy is handled once');
becomes_true(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, "the database is being served", 'second');
is(($node->psql('postgres', "DROP DATABASE second"))[2], '', "DROP DATABASE while events are delivered");

# DROP DATABASE waits for one event, not for the batch.
as_app(q{SELECT idempotency.unsubscribe('endless'); SELECT idempotency.subscribe('slow', ARRAY['slow'], 'handle(idempotency.event)')}, 'copy');
publish('slow', [ ('nap 1') x 60 ], dbname => 'copy');
becomes_true(q{SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE query = 'serving subscription "slow"'
	AND locktype = 'object' AND classid = 'pg_database'::regclass AND granted)}, 'a slow batch');
$began = time;
is(($node->psql('postgres', "DROP DATABASE copy"))[2], '', "DROP DATABASE during a slow batch");
cmp_ok(time - $began, '<', 30, 'DROP DATABASE does not wait for the batch');
is_quiet('databases', qr/exited with exit code 1|terminating background worker|database .* does not exist/);

# DROP DATABASE ends a handler that would block it for longer, even one that ignores a
# cancel. So do statements that copy, rename or move a database. The event is
# redelivered without a counted attempt, in a copy too.
$node->safe_psql('postgres', 'ALTER ROLE app SET idempotency.handler_timeout = 0');
foreach my $kind ('await', 'deaf')
{
	$node->safe_psql('postgres', 'CREATE DATABASE third');
	$node->safe_psql('third', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
		GRANT CREATE ON SCHEMA public TO app});
	as_app($handlers, 'third');
	as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r, 'third');
	publish('long', $kind, dbname => 'third');
	waits_in_handler();
	# A session that waits for the subscription gets its lock before the worker can
	# release the batch.
	my $waiter = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('third'), '-c', q{SET idempotency.wait = '60s'},
		'-c', q{SELECT idempotency.redrive('all')} ], '>', \my $redriven, '2>', \my $refused);
	worker_pid($node, 'client backend', q{wait_event_type = 'Lock' AND query ~ 'redrive' AND datname = 'third'});
	# A handler is terminated within 1 s; the next survey, which wakes the launcher, can be
	# 10 s away.
	foreach my $case ([ 'third', 'CREATE DATABASE copy TEMPLATE third' ], [ 'renamed', 'ALTER DATABASE third RENAME TO renamed' ],
		[ 'third', 'ALTER DATABASE renamed RENAME TO third' ])
	{
		my ($database, $statement) = @$case;
		is(($node->psql('postgres', "SET lock_timeout = '6s'; $statement"))[2], '', "$kind: $statement while a handler is called") or die;
		is($node->safe_psql($database, q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed after $statement") or die;
		worker_pid($node, 'idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep' AND datname <> 'copy'});
	}
	is($node->safe_psql('copy', q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed in the copy");
	$waiter->finish;
	is($redriven . $refused, "0\n", "$kind: the waiting session continues");
	if ($kind eq 'await')
	{
		$node->safe_psql($_, q{INSERT INTO flag VALUES ('go')}) foreach 'third', 'copy';
		becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'long' AND attempt = 1}, "$kind: the event is delivered in $_", $_) foreach 'third', 'copy';
		$node->safe_psql('third', 'DELETE FROM flag');
		publish('long', $kind, dbname => 'third');
		worker_pid($node, 'idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep' AND datname = 'third'});
	}
	is(($node->psql('postgres', "SET lock_timeout = '6s'; DROP DATABASE $_"))[2], '', "$kind: DROP DATABASE $_ while a handler is called") foreach 'third', 'copy';
}
$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');
is_quiet('a terminated handler', qr/exited with exit code 1|terminating background worker|database .* does not exist/);

# DROP EXTENSION.
$node->safe_psql('postgres', 'DELETE FROM done');
as_app(q{SELECT idempotency.unsubscribe('all')});
as_app($endless);
becomes_true(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work');
# DROP EXTENSION waits for the batch, and handlers depend on the extension
is(($node->psql('postgres', 'DROP EXTENSION idempotency CASCADE'))[2] =~ s/^.*NOTICE:.*\n?(?:DETAIL:.*\n?(?:drop cascades.*\n?)*)?//mr, '', 'DROP EXTENSION while events are delivered');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die 'workers do not exit';
is_quiet('DROP EXTENSION');
$node->safe_psql('postgres', q{DROP TABLE done, parent, child, single, flag; CREATE EXTENSION idempotency;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app')});
as_app($handlers);
as_app($subscribe);
publish('recreated', 'x');
becomes_true(q{SELECT count(*) = 1 FROM done}, 'a recreated extension is served');
is_quiet('CREATE EXTENSION');

# A restore: undelivered and later events.
idle();
change_settings($node, 'idempotency.relay_workers' => 0);
publish('restored', [ 'one', 'two' ]);
$node->command_ok([ 'pg_dump', '--file', "$dir/dump", 'postgres' ], 'dump');
$node->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
change_settings($node, 'idempotency.relay_workers' => 2);
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'restored'}, 'the original continues');
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", 'restored' ], 'restore');
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'restored'}, 'the restored database is served', 'restored');
publish('restored', 'three', dbname => 'restored');
becomes_true(q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two three' FROM done WHERE topic = 'restored'}, 'the restored database continues', 'restored');
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'restored'}), '2', 'the original does not receive events of the restored database');
$node->safe_psql('postgres', 'DROP DATABASE restored');
$node->safe_psql('postgres', 'DELETE FROM done');
is_quiet('restore', qr/exited with exit code 1|terminating background worker/);

# ----------------------------------------------------------------
# Shutdown and crash
# ----------------------------------------------------------------

# stops stops the server while a handler runs, and starts it again.
sub stops
{
	my ($mode, $attempt) = @_;
	idle();
	$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
	publish('stop', [ (map { "before $_" } 1 .. 5), 'await', (map { "after $_" } 1 .. 5) ]);
	publish('stop', 'alone', aggregate => 'A');
	waits_in_handler();
	log_since();
	my $at = time;
	$node->stop($mode);
	cmp_ok(time - $at, '<', 20, "$mode shutdown while a handler runs");
	unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'quietly') unless $mode eq 'immediate';
	$node->start;
	is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE topic = 'stop'}), '0', 'uncommitted work is rolled back') if $mode ne 'immediate';
	$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
	becomes_true(q{SELECT count(*) = 12 FROM done WHERE topic = 'stop'}, 'all events are handled after the restart');
	is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'stop'}), "12|12|$attempt", 'each event is handled once');
}
stops('fast', 1);
stops('smart', 1);
stops('immediate', 1);

# A single event: neither a shutdown nor a crash counts an attempt.
foreach my $mode ('fast', 'immediate')
{
	idle();
	$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
	publish('alone', 'await');
	waits_in_handler();
	$node->stop($mode);
	$node->start;
	$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
	becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone'}, "a single event is handled after shutdown $mode");
	is($node->safe_psql('postgres', q{SELECT attempt FROM done WHERE topic = 'alone'}), 1, "a single event after shutdown $mode is at its first attempt");
}

# Also where commits wait for a missing standby.
idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
publish('alone', 'await');
waits_in_handler();
change_settings($node, 'synchronous_standby_names' => 'absent');
$session = open_session($node);
$session->query_until(qr/go/, "\\echo go\nCREATE TABLE waits ();\n");
becomes_true(q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'}, 'commits wait for a standby');
ok($node->stop('fast', fail_ok => 1), 'a shutdown while a handler runs does not wait for the standby') or $node->stop('immediate');
eval { $session->quit };
$node->append_conf('postgresql.auto.conf', q{synchronous_standby_names = ''});
$node->start;
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone' AND attempt = 1}, 'the event is delivered at its first attempt');

# kill -9 of a worker: all backends restart, and the registry is rebuilt.
idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
publish('crash', [ (map { "before $_" } 1 .. 20), 'await', (map { "after $_" } 1 .. 50) ]);
$pid = waits_in_handler();
ok(kill(9, $pid), 'kill -9 of a worker');
$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die 'the server does not recover';
becomes_true(q{SELECT count(*) = 20 FROM done WHERE what LIKE 'before %'}, 'the relay continues after the crash');
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 71 FROM done WHERE topic = 'crash'}, 'all events are handled after the crash');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'crash'}), '71|1', 'each event is handled once after the crash');

# With idle workers a shutdown is immediate.
foreach my $mode ('fast', 'smart')
{
	publish('rest', 'x');
	becomes_true(q{SELECT count(*) > 0 FROM done WHERE topic = 'rest'}, 'a worker becomes idle');
	log_since();
	$began = time;
	$node->stop($mode);
	cmp_ok(time - $began, '<', 10, "$mode shutdown");
	unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'the shutdown logs no warning or error');
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
change_settings($node, 'idempotency.relay_workers' => 0);
publish('promoted', [ 'one', 'two' ]);
$node->wait_for_catchup($standby);
is($standby->safe_psql('postgres', q{SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idempotency %'}), '0', 'there is no relay on a standby');
$node->stop('immediate');
$standby->promote;
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two' FROM done WHERE topic = 'promoted'}), 'a promoted standby delivers the remaining events');
$standby->safe_psql('postgres', q{SELECT idempotency.publish('promoted', '{"do": "three"}')}, extra_params => [ '--username', 'app' ]);
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two three' FROM done WHERE topic = 'promoted'}), 'a promoted standby delivers new events');
$standby->stop;

done_testing();
