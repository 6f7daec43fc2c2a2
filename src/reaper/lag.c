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

/* How many rows a batch reads of a subscription, and how long it moves subscriptions. */
#define BATCH_ROWS 10000
#define BATCH_MS 50

/* A max_lag above 10,000 years counts as 10,000 years: no timestamp is before that. */
#define LONGEST_LAG ((double) INT64CONST(10000) * 365 * USECS_PER_DAY)

/* What is too old. */
typedef struct Passed
{
	int64 first; /* the lowest number; 0: none is */
	int64 last;
	bool young;		/* the next event is not too old */
	bool exhausted; /* the scan ended at its limit */
} Passed;

/* In a random order, so that every subscription is read in time, even if batches end early. */
static ExtensionQuery limitedQuery = {
	.table = "subscription",
	.text = "SELECT subscription, max_lag FROM idempotency.subscription"
			" WHERE max_lag IS NOT NULL ORDER BY pg_catalog.random()",
	.results = {TEXTOID, INTERVALOID},
};

/*
 * PassOld moves "cursor" after the events that are too old, and before the first one that is
 * not.  With "batchEnd" it reads the events of a batch, and moves nothing.
 */
static void
PassOld(OutboxCursor *cursor, const OutboxCursor *batchEnd, TimestampTz cutoff, Passed *passed)
{
	OutboxScan *scan =
		OutboxScanBegin(cursor, batchEnd, batchEnd != NULL ? PG_INT64_MAX : BATCH_ROWS);
	int64 before = cursor->passed;
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
	passed->exhausted = OutboxScanExhausted(scan);
	(void) OutboxScanEnd(scan, batchEnd == NULL ? cursor : NULL);

	/* The scan has returned the young event: move the cursor back before it */
	if (batchEnd != NULL || !passed->young)
		return;
	if (seq > before)
		cursor->passed = seq - 1;
	else
		CursorAddNumber(cursor, seq);
}

/*
 * PassLate moves "position", which is not written, past events that are too old.  Returns
 * whether there is something to write: a scan that met its limit is worth it as well.
 */
static bool
PassLate(Position *position, TimestampTz cutoff, Passed *passed)
{
	bool isOut = position->batch != 0;

	/* A batch is its consumer's until its lease is over and all of it is too old. */
	if (isOut)
	{
		if (PositionIsLeased(position))
			return false;
		PassOld(&position->start, &position->end, cutoff, passed);
		if (passed->young)
			return false;
		position->start = position->end;
		position->batch = 0;
	}
	PassOld(&position->start, NULL, cutoff, passed);
	return passed->first != 0 || (passed->exhausted && !isOut);
}

/*
 * MoveOn moves a subscription past events that are too old, if its lock is free.  Returns
 * whether it was moved, and sets "more" if its scan has met the limit.
 */
static bool
MoveOn(const text *subscription, TimestampTz cutoff, bool *more)
{
	Position position;
	Position current;
	Passed passed = {0};

	if (!PositionRead(subscription, &position) || !PassLate(&position, cutoff, &passed))
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
	*more |= passed.exhausted;
	return true;
}

/*
 * OutboxLagBatch moves the subscriptions that are too far behind.  With dontWait it waits for
 * no table and no other reaper.  Returns RUN_GOES_ON if there is more to pass.  Throws 55000
 * where the extension is not installed or a table was altered.
 */
RunState
OutboxLagBatch(bool dontWait)
{
	MemoryContext each;
	MemoryContext caller;
	bool moved = false;
	bool more = false;
	instr_time began;
	uint64 count;

	if (IsolationUsesXactSnapshot())
		return RUN_ENDED;
	if (!OutboxReaperLock(dontWait))
		return RUN_BUSY;
	if (OutboxLastNumber() == 0)
		return RUN_ENDED;

	count = ExtensionQueryRun(&limitedQuery, NULL, NULL);
	each = AllocSetContextCreate(CurrentMemoryContext, "idempotency lag", ALLOCSET_SMALL_SIZES);
	caller = MemoryContextSwitchTo(each);
	INSTR_TIME_SET_CURRENT(began);
	for (uint64 row = 0; row < count && !more; row++)
	{
		Datum name = ExtensionQueryValue(&limitedQuery, row, 1, NULL);
		Datum lag = ExtensionQueryValue(&limitedQuery, row, 2, NULL);
		double microseconds = IntervalMicroseconds(DatumGetIntervalP(lag));

		CHECK_FOR_INTERRUPTS();
		moved |=
			MoveOn(DatumGetTextPP(name),
				   GetCurrentTimestamp() - (TimestampTz) Min(microseconds, LONGEST_LAG), &more);
		more |= moved && MillisecondsSince(began) >= BATCH_MS;
		MemoryContextReset(each);
	}
	MemoryContextSwitchTo(caller);
	ExtensionQueryEnd();
	return more ? RUN_GOES_ON : RUN_ENDED;
}
