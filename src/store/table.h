/*-------------------------------------------------------------------------
 *
 * store/table.h
 *	  The table idempotency.key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORE_TABLE_H
#define IDEMPOTENCY_STORE_TABLE_H

#include "query/relation.h"

/* The indexes of the table, as KeyTableIndexes() finds them. */
typedef struct KeyIndexes
{
	Oid primaryKey;
	Oid abandoned; /* InvalidOid: missing, or not as the extension created it */
	bool others;   /* more indexes, or not those of the extension */
} KeyIndexes;

extern Relation KeyTableOpen(LOCKMODE lockmode);
extern bool KeyTableIsKeyIndex(Relation index);

extern Relation KeyTableOpenAbandonedIndex(void);
extern const KeyIndexes *KeyTableIndexes(void);

#endif /* IDEMPOTENCY_STORE_TABLE_H */
