# 050_requests.pl
#
# Proves for both editions that the memory that a request takes is proportional to its size,
# whatever its numbers and its depth; and that a claim in autocommit says so in the extended
# protocol, too, in which the server takes a statement apart.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $portable = dirname(__FILE__) . '/../../../portable';
my $scripts = PostgreSQL::Test::Utils::tempdir;
my $node = new_node('main');

$node->safe_psql('postgres', 'CREATE DATABASE portable');
PostgreSQL::Test::Utils::system_or_bail('psql', '-qX', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('portable'), '-f', "$portable/idempotency.sql");

# peak returns the most memory in bytes that a new session has had after some statements, which
# can fail, beyond that of a session with a small request.
my %small;

sub peak
{
	my ($database, @statements) = @_;
	my $status = q{SELECT substring(pg_read_file('/proc/self/status') FROM 'VmHWM:\s+(\d+) kB')};
	my ($code, $output) = $node->psql($database, join(";\n", @statements, $status), on_error_stop => 0);
	return (split /\n/, $output)[-1] * 1024 - ($small{$database} || 0);
}

# pgbench returns what a script of statements prints in the extended protocol.
sub pgbench
{
	my ($database, @statements) = @_;
	open my $file, '>', "$scripts/script" or die "$scripts/script: $!";
	print $file map { "$_;\n" } @statements;
	close $file or die "$scripts/script: $!";
	my ($output, $errors) = run_command([ 'pgbench', '-n', '-t', 1, '-M', 'extended', '-f', "$scripts/script", $node->connstr($database) ]);
	return $errors;
}

my %requests = (
	'large exponents' => q{'[' || repeat('1e131071,', 8000) || '1]'},
	'small exponents' => q{'[' || repeat('1e-16383,', 8000) || '1]'},
	'zeros with an exponent' => q{'[' || repeat('0e-16383,', 8000) || '1]'},
	'many digits' => q{'[' || repeat('1e399,', 8000) || '1]'},
	'a long text in many arrays' => q{repeat('[', 400) || '"' || repeat('x', 1000000) || '"' || repeat(']', 400)},
	'a long text in many objects' => q{repeat('{"a":', 400) || '"' || repeat('x', 1000000) || '"' || repeat('}', 400)},
	'deep' => q{repeat('{"b":1,"a":[', 1000) || repeat(']}', 1000)},
	'many members' => q{'{' || (SELECT string_agg(format('"%s":{"b":[]}', i), ',') FROM generate_series(1, 5000) AS i) || '}'},
);

foreach my $database ('postgres', 'portable')
{
	my $edition = $database eq 'postgres' ? 'extension' : 'portable edition';
	$small{$database} = peak($database, q{SELECT idempotency.canonical('{"b":[1]}')});

	foreach my $name (sort keys %requests)
	{
		my $bytes = $node->safe_psql('postgres',
			"SELECT length(CASE WHEN '$name' = 'many digits' THEN idempotency.canonical($requests{$name}) ELSE $requests{$name} END)");

		foreach my $type ('text', 'jsonb')
		{
			my $request = "($requests{$name})::$type";
			my $more = peak($database, map { "SELECT idempotency.$_ IS NULL" } "fingerprint($request)", "fingerprint('POST', '/', $request)",
				"claim('requests', 'k', $request)", "claim('requests', 'k', $request, lease => '1 min')");

			# each token of a request has a hundred bytes, and a few copies of it are made
			cmp_ok($more, '<', 300 * $bytes + 16 * 1024 * 1024, "$edition: memory of $name, $bytes bytes of $type");
		}
	}

	# The size of a value in a table says nothing about its size in memory.
	$node->safe_psql($database, q{CREATE TABLE stored AS SELECT ('{"a":[' || repeat('1e-16383,', 3000) || '1]}')::jsonb AS request});
	is($node->safe_psql($database, 'SELECT pg_column_size(request) < 900 FROM stored'), 't', "$edition: a compressed request");
	cmp_ok(peak($database, "SELECT idempotency.fingerprint(request) FROM stored", "SELECT idempotency.claim('requests', 'k', request) FROM stored"),
		'<', 16 * 1024 * 1024, "$edition: memory of a compressed request");

	my $claim = q{SELECT outcome FROM idempotency.claim('requests', 'hint')};
	like(pgbench($database, $claim), qr/HINT:  This statement was a transaction of its own \(autocommit\)/, "$edition: autocommit");
	like(pgbench($database, 'BEGIN', $claim, 'COMMIT'), qr/HINT:  Call idempotency.complete\(\), fail\(\) or release\(\) in the transaction that claimed/, "$edition: a transaction");
}

$node->stop;
done_testing();
