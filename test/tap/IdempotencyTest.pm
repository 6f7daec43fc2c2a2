# IdempotencyTest.pm
#
# What the TAP tests of the extension share: servers that have it, sessions
# that stay open, and the comparison of an error with the SQLSTATE that is
# expected.  The runner puts this directory into @INC.

package IdempotencyTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(new_node open_session fails_with session_fails error_is
  answers_of keys_of synchronous_standby);

# Where a test is to fail, as with a planted bug, one failure is enough.
if ($ENV{IDEMPOTENCY_STOP_AT_FAILURE})
{
	require Test2::API;
	Test2::API::test2_stack()->top->listen(sub { BAIL_OUT($_[1]->summary) if $_[1]->isa('Test2::Event::Ok') && $_[1]->causes_fail });
}

# The server's own errors must arrive as text that a pattern can name.
my @verbose = ('-v', 'VERBOSITY=verbose');

# new_node makes a server with the settings in $opt{conf}, and starts it with
# the extension in database postgres.  $opt{new} goes to new(), $opt{init} to init().
sub new_node
{
	my ($name, %opt) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, %{ $opt{new} // {} });

	$node->init(extra => [ '--encoding=UTF8', '--locale=C' ], %{ $opt{init} // {} });
	$node->append_conf('postgresql.conf', "autovacuum = off\n" . ($opt{conf} // ''));
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idempotency');
	return $node;
}

# open_session starts a psql that goes on after an error.
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

# error_is compares what psql said on stderr with an SQLSTATE and, if given,
# with a pattern for the rest: message, detail and hint.
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

# fails_with runs SQL in a session of its own, which must end in one error with
# that SQLSTATE.  %opt: like, dbname, extra_params.
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

# The query of answers_of() and keys_of(): bodies in full, by their bytes.
my $bytes = q{pg_catalog.encode(pg_catalog.convert_to(%s::text, 'UTF8'), 'hex')};

# answers_of returns what peek() answers for every key that the server has, one
# line a key, bodies as hex digits, in the order of scope and key.
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

# keys_of returns all rows of the key table, whole, in the order of the key.
sub keys_of
{
	my ($node, $dbname) = @_;
	my $row = sprintf $bytes, 'k';

	return $node->safe_psql($dbname // 'postgres',
		qq{SELECT scope, key, $row FROM idempotency.key AS k ORDER BY scope, key});
}

# synchronous_standby makes a standby from a base backup of the server, and returns it
# when commits wait for it.
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

1;
