/*-------------------------------------------------------------------------
 *
 * keys/operation.h
 *	  The composite idempotency.operation.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_OPERATION_H
#define IDEMPOTENCY_KEYS_OPERATION_H

#include "fmgr.h"

#include "server/stats.h"
#include "store/store.h"

/* The outcome of a claim. */
typedef enum Outcome
{
	OUTCOME_CLAIMED,
	OUTCOME_TAKEN_OVER,
	OUTCOME_REPLAYED,
	OUTCOME_MISMATCHED,
	OUTCOME_LEASED,		  /* another owner has a lease */
	OUTCOME_CLAIMED_HERE, /* this transaction has claimed the key */
	OUTCOME_LOCKED		  /* another transaction holds the key's lock */
} Outcome;

/* What an outcome is elsewhere. */
typedef struct OutcomeMeaning
{
	const char *label; /* of the enum in SQL */
	CounterKind counter;
	int sqlstate; /* of the error with which claim() refuses; 0: it does not */
} OutcomeMeaning;

extern const OutcomeMeaning outcomeMeanings[];

static inline bool
OutcomeIsGranted(Outcome outcome)
{
	return outcome == OUTCOME_CLAIMED || outcome == OUTCOME_TAKEN_OVER;
}

extern void HideCheckpoint(KeyRecord *record, const bytea *fingerprint);
extern Datum OperationDatum(Oid operationType, Outcome outcome, const KeyRecord *record,
							const bytea *fingerprint);
extern Oid OperationType(FunctionCallInfo fcinfo);

#endif /* IDEMPOTENCY_KEYS_OPERATION_H */
