# 019_clock.pl
#
# Proves that leases and retention hold on to what they promise when the clock of
# the server is set: forward past the end of a lease, it is over; back before its
# start, it is over as well, since nobody can say how long it has run; and in either
# case fencing, not the clock, decides who may finish: an owner who was taken over
# may not, one who was not may.  A clock that is set back in between makes a lease
# longer, and an outcome is remembered for longer, never for less.
#
# The server runs with test/clock/clock.c, which reads from a file by how much its
# clock is off.  Nobody sleeps here: hours pass in no time.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clock = PostgreSQL::Test::Utils::tempdir . '/clock';
my $library = "$clock.so";
system_or_bail('cc', '-shared', '-fPIC', '-o', $library, "$ENV{TESTDIR}/../clock/clock.c");
append_to_file($clock, pack 'q2', 0, 0);

# write_clock writes the two numbers of the server's clock, in place.
sub write_clock
{
	my ($offset, $standstill) = @_;
	open my $file, '+<:raw', $clock or die "$clock: $!";
	syswrite($file, pack 'q2', $offset, $standstill) == 16 or die "$clock: $!";
	close $file;
	return;
}

# set_clock sets the server's clock, by so many seconds from the right time.
sub set_clock
{
	my ($seconds) = @_;
	write_clock($seconds, 0);
	return;
}

# stop_clock makes the server's clock stand, so many seconds after a midnight.
sub stop_clock
{
	my ($seconds) = @_;
	write_clock(0, 4_102_444_800 + $seconds);    # 2100-01-01
	return;
}

set_clock(0);
my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->append_conf('postgresql.conf', "autovacuum = off\n");
{
	# Only the server is faked, not the programs that talk to it.
	local %ENV = (%ENV,
		LD_PRELOAD => join(' ', grep { defined } $library, $ENV{LD_PRELOAD}),
		CLOCK_FILE => $clock);
	$node->start;
}
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency; CREATE TABLE charge (key text, by text)');

my ($minute, $hour, $day) = (60, 3600, 86_400);

# sql runs SQL and returns what it says.
sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# claims returns the outcome of a claim with a lease, its attempt, and its token.
sub claims
{
	my ($key, $more) = @_;
	$more //= '';
	my ($outcome, $attempt, $token) = split /\|/,
	  sql(qq{SELECT outcome, attempt, token FROM idempotency.try_claim('c', '$key', lease => '1 hour'$more)});
	return (join(' ', grep { defined } $outcome, $attempt), $token);
}

# charges tries to finish with a token, in one transaction with a business write;
# returns who has charged, in the end.
sub charges
{
	my ($key, $by, $token) = @_;
	my ($rc, $stdout, $stderr) = $node->psql('postgres', qq{BEGIN; INSERT INTO charge VALUES ('$key', '$by');
		SELECT idempotency.complete('c', '$key', '"by $by"', token => $token); COMMIT}, extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	my $refused = $stderr =~ /ERROR:  (\w+)/ ? "$1: " : '';
	return $refused . (sql(qq{SELECT string_agg(by, ' ') FROM charge WHERE key = '$key'}) || 'nobody');
}

# state_of returns what the view says of a key.
sub state_of
{
	my ($key) = @_;
	return sql("SELECT state FROM idempotency.keys WHERE key = '$key'");
}

# ----------------------------------------------------------------
# The clock itself
# ----------------------------------------------------------------

my $session = open_session($node);
foreach my $off (0, $day, -$day, 0)
{
	set_clock($off);
	my $real = time;
	foreach my $now ($session->query_safe('SELECT extract(epoch FROM clock_timestamp())'), sql('SELECT extract(epoch FROM clock_timestamp())'))
	{
		cmp_ok(abs($now - $real - $off), '<', $minute, "the server's clock is off by $off s, in old sessions and new");
	}
}
cmp_ok(sql('SELECT extract(epoch FROM clock_timestamp()) FROM pg_sleep(0.1)') - time, '<', $minute, 'and sleeps are as long as ever');

# ----------------------------------------------------------------
# Forward
# ----------------------------------------------------------------

my ($outcome, $owner, $next);

($outcome, $owner) = claims('forward');
is($outcome, 'claimed 1', 'forward: claimed');
set_clock(59 * $minute);
is((claims('forward'))[0], 'in_progress 1', 'forward, but not past the end: the lease goes on');
set_clock(61 * $minute);
is(state_of('forward'), 'abandoned', 'forward past the end: it is over');
($outcome, $next) = claims('forward');
is($outcome, 'taken_over 2', 'and taken over');
cmp_ok($next, '>', $owner, 'with a greater token');
fails_with($node, "SELECT idempotency.renew('c', 'forward', $owner, '1 hour')", 'IK410', 'no heartbeat for the former owner');
is(charges('forward', 'owner', $owner), 'IK410: nobody', 'nor may he finish');
set_clock(0);
is(charges('forward', 'owner', $owner), 'IK410: nobody', 'nor when the clock is right again');
is((claims('forward'))[0], 'taken_over 3', 'though then the new lease has not begun yet');
set_clock(61 * $minute);
is(charges('forward', 'next', $next), 'IK410: nobody', 'whose owner may not finish then, either');

# An owner who was not taken over.
set_clock(0);
($outcome, $owner) = claims('late');
set_clock(2 * $hour);
is(charges('late', 'owner', $owner), 'owner', 'an owner who only is late may finish');
is(sql(q{SELECT outcome, response, expires_at > clock_timestamp() + interval '23 hours' FROM idempotency.claim('c', 'late')}),
	'replayed|"by owner"|t', 'and is replayed for as long as others');
set_clock(0);
($outcome, $owner) = claims('renewed');
set_clock(2 * $hour);
is(sql("SELECT idempotency.renew('c', 'renewed', $owner, '1 hour') - clock_timestamp() BETWEEN '59 min' AND '1 hour'"), 't',
	'an owner who only is late may renew: from now on');
is((claims('renewed'))[0], 'in_progress 1', 'and has his lease again');
set_clock(2 * $hour + 59 * $minute);
is((claims('renewed'))[0], 'in_progress 1', 'for an hour');
set_clock(3 * $hour + $minute);
is((claims('renewed'))[0], 'taken_over 2', 'and no longer');

# Past lease and retention: as if it had never been.
set_clock(0);
($outcome, $owner) = claims('forgotten', q{, retention => '2 hours'});
set_clock(3 * $hour + $minute);
is(state_of('forgotten'), 'expired', 'forward past the retention: a zombie is forgotten');
is(charges('forgotten', 'owner', $owner), 'IK410: nobody', 'and its owner has lost it');
is(sql(q{SELECT idempotency.peek('c', 'forgotten') IS NULL}), 't', 'there is nothing to look at');
set_clock($minute);
is((claims('forgotten'))[0], 'in_progress 1', 'unless the clock was wrong: then it is there again');
set_clock(4 * $hour);
($outcome, $next) = claims('forgotten');
is($outcome, 'claimed 1', 'forward: claimed as the first');
cmp_ok($next, '>', $owner, 'but with a greater token');
is(charges('forgotten', 'owner', $owner), 'IK410: nobody', 'the former owner may not finish');
is(charges('forgotten', 'next', $next), 'next', 'the new one may');

# ----------------------------------------------------------------
# Back
# ----------------------------------------------------------------

set_clock($day);
($outcome, $owner) = claims('back');
sql("SELECT idempotency.checkpoint('c', 'back', $owner, 'here', '[ 1 ]')");
set_clock($day - 10);
is(state_of('back'), 'abandoned', 'back before the start of the lease: it is over');
($outcome, $next) = claims('back');
is($outcome, 'taken_over 2', 'and taken over');
cmp_ok($next, '>', $owner, 'with a greater token');
is(sql(q{SELECT recovery_point FROM idempotency.key WHERE key::text = 'back'}), 'here', 'at the checkpoint');
is(charges('back', 'owner', $owner), 'IK410: nobody', 'the former owner may not finish');
set_clock($day);
is(charges('back', 'owner', $owner), 'IK410: nobody', 'nor when the clock is right again');
is((claims('back'))[0], 'in_progress 2', 'the lease of the new one goes on');
is(charges('back', 'next', $next), 'next', 'and he may finish');

# An owner who was not taken over.
($outcome, $owner) = claims('stays');
set_clock(0);
is(charges('stays', 'owner', $owner), 'owner', 'back: an owner who was not taken over may finish');
set_clock($day);
($outcome, $owner) = claims('stays and renews');
set_clock(0);
is(sql("SELECT idempotency.renew('c', 'stays and renews', $owner, '1 hour') - clock_timestamp() BETWEEN '59 min' AND '1 hour'"), 't',
	'back: an owner who was not taken over may renew: from now on');
is((claims('stays and renews'))[0], 'in_progress 1', 'and has his lease again');
set_clock(61 * $minute);
is((claims('stays and renews'))[0], 'taken_over 2', 'for an hour and no longer');

# Back, but not so far.
set_clock($day);
($outcome, $owner) = claims('not so far');
set_clock($day + 50 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'the lease has run for a while');
set_clock($day + 10 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'back, but not before its start: it goes on');
set_clock($day + 59 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'till its end');
set_clock($day + 61 * $minute);
is((claims('not so far'))[0], 'taken_over 2', 'and no longer');

# ----------------------------------------------------------------
# In the middle of a transaction, and of a wait
# ----------------------------------------------------------------

set_clock(0);
($outcome, $owner) = claims('within');
$session->query_safe('BEGIN; SELECT now()');
set_clock(2 * $hour);
is($session->query_safe(q{SELECT outcome, attempt FROM idempotency.claim('c', 'within', lease => '1 hour')}), 'taken_over|2',
	'a transaction that began before the end of a lease takes over after it');
is($session->query_safe(q{SELECT leased_until > now() + interval '2 hours' FROM idempotency.key WHERE key::text = 'within'; COMMIT}), 't',
	'and its own lease begins now, not with it');
is(charges('within', 'owner', $owner), 'IK410: nobody', 'the former owner may not finish');

set_clock($day);
$session->query_safe(q{BEGIN; SELECT idempotency.claim('c', 'committed late', lease => '1 hour'); SELECT idempotency.claim('c', 'short', retention => '1 hour')});
set_clock($day - $hour);
is($session->query_safe(q{SELECT idempotency.complete('c', 'short', '1'); COMMIT}), '1', 'a transaction goes on when the clock is set back');
is((claims('committed late'))[0], 'taken_over 2', 'and its lease counts as over');
is(sql(q{SELECT expires_at - clock_timestamp() BETWEEN '59 min' AND '1 hour' FROM idempotency.claim('c', 'short')}), 't',
	'an outcome is remembered from when it was stored');

foreach my $jump ([ 'forward', 0, 2 * $hour ], [ 'back', $day, 0 ])
{
	my ($which, $from, $to) = @$jump;
	set_clock($from);
	($outcome, $owner) = claims("waited for, $which");
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$session->query_until(qr/begins/, "\\echo begins\nSELECT outcome, attempt FROM idempotency.claim('c', 'waited for, $which', lease => '1 hour', wait => '100 days');\n");
	$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") or die 'nobody waits';
	set_clock($to);
	like($session->query_safe(q{\echo over}), qr/^taken_over\|2$/m, "who waits for a lease notices that the clock is set $which");
	is(charges("waited for, $which", 'owner', $owner), 'IK410: nobody', 'and its former owner may not finish');
}

# How long somebody waits is not what the clock says.
foreach my $jump ([ 'forward', $minute, 40 * $minute ], [ 'back', 50 * $minute, 10 * $minute ])
{
	my ($which, $from, $to) = @$jump;
	set_clock(0);
	claims("waited in vain, $which");
	set_clock($from);
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	my $began = time;
	$session->query_until(qr/begins/, "\\echo begins\nSELECT outcome, attempt FROM idempotency.try_claim('c', 'waited in vain, $which', lease => '1 hour', wait => '3 s');\n");
	$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") or die 'nobody waits';
	set_clock($to);
	like($session->query_safe(q{\echo over}), qr/^in_progress\|1$/m, "who waits in vain is told so when the clock is set $which");
	my $took = time - $began;
	ok($took >= 2 && $took < $minute, 'and in due time') or diag("it took $took s");
}

# ----------------------------------------------------------------
# Completers and the reaper
# ----------------------------------------------------------------

set_clock($day);
claims($_) foreach 'left 1', 'left 2';
my $abandoned = q{SELECT string_agg(a.key, ', ' ORDER BY a.key) FROM idempotency.claim_abandoned('c', '1 hour', 100) AS a WHERE a.key LIKE 'left%'};
is(sql($abandoned), '', 'a completer gets no lease that runs');
set_clock($day + 2 * $hour);
is(sql($abandoned), 'left 1, left 2', 'forward: he gets those that are over');
is(sql($abandoned), '', 'once');
set_clock($day);
is(sql($abandoned), 'left 1, left 2', 'back: and his own, whose lease has not begun');
claims('left 3');
set_clock($day + $minute);
is(sql(q{SELECT idempotency.reap(1000); SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}) =~ s/.*\n//sr, 3,
	'the reaper removes no lease that runs');
set_clock($day + 2 * $hour);
is(sql(q{SELECT idempotency.reap(1000); SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}) =~ s/.*\n//sr, 3,
	'nor one that is over, while it is remembered');
is(sql(q{SELECT count(*) FROM idempotency.zombies WHERE key LIKE 'left%'}), 3, 'forward: they are zombies');
set_clock(3 * $day);
is(sql(q{SELECT idempotency.reap(1000) >= 3; SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}), "t\n0",
	'forward past the retention: they are reaped');

# ----------------------------------------------------------------
# Retention
# ----------------------------------------------------------------

set_clock(0);
sql(q{BEGIN; SELECT idempotency.claim('c', 'kept', retention => '1 hour'); SELECT idempotency.complete('c', 'kept', '"kept"'); COMMIT;
	SELECT idempotency.once('c', 'message', '1 hour'), idempotency.once_many('c', ARRAY['batch'], '1 hour')});
my $kept = q{SELECT outcome, response FROM idempotency.try_claim('c', 'kept'); ROLLBACK};
my $seen = q{BEGIN; SELECT idempotency.once('c', 'message'), (SELECT count(*) FROM idempotency.once_many('c', ARRAY['batch'])); ROLLBACK};
set_clock(59 * $minute);
is(sql("BEGIN; $kept"), 'replayed|"kept"', 'an outcome is remembered');
is(sql($seen), 'f|0', 'and so is a message');
set_clock(61 * $minute);
is(sql("BEGIN; $kept"), 'claimed|', 'forward past the retention: an outcome counts as absent');
is(sql($seen), 't|1', 'and so does a message');
set_clock(-30 * $day);
is(sql("BEGIN; $kept"), 'replayed|"kept"', 'back: an outcome is remembered for longer');
is(sql($seen), 'f|0', 'and so is a message');

# ----------------------------------------------------------------
# The very moment
# ----------------------------------------------------------------

# A lease still runs at the moment of its end, and an outcome is remembered up to that
# of its own, and no longer.
stop_clock(0);
is(sql('SELECT clock_timestamp()'), sql('SELECT clock_timestamp()'), 'the clock stands');
is((claims('moment'))[0], 'claimed 1', 'a lease begins');
sql(q{SELECT idempotency.once('c', 'until then', '1 hour'); SELECT idempotency.subscribe('s', ARRAY['*']); SELECT idempotency.publish('t', '1')});
my $fetch = q{SELECT count(*) FROM idempotency.fetch('s', lease => '1 hour')};
is(sql($fetch), 1, 'and so does that of a batch');
stop_clock($hour - 1);
is(sql(q{SELECT idempotency.once('c', 'until then', '1 hour')}), 'f', 'a second before its end an outcome is remembered');
stop_clock($hour);
is((claims('moment'))[0], 'in_progress 1', 'at the moment of its end a lease runs');
is(sql($fetch), 0, 'and so does that of a batch');
is(sql(q{SELECT idempotency.once('c', 'until then', '1 hour')}), 't', 'an outcome does not');
stop_clock($hour + 1);
is((claims('moment'))[0], 'taken_over 2', 'a second later the lease is over');
is(sql($fetch), 1, 'and so is that of the batch');

# Whatever the clock said: no token came twice.
is(sql(q{SELECT count(*), count(DISTINCT token) FROM idempotency.key WHERE token IS NOT NULL}) =~ /^(\d+)\|\1$/, 1, 'no two leases have one token');

$session->quit;
set_clock(0);
$node->stop;
done_testing();
