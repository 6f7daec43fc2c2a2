# 012_altered_table.pl
#
# Proves that every function that writes rejects an altered key table with 55000 and a
# hint, in old and new sessions. The table works again with all its keys once it is
# repaired. Permitted changes are not rejected.
#
# The script takes more than 15 seconds, because it calls each function for each of some
# thirty changes, in an old and in a new session.

use strict;
use warnings FATAL => 'all';

use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', conf => 'log_statement = none');
$node->safe_psql('postgres', q{
	CREATE ACCESS METHOD heap2 TYPE TABLE HANDLER heap_tableam_handler;
	CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END';
	CREATE FUNCTION handler(json) RETURNS json LANGUAGE sql AS 'SELECT $1'});

# afresh creates an unaltered table and stores a key in it.
sub afresh
{
	$node->safe_psql('postgres', q{DROP EXTENSION idempotency CASCADE; CREATE EXTENSION idempotency;
		BEGIN; SELECT idempotency.claim('a', 'old', '1'); SELECT idempotency.complete('a', 'old', '"old"'); COMMIT});
}

# A session that has cached the table before each change.
my $session = open_session($node);

# is_refused checks every function that writes. These functions check the table before
# the token, so the token need not exist.
sub is_refused
{
	my ($what, $hint) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	session_fails($session, qq{BEGIN; SELECT idempotency.$_; ROLLBACK}, '55000', "$what: $_",
		qr/table "idempotency\.key" has been altered.*^DETAIL: .*^HINT:  [^\n]*$hint/ms)
	  foreach q{claim('a', 'new')}, q{claim('a', 'old')}, q{try_claim('a', 'new')}, q{once('a', 'new')},
	  q{once_many('a', array['new'])}, q{forget('a', 'old')}, q{run('a', 'new', '1', 'handler(json)')},
	  q{claim('a', 'new', lease => '1 min')}, q{renew('a', 'old', 1, '1 min')}, q{checkpoint('a', 'old', 1, 'here')},
	  q{complete('a', 'old', token => 1)}, q{fail('a', 'old', NULL, 400, token => 1)}, q{release('a', 'old', 1)},
	  q{claim_abandoned('a', '1 min', 1)}, q{reap()};
	fails_with($node, q{SELECT idempotency.claim('a', 'new')}, '55000', "$what: a new session");
}

# works checks that the table is usable: old keys replay, new ones are stored.
my $number = 0;
sub works
{
	my ($what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $key = 'k' . ++$number;
	$session->{stderr} = '';
	my $out = $session->query(qq{SELECT response FROM idempotency.claim('a', 'old', '1');
		BEGIN; SELECT outcome FROM idempotency.claim('a', '$key', '1');
		SELECT idempotency.complete('a', '$key', '"$key"'); COMMIT;
		SELECT outcome, response FROM idempotency.claim('a', '$key', '1');
		SELECT idempotency.once('a', 'once $key'); SELECT idempotency.once_many('a', array['once $key', 'batch $key']);
		SELECT idempotency.forget('a', 'batch $key')});
	is($out, qq("old"\nclaimed\n"$key"\nreplayed|"$key"\nt\nbatch $key\nt), $what) or diag $session->{stderr};
	$session->{stderr} = '';
	my (undef, $new) = $node->psql('postgres', qq{SELECT outcome FROM idempotency.claim('a', '$key');
		SELECT count(*) FROM idempotency.key WHERE scope = 'a' AND key = '$key'});
	is($new, "replayed\n1", "$what: a new session replays, and the key exists once");
}

afresh();
works('unaltered');

# alter_citus_metadata changes the metadata of Citus's tables as Citus does.
sub alter_citus_metadata
{
	my ($change) = @_;
	return qq{DO \$\$ BEGIN LOCK TABLE idempotency.key; $change;
		UPDATE pg_class SET relname = relname WHERE oid = 'idempotency.key'::regclass; END \$\$};
}

# Forbidden alterations, the hint, and the repair.
my $t = 'idempotency.key';
my @alterations = (
	[ 'a trigger', "CREATE TRIGGER t BEFORE INSERT ON $t FOR EACH ROW EXECUTE FUNCTION nothing()",
		"DROP TRIGGER t ON $t", 'triggers' ],
	[ 'a trigger of statements', "CREATE TRIGGER t AFTER UPDATE ON $t EXECUTE FUNCTION nothing()",
		"DROP TRIGGER t ON $t", 'triggers' ],
	[ 'a disabled trigger', "CREATE TRIGGER t BEFORE INSERT ON $t FOR EACH ROW EXECUTE FUNCTION nothing();
		ALTER TABLE $t DISABLE TRIGGER t", "DROP TRIGGER t ON $t", 'triggers' ],
	[ 'a rule', "CREATE RULE r AS ON INSERT TO $t DO ALSO NOTIFY k", "DROP RULE r ON $t", 'Drop' ],
	[ 'row security', "ALTER TABLE $t ENABLE ROW LEVEL SECURITY", "ALTER TABLE $t DISABLE ROW LEVEL SECURITY",
		'ROW LEVEL SECURITY' ],
	[ 'forced row security', "ALTER TABLE $t FORCE ROW LEVEL SECURITY", "ALTER TABLE $t NO FORCE ROW LEVEL SECURITY",
		'ROW LEVEL SECURITY' ],
	[ 'unlogged', "ALTER TABLE $t SET UNLOGGED", "ALTER TABLE $t SET LOGGED", 'SET LOGGED' ],
	[ 'another access method', "ALTER TABLE $t SET ACCESS METHOD heap2", "ALTER TABLE $t SET ACCESS METHOD heap",
		'SET ACCESS METHOD heap' ],
	[ 'a check constraint', "ALTER TABLE $t ADD CONSTRAINT c CHECK (key <> 'x')", "ALTER TABLE $t DROP CONSTRAINT c",
		'Drop' ],
	[ 'a check that is not valid', "ALTER TABLE $t ADD CONSTRAINT c CHECK (key <> 'x') NOT VALID",
		"ALTER TABLE $t DROP CONSTRAINT c", 'Drop' ],
	[ 'a column that must not be null', "ALTER TABLE $t ALTER headers SET NOT NULL",
		"ALTER TABLE $t ALTER headers DROP NOT NULL", '\w', "UPDATE $t SET headers = '{}'" ],
	[ 'a default', "ALTER TABLE $t ALTER status SET DEFAULT 200", "ALTER TABLE $t ALTER status DROP DEFAULT", 'Drop' ],
	[ 'a foreign key that refers to it', "CREATE TABLE r (s text COLLATE \"C\", k idempotency.keytext,
		FOREIGN KEY (k, s) REFERENCES $t)", "DROP TABLE r", 'Drop' ],
	[ 'a foreign key', "ALTER TABLE $t ADD CONSTRAINT f FOREIGN KEY (scope) REFERENCES s",
		"ALTER TABLE $t DROP CONSTRAINT f", 'Drop',
		"CREATE TABLE s (scope text COLLATE \"C\" PRIMARY KEY); INSERT INTO s VALUES ('a')" ],
	[ 'a deferrable constraint', "ALTER TABLE $t ADD CONSTRAINT u UNIQUE (key, scope) DEFERRABLE",
		"ALTER TABLE $t DROP CONSTRAINT u", 'Drop' ],
	[ 'a child', "CREATE TABLE child () INHERITS ($t)", "DROP TABLE child", '\w' ],
	[ 'a partition', "ALTER TABLE parent ATTACH PARTITION $t DEFAULT", "ALTER TABLE parent DETACH PARTITION $t", '\w',
		"CREATE TABLE parent (LIKE $t) PARTITION BY LIST (scope)" ],
	[ 'a renamed column', "ALTER TABLE $t RENAME status TO state", "ALTER TABLE $t RENAME state TO status",
		'columns' ],
	[ 'a column of another type', "ALTER TABLE $t ALTER headers TYPE jsonb", "ALTER TABLE $t ALTER headers TYPE json",
		'columns' ],
	[ 'a column of another collation', "ALTER TABLE $t ALTER scope TYPE text COLLATE \"default\"",
		"ALTER TABLE $t ALTER scope TYPE text COLLATE \"C\"", '\w',
		join('; ', map { "ALTER EXTENSION idempotency DROP VIEW $_; DROP VIEW $_" } 'idempotency.keys', 'idempotency.zombies') ],
	[ 'a renamed column of leases', "ALTER TABLE $t RENAME recovery_state TO state",
		"ALTER TABLE $t RENAME state TO recovery_state", 'columns' ],
	[ 'no primary key', "ALTER TABLE $t DROP CONSTRAINT key_pkey", "ALTER TABLE $t ADD PRIMARY KEY (key, scope)",
		'PRIMARY KEY \(key, scope\)' ],
	[ 'a primary key of other columns', "ALTER TABLE $t DROP CONSTRAINT key_pkey,
		ADD PRIMARY KEY (key, scope, created_at)", "ALTER TABLE $t DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope)",
		'PRIMARY KEY \(key, scope\)' ],
	[ 'a primary key in another order', "ALTER TABLE $t DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (scope, key)",
		"ALTER TABLE $t DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope)", 'PRIMARY KEY \(key, scope\)' ],
	[ 'a deferrable primary key', "ALTER TABLE $t DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope) DEFERRABLE",
		"ALTER TABLE $t DROP CONSTRAINT key_pkey, ADD PRIMARY KEY (key, scope)", '\w' ],
	[ 'an added column', "ALTER TABLE $t ADD note text", "ALTER TABLE $t DROP note", 'columns' ],
	[ 'an added column with a value', "ALTER TABLE $t ADD note text DEFAULT 'x' NOT NULL", "ALTER TABLE $t DROP note",
		'Drop' ],
	# On a worker Citus creates no trigger on an extension's table. Citus itself
	# invalidates the cached table when this metadata changes.
	[ 'distributed by Citus', alter_citus_metadata("INSERT INTO pg_dist_partition VALUES ('$t', 'h')"),
		alter_citus_metadata('DELETE FROM pg_dist_partition'), 'undistribute_table',
		'CREATE TABLE pg_dist_partition (logicalrelid regclass PRIMARY KEY, partmethod "char");
		ALTER TABLE pg_dist_partition SET SCHEMA pg_catalog' ],
	[ 'a generated column', "ALTER TABLE $t ADD l int GENERATED ALWAYS AS (length(key)) STORED", "ALTER TABLE $t DROP l",
		'Drop' ]);

foreach (@alterations)
{
	my ($what, $alter, $repair, $hint, $first) = @$_;
	afresh();

	# An open claim blocks the change, except the creation of a child, which does not
	# alter the table.
	$node->safe_psql('postgres', $first) if $first;
	$session->query_safe(q{BEGIN; SELECT idempotency.claim('a', 'open')});
	fails_with($node, "BEGIN; SET lock_timeout = '20ms'; $alter", '55P03', "$what: waits for an open claim")
	  unless $what eq 'a child';
	$session->query_safe('ROLLBACK');

	$node->safe_psql('postgres', $alter);
	is_refused($what, $hint);
	$node->safe_psql('postgres', $repair);
	works("$what: repaired");
}

# An altered outbox is rejected too.
fails_with($node, q{INSERT INTO pg_dist_partition VALUES ('idempotency.outbox', 'n'); SELECT idempotency.publish('t', '1')},
	'55000', 'a distributed outbox', like => qr/"idempotency\.outbox".*^DETAIL:  It is distributed by Citus\.$/ms);
$node->safe_psql('postgres', 'DROP TABLE pg_dist_partition');
afresh();

# In one transaction: altered and rejected, rolled back and usable.
$session->query_safe('BEGIN; SAVEPOINT s; ALTER TABLE idempotency.key SET UNLOGGED');
session_fails($session, q{SELECT idempotency.claim('a', 'new')}, '55000', 'altered by the transaction itself');
is( $session->query_safe(q{ROLLBACK TO s; SELECT outcome FROM idempotency.claim('a', 'in the same');
		SELECT idempotency.complete('a', 'in the same', '1'); COMMIT}), "claimed\n1", 'the rollback of the alteration makes the table usable');

# Permitted changes.
foreach my $change (
	"GRANT SELECT ON $t TO pg_monitor", "ALTER TABLE $t SET (autovacuum_vacuum_scale_factor = 0.01)",
	"CREATE STATISTICS idempotency.st (dependencies) ON scope, status FROM $t", "COMMENT ON TABLE $t IS 'mine'",
	"CREATE PUBLICATION p FOR TABLE $t", "ALTER TABLE $t REPLICA IDENTITY FULL", "CREATE INDEX mine ON $t (expires_at)",
	"ALTER TABLE $t ALTER response SET COMPRESSION pglz", "CREATE VIEW mine AS SELECT * FROM $t",
	"ALTER TABLE $t CLUSTER ON mine")
{
	$node->safe_psql('postgres', $change);
	works("not rejected: $change");
}

# A table of the same name that does not belong to the extension.
$node->safe_psql('postgres', q{DROP VIEW mine; DROP EXTENSION idempotency;
	CREATE SCHEMA idempotency; CREATE TABLE idempotency.key (key text); CREATE FUNCTION idempotency.claim(text, text)
	RETURNS record LANGUAGE sql AS 'SELECT 1, 2'});
fails_with($node, 'CREATE EXTENSION idempotency', '42P06', 'a schema made beforehand aborts the installation');

$session->quit;
$node->stop;
done_testing();
