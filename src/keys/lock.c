/*-------------------------------------------------------------------------
 *
 * keys/lock.c
 *	  The lock of a key.
 *
 * An exclusive heavyweight lock on a keyed hash of (scope, key), in a class of its own
 * beside the advisory locks: pg_locks shows it as "advisory" with objsubid 18756, and
 * the deadlock detector and log_lock_waits cover it.  It is held until the transaction
 * ends, follows savepoints, and passes to a prepared transaction.
 *
 * Two keys with the same hash wait for each other, without other harm.  The hash has a
 * secret, so that no client can find a key that shares the lock of another tenant's.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/twophase.h"
#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/sinvaladt.h"
#include "utils/resowner.h"

#include "base/digest.h"
#include "base/errors.h"
#include "base/subtransaction.h"
#include "keys/lock.h"
#include "server/stats.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_lock_number);

/* "ID" in ASCII; pg_advisory_lock() uses the classes 1 and 2. */
#define KEY_LOCK_CLASS 0x4944

/*
 * KeyLockNumber returns the number of the lock of "name", and stores it there: the first 64 bits
 * of the SHA-256 of the cluster's secret, the database, the length of the scope, the scope and
 * the key.  The secret is the random number in the control file with which the server answers
 * logins of unknown roles: no function shows it, and standbys have the same.
 */
uint64
KeyLockNumber(const KeyName *name)
{
	int32 scopeBytes = VARSIZE_ANY_EXHDR(name->scope);
	StringInfoData message;
	uint8 digest[PG_SHA256_DIGEST_LENGTH];

	if (name->lockNumber != 0)
		return name->lockNumber;
	initStringInfo(&message);
	appendBinaryStringInfo(&message, GetMockAuthenticationNonce(), MOCK_AUTH_NONCE_LEN);
	appendBinaryStringInfo(&message, (char *) &MyDatabaseId, sizeof(Oid));
	appendBinaryStringInfo(&message, (char *) &scopeBytes, sizeof(int32));
	appendBinaryStringInfo(&message, VARDATA_ANY(name->scope), scopeBytes);
	appendBinaryStringInfo(&message, VARDATA_ANY(name->key), VARSIZE_ANY_EXHDR(name->key));

	DigestCompute(message.data, message.len, digest);
	memcpy(&unconstify(KeyName *, name)->lockNumber, digest, sizeof(uint64));
	pfree(message.data);
	return name->lockNumber;
}

static LOCKTAG
KeyLockTag(const KeyName *name)
{
	uint64 number = KeyLockNumber(name);
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (number >> 32), (uint32) number,
						 KEY_LOCK_CLASS);
	return tag;
}

/*
 * LockForTransaction acquires a lock for the current (sub)transaction, whichever portal runs, so
 * that KeyLockRelease() finds it under the same owner.  Returns false if the lock is not free and
 * dontWait; waits without limit otherwise.
 */
static bool
LockForTransaction(const LOCKTAG *tag, bool dontWait)
{
	ResourceOwner caller = CurrentResourceOwner;
	LockAcquireResult result;

	/* code that catches an error restores the owner */
	CurrentResourceOwner = CurTransactionResourceOwner;
	result = LockAcquire(tag, ExclusiveLock, false, dontWait);
	CurrentResourceOwner = caller;
	return result != LOCKACQUIRE_NOT_AVAIL;
}

typedef struct Wait
{
	const LOCKTAG *tag;
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
		(void) LockForTransaction(wait->tag, false);
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
 * WaitFor waits for the lock for at most waitMs.  The server waits without limit, or for
 * lock_timeout, which is set here for one wait.  The wait runs in a subtransaction, which
 * takes the half-made lock request away with it when the time is over.  Returns whether the
 * lock was got; every other end of the wait (cancel, statement_timeout, a shorter
 * lock_timeout, deadlock) is PostgreSQL's own error.
 */
static bool
WaitFor(const LOCKTAG *tag, int waitMs)
{
	Wait wait = {tag, waitMs};
	ErrorData *error;

	if (LockTimeout > 0 && LockTimeout <= waitMs)
		return LockForTransaction(tag, false);
	error = SubtransactionRun(WaitInSubtransaction, &wait);
	if (error == NULL)
		return true;
	if (error->sqlerrcode != ERRCODE_LOCK_NOT_AVAILABLE)
		ReThrowError(error);
	FreeErrorData(error);
	return false;
}

static void
CountWait(instr_time began)
{
	if (INSTR_TIME_IS_ZERO(began))
		return;
	Count(COUNT_WAITS);
	CountWaitTime(began);
}

/*
 * KeyLockAcquire acquires the lock of "name" until the transaction, or the savepoint,
 * ends, waiting for at most waitMs.  Returns whether it did.  Throws 53200 when the
 * lock table is full, and what the server throws when a wait is interrupted.
 */
bool
KeyLockAcquire(const KeyName *name, int waitMs)
{
	LOCKTAG tag = KeyLockTag(name);
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool acquired = false;
	volatile instr_time began;

	INSTR_TIME_SET_ZERO(began);
	PG_TRY();
	{
		acquired = LockForTransaction(&tag, true);
		if (!acquired && waitMs > 0)
		{
			instr_time now;

			INSTR_TIME_SET_CURRENT(now);
			began = now;
			acquired = WaitFor(&tag, waitMs);
		}
	}
	PG_CATCH();
	{
		CountWait(began);
		/* Replace the server's hint, which does not mention once_many() */
		CurrentResourceOwner = owner;
		if (geterrcode() != ERRCODE_OUT_OF_MEMORY)
			PG_RE_THROW();
		MemoryContextSwitchTo(context);
		FlushErrorState();
		ereport(
			ERROR,
			(errcode(ERRCODE_OUT_OF_MEMORY), errmsg("too many idempotency claims at once"),
			 DetailName(name),
			 errhint("Each claim holds a lock until its transaction ends. Claim fewer keys in one "
					 "transaction, use idempotency.once_many(), or increase "
					 "max_locks_per_transaction.")));
	}
	PG_END_TRY();
	CountWait(began);
	return acquired;
}

/*
 * KeyLockRelease releases a lock that KeyLockAcquire() acquired in this (sub)transaction,
 * so that other waiters need not wait until it ends.
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

/*
 * KeyLockRefused reports IK409: another transaction holds the lock of the key.  Only the server's
 * log names its process, or the prepared transaction, unless it has ended in the meantime.
 */
void
KeyLockRefused(const KeyName *name)
{
	LOCKTAG tag = KeyLockTag(name);
	int count;
	VirtualTransactionId *holders = GetLockConflicts(&tag, ExclusiveLock, &count);
	TransactionId prepared;
	PGPROC *process;
	bool more;

	if (count == 0)
		ErrorInProgress(name, 0, NULL);

	/* A prepared transaction keeps the number of its session, which another one can have now */
	prepared = TwoPhaseGetXidByVirtualXID(holders[0], &more);
	if (TransactionIdIsValid(prepared))
		ErrorInProgress(name, 0,
						psprintf("The prepared transaction with ID %u holds it.", prepared));
	process = VirtualTransactionGetProc(holders[0]);
	ErrorInProgress(name, 0,
					process == NULL ? NULL : psprintf("Process %d holds it.", process->pid));
}

/*
 * lock_number(scope, key) returns the number of the lock of the key as pg_locks has it: classid is
 * its upper half, objid the lower one.  For holders(); no role has the privilege to call it.
 */
Datum
idempotency_lock_number(PG_FUNCTION_ARGS)
{
	KeyName name;

	KeyNameFromArgs(fcinfo, &name);
	PG_RETURN_INT64((int64) KeyLockNumber(&name));
}
