/*-------------------------------------------------------------------------
 *
 * reaper/lag.h
 *	  Moving a subscription past events that are older than its max_lag.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_LAG_H
#define IDEMPOTENCY_REAPER_LAG_H

#include "reaper/keys.h"

/* A pass over the subscriptions; begins with zeros. */
typedef struct LagRun
{
	bool begun;
	int64 from;	 /* the pass begins after this number, and wraps around to it */
	int64 after; /* subscriptions up to this number were read, since the last wrap */
	int64 upto;	 /* the last number before the next wrap */
} LagRun;

extern RunState OutboxLagBatch(bool dontWait, LagRun *run);

#endif /* IDEMPOTENCY_REAPER_LAG_H */
