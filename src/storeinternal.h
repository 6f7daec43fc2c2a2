/*-------------------------------------------------------------------------
 *
 * storeinternal.h
 *	  What the rooms of the key store share: store.c, storewrite.c, storebatch.c
 *	  and storescan.c, the only ones that touch its rows.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STOREINTERNAL_H
#define IDEMPOTENCY_STOREINTERNAL_H

#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"

#include "store.h"

/* An open table with all its indexes, ready to take rows. */
typedef struct Writer
{
	Relation table;
	EState *estate;
	ResultRelInfo *relinfo;
	List *keyIndexes; /* OIDs of those that keep (scope, key) unique */
	TupleTableSlot *slot;
} Writer;

extern void WriterOpen(Writer *writer, bool speculative);
extern void WriterClose(Writer *writer);
extern bool OverwriteVersion(Writer *writer, const KeyName *name, ItemPointer tid);

extern bool FindVersion(Relation table, const KeyName *name, Snapshot snapshot,
						TupleTableSlot *slot);
extern bool IsVersion(TupleTableSlot *slot, const KeyVersion *version);
extern void CheckSnapshot(Relation table, const KeyName *name, TupleTableSlot *slot);

#endif /* IDEMPOTENCY_STOREINTERNAL_H */
