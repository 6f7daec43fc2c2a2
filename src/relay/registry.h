/*-------------------------------------------------------------------------
 *
 * relay/registry.h
 *	  The subscriptions of all databases that have a handler, in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_REGISTRY_H
#define IDEMPOTENCY_RELAY_REGISTRY_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"
#include "port/atomics.h"
#include "storage/latch.h"
#include "storage/lwlock.h"

#include "base/bgworker.h"
#include "outbox/topic.h"

/* How many bytes of a subscription's problem are kept. */
#define RELAY_PROBLEM_BYTES 256

/* The longest back-off, in milliseconds. */
#define RELAY_BACK_OFF_MOST_MS 30000

/* RelaySubscription.unhandled: the batch in flight, whichever it is. */
#define RELAY_UNHANDLED_ANY (-1)

/* A subscription that a worker is started for; small enough for bgw_extra. */
typedef struct RelayJob
{
	int slot; /* in the registry */
	Oid database;
	Oid owner;
	int64 number;
} RelayJob;

typedef enum RelayState
{
	RELAY_STATE_IDLE,
	RELAY_STATE_STARTING,
	RELAY_STATE_RUNNING
} RelayState;

/* How a worker has left its subscription; the README says what follows. */
typedef enum RelayEnd
{
	RELAY_DIED, /* it did not say */
	RELAY_IDLE,
	RELAY_UNFINISHED, /* there is more to do */
	RELAY_NO_SLOT,	  /* no worker could be started */
	RELAY_BUSY,		  /* another session has locked the subscription, or the database */
	RELAY_UNFIT,	  /* the subscription cannot be run as it is */
	RELAY_GONE
} RelayEnd;

/* A database that has subscriptions with a handler; relay/wakeup.c has the wakeups. */
typedef struct RelayDatabase
{
	pg_atomic_uint32 oid; /* 0: the slot is free */
	pg_atomic_uint64 armed[TOPIC_WORDS];
	pg_atomic_uint64 requested[TOPIC_WORDS];
	int subscriptions;
} RelayDatabase;

/* A subscription with a handler. */
typedef struct RelaySubscription
{
	Oid database; /* 0: the slot is free */
	Oid owner;
	int databaseSlot;
	int64 number;
	TopicSet wants;	   /* a superset of its topics */
	TimestampTz putAt; /* by a commit; 0: by a survey */
	uint64 ranAt;	   /* by the registry's clock: chosen */
	RelayState state;
	bool due;			   /* there may be something to do */
	TimestampTz dueAt;	   /* when it becomes due without a wakeup; 0: never */
	TimestampTz notBefore; /* back-off; 0: none */
	int failures;		   /* in a row */
	int logged;			   /* dead letters, since the last survey */
	int64 unlogged;		   /* the others */
	int64 unhandled;	   /* a batch in flight with which no handler was called; 0: none */
	char problem[RELAY_PROBLEM_BYTES];
} RelaySubscription;

typedef struct RelayRegistry
{
	LWLock *lock;
	Latch *volatile launcher;	 /* NULL: no launcher runs */
	pg_atomic_uint32 generation; /* grows when a database slot is taken or freed */
	pg_atomic_uint32 waiting;	 /* subscriptions that need a worker */
	pg_atomic_uint32 working;	 /* subscriptions that have one */
	pg_atomic_uint32 slotWanted; /* a visit waits for the slot of a worker */
	uint64 clock;
	int used;			   /* no slot from this one on was ever taken */
	bool overflow;		   /* a subscription got no slot */
	bool overflowReported; /* the log says so, and no slot was freed since */
	int size;			   /* slots of either kind: idempotency.relay_subscriptions */
	RelayDatabase *databases;
	RelaySubscription *subscriptions;
} RelayRegistry;

/* A subscription that the survey of a database has found. */
typedef struct RelayFound
{
	int64 number;
	Oid owner; /* invalid: it does not exist */
	TopicSet wants;
	bool due;		   /* there may be something to do */
	TimestampTz dueAt; /* when it becomes due; 0: never */
	bool hasSlot;	   /* set by RegistryMerge(), as the next two */
	int64 unlogged;	   /* dead letters that the log does not have */
	char problem[RELAY_PROBLEM_BYTES];
} RelayFound;

/* NULL unless the library is preloaded. */
extern RelayRegistry *Registry;

/* registry.c: the slots */
extern void RegistryInit(void);
extern RelaySubscription *RegistryLockJob(const RelayJob *job);
extern int RegistryDatabaseSlot(Oid database);
extern void RegistryFree(RelaySubscription *subscription);
extern void RegistryWakeLauncher(void);

/* registry.c: at the commit of a transaction that has changed a subscription */
extern bool RegistryPut(Oid database, int64 number, Oid owner, const TopicSet *wants);
extern void RegistryRemove(Oid database, int64 number);
extern void RegistryMarkDue(Oid database, int64 number);
extern bool RegistryHasSlot(Oid database, int64 number);

/* registry.c: for the survey of a database, and for the launcher */
extern void RegistryMerge(Oid database, RelayFound *found, int count, TimestampTz began);
extern List *RegistryDatabases(void);
extern void RegistryForgetDatabase(Oid database);
extern bool RegistryTakeOverflow(void);

/* registry.c: problems */
extern bool RegistrySetProblem(const RelayJob *job, const char *problem);
extern void LogUnlogged(const text *subscription, int64 unlogged);
extern void LogRelayProblem(const text *subscription, const char *problem);

/* scheduler.c: for the launcher */
extern void SchedulerReset(void);
extern bool SchedulerChoose(int workers, RelayJob *job);
extern TimestampTz SchedulerNextTime(void);
extern void SchedulerWantSlot(bool wanted);
extern void SchedulerStartFailed(const RelayJob *job, RelayEnd end);

/* scheduler.c: for a worker */
extern bool SchedulerAttach(const RelayJob *job);
extern void SchedulerBeginPoll(const RelayJob *job, bool last);
extern bool SchedulerIsCrowded(void);
extern bool SchedulerIsUnhandled(const RelayJob *job, int64 batch);
extern void SchedulerSetUnhandled(const RelayJob *job, int64 batch);
extern bool SchedulerMayLog(const RelayJob *job);
extern void SchedulerProgress(const RelayJob *job);
extern bool SchedulerLeave(const RelayJob *job, RelayEnd end, TimestampTz dueAt, RelayJob *next);

/* wakeup.c: for the scheduler, which holds the registry's lock */
extern void RelayWakeupArm(RelayDatabase *database, const TopicSet *topics);
extern bool RelayWakeupTake(RelayDatabase *database, TopicSet *topics);

/* wakeup.c: for _PG_init(), and for a worker */
extern void RelayWakeupInit(void);
extern bool RelayHasChanges(void);

/* survey.c: for a visit */
extern RunState RelaySurvey(void);

#endif /* IDEMPOTENCY_RELAY_REGISTRY_H */
