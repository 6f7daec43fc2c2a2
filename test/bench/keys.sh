# shellcheck shell=bash
#
# The suite keys: claim, complete and replay, compared with the hand-written pattern and
# with the business insert alone. The contestants are in charge.sql, one operation in
# keys-one.pgbench, ten in keys-ten.pgbench.

messages=20 # of ten operations each, in one turn of a contestant
turns=$(((operations + 10 * messages - 1) / (10 * messages))) # of each contestant, in a round
replays=$((operations * 2)) # in one turn of a function
slices=4 # measurements of throughput of each contestant, in a round

# measure_cpu measures new keys in one session, in which the contestants alternate.
measure_cpu() {
	local round=$1
	empty_tables
	settle
	pgbench_quietly "$bench/keys-ten.pgbench" -c 1 -t $((3 * turns * messages)) \
		-D i=0 -D size="$messages" --random-seed="$round"
	sample_marks "$round" cpu "$contestants" $((10 * messages))
}

# measure_disk lets each contestant charge the same new keys, and measures its writes
# and its size on disk afterwards.
measure_disk() {
	local round=$1 contestant position
	empty_tables
	for contestant in $contestants; do
		settle
		position=$(wal_position)
		pgbench_quietly "$bench/keys-one.pgbench" -c 1 -t "$operations" \
			-D i=0 -D turn="$(turn_of "$contestant")" --random-seed="$round"
		sample_wal "$round" wal "$contestant" "$position" "$operations"
	done

	settle
	for contestant in hand idempotency; do
		sample "$round" dead "$contestant" \
			"bench.dead_tuples(bench.key_table('$contestant'), $operations)"
		sample_bytes "$round" bytes "$contestant" "$operations"
	done
	sql "VACUUM FULL bench.hand_key, idempotency.key"
	for contestant in hand idempotency; do
		sample_bytes "$round" bytes_packed "$contestant" "$operations"
	done
}

# measure_replays adds one thousand keys to those of measure_disk, and measures their
# replays, in one session in which the functions alternate.
measure_replays() {
	local round=$1 contestant turn functions=(select select_checked claim claim_checked) statements=()
	for contestant in hand idempotency; do
		sql "SELECT count(bench.charge_$(turn_of "$contestant")(key, 1, 12.50))
			FROM unnest(bench.replay_keys()) AS key" >/dev/null
	done
	sql "VACUUM ANALYZE bench.hand_key, idempotency.key"
	settle

	# A first, short call of each is not counted, because it plans the statements.
	for turn in 0 1 2 3; do
		statements+=("SELECT bench.replay_${functions[turn]}(bench.replay_keys(), 1000)")
	done
	statements+=("SELECT bench.mark(0)")
	for turn in $(in_turn "$round" 0 1 2 3) $(in_turn $((round + 1)) 0 1 2 3); do
		statements+=("SELECT bench.replay_${functions[turn]}(bench.replay_keys(), $replays)"
			"SELECT bench.mark($turn)")
	done
	sql "${statements[@]}" >/dev/null
	sample_marks "$round" replay_all "${functions[*]}" "$replays"

	# The four functions that each figure compares.
	sql "WITH compared (figure, contestant, function) AS (VALUES
			('replay', 'hand', 'select'), ('replay', 'idempotency', 'claim'),
			('replay_request', 'hand', 'select'), ('replay_request', 'idempotency', 'claim_checked'),
			('replay_checked', 'hand', 'select_checked'), ('replay_checked', 'idempotency', 'claim_checked'))
		INSERT INTO bench.sample
		SELECT s.round, c.figure, c.contestant, s.value
		FROM bench.sample AS s JOIN compared AS c ON c.function = s.contestant
		WHERE s.round = $round AND s.figure = 'replay_all'"
}

# measure_clients measures throughput with several clients.
measure_clients() {
	local round=$1 clients=$2 slice contestant
	for ((slice = 1; slice <= slices; slice++)); do
		# shellcheck disable=SC2086
		for contestant in $(in_turn "$((round + slice))" $contestants); do
			empty_tables
			measure_throughput "$round" "throughput_$clients" "$contestant" \
				"$bench/keys-one.pgbench" "$clients" -D i=0 -D turn="$(turn_of "$contestant")" \
				--random-seed="$round"
		done
	done
}

run_keys() {
	local round
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		measure_cpu "$round"
		measure_disk "$round"
		measure_replays "$round"
		measure_clients "$round" 2
		measure_clients "$round" 8
	done
}
