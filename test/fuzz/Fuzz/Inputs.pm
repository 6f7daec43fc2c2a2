# Fuzz::Inputs
#
# Hostile inputs with a known result. The rules of the documentation or the server's own
# types predict for each input whether it is accepted, or the error. Accepted input must
# be returned byte for byte, and an error must leave every row unchanged and hold no
# lock.

package Fuzz::Inputs;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;
use Fuzz::Watch;
use POSIX qw(ceil);

# One character of UTF-8 that PostgreSQL accepts.
my $character = qr/[\x01-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]|
	\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2}/x;

# ----------------------------------------------------------------
# Expected results
# ----------------------------------------------------------------

# no_text returns the SQLSTATE for a literal that is not valid in the encoding, or ''.
sub no_text
{
	my ($self, $bytes) = @_;

	return '22021' if $bytes =~ /\x00/ || ($self->{encoding} eq 'UTF8' && $bytes !~ /^$character*\z/);
	return '';
}

# is_composite returns whether a name is the text of an object, or a key is that of an
# array, which is refused.
sub is_composite
{
	my ($name, $is_key) = @_;
	my $depth = 0;

	return 1 if $name =~ /^\[object .*\]\z/s || $name eq '{}';
	return 0 if !$is_key || $name !~ /^[\{\[]/ || $name =~ /^\{[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\}\z/i || $name =~ /^\{ *"([^"\\]|\\.)*" *:/s;
	while ($name =~ /\\.|"(?:[^"\\]|\\.)*(?:"|\z)|([{}])/gs)
	{
		next if !defined $1;
		$depth += $1 eq '{' ? 1 : -1;
		return pos $name == length $name if $1 eq '}' && $depth == 0;
	}
	return 0;
}

# refusal returns the SQLSTATE that refuses a name, or ''.
sub refusal
{
	my ($self, $bytes) = @_;
	my $utf8 = $self->{encoding} eq 'UTF8';
	my $state = no_text($self, $bytes);

	return $state if $state;
	my $characters = $utf8 ? () = $bytes =~ /$character/g : length $bytes;
	return 'IK400' if $characters == 0 || $characters > 255 || $bytes =~ /[\x01-\x1f\x7f]/ || ($utf8 && $bytes =~ /\xc2[\x80-\x9f]/);
	return 'IK400' if is_composite($bytes, 0);
	return 'IK400' if $self->{encoding} eq 'LATIN1' && $bytes =~ /[\x80-\x9f]/;
	return '';
}

# first returns the first refusal of several names: invalid text is refused before any
# function is called.
sub first
{
	my ($self, @names) = @_;
	my @refusals = grep { $_ } map { refusal($self, $_) } @names;

	return (grep { $_ eq '22021' } @refusals)[0] // $refusals[0] // '';
}

# state_of returns the SQLSTATE of a query that uses the server's own types, or ''.
sub state_of
{
	my ($self, $query) = @_;
	my ($state) = $self->{session}->run($query);

	return $state eq '00000' ? '' : $state;
}

# refused makes a call that must fail with that SQLSTATE (or one of a|b), alone or
# behind a savepoint of a transaction that then continues. The call must change nothing.
# With a token the transaction continues too but cannot commit, unless the server
# refuses an argument before the call.
sub refused
{
	my ($self, $call, $state) = @_;
	my ($session, $watch) = @$self{qw(session watch)};
	my $before = $watch->digest;
	my @around = ("BEGIN", "SELECT idempotency.claim('continues', 'k')", 'SAVEPOINT s');
	my @after = ('ROLLBACK TO s', "SELECT idempotency.complete('continues', 'k')", 'COMMIT', "SELECT idempotency.forget('continues', 'k')");

	@around = @after = () if chance(80);
	my @states = $session->run(@around, "SELECT * FROM idempotency.$call", @after);
	my ($got) = splice @states, scalar @around, 1;
	die "$got instead of $state: " . $session->message . ": $call\n" if $got !~ /^(?:$state)$/;
	if (@after && $call =~ /^(?:renew|checkpoint)\(/ && $got !~ /^22(?:007|015|021|P02)/)
	{
		my ($commit) = splice @states, -2, 1;
		die "$commit at commit, after a failed call with a token: $call\n" if $commit ne 'IK410';
	}
	die "the transaction did not continue (@states): $call\n" if grep { $_ ne '00000' } @states;

	my $now = $watch->digest;
	my $locks = $watch->locks;
	die "rows have changed: $before, then $now: $call\n" if $now ne $before;
	die "locks are left: $locks: $call\n" if $locks ne '';
	$self->{refused}++;
	return;
}

# answers makes a query with a known result.
sub answers
{
	my ($self, $query, $expected) = @_;
	my $got = $self->{session}->tell($query);

	die "'$got' instead of '$expected': $query\n" if $got ne $expected;
	return;
}

sub hex_of
{
	my ($expression) = @_;
	return "encode(convert_to($expression, getdatabaseencoding()), 'hex')";
}

# ----------------------------------------------------------------
# Inputs
# ----------------------------------------------------------------

sub name
{
	return chance(55) ? hostile_bytes() : pick('tenant/', 'k') . between(1, 10_000);
}

# A scope and a key, in every function that takes them.
sub scope_and_key
{
	my ($self) = @_;
	my ($scope, $key) = (name(), name());
	my $state = first($self, $scope, $key) || (is_composite($key, 1) ? 'IK400' : '');
	my $both = literal($scope) . ', ' . literal($key);

	return refused($self, pick("claim($both)", "try_claim($both)", "claim($both, lease => '1 s')", "complete($both)", "fail($both, NULL, 400)",
		"release($both)", "renew($both, 1, '1 s')", "checkpoint($both, 1, 'p')", "run($both, '1', 'now()')", "peek($both)", "forget($both)",
		"once($both)", 'once_many(' . literal($scope) . ', ARRAY[' . literal($key) . '])'), $state) if $state;

	my $bytes = unpack 'H*', $key;
	my $found = '(SELECT ' . hex_of('key::text') . ' FROM idempotency.keys WHERE scope = ' . literal($scope) . ' AND key = ' . literal($key) . ')';
	$self->{session}->ok('BEGIN');
	answers($self, "SELECT outcome, " . hex_of('idempotency.current_key(' . literal($scope) . ')') . " FROM idempotency.claim($both)", "claimed|$bytes");
	answers($self, "SELECT idempotency.complete($both, '1')", '1');
	$self->{session}->ok('COMMIT');
	answers($self, "SELECT outcome, response, $found FROM idempotency.claim($both)", "replayed|1|$bytes");
	answers($self, "SELECT status, idempotency.once($both), idempotency.forget($both), idempotency.forget($both) FROM idempotency.peek($both)", '200|f|t|f');
	answers($self, "SELECT " . hex_of('o') . ' FROM idempotency.once_many(' . literal($scope) . ', ARRAY[' . literal($key) . ']) AS o', $bytes);
	answers($self, "SELECT idempotency.forget($both)", 't');
	return;
}

# The arguments of publish() and subscribe().
sub event
{
	my ($self) = @_;
	my ($topic, $aggregate, $type) = (name(), name(), name());
	my $state = first($self, $topic, $aggregate, $type);
	my $arguments = join ', ', literal($topic), "'1'", literal($aggregate), literal($type);

	return refused($self, "publish($arguments)", $state) if $state;

	my $pattern = literal($topic =~ s/([\\*])/\\$1/gr);
	my $expected = join '|', map { unpack 'H*', $_ } $topic, $aggregate, $type;
	# Doubling the text can exceed the limit of a pattern.
	return refused($self, "subscribe('s', ARRAY[$pattern])", 'IK400') if refusal($self, $topic =~ s/([\\*])/\\$1/gr);
	answers($self, "SELECT idempotency.subscribe('s', ARRAY[$pattern])", 't');
	$self->{session}->ok("SELECT idempotency.publish($arguments)", "SELECT idempotency.publish('another ' || left(" . literal($topic) . ", 200), '2')");
	answers($self, 'SELECT ' . join(', ', map { hex_of($_) } qw(topic aggregate_id type)) . q{ FROM idempotency.fetch('s')}, $expected);

	# An error text is stored unchanged.
	my $error = hostile_bytes();
	my $batch = q{(SELECT max(batch) FROM idempotency.position), (SELECT id FROM idempotency.outbox ORDER BY seq DESC OFFSET 1 LIMIT 1)};
	$state = no_text($self, $error);
	if ($state)
	{
		refused($self, "nack('s', $batch, " . literal($error) . ')', $state);
	}
	else
	{
		$self->{session}->ok("SELECT idempotency.nack('s', $batch, " . literal($error) . ')');
		answers($self, 'SELECT ' . hex_of('error') . ' FROM idempotency.parked', unpack 'H*', $error);
	}
	answers($self, q{SELECT idempotency.unsubscribe('s')}, 't');
	$self->{session}->ok('DELETE FROM idempotency.outbox');
	return;
}

# The name and the patterns of a subscription.
sub subscription
{
	my ($self) = @_;
	my ($name, $pattern) = (name(), name());
	my $state = first($self, $name, $pattern);
	my $call = 'subscribe(' . literal($name) . ', ARRAY[' . literal($pattern) . '])';

	$state = '22023' if $state eq '' && $pattern =~ /(\\*)\z/ && length($1) % 2;
	return refused($self, $call, $state) if $state;
	answers($self, "SELECT idempotency.$call", 't');
	answers($self, "SELECT idempotency.$call", 'f');
	answers($self, 'SELECT count(*) FROM idempotency.fetch(' . literal($name) . ')', '0');
	answers($self, 'SELECT ' . join(', ', map { hex_of($_) } 'subscription', 'topics[1]') . ' FROM idempotency.subscriptions', join '|',
		map { unpack 'H*', $_ } $name, $pattern);
	answers($self, 'SELECT idempotency.unsubscribe(' . literal($name) . ')', 't');
	return;
}

# A request and a response. The server's json and jsonb decide whether a text is JSON.
sub body
{
	my ($self) = @_;
	my $text = chance(4) ? big_json(pick(10_000, 100_000, 1_048_570)) : literal(hostile_json());
	my $session = $self->{session};
	my $state = state_of($self, "SELECT ($text)::json");

	if ($state)
	{
		refused($self, pick("claim('b', 'k', $text)", "publish('t', $text)", "fingerprint($text)"), $state);
		return refused($self, "complete('b', 'k', $text)", $state);
	}
	$session->ok('BEGIN', "SELECT idempotency.claim('b', 'k')", "SELECT idempotency.complete('b', 'k', $text)", 'COMMIT');
	answers($self, "SELECT md5(response::text) = md5($text) FROM idempotency.claim('b', 'k')", 't');
	$session->ok(q{SELECT idempotency.forget('b', 'k')});

	# at most 400 digits in a number, as jsonb prints it
	$state = state_of($self, "SELECT ($text)::jsonb") || state_of($self, qq{SELECT exp(length(n::text) * 1e3::float8) FROM jsonb_path_query(($text)::jsonb, 'strict \$.** ? (\@.type() == "number")') AS n
		WHERE length(translate(n::text, '-.', '')) > 400});
	return refused($self, "claim('b', 'k', $text)", $state) if $state;
	answers($self, "SELECT c::jsonb = ($text)::jsonb, idempotency.canonical(c) = c, idempotency.fingerprint($text) = idempotency.fingerprint(($text)::jsonb)
		FROM idempotency.canonical($text) AS c", 't|t|t');
	answers($self, "SELECT idempotency.fingerprint($text) = sha256(" .
		  ($self->{encoding} eq 'SQL_ASCII' ? "decode(" . hex_of('c') . ", 'hex')" : "convert_to(c, 'UTF8')") . ") FROM idempotency.canonical($text) AS c", 't');
	$session->ok('BEGIN', "SELECT idempotency.claim('b', 'k', $text)", q{SELECT idempotency.complete('b', 'k')}, 'COMMIT');
	answers($self, "SELECT a.outcome, b.outcome FROM idempotency.try_claim('b', 'k', ($text)::jsonb) AS a, idempotency.try_claim('b', 'k',
		'[\"another\"]') AS b", 'replayed|mismatched');
	$session->ok(q{SELECT idempotency.forget('b', 'k')});
	return;
}

my @units = ('microseconds', 'ms', 's', 'min', 'hours', 'days', 'weeks', 'mons', 'years', 'centuries');

sub interval
{
	return pick('0', '1 us', '-1 us', '-1 s', '1 mon -30 days -1 s', '-2147483648 mons', '2147483647 mons', '2147483647 days', '-2147483648 days',
		'9223372036854.775807 s',
		'-9223372036854.775808 s', '292000 years', '294276 years', '178000000 years', 'infinity', '-infinity', 'NaN', '1 mon -31 days',
			'-1 mon 31 days', '2147483647.5 s') if chance(50);
	return join ' ', map { int((rand() - 0.4) * 10**between(0, 12)) . ' ' . pick(@units) } 1 .. between(1, 3);
}

# Leases, waits and retentions. The server's own arithmetic compares the times.
sub length_of_time
{
	my ($self) = @_;
	my $interval = literal(interval()) . '::interval';
	my $state = state_of($self, "SELECT $interval");

	return refused($self, pick("claim('t', 'k', lease => $interval)", "claim('t', 'k', wait => $interval)", "once('t', 'k', $interval)"), $state) if $state;

	my ($negative, $forever) = split /\|/, $self->{session}->tell("SELECT $interval < '0', $interval = '-1 second'");
	my $later = state_of($self, "SELECT clock_timestamp() + $interval");
	my $wrong = $later && $negative eq 'f' ? $later : '22008|22023';
	my $positive = $later ? 'f' : $self->{session}->tell("SELECT now() + $interval > now() FROM (SELECT pg_sleep(0)) AS s");
	my $finite = $later ? 'f' : $self->{session}->tell("SELECT isfinite(now() + $interval)");

	# Lengths that nobody means, such as nanoseconds as a bare number
	my ($long, $endless) = split /\|/, $self->{session}->tell("SELECT extract(epoch FROM $interval) > 24 * 86400,
		isfinite($interval) AND extract(epoch FROM $interval) > 36525 * 86400.0");

	if ($negative eq 't' || $long eq 't')
	{
		refused($self, pick("claim('t', 'k', wait => $interval)", "try_claim('t', 'k', wait => $interval)"), '22023');
	}
	else
	{
		answers($self, "BEGIN; SELECT outcome FROM idempotency.claim('t', 'k', wait => $interval); ROLLBACK", 'claimed');
	}

	if ($later || $positive eq 'f' || $finite eq 'f' || $long eq 't')
	{
		refused($self, pick("claim('t', 'k', lease => $interval)", "claim_abandoned('t', $interval)"), $long eq 't' ? '22023' : $wrong);
	}
	else
	{
		answers($self, "SELECT retry_after IS NULL, token > 0 FROM idempotency.claim('t', 'k', lease => $interval)", 't|t');
		answers($self, "SELECT leased_until = leased_at + $interval FROM idempotency.key WHERE scope = 't'", 't');
		$self->{session}->ok(q{SELECT idempotency.forget('t', 'k')});
	}

	return refused($self, pick("claim('t', 'k', retention => $interval)", "once('t', 'k', $interval)", "once_many('t', ARRAY['k'], $interval)"), $endless eq 't' ? '22023' : $wrong)
	  if $forever eq 'f' && ($later || $positive eq 'f' || $endless eq 't');
	answers($self, "SELECT idempotency.once('t', 'k', $interval)", 't');
	answers($self, "SELECT " . ($forever eq 't' ? 'NOT isfinite(expires_at)' : "abs(extract(epoch FROM created_at + $interval) - extract(epoch
		FROM expires_at)) < 60 OR NOT isfinite(expires_at)") .
		  q{ FROM idempotency.key WHERE scope = 't'}, 't');
	$self->{session}->ok(q{DELETE FROM idempotency.key WHERE scope = 't'});
	return;
}

# Numbers: a status, a maximum, and a number of attempts.
sub number
{
	my ($self) = @_;
	my $number = chance(50) ? between(80, 620) : pick(0, 1, -1, 99, 100, 599, 600, 32768, 65736, 2147483647, -2147483648, 2147483648, '1e3',
		"'x'", '200.4', '4294967496');
	my $state = state_of($self, "SELECT ($number)::integer");
	my $fits = $number =~ /^-?\d+$/ && !$state;

	# A number that is not an integer matches no function, or is out of range.
	return refused($self, "complete('n', 'k', '1', $number)", $number eq "'x'" ? '22P02' : '42883') unless $fits;
	refused($self, pick("fetch('none', $number)", "claim_abandoned('n', '1 s', $number)", "subscribe('n', '{*}', max_attempts => $number)"), '22023') if $number < 1;
	if ($number < 100 || $number > 599)
	{
		$self->{session}->ok('BEGIN', q{SELECT idempotency.claim('n', 'k')}, 'SAVEPOINT s');
		foreach my $call ("complete('n', 'k', '1', $number)", "fail('n', 'k', '1', $number)")
		{
			my ($got) = $self->{session}->run("SELECT idempotency.$call", 'ROLLBACK TO s');
			die "$got instead of 22023: $call\n" if $got ne '22023';
		}
		$self->{session}->ok('ROLLBACK');
		$self->{refused}++;
		return;
	}
	my $end = pick('complete', 'fail');
	$self->{session}->ok('BEGIN', q{SELECT idempotency.claim('n', 'k')}, "SELECT idempotency.$end('n', 'k', '1', $number)", 'COMMIT');
	answers($self, q{SELECT status, failed FROM idempotency.peek('n', 'k')}, "$number|" . ($end eq 'fail' ? 't' : 'f'));
	$self->{session}->ok(q{SELECT idempotency.forget('n', 'k')});
	return;
}

# Headers of an outcome and of an event: any object, and nothing else.
sub headers
{
	my ($self) = @_;
	my $text = literal(hostile_json());
	my $session = $self->{session};
	my $state = state_of($self, "SELECT ($text)::json");

	$state ||= '22023' if state_of($self, "SELECT 1 / (json_typeof($text) = 'object')::int");
	return refused($self, "publish('h', '1', headers => $text)", $state) if $state;
	$session->ok('BEGIN', q{SELECT idempotency.claim('h', 'k')}, 'SAVEPOINT s');
	foreach my $wrong ('1', '[{}]', '"{}"', 'null')
	{
		my ($got) = $session->run("SELECT idempotency.complete('h', 'k', '1', 200, '$wrong')", 'ROLLBACK TO s');
		die "$got instead of 22023 for the headers $wrong\n" if $got ne '22023';
	}
	$session->ok("SELECT idempotency.complete('h', 'k', '1', 200, $text)", 'COMMIT', "SELECT idempotency.publish('h', '1', headers => $text)");
	answers($self, "SELECT headers::text = $text, (SELECT headers::text = $text FROM idempotency.outbox) FROM idempotency.peek('h', 'k')", 't|t');
	$session->ok(q{SELECT idempotency.forget('h', 'k')}, 'DELETE FROM idempotency.outbox');
	return;
}

# A header: quoted according to the rules, it is returned; anything else is refused or
# is a valid header anyway.
sub header
{
	my ($self) = @_;
	my $key = join '', map { chr between(32, 126) } 1 .. between(1, 40);
	my $bytes = hostile_bytes();
	my $state = no_text($self, $bytes) || ($bytes =~ /^ *"(?:[ !#-\[\]-~]|\\["\\])+"/ ? '' : 'IK400');

	answers($self, 'SELECT ' . hex_of('idempotency.parse_header(' . literal(' "' . $key =~ s/(["\\])/\\$1/gr . '";a=1 ') . ')'), unpack 'H*', $key) if $key !~ /^ *$/;
	return refused($self, 'parse_header(' . literal($bytes) . ')', $state) if $state;
	return;
}

# Input that is too large for most programs.
sub size
{
	my ($self) = @_;
	my $megabyte = 1_048_576;
	my $bytes = pick($megabyte, 10 * $megabyte);
	my $deep = pick(q{(repeat('[', 10000) || repeat(']', 10000))}, q{(repeat('{"a":', 10000) || '1' || repeat('}', 10000))});

	refused($self, pick("claim(repeat('x', $bytes), 'k')", "claim('s', repeat('x', $bytes))", "once_many('s', ARRAY['k', repeat('x',
		$bytes)])", "publish(repeat('x', $bytes), '1')",
		"subscribe('s', ARRAY[repeat('*', $bytes)])", "parse_header(repeat('x', $bytes))"), 'IK400');
	refused($self, pick("claim('s', 'k', repeat('[', 1000000))", "fingerprint(repeat('{\"a\":', 1000000))"), '54001');
	$self->{session}->ok('BEGIN', "SELECT idempotency.claim('s', 'k', $deep)", "SELECT idempotency.complete('s', 'k', $deep)", 'COMMIT');
	answers($self, "SELECT outcome, md5(response::text) = md5($deep) FROM idempotency.claim('s', 'k', $deep)", 'replayed|t');
	$self->{session}->ok(q{SELECT idempotency.forget('s', 'k')});
	return;
}

# 100 MB, once per database; in a short run only for the first.
sub hundred_megabytes
{
	my ($self) = @_;
	my $body = q{('"' || repeat('x', 104857598) || '"')};
	my ($session) = $self->{session};

	$session->ok('BEGIN', q{SELECT idempotency.claim('h', 'k')}, 'SAVEPOINT s');
	my ($state) = $session->run("SELECT idempotency.complete('h', 'k', $body)");
	die "$state instead of 54000 for 100 MB\n" if $state ne '54000';
	$session->ok('ROLLBACK TO s', q{SET LOCAL idempotency.max_response_size = '200MB'}, "SELECT idempotency.complete('h', 'k', $body)", 'COMMIT');
	answers($self, "SELECT md5(response::text) = md5($body) FROM idempotency.claim('h', 'k')", 't');
	answers($self, q{SELECT idempotency.forget('h', 'k')}, 't');
	return;
}

my @kinds = ((\&scope_and_key) x 8, (\&event) x 3, (\&subscription) x 2, (\&body) x 6, (\&length_of_time) x 5, (\&number) x 2, (\&header) x 2, (\&headers) x 2);

# play passes that many inputs to databases in three encodings, and returns a summary
# line. Dies with the error.
sub play
{
	my ($database, $count) = @_;
	my ($given, $refused) = (0, 0);
	my @encodings = qw(UTF8 LATIN1 SQL_ASCII);

	foreach my $encoding (@encodings)
	{
		my $session = $database->($encoding);
		my $self = { session => $session, encoding => $encoding, refused => 0 };

		$session->ok('CREATE EXTENSION idempotency', 'SET log_min_messages = fatal', 'SET log_min_error_statement = panic');
		$self->{watch} = Fuzz::Watch->new($session);
		my $untouched = $self->{watch}->digest;
		foreach my $i (1 .. ceil($count / @encodings))
		{
			my $kind = $i % 100 == 0 ? \&size : $i == 1 && ($count >= 3000 || $encoding eq $encodings[0]) ? \&hundred_megabytes : pick(@kinds);
			eval { $kind->($self); 1 } or die "input $i in $encoding: $@";
			$given++;
		}
		die "rows are left: " . $self->{watch}->digest . "\n" if $self->{watch}->digest ne $untouched;
		$refused += $self->{refused};
		$session->quit;
	}
	return "$given inputs in @encodings, $refused errors, all of them those that were expected, and no row changed by any";
}

1;
