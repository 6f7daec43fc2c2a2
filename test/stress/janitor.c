/*-------------------------------------------------------------------------
 *
 * janitor.c
 *	  Concurrent maintenance of the key store.
 *
 * Vacuums, rebuilds the primary key, adds an index and drops it again. The clients'
 * responses must not change. Every command gives up instead of waiting long.
 *
 *-------------------------------------------------------------------------
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "janitor.h"
#include "plan.h"
#include "session.h"
#include "tally.h"

/* Errors that maintenance can meet beside active clients. */
#define EXPECTED "55P03 40P01"

static atomic_bool stopping;

static const char *const chores[] = {
	"VACUUM idempotency.key",
	"REINDEX INDEX CONCURRENTLY idempotency.key_pkey",
	"CREATE INDEX CONCURRENTLY IF NOT EXISTS stress_expiry ON idempotency.key (expires_at)",
	"REINDEX TABLE CONCURRENTLY idempotency.key",
	"VACUUM FULL idempotency.key",
	"DROP INDEX CONCURRENTLY IF EXISTS idempotency.stress_expiry",
	"ANALYZE idempotency.key",
};

#define CHORES ((int) (sizeof(chores) / sizeof(chores[0])))

/*
 * From these minor versions on, REINDEX TABLE CONCURRENTLY loses no long values
 * (docs/internals/guarantees.md).
 */
static const int fixedVersions[] = {150020, 160016, 170012, 180006};

/*
 * MayDo returns whether the server can execute a command safely.
 */
static bool
MayDo(const Session *session, const char *chore)
{
	int version = PQserverVersion(session->conn);

	if (strncmp(chore, "REINDEX TABLE CONCURRENTLY", strlen("REINDEX TABLE CONCURRENTLY")) != 0)
		return true;
	for (size_t i = 0; i < sizeof(fixedVersions) / sizeof(fixedVersions[0]); i++)
	{
		if (version / 10000 == fixedVersions[i] / 10000 && version < fixedVersions[i])
			return false;
	}
	return true;
}

/*
 * Sweep drops the invalid indexes of rebuilds that gave up. (The server makes even such
 * an index valid when it rebuilds the whole table.)
 */
static void
Sweep(Session *session)
{
	char name[128];

	while (Ask(session, EXPECTED,
			   "SELECT indexrelid::regclass FROM pg_index "
			   "WHERE indrelid = 'idempotency.key'::regclass "
			   "AND (NOT indisvalid OR indexrelid::regclass::text ~ '_cc(new|old)[0-9]*$')") &&
		   PQntuples(session->result) > 0)
	{
		snprintf(name, sizeof(name), "%s", Value(session, 0, 0));
		if (!Ask(session, EXPECTED, "DROP INDEX %s", name))
			break;
	}
}

/*
 * JanitorMain is the thread that executes the commands, one after the other, until it
 * is stopped. "argument" is its session.
 */
void *
JanitorMain(void *argument)
{
	Session *session = argument;
	Random random;
	int done = 0;

	RandomSeed(&random, config.seed, UINT64_MAX - 1);
	while (!atomic_load(&stopping))
	{
		const char *chore = chores[done++ % CHORES];

		SleepMicroseconds(RandomBelow(&random, 150000));
		if (MayDo(session, chore) && Ask(session, NULL, "SET lock_timeout = '200ms'") &&
			Ask(session, EXPECTED, "%s", chore))
			Count(TALLY_MAINTENANCE);
		Sweep(session);
		SessionSettle(session);
	}
	return NULL;
}

/*
 * JanitorStop requests the end of the thread.
 */
void
JanitorStop(void)
{
	atomic_store(&stopping, true);
}
