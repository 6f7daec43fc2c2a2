/*-------------------------------------------------------------------------
 *
 * completer.c
 *	  Completers: workers that take over abandoned operations.
 *
 * A completer takes over a few operations at once and completes them one after the
 * other, so that its lease on the last one can expire meanwhile. It has the same faults
 * as any other worker.
 *-------------------------------------------------------------------------
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "completer.h"
#include "leases.h"
#include "tally.h"
#include "work.h"

#define MOST_AT_ONCE 3
#define LONGEST_DELAY 25000 /* microseconds */

/* Workers of completers have numbers that no client's worker has. */
static atomic_llong nextNumber = (1LL << 40);

/*
 * CheckAbandoned checks that an operation that was taken over exists and has its
 * request. Returns its number, or -1.
 */
static int
CheckAbandoned(Session *session, int row)
{
	const char *name = Field(session, row, "key");
	const char *request = Field(session, row, "request");
	int key = KeyNumber(name);

	if (key < 0 || strcmp(Field(session, row, "scope"), SCOPE) != 0)
		Violation("[abandoned] key %s belongs to no operation", name);
	else if (request == NULL || strstr(request, name) == NULL)
		Violation("[abandoned] operation %d has request %s", key, request ? request : "NULL");
	return key;
}

/*
 * TakeOver takes over a few operations and completes them.
 */
static void
TakeOver(Slot *slot, Random *random)
{
	int lease = 40 + RandomBelow(random, 300);
	long long number = atomic_fetch_add(&nextNumber, MOST_AT_ONCE);
	Session *session = &slot->session;
	Worker workers[MOST_AT_ONCE];
	int count = 0;

	if (!Ask(session, NULL,
			 "SELECT *, 'taken_over' AS outcome, "
			 "idempotency.derive_key(scope, key, 'charge') AS derived "
			 "FROM stress.claim_abandoned(%lld, '%d ms', %d)",
			 number, lease, 1 + RandomBelow(random, MOST_AT_ONCE)))
		return;
	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = CheckAbandoned(session, row);

		if (key < 0)
			continue;
		WorkerMake(&workers[count], slot, number + row, key, false);
		workers[count].leaseMs = lease;
		WorkerGrant(&workers[count], row);
		Count(TALLY_COMPLETER);
		count++;
	}
	for (int i = 0; i < count; i++)
	{
		Work(&workers[i]);
		SessionSettle(session);
		SessionSettle(&slot->provider);
	}
}

/*
 * CompleterMain is the thread of a completer. It runs until all clients have ended.
 * "argument" is its slot.
 */
void *
CompleterMain(void *argument)
{
	Slot *slot = argument;
	Random random;

	RandomSeed(&random, config.seed, (uint64_t) atomic_fetch_add(&nextNumber, 1));
	while (!LeasesAreOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_DELAY));
		TakeOver(slot, &random);
		SessionSettle(&slot->session);
		SessionSettle(&slot->provider);
	}
	return NULL;
}
