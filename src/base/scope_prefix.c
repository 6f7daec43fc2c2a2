/*-------------------------------------------------------------------------
 *
 * base/scope_prefix.c
 *	  Enforcing idempotency.scope_prefix.
 *
 * A superuser sets the prefix per login role.  If the library is not preloaded, a value
 * in the client's connection options hides the role's; the server drops it when the
 * library is loaded, and no prefix would be left.  So the first check of a session
 * applies the prefix in the catalog, unless a more specific source has set one.  If
 * there is none, the dropped value can have hidden one in postgresql.conf: the setting
 * stays denied (base/setting.c).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_db_role_setting.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/rel.h"

#include "base/compat.h"
#include "base/guc.h"
#include "base/name.h"

/* Has the prefix of the login role been applied in this session? */
static bool prefixApplied = false;

/*
 * PrefixInSettings returns the prefix that a row of pg_db_role_setting sets, or NULL.
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

		/* names of settings are case-insensitive */
		if (pg_strncasecmp(assignment, wanted, strlen(wanted)) == 0)
			return assignment + strlen(wanted);
	}
	return NULL;
}

/*
 * ApplyPrefixOf applies the prefix in the catalog for a database and a role, either of
 * which may be 0 for all.  An invalid one, stored before the library could check it, is
 * applied as such.
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
 * ApplyPrefixOfLogin applies the prefix of the role that logged in.  The most specific
 * row is first, since the server ignores less specific ones after it.  The change is not
 * part of the transaction.
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
 * CheckScopePrefix throws 42501 unless the scope begins with the login role's prefix, and
 * what RequireSetting() throws.  Needs a transaction.
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
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for idempotency scope \"%s\"", text_to_cstring(scope)),
				 errdetail("Scopes of this role must begin with \"%s\".", prefix),
				 errhint("A superuser sets idempotency.scope_prefix per role.")));
}
