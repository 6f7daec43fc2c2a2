/*-------------------------------------------------------------------------
 *
 * reaper/keys.h
 *	  One run of the reaper over the table of keys, batch by batch.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_KEYS_H
#define IDEMPOTENCY_REAPER_KEYS_H

#include "base/bgworker.h"
#include "reaper/state.h"

/* How a run differs from others; filled by the caller. */
typedef struct ReaperRunPlan
{
	int64 maxRows;	 /* it ends when it has removed that many */
	bool wholeTable; /* it reads the whole table, whatever it finds */
	bool dontWait;	 /* for the table, or for another reaper */
} ReaperRunPlan;

/* The caller reads "reaped" only. */
typedef struct ReaperRun
{
	ReaperRunPlan plan;
	ReapedRows reaped;
	Oid keyTable; /* invalid before the first batch */
	ReaperState state;
	ReaperState saved;
	bool scanning; /* the run reads at scanBlock, no longer at expiryBlock */
	BlockNumber blocks;
	BlockNumber pagesScanned; /* in this run */
	int64 pagesLeft;		  /* that it can still scan with little to remove */
} ReaperRun;

extern int64 ReaperRunMaxRows(void);
extern void ReaperRunBegin(ReaperRun *run, const ReaperRunPlan *plan);
extern RunState ReaperRunBatch(ReaperRun *run);
extern void ReaperRunSave(ReaperRun *run);

#endif /* IDEMPOTENCY_REAPER_KEYS_H */
