/*-------------------------------------------------------------------------
 *
 * stress.c
 *	  Many clients retry many operations under faults; then the tables are
 *	  compared with the responses that the clients received.
 *
 *		stress retries		claims without leases, run(), the inbox (retries.c)
 *		stress leases		workers under leases that die and stall (leases.c)
 *
 * Needs its own database with schema.sql; for leases, also the right to kill a backend of its
 * server. Environment:
 *
 *	CLIENTS			how many clients: 8 of retries, 12 of leases
 *	OPERATIONS		how many operations, each with its key: 1500 or 500
 *	RETRIES			of retries: attempts for each operation before the final pass, 3
 *	PATIENCE		of leases: after how many seconds a client without response is a
 *					violation, 60
 *	SEED			determines all attempts and faults, 1
 *	STRESS_BREAK	a deliberate mistake (see schema.sql and the workloads)
 *
 * Exits with 0 for success, 1 for a violation, 2 if it could not run.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ledger.h"
#include "plan.h"
#include "tally.h"

/* In percent of the operations: those that find an expired row. */
#define EXPIRED_PERCENT 10

static const Workload *const workloads[] = {&retriesWorkload, &leasesWorkload};

/*
 * WorkloadOf returns the workload of that name. Exits with 2 if there is none.
 */
static const Workload *
WorkloadOf(const char *name)
{
	for (size_t i = 0; i < sizeof(workloads) / sizeof(workloads[0]); i++)
	{
		if (name != NULL && strcmp(workloads[i]->name, name) == 0)
			return workloads[i];
	}
	fprintf(stderr, "usage: stress retries|leases\n");
	exit(2);
}

/*
 * PlantExpired stores expired rows under some of the keys, which must count as absent.
 */
static void
PlantExpired(Session *session)
{
	Random random;

	RandomSeed(&random, config.seed, UINT64_MAX - 2);
	for (int key = 0; key < config.operations; key++)
	{
		bool leased = IsLeased() && RandomPercent(&random, 50);
		char name[KEY_TEXT];

		if (!RandomPercent(&random, EXPIRED_PERCENT))
			continue;
		KeyText(key, name);
		if (Ask(session, NULL, "SELECT stress.plant('%s', '%s', %s)", ScopeOf(key), name,
				leased ? "true" : "false"))
			Count(TALLY_EXPIRED);
	}
}

int
main(int argc, char **argv)
{
	Session session;
	int64_t start;

	ConfigRead(WorkloadOf(argc > 1 ? argv[1] : NULL));
	LedgerMake();
	SessionOpen(&session, "stress");
	config.workload->prepare(&session);
	PlantExpired(&session);

	start = Microseconds();
	config.workload->run(&session);
	AwaitQuiet(&session);
	config.workload->check(&session);
	TallyCheck();
	SessionClose(&session);

	TallyPrint();
	printf("  seed %llu: %d operations, %lld attempts by %d clients in %.1f s, "
		   "%lld responses compared, %d violations\n",
		   (unsigned long long) config.seed, config.operations, Counted(TALLY_ATTEMPTS),
		   config.clients, (Microseconds() - start) / 1e6, LedgerCount(), Violations());
	printf("counts: operations=%d faults=%lld violations=%d\n", config.operations,
		   Counted(TALLY_CANCELS) + Counted(TALLY_DROPPED) + Counted(TALLY_TERMINATIONS) +
			   Counted(TALLY_KILLED),
		   Violations());
	return Violations() == 0 ? 0 : 1;
}
