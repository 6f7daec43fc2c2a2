# shellcheck shell=bash disable=SC2154
#
# Shows that the test can fail. Each mistake is made in a copy of the programs, or in
# their options, and a named check must report it. Sourced by run.

# copy creates a copy of the examples for a mistake.
copy() {
	spoilt=$work/spoilt
	rm -rf "$spoilt"
	mkdir -p "$spoilt/bin"
	cp -R "$examples/relay-redis" "$examples/consumer" "$spoilt/"
}

# spoil changes a file of the copy with a sed script, which must change something.
spoil() {
	local file=$spoilt/$1
	sed "$2" "$file" >"$spoilt/changed"
	! cmp -s "$spoilt/changed" "$file" || {
		echo "spoil: nothing changed in $1"
		return 1
	}
	cp "$spoilt/changed" "$file"
}

# must_catch runs a scenario with the copy, and expects the named check to fail.
must_catch() {
	local mistake=$1 scenario=$2 check=$3 status=0 began=$SECONDS
	build "$spoilt" "$spoilt/bin"
	(
		# shellcheck disable=SC2030
		relay=$spoilt/bin/relay-redis consumer=$spoilt/bin/consumer
		consumer_sql=$spoilt/consumer/consumer.sql
		EVENTS=1200 ROUNDS=3
		play "mistake" "$scenario"
	) >"$work/log" 2>&1 || status=$?
	if [ "$status" -ne 0 ] && grep -q "WRONG \\[$check\\]" "$work/log"; then
		printf '     %-48s caught by [%s] (%d s)\n' "$mistake" "$check" $((SECONDS - began))
	else
		printf '     %-48s NOT caught by [%s] (exit code %d)\n' "$mistake" "$check" "$status"
		cat "$work/log"
		return 1
	fi
}

mistakes() {
	copy
	spoil relay-redis/relay.c 's/\(AddBatch(relay)\) && \(AcknowledgeBatch(relay)\)/\2 \&\& \1/' &&
		must_catch "the relay acknowledges, then adds" crashes lost || return 1

	copy
	spoil consumer/consumer.sql 's/NOT idempotency.once(.*) THEN/false THEN/' &&
		must_catch "the function does not call once()" crashes twice || return 1

	copy
	spoil consumer/consumer.c 's/\tdone = HandleMessages/\t(void) AcknowledgeMessages(consumer, reply, count);\n&/' &&
		must_catch "the consumer acknowledges, then calls" crashes lost || return 1

	copy
	consumer_options='--min-idle=1' \
		must_catch "the consumer changes its name, without --sole" crashes disordered || return 1

	copy
	spoil relay-redis/add.c 's/relay->extendAt < end ? relay->extendAt : end/end/' &&
		must_catch "the relay does not extend its lease" lease copies || return 1

	copy
	spoil relay-redis/batch.c 's/^\tif (!relay->owned)/\tif (relay->owned)/' &&
		must_catch "the relay keeps what it cannot deliver" give_back given-back
}
