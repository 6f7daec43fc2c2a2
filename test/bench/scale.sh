# shellcheck shell=bash
#
# The suite scale: the cost of a charge when many keys are stored already, for keys in
# order of time (UUIDv7), random keys (v4), and keys in order of time in 2,000 scopes
# (scopes), right after a checkpoint, when the first change of a page writes the whole page
# to WAL. docs/scale.svg is drawn from results/scale.csv.
#
#	KINDS="v7 v4 scopes"            kinds of keys
#	SIZES="100000 1000000 10000000" numbers of stored keys, in this order
#	CHARGES=2000    number of charges that are measured after a checkpoint
#
# With ten million keys the suite takes about fifteen minutes, 20 GB of disk, and memory for
# 6 GB of shared buffers.

kinds=${KINDS:-v7 v4 scopes}
sizes=${SIZES:-100000 1000000 10000000}
charges=${CHARGES:-2000}
[[ "$charges $sizes" =~ ^[1-9][0-9]{0,7}(\ [1-9][0-9]{0,8})+$ ]] || die "SIZES and CHARGES must be positive numbers"
[[ $kinds =~ ^(v7|v4|scopes)(\ (v7|v4|scopes))*$ ]] || die "KINDS must be of v7, v4 and scopes"

# The tables must fit in memory, because the suite does not measure reads from disk.
memory=$(awk '/^MemTotal:/ { print int($2 / 1024) }' /proc/meminfo)
settings=(full_page_writes=on shared_buffers=$((memory / 3))MB "bench.sizes=$sizes" "bench.kinds=$kinds")
measured="of $charges charges after a checkpoint"

# measure_charges measures one contestant in its own session. The charges before the
# checkpoint plan the statements.
measure_charges() {
	local round=$1 contestant=$2 kind=$3 stored=$4
	sql "CALL bench.charge('$contestant', bench.new_keys('$kind', 100))" \
		"CHECKPOINT" \
		"CALL bench.measure($round, '$contestant', '$kind', $stored, $charges)"
}

run_scale() {
	local kind stored size round contestant
	for kind in $kinds; do
		empty_tables
		stored=0
		for size in $sizes; do
			say "$size keys, $kind"
			sql "CALL bench.grow('$kind', $stored, $size)" "ANALYZE bench.hand_key, idempotency.key"
			stored=$size
			settle
			for ((round = 1; round <= rounds; round++)); do
				# shellcheck disable=SC2086
				for contestant in $(in_turn "$round" $contestants); do
					measure_charges "$round" "$contestant" "$kind" "$size"
				done
			done
		done
	done

	mkdir -p results
	psql -X -q -v ON_ERROR_STOP=1 -c "COPY (TABLE bench.scale) TO STDOUT (FORMAT csv, HEADER)" >results/scale.csv
	gnuplot -e "data = 'results/scale.csv'; picture = 'results/scale.svg'" docs/scale.gnuplot
	say "data and plot: results/scale.csv, results/scale.svg"
}
