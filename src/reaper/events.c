/*-------------------------------------------------------------------------
 *
 * reaper/events.c
 *	  Removing events that every subscription has passed.
 *
 * An event is removed when it is older than idempotency.outbox_retention and no
 * subscription needs it.  Events are removed from the lowest number on, up to the first
 * that is kept, and the number up to which none is left is stored for the next run.
 * README.md says why no reader misses an event.
 *
 * Locks, to the end of the transaction: the tables and the sequence (OutboxReaperLock()); the
 * reaper's (reaper/state.c); the events lock, exclusive, if it is free.  No row is waited for.
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
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/guc.h"
#include "base/query.h"
#include "base/relation.h"
#include "base/stats.h"
#include "delivery/position.h"
#include "outbox/cursor.h"
#include "outbox/table.h"
#include "outbox/visibility.h"
#include "reaper/reaper.h"

/*
 * The limits of a batch: events to remove, index entries to read.  With many subscriptions
 * more events are removed, since each batch reads all positions.
 */
#define BATCH_EVENTS 1000
#define BATCH_EVENTS_PER_SUBSCRIPTION 10
#define BATCH_ENTRIES 10000

/* How long to wait for publishers, in milliseconds. */
#define PUBLISHERS_MS 5

/* Progress is written after so many dead entries. */
#define PROGRESS_ENTRIES 1000

/* What the subscriptions need. */
typedef struct Need
{
	int64 upto;			   /* every position has passed these, and no row will be inserted */
	int64 subscriptions;   /* how many there are */
	int count;			   /* of positions with events in flight */
	OutboxCursor *cursors; /* theirs, sorted */
} Need;

/* One batch. */
typedef struct Reaping
{
	Relation table;
	Snapshot snapshot;
	TimestampTz now;
	Need need;
	int64 gone; /* no event up to this number is left */
	int64 maxRows;
	int64 reaped;
	int64 entries; /* index entries read */
} Reaping;

static ExtensionQuery namesQuery = {
	.table = "subscription",
	.text = "SELECT subscription FROM idempotency.subscription",
	.results = {TEXTOID},
};

static ExtensionQuery loadQuery = {
	.table = "reaper",
	.text = "SELECT events_deleted_upto FROM idempotency.reaper"
			" WHERE system_identifier OPERATOR(pg_catalog.=) $1"
			" AND relation OPERATOR(pg_catalog.=) $2",
	.parameters = 2,
	.types = {INT8OID, OIDOID},
	.results = {INT8OID},
};

static ExtensionQuery saveQuery = {
	.table = "reaper",
	.text =
		"INSERT INTO idempotency.reaper AS r (system_identifier, relation, events_reaped,"
		" events_deleted_upto, rows_reaped, zombies_reaped, expiry_block, scan_block, scan_started_at)"
		" VALUES ($1, $2, $3, $4, 0, 0, 0, 0, pg_catalog.clock_timestamp())"
		" ON CONFLICT (system_identifier, relation) DO UPDATE SET"
		" events_reaped = r.events_reaped OPERATOR(pg_catalog.+) excluded.events_reaped,"
		" events_deleted_upto = excluded.events_deleted_upto",
	.parameters = 4,
	.types = {INT8OID, OIDOID, INT8OID, INT8OID},
};

/*
 * OutboxReaperLock makes this transaction the reaper, and locks the tables that it reads
 * and writes, and the sequence, to the end of the transaction.  With dontWait it returns
 * false if that is not possible at once.  Throws 55000 if the reaper's table is missing.
 */
bool
OutboxReaperLock(bool dontWait)
{
	return ExtensionRelationLock("outbox", RowExclusiveLock, dontWait) &&
		   ExtensionRelationLock("outbox_seq", AccessShareLock, dontWait) &&
		   ExtensionRelationLock("position", RowExclusiveLock, dontWait) &&
		   ExtensionRelationLock("subscription", AccessShareLock, dontWait) &&
		   ExtensionRelationLock("parked", RowExclusiveLock, dontWait) && ReaperLock(dontWait);
}

/* ----------------------------------------------------------------
 * What subscriptions need
 * ----------------------------------------------------------------
 */

/*
 * DrawnFrom returns the first number above "gone" in a hole of the cursor that a
 * publisher can still fill; PG_INT64_MAX if there is none.
 */
static int64
DrawnFrom(const OutboxCursor *cursor, uint64 oldestPublisher, int64 gone)
{
	int64 first = PG_INT64_MAX;

	for (int i = 0; i < cursor->count; i++)
	{
		const InFlight *part = &cursor->inFlight[i];

		if (part->txid == 0 && oldestPublisher < part->stamp && part->upto > gone)
			first = Min(first, Max(part->from, gone + 1));
	}
	return first;
}

/*
 * AddPosition adds what a subscription needs: everything, if its position is not there
 * yet.
 */
static void
AddPosition(Need *need, const text *subscription)
{
	Position position;

	if (!PositionRead(subscription, &position))
	{
		need->upto = 0;
		return;
	}
	need->upto = Min(need->upto, position.start.passed);
	CursorSort(&position.start);
	if (position.start.count > 0)
		need->cursors[need->count++] = position.start;
}

/*
 * AddSubscriptions adds what all subscriptions need, and sets how many there are.
 */
static void
AddSubscriptions(Need *need)
{
	MemoryContext caller = CurrentMemoryContext;

	need->subscriptions = ExtensionQueryRun(&namesQuery, NULL, NULL);
	MemoryContextSwitchTo(caller);
	need->cursors = palloc(Max(need->subscriptions, 1) * sizeof(OutboxCursor));
	for (int64 row = 0; row < need->subscriptions; row++)
	{
		CHECK_FOR_INTERRUPTS();
		AddPosition(need, DatumGetTextPP(ExtensionQueryValue(&namesQuery, row, 1, NULL)));
	}
	ExtensionQueryEnd();
}

/*
 * NeedRead fills "need", in the current memory context; its upto is 0 if that cannot be
 * known now.  "last" is the last number that was drawn, read before; no event up to
 * "gone" is left.
 */
static void
NeedRead(Relation table, int64 last, int64 gone, Need *need)
{
	uint64 oldestPublisher;

	*need = (Need){.upto = last};
	AddSubscriptions(need);
	if (need->subscriptions == 0)
	{
		bool locked = ExtensionRelationLock("subscription", ShareLock, true);

		if (locked)
			AddSubscriptions(need);
		if (need->subscriptions == 0)
		{
			need->upto = locked && OutboxAwaitPublishers(table, PUBLISHERS_MS) ? last : 0;
			return;
		}
	}

	/* After the positions: a publisher that has drawn a number in a hole began before */
	oldestPublisher = OutboxOldestPublisher(table);
	for (int i = 0; i < need->count; i++)
	{
		int64 drawn = DrawnFrom(&need->cursors[i], oldestPublisher, gone);

		need->upto = Min(need->upto, drawn - 1);
	}
}

/*
 * NeedHas tells whether a subscription needs an event up to need->upto that "txid"
 * published: one that was in flight when the position passed it.
 */
static bool
NeedHas(const Need *need, uint64 txid, int64 seq)
{
	for (int i = 0; i < need->count; i++)
	{
		if (CursorHas(&need->cursors[i], txid, seq))
			return true;
	}
	return false;
}

/* ----------------------------------------------------------------
 * The events
 * ----------------------------------------------------------------
 */

/*
 * IsYoung tells whether an event is kept for its age.  One from the far future, after the
 * clock went back, is not.
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
 * Remove removes the event in the slot, unless that is done.  Returns false if it is kept.
 */
static bool
Remove(Reaping *reaping, TupleTableSlot *slot)
{
	OutboxRowState state = OutboxStateOf(slot, reaping->snapshot);
	TM_FailureData failure;

	if (state == ROW_GONE)
		return true;
	if (state == ROW_PENDING || IsYoung(reaping, slot) ||
		NeedHas(&reaping->need, OutboxTxid(slot), OutboxSeq(slot)))
		return false;
	InjectionPoint("events-remove");
	if (table_tuple_delete_compat(reaping->table, &slot->tts_tid, GetCurrentCommandId(true),
								  reaping->snapshot, false, &failure) != TM_Ok)
		return false;
	reaping->reaped++;
	return true;
}

/*
 * RemoveScanned removes the events of the scan, which ends at need.upto, up to the first
 * that is kept.  Returns whether it ended at a limit: between two numbers, since a number
 * can have several entries.
 */
static RunState
RemoveScanned(Reaping *reaping, IndexScanDesc scan)
{
	TupleTableSlot *slot = table_slot_create(reaping->table, NULL);
	int64 upto = reaping->need.upto;
	RunState state = RUN_ENDED;
	int64 seq;

	while (OutboxIndexNext(scan, ForwardScanDirection, slot, &seq))
	{
		if (seq > reaping->gone &&
			(reaping->reaped >= reaping->maxRows || reaping->entries >= BATCH_ENTRIES))
		{
			state = RUN_GOES_ON;
			upto = reaping->gone;
			break;
		}
		if (!TupIsNull(slot) && !Remove(reaping, slot))
		{
			upto = seq - 1;
			break;
		}
		reaping->gone = seq;
		reaping->entries++;
	}
	reaping->gone = upto;
	ExecDropSingleTupleTableSlot(slot);
	return state;
}

/*
 * RemoveNotNeeded removes events after reaping->gone that no subscription needs.  "last"
 * is the last number that was drawn, read before.
 */
static RunState
RemoveNotNeeded(Reaping *reaping, int64 last)
{
	IndexScanDesc scan;
	RunState state;

	NeedRead(reaping->table, last, reaping->gone, &reaping->need);
	if (reaping->need.upto <= reaping->gone)
		return RUN_ENDED;
	reaping->maxRows = Min(reaping->maxRows, Max(BATCH_EVENTS, BATCH_EVENTS_PER_SUBSCRIPTION *
																   reaping->need.subscriptions));

	/* Scan from the lowest number on */
	CheckCmdReplicaIdentity(reaping->table, CMD_DELETE);
	scan = OutboxIndexBegin(reaping->table);
	reaping->snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxIndexRescan(scan, reaping->gone + 1, reaping->need.upto);
	state = RemoveScanned(reaping, scan);
	OutboxIndexEnd(scan);
	UnregisterSnapshot(reaping->snapshot);
	if (reaping->reaped > 0)
		CommandCounterIncrement();
	return state;
}

/*
 * DeletedUpto returns the number up to which the last run has left no event, or 0.
 */
static int64
DeletedUpto(Datum *values)
{
	int64 number = 0;

	if (ExtensionQueryRun(&loadQuery, values, NULL) > 0)
		number = DatumGetInt64(ExtensionQueryValue(&loadQuery, 0, 1, NULL));
	ExtensionQueryEnd();
	return number;
}

/*
 * Reap does one batch, in the table that is open.
 */
static RunState
Reap(Relation table, int64 maxRows, int64 *reaped)
{
	Reaping reaping = {.table = table, .maxRows = maxRows, .now = GetCurrentTimestamp()};
	Datum row[4] = {Int64GetDatum((int64) GetSystemIdentifier()),
					ObjectIdGetDatum(ExtensionRelationOid("key"))};
	int64 last = OutboxLastNumber();
	RunState state;
	int64 before;

	/* A restore sets the sequence last: until then positions seem to be ahead of it */
	if (last == 0)
		return RUN_ENDED;

	/* An administrator can have set the sequence back */
	reaping.gone = DeletedUpto(row);
	if (reaping.gone > last)
		reaping.gone = 0;
	before = reaping.gone;
	state = RemoveNotNeeded(&reaping, last);

	if (reaping.reaped > 0 || (reaping.entries >= PROGRESS_ENTRIES && reaping.gone > before))
	{
		row[2] = Int64GetDatum(reaping.reaped);
		row[3] = Int64GetDatum(reaping.gone);
		InjectionPoint("events-save");
		(void) ExtensionQueryDo(&saveQuery, row, NULL);
		InjectionPoint("events-count");
	}
	CountEvents(COUNT_EVENTS_REAPED, reaping.reaped);
	*reaped += reaping.reaped;
	return state;
}

/*
 * OutboxReapBatch removes events, "maxRows" at most and no more than one batch, and adds
 * their number to "reaped".  With dontWait it waits for no table and no other reaper.
 * Returns whether there can be more.  Throws 55000 where the extension is not installed
 * or a table was altered.
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
	if (!OutboxReaperLock(dontWait) || !OutboxLockForReaper())
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
