/*-------------------------------------------------------------------------
 *
 * delivery/fetch.c
 *	  fetch(), ack(), nack(), extend() and redrive(): delivery by SQL.
 *
 * Locks: the subscription's, and ACCESS SHARE on the tables, to the end of the
 * transaction, once something is written, and in the last attempt.  A fetch() that waits
 * holds neither while it sleeps, but like any statement its snapshot: the extension can
 * be dropped and created again meanwhile.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "fmgr.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/reevaluation.h"
#include "base/relation.h"
#include "base/stats.h"
#include "base/timing.h"
#include "base/wakeup.h"
#include "delivery/delivery.h"
#include "delivery/parked.h"
#include "outbox/notify.h"
#include "outbox/table.h"

PG_FUNCTION_INFO_V1(idempotency_fetch);
PG_FUNCTION_INFO_V1(idempotency_ack);
PG_FUNCTION_INFO_V1(idempotency_nack);
PG_FUNCTION_INFO_V1(idempotency_extend);
PG_FUNCTION_INFO_V1(idempotency_redrive);

/*
 * FetchedSubscription returns the subscription of that name.  Throws 42704, 42501 if the
 * caller has no right to it, and 55000 if it has a handler.
 */
static Subscription *
FetchedSubscription(text *name)
{
	Subscription *subscription = SubscriptionForCaller(name);

	if (subscription->handler != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("subscription \"%s\" has a handler", text_to_cstring(subscription->name)),
				 errdetail("Background workers call %s with its events.", subscription->handler),
				 errhint("Subscribe again without a handler to fetch them.")));
	return subscription;
}

/*
 * SubscriptionFromArg returns the subscription of the first argument, as
 * FetchedSubscription() does.
 */
static Subscription *
SubscriptionFromArg(FunctionCallInfo fcinfo, const char *function)
{
	PreventUnsafeCall(fcinfo, function);
	return FetchedSubscription(NameFromArg(fcinfo, 0, "subscription"));
}

/*
 * BatchFromArg returns the batch number of the second argument.
 */
static int64
BatchFromArg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(1))
		ErrorBadArgument("batch is missing", "Pass the batch number that the events have.");
	return PG_GETARG_INT64(1);
}

/*
 * LeaseOrThrow returns the lease of an argument.  Throws 22023.
 */
static const Interval *
LeaseOrThrow(FunctionCallInfo fcinfo, int arg)
{
	const Interval *lease = LeaseFromArg(fcinfo, arg);

	if (lease == NULL)
		ErrorBadArgument("lease is missing",
						 "Pass how long no other consumer gets the batch, such as '30 seconds'.");
	return lease;
}

/* ----------------------------------------------------------------
 * fetch()
 * ----------------------------------------------------------------
 */

/* The time between attempts while another transaction has the subscription. */
#define BUSY_MS 10

/*
 * MillisecondsUntil returns the time until then; 0 if that has passed.
 */
static long
MillisecondsUntil(TimestampTz then)
{
	return TimestampDifferenceMilliseconds(GetCurrentTimestamp(), then);
}

/*
 * AttemptFetch fetches once, unless another transaction has the subscription.  The
 * subscription is looked up under the lock, which a change of its topics needs: an event
 * that only the new topics match must not be passed.
 */
static void
AttemptFetch(text *name, const FetchPlan *plan, Batch *batch)
{
	bool locked = SubscriptionLock(name, 0);
	Subscription *subscription = FetchedSubscription(name);

	memset(batch, 0, sizeof(Batch));
	if (!locked)
	{
		/* Its holder can be about to commit, after it has sent the wakeup. */
		batch->next = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), BUSY_MS);
		return;
	}
	DeliveryFetch(subscription, plan, batch);
	if (batch->events == NIL && !batch->wrote)
		SubscriptionUnlock(name);
}

/*
 * AttemptEnd ends an attempt, and keeps its locks for the transaction or releases them.
 */
static void
AttemptEnd(ResourceOwner attempt, bool keep)
{
	CurrentResourceOwner = ResourceOwnerGetParent(attempt);
	ResourceOwnerRelease(attempt, RESOURCE_RELEASE_BEFORE_LOCKS, keep, false);
	ResourceOwnerRelease(attempt, RESOURCE_RELEASE_LOCKS, keep, false);
	ResourceOwnerRelease(attempt, RESOURCE_RELEASE_AFTER_LOCKS, keep, false);
	ResourceOwnerDelete(attempt);
}

/*
 * AttemptBegin begins an attempt: the locks on tables that it takes belong to it, and
 * can be released without those that the transaction had before.  The outbox is locked
 * first, as by DROP EXTENSION, which so does not deadlock with the call.  Throws 55000 if
 * the extension was dropped.
 */
static ResourceOwner
AttemptBegin(Oid function)
{
	ResourceOwner attempt = ResourceOwnerCreate(CurrentResourceOwner, "idempotency fetch");

	CurrentResourceOwner = attempt;
	(void) ExtensionRelationLock("outbox", AccessShareLock, false);
	if (!SearchSysCacheExists1(PROCOID, ObjectIdGetDatum(function)))
		ErrorExtensionReplaced();
	return attempt;
}

/*
 * FetchWithin fetches until there are events, for at most "waitMs".  It ends after an
 * attempt that has written something: the lock stays to the commit, and progress is safe
 * only then.  Each attempt has memory of its own; that of the last one is kept.
 */
static void
FetchWithin(Oid function, text *name, FetchPlan *plan, int waitMs, Batch *batch)
{
	TimestampTz end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), waitMs);
	MemoryContext attempt =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency fetch", ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(attempt);

	for (int count = 0;; count++)
	{
		long left = MillisecondsUntil(end);
		ResourceOwner locks;
		bool done;

		MemoryContextReset(attempt);
		plan->last = left <= 0;
		if (!plan->last)
			WakeupPrepare(OutboxChannel());
		locks = AttemptBegin(function);
		AttemptFetch(name, plan, batch);
		done = batch->events != NIL || batch->wrote || plan->last;
		AttemptEnd(locks, done);
		if (done)
			break;
		if (batch->next != 0)
			left = Min(left, MillisecondsUntil(batch->next) + 1);
		WakeupSleep(OutboxChannel(), count, left);
	}
	WakeupCancel();
	MemoryContextSwitchTo(caller);
}

/*
 * fetch(subscription, max_events, wait, lease) RETURNS SETOF event
 */
Datum
idempotency_fetch(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	int waitMs = WaitFromArg(fcinfo, 2, 0);
	FetchPlan plan = {.lease = LeaseOrThrow(fcinfo, 3)};
	ListCell *cell;
	Batch batch;
	text *name;

	if (PG_ARGISNULL(1) || PG_GETARG_INT32(1) < 1)
		ErrorBadArgument("max_events must be positive", "Pass the maximum number of events.");
	plan.max = PG_GETARG_INT32(1);
	name = NameFromArg(fcinfo, 0, "subscription");
	PreventUnsafeCall(fcinfo, "idempotency.fetch()");
	if (IsolationUsesXactSnapshot())
		ereport(ERROR, (errcode(ERRCODE_ACTIVE_SQL_TRANSACTION),
						errmsg("events are delivered in READ COMMITTED only"),
						errdetail("A fixed snapshot does not show what was published after it."),
						errhint("Use SET TRANSACTION ISOLATION LEVEL READ COMMITTED.")));

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	EventCheckRow(rsinfo->setDesc);
	FetchWithin(fcinfo->flinfo->fn_oid, name, &plan, waitMs, &batch);
	foreach (cell, batch.events)
	{
		Event *event = lfirst(cell);

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, event->values, event->isnull);
	}
	return (Datum) 0;
}

/* ----------------------------------------------------------------
 * ack(), nack(), extend(), redrive()
 * ----------------------------------------------------------------
 */

/*
 * ack(subscription, batch) RETURNS void
 */
Datum
idempotency_ack(PG_FUNCTION_ARGS)
{
	int64 batch = BatchFromArg(fcinfo);

	DeliveryAck(SubscriptionFromArg(fcinfo, "idempotency.ack()"), batch, NIL);
	PG_RETURN_VOID();
}

/*
 * ClippedError returns the part of an error that is kept.
 */
static const text *
ClippedError(const text *error)
{
	int bytes = VARSIZE_ANY_EXHDR(error);

	if (bytes <= ERROR_BYTES)
		return error;
	return cstring_to_text_with_len(VARDATA_ANY(error),
									pg_mbcliplen(VARDATA_ANY(error), bytes, ERROR_BYTES));
}

/*
 * nack(subscription, batch, event_id, error, retry_in) RETURNS timestamptz: when the
 * event is redelivered; NULL if it is a dead letter.  Without an event, the whole batch
 * is given back.
 */
Datum
idempotency_nack(PG_FUNCTION_ARGS)
{
	int64 batch = BatchFromArg(fcinfo);
	const text *error = PG_ARGISNULL(3) ? NULL : ClippedError(PG_GETARG_TEXT_PP(3));
	const Interval *retryIn = PG_ARGISNULL(4) ? NULL : PG_GETARG_INTERVAL_P(4);
	Subscription *subscription = SubscriptionFromArg(fcinfo, "idempotency.nack()");
	TimestampTz retryAt;

	if (retryIn != NULL && IntervalMicroseconds(retryIn) < 0)
		ErrorBadArgument("retry_in must not be negative",
						 "Pass 0 for a retry at once, or NULL for the subscription's delay.");
	if (PG_ARGISNULL(2))
	{
		DeliveryGiveBack(subscription, batch, false);
		PG_RETURN_TIMESTAMPTZ(GetCurrentTimestamp());
	}
	retryAt = DeliveryNack(subscription, batch, PG_GETARG_UUID_P(2), error, retryIn);
	if (retryAt == 0)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(retryAt);
}

/*
 * extend(subscription, batch, lease) RETURNS timestamptz
 */
Datum
idempotency_extend(PG_FUNCTION_ARGS)
{
	int64 batch = BatchFromArg(fcinfo);
	const Interval *lease = LeaseOrThrow(fcinfo, 2);

	PG_RETURN_TIMESTAMPTZ(
		DeliveryExtend(SubscriptionFromArg(fcinfo, "idempotency.extend()"), batch, lease));
}

/*
 * redrive(subscription, event_id) RETURNS bigint: how many dead letters are redelivered
 */
Datum
idempotency_redrive(PG_FUNCTION_ARGS)
{
	text *name = NameFromArg(fcinfo, 0, "subscription");
	Subscription *subscription;
	int64 count;

	PreventUnsafeCall(fcinfo, "idempotency.redrive()");
	subscription = SubscriptionForCaller(name);
	InjectionPoint("redrive-lock");
	SubscriptionLockOrThrow(subscription->name);
	InjectionPoint("redrive-update");
	count = ParkedRedrive(subscription->name, PG_ARGISNULL(1) ? NULL : PG_GETARG_UUID_P(1));
	InjectionPoint("redrive-notify");
	if (count > 0)
	{
		LogCall("redrive",
				psprintf("%lld %s of subscription \"%s\"", (long long) count,
						 count == 1 ? "dead letter" : "dead letters", text_to_cstring(name)));
		WakeupAfterCommit(OutboxChannel());
		OutboxNotify.redriven(subscription->number);
	}
	CountEvents(COUNT_REDRIVEN, count);
	PG_RETURN_INT64(count);
}
