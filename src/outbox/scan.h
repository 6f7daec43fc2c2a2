/*-------------------------------------------------------------------------
 *
 * outbox/scan.h
 *	  Reading the outbox from a cursor on.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_SCAN_H
#define IDEMPOTENCY_OUTBOX_SCAN_H

#include "executor/tuptable.h"

#include "outbox/cursor.h"

typedef struct OutboxScan OutboxScan;

extern OutboxScan *OutboxScanBegin(const OutboxCursor *from, const OutboxCursor *upto, int64 limit);
extern TupleTableSlot *OutboxScanNext(OutboxScan *scan);
extern bool OutboxScanExhausted(const OutboxScan *scan);
extern int64 OutboxScanEnd(OutboxScan *scan, OutboxCursor *reached);

#endif /* IDEMPOTENCY_OUTBOX_SCAN_H */
