# 042_howto.pl
#
# Runs the how-to pages that need several sessions or servers. replication.md: the
# subscriber returns what the page shows. key-table.md: calls of the old code are open,
# blocked and prepared during the migration, and clients retry the same few keys from
# before the first step until after the last one. In the end each key has one effect, and
# every response that a client received is that of the effect. No client gets an error,
# and rows of any age are migrated without expiry, because the old table deleted none.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use IPC::Run;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $pages = join '', map { slurp_file($_) } glob dirname(__FILE__) . '/../../../docs/howto/*.md';

# example returns the block of the pages that begins with a text, and the output that the
# page shows.
sub example
{
	my ($begin) = @_;
	my ($sql, $output) = $pages =~ /^```sql\n(\Q$begin\E(?:(?!^```).*\n)*)```\n(?:\n```text\n((?:(?!^```).*\n)*)```)?/m
	  or die "no page has a block \"$begin\"";
	return ($sql, $output);
}

# run_sql runs a block with psql, and returns its output without trailing spaces.
sub run_sql
{
	my ($node, $sql, %variables) = @_;
	my @psql = ($node->installed_command('psql'), '-Xq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'),
		map { ('-v', "$_=$variables{$_}") } sort keys %variables);

	my ($stdout, $stderr);
	IPC::Run::run(\@psql, '<', \$sql, '>', \$stdout, '2>', \$stderr) or die "$sql: $stderr";
	return $stdout =~ s/ +$//mgr;
}

# run_block runs the block that begins so, whose output must be that of the page.
sub run_block
{
	my ($node, $begin, %variables) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($sql, $output) = example($begin);
	my $printed = run_sql($node, $sql, %variables);

	return ok(1, $begin =~ s/\s*\z/: runs/r) unless defined $output;
	return is($printed =~ s/\n\n\z/\n/r, $output, $begin =~ s/\s*\z/: prints what the page shows/r);
}

is(scalar(() = $pages =~ /^```sql\n-- on the /mg), 4, 'test/docs/run skips exactly these blocks of the pages');
my $node = new_node('publisher', init => { allows_streaming => 'logical' },
	conf => "max_connections = 50\nmax_prepared_transactions = 5\nidempotency.wait = 10min\n");
my $subscriber = new_node('subscriber', init => { allows_streaming => 'logical' });

# ----------------------------------------------------------------
# Logical replication
# ----------------------------------------------------------------

run_sql($node, (example('CREATE TABLE account'))[0]);
run_block($node, '-- on the publisher' . "\n");
$subscriber->safe_psql('postgres', 'DROP EXTENSION idempotency');
$node->command_ok([ 'pg_dump', '--schema-only', '--no-publications', '--file', "$dir/schema", 'postgres' ], 'the schema of the publisher is dumped');
$subscriber->command_ok([ 'psql', '-Xq', '-v', 'ON_ERROR_STOP=1', '--file', "$dir/schema", 'postgres' ], 'the schema is restored on the subscriber');
run_block($subscriber, "-- on the subscriber\n", publisher => $node->connstr('postgres'));
$subscriber->wait_for_subscription_sync($node, 'answers');
run_block($node, '-- on the publisher, later');
$node->wait_for_catchup('answers');
run_block($subscriber, '-- on the subscriber, later');
$subscriber->safe_psql('postgres', 'DROP SUBSCRIPTION answers');
$subscriber->stop;

# ----------------------------------------------------------------
# Migration from a custom key table: calls in the old code
# ----------------------------------------------------------------

run_block($node, '-- before');
$node->safe_psql('postgres', q{
	CREATE TABLE heard (key text, payout int);
	INSERT INTO request_log VALUES ('old', '{"amount": 1}', 201, '{"payout": "old"}', now() - interval '25 hours'),
		('older', '{"amount": 1}', 201, '{"payout": "older"}', now() - interval '9 years'),
		('died', '{"amount": 1}', NULL, NULL, now())});

# Clients that call the same few keys concurrently, then later keys.
append_to_file("$dir/client", q{\set n :n + 1
\set k random(greatest(1, :n / 2 - 20), :n / 2 + 5)
SELECT payout_create('k:k', 1) ->> 'payout' AS payout \gset
INSERT INTO heard VALUES ('k:k', :payout);
});
my @bench = ($node->installed_command('pgbench'), '--no-vacuum', '--client=6', '--rate=400', '-D', 'n=0', '--file', "$dir/client",
	'--host', $node->host, '--port', $node->port);
my $clients = IPC::Run::start([ @bench, '--time=600', 'postgres' ], '<', \undef, '>', "$dir/out", '2>', "$dir/err");

# wait_for_progress waits until the clients have responses for so many more keys.
sub wait_for_progress
{
	my ($more) = @_;
	my $goal = $more + $node->safe_psql('postgres', 'SELECT count(DISTINCT key) FROM heard');
	$node->poll_query_until('postgres', "SELECT count(DISTINCT key) >= $goal FROM heard") or die 'no progress: ' . slurp_file("$dir/err");
	return;
}

# begins runs step 1 or 4 and returns its time; still_there runs step 2 and returns how
# many earlier transactions are still open.
sub begins
{
	my ($step) = @_;
	my ($switched) = run_sql($node, (example("-- $step\n"))[0] . "\\echo :switched\n") =~ /^(\d.*)/m;
	return $switched;
}

sub still_there
{
	my ($switched) = @_;
	my ($count) = run_sql($node, (example('-- step 2'))[0], switched => $switched) =~ /^ +(\d+)$/m;
	return $count;
}

# calls sends a call; answer waits for its result.
sub calls
{
	my ($session, $key) = @_;
	$session->query_until(qr/begun/, qq{\\echo begun\nSELECT payout_create('$key', 1);\n});
	return;
}
sub answer { return $_[0]->query_safe('') }

# wait_for_calls waits until so many sessions wait for a call of that key.
sub wait_for_calls
{
	my ($key, $many) = @_;
	$node->poll_query_until('postgres', qq{SELECT count(*) = $many FROM pg_stat_activity
		WHERE wait_event_type = 'Lock' AND query ~ 'payout_create.''$key'''}) or die "$key: no session waits";
	return;
}

wait_for_progress(20);
my %old = map { $_ => open_session($node) } qw(commits aborts late);
my %new = map { $_ => open_session($node) } qw(commits aborts prepared);
my %answer;
foreach my $key (qw(commits aborts))
{
	$old{$key}->query_safe('BEGIN');
	$answer{$key} = $old{$key}->query_safe("SELECT payout_create('$key', 1)");
}
$answer{prepared} = $node->safe_psql('postgres', q{BEGIN; SELECT payout_create('prepared', 1); PREPARE TRANSACTION 'old'});
calls($old{late}, 'aborts');
wait_for_calls('aborts', 1);

my $switched = begins('step 1');
cmp_ok(still_there($switched), '>=', 4, 'step 2: earlier transactions are open, also prepared ones');
calls($new{$_}, $_) foreach sort keys %new;
wait_for_calls('aborts', 2);
wait_for_calls($_, 1) foreach qw(commits prepared);
$old{commits}->query_safe('COMMIT');
$old{aborts}->query_safe('ROLLBACK');
$node->safe_psql('postgres', q{COMMIT PREPARED 'old'});
my $aborted = $answer{aborts};
$answer{aborts} = answer($old{late});
isnt($answer{aborts}, $aborted, 'a call that waited for a rolled back one pays');
is(answer($new{$_}), $answer{$_}, "$_: the old code and the new one return the same") foreach sort keys %new;
$_->quit foreach values %old, values %new;

# ----------------------------------------------------------------
# The other steps, and one step back, while the clients continue
# ----------------------------------------------------------------

wait_for_progress(20);
my ($back) = (example('-- before'))[0] =~ /^(CREATE FUNCTION.*?^END \$\$;)/ms;
$node->safe_psql('postgres', $back =~ s/CREATE/CREATE OR REPLACE/r);
wait_for_progress(20);
$switched = begins('step 1');
select undef, undef, undef, 0.1 while still_there($switched);
fails_with($node, q{SELECT payout_create('died', 1)}, 'P0001', 'step 1: a call with unknown outcome returns no response');
wait_for_progress(20);
like(run_sql($node, (example('-- step 3'))[0]), qr/^ +1$/m, 'step 3: a call with unknown outcome is not migrated');
$node->safe_psql('postgres', q{DELETE FROM request_log WHERE key = 'died'; DROP PROCEDURE request_log_move});
run_block($node, '-- step 3');
is( $node->safe_psql('postgres', q{
		SELECT key, status, response, expires_at FROM unnest(ARRAY['old', 'older']) AS key, idempotency.peek('payout', key)}),
	qq{old|201|{"payout": "old"}|\nolder|201|{"payout": "older"}|}, 'step 3: a key of any age is migrated, without expiry');
fails_with($node, q{SELECT payout_create('old', 2)}, 'IK422', 'step 3: a migrated key rejects another request');
wait_for_progress(20);

# A call in the code of step 1 waits for another claim, and uses the old table afterwards.
my ($owner, $late) = map { open_session($node) } 1, 2;
$owner->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('payout', 'late')});
calls($late, 'late');
wait_for_calls('late', 1);
$switched = begins('step 4');
cmp_ok(still_there($switched), '>=', 2, 'step 4: a call in the code of step 1 is open');
$owner->query_safe('ROLLBACK');
like(answer($late), qr/"payout"/, 'step 4: a call in the code of step 1 pays');
$_->quit foreach $owner, $late;
select undef, undef, undef, 0.1 while still_there($switched);
is($node->safe_psql('postgres', q{SELECT count(*) FROM request_log WHERE key = 'late'}), '1', 'step 4: it has used the old table');
like(run_sql($node, (example('-- step 5'))[0]), qr/"payout" : 1}/, 'step 5: payments from before step 1 are replayed');
wait_for_progress(20);
is($node->safe_psql('postgres', q{SELECT payout_create(key, 1) ->> 'payout' FROM unnest(ARRAY['old', 'older']) AS key}),
	"old\nolder", 'step 5: keys of any age are replayed');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.keys WHERE scope = 'payout' AND expires_at IS NOT NULL}), '0', 'step 5: no key expires');

$clients->signal('TERM');
$clients->finish;
unlike(slurp_file("$dir/err"), qr/ERROR:/, 'no client got an error');
$node->command_ok([ @bench, '--transactions=100', 'postgres' ], 'clients continue');

# ----------------------------------------------------------------
# Final checks
# ----------------------------------------------------------------

my $heard = 'SELECT key, min(payout) AS payout, max(payout) AS other FROM heard GROUP BY key';
cmp_ok($node->safe_psql('postgres', "SELECT count(*) FROM ($heard) AS h"), '>', 100, 'there are keys');
is($node->safe_psql('postgres', 'SELECT key FROM payout GROUP BY key HAVING count(*) > 1'), '', 'no key has paid twice');
is($node->safe_psql('postgres', "SELECT key FROM ($heard) AS h WHERE payout <> other"), '', 'every key has one response');
is( $node->safe_psql('postgres', "SELECT key FROM ($heard) AS h LEFT JOIN payout AS p USING (key) WHERE p.id IS DISTINCT FROM h.payout"),
	'', 'the response of every key is that of its payment');
is( $node->safe_psql('postgres', "SELECT key FROM ($heard) AS h WHERE (payout_create(key, 1) ->> 'payout')::int <> payout"),
	'', 'every stored response is that of its payment');
note $node->safe_psql('postgres', "SELECT count(*) || ' responses for ' || count(DISTINCT key) || ' keys' FROM heard");
$node->stop;
done_testing();
