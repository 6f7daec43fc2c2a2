/*-------------------------------------------------------------------------
 *
 * storescan.h
 *	  The walk over the heap of idempotency.key that removes expired rows.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_STORESCAN_H
#define IDEMPOTENCY_STORESCAN_H

#include "storage/block.h"

/* What came of one stretch of the walk. */
typedef struct ReapedStretch
{
	BlockNumber blocks; /* of the whole table */
	BlockNumber from;	/* where it began */
	BlockNumber next;	/* where to go on; "blocks" at the end of the table */
	int64 seen;			/* live rows looked at, expired or not */
	int64 reaped;
	int64 zombies; /* among those reaped */
	int64 skipped; /* expired too, but in use */
} ReapedStretch;

extern Oid KeyStoreLock(bool dontWait);
extern void KeyStoreReap(BlockNumber from, BlockNumber maxPages, int64 maxRows,
						 ReapedStretch *stretch);

#endif /* IDEMPOTENCY_STORESCAN_H */
