/*-------------------------------------------------------------------------
 *
 * keys/lease.c
 *	  Leases (claims that survive commit), and the test of ownership.
 *
 * README describes the states of a lease, the token and the locks.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xlog.h"
#include "commands/sequence.h"
#include "common/int.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "keys/lease.h"
#include "keys/lock.h"
#include "keys/wakeup.h"
#include "query/reevaluation.h"
#include "query/relation.h"
#include "request/request.h"
#include "server/stats.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_renew);
PG_FUNCTION_INFO_V1(idempotency_checkpoint);

/* The longest name of a recovery point. */
#define RECOVERY_POINT_BYTES 255

/* ----------------------------------------------------------------
 * Ownership
 * ----------------------------------------------------------------
 */

/*
 * MakeDurable flushes the WAL of the sequence: after a crash the sequence must not
 * return a value again that a client has received.  The server logs 32 values ahead
 * but flushes at commit only, so that one token in 32 costs a flush.
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
 * NewToken returns a token that no other owner of a key of this database has, has had
 * or will have, and that no other client can compute: a number between two values of the
 * sequence, by chance.  Throws 55000 if the sequence was altered.
 */
static int64
NewToken(void)
{
	int64 increment;
	Relation tokens = ExtensionSequenceOpen("token", "The fencing of owners", &increment);
	int64 token = nextval_internal(RelationGetRelid(tokens), false);
	uint64 random;

	MakeDurable(tokens);
	relation_close(tokens, NoLock);
	if (!pg_strong_random(&random, sizeof(random)))
		elog(ERROR, "could not generate random values");
	if (pg_add_s64_overflow(token, (int64) (random % (uint64) increment), &token))
		token = PG_INT64_MAX; /* nextval() throws from the next call on */
	return token;
}

/*
 * ErrorLeaseLost reports a token that is not, or no longer, that of the key's lease,
 * and prevents the commit of the transaction.  A call after the same owner finished,
 * such as a last heartbeat, is not counted: no other owner has the operation.
 */
pg_noreturn static void
ErrorLeaseLost(const KeyName *name, int64 token, bool finished)
{
	PreventCommit(name, ERRCODE_IDEMPOTENCY_CLAIM_LOST);
	if (!finished)
		Count(COUNT_STALE_TOKENS);
	ereport(ERROR,
			(errcode(ERRCODE_IDEMPOTENCY_CLAIM_LOST),
			 errmsg("the lease on this idempotency key is lost"), DetailToken(name, token),
			 errhint("Another owner took over, or the operation is finished or forgotten. Roll "
					 "back, and begin the retry with idempotency.claim().")));
}

/*
 * ErrorNoClaim reports that the caller has no claim, or no lease, and prevents the
 * commit of the transaction.
 */
pg_noreturn static void
ErrorNoClaim(const KeyName *name, const char *message, const char *hint)
{
	PreventCommit(name, ERRCODE_IDEMPOTENCY_NO_CLAIM);
	Count(COUNT_STALE_TOKENS);
	ereport(ERROR, (errcode(ERRCODE_IDEMPOTENCY_NO_CLAIM), errmsg("%s", message), DetailName(name),
					errhint("%s", hint)));
}

/*
 * RequireToken throws IK410 unless "token" is that of the lease in progress that a
 * probe found.
 */
static void
RequireToken(const KeyName *name, KeyState state, const KeyRecord *record, int64 token)
{
	if ((state != KEY_LEASED && state != KEY_ABANDONED) || record->lease.token != token)
		ErrorLeaseLost(name, token, state == KEY_STORED && record->finishedBy == token);
}

/*
 * OwnByToken fills "own" from the row of "name", under the key's lock, if its token is
 * "token"; throws IK410 if not, and IK409 if the lock is not free in time.
 */
static void
OwnByToken(const KeyName *name, int64 token, Ownership *own)
{
	KeyRecord record;
	KeyState state;

	/* Refuse a former owner without a wait */
	state = KeyStoreProbe(name, &record, &own->seen);
	RequireToken(name, state, &record, token);

	/* Lock the key */
	InjectionPoint("owner-lock");
	if (!KeyLockAcquire(name, SettingNumber(&WaitSetting, name->scope)))
		KeyLockRefused(name);

	/* Compare the token of the locked row */
	InjectionPoint("owner-probe");
	if (!KeyStoreUnchanged(&own->seen))
		state = KeyStoreProbe(name, &record, &own->seen);
	RequireToken(name, state, &record, token);

	own->fingerprint = record.fingerprint;
	own->lease = record.lease;
}

/*
 * RequireOwnership fills "own" if the caller owns the operation: by an open claim of
 * this transaction if "token" is NULL, otherwise by the token of its lease.  If not,
 * throws IK410 or IK412, which prevent the commit; and what KeyStoreProbe() and
 * KeyLockAcquire() throw.
 */
void
RequireOwnership(const KeyName *name, const int64 *token, Ownership *own)
{
	OpenClaim *claim = OpenClaimFind(name);

	memset(own, 0, sizeof(Ownership));
	own->claim = claim;
	if (claim == NULL && token == NULL)
		ErrorNoClaim(
			name, "this transaction holds no claim on this idempotency key",
			ScopeReplayed(name)
				? "idempotency.claim() replayed a stored answer: return it and write nothing."
				: "Call idempotency.claim() in the same transaction first, or pass the "
				  "token of the lease.");
	/* This transaction took the operation over, which made the token stale. */
	if (token != NULL && claim != NULL && *token != claim->token)
		ErrorLeaseLost(name, *token, false);
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
 * transaction, whose lease has its token too.  The token is unproven from the entry until
 * the body has returned, even if an earlier call had proven it: whatever fails, and
 * wherever the error is caught, the transaction cannot commit unless another call with
 * the token succeeds.  Throws 25006, IK400, 42501, and what RequireOwnership() and the
 * body throw.
 */
Datum
OwnerCall(FunctionCallInfo fcinfo, int tokenArg, const char *function, OwnerBody body)
{
	bool leased = !PG_ARGISNULL(tokenArg);
	int64 token = leased ? PG_GETARG_INT64(tokenArg) : 0;
	Ownership own;
	KeyName name;
	Datum result;

	if (leased)
		TokenPassed(token, NULL);
	PreventUnsafeCall(fcinfo, function);
	KeyNameFromArgs(fcinfo, &name);
	if (!leased)
	{
		const OpenClaim *claim = OpenClaimFind(&name);

		token = claim == NULL ? 0 : claim->token;
		leased = token != 0;
	}
	if (leased)
		TokenPassed(token, &name);
	RequireOwnership(&name, leased ? &token : NULL, &own);
	result = body(fcinfo, &name, &own);
	if (leased)
		TokenProven(token);
	return result;
}

/* ----------------------------------------------------------------
 * Begin, heartbeat, checkpoint and end
 * ----------------------------------------------------------------
 */

/*
 * SetTimes sets the start and the end of a lease, and when its row expires unless the
 * operation is claimed again.
 */
static void
SetTimes(KeyRecord *record, const Interval *length)
{
	Lease *lease = &record->lease;

	lease->from = GetCurrentTimestamp();
	lease->until = LeaseEnd(length, lease->from);
	record->expiresAt = RetentionEnd(&lease->retention, lease->until);
}

/*
 * LeaseBegin writes the lease of a granted claim: at the first attempt the whole row, over an
 * expired one if "seen" has it; later only its parts, into the row "seen".  The caller holds the
 * key's lock, and has set the attempt and the fingerprint.
 */
void
LeaseBegin(const ClaimRequest *request, const KeyVersion *seen, KeyRecord *record)
{
	Lease *lease = &record->lease;
	int parts = LEASE_OWNER | LEASE_TIMES;

	/* Set token, times and request */
	lease->token = NewToken();
	InjectionPoint("lease-write");
	lease->retention = request->retention;
	SetTimes(record, request->lease);
	if (lease->request == NULL)
	{
		lease->request = request->document;
		parts |= LEASE_REQUEST;
	}

	/* Write the row */
	if (lease->attempt == 1)
		KeyStoreWrite(&request->name, seen, record);
	else
		KeyStoreChangeLease(&request->name, seen, record, parts);
	TokenGranted(lease->token);
}

/*
 * LeaseRelease ends a lease, so that the next owner can claim at once.  A row with a
 * checkpoint is kept, with a new token that no owner has; any other is deleted.
 */
void
LeaseRelease(const KeyName *name, const Ownership *own)
{
	KeyRecord record = {.lease = own->lease};

	WakeupAfterCommit(KeyLockNumber(name));
	if (own->lease.recoveryPoint == NULL)
	{
		KeyStoreDelete(name, &own->seen);
		return;
	}
	record.lease.token = NewToken();
	record.lease.from = GetCurrentTimestamp();
	record.lease.until = DT_NOBEGIN;
	record.expiresAt = RetentionEnd(&record.lease.retention, record.lease.from);
	KeyStoreChangeLease(name, &own->seen, &record, LEASE_OWNER | LEASE_TIMES);
}

/*
 * RequireLease makes "record" the lease by which the caller owns the operation, and
 * permits writes to guarded tables, as a claim does.  Throws IK412 if the claim has no
 * lease.
 */
static void
RequireLease(const KeyName *name, const Ownership *own, KeyRecord *record)
{
	if (own->lease.token == 0)
		ErrorNoClaim(name, "the claim on this idempotency key has no lease",
					 "Claim with a lease, such as lease => '30 seconds', and pass its token.");
	ScopeSetResult(name->scope, name->key, true);
	memset(record, 0, sizeof(KeyRecord));
	record->lease = own->lease;
}

static Datum
Renew(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	const Interval *length = LeaseFromArg(fcinfo, 3);
	KeyRecord record;

	if (length == NULL)
		ErrorBadArgument(
			"lease is missing",
			"Pass the time within which the owner renews the lease, such as '30 seconds'.");
	RequireLease(name, own, &record);
	SetTimes(&record, length);
	KeyStoreChangeLease(name, &own->seen, &record, LEASE_TIMES);
	PG_RETURN_TIMESTAMPTZ(record.lease.until);
}

/*
 * renew(scope, key, token, lease) RETURNS timestamptz: a heartbeat; the new lease
 * begins now
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
	text *state = DocumentText(DocumentFromArg(fcinfo, 4));
	KeyRecord record;

	/* Check the arguments */
	if (point == NULL || VARSIZE_ANY_EXHDR(point) == 0)
		ErrorBadArgument("recovery point is missing",
						 "Name the step from which the next owner continues.");
	if (VARSIZE_ANY_EXHDR(point) > RECOVERY_POINT_BYTES)
		ErrorBadArgument("recovery point is too long",
						 "Name the step in at most 255 bytes, and pass other data as the state.");
	if (state != NULL &&
		VARSIZE_ANY_EXHDR(state) > (Size) SettingNumber(&ResponseSizeSetting, name->scope))
		ErrorTooLarge(name, "state", VARSIZE_ANY_EXHDR(state));

	/* Write the checkpoint */
	RequireLease(name, own, &record);
	record.lease.recoveryPoint = point;
	record.lease.state = state;
	KeyStoreChangeLease(name, &own->seen, &record, LEASE_CHECKPOINT);
	PG_RETURN_TIMESTAMPTZ(record.lease.until);
}

/*
 * checkpoint(scope, key, token, recovery_point, state) RETURNS timestamptz: stores where the
 * next owner, or this one, continues; when the lease ends
 */
Datum
idempotency_checkpoint(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 2, "idempotency.checkpoint()", Checkpoint);
}
