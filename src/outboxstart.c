/*-------------------------------------------------------------------------
 *
 * outboxstart.c
 *	  Where a subscription begins that wants what comes from now on.
 *
 * It begins behind the last number in the index, but for what is in flight: the
 * events of a transaction that is still open belong to it, whatever their
 * numbers.  They are found in the heap, on the pages that are not all-visible;
 * VACUUM has been on the others since anybody wrote there.
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
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/rel.h"
#include "utils/xid8.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "guc.h"
#include "outboxerrors.h"
#include "outboxhorizon.h"
#include "outboxstart.h"
#include "outboxtable.h"

/* How long we sleep between two looks at who is publishing, in microseconds. */
#define PUBLISHER_SLEEP_US 500

/*
 * LastNumber returns the last number in the index, whoever wrote it, or 0.
 */
static int64
LastNumber(Relation table)
{
	Relation index = index_open(OutboxTableIndex(table), AccessShareLock);
	TupleTableSlot *slot = table_slot_create(table, NULL);
	IndexScanDesc scan = index_beginscan_compat(table, index, SnapshotAny, 0);
	int64 last = 0;

	index_rescan(scan, NULL, 0, NULL, 0);
	if (index_getnext_slot(scan, BackwardScanDirection, slot))
		last = OutboxSeq(slot);
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	index_close(index, AccessShareLock);
	return last;
}

/*
 * AwaitPublishers waits until everybody who was in the middle of publish() has
 * inserted his row; microseconds, as a rule.  But he may wait for us, in an index
 * that an administrator has added, and nobody would find that out: throws 55P03
 * after idempotency.wait.
 */
static void
AwaitPublishers(Relation table)
{
	uint64 next = U64FromFullTransactionId(ReadNextFullTransactionId());
	TimestampTz end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), DefaultWait);

	while (OutboxOldestPublisher(table) < next)
	{
		CHECK_FOR_INTERRUPTS();
		if (GetCurrentTimestamp() >= end)
			ErrorPublishersBusy();
		pg_usleep(PUBLISHER_SLEEP_US);
	}
}

/*
 * IsPending tells whether a tuple on a page that the caller has locked is not
 * to be seen by the snapshot, and may be later.
 */
static bool
IsPending(HeapTuple tuple, Snapshot snapshot, Buffer buffer)
{
	TransactionId deadAfter;
	HTSV_Result result;

	if (TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data)))
		return true; /* what we have published commits with the subscription */
	if (HeapTupleSatisfiesVisibility(tuple, snapshot, buffer))
		return false;
	result = HeapTupleSatisfiesVacuumHorizon(tuple, buffer, &deadAfter);
	return result != HEAPTUPLE_DEAD && result != HEAPTUPLE_RECENTLY_DEAD;
}

/*
 * NotePending notes the rows of a page that are in flight.
 */
static void
NotePending(Relation table, BlockNumber block, OutboxHorizon *horizon, OutboxCursor *cursor)
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

		if (!ItemIdIsNormal(item))
			continue;
		tuple.t_data = (HeapTupleHeader) PageGetItem(page, item);
		tuple.t_len = ItemIdGetLength(item);
		tuple.t_tableOid = RelationGetRelid(table);
		ItemPointerSet(&tuple.t_self, block, i);
		seq = DatumGetInt64(heap_getattr(&tuple, OUT_SEQ, RelationGetDescr(table), &isnull));
		if (seq <= cursor->passed && IsPending(&tuple, horizon->snapshot, buffer))
			OutboxNotePending(cursor, horizon,
							  U64FromFullTransactionId(DatumGetFullTransactionId(heap_getattr(
								  &tuple, OUT_TXID, RelationGetDescr(table), &isnull))),
							  seq);
	}
	UnlockReleaseBuffer(buffer);
}

/*
 * OutboxNow makes the cursor behind which there are the events of those who
 * commit from now on, in the current memory context.  Waits for whoever is in
 * the middle of publish().
 */
void
OutboxNow(OutboxCursor *cursor)
{
	Relation table = OutboxTableOpen(AccessShareLock);
	Buffer map = InvalidBuffer;
	BlockNumber blocks;
	OutboxHorizon horizon;
	Snapshot snapshot;

	CursorInit(cursor, LastNumber(table));
	InjectionPoint("start-await");
	AwaitPublishers(table);
	InjectionPoint("start-snapshot");
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxHorizonInit(&horizon, snapshot);
	InjectionPoint("start-scan");
	blocks = RelationGetNumberOfBlocks(table);
	for (BlockNumber block = 0; block < blocks; block++)
	{
		CHECK_FOR_INTERRUPTS();
		if (!VM_ALL_VISIBLE(table, block, &map))
			NotePending(table, block, &horizon, cursor);
	}
	if (BufferIsValid(map))
		ReleaseBuffer(map);
	UnregisterSnapshot(snapshot);
	table_close(table, AccessShareLock);
}
