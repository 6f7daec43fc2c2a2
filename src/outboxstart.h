/*-------------------------------------------------------------------------
 *
 * outboxstart.h
 *	  Where a subscription begins that wants what comes from now on.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOXSTART_H
#define IDEMPOTENCY_OUTBOXSTART_H

#include "cursor.h"

extern void OutboxNow(OutboxCursor *cursor);

#endif /* IDEMPOTENCY_OUTBOXSTART_H */
