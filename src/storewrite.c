/*-------------------------------------------------------------------------
 *
 * storewrite.c
 *	  Writing one row of idempotency.key.
 *
 * Rows go through the table access method and the executor's own path for all
 * indexes, so that an index which an administrator adds stays right.  A row is
 * replaced or removed only while it is the very version that the caller saw
 * under the key's lock.
 *
 * Locks: ROW EXCLUSIVE on the table to the end of the transaction; index locks
 * within one call.  Nobody waits for a row here but for the batch of once(),
 * which takes no key locks.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "executor/executor.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "errors.h"
#include "keyrow.h"
#include "keytable.h"
#include "storeinternal.h"

/*
 * WriterOpen opens the table and its indexes; "speculative" prepares for
 * insertions that may meet their like.  WriterClose() ends it.
 */
void
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

/*
 * WriterClose ends what WriterOpen() began.
 */
void
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
 * StillThere tells whether the row version "seen" is still where it was seen,
 * and leaves it in "scratch".  Whether it is still the latest, the write will
 * tell.
 */
static bool
StillThere(Relation table, const KeyVersion *seen, TupleTableSlot *scratch)
{
	ItemPointerData tid = seen->tid;

	return table_tuple_fetch_row_version(table, &tid, SnapshotAny, scratch) &&
		   IsVersion(scratch, seen);
}

/*
 * OverwriteVersion replaces the row at "tid" by the row in the slot.  Returns
 * false, with nothing written, if another transaction changed it first.  Waits
 * for a transaction that is changing it (only a batch of once() can be).
 */
bool
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
 * KeyStoreWrite remembers "record" under "name": as a new row if "seen" is
 * invalid, otherwise in place of exactly that version.  The transaction sees
 * it from its next command on.  Throws 40001 if the store no longer is as it
 * was seen.
 */
void
KeyStoreWrite(const KeyName *name, const KeyVersion *seen, const StoredOutcome *record)
{
	Writer writer;

	WriterOpen(&writer, false);

	if (!ItemPointerIsValid(&seen->tid))
	{
		KeyRowFill(writer.slot, name, record);
		InjectionPoint("row-insert");
		table_tuple_insert(writer.table, writer.slot, GetCurrentCommandId(true), 0, NULL);
		InjectionPoint("row-index");
		InsertIndexEntries(&writer, name, false, false);
	}
	else
	{
		ItemPointerData tid = seen->tid;

		if (!StillThere(writer.table, seen, writer.slot))
			ErrorConcurrentChange(name);
		KeyRowFill(writer.slot, name, record);
		if (!OverwriteVersion(&writer, name, &tid))
			ErrorConcurrentChange(name);
	}

	WriterClose(&writer);
	CommandCounterIncrement();
}

/*
 * KeyStoreChangeLease sets some parts of the lease in progress in exactly the
 * row version "seen"; the index entries stay as they are if they can.  Throws
 * 40001 if the row changed.
 */
void
KeyStoreChangeLease(const KeyName *name, const KeyVersion *seen, const StoredOutcome *changed,
					int parts)
{
	ItemPointerData tid = seen->tid;
	TupleTableSlot *old;
	Writer writer;

	WriterOpen(&writer, false);
	old = table_slot_create(writer.table, NULL);
	if (!StillThere(writer.table, seen, old))
		ErrorConcurrentChange(name);
	KeyRowChange(writer.slot, old, changed, parts);
	if (!OverwriteVersion(&writer, name, &tid))
		ErrorConcurrentChange(name);
	ExecDropSingleTupleTableSlot(old);
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
	InjectionPoint("row-delete");
	if (table_tuple_delete(table, &tid, GetCurrentCommandId(true), GetActiveSnapshot(),
						   InvalidSnapshot, true, &failure, false) != TM_Ok)
		ErrorConcurrentChange(name);
	InjectionPoint("row-leave");
	table_close(table, NoLock);
	CommandCounterIncrement();
}
