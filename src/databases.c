/*-------------------------------------------------------------------------
 *
 * databases.c
 *	  Which databases there are, and what the launcher knows of each.
 *
 * All of it is in the launcher's own memory.
 *
 * Locks: ACCESS SHARE on pg_database, while it is read; not waited for.
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
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/syscache.h"
#include "utils/varlena.h"

#include "compat.h"
#include "databases.h"
#include "guc.h"
#include "launcher.h"
#include "relayregistry.h"
#include "stats.h"

/* Databases in which there is nothing to do are visited every so many tours. */
#define SELDOM_TOURS 10

static HTAB *databases = NULL;
static uint32 tours = 0;

/*
 * WantedNames returns the names in idempotency.databases, or NIL for all.
 */
static List *
WantedNames(void)
{
	List *names;

	if (!SplitIdentifierString(pstrdup(ReaperDatabases), ',', &names))
		return NIL; /* the check hook has seen to that */
	return names;
}

/*
 * MayVisit tells whether a database is one that workers are sent to.
 */
static bool
MayVisit(Form_pg_database form, const List *wanted)
{
	ListCell *cell;

	if (form->datistemplate || !form->datallowconn || form->datconnlimit == DATCONNLIMIT_INVALID_DB)
		return false;

	foreach (cell, wanted)
	{
		if (strcmp(lfirst(cell), NameStr(form->datname)) == 0)
			return true;
	}
	return wanted == NIL;
}

/*
 * DatabaseIsWanted tells whether workers are sent to a database.  Needs a
 * transaction.
 */
bool
DatabaseIsWanted(Oid database)
{
	HeapTuple tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
	bool wanted =
		HeapTupleIsValid(tuple) && MayVisit((Form_pg_database) GETSTRUCT(tuple), WantedNames());

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	return wanted;
}

/*
 * DatabaseIsOpen tells whether a worker could connect to the database: it is
 * still there, and nobody is just dropping or copying it.  Needs a transaction,
 * which keeps the lock.
 */
bool
DatabaseIsOpen(Oid database)
{
	LOCKTAG tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
	return LockAcquire(&tag, RowExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL &&
		   SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(database));
}

/*
 * NoteDatabase notes that a database is in pg_database, and whether it is due
 * for a visit; "called" says that a session there has asked for one.
 */
static void
NoteDatabase(Oid oid, bool called)
{
	bool found;
	Database *database = hash_search(databases, &oid, HASH_ENTER, &found);

	if (!found)
	{
		memset(database, 0, sizeof(Database));
		database->oid = oid;
	}
	database->listed = true;

	/* Those to be visited seldom are not all visited in the same tour. */
	database->due =
		database->state != DATABASE_SELDOM || called || (tours + oid) % SELDOM_TOURS == 0;
}

/*
 * ReadDatabases notes all databases that may be visited.  It takes those that
 * are there, whether they may or not, off the list "counted", and returns the
 * rest.
 */
static List *
ReadDatabases(List *counted)
{
	List *called = LauncherTakeCalls();
	List *wanted = WantedNames();
	Relation table = table_open(DatabaseRelationId, AccessShareLock);
	TableScanDesc scan = table_beginscan_catalog(table, 0, NULL);
	HeapTuple tuple;

	while ((tuple = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Form_pg_database form = (Form_pg_database) GETSTRUCT(tuple);

		counted = list_delete_oid(counted, form->oid);
		if (MayVisit(form, wanted))
			NoteDatabase(form->oid, list_member_oid(called, form->oid));
	}
	table_endscan(scan);
	table_close(table, AccessShareLock);
	return counted;
}

/*
 * ForgetUnlisted forgets a database that is not to be visited any more.  A
 * worker that did not end in time is remembered until it has, so that nobody
 * else is sent if the database comes back meanwhile.
 */
static void
ForgetUnlisted(Database *database)
{
	pid_t pid;

	if (database->late != NULL)
	{
		if (GetBackgroundWorkerPid(database->late, &pid) != BGWH_STOPPED)
			return;
		pfree(database->late);
	}
	(void) hash_search(databases, &database->oid, HASH_REMOVE, NULL);
}

/*
 * UpdateDatabases brings what we know up to date, and forgets the counters and
 * the subscriptions of databases that are gone.  Needs a transaction that has read nothing yet:
 * what has counters must be looked up before pg_database is.
 */
static void
UpdateDatabases(void)
{
	List *counted = list_concat_unique_oid(StatsListDatabases(), RegistryDatabases());
	HASH_SEQ_STATUS all;
	Database *database;
	ListCell *cell;

	tours++;
	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
		database->listed = database->due = false;

	foreach (cell, ReadDatabases(counted))
	{
		StatsForgetDatabase(lfirst_oid(cell));
		RegistryForgetDatabase(lfirst_oid(cell));
	}

	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
	{
		if (!database->listed)
			ForgetUnlisted(database);
	}
}

/*
 * DatabasesDue returns the databases that are due for a visit, in the current
 * memory context: pointers that live until the next call.  Nothing is due
 * while pg_database is locked.
 */
List *
DatabasesDue(void)
{
	MemoryContext caller = CurrentMemoryContext;
	HASH_SEQ_STATUS all;
	Database *database;
	List *due = NIL;
	bool free;

	StartTransactionCommand();
	free = ConditionalLockRelationOid(DatabaseRelationId, AccessShareLock);
	if (free)
		UpdateDatabases();
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);
	if (!free)
		return NIL;

	hash_seq_init(&all, databases);
	while ((database = hash_seq_search(&all)) != NULL)
	{
		if (database->due)
			due = lappend(due, database);
	}
	return due;
}

/*
 * DatabasesInit prepares to know databases; called once by the launcher.
 */
void
DatabasesInit(void)
{
	HASHCTL control = {.keysize = sizeof(Oid), .entrysize = sizeof(Database)};

	databases = hash_create("idempotency databases", 64, &control, HASH_ELEM | HASH_BLOBS);
}
