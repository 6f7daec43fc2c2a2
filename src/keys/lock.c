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

#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/resowner.h"

#include "base/digest.h"
#include "base/errors.h"
#include "keys/lock.h"
#include "keys/lockwait.h"
#include "server/stats.h"

/* "ID" in ASCII; pg_advisory_lock() uses the classes 1 and 2. */
#define KEY_LOCK_CLASS 0x4944

/*
 * ComputeNumber returns the first 64 bits of the SHA-256 of the cluster's secret, the
 * database, the length of the scope, the scope and the key.  The secret is the random
 * number in the control file with which the server answers logins of unknown roles: no
 * function shows it, and standbys have the same.
 */
static uint64
ComputeNumber(const KeyName *name)
{
	int32 scopeBytes = VARSIZE_ANY_EXHDR(name->scope);
	StringInfoData message;
	uint8 digest[PG_SHA256_DIGEST_LENGTH];
	uint64 number;

	initStringInfo(&message);
	appendBinaryStringInfo(&message, GetMockAuthenticationNonce(), MOCK_AUTH_NONCE_LEN);
	appendBinaryStringInfo(&message, (char *) &MyDatabaseId, sizeof(Oid));
	appendBinaryStringInfo(&message, (char *) &scopeBytes, sizeof(int32));
	appendBinaryStringInfo(&message, VARDATA_ANY(name->scope), scopeBytes);
	appendBinaryStringInfo(&message, VARDATA_ANY(name->key), VARSIZE_ANY_EXHDR(name->key));

	DigestCompute(message.data, message.len, digest);
	memcpy(&number, digest, sizeof(number));
	pfree(message.data);
	return number;
}

/*
 * KeyLockNumber returns the number of the lock of "name", and stores it there.
 */
uint64
KeyLockNumber(const KeyName *name)
{
	if (name->lock == 0)
		unconstify(KeyName *, name)->lock = ComputeNumber(name);
	return name->lock;
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
		acquired = LockWithin(&tag, ExclusiveLock, 0);
		if (!acquired && waitMs > 0)
		{
			instr_time now;

			INSTR_TIME_SET_CURRENT(now);
			began = now;
			acquired = LockWithin(&tag, ExclusiveLock, waitMs);
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

	LockReleaseEarly(&tag, ExclusiveLock);
}
