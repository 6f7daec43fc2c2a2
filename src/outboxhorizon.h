/*-------------------------------------------------------------------------
 *
 * outboxhorizon.h
 *	  What of the outbox is over as of a snapshot.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXHORIZON_H
#define IDEMPOTENCY_OUTBOXHORIZON_H

#include "access/htup.h"
#include "executor/tuptable.h"
#include "storage/buf.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"

#include "cursor.h"

/* What a row is to a snapshot. */
typedef enum OutboxRowState
{
	ROW_VISIBLE,
	ROW_PENDING, /* its transaction is at work, or was when the snapshot was made */
	ROW_GONE
} OutboxRowState;

/* What was over when a snapshot was made, by 64-bit transaction ids. */
typedef struct OutboxHorizon
{
	Snapshot snapshot;
	uint64 xmin;
	uint64 xmax;
	uint64 next; /* those before it have begun */
} OutboxHorizon;

extern void OutboxHorizonInit(OutboxHorizon *horizon, Snapshot snapshot);
extern bool OutboxIsOver(const OutboxHorizon *horizon, uint64 txid);
extern uint64 OutboxOldestPublisher(Relation table);
extern bool OutboxNobodyIsPublishing(Relation table);
extern OutboxRowState OutboxTupleState(HeapTuple tuple, uint64 txid, Buffer buffer,
									   Snapshot snapshot);
extern OutboxRowState OutboxStateOf(TupleTableSlot *slot, Snapshot snapshot);
extern void OutboxNotePending(OutboxCursor *cursor, OutboxHorizon *horizon, uint64 txid, int64 seq);

#endif /* IDEMPOTENCY_OUTBOXHORIZON_H */
