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
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '1h'
max_prepared_transactions = 5
log_statement = none
});

# as_app runs SQL as the owner of the subscriptions, with safe settings.
sub as_app
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '--username', 'app' ]);
}

# Table "seen" logs which role ran what; boss is a superuser, and app can SET ROLE to
# boss.
$node->safe_psql('postgres', q{
	CREATE ROLE app LOGIN;
	CREATE ROLE friend LOGIN;
	CREATE ROLE stranger LOGIN;
	CREATE ROLE boss SUPERUSER;
	GRANT friend, boss TO app;
	SELECT idempotency.grant_client('app'), idempotency.grant_consumer('app'), idempotency.grant_consumer('stranger');
	CREATE TABLE seen (n int GENERATED ALWAYS AS IDENTITY, what text, who name DEFAULT current_user, login name DEFAULT session_user,
		super text DEFAULT current_setting('is_superuser'), refused text);
	GRANT ALL ON seen TO PUBLIC;
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
		EXECUTE e.payload ->> 'do';
		PERFORM app.climb('a handler');
	END $$;
	CREATE FUNCTION app.later(e idempotency.event) RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM app.climb('another handler'); END $$;
	SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', max_attempts => 1);
	SELECT idempotency.subscribe('other', '{other}', 'app.later(idempotency.event)')});
$node->safe_psql('postgres', q{SET ROLE stranger; SELECT idempotency.subscribe('stranger', '{none}')});

# happens publishes an event that makes the handler run SQL, and waits until it was
# handled or is a dead letter. Returns the SQLSTATE of its error, or ''.
sub happens
{
	my ($sql) = @_;
	my $id = as_app(qq{SELECT idempotency.publish('do', json_build_object('do', \$sql\$$sql\$sql\$))});

	$node->poll_query_until('postgres', q{SELECT lag_events = 0 AND batch_leased_at IS NULL FROM idempotency.subscriptions WHERE subscription = 'app'})
	  or die "not handled: $sql";
	return $node->safe_psql('postgres', "SELECT substr(error, 1, 5) FROM idempotency.dead_letters WHERE event_id = '$id'");
}

# only_app_ran checks that everything ran as app with its own privileges, and how many
# calls ran, such as "==" 2 or ">=" 1.
sub only_app_ran
{
	my ($name, $compare, $count) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $others = $node->safe_psql('postgres', q{SELECT string_agg(format('%s: %s %s %s%s', what, who, login, super, refused), E'\n')
		FROM seen WHERE who <> 'app' OR login <> 'app' OR super <> 'off' OR refused LIKE '%done%'});

	is($others, '', "$name: runs as app");
	cmp_ok($node->safe_psql('postgres', 'WITH s AS (DELETE FROM seen RETURNING *) SELECT count(*) FROM s'), $compare, $count, "$name: the number of calls");
	is($node->safe_psql('postgres', q{SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = 'app'}), 'f|f', "$name: app has no additional privileges");
}

# ----------------------------------------------------------------
# Privilege escalation
# ----------------------------------------------------------------

# The SQL, and how often climb() must have run, including the handler's own call. A WITH
# HOLD cursor is closed before the commit that would run it.
foreach my $case (
	[ 'the call itself', 'SELECT 1', 1 ],
	[ 'a SECURITY DEFINER function', 'SELECT app.by_definer()', 2 ],
	[ 'a deferred trigger', 'INSERT INTO app.late VALUES (0)', 2 ],
	[ 'triggers that are deferred again, to the commit', 'INSERT INTO app.late VALUES (3)', 5 ],
	[ 'a trigger deferred by a new trigger', q{CREATE TABLE app.fresh (i int);
		CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.fresh DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION app.late();
		INSERT INTO app.fresh VALUES (2)}, 4 ],
	[ 'a cursor WITH HOLD, which the commit would run', q{DECLARE up CURSOR WITH HOLD FOR SELECT app.climb('a cursor')}, 1 ],
	[ 'a cursor of a cursor', q{DECLARE a CURSOR WITH HOLD FOR SELECT app.by_definer(); DECLARE b SCROLL CURSOR WITH HOLD FOR SELECT app.climb('b')}, 1 ],
	[ 'an index', 'INSERT INTO app.indexed VALUES (1)', 2 ],
	[ 'a generated column, and a deferred constraint', 'INSERT INTO app.lazy VALUES (1)', 2 ],
	[ 'a new index, on one row', 'CREATE INDEX ON app.indexed (app.indexed(i + 1))', 2 ],
	[ 'a temporary table ON COMMIT', q{CREATE TEMPORARY TABLE t (i int) ON COMMIT DELETE ROWS; CREATE INDEX ON t (app.indexed(i)); INSERT INTO t VALUES (1)}, 2 ],
	[ 'a DO block', q{DO $do$ BEGIN PERFORM app.climb('do'); END $do$}, 2 ],
	[ 'a prepared statement', q{PREPARE up AS SELECT app.climb('prepared'); EXECUTE up}, 2 ],
	[ 'a policy', q{CREATE TABLE app.secret (i int); ALTER TABLE app.secret ENABLE ROW LEVEL SECURITY; ALTER TABLE app.secret FORCE ROW LEVEL SECURITY;
		CREATE POLICY p ON app.secret WITH CHECK (app.climb('policy') > 0); INSERT INTO app.secret VALUES (1)}, 2 ])
{
	my ($name, $sql, $count) = @$case;
	my $error = happens($sql);
	is($error, '', "$name: is handled");
	only_app_ran($name, '==', $count);
}

# A forbidden action is an error of its event, and of no other.
foreach my $case (
	[ q{CREATE FUNCTION app.up() RETURNS int LANGUAGE sql SET role = 'boss' AS 'SELECT app.climb(''SET'')'; SELECT app.up()}, '42501' ],
	[ q{SET session_replication_role = replica}, '42501' ],
	[ q{SET CONSTRAINTS ALL DEFERRED}, '0A000' ],
	[ q{SET idempotency.scope_prefix = ''}, '42501' ],
	[ q{SET idempotency.handler_timeout = 0}, '42501' ],
	[ q{ALTER ROLE app SUPERUSER}, '42501' ],
	[ q{ALTER SYSTEM SET idempotency.relay_workers = 0}, '25001|42501' ],
	[ q{COPY app.late FROM PROGRAM 'echo 1'}, '42501' ],
	[ q{SELECT pg_read_file('postgresql.conf')}, '42501' ],
	[ q{LOAD 'plpgsql'}, '42501' ],
	[ q{CREATE EVENT TRIGGER up ON ddl_command_end EXECUTE FUNCTION app.nothing()}, '42501|42883' ],
	[ q{CREATE FUNCTION app.c() RETURNS int LANGUAGE c AS '$libdir/idempotency', 'idempotency_stats'}, '42501' ],
	[ q{DROP EXTENSION idempotency}, '42501' ],
	[ q{CREATE FUNCTION idempotency.claim(text) RETURNS int LANGUAGE sql AS 'SELECT 1'}, '42501' ],
	[ q{PREPARE TRANSACTION 'up'}, '0A000' ],
	[ q{ROLLBACK}, '0A000|2D000' ],
	[ q{SET TRANSACTION ISOLATION LEVEL SERIALIZABLE}, '25001' ],
	[ q{VACUUM app.late}, '25001' ],
	# A subscription belongs to its owner, whatever other roles do.
	[ q{UPDATE idempotency.subscription SET owner = 'boss'}, '42501' ],
	[ q{UPDATE idempotency.position SET passed = 0}, '42501' ],
	[ q{SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', owner => 'boss')}, '42501' ],
	[ q{SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', owner => 'stranger')}, '42501' ],
	[ q{SELECT idempotency.subscribe('stranger', '{do}')}, '42501' ],
	[ q{SELECT idempotency.unsubscribe('stranger')}, '42501' ],
	[ q{SELECT idempotency.fetch('stranger')}, '42501' ],
	[ q{SELECT idempotency.fetch('app')}, '55000' ],
	[ q{SELECT idempotency.ack('app', batch) FROM idempotency.position}, '42501' ],
	[ q{SELECT idempotency.ack('app', 1)}, '55000' ],
	[ q{SELECT idempotency.nack('app', 1, NULL)}, '55000' ],
	[ q{SELECT idempotency.grant_operator('app')}, '42501' ],
	[ q{SELECT * FROM idempotency.dead_letters}, '42501' ])
{
	my ($sql, $state) = @$case;
	like(happens($sql), qr/^(?:$state)$/, "denied: $sql");
}
only_app_ran('denied actions', '==', 0);
is($node->safe_psql('postgres', q{SELECT string_agg(owner || ' ' || coalesce(handler, ''), ', ' ORDER BY subscription) FROM idempotency.subscription}),
	'app app.handle(idempotency.event), app app.later(idempotency.event), stranger ', 'the subscriptions keep their owners');
$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');

# ----------------------------------------------------------------
# State for the next event and the next worker
# ----------------------------------------------------------------

# In one batch: the second event must not find state of the first. An exception is a
# temporary type that shadows a type in a PL/pgSQL function without a fixed search path:
# the function is compiled once in a session, here as in any other session.
my $found = q{INSERT INTO public.seen (what) SELECT concat_ws(' ', current_setting('search_path'), nullif(current_setting('my.own', true), ''),
	current_setting('transaction_read_only'),
	current_setting('statement_timeout'), current_setting('lock_timeout'), current_setting('default_transaction_deferrable'),
		current_setting('row_security'), current_setting('check_function_bodies'),
	(SELECT count(*) FROM pg_class WHERE relnamespace = pg_my_temp_schema()), (SELECT count(*) FROM pg_proc WHERE pronamespace = pg_my_temp_schema()),
	(SELECT count(*) FROM pg_type WHERE typnamespace = pg_my_temp_schema()))};
foreach my $leave (
	q{SET search_path = app}, q{SET my.own = 'left'}, q{SET LOCAL my.own = 'left'}, q{SET statement_timeout = '1ms'}, q{SET lock_timeout = '1ms'},
	q{SET SESSION CHARACTERISTICS AS TRANSACTION DEFERRABLE, READ ONLY}, q{SET transaction_read_only = on}, q{SET row_security = off}, q{SET check_function_bodies = off},
	q{CREATE TEMPORARY TABLE subscription (subscription text)}, q{CREATE TEMPORARY VIEW position AS SELECT 1}, q{CREATE TEMPORARY SEQUENCE outbox_seq},
	q{CREATE DOMAIN pg_temp.uuid AS pg_catalog.uuid CHECK (false)}, q{CREATE TYPE pg_temp.event AS (batch int)},
	q{CREATE FUNCTION pg_temp.climb(text) RETURNS int LANGUAGE sql AS 'SELECT 1'}, q{CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'})
{
	as_app("SELECT idempotency.publish('do', json_build_object('do', sql)) FROM unnest(ARRAY[\$x\$$leave\$x\$, \$x\$$found\$x\$]) AS sql");
	$node->poll_query_until('postgres', q{SELECT lag_events = 0 AND batch_leased_at IS NULL FROM idempotency.subscriptions WHERE subscription = 'app'}) or die;
	is($node->safe_psql('postgres', q{SELECT what FROM seen WHERE what NOT LIKE 'a %'}), '"$user", public off 0 0 off on on 0 0 0', "left: $leave");
	only_app_ran("left: $leave", '>=', 1);
}

# Settings of the role, for the next session; none applies to the login itself.
foreach my $setting (q{role = 'boss'}, q{session_authorization = 'boss'}, q{search_path = 'app, public'}, q{session_replication_role = 'replica'})
{
	my $error = happens("ALTER ROLE app SET $setting");
	like($error, qr/^(?:42501)?$/, "a handler sets $setting for its role");
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die;
	local $ENV{PGOPTIONS} = '-c role=none';
	is(happens('SELECT 1'), '', 'the next worker handles events');
	only_app_ran("after $setting", '>=', 1);
	$node->safe_psql('postgres', 'ALTER ROLE app RESET ALL');
}

# The handler transfers the subscription to another role, which its owner is a member
# of. Then that role runs the handler.
is(happens(q{GRANT USAGE ON SCHEMA app TO friend; SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', owner => 'friend',
	max_attempts => 1)}), '',
	'a handler transfers its subscription to a role of which the owner is a member');
$node->safe_psql('postgres', 'DELETE FROM seen');
happens('SELECT 1');
is($node->safe_psql('postgres', 'SELECT DISTINCT who, login, super FROM seen'), 'friend|friend|off', 'the handler runs as the new owner');

# A handler that breaks itself affects only its own subscription.
as_app(q{SELECT idempotency.subscribe('app', '{do}', 'app.handle(idempotency.event)', owner => 'app', max_attempts => 1)});
happens('DROP FUNCTION app.handle(idempotency.event)');
as_app(q{SELECT idempotency.publish('do', '{"do": "SELECT 1"}'), idempotency.publish('other', '{}')});
ok($node->poll_query_until('postgres', q{SELECT last_error LIKE '42883: handler app.handle%' FROM idempotency.subscription WHERE subscription = 'app'}),
	'the subscription reports a handler that dropped itself');
ok($node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM seen WHERE what = 'another handler'}), 'another subscription continues');

# Handlers are stored by name: another role can create a function under the name of a
# dropped one, but it is not the owner of the subscription.
$node->safe_psql('postgres', q{GRANT USAGE, CREATE ON SCHEMA app TO friend; SELECT idempotency.grant_consumer('friend');
	SET ROLE friend; CREATE FUNCTION app.handle(idempotency.event) RETURNS void LANGUAGE sql AS $$ INSERT INTO public.seen (what) VALUES ('in its place') $$});
ok($node->poll_query_until('postgres', q{SELECT last_error LIKE '42501: owner "friend" of handler app.handle%' FROM idempotency.subscription WHERE subscription = 'app'}),
	'a replacement function of another owner is not called');
$node->safe_psql('postgres', q{ALTER FUNCTION app.handle(idempotency.event) OWNER TO app});
ok($node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM seen WHERE what = 'in its place' AND who = 'app'}), 'the replacement is called once the owner of the subscription owns it');

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

# is_paused waits until the subscription pauses because guest is no member. The log reports
# each pause once. No event has failed, no attempt is counted, and only the given events have
# been handled.
my $pauses = 0;

sub is_paused
{
	my ($name, $handled) = @_;
	$handled //= '';
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok($node->poll_query_until('postgres', q{SELECT last_error LIKE '42501: owner "guest" of handler app.guest(idempotency.event) does not have the privileges of role "app"%'
		FROM idempotency.subscription WHERE subscription = 'guest'}), "$name: the subscription pauses");
	is(scalar(() = slurp_file($node->logfile) =~ /cannot serve subscription.*\n.*DETAIL:  42501: owner "guest"/g), ++$pauses, "$name: the log reports it once");
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.parked WHERE subscription = 'guest'}), '0', "$name: no event has failed");
	is($node->safe_psql('postgres', q{SELECT string_agg(what, ', ') FROM seen}), $handled, "$name: nothing else has run");
}

# is_resumed makes guest a member again, and waits until so many events have been
# handled. The worker forgets the problem after its commit, and a survey that has read it
# before writes it again: neither may run when last_error is reset.
sub is_resumed
{
	my ($name, $count) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->safe_psql('postgres', q{GRANT app TO guest});
	ok($node->poll_query_until('postgres', qq{SELECT count(*) = $count AND bool_and(what = 'guest' AND refused = '1') FROM seen}), "$name: the subscription resumes once guest is a member");
	$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type IN ('idempotency relay', 'idempotency reaper')}) or die;
	$node->safe_psql('postgres', q{DELETE FROM seen; UPDATE idempotency.subscription SET last_error = NULL});
}
my $good = q{INSERT INTO public.seen (what, refused) VALUES ('guest', e.attempt)};
my $evil = q{INSERT INTO public.seen (what, refused) VALUES ('stolen', e.attempt)};
my $hold = "$good; PERFORM pg_advisory_xact_lock(9)";

guest_has($good);
as_app(q{SELECT idempotency.subscribe('guest', '{guest}', 'app.guest(idempotency.event)')});
as_app(q{SELECT idempotency.publish('guest', '{}')});
ok($node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM seen}), "a member's function is a handler, though it does not inherit");
$node->poll_query_until('postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'idempotency relay'}) or die;

$node->safe_psql('postgres', 'DELETE FROM seen; REVOKE app FROM guest');
guest_has($evil);
as_app(q{SELECT idempotency.publish('guest', '{}') FROM generate_series(1, 2)});
is_paused('no worker runs');
like(($node->psql('postgres', q{SELECT idempotency.subscribe('another', '{guest}', 'app.guest(idempotency.event)')}, extra_params => [ '--username', 'app' ]))[2],
	qr/ERROR:  owner "guest" of handler app\.guest\(idempotency\.event\) does not have the privileges of role "app"/, 'subscribe() rejects the handler');
guest_has($good);
is_resumed('no worker runs', 2);

# While an event is handled, for two kinds of functions: the next batch must not run the
# new body.
foreach my $options ('', 'SECURITY INVOKER SET search_path = pg_catalog')
{
	guest_has($hold, $options);
	my $session = open_session($node);
	$session->query_safe('BEGIN; SELECT pg_advisory_xact_lock(9)');
	as_app(q{SELECT idempotency.publish('guest', '{}') FROM generate_series(1, 3)});
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND objid = 9 AND NOT granted}) or die;
	$node->safe_psql('postgres', 'REVOKE app FROM guest');
	guest_has($evil, $options);
	$session->query_safe('SELECT pg_sleep(0.5)'); # the batch ends after this event
	$session->query_safe('COMMIT');
	$session->quit;
	is_paused("during a batch $options", 'guest');
	guest_has($good, $options);
	is_resumed("during a batch $options", 3);
}

# A handler that changes its own owner is not called again.
$node->safe_psql('postgres', 'ALTER FUNCTION app.guest(idempotency.event) OWNER TO app');
as_app(q{CREATE OR REPLACE FUNCTION app.guest(e idempotency.event) RETURNS void LANGUAGE plpgsql AS
	$$ BEGIN ALTER FUNCTION app.guest(idempotency.event) OWNER TO friend; END $$;
	SELECT idempotency.subscribe('guest', '{guest}', 'app.guest(idempotency.event)', max_attempts => 1);
	SELECT idempotency.publish('guest', '{}')});
ok($node->poll_query_until('postgres', q{SELECT count(*) > 0 FROM pg_proc WHERE oid = 'app.guest(idempotency.event)'::regprocedure AND proowner = 'friend'::regrole}),
	'a handler changes its own owner');
as_app(q{SELECT idempotency.publish('guest', '{}')});
ok($node->poll_query_until('postgres', q{SELECT last_error LIKE '42501: owner "friend" of handler app.guest%' FROM idempotency.subscription WHERE subscription = 'guest'}),
	'a handler that has changed its own owner is not called again');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.dead_letters WHERE subscription = 'guest'}), '0', 'no event has failed');

unlike(slurp_file($node->logfile), qr/PANIC:|TRAP:|terminated by signal|\bXX\d{3}\b/, 'the log has no unexpected message');
$node->stop;
done_testing();
