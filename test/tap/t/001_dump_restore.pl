# 001_dump_restore.pl
#
# Proves that every way to dump and restore a database keeps all keys. Records of every
# kind are restored, replay the same bytes and reject another request. Only roles with
# the right before can use them. Also proves that a dump creates the extension once and
# none of its objects, that pg_dump prints no warning, and that a role with grant_backup
# gets the same dumps as a superuser.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main');
my $dir = PostgreSQL::Test::Utils::tempdir;

# A table that accepts no write without a claim, and two roles with rights.
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

# store claims a key and finishes the operation, in one transaction.
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

# Keys with a special meaning in the format of COPY, or to a shell.
foreach my $key ('\N', '\.', 'a\tb', q{it's "quoted"}, ' blanks ', "\x{d0}\x{ba}\x{d0}\x{bb}", '-')
{
	store($key, sprintf(q{complete('kind', '%s', '"\\\\N"')}, $key =~ s/'/''/gr));
}

# 1 MB of incompressible data, at the exact limit, and 1 MB of compressible data.
store('random', q{complete('kind', 'random', (SELECT '"' || substr(string_agg(md5(i::text), ''), 1, 1048574) || '"'
	FROM generate_series(1, 32768) AS i))});
store('plain', q{complete('kind', 'plain', '"' || repeat('x', 1048574) || '"')});
is( $node->safe_psql('postgres', q{SELECT pg_relation_size(reltoastrelid) > 1048576 FROM pg_class
		WHERE oid = 'idempotency.key'::regclass}),
	't', 'the large responses are in the TOAST table');

is( $node->safe_psql('postgres', q{SELECT idempotency.once('inbox', 'one');
		SELECT idempotency.once('inbox', 'expired message', '1 microsecond');
		SELECT idempotency.once_many('inbox', array['b', 'a', 'b'], '-1 second')}),
	"t\nt\na\nb", 'inbox records are new');

# Leases: one live lease, one that expired after a checkpoint, and two that were
# released after a checkpoint. One of the released operations has an infinite retention.
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
my $greatest = $node->safe_psql('postgres', 'SELECT max(token) FROM idempotency.key');
is($node->safe_psql('postgres', q{SELECT string_agg(keys.state, ', ' ORDER BY key), max(token) >= (SELECT last_value FROM idempotency.token) FROM idempotency.keys
		JOIN idempotency.key USING (scope, key) WHERE token IS NOT NULL}),
	'abandoned, released, in_progress, released|t', 'the source has all kinds of leases');

# An uncommitted key, which no dump may contain.
my $open = open_session($node);
$open->query_safe(q{BEGIN; SELECT idempotency.claim('kind', 'uncommitted');
	SELECT idempotency.complete('kind', 'uncommitted', '1')});

# replays_of returns what claim() returns for every finished key that has not expired.
sub replays_of
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{
		WITH k AS (SELECT key, idempotency.claim(scope, key, fingerprint => fingerprint) AS op
			FROM idempotency.key WHERE expires_at > clock_timestamp() AND token IS NULL ORDER BY scope, key)
		SELECT key, (op).outcome, (op).status, (op).failed, (op).expires_at,
			encode(convert_to((op).headers::text, 'UTF8'), 'hex'),
			encode(convert_to((op).response::text, 'UTF8'), 'hex')
		FROM k});
}

# rights_of returns all privileges on the objects in the extension's schema.
sub rights_of
{
	my ($dbname) = @_;
	return $node->safe_psql($dbname, q{
		SELECT kind, name, acl.grantor::regrole, acl.grantee::regrole, acl.privilege_type, acl.is_grantable
		FROM (
			SELECT 'schema', nspname::text, coalesce(nspacl, acldefault('n', nspowner)), oid FROM pg_namespace
			UNION ALL SELECT 'function', oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)),
				pronamespace FROM pg_proc
			UNION ALL SELECT 'relation', oid::regclass::text, coalesce(relacl, acldefault('r', relowner)),
				relnamespace FROM pg_class WHERE relkind IN ('r', 'v')
			UNION ALL SELECT 'type', oid::regtype::text, coalesce(typacl, acldefault('T', typowner)),
				typnamespace FROM pg_type WHERE typtype IN ('b', 'c') AND typcategory <> 'A'
		) AS object (kind, name, acl, schema), aclexplode(acl) AS acl
		WHERE schema IN ('idempotency'::regnamespace, 'idempotency_internal'::regnamespace)
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
like($before{rights}, qr/^function\|idempotency\.forget\(idempotency\.identifier,idempotency\.identifier\)\|\w+\|operator\|EXECUTE/m,
	'the source has grants');
unlike($before{rights}, qr/^function\|idempotency\.forget\(idempotency\.identifier,idempotency\.identifier\)\|\w+\|(client|-)\|/m, 'forget is not granted to clients');

# restored checks a database into which a dump was restored.
sub restored
{
	my ($dbname) = @_;
	ok(keys_of($node, $dbname) eq $before{keys}, "$dbname: every row is there, byte for byte");
	ok(answers_of($node, $dbname) eq $before{answers}, "$dbname: peek answers the same");
	ok(replays_of($dbname) eq $before{replays}, "$dbname: claim replays the same");
	is(rights_of($dbname), $before{rights}, "$dbname: the same rights");
	is($node->safe_psql($dbname, 'SELECT * FROM charge ORDER BY key'),
		$before{charges}, "$dbname: the effects are restored");

	is( $node->safe_psql($dbname, q{SELECT outcome FROM idempotency.claim('kind', 'odd',
			'{"to":"x","amount":1.5}')}), 'replayed', "$dbname: the same request replays");
	fails_with($node, q{SELECT idempotency.claim('kind', 'odd', '{"to":"x","amount":2.5}')},
		'IK422', "$dbname: another request is rejected", dbname => $dbname);
	is( $node->safe_psql($dbname, q{SELECT idempotency.once('inbox', 'one');
			SELECT idempotency.once_many('inbox', array['a', 'b', 'c'])}), "f\nc",
		"$dbname: a message in the inbox is a duplicate");
	is( $node->safe_psql($dbname, q{SELECT idempotency.once('inbox', 'expired message')}), 't',
		"$dbname: an expired message is new");

	# Expired and uncommitted keys are free for roles with the right to claim.
	is( $node->safe_psql($dbname, q{SET ROLE client; BEGIN;
			SELECT outcome FROM idempotency.claim('kind', 'short');
			SELECT outcome FROM idempotency.claim('kind', 'uncommitted');
			INSERT INTO charge VALUES ('restored', 2);
			SELECT idempotency.complete('kind', 'short', '2'), idempotency.complete('kind', 'uncommitted', '2');
			COMMIT}), "claimed\nclaimed\n2|2", "$dbname: a client claims free keys");
	leases_restored($dbname);
	fails_with($node, q{INSERT INTO charge VALUES ('unclaimed', 1)}, 'IK403',
		"$dbname: require_claim rejects an unclaimed write", dbname => $dbname);
	fails_with($node, q{SET ROLE stranger; SELECT idempotency.peek('kind', 'odd')}, '42501',
		"$dbname: a role without rights is rejected", dbname => $dbname);
}

# leases_restored checks that a live lease belongs to its owner, that another one can be
# taken over, and that no token is issued twice.
sub leases_restored
{
	my ($dbname) = @_;
	my $claim = q{FROM idempotency.try_claim('lease', '%s', '{"amount":1.5}', lease => '1 day')};

	is( $node->safe_psql($dbname, sprintf "SELECT outcome, attempt $claim", 'live'), 'in_progress|1', "$dbname: a live lease blocks other clients");
	is( $node->safe_psql($dbname, q{SELECT outcome FROM idempotency.try_claim('lease', 'live', '{"amount": 2}')}), 'mismatched',
		"$dbname: a live lease rejects another request");
	is( $node->safe_psql($dbname, qq{SELECT idempotency.renew('lease', 'live', $token{live}, '2 days') > now();
			SELECT idempotency.complete('lease', 'live', '"done"', token => $token{live});
			SELECT outcome, response FROM idempotency.claim('lease', 'live')}), qq(t\n"done"\nreplayed|"done"),
		"$dbname: the owner of a live lease renews and finishes");

	my ($outcome, $attempt, $point, $left, $token) = split /\|/,
	  $node->safe_psql($dbname, sprintf "SELECT outcome, attempt, recovery_point, encode(convert_to(state::text, 'UTF8'), 'hex'), token $claim", 'abandoned');
	is("$outcome $attempt $point $left", 'taken_over 2 charged ' . unpack('H*', $state =~ s/\\t/\t/r), "$dbname: an abandoned operation is taken over at its checkpoint");
	cmp_ok($token, '>', $greatest, "$dbname: the new token is greater than all earlier tokens");
	fails_with($node, "SELECT idempotency.complete('lease', 'abandoned', token => $token{abandoned})", 'IK410',
		"$dbname: the former owner is rejected", dbname => $dbname);
	is( $node->safe_psql($dbname, qq{SELECT key, request, attempt, recovery_point, token > $token
			FROM idempotency.claim_abandoned('lease', '1 day', 10) ORDER BY key}),
		qq(for ever|{"amount" :  1.50}|2|begun|t\nreleased|{"amount" :  1.50}|2|charged|t), "$dbname: claim_abandoned returns released operations");
	is( $node->safe_psql($dbname, q{SELECT string_agg(key::text, ', ') FROM idempotency.key WHERE scope = 'lease' AND retention IS NULL AND token IS NOT NULL}),
		'for ever', "$dbname: released operations keep their retention");
	is( $node->safe_psql($dbname, q{SELECT idempotency.once('refund/eu', 'k'); SELECT expires_in > '8 days' FROM idempotency.keys WHERE scope = 'refund/eu'}),
		"t\nt", "$dbname: what configure() has stored applies");
}

# fresh creates an empty database and runs commands that must restore into it.
sub fresh
{
	my ($dbname, @commands) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $dbname TEMPLATE template0");
	$node->command_ok([@$_, '--dbname', $dbname], "$dbname: $_->[0] succeeds") foreach @commands;
	restored($dbname);
}

# A role that can read all tables of the application cannot dump the database without
# grant_backup. Before PostgreSQL 18 not even its schema.
$node->safe_psql('postgres', 'CREATE ROLE backup LOGIN; GRANT SELECT ON charge TO backup');
$node->command_fails_like([ 'pg_dump', '--username=backup', '--format=custom', 'postgres' ],
	qr/permission denied|may lack SELECT privilege/, 'pg_dump without rights fails');
$node->safe_psql('postgres', q{SELECT idempotency.grant_backup('backup')});
$before{rights} = rights_of('postgres');

$node->safe_psql('postgres', q{SELECT idempotency.configure('retention', '9 days', 'refund/*')});
my @psql = ('psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '--file');
my @restore = ('pg_restore', '--exit-on-error');

dumps($node, 'dump as plain text', '--file', "$dir/plain", 'postgres');
dumps($node, 'dump as archive', '--format=custom', '--file', "$dir/custom", 'postgres');
dumps($node, 'dump as directory, in parallel', '--format=directory', '--jobs=2', '--file', "$dir/directory", 'postgres');
dumps($node, 'dump the schema', '--schema-only', '--file', "$dir/schema", 'postgres');
dumps($node, 'dump the data', '--data-only', '--disable-triggers', '--file', "$dir/data", 'postgres');

# Each dump of that role has the same bytes.
dumps($node, 'dump as plain text, as backup', '--username=backup', '--file', "$dir/backup", 'postgres');
dumps($node, 'dump the schema, as backup', '--username=backup', '--schema-only', '--file', "$dir/backup_schema", 'postgres');
dumps($node, 'dump the data, as backup', '--username=backup', '--data-only', '--disable-triggers', '--file', "$dir/backup_data", 'postgres');
dumps($node, 'dump as archive, as backup', '--username=backup', '--format=custom', '--file', "$dir/backup_custom", 'postgres');
dumps($node, 'dump as directory, in parallel, as backup', '--username=backup', '--format=directory', '--jobs=2', '--file', "$dir/backup_directory", 'postgres');
foreach my $kind ([ '', 'plain' ], [ '_schema', 'schema' ], [ '_data', 'data' ])
{
	my @same = map { s/^\\(un)?restrict .*//mgr } slurp_file("$dir/backup$kind->[0]"), slurp_file("$dir/$kind->[1]");
	ok($same[0] eq $same[1], "pg_dump as backup: the same $kind->[1]");
}
fails_with($node, "SET ROLE backup; $_", '42501', "backup may not: $_") foreach 'DELETE FROM idempotency.key', q{SELECT nextval('idempotency.token')},
  q{SELECT idempotency.forget('kind', 'odd')}, q{SELECT idempotency.claim('kind', 'odd')};

my $text = slurp_file("$dir/plain");
is(scalar(() = $text =~ /^CREATE EXTENSION.*idempotency/mg), 1, 'a dump creates the extension once');
is(join(', ', sort $text =~ /^COPY idempotency\."?(\w+)/mg), 'configuration, key, outbox, parked, partition, position, reaper, subscription',
	'a dump copies all tables of the extension');
is(join(', ', sort $text =~ /^SELECT pg_catalog\.setval\('idempotency\.(\w+)', \d+, (?:true|false)\)/mg),
	'outbox_seq, token', 'a dump sets the sequences of the extension');
unlike($text, qr/^CREATE (?!TRIGGER|EXTENSION)\w+ .*idempotency/m, 'a dump creates no object of the extension');
unlike($text, qr/^(COMMENT|ALTER) .* idempotency\./m, 'a dump alters no object of the extension');
unlike(slurp_file("$dir/schema"), qr/^COPY/m, 'a dump of the schema has no data');

fresh('from_plain', [@psql, "$dir/plain"]);
fresh('from_custom', [@restore, "$dir/custom"]);
fresh('from_directory', [@restore, '--jobs=2', "$dir/backup_directory"]);
fresh('from_parts', [@psql, "$dir/schema"], [@psql, "$dir/data"]);
fresh('from_archive_parts', [@restore, '--schema-only', "$dir/backup_custom"],
	[@restore, '--data-only', '--disable-triggers', "$dir/backup_custom"]);

# Restore into a database whose contents have changed: the dump replaces them.
fresh('replaced', [@restore, "$dir/custom"]);
$node->command_ok([@restore, '--clean', '--if-exists', '--dbname=replaced', "$dir/custom"],
	'pg_restore --clean succeeds');
restored('replaced');

# A dump of a restored database equals the original dump.
$node->safe_psql('postgres', 'CREATE DATABASE again TEMPLATE template0');
$node->command_ok([@restore, '--dbname=again', "$dir/custom"], 'restore');
dumps($node, 'dump what was restored', '--file', "$dir/again", 'again');
my @again = map { s/^\\(un)?restrict .*//mgr } slurp_file("$dir/again"), $text;
ok($again[0] eq $again[1], 'the dump of a restored database is the same');

# pg_extension_config_dump does not know a sequence that was recreated manually, even if
# it is added to the extension.
$node->safe_psql('again', q{ALTER EXTENSION idempotency DROP SEQUENCE idempotency.token; DROP SEQUENCE idempotency.token;
	CREATE SEQUENCE idempotency.token; ALTER EXTENSION idempotency ADD SEQUENCE idempotency.token});
dumps($node, 'dump with a recreated sequence', '--file', "$dir/another", 'again');
$text = slurp_file("$dir/another");
is(join(', ', sort $text =~ /setval\('idempotency\.(\w+)'/g), 'outbox_seq', 'a dump does not set a recreated sequence');

$open->query_safe('ROLLBACK');
$open->quit;
$node->stop;
done_testing();
