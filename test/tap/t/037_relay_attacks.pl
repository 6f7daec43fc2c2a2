# 037_relay_attacks.pl
#
# Proves that no handler can become another role or a superuser, even if its owner is a
# member of one: not directly, and not through work that it leaves for the commit, the
# next event, or the next worker. A handler cannot take a subscription from its owner.
# Roles that cannot act as that owner cannot choose the code that runs. State that a
# handler leaves in the session affects no other event.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use LogTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '1h'
max_prepared_transactions = 5
log_statement = none
});
watch_log($node);

# as_app runs SQL as the owner of the subscriptions, with safe settings.
sub as_app
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '--username', 'app' ]);
}

# becomes waits until a query of the superuser returns true.
sub becomes
{
	my ($query, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return ok($node->poll_query_until('postgres', $query), $name) || diag($node->safe_psql('postgres', 'TABLE seen; TABLE idempotency.parked; TABLE idempotency.subscriptions'));
}

# Table "seen" logs which role ran what, during which event; boss is a superuser, and app can
# SET ROLE to boss.
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE friend LOGIN;
	CREATE ROLE stranger LOGIN;
	CREATE ROLE boss SUPERUSER;
	GRANT friend, boss TO app;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app'), idempotency.grant_consumer('stranger');
	CREATE TABLE seen (n int GENERATED ALWAYS AS IDENTITY, event text DEFAULT current_setting('my.event', true), what text, who name DEFAULT current_user,
		login name DEFAULT session_user, super text DEFAULT current_setting('is_superuser'), refused text);
	CREATE TABLE handled (event text);
	GRANT ALL ON seen, handled TO PUBLIC;
	CREATE SCHEMA app AUTHORIZATION app;
	GRANT CREATE ON SCHEMA public TO app});
as_app(q{
	-- Tries to become boss in every way that a statement can, and stores the role.
	CREATE FUNCTION app.climb(what text) RETURNS int LANGUAGE plpgsql AS $$
	DECLARE
		try text;
		states text := '';
	BEGIN
		FOREACH try IN ARRAY ARRAY['SET ROLE boss', 'SET LOCAL ROLE boss', 'SET SESSION AUTHORIZATION boss', 'RESET ROLE', 'RESET SESSION AUTHORIZATION',
			'SET ROLE NONE', 'SELECT set_config(''role'', ''boss'', false)', 'SELECT set_config(''session_authorization'', ''boss'', true)', 'DISCARD ALL']
		LOOP
			BEGIN
				EXECUTE try;
				states := states || ' done: ' || try;
			EXCEPTION WHEN OTHERS THEN
				states := states || ' ' || SQLSTATE;
			END;
		END LOOP;
		INSERT INTO public.seen (what, refused) VALUES (what, states);
		RETURN 1;
	END $$;
	CREATE FUNCTION app.by_definer() RETURNS int LANGUAGE sql SECURITY DEFINER AS $$ SELECT app.climb('a SECURITY DEFINER function') $$;
	CREATE TABLE app.late (i int);
	CREATE FUNCTION app.late() RETURNS trigger LANGUAGE plpgsql AS $$
	BEGIN
		IF new.i > 0 THEN
			INSERT INTO app.late VALUES (new.i - 1);
		END IF;
		PERFORM app.climb('a deferred trigger, ' || new.i);
		RETURN NULL;
	END $$;
	CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.late DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.late();
	CREATE FUNCTION app.indexed(i int) RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$ BEGIN RETURN app.climb('an index') + i; END $$;
	CREATE TABLE app.indexed (i int);
	CREATE INDEX ON app.indexed (app.indexed(i));
	CREATE TABLE app.lazy (i int, CONSTRAINT once UNIQUE (i) DEFERRABLE INITIALLY DEFERRED, j int GENERATED ALWAYS AS (app.indexed(i)) STORED);
	CREATE FUNCTION app.handle(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM set_config('my.event', e.type, false), set_config('my.batch', e.batch::text, false);
		EXECUTE e.payload ->> 'do';
		PERFORM app.climb('a handler');
		INSERT INTO public.handled VALUES (e.type);
	END $$;
	CREATE FUNCTION app.later(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM app.climb('another handler'); END $$;
	SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', max_attempts => 1);
	SELECT idempotency.subscribe('other', '{other}', 'app.later(idempotency.event)')});
$node->safe_psql('postgres', q{SET ROLE stranger; SELECT idempotency.subscribe('stranger', '{none}')});

# happen publishes events, each with its name and the SQL that the handler runs, in one
# transaction, and waits until each was handled or is a dead letter.
sub happen
{
	my @events = @_;
	my $values = join ', ', map { "(\$n\$$_->[0]\$n\$, \$s\$$_->[1]\$s\$)" } @events;
	my $number = @events;

	$node->safe_psql('postgres', 'DELETE FROM handled; DELETE FROM idempotency.parked; DELETE FROM seen');
	as_app(qq{SELECT count(idempotency.publish('do', json_build_object('do', statement), type => name)) FROM (VALUES $values) AS v (name, statement)});
	$node->poll_query_until('postgres', qq{SELECT (SELECT count(*) FROM handled) + (SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'app') = $number})
	  or die "not handled: $values";
	return;
}

# only_app_ran checks that everything ran as app, with its own privileges.
sub only_app_ran
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($node->safe_psql('postgres', q{SELECT string_agg(format('%s, %s: %s %s %s%s', event, what, who, login, super, refused), E'\n')
		FROM seen WHERE who <> 'app' OR login <> 'app' OR super <> 'off' OR refused LIKE '%done%'}), '', "$name: only app has run");
	is($node->safe_psql('postgres', q{SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = 'app'}), 'f|f', "$name: app has no additional privileges");
	return;
}

# idle waits until no worker is connected.
sub idle
{
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die 'workers do not exit';
	return;
}

# ----------------------------------------------------------------
# Privilege escalation
# ----------------------------------------------------------------

# How often climb() must run, including the handler's own call. A WITH HOLD cursor is closed
# before the commit that would run it.
my @climbs = (
	[ 'the call itself', 'SELECT 1', 1 ],
	[ 'a SECURITY DEFINER function', 'SELECT app.by_definer()', 2 ],
	[ 'triggers that are deferred again, to the commit', 'INSERT INTO app.late VALUES (3)', 5 ],
	[ 'a trigger deferred by a new trigger', q{CREATE TABLE app.fresh (i int);
		CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.fresh DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.late();
		INSERT INTO app.fresh VALUES (2)}, 4 ],
	[ 'a cursor WITH HOLD', q{DECLARE up CURSOR WITH HOLD FOR SELECT app.climb('a cursor')}, 1 ],
	[ 'a cursor of a cursor', q{DECLARE a CURSOR WITH HOLD FOR SELECT app.by_definer(); DECLARE b SCROLL CURSOR WITH HOLD FOR SELECT app.climb('b')}, 1 ],
	[ 'a generated column, and a deferred constraint', 'INSERT INTO app.lazy VALUES (1)', 2 ],
	[ 'an index', 'INSERT INTO app.indexed VALUES (1); CREATE INDEX ON app.indexed (app.indexed(i + 1))', 3 ],
	[ 'a temporary table ON COMMIT', q{CREATE TEMPORARY TABLE t (i int) ON COMMIT DELETE ROWS; CREATE INDEX ON t (app.indexed(i)); INSERT INTO t VALUES (1)}, 2 ],
	[ 'a prepared statement', q{PREPARE up AS SELECT app.climb('prepared'); EXECUTE up}, 2 ],
	[ 'a policy', q{CREATE TABLE app.secret (i int); ALTER TABLE app.secret ENABLE ROW LEVEL SECURITY; ALTER TABLE app.secret FORCE ROW LEVEL SECURITY;
		CREATE POLICY p ON app.secret WITH CHECK (app.climb('policy') > 0); INSERT INTO app.secret VALUES (1)}, 2 ]);
happen(@climbs);
only_app_ran('handlers');
is($node->safe_psql('postgres', q{SELECT event, count(*) FROM seen GROUP BY event ORDER BY min(n)}), join("\n", map { "$_->[0]|$_->[2]" } @climbs), 'what handlers and their deferred work run');

# A forbidden action is an error of its event, and of no other. A subscription belongs to its
# owner, whatever other roles do.
my %denied = (
	q{CREATE FUNCTION app.up() RETURNS int LANGUAGE sql SET role = 'boss' AS 'SELECT app.climb(''SET'')'; SELECT app.up()} => '42501',
	q{SET CONSTRAINTS ALL DEFERRED} => '0A000',
	q{SET idempotency.scope_prefix = ''} => '42501',
	q{SET idempotency.handler_timeout = 0} => '42501',
	q{SET session_replication_role = replica} => '42501',
	q{ALTER ROLE app SUPERUSER} => '42501',
	q{DROP EXTENSION idempotency} => '42501',
	q{CREATE FUNCTION idempotency.claim(text) RETURNS int LANGUAGE sql AS 'SELECT 1'} => '42501',
	q{PREPARE TRANSACTION 'up'} => '0A000',
	q{ROLLBACK} => '0A000',
	q{SET TRANSACTION ISOLATION LEVEL SERIALIZABLE} => '25001',
	q{UPDATE idempotency.subscription SET owner = 'boss'} => '42501',
	q{UPDATE idempotency.position SET base = NULL} => '42501',
	q{SELECT idempotency.alter_subscription('app', owner => 'boss')} => '42501',
	q{SELECT idempotency.alter_subscription('app', owner => 'stranger')} => '42501',
	q{SELECT idempotency.subscribe('stranger', '{do}')} => '42501',
	q{SELECT idempotency.unsubscribe('stranger')} => '42501',
	q{SELECT idempotency.fetch('stranger')} => '42501',
	q{SELECT idempotency.ack('app', current_setting('my.batch')::bigint)} => 'IK408', # then the worker's own is refused
	q{SELECT idempotency.ack('app', 1)} => 'IK408',
	q{SELECT idempotency.grant_operator('app')} => '42501',
	q{SELECT * FROM idempotency.dead_letters} => '42501');
happen(map { [ $_, $_ ] } sort keys %denied);
my %errors = map { split /\|/, $_, 2 } split /\n/, $node->safe_psql('postgres', q{SELECT payload ->> 'do', substr(error, 1, 5) FROM idempotency.dead_letters});
is_deeply(\%errors, \%denied, 'what handlers are denied');
is($node->safe_psql('postgres', 'SELECT count(*) FROM seen'), '0', 'nothing of a failed event is left');
is($node->safe_psql('postgres', q{SELECT string_agg(owner || ' ' || coalesce(handler, ''), ', ' ORDER BY subscription) FROM idempotency.subscription}),
	'app app.handle(idempotency.event), app app.later(idempotency.event), stranger ', 'the subscriptions keep their owners');

# ----------------------------------------------------------------
# State for the next event and the next worker
# ----------------------------------------------------------------

# In one batch: each second event must not find state of the one before. An exception is a
# temporary type that shadows a type in a PL/pgSQL function without a fixed search path:
# the function is compiled once in a session, here as in any other session.
my $found = q{INSERT INTO public.seen (what) SELECT concat_ws(' ', 'found', current_setting('search_path'), nullif(current_setting('my.own', true), ''),
	current_setting('transaction_read_only'),
	current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('default_transaction_deferrable'),
		current_setting('row_security'), current_setting('check_function_bodies'),
	(SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()), (SELECT count(*) FROM pg_proc WHERE pronamespace = pg_my_temp_schema()),
	(SELECT count(*) FROM pg_type WHERE typnamespace = pg_my_temp_schema()),
	(SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_cursors))};
my @left = (
	q{SET search_path = app}, q{SET my.own = 'left'}, q{SET LOCAL my.own = 'left'}, q{SET statement_timeout = '1ms'}, q{SET lock_timeout = '1ms'},
	q{SET SESSION CHARACTERISTICS AS TRANSACTION DEFERRABLE, READ ONLY}, q{SET row_security = off}, q{SET check_function_bodies = off},
	q{CREATE TEMPORARY TABLE subscription (subscription text)}, q{CREATE TEMPORARY VIEW position AS SELECT 1}, q{CREATE TEMPORARY SEQUENCE outbox_seq},
	q{CREATE DOMAIN pg_temp.uuid AS pg_catalog.uuid CHECK (false)}, q{CREATE TYPE pg_temp.event AS (batch int)},
	q{CREATE FUNCTION pg_temp.climb(text) RETURNS int LANGUAGE sql AS 'SELECT 1'}, q{CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'},
	q{PREPARE p AS SELECT 1}, q{DECLARE c CURSOR FOR SELECT 1}, q{SET transaction_read_only = on});
happen(map { ([ $_, $_ ], [ "after $_", $found ]) } @left);
is($node->safe_psql('postgres', q{SELECT string_agg(event || ': ' || what, E'\n') FILTER (WHERE what <> 'found "$user", public off 0 0 off on on 0 0 0 0 0'), count(*)
	FROM seen WHERE what LIKE 'found%'}), '|' . @left, 'no event finds what another one has left');
only_app_ran('state');

# Settings of the role, for the next session; none applies to the login itself.
happen(map { [ $_, "ALTER ROLE app SET $_" ] } q{role = 'boss'}, q{session_authorization = 'boss'}, q{search_path = 'app, public'});
idle();
{
	local $ENV{PGOPTIONS} = '-c role=none';
	happen([ 'the next worker', 'SELECT 1' ]);
}
is($node->safe_psql('postgres', 'SELECT count(*) FROM handled'), 1, 'a worker handles events after settings of its role');
only_app_ran('settings of the role');
$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');

# The handler transfers the subscription to another role, which its owner is a member
# of. Then that role runs the handler.
happen([ 'transfer', q{GRANT USAGE ON SCHEMA app TO friend; SELECT idempotency.alter_subscription('app', owner => 'friend')} ], [ 'as friend', 'SELECT 1' ]);
is($node->safe_psql('postgres', q{SELECT DISTINCT who, login, super FROM seen WHERE event = 'as friend'}), 'friend|friend|off', 'the handler runs as the new owner');

# Breaking itself affects only the subscription of the handler.
as_app(q{SELECT idempotency.alter_subscription('app', owner => 'app')});
happen([ 'drop', 'DROP FUNCTION app.handle(idempotency.event)' ]);
as_app(q{SELECT idempotency.publish('do', '{"do": "SELECT 1"}'), idempotency.publish('other', '{}')});
becomes(q{SELECT last_error LIKE '42883: handler app.handle%' FROM idempotency.subscriptions WHERE subscription = 'app'}, 'the subscription reports a handler that dropped itself');
becomes(q{SELECT count(*) > 0 FROM seen WHERE what = 'another handler'}, 'another subscription continues');

# Handlers are stored by name: another role can create a function under the name of a
# dropped one, but it is not the owner of the subscription.
$node->safe_psql('postgres', q{GRANT USAGE, CREATE ON SCHEMA app TO friend; SELECT idempotency.grant_consumer('friend');
	SET ROLE friend; CREATE FUNCTION app.handle(idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO public.seen (what) VALUES ('in its place') $$});
becomes(q{SELECT last_error LIKE '42501: owner "friend" of handler app.handle%' FROM idempotency.subscriptions WHERE subscription = 'app'}, 'a replacement function of another owner is not called');
is($node->safe_psql('postgres', q{SELECT count(*) FROM seen WHERE what = 'in its place'}), '0', 'the replacement has not run');
$node->safe_psql('postgres', q{ALTER FUNCTION app.handle(idempotency.event) OWNER TO app});
becomes(q{SELECT count(*) = 1 AND min(who) = 'app' FROM seen WHERE what = 'in its place'}, 'the replacement is called once the owner of the subscription owns it');

# ----------------------------------------------------------------
# Former members
# ----------------------------------------------------------------

# guest owns a handler, and was a member of the subscription's owner.
$node->safe_psql('postgres', q{DELETE FROM seen; CREATE ROLE guest NOINHERIT; GRANT app TO guest; SELECT idempotency.grant_consumer('guest'); GRANT USAGE, CREATE ON SCHEMA app TO guest});

# guest_has replaces the body of the function, as guest.
sub guest_has
{
	my ($body, $options) = @_;
	$options //= '';
	return $node->safe_psql('postgres', qq{SET ROLE guest; CREATE OR REPLACE FUNCTION app.guest(e idempotency.event) RETURNS void LANGUAGE plpgsql
		$options AS \$\$ BEGIN $body; END \$\$});
}

# pauses waits until the subscription pauses because guest is no member. Only the given events
# have been handled, and no attempt is counted.
my $pauses = 0;

sub pauses
{
	my ($name, $handled) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$pauses++;
	becomes(q{SELECT last_error LIKE '42501: owner "guest" of handler app.guest(idempotency.event) does not have the privileges of role "app"%'
		FROM idempotency.subscriptions WHERE subscription = 'guest'}, "$name: the subscription pauses");
	is($node->safe_psql('postgres', q{SELECT (SELECT string_agg(what, ', ') FROM seen), count(*) FROM idempotency.parked WHERE subscription = 'guest'}), "$handled|0", "$name: nothing else has run, or failed");
	return;
}

# resumes makes guest a member again, and waits until so many events have been handled.
sub resumes
{
	my ($name, $count) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->safe_psql('postgres', q{GRANT app TO guest});
	becomes(qq{SELECT count(*) = $count AND bool_and(what = 'guest' AND refused = '1') FROM seen}, "$name: the subscription resumes once guest is a member");
	$node->safe_psql('postgres', q{DELETE FROM seen});
	return;
}
my $good = q{INSERT INTO public.seen (what, refused) VALUES ('guest', e.attempt)};
my $evil = q{INSERT INTO public.seen (what, refused) VALUES ('stolen', e.attempt)};

guest_has($good);
as_app(q{SELECT idempotency.subscribe('guest', '{guest}', 'app.guest(idempotency.event)')});
as_app(q{SELECT idempotency.publish('guest', '{}')});
becomes(q{SELECT count(*) = 1 FROM seen}, "a member's function is a handler, though it does not inherit");
idle();

$node->safe_psql('postgres', 'DELETE FROM seen; REVOKE app FROM guest');
guest_has($evil);
as_app(q{SELECT idempotency.publish('guest', '{}') FROM generate_series(1, 2)});
pauses('no worker runs', '');
like(($node->psql('postgres', q{SELECT idempotency.subscribe('another', '{guest}', 'app.guest(idempotency.event)')}, extra_params => [ '--username', 'app' ]))[2],
	qr/ERROR:  owner "guest" of handler app\.guest\(idempotency\.event\) does not have the privileges of role "app"/, 'subscribe() rejects the handler');
guest_has($good);
resumes('no worker runs', 2);

# While an event is handled, for two kinds of functions: the next transaction must not run the
# new body.
foreach my $options ('', 'SECURITY INVOKER SET search_path = pg_catalog')
{
	guest_has("$good; PERFORM pg_advisory_xact_lock(9)", $options);
	my $session = open_session($node);
	$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(9)');
	as_app(q{SELECT idempotency.publish('guest', '{}') FROM generate_series(1, 3)});
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 9 AND NOT granted}) or die;
	$node->safe_psql('postgres', 'REVOKE app FROM guest');
	guest_has($evil, $options);
	$session->query_safe('SELECT pg_sleep(0.5)'); # the transaction ends after this event
	$session->query_safe('COMMIT');
	$session->quit;
	pauses("during a batch $options", 'guest');
	guest_has($good, $options);
	resumes("during a batch $options", 3);
}

# A handler that changes its own owner is not called again.
$node->safe_psql('postgres', 'ALTER FUNCTION app.guest(idempotency.event) OWNER TO app');
as_app(q{CREATE OR REPLACE FUNCTION app.guest(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN ALTER FUNCTION app.guest(idempotency.event) OWNER TO friend; END $$;
	SELECT idempotency.alter_subscription('guest', max_attempts => 1);
	SELECT idempotency.publish('guest', '{}')});
becomes(q{SELECT count(*) > 0 FROM pg_proc WHERE oid = 'app.guest(idempotency.event)'::regprocedure AND proowner = 'friend'::regrole}, 'a handler changes its own owner');
as_app(q{SELECT idempotency.publish('guest', '{}')});
becomes(q{SELECT last_error LIKE '42501: owner "friend" of handler app.guest%' FROM idempotency.subscriptions WHERE subscription = 'guest'},
	'a handler that has changed its own owner is not called again');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'guest'}), '0', 'no event has failed');

# The log has each problem once, however often a worker has tried since.
$node->stop;
my $log = log_since();
is(scalar(() = $log =~ /cannot serve subscription "guest".*\n.*DETAIL:  42501: owner "guest"/g), $pauses, 'the log reports each pause once');
unlike($log, qr/PANIC:|TRAP:|terminated by signal|\bXX\d{3}\b/, 'the log has no unexpected message');
done_testing();
