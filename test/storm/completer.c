/*-------------------------------------------------------------------------
 *
 * completer.c
 *	  Completers: they take over what nobody came back for.
 *
 * A completer takes a few operations at once and works them off one after the
 * other, so that it may have lost the last of them when it gets there.  Things
 * go wrong for it as for any worker.
 *
 *-------------------------------------------------------------------------
 */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "completer.h"
#include "storm.h"
#include "tally.h"
#include "work.h"

#define MOST_AT_ONCE 3
#define LONGEST_NAP 25000 /* microseconds */

/* Their workers have numbers that no client's has. */
static atomic_llong nextNumber = (1LL << 40);

/*
 * CheckAbandoned makes sure that an operation that was taken over is one of
 * ours, and comes with its request.  Returns its number, or -1.
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
		Violation("[abandoned] operation %d comes with request %s", key,
				  request ? request : "NULL");
	else if (strcmp(Field(session, row, "outcome"), "taken_over") != 0)
		Violation("[abandoned] operation %d comes with outcome %s", key,
				  Field(session, row, "outcome"));
	return key;
}

/*
 * TakeOver takes over a few operations and does their work.
 */
static void
TakeOver(Seat *seat, Random *random)
{
	int lease = 40 + RandomBelow(random, 300);
	long long number = atomic_fetch_add(&nextNumber, MOST_AT_ONCE);
	Session *session = &seat->session;
	Worker workers[MOST_AT_ONCE];
	int count = 0;

	if (!Ask(session, NULL,
			 "SELECT scope, key, request, (operation).*, "
			 "idempotency.derive_key(scope, key, 'charge') AS derived "
			 "FROM storm.claim_abandoned(%lld, '%d ms', %d)",
			 number, lease, 1 + RandomBelow(random, MOST_AT_ONCE)))
		return;
	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = CheckAbandoned(session, row);

		if (key < 0)
			continue;
		WorkerMake(&workers[count], seat, number + row, key, false);
		workers[count].leaseMs = lease;
		Grant(&workers[count], row);
		Count(TALLY_COMPLETER);
		count++;
	}
	for (int i = 0; i < count; i++)
	{
		Work(&workers[i]);
		SessionSettle(session);
		SessionSettle(&seat->provider);
	}
}

/*
 * CompleterMain is the thread of a completer, until the storm is over.
 * "argument" is its seat.
 */
void *
CompleterMain(void *argument)
{
	Seat *seat = argument;
	Random random;

	RandomSeed(&random, config.seed, (uint64_t) atomic_fetch_add(&nextNumber, 1));
	while (!StormIsOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_NAP));
		TakeOver(seat, &random);
		SessionSettle(&seat->session);
		SessionSettle(&seat->provider);
	}
	return NULL;
}
