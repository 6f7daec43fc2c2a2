/*-------------------------------------------------------------------------
 *
 * outboxneed.c
 *	  Which events a subscription still needs.
 *
 * A subscription needs what is behind its position, as that is committed, and what
 * was in flight when that was written and may still be delivered.  What we read of a
 * position may be old, but a position only goes forward, so that an old one keeps
 * more.
 *
 * What was in flight is not looked for, subscription by subscription: a transaction may
 * have published a million events and failed.  The reaper reads the rows once, and asks
 * of each that it sees whether a position has it among what was in flight.  A row that
 * is dead is needed by no subscription, and at one that is pending the reaper stops.
 * For a number without a row it has to be known that none will come: that is so once
 * every publisher is younger than the hole in which it is (outboxscan.c).
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

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "nodes/pg_list.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "compat.h"
#include "outboxhorizon.h"
#include "outboxneed.h"
#include "ownerquery.h"
#include "owntable.h"
#include "position.h"

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
 * DrawnFrom returns the first number above "gone" in a hole of the cursor whose row may
 * be about to be inserted; PG_INT64_MAX if there is none.
 */
static int64
DrawnFrom(const OutboxCursor *cursor, uint64 oldestPublisher, int64 gone)
{
	int64 first = PG_INT64_MAX;

	for (int i = 0; i < cursor->count; i++)
	{
		const InFlight *part = &cursor->inFlight[i];

		if (part->txid == 0 && oldestPublisher < part->stamp && part->upto > gone)
			first = Min(first, Max(part->from, gone + 1));
	}
	return first;
}

/*
 * AddPosition adds what a subscription needs.  One without a position is one whose
 * position is yet to come: it needs everything.
 */
static void
AddPosition(OutboxNeed *need, const text *subscription)
{
	OutboxCursor *start = palloc(sizeof(OutboxCursor));
	Position position;

	if (!PositionRead(subscription, &position))
	{
		need->upto = 0;
		return;
	}
	*start = position.start;
	need->upto = Min(need->upto, start->passed);
	if (start->count > 0)
		CursorSweepBegin(&need->sweeps[need->count++], start);
}

/*
 * OutboxNeedRead fills "need", in the current memory context; its upto is 0 if what is
 * needed is not to be known now.  "last" is the last number that was given out, read
 * before; up to "gone" nothing is left.
 */
void
OutboxNeedRead(Relation table, int64 last, int64 gone, OutboxNeed *need)
{
	List *names = Subscriptions();
	uint64 oldestPublisher;
	ListCell *cell;

	memset(need, 0, sizeof(OutboxNeed));
	if (names == NIL)
	{
		if (!OwnRelationTake("subscription", ShareLock, true))
			return;
		names = Subscriptions();
		if (names == NIL)
		{
			need->upto = OutboxNobodyIsPublishing(table) ? last : 0;
			return;
		}
	}
	need->upto = last;
	need->sweeps = palloc(list_length(names) * sizeof(CursorSweep));
	foreach (cell, names)
	{
		CHECK_FOR_INTERRUPTS();
		AddPosition(need, lfirst(cell));
	}

	/* After the positions: a publisher that has drawn a number in one of their holes began before.
	 */
	oldestPublisher = OutboxOldestPublisher(table);
	for (int i = 0; i < need->count; i++)
	{
		int64 drawn = DrawnFrom(need->sweeps[i].cursor, oldestPublisher, gone);

		need->upto = Min(need->upto, drawn - 1);
	}
}

/*
 * OutboxNeedHas tells whether a subscription has yet to get an event of those up to
 * need->upto, which "txid" published: it was in flight when the position passed it.
 * The numbers must not go down from one call to the next.
 */
bool
OutboxNeedHas(OutboxNeed *need, uint64 txid, int64 seq)
{
	for (int i = 0; i < need->count; i++)
	{
		CursorSweepTo(&need->sweeps[i], seq);
		if (CursorSweepHas(&need->sweeps[i], txid, seq))
			return true;
	}
	return false;
}
