/*-------------------------------------------------------------------------
 *
 * query/relation.c
 *	  Opening and locking the extension's tables and sequences, and checking their
 *	  definitions and those of its row types.
 *
 * Rows of some tables are written without the executor's triggers, rules, row security
 * and partition routing: a table with any of these is refused, except the trigger that the
 * extension created.  The check runs once, and again after each change of the table's
 * definition.
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
#include "catalog/pg_trigger.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "storage/lmgr.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "base/errors.h"
#include "query/relation.h"
#include "server/stats.h"

/* The tables that were checked: one callback for all, since the server has few slots. */
static ExtensionTable *registered = NULL;

/*
 * ForgetTable invalidates the check after a change of a table's definition.
 */
static void
ForgetTable(Datum arg, Oid relid)
{
	for (ExtensionTable *own = registered; own != NULL; own = own->next)
	{
		if (relid == InvalidOid || relid == own->relid)
		{
			own->relid = InvalidOid;
			own->checked = false;
		}
	}
}

/*
 * Register makes invalidations find the table.
 */
static void
Register(ExtensionTable *own)
{
	if (own->registered)
		return;
	if (registered == NULL)
		CacheRegisterRelcacheCallback(ForgetTable, (Datum) 0);
	own->registered = true;
	own->next = registered;
	registered = own;
}

/*
 * IsDistributed tells whether Citus manages the table: distributed, reference or local.
 * Citus records that in a table of pg_catalog; only on the node where the command ran
 * does the table itself show it, by a trigger.  Citus invalidates the relation when it
 * changes the record, so that the check runs again.
 */
static bool
IsDistributed(Oid relid)
{
	Oid catalog = get_relname_relid("pg_dist_partition", PG_CATALOG_NAMESPACE);
	AttrNumber column =
		OidIsValid(catalog) ? get_attnum(catalog, "logicalrelid") : InvalidAttrNumber;
	ScanKeyData key;
	SysScanDesc scan;
	Relation table;
	bool found;

	if (column == InvalidAttrNumber)
		return false;
	table = table_open(catalog, AccessShareLock);
	ScanKeyInit(&key, column, BTEqualStrategyNumber, F_OIDEQ, ObjectIdGetDatum(relid));
	scan = systable_beginscan(table, InvalidOid, false, NULL, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(table, AccessShareLock);
	return found;
}

/*
 * CheckTriggers throws 55000 if the table has rules, lacks the extension's trigger, has it
 * disabled, or has any other trigger.  Rows are written without the extension's trigger: it
 * refuses UPDATE, and the library never updates the table.
 */
static void
CheckTriggers(const ExtensionTable *own, Relation table)
{
	const TriggerDesc *triggers = table->trigdesc;
	const Trigger *trigger = NULL;
	int others = 0;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		const Trigger *next = &triggers->triggers[i];

		if (own->trigger != NULL && strcmp(next->tgname, own->trigger) == 0 &&
			next->tgtype == (TRIGGER_TYPE_BEFORE | TRIGGER_TYPE_UPDATE))
			trigger = next;
		else
			others++;
	}
	if (own->trigger != NULL && trigger == NULL)
		ErrorStoreAltered(own->name, psprintf("Its trigger %s is missing.", own->trigger),
						  psprintf("Use CREATE TRIGGER %s BEFORE UPDATE ON idempotency.%s "
								   "EXECUTE FUNCTION idempotency_internal.%s().",
								   own->trigger, own->name, own->trigger));
	if (trigger != NULL && trigger->tgenabled != TRIGGER_FIRES_ON_ORIGIN &&
		trigger->tgenabled != TRIGGER_FIRES_ALWAYS)
		ErrorStoreAltered(
			own->name, psprintf("Its trigger %s is disabled.", own->trigger),
			psprintf("Use ALTER TABLE idempotency.%s ENABLE TRIGGER %s.", own->name, own->trigger));
	if (table->rd_rules != NULL || others > 0)
		ErrorStoreAltered(own->name, "It has added triggers, rules or foreign keys.",
						  "Drop them; put triggers on your own tables.");
}

/*
 * CheckTable throws 55000 unless the table is a plain local heap, as the extension
 * created it.
 */
static void
CheckTable(const ExtensionTable *own, Relation table)
{
	Form_pg_class form = table->rd_rel;
	TupleConstr *constraints = RelationGetDescr(table)->constr;

	/* relhassubclass can outlive the last child */
	if (form->relkind != RELKIND_RELATION || form->relispartition ||
		(form->relhassubclass && find_inheritance_children(RelationGetRelid(table), NoLock) != NIL))
		ErrorStoreAltered(own->name, "It is partitioned, foreign, or inherited from.",
						  "Move its rows into a plain table.");
	if (form->relam != HEAP_TABLE_AM_OID)
		ErrorStoreAltered(own->name, "Its access method is not heap.",
						  "Use ALTER TABLE ... SET ACCESS METHOD heap.");
	if (form->relpersistence != RELPERSISTENCE_PERMANENT)
		ErrorStoreAltered(own->name, "It is unlogged: a crash would delete every row.",
						  "Use ALTER TABLE ... SET LOGGED.");
	if (form->relrowsecurity || form->relforcerowsecurity)
		ErrorStoreAltered(own->name, "It has row-level security.",
						  "Use ALTER TABLE ... DISABLE ROW LEVEL SECURITY, and "
						  "idempotency.scope_prefix to separate tenants.");
	if (IsDistributed(RelationGetRelid(table)))
		ErrorStoreAltered(own->name, "It is distributed by Citus.",
						  "Use undistribute_table(); each node has a table of its own.");
	if (!own->isRead)
		CheckTriggers(own, table);
	if (!own->isRead && constraints != NULL &&
		(constraints->num_check > 0 || constraints->num_defval > 0))
		ErrorStoreAltered(own->name, "It has check constraints or defaults.",
						  "Drop them; use a table of your own for more data.");
	own->check(table);
}

/*
 * TableCheckColumns throws 55000 unless the table has these columns and no others.
 */
void
TableCheckColumns(Relation table, const TableColumn *columns, int count)
{
	TupleDesc desc = RelationGetDescr(table);
	bool fits = desc->natts >= count;

	for (int i = 0; fits && i < count; i++)
	{
		Form_pg_attribute column = TupleDescAttr(desc, i);

		fits = !column->attisdropped && column->atttypid == columns[i].type &&
			   column->attnotnull == columns[i].notNull &&
			   strcmp(NameStr(column->attname), columns[i].name) == 0;
	}

	/* A column that was added and dropped again leaves an attribute */
	for (int i = count; fits && i < desc->natts; i++)
		fits = TupleDescAttr(desc, i)->attisdropped;
	if (!fits)
		ErrorStoreAltered(RelationGetRelationName(table), "Its columns were changed.",
						  "Restore the columns and NOT NULL constraints of CREATE EXTENSION.");
}

/*
 * CompositeCheck throws 42804 unless a row of idempotency."type" has attributes of these
 * types; InvalidOid matches every type.
 */
void
CompositeCheck(TupleDesc desc, const char *type, const Oid *attributes, int count)
{
	bool fits = desc->natts == count;

	for (int i = 0; fits && i < count; i++)
		fits = !TupleDescAttr(desc, i)->attisdropped &&
			   (!OidIsValid(attributes[i]) || TupleDescAttr(desc, i)->atttypid == attributes[i]);
	if (!fits)
		ErrorRowType(type);
}

/*
 * ExtensionRelationOid returns the OID of a relation in the extension's schema, or
 * InvalidOid.  Throws 55000 if there is no such schema.
 */
Oid
ExtensionRelationOid(const char *name)
{
	Oid schema = get_namespace_oid("idempotency", true);

	if (!OidIsValid(schema))
		ErrorNotInstalled();
	return get_relname_relid(name, schema);
}

/*
 * ExtensionRelationsLock takes ACCESS SHARE on relations of the extension until the transaction
 * ends, if all of them exist and are free.  A transaction that does this first, and needs
 * no others, cannot deadlock with one that drops or alters the extension.
 */
RelationsLockResult
ExtensionRelationsLock(const char *const *names, int count)
{
	for (int i = 0; i < count; i++)
	{
		Oid relid = ExtensionRelationOid(names[i]);

		if (!OidIsValid(relid))
			return RELATIONS_MISSING;
		if (!ConditionalLockRelationOid(relid, AccessShareLock))
			return RELATIONS_BUSY;
	}
	return RELATIONS_LOCKED;
}

/*
 * ExtensionRelationLock locks a table of the extension, if it exists; with dontWait it returns
 * false if the lock is not free.
 */
bool
ExtensionRelationLock(const char *name, LOCKMODE lockmode, bool dontWait)
{
	Oid relid = ExtensionRelationOid(name);

	if (!OidIsValid(relid))
		return true; /* opening it will report that */
	if (dontWait)
		return ConditionalLockRelationOid(relid, lockmode);
	LockRelationOid(relid, lockmode);
	return true;
}

/*
 * TableByName returns the OID of the table.  Throws 55000 where the extension is not
 * installed.
 */
static Oid
TableByName(const ExtensionTable *own)
{
	Oid relid = ExtensionRelationOid(own->name);

	if (!OidIsValid(relid))
		ErrorNotInstalled();
	return relid;
}

/*
 * ExtensionTableOpen opens the table under the given lock, which the caller keeps until the
 * transaction ends unless it only reads.  While it waits for the lock, the table can be
 * renamed or replaced, so that it looks up the name again.  Throws 55000 where the
 * extension is not installed or the table was altered.
 */
Relation
ExtensionTableOpen(ExtensionTable *own, LOCKMODE lockmode)
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

	/* An invalidation during the check must find the table. */
	Register(own);
	own->relid = RelationGetRelid(table);
	CheckTable(own, table);
	own->checked = (own->relid == RelationGetRelid(table));
	RequestOfDatabase(REQUEST_VISIT);
	return table;
}

/*
 * OpenSequence opens a sequence of the extension for nextval(), under the lock of that, which the
 * caller keeps until the transaction ends.  Throws 55000 if there is none.
 */
static Relation
OpenSequence(const char *name)
{
	Oid relid = ExtensionRelationOid(name);
	Relation sequence = OidIsValid(relid) ? try_relation_open(relid, RowExclusiveLock) : NULL;

	if (sequence == NULL || sequence->rd_rel->relkind != RELKIND_SEQUENCE)
		ereport(
			ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence idempotency.%s is missing", name),
			 errdetail("It was dropped, renamed or moved."),
			 errhint("Undo that, or create one that begins above every value it has returned.")));
	return sequence;
}

/*
 * ExtensionSequenceOpen opens a sequence of the extension for nextval(), under the lock of
 * that, which the caller keeps until the transaction ends: the sequence cannot be
 * altered.  Throws 55000, which names the "purpose" of the values, unless they are
 * consecutive across sessions and crashes: no session caches one, and none is returned
 * twice.  Fills "increment" with the distance of two values, which is 1 if it is NULL.
 */
Relation
ExtensionSequenceOpen(const char *name, const char *purpose, int64 *increment)
{
	Relation sequence = OpenSequence(name);
	HeapTuple tuple = SearchSysCache1(SEQRELID, ObjectIdGetDatum(RelationGetRelid(sequence)));
	Form_pg_sequence form = HeapTupleIsValid(tuple) ? (Form_pg_sequence) GETSTRUCT(tuple) : NULL;

	if (form == NULL || form->seqcache != 1 || form->seqcycle || form->seqincrement < 1 ||
		(increment == NULL && form->seqincrement != 1) ||
		sequence->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		ereport(
			ERROR,
			(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
			 errmsg("sequence idempotency.%s was altered", name),
			 errdetail("%s relies on values that come one by one and are never reused.", purpose),
			 errhint("Use ALTER SEQUENCE idempotency.%s INCREMENT %d CACHE 1 NO CYCLE, and SET "
					 "LOGGED.",
					 name, increment == NULL ? 1 : SEQUENCE_RANDOM)));
	if (increment != NULL)
		*increment = form->seqincrement;
	ReleaseSysCache(tuple);
	return sequence;
}

/*
 * ExtensionIsSubscriber tells whether a subscription of logical replication writes to the
 * extension's tables, even a disabled one.  Rows of theirs must not be deleted here: an
 * UPDATE that finds no row is skipped, and its key would be lost.
 */
bool
ExtensionIsSubscriber(void)
{
	Oid schema = get_namespace_oid("idempotency", true);
	Relation catalog = table_open(SubscriptionRelRelationId, AccessShareLock);
	SysScanDesc scan = systable_beginscan(catalog, InvalidOid, false, NULL, 0, NULL);
	bool found = false;
	HeapTuple tuple;

	while (!found && HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_subscription_rel form = (Form_pg_subscription_rel) GETSTRUCT(tuple);

		found = OidIsValid(schema) && get_rel_namespace(form->srrelid) == schema;
	}
	systable_endscan(scan);
	table_close(catalog, AccessShareLock);
	return found;
}
