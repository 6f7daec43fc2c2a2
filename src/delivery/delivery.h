/*-------------------------------------------------------------------------
 *
 * delivery/delivery.h
 *	  Batches: delivery, acknowledgement, and events that fail.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_DELIVERY_H
#define IDEMPOTENCY_DELIVERY_DELIVERY_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "delivery/position.h"
#include "delivery/subscription.h"
#include "outbox/event.h"

/* How much of an error is kept, in bytes. */
#define ERROR_BYTES 8192

/* What a fetch asks for. */
typedef struct FetchPlan
{
	int max;			   /* events */
	const Interval *lease; /* how long no other consumer gets them */
	bool last;			   /* the last attempt of the call: write any progress */
} FetchPlan;

/* What it gets. */
typedef struct Batch
{
	int64 number;
	List *events;	  /* of Event *; NIL: there are none */
	bool hasParked;	  /* some of them are parked */
	bool more;		  /* a limit was met: commit and fetch again, even if there are no events */
	bool wrote;		  /* something was written, even if there are no events */
	TimestampTz next; /* when there can be more; 0: after the next publication */
} Batch;

extern void DeliveryFetch(const Subscription *subscription, const FetchPlan *plan, Batch *batch);
extern bool DeliveryOutstanding(const Subscription *subscription, Batch *batch);

extern void DeliveryAck(const Subscription *subscription, int64 batch, const List *rest);
extern TimestampTz DeliveryNack(const Subscription *subscription, int64 batch, const pg_uuid_t *id,
								const text *error, const Interval *retryIn);
extern void DeliverySuspect(const Subscription *subscription, int64 batch, const List *events,
							const ListCell *suspect, const text *why);
extern TimestampTz DeliveryFail(const Subscription *subscription, int64 batch, const List *events,
								const ListCell *failed, const text *error);
extern void DeliveryGiveBack(const Subscription *subscription, int64 batch, bool singly);
extern TimestampTz DeliveryExtend(const Subscription *subscription, int64 batch,
								  const Interval *lease);

#endif /* IDEMPOTENCY_DELIVERY_DELIVERY_H */
