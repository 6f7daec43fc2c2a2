# shellcheck shell=bash disable=SC2154
#
# Scenes 14 to 19: consumers of the events send receipts and keep accounts.
#
# Sourced by run.

# events counts the events that were published under a key.
events() {
	sql "SELECT count(*) FROM idempotency.outbox WHERE headers ->> 'idempotency-key' = '$1'"
}

receipts() {
	sql "SELECT count(*) FROM payments.receipt WHERE customer = $1"
}

# send_receipts delivers the events to payments.send_receipt(), until none is left, or none
# comes for as long as its argument says.
send_receipts() {
	sql "CALL idempotency.deliver('receipts', 'payments.send_receipt(idempotency.event)', wait => '${1:-0}')"
}

one_event_each() {
	scene "An event exists exactly if its charge does"
	tell "charge_create() calls idempotency.publish('charge.created', ...)"
	check "events of order-1, requested by fifty sessions" 1 "$(events order-1)"
	check "events of order-3, whose card was declined" 0 "$(events order-3)"
	check "events of order-4, which failed before its retry" 1 "$(events order-4)"
	send_receipts
	check "receipts to customer 1" 1 "$(receipts 1)"
	check "receipts, as many as charges" "$(sql "SELECT count(*) FROM payments.charge")" \
		"$(sql "SELECT count(*) FROM payments.receipt")"
}

late_committer() {
	scene "A transaction that commits late loses no event"
	connect late
	ask late "BEGIN" >/dev/null
	ask late "SELECT payments.charge_create('order-15', 8, 1.00)" >/dev/null
	tell "one session has charged customer 8, and does not commit"
	sql "SELECT payments.charge_create('order-16', 9, 2.00)" >/dev/null
	tell "another one charges customer 9 after it, and commits"
	send_receipts
	check "receipts to customer 9, which need not wait" 1 "$(receipts 9)"
	check "receipts to customer 8" 0 "$(receipts 8)"
	ask late "COMMIT" >/dev/null
	disconnect late
	tell "the first session commits; its event has the smaller number"
	send_receipts
	check "receipts to customer 8" 1 "$(receipts 8)"
}

lost_acknowledgement() {
	local before
	scene "A consumer dies after its work, before the acknowledgement"
	sql "SELECT payments.charge_create('order-17', 9, 3.00)" >/dev/null
	connect consumer
	before=$(ask consumer "SELECT batch, payments.send_receipt(event)
		FROM idempotency.fetch('receipts', lease => '1 second') AS event")
	before=${before%|}
	tell "the receipt is written and committed; the batch is $before"
	kill_backend consumer
	check "batches without an acknowledgement" 1 \
		"$(sql "SELECT count(*) FROM idempotency.partitions WHERE batch_events > 0")"
	check "receipts to customer 9" 2 "$(receipts 9)"
	check "its late acknowledgement is refused with" IK408 "$(
		sql "SELECT count(*) FROM idempotency.fetch('receipts', wait => '5 s', lease => '1 ms')" >"$work/again"
		sqlstate "SELECT idempotency.ack('receipts', $before)"
	)"
	explain
	check "events redelivered to another consumer" 1 "$(cat "$work/again")"
	send_receipts
	check "receipts to customer 9: once() knows the event" 2 "$(receipts 9)"
}

dead_letter() {
	scene "An event that cannot be handled blocks no other event"
	sql "SELECT payments.charge_create('order-18', 10, 95.00)" >/dev/null
	sql "SELECT payments.charge_create('order-19', 9, 4.00)" >/dev/null
	tell "a wrong constraint refuses receipts over 90.00"
	send_receipts '1 second'
	check "receipts to customer 9" 3 "$(receipts 9)"
	check "dead letters, after two attempts" "1|2" \
		"$(sql "SELECT count(*), max(attempts) FROM idempotency.dead_letters")"
	tell "$(sql "SELECT error FROM idempotency.dead_letters")"
	sql "ALTER TABLE payments.receipt DROP CONSTRAINT receipt_amount_check"
	check "after the fix: events redriven" 1 "$(sql "SELECT idempotency.redrive('receipts')")"
	send_receipts
	check "receipts to customer 10" 1 "$(receipts 10)"
	check "dead letters" 0 "$(sql "SELECT count(*) FROM idempotency.dead_letters")"
}

shared() {
	local before consumers=()
	scene "Four consumers share a subscription of four partitions"
	before=$(sql "SELECT coalesce(max(id), 0) FROM payments.receipt")
	sql "SELECT payments.charge_create('shared-' || n, n % 10 + 1, 0.10) FROM generate_series(1, 40) AS n" >/dev/null
	tell "forty charges to ten customers; four consumers fetch, one after the other"
	for _ in 1 2 3 4; do
		sql "SELECT count(*) FROM idempotency.fetch('receipts')" >>"$work/shared"
	done
	tell "they got $(xargs <"$work/shared") events"
	check "batches in flight" 4 "$(sql "SELECT count(*) FROM idempotency.partitions WHERE batch_events > 0")"
	check "events for a fifth consumer" 0 "$(sql "SELECT count(*) FROM idempotency.fetch('receipts')")"
	check "customers whose events two consumers have" 0 "$(sql "SELECT count(*) FROM (
		SELECT FROM idempotency.position AS p JOIN idempotency.outbox AS o ON o.seq = ANY (p.events)
		WHERE p.subscription = 'receipts' GROUP BY o.aggregateid HAVING count(DISTINCT p.partition) > 1) AS c")"
	sql "SELECT count(idempotency.nack('receipts', batch, NULL)) FROM idempotency.position WHERE batch IS NOT NULL" >/dev/null
	tell "they give the batches back, and call deliver() at the same time"
	for _ in 1 2 3 4; do
		send_receipts &
		consumers+=($!)
	done
	wait "${consumers[@]}"
	check "receipts" 40 "$(sql "SELECT count(*) FROM payments.receipt WHERE id > $before")"
	check "receipts to a customer out of order" 0 "$(sql "SELECT count(*)
		FROM payments.receipt AS a JOIN payments.receipt AS b USING (customer) WHERE a.id < b.id AND a.charge > b.charge
			AND a.id > $before AND b.id > $before")"
}

handled() {
	local began ms
	scene "A handler, called by the server, keeps the accounts"
	tell "SET ROLE bookkeeper; SELECT idempotency.subscribe('books', '{charge.*}',"
	tell "    'books.book(idempotency.event)', start_at => 'beginning')"
	psql -X -q -A -t -v ON_ERROR_STOP=1 -o /dev/null -c "SET ROLE bookkeeper" \
		-c "SELECT idempotency.subscribe('books', '{charge.*}', 'books.book(idempotency.event)', 'beginning')"
	await "SELECT sum(charges) = (SELECT count(*) FROM payments.charge) FROM books.revenue" || true
	check "booked, since the beginning" "$(sql "SELECT count(*), sum(amount) FROM payments.charge")" \
		"$(sql "SELECT sum(charges), sum(amount) FROM books.revenue")"
	await "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idempotency relay')" || true
	check "workers, when idle" 0 \
		"$(sql "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idempotency relay'")"
	began=$(date +%s%N)
	sql "SELECT payments.charge_create('order-20', 8, 5.00)" >/dev/null
	await "SELECT sum(charges) = (SELECT count(*) FROM payments.charge) FROM books.revenue" || true
	ms=$((($(date +%s%N) - began) / 1000000))
	tell "another charge; psql sees it booked $ms ms after it began"
	check "booked, each charge once" "$(sql "SELECT count(*), sum(amount) FROM payments.charge")" \
		"$(sql "SELECT sum(charges), sum(amount) FROM books.revenue")"
}
