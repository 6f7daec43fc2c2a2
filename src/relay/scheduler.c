/*-------------------------------------------------------------------------
 *
 * relay/scheduler.c
 *	  Which subscription of the registry gets a worker next, and what follows
 *	  when the worker leaves.
 *
 * The README has the states of a subscription, the order of the choice, and the
 * back-off after each RelayEnd.
 *
 * Locks: the registry's LWLock, in each function that is not static.  Nothing under
 * the lock can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/timestamp.h"

#include "base/guc.h"
#include "relay/registry.h"

/* The back-off, at first and at most, in milliseconds. */
#define BUSY_MS 50
#define BUSY_MOST_MS 10000
#define NOT_STARTED_MOST_MS 1000
#define DIED_MS 100
#define UNFIT_MS 1000

/* How many dead letters of a subscription the log gets between two surveys. */
#define LOGGED_MOST 10

/* ----------------------------------------------------------------
 * The choice
 * ----------------------------------------------------------------
 */

/*
 * TakeWakeups makes the subscriptions due that a wakeup was requested for.
 */
static void
TakeWakeups(void)
{
	RelayRegistry *registry = Registry;
	TopicSet topics;

	for (int slot = 0; slot < registry->size; slot++)
	{
		if (pg_atomic_read_u32(&registry->databases[slot].oid) == InvalidOid ||
			!RelayWakeupTake(&registry->databases[slot], &topics))
			continue;
		for (int i = 0; i < registry->used; i++)
		{
			RelaySubscription *it = &registry->subscriptions[i];

			if (OidIsValid(it->database) && it->databaseSlot == slot && !it->due)
				it->due = TopicSetsMeet(&it->wants, &topics);
		}
	}
}

/*
 * BacksOff tells whether the back-off of a subscription is not over.  If the rest is longer
 * than the longest back-off, the clock was set back, and the back-off counts as over.
 */
static bool
BacksOff(const RelaySubscription *it, TimestampTz now)
{
	return it->notBefore > now && it->notBefore <= now + RELAY_BACK_OFF_MOST_MS * INT64CONST(1000);
}

/*
 * Best returns the ready subscription that was chosen the longest ago, or NULL, and sets how
 * many are ready and how many have a worker.  Its time is linear in the slots: commits and workers
 * wait for the lock.
 */
static RelaySubscription *
Best(int *ready, int *working)
{
	TimestampTz now = GetCurrentTimestamp();
	RelaySubscription *best = NULL;

	TakeWakeups();
	*ready = *working = 0;
	for (int slot = 0; slot < Registry->used; slot++)
	{
		RelaySubscription *it = &Registry->subscriptions[slot];

		if (it->dueAt != 0 && it->dueAt <= now)
		{
			it->due = true;
			it->dueAt = 0;
		}
		*working += it->state != RELAY_STATE_IDLE;
		if (!OidIsValid(it->database) || it->state != RELAY_STATE_IDLE || !it->due ||
			BacksOff(it, now))
			continue;
		(*ready)++;
		if (best == NULL || it->ranAt < best->ranAt)
			best = it;
	}
	return best;
}

/*
 * Take chooses the next subscription, if fewer than "workers" are at work and no visit
 * waits for a slot, and gives it that state.  Unless "like" is NULL, it must be of that
 * one's database and owner.  Returns false if there is none.  Needs the lock.
 */
static bool
Take(int workers, RelayState state, const RelayJob *like, RelayJob *job)
{
	RelayRegistry *registry = Registry;
	RelaySubscription *best;
	int ready;
	int working;

	best = Best(&ready, &working);
	if (best != NULL &&
		(working >= workers || pg_atomic_read_u32(&registry->slotWanted) != 0 ||
		 (like != NULL && (best->database != like->database || best->owner != like->owner))))
		best = NULL;
	if (best != NULL)
	{
		best->state = state;
		best->ranAt = ++registry->clock;
		*job =
			(RelayJob){best - registry->subscriptions, best->database, best->owner, best->number};
		ready--;
		working++;
	}
	pg_atomic_write_u32(&registry->waiting, ready);
	pg_atomic_write_u32(&registry->working, working);
	return best != NULL;
}

/*
 * SchedulerChoose chooses the subscription that a worker is started for, if fewer than
 * "workers" are at work.  Returns false if there is none.
 */
bool
SchedulerChoose(int workers, RelayJob *job)
{
	bool found;

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	found = Take(workers, RELAY_STATE_STARTING, NULL, job);
	LWLockRelease(Registry->lock);
	return found;
}

/*
 * SchedulerNextTime returns when SchedulerChoose() can choose what it would not now,
 * without a wakeup; 0 for never.
 */
TimestampTz
SchedulerNextTime(void)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz next = 0;

	LWLockAcquire(Registry->lock, LW_SHARED);
	for (int slot = 0; slot < Registry->used; slot++)
	{
		const RelaySubscription *it = &Registry->subscriptions[slot];
		TimestampTz at = it->due ? it->notBefore : it->dueAt;

		if (it->state != RELAY_STATE_IDLE || at == 0 || (it->due && !BacksOff(it, now)))
			continue;
		next = next == 0 ? at : Min(next, at);
	}
	LWLockRelease(Registry->lock);
	return next;
}

/*
 * SchedulerWantSlot records whether a visit waits for the slot of a worker: then no
 * subscription is chosen, and workers leave as if others waited for theirs.
 */
void
SchedulerWantSlot(bool wanted)
{
	pg_atomic_write_u32(&Registry->slotWanted, wanted);
}

/*
 * SchedulerReset prepares for a new launcher: workers that the previous one has
 * requested may never start, and it has no visit.
 */
void
SchedulerReset(void)
{
	SchedulerWantSlot(false);
	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	for (int slot = 0; slot < Registry->used; slot++)
	{
		RelaySubscription *it = &Registry->subscriptions[slot];

		if (it->state == RELAY_STATE_STARTING)
		{
			it->state = RELAY_STATE_IDLE;
			it->due = true;
		}
	}
	LWLockRelease(Registry->lock);
}

/* ----------------------------------------------------------------
 * A running subscription
 * ----------------------------------------------------------------
 */

/*
 * SchedulerAttach makes the caller the worker of the subscription.  Returns false if
 * the subscription is gone, or has a worker.
 */
bool
SchedulerAttach(const RelayJob *job)
{
	RelaySubscription *it = RegistryLockJob(job);
	bool attached = it != NULL && it->state != RELAY_STATE_RUNNING;

	if (attached)
		it->state = RELAY_STATE_RUNNING;
	LWLockRelease(Registry->lock);
	return attached;
}

/*
 * SchedulerBeginPoll is called before the snapshot is taken under which a worker polls.
 * If it exits when that poll finds nothing, the "last" one, wakeups are armed.
 */
void
SchedulerBeginPoll(const RelayJob *job, bool last)
{
	RelaySubscription *it = RegistryLockJob(job);

	if (it != NULL)
	{
		it->due = false;
		it->dueAt = 0;
		if (last)
			RelayWakeupArm(&Registry->databases[it->databaseSlot], &it->wants);
	}
	LWLockRelease(Registry->lock);
}

/*
 * SchedulerIsCrowded tells whether a subscription or a visit waits for a worker, or there
 * are more workers than may be.  Takes no lock.
 */
bool
SchedulerIsCrowded(void)
{
	return pg_atomic_read_u32(&Registry->waiting) > 0 ||
		   pg_atomic_read_u32(&Registry->slotWanted) != 0 ||
		   pg_atomic_read_u32(&Registry->working) > (uint32) RelayWorkers;
}

/*
 * SchedulerIsUnhandled tells whether no handler was called with a batch that a worker,
 * or a consumer, has left in flight.
 */
bool
SchedulerIsUnhandled(const RelayJob *job, int64 batch)
{
	RelaySubscription *it = RegistryLockJob(job);
	bool unhandled = it != NULL && (it->unhandled == batch || it->unhandled == RELAY_UNHANDLED_ANY);

	LWLockRelease(Registry->lock);
	return unhandled;
}

/*
 * SchedulerSetUnhandled records such a batch; 0 for none.
 */
void
SchedulerSetUnhandled(const RelayJob *job, int64 batch)
{
	RelaySubscription *it = RegistryLockJob(job);

	if (it != NULL)
		it->unhandled = batch;
	LWLockRelease(Registry->lock);
}

/*
 * SchedulerMayLog tells whether the log gets another dead letter of the subscription, and
 * counts it.
 */
bool
SchedulerMayLog(const RelayJob *job)
{
	RelaySubscription *it = RegistryLockJob(job);
	bool may = it == NULL || it->logged < LOGGED_MOST;

	if (may && it != NULL)
		it->logged++;
	else if (it != NULL)
		it->unlogged++;
	LWLockRelease(Registry->lock);
	return may;
}

/* ----------------------------------------------------------------
 * The end of a run
 * ----------------------------------------------------------------
 */

/*
 * BackOff begins a back-off, which doubles with each failure in a row.
 */
static void
BackOff(RelaySubscription *it, int64 ms, int64 most)
{
	ms = Min(ms << Min(it->failures, 16), most);
	it->failures++;
	it->due = true;
	it->notBefore = GetCurrentTimestamp() + ms * 1000;
}

/*
 * Succeed forgets failures, and what the problem was.
 */
static void
Succeed(RelaySubscription *it)
{
	it->failures = 0;
	it->notBefore = 0;
	it->problem[0] = '\0';
}

/*
 * SchedulerProgress records that events were handled: the next failure is the first.
 */
void
SchedulerProgress(const RelayJob *job)
{
	RelaySubscription *it = RegistryLockJob(job);

	if (it != NULL)
		Succeed(it);
	LWLockRelease(Registry->lock);
}

/*
 * Leave makes a subscription idle after such an end.  "busyMost" is the longest
 * back-off of RELAY_BUSY.
 */
static void
Leave(RelaySubscription *it, RelayEnd end, TimestampTz dueAt, int64 busyMost)
{
	it->state = RELAY_STATE_IDLE;
	switch (end)
	{
		case RELAY_IDLE:
			Succeed(it);
			it->dueAt = dueAt;
			break;
		case RELAY_UNFINISHED:
			Succeed(it);
			it->due = true;
			break;
		case RELAY_NO_SLOT:
			/* It is chosen first, and workers leave for it */
			it->due = true;
			it->ranAt = 0;
			(void) pg_atomic_fetch_add_u32(&Registry->waiting, 1);
			break;
		case RELAY_BUSY:
			BackOff(it, BUSY_MS, busyMost);
			break;
		case RELAY_DIED:
			BackOff(it, DIED_MS, RELAY_BACK_OFF_MOST_MS);
			break;
		case RELAY_UNFIT:
			BackOff(it, UNFIT_MS, RELAY_BACK_OFF_MOST_MS);
			break;
		case RELAY_GONE:
			/* unless it was made again since the worker polled */
			if (!it->due)
				RegistryFree(it);
			break;
	}
}

/*
 * SchedulerLeave detaches the caller from the subscription, which becomes due again at
 * "dueAt" without a wakeup; 0 for never.  Unless "next" is NULL, it attaches the caller to
 * the next subscription, if that is of the same owner and database and there are no more
 * workers than may be.  Returns whether it has.
 */
bool
SchedulerLeave(const RelayJob *job, RelayEnd end, TimestampTz dueAt, RelayJob *next)
{
	RelaySubscription *it = RegistryLockJob(job);
	bool movesOn;

	if (it != NULL)
		Leave(it, end, dueAt, BUSY_MOST_MS);
	movesOn = next != NULL && Take(RelayWorkers, RELAY_STATE_RUNNING, job, next);
	LWLockRelease(Registry->lock);
	RegistryWakeLauncher();
	return movesOn;
}

/*
 * SchedulerStartFailed records that the worker that was requested will not attach.  It
 * changes nothing if the worker has attached.
 */
void
SchedulerStartFailed(const RelayJob *job, RelayEnd end)
{
	RelaySubscription *it = RegistryLockJob(job);

	if (it != NULL && it->state == RELAY_STATE_STARTING)
		Leave(it, end, 0, NOT_STARTED_MOST_MS);
	LWLockRelease(Registry->lock);
}
