# shellcheck shell=bash
#
# The suite portable: CPU and WAL of a charge, of a claim without a request, and of a
# replay, with the portable edition and with the extension, as ratios to the hand-written
# pattern. Each edition has its own database, in which it alternates with the pattern in
# one session. The goal is that of the portable edition.

slices=4 # turns of each contestant, in a round

# prepare_portable makes the database of the portable edition.
prepare_portable() {
	sql "CREATE DATABASE portable"
	(
		export PGDATABASE=portable
		sql_file "$bench/common.sql"
		psql -X -q -o /dev/null -v ON_ERROR_STOP=1 -f "$bench/../../portable/idempotency.sql"
		sed '/^CREATE EXTENSION/d' "$bench/charge.sql" >"$work/charge.sql"
		sql_file "$work/charge.sql"
		sql_file "$bench/portable_turns.sql"
	)
}

# measure_edition measures the operations in the database of an edition: measure_edition
# round edition
measure_edition() {
	local round=$1 contestants="hand $2" operation turn slice position statements
	local size=$((operations / slices))
	empty_tables
	for operation in charge claim replay; do
		settle
		statements=("CALL bench.turn('$operation', 0, 200)" "CALL bench.turn('$operation', 1, 200)" "SELECT bench.mark(0)")
		for ((slice = 1; slice <= slices; slice++)); do
			for turn in $(in_turn $((round + slice)) 0 1); do
				statements+=("CALL bench.turn('$operation', $turn, $size)" "SELECT bench.mark($turn)")
			done
		done
		sql "${statements[@]}" >/dev/null
		sample_marks "$round" "${operation}_cpu" "$contestants" "$size"
		for turn in 0 1; do
			settle
			position=$(wal_position)
			sql "CALL bench.turn('$operation', $turn, $size)"
			[ "$operation" = replay ] || sample_wal "$round" "${operation}_wal" "$(cut -d ' ' -f $((turn + 1)) <<<"$contestants")" "$position" "$size"
		done
	done
}

run_portable() {
	local round
	prepare_portable
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		measure_edition "$round" idempotency
		PGDATABASE=portable measure_edition "$round" portable
	done
	psql -X -q -d portable -c "COPY bench.sample TO STDOUT" | psql -X -q -v ON_ERROR_STOP=1 -c "COPY bench.sample FROM STDIN"
}
