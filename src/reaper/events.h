/*-------------------------------------------------------------------------
 *
 * reaper/events.h
 *	  Removing events that every subscription has passed.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_REAPER_EVENTS_H
#define IDEMPOTENCY_REAPER_EVENTS_H

#include "reaper/keys.h"

extern bool OutboxReaperLock(bool dontWait);
extern int64 OutboxLastNumber(void);
extern RunState OutboxReapBatch(bool dontWait, int64 maxRows, int64 *reaped);

#endif /* IDEMPOTENCY_REAPER_EVENTS_H */
