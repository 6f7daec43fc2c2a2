/*-------------------------------------------------------------------------
 *
 * relaystay.c
 *	  How long a worker of the relay stays with a subscription.
 *
 * With nothing to do, it stays for LINGER_MS after the last event, and sleeps until
 * something is published: the next event often comes soon.  With much to do, it
 * stays for SLICE_MS, and then as long as nobody needs its place: another
 * subscription that waits for a worker, or whoever is to drop or copy the database.
 *
 * SIGTERM ends a worker at work at once.  One that sleeps leaves by itself.
 *
 * Locks: ROW EXCLUSIVE on the database, in the middle of a long step, to its end.
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

static instr_time came;
static bool holdsDatabase; /* this step has the database's lock */

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
	holdsDatabase = false;
}

/* ----------------------------------------------------------------
 * At work
 * ----------------------------------------------------------------
 */

/*
 * DatabaseIsClosing tells whether somebody is to drop or copy the database.  The
 * lock that keeps him waiting while we are at an event is given back first: so he
 * gets it, and finds us leaving.
 */
static bool
DatabaseIsClosing(void)
{
	LOCKTAG tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	if (holdsDatabase)
		LockRelease(&tag, RowExclusiveLock, false);
	holdsDatabase = DatabaseIsOpen(MyDatabaseId);
	return !holdsDatabase;
}

/*
 * RelayStayIsOver tells whether it is time to make room, though there be more to do.
 * Needs a transaction, and none within it.
 */
bool
RelayStayIsOver(void)
{
	return WorkerElapsed(came) >= SLICE_MS &&
		   (RegistryOthersWait(RelayWorkers) || DatabaseIsClosing());
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
