/*-------------------------------------------------------------------------
 *
 * query/query.c
 *	  SQL of the extension, run as the owner of its tables.
 *
 * Callers have no rights on the tables.  A query runs as their owner, as a
 * security-restricted operation under a pinned search path, so that neither the caller
 * nor the author of a trigger gains rights of the other.
 *
 * Each query is planned once per session, for its index: a plan for a small table must
 * not be used when the table has grown or holds dead rows.  In READ COMMITTED each run has
 * a snapshot of its own.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/rel.h"

#include "base/errors.h"
#include "query/query.h"
#include "query/relation.h"

/* The settings under which a query is planned and run. */
static const struct
{
	const char *name;
	const char *value;
} settings[] = {
	{"search_path", "pg_catalog, pg_temp"},
	{"enable_seqscan", "off"},
	{"enable_bitmapscan", "off"},
	{"jit", "off"},
};

/*
 * CheckUnaltered throws 55000 if the table has rules or BEFORE ROW triggers, which could
 * change or suppress a write.  It runs after the write, whose lock prevents new ones.
 * The plan is dropped: if a rule has left nothing of the query, it depends on no table,
 * and would never be replanned.
 */
static void
CheckUnaltered(ExtensionQuery *query, Relation table)
{
	const TriggerDesc *triggers = table->trigdesc;

	if (table->rd_rules == NULL && (triggers == NULL || !(triggers->trig_insert_before_row ||
														  triggers->trig_update_before_row ||
														  triggers->trig_delete_before_row)))
		return;
	SPI_freeplan(query->plan);
	query->plan = NULL;
	ErrorStoreAltered(query->table, "It has rules or BEFORE ROW triggers.",
					  "Drop them; AFTER triggers are allowed.");
}

/*
 * CheckResult throws 55000 unless the result has the types that the caller reads.
 */
static void
CheckResult(const ExtensionQuery *query)
{
	for (int i = 0; OidIsValid(query->results[i]); i++)
	{
		Form_pg_attribute column = TupleDescAttr(SPI_tuptable->tupdesc, i);

		if (column->atttypid != query->results[i])
			ErrorStoreAltered(query->table,
							  psprintf("Its \"%s\" is of type %s instead of %s.",
									   NameStr(column->attname), format_type_be(column->atttypid),
									   format_type_be(query->results[i])),
							  "Restore the type of the column with ALTER TABLE.");
	}
}

/*
 * Failed reports an error of SPI itself.
 */
pg_noreturn static void
Failed(const ExtensionQuery *query, int result)
{
	ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
					errmsg_internal("could not run \"%s\": %s", query->text,
									SPI_result_code_string(result))));
}

/*
 * PreparePlan plans the query on its first run.
 */
static void
PreparePlan(ExtensionQuery *query)
{
	SPIPlanPtr plan;

	if (query->plan != NULL)
		return;
	plan =
		SPI_prepare_cursor(query->text, query->parameters, query->types, CURSOR_OPT_GENERIC_PLAN);
	if (plan == NULL || SPI_keepplan(plan) != 0)
		Failed(query, SPI_result);
	query->plan = plan;
}

/*
 * ExtensionQueryRun runs the query, and returns how many rows it returned or changed.  The
 * caller must copy what it needs of the result, and call ExtensionQueryEnd().  "isnull" may
 * be NULL.
 */
uint64
ExtensionQueryRun(ExtensionQuery *query, Datum *values, const bool *isnull)
{
	Relation table = try_table_open(ExtensionRelationOid(query->table), AccessShareLock);
	char nulls[EXTENSION_QUERY_PARAMETERS + 1];
	int nest = NewGUCNestLevel();
	Oid caller;
	int context;
	int result;

	if (table == NULL)
		ErrorStoreAltered(query->table, "It is missing.",
						  "Use ALTER EXTENSION idempotency UPDATE.");

	/* Set parameters, settings and role */
	for (int i = 0; i < query->parameters; i++)
		nulls[i] = isnull != NULL && isnull[i] ? 'n' : ' ';
	nulls[query->parameters] = '\0';

	for (size_t i = 0; i < lengthof(settings); i++)
		(void) set_config_option(settings[i].name, settings[i].value, PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SAVE, true, 0, false);
	GetUserIdAndSecContext(&caller, &context);
	SetUserIdAndSecContext(table->rd_rel->relowner,
						   context | SECURITY_LOCAL_USERID_CHANGE | SECURITY_NOFORCE_RLS |
							   (query->checksCaller ? 0 : SECURITY_RESTRICTED_OPERATION));

	/* Run the query */
	SPI_connect();
	PreparePlan(query);
	result = SPI_execute_plan(query->plan, values, nulls, false, 0);
	if (result < 0)
		Failed(query, result);

	/* Check table and result */
	if (result != SPI_OK_SELECT)
		CheckUnaltered(query, table);
	CheckResult(query);
	table_close(table, NoLock);
	SetUserIdAndSecContext(caller, context);
	AtEOXact_GUC(false, nest);
	return SPI_processed;
}

/*
 * ExtensionQueryValue returns a column (from 1) of a row (from 0) of the result.  Throws
 * 55000 for a NULL if "isnull" is NULL.
 */
Datum
ExtensionQueryValue(const ExtensionQuery *query, uint64 row, int column, bool *isnull)
{
	TupleDesc desc = SPI_tuptable->tupdesc;
	bool missing;
	Datum value = SPI_getbinval(SPI_tuptable->vals[row], desc, column, &missing);

	Assert(OidIsValid(query->results[column - 1]));
	if (isnull != NULL)
		*isnull = missing;
	else if (missing)
		ErrorStoreAltered(
			query->table,
			psprintf("Its \"%s\" is NULL in a row.",
					 NameStr(TupleDescAttr(desc, column - 1)->attname)),
			"Set a value in the row, and restore the NOT NULL constraint of the column.");
	return value;
}

/*
 * ExtensionQueryEnd frees the result.
 */
void
ExtensionQueryEnd(void)
{
	SPI_finish();
}

/*
 * ExtensionQueryDo runs a query without reading its result, and returns how many rows it
 * changed.
 */
uint64
ExtensionQueryDo(ExtensionQuery *query, Datum *values, const bool *isnull)
{
	uint64 rows = ExtensionQueryRun(query, values, isnull);

	ExtensionQueryEnd();
	return rows;
}
