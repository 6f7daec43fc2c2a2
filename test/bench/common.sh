# shellcheck shell=bash
#
# What all suites of test/bench share: rounds, the CPU and the WAL of one
# backend, throughput, and the report.  test/bench/run sources this file beside
# a throw-away server; samples are kept in that server, in schema bench.

rounds=${ROUNDS:-5}
operations=${OPERATIONS:-20000}
seconds_each=${SECONDS_EACH:-1}

for number in "$rounds" "$operations" "$seconds_each"; do
	[[ $number =~ ^[1-9][0-9]{0,8}$ ]] || die "ROUNDS, OPERATIONS and SECONDS_EACH are positive numbers"
done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# sql runs statements in one session, each a message and a transaction of its
# own, and prints bare results.
sql() {
	local arguments=() statement
	for statement in "$@"; do
		arguments+=(-c "$statement")
	done
	psql -X -q -A -t -v ON_ERROR_STOP=1 "${arguments[@]}"
}

# sql_file runs a file.
sql_file() {
	psql -X -q -v ON_ERROR_STOP=1 -f "$1"
}

# prepare_suite makes the tables of samples, and those of the suite.
prepare_suite() {
	sql_file "$bench/common.sql"
	sql_file "$bench/$suite.sql"
}

# in_turn prints the contestants in an order that differs from round to round,
# so that none is always first: in_turn round contestant ...
in_turn() {
	local round=$1 shift_by
	shift
	shift_by=$(((round - 1) % $#))
	echo "${@:shift_by+1}" "${@:1:shift_by}"
}

# sample records one measured value, an expression of SQL:
# sample round figure contestant value
sample() {
	sql "INSERT INTO bench.sample VALUES ($1, '$2', '$3', $4)"
}

# sample_marks turns the marks that a backend has left (bench.mark(turn)) into
# samples of CPU per operation:
# sample_marks round figure "contestant-0 contestant-1 ..." operations-per-turn
sample_marks() {
	sql "CALL bench.sample_marks($1, '$2', string_to_array('$3', ' '), $4)"
}

# wal_position prints how far WAL has been written; sample_wal records how much
# that is for one operation since then:
# sample_wal round figure contestant position operations
wal_position() {
	sql "SELECT pg_current_wal_insert_lsn()"
}
sample_wal() {
	sample "$1" "$2" "$3" "(pg_current_wal_insert_lsn() - '$4') / $5"
}

# settle brings the server to the same state before every measurement: the
# sessions before have left, and with them their statistics and dirty pages.
settle() {
	sql "CALL bench.wait_until_alone()" "CHECKPOINT"
}

# pgbench_quietly runs pgbench, and shows its complaints only if it fails:
# pgbench_quietly script option ...
pgbench_quietly() {
	local script=$1
	shift
	pgbench -n -M simple -f "$script" "$@" >"$work/pgbench" 2>"$work/pgbench.errors" || {
		cat "$work/pgbench" "$work/pgbench.errors" >&2
		die "pgbench did not run ${script##*/}"
	}
}

# measure_throughput runs operations in several sessions for some seconds, and
# records it as a sample:
# measure_throughput round figure contestant script clients option ...
measure_throughput() {
	local round=$1 figure=$2 contestant=$3 script=$4 clients=$5 throughput
	shift 5
	settle
	pgbench_quietly "$script" -c "$clients" -j "$(nproc)" -T "$seconds_each" "$@"
	throughput=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$work/pgbench")
	grep -q '^number of failed transactions: 0 ' "$work/pgbench" && [ -n "$throughput" ] || {
		cat "$work/pgbench" >&2
		die "transactions failed in ${script##*/}"
	}
	sample "$round" "$figure" "$contestant" "$throughput"
}

# report prints the table and writes results/bench.csv.
report() {
	local missing
	missing=$(sql "SELECT * FROM bench.missing($rounds)")
	[ -z "$missing" ] || die "not measured: ${missing//$'\n'/, }"

	mkdir -p results
	psql -X -q -v ON_ERROR_STOP=1 -c "COPY (SELECT '$suite', r.* FROM bench.csv AS r) TO STDOUT (FORMAT csv)" >"$work/csv"
	{
		echo "suite,figure,contestant,value,unit,ratio_to_hand"
		cat "$work/csv"
	} >results/bench.csv
	echo
	psql -X -q -v ON_ERROR_STOP=1 -P footer=off -P null= -c "TABLE bench.report"
	say "medians of $rounds rounds of $operations operations; also in results/bench.csv"
}
