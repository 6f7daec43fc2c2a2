/*-------------------------------------------------------------------------
 *
 * reaperrun.h
 *	  One run of the reaper over the heap, batch by batch.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPERRUN_H
#define IDEMPOTENCY_REAPERRUN_H

#include "hand.h"

/* How a run differs from others; filled by the caller. */
typedef struct ReaperRunPlan
{
	int64 maxRows;	 /* it ends when it has removed that many */
	bool wholeTable; /* it goes round the whole table, whatever it finds */
	bool dontWait;	 /* for the table, or for another reaper */
} ReaperRunPlan;

typedef enum RunState
{
	RUN_GOES_ON,
	RUN_ENDED,
	RUN_BUSY /* nothing done: somebody else is at it */
} RunState;

/* To the caller, only the harvest matters. */
typedef struct ReaperRun
{
	ReaperRunPlan plan;
	Harvest harvest;
	Oid keyTable; /* invalid before the first batch */
	Hand hand;
	Hand saved;
	bool onRound; /* the run has left the hand */
	BlockNumber blocks;
	BlockNumber pagesOfRound; /* that the round has read in this run */
	int64 pagesLeft;		  /* that it may yet read in vain */
} ReaperRun;

extern int64 ReaperRunMaxRows(void);
extern void ReaperRunBegin(ReaperRun *run, const ReaperRunPlan *plan);
extern RunState ReaperRunBatch(ReaperRun *run);
extern void ReaperRunSave(ReaperRun *run);

#endif /* IDEMPOTENCY_REAPERRUN_H */
