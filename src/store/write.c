/*-------------------------------------------------------------------------
 *
 * store/write.c
 *	  Writing rows of idempotency.key: one under its key's lock, or a batch of
 *	  inbox records without key locks.
 *
 * Rows go through the table access method and the executor's path for all indexes,
 * so that an index which an administrator adds stays consistent.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "store/row.h"
#include "store/table.h"

/* The open table with all its indexes. */
typedef struct Writer
{
	Relation table;
	EState *estate;
	ResultRelInfo *relinfo;
	List *keyIndexes; /* OIDs of those that keep (scope, key) unique */
	TupleTableSlot *slot;
} Writer;

/*
 * WriterOpen opens the table and its indexes; "speculative" is for insertions that
 * can conflict.  The caller must call WriterClose().
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
	InjectionPoint("row-close");
	ExecDropSingleTupleTableSlot(writer->slot);
	ExecCloseIndices(writer->relinfo);
	FreeExecutorState(writer->estate);
	list_free(writer->keyIndexes);
	pfree(writer->relinfo);
	table_close(writer->table, NoLock);
}

/*
 * IsDuplicateKey tells whether "error" is a duplicate of (scope, key).  It reads open
 * relations only, since it runs in an error handler.
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
 * InsertIndexEntries adds the row in the slot to the indexes.  A duplicate of (scope,
 * key) was written without the key's lock; it is reported as 40001, so that clients
 * retry.  Other errors pass unchanged.
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
 * FetchSeen stores the row version "seen" into "slot".  Throws 40001 if another row
 * has its TID; the write checks that the version is still the latest.
 */
static void
FetchSeen(Writer *writer, const KeyName *name, const KeyVersion *seen, TupleTableSlot *slot)
{
	ItemPointerData tid = seen->tid;

	if (!table_tuple_fetch_row_version(writer->table, &tid, SnapshotAny, slot) ||
		!KeyRowIsVersion(slot, seen))
		ErrorConcurrentChange(name);
}

/*
 * OverwriteVersion replaces the row at "tid" by the row in the slot.  Returns false,
 * with nothing written, if another transaction changed it first.  Waits for a
 * transaction that is changing it, which only a batch can be.
 */
static bool
OverwriteVersion(Writer *writer, const KeyName *name, ItemPointer tid)
{
	TM_FailureData failure;
	LockTupleMode lockmode;
	TU_UpdateIndexes updateIndexes;
	TM_Result result;

	CheckCmdReplicaIdentity(writer->table, CMD_UPDATE);
	InjectionPoint("row-overwrite");
	result = table_tuple_update(writer->table, tid, writer->slot, GetCurrentCommandId(true),
								GetActiveSnapshot(), InvalidSnapshot, true, &failure, &lockmode,
								&updateIndexes);
	if (result != TM_Ok)
		return false;
	InjectionPoint("row-reindex");
	if (updateIndexes != TU_None)
		InsertIndexEntries(writer, name, true, updateIndexes == TU_Summarizing);
	return true;
}

/*
 * Insert inserts the row in the slot.  Throws 40001 if there is one of that name.
 */
static void
Insert(Writer *writer, const KeyName *name)
{
	InjectionPoint("row-insert");
	table_tuple_insert(writer->table, writer->slot, GetCurrentCommandId(true), 0, NULL);
	InjectionPoint("row-index");
	InsertIndexEntries(writer, name, false, false);
}

/*
 * Overwrite replaces the row version "seen" by the row in the slot.  Throws 40001 if
 * another transaction changed it first.
 */
static void
Overwrite(Writer *writer, const KeyName *name, const KeyVersion *seen)
{
	ItemPointerData tid = seen->tid;

	if (!OverwriteVersion(writer, name, &tid))
		ErrorConcurrentChange(name);
}

/*
 * KeyStoreWrite stores "record" under "name": as a new row if "seen" is invalid,
 * otherwise in place of that version.  The transaction sees the row from its next
 * command on.  Throws 40001 if the row changed since it was seen.
 */
void
KeyStoreWrite(const KeyName *name, const KeyVersion *seen, const StoredOutcome *record)
{
	bool exists = ItemPointerIsValid(&seen->tid);
	Writer writer;

	WriterOpen(&writer, false);
	if (exists)
		FetchSeen(&writer, name, seen, writer.slot);
	KeyRowFill(writer.slot, name, record, exists ? seen->createdAt : 0);
	if (exists)
		Overwrite(&writer, name, seen);
	else
		Insert(&writer, name);
	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreChangeLease sets some parts of the lease in the row version "seen"; index
 * entries stay as they are if they can.  Throws 40001 if the row changed.
 */
void
KeyStoreChangeLease(const KeyName *name, const KeyVersion *seen, const StoredOutcome *changed,
					int parts)
{
	TupleTableSlot *old;
	Writer writer;

	WriterOpen(&writer, false);
	old = table_slot_create(writer.table, NULL);
	FetchSeen(&writer, name, seen, old);
	KeyRowChange(writer.slot, old, changed, parts);
	Overwrite(&writer, name, seen);
	ExecDropSingleTupleTableSlot(old);
	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreDelete deletes the row version "seen".  Throws 40001 if it changed.
 */
void
KeyStoreDelete(const KeyName *name, const KeyVersion *seen)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	ItemPointerData tid = seen->tid;
	TM_FailureData failure;

	CheckCmdReplicaIdentity(table, CMD_DELETE);
	InjectionPoint("row-delete");
	if (table_tuple_delete(table, &tid, GetCurrentCommandId(true), GetActiveSnapshot(),
						   InvalidSnapshot, true, &failure, false) != TM_Ok)
		ErrorConcurrentChange(name);
	InjectionPoint("row-end");
	table_close(table, NoLock);
	CommandCounterIncrement();
}

/* ----------------------------------------------------------------
 * Batches: the unique index alone decides which of two transactions is first, by
 * speculative insertion, as INSERT ... ON CONFLICT does.
 * ----------------------------------------------------------------
 */

struct KeyStoreBatch
{
	Writer writer;
	TupleTableSlot *scratch;
};

/*
 * KeyStoreBatchBegin opens the table for many insertions without key locks.
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
 * TryInsert inserts the row in the writer's slot unless an index of (scope, key) has
 * an equal one.  Returns false, with nothing written, if another transaction inserted
 * that after the caller's check.
 */
static bool
TryInsert(KeyStoreBatch *batch)
{
	Writer *writer = &batch->writer;
	TransactionId xid = GetCurrentTransactionId();
	uint32 token = SpeculativeInsertionLockAcquire(xid);
	bool conflict = false;
	List *recheck;

	InjectionPoint("once-insert");
	table_tuple_insert_speculative(writer->table, writer->slot, GetCurrentCommandId(true), 0, NULL,
								   token);
	InjectionPoint("once-index");
	recheck = ExecInsertIndexTuplesCompat(writer->relinfo, writer->slot, writer->estate, false,
										  true, &conflict, writer->keyIndexes, false);
	InjectionPoint("once-confirm");
	table_tuple_complete_speculative(writer->table, writer->slot, token, !conflict);
	SpeculativeInsertionLockRelease(xid);
	list_free(recheck);
	return !conflict;
}

/*
 * Fill makes the writer's slot a record of "name" that is stored now; "createdAt" as for
 * KeyRowFill().
 */
static void
Fill(Writer *writer, const KeyName *name, const Retention *retention, TimestampTz createdAt)
{
	StoredOutcome record = {.expiresAt = RetentionEnd(retention, GetCurrentTimestamp())};

	KeyRowFill(writer->slot, name, &record, createdAt);
}

/*
 * ReplaceIfVacant overwrites the committed row at "tid" if it has expired or is an
 * abandoned operation, and sets "vacant" to whether it is one.  Returns false if
 * another transaction changed the row first.  Throws IK409 if a lease runs.
 */
static bool
ReplaceIfVacant(KeyStoreBatch *batch, const KeyName *name, const Retention *retention,
				ItemPointer tid, bool *vacant)
{
	Writer *writer = &batch->writer;
	KeyState state;
	bool settled;

	*vacant = false;
	if (!table_tuple_fetch_row_version(writer->table, tid, SnapshotAny, batch->scratch))
		return false;
	KeyRowCheckSnapshot(writer->table, name, batch->scratch);
	state = KeyRowState(batch->scratch);
	if (state == KEY_LEASED)
		ErrorLeased(name, KeyRowLeaseEnd(batch->scratch));
	*vacant = state != KEY_STORED;
	if (*vacant)
		Fill(writer, name, retention, state == KEY_ABANDONED ? KeyRowCreated(batch->scratch) : 0);
	settled = !*vacant || OverwriteVersion(writer, name, tid);
	ExecClearTuple(batch->scratch);
	return settled;
}

/*
 * KeyStoreBatchInsert stores a record without an answer under "name", unless there is
 * one.  Returns whether the name was new.  Waits, without limit but lock_timeout, for
 * a transaction that is writing the same name; callers that insert in bytewise order
 * cannot deadlock with each other.  Throws IK409 if the name is leased; in REPEATABLE
 * READ and above, 40001 for a row that was written after the snapshot.
 */
bool
KeyStoreBatchInsert(KeyStoreBatch *batch, const KeyName *name, const Retention *retention)
{
	Writer *writer = &batch->writer;

	for (;;)
	{
		ItemPointerData conflict;
		bool vacant;

		CHECK_FOR_INTERRUPTS();
		ResetPerTupleExprContext(writer->estate);
		Fill(writer, name, retention, 0);
		ItemPointerSetInvalid(&conflict);

		if (ExecCheckIndexConstraintsCompat(writer->relinfo, writer->slot, writer->estate,
											&conflict, writer->keyIndexes))
		{
			/* the check may have waited: the retention begins when the row is written */
			Fill(writer, name, retention, 0);
			if (TryInsert(batch))
				return true;
		}
		else if (ReplaceIfVacant(batch, name, retention, &conflict, &vacant))
			return vacant;
	}
}

/*
 * KeyStoreBatchEnd closes the table.  The transaction sees the rows from its next
 * command on.
 */
void
KeyStoreBatchEnd(KeyStoreBatch *batch)
{
	ExecDropSingleTupleTableSlot(batch->scratch);
	WriterClose(&batch->writer);
	pfree(batch);
	CommandCounterIncrement();
}
