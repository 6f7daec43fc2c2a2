/*-------------------------------------------------------------------------
 *
 * outboxneed.h
 *	  Up to which event no subscription needs any more.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXNEED_H
#define IDEMPOTENCY_OUTBOXNEED_H

#include "utils/relcache.h"

extern int64 OutboxNotNeeded(Relation table, int64 last, bool closely);

#endif /* IDEMPOTENCY_OUTBOXNEED_H */
