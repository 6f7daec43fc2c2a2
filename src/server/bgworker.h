/*-------------------------------------------------------------------------
 *
 * server/bgworker.h
 *	  What the background workers have in common.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SERVER_BGWORKER_H
#define IDEMPOTENCY_SERVER_BGWORKER_H

#include "postmaster/bgworker.h"

/* Called with the error if a worker cannot connect. */
typedef void WorkerRefusal(ErrorData *error);

/* A background worker that the launcher starts. */
typedef struct WorkerKind
{
	const char *type;
	const char *function;
	const char *waits; /* the log's hint, while there is no slot */
	bool slotMissed;   /* the log says so */
} WorkerKind;

/* The result of one batch of a task. */
typedef enum RunState
{
	RUN_GOES_ON,
	RUN_ENDED,
	RUN_BUSY /* nothing done: another session has the lock */
} RunState;

/* For the launcher, and for _PG_init(). */
extern void WorkerRegister(const char *type, const char *function, int restartSeconds);
extern BackgroundWorkerHandle *WorkerStart(WorkerKind *kind, Oid database, const void *job,
										   Size bytes);
extern bool WorkerHasEnded(BackgroundWorkerHandle *handle);

/* For a worker. */
extern void WorkerConnect(Oid database);
extern void WorkerConnectAs(Oid database, Oid role, WorkerRefusal *refusal);
extern void WorkerSleep(long ms, uint32 waitEvent);
extern void WorkerReload(void);
extern long WorkerSooner(long a, long b);

#endif /* IDEMPOTENCY_SERVER_BGWORKER_H */
