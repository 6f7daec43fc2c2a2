/*-------------------------------------------------------------------------
 *
 * delivery.c
 *	  Batches of events: giving them out.
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
 * it is met.  settlement.c is what becomes of a batch.
 *
 * Locks: the caller holds the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "delivery.h"
#include "outboxerrors.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "parked.h"
#include "position.h"
#include "stats.h"
#include "timing.h"

/* After so many rows that gave no event, it is worth writing down. */
#define PROGRESS_EVENTS 1000

/*
 * One look parks so many events at most, and looks at so many rows; the rest is left to
 * the next one, when the position is committed.  So a consumer whose statements have a
 * time limit makes progress, whatever the backlog is.
 */
#define LOOK_PARKS 1000
#define LOOK_ROWS 100000

#define BATCH_BITS 53

/*
 * NewBatchNumber returns a number that nobody can guess, so that a consumer who
 * comes late does not acknowledge another's batch; never 0, and of 53 bits, which is
 * what a client that reads JSON numbers as doubles keeps exactly.
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
 * DeliveryPosition reads where the subscription stands.  Throws 42704 if it was
 * removed since it was looked up.
 */
void
DeliveryPosition(const Subscription *subscription, Position *position)
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
 * event that has to wait for another is parked.  Sets batch->more where a limit of the
 * look was met.
 */
static void
Collect(const Subscription *subscription, OutboxScan *scan, int max, const ParkedSummary *parked,
		Batch *batch)
{
	TupleTableSlot *slot;
	int waiting = 0;
	int64 next;

	while (list_length(batch->events) < max && waiting < LOOK_PARKS &&
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
	batch->more = waiting == LOOK_PARKS || OutboxScanExhausted(scan, &next);
}

/*
 * BatchCollect fills the batch with the events of the one that is out.
 */
void
BatchCollect(const Subscription *subscription, const Position *position, Batch *batch)
{
	ParkedSummary parked;
	TupleTableSlot *slot;
	OutboxScan *scan;

	ParkedSummarize(subscription->name, &position->start, &parked);
	batch->events = ParkedInBatch(subscription->name, position);
	scan = OutboxScanBegin(&position->start, &position->end, PG_INT64_MAX);
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
	InjectionPoint("fetch-note");
	PositionWrite(subscription->name, position);
	InjectionPoint("fetch-give");
	batch->wrote = true;
}

/*
 * GiveAgain gives out the batch that is out once more.
 */
static void
GiveAgain(const Subscription *subscription, Position *position, const Interval *lease, Batch *batch)
{
	position->batch = batch->number;
	BatchCollect(subscription, position, batch);
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

	scan = OutboxScanBegin(&position->start, NULL, LOOK_ROWS);
	Collect(subscription, scan, max, &parked, batch);
	looked = OutboxScanEnd(scan, &position->end);

	if (batch->events != NIL && position->singles > 0)
		position->singles--;
	if (batch->events != NIL || batch->wrote || batch->more || looked >= PROGRESS_EVENTS ||
		(plan->last && (looked > 0 || position->end.count < position->start.count)))
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
	DeliveryPosition(subscription, &position);
	InjectionPoint("fetch-collect");
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

/*
 * DeliveryOutstanding fills "batch" with the one that is out, in the current
 * memory context.  Returns false if none is.
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
