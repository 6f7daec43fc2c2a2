# 025_outbox_storm.pl
#
# Proves the delivery guarantee of the outbox under combined load. Publishers commit,
# roll back, use savepoints, prepare their transactions, or keep them open. Consumers
# are late, fail, return batches, or disconnect. A client terminates random sessions
# while an administrator vacuums and reindexes, and redrives dead letters. Consumers follow
# docs/howto/events.md: after nack() they skip the later events of the aggregate, and they
# deduplicate with once(). Afterwards each committed event has had its effect exactly once in
# each subscription, and a rolled back one never. No acknowledged event was redelivered.
# Events of one aggregate, and of one transaction, had their effects in order of publishing.
# No open transaction held back events of another one.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use OutboxTest;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);

# Duration of the load, in seconds.
my $seconds = 10;
my $seed = 4711;
srand($seed);

my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
synchronous_commit = off
max_prepared_transactions = 10
max_connections = 40
log_statement = none
});
$node->safe_psql('postgres', q{
	CREATE TABLE aggregate (id int PRIMARY KEY, n int NOT NULL) WITH (fillfactor = 10);
	INSERT INTO aggregate SELECT i, 0 FROM generate_series(1, 12) AS i;

	-- Published events, written by the publishing transaction, and the effects in
	-- order.
	CREATE TABLE sent (place int8 GENERATED ALWAYS AS IDENTITY, id uuid, topic text, aggregate int, n int,
		poison boolean, kind text, txid xid8 DEFAULT pg_current_xact_id(), at timestamptz DEFAULT clock_timestamp());
	CREATE TABLE effect (place int8 GENERATED ALWAYS AS IDENTITY, subscription text, id uuid, at timestamptz DEFAULT clock_timestamp());

	-- Acknowledged events, written by the acknowledging transaction, and those
	-- redelivered nevertheless.
	CREATE TABLE done (subscription text, id uuid, PRIMARY KEY (subscription, id));
	CREATE TABLE again (subscription text, id uuid);

	-- Events that were dead letters, written by the transaction of the last nack().
	CREATE TABLE died (subscription text, id uuid);
	CREATE TABLE poisonous AS SELECT true AS yes;

	-- An index that is sometimes slow and is updated before the one that delivery
	-- reads. A publisher has drawn its sequence number then, but its row is not yet
	-- visible to others.
	CREATE FUNCTION linger(seq int8) RETURNS int8 LANGUAGE plpgsql IMMUTABLE AS $$
	BEGIN
		IF current_setting('application_name') LIKE 'load publisher%' AND random() < 0.05 THEN
			PERFORM pg_sleep(random() / 50);
		END IF;
		RETURN seq;
	END $$;
	CREATE INDEX linger ON idempotency.outbox (linger(seq));
	ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_pkey;
	ALTER TABLE idempotency.outbox ADD CONSTRAINT outbox_pkey PRIMARY KEY (seq);

	-- Sequences also count transactions that roll back.
	CREATE FUNCTION tally(what text) RETURNS int8 LANGUAGE sql AS $$ SELECT nextval('tally_' || what) $$;

	-- Publishes an event; with an aggregate, after all earlier events of that
	-- aggregate.
	CREATE FUNCTION send(kind text, about int, poison boolean DEFAULT false) RETURNS void LANGUAGE plpgsql AS $$
	DECLARE
		number int;
		event uuid;
		topic text := CASE WHEN about IS NULL THEN 'single' ELSE 'aggregate.' || about END;
	BEGIN
		UPDATE aggregate SET n = aggregate.n + 1 WHERE id = about RETURNING aggregate.n INTO number;
		event := idempotency.publish(topic, json_build_object('poison', poison), about::text);
		INSERT INTO sent (id, topic, aggregate, n, poison, kind) VALUES (event, topic, about, number, poison, kind);
	END $$;

	CREATE PROCEDURE publish(seed float8, until timestamptz) LANGUAGE plpgsql AS $$
	DECLARE
		about int;
		dice float8;
	BEGIN
		PERFORM setseed(seed);
		WHILE clock_timestamp() < until LOOP
			about := 1 + random() * 9;
			dice := random();
			IF dice < 0.3 THEN
				PERFORM send('plain', about, random() < 0.03);
			ELSIF dice < 0.5 THEN
				PERFORM send('single', NULL, random() < 0.03) FROM generate_series(1, 3);
			ELSIF dice < 0.65 THEN
				PERFORM send('lost', CASE WHEN dice < 0.6 THEN about END);
				PERFORM tally('rollbacks');
				ROLLBACK;
			ELSIF dice < 0.8 THEN
				PERFORM send('savepoint', about);
				BEGIN
					PERFORM send('lost', about);
					PERFORM send('lost', NULL);
					PERFORM tally('savepoints');
					RAISE division_by_zero;
				EXCEPTION WHEN division_by_zero THEN NULL;
				END;
				BEGIN
					PERFORM send('savepoint', about);
					PERFORM send('savepoint', NULL);
				EXCEPTION WHEN division_by_zero THEN NULL;
				END;
			ELSIF dice < 0.9 THEN
				PERFORM idempotency.claim('load', gen_random_uuid()::text), send('claimed', about),
					idempotency.complete('load', idempotency.current_key('load'));
			ELSE
				PERFORM send('slow', about), send('slow', NULL), pg_sleep(random() / 10);
			END IF;
			COMMIT;
			PERFORM pg_sleep(random() / 200);
		END LOOP;
	END $$;

	-- The effect of one event, unless it is a duplicate.
	CREATE FUNCTION handle(name text, event uuid) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		IF idempotency.once(name, event::text) THEN
			INSERT INTO effect (subscription, id) VALUES (name, event);
		ELSE
			PERFORM tally('duplicates');
		END IF;
	END $$;

	-- Whether this consumer still owns the batch after handling it, or an event of it.
	CREATE FUNCTION acknowledged(name text, given int8, events uuid[]) RETURNS boolean LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM idempotency.ack(name, given);
		INSERT INTO done SELECT name, unnest(events);
		RETURN true;
	EXCEPTION WHEN SQLSTATE 'IK408' THEN
		PERFORM tally('late');
		RETURN false;
	END $$;
	CREATE FUNCTION failed(name text, given int8, event uuid) RETURNS text LANGUAGE plpgsql AS $$
	BEGIN
		PERFORM tally('failures');
		IF idempotency.nack(name, given, event, 'no', random() * interval '20 ms') IS NULL THEN
			INSERT INTO died VALUES (name, event);
			RETURN 'dead';
		END IF;
		RETURN 'parked';
	EXCEPTION WHEN SQLSTATE 'IK408' THEN
		PERFORM tally('late');
		RETURN 'late';
	END $$;

	-- Consumes until a time or, without one, until no event is left.
	-- "trouble" is how likely things go wrong.
	CREATE PROCEDURE consume(name text, seed float8, until timestamptz, trouble float8) LANGUAGE plpgsql AS $$
	DECLARE
		lease interval;
		events idempotency.event[];
		event idempotency.event;
		given int8;
		finished uuid[];
		stuck text[];
		separate boolean;
		dice float8;
		became text;
	BEGIN
		PERFORM setseed(seed);
		LOOP
			EXIT WHEN clock_timestamp() >= until;
			lease := (0.02 + random() / 5) * interval '1 second';
			SELECT array_agg(e), max(e.batch) INTO events, given
			FROM idempotency.fetch(name, (1 + random() * 12)::int, '50 ms', lease) AS e;
			IF given IS NULL THEN
				COMMIT;
				EXIT WHEN until IS NULL
					AND NOT EXISTS (SELECT FROM idempotency.parked WHERE subscription = name AND dead_at IS NULL)
					AND EXISTS (SELECT FROM idempotency.position WHERE subscription = name AND batch IS NULL);
				CONTINUE;
			END IF;
			PERFORM tally('batches');
			INSERT INTO again SELECT name, e.id FROM unnest(events) AS e JOIN done AS d ON d.subscription = name AND d.id = e.id;

			-- All events in one transaction, or each event in its own.
			separate := random() < 0.5;
			IF separate THEN COMMIT; END IF;
			dice := random() / nullif(trouble, 0);
			IF dice < 0.2 THEN
				PERFORM tally('walks');
				IF NOT separate THEN ROLLBACK; END IF;
				CONTINUE;
			ELSIF dice < 0.4 THEN
				PERFORM tally('returns'), failed(name, given, NULL);
				COMMIT;
				CONTINUE;
			END IF;

			finished := '{}';
			stuck := '{}';
			became := NULL;
			FOREACH event IN ARRAY events LOOP
				CONTINUE WHEN event.aggregateid = ANY (stuck);
				became := NULL;
				IF (name <> 'calm' AND (event.payload->>'poison')::boolean AND (SELECT yes FROM poisonous)) OR random() < trouble / 10 THEN
					became := failed(name, given, event.id);
					stuck := stuck || event.aggregateid;
				ELSE
					IF random() < trouble / 20 THEN PERFORM pg_sleep(extract(epoch FROM lease)); END IF;
					PERFORM handle(name, event.id);
					finished := finished || event.id;
				END IF;
				IF separate THEN COMMIT; END IF;
				EXIT WHEN became = 'late';
			END LOOP;
			IF NOT separate AND random() < trouble / 2 THEN
				PERFORM tally('undone');
				ROLLBACK;
			ELSIF became IS DISTINCT FROM 'late' THEN
				PERFORM acknowledged(name, given, finished);
			END IF;
			COMMIT;
		END LOOP;
	END $$});
my @tallies = qw(rollbacks savepoints batches duplicates late failures walks returns undone);
$node->safe_psql('postgres', join '', map { "CREATE SEQUENCE tally_$_;" } @tallies);
my %topics = (one => '*', two => 'aggregate.*', calm => '*');
my %attempts = (one => 1, two => 2, calm => 6);
$node->safe_psql('postgres', "SELECT idempotency.subscribe('$_', ARRAY['$topics{$_}'], max_attempts => $attempts{$_})") foreach sort keys %topics;

# ----------------------------------------------------------------
# Load
# ----------------------------------------------------------------

my $until = $node->safe_psql('postgres', "SELECT clock_timestamp() + interval '$seconds seconds'");
my $dir = PostgreSQL::Test::Utils::tempdir;

# Concurrent clients by name. A client in this list is restarted when it is terminated.
my %client = (
	(map { ("publisher $_" => sub { "CALL publish(@{[ rand ]}, '$until')" }) } 1 .. 4),
	(map { my $name = $_; map { ("consumer $name $_" => sub { "CALL consume('$name', @{[ rand ]}, '$until', @{[ $name eq 'calm' ? 0 : 0.3 ]})" }) }
		1 .. ($name eq 'calm' ? 1 : 2) } sort keys %topics),
	'prepared' => \&prepared);

# These clients are not terminated.
my %others = (
	'held open' => q{BEGIN; SELECT send('held', 12), send('held', NULL), pg_sleep(3), send('held', 12); COMMIT;
		BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_sleep(2); COMMIT; BEGIN; SELECT send('held', NULL), pg_sleep(2); COMMIT},
	'held open and rolled back' => q{SELECT pg_sleep(0.5); BEGIN; SELECT send('lost', NULL), pg_sleep(3); ROLLBACK},
	'operator' => join('', map { "SELECT idempotency.redrive(subscription) FROM idempotency.subscription;\nSELECT pg_sleep(0.2);\n" } 1 .. 4 * $seconds),
	'administrator' => join '', map { "VACUUM idempotency.outbox, idempotency.position, idempotency.parked;\nSELECT pg_sleep(0.5);\n"
			. ($_ % 4 == 2 ? "REINDEX TABLE CONCURRENTLY idempotency.outbox;\nREINDEX TABLE CONCURRENTLY idempotency.position;\n" : '') } 1 .. 1.5 * $seconds);

# prepared is the SQL of a client that prepares transactions, and ends those that its
# predecessor left.
my $prepared = 0;
sub prepared
{
	my $sql = q{SELECT CASE WHEN gid LIKE 'commit%' THEN 'COMMIT' ELSE 'ROLLBACK' END || ' PREPARED ' || quote_literal(gid) FROM pg_prepared_xacts \gexec} . "\n";

	foreach (1 .. 8)
	{
		my $how = rand() < 0.7 ? 'commit' : 'roll back';
		my $kind = $how eq 'commit' ? 'prepared' : 'lost';
		$prepared++;
		$sql .= "BEGIN; SAVEPOINT a; SELECT send('$kind', 11), send('$kind', NULL); PREPARE TRANSACTION '$how $prepared';\n"
		  . "SELECT pg_sleep(@{[ rand(0.2) ]});\n" . uc($how =~ s/ //r) . " PREPARED '$how $prepared';\n";
	}
	return $sql;
}

# start starts psql with SQL under a name, and returns its process ID. Its stderr is
# collected.
my %pid;
sub start
{
	my ($name, $sql) = @_;
	my $file = "$dir/" . $name =~ s/ /_/gr;

	unlink $file;
	append_to_file($file, "$sql;\n");
	my $pid = fork // die "fork: $!";
	if (!$pid)
	{
		open STDOUT, '>>', "$file.out" or POSIX::_exit(1);
		open STDERR, '>>', "$file.err" or POSIX::_exit(1);
		$ENV{PGAPPNAME} = "load $name";
		exec 'psql', '-XAtq', '-f', $file, $node->connstr('postgres') or POSIX::_exit(1);
	}
	$pid{$name} = $pid;
	return $pid;
}

END
{
	kill 'KILL', grep { $_ } values %pid;
}

my $began = time;
start($_, $client{$_}->()) foreach sort keys %client;
start($_, $others{$_}) foreach sort keys %others;

my $killer = open_session($node);
$killer->query_safe('SELECT setseed(0.5)');
my @victims = qw(publisher consumer consumer publisher prepared consumer publisher consumer);
my %killed;
while (time < $began + $seconds)
{
	my $victim = $killer->query_safe(qq{SELECT application_name FROM (SELECT pid, application_name FROM pg_stat_activity
		WHERE application_name LIKE 'load $victims[0]%' ORDER BY random() LIMIT 1) AS v WHERE pg_terminate_backend(pid)});
	if ($victim =~ /^load (\w+)/) # otherwise no such session exists now, and the next round tries again
	{
		$killed{$1}++;
		push @victims, shift @victims;
	}
	usleep(120_000);
	foreach my $name (sort keys %client)
	{
		delete $pid{$name} if $pid{$name} && waitpid($pid{$name}, POSIX::WNOHANG) == $pid{$name};
		start($name, $client{$name}->()) if !$pid{$name} && time < $began + $seconds - 0.3;
	}
}

# ended waits until a client ends.
sub ended
{
	my ($name) = @_;
	waitpid($pid{$name}, 0) if $pid{$name};
	delete $pid{$name};
	return;
}

# REINDEX waits for prepared transactions.
ended('prepared');
$node->safe_psql('postgres', q{SELECT CASE WHEN gid LIKE 'commit%' THEN 'COMMIT' ELSE 'ROLLBACK' END || ' PREPARED ' || quote_literal(gid)
	FROM pg_prepared_xacts \gexec});
ended($_) foreach sort keys %pid;
$killer->quit;

# Clients must report no error except their termination.
my $said = join '', map { slurp_file($_) } glob "$dir/*.err";
$said =~ s/^.*(?:FATAL:  terminating connection due to administrator command|server closed the connection unexpectedly|error: connection to server was lost|no connection to the server)\n//mg;
$said =~ s/^(?:\s|LINE \d|QUERY:|CONTEXT:|SQL statement|PL\/pgSQL|while (?:up|recheck)).*\n//mg;
is($said, '', 'no client failed except by termination');

# ----------------------------------------------------------------
# Checks
# ----------------------------------------------------------------

# settle consumes until no event is left.
sub settle
{
	$node->safe_psql('postgres', "CALL consume('$_', 0.1, NULL, 0)", timeout => $PostgreSQL::Test::Utils::timeout_default) foreach sort keys %topics;
}
settle();
is($node->safe_psql('postgres', q{SELECT string_agg(DISTINCT subscription, ' ') FROM died}), 'one two', 'events of both troubled subscriptions became dead letters');
my $dead = $node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.dead_letters});
is($node->safe_psql('postgres', q{UPDATE poisonous SET yes = false; SELECT sum(idempotency.redrive(subscription)) FROM idempotency.subscription}), $dead, 'the dead letters are redriven');
settle();

my ($sent, $effects) = split /\|/, $node->safe_psql('postgres', q{SELECT (SELECT count(*) FROM sent), (SELECT count(*) FROM effect)});
my %tally = map { split /\|/ } split /\n/, $node->safe_psql('postgres', join ' UNION ALL ', map { "SELECT '$_', CASE WHEN is_called THEN last_value ELSE 0 END FROM tally_$_" } @tallies);
my %kinds = map { split /\|/ } split /\n/, $node->safe_psql('postgres', 'SELECT kind, count(*) FROM sent GROUP BY kind');
note("events: $sent, " . join(', ', map { "$_ $kinds{$_}" } sort keys %kinds));
note("effects: $effects; dead letters redriven: $dead");
note(join ', ', map { "$_ $tally{$_}" } @tallies);
note("sessions ended: " . join ', ', map { "$_ $killed{$_}" } sort keys %killed);

cmp_ok($tally{$_}, '>', 0, "there were $_") foreach @tallies;
cmp_ok($killed{$_} // 0, '>', 0, "sessions were ended: $_") foreach qw(publisher consumer prepared);
is(join(' ', sort keys %kinds), 'claimed held plain prepared savepoint single slow', 'events of every kind were published');

my $expected = q{SELECT s.subscription, sent.* FROM sent CROSS JOIN (VALUES ('one', ''), ('two', 'aggregate.'), ('calm', '')) AS s (subscription, prefix)
	WHERE topic ^@ prefix};
is($node->safe_psql('postgres', qq{SELECT e.subscription, e.kind, count(*) FROM ($expected) AS e LEFT JOIN effect AS f USING (subscription, id)
	WHERE f.id IS NULL GROUP BY 1, 2}), '', 'no event is lost');
is($node->safe_psql('postgres', q{SELECT subscription, id, count(*) FROM effect GROUP BY 1, 2 HAVING count(*) > 1}), '', 'no effect is repeated');
is($node->safe_psql('postgres', qq{SELECT f.subscription, f.id FROM effect AS f LEFT JOIN ($expected) AS e USING (subscription, id) WHERE e.id IS NULL}),
	'', 'every effect belongs to an event');
is($node->safe_psql('postgres', q{SELECT count(*) FROM again}), 0, 'no acknowledged event was redelivered');
is($node->safe_psql('postgres', q{SELECT count(*) FROM idempotency.outbox WHERE id NOT IN (SELECT id FROM sent)}), 0, 'rolled back events left nothing behind');

# Dead letters are delivered when they are redriven, all others in order of publishing.
is($node->safe_psql('postgres', q{
	SELECT subscription, aggregate, n, before FROM (
		SELECT subscription, aggregate, n, lag(n) OVER (PARTITION BY subscription, aggregate ORDER BY effect.place) AS before
		FROM effect JOIN sent USING (id) WHERE aggregate IS NOT NULL
			AND NOT EXISTS (SELECT FROM died WHERE died.subscription = effect.subscription AND died.id = effect.id)) AS o
	WHERE before > n}), '', 'the events of one aggregate had their effects in order');
is($node->safe_psql('postgres', q{
	SELECT id, place, before FROM (
		SELECT id, sent.place, lag(sent.place) OVER (PARTITION BY txid ORDER BY effect.place) AS before
		FROM effect JOIN sent USING (id) WHERE subscription = 'calm') AS o
	WHERE before > place}), '', 'the events of one transaction had their effects in order');

my ($of, $in_time) = split /\|/, $node->safe_psql('postgres', q{
	SELECT count(*), count(*) FILTER (WHERE effect.at < h.ended)
	FROM sent JOIN effect USING (id), (SELECT min(at) AS began, max(at) AS ended FROM sent WHERE kind = 'held' AND aggregate IS NOT NULL) AS h
	WHERE subscription = 'calm' AND sent.at BETWEEN h.began AND h.began + interval '1 s' AND kind <> 'held'});
note("of $of events that were published beside an open transaction, $in_time had their effect before it ended");
cmp_ok($in_time, '>', $of / 10, 'an open transaction holds back no other event');

# Only the positions are left. Transactions in flight are read once more, and dropped,
# with the next event.
foreach my $last (1, 2)
{
	$node->safe_psql('postgres', q{SELECT idempotency.publish('aggregate.0', '{"poison": false}')});
	settle();
}
is($node->safe_psql('postgres', q{SELECT count(*) FILTER (WHERE batch IS NULL AND inflight = '{}'), (SELECT count(*) FROM idempotency.parked),
	(SELECT count(*) FROM pg_locks WHERE objsubid = 18756) FROM idempotency.position}), '3|0|0', 'nothing is in flight, parked or locked');

$node->stop;
done_testing();
