/*-------------------------------------------------------------------------
 *
 * keys/run.c
 *	  run(): claim, call the handler, complete or replay.
 *
 * The handler runs with the caller's rights, in a subtransaction.  An error that is
 * final (idempotency.final_errors) rolls back what the handler wrote, and is stored as
 * the outcome; any other error propagates, and nothing is stored.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"

#include "base/callable.h"
#include "base/errors.h"
#include "base/subtransaction.h"
#include "keys/claim.h"
#include "keys/lease.h"
#include "query/reevaluation.h"
#include "request/request.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_run);

#define FINAL_ERROR_STATUS 422

/*
 * DocumentType returns the OID of idempotency.document: the type of the calling
 * function's third argument.  A call through the fast path of the protocol has no
 * expression that would tell it.
 */
static Oid
DocumentType(FunctionCallInfo fcinfo)
{
	Oid *types;
	int count;
	Oid document;

	get_func_signature(fcinfo->flinfo->fn_oid, &types, &count);
	document = types[2];
	pfree(types);
	return document;
}

/*
 * CheckHandler throws 42883 if there is no such function, 42P13 unless it takes one
 * document (json, or idempotency.document, whose OID is "document") and returns json, 22023 if it
 * is strict and there is no request, and 42501 unless the caller may execute it.
 */
static void
CheckHandler(Oid handler, Oid document, bool hasRequest)
{
	Callable found;

	if (!CallableFind(handler, &found))
		ereport(ERROR, (errcode(ERRCODE_UNDEFINED_FUNCTION),
						errmsg("handler with OID %u does not exist", handler),
						errhint("Pass a function as regprocedure.")));
	if ((found.argument != document && found.argument != JSONOID) ||
		(found.result != document && found.result != JSONOID))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("function %s cannot be a handler", format_procedure(handler)),
				 errhint("A handler takes one argument of type idempotency.document (or json) and "
						 "returns json.")));

	/* PostgreSQL would not call it, and a success would be stored. */
	if (found.strict && !hasRequest)
		ErrorBadArgument("request is missing, and the handler is strict",
						 "Pass a request, or declare the handler CALLED ON NULL INPUT.");
	CallablePermit(handler, GetUserId());
}

typedef struct HandlerCall
{
	Oid handler;
	text *request;
	text *response;
} HandlerCall;

/*
 * CallHandler calls the handler; a NULL result gives NULL.
 */
static void
CallHandler(void *argument)
{
	HandlerCall *call = argument;
	bool isnull = call->request == NULL;
	FmgrInfo function;
	Datum result;

	fmgr_info(call->handler, &function);
	result = CallableCall(&function, PointerGetDatum(call->request), &isnull);
	call->response = isnull ? NULL : DocumentText(PG_DETOAST_DATUM_PACKED(result));
}

/*
 * OutcomeOfCall calls the handler in a subtransaction and makes its result, or
 * its final error, the operation's outcome.  Any other error is thrown on,
 * when the subtransaction is gone.
 */
static KeyRecord
OutcomeOfCall(Oid handler, text *request)
{
	KeyRecord record = {.hasStatus = true};
	HandlerCall call = {.handler = handler, .request = request};
	ErrorData *error = SubtransactionRun(CallHandler, &call);

	if (error != NULL)
	{
		if (!IsFinalError(error->sqlerrcode))
			ReThrowError(error);
		record.failed = true;
		record.status = FINAL_ERROR_STATUS;
		record.headers = cstring_to_text("{\"Content-Type\": \"application/problem+json\"}");
		record.response = ProblemDocument(FINAL_ERROR_STATUS, error->message, error->detail);
		return record;
	}

	record.status = 200;
	record.response = call.response;
	return record;
}

/*
 * run(scope, key, request, handler, wait, retention) RETURNS operation
 */
Datum
idempotency_run(PG_FUNCTION_ARGS)
{
	Document *document;
	ClaimRequest request = {0};
	KeyRecord record;
	Outcome claimed;
	Ownership own;
	int32 attempt;
	Oid handler;

	/* Check the arguments */
	PreventUnsafeCall(fcinfo, "idempotency.run()");
	document = DocumentFromArg(fcinfo, 2);
	KeyNameFromArgs(fcinfo, &request.name);
	RequireSetting(&FinalErrorsSetting, NULL);
	request.waitMs = WaitFromArg(fcinfo, 4, SettingNumber(&WaitSetting, request.name.scope));
	request.retention = RetentionFromArg(fcinfo, 5, request.name.scope);
	request.fingerprint = document == NULL ? NULL : FingerprintOfDocument(document);
	if (PG_ARGISNULL(3))
		ErrorBadArgument("handler is missing", "Pass a function as regprocedure.");
	handler = PG_GETARG_OID(3);
	CheckHandler(handler, DocumentType(fcinfo), document != NULL);

	/* Claim or replay */
	claimed = Claim(&request, true, &record);
	if (claimed == OUTCOME_REPLAYED)
		return OperationDatum(OperationType(fcinfo), OUTCOME_REPLAYED, &record, NULL);

	/* Call the handler, and store its outcome */
	attempt = record.lease.attempt;
	record = OutcomeOfCall(handler, DocumentText(document));
	RequireOwnership(&request.name, NULL, &own);
	ClaimFinish(&request.name, &own, &record, false);
	record.lease.attempt = attempt;
	return OperationDatum(OperationType(fcinfo), claimed, &record, NULL);
}
