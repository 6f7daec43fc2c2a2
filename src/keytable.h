/*-------------------------------------------------------------------------
 *
 * keytable.h
 *	  The table idempotency.key, for the rooms of the store alone.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYTABLE_H
#define IDEMPOTENCY_KEYTABLE_H

#include "owntable.h"

extern OwnTable KeyTable;

extern Relation KeyTableOpen(LOCKMODE lockmode);
extern bool KeyTableIsKeyIndex(Relation index);

extern Relation KeyTableOpenAbandonedIndex(Relation table);

#endif /* IDEMPOTENCY_KEYTABLE_H */
