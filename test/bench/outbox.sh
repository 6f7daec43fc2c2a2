# shellcheck shell=bash
#
# The suite outbox: publishing an event and draining the outbox, compared with a
# hand-written table with a status column, and with PgQ.
#
#	BACKLOG=200000  number of events that are drained while a transaction is open
#	EVENTS=100      number of events that are published one by one for the latency
#	FIGURES="publish drain drain500 drain5000 snapshot xid latency"
#	                what is measured; with EDITION=portable, all but the latency
#
# pgqd does not run: the driver calls pgq.ticker() itself, and counts neither its CPU
# nor its WAL for PgQ (see bench.fill).

backlog=${BACKLOG:-200000}
events=${EVENTS:-100}
[[ $backlog =~ ^[1-9][0-9]{0,5}000$ ]] || die "BACKLOG must be a multiple of 1000"
[[ $events =~ ^[1-9][0-9]{0,4}$ ]] || die "EVENTS must be a positive number"

contestants="floor hand idempotency pgq" # in the order of their numbers
outboxes="hand idempotency pgq"
messages=20 # of ten orders each, in one turn of a contestant
turns=$(((operations + 10 * messages - 1) / (10 * messages))) # of each contestant, in a round
steady_rate=200 # events per second, for the latency under steady load
steady_seconds=5

settings=(shared_preload_libraries=idempotency idempotency.reaper_naptime=0)
figures=${FIGURES:-publish drain drain500 drain5000 snapshot xid latency}
if [ "${EDITION:-}" = portable ]; then
	settings=()
	figures=${figures//latency/}
fi
export EDITION=${EDITION:-extension}
measured="of $operations events, $backlog with a transaction held open, and $events one by one"

# measure_publish measures orders in one session, in which the contestants alternate.
measure_publish() {
	local round=$1
	sql "CALL bench.empty_outboxes()"
	settle
	pgbench_quietly "$bench/outbox-publish.pgbench" -c 1 -t $((4 * turns * messages)) \
		-D i=0 -D size="$messages" --random-seed="$round"
	sql "CALL bench.sample_turns($round, 'publish', string_to_array('$contestants', ' '), $((10 * messages)))"
}

# fill_outboxes refills the contestants' outboxes and analyzes them, as autovacuum
# would: PgQ's queries depend on it.
fill_outboxes() {
	local each=$1 batch=$2 contestant
	shift 2
	for contestant in "$@"; do
		sql "CALL bench.fill('$contestant', $each, $batch)"
	done
	sql "ANALYZE"
}

# drain runs outbox-drain.pgbench: drain batches batch-size batches-in-a-turn only warm
drain() {
	pgbench_quietly "$bench/outbox-drain.pgbench" -c 1 -t "$1" \
		-D i=0 -D events="$2" -D size="$3" -D only="$4" -D warm="$5"
}

# measure_drain measures draining in batches of one size, in one session in which the
# contestants alternate after the same number of events: measure_drain round figure
# batch turn
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

# hold begins a transaction in a separate session with these statements, and leaves it
# open; commit_held commits it.
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
			die "the transaction did not begin"
		}
		sleep 0.05
	done
}
commit_held() {
	printf 'COMMIT;\n' >&"$holding"
	exec {holding}>&-
	wait "$holder" || {
		cat "$work/holder.output" >&2
		die "the transaction did not commit"
	}
	rm "$work/holder"
}

# measure_held measures how fast a contestant drains the first and the last fifth of a
# long backlog, while a transaction is open that began before the backlog. If that
# transaction published an event, the event is delivered next after the commit.
#
# Some batches before the first fifth are not counted, because they plan the statements.
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
	commit_held
	sql "CALL bench.check_rest('$contestant', $late)"
}

# measure_latency measures the time from a commit until the event reaches a consumer
# that waits in fetch, and a worker: after an idle period, and under steady load.
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
	sql "CALL bench.await_handled($((2 * flow)))" "CALL bench.sample_handled($round, 'busy', $((2 * flow)), $steady_rate)" \
		"SELECT idempotency.unsubscribe('relay')" >/dev/null
	restart_with track_commit_timestamp=
}

run_outbox() {
	local round figure contestant names=${figures//latency/waiting idle busy}
	sql "DELETE FROM bench.figure WHERE split_part(figure, '_', 1) <> ALL (string_to_array('$names', ' '))"
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		! chosen publish || measure_publish "$round"
		! chosen drain || measure_drain "$round" drain 100 2000
		! chosen drain500 || measure_drain "$round" drain500 500 2000
		! chosen drain5000 || measure_drain "$round" drain5000 5000 5000
		for figure in snapshot xid; do
			chosen "$figure" || continue
			# shellcheck disable=SC2086
			for contestant in $(in_turn "$round" $outboxes); do
				measure_held "$round" "$figure" "$contestant"
			done
		done
		! chosen latency || measure_latency "$round"
	done
}
