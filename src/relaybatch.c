/*-------------------------------------------------------------------------
 *
 * relaybatch.c
 *	  The batch of events that a worker of the relay has fetched, and gives to
 *	  the handler.
 *
 * That a batch is out is committed before the handler sees any of it.  So whoever
 * comes to a subscription and finds a batch out knows that his predecessor did not
 * survive it, or could not commit it.  Then its events are given one by one, each as
 * a batch of its own; and one that is such a batch has failed, which counts as an
 * attempt.  So one that kills its worker becomes a dead letter like any other.
 *
 * The same is done when the transaction cannot commit: when a claim was lost, say.
 * If it was rolled back for another reason, or its worker ended before the handler
 * saw any of it, the batch is given again as it was.  The registry remembers that.
 *
 * Events live in one of two contexts: those of the batch that is out, and those of
 * the next one, which is fetched before the first is done.
 *
 * Locks: the subscription's, which the caller has.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/memutils.h"

#include "keyname.h"
#include "outboxerrors.h"
#include "parked.h"
#include "relayinternal.h"
#include "relaynote.h"
#include "serverlog.h"
#include "xact.h"

/*
 * So many events are a batch, or fewer: each is a subtransaction, and the server
 * keeps 64 of those at hand, so that others' snapshots stay cheap.
 */
#define BATCH_EVENTS 60

/* How many the next one is to have: not many more than fit into a transaction. */
static int wanted = BATCH_EVENTS;

/* How long a batch that a worker has left behind is kept from a consumer. */
static const Interval lease = {.time = 30 * USECS_PER_SEC};

/* What is noted of an event that ends its worker. */
#define KILLED "the worker ended while it handled this event"

static Batch out;	 /* number 0: none is */
static bool touched; /* the handler has seen some of it */
static bool blamed;	 /* and if there is an error now, that is why */
static MemoryContext outContext;
static MemoryContext nextContext;

/* What the predecessor has left behind was dealt with. */
static bool inherited = false;

/* Why the batch that was out could not be committed, or NULL. */
static text *failure = NULL;

/*
 * RelayBatchInit prepares for batches; called once.
 */
void
RelayBatchInit(void)
{
	outContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
	nextContext =
		AllocSetContextCreate(TopMemoryContext, "idempotency batch", ALLOCSET_DEFAULT_SIZES);
}

/*
 * RelayBatchIsOut tells whether a batch is out.
 */
bool
RelayBatchIsOut(void)
{
	return out.number != 0;
}

/*
 * KeepFailure keeps why the batch that is out cannot be committed, for the step
 * that deals with it.
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
 * Coming and going
 * ----------------------------------------------------------------
 */

/*
 * RelayBatchFetch fills "next" with the next batch.  One among whose events there is one
 * that has ended a worker before is given singly.
 */
void
RelayBatchFetch(const Subscription *subscription, bool last, Batch *next)
{
	FetchPlan plan = {.max = wanted, .lease = &lease, .last = last};
	MemoryContext caller = MemoryContextSwitchTo(nextContext);

	DeliveryFetch(subscription, &plan, next);
	if (list_length(next->events) > 1 &&
		ParkedHasError(subscription->name, next->events, cstring_to_text(KILLED)))
	{
		DeliveryGiveBack(subscription, next->number, true);
		DeliveryFetch(subscription, &plan, next);
	}
	if (next->events == NIL)
		next->number = 0;
	MemoryContextSwitchTo(caller);
}

/*
 * RelayBatchPutOut notes, when a step has committed, which batch is out.  What the
 * registry remembers of those before is over with it.
 */
void
RelayBatchPutOut(const RelayTask *task, const Batch *next)
{
	MemoryContext old = outContext;

	if (touched)
		RegistryProgress(task);
	out = *next;
	touched = blamed = false;
	outContext = nextContext;
	nextContext = old;
	MemoryContextReset(nextContext);

	if (out.number != 0)
		RegistrySetUntouched(task, 0);
	inherited = true;
	ForgetFailure();
}

/*
 * RelayBatchBlame says that the batch is to blame if the transaction fails from now on.
 */
void
RelayBatchBlame(void)
{
	blamed = touched;
}

/*
 * RelayBatchRolledBack notes that the step failed, and returns whether the batch is to
 * blame: then the next step deals with it.  If not, it is as if no handler had seen
 * it.
 */
bool
RelayBatchRolledBack(const RelayTask *task, const ErrorData *error)
{
	bool guilty = blamed;

	if (guilty)
		KeepFailure(ErrorAsText(error));
	else if (out.number != 0)
		RegistrySetUntouched(task, out.number);
	MemoryContextReset(nextContext);
	out.number = 0;
	inherited = touched = blamed = false;
	return guilty;
}

/*
 * RelayBatchGiveBack gives the batch back as it is.
 */
void
RelayBatchGiveBack(const Subscription *subscription)
{
	DeliveryGiveBack(subscription, out.number, false);
}

/*
 * RelayBatchDisown notes in the registry that no event of the batch that is out has caused
 * the end of this worker.
 */
void
RelayBatchDisown(const RelayTask *task)
{
	RegistrySetUntouched(task, out.number);
}

/*
 * RelayBatchLeave leaves the subscription, and with it the batch that is out, if any.
 */
void
RelayBatchLeave(const RelayTask *task)
{
	if (out.number != 0 && !touched)
		RegistrySetUntouched(task, out.number);
	out.number = 0;
	inherited = false;
	wanted = BATCH_EVENTS;
	ForgetFailure();
}

/* ----------------------------------------------------------------
 * Events
 * ----------------------------------------------------------------
 */

/*
 * Fail parks an event of a batch that the handler did not take.  Returns whether
 * those behind it wait.
 */
static bool
Fail(const Subscription *subscription, const Batch *batch, const ListCell *event, const text *error)
{
	if (DeliveryFail(subscription, batch->number, batch->events, event, error) != 0)
		return true;
	LogDeadLetter(subscription->name, lfirst(event), error);
	return false;
}

/*
 * RelayBatchInherit deals with a batch that is out though nobody is at it.
 */
void
RelayBatchInherit(const RelayTask *task, const Subscription *subscription)
{
	Batch left;

	if (inherited || !DeliveryOutstanding(subscription, &left))
		return;
	if (left.events == NIL || RegistryIsUntouched(task, left.number))
		DeliveryGiveBack(subscription, left.number, false);
	else if (list_length(left.events) > 1)
		DeliveryGiveBack(subscription, left.number, true);
	else
	{
		const text *why = failure != NULL ? failure : cstring_to_text(KILLED);

		(void) Fail(subscription, &left, list_head(left.events), why);
		DeliveryAck(subscription, left.number);
	}
}

/*
 * IsHeld tells whether an event waits behind one of its aggregate that has failed
 * in this batch.
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
 * CheckFailure throws what leaves no way but to roll the batch back: that the
 * transaction cannot commit any more; or that the handler is no longer what it
 * was, which then is why it failed, and no event's fault.
 */
static void
CheckFailure(const Subscription *subscription, EventHandler *handler, const text *error)
{
	EventHandler now;

	if (TransactionIsDoomed())
	{
		blamed = true;
		KeepFailure(error);
		CheckClaims();
	}
	AcceptInvalidationMessages();
	EventHandlerFind(subscription, handler->owner, &now);
	if (EventHandlerReplaced(handler, &now))
		ErrorEventHandlerReplaced(subscription->handler);
}

/*
 * HandleEvent gives an event of the batch that is out to the handler.  If that
 * fails, and those behind it have to wait, it is added to "failed".
 */
static void
HandleEvent(const Subscription *subscription, EventHandler *handler, ListCell *cell, List **failed)
{
	text *error;

	if (IsHeld(lfirst(cell), *failed) || EventHandle(handler, lfirst(cell), &error))
		return;
	CheckFailure(subscription, handler, error);
	if (Fail(subscription, &out, cell, error))
		*failed = lappend(*failed, lfirst(cell));
}

/*
 * Rest returns the events of the batch behind one that do not wait for any that
 * failed.
 */
static List *
Rest(const ListCell *cell, const List *failed)
{
	List *rest = NIL;

	for_each_cell(cell, out.events, lnext(out.events, cell))
	{
		if (!IsHeld(lfirst(cell), failed))
			rest = lappend(rest, lfirst(cell));
	}
	return rest;
}

/*
 * Learn reckons from a batch how large the next one is to be: of one that was handled in
 * part, that part; of any other, twice as many.
 */
static void
Learn(int handled)
{
	bool whole = handled == list_length(out.events);

	if (!whole)
		wanted = handled;
	else if (handled >= wanted)
		wanted = Min(2 * wanted, BATCH_EVENTS);
}

/*
 * HasGone tells whether a handler has removed the subscription.
 */
static bool
HasGone(const RelayTask *task)
{
	return RelayHasNotes() && SubscriptionFindNumber(task->number) == NULL;
}

/*
 * RelayBatchHandle gives the events of the batch that is out to the handler, and
 * acknowledges them; but not those that are left when it is time to commit, or when we
 * are wanted elsewhere.  Returns false if the handler has removed the subscription.
 */
bool
RelayBatchHandle(const RelayTask *task, const Subscription *subscription, EventHandler *handler)
{
	List *failed = NIL;
	List *rest = NIL;
	int handled = 0;
	ListCell *cell;

	touched = true;
	InjectionPoint("relay-handle");
	foreach (cell, out.events)
	{
		HandleEvent(subscription, handler, cell, &failed);
		if (HasGone(task))
			return false;
		handled++;
		if (RelayStayCommits() || RelayStayIsOver())
		{
			rest = Rest(cell, failed);
			break;
		}
	}
	Learn(handled);
	InjectionPoint("relay-acknowledge");
	if (rest != NIL)
		DeliveryAckPart(subscription, out.number, rest);
	else
		DeliveryAck(subscription, out.number);
	return true;
}
