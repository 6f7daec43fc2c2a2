/*-------------------------------------------------------------------------
 *
 * keylock.c
 *	  The lock that orders the waiters for one key, and the bounded wait.
 *
 * The lock is an exclusive heavyweight lock on the hash of (scope, key), in a
 * class of its own beside the advisory locks (pg_locks shows it as "advisory"
 * with objsubid 18756, hence deadlocks are found and log_lock_waits works).
 * It lives until the transaction ends, follows savepoints, and passes to a
 * prepared transaction.  KeyLockRelease() gives it up earlier where nothing
 * was claimed.
 *
 * It decides nothing: the unique index of the key store does.  Two keys with
 * one hash wait for each other in vain, and no more.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/resowner.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"

#include "errors.h"
#include "keylock.h"
#include "stats.h"

/* pg_advisory_lock() uses the classes 1 and 2; "ID" in ASCII is ours. */
#define KEY_LOCK_CLASS 0x4944

/* The timeout that ends a bounded wait; registered at the first one. */
static TimeoutId waitTimeout = MAX_TIMEOUTS;
static volatile sig_atomic_t waitTimedOut = false;

static LOCKTAG
KeyLockTag(const KeyName *name)
{
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (name->hash >> 32), (uint32) name->hash,
						 KEY_LOCK_CLASS);
	return tag;
}

/*
 * LockForTransaction acquires the key's lock for the current (sub)transaction
 * itself, whichever portal runs us, so that KeyLockRelease() finds it under
 * the same owner.  Returns false if it is taken and dontWait.  Throws 53200
 * when the shared lock table is full; waits without bound unless dontWait.
 */
static bool
LockForTransaction(const KeyName *name, bool dontWait)
{
	LOCKTAG tag = KeyLockTag(name);
	ResourceOwner caller = CurrentResourceOwner;
	MemoryContext context = CurrentMemoryContext;
	LockAcquireResult result = LOCKACQUIRE_NOT_AVAIL;

	CurrentResourceOwner = CurTransactionResourceOwner;
	PG_TRY();
	{
		result = LockAcquire(&tag, ExclusiveLock, false, dontWait);
	}
	PG_CATCH();
	{
		/* The server's hint is right, but does not know the better way out. */
		CurrentResourceOwner = caller;
		if (geterrcode() != ERRCODE_OUT_OF_MEMORY)
			PG_RE_THROW();
		MemoryContextSwitchTo(context);
		FlushErrorState();
		ErrorTooManyClaims(name);
	}
	PG_END_TRY();
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
 * LockWithin waits for the key's lock for at most waitMs.  The wait runs in
 * a subtransaction, which takes the half-made lock request away with it when
 * the time is over.  Returns whether the lock was got; every other end of the
 * wait (cancel, statement_timeout, lock_timeout, deadlock) is PostgreSQL's own
 * error.
 */
static bool
LockWithin(const KeyName *name, int waitMs)
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
		acquired = LockForTransaction(name, false);
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
 * KeyLockAcquire acquires the lock of "name", waiting for at most waitMs.
 * Returns whether it was got.  It then lives until the transaction, or the
 * savepoint, ends.  Throws 53200 when the lock table is full, and what the
 * server throws when a wait is cut short.
 */
bool
KeyLockAcquire(const KeyName *name, int waitMs)
{
	volatile bool acquired = LockForTransaction(name, true);

	if (!acquired && waitMs > 0)
	{
		instr_time began;

		INSTR_TIME_SET_CURRENT(began);
		PG_TRY();
		{
			acquired = LockWithin(name, waitMs);
		}
		PG_FINALLY();
		{
			CountWait(began);
		}
		PG_END_TRY();
	}
	return acquired;
}

/*
 * KeyLockRelease gives up a lock that KeyLockAcquire() has just got in this
 * (sub)transaction, so that the waiters behind us need not wait for our end.
 */
void
KeyLockRelease(const KeyName *name)
{
	LOCKTAG tag = KeyLockTag(name);
	ResourceOwner caller = CurrentResourceOwner;

	CurrentResourceOwner = CurTransactionResourceOwner;
	LockRelease(&tag, ExclusiveLock, false);
	CurrentResourceOwner = caller;
}
