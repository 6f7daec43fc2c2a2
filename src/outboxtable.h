/*-------------------------------------------------------------------------
 *
 * outboxtable.h
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXTABLE_H
#define IDEMPOTENCY_OUTBOXTABLE_H

#include "access/genam.h"
#include "access/sdir.h"
#include "executor/tuptable.h"
#include "owntable.h"

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

extern OwnTable OutboxTable;

extern Relation OutboxTableOpen(LOCKMODE lockmode);
extern Oid OutboxTableIndex(Relation table);
extern uint64 OutboxChannel(void);

extern void OutboxRescan(IndexScanDesc scan, int64 from, int64 upto);
extern bool OutboxNextRow(IndexScanDesc scan, ScanDirection direction, TupleTableSlot *slot,
						  int64 *looked);
extern int64 OutboxSeq(TupleTableSlot *slot);
extern uint64 OutboxTxid(TupleTableSlot *slot);

#endif /* IDEMPOTENCY_OUTBOXTABLE_H */
