# 005_logical.pl
#
# Proves that logical decoding treats keys as ordinary rows. An outcome is one INSERT,
# an overwritten expired key one UPDATE, a batch one INSERT for each new key, and a
# claim alone nothing. A subscriber replays and claims as its publisher does. Change
# data capture receives events without a subscription, as docs/operations.md describes.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $publisher = new_node('publisher', init => { allows_streaming => 'logical' },
	conf => "max_prepared_transactions = 5\n");
my $subscriber = new_node('subscriber', init => { allows_streaming => 'logical' });

# ----------------------------------------------------------------
# The changes that test_decoding shows for each call
# ----------------------------------------------------------------

$publisher->safe_psql('postgres', q{
	CREATE TABLE charge (key text);
	CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS $$ SELECT '{"done" :true}'::json $$;
	CREATE FUNCTION final(json) RETURNS json LANGUAGE plpgsql AS
		$$ BEGIN INSERT INTO charge VALUES ('undone'); RAISE EXCEPTION USING ERRCODE = 'IKFIN'; END $$;
	SELECT pg_create_logical_replication_slot('slot', 'test_decoding')});

# decodes runs SQL and compares the kinds of changes that are decoded.
sub decodes
{
	my ($sql, $expected, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$publisher->safe_psql('postgres', $sql);
	my $changes = $publisher->safe_psql('postgres', q{
		SELECT data FROM pg_logical_slot_get_changes('slot', NULL, NULL,
			'include-xids', '0', 'skip-empty-xacts', '1')});
	my @seen;
	foreach (split /^(?=BEGIN|COMMIT|table|PREPARE)/m, $changes)
	{
		push @seen, lc $_ if s/^(BEGIN|COMMIT)\s*\z/$1/;
		push @seen, "$1 $2 $3" if /^table (\S+): (\w+):.* key\[[\w.]+\]:'([^']*)'/s;
		die "cannot read $_" unless /^(begin|commit|table)/i;
	}
	is(join(', ', @seen), $expected, $name) or diag $changes;
	return $changes;
}

my $changes = decodes(q{BEGIN; SELECT idempotency.claim('l', 'a', '{"n":1}', retention => '-1 second');
	SELECT idempotency.complete('l', 'a', '{"n" :  1}', 201, '{"A": "b"}'); COMMIT},
	'begin, idempotency.key INSERT a, commit', 'complete is one INSERT');
like($changes, qr/ status\[smallint\]:201 expires_at\[timestamp with time zone\]:'infinity' /,
	'the INSERT has all columns');
like($changes, qr/ response\[json\]:'\{"n" :  1\}' headers\[json\]:'\{"A": "b"\}'/, 'the INSERT has the bytes of the response');

decodes(q{BEGIN; INSERT INTO charge VALUES ('b'); SELECT idempotency.claim('l', 'b', retention => '1 microsecond');
	INSERT INTO charge VALUES ('b'); SELECT idempotency.complete('l', 'b', '1'); COMMIT},
	'begin, public.charge INSERT b, public.charge INSERT b, idempotency.key INSERT b, commit',
	'the INSERT is in order with the effects');
decodes(q{BEGIN; SELECT idempotency.claim('l', 'b'); SELECT idempotency.fail('l', 'b', '2', 422); COMMIT},
	'begin, idempotency.key UPDATE b, commit', 'overwriting an expired key is one UPDATE');
decodes(q{BEGIN; SELECT idempotency.claim('l', 'c'); SELECT idempotency.complete('l', 'c'); ROLLBACK;
	BEGIN; SELECT idempotency.claim('l', 'c'); SELECT idempotency.release('l', 'c'); COMMIT;
	BEGIN; SAVEPOINT s; SELECT idempotency.claim('l', 'c'); SELECT idempotency.complete('l', 'c');
	ROLLBACK TO s; COMMIT;
	SELECT idempotency.claim('l', 'a')}, '', 'rollbacks and replays are no change');

decodes(q{SELECT idempotency.once('l', 'o', '1 microsecond')},
	'begin, idempotency.key INSERT o, commit', 'once is one INSERT');
decodes(q{SELECT idempotency.once_many('l', array['z', 'y', 'x', 'y'])},
	'begin, idempotency.key INSERT x, idempotency.key INSERT y, idempotency.key INSERT z, commit',
	'a batch is an INSERT for each key');
decodes(q{SELECT idempotency.once_many('l', array['z', 'o', 'w', 'y'])},
	'begin, idempotency.key UPDATE o, idempotency.key INSERT w, commit',
	'a batch is an UPDATE for an expired key, and no change for a known one');
decodes(q{SELECT idempotency.run('l', 'r', '{}', 'handler(json)'), idempotency.run('l', 'r', '{}', 'handler(json)'),
	idempotency.run('l', 'f', '{}', 'final(json)')},
	'begin, idempotency.key INSERT r, idempotency.key INSERT f, commit',
	'run is one INSERT, and shows nothing that was rolled back');
$changes = decodes(q{SELECT idempotency.forget('l', 'w')}, 'begin, idempotency.key DELETE w, commit',
	'forget is one DELETE');
like($changes, qr/DELETE: scope\[text\]:'l' key\[idempotency\.keytext\]:'w'$/m, 'the DELETE names the key');

decodes(q{BEGIN; SELECT idempotency.claim('l', 'p'); SELECT idempotency.complete('l', 'p');
	PREPARE TRANSACTION 'p'}, '', 'a prepared outcome is no change');
decodes(q{COMMIT PREPARED 'p'}, 'begin, idempotency.key INSERT p, commit', 'COMMIT PREPARED is one INSERT');

my $body = q{(SELECT '"' || substr(string_agg(md5(i::text), ''), 1, 1000000) || '"' FROM generate_series(1, 32000) AS i)};
$changes = decodes(qq{BEGIN; SELECT idempotency.claim('l', 'large');
	SELECT idempotency.complete('l', 'large', $body); COMMIT},
	'begin, idempotency.key INSERT large, commit', 'a large response is one INSERT');
my ($digits) = $changes =~ / response\[json\]:'"([0-9a-f]*)"' /;
is(length $digits, 1000000, 'the INSERT has the whole response');

# An event is one INSERT; its delivery changes no row of the outbox.
sub events
{
	my ($sql) = @_;
	$publisher->safe_psql('postgres', $sql);
	return $publisher->safe_psql('postgres', q{
		SELECT coalesce(string_agg(m[1] || ' ' || coalesce(m[2], ''), ', '), '')
		FROM pg_logical_slot_get_changes('slot', NULL, NULL, 'include-xids', '0'),
			regexp_match(data, '^table idempotency[.]outbox: (\w+):(?:.* payload\[json\]:''([^'']*)'')?') AS m
		WHERE m IS NOT NULL});
}
is(events(q{SELECT idempotency.publish('order.placed', '{"n" :  1}', 'order-1', 'placed')}), 'INSERT {"n" :  1}',
	'publish is one INSERT');
is(events(q{BEGIN; SELECT idempotency.publish('order.placed', '2'); ROLLBACK}), '', 'an event that is rolled back is no change');
is( events(q{SELECT idempotency.subscribe('s', '{*}', start_at => 'beginning');
		SELECT idempotency.nack('s', batch, id) FROM idempotency.fetch('s');
		SELECT idempotency.ack('s', batch) FROM idempotency.position WHERE subscription = 's';
		SELECT idempotency.unsubscribe('s')}), '', 'delivery changes no row of the outbox');
$publisher->safe_psql('postgres', q{SELECT pg_drop_replication_slot('slot')});

# ----------------------------------------------------------------
# Change data capture, without any subscription
# Change data capture without a subscription

$publisher->append_conf('postgresql.conf', 'idempotency.outbox_retention = 0');
$publisher->reload;
$publisher->safe_psql('postgres', q{
	CREATE ROLE debezium LOGIN REPLICATION;
	GRANT USAGE ON SCHEMA idempotency TO debezium;
	GRANT SELECT ON idempotency.outbox TO debezium;
	CREATE PUBLICATION idempotency_outbox FOR TABLE idempotency.outbox WITH (publish = 'insert')});
$publisher->safe_psql('postgres', q{SELECT pg_create_logical_replication_slot('cdc', 'pgoutput')},
	extra_params => [ '-U', 'debezium' ]);

$publisher->safe_psql('postgres', q{SELECT idempotency.publish('order.placed', to_json(n)) FROM generate_series(2, 4) AS n});
is($publisher->safe_psql('postgres', 'SELECT idempotency.reap(); SELECT count(*) FROM idempotency.outbox'), "4\n0",
	'the reaper deletes events without a subscription');
is( $publisher->safe_psql('postgres', q{
		SELECT kind, count(*)
		FROM pg_logical_slot_get_binary_changes('cdc', NULL, NULL, 'proto_version', '1', 'publication_names', 'idempotency_outbox'),
			chr(get_byte(data, 0)) AS kind
		WHERE kind NOT IN ('B', 'C', 'R') GROUP BY kind}, extra_params => [ '-U', 'debezium' ]),
	'I|3', 'the publication contains the INSERTs of events and no DELETE');
$publisher->safe_psql('postgres', q{SELECT pg_drop_replication_slot('cdc'); DROP PUBLICATION idempotency_outbox});

# ----------------------------------------------------------------
# A subscriber
# ----------------------------------------------------------------

# same waits for the subscriber and compares whole rows and results.
sub same
{
	my ($name) = @_;
	$publisher->wait_for_catchup('keys');
	ok(keys_of($subscriber) eq keys_of($publisher), "$name: the same rows");
	ok(answers_of($subscriber) eq answers_of($publisher), "$name: the same results of peek");
}

# Existing rows are copied, later rows are streamed.
$publisher->safe_psql('postgres', 'CREATE PUBLICATION keys FOR TABLE idempotency.key');
my $connstr = $publisher->connstr . ' dbname=postgres';
$subscriber->safe_psql('postgres', "CREATE SUBSCRIPTION keys CONNECTION '$connstr' PUBLICATION keys");
$subscriber->wait_for_subscription_sync($publisher, 'keys');
like(answers_of($subscriber), qr/^l\|a\|replayed\|t\|201\|/m, 'the subscriber has copied keys');
same('copied');

$publisher->safe_psql('postgres', qq{
	BEGIN; SELECT idempotency.claim('l', 'new', '{"n": 1}');
	SELECT idempotency.complete('l', 'new', '{"n" :\t1}', 201, '{ }'); COMMIT;
	BEGIN; SELECT idempotency.claim('l', 'new large'); SELECT idempotency.complete('l', 'new large', $body); COMMIT;
	BEGIN; SELECT idempotency.claim('l', 'expiring', retention => '1 microsecond');
	SELECT idempotency.complete('l', 'expiring', '1'); COMMIT;
	SELECT idempotency.once_many('l', array['b 1', 'b 2', 'b 3']);
	BEGIN; SELECT idempotency.claim('l', 'expiring'); SELECT idempotency.fail('l', 'expiring', '2', 402); COMMIT;
	SELECT idempotency.forget('l', 'y')});
same('streamed');

# An open session of the subscriber sees rows that arrive.
my $session = open_session($subscriber);
my $look = q{SELECT coalesce(response::text, 'nothing') FROM idempotency.peek('l', 'late')};
is($session->query_safe($look), 'nothing', 'the row has not arrived');
$publisher->safe_psql('postgres', q{BEGIN; SELECT idempotency.claim('l', 'late', retention => '1 microsecond');
	SELECT idempotency.complete('l', 'late', '1'); COMMIT; SELECT pg_sleep(0.001);
	BEGIN; SELECT idempotency.claim('l', 'late'); SELECT idempotency.complete('l', 'late', '{ }'); COMMIT});
same('overwritten');
is($session->query_safe($look), '{ }', 'an open session sees the row arrive');

# The subscriber replays received keys and claims others.
is( $session->query_safe(q{SELECT outcome, status, headers, response FROM idempotency.claim('l', 'new', '{"n":1.0}')}),
	qq{replayed|201|{ }|{"n" :\t1}}, 'the subscriber replays');
session_fails($session, q{SELECT idempotency.claim('l', 'new', '{"n":2}')}, 'IK422',
	'the subscriber refuses another request');
is($session->query_safe(q{SELECT idempotency.once_many('l', array['b 1', 'b 4', 'y'])}), "b 4\ny",
	'the subscriber treats unexpired messages as duplicates');
is( $session->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('l', 'own');
		SELECT idempotency.complete('l', 'own', '1'); COMMIT;
		SELECT outcome FROM idempotency.claim('l', 'own')}), "claimed\n1\nreplayed", 'the subscriber claims');

# The row of a key arrives while the subscriber claims it: the unique index decides.
$session->query_safe(q{BEGIN; SELECT idempotency.claim('l', 'race')});
$publisher->safe_psql('postgres', q{BEGIN; SELECT idempotency.claim('l', 'race');
	SELECT idempotency.complete('l', 'race', '"publisher"'); COMMIT});
$publisher->wait_for_catchup('keys');
session_fails($session, q{SELECT idempotency.complete('l', 'race', '"subscriber"')}, '40001',
	'a claim that conflicts with replication must be retried');
$session->query_safe('ROLLBACK');
is($session->query_safe(q{SELECT response FROM idempotency.claim('l', 'race')}), '"publisher"',
	'the retry after a replication conflict replays');

$session->quit;
$subscriber->safe_psql('postgres', 'DROP SUBSCRIPTION keys');
$subscriber->stop;
$publisher->stop;
done_testing();
