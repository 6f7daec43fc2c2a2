# Fuzz::Surface
#
# The SQL interface of the extension, read from the catalog, so that new objects are
# called too: functions, operators, casts, input and receive functions, orders,
# triggers, tables and views. Generates a call of any of them.

package Fuzz::Surface;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;
use Fuzz::Values;

my $members = q{SELECT d.objid FROM pg_depend AS d JOIN pg_extension AS e ON e.oid = d.refobjid
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'idempotency' AND d.classid = '%s'::regclass};

# The objects that handlers and guards need.
my @schema = (
	'CREATE EXTENSION idempotency', 'CREATE SCHEMA fuzz',
	(map { "CREATE ROLE $_ LOGIN" } qw(fuzz_client fuzz_consumer fuzz_operator fuzz_plain), q("fuzz_'odd"",role")),
	q{SELECT idempotency.grant_client('fuzz_client'), idempotency.grant_consumer('fuzz_consumer'), idempotency.grant_operator('fuzz_operator')},
	'GRANT USAGE ON SCHEMA fuzz TO PUBLIC',
	q{CREATE FUNCTION fuzz.good(json) RETURNS json LANGUAGE sql AS 'SELECT $1'},
	q{CREATE FUNCTION fuzz.plain(idempotency.document) RETURNS json LANGUAGE sql AS 'SELECT ''1''::json'},
	q{CREATE FUNCTION fuzz.final(json) RETURNS json LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''no'' USING ERRCODE = ''IKFIN'',
		DETAIL = coalesce($1::text, ''''); END'},
	q{CREATE FUNCTION fuzz.wrong(json) RETURNS json LANGUAGE plpgsql AS 'BEGIN RETURN 1 / 0; END'},
	q{CREATE FUNCTION fuzz.strict(json) RETURNS json STRICT LANGUAGE sql AS 'SELECT $1'},
	q{CREATE FUNCTION fuzz.nested(json) RETURNS json LANGUAGE sql AS 'SELECT response FROM idempotency.run(''s/2'', ''nested'', $1, ''fuzz.good(json)'')'},
	q{CREATE FUNCTION fuzz.null(json) RETURNS json LANGUAGE sql AS 'SELECT NULL::json'},
	q{CREATE FUNCTION fuzz.huge(json) RETURNS json LANGUAGE sql AS 'SELECT to_json(repeat(''x'', 2000000))'},
	q{CREATE FUNCTION fuzz.many(json) RETURNS SETOF json LANGUAGE sql AS 'SELECT $1'},
	q{CREATE FUNCTION fuzz.event(idempotency.event) RETURNS void LANGUAGE sql AS ''},
	q{CREATE FUNCTION fuzz.event_strict(idempotency.event) RETURNS void STRICT LANGUAGE sql AS ''},
	'CREATE TABLE fuzz.guarded (i int)', 'GRANT ALL ON fuzz.guarded TO PUBLIC');

# new reads the catalog of the database, and creates the extension first. Files for COPY
# are written to the directory.
sub new
{
	my ($class, $session, $directory) = @_;
	my $self = bless { session => $session, directory => $directory, types => {}, calls => {} }, $class;

	$session->ok(@schema);
	$self->read_types;
	$self->read_functions;
	$self->read_others;
	return $self;
}

sub rows
{
	my ($self, $query, $class) = @_;
	my $answer = $self->{session}->tell($class ? sprintf $query, sprintf $members, $class : $query);

	return map { [ split /\t/, $_, -1 ] } split /\n/, $answer =~ s/\|/\t/gr;
}

# add registers a kind of call with its relative frequency.
sub add
{
	my ($self, $kind, $name, $make, $weight) = @_;
	$self->{calls}{"$kind $name"} = $make;
	$self->{weight}{"$kind $name"} = $weight // 1;
	return;
}

# names returns the objects to call, repeated by weight.
sub names
{
	my ($self) = @_;
	return map { ($_) x $self->{weight}{$_} } sort keys %{ $self->{calls} };
}

# call returns one or more statements that call one object.
sub call
{
	my ($self, $name) = @_;
	$self->{called}{$name}++;
	return $self->{calls}{$name}->();
}

sub value
{
	my ($self, $type, $name) = @_;
	return value_of($type, $name, $self->{types});
}

# ----------------------------------------------------------------
# The catalog
# ----------------------------------------------------------------

# read_types reads the attributes of composites, including those of tables.
sub read_types
{
	my ($self) = @_;

	foreach ($self->rows(q{SELECT format_type(c.reltype, NULL), a.attname, format_type(a.atttypid, NULL), c.relkind
		FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid
		WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('c', 'r', 'v') AND a.attnum > 0 AND NOT a.attisdropped
		ORDER BY c.oid, a.attnum}))
	{
		my ($type, $attribute, $its, $kind) = @$_;
		push @{ $self->{types}{$type} }, [ $attribute, $its ];
		$self->{relations}{$type} = 1 if $kind ne 'c';
	}
	return;
}

sub read_functions
{
	my ($self) = @_;

	foreach ($self->rows(q{SELECT p.oid::regprocedure, p.oid::regproc, p.pronargs, p.pronargdefaults, p.provariadic <> 0, p.proretset,
			format_type(p.prorettype, NULL),
			(SELECT string_agg(format_type(t, NULL), ';' ORDER BY n) FROM unnest(p.proargtypes::oid[]) WITH ORDINALITY AS a (t, n)),
			array_to_string(p.proargnames, ';'), p.provolatile,
			p.pronamespace = 'idempotency_internal'::regnamespace AND p.prolang <> (SELECT l.oid FROM pg_language AS l WHERE l.lanname = 'c')
		FROM pg_proc AS p WHERE p.prokind = 'f' AND p.oid IN (%s)}, 'pg_proc'))
	{
		my ($signature, $name, $count, $defaults, $variadic, $set, $returns, $types, $names, $volatile, $part) = @$_;
		my @types = split /;/, $types;
		my @names = split /;/, $names;

		# parts of delivery, whose callers have checked the arguments
		next if $part eq 't' && $returns ne 'trigger';
		if ($types =~ /\binternal\b/)
		{
			# Receive functions and index support functions, which SQL cannot call
			# directly.
			$self->{inner}{$signature} = 1;
		}
		elsif ($returns eq 'trigger')
		{
			$self->add('trigger', $signature, sub { $self->trigger($name) });
		}
		else
		{
			$self->add('function', $signature, sub { $self->function($name, \@types, \@names, $defaults, $variadic eq 't') }, $volatile eq 'v' ? 5 : 1);
		}
	}
	return;
}

sub read_others
{
	my ($self) = @_;

	foreach ($self->rows(q{SELECT o.oid::regoperator, 'OPERATOR(' || n.nspname || '.' || o.oprname || ')', format_type(oprleft, NULL), format_type(oprright, NULL)
		FROM pg_operator AS o JOIN pg_namespace AS n ON n.oid = o.oprnamespace WHERE o.oid IN (%s)}, 'pg_operator'))
	{
		my ($signature, $operator, $left, $right) = @$_;
		$self->add('operator', $signature, sub { 'SELECT ' . $self->value($left, 'key') . " $operator " . $self->value($right, 'key') });
	}
	foreach ($self->rows(q{SELECT format_type(castsource, NULL), format_type(casttarget, NULL) FROM pg_cast WHERE oid IN (%s)}, 'pg_cast'))
	{
		my ($source, $target) = @$_;
		$self->add('cast', "$source to $target", sub { 'SELECT CAST(' . $self->value($source, 'key') . " AS $target)" });
	}
	foreach ($self->rows(q{SELECT format_type(opcintype, NULL), typreceive::regproc FROM pg_opclass AS o JOIN pg_type AS t ON t.oid = opcintype
		WHERE o.oid IN (%s)}, 'pg_opclass'))
	{
		my ($type) = @$_;
		$self->add('order', $type, sub { $self->order($type) });
	}
	foreach ($self->rows(q{SELECT format_type(oid, NULL), typtype, typreceive::regproc FROM pg_type WHERE typcategory <> 'A' AND oid IN (%s)}, 'pg_type'))
	{
		my ($type, $kind, $receive) = @$_;
		next if $self->{relations}{$type};
		$self->{session}->ok('CREATE TABLE fuzz.' . ($type =~ s/.*\.//r) . " (value $type)");
		$self->add('input', $type, sub { 'SELECT (' . literal($self->input($kind, $type)) . "::$type)::text" });
		$self->add('receive', $type, sub { $self->receive($type) });
	}
	foreach my $relation (sort keys %{ $self->{relations} })
	{
		my @columns = @{ $self->{types}{$relation} };
		$self->add('relation', $relation, sub {
			my ($column, $type) = @{ pick(@columns) };
			return "SELECT * FROM $relation WHERE $column\::text IS NOT DISTINCT FROM " . $self->value($type, $column) . '::text LIMIT 5';
		});
	}
	return;
}

# not_called returns the functions of the extension that this package does not call.
sub not_called
{
	my ($self) = @_;
	my @reached = map { $_->[0] } $self->rows(q{SELECT typreceive::oid::regprocedure FROM pg_type WHERE typreceive <> 0 AND oid IN (%s)}, 'pg_type');

	push @reached, map { $_->[0] } $self->rows(q{SELECT amproc::oid::regprocedure FROM pg_amproc WHERE amprocfamily IN (%s)}, 'pg_opfamily');
	push @reached, map { $_->[0] } $self->rows(q{SELECT prosupport::oid::regprocedure FROM pg_proc WHERE prosupport <> 0 AND oid IN (%s)}, 'pg_proc');
	delete @{ $self->{inner} }{@reached};
	return sort keys %{ $self->{inner} };
}

# ----------------------------------------------------------------
# Calls
# ----------------------------------------------------------------

# function returns a call with some defaults omitted, by position or by name, in one of
# the places where a function is allowed.
sub function
{
	my ($self, $name, $types, $names, $defaults, $variadic) = @_;
	my $given = @$types - (chance(50) ? between(0, $defaults) : 0);
	my $by_name = @$names >= @$types && !$variadic && chance(20);
	my @arguments;

	foreach my $i (0 .. $given - 1)
	{
		my $value = $self->value($types->[$i], $names->[$i]);
		$value = 'VARIADIC ' . $value if $variadic && $i == $#$types;
		push @arguments, ($by_name && $i >= 1 ? "$names->[$i] => " : '') . $value;
	}

	my $call = "$name(" . join(', ', @arguments) . ')';
	return pick("SELECT $call", "SELECT * FROM $call", "SELECT * FROM $call AS f WHERE f IS NOT NULL", "SELECT $call FROM generate_series(1, 2)",
		"SELECT $call IS NULL");
}

sub trigger
{
	my ($self, $name) = @_;

	# The server compiles a PL/pgSQL trigger function once per trigger, and keeps the
	# result when the trigger is dropped.
	return 'UPDATE idempotency.outbox SET type = ' . literal(hostile_bytes()) if $name =~ /refuse_update/;
	return 'INSERT INTO idempotency.configuration (name, scope, value) VALUES (' . join(', ', map { literal(hostile_bytes()) } 1 .. 3) . ')'
	  if $name =~ /apply_settings/;

	my $when = pick('BEFORE', 'AFTER');
	my $what = pick('INSERT', 'UPDATE', 'DELETE', 'TRUNCATE');
	my $each = $what eq 'TRUNCATE' ? 'STATEMENT' : pick('ROW', 'STATEMENT');
	my @arguments = map { literal(chance(50) ? pick('s/1', 's/*', '*') : hostile_bytes()) } 1 .. pick(0, 1, 1, 1, 2);
	my $do = $what eq 'INSERT' ? 'INSERT INTO fuzz.guarded VALUES (1)' : $what eq 'UPDATE' ? 'UPDATE fuzz.guarded SET i = 2' :
	  $what eq 'DELETE' ? 'DELETE FROM fuzz.guarded' : 'TRUNCATE fuzz.guarded';

	return "CREATE TRIGGER guard $when $what ON fuzz.guarded FOR EACH $each EXECUTE FUNCTION $name(" . join(', ', @arguments) . ')', $do,
	  'DROP TRIGGER IF EXISTS guard ON fuzz.guarded';
}

sub order
{
	my ($self, $type) = @_;
	my $values = join ', ', map { '(' . $self->value($type, 'key') . ')' } 1 .. between(2, 8);

	return "SELECT DISTINCT v FROM (VALUES $values) AS t (v) ORDER BY v DESC" if chance(50);
	return "SELECT a.v FROM (VALUES $values) AS a (v) JOIN (VALUES $values) AS b (v) ON a.v = b.v";
}

sub input
{
	my ($self, $kind, $type) = @_;

	return hostile_json() if $type =~ /document/ && chance(70);
	return hostile_bytes() unless $kind eq 'c' && chance(70);
	return '(' . join(',', map { chance(30) ? '' : '"' . (pick('1', 't', hostile_bytes()) =~ s/(["\\])/\\$1/gr) . '"' } @{ $self->{types}{$type} }) . ')';
}

# receive writes a file in the format of COPY BINARY, and returns the COPY command that
# reads it.
sub receive
{
	my ($self, $type) = @_;
	my $file = "$self->{directory}/value";
	my $bytes = chance(50) ? hostile_bytes() : hostile_json();
	my $length = chance(95) ? length $bytes : pick(-2, 0, 2**31 - 1, 1);

	$bytes = pack 'N', pick(0, 1, 10, 12, 2**31 - 1) if $type !~ /document|keytext/ && chance(30);
	open my $handle, '>:raw', $file or die "$file: $!\n";
	print $handle "PGCOPY\n\xff\r\n\0", pack('NNn', 0, 0, 1), pack('N', $length & 0xffffffff), $bytes, pack('n', 0xffff);
	close $handle or die "$file: $!\n";
	return 'COPY fuzz.' . ($type =~ s/.*\.//r) . " FROM '$file' (FORMAT binary)";
}

1;
