/*-------------------------------------------------------------------------
 *
 * outboxscan.c
 *	  Reading the outbox from a cursor on, in the order of publishing.
 *
 * A scan gives the events that its one snapshot shows and that were not
 * delivered yet: first those which were in flight when the cursor was made, then
 * those behind it.  It looks at every row, whoever wrote it, and notes in the
 * cursor that it leaves behind what is there but not to be seen.  So nobody
 * waits for a transaction that stays open, and nobody's events are passed over:
 *
 * - A row that is in the index and came too late for the snapshot is noted by its
 *	 transaction (cursor.c), unless that has failed.  Once the transaction is over as of
 *	 a later scan's snapshot, that scan reads its range again.
 *
 * - A number without a row is a hole.  Either it is nobody's: its transaction
 *	 failed and VACUUM came, or a crash skipped it.  Or a publisher has drawn it and
 *	 is about to insert the row.  He has a transaction id by then, and holds locks on
 *	 the indexes until his entry is in.  So a scan asks first who holds such locks,
 *	 then looks into the hole again, and gives it up if all of them are younger
 *	 than the hole.
 *
 * - An administrator may UPDATE a row, so that its number has more than one, in any
 *	 order: the snapshot shows one of them at most.  A number is noted if one of its rows is
 *	 pending and none was given.
 *
 * Since one snapshot decides it all, the events of one transaction come in their
 * order, and so do those of transactions that waited for one another.
 *
 * A scan with an end gives the same events again as the scan that made the end:
 * for a batch that is delivered anew.
 *
 * Locks: ACCESS SHARE on the table and its index, to the end of the scan.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/transam.h"
#include "miscadmin.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "compat.h"
#include "outboxhorizon.h"
#include "outboxscan.h"
#include "outboxtable.h"

/* Numbers to look at. */
typedef struct Stretch
{
	int64 from;
	int64 upto;
} Stretch;

struct OutboxScan
{
	Relation table;
	Relation index;
	Snapshot snapshot;
	OutboxHorizon horizon;
	IndexScanDesc scan;
	TupleTableSlot *slot;
	MemoryContext context; /* what the scan leaves behind lives here */

	OutboxCursor from;		  /* what is over comes first */
	OutboxCursor running;	  /* what is not, and what is found to be */
	const OutboxCursor *upto; /* NULL: as far as there is something */
	uint64 oldestPublisher;	  /* no older transaction is publishing just now */

	Stretch *stretches; /* the last one is what lies behind the cursor */
	int stretchCount;
	int stretch;  /* the one being read */
	int64 behind; /* in it, numbers before this one have been looked at */
	int64 looked; /* rows, whatever came of them */

	/* Of the number that is being read, which has a row for each UPDATE of the event. */
	int64 seq;
	bool wanted;
	bool given;
	bool pending;
	uint64 txid; /* that of the row which is pending */
};

/* ----------------------------------------------------------------
 * Where to look
 * ----------------------------------------------------------------
 */

static int
CompareStretches(const void *a, const void *b)
{
	int64 left = ((const Stretch *) a)->from;
	int64 right = ((const Stretch *) b)->from;

	return left < right ? -1 : left > right;
}

/*
 * MakeStretches makes the list of numbers to look at: those of the parts of
 * scan->from, without overlaps and in order, and all behind the cursor.
 */
static void
MakeStretches(OutboxScan *scan)
{
	const OutboxCursor *from = &scan->from;
	Stretch *all = palloc((from->count + 1) * sizeof(Stretch));
	int count = 0;

	for (int i = 0; i < from->count; i++)
		all[i] = (Stretch){from->inFlight[i].from, from->inFlight[i].upto};
	qsort(all, from->count, sizeof(Stretch), CompareStretches);
	for (int i = 0; i < from->count; i++)
	{
		if (count > 0 && all[i].from <= all[count - 1].upto)
			all[count - 1].upto = Max(all[count - 1].upto, all[i].upto);
		else
			all[count++] = all[i];
	}
	all[count++] =
		(Stretch){from->passed + 1, scan->upto != NULL ? scan->upto->passed : PG_INT64_MAX};
	scan->stretches = all;
	scan->stretchCount = count;
}

/*
 * BeginStretch begins to read the stretch that is up.
 */
static void
BeginStretch(OutboxScan *scan)
{
	const Stretch *stretch = &scan->stretches[scan->stretch];

	OutboxRescan(scan->scan, stretch->from, stretch->upto);
	scan->behind = stretch->from;
}

static bool
IsLastStretch(const OutboxScan *scan)
{
	return scan->stretch == scan->stretchCount - 1;
}

/*
 * OutboxScanBegin begins a scan behind the cursor "from", in the current
 * memory context.  With "upto" it gives what a scan gave that ended there.
 */
OutboxScan *
OutboxScanBegin(const OutboxCursor *from, const OutboxCursor *upto)
{
	OutboxScan *scan = palloc0(sizeof(OutboxScan));
	bool holes = false;

	scan->table = OutboxTableOpen(AccessShareLock);
	scan->index = index_open(OutboxTableIndex(scan->table), AccessShareLock);
	scan->slot = table_slot_create(scan->table, NULL);
	scan->context = CurrentMemoryContext;
	scan->upto = upto;
	scan->seq = PG_INT64_MIN;
	CursorInit(&scan->from, from->passed);
	CursorInit(&scan->running, from->passed);

	for (int i = 0; i < from->count; i++)
		holes |= from->inFlight[i].txid == 0;
	scan->oldestPublisher = holes ? OutboxOldestPublisher(scan->table) : PG_UINT64_MAX;

	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxHorizonInit(&scan->horizon, scan->snapshot);
	for (int i = 0; i < from->count; i++)
	{
		const InFlight *part = &from->inFlight[i];
		bool over = upto != NULL || part->over || part->txid == 0 ||
					OutboxIsOver(&scan->horizon, part->txid);

		CursorAdd(over ? &scan->from : &scan->running, part);
	}
	MakeStretches(scan);
	scan->scan = index_beginscan_compat(scan->table, scan->index, SnapshotAny, 2);
	BeginStretch(scan);
	return scan;
}

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

/*
 * NoteHole notes that there are no rows of these numbers.  Who has drawn one of
 * them is older than any transaction to come.
 */
static void
NoteHole(OutboxScan *scan, int64 from, int64 upto)
{
	InFlight hole = {
		.stamp = U64FromFullTransactionId(ReadNextFullTransactionId()), .from = from, .upto = upto};

	if (from <= upto && scan->upto == NULL)
		CursorAdd(&scan->running, &hole);
}

/*
 * MayBeDrawn tells whether somebody may be about to insert the rows that a hole
 * lacks; not if everybody who publishes is too young to have drawn their numbers.
 */
static bool
MayBeDrawn(const OutboxScan *scan, const InFlight *hole)
{
	return scan->oldestPublisher < hole->stamp;
}

/*
 * IsWanted tells whether the row of that number is among what the scan is to
 * look at.  A hole in which there is a row by now ends before it, and goes on
 * behind it.
 */
static bool
IsWanted(OutboxScan *scan, int64 seq)
{
	uint64 txid = OutboxTxid(scan->slot);
	bool wanted = IsLastStretch(scan) || CursorHasInFlight(&scan->from, txid, seq);

	if (scan->upto != NULL)
		return wanted && !CursorHasInFlight(scan->upto, txid, seq);

	for (int i = 0; i < scan->from.count; i++)
	{
		InFlight *part = &scan->from.inFlight[i];

		if (part->txid == 0 && part->from <= seq && seq <= part->upto)
		{
			InFlight before = *part;

			before.upto = seq - 1;
			if (MayBeDrawn(scan, part))
				CursorAddRange(&scan->running, &before, before.from);
			part->from = seq + 1;
		}
	}
	return wanted;
}

/*
 * NoteIfPending ends the look at a number, and notes it if its event is yet to be seen.
 */
static void
NoteIfPending(OutboxScan *scan)
{
	if (scan->pending && !scan->given && scan->upto == NULL)
		OutboxNotePending(&scan->running, &scan->horizon, scan->txid, scan->seq);
	scan->pending = false;
}

/*
 * LookAt begins the look at a number, unless the row in the slot is but another one of
 * the number before.
 */
static void
LookAt(OutboxScan *scan, int64 seq)
{
	if (seq == scan->seq)
		return;
	NoteIfPending(scan);
	if (IsLastStretch(scan))
		NoteHole(scan, scan->behind, seq - 1);
	scan->behind = seq + 1;
	scan->seq = seq;
	scan->wanted = false;
	scan->given = false;
}

/*
 * NextEvent puts the next event into the slot.  Returns false if there is none.
 */
static bool
NextEvent(OutboxScan *scan)
{
	for (;;)
	{
		OutboxRowState state;
		int64 seq;

		CHECK_FOR_INTERRUPTS();
		if (!index_getnext_slot(scan->scan, ForwardScanDirection, scan->slot))
		{
			NoteIfPending(scan);
			if (IsLastStretch(scan))
				return false;
			scan->stretch++;
			BeginStretch(scan);
			continue;
		}

		scan->looked++;
		seq = OutboxSeq(scan->slot);
		LookAt(scan, seq);
		scan->wanted |= IsWanted(scan, seq);
		if (!scan->wanted || scan->given)
			continue;
		InjectionPoint("scan-row");
		state = OutboxStateOf(scan->slot, scan->snapshot);
		if (state == ROW_VISIBLE)
		{
			scan->given = true;
			return true;
		}
		if (state == ROW_PENDING)
		{
			scan->pending = true;
			scan->txid = OutboxTxid(scan->slot);
		}
	}
}

/*
 * OutboxScanNext returns the next event, or NULL if there is none.  The slot is
 * good until the next call.
 */
TupleTableSlot *
OutboxScanNext(OutboxScan *scan)
{
	MemoryContext caller = MemoryContextSwitchTo(scan->context);
	bool found = NextEvent(scan);

	MemoryContextSwitchTo(caller);
	return found ? scan->slot : NULL;
}

/* ----------------------------------------------------------------
 * Where it has come
 * ----------------------------------------------------------------
 */

/*
 * OutboxScanEnd ends the scan, and fills "reached", unless that is NULL, with
 * the cursor behind the last event that was given: the start of the next scan.
 * Returns how many rows it has looked at.
 */
int64
OutboxScanEnd(OutboxScan *scan, OutboxCursor *reached)
{
	if (reached != NULL)
	{
		bool all = IsLastStretch(scan);
		int64 behind = all ? PG_INT64_MAX : scan->behind;

		if (all)
			scan->running.passed = Max(scan->running.passed, scan->behind - 1);
		for (int i = 0; i < scan->from.count; i++)
		{
			InFlight part = scan->from.inFlight[i];

			if (part.txid == 0 && MayBeDrawn(scan, &part))
				CursorAddRange(&scan->running, &part, part.from);
			else
				CursorAddRange(&scan->running, &part, Max(part.from, behind));
		}
		*reached = scan->running;
	}
	index_endscan(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	UnregisterSnapshot(scan->snapshot);
	index_close(scan->index, AccessShareLock);
	table_close(scan->table, AccessShareLock);
	return scan->looked;
}
