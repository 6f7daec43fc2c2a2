# ExporterTest.pm
#
# Runs prometheus-postgres-exporter with examples/monitoring/queries.yaml, and reads its
# metrics. The runner puts this directory into @INC.

package ExporterTest;

use FindBin;
use strict;
use warnings FATAL => 'all';

use Exporter 'import';
use HTTP::Tiny;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

our @EXPORT = qw($monitoring start_exporter exporter_log metrics);

our $monitoring = "$FindBin::RealBin/../../../examples/monitoring";

# `make test` installs them, and counts a skipped script as passed.
for my $program (qw(prometheus-postgres-exporter prometheus promtool))
{
	next if grep { -x "$_/$program" } split /:/, $ENV{PATH};
	die "$program is not installed" if $ENV{IDEMPOTENCY_SKIP_NOTHING};
	plan skip_all => "$program is not installed";
}

my ($running, $port);
my $log = '';
END { local $?; $running->kill_kill if defined $running }

# start_exporter starts the exporter as a role, for databases of a server, and returns its port.
sub start_exporter
{
	my ($node, $role, @databases) = @_;
	$port = PostgreSQL::Test::Cluster::get_free_port();
	local $ENV{DATA_SOURCE_NAME} = sprintf 'user=%s host=%s port=%d dbname=%s sslmode=disable', $role, $node->host, $node->port, $databases[0];
	$running = IPC::Run::start(
		[ 'prometheus-postgres-exporter', "--web.listen-address=127.0.0.1:$port", "--extend.query-path=$monitoring/queries.yaml",
			'--auto-discover-databases', '--include-databases=' . join(',', @databases),
			'--disable-default-metrics', '--disable-settings-metrics' ],
		'>&', \$log);
	return $port;
}

sub exporter_log
{
	$running->pump_nb;
	return $log;
}

# metrics returns what the exporter answers, once it does.
sub metrics
{
	my $answer;
	foreach (1 .. 10 * $PostgreSQL::Test::Utils::timeout_default)
	{
		$answer = HTTP::Tiny->new->get("http://127.0.0.1:$port/metrics");
		return $answer->{content} if $answer->{success};
		usleep(100_000);
	}
	die "the exporter does not respond: $answer->{content}";
}

1;
