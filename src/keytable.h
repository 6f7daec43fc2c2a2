/*-------------------------------------------------------------------------
 *
 * keytable.h
 *	  The table idempotency.key, for store.c alone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYTABLE_H
#define IDEMPOTENCY_KEYTABLE_H

#include "executor/tuptable.h"
#include "storage/lockdefs.h"
#include "utils/relcache.h"

#include "store.h"

extern Relation KeyTableOpen(LOCKMODE lockmode);
extern bool KeyTableIsKeyIndex(Relation index);
extern void KeyTableInit(void);

extern void KeyRowRead(TupleTableSlot *slot, StoredOutcome *outcome);
extern bool KeyRowIsExpired(TupleTableSlot *slot);
extern void KeyRowFill(TupleTableSlot *slot, const KeyName *name, const StoredOutcome *outcome);

#endif /* IDEMPOTENCY_KEYTABLE_H */
