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

extern TimestampTz ParkedNext(const text *subscription, bool *live);
extern List *ParkedReady(const text *subscription, TimestampTz now, int max, int64 batch);
extern List *ParkedInBatch(const text *subscription, const Position *position);
extern List *ParkedRemoveFrom(List *events, const text *subscription);
extern bool ParkedBlocks(const text *subscription, const Event *event);
extern bool ParkedHasError(const text *subscription, const List *events, const text *error);

extern void ParkedAdd(const text *subscription, const Event *event, TimestampTz retryAt);
extern void ParkedRestoreOrder(const text *subscription, TimestampTz retryAt);
extern void ParkedFail(const text *subscription, const Event *event, const text *error,
					   TimestampTz retryAt);
extern void ParkedHoldFollowers(const text *subscription, const Event *event);
extern void ParkedRelease(const text *subscription, Datum *aggregates, int count);
extern void ParkedAcknowledge(const text *subscription, const Position *position);
extern int64 ParkedRedrive(const text *subscription, const pg_uuid_t *id);

#ifdef USE_ASSERT_CHECKING
extern void ParkedCheckOrder(const text *subscription);
#else
#define ParkedCheckOrder(subscription) ((void) 0)
#endif

#endif /* IDEMPOTENCY_DELIVERY_PARKED_H */
