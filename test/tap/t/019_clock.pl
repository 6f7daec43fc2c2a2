# 019_clock.pl
#
# Proves that leases and retention are safe when the server's clock changes. Set forward
# past the end of a lease, the lease is over. Set back before its start, it is over too,
# because its age is unknown. Fencing, not the clock, decides who can finish: an owner
# can finish until another owner takes over. A clock that is set back makes leases and
# retention longer, never shorter.
#
# The server runs with test/tap/clock.c, which reads the clock's offset from a file.
# The test does not sleep: the clock jumps by hours.

use strict;
use warnings FATAL => 'all';

use ClockTest;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# stop_clock stops the server's clock, so many seconds after a midnight.
sub stop_clock
{
	my ($seconds) = @_;
	write_clock(0, 4_102_444_800 + $seconds);    # 2100-01-01
	return;
}

my $node = PostgreSQL::Test::Cluster->new('main');
$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$node->append_conf('postgresql.conf', qq{autovacuum = off
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = 0
});
start_with_clock($node);
$node->safe_psql('postgres', 'CREATE EXTENSION idempotency; CREATE TABLE charge (key text, by text)');

my ($minute, $hour, $day) = (60, 3600, 86_400);

# sql runs SQL and returns its result.
sub sql
{
	my ($sql) = @_;
	return $node->safe_psql('postgres', $sql);
}

# claims returns the outcome of a claim with a lease, the attempt, and the token.
sub claims
{
	my ($key, $more) = @_;
	$more //= '';
	my ($outcome, $attempt, $token) = split /\|/,
	  sql(qq{SELECT outcome, attempt, token FROM idempotency.try_claim('c', '$key', lease => '1 hour'$more)});
	return (join(' ', grep { defined } $outcome, $attempt), $token);
}

# charges tries to finish with a token, in one transaction with a business write.
# Returns the writers whose charges were committed.
sub charges
{
	my ($key, $by, $token) = @_;
	my ($rc, $stdout, $stderr) = $node->psql('postgres', qq{BEGIN; INSERT INTO charge VALUES ('$key', '$by');
		SELECT idempotency.complete('c', '$key', '"by $by"', token => $token); COMMIT}, extra_params => [ '-v', 'VERBOSITY=verbose' ]);
	my $refused = $stderr =~ /ERROR:  (\w+)/ ? "$1: " : '';
	return $refused . (sql(qq{SELECT string_agg(by, ' ') FROM charge WHERE key = '$key'}) || 'nothing');
}

# state_of returns the state of a key in the view.
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
cmp_ok(sql('SELECT extract(epoch FROM clock_timestamp()) FROM pg_sleep(0.1)') - time, '<', $minute, 'sleeps are not affected');

# ----------------------------------------------------------------
# Forward
# ----------------------------------------------------------------

my ($outcome, $owner, $next);

($outcome, $owner) = claims('forward');
is($outcome, 'claimed 1', 'forward: claimed');
set_clock(59 * $minute);
is((claims('forward'))[0], 'in_progress 1', 'forward, but not past the end: the lease is live');
set_clock(61 * $minute);
is(state_of('forward'), 'abandoned', 'forward past the end: the lease is over');
($outcome, $next) = claims('forward');
is($outcome, 'taken_over 2', 'forward past the end: taken over');
cmp_ok($next, '>', $owner, 'forward past the end: a greater token');
fails_with($node, "SELECT idempotency.renew('c', 'forward', $owner, '1 hour')", 'IK410', 'no heartbeat for the former owner');
is(charges('forward', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish');
set_clock(0);
is(charges('forward', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish after the clock is reset');
is((claims('forward'))[0], 'taken_over 3', 'the new lease starts in the future, so it counts as over');
set_clock(61 * $minute);
is(charges('forward', 'next', $next), 'IK410: nothing', 'the owner of that lease cannot finish either');

# An owner that was not taken over.
set_clock(0);
($outcome, $owner) = claims('late');
set_clock(2 * $hour);
is(charges('late', 'owner', $owner), 'owner', 'an owner whose lease expired can finish');
is(sql(q{SELECT outcome, response, expires_at > clock_timestamp() + interval '23 hours' FROM idempotency.claim('c', 'late')}),
	'replayed|"by owner"|t', 'its outcome has the normal retention');
set_clock(0);
($outcome, $owner) = claims('renewed');
set_clock(2 * $hour);
is(sql("SELECT lease_end - clock_timestamp() BETWEEN '59 min' AND '1 hour' FROM idempotency.renew('c', 'renewed', $owner, '1 hour') AS lease_end"), 't',
	'an owner whose lease expired can renew: from now on');
is((claims('renewed'))[0], 'in_progress 1', 'the renewed lease is live');
set_clock(2 * $hour + 59 * $minute);
is((claims('renewed'))[0], 'in_progress 1', 'the renewed lease is live for an hour');
set_clock(3 * $hour + $minute);
is((claims('renewed'))[0], 'taken_over 2', 'the renewed lease is over after an hour');

# Past lease and retention: as if the key had never been claimed.
set_clock(0);
($outcome, $owner) = claims('forgotten', q{, retention => '2 hours'});
set_clock(3 * $hour + $minute);
is(state_of('forgotten'), 'expired', 'forward past the retention: a zombie expires');
is(charges('forgotten', 'owner', $owner), 'IK410: nothing', 'the owner of an expired zombie cannot finish');
is(sql(q{SELECT idempotency.peek('c', 'forgotten') IS NULL}), 't', 'peek returns nothing');
set_clock($minute);
is((claims('forgotten'))[0], 'in_progress 1', 'with the clock reset the lease is live again');
set_clock(4 * $hour);
($outcome, $next) = claims('forgotten');
is($outcome, 'claimed 1', 'forward past the retention: claimed as a new key');
cmp_ok($next, '>', $owner, 'forward past the retention: a greater token');
is(charges('forgotten', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish');
is(charges('forgotten', 'next', $next), 'next', 'the new owner can finish');

# ----------------------------------------------------------------
# Back
# ----------------------------------------------------------------

set_clock($day);
($outcome, $owner) = claims('back');
sql("SELECT idempotency.checkpoint('c', 'back', $owner, 'here', '[ 1 ]')");
set_clock($day - 10);
is(state_of('back'), 'abandoned', 'back before the start of the lease: the lease is over');
($outcome, $next) = claims('back');
is($outcome, 'taken_over 2', 'back before the start: taken over');
cmp_ok($next, '>', $owner, 'back before the start: a greater token');
is(sql(q{SELECT recovery_point FROM idempotency.key WHERE key::text = 'back'}), 'here', 'back before the start: taken over at the checkpoint');
is(charges('back', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish');
set_clock($day);
is(charges('back', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish after the clock is reset');
is((claims('back'))[0], 'in_progress 2', 'the lease of the new owner is live');
is(charges('back', 'next', $next), 'next', 'the new owner can finish');

# An owner that was not taken over.
($outcome, $owner) = claims('stays');
set_clock(0);
is(charges('stays', 'owner', $owner), 'owner', 'back: an owner that was not taken over can finish');
set_clock($day);
($outcome, $owner) = claims('stays and renews');
set_clock(0);
is(sql("SELECT lease_end - clock_timestamp() BETWEEN '59 min' AND '1 hour' FROM idempotency.renew('c', 'stays and renews', $owner, '1 hour') AS lease_end"), 't',
	'back: an owner that was not taken over can renew: from now on');
is((claims('stays and renews'))[0], 'in_progress 1', 'the renewed lease is live');
set_clock(61 * $minute);
is((claims('stays and renews'))[0], 'taken_over 2', 'the renewed lease is over after an hour');

# Back, but not before the start of the lease.
set_clock($day);
($outcome, $owner) = claims('not so far');
set_clock($day + 50 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'the lease is live');
set_clock($day + 10 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'back, but not before its start: the lease is live');
set_clock($day + 59 * $minute);
is((claims('not so far'))[0], 'in_progress 1', 'the lease is live until its end');
set_clock($day + 61 * $minute);
is((claims('not so far'))[0], 'taken_over 2', 'the lease is over after its end');

# ----------------------------------------------------------------
# During a transaction, and during a wait
# ----------------------------------------------------------------

set_clock(0);
($outcome, $owner) = claims('within');
$session->query_safe('BEGIN; SELECT now()');
set_clock(2 * $hour);
is($session->query_safe(q{SELECT outcome, attempt FROM idempotency.claim('c', 'within', lease => '1 hour')}), 'taken_over|2',
	'a transaction that began before the end of a lease takes over after it');
is($session->query_safe(q{SELECT leased_until > now() + interval '2 hours' FROM idempotency.key WHERE key::text = 'within'; COMMIT}), 't',
	'the new lease starts at the takeover, not with the transaction');
is(charges('within', 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish');

set_clock($day);
$session->query_safe(q{BEGIN; SELECT idempotency.claim('c', 'committed late', lease => '1 hour'); SELECT idempotency.claim('c', 'short', retention => '1 hour')});
set_clock($day - $hour);
is($session->query_safe(q{SELECT idempotency.complete('c', 'short', '1'); COMMIT}), '1', 'a transaction continues when the clock is set back');
is((claims('committed late'))[0], 'taken_over 2', 'the lease of that transaction counts as over');
is(sql(q{SELECT expires_at - clock_timestamp() BETWEEN '59 min' AND '1 hour' FROM idempotency.claim('c', 'short')}), 't',
	'the retention starts when the outcome is stored');

foreach my $jump ([ 'forward', 0, 2 * $hour ], [ 'back', $day, 0 ])
{
	my ($which, $from, $to) = @$jump;
	set_clock($from);
	($outcome, $owner) = claims("waited for, $which");
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	$session->query_until(qr/begins/, "\\echo begins\nSELECT outcome, attempt FROM idempotency.claim('c', 'waited for, $which', lease => '1 hour', wait => '24 days');\n");
	$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") or die 'no session waits';
	set_clock($to);
	like($session->query_safe(q{\echo over}), qr/^taken_over\|2$/m, "a waiting session detects that the clock is set $which");
	is(charges("waited for, $which", 'owner', $owner), 'IK410: nothing', 'the former owner cannot finish, clock set $which');
}

# The length of a wait does not depend on the clock.
foreach my $jump ([ 'forward', $minute, 40 * $minute ], [ 'back', 50 * $minute, 10 * $minute ])
{
	my ($which, $from, $to) = @$jump;
	set_clock(0);
	claims("timed out, $which");
	set_clock($from);
	my $pid = $session->query_safe('SELECT pg_backend_pid()');
	my $began = time;
	$session->query_until(qr/begins/, "\\echo begins\nSELECT outcome, attempt FROM idempotency.try_claim('c', 'timed out, $which', lease => '1 hour', wait => '3 s');\n");
	$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid") or die 'no session waits';
	set_clock($to);
	like($session->query_safe(q{\echo over}), qr/^in_progress\|1$/m, "a wait times out when the clock is set $which");
	my $took = time - $began;
	ok($took >= 2 && $took < $minute, 'a wait lasts as long as requested') or diag("it took $took s");
}

# ----------------------------------------------------------------
# claim_abandoned and the reaper
# ----------------------------------------------------------------

set_clock($day);
claims($_) foreach 'left 1', 'left 2';
my $abandoned = q{SELECT string_agg(a.key, ', ' ORDER BY a.key) FROM idempotency.claim_abandoned('c', '1 hour', 100) AS a WHERE a.key LIKE 'left%'};
is(sql($abandoned), '', 'claim_abandoned returns no live lease');
set_clock($day + 2 * $hour);
is(sql($abandoned), 'left 1, left 2', 'forward: claim_abandoned returns the leases that are over');
is(sql($abandoned), '', 'claim_abandoned returns each lease once');
set_clock($day);
is(sql($abandoned), 'left 1, left 2', 'back: claim_abandoned returns its own leases, which start in the future');
claims('left 3');
set_clock($day + $minute);
is(sql(q{SELECT idempotency.reap(1000); SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}) =~ s/.*\n//sr, 3,
	'the reaper deletes no live lease');
set_clock($day + 2 * $hour);
is(sql(q{SELECT idempotency.reap(1000); SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}) =~ s/.*\n//sr, 3,
	'the reaper deletes no expired lease before the end of its retention');
is(sql(q{SELECT count(*) FROM idempotency.zombies WHERE key LIKE 'left%'}), 3, 'forward: expired leases are zombies');
set_clock(3 * $day);
is(sql(q{SELECT idempotency.reap(1000) >= 3; SELECT count(*) FROM idempotency.key WHERE key::text LIKE 'left%'}), "t\n0",
	'forward past the retention: the reaper deletes zombies');

# ----------------------------------------------------------------
# Delivery
# ----------------------------------------------------------------

set_clock($day);
sql(q{SELECT idempotency.subscribe('empty', ARRAY['none'])});
my $fetching = $session->query_safe('SELECT pg_backend_pid()');
$session->query_until(qr/begins/, "\\echo begins\nSELECT count(*) FROM idempotency.fetch('empty', wait => '1 minute');\n");
$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $fetching") or die 'no session waits';
set_clock(0);
is($session->query_safe(q{\echo over}), "0\nover", 'a consumer that waits returns when the clock is set back');

# A subscription that cannot be served rests for 10 s
set_clock($day);
sql(q{CREATE TABLE handled (); CREATE ROLE app LOGIN; GRANT INSERT ON handled TO app; SELECT idempotency.grant_consumer('app');
	CREATE FUNCTION handle(idempotency.event) RETURNS void LANGUAGE sql AS 'INSERT INTO handled DEFAULT VALUES';
	SELECT idempotency.subscribe('handled', ARRAY['h'], 'handle(idempotency.event)', owner => 'app');
	REVOKE EXECUTE ON FUNCTION handle(idempotency.event) FROM PUBLIC; SELECT idempotency.publish('h', '1')});
$node->poll_query_until('postgres', q{SELECT last_error IS NOT NULL FROM idempotency.subscriptions WHERE subscription = 'handled'}) or die 'no problem';
set_clock(0);
sql('GRANT EXECUTE ON FUNCTION handle(idempotency.event) TO app');
ok($node->poll_query_until('postgres', 'SELECT count(*) = 1 FROM handled'), 'a worker starts after the clock is set back, without a rest of a day');
sql(q{SELECT idempotency.unsubscribe('handled'), idempotency.unsubscribe('empty')});

# ----------------------------------------------------------------
# Retention
# ----------------------------------------------------------------

set_clock(0);
sql(q{BEGIN; SELECT idempotency.claim('c', 'kept', retention => '1 hour'); SELECT idempotency.complete('c', 'kept', '"kept"'); COMMIT;
	SELECT idempotency.once('c', 'message', '1 hour'); SELECT idempotency.once_many('c', ARRAY['batch'], '1 hour')});
my $kept = q{SELECT outcome, response FROM idempotency.try_claim('c', 'kept'); ROLLBACK};
my $seen = q{BEGIN; SELECT idempotency.once('c', 'message'), (SELECT count(*) FROM idempotency.once_many('c', ARRAY['batch'])); ROLLBACK};
set_clock(59 * $minute);
is(sql("BEGIN; $kept"), 'replayed|"kept"', 'an outcome is retained');
is(sql($seen), 'f|0', 'a message is retained');
set_clock(61 * $minute);
is(sql("BEGIN; $kept"), 'claimed|', 'forward past the retention: an outcome counts as absent');
is(sql($seen), 't|1', 'a message counts as absent');
set_clock(-30 * $day);
is(sql("BEGIN; $kept"), 'replayed|"kept"', 'back: an outcome is retained for longer');
is(sql($seen), 'f|0', 'back: a message is retained for longer');

# ----------------------------------------------------------------
# The exact moment of the end
# ----------------------------------------------------------------

# At the exact moment of its end, a lease is still live and an outcome is expired.
stop_clock(0);
is(sql('SELECT clock_timestamp()'), sql('SELECT clock_timestamp()'), 'the clock is stopped');
is((claims('moment'))[0], 'claimed 1', 'a lease starts');
sql(q{SELECT idempotency.once('c', 'until then', '1 hour'); SELECT idempotency.subscribe('s', ARRAY['*']); SELECT idempotency.publish('t', '1')});
my $fetch = q{SELECT count(*) FROM idempotency.fetch('s', lease => '1 hour')};
is(sql($fetch), 1, 'the lease of a batch starts');
stop_clock($hour - 1);
is(sql(q{SELECT idempotency.once('c', 'until then', '1 hour')}), 'f', 'a second before its end an outcome is retained');
stop_clock($hour);
is((claims('moment'))[0], 'in_progress 1', 'at the moment of its end a lease is live');
is(sql($fetch), 0, 'at the moment of its end the lease of a batch is live');
is(sql(q{SELECT idempotency.once('c', 'until then', '1 hour')}), 't', 'at the moment of its end an outcome is expired');
stop_clock($hour + 1);
is((claims('moment'))[0], 'taken_over 2', 'a second later the lease is over');
is(sql($fetch), 1, 'a second later the lease of the batch is over');

# No token is issued twice, whatever the clock.
is(sql(q{SELECT count(*), count(DISTINCT token) FROM idempotency.key WHERE token IS NOT NULL}) =~ /^(\d+)\|\1$/, 1, 'no two leases have one token');

$session->quit;
set_clock(0);
$node->stop;
done_testing();
