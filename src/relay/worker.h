/*-------------------------------------------------------------------------
 *
 * relay/worker.h
 *	  The worker that calls the handler of a subscription.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_WORKER_H
#define IDEMPOTENCY_RELAY_WORKER_H

#include "fmgr.h"

#include "delivery/delivery.h"
#include "delivery/subscription.h"
#include "outbox/event.h"
#include "relay/registry.h"

#define RELAY_TYPE "idempotency relay"

typedef enum RelayStep
{
	STEP_HANDLED, /* there may be more */
	STEP_NOTHING,
	STEP_LEAVE
} RelayStep;

typedef struct EventHandler
{
	Oid owner; /* as whom it runs */
	FmgrInfo function;
} EventHandler;

/* worker.c: the background worker that the launcher starts for one subscription */
extern PGDLLEXPORT void idempotency_relay_main(Datum unused);
extern bool RelayMustCommit(void);
extern bool RelayMustLeave(void);

/* step.c: one transaction */
extern void RelayStepInit(void);
extern RelayStep RelayStepRun(const RelayJob *job, bool last, RelayEnd *end, TimestampTz *nextDue);
extern void RelayCommitLocally(void);

/* batch.c: the batch in flight */
extern void RelayBatchInit(void);
extern void RelayBatchFetch(const Subscription *subscription, bool last, Batch *next);
extern void RelayBatchSet(const RelayJob *job, const Batch *next);
extern int64 RelayBatchNumber(void);
extern void RelayBatchRecover(const RelayJob *job, const Subscription *subscription);
extern bool RelayBatchHandle(const RelayJob *job, const Subscription *subscription,
							 EventHandler *handler);
extern void RelayBatchBeginCommit(void);
extern bool RelayBatchRolledBack(const RelayJob *job, const ErrorData *error);
extern void RelayBatchLeave(const RelayJob *job);

/* handler.c: one call of the handler */
extern void EventHandlerFind(const Subscription *subscription, Oid owner, EventHandler *handler);
extern bool EventHandle(EventHandler *handler, const Event *event, text **error);
extern text *ErrorAsText(const ErrorData *error);
extern void ForgetSession(void);
extern void RefuseSetConstraints(void);

#endif /* IDEMPOTENCY_RELAY_WORKER_H */
