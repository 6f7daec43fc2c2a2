/*-------------------------------------------------------------------------
 *
 * operation.h
 *	  The composite idempotency.operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OPERATION_H
#define IDEMPOTENCY_OPERATION_H

#include "access/htup.h"
#include "fmgr.h"

#include "store.h"

typedef enum Outcome
{
	OUTCOME_CLAIMED,
	OUTCOME_TAKEN_OVER,
	OUTCOME_REPLAYED,
	OUTCOME_IN_PROGRESS,
	OUTCOME_MISMATCHED
} Outcome;

extern Datum OperationDatum(Oid operationType, Outcome outcome, const StoredOutcome *stored);
extern const char *OperationOutcome(HeapTupleHeader operation);
extern Oid ResultType(FunctionCallInfo fcinfo);

#endif /* IDEMPOTENCY_OPERATION_H */
