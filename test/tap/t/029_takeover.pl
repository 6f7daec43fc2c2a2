# 029_takeover.pl
#
# Proves the procedure of docs/operations.md by which a logical subscriber takes over:
# one subscription for the extension's tables and the business tables, sequences
# advanced, clients admitted. Reaper and relay stay idle while rows arrive. A planned
# takeover under load loses nothing: retries have one effect each, responses are equal
# to the byte, and owners, consumers and workers continue. An unplanned one loses key
# and effect together or neither. The sequences of the publisher are so high that the
# subscriber's own values would be lower.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RestoreTest;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $clients = 4;

# server creates a server that can be a publisher.
sub server
{
	my ($name, %opt) = @_;
	return new_node($name, conf => workers_off() . "max_worker_processes = 20\n", init => { allows_streaming => 'logical' }, %opt);
}

my $first = server('first');
$first->safe_psql('postgres', q{SELECT setval('idempotency.token', 3000000000), setval('idempotency.outbox_seq', 5000000000)});
my $history = make_history($first);
$first->safe_psql('postgres', q{SELECT idempotency.configure('retention', '30 days', 'refund/*')});

# Load: effect has one row each time that a key was charged. A key of "again" is
# overwritten as soon as it has expired.
$first->safe_psql('postgres', q{
	CREATE TABLE effect (key text NOT NULL, n int8 GENERATED ALWAYS AS IDENTITY);
	CREATE FUNCTION pay(p_key text) RETURNS json LANGUAGE plpgsql AS $$
	DECLARE
		op idempotency.operation := idempotency.claim('pay', p_key);
		body json;
	BEGIN
		IF op.replayed THEN RETURN op.response; END IF;
		INSERT INTO effect (key) VALUES (p_key) RETURNING json_build_object('n', n) INTO body;
		RETURN idempotency.complete('pay', p_key, body);
	END $$;
	CREATE PROCEDURE pay_again(prefix text, upto int) LANGUAGE plpgsql AS $$
	BEGIN
		FOR i IN 1 .. upto LOOP PERFORM pay(prefix || i); COMMIT; END LOOP;
	END $$;
	CREATE PROCEDURE again(p_key text) LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idempotency.claim('again', p_key, retention => '1 microsecond');
		PERFORM idempotency.complete('again', p_key);
	END $$});
append_to_file("$dir/pay", "\\set n :n + 1\nSELECT pay(:p || '-' || :client_id || '-' || :n);\n");
append_to_file("$dir/again", "\\set k random(1, 5)\nCALL again('k' || :k);\n");

# pays starts clients that run until the server rejects them. Their keys start with that
# number, and their log has the responses.
sub pays
{
	my ($node, $period) = @_;
	my @command = ($node->installed_command('pgbench'), '--no-vacuum', '--client', $clients, '--time=600', '--rate=500', '-D', 'n=0', '-D', "p=$period",
		'--log', '--log-prefix', "$dir/paid-$period", '-f', "$dir/pay", '-f', "$dir/again",
		'--host', $node->host, '--port', $node->port, 'postgres');

	return IPC::Run::start(\@command, '<', \undef, '>', "$dir/pgbench", '2>', "$dir/pgbench.err");
}

# paid returns how many payments the clients saw succeed: the last number of each
# client.
sub paid
{
	my ($period) = @_;
	my @last = (0) x $clients;

	foreach (map { split /\n/, slurp_file($_) } glob "$dir/paid-$period.*")
	{
		my ($client, undef, undef, $script) = split / /;
		$last[$client]++ if $script == 0;
	}
	return @last;
}

# follows creates a server that replicates another one, as the procedure describes.
sub follows
{
	my ($name, $publisher) = @_;
	my $node = server($name);

	$node->safe_psql('postgres', 'DROP EXTENSION idempotency');
	$node->safe_psql('postgres', $history->{roles});
	$publisher->command_ok([ 'pg_dump', '--schema-only', '--no-publications', '--no-subscriptions', '--file', "$dir/$name.sql", 'postgres' ], "$name: the schema of the publisher is dumped");
	$node->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/$name.sql", 'postgres' ], "$name: the schema is restored");
	$publisher->safe_psql('postgres', "CREATE PUBLICATION $name FOR TABLES IN SCHEMA idempotency, public");
	my $connstr = $publisher->connstr . ' dbname=postgres';
	$node->safe_psql('postgres', "CREATE SUBSCRIPTION $name CONNECTION '$connstr' PUBLICATION $name");
	$node->append_conf('postgresql.conf', "idempotency.reaper_naptime = '100ms'\nidempotency.relay_workers = 2\n");
	$node->reload;
	$node->wait_for_subscription_sync($publisher, $name);
	return $node;
}

# sets_forward advances the sequences beyond all numbers in use.
sub sets_forward
{
	my ($node) = @_;
	$node->safe_psql('postgres', q{
		SELECT setval('idempotency.token', (SELECT coalesce(max(token), 0) + 1000000000 FROM idempotency.key)),
			setval('idempotency.outbox_seq', (SELECT coalesce(max(seq), 0) + 1000000000 FROM (
				SELECT seq FROM idempotency.outbox
				UNION ALL SELECT seq FROM idempotency.parked
				UNION ALL SELECT greatest(top, skip) FROM idempotency.position) AS numbers))});
	return;
}

# takes_over is the rest of the procedure, after the last row has arrived.
sub takes_over
{
	my ($node, $planned) = @_;
	my $name = $node->name;

	is($node->safe_psql('postgres', 'SELECT idempotency.reap()'), '0', "$name: nothing is reaped while rows are replicated");
	$node->append_conf('postgresql.conf', workers_off());
	$node->restart;
	$node->safe_psql('postgres', $planned ? "DROP SUBSCRIPTION $name" : qq{
		ALTER SUBSCRIPTION $name DISABLE; ALTER SUBSCRIPTION $name SET (slot_name = NONE); DROP SUBSCRIPTION $name});
	is($node->safe_psql('postgres', 'SELECT max(last_value) < 1000 FROM idempotency.token'), 't', "$name: sequences are not replicated");
	sets_forward($node);
	$node->safe_psql('postgres', q{UPDATE idempotency.configuration SET value = value});
	is($node->safe_psql('postgres', q{SELECT idempotency.setting('retention', 'refund/1')}), '30 days', "$name: stored settings apply");
	$node->safe_psql('postgres', q{SELECT setval(pg_get_serial_sequence('effect', 'n'), (SELECT coalesce(max(n), 0) + 1000000 FROM effect)),
		setval(pg_get_serial_sequence('got', 'place'), 1000000), setval(pg_get_serial_sequence('handled', 'place'), 1000000)});
	return;
}

# whole checks that every key has its effect and every effect its key.
sub whole
{
	my ($node, $name) = @_;
	is( $node->safe_psql('postgres', q{
			SELECT count(*) FILTER (WHERE k.key IS NULL), count(*) FILTER (WHERE e.key IS NULL),
				count(*) FILTER (WHERE k.response::jsonb->>'n' <> e.n::text), count(*) > 100
			FROM (SELECT * FROM idempotency.key WHERE scope = 'pay') AS k FULL JOIN effect AS e ON e.key = k.key::text}),
		'0|0|0|t', "$name: every key has its effect and every effect its key");
	return;
}

# retried repeats all payments of a period, and as many new ones, and checks that each
# has had one effect.
sub retried
{
	my ($node, $period, $name, @paid) = @_;
	foreach my $client (0 .. $clients - 1)
	{
		$node->safe_psql('postgres', "CALL pay_again('$period-$client-', 2 * $paid[$client])");
	}
	my $all = 0;
	$all += 2 * $_ foreach @paid;
	is($node->safe_psql('postgres', "SELECT count(*), count(DISTINCT key) FROM effect WHERE key LIKE '$period-%'"), "$all|$all",
		"$name: retries have one effect each");
	return;
}

# ----------------------------------------------------------------
# Planned
# ----------------------------------------------------------------

my $traffic = pays($first, 1);
my $second = follows('second', $first);
$first->poll_query_until('postgres', 'SELECT count(*) > 500 FROM effect') or die 'there is no load';

# Writes are stopped on the publisher, and the last rows arrive.
$first->append_conf('postgresql.conf', "default_transaction_read_only = on\n");
$first->reload;
$first->safe_psql('postgres', q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'pgbench'});
eval { $traffic->finish };
$first->wait_for_catchup('second');
my $tokens = $first->safe_psql('postgres', 'SELECT last_value FROM idempotency.token');
my @tables = grep { !/^(?:token|outbox_seq)\|/ } split /\n/, rows_of($first);
my @arrived = grep { !/^(?:token|outbox_seq)\|/ } split /\n/, rows_of($second);
is(scalar(@arrived), scalar(@tables), 'second: the number of rows is equal');
ok("@arrived" eq "@tables", 'second: every row has arrived, byte for byte');
my $answers = answers_of($first);
takes_over($second, 1);

ok(answers_of($second) eq $answers, 'second: every result of peek is equal');
whole($second, 'second');
my @paid = paid(1);
retried($second, 1, 'second', @paid);
cmp_ok($second->safe_psql('postgres', q{SELECT token FROM idempotency.claim('lease', 'next', lease => '1 day')}), '>', $tokens,
	'second: no token is issued twice');
$second->safe_psql('postgres', q{SELECT idempotency.forget('lease', 'next')});
$first->stop;

# ----------------------------------------------------------------
# Unplanned
# ----------------------------------------------------------------

$traffic = pays($second, 2);
my $third = follows('third', $second);
$second->poll_query_until('postgres', q{SELECT count(*) > 500 FROM effect WHERE key LIKE '2-%'}) or die 'there is no load';
$second->stop('immediate');
eval { $traffic->finish };
takes_over($third, 0);
whole($third, 'third');
retried($third, 2, 'third', paid(2));
retried($third, 1, 'third', @paid);
whole($third, 'third, after all retries');
check_restored($third, $history, name => 'third');

# Also if only the positions tell which sequence numbers were used.
is($third->safe_psql('postgres', q{SELECT count(*), (SELECT min(top) > 5000000000 FROM idempotency.position) FROM idempotency.outbox}), '0|t',
	'third: no event is left');
$third->safe_psql('postgres', q{SELECT setval('idempotency.outbox_seq', 1)});
sets_forward($third);
$third->safe_psql('postgres', publish(7, 'charged'));
is_deeply(drained($third, 'postgres', 9, qw(read half out unread)), { map { $_ => '7' } qw(read half out unread) }, 'third: the next event reaches all subscriptions');
$third->stop;
done_testing();
