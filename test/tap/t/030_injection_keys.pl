# 030_injection_keys.pl
#
# Stops claims, completions, leases, evictions and the reaper between any two of their
# steps. There they are cancelled, or killed alone or with the server: nothing is left
# behind, and the retry has its effect once. Or another session acts in between, and
# both continue: there is one effect, and no row with a valid owner is deleted or
# overwritten.

use strict;
use warnings FATAL => 'all';

use InjectionTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = injection_node('main');

# The functions of a client, each one statement and one transaction: charge() has its
# effect under a transactional claim, finish() under a lease.
$node->safe_psql('postgres', q{
	CREATE SEQUENCE number;
	CREATE TABLE charge (answer text);
	CREATE FUNCTION charge() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		op idempotency.operation := idempotency.claim('s', 'k', '{"amount": 1}', wait => '0');
		answer text := nextval('number');
	BEGIN
		IF op.replayed THEN RETURN op.outcome; END IF;
		INSERT INTO charge VALUES (answer);
		PERFORM idempotency.complete('s', 'k', answer);
		RETURN op.outcome;
	END $$;
	CREATE TABLE owner (token int8);
	CREATE FUNCTION lease() RETURNS text LANGUAGE sql AS $$
		WITH op AS MATERIALIZED (SELECT * FROM idempotency.claim('s', 'k', '{"amount": 1}', lease => '1 hour', wait => '0')),
			noted AS (INSERT INTO owner SELECT token FROM op)
		SELECT outcome FROM op $$;
	CREATE FUNCTION first_token() RETURNS int8 LANGUAGE sql AS 'SELECT min(token) FROM owner';
	CREATE FUNCTION finish(token int8 DEFAULT first_token()) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		answer text := nextval('number');
	BEGIN
		INSERT INTO charge VALUES (answer);
		PERFORM idempotency.complete('s', 'k', answer, token => token);
		RETURN 'finished';
	END $$;
	CREATE FUNCTION once() RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		new bool := idempotency.once('s', 'k');
	BEGIN
		IF new THEN INSERT INTO charge VALUES ('once'); END IF;
		RETURN new;
	END $$;
	CREATE FUNCTION batch() RETURNS text LANGUAGE sql AS
		$$INSERT INTO charge SELECT 'batch' FROM idempotency.once_many('s', ARRAY['k']) RETURNING answer$$;

	-- A lease expires, or a row.
	CREATE FUNCTION pass() RETURNS void LANGUAGE sql AS
		$$UPDATE idempotency.key SET leased_at = now() - interval '2 hours', leased_until = now() - interval '1 hour'$$;
	CREATE FUNCTION expire() RETURNS void LANGUAGE sql AS
		$$UPDATE idempotency.key SET expires_at = now() - interval '1 hour'$$});

# The owner of the first lease uses first_token().
my $charge = 'SELECT charge()';
my $lease = 'SELECT lease()';
my $finish = 'SELECT finish()';
my $try = q{SELECT outcome FROM idempotency.try_claim('s', 'k', '{"amount": 1}', lease => '1 hour')};
my $renew = q{SELECT idempotency.renew('s', 'k', first_token(), '1 hour') > now()};
my $checkpoint = q{SELECT idempotency.checkpoint('s', 'k', first_token(), 'charged') IS NOT NULL};
my $release = q{SELECT idempotency.release('s', 'k', first_token())};
my $abandoned = q{SELECT count(*) FROM idempotency.claim_abandoned('s', '1 hour')};
my $forget = q{SELECT idempotency.forget('s', 'k')};
my $reap = 'SELECT idempotency.reap()';
my @leased = ($lease);
my @advanced = ($lease, $checkpoint);
my @lapsed = ($lease, 'SELECT pass()');
my @expired = ($charge, 'SELECT expire()');
my @zombie = (@lapsed, 'SELECT expire()');

# begin prepares the key.
sub begin
{
	$node->safe_psql('postgres', join ';', 'DELETE FROM idempotency.key; TRUNCATE charge, owner', @_);
	return;
}

# rows returns all stored rows and effects.
sub rows
{
	return $node->safe_psql('postgres', 'SELECT k FROM idempotency.key AS k; SELECT answer FROM charge ORDER BY 1');
}

# has_effects checks the number of effects of the key, and that a retry finishes the
# operation from any state and returns the response of the last effect.
sub has_effects
{
	my ($effects, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $token = $node->safe_psql('postgres', 'SELECT max(token) FROM idempotency.key');

	is(result_of($node, "SELECT finish($token)"), 'finished', "$name: the owner finishes") if $token ne '';
	like(result_of($node, $charge), qr/^(claimed|replayed)$/, "$name: a retry");
	is(result_of($node, $charge), 'replayed', "$name: another retry");
	is( $node->safe_psql('postgres', q{SELECT count(*),
			bool_or(answer = coalesce((idempotency.peek('s', 'k')).response::text, answer)) FROM charge}),
		"$effects|t", "$name: the number of effects, and the response belongs to one");
	return;
}

# ----------------------------------------------------------------
# Cancelled or killed
# ----------------------------------------------------------------

my @claim = qw(claim-lock claim-probe);
my @insert = qw(row-insert row-index row-close);
my @overwrite = qw(row-overwrite row-reindex row-close);
my @owner = qw(owner-lock owner-probe);
my @finish = qw(finish-write finish-close);
my @delete = qw(row-delete row-end);

# For each step: its SQL, its preparation, the points where it is stopped, the result of
# its retry, and the number of effects in the end.
my %steps = (
	'a claim' => [ $charge, [], [ @claim, 'claim-mark', @finish, @insert ], 'claimed', 1 ],
	'a claim of an expired key' => [ $charge, \@expired, [ @claim, @overwrite ], 'claimed', 2 ],
	'a lease' => [ $lease, [], [ @claim, 'lease-write', @insert, 'claim-mark' ], 'claimed', 1 ],
	'a takeover' => [ $lease, \@lapsed, [ @claim, 'lease-write', @overwrite, 'claim-mark' ], 'taken_over', 1 ],
	'a takeover in a batch' => [ $abandoned, \@lapsed, [ @claim, 'lease-write', @overwrite ], '1', 1 ],
	'a renewal' => [ $renew, \@leased, [ @owner, @overwrite ], 't', 1 ],
	'a checkpoint' => [ $checkpoint, \@leased, [ @owner, @overwrite ], 't', 1 ],
	'a completion' => [ $finish, \@leased, [ @owner, @finish, @overwrite ], 'finished', 1 ],
	'a late completion' => [ $finish, \@lapsed, [ @owner, @finish, @overwrite ], 'finished', 1 ],
	'a release' => [ $release, \@leased, [ @owner, @delete ], 't', 1 ],
	'a release with a checkpoint' => [ $release, \@advanced, [ @owner, @overwrite ], 't', 1 ],
	'a message' => [ 'SELECT once()', [], [ @claim, @insert ], 'true', 1 ],
	'a batch' => [ 'SELECT batch()', [], [qw(once-insert once-index once-confirm row-close)], 'batch', 1 ],
	'a batch over an expired key' => [ 'SELECT batch()', \@expired, \@overwrite, 'batch', 2 ],
	'an eviction' => [ $forget, [$charge], [ qw(forget-lock forget-probe), @delete ], 't', 2 ],
	'an eviction of a lease' => [ $forget, \@advanced, [ qw(forget-lock forget-probe), @delete ], 't', 1 ],
	'the reaper' => [ $reap, \@expired, [qw(reap-lock reap-delete reap-save reap-end)], '1', 2 ],
	'the reaper of zombies' => [ $reap, \@zombie, [qw(reap-lock reap-delete reap-save reap-end)], '1', 1 ]);

# A cancelled call with a token leaves a transaction that cannot commit until the same
# call succeeds: "again" repeats it in the same transaction.
my %faults = faults($node);
foreach my $step (sort keys %steps)
{
	my ($sql, $before, $points, $result, $effects) = @{ $steps{$step} };
	foreach my $point (@$points)
	{
		foreach my $fault (sort keys %faults)
		{
			my $name = "$step, $fault at $point";
			begin(@$before);
			my $rows = rows();

			my $again = $faults{$fault}->(stop_at($node, $point, $sql), $point, $sql, $result, $name);
			is(rows(), $rows, "$name: nothing is left behind");
			is($again->($sql), $result, "$name: the retry");
			has_effects($effects, $name);
		}
	}
}

# ----------------------------------------------------------------
# Another session acts in between
# ----------------------------------------------------------------

# The stopped SQL, its preparation, the point; the SQL and result of the other session;
# the result of the stopped session; and the number of effects in the end.
my $patience = q{SET idempotency.wait = '50ms'; };
my @pairs = (
	[ 'a duplicate starts and ends between the read and the lock',
		$charge, [], 'claim-lock', [ $charge, 'claimed' ], 'replayed', 1 ],
	[ 'a message starts and ends between the read and the lock',
		'SELECT once()', [], 'claim-lock', [ 'SELECT once()', 'true' ], 'false', 1 ],
	[ 'a lease is taken between the read and the lock',
		$charge, [], 'claim-lock', [ $lease, 'claimed' ], 'IK409', 1 ],
	[ 'an expired key is claimed between the read and the lock',
		$charge, \@expired, 'claim-lock', [ $charge, 'claimed' ], 'replayed', 2 ],
	[ 'an expired key is reaped between the read and the lock',
		$charge, \@expired, 'claim-lock', [ $reap, '1' ], 'claimed', 2 ],
	[ 'a duplicate finds the lock taken', $charge, [], 'claim-probe', [ $try, 'in_progress' ], 'claimed', 1 ],
	[ 'a duplicate finds the claim', $charge, [], 'claim-mark', [ $charge, 'IK409' ], 'claimed', 1 ],
	[ 'a duplicate finds the finished row', $charge, [], 'finish-close', [ $charge, 'IK409' ], 'claimed', 1 ],
	[ 'the reaper deletes the expired row of a key that is locked',
		$charge, \@expired, 'claim-probe', [ $reap, '1' ], 'claimed', 2 ],
	[ 'the reaper finds the row replaced', $charge, \@expired, 'row-reindex', [ $reap, '0' ], 'claimed', 2 ],
	[ 'a batch, which takes no lock, commits before the row',
		$charge, [], 'row-insert', [ 'SELECT batch()', 'batch' ], '40001', 1 ],
	[ 'a batch commits before the index entry',
		$charge, [], 'row-index', [ 'SELECT batch()', 'batch' ], '40001', 1 ],
	[ 'a batch commits before the row of a message',
		'SELECT once()', [], 'row-insert', [ 'SELECT batch()', 'batch' ], '40001', 1 ],
	[ 'a batch replaces an expired row first',
		$charge, \@expired, 'row-overwrite', [ 'SELECT batch()', 'batch' ], '40001', 2 ],
	[ 'a batch commits before the row of a lease',
		$lease, [], 'row-insert', [ 'SELECT batch()', 'batch' ], '40001', 1 ],
	[ 'two batches, and one commits before the row of the other',
		'SELECT batch()', [], 'once-insert', [ 'SELECT batch()', 'batch' ], '', 1 ],
	[ 'two batches, and one commits before the index entry of the other',
		'SELECT batch()', [], 'once-index', [ 'SELECT batch()', 'batch' ], '', 1 ],
	[ 'two batches, and one has to wait',
		'SELECT batch()', [], 'once-confirm', [ q{SET lock_timeout = '50ms'; SELECT batch()}, '55P03' ], 'batch', 1 ],
	[ 'a message commits before the row of a batch',
		'SELECT batch()', [], 'once-insert', [ 'SELECT once()', 'true' ], '', 1 ],
	[ 'a takeover commits between the read of the late owner and the lock',
		$finish, \@lapsed, 'owner-lock', [ $lease, 'taken_over' ], 'IK410', 1 ],
	[ 'a takeover finds the late owner in progress', $finish, \@lapsed, 'owner-probe', [ $try, 'in_progress' ], 'finished', 1 ],
	[ 'a takeover finds the late owner done', $finish, \@lapsed, 'finish-close', [ $try, 'in_progress' ], 'finished', 1 ],
	[ 'the late owner finishes between the read of a takeover and the lock',
		$lease, \@lapsed, 'claim-lock', [ $finish, 'finished' ], 'replayed', 1 ],
	[ 'the late owner renews between the read of a takeover and the lock',
		$lease, \@lapsed, 'claim-lock', [ $renew, 't' ], 'IK409', 1 ],
	[ 'the late owner releases between the read of a takeover and the lock',
		$lease, \@lapsed, 'claim-lock', [ $release, 't' ], 'claimed', 1 ],
	[ 'the late owner finds a takeover in progress',
		$lease, \@lapsed, 'lease-write', [ "$patience$finish", 'IK409' ], 'taken_over', 1 ],
	[ 'two take over', $lease, \@lapsed, 'claim-lock', [ $lease, 'taken_over' ], 'IK409', 1 ],
	[ 'two take over in a batch', $abandoned, \@lapsed, 'claim-lock', [ $abandoned, '1' ], '0', 1 ],
	[ 'the late owner finishes before a batch takes over',
		$abandoned, \@lapsed, 'claim-lock', [ $finish, 'finished' ], '0', 1 ],
	[ 'a zombie is reaped before a takeover', $lease, \@zombie, 'claim-lock', [ $reap, '1' ], 'claimed', 1 ],
	[ 'a takeover commits between the read of a renewal and the lock',
		$renew, \@lapsed, 'owner-lock', [ $lease, 'taken_over' ], 'IK410', 1 ],
	[ 'a takeover finds a renewal in progress', $renew, \@lapsed, 'row-overwrite', [ $try, 'in_progress' ], 't', 1 ],
	[ 'a takeover finds a renewal done', $renew, \@lapsed, 'row-reindex', [ $try, 'in_progress' ], 't', 1 ],
	[ 'a takeover commits before a checkpoint',
		$checkpoint, \@lapsed, 'owner-lock', [ $lease, 'taken_over' ], 'IK410', 1 ],
	[ 'a takeover commits before a release', $release, \@lapsed, 'owner-lock', [ $lease, 'taken_over' ], 'IK410', 1 ],
	[ 'a claim finds a release in progress', $release, \@lapsed, 'row-delete', [ $try, 'in_progress' ], 't', 1 ],
	[ 'the reaper finds a takeover in progress', $lease, \@zombie, 'row-overwrite', [ $reap, '0' ], 'claimed', 1 ],
	[ 'an expired key is claimed before the reaper has its lock',
		$reap, \@expired, 'reap-lock', [ $charge, 'claimed' ], '0', 2 ],
	[ 'an expired key is a message before the reaper has its lock',
		$reap, \@expired, 'reap-lock', [ 'SELECT once()', 'true' ], '0', 2 ],
	[ 'an expired key is in a batch when the reaper has its lock',
		$reap, \@expired, 'reap-delete', [ 'SELECT batch()', 'batch' ], '0', 2 ],
	[ 'a zombie is taken over before the reaper has its lock',
		$reap, \@zombie, 'reap-lock', [ $lease, 'claimed' ], '0', 1 ],
	[ 'an expired key is claimed before an eviction has its lock',
		$forget, \@expired, 'forget-lock', [ $charge, 'claimed' ], 't', 3 ],
	[ 'an expired key is reaped before an eviction has its lock',
		$forget, \@expired, 'forget-lock', [ $reap, '1' ], 'f', 2 ],
	[ 'an expired key is in a batch when an eviction has its lock',
		$forget, \@expired, 'row-delete', [ 'SELECT batch()', 'batch' ], '40001', 2 ],
	[ 'the owner finishes before an eviction has its lock',
		$forget, \@leased, 'forget-lock', [ $finish, 'finished' ], 't', 2 ],
	[ 'two evict', $forget, [$charge], 'forget-lock', [ $forget, 't' ], 'f', 2 ],
	[ 'an eviction finds the claim', $charge, [], 'claim-mark', [ "$patience$forget", 'IK409' ], 'claimed', 1 ],
	[ 'a retry finds an eviction in progress', $forget, [$charge], 'row-delete', [ $charge, 'replayed' ], 't', 2 ],
	[ 'a retry finds an eviction done', $forget, [$charge], 'row-end', [ $charge, 'replayed' ], 't', 2 ],
	[ 'the reaper deletes the row before an eviction does', $forget, \@expired, 'row-delete', [ $reap, '1' ], 'f', 2 ],
	[ 'a takeover finds an eviction in progress', $forget, \@lapsed, 'row-delete', [ $try, 'in_progress' ], 't', 1 ],
	[ 'the owner finds an eviction in progress', $forget, \@leased, 'forget-probe', [ "$patience$finish", 'IK409' ], 't', 1 ],
	[ 'the lease is evicted before its owner has the lock', $finish, \@leased, 'owner-lock', [ $forget, 't' ], 'IK410', 1 ],
	[ 'an expired row is replaced before the reaper deletes it', $reap, \@expired, 'reap-delete', [ $try, 'claimed' ], '0', 2 ],
	[ 'a lease finds the row deleted, and waits for the reaper',
		$reap, \@expired, 'reap-save', [ "SET lock_timeout = '50ms'; $try", '55P03' ], '1', 2 ]);

foreach my $pair (@pairs)
{
	my ($name, $sql, $before, $point, $meanwhile, $result, $effects) = @$pair;
	begin(@$before);
	my ($session) = stop_at($node, $point, $sql);

	is(result_of($node, $meanwhile->[0]), $meanwhile->[1], "$name: meanwhile");
	wake($node, $point);
	is(answer_of($session), $result, "$name: the stopped session");
	is(result_of($node, $finish), 'IK410', "$name: the owner that lost the lease cannot finish") if $result eq 'IK410' || $result eq 'taken_over';
	$session->quit;
	has_effects($effects, $name);
}

$node->stop;
done_testing();
