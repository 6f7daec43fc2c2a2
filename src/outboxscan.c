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
 * A scan has a limit to the rows that it looks at, whether the snapshot shows them or
 * not, so that one step of a reader ends however many rows there are that it cannot
 * have.  The cursor behind it is where the next step begins.
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

	OutboxCursor from;		/* what is over comes first */
	OutboxCursor running;	/* what is not, and what is found to be */
	OutboxCursor holes;		/* that are found, and what is left of "from"; "running" stays short */
	OutboxCursor upto;		/* if bounded */
	bool bounded;			/* false: as far as there is something */
	CursorSweep fromSweep;	/* over "from" */
	CursorSweep uptoSweep;	/* over "upto" */
	uint64 oldestPublisher; /* no older transaction is publishing just now */

	Stretch *stretches; /* the last one is what lies behind the cursor */
	int stretchCount;
	int stretch;	 /* the one being read */
	int64 behind;	 /* in it, numbers before this one have been looked at */
	int64 looked;	 /* rows, whatever came of them */
	int64 effort;	 /* as "looked", with entries of rows that are gone, and stretches */
	int64 limit;	 /* of effort */
	bool keepsHoles; /* stretches do not count: to look at holes that stay is no progress */
	bool exhausted;

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

/*
 * CompareByTransaction orders the parts of a cursor by transaction, and by where they
 * begin.
 */
static int
CompareByTransaction(const void *a, const void *b)
{
	const InFlight *left = a;
	const InFlight *right = b;

	if (left->txid != right->txid)
		return left->txid < right->txid ? -1 : 1;
	return left->from < right->from ? -1 : left->from > right->from;
}

/*
 * EndOf returns the last number of a part that a bounded scan has to look at.  The end
 * of a part may be in flight still where the scan ends, as "left" says, whose parts are
 * ordered by transaction: nothing in there was given.
 */
static int64
EndOf(const InFlight *part, const OutboxCursor *left)
{
	const InFlight key = {.txid = part->txid, .from = part->upto};
	int low = 0;
	int high = left->count;

	while (low < high)
	{
		int middle = low + (high - low) / 2;

		if (CompareByTransaction(&left->inFlight[middle], &key) <= 0)
			low = middle + 1;
		else
			high = middle;
	}
	if (low > 0 && left->inFlight[low - 1].txid == part->txid &&
		left->inFlight[low - 1].upto >= part->upto)
		return left->inFlight[low - 1].from - 1;
	return part->upto;
}

/*
 * MakeStretches makes the list of numbers to look at: those of the parts of
 * scan->from, which are in order, without overlaps; and all behind the cursor.
 */
static void
MakeStretches(OutboxScan *scan)
{
	const OutboxCursor *from = &scan->from;
	OutboxCursor left = {0};
	Stretch *all = palloc((from->count + 1) * sizeof(Stretch));
	int count = 0;

	for (int i = 0; i < scan->upto.count; i++)
		CursorAdd(&left, &scan->upto.inFlight[i]);
	if (left.count > 0)
		qsort(left.inFlight, left.count, sizeof(InFlight), CompareByTransaction);
	for (int i = 0; i < from->count; i++)
	{
		Stretch it = {from->inFlight[i].from, EndOf(&from->inFlight[i], &left)};

		if (it.from > it.upto)
			continue;
		if (count > 0 && it.from <= all[count - 1].upto)
			all[count - 1].upto = Max(all[count - 1].upto, it.upto);
		else
			all[count++] = it;
	}
	all[count++] = (Stretch){from->passed + 1, scan->bounded ? scan->upto.passed : PG_INT64_MAX};
	scan->stretches = all;
	scan->stretchCount = count;
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
 * BeginStretch begins to read the stretch that is up.
 */
static void
BeginStretch(OutboxScan *scan)
{
	const Stretch *stretch = &scan->stretches[scan->stretch];

	OutboxRescan(scan->scan, stretch->from, stretch->upto);
	scan->behind = stretch->from;
	if (!scan->keepsHoles)
		scan->effort++;
}

static bool
IsLastStretch(const OutboxScan *scan)
{
	return scan->stretch == scan->stretchCount - 1;
}

/*
 * CopyParts adds to the scan's cursors what was in flight where it begins: what is over
 * by now is to be read.
 */
static void
CopyParts(OutboxScan *scan, const OutboxCursor *from)
{
	for (int i = 0; i < from->count; i++)
	{
		const InFlight *part = &from->inFlight[i];
		bool over = scan->bounded || part->over || part->txid == 0 ||
					OutboxIsOver(&scan->horizon, part->txid);

		CursorAdd(over ? &scan->from : &scan->running, part);
		scan->keepsHoles |= part->txid == 0 && MayBeDrawn(scan, part);
	}
}

/*
 * OutboxScanBegin begins a scan behind the cursor "from", in the current
 * memory context.  With "upto" it gives what a scan gave that ended there.  It ends
 * when it has looked at about "limit" rows.
 */
OutboxScan *
OutboxScanBegin(const OutboxCursor *from, const OutboxCursor *upto, int64 limit)
{
	OutboxScan *scan = palloc0(sizeof(OutboxScan));
	bool holes = false;

	scan->table = OutboxTableOpen(AccessShareLock);
	scan->index = index_open(OutboxTableIndex(scan->table), AccessShareLock);
	scan->slot = table_slot_create(scan->table, NULL);
	scan->context = CurrentMemoryContext;
	scan->seq = PG_INT64_MIN;
	scan->limit = limit;
	CursorInit(&scan->from, from->passed);
	CursorInit(&scan->running, from->passed);
	scan->bounded = upto != NULL;
	CursorInit(&scan->upto, scan->bounded ? upto->passed : 0);
	for (int i = 0; scan->bounded && i < upto->count; i++)
		CursorAdd(&scan->upto, &upto->inFlight[i]);

	for (int i = 0; i < from->count; i++)
		holes |= from->inFlight[i].txid == 0;
	scan->oldestPublisher = holes ? OutboxOldestPublisher(scan->table) : PG_UINT64_MAX;

	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	OutboxHorizonInit(&scan->horizon, scan->snapshot);
	CopyParts(scan, from);
	CursorSweepBegin(&scan->fromSweep, &scan->from);
	CursorSweepBegin(&scan->uptoSweep, &scan->upto);
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

	if (from <= upto && !scan->bounded)
		CursorAdd(&scan->holes, &hole);
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
	bool wanted = IsLastStretch(scan);

	CursorSweepTo(&scan->fromSweep, seq);
	wanted |= CursorSweepHas(&scan->fromSweep, txid, seq);
	if (scan->bounded)
	{
		CursorSweepTo(&scan->uptoSweep, seq);
		return wanted && !CursorSweepHas(&scan->uptoSweep, txid, seq);
	}

	for (int i = 0; i < scan->fromSweep.openCount; i++)
	{
		InFlight *part = &scan->from.inFlight[scan->fromSweep.open[i]];

		if (part->txid == 0 && part->from <= seq)
		{
			InFlight before = *part;

			before.upto = seq - 1;
			if (MayBeDrawn(scan, part))
				CursorAddRange(&scan->holes, &before, before.from);
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
	if (scan->pending && !scan->given && !scan->bounded)
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
 * NextRow puts the next row of any stretch into the slot.  Returns false if there is
 * none, or if the scan has come to its limit: at a new number, since a number may have
 * several rows.
 */
static bool
NextRow(OutboxScan *scan)
{
	while (!scan->exhausted)
	{
		int64 entries = 0;
		bool found = OutboxNextRow(scan->scan, ForwardScanDirection, scan->slot, &entries);

		scan->effort += entries;
		scan->exhausted =
			scan->effort > scan->limit && (!found || OutboxSeq(scan->slot) != scan->seq);
		if (found && !scan->exhausted)
		{
			scan->looked++;
			return true;
		}
		NoteIfPending(scan);
		if (found || IsLastStretch(scan))
			return false;
		scan->stretch++;
		BeginStretch(scan);
	}
	return false;
}

/*
 * NextEvent puts the next event into the slot.  Returns false if there is none, as far
 * as the scan goes.
 */
static bool
NextEvent(OutboxScan *scan)
{
	while (NextRow(scan))
	{
		int64 seq = OutboxSeq(scan->slot);
		OutboxRowState state;

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
	return false;
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
 * OutboxScanExhausted tells whether the scan has ended at its limit, and if so sets
 * "next" to the number at which the next one goes on.
 */
bool
OutboxScanExhausted(const OutboxScan *scan, int64 *next)
{
	*next = scan->behind;
	return scan->exhausted;
}

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
				CursorAddRange(&scan->holes, &part, part.from);
			else
				CursorAddRange(&scan->holes, &part, Max(part.from, behind));
		}
		for (int i = 0; i < scan->holes.count; i++)
			CursorAdd(&scan->running, &scan->holes.inFlight[i]);
		*reached = scan->running;
	}
	index_endscan(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	UnregisterSnapshot(scan->snapshot);
	index_close(scan->index, AccessShareLock);
	table_close(scan->table, AccessShareLock);
	return scan->looked;
}
