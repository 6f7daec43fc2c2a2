/*-------------------------------------------------------------------------
 *
 * storescan.c
 *	  The walk over the heap of idempotency.key that removes expired rows.
 *
 * There is no index on the time of expiry.  The walk reads a stretch of blocks,
 * in their order, and deletes the rows that have run out.  It never waits for
 * anybody: a row whose key is claimed, or that somebody else is changing, is
 * left for another time.
 *
 * That only what has run out is removed, and nobody's claim with it, rests on
 * three things.  The key's lock, which every change of a row takes first: while
 * we hold it, no claim can be granted that counts on the row.  The snapshot,
 * which stays registered: VACUUM gives no row's place to another while it
 * shows the row.  And the deletion itself, which without waiting succeeds on
 * nothing but a version that is still the live one: a row that was replaced
 * or renewed between our look and the lock is another version.
 *
 * Locks: ROW EXCLUSIVE on the table and the key's lock of every row removed,
 * to the end of the transaction.  Until then a claim of such a key waits, as it
 * does for another claim.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "executor/executor.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "keylock.h"
#include "keyrow.h"
#include "keytable.h"
#include "storescan.h"
#include "xact.h"

/*
 * KeyStoreLock locks the table for a walk, until the transaction ends, and
 * returns its OID.  With dontWait it returns InvalidOid if the lock is not
 * free.  Throws 55000 where the extension is not installed or the table was altered.
 */
Oid
KeyStoreLock(bool dontWait)
{
	Relation table;
	Oid relid;

	if (dontWait)
	{
		Oid schema = get_namespace_oid("idempotency", true);

		relid = OidIsValid(schema) ? get_relname_relid("key", schema) : InvalidOid;
		if (OidIsValid(relid) && !ConditionalLockRelationOid(relid, RowExclusiveLock))
			return InvalidOid;
	}

	table = KeyTableOpen(RowExclusiveLock);
	relid = RelationGetRelid(table);
	table_close(table, NoLock);
	return relid;
}

/*
 * BeginScan begins a scan of the blocks from "from" to before "end".  The
 * server's own function for a range of TIDs would let a large table wash out
 * the shared buffers.
 */
static TableScanDesc
BeginScan(Relation table, Snapshot snapshot, BlockNumber from, BlockNumber end)
{
	uint32 flags = SO_TYPE_TIDRANGESCAN | SO_ALLOW_PAGEMODE | SO_ALLOW_STRAT;
	TableScanDesc scan = table->rd_tableam->scan_begin(table, snapshot, 0, NULL, NULL, flags);
	ItemPointerData first;
	ItemPointerData last;

	ItemPointerSet(&first, from, FirstOffsetNumber);
	ItemPointerSet(&last, end - 1, MaxOffsetNumber);
	table->rd_tableam->scan_set_tidrange(scan, &first, &last);
	return scan;
}

/*
 * ReapRow removes the expired row in "slot" if no transaction has its key, and tells
 * whether it did.  The key's lock is kept with a row that is gone, and no other.
 */
static bool
ReapRow(Relation table, TupleTableSlot *slot, Snapshot snapshot)
{
	TM_FailureData failure;
	KeyName name;

	/* What this transaction owns stays; its own lock would let it pass. */
	KeyRowName(slot, &name);
	InjectionPoint("reap-lock");
	if (OpenClaimFind(&name) != NULL || TokenIsHeld(KeyRowToken(slot)) || !KeyLockAcquire(&name, 0))
		return false;

	InjectionPoint("reap-delete");
	if (table_tuple_delete(table, &slot->tts_tid, GetCurrentCommandId(true), snapshot,
						   InvalidSnapshot, false, &failure, false) == TM_Ok)
		return true;
	KeyLockRelease(&name);
	return false;
}

/*
 * ReapIfExpired removes the row in "slot" if it has run out, and counts what
 * came of it.
 */
static void
ReapIfExpired(Relation table, TupleTableSlot *slot, Snapshot snapshot, ReapedStretch *stretch)
{
	bool finished;

	stretch->seen++;
	if (!KeyRowIsExpired(slot))
		return;
	if (!ReapRow(table, slot, snapshot))
	{
		stretch->skipped++;
		return;
	}
	stretch->reaped++;
	(void) slot_getattr(slot, COL_TOKEN, &finished);
	if (!finished)
		stretch->zombies++;
}

/*
 * ReapScanned removes the expired rows that the scan finds, maxRows at most.
 * It leaves "next" as it is, unless it stopped at a row before the end.
 */
static void
ReapScanned(Relation table, TableScanDesc scan, int64 maxRows, ReapedStretch *stretch)
{
	TupleTableSlot *slot = table_slot_create(table, NULL);
	MemoryContext each =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency reaper", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);

	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		if (stretch->reaped >= maxRows)
		{
			stretch->next = ItemPointerGetBlockNumber(&slot->tts_tid);
			break;
		}
		ReapIfExpired(table, slot, scan->rs_snapshot, stretch);
		MemoryContextReset(each);
	}

	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * KeyStoreReap removes expired rows from a stretch of at most maxPages blocks,
 * beginning at block "from", or at the first one if that lies beyond the end;
 * at most maxRows rows.  Fills "stretch".  The transaction no longer sees the
 * rows from its next command on.  Waits for no row and no key; for the table,
 * unless KeyStoreLock() has locked it.  Throws 55000 as that does, and 53200
 * when the shared lock table is full.
 */
void
KeyStoreReap(BlockNumber from, BlockNumber maxPages, int64 maxRows, ReapedStretch *stretch)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Snapshot latest = RegisterSnapshot(GetLatestSnapshot());

	memset(stretch, 0, sizeof(ReapedStretch));
	stretch->blocks = RelationGetNumberOfBlocks(table);
	stretch->from = from < stretch->blocks ? from : 0;
	stretch->next = stretch->from + Min(maxPages, stretch->blocks - stretch->from);
	if (stretch->next > stretch->from)
	{
		TableScanDesc scan = BeginScan(table, latest, stretch->from, stretch->next);

		CheckCmdReplicaIdentity(table, CMD_DELETE);
		ReapScanned(table, scan, maxRows, stretch);
		table_endscan(scan);
	}

	UnregisterSnapshot(latest);
	table_close(table, NoLock);
	if (stretch->reaped > 0)
		CommandCounterIncrement();
}
