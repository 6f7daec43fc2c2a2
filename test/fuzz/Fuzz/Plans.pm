# Fuzz::Plans
#
# Random statements around a call that writes. Each runs with statistics that are far too
# low and far too high, and with each method of the planner switched off. A statement is
# either refused (0A000), or the calls that have been made are those whose results it
# returns or writes: one for each row if the arguments come from the row, otherwise one in
# all.

package Fuzz::Plans;

use strict;
use warnings FATAL => 'all';

use Fuzz::Random;

# Each schema has the same rows. The tables of "low" were analyzed with one row, those of
# "high" with thousands; g and h are correlated, and the planner takes them for independent.
my $setup = q{
	CREATE EXTENSION idempotency;
	CREATE FUNCTION fill(s text) RETURNS void LANGUAGE plpgsql AS $$
	BEGIN
		EXECUTE format('SET LOCAL search_path = %I', s);
		CREATE TABLE item (id int PRIMARY KEY, g int, h int, done text) WITH (autovacuum_enabled = off);
		CREATE TABLE line (item int, n int, g int, h int, done text, PRIMARY KEY (item, n)) WITH (autovacuum_enabled = off);
		CREATE TABLE part (id int, g int, h int, done text) PARTITION BY RANGE (id);
		CREATE TABLE part_1 PARTITION OF part FOR VALUES FROM (0) TO (13) WITH (autovacuum_enabled = off);
		CREATE TABLE part_2 PARTITION OF part FOR VALUES FROM (13) TO (1000000) WITH (autovacuum_enabled = off);
		CREATE TABLE effect (k text, new text, n bigint);
		CREATE TABLE single (k text PRIMARY KEY, new text);
		CREATE TABLE none (k text); CREATE TABLE few (k text);
		CREATE INDEX ON item (g); CREATE INDEX ON line (g); CREATE INDEX ON part (id);
		CREATE VIEW items AS SELECT * FROM item WHERE g < 4;
		IF s = 'high' THEN
			INSERT INTO item SELECT i, i % 5, i % 5 FROM generate_series(1000, 4000) AS i;
			INSERT INTO line SELECT i, 1, i % 5, i % 5 FROM generate_series(1000, 4000) AS i;
			INSERT INTO part SELECT i, i % 5, i % 5 FROM generate_series(1000, 4000) AS i;
		ELSE
			INSERT INTO item VALUES (0, 1, 1); INSERT INTO line VALUES (0, 0, 1, 1); INSERT INTO part VALUES (0, 1, 1);
		END IF;
		ANALYZE item; ANALYZE line; ANALYZE part;
		INSERT INTO few VALUES ('3'), ('m');
		DELETE FROM item; DELETE FROM line; DELETE FROM part;
		INSERT INTO item SELECT i, i % 5, i % 5 FROM generate_series(1, 24) AS i;
		INSERT INTO line SELECT i, n, i % 5, i % 5 FROM generate_series(1, 24) AS i, generate_series(1, 2) AS n;
		INSERT INTO part SELECT i, i % 5, i % 5 FROM generate_series(1, 24) AS i;
	END $$;
	CREATE FUNCTION expensive(k text) RETURNS boolean COST 1000000 LANGUAGE plpgsql AS 'BEGIN RETURN k < ''2''; END';
	CREATE SCHEMA low; CREATE SCHEMA high;
	SELECT fill('low'), fill('high');

	-- Runs a statement with each setting, and undoes it. "effect" reads what it has written;
	-- "fixed": the call has no argument of the row; "again": a row can be returned twice.
	CREATE FUNCTION try(statement text, effect text, fixed boolean, again boolean) RETURNS text LANGUAGE plpgsql AS $$
	DECLARE
		schema text;
		setting text;
		rows text[];
		row record;
		calls int;
		new text[];
	BEGIN
		FOREACH schema IN ARRAY ARRAY['low', 'high'] LOOP
			FOREACH setting IN ARRAY ARRAY['bitmapscan', 'hashagg', 'hashjoin', 'incremental_sort', 'indexscan', 'material', 'memoize',
					'mergejoin', 'nestloop', 'seqscan', 'sort', 'partition_pruning'] LOOP
				BEGIN
					PERFORM set_config('search_path', schema, true), set_config('enable_' || setting, 'off', true);
					rows := '{}';
					IF effect IS NOT NULL THEN
						EXECUTE statement;
					ELSIF statement ~ '^(UPDATE|DELETE|INSERT) |^WITH c AS .* (UPDATE|DELETE FROM) (none|few) ' THEN
						EXECUTE format('CREATE TEMP TABLE got AS WITH returned AS (%s) SELECT * FROM returned', statement);
					ELSE
						EXECUTE 'CREATE TEMP TABLE got AS ' || statement;	-- a loop would be refused
					END IF;
					FOR row IN EXECUTE coalesce(effect, 'SELECT k, new FROM got') LOOP
						rows := rows || CASE WHEN row.new::text <> 'false' THEN row.k || ' ' || row.new END;
					END LOOP;
					SELECT count(*) INTO calls FROM (SELECT FROM idempotency.key UNION ALL SELECT FROM idempotency.outbox) AS c;
					RAISE EXCEPTION USING ERRCODE = 'P9999';
				EXCEPTION
					WHEN SQLSTATE 'P9999' THEN NULL;
					WHEN feature_not_supported THEN RETURN 'refused';
				END;
				new := array_remove(rows, NULL);
				IF fixed AND (rows <> new OR calls > 1 OR calls = 0 AND rows <> '{}')
					OR NOT fixed AND (calls <> (SELECT count(DISTINCT n) FROM unnest(new) AS n) OR NOT again AND calls <> cardinality(new)) THEN
					RETURN format('%s of %s rows, %s calls in "%s" without %s', cardinality(new), cardinality(rows), calls, schema, setting);
				END IF;
			END LOOP;
		END LOOP;
		RETURN 'held';
	END $$};

# A query with the columns k and new: %s is FROM and WHERE, %k the key, %c the call, %t the
# end; %f: only with a key that is the same for all rows. In the second list, such a call
# runs once for the query.
my @rows = (('SELECT %k AS k, %c AS new%s%t') x 6, 'SELECT DISTINCT %k AS k, %c AS new%s', 'SELECT %k AS k, max(%c::text) AS new%s GROUP BY 1',
	'SELECT %k AS k, %c AS new, row_number() OVER (ORDER BY %k)%s%t', 'SELECT k, new FROM (SELECT %k AS k, %c AS new%s%t) AS s',
	"SELECT %k AS k, 'true' AS new%s AND %c::text <> 'false'%t", "SELECT %k AS k, 'true' AS new%s AND public.expensive(%k::text) AND %c::text <> 'false'%t",
	'SELECT %k AS k, %c AS new%s UNION ALL SELECT %k, %c%s', "SELECT %k AS k, idempotency.once_many('s', ARRAY[%k::text, %k::text]) AS new%s%t",
	'SELECT %k AS k, %c AS new%s FOR UPDATE OF a');
my @queries = ('SELECT %k AS k, (SELECT %c) AS new%s%t', "SELECT %k AS k, 'true' AS new%s AND (SELECT %c)::text <> 'false'%t",
	"SELECT %k AS k, 'true' AS new%s AND EXISTS (SELECT %c)%t", "SELECT %k AS k, 'true' AS new%s AND EXISTS (SELECT FROM %c AS new WHERE new::text <> 'false')%t",
	"SELECT %k AS k, 'true' AS new%s AND 'true' IN (SELECT %c::text)%t",
	"SELECT %k AS k, 'true' AS new%s AND %k::text = ANY (ARRAY(SELECT idempotency.once_many('s', ARRAY[%k::text])))%t",
	map { ("SELECT %k AS k, s.new FROM %a, LATERAL $_ AS s (new)%w%t", "SELECT %k AS k, s.new FROM %a LEFT JOIN LATERAL $_ AS s (new) ON true%w%t",
		"%fSELECT %k AS k, s.new FROM $_ AS s (new) JOIN %a ON true%w%t") }
		('%c') x 3, '(SELECT %c)', '(VALUES (%c))', '(SELECT %c FROM item AS x WHERE x.id = 3)', '(SELECT %c UNION ALL SELECT %c LIMIT 1)',
		"idempotency.once_many('s', ARRAY[%k::text])");

# Statements that write; the second one reads what has been written.
my $done = "SELECT id::text AS k, done AS new FROM item WHERE done IS NOT NULL";
my @writes = (
	(map { [ $_, undef, 0 ] } 'UPDATE item AS a SET done = 1 WHERE g = 3 RETURNING %k AS k, %c AS new',
		"UPDATE item AS a SET done = 1 WHERE g = 3 AND %c::text <> 'false' RETURNING %k AS k, 'true' AS new",
		'UPDATE item AS a SET done = %c RETURNING %k AS k, done AS new', 'DELETE FROM part AS a WHERE h < 3 RETURNING %k AS k, %c AS new',
		'WITH d AS (DELETE FROM item AS a WHERE h < 3 RETURNING %k AS k, %c AS new) SELECT * FROM d',
		'INSERT INTO item AS a SELECT id + 30, g FROM part RETURNING %k AS k, %c AS new'),
	[ 'MERGE INTO item AS a USING part AS b ON a.id = b.id AND %c IS NOT NULL WHEN MATCHED AND b.g = 3 THEN UPDATE SET done = 1', $done, 0 ],
	[ 'MERGE INTO item AS a USING part AS b ON a.id = b.id WHEN MATCHED AND b.g = 3 THEN UPDATE SET done = %c', $done, 0 ],
	(map { ([ "%fMERGE INTO item AS a USING $_ AS s (new) ON a.g = 3 WHEN MATCHED AND s.new::text <> 'false' THEN UPDATE SET done = 1", $done, 1 ],
		[ "%fUPDATE item AS a SET done = 1 FROM $_ AS s (new) WHERE a.g = 3 AND s.new::text <> 'false'", $done, 1 ]) } '%c', '(SELECT %c)', '(VALUES (%c))'),
	[ "%fINSERT INTO effect VALUES (7, %c), (8, %c)", 'SELECT k, new FROM effect', 0 ],
	[ "%fINSERT INTO single VALUES ('m', %c) ON CONFLICT DO NOTHING", 'SELECT k, new FROM single', 0 ]);

# Statements around a query (%q); the third field: they can return a row of it again.
my @around = ((['%q', undef, 0]) x 6, ['WITH c AS (%q) SELECT k, new FROM c', undef, 0], ['WITH c AS MATERIALIZED (%q), d AS (SELECT * FROM c) SELECT k, new FROM d', undef, 0],
	['WITH c AS NOT MATERIALIZED (%q) SELECT c.k, new FROM c JOIN line ON line.g = 3', undef, 1], ['WITH c AS (%q) SELECT c.k, new FROM c JOIN line USING (n) LIMIT 2' =~ s/USING \(n\)/ON true/r, undef, 1],
	['INSERT INTO effect %q', 'SELECT k, new FROM effect', 0], ["INSERT INTO single SELECT k, max(new) FROM (SELECT k::text, new::text FROM (%q) AS s) AS s GROUP BY 1", 'SELECT k, new FROM single', 0],
	["WITH c AS (%q) SELECT id AS k, 'true' AS new FROM item WHERE false", undef, 0],
	['WITH c AS (%q) SELECT k, new FROM c WHERE false', undef, 0], ['WITH c AS (%q) SELECT k, new FROM c ORDER BY 1', undef, 0],
	['WITH c AS (%q), d AS (SELECT k, new FROM c) INSERT INTO effect SELECT k, new FROM d', 'SELECT k, new FROM effect', 0],
	(map { [ "WITH c AS (%q), d AS (INSERT INTO effect SELECT k, new FROM c RETURNING k, new) $_", 'SELECT k, new FROM effect', 0 ] }
		'SELECT d.k FROM d JOIN none AS o ON o.k = d.k', 'UPDATE item SET done = 1 FROM d WHERE id::text = d.k', 'SELECT EXISTS (SELECT FROM d)'),
	# Readers of a part of the rows: all are refused.
	(map { my $other = $_; map { [ "WITH c AS (%q) $_" =~ s/OTHER/$other/r, undef, 1 ] }
		'SELECT c.k, new FROM c JOIN OTHER AS o ON o.k = c.k::text', 'SELECT c.k, new FROM c, OTHER AS o', 'SELECT o.k, new FROM OTHER AS o LEFT JOIN c ON o.k = c.k::text',
		'SELECT k, new FROM c WHERE k::text IN (SELECT k FROM OTHER)', 'SELECT k, new FROM c WHERE EXISTS (SELECT FROM OTHER AS o WHERE o.k = c.k::text)',
		"SELECT k, 'true' AS new FROM OTHER WHERE k IN (SELECT k::text FROM c WHERE new::text <> 'false')", "SELECT k, 'true' AS new FROM OTHER WHERE EXISTS (SELECT FROM c)",
		"SELECT k, 'true' AS new FROM OTHER AS o WHERE (SELECT count(*) FROM c WHERE c.k::text = o.k) > 0", 'SELECT s.k, new FROM (SELECT k, new FROM c) AS s JOIN OTHER AS o ON o.k = s.k::text',
		"UPDATE OTHER AS o SET k = o.k FROM c WHERE o.k = c.k::text RETURNING c.k, new", "DELETE FROM OTHER AS o USING c WHERE o.k = c.k::text RETURNING c.k, new" } qw(none few)),
	['WITH c AS (%q) SELECT DISTINCT 1 AS k, true AS new FROM c', undef, 1], ['WITH c AS (%q) SELECT k, new FROM c UNION ALL SELECT k, new FROM c LIMIT 1', undef, 1]);

# statement returns a statement, the query that reads what it writes, whether its call runs
# once for all rows, and whether it can return a row again.
sub statement
{
	my ($from, $key, $more) = @{ pick(['item AS a', 'a.id', 1], ['part AS a', 'a.id', 1], ['items AS a', 'a.id', 1],
			['line AS a', "pg_catalog.concat(a.item, '.', a.n)", 1], ['generate_series(1, 9) AS a (id)', 'a.id', 0],
			[q{unnest('{1,2,2,3}'::int[]) AS a (id)}, 'a.id', 0], ['(SELECT * FROM item WHERE g = 3) AS a', 'a.id', 1]) };
	my $id = $key =~ /item/ ? 'a.item' : 'a.id';
	my $where = pick(' WHERE true', " WHERE $id < 20", " WHERE $id IN (SELECT item FROM line WHERE g = 3)",
		" WHERE NOT EXISTS (SELECT FROM line WHERE item = $id AND g = 2)", (' WHERE a.g = 3 AND a.h = 3') x (2 * $more));
	my $join = pick(('') x 4, ' JOIN line AS b ON b.g = 3', ' LEFT JOIN item AS b ON b.g = 3 AND b.h = 3', ' CROSS JOIN part AS b');
	my $tail = pick(('') x 6, ' ORDER BY 1', ' ORDER BY 1 LIMIT 3', ' LIMIT 3', ' OFFSET 2', ' ORDER BY 2', ' FOR UPDATE', ' FETCH FIRST 2 ROWS ONLY');
	my ($inner, $outer) = (pick(chance(50) ? @queries : @rows), pick(@around));
	my $once = grep { $_ eq $inner } @queries;
	my ($text, $effect, $again) = @$outer;

	if (chance(20))
	{
		($text, $effect, $once) = @{ pick(@writes) };
		($inner, $key, $again) = ('', 'a.id', 0);
	}
	my $fixed = "$text$inner" =~ /%f/ || chance(35);
	my $k = $fixed ? "'m'" : $key;
	my $call = pick(("idempotency.once('s', ${k}::text)") x 2, "idempotency.publish('t', to_json(${k}::text))");
	my %value = (f => '', q => $inner, k => $k, c => $call, a => $from, w => "$join$where", s => " FROM $from$join$where", t => $tail);

	1 while $text =~ s/%([a-z])/$value{$1}/;
	$once &&= $fixed;
	return ($text, $effect, $once, $again || $once);
}

# play plays some statements.
sub play
{
	my ($session, $count) = @_;
	my %results = (held => 0, refused => 0);

	$session->ok($setup, 'SET jit = off');
	foreach (1 .. $count)
	{
		my ($statement, $effect, $fixed, $again) = statement();
		my $result = $session->ask('SELECT try(' . join(', ', literal($statement), defined $effect ? literal($effect) : 'NULL', $fixed ? 'true' : 'false', $again ? 'true' : 'false') . ')');

		die "$session->{state} " . $session->message . ": $statement\n" if $result eq '';
		die "$result: $statement\n" if !exists $results{$result};
		$results{$result}++;
	}
	return join ', ', map { "$results{$_} $_" } sort keys %results;
}

1;
