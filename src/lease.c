/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Claims that survive commit: their begin, heartbeat, recovery points and
 *	  end, and the test of who owns an operation.
 *
 * A lease in progress is a row of its own kind.  Its token comes from one
 * sequence and never again, so that whoever shows the token of the row is its
 * last owner: one whose lease ran out may still finish, one that was taken
 * over may not.  Time is the clock's at the moment of the call.
 *
 * Locks: the key's, to the end of the transaction, so that a takeover waits
 * for an owner who is at it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xlog.h"
#include "commands/sequence.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "errors.h"
#include "guc.h"
#include "keylock.h"
#include "lease.h"
#include "owntable.h"
#include "stats.h"
#include "wakeup.h"

PG_FUNCTION_INFO_V1(idempotency_renew);
PG_FUNCTION_INFO_V1(idempotency_checkpoint);

/* The longest name of a recovery point. */
#define RECOVERY_POINT_BYTES 255

/* ----------------------------------------------------------------
 * Who owns an operation
 * ----------------------------------------------------------------
 */

/*
 * MakeDurable makes sure that a crash does not set the sequence back behind what
 * it has given out.  The server logs some values ahead, but flushes the log
 * only at a commit, and a token that was told to somebody is out.  One value in
 * 32 costs a flush; for the others there is nothing left to do.
 */
static void
MakeDurable(Relation tokens)
{
	Buffer buffer = ReadBuffer(tokens, 0);
	XLogRecPtr lsn;

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	lsn = BufferGetLSNAtomic(buffer);
	UnlockReleaseBuffer(buffer);
	XLogFlush(lsn);
}

/*
 * NewToken returns a token that no owner of any key of this database ever had,
 * and that none will have again.  Throws 55000 if the sequence was altered.
 */
static int64
NewToken(void)
{
	Relation tokens = OwnSequenceOpen("token", "The fencing of owners");
	int64 token = nextval_internal(RelationGetRelid(tokens), false);

	MakeDurable(tokens);
	relation_close(tokens, NoLock);
	return token;
}

/*
 * LoseLease makes sure that nothing this transaction wrote commits, and throws
 * IK410.
 */
pg_noreturn static void
LoseLease(const KeyName *name, int64 token)
{
	DoomTransaction(name);
	CountEvent(COUNT_STALE_TOKENS);
	ErrorLeaseLost(name, token);
}

/*
 * ShowsToken tells whether "token" is that of the row that a look found.
 */
static bool
ShowsToken(KeyState state, const StoredOutcome *stored, int64 token)
{
	return (state == KEY_LEASED || state == KEY_ABANDONED) && stored->lease.token == token;
}

/*
 * OwnByToken fills "own" from the row of "name", under the key's lock, if its
 * token is "token".  It looks before it waits: who has lost his lease need not
 * wait to hear it.
 */
static void
OwnByToken(const KeyName *name, int64 token, Ownership *own)
{
	StoredOutcome stored;
	KeyState state;

	DoubtTransaction(name);
	state = KeyStoreProbe(name, &stored, &own->seen);
	if (!ShowsToken(state, &stored, token))
		LoseLease(name, token);
	InjectionPoint("owner-lock");
	if (!KeyLockAcquire(name, DefaultWait))
		ErrorInProgress(name);
	InjectionPoint("owner-probe");
	if (!KeyStoreUnchanged(&own->seen))
		state = KeyStoreProbe(name, &stored, &own->seen);
	if (!ShowsToken(state, &stored, token))
		LoseLease(name, token);
	TrustTransaction();

	own->fingerprint = stored.fingerprint;
	own->lease = stored.lease;
}

/*
 * RequireOwnership fills "own" if the caller owns the operation: by an open
 * claim of this transaction where "token" is NULL, or by the token of its
 * lease.  Throws IK410 if he does not, or what a look and a wait may throw, and
 * dooms the transaction in any case: what it wrote has no claim to stand on.
 */
void
RequireOwnership(const KeyName *name, const int64 *token, Ownership *own)
{
	OpenClaim *claim = OpenClaimFind(name);

	memset(own, 0, sizeof(Ownership));
	own->claim = claim;
	if (claim == NULL && token == NULL)
	{
		DoomTransaction(name);
		CountEvent(COUNT_STALE_TOKENS);
		ErrorClaimLost(name);
	}
	/* A transaction that took the operation over has made the token stale. */
	if (token != NULL && claim != NULL && *token != claim->token)
		LoseLease(name, *token);
	if (token != NULL || claim->token != 0)
	{
		OwnByToken(name, token != NULL ? *token : claim->token, own);
		return;
	}
	own->seen = claim->seen;
	own->fingerprint = claim->fingerprint;
	own->lease.retention = claim->retention;
}

/*
 * OwnershipFromArg does RequireOwnership() with the token that argument
 * "tokenArg" passes.
 */
void
OwnershipFromArg(FunctionCallInfo fcinfo, int tokenArg, const KeyName *name, Ownership *own)
{
	int64 token = PG_ARGISNULL(tokenArg) ? 0 : PG_GETARG_INT64(tokenArg);

	RequireOwnership(name, PG_ARGISNULL(tokenArg) ? NULL : &token, own);
}

/* ----------------------------------------------------------------
 * The life of a lease
 * ----------------------------------------------------------------
 */

/*
 * SetTimes sets from when and until when a lease runs, and how long its row is
 * kept if nobody comes back for it.
 */
static void
SetTimes(StoredOutcome *row, const Interval *length)
{
	Lease *lease = &row->lease;

	lease->from = GetCurrentTimestamp();
	lease->until = LeaseEnd(length, lease->from);
	row->expiresAt = RetentionEnd(&lease->retention, lease->until);
}

/*
 * LeaseBegin writes the lease that "request" asks for and was granted: a row
 * of its own for the first attempt, or in place of the former owner's.  The
 * caller holds the key's lock, and has filled in the attempt and the
 * fingerprint.
 */
void
LeaseBegin(const ClaimRequest *request, const KeyVersion *seen, StoredOutcome *stored)
{
	Lease *lease = &stored->lease;
	int parts = LEASE_OWNER | LEASE_TIMES;

	lease->token = NewToken();
	InjectionPoint("lease-write");
	lease->retention = request->retention;
	SetTimes(stored, request->lease);

	if (lease->request == NULL)
	{
		lease->request = request->document;
		parts |= LEASE_REQUEST;
	}
	if (lease->attempt == 1)
		KeyStoreWrite(&request->name, seen, stored);
	else
		KeyStoreChangeLease(&request->name, seen, stored, parts);
}

/*
 * ChangeOwned changes parts of a lease that the caller owns.
 */
static void
ChangeOwned(const KeyName *name, const Ownership *own, const StoredOutcome *row, int parts)
{
	DoubtTransaction(name);
	KeyStoreChangeLease(name, &own->seen, row, parts);
	TrustTransaction();
}

/*
 * LeaseGiveUp lets the next owner begin at once.  A checkpoint stays for him,
 * under a token that nobody has; without one nothing stays.
 */
void
LeaseGiveUp(const KeyName *name, const Ownership *own)
{
	StoredOutcome row = {.lease = own->lease};

	WakeupAfterCommit(name->hash);
	if (own->lease.recoveryPoint == NULL)
	{
		DoubtTransaction(name);
		KeyStoreDelete(name, &own->seen);
		TrustTransaction();
		return;
	}
	row.lease.token = NewToken();
	row.lease.from = GetCurrentTimestamp();
	row.lease.until = DT_NOBEGIN;
	row.expiresAt = RetentionEnd(&row.lease.retention, row.lease.from);
	ChangeOwned(name, own, &row, LEASE_OWNER | LEASE_TIMES);
}

/*
 * OwnedLeaseFromArgs fills "name" from the first two arguments and "row" with
 * the lease whose token the third one passes, and returns what owns it.  The
 * guard opens, as by a claim.  Throws IK410.
 */
static Ownership
OwnedLeaseFromArgs(FunctionCallInfo fcinfo, KeyName *name, StoredOutcome *row)
{
	Ownership own;

	OwnershipFromArg(fcinfo, 2, name, &own);
	if (own.lease.token == 0)
	{
		DoomTransaction(name);
		CountEvent(COUNT_STALE_TOKENS);
		ErrorNoLease(name);
	}
	ScopeMark(name->scope, name->key, true);
	memset(row, 0, sizeof(StoredOutcome));
	row->lease = own.lease;
	return own;
}

/*
 * renew(scope, key, token, lease) RETURNS timestamptz: the heartbeat; the
 * lease runs from now on
 */
Datum
idempotency_renew(PG_FUNCTION_ARGS)
{
	const Interval *length = LeaseFromArg(fcinfo, 3);
	StoredOutcome row;
	Ownership own;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	if (length == NULL)
		ErrorBadArgument("lease is missing",
						 "Pass how long the owner may be silent, such as '30 seconds'.");
	PreventCommandIfReadOnly("idempotency.renew()");
	own = OwnedLeaseFromArgs(fcinfo, &name, &row);
	SetTimes(&row, length);
	ChangeOwned(&name, &own, &row, LEASE_TIMES);
	PG_RETURN_TIMESTAMPTZ(row.lease.until);
}

/*
 * checkpoint(scope, key, token, recovery_point, state): from where the next
 * owner, or this one, goes on
 */
Datum
idempotency_checkpoint(PG_FUNCTION_ARGS)
{
	text *state = PG_ARGISNULL(4) ? NULL : PG_GETARG_TEXT_PP(4);
	StoredOutcome row;
	Ownership own;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	if (PG_ARGISNULL(3) || VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(3)) == 0)
		ErrorBadArgument("recovery point is missing",
						 "Name the step from which the next owner goes on.");
	if (VARSIZE_ANY_EXHDR(PG_GETARG_TEXT_PP(3)) > RECOVERY_POINT_BYTES)
		ErrorBadArgument("recovery point is too long",
						 "Name the step in at most 255 bytes; what it needs goes into the state.");
	if (state != NULL && VARSIZE_ANY_EXHDR(state) > (Size) MaxResponseSize)
		ErrorTooLarge(&name, "state", VARSIZE_ANY_EXHDR(state), MaxResponseSize);
	PreventCommandIfReadOnly("idempotency.checkpoint()");
	own = OwnedLeaseFromArgs(fcinfo, &name, &row);
	row.lease.recoveryPoint = PG_GETARG_TEXT_PP(3);
	row.lease.state = state;
	ChangeOwned(&name, &own, &row, LEASE_CHECKPOINT);
	PG_RETURN_VOID();
}
