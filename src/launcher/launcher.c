/*-------------------------------------------------------------------------
 *
 * launcher/launcher.c
 *	  The background worker that starts all others: one for the server.
 *
 * It runs where the library is preloaded and the server takes writes: on a standby
 * it starts with the promotion.  It is connected to no database, only to the shared
 * catalogs.  One loop starts the relay's workers and makes the cycles of visits
 * (launcher/cycle.c); neither waits for anything but the latch.
 *
 * Which subscriptions are due is in shared memory (relay/slots.c), which outlives the
 * launcher; the launcher itself has the handles of its workers only.  It exits with code 1, so
 * that the postmaster starts it again, unless the server is stopped.  The README has what a new
 * launcher finds.
 *
 * Locks: that of the slots.  ROW EXCLUSIVE on a database, which is not waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "base/compat.h"
#include "launcher/database.h"
#include "launcher/launcher.h"
#include "relay/relay.h"
#include "server/bgworker.h"
#include "server/stats.h"
#include "settings/guc.h"
#include "settings/timing.h"

/* How many seconds pass until a launcher that died is started again. */
#define RESTART_SECONDS 1

/* The longest sleep, in milliseconds: WaitLatch() accepts less than 25 days. */
#define LONGEST_MS (24L * 60 * 60 * 1000)

/* How often it looks whether a session waits for a database, in milliseconds. */
#define BLOCKED_MS 500

StaticAssertDecl(sizeof(RelayJob) <= BGW_EXTRALEN, "a job must fit into bgw_extra");

typedef struct Worker
{
	RelayJob job; /* of a survey: slot -1 */
	BackgroundWorkerHandle *handle;
} Worker;

static WorkerKind relay = {
	.type = RELAY_TYPE, .function = "idempotency_relay_main", .waits = "Events wait until one is."};
static WorkerKind survey = {.type = REAPER_TYPE,
							.function = "idempotency_reaper_main",
							.waits = "New subscriptions are found when one is."};

/* The workers that this launcher has started and that have not ended. */
static List *workers = NIL;

/*
 * CanRun tells whether a worker can be started for a subscription that was chosen.  If
 * not, the subscription rests.
 */
static bool
CanRun(const RelayJob *job)
{
	MemoryContext caller = CurrentMemoryContext;
	char *problem;
	char *database;

	if (!DatabaseProbe(job->database))
	{
		RelayFailed(job, RELAY_BUSY);
		return false;
	}
	StartTransactionCommand();
	MemoryContextSwitchTo(caller);
	database = get_database_name(job->database);
	problem = OwnerProblem(job->owner, job->database);
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);
	if (problem == NULL)
		return true;
	RelayProblem(job, database, problem);
	RelayFailed(job, RELAY_UNFIT);
	return false;
}

static void
Remember(RelayJob job, BackgroundWorkerHandle *handle)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);
	Worker *worker = palloc(sizeof(Worker));

	*worker = (Worker){job, handle};
	workers = lappend(workers, worker);
	MemoryContextSwitchTo(caller);
}

static void
ForgetEnded(void)
{
	ListCell *cell;

	foreach (cell, workers)
	{
		Worker *worker = lfirst(cell);

		if (!WorkerHasEnded(worker->handle))
			continue;
		workers = foreach_delete_current(workers, cell);
		pfree(worker->handle);
		pfree(worker);
	}
}

/*
 * StartSurveys surveys the databases whose sessions have requested it, when the surveys that it
 * started before have ended: requests that come meanwhile are one.  Without a slot the next
 * regular survey finds what has changed.
 */
static void
StartSurveys(void)
{
	ListCell *cell;

	foreach (cell, workers)
		if (((const Worker *) lfirst(cell))->job.slot == -1)
			return;
	foreach (cell, TakeRequests(REQUEST_SURVEY))
	{
		VisitJob job = {.database = lfirst_oid(cell), .survey = true, .prompt = true};
		BackgroundWorkerHandle *handle;

		if (!DatabaseProbe(job.database))
			continue;
		handle = WorkerStart(&survey, job.database, &job, sizeof(job));
		if (handle != NULL)
			Remember((RelayJob){.database = job.database, .slot = -1}, handle);
	}
}

/*
 * StartWorkers starts a worker for each subscription that is chosen, up to
 * idempotency.relay_workers.  Returns false if there was no slot for one, and sets when to
 * call it again.
 */
static bool
StartWorkers(TimestampTz *again)
{
	int started[RELAY_SLOTS] = {0};
	RelayJob job;
	ListCell *cell;

	foreach (cell, workers)
	{
		const Worker *worker = lfirst(cell);

		if (worker->job.slot >= 0)
			started[worker->job.slot]++;
	}
	while (!ShutdownRequestPending && RelayChoose(started, RelayWorkers, &job, again))
	{
		BackgroundWorkerHandle *handle;

		if (!CanRun(&job))
			continue;
		handle = WorkerStart(&relay, job.database, &job, sizeof(job));
		if (handle == NULL)
			return false;
		started[job.slot]++;
		Remember(job, handle);
	}
	return true;
}

/*
 * TerminateBlocking looks every BLOCKED_MS whether a session waits to drop or copy the
 * database of a worker, or idempotency.databases no longer names it, and terminates the worker.
 */
static void
TerminateBlocking(void)
{
	static instr_time looked;
	ListCell *cell;

	if (workers == NIL || MillisecondsSince(looked) < BLOCKED_MS)
		return;
	INSTR_TIME_SET_CURRENT(looked);
	foreach (cell, workers)
	{
		const Worker *worker = lfirst(cell);

		if (!DatabaseProbe(worker->job.database))
			TerminateBackgroundWorker(worker->handle);
	}
}

/*
 * RelaysRun forgets workers that have ended and starts those that are needed.  Returns in
 * how many milliseconds it must be called again, unless the latch is set before; -1: never.
 */
static long
RelaysRun(void)
{
	TimestampTz again = 0;
	long ms = -1;

	ForgetEnded();
	if (RelayWorkers > 0)
	{
		StartSurveys();
		if (!StartWorkers(&again))
			ms = SLOT_MS;
	}
	TerminateBlocking();
	if (again != 0)
		ms = WorkerSooner(
			ms, Min(TimestampDifferenceMilliseconds(GetCurrentTimestamp(), again), LONGEST_MS) + 1);
	return WorkerSooner(ms, workers != NIL ? BLOCKED_MS + 1 : -1);
}

/*
 * Detach is called when the launcher exits: its latch must not be set any more.
 */
static void
Detach(int code, Datum arg)
{
	RelayAwake(NULL);
}

void
idempotency_launcher_main(Datum unused)
{
	MemoryContext each =
		AllocSetContextCreate(TopMemoryContext, "idempotency launcher", ALLOCSET_DEFAULT_SIZES);
	uint32 event;

	WorkerConnect(InvalidOid);
	event = WaitEventExtensionNew("IdempotencyLauncherMain");
	CycleInit();
	before_shmem_exit(Detach, (Datum) 0);
	RelayAwake(MyLatch);

	while (!ShutdownRequestPending)
	{
		long relays;
		long visits;

		MemoryContextSwitchTo(each);
		relays = RelaysRun();
		MemoryContextSwitchTo(each);
		visits = CycleRun();
		MemoryContextReset(each);
		WorkerSleep(WorkerSooner(relays, visits), event);
	}
	proc_exit(1);
}

/*
 * LauncherInit registers the launcher; called from _PG_init().  pg_upgrade needs a server
 * in which no other process works.
 */
void
LauncherInit(void)
{
	CycleShmemInit();
	if (process_shared_preload_libraries_in_progress && !IsBinaryUpgrade)
		WorkerRegister("idempotency launcher", "idempotency_launcher_main", RESTART_SECONDS);
}
