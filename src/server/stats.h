/*-------------------------------------------------------------------------
 *
 * server/stats.h
 *	  Counters per database, and requests of its sessions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SERVER_STATS_H
#define IDEMPOTENCY_SERVER_STATS_H

#include "nodes/pg_list.h"
#include "portability/instr_time.h"

/*
 * What is counted, in the order of the columns of idempotency.stats.  Each claim counts as
 * one of the first five, which are the outcomes.
 */
typedef enum CounterKind
{
	COUNT_CLAIMS,
	COUNT_REPLAYS,
	COUNT_IN_PROGRESS,
	COUNT_MISMATCHES,
	COUNT_TAKEOVERS,
	COUNT_COMPLETIONS,
	COUNT_FAILURES,
	COUNT_RELEASES,
	COUNT_STALE_TOKENS,	   /* IK410 */
	COUNT_REFUSED_COMMITS, /* IK428 */
	COUNT_REAPED,		   /* all rows, zombies included */
	COUNT_ZOMBIES_REAPED,
	COUNT_WAITS,
	COUNT_WAIT_TIME, /* microseconds, by CountWaitTime() */
	COUNT_PUBLISHED,
	COUNT_DELIVERED,
	COUNT_ACKNOWLEDGED,
	COUNT_FAILED, /* deliveries of an event */
	COUNT_BATCHES_EXPIRED,
	COUNT_DEAD_LETTERS,
	COUNT_REDRIVEN,
	COUNT_EVENTS_REAPED,
	COUNT_EVENTS_DROPPED, /* past their subscription's max_lag */
	COUNTER_KINDS
} CounterKind;

#define REAPER_TYPE "idempotency reaper"

/* What the sessions of a database can request of the launcher. */
typedef enum RequestKind
{
	REQUEST_VISIT = 1, /* in the next cycle */
	REQUEST_SURVEY = 2 /* at once */
} RequestKind;

extern void Count(CounterKind kind);
extern void CountEvents(CounterKind kind, uint64 events);
extern void CountWaitTime(instr_time began);

extern void RequestOfDatabase(RequestKind kind);
extern void StatsAddDatabase(void);

/* For the launcher. */
extern List *TakeRequests(RequestKind kind);
extern List *StatsListDatabases(void);
extern void StatsForgetDatabase(Oid database);

/* For _PG_init(). */
extern void StatsInit(void);

#endif /* IDEMPOTENCY_SERVER_STATS_H */
