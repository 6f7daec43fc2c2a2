/*-------------------------------------------------------------------------
 *
 * store/lookup.c
 *	  Finding rows of idempotency.key: by name, and the abandoned ones of a scope.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/stratnum.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "store/row.h"
#include "store/table.h"

/*
 * FindVersion stores into "slot" the version of the row of "name" that "snapshot"
 * shows and, if "own" is set, this transaction wrote.  Returns false if there is
 * none.  The index is scanned with "scanSnapshot": the same snapshot, or SnapshotAny,
 * which takes no predicate locks.
 */
static bool
FindVersion(Relation table, const KeyName *name, Snapshot scanSnapshot, Snapshot snapshot, bool own,
			TupleTableSlot *slot)
{
	Relation index = index_open(RelationGetPrimaryKeyIndexCompat(table), AccessShareLock);
	IndexScanDesc scan = index_beginscan_compat(table, index, scanSnapshot, 2);
	ScanKeyData keys[2];
	bool found = false;

	ScanKeyEntryInitialize(&keys[0], 0, 1, BTEqualStrategyNumber, InvalidOid, InvalidOid, F_BYTEAEQ,
						   PointerGetDatum(KeyTextPack(name->key)));
	ScanKeyEntryInitialize(&keys[1], 0, 2, BTEqualStrategyNumber, InvalidOid, C_COLLATION_OID,
						   F_TEXTEQ, PointerGetDatum(name->scope));
	index_rescan(scan, keys, 2, NULL, 0);

	while (!found && index_getnext_slot(scan, ForwardScanDirection, slot))
		found =
			table_tuple_satisfies_snapshot(table, slot, snapshot) && (!own || KeyRowIsOwn(slot));

	/* The slot keeps its own pin on the page. */
	index_endscan(scan);
	index_close(index, AccessShareLock);
	return found;
}

/* Where this session has written a lease last: its owner renews or completes it next. */
static ItemPointerData lastLease;

/*
 * KeyStoreRemember makes the next probe look at "tid" first.
 */
void
KeyStoreRemember(const ItemPointerData *tid)
{
	lastLease = *tid;
}

/*
 * FindRemembered does what FindVersion() does, without the index, if the row that this
 * session wrote last is that of "name".  Anything can have happened to that row since, and
 * to its place: a row that "snapshot" shows is right if its name is, since there is no other.
 */
static bool
FindRemembered(Relation table, const KeyName *name, Snapshot snapshot, TupleTableSlot *slot)
{
	ItemPointerData tid = lastLease;
	Buffer buffer;

	ItemPointerSetInvalid(&lastLease);
	if (!ItemPointerIsValid(&tid) ||
		ItemPointerGetBlockNumber(&tid) >= RelationGetNumberOfBlocks(table))
		return false;

	/* Prune as an index scan does, so that updates find space */
	buffer = ReadBuffer(table, ItemPointerGetBlockNumber(&tid));
	heap_page_prune_opt_compat(table, buffer);
	ReleaseBuffer(buffer);

	if (!table_tuple_fetch_row_version(table, &tid, SnapshotAny, slot) ||
		!table_tuple_satisfies_snapshot(table, slot, snapshot))
		return false;
	return KeyRowIsOf(slot, name);
}

/*
 * KeyStoreProbe looks for the row of "name" as of now, with this transaction's own
 * writes.  It copies a live row into the current memory context, and of an expired
 * one the token alone; "version" is what was seen, for a later write.  The table
 * stays locked until the transaction ends.  In REPEATABLE READ and above, throws
 * 40001 for a row that was written after the snapshot.
 */
KeyState
KeyStoreProbe(const KeyName *name, KeyRecord *record, KeyVersion *version)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Snapshot latest = GetLatestSnapshot();
	TupleTableSlot *slot = table_slot_create(table, NULL);
	KeyState state = KEY_ABSENT;

	version->table = RelationGetRelid(table);
	ItemPointerSetInvalid(&version->tid);
	version->xmin = InvalidTransactionId;
	version->endedTransactions = latest->snapXactCompletionCount;
	version->createdAt = 0;
	latest = RegisterSnapshot(latest);

	if (FindRemembered(table, name, latest, slot) ||
		FindVersion(table, name, SnapshotAny, latest, false, slot))
	{
		KeyRowCheckSnapshot(table, name, slot);
		version->tid = slot->tts_tid;
		version->xmin = KeyRowXmin(slot);
		state = KeyRowState(slot);
		if (state == KEY_EXPIRED)
			record->lease.token = KeyRowToken(slot);
		else
		{
			version->createdAt = KeyRowTime(slot, COL_CREATED_AT);
			KeyRowRead(slot, record);
		}
	}

	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(latest);
	table_close(table, NoLock);
	return state;
}

/*
 * KeyStoreUnchanged tells whether another probe would find what the one that filled
 * "seen" found: no transaction has ended since.  The server reuses snapshots by the
 * same rule.  (A lease can have expired; then the first probe was still right.)
 */
bool
KeyStoreUnchanged(const KeyVersion *seen)
{
	return GetLatestSnapshot()->snapXactCompletionCount == seen->endedTransactions;
}

/*
 * KeyStoreUnlockTable releases the lock of KeyStoreProbe() on the table, for a caller that
 * will not write.
 */
void
KeyStoreUnlockTable(const KeyVersion *seen)
{
	UnlockRelationOid(seen->table, RowExclusiveLock);
}

/*
 * KeyStoreRead looks for the row of "name" under the statement's snapshot, and copies
 * a live one into the current memory context.  It writes nothing, so that it works on
 * a hot standby.
 *
 * A snapshot that is kept for the whole transaction can show two rows: one that
 * another transaction has deleted since, and the one that this transaction wrote in
 * its place, which is the result.
 */
KeyState
KeyStoreRead(const KeyName *name, KeyRecord *record)
{
	Relation table = KeyTableOpen(AccessShareLock);
	TupleTableSlot *slot = table_slot_create(table, NULL);
	Snapshot snapshot = GetActiveSnapshot();
	bool mayShowTwo =
		IsolationUsesXactSnapshot() && TransactionIdIsValid(GetTopTransactionIdIfAny());
	KeyState state = KEY_ABSENT;

	if ((mayShowTwo && FindVersion(table, name, snapshot, snapshot, true, slot)) ||
		FindVersion(table, name, snapshot, snapshot, false, slot))
		state = KeyRowState(slot);
	if (state != KEY_ABSENT && state != KEY_EXPIRED)
		KeyRowRead(slot, record);

	ExecDropSingleTupleTableSlot(slot);
	table_close(table, AccessShareLock);
	return state;
}

/*
 * SetScopeKeys fills "keys" with the conditions of an index scan on the scopes that begin
 * with the prefix of a pattern, or equal it.  Returns their number.
 */
static int
SetScopeKeys(ScanKeyData *keys, const ScopePattern *scopes)
{
	text *end;
	int bytes;

	if (scopes->isExact)
	{
		ScanKeyEntryInitialize(&keys[0], 0, 1, BTEqualStrategyNumber, InvalidOid, C_COLLATION_OID,
							   F_TEXTEQ, PointerGetDatum(scopes->prefix));
		return 1;
	}
	ScanKeyEntryInitialize(&keys[0], 0, 1, BTGreaterEqualStrategyNumber, InvalidOid,
						   C_COLLATION_OID, F_TEXT_GE, PointerGetDatum(scopes->prefix));

	/* The least text above all that begin with the prefix; not always valid in the encoding */
	end = TextCopy(scopes->prefix);
	bytes = VARSIZE_ANY_EXHDR(end);
	while (bytes > 0 && (unsigned char) VARDATA_ANY(end)[bytes - 1] == 0xFF)
		bytes--;
	if (bytes == 0)
		return 1;
	VARDATA_ANY(end)[bytes - 1]++;
	SET_VARSIZE(end, VARHDRSZ + bytes);
	ScanKeyEntryInitialize(&keys[1], 0, 1, BTLessStrategyNumber, InvalidOid, C_COLLATION_OID,
						   F_TEXT_LT, PointerGetDatum(end));
	return 2;
}

/*
 * AddAbandoned adds the operation of a row to the "count" ones in "found", which are in the
 * order of their tokens, unless "limit" are there and all have smaller tokens.  Returns the
 * new count.
 */
static int
AddAbandoned(AbandonedKey *found, int count, int limit, TupleTableSlot *slot)
{
	int64 token = KeyRowToken(slot);
	int place;

	if (count == limit)
	{
		if (found[count - 1].token < token)
			return count;
		count--;
		pfree(found[count].name.scope);
		pfree(found[count].name.key);
	}
	for (place = count; place > 0 && found[place - 1].token > token; place--)
		found[place] = found[place - 1];
	found[place].token = token;
	KeyRowName(slot, &found[place].name);
	return count + 1;
}

/*
 * KeyStoreAbandoned looks for abandoned operations in the scopes that the pattern matches, as
 * of now.  It fills "found" with the first "limit" of them whose tokens are above "after", in
 * the order of tokens, with names in the current memory context, and returns their number.
 * The caller must lock each key and probe again: another session can have claimed it.
 *
 * The index has this order within a scope.  With several scopes, all their leases are read.
 */
int
KeyStoreAbandoned(const ScopePattern *scopes, int64 after, AbandonedKey *found, int limit)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Relation index = KeyTableOpenAbandonedIndex();
	Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
	TupleTableSlot *slot = table_slot_create(table, NULL);
	ScanKeyData keys[3];
	int keyCount = SetScopeKeys(keys, scopes);
	IndexScanDesc scan;
	int count = 0;

	ScanKeyEntryInitialize(&keys[keyCount++], 0, 2, BTGreaterStrategyNumber, InvalidOid, InvalidOid,
						   F_INT8GT, Int64GetDatum(after));
	scan = index_beginscan_compat(table, index, snapshot, keyCount);
	index_rescan(scan, keys, keyCount, NULL, 0);
	while ((count < limit || !scopes->isExact) &&
		   index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		CHECK_FOR_INTERRUPTS();
		if (KeyRowState(slot) == KEY_ABANDONED && KeyRowIsIn(slot, scopes))
			count = AddAbandoned(found, count, limit, slot);
	}

	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	index_close(index, AccessShareLock);
	table_close(table, NoLock);
	return count;
}
