/*-------------------------------------------------------------------------
 *
 * delivery/position.h
 *	  How far each subscription has come, and which batch is out.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_POSITION_H
#define IDEMPOTENCY_DELIVERY_POSITION_H

#include "datatype/timestamp.h"

#include "outbox/cursor.h"

typedef struct Position
{
	int64 version;
	OutboxCursor start;
	int64 batch; /* 0: none is out, and the next five mean nothing */
	OutboxCursor end;
	int64 *parked; /* the numbers of the parked events in the batch */
	int parkedCount;
	TimestampTz leasedAt;
	TimestampTz leasedUntil;
	int32 singles; /* so many of the next batches have one event */
} Position;

extern bool PositionRead(const text *subscription, Position *position);
extern bool PositionIsLeased(const Position *position);
extern void PositionCreate(const text *subscription, const OutboxCursor *start);
extern void PositionWrite(const text *subscription, Position *position);
extern bool PositionLock(const text *subscription);

/* start.c */
extern void CursorStartNow(OutboxCursor *cursor);

#endif /* IDEMPOTENCY_DELIVERY_POSITION_H */
