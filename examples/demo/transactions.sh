# shellcheck shell=bash disable=SC2154
#
# Scenes 1 to 7: operations in one transaction of one database.
#
# Sourced by run.

fifty_at_once() {
	local copy pids=() answered=0
	scene "Fifty copies of one charge, at once"
	tell "fifty sessions: SELECT payments.charge_create('order-1', 1, 25.00)"
	close_gate
	for copy in $(seq 50); do
		psql -X -q -A -t -v ON_ERROR_STOP=1 -c "$(at_the_gate)" \
			-c "SELECT payments.charge_create('order-1', 1, 25.00)" \
			>"$work/answer.$copy" 2>"$work/error.$copy" &
		pids+=($!)
	done
	open_gate 50
	for copy in "${pids[@]}"; do
		if wait "$copy"; then answered=$((answered + 1)); fi
	done
	cat "$work"/error.*
	check "sessions that got an answer" 50 "$answered"
	check "different answers, compared byte for byte" 1 \
		"$(sha256sum "$work"/answer.* | cut -d' ' -f1 | sort -u | wc -l)"
	check "rows in payments.charge" 1 "$(charges 1)"
	check "rows in payments.ledger" 1 "$(ledger 1)"
	check "balance, which was 100.00" 75.00 "$(balance 1)"
	tell "the answer: $(cat "$work/answer.1")"
}

another_amount() {
	scene "The same key with another amount"
	tell "SELECT payments.charge_create('order-1', 1, 250.00)"
	check "refused with SQLSTATE" IK422 "$(sqlstate "SELECT payments.charge_create('order-1', 1, 250.00)")"
	explain
	check "rows in payments.charge" 1 "$(charges 1)"
	check "balance" 75.00 "$(balance 1)"
}

declined_card() {
	local first retry
	scene "A declined card: the failure is stored, and replayed"
	tell "SELECT payments.charge_create('order-3', 3, 500.00), twice; a deposit in between"
	first=$(sql "SELECT payments.charge_create('order-3', 3, 500.00)")
	tell "the answer: $first"
	check "stored status" 402 "$(peek order-3)"
	sql "UPDATE payments.account SET balance = 1000 WHERE customer = 3"
	retry=$(sql "SELECT payments.charge_create('order-3', 3, 500.00)")
	check "the retry gets the same answer" yes "$([ "$retry" = "$first" ] && echo yes || echo no)"
	check "rows in payments.charge (rolled back)" 0 "$(charges 3)"
	check "balance, not changed by the retry" 1000.00 "$(balance 3)"
}

database_error() {
	local call="SELECT payments.charge_create('order-4', 4, 40.00, 'SEK')"
	scene "A database error in the middle of a charge"
	tell "$call"
	tell "the charge is inserted, but the ledger has no partition for SEK:"
	check "PostgreSQL's own SQLSTATE" 23514 "$(sqlstate "$call")"
	explain
	check "rows in payments.charge" 0 "$(charges 4)"
	check "stored under the key" nothing "$(peek order-4)"
	tell "after CREATE TABLE ... PARTITION, the client retries with the same key:"
	sql "CREATE TABLE payments.ledger_sek PARTITION OF payments.ledger FOR VALUES IN ('SEK')"
	tell "the answer: $(sql "$call")"
	check "stored status" 201 "$(peek order-4)"
	check "rows in payments.charge" 1 "$(charges 4)"
	check "rows in payments.ledger" 1 "$(ledger 4)"
	check "balance, which was 100.00" 60.00 "$(balance 4)"
}

forgotten_completion() {
	local call="SELECT payments.charge_create_hastily('order-5', 5, 10.00)"
	scene "A procedure that does not complete its key"
	tell "$call"
	check "refused at commit with SQLSTATE" IK428 "$(sqlstate "$call")"
	explain
	check "rows in payments.charge" 0 "$(charges 5)"
	check "stored under the key" nothing "$(peek order-5)"
}

no_claim() {
	local call="INSERT INTO payments.charge (customer, amount, currency) VALUES (6, 60.00, 'EUR')"
	scene "A write to the guarded table without a claim"
	tell "$call"
	check "refused with SQLSTATE" IK403 "$(sqlstate "$call")"
	explain
	check "rows in payments.charge" 0 "$(charges 6)"
}

# redelivered sends each of a thousand messages to two of four consumers, in the same
# order, so that the two handle it at the same time.
redelivered() {
	local consumer pids=() finished=0
	scene "A thousand messages, each delivered twice"
	tell "four consumers share two thousand deliveries: SELECT payments.point_earned(message)"
	close_gate
	for consumer in 0 1 2 3; do
		{
			echo "$(at_the_gate);"
			seq 1000 | awk -v me="$consumer" \
				'$1 % 4 == me || ($1 + 1) % 4 == me { print "SELECT payments.point_earned(" $1 ");" }'
		} | psql -X -q -A -t -v ON_ERROR_STOP=1 -f - >"$work/consumer.$consumer" &
		pids+=($!)
	done
	open_gate 4
	for consumer in "${pids[@]}"; do
		if wait "$consumer"; then finished=$((finished + 1)); fi
	done
	check "consumers that emptied their queue" 4 "$finished"
	check "deliveries answered" 2000 "$(cat "$work"/consumer.* | grep -c '^[tf]$')"
	check "deliveries for which once() returned true" 1000 "$(cat "$work"/consumer.* | grep -c '^t$')"
	check "effects: rows in payments.loyalty_point" 1000 \
		"$(sql 'SELECT count(*) FROM payments.loyalty_point')"
	check "different messages among them" 1000 \
		"$(sql 'SELECT count(DISTINCT message) FROM payments.loyalty_point')"
}
