/*-------------------------------------------------------------------------
 *
 * outbox/table.h
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_TABLE_H
#define IDEMPOTENCY_OUTBOX_TABLE_H

#include "access/genam.h"
#include "access/sdir.h"
#include "executor/tuptable.h"
#include "base/relation.h"

/* The columns of idempotency.outbox, in order. */
enum
{
	OUT_SEQ = 1,
	OUT_TXID,
	OUT_PUBLISHED_AT,
	OUT_ID,
	OUT_TOPIC,
	OUT_AGGREGATE,
	OUT_TYPE,
	OUT_PAYLOAD,
	OUT_HEADERS,
	OUTBOX_COLUMNS = OUT_HEADERS
};

extern Relation OutboxTableOpen(LOCKMODE lockmode);
extern uint64 OutboxChannel(void);
extern int64 OutboxLastNumber(void);

extern IndexScanDesc OutboxIndexBegin(Relation table);
extern void OutboxIndexRescan(IndexScanDesc scan, int64 from, int64 upto);
extern bool OutboxIndexNext(IndexScanDesc scan, ScanDirection direction, TupleTableSlot *slot,
							int64 *seq);
extern void OutboxIndexEnd(IndexScanDesc scan);
extern int64 OutboxSeq(TupleTableSlot *slot);
extern uint64 OutboxTxid(TupleTableSlot *slot);

extern void OutboxKeepEvents(void);
extern bool OutboxLockForReaper(void);

#endif /* IDEMPOTENCY_OUTBOX_TABLE_H */
