/*-------------------------------------------------------------------------
 *
 * reaper/events.c
 *	  Calling reap_events() (delivery/operate.sql), which deletes events that every
 *	  subscription has passed, and dead letters after their retention, and moves
 *	  subscriptions that lag too far behind.
 *
 * Locks, to the end of the transaction: the tables, the sequence and the reaper's
 * (reaper/state.c); those of reap_events().
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "storage/bufmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "query/query.h"
#include "query/relation.h"
#include "reaper/reaper.h"
#include "server/stats.h"
#include "settings/guc.h"

/* How many rows a batch deletes. */
#define BATCH_EVENTS 1000

static ExtensionQuery reapQuery = {
	.table = "outbox",
	.text = "SELECT idempotency_internal.reap_events($1, $2)",
	.parameters = 2,
	.types = {INT8OID, INTERVALOID},
	.results = {INT8OID},
};

static ExtensionQuery saveQuery = {
	.table = "reaper",
	.text = "INSERT INTO idempotency.reaper AS r (system_identifier, relation, events_reaped,"
			" rows_reaped, zombies_reaped, expiry_block, scan_block, scan_started_at)"
			" VALUES ($1, $2, $3, 0, 0, 0, 0, pg_catalog.clock_timestamp())"
			" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
			" events_reaped = r.events_reaped OPERATOR(pg_catalog.+) excluded.events_reaped",
	.parameters = 3,
	.types = {INT8OID, OIDOID, INT8OID},
};

/*
 * LockTables makes this transaction the reaper, and locks what reap_events() uses, to the
 * end of the transaction.  With dontWait it returns false if that is not possible at once.
 * Throws 55000 if the reaper's table is missing.
 */
static bool
LockTables(bool dontWait)
{
	return ExtensionRelationLock("outbox", RowExclusiveLock, dontWait) &&
		   ExtensionRelationLock("outbox_seq", RowExclusiveLock, dontWait) &&
		   ExtensionRelationLock("position", RowExclusiveLock, dontWait) &&
		   ExtensionRelationLock("partition", RowShareLock, dontWait) &&
		   ExtensionRelationLock("subscription", AccessShareLock, dontWait) &&
		   ExtensionRelationLock("parked", RowExclusiveLock, dontWait) && ReaperLock(dontWait);
}

/*
 * IsEmpty returns whether a table has no pages: it has had no row, or a vacuum has removed
 * the pages.  False if there is no such table, as in an older version of the extension.  The
 * caller has locked the table.
 */
static bool
IsEmpty(const char *name)
{
	Oid relid = ExtensionRelationOid(name);
	Relation table;
	bool empty;

	if (!OidIsValid(relid))
		return false;
	table = relation_open(relid, NoLock);
	empty = table->rd_rel->relkind == RELKIND_RELATION && RelationGetNumberOfBlocks(table) == 0;
	relation_close(table, NoLock);
	return empty;
}

/*
 * OutboxReapBatch deletes events, "maxRows" at most and no more than one batch, and adds
 * their number to "reaped".  The setting of the library decides which: SQL cannot tell that
 * a value was denied.  A visit of a database without events costs no planning: it begins in a
 * new process, whose first call of reap_events() would take most of the visit's time.  With
 * dontWait it waits for no table and no other reaper. Returns whether there can be more.  Throws
 * 55000 where the extension is not installed or a table was altered.
 */
RunState
OutboxReapBatch(bool dontWait, int64 maxRows, int64 *reaped)
{
	int64 most = Min(maxRows, BATCH_EVENTS);
	Interval retention = {.time = SettingNumber(&OutboxRetentionSetting, NULL) * USECS_PER_SEC};
	Datum parameters[2] = {Int64GetDatum(most), IntervalPGetDatum(&retention)};
	int64 deleted;

	if (maxRows <= 0 || IsolationUsesXactSnapshot())
		return RUN_ENDED;
	if (!LockTables(dontWait))
		return RUN_BUSY;
	if (IsEmpty("outbox") && IsEmpty("parked"))
		return RUN_ENDED;

	(void) ExtensionQueryRun(&reapQuery, parameters, NULL);
	deleted = DatumGetInt64(ExtensionQueryValue(&reapQuery, 0, 1, NULL));
	ExtensionQueryEnd();
	if (deleted > 0)
	{
		Datum row[3] = {Int64GetDatum((int64) GetSystemIdentifier()),
						ObjectIdGetDatum(ExtensionRelationOid("key")), Int64GetDatum(deleted)};

		(void) ExtensionQueryDo(&saveQuery, row, NULL);
	}
	CountEvents(COUNT_EVENTS_REAPED, deleted);
	*reaped += deleted;
	return deleted >= most ? RUN_GOES_ON : RUN_ENDED;
}
