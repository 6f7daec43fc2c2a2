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
 * up, if something in it is too old.  What is not is parked, to be given again: were
 * the position to go back for it, what has been parked of the batch already would be
 * met once more, even after it had been acknowledged.
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
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "delivery.h"
#include "event.h"
#include "outboxlag.h"
#include "outboxreap.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "ownerquery.h"
#include "parked.h"
#include "position.h"
#include "serverlog.h"
#include "stats.h"
#include "subscription.h"
#include "timing.h"

/* So many events are passed over in a transaction at most. */
#define BATCH_EVENTS 5000

/* So many subscriptions are looked at in a transaction at most. */
#define LOOKS 250

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
			" WHERE number" GT "$1 AND number" LE "$2 AND max_lag IS NOT NULL"
			" ORDER BY number LIMIT 1",
	.parameters = 2,
	.types = {INT8OID, INT8OID},
	.results = {INT8OID, INTERVALOID},
};

static OwnerQuery highestQuery = {
	.table = "subscription",
	.text = "SELECT coalesce(pg_catalog.max(number), 0) AS number FROM idempotency.subscription",
	.results = {INT8OID},
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
 * Begin sets out on a round through all subscriptions.  One that may end before it
 * has come round begins anywhere, so that in time each has its turn.
 */
static void
Begin(LagRun *run, bool anywhere)
{
	run->begun = true;
	run->upto = PG_INT64_MAX;
	if (!anywhere)
		return;
	(void) OwnerQueryRun(&highestQuery, NULL, NULL);
	run->from = pg_prng_uint64_range(&pg_global_prng_state, 0,
									 DatumGetInt64(OwnerQueryValue(&highestQuery, 0, 1, NULL)));
	OwnerQueryEnd();
	run->after = run->from;
}

/*
 * NextLimited finds the next subscription with a max_lag on the round, and sets
 * its number, and the time before which events are too old.  Returns false when it
 * is round.
 */
static bool
NextLimited(LagRun *run, int64 *number, TimestampTz *cutoff)
{
	for (;;)
	{
		Datum values[] = {Int64GetDatum(run->after), Int64GetDatum(run->upto)};
		bool found = OwnerQueryRun(&nextQuery, values, NULL) > 0;

		if (found)
		{
			*number = DatumGetInt64(OwnerQueryValue(&nextQuery, 0, 1, NULL));
			*cutoff = Before(DatumGetIntervalP(OwnerQueryValue(&nextQuery, 0, 2, NULL)));
		}
		OwnerQueryEnd();
		if (found || run->upto == run->from)
			return found;
		run->after = 0;
		run->upto = run->from;
	}
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
 * GiveUpBatch ends the batch that is out, and fills "loss" with what was in it and
 * is too old.  The rest is parked, as it is when a batch is given back.
 */
static void
GiveUpBatch(const Subscription *subscription, TimestampTz cutoff, Position *position, Loss *loss)
{
	TimestampTz now = GetCurrentTimestamp();
	ParkedSummary parked;
	ListCell *cell;
	Batch batch;

	(void) DeliveryOutstanding(subscription, &batch);
	ParkedSummarize(subscription->name, &position->start, &parked);
	foreach (cell, batch.events)
	{
		const Event *event = lfirst(cell);

		if (ParkedHas(subscription->name, &parked, EventSeq(event)))
			continue;
		if (DatumGetTimestampTz(event->values[EVENT_PUBLISHED_AT]) >= cutoff)
		{
			ParkedAgain(subscription->name, event, now);
			continue;
		}
		loss->passed++;
		loss->lost++;
		loss->upto = Max(loss->upto, EventSeq(event));
	}
	ParkedHeadsOnly(subscription->name, now);
	position->start = position->end;
	position->batch = 0;
	InjectionPoint("lag-giveup");
	PositionWrite(subscription->name, position);
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
	InjectionPoint("lag-pass");
	PositionWrite(subscription->name, position);
	InjectionPoint("lag-count");
	return loss->passed >= BATCH_EVENTS;
}

/*
 * MoveOn moves on one subscription some way, if it is behind and free, and sets
 * "*more" if it is behind still.  Returns whether it has written anything.
 */
static bool
MoveOn(const Subscription *subscription, TimestampTz cutoff, bool *more)
{
	Loss loss = {0};
	Position position;

	/* A fetch() that does not wait must not find the lock taken in vain. */
	if (!ReadIfBehind(subscription, cutoff, &position))
		return false;
	InjectionPoint("lag-lock");
	if (!SubscriptionLock(subscription->name, 0))
		return false;
	InjectionPoint("lag-look");
	if (!ReadIfBehind(subscription, cutoff, &position))
	{
		SubscriptionUnlock(subscription->name);
		return false;
	}
	if (position.batch != 0)
		GiveUpBatch(subscription, cutoff, &position, &loss);
	*more = PassOver(subscription, cutoff, &position, &loss);
	CountEvents(COUNT_EVENTS_DROPPED, loss.lost);
	if (loss.lost > 0)
		LogEventsDropped(subscription->name, loss.lost, loss.passed, loss.upto);
	return true;
}

/*
 * LookOn goes on with the round until it has moved a subscription on, or looked at
 * LOOKS of them.  Returns whether it is round.
 */
static bool
LookOn(LagRun *run)
{
	MemoryContext each =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency lag", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);
	bool round = false;
	bool moved = false;

	for (int looks = 0; looks < LOOKS && !moved && !round; looks++)
	{
		TimestampTz cutoff;
		int64 number;
		bool more = false;

		CHECK_FOR_INTERRUPTS();
		round = !NextLimited(run, &number, &cutoff);
		if (!round)
		{
			Subscription *subscription = SubscriptionFindNumber(number);

			moved = subscription != NULL && MoveOn(subscription, cutoff, &more);
			if (!more)
				run->after = number;
		}
		MemoryContextReset(each);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	return round;
}

/*
 * OutboxLagBatch goes on with a round over the subscriptions that have a max_lag:
 * it moves one of them on that is too far behind, some way.  With dontWait it waits
 * for no table and no other reaper.  Returns RUN_ENDED when it is round.  Throws
 * 55000 where the extension is not installed or a table was altered.
 */
RunState
OutboxLagBatch(bool dontWait, LagRun *run)
{
	if (IsolationUsesXactSnapshot())
		return RUN_ENDED;
	if (!OutboxReaperLock(dontWait))
		return RUN_BUSY;
	if (OutboxLastNumber() == 0)
		return RUN_ENDED;
	if (!run->begun)
		Begin(run, dontWait);
	return LookOn(run) ? RUN_ENDED : RUN_GOES_ON;
}
