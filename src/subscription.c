/*-------------------------------------------------------------------------
 *
 * subscription.c
 *	  The table idempotency.subscription: who reads which events, and the lock
 *	  that lets one consumer at a time read them.
 *
 * Whoever has the privileges of a subscription's owner may do with it what
 * the owner may; nobody else may read its events.
 *
 * Locks: the subscription's, a heavyweight lock beside those of the keys, to the
 * end of the transaction; so a rollback gives back what was fetched in it.
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

#include "compat.h"
#include "errors.h"
#include "event.h"
#include "keylock.h"
#include "outboxerrors.h"
#include "ownerquery.h"
#include "subscription.h"

#define SUBSCRIPTION_SELECTION                                                                     \
	"SELECT subscription, number, owner, topics, handler, max_attempts, retry_delay,"              \
	" max_retry_delay FROM idempotency.subscription WHERE "

#define SUBSCRIPTION_RESULTS                                                                       \
	{                                                                                              \
		TEXTOID, INT8OID, NAMEOID, TEXTARRAYOID, TEXTOID, INT4OID, INTERVALOID, INTERVALOID        \
	}

static OwnerQuery findQuery = {
	.table = "subscription",
	.text = SUBSCRIPTION_SELECTION "subscription OPERATOR(pg_catalog.=) $1",
	.parameters = 1,
	.types = {TEXTOID},
	.results = SUBSCRIPTION_RESULTS,
};

static OwnerQuery findNumberQuery = {
	.table = "subscription",
	.text = SUBSCRIPTION_SELECTION "number OPERATOR(pg_catalog.=) $1",
	.parameters = 1,
	.types = {INT8OID},
	.results = SUBSCRIPTION_RESULTS,
};

static OwnerQuery noteErrorQuery = {
	.table = "subscription",
	.text = "UPDATE idempotency.subscription SET last_error = $2,"
			" last_error_at = pg_catalog.clock_timestamp()"
			" WHERE subscription OPERATOR(pg_catalog.=) $1",
	.parameters = 2,
	.types = {TEXTOID, TEXTOID},
};

/*
 * FromRow returns the subscription in the result of a query, in the current
 * memory context.
 */
static Subscription *
FromRow(const OwnerQuery *query)
{
	Subscription *subscription = palloc0(sizeof(Subscription));
	bool isnull;
	Datum handler;

	subscription->name = DatumGetTextPCopy(OwnerQueryValue(query, 0, 1, NULL));
	subscription->number = DatumGetInt64(OwnerQueryValue(query, 0, 2, NULL));
	subscription->owner = pstrdup(NameStr(*DatumGetName(OwnerQueryValue(query, 0, 3, NULL))));
	TopicPatternsFromArray(&subscription->topics,
						   DatumGetArrayTypePCopy(OwnerQueryValue(query, 0, 4, NULL)));
	handler = OwnerQueryValue(query, 0, 5, &isnull);
	subscription->handler = isnull ? NULL : TextDatumGetCString(handler);
	subscription->maxAttempts = DatumGetInt32(OwnerQueryValue(query, 0, 6, NULL));
	subscription->retryDelay = *DatumGetIntervalP(OwnerQueryValue(query, 0, 7, NULL));
	subscription->maxRetryDelay = *DatumGetIntervalP(OwnerQueryValue(query, 0, 8, NULL));
	return subscription;
}

static Subscription *
Find(OwnerQuery *query, Datum value)
{
	MemoryContext caller = CurrentMemoryContext;
	Subscription *subscription = NULL;

	if (OwnerQueryRun(query, &value, NULL) > 0)
	{
		MemoryContext spi = MemoryContextSwitchTo(caller);

		subscription = FromRow(query);
		MemoryContextSwitchTo(spi);
	}
	OwnerQueryEnd();
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
 * SubscriptionForCaller returns the subscription of that name.  Throws 42704 if
 * there is none, and 42501 if it is none of the caller's business.
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
		ErrorNotSubscriptionOwner(name, subscription->owner);
	return subscription;
}

/*
 * SubscriptionNoteError writes down the last error of a subscription.
 */
void
SubscriptionNoteError(const text *name, const text *error)
{
	Datum values[] = {PointerGetDatum(name), PointerGetDatum(error)};
	bool isnull[] = {false, error == NULL};

	(void) OwnerQueryDo(&noteErrorQuery, values, isnull);
}

/* ----------------------------------------------------------------
 * The lock
 * ----------------------------------------------------------------
 */

/*
 * LockName returns the name of the subscription's lock: an empty scope, which no key has.
 */
static KeyName
LockName(const text *name)
{
	KeyName lock;

	KeyNameSet(cstring_to_text(""), unconstify(text *, name), &lock);
	return lock;
}

/*
 * SubscriptionLock makes this transaction the only one that reads the
 * subscription, until it ends.  Returns false if another has it for longer than
 * "waitMs".
 */
bool
SubscriptionLock(const text *name, int waitMs)
{
	KeyName lock = LockName(name);

	return KeyLockAcquire(&lock, waitMs);
}

/*
 * SubscriptionUnlock gives up the lock that SubscriptionLock() has just got, if
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
 * EventHandlerOid returns the function of a stored handler, schema.function(...),
 * that takes one event, or InvalidOid if it is gone.  Nobody needs a right to the
 * schema for that, as nobody does who calls a function by its OID.
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
 * EventHandlerIsTrusted tells whether the owner of a handler's function, who can
 * replace its body, can act as the owner of the subscription anyway.
 */
bool
EventHandlerIsTrusted(Oid functionOwner, Oid owner)
{
	return has_privs_of_role(functionOwner, owner) || member_can_set_role(functionOwner, owner);
}

/*
 * EventHandlerCheck throws 42P13 unless the function takes one event and returns
 * void, 42883 if there is none, and 42501 unless the owner may execute it, and its own
 * owner has the privileges of that one.
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
		ErrorEventHandlerSignature(handler);

	acl = object_aclcheck(ProcedureRelationId, handler, owner, ACL_EXECUTE);
	if (acl != ACLCHECK_OK)
		aclcheck_error(acl, OBJECT_FUNCTION, get_func_name(handler));
	if (!EventHandlerIsTrusted(functionOwner, owner))
		ErrorEventHandlerOwner(handler, functionOwner, owner);
}
