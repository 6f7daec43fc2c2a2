# shellcheck shell=bash
#
# The suite scale: the cost of a charge when many keys are stored already, for keys in
# order of time (UUIDv7), random keys (v4), and keys in order of time in 2,000 scopes
# (scopes), right after a checkpoint, when the first change of a page writes the whole page
# to WAL; and the same while expired keys are deleted, by the worker or by hand.
# docs/scale.svg is drawn from results/scale.csv.
#
#	KINDS="v7 v4 scopes"            kinds of keys
#	SIZES="100000 1000000 10000000" numbers of stored keys, in this order
#	CHARGES=2000    number of charges that are measured after a checkpoint
#	PERIOD=600      seconds in which the stored keys expire, one after the other
#
# With ten million keys the suite takes about fifteen minutes, 20 GB of disk, and memory for
# 6 GB of shared buffers.

kinds=${KINDS:-v7 v4 scopes}
sizes=${SIZES:-100000 1000000 10000000}
charges=${CHARGES:-2000}
period=${PERIOD:-600}
[[ "$charges $period $sizes" =~ ^[1-9][0-9]{0,7}(\ [1-9][0-9]{0,8})+$ ]] || die "SIZES, CHARGES and PERIOD must be positive numbers"
[[ $kinds =~ ^(v7|v4|scopes)(\ (v7|v4|scopes))*$ ]] || die "KINDS must be of v7, v4 and scopes"

# The tables must fit in memory, because the suite does not measure reads from disk.
memory=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
settings=(
	full_page_writes=on shared_buffers=$((memory / 3))MB "bench.sizes=$sizes" "bench.kinds=$kinds"
	shared_preload_libraries=idempotency,pg_stat_statements idempotency.reaper_naptime=0
)
measured="of $charges charges after a checkpoint"

# measure_charges measures one contestant in its own session, for the figures of a prefix.
# The charges before the checkpoint plan the statements.
measure_charges() {
	local contestant=$3 arguments="$1, '$2', '$3', '$4', $5, $charges"
	sql "CALL bench.charge('$contestant', bench.new_keys('$4', 100))" \
		"CHECKPOINT" "SELECT pg_stat_statements_reset()" \
		"CALL bench.measure($arguments)" "CALL bench.measure_wal($arguments)" >/dev/null
}

# measure_rounds measures all contestants: measure_rounds prefix kind size
measure_rounds() {
	local round contestant
	for ((round = 1; round <= rounds; round++)); do
		# shellcheck disable=SC2086
		for contestant in $(in_turn "$round" $contestants); do
			measure_charges "$round" "$1" "$contestant" "$2" "$3"
		done
	done
}

# reaper starts or stops the deletion of expired keys of both tables: reaper on|off
reaper() {
	local naptime=0 reaping="TRUNCATE bench.reaping"
	if [ "$1" = on ]; then
		naptime=100ms
		reaping="INSERT INTO bench.reaping VALUES (true)"
	fi
	sql "$reaping" "ALTER SYSTEM SET idempotency.reaper_naptime = '$naptime'" "SELECT pg_reload_conf()" >/dev/null
}

run_scale() {
	local kind stored size reaped deleter
	for kind in $kinds; do
		empty_tables
		stored=0
		for size in $sizes; do
			say "$size keys, $kind"
			sql "CALL bench.grow('$kind', $stored, $size, '$period s')" "ANALYZE bench.hand_key, idempotency.key"
			stored=$size
			settle
			measure_rounds '' "$kind" "$size"

			reaped=$(sql "SELECT coalesce(sum(rows_reaped), 0) FROM idempotency.reaper")
			reaper on
			sql "CALL bench.reap_hand()" &
			deleter=$!
			measure_rounds reaped_ "$kind" "$size"
			reaper off
			wait "$deleter"
			sql "CALL bench.check_reaped($reaped)"
		done
	done

	mkdir -p results
	psql -X -q -v ON_ERROR_STOP=1 -c "COPY (TABLE bench.scale) TO STDOUT (FORMAT csv, HEADER)" >results/scale.csv
	gnuplot -e "data = 'results/scale.csv'; picture = 'results/scale.svg'" docs/scale.gnuplot
	say "data and plot: results/scale.csv, results/scale.svg"
}
