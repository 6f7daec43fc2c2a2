/*-------------------------------------------------------------------------
 *
 * relayregistry.c
 *	  Which subscriptions have a handler, in all databases, and which of them
 *	  have something to do.
 *
 * It is in shared memory, and begins empty with the server.  A subscription
 * comes into it by the commit of subscribe(), or by the survey that the reaper
 * makes when it visits a database (relaysurvey.c): after a start, a restore or a
 * commit of two phases.  Each is in one of three states:
 *
 *	state		what it means						what ends it
 *	--------	---------------------------------	--------------------------------
 *	IDLE		nobody serves it; when it is due	the launcher chooses it, if it is
 *				and not put off, it is to be			due (relayturn.c)
 *	STARTING	a worker is being started for it	it attaches, or never comes
 *	SERVED		a worker has attached				it leaves (relayserved.c)
 *
 * It is due when somebody may have published, when a parked event is to be
 * given again, and when a worker has left it with more to do.  A worker that
 * serves it takes that back each time before it looks; so what comes while it
 * looks makes it due again.
 *
 * There are idempotency.relay_subscriptions places.  If all are taken, a subscription gets
 * that of one of the database that has the most, if that is two more than its own has; so all
 * databases have their share.  One without a place is not served: subscribe() warns, its
 * last_error and the log say so, the log once until a place is given up; and the survey
 * tries again.
 *
 * Locks: the registry's own LWLock, in each function, exclusively where it
 * changes anything.  Nothing under it can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/shmem.h"

#include "guc.h"
#include "relaybell.h"
#include "relayregistryinternal.h"

/* ----------------------------------------------------------------
 * Places
 * ----------------------------------------------------------------
 */

/*
 * RegistryLock takes the lock, for a change.  All static functions need it.
 */
void
RegistryLock(void)
{
	LWLockAcquire(Shared->relay.lock, LW_EXCLUSIVE);
}

void
RegistryUnlock(void)
{
	LWLockRelease(Shared->relay.lock);
}

/*
 * RegistryLockTask takes the lock, and returns the subscription of a task, or NULL
 * if it was forgotten.
 */
RelaySubscription *
RegistryLockTask(const RelayTask *task)
{
	RelaySubscription *it = &Shared->relay.subscriptions[task->place];

	RegistryLock();
	return it->database == task->database && it->number == task->number ? it : NULL;
}

/*
 * RegistryWakeLauncher lets the launcher look whether there is something to do.
 */
void
RegistryWakeLauncher(void)
{
	Latch *launcher = Shared->relay.launcher;

	if (launcher != NULL)
		SetLatch(launcher);
}

/*
 * Find returns a subscription of a database, or NULL; with database 0, a free
 * place.
 */
static RelaySubscription *
Find(Oid database, int64 number)
{
	RelayRegistry *registry = &Shared->relay;

	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == database && it->number == number)
			return it;
	}
	return NULL;
}

/*
 * Evict gives up a place for a subscription of a database, of which there are "more" to come
 * already: that of one that is not served, of the database that has the most places, if it
 * has more than its share.  Returns NULL if there is none.  With "really" being false it
 * changes nothing.
 */
static RelaySubscription *
Evict(Oid database, int more, bool really)
{
	RelayRegistry *registry = &Shared->relay;
	RelaySubscription *worst = NULL;
	int count;
	Oid largest = BellsMost(database, &count);

	for (int place = 0; OidIsValid(largest) && place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == largest && it->state == RELAY_STATE_IDLE && it->untouched <= 0 &&
			(worst == NULL || it->servedAt < worst->servedAt))
			worst = it;
	}
	if (count <= more + 1)
		return NULL;
	if (worst != NULL && really)
	{
		BellTakeDown(worst->database);
		memset(worst, 0, sizeof(RelaySubscription));
	}
	return worst;
}

/*
 * Take takes a place for a subscription.  Returns NULL if none is free.
 */
static RelaySubscription *
Take(Oid database, int64 number)
{
	RelayRegistry *registry = &Shared->relay;
	RelaySubscription *it = Find(InvalidOid, 0);
	int home;

	if (it == NULL && registry->used < registry->size)
		it = &registry->subscriptions[registry->used++];
	if (it == NULL)
	{
		it = Evict(database, 0, true);
		registry->full |= it != NULL; /* another one has lost it */
	}
	home = it == NULL ? -1 : BellHang(database);
	if (home < 0)
	{
		registry->full = true;
		return NULL;
	}
	it->database = database;
	it->home = home;
	it->number = number;
	return it;
}

/*
 * RegistryHasRoom tells whether there is a place for a subscription, if "more" are to come
 * before it.
 */
bool
RegistryHasRoom(Oid database, int64 number, int more)
{
	RelayRegistry *registry = &Shared->relay;
	bool room;

	LWLockAcquire(registry->lock, LW_SHARED);
	room = Find(database, number) != NULL || BellsCount() + more < registry->size ||
		   Evict(database, more, false) != NULL;
	RegistryUnlock();
	return room;
}

/*
 * RegistryGiveUp gives the place of a subscription up.  Needs the lock.
 */
void
RegistryGiveUp(RelaySubscription *it)
{
	BellTakeDown(it->database);
	memset(it, 0, sizeof(RelaySubscription));
	Shared->relay.fullTold = false;
}

/*
 * Renew makes a subscription as one of which nothing is known, but that it may
 * have something to do.  Whoever serves it goes on.
 */
static void
Renew(RelaySubscription *it, Oid owner)
{
	it->owner = owner;
	it->due = true;
	it->notBefore = 0;
	it->failures = 0;
	it->told = false;
	it->problem[0] = '\0';
}

/*
 * RegistryTakeFull tells whether somebody has found no place since it was asked
 * last, and nobody was told since a place was given up.
 */
bool
RegistryTakeFull(void)
{
	bool full;

	RegistryLock();
	full = Shared->relay.full && !Shared->relay.fullTold;
	Shared->relay.full = false;
	Shared->relay.fullTold |= full;
	RegistryUnlock();
	return full;
}

/*
 * RegistryBytes returns how much shared memory the places take.
 */
Size
RegistryBytes(void)
{
	return add_size(mul_size(RelaySubscriptions, MAXALIGN(sizeof(RelayDatabase))),
					mul_size(RelaySubscriptions, MAXALIGN(sizeof(RelaySubscription))));
}

/*
 * RegistryInit makes the registry, when shared memory is made: it is empty.  Its places
 * are at "places".  There are as many for databases as for subscriptions, so that no
 * database is without one that has a subscription.
 */
void
RegistryInit(RelayRegistry *registry, char *places)
{
	pg_atomic_init_u32(&registry->generation, 0);
	pg_atomic_init_u32(&registry->waiting, 0);
	pg_atomic_init_u32(&registry->working, 0);
	registry->size = RelaySubscriptions;
	registry->subscriptions = (RelaySubscription *) places;
	registry->databases =
		(RelayDatabase *) (places + RelaySubscriptions * MAXALIGN(sizeof(RelaySubscription)));
	memset(places, 0, RegistryBytes());
	for (int place = 0; place < registry->size; place++)
		BellsInit(&registry->databases[place]);
}

/* ----------------------------------------------------------------
 * Who comes and goes
 * ----------------------------------------------------------------
 */

/*
 * RegistryPut notes that a subscription was made or changed, and which topics it wants.
 * If it had no handler before, a batch that is out is a consumer's.  Returns false if there
 * is no place for it.
 */
bool
RegistryPut(Oid database, int64 number, Oid owner, const TopicSet *wants)
{
	RelaySubscription *it;

	RegistryLock();
	it = Find(database, number);
	if (it == NULL)
	{
		it = Take(database, number);
		if (it != NULL)
			it->untouched = UNTOUCHED_ANY;
	}
	if (it != NULL)
	{
		it->notedAt = Shared->relay.clock;
		it->wants = *wants;
		Renew(it, owner);
	}
	RegistryUnlock();
	RegistryWakeLauncher();
	return it != NULL;
}

/*
 * RegistryRemove notes that a subscription is gone, or has no handler any more.
 * A worker that serves it finds out when it looks next.
 */
void
RegistryRemove(Oid database, int64 number)
{
	RelaySubscription *it;

	RegistryLock();
	it = Find(database, number);
	if (it != NULL && it->state == RELAY_STATE_IDLE)
		RegistryGiveUp(it);
	RegistryUnlock();
}

/*
 * RegistryMarkDue notes that a subscription has something to do, at once: its lock, for which
 * a worker may have left it, is free now.
 */
void
RegistryMarkDue(Oid database, int64 number)
{
	RelaySubscription *it;

	RegistryLock();
	it = Find(database, number);
	if (it != NULL)
	{
		it->due = true;
		it->notBefore = 0;
	}
	RegistryUnlock();
	RegistryWakeLauncher();
}

/*
 * RegistryDatabases returns the databases that have subscriptions here, each
 * once.
 */
List *
RegistryDatabases(void)
{
	List *databases = NIL;

	for (int place = 0; place < Shared->relay.size; place++)
	{
		Oid database = pg_atomic_read_u32(&Shared->relay.databases[place].oid);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

/* ----------------------------------------------------------------
 * The survey
 * ----------------------------------------------------------------
 */

/*
 * RegistryBeginSurvey is called before the snapshot is made under which a
 * database is surveyed.  Returns what RegistryEndSurvey() wants.
 */
uint64
RegistryBeginSurvey(void)
{
	uint64 began;

	RegistryLock();
	began = ++Shared->relay.clock;
	RegistryUnlock();
	return began;
}

/*
 * RegistryConfirm notes that the survey has found a subscription.  "due" says
 * that it may have something to do, "dueAt" when it will; 0 if never.  The topics that it
 * "wants" are added to those that are known: the survey may have seen older ones than
 * RegistryPut() was told.  Returns false if there is no place for it.
 */
bool
RegistryConfirm(Oid database, int64 number, Oid owner, const TopicSet *wants, bool due,
				TimestampTz dueAt)
{
	RelaySubscription *it;

	RegistryLock();
	it = Find(database, number);
	if (it == NULL)
	{
		it = Take(database, number);
		if (it != NULL)
			Renew(it, owner);
	}
	else if (it->owner != owner)
		Renew(it, owner);

	if (it != NULL)
	{
		it->notedAt = Shared->relay.clock;
		it->due |= due && it->state == RELAY_STATE_IDLE;

		/* No bell of a new topic is armed before a worker has looked. */
		it->due |= TopicSetAddAll(&it->wants, wants);
		if (dueAt != 0 && (it->dueAt == 0 || dueAt < it->dueAt))
			it->dueAt = dueAt;
	}
	RegistryUnlock();
	RegistryWakeLauncher();
	return it != NULL;
}

/*
 * RegistryEndSurvey forgets the subscriptions of a database that the survey has
 * not found, and that nobody has made since it began.
 */
void
RegistryEndSurvey(Oid database, uint64 began)
{
	RelayRegistry *registry = &Shared->relay;

	RegistryLock();
	for (int place = 0; place < registry->used; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		if (it->database == database && it->notedAt < began && it->state == RELAY_STATE_IDLE)
			RegistryGiveUp(it);
	}
	RegistryUnlock();
}

/*
 * RegistryForgetDatabase forgets all subscriptions of a database that is gone,
 * or has none any more.
 */
void
RegistryForgetDatabase(Oid database)
{
	RegistryEndSurvey(database, PG_UINT64_MAX);
}

/*
 * RegistryUntold finds a subscription of a database whose problem is to be
 * written down, and copies it.  Returns false if there is none.
 */
bool
RegistryUntold(Oid database, RelayTask *task, char *problem)
{
	RelayRegistry *registry = &Shared->relay;
	bool found = false;

	LWLockAcquire(registry->lock, LW_SHARED);
	for (int place = 0; place < registry->used && !found; place++)
	{
		RelaySubscription *it = &registry->subscriptions[place];

		found = it->database == database && !it->told && it->problem[0] != '\0';
		if (found)
		{
			*task = (RelayTask){place, it->database, it->owner, it->number};
			memcpy(problem, it->problem, RELAY_PROBLEM_BYTES);
		}
	}
	RegistryUnlock();
	return found;
}

/*
 * RegistryTold notes that the problem was written down.
 */
void
RegistryTold(const RelayTask *task)
{
	RelaySubscription *it = RegistryLockTask(task);

	if (it != NULL)
		it->told = true;
	RegistryUnlock();
}
