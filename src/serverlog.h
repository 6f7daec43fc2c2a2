/*-------------------------------------------------------------------------
 *
 * serverlog.h
 *	  What only the server's log is told, one function each.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SERVERLOG_H
#define IDEMPOTENCY_SERVERLOG_H

#include "event.h"

/* Counters */
extern void LogStatsFull(int databases);

/* The reaper */
extern void LogReaperRefused(int level, const char *database, const ErrorData *why);
extern void LogNoWorkerSlot(void);
extern void LogEventsDropped(const text *subscription, int64 passed, int64 upto);

/* The relay */
extern void LogRelayProblem(const char *database, int64 number, const char *problem);
extern void LogDeadLetter(const text *subscription, const Event *event, const text *error);
extern void LogNoRelaySlot(void);
extern void LogRelayFull(int subscriptions);

#endif /* IDEMPOTENCY_SERVERLOG_H */
