/*-------------------------------------------------------------------------
 *
 * deferred.c
 *	  Deferred triggers and constraints, before the transaction ends.
 *
 * A transaction of the relay calls a handler many times, and each call is to
 * find what its author expects of a transaction: what is deferred runs at the end
 * of the call, and the next one begins as if nobody had said SET CONSTRAINTS.  The
 * server has no function for that.  So all constraints are set to immediate, which
 * runs what waits, and then back: to deferred, all of them; and those which begin
 * as immediate, by their names, to that.
 *
 * Most databases have no deferrable constraint at all, and nothing is done there.
 * What there is, is looked up once, and again after a change of any constraint.
 *
 * Locks: ACCESS SHARE on pg_constraint, while it is read.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_namespace.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "nodes/parsenodes.h"
#include "utils/acl.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "compat.h"
#include "deferred.h"

typedef struct Immediate
{
	Oid schema;
	char *name;
} Immediate;

static bool known = false;
static bool anyDeferrable;
static bool anyDeferred;			   /* from the start, that is */
static List *immediates = NIL;		   /* of Immediate: those that begin as immediate */
static MemoryContext knowledge = NULL; /* where they live */

/*
 * Forget makes us look anew after a change of a constraint.
 */
static void
Forget(Datum arg, int cacheid, uint32 hash)
{
	known = false;
}

/*
 * Note notes a deferrable constraint.
 */
static void
Note(Form_pg_constraint form)
{
	MemoryContext caller = MemoryContextSwitchTo(knowledge);

	anyDeferrable = true;
	if (form->condeferred)
		anyDeferred = true;
	else
	{
		Immediate *constraint = palloc(sizeof(Immediate));

		*constraint = (Immediate){form->connamespace, pstrdup(NameStr(form->conname))};
		immediates = lappend(immediates, constraint);
	}
	MemoryContextSwitchTo(caller);
}

/*
 * LookUp finds out which constraints are deferrable.  Those of partitions follow
 * their parent's.
 */
static void
LookUp(void)
{
	Relation table = table_open(ConstraintRelationId, AccessShareLock);
	ScanKeyData key;
	TableScanDesc scan;
	HeapTuple tuple;

	if (knowledge == NULL)
	{
		knowledge = AllocSetContextCreate(TopMemoryContext, "idempotency deferrable constraints",
										  ALLOCSET_SMALL_SIZES);
		CacheRegisterSyscacheCallback(CONSTROID, Forget, (Datum) 0);
	}
	MemoryContextReset(knowledge);
	immediates = NIL;
	anyDeferrable = anyDeferred = false;

	known = true;
	ScanKeyInit(&key, Anum_pg_constraint_condeferrable, BTEqualStrategyNumber, F_BOOLEQ,
				BoolGetDatum(true));
	scan = table_beginscan_catalog(table, 1, &key);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_constraint form = (Form_pg_constraint) GETSTRUCT(tuple);

		if (!OidIsValid(form->conparentid))
			Note(form);
	}
	table_endscan(scan);
	table_close(table, AccessShareLock);
}

/*
 * SetConstraints does SET CONSTRAINTS; NIL means ALL.
 */
static void
SetConstraints(List *constraints, bool deferred)
{
	ConstraintsSetStmt *statement = makeNode(ConstraintsSetStmt);

	statement->constraints = constraints;
	statement->deferred = deferred;
	AfterTriggerSetState(statement);
	pfree(statement);
}

/*
 * SetImmediates sets those constraints to immediate that begin as that, but for
 * those in schemas that the current user may not name.
 */
static void
SetImmediates(void)
{
	List *names = NIL;
	ListCell *cell;

	foreach (cell, immediates)
	{
		const Immediate *constraint = lfirst(cell);
		char *schema = get_namespace_name(constraint->schema);

		if (schema != NULL &&
			namespace_aclcheck(constraint->schema, GetUserId(), ACL_USAGE) == ACLCHECK_OK)
			names = lappend(names, makeRangeVar(schema, constraint->name, -1));
	}
	if (names != NIL)
		SetConstraints(names, false);
}

/*
 * DeferredCheck runs all deferred triggers that wait, as the current user, and
 * throws what they throw.  Afterwards each constraint is deferred or not as it
 * was declared.
 */
void
DeferredCheck(void)
{
	if (!known)
		LookUp();
	if (!anyDeferrable)
		return;

	SetConstraints(NIL, false);
	if (!known)
		LookUp(); /* by what the triggers did */
	if (anyDeferred)
	{
		SetConstraints(NIL, true);
		SetImmediates();
	}
}
