# 041_exporter.pl
#
# Proves that examples/monitoring/queries.yaml gives prometheus-postgres-exporter every
# metric that it names, with the correct value, through a role that is only a member of
# pg_monitor. This role can log in as the account of Debian's unit does.
# A Prometheus that scrapes the exporter during a storm has series for every panel of
# grafana.json.

use strict;
use warnings FATAL => 'all';

use ExporterTest;
use HTTP::Tiny;
use IdempotencyTest;
use JSON::PP;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep);

my $root = "$monitoring/../..";
my $queries = "$monitoring/queries.yaml";
my $node = new_node('main', conf => q{
shared_preload_libraries = 'idempotency'
idempotency.reaper_naptime = 0
idempotency.relay_workers = 0
log_statement = none
});

# ----------------------------------------------------------------
# Rows for every metric
# ----------------------------------------------------------------

$node->safe_psql('postgres', q{
	CREATE DATABASE other;
	CREATE ROLE prometheus LOGIN IN ROLE pg_monitor;
	CREATE ROLE exporter LOGIN});
$node->safe_psql('other', q{
	CREATE EXTENSION idempotency;
	SELECT idempotency.once('inbox', 'message');
	SELECT idempotency.subscribe('mail', '{*}')});

# Keys: three completed, one failed, one released, two replayed, one mismatched, one
# taken over, and its former owner.
$node->psql('postgres', q{
	BEGIN;
	SELECT idempotency.claim('charge', 'key-' || i, '{"amount": 1}') FROM generate_series(1, 5) AS i;
	SELECT idempotency.complete('charge', 'key-' || i) FROM generate_series(1, 3) AS i;
	SELECT idempotency.fail('charge', 'key-4', '{}', 402);
	SELECT idempotency.release('charge', 'key-5');
	COMMIT;
	SELECT idempotency.claim('charge', 'key-1');
	SELECT idempotency.claim('charge', 'key-4');
	SELECT idempotency.try_claim('charge', 'key-1', '{"amount": 2}');
	SELECT token FROM idempotency.claim('charge', 'leased', lease => '1 millisecond') \gset
	SELECT pg_sleep(0.01);
	SELECT idempotency.claim('charge', 'leased', lease => '1 hour');
	SELECT idempotency.complete('charge', 'leased', token => :token)},
	on_error_stop => 0);

# Events: five. One subscription has received three, with one dead letter; in the other
# one an event fails, and a second waits behind it.
$node->safe_psql('postgres', q{
	SELECT idempotency.subscribe('mail', '{*}', max_attempts => 1);
	SELECT idempotency.subscribe('print', '{*}');
	SELECT idempotency.publish('order', '{}', 'a'), idempotency.publish('order', '{}', 'a'),
		idempotency.publish('order', '{}', 'b');
	SELECT min(id::text) AS id, max(batch) AS batch FROM idempotency.fetch('mail') \gset
	SELECT idempotency.nack('mail', :batch, :'id', 'no such mailbox');
	SELECT idempotency.ack('mail', :batch);
	SELECT min(id::text) AS id, max(batch) AS batch FROM idempotency.fetch('print') \gset
	SELECT idempotency.nack('print', :batch, :'id', 'no paper', '1 hour');
	SELECT idempotency.ack('print', :batch);
	SELECT idempotency.publish('order', '{}', 'c'), idempotency.publish('order', '{}', 'd');
	SELECT count(*) FROM idempotency.fetch('print', lease => '1 hour')});

$node->poll_query_until('postgres', q{SELECT lag > '0' FROM idempotency.subscriptions WHERE subscription = 'mail'})
	or die 'the lag does not grow';

# One expired row that is deleted; one transaction that holds a key, and one that waits.
$node->safe_psql('postgres', q{SELECT idempotency.once('inbox', 'old', '1 millisecond')});
usleep(10_000);
is($node->safe_psql('postgres', 'SELECT idempotency.reap()'), '1', 'a row is reaped');
my ($owner, $waiter) = map { open_session($node) } 1 .. 2;
$owner->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('charge', 'open')});
$waiter->query_until(qr/waits/, q{\echo waits
	SELECT outcome FROM idempotency.claim('charge', 'open', wait => '10 minutes');
});
$node->poll_query_until('postgres', q{SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted})
	or die 'no session waits';

# ----------------------------------------------------------------
# The portable edition
# ----------------------------------------------------------------

# Its owner sees no statistics of other sessions; the role of the exporter does.
$node->safe_psql('postgres', 'CREATE DATABASE managed; CREATE ROLE managed; GRANT CREATE ON DATABASE managed TO managed');
$node->safe_psql('managed', "SET ROLE managed;\n" . slurp_file("$root/portable/idempotency.sql"));
$node->safe_psql('managed', q{SELECT idempotency.subscribe('mail', '{*}'), idempotency.publish('order', '{}', 'a')});
my ($managed_owner, $managed_waiter) = map { open_session($node, dbname => 'managed') } 1 .. 2;
$managed_owner->query_safe(q{BEGIN; SELECT outcome FROM idempotency.claim('charge', 'open')});
$managed_waiter->query_until(qr/waits/, q{\echo waits
	SELECT outcome FROM idempotency.claim('charge', 'open', wait => '10 minutes');
});
$node->poll_query_until('managed', q{SELECT count(*) = 1 FROM idempotency.holders() WHERE kind = 'waits'})
	or die 'no session waits';

my %query = slurp_file($queries) =~ /^idempotency_(\w+):\n(?:  master: true\n)?  query: \|\n((?:    .*\n)+)/mg;
my %row = (subscription => 'managed|mail|', partition => 'managed|mail|0|', claim => 'managed|1|1|', table => 'managed|key|');
foreach my $name (sort keys %row)
{
	like($node->safe_psql('managed', $query{$name}, extra_params => [ '-U', 'prometheus' ]), qr/^\Q$row{$name}\E/m,
		"portable edition: the query of idempotency_$name");
}
cmp_ok($node->safe_psql('managed', "SELECT oldest_transaction_seconds FROM ($query{claim}) AS q", extra_params => [ '-U', 'prometheus' ]),
	'>', 0, 'portable edition: the age of the oldest transaction');
fails_with($node, "SELECT * FROM idempotency.$_", '42501', "portable edition: no privilege on $_", dbname => 'managed', extra_params => [ '-U', 'prometheus' ])
  foreach qw(keys zombies dead_letters key outbox settings), q{holders('charge', 'open')};
$managed_owner->query_safe('ROLLBACK');
$_->quit for $managed_owner, $managed_waiter;

# ----------------------------------------------------------------
# The exporter's metrics
# ----------------------------------------------------------------

# As in Debian's pg_hba.conf, an account logs in by peer as the role of the same name.
# The map lets this test's account log in as that of Debian's exporter.
my $unit = '/lib/systemd/system/prometheus-postgres-exporter.service';
my $account = -e $unit ? (slurp_file($unit) =~ /^User=(\S+)$/m)[0] : 'prometheus';
my $tester = getpwuid $<;
unlink map { $node->data_dir . "/pg_$_.conf" } qw(hba ident);
$node->append_conf('pg_hba.conf', 'local all all peer map=debian');
$node->append_conf('pg_ident.conf', join "\n", map { "debian $tester $_" } $tester, $account);
$node->reload;
$node->connect_fails('dbname=postgres user=exporter', 'no login under another name',
	expected_stderr => qr/Peer authentication failed/);

# The page and the file name the role; the test adds the host and port.
my @logins = map { /DATA_SOURCE_NAME='(user=\S+) host/ } map { slurp_file($_) } "$root/docs/operations.md", $queries;
is_deeply(\@logins, [ ("user=$account") x 2 ], "the page and the file log in as the unit's account");

my $port = start_exporter($node, $logins[0] =~ s/^user=//r, 'postgres', 'other');
my $content = metrics();
# Its own collector for the background writer does not know 17 and later.
unlike(exporter_log(), qr/level=error(?!.*name=bgwriter)/i, 'the exporter logs no error');
like($content, qr/^pg_exporter_user_queries_load_error\{[^}]*\} 0$/m, 'the exporter loads the file');

# The values by metric and labels, and the types of metrics.
my (%value, %type);
while ($content =~ /^(?:# TYPE (\w+) (\w+)|(idempotency_\w+)\{(.*)\} (\S+))$/mg)
{
	if (defined $1) { $type{$1} = $2; next }
	my ($metric, $labels, $number) = ($3, $4, $5);
	$labels =~ s/,?server="[^"]*"//;
	$value{"$metric\{$labels}"} = $number;
}

# Every metric of the file has its type and a value.
my ($group, %named);
for my $line (split /\n/, slurp_file($queries))
{
	if ($line =~ /^(idempotency_\w+):$/) { $group = $1 }
	elsif ($line =~ /^    - (\w+): \{usage: (COUNTER|GAUGE), description: .+\}$/) { $named{"${group}_$1"} = lc $2 }
}
cmp_ok(scalar keys %named, '>', 30, 'the file names metrics');
is_deeply({ map { $_ => $type{$_} } keys %named }, \%named, 'each metric exists with its type');
is_deeply([ grep { my $metric = $_; !grep { /^\Q$metric\E\{/ } keys %value } sort keys %named ], [], 'each metric has a value');

# expect compares the metrics of one group with any labels.
sub expect
{
	my ($name, $group, $labels, %expected) = @_;
	my %found = map { $_ => $value{"idempotency_${group}_$_\{$labels}"} } keys %expected;
	is_deeply(\%found, \%expected, $name);
	return;
}

expect('the counters', 'stats', 'datname="postgres"',
	claims_total => 8, replays_total => 2, in_progress_total => 0, mismatches_total => 1, takeovers_total => 1,
	completions_total => 4, failures_total => 1, releases_total => 1, stale_tokens_total => 1,
	zombies_reaped_total => 0, published_total => 5, delivered_total => 8, acknowledged_total => 2,
	failed_total => 2, dead_letters_total => 1, events_dropped_total => 0);
expect('the counters of the other database', 'stats', 'datname="other"', claims_total => 1, completions_total => 1, published_total => 0);
expect('a subscription with a dead letter', 'subscription', 'datname="postgres",subscription="mail"',
	lag_events => 2, scheduled => 1, waiting => 0, dead => 1, batch_overdue_seconds => 0, acknowledged_total => 1, paused => 0);
expect('a subscription that waits for a retry', 'subscription', 'datname="postgres",subscription="print"',
	lag_events => 2, scheduled => 1, waiting => 1, dead => 0, failed_total => 1, paused => 0);
expect('a subscription of the other database', 'subscription', 'datname="other",subscription="mail"',
	lag_events => 0, lag_seconds => 0, scheduled => 0, waiting => 0, dead => 0);
expect('open claims', 'claim', 'datname="postgres"', open => 1, waiters => 1);
expect('the reaper', 'reaper', 'datname="postgres"', rows_reaped_total => 1, events_reaped_total => 0);
expect('a database in which no row was reaped', 'reaper', 'datname="other"', rows_reaped_total => 0, events_reaped_total => 0);

my ($mail, $print) = map { qq(datname="postgres",subscription="$_") } qw(mail print);
cmp_ok($value{"idempotency_subscription_lag_seconds{$mail}"}, '>', 0, 'the lag grows while no consumer fetches');
cmp_ok($value{"idempotency_subscription_batch_overdue_seconds{$print}"}, '<', -1000, 'a live lease is not overdue');
cmp_ok($value{"idempotency_subscription_failing_seconds{$print}"}, '>', 0, 'an event fails');
cmp_ok($value{'idempotency_claim_oldest_transaction_seconds{datname="postgres"}'}, '>', 0, 'the oldest transaction has an age');
is($value{'idempotency_table_bytes{datname="postgres",relname="key"}'},
	$node->safe_psql('postgres', q{SELECT pg_total_relation_size('idempotency.key')}), 'the size of the table');

# ----------------------------------------------------------------
# Missing privileges
# ----------------------------------------------------------------

for my $relation (qw(keys zombies dead_letters key outbox))
{
	fails_with($node, "SELECT * FROM idempotency.$relation", '42501', "no privilege on $relation", extra_params => [ '-U', 'prometheus' ]);
}
is($node->safe_psql('postgres', q{SELECT DISTINCT last_error FROM idempotency.subscriptions}, extra_params => [ '-U', 'prometheus' ]),
	'<insufficient privilege>', 'error texts are hidden');

# ----------------------------------------------------------------
# The dashboard
# ----------------------------------------------------------------

# The storm: claims, replays, refusals, waits, takeovers, releases, events, failures and the reaper.
my $scraper = PostgreSQL::Test::Cluster::get_free_port();
my $data = PostgreSQL::Test::Utils::tempdir();
append_to_file("$data/prometheus.yml", "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [$monitoring/alerts.yaml]\n"
	. "scrape_configs: [{job_name: exporter, static_configs: [{targets: ['127.0.0.1:$port']}]}]\n");
my $prometheus_log = '';
my $prometheus = IPC::Run::start([ 'prometheus', "--config.file=$data/prometheus.yml", "--storage.tsdb.path=$data/data",
	"--web.listen-address=127.0.0.1:$scraper" ], '>&', \$prometheus_log);
END { local $?; $prometheus->kill_kill if defined $prometheus }

# series returns the number of series that Prometheus has for an expression.
sub series
{
	my ($expression) = @_;
	my $form = HTTP::Tiny->new->www_form_urlencode({ query => $expression });
	my $reply = HTTP::Tiny->new->get("http://127.0.0.1:$scraper/api/v1/query?$form");
	return 0 if !$reply->{success} && $reply->{status} == 599;
	return scalar @{ decode_json($reply->{content})->{data}{result} // die "$expression: $reply->{content}" };
}

my %expressions = map { my $title = $_->{title}; map { ("$title: $_->{legendFormat}" => $_->{expr}) } @{ $_->{targets} } }
  @{ decode_json(slurp_file("$monitoring/grafana.json"))->{panels} };
cmp_ok(scalar keys %expressions, '>', 20, 'the dashboard has expressions');
s/\$database/.*/g, s/\$__rate_interval/1m/g for values %expressions;
my %empty = %expressions;
for (my $end = time + $PostgreSQL::Test::Utils::timeout_default; %empty && time < $end;)
{
	$node->psql('postgres', q{
		SELECT idempotency.claim('storm', 'key'), idempotency.complete('storm', 'key');
		SELECT idempotency.claim('storm', 'key', '{}');
		SELECT idempotency.publish('order', '{}', 'storm');
		SELECT max(batch) AS batch FROM idempotency.fetch('mail') \gset
		SELECT idempotency.ack('mail', :batch)}, on_error_stop => 0);
	usleep(500_000);
	delete @empty{ grep { series($empty{$_}) > 0 } keys %empty };
}
is_deeply(\%empty, {}, 'Prometheus has series for every expression of the dashboard') or diag($prometheus_log);
cmp_ok(series(q{ALERTS{alertname="IdempotencyDeadLetters"}}), q{>}, 0, q{Prometheus evaluates the rules});

$owner->query_safe('ROLLBACK');
$_->quit for $owner, $waiter;
done_testing();
