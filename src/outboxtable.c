/*-------------------------------------------------------------------------
 *
 * outboxtable.c
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 * Locks: only the table's, which OutboxTableOpen() takes for its caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relscan.h"
#include "catalog/pg_am.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "miscadmin.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/xid8.h"

#include "compat.h"
#include "errors.h"
#include "outboxtable.h"

/* What the wait for new events sleeps on is told from keys by this seed. */
#define CHANNEL_SEED 0x6F7574626F78

static const struct
{
	const char *name;
	Oid type;
	bool notNull;
} columns[OUTBOX_COLUMNS] = {
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
 * HasColumns tells whether the columns are those that the extension made.
 */
static bool
HasColumns(TupleDesc desc)
{
	if (desc->natts < OUTBOX_COLUMNS)
		return false;
	for (int i = 0; i < OUTBOX_COLUMNS; i++)
	{
		Form_pg_attribute attribute = TupleDescAttr(desc, i);

		if (attribute->attisdropped || attribute->atttypid != columns[i].type ||
			attribute->attnotnull != columns[i].notNull ||
			strcmp(NameStr(attribute->attname), columns[i].name) != 0)
			return false;
	}

	/* A column that was added and dropped again has left nothing but its place. */
	for (int i = OUTBOX_COLUMNS; i < desc->natts; i++)
	{
		if (!TupleDescAttr(desc, i)->attisdropped)
			return false;
	}
	return true;
}

/*
 * OutboxTableIndex returns the OID of the primary key, or InvalidOid if that is
 * not the btree on the number that we scan.
 */
Oid
OutboxTableIndex(Relation table)
{
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);
	Relation index;
	bool fits;

	if (!OidIsValid(primaryKey))
		return InvalidOid;
	index = index_open(primaryKey, AccessShareLock);
	fits = index->rd_index->indnkeyatts == 1 && index->rd_index->indkey.values[0] == OUT_SEQ &&
		   index->rd_rel->relam == BTREE_AM_OID;
	index_close(index, AccessShareLock);
	return fits ? primaryKey : InvalidOid;
}

/*
 * CheckOutbox throws 55000 unless the columns and the primary key are those
 * that the extension made.
 */
static void
CheckOutbox(Relation table)
{
	if (!HasColumns(RelationGetDescr(table)))
		ErrorStoreAltered("outbox", "Its columns were changed.",
						  "Restore the columns, and their NOT NULL, that CREATE EXTENSION made.");
	if (!OidIsValid(OutboxTableIndex(table)))
		ErrorStoreAltered("outbox", "Its primary key is not (seq).",
						  "Add PRIMARY KEY (seq) again.");
}

OwnTable OutboxTable = {.name = "outbox", .check = CheckOutbox};

/*
 * OutboxTableOpen opens the outbox as OwnTableOpen() does.
 */
Relation
OutboxTableOpen(LOCKMODE lockmode)
{
	return OwnTableOpen(&OutboxTable, lockmode);
}

/*
 * OutboxRescan begins to read the numbers between two, both included, by a scan of the
 * index that was begun for two keys.
 */
void
OutboxRescan(IndexScanDesc scan, int64 from, int64 upto)
{
	ScanKeyData keys[2];

	ScanKeyInit(&keys[0], 1, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	ScanKeyInit(&keys[1], 1, BTLessEqualStrategyNumber, F_INT8LE, Int64GetDatum(upto));
	index_rescan(scan, keys, 2, NULL, 0);
}

/*
 * OutboxNextRow puts the next row of such a scan into the slot, whatever has become of
 * it; false at the end.  Adds to "looked" how many entries it took to find it: a row
 * that was pruned leaves its entry to VACUUM, or to the scan that meets it, and a rollback
 * may leave a million of them.  Throws what an interrupt does, at any of them.
 */
bool
OutboxNextRow(IndexScanDesc scan, ScanDirection direction, TupleTableSlot *slot, int64 *looked)
{
	for (;;)
	{
		bool more = scan->xs_heap_continue; /* of the entry before */
		bool found;

		CHECK_FOR_INTERRUPTS();
		if (!more && index_getnext_tid(scan, direction) == NULL)
			return false;
		found = index_fetch_heap(scan, slot);
		if (found || !more)
			(*looked)++;
		if (found)
			return true;
	}
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
 * OutboxChannel returns the hash that whoever waits for events of this database
 * sleeps on, and whoever publishes some wakes up.
 */
uint64
OutboxChannel(void)
{
	return hash_bytes_uint32_extended(MyDatabaseId, CHANNEL_SEED);
}
