/*-------------------------------------------------------------------------
 *
 * keys/lockwait.c
 *	  Waiting for a heavyweight lock for a limited time.
 *
 * The server waits without limit, or for lock_timeout, which is set here for one wait.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/resowner.h"

#include "base/subtransaction.h"
#include "keys/lockwait.h"

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

typedef struct Wait
{
	const LOCKTAG *tag;
	LOCKMODE mode;
	int ms;
} Wait;

static void
WaitInSubtransaction(void *argument)
{
	const Wait *wait = argument;
	int ofSession = LockTimeout;

	PG_TRY();
	{
		LockTimeout = wait->ms;
		(void) LockForTransaction(wait->tag, wait->mode, false);
		/* the time can end just as the lock is granted: its cancel must not outlive the wait */
		CHECK_FOR_INTERRUPTS();
	}
	PG_FINALLY();
	{
		LockTimeout = ofSession;
	}
	PG_END_TRY();
}

/*
 * WaitFor waits for the lock for at most waitMs.  The wait runs in a subtransaction, which
 * takes the half-made lock request away with it when the time is over.  Returns whether the
 * lock was got; every other end of the wait (cancel, statement_timeout, a shorter
 * lock_timeout, deadlock) is PostgreSQL's own error.
 */
static bool
WaitFor(const LOCKTAG *tag, LOCKMODE mode, int waitMs)
{
	Wait wait = {tag, mode, waitMs};
	ErrorData *error;

	if (LockTimeout > 0 && LockTimeout <= waitMs)
		return LockForTransaction(tag, mode, false);
	error = SubtransactionRun(WaitInSubtransaction, &wait);
	if (error == NULL)
		return true;
	if (error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE)
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
