/*-------------------------------------------------------------------------
 *
 * base/stats.h
 *	  Counters per database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_BASE_STATS_H
#define IDEMPOTENCY_BASE_STATS_H

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
	COUNT_STALE_TOKENS, /* IK410 */
	COUNT_REAPED,		/* all rows, zombies included */
	COUNT_ZOMBIES_REAPED,
	COUNT_WAITS,
	COUNT_WAIT_TIME, /* microseconds, by CountWaitTime() */
	COUNT_PUBLISHED,
	COUNT_DELIVERED,
	COUNT_ACKNOWLEDGED,
	COUNT_FAILED, /* deliveries of an event */
	COUNT_DEAD_LETTERS,
	COUNT_REDRIVEN,
	COUNT_EVENTS_REAPED,
	COUNT_EVENTS_DROPPED, /* past their subscription's max_lag */
	COUNTER_KINDS
} CounterKind;

extern void CountEvent(CounterKind kind);
extern void CountEvents(CounterKind kind, uint64 events);
extern void CountWaitTime(instr_time began);

/* For the launcher. */
extern List *StatsListDatabases(void);
extern void StatsForgetDatabase(Oid database);

/* For _PG_init(). */
extern void StatsInit(void);

#endif /* IDEMPOTENCY_BASE_STATS_H */
