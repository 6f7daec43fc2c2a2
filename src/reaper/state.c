/*-------------------------------------------------------------------------
 *
 * reaper/state.c
 *	  The table idempotency.reaper: where the reaper continues in the table of keys,
 *	  and what it has done so far.
 *
 * Blocks mean nothing in another table or another cluster, so a row has its origin: the
 * system identifier and the OID of the key table.  A row that was restored or replicated
 * is another cluster's: it is not read, and does not collide with this one's.  There is no row
 * before there is something to write.
 *
 * The table is written by SQL, as its owner (query/query.c): a role that can call
 * reap() has no right to it.
 *
 * Locks: one reaper at a time works in a database.  Its lock is an advisory one of a
 * class of its own, to the end of the transaction; so no session waits for the row.  ROW
 * EXCLUSIVE on the table, as long.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/timestamp.h"

#include "base/errors.h"
#include "query/query.h"
#include "query/relation.h"
#include "reaper/reaper.h"

/* "IR" in ASCII. */
#define REAPER_LOCK_CLASS 0x4952

static ExtensionQuery loadQuery = {
	.table = "reaper",
	.text =
		"SELECT expiry_block, scan_block, scan_started_at, last_scan_duration FROM idempotency.reaper"
		" WHERE system_identifier OPERATOR(pg_catalog.=) $1"
		" AND relation OPERATOR(pg_catalog.=) $2",
	.parameters = 2,
	.types = {INT8OID, OIDOID},
	.results = {INT8OID, INT8OID, TIMESTAMPTZOID, INTERVALOID},
};

static ExtensionQuery saveQuery = {
	.table = "reaper",
	.text =
		"INSERT INTO idempotency.reaper AS r (system_identifier, relation, expiry_block, scan_block,"
		" scan_started_at, last_scan_duration, rows_reaped, zombies_reaped, last_reaped_rows, last_reaped_at)"
		" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
		" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
		" expiry_block = excluded.expiry_block, scan_block = excluded.scan_block,"
		" scan_started_at = excluded.scan_started_at, last_scan_duration = excluded.last_scan_duration,"
		" rows_reaped = r.rows_reaped OPERATOR(pg_catalog.+) excluded.rows_reaped,"
		" zombies_reaped = r.zombies_reaped OPERATOR(pg_catalog.+) excluded.zombies_reaped,"
		" last_reaped_rows = coalesce(excluded.last_reaped_rows, r.last_reaped_rows),"
		" last_reaped_at = coalesce(excluded.last_reaped_at, r.last_reaped_at)",
	.parameters = 10,
	.types = {INT8OID, OIDOID, INT8OID, INT8OID, TIMESTAMPTZOID, INTERVALOID, INT8OID, INT8OID,
			  INT8OID, TIMESTAMPTZOID},
};

/*
 * ReaperLock makes this transaction the only reaper of its database.  Waits for another
 * one, unless dontWait; returns false then.  Throws 55000 if the table is missing.
 */
bool
ReaperLock(bool dontWait)
{
	Oid relid = ExtensionRelationOid("reaper");
	LOCKTAG tag;

	if (!OidIsValid(relid))
		ErrorStoreAltered("reaper", "It is missing.", "Use ALTER EXTENSION idempotency UPDATE.");
	if (!dontWait)
		LockRelationOid(relid, RowExclusiveLock);
	else if (!ConditionalLockRelationOid(relid, RowExclusiveLock))
		return false;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, 0, REAPER_LOCK_CLASS);
	return LockAcquire(&tag, ExclusiveLock, false, dontWait) != LOCKACQUIRE_NOT_AVAIL;
}

static int64
ResultInt64(int column)
{
	return DatumGetInt64(ExtensionQueryValue(&loadQuery, 0, column, NULL));
}

static BlockNumber
ResultBlock(int column)
{
	int64 block = ResultInt64(column);

	return block >= 0 && block <= MaxBlockNumber ? (BlockNumber) block : 0;
}

/*
 * ReaperStateLoad fills "state" from the table; with zeros if there is no row yet.  The
 * caller holds the reaper's lock.
 */
void
ReaperStateLoad(Oid keyTable, ReaperState *state)
{
	Datum values[] = {Int64GetDatum((int64) GetSystemIdentifier()), ObjectIdGetDatum(keyTable)};

	memset(state, 0, sizeof(ReaperState));
	if (ExtensionQueryRun(&loadQuery, values, NULL) > 0)
	{
		bool isnull;
		Datum lastScan = ExtensionQueryValue(&loadQuery, 0, 4, &isnull);

		state->expiryBlock = ResultBlock(1);
		state->scanBlock = ResultBlock(2);
		state->scanStartedAt = ResultInt64(3);
		state->lastScan = isnull ? 0 : DatumGetIntervalP(lastScan)->time;
	}
	ExtensionQueryEnd();
}

/*
 * ReaperStateSave writes the state, and adds up what was removed.  The caller holds the
 * reaper's lock.  Throws 40001 in REPEATABLE READ and above if another reaper has written
 * after the snapshot.
 */
void
ReaperStateSave(Oid keyTable, const ReaperState *state, const ReapedRows *reaped)
{
	Datum values[10];
	bool isnull[10] = {false};
	Interval lastScan = {.time = state->lastScan};

	values[0] = Int64GetDatum((int64) GetSystemIdentifier());
	values[1] = ObjectIdGetDatum(keyTable);
	values[2] = Int64GetDatum(state->expiryBlock);
	values[3] = Int64GetDatum(state->scanBlock);
	values[4] = TimestampTzGetDatum(state->scanStartedAt);
	values[5] = IntervalPGetDatum(&lastScan);
	values[6] = Int64GetDatum(reaped->rows);
	values[7] = Int64GetDatum(reaped->zombies);
	values[8] = Int64GetDatum(reaped->rowsOfRun);
	values[9] = TimestampTzGetDatum(GetCurrentTimestamp());
	if (state->lastScan == 0)
		isnull[5] = true;
	if (reaped->rows == 0)
		isnull[8] = isnull[9] = true;
	(void) ExtensionQueryDo(&saveQuery, values, isnull);
}
