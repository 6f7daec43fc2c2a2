# 001_dump_restore.pl
#
# Proves that no way of dumping and restoring a database loses a key: whatever
# kind of record it is, it is there afterwards, replays the very bytes, refuses
# another request, and can be used by those, and only those, who could before.
# Also that a dump names the extension once and none of its own objects, and that
# pg_dump has nothing to complain about.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $dir = PostgreSQL::Test::Utils::tempdir;

# A table that takes no write without a claim, and two roles with rights.
$node->safe_psql('postgres', q{
	CREATE ROLE client;
	CREATE ROLE operator;
	CREATE ROLE stranger;
	SELECT idempotency.grant_client('client');
	SELECT idempotency.grant_operator('operator');
	CREATE TABLE charge (key text PRIMARY KEY, amount numeric NOT NULL);
	CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON charge
		FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('kind');
	GRANT ALL ON charge TO client});

# store claims a key and finishes it, in one transaction.
sub store
{
	my ($key, $finish, $claim) = @_;
	my $q = $key =~ s/'/''/gr;
	$claim //= '';
	$node->safe_psql('postgres', qq{
		BEGIN;
		SELECT 1 FROM idempotency.claim('kind', '$q'$claim);
		INSERT INTO charge VALUES ('$q', 1.50);
		SELECT idempotency.$finish;
		COMMIT});
}

my $odd = qq({"a" :  1,\t"b":[ 1 , 2 ]\n, "a": 1.0e+2 , "\\u00e9":"\x{c3}\x{a9}\\\\." } \n);
my $request = q(, '{"amount": 1.50, "to": "x"}');

store('odd', "complete('kind', 'odd', \$r\$$odd\$r\$, 201, \$r\$ { \"X\" :\"1\"} \$r\$)", $request);
store('empty', q{complete('kind', 'empty')});
store('json null', q{complete('kind', 'json null', 'null')});
store('failed', q{fail('kind', 'failed', '{"type":"about:blank" }', 422, '{"Retry-After":"1"}')}, $request);
store('for ever', q{complete('kind', 'for ever', '1')}, q{, retention => '-1 second'});
store('years', q{complete('kind', 'years', '1')}, q{, retention => '100 years'});
store('short', q{complete('kind', 'short', '1')}, q{, retention => '1 microsecond'});
store('digest', q{complete('kind', 'digest', '1')}, q{, fingerprint => '\x000102030405060708090a0b0c0d0e0f'});
store('released', q{release('kind', 'released')});

# Keys that mean something in the format of COPY, or to a shell.
foreach my $key ('\N', '\.', 'a\tb', q{it's "quoted"}, ' blanks ', "\x{d0}\x{ba}\x{d0}\x{bb}", '-')
{
	store($key, sprintf(q{complete('kind', '%s', '"\\\\N"')}, $key =~ s/'/''/gr));
}

# 1 MB that cannot be compressed, to the byte, and 1 MB that can.
store('random', q{complete('kind', 'random', (SELECT '"' || substr(string_agg(md5(i::text), ''), 1, 1048574) || '"'
	FROM generate_series(1, 32768) AS i))});
store('plain', q{complete('kind', 'plain', '"' || repeat('x', 1048574) || '"')});
is( $node->safe_psql('postgres', q{SELECT pg_relation_size(reltoastrelid) > 1048576 FROM pg_class
		WHERE oid = 'idempotency.key'::regclass}),
	't', 'the large responses lie in the TOAST table');

is( $node->safe_psql('postgres', q{SELECT idempotency.once('inbox', 'one');
		SELECT idempotency.once('inbox', 'one of yore', '1 microsecond');
		SELECT idempotency.once_many('inbox', array['b', 'a', 'b'], '-1 second')}),
	"t\nt\na\nb", 'inbox records are new');

# Leases: one that runs, one that ran out after a checkpoint, and two that were
# given up there, one of them of an operation to be remembered for ever.
sub lease
{
	my ($key, $more) = @_;
	return $node->safe_psql('postgres', sprintf
		q{SELECT token FROM idempotency.claim('lease', '%s', '{"amount" :  1.50}', lease => '1 day'%s)}, $key, $more // '');
}
my $state = qq({"step" :  2,\t"b":[ 1 ]} );
my %token = map { $_ => lease($_) } 'live', 'abandoned', 'released';
$token{'for ever'} = lease('for ever', q{, retention => '-1 second'});
$node->safe_psql('postgres', qq{
	SELECT idempotency.checkpoint('lease', 'abandoned', $token{abandoned}, 'charged', E'$state');
	UPDATE idempotency.key SET leased_at = now() - interval '2 hours', leased_until = now() - interval '1 hour'
		WHERE scope = 'lease' AND key::text = 'abandoned';
	SELECT idempotency.checkpoint('lease', 'released', $token{released}, 'charged', E'$state'),
		idempotency.release('lease', 'released', $token{released}),
		idempotency.checkpoint('lease', 'for ever', $token{'for ever'}, 'begun'),
		idempotency.release('lease', 'for ever', $token{'for ever'})});
my $greatest = $node->safe_psql('postgres', 'SELECT last_value FROM idempotency.token');
is($node->safe_psql('postgres', q{SELECT string_agg(keys.state, ', ' ORDER BY key), max(token) FROM idempotency.keys
		JOIN idempotency.key USING (scope, key) WHERE token IS NOT NULL}),
	"abandoned, released, in_progress, released|$greatest", 'the source has all kinds of leases');

# Stored by a transaction that has not committed: no dump may show it.
my $open = open_session($node);
$open->query_safe(q{BEGIN; SELECT idempotency.claim('kind', 'uncommitted');
	SELECT idempotency.complete('kind', 'uncommitted', '1')});

# replays_of returns what claim() answers for every finished key that has not expired.
sub replays_of
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{
		SELECT key, (op).outcome, (op).status, (op).failed, (op).expires_at,
			encode(convert_to((op).headers::text, 'UTF8'), 'hex'),
			encode(convert_to((op).response::text, 'UTF8'), 'hex')
		FROM (SELECT key, idempotency.claim(scope, key, fingerprint => fingerprint) AS op
			FROM idempotency.key WHERE expires_at > clock_timestamp() AND token IS NULL ORDER BY scope, key OFFSET 0) AS k});
}

# rights_of returns every right on everything in the extension's schema.
sub rights_of
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{
		SELECT kind, name, acl.grantor::regrole, acl.grantee::regrole, acl.privilege_type, acl.is_grantable
		FROM (
			SELECT 'schema', nspname, coalesce(nspacl, acldefault('n', nspowner)), oid FROM pg_namespace
			UNION ALL SELECT 'function', oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)),
				pronamespace FROM pg_proc
			UNION ALL SELECT 'relation', oid::regclass::text, coalesce(relacl, acldefault('r', relowner)),
				relnamespace FROM pg_class WHERE relkind IN ('r', 'v')
			UNION ALL SELECT 'type', oid::regtype::text, coalesce(typacl, acldefault('T', typowner)),
				typnamespace FROM pg_type WHERE typtype IN ('b', 'c') AND typcategory <> 'A'
		) AS object (kind, name, acl, schema), aclexplode(acl) AS acl
		WHERE schema = 'idempotency'::regnamespace
		ORDER BY 1, 2, 3, 4, 5});
}

my %before = (
	keys => keys_of($node),
	answers => answers_of($node),
	replays => replays_of('postgres'),
	rights => rights_of('postgres'),
	charges => $node->safe_psql('postgres', 'SELECT * FROM charge ORDER BY key'));

is(scalar(split /\n/, $before{keys}), 25, 'the source has all kinds of keys');
like($before{answers}, qr/^kind\|odd\|replayed\|t\|201\|.*\|@{[unpack 'H*', $odd]}\|f\|/m,
	'the source keeps the bytes of the response');
like($before{rights}, qr/^function\|idempotency\.forget\(text,text\)\|\w+\|operator\|EXECUTE/m,
	'the source has grants');
unlike($before{rights}, qr/^function\|idempotency\.forget\(text,text\)\|\w+\|(client|-)\|/m, 'and few');

# restored checks a database that a dump was restored into.
sub restored
{
	my ($dbname) = @_;
	ok(keys_of($node, $dbname) eq $before{keys}, "$dbname: every row is there, byte for byte");
	ok(answers_of($node, $dbname) eq $before{answers}, "$dbname: peek answers the same");
	ok(replays_of($dbname) eq $before{replays}, "$dbname: claim replays the same");
	is(rights_of($dbname), $before{rights}, "$dbname: the same rights");
	is($node->safe_psql($dbname, 'SELECT * FROM charge ORDER BY key'),
		$before{charges}, "$dbname: the effects are there");

	is( $node->safe_psql($dbname, q{SELECT outcome FROM idempotency.claim('kind', 'odd',
			'{"to":"x","amount":1.5}')}), 'replayed', "$dbname: the same request replays");
	fails_with($node, q{SELECT idempotency.claim('kind', 'odd', '{"to":"x","amount":2.5}')},
		'IK422', "$dbname: another request is refused", dbname => $dbname);
	is( $node->safe_psql($dbname, q{SELECT idempotency.once('inbox', 'one');
			SELECT idempotency.once_many('inbox', array['a', 'b', 'c'])}), "f\nc",
		"$dbname: the inbox has seen its messages");
	is( $node->safe_psql($dbname, q{SELECT idempotency.once('inbox', 'one of yore')}), 't',
		"$dbname: and has forgotten an expired one");

	# What was expired or never committed is free, for those who may claim.
	is( $node->safe_psql($dbname, q{SET ROLE client; BEGIN;
			SELECT outcome FROM idempotency.claim('kind', 'short');
			SELECT outcome FROM idempotency.claim('kind', 'uncommitted');
			INSERT INTO charge VALUES ('restored', 2);
			SELECT idempotency.complete('kind', 'short', '2'), idempotency.complete('kind', 'uncommitted', '2');
			COMMIT}), "claimed\nclaimed\n2|2", "$dbname: a client claims what is free");
	leases_restored($dbname);
	fails_with($node, q{INSERT INTO charge VALUES ('unclaimed', 1)}, 'IK403',
		"$dbname: the guard is there", dbname => $dbname);
	fails_with($node, q{SET ROLE stranger; SELECT idempotency.peek('kind', 'odd')}, '42501',
		"$dbname: a stranger may nothing", dbname => $dbname);
}

# leases_restored checks that every lease is its owner's, or the next one's, as it
# was, and that no token is given out that anybody had.
sub leases_restored
{
	my ($dbname) = @_;
	my $claim = q{FROM idempotency.try_claim('lease', '%s', '{"amount":1.5}', lease => '1 day')};

	is( $node->safe_psql($dbname, sprintf "SELECT outcome, attempt $claim", 'live'), 'in_progress|1', "$dbname: a lease that runs bars others");
	is( $node->safe_psql($dbname, q{SELECT outcome FROM idempotency.try_claim('lease', 'live', '{"amount": 2}')}), 'mismatched',
		"$dbname: and knows its request");
	is( $node->safe_psql($dbname, qq{SELECT idempotency.renew('lease', 'live', $token{live}, '2 days') > now();
			SELECT idempotency.complete('lease', 'live', '"done"', token => $token{live});
			SELECT outcome, response FROM idempotency.claim('lease', 'live')}), qq(t\n"done"\nreplayed|"done"),
		"$dbname: its owner renews, and finishes");

	my ($outcome, $attempt, $point, $left, $token) = split /\|/,
	  $node->safe_psql($dbname, sprintf "SELECT outcome, attempt, recovery_point, encode(convert_to(state::text, 'UTF8'), 'hex'), token $claim", 'abandoned');
	is("$outcome $attempt $point $left", 'taken_over 2 charged ' . unpack('H*', $state =~ s/\\t/\t/r), "$dbname: an abandoned operation is taken over at its checkpoint");
	cmp_ok($token, '>', $greatest, "$dbname: with a token greater than all before");
	fails_with($node, "SELECT idempotency.complete('lease', 'abandoned', token => $token{abandoned})", 'IK410',
		"$dbname: its former owner is refused", dbname => $dbname);
	is( $node->safe_psql($dbname, qq{SELECT key, request, (operation).attempt, (operation).recovery_point, (operation).token > $token
			FROM idempotency.claim_abandoned('lease', '1 day', 10) ORDER BY key}),
		qq(for ever|{"amount" :  1.50}|2|begun|t\nreleased|{"amount" :  1.50}|2|charged|t), "$dbname: a completer gets those that were given up");
	is( $node->safe_psql($dbname, q{SELECT string_agg(key::text, ', ') FROM idempotency.key WHERE scope = 'lease' AND retention IS NULL AND token IS NOT NULL}),
		'for ever', "$dbname: which are to be remembered as long as they were");
}

# fresh makes an empty database and runs commands that must restore into it.
sub fresh
{
	my ($dbname, @commands) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE template0");
	$node->command_ok([@$_, '--dbname', $dbname], "$dbname: $_->[0] ends well") foreach @commands;
	restored($dbname);
}

my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file');
my @restore = ('pg_restore', '--exit-on-error');

# dumps runs pg_dump, which must end well and say nothing.
sub dumps
{
	my ($name, @arguments) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$node->command_checks_all([ 'pg_dump', @arguments ], 0, [qr/\A\z/], [qr/\A\z/], $name);
}

dumps('dump as plain text', '--file', "$dir/plain", 'postgres');
dumps('dump as archive', '--format=custom', '--file', "$dir/custom", 'postgres');
dumps('dump as directory, in parallel', '--format=directory', '--jobs=2', '--file', "$dir/directory", 'postgres');
dumps('dump the schema', '--schema-only', '--file', "$dir/schema", 'postgres');
dumps('dump the data', '--data-only', '--disable-triggers', '--file', "$dir/data", 'postgres');

my $text = slurp_file("$dir/plain");
is(scalar(() = $text =~ /^CREATE EXTENSION.*idempotency/mg), 1, 'a dump creates the extension once');
is(join(', ', sort $text =~ /^COPY idempotency\."?(\w+)/mg), 'key, outbox, parked, position, reaper, subscription',
	'and copies all of its tables');
is(join(', ', sort $text =~ /^SELECT pg_catalog\.setval\('idempotency\.(\w+)', \d+, (?:true|false)\)/mg),
	'outbox_seq, subscription_number, token', 'and sets its sequences');
unlike($text, qr/^CREATE (?!TRIGGER|EXTENSION)\w+ .*idempotency/m, 'and creates none of its objects');
unlike($text, qr/^(COMMENT|ALTER) .* idempotency\./m, 'nor alters any');
unlike(slurp_file("$dir/schema"), qr/^COPY/m, 'a dump of the schema has no data');

fresh('from_plain', [@psql, "$dir/plain"]);
fresh('from_custom', [@restore, "$dir/custom"]);
fresh('from_directory', [@restore, '--jobs=2', "$dir/directory"]);
fresh('from_parts', [@psql, "$dir/schema"], [@psql, "$dir/data"]);
fresh('from_archive_parts', [@restore, '--schema-only', "$dir/custom"],
	[@restore, '--data-only', '--disable-triggers', "$dir/custom"]);

# Over a database that has lived on: the dump replaces it.
fresh('replaced', [@restore, "$dir/custom"]);
$node->command_ok([@restore, '--clean', '--if-exists', '--dbname=replaced', "$dir/custom"],
	'pg_restore --clean ends well');
restored('replaced');

# The dump of a restored database is the dump once more.
$node->safe_psql('postgres', 'CREATE DATABASE again TEMPLATE template0');
$node->command_ok([@restore, '--dbname=again', "$dir/custom"], 'restore');
dumps('dump what was restored', '--file', "$dir/again", 'again');
my @again = map { s/^\\(un)?restrict .*//mgr } slurp_file("$dir/again"), $text;
ok($again[0] eq $again[1], 'the dump of a restored database is the same');

# A sequence that was made again by hand is none of those that CREATE EXTENSION told the
# dump of, though it is put into the extension.
$node->safe_psql('again', q{ALTER EXTENSION idempotency DROP SEQUENCE idempotency.token; DROP SEQUENCE idempotency.token;
	CREATE SEQUENCE idempotency.token; ALTER EXTENSION idempotency ADD SEQUENCE idempotency.token});
dumps('dump with another sequence', '--file', "$dir/another", 'again');
$text = slurp_file("$dir/another");
is(join(', ', sort $text =~ /setval\('idempotency\.(\w+)'/g), 'outbox_seq, subscription_number', 'which does not set its value');

$open->query_safe('ROLLBACK');
$open->quit;
$node->stop;
done_testing();
