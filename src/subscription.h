/*-------------------------------------------------------------------------
 *
 * subscription.h
 *	  Who reads which events.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SUBSCRIPTION_H
#define IDEMPOTENCY_SUBSCRIPTION_H

#include "datatype/timestamp.h"

#include "keyname.h"
#include "topic.h"

typedef struct Subscription
{
	text *name;
	int64 number;
	char *owner; /* the name of a role, which may be gone */
	TopicPatterns topics;
	char *handler; /* NULL: its events are fetched */
	int maxAttempts;
	Interval retryDelay;
	Interval maxRetryDelay;
} Subscription;

extern Subscription *SubscriptionFind(const text *name);
extern Subscription *SubscriptionFindNumber(int64 number);
extern Subscription *SubscriptionForCaller(text *name);
extern void SubscriptionNoteError(const text *name, const text *error);

extern bool SubscriptionLock(const text *name, int waitMs);
extern void SubscriptionUnlock(const text *name);

extern Oid EventHandlerOid(const char *handler);
extern bool EventHandlerIsTrusted(Oid functionOwner, Oid owner);
extern void EventHandlerCheck(Oid handler, Oid owner);

#endif /* IDEMPOTENCY_SUBSCRIPTION_H */
