# 004_pgbouncer.pl
#
# Proves that no state outlives a transaction. Behind PgBouncer in transaction mode,
# clients share server connections between transactions. No client observes state of
# another client's transaction, however that transaction ended. Many clients over two
# connections have each effect once and read identical responses.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin', '/sbin';
if (!defined $pgbouncer)
{
	# `make test` installs it, and counts a skipped script as passed.
	die 'pgbouncer is not installed' if $ENV{IDEMPOTENCY_SKIP_NOTHING};
	plan skip_all => 'pgbouncer is not installed';
}

# libpq of 19 asks for a newer protocol than PgBouncer 1.18 knows.
$ENV{PGMAXPROTOCOLVERSION} = '3.0';

my $node = new_node('main', conf => "log_statement = none\nmax_prepared_transactions = 5\n");
my $user = $node->safe_psql('postgres', 'SELECT current_user');
$node->safe_psql('postgres', q{
	CREATE TABLE charge (key text, answer text);
	CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON charge
		FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('p')});

# A PgBouncer with one database of one server connection, and one of two.
my $dir = PostgreSQL::Test::Utils::tempdir_short;
my $port = PostgreSQL::Test::Cluster::get_free_port();
my $server = sprintf 'host=%s port=%d dbname=postgres', $node->host, $node->port;
append_to_file("$dir/users", qq{"$user" ""\n});
append_to_file("$dir/pgbouncer.ini", qq{
[databases]
one = $server pool_size=1
two = $server pool_size=2
[pgbouncer]
listen_port = $port
listen_addr =
unix_socket_dir = $dir
auth_type = trust
auth_file = $dir/users
pool_mode = transaction
max_client_conn = 100
ignore_startup_parameters = extra_float_digits
});
my $log = '';
my $pooler = IPC::Run::start([ $pgbouncer, "$dir/pgbouncer.ini" ], '>&', \$log);
END { $pooler->kill_kill if defined $pooler }

# pooled returns the options of psql for a database of PgBouncer.
sub pooled
{
	my ($dbname) = @_;
	return ('-d', "host=$dir port=$port dbname=$dbname");
}

foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
{
	last if $node->psql('postgres', 'SELECT 1', extra_params => [ pooled('one') ]) == 0;
	select undef, undef, undef, 0.1;
}

# ----------------------------------------------------------------
# One server connection: each client follows a transaction that ended abnormally
# ----------------------------------------------------------------

my ($maker, $next) = map { open_session($node, extra_params => [ pooled('one') ]) } 1 .. 2;
my $pid = $next->query_safe('SELECT pg_backend_pid()');
is($maker->query_safe('SELECT pg_backend_pid()'), $pid, 'two clients share one server connection');

# is_clean checks that the next client finds no state of the previous client.
sub is_clean
{
	my ($after) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is( $next->query(q{SELECT pg_backend_pid(), current_setting('idempotency.wait'),
			idempotency.current_key('p') IS NULL,
			(SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 18756)}),
		"$pid|5s|t|0", "$after: no claim and no lock is left");
	session_fails($next, q{INSERT INTO charge VALUES ('unclaimed')}, 'IK403',
		"$after: require_claim rejects an unclaimed write");
	is( $next->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('p', 'shared');
			SELECT idempotency.release('p', 'shared'); COMMIT}), "claimed\nt", "$after: the key is free");
}

my $claim = q{SELECT idempotency.claim('p', 'shared', '{"n": 1}')};
my $lost = q{DO $$BEGIN PERFORM idempotency.complete('p', 'other');
	EXCEPTION WHEN SQLSTATE 'IK412' THEN NULL; END$$};

session_fails($maker, $claim, 'IK428', 'a statement that claims');
is_clean('after IK428 of one statement');
session_fails($maker, "BEGIN; $claim; COMMIT", 'IK428', 'a transaction that claims');
is_clean('after IK428 at commit');
session_fails($maker, "BEGIN; $claim; PREPARE TRANSACTION 'x'", 'IK428', 'PREPARE with a claim');
is_clean('after IK428 at PREPARE');
session_fails($maker, q{SELECT idempotency.complete('p', 'shared')}, 'IK412', 'complete without a claim');
is_clean('after IK412');
session_fails($maker, "BEGIN; $lost; COMMIT", 'IK412', 'a call without a claim that was caught');
is_clean('after IK412 at commit');
session_fails($maker, "BEGIN; $claim; SELECT 1/0; COMMIT", '22012', 'an error after a claim');
is_clean('after an error');
session_fails($maker, "BEGIN; $claim; $claim; ROLLBACK", 'IK409', 'a claim in a claim');
is_clean('after IK409');
$maker->query_safe("BEGIN; SAVEPOINT s; $claim; ROLLBACK TO s; COMMIT");
is_clean('after a claim that was rolled back to a savepoint');
$maker->query_safe("BEGIN; SET LOCAL idempotency.wait = '1s'; $claim; ROLLBACK");
is_clean('after a claim that was rolled back');
$maker->query_safe("BEGIN; $claim; SELECT idempotency.release('p', 'shared'); COMMIT");
is_clean('after a claim that was released');
$maker->query_safe(q{BEGIN; SELECT idempotency.claim('p', 'done'); INSERT INTO charge VALUES ('done');
	SELECT idempotency.complete('p', 'done', '1'); COMMIT});
is_clean('after a completed claim');
$maker->query_safe(q{SELECT idempotency.claim('p', 'done')});
is_clean('after a replay');
$maker->query_safe(q{SELECT idempotency.once_many('p', array['a', 'b'])});
is_clean('after a batch');

# Waits that end in different ways, for a key that another session holds.
my $holder = open_session($node);
$holder->query_safe(q{BEGIN; SELECT idempotency.claim('p', 'held')});
session_fails($maker, q{SELECT idempotency.claim('p', 'held', wait => '20 ms')}, 'IK409', 'a wait that times out');
is_clean('after a wait');
session_fails($maker, q{BEGIN; SET LOCAL statement_timeout = '20ms'; SELECT idempotency.claim('p', 'held'); ROLLBACK},
	'57014', 'a wait that is cancelled');
is_clean('after statement_timeout');
session_fails($maker, q{BEGIN; SET LOCAL lock_timeout = '20ms'; SELECT idempotency.claim('p', 'held'); ROLLBACK},
	'55P03', 'a wait that lock_timeout ends');
is_clean('after lock_timeout');
$holder->query_safe('ROLLBACK');
$holder->quit;

# A client that disconnects in a transaction loses its claim.
$maker->query_safe("BEGIN; $claim");
$maker->quit;
$pid = $next->query_safe('SELECT pg_backend_pid()');
is_clean('after a client disconnected');
$next->quit;

# ----------------------------------------------------------------
# Twelve clients over two server connections, each with the same keys
# ----------------------------------------------------------------

my $clients = 12;
my $rounds = 60;

# The statements of one transaction, and how it must end. Every second round uses the
# first entry, with a key K that all clients share; other rounds use one of the others.
# M is a key that only this client uses.
my @patterns = (
	[ q{BEGIN;
SELECT replayed, response FROM idempotency.claim('p', 'K', '{"n": 1}', wait => '60 s') \gset
\if :replayed
\echo answer K :response
\else
INSERT INTO charge VALUES ('K', 'M') RETURNING answer \gset
SELECT idempotency.complete('p', 'K', to_json('M'::text));
\echo answer K "M"
\endif
COMMIT;}, '' ],
	[ q{BEGIN; SELECT idempotency.claim('p', 'M'); INSERT INTO charge VALUES ('M'); COMMIT;}, 'IK428' ],
	[ q{BEGIN; SELECT idempotency.claim('p', 'M'); INSERT INTO charge VALUES ('M'); ROLLBACK;}, '' ],
	[ q{BEGIN; SELECT idempotency.claim('p', 'M'); INSERT INTO charge VALUES ('M'); SELECT 1/0; COMMIT;}, '22012' ],
	[ q{SELECT idempotency.complete('p', 'M');}, 'IK412' ],
	[ "BEGIN; $lost; COMMIT;", 'IK412' ],
	[ q{INSERT INTO charge VALUES ('M');}, 'IK403' ],
	[ q{BEGIN; SAVEPOINT s; SELECT idempotency.claim('p', 'M'); ROLLBACK TO s; COMMIT;}, '' ],
	[ q{DO $$BEGIN IF idempotency.once('p', 'once K') THEN INSERT INTO charge VALUES ('once K'); END IF; END$$;}, '' ]);
my $look = q{SELECT 'dirty' WHERE idempotency.current_key('p') IS NOT NULL OR EXISTS (
	SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 18756);};

# Two concurrent transactions make PgBouncer open both connections.
my @openers = map { open_session($node, extra_params => [ pooled('two') ]) } 1 .. 2;
my %pids = map { $_->query_safe('BEGIN; SELECT pg_backend_pid()') => 1 } @openers;
is(scalar(keys %pids), 2, 'there are two server connections');
$_->query_safe('COMMIT'), $_->quit foreach @openers;

my (@runs, $number);
foreach my $client (1 .. $clients)
{
	my %run = (script => '', states => '', out => '', err => '');
	foreach my $round (1 .. $rounds)
	{
		my $half = int($round / 2);
		my $pattern = $round % 2 ? 1 + ($half + $client) % $#patterns : 0;
		my ($sql, $state) = @{ $patterns[$pattern] };
		$sql =~ s/\bK\b/$pattern == 0 ? "k$half" : $half % 5/ge;
		$sql =~ s/\bM\b/m_${client}_$round/g;
		$run{script} .= "$sql\n$look\n";
		$run{states} .= "$state\n" if $state;
	}
	push @runs, \%run;
}
foreach my $run (@runs)
{
	# Read the script from a file: with input from Perl, clients would run one after the
	# other.
	my $file = "$dir/" . ++$number;
	append_to_file($file, $run->{script});
	$run->{harness} = IPC::Run::start([ $node->installed_command('psql'), '-XAtq',
			'-v', 'VERBOSITY=sqlstate', '-f', $file, pooled('two') ],
		'>', \$run->{out}, '2>', \$run->{err},
		IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default));
}
my (%answers, $given);
foreach my $run (@runs)
{
	$run->{harness}->finish;
	is(join('', map { "$_\n" } $run->{err} =~ /ERROR:  (\w{5})$/mg),
		$run->{states}, 'a client receives exactly its own errors');
	unlike($run->{out}, qr/dirty/, 'a client finds no state of other clients');
	foreach ($run->{out} =~ /^answer (.*)$/mg)
	{
		my ($key, $answer) = split / /;
		$answers{$key}{$answer} = 1;
		$given++;
	}
}
cmp_ok($given, '>', 3 * keys %answers, 'many responses were replayed');
is( join("\n", map { "$_|" . join '|', sort keys %{ $answers{$_} } } sort keys %answers),
	$node->safe_psql('postgres', q{SELECT key, response::text FROM idempotency.key
		WHERE key ~ '^k' ORDER BY key}), 'all responses to a key equal the stored one');
is( $node->safe_psql('postgres', q{SELECT count(*) - count(DISTINCT c.key),
		count(*) FILTER (WHERE k.key IS NULL)
		FROM charge AS c LEFT JOIN idempotency.key AS k ON k.key = c.key AND k.scope = 'p'
		WHERE c.key <> 'done'}),
	'0|0', 'each effect exists once and has its key');

$pooler->kill_kill;
undef $pooler;
$node->stop;
done_testing();
