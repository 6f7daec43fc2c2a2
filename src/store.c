/*-------------------------------------------------------------------------
 *
 * store.c
 *	  Looking at the rows of idempotency.key.
 *
 * Rows are read through the primary key, here, and written through the table
 * access method and the executor's own path for all indexes, in storewrite.c
 * and storebatch.c; storescan.c walks the heap.  No other room touches a row.
 *
 * A look for a row must not conclude "absent" from a scan that a concurrent
 * update can outrun, and must take no predicate lock where there is nothing.
 * So the index is scanned with SnapshotAny, and each version is judged under
 * the latest MVCC snapshot.  Where the transaction's own snapshot is older and
 * fixed (REPEATABLE READ and above), a row that only the latest one shows is
 * a serialization failure.
 *
 * Locks: ROW EXCLUSIVE on the table from the first look of a claim to the end
 * of the transaction, so that row versions stay where they were seen (VACUUM
 * FULL waits); index locks within one call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "errors.h"
#include "keyrow.h"
#include "keytable.h"
#include "keytext.h"
#include "storeinternal.h"

static TransactionId
SlotXmin(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull));
}

/*
 * WrittenHere tells whether this transaction wrote the row version in "slot".
 */
static bool
WrittenHere(TupleTableSlot *slot)
{
	return TransactionIdIsCurrentTransactionId(SlotXmin(slot));
}

/*
 * ScanFor stores into "slot" the version of the row of "name" that "snapshot"
 * shows and, if "own" is set, this transaction wrote.  Returns false if there is none.
 * The index is scanned with "scanSnapshot": the same snapshot, or SnapshotAny, which
 * takes no predicate locks and misses no row that is being updated.
 */
static bool
ScanFor(Relation table, const KeyName *name, Snapshot scanSnapshot, Snapshot snapshot, bool own,
		TupleTableSlot *slot)
{
	Relation index = index_open(RelationGetPrimaryKeyIndexCompat(table), AccessShareLock);
	IndexScanDesc scan = index_beginscan_compat(table, index, scanSnapshot, 2);
	ScanKeyData keys[2];
	bool found = false;

	ScanKeyEntryInitialize(&keys[0], 0, 1, BTEqualStrategyNumber, InvalidOid, C_COLLATION_OID,
						   F_TEXTEQ, PointerGetDatum(name->scope));
	ScanKeyEntryInitialize(&keys[1], 0, 2, BTEqualStrategyNumber, InvalidOid, InvalidOid, F_BYTEAEQ,
						   PointerGetDatum(KeyTextPack(name->key)));
	index_rescan(scan, keys, 2, NULL, 0);

	while (!found && index_getnext_slot(scan, ForwardScanDirection, slot))
		found =
			table_tuple_satisfies_snapshot(table, slot, snapshot) && (!own || WrittenHere(slot));

	/* The slot keeps its own pin on the page. */
	index_endscan(scan);
	index_close(index, AccessShareLock);
	return found;
}

/*
 * FindVersion stores into "slot" the version of the row of "name" that
 * "snapshot" shows, for a claim.  Returns false if there is none.
 */
bool
FindVersion(Relation table, const KeyName *name, Snapshot snapshot, TupleTableSlot *slot)
{
	return ScanFor(table, name, SnapshotAny, snapshot, false, slot);
}

/*
 * IsVersion tells whether the row in "slot" is the version that was seen.
 */
bool
IsVersion(TupleTableSlot *slot, const KeyVersion *version)
{
	ItemPointerData tid = version->tid;

	return ItemPointerEquals(&slot->tts_tid, &tid) && SlotXmin(slot) == version->xmin;
}

/*
 * CheckSnapshot throws 40001 if the transaction's snapshot is fixed and does
 * not show the row version in "slot", unless the transaction wrote it itself.
 */
void
CheckSnapshot(Relation table, const KeyName *name, TupleTableSlot *slot)
{
	if (!IsolationUsesXactSnapshot() || WrittenHere(slot))
		return;
	if (!table_tuple_satisfies_snapshot(table, slot, GetTransactionSnapshot()))
		ErrorConcurrentChange(name);
}

/*
 * KeyStoreProbe looks for the row of "name" as of now, the transaction's own
 * writes included.  What a live row remembers is copied into the current memory
 * context, and of an expired one the token alone; "version" says what was seen, for a
 * later write.  Locks the table until the transaction ends.  Throws 40001 in REPEATABLE
 * READ and above for a row that came after the snapshot.
 */
KeyState
KeyStoreProbe(const KeyName *name, StoredOutcome *outcome, KeyVersion *version)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Snapshot latest = GetLatestSnapshot();
	TupleTableSlot *slot = table_slot_create(table, NULL);
	KeyState state = KEY_ABSENT;

	version->table = RelationGetRelid(table);
	ItemPointerSetInvalid(&version->tid);
	version->xmin = InvalidTransactionId;
	version->asOf = latest->snapXactCompletionCount;
	latest = RegisterSnapshot(latest);

	if (FindVersion(table, name, latest, slot))
	{
		CheckSnapshot(table, name, slot);
		version->tid = slot->tts_tid;
		version->xmin = SlotXmin(slot);
		state = KeyRowState(slot);
		if (state == KEY_EXPIRED)
			outcome->lease.token = KeyRowToken(slot);
		else
			KeyRowRead(slot, outcome);
	}

	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(latest);
	table_close(table, NoLock);
	return state;
}

/*
 * KeyStoreUnchanged tells whether a look now would surely find what the one
 * that filled "seen" found: no transaction has ended since.  The server reuses
 * snapshots by the same rule.  (A lease may have run out; for whoever looks
 * again that makes no difference that the next look would not make.)
 */
bool
KeyStoreUnchanged(const KeyVersion *seen)
{
	return GetLatestSnapshot()->snapXactCompletionCount == seen->asOf;
}

/*
 * KeyStoreLetGo gives back the lock on the table that the look which filled
 * "seen" took, for a caller who will not write on the strength of it.
 */
void
KeyStoreLetGo(const KeyVersion *seen)
{
	UnlockRelationOid(seen->table, RowExclusiveLock);
}

/*
 * KeyStoreRead looks for the row of "name" under the statement's snapshot,
 * and copies what a live one remembers into the current memory context.
 * Writes nothing, so that it works on a hot standby.
 *
 * A snapshot that is kept for the whole transaction can show two rows: one that another
 * transaction has removed since, and the one that this transaction wrote in its
 * place, which is the answer.
 */
KeyState
KeyStoreRead(const KeyName *name, StoredOutcome *outcome)
{
	Relation table = KeyTableOpen(AccessShareLock);
	TupleTableSlot *slot = table_slot_create(table, NULL);
	Snapshot snapshot = GetActiveSnapshot();
	bool mayShowTwo =
		IsolationUsesXactSnapshot() && TransactionIdIsValid(GetTopTransactionIdIfAny());
	KeyState state = KEY_ABSENT;

	if ((mayShowTwo && ScanFor(table, name, snapshot, snapshot, true, slot)) ||
		ScanFor(table, name, snapshot, snapshot, false, slot))
		state = KeyRowState(slot);
	if (state != KEY_ABSENT && state != KEY_EXPIRED)
		KeyRowRead(slot, outcome);

	ExecDropSingleTupleTableSlot(slot);
	table_close(table, AccessShareLock);
	return state;
}

/* ----------------------------------------------------------------
 * Abandoned operations
 * ----------------------------------------------------------------
 */

struct AbandonedScan
{
	MemoryContext context; /* in which the index scan keeps its things */
	Relation table;
	Relation index;
	Snapshot snapshot;
	IndexScanDesc scan;
	TupleTableSlot *slot;
};

/*
 * KeyStoreAbandonedBegin begins to list the abandoned operations of a scope,
 * those of the oldest owners first, as of now.  What the transaction writes meanwhile does not
 * show.
 */
AbandonedScan *
KeyStoreAbandonedBegin(const text *scope)
{
	AbandonedScan *scan = palloc(sizeof(AbandonedScan));
	ScanKeyData key;

	scan->context = CurrentMemoryContext;
	scan->table = KeyTableOpen(RowExclusiveLock);
	scan->index = KeyTableOpenAbandonedIndex(scan->table);
	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan->slot = table_slot_create(scan->table, NULL);
	scan->scan = index_beginscan_compat(scan->table, scan->index, scan->snapshot, 1);
	ScanKeyEntryInitialize(&key, 0, 1, BTEqualStrategyNumber, InvalidOid, C_COLLATION_OID, F_TEXTEQ,
						   PointerGetDatum(scope));
	index_rescan(scan->scan, &key, 1, NULL, 0);
	return scan;
}

/*
 * KeyStoreAbandonedNext copies the name of the next abandoned operation into
 * the current memory context.  Returns false at the end.  The caller takes the
 * key's lock and looks again: somebody may have come back for it.
 */
bool
KeyStoreAbandonedNext(AbandonedScan *scan, KeyName *name)
{
	MemoryContext caller = MemoryContextSwitchTo(scan->context);
	bool found = false;

	while (!found && index_getnext_slot(scan->scan, ForwardScanDirection, scan->slot))
	{
		CHECK_FOR_INTERRUPTS();
		found = KeyRowState(scan->slot) == KEY_ABANDONED;
	}
	MemoryContextSwitchTo(caller);

	if (found)
		KeyRowName(scan->slot, name);
	return found;
}

/*
 * KeyStoreAbandonedEnd ends the list.
 */
void
KeyStoreAbandonedEnd(AbandonedScan *scan)
{
	index_endscan(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	UnregisterSnapshot(scan->snapshot);
	index_close(scan->index, AccessShareLock);
	table_close(scan->table, NoLock);
	pfree(scan);
}
