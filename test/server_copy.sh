# shellcheck shell=bash
#
# test/server_copy.sh
#
# A copy of the server, for tests that install another build of the extension. Scripts
# source this file after tools/common.sh.

# copy_server copies the server's installation to a new directory, and sets PG_CONFIG to
# the copy. PostgreSQL finds its files relative to its programs.
copy_server() {
	local to=$1 bin share root what directory
	bin=$("$PG_CONFIG" --bindir)
	share=$("$PG_CONFIG" --sharedir)
	root=${bin%/*}
	while [ "${share#"$root"/}" = "$share" ]; do
		root=${root%/*}
	done

	for what in bindir pkglibdir sharedir; do
		directory=$("$PG_CONFIG" "--$what")
		mkdir -p "$to/${directory#"$root"/}"
		cp -a "$directory/." "$to/${directory#"$root"/}"
	done
	directory=$("$PG_CONFIG" --includedir)
	what=$to/${directory#"$root"/}
	mkdir -p "${what%/*}"
	ln -s "$directory" "$what"
	PG_CONFIG=$to/${bin#"$root"/}/pg_config
}
