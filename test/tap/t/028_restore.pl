# 028_restore.pl
#
# Proves that a database continues unchanged after a restore: from every kind of dump
# into another cluster, from a base backup, and at a point in time. Responses are equal
# to the byte, lease owners finish with their tokens, consumers acknowledge their
# batches, each event is delivered once, and reaper and relay continue. Tokens that a
# recovery lost are rejected once the sequence is advanced as docs/operations.md
# describes.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RestoreTest;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $node = new_node('main', conf => workers_off(), init => { allows_streaming => 1, has_archiving => 1 });
my $history = make_history($node);
my $before = rows_of($node);

# ----------------------------------------------------------------
# Dump and restore
# ----------------------------------------------------------------

my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file');
my @restore = ('pg_restore', '--exit-on-error');
my @parts = ('--disable-triggers', '--data-only');

$node->command_ok([ 'pg_dump', @$_, 'postgres' ], "pg_dump @{$_}[0 .. $#$_ - 1]")
  foreach [ '--file', "$dir/plain" ], [ '--format=custom', '--file', "$dir/custom" ],
  [ '--format=directory', '--jobs=2', '--file', "$dir/directory" ],
  [ '--schema-only', '--file', "$dir/schema" ], [ @parts, '--file', "$dir/data" ];

my %restores = (
	plain => [ [ @psql, "$dir/plain" ] ],
	custom => [ [ @restore, "$dir/custom" ] ],
	directory => [ [ @restore, '--jobs=2', "$dir/directory" ] ],
	parts => [ [ @psql, "$dir/schema" ], [ @psql, "$dir/data" ] ],
	archive_parts => [ [ @restore, '--schema-only', "$dir/directory" ], [ @restore, @parts, '--jobs=2', "$dir/directory" ] ]);

my $other = new_node('other', conf => workers_off());
$other->safe_psql('postgres', $history->{roles});
foreach my $name (sort keys %restores)
{
	$other->safe_psql('postgres', "CREATE DATABASE $name TEMPLATE template0");
	$other->command_ok([ @$_, '--dbname', $name ], "$name: $_->[0] succeeds") foreach @{ $restores{$name} };
	ok(rows_of($other, $name) eq $before, "$name: every row is restored, byte for byte");
	check_restored($other, $history, dbname => $name, name => $name);
}
$other->stop;

# ----------------------------------------------------------------
# A base backup, and a point in time
# ----------------------------------------------------------------

# Rows after the backup are restored from the WAL.
$node->backup('base');
$node->safe_psql('postgres', q{SELECT idempotency.publish('job', '{"n": 14}', 'L'),
	idempotency.once('inbox', 'after the backup');
	SELECT pg_create_restore_point('here')});
my $here = rows_of($node);

# Rows after the target are lost, and the owner does not know that.
my $lost = $node->safe_psql('postgres', q{SELECT token FROM idempotency.claim('lease', 'lost', lease => '1 day')});
$node->safe_psql('postgres', q{BEGIN; SELECT idempotency.claim('charge', 'lost'); INSERT INTO charge VALUES ('lost', 1);
	SELECT idempotency.complete('charge', 'lost', '1'); COMMIT; SELECT idempotency.publish('charged', '{"n": 15}', 'lost')});
my $segment = $node->safe_psql('postgres', 'SELECT pg_walfile_name(pg_switch_wal())');
$node->poll_query_until('postgres', "SELECT last_archived_wal >= '$segment' FROM pg_stat_archiver") or die 'the WAL is not archived';
$node->stop;

# recovered returns a server that was recovered from the backup to a target.
sub recovered
{
	my ($name, $target) = @_;
	my $server = PostgreSQL::Test::Cluster->new($name);

	$server->init_from_backup($node, 'base', has_restoring => 1, standby => 0);
	$server->append_conf('postgresql.conf', "archive_mode = off\nrecovery_target_action = 'promote'\n$target");
	$server->start;
	$server->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()') or die 'the recovery does not end';
	return $server;
}

my $copy = recovered('copy', '');
is( $copy->safe_psql('postgres', "SELECT idempotency.complete('lease', 'lost', '\"done\"', token => $lost);
		SELECT response FROM idempotency.claim('charge', 'lost')"), qq("done"\n1), 'recovered to the end: the lease owner finishes');
$copy->stop;

my $then = recovered('then', "recovery_target_name = 'here'");
# A recovery after a crash can skip sequence numbers, but repeats none.
is(without_sequences(rows_of($then)), without_sequences($here), 'at a point in time: every row is restored, byte for byte');

# without_sequences removes the sequences from the result of rows_of().
sub without_sequences
{
	return $_[0] =~ s/^(?:token|outbox_seq)\|.*\n?//mgr;
}

# Key and effect were lost together; the token that was issued since is invalid.
is( $then->safe_psql('postgres', q{SELECT count(*) FROM charge WHERE key = 'lost';
		SELECT setval('idempotency.token', nextval('idempotency.token') + 1000000) > 0}), "0\nt", 'at a point in time: key and effect are lost');
is( $then->safe_psql('postgres', qq{SELECT outcome, token > 1000000 FROM idempotency.claim('lease', 'lost', lease => '1 day')}), 'claimed|t',
	'at a point in time: the next owner gets a new token');
fails_with($then, "SELECT idempotency.complete('lease', 'lost', token => $lost)", 'IK410', 'at a point in time: the former owner is rejected');
is( $then->safe_psql('postgres', q{SELECT idempotency.once('inbox', 'after the backup');
		SELECT payload->>'n' FROM idempotency.fetch('failed', lease => '1 us'); SELECT idempotency.ack('failed', batch)
		FROM idempotency.position WHERE batch IS NOT NULL AND subscription = 'failed'}), "f\n14\n1", 'at a point in time: rows from the WAL are restored');
check_restored($then, $history, name => 'at a point in time');
$then->stop;
done_testing();
