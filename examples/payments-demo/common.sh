# shellcheck shell=bash disable=SC2154
#
# What the scenes have in common: asking the server, telling the reader, and
# comparing figures.  Sourced by run, which makes the directory "work".

scenes=0
figures=0
wrong=0

# sql runs one statement in a session of its own and prints the bare result.
sql() {
	psql -X -q -A -t -v ON_ERROR_STOP=1 -c "$1"
}

# sqlstate runs one statement that ought to fail, and prints the SQLSTATE.
sqlstate() {
	{ psql -X -q -A -t -v ON_ERROR_STOP=1 -v VERBOSITY=verbose -c "$1" 2>&1 >/dev/null || true; } |
		tee "$work/error" | sed -n 's/^ERROR:  \([A-Z0-9]*\):.*/\1/p'
}

# explain shows the error that sqlstate last saw.
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

# check prints a figure, and remembers it if it is not the expected one.
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

# close_gate makes sessions that ask for the gate wait, until open_gate, so
# that all of them do what comes next at the same moment.  The gate is an
# advisory lock, which this session holds.
close_gate() {
	coproc GATE { psql -X -q -A -t; }
	gatekeeper=$GATE_PID
	echo 'SELECT 1 FROM pg_advisory_lock(1);' >&"${GATE[1]}"
	read -r _ <&"${GATE[0]}"
}

# at_the_gate prints the statement that waits there.
at_the_gate() {
	printf '%s' 'DO $$ BEGIN PERFORM pg_advisory_lock_shared(1); END $$'
}

# open_gate waits until that many sessions stand at the gate, and opens it.
open_gate() {
	local crowd=$1 waiting=0
	for _ in $(seq 200); do
		waiting=$(sql "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
		[ "$waiting" -lt "$crowd" ] || break
		sleep 0.1
	done
	check "sessions waiting to start at the same moment" "$crowd" "$waiting"
	echo '\q' >&"${GATE[1]}"
	wait "$gatekeeper"
}

sql_file() {
	psql -X -q -v ON_ERROR_STOP=1 -o /dev/null -f "$1"
}

# preloaded tells whether the server has loaded the library at its start.
preloaded() {
	[ "$(sql "SELECT 'idempotency' = ANY (string_to_array(
		replace(current_setting('shared_preload_libraries'), ' ', ''), ','))")" = t ]
}

# await asks a question until the answer is t, or 20 seconds are over.
await() {
	for _ in $(seq 200); do
		[ "$(sql "$1" 2>/dev/null || true)" != t ] || return 0
		sleep 0.1
	done
	return 1
}

# Sessions that stay open, by name: what they hear, what they say, and psql.
declare -A ear mouth process

# connect opens a session under a name.  Its errors are kept in $work/name.err.
connect() {
	local name=$1 to from
	rm -f "$work/$name.in" "$work/$name.out"
	mkfifo "$work/$name.in" "$work/$name.out"
	PGAPPNAME=$name psql -X -q -A -t -v VERBOSITY=verbose \
		<"$work/$name.in" >"$work/$name.out" 2>"$work/$name.err" &
	process[$name]=$!
	exec {to}>"$work/$name.in" {from}<"$work/$name.out"
	ear[$name]=$to
	mouth[$name]=$from
}

# ask tells a session a statement and prints its answer, until its connection
# ends.
ask() {
	local name=$1 line
	printf '%s;\n\\echo [end of answer]\n' "$2" >&"${ear[$name]}"
	while read -r line <&"${mouth[$name]}" && [ "$line" != "[end of answer]" ]; do
		echo "$line"
	done
}

# refusal asks a session for what ought to fail, and prints the SQLSTATE.
refusal() {
	local name=$1
	: >"$work/$name.err"
	ask "$name" "$2" >/dev/null
	cp "$work/$name.err" "$work/error"
	sed -n 's/^ERROR:  \([A-Z0-9]*\):.*/\1/p' "$work/error"
}

# hang_up closes a session, if its server has not.
hang_up() {
	local name=$1 to=${ear[$1]} from=${mouth[$1]}
	exec {to}>&- {from}<&-
	wait "${process[$name]}" || true
}
