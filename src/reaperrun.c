/*-------------------------------------------------------------------------
 *
 * reaperrun.c
 *	  One run of the reaper over the heap, batch by batch: where it looks, and
 *	  when it has looked enough.
 *
 * Rows lie in the heap about in the order in which they came, and those of
 * one retention run out in that order too.  So there is a border in the heap
 * behind which rows have run out and before which they live, and it moves on as
 * time does.  The hand stands at the border.  A run begins there, and goes on
 * as long as most of what it reads has run out; what has not yet, the next run
 * reads again.  So a row is read about twice in its life, and the run keeps up
 * with any rate of claims.
 *
 * Where retentions are mixed there is no such border, or more than one.  So the
 * run then goes on with a round through the whole table, at a pace that takes
 * it round in ROUND_RUNS runs, or faster where enough of what it reads has run
 * out.  If it meets a border, it puts the hand there.
 *
 * A batch is what a transaction does, in the worker: small, so that a claim
 * that meets it waits for milliseconds.
 *
 * Locks: storescan.c and hand.c say which, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/twophase.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "reaperrun.h"
#include "stats.h"
#include "storescan.h"

/* A batch is at most that large. */
#define BATCH_PAGES 64
#define BATCH_ROWS 250

/* How many runs a round takes, but that each reads so many pages at least. */
#define ROUND_RUNS 256
#define RUN_PAGES 256

/*
 * IsPastBorder tells whether most of what was read had run out, so that the
 * hand need not come back for the rest soon.
 */
static bool
IsPastBorder(const ReapedStretch *stretch)
{
	return stretch->reaped > 0 && 4 * stretch->reaped >= 3 * stretch->seen;
}

/*
 * IsWorthwhile tells whether enough of what was read had run out to go on with
 * the round for it.
 */
static bool
IsWorthwhile(const ReapedStretch *stretch)
{
	return stretch->reaped > 0 && 8 * stretch->reaped >= stretch->seen;
}

/*
 * ReaperRunMaxRows returns how many rows one transaction should remove at most:
 * the locks of their keys must leave most of the shared lock table to others.
 */
int64
ReaperRunMaxRows(void)
{
	return (int64) max_locks_per_xact * (MaxBackends + max_prepared_xacts) / 4;
}

/*
 * ReaperRunBegin begins a run.  It may span many transactions.
 */
void
ReaperRunBegin(ReaperRun *run, const ReaperRunPlan *plan)
{
	memset(run, 0, sizeof(ReaperRun));
	run->plan = *plan;
}

/*
 * FirstLook reads where the hand stands.  A round that has not left the first
 * block begins now.
 */
static void
FirstLook(ReaperRun *run, Oid keyTable)
{
	run->keyTable = keyTable;
	HandLoad(keyTable, &run->hand);
	run->saved = run->hand;
	if (run->hand.round == 0)
		run->hand.roundBegan = GetCurrentTimestamp();
}

/*
 * StepAtHand moves the hand over a stretch most of which had run out.  At any
 * other it stays, and the round is next.
 */
static void
StepAtHand(ReaperRun *run, const ReapedStretch *stretch)
{
	if (IsPastBorder(stretch))
		run->hand.hand = stretch->next;
	else
	{
		run->onRound = true;
		run->pagesLeft = Max(RUN_PAGES, run->blocks / ROUND_RUNS);
	}
}

/*
 * StepOnRound moves the round over a stretch, and the hand too if there is a
 * border in it.  A round that comes to the end of the table ends there.
 */
static void
StepOnRound(ReaperRun *run, const ReapedStretch *stretch)
{
	BlockNumber pages = stretch->next - stretch->from;
	Hand *hand = &run->hand;

	run->pagesOfRound += pages;
	if (!IsWorthwhile(stretch))
		run->pagesLeft -= pages;
	if (IsPastBorder(stretch))
		hand->hand = stretch->next;

	hand->round = stretch->next;
	if (hand->round >= stretch->blocks)
	{
		TimestampTz now = GetCurrentTimestamp();

		hand->lastRound = Max(now - hand->roundBegan, 1);
		hand->roundBegan = now;
		hand->round = 0;
	}
}

/*
 * HasEnded tells whether the run has done what it was to do.
 */
static bool
HasEnded(const ReaperRun *run)
{
	if (run->harvest.rowsOfRun >= run->plan.maxRows)
		return true;
	if (!run->onRound)
		return false;
	return run->pagesOfRound >= run->blocks || (!run->plan.wholeTable && run->pagesLeft <= 0);
}

/*
 * ReaperRunBatch removes what has run out in the next stretch of the run's way.
 * The locks stay to the end of the transaction.  Throws what KeyStoreReap()
 * and HandLoad() do.
 */
RunState
ReaperRunBatch(ReaperRun *run)
{
	Oid keyTable = KeyStoreLock(run->plan.dontWait);
	int64 rows = Min(run->plan.maxRows - run->harvest.rowsOfRun, BATCH_ROWS);
	BlockNumber pages = BATCH_PAGES;
	ReapedStretch stretch;

	if (!OidIsValid(keyTable) || !HandLock(run->plan.dontWait))
		return RUN_BUSY;
	if (run->keyTable != keyTable)
		FirstLook(run, keyTable);

	/* Once round it is where it began, so that an idle run leaves no trace. */
	if (run->onRound)
		pages = Min(pages, run->blocks - run->pagesOfRound);
	KeyStoreReap(run->onRound ? run->hand.round : run->hand.hand, pages,
				 Min(rows, ReaperRunMaxRows()), &stretch);
	run->blocks = stretch.blocks;
	if (run->onRound)
		StepOnRound(run, &stretch);
	else
		StepAtHand(run, &stretch);

	run->harvest.rows += stretch.reaped;
	run->harvest.zombies += stretch.zombies;
	run->harvest.rowsOfRun += stretch.reaped;
	if (stretch.reaped > 0)
		CountEvents(COUNT_REAPED, stretch.reaped);
	if (stretch.zombies > 0)
		CountEvents(COUNT_ZOMBIES_REAPED, stretch.zombies);
	return HasEnded(run) ? RUN_ENDED : RUN_GOES_ON;
}

/*
 * ReaperRunSave writes down where the run has come, and what it has removed
 * since it was written down last; nothing if there is nothing new.  For the
 * end of the transaction of a batch.
 */
void
ReaperRunSave(ReaperRun *run)
{
	if (run->harvest.rows == 0 && run->hand.hand == run->saved.hand &&
		run->hand.round == run->saved.round)
		return;

	InjectionPoint("reap-save");
	HandSave(run->keyTable, &run->hand, &run->harvest);
	InjectionPoint("reap-forget");
	run->saved = run->hand;
	run->harvest.rows = 0;
	run->harvest.zombies = 0;
}
