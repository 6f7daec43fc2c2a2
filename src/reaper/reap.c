/*-------------------------------------------------------------------------
 *
 * reaper/reap.c
 *	  SQL's reap().
 *
 * Locks, to the end of the transaction: those of keys.c and events.c, which are waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"

#include "base/errors.h"
#include "query/reevaluation.h"
#include "query/relation.h"
#include "reaper/reaper.h"

PG_FUNCTION_INFO_V1(idempotency_reap);

/*
 * ReapEvents removes events, and adds how many to "*reaped", until those are
 * "maxRows".
 */
static void
ReapEvents(int64 maxRows, int64 *reaped)
{
	while (OutboxReapBatch(false, maxRows - *reaped, reaped) == RUN_GOES_ON)
		;
}

/*
 * reap(max_rows) RETURNS bigint: how many expired rows and events it removed.
 * Works in the caller's transaction.  With NULL it reads the whole table, once; otherwise as
 * much as a visit of the worker.  Events are half of the rows at most,
 * unless there are too few keys, so that neither keeps the other from being removed.
 * Nothing is removed where logical replication fills the tables.
 */
Datum
idempotency_reap(PG_FUNCTION_ARGS)
{
	ReaperRun run = {.plan = {.maxRows = ReaperRunMaxRows(),
							  .batchRows = PG_INT64_MAX,
							  .wholeTable = PG_ARGISNULL(0)}};
	int64 events = 0;
	int64 maxRows;

	PreventUnsafeCall(fcinfo, "idempotency.reap()");
	if (!PG_ARGISNULL(0))
	{
		if (PG_GETARG_INT32(0) < 0)
			ErrorBadArgument("max_rows must not be negative",
							 "Pass NULL for as many as one transaction may.");
		run.plan.maxRows = Min(run.plan.maxRows, PG_GETARG_INT32(0));
	}
	if (ExtensionIsSubscriber())
		PG_RETURN_INT64(0);

	maxRows = run.plan.maxRows;
	ReapEvents(maxRows / 2, &events);
	run.plan.maxRows -= events;
	while (ReaperRunBatch(&run) == RUN_GOES_ON)
		;
	ReaperRunSave(&run);
	ReapEvents(maxRows - run.reaped.rowsOfRun, &events);
	PG_RETURN_INT64(run.reaped.rowsOfRun + events);
}
