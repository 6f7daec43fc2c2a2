# shellcheck shell=bash
#
# The suite delivery: what several consumers, waiting consumers, a parked event and idle
# databases cost, each as a ratio to the same without them.
#
#	FIGURES="partitions parked waiting idle"	what is measured; with EDITION=portable,
#			only the first two, because consumers poll there and no worker exists
#	DATABASES=50	number of idle databases, each with a handler
#	IDLE=60		seconds in which their CPU is measured
#
# The CPU of the server's processes comes from /proc. That of the idle databases has the
# workers that have ended: the postmaster's own count has them.

databases=${DATABASES:-50}
idle=${IDLE:-60}
[[ "$databases $idle" =~ ^[1-9][0-9]{0,2}\ [1-9][0-9]{0,3}$ ]] || die "DATABASES and IDLE must be positive numbers"
contestants=idempotency
settings=(shared_preload_libraries=idempotency idempotency.reaper_naptime=0 max_connections=200 idempotency.relay_workers=8 max_worker_processes=20)
figures=${FIGURES:-partitions parked waiting idle}
if [ "${EDITION:-}" = portable ]; then
	settings=(max_connections=200)
	figures=${figures//waiting/}
	figures=${figures//idle/}
fi
export EDITION=${EDITION:-extension}
measured="of $operations events"

# measure_partitions measures calls of deliver() whose function waits 20 ms for each event:
# one call with one partition, then eight with eight.
measure_partitions() {
	local round=$1 calls i rate=()
	for calls in 1 8; do
		sql "SELECT bench.subscribe_all($calls)" "CALL bench.publish_all('order.wait', $((200 * calls)), 400)" >/dev/null
		settle
		for ((i = 0; i < calls; i++)); do
			sql "CALL idempotency.deliver('bench', 'bench.wait(idempotency.event)')" &
		done
		wait
		rate+=("$(sql "SELECT bench.handled_rate($((200 * calls)))")")
	done
	sample "$round" partitions idempotency "${rate[1]}::double precision / ${rate[0]}"
}

# measure_parked measures the CPU of a drain in batches of 100, without and with an event that waits for
# its next attempt.
measure_parked() {
	local round=$1 parked cpu=()
	for parked in no yes; do
		sql "SELECT bench.subscribe_all(1)" >/dev/null
		[ "$parked" = no ] || sql "CALL bench.park()"
		sql "CALL bench.publish_all('order.created', $operations, $((operations / 2)))" "ANALYZE"
		settle
		cpu+=("$(sql "CALL bench.drain($operations)")")
	done
	sample "$round" parked idempotency "${cpu[1]}::double precision / ${cpu[0]}"
}

# measure_waiting measures the CPU of all consumers while one of them gets 100 events a
# second: alone, and with 50 that wait for other topics.
measure_waiting() {
	local round=$1 others i cpu=()
	sql "SELECT bench.subscribe_topics(50)" >/dev/null
	for others in 0 50; do
		settle
		for ((i = 0; i <= others; i++)); do
			PGAPPNAME=consumer sql "CALL bench.consume('topic$i')" &
		done
		cpu+=("$(sql "CALL bench.feed($((others + 1)), 500)")")
		wait
	done
	sample "$round" waiting idempotency "${cpu[1]}::double precision / ${cpu[0]}"
}

# server_cpu prints the CPU in ticks of the postmaster, its processes, and those that ended.
server_cpu() {
	local postmaster
	postmaster=$(head -n 1 "$(sql "SHOW data_directory")/postmaster.pid")
	awk '{ sub(/^.*\) /, ""); sum += $12 + $13; if (FNR == 1 && FILENAME == first) sum += $14 + $15 } END { print sum }' \
		first="/proc/$postmaster/stat" "/proc/$postmaster/stat" $(pgrep -P "$postmaster" | sed 's,.*,/proc/&/stat,') 2>/dev/null
}

# measure_idle measures the CPU of a server with idle databases, each with a handler, in
# percent of one processor
measure_idle() {
	local round=$1 before after
	settle
	before=$(server_cpu)
	sleep "$idle"
	after=$(server_cpu)
	sample "$round" idle idempotency "100.0 * ($after - $before) / $(getconf CLK_TCK) / $idle"
}

# make_databases creates the databases.
make_databases() {
	local i
	sql "CREATE ROLE idle_consumer LOGIN"
	for ((i = 1; i <= databases; i++)); do
		sql "CREATE DATABASE idle$i"
		PGDATABASE=idle$i sql_file "$bench/delivery_idle.sql"
	done
	check_databases
}

# check_databases publishes an event in each, and waits until all are handled. The workers leave
# soon afterwards.
check_databases() {
	local i deadline=$((SECONDS + 120))
	for ((i = 1; i <= databases; i++)); do
		PGDATABASE=idle$i sql "TRUNCATE handlers.handled" "SELECT idempotency.publish('order.created', '{}')" >/dev/null
	done
	for ((i = 1; i <= databases; i++)); do
		until [ "$(PGDATABASE=idle$i sql "SELECT count(*) FROM handlers.handled")" = 1 ]; do
			[ "$SECONDS" -lt "$deadline" ] || die "idle$i handles no event"
			sleep 0.1
		done
	done
	sleep 15
}

run_delivery() {
	local round
	sql "DELETE FROM bench.figure WHERE figure <> ALL (string_to_array('$figures', ' '))"
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		! chosen partitions || measure_partitions "$round"
		! chosen parked || measure_parked "$round"
		! chosen waiting || measure_waiting "$round"
	done
	chosen idle || return 0
	make_databases
	for ((round = 1; round <= rounds; round++)); do
		measure_idle "$round"
	done
	check_databases
}
