/*-------------------------------------------------------------------------
 *
 * keys/expire.c
 *	  Deleting the expired rows of a range of blocks of idempotency.key.
 *
 * There is no index on the time of expiry.  The scan never waits: a row which another
 * transaction is changing, and a lease whose key is locked, are left for a later scan.
 *
 * Only expired rows are deleted, for two reasons.  The registered snapshot keeps VACUUM
 * from reusing the TID of a row.  And a delete without waiting succeeds on the live
 * version only: a row that was replaced or renewed meanwhile is another version.
 *
 * An outcome is deleted without its key's lock: a claim that was granted over an expired
 * outcome inserts a new row if the old one is gone (KeyStoreWrite()).  A lease is deleted
 * under the lock, which its owner holds while it works on the row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "executor/tuptable.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "keys/expire.h"
#include "keys/lock.h"
#include "keys/transaction.h"
#include "query/relation.h"
#include "store/row.h"
#include "store/table.h"

/*
 * LockKeyTable locks the table for DeleteExpiredKeys() until the transaction ends, and
 * returns its OID.  With dontWait it returns InvalidOid if the lock is not free.
 * Throws 55000 where the extension is not installed or the table was altered.
 */
Oid
LockKeyTable(bool dontWait)
{
	Relation table;
	Oid relid;

	if (dontWait && !ExtensionRelationLock("key", RowExclusiveLock, true))
		return InvalidOid;
	table = KeyTableOpen(RowExclusiveLock);
	relid = RelationGetRelid(table);
	table_close(table, NoLock);
	return relid;
}

/*
 * BeginScan begins a scan of the blocks from "from" to before "end".  The server's
 * function for a range of TIDs would let a large table evict the shared buffers.
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
 * Reserve makes sure that nothing else uses the expired row in "slot": it locks the key of a
 * lease.  Returns false if another transaction has it, or this one owns the operation: a
 * claim cannot replace a row that its own transaction has deleted.
 */
static bool
Reserve(TupleTableSlot *slot, int64 token, KeyName *name)
{
	if (token == 0 && !AnyClaimOpen())
		return true;
	KeyRowName(slot, name);
	return !OperationIsMine(name, token) && (token == 0 || KeyLockAcquire(name, 0));
}

/*
 * ReapRow deletes the expired row in "slot" unless it is in use, and tells whether it did.
 * The key of a deleted lease stays locked.  Sets "*leased" if the row is one.
 */
static bool
ReapRow(Relation table, TupleTableSlot *slot, Snapshot snapshot, bool *leased)
{
	int64 token = KeyRowToken(slot);
	TM_FailureData failure;
	KeyName name;

	*leased = token != 0;
	InjectionPoint("reap-lock");
	if (!Reserve(slot, token, &name))
		return false;

	/* Delete the version that the scan has read */
	InjectionPoint("reap-delete");
	if (table_tuple_delete_compat(table, &slot->tts_tid, GetCurrentCommandId(true), snapshot, false,
								  &failure) == TM_Ok)
		return true;
	if (*leased)
		KeyLockRelease(&name);
	return false;
}

/*
 * ReapIfExpired deletes the row in "slot" if it had expired at "now", and counts the result.
 */
static void
ReapIfExpired(Relation table, TupleTableSlot *slot, Snapshot snapshot, TimestampTz now,
			  ExpiryScan *result)
{
	bool leased;

	result->seen++;
	if (!KeyRowIsExpired(slot, now) || !ReapRow(table, slot, snapshot, &leased))
		return;
	result->reaped++;
	if (leased)
		result->zombies++;
}

/*
 * ReapScanned deletes the expired rows of a scan, maxRows at most.  It sets "next" if
 * it stops before the end.
 */
static void
ReapScanned(Relation table, TableScanDesc scan, int64 maxRows, ExpiryScan *result)
{
	TupleTableSlot *slot = table_slot_create(table, NULL);
	MemoryContext each =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency reaper", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);
	TimestampTz now = GetCurrentTimestamp(); /* once: the clock takes a tenth of a row's time */

	while (table_scan_getnextslot_tidrange(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		if (result->reaped >= maxRows)
		{
			result->next = ItemPointerGetBlockNumber(&slot->tts_tid);
			break;
		}
		ReapIfExpired(table, slot, scan->rs_snapshot, now, result);
		MemoryContextReset(each);
	}

	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * DeleteExpiredKeys deletes expired rows in at most maxPages blocks from block "from" on (or
 * the first block, if "from" is beyond the end), maxRows rows at most.  Fills "result".
 * The transaction no longer sees the rows from its next command on.  Waits for no row
 * and no key; for the table, unless LockKeyTable() has locked it.  Throws 55000 as that
 * does, and 53200 when the shared lock table is full.
 */
void
DeleteExpiredKeys(BlockNumber from, BlockNumber maxPages, int64 maxRows, ExpiryScan *result)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Snapshot latest = RegisterSnapshot(GetLatestSnapshot());

	memset(result, 0, sizeof(ExpiryScan));
	result->blocks = RelationGetNumberOfBlocks(table);
	result->from = from < result->blocks ? from : 0;
	result->next = result->from + Min(maxPages, result->blocks - result->from);
	if (result->next > result->from)
	{
		TableScanDesc scan = BeginScan(table, latest, result->from, result->next);

		CheckCmdReplicaIdentity(table, CMD_DELETE);
		ReapScanned(table, scan, maxRows, result);
		table_endscan(scan);
	}

	UnregisterSnapshot(latest);
	table_close(table, NoLock);
	if (result->reaped > 0)
		CommandCounterIncrement();
}
