# shellcheck shell=bash disable=SC2154
#
# Kills relay and consumer repeatedly during batches, while a second relay delivers other
# partitions. Sourced by run.
#
#	EVENTS=10000 ROUNDS=10		number of events, number of rounds

EVENTS=${EVENTS:-10000}
ROUNDS=${ROUNDS:-10}

# restart_consumer starts the consumer under a new name, as machines in a fleet have;
# --sole must still keep the order.
restart_consumer() {
	# shellcheck disable=SC2086
	start_consumer consumer --batch=50 --name="host-$killed" ${consumer_options---sole}
}

restart_relay() {
	start_relay relay --lease=1 --batch=100 --pipeline=10 --wait=5
}

# hold_up blocks the consumer in its function. The transaction continues and commits
# when the lock is released, although the consumer was killed.
hold_up() {
	sql statement 'BEGIN; LOCK TABLE statement.account IN SHARE ROW EXCLUSIVE MODE;
		SELECT pg_sleep(1.5); COMMIT' >/dev/null &
	holder=$!
	sleep 0.3
}

# round_odd stops both programs while they wait for a reply: the relay for Redis, the
# consumer for PostgreSQL.
round_odd() {
	hold_up
	redis CLIENT PAUSE 10000 WRITE >/dev/null
	publish "$1"
	await 5 in_batch relay || true
	nap 100
	kill_hard relay
	redis CLIENT UNPAUSE >/dev/null
	restart_relay
	await 5 in_batch consumer || true
	kill_hard consumer
	wait "$holder"
	restart_consumer
}

# round_even stops both at random moments of a batch. The relay starts with a backlog
# and an expired lease.
round_even() {
	kill -STOP "${pids[relay]}"
	publish "$1"
	published
	kill -CONT "${pids[relay]}"
	catch_in_batch relay
	kill_hard relay
	restart_relay
	catch_in_batch consumer
	kill_hard consumer
	restart_consumer
}

# round_late stops both after some time of work.
round_late() {
	publish "$1"
	nap 400
	redis CLIENT PAUSE 10000 WRITE >/dev/null
	sleep 0.2
	kill_hard relay
	redis CLIENT UNPAUSE >/dev/null
	restart_relay
	await 5 in_batch consumer || true
	nap 100
	hold_up
	kill_hard consumer
	restart_consumer
	wait "$holder"
}

scenario_crashes() {
	local round killed=0 seen
	declare -A killed_in_batch
	databases
	sql bank "SELECT idempotency.alter_subscription('redis', partitions => 4)"
	start_relay beside --lease=1 --batch=100 --pipeline=10 --wait=5
	restart_relay
	restart_consumer
	for round in $(seq "$ROUNDS"); do
		case $((round % 3)) in
		1) round_odd $((EVENTS / ROUNDS)) ;;
		2) round_even $((EVENTS / ROUNDS)) ;;
		0) round_late $((EVENTS / ROUNDS)) ;;
		esac
		published
	done
	settled
	terminate relay
	terminate beside
	terminate consumer
	check beside "batches of the second relay" -gt 0 "$(grep -c acknowledged "$here/beside.log")"
	start_relay relay --drain --wait=1.5
	exits relay 0
	start_consumer consumer --drain --name=last ${consumer_options---sole}
	exits consumer 0

	check_effects "$EVENTS"
	figure "kills with SIGKILL" "$killed"
	check killed "kills of the relay during a batch" -ge $((ROUNDS / 3)) "${killed_in_batch[relay]:-0}"
	check killed "kills of the consumer during a batch" -ge $((ROUNDS / 3)) "${killed_in_batch[consumer]:-0}"
	check copies "copies in the stream" -gt 0 $(($(redis XLEN events:account.booked) - EVENTS))
	seen=$(sed -n 's/.* \([0-9]*\) of them seen before.*/\1/p' "$here/consumer.log" |
		awk '{ n += $1 } END { print n + 0 }')
	check seen "copies that the consumers detected" -gt 0 "$seen"
	echo "counts: operations=$EVENTS faults=$killed violations=$wrong"
}
