# RestoreTest.pm
#
# A database with a history, and the checks of it after a copy: keys of every kind,
# leases in every state, subscriptions at different positions, an unacknowledged batch,
# failed events, and work for the background workers. The runner puts this directory
# into @INC.

package RestoreTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use IdempotencyTest;
use List::Util 'max';
use OutboxTest;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(workers_off roles make_history rows_of check_restored);

# workers_off returns settings that keep the state of the database: the library is
# preloaded, its workers do not run.
sub workers_off
{
	return "shared_preload_libraries = 'idempotency'\nidempotency.reaper_naptime = 0\n"
	  . "idempotency.relay_workers = 0\nidempotency.outbox_retention = 0\n";
}

# roles is the SQL that creates the roles, which are not part of a database dump.
sub roles
{
	return 'CREATE ROLE app; CREATE ROLE worker LOGIN; ';
}

# A response whose bytes change if a copy parses and prints it again.
my $odd = qq( {"a" :  1,\t"a": 1.0e+2 , "\\u00e9":"\x{c3}\x{a9}\\\\."} \n);
my $state = qq({"step" :  2,\t"b":[ 1 ]} );

# finished is the SQL that claims a key, has its effect, and finishes the operation.
sub finished
{
	my ($key, $finish, $claim) = @_;
	$claim //= '';
	return qq{BEGIN; SELECT FROM idempotency.claim('charge', '$key'$claim);
		INSERT INTO charge VALUES ('$key', 1.50);
		SELECT idempotency.publish('charged', '{"n": ' || (SELECT count(*) FROM charge) || '}', '$key');
		SELECT idempotency.$finish; COMMIT; };
}

# make_history fills a database that has the extension, or the portable edition. Returns what
# the clients know: tokens and batches. %opt: dbname; roles: what creates the roles, if they exist ''.
sub make_history
{
	my ($node, %opt) = @_;
	my %history = (roles => $opt{roles} // roles(), dbname => $opt{dbname} // 'postgres');
	my $dbname = $history{dbname};

	outbox_tools($node, $dbname);
	$node->safe_psql($dbname, $history{roles} . q{
		SELECT idempotency.grant_client('app'), idempotency.grant_consumer('worker');
		CREATE TABLE charge (key text PRIMARY KEY, amount numeric NOT NULL);
		CREATE TRIGGER guard BEFORE INSERT OR UPDATE OR DELETE ON charge
			FOR EACH STATEMENT EXECUTE FUNCTION idempotency.require_claim('charge');
		GRANT ALL ON charge TO app;
		CREATE TABLE handled (place int8 GENERATED ALWAYS AS IDENTITY, n int);
		GRANT INSERT ON handled TO worker;
		CREATE FUNCTION handle(idempotency.event) RETURNS void LANGUAGE sql AS
			$$ INSERT INTO handled (n) VALUES (($1.payload->>'n')::int) $$;
		SELECT idempotency.subscribe('handled', ARRAY['charged'], 'handle(idempotency.event)', owner => 'worker');
		SELECT idempotency.subscribe(name, ARRAY['charged']) FROM unnest(ARRAY['read', 'half', 'out', 'unread']) AS name;
		SELECT idempotency.subscribe('failed', ARRAY['job'], max_attempts => 2, retry_delay => '1 day')});

	$node->safe_psql($dbname, finished('odd', "complete('charge', 'odd', \$r\$$odd\$r\$, 201, ' {\"X\" :\"1\"}')", q(, '{"amount": 1.50}'))
		. finished('failed', q{fail('charge', 'failed', '{"type":"about:blank" }', 422)})
		. finished('for ever', q{complete('charge', 'for ever', '1')}, q{, retention => '-1 second'})
		. finished('short', q{complete('charge', 'short', '1')}, q{, retention => '1 microsecond'})
		. finished('large', q{complete('charge', 'large', (SELECT json_agg(md5(i::text))::text FROM generate_series(1, 3000) AS i))})
		. q{SELECT idempotency.once('inbox', 'one'), array(SELECT idempotency.once_many('inbox', array['b', 'a']))});
	make_leases($node, \%history);
	make_deliveries($node, \%history);
	return \%history;
}

# make_leases creates one live lease, one that expired after a checkpoint, and one that
# was released after a checkpoint.
sub make_leases
{
	my ($node, $history) = @_;
	my $dbname = $history->{dbname};

	foreach my $key ('live', 'abandoned', 'released')
	{
		$history->{$key} = $node->safe_psql($dbname,
			qq{SELECT token FROM idempotency.claim('lease', '$key', '{"amount" :  1}', lease => '1 day')});
	}
	$node->safe_psql($dbname, qq{
		SELECT idempotency.checkpoint('lease', 'abandoned', $history->{abandoned}, 'charged', E'$state');
		UPDATE idempotency.key SET leased_at = now() - interval '2 hours', leased_until = now() - interval '1 hour'
			WHERE scope = 'lease' AND key::text = 'abandoned';
		SELECT idempotency.checkpoint('lease', 'released', $history->{released}, 'begun'),
			idempotency.release('lease', 'released', $history->{released})});
	$history->{token} = max @$history{qw(live abandoned released)};
	return;
}

# make_deliveries has subscriptions read some or all of five events, and fail.
sub make_deliveries
{
	my ($node, $history) = @_;
	my $dbname = $history->{dbname};
	my $fetch = q{SELECT max(batch) FROM idempotency.fetch('%s', %d, lease => '1 day')};

	is_deeply(drained($node, $dbname, 2, 'read'), { read => '1 2 3 4 5' }, 'source: one subscription has read all events');
	$history->{half} = $node->safe_psql($dbname, sprintf $fetch, 'half', 2);
	$node->safe_psql($dbname, "SELECT idempotency.ack('half', $history->{half})");
	$history->{out} = $node->safe_psql($dbname, sprintf $fetch, 'out', 3);

	# Event 11 is due in a day and 12 waits for it; 13 is a dead letter.
	$node->safe_psql($dbname, publish(11, 'job', 'K') . publish(12, 'job', 'K') . publish(13, 'job', 'L'));
	my $nack = q{SELECT idempotency.nack('failed', batch, id, 'no ' || (payload->>'n'), retry_in => %s)
		FROM idempotency.fetch('failed', 100) WHERE payload->>'n' IN (%s);
		SELECT idempotency.ack('failed', batch) FROM idempotency.position WHERE subscription = 'failed' AND batch IS NOT NULL};
	$node->safe_psql($dbname, sprintf($nack, q{CASE WHEN payload->>'n' = '13' THEN interval '0' END}, "'11', '13'"));
	$node->safe_psql($dbname, sprintf($nack, 'NULL', "'13'"));
	is( $node->safe_psql($dbname, q{SELECT string_agg(payload->>'n' || ' ' || attempts
			|| CASE WHEN dead_at IS NOT NULL THEN ' dead' WHEN retry_at IS NULL THEN ' waits' ELSE '' END, ', ' ORDER BY seq)
			FROM idempotency.parked}), '11 1, 12 0 waits, 13 2 dead', 'source: events are parked in all states');
	return;
}

# has returns which of some relations a database has: some are those of one edition.
sub has
{
	my ($node, $dbname, @relations) = @_;
	return split /\n/, $node->safe_psql($dbname, "SELECT name FROM unnest('{" . join(',', @relations) . "}'::text[]) AS name WHERE to_regclass(name) IS NOT NULL");
}

# rows_of returns all rows of all tables by their bytes, the sequences, and the effects.
sub rows_of
{
	my ($node, $dbname) = @_;
	$dbname //= 'postgres';
	my $sql = join ' UNION ALL ', map { "SELECT '$_', encode(convert_to(t::text, 'UTF8'), 'hex') FROM $_ AS t" }
	  has($node, $dbname, (map { "idempotency.$_" } qw(key configuration outbox subscription partition position parked reaper)), 'charge', 'handled');

	$sql .= join '', map { my $name = s/^\w+\.//r; " UNION ALL SELECT '$name', last_value || ' ' || is_called FROM $_" }
	  has($node, $dbname, qw(idempotency.token idempotency.outbox_seq idempotency_internal.secret idempotency_internal.token_offset));
	return $node->safe_psql($dbname, "$sql ORDER BY 1, 2");
}

# check_restored checks that clients, owners, consumers and workers of a database with
# that history continue as in the original. The workers of the whole server run
# meanwhile. %opt: name, dbname.
sub check_restored
{
	my ($node, $history, %opt) = @_;
	my $dbname = $opt{dbname} // 'postgres';
	my $sql = sub { return $node->safe_psql($dbname, join ';', @_) };

	check_keys($node, $history, $dbname, $sql, $opt{name});
	check_leases($node, $history, $dbname, $sql, $opt{name});
	check_deliveries($node, $history, $dbname, $sql, $opt{name});
	check_workers($node, $dbname, $sql, $opt{name});
	return;
}

# check_keys: each response is the same to the byte, and expired and unfinished keys are
# free.
sub check_keys
{
	my ($node, $history, $dbname, $sql, $name) = @_;
	my $answer = q{SELECT outcome, status, encode(convert_to(response::text, 'UTF8'), 'hex'), headers, failed
		FROM idempotency.claim('charge', '%s'%s)};

	is($sql->(sprintf $answer, 'odd', q(, '{"amount":1.5}')), 'replayed|201|' . unpack('H*', $odd) . '| {"X" :"1"}|f', "$name: a success is replayed");
	is($sql->(sprintf $answer, 'failed', ''), 'replayed|422|' . unpack('H*', '{"type":"about:blank" }') . '||t', "$name: a failure is replayed");
	is( $sql->(q{SELECT md5(response::text) = (SELECT md5(json_agg(md5(i::text))::text) FROM generate_series(1, 3000) AS i), status
			FROM idempotency.claim('charge', 'large')}), 't|200', "$name: a large response is replayed");
	fails_with($node, q{SELECT idempotency.claim('charge', 'odd', '{"amount": 2}')}, 'IK422', "$name: another request is rejected", dbname => $dbname);
	is($sql->(q{SELECT idempotency.once('inbox', 'one')}, q{SELECT idempotency.once_many('inbox', array['a', 'b', 'c'])}), "f\nc",
		"$name: inbox keys are duplicates");
	is( $sql->(q{SET ROLE app}, 'BEGIN', q{SELECT outcome FROM idempotency.claim('charge', 'new')}, q{INSERT INTO charge VALUES ('new', 2)},
			q{SELECT idempotency.complete('charge', 'new', '2')}, 'COMMIT', q{SELECT outcome FROM idempotency.claim('charge', 'new')}),
		"claimed\n2\nreplayed", "$name: a client claims a new key");
	fails_with($node, q{INSERT INTO charge VALUES ('unclaimed', 1)}, 'IK403', "$name: require_claim rejects an unclaimed write", dbname => $dbname);
	return;
}

# check_leases: a live lease belongs to its owner; another one can be taken over.
sub check_leases
{
	my ($node, $history, $dbname, $sql, $name) = @_;

	is($sql->(q{SELECT outcome FROM idempotency.try_claim('lease', 'live', '{"amount": 1}', lease => '1 day')}), 'in_progress',
		"$name: a live lease blocks other clients");
	is( $sql->("SELECT idempotency.renew('lease', 'live', $history->{live}, '2 days') > now()",
			"SELECT idempotency.complete('lease', 'live', '\"done\"', token => $history->{live})",
			q{SELECT outcome, response FROM idempotency.claim('lease', 'live')}), qq(t\n"done"\nreplayed|"done"),
		"$name: the owner of a live lease renews and finishes");
	my ($outcome, $attempt, $point, $left, $token) = split /\|/, $sql->(q{SELECT outcome, attempt, recovery_point,
		encode(convert_to(state::text, 'UTF8'), 'hex'), token FROM idempotency.claim('lease', 'abandoned', '{"amount":1}', lease => '1 day')});
	is("$outcome $attempt $point $left", 'taken_over 2 charged ' . unpack('H*', $state), "$name: an abandoned operation is taken over at its checkpoint");
	cmp_ok($token, '>', $history->{token}, "$name: the new token is greater than all earlier tokens");
	fails_with($node, "SELECT idempotency.complete('lease', 'abandoned', token => $history->{abandoned})", 'IK410',
		"$name: the former owner is rejected", dbname => $dbname);
	is( $sql->(q{SELECT key, request, recovery_point FROM idempotency.claim_abandoned('lease', '1 day', 10)}),
		'released|{"amount" :  1}|begun', "$name: claim_abandoned returns a released operation");
	return;
}

# check_deliveries: each subscription receives the events that it has not received, once
# and in order.
sub check_deliveries
{
	my ($node, $history, $dbname, $sql, $name) = @_;

	is($sql->(q{SELECT count(*) FROM idempotency.fetch('out')}), '0', "$name: an unacknowledged batch is not delivered again");
	$sql->("SELECT idempotency.ack('out', $history->{out})");
	is_deeply(drained($node, $dbname, 2, qw(read half out unread failed)),
		{ read => '', half => '3 4 5', out => '4 5', unread => '1 2 3 4 5', failed => '' }, "$name: each subscription continues at its position");
	$sql->(q{UPDATE idempotency.parked SET retry_at = clock_timestamp() WHERE retry_at IS NOT NULL});
	is_deeply(drained($node, $dbname, 1, 'failed'), { failed => '11x2 12' }, "$name: a failed event and the event behind it are redelivered");
	is($sql->('SELECT attempts, error FROM idempotency.dead_letters', q{SELECT idempotency.redrive('failed')}), "2|no 13\n1", "$name: the dead letter is kept");
	is_deeply(drained($node, $dbname, 1, 'failed'), { failed => '13' }, "$name: a redriven event is delivered");
	$sql->(publish(6, 'charged'));
	is_deeply(drained($node, $dbname, 9, qw(read half out unread failed)),
		{ failed => '', map { $_ => '6' } qw(read half out unread) }, "$name: a new event reaches all subscriptions");
	return;
}

# check_workers: the relay delivers the events that are not yet handled, and the reaper
# deletes expired keys and the events that every subscription has received. The portable edition
# has no workers, but deliver() and reap().
sub check_workers
{
	my ($node, $dbname, $sql, $name) = @_;
	my $from = -s $node->logfile;

	# Its position passes the last event of another topic only after a minute.
	$sql->(q{SELECT idempotency.seek('failed', 'now')});
	$sql->('SET ROLE worker', q{CALL idempotency.deliver('handled')}, 'RESET ROLE', 'SELECT idempotency.reap(NULL)') unless has($node, $dbname, 'idempotency.reaper');
	$node->append_conf('postgresql.conf', "idempotency.reaper_naptime = '100ms'\nidempotency.relay_workers = 2\n");
	$node->reload;
	ok($node->poll_query_until($dbname, q{SELECT string_agg(n::text, ' ' ORDER BY place) = '1 2 3 4 5 6' FROM handled}),
		"$name: the relay continues at its position") or diag($sql->('TABLE handled'));
	ok($node->poll_query_until($dbname, q{SELECT NOT EXISTS (SELECT FROM idempotency.key WHERE expires_at <= clock_timestamp())
			AND NOT EXISTS (SELECT FROM idempotency.outbox)}), "$name: the reaper deletes expired keys and acknowledged events");
	is($sql->(q{SELECT string_agg(key::text, ' ' ORDER BY key) FROM idempotency.key WHERE scope = 'charge'}),
		'failed for ever large new odd', "$name: the reaper deletes no other key");
	$node->append_conf('postgresql.conf', "idempotency.reaper_naptime = 0\nidempotency.relay_workers = 0\n");
	$node->reload;
	unlike(slurp_file($node->logfile, $from), qr/(?:WARNING|PANIC|FATAL):|ERROR: .*(?:worker|relay|reaper)/, "$name: the log has no warning or error");
	return;
}

1;
