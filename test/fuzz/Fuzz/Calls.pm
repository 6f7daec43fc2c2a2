# Fuzz::Calls
#
# The typed fuzzer: calls every function and object of the extension with values of the
# right types, which are mostly invalid, alone and in transactions of every kind. It
# dies and prints the last statements if the server or a check of Fuzz::Watch fails.

package Fuzz::Calls;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;
use Fuzz::Surface;
use Fuzz::Values;
use Fuzz::Watch;

# The allowed errors: never XX000 and similar, nor errors that follow a crash.
my $expected = qr/^(?:00000|08P01|IK4(?:00|03|08|09|10|12|22|28)|22(?:000|001|003|004|007|008|015|021|023|026|P02|P03|P04|P05|02E|P06|030|032)|23(?:502|505)|25(?:001|006|P02)|
	2202E|2203[0-9]|2BP01|34000|39P01|3D000|3F000|40001|42(?:501|601|602|622|703|704|710|712|725|803|804|809|830|846|883|939|P01|P02|P08|P13|P18|P20|P21|804)|
	0A000|2201[0-9A-Z]|2D000|3B001|53(?:000|200|400)|54(?:000|001|011|023)|55(?:000|006|P03)|57014|58P01|P0001|IKFIN|22012)$/x;

my @settings = (
	'idempotency.retention = -1', 'idempotency.retention = 1', 'idempotency.retention = 2147483647', 'idempotency.wait = 0', 'idempotency.max_response_size = 1024',
	"idempotency.scope_prefix = 's/'", "idempotency.final_errors = 'IKFIN, 22012'", "idempotency.final_errors = ''", "idempotency.documentation = '/keys'", "idempotency.documentation = '<'", 'idempotency.outbox_retention = 0',
	'search_path = fuzz', "search_path = ''", 'session_replication_role = replica',
		"TimeZone = 'Pacific/Kiritimati'", "IntervalStyle = 'iso_8601'", "DateStyle = 'German'",
	'row_security = off', 'jit = on', 'bytea_output = escape', 'extra_float_digits = -15', 'synchronous_commit = off', 'work_mem = 64', 'max_stack_depth = 100',
	'standard_conforming_strings = off', 'array_nulls = off', "lc_monetary = 'C'", 'quote_all_identifiers = on', 'enable_indexscan = off');

# The statements after a call behind a savepoint, in psql's language.
my $keep = "\\if :ERROR\nROLLBACK TO s;\n\\else\nRELEASE s;\n\\endif\nSELECT 1";

my @begins = (('BEGIN') x 6, 'BEGIN ISOLATION LEVEL REPEATABLE READ', 'BEGIN ISOLATION LEVEL SERIALIZABLE', 'BEGIN READ ONLY',
	'BEGIN ISOLATION LEVEL SERIALIZABLE, READ ONLY, DEFERRABLE');
my @roles = qw(fuzz_client fuzz_consumer fuzz_operator fuzz_plain);

# transaction returns the statements of one transaction, the number of calls in it, and
# whether it certainly changes nothing.
sub transaction
{
	my ($surface, $names) = @_;
	my @statements = (pick(@begins));
	my $count = between(1, 10);

	push @statements, 'SET LOCAL ' . pick(@settings) if chance(15);
	push @statements, 'SET LOCAL ROLE ' . pick(@roles) if chance(15);
	foreach (1 .. $count)
	{
		my $end = pick('', 'ROLLBACK TO s', ($keep) x 5);
		push @statements, 'SAVEPOINT s' if $end;
		push @statements, $surface->call(pick(@$names));
		push @statements, $end if $end;
	}
	my $end = chance(30) ? 'ROLLBACK' : chance(85) ? 'COMMIT' : pick('COMMIT AND CHAIN', "PREPARE TRANSACTION 'fuzz'");
	push @statements, $end;
	push @statements, 'ROLLBACK' if $end =~ /CHAIN|PREPARE/;
	push @statements, pick('COMMIT', 'ROLLBACK') . " PREPARED 'fuzz'" if $end =~ /PREPARE/;
	return (\@statements, $count, $end eq 'ROLLBACK');
}

# alone returns a call in its own transaction.
sub alone
{
	my ($surface, $names) = @_;
	my @statements = $surface->call(pick(@$names));

	return (\@statements, 1, 0);
}

# The time limit of one call; the fuzzer's own statements have none.
my $time_limit = q{SET statement_timeout = '500ms'};

# tidy limits the size of the tables, and keeps some rows for the calls.
sub tidy
{
	my ($session) = @_;

	$session->ok('SET statement_timeout = 0', 'SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscription', 'DELETE FROM idempotency.key', 'DELETE FROM idempotency.outbox',
		'TRUNCATE fuzz.guarded, fuzz.document, fuzz.keytext, fuzz.identifier, fuzz.operation, fuzz.abandoned, fuzz.event',
		q{SELECT idempotency.subscribe('one', '{*}'), idempotency.subscribe('two', '{order*}', max_attempts => 2, retry_delay => '0')},
		q{SELECT idempotency.publish('order', to_json(i), (ARRAY['a', 'b', NULL])[i % 3 + 1]) FROM generate_series(1, 10) AS i},
		q{SELECT idempotency.claim('s/1', 'leased ' || i, '{}', lease => '1 microsecond') FROM generate_series(1, 5) AS i},
		q{SELECT count(*) FROM idempotency.fetch('one', 3)});
	return;
}

# look checks the invariants between transactions.
sub look
{
	my ($watch) = @_;
	my $locks = $watch->locks;
	my $broken = $watch->broken;

	die "locks are left: $locks\n" if $locks ne '';
	die "there is $broken\n" if $broken ne '';
	return;
}

# play makes that many calls, and returns a summary line. Dies with the error.
sub play
{
	my ($session, $directory, $calls) = @_;
	my $surface = Fuzz::Surface->new($session, $directory);
	my $watch = Fuzz::Watch->new($session);
	my @names = $surface->names;
	my @missed = $surface->not_called;
	my ($made, $rounds, $watched, %states) = (0, 0, 0);

	die "nothing calls @missed\n" if @missed;
	$session->ok($time_limit, "SET idempotency.wait = '1ms'", 'SET log_min_messages = fatal', 'SET log_min_error_statement = panic');
	while ($made < $calls)
	{
		tidy($session), look($watch), $session->ok($time_limit) if $rounds % 250 == 0;
		$watch->warm if !defined $watch->{bytes} && $made > $calls / 2;

		settle();
		my ($statements, $count, $nothing) = chance(60) ? transaction($surface, \@names) : alone($surface, \@names);
		my $look = $rounds++ % 20 == 0;
		my $before = $watch->digest if $look;
		my @answers = eval { $session->run(@$statements) };
		my $problem = $@;

		# An error undoes a call that is not in a transaction with others.
		$problem ||= "unexpected SQLSTATE " . (grep { $_ !~ $expected } @answers)[0] . ': ' . $session->message . "\n" if grep { $_ !~ $expected } @answers;
		$nothing ||= @$statements == 1 && @answers && $answers[0] ne '00000';
		if ($look && !$problem)
		{
			$watched++ if $nothing;
			my $locks = $watch->locks;
			$problem = "locks are left: $locks\n" if $locks ne '';
			$problem ||= "rows have changed: $before, then " . $watch->digest . "\n" if $nothing && $watch->digest ne $before;
		}
		die join("\n\t", "call $made: ${problem}after:", @$statements) . "\n" if $problem;
		$states{$_}++ foreach @answers;

		# Statements after an error in its transaction did not run.
		my $lost = grep { $_ eq '25P02' } @answers;
		$made += $count - $lost if $count > $lost;
	}
	look($watch);
	my ($grown, $too_much) = $watch->grown;
	die "the session has grown: $grown\n" if $too_much;
	delete $states{'25P02'};
	return sprintf '%d calls of %d things, %d looks at rows, %d SQLSTATEs, %s more (%s)',
		$made, scalar keys %{ $surface->{called} }, $watched, scalar keys %states, $grown,
	  join ' ', map { "$_:$states{$_}" } sort keys %states;
}

1;
