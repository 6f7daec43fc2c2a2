/*-------------------------------------------------------------------------
 *
 * prefix.c
 *	  Holds callers to idempotency.scope_prefix, however the library came in.
 *
 * A superuser sets the prefix per login role (ALTER ROLE ... SET).  Where the
 * library is preloaded, the server guards the setting from the start.  Where
 * the first call loads it, the server has kept any value of that name until
 * then, and a value in the client's connection options took the place of the
 * role's; the server then drops it as not permitted, and would leave no prefix
 * at all.  So the first check of a session applies what the catalog says,
 * which the server ignores where a more specific source has set it already.
 * If there is nothing, the value that was dropped may have hidden a prefix in
 * postgresql.conf, and the session may name no scope: the setting stays denied
 * (setting.c).
 *
 * Locks: ACCESS SHARE on pg_db_role_setting during the first check.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "catalog/pg_db_role_setting.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/rel.h"

#include "compat.h"
#include "errors.h"
#include "guc.h"
#include "prefix.h"

/* Has the prefix of the login role been applied in this session? */
static bool prefixApplied = false;

/*
 * PrefixInSettings returns the prefix that a row of pg_db_role_setting sets,
 * or NULL.
 */
static char *
PrefixInSettings(HeapTuple row, TupleDesc desc)
{
	const char *wanted = PREFIX_SETTING "=";
	bool isnull;
	Datum settings = heap_getattr(row, Anum_pg_db_role_setting_setconfig, desc, &isnull);
	ArrayIterator iterator;
	Datum setting;

	if (isnull)
		return NULL;

	iterator = array_create_iterator(DatumGetArrayTypeP(settings), 0, NULL);
	while (array_iterate(iterator, &setting, &isnull))
	{
		char *assignment = TextDatumGetCString(setting);

		/* the server does not mind the case of a setting's name */
		if (pg_strncasecmp(assignment, wanted, strlen(wanted)) == 0)
			return assignment + strlen(wanted);
	}
	return NULL;
}

/*
 * ApplyPrefixOf applies the prefix that the catalog has for a database and a
 * role, either of which may be 0 for all.  A prefix without an end was stored
 * before the library could check it: it is applied as one that is refused.
 */
static void
ApplyPrefixOf(Relation catalog, Oid database, Oid role, GucSource source)
{
	ScanKeyData keys[2];
	SysScanDesc scan;
	HeapTuple row;

	ScanKeyInit(&keys[0], Anum_pg_db_role_setting_setdatabase, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(database));
	ScanKeyInit(&keys[1], Anum_pg_db_role_setting_setrole, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(role));
	scan = systable_beginscan(catalog, DbRoleSettingDatidRolidIndexId, true, NULL, 2, keys);
	row = systable_getnext(scan);
	if (HeapTupleIsValid(row))
	{
		char *prefix = PrefixInSettings(row, RelationGetDescr(catalog));

		if (prefix != NULL)
			(void) set_config_option(PREFIX_SETTING, prefix, PGC_SUSET, source, GUC_ACTION_SET,
									 true, ERROR, false);
	}
	systable_endscan(scan);
}

/*
 * ApplyPrefixOfLogin applies the prefix of the role that logged in, as the
 * server does at login: the most specific row first, since later ones are
 * ignored then.  The change is no part of the transaction.
 */
static void
ApplyPrefixOfLogin(void)
{
	Relation catalog = table_open(DbRoleSettingRelationId, AccessShareLock);
	Oid login = GetAuthenticatedUserId();

	ApplyPrefixOf(catalog, MyDatabaseId, login, PGC_S_DATABASE_USER);
	ApplyPrefixOf(catalog, InvalidOid, login, PGC_S_USER);
	ApplyPrefixOf(catalog, MyDatabaseId, InvalidOid, PGC_S_DATABASE);
	ApplyPrefixOf(catalog, InvalidOid, InvalidOid, PGC_S_GLOBAL);
	table_close(catalog, AccessShareLock);
	prefixApplied = true;
}

/*
 * CheckScopePrefix throws 42501 unless the scope begins with the prefix that
 * a superuser set for the login role, and 22023 if that cannot be one.  Needs a
 * transaction.
 */
void
CheckScopePrefix(const text *scope)
{
	const char *prefix;
	size_t bytes;

	if (!prefixApplied)
		ApplyPrefixOfLogin();

	RequireSetting(&PrefixSetting);
	prefix = PrefixSetting.text;
	bytes = strlen(prefix);
	if (bytes == 0)
		return;
	if (VARSIZE_ANY_EXHDR(scope) < bytes || memcmp(VARDATA_ANY(scope), prefix, bytes) != 0)
		ErrorScopeForbidden(scope, prefix);
}
