/*-------------------------------------------------------------------------
 *
 * store/write.c
 *	  Writing rows of idempotency.key: one under its key's lock, or a batch of
 *	  inbox records without key locks.
 *
 * Rows go through the table access method, and entries through that of the indexes.  If
 * the table has other indexes than the extension's, the executor maintains all of them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "store/row.h"
#include "store/table.h"

/* The executor's state for the insertion of entries into all indexes. */
typedef struct Indexes
{
	EState *estate;
	ResultRelInfo *relinfo;
	List *keyIndexes; /* OIDs of those that keep (key, scope) unique */
} Indexes;

typedef struct Writer
{
	Relation table;
	TupleTableSlot *slot;
	Indexes *indexes; /* of a batch, open until its end; NULL for one row */
} Writer;

/* ----------------------------------------------------------------
 * Index entries
 * ----------------------------------------------------------------
 */

/*
 * IndexesOpen opens all indexes of the table; "speculative" is for insertions that can
 * conflict.  The caller must call IndexesClose().
 */
static void
IndexesOpen(Indexes *indexes, Relation table, bool speculative)
{
	indexes->estate = CreateExecutorState();
	indexes->estate->es_snapshot = GetActiveSnapshot(); /* 19: a conflict is read with it */
	indexes->relinfo = makeNode(ResultRelInfo);
	InitResultRelInfo(indexes->relinfo, table, 0, NULL, 0);
	ExecOpenIndices(indexes->relinfo, speculative);
	indexes->keyIndexes = NIL;
	for (int i = 0; i < indexes->relinfo->ri_NumIndices; i++)
	{
		Relation index = indexes->relinfo->ri_IndexRelationDescs[i];

		if (KeyTableIsKeyIndex(index))
			indexes->keyIndexes = lappend_oid(indexes->keyIndexes, RelationGetRelid(index));
	}
}

static void
IndexesClose(Indexes *indexes)
{
	ExecCloseIndices(indexes->relinfo);
	FreeExecutorState(indexes->estate);
	list_free(indexes->keyIndexes);
	pfree(indexes->relinfo);
}

/*
 * IsDuplicateKey tells whether "error" is a duplicate of (key, scope).  "open" is NULL if
 * the primary key is the only unique index.  It reads open relations only, since it runs in
 * an error handler.
 */
static bool
IsDuplicateKey(const ErrorData *error, const Indexes *open)
{
	if (error->sqlerrcode != ERRCODE_UNIQUE_VIOLATION || error->constraint_name == NULL)
		return false;
	if (open == NULL)
		return true;

	for (int i = 0; i < open->relinfo->ri_NumIndices; i++)
	{
		Relation index = open->relinfo->ri_IndexRelationDescs[i];

		if (list_member_oid(open->keyIndexes, RelationGetRelid(index)) &&
			strcmp(error->constraint_name, RelationGetRelationName(index)) == 0)
			return true;
	}
	return false;
}

/*
 * InsertEntry adds the row in the slot to an index without expressions.  An administrator
 * can have added columns to it with INCLUDE.
 */
static void
InsertEntry(Writer *writer, Oid indexOid, IndexUniqueCheck check, bool unchanged)
{
	Relation index = index_open(indexOid, RowExclusiveLock);
	IndexInfo *info = BuildIndexInfo(index);
	Datum values[INDEX_MAX_KEYS];
	bool isnull[INDEX_MAX_KEYS];

	FormIndexDatum(info, writer->slot, NULL, values, isnull);
	(void) index_insert(index, values, isnull, &writer->slot->tts_tid, writer->table, check,
						unchanged, info);
	index_close(index, RowExclusiveLock);
}

/*
 * InsertIndexEntries adds the row in the slot to the indexes of the table.  A duplicate of
 * (key, scope) was written without the key's lock; it is reported as 40001, so that
 * clients retry.  Other errors pass unchanged.
 */
static void
InsertIndexEntries(Writer *writer, const KeyName *name, bool update, bool onlySummarizing)
{
	const KeyIndexes *own = KeyTableIndexes();
	MemoryContext context = CurrentMemoryContext;
	Indexes *open = writer->indexes;
	Indexes all;

	if (open == NULL && own->others)
	{
		open = &all;
		IndexesOpen(open, writer->table, false);
	}

	PG_TRY();
	{
		if (open == NULL)
		{
			/* without an executor, and without opening the index on leases for other rows */
			InsertEntry(writer, own->primaryKey, UNIQUE_CHECK_YES, update);
			if (KeyRowToken(writer->slot) != 0)
				InsertEntry(writer, own->abandoned, UNIQUE_CHECK_NO, false);
		}
		else
			ExecInsertIndexTuplesCompat(open->relinfo, writer->slot, open->estate, update, false,
										NULL, NIL, onlySummarizing);
	}
	PG_CATCH();
	{
		ErrorData *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (!IsDuplicateKey(error, open))
			PG_RE_THROW();
		FlushErrorState();
		ErrorConcurrentChange(name);
	}
	PG_END_TRY();

	if (open == &all)
		IndexesClose(open);
}

/* ----------------------------------------------------------------
 * One row
 * ----------------------------------------------------------------
 */

static void
WriterOpen(Writer *writer)
{
	writer->table = KeyTableOpen(RowExclusiveLock);
	writer->slot = table_slot_create(writer->table, NULL);
	writer->indexes = NULL;
}

static void
WriterClose(Writer *writer)
{
	InjectionPoint("row-close");
	ExecDropSingleTupleTableSlot(writer->slot);
	table_close(writer->table, NoLock);
}

/*
 * FetchSeen stores the row version "seen" of "name" into "slot".  Returns false if it is
 * gone; the write checks that the version is still the latest.  Another row can have its
 * TID, and even its xmin, if this transaction rewrote the table since.
 */
static bool
FetchSeen(Writer *writer, const KeyName *name, const KeyVersion *seen, TupleTableSlot *slot)
{
	ItemPointerData tid = seen->tid;

	return ItemPointerGetBlockNumber(&tid) < RelationGetNumberOfBlocks(writer->table) &&
		   table_tuple_fetch_row_version(writer->table, &tid, SnapshotAny, slot) &&
		   KeyRowXmin(slot) == seen->xmin && KeyRowIsOf(slot, name);
}

/*
 * OverwriteVersion replaces the row at "tid" by the row in the slot.  Returns false,
 * with nothing written, if another transaction changed it first.  Waits for a
 * transaction that is changing it, which only a batch or the reaper can be.
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
	result = table_tuple_update_compat(writer->table, tid, writer->slot, GetCurrentCommandId(true),
									   GetActiveSnapshot(), InvalidSnapshot, true, &failure,
									   &lockmode, &updateIndexes);
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
 * Replace stores "record" in place of the row version "seen".  Returns false, with nothing
 * written, if there is none, or another transaction changed it first.
 */
static bool
Replace(Writer *writer, const KeyName *name, const KeyVersion *seen, const KeyRecord *record)
{
	ItemPointerData tid = seen->tid;

	if (!ItemPointerIsValid(&tid) || !FetchSeen(writer, name, seen, writer->slot))
		return false;
	KeyRowFill(writer->slot, name, record, seen->createdAt);
	return OverwriteVersion(writer, name, &tid);
}

/*
 * KeyStoreWrite stores "record" under "name", in place of the version "seen" if there was
 * one.  The reaper can have deleted an expired one; then the record is a new row.  The
 * transaction sees the row from its next command on.  Throws 40001 if another row has
 * been written since.
 */
void
KeyStoreWrite(const KeyName *name, const KeyVersion *seen, const KeyRecord *record)
{
	Writer writer;

	WriterOpen(&writer);
	if (!Replace(&writer, name, seen, record))
	{
		if (KeyVersionIsLive(seen))
			ErrorConcurrentChange(name);
		KeyRowFill(writer.slot, name, record, 0);
		Insert(&writer, name);
	}
	if (record->lease.token != 0)
		KeyStoreRemember(&writer.slot->tts_tid);
	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreChangeLease sets some parts of the lease in the row version "seen"; index
 * entries stay as they are if they can.  Throws 40001 if the row changed.
 */
void
KeyStoreChangeLease(const KeyName *name, const KeyVersion *seen, const KeyRecord *record, int parts)
{
	ItemPointerData tid = seen->tid;
	TupleTableSlot *old;
	Writer writer;

	WriterOpen(&writer);
	old = table_slot_create(writer.table, NULL);
	if (!FetchSeen(&writer, name, seen, old))
		ErrorConcurrentChange(name);
	KeyRowChange(writer.slot, old, record, parts);
	if (!OverwriteVersion(&writer, name, &tid))
		ErrorConcurrentChange(name);
	KeyStoreRemember(&writer.slot->tts_tid);
	ExecDropSingleTupleTableSlot(old);
	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreDelete deletes the row version "seen".  Throws 40001 if it changed.  The reaper
 * can have deleted an expired one.
 */
void
KeyStoreDelete(const KeyName *name, const KeyVersion *seen)
{
	Relation table = KeyTableOpen(RowExclusiveLock);
	ItemPointerData tid = seen->tid;
	TM_FailureData failure;
	TM_Result result;

	CheckCmdReplicaIdentity(table, CMD_DELETE);
	InjectionPoint("row-delete");
	result = table_tuple_delete_compat(table, &tid, GetCurrentCommandId(true), GetActiveSnapshot(),
									   true, &failure);
	if (result != TM_Ok && (result != TM_Deleted || KeyVersionIsLive(seen)))
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
	Indexes indexes;
	TupleTableSlot *scratch;
};

/*
 * KeyStoreBatchBegin opens the table for many insertions without key locks.
 */
KeyStoreBatch *
KeyStoreBatchBegin(void)
{
	KeyStoreBatch *batch = palloc(sizeof(KeyStoreBatch));

	WriterOpen(&batch->writer);
	IndexesOpen(&batch->indexes, batch->writer.table, true);
	batch->writer.indexes = &batch->indexes;
	batch->scratch = table_slot_create(batch->writer.table, NULL);
	return batch;
}

/*
 * TryInsert inserts the row in the writer's slot unless an index of (key, scope) has
 * an equal one.  Returns false, with nothing written, if another transaction inserted
 * that after the caller's check.
 */
static bool
TryInsert(KeyStoreBatch *batch)
{
	Writer *writer = &batch->writer;
	const Indexes *indexes = &batch->indexes;
	TransactionId xid = GetCurrentTransactionId();
	uint32 token = SpeculativeInsertionLockAcquire(xid);
	bool conflict = false;
	List *recheck;

	InjectionPoint("once-insert");
	table_tuple_insert_speculative(writer->table, writer->slot, GetCurrentCommandId(true), 0, NULL,
								   token);
	InjectionPoint("once-index");
	recheck = ExecInsertIndexTuplesCompat(indexes->relinfo, writer->slot, indexes->estate, false,
										  true, &conflict, indexes->keyIndexes, false);
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
	KeyRecord record = {.expiresAt = RetentionEnd(retention, GetCurrentTimestamp())};

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
		ErrorInProgress(name, KeyRowTime(batch->scratch, COL_LEASED_UNTIL), NULL);
	*vacant = state != KEY_STORED;
	if (*vacant)
		Fill(writer, name, retention,
			 state == KEY_ABANDONED ? KeyRowTime(batch->scratch, COL_CREATED_AT) : 0);
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
	const Indexes *indexes = &batch->indexes;

	for (;;)
	{
		ItemPointerData conflict;
		bool vacant;

		CHECK_FOR_INTERRUPTS();
		ResetPerTupleExprContext(indexes->estate);
		Fill(writer, name, retention, 0);
		ItemPointerSetInvalid(&conflict);

		if (ExecCheckIndexConstraintsCompat(indexes->relinfo, writer->slot, indexes->estate,
											&conflict, indexes->keyIndexes))
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
	IndexesClose(&batch->indexes);
	WriterClose(&batch->writer);
	pfree(batch);
	CommandCounterIncrement();
}
