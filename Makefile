# idempotency: retries have their effect exactly once.
#
# For a newcomer: `make demo` and `make test` (see README.md).
# For a packager: the usual PGXS targets; PG_CONFIG chooses the server.

EXTENSION = idempotency
# The scripts of all versions, and those that lead from one to the next.  There are no
# DOCS: PGXS would put pages with names like README.md beside those of all other extensions.
DATA = $(wildcard idempotency--*.sql)
MODULE_big = idempotency
OBJS = \
	src/abandoned.o \
	src/canonical.o \
	src/claim.o \
	src/composite.o \
	src/cursor.o \
	src/databases.o \
	src/deferred.o \
	src/delivery.o \
	src/document.o \
	src/errors.o \
	src/event.o \
	src/fetch.o \
	src/fingerprint.o \
	src/finish.o \
	src/guard.o \
	src/guc.o \
	src/hand.o \
	src/http.o \
	src/idempotency.o \
	src/inbox.o \
	src/keygen.o \
	src/keylock.o \
	src/keyname.o \
	src/keyrow.o \
	src/keytable.o \
	src/keytext.o \
	src/launcher.o \
	src/lease.o \
	src/lockwait.o \
	src/number.o \
	src/operation.o \
	src/outbox.o \
	src/outboxerrors.o \
	src/outboxhorizon.o \
	src/outboxlag.o \
	src/outboxneed.o \
	src/outboxreap.o \
	src/outboxscan.o \
	src/outboxstart.o \
	src/outboxtable.o \
	src/ownerquery.o \
	src/owntable.o \
	src/parked.o \
	src/parkedwrite.o \
	src/position.o \
	src/prefix.o \
	src/reaper.o \
	src/reaperrun.o \
	src/record.o \
	src/reevaluation.o \
	src/relay.o \
	src/relaybatch.o \
	src/relaybell.o \
	src/relayevent.o \
	src/relaylauncher.o \
	src/relaynote.o \
	src/relayregistry.o \
	src/relayserved.o \
	src/relaystay.o \
	src/relaystep.o \
	src/relaysurvey.o \
	src/relayturn.o \
	src/run.o \
	src/serverlog.o \
	src/setting.o \
	src/settlement.o \
	src/shmem.o \
	src/stats.o \
	src/store.o \
	src/storebatch.o \
	src/storescan.o \
	src/storewrite.o \
	src/subscribe.o \
	src/subscription.o \
	src/timing.o \
	src/topic.o \
	src/topicset.o \
	src/wakeup.o \
	src/worker.o \
	src/xact.o
PGFILEDESC = "idempotency - retries have their effect exactly once"

# `make WERROR=1` is what CI builds with; users build without -Werror.
PG_CFLAGS = -Wall -Wextra -Wmissing-prototypes -Wno-unused-parameter $(if $(WERROR),-Werror)

# `make installcheck` runs these against a server that is running already;
# `make test` runs them, and everything else, against one of its own.
REGRESS = $(patsubst sql/%.sql,%,$(wildcard sql/*.sql))
REGRESS_OPTS = --load-extension=idempotency --encoding=UTF8
ISOLATION = $(patsubst test/isolation/specs/%.spec,%,$(wildcard test/isolation/specs/*.spec))
ISOLATION_OPTS = --load-extension=idempotency --inputdir=test/isolation
EXTRA_CLEAN = results dist

# On a machine without PostgreSQL there is no PGXS yet: `make demo` and `make
# test` install it and call make again.
PG_CONFIG ?= pg_config
PGXS := $(wildcard $(shell $(PG_CONFIG) --pgxs 2>/dev/null))
ifneq ($(PGXS),)
include $(PGXS)
else
all install installcheck clean:
	@echo "No PGXS found; try: tools/prerequisites demo" >&2; exit 1
endif

# A header may change the layout that every room was compiled with.
$(OBJS) $(OBJS:.o=.bc): $(wildcard src/*.h)

# The targets below are for people; `make help` prints them from here.
export PG_CONFIG

.PHONY: help demo payments test torture fuzz matrix mutants sanitize bench dist package format check-format

help: ## print this list
	@echo 'all            build'
	@echo 'install        install into the server that PG_CONFIG names'
	@echo 'installcheck   run the regression and isolation tests on a running server'
	@echo 'clean          remove what was built, results/ and dist/'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 15

demo: ## see it work: install what is missing, build, play the scenes of examples/payments-demo
	@tools/prerequisites demo
	@tools/build
	@tools/server run shared_preload_libraries=idempotency idempotency.reaper_naptime=1s \
		-- examples/payments-demo/run
	@examples/payments/run -- examples/payments/demo

payments: ## start the payments service of examples/payments on a throw-away server, and say where its page is
	@tools/prerequisites payments
	@tools/build
	@examples/payments/run

test: ## run every test; ONLY="regress isolation tap pgtap docs model relay payments fuzz stress storm torture", TESTS="name ..."
	@tools/prerequisites test
	@tools/build
	@tools/server run fsync=off max_prepared_transactions=50 -- test/run

matrix: ## test with the servers of other Debian releases, in chroots; RELEASES="trixie forky", ONLY=, TESTS=
	@tools/prerequisites matrix
	@test/matrix/run $(RELEASES)

mutants: ## plant bugs, one after another: the tests must catch each (15 minutes); ONLY="name ..."
	@tools/prerequisites test
	@test/mutants/run

# A seed replays what failed.
fuzz: export CALLS ?= 1000000
fuzz: export INPUTS ?= 5000
fuzz: export ROUNDS ?= 200
fuzz: ## feed it what nobody would on purpose (20 minutes); SEED=1, CALLS=, INPUTS=, ROUNDS=, SCENARIO="calls inputs outbox"
	@tools/prerequisites test
	@tools/build
	@tools/server run fsync=off max_prepared_transactions=50 shared_preload_libraries=idempotency \
		idempotency.relay_workers=0 idempotency.reaper_naptime=0 -- test/fuzz/run $(SCENARIO)

sanitize: ## test on servers that watch what runs in them (hours); KIND="address injection valgrind", ONLY=, TESTS=
	@test/sanitize/run $(KIND)

bench: ## measure against the hand-written pattern; SUITE="keys leases reaper" (15 minutes), outbox (15) or scale (10)
	@tools/prerequisites bench
	@tools/build
	@test/bench/run $(SUITE)

torture: ## kill, stop, fill and set back everything, and judge what is left; SEED=1 ROUNDS=10 KINDS="backend sync ..."
	@tools/prerequisites test
	@tools/build
	@test/torture/run

dist: ## make the release of this commit in dist/: a tarball, and a zip for PGXN
	@tools/prerequisites package
	@tools/dist

package: ## make the Debian package of this commit, and test it installed, in a chroot; RELEASES="bookworm trixie"
	@tools/prerequisites package
	@test/package/run $(RELEASES)

CLANG_FORMAT ?= $(firstword $(shell command -v clang-format-14 clang-format))

format: ## lay out the C sources as .clang-format says
	$(CLANG_FORMAT) -i src/*.[ch]

check-format: ## fail if `make format` would change anything
	$(CLANG_FORMAT) --dry-run -Werror src/*.[ch]

# Drawn by Graphviz and kept, so that readers need none.
docs/%.svg: docs/%.dot
	dot -Tsvg -o $@ $<

# Drawn by gnuplot; the data are what `make bench SUITE=scale` and SUITE=outbox measured.
docs/scale.svg docs/drain.svg: docs/%.svg: docs/%.csv docs/%.gnuplot
	gnuplot -e "data = 'docs/$*.csv'; picture = '$@'" docs/$*.gnuplot
