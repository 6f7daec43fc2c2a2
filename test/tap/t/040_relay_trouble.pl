# 040_relay_trouble.pl
#
# Proves that relay workers go on, whatever others do to them, to a subscription, to
# its handler, its owner and its database; that subscriptions and databases have their
# turns; and that a stop, a crash, a restore or a promotion of the server loses nothing
# and repeats nothing.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
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
	$node->safe_psql('postgres', "BEGIN; $first; $there; COMMIT") if defined $first;
	$node->safe_psql('postgres', $there) unless defined $first;
	publish('unfit', $unfit);
	comes(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'unfit'}, "$there: the other subscription is served");
	comes(qq{SELECT last_error = \$p\$$problem\$p\$ FROM idempotency.subscription WHERE subscription = 'other'}, 'this one says why not');
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'it is no fault of the event');
	usleep(2_500_000) if $unfit == 1; # it is tried again after a second
	$log = log_since();
	is(scalar(() = $log =~ /LOG:  idempotency relay cannot serve subscription \d+ of database "postgres"/g), 1, 'the log says it once') unless $there =~ /RENAME/;
	unlike($log, qr/(?:WARNING|ERROR|FATAL|PANIC):/, 'and nothing else');
	$node->safe_psql('postgres', $back);
	as_app($again) if $unfit % 2; # or else it takes a moment longer
	comes(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'other'}, 'mended, it goes on');
}
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), min(what), max(attempt) FROM done WHERE topic = 'other'}), "$unfit|1|1", 'where it stood');

# A handler that is dropped, and one that is replaced, while its worker is at it.
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
comes(q{SELECT last_error LIKE '42883: handler%' FROM idempotency.subscription WHERE subscription = 'other'}, 'a handler is dropped in the middle of a batch');
publish('unfit', [ 'first', 'second', 'third' ]);
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked}), '0', 'no event has failed');
as_app(q{CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt); END $$});
as_app($again);
comes(q{SELECT count(*) = 4 FROM done WHERE topic = 'other' AND what IN ('first', 'stay', 'second', 'third')}, 'all are given to the new one');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done WHERE topic = 'other'}), '1', 'at their first attempt');

# One that is replaced in the middle of a batch, by one in another language: as a worker
# knows it, it can be called no more.
$node->safe_psql('postgres', q{DELETE FROM done WHERE topic = 'other'});
idle();
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt);
		IF e.payload ->> 'do' = 'hold' THEN PERFORM pg_advisory_xact_lock(8); PERFORM FROM pg_am; END IF; END $$}); # the worker learns of it
$session = open_session($node);
$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(8)');
publish('unfit', [ 'hold', 'next' ]);
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 8 AND NOT granted}) or die;
as_app(q{CREATE OR REPLACE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS
	$$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', e.seq, e.payload ->> 'do', e.attempt) $$});
$session->query_safe('COMMIT');
$session->quit;
comes(q{SELECT count(*) = 2 FROM done WHERE topic = 'other'}, 'a handler is replaced in the middle of a batch');
is($node->safe_psql('postgres', q{SELECT string_agg(what || attempt, ' ' ORDER BY n) FROM done WHERE topic = 'other'}), 'hold1 next1', 'which fails no event');

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
as_app(q{SELECT idempotency.subscribe('other', ARRAY['unfit'], 'other(idempotency.event)', max_attempts => 1)});
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'fetch' AND attempt = 1}, 'what a consumer has left is given to the handler, and no fault of its');
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

# ----------------------------------------------------------------
# Workers that are told to go
# ----------------------------------------------------------------

# Before the handler has seen the batch that is out: no event is to blame, though it
# be alone, and have but one attempt.
as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r);
$node->safe_psql('postgres', 'DELETE FROM flag');
publish('between', 'await');
waits_in_handler();
publish('between', 'x');
reload('idempotency.relay_workers' => 0);
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
idle();
is($node->safe_psql('postgres', q{SELECT count(*) FROM done}), '1', 'a worker leaves between two batches');
reload('idempotency.relay_workers' => 2);
comes(q{SELECT count(*) = 2 FROM done}, 'the next one gives what it has left');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done}), '1', 'as it was');
as_app($subscribe);
idle();
$node->safe_psql('postgres', 'DELETE FROM done; DELETE FROM flag');
log_since();

# While it waits for whoever is at the subscription.  Nobody looks what there is.
my $reaper_launcher = pid_of('idempotency launcher');
kill 'STOP', $reaper_launcher;
$session = open_session($node, extra_params => [ '--username', 'app' ]);
$session->query_safe(q{BEGIN; SELECT idempotency.redrive('all')});
publish('waits', 'x');
comes(q{SELECT bool_or(pg_terminate_backend(pid)) FROM pg_locks JOIN pg_stat_activity USING (pid)
	WHERE backend_type = 'idempotency relay' AND locktype = 'advisory' AND NOT granted}, 'a worker is ended while it waits');
$session->query_safe('COMMIT');
$session->quit;
comes(q{SELECT count(*) = 1 FROM done}, 'the subscription is not forgotten');
kill 'CONT', $reaper_launcher;
idle();
is_quiet('told to go', qr/exited with exit code 1|terminating background worker/);
$node->safe_psql('postgres', 'DELETE FROM done');

# ----------------------------------------------------------------
# Slots
# ----------------------------------------------------------------

# Never more workers than there may be, and all have their turn: subscriptions and
# databases with much to do, and with little.
$node->safe_psql('postgres', 'CREATE DATABASE second');
$node->safe_psql('second', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
	GRANT CREATE ON SCHEMA public TO app});
as_app($handlers, 'second');
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
reload('idempotency.relay_workers' => 1);
as_app(q{SELECT idempotency.unsubscribe('s' || i) FROM generate_series(3, 4) AS i});

# One that finds nothing but what is for nobody, again and again, keeps no place.
$node->safe_psql('postgres', q{DELETE FROM done;
	CREATE FUNCTION more() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM idempotency.publish('nobody', '{}'); RETURN NULL; END $$;
	CREATE TRIGGER more AFTER UPDATE ON idempotency.position FOR EACH STATEMENT EXECUTE FUNCTION more()});
publish('s1', 'x');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 's1'}, 'one is served');
publish('s2', 'x');
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 's2'}, 'and makes room for the other');
$node->safe_psql('postgres', 'DROP FUNCTION more() CASCADE');
reload('idempotency.relay_workers' => 2);
as_app(q{SELECT idempotency.unsubscribe('s' || i) FROM generate_series(1, 2) AS i});
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
log_comes(qr/no background worker slot is free for the idempotency relay/, 'the log says that there is no slot');
is($node->safe_psql('postgres', q{SELECT pg_sleep(1), count(*) FROM done}), '|0', 'the event waits');
$lock->query_safe('SELECT pg_advisory_unlock(11)');
comes(q{SELECT count(*) = 1 FROM done}, 'it comes when there is one');
$log = log_since();
is(scalar(() = $log =~ /no background worker slot is free for the idempotency relay/g), 1, 'it was said once');
$query->quit;
$lock->quit;
idle();
$node->safe_psql('postgres', 'DELETE FROM done');

# There is room for 40 subscriptions here.  Who makes one more is warned, the log says once that
# there is no more room, and so does the subscription; those without a place get one when others
# leave.
as_app(q{SELECT count(idempotency.subscribe('room ' || i, ARRAY['room'], 'other(idempotency.event)')) FROM generate_series(1, 46) AS i});
log_comes(qr/LOG:  idempotency relay does not serve further subscriptions/, 'the log says that there is no room');
like(fails_with_app(qq{SELECT idempotency.subscribe('late $_', ARRAY['late'], 'other(idempotency.event)')}),
	qr/WARNING:  the server has no place left for a subscription with a handler\n.*DETAIL:  .* 40 places/, 'who subscribes is warned') foreach 1 .. 3;
comes(q{SELECT count(*) = 3 FROM idempotency.subscription WHERE subscription LIKE 'late %' AND last_error = 'no place: idempotency.relay_subscriptions is 40'},
	'the subscription says why it is not served');
idle();
publish('late', 'late');
idle();
is(done(q{topic = 'other'}), '', 'who has no place is not served');

# Another database gets its share nevertheless, and none that is not its.
unlike(($node->psql('second', q{SELECT idempotency.subscribe('share ' || i, ARRAY['share'], 'handle(idempotency.event)') FROM generate_series(1, 10) AS i},
	extra_params => [ '--username', 'app' ]))[2], qr/WARNING/, 'another database has its share');
publish('share', 'x', dbname => 'second');
comes(q{SELECT count(*) = 10 FROM done WHERE topic = 'share'}, 'and is served', 'second');
comes(q{SELECT count(*) >= 14 FROM idempotency.subscription WHERE last_error LIKE 'no place: %'}, 'those who have lost their places are told');
is($node->safe_psql('second', q{SELECT count(*) FROM idempotency.subscription WHERE last_error LIKE 'no place: %'}), '0', 'and keep nobody from its own');
is(scalar(() = log_since() =~ /does not serve further/g), 1, 'it was said once');
as_app(q{SELECT count(idempotency.unsubscribe('share ' || i)) FROM generate_series(1, 10) AS i}, 'second');
as_app(q{SELECT count(idempotency.unsubscribe('room ' || i)) FROM generate_series(1, 46) AS i});
comes(q{SELECT count(*) = 3 FROM done WHERE topic = 'other'}, 'who gets one is served');
as_app(qq{SELECT idempotency.unsubscribe('late $_')}) foreach 1 .. 3;
idle();
is_quiet('room');
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
comes(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, "it is at work", 'second');
is(($node->psql('postgres', "DROP DATABASE second"))[2], '', "DROP DATABASE in the middle of the work");

# It waits for an event, and not for the batch.
as_app(q{SELECT idempotency.unsubscribe('endless'); SELECT idempotency.subscribe('slow', ARRAY['slow'], 'handle(idempotency.event)')}, 'copy');
publish('slow', [ ('nap 1') x 60 ], dbname => 'copy');
comes(q{SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE query = 'serving subscription "slow"'
	AND locktype = 'object' AND classid = 'pg_database'::regclass AND granted)}, 'a slow batch');
$began = time;
is(($node->psql('postgres', "DROP DATABASE copy"))[2], '', "DROP DATABASE in the middle of it");
cmp_ok(time - $began, '<', 30, 'before it ends');
is_quiet('databases', qr/exited with exit code 1|terminating background worker|database .* does not exist/);

# It ends a handler that would keep it waiting for longer, whether that heeds a cancel or not.
# So does what copies, renames or moves a database; the event is given again, with no attempt
# counted, and in a copy as well.
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
	# A session that waits for the subscription gets it before the worker can give its batch back.
	my $waiter = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('third'), '-c', q{SET idempotency.wait = '60s'},
		'-c', q{SELECT idempotency.redrive('all')} ], '>', \my $redriven, '2>', \my $refused);
	pid_of('client backend', q{wait_event_type = 'Lock' AND query ~ 'redrive' AND datname = 'third'});
	foreach my $case ([ 'third', 'CREATE DATABASE copy TEMPLATE third' ], [ 'renamed', 'ALTER DATABASE third RENAME TO renamed' ],
		[ 'third', 'ALTER DATABASE renamed RENAME TO third' ])
	{
		my ($database, $statement) = @$case;
		is(($node->psql('postgres', "SET lock_timeout = '60s'; $statement"))[2], '', "$kind: $statement while a handler is called") or die;
		is($node->safe_psql($database, q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed after $statement") or die;
		pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep' AND datname <> 'copy'});
	}
	is($node->safe_psql('copy', q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed in the copy");
	$waiter->finish;
	is($redriven . $refused, "0\n", "$kind: and the session that waited goes on");
	if ($kind eq 'await')
	{
		$node->safe_psql($_, q{INSERT INTO flag VALUES ('go')}) foreach 'third', 'copy';
		comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'long' AND attempt = 1}, "$kind: the event comes, in $_", $_) foreach 'third', 'copy';
		$node->safe_psql('third', 'DELETE FROM flag');
		publish('long', $kind, dbname => 'third');
		pid_of('idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep' AND datname = 'third'});
	}
	is(($node->psql('postgres', "SET lock_timeout = '60s'; DROP DATABASE $_"))[2], '', "$kind: DROP DATABASE $_ while a handler is called") foreach 'third', 'copy';
}
$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');
is_quiet('a handler is ended', qr/exited with exit code 1|terminating background worker|database .* does not exist/);

# DROP EXTENSION, too.
$node->safe_psql('postgres', 'DELETE FROM done');
as_app(q{SELECT idempotency.unsubscribe('all')});
as_app($endless);
comes(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work');
# (it waits for the batch, and handlers depend on it)
is(($node->psql('postgres', 'DROP EXTENSION idempotency CASCADE'))[2] =~ s/^.*NOTICE:.*\n?(?:DETAIL:.*\n?(?:drop cascades.*\n?)*)?//mr, '', 'DROP EXTENSION in the middle of the work');
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die 'workers stay';
is_quiet('DROP EXTENSION');
$node->safe_psql('postgres', q{DROP TABLE done, parent, child, single, flag; CREATE EXTENSION idempotency;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app')});
as_app($handlers);
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
	waits_in_handler();
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
	waits_in_handler();
	$node->stop($mode);
	$node->start;
	$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
	comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone'}, "an event alone is handled after a stop: $mode");
	is($node->safe_psql('postgres', q{SELECT attempt FROM done WHERE topic = 'alone'}), $attempt, "at attempt $attempt");
}

# Where commits wait for a standby that is not there, too.
idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
publish('alone', 'await');
waits_in_handler();
reload('synchronous_standby_names' => 'nobody');
$session = open_session($node);
$session->query_until(qr/go/, "\\echo go\nCREATE TABLE waits ();\n");
comes(q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'}, 'commits wait for a standby');
ok($node->stop('fast', fail_ok => 1), 'a stop in the middle of a handler waits for none') or $node->stop('immediate');
eval { $session->quit };
$node->append_conf('postgresql.auto.conf', q{synchronous_standby_names = ''});
$node->start;
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
comes(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone' AND attempt = 1}, 'the event is given as it was');

# kill -9 of a worker: all restart, and the registry begins anew.
idle();
$node->safe_psql('postgres', 'DELETE FROM flag; DELETE FROM done');
publish('crash', [ (map { "before $_" } 1 .. 20), 'await', (map { "after $_" } 1 .. 50) ]);
$pid = waits_in_handler();
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
	unlike(log_since(), qr/(?:WARNING|ERROR|PANIC):|FATAL: .*idempotency/, 'quietly');
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
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two' FROM done WHERE topic = 'promoted'}), 'promoted, it serves what was left');
$standby->safe_psql('postgres', q{SELECT idempotency.publish('promoted', '{"do": "three"}')}, extra_params => [ '--username', 'app' ]);
ok($standby->poll_query_until('postgres', q{SELECT string_agg(what, ' ' ORDER BY n) = 'one two three' FROM done WHERE topic = 'promoted'}), 'and what comes');
$standby->stop;

done_testing();
