/*-------------------------------------------------------------------------
 *
 * relay/relay.h
 *	  The workers that call the handlers of subscriptions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_RELAY_RELAY_H
#define IDEMPOTENCY_RELAY_RELAY_H

#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "storage/latch.h"

#include "base/callable.h"
#include "outbox/outbox.h"
#include "server/bgworker.h"

#define RELAY_TYPE "idempotency relay"

/* How many subscriptions with a handler the server serves. */
#define RELAY_SLOTS 256

/* A name has 255 characters at most. */
#define RELAY_NAME_BYTES (255 * MAX_MULTIBYTE_CHAR_LEN + 1)

/* What a worker is started with. */
typedef struct RelayJob
{
	Oid database;
	Oid owner;
	int slot;
	uint32 generation; /* of the slot */
	bool isHelper;	   /* it was started beside others */
} RelayJob;

/* How a worker left its subscription. */
typedef enum RelayEnd
{
	RELAY_IDLE,		  /* nothing to do */
	RELAY_UNFINISHED, /* there can be more */
	RELAY_RECALLED,	  /* SIGTERM, or the database is dropped or copied */
	RELAY_BUSY,		  /* another session has a lock */
	RELAY_UNFIT,	  /* the subscription cannot be served as it is */
	RELAY_DIED,
	RELAY_GONE /* the subscription, or its handler, is */
} RelayEnd;

/* A subscription with a handler, as a survey or its worker has read it. */
typedef struct RelayFound
{
	const char *name;
	Oid owner;
	TopicSet topics;
	int partitions;
	bool due;
	TimestampTz dueAt; /* 0: never */
} RelayFound;

typedef struct EventHandler
{
	Oid owner; /* as whom it runs */
	Callable callable;
	FmgrInfo function;
} EventHandler;

/* slots.c: the subscriptions with handlers, in shared memory */
extern void RelayInit(void);
extern void RelayAwake(Latch *launcher);
extern void RelayMerge(const RelayFound *found, int count);
extern void RelayForgetDatabase(Oid database);
extern bool RelayChoose(const int *started, int most, RelayJob *job, TimestampTz *again);
extern bool RelayAttach(const RelayJob *job, char *name, Size bytes);
extern void RelayBeginPoll(const RelayJob *job);
extern void RelayWantHelp(const RelayJob *job, bool first);
extern bool RelayIsCrowded(void);
extern bool RelayHasChanged(void);
extern void RelayCorrect(const RelayJob *job, const RelayFound *found);
extern void RelayFetches(bool now);
extern void RelayHold(int64 batch);
extern void RelayHandled(const RelayJob *job);
extern void RelayLeave(const RelayJob *job, RelayEnd end, TimestampTz dueAt, bool handled,
					   bool keep);
extern void RelayFailed(const RelayJob *job, RelayEnd end);
extern void RelayProblem(const RelayJob *job, const char *database, const char *problem);

/* worker.c: the background worker that the launcher starts for one subscription */
extern PGDLLEXPORT void idempotency_relay_main(Datum unused);

/* handler.c: one call of the handler */
extern void EventHandlerFind(const char *handler, Oid owner, EventHandler *found);
extern char *OwnerProblem(Oid owner, Oid database);
extern bool EventHandle(EventHandler *handler, Datum event, char **error, int *sqlstate);
extern char *ErrorAsText(const ErrorData *error);
extern void ForgetSession(void);
extern void RefuseSetConstraints(void);

#endif /* IDEMPOTENCY_RELAY_RELAY_H */
