/*-------------------------------------------------------------------------
 *
 * base/lockwait.c
 *	  Waiting for a heavyweight lock for a limited time.
 *
 * The server waits without limit, or for the session's lock_timeout.  Here a timeout
 * ends the wait, in the way that a cancel does.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/latch.h"
#include "utils/resowner.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "base/lockwait.h"
#include "base/subtransaction.h"

/* The timeout that ends a bounded wait; registered at the first one. */
static TimeoutId waitTimeout = MAX_TIMEOUTS;
static volatile sig_atomic_t waitTimedOut = false;

/*
 * LockForTransaction acquires a lock for the current (sub)transaction, whichever portal
 * runs, so that LockReleaseEarly() finds it under the same owner.  Returns false if the lock
 * is not free and dontWait; waits without limit otherwise.
 */
static bool
LockForTransaction(const LOCKTAG *tag, LOCKMODE mode, bool dontWait)
{
	ResourceOwner caller = CurrentResourceOwner;
	LockAcquireResult result;

	/* code that catches an error restores the owner */
	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(tag, mode, false, dontWait);
	CurrentResourceOwner = caller;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

/*
 * WaitTimeoutHandler ends the wait as a cancel does, the only interrupt that ends a sleep
 * in the lock manager.  A cancel that came before keeps its meaning; one that comes
 * after, before the sleep has ended, is ignored, as one that comes right after the
 * statement would be.  Runs in a signal handler.
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
 * StopWaiting disarms the timeout, and clears its cancel if that is still pending.
 * Returns whether the timeout had fired.
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
 * StatementTimeoutPassed tells whether statement_timeout, which cancels in the same way,
 * has passed too; it takes precedence.
 */
static bool
StatementTimeoutPassed(TimestampTz finish)
{
	return finish != 0 && GetCurrentTimestamp() >= finish;
}

typedef struct Wait
{
	const LOCKTAG *tag;
	LOCKMODE mode;
	int ms;
	bool acquired;
} Wait;

/*
 * WaitInSubtransaction waits for the lock until the timeout cancels it.
 */
static void
WaitInSubtransaction(void *argument)
{
	Wait *wait = argument;

	waitTimedOut = false;
	enable_timeout_after(waitTimeout, wait->ms);
	wait->acquired = LockForTransaction(wait->tag, wait->mode, false);
	StopWaiting();
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
	Wait wait = {.tag = tag, .mode = mode, .ms = waitMs};
	TimestampTz statementFinish =
		get_timeout_active(STATEMENT_TIMEOUT) ? get_timeout_finish_time(STATEMENT_TIMEOUT) : 0;
	ErrorData *error;

	if (waitTimeout == MAX_TIMEOUTS)
		waitTimeout = RegisterTimeout(USER_TIMEOUT, WaitTimeoutHandler);
	error = SubtransactionRun(WaitInSubtransaction, &wait);
	if (error == NULL)
		return wait.acquired;
	if (!StopWaiting() || error->sqlerrcode != ERRCODE_QUERY_CANCELED ||
		StatementTimeoutPassed(statementFinish))
		ReThrowError(error);
	FreeErrorData(error);
	return false;
}

/*
 * LockWithin acquires a lock until the transaction, or the savepoint, ends, waiting for
 * at most waitMs.  Returns whether it did.  Throws what the server throws when a wait is
 * interrupted, and 53200 when the shared lock table is full.
 */
bool
LockWithin(const LOCKTAG *tag, LOCKMODE mode, int waitMs)
{
	return LockForTransaction(tag, mode, true) || (waitMs > 0 && WaitFor(tag, mode, waitMs));
}

/*
 * LockReleaseEarly releases a lock that LockWithin() acquired in this (sub)transaction.
 */
void
LockReleaseEarly(const LOCKTAG *tag, LOCKMODE mode)
{
	ResourceOwner caller = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	LockRelease(tag, mode, false);
	CurrentResourceOwner = caller;
}
