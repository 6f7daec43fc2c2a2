/*-------------------------------------------------------------------------
 *
 * shmem.h
 *	  What the library keeps in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_SHMEM_H
#define IDEMPOTENCY_SHMEM_H

#include "datatype/timestamp.h"
#include "port/atomics.h"
#include "storage/condition_variable.h"
#include "storage/latch.h"
#include "storage/lwlock.h"

#include "stats.h"
#include "topicset.h"

/* How many databases are counted; each takes 8 bytes a counter, and 12 more. */
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

/* How much of what is wrong with a subscription is kept. */
#define RELAY_PROBLEM_BYTES 256

/* A database that has subscriptions with a handler; relaybell.c says how its bells ring. */
typedef struct RelayDatabase
{
	pg_atomic_uint32 oid; /* 0 = the place is nobody's */
	pg_atomic_uint32 anyRung;
	pg_atomic_uint64 armed[TOPIC_WORDS]; /* a bit for each bell */
	pg_atomic_uint64 rung[TOPIC_WORDS];
	int subscriptions;
	int workers;	 /* at the choice that is being made; so is the next one */
	uint64 servedAt; /* when a subscription of it was served last */
} RelayDatabase;

/* A subscription with a handler; relayregistry.c says what it means. */
typedef struct RelaySubscription
{
	Oid database; /* 0 = the place is nobody's */
	Oid owner;
	int home; /* the place of the database */
	int64 number;
	TopicSet wants;	 /* what it may want, and perhaps more */
	uint64 notedAt;	 /* by the registry's own clock */
	uint64 servedAt; /* by that, too */
	int state;		 /* a RelayState */
	int pid;		 /* of the worker that serves it, once it is connected */
	int closing;	 /* how often the launcher has found its database closing, in a row */
	bool recalled;	 /* the launcher has ended that worker */
	bool due;
	TimestampTz dueAt;	   /* when it will be, if nobody publishes; 0: then only */
	TimestampTz notBefore; /* it is not served before; 0: no matter */
	int failures;		   /* in a row */
	int64 untouched;	   /* a batch that is out, and that no handler has seen; -1: any */
	bool told;			   /* the subscription's last_error says the problem */
	char problem[RELAY_PROBLEM_BYTES];
} RelaySubscription;

typedef struct RelayRegistry
{
	LWLock *lock;
	Latch *volatile launcher;	 /* NULL: there is none just now */
	pg_atomic_uint32 generation; /* grows when a database comes or goes */
	pg_atomic_uint32 waiting;	 /* for a worker */
	pg_atomic_uint32 working;	 /* workers */
	uint64 clock;
	int used;	   /* no place from here on was ever taken */
	bool full;	   /* somebody has found no place */
	bool fullTold; /* which the log says, and nobody has left since */
	int size;	   /* places of either kind: idempotency.relay_subscriptions */
	RelayDatabase *databases;
	RelaySubscription *subscriptions;
} RelayRegistry;

typedef struct SharedState
{
	StatsState stats;
	LauncherState launcher;
	RelayRegistry relay;
	ConditionVariable wakeup[WAKEUP_VARIABLES];
} SharedState;

/* NULL unless the library is in shared_preload_libraries. */
extern SharedState *Shared;

extern void SharedMemoryInit(void);

#endif /* IDEMPOTENCY_SHMEM_H */
