/*-------------------------------------------------------------------------
 *
 * lockwait.c
 *	  Heavyweight locks of our own, with an end to the wait for them.
 *
 * The server waits for a lock without bound, or for lock_timeout, which is the
 * session's.  Ours may end sooner, by a timeout that works as a cancel does.
 *
 * Locks: the caller's lock, to the end of the transaction or savepoint.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/resowner.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "lockwait.h"

/* The timeout that ends a bounded wait; registered at the first one. */
static TimeoutId waitTimeout = MAX_TIMEOUTS;
static volatile sig_atomic_t waitTimedOut = false;

/*
 * LockForTransaction acquires a lock for the current (sub)transaction itself,
 * whichever portal runs us, so that LockGiveUp() finds it under the same owner.
 * Returns false if it is taken and dontWait; waits without bound otherwise.
 */
static bool
LockForTransaction(const LOCKTAG *tag, LOCKMODE mode, bool dontWait)
{
	ResourceOwner caller = CurrentResourceOwner;
	LockAcquireResult result;

	/* Whoever catches an error sets the owner himself. */
	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(tag, mode, false, dontWait);
	CurrentResourceOwner = caller;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * WaitTimeoutHandler ends the wait in the way a cancel does: it is the one
 * interruption that a sleep in the lock manager obeys.  A cancel that came
 * first keeps its meaning; one that comes after, before the sleep has ended,
 * is taken for ours, as one that comes right after the answer would be lost.
 * Runs in a signal handler.
 */
static void
WaitTimeoutHandler(void)
{
	if (QueryCancelPending)
		return;
	waitTimedOut = true;
	QueryCancelPending = true;
	InterruptPending = true;
	SetLatch(MyLatch);
}

/*
 * StopWaiting disarms the timeout, and takes back a cancel of its own that
 * nobody has served.  Returns whether the timeout had fired.
 */
static bool
StopWaiting(void)
{
	bool fired;

	disable_timeout(waitTimeout, false);
	fired = waitTimedOut;
	if (fired)
		QueryCancelPending = false;
	waitTimedOut = false;
	return fired;
}

/*
 * StatementTimeoutPassed tells whether statement_timeout, which cancels in
 * the same way, is over as well; it wins.
 */
static bool
StatementTimeoutPassed(TimestampTz finish)
{
	return finish != 0 && GetCurrentTimestamp() >= finish;
}

/*
 * WaitFor waits for the lock for at most waitMs.  The wait runs in a
 * subtransaction, which takes the half-made lock request away with it when
 * the time is over.  Returns whether the lock was got; every other end of the
 * wait (cancel, statement_timeout, lock_timeout, deadlock) is PostgreSQL's own
 * error.
 */
static bool
WaitFor(const LOCKTAG *tag, LOCKMODE mode, int waitMs)
{
	MemoryContext callerContext = CurrentMemoryContext;
	ResourceOwner callerOwner = CurrentResourceOwner;
	TimestampTz statementFinish =
		get_timeout_active(STATEMENT_TIMEOUT) ? get_timeout_finish_time(STATEMENT_TIMEOUT) : 0;
	volatile bool acquired = false;

	if (waitTimeout == MAX_TIMEOUTS)
		waitTimeout = RegisterTimeout(USER_TIMEOUT, WaitTimeoutHandler);

	BeginInternalSubTransaction(NULL);
	PG_TRY();
	{
		waitTimedOut = false;
		enable_timeout_after(waitTimeout, waitMs);
		acquired = LockForTransaction(tag, mode, false);
		StopWaiting();
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		bool fired = StopWaiting();
		ErrorData *error;

		MemoryContextSwitchTo(callerContext);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(callerContext);
		CurrentResourceOwner = callerOwner;

		if (!fired || error->sqlerrcode != ERRCODE_QUERY_CANCELED ||
			StatementTimeoutPassed(statementFinish))
			ReThrowError(error);
		FreeErrorData(error);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(callerContext);
	CurrentResourceOwner = callerOwner;

	return acquired;
}

/*
 * LockWithin acquires a lock, waiting for at most waitMs.  Returns whether it was
 * got.  It then lives until the transaction, or the savepoint, ends.  Throws what
 * the server throws when a wait is cut short, and 53200 when the shared lock table
 * is full.
 */
bool
LockWithin(const LOCKTAG *tag, LOCKMODE mode, int waitMs)
{
	return LockForTransaction(tag, mode, true) || (waitMs > 0 && WaitFor(tag, mode, waitMs));
}

/*
 * LockGiveUp gives up a lock that LockWithin() has just got in this
 * (sub)transaction.
 */
void
LockGiveUp(const LOCKTAG *tag, LOCKMODE mode)
{
	ResourceOwner caller = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	LockRelease(tag, mode, false);
	CurrentResourceOwner = caller;
}
