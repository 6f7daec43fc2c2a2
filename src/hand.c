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
 * way, and as its owner: whoever may call reap() has no right to it.  Whatever
 * others have added to it (triggers, say) runs as a security-restricted
 * operation.
 *
 * Locks: one reaper at a time works in a database.  Its lock is an advisory one
 * of a class of its own, held until the transaction ends; so nobody waits for
 * the row.  ROW EXCLUSIVE on the table, as long.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xlog.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "errors.h"
#include "hand.h"

/* Beside that of the keys; "IR" in ASCII. */
#define REAPER_LOCK_CLASS 0x4952

static const char *const loadQuery =
	"SELECT hand_block, round_block, round_started_at, last_round FROM idempotency.reaper"
	" WHERE system_identifier OPERATOR(pg_catalog.=) $1 AND relation OPERATOR(pg_catalog.=) $2";

static const char *const saveQuery =
	"INSERT INTO idempotency.reaper AS r (system_identifier, relation, hand_block, round_block,"
	" round_started_at, last_round, rows_reaped, zombies_reaped, last_reaped_rows, last_reaped_at)"
	" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
	" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
	" hand_block = excluded.hand_block, round_block = excluded.round_block,"
	" round_started_at = excluded.round_started_at, last_round = excluded.last_round,"
	" rows_reaped = r.rows_reaped OPERATOR(pg_catalog.+) excluded.rows_reaped,"
	" zombies_reaped = r.zombies_reaped OPERATOR(pg_catalog.+) excluded.zombies_reaped,"
	" last_reaped_rows = coalesce(excluded.last_reaped_rows, r.last_reaped_rows),"
	" last_reaped_at = coalesce(excluded.last_reaped_at, r.last_reaped_at)";

#define LOAD_PARAMETERS 2
#define SAVE_PARAMETERS 10

/* The two queries, planned once a session. */
static SPIPlanPtr loadPlan = NULL;
static SPIPlanPtr savePlan = NULL;

/*
 * HandTable returns the OID of the table.  Throws 55000 if there is none.
 */
static Oid
HandTable(void)
{
	Oid schema = get_namespace_oid("idempotency", true);
	Oid relid = OidIsValid(schema) ? get_relname_relid("reaper", schema) : InvalidOid;

	if (!OidIsValid(relid))
		ErrorStoreAltered("reaper", "It is missing.", "Use ALTER EXTENSION idempotency UPDATE.");
	return relid;
}

/*
 * HandLock makes us the only reaper of this database until the transaction
 * ends.  Waits for another, unless dontWait; returns false then.  Throws 55000
 * if the table is missing.
 */
bool
HandLock(bool dontWait)
{
	Oid relid = HandTable();
	LOCKTAG tag;

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

/*
 * PlanOf returns the plan of a query, which it makes once a session.
 */
static SPIPlanPtr
PlanOf(const char *query, SPIPlanPtr *plan, int parameters, Oid *types)
{
	if (*plan == NULL)
	{
		SPIPlanPtr made = SPI_prepare(query, parameters, types);

		if (made == NULL || SPI_keepplan(made) != 0)
			ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
							errmsg_internal("could not plan \"%s\": %s", query,
											SPI_result_code_string(SPI_result))));
		*plan = made;
	}
	return *plan;
}

/*
 * Execute runs a query as the table's owner, under a pinned search path, and leaves its
 * result to SPI.
 * The caller calls SPI_finish().
 */
static void
Execute(const char *query, SPIPlanPtr *plan, int parameters, Oid *types, Datum *values,
		const char *nulls)
{
	Relation table = table_open(HandTable(), RowExclusiveLock);
	Oid caller;
	int context;
	int result;
	int nest = NewGUCNestLevel();

	(void) set_config_option("search_path", "pg_catalog, pg_temp", PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	GetUserIdAndSecContext(&caller, &context);
	SetUserIdAndSecContext(table->rd_rel->relowner, context | SECURITY_LOCAL_USERID_CHANGE |
														SECURITY_RESTRICTED_OPERATION |
														SECURITY_NOFORCE_RLS);
	SPI_connect();
	result = SPI_execute_plan(PlanOf(query, plan, parameters, types), values, nulls, false, 0);
	if (result < 0)
		ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR),
						errmsg_internal("could not execute \"%s\": %s", query,
										SPI_result_code_string(result))));
	SetUserIdAndSecContext(caller, context);
	AtEOXact_GUC(false, nest);
	table_close(table, NoLock);
}

static int64
ResultInt64(int column)
{
	bool isnull;

	return DatumGetInt64(
		SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, column, &isnull));
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
	Oid types[LOAD_PARAMETERS] = {INT8OID, OIDOID};
	Datum values[LOAD_PARAMETERS];

	memset(hand, 0, sizeof(Hand));
	values[0] = Int64GetDatum((int64) GetSystemIdentifier());
	values[1] = ObjectIdGetDatum(keyTable);
	Execute(loadQuery, &loadPlan, LOAD_PARAMETERS, types, values, NULL);
	if (SPI_processed > 0)
	{
		bool isnull;
		Datum lastRound = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 4, &isnull);

		hand->hand = ResultBlock(1);
		hand->round = ResultBlock(2);
		hand->roundBegan = ResultInt64(3);
		hand->lastRound = isnull ? 0 : DatumGetIntervalP(lastRound)->time;
	}
	SPI_finish();
}

/*
 * HandSave writes down where the hand stands, and adds up what was removed.
 * The caller holds the reaper's lock.  Throws 40001 in REPEATABLE READ and
 * above if another reaper has come after the snapshot.
 */
void
HandSave(Oid keyTable, const Hand *hand, const Harvest *harvest)
{
	Oid types[SAVE_PARAMETERS] = {INT8OID,	   OIDOID,	INT8OID, INT8OID, TIMESTAMPTZOID,
								  INTERVALOID, INT8OID, INT8OID, INT8OID, TIMESTAMPTZOID};
	Datum values[SAVE_PARAMETERS];
	char nulls[SAVE_PARAMETERS + 1] = "          ";
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
		nulls[5] = 'n';
	if (harvest->rows == 0)
		nulls[8] = nulls[9] = 'n';
	Execute(saveQuery, &savePlan, SAVE_PARAMETERS, types, values, nulls);
	SPI_finish();
}
