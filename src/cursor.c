/*-------------------------------------------------------------------------
 *
 * cursor.c
 *	  How far a subscription has come in the outbox: a number, and what was
 *	  still in flight below it.
 *
 * Numbers are handed out before commits, so "up to here" alone would lose those
 * who commit late.  What was there and not to be seen yet is therefore noted: for
 * each transaction the range of numbers in which it had published, and the numbers
 * for which there was no row at all.  A transaction has one range, however its
 * events lie among those of others, and one more where they lie far apart; so the
 * list is hardly longer than there are transactions at work.
 *
 * In a table a list is an array of triples: the transaction, from, up to; for a
 * hole the first of the three is the stamp, negative.  A transaction of another
 * cluster bears a mark, since its number may come up in this one as well.
 *
 * Takes no locks, touches no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"

#include "cursor.h"

#define TRIPLE 3

/* So many numbers are worth reading once more, rather than noting one part more. */
#define FAR 10000

/* The mark on a transaction that is over; no transaction's number gets so far. */
#define OVER (UINT64CONST(1) << 62)

/*
 * CursorInit makes a cursor behind a number, with nothing in flight.
 */
void
CursorInit(OutboxCursor *cursor, int64 passed)
{
	memset(cursor, 0, sizeof(OutboxCursor));
	cursor->passed = passed;
}

/*
 * CursorAdd adds a part to the list, in the current memory context.
 */
void
CursorAdd(OutboxCursor *cursor, const InFlight *part)
{
	if (cursor->count == cursor->room)
	{
		cursor->room = Max(8, 2 * cursor->room);
		cursor->inFlight = cursor->inFlight == NULL
							   ? palloc(cursor->room * sizeof(InFlight))
							   : repalloc(cursor->inFlight, cursor->room * sizeof(InFlight));
	}
	cursor->inFlight[cursor->count++] = *part;
}

/*
 * CursorAddRange adds a part from a number on, if anything is left of it.
 */
void
CursorAddRange(OutboxCursor *cursor, const InFlight *part, int64 from)
{
	InFlight rest = *part;

	rest.from = from;
	if (rest.from <= rest.upto)
		CursorAdd(cursor, &rest);
}

/*
 * CursorAddRow notes that a row of a transaction was not to be seen yet.  Rows that
 * lie far apart get a part each, lest all that lies between be read for them.
 */
void
CursorAddRow(OutboxCursor *cursor, uint64 txid, int64 seq)
{
	InFlight part = {.txid = txid, .from = seq, .upto = seq};

	for (int i = 0; i < cursor->count; i++)
	{
		InFlight *known = &cursor->inFlight[i];

		if (known->txid == txid && !known->over && seq >= known->from - FAR &&
			seq <= known->upto + FAR)
		{
			known->from = Min(known->from, seq);
			known->upto = Max(known->upto, seq);
			return;
		}
	}
	CursorAdd(cursor, &part);
}

/*
 * CursorAddNumber notes that a row was not to be seen yet, whosever it is.
 */
void
CursorAddNumber(OutboxCursor *cursor, int64 seq)
{
	InFlight part = {.from = seq, .upto = seq};
	InFlight *last = cursor->count > 0 ? &cursor->inFlight[cursor->count - 1] : NULL;

	if (last != NULL && last->txid == 0 && last->stamp == 0 && last->upto == seq - 1)
		last->upto = seq;
	else
		CursorAdd(cursor, &part);
}

static int
CompareParts(const void *a, const void *b)
{
	int64 left = ((const InFlight *) a)->from;
	int64 right = ((const InFlight *) b)->from;

	return left < right ? -1 : left > right;
}

/*
 * CursorSweepBegin prepares to ask a cursor about rising numbers, in the current
 * memory context.  Sorts the parts of the cursor by where they begin; until the sweep
 * is over, nothing but their "from" may change, and that only upwards.
 */
void
CursorSweepBegin(CursorSweep *sweep, OutboxCursor *cursor)
{
	memset(sweep, 0, sizeof(CursorSweep));
	sweep->cursor = cursor;
	sweep->open = palloc(Max(1, cursor->count) * sizeof(int));
	if (cursor->count > 0)
		qsort(cursor->inFlight, cursor->count, sizeof(InFlight), CompareParts);
}

/*
 * CursorSweepTo moves a sweep to a number, which is not below the one before: its open
 * parts are those around that number.
 */
void
CursorSweepTo(CursorSweep *sweep, int64 seq)
{
	const InFlight *parts = sweep->cursor->inFlight;
	int kept = 0;

	for (int i = 0; i < sweep->openCount; i++)
	{
		if (parts[sweep->open[i]].upto >= seq)
			sweep->open[kept++] = sweep->open[i];
	}
	for (; sweep->next < sweep->cursor->count && parts[sweep->next].from <= seq; sweep->next++)
	{
		if (parts[sweep->next].upto >= seq)
			sweep->open[kept++] = sweep->next;
	}
	sweep->openCount = kept;
}

/*
 * CursorSweepHas tells whether the row of the number that the sweep is at, which
 * "txid" published, is among what was passed and not delivered.
 */
bool
CursorSweepHas(const CursorSweep *sweep, uint64 txid, int64 seq)
{
	for (int i = 0; i < sweep->openCount; i++)
	{
		const InFlight *part = &sweep->cursor->inFlight[sweep->open[i]];

		if (part->from <= seq && (part->txid == txid || part->txid == 0))
			return true;
	}
	return false;
}

/*
 * CursorAdopt turns a cursor of another cluster into one of ours, in which all
 * that was in flight there is over.
 */
void
CursorAdopt(OutboxCursor *cursor)
{
	for (int i = 0; i < cursor->count; i++)
	{
		cursor->inFlight[i].over = true;
		cursor->inFlight[i].stamp = 0;
	}
}

/*
 * CursorSafe returns the number up to which nothing is needed any more.
 */
int64
CursorSafe(const OutboxCursor *cursor)
{
	int64 safe = cursor->passed;

	for (int i = 0; i < cursor->count; i++)
		safe = Min(safe, cursor->inFlight[i].from - 1);
	return safe;
}

/*
 * CursorToArray returns the list as it is stored.
 */
ArrayType *
CursorToArray(const OutboxCursor *cursor)
{
	Datum *values = palloc(Max(1, cursor->count * TRIPLE) * sizeof(Datum));

	for (int i = 0; i < cursor->count; i++)
	{
		const InFlight *part = &cursor->inFlight[i];
		int64 who = part->txid != 0 ? (int64) part->txid : -(int64) part->stamp;

		if (part->txid != 0 && part->over)
			who |= OVER;
		values[i * TRIPLE] = Int64GetDatum(who);
		values[i * TRIPLE + 1] = Int64GetDatum(part->from);
		values[i * TRIPLE + 2] = Int64GetDatum(part->upto);
	}
	return construct_array(values, cursor->count * TRIPLE, INT8OID, sizeof(int64), FLOAT8PASSBYVAL,
						   TYPALIGN_DOUBLE);
}

/*
 * CursorFromArray fills a cursor from what is stored.  A list that is none,
 * which nobody but an administrator can have written, throws 22023.
 */
void
CursorFromArray(OutboxCursor *cursor, int64 passed, ArrayType *array)
{
	Datum *values;
	bool *nulls;
	int count;

	deconstruct_array(array, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE, &values,
					  &nulls, &count);
	if (count % TRIPLE != 0 || array_contains_nulls(array))
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("list of events in flight in idempotency.position is malformed"),
						errhint("Restore the row from a backup.")));

	CursorInit(cursor, passed);
	for (int i = 0; i < count; i += TRIPLE)
	{
		int64 who = DatumGetInt64(values[i]);
		InFlight part = {.from = DatumGetInt64(values[i + 1]),
						 .upto = DatumGetInt64(values[i + 2])};

		if (who > 0)
		{
			part.txid = (uint64) who & ~OVER;
			part.over = ((uint64) who & OVER) != 0;
		}
		else
			part.stamp = (uint64) -who;
		CursorAdd(cursor, &part);
	}
}
