/*-------------------------------------------------------------------------
 *
 * launcher/cycle.c
 *	  The cycles in which the launcher visits the databases.
 *
 * A cycle starts a worker for each database that is due, one at a time, without
 * waiting for it.  The README has the states of a cycle and of a database.
 *
 * Locks: ACCESS SHARE on pg_database, while it is read, and ROW EXCLUSIVE on a
 * database; neither is waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"

#include "base/compat.h"
#include "launcher/database.h"
#include "launcher/launcher.h"
#include "relay/relay.h"
#include "server/bgworker.h"
#include "server/shmem.h"
#include "server/stats.h"
#include "settings/guc.h"
#include "settings/timing.h"

/* After how many milliseconds the worker of a visit gets SIGTERM, and is late. */
#define VISIT_MS 4000

/* How often there is a survey of all databases, in milliseconds. */
#define SURVEY_MS 60000

/* A rare database is visited every so many cycles, and a quiet one after so many. */
#define RARE_CYCLES 10

/* After how many visits in a row that removed nothing a database is quiet. */
#define QUIET_VISITS 60

/* What the launcher knows of a database. */
typedef struct Database
{
	Oid oid;					  /* the hash key */
	bool rare;					  /* the last visit has found nothing that it could work with */
	bool refused;				  /* the last visit was, and the log says so */
	bool listed;				  /* it is in pg_database, and may be visited */
	bool due;					  /* for a visit in this cycle */
	int empty;					  /* visits in a row that removed nothing */
	uint32 cycle;				  /* of its last visit that reaped */
	uint64 visit;				  /* the number of its last visit */
	BackgroundWorkerHandle *late; /* a worker that did not end in time, or NULL */
} Database;

typedef enum CycleState
{
	CYCLE_RESTING,
	CYCLE_CHOOSING,
	CYCLE_VISITING
} CycleState;

typedef struct Cycle
{
	CycleState state;
	instr_time began; /* 0: no cycle has */
	bool reap;
	bool survey;
	instr_time reaped;	 /* when the last cycle began that reaps; 0: none has */
	instr_time surveyed; /* the same for surveys */

	uint64 visits;	   /* how many there were */
	uint64 firstVisit; /* those of this cycle have higher numbers */
	Database *visited;
	VisitJob job;
	BackgroundWorkerHandle *worker;
	instr_time since; /* when that was started */
} Cycle;

/*
 * The database that the last worker was started for, and the result of its visit; NULL
 * unless the library is preloaded.
 */
static pg_atomic_uint64 *report = NULL;

static WorkerKind reaper = {.type = REAPER_TYPE,
							.function = "idempotency_reaper_main",
							.waits = "Expired keys are removed when one is."};
static HTAB *databases = NULL;
static uint32 cycles = 0;
static Cycle cycle;

/* ----------------------------------------------------------------
 * Databases
 * ----------------------------------------------------------------
 */

/*
 * IsQuiet tells whether a database is reaped in each tenth cycle only, in the visit of a survey if
 * there is one: the connection costs more than the visit.
 */
static bool
IsQuiet(const Database *database)
{
	return database->empty >= QUIET_VISITS;
}

/*
 * ListDatabase records that a database is in pg_database, and whether it is due for a
 * visit; "requested" says that a session there has requested one.
 */
static void
ListDatabase(Oid oid, bool requested)
{
	bool found;
	Database *database = hash_search(databases, &oid, HASH_ENTER, &found);

	if (!found)
	{
		memset(database, 0, sizeof(Database));
		database->oid = oid;
	}
	database->listed = true;

	/* Spread the visits of rare databases over the cycles */
	if (database->rare)
		database->due = (cycles + oid) % RARE_CYCLES == 0;
	else
		database->due =
			!IsQuiet(database) || cycle.survey || cycles - database->cycle >= RARE_CYCLES;
	database->due = database->due || requested;
}

/*
 * ReadDatabases lists all databases that may be visited.  It removes those that exist,
 * whether they may or not, from "known", and returns the rest.
 */
static List *
ReadDatabases(List *known)
{
	List *requested = TakeRequests(REQUEST_VISIT);
	Relation table = table_open(DatabaseRelationId, AccessShareLock);
	TableScanDesc scan = table_beginscan_catalog(table, 0, NULL);
	HeapTuple tuple;

	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		known = list_delete_oid(known, form->oid);
		if (DatabaseMayBeVisited(form))
			ListDatabase(form->oid, list_member_oid(requested, form->oid));
	}
	table_endscan(scan);
	table_close(table, AccessShareLock);
	return known;
}

/*
 * HasLateWorker tells whether a worker that did not end in time is still there.
 */
static bool
HasLateWorker(Database *database)
{
	if (database->late == NULL)
		return false;
	if (!WorkerHasEnded(database->late))
		return true;
	pfree(database->late);
	database->late = NULL;
	return false;
}

/*
 * UpdateDatabases reads pg_database, and forgets the counters and the subscriptions of
 * databases that are gone.  Needs a transaction that has read nothing yet: what has
 * counters must be looked up before pg_database is.
 */
static void
UpdateDatabases(void)
{
	List *known = StatsListDatabases();
	HASH_SEQ_STATUS all;
	Database *database;
	ListCell *cell;

	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
		database->listed = database->due = false;

	foreach (cell, ReadDatabases(known))
	{
		StatsForgetDatabase(lfirst_oid(cell));
		RelayForgetDatabase(lfirst_oid(cell));
	}

	/* Remember a late worker, so that no other is started if the database is listed again */
	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
	{
		if (!database->listed && !HasLateWorker(database))
			(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
	}
}

/* ----------------------------------------------------------------
 * Visits
 * ----------------------------------------------------------------
 */

static uint64
Report(Oid database, VisitResult result)
{
	return (uint64) database << 32 | result;
}

/*
 * CycleReport tells the launcher how the visit to a database ended.  The report of a
 * late worker is lost.
 */
void
CycleReport(Oid database, VisitResult result)
{
	uint64 expected = Report(database, VISIT_FAILED);

	(void) pg_atomic_compare_exchange_u64(report, &expected, Report(database, result));
}

/*
 * StartVisit starts a worker for a database, and sets cycle.worker: NULL if there is no
 * slot for one.  Returns false if the database is locked or has a late worker.
 */
static bool
StartVisit(Database *database)
{
	bool reap = cycle.reap ||
				(IsQuiet(database) && ReaperNaptime > 0 && cycles - database->cycle >= RARE_CYCLES);

	cycle.job = (VisitJob){database->oid, reap, cycle.survey, false, database->refused};
	database->due = false;
	if (HasLateWorker(database) || !DatabaseProbe(database->oid))
		return false;

	pg_atomic_write_u64(report, Report(database->oid, VISIT_FAILED));
	cycle.worker = WorkerStart(&reaper, database->oid, &cycle.job, sizeof(cycle.job));
	cycle.visited = database;
	database->due = cycle.worker == NULL;
	if (cycle.worker != NULL)
	{
		database->visit = ++cycle.visits;
		if (reap)
			database->cycle = cycles;
	}
	INSTR_TIME_SET_CURRENT(cycle.since);
	return true;
}

/*
 * EndVisit reads the report of a worker that has ended.  A database with more to do
 * stays due.  A survey does not open the tables that a reaper was refused.
 */
static void
EndVisit(void)
{
	Database *database = cycle.visited;
	VisitResult result = (uint32) pg_atomic_read_u64(report);
	bool worked = result >= VISIT_UNFINISHED;

	pfree(cycle.worker);
	database->due = result == VISIT_UNFINISHED;
	if (worked && !cycle.job.reap && database->refused)
		return;
	if (result == VISIT_EMPTY)
		database->empty++;
	else if (cycle.job.reap)
		database->empty = 0;
	database->refused = result == VISIT_REFUSED;
	database->rare = !worked;
}

/* ----------------------------------------------------------------
 * The cycle
 * ----------------------------------------------------------------
 */

/*
 * TimeLeft returns the milliseconds until the next cycle of a kind: 0 if it is due, -1 for
 * never.  Such cycles begin every "interval" milliseconds (0: never), and the last one did
 * when it "began", if there was one.
 */
static long
TimeLeft(int interval, instr_time began)
{
	long left = INSTR_TIME_IS_ZERO(began) ? 0 : interval - MillisecondsSince(began);

	return interval == 0 ? -1 : Max(left, 0);
}

/*
 * BeginCycle begins a cycle if it is time to, and returns in how many milliseconds it
 * will be, or 0; -1: never.  The first cycle surveys only, which is quick, and the
 * subscriptions that it finds wait for it.  There is no cycle while pg_database is locked.
 */
static long
BeginCycle(void)
{
	long reapLeft = TimeLeft(ReaperNaptime, cycle.reaped);
	long surveyLeft = TimeLeft(RelayWorkers > 0 ? SURVEY_MS : 0, cycle.surveyed);

	if (reapLeft != 0 && surveyLeft != 0)
		return WorkerSooner(reapLeft, surveyLeft);

	/* Begin */
	cycles++;
	cycle.survey = surveyLeft == 0;
	cycle.reap = reapLeft == 0 && (!INSTR_TIME_IS_ZERO(cycle.began) || !cycle.survey);
	INSTR_TIME_SET_CURRENT(cycle.began);
	if (cycle.reap)
		cycle.reaped = cycle.began;
	if (cycle.survey)
		cycle.surveyed = cycle.began;
	cycle.firstVisit = cycle.visits;

	/* Read the databases */
	StartTransactionCommand();
	if (ConditionalLockRelationOid(DatabaseRelationId, AccessShareLock))
	{
		UpdateDatabases();
		cycle.state = CYCLE_CHOOSING;
	}
	CommitTransactionCommand();
	return 0;
}

/*
 * NextDue returns the due database whose last visit is the longest ago, or NULL.
 */
static Database *
NextDue(void)
{
	Database *next = NULL;
	HASH_SEQ_STATUS all;
	Database *database;

	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
	{
		if (database->due && (next == NULL || database->visit < next->visit))
			next = database;
	}
	return next;
}

/*
 * StartNextVisit starts the next visit.  Databases with more to do are visited again until
 * the next cycle must begin.  Returns false if the cycle has ended, and otherwise as
 * StartVisit().
 */
static bool
StartNextVisit(void)
{
	Database *database;

	while ((database = NextDue()) != NULL)
	{
		bool again = database->visit > cycle.firstVisit;

		if ((cycle.reap && ReaperNaptime == 0) ||
			(again && (!cycle.reap || MillisecondsSince(cycle.began) >= ReaperNaptime)))
			return false;
		if (StartVisit(database))
			return true;
	}
	return false;
}

/*
 * CycleRun makes all transitions that are possible now.  Returns in how many milliseconds
 * it must be called again, unless a worker ends before; -1: never.
 */
long
CycleRun(void)
{
	for (;;)
	{
		bool chosen;
		long left;

		switch (cycle.state)
		{
			case CYCLE_RESTING:
				left = BeginCycle();
				if (left != 0)
					return left;
				break;

			case CYCLE_CHOOSING:
				chosen = StartNextVisit();
				if (chosen && cycle.worker == NULL)
					return SLOT_MS;
				cycle.state = chosen ? CYCLE_VISITING : CYCLE_RESTING;
				break;

			case CYCLE_VISITING:
				left = VISIT_MS - MillisecondsSince(cycle.since);
				if (WorkerHasEnded(cycle.worker))
					EndVisit();
				else if (left > 0)
					return left;
				else
				{
					TerminateBackgroundWorker(cycle.worker);
					cycle.visited->late = cycle.worker;
				}
				cycle.state = CYCLE_CHOOSING;
				break;
		}
	}
}

/* ----------------------------------------------------------------
 * Initialization
 * ----------------------------------------------------------------
 */

/*
 * CycleInit prepares for the first cycle; called once, by the launcher.
 */
void
CycleInit(void)
{
	HASHCTL control = {.keysize = sizeof(Oid), .entrysize = sizeof(Database)};

	databases = hash_create("idempotency databases", 64, &control, HASH_ELEM | HASH_BLOBS);
}

static void
InitializeReport(void *memory, LWLock *lock)
{
	pg_atomic_init_u64(memory, 0);
}

/*
 * CycleShmemInit requests the shared memory; called from _PG_init().
 */
void
CycleShmemInit(void)
{
	SharedMemoryRegister(
		&(SharedPart){(void **) &report, sizeof(pg_atomic_uint64), InitializeReport});
}
