/*-------------------------------------------------------------------------
 *
 * delivery/subscription.h
 *	  Subscriptions: which role reads which events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_DELIVERY_SUBSCRIPTION_H
#define IDEMPOTENCY_DELIVERY_SUBSCRIPTION_H

#include "datatype/timestamp.h"

#include "base/compat.h"
#include "base/name.h"
#include "outbox/topic.h"

typedef struct Subscription
{
	text *name;
	int64 number;
	char *owner; /* the name of a role, which can be dropped by now */
	TopicPatterns topics;
	char *handler; /* NULL: its events are fetched */
	int maxAttempts;
	Interval retryDelay;
	Interval maxRetryDelay;
} Subscription;

extern Subscription *SubscriptionFind(const text *name);
extern Subscription *SubscriptionFindNumber(int64 number);
extern Subscription *SubscriptionForCaller(text *name);
extern bool SubscriptionSetError(const text *name, const text *error);

extern bool SubscriptionLock(const text *name, int waitMs);
extern void SubscriptionLockOrThrow(const text *name);
extern void SubscriptionUnlock(const text *name);

pg_noreturn extern void ErrorNoSubscription(const text *subscription);

extern Oid EventHandlerOid(const char *handler);
extern void EventHandlerCheck(Oid handler, Oid owner);

#endif /* IDEMPOTENCY_DELIVERY_SUBSCRIPTION_H */
