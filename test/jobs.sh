# shellcheck shell=bash disable=SC2034,SC2209
#
# test/jobs.sh
#
# Running jobs of tests, for test/run, test/soak and test/job, which source this file after
# tools/common.sh. A job is test/job in its own process group of servers, below a
# directory for the whole run:
#
#	tree		copy of the checkout, which the servers' user can write
#	templates	clusters that test/initdb copies, unless TEMPLATES names a directory
#	programs	initdb, which is first in PATH
#	jobs/N		files of job N; jobs/N.log its output, jobs/N.time its times

# reaper_rests tells whether a test needs the reaper at rest, which its first lines say:
# reaper_rests kind name.
reaper_rests() {
	local file
	case $1 in
	regress) file=sql/$2.sql ;;
	isolation) file=test/isolation/specs/$2.spec ;;
	*) return 1 ;;
	esac
	head -n 2 "$file" | grep -q '^[-#]* reaper at rest: '
}

# remove_work removes the copy and the files of all jobs.
remove_work() {
	cd /
	rm -rf "$work"
}

# choose_servers exports the directory of all servers: in memory if there is enough,
# because the tests create and remove hundreds of thousands of small files.
choose_servers() {
	local memory
	[ -z "${SERVERS:-}" ] || return 0
	memory=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
	if [ "$memory" -ge 8000 ] && [ "$(df --output=avail -m /dev/shm | tail -n 1)" -ge 6000 ] &&
		as_server test -w /dev/shm && ! grep -q '^[^ ]* /dev/shm [^ ]* [^ ]*noexec' /proc/mounts; then
		export SERVERS=/dev/shm
	fi
}

# make_work makes the directory of the run. The copy has the results of the build, which
# some tests use.
make_work() {
	choose_servers
	work=$(server_directory test)
	end_with remove_work
	as_server mkdir "$work"/{tree,templates,jobs,programs}
	as_server ln -s "$work/tree/test/initdb" "$work/programs/"
	tar -c --exclude=./.git --exclude=./results . |
		(cd "$work/tree" && as_server tar -x --no-same-owner)
}

# environment exports what all jobs need, and removes the caller's own connection
# settings.
environment() {
	local name
	for name in $(compgen -e | grep -x 'PG[A-Z]*' | grep -vx PGISOLATIONTIMEOUT); do
		unset "$name"
	done
	export TEMPLATES=${TEMPLATES:-$work/templates} INITDB=$work/tree/test/initdb
	PATH=$work/programs:$("$PG_CONFIG" --bindir):$PATH
}

# start runs a job in the background, and sets pid: start number [variable=value ...] --
# kind [name ...]. Torture mounts file systems, so it starts as the caller, and other
# jobs as the servers' user.
start() {
	local output=$work/jobs/$1 as=as_server variables=()
	shift
	while [ "$1" != -- ]; do
		variables+=("$1")
		shift
	done
	shift
	as_server mkdir -p "$output/clusters"
	[ "$1" != torture ] || as=env
	(
		cd "$work/tree" || exit
		"$as" env OUTPUT="$output" CLUSTERS="$output/clusters" RESULTS="$output/torture" "${variables[@]}" \
			"$work/tree/test/measure" "$output.time" \
			timeout --foreground --kill-after=60 "${TIMEOUT:-15}m" test/job "$@"
	) >"$output.log" 2>&1 </dev/null &
	pid=$!
}

# keep saves the files of a failed job in results/: keep number kind [name ...].
keep() {
	local output=$work/jobs/$1 kept=results/$2/${3:-}
	rm -rf "$kept"
	mkdir -p "$kept"
	cp "$output.log" "$kept/log"
	rm -rf "$output/clusters"
	cp -R "$output/." "$kept/" 2>/dev/null || true
	echo "kept in $kept"
}

# essence prints the lines of the log of a failed job that say what failed, shortened, and at
# most 12: violations, failed tests, the changed lines of a difference, and errors. If the log
# has none of them, its last lines.
essence() {
	local lines
	lines=$(cut -c 1-200 "$1" | grep -E '^(VIOLATION|FAILED) |^[-+][^-+]|^not ok |^# +(Failed|got:|expected:)|PANIC: |TRAP: |(Error|error): ' | head -n 12 || true)
	printf '%s\n' "${lines:-$(tail -n 5 "$1" | cut -c 1-200)}" | sed 's/^/    /'
}

# show_failures prints the essence of all failed jobs, so that the end of the output of a run
# says what failed, even if only the end is kept.
show_failures() {
	[ ! -s "$work/failures" ] || { say "what failed"; cat "$work/failures"; }
}
