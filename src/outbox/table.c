/*-------------------------------------------------------------------------
 *
 * outbox/table.c
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 * Locks: the table's, which OutboxTableOpen() takes for its caller; the lock that keeps events;
 * ACCESS SHARE on the sequence, to the end of the transaction, once its number was read.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/itup.h"
#include "access/relscan.h"
#include "catalog/pg_am.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/xid8.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/guc.h"
#include "base/lockwait.h"
#include "outbox/table.h"

/* The lock that keeps the reaper from deleting events; "IE" in ASCII. */
#define EVENTS_LOCK_CLASS 0x4945

/* Tells the wakeup channel of events from those of keys. */
#define CHANNEL_SEED 0x6F7574626F78

static const TableColumn columns[OUTBOX_COLUMNS] = {
	{"seq", INT8OID, true},
	{"txid", XID8OID, true},
	{"published_at", TIMESTAMPTZOID, true},
	{"id", UUIDOID, true},
	{"aggregatetype", TEXTOID, true},
	{"aggregateid", TEXTOID, false},
	{"type", TEXTOID, false},
	{"payload", JSONOID, false},
	{"headers", JSONOID, false},
};

/*
 * CheckOutbox throws 55000 unless the columns and the primary key are those that the
 * extension made.
 */
static void
CheckOutbox(Relation table)
{
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);
	bool fits = false;

	TableCheckColumns(table, columns, OUTBOX_COLUMNS);
	if (OidIsValid(primaryKey))
	{
		Relation index = index_open(primaryKey, AccessShareLock);

		fits = index->rd_index->indnkeyatts == 1 && index->rd_index->indkey.values[0] == OUT_SEQ &&
			   index->rd_rel->relam == BTREE_AM_OID;
		index_close(index, AccessShareLock);
	}
	if (!fits)
		ErrorStoreAltered("outbox", "Its primary key is not (seq).",
						  "Add PRIMARY KEY (seq) again.");
}

static ExtensionTable OutboxTable = {
	.name = "outbox", .trigger = "refuse_update", .check = CheckOutbox};

/*
 * OutboxTableOpen opens the outbox as ExtensionTableOpen() does.
 */
Relation
OutboxTableOpen(LOCKMODE lockmode)
{
	return ExtensionTableOpen(&OutboxTable, lockmode);
}

/*
 * OutboxIndexBegin begins a scan of the primary key of the table, for OutboxIndexNext().
 */
IndexScanDesc
OutboxIndexBegin(Relation table)
{
	Relation index = index_open(RelationGetPrimaryKeyIndexCompat(table), AccessShareLock);
	IndexScanDesc scan = index_beginscan_compat(table, index, SnapshotAny, 2);

	/* The entry has the number of a row that was pruned */
	scan->xs_want_itup = true;
	return scan;
}

/*
 * OutboxIndexRescan begins to read the numbers between two, both included.
 */
void
OutboxIndexRescan(IndexScanDesc scan, int64 from, int64 upto)
{
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_INT8LE, Int64GetDatum(upto));
	index_rescan(scan, keys, 2, NULL, 0);
}

/*
 * OutboxIndexNext reads the next entry: sets its number, and puts its row into the slot,
 * visible or not.  The slot is empty if the row was pruned, which leaves the entry until
 * VACUUM.  Returns false at the end.
 */
bool
OutboxIndexNext(IndexScanDesc scan, ScanDirection direction, TupleTableSlot *slot, int64 *seq)
{
	bool found = false;
	bool more = true;
	bool isnull;

	/* Skip the end of the row versions of the entry before */
	while (more && !found)
	{
		CHECK_FOR_INTERRUPTS();
		more = scan->xs_heap_continue;
		if (!more && index_getnext_tid(scan, direction) == NULL)
			return false;
		found = index_fetch_heap(scan, slot);
	}
	*seq = DatumGetInt64(index_getattr(scan->xs_itup, 1, scan->xs_itupdesc, &isnull));
	if (!found)
		ExecClearTuple(slot);
	return true;
}

/*
 * OutboxIndexEnd ends such a scan.
 */
void
OutboxIndexEnd(IndexScanDesc scan)
{
	Relation index = scan->indexRelation;

	index_endscan(scan);
	index_close(index, AccessShareLock);
}

/*
 * OutboxSeq returns the number of the event in the slot.
 */
int64
OutboxSeq(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetInt64(slot_getattr(slot, OUT_SEQ, &isnull));
}

/*
 * OutboxTxid returns the transaction that published the event in the slot.
 */
uint64
OutboxTxid(TupleTableSlot *slot)
{
	bool isnull;

	return U64FromFullTransactionId(
		DatumGetFullTransactionId(slot_getattr(slot, OUT_TXID, &isnull)));
}

/*
 * OutboxChannel returns the wakeup channel for the events of this database.
 */
uint64
OutboxChannel(void)
{
	return hash_bytes_uint32_extended(MyDatabaseId, CHANNEL_SEED);
}

/*
 * OutboxLastNumber returns the last number that the sequence has given; 0 for none.
 * Throws 55000 without the sequence, which an older version of the extension lacks.
 */
int64
OutboxLastNumber(void)
{
	if (!OidIsValid(ExtensionRelationOid("outbox_seq")))
		ErrorStoreAltered("outbox_seq", "It is missing.",
						  "Use ALTER EXTENSION idempotency UPDATE.");
	return ExtensionSequenceLast("outbox_seq");
}

static LOCKTAG
EventsLockTag(void)
{
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, 0, EVENTS_LOCK_CLASS);
	return tag;
}

/*
 * OutboxKeepEvents keeps the reaper from deleting events until the transaction ends.
 * Waits for a batch of the reaper, and throws 55P03 after idempotency.wait, which a
 * transaction that called reap() can cause.
 */
void
OutboxKeepEvents(void)
{
	LOCKTAG tag = EventsLockTag();

	if (!LockWithin(&tag, ShareLock, DefaultWait))
		ereport(ERROR, (errcode(ERRCODE_LOCK_NOT_AVAILABLE),
						errmsg("could not wait for the events that are just being removed"),
						errdetail("A transaction that called idempotency.reap() is open for longer "
								  "than idempotency.wait."),
						errhint("Try again, or end that transaction; see pg_locks.")));
}

/*
 * OutboxLockForReaper takes the lock that subscribe() takes as well, if it is free.
 * Returns whether it was.
 */
bool
OutboxLockForReaper(void)
{
	LOCKTAG tag = EventsLockTag();

	return LockWithin(&tag, ExclusiveLock, 0);
}
