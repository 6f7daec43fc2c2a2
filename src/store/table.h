/*-------------------------------------------------------------------------
 *
 * store/table.h
 *	  The table idempotency.key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_TABLE_H
#define IDEMPOTENCY_STORE_TABLE_H

#include "base/relation.h"

extern ExtensionTable KeyTable;

extern Relation KeyTableOpen(LOCKMODE lockmode);
extern bool KeyTableIsKeyIndex(Relation index);

extern Relation KeyTableOpenAbandonedIndex(Relation table);

#endif /* IDEMPOTENCY_STORE_TABLE_H */
