/*-------------------------------------------------------------------------
 *
 * delivery/subscription.c
 *	  The table idempotency.subscription, and the lock that lets one transaction at
 *	  a time read the events of a subscription.
 *
 * A role with the privileges of the owner of a subscription has the owner's rights to
 * it; no other role can read its events.
 *
 * Locks: the subscription's, a heavyweight lock like those of the keys, to the end of
 * the transaction.  So a rollback gives back what the transaction fetched.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/guc.h"
#include "base/query.h"
#include "delivery/subscription.h"
#include "keys/lock.h"
#include "outbox/event.h"

#define SUBSCRIPTION_SELECTION                                                                     \
	"SELECT subscription, number, owner, topics, handler, max_attempts, retry_delay,"              \
	" max_retry_delay FROM idempotency.subscription WHERE "

#define SUBSCRIPTION_RESULTS                                                                       \
	{                                                                                              \
		TEXTOID, INT8OID, NAMEOID, TEXTARRAYOID, TEXTOID, INT4OID, INTERVALOID, INTERVALOID        \
	}

static ExtensionQuery findQuery = {
	.table = "subscription",
	.text = SUBSCRIPTION_SELECTION "subscription OPERATOR(pg_catalog.=) $1",
	.parameters = 1,
	.types = {TEXTOID},
	.results = SUBSCRIPTION_RESULTS,
};

static ExtensionQuery findNumberQuery = {
	.table = "subscription",
	.text = SUBSCRIPTION_SELECTION "number OPERATOR(pg_catalog.=) $1",
	.parameters = 1,
	.types = {INT8OID},
	.results = SUBSCRIPTION_RESULTS,
};

static ExtensionQuery setErrorQuery = {
	.table = "subscription",
	.text = "UPDATE idempotency.subscription SET last_error = $2,"
			" last_error_at = pg_catalog.clock_timestamp()"
			" WHERE subscription OPERATOR(pg_catalog.=) $1"
			" AND pg_catalog.starts_with(last_error, $2) IS NOT TRUE",
	.parameters = 2,
	.types = {TEXTOID, TEXTOID},
};

/*
 * FromRow returns the subscription in the result of a query, in the current memory
 * context.
 */
static Subscription *
FromRow(const ExtensionQuery *query)
{
	Subscription *subscription = palloc0(sizeof(Subscription));
	bool isnull;
	Datum handler;

	subscription->name = DatumGetTextPCopy(ExtensionQueryValue(query, 0, 1, NULL));
	subscription->number = DatumGetInt64(ExtensionQueryValue(query, 0, 2, NULL));
	subscription->owner = pstrdup(NameStr(*DatumGetName(ExtensionQueryValue(query, 0, 3, NULL))));
	TopicPatternsFromArray(&subscription->topics,
						   DatumGetArrayTypePCopy(ExtensionQueryValue(query, 0, 4, NULL)));
	handler = ExtensionQueryValue(query, 0, 5, &isnull);
	subscription->handler = isnull ? NULL : TextDatumGetCString(handler);
	subscription->maxAttempts = DatumGetInt32(ExtensionQueryValue(query, 0, 6, NULL));
	subscription->retryDelay = *DatumGetIntervalP(ExtensionQueryValue(query, 0, 7, NULL));
	subscription->maxRetryDelay = *DatumGetIntervalP(ExtensionQueryValue(query, 0, 8, NULL));
	return subscription;
}

static Subscription *
Find(ExtensionQuery *query, Datum value)
{
	MemoryContext caller = CurrentMemoryContext;
	Subscription *subscription = NULL;

	if (ExtensionQueryRun(query, &value, NULL) > 0)
	{
		MemoryContext spi = MemoryContextSwitchTo(caller);

		subscription = FromRow(query);
		MemoryContextSwitchTo(spi);
	}
	ExtensionQueryEnd();
	return subscription;
}

/*
 * SubscriptionFind returns the subscription of that name, or NULL.
 */
Subscription *
SubscriptionFind(const text *name)
{
	return Find(&findQuery, PointerGetDatum(name));
}

/*
 * SubscriptionFindNumber returns the subscription of that number, or NULL.
 */
Subscription *
SubscriptionFindNumber(int64 number)
{
	return Find(&findNumberQuery, Int64GetDatum(number));
}

/*
 * ErrorNoSubscription reports a subscription that does not exist.
 */
void
ErrorNoSubscription(const text *subscription)
{
	ereport(
		ERROR,
		(errcode(ERRCODE_UNDEFINED_OBJECT),
		 errmsg("subscription \"%s\" does not exist", text_to_cstring(subscription)),
		 errhint(
			 "Use idempotency.subscribe() to create it; the view idempotency.subscriptions lists all.")));
}

/*
 * SubscriptionForCaller returns the subscription of that name.  Throws 42704 if there is
 * none, and 42501 if the caller does not have the owner's privileges.
 */
Subscription *
SubscriptionForCaller(text *name)
{
	Subscription *subscription = SubscriptionFind(name);
	Oid owner;

	if (subscription == NULL)
		ErrorNoSubscription(name);
	owner = get_role_oid(subscription->owner, true);
	if (!superuser() && !(OidIsValid(owner) && has_privs_of_role(GetUserId(), owner)))
		ereport(ERROR, (errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
						errmsg("permission denied for subscription \"%s\"", text_to_cstring(name)),
						errdetail("Its owner is \"%s\".", subscription->owner),
						errhint("Call as a role that has the privileges of the owner.")));
	return subscription;
}

/*
 * SubscriptionSetError writes the last error of a subscription, or the beginning of it.  Returns
 * false if the subscription shows it: another session may just have written it.
 */
bool
SubscriptionSetError(const text *name, const text *error)
{
	Datum values[] = {PointerGetDatum(name), PointerGetDatum(error)};
	bool isnull[] = {false, error == NULL};

	return ExtensionQueryDo(&setErrorQuery, values, isnull) > 0;
}

/* ----------------------------------------------------------------
 * The lock
 * ----------------------------------------------------------------
 */

/*
 * LockName returns the name of the subscription's lock: with an empty scope, which no
 * key has.
 */
static KeyName
LockName(const text *name)
{
	KeyName lock;

	KeyNameSet(cstring_to_text(""), unconstify(text *, name), &lock);
	return lock;
}

/*
 * SubscriptionLock takes the subscription's lock, to the end of the transaction.  Returns
 * false if another transaction holds it for longer than "waitMs".
 */
bool
SubscriptionLock(const text *name, int waitMs)
{
	KeyName lock = LockName(name);

	return KeyLockAcquire(&lock, waitMs);
}

/*
 * SubscriptionLockOrThrow does the same, waiting for at most idempotency.wait.  Throws
 * 55P03 if the lock is not free in time.
 */
void
SubscriptionLockOrThrow(const text *name)
{
	if (!SubscriptionLock(name, DefaultWait))
		ereport(ERROR,
				(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
				 errmsg("subscription \"%s\" is in use", text_to_cstring(name)),
				 errdetail("Another transaction that fetched or acknowledged is still open."),
				 errhint("Try again, or set idempotency.wait higher.")));
}

/*
 * SubscriptionUnlock releases the lock that SubscriptionLock() has just taken, if
 * nothing was changed under it.
 */
void
SubscriptionUnlock(const text *name)
{
	KeyName lock = LockName(name);

	KeyLockRelease(&lock);
}

/* ----------------------------------------------------------------
 * Handlers
 * ----------------------------------------------------------------
 */

/*
 * EventHandlerOid returns the function of a stored handler, schema.function(...), that
 * takes one event, or InvalidOid if it no longer exists.  Needs no right to the schema,
 * as a call of a function by its OID needs none.
 */
Oid
EventHandlerOid(const char *handler)
{
	char *name = pstrdup(handler);
	char *arguments = strrchr(name, '(');
	Oid eventType = EventType();
	List *names;

	if (arguments == NULL)
		return InvalidOid;
	*arguments = '\0';
	names = stringToQualifiedNameListCompat(name);
	if (list_length(names) != 2)
		return InvalidOid;
	return GetSysCacheOid3(PROCNAMEARGSNSP, Anum_pg_proc_oid,
						   CStringGetDatum(strVal(lsecond(names))),
						   PointerGetDatum(buildoidvector(&eventType, 1)),
						   ObjectIdGetDatum(get_namespace_oid(strVal(linitial(names)), true)));
}

/*
 * CheckHandlerOwner throws 42501 unless the owner of a handler's function, which can
 * replace its body, can act as the owner of the subscription anyway.
 */
static void
CheckHandlerOwner(Oid handler, Oid functionOwner, Oid owner)
{
	if (has_privs_of_role(functionOwner, owner) || member_can_set_role(functionOwner, owner))
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("owner \"%s\" of handler %s does not have the privileges of role \"%s\"",
					GetUserNameFromId(functionOwner, false), format_procedure_qualified(handler),
					GetUserNameFromId(owner, false)),
			 errdetail("The owner of a function can replace its body at any time, and the handler "
					   "runs with the privileges of the subscription's owner."),
			 errhint("Use ALTER FUNCTION ... OWNER TO to make the subscription's owner the owner "
					 "of the handler.")));
}

/*
 * EventHandlerCheck throws 42883 if the function does not exist, 42P13 unless it takes
 * one event and returns void, and 42501 unless the owner can execute it and the
 * function's owner has the privileges of that owner.
 */
void
EventHandlerCheck(Oid handler, Oid owner)
{
	HeapTuple tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(handler));
	Form_pg_proc proc;
	Oid functionOwner;
	AclResult acl;
	bool fits;

	if (!HeapTupleIsValid(tuple))
		ErrorHandlerMissing(handler);
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	functionOwner = proc->proowner;
	fits = proc->prokind == PROKIND_FUNCTION && !proc->proretset && proc->pronargs == 1 &&
		   proc->proargtypes.values[0] == EventType() && proc->prorettype == VOIDOID;
	ReleaseSysCache(tuple);
	if (!fits)
		ereport(ERROR, (errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
						errmsg("function %s cannot handle events", format_procedure(handler)),
						errhint("A handler takes one idempotency.event and returns void.")));

	acl = object_aclcheck(ProcedureRelationId, handler, owner, ACL_EXECUTE);
	if (acl != ACLCHECK_OK)
		aclcheck_error(acl, OBJECT_FUNCTION, get_func_name(handler));
	CheckHandlerOwner(handler, functionOwner, owner);
}
