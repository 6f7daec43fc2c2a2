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

my $node = relay_node();
my ($pid, $session, $log, $began);
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
	[ 'DROP FUNCTION other; CREATE FUNCTION other(idempotency.event) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$', '42P13: function public.other(idempotency.event) cannot handle events',
		q{DROP FUNCTION other; CREATE FUNCTION other(e idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO done (topic, seq, what, attempt) VALUES ('other', (e).seq, (e).payload ->> 'do', (e).attempt) $$;
			ALTER FUNCTION other OWNER TO app} ],
	($node->pg_version >= 17 ? () : [ 'ALTER ROLE other NOLOGIN', 'role "other" is not permitted to log in', 'ALTER ROLE other LOGIN' ]),
	[ 'ALTER ROLE other SUPERUSER', 'owner "other" is a superuser', 'ALTER ROLE other NOSUPERUSER' ],
	[ 'REVOKE CONNECT ON DATABASE postgres FROM PUBLIC', 'role "other" has no CONNECT privilege on the database', 'GRANT CONNECT ON DATABASE postgres TO PUBLIC',
		'GRANT CONNECT ON DATABASE postgres TO app' ],
	[ 'ALTER ROLE other RENAME TO another', '42704: role "other" does not exist', 'ALTER ROLE another RENAME TO other' ])
{
	my ($there, $problem, $back, $first) = @$case;
	$unfit++;
	idle();
	# In one transaction, because the relay would report a state between two statements.
	$node->safe_psql('postgres', join '; ', 'BEGIN', $first // (), $there, 'COMMIT');
	publish('unfit', $unfit);
	becomes_true(qq{SELECT count(*) = $unfit FROM done WHERE topic = 'unfit'}, "$there: the other subscription is delivered");
	becomes_true(qq{SELECT last_error = \$p\$$problem\$p\$ FROM idempotency.subscriptions WHERE subscription = 'other'}, 'the subscription shows the reason');
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
becomes_true(q{SELECT last_error LIKE '42883: handler%' FROM idempotency.subscriptions WHERE subscription = 'other'}, 'a handler is dropped during a batch');
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
as_app(q{SELECT idempotency.alter_subscription('other', owner => 'app')});
publish('unfit', 'owner');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'owner'}, 'a subscription with a new owner continues');
idle();
as_app(q{SELECT idempotency.alter_subscription('other', handler => 0)});
publish('unfit', 'fetch');
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'unfit' AND what = 'fetch'}, 'a subscription without a handler is not delivered by the relay');
is(as_app(q{SELECT payload ->> 'do' FROM idempotency.fetch('other', lease => '1 s')}), 'fetch', 'a subscription without a handler can be fetched');
as_app(q{SELECT idempotency.alter_subscription('other', handler => 'other(idempotency.event)')});
becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'other' AND what = 'fetch' AND attempt = 2}, 'a batch that a consumer did not acknowledge is delivered to the handler after its lease');
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
is_quiet('subscriptions created and deleted', qr/deleted idempotency subscription/);
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

# ----------------------------------------------------------------
# Partitions and large events
# ----------------------------------------------------------------

# Eight partitions and four workers: aggregates in order, several at a time.
change_settings($node, 'idempotency.relay_workers' => 4);
as_app(q{SELECT idempotency.alter_subscription('all', partitions => 8);
	SELECT count(idempotency.publish('partitions', '{"do": "nap 0.02"}', 'A' || i % 40)) FROM generate_series(1, 400) AS i});
becomes_true(q{SELECT count(*) = 400 FROM done WHERE topic = 'partitions'}, 'all partitions are delivered');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(at) - min(at) < '7 s' FROM done WHERE topic = 'partitions'}), '400|t', 'once each, and several at a time');
is($node->safe_psql('postgres', q{SELECT count(*) FROM (SELECT d.seq, max(d.seq) OVER (PARTITION BY o.aggregateid ORDER BY n) AS last
	FROM done AS d JOIN idempotency.outbox AS o USING (seq) WHERE topic = 'partitions') AS o WHERE seq < last}), '0', 'each aggregate is in order');
change_settings($node, 'idempotency.relay_workers' => 2);
as_app(q{SELECT idempotency.alter_subscription('all', partitions => 1)});
$node->safe_psql('postgres', 'DELETE FROM done');
idle();

# A batch ends at a number of bytes.
$node->safe_psql('postgres', q{ALTER ROLE app SET idempotency.max_payload_size = '25MB'});
as_app(q{SELECT idempotency.publish('large', json_build_object('do', 'memory', 'filler', repeat('x', 20000000))) FROM generate_series(1, 10)});
becomes_true(q{SELECT count(*) = 10 FROM done WHERE topic = 'large'}, 'large events are handled');
cmp_ok($node->safe_psql('postgres', q{SELECT max(note::bigint) / 1048576 FROM done WHERE topic = 'large'}), '<', 150, 'and few of them are in memory');
$node->safe_psql('postgres', q{ALTER ROLE app RESET ALL; DELETE FROM done});
idle();

# More subscriptions with a handler than the server has slots: one is not served, the next
# one is refused, and slots are free again at once.
as_app(q{SELECT count(idempotency.subscribe('slot ' || i, ARRAY['none'], 'handle(idempotency.event)')) FROM generate_series(1, 256) AS i});
log_comes(qr/LOG:  idempotency relay does not serve further subscriptions/, 'the log tells that a subscription is not served');
like(fails_with_app(q{SELECT idempotency.subscribe('more', ARRAY['more'], 'handle(idempotency.event)')}), qr/too many subscriptions of the server have a handler/,
	'a further one is refused');
as_app(q{SELECT count(idempotency.unsubscribe('slot ' || i)) FROM generate_series(1, 256) AS i});
for (my $tries = 0; $tries < 10 * $PostgreSQL::Test::Utils::timeout_default; $tries++)
{
	last if $node->psql('postgres', q{SELECT idempotency.subscribe('more', ARRAY['more'], 'handle(idempotency.event)')}, extra_params => [ '--username', 'app' ]) == 0;
	usleep(100_000);
}
publish('more', 'x');
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'more'}, 'a subscription gets the slot of one that is gone');
as_app(q{SELECT idempotency.unsubscribe('more')});
idle();
$node->safe_psql('postgres', 'DELETE FROM done');
log_since();

# ----------------------------------------------------------------
# Terminated workers
# ----------------------------------------------------------------

# Before the handler has seen the unacknowledged batch. No event has failed, even if the
# batch has a single event with a single attempt.
as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r);
$node->safe_psql('postgres', 'DELETE FROM flag');
publish('between', [ 'await', 'nap 0.3', 'y' ]);
waits_in_handler();
publish('between', 'x');
change_settings($node, 'idempotency.relay_workers' => 0);
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
idle();
is($node->safe_psql('postgres', q{SELECT count(*) FROM done WHERE what IN ('x', 'y')}), '0', 'a worker exits between two transactions');
change_settings($node, 'idempotency.relay_workers' => 2);
becomes_true(q{SELECT count(*) = 4 FROM done}, 'the next worker delivers the remaining events');
is($node->safe_psql('postgres', q{SELECT max(attempt) FROM done}), '1', 'the remaining events are at their first attempt');

# While another transaction holds the partition, a worker cannot give its batch back. Three
# such ends in a row fail no event.
$node->safe_psql('postgres', 'DELETE FROM done; DELETE FROM flag');
publish('held', 'await');
foreach my $round (1 .. 3)
{
	$pid = waits_in_handler();
	$session = open_session($node);
	$session->query_safe(q{BEGIN; SELECT FROM idempotency.partition FOR UPDATE});
	$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
	$node->poll_query_until('postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)") or die;
	$session->query_safe('ROLLBACK');
	$session->quit;
	as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r); # a survey
}
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT (SELECT count(*) FROM done WHERE topic = 'held') + (SELECT count(*) FROM idempotency.dead_letters) = 1}, 'the event is handled, or a dead letter');
is($node->safe_psql('postgres', q{SELECT attempt FROM done WHERE topic = 'held'}), '1', 'a worker that ends while its partition is locked fails no event');

# Changes that are faster than surveys start one survey at a time.
cmp_ok(as_app(q{CREATE TEMPORARY TABLE surveys (n int);
	DO $$ BEGIN
		FOR i IN 1..200 LOOP
			PERFORM idempotency.pause('all'), idempotency.resume('all');
			COMMIT;
			INSERT INTO surveys SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency reaper';
			COMMIT;
		END LOOP;
	END $$;
	SELECT max(n) FROM surveys}), '==', 1, 'one survey at a time');
as_app($subscribe);
idle();
$node->safe_psql('postgres', 'DELETE FROM done; DELETE FROM flag');
log_since();

# ----------------------------------------------------------------
# Databases
# ----------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE second');
$node->safe_psql('second', q{CREATE EXTENSION idempotency; SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app');
	GRANT CREATE ON SCHEMA public TO app});
as_app($handlers, 'second');
as_app(q{SELECT idempotency.subscribe('t2', ARRAY['t2'], 'handle(idempotency.event)')}, 'second');

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
	SELECT count(idempotency.publish('endless', '{"do": "nap 0.05"}')) FROM generate_series(1, 4000)};
as_app($endless, 'second');
becomes_true(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, 'endless work', 'second');
is(($node->psql('postgres', 'CREATE DATABASE copy TEMPLATE second'))[2], '', 'CREATE DATABASE copies a database while events are delivered');
becomes_true(q{SELECT count(*) > (SELECT count(*) FROM idempotency.outbox) - 4100 AND EXISTS (SELECT FROM done WHERE topic = 'endless' AND at > pg_postmaster_start_time())
	FROM done WHERE topic = 'endless'}, 'the copy is served', 'copy');
is($node->safe_psql('copy', q{SELECT count(*) - count(DISTINCT seq) FROM done WHERE topic = 'endless'}), '0', 'each event of the copy is handled once');
becomes_true(q{SELECT count(*) > 5 FROM done WHERE topic = 'endless'}, "the database is being served", 'second');
is(($node->psql('postgres', "DROP DATABASE second"))[2], '', "DROP DATABASE while events are delivered");

# DROP DATABASE does not wait for the batch.
as_app(q{SELECT idempotency.unsubscribe('endless'); SELECT idempotency.subscribe('slow', ARRAY['slow'], 'handle(idempotency.event)')}, 'copy');
publish('slow', [ ('nap 1') x 60 ], dbname => 'copy');
becomes_true(q{SELECT EXISTS (SELECT FROM pg_stat_activity WHERE query = 'serving subscription "slow"' AND wait_event = 'PgSleep')}, 'a slow batch');
$began = time;
is(($node->psql('postgres', "DROP DATABASE copy"))[2], '', "DROP DATABASE during a slow batch");
cmp_ok(time - $began, '<', 30, 'DROP DATABASE does not wait for the batch');
is_quiet('databases', qr/deleted idempotency subscription|exited with exit code 1|terminating background worker|database .* does not exist/);

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
	# A handler is terminated within 1 s; the next survey, which wakes the launcher, can be
	# a minute away.
	foreach my $case ([ 'third', 'CREATE DATABASE copy TEMPLATE third' ], [ 'renamed', 'ALTER DATABASE third RENAME TO renamed' ],
		[ 'third', 'ALTER DATABASE renamed RENAME TO third' ])
	{
		my ($database, $statement) = @$case;
		is(($node->psql('postgres', "SET lock_timeout = '6s'; $statement"))[2], '', "$kind: $statement while a handler is called") or die;
		is($node->safe_psql($database, q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed after $statement") or die;
		worker_pid($node, 'idempotency relay', q{query LIKE 'serving%' AND wait_event = 'PgSleep' AND datname <> 'copy'});
	}
	is($node->safe_psql('copy', q{SELECT count(*) FROM idempotency.dead_letters}), '0', "$kind: no event has failed in the copy");
	if ($kind eq 'await')
	{
		$node->safe_psql($_, q{INSERT INTO flag VALUES ('go')}) foreach 'third', 'copy';
		as_app($subscribe =~ s/max_attempts => 3/max_attempts => 1/r, 'copy'); # a regular survey comes within a minute
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
is_quiet('DROP EXTENSION', qr/deleted idempotency subscription/);
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
# No worker comes between the restore of the events and that of their sequence
$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", 'restored' ], 'restore');
change_settings($node, 'idempotency.relay_workers' => 2);
becomes_true(q{SELECT count(*) = 2 FROM done WHERE topic = 'restored'}, 'the original continues');
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
stops('immediate', 2);

# A single event: a shutdown counts no attempt, and a crash counts one for the batch.
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
	becomes_true(q{SELECT count(*) = 1 FROM done WHERE topic = 'alone'}, "a single event is handled after shutdown $mode");
	is($node->safe_psql('postgres', q{SELECT attempt FROM done WHERE topic = 'alone'}), $attempt, "a single event after shutdown $mode is at attempt $attempt");
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
$node->safe_psql('postgres', q{INSERT INTO flag VALUES ('go')});
becomes_true(q{SELECT count(*) = 71 FROM done WHERE topic = 'crash'}, 'all events are handled after the crash');
is($node->safe_psql('postgres', q{SELECT count(DISTINCT seq), max(attempt) FROM done WHERE topic = 'crash'}), '71|2', 'each event is handled once after the crash');

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
