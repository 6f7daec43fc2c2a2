/*-------------------------------------------------------------------------
 *
 * fetch.c
 *	  fetch(), ack(), nack(), extend() and redrive(): delivery by SQL.
 *
 * Locks: the subscription's, and ACCESS SHARE on the tables, to the end of the
 * transaction, once there is something to be changed, and in the last look.  A fetch()
 * that waits holds neither while it sleeps, but like any statement its snapshot.  The
 * extension may be dropped then, and made anew.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/resowner.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"

#include "compat.h"
#include "delivery.h"
#include "errors.h"
#include "guc.h"
#include "outboxerrors.h"
#include "outboxtable.h"
#include "owntable.h"
#include "parked.h"
#include "relaynote.h"
#include "stats.h"
#include "timing.h"
#include "wakeup.h"

PG_FUNCTION_INFO_V1(idempotency_fetch);
PG_FUNCTION_INFO_V1(idempotency_ack);
PG_FUNCTION_INFO_V1(idempotency_nack);
PG_FUNCTION_INFO_V1(idempotency_extend);
PG_FUNCTION_INFO_V1(idempotency_redrive);

/*
 * FetchedSubscription returns the subscription of that name, if it is the
 * caller's to read and has no handler.
 */
static Subscription *
FetchedSubscription(text *name)
{
	Subscription *subscription = SubscriptionForCaller(name);

	if (subscription->handler != NULL)
		ErrorHasHandler(subscription->name, subscription->handler);
	return subscription;
}

/*
 * SubscriptionFromArg returns the subscription that the first argument names, as
 * above.
 */
static Subscription *
SubscriptionFromArg(FunctionCallInfo fcinfo, const char *function)
{
	PreventCommandIfReadOnly(function);
	return FetchedSubscription(NameFromArg(fcinfo, 0, "subscription"));
}

/*
 * BatchFromArg returns the number of the batch that the second argument passes.
 */
static int64
BatchFromArg(FunctionCallInfo fcinfo)
{
	if (PG_ARGISNULL(1))
		ErrorBadArgument("batch is missing", "Pass the batch that the events bear.");
	return PG_GETARG_INT64(1);
}

/*
 * LeaseOrThrow returns the lease that an argument passes.  Throws 22023.
 */
static const Interval *
LeaseOrThrow(FunctionCallInfo fcinfo, int arg)
{
	const Interval *lease = LeaseFromArg(fcinfo, arg);

	if (lease == NULL)
		ErrorBadArgument("lease is missing",
						 "Pass how long nobody else gets the batch, such as '30 seconds'.");
	return lease;
}

/* ----------------------------------------------------------------
 * fetch()
 * ----------------------------------------------------------------
 */

/* How soon a fetch looks again at a subscription that another consumer is at. */
#define BUSY_MS 10

/*
 * MillisecondsUntil returns how long it is until then; 0 if that has passed.
 */
static long
MillisecondsUntil(TimestampTz then)
{
	return TimestampDifferenceMilliseconds(GetCurrentTimestamp(), then);
}

/*
 * TryFetch looks once, unless another consumer is at it.  The subscription is
 * looked up under the lock, since whoever changes its topics holds that: an event
 * that only the new ones mean must not be passed by.
 */
static void
TryFetch(text *name, const FetchPlan *plan, Batch *batch)
{
	bool locked = SubscriptionLock(name, 0);
	Subscription *subscription = FetchedSubscription(name);

	memset(batch, 0, sizeof(Batch));
	if (!locked)
	{
		/* Whoever has it may be about to commit: we may have been woken by him. */
		batch->next = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), BUSY_MS);
		return;
	}
	DeliveryFetch(subscription, plan, batch);
	if (batch->events == NIL && !batch->wrote)
		SubscriptionUnlock(name);
}

/* What a look reads, in the order in which it is locked. */
static const char *const lookedAt[] = {"subscription", "position", "parked", "outbox"};

/*
 * LookEnd ends a look, and keeps its locks for the transaction or lets go of them.
 */
static void
LookEnd(ResourceOwner look, bool keep)
{
	CurrentResourceOwner = ResourceOwnerGetParent(look);
	ResourceOwnerRelease(look, RESOURCE_RELEASE_BEFORE_LOCKS, keep, false);
	ResourceOwnerRelease(look, RESOURCE_RELEASE_LOCKS, keep, false);
	ResourceOwnerRelease(look, RESOURCE_RELEASE_AFTER_LOCKS, keep, false);
	ResourceOwnerDelete(look);
}

/*
 * LookBegin begins a look: whatever locks on tables it takes belong to it, and can be let
 * go of without those that the transaction had before.  The tables are locked first, all
 * or none, so that nothing is held that a DROP EXTENSION waits for which holds others of
 * them.  Throws 55000 if the extension, and with it the function that was called, is no
 * longer there.
 */
static ResourceOwner
LookBegin(Oid function)
{
	for (;;)
	{
		ResourceOwner look = ResourceOwnerCreate(CurrentResourceOwner, "idempotency fetch");
		OwnLock lock;

		CurrentResourceOwner = look;
		lock = OwnRelationsLock(lookedAt, lengthof(lookedAt));
		AcceptInvalidationMessages();
		if (!SearchSysCacheExists1(PROCOID, ObjectIdGetDatum(function)))
			ErrorExtensionReplaced();
		if (lock != OWN_BUSY)
			return look;
		LookEnd(look, false);
		OwnRelationsAwait(lookedAt, lengthof(lookedAt));
	}
}

/*
 * FetchWithin looks until there is something, for at most "waitMs", and no longer once
 * it has written down how far it has come: the lock stays to our commit, and what a
 * look has done is safe only then.  Each look has memory of its own; the last one's
 * stays.
 */
static void
FetchWithin(Oid function, text *name, FetchPlan *plan, int waitMs, Batch *batch)
{
	TimestampTz end = TimestampTzPlusMilliseconds(GetCurrentTimestamp(), waitMs);
	MemoryContext look =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency fetch", ALLOCSET_DEFAULT_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(look);

	for (int round = 0;; round++)
	{
		long left = MillisecondsUntil(end);
		ResourceOwner locks;
		bool done;

		MemoryContextReset(look);
		plan->last = left <= 0;
		if (!plan->last)
			WakeupPrepare(OutboxChannel());
		locks = LookBegin(function);
		TryFetch(name, plan, batch);
		done = batch->events != NIL || batch->wrote || plan->last;
		LookEnd(locks, done);
		if (done)
			break;
		if (batch->next != 0)
			left = Min(left, MillisecondsUntil(batch->next) + 1);
		WakeupSleep(OutboxChannel(), round, left);
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
		ErrorBadArgument("max_events must be positive", "Pass how many events to get at most.");
	plan.max = PG_GETARG_INT32(1);
	name = NameFromArg(fcinfo, 0, "subscription");
	PreventCommandIfReadOnly("idempotency.fetch()");
	if (IsolationUsesXactSnapshot())
		ErrorFetchSnapshot();

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
 * What becomes of it
 * ----------------------------------------------------------------
 */

/*
 * ack(subscription, batch) RETURNS void
 */
Datum
idempotency_ack(PG_FUNCTION_ARGS)
{
	int64 batch = BatchFromArg(fcinfo);

	DeliveryAck(SubscriptionFromArg(fcinfo, "idempotency.ack()"), batch);
	PG_RETURN_VOID();
}

/*
 * nack(subscription, batch, event_id, error, retry_in) RETURNS timestamptz:
 * when the event is given again; NULL if never.  Without an event, the whole
 * batch is given back.
 */
Datum
idempotency_nack(PG_FUNCTION_ARGS)
{
	int64 batch = BatchFromArg(fcinfo);
	const text *error = PG_ARGISNULL(3) ? NULL : PG_GETARG_TEXT_PP(3);
	const Interval *retryIn = PG_ARGISNULL(4) ? NULL : PG_GETARG_INTERVAL_P(4);
	Subscription *subscription = SubscriptionFromArg(fcinfo, "idempotency.nack()");
	TimestampTz retryAt;

	if (retryIn != NULL && IntervalMicroseconds(retryIn) < 0)
		ErrorBadArgument("retry_in must not be negative",
						 "Pass 0 to get it again at once, or NULL for the subscription's delay.");
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
 * redrive(subscription, event_id) RETURNS bigint: how many dead letters are
 * given once more
 */
Datum
idempotency_redrive(PG_FUNCTION_ARGS)
{
	text *name = NameFromArg(fcinfo, 0, "subscription");
	Subscription *subscription;
	int64 count;

	PreventCommandIfReadOnly("idempotency.redrive()");
	subscription = SubscriptionForCaller(name);
	InjectionPoint("redrive-lock");
	if (!SubscriptionLock(subscription->name, DefaultWait))
		ErrorSubscriptionBusy(subscription->name);
	InjectionPoint("redrive-takeout");
	count = ParkedRedrive(subscription->name, PG_ARGISNULL(1) ? NULL : PG_GETARG_UUID_P(1));
	InjectionPoint("redrive-tell");
	if (count > 0)
	{
		WakeupAfterCommit(OutboxChannel());
		RelayAfterRedrive(subscription->number);
	}
	CountEvents(COUNT_REDRIVEN, count);
	PG_RETURN_INT64(count);
}
