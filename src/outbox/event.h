/*-------------------------------------------------------------------------
 *
 * outbox/event.h
 *	  One event as it is delivered.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_OUTBOX_EVENT_H
#define IDEMPOTENCY_OUTBOX_EVENT_H

#include "executor/tuptable.h"
#include "utils/uuid.h"

/* The attributes of idempotency.event, in order. */
enum
{
	EVENT_BATCH,
	EVENT_SEQ,
	EVENT_ID,
	EVENT_TOPIC,
	EVENT_AGGREGATE,
	EVENT_TYPE,
	EVENT_PAYLOAD,
	EVENT_HEADERS,
	EVENT_ATTEMPT,
	EVENT_PUBLISHED_AT,
	EVENT_COLUMNS
};

typedef struct Event
{
	Datum values[EVENT_COLUMNS];
	bool isnull[EVENT_COLUMNS];
} Event;

extern Event *EventFromOutbox(TupleTableSlot *slot, int64 batch);
extern Event *EventCopy(const Datum *values, const bool *isnull);
extern int64 EventSeq(const Event *event);
extern bool EventsShareAggregate(const Event *a, const Event *b);
extern Oid EventType(void);
extern TupleDesc EventRowType(void);
extern void EventCheckRow(TupleDesc desc);
extern Datum EventDatum(const Event *event);

#endif /* IDEMPOTENCY_OUTBOX_EVENT_H */
