/*-------------------------------------------------------------------------
 *
 * hand.h
 *	  Where the reaper stands in the heap, and what it has done so far.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_HAND_H
#define IDEMPOTENCY_HAND_H

#include "datatype/timestamp.h"
#include "storage/block.h"

typedef struct Hand
{
	BlockNumber hand;		/* rows from here on run out next */
	BlockNumber round;		/* how far the present round has come */
	TimestampTz roundBegan; /* 0: it has not */
	TimeOffset lastRound;	/* how long the one before took; 0: not known */
} Hand;

/* What was removed since the row was written last, and in the whole run. */
typedef struct Harvest
{
	int64 rows;
	int64 zombies;
	int64 rowsOfRun;
} Harvest;

extern bool HandLock(bool dontWait);
extern void HandLoad(Oid keyTable, Hand *hand);
extern void HandSave(Oid keyTable, const Hand *hand, const Harvest *harvest);

#endif /* IDEMPOTENCY_HAND_H */
