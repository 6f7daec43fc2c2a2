/*-------------------------------------------------------------------------
 *
 * keylock.c
 *	  The lock that orders the waiters for one key.
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

#include "miscadmin.h"
#include "utils/resowner.h"

#include "errors.h"
#include "keylock.h"
#include "lockwait.h"
#include "stats.h"

/* pg_advisory_lock() uses the classes 1 and 2; "ID" in ASCII is ours. */
#define KEY_LOCK_CLASS 0x4944

static LOCKTAG
KeyLockTag(const KeyName *name)
{
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (name->hash >> 32), (uint32) name->hash,
						 KEY_LOCK_CLASS);
	return tag;
}

/*
 * TryOrWait acquires the lock, and counts the wait if there is one.
 */
static bool
TryOrWait(const LOCKTAG *tag, int waitMs)
{
	volatile bool acquired = LockWithin(tag, ExclusiveLock, 0);

	if (!acquired && waitMs > 0)
	{
		instr_time began;

		INSTR_TIME_SET_CURRENT(began);
		PG_TRY();
		{
			acquired = LockWithin(tag, ExclusiveLock, waitMs);
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
 * KeyLockAcquire acquires the lock of "name", waiting for at most waitMs.
 * Returns whether it was got.  It then lives until the transaction, or the
 * savepoint, ends.  Throws 53200 when the lock table is full, and what the
 * server throws when a wait is cut short.
 */
bool
KeyLockAcquire(const KeyName *name, int waitMs)
{
	LOCKTAG tag = KeyLockTag(name);
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool acquired = false;

	PG_TRY();
	{
		acquired = TryOrWait(&tag, waitMs);
	}
	PG_CATCH();
	{
		/* The server's hint is right, but does not know the better way out. */
		CurrentResourceOwner = owner;
		if (geterrcode() != ERRCODE_OUT_OF_MEMORY)
			PG_RE_THROW();
		MemoryContextSwitchTo(context);
		FlushErrorState();
		ErrorTooManyClaims(name);
	}
	PG_END_TRY();
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

	LockGiveUp(&tag, ExclusiveLock);
}
