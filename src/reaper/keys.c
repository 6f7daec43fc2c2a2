/*-------------------------------------------------------------------------
 *
 * reaper/keys.c
 *	  One run of the reaper over the table of keys, batch by batch: where it reads,
 *	  and when it ends.
 *
 * README.md describes the two positions of a run.  A batch is what a worker does without a
 * rest: small, so that a claim waits less than a millisecond for a processor.  Some of them are
 * one transaction (launcher/visit.c).
 *
 * Locks: those of keys/expire.c and reaper/state.c, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/twophase.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "keys/expire.h"
#include "reaper/reaper.h"
#include "server/stats.h"

/* The most pages that a batch reads. */
#define BATCH_PAGES 64

/* The number of runs that scan the whole table, and the fewest and the most pages that a run scans.
 */
#define SCAN_RUNS 256
#define RUN_PAGES 256
#define RUN_MAX_PAGES 4096

/*
 * IsPastBorder tells whether most of the stretch had expired, so that expiryBlock need
 * not return to the rest soon.
 */
static bool
IsPastBorder(const ExpiryScan *stretch)
{
	return stretch->reaped > 0 && 4 * stretch->reaped >= 3 * stretch->seen;
}

/*
 * ReaperRunMaxRows returns how many rows one transaction can remove: if all of them are
 * leases, the locks of their keys must leave most of the shared lock table to others.
 */
int64
ReaperRunMaxRows(void)
{
	return (int64) max_locks_per_xact * (MaxBackends + max_prepared_xacts) / 4;
}

/*
 * Load reads the state.  A scan that is at the first block begins now.
 */
static void
Load(ReaperRun *run, Oid keyTable)
{
	run->keyTable = keyTable;
	ReaperStateLoad(keyTable, &run->state);
	run->saved = run->state;
	if (run->state.scanBlock == 0)
		run->state.scanStartedAt = GetCurrentTimestamp();
}

/*
 * AdvanceScan moves scanBlock over a stretch, and expiryBlock too if there is a border
 * in it.  At the end of the table the scan ends, and the next one begins.
 */
static void
AdvanceScan(ReaperRun *run, const ExpiryScan *stretch)
{
	BlockNumber pages = stretch->next - stretch->from;
	ReaperState *state = &run->state;

	run->pagesScanned += pages;
	if (stretch->reaped == 0 || 8 * stretch->reaped < stretch->seen)
		run->pagesLeft -= pages;
	if (IsPastBorder(stretch))
		state->expiryBlock = stretch->next;

	state->scanBlock = stretch->next;
	if (state->scanBlock >= stretch->blocks)
	{
		TimestampTz now = GetCurrentTimestamp();

		state->lastScan = Max(now - state->scanStartedAt, 1);
		state->scanStartedAt = now;
		state->scanBlock = 0;
	}
}

static bool
HasEnded(const ReaperRun *run)
{
	if (run->reaped.rowsOfRun >= run->plan.maxRows)
		return true;
	if (!run->scanning)
		return false;
	return run->pagesScanned >= run->blocks || (!run->plan.wholeTable && run->pagesLeft <= 0);
}

/*
 * ReaperRunBatch removes expired rows of the next stretch.  It keeps the locks to the end of
 * the transaction.  Throws what DeleteExpiredKeys() and ReaperStateLoad() do.
 */
RunState
ReaperRunBatch(ReaperRun *run)
{
	Oid keyTable = LockKeyTable(run->plan.dontWait);
	int64 rows = Min(run->plan.maxRows - run->reaped.rowsOfRun, run->plan.batchRows);
	BlockNumber pages = BATCH_PAGES;
	ExpiryScan stretch;

	if (!OidIsValid(keyTable) || !ReaperLock(run->plan.dontWait))
		return RUN_BUSY;
	if (run->keyTable != keyTable)
		Load(run, keyTable);

	/* A whole scan ends where it began, so that an idle run writes nothing */
	if (run->scanning)
		pages = Min(pages, run->blocks - run->pagesScanned);
	DeleteExpiredKeys(run->scanning ? run->state.scanBlock : run->state.expiryBlock, pages,
					  Min(rows, ReaperRunMaxRows()), &stretch);
	run->blocks = stretch.blocks;
	if (run->scanning)
		AdvanceScan(run, &stretch);
	else if (IsPastBorder(&stretch))
		run->state.expiryBlock = stretch.next;
	else
	{
		/* The scan is next */
		run->scanning = true;
		run->pagesLeft = Min(Max(RUN_PAGES, run->blocks / SCAN_RUNS), RUN_MAX_PAGES);
	}

	run->reaped.rows += stretch.reaped;
	run->reaped.zombies += stretch.zombies;
	run->reaped.rowsOfRun += stretch.reaped;
	CountEvents(COUNT_REAPED, stretch.reaped);
	CountEvents(COUNT_ZOMBIES_REAPED, stretch.zombies);
	return HasEnded(run) ? RUN_ENDED : RUN_GOES_ON;
}

/*
 * ReaperRunSave writes the state of the run, and what it has removed since the last
 * time; nothing if there is nothing new.  For the end of the transaction of a batch.
 */
void
ReaperRunSave(ReaperRun *run)
{
	if (run->reaped.rows == 0 && run->state.expiryBlock == run->saved.expiryBlock &&
		run->state.scanBlock == run->saved.scanBlock)
		return;

	InjectionPoint("reap-save");
	ReaperStateSave(run->keyTable, &run->state, &run->reaped);
	InjectionPoint("reap-end");
	run->saved = run->state;
	run->reaped.rows = 0;
	run->reaped.zombies = 0;
}
