/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  What the library keeps in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SHMEM_H
#define IDEMPOTENCY_SHMEM_H

#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lwlock.h"

#include "stats.h"

/* How many databases are counted; each takes 116 bytes. */
#define STATS_DATABASES 1024

/* How many condition variables the waiters share; a power of two. */
#define WAKEUP_VARIABLES 256

/* The counters of one database; stats.c says who changes them when. */
typedef struct DatabaseCounters
{
	pg_atomic_uint64 resetAt; /* a TimestampTz */
	pg_atomic_uint64 counter[COUNTER_KINDS];
} DatabaseCounters;

typedef struct StatsState
{
	LWLock *lock;								/* for giving places out and back */
	pg_atomic_flag fullReported;				/* since a place was given back last */
	pg_atomic_uint32 database[STATS_DATABASES]; /* whose place it is; 0 = nobody's */
	DatabaseCounters counters[STATS_DATABASES];
} StatsState;

/* How many databases may call the launcher at a time. */
#define LAUNCHER_CALLS 32

/* What the launcher is told by others; launcher.c says how. */
typedef struct LauncherState
{
	LWLock *lock;
	Oid visited; /* the database that the last worker was sent to */
	int result;	 /* a VisitResult */
	Oid calls[LAUNCHER_CALLS];
} LauncherState;

typedef struct SharedState
{
	StatsState stats;
	LauncherState launcher;
	ConditionVariable wakeup[WAKEUP_VARIABLES];
} SharedState;

/* NULL unless the library is in shared_preload_libraries. */
extern SharedState *Shared;

extern void SharedMemoryInit(void);

#endif /* IDEMPOTENCY_SHMEM_H */
