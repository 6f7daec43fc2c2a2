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
