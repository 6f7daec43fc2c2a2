# 018_wakeup.pl
#
# Proves that a session that waits for the owner of a lease returns as soon as the end
# of the lease is committed, and not before. With the library preloaded, every way to
# end a lease wakes the session; otherwise the session polls within about a second. All
# ways to claim wait alike. When a key is released, one of many waiting sessions gets
# it, and the others its result. A waiting session holds no lock, shows its wait event,
# and keeps waiting when the same key ends in another database. It can be cancelled at
# any time, and the session stays usable.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my ($node, $how);

# lease creates a key that another session has leased, and returns the token.
sub lease
{
	my ($key, $length) = @_;
	return $node->safe_psql('postgres',
		sprintf q{SELECT token FROM idempotency.claim('w', '%s', lease => '%s')}, $key, $length // '1 hour');
}

# begin_wait has a session run SQL that waits, and returns once it does.
sub begin_wait
{
	my ($session, $pid, $sql) = @_;
	$session->query_until(qr/begins/, "\\echo begins\n$sql;\n");
	$node->poll_query_until('postgres', "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE pid = $pid")
	  or die "no session waits in: $sql";
	return;
}

# answer returns what a session has received since it began to wait.
sub answer
{
	my ($session) = @_;
	my $answer = $session->query_safe(q{\echo over});
	$answer =~ s/^(begins\n)?(.*?)\n?over$/$2/s;
	return $answer;
}

# answered runs SQL that ends a lease. It checks what a waiting session returns, and
# that it returns within ten seconds. Returns the time of the result.
sub answered
{
	my ($session, $sql, $expected, $name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my ($done) = $node->safe_psql('postgres', "$sql;\nSELECT 'at ' || clock_timestamp()") =~ /^at (.*)$/m;
	my ($outcome, $when) = split /\|/, answer($session);

	is($outcome, $expected, "$name: the result of the wait");
	cmp_ok($node->safe_psql('postgres', "SELECT extract(epoch FROM timestamptz '$when' - '$done')"), '<', 10, "$name: the time of the result");
	return $when;
}

# stopped checks the error that ended a wait.
sub stopped
{
	my ($session, $sqlstate, $name, $like) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	return session_fails($session, q{\echo over}, $sqlstate, $name, $like);
}

# ----------------------------------------------------------------
# The tests, with the library preloaded and without
# ----------------------------------------------------------------

foreach my $preload ('idempotency', '')
{
	$how = $preload ? 'preloaded' : 'not preloaded';
	$node = new_node('server' . length $preload,
		conf => "shared_preload_libraries = '$preload'\nmax_connections = 40\nmax_prepared_transactions = 5\nlog_statement = none\n");
	$node->safe_psql('postgres', q{
		CREATE TABLE effect (by text);
		CREATE TABLE answer (number int, outcome text, failed boolean, recovery_point text, said timestamptz);
		CREATE TABLE ended (number int, at timestamptz);
		CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS $$ SELECT '"handled"'::json $$;

		-- Waits for the keys 1 to n, one after the other.
		CREATE PROCEDURE wait_for_all(n int) LANGUAGE plpgsql AS $$
		DECLARE
			op idempotency.operation;
		BEGIN
			FOR i IN 1 .. n LOOP
				PERFORM set_config('application_name', 'waits for ' || i, false);
				COMMIT;
				op := idempotency.try_claim('w', i::text, lease => '1 hour', wait => '1 min');
				INSERT INTO answer VALUES (i, op.outcome, op.failed, op.recovery_point, clock_timestamp());
				COMMIT;
			END LOOP;
		END $$;

		-- Ends one lease after the other, each in a different way, as soon as a session
		-- waits for it.
		CREATE PROCEDURE end_all(tokens bigint[]) LANGUAGE plpgsql AS $$
		BEGIN
			FOR i IN 1 .. cardinality(tokens) LOOP
				LOOP
					PERFORM pg_stat_clear_snapshot();
					EXIT WHEN EXISTS (SELECT FROM pg_stat_activity
						WHERE application_name = 'waits for ' || i AND wait_event_type = 'Extension');
					PERFORM pg_sleep(0.005);
				END LOOP;
				CASE i % 7
					WHEN 0 THEN PERFORM idempotency.complete('w', i::text, token => tokens[i]);
					WHEN 1 THEN PERFORM idempotency.fail('w', i::text, '1', 402, token => tokens[i]);
					WHEN 2 THEN PERFORM idempotency.release('w', i::text, tokens[i]);
					WHEN 3 THEN PERFORM idempotency.forget('w', i::text);
					WHEN 4 THEN
						PERFORM idempotency.checkpoint('w', i::text, tokens[i], 'here');
						PERFORM idempotency.release('w', i::text, tokens[i]);
					WHEN 5 THEN
						BEGIN
							PERFORM idempotency.complete('w', i::text, token => tokens[i]);
						EXCEPTION WHEN division_by_zero THEN
							RAISE 'what for?';
						END;
					WHEN 6 THEN
						BEGIN
							PERFORM idempotency.release('w', i::text, tokens[i]);
							PERFORM 1 / 0;
						EXCEPTION WHEN division_by_zero THEN
							PERFORM idempotency.complete('w', i::text, token => tokens[i]);
						END;
				END CASE;
				COMMIT;
				INSERT INTO ended VALUES (i, clock_timestamp());
				COMMIT;
			END LOOP;
		END $$});

	# Three times seven waits. Each begins just before the wakeup, so a wait without
	# wakeup sleeps for the full second.
	my $tokens = join ', ', map { lease($_) } 1 .. 21;
	my $waiter = open_session($node);
	$waiter->query_until(qr/begins/, "\\echo begins\nCALL wait_for_all(21);\n");
	$node->safe_psql('postgres', "SET statement_timeout = '120s'; CALL end_all(ARRAY[$tokens])");
	answer($waiter);
	is($node->safe_psql('postgres', q{SELECT string_agg(concat_ws(' ', outcome, CASE WHEN failed THEN 'failed' END, recovery_point), ', ' ORDER BY number)
			FROM answer}),
		join(', ', ('replayed failed', 'claimed', 'claimed', 'taken_over here', 'replayed', 'replayed', 'replayed') x 3),
		"$how: twenty-one waits in a row return their results");
	my $took = $node->safe_psql('postgres', q{SELECT string_agg(best::numeric(9, 4)::text, ' ' ORDER BY way) FROM (
			SELECT number % 7 AS way, min(extract(epoch FROM said - at)) AS best
			FROM answer JOIN ended USING (number) GROUP BY way) AS w});
	note("$how: the best of three of each way took $took s");
	is(scalar(grep { $_ < 0.5 } split / /, $took), 7, "$how: each way to end a lease wakes") if $preload;
	$waiter->quit;

	# A session does not return because of uncommitted changes, a heartbeat, or the end
	# of another lease. COMMIT PREPARED and the expiry of a lease wake no session.
	my $look = q{SELECT outcome, clock_timestamp() FROM idempotency.try_claim('w', '%s', lease => '1 hour', wait => '%s')};
	$waiter = open_session($node);
	my $waiter_pid = backend_pid($waiter);
	my $token = lease('uncommitted');
	my $other = lease('another');
	my $complete = "SELECT idempotency.complete('w', 'uncommitted', '1', token => $token)";
	begin_wait($waiter, $waiter_pid, sprintf($look, 'uncommitted', '3 s'));
	$node->safe_psql('postgres', $_) foreach "BEGIN; $complete; ROLLBACK", "BEGIN; SAVEPOINT a; $complete; ROLLBACK TO a; ROLLBACK",
		"SELECT idempotency.renew('w', 'uncommitted', $token, '1 hour')",
		"SELECT idempotency.complete('w', 'another', '1', token => $other)";
	like(answer($waiter), qr/^in_progress\|/, "$how: a rollback, a heartbeat and another key end no wait");

	begin_wait($waiter, $waiter_pid, sprintf($look, 'uncommitted', '1 min'));
	$node->safe_psql('postgres', "BEGIN; $complete; PREPARE TRANSACTION 'p'");
	my $still = $node->safe_psql('postgres', 'SELECT pg_sleep(1.2); SELECT clock_timestamp()') =~ s/^\n//r;
	my $when = answered($waiter, q{COMMIT PREPARED 'p'}, 'replayed', "$how: COMMIT PREPARED");
	is($node->safe_psql('postgres', "SELECT timestamptz '$when' > '$still'"), 't', "$how: the wait does not end at PREPARE");

	lease('short', '2 s');
	begin_wait($waiter, $waiter_pid, sprintf($look, 'short', '1 min'));
	answered($waiter, 'SELECT pg_sleep(2)', 'taken_over', "$how: the lease expires");
	$waiter->quit;

	# All ways to wait.
	my %calls = (
		q{SELECT outcome FROM idempotency.claim('w', 'KEY', wait => '1 min')} => 'replayed',
		q{SELECT outcome FROM idempotency.claim('w', 'KEY', '{"a": 1}', lease => '1 hour', wait => '1 min')} => 'replayed',
		q{SELECT outcome FROM idempotency.try_claim('w', 'KEY', wait => '1 min')} => 'replayed',
		q{SET idempotency.wait = '1min'; SELECT outcome FROM idempotency.claim('w', 'KEY')} => 'replayed',
		q{SET idempotency.wait = '1min'; SELECT idempotency.once('w', 'KEY')} => 'f',
		q{SELECT outcome FROM idempotency.run('w', 'KEY', '{"a": 1}', 'handler(json)', wait => '1 min')} => 'replayed',
		q{SAVEPOINT a; SELECT outcome FROM idempotency.claim('w', 'KEY', wait => '1 min'); RELEASE a} => 'replayed');
	my $number = 0;
	foreach my $call (sort keys %calls)
	{
		my $key = 'way ' . ++$number;
		my $token = lease($key);
		my $session = open_session($node);
		my $pid = backend_pid($session);
		my $sql = $call =~ s/KEY/$key/r;
		begin_wait($session, $pid, $sql =~ /^SAVEPOINT/ ? "BEGIN; $sql; COMMIT" : $sql);

		is($node->safe_psql('postgres', qq{SELECT count(*) FROM pg_locks WHERE pid = $pid AND (locktype NOT IN ('relation', 'virtualxid') OR relation IN ('idempotency.key'::regclass, 'idempotency.key_pkey'::regclass))}),
			0, "$how: $call: a waiting session holds no lock on keys or tables");
		is($node->safe_psql('postgres', qq{SELECT wait_event FROM pg_stat_activity WHERE pid = $pid}),
			$node->pg_version->major >= 17 ? 'IdempotencyLease' : 'Extension', "$how: $call: a waiting session shows its wait event");
		$node->safe_psql('postgres', "SELECT idempotency.complete('w', '$key', '1', token => $token)");
		is(answer($session), $calls{$call}, "$how: $call: the result of the wait");
		$session->quit;
	}

	# Twenty sessions wait for one key that is released: one of them gets it.
	my $script = PostgreSQL::Test::Utils::tempdir . "/load.sql";
	append_to_file($script, <<'SQL') unless -e $script;
SELECT replayed::int AS replayed, coalesce(token, 0) AS token FROM idempotency.claim('w', 'load', lease => '1 hour', wait => '2 min') \gset
\if :replayed
\else
BEGIN;
INSERT INTO effect VALUES (:token);
SELECT idempotency.complete('w', 'load', '"done"', token => :token);
COMMIT;
\endif
SQL
	$token = lease('load');
	my $output = '';
	my $load = IPC::Run::start([ 'pgbench', '-n', '-c', '20', '-t', '1', '-f', $script, $node->connstr('postgres') . ' application_name=load' ], '>&', \$output);
	$node->poll_query_until('postgres', q{SELECT count(*) = 20 FROM pg_stat_activity
		WHERE application_name = 'load' AND wait_event_type = 'Extension'}) or die "the sessions do not wait: $output";
	$node->safe_psql('postgres', "SELECT idempotency.release('w', 'load', $token)");
	ok($load->finish, "$how: all sessions that wait for a released key return");
	like($output, qr{transactions actually processed: 20/20}, "$how: twenty of twenty") or diag($output);
	is($node->safe_psql('postgres', "SELECT count(*), count(*) FILTER (WHERE by::bigint > $token) FROM effect"), '1|1', "$how: one session did the operation");

	# The same key in another database.
	$node->safe_psql('postgres', 'CREATE DATABASE other');
	$node->safe_psql('other', q{CREATE EXTENSION idempotency; SELECT idempotency.claim('w', 'namesake', lease => '1 hour')});
	$token = lease('namesake');
	my $session = open_session($node);
	my $pid = backend_pid($session);
	begin_wait($session, $pid, q{SELECT outcome, response FROM idempotency.try_claim('w', 'namesake', lease => '1 hour', wait => '5 s')});
	$node->safe_psql('other', q{SELECT idempotency.complete('w', 'namesake', '"the other one"', token => token) FROM idempotency.key});
	is(answer($session), 'in_progress|', "$how: the same key in another database ends no wait");

	# The end of the wait.
	$token = lease('ends');
	session_fails($session, q{SELECT idempotency.claim('w', 'ends', lease => '1 hour', wait => '50 ms')}, 'IK409', "$how: the wait times out",
		qr/^DETAIL:  Scope "w", key "ends"\.\n.*^HINT:  .*ends in 3(600|5\d\d) s\.$/ms);
	session_fails($session, q{SELECT idempotency.claim('w', 'ends', lease => '1 hour', wait => '0')}, 'IK409', "$how: without a wait",
		qr/^HINT:  .*ends in 3(600|5\d\d) s\.$/m);
	is($session->query_safe(q{SELECT outcome, retry_after BETWEEN 3000 AND 3600 FROM idempotency.try_claim('w', 'ends', lease => '1 hour', wait => '50 ms')}),
		'in_progress|t', "$how: try_claim returns in_progress");

	# lock_timeout applies to locks; this wait holds none.
	is($session->query_safe(q{SET lock_timeout = '10ms'; SELECT outcome FROM idempotency.try_claim('w', 'ends', lease => '1 hour', wait => '500 ms')}),
		'in_progress', "$how: lock_timeout does not end a wait for a lease");
	$session->query_safe('RESET lock_timeout');

	# A cancel in a transaction with a savepoint: everything before the savepoint is
	# kept, and the same session can wait and claim again.
	my $wait = q{SELECT outcome FROM idempotency.claim('w', 'ends', lease => '1 hour', wait => '2 min')};
	$session->query_safe(q{BEGIN; INSERT INTO effect VALUES ('before'); SELECT idempotency.claim('w', 'mine'); SAVEPOINT a});
	begin_wait($session, $pid, $wait);
	$node->safe_psql('postgres', "SELECT pg_cancel_backend($pid)");
	stopped($session, '57014', "$how: a cancel ends a wait", qr/canceling statement due to user request/);
	$session->query_safe(q{ROLLBACK TO a; SET LOCAL statement_timeout = '200ms'});
	session_fails($session, $wait, '57014', "$how: statement_timeout ends a wait", qr/canceling statement due to statement timeout/);
	$session->query_safe('ROLLBACK TO a');
	is($session->query_safe(q{DO $$ BEGIN
				PERFORM idempotency.claim('w', 'ends', lease => '1 hour', wait => '20 ms');
			EXCEPTION WHEN SQLSTATE 'IK409' THEN
				INSERT INTO effect VALUES ('caught');
			END $$; SELECT idempotency.current_key('w')}), 'mine', "$how: a block catches the end of a wait");
	begin_wait($session, $pid, $wait);
	$node->safe_psql('postgres', "SELECT idempotency.complete('w', 'ends', '1', token => $token)");
	is(answer($session), 'replayed', "$how: the session waits again and returns a result");
	is($session->query_safe(q{SELECT idempotency.complete('w', 'mine', '"kept"'); COMMIT; SELECT outcome FROM idempotency.claim('w', 'mine')}),
		qq("kept"\nreplayed), "$how: the claim from before the savepoint is completed");
	is($node->safe_psql('postgres', q{SELECT string_agg(by, ' ' ORDER BY by) FROM effect WHERE by !~ '^\d'}), 'before caught',
		"$how: the writes before and after are stored");

	# Two keys, one after the other, in one transaction.
	my @two = map { lease($_) } 'one', 'two';
	begin_wait($session, $pid, q{BEGIN; SELECT outcome FROM idempotency.claim('w', 'one', wait => '2 min');
		SELECT outcome FROM idempotency.claim('w', 'two', wait => '2 min'); COMMIT});
	$node->safe_psql('postgres', "SELECT idempotency.complete('w', 'one', token => $two[0])");
	$node->safe_psql('postgres', q{SELECT pg_sleep(0.1)});
	$node->safe_psql('postgres', "SELECT idempotency.complete('w', 'two', token => $two[1])");
	is(answer($session), "replayed\nreplayed", "$how: one wait after the other");

	# Termination during a transaction: nothing is left of it.
	$token = lease('terminated');
	$session->query_safe(q{BEGIN; INSERT INTO effect VALUES ('lost'); SELECT idempotency.claim('w', 'lost', lease => '1 hour')});
	begin_wait($session, $pid, q{SELECT idempotency.claim('w', 'terminated', wait => '2 min')});
	is($node->safe_psql('postgres', "SELECT pg_terminate_backend($pid, 60000)"), 't', "$how: termination ends a wait");
	eval { $session->{run}->finish };
	is($node->safe_psql('postgres', q{SELECT outcome, token IS NOT NULL FROM idempotency.claim('w', 'lost', lease => '1 hour');
			SELECT count(*) FROM effect WHERE by = 'lost'}), "claimed|t\n0", "$how: nothing is left of the terminated transaction");
	is($node->safe_psql('postgres', "SELECT idempotency.complete('w', 'terminated', '1', token => $token)"), '1', "$how: the owner continues");

	lease('at the end');
	$session = open_session($node);
	begin_wait($session, backend_pid($session), q{SELECT idempotency.claim('w', 'at the end', wait => '2 min')});
	ok($node->stop('fast'), "$how: a shutdown ends a wait");
	eval { $session->{run}->finish };
}
done_testing();
