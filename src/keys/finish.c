/*-------------------------------------------------------------------------
 *
 * keys/finish.c
 *	  complete(), fail() and release(): the end of a claimed operation.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "keys/lease.h"
#include "keys/lock.h"
#include "keys/transaction.h"
#include "keys/wakeup.h"
#include "request/request.h"
#include "server/stats.h"
#include "settings/guc.h"

PG_FUNCTION_INFO_V1(idempotency_complete);
PG_FUNCTION_INFO_V1(idempotency_fail);
PG_FUNCTION_INFO_V1(idempotency_release);

/* The header that tells a replay without its response apart. */
#define OMITTED_HEADER "\"Idempotency-Response\": \"omitted\""

pg_noreturn static void
ErrorBadOutcome(const KeyName *name, const char *message, const char *hint)
{
	ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("%s", message),
					DetailName(name), errhint("%s", hint)));
}

/*
 * ErrorTooLarge reports a document above idempotency.max_response_size; "what" is such
 * as "response".  If the setting is invalid, which makes every document too large, that
 * is reported instead.
 */
void
ErrorTooLarge(const KeyName *name, const char *what, Size bytes)
{
	RequireSetting(&ResponseSizeSetting, name->scope);
	ereport(ERROR, (errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
					errmsg("%s of %zu bytes exceeds idempotency.max_response_size (%d bytes)", what,
						   bytes, SettingNumber(&ResponseSizeSetting, name->scope)),
					DetailName(name),
					errhint("Store a reference to the large part, or raise the limit with "
							"idempotency.configure().")));
}

/*
 * OmitResponse removes the response of an outcome that is too large, and says so in its
 * headers, an object, which stay if they are not too large themselves.  The header is appended to
 * their text: jsonb refuses values that json takes.
 */
static void
OmitResponse(KeyRecord *record, int most)
{
	const char *given = "{}";
	int bytes;

	if (record->headers != NULL && VARSIZE_ANY_EXHDR(record->headers) <= (Size) most)
		given = text_to_cstring(record->headers);
	bytes = (int) (strrchr(given, '}') - given);
	record->response = NULL;
	record->headers = cstring_to_text(psprintf("%.*s%s" OMITTED_HEADER "}", bytes, given,
											   strchr(given, '"') != NULL ? ", " : ""));
}

/*
 * CheckOutcome throws 22023 for a status or headers that cannot be replayed.  A response
 * that is too large is omitted if "omitLarge" is set; otherwise it is 54000.
 */
static void
CheckOutcome(const KeyName *name, KeyRecord *record, bool omitLarge)
{
	int most = SettingNumber(&ResponseSizeSetting, name->scope);
	Size bytes = 0;

	if (record->status < 100 || record->status > 599)
		ErrorBadOutcome(name, "status must be between 100 and 599", "Pass an HTTP status code.");

	if (record->headers != NULL)
	{
		Datum type = DirectFunctionCall1(json_typeof, PointerGetDatum(record->headers));

		if (strcmp(TextDatumGetCString(type), "object") != 0)
			ErrorBadOutcome(name, "headers must be a JSON object",
							"Pass an object of header names and values.");
		bytes += VARSIZE_ANY_EXHDR(record->headers);
	}
	if (record->response != NULL)
		bytes += VARSIZE_ANY_EXHDR(record->response);
	if (bytes <= (Size) most)
		return;
	if (!omitLarge)
		ErrorTooLarge(name, "response", bytes);
	RequireSetting(&ResponseSizeSetting, name->scope);
	OmitResponse(record, most);
}

/*
 * ClaimFinish stores the outcome of an operation that the caller owns, and closes the
 * claim.  It fills in fingerprint, expiry and the token, and with "omitLarge" omits a
 * response that is too large.  Throws 40001 if another transaction has written the row,
 * and what CheckOutcome() throws.
 */
void
ClaimFinish(const KeyName *name, const Ownership *own, KeyRecord *record, bool omitLarge)
{
	CheckOutcome(name, record, omitLarge);

	/* Write the row */
	record->fingerprint = own->fingerprint;
	record->finishedBy = own->lease.token;
	record->expiresAt = RetentionEnd(&own->lease.retention, GetCurrentTimestamp());
	InjectionPoint("finish-write");
	KeyStoreWrite(name, &own->seen, record);

	/* Close the claim */
	InjectionPoint("finish-close");
	if (own->claim != NULL)
		OpenClaimClose(own->claim);

	/* Wake sessions that wait for a lease */
	if (ItemPointerIsValid(&own->seen.tid))
		WakeupAfterCommit(KeyLockNumber(name));
	Count(record->failed ? COUNT_FAILURES : COUNT_COMPLETIONS);
}

/*
 * Finish stores response, status and headers for complete() and fail().  A NULL
 * status is 200 for complete(), and 22023 for fail(); a NULL retention is that of the
 * claim.  Returns the response, so that the first answer can be what is replayed; also one
 * that is too large to be.
 */
static Datum
Finish(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *claimed, bool failed)
{
	Ownership own = *claimed;
	KeyRecord record = {.hasStatus = true, .failed = failed};
	text *response = DocumentText(DocumentFromArg(fcinfo, 2));
	bool omitLarge = !PG_ARGISNULL(7) && PG_GETARG_BOOL(7);

	record.response = response;
	if (!PG_ARGISNULL(3))
		record.status = PG_GETARG_INT32(3);
	else if (!failed)
		record.status = 200;
	record.headers = DocumentText(DocumentFromArg(fcinfo, 4));
	if (!PG_ARGISNULL(6))
		own.lease.retention = RetentionFromArg(fcinfo, 6, name->scope);
	ClaimFinish(name, &own, &record, omitLarge);
	if (own.claim == NULL)
		ScopeSetResult(name->scope, name->key, true);

	if (response == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(response);
}

static Datum
Complete(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	return Finish(fcinfo, name, own, false);
}

/*
 * complete(scope, key, response, status, headers, token, retention, omit_large) RETURNS
 * json: the response
 */
Datum
idempotency_complete(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 5, "idempotency.complete()", Complete);
}

static Datum
Fail(FunctionCallInfo fcinfo, const KeyName *name, const Ownership *own)
{
	return Finish(fcinfo, name, own, true);
}

/*
 * fail(scope, key, response, status, headers, token, retention, omit_large) RETURNS json:
 * the response
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
		LeaseRelease(name, own);
	if (own->claim != NULL)
		OpenClaimClose(own->claim);
	ScopeSetResult(name->scope, name->key, false);
	Count(COUNT_RELEASES);
	PG_RETURN_BOOL(true);
}

/*
 * release(scope, key, token) RETURNS boolean: ends the claim without an outcome; true.  The
 * key stays locked until the transaction ends, since what was written since the claim can
 * commit.
 */
Datum
idempotency_release(PG_FUNCTION_ARGS)
{
	return OwnerCall(fcinfo, 2, "idempotency.release()", Release);
}
