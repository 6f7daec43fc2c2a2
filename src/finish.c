/*-------------------------------------------------------------------------
 *
 * finish.c
 *	  complete(), fail() and release(): the end of a claimed operation.
 *
 * The caller must own the operation: by an open claim of this very
 * transaction, or by the current token of its lease.  Anything else is IK412 or
 * IK410, and the transaction does not commit, even if the error is caught.
 *
 * Locks: the key's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/timestamp.h"

#include "claim.h"
#include "errors.h"
#include "finish.h"
#include "guc.h"
#include "keylock.h"
#include "lease.h"
#include "stats.h"
#include "wakeup.h"
#include "xact.h"

PG_FUNCTION_INFO_V1(idempotency_complete);
PG_FUNCTION_INFO_V1(idempotency_fail);
PG_FUNCTION_INFO_V1(idempotency_release);

/*
 * CheckOutcome throws 22023 for a status or headers that nobody could replay,
 * and 54000 for a response that is too large.
 */
static void
CheckOutcome(const KeyName *name, const StoredOutcome *outcome)
{
	Size bytes = 0;

	if (outcome->status < 100 || outcome->status > 599)
		ErrorBadOutcome(name, "status must be between 100 and 599", "Pass an HTTP status code.");

	if (outcome->headers != NULL)
	{
		const char *s = VARDATA_ANY(outcome->headers);
		Size length = VARSIZE_ANY_EXHDR(outcome->headers);
		Size i = 0;

		while (i < length && strchr(" \t\r\n", s[i]) != NULL)
			i++;
		if (i == length || s[i] != '{')
			ErrorBadOutcome(name, "headers must be a JSON object",
							"Pass an object of header names and values.");
		bytes += length;
	}
	if (outcome->response != NULL)
		bytes += VARSIZE_ANY_EXHDR(outcome->response);
	if (bytes > (Size) MaxResponseSize)
		ErrorTooLarge(name, "response", bytes, MaxResponseSize);
}

/*
 * ClaimFinish stores the outcome of an operation that the caller owns, and
 * closes the claim.  Fingerprint, expiry and the token are the claim's, and are filled
 * in.  Throws 40001 if the unique index knows better, and what CheckOutcome()
 * does.
 */
void
ClaimFinish(const KeyName *name, const Ownership *own, StoredOutcome *outcome)
{
	CheckOutcome(name, outcome);
	outcome->fingerprint = own->fingerprint;
	outcome->finishedBy = own->lease.token;
	outcome->expiresAt = RetentionEnd(&own->lease.retention, GetCurrentTimestamp());
	InjectionPoint("finish-write");
	KeyStoreWrite(name, &own->seen, outcome);
	InjectionPoint("finish-close");
	if (own->claim != NULL)
		OpenClaimClose(own->claim);
	if (ItemPointerIsValid(&own->seen.tid))
		WakeupAfterCommit(KeyLockNumber(name));
	CountEvent(outcome->failed ? COUNT_FAILURES : COUNT_COMPLETIONS);
}

/*
 * Finish does what complete() and fail() share: response, status, headers.  A NULL
 * status is defaultStatus, or 22023 where that is 0.  Returns the response, so
 * that the first answer can be what is replayed.
 */
static Datum
Finish(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own, bool failed,
	   int defaultStatus)
{
	StoredOutcome outcome = {.hasStatus = true, .failed = failed};

	if (!PG_ARGISNULL(2))
		outcome.response = PG_GETARG_TEXT_PP(2);
	outcome.status = PG_ARGISNULL(3) ? defaultStatus : PG_GETARG_INT32(3);
	if (!PG_ARGISNULL(4))
		outcome.headers = PG_GETARG_TEXT_PP(4);
	ClaimFinish(name, own, &outcome);
	if (own->claim == NULL)
		ScopeMark(name->scope, name->key, true);

	if (outcome.response == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(outcome.response);
}

static Datum
Complete(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	return Finish(fcinfo, name, own, false, 200);
}

/*
 * complete(scope, key, response, status, headers, token) RETURNS json: the
 * response
 */
Datum
idempotency_complete(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 5, "idempotency.complete()", Complete);
}

static Datum
Fail(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	return Finish(fcinfo, name, own, true, 0);
}

/*
 * fail(scope, key, response, status, headers, token) RETURNS json: the
 * response
 */
Datum
idempotency_fail(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 5, "idempotency.fail()", Fail);
}

static Datum
Release(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	if (own->lease.token != 0)
		LeaseGiveUp(name, own);
	if (own->claim != NULL)
		OpenClaimClose(own->claim);
	ScopeMark(name->scope, name->key, false);
	CountEvent(COUNT_RELEASES);
	PG_RETURN_VOID();
}

/*
 * release(scope, key, token): gives the claim up.  The lock stays to the end
 * of the transaction, since what was written since the claim may commit with
 * it.
 */
Datum
idempotency_release(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 2, "idempotency.release()", Release);
}
