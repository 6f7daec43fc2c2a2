/*-------------------------------------------------------------------------
 *
 * relayevent.h
 *	  One event, given to the handler of a subscription.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYEVENT_H
#define IDEMPOTENCY_RELAYEVENT_H

#include "fmgr.h"
#include "storage/itemptr.h"

#include "event.h"
#include "subscription.h"

typedef struct EventHandler
{
	Oid owner; /* as whom it runs */
	FmgrInfo function;
	TransactionId definer;		/* by whom it was defined as it is */
	ItemPointerData definition; /* where */
} EventHandler;

extern void EventHandlerFind(const Subscription *subscription, Oid owner, EventHandler *handler);
extern bool EventHandlerReplaced(EventHandler *handler, EventHandler *now);
extern bool EventHandle(EventHandler *handler, const Event *event, text **error);
extern text *ErrorAsText(const ErrorData *error);
extern void ForgetSession(void);

#endif /* IDEMPOTENCY_RELAYEVENT_H */
