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

extern void WorkerConnect(Oid database);
extern void WorkerSleep(long ms, uint32 waitEvent);
extern long WorkerElapsed(instr_time since);

#endif /* IDEMPOTENCY_WORKER_H */
