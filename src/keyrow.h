/*-------------------------------------------------------------------------
 *
 * keyrow.h
 *	  The layout of a row of idempotency.key, for the rooms of the store alone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYROW_H
#define IDEMPOTENCY_KEYROW_H

#include "access/tupdesc.h"
#include "executor/tuptable.h"

#include "store.h"

/* The columns of idempotency.key, in order. */
enum
{
	COL_CREATED_AT = 1,
	COL_EXPIRES_AT,
	COL_STATUS, /* negative: a final failure */
	COL_SCOPE,
	COL_KEY,
	COL_FINGERPRINT,
	COL_RESPONSE,
	COL_HEADERS,
	/* Only a lease in progress has these. */
	COL_TOKEN,
	COL_ATTEMPT,
	COL_LEASED_AT,
	COL_LEASED_UNTIL,
	COL_RECOVERY_POINT,
	COL_RECOVERY_STATE,
	COL_REQUEST,
	COL_RETENTION,
	/* Only an operation that was finished with a lease has this. */
	COL_FINISHED_BY,
	KEY_COLUMNS = COL_FINISHED_BY,
	OUTCOME_COLUMNS = COL_HEADERS
};

extern bool KeyRowFits(TupleDesc desc, Oid keyType);
extern void KeyRowPrepare(TupleDesc desc);

extern KeyState KeyRowState(TupleTableSlot *slot);
extern bool KeyRowIsExpired(TupleTableSlot *slot);
extern TimestampTz KeyRowLeaseEnd(TupleTableSlot *slot);
extern int64 KeyRowToken(TupleTableSlot *slot);
extern void KeyRowName(TupleTableSlot *slot, KeyName *name);
extern void KeyRowRead(TupleTableSlot *slot, StoredOutcome *outcome);
extern void KeyRowFill(TupleTableSlot *slot, const KeyName *name, const StoredOutcome *outcome);
extern void KeyRowChange(TupleTableSlot *slot, TupleTableSlot *old, const StoredOutcome *changed,
						 int parts);

#endif /* IDEMPOTENCY_KEYROW_H */
