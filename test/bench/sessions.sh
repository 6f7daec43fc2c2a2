# shellcheck shell=bash
#
# The suite sessions: many clients and synchronous commit. Charges through PgBouncer in
# transaction mode, of which 1 % repeat the key of another client; and a storm of
# duplicates that wait for one open operation.
#
#	CLIENTS=64      number of clients of PgBouncer
#	POOL=16         number of its connections to the server
#	STORM=200       number of duplicates of one key, each in a connection of its own

clients=${CLIENTS:-64}
pool=${POOL:-16}
storm=${STORM:-200}
[[ "$clients $pool $storm" =~ ^[1-9][0-9]{0,3}(\ [1-9][0-9]{0,3}){2}$ ]] || die "CLIENTS, POOL and STORM must be positive numbers"

settings=(
	fsync=on shared_preload_libraries=idempotency idempotency.reaper_naptime=0
	max_connections=$((storm + pool + 20)) "bench.clients=$clients" "bench.storm=$storm"
)
measured="of $seconds_each seconds with $clients clients, and of a storm of $storm duplicates"

# start_pooler starts PgBouncer in its own directory. It leaves the server when it is
# idle, because the suites wait for other sessions to end.
start_pooler() {
	command -v pgbouncer >/dev/null || die "install pgbouncer"
	pooler=$(server_directory pgbouncer)
	trap 'as_server kill "$(cat "$pooler/pid")"; rm -rf "$work" "$pooler"' EXIT
	as_server tee "$pooler/ini" >/dev/null <<-END
		[databases]
		* = host=$PGHOST port=$PGPORT user=$PGUSER
		[pgbouncer]
		listen_port = 6432
		listen_addr =
		unix_socket_dir = $pooler
		auth_type = any
		pool_mode = transaction
		default_pool_size = $pool
		max_client_conn = $((clients + 20))
		server_idle_timeout = 1
		logfile = $pooler/log
		pidfile = $pooler/pid
	END
	quietly as_server pgbouncer --daemon --quiet "$pooler/ini"
}

# latencies prints the latencies that pgbench has logged, in microseconds, sorted.
latencies() {
	cat "$work"/log.* | cut -d' ' -f3 | sort -n
}

# measure_pooled lets the clients of the pooler charge for some seconds, and samples what
# their sessions wait for.
measure_pooled() {
	local round=$1 contestant=$2 watch count
	empty_tables
	settle
	rm -f "$work"/log.*
	sql "CALL bench.watch('$contestant', $seconds_each)" &
	watch=$!
	PGHOST=$pooler PGPORT=6432 pgbench_quietly "$bench/sessions-pooled.pgbench" \
		-c "$clients" -j "$(nproc)" -T "$seconds_each" --log --log-prefix="$work/log" \
		-D i=0 -D clients="$clients" -D turn="$(turn_of "$contestant")" --random-seed="$round"
	wait "$watch"

	latencies >"$work/latencies"
	count=$(wc -l <"$work/latencies")
	sample "$round" throughput "$contestant" "$count / $seconds_each.0"
	sample "$round" p50 "$contestant" "$(sed -n "$(((count + 1) / 2))p" "$work/latencies")"
	sample "$round" p99 "$contestant" "$(sed -n "$(((count * 99 + 99) / 100))p" "$work/latencies")"
}

# measure_storm measures the time from the answer of the first operation to that of the
# last of its duplicates, which waited for it.
measure_storm() {
	local round=$1 contestant=$2
	empty_tables
	settle
	rm -f "$work"/log.*
	pgbench_quietly "$bench/sessions-storm.pgbench" -c $((storm + 1)) -j "$(nproc)" -t 1 \
		--log --log-prefix="$work/log" -D turn="$(turn_of "$contestant")"
	sample "$round" storm "$contestant" "$(cat "$work"/log.* | awk '
		{ ended = $5 + $6 / 1000000; if ($1 == 0) first = ended; if (ended > last) last = ended }
		END { printf "%.3f", (last - first) * 1000 }')"
}

run_sessions() {
	local round contestant
	start_pooler
	for ((round = 1; round <= rounds; round++)); do
		say "round $round of $rounds"
		# shellcheck disable=SC2086
		for contestant in $(in_turn "$round" $contestants); do
			measure_pooled "$round" "$contestant"
		done
		for contestant in $(in_turn "$round" hand idempotency); do
			measure_storm "$round" "$contestant"
		done
	done
	psql -X -q -P footer=off -c "TABLE bench.wait_event"
}
