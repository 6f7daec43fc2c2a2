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
 * Locks: only the table's, which OwnTableOpen() takes for its caller.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "storage/lmgr.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

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
 * CheckTable throws 55000 unless the table is the plain local heap that the
 * extension made.  (A table distributed by Citus bears triggers.)
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
	if (table->trigdesc != NULL || table->rd_rules != NULL)
		ErrorStoreAltered(own->name, "It has triggers, rules or foreign keys, or is distributed.",
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
