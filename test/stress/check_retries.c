/*-------------------------------------------------------------------------
 *
 * check_retries.c
 *	  Compares what clients without leases have done.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>

#include "check.h"
#include "ledger.h"
#include "plan.h"
#include "tally.h"

/*
 * CheckRetries compares the tables with the responses that the clients received. After the
 * final pass every operation must be done.
 */
void
CheckRetries(Session *session, bool complete)
{
	Truth *truths = calloc(config.operations, sizeof(Truth));
	bool *acknowledged = calloc(config.operations, sizeof(bool));
	int records = 0;
	int failures = 0;
	int effects = 0;
	int acknowledgedCount = 0;

	/* Reading the records records their responses, which acknowledges them. */
	for (int key = 0; key < config.operations; key++)
		acknowledgedCount += acknowledged[key] = Acknowledged(key);
	ReadRecords(session, truths);
	ReadEffects(session, truths, "stress.charges");
	ReadEffects(session, truths, "stress.deliveries");

	for (int key = 0; key < config.operations; key++)
	{
		if (acknowledged[key] && !truths[key].stored)
			Violation("[records] operation %d was acknowledged and has no record", key);
		(void) CheckEffect(key, &truths[key]);
		records += truths[key].stored;
		failures += truths[key].failed;
		effects += truths[key].effects;
		free(truths[key].answer);
	}
	printf("  %s: %d operations acknowledged, %d recorded = %d effects + %d failures\n",
		   complete ? "after the final pass" : "before the final pass", acknowledgedCount, records,
		   effects, failures);
	if (records != effects + failures)
		Violation("[counts] %d records, but %d effects and %d failures", records, effects,
				  failures);
	if (complete && records != config.operations)
		Violation("[counts] %d records of %d operations", records, config.operations);
	free(truths);
	free(acknowledged);
}
