/*-------------------------------------------------------------------------
 *
 * reaper/lag.c
 *	  Moving a subscription past events that are older than its max_lag.
 *
 * Locks: the subscription's, if it is free, from the write to the end of the transaction;
 * the tables, and the reaper's (OutboxReaperLock()).
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

#include "base/compat.h"
#include "base/query.h"
#include "base/stats.h"
#include "base/timing.h"
#include "delivery/position.h"
#include "delivery/subscription.h"
#include "outbox/scan.h"
#include "outbox/table.h"
#include "reaper/reaper.h"

/*
 * A batch reads the positions of so many subscriptions, and so many rows of one, at most;
 * and no other subscription after so many rows.
 */
#define BATCH_SUBSCRIPTIONS 250
#define BATCH_ROWS 10000

/* What a scan has found. */
typedef struct Passed
{
	int64 first; /* the lowest number that is too old; 0: none is */
	int64 last;
	bool young;		/* the next event is not too old */
	bool exhausted; /* the scan ended at its limit */
	int64 rows;		/* read, whatever came of them */
} Passed;

static ExtensionQuery nextQuery = {
	.table = "subscription",
	.text = "SELECT number, subscription, max_lag FROM idempotency.subscription"
			" WHERE number" GT "$1 AND number" LE "$2 AND max_lag IS NOT NULL"
			" ORDER BY number LIMIT 1",
	.parameters = 2,
	.types = {INT8OID, INT8OID},
	.results = {INT8OID, TEXTOID, INTERVALOID},
};

static ExtensionQuery highestQuery = {
	.table = "subscription",
	.text = "SELECT coalesce(pg_catalog.max(number), 0) AS number FROM idempotency.subscription",
	.results = {INT8OID},
};

/*
 * Before returns the time "length" ago.  A length above 10,000 years counts as 10,000 years.
 */
static TimestampTz
Before(const Interval *length)
{
	double longest = (double) INT64CONST(10000) * 365 * USECS_PER_DAY;

	return GetCurrentTimestamp() - (TimestampTz) Min(IntervalMicroseconds(length), longest);
}

/* ----------------------------------------------------------------
 * One subscription
 * ----------------------------------------------------------------
 */

/*
 * ReadOld reads the events after "from" until one is not too old, and sets "reached" to
 * the cursor before that one.  With "batchEnd" it reads those of a batch, and "reached"
 * is NULL.
 */
static void
ReadOld(const OutboxCursor *from, const OutboxCursor *batchEnd, TimestampTz cutoff, Passed *passed,
		OutboxCursor *reached)
{
	OutboxScan *scan =
		OutboxScanBegin(from, batchEnd, batchEnd != NULL ? PG_INT64_MAX : BATCH_ROWS);
	TupleTableSlot *slot;
	int64 seq = 0;

	while (!passed->young && (slot = OutboxScanNext(scan)) != NULL)
	{
		bool isnull;

		seq = OutboxSeq(slot);
		if (DatumGetTimestampTz(slot_getattr(slot, OUT_PUBLISHED_AT, &isnull)) >= cutoff)
			passed->young = true;
		else
		{
			passed->first = passed->first == 0 ? seq : Min(passed->first, seq);
			passed->last = Max(passed->last, seq);
		}
	}
	passed->exhausted = !passed->young && OutboxScanExhausted(scan);
	passed->rows += OutboxScanEnd(scan, reached);

	/* The scan has returned the young event: move the cursor back before it */
	if (passed->young && reached != NULL)
	{
		if (seq > from->passed)
			reached->passed = seq - 1;
		else
			CursorAddNumber(reached, seq);
	}
}

/*
 * PassOld moves "position", which is not written, past events that are too old.  Returns
 * whether there is something to write: a scan that met its limit is worth it as well.
 */
static bool
PassOld(Position *position, TimestampTz cutoff, Passed *passed)
{
	bool isOut = position->batch != 0;
	OutboxCursor reached;

	/* A batch is its consumer's until its lease is over and all of it is too old. */
	if (isOut)
	{
		if (PositionIsLeased(position))
			return false;
		ReadOld(&position->start, &position->end, cutoff, passed, NULL);
		if (passed->young)
			return false;
	}

	ReadOld(isOut ? &position->end : &position->start, NULL, cutoff, passed, &reached);
	position->start = reached;
	position->batch = 0;
	return passed->first != 0 || (passed->exhausted && !isOut);
}

/*
 * MoveOn moves a subscription past events that are too old, if its lock is free.  Returns
 * whether it was moved, sets "more" if there may be more of them, and adds what it read to
 * "rows".
 */
static bool
MoveOn(const text *subscription, TimestampTz cutoff, bool *more, int64 *rows)
{
	Position position;
	Position current;
	Passed passed = {0};
	bool moves = PositionRead(subscription, &position) && PassOld(&position, cutoff, &passed);

	*rows += passed.rows;
	if (!moves)
		return false;

	/* Lock after reading: a fetch() that finds the lock taken returns nothing. */
	InjectionPoint("lag-lock");
	if (!SubscriptionLock(subscription, 0))
		return false;
	InjectionPoint("lag-look");
	if (!PositionRead(subscription, &current) || current.version != position.version)
	{
		SubscriptionUnlock(subscription);
		return false;
	}

	InjectionPoint("lag-pass");
	PositionWrite(subscription, &position);
	InjectionPoint("lag-count");
	if (passed.first != 0)
	{
		int64 count = passed.last - passed.first + 1;

		CountEvents(COUNT_EVENTS_DROPPED, count);
		ereport(
			LOG,
			(errmsg("subscription \"%s\" was moved past events that are older than its max_lag",
					text_to_cstring(subscription)),
			 errdetail("Numbers passed over, as many events at most: %lld; the last of them: %lld.",
					   (long long) count, (long long) passed.last)));
	}
	*more = passed.exhausted;
	return true;
}

/* ----------------------------------------------------------------
 * All subscriptions
 * ----------------------------------------------------------------
 */

/*
 * Begin begins a pass over all subscriptions.  It can end early, and so begins at a random
 * number, so that every subscription is reached in time.
 */
static void
Begin(LagRun *run)
{
	run->begun = true;
	run->upto = PG_INT64_MAX;
	(void) ExtensionQueryRun(&highestQuery, NULL, NULL);
	run->from = pg_prng_uint64_range(&pg_global_prng_state, 0,
									 DatumGetInt64(ExtensionQueryValue(&highestQuery, 0, 1, NULL)));
	ExtensionQueryEnd();
	run->after = run->from;
}

/*
 * NextLimited finds the next subscription of the pass that has a max_lag, and sets its
 * number, its name, and the time before which events are too old.  Returns false at the
 * end of the pass.
 */
static bool
NextLimited(LagRun *run, int64 *number, text **subscription, TimestampTz *cutoff)
{
	MemoryContext caller = CurrentMemoryContext;

	for (;;)
	{
		Datum values[] = {Int64GetDatum(run->after), Int64GetDatum(run->upto)};
		bool found = ExtensionQueryRun(&nextQuery, values, NULL) > 0;

		if (found)
		{
			MemoryContext spi = MemoryContextSwitchTo(caller);

			*number = DatumGetInt64(ExtensionQueryValue(&nextQuery, 0, 1, NULL));
			*subscription = DatumGetTextPCopy(ExtensionQueryValue(&nextQuery, 0, 2, NULL));
			*cutoff = Before(DatumGetIntervalP(ExtensionQueryValue(&nextQuery, 0, 3, NULL)));
			MemoryContextSwitchTo(spi);
		}
		ExtensionQueryEnd();
		if (found || run->upto == run->from)
			return found;
		run->after = 0;
		run->upto = run->from;
	}
}

/*
 * Batch continues the pass until a subscription was moved, or BATCH_SUBSCRIPTIONS or
 * BATCH_ROWS were read.
 */
static RunState
Batch(LagRun *run)
{
	MemoryContext each =
		AllocSetContextCreate(CurrentMemoryContext, "idempotency lag", ALLOCSET_SMALL_SIZES);
	MemoryContext caller = MemoryContextSwitchTo(each);
	bool complete = false;
	bool moved = false;
	int64 rows = 0;

	for (int i = 0; i < BATCH_SUBSCRIPTIONS && rows < BATCH_ROWS && !moved && !complete; i++)
	{
		TimestampTz cutoff;
		text *subscription;
		bool more = false;
		int64 number;

		CHECK_FOR_INTERRUPTS();
		complete = !NextLimited(run, &number, &subscription, &cutoff);
		if (!complete)
		{
			moved = MoveOn(subscription, cutoff, &more, &rows);
			if (!more)
				run->after = number;
		}
		MemoryContextReset(each);
	}
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	return complete ? RUN_ENDED : RUN_GOES_ON;
}

/*
 * OutboxLagBatch continues a pass over the subscriptions that have a max_lag, and moves
 * one of them that is too far behind.  With dontWait it waits for no table and no other
 * reaper.  Returns RUN_ENDED at the end of the pass.  Throws 55000 where the extension is
 * not installed or a table was altered.
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
		Begin(run);
	return Batch(run);
}
