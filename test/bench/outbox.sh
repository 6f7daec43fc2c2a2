# shellcheck shell=bash
#
# The suite outbox: publishing an event, and draining the outbox, against the table
# with a status column that one would write by hand, and against PgQ.
#
#	BACKLOG=200000	how many events are drained while a transaction is held open
#	EVENTS=100	how many events are published one by one for the latency
#
# pgqd does not run: the driver calls pgq.ticker() itself, and counts for PgQ neither
# its CPU nor its WAL (see bench.fill).

backlog=${BACKLOG:-200000}
events=${EVENTS:-100}
[[ $backlog =~ ^[1-9][0-9]{0,5}000$ ]] || die "BACKLOG is a number of thousands"
[[ $events =~ ^[1-9][0-9]{0,4}$ ]] || die "EVENTS is a positive number"

contestants="floor hand idempotency pgq" # in the order of their numbers
outboxes="hand idempotency pgq"
messages=20 # of ten orders each, before it is the next contestant's turn
turns=$(((operations + 10 * messages - 1) / (10 * messages))) # of each, in a round
steady_rate=200 # events per second, for the latency of a steady flow
steady_seconds=5

settings=(shared_preload_libraries=idempotency idempotency.reaper_naptime=0)
measured="of $operations events, $backlog with a transaction held open, and $events one by one"

# measure_publish measures orders in one session, in which the contestants take turns.
measure_publish() {
	local round=$1
	sql "CALL bench.empty_outboxes()"
	settle
	pgbench_quietly "$bench/outbox-publish.pgbench" -c 1 -t $((4 * turns * messages)) \
		-D i=0 -D size="$messages" --random-seed="$round"
	sql "CALL bench.sample_turns($round, 'publish', string_to_array('$contestants', ' '), $((10 * messages)))"
}

# fill_outboxes fills the contestants' outboxes anew.  They are analyzed, as autovacuum
# would have done: PgQ's queries depend on it.
fill_outboxes() {
	local each=$1 batch=$2 contestant
	shift 2
	for contestant in "$@"; do
		sql "CALL bench.fill('$contestant', $each, $batch)"
	done
	sql "ANALYZE"
}

# drain plays outbox-drain.pgbench: drain batches batch-size batches-in-a-turn only warm
drain() {
	pgbench_quietly "$bench/outbox-drain.pgbench" -c 1 -t "$1" \
		-D i=0 -D events="$2" -D size="$3" -D only="$4" -D warm="$5"
}

# measure_drain measures draining in batches of some size, in one session in which the
# contestants take turns of as many events: measure_drain round figure batch turn
measure_drain() {
	local round=$1 figure=$2 batch=$3 turn=$4 each contestant died=()
	each=$(((operations + turn - 1) / turn * turn))
	sql "CALL bench.empty_outboxes()"
	# shellcheck disable=SC2086
	fill_outboxes "$each" "$batch" $outboxes
	settle
	for contestant in $outboxes; do
		died+=("$(sql "SELECT bench.died('$contestant')")")
	done
	drain $((3 * each / batch)) "$batch" $((turn / batch)) -1 0
	sql "CALL bench.sample_turns($round, '$figure', string_to_array('$contestants', ' '), $turn)"

	if [ "$figure" = drain ]; then
		settle
		for contestant in $outboxes; do
			sample "$round" "${figure}_dead" "$contestant" \
				"(bench.died('$contestant') - ${died[0]})::double precision / $each"
			died=("${died[@]:1}")
		done
	fi
	for contestant in $outboxes; do
		sql "CALL bench.check_rest('$contestant', 0)"
	done
}

# hold begins a transaction in a session of its own, with these statements, and leaves
# it open; let_go commits it.
hold() {
	local deadline=$((SECONDS + 30))
	mkfifo "$work/holder"
	PGAPPNAME=holder psql -X -q -A -t -v ON_ERROR_STOP=1 <"$work/holder" >"$work/holder.output" 2>&1 &
	holder=$!
	exec {holding}>"$work/holder"
	printf '%s;\n' "$@" >&"$holding"
	until [ "$(sql "SELECT state FROM pg_stat_activity WHERE application_name = 'holder'
			AND coalesce(backend_xmin, backend_xid) IS NOT NULL")" = "idle in transaction" ]; do
		kill -0 "$holder" && [ "$SECONDS" -lt "$deadline" ] || {
			cat "$work/holder.output" >&2
			die "the transaction to be held open did not begin"
		}
		sleep 0.05
	done
}
let_go() {
	printf 'COMMIT;\n' >&"$holding"
	exec {holding}>&-
	wait "$holder" || {
		cat "$work/holder.output" >&2
		die "the transaction that was held open did not commit"
	}
	rm "$work/holder"
}

# measure_held measures how fast a contestant drains the first and the last fifth of a
# long backlog, while a transaction is open that began before the backlog.  If that has
# published an event, it is the next to be delivered once it has committed.
#
# Some batches before the first fifth are not counted: they make the plans.
measure_held() {
	local round=$1 figure=$2 contestant=$3 late=0 warm=20
	sql "CALL bench.empty_outboxes()"
	settle
	case $figure in
	snapshot)
		hold "BEGIN ISOLATION LEVEL REPEATABLE READ" "SELECT count(*) FROM bench.purchase"
		;;
	xid)
		hold "BEGIN" "SELECT bench.order_$(turn_of "$contestant")(1, 'A-1234', 2, 19.90)"
		late=1
		;;
	esac
	fill_outboxes $((backlog + 100 * warm)) 100 "$contestant"
	sql "CHECKPOINT"
	drain $((backlog / 100 + warm)) 100 $((backlog / 500)) "$(turn_of "$contestant")" "$warm"
	sql "CALL bench.sample_fifths($round, '$figure', '$contestant', $((backlog / 5)))" \
		"CALL bench.check_rest('$contestant', 0)"
	let_go
	sql "CALL bench.check_rest('$contestant', $late)"
}

# measure_latency measures how soon after its commit an event comes to a consumer who
# waits in fetch, and to a worker: when nobody had been at work, and in a steady flow.
measure_latency() {
	local round=$1 flow=$((steady_rate * steady_seconds / 2)) consumer
	restart_with track_commit_timestamp=on
	sql "CALL bench.empty_outboxes()"
	sql "CALL bench.consume($events)" &
	consumer=$!
	pgbench_quietly "$bench/outbox-busy.pgbench" -c 1 -t "$events" -R 20 --random-seed="$round"
	wait "$consumer"
	sql "CALL bench.sample_handled($round, 'waiting', $events)" "SELECT idempotency.unsubscribe('bench')" >/dev/null

	sql \
		"SELECT idempotency.subscribe('relay', '{order.*}', 'bench.handle(idempotency.event)', owner => 'bench_consumer')" >/dev/null
	settle
	pgbench_quietly "$bench/outbox-idle.pgbench" -c 1 -t "$events" -D i=0
	sql "CALL bench.sample_handled($round, 'idle', $events)"

	pgbench_quietly "$bench/outbox-busy.pgbench" -c 2 -t "$flow" -R "$steady_rate" --random-seed="$round"
	sql "CALL bench.await_handled($((2 * flow)))" "CALL bench.sample_handled($round, 'busy', $((2 * flow)))" \
		"SELECT idempotency.unsubscribe('relay')" >/dev/null
	restart_with track_commit_timestamp=
}

run_outbox() {
	local round figure contestant
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		measure_publish "$round"
		measure_drain "$round" drain 100 2000
		measure_drain "$round" drain500 500 2000
		measure_drain "$round" drain5000 5000 5000
		for figure in snapshot xid; do
			# shellcheck disable=SC2086
			for contestant in $(in_turn "$round" $outboxes); do
				measure_held "$round" "$figure" "$contestant"
			done
		done
		measure_latency "$round"
	done
}
