/*-------------------------------------------------------------------------
 *
 * hand.c
 *	  The table idempotency.reaper: where the reaper stands in the heap, and
 *	  what it has done so far, for itself and for humans.
 *
 * Blocks mean nothing in another table or another cluster, so a row bears its
 * origin: the system identifier and the OID of the key table.  A row that came
 * by a restore, or by logical replication of all tables, is another's row; we
 * neither read it nor collide with it.  There is no row before something was
 * worth writing down.
 *
 * Unlike the key table this one is written by SQL, since it is not in anybody's
 * way, and as its owner (ownerquery.c): whoever may call reap() has no right to it.
 *
 * Locks: one reaper at a time works in a database.  Its lock is an advisory one
 * of a class of its own, held until the transaction ends; so nobody waits for
 * the row.  ROW EXCLUSIVE on the table, as long.
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

#include "errors.h"
#include "hand.h"
#include "ownerquery.h"
#include "owntable.h"

/* Beside that of the keys; "IR" in ASCII. */
#define REAPER_LOCK_CLASS 0x4952

static OwnerQuery loadQuery = {
	.table = "reaper",
	.text = "SELECT hand_block, round_block, round_started_at, last_round FROM idempotency.reaper"
			" WHERE system_identifier OPERATOR(pg_catalog.=) $1"
			" AND relation OPERATOR(pg_catalog.=) $2",
	.parameters = 2,
	.types = {INT8OID, OIDOID},
	.results = {INT8OID, INT8OID, TIMESTAMPTZOID, INTERVALOID},
};

static OwnerQuery saveQuery = {
	.table = "reaper",
	.text =
		"INSERT INTO idempotency.reaper AS r (system_identifier, relation, hand_block, round_block,"
		" round_started_at, last_round, rows_reaped, zombies_reaped, last_reaped_rows, last_reaped_at)"
		" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
		" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
		" hand_block = excluded.hand_block, round_block = excluded.round_block,"
		" round_started_at = excluded.round_started_at, last_round = excluded.last_round,"
		" rows_reaped = r.rows_reaped OPERATOR(pg_catalog.+) excluded.rows_reaped,"
		" zombies_reaped = r.zombies_reaped OPERATOR(pg_catalog.+) excluded.zombies_reaped,"
		" last_reaped_rows = coalesce(excluded.last_reaped_rows, r.last_reaped_rows),"
		" last_reaped_at = coalesce(excluded.last_reaped_at, r.last_reaped_at)",
	.parameters = 10,
	.types = {INT8OID, OIDOID, INT8OID, INT8OID, TIMESTAMPTZOID, INTERVALOID, INT8OID, INT8OID,
			  INT8OID, TIMESTAMPTZOID},
};

/*
 * HandLock makes us the only reaper of this database until the transaction
 * ends.  Waits for another, unless dontWait; returns false then.  Throws 55000
 * if the table is missing.
 */
bool
HandLock(bool dontWait)
{
	Oid relid = OwnRelationByName("reaper");
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

/* ----------------------------------------------------------------
 * The row
 * ----------------------------------------------------------------
 */

static int64
ResultInt64(int column)
{
	return DatumGetInt64(OwnerQueryValue(&loadQuery, 0, column, NULL));
}

static BlockNumber
ResultBlock(int column)
{
	int64 block = ResultInt64(column);

	return block >= 0 && block <= MaxBlockNumber ? (BlockNumber) block : 0;
}

/*
 * HandLoad fills "hand" from the table, or for a first round if there is no
 * row yet.  The caller holds the reaper's lock.
 */
void
HandLoad(Oid keyTable, Hand *hand)
{
	Datum values[] = {Int64GetDatum((int64) GetSystemIdentifier()), ObjectIdGetDatum(keyTable)};

	memset(hand, 0, sizeof(Hand));
	if (OwnerQueryRun(&loadQuery, values, NULL) > 0)
	{
		bool isnull;
		Datum lastRound = OwnerQueryValue(&loadQuery, 0, 4, &isnull);

		hand->hand = ResultBlock(1);
		hand->round = ResultBlock(2);
		hand->roundBegan = ResultInt64(3);
		hand->lastRound = isnull ? 0 : DatumGetIntervalP(lastRound)->time;
	}
	OwnerQueryEnd();
}

/*
 * HandSave writes down where the hand stands, and adds up what was removed.
 * The caller holds the reaper's lock.  Throws 40001 in REPEATABLE READ and
 * above if another reaper has come after the snapshot.
 */
void
HandSave(Oid keyTable, const Hand *hand, const Harvest *harvest)
{
	Datum values[10];
	bool isnull[10] = {false};
	Interval lastRound = {.time = hand->lastRound};

	values[0] = Int64GetDatum((int64) GetSystemIdentifier());
	values[1] = ObjectIdGetDatum(keyTable);
	values[2] = Int64GetDatum(hand->hand);
	values[3] = Int64GetDatum(hand->round);
	values[4] = TimestampTzGetDatum(hand->roundBegan);
	values[5] = IntervalPGetDatum(&lastRound);
	values[6] = Int64GetDatum(harvest->rows);
	values[7] = Int64GetDatum(harvest->zombies);
	values[8] = Int64GetDatum(harvest->rowsOfRun);
	values[9] = TimestampTzGetDatum(GetCurrentTimestamp());
	if (hand->lastRound == 0)
		isnull[5] = true;
	if (harvest->rows == 0)
		isnull[8] = isnull[9] = true;
	(void) OwnerQueryDo(&saveQuery, values, isnull);
}
