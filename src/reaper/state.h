/*-------------------------------------------------------------------------
 *
 * reaper/state.h
 *	  Where the reaper continues in the table of keys, and what it has done so far.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_STATE_H
#define IDEMPOTENCY_REAPER_STATE_H

#include "datatype/timestamp.h"
#include "storage/block.h"

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

extern bool ReaperLock(bool dontWait);
extern void ReaperStateLoad(Oid keyTable, ReaperState *state);
extern void ReaperStateSave(Oid keyTable, const ReaperState *state, const ReapedRows *reaped);

#endif /* IDEMPOTENCY_REAPER_STATE_H */
