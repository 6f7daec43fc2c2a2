/*-------------------------------------------------------------------------
 *
 * worker.h
 *	  What the background workers have in common.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_WORKER_H
#define IDEMPOTENCY_WORKER_H

#include "portability/instr_time.h"

/* Is told why a worker could not come in. */
typedef void WorkerRefusal(ErrorData *error);

extern void WorkerConnect(Oid database);
extern void WorkerConnectAs(Oid database, Oid role, WorkerRefusal *refusal);
extern bool WorkerSleep(long ms, uint32 waitEvent);
extern bool WorkerReload(void);
extern long WorkerElapsed(instr_time since);

#endif /* IDEMPOTENCY_WORKER_H */
