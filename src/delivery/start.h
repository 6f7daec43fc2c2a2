/*-------------------------------------------------------------------------
 *
 * delivery/start.h
 *	  The cursor of a subscription that starts now.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_START_H
#define IDEMPOTENCY_DELIVERY_START_H

#include "outbox/cursor.h"

extern void CursorStartNow(OutboxCursor *cursor);

#endif /* IDEMPOTENCY_DELIVERY_START_H */
