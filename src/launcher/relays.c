/*-------------------------------------------------------------------------
 *
 * launcher/relays.c
 *	  Starting the relay's workers.
 *
 * Which subscriptions are due is in the registry (relay/registry.c), which outlives the
 * launcher; the launcher itself has the handles of its workers only.  The README has
 * the states of a subscription that cannot be run now.
 *
 * Locks: the registry's.  ROW EXCLUSIVE on a database, which is not waited for.
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
#include "postmaster/interrupt.h"
#include "utils/acl.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "base/bgworker.h"
#include "base/compat.h"
#include "base/database.h"
#include "base/guc.h"
#include "base/timing.h"
#include "launcher/launcher.h"
#include "relay/worker.h"

/* The longest sleep, in milliseconds: WaitLatch() accepts less than 25 days. */
#define LONGEST_MS (24L * 60 * 60 * 1000)

/*
 * How often it looks whether a session waits for a database, in milliseconds.  Workers
 * have as long to leave by themselves.
 */
#define BLOCKED_MS 500

StaticAssertDecl(sizeof(RelayJob) <= BGW_EXTRALEN, "a job must fit into bgw_extra");

typedef struct Worker
{
	RelayJob job; /* it may have moved on to another subscription of the database */
	BackgroundWorkerHandle *handle;
	bool blocking; /* a session waited for its database at the last look */
} Worker;

static WorkerKind relay = {
	.type = RELAY_TYPE, .function = "idempotency_relay_main", .waits = "Events wait until one is."};

/* The workers that this launcher has started and that have not ended. */
static List *workers = NIL;

/*
 * OwnerProblem returns why no worker can run a subscription as its owner, in the
 * current memory context, or NULL.
 */
static char *
OwnerProblem(const RelayJob *job)
{
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(job->owner));
	char *problem = NULL;
	Form_pg_authid role;

	if (!HeapTupleIsValid(tuple))
		return psprintf("role with OID %u does not exist", job->owner);

	role = (Form_pg_authid) GETSTRUCT(tuple);
	if (role->rolsuper)
		problem = psprintf("owner \"%s\" is a superuser", NameStr(role->rolname));
#ifndef SERVER_CONNECTS_WITHOUT_LOGIN
	else if (!role->rolcanlogin)
		problem = psprintf("role \"%s\" is not permitted to log in", NameStr(role->rolname));
#endif
	else if (database_aclcheck(job->database, job->owner, ACL_CONNECT) != ACLCHECK_OK)
		problem = psprintf("role \"%s\" has no CONNECT privilege on the database",
						   NameStr(role->rolname));
	ReleaseSysCache(tuple);
	return problem;
}

/*
 * CanRun tells whether a worker can be started for a subscription that was chosen.  If
 * not, the subscription backs off, and the survey of its database, which knows its name,
 * writes the problem to the log and to last_error.
 */
static bool
CanRun(const RelayJob *job)
{
	MemoryContext caller = CurrentMemoryContext;
	char *problem = NULL;
	bool wanted;
	bool open;

	StartTransactionCommand();
	MemoryContextSwitchTo(caller);
	wanted = DatabaseIsWanted(job->database);
	open = DatabaseIsOpen(job->database);
	if (wanted && open)
		problem = OwnerProblem(job);
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);

	if (problem != NULL)
		(void) RegistrySetProblem(job, problem);
	if (wanted && open && problem == NULL)
		return true;
	SchedulerStartFailed(job, wanted && !open ? RELAY_BUSY : RELAY_UNFIT);
	return false;
}

/*
 * ForgetEnded forgets the workers that have ended, and tells the scheduler of those that
 * have not attached.
 */
static void
ForgetEnded(void)
{
	ListCell *cell;

	foreach (cell, workers)
	{
		Worker *worker = lfirst(cell);

		if (!WorkerHasEnded(worker->handle))
			continue;
		SchedulerStartFailed(&worker->job, RELAY_DIED);
		workers = foreach_delete_current(workers, cell);
		pfree(worker->handle);
		pfree(worker);
	}
}

/*
 * StartWorkers starts a worker for each subscription that is chosen, up to
 * idempotency.relay_workers.  Returns false if there was no slot for one.
 */
static bool
StartWorkers(void)
{
	RelayJob job;

	while (!ShutdownRequestPending)
	{
		/* A worker that has left its subscription counts until it has ended. */
		bool mayStart = list_length(workers) < RelayWorkers;
		BackgroundWorkerHandle *handle;
		MemoryContext caller;
		Worker *started;

		if (!SchedulerChoose(mayStart ? RelayWorkers : 0, &job))
			break;
		if (!CanRun(&job))
			continue;
		handle = WorkerStart(&relay, job.database, &job, sizeof(job));
		if (handle == NULL)
		{
			SchedulerStartFailed(&job, RELAY_NO_SLOT);
			return false;
		}
		caller = MemoryContextSwitchTo(TopMemoryContext);
		started = palloc(sizeof(Worker));
		*started = (Worker){job, handle, false};
		workers = lappend(workers, started);
		MemoryContextSwitchTo(caller);
	}
	if (RegistryTakeOverflow())
		ereport(LOG, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					  errmsg("idempotency relay does not serve further subscriptions"),
					  errdetail("It has %d slots, the value of idempotency.relay_subscriptions.",
								RelaySubscriptions),
					  errhint("Increase idempotency.relay_subscriptions and restart the server.")));
	return true;
}

/*
 * TerminateBlocking looks every BLOCKED_MS whether a session waits to drop or copy the
 * database of a worker, and terminates the worker if one did at the last look too.
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
		Worker *worker = lfirst(cell);
		bool blocking = !DatabaseProbe(worker->job.database);

		if (blocking && worker->blocking)
			TerminateBackgroundWorker(worker->handle);
		worker->blocking = blocking;
	}
}

/*
 * RelaysRun forgets workers that have ended and starts those that are needed.  Returns in
 * how many milliseconds it must be called again, unless the latch is set before; -1: never.
 */
long
RelaysRun(void)
{
	TimestampTz next;
	long ms = -1;

	ForgetEnded();
	if (!StartWorkers())
		ms = SLOT_MS;
	TerminateBlocking();
	next = RelayWorkers > 0 ? SchedulerNextTime() : 0;
	if (next != 0)
		ms = WorkerSooner(
			ms, Min(TimestampDifferenceMilliseconds(GetCurrentTimestamp(), next), LONGEST_MS) + 1);
	return WorkerSooner(ms, workers != NIL ? BLOCKED_MS + 1 : -1);
}
