/*-------------------------------------------------------------------------
 *
 * settlement.c
 *	  Batches of events: what becomes of them.
 *
 * A batch that is out is acknowledged, wholly or in part, given back, or kept for
 * longer; and an event of it that failed is parked.  Who does that names the batch
 * by its number: one that is no longer the current one changes nothing.
 *
 * Locks: every function takes the subscription's, and keeps it to the end of the
 * transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/pg_prng.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "delivery.h"
#include "guc.h"
#include "outboxerrors.h"
#include "outboxtable.h"
#include "parked.h"
#include "position.h"
#include "stats.h"
#include "timing.h"
#include "wakeup.h"

/*
 * LockBatch locks the subscription and reads its position.  Throws IK408 unless
 * "batch" is out, and 55P03 if the lock is not free in time.
 */
static void
LockBatch(const Subscription *subscription, int64 batch, Position *position)
{
	InjectionPoint("batch-lock");
	if (!SubscriptionLock(subscription->name, DefaultWait))
		ErrorSubscriptionBusy(subscription->name);
	InjectionPoint("batch-read");
	DeliveryPosition(subscription, position);
	if (position->batch != batch || batch == 0)
		ErrorBatchLost(subscription->name, batch);
}

/*
 * WakeConsumers wakes those who wait for the batch to be out no more; where there
 * is a handler, nobody does.
 */
static void
WakeConsumers(const Subscription *subscription)
{
	if (subscription->handler == NULL)
		WakeupAfterCommit(OutboxChannel());
}

/*
 * EndBatch moves the position behind the batch.
 */
static void
EndBatch(const Subscription *subscription, Position *position)
{
	position->start = position->end;
	position->batch = 0;
	InjectionPoint("batch-end");
	PositionWrite(subscription->name, position);
	InjectionPoint("batch-wake");
	WakeConsumers(subscription);
}

/*
 * DeliveryAck says that every event of the batch has had its effect.
 */
void
DeliveryAck(const Subscription *subscription, int64 batch)
{
	Position position;

	LockBatch(subscription, batch, &position);
	ParkedDone(subscription->name, &position);
	EndBatch(subscription, &position);
	CountEvent(COUNT_ACKNOWLEDGED);
}

/*
 * TakeOut takes parked events out of the batch, whose numbers are in order.  Returns how
 * many were in it; if "found" is not NULL, it says of each whether it was.
 */
static int
TakeOut(Position *position, const int64 *numbers, int count, bool *found)
{
	int kept = 0;
	int taken;

	for (int i = 0; i < position->parkedCount; i++)
	{
		int at = NumbersFind(numbers, count, position->parked[i]);

		if (at < 0)
			position->parked[kept++] = position->parked[i];
		else if (found != NULL)
			found[at] = true;
	}
	taken = position->parkedCount - kept;
	position->parkedCount = kept;
	return taken;
}

/*
 * NumbersOf returns the numbers of events, in order, and how many in "count".
 */
static int64 *
NumbersOf(const List *events, int *count)
{
	int64 *numbers = palloc(Max(1, list_length(events)) * sizeof(int64));
	ListCell *cell;

	*count = 0;
	foreach (cell, events)
		numbers[(*count)++] = EventSeq(lfirst(cell));
	NumbersSort(numbers, *count);
	return numbers;
}

/*
 * DeliveryAckPart moves the position behind the events of the batch, but for
 * "rest", which are given again at once: those that are parked stay so, and the
 * others are noted as not delivered yet.
 */
void
DeliveryAckPart(const Subscription *subscription, int64 batch, const List *rest)
{
	Position position;
	int64 *numbers;
	bool *parked;
	int count;

	LockBatch(subscription, batch, &position);
	numbers = NumbersOf(rest, &count);
	parked = palloc0(Max(1, count) * sizeof(bool));
	(void) TakeOut(&position, numbers, count, parked);
	for (int i = 0; i < count; i++)
	{
		if (!parked[i])
			CursorAddNumber(&position.end, numbers[i]);
	}
	ParkedDone(subscription->name, &position);
	EndBatch(subscription, &position);
	CountEvent(COUNT_ACKNOWLEDGED);
}

/*
 * DeliveryGiveBack gives the batch back, to be given again at once; event by
 * event, if it is to be found out which of them is to blame.  The position does not
 * go back for that: what was parked of the batch, by nack() or since it has to wait
 * for another, would be met again after it had left.  So the rest is parked as well.
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
		ParkedAgain(subscription->name, lfirst(cell), now);
	ParkedHeadsOnly(subscription->name, now);
	if (singly)
		position.singles = list_length(again.events);
	EndBatch(subscription, &position);
}

/*
 * DeliveryExtend gives the batch another lease from now on, and returns when it
 * ends.
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
 * RetryAt returns when an event that failed "attempts" times is given again: the
 * delay doubles with each failure, and a part of it is left to chance, so that
 * what failed together does not come back together.
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
 * FollowersOf returns the later events of the aggregate of the one at "failed".
 */
static List *
FollowersOf(const List *events, const ListCell *failed)
{
	List *followers = NIL;
	ListCell *cell;

	for_each_cell(cell, events, lnext(events, failed))
	{
		if (EventsShareAggregate(lfirst(failed), lfirst(cell)))
			followers = lappend(followers, lfirst(cell));
	}
	return followers;
}

/*
 * HoldFollowers takes the later events of an aggregate out of the batch, to wait
 * behind the one at "failed", and all others that are parked.  Returns whether
 * that has changed the position.
 */
static bool
HoldFollowers(const Subscription *subscription, Position *position, const List *events,
			  const ListCell *failed)
{
	List *followers = FollowersOf(events, failed);
	bool *parked = palloc0(Max(1, list_length(followers)) * sizeof(bool));
	int count;
	int64 *numbers = NumbersOf(followers, &count);
	bool changed = TakeOut(position, numbers, count, parked) > 0;
	ListCell *cell;

	foreach (cell, followers)
	{
		if (!parked[NumbersFind(numbers, count, EventSeq(lfirst(cell)))])
			ParkedWait(subscription->name, lfirst(cell));
	}
	ParkedHoldFollowers(subscription->name, lfirst(failed));
	return changed;
}

/*
 * FindEvent returns where an event is in the batch.  Throws 22023 if it is not.
 */
static ListCell *
FindEvent(const Subscription *subscription, const Batch *batch, const pg_uuid_t *id)
{
	ListCell *cell;

	foreach (cell, batch->events)
	{
		if (EventHasId(lfirst(cell), id))
			return cell;
	}
	ErrorEventNotInBatch(subscription->name, batch->number);
}

/*
 * Park parks an event of the batch that is out, of which "events" are left, and
 * lets the later ones of its aggregate wait behind it.  Returns as DeliveryNack().
 */
static TimestampTz
Park(const Subscription *subscription, Position *position, const List *events,
	 const ListCell *failed, const text *error, const Interval *retryIn)
{
	const Event *event = lfirst(failed);
	int attempts = DatumGetInt32(event->values[EVENT_ATTEMPT]);
	int64 number = EventSeq(event);
	TimestampTz retryAt = 0;
	bool changed;

	if (attempts < subscription->maxAttempts)
		retryAt = RetryAt(subscription, attempts, retryIn);

	ParkedFail(subscription->name, event, error, retryAt);
	InjectionPoint("event-takeout");
	changed = TakeOut(position, &number, 1, NULL) > 0;
	if (EventAggregate(event) != NULL)
	{
		if (retryAt != 0)
			changed |= HoldFollowers(subscription, position, events, failed);
		else
			ParkedLetGo(subscription->name, EventAggregate(event));
	}
	InjectionPoint("event-write");
	if (changed)
		PositionWrite(subscription->name, position);
	InjectionPoint("event-count");
	CountEvent(COUNT_FAILED);
	CountEvents(COUNT_DEAD_LETTERS, retryAt == 0 ? 1 : 0);
	return retryAt;
}

/*
 * DeliveryNack parks an event of the batch, and lets the later ones of its
 * aggregate wait behind it.  Returns when it will be given again, or 0 if it is
 * a dead letter now.
 */
TimestampTz
DeliveryNack(const Subscription *subscription, int64 number, const pg_uuid_t *id, const text *error,
			 const Interval *retryIn)
{
	Batch batch = {.number = number};
	Position position;

	LockBatch(subscription, number, &position);
	BatchCollect(subscription, &position, &batch);
	return Park(subscription, &position, batch.events, FindEvent(subscription, &batch, id), error,
				retryIn);
}

/*
 * DeliveryFail does the same to the event at "failed", for a caller who has the
 * events of the batch.
 */
TimestampTz
DeliveryFail(const Subscription *subscription, int64 number, const List *events,
			 const ListCell *failed, const text *error)
{
	Position position;

	LockBatch(subscription, number, &position);
	return Park(subscription, &position, events, failed, error, NULL);
}
