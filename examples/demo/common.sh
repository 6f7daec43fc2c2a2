# shellcheck shell=bash disable=SC2154
#
# Shared by all scenes: statements, output for the reader, and comparison of figures.
# Sourced by run, which creates the directory "work".

scenes=0
figures=0
wrong=0

# sql runs one statement in a separate session and prints the unformatted result.
sql() {
	psql -X -q -A -t -v ON_ERROR_STOP=1 -c "$1"
}

# sqlstate runs one statement that must fail, and prints the SQLSTATE.
sqlstate() {
	{ psql -X -q -A -t -v ON_ERROR_STOP=1 -v VERBOSITY=verbose -c "$1" 2>&1 >/dev/null || true; } |
		tee "$work/error" | sed -n 's/^ERROR:  \([A-Z0-9]*\):.*/\1/p'
}

# explain shows the error of the last sqlstate.
explain() {
	sed -n -e 's/^ERROR:  \([A-Z0-9]*\): /\1: /p' -e 's/^DETAIL: */       /p' \
		-e 's/^HINT: */       /p' "$work/error" | sed 's/^/     | /'
}

# scene begins a scene.
scene() {
	scenes=$((scenes + 1))
	printf '\n%s. %s\n' "$scenes" "$1"
}

tell() {
	printf '     %s\n' "$@"
}

# check prints a figure, and counts it as wrong if it is not the expected one.
check() {
	local what=$1 expected=$2 actual=$3
	figures=$((figures + 1))
	if [ "$actual" = "$expected" ]; then
		printf '     %-50s %12s   ok\n' "$what" "$actual"
	else
		wrong=$((wrong + 1))
		printf '     %-50s %12s   WRONG, expected %s\n' "$what" "${actual:-nothing}" "$expected"
	fi
}

# charges, ledger and balance read one customer's figures back.
charges() {
	sql "SELECT count(*) FROM payments.charge WHERE customer = $1"
}

ledger() {
	sql "SELECT count(*) FROM payments.ledger l JOIN payments.charge c ON c.id = l.charge
		WHERE c.customer = $1"
}

balance() {
	sql "SELECT balance FROM payments.account WHERE customer = $1"
}

peek() {
	sql "SELECT coalesce((idempotency.peek('charge.create', '$1')).status::text, 'nothing')"
}

# close_gate makes sessions that execute at_the_gate wait until open_gate, so that all
# of them continue at the same moment. The gate is an advisory lock, which this session
# holds.
close_gate() {
	coproc GATE { psql -X -q -A -t; }
	gatekeeper=$GATE_PID
	echo 'SELECT 1 FROM pg_advisory_lock(1);' >&"${GATE[1]}"
	read -r _ <&"${GATE[0]}"
}

# at_the_gate prints the statement that waits for the gate.
at_the_gate() {
	printf '%s' 'DO $$ BEGIN PERFORM pg_advisory_lock_shared(1); END $$'
}

# open_gate waits until that many sessions wait for the gate, and opens it.
open_gate() {
	local sessions=$1 waiting=0
	for _ in $(seq 200); do
		waiting=$(sql "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
		[ "$waiting" -lt "$sessions" ] || break
		sleep 0.1
	done
	check "sessions waiting to start at the same moment" "$sessions" "$waiting"
	echo '\q' >&"${GATE[1]}"
	wait "$gatekeeper"
}

sql_file() {
	psql -X -q -v ON_ERROR_STOP=1 -o /dev/null -f "$1"
}

# preloaded returns whether the server has preloaded the library.
preloaded() {
	[ "$(sql "SELECT 'idempotency' = ANY (string_to_array(
		replace(current_setting('shared_preload_libraries'), ' ', ''), ','))")" = t ]
}

# await repeats a query until the result is t, for at most 20 seconds.
await() {
	for _ in $(seq 200); do
		[ "$(sql "$1" 2>/dev/null || true)" != t ] || return 0
		sleep 0.1
	done
	return 1
}

# Sessions that stay open, by name: the input and output of psql, and its process.
declare -A input output process

# connect opens a session under a name.  Its errors are kept in $work/name.err.
connect() {
	local name=$1 to from
	rm -f "$work/$name.in" "$work/$name.out"
	mkfifo "$work/$name.in" "$work/$name.out"
	PGAPPNAME=$name psql -X -q -A -t -v VERBOSITY=verbose \
		<"$work/$name.in" >"$work/$name.out" 2>"$work/$name.err" &
	process[$name]=$!
	exec {to}>"$work/$name.in" {from}<"$work/$name.out"
	input[$name]=$to
	output[$name]=$from
}

# ask tells a session a statement and prints its answer, until its connection
# ends.
ask() {
	local name=$1 line
	printf '%s;\n\\echo [end of result]\n' "$2" >&"${input[$name]}"
	while read -r line <&"${output[$name]}" && [ "$line" != "[end of result]" ]; do
		echo "$line"
	done
}

# refusal runs a statement that must fail in a session, and prints the SQLSTATE.
refusal() {
	local name=$1
	: >"$work/$name.err"
	ask "$name" "$2" >/dev/null
	cp "$work/$name.err" "$work/error"
	sed -n 's/^ERROR:  \([A-Z0-9]*\):.*/\1/p' "$work/error"
}

# disconnect closes a session, unless its server has closed it.
disconnect() {
	local name=$1 to=${input[$1]} from=${output[$1]}
	exec {to}>&- {from}<&-
	wait "${process[$name]}" || true
}
