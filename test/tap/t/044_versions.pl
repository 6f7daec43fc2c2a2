# 044_versions.pl
#
# Proves that a database can be updated to the next version of the extension. ALTER
# EXTENSION ... UPDATE produces the same objects as CREATE EXTENSION, including
# privileges and comments. Every row is equal to the byte, and sessions continue. Before
# the update, the new library works with the old objects, and logs nothing.
#
# The test updates every released version to the default one. It also creates two
# artificial versions, so that it has something to test before the next release: "0.9"
# without the outbox, and "99.0" with additional objects.
#
# tools/check-released contains further rules for released versions. The test runs it
# here, and on incorrect trees.

use FindBin;
use strict;
use warnings FATAL => 'all';

use Digest::SHA;
use File::Basename;
use File::Path qw(make_path);
use IdempotencyTest;
use OutboxTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RestoreTest;
use Test::More;

my $top = dirname(dirname(dirname($FindBin::RealBin)));
my $dir = PostgreSQL::Test::Utils::tempdir;
my ($default) = slurp_file("$top/idempotency.control") =~ /^default_version = '(.*)'$/m;
my $script = slurp_file("$top/idempotency--$default.sql");

# ----------------------------------------------------------------
# The rules for released versions
# ----------------------------------------------------------------

# wrong_in returns the output of the check for a tree in which 1.0 and 1.1 are released
# and 1.2 is not, after a change.
sub wrong_in
{
	my ($change) = @_;
	my $tree = PostgreSQL::Test::Utils::tempdir;
	my %sql = map { ("idempotency--$_.sql" => "-- $_\n") } qw(1.0 1.1 1.2 1.0--1.1 1.1--1.2);
	my %file = (%sql,
		'CHANGELOG.md' => "# Changes\n\n## 1.2 (not released)\n\n## 1.1 (2027-03-01)\n\n## 1.0 (2027-01-01)\n",
		'idempotency.control' => "default_version = '1.2'\n",
		'tools/released' => "# comment\n" . join '',
		map { Digest::SHA::sha256_hex($sql{"idempotency--$_.sql"}) . "  idempotency--$_.sql\n" } qw(1.0 1.0--1.1 1.1));

	$change->() for \%file;
	make_path("$tree/tools");
	append_to_file("$tree/$_", $file{$_}) for grep { defined $file{$_} } keys %file;
	return (run_command([ "$top/tools/check-released", $tree ]))[0];
}

is((run_command([ "$top/tools/check-released", $top ]))[0], '', 'the released versions are unchanged');
is(wrong_in(sub { }), '', 'a tree with two released versions is accepted');
is(wrong_in(sub { $_->{'CHANGELOG.md'} =~ s/^## 1\.1/## 1.1.1 (2027-04-01)\n\n$&/m }), '', 'a release without a new script is accepted');
foreach my $mistake (
	[ 'a changed script of a release', sub { $_->{'idempotency--1.0.sql'} .= "--\n" }, qr/^idempotency--1\.0\.sql: has changed/ ],
	[ 'a changed update script of a release', sub { $_->{'idempotency--1.0--1.1.sql'} .= "--\n" }, qr/^idempotency--1\.0--1\.1\.sql: has changed/ ],
	[ 'a missing script of a release', sub { $_->{'idempotency--1.0.sql'} = undef }, qr/^idempotency--1\.0\.sql: there is none/m ],
	[ 'a release without its checksum', sub { $_->{'CHANGELOG.md'} =~ s/not released/2027-05-01/ }, qr/1\.2\.sql: is released, and not in/ ],
	[ 'a checksum before the release', sub { $_->{'tools/released'} .= '0' x 64 . "  idempotency--1.2.sql\n" }, qr/not the script of a released version/ ],
	[ 'no update script to the new version', sub { $_->{'idempotency--1.1--1.2.sql'} = undef }, qr/no script leads from 1\.0 to 1\.2\n.*no script leads from 1\.1 to 1\.2/ ],
	[ 'a version without a heading', sub { $_->{'idempotency--1.3.sql'} = '' }, qr/a script for 1\.3, and no heading/ ],
	[ 'another default version', sub { $_->{'idempotency.control'} = "default_version = '1.1'\n" }, qr/CHANGELOG\.md begins with 1\.2/ ],
	[ 'two versions that are not released', sub { $_->{'CHANGELOG.md'} =~ s/2027-01-01/not released/ }, qr/1\.0 is not released, and a newer/ ],
	[ 'a heading without a date', sub { $_->{'CHANGELOG.md'} =~ s/\(2027-01-01\)// }, qr/this heading names no version/ ])
{
	like(wrong_in($mistake->[1]), $mistake->[2], "$mistake->[0] is detected");
}

# ----------------------------------------------------------------
# A server with artificial versions
# ----------------------------------------------------------------

# The previous version is the script without the section about the outbox; that section
# is the update script.
my ($outbox) = $script =~ /^(-- -+\n-- The outbox: .*?)^-- -+\n-- Counters: /ms or die 'the script has no section about the outbox';
my $before = $script =~ s/\Q$outbox\E//r;
my $way = $outbox;
my %new = map { $_ => 1 } $outbox =~ /^CREATE (?:UNLOGGED )?\w+ idempotency(?:_internal)?\.(\w+)/mg;
$before =~ s/^(GRANT SELECT ON .*), idempotency\.subscriptions, idempotency\.partitions(?= )/$1/m or die 'nothing grants idempotency.subscriptions';
$before =~ s/^(GRANT EXECUTE ON .*), idempotency_internal\.relay_problem\(text\), idempotency\.holders\(\)(?= )/$1/m or die 'nothing grants relay_problem() and holders()';
$way .= only_owner(sort keys %new) . "GRANT SELECT ON idempotency.subscriptions, idempotency.partitions TO pg_monitor;\n"
	. "GRANT EXECUTE ON FUNCTION idempotency_internal.relay_problem(text), idempotency.holders() TO pg_monitor;\n";

# only_owner returns the script's own statement that revokes default privileges,
# restricted to new objects: existing grants stay.
sub only_owner
{
	my ($take) = $script =~ /^(DO \$\$\n.*?^\$\$;\n)/ms or die 'the script takes no rights';
	my $new = join ', ', map { "'$_'" } @_;

	$take =~ s/^\t\t\tAND a\.grantee .*\K$/\n\t\t\tAND pg_catalog.regexp_replace(o.name, '^idempotency(_internal)?\\."?|[^.\\w].*\$', '', 'g') IN ($new)/m or die 'the script takes all rights';
	return $take;
}

# The next version, its update script, and the difference that a missing line of it
# makes.
my @tariff = ('CREATE TABLE idempotency.tariff (name pg_catalog.text COLLATE "C" PRIMARY KEY, price pg_catalog.numeric)',
	'CREATE FUNCTION idempotency.price(name pg_catalog.text) RETURNS pg_catalog.numeric LANGUAGE sql STABLE AS $$ SELECT 1.5 $$');
my %more = (
	'ALTER TABLE idempotency.tariff ADD CONSTRAINT tariff_price_check CHECK (price >= 0)' => qr/missing: .*tariff_price_check/,
	'COMMENT ON COLUMN idempotency.tariff.price IS \'per operation\'' => qr/missing: .*per operation/,
	'SELECT pg_catalog.pg_extension_config_dump(\'idempotency.tariff\', \'WHERE price > 0\')' => qr/missing: .*tariff dumped WHERE/,
	only_owner('tariff', 'price') =~ s/;\n\z//r => qr/missing: REVOKE .*idempotency\.price/,
	'GRANT SELECT ON idempotency.tariff TO pg_monitor' => qr/missing: GRANT SELECT .*tariff/,
	'COMMENT ON FUNCTION idempotency.reap(integer) IS \'another text\'' => qr/missing: .*another text/,
	'ALTER FUNCTION idempotency.uuidv7() COST 100' => qr/missing: .*COST 100/,
	'ALTER TABLE idempotency.key SET (autovacuum_enabled = true)' => qr/missing: .*autovacuum_enabled/);
my $after = join '', map { "$_;\n" } @tariff, sort keys %more;

my ($prefix, $extension) = copied_server("$dir/server");
append_to_file("$extension/idempotency--0.9.sql", $before);
append_to_file("$extension/idempotency--0.9--$default.sql", $way);
append_to_file("$extension/idempotency--99.0.sql", $script . $after);
append_to_file("$extension/idempotency--$default--99.0.sql", $after);
append_to_file("$extension/idempotency--$default--99.0.forgetful.sql", join '', map { "$_;\n" } @tariff);

# new_versions creates a server with these versions, without the extension, and with
# idle workers.
sub new_versions
{
	my ($name) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name, install_path => $prefix);

	$node->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
	$node->append_conf('postgresql.conf', "autovacuum = off\nmax_prepared_transactions = 5\n" . workers_off());
	$node->start;
	return $node;
}

# ----------------------------------------------------------------
# The result of an update
# ----------------------------------------------------------------

# objects_of returns the contents of a database as pg_dump describes them with every
# object of the extension, and which tables of the extension are dumped. OIDs and
# database names are removed, because they differ between databases.
sub objects_of
{
	my ($node, $dbname) = @_;
	my ($dump, undef) = run_command([ 'pg_dump', '--binary-upgrade', '--schema-only', '--dbname', $node->connstr($dbname) ]);

	$dump =~ s/^SELECT pg_catalog\.binary_upgrade_(?:set_next|set_missing_value|create_empty_extension).*?;\n//msg;
	$dump =~ s/^UPDATE pg_catalog\.pg_class\nSET relfrozenxid .*?;\n//msg;
	$dump =~ s/^(?:--.*|\\(?:un)?restrict .*)?\n//mg;
	return $dump . $node->safe_psql($dbname, q{
		SELECT format('-- %s dumped %s', c.oid::regclass, condition)
		FROM pg_extension, unnest(extconfig, extcondition) AS u (oid, condition) JOIN pg_class AS c USING (oid)
		WHERE extname = 'idempotency' ORDER BY 1});
}

# made_by returns the objects that statements create in a database, and drops them
# again.
sub made_by
{
	my ($node, @sql) = @_;

	$node->safe_psql('scratch', join ';', @sql);
	my $objects = objects_of($node, 'scratch');
	$node->safe_psql('scratch', 'DROP EXTENSION idempotency');
	return $objects;
}

# fresh returns the objects of a version.
sub fresh
{
	my ($node, $version) = @_;
	return made_by($node, "CREATE EXTENSION idempotency VERSION '$version'");
}

# updated returns the objects of a version that was updated to another.
sub updated
{
	my ($node, $from, $to) = @_;
	return made_by($node, "CREATE EXTENSION idempotency VERSION '$from'", "ALTER EXTENSION idempotency UPDATE TO '$to'");
}

# differences returns the lines that only one of two lists has.
sub differences
{
	my ($found, $expected) = @_;
	my %lines;

	return '' if $found eq $expected;
	$lines{$_} |= 1 for split /\n/, $expected;
	$lines{$_} |= 2 for split /\n/, $found;
	return join "\n", 'they differ', map { ($lines{$_} == 1 ? 'missing: ' : 'too much: ') . $_ } grep { $lines{$_} != 3 } sort keys %lines;
}

# keeps_data creates a history in a version, updates the extension, and checks that
# everything continues.
sub keeps_data
{
	my ($node, $from, $to) = @_;
	my $name = "from $from to $to";

	$node->safe_psql('postgres', "CREATE EXTENSION idempotency VERSION '$from'");
	my $history = make_history($node);
	my $rows = rows_of($node);
	my $session = open_session($node);
	$session->query_safe(q{SELECT idempotency.peek('charge', 'odd'); PREPARE odd AS SELECT outcome FROM idempotency.claim('charge', 'odd')});

	$node->safe_psql('postgres', "ALTER EXTENSION idempotency UPDATE TO '$to'");
	ok(rows_of($node) eq $rows, "$name: every row is equal, byte for byte");
	is($session->query_safe('EXECUTE odd'), 'replayed', "$name: an older session continues");
	$session->quit;
	check_restored($node, $history, name => $name);
	return;
}

my $node = new_versions('versions');
my @released = grep { $_ ne $default } map { m{/idempotency--(\d+\.\d+)\.sql$} ? $1 : () } glob "$top/idempotency--*.sql";
$node->safe_psql('postgres', 'CREATE DATABASE scratch');
my $objects = fresh($node, $default);
my $next = fresh($node, '99.0');

like($objects, qr/CREATE FUNCTION idempotency\.claim\(.*^REVOKE ALL ON FUNCTION idempotency\.claim\(.*^-- idempotency\.key dumped/ms,
	'the objects of the extension are compared, with their rights');
is(differences(updated($node, $_, $default), $objects), '', "from $_ to $default: the objects are those of a new installation") for '0.9', @released;
is(differences(updated($node, $default, '99.0'), $next), '', "from $default to 99.0: the objects are those of a new installation");

my $forgotten = differences(updated($node, $default, '99.0.forgetful'), $next);
like($forgotten, $more{$_}, "an update script without this is detected: $_") for sort keys %more;

# New objects are granted to no role by default, and existing grants stay.
$node->safe_psql('scratch', join ';', 'CREATE ROLE stranger', map { "ALTER DEFAULT PRIVILEGES GRANT ALL ON $_ TO stranger" } qw(SCHEMAS TABLES SEQUENCES FUNCTIONS TYPES));
my $strange = sub { return join "\n", $_[0] =~ /^(GRANT .* idempotency\.?.* TO stranger.*)$/mg };
is($strange->(updated($node, $_, $default)), '', "from $_ to $default: nothing is granted by default") for '0.9', @released;
is($strange->(updated($node, $default, '99.0')), '', "from $default to 99.0: nothing is granted by default");
like($strange->(updated($node, $default, '99.0.forgetful')), qr/idempotency\.price/, 'an update script that does not revoke privileges is detected');

keeps_data($node, $default, '99.0');
foreach my $from (@released)
{
	my $other = new_versions('past_' . $from =~ tr/./_/r);
	keeps_data($other, $from, $default);
	$other->stop;
}

# ----------------------------------------------------------------
# The library of this version with the objects of an older one
# ----------------------------------------------------------------

# log_messages returns warnings and errors of the server since an offset in its log, and
# all messages of the extension. Two messages are permitted: the reaper's hint where
# whole tables are missing, and the termination of a worker, as on a slow machine.
sub log_messages
{
	my ($from, $may) = @_;
	my $log = slurp_file($node->logfile, $from);

	$log =~ s/^.*LOG:  idempotency reaper leaves database "\w+" alone\n.*DETAIL: .* is missing\.\n.*HINT:  Use ALTER EXTENSION idempotency UPDATE\.\n//mg
	  if $may;
	$log =~ s/^.*FATAL:  terminating background worker .*\n//mg;
	return join "\n", $log =~ /^(.*(?:WARNING:|ERROR:|FATAL:|PANIC:|LOG:  idempotency).*)$/mg;
}

# works_before uses a database with an older version, beside the workers of this one,
# and checks that nothing is logged. Then it updates the database.
sub works_before
{
	my ($from) = @_;
	my $dbname = 'older_' . $from =~ tr/./_/r;
	my $sql = sub { return $node->safe_psql($dbname, join ';', @_) };

	$node->safe_psql('postgres', "CREATE DATABASE $dbname");
	$node->append_conf('postgresql.conf', "idempotency.reaper_naptime = '100ms'\nidempotency.relay_workers = 2\n");
	$node->reload;
	my $log = -s $node->logfile;
	$sql->("CREATE EXTENSION idempotency VERSION '$from'", 'CREATE TABLE charge (n int)');
	my $session = open_session($node, dbname => $dbname);
	is( $session->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('charge', 'k', '{"n": 1}');
			INSERT INTO charge VALUES (1); SELECT idempotency.complete('charge', 'k', '{"ok":  1}', 201); COMMIT;
			SELECT outcome, response FROM idempotency.claim('charge', 'k', '{"n": 1}')}),
		qq(claimed\n{"ok":  1}\nreplayed|{"ok":  1}), "$from: a key is claimed, completed and replayed");
	my $token = $sql->(q{SELECT token FROM idempotency.claim('lease', 'k', lease => '1 day')});
	is($sql->(q{SELECT idempotency.once('inbox', 'm')}, q{SELECT idempotency.once('inbox', 'm')}), "t\nf", "$from: messages in the inbox are duplicates");
	$sql->(q{BEGIN}, q{SELECT idempotency.claim('charge', 'p')}, q{SELECT idempotency.complete('charge', 'p')}, q{PREPARE TRANSACTION 'p'});
	$sql->(q{COMMIT PREPARED 'p'});

	# Once the next reaper has started, the previous one has finished.
	foreach my $round (1, 2)
	{
		$sql->('BEGIN', q{SELECT idempotency.claim('short', 'k', retention => '1 microsecond')}, q{SELECT idempotency.complete('short', 'k')}, 'COMMIT');
		ok($node->poll_query_until($dbname, q{SELECT NOT EXISTS (SELECT FROM idempotency.key WHERE scope = 'short')}), "$from: reaper $round works");
	}
	is(log_messages($log, $from eq '0.9'), '', "$from: nothing is logged");

	$sql->("ALTER EXTENSION idempotency UPDATE");
	is($session->query_safe(q{SELECT outcome FROM idempotency.claim('charge', 'k', '{"n": 1}')}), 'replayed', "$from, updated: a session continues");
	is( $sql->("SELECT idempotency.complete('lease', 'k', '1', token => $token)", q{SELECT outcome FROM idempotency.claim('lease', 'k')},
			q{SELECT idempotency.once('inbox', 'm')}), "1\nreplayed\nf", "$from, updated: an owner finishes with its earlier token");
	$session->query_safe(q{SELECT idempotency.grant_consumer('handler'); CREATE TABLE handled (n int);
		GRANT INSERT ON handled TO handler; CREATE FUNCTION handle(idempotency.event) RETURNS void LANGUAGE sql
			AS $$ INSERT INTO handled VALUES (($1.payload->>'n')::int) $$;
		SELECT idempotency.subscribe('s', ARRAY['t'], 'handle(idempotency.event)', owner => 'handler');
		SELECT idempotency.publish('t', '{"n": 7}')});
	ok($node->poll_query_until($dbname, 'SELECT n = 7 FROM handled'), "$from, updated: events are handled");
	is(log_messages($log, $from eq '0.9'), '', "$from, updated: nothing is logged");
	$session->quit;
	return;
}

$node->safe_psql('postgres', 'CREATE ROLE handler LOGIN');
works_before($_) for '0.9', @released;
done_testing();
