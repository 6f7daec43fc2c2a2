# 027_shards.pl
#
# Proves that docs/scaling.md does what it says, by running what it says: a router
# with PL/Proxy and shards on servers of their own, whose backends and postmasters
# are killed in the middle of calls; a shard that is added, and tenants that move
# to it, and on, with their keys, leases and unread events, while their clients go
# on retrying.  Afterwards each operation has had its effect once, in one home, every
# answer to a key is the same, tokens have only grown, and every event was booked once
# and in its order.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use ShardsTest;
use Test::More;

my ($sharedir) = run_command([ 'pg_config', '--sharedir' ]);
if (!-e "$sharedir/extension/plproxy.control")
{
	# `make test` installs it, and counts a skipped script as passed.
	die 'PL/Proxy is not installed' if $ENV{IDEMPOTENCY_SKIP_NOTHING};
	plan skip_all => 'PL/Proxy is not installed';
}

my $dir = PostgreSQL::Test::Utils::tempdir;
my $conf = "shared_preload_libraries = 'idempotency'\nidempotency.reaper_naptime = 500ms\nmax_prepared_transactions = 5\n";
my $router = make_server('router', 'on the router', '');
my %shard = map { $_ => make_server($_, 'on every shard', $conf) } 'shard1', 'shard2', 'shard3';
make_ledger($router);

# plays runs a block of the page, which must succeed.
sub plays
{
	my ($node, $title, %variables) = @_;
	foreach my $block (blocks($title))
	{
		my ($code, $stderr) = play($node, $block, set => \%variables);
		$code == 0 or die "$title: $stderr";
	}
}

# add_shard tells the router of a shard, and add_tenant both of a tenant.
sub add_shard
{
	my ($name) = @_;
	plays($router, 'on the router, for each shard', shard => $name,
		connection => sprintf('host=%s port=%d dbname=postgres', $shard{$name}->host, $shard{$name}->port));
}

sub add_tenant
{
	my ($tenant, $home) = @_;
	plays($shard{$home}, 'on its shard, for each tenant', tenant => $tenant);
	plays($router, 'on the router, for each tenant', tenant => $tenant, shard => $home);
}

# move runs steps of the move, by numbers, or all of them, or "give up".  Returns
# psql's exit code and errors.
sub move
{
	my ($tenant, $from, $to, @steps) = @_;
	my @titles = map { $_ eq 'give up' ? $_ : {
			1 => 'move 1: close the old home', 2 => 'move 2: take along',
			3 => 'move 3: route to the new home', 4 => 'move 4: clean up the old home' }->{$_} }
	  @steps ? @steps : 1 .. 4;
	return play($router, join('', map { blocks($_) } @titles), in => $dir, connection => connection($router, 'mover'),
		set => { tenant => $tenant, shard => $to, old => connection($shard{$from}, 'mover'),
			new => connection($shard{$to}, 'mover'), router => connection($router, 'mover') });
}

# insist repeats that where a call took longer than the page has patience, on a machine
# that has much to do; moves checks that it succeeds.
sub insist
{
	my ($code, $stderr);
	do { ($code, $stderr) = move(@_) } while ($stderr =~ /due to lock timeout/);
	return ($code, $stderr);
}

# mover_dies lets a mover die in step 2, when all has arrived but the tenant itself.
sub mover_dies
{
	my ($tenant, $from, $to, @steps) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $new = $shard{$to};
	my $holder = open_session($new);
	my $waits = q{FROM pg_stat_activity WHERE usename = 'mover' AND wait_event_type = 'Lock'};

	$holder->query_safe('BEGIN; LOCK TABLE shard.tenant IN SHARE MODE');
	my $mover = in_background(sub { insist($tenant, $from, $to, @steps) });
	$new->poll_query_until('postgres', "SELECT count(*) = 1 $waits") or die 'the mover does not wait';
	kill9($new, $new->safe_psql('postgres', "SELECT pid $waits"));
	waitpid $mover, 0;
	isnt($?, 0, "the mover of $tenant has died when all had arrived but the tenant itself");
	eval { $holder->quit };
	return;
}

sub moves
{
	my ($name, @arguments) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(join(' ', insist(@arguments)), '0 ', $name);
}

# call is the SQL of a request, called what it is about; charges says how many
# effects it had, in all homes.
sub call { return "SELECT api.charge_create('$_[0]', '$_[1]', '$_[1]', 1)" }

sub charges
{
	my ($tenant, $order) = @_;
	my $sum = 0;
	$sum += $_->safe_psql('postgres', "SELECT count(*) FROM api.charge WHERE tenant = '$tenant' AND order_no = '$order'")
	  foreach values %shard;
	return $sum;
}

# answer returns what a client gets that retries.
sub answer
{
	my ($tenant, $order) = @_;
	my ($rc, $stdout, $stderr);
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		($rc, $stdout, $stderr) = $router->psql('postgres', call($tenant, $order), extra_params => [ '-U', 'app' ]);
		return $stdout if $rc == 0;
		select undef, undef, undef, 0.1;
	}
	die $stderr;
}

# at runs one transaction of a tenant's at a shard.
sub at
{
	my ($node, $tenant, $sql) = @_;
	return $node->safe_psql('postgres', qq{BEGIN; DO \$\$ BEGIN PERFORM shard.enter('$tenant'); END \$\$; $sql; COMMIT});
}

my $claim = q{SELECT token FROM idempotency.claim('%s/pay', '%s', '{"n": 1}', lease => '%s')};

add_shard($_) foreach sort keys %shard;
add_tenant('acme', 'shard1');
add_tenant('globex', 'shard1');
add_tenant('initech', 'shard2');
add_tenant('umbrella', 'shard3');

# ----------------------------------------------------------------
# A fault in the middle of a call: the client knows nothing, and retries
# ----------------------------------------------------------------

my @app = (extra_params => [ '-U', 'app' ]);
is(answer('acme', 'first') eq answer('acme', 'first') && charges('acme', 'first'), 1, 'a call and its retry are one effect');
fails_with($router, call('hooli', '1'), 'SH404', 'a tenant that nobody knows', @app);
fails_with($shard{shard2}, call('acme', 'lost'), 'SH410', 'a call at the wrong shard', @app);

# in_mid_call stops a call after its claim and before its effect, does something to it,
# and checks what becomes of it.
sub in_mid_call
{
	my ($name, $fault, $survives) = @_;
	my $home = $shard{shard1};
	my $holder = open_session($home);
	my $client = $router->background_psql('postgres', on_error_stop => 0, @app);
	(my $order = $name) =~ s/\W+/-/g;

	$holder->query_safe('BEGIN; LOCK TABLE api.charge IN EXCLUSIVE MODE');
	$client->query_until(qr/begun/, '\echo begun' . "\n" . call('acme', $order) . ";\n");
	$home->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity
		WHERE wait_event_type = 'Lock' AND query ~ 'api.charge_create' AND usename = 'app'}) or die 'no call';
	$fault->($home);
	eval { $holder->query('COMMIT') };
	eval { $_->quit } foreach $holder, $client;
	wait_until_up($_) foreach $home, $router;
	if ($survives)
	{
		$home->poll_query_until('postgres', "SELECT count(*) = 1 FROM api.charge WHERE order_no = '$order'")
		  or die 'the shard did not go on';
	}
	else { is(charges('acme', $order), 0, "$name: nothing was done") }
	my $answer = answer('acme', $order);
	is(answer('acme', $order), $answer, "$name: the retries have one answer");
	is(charges('acme', $order), 1, "$name: and one effect");
}

# pid_of returns the process that serves the call at one of the servers.
sub pid_of
{
	my ($node) = @_;
	return $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity
		WHERE usename = 'app' AND state = 'active' AND query ~ 'api.charge_create'});
}

in_mid_call('kill -9 of the router backend', sub { kill9($router, pid_of($router)) }, 1);
in_mid_call('immediate stop of the router', sub { $router->stop('immediate'); $router->start }, 1);
in_mid_call('a call that is terminated at the router', sub {
	$router->safe_psql('postgres', 'SELECT pg_terminate_backend(' . pid_of($router) . ')') }, 1);
in_mid_call('kill -9 of the shard backend', sub { kill9($_[0], pid_of($_[0])) });
in_mid_call('kill -9 of the shard postmaster', sub { restart_after_kill9($_[0]) });
in_mid_call('a call that is terminated at the shard', sub {
	$_[0]->safe_psql('postgres', 'SELECT pg_terminate_backend(' . pid_of($_[0]) . ')') });

# ----------------------------------------------------------------
# Clients that do not stop, faults, a new shard, and a tenant that moves to it
# ----------------------------------------------------------------

my @clients = map { start_client($_, $router, $dir, qw(acme globex initech umbrella)) } 1 .. 3;
wait_for_progress($dir, 20);

# kill_some kills a backend of the clients' with SIGKILL, so that its server recovers:
# the first that is there, since they come and go.
sub kill_some
{
	my ($node) = @_;
	foreach (1 .. 20 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my $pid = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity
			WHERE usename = 'app' AND backend_type = 'client backend' ORDER BY random() LIMIT 1});
		return kill9($node, $pid) if $pid && kill 0, $pid;
	}
	die 'no client came to ' . $node->name;
}

my @faults = (
	sub { kill_some($shard{ $_[0] }) },
	sub { kill_some($router) },
	sub { restart_after_kill9($shard{ $_[0] }) },
	sub { $router->stop('immediate'); $router->start },
	sub { $shard{ $_[0] }->restart });
foreach my $i (0 .. $#faults)
{
	my $home = 'shard' . (1 + $i % 3);
	$faults[$i]->($home);
	wait_for_progress($dir, 15);
	consume($shard{$home}, $router);
}

$shard{shard4} = make_server('shard4', 'on every shard', $conf);
add_shard('shard4');

# Two leases go along: one whose owner lives, and one that was abandoned.  The first
# mover dies when all but the tenant itself has arrived.
my ($owned, $left) = map { at($shard{shard1}, 'acme', sprintf $claim, 'acme', @$_) } [ 'owned', '1 hour' ], [ 'left', '1 millisecond' ];
sub goes_along
{
	my ($home) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(at($shard{$home}, 'acme', "SELECT idempotency.renew('acme/pay', 'owned', $owned, '1 hour') IS NOT NULL"), 't',
		"$home: a lease goes along, and its owner goes on");
}
mover_dies('acme', 'shard1', 'shard4', 1, 2);
moves('a tenant moves under load', 'acme', 'shard1', 'shard4');
goes_along('shard4');
is(at($shard{shard4}, 'acme', q{SELECT outcome, attempt, token > } . $left . q{ FROM idempotency.claim('acme/pay', 'left', '{"n": 1}', lease => '1 hour')}),
	'taken_over|2|t', 'what was abandoned is taken over');
wait_for_progress($dir, 15, 'acme');
kill_some($shard{shard4});
wait_for_progress($dir, 15, 'acme');
moves('it moves on', 'acme', 'shard4', 'shard2');
goes_along('shard2');
wait_for_progress($dir, 15, 'acme');
moves('and back', 'acme', 'shard2', 'shard1');
goes_along('shard1');
fails_with($shard{shard1}, qq{BEGIN; SELECT shard.enter('acme'); SELECT idempotency.renew('acme/pay', 'left', $left, '1 hour'); COMMIT},
	'IK410', 'where it lived before, the former owner is fenced out');
moves('a move that was made can be repeated', 'acme', 'shard2', 'shard1');
is((move('acme', 'shard2', 'shard3'))[0], 3, 'from where it does not live a tenant cannot be moved');
wait_for_progress($dir, 15, 'acme');

finish_clients($dir, @clients);

# ----------------------------------------------------------------
# A move step by step, of a tenant that has everything
# ----------------------------------------------------------------

my ($old, $new) = @shard{qw(shard1 shard4)};

# Keys of every kind.  Tokens run ahead in this home: the other one has drawn few.
my $complete = q{SELECT idempotency.complete('globex/pay', '%s', '{"n" :  1}', 201, '{"A" : 1}', token => %s)};
$old->safe_psql('postgres', q{SELECT setval('idempotency.token', nextval('idempotency.token') + 1000000000)});
my ($live, $dead, $given_up, $done) = map { at($old, 'globex', sprintf $claim, 'globex', @$_) }
  [ 'live', '1 hour' ], [ 'dead', '1 millisecond' ], [ 'given up', '1 hour' ], [ 'done', '1 hour' ];
at($old, 'globex', qq{SELECT idempotency.checkpoint('globex/pay', 'dead', $dead, 'half', '{"s" :  1}');
	SELECT idempotency.release('globex/pay', 'given up', $given_up)});
at($old, 'globex', sprintf $complete, 'done', $done);
at($old, 'globex', q{SELECT idempotency.claim('globex/pay', 'failed', retention => '-1 second');
	SELECT idempotency.fail('globex/pay', 'failed', '{"no" :  1}', 402)});
at($old, 'globex', q{SELECT idempotency.once_many('globex/in', ARRAY['m1', 'm2'])});
my $first = answer('globex', 'first');

# 1. Close: it waits for those who are in, and lets nobody else in meanwhile.
my ($late, $snapshot) = map { open_session($old) } 1 .. 2;
$snapshot->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM shard.tenant');
$old->safe_psql('postgres', 'BEGIN; ' . call('globex', 'prepared') . q{; PREPARE TRANSACTION 'in'});
my $mover = in_background(sub { insist('globex', 'shard1', 'shard4', 1) });
$old->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'mover' AND wait_event_type = 'Lock'})
  or die 'the mover does not wait';
session_fails($late, call('globex', 'late'), 'SH503', 'who comes while it is being closed is turned away at once');
$old->safe_psql('postgres', q{COMMIT PREPARED 'in'});
waitpid $mover, 0;
is($?, 0, 'it is closed when all are out');
session_fails($snapshot, q{SELECT shard.enter('globex')}, '40001', 'a snapshot from before does not let anybody in');
$snapshot->query_safe('ROLLBACK');

# The handler has not had the last charge, and must not let it pass; everybody else has.
$old->poll_query_until('postgres', q{SELECT lag_events = 0 FROM idempotency.subscriptions WHERE subscription = 'counter'})
  or die 'no worker comes';
consume_all($old, $router);
moves('given up', 'globex', 'shard1', 'shard4', 'give up');
is(answer('globex', 'first'), $first, 'given up: it lives where it lived');

# Events: one that was read, one that failed and one that waits behind it, one that
# was committed after it was passed, one that is out with a consumer who has died, and
# one that nobody has looked for.
sub noted { return qq{SELECT idempotency.publish('charge.noted', '"$_[1]"', 'globex/$_[0]')} }
at($old, 'globex', noted('f', 'read'));
is(consume($old, $router), 1, 'an event is read');
at($old, 'globex', noted('f', 'f1'));
my @relay = (extra_params => [ '-U', 'relay' ]);
$old->safe_psql('postgres', q{DO $$ DECLARE e record; BEGIN
	FOR e IN SELECT * FROM idempotency.fetch('ledger') LOOP
		PERFORM idempotency.nack('ledger', e.batch, e.id, 'no', '1 hour');
	END LOOP; PERFORM idempotency.ack('ledger', e.batch); END $$}, @relay);
at($old, 'globex', noted('f', 'f2'));
$old->safe_psql('postgres', q{BEGIN; SELECT shard.enter('globex'); } . noted('l', 'late') . q{; PREPARE TRANSACTION 'late'});
at($old, 'globex', noted('o', 'o0'));
is(consume($old, $router), 1, 'a later one is read');
$old->safe_psql('postgres', q{COMMIT PREPARED 'late'});
at($old, 'globex', noted('o', 'o1'));
$old->safe_psql('postgres', q{SELECT idempotency.fetch('ledger', lease => '1 millisecond')}, @relay);
at($old, 'globex', noted('o', 'o2'));

# Close again.
moves('closed again', 'globex', 'shard1', 'shard4', 1);
restart_after_kill9($old);
fails_with($router, call('globex', 'late'), 'SH503', 'it stays closed over a crash', @app);
$late = open_session($old);

# 2. Take along: all or nothing.
mover_dies('globex', 'shard1', 'shard4', 2);
my $keys_of = q{SELECT scope, key, encode(convert_to(k::text, 'UTF8'), 'hex') FROM idempotency.key AS k
	WHERE scope ^@ 'globex/' ORDER BY scope, key};
is($new->safe_psql('postgres', $keys_of), '', 'then nothing has arrived');
moves('taken along', 'globex', 'shard1', 'shard4', 2);
my @keys = split /\n/, $old->safe_psql('postgres', $keys_of);
my %arrived = map { $_ => 1 } split /\n/, $new->safe_psql('postgres', $keys_of);
cmp_ok(scalar(@keys), '>', 10, 'there are keys');
is(join("\n", grep { !$arrived{$_} } @keys), '', 'every key is there as it was');
is($old->safe_psql('postgres', q{SELECT count(*) FROM shard.tenant WHERE tenant = 'globex'}), 0, 'it lives in one home');

# 3. Route.  Until then, and for those who come late, the old home says no.
fails_with($router, call('globex', 'late'), 'SH503', 'before the new route', @app);
is((move('globex', 'shard1', 'shard4', 'give up'))[0], 0, 'giving up is too late');
fails_with($router, call('globex', 'late'), 'SH503', 'and opens nothing', @app);
moves('routed', 'globex', 'shard1', 'shard4', 3);
is(answer('globex', 'first'), $first, 'the new home replays what the old one did');
session_fails($late, call('globex', 'late'), 'SH503', 'a late call at the old home');
moves('cleaned up', 'globex', 'shard1', 'shard4', 4);
session_fails($late, call('globex', 'late'), 'SH410', 'a later one');
is($old->safe_psql('postgres', $keys_of), '', 'the old home has forgotten it');

# Leases go on, and tokens have only grown.
fails_with($new, qq{BEGIN; SELECT shard.enter('globex'); } . sprintf($complete, 'given up', $given_up) . '; COMMIT',
	'IK410', 'a former owner is fenced out in the new home');
my $taken = at($new, 'globex', sprintf $claim, 'globex', 'given up', '1 hour');
cmp_ok($taken, '>', $done, 'a token is greater than all of the old home');
is( at($new, 'globex', q{SELECT outcome, attempt, recovery_point, state FROM idempotency.claim('globex/pay', 'dead', lease => '1 hour')}),
	'taken_over|2|half|{"s" :  1}', 'an abandoned operation is taken over, at its recovery point');
fails_with($new, q{SELECT idempotency.claim('globex/pay', 'live', '{"n": 1}', wait => '0')}, 'IK409', 'a live lease is live');
is(at($new, 'globex', sprintf $complete, 'live', $live), '{"n" :  1}', 'its owner finishes');
is( at($new, 'globex', q{SELECT outcome, status, headers, response, failed FROM idempotency.claim('globex/pay', 'done', '{"n":1.0}')}),
	'replayed|201|{"A" : 1}|{"n" :  1}|f', 'what was done replays');
fails_with($new, q{SELECT idempotency.claim('globex/pay', 'done', '{"n": 2}')}, 'IK422', 'and only for the same request');
is( at($new, 'globex', q{SELECT status, response, expires_at FROM idempotency.claim('globex/pay', 'failed')}),
	'402|{"no" :  1}|', 'a final failure replays');
is(at($new, 'globex', q{SELECT idempotency.once_many('globex/in', ARRAY['m2', 'm3', 'm1'])}), 'm3', 'messages are known');
is(answer('globex', 'prepared') && charges('globex', 'prepared'), 1, 'what was prepared is known');

# ----------------------------------------------------------------
# The books
# ----------------------------------------------------------------

at($new, 'globex', join '; ', noted('f', 'f3'), noted('l', 'l2'), noted('o', 'o3'));
foreach my $node (@shard{qw(shard4 shard1 shard2 shard3)}) # the new home first
{
	consume_all($node, $router);
}
is( $router->safe_psql('ledger', q{SELECT aggregate, string_agg(payload, ' ' ORDER BY place) FROM entry
		WHERE aggregate IN ('globex/f', 'globex/l', 'globex/o') GROUP BY aggregate ORDER BY aggregate}),
	qq{globex/f|"read" "f1" "f2" "f3"\nglobex/l|"late" "l2"\nglobex/o|"o0" "o1" "o2" "o3"}, 'events are booked once, and in order');

my $heard = acknowledged($dir);
my (%charge, @twice, @answers, $total);
my %home = (acme => 'shard1', globex => 'shard4', initech => 'shard2', umbrella => 'shard3');
foreach my $name (sort keys %shard)
{
	foreach (split /\n/, $shard{$name}->safe_psql('postgres', 'SELECT tenant, order_no, id FROM api.charge'))
	{
		my ($tenant, $order, $id) = split /\|/;
		push @twice, "$_ at $name" if $charge{"$tenant|$order"}++ || $home{$tenant} ne $name;
		my @heard = keys %{ $heard->{"$tenant|$order"} // next };
		push @answers, "$_: @heard" if @heard != 1 || $heard[0] ne qq({"id" : "$id", "order" : "$order"});
		$total++;
	}
	my $counted = q{SELECT %s FROM (SELECT tenant, count(*) AS n FROM api.charge GROUP BY tenant) AS c
		FULL JOIN api.charge_count AS h USING (tenant)};
	$shard{$name}->poll_query_until('postgres', sprintf $counted, 'coalesce(bool_and(c.n = h.charges), true)')
	  or diag $shard{$name}->safe_psql('postgres', sprintf $counted, '*');
	is( $shard{$name}->safe_psql('postgres', sprintf $counted, 'count(*) FILTER (WHERE (c.n = h.charges) IS NOT TRUE)'),
		0, "$name: its handler has had each charge once");
}
is("@twice", '', 'each operation has had its effect once, and in one home');
is("@answers", '', 'and one answer, that of the effect');
is($total, scalar(keys %$heard), 'none that was answered is lost');
is( $router->safe_psql('ledger', q{SELECT count(*) - count(DISTINCT aggregate) FROM entry WHERE payload LIKE '_"id"%'}), 0,
	'no charge was booked twice');
is( $router->safe_psql('ledger', q{SELECT count(*) FROM entry WHERE payload LIKE '_"id"%'}), scalar(keys %charge), 'nor never');
note "$total operations, answered " . eval { my $n = 0; $n += $_ foreach map { values %$_ } values %$heard; $n } . ' times';

# in_background runs something in a process of its own, and returns its id.
sub in_background
{
	my ($what) = @_;
	my $pid = fork // die "fork: $!";
	POSIX::_exit(($what->())[0]) unless $pid;
	return $pid;
}

$_->stop foreach $router, values %shard;
done_testing();
