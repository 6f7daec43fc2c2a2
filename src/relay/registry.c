/*-------------------------------------------------------------------------
 *
 * relay/registry.c
 *	  Which subscriptions have a handler, in all databases.
 *
 * The registry is in shared memory and begins empty with the server.  Commits of
 * subscribe() and unsubscribe() change it, and the survey of a database corrects
 * it.  The README has the states of a subscription and the rule for full slots.
 *
 * Locks: the registry's LWLock, in each function that is not static; exclusive
 * for a change.  Nothing under the lock can fail.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "commands/dbcommands.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "base/guc.h"
#include "base/shmem.h"
#include "relay/registry.h"

RelayRegistry *Registry = NULL;

/* ----------------------------------------------------------------
 * Slots
 * ----------------------------------------------------------------
 */

/*
 * RegistryLockJob takes the lock exclusively and returns the subscription of a
 * job, or NULL if it is no longer in the registry.  The caller releases the lock.
 */
RelaySubscription *
RegistryLockJob(const RelayJob *job)
{
	RelaySubscription *it = &Registry->subscriptions[job->slot];

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	return it->database == job->database && it->number == job->number ? it : NULL;
}

/*
 * RegistryWakeLauncher makes the launcher choose again.
 */
void
RegistryWakeLauncher(void)
{
	Latch *launcher = Registry->launcher;

	if (launcher != NULL)
		SetLatch(launcher);
}

/*
 * RegistryDatabaseSlot returns the slot of a database, or -1; for database 0, a
 * free slot.  Needs no lock.
 */
int
RegistryDatabaseSlot(Oid database)
{
	for (int slot = 0; slot < Registry->size; slot++)
	{
		if (pg_atomic_read_u32(&Registry->databases[slot].oid) == database)
			return slot;
	}
	return -1;
}

/*
 * Find returns a subscription of a database, or NULL; for database 0 and number 0, a slot
 * that was freed.
 */
static RelaySubscription *
Find(Oid database, int64 number)
{
	for (int slot = 0; slot < Registry->used; slot++)
	{
		RelaySubscription *it = &Registry->subscriptions[slot];

		if (it->database == database && it->number == number)
			return it;
	}
	return NULL;
}

/*
 * FreeSlot frees the slot of a subscription; the last one of a database frees that
 * of the database.
 */
static void
FreeSlot(RelaySubscription *it)
{
	RelayDatabase *database = &Registry->databases[it->databaseSlot];

	if (--database->subscriptions == 0)
	{
		pg_atomic_write_u32(&database->oid, InvalidOid);
		(void) pg_atomic_fetch_add_u32(&Registry->generation, 1);
	}
	memset(it, 0, sizeof(RelaySubscription));
}

/*
 * RegistryFree frees the slot of a subscription that is gone.  Needs the lock.
 */
void
RegistryFree(RelaySubscription *it)
{
	FreeSlot(it);
	Registry->overflowReported = false;
}

/*
 * Evictable returns the subscription that must give its slot to one of "database": an idle
 * one of the database that has the most, if that one has more than its share.  Returns NULL
 * if there is none.
 */
static RelaySubscription *
Evictable(Oid database)
{
	RelayRegistry *registry = Registry;
	int own = RegistryDatabaseSlot(database);
	int count = own < 0 ? 0 : registry->databases[own].subscriptions;
	RelaySubscription *oldest = NULL;
	int largest = 0;

	for (int slot = 1; slot < registry->size; slot++)
	{
		if (registry->databases[slot].subscriptions > registry->databases[largest].subscriptions)
			largest = slot;
	}
	if (registry->databases[largest].subscriptions <= count + 1)
		return NULL;
	for (int slot = 0; slot < registry->used; slot++)
	{
		RelaySubscription *it = &registry->subscriptions[slot];

		if (OidIsValid(it->database) && it->databaseSlot == largest &&
			it->state == RELAY_STATE_IDLE && it->unhandled <= 0 &&
			(oldest == NULL || it->ranAt < oldest->ranAt))
			oldest = it;
	}
	return oldest;
}

/*
 * TakeDatabaseSlot counts one more subscription of a database, which gets a slot if
 * it has none.  There is always one: each has a subscription.
 */
static int
TakeDatabaseSlot(Oid oid)
{
	int slot = RegistryDatabaseSlot(oid);
	RelayDatabase *database;

	if (slot < 0)
		slot = RegistryDatabaseSlot(InvalidOid);
	database = &Registry->databases[slot];
	if (database->subscriptions++ == 0)
	{
		/* Wakeups of the former owner of the slot do no harm */
		pg_atomic_write_u32(&database->oid, oid);
		(void) pg_atomic_fetch_add_u32(&Registry->generation, 1);
	}
	return slot;
}

/*
 * Renew resets what is known of a subscription, and makes it due.  Its state does not
 * change: a worker that runs it continues.
 */
static void
Renew(RelaySubscription *it, Oid owner)
{
	it->owner = owner;
	it->due = true;
	it->notBefore = 0;
	it->failures = 0;
	it->problem[0] = '\0';
}

/*
 * Take takes a slot for a subscription.  Returns NULL if none is free.
 */
static RelaySubscription *
Take(Oid database, int64 number, Oid owner)
{
	RelaySubscription *it = Find(InvalidOid, 0);

	if (it == NULL && Registry->used < Registry->size)
		it = &Registry->subscriptions[Registry->used++];
	if (it == NULL)
	{
		Registry->overflow = true;
		it = Evictable(database);
		if (it == NULL)
			return NULL;
		FreeSlot(it);
	}
	it->database = database;
	it->databaseSlot = TakeDatabaseSlot(database);
	it->number = number;
	Renew(it, owner);
	return it;
}

/*
 * RegistryHasSlot tells whether there is a slot for a subscription.
 */
bool
RegistryHasSlot(Oid database, int64 number)
{
	bool has;

	LWLockAcquire(Registry->lock, LW_SHARED);
	has = Find(database, number) != NULL || Find(InvalidOid, 0) != NULL ||
		  Registry->used < Registry->size || Evictable(database) != NULL;
	LWLockRelease(Registry->lock);
	return has;
}

/*
 * RegistryTakeOverflow tells whether the log must say that a subscription got no
 * slot: once, until a slot is freed.
 */
bool
RegistryTakeOverflow(void)
{
	bool overflow;

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	overflow = Registry->overflow && !Registry->overflowReported;
	Registry->overflow = false;
	Registry->overflowReported |= overflow;
	LWLockRelease(Registry->lock);
	return overflow;
}

/* ----------------------------------------------------------------
 * Changes by commits
 * ----------------------------------------------------------------
 */

/*
 * RegistryPut adds or changes a subscription that wants such topics.  If it had no
 * handler before, a batch in flight is a consumer's.  Returns false if it got no
 * slot.
 */
bool
RegistryPut(Oid database, int64 number, Oid owner, const TopicSet *wants)
{
	RelaySubscription *it;

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it != NULL)
		Renew(it, owner);
	else
	{
		it = Take(database, number, owner);
		if (it != NULL)
			it->unhandled = RELAY_UNHANDLED_ANY;
	}
	if (it != NULL)
	{
		it->putAt = GetCurrentTimestamp();
		it->wants = *wants;
	}
	LWLockRelease(Registry->lock);
	RegistryWakeLauncher();
	return it != NULL;
}

/*
 * RegistryRemove removes a subscription that is gone, or has no handler any more.  For one
 * that is running its worker does so, when it polls next; if it has a handler again by
 * then, a batch in flight is a consumer's.
 */
void
RegistryRemove(Oid database, int64 number)
{
	RelaySubscription *it;

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it != NULL && it->state == RELAY_STATE_IDLE)
		RegistryFree(it);
	else if (it != NULL)
		it->unhandled = RELAY_UNHANDLED_ANY;
	LWLockRelease(Registry->lock);
}

/*
 * RegistryMarkDue makes a subscription due without back-off: its lock, for which a
 * worker may have left it, is free now.
 */
void
RegistryMarkDue(Oid database, int64 number)
{
	RelaySubscription *it;

	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);
	it = Find(database, number);
	if (it != NULL)
	{
		it->due = true;
		it->notBefore = 0;
	}
	LWLockRelease(Registry->lock);
	RegistryWakeLauncher();
}

/* ----------------------------------------------------------------
 * The survey
 * ----------------------------------------------------------------
 */

/*
 * RegistryDatabases returns the databases that have subscriptions here, each once.
 */
List *
RegistryDatabases(void)
{
	List *databases = NIL;

	for (int slot = 0; slot < Registry->size; slot++)
	{
		Oid database = pg_atomic_read_u32(&Registry->databases[slot].oid);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

static int
CompareNumbers(const void *a, const void *b)
{
	int64 left = ((const RelayFound *) a)->number;
	int64 right = ((const RelayFound *) b)->number;

	return (left > right) - (left < right);
}

/*
 * Confirm updates a subscription by what the survey has found.  Topics are added
 * only: the survey may have seen older ones than RegistryPut() was given.
 */
static void
Confirm(RelaySubscription *it, RelayFound *found)
{
	found->hasSlot = true;
	if (it->owner != found->owner)
		Renew(it, found->owner);
	memcpy(found->problem, it->problem, RELAY_PROBLEM_BYTES);
	found->unlogged = it->unlogged;
	it->logged = 0;
	it->unlogged = 0;
	it->due |= found->due && it->state == RELAY_STATE_IDLE;

	/* No wakeup is armed for a new topic before a worker has polled. */
	it->due |= TopicSetAddAll(&it->wants, &found->wants);
	if (found->dueAt != 0 && (it->dueAt == 0 || found->dueAt < it->dueAt))
		it->dueAt = found->dueAt;
}

/*
 * RegistryMerge brings the registry up to date with subscriptions of a database, which are in
 * the order of their numbers, and sets which of them have a slot, their problems, and how
 * many dead letters the caller must log with LogUnlogged().  It
 * forgets those without an owner, and the others that a commit has put here before a survey
 * "began" (0: none), unless they are running.
 */
void
RegistryMerge(Oid database, RelayFound *found, int count, TimestampTz began)
{
	LWLockAcquire(Registry->lock, LW_EXCLUSIVE);

	/* Match the slots of the database */
	for (int slot = 0; slot < Registry->used; slot++)
	{
		RelaySubscription *it = &Registry->subscriptions[slot];
		RelayFound key = {.number = it->number};
		RelayFound *match;

		if (it->database != database)
			continue;
		match = count == 0 ? NULL : bsearch(&key, found, count, sizeof(key), CompareNumbers);
		if (match != NULL && OidIsValid(match->owner))
			Confirm(it, match);
		else if ((match != NULL || it->putAt < began) && it->state == RELAY_STATE_IDLE)
			RegistryFree(it);
	}

	/* Give the others a slot, until there is none */
	for (int i = 0; i < count; i++)
	{
		RelaySubscription *it;

		if (found[i].hasSlot || !OidIsValid(found[i].owner))
			continue;
		it = Take(database, found[i].number, found[i].owner);
		if (it == NULL)
			break;
		Confirm(it, &found[i]);
	}
	LWLockRelease(Registry->lock);
	RegistryWakeLauncher();
}

/*
 * RegistryForgetDatabase forgets the subscriptions of a database that is gone, or
 * has none any more.
 */
void
RegistryForgetDatabase(Oid database)
{
	RegistryMerge(database, NULL, 0, DT_NOEND);
}

/* ----------------------------------------------------------------
 * Problems
 * ----------------------------------------------------------------
 */

/*
 * RegistrySetProblem keeps why a subscription cannot be run.  Returns whether the problem
 * is new, so that the log must say it.
 */
bool
RegistrySetProblem(const RelayJob *job, const char *problem)
{
	char text[RELAY_PROBLEM_BYTES] = {0};
	RelaySubscription *it;
	bool isNew;

	memcpy(text, problem, pg_mbcliplen(problem, strlen(problem), RELAY_PROBLEM_BYTES - 1));
	it = RegistryLockJob(job);
	isNew = it != NULL && strcmp(it->problem, text) != 0;
	if (isNew)
		memcpy(it->problem, text, RELAY_PROBLEM_BYTES);
	LWLockRelease(Registry->lock);
	return isNew;
}

/*
 * LogUnlogged writes to the log how many dead letters it does not have.
 */
void
LogUnlogged(const text *subscription, int64 unlogged)
{
	if (unlogged == 0)
		return;
	ereport(LOG, (errmsg("%lld more events of subscription \"%s\" are dead letters now",
						 (long long) unlogged, text_to_cstring(subscription)),
				  errhint("See the view idempotency.dead_letters.")));
}

/*
 * LogRelayProblem writes to the log why a subscription cannot be run.  Needs a transaction.
 */
void
LogRelayProblem(const text *subscription, const char *problem)
{
	ereport(LOG, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				  errmsg("idempotency relay cannot serve subscription \"%s\" of database \"%s\"",
						 text_to_cstring(subscription), get_database_name(MyDatabaseId)),
				  errdetail_internal("%s", ClipForLog(problem)),
				  errhint("It tries again, less and less often. Calling idempotency.subscribe() "
						  "again lets it try at once.")));
}

/* ----------------------------------------------------------------
 * Initialization
 * ----------------------------------------------------------------
 */

/*
 * InitializeRegistry makes an empty registry of zeroed memory.
 */
static void
InitializeRegistry(void *memory, LWLock *lock)
{
	RelayRegistry *registry = memory;
	char *slots = (char *) memory + MAXALIGN(sizeof(RelayRegistry));

	registry->lock = lock;
	pg_atomic_init_u32(&registry->generation, 0);
	pg_atomic_init_u32(&registry->waiting, 0);
	pg_atomic_init_u32(&registry->working, 0);
	pg_atomic_init_u32(&registry->slotWanted, 0);
	registry->size = RelaySubscriptions;
	registry->subscriptions = (RelaySubscription *) slots;
	registry->databases =
		(RelayDatabase *) (slots + RelaySubscriptions * MAXALIGN(sizeof(RelaySubscription)));
	for (int slot = 0; slot < registry->size; slot++)
	{
		RelayDatabase *database = &registry->databases[slot];

		pg_atomic_init_u32(&database->oid, InvalidOid);
		for (int word = 0; word < TOPIC_WORDS; word++)
		{
			pg_atomic_init_u64(&database->armed[word], 0);
			pg_atomic_init_u64(&database->requested[word], 0);
		}
	}
}

/*
 * RegistryInit requests the shared memory; called from _PG_init(), when the settings
 * are known.
 */
void
RegistryInit(void)
{
	Size slot = MAXALIGN(sizeof(RelayDatabase)) + MAXALIGN(sizeof(RelaySubscription));
	Size bytes = add_size(MAXALIGN(sizeof(RelayRegistry)), mul_size(RelaySubscriptions, slot));

	SharedMemoryRegister(&(SharedPart){(void **) &Registry, bytes, InitializeRegistry});
}
