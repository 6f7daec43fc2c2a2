/*-------------------------------------------------------------------------
 *
 * keys/expire.h
 *	  Deleting the expired rows of idempotency.key.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_KEYS_EXPIRE_H
#define IDEMPOTENCY_KEYS_EXPIRE_H

#include "storage/block.h"

/* The result of one scan. */
typedef struct ExpiryScan
{
	BlockNumber blocks; /* of the table */
	BlockNumber from;	/* the first block that was read */
	BlockNumber next;	/* where the next scan begins; "blocks" at the end of the table */
	int64 seen;			/* live rows read, expired or not */
	int64 reaped;
	int64 zombies; /* of those, leases in progress */
} ExpiryScan;

extern Oid LockKeyTable(bool dontWait);
extern void DeleteExpiredKeys(BlockNumber from, BlockNumber maxPages, int64 maxRows,
							  ExpiryScan *result);

#endif /* IDEMPOTENCY_KEYS_EXPIRE_H */
