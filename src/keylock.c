/*-------------------------------------------------------------------------
 *
 * keylock.c
 *	  The lock that orders the waiters for one key.
 *
 * The lock is an exclusive heavyweight lock on a keyed hash of (scope, key), in a
 * class of its own beside the advisory locks (pg_locks shows it as "advisory"
 * with objsubid 18756, hence deadlocks are found and log_lock_waits works).
 * It lives until the transaction ends, follows savepoints, and passes to a
 * prepared transaction.  KeyLockRelease() gives it up earlier where nothing
 * was claimed.
 *
 * It decides nothing: the unique index of the key store does.  Two keys with
 * one hash wait for each other in vain.  Without the hash's secret no client can
 * look for a key of its own with the lock of another tenant's key.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_control.h"
#include "miscadmin.h"
#include "utils/fmgrprotos.h"
#include "utils/resowner.h"

#include "errors.h"
#include "keylock.h"
#include "lockwait.h"
#include "stats.h"

/* pg_advisory_lock() uses the classes 1 and 2; "ID" in ASCII is ours. */
#define KEY_LOCK_CLASS 0x4944

/*
 * ComputeNumber returns the first 64 bits of the SHA-256 of the cluster's secret, the
 * database, the length of the scope, the scope and the key.  The secret is the random
 * number that the server keeps in its control file to answer logins of unknown roles:
 * no function shows it, standbys have the same, and no dump needs it.
 */
static uint64
ComputeNumber(const KeyName *name)
{
	int32 scopeBytes = VARSIZE_ANY_EXHDR(name->scope);
	int32 keyBytes = VARSIZE_ANY_EXHDR(name->key);
	Size size =
		VARHDRSZ + MOCK_AUTH_NONCE_LEN + sizeof(Oid) + sizeof(int32) + scopeBytes + keyBytes;
	bytea *message = palloc(size);
	char *at = VARDATA(message);
	bytea *digest;
	uint64 number;

	SET_VARSIZE(message, size);
	memcpy(at, GetMockAuthenticationNonce(), MOCK_AUTH_NONCE_LEN);
	at += MOCK_AUTH_NONCE_LEN;
	memcpy(at, &MyDatabaseId, sizeof(Oid));
	at += sizeof(Oid);
	memcpy(at, &scopeBytes, sizeof(int32));
	at += sizeof(int32);
	memcpy(at, VARDATA_ANY(name->scope), scopeBytes);
	memcpy(at + scopeBytes, VARDATA_ANY(name->key), keyBytes);

	digest = DatumGetByteaPP(DirectFunctionCall1(sha256_bytea, PointerGetDatum(message)));
	memcpy(&number, VARDATA_ANY(digest), sizeof(number));
	pfree(message);
	pfree(digest);
	return number;
}

/*
 * KeyLockNumber returns the number of the lock of "name", and keeps it there.
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
