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
	[COL_CREATED_AT - 1] = {"created_at", TIMESTAMPTZOID, true},
	[COL_SCOPE - 1] = {"scope", TEXTOID, true},
	[COL_KEY - 1] = {"key", InvalidOid, true}, /* keytext; CheckKeyTable() sets its OID */
	[COL_FINGERPRINT - 1] = {"fingerprint", BYTEAOID, false},
	[COL_RESPONSE - 1] = {"response", JSONOID, false},
	[COL_HEADERS - 1] = {"headers", JSONOID, false},
	[COL_STATUS - 1] = {"status", INT2OID, false},
	[COL_EXPIRES_AT - 1] = {"expires_at", TIMESTAMPTZOID, true},
	[COL_LEASED_AT - 1] = {"leased_at", TIMESTAMPTZOID, false},
	[COL_LEASED_UNTIL - 1] = {"leased_until", TIMESTAMPTZOID, false},
	[COL_TOKEN - 1] = {"token", INT8OID, false},
	[COL_RETENTION - 1] = {"retention", INTERVALOID, false},
	[COL_ATTEMPT - 1] = {"attempt", INT4OID, false},
	[COL_RECOVERY_POINT - 1] = {"recovery_point", TEXTOID, false},
	[COL_RECOVERY_STATE - 1] = {"recovery_state", JSONOID, false},
	[COL_REQUEST - 1] = {"request", JSONOID, false},
	[COL_FINISHED_BY - 1] = {"finished_by", INT8OID, false},
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

static KeyIndexes indexes;

/*
 * FindIndexes sets "indexes".  It looks at each twice: meanwhile REINDEX CONCURRENTLY can
 * make one index valid and the other invalid.
 */
static void
FindIndexes(Relation table)
{
	List *oids = RelationGetIndexList(table);
	Oid primaryKey = RelationGetPrimaryKeyIndexCompat(table);

	memset(&indexes, 0, sizeof(indexes));
	for (int i = 0; i < 2 * list_length(oids); i++)
	{
		Oid relid = list_nth_oid(oids, i % list_length(oids));
		Relation index = index_open(relid, AccessShareLock);

		if (relid == primaryKey && KeyTableIsKeyIndex(index))
			indexes.primaryKey = relid;
		else if (IsAbandonedIndex(index))
			indexes.abandoned = relid;
		index_close(index, AccessShareLock);
	}
	indexes.others = list_length(oids) != 2 || !OidIsValid(indexes.abandoned);
	list_free(oids);
}

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
	FindIndexes(table);
	if (!OidIsValid(indexes.primaryKey))
		ErrorStoreAltered("key", "Its primary key is not (key, scope COLLATE \"C\").",
						  "Add PRIMARY KEY (key, scope) again.");
	KeyRowPrepare(RelationGetDescr(table));
}

static ExtensionTable KeyTable = {.name = "key", .check = CheckKeyTable};

/*
 * KeyTableOpen opens the key table as ExtensionTableOpen() does.
 */
Relation
KeyTableOpen(LOCKMODE lockmode)
{
	return ExtensionTableOpen(&KeyTable, lockmode);
}

/*
 * KeyTableIndexes tells which indexes the open table has.  Each change of the list of
 * indexes invalidates the table, so that the next KeyTableOpen() finds them again.  An index
 * that the result names cannot be dropped before a caller with ROW EXCLUSIVE releases the
 * table, not even concurrently.
 */
const KeyIndexes *
KeyTableIndexes(void)
{
	return &indexes;
}

/*
 * KeyTableOpenAbandonedIndex opens the index on leases in progress.  Throws 55000 if
 * there is none.
 */
Relation
KeyTableOpenAbandonedIndex(void)
{
	if (!OidIsValid(indexes.abandoned))
		ErrorStoreAltered("key", "Its index key_abandoned is missing.",
						  "Recreate it on (scope, token) WHERE token IS NOT NULL.");
	return index_open(indexes.abandoned, AccessShareLock);
}
