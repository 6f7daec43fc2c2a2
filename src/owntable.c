/*-------------------------------------------------------------------------
 *
 * owntable.c
 *	  The extension's tables that are written past the executor: finding them,
 *	  and checking that they are as we made them.
 *
 * Rows are written past the executor's triggers, rules, row security and
 * partition routing, hence a table that has any of them is refused.  The check
 * is made once, and again after each change of the table's definition.
 *
 * Also, whether logical replication fills them; and the sequences whose numbers
 * stand for an order.
 *
 * Locks: only the table's or the sequence's, which OwnTableOpen() and
 * OwnSequenceOpen() take for their caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_sequence.h"
#include "catalog/pg_subscription_rel.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "errors.h"
#include "keytable.h"
#include "launcher.h"
#include "outboxtable.h"
#include "owntable.h"

static OwnTable *const tables[] = {&KeyTable, &OutboxTable};

/*
 * ForgetTable makes us look anew after any change of a table's definition.
 */
static void
ForgetTable(Datum arg, Oid relid)
{
	for (size_t i = 0; i < lengthof(tables); i++)
	{
		if (relid == InvalidOid || relid == tables[i]->relid)
		{
			tables[i]->relid = InvalidOid;
			tables[i]->checked = false;
		}
	}
}

/*
 * OwnTableInit registers the invalidation callback; called once per backend.
 */
void
OwnTableInit(void)
{
	CacheRegisterRelcacheCallback(ForgetTable, (Datum) 0);
}

/*
 * CatalogNames tells whether a row of a catalog has the relation in that column.
 */
static bool
CatalogNames(Oid catalog, AttrNumber column, Oid relid)
{
	Relation table = table_open(catalog, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	bool found;

	ScanKeyInit(&key, column, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(table, InvalidOid, false, NULL, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(table, AccessShareLock);
	return found;
}

/*
 * IsDistributed tells whether Citus has the table among its own: distributed, a
 * reference table, or a local one that it manages.  It notes them in a table that it
 * puts into pg_catalog.  On the node where that was done such a table bears a trigger
 * as well; elsewhere, since it is an extension's, it bears nothing to be seen.  Citus
 * invalidates the relation when it changes the note, so that we look again.
 */
static bool
IsDistributed(Oid relid)
{
	Oid notes = get_relname_relid("pg_dist_partition", PG_CATALOG_NAMESPACE);
	AttrNumber column = OidIsValid(notes) ? get_attnum(notes, "logicalrelid") : InvalidAttrNumber;

	return column != InvalidAttrNumber && CatalogNames(notes, column, relid);
}

/*
 * CheckTable throws 55000 unless the table is the plain local heap that the
 * extension made.
 */
static void
CheckTable(const OwnTable *own, Relation table)
{
	Form_pg_class form = table->rd_rel;
	TupleConstr *constraints = RelationGetDescr(table)->constr;

	/* relhassubclass outlives the last child */
	if (form->relkind != RELKIND_RELATION || form->relispartition ||
		(form->relhassubclass && find_inheritance_children(RelationGetRelid(table), NoLock) != NIL))
		ErrorStoreAltered(own->name, "It is partitioned, foreign, or inherited from.",
						  "Move its rows into a plain table.");
	if (form->relam != HEAP_TABLE_AM_OID)
		ErrorStoreAltered(own->name, "It has another access method than heap.",
						  "Use ALTER TABLE ... SET ACCESS METHOD heap.");
	if (form->relpersistence != RELPERSISTENCE_PERMANENT)
		ErrorStoreAltered(own->name, "It is unlogged: a crash would forget every row.",
						  "Use ALTER TABLE ... SET LOGGED.");
	if (form->relrowsecurity || form->relforcerowsecurity)
		ErrorStoreAltered(own->name, "It has row-level security.",
						  "Use ALTER TABLE ... DISABLE ROW LEVEL SECURITY, and "
						  "idempotency.scope_prefix to separate tenants.");
	if (IsDistributed(RelationGetRelid(table)))
		ErrorStoreAltered(own->name, "It is distributed by Citus.",
						  "Use undistribute_table(); each node has a table of its own.");
	if (table->trigdesc != NULL || table->rd_rules != NULL)
		ErrorStoreAltered(own->name, "It has triggers, rules or foreign keys.",
						  "Drop them; put triggers on your own tables.");
	if (constraints != NULL && (constraints->num_check > 0 || constraints->num_defval > 0))
		ErrorStoreAltered(own->name, "It has check constraints or defaults.",
						  "Drop them; keep what you add in a table of your own.");
	own->check(table);
}

/*
 * OwnRelationByName returns the OID of a relation in the extension's schema, or
 * InvalidOid.  Throws 55000 where there is no such schema.
 */
Oid
OwnRelationByName(const char *name)
{
	Oid schema = get_namespace_oid("idempotency", true);

	if (!OidIsValid(schema))
		ErrorNotInstalled();
	return get_relname_relid(name, schema);
}

/*
 * OwnRelationsLock takes ACCESS SHARE on relations of the extension, if all of
 * them are there and free; to the end of the transaction.  A transaction that
 * does so first, and then needs no other, never waits for one that drops or alters
 * the extension, and holds what that waits for.
 */
OwnLock
OwnRelationsLock(const char *const *names, int count)
{
	for (int i = 0; i < count; i++)
	{
		Oid relid = OwnRelationByName(names[i]);

		if (!OidIsValid(relid))
			return OWN_MISSING;
		if (!ConditionalLockRelationOid(relid, AccessShareLock))
			return OWN_BUSY;
	}
	return OWN_LOCKED;
}

/*
 * OwnRelationsAwait waits until those relations are free, one after the other, and keeps
 * none of them: for a caller that has released all its locks on them.
 */
void
OwnRelationsAwait(const char *const *names, int count)
{
	for (int i = 0; i < count; i++)
	{
		Oid relid = OwnRelationByName(names[i]);

		if (!OidIsValid(relid))
			continue;
		LockRelationOid(relid, AccessShareLock);
		UnlockRelationOid(relid, AccessShareLock);
	}
}

/*
 * OwnRelationTake locks one of the extension's tables, if it is there; with dontWait
 * it returns false if the lock is not free.
 */
bool
OwnRelationTake(const char *name, LOCKMODE lockmode, bool dontWait)
{
	Oid relid = OwnRelationByName(name);

	if (!OidIsValid(relid))
		return true; /* whoever opens it will say so */
	if (dontWait)
		return ConditionalLockRelationOid(relid, lockmode);
	LockRelationOid(relid, lockmode);
	return true;
}

/*
 * TableByName returns the OID of the table.  Throws 55000 where the extension is
 * not installed.
 */
static Oid
TableByName(const OwnTable *own)
{
	Oid relid = OwnRelationByName(own->name);

	if (!OidIsValid(relid))
		ErrorNotInstalled();
	return relid;
}

/*
 * OwnTableOpen opens the table under the given lock, which the caller keeps
 * to the end of the transaction unless it only reads.  Whoever waits for the
 * lock may get it on a table that was renamed or replaced meanwhile, so that
 * the name is looked up again.  Throws 55000 where the extension is not
 * installed or the table was altered.
 */
Relation
OwnTableOpen(OwnTable *own, LOCKMODE lockmode)
{
	Relation table;

	for (;;)
	{
		table = try_table_open(own->checked ? own->relid : TableByName(own), lockmode);
		if (table != NULL && own->checked)
			return table;
		if (table != NULL && RelationGetRelid(table) == TableByName(own))
			break;
		if (table != NULL)
			table_close(table, lockmode);
		own->checked = false;
	}

	/* An invalidation that comes while we check must find what to forget. */
	own->relid = RelationGetRelid(table);
	CheckTable(own, table);
	own->checked = (own->relid == RelationGetRelid(table));
	LauncherCall();
	return table;
}

/*
 * CountsOneByOne tells whether a sequence gives out one number after the other to
 * whoever asks, whatever crashes: none lies in a session's cache to come after those
 * of others, and none comes twice.
 */
static bool
CountsOneByOne(Relation sequence)
{
	HeapTuple tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(RelationGetRelid(sequence)));
	Form_pg_sequence form;
	bool oneByOne;

	if (!HeapTupleIsValid(tuple))
		return false;
	form = (Form_pg_sequence) GETSTRUCT(tuple);
	oneByOne = form->seqcache == 1 && form->seqincrement == 1 && !form->seqcycle &&
			   sequence->rd_rel->relpersistence == RELPERSISTENCE_PERMANENT;
	ReleaseSysCache(tuple);
	return oneByOne;
}

/*
 * OwnSequenceOpen opens a sequence of the extension for who is to draw a number, under
 * the lock of a draw, which he keeps to the end of the transaction: so it stays
 * as it was looked at.  Throws 55000, and says for what "purpose" the numbers are,
 * unless they come one by one.
 */
Relation
OwnSequenceOpen(const char *name, const char *purpose)
{
	Oid relid = OwnRelationByName(name);
	Relation sequence = OidIsValid(relid) ? try_relation_open(relid, RowExclusiveLock) : NULL;

	if (sequence == NULL || sequence->rd_rel->relkind != RELKIND_SEQUENCE)
		ErrorSequenceMissing(name);
	if (!CountsOneByOne(sequence))
		ErrorSequenceAltered(name, purpose);
	return sequence;
}

/*
 * OwnTablesFollow tells whether rows of the extension's tables come from another
 * server by logical replication, be the subscription disabled.  Whoever removes or
 * moves one here then is in its way: an UPDATE that finds no row is passed over, and
 * its key is lost.
 */
bool
OwnTablesFollow(void)
{
	static const char *const names[] = {"key", "outbox", "subscription", "position", "parked"};

	for (size_t i = 0; i < lengthof(names); i++)
	{
		Oid relid = OwnRelationByName(names[i]);

		if (OidIsValid(relid) &&
			CatalogNames(SubscriptionRelRelationId, Anum_pg_subscription_rel_srrelid, relid))
			return true;
	}
	return false;
}
