# 026_outbox_encodings.pl
#
# Proves that names of topics, subscriptions and aggregates are data in any encoding:
# with quotes, backslashes and wildcards, with 255 wide characters, and with invalid
# bytes where the encoding is not known. Patterns match equally in all encodings: an
# event reaches the matching subscriptions and no other, also where bytes of two
# adjacent characters form a third one.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => 'log_statement = none');

# Two characters of each encoding, as bytes, and the bytes between the second byte of
# the first and the first byte of the second.
my %encoding = (
	UTF8 => [ "\xe3\x81\x82", "\xf0\x9f\x92\xb3" ],
	LATIN1 => [ "\xe9", "\xff" ],
	SQL_ASCII => [ "\xff\xfe", "\xc3\x28" ],
	EUC_JP => [ "\xa4\xa2", "\xa4\xa4" ],
	EUC_KR => [ "\xb0\xa1", "\xb3\xaa" ]);

# is_known subscribes to a pattern under a name, publishes an event of a topic with the
# name as its aggregate, and checks whether the event is delivered.
sub is_known
{
	my ($session, $test, $name, $pattern, $topic, $given) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($n, $p, $t) = map { "convert_from('\\x" . unpack('H*', $_) . "', getdatabaseencoding())" } $name, $pattern, $topic;

	is( $session->query_safe(qq{SELECT idempotency.subscribe($n, ARRAY[$p], max_attempts => 1);
			SELECT FROM idempotency.publish($t, '1', $n);
			SELECT count(*), bool_and(topic = $t AND aggregate_id = $n) FROM idempotency.fetch($n);
			WITH e AS (SELECT p.batch, o.id FROM idempotency.position AS p, idempotency.outbox AS o WHERE p.batch IS NOT NULL)
				SELECT count(idempotency.nack($n, batch, id)) FROM e;
			SELECT count(*) FROM idempotency.dead_letters WHERE subscription = $n AND topic = $t AND aggregate_id = $n;
			SELECT idempotency.unsubscribe(subscription) FROM idempotency.subscriptions WHERE subscription = $n;
			DELETE FROM idempotency.outbox}) =~ s/^\n//mr,
		$given ? "t\n1|t\n0\n1\nt" : "t\n0|\n0\n0\nt", $test);
}

foreach my $encoding (sort keys %encoding)
{
	my ($a, $b) = @{ $encoding{$encoding} };
	my $characters = $encoding eq 'SQL_ASCII' ? 127 : 255;

	$node->safe_psql('postgres', qq{CREATE DATABASE "$encoding" TEMPLATE template0 ENCODING '$encoding' LC_COLLATE 'C' LC_CTYPE 'C'});
	$node->safe_psql($encoding, 'CREATE EXTENSION idempotency');
	my $session = open_session($node, dbname => $encoding);

	is_known($session, "$encoding: $_->[0]", @$_[1 .. 4]) foreach (
		[ 'a topic matches itself', $a, "$a.$b", "$a.$b", 1 ],
		[ 'a topic matches no other', $a, "$a.$b", "$a.$a", 0 ],
		[ '* matches any characters', "$a*", "$a*", "$a$b", 1 ],
		[ '* at the beginning matches', "*$b", "*$b", "$a.$b$b", 1 ],
		[ '* at the beginning does not match another end', "*$b", "*$b", "$b$a", 0 ],
		[ '* in the middle matches', "*", "$a*$b", "$a$b$a$b", 1 ],
		[ '\\ escapes a character', "\\$a", "\\$a\\*\\\\", "$a*\\", 1 ],
		[ 'an escaped * matches only itself', "\\$a", "\\$a\\*\\\\", "$a$b\\", 0 ],
		[ 'quotes', qq('"$a"'), qq('"$b"'*), qq('"$b"';--), 1 ],
		[ 'names of full length', $b x $characters, $b x $characters, $b x $characters, 1 ],
		[ 'a pattern of full length', $b x $characters, "*$b" x int($characters / 2), $b x $characters, 1 ]);
	is_known($session, "$encoding: no character begins in the middle of another", $a, '*' . substr($a, 1) . substr($b, 0, 1) . '*', "$a$b", 0)
	  if $encoding =~ /^EUC/;
	$session->quit;
}

# A dump can be restored into another encoding while events of an aggregate wait: later ones must
# belong to the same partition.
my $aggregate = q{convert_from('\xe38182', 'UTF8')};
my ($utf8, $eucjp) = map { $node->safe_psql($_, qq{SELECT FROM idempotency.publish('t', '1', $aggregate); SELECT bucket FROM idempotency.outbox WHERE aggregateid = $aggregate}) } qw(UTF8 EUC_JP);
is($eucjp, $utf8, 'an aggregate has the same bucket in all encodings');

$node->stop;
done_testing();
