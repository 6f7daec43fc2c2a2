/*-------------------------------------------------------------------------
 *
 * stats.c
 *	  Counters of what was answered, per database, and the SQL to read them.
 *
 * They live in shared memory, and only there: nothing is counted unless the
 * library is preloaded, and a restart or a crash of the server begins anew.
 * An event counts when it is answered, and a row when it is reaped, whatever becomes
 * of the transaction; what the reaper has committed is in its table (hand.c).
 *
 * Each database that counts has one of STATS_DATABASES places, which a backend
 * looks up at its first event and remembers.  Counting is one atomic addition,
 * without a lock.  A place is given back when its database is gone, by the
 * launcher, which asks now and then; and when a database is created, which may
 * have the OID of one that is gone.  While all places are taken, the events of
 * further databases are not counted, and the server's log says so once.
 *
 * Locks: the stats' own LWLock: exclusive for giving a place out or back,
 * shared for looking one up.  Reading them all takes none: a row may be that of
 * a moment.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/objectaccess.h"
#include "catalog/pg_database.h"
#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "errors.h"
#include "serverlog.h"
#include "shmem.h"
#include "stats.h"

PG_FUNCTION_INFO_V1(idempotency_stats);
PG_FUNCTION_INFO_V1(idempotency_stats_reset);

/* Where the counters of this backend's database are; -1 = not known. */
static int myPlace = -1;

static object_access_hook_type previousAccessHook = NULL;

/* ----------------------------------------------------------------
 * Places
 * ----------------------------------------------------------------
 */

/*
 * FindPlace returns the place of a database, or -1.  "database" 0 finds one
 * that is nobody's.  The caller holds the lock.
 */
static int
FindPlace(StatsState *stats, Oid database)
{
	for (int place = 0; place < STATS_DATABASES; place++)
	{
		if (pg_atomic_read_u32(&stats->database[place]) == database)
			return place;
	}
	return -1;
}

static void
ResetCounters(DatabaseCounters *counters)
{
	for (int kind = 0; kind < COUNTER_KINDS; kind++)
		pg_atomic_write_u64(&counters->counter[kind], 0);
	pg_atomic_write_u64(&counters->resetAt, GetCurrentTimestamp());
}

/*
 * FindOrTakePlace returns the place of a database, which it takes if there is
 * none yet; -1 if all are taken, which it says in the log the first time.
 */
static int
FindOrTakePlace(StatsState *stats, Oid database)
{
	int place;
	bool full;

	LWLockAcquire(stats->lock, LW_SHARED);
	place = FindPlace(stats, database);
	full = place < 0 && FindPlace(stats, InvalidOid) < 0;
	LWLockRelease(stats->lock);

	if (place < 0 && !full)
	{
		LWLockAcquire(stats->lock, LW_EXCLUSIVE);
		place = FindPlace(stats, database);
		if (place < 0)
		{
			place = FindPlace(stats, InvalidOid);
			full = place < 0;
			if (!full)
			{
				ResetCounters(&stats->counters[place]);
				pg_atomic_write_u32(&stats->database[place], database);
			}
		}
		LWLockRelease(stats->lock);
	}

	if (full && pg_atomic_test_set_flag(&stats->fullReported))
		LogStatsFull(STATS_DATABASES);
	return place;
}

/*
 * MyCounters returns the counters of this backend's database, or NULL if there
 * are none: not preloaded, no database, or no place.  Without a place it looks
 * again at every event, which costs microseconds, so that it finds one that is
 * given back.
 */
static DatabaseCounters *
MyCounters(void)
{
	StatsState *stats;

	if (Shared == NULL || !OidIsValid(MyDatabaseId))
		return NULL;

	/* Our place may have been given to another, if somebody erred about us. */
	stats = &Shared->stats;
	if (myPlace < 0 || pg_atomic_read_u32(&stats->database[myPlace]) != MyDatabaseId)
		myPlace = FindOrTakePlace(stats, MyDatabaseId);
	return myPlace < 0 ? NULL : &stats->counters[myPlace];
}

/*
 * StatsListDatabases returns the OIDs of the databases that have a place.  Who
 * wants to give back the places of those that are gone calls this first, and
 * looks into pg_database with a later snapshot: then a database that is not
 * there is gone, and not merely too young to be seen.
 */
List *
StatsListDatabases(void)
{
	List *databases = NIL;

	if (Shared == NULL)
		return NIL;

	for (int place = 0; place < STATS_DATABASES; place++)
	{
		Oid database = pg_atomic_read_u32(&Shared->stats.database[place]);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

/*
 * StatsForgetDatabase gives back the place of a database that is gone; does
 * nothing if it has none.
 */
void
StatsForgetDatabase(Oid database)
{
	int place;

	if (Shared == NULL || !OidIsValid(database))
		return;

	LWLockAcquire(Shared->stats.lock, LW_EXCLUSIVE);
	place = FindPlace(&Shared->stats, database);
	if (place >= 0)
	{
		pg_atomic_write_u32(&Shared->stats.database[place], InvalidOid);
		pg_atomic_clear_flag(&Shared->stats.fullReported);
	}
	LWLockRelease(Shared->stats.lock);
}

/*
 * ForgetAtCreation is called for every object that is created; a new database
 * must not begin with the counters of one that had its OID before.
 */
static void
ForgetAtCreation(ObjectAccessType access, Oid classId, Oid objectId, int subId, void *arg)
{
	if (previousAccessHook != NULL)
		previousAccessHook(access, classId, objectId, subId, arg);

	if (access == OAT_POST_CREATE && classId == DatabaseRelationId)
		StatsForgetDatabase(objectId);
}

/* ----------------------------------------------------------------
 * Counting
 * ----------------------------------------------------------------
 */

/*
 * CountEvents counts "events" of a kind in this backend's database; none do not
 * take a place.  It throws nothing, and may be called wherever an LWLock may be
 * taken.
 */
void
CountEvents(CounterKind kind, uint64 events)
{
	DatabaseCounters *counters = events > 0 ? MyCounters() : NULL;

	if (counters != NULL)
		pg_atomic_fetch_add_u64(&counters->counter[kind], (int64) events);
}

/*
 * CountEvent counts one event.
 */
void
CountEvent(CounterKind kind)
{
	CountEvents(kind, 1);
}

/*
 * CountWaitTime counts the time since "began" as waited.
 */
void
CountWaitTime(instr_time began)
{
	instr_time waited;

	INSTR_TIME_SET_CURRENT(waited);
	INSTR_TIME_SUBTRACT(waited, began);
	CountEvents(COUNT_WAIT_TIME, INSTR_TIME_GET_MICROSEC(waited));
}

/*
 * CountWait counts a wait that began then and ends now.
 */
void
CountWait(instr_time began)
{
	CountEvent(COUNT_WAITS);
	CountWaitTime(began);
}

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

/* The columns of stats(): the database, the counters, the reset. */
#define STATS_COLUMNS (1 + COUNTER_KINDS + 1)

/*
 * PutRow adds one database to the result.
 */
static void
PutRow(ReturnSetInfo *rsinfo, Oid database, DatabaseCounters *counters)
{
	Datum values[STATS_COLUMNS];
	bool nulls[STATS_COLUMNS] = {false};
	Interval waited = {0};
	int column = 0;

	values[column++] = ObjectIdGetDatum(database);
	for (int kind = 0; kind < COUNTER_KINDS; kind++)
		values[column++] = Int64GetDatum((int64) pg_atomic_read_u64(&counters->counter[kind]));
	waited.time = (TimeOffset) DatumGetInt64(values[1 + COUNT_WAIT_TIME]);
	values[1 + COUNT_WAIT_TIME] = IntervalPGetDatum(&waited);
	values[column] = TimestampTzGetDatum((TimestampTz) pg_atomic_read_u64(&counters->resetAt));
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * stats() RETURNS SETOF record: a row for every database that has counters,
 * and for the caller's in any case, if there is a place for it.
 */
Datum
idempotency_stats(PG_FUNCTION_ARGS)
{
	InitMaterializedSRF(fcinfo, 0);
	if (Shared == NULL)
		return (Datum) 0;

	(void) MyCounters();
	for (int place = 0; place < STATS_DATABASES; place++)
	{
		Oid database = pg_atomic_read_u32(&Shared->stats.database[place]);

		if (OidIsValid(database))
			PutRow((ReturnSetInfo *) fcinfo->resultinfo, database, &Shared->stats.counters[place]);
	}
	return (Datum) 0;
}

/*
 * stats_reset() RETURNS void: sets the counters of this database to 0
 */
Datum
idempotency_stats_reset(PG_FUNCTION_ARGS)
{
	DatabaseCounters *counters = MyCounters();

	if (Shared == NULL)
		ErrorNotPreloaded();
	if (counters != NULL)
		ResetCounters(counters);
	PG_RETURN_VOID();
}

/* ----------------------------------------------------------------
 * Initialization
 * ----------------------------------------------------------------
 */

/*
 * StatsStateInit makes the counters, when shared memory is made: all places are
 * nobody's.
 */
void
StatsStateInit(StatsState *stats)
{
	pg_atomic_init_flag(&stats->fullReported);
	for (int place = 0; place < STATS_DATABASES; place++)
	{
		pg_atomic_init_u32(&stats->database[place], InvalidOid);
		pg_atomic_init_u64(&stats->counters[place].resetAt, 0);
		for (int kind = 0; kind < COUNTER_KINDS; kind++)
			pg_atomic_init_u64(&stats->counters[place].counter[kind], 0);
	}
}

/*
 * StatsInit asks to be told of new databases; called once per process, from
 * _PG_init().  Without preloading there is nothing to forget.
 */
void
StatsInit(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;

	previousAccessHook = object_access_hook;
	object_access_hook = ForgetAtCreation;
}
