# 023_outbox_crash.pl
#
# Proves that publishing and delivery survive crashes: kill -9 of backends and of the
# postmaster, and an immediate stop, in each phase of publish(), fetch(), ack(), nack()
# and others. Committed events are delivered once, uncommitted ones never. A committed
# batch keeps its lease; an uncommitted batch is delivered at once. No sequence number
# that a session was shown is repeated. Events of a prepared transaction are held back
# across crashes until it ends, and no other events. Last, publishing and consuming
# clients are interrupted: each acknowledged publish has its effect.
#
# The script takes half a minute, because the server recovers from each kind of crash in
# each state of a batch.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Cluster.pm disables restart_after_crash, which one test needs. Only commits flush the
# WAL.
my $node = new_node('main', conf => q{
restart_after_crash = on
max_prepared_transactions = 10
max_connections = 60
wal_writer_delay = '10s'
checkpoint_timeout = '1h'
shared_preload_libraries = 'idempotency'
});
outbox_tools($node);

# An index that is updated before the one that delivery reads, and blocks. A publisher
# has drawn its sequence number then, but its row is not yet visible to other sessions.
$node->safe_psql('postgres', q{
	CREATE FUNCTION linger(type text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
	BEGIN
		IF type = 'linger' THEN PERFORM pg_sleep(3600); END IF;
		RETURN type;
	END $$;
	CREATE INDEX linger ON idempotency.outbox (linger(type));
	ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_pkey;
	ALTER TABLE idempotency.outbox ADD CONSTRAINT outbox_pkey PRIMARY KEY (seq)});

# ----------------------------------------------------------------
# The phases
# ----------------------------------------------------------------

# Each phase has its own subscription and topic S with events 1 to 4. "does" is the SQL
# of the interrupted session. "left" is the state of the batch of two that it may have
# fetched: 'none', 'out', or 'over' (out until its lease expires). "given" are the
# events that are delivered then.
my $fetch = qq{SELECT max(batch) AS batch FROM idempotency.fetch('S', 2, lease => '1 hour') \\gset\n};
my $nack = q{SELECT idempotency.nack('S', :batch, id, 'no', '0') FROM idempotency.outbox WHERE aggregatetype = 'S' AND seq % 4 = 1; };
my $ack = q{SELECT idempotency.ack('S', :batch); };
my %phases = (
	'published, not committed' => { does => 'BEGIN; ' . publish(5, 'S'), given => '1 2 3 4' },
	'published in a savepoint' => { does => 'BEGIN; SAVEPOINT a; ' . publish(5, 'S') . 'RELEASE a', given => '1 2 3 4' },
	'published' => { does => publish(5, 'S'), given => '1 2 3 4 5' },
	'published, and another not yet' => { does => publish(5, 'S') . 'BEGIN; ' . publish(6, 'S'), given => '1 2 3 4 5' },
	'rolled back' => { does => 'BEGIN; ' . publish(5, 'S') . 'ROLLBACK', given => '1 2 3 4' },
	'rolled back to a savepoint' => {
		does => 'BEGIN; SAVEPOINT a; ' . publish(5, 'S') . 'ROLLBACK TO a; ' . publish(6, 'S') . 'COMMIT', given => '1 2 3 4 6' },
	'fetched, not committed' => { does => "BEGIN; $fetch", given => '1 2 3 4' },
	'fetched' => { does => $fetch, left => 'out', given => '3 4' },
	'fetched, and over' => { does => $fetch, left => 'over', given => '1x2 2x2 3 4' },
	'acknowledged, not committed' => { does => "$fetch BEGIN; $ack", left => 'out', given => '3 4' },
	'acknowledged' => { does => "$fetch $ack", given => '3 4' },
	'fetched and acknowledged, not committed' => { does => "BEGIN; $fetch $ack", given => '1 2 3 4' },
	'fetched and acknowledged' => { does => "BEGIN; $fetch $ack COMMIT", given => '3 4' },
	'nacked, not committed' => { does => "$fetch BEGIN; $nack", left => 'over', given => '1x2 2x2 3 4' },
	'nacked' => { does => "$fetch $nack", left => 'over', given => '2x2 1x2 3 4' },
	'nacked, acknowledged, not committed' => { does => "$fetch $nack BEGIN; $ack", left => 'out', given => '1x2 3 4' },
	'nacked and acknowledged' => { does => "$fetch BEGIN; $nack $ack COMMIT", given => '1x2 3 4' },
	'retried, not committed' => { does => "$fetch $nack $ack BEGIN; $fetch $ack", given => '1x2 3 4' },
	'retried' => { does => "$fetch $nack $ack $fetch $ack", given => '4' },
	'dead' => { does => "$fetch $nack", options => ', max_attempts => 1', left => 'over', given => '2x2 3 4', dead => 1 },
	'redriven, not committed' => {
		does => "$fetch $nack $ack BEGIN; SELECT idempotency.redrive('S')", options => ', max_attempts => 1', given => '3 4', dead => 1 },
	'redriven' => { does => "$fetch $nack $ack SELECT idempotency.redrive('S')", options => ', max_attempts => 1', given => '1 3 4' },
	'given back, not committed' => { does => "$fetch BEGIN; SELECT idempotency.nack('S', :batch, NULL, 'later')", left => 'out', given => '3 4' },
	'given back' => { does => "$fetch SELECT idempotency.nack('S', :batch, NULL, 'later')", given => '1 2 3 4' },
	'extended, not committed' => { does => "$fetch BEGIN; SELECT idempotency.extend('S', :batch, '3 days')", left => 'out', given => '3 4', days => 0 },
	'extended' => { does => "$fetch SELECT idempotency.extend('S', :batch, '3 days')", left => 'out', given => '3 4', days => 2 },
	'unsubscribed, not committed' => { does => "BEGIN; SELECT idempotency.unsubscribe('S')", given => '1 2 3 4' },
	'subscribed again, not committed' => {
		does => "BEGIN; SELECT idempotency.unsubscribe('S'), idempotency.subscribe('S', ARRAY['*'])", given => '1 2 3 4' },
	'in the middle of publish' => {
		does => "\\echo waits\n" . q{SELECT idempotency.publish('S', '{"n": 5}', type => 'linger');}, waits => 1, given => '1 2 3 4' },
	'waiting' => { does => "$fetch $ack $fetch $ack \\echo waits\nSELECT idempotency.fetch('S', wait => '10 min');", waits => 1, given => '' });

# sql_of returns the SQL of a phase for a subscription.
sub sql_of
{
	my ($phase, $name) = @_;
	return $phases{$phase}->{does} =~ s/'S'/'$name'/gr;
}

# begin creates the subscriptions and their events.
sub begin
{
	my (%name) = @_;
	my $sql = '';

	foreach my $phase (sort keys %name)
	{
		my $options = $phases{$phase}->{options} // '';
		$sql .= "SELECT idempotency.subscribe('$name{$phase}', ARRAY['$name{$phase}']$options); ";
	}
	# The first event of each subscription gets a number by which $nack finds it.
	$sql .= q{SELECT setval('idempotency.outbox_seq', (last_value + 4) / 4 * 4) FROM idempotency.outbox_seq; };
	$sql .= join '', map { my $phase = $_; map { publish($_, $name{$phase}) } 1 .. 4 } sort keys %name;
	$node->safe_psql('postgres', $sql);
	return;
}

# The greatest sequence number that any session was shown.
my $greatest = 0;

# record_numbers stores the sequence numbers that are in use, and their events.
sub record_numbers
{
	my $seq = $node->safe_psql('postgres', 'SELECT greatest(max(o.seq), max(p.top)) FROM idempotency.outbox AS o, idempotency.position AS p');
	$greatest = $seq if $seq > $greatest;
	return;
}

# numbers_advance checks that no sequence number is repeated.
sub numbers_advance
{
	my ($name) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $seq = $node->safe_psql('postgres', q{SET lock_timeout = '30s'; } . publish(0, 'number') . 'SELECT max(seq) FROM idempotency.outbox') =~ s/.*\n//sr;

	cmp_ok($seq, '>', $greatest, "$name: no sequence number is repeated");
	$greatest = $seq;
	return;
}

# drain_sql is the SQL that drains a subscription, and shows what drained() returns.
sub drain_sql
{
	my ($name, $max, $label) = @_;
	return qq{TRUNCATE got; CALL drain('$name', $max);
		SELECT '$name', '$label', string_agg(n || CASE WHEN attempt > 1 THEN 'x' || attempt ELSE '' END, ' ' ORDER BY place) FROM got;\n};
}

# state_of returns what the phases left behind, as a hash of subscription and label: one session
# looks at all of them, because each new one plans the queries of fetch().
sub state_of
{
	my (%name) = @_;
	my (%is, $sql);
	foreach my $phase (sort keys %name)
	{
		my $name = $name{$phase};
		my $left = $phases{$phase}->{left} // 'none';
		$sql .= qq{SELECT '$name', 'out', coalesce(batch, 0), extract(day FROM leased_until - now())::int
			FROM idempotency.position WHERE subscription = '$name';\n};
		$sql .= "SELECT '$name', 'fetched', count(*) FROM idempotency.fetch('$name');\n" if $left ne 'none';
		$sql .= "SELECT idempotency.ack('$name', batch) FROM idempotency.position WHERE subscription = '$name';\n" if $left eq 'out';
		$sql .= "UPDATE idempotency.position SET leased_until = leased_at + interval '1 us' WHERE subscription = '$name';\n" if $left eq 'over';
		$sql .= drain_sql($name, 100, 'given')
		  . "SELECT '$name', 'parked', count(*) FROM idempotency.parked WHERE subscription = '$name' AND dead_at IS NULL;\n"
		  . "SELECT '$name', 'dead', idempotency.redrive('$name');\n"
		  . drain_sql($name, 100, 'redriven') . publish(9, $name) . drain_sql($name, 1, 'new');
	}
	foreach (split /\n/, $node->safe_psql('postgres', $sql))
	{
		my ($name, $label, @values) = split /\|/, $_, -1;
		$is{$name}{$label} = \@values if defined $label;
	}
	return %is;
}

# check_phase checks the state that a phase left behind.
sub check_phase
{
	my ($phase, $state, $when) = @_;
	my %is = (left => 'none', %{ $phases{$phase} });
	my ($out, $days) = @{ $state->{out} };

	if ($is{left} eq 'none')
	{
		is($out, 0, "$when: no batch is unacknowledged");
	}
	else
	{
		isnt($out, 0, "$when: a batch is out");
		is("@{ $state->{fetched} }", 0, "$when: the batch is unacknowledged");
		is($days, $is{days}, "$when: the lease of the batch is unchanged") if defined $is{days};
	}
	is("@{ $state->{given} }", $is{given}, "$when: the events that are delivered next");
	is("@{ $state->{parked} } @{ $state->{dead} }", '0 ' . ($is{dead} // 0), "$when: parked events and dead letters");
	is("@{ $state->{redriven} }", $is{dead} // '', "$when: redriven events are delivered");
	is("@{ $state->{new} }", '9', "$when: a new event is delivered");
	return;
}

# ----------------------------------------------------------------
# Crashes, with a session in each phase
# ----------------------------------------------------------------

# Events of two prepared transactions are held back across all crashes.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('before', ARRAY['prepared']); BEGIN; } . publish(1, 'prepared') . q{PREPARE TRANSACTION 'commit'; }
	. 'BEGIN; SAVEPOINT a; ' . publish(2, 'prepared') . q{PREPARE TRANSACTION 'roll back'});

my %crashes = (
	'kill -9 of each backend' => sub {
		my $started = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');
		kill9($node, @_);
		is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'), $started, 'the server has recovered by itself');
	},
	'kill -9 of the postmaster' => sub { restart_after_kill9($node) },
	'immediate stop' => sub { $node->stop('immediate'); $node->start });

my @prepared = ('before');
foreach my $crash (sort keys %crashes)
{
	my %name = map { $_ => "$crash, $_" } keys %phases;
	my %session = map { $_ => open_session($node) } sort keys %phases;
	my @pids = map { backend_pid($session{$_}) } sort keys %phases;

	begin(%name);
	push @prepared, "after $crash";
	$node->safe_psql('postgres', "SELECT idempotency.subscribe('after $crash', ARRAY['prepared'])");

	# Phases that do not end by themselves come last.
	foreach my $phase (sort { ($phases{$a}->{waits} // 0) <=> ($phases{$b}->{waits} // 0) } sort keys %phases)
	{
		my $sql = sql_of($phase, $name{$phase});
		if ($phases{$phase}->{waits}) { $session{$phase}->query_until(qr/waits/, "$sql\n") }
		else { $session{$phase}->query_safe($sql) }
	}
	$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'}) or die 'no session is inside publish';
	$node->safe_psql('postgres', publish(3, 'prepared'));
	is_deeply(drained($node, 'postgres', 1, @prepared), { map { $_ => '3' } @prepared }, "$crash: other events are not held back before the crash");
	record_numbers();
	$crashes{$crash}->(@pids);
	wait_for_end($session{$_}) foreach sort keys %session;

	numbers_advance($crash);
	my %state = state_of(%name);
	check_phase($_, $state{ $name{$_} }, "$crash, $_") foreach sort keys %phases;
	$node->safe_psql('postgres', publish(4, 'prepared'));
	is_deeply(drained($node, 'postgres', 1, @prepared), { map { $_ => '4' } @prepared }, "$crash: other events are not held back after the crash");
}

push @prepared, 'in the end';
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('in the end', ARRAY['prepared'])});
$node->safe_psql('postgres', q{COMMIT PREPARED 'commit'});
$node->safe_psql('postgres', q{ROLLBACK PREPARED 'roll back'});
is_deeply(drained($node, 'postgres', 1, @prepared), { map { $_ => '1' } @prepared }, 'events of a prepared transaction are delivered after COMMIT PREPARED');
$node->safe_psql('postgres', publish(5, 'prepared'));
is_deeply(drained($node, 'postgres', 1, @prepared), { map { $_ => '5' } @prepared }, 'prepared events are delivered once, and rolled back ones are not');

# ----------------------------------------------------------------
# Sequence numbers, whatever part of the WAL a crash loses
# ----------------------------------------------------------------

# After a checkpoint the sequence logs its next value. The pages that are written next
# are already in the WAL. Otherwise their full-page images would fill WAL pages, which
# are written at once.
$node->safe_psql('postgres', q{SELECT idempotency.subscribe('log', ARRAY['log'])});
foreach my $how ('not committed', 'committed asynchronously', 'committed asynchronously, and read so', 'committed asynchronously, and read')
{
	my ($publisher, $reader) = map { open_session($node) } 1 .. 2;
	$node->safe_psql('postgres', publish(1, 'log'));
	drained($node, 'postgres', 100, 'log');
	$reader->query_safe(q{SELECT count(*) FROM idempotency.fetch('log')});
	$node->safe_psql('postgres', q{CHECKPOINT; UPDATE idempotency.position SET version = version + 1;
		INSERT INTO idempotency.outbox (seq, txid, published_at, id, bucket, bytes, aggregatetype)
			SELECT -seq, txid, published_at, id, bucket, bytes, aggregatetype FROM idempotency.outbox WHERE aggregatetype = 'log'});
	$publisher->query_safe($how =~ /^not/ ? 'BEGIN' : 'SET synchronous_commit = off');
	$publisher->query_safe(publish(3, 'log'));
	$reader->query_safe('SET synchronous_commit = off') if $how =~ /so$/;
	my $given = $how =~ /read/ ? $reader->query_safe(q{SELECT string_agg(payload->>'n', ' ') FROM idempotency.fetch('log', lease => '1 us')}) : '';
	is($given, $how =~ /read/ ? '3' : '', "$how: the events that were read");
	record_numbers() if $how =~ /read$/;
	$node->stop('immediate');
	$node->start;
	wait_for_end($_) foreach $publisher, $reader;

	my $there = $node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.outbox WHERE aggregatetype = 'log' AND payload->>'n' = '3'});
	is($there, 1, "$how: an event that was read under synchronous_commit survives") if $how =~ /read$/;
	note("$how: " . ($there ? 'kept' : 'lost'));
	is($node->safe_psql('postgres', 'SELECT max(top) <= (SELECT last_value FROM idempotency.outbox_seq) FROM idempotency.position'), 't',
		"$how: no position is ahead of the sequence");
	numbers_advance($how) if $how =~ /read$/;
	$node->safe_psql('postgres', publish(4, 'log'));
	is(drained($node, 'postgres', 100, 'log')->{log} =~ s/^3x2/3/r, $there ? '3 4' : '4', "$how: the next event is delivered");
	$node->safe_psql('postgres', q{DELETE FROM idempotency.outbox WHERE aggregatetype = 'log'});
}

# ----------------------------------------------------------------
# Interrupted clients
# ----------------------------------------------------------------

# A consumer writes its effects in the transaction that acknowledges the batch; odd
# batches are also fetched in it.
$node->safe_psql('postgres', q{
	CREATE TABLE effect (subscription text, n int);
	CREATE PROCEDURE consume(name text) LANGUAGE plpgsql AS $$
	DECLARE
		given int8;
		events int[];
	BEGIN
		FOR i IN 1 .. 1000000 LOOP
			SELECT max(batch), array_agg((payload->>'n')::int) INTO given, events
			FROM idempotency.fetch(name, 1 + i % 7, '100 ms', '10 s');
			IF i % 2 = 0 THEN COMMIT; END IF;
			CONTINUE WHEN given IS NULL;
			INSERT INTO effect SELECT name, unnest(events);
			PERFORM idempotency.ack(name, given);
			COMMIT;
		END LOOP;
	END $$;
	SELECT idempotency.subscribe('load a', ARRAY['load']), idempotency.subscribe('load b', ARRAY['load'])});
$node->append_conf('postgresql.conf', 'log_statement = none');

# Publishers log each acknowledged publish. By its number an event is rolled back (ends
# in 0), published in savepoints one of which is rolled back (5), or committed
# asynchronously (7), so that its acknowledgement guarantees nothing.
my $dir = PostgreSQL::Test::Utils::tempdir;
sub publisher
{
	my ($file, $first) = @_;
	my $sql = '';

	foreach my $n ($first .. $first + 19_999)
	{
		my $event = publish($n, 'load') =~ s/; $/ \\g \/dev\/null\n/r;
		my $lost = publish(-$n, 'load') =~ s/; $/ \\g \/dev\/null\n/r;
		$sql .= $n % 10 == 0 ? "BEGIN;\n" . publish(-$n, 'load') =~ s/; $/ \\g \/dev\/null\n/r . "ROLLBACK;\n"
		  : $n % 10 == 5 ? "BEGIN;\nSAVEPOINT a;\n${lost}ROLLBACK TO a;\nSAVEPOINT b;\n${event}COMMIT;\n\\echo $n\n"
		  : $n % 10 == 7 ? "SET synchronous_commit = off;\n${event}RESET synchronous_commit;\n"
		  : "$event\\echo $n\n";
	}
	append_to_file($file, $sql);
	return;
}

my $first = 1;
foreach my $crash (sort keys %crashes)
{
	$node->restart;
	my (@clients, @output);
	foreach my $i (0 .. 2)
	{
		publisher("$dir/publisher$first", $first);
		push @clients, IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-f', "$dir/publisher$first", $node->connstr('postgres') ],
			'>', \$output[$i], '2>', \my $ignored);
		$first += 20_000;
	}
	push @clients, map { IPC::Run::start([ 'psql', '-XAtq', '-c', "CALL consume('load $_')", $node->connstr('postgres') ],
			'>', \my $nothing, '2>', \my $ignored) } 'a', 'a', 'b';
	my $events = soak(500, 1500);
	$node->poll_query_until('postgres', qq{SELECT (SELECT count(*) FROM effect) >= $events
		AND (SELECT count(*) FROM idempotency.outbox WHERE aggregatetype = 'load') >= 800}) or die 'no progress';
	my @pids = split /\n/, $node->safe_psql('postgres', q{SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'
		AND pid <> pg_backend_pid() ORDER BY pid LIMIT 1});
	$crashes{$crash}->(@pids);
	$_->finish foreach @clients;

	# New consumers continue.
	record_numbers();
	numbers_advance("$crash under load");
	$node->safe_psql('postgres', q{UPDATE idempotency.position SET leased_until = leased_at + interval '1 us' WHERE leased_until IS NOT NULL;
		TRUNCATE got; CALL drain('load a'); CALL drain('load b'); INSERT INTO effect SELECT subscription, n FROM got});
	my $answered = join ', ', map { "($_)" } map { split /\n/ } @output;
	is( $node->safe_psql('postgres', qq{
			WITH answered (n) AS (VALUES $answered),
				event AS (SELECT (payload->>'n')::int AS n FROM idempotency.outbox WHERE aggregatetype = 'load'),
				times AS (SELECT n, subscription, count(f.n) AS times
					FROM event CROSS JOIN (VALUES ('load a'), ('load b')) AS s (subscription)
						LEFT JOIN effect AS f USING (subscription, n) GROUP BY n, subscription)
			SELECT (SELECT count(*) FROM (SELECT n FROM answered EXCEPT SELECT n FROM event) AS lost),
				(SELECT count(*) FROM event WHERE n <= 0 OR n % 10 = 0),
				(SELECT count(*) FROM times WHERE times <> 1),
				(SELECT count(*) FROM (SELECT n FROM effect EXCEPT SELECT n FROM event) AS invented),
				(SELECT count(*) > 600 FROM answered)}),
		'0|0|0|0|t', "$crash under load: each acknowledged publish has its effect once, and no other event has one");
	note("$crash: " . scalar(split /, /, $answered) . ' publishes acknowledged');
	$node->safe_psql('postgres', q{TRUNCATE effect; DELETE FROM idempotency.outbox});
}

$node->stop;
done_testing();
