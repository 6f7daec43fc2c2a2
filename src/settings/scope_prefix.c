/*-------------------------------------------------------------------------
 *
 * settings/scope_prefix.c
 *	  Whose session this is, and enforcing idempotency.scope_prefix.
 *
 * In a security-restricted operation, such as ANALYZE, the server runs the code of a table's owner
 * as that role, but in the session of another one: in autovacuum, a superuser's without a prefix.
 * There the role of the session and its prefix do not say who calls.
 *
 * A superuser sets the prefix per login role.  If the library is not preloaded, a value
 * in the client's connection options hides the role's; the server drops it when the
 * library is loaded, and no prefix would be left.  Then the first check of the session
 * applies the settings of the login again.  If they have no prefix, the dropped value can
 * have hidden one in postgresql.conf: the setting stays denied (settings/setting.c).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_db_role_setting.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

#include "base/compat.h"
#include "base/errors.h"
#include "settings/guc.h"
#include "settings/scope_prefix.h"

PG_FUNCTION_INFO_V1(idempotency_caller);

/*
 * RefuseRestricted throws 42501 in a security-restricted operation.
 */
static void
RefuseRestricted(void)
{
	if (InSecurityRestrictedOperation())
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("cannot check the role of the session in a security-restricted operation"),
				 errdetail("The function was called by an index, a materialized view or a "
						   "statistics object, during a command of another role.")));
}

/*
 * caller(): the role of the session, or that of SET ROLE.  Throws 42501 in a security-restricted
 * operation.
 */
Datum
idempotency_caller(PG_FUNCTION_ARGS)
{
	Name name = palloc0(NAMEDATALEN);

	RefuseRestricted();
	(void) namestrcpy(name, GetUserNameFromId(GetOuterUserId(), false));
	PG_RETURN_NAME(name);
}

/*
 * ApplySettingsOfLogin applies the settings of the database and of the role that logged
 * in, as the server does at login: the most specific ones first, since it ignores less
 * specific ones after them.  The change is not part of the transaction.
 */
static void
ApplySettingsOfLogin(void)
{
	Relation catalog = table_open(DbRoleSettingRelationId, AccessShareLock);
	Snapshot snapshot = RegisterSnapshot(GetCatalogSnapshot(DbRoleSettingRelationId));
	Oid login = GetAuthenticatedUserId();

	ApplySetting(snapshot, MyDatabaseId, login, catalog, PGC_S_DATABASE_USER);
	ApplySetting(snapshot, InvalidOid, login, catalog, PGC_S_USER);
	ApplySetting(snapshot, MyDatabaseId, InvalidOid, catalog, PGC_S_DATABASE);
	ApplySetting(snapshot, InvalidOid, InvalidOid, catalog, PGC_S_GLOBAL);
	UnregisterSnapshot(snapshot);
	table_close(catalog, AccessShareLock);
}

/*
 * ScopePrefix returns the prefix of the login role, empty for none.  Throws 25000 in a
 * parallel query if the prefix would have to be applied first, 42501 in a security-restricted
 * operation, and what RequireSetting() throws.  Needs a transaction.
 */
const char *
ScopePrefix(void)
{
	Assert(IsTransactionState());
	RefuseRestricted();
	if (PrefixSetting.hidden)
	{
		/* the server would not set them, and a worker's leader may have none yet */
		if (IsInParallelMode())
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_TRANSACTION_STATE),
					 errmsg("cannot apply idempotency.scope_prefix during a parallel operation"),
					 errhint("Mark your function that calls this one PARALLEL UNSAFE.")));
		ApplySettingsOfLogin();
		PrefixSetting.hidden = false;
	}

	RequireSetting(&PrefixSetting, NULL);
	return PrefixSetting.text;
}

/*
 * CheckScopePrefix throws 42501 unless "start" begins with the login role's prefix: the
 * scope that the error names, or what all scopes begin with that this pattern matches.
 * Throws also what ScopePrefix() throws.
 */
void
CheckScopePrefix(const text *start, const text *scope)
{
	const char *prefix = ScopePrefix();
	size_t bytes = strlen(prefix);

	if (bytes == 0)
		return;
	if (VARSIZE_ANY_EXHDR(start) < bytes || memcmp(VARDATA_ANY(start), prefix, bytes) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for idempotency scope \"%s\"", text_to_cstring(scope)),
				 errdetail("Scopes of this role must begin with \"%s\".", prefix),
				 errhint("A superuser sets idempotency.scope_prefix per role.")));
}

/*
 * ScopeFromArg returns the scope that the first argument passes.  Throws IK400, or 42501
 * unless it begins with the login role's prefix.
 */
text *
ScopeFromArg(FunctionCallInfo fcinfo)
{
	text *scope = NameFromArg(fcinfo, 0, "scope");

	CheckScopePrefix(scope, scope);
	return scope;
}

/*
 * KeyNameFromArgs fills "name" from the scope and the key that the first two arguments
 * pass, without copies.  Throws IK400 and 42501.
 */
void
KeyNameFromArgs(FunctionCallInfo fcinfo, KeyName *name)
{
	text *scope = ScopeFromArg(fcinfo);

	*name = (KeyName){.scope = scope, .key = NameFromArg(fcinfo, 1, "key")};
}

/*
 * ScopePatternFromArg fills "scopes" from the first argument.  Throws IK400, 22023, or 42501
 * if the pattern can match a scope that does not begin with the login role's prefix.
 */
void
ScopePatternFromArg(FunctionCallInfo fcinfo, ScopePattern *scopes)
{
	const text *pattern;
	const char *bytes;
	char *prefix;
	int length;
	int i;

	if (PG_ARGISNULL(0))
		ErrorNameMissing("scope");
	pattern = PG_GETARG_TEXT_PP(0);
	PatternCheck(pattern, "scope");

	bytes = VARDATA_ANY(pattern);
	length = VARSIZE_ANY_EXHDR(pattern);
	scopes->pattern = pattern;
	scopes->prefix = palloc(VARHDRSZ + length);
	prefix = VARDATA(scopes->prefix);
	for (i = 0; i < length && bytes[i] != '*'; i++)
	{
		if (bytes[i] == '\\')
			i++;
		*prefix++ = bytes[i];
	}
	scopes->isExact = i == length;
	SET_VARSIZE(scopes->prefix, prefix - (char *) scopes->prefix);
	CheckScopePrefix(scopes->prefix, pattern);
}
