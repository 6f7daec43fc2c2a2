/*-------------------------------------------------------------------------
 *
 * outboxlag.c
 *	  Moving on a subscription that nobody reads.
 *
 * Events stay as long as a subscription needs them, so one that nobody reads lets
 * the outbox grow for ever.  One that has a max_lag, and whose oldest event is older
 * than that, is moved to the first event that is not: what lies between is lost to it,
 * which the log says and a counter counts, by numbers.  What it has parked stays.  An
 * event that is in flight is no exception: its age counts from publish(), so that a
 * max_lag has to be longer than the longest transaction that publishes.
 *
 * Numbers rise with time, so that the place is found by bisection in the index.  The
 * events between are not read: a transaction may have published a million of them, and
 * a hundred subscriptions may have to be moved past them.  Below the place no row will
 * be inserted any more, since all earlier publishers have left publish() by then.
 *
 * A batch that is out is its consumer's until its lease is over.  Then it is given up,
 * once all of it is too old: the position never goes back into one, where what has been
 * parked of it would be met once more, even after it had been acknowledged.
 *
 * Locks: the subscription's, to the end of the transaction, if there is something
 * to be lost, and if it is free; the tables, and the reaper's (OutboxReaperLock()).
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "outboxhorizon.h"
#include "outboxlag.h"
#include "outboxreap.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "ownerquery.h"
#include "position.h"
#include "serverlog.h"
#include "stats.h"
#include "subscription.h"
#include "timing.h"

/* So many subscriptions are looked at in a transaction at most. */
#define LOOKS 250

/* If so many rows show no visible event, the age of the next one counts. */
#define LOOK_ROWS 100
#define PROBE_ROWS 10

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

/* ----------------------------------------------------------------
 * One subscription
 * ----------------------------------------------------------------
 */

static TimestampTz
PublishedAt(TupleTableSlot *slot)
{
	bool isnull;

	return DatumGetTimestampTz(slot_getattr(slot, OUT_PUBLISHED_AT, &isnull));
}

/* The rows of the outbox, to find the first at or behind a number. */
typedef struct Probe
{
	Relation table;
	Relation index;
	Snapshot snapshot;
	IndexScanDesc scan;
	TupleTableSlot *slot;
} Probe;

static void
ProbeBegin(Probe *probe)
{
	probe->table = OutboxTableOpen(AccessShareLock);
	probe->index = index_open(OutboxTableIndex(probe->table), AccessShareLock);
	probe->snapshot = RegisterSnapshot(GetLatestSnapshot());
	probe->scan = index_beginscan_compat(probe->table, probe->index, SnapshotAny, 2);
	probe->slot = table_slot_create(probe->table, NULL);
}

/*
 * ProbeRow puts the first row between two numbers into the slot: one that is visible
 * or may become so, unless there are PROBE_ROWS before it.  Returns false if there is
 * none.
 */
static bool
ProbeRow(Probe *probe, int64 from, int64 upto)
{
	int64 entries = 0;

	OutboxRescan(probe->scan, from, upto);
	for (int rows = 0; OutboxNextRow(probe->scan, ForwardScanDirection, probe->slot, &entries);)
	{
		if (++rows > PROBE_ROWS || OutboxStateOf(probe->slot, probe->snapshot) != ROW_GONE)
			return true;
	}
	return false;
}

static void
ProbeEnd(Probe *probe)
{
	index_endscan(probe->scan);
	ExecDropSingleTupleTableSlot(probe->slot);
	UnregisterSnapshot(probe->snapshot);
	index_close(probe->index, AccessShareLock);
	table_close(probe->table, AccessShareLock);
}

/*
 * OldestBehind sets the number of the oldest event that the subscription has not had,
 * and when it was published.  Returns false if there is none.
 */
static bool
OldestBehind(const Position *position, int64 *seq, TimestampTz *publishedAt)
{
	OutboxScan *scan = OutboxScanBegin(&position->start, NULL, LOOK_ROWS);
	TupleTableSlot *slot = OutboxScanNext(scan);
	bool found = slot != NULL;
	bool exhausted;
	int64 next;

	if (found)
	{
		*seq = OutboxSeq(slot);
		*publishedAt = PublishedAt(slot);
	}
	exhausted = !found && OutboxScanExhausted(scan, &next);
	(void) OutboxScanEnd(scan, NULL);
	if (exhausted)
	{
		Probe probe;

		/* What was in flight and is not visible among so many rows is no reason to move it. */
		ProbeBegin(&probe);
		found = ProbeRow(&probe, Max(next, position->start.passed + 1), PG_INT64_MAX);
		if (found)
		{
			*seq = OutboxSeq(probe.slot);
			*publishedAt = PublishedAt(probe.slot);
		}
		ProbeEnd(&probe);
	}
	return found;
}

/*
 * TooOldUpTo returns the number up to which every event is too old, the one of number
 * "oldest" being so; 0 if a publisher stands in the way just now.
 */
static int64
TooOldUpTo(int64 oldest, TimestampTz cutoff)
{
	int64 young = Max(OutboxLastNumber(), oldest) + 1; /* the first that is not, as far as known */
	int64 high = young;
	int64 low = oldest;
	Probe probe;

	ProbeBegin(&probe);
	if (!OutboxNobodyIsPublishing(probe.table))
		young = 1;
	while (young > 1 && high - low > 1)
	{
		int64 middle = low + (high - low) / 2;
		bool found = ProbeRow(&probe, middle, high - 1);

		if (found && PublishedAt(probe.slot) < cutoff)
		{
			low = OutboxSeq(probe.slot);
			continue;
		}
		high = middle;
		if (found)
			young = OutboxSeq(probe.slot);
	}
	ProbeEnd(&probe);
	return young - 1;
}

/*
 * ReadIfBehind reads the position, and sets which numbers are too old for the
 * subscription.  Returns false if there is none, or it is not to be moved now: a
 * consumer has a batch, or an expired batch is not too old as a whole.
 */
static bool
ReadIfBehind(const Subscription *subscription, TimestampTz cutoff, Position *position,
			 int64 *oldest, int64 *upto)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz publishedAt = 0;

	if (!PositionRead(subscription->name, position))
		return false;
	if (position->batch != 0 && now >= position->leasedAt && now <= position->leasedUntil)
		return false;
	if (!OldestBehind(position, oldest, &publishedAt) || publishedAt >= cutoff)
		return false;
	*upto = TooOldUpTo(*oldest, cutoff);
	return *upto >= (position->batch != 0 ? Max(*oldest, position->end.passed) : *oldest);
}

/*
 * PassOver moves the position behind a number.
 */
static void
PassOver(const Subscription *subscription, Position *position, int64 upto)
{
	const OutboxCursor from = position->batch != 0 ? position->end : position->start;

	CursorInit(&position->start, Max(from.passed, upto));
	for (int i = 0; i < from.count; i++)
		CursorAddRange(&position->start, &from.inFlight[i], Max(from.inFlight[i].from, upto + 1));
	position->batch = 0;
	InjectionPoint("lag-pass");
	PositionWrite(subscription->name, position);
	InjectionPoint("lag-count");
}

/*
 * MoveOn moves a subscription on if it is behind and free.  Returns whether it has.
 */
static bool
MoveOn(const Subscription *subscription, TimestampTz cutoff)
{
	Position position;
	int64 oldest;
	int64 upto;

	/* A fetch() that does not wait must not find the lock taken in vain. */
	if (!ReadIfBehind(subscription, cutoff, &position, &oldest, &upto))
		return false;
	InjectionPoint("lag-lock");
	if (!SubscriptionLock(subscription->name, 0))
		return false;
	InjectionPoint("lag-look");
	if (!ReadIfBehind(subscription, cutoff, &position, &oldest, &upto))
	{
		SubscriptionUnlock(subscription->name);
		return false;
	}
	PassOver(subscription, &position, upto);
	CountEvents(COUNT_EVENTS_DROPPED, upto - oldest + 1);
	LogEventsDropped(subscription->name, upto - oldest + 1, upto);
	return true;
}

/* ----------------------------------------------------------------
 * All of them
 * ----------------------------------------------------------------
 */

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

		CHECK_FOR_INTERRUPTS();
		round = !NextLimited(run, &number, &cutoff);
		if (!round)
		{
			Subscription *subscription = SubscriptionFindNumber(number);

			moved = subscription != NULL && MoveOn(subscription, cutoff);
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
 * it moves one of them on that is too far behind.  With dontWait it waits
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
