# 038_altered_outbox.pl
#
# Proves that alterations of the outbox tables by their owner lose no event. An altered
# table that is written without the executor is rejected with 55000 and a hint. So is a
# table that is written by SQL and has rules, or triggers before the write of a row.
# Triggers after the write run with restricted privileges. Other alterations do no harm.
# After a repair everything continues.
#
# The script takes 15 seconds, because it makes 600 sessions, three for each alteration.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '1h'
log_statement = none
});
$node->safe_psql('postgres', q{
	CREATE ACCESS METHOD heap2 TYPE TABLE HANDLER heap_tableam_handler;
	CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
	CREATE ROLE reader LOGIN;
	SELECT idempotency.grant_client('reader'), idempotency.grant_consumer('reader')});

# as_reader runs SQL as a role without privileges on any table.
sub as_reader
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql, extra_params => [ '--username', 'reader' ]);
}

# A session that has cached the tables before each change.
my $session = open_session($node);
my ($published, $expected) = (0, 0);

# afresh creates unaltered tables; one event is acknowledged, one is a dead letter, one
# is in an unacknowledged batch, and one waits.
sub afresh
{
	$node->safe_psql('postgres', q{
		SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscription;
		DELETE FROM idempotency.outbox});
	$published = 0;
	as_reader(q{SELECT idempotency.subscribe('s', '{*}', max_attempts => 1), idempotency.subscribe('free', '{*}')});
	publishes() foreach 1 .. 4;
	as_reader(q{SELECT idempotency.ack('s', batch) FROM idempotency.fetch('s', 1);
		SELECT idempotency.nack('s', batch, id, 'no') FROM idempotency.fetch('s', 1)});
	$node->safe_psql('postgres', q{SELECT idempotency.ack('s', batch) FROM idempotency.position WHERE batch IS NOT NULL;
		SELECT count(*) FROM idempotency.fetch('s', 1, lease => '1 hour')});
	$session->query_safe(q{BEGIN; SELECT idempotency.publish('t', '0'); SELECT count(*) FROM idempotency.fetch('free'); ROLLBACK});
	return;
}

sub publishes
{
	$published++;
	return as_reader("SELECT idempotency.publish('t', '$published')");
}

# refuses checks that calls fail with 55000 in old and new sessions.
sub refuses
{
	my ($what, $table, $hint, @calls) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	foreach my $call (@calls)
	{
		# The server itself rejects some queries on tables with rules.
		my $own = "$what $call" =~ /^parked: rules nack/;

		session_fails($session, "BEGIN; SELECT idempotency.$call; ROLLBACK", $own ? '0A000' : '55000', "$what: $call",
			$own ? qr/ON CONFLICT/ : qr/table "idempotency\.$table" has been altered.*^DETAIL: .*^HINT:  [^\n]*$hint/ms);
		fails_with($node, "SELECT idempotency.$call", '55000', "$what: $call, by a role without privileges",
			extra_params => [ '--username', 'reader' ]) unless $call =~ /SELECT/;
	}
}

# events_are_kept checks that every published event can be delivered: the dead letter,
# the one in the unacknowledged batch, and the waiting one.
sub events_are_kept
{
	my ($what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	publishes();
	my $given = $node->safe_psql('postgres', q{
		SELECT string_agg(event_id::text, ' ') IS NOT NULL FROM idempotency.dead_letters;
		UPDATE idempotency.position SET leased_until = now() - interval '1 s', leased_at = now() - interval '1 min';
		CREATE TEMPORARY TABLE got (payload text);
		DO $$ DECLARE b int8; BEGIN
			LOOP
				WITH f AS (SELECT * FROM idempotency.fetch('s', 2)), g AS (INSERT INTO got SELECT payload FROM f) SELECT max(batch) INTO b FROM f;
				EXIT WHEN b IS NULL;
				PERFORM idempotency.ack('s', b);
			END LOOP;
		END $$;
		SELECT string_agg(payload, ' ' ORDER BY payload::int) FROM got;
		SELECT idempotency.redrive('s')});
	is($given, "t\n3 4 5\n1", "$what: all events are delivered");
	return;
}

# ----------------------------------------------------------------
# The outbox, which is written without the executor
# ----------------------------------------------------------------

my $t = 'idempotency.outbox';
foreach (
	[ 'a trigger', "CREATE TRIGGER x BEFORE INSERT ON $t FOR EACH ROW EXECUTE FUNCTION nothing()", "DROP TRIGGER x ON $t", 'triggers' ],
	[ 'a disabled trigger', "CREATE TRIGGER x AFTER INSERT ON $t EXECUTE FUNCTION nothing(); ALTER TABLE $t DISABLE TRIGGER x", "DROP TRIGGER x ON $t", 'triggers' ],
	[ 'no trigger of its own', "DROP TRIGGER refuse_update ON $t", "CREATE TRIGGER refuse_update BEFORE UPDATE ON $t EXECUTE FUNCTION idempotency_internal.refuse_update()",
		'CREATE TRIGGER refuse_update' ],
	[ 'another trigger of that name', "DROP TRIGGER refuse_update ON $t; CREATE TRIGGER refuse_update BEFORE INSERT ON $t EXECUTE FUNCTION nothing()",
		"DROP TRIGGER refuse_update ON $t; CREATE TRIGGER refuse_update BEFORE UPDATE ON $t EXECUTE FUNCTION idempotency_internal.refuse_update()", 'CREATE TRIGGER refuse_update' ],
	[ 'its own trigger disabled', "ALTER TABLE $t DISABLE TRIGGER refuse_update", "ALTER TABLE $t ENABLE TRIGGER refuse_update", 'ENABLE TRIGGER refuse_update' ],
	[ 'its own trigger for replicas', "ALTER TABLE $t ENABLE REPLICA TRIGGER refuse_update", "ALTER TABLE $t ENABLE TRIGGER refuse_update", 'ENABLE TRIGGER refuse_update' ],
	[ 'a rule', "CREATE RULE r AS ON INSERT TO $t DO INSTEAD NOTHING", "DROP RULE r ON $t", 'Drop' ],
	[ 'row security', "ALTER TABLE $t ENABLE ROW LEVEL SECURITY", "ALTER TABLE $t DISABLE ROW LEVEL SECURITY", 'ROW LEVEL SECURITY' ],
	[ 'forced row security', "ALTER TABLE $t FORCE ROW LEVEL SECURITY", "ALTER TABLE $t NO FORCE ROW LEVEL SECURITY", 'ROW LEVEL SECURITY' ],
	[ 'unlogged', "ALTER TABLE $t SET UNLOGGED", "ALTER TABLE $t SET LOGGED", 'SET LOGGED' ],
	[ 'another access method', "ALTER TABLE $t SET ACCESS METHOD heap2", "ALTER TABLE $t SET ACCESS METHOD heap", 'SET ACCESS METHOD heap' ],
	[ 'a check constraint', "ALTER TABLE $t ADD CONSTRAINT c CHECK (seq > 0)", "ALTER TABLE $t DROP CONSTRAINT c", 'Drop' ],
	[ 'a default', "ALTER TABLE $t ALTER type SET DEFAULT 'x'", "ALTER TABLE $t ALTER type DROP DEFAULT", 'Drop' ],
	[ 'a child', "CREATE TABLE child () INHERITS ($t)", 'DROP TABLE child', '\w' ],
	[ 'an added column', "ALTER TABLE $t ADD note text", "ALTER TABLE $t DROP note", 'columns' ],
	[ 'a generated column', "ALTER TABLE $t ADD l int GENERATED ALWAYS AS (length(aggregatetype)) STORED", "ALTER TABLE $t DROP l", 'Drop' ],
	[ 'an identity column', "ALTER TABLE $t ADD i int GENERATED ALWAYS AS IDENTITY", "ALTER TABLE $t DROP i", '\w' ],
	[ 'a renamed column', "ALTER TABLE $t RENAME payload TO body", "ALTER TABLE $t RENAME body TO payload", 'columns' ],
	[ 'a column that must not be null', "SET session_replication_role = replica; UPDATE $t SET type = 'x'; ALTER TABLE $t ALTER type SET NOT NULL", "ALTER TABLE $t ALTER type DROP NOT NULL", '\w' ],
	[ 'no primary key', "ALTER TABLE $t DROP CONSTRAINT outbox_pkey", "ALTER TABLE $t ADD PRIMARY KEY (seq)", 'PRIMARY KEY \(seq\)' ])
{
	my ($what, $alter, $repair, $hint) = @$_;
	afresh();
	$node->safe_psql('postgres', $alter);
	refuses($what, 'outbox', $hint, q{publish('t', '1')}, q{fetch('free')}, q{subscribe('new', '{*}')});
	$node->safe_psql('postgres', $repair);
	events_are_kept("outbox: $what, repaired");
}

# ----------------------------------------------------------------
# Tables that are written by SQL
# ----------------------------------------------------------------

my %calls = (
	subscription => [ q{subscribe('new', '{*}')}, q{subscribe('s', '{x}')}, q{unsubscribe('s')} ],
	position => [ q{subscribe('new', '{*}')}, q{fetch('free', 1)}, q{extend('s', (SELECT batch FROM idempotency.position WHERE subscription = 's'), '1 h')},
		q{ack('s', (SELECT batch FROM idempotency.position WHERE subscription = 's'))}, q{unsubscribe('s')} ],
	parked => [ q{nack('s', (SELECT batch FROM idempotency.position WHERE subscription = 's'), NULL)},
		q{nack('s', (SELECT batch FROM idempotency.position WHERE subscription = 's'), (SELECT id FROM idempotency.outbox ORDER BY seq OFFSET 2 LIMIT 1))},
		q{redrive('s')}, q{unsubscribe('s')} ]);
foreach my $table (sort keys %calls)
{
	$t = "idempotency.$table";
	foreach (
		[ 'a trigger that discards rows', "CREATE TRIGGER x BEFORE INSERT OR UPDATE OR DELETE ON $t FOR EACH ROW EXECUTE FUNCTION nothing()", "DROP TRIGGER x ON $t" ],
		[ 'a trigger that always fires', "CREATE TRIGGER x BEFORE INSERT OR UPDATE OR DELETE ON $t FOR EACH ROW EXECUTE FUNCTION nothing();
			ALTER TABLE $t ENABLE ALWAYS TRIGGER x",
			"DROP TRIGGER x ON $t" ],
		[ 'rules', join(';', map { "CREATE RULE r$_ AS ON $_ TO $t DO INSTEAD NOTHING" } qw(INSERT UPDATE DELETE)), join(';', map { "DROP RULE r$_ ON $t" } qw(INSERT UPDATE DELETE)) ])
	{
		my ($what, $alter, $repair) = @$_;
		afresh();
		$node->safe_psql('postgres', $alter);
		refuses("$table: $what", $table, 'Drop', @{ $calls{$table} });
		$node->safe_psql('postgres', $repair);
		events_are_kept("$table: $what, dropped");
	}

	# Harmless alterations: policies apply only to roles other than the owner, and
	# values are assigned by column name.
	foreach (
		[ 'policies', "ALTER TABLE $t ENABLE ROW LEVEL SECURITY; ALTER TABLE $t FORCE ROW LEVEL SECURITY; CREATE POLICY p ON $t USING (false)",
			"DROP POLICY p ON $t; ALTER TABLE $t DISABLE ROW LEVEL SECURITY; ALTER TABLE $t NO FORCE ROW LEVEL SECURITY" ],
		[ 'a generated column', "ALTER TABLE $t ADD g text GENERATED ALWAYS AS (upper(subscription)) STORED", "ALTER TABLE $t DROP g" ],
		[ 'a column with a default', "ALTER TABLE $t ADD g int DEFAULT 1", "ALTER TABLE $t DROP g" ],
		[ 'an index on an expression', "CREATE INDEX i ON $t (lower(subscription))", "DROP INDEX idempotency.i" ])
	{
		my ($what, $alter, $repair) = @$_;
		afresh();
		$node->safe_psql('postgres', $alter);
		events_are_kept("$table: $what");
		$node->safe_psql('postgres', $repair);
	}

	# A check that fails is an error, and the call has no effect.
	afresh();
	$node->safe_psql('postgres', "ALTER TABLE $t ADD CONSTRAINT c CHECK (false) NOT VALID");
	session_fails($session, "BEGIN; SELECT idempotency.$calls{$table}[0]; ROLLBACK", '23514', "$table: a check", qr/violates check constraint/);
	$node->safe_psql('postgres', "ALTER TABLE $t DROP CONSTRAINT c");
	events_are_kept("$table: a check, dropped");
}

# ----------------------------------------------------------------
# Triggers after the write
# ----------------------------------------------------------------

# These triggers run as the table's owner in a security-restricted operation: they get
# nothing of the caller's privileges, and the caller gets nothing of the owner's.
afresh();
$node->safe_psql('postgres', q{
	CREATE TABLE ran (who name, path text, refused text);
	CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
	DECLARE
		states text := '';
		try text;
	BEGIN
		FOREACH try IN ARRAY ARRAY['SET ROLE reader', 'CREATE TEMPORARY TABLE mine (i int)', 'DECLARE c CURSOR WITH HOLD FOR SELECT 1',
			'SET SESSION AUTHORIZATION reader']
		LOOP
			BEGIN
				EXECUTE try;
				states := states || ' done';
			EXCEPTION WHEN OTHERS THEN
				states := states || ' ' || SQLSTATE;
			END;
		END LOOP;
		INSERT INTO public.ran VALUES (current_user, current_setting('search_path'), states);
		RETURN NULL;
	END $$;
	CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON idempotency.position FOR EACH ROW EXECUTE FUNCTION note();
	CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON idempotency.parked EXECUTE FUNCTION note();
	CREATE TRIGGER note BEFORE INSERT OR UPDATE OR DELETE ON idempotency.subscription FOR EACH STATEMENT EXECUTE FUNCTION note()});
is(as_reader(q{SELECT idempotency.subscribe('free', '{*}', max_attempts => 2);
		SELECT idempotency.ack('free', batch) FROM idempotency.fetch('free', 1); SELECT idempotency.nack('free', batch, id, 'no') IS NULL
			FROM idempotency.fetch('free', 1);
		SELECT idempotency.unsubscribe('free')}), "f\n\nf\nt", 'triggers after the write block no call');
is($node->safe_psql('postgres', 'SELECT DISTINCT who, path, refused, count(*) > 3 FROM ran GROUP BY 1, 2, 3'),
	'postgres|pg_catalog, pg_temp| 42501 42501 42501 42501|t',
	'the triggers run restricted, under a safe search path');
is(as_reader(q{SELECT current_user, current_setting('is_superuser')}), 'reader|off', 'the caller keeps its own privileges');
$node->safe_psql('postgres', join ';', map { "DROP TRIGGER note ON idempotency.$_" } qw(position parked subscription));

# ----------------------------------------------------------------
# The relay
# ----------------------------------------------------------------

# The subscription shows the failed write, and no event is lost or repeated.
$node->safe_psql('postgres', q{GRANT CREATE ON SCHEMA public TO reader; CREATE TABLE done (seq int8); GRANT ALL ON done TO reader});
as_reader(q{CREATE FUNCTION handle(e idempotency.event) RETURNS void LANGUAGE sql AS 'INSERT INTO done VALUES ((e).seq); SELECT 1 / ((e).payload::text::int - 7)';
	SELECT idempotency.unsubscribe('s'); SELECT idempotency.subscribe('r', '{*}', 'handle(idempotency.event)', max_attempts => 1)});
foreach my $table (qw(position parked))
{
	$node->safe_psql('postgres', "DELETE FROM done; CREATE TRIGGER x BEFORE INSERT OR UPDATE ON idempotency.$table FOR EACH ROW EXECUTE FUNCTION nothing()");
	as_reader(qq{SELECT idempotency.publish('t', n::text) FROM unnest(ARRAY[1, 7, 3]) AS n});
	ok($node->poll_query_until('postgres', qq{SELECT last_error LIKE '55000: table "idempotency.$table" has been altered%'
		FROM idempotency.subscription}),
		"the subscription reports that $table was altered");
	is($node->safe_psql('postgres', 'SELECT count(*) FROM done'), '0', 'no event was handled whose progress could not be stored');
	$node->safe_psql('postgres', "DROP TRIGGER x ON idempotency.$table");
	ok($node->poll_query_until('postgres', 'SELECT count(*) = 2 FROM done'), 'the relay continues once the trigger is dropped');
	ok($node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM idempotency.dead_letters}), 'a failed event becomes a dead letter');
	is($node->safe_psql('postgres', 'SELECT count(*) - count(DISTINCT seq) FROM done'), '0', 'each event is handled once');
	$node->safe_psql('postgres', 'DELETE FROM idempotency.parked');
}

# If the relay cannot store even that, it logs the reason, at a limited rate.
my $from = -s $node->logfile;
$node->safe_psql('postgres', join ';', 'DELETE FROM done',
	map { "CREATE TRIGGER x BEFORE INSERT OR UPDATE ON idempotency.$_ FOR EACH ROW EXECUTE FUNCTION nothing()" } qw(position subscription));
as_reader(q{SELECT idempotency.publish('t', n::text) FROM unnest(ARRAY[1, 3]) AS n});
ok($node->wait_for_log(qr/"idempotency\.subscription" has been altered/, $from), 'the log reports the altered table subscription');
sleep 3;
cmp_ok(scalar(() = slurp_file($node->logfile, $from) =~ /has been altered/g), '<', 30, 'the log reports it at a limited rate');
is($node->safe_psql('postgres', 'SELECT count(*) FROM done'), '0', 'no event was handled whose progress could not be stored');
$node->safe_psql('postgres', join ';', map { "DROP TRIGGER x ON idempotency.$_" } qw(position subscription));
ok($node->poll_query_until('postgres', 'SELECT count(*) = 2 FROM done'), 'the relay continues once the triggers are dropped');

$session->quit;
unlike(slurp_file($node->logfile), qr/PANIC:|TRAP:|terminated by signal/, 'no process has crashed');
$node->stop;
done_testing();
