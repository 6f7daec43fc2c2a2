# 033_synchronous_commit.pl
#
# Proves what a committed response guarantees under each value of synchronous_commit.
# Values that wait for a synchronous standby lose no acknowledged operation in a
# failover, and acknowledge none that is lost. The others lose key, effect and event
# together, in a crash ("off") or a failover ("off", "local"). remote_write differs from
# on only if the standby's machine fails, which no test simulates.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my @modes = qw(off local remote_write on remote_apply);
my @waiting = @modes[2 .. 4];

my $node = new_node('primary', init => { allows_streaming => 1 }, conf => "wal_writer_delay = '10s'\nlog_statement = none\n");
$node->safe_psql('postgres', 'CREATE TABLE charge (key text)');

# operation is the SQL of one operation, up to its response.
sub operation
{
	my ($mode, $key) = @_;
	return qq{SET synchronous_commit = $mode; BEGIN;
		SELECT FROM idempotency.claim('charge', '$key'); INSERT INTO charge VALUES ('$key');
		SELECT FROM idempotency.publish('charged', '"$key"'); SELECT FROM idempotency.complete('charge', '$key', '"$key"'); COMMIT;
		\\echo answered\n};
}

# is_whole checks that an operation exists as a whole, or not at all if $there is false,
# and that a retry returns accordingly.
sub is_whole
{
	my ($server, $key, $there, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is( $server->safe_psql('postgres', qq{SELECT (SELECT count(*) FROM idempotency.key WHERE key::text = '$key'),
			(SELECT count(*) FROM charge WHERE key = '$key'), (SELECT count(*) FROM idempotency.outbox WHERE payload #>> '{}' = '$key');
			BEGIN; SELECT outcome, response FROM idempotency.claim('charge', '$key'); ROLLBACK}),
		$there ? qq(1|1|1\nreplayed|"$key") : "0|0|0\nclaimed|", "$name: " . ($there ? 'key, effect and event exist' : 'key, effect and event are lost'));
	return;
}

# ----------------------------------------------------------------
# A crash of the server
# ----------------------------------------------------------------

foreach my $mode (@modes)
{
	like($node->safe_psql('postgres', operation($mode, "crash $mode")), qr/^answered$/m, "crash, $mode: acknowledged");
	$node->stop('immediate');
	$node->start;

	# Whether "off" has lost the operation depends on the WAL writer.
	my $there = $mode ne 'off' || $node->safe_psql('postgres', "SELECT count(*) FROM charge WHERE key = 'crash off'") > 0;
	is_whole($node, "crash $mode", $there, "crash, $mode");
}

# ----------------------------------------------------------------
# A failover
# ----------------------------------------------------------------

my $standby = synchronous_standby($node);

foreach my $mode (@modes)
{
	like($node->safe_psql('postgres', operation($mode, "before $mode")), qr/^answered$/m, "the standby follows, $mode: acknowledged");
	$node->wait_for_catchup($standby) unless grep { $_ eq $mode } @waiting;
}

# From here on the standby receives no WAL.
my $sender = $node->safe_psql('postgres', 'SELECT pid FROM pg_stat_replication');
kill 'STOP', $sender or die "the WAL sender does not stop: $!";
foreach my $mode ('off', 'local')
{
	like($node->safe_psql('postgres', operation($mode, "behind $mode")), qr/^answered$/m, "the standby lags, $mode: acknowledged without the standby");
}
my %session;
foreach my $mode (@waiting)
{
	$session{$mode} = open_session($node);
	$session{$mode}->query_until(qr/begins/, "\\echo begins\n" . operation($mode, "behind $mode"));
	$node->poll_query_until('postgres', qq{SELECT count(*) = @{[scalar keys %session]} FROM pg_stat_activity WHERE wait_event = 'SyncRep'})
	  or die "$mode does not wait for the standby";
	is( $node->safe_psql('postgres', qq{SELECT outcome FROM idempotency.try_claim('charge', 'behind $mode');
			SELECT count(*) FROM charge WHERE key = 'behind $mode'}), "in_progress\n0", "the standby lags, $mode: waits, and other sessions do not see the operation");
}

# The primary is lost: a killed WAL sender makes it restart.
kill 'KILL', $sender or die "the WAL sender does not die: $!";
wait_for_end($session{$_}) foreach @waiting;
unlike($session{$_}->{stdout}, qr/answered/, "the primary is lost, $_: not acknowledged") foreach @waiting;
$node->stop('immediate', fail_ok => 1);
$standby->promote;

is_whole($standby, "before $_", 1, "promoted, acknowledged before under $_") foreach @modes;
is_whole($standby, "behind $_", 0, "promoted, acknowledged without the standby, under $_") foreach 'off', 'local';
is_whole($standby, "behind $_", 0, "promoted, not acknowledged, under $_") foreach @waiting;
$standby->stop;
done_testing();
