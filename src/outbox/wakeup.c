/*-------------------------------------------------------------------------
 *
 * outbox/wakeup.c
 *	  Waking consumers that wait for events.
 *
 * A waiting fetch() has a place in shared memory, with the topics of its subscription as
 * a set of bits.  A transaction that has published sets the latches of those whose
 * sets have a bit in common with its topics:
 *
 *		fetch()						publisher
 *		listen(): LISTENING			publish(): remember the topic
 *		look for events: none		COMMIT, the events are visible
 *		wait_for_event(): sleep		LISTENING: make it WOKEN, and set the latch
 *		look again
 *
 * The consumer listens before it looks, and the publisher reads the places after its commit is
 * visible, so one of the two sees the other.  A place is woken once until the consumer
 * listens again.  A sleep takes a second at most, because nothing wakes for COMMIT PREPARED
 * (which runs in another backend), for rows that replication writes, for the end of a lease or
 * a change of the subscription.
 *
 * Locks: none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "fmgr.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/atomics.h"
#include "storage/latch.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#include "base/compat.h"
#include "outbox/outbox.h"
#include "server/shmem.h"
#include "settings/timing.h"

PG_FUNCTION_INFO_V1(idempotency_listen);
PG_FUNCTION_INFO_V1(idempotency_wait_for_event);

/* How many consumers can wait at a time; further ones poll. */
#define PLACES 1024

/* The longest sleep, in milliseconds. */
#define LONGEST_SLEEP 1000

typedef enum PlaceState
{
	PLACE_FREE,
	PLACE_TAKEN,
	PLACE_LISTENING,
	PLACE_WOKEN
} PlaceState;

/* One consumer; it alone writes all but the state, and only while that is TAKEN. */
typedef struct Place
{
	pg_atomic_uint32 state;
	Oid database;
	Latch *latch;
	TopicSet topics;
} Place;

typedef struct Places
{
	pg_atomic_uint32 used; /* no place from this one on was ever taken */
	Place places[PLACES];
} Places;

void (*EventPublishedHook)(const TopicSet *topics) = NULL;

/* NULL unless the library is preloaded. */
static Places *shared = NULL;

static Place *mine = NULL;
static bool published = false;
static TopicSet topics; /* of what was published */

/*
 * TakePlace returns a place that no consumer has, or NULL.
 */
static Place *
TakePlace(void)
{
	for (uint32 i = 0; shared != NULL && i < PLACES; i++)
	{
		Place *place = &shared->places[i];
		uint32 expected = PLACE_FREE;
		uint32 used = pg_atomic_read_u32(&shared->used);

		if (!pg_atomic_compare_exchange_u32(&place->state, &expected, PLACE_TAKEN))
			continue;
		while (used <= i && !pg_atomic_compare_exchange_u32(&shared->used, &used, i + 1))
			;
		return place;
	}
	return NULL;
}

/*
 * listen(topics): commits that publish such topics end the next wait_for_event().  The
 * place is kept until the transaction ends.
 */
Datum
idempotency_listen(PG_FUNCTION_ARGS)
{
	TopicSet wanted;

	TopicSetFromPatterns(&wanted, PG_GETARG_ARRAYTYPE_P(0));
	if (mine == NULL)
		mine = TakePlace();
	if (mine != NULL)
	{
		pg_atomic_write_u32(&mine->state, PLACE_TAKEN);
		pg_write_barrier();
		mine->database = MyDatabaseId;
		mine->latch = MyLatch;
		mine->topics = wanted;
		pg_write_barrier();
		pg_atomic_write_u32(&mine->state, PLACE_LISTENING);

		/* Publishers must be able to see it before the caller looks for events */
		pg_memory_barrier();
	}
	PG_RETURN_VOID();
}

/*
 * wait_for_event(until, pause): sleeps until a commit has woken this consumer since listen(),
 * or until then, for a second at most; without a place, for "pause" seconds at most.  Throws
 * what an interrupt does.
 */
Datum
idempotency_wait_for_event(PG_FUNCTION_ARGS)
{
	static uint32 event = 0;
	long longest = mine != NULL ? LONGEST_SLEEP : (long) (PG_GETARG_FLOAT8(1) * 1000);
	long left = TimestampDifferenceMilliseconds(GetCurrentTimestamp(), PG_GETARG_TIMESTAMPTZ(0));
	long most = Min(left, longest);
	instr_time since;

	if (event == 0)
		event = WaitEventExtensionNew("IdempotencyFetch");
	INSTR_TIME_SET_CURRENT(since);
	while ((mine == NULL || pg_atomic_read_u32(&mine->state) != PLACE_WOKEN) &&
		   (left = most - MillisecondsSince(since)) > 0)
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, left, event);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
	PG_RETURN_VOID();
}

/*
 * EventPublished remembers the topic of an event until the transaction ends.  A rollback to
 * a savepoint does not undo that: a superfluous wakeup is harmless.
 */
void
EventPublished(const text *topic)
{
	if (shared == NULL)
		return;
	if (!published)
		memset(&topics, 0, sizeof(topics));
	published = true;
	TopicSetAddTopic(&topics, topic);
}

/*
 * WakeConsumers wakes those that wait for a topic that this transaction has published.  For
 * XACT_EVENT_COMMIT, when others can see the transaction; it cannot fail.
 */
static void
WakeConsumers(void)
{
	uint32 used;

	pg_memory_barrier();
	used = pg_atomic_read_u32(&shared->used);
	for (uint32 i = 0; i < used; i++)
	{
		Place *place = &shared->places[i];
		uint32 expected = PLACE_LISTENING;

		if (pg_atomic_read_u32(&place->state) != PLACE_LISTENING)
			continue;
		pg_read_barrier();
		if (place->database != MyDatabaseId || !TopicSetsMeet(&place->topics, &topics))
			continue;
		if (pg_atomic_compare_exchange_u32(&place->state, &expected, PLACE_WOKEN))
			SetLatch(place->latch);
	}
}

static void
TransactionCallback(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE)
		return;
	if (event == XACT_EVENT_COMMIT && published)
	{
		InjectionPoint("commit-request");
		WakeConsumers();
		if (EventPublishedHook != NULL)
			EventPublishedHook(&topics);
	}
	published = false;
	if (mine != NULL)
		pg_atomic_write_u32(&mine->state, PLACE_FREE);
	mine = NULL;
}

static void
InitializePlaces(void *memory, LWLock *lock)
{
	Places *made = memory;

	pg_atomic_init_u32(&made->used, 0);
	for (int i = 0; i < PLACES; i++)
		pg_atomic_init_u32(&made->places[i].state, PLACE_FREE);
}

/*
 * EventWakeupInit registers the shared memory and the callback; called once per backend, from
 * _PG_init().
 */
void
EventWakeupInit(void)
{
	SharedMemoryRegister(&(SharedPart){(void **) &shared, sizeof(Places), InitializePlaces});
	RegisterXactCallback(TransactionCallback, NULL);
}
