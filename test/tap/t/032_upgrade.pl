# 032_upgrade.pl
#
# Proves that a database survives an upgrade of the server: by pg_upgrade, which copies
# or links files, with the new server's workers running all the time, and by dump and
# restore. Every row is equal to the byte, and clients, owners, consumers and workers
# continue; so does a database with the portable edition. OLD_PG_CONFIG lists the
# pg_config programs of the old servers, each with the extension installed; without it the
# old server is the new one.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RestoreTest;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $portable = slurp_file(dirname(__FILE__) . '/../../../portable/idempotency.sql');
my $workers_on = '-c idempotency.reaper_naptime=100ms -c idempotency.relay_workers=2';

# The defaults of initdb differ between versions.
my @initdb = ('--encoding=UTF8', '--locale=C', '--data-checksums');

# bindir_of returns the directory of the programs of a pg_config.
sub bindir_of
{
	my ($pg_config) = @_;
	my ($bindir, undef) = run_command([ $pg_config, '--bindir' ]);

	die "$pg_config does not say where its programs are" unless -x "$bindir/postgres";
	return $bindir;
}

# upgrades checks both ways from the server whose programs are in that directory.
sub upgrades
{
	my ($bindir, @mode) = @_;
	my $old = new_node('old' . basename(dirname($bindir)), conf => workers_off(), new => { install_path => dirname($bindir) }, init => { extra => \@initdb });
	my $new = PostgreSQL::Test::Cluster->new('after_' . $old->name);
	my %history = (postgres => make_history($old));
	$old->safe_psql('postgres', 'CREATE ROLE shop_owner; CREATE DATABASE portable OWNER shop_owner');
	$old->safe_psql('portable', "SET ROLE shop_owner;\n$portable");
	$history{portable} = make_history($old, dbname => 'portable', roles => '');
	my %before = map { $_ => rows_of($old, $_) } keys %history;
	my ($from, $to) = map { $_->config_data('--version') =~ s/^PostgreSQL (\S+).*/$1/r } $old, $new;

	# The minor releases of November 2026 mark columns in attoptions, and earlier ones of
	# newer majors dump the mark as an option, which no server accepts.
	my ($definition, undef) = run_command([ 'pg_dump', '--schema-only', '--table=charge', '--dbname', $old->connstr('postgres') ]);
	if ($definition =~ /SET \((pg_attver)=/)
	{
		diag("PostgreSQL $from to $to skipped: the newer server does not know the column option $1");
		$old->stop;
		return;
	}

	$new->init(extra => \@initdb);
	$new->append_conf('postgresql.conf', "autovacuum = off\n" . workers_off());
	$new->command_ok([ 'pg_dump', '--format=custom', '--file', "$dir/$_", '--dbname', $old->connstr($_) ], "$from to $to: pg_dump of $_ succeeds")
	  foreach keys %history;
	$old->stop;

	chdir $dir;
	upgrade_ok($old, $new, "$from to $to: pg_upgrade succeeds", @mode, '--new-options', $workers_on);
	$new->start;
	# The workers of the first checks do nothing in the database of the portable edition.
	foreach my $dbname (reverse sort keys %history)
	{
		my $name = "$from to $to, $dbname";
		ok(rows_of($new, $dbname) eq $before{$dbname}, "$name: every row is equal, byte for byte");
		check_restored($new, $history{$dbname}, dbname => $dbname, name => $name);

		$new->safe_psql('postgres', "CREATE DATABASE restored_$dbname TEMPLATE template0");
		$new->command_ok([ 'pg_restore', '--exit-on-error', "--dbname=restored_$dbname", "$dir/$dbname" ], "$name: pg_restore succeeds");
		ok(rows_of($new, "restored_$dbname") eq $before{$dbname}, "$name, restored: every row is equal, byte for byte");
		check_restored($new, $history{$dbname}, dbname => "restored_$dbname", name => "$name, restored");
	}
	$new->stop;
	return;
}

my @old = split ' ', $ENV{OLD_PG_CONFIG} // '';
@old = ($ENV{PG_CONFIG} // 'pg_config') unless @old;
foreach my $i (0 .. $#old)
{
	upgrades(bindir_of($old[$i]), $i % 2 ? '--link' : ());
}
done_testing();
