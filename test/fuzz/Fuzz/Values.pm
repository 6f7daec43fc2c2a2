# Fuzz::Values
#
# A value of any type of an argument, a column or an attribute, as an SQL expression.
# The name of an argument matters too: scopes and keys come from a few names, so that
# calls conflict. An unknown type ends the run: write a generator for it.

package Fuzz::Values;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use Fuzz::Random;

our @EXPORT = qw(value_of settle);

my @scopes = ('s/1', 's/2', 't:1');
my @keys = ((map { "k$_" } 1 .. 6), '01890a5d-ac96-774b-bcce-b302099a8057', "k\xc3\xa9y");
my @topics = ('order', 'order.placed', 'mail', '*', 'order.*', "a\\*");
my @subscriptions = ('one', 'two', 'handled');

# The objects in the schema of the run, which Fuzz::Surface creates.
my @handlers = qw(fuzz.good(json) fuzz.plain(idempotency.document) fuzz.final(json) fuzz.wrong(json) fuzz.strict(json)
  fuzz.nested(json) fuzz.null(json) fuzz.huge(json) fuzz.many(json) fuzz.event(idempotency.event) fuzz.event_strict(idempotency.event)
  pg_catalog.now() pg_catalog.count(*));
my @roles = (qw(fuzz_client fuzz_consumer fuzz_operator fuzz_plain postgres), q("fuzz_'odd"",role"));

my %named = (
	scope => \@scopes,
	key => \@keys,
	keys => \@keys,
	topic => \@topics,
	topics => \@topics,
	aggregatetype => \@topics,
	subscription => \@subscriptions,
	start_at => [qw(now beginning)],
	aggregate_id => [qw(a b c)],
	outcome => [qw(claimed taken_over replayed in_progress mismatched)],
	method => [qw(GET POST)],
	value => [ '"k"', '"k\"1";a=1', ':AA==:', '?1' ]);

# The current tokens, batches and events; NULL if there are none.
my %current = (
	token => '(SELECT token FROM idempotency.key WHERE token IS NOT NULL ORDER BY token DESC LIMIT 1)',
	batch => '(SELECT max(batch) FROM idempotency.position)',
	event_id => '(SELECT id FROM (SELECT id, seq FROM idempotency.outbox UNION ALL SELECT id, seq FROM idempotency.parked) AS e ORDER BY seq DESC LIMIT 1)');

# The scope and key of the current transaction, so that its calls concern one operation.
my %settled;

# settle chooses them.
sub settle
{
	$settled{$_} = pick(@{ $named{$_} }) foreach qw(scope key subscription topic);
	return;
}

my @intervals = (
	'0', '1 microsecond', '-1 microsecond', '1 ms', '1 s', '-1 s', '30 s', '1 day', '-1 day', '1 mon -30 days', '-1 mon 30 days', '1 mon -31 days',
	'24 days 20:31:23.647', '100 years', '294276 years', '178000000 years', '-178000000 years', '2147483647 days', '-2147483648 days',
	'2147483647 months', '-2147483648 months', '9223372036854.775807 s', '-9223372036854.775808 s', '2562047788:00:54.775807',
	'2147483647 mons 2147483647 days 2562047788:00:54.775807', '-2147483648 mons -2147483648 days -2562047788:00:54.775808', '2147483647 s', '2147483648 s',
	'1e10 s', '1.5 mons', '', 'never', 'NaN', 'infinity', '-infinity', '1 fortnight', '99999999999 years');

my @integers = (0, 1, -1, 2, 99, 100, 200, 404, 599, 600, 1000, 32767, 32768, 65536, 2147483647, -2147483648);
my @bigints = (@integers, 4294967296, '9223372036854775807', '(-9223372036854775808)', 4611686018427387904);
my @times = ('now', 'epoch', 'infinity', '-infinity', '294276-12-31 23:59:59.999999+00', '4713-01-01 00:00:00+00 BC', '2000-01-01', 'tomorrow', '294277-01-01',
	'2026-02-30', '');

sub text
{
	my ($name) = @_;
	my $known = $named{ $name // '' };

	return literal($settled{$name}) if $settled{ $name // '' } && chance(60);
	return literal(pick(@$known)) if $known && chance(80);
	return pick("repeat('x', 1048576)", "repeat(E'\\xc3\\xa9', 600000)", "repeat(E'\\x01', 70000)") if chance(1);
	return literal(hostile_bytes());
}

# identifier returns a scope, a key or what else is of that type, of each type that casts
# to it.
sub identifier
{
	my ($name) = @_;

	return text($name) if chance(85);
	return pick(@bigints) if chance(50);
	return literal(uuid_text()) . '::uuid';
}

sub json
{
	return big_json(pick(1000, 70_000, 1_048_576, 1_048_577)) if chance(1);
	return literal(hostile_json());
}

# The waits of calls are short, and usually zero, because the run waits for them.
sub interval
{
	my ($name) = @_;

	return literal(pick('0', '1 ms', '1 microsecond', '-1 s', 'infinity', '-2147483648 days')) if $name eq 'wait' && chance(99);
	return literal(pick('1 ms', '1 microsecond', '1 s', '30 s', '1 hour', '7 days')) if chance(45);
	return literal(pick(@intervals)) if chance(90);
	return literal(sprintf '%d mons %d days %d us', map { int((rand() - 0.5) * 10**between(0, $_)) } 10, 10, 19);
}

my %generators = (
	text => \&text,
	'character varying' => \&text,
	character => \&text,
	name => sub { literal(substr hostile_bytes(), 0, 63) },
	cstring => \&text,
	'idempotency.keytext' => sub { text('key') },
	'idempotency.identifier' => sub { identifier(@_) },
	boolean => sub { pick(qw(true false)) },
	smallint => sub { pick(0, 1, -1, 200, -404, 32767, -32768) },
	integer => sub { $_[0] =~ /^max/ && chance(60) ? between(1, 20) : $_[0] eq 'status' && chance(70) ? pick(200, 201, 404, 422) : pick(@integers) },
	bigint => sub { $current{ $_[0] } && chance(70) ? $current{ $_[0] } : pick(@bigints) },
	oid => sub { pick(0, 1, 16384, 4294967295, "'idempotency.key'::regclass::oid") },
	xid8 => sub { literal(pick(0, 1, '4294967296', '18446744073709551615')) },
	'double precision' => sub { literal(pick('0', '1', '-1', '0.01', '1e300', 'NaN', 'Infinity', '')) },
	pg_snapshot => sub { literal(pick('1:1:', '10:20:12,15', '10:20:25', '4294967296:4294967296:', '20:10:', '')) },
	interval => \&interval,
	'timestamp with time zone' => sub { literal(pick(@times)) },
	bytea => sub { chance(95) ? sprintf(q('\x%s'), '5a' x pick(0, 1, 15, 16, 32, 33, 64, 65)) : q(decode(repeat('5a', 1048576), 'hex')) },
	uuid => sub { $current{ $_[0] } && chance(60) ? $current{ $_[0] } : literal(chance(85) ? uuid_text() : hostile_bytes()) },
	json => \&json,
	jsonb => \&json,
	'idempotency.document' => \&json,
	'idempotency.outcome' => sub { literal(chance(90) ? pick(@{ $named{outcome} }) : hostile_bytes()) },
	regprocedure => sub { chance(85) ? literal(pick(@handlers)) : pick(0, 4294967295, "'idempotency.claim(idempotency.identifier,idempotency.identifier,idempotency.document,interval,interval,interval,bytea)'") },
	regrole => sub { chance(80) ? literal(pick(@roles)) : pick(0, 1, 4294967295) });

# array returns an array of ordinary and of unusual values.
sub array
{
	my ($type, $name, $types) = @_;

	return "'{}'" if chance(5);
	return "array_fill(" . value_of($type, $name, $types) . ', ARRAY[' . pick('0', '3', '2,2', '1000', '1,1,1') . '], ARRAY[' . pick('1', '1,1', '-5',
		'0,0,0') . '])' if chance(5);
	return "(SELECT array_agg('k' || i)::$type\[] FROM generate_series(1, 2000) AS i)" if $type =~ /^(text|idempotency[.]identifier)$/ && chance(1);
	return 'ARRAY[' . join(', ', map { value_of($type, $name, $types) } 1 .. between(1, 4)) . ']';
}

# value_of returns an expression of the type. $types describes composites: a reference
# to a hash from names to lists of (attribute, type).
sub value_of
{
	my ($type, $name, $types) = @_;
	$name //= '';

	# a polymorphic argument gets some type of those that stable_text() is for
	$type = pick('timestamp with time zone', 'bytea', 'text', 'uuid', 'jsonb', 'bigint[]') if $type eq 'anyelement';
	return "NULL::$type" if chance(7);
	return '(' . array($1, $name, $types) . ")::$type" if $type =~ /^(.*)\[\]$/;
	return '(' . $generators{$type}->($name) . ")::$type" if $generators{$type};
	die "no generator for the type $type\n" unless $types->{$type};
	return '(ROW(' . join(', ', map { value_of($_->[1], $_->[0], $types) } @{ $types->{$type} }) . "))::$type";
}

1;
