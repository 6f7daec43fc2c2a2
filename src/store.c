/*-------------------------------------------------------------------------
 *
 * store.c
 *	  The only room that touches the rows of idempotency.key.
 *
 * Rows are read through the primary key and written through the table access
 * method and the executor's own path for all indexes, so that an index which
 * an administrator adds stays right.
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
 * FULL waits); index locks within one call.  Nobody waits for a row here but
 * for the batch of once(), which takes no key locks.
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
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "errors.h"
#include "keytable.h"
#include "keytext.h"
#include "store.h"

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

/*
 * ScanFor stores into "slot" the version of the row of "name" that "snapshot"
 * shows.  Returns false if there is none.  The index is scanned with
 * "scanSnapshot": the same snapshot, or SnapshotAny, which takes no predicate locks and misses
 * no row that is being updated.
 */
static bool
ScanFor(Relation table, const KeyName *name, Snapshot scanSnapshot, Snapshot snapshot,
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
		found = table_tuple_satisfies_snapshot(table, slot, snapshot);

	/* The slot keeps its own pin on the page. */
	index_endscan(scan);
	index_close(index, AccessShareLock);
	return found;
}

/*
 * FindVersion stores into "slot" the version of the row of "name" that
 * "snapshot" shows, for a claim.  Returns false if there is none.
 */
static bool
FindVersion(Relation table, const KeyName *name, Snapshot snapshot, TupleTableSlot *slot)
{
	return ScanFor(table, name, SnapshotAny, snapshot, slot);
}

static TransactionId
SlotXmin(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetTransactionId(slot_getsysattr(slot, MinTransactionIdAttributeNumber, &isnull));
}

/*
 * CheckSnapshot throws 40001 if the transaction's snapshot is fixed and does
 * not show the row version in "slot", unless the transaction wrote it itself.
 */
static void
CheckSnapshot(Relation table, const KeyName *name, TupleTableSlot *slot)
{
	if (!IsolationUsesXactSnapshot() || TransactionIdIsCurrentTransactionId(SlotXmin(slot)))
		return;
	if (!table_tuple_satisfies_snapshot(table, slot, GetTransactionSnapshot()))
		ErrorConcurrentChange(name);
}

/*
 * KeyStoreProbe looks for the row of "name" as of now, the transaction's own
 * writes included.  For KEY_STORED it copies the outcome, unless that is
 * NULL, into the current memory context; "version" says what was seen, for a later write.  Locks
 * the table until the transaction ends.  Throws 40001 in REPEATABLE READ and above for a row that
 * came after the snapshot.
 */
KeyState
KeyStoreProbe(const KeyName *name, StoredOutcome *outcome, KeyVersion *version)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	Snapshot latest = GetLatestSnapshot();
	TupleTableSlot *slot = table_slot_create(table, NULL);
	KeyState state = KEY_ABSENT;

	ItemPointerSetInvalid(&version->tid);
	version->xmin = InvalidTransactionId;
	version->asOf = latest->snapXactCompletionCount;
	latest = RegisterSnapshot(latest);

	if (FindVersion(table, name, latest, slot))
	{
		CheckSnapshot(table, name, slot);
		version->tid = slot->tts_tid;
		version->xmin = SlotXmin(slot);
		state = KeyRowIsExpired(slot) ? KEY_EXPIRED : KEY_STORED;
		if (state == KEY_STORED && outcome != NULL)
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
 * snapshots by the same rule.
 */
bool
KeyStoreUnchanged(const KeyVersion *seen)
{
	return GetLatestSnapshot()->snapXactCompletionCount == seen->asOf;
}

/*
 * KeyStoreRead looks for the row of "name" under the statement's snapshot,
 * and copies a live outcome into the current memory context.  Returns false
 * if there is none.  Writes nothing, so that it works on a hot standby.
 */
bool
KeyStoreRead(const KeyName *name, StoredOutcome *outcome)
{
	Relation table = KeyTableOpen(AccessShareLock);
	TupleTableSlot *slot = table_slot_create(table, NULL);
	bool found;

	found = ScanFor(table, name, GetActiveSnapshot(), GetActiveSnapshot(), slot) &&
			!KeyRowIsExpired(slot);
	if (found)
		KeyRowRead(slot, outcome);

	ExecDropSingleTupleTableSlot(slot);
	table_close(table, AccessShareLock);
	return found;
}

/* ----------------------------------------------------------------
 * Writing
 * ----------------------------------------------------------------
 */

/* An open table with all its indexes, ready to take rows. */
typedef struct Writer
{
	Relation table;
	EState *estate;
	ResultRelInfo *relinfo;
	List *keyIndexes; /* OIDs of those that keep (scope, key) unique */
	TupleTableSlot *slot;
} Writer;

/*
 * WriterOpen opens the table and its indexes; "speculative" prepares for
 * insertions that may meet their like.  WriterClose() ends it.
 */
static void
WriterOpen(Writer *writer, bool speculative)
{
	writer->table = KeyTableOpen(RowExclusiveLock);
	writer->estate = CreateExecutorState();
	writer->relinfo = makeNode(ResultRelInfo);
	InitResultRelInfo(writer->relinfo, writer->table, 0, NULL, 0);
	ExecOpenIndices(writer->relinfo, speculative);
	writer->keyIndexes = NIL;
	for (int i = 0; i < writer->relinfo->ri_NumIndices; i++)
	{
		Relation index = writer->relinfo->ri_IndexRelationDescs[i];

		if (KeyTableIsKeyIndex(index))
			writer->keyIndexes = lappend_oid(writer->keyIndexes, RelationGetRelid(index));
	}
	writer->slot = table_slot_create(writer->table, NULL);
}

static void
WriterClose(Writer *writer)
{
	ExecDropSingleTupleTableSlot(writer->slot);
	ExecCloseIndices(writer->relinfo);
	FreeExecutorState(writer->estate);
	list_free(writer->keyIndexes);
	pfree(writer->relinfo);
	table_close(writer->table, NoLock);
}

/*
 * IsDuplicateKey tells whether "error" is a duplicate of (scope, key).  It
 * looks at open relations only, as befits an error handler.
 */
static bool
IsDuplicateKey(const ErrorData *error, const List *keyIndexes, const ResultRelInfo *relinfo)
{
	if (error->sqlerrcode != ERRCODE_UNIQUE_VIOLATION || error->constraint_name == NULL)
		return false;

	for (int i = 0; i < relinfo->ri_NumIndices; i++)
	{
		Relation index = relinfo->ri_IndexRelationDescs[i];

		if (list_member_oid(keyIndexes, RelationGetRelid(index)) &&
			strcmp(error->constraint_name, RelationGetRelationName(index)) == 0)
			return true;
	}
	return false;
}

/*
 * InsertIndexEntries adds the row in the slot to the indexes.  A duplicate of
 * (scope, key) means that somebody slipped past the key's lock; it is
 * reported as 40001, so that clients retry.  Any other error stays as it is.
 */
static void
InsertIndexEntries(Writer *writer, const KeyName *name, bool update, bool onlySummarizing)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		ExecInsertIndexTuplesCompat(writer->relinfo, writer->slot, writer->estate, update, false,
									NULL, NIL, onlySummarizing);
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (!IsDuplicateKey(error, writer->keyIndexes, writer->relinfo))
			PG_RE_THROW();
		FlushErrorState();
		ErrorConcurrentChange(name);
	}
	PG_END_TRY();
}

/*
 * StillThere tells whether the row of "name" is still the version "seen".
 */
static bool
StillThere(Relation table, const KeyName *name, const KeyVersion *seen, TupleTableSlot *scratch)
{
	Snapshot latest = RegisterSnapshot(GetLatestSnapshot());
	ItemPointerData tid = seen->tid;
	bool same = FindVersion(table, name, latest, scratch) &&
				ItemPointerEquals(&scratch->tts_tid, &tid) && SlotXmin(scratch) == seen->xmin;

	UnregisterSnapshot(latest);
	ExecClearTuple(scratch);
	return same;
}

/*
 * OverwriteVersion replaces the row at "tid" by the row in the slot.  Returns
 * false, with nothing written, if another transaction changed it first.  Waits
 * for a transaction that is changing it (only a batch of once() can be).
 */
static bool
OverwriteVersion(Writer *writer, const KeyName *name, ItemPointer tid)
{
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes updateIndexes;
	TM_Result result;

	CheckCmdReplicaIdentity(writer->table, CMD_UPDATE);
	result = table_tuple_update(writer->table, tid, writer->slot, GetCurrentCommandId(true),
								GetActiveSnapshot(), InvalidSnapshot, true, &failure, &lockmode,
								&updateIndexes);
	if (result != TM_Ok)
		return false;
	if (updateIndexes != TU_None)
		InsertIndexEntries(writer, name, true, updateIndexes == TU_Summarizing);
	return true;
}

/*
 * KeyStoreWrite remembers "outcome" under "name": as a new row if "seen" is
 * invalid, otherwise in place of exactly that version.  The transaction sees
 * it from its next command on.  Throws 40001 if the store no longer is as it
 * was seen.
 */
void
KeyStoreWrite(const KeyName *name, const KeyVersion *seen, const StoredOutcome *outcome)
{
	Writer writer;

	WriterOpen(&writer, false);

	if (!ItemPointerIsValid(&seen->tid))
	{
		KeyRowFill(writer.slot, name, outcome);
		table_tuple_insert(writer.table, writer.slot, GetCurrentCommandId(true), 0, NULL);
		InsertIndexEntries(&writer, name, false, false);
	}
	else
	{
		ItemPointerData tid = seen->tid;

		if (!StillThere(writer.table, name, seen, writer.slot))
			ErrorConcurrentChange(name);
		KeyRowFill(writer.slot, name, outcome);
		if (!OverwriteVersion(&writer, name, &tid))
			ErrorConcurrentChange(name);
	}

	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreDelete removes the row version "seen".  Throws 40001 if it changed.
 */
void
KeyStoreDelete(const KeyName *name, const KeyVersion *seen)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	ItemPointerData tid = seen->tid;
	TM_FailureData failure;

	CheckCmdReplicaIdentity(table, CMD_DELETE);
	if (table_tuple_delete(table, &tid, GetCurrentCommandId(true), GetActiveSnapshot(),
						   InvalidSnapshot, true, &failure, false) != TM_Ok)
		ErrorConcurrentChange(name);
	table_close(table, NoLock);
	CommandCounterIncrement();
}

/* ----------------------------------------------------------------
 * Batches, for once() with an array of keys
 * ----------------------------------------------------------------
 */

struct KeyStoreBatch
{
	Writer writer;
	TupleTableSlot *scratch;
};

/*
 * KeyStoreBatchBegin opens the store for many insertions without key locks.
 */
KeyStoreBatch *
KeyStoreBatchBegin(void)
{
	KeyStoreBatch *batch = palloc(sizeof(KeyStoreBatch));

	WriterOpen(&batch->writer, true);
	batch->scratch = table_slot_create(batch->writer.table, NULL);
	return batch;
}

/*
 * TryInsert inserts the row in the writer's slot unless an index of (scope,
 * key) has one like it.  Returns false if another transaction came first after the
 * check before; nothing is left of the attempt then.
 */
static bool
TryInsert(KeyStoreBatch *batch)
{
	Writer *writer = &batch->writer;
	TransactionId xid = GetCurrentTransactionId();
	uint32 token = SpeculativeInsertionLockAcquire(xid);
	bool conflict = false;
	List *recheck;

	table_tuple_insert_speculative(writer->table, writer->slot, GetCurrentCommandId(true), 0, NULL,
								   token);
	recheck = ExecInsertIndexTuplesCompat(writer->relinfo, writer->slot, writer->estate, false,
										  true, &conflict, writer->keyIndexes, false);
	table_tuple_complete_speculative(writer->table, writer->slot, token, !conflict);
	SpeculativeInsertionLockRelease(xid);
	list_free(recheck);
	return !conflict;
}

/*
 * ReplaceIfExpired overwrites the committed row at "tid" if it has run out.
 * Sets "expired", and returns false if somebody changed the row meanwhile.
 */
static bool
ReplaceIfExpired(KeyStoreBatch *batch, const KeyName *name, ItemPointer tid, bool *expired)
{
	Writer *writer = &batch->writer;
	bool settled;

	*expired = false;
	if (!table_tuple_fetch_row_version(writer->table, tid, SnapshotAny, batch->scratch))
		return false;
	CheckSnapshot(writer->table, name, batch->scratch);
	*expired = KeyRowIsExpired(batch->scratch);
	settled = !*expired || OverwriteVersion(writer, name, tid);
	ExecClearTuple(batch->scratch);
	return settled;
}

/*
 * KeyStoreBatchInsert remembers "name" as a record without an answer, unless
 * it is stored already.  Returns whether it was new.  Waits, without bound but
 * lock_timeout, for a transaction that is writing the same name; callers that
 * insert in bytewise order cannot deadlock with each other.  Throws 40001 in
 * REPEATABLE READ and above for a row that came after the snapshot.
 */
bool
KeyStoreBatchInsert(KeyStoreBatch *batch, const KeyName *name, TimestampTz expiresAt)
{
	Writer *writer = &batch->writer;
	StoredOutcome record = {.expiresAt = expiresAt};

	for (;;)
	{
		ItemPointerData conflict;
		bool expired;

		CHECK_FOR_INTERRUPTS();
		ResetPerTupleExprContext(writer->estate);
		KeyRowFill(writer->slot, name, &record);
		ItemPointerSetInvalid(&conflict);

		if (ExecCheckIndexConstraintsCompat(writer->relinfo, writer->slot, writer->estate,
											&conflict, writer->keyIndexes))
		{
			if (TryInsert(batch))
				return true;
		}
		else if (ReplaceIfExpired(batch, name, &conflict, &expired))
			return expired;
	}
}

/*
 * KeyStoreBatchEnd closes the store.  The transaction sees the rows from its
 * next command on.
 */
void
KeyStoreBatchEnd(KeyStoreBatch *batch)
{
	ExecDropSingleTupleTableSlot(batch->scratch);
	WriterClose(&batch->writer);
	pfree(batch);
	CommandCounterIncrement();
}
