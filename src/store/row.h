/*-------------------------------------------------------------------------
 *
 * store/row.h
 *	  The layout and the versions of a row of idempotency.key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_ROW_H
#define IDEMPOTENCY_STORE_ROW_H

#include "access/sysattr.h"
#include "access/tupdesc.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "utils/relcache.h"

#include "store/store.h"

/* The columns of idempotency.key, in order. */
enum
{
	COL_CREATED_AT = 1,
	COL_SCOPE,
	COL_KEY,
	COL_FINGERPRINT,
	COL_RESPONSE,
	COL_HEADERS,
	COL_STATUS, /* negative: a final failure */
	COL_EXPIRES_AT,
	/* of a lease in progress only */
	COL_LEASED_AT,
	COL_LEASED_UNTIL,
	COL_TOKEN,
	COL_RETENTION,
	COL_ATTEMPT,
	COL_RECOVERY_POINT,
	COL_RECOVERY_STATE,
	COL_REQUEST,
	/* of an operation only that was finished with a lease */
	COL_FINISHED_BY,
	KEY_COLUMNS = COL_FINISHED_BY,
	OUTCOME_COLUMNS = COL_EXPIRES_AT
};

/*
 * KeyRowXmin returns the transaction that wrote the row version in "slot", also of a
 * frozen one: with the TID, it identifies the version.
 */
static inline TransactionId
KeyRowXmin(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull));
}

extern void KeyRowPrepare(TupleDesc desc);

extern KeyState KeyRowState(TupleTableSlot *slot);
extern bool KeyRowIsExpired(TupleTableSlot *slot, TimestampTz now);
extern TimestampTz KeyRowTime(TupleTableSlot *slot, int column);
extern int64 KeyRowToken(TupleTableSlot *slot);
extern void KeyRowName(TupleTableSlot *slot, KeyName *name);
extern void KeyRowRead(TupleTableSlot *slot, KeyRecord *record);
extern void KeyRowFill(TupleTableSlot *slot, const KeyName *name, const KeyRecord *record,
					   TimestampTz createdAt);
extern void KeyRowChange(TupleTableSlot *slot, TupleTableSlot *old, const KeyRecord *record,
						 int parts);

extern bool KeyRowIsOf(TupleTableSlot *slot, const KeyName *name);
extern bool KeyRowIsIn(TupleTableSlot *slot, const ScopePattern *scopes);
extern bool KeyRowIsOwn(TupleTableSlot *slot);
extern void KeyRowCheckSnapshot(Relation table, const KeyName *name, TupleTableSlot *slot);

extern void KeyStoreRemember(const ItemPointerData *tid);

extern bytea *KeyTextPack(const text *key);
extern text *KeyTextUnpack(const bytea *stored);

#endif /* IDEMPOTENCY_STORE_ROW_H */
