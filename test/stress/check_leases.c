/*-------------------------------------------------------------------------
 *
 * check_leases.c
 *	  Compares what workers under leases have done: orders, charges and the log.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "history.h"
#include "ledger.h"
#include "plan.h"
#include "tally.h"
#include "worker.h"

static void
ReadCharges(Session *session, Truth *truths)
{
	if (!Ask(session, NULL,
			 "SELECT *, idempotency.derive_key('" SCOPE "', memo, 'charge') = key AS derived "
			 "FROM provider.charges"))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Field(session, row, "memo"));
		Truth *truth;

		if (key < 0)
		{
			Violation("[provider] charge %s belongs to no operation", Field(session, row, "id"));
			continue;
		}
		truth = &truths[key];
		truth->charges++;
		truth->charge = strtoll(Field(session, row, "id"), NULL, 10);
		truth->charged = atoi(Field(session, row, "amount"));
		truth->declined = strcmp(Field(session, row, "declined"), "t") == 0;
		truth->derived = strcmp(Field(session, row, "derived"), "t") == 0;
	}
}

/*
 * CheckProvider compares an operation with its charge: there is exactly one, under the
 * derived key, and it succeeded if and only if the operation did.
 */
static void
CheckProvider(int key, const Truth *truth)
{
	if (truth->charges != 1 || !truth->derived)
		Violation("[provider] operation %d was charged %d times%s", key, truth->charges,
				  truth->charges == 1 ? ", under another key than the derived one" : "");
	else if (truth->charged != AmountOf(key) || truth->declined != truth->failed)
		Violation("[provider] operation %d (%s) was charged %d%s, not %d", key,
				  truth->failed ? "failed" : "done", truth->charged,
				  truth->declined ? " (declined)" : "", AmountOf(key));
	else if (truth->effects == 1 && truth->paid != truth->charge)
		Violation("[provider] operation %d was paid by charge %lld, not %lld", key,
				  (long long) truth->paid, (long long) truth->charge);
}

/*
 * CheckOperation compares all that is known about one operation.
 */
static void
CheckOperation(int key, const Truth *truth, int64_t finisher)
{
	if (!truth->stored || !Acknowledged(key))
		Violation("[records] operation %d %s", key,
				  truth->stored ? "was never acknowledged" : "has no outcome");
	CheckProvider(key, truth);
	if (CheckEffect(key, truth) && truth->attempt != finisher)
		Violation("[effects] operation %d was written by worker %lld and finished by %lld", key,
				  (long long) truth->attempt, (long long) finisher);
}

/*
 * CheckLeases compares the tables with the responses that the clients received.
 */
void
CheckLeases(Session *session)
{
	Truth *truths = calloc(config.operations, sizeof(Truth));
	int64_t *finishers = HistoryCheck(session);
	int records = 0;
	int failures = 0;
	int orders = 0;
	int charges = 0;

	ReadRecords(session, truths);
	ReadEffects(session, truths, "stress.orders");
	ReadEffects(session, truths, "stress.bookings");
	ReadCharges(session, truths);

	for (int key = 0; key < config.operations; key++)
	{
		CheckOperation(key, &truths[key], finishers[key]);
		records += truths[key].stored;
		failures += truths[key].failed;
		orders += truths[key].effects;
		charges += truths[key].charges;
		free(truths[key].answer);
	}
	printf("  %d operations finished = %d orders + %d declined; %d charges at the provider\n",
		   records, orders, failures, charges);
	free(truths);
	free(finishers);
}
