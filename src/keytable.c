/*-------------------------------------------------------------------------
 *
 * keytable.c
 *	  The table idempotency.key: finding it, checking that it is as we made it,
 *	  and the layout of its rows.
 *
 * Rows are written past the executor's triggers, rules, row security and
 * partition routing, hence a table that has any of them is refused.  The check
 * is made once, and again after each change of the table's definition.
 *
 * Locks: only the table's, which KeyTableOpen() takes for its caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_type.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "errors.h"
#include "keytable.h"
#include "keytext.h"

/* The columns of idempotency.key, in order. */
enum
{
	COL_CREATED_AT = 1,
	COL_EXPIRES_AT,
	COL_STATUS,
	COL_SCOPE,
	COL_KEY,
	COL_FINGERPRINT,
	COL_RESPONSE,
	COL_HEADERS,
	KEY_COLUMNS = COL_HEADERS
};

static const struct
{
	const char *name;
	Oid type;
	bool notNull;
} keyColumns[KEY_COLUMNS] = {
	{"created_at", TIMESTAMPTZOID, true},
	{"expires_at", TIMESTAMPTZOID, true},
	{"status", INT2OID, false}, /* negative: a final failure */
	{"scope", TEXTOID, true},
	{"key", InvalidOid, true}, /* idempotency.keytext */
	{"fingerprint", BYTEAOID, false},
	{"response", JSONOID, false},
	{"headers", JSONOID, false},
};

/* The table, once found, and whether it was checked since its last change. */
static Oid keyTable = InvalidOid;
static bool keyTableChecked = false;

/*
 * ForgetTable makes us look anew after any change of the table's definition.
 */
static void
ForgetTable(Datum arg, Oid relid)
{
	if (relid == InvalidOid || relid == keyTable)
	{
		keyTable = InvalidOid;
		keyTableChecked = false;
	}
}

/*
 * KeyTableInit registers the invalidation callback; called once per backend.
 */
void
KeyTableInit(void)
{
	CacheRegisterRelcacheCallback(ForgetTable, (Datum) 0);
}

/*
 * IsKeyText tells whether a column has the type idempotency.keytext.
 */
static bool
IsKeyText(Relation table, Oid type)
{
	return type == GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("keytext"),
								   ObjectIdGetDatum(RelationGetNamespace(table)));
}

/*
 * CheckColumns throws 55000 unless the table has the extension's columns and
 * no constraint or default of others.
 */
static void
CheckColumns(Relation table)
{
	TupleDesc desc = RelationGetDescr(table);
	bool same = desc->natts >= KEY_COLUMNS;

	for (int i = 0; same && i < KEY_COLUMNS; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		same = !column->attisdropped && column->attnotnull == keyColumns[i].notNull &&
			   strcmp(NameStr(column->attname), keyColumns[i].name) == 0 &&
			   (i == COL_KEY - 1 ? IsKeyText(table, column->atttypid)
								 : column->atttypid == keyColumns[i].type);
	}

	/* A column that was added and dropped again has left nothing but its place. */
	for (int i = KEY_COLUMNS; same && i < desc->natts; i++)
		same = TupleDescAttr(desc, i)->attisdropped;
	if (!same)
		ErrorStoreAltered("key", "Its columns were changed.",
						  "Restore the columns, and their NOT NULL, that CREATE EXTENSION made.");

	if (desc->constr != NULL && (desc->constr->num_check > 0 || desc->constr->num_defval > 0))
		ErrorStoreAltered("key", "It has check constraints or defaults.",
						  "Drop them; keep what you add in a table of your own.");
}

/*
 * KeyTableIsKeyIndex tells whether an open index of the table keeps (scope,
 * key) unique, bytewise: the primary key does, and while REINDEX CONCURRENTLY replaces
 * it, so does the index that comes or goes.
 */
bool
KeyTableIsKeyIndex(Relation index)
{
	Form_pg_index form = index->rd_index;

	return form->indisunique && form->indnkeyatts == 2 && form->indkey.values[0] == COL_SCOPE &&
		   form->indkey.values[1] == COL_KEY && index->rd_indcollation[0] == C_COLLATION_OID &&
		   RelationGetIndexPredicate(index) == NIL;
}

/*
 * HasKeyIndex tells whether the primary key is the one that we scan.
 */
static bool
HasKeyIndex(Relation table)
{
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);
	Relation index;
	bool fits;

	if (!OidIsValid(primaryKey))
		return false;
	index = index_open(primaryKey, AccessShareLock);
	fits = KeyTableIsKeyIndex(index);
	index_close(index, AccessShareLock);
	return fits;
}

/*
 * CheckTable throws 55000 unless the table is the plain local heap that the
 * extension made.  (A table distributed by Citus bears triggers.)
 */
static void
CheckTable(Relation table)
{
	Form_pg_class form = table->rd_rel;

	/* relhassubclass outlives the last child */
	if (form->relkind != RELKIND_RELATION || form->relispartition ||
		(form->relhassubclass && find_inheritance_children(RelationGetRelid(table), NoLock) != NIL))
		ErrorStoreAltered("key", "It is partitioned, foreign, or inherited from.",
						  "Move its rows into a plain table.");
	if (form->relam != HEAP_TABLE_AM_OID)
		ErrorStoreAltered("key", "It has another access method than heap.",
						  "Use ALTER TABLE ... SET ACCESS METHOD heap.");
	if (form->relpersistence != RELPERSISTENCE_PERMANENT)
		ErrorStoreAltered("key", "It is unlogged: a crash would forget every key.",
						  "Use ALTER TABLE ... SET LOGGED.");
	if (form->relrowsecurity || form->relforcerowsecurity)
		ErrorStoreAltered("key", "It has row-level security.",
						  "Use ALTER TABLE ... DISABLE ROW LEVEL SECURITY, and "
						  "idempotency.scope_prefix to separate tenants.");
	if (table->trigdesc != NULL || table->rd_rules != NULL)
		ErrorStoreAltered("key", "It has triggers, rules or foreign keys, or is distributed.",
						  "Drop them; put triggers on your own tables.");
	CheckColumns(table);
	if (!HasKeyIndex(table))
		ErrorStoreAltered("key", "Its primary key is not (scope, key) COLLATE \"C\".",
						  "Add PRIMARY KEY (scope, key) again.");
}

/*
 * KeyTableByName returns the OID of idempotency.key.  Throws 55000 where the
 * extension is not installed.
 */
static Oid
KeyTableByName(void)
{
	Oid schema = get_namespace_oid("idempotency", true);
	Oid relid = OidIsValid(schema) ? get_relname_relid("key", schema) : InvalidOid;

	if (!OidIsValid(relid))
		ErrorNotInstalled();
	return relid;
}

/*
 * KeyTableOpen opens the key table under the given lock, which the caller keeps
 * to the end of the transaction unless it only reads.  Whoever waits for the
 * lock may get it on a table that was renamed or replaced meanwhile, so that
 * the name is looked up again.  Throws 55000 where the extension is not
 * installed or the table was altered.
 */
Relation
KeyTableOpen(LOCKMODE lockmode)
{
	Relation table;

	for (;;)
	{
		table = try_table_open(keyTableChecked ? keyTable : KeyTableByName(), lockmode);
		if (table != NULL && keyTableChecked)
			return table;
		if (table != NULL && RelationGetRelid(table) == KeyTableByName())
			break;
		if (table != NULL)
			table_close(table, lockmode);
		keyTableChecked = false;
	}

	/* An invalidation that comes while we check must find what to forget. */
	keyTable = RelationGetRelid(table);
	CheckTable(table);
	keyTableChecked = (keyTable == RelationGetRelid(table));
	return table;
}

/* ----------------------------------------------------------------
 * The layout of a row
 * ----------------------------------------------------------------
 */

/*
 * ColumnVarlena returns a detoasted copy of a varlena column, or NULL.
 */
static void *
ColumnVarlena(TupleTableSlot *slot, int column)
{
	bool isnull;
	Datum value = slot_getattr(slot, column, &isnull);

	return isnull ? NULL : PG_DETOAST_DATUM_COPY(value);
}

/*
 * KeyRowRead copies what a row remembers into the current memory context.
 */
void
KeyRowRead(TupleTableSlot *slot, StoredOutcome *outcome)
{
	bool isnull;
	int16 status;

	outcome->expiresAt = DatumGetTimestampTz(slot_getattr(slot, COL_EXPIRES_AT, &isnull));
	status = DatumGetInt16(slot_getattr(slot, COL_STATUS, &isnull));
	outcome->hasStatus = !isnull;
	outcome->failed = status < 0;
	outcome->status = abs(status);
	outcome->fingerprint = ColumnVarlena(slot, COL_FINGERPRINT);
	outcome->headers = ColumnVarlena(slot, COL_HEADERS);
	outcome->response = ColumnVarlena(slot, COL_RESPONSE);
}

/*
 * KeyRowIsExpired tells whether a row counts as absent at this very moment.
 */
bool
KeyRowIsExpired(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetTimestampTz(slot_getattr(slot, COL_EXPIRES_AT, &isnull)) <=
		   GetCurrentTimestamp();
}

static void
SetVarlena(TupleTableSlot *slot, int column, const void *value)
{
	slot->tts_values[column - 1] = PointerGetDatum(value);
	slot->tts_isnull[column - 1] = value == NULL;
}

/*
 * KeyRowFill makes the slot the row that remembers "outcome" under "name".
 */
void
KeyRowFill(TupleTableSlot *slot, const KeyName *name, const StoredOutcome *outcome)
{
	ExecClearTuple(slot);
	memset(slot->tts_isnull, true, slot->tts_tupleDescriptor->natts * sizeof(bool));
	memset(slot->tts_isnull, false, KEY_COLUMNS * sizeof(bool));
	slot->tts_values[COL_CREATED_AT - 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	slot->tts_values[COL_EXPIRES_AT - 1] = TimestampTzGetDatum(outcome->expiresAt);
	slot->tts_values[COL_STATUS - 1] =
		Int16GetDatum(outcome->failed ? -outcome->status : outcome->status);
	slot->tts_isnull[COL_STATUS - 1] = !outcome->hasStatus;
	SetVarlena(slot, COL_SCOPE, name->scope);
	SetVarlena(slot, COL_KEY, KeyTextPack(name->key));
	SetVarlena(slot, COL_FINGERPRINT, outcome->fingerprint);
	SetVarlena(slot, COL_RESPONSE, outcome->response);
	SetVarlena(slot, COL_HEADERS, outcome->headers);
	ExecStoreVirtualTuple(slot);
}
