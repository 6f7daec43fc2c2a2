/*-------------------------------------------------------------------------
 *
 * run.c
 *	  run(): claim, call the handler, complete or replay.
 *
 * The handler runs with the caller's rights, in a subtransaction of its own.
 * An error that it raises on purpose as final (idempotency.final_errors) rolls
 * back what it wrote and is remembered as the operation's outcome; any other
 * error propagates, and leaves no trace.
 *
 * Locks: those of a claim.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/resowner.h"
#include "utils/syscache.h"

#include "claim.h"
#include "compat.h"
#include "errors.h"
#include "fingerprint.h"
#include "finish.h"
#include "guc.h"
#include "http.h"
#include "lease.h"

PG_FUNCTION_INFO_V1(idempotency_run);

#define FINAL_ERROR_STATUS 422

/*
 * DocumentType returns the OID of idempotency.document, which is the type of
 * the third argument of the calling function.
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
 * CheckHandler throws 42P13 unless the function takes one document and returns
 * json, 42883 if there is none, 22023 if it is strict and there is no request,
 * and 42501 unless the caller may execute it.
 */
static void
CheckHandler(Oid handler, Oid document, bool hasRequest)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	Form_pg_proc proc;
	AclResult acl;
	bool fits;
	bool strict;

	if (!HeapTupleIsValid(tuple))
		ErrorHandlerMissing(handler);

	proc = (Form_pg_proc) GETSTRUCT(tuple);
	fits = proc->prokind == PROKIND_FUNCTION && !proc->proretset && proc->pronargs == 1 &&
		   (proc->proargtypes.values[0] == document || proc->proargtypes.values[0] == JSONOID) &&
		   (proc->prorettype == JSONOID || proc->prorettype == document);
	strict = proc->proisstrict;
	ReleaseSysCache(tuple);

	if (!fits)
		ErrorHandlerSignature(handler);

	/* PostgreSQL would not call it, and we would remember a success. */
	if (strict && !hasRequest)
		ErrorBadArgument("request is missing, and the handler is strict",
						 "Pass a request, or declare the handler CALLED ON NULL INPUT.");

	acl = object_aclcheck(ProcedureRelationId, handler, GetUserId(), ACL_EXECUTE);
	if (acl != ACLCHECK_OK)
		aclcheck_error(acl, OBJECT_FUNCTION, get_func_name(handler));
	InvokeFunctionExecuteHook(handler);
}

/*
 * CallHandler calls the handler; a NULL result gives NULL.
 */
static text *
CallHandler(Oid handler, text *request)
{
	LOCAL_FCINFO(call, 1);
	FmgrInfo function;
	PgStat_FunctionCallUsage usage;
	Datum result;

	fmgr_info(handler, &function);
	InitFunctionCallInfoData(*call, &function, 1, InvalidOid, NULL, NULL);
	call->args[0].value = PointerGetDatum(request);
	call->args[0].isnull = request == NULL;
	pgstat_init_function_usage(call, &usage);
	result = FunctionCallInvoke(call);
	pgstat_end_function_usage(&usage, true);

	return call->isnull ? NULL : DatumGetTextPP(result);
}

/*
 * OutcomeOfCall calls the handler in a subtransaction and makes its result, or
 * its final error, the operation's outcome.  Any other error is thrown on,
 * when the subtransaction is gone.
 */
static StoredOutcome
OutcomeOfCall(Oid handler, text *request)
{
	MemoryContext callerContext = CurrentMemoryContext;
	ResourceOwner callerOwner = CurrentResourceOwner;
	StoredOutcome outcome = {.hasStatus = true};
	text *volatile response = NULL;
	ErrorData *volatile error = NULL;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(callerContext);
	PG_TRY();
	{
		response = CallHandler(handler, request);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(callerContext);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
	}
	PG_END_TRY();
	MemoryContextSwitchTo(callerContext);
	CurrentResourceOwner = callerOwner;

	if (error != NULL)
	{
		if (!IsFinalError(error->sqlerrcode))
			ReThrowError(error);
		outcome.failed = true;
		outcome.status = FINAL_ERROR_STATUS;
		outcome.headers = cstring_to_text("{\"Content-Type\": \"application/problem+json\"}");
		outcome.response = ProblemDocument(FINAL_ERROR_STATUS, error->message, error->detail);
		return outcome;
	}

	outcome.status = 200;
	outcome.response = response;
	return outcome;
}

/*
 * run(scope, key, request, handler, wait, retention) RETURNS operation
 */
Datum
idempotency_run(PG_FUNCTION_ARGS)
{
	text *document = PG_ARGISNULL(2) ? NULL : PG_GETARG_TEXT_PP(2);
	ClaimRequest request = {0};
	StoredOutcome outcome;
	Outcome claimed;
	Ownership own;
	int32 attempt;
	Oid handler;

	KeyNameFromArgs(fcinfo, 0, &request.name);
	RequireSetting(&FinalErrorsSetting);
	request.waitMs = WaitFromArg(fcinfo, 4, DefaultWait);
	request.retention = RetentionFromArg(fcinfo, 5);
	request.fingerprint = document == NULL ? NULL : FingerprintOfDocument(document);
	if (PG_ARGISNULL(3))
		ErrorBadArgument("handler is missing", "Pass a function as regprocedure.");
	handler = PG_GETARG_OID(3);
	PreventCommandIfReadOnly("idempotency.run()");
	CheckHandler(handler, DocumentType(fcinfo), document != NULL);

	claimed = ClaimOrThrow(&request, &outcome);
	if (claimed == OUTCOME_REPLAYED)
		return OperationDatum(ResultType(fcinfo), OUTCOME_REPLAYED, &outcome);

	attempt = outcome.lease.attempt;
	outcome = OutcomeOfCall(handler, document);
	RequireOwnership(&request.name, NULL, &own);
	ClaimFinish(&request.name, &own, &outcome);
	outcome.lease.attempt = attempt;
	return OperationDatum(ResultType(fcinfo), claimed, &outcome);
}
