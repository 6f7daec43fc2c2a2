# ShardsTest.pm
#
# What 027_shards.pl is made of: the blocks of docs/scaling.md, which it runs as
# they are written; servers that get them; clients that retry until they have an
# answer; and a consumer that books events elsewhere, each once.

package ShardsTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use File::Basename;
use IPC::Run;
use OutboxTest;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(blocks play make_server connection start_client acknowledged
  wait_for_progress finish_clients make_ledger consume consume_all);

my $page = dirname(__FILE__) . '/../../docs/scaling.md';

# blocks returns the SQL blocks of the page whose first line is that comment, in
# their order.
sub blocks
{
	my ($title) = @_;
	my @blocks = slurp_file($page) =~ /^```sql\n-- \Q$title\E\n(.*?)^```$/gms;

	die "$page: no block \"$title\"" unless @blocks;
	return @blocks;
}

# play runs SQL by psql, in a directory and with variables of psql's, and returns
# its exit code and what it said on stderr.
sub play
{
	my ($node, $sql, %opt) = @_;
	my @variables = map { ('-v', "$_=$opt{set}{$_}") } sort keys %{ $opt{set} // {} };
	my $stderr = '';

	IPC::Run::run([ $node->installed_command('psql'), '-XAtq', '-v', 'ON_ERROR_STOP=1', @variables,
			'-d', $opt{connection} // $node->connstr('postgres'), '-f', '-' ],
		'<', \$sql, '>', \my $stdout, '2>', \$stderr, init => sub { chdir $opt{in} if $opt{in} });
	return ($? >> 8, $stderr);
}

# make_server makes a server, and gives it the blocks with that title.
sub make_server
{
	my ($name, $title, $conf) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	# Cluster.pm switches restart_after_crash off, and log_statement on.
	$node->init(extra => [ '--encoding=UTF8', '--locale=C', '--no-sync' ]);
	$node->append_conf('postgresql.conf', "restart_after_crash = on\nlog_statement = none\n$conf");
	$node->start;
	foreach my $block (blocks($title))
	{
		my ($code, $stderr) = play($node, $block);
		is($code, 0, "$name: a block \"$title\" of the page") or diag $stderr;
	}
	return $node;
}

# connection returns how to connect to a server as a role.
sub connection
{
	my ($node, $role) = @_;
	return $node->connstr('postgres') . ($role ? " user=$role" : '');
}

# start_client starts a process that calls api.charge_create for the tenants, each
# time with a new key, and repeats each call until it has an answer, and now and then
# after that.  It writes every answer into a file, and ends when there is a file
# "stop" and nothing left to be answered, or when the test has died.
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
		usleep(@open ? 50_000 : 10_000);
	}
	POSIX::_exit(0);
}

# acknowledged returns what the clients have heard: for "tenant|key" the answers, each
# with how often it came.
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

# wait_for_progress waits until so many more keys of a tenant are answered, or of
# any.
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

# finish_clients waits for the end of all clients.
sub finish_clients
{
	my ($dir, @pids) = @_;
	append_to_file("$dir/stop", '');
	foreach my $pid (@pids)
	{
		waitpid $pid, 0;
		is($?, 0, 'a client has all its answers');
	}
	return;
}

# make_ledger makes the database in which events are booked, beside others on a
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

# consume books a batch of what subscription "ledger" of a shard gives, and acknowledges
# it.  Returns how many events it had, or -1 if a server was not there.
sub consume
{
	my ($shard, $ledger) = @_;
	my @relay = (extra_params => [ '-U', 'relay' ]);
	my ($rc, $events) = $shard->psql('postgres', q{
		SELECT batch, format('SELECT book(%L, %L, %L);', id, aggregateid, payload)
		FROM idempotency.fetch('ledger', 1000)}, @relay);
	return -1 if $rc != 0;
	my ($batch) = $events =~ /^(\d+)\|/ or return 0;
	my $bookings = join "\n", 'BEGIN;', (map { s/^\d+\|//r } split /\n/, $events), 'COMMIT;';

	return -1 if $ledger->psql('ledger', $bookings) != 0;
	return -1 if $shard->psql('postgres', "SELECT idempotency.ack('ledger', $batch)", @relay) != 0;
	return scalar split /\n/, $events;
}

# consume_all books all that there is in a shard, and what is given again of a batch
# that was cut short.
sub consume_all
{
	my ($shard, $ledger) = @_;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		1 while consume($shard, $ledger) > 0;
		return if $shard->safe_psql('postgres', q{SELECT lag_events = 0 AND batch_out_since IS NULL
			FROM idempotency.subscriptions WHERE subscription = 'ledger'}) eq 't';
		usleep(100_000);
	}
	die 'there is no end of events';
}

1;
