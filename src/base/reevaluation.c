/*-------------------------------------------------------------------------
 *
 * base/reevaluation.c
 *	  Refusing calls that the server might evaluate twice for one row.
 *
 * In READ COMMITTED, a statement that finds a row changed by another transaction
 * evaluates its plan again (EvalPlanQual).  A function that writes would then find what
 * its first call has stored.  single_evaluation(), the planner support function of all
 * functions that write, checks the query around a call.  README lists what the server
 * evaluates again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/pathnodes.h"
#include "nodes/supportnodes.h"
#include "optimizer/optimizer.h"
#include "utils/lsyscache.h"

#include "base/compat.h"

PG_FUNCTION_INFO_V1(idempotency_single_evaluation);

/* What a walk searches for. */
typedef struct Wanted
{
	Oid called;	   /* the function whose call is checked */
	Oid function;  /* calls of it: of "called", or InvalidOid */
	List *ctes;	   /* reads of these WITH queries, which call it */
	bool planning; /* the planner has pulled up the sub-selects of the query */
} Wanted;

static bool
IsFunction(Oid function, void *wanted)
{
	return function == ((Wanted *) wanted)->function;
}

/*
 * Calls tells whether an expression, a query or an entry of its range table calls the
 * function, or reads one of the WITH queries, anywhere.  WITH queries are compared by
 * name alone.
 */
static bool
Calls(Node *node, void *wanted)
{
	if (node == NULL)
		return false;
	if (IsA(node, RangeTblEntry))
	{
		const RangeTblEntry *rte = (RangeTblEntry *) node;

		return rte->rtekind == RTE_CTE &&
			   list_member(((Wanted *) wanted)->ctes, makeString(rte->ctename));
	}
	if (IsA(node, Query))
		return query_tree_walker((Query *) node, TreeWalker(Calls), wanted,
								 QTW_EXAMINE_RTES_BEFORE);
	return check_functions_in_node(node, IsFunction, wanted) ||
		   expression_tree_walker(node, TreeWalker(Calls), wanted);
}

/*
 * IsInitPlan tells whether the planner evaluates a sub-select once, before the query: it
 * refers to nothing in the query around it, and has a single result.
 */
static bool
IsInitPlan(const SubLink *sublink)
{
	return sublink->subLinkType != ANY_SUBLINK && sublink->subLinkType != ALL_SUBLINK &&
		   !contain_vars_of_level(sublink->subselect, 1);
}

/*
 * CallsAgain tells whether each evaluation of an expression calls the function, or reads
 * one of the WITH queries.
 */
static bool
CallsAgain(Node *node, void *wanted)
{
	if (node == NULL)
		return false;
	if (IsA(node, SubLink) && IsInitPlan((SubLink *) node))
		return CallsAgain(((SubLink *) node)->testexpr, wanted);
	if (IsA(node, SubLink) && Calls(((SubLink *) node)->subselect, wanted))
		return true;
	return check_functions_in_node(node, IsFunction, wanted) ||
		   (!IsA(node, Query) && expression_tree_walker(node, TreeWalker(CallsAgain), wanted));
}

/*
 * WillBeJoined tells whether the planner makes a condition of WHERE a join: an IN whose
 * sub-select refers to nothing in the query around it.
 */
static bool
WillBeJoined(Node *condition)
{
	const SubLink *sublink = (SubLink *) condition;

	return IsA(condition, SubLink) && sublink->subLinkType == ANY_SUBLINK &&
		   ((Query *) sublink->subselect)->setOperations == NULL &&
		   !contain_vars_of_level(sublink->subselect, 1) &&
		   contain_vars_of_level(sublink->testexpr, 0) &&
		   !contain_volatile_functions(sublink->testexpr);
}

/*
 * ConditionsCallAgain tells whether the conditions of a query call the function again.
 */
static bool
ConditionsCallAgain(const FromExpr *jointree, Wanted *wanted)
{
	ListCell *cell;

	if (wanted->planning || jointree == NULL)
		return CallsAgain((Node *) jointree, wanted);
	foreach (cell, make_ands_implicit((Expr *) jointree->quals))
	{
		Node *condition = lfirst(cell);

		if (!WillBeJoined(condition) && CallsAgain(condition, wanted))
			return true;
	}
	return CallsAgain((Node *) jointree->fromlist, wanted);
}

/*
 * MemberCalls tells whether a member of a UNION ALL that is, or will be, part of the
 * query calls the function.  A UNION ALL that the planner has pulled up is marked "inh".
 */
static bool
MemberCalls(const Query *query, Wanted *wanted)
{
	ListCell *cell;

	foreach (cell, query->rtable)
	{
		const RangeTblEntry *rte = lfirst_node(RangeTblEntry, cell);
		const SetOperationStmt *set = rte->rtekind == RTE_SUBQUERY && rte->subquery != NULL
										  ? (SetOperationStmt *) rte->subquery->setOperations
										  : NULL;

		if (set != NULL && set->op == SETOP_UNION && set->all && (rte->inh || !wanted->planning) &&
			Calls((Node *) rte->subquery, wanted))
			return true;
	}
	return false;
}

/*
 * PolicyCalls tells whether a condition of row security, or of a view with
 * security_barrier, calls the function.
 */
static bool
PolicyCalls(const Query *query, Wanted *wanted)
{
	ListCell *cell;

	foreach (cell, query->rtable)
	{
		RangeTblEntry *rte = lfirst_node(RangeTblEntry, cell);

		if (CallsAgain((Node *) rte->securityQuals, wanted))
			return true;
	}
	return CallsAgain((Node *) query->withCheckOptions, wanted);
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
 * ErrorEvaluatedTwice reports a call of "function" where the server may evaluate
 * it twice for one row; "command" is that of the query.
 */
pg_noreturn static void
ErrorEvaluatedTwice(Oid function, const char *command)
{
	const char *name = get_func_name(function);

	ereport(
		ERROR,
		(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
		 errmsg("cannot call idempotency.%s() in the conditions or values of %s", name, command),
		 errdetail("The server evaluates them again for a row that another transaction has "
				   "changed, and the second call finds what the first has stored."),
		 errhint("Call it before the statement, or in FROM, such as UPDATE ... FROM "
				 "idempotency.%s(...) AS result WHERE ....",
				 name)));
}

/*
 * CheckQuery throws 0A000 if the query might call the function, or read one of the WITH
 * queries, twice for one row.
 */
static void
CheckQuery(const Query *query, Wanted *wanted)
{
	const char *command = RepeatingCommand(query);

	if (command == NULL)
		return;
	if (ConditionsCallAgain(query->jointree, wanted) ||
		CallsAgain((Node *) query->targetList, wanted) ||
		CallsAgain((Node *) query->mergeActionList, wanted) ||
		CallsAgain(MergeJoinCondition(query), wanted) || PolicyCalls(query, wanted) ||
		MemberCalls(query, wanted))
		ErrorEvaluatedTwice(wanted->called, command);
}

/* ----------------------------------------------------------------
 * WITH queries
 * ----------------------------------------------------------------
 */

/*
 * CtesThatCall returns the names of the WITH queries of "query" that call the function,
 * directly or through another one.
 */
static List *
CtesThatCall(const Query *query, Oid function)
{
	Wanted wanted = {.function = function};
	int known;
	ListCell *cell;

	do
	{
		known = list_length(wanted.ctes);
		foreach (cell, query->cteList)
		{
			CommonTableExpr *cte = lfirst_node(CommonTableExpr, cell);

			if (Calls(cte->ctequery, &wanted))
				wanted.ctes = list_append_unique(wanted.ctes, makeString(cte->ctename));
		}
	} while (list_length(wanted.ctes) > known);
	return wanted.ctes;
}

/*
 * CheckReaders does CheckQuery() with each query in "node".
 */
static bool
CheckReaders(Node *node, void *wanted)
{
	if (node == NULL)
		return false;
	if (!IsA(node, Query))
		return expression_tree_walker(node, TreeWalker(CheckReaders), wanted);
	CheckQuery((Query *) node, wanted);
	return query_tree_walker((Query *) node, TreeWalker(CheckReaders), wanted, 0);
}

/*
 * CheckCtes throws 0A000 if a WITH query of "query" calls the function, and is read where
 * that can happen again for one row: a reader that has not reached its end continues
 * with a plan of its own, which calls the function and loses the result.  WITH queries
 * are planned first, so that the query is as the parser left it.
 */
static void
CheckCtes(Query *query, Oid function)
{
	Wanted wanted = {.called = function, .ctes = CtesThatCall(query, function)};

	if (wanted.ctes != NIL)
		(void) CheckReaders((Node *) query, &wanted);
}

/* ----------------------------------------------------------------
 * Columns
 * ----------------------------------------------------------------
 */

/*
 * ColumnOf returns the call of the function of whose result a target is a column, or
 * NULL.
 */
static FuncExpr *
ColumnOf(const TargetEntry *target, Oid function)
{
	FieldSelect *column = (FieldSelect *) target->expr;
	FuncExpr *call;

	if (!IsA(column, FieldSelect))
		return NULL;
	call = (FuncExpr *) column->arg;
	return IsA(call, FuncExpr) && call->funcid == function ? call : NULL;
}

/*
 * ErrorCalledForEachColumn reports that the columns of the result of "function" are
 * selected one by one, or by (f()).*.
 */
pg_noreturn static void
ErrorCalledForEachColumn(Oid function)
{
	const char *name = get_func_name(function);

	ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					errmsg("cannot select more than one column of idempotency.%s()", name),
					errdetail("The server calls the function once for each column."),
					errhint("Use SELECT * FROM idempotency.%s(...).", name)));
}

/*
 * CheckColumns throws 0A000 if two targets are columns of the same call: the parser makes
 * (f()).* a call for each column.
 */
static void
CheckColumns(const Query *query, Oid function)
{
	FuncExpr *first = NULL;
	ListCell *cell;

	foreach (cell, query->targetList)
	{
		FuncExpr *call = ColumnOf(lfirst_node(TargetEntry, cell), function);

		if (first == NULL)
			first = call;
		else if (call != NULL && equal(first, call))
			ErrorCalledForEachColumn(function);
	}
}

/*
 * CheckCall throws 0A000 if the query that the call is planned for, or one around it,
 * might evaluate it twice for one row.  "root" is NULL outside of queries.
 */
static void
CheckCall(PlannerInfo *root, Oid function)
{
	if (root != NULL)
		CheckColumns(root->parse, function);
	for (; root != NULL; root = root->parent_root)
	{
		Wanted wanted = {.called = function, .function = function, .planning = true};

		CheckQuery(root->parse, &wanted);
		CheckCtes(root->parse, function);
	}
}

/*
 * single_evaluation(internal) RETURNS internal: checks a call while it is planned, and
 * does not change it.
 *
 * The planner simplifies a call before it pulls up a sub-select in FROM, and asks for
 * its cost afterwards, in the query where the call then is.
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
