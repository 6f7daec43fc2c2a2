/*-------------------------------------------------------------------------
 *
 * reaper.c
 *	  Who runs the reaper: SQL by reap(), and the background worker that the
 *	  launcher starts for one database.
 *
 * The worker connects, works in batches of a transaction each, and leaves: when
 * its run has ended, or when it has stayed for STAY_MS; then it says that there
 * is more to do, and the launcher starts another.  So it is never connected
 * for as long as DROP DATABASE waits (5 seconds).  Between two batches it rests
 * as long as the last one took, so that it takes no more than half of a
 * processor from the clients.  Its commits are asynchronous: a deletion that a
 * crash undoes is made again.
 *
 * The worker waits for nobody.  Where the table or the reaper's lock is not
 * free, or the extension is not there, it leaves, and says nothing; where the
 * tables are not as this library knows them, it says so once.
 *
 * Locks: those of a batch (reaperrun.c), to the end of its transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "errors.h"
#include "launcher.h"
#include "reaper.h"
#include "reaperrun.h"
#include "worker.h"

PG_FUNCTION_INFO_V1(idempotency_reap);

/* How long a worker stays, in milliseconds. */
#define STAY_MS 1000

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

/*
 * reap(max_rows) RETURNS bigint: how many expired rows it removed.  Goes once
 * round the table, in the caller's transaction.
 */
Datum
idempotency_reap(PG_FUNCTION_ARGS)
{
	ReaperRunPlan plan = {.maxRows = ReaperRunMaxRows(), .wholeTable = true};
	ReaperRun run;

	if (!PG_ARGISNULL(0))
	{
		if (PG_GETARG_INT32(0) < 0)
			ErrorBadArgument("max_rows must not be negative",
							 "Pass NULL for as many as one transaction may.");
		plan.maxRows = Min(plan.maxRows, PG_GETARG_INT32(0));
	}
	PreventCommandIfReadOnly("idempotency.reap()");

	ReaperRunBegin(&run, &plan);
	while (ReaperRunBatch(&run) == RUN_GOES_ON)
		;
	ReaperRunSave(&run);
	PG_RETURN_INT64(run.harvest.rowsOfRun);
}

/* ----------------------------------------------------------------
 * The worker
 * ----------------------------------------------------------------
 */

/*
 * Batch does one batch of the run in the current transaction.  "last" says
 * that the worker leaves after it.
 */
static VisitResult
Batch(ReaperRun *run, bool last)
{
	RunState state;

	if (!OidIsValid(get_extension_oid("idempotency", true)))
		return VISIT_NOT_INSTALLED;

	state = ReaperRunBatch(run);
	if (state == RUN_BUSY)
		return VISIT_ENDED;
	if (state == RUN_ENDED || last || run->harvest.rows > 0)
		ReaperRunSave(run);
	return state == RUN_ENDED ? VISIT_ENDED : VISIT_UNFINISHED;
}

/*
 * ResultOfError says what an error means that a batch threw, or VISIT_FAILED
 * if it is worth an ERROR in the log.
 */
static VisitResult
ResultOfError(int sqlstate)
{
	/* Somebody changes the tables just now. */
	if (sqlstate == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_TRANSACTION_ROLLBACK)
		return VISIT_ENDED;

	/* The tables were altered, or are another version's. */
	if (sqlstate == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION)
		return VISIT_REFUSED;

	return VISIT_FAILED;
}

/*
 * AfterRefusal says in the log why the database is left alone, unless the
 * extension is just gone, or the visit before has said it.
 */
static VisitResult
AfterRefusal(const ErrorData *error)
{
	VisitResult result = VISIT_NOT_INSTALLED;

	StartTransactionCommand();
	if (OidIsValid(get_extension_oid("idempotency", true)))
	{
		int level = LauncherKnowsRefusal() ? DEBUG1 : LOG;

		LogReaperRefused(level, get_database_name(MyDatabaseId), error);
		result = VISIT_REFUSED;
	}
	CommitTransactionCommand();
	return result;
}

/*
 * TryBatch does one batch in a transaction of its own, and says what came of
 * it.  Throws what is none of the errors that are to be expected.
 */
static VisitResult
TryBatch(ReaperRun *run, bool last)
{
	volatile VisitResult result = VISIT_FAILED;
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		result = Batch(run, last);
		PopActiveSnapshot();
		CommitTransactionCommand();
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		result = ResultOfError(error->sqlerrcode);
		if (result == VISIT_FAILED)
			PG_RE_THROW();
		FlushErrorState();
		AbortCurrentTransaction();
		if (result == VISIT_REFUSED)
			result = AfterRefusal(error);
		FreeErrorData(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return result;
}

/*
 * Visit works until there is nothing more to do, or the time is up.
 */
static VisitResult
Visit(void)
{
	ReaperRunPlan plan = {.maxRows = PG_INT64_MAX, .dontWait = true};
	uint32 event = WaitEventExtensionNew("IdempotencyReaperRest");
	ReaperRun run;
	instr_time came;

	ReaperRunBegin(&run, &plan);
	INSTR_TIME_SET_CURRENT(came);
	for (;;)
	{
		bool last = WorkerElapsed(came) >= STAY_MS || ShutdownRequestPending;
		VisitResult result;
		instr_time began;

		INSTR_TIME_SET_CURRENT(began);
		result = TryBatch(&run, last);
		if (last || result != VISIT_UNFINISHED)
			return result;

		/* After a long batch the time may be up before the rest is. */
		if (!ShutdownRequestPending)
			WorkerSleep(Min(WorkerElapsed(began) + 1, Max(STAY_MS - WorkerElapsed(came), 0)),
						event);
	}
}

/*
 * idempotency_reaper_main is the worker: it visits one database.
 */
void
idempotency_reaper_main(Datum database)
{
	VisitResult result;

	WorkerConnect(DatumGetObjectId(database));
	pgstat_report_activity(STATE_RUNNING, "removing expired idempotency keys");
	result = Visit();
	LauncherReport(DatumGetObjectId(database), result);
	proc_exit(0);
}
