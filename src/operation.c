/*-------------------------------------------------------------------------
 *
 * operation.c
 *	  Makes the composite idempotency.operation that callers get.
 *
 * The row type is looked up by each call: the extension may have been dropped
 * and created again since the last one.  Composites are built by the server's
 * functions only.  Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "funcapi.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"

#include "errors.h"
#include "operation.h"

/* The attributes of idempotency.operation, in order. */
enum
{
	OP_OUTCOME,
	OP_REPLAYED,
	OP_STATUS,
	OP_HEADERS,
	OP_RESPONSE,
	OP_FAILED,
	OP_EXPIRES_AT,
	OPERATION_COLUMNS
};

static const char *const outcomeNames[] = {
	[OUTCOME_CLAIMED] = "claimed",
	[OUTCOME_REPLAYED] = "replayed",
	[OUTCOME_IN_PROGRESS] = "in_progress",
	[OUTCOME_MISMATCHED] = "mismatched",
};

/*
 * OperationDatum returns the composite that the calling SQL function is
 * declared to return, in the current memory context.  "stored" is NULL where
 * nothing is remembered, or where it must not be shown.
 */
Datum
OperationDatum(FunctionCallInfo fcinfo, Outcome outcome, const StoredOutcome *stored)
{
	TupleDesc desc = lookup_rowtype_tupdesc(get_func_rettype(fcinfo->flinfo->fn_oid), -1);
	Datum values[OPERATION_COLUMNS] = {0};
	bool isnull[OPERATION_COLUMNS];
	Datum result;

	if (desc->natts != OPERATION_COLUMNS)
		ErrorOperationType();

	memset(isnull, true, sizeof(isnull));
	isnull[OP_OUTCOME] = isnull[OP_REPLAYED] = isnull[OP_FAILED] = false;
	values[OP_OUTCOME] = CStringGetTextDatum(outcomeNames[outcome]);
	values[OP_REPLAYED] = BoolGetDatum(outcome == OUTCOME_REPLAYED);
	values[OP_FAILED] = BoolGetDatum(stored != NULL && stored->failed);

	if (stored != NULL)
	{
		values[OP_STATUS] = Int32GetDatum(stored->status);
		isnull[OP_STATUS] = !stored->hasStatus;
		values[OP_HEADERS] = PointerGetDatum(stored->headers);
		isnull[OP_HEADERS] = stored->headers == NULL;
		values[OP_RESPONSE] = PointerGetDatum(stored->response);
		isnull[OP_RESPONSE] = stored->response == NULL;
		values[OP_EXPIRES_AT] = TimestampTzGetDatum(stored->expiresAt);
		isnull[OP_EXPIRES_AT] = false;
	}

	result = HeapTupleGetDatum(heap_form_tuple(desc, values, isnull));
	ReleaseTupleDesc(desc);
	return result;
}
