/*-------------------------------------------------------------------------
 *
 * outboxscan.h
 *	  Reading the outbox from a cursor on.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXSCAN_H
#define IDEMPOTENCY_OUTBOXSCAN_H

#include "executor/tuptable.h"

#include "cursor.h"

typedef struct OutboxScan OutboxScan;

extern OutboxScan *OutboxScanBegin(const OutboxCursor *from, const OutboxCursor *upto, int64 limit);
extern TupleTableSlot *OutboxScanNext(OutboxScan *scan);
extern bool OutboxScanExhausted(const OutboxScan *scan, int64 *next);
extern int64 OutboxScanEnd(OutboxScan *scan, OutboxCursor *reached);

#endif /* IDEMPOTENCY_OUTBOXSCAN_H */
