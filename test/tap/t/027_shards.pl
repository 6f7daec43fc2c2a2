# 027_shards.pl
#
# Proves that docs/scaling.md and examples/shards work, by running them: a router with
# PL/Proxy and shards on separate servers, whose backends and postmasters are killed during
# calls. A shard is added, and tenants move between shards with their keys, leases and unread
# events, while their clients retry. Afterwards each operation has had its effect once,
# on one shard. All responses to a key are equal, tokens have only grown, and every
# event was booked once and in order.
#
# The script takes a minute, because five servers recover from a dozen crashes, and each
# time clients must make progress.

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
	# `make test` installs it, and counts a skipped script as passed. There is none for a
	# server that test/servers/matrix/source has built.
	die 'PL/Proxy is not installed' if $ENV{IDEMPOTENCY_SKIP_NOTHING} && !$ENV{IDEMPOTENCY_WITHOUT_PLPROXY};
	plan skip_all => 'PL/Proxy is not installed for this server';
}

my $dir = PostgreSQL::Test::Utils::tempdir;
my $conf = "shared_preload_libraries = 'idempotency'\nidempotency.reaper_naptime = 5s\nmax_prepared_transactions = 5\n";
my $router = make_server('router', 'on the router', '');
my %shard = map { $_ => make_server($_, 'on every shard', $conf) } 'shard1', 'shard2', 'shard3';
make_ledger($router);

# run_block runs a block of the page or a file, which must succeed.
sub run_block
{
	my ($node, $title, %variables) = @_;
	foreach my $block (blocks($title))
	{
		my ($code, $stderr) = run_psql($node, $block, set => \%variables);
		$code == 0 or die "$title: $stderr";
	}
}

# add_shard registers a shard on the router; add_tenant registers a tenant on both.
sub add_shard
{
	my ($name) = @_;
	run_block($router, 'on the router, for each shard', shard => $name,
		connection => sprintf('host=%s port=%d dbname=postgres', $shard{$name}->host, $shard{$name}->port));
}

sub add_tenant
{
	my ($tenant, $home) = @_;
	run_block($shard{$home}, 'on its shard, for each tenant', tenant => $tenant);
	run_block($router, 'on the router, for each tenant', tenant => $tenant, shard => $home);
}

# move runs steps of the move, by number, or all of them, or "give up". Returns the exit
# code and the errors of psql.
sub move
{
	my ($tenant, $from, $to, @steps) = @_;
	my @titles = map { $_ eq 'give up' ? $_ : {
			1 => 'move 1: close the old shard', 2 => 'move 2: take along',
			3 => 'move 3: route to the new shard', 4 => 'move 4: clean up the old shard' }->{$_} }
	  @steps ? @steps : 1 .. 4;
	return run_psql($router, join('', map { blocks($_) } @titles), in => $dir, connection => connection($router, 'mover'),
		set => { tenant => $tenant, shard => $to, old => connection($shard{$from}, 'mover'),
			new => connection($shard{$to}, 'mover'), router => connection($router, 'mover') });
}

# insist repeats a step where a call exceeded the timeout of move.sql, as on a slow machine;
# moves checks that the step succeeds.
sub insist
{
	my ($code, $stderr);
	do { ($code, $stderr) = move(@_) } while ($stderr =~ /due to lock timeout/);
	return ($code, $stderr);
}

# mover_dies kills the process that moves a tenant in step 2, after all rows but the
# tenant itself are copied.
sub mover_dies
{
	my ($tenant, $from, $to, @steps) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $new = $shard{$to};
	my $holder = open_session($new);
	my $waits = q{FROM pg_stat_activity WHERE usename = 'mover' AND wait_event_type = 'Lock'};

	$holder->query_safe('BEGIN; LOCK TABLE shard.tenant IN SHARE MODE');
	my $mover = in_background(sub { insist($tenant, $from, $to, @steps) });
	$new->poll_query_until('postgres', "SELECT count(*) = 1 $waits") or die 'the move does not wait';
	kill9($new, $new->safe_psql('postgres', "SELECT pid $waits"));
	waitpid $mover, 0;
	isnt($?, 0, "the move of $tenant was killed after all rows but the tenant were copied");
	eval { $holder->quit };
	return;
}

sub moves
{
	my ($name, @arguments) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(join(' ', insist(@arguments)), '0 ', $name);
}

# call is the SQL of a request for an order. charges returns the number of its effects
# on all shards.
sub call { return "SELECT api.charge_create('$_[0]', '$_[1]', '$_[1]', 1)" }

sub charges
{
	my ($tenant, $order) = @_;
	my $sum = 0;
	$sum += $_->safe_psql('postgres', "SELECT count(*) FROM api.charge WHERE tenant = '$tenant' AND order_no = '$order'")
	  foreach values %shard;
	return $sum;
}

# answer returns the response to a client that retries.
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

# at runs one transaction of a tenant on a shard.
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
# A fault during a call: the client does not know the outcome, and retries
# ----------------------------------------------------------------

my @app = (extra_params => [ '-U', 'app' ]);
is(answer('acme', 'first') eq answer('acme', 'first') && charges('acme', 'first'), 1, 'a call and its retry are one effect');
fails_with($router, call('hooli', '1'), 'SH404', 'an unknown tenant', @app);
fails_with($shard{shard2}, call('acme', 'lost'), 'SH410', 'a call at the wrong shard', @app);

# in_mid_call stops a call between its claim and its effect, causes a fault, and checks
# the outcome.
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
		  or die 'the shard did not continue';
	}
	else { is(charges('acme', $order), 0, "$name: nothing was done") }
	my $answer = answer('acme', $order);
	is(answer('acme', $order), $answer, "$name: all retries return one response");
	is(charges('acme', $order), 1, "$name: all retries have one effect");
}

# call_pid returns the process that serves the call at one of the servers.
sub call_pid
{
	my ($node) = @_;
	return $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity
		WHERE usename = 'app' AND state = 'active' AND query ~ 'api.charge_create'});
}

in_mid_call('kill -9 of the router backend', sub { kill9($router, call_pid($router)) }, 1);
in_mid_call('immediate stop of the router', sub { $router->stop('immediate'); $router->start }, 1);
in_mid_call('a call that is terminated at the router', sub {
	$router->safe_psql('postgres', 'SELECT pg_terminate_backend(' . call_pid($router) . ')') }, 1);
in_mid_call('kill -9 of the shard backend', sub { kill9($_[0], call_pid($_[0])) });
in_mid_call('kill -9 of the shard postmaster', sub { restart_after_kill9($_[0]) });
in_mid_call('a call that is terminated at the shard', sub {
	$_[0]->safe_psql('postgres', 'SELECT pg_terminate_backend(' . call_pid($_[0]) . ')') });

# ----------------------------------------------------------------
# Continuous clients, faults, a new shard, and a tenant that moves to it
# ----------------------------------------------------------------

my @clients = map { start_client($_, $router, $dir, qw(acme globex initech umbrella)) } 1 .. 3;
wait_for_progress($dir, 20);

# kill_some kills a client backend with SIGKILL, so that its server recovers. It takes
# the first one, because backends come and go.
sub kill_some
{
	my ($node) = @_;
	foreach (1 .. 20 * $PostgreSQL::Test::Utils::timeout_default)
	{
		my $pid = $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity
			WHERE usename = 'app' AND backend_type = 'client backend' ORDER BY random() LIMIT 1});
		return kill9($node, $pid) if $pid && kill 0, $pid;
	}
	die 'no client connected to ' . $node->name;
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

# Two leases move with the tenant: one with a live owner, and one that was abandoned.
# The first mover is killed after all rows but the tenant itself are copied.
my ($owned, $left) = map { at($shard{shard1}, 'acme', sprintf $claim, 'acme', @$_) } [ 'owned', '1 hour' ], [ 'left', '1 millisecond' ];
sub check_lease
{
	my ($home) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(at($shard{$home}, 'acme', "SELECT idempotency.renew('acme/pay', 'owned', $owned, '1 hour') IS NOT NULL"), 't',
		"$home: a lease moves, and its owner continues");
}
mover_dies('acme', 'shard1', 'shard4', 1, 2);
moves('a tenant moves under load', 'acme', 'shard1', 'shard4');
check_lease('shard4');
is(at($shard{shard4}, 'acme', q{SELECT outcome, attempt, token > } . $left . q{ FROM idempotency.claim('acme/pay', 'left', '{"n": 1}', lease => '1 hour')}),
	'taken_over|2|t', 'an abandoned operation is taken over');
wait_for_progress($dir, 15, 'acme');
kill_some($shard{shard4});
wait_for_progress($dir, 15, 'acme');
moves('the tenant moves again', 'acme', 'shard4', 'shard2');
check_lease('shard2');
wait_for_progress($dir, 15, 'acme');
moves('the tenant moves back', 'acme', 'shard2', 'shard1');
check_lease('shard1');
fails_with($shard{shard1}, qq{BEGIN; SELECT shard.enter('acme'); SELECT idempotency.renew('acme/pay', 'left', $left, '1 hour'); COMMIT},
	'IK410', 'on an earlier shard the former owner is rejected');
moves('a finished move can be repeated', 'acme', 'shard2', 'shard1');
is((move('acme', 'shard2', 'shard3'))[0], 3, 'a tenant can be moved only from its own shard');
wait_for_progress($dir, 15, 'acme');

finish_clients($dir, @clients);

# ----------------------------------------------------------------
# A move step by step, of a tenant with rows of every kind
# ----------------------------------------------------------------

my ($old, $new) = @shard{qw(shard1 shard4)};

# Keys of every kind. The tokens of this shard are ahead of those of the other one.
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

# 1. Close: the step waits for open transactions of the tenant and admits no new one.
my ($late, $snapshot) = map { open_session($old) } 1 .. 2;
$snapshot->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM shard.tenant');
$old->safe_psql('postgres', 'BEGIN; ' . call('globex', 'prepared') . q{; PREPARE TRANSACTION 'in'});
my $mover = in_background(sub { insist('globex', 'shard1', 'shard4', 1) });
$old->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE usename = 'mover' AND wait_event_type = 'Lock'})
  or die 'the move does not wait';
session_fails($late, call('globex', 'late'), 'SH503', 'a call while the tenant is being closed fails at once');
$old->safe_psql('postgres', q{COMMIT PREPARED 'in'});
waitpid $mover, 0;
is($?, 0, 'the tenant is closed once all its transactions have ended');
session_fails($snapshot, q{SELECT shard.enter('globex')}, '40001', 'an older snapshot admits no call');
$snapshot->query_safe('ROLLBACK');

# The handler has not received the last charge, and must not skip it; all other
# subscriptions have received it.
$old->poll_query_until('postgres', q{SELECT bool_and(lag_events = 0) FROM idempotency.partitions WHERE subscription = 'counter'})
  or die 'no worker starts';
consume_all($old, $router);
moves('given up', 'globex', 'shard1', 'shard4', 'give up');
is(answer('globex', 'first'), $first, 'given up: the tenant stays on its shard');

# Events: one that was read, one that failed and one behind it, one that committed after
# the position had passed it, one in a batch of a consumer that died, and one that was
# not fetched.
sub note_event { return qq{SELECT idempotency.publish('charge.noted', '"$_[1]"', 'globex/$_[0]')} }
at($old, 'globex', note_event('f', 'read'));
is(consume($old, $router), 1, 'an event is read');
at($old, 'globex', note_event('f', 'f1'));
my @relay = (extra_params => [ '-U', 'relay' ]);
$old->safe_psql('postgres', q{DO $$ DECLARE e record; BEGIN
	FOR e IN SELECT * FROM idempotency.fetch('ledger') LOOP
		PERFORM idempotency.nack('ledger', e.batch, e.id, 'no', '1 hour');
	END LOOP; PERFORM idempotency.ack('ledger', e.batch); END $$}, @relay);
at($old, 'globex', note_event('f', 'f2'));
$old->safe_psql('postgres', q{BEGIN; SELECT shard.enter('globex'); } . note_event('l', 'late') . q{; PREPARE TRANSACTION 'late'});
at($old, 'globex', note_event('o', 'o0'));
is(consume($old, $router), 1, 'a later event is read');
$old->safe_psql('postgres', q{COMMIT PREPARED 'late'});
at($old, 'globex', note_event('o', 'o1'));
$old->safe_psql('postgres', q{SELECT idempotency.fetch('ledger', lease => '1 millisecond')}, @relay);
at($old, 'globex', note_event('o', 'o2'));

# Close again.
moves('closed again', 'globex', 'shard1', 'shard4', 1);
restart_after_kill9($old);
fails_with($router, call('globex', 'late'), 'SH503', 'the tenant stays closed across a crash', @app);
$late = open_session($old);

# 2. Copy: all or nothing.
mover_dies('globex', 'shard1', 'shard4', 2);
my $keys_of = q{SELECT scope, key, encode(convert_to(k::text, 'UTF8'), 'hex') FROM idempotency.key AS k
	WHERE scope ^@ 'globex/' ORDER BY scope, key};
is($new->safe_psql('postgres', $keys_of), '', 'after the killed move nothing is copied');
moves('taken along', 'globex', 'shard1', 'shard4', 2);
my @keys = split /\n/, $old->safe_psql('postgres', $keys_of);
my %arrived = map { $_ => 1 } split /\n/, $new->safe_psql('postgres', $keys_of);
cmp_ok(scalar(@keys), '>', 10, 'there are keys');
is(join("\n", grep { !$arrived{$_} } @keys), '', 'every key is copied unchanged');
is($old->safe_psql('postgres', q{SELECT count(*) FROM shard.tenant WHERE tenant = 'globex'}), 0, 'the tenant is on one shard');

# 3. Route. Until then, and for late calls, the old shard rejects calls.
fails_with($router, call('globex', 'late'), 'SH503', 'before the new route', @app);
is((move('globex', 'shard1', 'shard4', 'give up'))[0], 0, 'giving up too late has no effect');
fails_with($router, call('globex', 'late'), 'SH503', 'giving up too late does not open the old shard', @app);
moves('routed', 'globex', 'shard1', 'shard4', 3);
is(answer('globex', 'first'), $first, 'the new shard replays operations of the old one');
session_fails($late, call('globex', 'late'), 'SH503', 'a late call on the old shard');
moves('cleaned up', 'globex', 'shard1', 'shard4', 4);
session_fails($late, call('globex', 'late'), 'SH410', 'a call on the old shard after the cleanup');
is($old->safe_psql('postgres', $keys_of), '', 'the old shard has no keys of the tenant');

# Leases continue, and tokens have only grown.
fails_with($new, qq{BEGIN; SELECT shard.enter('globex'); } . sprintf($complete, 'given up', $given_up) . '; COMMIT',
	'IK410', 'a former owner is rejected on the new shard');
my $taken = at($new, 'globex', sprintf $claim, 'globex', 'given up', '1 hour');
cmp_ok($taken, '>', $done, 'a new token is greater than all tokens of the old shard');
is( at($new, 'globex', q{SELECT outcome, attempt, recovery_point, state FROM idempotency.claim('globex/pay', 'dead', lease => '1 hour')}),
	'taken_over|2|half|{"s" :  1}', 'an abandoned operation is taken over, at its recovery point');
fails_with($new, q{SELECT idempotency.claim('globex/pay', 'live', '{"n": 1}', wait => '0')}, 'IK409', 'a live lease blocks other clients');
is(at($new, 'globex', sprintf $complete, 'live', $live), '{"n" :  1}', 'the owner of a live lease finishes');
is( at($new, 'globex', q{SELECT outcome, status, headers, response, failed FROM idempotency.claim('globex/pay', 'done', '{"n":1.0}')}),
	'replayed|201|{"A" : 1}|{"n" :  1}|f', 'a finished operation replays');
fails_with($new, q{SELECT idempotency.claim('globex/pay', 'done', '{"n": 2}')}, 'IK422', 'a finished operation rejects another request');
is( at($new, 'globex', q{SELECT status, response, expires_at FROM idempotency.claim('globex/pay', 'failed')}),
	'402|{"no" :  1}|', 'a final failure replays');
is(at($new, 'globex', q{SELECT idempotency.once_many('globex/in', ARRAY['m2', 'm3', 'm1'])}), 'm3', 'messages in the inbox are duplicates');
is(answer('globex', 'prepared') && charges('globex', 'prepared'), 1, 'a prepared operation is stored');

# ----------------------------------------------------------------
# Final checks
# ----------------------------------------------------------------

at($new, 'globex', join '; ', note_event('f', 'f3'), note_event('l', 'l2'), note_event('o', 'o3'));
foreach my $node (@shard{qw(shard4 shard1 shard2 shard3)}) # the new shard first
{
	consume_all($node, $router);
}
is( $router->safe_psql('ledger', q{SELECT aggregate, string_agg(payload, ' ' ORDER BY place) FROM entry
		WHERE aggregate IN ('globex/f', 'globex/l', 'globex/o') GROUP BY aggregate ORDER BY aggregate}),
	qq{globex/f|"read" "f1" "f2" "f3"\nglobex/l|"late" "l2"\nglobex/o|"o0" "o1" "o2" "o3"}, 'events are booked once and in order');

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
		0, "$name: the handler received each charge once");
}
is("@twice", '', 'each operation has had its effect once, on one shard');
is("@answers", '', 'each operation has one response, that of its effect');
is($total, scalar(keys %$heard), 'no acknowledged operation is lost');
is( $router->safe_psql('ledger', q{SELECT count(*) - count(DISTINCT aggregate) FROM entry WHERE payload LIKE '_"id"%'}), 0,
	'no charge was booked twice');
is( $router->safe_psql('ledger', q{SELECT count(*) FROM entry WHERE payload LIKE '_"id"%'}), scalar(keys %charge), 'every charge was booked');
note "$total operations, acknowledged " . eval { my $n = 0; $n += $_ foreach map { values %$_ } values %$heard; $n } . ' times';

# in_background runs a function in a process, and returns the process ID.
sub in_background
{
	my ($what) = @_;
	my $pid = fork // die "fork: $!";
	POSIX::_exit(($what->())[0]) unless $pid;
	return $pid;
}

$_->stop foreach $router, values %shard;
done_testing();
