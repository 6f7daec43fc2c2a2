# 006_encodings.pl
#
# Proves that encodings, bytes, string-literal settings, size and depth neither lose nor
# change data. Stored values are replayed byte for byte, and one JSON value has the same
# fingerprint in UTF8 and LATIN1. Values that cannot be stored are rejected with a clear
# error, after which the session continues.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => 'log_statement = none');
my %db = (UTF8 => 'postgres', LATIN1 => 'latin1', SQL_ASCII => 'ascii', off => 'literals');
$node->safe_psql('postgres', qq{
	CREATE DATABASE latin1 TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C';
	CREATE DATABASE ascii TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C';
	CREATE DATABASE literals TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C';
	ALTER DATABASE literals SET backslash_quote = off});
# 19 has no such setting any more.
$node->safe_psql('postgres', q{
	ALTER DATABASE literals SET standard_conforming_strings = off;
	ALTER DATABASE literals SET escape_string_warning = off}) if $node->safe_psql('postgres', 'SHOW server_version_num') < 190000;
$node->safe_psql($_, 'CREATE EXTENSION idempotency') foreach qw(latin1 ascii literals);

# hex_of returns SQL that shows the bytes of an expression on the server.
sub hex_of
{
	return "encode(convert_to($_[0], getdatabaseencoding()), 'hex')";
}

# answer returns the result of one query in a database, sent in an encoding.
sub answer
{
	my ($db, $client_encoding, $sql) = @_;
	return $node->safe_psql($db{$db}, "SET client_encoding = '$client_encoding'; $sql");
}

# operation returns the SQL that claims, completes and replays one operation, from
# literals, and shows the bytes of the replay. Headers default to the response.
sub operation
{
	my ($scope, $key, $request, $response, $headers) = @_;
	$headers //= $response;
	my ($r, $h) = (hex_of('response::text'), hex_of('headers::text'));
	return qq{BEGIN; SELECT outcome FROM idempotency.claim($scope, $key, $request); SELECT 1
		FROM idempotency.complete($scope, $key, $response, 200, $headers); COMMIT;
		SELECT outcome, $r, $h FROM idempotency.claim($scope, $key, $request)};
}

# ----------------------------------------------------------------
# Names and bodies with characters beyond ASCII
# ----------------------------------------------------------------

# Text that LATIN1 can represent, in UTF-8: e with acute, y with diaeresis, no-break
# space.
my ($e, $y, $nbsp) = ("\xc3\xa9", "\xc3\xbf", "\xc2\xa0");
my $body = qq({"$e" :\t"$y$nbsp\\u00e9", "b":[ "$e" ]} );
my $bytes = unpack 'H*', $body;
my $latin1 = unpack 'H*', $body =~ s/\xc3(.)/chr(ord($1) + 0x40)/ger =~ s/\xc2(.)/$1/gr;

my $sql = operation("'t${e}nant'", "'cl${e}'", "'$body'", "'$body'");
is(answer('UTF8', 'UTF8', $sql), "claimed\n1\nreplayed|$bytes|$bytes", 'UTF8 replays');
is(answer('LATIN1', 'UTF8', $sql), "claimed\n1\nreplayed|$latin1|$latin1", 'LATIN1 replays');
is(answer('SQL_ASCII', 'SQL_ASCII', $sql =~ s/\\u00e9//gr),
	"claimed\n1\nreplayed|" . join('|', ($bytes =~ s/5c7530306539//r) x 2), 'SQL_ASCII replays');
is( answer('LATIN1', 'LATIN1', qq{SELECT response::text = E'{"\xe9" :\\t"\xff\xa0\\\\u00e9", "b":[ "\xe9" ]} '
		FROM idempotency.claim('t\xe9nant', 'cl\xe9', '{"b":["\xe9"],"\xe9":"\xff\xa0\xe9"}')}), 't',
	'UTF8 database: a client in LATIN1 uses the same key and request');
is( answer('UTF8', 'LATIN1', qq{SELECT outcome
		FROM idempotency.claim('t\xe9nant', 'cl\xe9', '{"b":["\xe9"],"\xe9":"\xff\xa0\xe9"}')}), 'replayed',
	'LATIN1 database: a client in LATIN1 uses the same key and request');

# One JSON value has one canonical form and one fingerprint in both encodings.
my @documents = (
	$body,
	qq({"\\u00e9":1,"z":"\\u00ff","a":"$nbsp"}),
	qq(["$e\\u00e9", "\\u0001\\t\\"\\\\\\/", "\\u00a0\\u0080"]),
	qq({"${y}b":1,"${e}a":2,"a${y}":3,"A":4,"":5}),
	qq("$e"), '1.50', '{"a":{"b":[1e2,true,null]}}');
foreach my $document (@documents)
{
	my $literal = "E'" . $document =~ s/\\/\\\\/gr . "'";
	my $query = qq{SELECT encode(convert_to(idempotency.canonical($literal), 'UTF8'), 'hex'),
		idempotency.fingerprint($literal), idempotency.fingerprint('POST', '/$e', $literal),
		idempotency.derive_key('$e', '$y', '$nbsp'), idempotency.natural_key('$e', '$y')};
	my $utf8 = answer('UTF8', 'UTF8', $query);
	my ($canonical, $fingerprint) = split /\|/, $utf8;
	like($utf8, qr/^([0-9a-f]+\|\\x[0-9a-f]{64}\|)/, "canonical form of $document");
	is(answer('LATIN1', 'UTF8', $query), $utf8, 'the canonical form is the same in LATIN1');
	is( answer('UTF8', 'UTF8', "SELECT sha256('\\x$canonical')"), $fingerprint,
		'the fingerprint is the SHA-256 of the canonical form');
	next if $document =~ /\\u00[89a-f]/;
	is( answer('SQL_ASCII', 'SQL_ASCII', $query =~ s/'UTF8'/'SQL_ASCII'/r), $utf8, 'the canonical form is the same in SQL_ASCII');
}

# Names of full length, with the widest characters.
my $wide = "\xf0\x9f\x92\xb3" x 255;
is(answer('UTF8', 'UTF8', operation("'$wide'", "'$wide'", 'NULL', "'1'", "'{}'")),
	"claimed\n1\nreplayed|31|7b7d", '255 characters of four bytes');
my $long = $e x 255;
is(answer('LATIN1', 'UTF8', operation("'$long'", "'$long'", 'NULL', "'1'", "'{}'")),
	"claimed\n1\nreplayed|31|7b7d", '255 characters of one byte');
fails_with($node, "SELECT idempotency.claim('s', '${wide}x')", 'IK400', '256 characters',
	like => qr/It has 256 characters/);
fails_with($node, "SET client_encoding = 'UTF8'; SELECT idempotency.claim('s', '${long}x')", 'IK400',
	'256 characters in LATIN1',
	like => qr/It has 256 characters/, dbname => 'latin1');

# ----------------------------------------------------------------
# Characters that the database cannot represent, and invalid bytes
# ----------------------------------------------------------------

# transaction_survives checks that a call fails inside a transaction that has claimed
# and written, and that the transaction continues from a savepoint.
sub transaction_survives
{
	my ($session, $call, $sqlstate, $name, $like) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	$session->query_safe(q{BEGIN; SELECT idempotency.claim('s', 'k'); SAVEPOINT before});
	session_fails($session, $call, $sqlstate, $name, $like);
	is( $session->query_safe(q{ROLLBACK TO before; SELECT idempotency.complete('s', 'k', '1'); COMMIT;
			SELECT outcome FROM idempotency.claim('s', 'k'); SELECT idempotency.forget('s', 'k')}),
		"1\nreplayed\nt", "$name: the transaction continues");
}

my %session = map { $_ => open_session($node, dbname => $db{$_}) } keys %db;
$session{$_}->query_safe("SET client_encoding = SQL_ASCII; SET idempotency.retention = '1h'") foreach keys %db;

my $euro = q('{"price":"\u20ac"}');
is($session{UTF8}->query_safe("SELECT encode(convert_to(idempotency.canonical($euro), 'UTF8'), 'hex')"),
	unpack('H*', qq({"price":"\xe2\x82\xac"})), 'UTF8 can represent the euro sign');
foreach my $call ("canonical($euro)", "fingerprint($euro)", "claim('s', 'e', $euro)", "try_claim('s', 'e', $euro)")
{
	transaction_survives($session{LATIN1}, "SELECT idempotency.$call", '22P05', "LATIN1: $call",
		qr/has no equivalent in encoding "LATIN1"|could not be translated to the server's encoding LATIN1/);
	# The message of the server's parser differs from version 16 on.
	transaction_survives($session{SQL_ASCII}, "SELECT idempotency.$call", $node->pg_version < 16 ? '0A000' : '22P05',
		"SQL_ASCII: $call",
		qr/conversion between UTF8 and SQL_ASCII is not supported|could not be translated to .* SQL_ASCII/);
}
foreach my $db (qw(UTF8 LATIN1 SQL_ASCII))
{
	transaction_survives($session{$db}, q{SELECT idempotency.claim('s', 'e', '{"a":"\u0000"}')}, '22P05', "$db: \\u0000",
		qr/\\u0000 cannot be converted to text/);
	transaction_survives($session{$db}, q{SELECT idempotency.claim('s', 'e', '{"a":"\ud83d"}')}, '22P02', "$db: half a character",
		qr/Unicode low surrogate must follow a high surrogate/);

	# A response is stored as it is; the client interprets its escapes.
	is( $session{$db}->query_safe(operation("'s'", "'escapes'", "'1'", q('{"a":"\u20ac\u0000"}'))),
		join('|', "claimed\n1\nreplayed", (unpack 'H*', '{"a":"\u20ac\u0000"}') x 2), "$db: escapes in a response");
}

# Invalid bytes: rejected where the encoding is known, otherwise stored.
my $hostile = '\xff\xfe\xc3\xed\xa0\x80';
transaction_survives($session{UTF8}, "SELECT idempotency.$_", '22021', "UTF8: $_", qr/invalid byte sequence for encoding "UTF8"/)
  foreach "claim('s', E'$hostile')", "claim(E'$hostile', 'k')", qq(claim('s', 'e', E'"$hostile"')),
  qq(complete('s', 'k', E'"$hostile"')), "once_many('s', ARRAY[E'$hostile'])";
transaction_survives($session{LATIN1}, "SELECT idempotency.$_", 'IK400', "LATIN1: $_", qr/contains a control character/)
  foreach "claim('s', E'$hostile')", "claim(E'$hostile', 'k')", "once('s', E'\\x9f')", "once_many('s', ARRAY[E'a\\x80'])",
  "publish(E't\\x85', '1')", "subscribe(E's\\x85', ARRAY['*'])", "subscribe('s', ARRAY[E'\\x85*'])";
foreach my $db (qw(SQL_ASCII LATIN1))
{
	my $hostile = $db eq 'LATIN1' ? $hostile =~ s/\\x80//r : $hostile;
	my $raw = unpack 'H*', eval qq("\\"$hostile\\"");
	is( $session{$db}->query_safe(
			operation("E'$hostile'", "E'$hostile'", "E' \"$hostile\"'", "E'\"$hostile\"'", "'{}'")),
		"claimed\n1\nreplayed|$raw|7b7d", "$db: invalid bytes are replayed");
	is( $session{$db}->query_safe("SELECT outcome FROM idempotency.try_claim(E'$hostile', E'$hostile', E'\"$hostile.\"')"),
		'mismatched', "$db: invalid bytes are compared");
}

# ----------------------------------------------------------------
# Literals with backslashes
# ----------------------------------------------------------------

my @literals = (q(E's\\\\c\\'ope'), q(E'k\\\\n\\'ey'), q(E'{"a\\\\\\\\":"\\\\n\\'"}'));
my $round = operation(@literals, $literals[2]);
my $expected = $session{UTF8}->query_safe($round);
like($expected, qr/^claimed\n1\nreplayed\|7b22615c5c223a225c6e27227d\|/, 'backslashes are replayed');
is($session{off}->query_safe('SET backslash_quote = on; ' . $round), $expected,
	'backslashes are replayed with standard_conforming_strings off');
my $helpers = q{SELECT idempotency.canonical(E'{"a\\\\\\\\":"\\\\n"}'), idempotency.natural_key(E'a\\\\', E'\\\\b'),
	idempotency.parse_header(E'"a\\\\"b\\\\\\\\"'), idempotency.derive_key(E'\\\\', 'k', 's'),
	idempotency.problem(o) FROM idempotency.try_claim(E's\\\\c''ope', E'k\\\\n''ey', '"another"') AS o;
	SELECT key, state, response_size FROM idempotency.keys ORDER BY key};
$expected = $session{UTF8}->query_safe($helpers);
like($expected, qr/^\{"a\\\\":"\\n"\}\|[0-9a-f]{64}\|a"b\\\|/, 'the SQL helper functions handle backslashes');
$session{$_}->query_safe(q{DELETE FROM idempotency.key WHERE scope NOT LIKE '%ope'}) foreach qw(UTF8 off);
is($session{off}->query_safe($helpers), $session{UTF8}->query_safe($helpers),
	'the SQL helper functions handle backslashes with standard_conforming_strings off');
$session{off}->query_safe(q{CREATE ROLE "back\slash'"; SELECT idempotency.grant_client(E'"back\\\\slash\'"');
	SELECT idempotency.grant_operator(E'"back\\\\slash\'"')});
is($session{off}->query_safe(q{SET ROLE "back\slash'"; SELECT outcome FROM idempotency.peek(E's\\\\c''ope', E'k\\\\n''ey')}),
	'replayed', 'grants work with standard_conforming_strings off');

# ----------------------------------------------------------------
# Size and depth
# ----------------------------------------------------------------

foreach my $db (qw(UTF8 LATIN1 SQL_ASCII))
{
	my $s = $session{$db};
	my $sized = sub { q{('"' || repeat('x', %d) || '"')} =~ s/%d/$_[0] - 2/er };
	my $digest = 'SELECT outcome, length(response::text), md5(response::text)';
	my $finish = sub { qq{BEGIN; SELECT 1 FROM idempotency.claim('s', '$_[0]', $_[1]); SELECT 1
		FROM idempotency.complete('s', '$_[0]', $_[1]); COMMIT;
		$digest FROM idempotency.claim('s', '$_[0]', $_[1])} };
	my $is_kept = sub {
		my ($key, $value, $name) = @_;
		is($s->query_safe($finish->($key, $value)),
			"1\n1\n" . $s->query_safe("SELECT 'replayed', length(v), md5(v) FROM (SELECT $value AS v) AS d"),
			"$db: $name");
	};

	$is_kept->('1MB', $sized->(1048576), 'a request and a response of 1 MB');
	transaction_survives($s, "SELECT idempotency.complete('s', 'k', " . $sized->(1048577) . ')', '54000',
		"$db: one byte more than the limit", qr/1048577 bytes exceeds idempotency\.max_response_size/);
	transaction_survives($s, "SELECT idempotency.complete('s', 'k', " . $sized->(1048575) . ", 200, '{}')", '54000',
		"$db: one byte more than the limit, with the headers");
	$s->query_safe('SET idempotency.max_response_size = 20000000');
	$is_kept->('9MB', $sized->(9000000), '9 MB with a higher limit');

	$is_kept->('array', q{(repeat('[', 10000) || repeat(']', 10000))}, 'arrays 10,000 deep');
	$is_kept->('object', q{(repeat('{"a" :', 10000) || '1' || repeat('}', 10000))}, 'objects 10,000 deep');
	is( $s->query_safe(q{SELECT outcome FROM idempotency.claim('s', 'object',
			(repeat('{"a":', 10000) || '1.0' || repeat('}', 10000))::jsonb)}), 'replayed', "$db: the same as jsonb");
	is( $s->query_safe(q{SELECT outcome FROM idempotency.try_claim('s', 'object',
			(repeat('{"a":', 10000) || '2' || repeat('}', 10000)))}), 'mismatched', "$db: deep values are compared");
	my $abyss = q{(repeat('[', 1000000) || repeat(']', 1000000))};
	transaction_survives($s, $_, '54001', "$db: one million levels deep", qr/stack depth limit exceeded/)
	  foreach "SELECT idempotency.claim('s', 'abyss', $abyss)", "SELECT idempotency.complete('s', 'k', $abyss)";
}

# ----------------------------------------------------------------
# Restore into another encoding
# ----------------------------------------------------------------

# Rows that no claim creates, such as those that an older version accepted. A restore
# treats them as data, and they do not block the restore of other rows.
$_->quit foreach values %session;
$node->safe_psql('latin1', q{
	TRUNCATE idempotency.key, idempotency.outbox;
	SELECT idempotency.subscribe('plain', ARRAY['*']);
	INSERT INTO idempotency.key (created_at, expires_at, status, scope, key, response)
	SELECT now(), 'infinity', 200, s, k::idempotency.keytext, '1'
	FROM (VALUES ('plain', 'k'), ('plain', '0190163d-8694-739b-aea5-966c26f8ad91'), (E'a\x85', 'k'), ('s', E'\x85'), ('s', E'a\x80b\x9f'),
		('s', E'tab\t'), ('s', ''), ('s', repeat(E'\xe9', 255)), ('s', repeat('x', 300))) AS v (s, k);
	INSERT INTO idempotency.subscription (subscription, owner, topics, patterns, start_at, max_attempts, retry_delay, max_retry_delay, created_at)
		SELECT E's\x85', owner, ARRAY[E't\x85*'], ARRAY[E't\x85%'], start_at, max_attempts, retry_delay, max_retry_delay, created_at FROM idempotency.subscription;
	INSERT INTO idempotency.outbox (seq, txid, published_at, id, bucket, bytes, aggregatetype, aggregateid, type)
		VALUES (1, '1', now(), gen_random_uuid(), 1, 0, E't\x85', E'\x85', E'\x85');
	INSERT INTO idempotency.parked (subscription, partition, seq, published_at, id, bucket, bytes, aggregatetype, attempts, alone)
		VALUES (E's\x85', 0, 1, now(), gen_random_uuid(), 1, 0, E't\x85', 1, false)});
my $stored = q{SELECT count(*), encode(sha256(convert_to(string_agg(r, E'\n' ORDER BY r COLLATE "C"), 'UTF8')), 'hex') FROM (
	SELECT format('%s %s %s', scope, key, expires_at) FROM idempotency.key UNION ALL SELECT format('%s %s', subscription, topics) FROM idempotency.subscription
	UNION ALL SELECT format('%s %s', aggregatetype, aggregateid) FROM idempotency.outbox UNION ALL SELECT format('%s %s', subscription, seq) FROM idempotency.parked) AS v (r)};
my $rows = $node->safe_psql('latin1', $stored);
like($rows, qr/^13\|/, 'LATIN1 has such rows');
foreach my $format (qw(plain custom))
{
	my $dump = $node->basedir . "/latin1.$format";
	$node->command_ok([ 'pg_dump', '--format', $format, '--file', $dump, 'latin1' ], "$format: dumped from LATIN1");
	$node->safe_psql('postgres', qq{DROP DATABASE IF EXISTS restored; CREATE DATABASE restored TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'});
	$node->command_ok($format eq 'plain' ? [ 'psql', '-qX', '-v', 'ON_ERROR_STOP=1', '-d', 'restored', '-f', $dump ] : [ 'pg_restore', '--exit-on-error', '-d', 'restored', $dump ],
		"$format: restored into UTF8");
	is($node->safe_psql('restored', $stored), $rows, "$format: every row is restored");
}
my $copy = $node->basedir . '/key.binary';
$node->safe_psql('latin1', qq{SET client_encoding = 'UTF8'; COPY idempotency.key TO '$copy' WITH (FORMAT binary)});
$node->safe_psql('restored', qq{TRUNCATE idempotency.key; SET client_encoding = 'UTF8'; COPY idempotency.key FROM '$copy' WITH (FORMAT binary)});
is($node->safe_psql('restored', $stored), $rows, 'a binary COPY restores every row');

$node->stop;
done_testing();
