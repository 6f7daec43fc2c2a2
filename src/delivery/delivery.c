/*-------------------------------------------------------------------------
 *
 * delivery/delivery.c
 *	  Batches: delivery, acknowledgement, and events that fail.
 *
 * One batch of a subscription is out at a time.  Delivery writes where it ends, and
 * acknowledging it moves the position there.  README.md describes the steps and the
 * states.
 *
 * Locks: the subscription's, to the end of the transaction.  DeliveryFetch() and
 * DeliveryOutstanding() need it, the others take it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "base/stats.h"
#include "base/timing.h"
#include "base/wakeup.h"
#include "delivery/delivery.h"
#include "delivery/parked.h"
#include "delivery/position.h"
#include "outbox/scan.h"
#include "outbox/table.h"

/* The position is written after so many rows, even if they had no event to deliver. */
#define PROGRESS_EVENTS 1000

/*
 * A call parks so many events and reads so many rows at most, and leaves the rest to the
 * next one.  So a consumer with a statement_timeout makes progress, whatever the backlog.
 */
#define FETCH_PARKS 1000
#define FETCH_ROWS 100000

#define BATCH_BITS 53

/*
 * NewBatchNumber returns a random number, so that a late consumer does not acknowledge
 * another consumer's batch: never 0, and of 53 bits, which a client that reads JSON
 * numbers as doubles keeps exactly.
 */
static int64
NewBatchNumber(void)
{
	uint64 number = 0;

	while (number == 0)
	{
		if (!pg_strong_random(&number, sizeof(number)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR), errmsg("could not generate random values")));
		number >>= 64 - BATCH_BITS;
	}
	return (int64) number;
}

/*
 * DeliveryPosition reads the position of a subscription.  Throws 42704 if the
 * subscription was removed since it was looked up.
 */
static void
DeliveryPosition(const Subscription *subscription, Position *position)
{
	if (!PositionRead(subscription->name, position))
		ErrorNoSubscription(subscription->name);
}

/*
 * IsWanted tells whether the subscription wants the event in the slot.
 */
static bool
IsWanted(const Subscription *subscription, TupleTableSlot *slot)
{
	bool isnull;

	return TopicMatches(&subscription->topics,
						DatumGetTextPP(slot_getattr(slot, OUT_TOPIC, &isnull)));
}

/*
 * Collect adds events of the scan to a new batch, until it has "max".  With "blocked", an
 * event can have to wait for another one, and is parked.  Sets batch->more at a limit of
 * the call.  No event of the scan is parked: the position has passed those that are.
 */
static void
Collect(const Subscription *subscription, OutboxScan *scan, int max, bool blocked, Batch *batch)
{
	TupleTableSlot *slot;
	int waiting = 0;

	while (list_length(batch->events) < max && waiting < FETCH_PARKS &&
		   (slot = OutboxScanNext(scan)) != NULL)
	{
		Event *event;

		if (!IsWanted(subscription, slot))
			continue;
		event = EventFromOutbox(slot, batch->number);
		if (blocked && ParkedBlocks(subscription->name, event))
		{
			ParkedAdd(subscription->name, event, 0);
			waiting++;
		}
		else
			batch->events = lappend(batch->events, event);
	}
	batch->wrote |= waiting > 0;
	if (waiting > 0)
		ParkedCheckOrder(subscription->name);
	batch->more = waiting == FETCH_PARKS || OutboxScanExhausted(scan);
}

/*
 * BatchCollect fills the batch with the events of the one that is out.  Events that were
 * parked since it was fetched have left it.
 */
static void
BatchCollect(const Subscription *subscription, const Position *position, Batch *batch)
{
	OutboxScan *scan;
	TupleTableSlot *slot;
	List *events = NIL;

	scan = OutboxScanBegin(&position->start, &position->end, PG_INT64_MAX);
	while ((slot = OutboxScanNext(scan)) != NULL)
	{
		if (IsWanted(subscription, slot))
			events = lappend(events, EventFromOutbox(slot, batch->number));
	}
	(void) OutboxScanEnd(scan, NULL);
	batch->events = list_concat(ParkedInBatch(subscription->name, position),
								ParkedRemoveFrom(events, subscription->name));
}

/*
 * WritePosition writes that the batch is out or, if it has no events, that the position
 * has moved.
 */
static void
WritePosition(const Subscription *subscription, Position *position, const Interval *lease,
			  Batch *batch)
{
	if (batch->events == NIL)
	{
		position->start = position->end;
		position->batch = 0;
	}
	else
	{
		position->batch = batch->number;
		position->leasedAt = GetCurrentTimestamp();
		position->leasedUntil = LeaseEnd(lease, position->leasedAt);
	}
	InjectionPoint("fetch-write");
	PositionWrite(subscription->name, position);
	InjectionPoint("fetch-end");
	batch->wrote = true;
}

/*
 * DeliverNext delivers parked events whose retry time has come, and then the next ones
 * of the outbox.
 */
static void
DeliverNext(const Subscription *subscription, Position *position, const FetchPlan *plan,
			Batch *batch)
{
	int max = position->singles > 0 ? 1 : plan->max;
	TimestampTz now = GetCurrentTimestamp();
	OutboxScan *scan;
	ListCell *cell;
	bool blocked;
	int64 rows;

	/* Add parked events that are ready */
	batch->next = ParkedNext(subscription->name, &blocked);
	if (batch->next != 0 && batch->next <= now)
		batch->events = ParkedReady(subscription->name, now, max, batch->number);
	position->parkedCount = list_length(batch->events);
	position->parked = palloc(Max(1, position->parkedCount) * sizeof(int64));
	foreach (cell, batch->events)
		position->parked[foreach_current_index(cell)] = EventSeq(lfirst(cell));

	/* Add events of the outbox */
	scan = OutboxScanBegin(&position->start, NULL, FETCH_ROWS);
	Collect(subscription, scan, max, blocked, batch);
	rows = OutboxScanEnd(scan, &position->end);

	/* Write the position if that is worth it */
	if (batch->events != NIL && position->singles > 0)
		position->singles--;
	if (batch->events != NIL || batch->wrote || batch->more || rows >= PROGRESS_EVENTS ||
		(plan->last && (rows > 0 || position->end.count < position->start.count)))
		WritePosition(subscription, position, plan->lease, batch);
}

/*
 * DeliveryFetch fills "batch" with the next events, in the current memory context.  The
 * caller holds the subscription's lock.  Throws 42704.
 */
void
DeliveryFetch(const Subscription *subscription, const FetchPlan *plan, Batch *batch)
{
	Position position;

	memset(batch, 0, sizeof(Batch));
	DeliveryPosition(subscription, &position);
	InjectionPoint("fetch-collect");
	if (PositionIsLeased(&position))
	{
		batch->next = position.leasedUntil;
		return;
	}
	batch->number = NewBatchNumber();
	if (position.batch != 0)
	{
		/* Redeliver the batch that is out, under a new number */
		position.batch = batch->number;
		BatchCollect(subscription, &position, batch);
		WritePosition(subscription, &position, plan->lease, batch);
	}
	if (batch->events == NIL) /* all of it is parked by now */
		DeliverNext(subscription, &position, plan, batch);
	batch->hasParked = position.parkedCount > 0;
	CountEvents(COUNT_DELIVERED, list_length(batch->events));
}

/*
 * DeliveryOutstanding fills "batch" with the batch that is out, in the current memory
 * context.  Returns false if none is.  The caller holds the subscription's lock.
 */
bool
DeliveryOutstanding(const Subscription *subscription, Batch *batch)
{
	Position position;

	memset(batch, 0, sizeof(Batch));
	DeliveryPosition(subscription, &position);
	if (position.batch == 0)
		return false;
	batch->number = position.batch;
	BatchCollect(subscription, &position, batch);
	return true;
}

/* ----------------------------------------------------------------
 * Acknowledging
 * ----------------------------------------------------------------
 */

/*
 * LockBatch locks the subscription and reads its position.  Throws IK408 unless
 * "batch" is out, and 55P03 if the lock is not free in time.
 */
static void
LockBatch(const Subscription *subscription, int64 batch, Position *position)
{
	InjectionPoint("batch-lock");
	SubscriptionLockOrThrow(subscription->name);
	InjectionPoint("batch-read");
	DeliveryPosition(subscription, position);

	/* The transaction can still commit: nothing was changed, and the events come again */
	if (position->batch != batch || batch == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEMPOTENCY_BATCH_LOST),
				 errmsg("this batch is not the current one of its subscription"),
				 errdetail("Subscription \"%s\", batch %lld.", text_to_cstring(subscription->name),
						   (long long) batch),
				 errhint("Call idempotency.fetch() for the next batch; to keep one longer, pass a "
						 "longer lease or call idempotency.extend().")));
}

/*
 * EndBatch moves the position after the batch.
 */
static void
EndBatch(const Subscription *subscription, Position *position)
{
	position->start = position->end;
	position->batch = 0;
	InjectionPoint("batch-end");
	PositionWrite(subscription->name, position);
	InjectionPoint("batch-wake");

	/* Wake consumers that wait for the end of the batch; with a handler there are none */
	if (subscription->handler == NULL)
		WakeupAfterCommit(OutboxChannel());
}

/*
 * RemoveParked removes an event from the parked events of the batch.  Returns whether it was
 * one.
 */
static bool
RemoveParked(Position *position, const Event *event)
{
	for (int i = 0; i < position->parkedCount; i++)
	{
		if (position->parked[i] == EventSeq(event))
		{
			position->parked[i] = position->parked[--position->parkedCount];
			return true;
		}
	}
	return false;
}

/*
 * DeliveryAck acknowledges the events of the batch except "rest", which are redelivered
 * at once: parked ones stay parked, and the others are added to the position as not
 * delivered.
 */
void
DeliveryAck(const Subscription *subscription, int64 batch, const List *rest)
{
	Position position;
	ListCell *cell;

	LockBatch(subscription, batch, &position);
	foreach (cell, rest)
	{
		if (!RemoveParked(&position, lfirst(cell)))
			CursorAddNumber(&position.end, EventSeq(lfirst(cell)));
	}
	ParkedAcknowledge(subscription->name, &position);
	ParkedCheckOrder(subscription->name);
	EndBatch(subscription, &position);
	CountEvent(COUNT_ACKNOWLEDGED);
}

/*
 * DeliveryGiveBack gives the batch back, to be redelivered at once; one event a batch
 * with "singly", to find the one that fails.  The position does not move back: events of
 * the batch that were parked would be met again after they have left.  So the rest is
 * parked as well.
 */
void
DeliveryGiveBack(const Subscription *subscription, int64 batch, bool singly)
{
	TimestampTz now = GetCurrentTimestamp();
	Batch again = {.number = batch};
	Position position;
	ListCell *cell;

	LockBatch(subscription, batch, &position);
	BatchCollect(subscription, &position, &again);
	foreach (cell, again.events)
		ParkedAdd(subscription->name, lfirst(cell), now);
	ParkedRestoreOrder(subscription->name, now);
	ParkedCheckOrder(subscription->name);
	if (singly)
		position.singles = list_length(again.events);
	EndBatch(subscription, &position);
}

/*
 * DeliveryExtend gives the batch another lease from now on, and returns its end.
 */
TimestampTz
DeliveryExtend(const Subscription *subscription, int64 batch, const Interval *lease)
{
	Position position;

	LockBatch(subscription, batch, &position);
	position.leasedAt = GetCurrentTimestamp();
	position.leasedUntil = LeaseEnd(lease, position.leasedAt);
	InjectionPoint("extend-write");
	PositionWrite(subscription->name, &position);
	return position.leasedUntil;
}

/* ----------------------------------------------------------------
 * Events that failed
 * ----------------------------------------------------------------
 */

/*
 * RetryAt returns when an event that failed "attempts" times is redelivered.  The delay
 * doubles with each failure, and a part of it is random, so that events that failed
 * together are not redelivered together.
 */
static TimestampTz
RetryAt(const Subscription *subscription, int attempts, const Interval *retryIn)
{
	double delay = IntervalMicroseconds(&subscription->retryDelay);

	if (retryIn != NULL)
		delay = IntervalMicroseconds(retryIn);
	else
	{
		delay = Min(delay * pow(2, Min(attempts - 1, 60)),
					IntervalMicroseconds(&subscription->maxRetryDelay));
		delay *= 0.5 + pg_prng_double(&pg_global_prng_state) / 2;
	}
	return GetCurrentTimestamp() +
		   (TimestampTz) Min(delay, (double) INT64CONST(100) * 365 * USECS_PER_DAY);
}

/*
 * RemoveFollowers removes the later events of an aggregate from the batch, and parks them.
 * So the caller of nack() can skip them, and an acknowledgement does not include them,
 * whether the event at "failed" is retried or dead.  Returns whether that changed the
 * position.
 */
static bool
RemoveFollowers(const Subscription *subscription, Position *position, const List *events,
				const ListCell *failed)
{
	bool changed = false;
	ListCell *cell;

	for_each_cell(cell, events, lnext(events, failed))
	{
		if (!EventsShareAggregate(lfirst(failed), lfirst(cell)))
			continue;
		if (RemoveParked(position, lfirst(cell)))
			changed = true;
		else
			ParkedAdd(subscription->name, lfirst(cell), 0);
	}
	return changed;
}

/*
 * FindEvent returns the cell of an event in the batch.  Throws 22023 if it is not there.
 */
static ListCell *
FindEvent(const Subscription *subscription, const Batch *batch, const pg_uuid_t *id)
{
	ListCell *cell;

	foreach (cell, batch->events)
	{
		const Event *event = lfirst(cell);

		if (memcmp(DatumGetPointer(event->values[EVENT_ID]), id, UUID_LEN) == 0)
			return cell;
	}
	ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE), errmsg("event is not in the batch"),
					errdetail("Subscription \"%s\", batch %lld.",
							  text_to_cstring(subscription->name), (long long) batch->number),
					errhint("Pass the id of an event of the batch, once; after nack(), later "
							"events of the same aggregate have left the batch too.")));
}

/*
 * Park parks an event of the batch that is out, of which "events" are left, until "retryAt";
 * 0 makes it a dead letter.  Removes the later ones of its aggregate from the batch.
 */
static void
Park(const Subscription *subscription, Position *position, const List *events,
	 const ListCell *failed, const Event *event, const text *error, TimestampTz retryAt)
{
	Datum aggregate = event->values[EVENT_AGGREGATE];
	bool changed;

	/* Park the event, out of the batch */
	ParkedFail(subscription->name, event, error, retryAt);
	InjectionPoint("event-parked");
	changed = RemoveParked(position, event);

	/* Remove its followers from the batch; they wait for it, or are redelivered at once */
	if (!event->isnull[EVENT_AGGREGATE])
	{
		if (retryAt != 0)
			ParkedHoldFollowers(subscription->name, event);
		changed |= RemoveFollowers(subscription, position, events, failed);
		if (retryAt == 0)
			ParkedRelease(subscription->name, &aggregate, 1);
	}
	ParkedCheckOrder(subscription->name);

	/* Write the position */
	InjectionPoint("event-write");
	if (changed)
		PositionWrite(subscription->name, position);
}

/*
 * Fail parks an event that has failed once more.  Returns as DeliveryNack().
 */
static TimestampTz
Fail(const Subscription *subscription, Position *position, const List *events,
	 const ListCell *failed, const text *error, const Interval *retryIn)
{
	const Event *event = lfirst(failed);
	int attempts = DatumGetInt32(event->values[EVENT_ATTEMPT]);
	TimestampTz retryAt = 0;

	if (attempts < subscription->maxAttempts)
		retryAt = RetryAt(subscription, attempts, retryIn);
	Park(subscription, position, events, failed, event, error, retryAt);
	InjectionPoint("event-count");
	CountEvent(COUNT_FAILED);
	CountEvents(COUNT_DEAD_LETTERS, retryAt == 0 ? 1 : 0);
	return retryAt;
}

/*
 * DeliveryNack parks an event of the batch.  The later ones of its aggregate leave the batch
 * too: they are redelivered after it.  Returns when it is redelivered, or 0 if it is a dead
 * letter now.
 */
TimestampTz
DeliveryNack(const Subscription *subscription, int64 number, const pg_uuid_t *id, const text *error,
			 const Interval *retryIn)
{
	Batch batch = {.number = number};
	Position position;

	LockBatch(subscription, number, &position);
	BatchCollect(subscription, &position, &batch);
	return Fail(subscription, &position, batch.events, FindEvent(subscription, &batch, id), error,
				retryIn);
}

/*
 * DeliveryFail does the same to the event at "failed", for a caller that has the events
 * of the batch.
 */
TimestampTz
DeliveryFail(const Subscription *subscription, int64 number, const List *events,
			 const ListCell *failed, const text *error)
{
	Position position;

	LockBatch(subscription, number, &position);
	return Fail(subscription, &position, events, failed, error, NULL);
}

/*
 * DeliverySuspect parks the event at "suspect", to be redelivered at once, and keeps why, but
 * counts no attempt: the event may not have caused what happened.
 */
void
DeliverySuspect(const Subscription *subscription, int64 number, const List *events,
				const ListCell *suspect, const text *why)
{
	Event event = *(const Event *) lfirst(suspect);
	Position position;

	event.values[EVENT_ATTEMPT] = Int32GetDatum(DatumGetInt32(event.values[EVENT_ATTEMPT]) - 1);
	LockBatch(subscription, number, &position);
	Park(subscription, &position, events, suspect, &event, why, GetCurrentTimestamp());
}
