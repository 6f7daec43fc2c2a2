# idempotency: exactly-once effects for retried requests.
#
# For new users: `make demo` and `make test` (see README.md).
# For packagers: the usual PGXS targets; PG_CONFIG chooses the server.

EXTENSION = idempotency
# The scripts of all versions, and the update scripts. DOCS is not set, because PGXS
# would install pages with names like README.md beside those of other extensions.
DATA = $(wildcard idempotency--*.sql)
MODULE_big = idempotency
OBJS = $(patsubst %.c,%.o,$(wildcard src/*.c src/*/*.c))
PGFILEDESC = "idempotency - retries have their effect exactly once"

# CI builds with `make WERROR=1`; users build without -Werror.
PG_CPPFLAGS = -I$(srcdir)/src
PG_CFLAGS = -Wall -Wextra -Wmissing-prototypes -Wno-unused-parameter $(if $(WERROR),-Werror)

# `make installcheck` runs these tests on a running server; `make test` runs them and
# all others on its own server.
REGRESS = $(patsubst sql/%.sql,%,$(shell grep -L '^-- portable only: ' sql/*.sql))
REGRESS_OPTS = --load-extension=idempotency --encoding=UTF8
ISOLATION = $(patsubst test/isolation/specs/%.spec,%,$(shell grep -L '^\# portable only: ' test/isolation/specs/*.spec))
ISOLATION_OPTS = --load-extension=idempotency --inputdir=test/isolation
EXTRA_CLEAN = .server results dist site

# A machine without PostgreSQL has no PGXS yet: `make demo` and `make test` install it
# and call make again.
PG_CONFIG ?= pg_config
PGXS := $(wildcard $(shell $(PG_CONFIG) --pgxs 2>/dev/null))
ifneq ($(PGXS),)
include $(PGXS)
# The library of digest.c, if the server was built with it.
SHLIB_LINK += $(filter -lcrypto, $(LIBS))
else
all install installcheck clean:
	@echo "No PGXS found; try: tools/prerequisites demo" >&2; exit 1
endif

# A header can change a layout that is compiled into every object file, and so can another
# server: after `make`, `make install PG_CONFIG=...` builds again for that one.
$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*/*.h) .server
.server: .FORCE
	@echo '$(MAJORVERSION)' | cmp -s - $@ || echo '$(MAJORVERSION)' >$@
.PHONY: .FORCE

# Targets for users; `make help` prints them from here.
export PG_CONFIG

.PHONY: help delivery demo payments test soak coverage torture fuzz matrix citus mutants sanitize bench docs dist package format check-format

help: ## print this list
	@echo 'all            build'
	@echo 'install        install into the server that PG_CONFIG names'
	@echo 'installcheck   run the regression and isolation tests on a running server'
	@echo 'clean          remove build results, results/, dist/ and site/'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 15

demo: ## install missing packages, build, and play the scenes of examples/demo
	@tools/prerequisites demo
	@tools/build
	@tools/server run shared_preload_libraries=idempotency idempotency.reaper_naptime=1s \
		-- examples/demo/run
	@examples/payments/run -- examples/payments/demo

payments: ## start the payments service of examples/payments on a throw-away server, and print its URL
	@tools/prerequisites payments
	@tools/build
	@examples/payments/run

test: ## run every test, random ones once (6 minutes); ONLY="regress portable distributed pglite isolation tap pgtap docs model relay payments clients applications fuzz delivery stress torture", TESTS="name ...", LANGUAGES=all, EDITION=portable
	@tools/prerequisites test
	@tools/build
	@test/run

soak: ## repeat the random tests with new seeds; MINUTES=60, KINDS="torture stress delivery fuzz payments tap relay clients applications model", SEED=
	@LANGUAGES=all ONLY="$(KINDS)" tools/prerequisites test
	@tools/build
	@test/soak

coverage: ## run the tests with gcov: lines and branches by folder, functions that no test calls; ONLY=, TESTS=
	@tools/prerequisites test
	@tools/coverage/run

matrix: ## test with the servers of other Debian releases, in chroots; RELEASES="trixie forky", ONLY=, TESTS=; SOURCE=directory of PostgreSQL's source
	@ONLY="$(if $(SOURCE),regress isolation pgtap tap)" tools/prerequisites $(if $(SOURCE),sanitize,matrix)
	@$(if $(SOURCE),test/servers/matrix/source "$(SOURCE)",test/servers/matrix/run $(RELEASES))

citus: ## test the portable edition on a cluster of Citus, built from source (10 minutes); CITUS=directory of its source, OPERATIONS=, MOVES=, KILLS=, SEED=
	@$(if $(CITUS),tools/prerequisites citus)
	@test/servers/citus/run "$(CITUS)"

mutants: ## plant one bug after another; the tests must catch each (an hour); ONLY="name ..."
	@tools/prerequisites test
	@test/mutants/run

# SEED replays a failure.
fuzz: export CALLS ?= 1000000
fuzz: export INPUTS ?= 5000
fuzz: export ROUNDS ?= 200
fuzz: export STATEMENTS ?= 10000
fuzz: ## call it with random and hostile input (20 minutes); SEED=1, CALLS=, INPUTS=, ROUNDS=, STATEMENTS=, SCENARIO="calls inputs outbox plans"
	@tools/prerequisites test
	@tools/build
	@tools/server run fsync=off max_prepared_transactions=50 shared_preload_libraries=idempotency \
		idempotency.relay_workers=0 idempotency.reaper_naptime=0 -- test/fuzz/run $(SCENARIO)

sanitize: ## test on servers with sanitizers or valgrind (hours); KIND="address injection valgrind", ONLY=, TESTS=
	@test/servers/sanitize/run $(KIND)

bench: ## measure against a hand-written implementation; SUITE="keys leases reaper" (15 minutes), outbox (25), delivery (8), scale (15), sessions (2), instructions (10), walk (2)
	@tools/prerequisites bench
	@tools/build
	@test/bench/run $(SUITE)

torture: ## inject faults (kills, full disks, clock changes), and check the data; SEED=1 ROUNDS=10 KINDS="backend sync ..."
	@tools/prerequisites test
	@tools/build
	@test/torture/run

docs: ## build the documentation as a site in site/, with search, and check its links; open site/index.html
	@tools/prerequisites docs
	@tools/site/build
	@echo 'open site/index.html, or, to try it there: python3 -m http.server --directory site; links to other hosts: tools/site/check --external site'

dist: ## make the release of this commit in dist/: a tarball, and a zip for PGXN
	@tools/prerequisites package
	@tools/dist

package: ## make the Debian package of this commit, install and test it in a chroot; RELEASES="bookworm trixie"
	@tools/prerequisites package
	@test/servers/matrix/package $(RELEASES)

delivery: ## write the parts in delivery/ into the scripts of both editions
	delivery/assemble

CLANG_FORMAT ?= $(firstword $(shell command -v clang-format-14 clang-format))

format: ## format the C sources according to .clang-format
	$(CLANG_FORMAT) -i src/*.c src/*/*.[ch]

check-format: ## fail if `make format` would change anything
	$(CLANG_FORMAT) --dry-run -Werror src/*.c src/*/*.[ch]

# Graphviz draws these pictures; the results are committed, so that readers need no
# Graphviz.
docs/%.svg: docs/%.dot
	dot -Tsvg -o $@ $<

# gnuplot draws these from the data of `make bench SUITE=scale` and SUITE=outbox.
docs/scale.svg docs/drain.svg: docs/%.svg: docs/%.csv docs/%.gnuplot
	gnuplot -e "data = 'docs/$*.csv'; picture = '$@'" docs/$*.gnuplot
