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

/* A row that took the place of another one of its event, and who published that. */
typedef struct ChangedRow
{
	uint64 txid;
	int64 seq;
} ChangedRow;

/*
 * LastNumber returns the last number in the index between two, whoever wrote it or, with
 * a snapshot, of those whose row that sees; or 0.
 */
static int64
LastNumber(Relation table, int64 from, int64 upto, Snapshot snapshot)
{
	Relation index = index_open(OutboxTableIndex(table), AccessShareLock);
	TupleTableSlot *slot = table_slot_create(table, NULL);
	IndexScanDesc scan = index_beginscan_compat(table, index, SnapshotAny, 2);
	int64 entries = 0;
	int64 last = 0;

	OutboxRescan(scan, from, upto);
	while (last == 0 && OutboxNextRow(scan, BackwardScanDirection, slot, &entries))
	{
		if (snapshot == NULL || OutboxStateOf(slot, snapshot) == ROW_VISIBLE)
			last = OutboxSeq(slot);
	}
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
 * NoteChanged notes the events of some new rows, unless the snapshot sees another row
 * of the event: it was there before it was changed.
 */
static void
NoteChanged(Relation table, const ChangedRow *rows, int count, OutboxHorizon *horizon,
			OutboxCursor *cursor)
{
	for (int i = 0; i < count; i++)
	{
		int64 seq = rows[i].seq;

		if (LastNumber(table, seq, seq, horizon->snapshot) != seq)
			OutboxNotePending(cursor, horizon, rows[i].txid, seq);
	}
}

/*
 * NotePending notes the events of a page that are in flight.  What we have published is:
 * it commits with the subscription.
 */
static void
NotePending(Relation table, BlockNumber block, OutboxHorizon *horizon, OutboxCursor *cursor)
{
	ChangedRow changed[MaxHeapTuplesPerPage];
	int count = 0;
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
		if (seq > cursor->passed ||
			OutboxTupleState(&tuple, txid, buffer, horizon->snapshot) != ROW_PENDING)
			continue;
		if ((tuple.t_data->t_infomask & HEAP_UPDATED) == 0)
			OutboxNotePending(cursor, horizon, txid, seq);
		else
			changed[count++] = (ChangedRow){txid, seq};
	}
	UnlockReleaseBuffer(buffer);
	NoteChanged(table, changed, count, horizon, cursor);
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

	CursorInit(cursor, LastNumber(table, PG_INT64_MIN, PG_INT64_MAX, NULL));
	InjectionPoint("start-await");
	AwaitPublishers(table);
	InjectionPoint("start-snapshot");
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxHorizonInit(&horizon, snapshot);
	blocks = RelationGetNumberOfBlocks(table);
	InjectionPoint("start-scan");
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
