# 047_rows_without_keys.pl
#
# Shows which dumps and restores lose the keys but not the rows, so that a retry has its
# effect twice, or the rows but not the keys, so that the effect is lost.  Proves what
# docs/operations.md says against it: a restore that stops at the first error, --extension,
# --disable-triggers, and the query that finds missing keys and rows.

use FindBin;
use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $page = slurp_file(dirname(dirname(dirname($FindBin::RealBin))) . '/docs/operations.md');
my ($check) = $page =~ /^```sql\n([^`]*AS keys_missing[^`]*AS rows_missing[^`]*);\n^```/m or die 'the page has no check';
$check =~ s/invoice_line/charge/g; # the pages have tables of their own

# Two tables, one of which is guarded, and a charge in each.
my $node = new_node('main');
$node->safe_psql('postgres', q{
	CREATE TABLE charge (key text, created_at timestamptz NOT NULL DEFAULT now());
	CREATE SCHEMA guarded;
	CREATE TABLE guarded.charge (key text);
	CREATE TRIGGER guard BEFORE INSERT ON guarded.charge FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge');
	CREATE FUNCTION charge_create(p_key text) RETURNS json LANGUAGE plpgsql AS $$
	DECLARE
		op idempotency.operation;
	BEGIN
		op := idempotency.claim('charge', p_key);
		IF op.replayed THEN RETURN op.response; END IF;
		INSERT INTO charge VALUES (p_key);
		RETURN idempotency.complete('charge', p_key, to_json(p_key));
	END $$;
	SELECT charge_create('k1')});

# dumped makes an archive with more options, and returns its name.
sub dumped
{
	my ($name, @options) = @_;
	dumps($node, "dump $name", '--format=custom', @options, '--file', "$dir/$name", 'postgres');
	return "$dir/$name";
}

my $full = dumped('full');
my $part = dumped('part', '--schema=public');
my $guarded = dumped('guarded', '--schema=public', '--schema=guarded');
my $extended = dumped('extended', '--schema=public', '--schema=guarded', '--extension=idempotency');
my $excluded = dumped('excluded', '--exclude-schema=idempotency');

# restore restores a dump into a new database of a server by
# pg_restore with more options. Returns whether that succeeds, and what it prints.
sub restore
{
	my ($server, $dbname, $dump, @options) = @_;
	my ($out, $err) = ('', '');

	$server->safe_psql('template1', "CREATE DATABASE $dbname TEMPLATE template0");
	# a dump of the schema creates it
	$server->safe_psql($dbname, 'DROP SCHEMA public') unless $dump eq $full || $dump eq $excluded;
	my $succeeds = IPC::Run::run([ $node->installed_command('pg_restore'), @options, '--dbname', $server->connstr($dbname), $dump ], '>', \$out, '2>', \$err);
	return ($succeeds, $err);
}

# retried checks what a retry of the charge does after a restore, and what the check says
# before it.
sub retried
{
	my ($server, $dbname, $charges, $name) = @_;
	my $missing = { 0 => 'f|t', 1 => 'f|f', 2 => 't|f' }->{$charges};

	is($server->safe_psql($dbname, $check), $missing, "$name: the check says $missing");
	is($server->safe_psql($dbname, q{SELECT charge_create('k1'); SELECT count(*) FROM charge}), qq("k1"\n$charges), "$name: charges after a retry");
	return;
}

# ----------------------------------------------------------------
# A server without the files of the extension
# ----------------------------------------------------------------

my ($prefix, $extension) = copied_server("$dir/server", without => qr/^idempotency/);
my $bare = PostgreSQL::Test::Cluster->new('bare', install_path => $prefix);
$bare->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$bare->start;

my ($succeeds, $error) = restore($bare, 'stops', $full, '--exit-on-error');
ok(!$succeeds, 'without files: a restore that stops at an error fails');
like($error, qr/extension "idempotency" is not available/, 'without files: it says why');
is($bare->safe_psql('stops', q{SELECT to_regclass('charge')}), '', 'without files: it restores no table');

($succeeds, $error) = restore($bare, 'continues', $full);
is($bare->safe_psql('continues', 'SELECT count(*) FROM charge'), '1', 'without files: a restore that continues restores the rows');
symlink $_, "$extension/" . basename($_) for glob $node->config_data('--sharedir') . '/extension/idempotency*';
$bare->safe_psql('continues', 'CREATE EXTENSION idempotency');
retried($bare, 'continues', 2, 'without files, extension created later');
$bare->safe_psql('template1', 'DROP DATABASE continues');

($succeeds, $error) = restore($bare, 'again', $full, '--exit-on-error');
ok($succeeds, 'with files: the restore succeeds') or diag($error);
retried($bare, 'again', 1, 'with files');
$bare->stop;

# ----------------------------------------------------------------
# Dumps of a part of the database
# ----------------------------------------------------------------

($succeeds, $error) = restore($node, 'guarded_part', $guarded, '--exit-on-error');
ok(!$succeeds, 'a dump of schemas with a guarded table is not restored');
like($error, qr/schema "idempotency" does not exist/, 'because the guard is missing');

foreach my $case ([ 'part', $part, 'CREATE EXTENSION idempotency' ], [ 'excluded', $excluded, '' ])
{
	my ($name, $dump, $then) = @$case;
	($succeeds, $error) = restore($node, $name, $dump, '--exit-on-error');
	ok($succeeds, "$name: the restore succeeds") or diag($error);
	$node->safe_psql($name, $then);
	retried($node, $name, 2, $name);
}
($succeeds, $error) = restore($node, 'extended', $extended, '--exit-on-error');
ok($succeeds, 'a dump of schemas and the extension is restored') or diag($error);
retried($node, 'extended', 1, 'a dump of schemas and the extension');

# ----------------------------------------------------------------
# What the check compares
# ----------------------------------------------------------------

# found returns what the check says after a change that is rolled back.
sub found
{
	my ($change) = @_;
	return $node->safe_psql('postgres', "BEGIN; $change; $check; ROLLBACK");
}

is(found(''), 'f|f', 'check: keys are as young as the rows');
is(found(q{UPDATE idempotency.key SET created_at = created_at - interval '59 min'}), 'f|f', 'check: a lease can be older than the row that it wrote');
is(found(q{UPDATE idempotency.key SET created_at = created_at - interval '61 min'}), 't|f', 'check: rows are younger than all keys');
is(found(q{UPDATE idempotency.key SET scope = 'another'}), 't|f', 'check: keys of another scope do not count');
is(found(q{UPDATE charge SET created_at = now() - interval '23 hours'; DELETE FROM idempotency.key}), 't|f', 'check: there is a row within the retention');
is(found(q{UPDATE charge SET created_at = now() - interval '25 hours'; DELETE FROM idempotency.key}), 'f|f', 'check: rows older than the retention have no keys');
is(found(q{UPDATE charge SET created_at = now() - interval '61 min'}), 'f|t', 'check: keys are younger than all rows');
is(found('DELETE FROM charge'), 'f|t', 'check: there are no rows');
is(found('DELETE FROM charge; DELETE FROM idempotency.key'), 'f|f', 'check: there are no rows and no keys');

# ----------------------------------------------------------------
# Schema first, and data later
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{CREATE TRIGGER guard BEFORE INSERT ON charge FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge')});
foreach my $case ([ 'refused', 0 ], [ 'accepted', 1, '--disable-triggers' ])
{
	my ($dbname, $charges, @options) = @$case;
	my $error = '';

	$node->safe_psql('template1', "CREATE DATABASE $dbname TEMPLATE template0");
	foreach my $part ('--schema-only', '--data-only')
	{
		dumps($node, "$dbname: dump $part", $part, ($part eq '--data-only' ? @options : ()), '--file', "$dir/$dbname$part", 'postgres');
		$node->psql($dbname, slurp_file("$dir/$dbname$part"), on_error_stop => 0, stderr => \my $messages);
		$error .= $messages;
	}
	like($error, $charges ? qr/\A\z/ : qr/charge.*claim/, "$dbname: errors of the restore");
	retried($node, $dbname, $charges, $dbname);
}
$node->stop;
done_testing();
