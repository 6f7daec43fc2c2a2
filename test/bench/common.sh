# shellcheck shell=bash
#
# The common parts of all suites of test/bench: contestants, rounds, the CPU and the WAL
# of one backend, throughput, and the report. test/bench/run sources this file and
# starts a throw-away server; the samples are stored in that server, in schema bench.
#
# A suite can set the array settings, for settings of its server, and measured, for a
# description of a round.

rounds=${ROUNDS:-5}
operations=${OPERATIONS:-20000}
seconds_each=${SECONDS_EACH:-1}

for number in "$rounds" "$operations" "$seconds_each"; do
	[[ $number =~ ^[1-9][0-9]{0,8}$ ]] || die "ROUNDS, OPERATIONS and SECONDS_EACH must be positive numbers"
done

# floor does the business work without retry protection, and hand is a hand-written
# implementation; their tables are bench.charge, bench.hand_key and idempotency.key. A
# suite can have others.
contestants="floor hand idempotency"
settings=()
measured="of $operations operations"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# sql runs statements in one session, each as a message and a transaction, and prints
# unformatted results.
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

# prepare_suite creates the tables of samples, and those of the suite.
prepare_suite() {
	sql_file "$bench/common.sql"
	sql_file "$bench/$suite.sql"
}

# in_turn prints the contestants in an order that differs from round to round, so that
# no contestant is always first: in_turn round contestant ...
in_turn() {
	local round=$1 shift_by
	shift
	shift_by=$(((round - 1) % $#))
	echo "${@:shift_by+1}" "${@:1:shift_by}"
}

# chosen returns whether a suite that has the variable figures measures one of them.
chosen() {
	case " $figures " in *" $1 "*) ;; *) return 1 ;; esac
}

# turn_of prints a contestant's number in the pgbench scripts.
turn_of() {
	case $1 in floor) echo 0 ;; hand) echo 1 ;; idempotency) echo 2 ;; pgq) echo 3 ;; esac
}

# empty_tables removes the rows of earlier measurements.
empty_tables() {
	sql "TRUNCATE bench.charge, bench.hand_key, idempotency.key RESTART IDENTITY"
}

# sample records one value, an SQL expression: sample round figure contestant value
sample() {
	sql "INSERT INTO bench.sample VALUES ($1, '$2', '$3', $4)"
}

# sample_marks converts the marks of a backend (bench.mark(turn)) into samples of CPU
# per operation: sample_marks round figure "contestant-0 contestant-1 ..."
# operations-per-turn
sample_marks() {
	sql "CALL bench.sample_marks($1, '$2', string_to_array('$3', ' '), $4)"
}

# wal_position prints the current WAL position; sample_wal records the WAL per operation
# since then: sample_wal round figure contestant position operations
wal_position() {
	sql "SELECT pg_current_wal_insert_lsn()"
}
sample_wal() {
	sample "$1" "$2" "$3" "(pg_current_wal_insert_lsn() - '$4') / $5"
}

# sample_bytes records the size of a contestant's key table per key: sample_bytes round
# figure contestant keys
sample_bytes() {
	sample "$1" "$2" "$3" "pg_total_relation_size(bench.key_table('$3'))::double precision / $4"
}

# settle brings the server to the same state before every measurement: earlier sessions
# have ended, their statistics are reported, and their dirty pages are written.
settle() {
	sql "CALL bench.wait_until_alone()" "CHECKPOINT"
}

# pgbench_quietly runs pgbench, and shows its messages only if it fails. A file of this
# shell, which can be one of several at the same time, keeps its output: pgbench_quietly
# script option ...
pgbench_quietly() {
	local script=$1 output=$work/pgbench.$BASHPID
	shift
	pgbench -n -M simple -f "$script" "$@" >"$output" 2>"$output.errors" || {
		cat "$output" "$output.errors" >&2
		die "pgbench did not run ${script##*/}"
	}
}

# measure_throughput runs operations in several sessions for some seconds, and records
# the throughput as a sample: measure_throughput round figure contestant script clients
# option ...
measure_throughput() {
	local round=$1 figure=$2 contestant=$3 script=$4 clients=$5 throughput output=$work/pgbench.$BASHPID
	shift 5
	settle
	pgbench_quietly "$script" -c "$clients" -j "$(nproc)" -T "$seconds_each" "$@"
	throughput=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$output")
	grep -q '^number of failed transactions: 0 ' "$output" && [ -n "$throughput" ] || {
		cat "$output" >&2
		die "transactions failed in ${script##*/}"
	}
	sample "$round" "$figure" "$contestant" "$throughput"
}

# restart_with restarts the server with other settings; a setting without a value is
# reset to its first value: restart_with name=value ... name= ...
restart_with() {
	local setting statements=() data
	for setting in "$@"; do
		case $setting in
		*=) statements+=("ALTER SYSTEM RESET ${setting%=}") ;;
		*) statements+=("ALTER SYSTEM SET ${setting%%=*} = '${setting#*=}'") ;;
		esac
	done
	sql "CALL bench.wait_until_alone()" "${statements[@]}"
	data=$(sql "SHOW data_directory")
	(
		cd "$data"
		as_server "$("$PG_CONFIG" --bindir)/pg_ctl" restart --silent --wait --mode=fast \
			--pgdata="$data" --log="$data/../log" </dev/null >/dev/null 2>&1
	) || {
		tail "$data/../log" >&2
		die "the server did not restart"
	}
}

# report prints the table, and writes the suite's part of results/bench.csv.
report() {
	local missing
	missing=$(sql "SELECT * FROM bench.missing($rounds)")
	[ -z "$missing" ] || die "not measured: ${missing//$'\n'/, }"

	mkdir -p results
	{
		echo "suite,figure,contestant,value,unit,ratio"
		[ ! -e results/bench.csv ] || sed -e 1d -e "/^$suite,/d" results/bench.csv
		psql -X -q -v ON_ERROR_STOP=1 -c "COPY (SELECT '$suite', r.* FROM bench.csv AS r) TO STDOUT (FORMAT csv)"
	} >"$work/csv"
	cp "$work/csv" results/bench.csv
	echo
	psql -X -q -v ON_ERROR_STOP=1 -P footer=off -P null= \
		-c "SELECT $(sql "SELECT bench.report_columns()") FROM bench.report"
	say "$suite: medians of $rounds rounds $measured; also in results/bench.csv"
}
