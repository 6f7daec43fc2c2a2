/*-------------------------------------------------------------------------
 *
 * reevaluation.c
 *	  Refuses calls that the server might evaluate twice for one row.
 *
 * In READ COMMITTED, a statement that meets a row which another transaction has
 * changed evaluates its plan again for the new version (EvalPlanQual).  A
 * function that writes would then find what its first call has stored: once()
 * would be false, the row would not be updated, and the message would be
 * acknowledged all the same.
 *
 * single_evaluation() is the planner support function of everything that writes.
 * It looks at the query that the call is planned for, and never at the data.
 *
 * Evaluated again: conditions, and values that are computed below the
 * ModifyTable or LockRows node; sub-selects in these that are no InitPlan; and
 * the members of a UNION ALL in FROM, which the planner has made part of the
 * query.  Not evaluated again: an InitPlan, whose result is kept, and a WITH query, a
 * function or any other sub-select in FROM, of whose rows a copy is kept.
 *
 * Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "nodes/nodeFuncs.h"
#include "nodes/pathnodes.h"
#include "nodes/supportnodes.h"
#include "optimizer/optimizer.h"
#include "parser/parsetree.h"

#include "compat.h"
#include "errors.h"

PG_FUNCTION_INFO_V1(idempotency_single_evaluation);

static bool
IsFunction(Oid function, void *wanted)
{
	return function == *(Oid *) wanted;
}

/*
 * Calls tells whether an expression or a query calls the function anywhere.
 */
static bool
Calls(Node *node, void *function)
{
	if (node == NULL)
		return false;
	if (IsA(node, Query))
		return query_tree_walker((Query *) node, TreeWalker(Calls), function, 0);
	return check_functions_in_node(node, IsFunction, function) ||
		   expression_tree_walker(node, TreeWalker(Calls), function);
}

/*
 * IsInitPlan tells whether the planner evaluates a sub-select once, before the
 * query: it refers to nothing in the query around it, and has a single result.
 */
static bool
IsInitPlan(const SubLink *sublink)
{
	return sublink->subLinkType != ANY_SUBLINK && sublink->subLinkType != ALL_SUBLINK &&
		   !contain_vars_of_level(sublink->subselect, 1);
}

/*
 * CallsAgain tells whether an expression calls the function each time that it is
 * evaluated.
 */
static bool
CallsAgain(Node *node, void *function)
{
	if (node == NULL)
		return false;
	if (IsA(node, SubLink) && IsInitPlan((SubLink *) node))
		return CallsAgain(((SubLink *) node)->testexpr, function);
	if (IsA(node, SubLink) && Calls(((SubLink *) node)->subselect, function))
		return true;
	return check_functions_in_node(node, IsFunction, function) ||
		   (!IsA(node, Query) && expression_tree_walker(node, TreeWalker(CallsAgain), function));
}

/*
 * MemberCalls tells whether a member of a UNION ALL that was made part of the
 * query calls the function.
 */
static bool
MemberCalls(PlannerInfo *root, Oid *function)
{
	ListCell *cell;

	foreach (cell, root->append_rel_list)
	{
		AppendRelInfo *member = lfirst_node(AppendRelInfo, cell);
		RangeTblEntry *rte = rt_fetch(member->child_relid, root->parse->rtable);

		if (range_table_entry_walker(rte, TreeWalker(Calls), function, 0))
			return true;
	}
	return false;
}

/*
 * PolicyCalls tells whether a condition of row security, or of a view with
 * security_barrier, calls the function.
 */
static bool
PolicyCalls(Query *query, Oid *function)
{
	ListCell *cell;

	foreach (cell, query->rtable)
	{
		RangeTblEntry *rte = lfirst_node(RangeTblEntry, cell);

		if (CallsAgain((Node *) rte->securityQuals, function))
			return true;
	}
	return false;
}

/*
 * RepeatingCommand returns the name of the command if the server may evaluate it
 * twice for one row, otherwise NULL.
 */
static const char *
RepeatingCommand(const Query *query)
{
	switch (query->commandType)
	{
		case CMD_UPDATE:
			return "UPDATE";
		case CMD_DELETE:
			return "DELETE";
		case CMD_MERGE:
			return "MERGE";
		default:
			return query->rowMarks == NIL ? NULL : "SELECT FOR UPDATE or FOR SHARE";
	}
}

/*
 * CheckQuery throws 0A000 if the query may call the function twice for one row.
 */
static void
CheckQuery(PlannerInfo *root, Oid function)
{
	Query *query = root->parse;
	const char *command = RepeatingCommand(query);

	if (command == NULL)
		return;
	if (CallsAgain((Node *) query->jointree, &function) ||
		CallsAgain((Node *) query->targetList, &function) ||
		CallsAgain((Node *) query->mergeActionList, &function) ||
		CallsAgain(MergeJoinCondition(query), &function) || PolicyCalls(query, &function) ||
		MemberCalls(root, &function))
		ErrorEvaluatedTwice(function, command);
}

/*
 * CheckCall throws 0A000 if the query that the call is planned for, or one around
 * it, may evaluate it twice for one row.  "root" is NULL outside of queries.
 */
static void
CheckCall(PlannerInfo *root, Oid function)
{
	for (; root != NULL; root = root->parent_root)
		CheckQuery(root, function);
}

/*
 * single_evaluation(internal) RETURNS internal: looks at a call while it is
 * planned, and leaves it as it is.
 *
 * The planner simplifies each call before it makes a sub-select in FROM part of
 * the query, if it is the function of such a FROM; the cost it asks for later,
 * in the query where the call has come to be.
 */
Datum
idempotency_single_evaluation(PG_FUNCTION_ARGS)
{
	Node *request = (Node *) PG_GETARG_POINTER(0);

	if (IsA(request, SupportRequestSimplify))
	{
		SupportRequestSimplify *call = (SupportRequestSimplify *) request;

		CheckCall(call->root, call->fcall->funcid);
	}
	else if (IsA(request, SupportRequestCost))
	{
		SupportRequestCost *call = (SupportRequestCost *) request;

		CheckCall(call->root, call->funcid);
	}
	PG_RETURN_POINTER(NULL);
}
