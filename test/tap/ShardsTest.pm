# ShardsTest.pm
#
# Helpers for 027_shards.pl: examples/shards and the blocks of docs/scaling.md, which the
# test runs as written; servers that run them; clients that retry until they receive a
# response; and a consumer that books events in another database exactly once.

package ShardsTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Basename;
use IdempotencyTest qw(soak);
use IPC::Run;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(blocks run_psql make_server connection start_client acknowledged
  wait_for_progress finish_clients make_ledger consume consume_all);

my $root = dirname(__FILE__) . '/../..';

# blocks returns the SQL after that comment, in the page and in the files: up to the next
# step of a move, or the end.
sub blocks
{
	my ($title) = @_;
	my @blocks = map { slurp_file($_) =~ /^-- \Q$title\E\n(.*?)(?=^```$|^-- move \d|\z)/gms }
	  "$root/docs/scaling.md", glob "$root/examples/shards/*.sql";

	die "neither docs/scaling.md nor examples/shards has \"$title\"" unless @blocks;
	return @blocks;
}

# run_psql runs SQL with psql, in a directory and with psql variables. Returns the exit
# code and stderr.
sub run_psql
{
	my ($node, $sql, %opt) = @_;
	my @variables = map { ('-v', "$_=$opt{set}{$_}") } sort keys %{ $opt{set} // {} };
	my $stderr = '';

	IPC::Run::run([ $node->installed_command('psql'), '-XAtq', '-v', 'ON_ERROR_STOP=1', @variables,
			'-d', $opt{connection} // $node->connstr('postgres'), '-f', '-' ],
		'<', \$sql, '>', \my $stdout, '2>', \$stderr, init => sub { chdir $opt{in} if $opt{in} });
	return ($? >> 8, $stderr);
}

# make_server creates a server and runs the blocks with that title.
sub make_server
{
	my ($name, $title, $conf) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	# Cluster.pm disables restart_after_crash and enables log_statement.
	$node->init(extra => [ '--encoding=UTF8', '--locale=C', '--no-sync' ]);
	$node->append_conf('postgresql.conf', "restart_after_crash = on\nlog_statement = none\nautovacuum = off\njit = off\n$conf");
	$node->start;
	foreach my $block (blocks($title))
	{
		my ($code, $stderr) = run_psql($node, $block);
		is($code, 0, "$name: what to run $title") or diag $stderr;
	}
	return $node;
}

# connection returns the connection string of a server for a role.
sub connection
{
	my ($node, $role) = @_;
	return $node->connstr('postgres') . ($role ? " user=$role" : '');
}

# start_client starts a process that calls api.charge_create for the tenants, each time
# with a new key. It repeats each call until it receives a response, and sometimes after
# that. It writes every response into a file. It ends when a file "stop" exists and
# every call has a response, or when the test has died.
sub start_client
{
	my ($number, $router, $dir, @tenants) = @_;
	my @psql = ($router->installed_command('psql'), '-XAtq', '-v', 'VERBOSITY=sqlstate',
		'-d', connection($router, 'app'), '-f', "$dir/client$number.sql");
	my $test = $$;
	my $pid = fork // die "fork: $!";
	return $pid if $pid;

	open STDERR, '>>', "$dir/client$number.err" or POSIX::_exit(1);
	open my $log, '>>', "$dir/client$number.log" or POSIX::_exit(1);
	$log->autoflush(1);
	my (@open, @answered);
	my $made = 0;
	while (getppid == $test && (!-e "$dir/stop" || @open))
	{
		my @new = -e "$dir/stop" ? () : map { [ $tenants[ $_ % @tenants ], "c$number-$_" ] } $made .. $made + 4;
		$made += @new;
		push @open, @new;
		my @again = map { $answered[ rand @answered ] } grep { @answered } 1 .. 2;

		open my $script, '>', "$dir/client$number.sql" or POSIX::_exit(1);
		print $script map { "SELECT '$_->[0]|$_->[1]', api.charge_create('$_->[0]', '$_->[1]', '$_->[1]', 1);\n" } @open, @again;
		close $script;
		open my $psql, '-|', @psql or POSIX::_exit(1);
		my %answers = map { /^(\w+\|\S+?)\|(\{.*\})$/ ? ($1 => $2) : () } <$psql>;
		close $psql;

		print $log map { "$_|$answers{$_}\n" } sort keys %answers;
		push @answered, grep { $answers{"$_->[0]|$_->[1]"} } @open;
		@open = grep { !$answers{"$_->[0]|$_->[1]"} } @open;
		usleep(soak(100_000, @open ? 50_000 : 10_000)); # each call of psql is expensive
	}
	POSIX::_exit(0);
}

# acknowledged returns the responses that the clients received: for "tenant|key" the
# responses with their numbers.
sub acknowledged
{
	my ($dir) = @_;
	my %heard;

	foreach my $file (glob "$dir/client*.log")
	{
		foreach (split /\n/, slurp_file($file))
		{
			$heard{$1}{$2}++ if /^(\w+\|\S+?)\|(\{.*\})$/;
		}
	}
	return \%heard;
}

# wait_for_progress waits until so many more keys of a tenant, or of any tenant, have a
# response.
sub wait_for_progress
{
	my ($dir, $more, $tenant) = @_;
	my $count = sub { scalar grep { !$tenant || /^$tenant\|/ } keys %{ acknowledged($dir) } };
	my $goal = $count->() + $more;

	foreach (1 .. 20 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if $count->() >= $goal;
		usleep(50_000);
	}
	die "no progress: " . join '', map { (slurp_file($_) =~ /(.{0,2000})\z/s) } glob "$dir/client*.err";
}

# finish_clients waits until all clients end.
sub finish_clients
{
	my ($dir, @pids) = @_;
	append_to_file("$dir/stop", '');
	foreach my $pid (@pids)
	{
		waitpid $pid, 0;
		is($?, 0, 'a client has a response to every call');
	}
	return;
}

# make_ledger creates the database in which events are booked, beside others on a
# server.
sub make_ledger
{
	my ($node) = @_;
	$node->safe_psql('postgres', 'CREATE DATABASE ledger');
	$node->safe_psql('ledger', q{
		CREATE EXTENSION idempotency;
		CREATE TABLE entry (place int8 GENERATED ALWAYS AS IDENTITY, id uuid, aggregate text, payload text);
		CREATE FUNCTION book(p_id uuid, p_aggregate text, p_payload text) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			IF idempotency.once('ledger', p_id::text) THEN
				INSERT INTO entry (id, aggregate, payload) VALUES (p_id, p_aggregate, p_payload);
			END IF;
		END $$});
	return;
}

# consume books a batch of subscription "ledger" of a shard and acknowledges it. Returns
# the number of events, or -1 if a server is not available.
sub consume
{
	my ($shard, $ledger) = @_;
	my @relay = (extra_params => [ '-U', 'relay' ]);
	my ($rc, $events) = $shard->psql('postgres', q{
		SELECT batch, format('SELECT book(%L, %L, %L);', id, aggregate_id, payload)
		FROM idempotency.fetch('ledger', 1000)}, @relay);
	return -1 if $rc != 0;
	my ($batch) = $events =~ /^(\d+)\|/ or return 0;
	my $bookings = join "\n", 'BEGIN;', (map { s/^\d+\|//r } split /\n/, $events), 'COMMIT;';

	return -1 if $ledger->psql('ledger', $bookings) != 0;
	return -1 if $shard->psql('postgres', "SELECT idempotency.ack('ledger', $batch)", @relay) != 0;
	return scalar split /\n/, $events;
}

# consume_all books all events of a shard, including redelivered events of an
# interrupted batch.
sub consume_all
{
	my ($shard, $ledger) = @_;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		1 while consume($shard, $ledger) > 0;
		return if $shard->safe_psql('postgres', q{SELECT bool_and(lag_events = 0)
			FROM idempotency.partitions WHERE subscription = 'ledger'}) eq 't';
		usleep(100_000);
	}
	die 'the shard still has events';
}

1;
