/*-------------------------------------------------------------------------
 *
 * store/table.c
 *	  The table idempotency.key: opening it, and checking its definition.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "nodes/primnodes.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "base/compat.h"
#include "base/errors.h"
#include "store/row.h"
#include "store/table.h"

static TableColumn columns[KEY_COLUMNS] = {
	{"created_at", TIMESTAMPTZOID, true},
	{"scope", TEXTOID, true},
	{"key", InvalidOid, true}, /* keytext; CheckKeyTable() sets its OID */
	{"fingerprint", BYTEAOID, false},
	{"response", JSONOID, false},
	{"headers", JSONOID, false},
	{"status", INT2OID, false},
	{"expires_at", TIMESTAMPTZOID, true},
	{"leased_at", TIMESTAMPTZOID, false},
	{"leased_until", TIMESTAMPTZOID, false},
	{"token", INT8OID, false},
	{"retention", INTERVALOID, false},
	{"attempt", INT4OID, false},
	{"recovery_point", TEXTOID, false},
	{"recovery_state", JSONOID, false},
	{"request", JSONOID, false},
	{"finished_by", INT8OID, false},
};

/*
 * KeyTableIsKeyIndex tells whether an open index of the table keeps (key, scope)
 * unique, bytewise: the primary key does, and during REINDEX CONCURRENTLY so does the
 * index that replaces it, or the replaced one.
 */
bool
KeyTableIsKeyIndex(Relation index)
{
	Form_pg_index form = index->rd_index;

	return form->indisunique && form->indnkeyatts == 2 && form->indkey.values[0] == COL_KEY &&
		   form->indkey.values[1] == COL_SCOPE && index->rd_indcollation[1] == C_COLLATION_OID &&
		   RelationGetIndexPredicate(index) == NIL;
}

/*
 * HasKeyIndex tells whether the primary key is the index that lookups scan.
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

static KeyIndexes indexes;
static bool indexesFound; /* since the last check of the table */

/*
 * CheckKeyTable throws 55000 unless the columns and the primary key are those of the
 * extension.
 */
static void
CheckKeyTable(Relation table)
{
	columns[COL_KEY - 1].type =
		GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("keytext"),
						ObjectIdGetDatum(RelationGetNamespace(table)));
	TableCheckColumns(table, columns, KEY_COLUMNS);
	if (!HasKeyIndex(table))
		ErrorStoreAltered("key", "Its primary key is not (key, scope COLLATE \"C\").",
						  "Add PRIMARY KEY (key, scope) again.");
	KeyRowPrepare(RelationGetDescr(table));
	indexesFound = false;
}

ExtensionTable KeyTable = {.name = "key", .check = CheckKeyTable};

/*
 * KeyTableOpen opens the key table as ExtensionTableOpen() does.
 */
Relation
KeyTableOpen(LOCKMODE lockmode)
{
	return ExtensionTableOpen(&KeyTable, lockmode);
}

/*
 * IsAbandonedIndex tells whether an open index of the table is the one on leases in
 * progress: (scope, token) WHERE token IS NOT NULL.
 */
static bool
IsAbandonedIndex(Relation index)
{
	Form_pg_index form = index->rd_index;
	List *predicate = RelationGetIndexPredicate(index);
	NullTest *test;

	if (!form->indisvalid || form->indnkeyatts != 2 || form->indkey.values[0] != COL_SCOPE ||
		form->indkey.values[1] != COL_TOKEN || index->rd_rel->relam != BTREE_AM_OID ||
		index->rd_indcollation[0] != C_COLLATION_OID || list_length(predicate) != 1 ||
		!IsA(linitial(predicate), NullTest))
		return false;
	test = linitial_node(NullTest, predicate);
	return test->nulltesttype == IS_NOT_NULL && IsA(test->arg, Var) &&
		   ((Var *) test->arg)->varattno == COL_TOKEN;
}

/*
 * FindAbandonedIndex returns the OID of the index on leases in progress, or InvalidOid.
 * It looks twice: meanwhile REINDEX CONCURRENTLY can make one index valid and the other
 * invalid.
 */
static Oid
FindAbandonedIndex(const List *oids)
{
	Oid found = InvalidOid;

	for (int i = 0; i < 2 * list_length(oids) && !OidIsValid(found); i++)
	{
		Oid relid = list_nth_oid(oids, i % list_length(oids));
		Relation index = index_open(relid, AccessShareLock);

		if (IsAbandonedIndex(index))
			found = relid;
		index_close(index, AccessShareLock);
	}
	return found;
}

/*
 * KeyTableIndexes tells which indexes the table has, for a caller that has ROW EXCLUSIVE
 * on it.  Each change of the list of indexes invalidates the table, so that the next
 * KeyTableOpen() checks it again, and the result is found again.  An index that the result
 * names cannot be dropped before the caller releases the table, not even concurrently.
 */
const KeyIndexes *
KeyTableIndexes(Relation table)
{
	if (!indexesFound)
	{
		List *oids = RelationGetIndexList(table);

		indexes.primaryKey = RelationGetPrimaryKeyIndexCompat(table);
		indexes.abandoned = FindAbandonedIndex(oids);
		indexes.others = list_length(oids) != 2 || !OidIsValid(indexes.abandoned);
		indexesFound = true;
		list_free(oids);
	}
	return &indexes;
}

/*
 * KeyTableOpenAbandonedIndex opens the index on leases in progress.  Throws 55000 if
 * there is none.
 */
Relation
KeyTableOpenAbandonedIndex(Relation table)
{
	const KeyIndexes *found = KeyTableIndexes(table);

	if (!OidIsValid(found->abandoned))
		ErrorStoreAltered("key", "Its index key_abandoned is missing.",
						  "Recreate it on (scope, token) WHERE token IS NOT NULL.");
	return index_open(found->abandoned, AccessShareLock);
}
