# shellcheck shell=bash
#
# Chroots of Debian releases, for the scripts that build and test in them. The scripts
# source this file after tools/common.sh; it does not run by itself.
#
# Requires root, debootstrap, and the mirror that the machine's own apt uses. A command
# in a chroot runs in its own namespaces: its mounts are invisible outside, and none of
# its processes outlives the script. The machine's /dev, /proc and /sys are never
# mounted.

chroot_minutes=20 # time limit for making a chroot

# mirror prints the mirror from which the machine's own apt gets Debian's main
# component.
mirror() {
	# shellcheck disable=SC2016
	apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
		awk -v release="$(own_release)" '$2 == release && $3 == "main" && !n++ { print $1 }'
}

# own_release prints the name of the machine's own release of Debian.
own_release() {
	# shellcheck disable=SC1091
	(. /etc/os-release && echo "${VERSION_CODENAME:-}")
}

# isolated runs a command in namespaces that end with this script. The first process is
# a shell: it reaps orphans, and some programs misbehave if their parent has process id
# 1.
isolated() {
	local child status=0
	# shellcheck disable=SC2016
	unshare --mount --propagation private --pid --fork --kill-child --ipc -- \
		bash -c '"$@"; exit $?' bash "$@" </dev/null &
	child=$!
	trap 'kill -KILL "$child"; exit 143' TERM
	wait "$child" || status=$?
	trap - TERM
	return "$status"
}

# inside runs a command in a chroot, in namespaces of its own.
inside() {
	# shellcheck disable=SC2016
	isolated bash -c '. tools/common.sh; . tools/chroot.sh; enter "$@"' bash "$@"
}

# enter runs a command in a chroot, with a /proc of these namespaces only, and a minimal
# /dev.
enter() {
	local root=$1 device number
	shift
	mount -t proc proc "$root/proc"
	mount -t tmpfs -o mode=755 tmpfs "$root/dev"
	while read -r device number; do
		mknod -m 666 "$root/dev/$device" c 1 "$number"
	done <<-END
		null 3
		zero 5
		full 7
		random 8
		urandom 9
	END
	mkdir "$root/dev/shm"
	mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
	ln -s /proc/self/fd "$root/dev/fd"
	ln -s fd/0 "$root/dev/stdin"
	ln -s fd/1 "$root/dev/stdout"
	ln -s fd/2 "$root/dev/stderr"
	exec chroot "$root" env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
		http_proxy="${http_proxy:-}" https_proxy="${https_proxy:-}" \
		ONLY="${ONLY:-}" TESTS="${TESTS:-}" TAPS="${TAPS:-}" "$@"
}

# bootstrap makes the chroot of a release in a directory, with the minimal packages.
bootstrap() {
	local release=$1 root=$2 mirror script scripts=/usr/share/debootstrap/scripts
	command -v debootstrap >/dev/null || { echo "debootstrap is missing"; return 1; }
	mirror=$(mirror)
	[ -n "$mirror" ] || { echo "apt has no mirror of Debian"; return 1; }

	# A debootstrap that is older than the release has no script for it.
	script=$scripts/$release
	[ -e "$script" ] || script=$scripts/sid
	rm -rf --one-file-system "$root"
	isolated timeout "${chroot_minutes}m" \
		debootstrap --variant=minbase --include=ca-certificates "$release" "$root" "$mirror" "$script" &&
		cp /etc/resolv.conf /etc/hosts "$root/etc/"
}

# open_cache makes the directory of the chroots, refuses one that another user made, and
# waits until no other run uses it.
open_cache() {
	local cache=$1
	[ -e "$cache" ] || mkdir -m 700 "$cache"
	if [ -L "$cache" ] || [ ! -O "$cache" ]; then
		die "$cache belongs to another user"
	fi
	exec 9>"$cache/lock"
	flock -n 9 || { say "waiting for another run to end"; flock 9; }
}
