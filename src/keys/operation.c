/*-------------------------------------------------------------------------
 *
 * keys/operation.c
 *	  The composite idempotency.operation.
 *
 * Each call looks up the row type: the extension can have been dropped and created
 * again since the last call, or while this one waited.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>
#include <math.h>

#include "access/htup_details.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/fmgrprotos.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "base/errors.h"
#include "keys/operation.h"
#include "query/relation.h"
#include "request/request.h"

PG_FUNCTION_INFO_V1(idempotency_problem);
PG_FUNCTION_INFO_V1(idempotency_problem_headers);

/* The attributes of idempotency.operation, in order. */
enum
{
	OP_OUTCOME,
	OP_REPLAYED,
	OP_TOKEN,
	OP_ATTEMPT,
	OP_RECOVERY_POINT,
	OP_STATE,
	OP_STATUS,
	OP_HEADERS,
	OP_RESPONSE,
	OP_FAILED,
	OP_RETRY_AFTER,
	OP_EXPIRES_AT,
	OP_FINGERPRINT,
	OPERATION_COLUMNS
};

static const Oid attributeType[OPERATION_COLUMNS] = {
	[OP_OUTCOME] = InvalidOid, /* idempotency.outcome, by OutcomeDatum() */
	[OP_REPLAYED] = BOOLOID,
	[OP_TOKEN] = INT8OID,
	[OP_ATTEMPT] = INT4OID,
	[OP_RECOVERY_POINT] = TEXTOID,
	[OP_STATE] = JSONOID,
	[OP_STATUS] = INT4OID,
	[OP_HEADERS] = JSONOID,
	[OP_RESPONSE] = JSONOID,
	[OP_FAILED] = BOOLOID,
	[OP_RETRY_AFTER] = INT4OID,
	[OP_EXPIRES_AT] = TIMESTAMPTZOID,
	[OP_FINGERPRINT] = BYTEAOID,
};

#define IN_PROGRESS                                                                                \
	{                                                                                              \
		"in_progress", COUNT_IN_PROGRESS, ERRCODE_IDEMPOTENCY_IN_PROGRESS                          \
	}

const OutcomeMeaning outcomeMeanings[] = {
	[OUTCOME_CLAIMED] = {"claimed", COUNT_CLAIMS, 0},
	[OUTCOME_TAKEN_OVER] = {"taken_over", COUNT_TAKEOVERS, 0},
	[OUTCOME_REPLAYED] = {"replayed", COUNT_REPLAYS, 0},
	[OUTCOME_MISMATCHED] = {"mismatched", COUNT_MISMATCHES, ERRCODE_IDEMPOTENCY_KEY_REUSED},
	[OUTCOME_LEASED] = IN_PROGRESS,
	[OUTCOME_CLAIMED_HERE] = IN_PROGRESS,
	[OUTCOME_LOCKED] = IN_PROGRESS,
};

typedef struct Row
{
	Datum values[OPERATION_COLUMNS];
	bool isnull[OPERATION_COLUMNS];
} Row;

static void
Set(Row *row, int column, Datum value)
{
	row->values[column] = value;
	row->isnull[column] = false;
}

/*
 * OutcomeDatum returns an outcome as a value of the enum "type".  Throws 42804 if
 * the enum has no such label.
 */
static Datum
OutcomeDatum(Oid type, Outcome outcome)
{
	HeapTuple tuple = SearchSysCache2(ENUMTYPOIDNAME, ObjectIdGetDatum(type),
									  CStringGetDatum(outcomeMeanings[outcome].label));
	Oid value;

	if (!HeapTupleIsValid(tuple))
		ErrorRowType("operation");
	value = ((Form_pg_enum) GETSTRUCT(tuple))->oid;
	ReleaseSysCache(tuple);
	return ObjectIdGetDatum(value);
}

static void
SetText(Row *row, int column, const text *value)
{
	if (value != NULL)
		Set(row, column, PointerGetDatum(value));
}

static void
SetAnswer(Row *row, const KeyRecord *record)
{
	if (record->hasStatus)
		Set(row, OP_STATUS, Int32GetDatum(record->status));
	SetText(row, OP_HEADERS, record->headers);
	SetText(row, OP_RESPONSE, record->response);
	Set(row, OP_FAILED, BoolGetDatum(record->failed));
	if (!TIMESTAMP_IS_NOEND(record->expiresAt))
		Set(row, OP_EXPIRES_AT, TimestampTzGetDatum(record->expiresAt));
}

/*
 * SetOwner sets what a new owner needs.  No other session sees the token.
 */
static void
SetOwner(Row *row, const Lease *lease)
{
	if (lease->token != 0)
		Set(row, OP_TOKEN, Int64GetDatum(lease->token));
	Set(row, OP_ATTEMPT, Int32GetDatum(lease->attempt));
	SetText(row, OP_RECOVERY_POINT, lease->recoveryPoint);
	SetText(row, OP_STATE, lease->state);
}

/*
 * SetProgress sets how long the owner's lease lasts at most, in seconds: 0 after its end; and
 * its last checkpoint.
 */
static void
SetProgress(Row *row, const Lease *lease)
{
	TimestampTz now = GetCurrentTimestamp();
	double left = 0;

	if (LeaseRuns(lease->from, lease->until, now))
		left = Max(ceil((double) (lease->until - now) / USECS_PER_SEC), 1);
	Set(row, OP_ATTEMPT, Int32GetDatum(lease->attempt));
	SetText(row, OP_RECOVERY_POINT, lease->recoveryPoint);
	SetText(row, OP_STATE, lease->state);
	Set(row, OP_RETRY_AFTER, Int32GetDatum((int32) Min(left, INT_MAX)));
}

/*
 * HideCheckpoint removes from "record", the lease of another owner, what only a caller with
 * the same request may see: "fingerprint" is that of the caller, which did not mismatch.
 */
void
HideCheckpoint(KeyRecord *record, const bytea *fingerprint)
{
	if (record->fingerprint == NULL || fingerprint != NULL)
		return;
	record->lease.recoveryPoint = NULL;
	record->lease.state = NULL;
}

/*
 * ErrorExtensionReplaced reports that the extension was dropped, or created again,
 * during a call.
 */
pg_noreturn static void
ErrorExtensionReplaced(void)
{
	ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					errmsg("extension \"idempotency\" was dropped or replaced during the call"),
					errhint("Retry the transaction once the extension is installed.")));
}

/*
 * OperationDatum returns the composite, whose type the caller names, in the
 * current memory context.  "record" is the outcome to replay, what an owner was
 * granted (and, for run(), the outcome of its operation), or the lease of another
 * owner, after HideCheckpoint().  "fingerprint" can be NULL.
 * Throws 55000 if the type is gone.
 */
Datum
OperationDatum(Oid operationType, Outcome outcome, const KeyRecord *record,
			   const bytea *fingerprint)
{
	TupleDesc desc = lookup_rowtype_tupdesc_noerror(operationType, -1, true);
	Datum result;
	Row row;

	if (desc == NULL)
		ErrorExtensionReplaced();
	CompositeCheck(desc, "operation", attributeType, OPERATION_COLUMNS);
	memset(row.isnull, true, sizeof(row.isnull));
	Set(&row, OP_OUTCOME, OutcomeDatum(TupleDescAttr(desc, OP_OUTCOME)->atttypid, outcome));
	Set(&row, OP_REPLAYED, BoolGetDatum(outcome == OUTCOME_REPLAYED));
	Set(&row, OP_FAILED, BoolGetDatum(false));
	if (OutcomeIsGranted(outcome))
		SetOwner(&row, &record->lease);
	else if (outcome == OUTCOME_LEASED)
		SetProgress(&row, &record->lease);
	else if (outcome == OUTCOME_LOCKED || outcome == OUTCOME_CLAIMED_HERE)
		Set(&row, OP_RETRY_AFTER, Int32GetDatum(PROBLEM_RETRY_AFTER));
	if (outcome == OUTCOME_REPLAYED || (OutcomeIsGranted(outcome) && record->expiresAt != 0))
		SetAnswer(&row, record);
	SetText(&row, OP_FINGERPRINT, fingerprint);

	result = HeapTupleGetDatum(heap_form_tuple(desc, row.values, row.isnull));
	ReleaseTupleDesc(desc);
	return result;
}

/*
 * OperationType returns the type that the calling SQL function is declared to
 * return.  Throws 55000 if the function was dropped since it was called.
 */
Oid
OperationType(FunctionCallInfo fcinfo)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(fcinfo->flinfo->fn_oid));
	Oid type;

	if (!HeapTupleIsValid(tuple))
		ErrorExtensionReplaced();
	type = ((Form_pg_proc) GETSTRUCT(tuple))->prorettype;
	ReleaseSysCache(tuple);
	return type;
}

/*
 * ProblemOfOperation returns the SQLSTATE that claim() has for the outcome in a composite,
 * or 0 if it has none.  Throws 42804 if the type was altered.
 */
static int
ProblemOfOperation(HeapTupleHeader operation)
{
	TupleDesc desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(operation),
											HeapTupleHeaderGetTypMod(operation));
	const char *outcome;
	Datum value;
	bool isnull;

	CompositeCheck(desc, "operation", attributeType, OPERATION_COLUMNS);
	(void) OutcomeDatum(TupleDescAttr(desc, OP_OUTCOME)->atttypid, OUTCOME_CLAIMED);
	ReleaseTupleDesc(desc);
	value = GetAttributeByNum(operation, OP_OUTCOME + 1, &isnull);
	outcome = isnull ? "" : DatumGetCString(DirectFunctionCall1(enum_out, value));
	for (size_t i = 0; i < lengthof(outcomeMeanings); i++)
	{
		if (strcmp(outcomeMeanings[i].label, outcome) == 0)
			return outcomeMeanings[i].sqlstate;
	}
	return 0;
}

/*
 * RetryAfter returns retry_after of a composite, at least 1.
 */
static int
RetryAfter(HeapTupleHeader operation)
{
	bool isnull;
	Datum seconds = GetAttributeByNum(operation, OP_RETRY_AFTER + 1, &isnull);

	return isnull ? PROBLEM_RETRY_AFTER : Max(DatumGetInt32(seconds), PROBLEM_RETRY_AFTER);
}

/*
 * problem(operation) RETURNS json: problem details for an outcome that is an error, NULL
 * for any other
 */
Datum
idempotency_problem(PG_FUNCTION_ARGS)
{
	int sqlstate = ProblemOfOperation(PG_GETARG_HEAPTUPLEHEADER(0));

	if (sqlstate == 0)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(ProblemBody(sqlstate));
}

/*
 * problem_headers(operation) RETURNS json
 */
Datum
idempotency_problem_headers(PG_FUNCTION_ARGS)
{
	HeapTupleHeader operation = PG_GETARG_HEAPTUPLEHEADER(0);
	int sqlstate = ProblemOfOperation(operation);

	if (sqlstate == 0)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(ProblemHeaders(sqlstate, RetryAfter(operation)));
}
