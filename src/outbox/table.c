/*-------------------------------------------------------------------------
 *
 * outbox/table.c
 *	  The table idempotency.outbox: its columns, and finding it.
 *
 * Locks: the table's, which OutboxTableOpen() takes for its caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "utils/rel.h"

#include "base/compat.h"
#include "base/errors.h"
#include "outbox/table.h"

static const TableColumn columns[OUTBOX_COLUMNS] = {
	{"seq", INT8OID, true},
	{"txid", XID8OID, true},
	{"published_at", TIMESTAMPTZOID, true},
	{"id", UUIDOID, true},
	{"bucket", INT4OID, true},
	{"bytes", INT4OID, true},
	{"deliver_at", TIMESTAMPTZOID, false},
	{"aggregatetype", TEXTOID, true},
	{"aggregateid", TEXTOID, false},
	{"type", TEXTOID, false},
	{"payload", JSONOID, false},
	{"headers", JSONOID, false},
};

/*
 * CheckOutbox throws 55000 unless the columns and the primary key are those that the
 * extension made.
 */
static void
CheckOutbox(Relation table)
{
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);
	bool fits = false;

	TableCheckColumns(table, columns, OUTBOX_COLUMNS);
	if (OidIsValid(primaryKey))
	{
		Relation index = index_open(primaryKey, AccessShareLock);

		fits = index->rd_index->indnkeyatts == 1 && index->rd_index->indkey.values[0] == OUT_SEQ &&
			   index->rd_rel->relam == BTREE_AM_OID;
		index_close(index, AccessShareLock);
	}
	if (!fits)
		ErrorStoreAltered("outbox", "Its primary key is not (seq).",
						  "Add PRIMARY KEY (seq) again.");
}

static ExtensionTable OutboxTable = {
	.name = "outbox", .trigger = "refuse_update", .check = CheckOutbox};

/*
 * OutboxTableOpen opens the outbox as ExtensionTableOpen() does.
 */
Relation
OutboxTableOpen(LOCKMODE lockmode)
{
	return ExtensionTableOpen(&OutboxTable, lockmode);
}
