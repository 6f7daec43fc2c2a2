/*-------------------------------------------------------------------------
 *
 * settings/configured.c
 *	  What idempotency.configure() has stored, in the memory of the session.
 *
 * The first call of a session reads the table, and so does the first one after an
 * invalidation, which each change of the table sends with its commit.  Otherwise a lookup is a
 * comparison, if nothing is stored.  A call that has begun with an older value can end with it.
 *
 * Locks: ACCESS SHARE on the table while it is read.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "base/compat.h"
#include "base/name.h"
#include "base/pattern.h"
#include "query/relation.h"
#include "settings/configured.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

enum
{
	COLUMN_NAME = 1,
	COLUMN_SCOPE,
	COLUMN_VALUE,
	COLUMN_LITERALS
};

static void CheckColumns(Relation table);

static ExtensionTable settingTable = {
	.name = "configuration", .isRead = true, .check = CheckColumns};
static MemoryContext memory = NULL;
static List *rows = NIL; /* in the order of precedence */
static bool complete = false;

PG_FUNCTION_INFO_V1(idempotency_setting);
PG_FUNCTION_INFO_V1(idempotency_check_setting);
PG_FUNCTION_INFO_V1(idempotency_forget_settings);

static void
CheckColumns(Relation table)
{
	static const TableColumn columns[] = {{"name", TEXTOID, true},
										  {"scope", TEXTOID, true},
										  {"value", TEXTOID, true},
										  {"literals", INT4OID, false}};

	TableCheckColumns(table, columns, lengthof(columns));
}

/*
 * Precedes compares for list_sort(): of two patterns that match a scope, the first applies.
 */
static int
Precedes(const ListCell *a, const ListCell *b)
{
	const ConfiguredSetting *left = lfirst(a);
	const ConfiguredSetting *right = lfirst(b);

	if (left->literals != right->literals)
		return left->literals > right->literals ? -1 : 1;
	return DatumGetInt32(DirectFunctionCall2Coll(bttextcmp, C_COLLATION_OID,
												 PointerGetDatum(left->pattern),
												 PointerGetDatum(right->pattern)));
}

/*
 * Add adds a row of the table to the list.  Throws 22023 for a value that the setting does not
 * allow: the trigger that refuses it was disabled.
 */
static void
Add(HeapTuple tuple, TupleDesc desc)
{
	ConfiguredSetting *row = palloc0(sizeof(ConfiguredSetting));
	bool isnull;
	char *name = TextDatumGetCString(heap_getattr(tuple, COLUMN_NAME, desc, &isnull));
	Datum literals = heap_getattr(tuple, COLUMN_LITERALS, desc, &isnull);

	row->setting = ConfigurableSetting(name);
	row->literals = isnull ? 0 : DatumGetInt32(literals);
	row->pattern = DatumGetTextPCopy(heap_getattr(tuple, COLUMN_SCOPE, desc, &isnull));
	row->text = TextDatumGetCString(heap_getattr(tuple, COLUMN_VALUE, desc, &isnull));
	row->value.valid = true;
	if (row->setting == NULL || !row->setting->parse(row->setting, row->text, &row->value))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid value for parameter \"idempotency.%s\": \"%s\"", name, row->text),
				 errdetail("It is stored in idempotency.configuration."),
				 errhint("Replace or remove it with idempotency.configure().")));
	rows = lappend(rows, row);
}

/*
 * Load reads the table, and returns whether there is one: an older version of the extension
 * has none.  Throws 55000 if it was altered, and 22023 for an invalid value.
 */
static bool
Load(void)
{
	MemoryContext caller;
	Relation table;
	SysScanDesc scan;
	HeapTuple tuple;

	if (!OidIsValid(ExtensionRelationOid(settingTable.name)))
		return false;
	complete = false;
	rows = NIL;
	if (memory == NULL)
		memory =
			AllocSetContextCreate(CacheMemoryContext, "idempotency settings", ALLOCSET_SMALL_SIZES);
	MemoryContextReset(memory);

	/* An invalidation from here on makes the next call read again */
	table = ExtensionTableOpen(&settingTable, AccessShareLock);
	scan = systable_beginscan(table, InvalidOid, false, NULL, 0, NULL);
	caller = MemoryContextSwitchTo(memory);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		CHECK_FOR_INTERRUPTS();
		Add(tuple, RelationGetDescr(table));
	}
	list_sort(rows, Precedes);
	MemoryContextSwitchTo(caller);
	systable_endscan(scan);
	table_close(table, AccessShareLock);
	complete = true;
	return true;
}

/*
 * ConfiguredFind returns what is stored for the setting and the scope, or for the database if
 * the scope is NULL; NULL if there is nothing.  Needs a transaction.  Throws what Load() throws.
 */
const ConfiguredSetting *
ConfiguredFind(const Setting *setting, const text *scope)
{
	ListCell *cell;

	Assert(IsTransactionState());
	if ((!complete || !settingTable.checked) && !Load())
		return NULL;
	foreach (cell, rows)
	{
		const ConfiguredSetting *row = lfirst(cell);

		if (row->setting == setting &&
			(row->literals == 0 || (scope != NULL && PatternMatches(row->pattern, scope))))
			return row;
	}
	return NULL;
}

/*
 * SettingFromArg returns the setting that the first argument names.  Throws 22023 for one that
 * configure() cannot store.
 */
static Setting *
SettingFromArg(FunctionCallInfo fcinfo)
{
	char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	Setting *setting = ConfigurableSetting(name);

	if (setting == NULL)
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("unrecognized setting \"%s\"", name)));
	return setting;
}

/*
 * setting(name, scope) RETURNS text: the value that applies to the scope, or to the database if
 * it is empty.  Throws 42501 for a scope without the prefix of the login role.
 */
Datum
idempotency_setting(PG_FUNCTION_ARGS)
{
	Setting *setting = SettingFromArg(fcinfo);
	text *scope = PG_GETARG_TEXT_PP(1);

	if (VARSIZE_ANY_EXHDR(scope) == 0)
		scope = NULL;
	else
		CheckScopePrefix(scope, scope);
	PG_RETURN_TEXT_P(cstring_to_text(SettingText(setting, scope)));
}

/*
 * check_setting(name, value): throws 22023 as SET does.
 */
Datum
idempotency_check_setting(PG_FUNCTION_ARGS)
{
	(void) set_config_option(SettingFromArg(fcinfo)->name, text_to_cstring(PG_GETARG_TEXT_PP(1)),
							 PGC_SUSET, PGC_S_SESSION, GUC_ACTION_SAVE, false, ERROR, false);
	PG_RETURN_VOID();
}

/*
 * forget_settings(): makes this session read the table again, and with the commit all others.
 */
Datum
idempotency_forget_settings(PG_FUNCTION_ARGS)
{
	Oid relid = ExtensionRelationOid("configuration");

	if (OidIsValid(relid))
		CacheInvalidateRelcacheByRelid(relid);
	PG_RETURN_VOID();
}
