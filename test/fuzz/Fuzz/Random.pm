# Fuzz::Random
#
# Choices that depend on a seed, and the bytes of hostile texts. Perl's own generator is
# the same on every machine, so a seed replays a run.

package Fuzz::Random;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';

our @EXPORT = qw(pick chance between literal hostile_bytes hostile_json big_json uuid_text);

# pick returns one of the values.
sub pick
{
	return $_[ int rand @_ ];
}

# chance returns true that many times in a hundred.
sub chance
{
	my ($percent) = @_;
	return rand 100 < $percent;
}

# between returns a whole number between the bounds, inclusive.
sub between
{
	my ($least, $most) = @_;
	return $least + int rand($most - $least + 1);
}

# literal returns bytes as an SQL literal that is plain ASCII.
sub literal
{
	my ($bytes) = @_;
	$bytes =~ s/([^ !#-&(-\[\]-~])/sprintf '\\x%02x', ord $1/ge;
	return "E'$bytes'";
}

sub uuid_text
{
	return join '-', map { join '', map { sprintf '%x', int rand 16 } 1 .. $_ } 8, 4, 4, 4, 12;
}

# ----------------------------------------------------------------
# Texts
# ----------------------------------------------------------------

my @nasty = (
	'', ' ', "'", '"', "''", "\\", "\\'", '$$', '$body$', ';', '--', '/*', '*/', "'; DROP TABLE idempotency.key; --",
	'%s%n%d', '%', '_', '*', '\\*', '**', '*.*', '/', ':', 's/', '../..', 'NULL', 'null', '0', '-1', 'NaN', 'infinity',
	'{}', '[]', '[object Object]', '{8e03978e-40d5-43dd-bc93-6894a57f9324}', '{"a":1}', '"quoted"', '"a\\"b"', '"a";x=1', '"open', '(1 2)', ':bin:', '?1', 'a' x 254, 'a' x 255, 'a' x 256,
	"\t", "\n", "\r\n", "\x01", "\x1f", "\x7f", "\x00", "a\x00b", "\xc2\x80", "\xc2\x9f", "\xc2\xa0", "\xe2\x80\xa8", "\xe2\x80\xae",
	"\xef\xbb\xbf", "\xef\xbf\xbe", "e\xcc\x81", "\xc3\xa9", "\xf0\x9f\x92\xb3", "\xf4\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xed\xa0\x80",
	"\xed\xa0\xbd\xed\xb2\xb3", "\xc0\x80", "\xc1\xbf", "\xe0\x80\x80", "\xf8\x88\x80\x80\x80", "\xff", "\xfe\xff", "\x80", "a\xe2\x82",
	"\xf0\x9f\x92", 'order', 'Order', "ORDER ", 'public', 'pg_temp', 'idempotency.key');

# hostile_bytes returns a text that is known to break programs, or random bytes.
sub hostile_bytes
{
	my $kind = between(1, 10);

	return pick(@nasty) if $kind <= 4;
	return pick(@nasty) . pick(@nasty) . pick(@nasty) if $kind <= 6;
	return join '', map { chr between(0, 255) } 1 .. between(1, 40) if $kind == 7;
	return join '', map { chr between(32, 126) } 1 .. between(1, 60) if $kind == 8;
	return pick("\xc3\xa9", "\xf0\x9f\x92\xb3", 'x', "\xe2\x82\xac", "'", "\\") x pick(1, 63, 64, 127, 128, 254, 255, 256, 257, 1000) if $kind == 9;
	return chance(50) ? uuid_text() : pick(uc uuid_text(), uuid_text() . ' ', '{' . uuid_text() . '}', uuid_text() =~ s/-//gr);
}

# ----------------------------------------------------------------
# JSON
# ----------------------------------------------------------------

my @numbers = qw(0 -0 0.0 1 -1 1.50 1e2 1E+2 1e-2 0.1 12345678901234567890 123456789012345678901234567890.10 9007199254740993
  333333333.33333329 1e308 1.8e308 1e400 -1e-400 5e-324 2.5e-324 1e131071 1e131073 01 1. .5 1e +1 0x1 NaN Infinity);

sub string
{
	my $inside = join '', map { pick('a', 'b', ' ', "\xc3\xa9", '\\u00e9', '\\n', '\\"', '\\\\', '\\/', '\\u20ac', '\\ud83d\\udcb3', "\xf0\x9f\x92\xb3", 'zz') }
	  1 .. between(0, 6);

	$inside .= pick('\\u0000', '\\ud83d', '\\udcb3', "\x01", '\\x', '\\u12', "\xff", '"') if chance(6);
	return qq("$inside");
}

sub space
{
	return chance(80) ? '' : pick(' ', "\t", "\n", "\r\n ", "\x0b");
}

sub value
{
	my ($depth) = @_;
	my $kind = between(1, $depth > 4 ? 4 : 8);

	return pick(qw(null true false)) if $kind == 1;
	return chance(70) ? between(-1000, 1000) : pick(@numbers) if $kind == 2;
	return string() if $kind <= 4;
	return '[' . join(',', map { space() . value($depth + 1) . space() } 1 .. between(0, 4)) . ']' if $kind <= 6;
	return '{' . join(',', map { space() . string() . space() . ':' . space() . value($depth + 1) } 1 .. between(0, 4)) . '}';
}

# hostile_json returns a JSON text, or a damaged one.
sub hostile_json
{
	my $text = space() . value(0) . space();

	return $text unless chance(12);
	substr $text, int rand length $text, between(0, 2), pick('', ',', '}', ']', '"', ':', '{', "\x00", 'nul', "\\", "\xc3");
	return $text;
}

# big_json returns SQL for a deep or long JSON text, and whether it has at most 10,000
# levels, or its length in bytes.
sub big_json
{
	my ($bytes) = @_;
	my $deep = pick(100, 3000, 10_000);

	return pick(
		"(repeat('[', $deep) || repeat(']', $deep))",
		"(repeat('{\"a\":', $deep) || '1' || repeat('}', $deep))",
		"(repeat('[', $deep))",
		"('\"' || repeat('x', $bytes - 2) || '\"')",
		"('[' || repeat('1,', $bytes / 2 - 1) || '1]')",
		"('\"' || repeat(E'\\\\u00e9', $bytes / 6) || '\"')",
		"(repeat(' ', $bytes - 2) || '{}')");
}

1;
