/*-------------------------------------------------------------------------
 *
 * outbox/scan.c
 *	  Reading the outbox from a cursor on, in the order of publishing.
 *
 * A scan returns the events that its one snapshot shows and that were not delivered yet:
 * first those that were in flight when the cursor was made, then those after it.  It
 * makes the cursor after them, which has what the scan met in flight.  README.md
 * describes the algorithm.
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

#include "base/compat.h"
#include "outbox/scan.h"
#include "outbox/table.h"
#include "outbox/visibility.h"

/* Numbers to read. */
typedef struct Stretch
{
	int64 from;
	int64 upto;
} Stretch;

struct OutboxScan
{
	Relation table;
	Snapshot snapshot;
	IndexScanDesc scan;
	TupleTableSlot *slot;

	OutboxCursor from;		/* where the scan begins, without the transactions in flight */
	OutboxCursor reached;	/* the cursor that it makes: these, and what is in flight and holes */
	OutboxCursor upto;		/* if bounded */
	bool bounded;			/* false: to the last row */
	uint64 oldestPublisher; /* no older transaction is in publish() */

	Stretch *stretches; /* the last one is everything after the cursor */
	int stretchCount;
	int stretch;   /* the one being read */
	int64 behind;  /* numbers of the stretch before this one have been read */
	int64 entries; /* of the index that were read, whatever became of their rows */
	int64 limit;   /* of entries */
	bool exhausted;
	bool wanted;  /* the number before "behind" is to be delivered */
	bool given;	  /* it was returned */
	bool pending; /* a row of it is in flight */
	uint64 txid;  /* of that row; 0, which has ended, if there are several */
};

/* ----------------------------------------------------------------
 * Beginning
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
 * MakeStretches makes the list of numbers to read: those of the parts of scan->from, in
 * order and without overlaps, and all after the cursor.  The end of a part can still be in
 * flight where a bounded scan ends: nothing in there was delivered.
 */
static void
MakeStretches(OutboxScan *scan)
{
	const OutboxCursor *from = &scan->from;
	Stretch *all = palloc((from->count + 1) * sizeof(Stretch));
	int count = 0;
	int joined = 0;

	for (int i = 0; i < from->count; i++)
	{
		const InFlight *part = &from->inFlight[i];
		const InFlight *left = CursorFind(&scan->upto, part->txid, part->upto);
		Stretch it = {part->from, left != NULL ? left->from - 1 : part->upto};

		if (it.from <= it.upto)
			all[count++] = it;
	}
	qsort(all, count, sizeof(Stretch), CompareStretches);
	for (int i = 0; i < count; i++)
	{
		if (joined > 0 && all[i].from <= all[joined - 1].upto)
			all[joined - 1].upto = Max(all[joined - 1].upto, all[i].upto);
		else
			all[joined++] = all[i];
	}
	all[joined++] = (Stretch){from->passed + 1, scan->bounded ? scan->upto.passed : PG_INT64_MAX};
	scan->stretches = all;
	scan->stretchCount = joined;
}

/*
 * HoleIsOpen tells whether a publisher can still insert rows into a hole: not if every
 * publisher is too young to have drawn its numbers.
 */
static bool
HoleIsOpen(const OutboxScan *scan, const InFlight *hole)
{
	return scan->oldestPublisher < hole->stamp;
}

/*
 * BeginStretch begins to read the current stretch.
 */
static void
BeginStretch(OutboxScan *scan)
{
	const Stretch *stretch = &scan->stretches[scan->stretch];

	OutboxIndexRescan(scan->scan, stretch->from, stretch->upto);
	scan->behind = stretch->from;
}

static bool
IsLastStretch(const OutboxScan *scan)
{
	return scan->stretch == scan->stretchCount - 1;
}

/*
 * CopyParts adds to the cursors of the scan what was in flight where it begins.  What has
 * ended by now is to be read.
 */
static void
CopyParts(OutboxScan *scan, const OutboxCursor *from)
{
	for (int i = 0; i < from->count; i++)
	{
		const InFlight *part = &from->inFlight[i];
		bool ended = scan->bounded || part->ended || part->txid == 0 ||
					 OutboxHasEnded(scan->snapshot, part->txid);

		CursorAdd(ended ? &scan->from : &scan->reached, part);
	}
}

/*
 * OutboxScanBegin begins a scan after the cursor "from", in the current memory context,
 * which must be the current one until it ends.  With "upto" it returns what the scan
 * returned that ended there.  It ends when it has read about "limit" index entries.
 */
OutboxScan *
OutboxScanBegin(const OutboxCursor *from, const OutboxCursor *upto, int64 limit)
{
	OutboxScan *scan = palloc0(sizeof(OutboxScan));
	bool holes = false;

	/* Open the table and copy the cursors */
	scan->table = OutboxTableOpen(AccessShareLock);
	scan->slot = table_slot_create(scan->table, NULL);
	scan->limit = limit;
	CursorInit(&scan->from, from->passed);
	CursorInit(&scan->reached, from->passed);
	scan->bounded = upto != NULL;
	CursorInit(&scan->upto, scan->bounded ? upto->passed : 0);
	for (int i = 0; scan->bounded && i < upto->count; i++)
		CursorAdd(&scan->upto, &upto->inFlight[i]);

	/* Find the oldest publisher before taking the snapshot */
	for (int i = 0; i < from->count; i++)
		holes |= from->inFlight[i].txid == 0;
	scan->oldestPublisher = holes ? OutboxOldestPublisher(scan->table) : PG_UINT64_MAX;

	/* Sort what was in flight under the snapshot */
	scan->snapshot = RegisterSnapshot(GetLatestSnapshot());
	CopyParts(scan, from);
	CursorSort(&scan->from);
	CursorSort(&scan->upto);

	/* Begin the first stretch */
	MakeStretches(scan);
	scan->scan = OutboxIndexBegin(scan->table);
	BeginStretch(scan);
	return scan;
}

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

/*
 * AddHole adds a hole: numbers that have no row.  A publisher that has drawn one of them
 * is older than any transaction to come.
 */
static void
AddHole(OutboxScan *scan, int64 from, int64 upto)
{
	InFlight hole = {.from = from, .upto = upto};

	if (from > upto || scan->bounded)
		return;
	hole.stamp = U64FromFullTransactionId(ReadNextFullTransactionId());
	CursorAdd(&scan->reached, &hole);
}

/*
 * IsWanted tells whether the row of that number is to be delivered by this scan.  A hole
 * in which there is a row by now is split there.
 */
static bool
IsWanted(OutboxScan *scan, int64 seq)
{
	uint64 txid = OutboxTxid(scan->slot);
	bool wanted = IsLastStretch(scan) || CursorHas(&scan->from, txid, seq);
	InFlight *hole;

	if (scan->bounded)
		return wanted && !CursorHas(&scan->upto, txid, seq);
	hole = CursorFind(&scan->from, 0, seq);
	if (hole != NULL)
	{
		InFlight before = *hole;

		before.upto = seq - 1;
		if (HoleIsOpen(scan, hole))
			CursorAdd(&scan->reached, &before);
		hole->from = seq + 1;
	}
	return wanted;
}

/*
 * EndNumber adds the number before "behind" to the new cursor if a row of it is in flight,
 * unless it was returned: a transaction that deletes a row and inserts it again is open.
 */
static void
EndNumber(OutboxScan *scan)
{
	if (scan->pending && !scan->given && !scan->bounded)
		CursorAddPending(&scan->reached, scan->snapshot, scan->txid, scan->behind - 1);
	scan->pending = false;
}

/*
 * MoveTo moves the scan after a number, unless the row in the slot is another one of the
 * number before.
 */
static void
MoveTo(OutboxScan *scan, int64 seq)
{
	if (seq < scan->behind)
		return;
	EndNumber(scan);
	if (IsLastStretch(scan))
		AddHole(scan, scan->behind, seq - 1);
	scan->behind = seq + 1;
	scan->wanted = false;
	scan->given = false;
}

/*
 * NextEntry reads the next index entry of any stretch, and puts its row into the slot.
 * Returns false if there is none, or at the limit of the scan: between two numbers, since
 * a number can have several entries.
 */
static bool
NextEntry(OutboxScan *scan, int64 *seq)
{
	while (!scan->exhausted)
	{
		bool found = OutboxIndexNext(scan->scan, ForwardScanDirection, scan->slot, seq);

		scan->entries += found;
		scan->exhausted = scan->entries > scan->limit && (!found || *seq >= scan->behind);
		if (found && !scan->exhausted)
			return true;
		if (found || IsLastStretch(scan))
			return false;
		EndNumber(scan);
		scan->stretch++;
		BeginStretch(scan);
	}
	return false;
}

/*
 * OutboxScanNext returns the next event, or NULL if there is none, or at the limit of the
 * scan.  The slot is valid until the next call.
 */
TupleTableSlot *
OutboxScanNext(OutboxScan *scan)
{
	int64 seq;

	while (NextEntry(scan, &seq))
	{
		OutboxRowState state;

		MoveTo(scan, seq);
		if (TupIsNull(scan->slot))
			continue;
		scan->wanted |= IsWanted(scan, seq);
		if (!scan->wanted)
			continue;
		InjectionPoint("scan-row");
		state = OutboxStateOf(scan->slot, scan->snapshot);
		if (state == ROW_VISIBLE)
		{
			scan->given = true;
			return scan->slot;
		}
		if (state == ROW_PENDING)
		{
			uint64 txid = OutboxTxid(scan->slot);

			scan->txid = scan->pending && scan->txid != txid ? 0 : txid;
			scan->pending = true;
		}
	}
	EndNumber(scan);
	return NULL;
}

/* ----------------------------------------------------------------
 * Ending
 * ----------------------------------------------------------------
 */

/*
 * OutboxScanExhausted tells whether the scan has ended at its limit.
 */
bool
OutboxScanExhausted(const OutboxScan *scan)
{
	return scan->exhausted;
}

/*
 * OutboxScanEnd ends the scan, and sets "reached", unless that is NULL, to the cursor
 * after the last event that was returned.  Returns how many index entries it has read.
 */
int64
OutboxScanEnd(OutboxScan *scan, OutboxCursor *reached)
{
	if (reached != NULL)
	{
		bool all = IsLastStretch(scan);
		int64 behind = all ? PG_INT64_MAX : scan->behind;

		if (all)
			scan->reached.passed = Max(scan->reached.passed, scan->behind - 1);
		for (int i = 0; i < scan->from.count; i++)
		{
			InFlight *part = &scan->from.inFlight[i];

			if (part->txid != 0 || !HoleIsOpen(scan, part))
				part->from = Max(part->from, behind);
			CursorAdd(&scan->reached, part);
		}
		*reached = scan->reached;
	}
	OutboxIndexEnd(scan->scan);
	ExecDropSingleTupleTableSlot(scan->slot);
	UnregisterSnapshot(scan->snapshot);
	table_close(scan->table, AccessShareLock);
	return scan->entries;
}
