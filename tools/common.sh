# shellcheck shell=bash
#
# Shared by the scripts of tools/, test/ and .ci/.  They change to the root of
# the checkout and source this file; it is never run.
#
# PG_CONFIG chooses the server, as for PGXS.

set -euo pipefail

# A script that make runs calls make again, which must not take the caller's
# flags for its own; variables given on make's command line come by environment.
unset MAKEFLAGS MFLAGS MAKELEVEL

# Debian keeps pgbouncer and others where an ordinary user does not look.
PATH=$PATH:/usr/sbin:/sbin
export PATH

PG_CONFIG=${PG_CONFIG:-pg_config}
PG_CONFIG=$(command -v "$PG_CONFIG" || printf '%s' "$PG_CONFIG")
export PG_CONFIG

# say prints one line about what a script is doing.
say() {
	printf '== %s\n' "$*"
}

# die prints a reason and ends the script.
die() {
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# quietly runs a command, and shows what it printed only if it fails.
quietly() {
	local output
	output=$("$@" 2>&1 </dev/null) || die "$output"
}

# is_root tells whether the caller is root.
is_root() {
	[ "$(id -u)" = 0 ]
}

# as_root runs a command as root: directly, or through sudo where that works
# without a password or can ask for one.  Otherwise it says what to run.
as_root() {
	if is_root; then
		"$@"
	elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
		sudo "$@"
	else
		die "this needs root. Run as root, then try again: $*"
	fi
}

# as_server runs a command as the user that servers run as: PostgreSQL refuses
# to run as root, so that root's servers belong to Debian's user postgres.
# setpriv, unlike su, stays in the terminal's process group, so that Ctrl-C
# arrives.
as_server() {
	if is_root; then
		setpriv --reuid=postgres --regid=postgres --init-groups env HOME=/var/lib/postgresql "$@"
	else
		"$@"
	fi
}

# server_directory makes a directory that the server's user owns and nobody
# else can enter, and prints its name.  It lies in /tmp, whatever TMPDIR says:
# root's own TMPDIR may be closed to the server, and the name of a socket must
# be short.
server_directory() {
	as_server mktemp -d "/tmp/idempotency-$1.XXXXXX"
}

# ----------------------------------------------------------------
# Nothing stays behind
# ----------------------------------------------------------------
#
# A script that leaves something behind if it is stopped says by end_with how to remove
# it, and runs what takes long by attend.  However the script ends (even by SIGKILL, in
# attend), what it has started ends first, and then the function given to end_with runs.
# bash runs a trap only when the command in the foreground is over: attend waits for a
# command in the background instead.

ending=:
guard=

# descendants prints a process and all that descend from it.
descendants() {
	local child
	echo "$1"
	# shellcheck disable=SC2013 # the file has one line of words
	for child in $(cat "/proc/$1"/task/*/children 2>/dev/null); do
		descendants "$child"
	done
}

# is_alive tells whether a process exists and has not ended.
is_alive() {
	local stat
	read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
	case ${stat##*) } in [ZX]*) return 1 ;; esac
}

# end_processes ends processes, and waits until they have removed what is theirs.
end_processes() {
	local pid tries=600
	kill -s TERM "$@" 2>/dev/null || true
	for pid in "$@"; do
		while is_alive "$pid" && [ $((tries--)) -gt 0 ]; do
			sleep 0.1
		done
	done
	[ "$tries" -gt 0 ] || kill -s KILL "$@" 2>/dev/null || true
}

# end_guard ends the guard of attend, which waits for the end of this script.
end_guard() {
	local pids
	[ -n "$guard" ] || return 0
	mapfile -t pids < <(descendants "$guard")
	guard=
	kill -s KILL "${pids[@]}" 2>/dev/null || true
}

# finish is the end of a script.  No signal cuts it short, nor the commands that it runs.
finish() {
	local pids
	trap '' HUP INT TERM
	end_guard
	mapfile -t pids < <(descendants $$ | grep -vx $$)
	end_processes "${pids[@]}"
	"$ending"
}

# end_with has a function called when this script ends, after all that it has started.
end_with() {
	ending=$1
	trap finish EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
}

# watch waits until this script is gone, and then does what it could not do.
watch() {
	local pids
	trap '' HUP INT TERM
	trap - EXIT
	tail --pid=$$ -f /dev/null
	mapfile -t pids < <(descendants "$1")
	end_processes "${pids[@]}"
	"$ending"
}

# attend runs a command, and returns its exit code.  A signal to this script ends it at
# once.  (bash would have a command in the background ignore Ctrl-C.)
attend() {
	local command status=0
	env --default-signal=INT,QUIT "$@" <&0 &
	command=$!
	watch "$command" </dev/null >/dev/null 2>&1 &
	guard=$!
	disown "$guard"
	wait "$command" || status=$?
	end_guard
	return "$status"
}
