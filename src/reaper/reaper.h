/*-------------------------------------------------------------------------
 *
 * reaper/reaper.h
 *	  Deleting expired keys and acknowledged events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_REAPER_H
#define IDEMPOTENCY_REAPER_REAPER_H

#include "datatype/timestamp.h"
#include "storage/block.h"

#include "server/bgworker.h"

/* Where the reaper continues in the table of keys. */
typedef struct ReaperState
{
	BlockNumber expiryBlock;   /* rows from here on expire next */
	BlockNumber scanBlock;	   /* where the scan of the whole table continues */
	TimestampTz scanStartedAt; /* 0: it has not begun */
	TimeOffset lastScan;	   /* how long the one before took; 0: not known */
} ReaperState;

/* What was removed since the row was written last, and in the whole run. */
typedef struct ReapedRows
{
	int64 rows;
	int64 zombies;
	int64 rowsOfRun;
} ReapedRows;

/* state.c: the reaper's lock, and its row */
extern bool ReaperLock(bool dontWait);
extern void ReaperStateLoad(Oid keyTable, ReaperState *state);
extern void ReaperStateSave(Oid keyTable, const ReaperState *state, const ReapedRows *reaped);

/* How a run differs from others. */
typedef struct ReaperRunPlan
{
	int64 maxRows;	 /* it ends when it has removed that many */
	int64 batchRows; /* a batch ends when it has */
	bool wholeTable; /* it reads the whole table, whatever it finds */
	bool dontWait;	 /* for the table, or for another reaper */
} ReaperRunPlan;

/* The caller sets the plan, and reads "reaped"; all else begins with zeros. */
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

/* keys.c: one run over the table of keys, batch by batch */
extern int64 ReaperRunMaxRows(void);
extern RunState ReaperRunBatch(ReaperRun *run);
extern void ReaperRunSave(ReaperRun *run);

/* events.c: events that every subscription has passed, and old dead letters */
extern RunState OutboxReapBatch(bool dontWait, int64 maxRows, int64 *reaped);

#endif /* IDEMPOTENCY_REAPER_REAPER_H */
