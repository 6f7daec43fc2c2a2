/*-------------------------------------------------------------------------
 *
 * base/callable.c
 *	  Functions of users that the extension calls: handlers of run() and of subscriptions.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_proc.h"
#include "pgstat.h"
#include "utils/acl.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "base/callable.h"
#include "base/compat.h"

/*
 * CallableFind reads what the catalog says of a function.  Returns false if there is none.
 */
bool
CallableFind(Oid function, Callable *found)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(function));
	Form_pg_proc proc;

	if (!HeapTupleIsValid(tuple))
		return false;
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	memset(found, 0, sizeof(Callable));
	found->function = function;
	found->owner = proc->proowner;
	if (proc->prokind == PROKIND_FUNCTION && !proc->proretset && proc->pronargs == 1)
	{
		found->argument = proc->proargtypes.values[0];
		found->result = proc->prorettype;
	}
	found->strict = proc->proisstrict;
	found->xmin = HeapTupleHeaderGetRawXmin(tuple->t_data);
	found->tid = tuple->t_self;
	ReleaseSysCache(tuple);
	return true;
}

/*
 * CallablePermit throws 42501 unless the role may execute the function.
 */
void
CallablePermit(Oid function, Oid role)
{
	if (object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION, get_func_name(function));
	InvokeFunctionExecuteHook(function);
}

/*
 * CallableCall calls a function with an argument that may be NULL, and counts the call in
 * pg_stat_user_functions.  Returns its result, and in "isnull" whether that is NULL.
 */
Datum
CallableCall(FmgrInfo *function, Datum argument, bool *isnull)
{
	LOCAL_FCINFO(call, 1);
	PgStat_FunctionCallUsage usage;
	Datum result;

	InitFunctionCallInfoData(*call, function, 1, InvalidOid, NULL, NULL);
	call->args[0].value = argument;
	call->args[0].isnull = *isnull;
	pgstat_init_function_usage(call, &usage);
	result = FunctionCallInvoke(call);
	pgstat_end_function_usage(&usage, true);
	*isnull = call->isnull;
	return result;
}

/*
 * CallableIsStale tells whether the function was dropped or replaced since it was found.
 */
bool
CallableIsStale(const Callable *callable)
{
	Callable latest;

	AcceptInvalidationMessages();
	return !CallableFind(callable->function, &latest) || latest.xmin != callable->xmin ||
		   !ItemPointerEquals(&latest.tid, unconstify(ItemPointerData *, &callable->tid));
}
