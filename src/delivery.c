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
 * Locks: every function but for DeliveryOutstanding() needs the subscription's
 * lock, or takes it, and keeps it to the end of the transaction.
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

/* After so many events that nobody wanted, it is worth writing down. */
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
 * IsForUs tells whether an event belongs to the subscription, and is not parked.
 * One that has to wait is parked now, unless the batch is out already.
 */
static bool
IsForUs(const Subscription *subscription, const Event *event, bool isOut, Batch *batch)
{
	bool blocked;

	if (ParkedHas(subscription->name, event, &blocked))
		return false;
	if (!blocked || isOut)
		return true;
	ParkedWait(subscription->name, event);
	batch->wrote = true;
	return false;
}

/*
 * Collect adds to the batch what the scan gives, until the batch has "max"
 * events.  Returns how many events it has read.
 */
static int64
Collect(const Subscription *subscription, OutboxScan *scan, int max, bool anyParked, bool isOut,
		Batch *batch)
{
	int64 read = 0;

	while (list_length(batch->events) < max)
	{
		TupleTableSlot *slot = OutboxScanNext(scan);
		bool isnull;
		Event *event;

		if (slot == NULL)
			break;
		read++;
		if (!TopicMatches(&subscription->topics,
						  DatumGetTextPP(slot_getattr(slot, OUT_TOPIC, &isnull))))
			continue;
		event = EventFromOutbox(slot, batch->number);
		if (!anyParked || IsForUs(subscription, event, isOut, batch))
			batch->events = lappend(batch->events, event);
	}
	return read;
}

/*
 * CollectAgain fills the batch with the events of the one that is out.
 */
static void
CollectAgain(const Subscription *subscription, const Position *position, Batch *batch)
{
	ParkedSummary parked;
	OutboxScan *scan;

	ParkedSummarize(subscription->name, CursorSafe(&position->start), &parked);
	batch->events = ParkedInBatch(subscription->name, position);
	scan = OutboxScanBegin(&position->start, &position->end);
	(void) Collect(subscription, scan, PG_INT32_MAX, parked.any, true, batch);
	OutboxScanEnd(scan, NULL);
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
	int64 read;

	ParkedSummarize(subscription->name, CursorSafe(&position->start), &parked);
	batch->next = parked.next;
	if (parked.next != 0 && parked.next <= now)
		batch->events = ParkedDue(subscription->name, now, max, batch->number);
	position->parkedCount = list_length(batch->events);
	position->parked = palloc(Max(1, position->parkedCount) * sizeof(int64));
	foreach (cell, batch->events)
		position->parked[foreach_current_index(cell)] = EventSeq(lfirst(cell));

	scan = OutboxScanBegin(&position->start, NULL);
	read = Collect(subscription, scan, max, parked.any, false, batch);
	OutboxScanEnd(scan, &position->end);

	if (batch->events != NIL && position->singles > 0)
		position->singles--;
	if (batch->events != NIL || batch->wrote || read >= PROGRESS_EVENTS || (plan->last && read > 0))
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
	else
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
	WakeupAfterCommit(OutboxChannel());
}

/*
 * DeliveryGiveBack gives the batch back, to be given again at once; event by
 * event, if it is to be found out which of them is to blame.
 */
void
DeliveryGiveBack(const Subscription *subscription, int64 batch, bool singly)
{
	Position position;

	LockBatch(subscription, batch, &position);
	if (singly)
	{
		Batch again = {.number = batch};

		CollectAgain(subscription, &position, &again);
		position.singles = list_length(again.events);
	}
	position.batch = 0;
	PositionWrite(subscription->name, &position);
	WakeupAfterCommit(OutboxChannel());
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
 * DeliveryOutstanding returns the number of the batch that is out, or 0, and how
 * many events it has.
 */
int64
DeliveryOutstanding(const Subscription *subscription, int *events)
{
	Position position;
	Batch batch;

	*events = 0;
	if (!PositionRead(subscription->name, &position) || position.batch == 0)
		return 0;
	memset(&batch, 0, sizeof(batch));
	batch.number = position.batch;
	CollectAgain(subscription, &position, &batch);
	*events = list_length(batch.events);
	return position.batch;
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
 * DeliveryNack parks an event of the batch, and lets the later ones of its
 * aggregate wait behind it.  Returns when it will be given again, or 0 if it is
 * a dead letter now.
 */
TimestampTz
DeliveryNack(const Subscription *subscription, int64 number, const pg_uuid_t *id, const text *error,
			 const Interval *retryIn)
{
	Batch batch = {.number = number};
	TimestampTz retryAt = 0;
	Position position;
	const Event *event;
	ListCell *cell;
	bool changed;
	int attempts;

	LockBatch(subscription, number, &position);
	CollectAgain(subscription, &position, &batch);
	cell = FindEvent(subscription, &batch, id);
	event = lfirst(cell);
	attempts = DatumGetInt32(event->values[EVENT_ATTEMPT]);
	if (attempts < subscription->maxAttempts)
		retryAt = RetryAt(subscription, attempts, retryIn);

	ParkedFail(subscription->name, event, error, retryAt);
	SubscriptionNoteError(subscription->name, error);
	changed = TakeOut(&position, EventSeq(event));
	if (EventAggregate(event) != NULL)
	{
		if (retryAt != 0)
			changed |= HoldFollowers(subscription, &position, batch.events, cell);
		else
			ParkedLetGo(subscription->name, EventAggregate(event));
	}
	if (changed)
		PositionWrite(subscription->name, &position);
	CountEvent(COUNT_FAILED);
	CountEvents(COUNT_DEAD_LETTERS, retryAt == 0 ? 1 : 0);
	return retryAt;
}
