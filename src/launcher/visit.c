/*-------------------------------------------------------------------------
 *
 * launcher/visit.c
 *	  The background worker that the launcher starts for a visit to one database.
 *
 * A visit has up to three tasks: survey the subscriptions; delete expired
 * keys (reaper/keys.c), and events that all subscriptions have passed (reaper/events.c).  Each
 * task works in batches of one transaction, with a pause as long as the last batch and a
 * millisecond.  A visit ends after DURATION_MS: DROP DATABASE waits 5 seconds for it.  Commits
 * are asynchronous, because a deletion that a crash undoes is repeated.
 *
 * A subscriber of logical replication is not reaped: a change that arrives later would
 * miss the deleted rows.  A locked table, a second reaper or a missing extension ends the
 * visit silently; tables of another version are logged once.
 *
 * Locks: those of a batch (reaper/keys.c), until its transaction ends; no wait for them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "base/compat.h"
#include "launcher/launcher.h"
#include "query/query.h"
#include "query/relation.h"
#include "reaper/reaper.h"
#include "relay/relay.h"
#include "server/bgworker.h"
#include "server/stats.h"
#include "settings/timing.h"

/* How long a visit lasts, in milliseconds. */
#define DURATION_MS 1000

/*
 * How many keys a worker removes without a rest, in about 0.1 ms: a claim waits for it if all
 * processors are busy.  A batch is some of these parts, because its commit and the state cost as
 * much as 30 keys.
 */
#define PART_KEYS 200
#define BATCH_PARTS 5

/* The tasks of a visit, which alternates between them after each batch. */
typedef enum Task
{
	TASK_SURVEY,
	TASK_KEYS,
	TASK_EVENTS,
	TASKS
} Task;

static ExtensionQuery surveyQuery = {
	.table = "subscription",
	.text = "SELECT v.subscription, v.owner, v.topics, v.partitions, v.is_due, v.due_at"
			" FROM idempotency_internal.survey() AS v",
	.results = {TEXTOID, NAMEOID, TEXTARRAYOID, INT4OID, BOOLOID, TIMESTAMPTZOID},
};

static const char *const surveyTables[] = {"subscription", "partition", "position", "parked",
										   "outbox"};

/* SIGTERM must cancel the batch that runs. */
static volatile sig_atomic_t atWork = false;

static VisitJob job;

typedef struct Visit
{
	ReaperRun keys;
	int64 events; /* that were removed */
	instr_time began;
	bool refused; /* a task was, and the log says so */
	bool ended[TASKS];
} Visit;

/*
 * Survey brings the slots of this database up to date.  Returns RUN_BUSY if the tables
 * are locked.
 */
static RunState
Survey(void)
{
	RelationsLockResult lock = ExtensionRelationsLock(surveyTables, lengthof(surveyTables));
	RelayFound *found;
	uint64 rows;

	if (lock == RELATIONS_BUSY)
		return RUN_BUSY;
	if (lock == RELATIONS_MISSING)
	{
		RelayForgetDatabase(MyDatabaseId);
		return RUN_ENDED;
	}
	rows = ExtensionQueryRun(&surveyQuery, NULL, NULL);
	found = palloc0(Max(rows, 1) * sizeof(RelayFound));
	for (uint64 row = 0; row < rows; row++)
	{
		Datum owner = ExtensionQueryValue(&surveyQuery, row, 2, NULL);
		Datum topics = ExtensionQueryValue(&surveyQuery, row, 3, NULL);
		bool never;
		Datum dueAt = ExtensionQueryValue(&surveyQuery, row, 6, &never);

		CHECK_FOR_INTERRUPTS();
		found[row].name = TextDatumGetCString(ExtensionQueryValue(&surveyQuery, row, 1, NULL));
		found[row].owner = get_role_oid(NameStr(*DatumGetName(owner)), true);
		TopicSetFromPatterns(&found[row].topics, DatumGetArrayTypeP(topics));
		found[row].partitions = DatumGetInt32(ExtensionQueryValue(&surveyQuery, row, 4, NULL));
		found[row].due = DatumGetBool(ExtensionQueryValue(&surveyQuery, row, 5, NULL));
		found[row].dueAt = never ? 0 : DatumGetTimestampTz(dueAt);
	}
	if (rows > 0)
		StatsAddDatabase(); /* so that the slots are freed when the database is gone */
	RelayMerge(found, (int) rows);
	ExtensionQueryEnd();
	return RUN_ENDED;
}

/*
 * Rest sleeps for as long as work has taken since it "began" and 1 ms, but not beyond the end
 * of the visit.
 */
static void
Rest(const Visit *visit, instr_time began)
{
	static uint32 event = 0;
	long left = DURATION_MS - MillisecondsSince(visit->began);

	if (event == 0)
		event = WaitEventExtensionNew("IdempotencyReaperRest");
	if (!ShutdownRequestPending)
		WorkerSleep(Max(Min(MillisecondsSince(began) + 1, left), 0), event);
}

/*
 * ReapKeys does a batch of the keys, in parts with rests between them.
 */
static RunState
ReapKeys(Visit *visit)
{
	RunState state = RUN_GOES_ON;

	for (int part = 1; part <= BATCH_PARTS && state == RUN_GOES_ON; part++)
	{
		instr_time began;

		INSTR_TIME_SET_CURRENT(began);
		state = ReaperRunBatch(&visit->keys);
		if (part < BATCH_PARTS && state == RUN_GOES_ON)
			Rest(visit, began);
	}
	return state;
}

/*
 * Batch does one batch of a task in the current transaction.
 */
static VisitResult
Batch(Visit *visit, Task task, bool last)
{
	RunState state = RUN_ENDED;

	if (!OidIsValid(get_extension_oid("idempotency", true)))
	{
		RelayForgetDatabase(MyDatabaseId);
		return VISIT_NOT_INSTALLED;
	}
	if (ExtensionIsSubscriber())
	{
		RelayForgetDatabase(MyDatabaseId);
		return VISIT_ENDED;
	}

	if (task == TASK_SURVEY)
		state = Survey();
	else if (task == TASK_KEYS)
	{
		state = ReapKeys(visit);
		if (state == RUN_ENDED || (state == RUN_GOES_ON && (last || visit->keys.reaped.rows > 0)))
			ReaperRunSave(&visit->keys);
	}
	else
		state = OutboxReapBatch(true, PG_INT64_MAX, &visit->events);
	return state == RUN_GOES_ON ? VISIT_UNFINISHED : VISIT_ENDED;
}

/*
 * ResultOfError returns the result of a visit in which a batch threw an error: VISIT_FAILED
 * if the log must have an ERROR.
 */
static VisitResult
ResultOfError(int sqlstate)
{
	/* SIGTERM has cancelled the batch. */
	if (sqlstate == ERRCODE_QUERY_CANCELED && ShutdownRequestPending)
		return VISIT_UNFINISHED;

	/* Another session changes the tables. */
	if (sqlstate == ERRCODE_LOCK_NOT_AVAILABLE ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_TRANSACTION_ROLLBACK)
		return VISIT_ENDED;

	/* The tables or a row were altered, or are those of another version. */
	if (sqlstate == ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE ||
		sqlstate == ERRCODE_FEATURE_NOT_SUPPORTED ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_DATA_EXCEPTION ||
		ERRCODE_TO_CATEGORY(sqlstate) == ERRCODE_SYNTAX_ERROR_OR_ACCESS_RULE_VIOLATION)
		return VISIT_REFUSED;

	return VISIT_FAILED;
}

/*
 * AfterRefusal writes to the log why the database is left alone, unless the extension is
 * gone, or the log says so already, since this visit or the last one.
 */
static VisitResult
AfterRefusal(Visit *visit, const ErrorData *error)
{
	VisitResult result = VISIT_NOT_INSTALLED;

	StartTransactionCommand();
	if (OidIsValid(get_extension_oid("idempotency", true)))
	{
		ereport(job.refused || visit->refused ? DEBUG1 : LOG,
				(errcode(error->sqlerrcode),
				 errmsg("idempotency reaper leaves database \"%s\" alone",
						get_database_name(MyDatabaseId)),
				 error->detail == NULL
					 ? errdetail_internal("%s", error->message)
					 : errdetail_internal("%s: %s", error->message, error->detail),
				 error->hint == NULL ? 0 : errhint("%s", error->hint)));
		visit->refused = true;
		result = VISIT_REFUSED;
	}
	CommitTransactionCommand();
	return result;
}

/*
 * Terminate is the handler of SIGTERM: the batch that runs is cancelled, so that the visit
 * ends as any other does, without a message in the log.
 */
static void
Terminate(SIGNAL_ARGS)
{
	SignalHandlerForShutdownRequest(SIGNAL_PASS);
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
 * TryBatch does one batch in a transaction of its own, and returns the result.  Throws the
 * errors for which ResultOfError() returns VISIT_FAILED.
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
 * NextTask returns the task that follows "task", or TASKS if all have ended.
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
 * ResultOf returns the result of a visit that has done all.
 */
static VisitResult
ResultOf(const Visit *visit)
{
	if (visit->refused)
		return VISIT_REFUSED;
	return job.reap && visit->keys.reaped.rowsOfRun + visit->events == 0 ? VISIT_EMPTY
																		 : VISIT_ENDED;
}

/*
 * DoVisit works until there is nothing more to do, or the time is up.
 */
static VisitResult
DoVisit(void)
{
	Visit visit = {
		.keys = {.plan = {.maxRows = PG_INT64_MAX, .batchRows = PART_KEYS, .dontWait = true}}};
	Task task = job.survey ? TASK_SURVEY : TASK_KEYS;

	for (int i = 0; i < TASKS; i++)
		visit.ended[i] = i == TASK_SURVEY ? !job.survey : !job.reap;
	INSTR_TIME_SET_CURRENT(visit.began);
	for (;; task = NextTask(&visit, task))
	{
		bool last = MillisecondsSince(visit.began) >= DURATION_MS;
		VisitResult result = VISIT_ENDED;
		instr_time began;

		/* At the end the keys may have progress to save. */
		if (last && !visit.ended[TASK_KEYS])
			task = TASK_KEYS;
		if (task == TASKS)
			return ResultOf(&visit);
		if (ShutdownRequestPending)
			return VISIT_UNFINISHED;

		INSTR_TIME_SET_CURRENT(began);
		result = TryBatch(&visit, task, last);
		if (result == VISIT_NOT_INSTALLED)
			return result;
		visit.ended[task] = result != VISIT_UNFINISHED;
		if (last && NextTask(&visit, task) != TASKS)
			return visit.refused ? VISIT_REFUSED : VISIT_UNFINISHED;
		Rest(&visit, began);
	}
}

/*
 * idempotency_reaper_main is the worker: it visits one database.
 */
void
idempotency_reaper_main(Datum unused)
{
	memcpy(&job, MyBgworkerEntry->bgw_extra, sizeof(VisitJob));
	WorkerConnect(job.database);
	pqsignal(SIGTERM, Terminate);
	pgstat_report_activity(STATE_RUNNING, "removing expired idempotency keys");
	if (job.prompt)
		(void) DoVisit();
	else
		CycleReport(job.database, DoVisit());
	proc_exit(0);
}
