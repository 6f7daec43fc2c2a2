/*-------------------------------------------------------------------------
 *
 * keytable.c
 *	  The table idempotency.key: finding it, and checking that it is as we made
 *	  it.
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
#include "nodes/primnodes.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "compat.h"
#include "errors.h"
#include "keyrow.h"
#include "keytable.h"
#include "launcher.h"

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
 * CheckColumns throws 55000 unless the table has the extension's columns and
 * no constraint or default of others.
 */
static void
CheckColumns(Relation table)
{
	TupleDesc desc = RelationGetDescr(table);
	Oid keyType = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("keytext"),
								  ObjectIdGetDatum(RelationGetNamespace(table)));

	if (!KeyRowFits(desc, keyType))
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
	KeyRowPrepare(RelationGetDescr(table));
	keyTableChecked = (keyTable == RelationGetRelid(table));
	LauncherCall();
	return table;
}

/*
 * IsAbandonedIndex tells whether an open index is that of the leases in
 * progress: (scope, token) WHERE token IS NOT NULL.
 */
static bool
IsAbandonedIndex(Relation table, Relation index)
{
	Form_pg_index form = index->rd_index;
	List *predicate = RelationGetIndexPredicate(index);
	NullTest *test;

	if (form->indrelid != RelationGetRelid(table) || !form->indisvalid || form->indnkeyatts != 2 ||
		form->indkey.values[0] != COL_SCOPE || form->indkey.values[1] != COL_TOKEN ||
		index->rd_rel->relam != BTREE_AM_OID || index->rd_indcollation[0] != C_COLLATION_OID ||
		list_length(predicate) != 1 || !IsA(linitial(predicate), NullTest))
		return false;
	test = linitial_node(NullTest, predicate);
	return test->nulltesttype == IS_NOT_NULL && IsA(test->arg, Var) &&
		   ((Var *) test->arg)->varattno == COL_TOKEN;
}

/*
 * KeyTableOpenAbandonedIndex opens the index of the leases in progress, by
 * scope and token.  Throws 55000 if it is gone.  While REINDEX CONCURRENTLY puts
 * another in its place, the name may come to mean the new one.
 */
Relation
KeyTableOpenAbandonedIndex(Relation table)
{
	Oid before = InvalidOid;

	for (;;)
	{
		Oid relid = get_relname_relid("key_abandoned", RelationGetNamespace(table));
		Relation index;

		if (relid == before)
			ErrorStoreAltered("key", "Its index key_abandoned is missing.",
							  "Create it again: (scope, token) WHERE token IS NOT NULL.");
		before = relid;
		index = try_index_open(relid, AccessShareLock);
		if (index != NULL && IsAbandonedIndex(table, index))
			return index;
		if (index != NULL)
			index_close(index, AccessShareLock);
	}
}
