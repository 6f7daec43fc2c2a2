/*-------------------------------------------------------------------------
 *
 * delivery.c
 *	  Batches of events: giving them out, and what becomes of them.
 *
 * One batch of a subscription is out at a time.  Giving it out writes down where
 * it ends, acknowledging it moves the position there:
 *
 *		position	start -----------------------> end
 *		fetch		                 batch, leased
 *		ack			                               start
 *
 * A batch whose lease ran out is given again, whole and under a new number: the
 * rows between start and end, but for those that have been parked since.  An
 * event that has to wait for an earlier one of its aggregate is parked as soon as
 * it is met.
 *
 * Locks: every function needs the subscription's lock, or takes it, and keeps it to
 * the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "access/xact.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "delivery.h"
#include "errors.h"
#include "guc.h"
#include "outboxerrors.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "parked.h"
#include "position.h"
#include "stats.h"
#include "timing.h"
#include "wakeup.h"

/* After so many rows that gave no event, it is worth writing down. */
#define PROGRESS_EVENTS 1000

/* ----------------------------------------------------------------
 * Giving out
 * ----------------------------------------------------------------
 */

/*
 * NewBatchNumber returns a number that nobody can guess, so that a consumer who
 * comes late does not acknowledge another's batch.
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
		number >>= 1;
	}
	return (int64) number;
}

/*
 * ReadPosition reads where the subscription stands.  Throws 42704 if it was
 * removed since it was looked up.
 */
static void
ReadPosition(const Subscription *subscription, Position *position)
{
	if (!PositionRead(subscription->name, position))
		ErrorNoSubscription(subscription->name);
}

/*
 * IsLeased tells whether the batch that is out is not to be given again yet.
 */
static bool
IsLeased(const Position *position)
{
	TimestampTz now = GetCurrentTimestamp();

	return position->batch != 0 && now >= position->leasedAt && now <= position->leasedUntil;
}

/*
 * IsForUs tells whether the event in the slot is one of the subscription's, and not
 * parked.
 */
static bool
IsForUs(const Subscription *subscription, TupleTableSlot *slot, const ParkedSummary *parked)
{
	bool isnull;

	return TopicMatches(&subscription->topics,
						DatumGetTextPP(slot_getattr(slot, OUT_TOPIC, &isnull))) &&
		   !ParkedHas(subscription->name, parked, OutboxSeq(slot));
}

/*
 * Collect adds to a new batch what the scan gives, until it has "max" events.  An
 * event that has to wait for another is parked; after many of them the rest is left
 * to the next look.
 */
static void
Collect(const Subscription *subscription, OutboxScan *scan, int max, const ParkedSummary *parked,
		Batch *batch)
{
	TupleTableSlot *slot;
	int waiting = 0;

	while (list_length(batch->events) < max && waiting < PROGRESS_EVENTS &&
		   (slot = OutboxScanNext(scan)) != NULL)
	{
		Event *event;

		if (!IsForUs(subscription, slot, parked))
			continue;
		event = EventFromOutbox(slot, batch->number);
		if (ParkedBlocks(subscription->name, parked, event))
		{
			ParkedWait(subscription->name, event);
			waiting++;
		}
		else
			batch->events = lappend(batch->events, event);
	}
	batch->wrote |= waiting > 0;
	batch->more = waiting == PROGRESS_EVENTS;
}

/*
 * CollectAgain fills the batch with the events of the one that is out.
 */
static void
CollectAgain(const Subscription *subscription, const Position *position, Batch *batch)
{
	ParkedSummary parked;
	OutboxScan *scan;

	TupleTableSlot *slot;

	ParkedSummarize(subscription->name, &position->start, &parked);
	batch->events = ParkedInBatch(subscription->name, position);
	scan = OutboxScanBegin(&position->start, &position->end);
	while ((slot = OutboxScanNext(scan)) != NULL)
	{
		if (IsForUs(subscription, slot, &parked))
			batch->events = lappend(batch->events, EventFromOutbox(slot, batch->number));
	}
	(void) OutboxScanEnd(scan, NULL);
}

/*
 * NotePosition writes down that the batch is out, or, if it has no events, that
 * there was nothing for us.
 */
static void
NotePosition(const Subscription *subscription, Position *position, const Interval *lease,
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
	PositionWrite(subscription->name, position);
	batch->wrote = true;
}

/*
 * GiveAgain gives out the batch that is out once more.
 */
static void
GiveAgain(const Subscription *subscription, Position *position, const Interval *lease, Batch *batch)
{
	position->batch = batch->number;
	CollectAgain(subscription, position, batch);
	NotePosition(subscription, position, lease, batch);
}

/*
 * GiveNext gives out what is due of the parked events, and then what comes next
 * in the outbox.
 */
static void
GiveNext(const Subscription *subscription, Position *position, const FetchPlan *plan, Batch *batch)
{
	int max = position->singles > 0 ? 1 : plan->max;
	TimestampTz now = GetCurrentTimestamp();
	ParkedSummary parked;
	OutboxScan *scan;
	ListCell *cell;
	int64 looked;

	ParkedSummarize(subscription->name, &position->start, &parked);
	batch->next = parked.next;
	if (parked.next != 0 && parked.next <= now)
		batch->events = ParkedDue(subscription->name, now, max, batch->number);
	position->parkedCount = list_length(batch->events);
	position->parked = palloc(Max(1, position->parkedCount) * sizeof(int64));
	foreach (cell, batch->events)
		position->parked[foreach_current_index(cell)] = EventSeq(lfirst(cell));

	scan = OutboxScanBegin(&position->start, NULL);
	Collect(subscription, scan, max, &parked, batch);
	looked = OutboxScanEnd(scan, &position->end);

	if (batch->events != NIL && position->singles > 0)
		position->singles--;
	if (batch->events != NIL || batch->wrote || looked >= PROGRESS_EVENTS ||
		(plan->last && looked > 0))
		NotePosition(subscription, position, plan->lease, batch);
}

/*
 * DeliveryFetch fills "batch" with the next events, in the current memory
 * context.  The caller holds the subscription's lock.  Throws 42704.
 */
void
DeliveryFetch(const Subscription *subscription, const FetchPlan *plan, Batch *batch)
{
	Position position;

	memset(batch, 0, sizeof(Batch));
	ReadPosition(subscription, &position);
	if (IsLeased(&position))
	{
		batch->next = position.leasedUntil;
		return;
	}
	batch->number = NewBatchNumber();
	if (position.batch != 0)
		GiveAgain(subscription, &position, plan->lease, batch);
	if (batch->events == NIL) /* all that was in it is parked by now, say */
		GiveNext(subscription, &position, plan, batch);
	CountEvents(COUNT_DELIVERED, list_length(batch->events));
}

/* ----------------------------------------------------------------
 * What becomes of a batch
 * ----------------------------------------------------------------
 */

/*
 * LockBatch locks the subscription and reads its position.  Throws IK410 unless
 * "batch" is out, and 55P03 if the lock is not free in time.
 */
static void
LockBatch(const Subscription *subscription, int64 batch, Position *position)
{
	if (!SubscriptionLock(subscription->name, DefaultWait))
		ErrorSubscriptionBusy(subscription->name);
	ReadPosition(subscription, position);
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
 * DeliveryAck moves the position behind the batch.
 */
void
DeliveryAck(const Subscription *subscription, int64 batch)
{
	Position position;

	LockBatch(subscription, batch, &position);
	ParkedDone(subscription->name, &position);
	position.start = position.end;
	position.batch = 0;
	PositionWrite(subscription->name, &position);
	CountEvent(COUNT_ACKNOWLEDGED);
	WakeConsumers(subscription);
}

/*
 * TakeOut takes a parked event out of the batch.  Returns whether it was in it.
 */
static bool
TakeOut(Position *position, int64 seq)
{
	for (int i = 0; i < position->parkedCount; i++)
	{
		if (position->parked[i] == seq)
		{
			position->parked[i] = position->parked[--position->parkedCount];
			return true;
		}
	}
	return false;
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
	ListCell *cell;

	LockBatch(subscription, batch, &position);
	foreach (cell, rest)
	{
		int64 seq = EventSeq(lfirst(cell));

		if (!TakeOut(&position, seq))
			CursorAddNumber(&position.end, seq);
	}
	ParkedDone(subscription->name, &position);
	position.start = position.end;
	position.batch = 0;
	PositionWrite(subscription->name, &position);
	CountEvent(COUNT_ACKNOWLEDGED);
	WakeConsumers(subscription);
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
	CollectAgain(subscription, &position, &again);
	foreach (cell, again.events)
		ParkedAgain(subscription->name, lfirst(cell), now);
	ParkedHeadsOnly(subscription->name, now);
	if (singly)
		position.singles = list_length(again.events);
	position.start = position.end;
	position.batch = 0;
	PositionWrite(subscription->name, &position);
	WakeConsumers(subscription);
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
	PositionWrite(subscription->name, &position);
	return position.leasedUntil;
}

/*
 * DeliveryOutstanding fills "batch" with the one that is out, in the current
 * memory context.  Returns false if none is.
 */
bool
DeliveryOutstanding(const Subscription *subscription, Batch *batch)
{
	Position position;

	memset(batch, 0, sizeof(Batch));
	ReadPosition(subscription, &position);
	if (position.batch == 0)
		return false;
	batch->number = position.batch;
	CollectAgain(subscription, &position, batch);
	return true;
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
 * HoldFollowers takes the later events of an aggregate out of the batch, to wait
 * behind the one at "failed", and all others that are parked.  Returns whether
 * that has changed the position.
 */
static bool
HoldFollowers(const Subscription *subscription, Position *position, const List *events,
			  const ListCell *failed)
{
	const Event *event = lfirst(failed);
	bool changed = false;
	ListCell *cell;

	for_each_cell(cell, events, lnext(events, failed))
	{
		const Event *follower = lfirst(cell);

		if (!EventsShareAggregate(event, follower))
			continue;
		if (TakeOut(position, EventSeq(follower)))
			changed = true;
		else
			ParkedWait(subscription->name, follower);
	}
	ParkedHoldFollowers(subscription->name, event);
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
	TimestampTz retryAt = 0;
	bool changed;

	if (attempts < subscription->maxAttempts)
		retryAt = RetryAt(subscription, attempts, retryIn);

	ParkedFail(subscription->name, event, error, retryAt);
	changed = TakeOut(position, EventSeq(event));
	if (EventAggregate(event) != NULL)
	{
		if (retryAt != 0)
			changed |= HoldFollowers(subscription, position, events, failed);
		else
			ParkedLetGo(subscription->name, EventAggregate(event));
	}
	if (changed)
		PositionWrite(subscription->name, position);
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
	CollectAgain(subscription, &position, &batch);
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
