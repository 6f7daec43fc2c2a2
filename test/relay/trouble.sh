# shellcheck shell=bash disable=SC2154
#
# Faults other than kill -9 of relay or consumer: lost connections, long batches,
# signals, and events that one of the servers rejects. Sourced by run.

# server_answers returns whether the server accepts connections.
server_answers() {
	sql bank 'SELECT 1' >/dev/null 2>&1
}

# connected prints how many connections both programs have.
connected() {
	sql bank "SELECT count(*) FROM pg_stat_activity
		WHERE datname IN ('bank_$$_$scenario', 'statement_$$_$scenario')
			AND application_name IN ('relay-redis', 'consumer')"
}

both_connected() {
	[ "$(connected)" -eq 2 ]
}

# cut terminates the connections of both programs, and prints their number.
cut() {
	await 10 both_connected || true
	sql bank "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname IN ('bank_$$_$scenario', 'statement_$$_$scenario')
			AND application_name IN ('relay-redis', 'consumer')"
}

# crash kills the relay's backend with SIGKILL: the server terminates all backends and
# recovers.
crash() {
	await 10 both_connected
	kill -KILL "$(sql bank "SELECT pid FROM pg_stat_activity
		WHERE datname = 'bank_$$_$scenario' AND application_name = 'relay-redis'")"
	sleep 0.5
	await 60 server_answers
}

redis_crash() {
	kill -KILL "$redis_pid"
	wait "$redis_pid" 2>/dev/null || true
	nap 700
	redis_start
}

scenario_trouble() {
	local round cuts=0 crashes
	crashes=$(grep -c 'was terminated by signal 9' "$PGHOST/log")
	databases
	start_relay relay --lease=3 --batch=100 --pipeline=10 --wait=5
	start_consumer consumer --sole --batch=50
	for round in 1 2 3; do
		publish 400
		nap 300
		cuts=$((cuts + $(cut)))
		nap 300
		redis_crash
		published
		nap 300
		cuts=$((cuts + $(cut)))
	done
	publish 400
	published
	crash
	redis_crash
	publish 400
	published
	settled
	terminate relay
	terminate consumer
	check_effects 2000
	check trouble "connections to PostgreSQL cut" -ge 8 "$cuts"
	check trouble "crashes of the server" -eq $((crashes + 1)) "$(grep -c 'was terminated by signal 9' "$PGHOST/log")"
	check trouble "relay: connected again to PostgreSQL" -ge 3 \
		"$(grep -c 'PostgreSQL: connected again' "$here/relay.log")"
	check trouble "relay: connected again to Redis" -ge 2 \
		"$(grep -c 'Redis: connected again' "$here/relay.log")"
	check trouble "consumer: connected again to PostgreSQL" -ge 3 \
		"$(grep -c 'PostgreSQL: connected again' "$here/consumer.log")"
	check trouble "consumer: connected again to Redis" -ge 2 \
		"$(grep -c 'Redis: connected again' "$here/consumer.log")"
}

# all_in_stream returns whether the stream has so many entries.
all_in_stream() {
	[ "$(redis XLEN events:account.booked)" -ge "$1" ]
}

logged() {
	grep -q -e "$2" "$here/$1.log"
}

# one_partition lets one batch have all events.
one_partition() {
	sql bank "SELECT idempotency.alter_subscription('redis', partitions => 1)" >/dev/null
}

scenario_lease() {
	databases
	one_partition
	publish 500
	published
	redis CLIENT PAUSE 6000 WRITE >/dev/null
	start_relay relay --lease=2 --batch=500 --pipeline=50 --timeout=20
	await 5 in_batch relay
	start_relay second --lease=2 --batch=500 --pipeline=50 --wait=1
	await 20 all_in_stream 500
	await 10 logged relay acknowledged || true
	sleep 1
	terminate relay
	terminate second
	check extended "extensions of a lease of 2 s, while Redis was paused for 6 s" -ge 3 \
		"$(grep -c extended "$here/relay.log")"
	check lease "batches of the second relay" -eq 0 "$(grep -c 'batch' "$here/second.log")"
	check copies "entries in the stream" -eq 500 "$(redis XLEN events:account.booked)"
}

# within checks the time since a moment.
within() {
	check late "$1: seconds" -le "$2" $((SECONDS - $3))
}

stop_idle() {
	local began
	start_relay idle --wait=60
	start_consumer idler
	await 5 logged idle serving
	await 5 logged idler consuming
	sleep 1
	began=$SECONDS
	terminate idle
	terminate idler
	within "SIGTERM to both idle programs" 4 "$began"
}

stop_in_batch() {
	one_partition
	publish 300
	published
	redis CLIENT PAUSE 1500 WRITE >/dev/null
	start_relay finishing --lease=600 --batch=300 --pipeline=30
	await 5 in_batch finishing
	terminate finishing
	check finish "SIGTERM in mid-batch: events delivered" -eq 300 \
		"$(sed -n 's/.*exiting, \([0-9]*\) events delivered/\1/p' "$here/finishing.log")"
	check finish "entries in the stream" -eq 300 "$(redis XLEN events:account.booked)"
}

# scenario_give_back kills Redis during a batch: the lease of ten minutes must not delay
# the next relay.
scenario_give_back() {
	local began
	databases
	publish 300
	published
	redis CLIENT PAUSE 60000 WRITE >/dev/null
	start_relay giver --lease=600 --batch=300 --pipeline=30
	await 5 in_batch giver
	kill -KILL "$redis_pid"
	wait "$redis_pid" 2>/dev/null || true
	await 5 logged giver 'batch.*returned'
	terminate giver
	redis_start
	began=$SECONDS
	start_relay next --lease=600 --drain --wait=1
	exits next 0 10
	within "Redis killed during a batch, lease 600 s; the next relay" 10 "$began"
	check given-back "entries in the stream" -eq 300 "$(redis XLEN events:account.booked)"
}

# code runs a program and checks its exit code.
code() {
	local what=$1 expected=$2 code=0
	shift 2
	timeout 20 "$@" >"$here/out" 2>>"$here/codes.log" || code=$?
	check code "exit code: $what" -eq "$expected" "$code"
}

exit_codes() {
	local bank="dbname=bank_$$_$scenario user=relay" redis="unix://$here/redis"
	local statement="dbname=statement_$$_$scenario user=statement_writer"
	local reader=(--stream=s --group=g --call=statement.consume --redis="$redis")

	code "relay --help" 0 "$bin/relay-redis" --help
	check help "lines of it" -ge 20 "$(wc -l <"$here/out")"
	code "consumer --help" 0 "$bin/consumer" --help
	check help "lines of it" -ge 20 "$(wc -l <"$here/out")"
	code "no subscription given" 2 "$bin/relay-redis"
	code "no such option" 2 "$bin/relay-redis" --subscription=redis --no-such
	code "no number" 2 "$bin/relay-redis" --subscription=redis --batch=many
	code "no URL" 2 "$bin/relay-redis" --subscription=redis --redis=localhost
	code "no connection string" 2 "$bin/relay-redis" --subscription=redis --dbname='nonsense=1'
	code "no stream given" 2 "$bin/consumer" --group=g --call=f
	code "no such subscription" 1 "$bin/relay-redis" --subscription=none --dbname="$bank" --redis="$redis"
	code "another's subscription" 1 "$bin/relay-redis" --subscription=redis --redis="$redis" \
		--dbname="dbname=bank_$$_$scenario user=statement_writer"
	code "no such function" 1 "$bin/consumer" "${reader[@]}" --dbname="$statement" --call=statement.none
	code "SQL in place of a function" 1 "$bin/consumer" "${reader[@]}" --dbname="$statement" \
		--call='statement.consume(1); --'
	code "relay without Redis" 3 "$bin/relay-redis" --subscription=redis --dbname="$bank" \
		--redis="unix://$here/none" --give-up=1
	code "relay without PostgreSQL" 3 "$bin/relay-redis" --subscription=redis --redis="$redis" \
		--dbname="host=$here" --give-up=1
	code "consumer without Redis" 3 "$bin/consumer" "${reader[@]}" --dbname="$statement" \
		--redis="unix://$here/none" --give-up=1
	code "consumer without PostgreSQL" 3 "$bin/consumer" "${reader[@]}" --dbname="host=$here" --give-up=1
}

book() {
	sql bank "SELECT bank.book($1, 1)" >/dev/null
}

# listen lets Redis listen on a free local port, and sets "port".
listen() {
	for _ in $(seq 50); do
		port=$((20000 + RANDOM % 10000))
		[ "$(redis CONFIG SET bind 127.0.0.1 port "$port" 2>/dev/null)" != OK ] || return 0
	done
	return 1
}

# by_password connects through TCP, as a user with a password, to another database.
by_password() {
	local bank="dbname=bank_$$_$scenario user=relay" port
	listen
	redis ACL SETUSER carrier on '>secret' '~*' '&*' +@all >/dev/null
	redis ACL SETUSER default resetpass '>other' >/dev/null
	book 1
	code "no password" 3 "$bin/relay-redis" --subscription=redis --dbname="$bank" \
		--redis="redis://127.0.0.1:$port" --give-up=1
	code "another's password" 3 env REDISCLI_AUTH=other "$bin/relay-redis" --subscription=redis \
		--dbname="$bank" --redis="redis://carrier@127.0.0.1:$port/7" --give-up=1
	code "user, password, port, database" 0 env REDISCLI_AUTH=secret "$bin/relay-redis" \
		--subscription=redis --dbname="$bank" --redis="redis://carrier@127.0.0.1:$port/7" --drain --wait=1
	check password "entries in database 7" -eq 1 \
		"$(REDISCLI_AUTH=other redis -n 7 XLEN events:account.booked)"
}

scenario_stop() {
	databases
	stop_idle
	stop_in_batch
	exit_codes
	by_password
}

# closed_in_stream returns whether the stream has the events that Redis first rejected.
closed_in_stream() {
	[ "$(redis TYPE events:account.closed)" = stream ] && [ "$(redis XLEN events:account.closed)" -ge 2 ]
}

# have_lines returns whether so many events have had their effect.
have_lines() {
	[ "$(lines)" -ge "$1" ]
}

# refused_by_redis publishes two events whose stream cannot exist, between other events of
# their account and of another account.
refused_by_redis() {
	redis SET events:account.closed 'not a stream' >/dev/null
	sql bank "BEGIN; SELECT bank.book(1, 1);
		SELECT idempotency.publish('account.closed', '{}', aggregate_id => '1') FROM generate_series(1, 2);
		SELECT bank.book(1, 1), bank.book(2, 1); COMMIT" >/dev/null
	start_relay relay --lease=2 --wait=1
	start_consumer consumer --sole --max-attempts=3
	await 10 logged relay 'again at'
	await 10 have_lines 3 || true
	check refused "effects of other events than those Redis rejects" -eq 3 "$(lines)"
	redis DEL events:account.closed >/dev/null
	await 20 closed_in_stream || true
	check refused "entries of these events, once Redis accepts them" -eq 2 "$(redis XLEN events:account.closed)"
}

# refused_by_function publishes an event that the function rejects.
refused_by_function() {
	sql bank "SELECT idempotency.publish('account.booked', '{\"account\": \"mine\"}')" >/dev/null
	book 3
	await 20 have_lines 4 || true
	check buried "effects of other events than the one rejected" -eq 4 "$(lines)"
	check buried "attempts of the rejected event" -eq 3 "$(grep -c 'attempt . of 3' "$here/consumer.log")"
	check buried "dead letters" -eq 1 "$(redis XLEN events:account.booked:dead)"
	check buried "dead letters with their error" -eq 1 \
		"$(redis --raw XRANGE events:account.booked:dead - + | grep -c '^22P02: invalid input syntax')"
}

# no_right revokes the consumer's privilege: the event must not fail.
no_right() {
	sql statement 'REVOKE EXECUTE ON FUNCTION statement.consume FROM statement_writer'
	book 4
	exits consumer 1
	check kept "dead letters" -eq 1 "$(redis XLEN events:account.booked:dead)"
	sql statement 'GRANT EXECUTE ON FUNCTION statement.consume TO statement_writer'
	start_consumer consumer --sole
	await 10 have_lines 5 || true
	check kept "effects once the privilege is granted again" -eq 5 "$(lines)"
}

scenario_poison() {
	databases
	refused_by_redis
	refused_by_function
	no_right
	settled
	terminate relay
	terminate consumer
	check poison "events with more than one effect" -eq 0 \
		"$(sql statement 'SELECT count(*) - count(DISTINCT event) FROM statement.line')"
	check poison "messages not acknowledged" -eq 0 \
		"$(redis XPENDING events:account.booked statement | head -n 1)"
}
