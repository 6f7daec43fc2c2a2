# 053_trusted_extension.pl
#
# Proves that the script that portable/pg_tle registers is an extension that a role without a
# superuser's rights creates, dumps and restores with all rows, and drops. pg_tle is not
# needed: for CREATE EXTENSION, a control file and a script in the directory of extensions are
# the same.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $portable = dirname(__FILE__) . '/../../../portable';
my $dir = PostgreSQL::Test::Utils::tempdir;
my ($statement) = run_command([ "$portable/pg_tle" ]);
my ($script) = $statement =~ /\$_pgtle_\$\n(.*)\$_pgtle_\$/s or die 'portable/pg_tle prints no script';

my ($prefix, $extension) = copied_server("$dir/server", without => qr/^idempotency/);
append_to_file("$extension/idempotency.control", "default_version = '1.0'\nsuperuser = false\n");
append_to_file("$extension/idempotency--1.0.sql", $script);
my $node = PostgreSQL::Test::Cluster->new('main', install_path => $prefix);
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->start;
my @owner = ('-U', 'shop_owner');
$node->safe_psql('postgres', 'CREATE ROLE shop_owner LOGIN');
$node->safe_psql('postgres', "CREATE DATABASE $_ OWNER shop_owner") foreach qw(shop restored);

# psql runs SQL as the owner of the databases.
sub psql
{
	my ($dbname, $sql) = @_;
	return $node->safe_psql($dbname, $sql, extra_params => \@owner);
}

psql('shop', 'CREATE EXTENSION idempotency');
is(psql('shop', q{SELECT c.oid::regclass FROM pg_class AS c JOIN pg_extension AS e ON e.extname = 'idempotency'
	WHERE c.relnamespace::regnamespace::text LIKE 'idempotency%' AND c.relkind IN ('r', 'S') AND c.oid <> ALL (e.extconfig) ORDER BY c.relname}),
	join("\n", map { "idempotency_internal.$_" } qw(call expiry_block probe scan_block)),
	'a dump has the rows of all tables and sequences, except the notes of a session and the positions of the reaper');

# A key, a lease, a setting, and of three events one that failed and one that is leased.
my $token = psql('shop', q{
	SELECT idempotency.claim('charge', 'key', '{"amount": 1}'), idempotency.complete('charge', 'key', '"charged"');
	SELECT idempotency.configure('retention', '30 days', 'refund/*');
	SELECT idempotency.subscribe('mail', '{*}');
	SELECT idempotency.publish('order', '{}', id) FROM unnest('{a,b,c}'::text[]) AS id;
	SELECT min(id::text) AS id, max(batch) AS batch FROM idempotency.fetch('mail', max_events => 1) \gset
	SELECT idempotency.nack('mail', :batch, :'id', 'no such mailbox', '1 hour');
	SELECT idempotency.fetch('mail', max_events => 1);
	SELECT token FROM idempotency.claim('charge', 'leased', lease => '1 hour')}) =~ s/.*\n//sr;

# What each table has.
my @tables = map { "idempotency.$_" } qw(key configuration outbox subscription partition position parked);
sub rows
{
	my ($dbname) = @_;
	return join "\n", map { "$_: " . psql($dbname, "SELECT coalesce(jsonb_agg(to_jsonb(t) ORDER BY to_jsonb(t)), '[]') FROM $_ AS t") } @tables;
}
my $rows = rows('shop');
is_deeply([ $rows =~ /^(\S+): \[\]$/mg ], [], 'all tables have rows');

$node->command_ok([ 'pg_dump', '--format=custom', '--file', "$dir/dump", '--dbname', $node->connstr('shop') . ' user=shop_owner' ], 'the owner dumps');
$node->command_ok([ 'pg_restore', '--exit-on-error', '--dbname', $node->connstr('restored') . ' user=shop_owner', "$dir/dump" ], 'and restores');
is(rows('restored'), $rows, 'the restored tables have the same rows');
is(psql('restored', q{SELECT replayed, response FROM idempotency.claim('charge', 'key', '{"amount": 1}')}), 't|"charged"', 'a retry is replayed');
is(psql('restored', qq{SELECT idempotency.complete('charge', 'leased', token => $token) IS NULL}), 't', 'the lease holds');
is(psql('restored', q{SELECT idempotency.setting('retention', 'refund/1')}), '30 days', 'the setting holds');
is(psql('restored', q{SELECT idempotency.ack('mail', max(batch)) FROM idempotency.position}), '1', 'the batch is acknowledged');

psql('restored', 'DROP EXTENSION idempotency');
is(psql('restored', q{SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'idempotency%'}), '0', 'DROP EXTENSION leaves no schema');

done_testing();
