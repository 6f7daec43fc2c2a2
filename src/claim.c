/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  The state machine of one operation, and its SQL entry points.
 *
 *		absent --claim--> claimed --complete, fail--> stored --time--> absent
 *							 '-----release, rollback-----> absent
 *
 * A claim is transactional: it consists of the key's lock and a note in this
 * backend's memory, and nothing is written until complete() or fail() stores
 * the outcome with one insert.  The primary key of the store decides who won;
 * the lock only orders the waiters, so that the loser does no work in vain.
 *
 * Locks: the key's, from a granted claim to the end of the transaction.  A
 * claim that finds a stored outcome keeps none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"

#include "claim.h"
#include "errors.h"
#include "fingerprint.h"
#include "guc.h"
#include "keylock.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(idempotency_claim);
PG_FUNCTION_INFO_V1(idempotency_try_claim);
PG_FUNCTION_INFO_V1(idempotency_complete);
PG_FUNCTION_INFO_V1(idempotency_fail);
PG_FUNCTION_INFO_V1(idempotency_release);
PG_FUNCTION_INFO_V1(idempotency_peek);
PG_FUNCTION_INFO_V1(idempotency_forget);

/* ----------------------------------------------------------------
 * Claiming
 * ----------------------------------------------------------------
 */

/* What came of an attempt to claim. */
typedef enum Attempt
{
	ATTEMPT_CLAIMED,
	ATTEMPT_STORED,
	ATTEMPT_HELD_HERE,
	ATTEMPT_HELD_ELSEWHERE
} Attempt;

/*
 * LookUnderLock makes sure that nothing is stored under "name" and that
 * nobody else can store anything: it looks, takes the key's lock (waiting for
 * at most waitMs), and looks again, since the owner may have come and gone
 * between the look and the lock; unless nobody at all has.  ATTEMPT_CLAIMED means that the lock is
 * held to the end of the transaction, and "seen" is the expired row, if any. Throws what
 * KeyStoreProbe() and KeyLockAcquire() do.
 */
static Attempt
LookUnderLock(const KeyName *name, int waitMs, KeyVersion *seen, StoredOutcome *stored)
{
	if (OpenClaimFind(name) != NULL)
		return ATTEMPT_HELD_HERE;
	if (KeyStoreProbe(name, stored, seen) == KEY_STORED)
		return ATTEMPT_STORED;
	if (!KeyLockAcquire(name, waitMs))
		return ATTEMPT_HELD_ELSEWHERE;
	if (!KeyStoreUnchanged(seen) && KeyStoreProbe(name, stored, seen) == KEY_STORED)
	{
		/* Let the other waiters through: they will find it too. */
		KeyLockRelease(name);
		return ATTEMPT_STORED;
	}
	return ATTEMPT_CLAIMED;
}

/*
 * ClaimAbsent locks the key of "name" and returns true if nothing is stored
 * under it, for callers that write at once.  Returns false if something is.
 * Throws IK409 if it is claimed, here or elsewhere for longer than waitMs.
 */
bool
ClaimAbsent(const KeyName *name, int waitMs, KeyVersion *seen)
{
	switch (LookUnderLock(name, waitMs, seen, NULL))
	{
		case ATTEMPT_CLAIMED:
			return true;
		case ATTEMPT_STORED:
			return false;
		case ATTEMPT_HELD_HERE:
			ErrorClaimedHere(name);
		case ATTEMPT_HELD_ELSEWHERE:
			ErrorInProgress(name);
	}
	pg_unreachable();
}

/*
 * SameRequest compares fingerprints; a NULL on either side matches.
 */
static bool
SameRequest(const bytea *a, const bytea *b)
{
	return a == NULL || b == NULL || TextEquals(a, b);
}

/*
 * TryClaim claims the operation, or says why not.  A claim is noted as open,
 * to be finished before commit; "stored" is filled for ATTEMPT_STORED.
 */
static Attempt
TryClaim(const ClaimRequest *request, StoredOutcome *stored)
{
	const KeyName *name = &request->name;
	KeyVersion seen;
	Attempt attempt = LookUnderLock(name, request->waitMs, &seen, stored);

	if (attempt == ATTEMPT_CLAIMED)
		OpenClaimAdd(name, request->fingerprint, &request->retention, &seen);
	ScopeMark(name->scope, name->key, attempt == ATTEMPT_CLAIMED);
	return attempt;
}

/*
 * ClaimOrThrow claims the operation, or fills "stored" with the outcome to
 * replay.  Throws IK409 if it is in progress and IK422 if the key was used
 * with another request.
 */
Outcome
ClaimOrThrow(const ClaimRequest *request, StoredOutcome *stored)
{
	switch (TryClaim(request, stored))
	{
		case ATTEMPT_CLAIMED:
			return OUTCOME_CLAIMED;
		case ATTEMPT_STORED:
			if (!SameRequest(request->fingerprint, stored->fingerprint))
				ErrorKeyReused(&request->name);
			return OUTCOME_REPLAYED;
		case ATTEMPT_HELD_HERE:
			ErrorClaimedHere(&request->name);
		case ATTEMPT_HELD_ELSEWHERE:
			ErrorInProgress(&request->name);
	}
	pg_unreachable();
}

/*
 * FingerprintFromArgs returns the fingerprint that was passed, or that of the
 * request that was passed, or NULL.  Throws IK400 for both, or for no digest.
 */
static bytea *
FingerprintFromArgs(FunctionCallInfo fcinfo, const KeyName *name, int requestArg,
					int fingerprintArg)
{
	bytea *fingerprint;
	int bytes;

	if (PG_ARGISNULL(fingerprintArg))
		return PG_ARGISNULL(requestArg) ? NULL
										: FingerprintOfDocument(PG_GETARG_TEXT_PP(requestArg));
	if (!PG_ARGISNULL(requestArg))
		ErrorRequestAndFingerprint(name);

	fingerprint = PG_GETARG_BYTEA_PP(fingerprintArg);
	bytes = VARSIZE_ANY_EXHDR(fingerprint);
	if (bytes < 16 || bytes > 64)
		ErrorFingerprintLength(name, bytes);
	return fingerprint;
}

/*
 * RequestFromArgs reads the arguments that claim() and try_claim() share:
 * scope, key, request, wait, retention, fingerprint.
 */
static ClaimRequest
RequestFromArgs(FunctionCallInfo fcinfo, int defaultWaitMs)
{
	ClaimRequest request;

	KeyNameFromArgs(fcinfo, 0, &request.name);
	request.waitMs = WaitFromArg(fcinfo, 3, defaultWaitMs);
	request.retention = RetentionFromArg(fcinfo, 4);
	request.fingerprint = FingerprintFromArgs(fcinfo, &request.name, 2, 5);
	return request;
}

/*
 * claim(scope, key, request, wait, retention, fingerprint) RETURNS operation
 */
Datum
idempotency_claim(PG_FUNCTION_ARGS)
{
	ClaimRequest request = RequestFromArgs(fcinfo, DefaultWait);
	StoredOutcome stored;
	Outcome outcome;

	PreventCommandIfReadOnly("idempotency.claim()");
	outcome = ClaimOrThrow(&request, &stored);
	return OperationDatum(fcinfo, outcome, outcome == OUTCOME_REPLAYED ? &stored : NULL);
}

/*
 * try_claim(scope, key, request, wait, retention, fingerprint) RETURNS operation
 */
Datum
idempotency_try_claim(PG_FUNCTION_ARGS)
{
	ClaimRequest request = RequestFromArgs(fcinfo, 0);
	StoredOutcome stored;

	PreventCommandIfReadOnly("idempotency.try_claim()");
	switch (TryClaim(&request, &stored))
	{
		case ATTEMPT_CLAIMED:
			return OperationDatum(fcinfo, OUTCOME_CLAIMED, NULL);
		case ATTEMPT_STORED:
			if (!SameRequest(request.fingerprint, stored.fingerprint))
				return OperationDatum(fcinfo, OUTCOME_MISMATCHED, NULL);
			return OperationDatum(fcinfo, OUTCOME_REPLAYED, &stored);
		case ATTEMPT_HELD_HERE:
		case ATTEMPT_HELD_ELSEWHERE:
			return OperationDatum(fcinfo, OUTCOME_IN_PROGRESS, NULL);
	}
	pg_unreachable();
}

/* ----------------------------------------------------------------
 * Finishing
 * ----------------------------------------------------------------
 */

/*
 * RequireOpenClaim returns the open claim on "name".  Throws IK410, and dooms
 * the transaction, if there is none: what it wrote has no claim to stand on.
 */
static OpenClaim *
RequireOpenClaim(const KeyName *name)
{
	OpenClaim *claim = OpenClaimFind(name);

	if (claim == NULL)
	{
		DoomTransaction(name);
		ErrorClaimLost(name);
	}
	return claim;
}

/*
 * CheckOutcome throws 22023 for a status or headers that nobody could replay,
 * and 54000 for a response that is too large.
 */
static void
CheckOutcome(const KeyName *name, const StoredOutcome *outcome)
{
	Size bytes = 0;

	if (outcome->status < 100 || outcome->status > 599)
		ErrorBadArgument("status must be between 100 and 599", "Pass an HTTP status code.");

	if (outcome->headers != NULL)
	{
		const char *s = VARDATA_ANY(outcome->headers);
		Size length = VARSIZE_ANY_EXHDR(outcome->headers);
		Size i = 0;

		while (i < length && strchr(" \t\r\n", s[i]) != NULL)
			i++;
		if (i == length || s[i] != '{')
			ErrorBadArgument("headers must be a JSON object",
							 "Pass an object of header names and values.");
		bytes += length;
	}
	if (outcome->response != NULL)
		bytes += VARSIZE_ANY_EXHDR(outcome->response);
	if (bytes > (Size) MaxResponseSize)
		ErrorResponseTooLarge(name, bytes, MaxResponseSize);
}

/*
 * ClaimFinish stores the outcome of an operation that this transaction has
 * claimed, and closes the claim.  Fingerprint and expiry are the claim's, and
 * are filled in.  Throws IK410 without a claim, 40001 if the unique index
 * knows better, and what CheckOutcome() does.
 */
void
ClaimFinish(const KeyName *name, StoredOutcome *outcome)
{
	OpenClaim *claim = RequireOpenClaim(name);

	CheckOutcome(name, outcome);
	outcome->fingerprint = claim->fingerprint;
	outcome->expiresAt = RetentionEnd(&claim->retention);
	KeyStoreWrite(name, &claim->seen, outcome);
	OpenClaimClose(claim);
}

/*
 * FinishFromArgs does what complete() and fail() share: scope, key, response,
 * status, headers.  A NULL status is defaultStatus, or 22023 where that is 0.
 * Returns the response, so that the first answer can be what is replayed.
 */
static Datum
FinishFromArgs(FunctionCallInfo fcinfo, bool failed, int defaultStatus)
{
	StoredOutcome outcome = {.hasStatus = true, .failed = failed};
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	if (!PG_ARGISNULL(2))
		outcome.response = PG_GETARG_TEXT_PP(2);
	outcome.status = PG_ARGISNULL(3) ? defaultStatus : PG_GETARG_INT32(3);
	if (!PG_ARGISNULL(4))
		outcome.headers = PG_GETARG_TEXT_PP(4);
	ClaimFinish(&name, &outcome);

	if (outcome.response == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(outcome.response);
}

/*
 * complete(scope, key, response, status, headers) RETURNS json: the response
 */
Datum
idempotency_complete(PG_FUNCTION_ARGS)
{
	PreventCommandIfReadOnly("idempotency.complete()");
	return FinishFromArgs(fcinfo, false, 200);
}

/*
 * fail(scope, key, response, status, headers) RETURNS json: the response
 */
Datum
idempotency_fail(PG_FUNCTION_ARGS)
{
	PreventCommandIfReadOnly("idempotency.fail()");
	return FinishFromArgs(fcinfo, true, 0);
}

/*
 * release(scope, key): gives the claim up.  The lock stays to the end of the
 * transaction, since what was written since the claim may commit with it.
 */
Datum
idempotency_release(PG_FUNCTION_ARGS)
{
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	PreventCommandIfReadOnly("idempotency.release()");
	OpenClaimClose(RequireOpenClaim(&name));
	ScopeMark(name.scope, name.key, false);
	PG_RETURN_VOID();
}

/* ----------------------------------------------------------------
 * Looking and forgetting
 * ----------------------------------------------------------------
 */

/*
 * peek(scope, key) RETURNS operation: reads only; NULL where nothing is stored.
 */
Datum
idempotency_peek(PG_FUNCTION_ARGS)
{
	StoredOutcome stored;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	if (!KeyStoreRead(&name, &stored))
		PG_RETURN_NULL();
	return OperationDatum(fcinfo, OUTCOME_REPLAYED, &stored);
}

/*
 * forget(scope, key) RETURNS boolean: removes what is stored, expired or not;
 * true if it was still remembered.
 */
Datum
idempotency_forget(PG_FUNCTION_ARGS)
{
	KeyVersion seen;
	KeyState state;
	KeyName name;

	KeyNameFromArgs(fcinfo, 0, &name);
	PreventCommandIfReadOnly("idempotency.forget()");
	if (OpenClaimFind(&name) != NULL)
		ErrorClaimedHere(&name);

	/* Look first, as a claim does, so that both take their locks in one order. */
	state = KeyStoreProbe(&name, NULL, &seen);
	if (!KeyLockAcquire(&name, DefaultWait))
		ErrorInProgress(&name);
	if (!KeyStoreUnchanged(&seen))
		state = KeyStoreProbe(&name, NULL, &seen);

	if (state == KEY_ABSENT)
	{
		KeyLockRelease(&name);
		PG_RETURN_BOOL(false);
	}
	KeyStoreDelete(&name, &seen);
	ScopeMark(name.scope, name.key, false);
	PG_RETURN_BOOL(state == KEY_STORED);
}
