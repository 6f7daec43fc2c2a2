/*-------------------------------------------------------------------------
 *
 * keytable.c
 *	  The table idempotency.key: finding it, and checking that it is as we made
 *	  it.
 *
 * Locks: only the table's, which KeyTableOpen() takes for its caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "nodes/primnodes.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "compat.h"
#include "errors.h"
#include "keyrow.h"
#include "keytable.h"

/*
 * CheckColumns throws 55000 unless the table has the extension's columns.
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
 * CheckKeyTable throws 55000 unless the columns and the primary key are those
 * that the extension made.
 */
static void
CheckKeyTable(Relation table)
{
	CheckColumns(table);
	if (!HasKeyIndex(table))
		ErrorStoreAltered("key", "Its primary key is not (scope, key) COLLATE \"C\".",
						  "Add PRIMARY KEY (scope, key) again.");
	KeyRowPrepare(RelationGetDescr(table));
}

OwnTable KeyTable = {.name = "key", .check = CheckKeyTable};

/*
 * KeyTableOpen opens the key table as OwnTableOpen() does.
 */
Relation
KeyTableOpen(LOCKMODE lockmode)
{
	return OwnTableOpen(&KeyTable, lockmode);
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
