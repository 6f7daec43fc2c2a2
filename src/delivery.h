/*-------------------------------------------------------------------------
 *
 * delivery.h
 *	  Batches of events: giving them out, and what becomes of them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_H
#define IDEMPOTENCY_DELIVERY_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "event.h"
#include "position.h"
#include "subscription.h"

/* What a fetch asks for. */
typedef struct FetchPlan
{
	int max;			   /* events */
	const Interval *lease; /* how long nobody else gets them after the commit */
	bool last;			   /* the caller does not come back soon: write down any progress */
} FetchPlan;

/* What it gets. */
typedef struct Batch
{
	int64 number;
	List *events; /* of Event *; NIL: there is nothing to do */
	bool more;	  /* a limit was met: commit, and look again, though it may have given nothing */
	bool wrote;	  /* something was written, though it may have given nothing */
	TimestampTz next; /* when there may be something again; 0: when somebody publishes */
} Batch;

/* delivery.c */
extern void DeliveryFetch(const Subscription *subscription, const FetchPlan *plan, Batch *batch);
extern bool DeliveryOutstanding(const Subscription *subscription, Batch *batch);
extern void DeliveryPosition(const Subscription *subscription, Position *position);
extern void BatchCollect(const Subscription *subscription, const Position *position, Batch *batch);

/* settlement.c */
extern void DeliveryAck(const Subscription *subscription, int64 batch);
extern void DeliveryAckPart(const Subscription *subscription, int64 batch, const List *rest);
extern TimestampTz DeliveryNack(const Subscription *subscription, int64 batch, const pg_uuid_t *id,
								const text *error, const Interval *retryIn);
extern TimestampTz DeliveryFail(const Subscription *subscription, int64 batch, const List *events,
								const ListCell *failed, const text *error);
extern void DeliveryGiveBack(const Subscription *subscription, int64 batch, bool singly);
extern TimestampTz DeliveryExtend(const Subscription *subscription, int64 batch,
								  const Interval *lease);

#endif /* IDEMPOTENCY_DELIVERY_H */
