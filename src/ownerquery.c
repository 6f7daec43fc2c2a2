/*-------------------------------------------------------------------------
 *
 * ownerquery.c
 *	  SQL of the extension's own, run as the owner of its tables.
 *
 * The tables that are on nobody's hot path are read and written by SQL.  The
 * caller of a function has no right to them; their owner has.  Whatever others
 * have added to a table (a trigger AFTER a write, say) runs as a security-restricted
 * operation under a pinned search path, so that neither the caller nor the trigger's
 * author gets what the other has.  A table with anything that could keep a row from
 * being written, or change it, is refused: an event would be lost.  So is one that
 * has other values than the caller takes them for, since somebody has altered a column.
 *
 * Each query is planned once a session, for its index: a plan for a table that was
 * small must not stay when the table has grown, or holds dead rows that a snapshot
 * elsewhere keeps.  In READ COMMITTED each run has a snapshot of its own.
 *
 * Locks: what the query takes, to the end of the transaction.
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
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "errors.h"
#include "ownerquery.h"
#include "owntable.h"

/* Under which settings a query is planned and run. */
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
 * OwnerOf returns the owner of one of the extension's tables.  Throws 55000 if
 * it is missing.
 */
static Oid
OwnerOf(const char *table)
{
	Oid relid = OwnRelationByName(table);
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid owner;

	if (!HeapTupleIsValid(tuple))
		ErrorStoreAltered(table, "It is missing.", "Use ALTER EXTENSION idempotency UPDATE.");
	owner = ((Form_pg_class) GETSTRUCT(tuple))->relowner;
	ReleaseSysCache(tuple);
	return owner;
}

/*
 * CheckUnaltered throws 55000 if the table has rules, or triggers that come before
 * the write of a row.  The write was done, so that its lock keeps more of them away.
 * The plan is made anew next time: one that a rule has left nothing of would stay,
 * since it depends on no table any more.
 */
static void
CheckUnaltered(OwnerQuery *query)
{
	Oid relid = OwnRelationByName(query->table);
	HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	bool mayBe = HeapTupleIsValid(tuple) && (((Form_pg_class) GETSTRUCT(tuple))->relhasrules ||
											 ((Form_pg_class) GETSTRUCT(tuple))->relhastriggers);
	const TriggerDesc *triggers;
	Relation table;

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	if (!mayBe)
		return;

	/* what was there once leaves its mark */
	table = table_open(relid, AccessShareLock);
	triggers = table->trigdesc;
	if (table->rd_rules != NULL || (triggers != NULL && (triggers->trig_insert_before_row ||
														 triggers->trig_update_before_row ||
														 triggers->trig_delete_before_row)))
	{
		SPI_freeplan(query->plan);
		query->plan = NULL;
		ErrorStoreAltered(query->table,
						  "It has rules, or triggers that come before the write of a row.",
						  "Drop them; a trigger AFTER the write does no harm.");
	}
	table_close(table, NoLock);
}

/*
 * CheckResult throws 55000 unless the result has the types that the caller reads.
 */
static void
CheckResult(const OwnerQuery *query)
{
	for (int i = 0; OidIsValid(query->results[i]); i++)
	{
		Form_pg_attribute column = TupleDescAttr(SPI_tuptable->tupdesc, i);

		if (column->atttypid != query->results[i])
			ErrorStoreAltered(query->table,
							  psprintf("Its \"%s\" is of type %s instead of %s.",
									   NameStr(column->attname), format_type_be(column->atttypid),
									   format_type_be(query->results[i])),
							  "Use ALTER TABLE to give the column its type again.");
	}
}

/*
 * Failed reports an error of SPI itself.
 */
pg_noreturn static void
Failed(const OwnerQuery *query, int result)
{
	ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
					errmsg_internal("could not run \"%s\": %s", query->text,
									SPI_result_code_string(result))));
}

/*
 * PreparePlan plans the query, unless that was done.
 */
static void
PreparePlan(OwnerQuery *query)
{
	SPIPlanPtr plan;

	if (query->plan != NULL)
		return;
	plan = SPI_prepare(query->text, query->parameters, query->types);
	if (plan == NULL || SPI_keepplan(plan) != 0)
		Failed(query, SPI_result);
	query->plan = plan;
}

/*
 * OwnerQueryRun runs the query, and returns how many rows it returned or
 * touched.  Its result stays there until OwnerQueryEnd(), which the caller must
 * call; what he needs of it in the memory context that he had, he copies then.
 * "isnull" may be NULL.
 */
uint64
OwnerQueryRun(OwnerQuery *query, Datum *values, const bool *isnull)
{
	Oid owner = OwnerOf(query->table);
	char nulls[OWNER_QUERY_PARAMETERS + 1];
	int nest = NewGUCNestLevel();
	Oid caller;
	int context;
	int result;

	for (int i = 0; i < query->parameters; i++)
		nulls[i] = isnull != NULL && isnull[i] ? 'n' : ' ';
	nulls[query->parameters] = '\0';

	for (size_t i = 0; i < lengthof(settings); i++)
		(void) set_config_option(settings[i].name, settings[i].value, PGC_USERSET, PGC_S_SESSION,
								 GUC_ACTION_SAVE, true, 0, false);
	GetUserIdAndSecContext(&caller, &context);
	SetUserIdAndSecContext(owner, context | SECURITY_LOCAL_USERID_CHANGE |
									  SECURITY_RESTRICTED_OPERATION | SECURITY_NOFORCE_RLS);
	SPI_connect();
	PreparePlan(query);
	result = SPI_execute_plan(query->plan, values, nulls, false, 0);
	if (result < 0)
		Failed(query, result);
	if (result != SPI_OK_SELECT)
		CheckUnaltered(query);
	CheckResult(query);
	SetUserIdAndSecContext(caller, context);
	AtEOXact_GUC(false, nest);
	return SPI_processed;
}

/*
 * OwnerQueryValue returns a column (from 1) of a row (from 0) of the result.  If
 * "isnull" is NULL, nothing there may be: throws 55000 then.
 */
Datum
OwnerQueryValue(const OwnerQuery *query, uint64 row, int column, bool *isnull)
{
	TupleDesc desc = SPI_tuptable->tupdesc;
	bool missing;
	Datum value = SPI_getbinval(SPI_tuptable->vals[row], desc, column, &missing);

	Assert(OidIsValid(query->results[column - 1]));
	if (isnull != NULL)
		*isnull = missing;
	else if (missing)
		ErrorStoreAltered(query->table,
						  psprintf("Its \"%s\" is NULL in a row.",
								   NameStr(TupleDescAttr(desc, column - 1)->attname)),
						  "Give the row a value, and the column its NOT NULL again.");
	return value;
}

/*
 * OwnerQueryEnd frees the result.
 */
void
OwnerQueryEnd(void)
{
	SPI_finish();
}

/*
 * OwnerQueryDo runs a query whose result nobody reads, and returns how many rows
 * it touched.
 */
uint64
OwnerQueryDo(OwnerQuery *query, Datum *values, const bool *isnull)
{
	uint64 rows = OwnerQueryRun(query, values, isnull);

	OwnerQueryEnd();
	return rows;
}
