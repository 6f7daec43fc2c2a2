/*-------------------------------------------------------------------------
 *
 * relay/worker.c
 *	  The worker that calls the handler of a subscription with its events.
 *
 * It connects as the owner of the subscription, attaches to it, and runs steps of a
 * transaction each (relay/step.c) until there is nothing to do for a while, or other
 * subscriptions need a worker.  The README has the steps, the rules for leaving, and
 * the state of the batch in flight after each end of a worker.
 *
 * Locks: those of a step, to its end.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/bgworker.h"
#include "base/compat.h"
#include "base/database.h"
#include "base/guc.h"
#include "base/relation.h"
#include "base/timing.h"
#include "base/wakeup.h"
#include "outbox/table.h"
#include "relay/worker.h"

/* How long a worker remains attached: without events, and while others wait. */
#define LINGER_MS 250
#define SLICE_MS 1000

/* After how long a transaction commits what it has handled of its batch. */
#define COMMIT_MS 250

/* How often, and how long apart, a worker that exits tries to lock the subscription. */
#define GIVE_BACK_TRIES 100
#define GIVE_BACK_MS 10

static RelayJob job;
static bool attached = false;
static instr_time attachedAt;
static instr_time stepBegan;

/* For SchedulerLeave(), if the worker exits now. */
static RelayEnd leaving = RELAY_DIED;
static TimestampTz nextDue = 0;

static volatile sig_atomic_t sleeping = false;	 /* between two steps */
static volatile sig_atomic_t terminated = false; /* by SIGTERM */

/* ----------------------------------------------------------------
 * Limits
 * ----------------------------------------------------------------
 */

/*
 * RelayMustCommit tells whether the step must commit what was handled of the batch.
 */
bool
RelayMustCommit(void)
{
	return MillisecondsSince(stepBegan) >= COMMIT_MS;
}

/*
 * RelayMustLeave tells whether the worker must leave the subscription with more to do:
 * a session waits to drop or copy the database, or other subscriptions need a worker.
 * Needs the lock of DatabaseIsOpen().
 */
bool
RelayMustLeave(void)
{
	LOCKTAG tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	return LockHasWaiters(&tag, RowExclusiveLock, false) ||
		   (MillisecondsSince(attachedAt) >= SLICE_MS && SchedulerIsCrowded());
}

/*
 * SleepTime returns for how many milliseconds to sleep after a step that found nothing,
 * if the last one that handled events ended at "handledAt"; 0 if it is time to leave.
 */
static long
SleepTime(instr_time handledAt)
{
	long left = LINGER_MS - MillisecondsSince(handledAt);

	if (SchedulerIsCrowded())
		return 0;
	if (nextDue != 0)
	{
		long due = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), nextDue) + 1;

		left = Min(left, due);
	}
	return Max(left, 0);
}

/*
 * Sleep sleeps until an event is published, or for "ms" milliseconds.  A cancel ends
 * the sleep only.
 */
static void
Sleep(long ms)
{
	pgstat_report_activity(STATE_IDLE, NULL);
	PG_TRY();
	{
		sleeping = true;
		if (!ShutdownRequestPending)
			WakeupSleep(OutboxChannel(), 0, ms);
		sleeping = false;
	}
	PG_CATCH();
	{
		sleeping = false;
		if (geterrcode() != ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		MemoryContextSwitchTo(TopMemoryContext);
		FlushErrorState();
	}
	PG_END_TRY();
	WakeupCancel();
}

/* ----------------------------------------------------------------
 * Steps
 * ----------------------------------------------------------------
 */

/*
 * Poll runs a step.  What is published or becomes due after its snapshot makes the
 * subscription due, or ends the next sleep.  "last" says that the worker leaves if the
 * step finds nothing.
 */
static RelayStep
Poll(bool last)
{
	RelayEnd end;
	RelayStep step;

	if (RelayBatchNumber() == 0)
	{
		SchedulerBeginPoll(&job, last);
		WakeupPrepare(OutboxChannel());
	}
	leaving = RELAY_DIED;
	INSTR_TIME_SET_CURRENT(stepBegan);
	step = RelayStepRun(&job, last, &end, &nextDue);
	leaving = end;
	return step;
}

/*
 * Run runs steps for the subscription until it is time to leave it.
 */
static void
Run(void)
{
	bool handled = false;
	bool last = false;
	instr_time handledAt;

	INSTR_TIME_SET_CURRENT(attachedAt);
	leaving = RELAY_UNFINISHED;
	nextDue = 0;
	while (!ShutdownRequestPending && RelayWorkers > 0)
	{
		RelayStep step = Poll(last);
		long ms;

		if (step == STEP_LEAVE)
			return;
		if (step == STEP_HANDLED)
		{
			handled = true;
			last = false;
			INSTR_TIME_SET_CURRENT(handledAt);
		}
		else if (last)
		{
			leaving = RELAY_IDLE;
			return;
		}
		else if (handled && (ms = SleepTime(handledAt)) > 0)
			Sleep(ms);
		else
			last = true;
		WorkerReload();
	}
}

/*
 * MoveOn leaves the subscription and attaches to the next one, if that is of the same
 * owner and database.  Returns whether it has.
 */
static bool
MoveOn(void)
{
	RelayJob next;

	if (RelayBatchNumber() != 0 || ShutdownRequestPending || !DatabaseProbe(MyDatabaseId))
		return false;

	RelayBatchLeave(&job);
	attached = SchedulerLeave(&job, leaving, nextDue, &next);
	if (attached)
		job = next;
	return attached;
}

/* ----------------------------------------------------------------
 * The end
 * ----------------------------------------------------------------
 */

/*
 * Detach tells the scheduler how the worker has left.
 */
static void
Detach(int code, Datum arg)
{
	if (!attached)
		return;
	RelayBatchLeave(&job);
	(void) SchedulerLeave(&job, leaving, nextDue, NULL);
}

/*
 * GiveBack gives the batch back, in a transaction of its own.  Returns false if another
 * session has locked the subscription, its position, or a table.
 */
static bool
GiveBack(void)
{
	Subscription *subscription;
	bool done;

	StartTransactionCommand();
	if (!ExtensionRelationLock("subscription", AccessShareLock, true) ||
		!ExtensionRelationLock("position", RowExclusiveLock, true) ||
		!ExtensionRelationLock("parked", RowExclusiveLock, true) ||
		!ExtensionRelationLock("outbox", AccessShareLock, true))
	{
		AbortCurrentTransaction();
		return false;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	subscription = SubscriptionFindNumber(job.number);
	done = subscription == NULL ||
		   (SubscriptionLock(subscription->name, 0) && PositionLock(subscription->name));
	if (done && subscription != NULL)
	{
		/* See what the previous owner of the lock has committed */
		PopActiveSnapshot();
		PushActiveSnapshot(GetTransactionSnapshot());
		subscription = SubscriptionFindNumber(job.number);
		if (subscription != NULL)
			DeliveryGiveBack(subscription, RelayBatchNumber(), false);
	}
	RelayCommitLocally();
	PopActiveSnapshot();
	CommitTransactionCommand();
	return done;
}

/*
 * GiveBackAtTermination gives the batch in flight back after SIGTERM: none of its events
 * has failed, and what the handler did with them is rolled back.  No signal ends a wait at
 * this point, be it for a lock or for a standby, and a wait would keep the server from
 * stopping: so it tries for a second.  The registry tells the next worker in any case,
 * even if an error ends the tries.
 */
static void
GiveBackAtTermination(int code, Datum arg)
{
	if (!terminated)
		return;
	leaving = RELAY_BUSY;
	if (RelayBatchNumber() == 0)
		return;
	SchedulerSetUnhandled(&job, RelayBatchNumber());
	AbortOutOfAnyTransaction();
	for (int tries = 0; !GiveBack() && tries < GIVE_BACK_TRIES; tries++)
		pg_usleep(GIVE_BACK_MS * 1000L);
}

/*
 * Terminate is the handler of SIGTERM: a worker that sleeps leaves by itself, any other
 * is ended at once.
 */
static void
Terminate(SIGNAL_ARGS)
{
	if (sleeping)
		SignalHandlerForShutdownRequest(SIGNAL_PASS);
	else
	{
		terminated = true;
		die(SIGNAL_PASS);
	}
}

/*
 * Refused gets the error with which the worker could not connect.  The survey writes it to
 * the log, with the name of the subscription.
 */
static void
Refused(ErrorData *error)
{
	leaving = RELAY_UNFIT;
	(void) RegistrySetProblem(&job, error->message);
	error->output_to_server = false;
}

/*
 * idempotency_relay_main is the worker.
 */
void
idempotency_relay_main(Datum unused)
{
	memcpy(&job, MyBgworkerEntry->bgw_extra, sizeof(RelayJob));
	attached = SchedulerAttach(&job);
	if (!attached)
		proc_exit(0);
	before_shmem_exit(Detach, (Datum) 0);

	WorkerConnectAs(job.database, job.owner, Refused);
	pqsignal(SIGTERM, Terminate);
	before_shmem_exit(GiveBackAtTermination, (Datum) 0);

	RefuseSetConstraints();
	RelayStepInit();
	do
		Run();
	while (MoveOn());
	proc_exit(0);
}
