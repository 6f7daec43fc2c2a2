/*-------------------------------------------------------------------------
 *
 * query/reevaluation.c
 *	  Calls that write run once for each row, or are refused.
 *
 * The plan decides how often, how early and for which rows the server runs a volatile
 * function. A call that writes is allowed in the few places of a query where no plan
 * changes that, and refused in all others (README). The planner hook checks a query as it
 * was written. single_evaluation(), the planner support function of all functions that
 * write, marks them, and checks what the hook does not see: a function in SQL that the
 * planner has inlined, and the query whose planning has loaded the library.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "nodes/makefuncs.h"
#include "nodes/nodeFuncs.h"
#include "nodes/pathnodes.h"
#include "nodes/supportnodes.h"
#include "optimizer/optimizer.h"
#include "optimizer/planner.h"
#include "parser/parsetree.h"
#include "rewrite/rewriteManip.h"
#include "tcop/pquery.h"
#include "utils/lsyscache.h"

#include "base/compat.h"
#include "query/reevaluation.h"

PG_FUNCTION_INFO_V1(idempotency_single_evaluation);

static bool CheckQuery(Node *node, void *context);

/* A search for a call. */
typedef struct Search
{
	List *ctes;	  /* searched for as well: reads of these WITH queries, by name alone */
	Node *call;	  /* the call that was found; NULL: a read */
	Oid function; /* the function that it calls */
} Search;

/* The part of a query that is checked. */
typedef struct Part
{
	const char *place; /* calls are refused in this place; NULL: they are allowed */
	List *columns;	   /* the calls of which one column is selected */
	bool written;	   /* the planner has not changed the query */
	List *calls;	   /* the calls that were found in it */
} Part;

/* The queries around a query that is checked. */
typedef struct Around
{
	bool written; /* the planner has not changed them */
	bool whole;	  /* they need all rows of the query, or the planner has changed them */
	List *ctes;	  /* names of their WITH queries that call, and whose rows can be read in part */
} Around;

static planner_hook_type previousPlanner = NULL;

/* Number of queries that this backend is planning, one inside the other. */
static int planning = 0;

/*
 * Writes tells whether single_evaluation() is the support function of "function", and sets
 * "*called" to the function.
 */
static bool
Writes(Oid function, void *called)
{
	Oid support = function < FirstNormalObjectId ? InvalidOid : get_func_support(function);
	FmgrInfo info;

	if (!OidIsValid(support))
		return false;
	fmgr_info(support, &info);
	*(Oid *) called = function;
	return info.fn_addr == idempotency_single_evaluation;
}

/*
 * FindCall searches an expression, a query or an entry of its range table.
 */
static bool
FindCall(Node *node, void *context)
{
	Search *search = context;

	search->call = NULL;
	if (node == NULL)
		return false;
	if (IsA(node, Query))
		return query_tree_walker((Query *) node, TreeWalker(FindCall), context,
								 QTW_EXAMINE_RTES_BEFORE | QTW_IGNORE_JOINALIASES);
	if (IsA(node, RangeTblEntry))
	{
		const RangeTblEntry *rte = (RangeTblEntry *) node;

		return rte->rtekind == RTE_CTE && list_member(search->ctes, makeString(rte->ctename));
	}
	if (!check_functions_in_node(node, Writes, &search->function))
		return expression_tree_walker(node, TreeWalker(FindCall), context);
	search->call = node;
	return true;
}

/*
 * Refuse throws 0A000 for what a search has found: a call in "place", or a read.
 */
pg_noreturn static void
Refuse(const Search *found, const char *place)
{
	const char *name = found->call == NULL ? NULL : get_func_name(found->function);

	if (name == NULL)
		ereport(
			ERROR,
			(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
			 errmsg("cannot read a part of a WITH query that writes"),
			 errdetail("The plan would decide which of its rows are computed."),
			 errhint("Read it as the only entry of FROM, without LIMIT, DISTINCT, GROUP BY, "
					 "OVER, row locks, and sub-selects in WHERE; or as the source of INSERT.")));
	ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					errmsg("cannot call idempotency.%s() %s", name, place),
					errdetail("The plan decides how often a call there runs, and for which rows."),
					contain_vars_of_level(found->call, 0) || contain_vars_of_level(found->call, 1)
						? errhint("Select the rows first: WITH rows AS MATERIALIZED (SELECT ...) "
								  "SELECT *, idempotency.%s(...) AS result FROM rows",
								  name)
						: errhint("Call it in a statement of its own, or in FROM: "
								  "... FROM idempotency.%s(...) AS result WHERE ...",
								  name)));
}

/*
 * CheckColumn throws 0A000 if a column of the same call is selected a second time: the
 * parser makes (f()).* a call for each column.
 */
static void
CheckColumn(const FieldSelect *column, Part *part)
{
	Oid function;

	if (!check_functions_in_node((Node *) column->arg, Writes, &function))
		return;
	if (list_member(part->columns, column->arg))
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("cannot select more than one column of idempotency.%s()",
						get_func_name(function)),
				 errdetail("The server calls the function once for each column."),
				 errhint("Use SELECT * FROM idempotency.%s(...).", get_func_name(function))));
	part->columns = lappend(part->columns, column->arg);
}

/*
 * CheckCopy throws 0A000 if the parser has copied a call, as an operand of BETWEEN or IN:
 * both stand at one place of the statement.
 */
static void
CheckCopy(Node *call, Oid function, Part *part)
{
	ListCell *cell;

	foreach (cell, part->calls)
		if (exprLocation(lfirst(cell)) == exprLocation(call) && exprLocation(call) >= 0 &&
			equal(lfirst(cell), call))
			ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
							errmsg("cannot call idempotency.%s() in BETWEEN or IN",
								   get_func_name(function)),
							errdetail("The server calls the function once for each comparison."),
							errhint("Call it in FROM: ... FROM idempotency.%s(...) AS result.",
									get_func_name(function))));
	part->calls = lappend(part->calls, call);
}

/*
 * CheckExpression throws 0A000 for a call in an expression, or a list of them, where the
 * part allows none, and in a sub-select that is not an InitPlan, which the server runs
 * once, when it first needs the result.  EXISTS loses its select list.
 */
static bool
CheckExpression(Node *node, void *context)
{
	Part *part = context;
	Search search = {.ctes = NIL};

	if (node == NULL || IsA(node, Query))
		return false;
	if (IsA(node, FieldSelect))
		CheckColumn((FieldSelect *) node, part);
	if (IsA(node, SubLink))
	{
		const SubLink *sub = (SubLink *) node;

		if ((sub->subLinkType == ANY_SUBLINK || sub->subLinkType == ALL_SUBLINK ||
			 contain_vars_of_level(sub->subselect, 1)) &&
			FindCall(sub->subselect, &search))
			Refuse(&search, "in a sub-select that runs for each row");
		if (sub->subLinkType == EXISTS_SUBLINK &&
			FindCall((Node *) castNode(Query, sub->subselect)->targetList, &search))
			Refuse(&search, "in the select list of EXISTS");
	}
	search.call = node;
	if (check_functions_in_node(node, Writes, &search.function))
	{
		if (part->place != NULL)
			Refuse(&search, part->place);
		if (part->written)
			CheckCopy(node, search.function, part);
	}
	return expression_tree_walker(node, TreeWalker(CheckExpression), context);
}

/*
 * SelectsOnlySet tells whether a query selects the rows of one function that writes, or a
 * column of them, and nothing beside it.
 */
static bool
SelectsOnlySet(const Query *query)
{
	Node *value = (Node *) linitial_node(TargetEntry, query->targetList)->expr;
	Oid function;

	while (IsA(value, FieldSelect))
		value = (Node *) ((FieldSelect *) value)->arg;
	return list_length(query->targetList) == 1 && IsA(value, FuncExpr) &&
		   ((FuncExpr *) value)->funcretset &&
		   !expression_returns_set((Node *) ((FuncExpr *) value)->args) &&
		   check_functions_in_node(value, Writes, &function);
}

/*
 * WhyNotEachRow returns why a call in the select list, or in the values of INSERT, might
 * not run once for each row of the query, or NULL if it does.
 */
static const char *
WhyNotEachRow(const Query *query, bool written)
{
	const List *from = query->jointree->fromlist;

	if (query->commandType != CMD_SELECT && query->commandType != CMD_INSERT)
		return "in a new value of UPDATE or MERGE";
	if (query->onConflict != NULL)
		return "in the values of INSERT with ON CONFLICT";
	if (query->hasTargetSRFs && !SelectsOnlySet(query))
		return "in a select list with a function that returns a set";
	if (query->rowMarks != NIL)
		return "in the select list of a query with FOR UPDATE or FOR SHARE";
	if (query->limitCount != NULL || query->limitOffset != NULL)
		return "in the select list of a query with LIMIT or OFFSET";
	if (query->distinctClause != NIL || query->groupClause != NIL || query->groupingSets != NIL ||
		query->hasWindowFuncs || query->havingQual != NULL)
		return "in the select list of a query with DISTINCT, GROUP BY, HAVING or OVER";
	if (written && from != NIL && (list_length(from) > 1 || IsA(linitial(from), JoinExpr)))
		return "in the select list of a join";
	return NULL;
}

/*
 * IsAlone tells whether an entry of the range table is the only one of FROM.  The planner
 * nests the FROM of a sub-select that it pulls up.
 */
static bool
IsAlone(const Query *query, int index)
{
	Node *node = (Node *) query->jointree;

	while (IsA(node, FromExpr) && list_length(((FromExpr *) node)->fromlist) == 1)
		node = linitial(((FromExpr *) node)->fromlist);
	return IsA(node, RangeTblRef) && ((RangeTblRef *) node)->rtindex == index;
}

/*
 * NeedsRows tells whether a query needs each row of an entry of the range table.
 */
static bool
NeedsRows(const Query *query, int index)
{
	return IsAlone(query, index) && WhyNotEachRow(query, false) == NULL;
}

/*
 * CheckRange throws 0A000 if an entry of the range table calls, other than a function whose
 * arguments come from no other entry, and whose rows the server stores; the source of an
 * INSERT; and VALUES if the query calls only for its rows.  It throws 0A000 as well if the
 * entry reads a WITH query that calls, and the plan might not read all rows of it: a
 * sub-select in WHERE can become a join.
 */
static void
CheckRange(const Query *query, int index, Part *part, const Around *around)
{
	RangeTblEntry *rte = rt_fetch(index, query->rtable);
	bool rows = NeedsRows(query, index);
	Search search = {.ctes = around->ctes};

	if (FindCall((Node *) rte, &search) &&
		(!rows || !around->whole || checkExprHasSubLink(query->jointree->quals)))
		Refuse(&search, NULL);
	search.ctes = NIL;
	if (!range_table_entry_walker(rte, TreeWalker(FindCall), &search, QTW_IGNORE_JOINALIASES) ||
		(rows && (rte->rtekind == RTE_VALUES ||
				  (rte->rtekind == RTE_SUBQUERY && query->commandType == CMD_INSERT))))
		return;
	if (query->onConflict != NULL)
		Refuse(&search, "in the source of INSERT with ON CONFLICT");
	if (query->rowMarks != NIL || query->limitOffset != NULL ||
		(query->limitCount != NULL && (!IsAlone(query, index) || query->jointree->quals != NULL ||
									   get_func_retset(search.function))))
		Refuse(&search, "in a query with LIMIT, OFFSET, FOR UPDATE or FOR SHARE");
	if (query->setOperations != NULL)
		Refuse(&search, "in UNION, INTERSECT or EXCEPT");
	if (rte->securityQuals != NIL || rte->rtekind != RTE_FUNCTION)
		Refuse(&search, "in a sub-select, VALUES or a view in FROM, or in a policy");
	if (contain_vars_of_level((Node *) rte->functions, 0))
		Refuse(&search, "in FROM with arguments from other rows");
	(void) CheckExpression((Node *) rte->functions, part);
}

/*
 * CheckWith checks the WITH queries of a query, and adds those to "inside" that call, or
 * read one that calls.  The server runs INSERT, UPDATE and DELETE in WITH to their end.
 */
static void
CheckWith(const Query *query, Around *inside)
{
	ListCell *cell;

	foreach (cell, query->cteList)
	{
		CommonTableExpr *cte = lfirst_node(CommonTableExpr, cell);
		Search search = {.ctes = inside->ctes};

		(void) CheckQuery(cte->ctequery, inside);
		if (castNode(Query, cte->ctequery)->commandType != CMD_SELECT ||
			!FindCall(cte->ctequery, &search))
			continue;
		if (cte->cterefcount == 0)
			Refuse(&search, "in a WITH query that nothing reads");
		inside->ctes = lappend(list_copy(inside->ctes), makeString(cte->ctename));
	}
}

/*
 * CheckQuery throws 0A000 if a query, or one inside it, calls where that is not allowed.
 */
static bool
CheckQuery(Node *node, void *context)
{
	const Around *around = context;
	Query *query = (Query *) node;
	Around inside = {.written = around->written, .whole = true, .ctes = around->ctes};
	Part part = {.written = around->written};
	Query rest;

	if (node == NULL)
		return false;
	if (!IsA(node, Query))
		return expression_tree_walker(node, TreeWalker(CheckQuery), context);
	CheckWith(query, &inside);
	for (int index = 1; index <= list_length(query->rtable); index++)
	{
		Around from = {.written = around->written, .whole = around->whole, .ctes = inside.ctes};

		CheckRange(query, index, &part, &from);
		from.whole =
			!around->written || (query->commandType == CMD_INSERT && NeedsRows(query, index));
		(void) CheckQuery((Node *) rt_fetch(index, query->rtable)->subquery, &from);
	}
	(void) CheckExpression((Node *) query->returningList, &part);
	part.place = WhyNotEachRow(query, around->written);
	(void) CheckExpression((Node *) query->targetList, &part);
	part.place = "in a condition";
	rest = *query;
	rest.targetList = rest.returningList = rest.cteList = NIL;
	(void) query_tree_walker(&rest, TreeWalker(CheckExpression), &part, QTW_IGNORE_RANGE_TABLE);
	inside.whole = !around->written;
	return query_tree_walker(query, TreeWalker(CheckQuery), &inside,
							 QTW_IGNORE_RT_SUBQUERIES | QTW_IGNORE_CTE_SUBQUERIES);
}

/*
 * single_evaluation(internal) RETURNS internal: checks the queries around a call while it
 * is planned, and does not change it.
 *
 * The planner simplifies a call before it pulls up a sub-select in FROM, and asks for its
 * cost afterwards, in the query where the call then is.
 */
Datum
idempotency_single_evaluation(PG_FUNCTION_ARGS)
{
	Node *request = (Node *) PG_GETARG_POINTER(0);
	const PlannerInfo *root = NULL;
	Around around = {.written = false, .whole = true};

	if (IsA(request, SupportRequestSimplify))
		root = ((SupportRequestSimplify *) request)->root;
	else if (IsA(request, SupportRequestCost))
		root = ((SupportRequestCost *) request)->root;
	for (; root != NULL; root = root->parent_root)
		(void) CheckQuery((Node *) root->parse, &around);
	PG_RETURN_POINTER(NULL);
}

/*
 * PlanQuery checks a query that calls before it is planned.
 */
static PlannedStmt *
PlanQuery(PLANNER_PARAMETERS)
{
	PlannedStmt *plan = NULL;
	Search search = {.ctes = NIL};
	Around around = {.written = true, .whole = true};

	if (FindCall((Node *) parse, &search))
	{
		if (parse->querySource != QSRC_ORIGINAL)
			Refuse(&search, "in a query that a rule adds or changes");
		(void) CheckQuery((Node *) parse, &around);
	}
	planning++;
	PG_TRY();
	{
		plan = (previousPlanner != NULL ? previousPlanner : standard_planner)(PLANNER_ARGUMENTS);
	}
	PG_FINALLY();
	{
		planning--;
	}
	PG_END_TRY();
	return plan;
}

/*
 * ReevaluationInit installs the planner hook.
 */
void
ReevaluationInit(void)
{
	previousPlanner = planner_hook;
	planner_hook = PlanQuery;
}

/*
 * PreventUnsafeCall throws an error if "function", which writes, is called where the server
 * does not write (25006, 25000), while the planner evaluates a function that is not
 * VOLATILE, or in the query of a cursor, a FOR loop of PL/pgSQL among them, unless it is
 * called in FROM, whose rows the server stores (0A000).
 */
void
PreventUnsafeCall(FunctionCallInfo fcinfo, const char *function)
{
	const ReturnSetInfo *result = (ReturnSetInfo *) fcinfo->resultinfo;
	bool stored = result != NULL && IsA(result, ReturnSetInfo) &&
				  (result->allowedModes & SFRM_Materialize_Preferred) != 0;

	PreventCommandIfReadOnly(function);
	PreventCommandIfParallelMode(function);
	if (planning > 0)
		ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						errmsg("cannot call %s while a query is planned", function),
						errhint("Declare the function that calls it VOLATILE.")));
	if (!stored && ActivePortal != NULL && ActivePortal->visible && ActivePortal->name[0] != '\0')
		ereport(ERROR, (errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
						errmsg("cannot call %s in the query of a cursor or of a loop", function),
						errdetail("Rows are read ahead, some are never read, and COMMIT or moving "
								  "back can run the query again."),
						errhint("Call it in a statement of its own, such as one in the body of "
								"the loop.")));
}
