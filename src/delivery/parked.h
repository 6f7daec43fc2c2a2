/*-------------------------------------------------------------------------
 *
 * delivery/parked.h
 *	  Events that failed: scheduled for a retry, waiting behind one, or dead.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_PARKED_H
#define IDEMPOTENCY_DELIVERY_PARKED_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "delivery/position.h"
#include "outbox/event.h"

/* What a delivery of events of the outbox needs to know. */
typedef struct ParkedSummary
{
	TimestampTz next; /* when the first is redelivered; 0: none is */
	bool live;		  /* some are not dead: later events can have to wait */
	int64 passed;	  /* of the position */
	bool behind;	  /* some have lower numbers, that were in flight */
	int64 *ahead;	  /* the sorted numbers of those above it */
	int aheadCount;
} ParkedSummary;

extern void ParkedSummarize(const text *subscription, const OutboxCursor *cursor,
							ParkedSummary *summary);
extern List *ParkedReady(const text *subscription, TimestampTz now, int max, int64 batch);
extern List *ParkedInBatch(const text *subscription, const Position *position);
extern bool ParkedHasError(const text *subscription, const List *events, const text *error);
extern bool ParkedHas(const text *subscription, const ParkedSummary *summary, int64 seq);
extern bool ParkedBlocks(const text *subscription, const ParkedSummary *summary,
						 const Event *event);

extern void ParkedWait(const text *subscription, const Event *event);
extern void ParkedRequeue(const text *subscription, const Event *event, TimestampTz retryAt);
extern void ParkedRestoreOrder(const text *subscription, TimestampTz retryAt);
extern void ParkedFail(const text *subscription, const Event *event, const text *error,
					   TimestampTz retryAt);
extern void ParkedHoldFollowers(const text *subscription, const Event *event);
extern void ParkedRelease(const text *subscription, const text *aggregate);
extern void ParkedAcknowledge(const text *subscription, const Position *position);
extern int64 ParkedRedrive(const text *subscription, const pg_uuid_t *id);
extern void ParkedDelete(const text *subscription);

#endif /* IDEMPOTENCY_DELIVERY_PARKED_H */
