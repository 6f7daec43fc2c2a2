/*-------------------------------------------------------------------------
 *
 * relaylauncher.c
 *	  The background worker that sends workers to the subscriptions.
 *
 * It is there where the library is preloaded and the server takes writes, and is
 * connected to no database, only to the shared catalogs.  What there is to do
 * stands in the registry (relayregistry.c), which outlives the launcher; for
 * itself it keeps nothing but the handles of the workers that it has started.
 * It is in one of two states:
 *
 *	state	what it does					what ends it
 *	-----	-----------------------------	------------------------------------
 *	AWAKE	looks who has ended, and		nobody is left to be chosen, or
 *			starts a worker for each		idempotency.relay_workers are at work
 *			subscription that the
 *			registry chooses
 *	ASLEEP	waits on its latch				a bell rings (relaybell.c), a worker
 *											starts, leaves or dies, a
 *											subscription comes or goes, a time
 *											comes for which something was put
 *											off, or SIGHUP
 *
 * What cannot be served now is put off:
 *
 * - The database is just dropped or copied, or idempotency.databases leaves it
 *	 out, or there is no slot for a worker: for a moment, or until that changes.
 * - The owner of the subscription is gone or a superuser, or may not connect:
 *	 each time for longer.  The log says so once.
 *
 * A database that is not there any more is forgotten.
 *
 * While workers are at work it looks twice a second whether a session waits to drop, copy,
 * rename or move their database, and ends those that have kept it waiting for as long
 * (relaystay.c).  The batch that such a worker has out is given back.
 *
 * The launcher ends with exit code 1, so that the postmaster starts it again,
 * unless it was the server that was stopped.  Workers go on without it.
 *
 * Locks: the registry's.  The lock of a database is tried and given back.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_database.h"
#include "commands/dbcommands.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "utils/acl.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "databases.h"
#include "guc.h"
#include "relaylauncher.h"
#include "relayregistry.h"
#include "serverlog.h"
#include "shmem.h"
#include "worker.h"

#define LAUNCHER_TYPE "idempotency relay launcher"
#define RELAY_TYPE "idempotency relay"

/* The longest sleep, in milliseconds; the server knows none of 25 days. */
#define LONGEST_MS (24L * 60 * 60 * 1000)

/*
 * How often it looks whether a session waits for a database, in milliseconds.  Workers
 * have as long to leave by themselves.
 */
#define CLOSING_MS 500

/* How many seconds pass until a launcher that died is started again. */
#define RESTART_SECONDS 1

StaticAssertDecl(sizeof(RelayTask) <= BGW_EXTRALEN, "a task must fit into bgw_extra");

typedef struct Worker
{
	RelayTask task;
	BackgroundWorkerHandle *handle;
} Worker;

/* The workers that this launcher has started and that have not ended. */
static List *workers = NIL;

/* The log has been told that there is no slot for a worker. */
static bool slotMissed = false;

/* ----------------------------------------------------------------
 * Who may be served
 * ----------------------------------------------------------------
 */

/*
 * WhatForbids returns why no worker can serve a subscription as its owner, in
 * the current memory context, or NULL.
 */
static char *
WhatForbids(const RelayTask *task)
{
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(task->owner));
	char *problem = NULL;
	Form_pg_authid role;

	if (!HeapTupleIsValid(tuple))
		return psprintf("role with OID %u does not exist", task->owner);

	role = (Form_pg_authid) GETSTRUCT(tuple);
	if (role->rolsuper)
		problem = psprintf("owner \"%s\" is a superuser", NameStr(role->rolname));
#ifndef SERVER_CONNECTS_WITHOUT_LOGIN
	else if (!role->rolcanlogin)
		problem = psprintf("role \"%s\" is not permitted to log in", NameStr(role->rolname));
#endif
	else if (database_aclcheck(task->database, task->owner, ACL_CONNECT) != ACLCHECK_OK)
		problem = psprintf("role \"%s\" has no CONNECT privilege on the database",
						   NameStr(role->rolname));
	ReleaseSysCache(tuple);
	return problem;
}

/*
 * IsServable tells whether a worker can be sent for a task that was chosen.  If
 * not, it is put off, or forgotten.
 */
static bool
IsServable(const RelayTask *task)
{
	MemoryContext caller = CurrentMemoryContext;
	char *problem = NULL;
	char *database;
	bool wanted;
	bool open;

	StartTransactionCommand();
	MemoryContextSwitchTo(caller);
	database = get_database_name(task->database);
	wanted = database != NULL && DatabaseIsWanted(task->database);
	open = wanted && DatabaseIsOpen(task->database);
	if (open)
		problem = WhatForbids(task);
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);

	if (problem != NULL && RegistryNoteProblem(task, problem, false))
		LogRelayProblem(database, task->number, problem);
	if (open && problem == NULL)
		return true;

	if (database == NULL)
	{
		RegistryNotSent(task, RELAY_GONE);
		RegistryForgetDatabase(task->database);
	}
	else
		RegistryNotSent(task, wanted && !open ? RELAY_BUSY : RELAY_UNFIT);
	return false;
}

/* ----------------------------------------------------------------
 * Workers
 * ----------------------------------------------------------------
 */

/*
 * StartWorker starts a worker for a task.  Returns false if there is no free
 * slot for it, which it says in the log the first time.
 */
static bool
StartWorker(const RelayTask *task)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);
	BackgroundWorkerHandle *handle = NULL;
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	worker.bgw_notify_pid = MyProcPid;
	memcpy(worker.bgw_extra, task, sizeof(RelayTask));
	snprintf(worker.bgw_name, BGW_MAXLEN, RELAY_TYPE " for database %u", task->database);
	strlcpy(worker.bgw_type, RELAY_TYPE, BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idempotency", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idempotency_relay_main", BGW_MAXLEN);

	if (RegisterDynamicBackgroundWorker(&worker, &handle))
	{
		Worker *started = palloc(sizeof(Worker));

		*started = (Worker){*task, handle};
		workers = lappend(workers, started);
		slotMissed = false;
	}
	else if (!slotMissed)
	{
		LogNoRelaySlot();
		slotMissed = true;
	}
	MemoryContextSwitchTo(caller);
	return handle != NULL;
}

/*
 * ForgetEnded forgets the workers that have ended, and sees to it that nobody
 * waits for one that has not come.
 */
static void
ForgetEnded(void)
{
	ListCell *cell;

	foreach (cell, workers)
	{
		Worker *worker = lfirst(cell);
		pid_t pid;

		if (GetBackgroundWorkerPid(worker->handle, &pid) != BGWH_STOPPED)
			continue;
		RegistryNotSent(&worker->task, RELAY_DIED);
		workers = foreach_delete_current(workers, cell);
		pfree(worker->handle);
		pfree(worker);
	}
}

/*
 * StartWorkers starts a worker for each subscription that has something to do,
 * as many as there may be.
 */
static void
StartWorkers(void)
{
	RelayTask task;

	while (!ShutdownRequestPending)
	{
		/* One that has left its subscription is there until it has ended. */
		bool mayStart = list_length(workers) < RelayWorkers;

		if (!RegistryChoose(mayStart ? RelayWorkers : 0, &task))
			break;
		if (!IsServable(&task))
			continue;
		if (!StartWorker(&task))
		{
			RegistryNotSent(&task, RELAY_BUSY);
			return;
		}
	}
	if (RegistryTakeFull())
		LogRelayFull(RelaySubscriptions);
}

/*
 * LookForClosing looks every CLOSING_MS whether a session waits to drop or copy a database
 * in which workers are, and ends those that keep it waiting.  Returns whether there are any
 * workers.
 */
static bool
LookForClosing(void)
{
	static instr_time looked;
	List *databases = RegistryServedDatabases();
	ListCell *cell;

	if (databases == NIL || WorkerElapsed(looked) < CLOSING_MS)
		return databases != NIL;
	INSTR_TIME_SET_CURRENT(looked);
	foreach (cell, databases)
	{
		bool open;

		StartTransactionCommand();
		open = DatabaseIsOpen(lfirst_oid(cell));
		CommitTransactionCommand();
		RegistryNoteClosing(lfirst_oid(cell), !open);
	}
	return true;
}

/* ----------------------------------------------------------------
 * The launcher
 * ----------------------------------------------------------------
 */

/*
 * MillisecondsToNext returns how long there is nothing to do unless somebody
 * calls; -1: for ever.  "watching" says that there are workers to look after.
 */
static long
MillisecondsToNext(bool watching)
{
	TimestampTz next = RelayWorkers > 0 ? RegistryNextTime() : 0;
	long ms;

	if (next == 0)
		return watching ? CLOSING_MS : -1;
	ms = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), next);
	return Min(ms, watching ? CLOSING_MS : LONGEST_MS) + 1;
}

/*
 * Close is called when the launcher ends: nobody is to wake it any more.
 */
static void
Close(int code, Datum arg)
{
	Shared->relay.launcher = NULL;
}

/*
 * idempotency_relay_launcher_main is the launcher.
 */
void
idempotency_relay_launcher_main(Datum unused)
{
	MemoryContext each = AllocSetContextCreate(TopMemoryContext, "idempotency relay launcher",
											   ALLOCSET_DEFAULT_SIZES);
	uint32 event;

	WorkerConnect(InvalidOid);
	event = WaitEventExtensionNew("IdempotencyRelayLauncher");
	before_shmem_exit(Close, (Datum) 0);
	Shared->relay.launcher = MyLatch;
	RegistryOpen();

	MemoryContextSwitchTo(each);
	while (!ShutdownRequestPending)
	{
		bool reload;
		bool watching;

		ForgetEnded();
		StartWorkers();
		watching = LookForClosing();
		MemoryContextSwitchTo(each);
		MemoryContextReset(each);
		reload = WorkerSleep(MillisecondsToNext(watching), event);
		if (reload)
			RegistryRetryAll();
	}
	proc_exit(1);
}

/*
 * RelayLauncherInit asks the postmaster for the launcher; called from
 * _PG_init().  pg_upgrade wants a server in which nobody else is at work.
 */
void
RelayLauncherInit(void)
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
	strlcpy(worker.bgw_function_name, "idempotency_relay_launcher_main", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}
