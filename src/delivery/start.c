/*-------------------------------------------------------------------------
 *
 * delivery/start.c
 *	  The cursor of a subscription that starts now.
 *
 * It begins after the last number in the index, except for what is in flight: the events
 * of a transaction that is open belong to the subscription, whatever their numbers.  They
 * are found in the heap, on the pages that are not all-visible.
 *
 * Locks: ACCESS SHARE on the table and its index, and a page at a time.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "access/visibilitymap.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"
#include "utils/xid8.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/guc.h"
#include "delivery/position.h"
#include "outbox/table.h"
#include "outbox/visibility.h"

/*
 * LastNumber returns the last number in the index, whether its row is visible or not, or
 * 0.
 */
static int64
LastNumber(Relation table)
{
	TupleTableSlot *slot = table_slot_create(table, NULL);
	IndexScanDesc scan = OutboxIndexBegin(table);
	int64 last = 0;

	OutboxIndexRescan(scan, PG_INT64_MIN, PG_INT64_MAX);
	(void) OutboxIndexNext(scan, BackwardScanDirection, slot, &last);
	OutboxIndexEnd(scan);
	ExecDropSingleTupleTableSlot(slot);
	return last;
}

/*
 * AddPending adds the events of a page that are in flight to the cursor.  Those of the
 * current transaction are: they commit with the subscription.
 */
static void
AddPending(Relation table, BlockNumber block, Snapshot snapshot, OutboxCursor *cursor)
{
	Buffer buffer = ReadBuffer(table, block);
	Page page = BufferGetPage(buffer);

	LockBuffer(buffer, BUFFER_LOCK_SHARE);
	for (OffsetNumber i = FirstOffsetNumber; i <= PageGetMaxOffsetNumber(page); i++)
	{
		ItemId item = PageGetItemId(page, i);
		HeapTupleData tuple;
		bool isnull;
		int64 seq;
		uint64 txid;

		if (!ItemIdIsNormal(item))
			continue;
		tuple.t_data = (HeapTupleHeader) PageGetItem(page, item);
		tuple.t_len = ItemIdGetLength(item);
		tuple.t_tableOid = RelationGetRelid(table);
		ItemPointerSet(&tuple.t_self, block, i);
		seq = DatumGetInt64(heap_getattr(&tuple, OUT_SEQ, RelationGetDescr(table), &isnull));
		txid = U64FromFullTransactionId(DatumGetFullTransactionId(
			heap_getattr(&tuple, OUT_TXID, RelationGetDescr(table), &isnull)));
		if (seq <= cursor->passed && OutboxTupleState(&tuple, buffer, snapshot) == ROW_PENDING)
			CursorAddPending(cursor, snapshot, txid, seq);
	}
	UnlockReleaseBuffer(buffer);
}

/*
 * CursorStartNow makes the cursor after which there are the events of transactions that
 * commit from now on, in the current memory context.  Waits until every transaction that is
 * in publish() has inserted its row.  One can wait for this transaction in an index that an
 * administrator added, which no deadlock check detects: throws 55P03 after idempotency.wait.
 */
void
CursorStartNow(OutboxCursor *cursor)
{
	Relation table = OutboxTableOpen(AccessShareLock);
	Buffer map = InvalidBuffer;
	BlockNumber blocks;
	Snapshot snapshot;

	/* Begin after the last number */
	CursorInit(cursor, LastNumber(table));
	InjectionPoint("start-await");
	if (!OutboxAwaitPublishers(table, DefaultWait))
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("could not wait for the events that are just being published"),
				 errdetail("A transaction has held a lock on an index of idempotency.outbox for "
						   "longer than idempotency.wait."),
				 errhint("Try again, or end that transaction; see pg_locks.")));

	/* Add the rows below it that the snapshot does not show */
	InjectionPoint("start-snapshot");
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	blocks = RelationGetNumberOfBlocks(table);
	InjectionPoint("start-scan");
	for (BlockNumber block = 0; block < blocks; block++)
	{
		CHECK_FOR_INTERRUPTS();
		if (!VM_ALL_VISIBLE(table, block, &map))
			AddPending(table, block, snapshot, cursor);
	}
	if (BufferIsValid(map))
		ReleaseBuffer(map);
	UnregisterSnapshot(snapshot);
	table_close(table, AccessShareLock);
}
