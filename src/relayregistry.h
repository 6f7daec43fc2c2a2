/*-------------------------------------------------------------------------
 *
 * relayregistry.h
 *	  Which subscriptions have a handler, in all databases, and which of them
 *	  have something to do.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAYREGISTRY_H
#define IDEMPOTENCY_RELAYREGISTRY_H

#include "datatype/timestamp.h"
#include "nodes/pg_list.h"

#include "topicset.h"

/* A subscription for a worker to serve; small enough for bgw_extra. */
typedef struct RelayTask
{
	int place; /* in the registry */
	Oid database;
	Oid owner;
	int64 number;
} RelayTask;

/* How a worker has left its subscription; relayserved.c says what follows. */
typedef enum RelayEnd
{
	RELAY_DIED, /* it did not say */
	RELAY_IDLE,
	RELAY_GOES_ON, /* there is more to do */
	RELAY_BUSY,	   /* somebody else is at the subscription, or the database */
	RELAY_UNFIT,   /* it cannot be served as it is */
	RELAY_GONE
} RelayEnd;

/* For the end of a transaction that has changed a subscription. */
extern bool RegistryPut(Oid database, int64 number, Oid owner, const TopicSet *wants);
extern void RegistryRemove(Oid database, int64 number);
extern void RegistryMarkDue(Oid database, int64 number);

/* For a transaction that makes a subscription. */
extern bool RegistryHasRoom(Oid database, int64 number, int more);

/* For the survey of a database. */
extern uint64 RegistryBeginSurvey(void);
extern bool RegistryConfirm(Oid database, int64 number, Oid owner, const TopicSet *wants, bool due,
							TimestampTz dueAt);
extern void RegistryEndSurvey(Oid database, uint64 began);
extern bool RegistryUntold(Oid database, RelayTask *task, char *problem);
extern void RegistryTold(const RelayTask *task);

/* For the launchers. */
extern List *RegistryDatabases(void);
extern void RegistryForgetDatabase(Oid database);
extern void RegistryOpen(void);
extern bool RegistryChoose(int workers, RelayTask *task);
extern TimestampTz RegistryNextTime(void);
extern void RegistryRetryAll(void);
extern bool RegistryTakeFull(void);
extern List *RegistryServedDatabases(void);
extern void RegistryNoteClosing(Oid database, bool closing);

/* For the launcher and the worker, about a subscription that is being served. */
extern bool RegistryAttach(const RelayTask *task);
extern void RegistryMayRecall(const RelayTask *task);
extern bool RegistryIsRecalled(const RelayTask *task);
extern void RegistryBeginLook(const RelayTask *task, bool last);
extern bool RegistryOthersWait(int workers);
extern bool RegistryIsUntouched(const RelayTask *task, int64 batch);
extern void RegistrySetUntouched(const RelayTask *task, int64 batch);
extern bool RegistryNoteProblem(const RelayTask *task, const char *problem, bool told);
extern void RegistryProgress(const RelayTask *task);
extern void RegistryLeave(const RelayTask *task, RelayEnd end, TimestampTz dueAt);
extern bool RegistryMoveOn(const RelayTask *task, RelayEnd end, TimestampTz dueAt, int workers,
						   RelayTask *next);
extern void RegistryNotSent(const RelayTask *task, RelayEnd end);

/* For shmem.c. */
struct RelayRegistry;
extern Size RegistryBytes(void);
extern void RegistryInit(struct RelayRegistry *registry, char *places);

#endif /* IDEMPOTENCY_RELAYREGISTRY_H */
