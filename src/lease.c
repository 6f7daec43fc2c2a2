/*-------------------------------------------------------------------------
 *
 * lease.c
 *	  Claims that survive commit: their begin, heartbeat, recovery points and
 *	  end, and the test of ownership.
 *
 * A lease in progress is a row of its own kind.  Its token comes from one
 * sequence and is never drawn again, so that a caller with the token of the row is its
 * last owner: after the lease has expired it may still finish, after a
 * takeover it may not.  Time is the clock's at the moment of the call.
 *
 * Locks: the key's, to the end of the transaction, so that a takeover waits
 * for an owner that is writing.
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
 * IK410.  A call that comes after the same owner has finished, such as a last
 * heartbeat, is not counted: no other owner has the operation.
 */
pg_noreturn static void
LoseLease(const KeyName *name, int64 token, bool finished)
{
	DoomTransaction(name, ERRCODE_IDEMPOTENCY_CLAIM_LOST);
	if (!finished)
		CountEvent(COUNT_STALE_TOKENS);
	ErrorLeaseLost(name, token);
}

/*
 * LackClaim makes sure that nothing this transaction wrote commits.  The caller
 * throws IK412 next.
 */
static void
LackClaim(const KeyName *name)
{
	DoomTransaction(name, ERRCODE_IDEMPOTENCY_NO_CLAIM);
	CountEvent(COUNT_STALE_TOKENS);
}

/*
 * RequireToken throws IK410 unless "token" is that of the lease in progress that a
 * look found.
 */
static void
RequireToken(const KeyName *name, KeyState state, const StoredOutcome *stored, int64 token)
{
	if ((state != KEY_LEASED && state != KEY_ABANDONED) || stored->lease.token != token)
		LoseLease(name, token, state == KEY_STORED && stored->finishedBy == token);
}

/*
 * OwnByToken fills "own" from the row of "name", under the key's lock, if its
 * token is "token".  It looks before it waits: a former owner need not wait to
 * be refused.
 */
static void
OwnByToken(const KeyName *name, int64 token, Ownership *own)
{
	StoredOutcome stored;
	KeyState state = KeyStoreProbe(name, &stored, &own->seen);

	RequireToken(name, state, &stored, token);
	InjectionPoint("owner-lock");
	if (!KeyLockAcquire(name, DefaultWait))
		ErrorInProgress(name);
	InjectionPoint("owner-probe");
	if (!KeyStoreUnchanged(&own->seen))
		state = KeyStoreProbe(name, &stored, &own->seen);
	RequireToken(name, state, &stored, token);

	own->fingerprint = stored.fingerprint;
	own->lease = stored.lease;
}

/*
 * RequireOwnership fills "own" if the caller owns the operation: by an open
 * claim of this transaction where "token" is NULL, or by the token of its
 * lease.  Throws IK410 or IK412 if not, which the transaction cannot survive, or what a
 * look and a wait may throw.
 */
void
RequireOwnership(const KeyName *name, const int64 *token, Ownership *own)
{
	OpenClaim *claim = OpenClaimFind(name);

	memset(own, 0, sizeof(Ownership));
	own->claim = claim;
	if (claim == NULL && token == NULL)
	{
		LackClaim(name);
		ErrorNoClaim(name);
	}
	/* A transaction that took the operation over has made the token stale. */
	if (token != NULL && claim != NULL && *token != claim->token)
		LoseLease(name, *token, false);
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
 * OwnerCall runs "body" for the owner of the operation that the first two arguments
 * name; argument "tokenArg" is the token of its lease, or NULL for a claim of this
 * transaction.  The token stands unproven from here until the body has returned:
 * whatever fails in between, and wherever that is caught, the transaction
 * cannot commit before another call with the token succeeds.  Throws 25006, IK400, 42501,
 * what RequireOwnership() does, and what the body does.
 */
Datum
OwnerCall(FunctionCallInfo fcinfo, int tokenArg, const char *function, OwnerBody body)
{
	bool byToken = !PG_ARGISNULL(tokenArg);
	int64 token = byToken ? PG_GETARG_INT64(tokenArg) : 0;
	Ownership own;
	KeyName name;
	Datum result;

	if (byToken)
		TokenPassed(token, NULL);
	PreventCommandIfReadOnly(function);
	KeyNameFromArgs(fcinfo, 0, &name);
	if (byToken)
		TokenPassed(token, &name);
	RequireOwnership(&name, byToken ? &token : NULL, &own);
	result = body(fcinfo, &name, &own);
	if (byToken)
		TokenProven(token);
	return result;
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
	TokenGranted(lease->token);
}

/*
 * LeaseGiveUp lets the next owner begin at once.  A checkpoint stays for it,
 * under a token that no owner has; without one nothing stays.
 */
void
LeaseGiveUp(const KeyName *name, const Ownership *own)
{
	StoredOutcome row = {.lease = own->lease};

	WakeupAfterCommit(KeyLockNumber(name));
	if (own->lease.recoveryPoint == NULL)
	{
		KeyStoreDelete(name, &own->seen);
		return;
	}
	row.lease.token = NewToken();
	row.lease.from = GetCurrentTimestamp();
	row.lease.until = DT_NOBEGIN;
	row.expiresAt = RetentionEnd(&row.lease.retention, row.lease.from);
	KeyStoreChangeLease(name, &own->seen, &row, LEASE_OWNER | LEASE_TIMES);
}

/*
 * RequireLease throws IK412 if the caller owns the operation without a lease.
 * Otherwise the guard opens, as by a claim, and "row" becomes the lease.
 */
static void
RequireLease(const KeyName *name, const Ownership *own, StoredOutcome *row)
{
	if (own->lease.token == 0)
	{
		LackClaim(name);
		ErrorNoLease(name);
	}
	ScopeMark(name->scope, name->key, true);
	memset(row, 0, sizeof(StoredOutcome));
	row->lease = own->lease;
}

static Datum
Renew(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	const Interval *length = LeaseFromArg(fcinfo, 3);
	StoredOutcome row;

	if (length == NULL)
		ErrorBadArgument("lease is missing",
						 "Pass how long the owner may be silent, such as '30 seconds'.");
	RequireLease(name, own, &row);
	SetTimes(&row, length);
	KeyStoreChangeLease(name, &own->seen, &row, LEASE_TIMES);
	PG_RETURN_TIMESTAMPTZ(row.lease.until);
}

/*
 * renew(scope, key, token, lease) RETURNS timestamptz: the heartbeat; the
 * lease runs from now on
 */
Datum
idempotency_renew(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 2, "idempotency.renew()", Renew);
}

static Datum
Checkpoint(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	text *point = PG_ARGISNULL(3) ? NULL : PG_GETARG_TEXT_PP(3);
	text *state = PG_ARGISNULL(4) ? NULL : PG_GETARG_TEXT_PP(4);
	StoredOutcome row;

	if (point == NULL || VARSIZE_ANY_EXHDR(point) == 0)
		ErrorBadArgument("recovery point is missing",
						 "Name the step from which the next owner goes on.");
	if (VARSIZE_ANY_EXHDR(point) > RECOVERY_POINT_BYTES)
		ErrorBadArgument("recovery point is too long",
						 "Name the step in at most 255 bytes; what it needs goes into the state.");
	if (state != NULL && VARSIZE_ANY_EXHDR(state) > (Size) MaxResponseSize)
		ErrorTooLarge(name, "state", VARSIZE_ANY_EXHDR(state), MaxResponseSize);
	RequireLease(name, own, &row);
	row.lease.recoveryPoint = point;
	row.lease.state = state;
	KeyStoreChangeLease(name, &own->seen, &row, LEASE_CHECKPOINT);
	PG_RETURN_VOID();
}

/*
 * checkpoint(scope, key, token, recovery_point, state): from where the next
 * owner, or this one, goes on
 */
Datum
idempotency_checkpoint(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 2, "idempotency.checkpoint()", Checkpoint);
}
