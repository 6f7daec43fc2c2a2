/*-------------------------------------------------------------------------
 *
 * relaybell.c
 *	  How a commit that published calls the relay.
 *
 * Each database in which a subscription has a handler has a set of bells, one for each
 * bit of a TopicSet.  A worker that finds nothing left to do for a subscription arms the
 * bells of what the subscription wants.  The first commit after that which publishes such
 * a topic rings and wakes the relay launcher, which answers: subscriptions that want what has
 * rung are due, and the others are left alone.  A bell is not armed while all subscriptions
 * that want its topics are served, or about to be:
 *
 *	OFF -- a worker is about to leave --> ARMED -- a commit --> RUNG
 *	RUNG -- the launcher answers --> OFF
 *
 * No event is left lying.  A worker arms the bells and then looks once more,
 * under a new snapshot.  A transaction that it does not see commits later, and
 * looks at the bells after that.  A bell that has rung stays so until the launcher
 * takes it, whatever workers do; it may be armed again meanwhile, and ring in vain.
 *
 * So a commit costs an atomic read where no subscription has a handler, a few where
 * workers are at work, and wakes the launcher only for subscriptions that may want its
 * events and have nothing to do.
 *
 * A backend remembers where the bells of its database hang, until those of any are
 * hung or taken down.
 *
 * Locks: none for ringing and arming; the registry's for the rest.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"

#include "relaybell.h"
#include "shmem.h"

/* Where the bells of this backend's database hang; -1: it has none. */
static int myPlace = -1;
static uint32 myGeneration = 0; /* as of when */

/*
 * FindPlace returns the place of a database, or -1; "database" 0 finds one that
 * is nobody's.
 */
static int
FindPlace(Oid database)
{
	for (int place = 0; place < Shared->relay.size; place++)
	{
		if (pg_atomic_read_u32(&Shared->relay.databases[place].oid) == database)
			return place;
	}
	return -1;
}

/*
 * MyBells returns the bells of this backend's database, or NULL.
 */
static RelayDatabase *
MyBells(void)
{
	uint32 generation = pg_atomic_read_u32(&Shared->relay.generation);

	if (generation != myGeneration)
	{
		pg_read_barrier();
		myPlace = FindPlace(MyDatabaseId);
		myGeneration = generation;
	}
	return myPlace < 0 ? NULL : &Shared->relay.databases[myPlace];
}

/*
 * BellRing wakes the relay launcher, if topics were published that no worker would find
 * otherwise.  For XACT_EVENT_COMMIT, when the transaction is visible to others; it
 * cannot fail.
 */
void
BellRing(const TopicSet *topics)
{
	RelayDatabase *bells = MyBells();
	uint64 rung = 0;

	if (bells == NULL)
		return;

	/* Others must have been able to see the commit before we look. */
	pg_memory_barrier();
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		uint64 armed = topics->words[word];

		if (armed != 0)
			armed &= pg_atomic_read_u64(&bells->armed[word]);
		if (armed != 0)
			armed &= pg_atomic_fetch_and_u64(&bells->armed[word], ~armed);
		if (armed != 0)
			(void) pg_atomic_fetch_or_u64(&bells->rung[word], armed);
		rung |= armed;
	}
	if (rung != 0)
	{
		Latch *launcher = Shared->relay.launcher;

		(void) pg_atomic_exchange_u32(&bells->anyRung, 1);
		if (launcher != NULL)
			SetLatch(launcher);
	}
}

/*
 * BellArm makes the next commit in the database ring that publishes such topics.
 */
void
BellArm(Oid database, const TopicSet *topics)
{
	int place = FindPlace(database);

	for (int word = 0; place >= 0 && word < TOPIC_WORDS; word++)
	{
		if (topics->words[word] != 0)
			(void) pg_atomic_fetch_or_u64(&Shared->relay.databases[place].armed[word],
										  topics->words[word]);
	}
	pg_memory_barrier();
}

/*
 * BellAnswer tells whether bells of the database at a place have rung, and which, and
 * stills them.
 */
bool
BellAnswer(int place, TopicSet *topics)
{
	RelayDatabase *bells = &Shared->relay.databases[place];

	if (pg_atomic_read_u32(&bells->anyRung) == 0)
		return false;
	(void) pg_atomic_exchange_u32(&bells->anyRung, 0);
	for (int word = 0; word < TOPIC_WORDS; word++)
		topics->words[word] = pg_atomic_exchange_u64(&bells->rung[word], 0);
	return true;
}

/*
 * Still makes bells of which none is armed, and none has rung.
 */
static void
Still(RelayDatabase *bells)
{
	pg_atomic_write_u32(&bells->anyRung, 0);
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		pg_atomic_write_u64(&bells->armed[word], 0);
		pg_atomic_write_u64(&bells->rung[word], 0);
	}
}

/*
 * BellsInit makes the bells at a place, when shared memory is made.
 */
void
BellsInit(RelayDatabase *bells)
{
	pg_atomic_init_u32(&bells->oid, InvalidOid);
	pg_atomic_init_u32(&bells->anyRung, 0);
	for (int word = 0; word < TOPIC_WORDS; word++)
	{
		pg_atomic_init_u64(&bells->armed[word], 0);
		pg_atomic_init_u64(&bells->rung[word], 0);
	}
	bells->subscriptions = 0;
}

/*
 * BellHang notes one more subscription of a database, which gets bells if it
 * has none.  Returns -1 if there is no place for it.
 */
int
BellHang(Oid database)
{
	int place = FindPlace(database);
	RelayDatabase *entry;

	if (place < 0)
		place = FindPlace(InvalidOid);
	if (place < 0)
		return -1;

	entry = &Shared->relay.databases[place];
	if (entry->subscriptions++ == 0)
	{
		Still(entry);
		pg_atomic_write_u32(&entry->oid, database);
		(void) pg_atomic_fetch_add_u32(&Shared->relay.generation, 1);
	}
	return place;
}

/*
 * BellTakeDown notes one subscription less; the last one takes the bells along.
 */
void
BellTakeDown(Oid database)
{
	int place = FindPlace(database);

	if (place >= 0 && --Shared->relay.databases[place].subscriptions == 0)
	{
		pg_atomic_write_u32(&Shared->relay.databases[place].oid, InvalidOid);
		(void) pg_atomic_fetch_add_u32(&Shared->relay.generation, 1);
	}
}

/*
 * BellsCount returns how many subscriptions are noted, of all databases.
 */
int
BellsCount(void)
{
	int count = 0;

	for (int place = 0; place < Shared->relay.size; place++)
		count += Shared->relay.databases[place].subscriptions;
	return count;
}

/*
 * BellsMost returns the database of which the most subscriptions are noted, and sets "more"
 * to how many more these are than of "than"; 0 if that is the one, or there is none.
 */
Oid
BellsMost(Oid than, int *more)
{
	RelayDatabase *databases = Shared->relay.databases;
	int place = FindPlace(than);
	int most = 0;

	for (int i = 1; i < Shared->relay.size; i++)
	{
		if (databases[i].subscriptions > databases[most].subscriptions)
			most = i;
	}
	*more = databases[most].subscriptions - (place < 0 ? 0 : databases[place].subscriptions);
	return *more > 0 ? pg_atomic_read_u32(&databases[most].oid) : InvalidOid;
}
