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

#include "event.h"
#include "subscription.h"

typedef struct EventHandler
{
	Oid owner; /* as whom it runs */
	FmgrInfo function;
} EventHandler;

extern void EventHandlerFind(const Subscription *subscription, Oid owner, EventHandler *handler);
extern bool EventHandle(EventHandler *handler, const Event *event, text **error);
extern text *ErrorAsText(const ErrorData *error);
extern void ForgetSession(void);

#endif /* IDEMPOTENCY_RELAYEVENT_H */
