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

extern RunState OutboxLagBatch(bool dontWait, int64 *number);

#endif /* IDEMPOTENCY_OUTBOXLAG_H */
