# shellcheck shell=bash
#
# Shared by the scripts of tools/, test/ and .ci/. The scripts change to the root of the
# checkout and source this file; it does not run by itself.
#
# PG_CONFIG chooses the server, as for PGXS.

set -euo pipefail

# A script that make runs calls make again, which must not use the flags of the outer
# make; the environment passes variables that were given on make's command line.
unset MAKEFLAGS MFLAGS MAKELEVEL

# Debian installs pgbouncer and others outside the PATH of ordinary users.
PATH=$PATH:/usr/sbin:/sbin
export PATH

PG_CONFIG=${PG_CONFIG:-pg_config}
PG_CONFIG=$(command -v "$PG_CONFIG" || printf '%s' "$PG_CONFIG")
export PG_CONFIG

# say prints a progress line.
say() {
	printf '== %s\n' "$*"
}

# die prints a reason and ends the script.
die() {
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# quietly runs a command, and shows its output only if it fails.
quietly() {
	local output
	output=$("$@" 2>&1 </dev/null) || die "$output"
}

# is_root returns whether the caller is root.
is_root() {
	[ "$(id -u)" = 0 ]
}

# as_root runs a command as root: directly, or with sudo if that works without a
# password or can ask for one. Otherwise it prints the command to run.
as_root() {
	if is_root; then
		"$@"
	elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
		sudo "$@"
	else
		die "this needs root. Run as root, then try again: $*"
	fi
}

# as_server runs a command as the user for servers: PostgreSQL refuses to run as root,
# so root uses Debian's user postgres. Unlike su, setpriv stays in the terminal's
# process group, so that Ctrl-C reaches the command.
as_server() {
	if is_root; then
		setpriv --reuid=postgres --regid=postgres --init-groups env HOME=/var/lib/postgresql "$@"
	else
		"$@"
	fi
}

# server_directory makes a directory that the server's user owns and no other user can
# enter, and prints its name. It is in $SERVERS or /tmp, whatever TMPDIR says: root's own
# TMPDIR can be closed to the server, and the name of a socket must be short.
server_directory() {
	as_server mktemp -d "${SERVERS:-/tmp}/idempotency-$1.XXXXXX"
}

# ----------------------------------------------------------------
# Cleanup
# ----------------------------------------------------------------
#
# A script that must clean up when it is stopped registers a function with end_with, and
# runs long commands with attend. However the script ends (even by SIGKILL during
# attend), its processes end first, and then the registered function runs. bash runs a
# trap only after the foreground command has ended: therefore attend waits for a
# background command.

ending=:
guard=

# descendants prints a process and all its descendants.
descendants() {
	local child
	echo "$1"
	# shellcheck disable=SC2013 # the file has one line of words
	for child in $(cat "/proc/$1"/task/*/children 2>/dev/null); do
		descendants "$child"
	done
}

# is_alive returns whether a process exists and has not ended.
is_alive() {
	local stat
	read -r stat 2>/dev/null <"/proc/$1/stat" || return 1
	case ${stat##*) } in [ZX]*) return 1 ;; esac
}

# end_processes ends processes, and waits until they have cleaned up.
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

# finish runs at the end of a script. Signals interrupt neither it nor its commands.
finish() {
	local pids
	trap '' HUP INT TERM
	end_guard
	mapfile -t pids < <(descendants $$ | grep -vx $$)
	end_processes "${pids[@]}"
	"$ending"
}

# end_with registers a function that runs when this script ends, after all processes
# that it has started have ended.
end_with() {
	ending=$1
	trap finish EXIT
	trap 'exit 129' HUP
	trap 'exit 130' INT
	trap 'exit 143' TERM
}

# watch waits until this script has ended, and cleans up if the script could not.
watch() {
	local pids
	trap '' HUP INT TERM
	trap - EXIT
	tail --pid=$$ -f /dev/null
	mapfile -t pids < <(descendants "$1")
	end_processes "${pids[@]}"
	"$ending"
}

# attend runs a command, and returns its exit code. A signal to this script ends the
# command at once. bash would make a background command ignore Ctrl-C.
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
