# IdempotencyTest.pm
#
# Helpers that all TAP tests share: servers with the extension and their settings, open
# sessions, checks of the SQLSTATE of an error, crashes and recovery, and the memory of a
# session. The runner puts this directory into @INC.

package IdempotencyTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use ClientTest;
use File::Basename;
use File::Copy;
use File::Path qw(make_path);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw(soak new_node open_session fails_with session_fails error_is
  answers_of keys_of synchronous_standby change_settings dumps backend_pid
  copied_server wait_for_end wait_until_up upgrade_ok kill9 restart_after_kill9 memory_tools memory_is_flat);

# A mutant run stops at the first failure.
if ($ENV{IDEMPOTENCY_STOP_AT_FAILURE})
{
	require Test2::API;
	Test2::API::test2_stack()->top->listen(sub { BAIL_OUT($_[1]->summary) if $_[1]->isa('Test2::Event::Ok') && $_[1]->causes_fail });
}

# Settings of all servers. Cluster.pm gives a cluster for replication 1 MB of shared
# buffers, so that each process reads the catalogs from files.
my $settings = "autovacuum = off\njit = off\nshared_buffers = 32MB\n";

# Verbose errors contain the SQLSTATE that error_is() compares.
my @verbose = ('-v', 'VERBOSITY=verbose');

# soak returns the first value, or the second one under `make soak`: the bound of a loop
# whose length only adds repetition.
sub soak
{
	my ($short, $long) = @_;
	return $ENV{IDEMPOTENCY_SOAK} ? $long : $short;
}

# new_node creates a server with the settings in $opt{conf}, starts it, and creates the
# extension in database postgres. $opt{new} goes to new(), $opt{init} to init().
sub new_node
{
	my ($name, %opt) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, %{ $opt{new} // {} });

	$node->init(extra => [ '--encoding=UTF8', '--locale=C' ], %{ $opt{init} // {} });
	$node->append_conf('postgresql.conf', $settings . ($opt{conf} // ''));
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');
	return $node;
}

# copied_server creates an installation of the server that consists of links. It copies
# the programs that locate files, because PostgreSQL locates its files relative to its
# programs, and the directory of extensions. %opt: without: a pattern of the files of
# extensions that it leaves out. Returns the prefix and the directory of
# extension scripts.
sub copied_server
{
	my ($to, %opt) = @_;
	my ($bindir, $sharedir, $pkglibdir) = map { (run_command([ $ENV{PG_CONFIG} // 'pg_config', "--$_" ]))[0] } qw(bindir sharedir pkglibdir);
	my $root = dirname($bindir);
	$root = dirname($root) until index($sharedir, "$root/") == 0 && index($pkglibdir, "$root/") == 0;
	my ($bin, $share, $lib) = map { $to . substr $_, length $root } $bindir, $sharedir, $pkglibdir;

	make_path($bin, "$share/extension", dirname($lib));
	foreach my $program (qw(postgres initdb pg_ctl pg_config psql))
	{
		copy("$bindir/$program", $bin) && chmod(0755, "$bin/$program") or die "$program: $!";
	}
	symlink $_, "$share/" . basename($_) for grep { !m{/extension$} } glob "$sharedir/*";
	foreach my $file (glob "$sharedir/extension/*")
	{
		symlink $file, "$share/extension/" . basename($file) unless $opt{without} && basename($file) =~ $opt{without};
	}
	symlink $pkglibdir, $lib or die "$lib: $!";
	return (dirname($bin), "$share/extension");
}

# upgrade_ok checks that pg_upgrade succeeds from one stopped server to another, with more
# options, and prints the logs of the dumps if it fails. It writes into the current directory.
sub upgrade_ok
{
	my ($old, $new, $name, @options) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok(run_log([ 'pg_upgrade', '--no-sync', '--old-datadir', $old->data_dir, '--new-datadir', $new->data_dir,
		'--old-bindir', $old->config_data('--bindir'), '--new-bindir', $new->config_data('--bindir'), '--socketdir', $new->host,
		'--old-port', $old->port, '--new-port', $new->port, @options ]), $name)
	  or diag(map { "$_:\n" . slurp_file($_) } glob($new->data_dir . '/pg_upgrade_output.d/*/log/pg_upgrade_dump_*.log'));
	return;
}

# open_session starts a psql that continues after an error.
sub open_session
{
	my ($node, %opt) = @_;
	my $session = $node->background_psql(
		$opt{dbname} // 'postgres',
		on_error_stop => 0,
		extra_params => [ @verbose, @{ $opt{extra_params} // [] } ]);

	$session->set_query_timer_restart();
	return $session;
}

# error_is compares an error on stderr of psql with an SQLSTATE and, if given, with a
# pattern for message, detail and hint.
sub error_is
{
	my ($stderr, $sqlstate, $name, $like) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my @states = $stderr =~ /^(?:psql:\S+ )?ERROR:  (\w{5}):/mg;
	my $right = @states == 1 && $states[0] eq $sqlstate;

	$right = 0 if defined $like && $stderr !~ $like;
	ok($right, $name) or diag("expected $sqlstate" . (defined $like ? " $like" : '') . ", got: $stderr");
	return $right;
}

# fails_with runs SQL in a new session, which must end in one error with that SQLSTATE.
# %opt: like, dbname, extra_params.
sub fails_with
{
	my ($node, $sql, $sqlstate, $name, %opt) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($rc, $stdout, $stderr) = $node->psql(
		$opt{dbname} // 'postgres', $sql,
		extra_params => [ @verbose, @{ $opt{extra_params} // [] } ]);

	return error_is($stderr, $sqlstate, $name, $opt{like});
}

# session_fails does the same in an open session, which stays usable.
sub session_fails
{
	my ($session, $sql, $sqlstate, $name, $like) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;

	$session->{stderr} = '';
	$session->query($sql);
	my $stderr = $session->{stderr};
	$session->{stderr} = '';
	return error_is($stderr, $sqlstate, $name, $like);
}

# Format of a column in answers_of() and keys_of(): all bytes, in hexadecimal.
my $bytes = q{pg_catalog.encode(pg_catalog.convert_to(%s::text, 'UTF8'), 'hex')};

# answers_of returns what peek() returns for every key of the database: one line for
# each key, bodies in hexadecimal, ordered by scope and key.
sub answers_of
{
	my ($node, $dbname) = @_;
	my ($response, $headers) = map { sprintf $bytes, "(op).$_" } qw(response headers);

	return $node->safe_psql($dbname // 'postgres', qq{
		SELECT pg_catalog.format('%s|%s|%s|%s|%s|%s|%s|%s|%s', scope, key, (op).outcome, (op).replayed,
			(op).status, $headers, $response, (op).failed, (op).expires_at)
		FROM (SELECT scope, key, idempotency.peek(scope, key) AS op FROM idempotency.key OFFSET 0) AS k
		ORDER BY scope, key});
}

# keys_of returns all rows of the key table, ordered by scope and key.
sub keys_of
{
	my ($node, $dbname) = @_;
	my $row = sprintf $bytes, 'k';

	return $node->safe_psql($dbname // 'postgres',
		qq{SELECT scope, key, $row FROM idempotency.key AS k ORDER BY scope, key});
}

# synchronous_standby creates a standby from a base backup of the server and returns it
# once commits wait for it.
sub synchronous_standby
{
	my ($node) = @_;
	my $standby = PostgreSQL::Test::Cluster->new('standby');

	$node->backup('base');
	$standby->init_from_backup($node, 'base', has_streaming => 1);
	$standby->start;
	$node->safe_psql('postgres', q{ALTER SYSTEM SET synchronous_standby_names = '*'});
	$node->reload;
	$node->poll_query_until('postgres', q{SELECT sync_state = 'sync' FROM pg_stat_replication}) or die 'the standby is not synchronous';
	return $standby;
}

# change_settings changes settings of the server and waits until they apply.
sub change_settings
{
	my ($node, %settings) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $_ = '$settings{$_}'") foreach keys %settings;
	$node->reload;
	foreach my $name (keys %settings)
	{
		$node->poll_query_until('postgres', "SELECT current_setting('$name') = '$settings{$name}'") or die $name;
	}
	return;
}

# dumps runs pg_dump on the server, which must succeed and print nothing.
sub dumps
{
	my ($node, $name, @arguments) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->command_checks_all([ 'pg_dump', @arguments ], 0, [qr/\A\z/], [qr/\A\z/], $name);
}

# backend_pid returns the process ID of a session's backend.
sub backend_pid
{
	my ($session) = @_;
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$pid =~ s/\D//g;
	return $pid;
}

# wait_for_end waits until a session whose server is gone ends, and returns its stderr.
sub wait_for_end
{
	my ($session) = @_;
	eval {
		$session->{stdin} .= "SELECT 1;\n\\q\n";
		$session->{run}->finish;
	};
	return $session->{stderr};
}

# wait_until_up waits for the end of a recovery. A rejected psql can die of SIGPIPE,
# hence the eval.
sub wait_until_up
{
	my ($node) = @_;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if (eval { $node->psql('postgres', 'SELECT 1') } // -1) == 0;
		usleep(100_000);
	}
	die 'the server did not recover';
}

# kill9 kills backends of a server that restarts after a crash, and returns after
# recovery. The server counts the crash once it has reaped the process. There is no
# crash if a process has just ended by itself.
sub kill9
{
	my ($node, @pids) = @_;

	kill 9, @pids;
	foreach my $pid (@pids)
	{
		usleep(10_000) while kill 0, $pid;
	}
	wait_until_up($node);
	return;
}

# restart_after_kill9 kills the postmaster, and starts the server as soon as the
# backends have detached from the shared memory. It also kills processes that are
# stopped at a point where the library does not sleep: only the wait at the point would
# detect the postmaster's death there.
sub restart_after_kill9
{
	my ($node, @pids) = @_;
	my $postmaster = slurp_file($node->data_dir . '/postmaster.pid') =~ s/\n.*//sr;

	kill 'STOP', @pids;
	$node->kill9;
	kill 9, @pids;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		return if !kill(0, $postmaster) && $node->start(fail_ok => 1);
		$node->{_pid} = undef;
		usleep(100_000);
	}
	die 'the server did not start';
}

# memory_tools creates the SQL function measure(), which stores the memory of its session
# before (part 0) and after (part 1) the measured work of a variant.
sub memory_tools
{
	my ($node) = @_;
	$node->safe_psql('postgres', q{
	CREATE TABLE measured (variant text, part int, used int8, total int8, rss int8);

	-- Bytes in use and bytes allocated in all memory contexts, and resident kB without
	-- shared memory, which grows with each page that the session reads.
	CREATE FUNCTION measure(variant text, part int) RETURNS void LANGUAGE sql AS $$
		WITH status AS MATERIALIZED (SELECT pg_read_file('/proc/self/status') AS s)
		INSERT INTO measured
		SELECT variant, part, sum(used_bytes), sum(total_bytes),
			(SELECT substring(s FROM 'VmRSS:\s+(\d+)')::int8 - substring(s FROM 'RssShmem:\s+(\d+)')::int8 FROM status)
		FROM pg_backend_memory_contexts
	$$});
	return;
}

# memory_is_flat checks that the memory of a variant did not grow by $limit bytes.
sub memory_is_flat
{
	my ($node, $variant, $limit, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($used, $total, $rss) = split /\|/, $node->safe_psql('postgres', qq{
		SELECT b.used - a.used, b.total - a.total, b.rss - a.rss
		FROM measured AS a JOIN measured AS b USING (variant)
		WHERE variant = '$variant' AND a.part = 0 AND b.part = 1});

	note("$name: used $used, total $total bytes, resident $rss kB more");
	cmp_ok($used, '<', $limit, "$name: bytes in use do not grow");
	cmp_ok($total, '<', 256 * 1024, "$name: allocated bytes do not grow");
	# AddressSanitizer keeps freed memory for a while to detect uses of it.
	cmp_ok($rss, '<', 4 * 1024, "$name: resident memory does not grow") unless $ENV{ASAN_OPTIONS};
	return;
}

1;
