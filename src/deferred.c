/*-------------------------------------------------------------------------
 *
 * deferred.c
 *	  Deferred triggers and constraints, before the transaction ends.
 *
 * A transaction of the relay calls a handler many times, and each call is to
 * find what its author expects of a transaction: what is deferred runs at the end
 * of the call, and the next one begins as if nobody had said SET CONSTRAINTS.
 *
 * The first is what the server does before it commits.  It may be done in a
 * subtransaction if nothing waits when that begins, since what has run is removed
 * from the queue, and a rollback could not bring it back.
 *
 * For the second it has no function.  So SET CONSTRAINTS is watched for, and after
 * it all constraints are set back: to deferred, all of them; and those which begin
 * as immediate, by their names, to that.
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
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"

#include "compat.h"
#include "deferred.h"

static ProcessUtility_hook_type previousHook = NULL;
static bool wereSet = false; /* constraints, in this call */

/*
 * NoteStatement notes that a statement is SET CONSTRAINTS.
 */
static void
NoteStatement(PlannedStmt *statement, const char *source, bool readOnlyTree,
			  ProcessUtilityContext context, ParamListInfo parameters,
			  QueryEnvironment *environment, DestReceiver *receiver, QueryCompletion *completion)
{
	ProcessUtility_hook_type next = previousHook != NULL ? previousHook : standard_ProcessUtility;

	wereSet |= IsA(statement->utilityStmt, ConstraintsSetStmt);
	next(statement, source, readOnlyTree, context, parameters, environment, receiver, completion);
}

/*
 * DeferredInit watches for SET CONSTRAINTS; called once, by a process that calls
 * handlers.
 */
void
DeferredInit(void)
{
	previousHook = ProcessUtility_hook;
	ProcessUtility_hook = NoteStatement;
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
}

/*
 * NameOf returns the qualified name of a constraint, or NULL if it is in a schema
 * that the current user may not name.
 */
static RangeVar *
NameOf(Form_pg_constraint form)
{
	char *schema = get_namespace_name(form->connamespace);

	if (schema == NULL ||
		namespace_aclcheck(form->connamespace, GetUserId(), ACL_USAGE) != ACLCHECK_OK)
		return NULL;
	return makeRangeVar(schema, pstrdup(NameStr(form->conname)), -1);
}

/*
 * Immediates returns the names of the deferrable constraints that begin as
 * immediate, and sets "anyDeferred" to whether there are others.  Those of
 * partitions follow their parent's.
 */
static List *
Immediates(bool *anyDeferred)
{
	Relation table = table_open(ConstraintRelationId, AccessShareLock);
	List *names = NIL;
	ScanKeyData key;
	TableScanDesc scan;
	HeapTuple tuple;

	*anyDeferred = false;
	ScanKeyInit(&key, Anum_pg_constraint_condeferrable, BTEqualStrategyNumber, F_BOOLEQ,
				BoolGetDatum(true));
	scan = table_beginscan_catalog(table, 1, &key);
	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_constraint form = (Form_pg_constraint) GETSTRUCT(tuple);
		RangeVar *name;

		*anyDeferred |= form->condeferred;
		if (form->condeferred || OidIsValid(form->conparentid))
			continue;
		name = NameOf(form);
		if (name != NULL)
			names = lappend(names, name);
	}
	table_endscan(scan);
	table_close(table, AccessShareLock);
	return names;
}

/*
 * DeferredBegin sees to it that nothing waits when a call begins.  Needs a
 * transaction, and none within it.
 */
void
DeferredBegin(void)
{
	AfterTriggerFireDeferred();
	wereSet = false;
}

/*
 * DeferredEnd runs all deferred triggers that wait, as the current user, and
 * throws what they throw.  Afterwards each constraint is deferred or not as it
 * was declared.
 */
void
DeferredEnd(void)
{
	bool anyDeferred;
	List *immediates;

	AfterTriggerFireDeferred();
	if (!wereSet)
		return;
	immediates = Immediates(&anyDeferred);
	SetConstraints(NIL, anyDeferred);
	if (anyDeferred && immediates != NIL)
		SetConstraints(immediates, false);
}
