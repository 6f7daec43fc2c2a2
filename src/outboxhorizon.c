/*-------------------------------------------------------------------------
 *
 * outboxhorizon.c
 *	  What of the outbox is over as of a snapshot: transactions, and rows.
 *
 * Transactions are known by their 64-bit ids, since a row bears its publisher's for as
 * long as it lives.  An id may be another cluster's, where rows came by a restore.
 *
 * Locks: a page is locked while a row's visibility is looked up.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/transam.h"
#include "access/xact.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lock.h"
#include "storage/procarray.h"
#include "storage/sinvaladt.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "outboxhorizon.h"
#include "outboxtable.h"

/* How often, and how long in microseconds, to wait for publishers. */
#define PUBLISHER_LOOKS 10
#define PUBLISHER_SLEEP_US 500

/*
 * FullXid returns the 64-bit form of a transaction id of this cluster that is
 * not in the future.
 */
static uint64
FullXid(TransactionId xid)
{
	FullTransactionId next = ReadNextFullTransactionId();
	uint32 epoch = EpochFromFullTransactionId(next);

	if (xid > XidFromFullTransactionId(next))
		epoch--;
	return U64FromFullTransactionId(FullTransactionIdFromEpochAndXid(epoch, xid));
}

/*
 * OutboxHorizonInit prepares to tell what was over when the snapshot was made.
 */
void
OutboxHorizonInit(OutboxHorizon *horizon, Snapshot snapshot)
{
	horizon->snapshot = snapshot;
	horizon->xmin = FullXid(snapshot->xmin);
	horizon->xmax = FullXid(snapshot->xmax);
	horizon->next = horizon->xmax;
}

/*
 * IsOurs tells whether that is the transaction that we are in.
 */
static bool
IsOurs(uint64 txid)
{
	FullTransactionId mine = GetTopFullTransactionIdIfAny();

	return FullTransactionIdIsValid(mine) && U64FromFullTransactionId(mine) == txid;
}

/*
 * OutboxIsOver tells whether a transaction had ended when the snapshot was made.  Our
 * own has not: it may yet roll back.
 */
bool
OutboxIsOver(const OutboxHorizon *horizon, uint64 txid)
{
	if (IsOurs(txid))
		return false;
	if (txid < horizon->xmin)
		return true;
	if (txid >= horizon->xmax)
		return false;
	return !XidInMVCCSnapshot((TransactionId) txid, horizon->snapshot);
}

/*
 * HasBegun tells whether a transaction is one of this cluster's, if only by its
 * number.
 */
static bool
HasBegun(OutboxHorizon *horizon, uint64 txid)
{
	if (txid >= horizon->next)
		horizon->next = U64FromFullTransactionId(ReadNextFullTransactionId());
	return txid < horizon->next;
}

/*
 * XidOf returns the transaction id of a virtual transaction, or an invalid one.
 */
static TransactionId
XidOf(VirtualTransactionId holder)
{
	TransactionId xid;
	TransactionId xmin;
	int subxids pg_attribute_unused();
	bool overflowed pg_attribute_unused();

	if (VirtualTransactionIdIsRecoveredPreparedXact(holder))
		return holder.localTransactionId;
	VirtualTransactionGetIds(holder, &xid, &xmin, &subxids, &overflowed);
	return xid;
}

/*
 * OutboxOldestPublisher returns the oldest transaction that is in the middle of
 * publishing: that holds a lock on an index of the table.  While REINDEX
 * CONCURRENTLY replaces one there are two, and either may be locked.
 */
uint64
OutboxOldestPublisher(Relation table)
{
	uint64 oldest = PG_UINT64_MAX;
	List *indexes = RelationGetIndexList(table);
	ListCell *cell;

	foreach (cell, indexes)
	{
		VirtualTransactionId *holders;
		LOCKTAG tag;
		int count;

		SET_LOCKTAG_RELATION(tag, MyDatabaseId, lfirst_oid(cell));
		holders = GetLockConflicts(&tag, ShareLock, &count);
		for (int i = 0; i < count; i++)
		{
			TransactionId xid = XidOf(holders[i]);

			/* VACUUM locks indexes as well, and has none. */
			if (TransactionIdIsNormal(xid))
				oldest = Min(oldest, FullXid(xid));
		}
		pfree(holders); /* whoever waits for publishers asks again and again */
	}
	list_free(indexes);
	return oldest;
}

/*
 * OutboxNobodyIsPublishing tells whether every transaction that was in the middle of
 * publish() when it was called has left it: no number that was given out before gets a
 * row any more.  Waits for them no longer than some milliseconds.
 */
bool
OutboxNobodyIsPublishing(Relation table)
{
	uint64 next = U64FromFullTransactionId(ReadNextFullTransactionId());

	for (int look = 0; look < PUBLISHER_LOOKS; look++)
	{
		CHECK_FOR_INTERRUPTS();
		if (OutboxOldestPublisher(table) >= next)
			return true;
		pg_usleep(PUBLISHER_SLEEP_US);
	}
	return false;
}

/*
 * OutboxTupleState tells what a tuple is to the snapshot, the row of an event that "txid"
 * published.  The caller has locked its page.
 *
 * What we have published is pending, though we see it.  So is a row that came too late
 * for the snapshot, even if another one has taken its place by now: that one may lie where
 * the reader has been already.
 */
OutboxRowState
OutboxTupleState(HeapTuple tuple, uint64 txid, Buffer buffer, Snapshot snapshot)
{
	HeapTupleHeader header = tuple->t_data;
	TransactionId deadAfter;

	if (TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header)) && IsOurs(txid))
		return ROW_PENDING;
	if (HeapTupleSatisfiesVisibility(tuple, snapshot, buffer))
		return ROW_VISIBLE;
	if (HeapTupleHeaderXminFrozen(header) ||
		!XidInMVCCSnapshot(HeapTupleHeaderGetRawXmin(header), snapshot))
		return ROW_GONE;
	/* it is dead only if it was never there */
	if (HeapTupleSatisfiesVacuumHorizon(tuple, buffer, &deadAfter) == HEAPTUPLE_DEAD)
		return ROW_GONE;
	return ROW_PENDING;
}

/*
 * OutboxStateOf tells what a row in the slot is to the snapshot.
 */
OutboxRowState
OutboxStateOf(TupleTableSlot *slot, Snapshot snapshot)
{
	BufferHeapTupleTableSlot *row = (BufferHeapTupleTableSlot *) slot;
	uint64 txid = OutboxTxid(slot);
	OutboxRowState state;

	LockBuffer(row->buffer, BUFFER_LOCK_SHARE);
	state = OutboxTupleState(row->base.tuple, txid, row->buffer, snapshot);
	LockBuffer(row->buffer, BUFFER_LOCK_UNLOCK);
	return state;
}

/*
 * OutboxNotePending notes in a cursor that a row was not to be seen yet: by the
 * transaction that published it or, if somebody else is inserting it here, by its
 * number.  A restore does so, and logical replication.
 */
void
OutboxNotePending(OutboxCursor *cursor, OutboxHorizon *horizon, uint64 txid, int64 seq)
{
	if (HasBegun(horizon, txid) && !OutboxIsOver(horizon, txid))
		CursorAddRow(cursor, txid, seq);
	else
		CursorAddNumber(cursor, seq);
}
