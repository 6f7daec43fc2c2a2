# 046_editions.pl
#
# Proves that the edition can be changed under load, in both directions. Clients charge
# through functions of their own, one half of the operations in one transaction, the other
# half with a lease. Each key is sent by several clients, which repeat a call in a new
# session after any error. Another client reads the views all the time. Meanwhile a superuser
# replaces the extension by the portable edition and back. Each operation has one effect and
# publishes one event, which a consumer receives once. All responses equal the stored one,
# tokens of running leases and numbers of batches stay valid, and tokens only grow. Failed
# events, dead letters and changes of partitions move with their subscription.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = 8;
my $portable = dirname(__FILE__) . '/../../../portable';
my $dir = PostgreSQL::Test::Utils::tempdir;

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = '300ms'
idempotency.outbox_retention = 0
log_statement = none
synchronous_commit = off
});

# The functions have the rights of their caller, so a client needs its privileges after each
# change.
$node->safe_psql('postgres', q{
CREATE ROLE client LOGIN;
CREATE ROLE operator LOGIN;
ALTER ROLE operator SET deadlock_timeout = '1ms'; -- so that not the operator detects a deadlock
CREATE ROLE backup LOGIN;
CREATE ROLE owner;
SELECT idempotency.grant_client('client'), idempotency.grant_consumer('client'), idempotency.grant_operator('operator'),
	idempotency.grant_backup('backup'), idempotency.subscribe('load', '{effect}', owner => 'client', partitions => 2);
CREATE SCHEMA app;
CREATE TABLE app.effect (id serial, key text, token int8);
CREATE TABLE app.given (key text, answer text);
CREATE TABLE app.failure (sqlstate text, message text, part text);
CREATE TABLE app.received (id uuid, key text);
CREATE TABLE app.control (go int);
INSERT INTO app.control VALUES (1);

CREATE FUNCTION app.charge(key text) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
	effect int;
BEGIN
	op := idempotency.claim('charge', key, json_build_object('key', key), wait => '30 s');
	IF op.replayed THEN
		RETURN op.response;
	END IF;
	INSERT INTO app.effect (key) VALUES (charge.key) RETURNING id INTO effect;
	PERFORM idempotency.publish('effect', to_json(effect), charge.key);
	RETURN idempotency.complete('charge', key, to_json(effect));
END $$;

CREATE FUNCTION app.begin_lease(key text, OUT token int8, OUT answer json) LANGUAGE plpgsql AS $$
DECLARE
	op idempotency.operation;
BEGIN
	op := idempotency.claim('lease', key, lease => '10 min', wait => '100 ms');
	token := op.token;
	answer := op.response;
END $$;

CREATE FUNCTION app.charge_leased(key text, token int8) RETURNS json LANGUAGE plpgsql AS $$
DECLARE
	effect int;
BEGIN
	INSERT INTO app.effect (key, token) VALUES (charge_leased.key, charge_leased.token) RETURNING id INTO effect;
	PERFORM idempotency.publish('effect', to_json(effect), charge_leased.key);
	RETURN idempotency.complete('lease', key, to_json(effect), token => token);
END $$;

CREATE FUNCTION app.consume() RETURNS int8 LANGUAGE plpgsql AS $$
DECLARE
	given int8;
BEGIN
	WITH event AS MATERIALIZED (SELECT batch, id, aggregate_id FROM idempotency.fetch('load', 20, '50 ms')),
		noted AS (INSERT INTO app.received SELECT id, aggregate_id FROM event)
	SELECT max(batch) INTO given FROM event;
	RETURN idempotency.ack('load', given) WHERE given IS NOT NULL;
END $$;
GRANT USAGE ON SCHEMA app TO client, operator, backup;
GRANT SELECT ON ALL TABLES IN SCHEMA app TO backup;
GRANT SELECT ON ALL SEQUENCES IN SCHEMA app TO backup;
GRANT SELECT ON app.control TO operator;
GRANT ALL ON ALL TABLES IN SCHEMA app TO client;
GRANT ALL ON ALL SEQUENCES IN SCHEMA app TO client;
});

# A call is repeated until it succeeds, each time in a new session. psql has no loops, so the
# file of a call includes itself.
my $again = <<'SQL';
\if :ERROR
	\set state :LAST_ERROR_SQLSTATE
	\set message :LAST_ERROR_MESSAGE
	\c
	INSERT INTO app.failure VALUES (:'state', :'message', :'part');
	\ir :repeated
SQL
$again =~ s/:repeated/%s/;
append_to_file("$dir/charge.psql", q{
	\set part charge
	SELECT app.charge(:'key') AS answer \gset
} . sprintf($again, 'charge.psql') . "\\endif\n");
append_to_file("$dir/begin.psql", q{
	\set part begin
	SELECT token, answer FROM app.begin_lease(:'key') \gset
} . sprintf($again, 'begin.psql') . "\\endif\n");
append_to_file("$dir/finish.psql", q{
	\set part finish
	SELECT app.charge_leased(:'key', :token) AS answer \gset
} . sprintf($again, 'finish.psql') . "\\endif\n");
append_to_file("$dir/leased.psql", q{
	\ir begin.psql
	\if :{?token}
		\ir finish.psql
		\unset token
	\endif
});
append_to_file("$dir/given.psql", q{
	INSERT INTO app.given VALUES (:'key', :'answer');
	SELECT go FROM app.control \gset
});

# All clients send the same keys in the same order, for as long as the editions change.
append_to_file("$dir/client.psql", "\\set go 1\n" . join('', map {
	my $call = $_ % 2 ? 'charge' : 'leased';
	"\\if :go\n\\set key $call-$_\n\\ir $call.psql\n\\ir given.psql\n\\endif\n"
} 1 .. 20_000));

append_to_file("$dir/operator.psql", "\\set go 1\n" . q{
	\if :go
	SELECT count(*) FROM idempotency.keys;
	SELECT count(*) FROM idempotency.zombies;
	SELECT go FROM app.control, pg_sleep(0.02) \gset
	\endif
} x 10_000);

append_to_file("$dir/consume.psql", q{
	\set part consume
	SELECT app.consume() \gset
} . sprintf($again, 'consume.psql') . "\\endif\n");
append_to_file("$dir/consumer.psql", "\\set go 1\n" . q{
	\if :go
	\ir consume.psql
	SELECT go FROM app.control \gset
	\endif
} x 20_000);

# psql starts a psql in the background, which runs a file.
my @output;
sub psql
{
	my ($role, $file) = @_;
	$file //= $role;
	push @output, '';
	return IPC::Run::start([ $node->installed_command('psql'), '--no-psqlrc', '--quiet', "--username=$role", '--file', "$dir/$file.psql",
			$node->connstr('postgres') ], '>', '/dev/null', '2>', \$output[-1]);
}
my @load = map { psql('client') } 1 .. $clients;
my @beside = (psql('client', 'consumer'), psql('operator'));

# change_edition runs a recipe.
sub change_edition
{
	my ($recipe) = @_;
	my ($out, $err) = ('', '');
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	# with a snapshot from before its locks, a recipe would lose keys
	local $ENV{PGOPTIONS} = '-c default_transaction_isolation=serializable';
	my $succeeds = IPC::Run::run([ $node->installed_command('psql'), '--no-psqlrc', '--quiet', '--set=owner=owner',
			'--file', "$portable/$recipe.sql", $node->connstr('postgres') ], '>', \$out, '2>', \$err);
	ok($succeeds, "$recipe.sql succeeds") or die $err;
	is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_extension WHERE extname = 'idempotency'}),
		$recipe eq 'to_extension' ? '1' : '0', 'the other edition is installed');
	return;
}

# Change the edition when the clients have done more.
my $changes = 0;
foreach (1 .. soak(2, 20))
{
	foreach my $recipe ('from_extension', 'to_extension')
	{
		my $goal = $node->safe_psql('postgres', 'SELECT count(*) + 150 FROM app.given');
		$node->poll_query_until('postgres', "SELECT count(*) >= $goal FROM app.given") or die "no progress: @output";
		change_edition($recipe);
		$changes++;
	}
}
$node->safe_psql('postgres', 'UPDATE app.control SET go = 0');
my @ended = map { $_->finish } @load;
$_->finish foreach @beside;

# ----------------------------------------------------------------
# What the clients have done
# ----------------------------------------------------------------

is(scalar(grep { $_ } @ended), $clients, 'the clients run to the end') or diag @output;
my ($operations, $leased) = split /\|/, $node->safe_psql('postgres',
	q{SELECT count(DISTINCT key), count(DISTINCT key) FILTER (WHERE key LIKE 'leased%') FROM app.given});
my $failures = $node->safe_psql('postgres', 'SELECT part, sqlstate, message, count(*) FROM app.failure GROUP BY 1, 2, 3 ORDER BY 4 DESC');
note("$operations operations, $leased with a lease, $changes changes of the edition; errors:\n$failures");
cmp_ok($operations, '>', soak(100, 300), 'there are operations');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT key) FROM app.effect}), "$operations|$operations", 'each operation has one effect');
is($node->safe_psql('postgres', q{SELECT count(*), count(*) FILTER (WHERE state <> 'completed') FROM idempotency.keys}),
	"$operations|0", 'each operation is stored as completed');
is($node->safe_psql('postgres', q{SELECT count(*) FROM app.given AS g JOIN app.effect AS e USING (key) JOIN idempotency.key AS k ON k.key::text = g.key
		WHERE g.answer = e.id::text AND k.response::text = g.answer AND (k.finished_by = e.token OR e.token IS NULL AND k.finished_by IS NULL)}),
	$node->safe_psql('postgres', 'SELECT count(*) FROM app.given'), 'all responses equal the stored one');
is($node->safe_psql('postgres', q{SELECT DISTINCT part, sqlstate FROM app.failure WHERE sqlstate !~ '^(40|42|55|XX)' AND sqlstate <> 'IK409'}),
	'', 'the clients get the errors that the README of the portable edition names');
1 until $node->safe_psql('postgres', 'SELECT app.consume()') eq '' && $node->safe_psql('postgres', 'SELECT app.consume()') eq '';
is($node->safe_psql('postgres', 'SELECT count(*), count(DISTINCT id), count(DISTINCT key) FROM app.received'),
	"$operations|$operations|$operations", 'each event is received once');
is($output[-1] =~ /deadlock/, '', 'no reader of a view is in a deadlock with the change');

# ----------------------------------------------------------------
# Tokens of deleted keys
# ----------------------------------------------------------------

# next_token returns the token of a new lease, and deletes all keys.
sub next_token
{
	return $node->safe_psql('postgres', q{SELECT token FROM idempotency.claim('token', 'deleted', lease => '1 min');
		SELECT count(idempotency.forget(scope, key)) FROM idempotency.keys}) =~ s/\n.*//sr;
}

# configured tests that what configure() has stored applies in a new session. With the library, which
# gives the setting of the session a value, the portable edition does not use it.
sub configured
{
	my ($dbname, $when) = @_;
	my $is_portable = $node->safe_psql($dbname, q{SELECT to_regproc('idempotency_internal.configured_retention') IS NOT NULL}) eq 't';
	is($node->safe_psql($dbname, $is_portable ? q{SELECT idempotency_internal.configured_retention('refund/eu') = '9 days'}
			: q{SELECT idempotency.setting('retention', 'refund/eu') = '9 days'}), 't', "what configure() has stored applies $when");
	return;
}

# portable/idempotency.sql does not depend on these settings.
$node->safe_psql('postgres', 'ALTER DATABASE postgres SET quote_all_identifiers = on; ALTER DATABASE postgres SET standard_conforming_strings = off');
my @tokens = next_token();
$node->safe_psql('postgres', q{SELECT idempotency.configure('retention', '9 days', 'refund/*')});
foreach my $recipe ('from_extension', 'to_extension', 'from_extension')
{
	change_edition($recipe);
	push @tokens, next_token();
	dumps($node, "a role with grant_backup dumps the database after $recipe.sql", '--username=backup', '--file', "$dir/dump", 'postgres');
	configured('postgres', "after $recipe.sql");
	$node->safe_psql('template1', 'DROP DATABASE IF EXISTS restored');
	$node->safe_psql('template1', 'CREATE DATABASE restored TEMPLATE template0');
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/dump", '--dbname', 'restored' ], 'the dump is restored');
	configured('restored', 'after the restore');
}
is_deeply(\@tokens, [ sort { $a <=> $b } @tokens ], 'tokens grow from one edition to the other, also if all keys were deleted');

# ----------------------------------------------------------------
# A subscription
# ----------------------------------------------------------------

# One event is acknowledged, one is a dead letter, one is retried while another waits behind it, one
# is in a batch whose consumer goes on, one in that of a worker that has ended, and the number of
# partitions has changed. A transaction that is open while all others commit is not part of it: the
# scripts wait for its end.
change_edition('to_extension');
$node->safe_psql('postgres', q{SELECT idempotency.unsubscribe('load');
	SELECT idempotency.subscribe('kept', '{t}', max_attempts => 2, start_at => 'now', dead_letter_retention => '1 year'), idempotency.subscribe('worker', '{t}', start_at => 'now');
	SELECT idempotency.publish('t', v.n::text, v.aggregate) FROM (VALUES (1, 'a'), (2, 'b'), (3, 'c'), (4, 'c'), (5, 'd'), (6, 'e')) AS v (n, aggregate);
	SELECT idempotency.alter_subscription('kept', partitions => 3)});
$node->safe_psql('postgres', q{
	CREATE TABLE app.event AS SELECT * FROM idempotency.fetch('kept', 3);
	SELECT idempotency.nack('kept', batch, id, 'dead', dead => true) FROM app.event WHERE payload::text = '2';
	SELECT idempotency.nack('kept', batch, id, 'late', '1 hour') FROM app.event WHERE payload::text = '3';
	SELECT idempotency.ack('kept', max(batch)) FROM app.event});
$node->safe_psql('postgres', q{
	CREATE TABLE app.batch AS SELECT batch, payload FROM idempotency.fetch('kept', 2, lease => '1 hour');
	SELECT count(*) FROM idempotency.fetch('worker');
	UPDATE idempotency.position SET leased_until = 'infinity' WHERE subscription = 'worker'});
$node->safe_psql('postgres', 'DROP TABLE app.event');
my $state = q{SELECT * FROM (SELECT subscription, scheduled, waiting, dead, topics, partitions, max_attempts, owner, created_at FROM idempotency.subscriptions) AS s,
	(SELECT string_agg(concat_ws('/', a.partition, a.partitions, a.state, a.lag_events, a.batch_events, a.leased_until, a.acknowledged, a.failed), ' ' ORDER BY 1)
		FROM idempotency.partitions AS a WHERE a.subscription = 'kept') AS a,
	(SELECT string_agg(concat_ws('/', k.seq, k.id, k.queue, k.payload, k.headers, k.attempts, k.error, k.retry_at, k.dead_at), ' ' ORDER BY seq)
		FROM idempotency.parked AS k) AS k, (SELECT count(*), max(seq), pg_sequence_last_value('idempotency.outbox_seq') FROM idempotency.outbox) AS o
	WHERE subscription = 'kept'};
# The reaper deletes the events of the load, which no subscription needs any more.
$node->poll_query_until('postgres', 'SELECT count(*) = 6 FROM idempotency.outbox') or die 'the reaper deletes nothing';
my $before = $node->safe_psql('postgres', $state);
like($before, qr/^kept\|1\|1\|1\|/, 'the subscription has a dead letter, an event to retry, and one behind it');
foreach my $recipe ('from_extension', 'to_extension', 'from_extension')
{
	change_edition($recipe);
	is($node->safe_psql('postgres', $state), $before, "$recipe.sql moves the subscription");
	is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.position WHERE relation <> 'idempotency.outbox'::regclass}), '0', 'its positions belong to the new outbox');
}
is($node->safe_psql('postgres', q{SELECT idempotency.ack('kept', max(batch)) FROM app.batch}), '2', 'its batch can be acknowledged');
is($node->safe_psql('postgres', q{SELECT string_agg(payload::text || 'x' || attempt, ' ') FROM idempotency.fetch('worker')}),
	'1x1 2x1 3x1 4x1 5x1 6x1', 'the batch of a worker is delivered again at once, and has not failed');
is($node->safe_psql('postgres', q{UPDATE idempotency.parked SET retry_at = now() WHERE retry_at IS NOT NULL;
	SELECT idempotency.redrive('kept');
	SELECT idempotency.publish('t', '7', 'c') IS NULL;
	SELECT string_agg(payload::text || 'x' || attempt, ' ' ORDER BY seq) FROM idempotency.fetch('kept')}),
	"1\nf\n2x1 3x2 4x1", 'it delivers the events that failed');
$node->safe_psql('postgres', q{SELECT idempotency.ack('kept', batch) FROM idempotency.position WHERE subscription = 'kept' AND batch IS NOT NULL});
# The first fetch can end the old partitions.
is($node->safe_psql('postgres', join ';', (q{SELECT payload::text || 'x' || attempt FROM idempotency.fetch('kept')}) x 3), '7x1', 'and then new ones');

# ----------------------------------------------------------------
# Sessions that run a script with \i
# ----------------------------------------------------------------

foreach my $stop ('off', '1')
{
	my ($out, $err) = ('', '');
	my $run = "\\set owner owner\n\\set ON_ERROR_STOP $stop\n" . join('', map { "\\i $portable/$_.sql\n\\echo $_: :ON_ERROR_STOP\n" } 'to_extension', 'from_extension', 'uninstall', 'idempotency');
	IPC::Run::run([ $node->installed_command('psql'), '--no-psqlrc', '--quiet', '--output', '/dev/null', '--dbname', $node->connstr('postgres') ], '<', \$run, '>', \$out, '2>', \$err);
	is($out, join('', map { "$_: $stop\n" } 'to_extension', 'from_extension', 'uninstall', 'idempotency'), "scripts that run by \\i leave ON_ERROR_STOP as it was, $stop") or diag($err);
}

# The error names what depends on the edition, without the list of all its routines.
$node->safe_psql('postgres', 'CREATE TABLE guarded (i integer); CREATE TRIGGER claimed BEFORE INSERT ON guarded FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim()');
my $refused = '';
IPC::Run::run([ $node->installed_command('psql'), '--no-psqlrc', '--quiet', '--dbname', $node->connstr('postgres'), '--file', "$portable/uninstall.sql" ], '2>', \$refused);
like($refused, qr/DETAIL:  trigger claimed on table \S+ depends on function [^\n]+\nHINT:  Drop these objects/,
	'what depends on the edition is named');
unlike($refused, qr/DROP ROUTINE/, 'and not the statement');

$node->stop;
done_testing();
