/*-------------------------------------------------------------------------
 *
 * outboxreap.c
 *	  Removing events that everybody has had.
 *
 * An event may go when it is older than idempotency.outbox_retention, and no
 * subscription needs it any more: each one's position, as it is committed, is
 * behind it, and behind all below that was in flight and may still be delivered.
 * Where there is no subscription, only the age counts.  Events go from the lowest number
 * on, and a run ends at the first that has to stay.  So there is a number up to
 * which none is left; it is written down, and the next run begins behind it,
 * however many dead entries VACUUM has not yet taken out of the index.
 *
 * Why no reader misses an event:
 *
 * - A fetch() reads behind the position that is committed, and only its own
 *	 transaction, which has the subscription's lock, moves that.  A batch that is out
 *	 is kept by its start, until the acknowledgement has committed.  What we read of
 *	 a position may be old, but a position only goes forward, so that an old one
 *	 keeps more.  Hence no snapshot of a reader, however old, is asked for an event
 *	 that we remove.
 *
 * - A position that a transaction is just making is not to be seen, though it may
 *	 count on what is there.  So subscribe() holds us off, to the end of its
 *	 transaction, before it looks where to begin; and it waits for a batch of ours
 *	 that is under way.  What has gone by then it misses, if it wanted to start at the
 *	 beginning, and nothing behind that.
 *
 * - A snapshot of REPEATABLE READ would not show a position that was made after
 *	 it.  So there reap() leaves events alone.
 *
 * - A restore brings the events before the positions, and the state of the sequence
 *	 last.  So an event whose number the sequence has not given out stays; and where
 *	 there seems to be no subscription, nobody may be inserting one.  Once it is
 *	 there, a position of another cluster counts as any other: its numbers mean the
 *	 same here.
 *
 * - An event that is not committed stays, and so does all behind it.  Where there
 *	 are positions, it is known of each hole below them whether a row may yet be
 *	 inserted into it (outboxneed.c).  Where there are none, we look who is publishing,
 *	 after we have read the sequence's last number: if nobody is, no hole up to there is
 *	 filled any more.
 *
 * The clock may go back.  An event is young if it was published less than the
 * retention before or after now, so that none from far in the future blocks the
 * way.
 *
 * Locks, to the end of the transaction: the reaper's (hand.c), so that there is one
 * at a time; an advisory one of a class of its own, exclusive, which subscribe()
 * takes shared, and which we take only if it is free; ROW EXCLUSIVE on the table.
 * No event's row is waited for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "guc.h"
#include "hand.h"
#include "lockwait.h"
#include "outboxerrors.h"
#include "outboxhorizon.h"
#include "outboxneed.h"
#include "outboxreap.h"
#include "outboxtable.h"
#include "ownerquery.h"
#include "owntable.h"
#include "stats.h"

/* Beside that of the keys; "IE" in ASCII. */
#define EVENTS_LOCK_CLASS 0x4945

/* A batch removes, and reads, so many at most. */
#define BATCH_EVENTS 1000
#define BATCH_ENTRIES 10000

/* So many dead entries that a run has passed are worth writing down. */
#define NOTED_ENTRIES 1000

/* One batch. */
typedef struct Reaping
{
	Relation table;
	Snapshot snapshot;
	TimestampTz now;
	OutboxNeed need;
	int64 gone; /* no event up to here is left */
	int64 maxRows;
	int64 reaped;
	int64 rows;	   /* that are gone or were removed */
	int64 entries; /* of the index that were read */
} Reaping;

static OwnerQuery lastQuery = {
	.table = "outbox_seq",
	.text = "SELECT coalesce(pg_catalog.pg_sequence_last_value('idempotency.outbox_seq'), 0)",
	.results = {INT8OID},
};

static OwnerQuery loadQuery = {
	.table = "reaper",
	.text = "SELECT events_gone FROM idempotency.reaper"
			" WHERE system_identifier OPERATOR(pg_catalog.=) $1"
			" AND relation OPERATOR(pg_catalog.=) $2",
	.parameters = 2,
	.types = {INT8OID, OIDOID},
	.results = {INT8OID},
};

static OwnerQuery saveQuery = {
	.table = "reaper",
	.text = "INSERT INTO idempotency.reaper AS r (system_identifier, relation, events_reaped,"
			" events_gone, rows_reaped, zombies_reaped, hand_block, round_block, round_started_at)"
			" VALUES ($1, $2, $3, $4, 0, 0, 0, 0, pg_catalog.clock_timestamp())"
			" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
			" events_reaped = r.events_reaped OPERATOR(pg_catalog.+) excluded.events_reaped,"
			" events_gone = excluded.events_gone",
	.parameters = 4,
	.types = {INT8OID, OIDOID, INT8OID, INT8OID},
};

/* ----------------------------------------------------------------
 * Locks
 * ----------------------------------------------------------------
 */

static LOCKTAG
EventsLockTag(void)
{
	LOCKTAG tag;

	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, 0, EVENTS_LOCK_CLASS);
	return tag;
}

/*
 * OutboxReaperHoldOff keeps all events that are there until the transaction
 * ends.  Waits for a batch that is just being removed, and throws 55P03 if that
 * takes longer than idempotency.wait, as it may where somebody called reap().
 */
void
OutboxReaperHoldOff(void)
{
	LOCKTAG tag = EventsLockTag();

	if (!LockWithin(&tag, ShareLock, DefaultWait))
		ErrorReaperBusy();
}

/*
 * OutboxReaperLock makes us the reaper, and locks the tables that it reads and
 * writes, until the transaction ends.  With dontWait it returns false if that is
 * not possible at once.  Throws 55000 if the reaper's table is missing.
 */
bool
OutboxReaperLock(bool dontWait)
{
	return OwnRelationTake("outbox", RowExclusiveLock, dontWait) &&
		   OwnRelationTake("position", RowExclusiveLock, dontWait) &&
		   OwnRelationTake("subscription", AccessShareLock, dontWait) &&
		   OwnRelationTake("parked", RowExclusiveLock, dontWait) && HandLock(dontWait);
}

/*
 * KeepSubscribersOut takes the lock that subscribe() takes as well, if it is
 * free.
 */
static bool
KeepSubscribersOut(void)
{
	LOCKTAG tag = EventsLockTag();

	return LockWithin(&tag, ExclusiveLock, 0);
}

/* ----------------------------------------------------------------
 * How far
 * ----------------------------------------------------------------
 */

/*
 * OneNumber returns the number that a query selects, or 0.
 */
static int64
OneNumber(OwnerQuery *query, Datum *values)
{
	int64 number = 0;

	if (OwnerQueryRun(query, values, NULL) > 0)
		number = DatumGetInt64(OwnerQueryValue(query, 0, 1, NULL));
	OwnerQueryEnd();
	return number;
}

/* ----------------------------------------------------------------
 * The events
 * ----------------------------------------------------------------
 */

/*
 * IsYoung tells whether an event is to be kept for its age.
 */
static bool
IsYoung(const Reaping *reaping, TupleTableSlot *slot)
{
	int64 retention = OutboxRetention * USECS_PER_SEC;
	bool isnull;
	int64 age = reaping->now - DatumGetTimestampTz(slot_getattr(slot, OUT_PUBLISHED_AT, &isnull));

	return -retention < age && age < retention;
}

/*
 * Remove removes the event in the slot, unless it is gone already.  Returns
 * false if it has to stay.
 */
static bool
Remove(Reaping *reaping, TupleTableSlot *slot)
{
	OutboxRowState state = OutboxStateOf(slot, reaping->snapshot);
	TM_FailureData failure;

	if (state == ROW_GONE)
		return true;
	if (state == ROW_PENDING || IsYoung(reaping, slot) ||
		OutboxNeedHas(&reaping->need, OutboxTxid(slot), OutboxSeq(slot)))
		return false;
	InjectionPoint("events-remove");
	if (table_tuple_delete(reaping->table, &slot->tts_tid, GetCurrentCommandId(true),
						   reaping->snapshot, InvalidSnapshot, false, &failure, false) != TM_Ok)
		return false;
	reaping->reaped++;
	return true;
}

/*
 * RemoveScanned removes the events that the scan gives, which ends at need.upto, as
 * far as none has to stay.  Returns whether the batch ended before that; it reads a row
 * at least.  A row that an administrator has updated has two entries.
 */
static RunState
RemoveScanned(Reaping *reaping, IndexScanDesc scan)
{
	TupleTableSlot *slot = table_slot_create(reaping->table, NULL);
	int64 upto = reaping->need.upto;
	RunState state = RUN_ENDED;

	while (OutboxNextRow(scan, ForwardScanDirection, slot, &reaping->entries))
	{
		int64 seq = OutboxSeq(slot);

		if (seq > reaping->gone && reaping->rows > 0 &&
			(reaping->reaped >= reaping->maxRows || reaping->entries > BATCH_ENTRIES))
		{
			state = RUN_GOES_ON;
			upto = reaping->gone;
			break;
		}
		if (!Remove(reaping, slot))
		{
			upto = seq - 1;
			break;
		}
		reaping->gone = seq;
		reaping->rows++;
	}
	reaping->gone = upto;
	ExecDropSingleTupleTableSlot(slot);
	return state;
}

/*
 * RemoveNotNeeded removes events behind reaping->gone that no subscription needs.
 * "last" is the last number that was given out, read before.
 */
static RunState
RemoveNotNeeded(Reaping *reaping, int64 last)
{
	Relation index;
	IndexScanDesc scan;
	RunState state;

	OutboxNeedRead(reaping->table, last, reaping->gone, &reaping->need);
	if (reaping->need.upto <= reaping->gone)
		return RUN_ENDED;

	index = index_open(OutboxTableIndex(reaping->table), AccessShareLock);
	scan = index_beginscan_compat(reaping->table, index, SnapshotAny, 2);
	CheckCmdReplicaIdentity(reaping->table, CMD_DELETE);
	reaping->snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxRescan(scan, reaping->gone + 1, reaping->need.upto);
	state = RemoveScanned(reaping, scan);
	index_endscan(scan);
	index_close(index, AccessShareLock);
	UnregisterSnapshot(reaping->snapshot);
	if (reaping->reaped > 0)
		CommandCounterIncrement();
	return state;
}

/*
 * OutboxLastNumber returns the last number that the sequence has given out, or 0.
 */
int64
OutboxLastNumber(void)
{
	return OneNumber(&lastQuery, NULL);
}

/*
 * Reap does one batch, in the table that is open.
 */
static RunState
Reap(Relation table, int64 maxRows, int64 *reaped)
{
	Reaping reaping = {
		.table = table, .maxRows = Min(maxRows, BATCH_EVENTS), .now = GetCurrentTimestamp()};
	Datum row[4] = {Int64GetDatum((int64) GetSystemIdentifier()),
					ObjectIdGetDatum(OwnRelationByName("key"))};
	int64 last = OutboxLastNumber();
	RunState state;
	int64 before;

	/* A restore has not come to the sequence, and positions seem to be ahead of it. */
	if (last == 0)
		return RUN_ENDED;

	/* Somebody may have set the sequence back. */
	reaping.gone = OneNumber(&loadQuery, row);
	if (reaping.gone > last)
		reaping.gone = 0;
	before = reaping.gone;
	state = RemoveNotNeeded(&reaping, last);

	if (reaping.reaped > 0 || (reaping.entries >= NOTED_ENTRIES && reaping.gone > before))
	{
		row[2] = Int64GetDatum(reaping.reaped);
		row[3] = Int64GetDatum(reaping.gone);
		InjectionPoint("events-save");
		(void) OwnerQueryDo(&saveQuery, row, NULL);
		InjectionPoint("events-count");
	}
	CountEvents(COUNT_EVENTS_REAPED, reaping.reaped);
	*reaped += reaping.reaped;
	return state;
}

/*
 * OutboxReapBatch removes events, "maxRows" at most and no more than are good for
 * one transaction of the worker, and adds how many to "reaped".  With dontWait it
 * waits for no table and no other reaper.  Returns whether there may be more.
 * Throws 55000 where the extension is not installed or a table was altered.
 */
RunState
OutboxReapBatch(bool dontWait, int64 maxRows, int64 *reaped)
{
	MemoryContext each;
	MemoryContext caller;
	Relation table;
	RunState state;

	if (OutboxRetention < 0 || maxRows <= 0 || IsolationUsesXactSnapshot())
		return RUN_ENDED;
	InjectionPoint("events-lock");
	if (!OutboxReaperLock(dontWait) || !KeepSubscribersOut())
		return RUN_BUSY;
	InjectionPoint("events-look");

	each = AllocSetContextCreate(CurrentMemoryContext, "idempotency events", ALLOCSET_SMALL_SIZES);
	caller = MemoryContextSwitchTo(each);
	table = OutboxTableOpen(RowExclusiveLock);
	state = Reap(table, maxRows, reaped);
	table_close(table, NoLock);
	MemoryContextSwitchTo(caller);
	MemoryContextDelete(each);
	return state;
}
