/*-------------------------------------------------------------------------
 *
 * outbox/visibility.h
 *	  Which transactions have ended, and which rows are visible, as of a snapshot.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_VISIBILITY_H
#define IDEMPOTENCY_OUTBOX_VISIBILITY_H

#include "access/htup.h"
#include "executor/tuptable.h"
#include "storage/buf.h"
#include "utils/relcache.h"
#include "utils/snapshot.h"

#include "outbox/cursor.h"

/* What a row is to a snapshot. */
typedef enum OutboxRowState
{
	ROW_VISIBLE,
	ROW_PENDING, /* its transaction is open, or was when the snapshot was taken */
	ROW_GONE
} OutboxRowState;

extern bool OutboxHasEnded(Snapshot snapshot, uint64 txid);
extern uint64 OutboxOldestPublisher(Relation table);
extern bool OutboxAwaitPublishers(Relation table, int waitMs);
extern OutboxRowState OutboxTupleState(HeapTuple tuple, Buffer buffer, Snapshot snapshot);
extern OutboxRowState OutboxStateOf(TupleTableSlot *slot, Snapshot snapshot);
extern void CursorAddPending(OutboxCursor *cursor, Snapshot snapshot, uint64 txid, int64 seq);

#endif /* IDEMPOTENCY_OUTBOX_VISIBILITY_H */
