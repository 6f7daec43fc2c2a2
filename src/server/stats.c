/*-------------------------------------------------------------------------
 *
 * server/stats.c
 *	  What the server keeps of each database: counters, with the functions to read them, and
 *	  what sessions request of the launcher.
 *
 * The counters are in shared memory: without preloading nothing is counted, and a
 * restart or crash resets them.  Events count when they happen, even if the
 * transaction rolls back.
 *
 * A session requests a visit of a background worker to its database when it first finds the
 * extension there, and after a change of the tables; and a survey, when its commit has
 * changed subscriptions.
 *
 * Each database with counters has one of STATS_DATABASES slots.  A backend looks its
 * slot up at its first event; counting is one atomic addition without a lock.  A slot is
 * freed by the launcher once its database is gone.  The LWLock protects the assignment of
 * slots.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"

#include "base/compat.h"
#include "server/shmem.h"
#include "server/stats.h"

PG_FUNCTION_INFO_V1(idempotency_stats);
PG_FUNCTION_INFO_V1(idempotency_stats_reset);
PG_FUNCTION_INFO_V1(idempotency_count_events);

/* The slot of this backend's database; -1: unknown. */
static int mySlot = -1;

/* How many databases have counters; each takes 8 bytes per counter, and 16 more. */
#define STATS_DATABASES 1024

/* The counters of one database. */
typedef struct DatabaseCounters
{
	pg_atomic_uint64 resetAt; /* a TimestampTz */
	pg_atomic_uint64 counter[COUNTER_KINDS];
} DatabaseCounters;

typedef struct StatsState
{
	LWLock *lock;								/* for assigning and freeing slots */
	pg_atomic_flag fullReported;				/* since a slot was freed last */
	pg_atomic_uint32 database[STATS_DATABASES]; /* of each slot; 0: free */
	pg_atomic_uint32 requests[STATS_DATABASES]; /* bits, RequestKind */
	DatabaseCounters counters[STATS_DATABASES];
} StatsState;

/* NULL unless the library is preloaded. */
static StatsState *stats = NULL;

/* ----------------------------------------------------------------
 * Slots
 * ----------------------------------------------------------------
 */

/*
 * FindSlot returns the slot of a database, or -1; of "database" 0, a free one.  The
 * caller holds the lock.
 */
static int
FindSlot(Oid database)
{
	for (int slot = 0; slot < STATS_DATABASES; slot++)
	{
		if (pg_atomic_read_u32(&stats->database[slot]) == database)
			return slot;
	}
	return -1;
}

static TimestampTz
ResetCounters(DatabaseCounters *counters)
{
	TimestampTz now = GetCurrentTimestamp();

	for (int kind = 0; kind < COUNTER_KINDS; kind++)
		pg_atomic_write_u64(&counters->counter[kind], 0);
	pg_atomic_write_u64(&counters->resetAt, now);
	return now;
}

/*
 * FindOrAssignSlot returns the slot of a database, and assigns one if it has none; -1 if
 * no slot is free, which it logs the first time.
 */
static int
FindOrAssignSlot(Oid database)
{
	int slot;

	LWLockAcquire(stats->lock, LW_EXCLUSIVE);
	slot = FindSlot(database);
	if (slot < 0)
	{
		slot = FindSlot(InvalidOid);
		if (slot >= 0)
		{
			ResetCounters(&stats->counters[slot]);
			pg_atomic_write_u32(&stats->requests[slot], 0);
			pg_atomic_write_u32(&stats->database[slot], database);
		}
	}
	LWLockRelease(stats->lock);

	if (slot < 0 && pg_atomic_test_set_flag(&stats->fullReported))
		ereport(LOG_SERVER_ONLY,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("idempotency cannot count the events of more databases"),
				 errdetail("It has counters for %d databases.", STATS_DATABASES),
				 errhint("Drop a database that is not needed to free its counters.")));
	return slot;
}

/*
 * MyCounters returns the counters of this backend's database, or NULL: not preloaded, no
 * database, or no slot.  Without a slot it looks again at each event, which takes
 * microseconds, so that it finds a slot that was freed.
 */
static DatabaseCounters *
MyCounters(void)
{
	if (stats == NULL || !OidIsValid(MyDatabaseId))
		return NULL;

	/* The slot can have been freed by mistake and assigned to another database */
	if (mySlot < 0 || pg_atomic_read_u32(&stats->database[mySlot]) != MyDatabaseId)
		mySlot = FindOrAssignSlot(MyDatabaseId);
	return mySlot < 0 ? NULL : &stats->counters[mySlot];
}

/*
 * RequestOfDatabase requests something for this session's database.  Without a slot, the next
 * regular visit or survey does it.  A worker on a visit requests none: it would be started
 * again, in every cycle, where it dies.
 */
void
RequestOfDatabase(RequestKind kind)
{
	bool isReaper = MyBgworkerEntry != NULL && strcmp(MyBgworkerEntry->bgw_type, REAPER_TYPE) == 0;

	if (!isReaper && MyCounters() != NULL)
		pg_atomic_fetch_or_u32(&stats->requests[mySlot], kind);
}

/*
 * TakeRequests returns the databases that have requested something since the last call.
 */
List *
TakeRequests(RequestKind kind)
{
	List *databases = NIL;

	for (int slot = 0; slot < STATS_DATABASES; slot++)
	{
		if ((pg_atomic_read_u32(&stats->requests[slot]) & kind) != 0 &&
			(pg_atomic_fetch_and_u32(&stats->requests[slot], ~(uint32) kind) & kind) != 0)
			databases = lappend_oid(databases, pg_atomic_read_u32(&stats->database[slot]));
	}
	return databases;
}

/*
 * StatsAddDatabase makes sure that this database has a slot, if one is free.
 */
void
StatsAddDatabase(void)
{
	(void) MyCounters();
}

/*
 * StatsListDatabases returns the OIDs of the databases that have a slot.  To free the
 * slots of dropped databases, call this before taking the snapshot for pg_database: a
 * database that is missing then was dropped, and is not just too new to be visible.
 */
List *
StatsListDatabases(void)
{
	List *databases = NIL;

	if (stats == NULL)
		return NIL;

	for (int slot = 0; slot < STATS_DATABASES; slot++)
	{
		Oid database = pg_atomic_read_u32(&stats->database[slot]);

		if (OidIsValid(database))
			databases = lappend_oid(databases, database);
	}
	return databases;
}

void
StatsForgetDatabase(Oid database)
{
	int slot;

	if (stats == NULL)
		return;

	LWLockAcquire(stats->lock, LW_EXCLUSIVE);
	slot = FindSlot(database);
	if (slot >= 0)
	{
		pg_atomic_write_u32(&stats->database[slot], InvalidOid);
		pg_atomic_clear_flag(&stats->fullReported);
	}
	LWLockRelease(stats->lock);
}

/* ----------------------------------------------------------------
 * Counting
 * ----------------------------------------------------------------
 */

/*
 * CountEvents counts "events" of a kind in this backend's database.  It never throws, and
 * can be called wherever an LWLock can be taken.
 */
void
CountEvents(CounterKind kind, uint64 events)
{
	DatabaseCounters *counters = events > 0 ? MyCounters() : NULL;

	if (counters != NULL)
		pg_atomic_fetch_add_u64(&counters->counter[kind], (int64) events);
}

void
Count(CounterKind kind)
{
	CountEvents(kind, 1);
}

/*
 * CountWaitTime counts the time since "began" as time waited.
 */
void
CountWaitTime(instr_time began)
{
	instr_time waited;

	INSTR_TIME_SET_CURRENT(waited);
	INSTR_TIME_SUBTRACT(waited, began);
	CountEvents(COUNT_WAIT_TIME, INSTR_TIME_GET_MICROSEC(waited));
}

/* ----------------------------------------------------------------
 * SQL
 * ----------------------------------------------------------------
 */

/* The columns of stats(): the database, the counters, the reset. */
#define STATS_COLUMNS (1 + COUNTER_KINDS + 1)

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
 * stats() RETURNS SETOF record: a row for every database that has counters, and for the
 * caller's, unless no slot is free
 */
Datum
idempotency_stats(PG_FUNCTION_ARGS)
{
	InitMaterializedSRF(fcinfo, 0);
	if (stats == NULL)
		return (Datum) 0;

	(void) MyCounters();
	for (int slot = 0; slot < STATS_DATABASES; slot++)
	{
		Oid database = pg_atomic_read_u32(&stats->database[slot]);

		if (OidIsValid(database))
			PutRow((ReturnSetInfo *) fcinfo->resultinfo, database, &stats->counters[slot]);
	}
	return (Datum) 0;
}

/*
 * count_events(kind, events): counts what delivery, in SQL, has done.
 */
Datum
idempotency_count_events(PG_FUNCTION_ARGS)
{
	static const struct
	{
		const char *name;
		CounterKind kind;
	} kinds[] = {
		{"delivered", COUNT_DELIVERED},
		{"acknowledged", COUNT_ACKNOWLEDGED},
		{"failed", COUNT_FAILED},
		{"batches_expired", COUNT_BATCHES_EXPIRED},
		{"dead_letters", COUNT_DEAD_LETTERS},
		{"redriven", COUNT_REDRIVEN},
		{"events_reaped", COUNT_EVENTS_REAPED},
		{"events_dropped", COUNT_EVENTS_DROPPED},
	};
	const char *name = text_to_cstring(PG_GETARG_TEXT_PP(0));

	for (size_t i = 0; i < lengthof(kinds); i++)
	{
		if (strcmp(kinds[i].name, name) == 0)
			CountEvents(kinds[i].kind, Max(PG_GETARG_INT64(1), 0));
	}
	PG_RETURN_VOID();
}

/*
 * stats_reset() RETURNS timestamptz: sets the counters of this database to 0; when, or NULL
 * if it has none
 */
Datum
idempotency_stats_reset(PG_FUNCTION_ARGS)
{
	DatabaseCounters *counters = MyCounters();

	if (stats == NULL)
		ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
						errmsg("library \"idempotency\" is not preloaded"),
						errdetail("Its counters are kept in shared memory."),
						errhint("Add idempotency to shared_preload_libraries, and restart the "
								"server.")));
	if (counters == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(ResetCounters(counters));
}

/* ----------------------------------------------------------------
 * Initialization
 * ----------------------------------------------------------------
 */

static void
InitializeStats(void *memory, LWLock *lock)
{
	StatsState *state = memory;

	state->lock = lock;
	pg_atomic_init_flag(&state->fullReported);
	for (int slot = 0; slot < STATS_DATABASES; slot++)
	{
		pg_atomic_init_u32(&state->database[slot], InvalidOid);
		pg_atomic_init_u32(&state->requests[slot], 0);
		pg_atomic_init_u64(&state->counters[slot].resetAt, 0);
		for (int kind = 0; kind < COUNTER_KINDS; kind++)
			pg_atomic_init_u64(&state->counters[slot].counter[kind], 0);
	}
}

/*
 * StatsInit registers the shared memory; called once per process, from _PG_init().
 */
void
StatsInit(void)
{
	SharedMemoryRegister(&(SharedPart){(void **) &stats, sizeof(StatsState), InitializeStats});
}
