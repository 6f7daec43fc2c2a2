/*-------------------------------------------------------------------------
 *
 * outbox/visibility.c
 *	  Which transactions have ended, and which rows are visible, as of a snapshot.
 *
 * Transactions are known by their 64-bit ids, since a row has that of its publisher.  The
 * id can be of another cluster, where rows were restored from a dump.
 *
 * Locks: a page is locked while the visibility of a row is looked up.
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

#include "base/compat.h"
#include "base/timing.h"
#include "outbox/visibility.h"

/* The time between two checks for publishers, in microseconds. */
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
 * OutboxHasEnded tells whether a transaction had ended when the snapshot was taken.  The
 * current one has not.
 */
bool
OutboxHasEnded(Snapshot snapshot, uint64 txid)
{
	FullTransactionId mine = GetTopFullTransactionIdIfAny();
	bool isMine = FullTransactionIdIsValid(mine) && U64FromFullTransactionId(mine) == txid;

	if (isMine || txid >= FullXid(snapshot->xmax))
		return false;
	return txid < FullXid(snapshot->xmin) || !XidInMVCCSnapshot((TransactionId) txid, snapshot);
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
 * OutboxOldestPublisher returns the oldest transaction that is in publish(): that holds
 * a lock on an index of the table.  While REINDEX CONCURRENTLY replaces one there are
 * two, and either can be locked.
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

			/* VACUUM locks indexes as well, and has no id. */
			if (TransactionIdIsNormal(xid))
				oldest = Min(oldest, FullXid(xid));
		}
		pfree(holders); /* callers that wait repeat the call */
	}
	list_free(indexes);
	return oldest;
}

/*
 * OutboxAwaitPublishers waits until every transaction that was in publish() at the call has
 * inserted its row: microseconds, as a rule, and "waitMs" at most.  Returns whether they
 * have: then no number that was drawn before gets a row.
 */
bool
OutboxAwaitPublishers(Relation table, int waitMs)
{
	uint64 next = U64FromFullTransactionId(ReadNextFullTransactionId());
	instr_time began;

	INSTR_TIME_SET_CURRENT(began);
	while (OutboxOldestPublisher(table) < next)
	{
		CHECK_FOR_INTERRUPTS();
		if (MillisecondsSince(began) >= waitMs)
			return false;
		pg_usleep(PUBLISHER_SLEEP_US);
	}
	return true;
}

/*
 * OutboxTupleState tells what a row is to the snapshot.  The caller has locked its page.
 * A row that the current transaction inserted is pending, though the snapshot shows it.
 */
OutboxRowState
OutboxTupleState(HeapTuple tuple, Buffer buffer, Snapshot snapshot)
{
	HeapTupleHeader header = tuple->t_data;
	TransactionId deadAfter;

	if (TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(header)))
		return ROW_PENDING;
	if (HeapTupleSatisfiesVisibility(tuple, snapshot, buffer))
		return ROW_VISIBLE;
	if (HeapTupleHeaderXminFrozen(header) ||
		!XidInMVCCSnapshot(HeapTupleHeaderGetRawXmin(header), snapshot))
		return ROW_GONE;
	/* a row that was inserted after the snapshot is dead only if its inserter failed */
	if (HeapTupleSatisfiesVacuumHorizon(tuple, buffer, &deadAfter) == HEAPTUPLE_DEAD)
		return ROW_GONE;
	return ROW_PENDING;
}

/*
 * OutboxStateOf tells what the row in the slot is to the snapshot.
 */
OutboxRowState
OutboxStateOf(TupleTableSlot *slot, Snapshot snapshot)
{
	BufferHeapTupleTableSlot *row = (BufferHeapTupleTableSlot *) slot;
	OutboxRowState state;

	LockBuffer(row->buffer, BUFFER_LOCK_SHARE);
	state = OutboxTupleState(row->base.tuple, row->buffer, snapshot);
	LockBuffer(row->buffer, BUFFER_LOCK_UNLOCK);
	return state;
}

/*
 * CursorAddPending adds a row that is not visible yet to a cursor: by the transaction
 * that published it or, if another transaction inserts it, as a restore or logical
 * replication does, by its number.
 */
void
CursorAddPending(OutboxCursor *cursor, Snapshot snapshot, uint64 txid, int64 seq)
{
	bool begun = txid < U64FromFullTransactionId(ReadNextFullTransactionId());

	if (begun && !OutboxHasEnded(snapshot, txid))
		CursorAddRow(cursor, txid, seq);
	else
		CursorAddNumber(cursor, seq);
}
