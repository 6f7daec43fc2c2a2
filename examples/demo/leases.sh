# shellcheck shell=bash disable=SC2154
#
# Scenes 8 to 13, and the last one: operations with an effect outside the database,
# which need a claim with a lease.
#
# Sourced by run.

# ---------------------------------------------------------------------------
# The client
# ---------------------------------------------------------------------------

# card_key prints the key under which the provider charges for an order.
card_key() {
	sql "SELECT idempotency.derive_key('order.place', '$1', 'charge')"
}

# charge_card asks the provider to charge for an order, and prints the number of the
# charge. A rollback in the shop's database does not undo the charge.
charge_card() {
	local key
	key=$(card_key "$1")
	PGDATABASE=card_provider sql "SELECT provider.charge_card('$key', $2)"
}

# finish_order does the remaining steps of an order, and prints the answer.
finish_order() {
	local key=$1 customer=$2 amount=$3 token=$4 card_charge=$5
	if [ -z "$card_charge" ]; then
		card_charge=$(charge_card "$key" "$amount")
		sql "SELECT payments.order_charged('$key', $token, $card_charge)" >/dev/null
	fi
	sql "SELECT payments.order_finish('$key', $token, $customer, $amount, $card_charge)"
}

# place_order is a complete client: it begins an order and executes it, or gets the
# stored answer. The result of its claim is in $work/claim.
place_order() {
	local key=$1 customer=$2 amount=$3 outcome token card_charge response
	sql "SELECT outcome, token, attempt, recovery_point, state ->> 'card_charge', response
		FROM payments.order_begin('$key', $customer, $amount, p_wait => '20 s')" >"$work/claim"
	IFS='|' read -r outcome token _ _ card_charge response <"$work/claim"
	if [ "$outcome" = replayed ]; then
		echo "$response"
	else
		finish_order "$key" "$customer" "$amount" "$token" "$card_charge"
	fi
}

# claimed prints one field of the claim of the last place_order: 1 is the outcome, 3 the
# attempt, 4 the recovery point.
claimed() {
	cut -d'|' -f"$1" "$work/claim"
}

# orders, card_charges and card_requests read back the results of an order.
orders() {
	sql "SELECT count(*) FROM payments.orders WHERE request = '$1'"
}

card_charges() {
	PGDATABASE=card_provider sql "SELECT count(*) FROM provider.charge WHERE key = '$(card_key "$1")'"
}

card_requests() {
	PGDATABASE=card_provider sql "SELECT sum(asked) FROM provider.charge WHERE key = '$(card_key "$1")'"
}

order_state() {
	sql "SELECT state FROM idempotency.keys WHERE scope = 'order.place' AND key = '$1'"
}

# one_of_each checks that an order was charged and placed once.
one_of_each() {
	check "charges at the provider" 1 "$(card_charges "$1")"
	check "orders in payments.orders" 1 "$(orders "$1")"
}

# ---------------------------------------------------------------------------
# The scenes
# ---------------------------------------------------------------------------

paid_by_card() {
	local outcome token card_charge answer
	local call="SELECT payments.order_begin('order-8', 8, 30.00, p_wait => '0')"
	scene "An order whose card is charged outside this database"
	tell "claim with a lease | charge the card | checkpoint | store the order and complete"
	connect worker
	tell "SELECT payments.order_begin('order-8', 8, 30.00)"
	IFS='|' read -r outcome token < <(ask worker "SELECT outcome, token
		FROM payments.order_begin('order-8', 8, 30.00)")
	check "the worker's claim" claimed "$outcome"
	check "committed and visible to other sessions" in_progress "$(order_state order-8)"
	check "a concurrent request is refused with" IK409 "$(sqlstate "$call")"
	explain
	card_charge=$(charge_card order-8 30.00)
	tell "the provider charges the card: charge $card_charge, under key $(card_key order-8)"
	ask worker "SELECT payments.order_charged('order-8', $token, $card_charge)" >/dev/null
	answer=$(ask worker "SELECT payments.order_finish('order-8', $token, 8, 30.00, $card_charge)")
	disconnect worker
	tell "the answer: $answer"
	check "a retry gets the same answer, byte for byte" yes \
		"$([ "$(place_order order-8 8 30.00)" = "$answer" ] && echo yes || echo no)"
	one_of_each order-8
}

# kill_backend kills the backend of a session with SIGKILL, and waits until the server
# accepts connections again: it ends all sessions, and recovers.
kill_backend() {
	local name=$1 pid started
	started=$(sql "SELECT backend_start FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
	pid=$(ask "$name" "SELECT pg_backend_pid()")
	tell "kill -9 $pid"
	kill -9 "$pid"
	check "the worker's connection" lost "$(ask "$name" "SELECT 'alive'" | grep . || echo lost)"
	disconnect "$name"
	await "SELECT backend_start > '$started' FROM pg_stat_activity WHERE backend_type = 'checkpointer'" ||
		tell "the server does not accept connections"
}

killed_worker() {
	local outcome token card_charge answer
	scene "A worker killed with -9 after the card was charged"
	connect worker
	IFS='|' read -r outcome token < <(ask worker "SELECT outcome, token
		FROM payments.order_begin('order-9', 9, 45.00, p_lease => '3 s')")
	check "the worker's claim, for a lease of 3 seconds" claimed "$outcome"
	card_charge=$(charge_card order-9 45.00)
	ask worker "SELECT payments.order_charged('order-9', $token, $card_charge)" >/dev/null
	tell "the card is charged ($card_charge), the checkpoint stored, the order not yet"
	kill_backend worker
	check "charges at the provider" 1 "$(card_charges order-9)"
	check "orders in payments.orders" 0 "$(orders order-9)"
	tell "the client retries, and waits for the end of the lease:"
	answer=$(place_order order-9 9 45.00)
	check "its claim" taken_over "$(claimed 1)"
	check "attempt" 2 "$(claimed 3)"
	check "recovery point at which it continues" charged "$(claimed 4)"
	tell "the answer: $answer"
	check "requests to the provider: no second one" 1 "$(card_requests order-9)"
	one_of_each order-9
}

stalled_worker() {
	local outcome token card_charge answer
	scene "A worker that only stalled is fenced off"
	connect former
	IFS='|' read -r outcome token < <(ask former "SELECT outcome, token
		FROM payments.order_begin('order-10', 10, 60.00, p_lease => '1 s')")
	check "the worker's claim, for a lease of 1 second" claimed "$outcome"
	card_charge=$(charge_card order-10 60.00)
	tell "the card is charged ($card_charge), and the worker stalls before the checkpoint"
	answer=$(place_order order-10 10 60.00)
	check "the claim of the next request, after the lease" taken_over "$(claimed 1)"
	check "requests to the provider, under the same key" 2 "$(card_requests order-10)"
	tell "the answer: $answer"
	tell "the former owner continues and writes its order, with the old token:"
	ask former "BEGIN"
	ask former "INSERT INTO payments.orders (request, customer, amount, card_charge)
		VALUES ('order-10', 10, 60.00, $card_charge)"
	check "orders, in the snapshot of the former owner" 2 \
		"$(ask former "SELECT count(*) FROM payments.orders WHERE request = 'order-10'")"
	check "its completion is refused with SQLSTATE" IK410 "$(refusal former \
		"SELECT idempotency.complete('order.place', 'order-10', '{}', token => $token)")"
	explain
	ask former "COMMIT"
	disconnect former
	check "orders placed by the former owner" 0 \
		"$(sql "SELECT count(*) FROM payments.orders WHERE placed_by = 'former'")"
	one_of_each order-10
}

waiting_duplicate() {
	local outcome token card_charge answer committed replayed milliseconds
	scene "A duplicate waits, and gets its answer when the owner commits"
	connect owner
	IFS='|' read -r outcome token < <(ask owner "SELECT outcome, token
		FROM payments.order_begin('order-11', 11, 75.00, p_lease => '1 min')")
	check "the owner's claim, for a lease of 1 minute" claimed "$outcome"
	PGAPPNAME=duplicate psql -X -q -A -t -v ON_ERROR_STOP=1 -c "SELECT replayed, response
		FROM payments.order_begin('order-11', 11, 75.00, p_wait => '1 min')" \
		-c "SELECT extract(epoch FROM clock_timestamp())" >"$work/duplicate" &
	await "SELECT wait_event_type = 'Extension' FROM pg_stat_activity WHERE application_name = 'duplicate'" ||
		tell "the duplicate does not wait"
	check "sessions that sleep until then" 1 \
		"$(sql "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Extension'
			AND application_name = 'duplicate'")"
	card_charge=$(charge_card order-11 75.00)
	ask owner "SELECT payments.order_charged('order-11', $token, $card_charge)" >/dev/null
	ask owner "BEGIN"
	answer=$(ask owner "SELECT payments.order_finish('order-11', $token, 11, 75.00, $card_charge)")
	committed=$(ask owner "SELECT extract(epoch FROM clock_timestamp())")
	ask owner "COMMIT"
	wait $!
	disconnect owner
	{ read -r replayed && read -r milliseconds; } <"$work/duplicate"
	milliseconds=$(sql "SELECT round(($milliseconds - $committed) * 1000)")
	tell "the duplicate gets its answer $milliseconds ms after the owner's COMMIT"
	check "before the end of the lease and of the wait" yes \
		"$([ "$milliseconds" -lt 5000 ] && echo yes || echo no)"
	check "the owner's answer, byte for byte" yes "$([ "$replayed" = "t|$answer" ] && echo yes || echo no)"
	one_of_each order-11
}

# completer takes over abandoned operations, finishes them, and prints the keys.
completer() {
	local key customer amount token card_charge
	psql -X -q -A -t -v ON_ERROR_STOP=1 -c "$(at_the_gate)" -c "
		SELECT key, request ->> 'customer', request ->> 'amount', token,
			state ->> 'card_charge'
		FROM idempotency.claim_abandoned('order.place', '30 s', 2)" >"$work/taken.$1"
	while IFS='|' read -r key customer amount token card_charge; do
		finish_order "$key" "$customer" "$amount" "$token" "$card_charge" >/dev/null
		echo "$key"
	done <"$work/taken.$1" >"$work/completed.$1"
}

completers() {
	local number token card_charge pids=()
	scene "Three abandoned orders, and two completers"
	for number in 1 2 3; do
		token=$(sql "SELECT token FROM payments.order_begin('order-12-$number', 12, $number.50, p_lease => '1 s')")
		card_charge=$(charge_card "order-12-$number" "$number.50")
		# The first worker dies before it stores the checkpoint.
		[ "$number" = 1 ] ||
			sql "SELECT payments.order_charged('order-12-$number', $token, $card_charge)" >/dev/null
	done
	tell "three workers charge their cards and die, and their clients do not retry"
	await "SELECT count(*) = 3 FROM idempotency.zombies" || true
	check "operations in the view idempotency.zombies" 3 "$(sql "SELECT count(*) FROM idempotency.zombies")"
	tell "both completers: SELECT * FROM idempotency.claim_abandoned('order.place', '30 s', 2)"
	close_gate
	for number in 1 2; do
		completer "$number" &
		pids+=($!)
	done
	open_gate 2
	wait "${pids[@]}"
	check "operations completed by the two" 3 "$(cat "$work"/completed.* | wc -l)"
	check "different ones among them" 3 "$(sort -u "$work"/completed.* | wc -l)"
	for number in 1 2 3; do
		one_of_each "order-12-$number"
	done
	check "operations in the view idempotency.zombies" 0 "$(sql "SELECT count(*) FROM idempotency.zombies")"
}

# card_books compares the charges with the orders.
card_books() {
	scene "The accounts of both sides"
	sql "SELECT card_charge, amount FROM payments.orders ORDER BY 1" >"$work/ordered"
	PGDATABASE=card_provider sql "SELECT id, amount FROM provider.charge ORDER BY 1" >"$work/charged"
	check "orders in payments.orders" 7 "$(wc -l <"$work/ordered")"
	check "charges at the provider" 7 "$(wc -l <"$work/charged")"
	check "orders and charges without their counterpart" 0 "$(comm -3 "$work/ordered" "$work/charged" | wc -l)"
	check "operations still in progress" 0 \
		"$(sql "SELECT count(*) FROM idempotency.keys WHERE state NOT IN ('completed', 'failed', 'seen')")"
	if preloaded; then
		tell "counted since the crash, in the view idempotency.stats:"
		check "takeovers" 5 "$(sql "SELECT takeovers FROM idempotency.stats WHERE datname = current_database()")"
		check "stale tokens that were refused" 1 \
			"$(sql "SELECT stale_tokens FROM idempotency.stats WHERE datname = current_database()")"
	fi
}

reaped() {
	local kept
	scene "Background workers delete expired keys"
	kept=$(sql "SELECT count(*) FROM idempotency.keys")
	check "messages stored with a retention of one second" 1000 "$(sql "SELECT count(*) FROM
		idempotency.once_many('readings', ARRAY(SELECT i::text FROM generate_series(1, 1000) AS i), '1 s')")"
	await "SELECT NOT EXISTS (SELECT FROM idempotency.keys WHERE scope = 'readings')" || true
	check "messages left, a little later" 0 \
		"$(sql "SELECT count(*) FROM idempotency.keys WHERE scope = 'readings'")"
	check "all other keys are still there" "$kept" "$(sql "SELECT count(*) FROM idempotency.keys")"
}
