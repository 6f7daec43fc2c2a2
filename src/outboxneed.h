/*-------------------------------------------------------------------------
 *
 * outboxneed.h
 *	  Which events a subscription still needs.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXNEED_H
#define IDEMPOTENCY_OUTBOXNEED_H

#include "utils/relcache.h"

#include "cursor.h"

/* What all subscriptions together need. */
typedef struct OutboxNeed
{
	int64 upto;			 /* up to here every position has passed, and no row will come */
	int count;			 /* of positions below which something was in flight */
	CursorSweep *sweeps; /* one for each */
} OutboxNeed;

extern void OutboxNeedRead(Relation table, int64 last, int64 gone, OutboxNeed *need);
extern bool OutboxNeedHas(OutboxNeed *need, uint64 txid, int64 seq);

#endif /* IDEMPOTENCY_OUTBOXNEED_H */
