# shellcheck shell=bash disable=SC2154
#
# Functions that all scenarios share: a Redis, a bank and its statements, the two
# programs, and figures. Sourced by run, which creates the directories "work" and "bin".
# Each scenario runs in a subshell with its own directory "here".

wrong=0

tell() {
	printf '     %s\n' "$@"
}

# figure prints an informational number.
figure() {
	printf '     %-58s %8s\n' "$1" "$2"
}

# check prints a figure, and counts an error if it is not as expected. The first
# argument is the check's short name.
check() {
	local name=$1 what=$2 comparison=$3 expected=$4 actual=$5
	if test "$actual" "$comparison" "$expected"; then
		printf '     %-58s %8s   ok\n' "$what" "$actual"
	else
		wrong=$((wrong + 1))
		printf '     %-58s %8s   WRONG [%s], expected %s %s\n' "$what" "${actual:-nothing}" "$name" \
			"$comparison" "$expected"
	fi
}

# await runs a command until it succeeds, or so many seconds have passed.
await() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		[ "$SECONDS" -lt "$end" ] || return 1
		sleep 0.02
	done
}

# mortal replaces a background job's shell with a program that is killed when the parent
# shell ends.
mortal() {
	exec setpriv --pdeathsig KILL "$@"
}

# nap sleeps for up to so many milliseconds.
nap() {
	sleep "$(printf '0.%03d' $((RANDOM % $1)))"
}

# ---------------------------------------------------------------------------
# Redis, which flushes every write to disk before it replies
# ---------------------------------------------------------------------------

redis_start() {
	mortal redis-server --port 0 --unixsocket "$here/redis" --unixsocketperm 700 --dir "$here" --save '' \
		--appendonly yes --appendfsync always --logfile "$here/redis.log" --daemonize no \
		</dev/null >/dev/null 2>&1 &
	redis_pid=$!
	await 20 redis_answers
}

redis_answers() {
	[ "$(redis PING 2>/dev/null)" = PONG ]
}

redis() {
	redis-cli -s "$here/redis" "$@"
}

# ---------------------------------------------------------------------------
# A bank, and its statements
# ---------------------------------------------------------------------------

# sql runs a query in a database, bank or statement, and prints the unaligned result.
sql() {
	psql -X -q -A -t -v ON_ERROR_STOP=1 -d "$1_$$_$scenario" -c "$2"
}

sql_file() {
	psql -X -q -v ON_ERROR_STOP=1 -o /dev/null -d "$1_$$_$scenario" -f "$2"
}

databases() {
	local name
	for name in bank statement; do
		createdb -T template0 "${name}_$$_$scenario"
		sql "$name" 'CREATE EXTENSION idempotency'
	done
	sql_file bank "$examples/relay-redis/relay.sql"
	sql_file bank schema.sql
	sql_file statement "${consumer_sql:-$examples/consumer/consumer.sql}"
}

# publish starts four background sessions that book so many events.
publish() {
	local session
	for session in 0 1 2 3; do
		sql bank "CALL test.publish($((($1 + session) / 4)))" &
		publishers+=($!)
	done
}

# published waits until these sessions end.
published() {
	[ ${#publishers[@]} -eq 0 ] || wait "${publishers[@]}"
	publishers=()
}

lines() {
	sql statement 'SELECT count(*) FROM statement.line'
}

# settled waits until every published event has its effect, or no effect was added for
# some seconds.
settled() {
	local expected now before=-1 quiet=0
	expected=$(sql bank 'SELECT count(*) FROM bank.entry')
	while now=$(lines) && [ "$now" -lt "$expected" ] && [ "$quiet" -lt 25 ]; do
		if [ "$now" = "$before" ]; then quiet=$((quiet + 1)); else quiet=0; fi
		before=$now
		sleep 0.2
	done
}

# ---------------------------------------------------------------------------
# The programs
# ---------------------------------------------------------------------------

# start_relay starts a relay under a name; its log is $here/name.log.
start_relay() {
	local name=$1
	shift
	: >>"$here/$name.log"
	mortal "${relay:-$bin/relay-redis}" --dbname="dbname=bank_$$_$scenario user=relay" \
		--redis="unix://$here/redis" --subscription=redis --verbose "$@" 2>>"$here/$name.log" &
	pids[$name]=$!
}

start_consumer() {
	local name=$1
	shift
	: >>"$here/$name.log"
	mortal "${consumer:-$bin/consumer}" --dbname="dbname=statement_$$_$scenario user=statement_writer" \
		--redis="unix://$here/redis" --stream=events:account.booked --group=statement \
		--call=statement.consume --verbose "$@" 2>>"$here/$name.log" &
	pids[$name]=$!
}

# ended waits for a program and sets "code" to its exit code.
ended() {
	code=0
	wait "${pids[$1]}" 2>/dev/null || code=$?
	unset "pids[$1]"
}

running() {
	kill -0 "${pids[$1]}" 2>/dev/null
}

not_running() {
	! running "$1"
}

# terminate sends SIGTERM to a program, and checks that it exits.
terminate() {
	local name=$1
	kill -TERM "${pids[$name]}"
	await 20 not_running "$name" || kill -KILL "${pids[$name]}"
	ended "$name"
	check stop "$name: exit code after SIGTERM" -eq 0 "$code"
}

# exits waits for a program that must exit by itself.
exits() {
	local name=$1 expected=$2
	await "${3:-30}" not_running "$name" || kill -KILL "${pids[$name]}"
	ended "$name"
	check exit "$name: exit code" -eq "$expected" "$code"
}

# in_batch returns whether the last line of a program's log is about an unfinished
# batch, even one that was just started.
in_batch() {
	tail -n 1 "$here/$1.log" |
		grep -q -E 'batch [0-9-]+: [0-9]+ events$|batch [0-9-]+: [0-9]+ of [0-9]+ added$|read [0-9]+ messages'
}

# within_batch returns whether a part of an unfinished batch is done.
within_batch() {
	tail -n 1 "$here/$1.log" | grep -q -E 'batch [0-9-]+: [0-9]+ of [0-9]+ added$|read [0-9]+ messages'
}

# kill_hard kills a program with SIGKILL, and counts a kill during a batch.
kill_hard() {
	local name=$1
	kill -KILL "${pids[$name]}"
	ended "$name"
	killed=$((killed + 1))
	! in_batch "$name" || killed_in_batch[$name]=$((${killed_in_batch[$name]:-0} + 1))
}

# catch_in_batch stops a program at random moments until it is within a batch, and
# leaves it stopped.
catch_in_batch() {
	local name=$1 end=$((SECONDS + 5))
	while [ "$SECONDS" -lt "$end" ]; do
		nap 30
		kill -STOP "${pids[$name]}"
		! within_batch "$name" || return 0
		kill -CONT "${pids[$name]}"
	done
}

# ---------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------

# stream_ids prints the event of each entry in the stream.
stream_ids() {
	redis --raw XRANGE events:account.booked - + | awk 'found { print; found = 0 } $0 == "id" { found = 1 }'
}

# check_effects compares the consumer's effects with the published events.
check_effects() {
	local events=$1 name number
	declare -A figures
	while IFS='	' read -r name number; do
		figures[$name]=$number
	done < <(sql bank 'COPY bank.entry TO STDOUT' |
		psql -X -q -d "statement_$$_$scenario" -f check.sql)
	check published "events published" -eq "$events" "${figures[published]}"
	figure "events that were rolled back" "$(sql bank 'SELECT last_value FROM test.rolled_back')"
	figure "entries in the stream" "$(redis XLEN events:account.booked)"
	check stream "different events in the stream" -eq "$events" "$(stream_ids | sort -u | wc -l)"
	check effects "effects" -eq "$events" "${figures[effects]}"
	check lost "events without an effect" -eq 0 "${figures[lost]}"
	check twice "events with more than one effect" -eq 0 "${figures[twice]}"
	check unpublished "effects of uncommitted events" -eq 0 "${figures[unpublished]}"
	check altered "effects that differ from their event" -eq 0 "${figures[altered]}"
	check disordered "effects before an earlier one of their account" -eq 0 "${figures[disordered]}"
	check balances "accounts that differ" -eq 0 "${figures[balances]}"
	check pending "messages not acknowledged" -eq 0 \
		"$(redis XPENDING events:account.booked statement | head -n 1)"
}

# clean_up ends the processes of a scenario, and prints the logs of a failure.
clean_up() {
	local status=$? name
	trap - EXIT
	[ "$status" = 0 ] && [ "$wrong" = 0 ] || {
		status=1
		for name in "$here"/*.log; do
			printf -- '---- %s\n' "${name##*/}"
			tail -n 25 "$name"
		done
	}
	for name in "${!pids[@]}"; do
		kill -KILL "${pids[$name]}" 2>/dev/null || true
	done
	kill -KILL "$redis_pid" "${publishers[@]}" 2>/dev/null || true
	wait 2>/dev/null || true
	for name in bank statement; do
		dropdb --if-exists --force "${name}_$$_$scenario" || true
	done
	rm -rf "$here"
	exit "$status"
}
