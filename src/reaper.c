/*-------------------------------------------------------------------------
 *
 * reaper.c
 *	  Who runs the reaper: SQL by reap(), and the background worker that the
 *	  launcher starts for one database.
 *
 * It has four tasks: to find the subscriptions that have a handler (relaysurvey.c),
 * which is all it does where nothing is to be reaped; to remove expired rows
 * (reaperrun.c); to move on subscriptions that nobody reads (outboxlag.c); and to
 * remove events that everybody has had (outboxreap.c).
 *
 * The worker connects, works in batches of a transaction each, and leaves: when
 * its tasks have ended, or when it has stayed for STAY_MS; then it says that there
 * is more to do, and the launcher starts another.  So it is never connected
 * for as long as DROP DATABASE waits (5 seconds): every batch has a bound to what it
 * reads, not only to what it removes.  SIGTERM cancels the batch that it is at,
 * and it leaves at once.  Between two batches it rests
 * as long as the last one took, so that it takes no more than half of a
 * processor from the clients.  Its commits are asynchronous: a deletion that a
 * crash undoes is made again.
 *
 * Where logical replication fills the tables, reaper and relay rest until the
 * subscription is dropped: what they removed here would be missed by a change that
 * arrives later.
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
#include "outboxlag.h"
#include "outboxreap.h"
#include "owntable.h"
#include "reaper.h"
#include "reaperrun.h"
#include "relayregistry.h"
#include "relaysurvey.h"
#include "serverlog.h"
#include "worker.h"

PG_FUNCTION_INFO_V1(idempotency_reap);

/* How long a worker stays, in milliseconds. */
#define STAY_MS 1000

/* What a worker does, a batch of each in turn. */
typedef enum Task
{
	TASK_SURVEY,
	TASK_KEYS,
	TASK_LAG,
	TASK_EVENTS,
	TASKS
} Task;

/* A batch is under way: SIGTERM has to cancel it. */
static volatile sig_atomic_t atWork = false;

typedef struct Visit
{
	ReaperRun keys;
	LagRun lag;
	bool refused; /* a task was, and the log says why */
	bool ended[TASKS];
} Visit;

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

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
 * Goes once round the table, in the caller's transaction.  Half of the rows may be
 * events before the keys' turn comes, so that neither is left for the other.
 * Nothing is removed where logical replication fills the tables.
 */
Datum
idempotency_reap(PG_FUNCTION_ARGS)
{
	ReaperRunPlan plan = {.maxRows = ReaperRunMaxRows(), .wholeTable = true};
	LagRun lag = {0};
	int64 events = 0;
	int64 maxRows;
	ReaperRun run;

	if (!PG_ARGISNULL(0))
	{
		if (PG_GETARG_INT32(0) < 0)
			ErrorBadArgument("max_rows must not be negative",
							 "Pass NULL for as many as one transaction may.");
		plan.maxRows = Min(plan.maxRows, PG_GETARG_INT32(0));
	}
	PreventCommandIfReadOnly("idempotency.reap()");
	if (OwnTablesFollow())
		PG_RETURN_INT64(0);

	while (OutboxLagBatch(false, &lag) == RUN_GOES_ON)
		;
	maxRows = plan.maxRows;
	ReapEvents(maxRows / 2, &events);
	plan.maxRows -= events;
	ReaperRunBegin(&run, &plan);
	while (ReaperRunBatch(&run) == RUN_GOES_ON)
		;
	ReaperRunSave(&run);
	ReapEvents(maxRows - run.harvest.rowsOfRun, &events);
	PG_RETURN_INT64(run.harvest.rowsOfRun + events);
}

/* ----------------------------------------------------------------
 * The worker
 * ----------------------------------------------------------------
 */

/*
 * KeysBatch does one batch of the run over the keys.  "last" says that the
 * worker leaves after it.
 */
static RunState
KeysBatch(ReaperRun *run, bool last)
{
	RunState state = ReaperRunBatch(run);

	if (state == RUN_ENDED || (state == RUN_GOES_ON && (last || run->harvest.rows > 0)))
		ReaperRunSave(run);
	return state;
}

/*
 * Batch does one batch of a task in the current transaction.
 */
static VisitResult
Batch(Visit *visit, Task task, bool last)
{
	RunState state = RUN_ENDED;
	int64 reaped = 0;

	if (!OidIsValid(get_extension_oid("idempotency", true)))
	{
		RegistryForgetDatabase(MyDatabaseId);
		return VISIT_NOT_INSTALLED;
	}
	if (OwnTablesFollow())
	{
		RegistryForgetDatabase(MyDatabaseId);
		return VISIT_ENDED;
	}

	if (task == TASK_SURVEY)
		state = RelaySurvey();
	else if (task == TASK_KEYS)
		state = KeysBatch(&visit->keys, last);
	else if (task == TASK_LAG)
		state = OutboxLagBatch(true, &visit->lag);
	else
		state = OutboxReapBatch(true, PG_INT64_MAX, &reaped);
	return state == RUN_GOES_ON ? VISIT_UNFINISHED : VISIT_ENDED;
}

/*
 * ResultOfError says what an error means that a batch threw, or VISIT_FAILED
 * if it is worth an ERROR in the log.
 */
static VisitResult
ResultOfError(int sqlstate)
{
	/* We are to leave. */
	if (sqlstate == ERRCODE_QUERY_CANCELED && ShutdownRequestPending)
		return VISIT_UNFINISHED;

	/* Somebody changes the tables just now. */
	if (sqlstate == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_TRANSACTION_ROLLBACK)
		return VISIT_ENDED;

	/* The tables were altered, by a rule perhaps, or are another version's, or a row was. */
	if (sqlstate == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
		sqlstate == ERRCODE_FEATURE_NOT_SUPPORTED ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_DATA_EXCEPTION ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION)
		return VISIT_REFUSED;

	return VISIT_FAILED;
}

/*
 * AfterRefusal says in the log why the database is left alone, unless the
 * extension is just gone, or it was said already, in this visit or the one before.
 */
static VisitResult
AfterRefusal(Visit *visit, const ErrorData *error)
{
	VisitResult result = VISIT_NOT_INSTALLED;

	StartTransactionCommand();
	if (OidIsValid(get_extension_oid("idempotency", true)))
	{
		int level = LauncherKnowsRefusal() || visit->refused ? DEBUG1 : LOG;

		LogReaperRefused(level, get_database_name(MyDatabaseId), error);
		visit->refused = true;
		result = VISIT_REFUSED;
	}
	CommitTransactionCommand();
	return result;
}

/*
 * Terminate is the handler of SIGTERM: what the worker is at is cancelled, so that the
 * visit ends as any other does, without a word in the log.
 */
static void
Terminate(SIGNAL_ARGS)
{
	SignalHandlerForShutdownRequest(postgres_signal_arg);
	if (atWork)
		QueryCancelPending = InterruptPending = true;
}

/*
 * EndWork ends a batch.  A cancel that came with SIGTERM, and too late for it, is
 * forgotten.
 */
static void
EndWork(void)
{
	atWork = false;
	if (ShutdownRequestPending)
		QueryCancelPending = false;
}

/*
 * TryBatch does one batch in a transaction of its own, and says what came of
 * it.  Throws what is none of the errors that are to be expected.
 */
static VisitResult
TryBatch(Visit *visit, Task task, bool last)
{
	volatile VisitResult result = VISIT_FAILED;
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		atWork = true;
		if (ShutdownRequestPending)
			QueryCancelPending = InterruptPending = true;
		SetCurrentStatementStartTimestamp();
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		result = Batch(visit, task, last);
		PopActiveSnapshot();
		CommitTransactionCommand();
		EndWork();
	}
	PG_CATCH();
	{
		ErrorData *error;

		EndWork();
		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		result = ResultOfError(error->sqlerrcode);
		if (result == VISIT_FAILED)
			PG_RE_THROW();
		FlushErrorState();
		AbortCurrentTransaction();
		if (result == VISIT_REFUSED)
			result = AfterRefusal(visit, error);
		FreeErrorData(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return result;
}

/*
 * NextTask returns the task whose turn it is after "task", or TASKS if all have
 * ended.
 */
static Task
NextTask(const Visit *visit, Task task)
{
	for (int i = 1; i <= TASKS; i++)
	{
		Task next = (task + i) % TASKS;

		if (!visit->ended[next])
			return next;
	}
	return TASKS;
}

/*
 * Rest sleeps for "ms"; after a long batch the time that is left of the visit may be
 * over before.
 */
static void
Rest(long ms, long left, uint32 event)
{
	WorkerSleep(Max(Min(ms, left), 0), event);
}

/*
 * DoVisit works until there is nothing more to do, or the time is up.
 */
static VisitResult
DoVisit(void)
{
	ReaperRunPlan plan = {.maxRows = PG_INT64_MAX, .dontWait = true};
	uint32 event = WaitEventExtensionNew("IdempotencyReaperRest");
	Visit visit = {0};
	Task task = TASK_SURVEY;
	instr_time came;

	for (Task other = TASK_SURVEY + 1; other < TASKS; other++)
		visit.ended[other] = !LauncherWantsReaping();
	ReaperRunBegin(&visit.keys, &plan);
	INSTR_TIME_SET_CURRENT(came);
	for (;; task = NextTask(&visit, task))
	{
		bool last = WorkerElapsed(came) >= STAY_MS;
		VisitResult result = VISIT_ENDED;
		instr_time began;

		/* At the end the keys may have something to write down. */
		if (last && !visit.ended[TASK_KEYS])
			task = TASK_KEYS;
		if (task == TASKS)
			return visit.refused ? VISIT_REFUSED : VISIT_ENDED;
		if (ShutdownRequestPending)
			return VISIT_UNFINISHED;

		INSTR_TIME_SET_CURRENT(began);
		result = TryBatch(&visit, task, last);
		if (result == VISIT_NOT_INSTALLED)
			return result;
		visit.ended[task] = result != VISIT_UNFINISHED;
		if (last && NextTask(&visit, task) != TASKS)
			return visit.refused ? VISIT_REFUSED : VISIT_UNFINISHED;

		if (!ShutdownRequestPending)
			Rest(WorkerElapsed(began) + 1, STAY_MS - WorkerElapsed(came), event);
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
	pqsignal(SIGTERM, Terminate);
	pgstat_report_activity(STATE_RUNNING, "removing expired idempotency keys");
	result = DoVisit();
	LauncherReport(DatumGetObjectId(database), result);
	proc_exit(0);
}
