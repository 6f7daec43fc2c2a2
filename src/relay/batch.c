/*-------------------------------------------------------------------------
 *
 * relay/batch.c
 *	  The batch in flight: the events that a worker of the relay has fetched, and
 *	  calls the handler with.
 *
 * That a batch is in flight is committed before the handler is called with any event
 * of it.  The README says how an event that ends its worker is found.
 *
 * Locks: the subscription's, which the caller has.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"

#include "base/errors.h"
#include "base/name.h"
#include "delivery/parked.h"
#include "keys/transaction.h"
#include "relay/registry.h"
#include "relay/worker.h"

/*
 * The most events of a batch: each is a subtransaction, and the server caches 64 of
 * those, which keeps the snapshots of other sessions cheap.
 */
#define BATCH_EVENTS 60

/* How long a consumer does not get a batch that a worker has left in flight. */
static const Interval lease = {.time = 30 * USECS_PER_SEC};

/* The error of an event that ends its worker. */
#define KILLED "the worker ended while it handled this event"

static Batch current;	 /* number 0: none is in flight */
static bool called;		 /* the handler, with an event of it */
static bool commitFails; /* from now on, an error counts as a failure of one of its events */
static MemoryContext currentContext;
static MemoryContext nextContext; /* of a batch that is fetched before the current one is done */

/* Why the last batch could not be committed, or NULL. */
static text *failure = NULL;

/*
 * RelayBatchInit prepares for batches; called once.
 */
void
RelayBatchInit(void)
{
	currentContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
	nextContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
}

/*
 * RelayBatchNumber returns the number of the batch in flight, or 0.
 */
int64
RelayBatchNumber(void)
{
	return current.number;
}

/*
 * KeepFailure keeps why the batch cannot be committed, for the step that recovers it.
 */
static void
KeepFailure(const text *why)
{
	MemoryContext caller = MemoryContextSwitchTo(TopMemoryContext);

	if (failure == NULL)
		failure = TextCopy(why);
	MemoryContextSwitchTo(caller);
}

static void
ForgetFailure(void)
{
	if (failure != NULL)
		pfree(failure);
	failure = NULL;
}

/* ----------------------------------------------------------------
 * The life of a batch
 * ----------------------------------------------------------------
 */

/*
 * HasKilled tells whether one of the events was alone in a batch whose worker ended.
 */
static bool
HasKilled(const Subscription *subscription, const List *events)
{
	return ParkedHasError(subscription->name, events, cstring_to_text(KILLED));
}

/*
 * RelayBatchFetch fills "next" with the next batch.  If one of its events has ended a
 * worker before, each event becomes a batch of its own.
 */
void
RelayBatchFetch(const Subscription *subscription, bool last, Batch *next)
{
	FetchPlan plan = {.max = BATCH_EVENTS, .lease = &lease, .last = last};
	MemoryContext caller = MemoryContextSwitchTo(nextContext);

	DeliveryFetch(subscription, &plan, next);
	if (list_length(next->events) > 1 && next->hasParked && HasKilled(subscription, next->events))
	{
		DeliveryGiveBack(subscription, next->number, true);
		DeliveryFetch(subscription, &plan, next);
	}
	if (next->events == NIL)
		next->number = 0;
	MemoryContextSwitchTo(caller);
}

/*
 * RelayBatchSet sets, when a step has committed, the batch that is in flight now.
 */
void
RelayBatchSet(const RelayJob *job, const Batch *next)
{
	MemoryContext old = currentContext;

	if (called)
		SchedulerProgress(job);
	current = *next;
	called = commitFails = false;
	currentContext = nextContext;
	nextContext = old;
	MemoryContextReset(nextContext);

	if (current.number != 0)
		SchedulerSetUnhandled(job, 0);
	ForgetFailure();
}

/*
 * RelayBatchBeginCommit makes any error from now on count as a failure of the batch: its
 * commit begins.
 */
void
RelayBatchBeginCommit(void)
{
	commitFails = called;
}

/*
 * RelayBatchRolledBack records that the step failed, and returns whether the batch has
 * caused that; then the next step recovers it.  If not, the batch counts as one that
 * no handler was called with.
 */
bool
RelayBatchRolledBack(const RelayJob *job, const ErrorData *error)
{
	bool failed = commitFails;

	if (failed)
		KeepFailure(ErrorAsText(error));
	else if (current.number != 0)
		SchedulerSetUnhandled(job, current.number);
	MemoryContextReset(nextContext);
	current.number = 0;
	called = commitFails = false;
	return failed;
}

/*
 * RelayBatchLeave leaves the subscription, and the batch in flight, if any.
 */
void
RelayBatchLeave(const RelayJob *job)
{
	if (current.number != 0 && !called)
		SchedulerSetUnhandled(job, current.number);
	current.number = 0;
	ForgetFailure();
}

/* ----------------------------------------------------------------
 * Events
 * ----------------------------------------------------------------
 */

/*
 * Fail parks an event of a batch that has failed.  The log gets a dead letter, unless it had
 * many of the subscription since the last survey, which logs the number of the others.
 */
static void
Fail(const RelayJob *job, const Subscription *subscription, const Batch *batch,
	 const ListCell *event, const text *error)
{
	Datum id;

	if (DeliveryFail(subscription, batch->number, batch->events, event, error) != 0 ||
		!SchedulerMayLog(job))
		return;
	id = ((Event *) lfirst(event))->values[EVENT_ID];
	ereport(LOG, (errmsg("event %s of subscription \"%s\" is a dead letter now",
						 DatumGetCString(DirectFunctionCall1(uuid_out, id)),
						 text_to_cstring(subscription->name)),
				  errdetail_internal("%s", ClipForLog(text_to_cstring(error))),
				  errhint("idempotency.redrive() redelivers it.")));
}

/*
 * RelayBatchRecover recovers a batch that a worker or a consumer has left in flight.
 */
void
RelayBatchRecover(const RelayJob *job, const Subscription *subscription)
{
	Batch left;

	if (!DeliveryOutstanding(subscription, &left))
		return;
	if (left.events == NIL || SchedulerIsUnhandled(job, left.number))
		DeliveryGiveBack(subscription, left.number, false);
	else if (list_length(left.events) > 1)
		DeliveryGiveBack(subscription, left.number, true);
	else
	{
		ListCell *event = list_head(left.events);

		/* A crash of the server may have another cause, but hardly twice */
		if (failure != NULL)
			Fail(job, subscription, &left, event, failure);
		else if (HasKilled(subscription, left.events))
			Fail(job, subscription, &left, event, cstring_to_text(KILLED));
		else
			DeliverySuspect(subscription, left.number, left.events, event, cstring_to_text(KILLED));
		DeliveryAck(subscription, left.number, NIL);
	}
}

/*
 * IsHeld tells whether an event has left the batch with an earlier one of its aggregate that
 * has failed.
 */
static bool
IsHeld(const Event *event, const List *failed)
{
	ListCell *cell;

	foreach (cell, failed)
	{
		if (EventsShareAggregate(event, lfirst(cell)))
			return true;
	}
	return false;
}

/*
 * ThrowUnlessEventFailed throws, to roll the batch back, if it was not the event that
 * made the handler fail: the transaction cannot commit any more, or the handler was
 * dropped, or another function has replaced it.
 */
static void
ThrowUnlessEventFailed(const Subscription *subscription, EventHandler *handler, const text *error)
{
	EventHandler now;

	if (TransactionMustAbort())
	{
		commitFails = true;
		KeepFailure(error);
		CheckMayCommit(false);
	}
	AcceptInvalidationMessages();
	EventHandlerFind(subscription, handler->owner, &now);
	if (handler->function.fn_oid != now.function.fn_oid ||
		handler->function.fn_addr != now.function.fn_addr)
		ereport(ERROR, (errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
						errmsg("handler %s was replaced by a concurrent transaction",
							   subscription->handler)));
}

/*
 * HandleEvent calls the handler with an event of the batch.  If that fails, it is added to
 * "failed".
 */
static void
HandleEvent(const RelayJob *job, const Subscription *subscription, EventHandler *handler,
			ListCell *cell, List **failed)
{
	text *error;

	if (IsHeld(lfirst(cell), *failed) || EventHandle(handler, lfirst(cell), &error))
		return;
	ThrowUnlessEventFailed(subscription, handler, error);
	Fail(job, subscription, &current, cell, error);
	*failed = lappend(*failed, lfirst(cell));
}

/*
 * Rest returns the events of the batch after one, without those that have left it with an
 * event that failed.
 */
static List *
Rest(const ListCell *cell, const List *failed)
{
	List *rest = NIL;

	for_each_cell(cell, current.events, lnext(current.events, cell))
	{
		if (!IsHeld(lfirst(cell), failed))
			rest = lappend(rest, lfirst(cell));
	}
	return rest;
}

/*
 * RelayBatchHandle calls the handler with the events of the batch, and acknowledges
 * them; but not those that are left when the step must commit, or the worker leave.
 * Returns false if the handler has removed the subscription.
 */
bool
RelayBatchHandle(const RelayJob *job, const Subscription *subscription, EventHandler *handler)
{
	List *failed = NIL;
	List *rest = NIL;
	ListCell *cell;

	called = true;
	InjectionPoint("relay-handle");
	foreach (cell, current.events)
	{
		HandleEvent(job, subscription, handler, cell, &failed);
		if (RelayHasChanges() && SubscriptionFindNumber(job->number) == NULL)
			return false;
		if (RelayMustCommit() || RelayMustLeave())
		{
			rest = Rest(cell, failed);
			break;
		}
	}

	InjectionPoint("relay-acknowledge");
	DeliveryAck(subscription, current.number, rest);
	return true;
}
