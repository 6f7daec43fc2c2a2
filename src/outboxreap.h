/*-------------------------------------------------------------------------
 *
 * outboxreap.h
 *	  Removing events that everybody has had.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXREAP_H
#define IDEMPOTENCY_OUTBOXREAP_H

#include "reaperrun.h"

extern bool OutboxReaperLock(bool dontWait);
extern int64 OutboxLastNumber(void);
extern RunState OutboxReapBatch(bool dontWait, int64 maxRows, int64 *reaped);

/* For subscribe(). */
extern void OutboxReaperHoldOff(void);

#endif /* IDEMPOTENCY_OUTBOXREAP_H */
