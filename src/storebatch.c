/*-------------------------------------------------------------------------
 *
 * storebatch.c
 *	  Many inbox records at once, for once_many().
 *
 * A batch takes no key locks: the unique index alone decides which of two
 * batches was first, by speculative insertion as INSERT ... ON CONFLICT does.
 *
 * Locks: ROW EXCLUSIVE on the table, and those of the rows themselves, to the
 * end of the transaction.
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

#include "compat.h"
#include "errors.h"
#include "keyrow.h"
#include "storeinternal.h"

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
 * Fill makes the writer's slot the record of "name", stored at this moment.
 */
static void
Fill(Writer *writer, const KeyName *name, const Retention *retention)
{
	StoredOutcome record = {.expiresAt = RetentionEnd(retention, GetCurrentTimestamp())};

	KeyRowFill(writer->slot, name, &record);
}

/*
 * ReplaceIfVacant overwrites the committed row at "tid" if it has run out, or
 * is an operation that its owner abandoned.  Sets "vacant", and returns false
 * if somebody changed the row meanwhile.  Throws IK409 if a lease runs.
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
	CheckSnapshot(writer->table, name, batch->scratch);
	state = KeyRowState(batch->scratch);
	if (state == KEY_LEASED)
		ErrorLeased(name, KeyRowLeaseEnd(batch->scratch));
	*vacant = state != KEY_STORED;
	if (*vacant)
		Fill(writer, name, retention);
	settled = !*vacant || OverwriteVersion(writer, name, tid);
	ExecClearTuple(batch->scratch);
	return settled;
}

/*
 * KeyStoreBatchInsert remembers "name" as a record without an answer, unless
 * it is stored already.  Returns whether it was new; the retention begins when
 * the row is written, after any wait.  Waits, without bound but
 * lock_timeout, for a transaction that is writing the same name; callers that
 * insert in bytewise order cannot deadlock with each other.  Throws IK409 if
 * the name is leased, and 40001 in REPEATABLE READ and above for a row that came after the
 * snapshot.
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
		Fill(writer, name, retention);
		ItemPointerSetInvalid(&conflict);

		if (ExecCheckIndexConstraintsCompat(writer->relinfo, writer->slot, writer->estate,
											&conflict, writer->keyIndexes))
		{
			/* the check may have waited: the retention begins when the row is written */
			Fill(writer, name, retention);
			if (TryInsert(batch))
				return true;
		}
		else if (ReplaceIfVacant(batch, name, retention, &conflict, &vacant))
			return vacant;
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
