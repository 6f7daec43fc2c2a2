/*-------------------------------------------------------------------------
 *
 * outboxlag.h
 *	  Moving on a subscription that nobody reads.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXLAG_H
#define IDEMPOTENCY_OUTBOXLAG_H

#include "reaperrun.h"

/* A round over the subscriptions; begins with zeros. */
typedef struct LagRun
{
	bool begun;
	int64 from;	 /* behind this number, up to the last, and then from the first to it */
	int64 after; /* how far it is */
	int64 upto;
} LagRun;

extern RunState OutboxLagBatch(bool dontWait, LagRun *run);

#endif /* IDEMPOTENCY_OUTBOXLAG_H */
