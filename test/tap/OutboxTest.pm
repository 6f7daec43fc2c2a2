# OutboxTest.pm
#
# Helpers for tests of the outbox: consumers in PL/pgSQL, clusters with other
# transaction IDs, and restarts after a crash. The runner puts this directory into @INC.

package OutboxTest;

use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(outbox_tools drained publish set_next_xid);

# outbox_tools creates the consumer: drain() stores the events of fetch() in a table and
# acknowledges them, batch by batch until no event is left. Each step is a transaction.
sub outbox_tools
{
	my ($node, $dbname) = @_;
	$node->safe_psql($dbname // 'postgres', q{
		CREATE TABLE got (place int8 GENERATED ALWAYS AS IDENTITY, subscription text, batch int8,
			seq int8, id uuid, n int, attempt int);
		CREATE PROCEDURE drain(name text, max_events int DEFAULT 100) LANGUAGE plpgsql AS $$
		DECLARE
			given int8;
		BEGIN
			LOOP
				WITH event AS MATERIALIZED (SELECT * FROM idempotency.fetch(name, max_events)),
					noted AS (INSERT INTO got (subscription, batch, seq, id, n, attempt)
						SELECT name, batch, seq, id, (payload->>'n')::int, attempt FROM event)
				SELECT max(batch) INTO given FROM event;
				EXIT WHEN given IS NULL;
				COMMIT;
				PERFORM idempotency.ack(name, given);
				COMMIT;
			END LOOP;
		END $$});
	return;
}

# drained drains subscriptions and returns a reference to a hash: for each subscription
# the "n" of its events in order of delivery. The attempt is appended if it is not the
# first: '1 2 3x2'.
sub drained
{
	my ($node, $dbname, $max, @subscriptions) = @_;
	my $calls = join ' ', map { "CALL drain('$_', $max);" } @subscriptions;
	my %got = map { $_ => '' } @subscriptions;

	foreach (split /\n/, $node->safe_psql($dbname, qq{TRUNCATE got; $calls
		SELECT subscription, string_agg(n || CASE WHEN attempt > 1 THEN 'x' || attempt ELSE '' END, ' ' ORDER BY place)
		FROM got GROUP BY subscription}))
	{
		my ($subscription, $events) = split /\|/;
		$got{$subscription} = $events;
	}
	return \%got;
}

# publish returns the SQL that publishes an event with that "n".
sub publish
{
	my ($n, $topic, $aggregate) = @_;
	my $about = defined $aggregate ? ", '$aggregate'" : '';
	$topic //= 't';
	return qq[SELECT idempotency.publish('$topic', '{"n": $n}'$about); ];
}

# set_next_xid sets the next transaction ID of a stopped cluster.
sub set_next_xid
{
	my ($node, $epoch, $xid) = @_;
	my $segment = sprintf '%s/pg_xact/%04X', $node->data_dir, int($xid / 1048576);

	# The server reads the status of the preceding transactions.
	append_to_file($segment, "\0" x (262144 - (-s $segment // 0)));
	system_or_bail($node->installed_command('pg_resetwal'),
		'-e', $epoch, '-x', $xid, '-D', $node->data_dir);
	return;
}

1;
