/*-------------------------------------------------------------------------
 *
 * relayinternal.h
 *	  What the rooms of the relay's worker share: relay.c, relaystay.c,
 *	  relaystep.c and relaybatch.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYINTERNAL_H
#define IDEMPOTENCY_RELAYINTERNAL_H

#include "portability/instr_time.h"

#include "delivery.h"
#include "relayevent.h"
#include "relayregistry.h"

typedef enum Step
{
	STEP_SERVED, /* there may be more */
	STEP_NOTHING,
	STEP_LEAVE
} Step;

/* relaystay.c */
extern void RelayStayBegin(void);
extern void RelayStayBeginStep(void);
extern bool RelayStayEnterDatabase(void);
extern bool RelayStayCommits(void);
extern bool RelayStayIsOver(void);
extern long RelayStaySleepTime(instr_time servedAt, TimestampTz nextDue);
extern void RelayStaySleep(long ms);
extern void RelayStayTerminate(SIGNAL_ARGS);

/* relaystep.c */
extern void RelayStepInit(void);
extern Step RelayStepDo(const RelayTask *task, bool last, RelayEnd *end, TimestampTz *nextDue);
extern void RelayStepCommitHere(void);

/* relaybatch.c: the batch that is out */
extern void RelayBatchInit(void);
extern void RelayBatchFetch(const Subscription *subscription, bool last, Batch *next);
extern void RelayBatchPutOut(const RelayTask *task, const Batch *next);
extern bool RelayBatchIsOut(void);
extern void RelayBatchInherit(const RelayTask *task, const Subscription *subscription);
extern bool RelayBatchHandle(const RelayTask *task, const Subscription *subscription,
							 EventHandler *handler);
extern void RelayBatchBlame(void);
extern bool RelayBatchRolledBack(const RelayTask *task, const ErrorData *error);
extern void RelayBatchGiveBack(const Subscription *subscription);
extern void RelayBatchDisown(const RelayTask *task);
extern void RelayBatchLeave(const RelayTask *task);

#endif /* IDEMPOTENCY_RELAYINTERNAL_H */
