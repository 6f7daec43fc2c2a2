/*-------------------------------------------------------------------------
 *
 * delivery/subscribe.c
 *	  subscribe() and unsubscribe().
 *
 * Locks: the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/query.h"
#include "base/reevaluation.h"
#include "base/timing.h"
#include "delivery/parked.h"
#include "delivery/position.h"
#include "delivery/subscription.h"
#include "outbox/notify.h"
#include "outbox/table.h"

PG_FUNCTION_INFO_V1(idempotency_subscribe);
PG_FUNCTION_INFO_V1(idempotency_unsubscribe);

/* The arguments of subscribe(). */
enum
{
	ARG_SUBSCRIPTION,
	ARG_TOPICS,
	ARG_HANDLER,
	ARG_START_AT,
	ARG_MAX_ATTEMPTS,
	ARG_RETRY_DELAY,
	ARG_MAX_RETRY_DELAY,
	ARG_MAX_LAG,
	ARG_OWNER
};

/* The parameters of the queries that write. */
enum
{
	W_SUBSCRIPTION,
	W_OWNER,
	W_TOPICS,
	W_HANDLER,
	W_MAX_ATTEMPTS,
	W_RETRY_DELAY,
	W_MAX_RETRY_DELAY,
	W_MAX_LAG,
	W_COLUMNS
};

#define WRITE_TYPES                                                                                \
	{                                                                                              \
		TEXTOID, NAMEOID, TEXTARRAYOID, TEXTOID, INT4OID, INTERVALOID, INTERVALOID, INTERVALOID    \
	}

static ExtensionQuery insertQuery = {
	.table = "subscription",
	.text = "INSERT INTO idempotency.subscription (subscription, number, owner, topics, handler,"
			" max_attempts, retry_delay, max_retry_delay, max_lag, created_at)"
			" VALUES ($1, pg_catalog.nextval('idempotency.subscription_number'),"
			" $2, $3, $4, $5, $6, $7, $8, pg_catalog.clock_timestamp())",
	.parameters = W_COLUMNS,
	.types = WRITE_TYPES,
};

static ExtensionQuery updateQuery = {
	.table = "subscription",
	.text = "UPDATE idempotency.subscription SET owner = $2, topics = $3, handler = $4,"
			" max_attempts = $5, retry_delay = $6, max_retry_delay = $7, max_lag = $8"
			" WHERE subscription" EQ "$1",
	.parameters = W_COLUMNS,
	.types = WRITE_TYPES,
};

/* The owner, and whether an option has another value, as a text. */
static ExtensionQuery compareQuery = {
	.table = "subscription",
	.text = "SELECT owner, ROW (owner, topics, handler, max_attempts, retry_delay, max_retry_delay,"
			" max_lag)::pg_catalog.text OPERATOR(pg_catalog.<>)"
			" ROW ($2, $3, $4, $5, $6, $7, $8)::pg_catalog.text"
			" FROM idempotency.subscription WHERE subscription" EQ "$1",
	.parameters = W_COLUMNS,
	.types = WRITE_TYPES,
	.results = {NAMEOID, BOOLOID},
};

/* What unsubscribe() does, in the order of the locks. */
#define DELETE_FROM(name)                                                                          \
	{                                                                                              \
		.table = name, .text = "DELETE FROM idempotency." name " WHERE subscription" EQ "$1",      \
		.parameters = 1, .types = {TEXTOID},                                                       \
	}

static ExtensionQuery deleteQueries[] = {DELETE_FROM("subscription"), DELETE_FROM("position"),
										 DELETE_FROM("parked")};

/*
 * StartsAtBeginning tells whether a new subscription starts at the beginning.
 */
static bool
StartsAtBeginning(FunctionCallInfo fcinfo)
{
	char *start;

	if (PG_ARGISNULL(ARG_START_AT))
		return false;
	start = text_to_cstring(PG_GETARG_TEXT_PP(ARG_START_AT));
	if (strcmp(start, "beginning") == 0)
		return true;
	if (strcmp(start, "now") != 0)
		ErrorBadArgument("start_at must be 'now' or 'beginning'",
						 "Pass 'beginning' for the events that the outbox still has, or omit it.");
	return false;
}

/*
 * MayConnect tells whether background workers can connect as a role.
 */
static bool
MayConnect(Oid role)
{
#ifdef SERVER_CONNECTS_WITHOUT_LOGIN
	return true;
#else
	HeapTuple tuple = SearchSysCache1(AUTHOID, ObjectIdGetDatum(role));
	bool may = HeapTupleIsValid(tuple) && ((Form_pg_authid) GETSTRUCT(tuple))->rolcanlogin;

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	return may;
#endif
}

/*
 * CheckStaysInPrefix throws 42501 if the login role has a scope prefix and the handler of
 * the subscription would run as another role, whose worker has the settings of its own login.
 */
static void
CheckStaysInPrefix(Oid owner)
{
	const char *prefix = ScopePrefix();

	if (prefix[0] == '\0' || owner == GetAuthenticatedUserId())
		return;
	ereport(ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("role \"%s\" cannot own the handler's subscription",
					GetUserNameFromId(owner, false)),
			 errdetail("The handler would run without the scope prefix \"%s\" of role \"%s\".",
					   prefix, GetUserNameFromId(GetAuthenticatedUserId(), false)),
			 errhint("Subscribe as the login role and leave out the owner, or let a role without a "
					 "scope prefix subscribe.")));
}

/*
 * OwnerFromArg returns the owner of the subscription: the caller, or a role of which the
 * caller is a member.  Throws 42501, and with a handler what CheckStaysInPrefix() and
 * EventHandlerCheck() do.
 */
static Oid
OwnerFromArg(FunctionCallInfo fcinfo)
{
	Oid owner = PG_ARGISNULL(ARG_OWNER) ? GetUserId() : PG_GETARG_OID(ARG_OWNER);
	const char *name = GetUserNameFromId(owner, false);

	if (!member_can_set_role(GetUserId(), owner))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must be a member of role \"%s\" to let it own a subscription", name),
				 errhint("Leave out the owner, or let a member of that role subscribe.")));
	if (PG_ARGISNULL(ARG_HANDLER))
		return owner;
	CheckStaysInPrefix(owner);

	/* The code of another role must not run as a superuser. */
	if (superuser_arg(owner))
		ereport(
			ERROR,
			(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
			 errmsg("a subscription with a handler must not be owned by a superuser"),
			 errdetail("A background worker would run the handler as \"%s\".", name),
			 errhint("Pass an owner that has the rights that the handler needs, and no more.")));
	if (!MayConnect(owner))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("role \"%s\" cannot own a subscription with a handler", name),
				 errdetail("The role cannot log in, and this server lets no worker connect as it."),
				 errhint("Use ALTER ROLE ... LOGIN, without a password.")));
	EventHandlerCheck(PG_GETARG_OID(ARG_HANDLER), owner);
	return owner;
}

/*
 * IntervalFromArg returns the interval of an argument.  Throws 22023 if it is negative,
 * or NULL where that is not allowed.
 */
static Datum
IntervalFromArg(FunctionCallInfo fcinfo, int arg, const char *what, bool mayBeNull, bool *isnull)
{
	*isnull = PG_ARGISNULL(arg);
	if (*isnull && mayBeNull)
		return (Datum) 0;
	if (*isnull || IntervalMicroseconds(PG_GETARG_INTERVAL_P(arg)) < 0)
		ErrorBadArgument(psprintf("%s must not be negative%s", what, mayBeNull ? "" : " or NULL"),
						 "Pass an interval such as '1 second', or leave it out.");
	return PG_GETARG_DATUM(arg);
}

/*
 * Options fills the parameters of a query that writes the subscription.
 */
static void
Options(FunctionCallInfo fcinfo, text *name, Oid owner, Datum *values, bool *isnull)
{
	NameData *ownerName = palloc0(sizeof(NameData));

	namestrcpy(ownerName, GetUserNameFromId(owner, false));
	memset(isnull, 0, W_COLUMNS * sizeof(bool));
	values[W_SUBSCRIPTION] = PointerGetDatum(name);
	values[W_OWNER] = NameGetDatum(ownerName);

	if (PG_ARGISNULL(ARG_TOPICS))
		ErrorBadArgument("topics are missing", "Pass patterns, such as ARRAY['order.*'].");
	TopicPatternsCheck(PG_GETARG_ARRAYTYPE_P(ARG_TOPICS));
	values[W_TOPICS] = PG_GETARG_DATUM(ARG_TOPICS);

	isnull[W_HANDLER] = PG_ARGISNULL(ARG_HANDLER);
	if (!isnull[W_HANDLER])
		values[W_HANDLER] =
			CStringGetTextDatum(format_procedure_qualified(PG_GETARG_OID(ARG_HANDLER)));

	if (PG_ARGISNULL(ARG_MAX_ATTEMPTS) || PG_GETARG_INT32(ARG_MAX_ATTEMPTS) < 1)
		ErrorBadArgument("max_attempts must be positive",
						 "Pass after how many failures an event is a dead letter.");
	values[W_MAX_ATTEMPTS] = PG_GETARG_DATUM(ARG_MAX_ATTEMPTS);
	values[W_RETRY_DELAY] =
		IntervalFromArg(fcinfo, ARG_RETRY_DELAY, "retry_delay", false, &isnull[W_RETRY_DELAY]);
	values[W_MAX_RETRY_DELAY] = IntervalFromArg(fcinfo, ARG_MAX_RETRY_DELAY, "max_retry_delay",
												false, &isnull[W_MAX_RETRY_DELAY]);
	values[W_MAX_LAG] = IntervalFromArg(fcinfo, ARG_MAX_LAG, "max_lag", true, &isnull[W_MAX_LAG]);
}

/*
 * NotifyRelay tells the relay to handle the events of the subscription from the commit
 * on, or to leave them to consumers.
 */
static void
NotifyRelay(const text *name)
{
	const Subscription *subscription = SubscriptionFind(name);

	InjectionPoint("subscribe-notify");
	if (subscription->handler != NULL)
		OutboxNotify.subscribed(subscription->number, get_role_oid(subscription->owner, false),
								&subscription->topics);
	else
		OutboxNotify.unsubscribed(subscription->number);
}

/*
 * LogChange logs that a subscription is changed, if an option gets another value.
 */
static void
LogChange(const text *name, Datum *values, const bool *isnull)
{
	const char *owner = NameStr(*DatumGetName(values[W_OWNER]));

	(void) ExtensionQueryRun(&compareQuery, values, isnull);
	if (DatumGetBool(ExtensionQueryValue(&compareQuery, 0, 2, NULL)))
	{
		const char *old = NameStr(*DatumGetName(ExtensionQueryValue(&compareQuery, 0, 1, NULL)));

		LogCall("subscribe",
				strcmp(old, owner) == 0
					? psprintf("subscription \"%s\" of role \"%s\" was changed",
							   text_to_cstring(name), owner)
					: psprintf("subscription \"%s\" of role \"%s\" belongs to role \"%s\" now",
							   text_to_cstring(name), old, owner));
	}
	ExtensionQueryEnd();
}

/*
 * subscribe(subscription, topics, handler, start_at, max_attempts, retry_delay,
 * max_retry_delay, max_lag, owner) RETURNS boolean: true if it is new
 */
Datum
idempotency_subscribe(PG_FUNCTION_ARGS)
{
	text *name = NameFromArg(fcinfo, ARG_SUBSCRIPTION, "subscription");
	bool beginning = StartsAtBeginning(fcinfo);
	Datum values[W_COLUMNS];
	bool isnull[W_COLUMNS];
	OutboxCursor start;
	bool isNew;

	PreventUnsafeCall(fcinfo, "idempotency.subscribe()");
	Options(fcinfo, name, OwnerFromArg(fcinfo), values, isnull);
	InjectionPoint("subscribe-lock");
	SubscriptionLockOrThrow(name);
	InjectionPoint("subscribe-look");

	/* Keep the events from the reaper, which does not see a new position before the commit */
	isNew = SubscriptionFind(name) == NULL;
	if (!isNew)
		(void) SubscriptionForCaller(name);
	else
	{
		InjectionPoint("subscribe-keep");
		OutboxKeepEvents();
	}

	/* Write the subscription, and give a new one its position */
	InjectionPoint("subscribe-write");
	if (!isNew)
		LogChange(name, values, isnull);
	(void) ExtensionQueryDo(isNew ? &insertQuery : &updateQuery, values, isnull);
	if (isNew)
	{
		InjectionPoint("subscribe-start");
		if (beginning)
			CursorInit(&start, 0);
		else
			CursorStartNow(&start);
		InjectionPoint("subscribe-position");
		PositionCreate(name, &start);
	}
	NotifyRelay(name);
	PG_RETURN_BOOL(isNew);
}

/*
 * unsubscribe(subscription) RETURNS boolean: true if there was one
 */
Datum
idempotency_unsubscribe(PG_FUNCTION_ARGS)
{
	text *name = NameFromArg(fcinfo, 0, "subscription");
	Datum values[] = {PointerGetDatum(name)};
	const Subscription *subscription;
	uint64 rows = 0;

	PreventUnsafeCall(fcinfo, "idempotency.unsubscribe()");
	InjectionPoint("unsubscribe-lock");
	SubscriptionLockOrThrow(name);
	InjectionPoint("unsubscribe-look");
	if (SubscriptionFind(name) == NULL)
		PG_RETURN_BOOL(false);
	subscription = SubscriptionForCaller(name);
	for (size_t i = 0; i < lengthof(deleteQueries); i++)
	{
		InjectionPoint("unsubscribe-delete");
		rows = ExtensionQueryDo(&deleteQueries[i], values, NULL);
	}
	LogCall("unsubscribe",
			psprintf("subscription \"%s\" of role \"%s\", with %llu failed or waiting events",
					 text_to_cstring(name), subscription->owner, (unsigned long long) rows));
	InjectionPoint("unsubscribe-notify");
	OutboxNotify.unsubscribed(subscription->number);
	PG_RETURN_BOOL(true);
}
