/*-------------------------------------------------------------------------
 *
 * relayturn.c
 *	  Which subscription of the registry is served next.
 *
 * It is one that is due, and neither served nor put off: of the database that has the
 * fewest workers, and was served longest ago, the one that was.  The launcher starts a
 * worker for it; or one that has just left another, and can serve it as the role that
 * it is connected as, goes on with it.
 *
 * Whoever chooses answers the bells first (relaybell.c): the subscriptions that may want
 * the topics that have rung are due.
 *
 * Locks: the registry's, in each function.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "relaybell.h"
#include "relayregistryinternal.h"

/*
 * NoteRung makes due what wants the topics that have rung in a database.
 */
static void
NoteRung(Oid database, const TopicSet *topics)
{
	RelayRegistry *registry = &Shared->relay;

	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == database && !it->due)
			it->due = TopicSetsMeet(&it->wants, topics);
	}
}

/*
 * NoteWhatIsDue makes due what the bells have rung for, and what was to be due
 * by now.
 */
static void
NoteWhatIsDue(TimestampTz now)
{
	RelayRegistry *registry = &Shared->relay;
	TopicSet topics;

	for (int place = 0; place < registry->size; place++)
	{
		if (BellAnswer(place, &topics))
			NoteRung(pg_atomic_read_u32(&registry->databases[place].oid), &topics);
	}
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->dueAt != 0 && it->dueAt <= now)
		{
			it->due = true;
			it->dueAt = 0;
		}
	}
}

/*
 * IsPutOff tells whether a subscription is not to be served yet.  One for longer
 * than any is put off was so before somebody set the clock back.
 */
static bool
IsPutOff(const RelaySubscription *it, TimestampTz now)
{
	return it->notBefore > now && it->notBefore <= now + PUT_OFF_MOST_MS * INT64CONST(1000);
}

static bool
IsReady(const RelaySubscription *it, TimestampTz now)
{
	return OidIsValid(it->database) && it->state == RELAY_STATE_IDLE && it->due &&
		   !IsPutOff(it, now);
}

/*
 * SumUp notes of each database that has subscriptions how many workers are there now, and
 * when it was served last.
 */
static void
SumUp(void)
{
	RelayRegistry *registry = &Shared->relay;

	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];

		registry->databases[it->home].workers = 0;
		registry->databases[it->home].servedAt = 0;
	}
	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];
		RelayDatabase *database = &registry->databases[it->home];

		if (!OidIsValid(it->database))
			continue;
		database->workers += it->state != RELAY_STATE_IDLE;
		database->servedAt = Max(database->servedAt, it->servedAt);
	}
}

/*
 * ComesBefore tells whether "a" is to be served before "b": if its database has fewer
 * workers, or was served longer ago, or in one database, if it was itself.
 */
static bool
ComesBefore(const RelaySubscription *a, const RelaySubscription *b)
{
	const RelayDatabase *aHome = &Shared->relay.databases[a->home];
	const RelayDatabase *bHome = &Shared->relay.databases[b->home];

	if (a->home == b->home)
		return a->servedAt < b->servedAt;
	if (aHome->workers != bHome->workers)
		return aHome->workers < bHome->workers;
	return aHome->servedAt < bHome->servedAt;
}

/*
 * Best returns which of those that are ready comes next, or NULL.  Adds up how many are
 * ready, and how many are being served.  Its time is linear in the places: commits and workers
 * wait for the lock.
 */
static RelaySubscription *
Best(TimestampTz now, int *ready, int *working)
{
	RelayRegistry *registry = &Shared->relay;
	RelaySubscription *best = NULL;

	SumUp();
	*ready = *working = 0;
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		*working += it->state != RELAY_STATE_IDLE;
		if (!IsReady(it, now))
			continue;
		(*ready)++;
		if (best == NULL || ComesBefore(it, best))
			best = it;
	}
	return best;
}

/*
 * RegistryTakeNext takes up the subscription whose turn it is, if there are fewer than
 * "workers" at work: it is being served from now on, or soon, as "state" says.  Unless
 * "like" is NULL, it must be of that one's database and owner.  Returns false if there is
 * none.  Needs the lock.
 */
bool
RegistryTakeNext(int workers, RelayState state, const RelayTask *like, RelayTask *task)
{
	RelayRegistry *registry = &Shared->relay;
	TimestampTz now = GetCurrentTimestamp();
	RelaySubscription *best;
	int ready;
	int working;

	NoteWhatIsDue(now);
	best = Best(now, &ready, &working);
	if (best != NULL && (working >= workers || (like != NULL && (best->database != like->database ||
																 best->owner != like->owner))))
		best = NULL;
	if (best != NULL)
	{
		best->state = state;
		best->servedAt = ++registry->clock;
		*task =
			(RelayTask){best - registry->subscriptions, best->database, best->owner, best->number};
		ready--;
		working++;
	}
	pg_atomic_write_u32(&registry->waiting, ready);
	pg_atomic_write_u32(&registry->working, working);
	return best != NULL;
}

/*
 * RegistryChoose chooses the subscription that a worker is to be started for,
 * if there are fewer than "workers" at work.  Returns false if there is none.
 */
bool
RegistryChoose(int workers, RelayTask *task)
{
	bool found;

	RegistryLock();
	found = RegistryTakeNext(workers, RELAY_STATE_STARTING, NULL, task);
	RegistryUnlock();
	return found;
}

/*
 * RegistryNextTime returns when RegistryChoose() may choose something that it
 * would not now, though nobody calls; 0 if there is no such time.
 */
TimestampTz
RegistryNextTime(void)
{
	RelayRegistry *registry = &Shared->relay;
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz next = 0;

	LWLockAcquire(registry->lock, LW_SHARED);
	for (int place = 0; place < registry->used; place++)
	{
		const RelaySubscription *it = &registry->subscriptions[place];
		TimestampTz at = it->due ? it->notBefore : it->dueAt;

		if (it->state != RELAY_STATE_IDLE || at == 0 || (it->due && !IsPutOff(it, now)))
			continue;
		next = next == 0 ? at : Min(next, at);
	}
	RegistryUnlock();
	return next;
}

/*
 * RegistryRetryAll serves what was put off as soon as it is due.
 */
void
RegistryRetryAll(void)
{
	RelayRegistry *registry = &Shared->relay;

	RegistryLock();
	for (int place = 0; place < registry->used; place++)
		registry->subscriptions[place].notBefore = 0;
	RegistryUnlock();
}

/*
 * RegistryOpen prepares for a new launcher: workers that its predecessor was
 * starting may never come.
 */
void
RegistryOpen(void)
{
	RelayRegistry *registry = &Shared->relay;

	RegistryLock();
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->state == RELAY_STATE_STARTING)
		{
			it->state = RELAY_STATE_IDLE;
			it->due = true;
		}
	}
	RegistryUnlock();
}
