# 032_upgrade.pl
#
# Proves that a database comes through an upgrade of the server: by pg_upgrade, which
# copies files or links them, with the new server's workers awake all the time, and
# by dump and restore.  Every row is
# there, byte for byte, and clients, owners, consumers and workers go on.  The old
# servers are those whose pg_config programs OLD_PG_CONFIG names, with the extension
# installed in each; without it the old server is the new one.

use strict;
use warnings FATAL => 'all';

use File::Basename;
use IdempotencyTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use RestoreTest;
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $awake = '-c idempotency.reaper_naptime=100ms -c idempotency.relay_workers=2';

# What initdb does without being asked differs from version to version.
my @initdb = ('--encoding=UTF8', '--locale=C', '--data-checksums');

# bindir_of returns where the programs of a pg_config are.
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
	my $old = new_node('old' . basename(dirname($bindir)), conf => resting(), new => { install_path => dirname($bindir) }, init => { extra => \@initdb });
	my $new = PostgreSQL::Test::Cluster->new('after_' . $old->name);
	my $past = make_past($old);
	my $before = rows_of($old);
	my ($from, $to) = map { $_->config_data('--version') =~ s/^PostgreSQL (\S+).*/$1/r } $old, $new;

	$new->init(extra => \@initdb);
	$new->append_conf('postgresql.conf', "autovacuum = off\n" . resting());
	$new->command_ok([ 'pg_dump', '--format=custom', '--file', "$dir/dump", '--dbname', $old->connstr('postgres') ], "$from to $to: pg_dump ends well");
	$old->stop;

	chdir $dir;
	command_ok([ 'pg_upgrade', @mode, '--no-sync', '--old-datadir', $old->data_dir, '--new-datadir', $new->data_dir,
		'--old-bindir', $bindir, '--new-bindir', $new->config_data('--bindir'), '--new-options', $awake, '--socketdir', $new->host,
		'--old-port', $old->port, '--new-port', $new->port ], "$from to $to: pg_upgrade ends well");
	$new->start;
	ok(rows_of($new) eq $before, "$from to $to: every row is there, byte for byte");
	goes_on($new, $past, name => "$from to $to");

	$new->safe_psql('postgres', 'CREATE DATABASE restored TEMPLATE template0');
	$new->command_ok([ 'pg_restore', '--exit-on-error', '--dbname=restored', "$dir/dump" ], "$from to $to: pg_restore ends well");
	ok(rows_of($new, 'restored') eq $before, "$from to $to, restored: every row is there, byte for byte");
	goes_on($new, $past, dbname => 'restored', name => "$from to $to, restored");
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
