# shellcheck shell=bash
#
# The suite leases: claim, renew and complete, compared with the hand-written pattern of
# an INSERT and two UPDATEs, and the latency until a waiting session gets the outcome.
#
#	WAITERS=512     number of waiting sessions in one round, in eight connections

messages=20 # of ten operations each, in one turn of a contestant
turns=$(((operations + 10 * messages - 1) / (10 * messages))) # of each contestant, in a round
pairs=8 # of owners and waiters at the same time
waiters=${WAITERS:-512}
[[ $waiters =~ ^[1-9][0-9]{0,5}$ ]] || die "WAITERS must be a positive number"
trials=$(((waiters + pairs - 1) / pairs)) # of each pair, in a round

settings=(idempotency.reaper_naptime=0)
measured="of $operations operations, and of $((pairs * trials)) waiters"

# empty_lease_tables empties the tables, and restarts the tokens at 1.
empty_lease_tables() {
	empty_tables
	sql "CALL bench.wait_until_alone()" "ALTER SEQUENCE idempotency.token RESTART" \
		"SELECT pg_stat_reset_single_table_counters(bench.key_table(c)) FROM unnest('{hand,idempotency}'::text[]) AS c" \
		>/dev/null
}

# play_leases runs leases-ten.pgbench: play_leases messages only seed
play_leases() {
	pgbench_quietly "$bench/leases-ten.pgbench" -c 1 -t "$1" \
		-D i=0 -D token=0 -D only="$2" -D size="$messages" --random-seed="$3"
}

# measure_lease_cpu measures whole operations in one session, in which the contestants
# alternate.
measure_lease_cpu() {
	local round=$1
	empty_lease_tables
	settle
	play_leases $((3 * turns * messages)) -1 "$round"
	sample_marks "$round" cpu "$contestants" $((10 * messages))
}

# measure_lease_disk lets each contestant do the same operations, and measures its
# writes and its size on disk afterwards.
measure_lease_disk() {
	local round=$1 contestant position cycles=$((turns * messages * 10))
	empty_lease_tables
	for contestant in $contestants; do
		settle
		position=$(wal_position)
		play_leases $((cycles / 10)) "$(turn_of "$contestant")" "$round"
		sample_wal "$round" wal "$contestant" "$position" "$cycles"
	done

	settle
	for contestant in hand idempotency; do
		sample "$round" hot "$contestant" "bench.hot_share(bench.key_table('$contestant'))"
		sample "$round" dead "$contestant" "bench.dead_tuples(bench.key_table('$contestant'), $cycles)"
		sample_bytes "$round" bytes "$contestant" "$cycles"
	done
}

# measure_waiters runs pairs of an owner and a waiting session on a server with or
# without the preloaded library: measure_waiters round figure preloaded-libraries
measure_waiters() {
	local round=$1 figure=$2
	restart_with "shared_preload_libraries=$3" track_commit_timestamp=on
	empty_lease_tables
	settle
	pgbench_quietly "$bench/leases-wait.pgbench" -c $((2 * pairs)) -j "$(nproc)" -t "$trials" \
		-D i=0 -D round="$round" --random-seed="$round"
	sql "CALL bench.sample_waiters($round, '$figure', $((pairs * trials)))"
}

run_leases() {
	local round
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		restart_with shared_preload_libraries=idempotency track_commit_timestamp=
		measure_lease_cpu "$round"
		measure_lease_disk "$round"
		measure_waiters "$round" wake_preloaded idempotency
		measure_waiters "$round" wake_polling ''
	done
}
