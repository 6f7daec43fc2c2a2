/*-------------------------------------------------------------------------
 *
 * launcher/database.c
 *	  Whether background workers can be started for a database.
 *
 * Locks: ROW EXCLUSIVE on the database, which is not waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "storage/lock.h"
#include "utils/syscache.h"
#include "utils/varlena.h"

#include "base/compat.h"
#include "launcher/database.h"
#include "settings/guc.h"

/*
 * DatabaseMayBeVisited tells whether workers are started for a database: one that
 * idempotency.databases names, or any if that is empty.
 */
bool
DatabaseMayBeVisited(Form_pg_database form)
{
	List *wanted;
	ListCell *cell;

	if (form->datistemplate || !form->datallowconn || form->datconnlimit == DATCONNLIMIT_INVALID_DB)
		return false;

	/* the check hook has refused a value that is no list */
	(void) SplitIdentifierString(pstrdup(ReaperDatabases), ',', &wanted);
	foreach (cell, wanted)
	{
		if (strcmp(lfirst(cell), NameStr(form->datname)) == 0)
			return true;
	}
	return wanted == NIL;
}

/*
 * DatabaseIsWanted does the same by OID; false if it does not exist.  Needs a transaction.
 */
static bool
DatabaseIsWanted(Oid database)
{
	HeapTuple tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
	bool wanted =
		HeapTupleIsValid(tuple) && DatabaseMayBeVisited((Form_pg_database) GETSTRUCT(tuple));

	if (HeapTupleIsValid(tuple))
		ReleaseSysCache(tuple);
	return wanted;
}

/*
 * DatabaseProbe tells whether a worker may be started for a database, and could connect: it
 * exists, and no session drops or copies it, or waits to.
 */
bool
DatabaseProbe(Oid database)
{
	MemoryContext caller = CurrentMemoryContext;
	LOCKTAG tag;
	bool open;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
	StartTransactionCommand();
	open = LockAcquire(&tag, RowExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL &&
		   DatabaseIsWanted(database);
	CommitTransactionCommand();
	MemoryContextSwitchTo(caller);
	return open;
}
