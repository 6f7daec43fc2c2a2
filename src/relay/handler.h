/*-------------------------------------------------------------------------
 *
 * relay/handler.h
 *	  Calling the handler of a subscription with one event.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_HANDLER_H
#define IDEMPOTENCY_RELAY_HANDLER_H

#include "fmgr.h"

#include "delivery/subscription.h"
#include "outbox/event.h"

typedef struct EventHandler
{
	Oid owner; /* as whom it runs */
	FmgrInfo function;
} EventHandler;

extern void EventHandlerFind(const Subscription *subscription, Oid owner, EventHandler *handler);
extern bool EventHandle(EventHandler *handler, const Event *event, text **error);
extern text *ErrorAsText(const ErrorData *error);
extern void ForgetSession(void);
extern void RefuseSetConstraints(void);

#endif /* IDEMPOTENCY_RELAY_HANDLER_H */
