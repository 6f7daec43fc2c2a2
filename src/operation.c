/*-------------------------------------------------------------------------
 *
 * operation.c
 *	  Makes the composite idempotency.operation that callers get.
 *
 * The row type is looked up by each call: the extension may have been dropped
 * and created again since the last one, or while this one waited.  Composites are
 * built by the server's functions only.  Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "composite.h"
#include "errors.h"
#include "operation.h"

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
	[OP_RETRY_AFTER] = INTERVALOID,
	[OP_EXPIRES_AT] = TIMESTAMPTZOID,
};

static const char *const outcomeNames[] = {
	[OUTCOME_CLAIMED] = "claimed",		 [OUTCOME_TAKEN_OVER] = "taken_over",
	[OUTCOME_REPLAYED] = "replayed",	 [OUTCOME_IN_PROGRESS] = "in_progress",
	[OUTCOME_MISMATCHED] = "mismatched",
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
 * that has no such label.
 */
static Datum
OutcomeDatum(Oid type, Outcome outcome)
{
	HeapTuple tuple = SearchSysCache2(ENUMTYPOIDNAME, ObjectIdGetDatum(type),
									  CStringGetDatum(outcomeNames[outcome]));
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

/*
 * SetAnswer shows what is remembered of a finished operation.
 */
static void
SetAnswer(Row *row, const StoredOutcome *stored)
{
	if (stored->hasStatus)
		Set(row, OP_STATUS, Int32GetDatum(stored->status));
	SetText(row, OP_HEADERS, stored->headers);
	SetText(row, OP_RESPONSE, stored->response);
	Set(row, OP_FAILED, BoolGetDatum(stored->failed));
	if (!TIMESTAMP_IS_NOEND(stored->expiresAt))
		Set(row, OP_EXPIRES_AT, TimestampTzGetDatum(stored->expiresAt));
}

/*
 * SetOwner shows a new owner where to begin.  The token goes to nobody else.
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
 * SetRetry shows a duplicate how long the owner's lease may last.
 */
static void
SetRetry(Row *row, const Lease *lease)
{
	TimestampTz now = GetCurrentTimestamp();
	Interval *left = palloc0(sizeof(Interval));

	if (now >= lease->from && now <= lease->until)
		left->time = lease->until - now;
	Set(row, OP_ATTEMPT, Int32GetDatum(lease->attempt));
	Set(row, OP_RETRY_AFTER, IntervalPGetDatum(left));
}

static bool
IsGranted(Outcome outcome)
{
	return outcome == OUTCOME_CLAIMED || outcome == OUTCOME_TAKEN_OVER;
}

/*
 * OperationDatum returns the composite, whose type the caller names, in the
 * current memory context.  Throws 55000 if the type is gone.  "stored" is what was found under the
 * key, or NULL: an outcome that is answered, what the caller was granted (and, for run(), the
 * outcome it came to), or the lease of another owner, of which others learn no more than how long
 * it lasts.
 */
Datum
OperationDatum(Oid operationType, Outcome outcome, const StoredOutcome *stored)
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
	if (IsGranted(outcome))
		SetOwner(&row, &stored->lease);
	else if (outcome == OUTCOME_IN_PROGRESS && stored != NULL)
		SetRetry(&row, &stored->lease);
	if (outcome == OUTCOME_REPLAYED || (IsGranted(outcome) && stored->expiresAt != 0))
		SetAnswer(&row, stored);

	result = HeapTupleGetDatum(heap_form_tuple(desc, row.values, row.isnull));
	ReleaseTupleDesc(desc);
	return result;
}

/*
 * OperationOutcome returns the outcome that a composite bears, or NULL.
 */
const char *
OperationOutcome(HeapTupleHeader operation)
{
	TupleDesc desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(operation),
											HeapTupleHeaderGetTypMod(operation));
	HeapTuple label;
	Datum outcome;
	char *name;
	bool isnull;

	CompositeCheck(desc, "operation", attributeType, OPERATION_COLUMNS);
	(void) OutcomeDatum(TupleDescAttr(desc, OP_OUTCOME)->atttypid, OUTCOME_CLAIMED);
	ReleaseTupleDesc(desc);
	outcome = GetAttributeByNum(operation, OP_OUTCOME + 1, &isnull);
	if (isnull)
		return NULL;

	label = SearchSysCache1(ENUMOID, outcome);
	if (!HeapTupleIsValid(label))
		ErrorRowType("operation");
	name = pstrdup(NameStr(((Form_pg_enum) GETSTRUCT(label))->enumlabel));
	ReleaseSysCache(label);
	return name;
}

/*
 * ResultType returns the type that the calling SQL function is declared to
 * return.  Throws 55000 if the function was dropped since it was called.
 */
Oid
ResultType(FunctionCallInfo fcinfo)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(fcinfo->flinfo->fn_oid));
	Oid type;

	if (!HeapTupleIsValid(tuple))
		ErrorExtensionReplaced();
	type = ((Form_pg_proc) GETSTRUCT(tuple))->prorettype;
	ReleaseSysCache(tuple);
	return type;
}
