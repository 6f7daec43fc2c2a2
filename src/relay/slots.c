/*-------------------------------------------------------------------------
 *
 * relay/slots.c
 *	  The subscriptions that have handlers, in shared memory.
 *
 * A slot is a subscription of a database.  Surveys fill the slots, and workers correct
 * theirs; the launcher starts workers for those that are due:
 *
 *		publisher					worker
 *		COMMIT, visible				due = false
 *		due = true					look for events: none
 *		no worker: wake launcher	leave; due: wake launcher
 *
 * The README has the states of a slot.
 *
 * Locks: one LWLock for all that is not atomic; publishers take none.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "storage/lwlock.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/errors.h"
#include "outbox/outbox.h"
#include "relay/relay.h"
#include "server/shmem.h"
#include "server/stats.h"

PG_FUNCTION_INFO_V1(idempotency_wake_relay);
PG_FUNCTION_INFO_V1(idempotency_subscriptions_changed);
PG_FUNCTION_INFO_V1(idempotency_is_worker_batch);
PG_FUNCTION_INFO_V1(idempotency_is_worker_fetch);
PG_FUNCTION_INFO_V1(idempotency_was_given_back);
PG_FUNCTION_INFO_V1(idempotency_relay_problem);

/* How many workers there can be: the most that idempotency.relay_workers can be. */
#define WORKERS 1024

#define PROBLEM_BYTES 512

/* For how long no further worker is started after one that found nothing to do. */
#define HELP_MS 1000

/* How long a subscription rests whose worker failed: at first, and at most. */
#define FIRST_REST_MS 100
#define LONGEST_REST_MS 10000

typedef struct Slot
{
	pg_atomic_uint32 database; /* 0: the slot is free */
	pg_atomic_uint32 due;	   /* bool */
	pg_atomic_uint32 running;  /* workers */
	pg_atomic_uint32 partitions;
	pg_atomic_uint64 helpAt; /* from when on a worker is started beside others */
	TopicSet topics;

	/* under the lock */
	uint32 generation; /* incremented when the slot is freed */
	Oid owner;
	TimestampTz since;	   /* when a survey has found the subscription first */
	TimestampTz dueAt;	   /* when a parked event is due, or a lease ends; 0: never */
	TimestampTz notBefore; /* when it has rested */
	int failures;		   /* since the last success */
	char name[RELAY_NAME_BYTES];
	char problem[PROBLEM_BYTES]; /* why it is not served; empty: it is */
} Slot;

/* A worker; it alone writes, until it has ended. */
typedef struct Worker
{
	pg_atomic_uint32 database; /* 0: it has ended */
	pg_atomic_uint64 batch;	   /* that it has, or has given back at its end; 0: none */
} Worker;

typedef struct Slots
{
	LWLock *lock;
	Latch *launcher; /* NULL while there is none */
	int launches;	 /* how many there were */
	bool crowded;	 /* a subscription waits for a worker of another one */
	int next;		 /* where the launcher looks first */
	pg_atomic_uint32 used;
	Slot slots[RELAY_SLOTS];
	Worker workers[WORKERS];
} Slots;

/* NULL unless the library is preloaded. */
static Slots *shared = NULL;

static Worker *me = NULL;
static int launch = 0;		  /* that has started this worker */
static bool fetching = false; /* a worker calls fetch(), and no handler does */
static bool changed = false;  /* this transaction has changed subscriptions */

/* ----------------------------------------------------------------
 * Sessions
 * ----------------------------------------------------------------
 */

static void
WakeLauncher(void)
{
	Latch *latch = shared->launcher;

	if (latch != NULL)
		SetLatch(latch);
}

/*
 * IsAhead tells whether the slot rests until a time. A time further ahead than any rest was set
 * before the clock was set back.
 */
static bool
IsAhead(TimestampTz until, TimestampTz now)
{
	return until > now && until <= TimestampTzPlusMilliseconds(now, LONGEST_REST_MS);
}

/*
 * RelayWake makes the subscriptions of this database due that may want such topics, or
 * all of them for NULL.  For XACT_EVENT_COMMIT, when others can see the transaction; it
 * cannot fail.
 */
static void
RelayWake(const TopicSet *topics)
{
	uint32 used = shared == NULL ? 0 : pg_atomic_read_u32(&shared->used);
	bool wake = false;

	for (uint32 i = 0; i < used; i++)
	{
		Slot *slot = &shared->slots[i];
		uint32 running;

		if (pg_atomic_read_u32(&slot->database) != MyDatabaseId ||
			(topics != NULL && !TopicSetsMeet(&slot->topics, topics)) ||
			pg_atomic_exchange_u32(&slot->due, 1) != 0)
			continue;
		running = pg_atomic_read_u32(&slot->running);
		if (running == 0 ||
			(running < pg_atomic_read_u32(&slot->partitions) &&
			 !IsAhead((TimestampTz) pg_atomic_read_u64(&slot->helpAt), GetCurrentTimestamp())))
			wake = true;
	}
	if (wake)
		WakeLauncher();
}

static void
TransactionCallback(XactEvent event, void *arg)
{
	if (event != XACT_EVENT_COMMIT && event != XACT_EVENT_ABORT && event != XACT_EVENT_PREPARE)
		return;
	if (event == XACT_EVENT_COMMIT && changed)
	{
		RelayWake(NULL);
		RequestOfDatabase(REQUEST_SURVEY);
		WakeLauncher();
	}
	changed = false;
}

/*
 * FindSlot returns the slot of a subscription of a database, or NULL.  Needs the lock.
 */
static Slot *
FindSlot(Oid database, const char *name)
{
	Assert(LWLockHeldByMe(shared->lock));
	for (int i = 0; i < RELAY_SLOTS; i++)
	{
		Slot *slot = &shared->slots[i];

		if (pg_atomic_read_u32(&slot->database) == database &&
			(!OidIsValid(database) || strcmp(slot->name, name) == 0))
			return slot;
	}
	return NULL;
}

/*
 * wake_relay(subscription): the subscription has a handler, and something to do after the
 * commit.  Throws 53400 if no slot is free for it.
 */
Datum
idempotency_wake_relay(PG_FUNCTION_ARGS)
{
	const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	bool full;

	if (shared == NULL)
		PG_RETURN_VOID();
	LWLockAcquire(shared->lock, LW_SHARED);
	full = FindSlot(MyDatabaseId, name) == NULL && FindSlot(InvalidOid, NULL) == NULL;
	LWLockRelease(shared->lock);
	if (full)
		ereport(ERROR, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
						errmsg("too many subscriptions of the server have a handler"),
						errdetail("Workers serve %d at most.", RELAY_SLOTS),
						errhint("Subscribe without a handler, and call idempotency.deliver().")));
	changed = true;
	PG_RETURN_VOID();
}

/*
 * subscriptions_changed(): a trigger, after a change of the table of subscriptions.
 */
Datum
idempotency_subscriptions_changed(PG_FUNCTION_ARGS)
{
	changed = shared != NULL;
	PG_RETURN_POINTER(NULL);
}

/*
 * HolderOf returns the worker that has a batch, or had it last, or NULL.
 */
static Worker *
HolderOf(int64 batch)
{
	for (int i = 0; shared != NULL && i < WORKERS; i++)
	{
		if (pg_atomic_read_u64(&shared->workers[i].batch) == (uint64) batch)
			return &shared->workers[i];
	}
	return NULL;
}

/*
 * is_worker_batch(batch) RETURNS boolean: whether a worker that lives has the batch.
 */
Datum
idempotency_is_worker_batch(PG_FUNCTION_ARGS)
{
	Worker *holder = HolderOf(PG_GETARG_INT64(0));

	PG_RETURN_BOOL(holder != NULL && pg_atomic_read_u32(&holder->database) == MyDatabaseId);
}

/*
 * was_given_back(batch) RETURNS boolean: whether its worker has ended without a failure of the
 * batch, and could not write that into the table.
 */
Datum
idempotency_was_given_back(PG_FUNCTION_ARGS)
{
	Worker *holder = HolderOf(PG_GETARG_INT64(0));

	PG_RETURN_BOOL(holder != NULL && pg_atomic_read_u32(&holder->database) == InvalidOid);
}

/*
 * relay_problem(subscription) RETURNS text: why no worker serves the subscription, or NULL.
 */
Datum
idempotency_relay_problem(PG_FUNCTION_ARGS)
{
	const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));
	char problem[PROBLEM_BYTES] = "";
	Slot *slot;

	if (shared == NULL)
		PG_RETURN_NULL();
	LWLockAcquire(shared->lock, LW_SHARED);
	slot = FindSlot(MyDatabaseId, name);
	if (slot != NULL)
		memcpy(problem, slot->problem, PROBLEM_BYTES);
	LWLockRelease(shared->lock);
	if (problem[0] == '\0')
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(problem));
}

/* ----------------------------------------------------------------
 * Surveys
 * ----------------------------------------------------------------
 */

/*
 * Fill writes what was found into a slot, and makes it due if its topics are new: an event may
 * have been published that only they match.  Needs the lock.
 */
static void
Fill(Slot *slot, const RelayFound *found)
{
	bool moved =
		slot->owner != found->owner || memcmp(&slot->topics, &found->topics, sizeof(TopicSet)) != 0;

	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	slot->owner = found->owner;
	slot->topics = found->topics;
	pg_atomic_write_u32(&slot->partitions, found->partitions);
	if (found->dueAt != 0 && (slot->dueAt == 0 || found->dueAt < slot->dueAt))
		slot->dueAt = found->dueAt;
	pg_memory_barrier();
	if (moved)
		slot->notBefore = 0;
	if (moved || found->due)
		pg_atomic_write_u32(&slot->due, 1);
}

/*
 * TakeSlot returns a free slot for a subscription of this database, or NULL.  Needs the lock.
 */
static Slot *
TakeSlot(const char *name)
{
	Slot *slot = FindSlot(InvalidOid, NULL);
	uint32 number;

	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	if (slot == NULL)
		return NULL;
	strlcpy(slot->name, name, RELAY_NAME_BYTES);
	slot->problem[0] = '\0';
	slot->owner = InvalidOid;
	slot->since = GetCurrentTimestamp();
	slot->dueAt = slot->notBefore = 0;
	slot->failures = 0;
	pg_atomic_write_u64(&slot->helpAt, 0);
	pg_atomic_write_u32(&slot->running, 0);
	number = (uint32) (slot - shared->slots);
	if (number >= pg_atomic_read_u32(&shared->used))
		pg_atomic_write_u32(&shared->used, number + 1);
	return slot;
}

/*
 * FreeSlot frees a slot.  Needs the lock.
 */
static void
FreeSlot(Slot *slot)
{
	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	slot->generation++;
	pg_atomic_write_u32(&slot->due, 0);
	pg_atomic_write_u32(&slot->database, InvalidOid);
}

/*
 * FreeSlots frees the slots of a database, except those that were seen.  One that has a worker, or
 * that another survey has filled since then, is due: its worker frees it if the subscription is
 * gone.  Needs the lock.
 */
static void
FreeSlots(Oid database, const bool *seen, TimestampTz then)
{
	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	for (int i = 0; i < RELAY_SLOTS; i++)
	{
		Slot *slot = &shared->slots[i];

		if (seen[i] || pg_atomic_read_u32(&slot->database) != database)
			continue;
		if (pg_atomic_read_u32(&slot->running) == 0 && slot->since < then)
			FreeSlot(slot);
		else
			pg_atomic_write_u32(&slot->due, 1);
	}
}

/*
 * RelayMerge brings the slots of this database up to date with all subscriptions that have a
 * handler, and frees those that have none of them.
 */
void
RelayMerge(const RelayFound *found, int count)
{
	bool seen[RELAY_SLOTS] = {false};
	bool overflow = false;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < count; i++)
	{
		Slot *slot = FindSlot(MyDatabaseId, found[i].name);

		if (slot == NULL)
			slot = TakeSlot(found[i].name);
		if (slot == NULL)
		{
			overflow = true;
			continue;
		}
		seen[slot - shared->slots] = true;
		Fill(slot, &found[i]);
		pg_atomic_write_u32(&slot->database, MyDatabaseId);
	}
	FreeSlots(MyDatabaseId, seen, GetCurrentTransactionStartTimestamp());
	LWLockRelease(shared->lock);
	WakeLauncher();
	if (overflow)
		ereport(LOG, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					  errmsg("idempotency relay does not serve further subscriptions"),
					  errdetail("Workers serve %d at most.", RELAY_SLOTS)));
}

/*
 * RelayForgetDatabase frees the slots of a database in which no worker runs.
 */
void
RelayForgetDatabase(Oid database)
{
	static const bool none[RELAY_SLOTS] = {false};

	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	FreeSlots(database, none, DT_NOEND);
	LWLockRelease(shared->lock);
}

/* ----------------------------------------------------------------
 * The launcher
 * ----------------------------------------------------------------
 */

/*
 * RelayAwake tells sessions and workers which latch wakes the launcher; NULL: none.
 */
void
RelayAwake(Latch *launcher)
{
	shared->launcher = launcher;
	if (launcher != NULL)
		shared->launches++;
}

static void
Sooner(TimestampTz *again, TimestampTz at)
{
	if (*again == 0 || at < *again)
		*again = at;
}

/*
 * HelpLater makes sure that for a while no further worker is started beside others.
 */
static void
HelpLater(Slot *slot)
{
	pg_atomic_write_u64(&slot->helpAt,
						(uint64) TimestampTzPlusMilliseconds(GetCurrentTimestamp(), HELP_MS));
}

/*
 * MayStart tells whether a worker is started for a slot that has "active" ones, if there may be
 * more.  Otherwise it sets when to look again.  Needs the lock.
 */
static bool
MayStart(Slot *slot, int active, TimestampTz now, TimestampTz *again)
{
	TimestampTz helpAt = active > 0 ? (TimestampTz) pg_atomic_read_u64(&slot->helpAt) : 0;

	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	if (slot->dueAt != 0 && slot->dueAt <= now)
	{
		slot->dueAt = 0;
		pg_atomic_write_u32(&slot->due, 1);
	}
	if (slot->dueAt != 0)
		Sooner(again, slot->dueAt);
	if (active >= (int) pg_atomic_read_u32(&slot->partitions) ||
		pg_atomic_read_u32(&slot->due) == 0)
		return false;
	if (IsAhead(slot->notBefore, now))
		Sooner(again, slot->notBefore);
	else if (IsAhead(helpAt, now))
		Sooner(again, helpAt);
	else
		return true;
	return false;
}

/*
 * RelayChoose chooses a subscription for which to start a worker; "started" has the number
 * of workers of each slot that the launcher has started, and "most" is the limit of all.  If
 * it returns false, "again" is when it must be called again, or 0.
 */
bool
RelayChoose(const int *started, int most, RelayJob *job, TimestampTz *again)
{
	TimestampTz now;
	bool crowded = false;
	bool chosen = false;
	int active[RELAY_SLOTS];
	int all = 0;

	*again = 0;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	now = GetCurrentTimestamp();
	for (int i = 0; i < RELAY_SLOTS; i++)
	{
		active[i] = Max(started[i], (int) pg_atomic_read_u32(&shared->slots[i].running));
		all += active[i];
	}
	for (int i = 0; i < RELAY_SLOTS && !chosen; i++)
	{
		int number = (shared->next + i) % RELAY_SLOTS;
		Slot *slot = &shared->slots[number];
		Oid database = pg_atomic_read_u32(&slot->database);

		if (!OidIsValid(database) || !MayStart(slot, active[number], now, again))
			continue;
		if (active[number] > 0)
			HelpLater(slot);
		if (all >= most)
		{
			crowded = crowded || active[number] == 0;
			continue;
		}
		*job = (RelayJob){database, slot->owner, number, slot->generation, active[number] > 0};
		shared->next = number + 1;
		chosen = true;
	}
	if (!chosen)
		shared->crowded = crowded;
	LWLockRelease(shared->lock);
	return chosen;
}

/* ----------------------------------------------------------------
 * Workers
 * ----------------------------------------------------------------
 */

/*
 * RelayAttach begins to serve a subscription, and copies its name.  Returns false if the slot
 * has another one now.
 */
bool
RelayAttach(const RelayJob *job, char *name, Size bytes)
{
	Slot *slot = &shared->slots[job->slot];
	bool attached;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	attached =
		pg_atomic_read_u32(&slot->database) == job->database && slot->generation == job->generation;
	if (attached)
	{
		pg_atomic_fetch_add_u32(&slot->running, 1);
		strlcpy(name, slot->name, bytes);
	}
	/* Rather one that has given nothing back */
	for (int i = 0; attached && i < WORKERS && (me == NULL || pg_atomic_read_u64(&me->batch) != 0);
		 i++)
	{
		if (pg_atomic_read_u32(&shared->workers[i].database) == InvalidOid)
			me = &shared->workers[i];
	}
	if (me != NULL)
	{
		pg_atomic_write_u64(&me->batch, 0);
		pg_atomic_write_u32(&me->database, job->database);
	}
	launch = shared->launches;
	LWLockRelease(shared->lock);
	if (attached && me == NULL)
		ereport(FATAL, (errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
						errmsg("too many workers of the idempotency relay")));
	return attached;
}

/*
 * RelayBeginPoll makes the slot not due: what is published from now on makes it due again.
 */
void
RelayBeginPoll(const RelayJob *job)
{
	(void) pg_atomic_exchange_u32(&shared->slots[job->slot].due, 0);
}

/*
 * RelayWantHelp makes the slot due when a worker has got a batch, so that another one is started if
 * there are more partitions: at once after the first batch of one that was started beside others,
 * which has shown that there is enough to do; otherwise from helpAt on.
 */
void
RelayWantHelp(const RelayJob *job, bool first)
{
	Slot *slot = &shared->slots[job->slot];

	if (first && job->isHelper)
		pg_atomic_write_u64(&slot->helpAt, 0);
	if (pg_atomic_read_u32(&slot->running) >= pg_atomic_read_u32(&slot->partitions) ||
		IsAhead((TimestampTz) pg_atomic_read_u64(&slot->helpAt), GetCurrentTimestamp()))
		return;
	pg_atomic_write_u32(&slot->due, 1);
	WakeLauncher();
}

/*
 * RelayIsCrowded tells whether another subscription waits until a worker leaves; or the launcher
 * has ended that has started this one, and could terminate it.
 */
bool
RelayIsCrowded(void)
{
	return shared->crowded || shared->launches != launch;
}

/*
 * RelayHasChanged tells whether this transaction has changed subscriptions.
 */
bool
RelayHasChanged(void)
{
	return changed;
}

/*
 * RelayCorrect writes what the worker has read of its subscription into the slot.
 */
void
RelayCorrect(const RelayJob *job, const RelayFound *found)
{
	Slot *slot = &shared->slots[job->slot];

	if (slot->owner == found->owner &&
		(int) pg_atomic_read_u32(&slot->partitions) == found->partitions &&
		memcmp(&slot->topics, &found->topics, sizeof(TopicSet)) == 0)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	Fill(slot, found);
	LWLockRelease(shared->lock);
}

/*
 * RelayFetches says whether this worker is calling fetch().
 */
void
RelayFetches(bool now)
{
	fetching = now;
}

/*
 * is_worker_fetch() RETURNS boolean: whether a worker calls fetch(), for itself.
 */
Datum
idempotency_is_worker_fetch(PG_FUNCTION_ARGS)
{
	PG_RETURN_BOOL(fetching);
}

/*
 * RelayHold says which batch this worker has; 0: none.
 */
void
RelayHold(int64 batch)
{
	pg_atomic_write_u64(&me->batch, (uint64) batch);
}

void
RelayHandled(const RelayJob *job)
{
	Slot *slot = &shared->slots[job->slot];

	if (slot->failures == 0 && slot->problem[0] == '\0')
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	slot->failures = 0;
	slot->problem[0] = '\0';
	LWLockRelease(shared->lock);
}

/*
 * Rest sets how long a slot rests.  Needs the lock.
 */
static void
Rest(Slot *slot, RelayEnd end)
{
	int64 ms = 0;

	Assert(LWLockHeldByMeInMode(shared->lock, LW_EXCLUSIVE));
	if (end == RELAY_UNFIT)
		ms = LONGEST_REST_MS;
	else if (end == RELAY_BUSY || end == RELAY_DIED ||
			 (end == RELAY_RECALLED && slot->failures > 0))
		ms = Min((int64) FIRST_REST_MS << Min(slot->failures, 10), (int64) LONGEST_REST_MS);
	if (end != RELAY_IDLE && end != RELAY_UNFINISHED && end != RELAY_GONE)
		slot->failures++;
	slot->notBefore = ms == 0 ? 0 : TimestampTzPlusMilliseconds(GetCurrentTimestamp(), ms);
}

/*
 * RelayLeave says how a worker ends.  "dueAt" is when there is something to do again, or 0,
 * after RELAY_IDLE; "handled" tells whether it had a batch; "keep", whether the one that it has is
 * remembered as given back.
 */
void
RelayLeave(const RelayJob *job, RelayEnd end, TimestampTz dueAt, bool handled, bool keep)
{
	Slot *slot = &shared->slots[job->slot];
	uint32 left;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	if (!keep)
		pg_atomic_write_u64(&me->batch, 0);
	pg_atomic_write_u32(&me->database, InvalidOid);
	left = pg_atomic_fetch_sub_u32(&slot->running, 1) - 1;
	Rest(slot, end);
	if (end == RELAY_IDLE)
	{
		slot->dueAt = dueAt;
		slot->failures = 0;
		slot->problem[0] = '\0';
		if (!handled && left > 0)
			HelpLater(slot);
	}
	else if (end == RELAY_GONE)
	{
		if (left == 0 && pg_atomic_read_u32(&slot->due) == 0)
			FreeSlot(slot);
	}
	else
		pg_atomic_write_u32(&slot->due, 1);
	LWLockRelease(shared->lock);
	WakeLauncher();
}

/*
 * RelayFailed says that no worker could be started for a slot that was chosen.
 */
void
RelayFailed(const RelayJob *job, RelayEnd end)
{
	Slot *slot = &shared->slots[job->slot];

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	if (slot->generation == job->generation)
		Rest(slot, end);
	LWLockRelease(shared->lock);
}

/*
 * RelayProblem records why a subscription is not served; the log gets it once.
 */
void
RelayProblem(const RelayJob *job, const char *database, const char *problem)
{
	Slot *slot = &shared->slots[job->slot];
	char text[PROBLEM_BYTES];
	char name[RELAY_NAME_BYTES];
	int length = pg_mbcliplen(problem, (int) strlen(problem), PROBLEM_BYTES - 1);
	bool isNew;

	memcpy(text, problem, length);
	text[length] = '\0';
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	isNew = slot->generation == job->generation && strcmp(slot->problem, text) != 0;
	if (isNew)
		memcpy(slot->problem, text, length + 1);
	memcpy(name, slot->name, RELAY_NAME_BYTES);
	LWLockRelease(shared->lock);
	if (isNew)
		ereport(LOG,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("idempotency relay cannot serve subscription \"%s\" of database \"%s\"",
						name, database),
				 errdetail_internal("%s", ClipForLog(problem))));
}

/* ----------------------------------------------------------------
 * Initialization
 * ----------------------------------------------------------------
 */

static void
InitializeSlots(void *memory, LWLock *lock)
{
	Slots *made = memory;

	made->lock = lock;
	pg_atomic_init_u32(&made->used, 0);
	for (int i = 0; i < RELAY_SLOTS; i++)
	{
		pg_atomic_init_u32(&made->slots[i].database, InvalidOid);
		pg_atomic_init_u32(&made->slots[i].due, 0);
		pg_atomic_init_u32(&made->slots[i].running, 0);
		pg_atomic_init_u32(&made->slots[i].partitions, 1);
		pg_atomic_init_u64(&made->slots[i].helpAt, 0);
	}
	for (int i = 0; i < WORKERS; i++)
	{
		pg_atomic_init_u32(&made->workers[i].database, InvalidOid);
		pg_atomic_init_u64(&made->workers[i].batch, 0);
	}
}

/*
 * RelayInit registers the shared memory and the callback; called once per backend, from
 * _PG_init().
 */
void
RelayInit(void)
{
	SharedMemoryRegister(&(SharedPart){(void **) &shared, sizeof(Slots), InitializeSlots});
	RegisterXactCallback(TransactionCallback, NULL);
	EventPublishedHook = RelayWake;
}
