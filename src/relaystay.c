/*-------------------------------------------------------------------------
 *
 * relaystay.c
 *	  How long a worker of the relay stays with a subscription.
 *
 * With nothing to do, it stays for LINGER_MS after the last event, and sleeps until
 * something is published: the next event often comes soon.  With much to do, it
 * stays for SLICE_MS, and then as long as no other subscription waits for a worker.
 * A transaction ends after COMMIT_MS in any case, and the event at hand: what the handler has
 * locked is locked no longer, and sessions that wait for the subscription, or for a
 * table of ours, have their turn.
 *
 * DROP DATABASE, and whatever copies, renames or moves one, takes the database's lock, waits 5
 * seconds until no session is connected, and fails then.  So each step has that lock as well:
 * those seconds begin when the step has ended, and the next one does not begin.  A handler
 * that keeps such a session waiting is ended by the launcher (relaylauncher.c).
 *
 * SIGTERM ends a worker at work at once.  One that sleeps leaves by itself.
 *
 * Locks: ROW EXCLUSIVE on the database, not waited for, to the end of a step.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/lock.h"
#include "tcop/tcopprot.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "databases.h"
#include "guc.h"
#include "outboxtable.h"
#include "relayinternal.h"
#include "wakeup.h"
#include "worker.h"

/* How long a worker stays: with nothing to do, and at others' cost. */
#define LINGER_MS 250
#define SLICE_MS 1000

/* After how long a transaction commits, though there be more in its batch. */
#define COMMIT_MS 250

static instr_time came;
static instr_time began; /* this step */

/* SIGTERM may wait: nothing is in progress. */
static volatile sig_atomic_t atRest = false;

/*
 * RelayStayBegin is called when the worker has come to a subscription.
 */
void
RelayStayBegin(void)
{
	INSTR_TIME_SET_CURRENT(came);
}

/*
 * RelayStayBeginStep is called when a transaction begins.
 */
void
RelayStayBeginStep(void)
{
	INSTR_TIME_SET_CURRENT(began);
}

/* ----------------------------------------------------------------
 * At work
 * ----------------------------------------------------------------
 */

/*
 * RelayStayEnterDatabase locks the database for this step, unless a session is to drop or
 * copy it, or does so now.  Returns whether it has.
 */
bool
RelayStayEnterDatabase(void)
{
	return DatabaseIsOpen(MyDatabaseId);
}

/*
 * DatabaseIsClosing tells whether a session waits to drop or copy the database.
 */
static bool
DatabaseIsClosing(void)
{
	LOCKTAG tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	return LockHasWaiters(&tag, RowExclusiveLock, false);
}

/*
 * RelayStayCommits tells whether the step has taken so long that it is to commit what was
 * handled, though there be more in the batch.
 */
bool
RelayStayCommits(void)
{
	return WorkerElapsed(began) >= COMMIT_MS;
}

/*
 * RelayStayIsOver tells whether it is time to make room, though there be more to do.
 * Needs RelayStayEnterDatabase().
 */
bool
RelayStayIsOver(void)
{
	return DatabaseIsClosing() ||
		   (WorkerElapsed(came) >= SLICE_MS && RegistryOthersWait(RelayWorkers));
}

/* ----------------------------------------------------------------
 * At rest
 * ----------------------------------------------------------------
 */

/*
 * RelayStaySleepTime returns for how many milliseconds to sleep when nothing was found,
 * the last time anything was being "servedAt", and there being something again at
 * "nextDue", unless that is 0; 0 if it is time to leave.
 */
long
RelayStaySleepTime(instr_time servedAt, TimestampTz nextDue)
{
	long left = LINGER_MS - WorkerElapsed(servedAt);

	if (RegistryOthersWait(RelayWorkers))
		return 0;
	if (nextDue != 0)
	{
		long due = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), nextDue) + 1;

		left = Min(left, due);
	}
	return Max(left, 0);
}

/*
 * RelayStaySleep sleeps until something is published, or for "ms" milliseconds.  A
 * cancel is no reason to leave.
 */
void
RelayStaySleep(long ms)
{
	pgstat_report_activity(STATE_IDLE, NULL);
	PG_TRY();
	{
		atRest = true;
		if (!ShutdownRequestPending)
			WakeupSleep(OutboxChannel(), 0, ms);
		atRest = false;
	}
	PG_CATCH();
	{
		atRest = false;
		if (geterrcode() != ERRCODE_QUERY_CANCELED)
			PG_RE_THROW();
		MemoryContextSwitchTo(TopMemoryContext);
		FlushErrorState();
	}
	PG_END_TRY();
	WakeupCancel();
}

/*
 * RelayStayTerminate is the handler of SIGTERM: at rest we leave at our own time, at
 * work at once.
 */
void
RelayStayTerminate(SIGNAL_ARGS)
{
	if (atRest)
		SignalHandlerForShutdownRequest(postgres_signal_arg);
	else
		die(postgres_signal_arg);
}
