/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The background worker that sends the reaper to every database.
 *
 * It is there where the library is preloaded and the server takes writes: on a
 * standby it starts with the promotion.  It is connected to no database, only
 * to the shared catalogs.  Every idempotency.reaper_naptime it makes a tour:
 * one after the other it starts a worker for each database that is due, and
 * waits for it to leave.  Templates, databases that take no connections, and
 * those outside idempotency.databases are left out.
 *
 * For the launcher a database is in one of three states.  They are in its own
 * memory; since a new launcher visits every database, nothing is lost with it.
 *
 *	state	due				after the visit
 *	------	--------------	--------------------------------------------------
 *	NEW		in any tour		REAPED if the reaper worked there, SELDOM if not:
 *							the extension is not installed, its tables are not
 *							as this library knows them (the log says so once), or
 *							the worker got no connection or died
 *	REAPED	in any tour		the same
 *	SELDOM	every 10 tours	the same
 *
 * A SELDOM database is also due when one of its sessions has called: each does
 * so when it first finds the extension there, and after a change of the tables.
 * So the launcher learns of a new extension.  A database that is not in
 * pg_database any more is forgotten, and its counters with it.
 *
 * A worker leaves after a second, though there be more to do; then its database
 * stays due, and the tour comes back to it when it has visited the others.  A
 * tour ends when nothing is due, or the next one is to begin.
 *
 * A visit also tells the relay which subscriptions there are (relaysurvey.c).
 * Therefore the first tour does nothing else, so that no subscription waits for
 * the work in another database; and there is such a tour every LOOK_MS where
 * the naptime is longer, or 0.
 *
 * While somebody drops or copies a database, a worker could not connect, so
 * that it is not sent.  One that has not left after VISIT_MS is told to.  If
 * it has not after as long again, the tour goes on without it, and nobody else
 * is sent to its database until it has left.
 *
 * The launcher ends with exit code 1, so that the postmaster starts it again,
 * unless it was the server that was stopped.
 *
 * Locks: an LWLock for what others tell the launcher.  The lock of a database is
 * tried and given back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "compat.h"
#include "databases.h"
#include "guc.h"
#include "launcher.h"
#include "serverlog.h"
#include "shmem.h"
#include "worker.h"

#define LAUNCHER_TYPE "idempotency launcher"
#define REAPER_TYPE "idempotency reaper"

/* How long a visit may take, in milliseconds; a worker stays for one second. */
#define VISIT_MS 4000

/* What a worker is told. */
#define EXTRA_REFUSED 0
#define EXTRA_REAP 1

/* How often the relay is told what there is, if nothing is reaped, in milliseconds. */
#define LOOK_MS 10000

/* How many seconds pass until a launcher that died is started again. */
#define RESTART_SECONDS 5

static uint32 napEvent;
static uint32 visitEvent;

/* The log has been told that there is no slot for a worker. */
static bool slotMissed = false;

/* ----------------------------------------------------------------
 * Calls of sessions
 * ----------------------------------------------------------------
 */

/*
 * IsReaper tells whether this process is a worker that the launcher has sent.
 */
static bool
IsReaper(void)
{
	return MyBgworkerEntry != NULL && strcmp(MyBgworkerEntry->bgw_type, REAPER_TYPE) == 0;
}

/*
 * LauncherCall says that this session has found the extension in its database,
 * so that the launcher visits it in the next tour.  Does nothing where the
 * library is not preloaded, or too many call at once: then the visit is later.  A
 * worker that the launcher has sent does not call: it would have itself sent again,
 * in every tour, where it dies.
 */
void
LauncherCall(void)
{
	LauncherState *launcher;
	int place = 0;

	if (Shared == NULL || IsReaper())
		return;

	launcher = &Shared->launcher;
	LWLockAcquire(launcher->lock, LW_EXCLUSIVE);
	while (place < LAUNCHER_CALLS && OidIsValid(launcher->calls[place]) &&
		   launcher->calls[place] != MyDatabaseId)
		place++;
	if (place < LAUNCHER_CALLS)
		launcher->calls[place] = MyDatabaseId;
	LWLockRelease(launcher->lock);
}

/*
 * LauncherTakeCalls returns the databases whose sessions have called since it
 * was asked last.
 */
List *
LauncherTakeCalls(void)
{
	LauncherState *launcher = &Shared->launcher;
	Oid calls[LAUNCHER_CALLS];
	List *databases = NIL;

	LWLockAcquire(launcher->lock, LW_EXCLUSIVE);
	memcpy(calls, launcher->calls, sizeof(calls));
	memset(launcher->calls, 0, sizeof(calls));
	LWLockRelease(launcher->lock);

	for (int place = 0; place < LAUNCHER_CALLS && OidIsValid(calls[place]); place++)
		databases = lappend_oid(databases, calls[place]);
	return databases;
}

/* ----------------------------------------------------------------
 * The worker's side
 * ----------------------------------------------------------------
 */

/*
 * LauncherReport tells the launcher what came of the visit to a database; one
 * that came too late for it is lost.
 */
void
LauncherReport(Oid database, VisitResult result)
{
	LauncherState *launcher = &Shared->launcher;

	LWLockAcquire(launcher->lock, LW_EXCLUSIVE);
	if (launcher->visited == database)
		launcher->result = result;
	LWLockRelease(launcher->lock);
}

/*
 * LauncherKnowsRefusal tells a worker whether its predecessor has said that the
 * tables are not as the library knows them.
 */
bool
LauncherKnowsRefusal(void)
{
	return MyBgworkerEntry->bgw_extra[EXTRA_REFUSED] != '\0';
}

/*
 * LauncherWantsReaping tells a worker whether it is to reap, or to look only.
 */
bool
LauncherWantsReaping(void)
{
	return MyBgworkerEntry->bgw_extra[EXTRA_REAP] != '\0';
}

/* ----------------------------------------------------------------
 * Visits
 * ----------------------------------------------------------------
 */

/*
 * IsOpen tells whether a worker could connect to the database: it is still
 * there, and nobody is just dropping or copying it.
 */
static bool
IsOpen(Oid database)
{
	bool open;

	StartTransactionCommand();
	open = DatabaseIsOpen(database);
	CommitTransactionCommand();
	return open;
}

/*
 * StartWorker starts a worker for a database, to reap there or to look only.  Returns NULL if there
 * is no free slot for it, which it says in the log the first time.
 */
static BackgroundWorkerHandle *
StartWorker(const Database *database, bool reap)
{
	LauncherState *launcher = &Shared->launcher;
	MemoryContext caller = CurrentMemoryContext;
	BackgroundWorkerHandle *handle = NULL;
	BackgroundWorker worker;

	LWLockAcquire(launcher->lock, LW_EXCLUSIVE);
	launcher->visited = database->oid;
	launcher->result = VISIT_FAILED;
	LWLockRelease(launcher->lock);

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_main_arg = ObjectIdGetDatum(database->oid);
	worker.bgw_notify_pid = MyProcPid;
	worker.bgw_extra[EXTRA_REFUSED] = database->refused;
	worker.bgw_extra[EXTRA_REAP] = reap;
	snprintf(worker.bgw_name, BGW_MAXLEN, REAPER_TYPE " for database %u", database->oid);
	strlcpy(worker.bgw_type, REAPER_TYPE, BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idempotency_reaper_main", BGW_MAXLEN);

	/* The handle may outlive the tour. */
	MemoryContextSwitchTo(TopMemoryContext);
	if (RegisterDynamicBackgroundWorker(&worker, &handle))
		slotMissed = false;
	else if (!slotMissed)
	{
		LogNoWorkerSlot();
		slotMissed = true;
	}
	MemoryContextSwitchTo(caller);
	return handle;
}

/*
 * HasEnded tells whether a worker has gone.
 */
static bool
HasEnded(BackgroundWorkerHandle *handle)
{
	pid_t pid;

	return GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED;
}

/*
 * WaitForEnd waits until a worker has gone, for VISIT_MS at most.  Returns
 * whether it has.
 */
static bool
WaitForEnd(BackgroundWorkerHandle *handle)
{
	instr_time began;

	INSTR_TIME_SET_CURRENT(began);
	while (!HasEnded(handle))
	{
		long left = VISIT_MS - WorkerElapsed(began);

		if (left <= 0 || ShutdownRequestPending)
			return false;
		WorkerSleep(left, visitEvent);
	}
	return true;
}

/*
 * NoteResult draws the conclusions from a visit that has ended.
 */
static void
NoteResult(Database *database)
{
	LauncherState *launcher = &Shared->launcher;
	VisitResult result;

	LWLockAcquire(launcher->lock, LW_SHARED);
	result = launcher->result;
	LWLockRelease(launcher->lock);

	database->refused = result == VISIT_REFUSED;
	database->due = result == VISIT_UNFINISHED;
	database->state =
		result == VISIT_UNFINISHED || result == VISIT_ENDED ? DATABASE_REAPED : DATABASE_SELDOM;
}

/*
 * VisitDatabase sends a worker to a database and waits for its end, unless it
 * cannot be visited now.  The database stays due if there is more to do.
 */
static void
VisitDatabase(Database *database, bool reap)
{
	BackgroundWorkerHandle *handle;

	database->due = false;
	if (database->late != NULL)
	{
		if (!HasEnded(database->late))
			return;
		pfree(database->late);
		database->late = NULL;
	}
	if (!IsOpen(database->oid))
		return;
	handle = StartWorker(database, reap);
	if (handle == NULL)
		return;

	if (WaitForEnd(handle))
		NoteResult(database);
	else if (!ShutdownRequestPending)
	{
		TerminateBackgroundWorker(handle);
		if (!WaitForEnd(handle))
		{
			database->late = handle;
			return;
		}
	}
	pfree(handle);
}

/*
 * Tour visits the databases that are due, to reap there or to look only; round
 * and round until there is nothing left to do or the next tour is to begin,
 * "naptime" after "began".
 */
static void
Tour(instr_time began, bool reap)
{
	List *due = DatabasesDue();
	bool unfinished = true;

	while (unfinished)
	{
		ListCell *cell;

		unfinished = false;
		foreach (cell, due)
		{
			Database *database = lfirst(cell);

			if (ShutdownRequestPending || (reap && ReaperNaptime == 0))
				return;
			if (database->due)
				VisitDatabase(database, reap);
			unfinished |= database->due;
		}
		if (!reap || WorkerElapsed(began) >= ReaperNaptime)
			return;
	}
}

/* ----------------------------------------------------------------
 * The launcher
 * ----------------------------------------------------------------
 */

/*
 * TimeLeft returns how long it is until something begins again that is done every
 * "interval" milliseconds, and was begun last at "began", unless it never was; -1
 * if the interval is 0, so that it is not.
 */
static long
TimeLeft(int interval, bool ever, instr_time began)
{
	long left = ever && interval > 0 ? interval - WorkerElapsed(began) : 0;

	return interval == 0 ? -1 : Max(left, 0);
}

/*
 * idempotency_launcher_main is the launcher: a tour every naptime, for ever.
 */
void
idempotency_launcher_main(Datum unused)
{
	MemoryContext each =
		AllocSetContextCreate(TopMemoryContext, "idempotency tour", ALLOCSET_DEFAULT_SIZES);
	instr_time reaped = {0};
	instr_time toured = {0};
	bool everReaped = false;
	bool everToured = false;

	WorkerConnect(InvalidOid);
	napEvent = WaitEventExtensionNew("IdempotencyLauncherNap");
	visitEvent = WaitEventExtensionNew("IdempotencyLauncherVisit");
	DatabasesInit();

	while (!ShutdownRequestPending)
	{
		long reapLeft = TimeLeft(ReaperNaptime, everReaped, reaped);
		long lookLeft = TimeLeft(RelayWorkers > 0 ? LOOK_MS : 0, everToured, toured);
		bool reap;

		if (reapLeft != 0 && lookLeft != 0)
		{
			/* as unsigned numbers, -1 is the largest */
			WorkerSleep((long) Min((unsigned long) reapLeft, (unsigned long) lookLeft), napEvent);
			continue;
		}

		/* The first look is quick, and what it finds waits for it. */
		reap = reapLeft == 0 && (everToured || lookLeft != 0);
		INSTR_TIME_SET_CURRENT(toured);
		everToured = true;
		if (reap)
		{
			reaped = toured;
			everReaped = true;
		}
		MemoryContextSwitchTo(each);
		Tour(toured, reap);
		MemoryContextReset(each);
	}
	proc_exit(1);
}

/*
 * LauncherInit asks the postmaster for the launcher; called from _PG_init().
 * pg_upgrade wants a server in which nobody else is at work.
 */
void
LauncherInit(void)
{
	BackgroundWorker worker;

	if (!process_shared_preload_libraries_in_progress || IsBinaryUpgrade)
		return;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = RESTART_SECONDS;
	strlcpy(worker.bgw_name, LAUNCHER_TYPE, BGW_MAXLEN);
	strlcpy(worker.bgw_type, LAUNCHER_TYPE, BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idempotency_launcher_main", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}
