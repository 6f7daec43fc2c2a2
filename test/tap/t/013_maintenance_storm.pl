# 013_maintenance_storm.pl
#
# Proves that maintenance under load is safe. Clients claim, complete, replay, overwrite
# expired keys and send overlapping batches. Meanwhile an administrator rewrites the
# table, rebuilds its indexes and adds others. Clients get only errors to retry, each
# key has one effect, all responses equal the stored ones, and every index agrees with
# the table. `make soak` runs more rounds.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => q{
allow_in_place_tablespaces = on
log_statement = none
synchronous_commit = off
max_connections = 30
});
$node->safe_psql('postgres', q{CREATE EXTENSION amcheck; CREATE TABLESPACE elsewhere LOCATION '';
	CREATE TABLE charge (key text, answer text);
	CREATE TABLE seen (key text);
	CREATE TABLE given (key text, answer text)});

my $dir = PostgreSQL::Test::Utils::tempdir;
append_to_file("$dir/claims.sql", <<'SQL');
\set key random(1, 4000)
\set answer random(1, 1000000000)
BEGIN;
SELECT replayed::int AS replayed, coalesce(response::text, '') AS response
	FROM idempotency.claim('load', :key::text, '{"a":1}', wait => '180 s') \gset
\if :replayed
INSERT INTO given VALUES (:key::text, ':response');
\else
INSERT INTO charge VALUES (:key::text, :answer::text);
SELECT idempotency.complete('load', :key::text, :answer::text);
\endif
COMMIT;
SQL
append_to_file("$dir/short.sql", <<'SQL');
\set key random(1, 50)
BEGIN;
SELECT replayed::int AS replayed
	FROM idempotency.claim('short', :key::text, wait => '180 s', retention => '2 ms') \gset
\if :replayed
\else
SELECT idempotency.complete('short', :key::text, repeat('1', :key)) AS response \gset
\endif
COMMIT;
SQL

# Keys depend on the time: all clients send the same new ones at once.
append_to_file("$dir/batches.sql", <<'SQL');
INSERT INTO seen SELECT k FROM idempotency.once_many('batch', array(
	SELECT (extract(epoch FROM clock_timestamp()) * 1000 + i)::int8::text FROM generate_series(1, 10) AS i)) AS k;
SQL

my ($out, $err) = ('', '');
my $load = IPC::Run::start([ $node->installed_command('pgbench'), '-n', '-c', '6', '-T', '600', '--max-tries=1000',
		'-f', "$dir/claims.sql\@4", '-f', "$dir/short.sql\@2", '-f', "$dir/batches.sql\@6",
		$node->connstr('postgres') ], '>', \$out, '2>', \$err);

# The administrator repeats until the clients have done enough.
my $rounds = 0;
do
{
	foreach my $command (
		'REINDEX TABLE CONCURRENTLY idempotency.key',
		'CREATE INDEX CONCURRENTLY by_expiry ON idempotency.key (expires_at)',
		'REINDEX INDEX CONCURRENTLY idempotency.key_pkey',
		'VACUUM idempotency.key',
		'VACUUM FULL idempotency.key',
		'CREATE INDEX CONCURRENTLY by_key ON idempotency.key (key, scope)',
		'REINDEX TABLE CONCURRENTLY idempotency.key',
		'CLUSTER idempotency.key USING key_pkey',
		'ALTER TABLE idempotency.key SET TABLESPACE elsewhere',
		'REINDEX (TABLESPACE elsewhere) TABLE CONCURRENTLY idempotency.key',
		'ALTER TABLE idempotency.key SET TABLESPACE pg_default',
		'DROP INDEX CONCURRENTLY idempotency.by_expiry',
		'DROP INDEX idempotency.by_key')
	{
		$node->safe_psql('postgres', $command);
	}
	$rounds++;
	$load->pump_nb;
} until ($rounds >= soak(4, 15)
	&& $node->safe_psql('postgres', 'SELECT (SELECT count(*) FROM idempotency.key) > ' . soak(4_000, 10_000)
		  . ' AND (SELECT least(count(*), (SELECT count(*) FROM charge)) > 1500 FROM given)') eq 't'
	|| $rounds >= 200
	|| !$load->pumpable);

ok($load->pumpable, 'the clients run to the end');
$load->signal('INT');
$load->finish;
unlike($err, qr/error|abort/i, "no client failed in $rounds rounds of maintenance") or diag $err;

is( $node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT key), count(*) > 1000 FROM charge}),
	'0|t', 'each operation had one effect');
is( $node->safe_psql('postgres', q{SELECT count(*) FILTER (WHERE c.key IS NULL), count(*) FILTER (WHERE k.key IS NULL),
		count(*) FILTER (WHERE c.answer <> k.response::text)
		FROM (SELECT * FROM idempotency.key WHERE scope = 'load') AS k FULL JOIN charge AS c USING (key)}),
	'0|0|0', 'each operation is stored with its response');
is( $node->safe_psql('postgres', q{SELECT count(*) > 1000, count(*) FILTER (WHERE g.answer IS DISTINCT FROM c.answer)
		FROM given AS g LEFT JOIN charge AS c USING (key)}), 't|0', 'every replay returned the stored response');
is( $node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT s.key), count(*) FILTER (WHERE s.key IS NULL),
		count(*) FILTER (WHERE k.key IS NULL), count(*) > 1000
		FROM seen AS s FULL JOIN (SELECT * FROM idempotency.key WHERE scope = 'batch') AS k USING (key)}),
	'0|0|0|t', 'each message was new once');
is($node->safe_psql('postgres', q{SELECT count(*), count(DISTINCT (scope, key)) FROM idempotency.key WHERE scope = 'short'}),
	'50|50', 'each expiring key has one row');
is( ($node->psql('postgres', q{SELECT bt_index_check('idempotency.key_pkey', true)}))[2],
	'', 'every row is in the index');

$node->stop;
done_testing();
