/*-------------------------------------------------------------------------
 *
 * outboxneed.c
 *	  Up to which event no subscription needs any more.
 *
 * A subscription needs what is behind its position, as that is committed, and what
 * was in flight when that was written and may still be delivered.  What we read of a
 * position may be old, but a position only goes forward, so that an old one keeps
 * more.
 *
 * Where there is no subscription, nobody may be inserting one, and nobody may be
 * about to insert an event with a number that is given out: see outboxreap.c.
 *
 * Locks: none that stays, but SHARE on the table of subscriptions where it is empty,
 * if it is free.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "executor/tuptable.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "compat.h"
#include "outboxhorizon.h"
#include "outboxneed.h"
#include "outboxscan.h"
#include "outboxtable.h"
#include "ownerquery.h"
#include "owntable.h"
#include "position.h"

/* How often, and how long in microseconds, we wait for whoever is publishing. */
#define PUBLISHER_LOOKS 10
#define PUBLISHER_SLEEP_US 500

static OwnerQuery namesQuery = {
	.table = "subscription",
	.text = "SELECT subscription FROM idempotency.subscription",
	.results = {TEXTOID},
};

/*
 * Subscriptions returns the names of all, in the current memory context.
 */
static List *
Subscriptions(void)
{
	MemoryContext caller = CurrentMemoryContext;
	uint64 count = OwnerQueryRun(&namesQuery, NULL, NULL);
	MemoryContext spi = MemoryContextSwitchTo(caller);
	List *names = NIL;

	for (uint64 row = 0; row < count; row++)
		names = lappend(names, DatumGetTextPCopy(OwnerQueryValue(&namesQuery, row, 1, NULL)));
	MemoryContextSwitchTo(spi);
	OwnerQueryEnd();
	return names;
}

/*
 * NobodyIsPublishing tells whether all who were in the middle of publish() when
 * it was called have left it.  Waits for them no longer than some milliseconds.
 */
static bool
NobodyIsPublishing(Relation table)
{
	uint64 next = U64FromFullTransactionId(ReadNextFullTransactionId());

	for (int look = 0; look < PUBLISHER_LOOKS; look++)
	{
		if (OutboxOldestPublisher(table) >= next)
			return true;
		pg_usleep(PUBLISHER_SLEEP_US);
	}
	return false;
}

/*
 * NumberHad returns the number up to which a subscription needs no event any more.
 * "closely" looks whether what was in flight when it was written down still is; the
 * position itself is not written before there is something to be delivered.
 */
static int64
NumberHad(const text *subscription, bool closely)
{
	Position position;
	OutboxCursor reached;
	TupleTableSlot *slot;
	OutboxScan *scan;
	int64 first;

	if (!PositionRead(subscription, &position))
		return 0;
	if (!closely || position.start.count == 0)
		return CursorSafe(&position.start);

	scan = OutboxScanBegin(&position.start, NULL);
	slot = OutboxScanNext(scan);
	first = slot != NULL ? OutboxSeq(slot) : PG_INT64_MAX;
	(void) OutboxScanEnd(scan, &reached);
	return Min(first - 1, CursorSafe(&reached));
}

/*
 * OutboxNotNeeded returns the number up to which no subscription needs an event,
 * and nobody will insert one; 0 if that is not to be known now.  "last" is the
 * last number that was given out, read before.
 */
int64
OutboxNotNeeded(Relation table, int64 last, bool closely)
{
	int64 number = last;
	List *names = Subscriptions();
	ListCell *cell;

	if (names == NIL)
	{
		if (!OwnRelationTake("subscription", ShareLock, true))
			return 0;
		names = Subscriptions();
		if (names == NIL)
			return NobodyIsPublishing(table) ? number : 0;
	}
	foreach (cell, names)
	{
		/* Asked twice, as Min() would, it may have gone on, past others. */
		int64 had = NumberHad(lfirst(cell), closely);

		number = Min(number, had);
	}
	return number;
}
