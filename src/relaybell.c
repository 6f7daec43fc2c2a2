/*-------------------------------------------------------------------------
 *
 * relaybell.c
 *	  How a commit that published calls the relay.
 *
 * Each database in which a subscription has a handler has a bell.  It is armed
 * by a worker that finds nothing left to do; the first commit that publishes
 * after that rings it and wakes the relay launcher, which answers it and sends
 * workers to all subscriptions of the database.  Nobody arms it while all of
 * them are served, or about to be:
 *
 *	OFF -- a worker is about to leave --> ARMED -- a commit --> RUNG
 *	RUNG -- the launcher answers --> OFF
 *
 * No event is left lying.  A worker arms the bell and then looks once more,
 * under a new snapshot.  A transaction that it does not see commits later, and
 * looks at the bell after that.  A bell that has rung stays so until the launcher
 * takes it, whatever workers do.
 *
 * So a commit costs an atomic read where nobody has a handler, two where
 * workers are at work, and wakes somebody only if all had nothing to do.
 *
 * A backend remembers where the bell of its database hangs, until any bell is
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

typedef enum Bell
{
	BELL_OFF,
	BELL_ARMED,
	BELL_RUNG
} Bell;

/* Where the bell of this backend's database hangs; -1: it has none. */
static int myPlace = -1;
static uint32 myGeneration = 0; /* as of when */

/*
 * FindPlace returns the place of a database, or -1; "database" 0 finds one that
 * is nobody's.
 */
static int
FindPlace(Oid database)
{
	for (int place = 0; place < RELAY_DATABASES; place++)
	{
		if (pg_atomic_read_u32(&Shared->relay.databases[place].oid) == database)
			return place;
	}
	return -1;
}

/*
 * MyBell returns the bell of this backend's database, or NULL.
 */
static pg_atomic_uint32 *
MyBell(void)
{
	uint32 generation = pg_atomic_read_u32(&Shared->relay.generation);

	if (generation != myGeneration)
	{
		pg_read_barrier();
		myPlace = FindPlace(MyDatabaseId);
		myGeneration = generation;
	}
	return myPlace < 0 ? NULL : &Shared->relay.databases[myPlace].bell;
}

/*
 * BellRing wakes the relay launcher, if something was published that nobody
 * would find otherwise.  For XACT_EVENT_COMMIT, when the transaction is visible
 * to others; it cannot fail.
 */
void
BellRing(void)
{
	pg_atomic_uint32 *bell = MyBell();
	uint32 armed = BELL_ARMED;

	if (bell == NULL)
		return;

	/* Others must have been able to see the commit before we look. */
	pg_memory_barrier();
	if (pg_atomic_read_u32(bell) == BELL_ARMED &&
		pg_atomic_compare_exchange_u32(bell, &armed, BELL_RUNG))
	{
		Latch *launcher = Shared->relay.launcher;

		if (launcher != NULL)
			SetLatch(launcher);
	}
}

/*
 * BellArm makes the next commit in the database ring.
 */
void
BellArm(Oid database)
{
	int place = FindPlace(database);
	uint32 off = BELL_OFF;

	if (place >= 0)
		(void) pg_atomic_compare_exchange_u32(&Shared->relay.databases[place].bell, &off,
											  BELL_ARMED);
}

/*
 * BellAnswer tells whether the bell at a place has rung, and stills it.
 */
bool
BellAnswer(int place)
{
	pg_atomic_uint32 *bell = &Shared->relay.databases[place].bell;
	uint32 rung = BELL_RUNG;

	return pg_atomic_read_u32(bell) == BELL_RUNG &&
		   pg_atomic_compare_exchange_u32(bell, &rung, BELL_OFF);
}

/*
 * BellHang notes one more subscription of a database, which gets a bell if it
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
		pg_atomic_write_u32(&entry->bell, BELL_OFF);
		pg_atomic_write_u32(&entry->oid, database);
		(void) pg_atomic_fetch_add_u32(&Shared->relay.generation, 1);
	}
	return place;
}

/*
 * BellTakeDown notes one subscription less; the last one takes the bell along.
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
