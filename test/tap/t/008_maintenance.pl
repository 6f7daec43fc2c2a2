# 008_maintenance.pl
#
# Proves that a session claims correctly whatever an administrator does to the storage
# of idempotency.key between two claims, or during one: rewriting, reindexing, moving,
# adding indexes, dropping and recreating the extension. The test compares indexes with
# the table row by row.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
allow_in_place_tablespaces = on
log_statement = none
});
$node->safe_psql('postgres', q{CREATE EXTENSION amcheck; CREATE TABLESPACE elsewhere LOCATION ''});

# One session with cached plans observes all changes. The function uses a record:
# PL/pgSQL itself fails once the type of a variable is recreated.
my $session = open_session($node);
$session->query_safe(q{
	CREATE FUNCTION charge(k text, n int, retention interval DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE op record;
	BEGIN
		op := idempotency.claim('m', k, json_build_object('n', n), retention => charge.retention);
		IF NOT op.replayed THEN
			PERFORM idempotency.complete('m', k, json_build_object('answer', n));
		END IF;
		RETURN concat_ws(' ', op.outcome, op.response);
	END $$;
	PREPARE claim (text) AS SELECT outcome::text FROM idempotency.claim('m', $1);
	SET idempotency.wait = '100ms'});
my $number = 0;

# works checks, in the session, old keys, new keys, expired keys and batches.
sub works
{
	my ($after) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $new = 'k' . ++$number;
	my $old = 'k' . ($number - 1);

	$session->query_safe("SELECT charge('k0', 0)") if $number == 1;
	is( $session->query(qq{
			SELECT charge('$old', @{[$number - 1]}), charge('$new', $number), charge('$new', $number);
			EXECUTE claim('$new');
			SELECT charge('x $new', 1, '1 microsecond'), pg_sleep(0.001), charge('x $new', 2), charge('x $new', 2);
			SELECT array(SELECT idempotency.once_many('m', array['$old', '$new', 'o $new'])),
				idempotency.once('m', 'o $new'), idempotency.once('m', 'p $new'), idempotency.forget('m', 'p $new'),
				idempotency.once('m', 'p $new')}),
		join("\n", qq(replayed {"answer" : @{[$number - 1]}}|claimed|replayed {"answer" : $number}),
			'replayed', 'claimed||claimed|replayed {"answer" : 2}', qq({"o $new"}|f|t|t|t)),
		"$after: the session continues");
	$session->{stderr} = '';
}

# is_sound compares every index of the table with the table.
sub is_sound
{
	my ($after) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($rc, $out, $err) = $node->psql('postgres', q{
		SELECT bt_index_check(c.oid, true) FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
		WHERE i.indrelid = 'idempotency.key'::regclass AND c.relam = (SELECT oid FROM pg_am WHERE amname = 'btree')});
	is($err, '', "$after: every row is in every btree");
}

works('at first');

# ----------------------------------------------------------------
# Storage
# ----------------------------------------------------------------

foreach my $command (
	'VACUUM FULL idempotency.key', 'VACUUM (FREEZE) idempotency.key', 'ANALYZE idempotency.key',
	'REINDEX TABLE idempotency.key', 'REINDEX INDEX CONCURRENTLY idempotency.key_pkey',
	'REINDEX TABLE CONCURRENTLY idempotency.key', 'REINDEX SCHEMA idempotency',
	'ALTER TABLE idempotency.key SET TABLESPACE elsewhere',
	'ALTER INDEX idempotency.key_pkey SET TABLESPACE elsewhere',
	'REINDEX (TABLESPACE pg_default) TABLE CONCURRENTLY idempotency.key',
	'ALTER TABLE idempotency.key SET TABLESPACE pg_default',
	'CLUSTER idempotency.key USING key_pkey', 'ALTER TABLE idempotency.key SET (fillfactor = 50)',
	'ALTER TABLE idempotency.key ALTER response SET STORAGE EXTERNAL, ALTER scope SET STATISTICS 1000',
	'ALTER TABLE idempotency.key REPLICA IDENTITY FULL', 'ALTER TABLE idempotency.key OWNER TO CURRENT_USER',
	'ALTER INDEX idempotency.key_pkey RENAME TO another_name')
{
	$node->safe_psql('postgres', $command);
	works($command);
	is_sound($command);
}
$node->safe_psql('postgres', 'TRUNCATE idempotency.key');
is($session->query_safe("SELECT charge('k$number', $number)"), 'claimed', 'after TRUNCATE every key is new');
works('TRUNCATE');

# The extension's indexes with more columns, and as they were.
foreach my $include ('INCLUDE (expires_at)', '')
{
	$node->safe_psql('postgres', qq{
		ALTER TABLE idempotency.key DROP CONSTRAINT another_name;
		ALTER TABLE idempotency.key ADD CONSTRAINT another_name PRIMARY KEY (key, scope) $include;
		DROP INDEX idempotency.key_abandoned;
		CREATE INDEX key_abandoned ON idempotency.key (scope, token) $include WHERE token IS NOT NULL});
	works("indexes '$include'");
	$session->query_safe(q{SELECT idempotency.claim('m', 'leased', lease => '1 hour')});
	is_sound("indexes '$include'");
	$session->query_safe(q{SELECT idempotency.forget('m', 'leased')});
}

# The same commands, executed by the session itself, also in its own transaction.
foreach my $command ('VACUUM FULL idempotency.key', 'REINDEX TABLE CONCURRENTLY idempotency.key')
{
	$session->query_safe($command);
	works("$command by the session itself");
}
foreach my $command ('REINDEX TABLE idempotency.key', 'CLUSTER idempotency.key USING another_name',
	'ALTER TABLE idempotency.key SET TABLESPACE elsewhere')
{
	$session->query_safe("BEGIN; SELECT idempotency.claim('m', '$command')");
	$session->query_safe($command);
	$session->query_safe("SELECT idempotency.complete('m', '$command', '1'); COMMIT");
	is($session->query_safe("EXECUTE claim('$command')"), 'replayed', "$command between claim and complete");
	works($command);
	is_sound($command);
}

# ----------------------------------------------------------------
# During a claim of another session
# ----------------------------------------------------------------

# Commands that move rows wait for the claim, which has located the expired row.
$session->query_safe(q{SELECT charge('expired', 1, '1 microsecond'); BEGIN; SELECT idempotency.claim('m', 'expired')});
foreach my $command ('VACUUM FULL idempotency.key', 'CLUSTER idempotency.key USING another_name',
	'REINDEX TABLE idempotency.key', 'ALTER TABLE idempotency.key SET TABLESPACE pg_default')
{
	fails_with($node, "SET lock_timeout = '50ms'; $command", '55P03', "$command waits for an open claim");
}
$node->safe_psql('postgres', 'VACUUM idempotency.key');
$session->query_safe(q{SELECT idempotency.complete('m', 'expired', '2'); COMMIT});
is($session->query_safe(q{SELECT response FROM idempotency.claim('m', 'expired')}), '2',
	'an expired key is overwritten after VACUUM');
is_sound('VACUUM during a claim');

# Concurrent builds also wait for the claim, but do not block other writes.
foreach my $command ('REINDEX TABLE CONCURRENTLY idempotency.key',
	'CREATE INDEX CONCURRENTLY by_expiry ON idempotency.key (expires_at)',
	'CREATE UNIQUE INDEX CONCURRENTLY by_key ON idempotency.key (key, scope)')
{
	$session->query_safe(q{BEGIN; SELECT idempotency.claim('m', 'slow')});
	my $builder = open_session($node);
	$builder->query_until(qr/begun/, "\\echo begun\n$command;\n");
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_progress_create_index
		WHERE phase LIKE 'waiting for%'}) or die "$command does not wait";
	$node->safe_psql('postgres', qq{SELECT charge('meanwhile $number', 1), charge('short $number', 1, '1 microsecond');
		SELECT charge('short $number', 2); SELECT idempotency.once_many('m', array['batch $number'])});
	$session->query_safe(q{SELECT idempotency.complete('m', 'slow', '1'); COMMIT});
	is($builder->query('SELECT 1'), 1, "$command ends");
	$builder->quit;
	is($session->query_safe(qq{EXECUTE claim('slow'); EXECUTE claim('meanwhile $number'); EXECUTE claim('batch $number');
			SELECT idempotency.forget('m', 'slow')}),
		"replayed\nreplayed\nreplayed\nt", "$command: rows that were written meanwhile are found");
	works($command);
	is_sound($command);
}

# ----------------------------------------------------------------
# Additional indexes
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{
	CREATE INDEX by_lower ON idempotency.key (lower(key)) INCLUDE (status);
	CREATE UNIQUE INDEX by_both ON idempotency.key (scope, lower(key), (status IS NULL));
	CREATE INDEX only_failed ON idempotency.key (created_at) WHERE status < 0;
	CREATE INDEX by_hash ON idempotency.key USING hash ((key::text));
	CREATE INDEX by_block ON idempotency.key USING brin (created_at);
	CREATE INDEX by_word ON idempotency.key USING gin (to_tsvector('simple', key));
	CREATE INDEX by_range ON idempotency.key USING gist (tstzrange(created_at, NULL))});
works("with an administrator's indexes") foreach 1 .. 20;
is($session->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('m', 'failed');
	SELECT idempotency.fail('m', 'failed', '1', 400); COMMIT; EXECUTE claim('failed')}),
	"claimed\n1\nreplayed", 'a failure is stored');
is_sound("with an administrator's indexes");

# Each access path must find the same rows.
foreach my $condition (q{expires_at > now()}, q{expires_at <= now()}, q{lower(key) = 'k30'}, q{status < 0},
	q{scope = 'm' AND key = 'k30'}, q{key::text = 'x k30'}, q{created_at > now() - interval '1 day'},
	q{to_tsvector('simple', key) @@ 'k30'}, q{tstzrange(created_at, NULL) && tstzrange(now(), NULL)})
{
	my $query = "SELECT count(*), md5(string_agg(key, ',' ORDER BY scope, key)) FROM idempotency.key WHERE $condition";
	my $by_index = "SET enable_seqscan = off;";
	my $by_table = "SET enable_indexscan = off; SET enable_bitmapscan = off; SET enable_indexonlyscan = off;";
	like($node->safe_psql('postgres', "$by_index EXPLAIN $query"), qr/Index .*Scan/, "an index serves $condition");
	is( $node->safe_psql('postgres', "$by_index $query"),
		$node->safe_psql('postgres', "$by_table $query"), "the index for $condition agrees with the table");
}

# A violated additional index is PostgreSQL's own error and leaves nothing behind.
my $own = q{SELECT charge('K30', 1)};
session_fails($session, $own, '23505', "a unique index of an administrator's", qr/by_both/);
session_fails($session, q{SELECT idempotency.once_many('m', array['a', 'P K30'])}, '23505', 'an additional unique index rejects a batch', qr/by_both/);
is($session->query_safe(q{SELECT idempotency.peek('m', 'K30') IS NULL, idempotency.peek('m', 'a') IS NULL}), 't|t',
	'a rejected batch leaves nothing behind');
$node->safe_psql('postgres', 'DROP INDEX idempotency.by_both');
is($session->query_safe($own), 'claimed', 'without the index the claim succeeds');
is_sound('at last');

# ----------------------------------------------------------------
# The extension, dropped and recreated
# ----------------------------------------------------------------

my ($drop, $create) = map { "$_ EXTENSION idempotency" } 'DROP', 'CREATE';
$session->query_safe("BEGIN; $drop; ROLLBACK");
works('DROP EXTENSION rolled back');
$node->safe_psql('postgres', $drop);
session_fails($session, q{SELECT charge('k1', 1)}, '3F000', 'without the extension there is no claim');
$node->safe_psql('postgres', $create);
$number = 0;
works('recreated by another session');
$session->query_safe("$drop; $create");
$number = 0;
works('recreated by the session');
$session->query_safe("BEGIN; $drop; $create");
is($session->query_safe(q{SELECT charge('k1', 1); COMMIT}), 'claimed', 'recreated in the transaction that claims');
is($session->query_safe(q{SELECT charge('k1', 1)}), qq(replayed {"answer" : 1}), 'the claim after the recreation is kept');
session_fails($session, "BEGIN; SELECT idempotency.claim('m', 'k2'); $drop; COMMIT", 'IK428',
	'dropping the extension does not complete a claim');
works('DROP EXTENSION refused at commit');

$session->quit;
$node->stop;
done_testing();
