# shellcheck shell=bash
#
# The suite reaper: the cost of deleting expired keys, its effect on the latency of
# claims, the size of the table, and the buffers that reap() of each edition reads. The
# reference is DELETE by an index on expires_at.
#
#	EXPIRED=1000000 number of expired keys when reaping starts
#	RATE=2000       claims per second for latency and table size
#	PERIOD=30       a retention period in seconds; there are two and ROUNDS of them.
#	                Autovacuum looks once a second, so that a shorter period shows its
#	                delay more than the settings of the table

expired=${EXPIRED:-1000000}
rate=${RATE:-2000}
period=${PERIOD:-30}
for number in "$expired" "$rate" "$period"; do
	[[ $number =~ ^[1-9][0-9]{0,7}$ ]] || die "EXPIRED, RATE and PERIOD must be positive numbers"
done
latency_seconds=6 # of claims, with and without the reaper, in a round

settings=(
	shared_preload_libraries=idempotency idempotency.reaper_naptime=0
	shared_buffers=2GB autovacuum_naptime=1 bench.expired="$expired"
)
measured="of $expired expired keys, and $((2 + rounds)) periods of $((rate * period)) claims"

# fill refills the key table of a contestant with expired and some live keys, before any
# reaping: fill contestant live
fill() {
	empty_tables
	sql "DELETE FROM idempotency.reaper" "CALL bench.fill('$1', $2)" \
		"VACUUM ANALYZE bench.hand_key, idempotency.key, idempotency.reaper"
	settle
}

# worker sets the interval of the preloaded library's worker, or stops it: worker
# naptime
worker() {
	sql "ALTER SYSTEM SET idempotency.reaper_naptime = '$1'" "SELECT pg_reload_conf()" >/dev/null
}

# reaping prints the statements that delete expired rows, one per line: reaping by,
# which is hand, reap or worker
reaping() {
	case $1 in
	hand) echo "DELETE FROM bench.hand_key WHERE expires_at < now()" ;;
	reap) echo "CALL bench.reap_all()" ;;
	worker)
		echo "ALTER SYSTEM SET idempotency.reaper_naptime = '1s'"
		echo "SELECT pg_reload_conf()"
		echo "CALL bench.await_worker($expired)"
		;;
	esac
}

# measure_reaping measures one way of reaping, and the VACUUM afterwards. The figures of
# hand are compared with both ways of the extension.
measure_reaping() {
	local round=$1 by=$2 contestant=$3 statements table
	table=$(sql "SELECT bench.key_table('$contestant')")
	mapfile -t statements < <(reaping "$by")
	fill "$contestant" "$expired"
	sql "CALL bench.await_ended()" "CALL bench.begin_lap()" "${statements[@]}" \
		"VACUUM $table" \
		"CALL bench.sample_lap($round, '${by/hand/reap}', '$contestant', $expired)" >/dev/null
	worker 0
	sql "CALL bench.check_reaped('$contestant', $expired)"
	[ "$by" != hand ] || sql "INSERT INTO bench.sample
		SELECT round, replace(figure, 'reap', 'worker'), contestant, value
		FROM bench.sample WHERE round = $round AND contestant = 'hand' AND figure LIKE 'reap%'"
}

# play_claims makes claims at a steady rate, and logs the latency of each: play_claims
# contestant seconds seed
play_claims() {
	rm -f "$work"/log.*
	pgbench_quietly "$bench/keys-one.pgbench" -c 4 -T "$2" -R "$rate" --log --log-prefix="$work/log" \
		-D i=0 -D turn="$(turn_of "$1")" --random-seed="$3"
}

# load_latencies reads that log. The latency starts when the claim is sent.
load_latencies() {
	sql "TRUNCATE bench.latency"
	awk '{ printf "%d.%06d\t%d\n", $5, $6, $3 - $7 }' "$work"/log.* | sql "COPY bench.latency FROM STDIN"
}

# measure_latency measures claims at a steady rate, first alone and then while expired
# rows are deleted.
measure_latency() {
	local round=$1 contestant=$2 statements claims
	mapfile -t statements < <(reaping "${contestant/idempotency/worker}")
	fill "$contestant" $((expired / 4))
	play_claims "$contestant" "$latency_seconds" "$round"
	load_latencies
	sample "$round" alone "$contestant" "bench.p99_alone()"

	play_claims "$contestant" "$latency_seconds" "1$round" &
	claims=$!
	sleep 1
	sql "CALL bench.begin_lap()" "${statements[@]}" "CALL bench.end_lap()" >/dev/null
	wait "$claims"
	worker 0
	sql "CALL bench.check_reaped('$contestant', $((expired / 4)))"
	load_latencies
	sample "$round" beside "$contestant" "bench.p99_in_lap()"
	sql "INSERT INTO bench.sample
		SELECT $round, 'slower', '$contestant', beside.value / alone.value
		FROM bench.sample AS beside JOIN bench.sample AS alone USING (round, contestant)
		WHERE round = $round AND contestant = '$contestant'
			AND beside.figure = 'beside' AND alone.figure = 'alone'"
}

# measure_sizes makes claims for some retention periods, with autovacuum. The
# hand-written table is reaped ten times per period.
measure_sizes() {
	local contestant number pid pids=() periods=$((2 + rounds)) began
	empty_tables
	sql "DELETE FROM idempotency.reaper" "ALTER SYSTEM SET autovacuum = on" \
		"ALTER DATABASE $PGDATABASE SET idempotency.retention = $period"
	worker 500ms
	settle
	began=$(date +%s%N)
	for contestant in hand idempotency; do
		pgbench_quietly "$bench/keys-one.pgbench" -c 2 -T $((periods * period + 1)) -R "$rate" \
			-D i=0 -D turn="$(turn_of "$contestant")" &
		pids+=($!)
	done
	for ((number = 1; number <= periods * 10; number++)); do
		sleep_until $((began + number * period * 100000000))
		sql "DELETE FROM bench.hand_key WHERE expires_at < now() + interval '24 hours - $period seconds'"
		[ $((number % 10)) -ne 0 ] || sql "INSERT INTO bench.size
			SELECT $((number / 10)), c, pg_total_relation_size(bench.key_table(c))
			FROM unnest('{hand,idempotency}'::text[]) AS c"
	done
	for pid in "${pids[@]}"; do
		wait "$pid"
	done
	worker 0
	sql "CALL bench.sample_sizes($rounds)"
}

# sleep_until sleeps until that time, in nanoseconds since the epoch.
sleep_until() {
	local rest=$(($1 - $(date +%s%N)))
	[ "$rest" -le 0 ] || sleep "$(printf '%d.%09d' $((rest / 1000000000)) $((rest % 1000000000)))"
}

# prepare_portable makes the database of the portable edition.
prepare_portable() {
	sql "CREATE DATABASE portable"
	(
		export PGDATABASE=portable
		sql_file "$bench/common.sql"
		sql "INSERT INTO bench.figure (figure, title, unit, contestants)
			SELECT f, f, 'buffers', '{portable}' FROM unnest('{reap_pages,idle_pages}'::text[]) AS f"
		psql -X -q -o /dev/null -v ON_ERROR_STOP=1 -f "$bench/../../portable/idempotency.sql"
		sql_file "$bench/reaper_pages.sql"
	)
}

# measure_pages counts what reap() of the edition of a database reads when nothing is in memory.
measure_pages() {
	sql "CALL bench.fill_pages()" "VACUUM idempotency.key" "CHECKPOINT"
	restart_with
	sql "CALL bench.sample_pages($1, '$2')"
}

run_reaper() {
	local round way
	prepare_portable
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		for way in $(in_turn "$round" hand reap worker); do
			case $way in
			hand) measure_reaping "$round" hand hand ;;
			*) measure_reaping "$round" "$way" idempotency ;;
			esac
		done
		for way in $(in_turn "$round" hand idempotency); do
			measure_latency "$round" "$way"
		done
		measure_pages "$round" idempotency
		PGDATABASE=portable measure_pages "$round" portable
	done
	say "$((2 + rounds)) periods of $period seconds"
	measure_sizes
	psql -X -q -d portable -c "COPY bench.sample TO STDOUT" | psql -X -q -v ON_ERROR_STOP=1 -c "COPY bench.sample FROM STDIN"
}
