/*-------------------------------------------------------------------------
 *
 * outboxlag.c
 *	  Moving on a subscription that nobody reads.
 *
 * Events stay as long as a subscription needs them, so one that nobody reads lets
 * the outbox grow for ever.  One that has a max_lag is moved on, past the events
 * that are older than that and that it has not had: they are lost to it, which
 * the log says and a counter counts.  What it has parked stays.  An event that
 * was in flight is no exception: its age counts from publish(), so that a max_lag
 * has to be longer than the longest transaction that publishes.
 *
 * A batch that is out is its consumer's until its lease is over.  Then it is given
 * up, if something in it is too old: what is not will be given again.
 *
 * The scan ends at the first event that is young enough.  That one has been given
 * by then, so it is put back into the cursor, as what was in flight of a transaction
 * that is over.
 *
 * Locks: the subscription's, to the end of the transaction, if there is something
 * to be lost, and if it is free; the tables, and the reaper's (OutboxReaperLock()).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "event.h"
#include "outboxerrors.h"
#include "outboxlag.h"
#include "outboxreap.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "ownerquery.h"
#include "parked.h"
#include "position.h"
#include "stats.h"
#include "subscription.h"
#include "timing.h"

/* So many events are passed over in a transaction at most. */
#define BATCH_EVENTS 5000

/* What was passed over. */
typedef struct Loss
{
	int64 passed; /* events */
	int64 lost;	  /* of them, those that would have been delivered */
	int64 upto;	  /* the highest number */
} Loss;

static OwnerQuery nextQuery = {
	.table = "subscription",
	.text = "SELECT number, max_lag FROM idempotency.subscription"
			" WHERE number OPERATOR(pg_catalog.>) $1 AND max_lag IS NOT NULL"
			" ORDER BY number LIMIT 1",
	.parameters = 1,
	.types = {INT8OID},
};

/*
 * Before returns the time that is so long ago.  No length is too large for it.
 */
static TimestampTz
Before(const Interval *length)
{
	double longest = (double) INT64CONST(10000) * 365 * USECS_PER_DAY;

	return GetCurrentTimestamp() - (TimestampTz) Min(IntervalMicroseconds(length), longest);
}

/*
 * NextLimited finds the subscription with a max_lag whose number is the next
 * after "*number", and sets that, and the time before which events are too old.
 * Returns false if there is none.
 */
static bool
NextLimited(int64 *number, TimestampTz *cutoff)
{
	Datum after = Int64GetDatum(*number);
	bool found = OwnerQueryRun(&nextQuery, &after, NULL) > 0;

	if (found)
	{
		bool isnull;

		*number = DatumGetInt64(OwnerQueryValue(0, 1, &isnull));
		*cutoff = Before(DatumGetIntervalP(OwnerQueryValue(0, 2, &isnull)));
	}
	OwnerQueryEnd();
	return found;
}

/*
 * IsTooOld tells whether the event in the slot was published before "cutoff".
 */
static bool
IsTooOld(TupleTableSlot *slot, TimestampTz cutoff)
{
	bool isnull;

	return DatumGetTimestampTz(slot_getattr(slot, OUT_PUBLISHED_AT, &isnull)) < cutoff;
}

/*
 * ReadIfBehind reads the position, and tells whether the next event behind it is
 * too old, and nobody has it just now.
 */
static bool
ReadIfBehind(const Subscription *subscription, TimestampTz cutoff, Position *position)
{
	TimestampTz now = GetCurrentTimestamp();
	TupleTableSlot *slot;
	OutboxScan *scan;
	bool behind;

	if (!PositionRead(subscription->name, position))
		return false;
	if (position->batch != 0 && now >= position->leasedAt && now <= position->leasedUntil)
		return false;

	scan = OutboxScanBegin(&position->start, NULL);
	slot = OutboxScanNext(scan);
	behind = slot != NULL && IsTooOld(slot, cutoff);
	OutboxScanEnd(scan, NULL);
	return behind;
}

/*
 * IsLost tells whether the event in the slot would have been delivered: it is of
 * the subscription's topics, and not parked.
 */
static bool
IsLost(const Subscription *subscription, TupleTableSlot *slot, const ParkedSummary *parked)
{
	bool isnull;

	if (!TopicMatches(&subscription->topics,
					  DatumGetTextPP(slot_getattr(slot, OUT_TOPIC, &isnull))))
		return false;
	return !ParkedHas(subscription->name, parked, OutboxSeq(slot));
}

/*
 * PassOver moves the position past events that are too old, and fills "loss".
 * Returns whether there may be more of them.
 */
static bool
PassOver(const Subscription *subscription, TimestampTz cutoff, Position *position, Loss *loss)
{
	InFlight young = {.over = true};
	MemoryContext each =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency lag", ALLOCSET_SMALL_SIZES);
	TupleTableSlot *slot;
	ParkedSummary parked;
	OutboxScan *scan;

	ParkedSummarize(subscription->name, &position->start, &parked);
	scan = OutboxScanBegin(&position->start, NULL);
	while (loss->passed < BATCH_EVENTS && (slot = OutboxScanNext(scan)) != NULL)
	{
		MemoryContext caller;

		if (!IsTooOld(slot, cutoff))
		{
			young.txid = OutboxTxid(slot);
			young.from = young.upto = OutboxSeq(slot);
			break;
		}
		caller = MemoryContextSwitchTo(each);
		loss->passed++;
		loss->upto = Max(loss->upto, OutboxSeq(slot));
		if (IsLost(subscription, slot, &parked))
			loss->lost++;
		MemoryContextSwitchTo(caller);
		MemoryContextReset(each);
	}
	OutboxScanEnd(scan, &position->start);
	if (young.from != 0)
		CursorAdd(&position->start, &young);
	position->batch = 0;
	PositionWrite(subscription->name, position);
	return loss->passed == BATCH_EVENTS;
}

/*
 * MoveOn moves on one subscription, if it is behind and free.  Returns whether
 * it is to be looked at again.
 */
static bool
MoveOn(const Subscription *subscription, TimestampTz cutoff)
{
	Loss loss = {0};
	Position position;
	bool more;

	/* A fetch() that does not wait must not find the lock taken in vain. */
	if (!ReadIfBehind(subscription, cutoff, &position) || !SubscriptionLock(subscription->name, 0))
		return false;
	if (!ReadIfBehind(subscription, cutoff, &position))
	{
		SubscriptionUnlock(subscription->name);
		return false;
	}
	more = PassOver(subscription, cutoff, &position, &loss);
	CountEvents(COUNT_EVENTS_DROPPED, loss.lost);
	if (loss.lost > 0)
		LogEventsDropped(subscription->name, loss.lost, loss.passed, loss.upto);
	return more;
}

/*
 * OutboxLagBatch moves on the subscription that has the next number after
 * "*number" and is too far behind, some way, and sets "*number" to its number
 * when it is done with it.  With dontWait it waits for no table and no other
 * reaper.  Returns RUN_ENDED if there is no subscription left.  Throws 55000
 * where the extension is not installed or a table was altered.
 */
RunState
OutboxLagBatch(bool dontWait, int64 *number)
{
	RunState state = RUN_ENDED;
	int64 next = *number;
	MemoryContext each;
	MemoryContext caller;
	TimestampTz cutoff;

	if (IsolationUsesXactSnapshot())
		return RUN_ENDED;
	if (!OutboxReaperLock(dontWait))
		return RUN_BUSY;

	each = AllocSetContextCreate(CurrentMemoryContext, "idempotency lag", ALLOCSET_SMALL_SIZES);
	caller = MemoryContextSwitchTo(each);
	if (OutboxLastNumber() > 0 && NextLimited(&next, &cutoff))
	{
		Subscription *subscription = SubscriptionFindNumber(next);

		state = RUN_GOES_ON;
		if (subscription == NULL || !MoveOn(subscription, cutoff))
			*number = next;
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	return state;
}
