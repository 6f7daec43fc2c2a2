/*-------------------------------------------------------------------------
 *
 * outbox/cursor.c
 *	  The cursor of a subscription: a number, and what was in flight below it.
 *
 * Numbers are assigned before commits, so a number alone would lose events that commit
 * late.  The cursor therefore has a list of what was passed and not delivered: for a
 * transaction, a range of numbers in which it published; for a hole, numbers that had no
 * row.  A transaction has one range, and more only where its events lie far apart.
 *
 * A table stores the list as an array of triples: the transaction, from, up to.  For a
 * hole the first is the stamp, negative; for numbers to deliver later it is 0.  A transaction
 * of another cluster is marked as ended, since its id can occur in this cluster as well.
 *
 * Takes no locks, reads no tables.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"

#include "outbox/cursor.h"

#define TRIPLE 3

/* A part of the list covers a gap of so many numbers, which are read again for it. */
#define MAX_GAP 10000

/* Marks a transaction as ended; no transaction id is that large. */
#define ENDED (UINT64CONST(1) << 62)

/*
 * CursorInit makes a cursor after a number, with nothing in flight.
 */
void
CursorInit(OutboxCursor *cursor, int64 passed)
{
	memset(cursor, 0, sizeof(OutboxCursor));
	cursor->passed = passed;
}

/*
 * CursorAdd adds a part to the list, unless it is empty, in the current memory context.
 */
void
CursorAdd(OutboxCursor *cursor, const InFlight *part)
{
	if (part->from > part->upto)
		return;
	if (cursor->count == cursor->capacity)
	{
		cursor->capacity = Max(8, 2 * cursor->capacity);
		cursor->inFlight = cursor->inFlight == NULL
							   ? palloc(cursor->capacity * sizeof(InFlight))
							   : repalloc(cursor->inFlight, cursor->capacity * sizeof(InFlight));
	}
	cursor->inFlight[cursor->count++] = *part;
}

/*
 * CursorAddRow adds a row of a transaction that is not visible yet.  Rows that lie far
 * apart get a part each, so that the numbers between them are not read again.
 */
void
CursorAddRow(OutboxCursor *cursor, uint64 txid, int64 seq)
{
	InFlight part = {.txid = txid, .from = seq, .upto = seq};

	for (int i = 0; i < cursor->count; i++)
	{
		InFlight *known = &cursor->inFlight[i];

		if (known->txid == txid && !known->ended && seq >= known->from - MAX_GAP &&
			seq <= known->upto + MAX_GAP)
		{
			known->from = Min(known->from, seq);
			known->upto = Max(known->upto, seq);
			return;
		}
	}
	CursorAdd(cursor, &part);
}

/*
 * CursorAddNumber adds a number to deliver later, whichever transaction published it.
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
	const InFlight *left = a;
	const InFlight *right = b;

	if (left->txid != right->txid)
		return left->txid < right->txid ? -1 : 1;
	return left->from < right->from ? -1 : left->from > right->from;
}

/*
 * CursorSort prepares a cursor for CursorFind(): sorts the parts by transaction and "from",
 * and joins those of a transaction that overlap.
 */
void
CursorSort(OutboxCursor *cursor)
{
	InFlight *parts = cursor->inFlight;
	int count = 0;

	if (cursor->count > 0)
		qsort(parts, cursor->count, sizeof(InFlight), CompareParts);
	for (int i = 0; i < cursor->count; i++)
	{
		InFlight *last = count > 0 ? &parts[count - 1] : NULL;

		if (last != NULL && last->txid == parts[i].txid && last->upto >= parts[i].from)
			last->upto = Max(last->upto, parts[i].upto);
		else
			parts[count++] = parts[i];
	}
	cursor->count = count;
}

/*
 * CursorFind returns the part of a transaction, or with 0 the hole or the numbers, that
 * has the number, or NULL.  The cursor is sorted; since then, only the "from" of its parts
 * can have changed, and only upwards.
 */
InFlight *
CursorFind(const OutboxCursor *cursor, uint64 txid, int64 seq)
{
	const InFlight key = {.txid = txid, .from = seq};
	int low = 0; /* the parts before this one do not begin after the key */
	int high = cursor->count;

	while (low < high)
	{
		int middle = low + (high - low) / 2;

		if (CompareParts(&cursor->inFlight[middle], &key) <= 0)
			low = middle + 1;
		else
			high = middle;
	}
	if (low > 0 && cursor->inFlight[low - 1].txid == txid && cursor->inFlight[low - 1].upto >= seq)
		return &cursor->inFlight[low - 1];
	return NULL;
}

/*
 * CursorHas tells whether the row that "txid" published under the number was passed and
 * not delivered.  The cursor is sorted.
 */
bool
CursorHas(const OutboxCursor *cursor, uint64 txid, int64 seq)
{
	return CursorFind(cursor, 0, seq) != NULL || CursorFind(cursor, txid, seq) != NULL;
}

/*
 * CursorAdopt turns a cursor of another cluster into one of this cluster, in which all
 * that was in flight has ended.
 */
void
CursorAdopt(OutboxCursor *cursor)
{
	for (int i = 0; i < cursor->count; i++)
	{
		cursor->inFlight[i].ended = true;
		cursor->inFlight[i].stamp = 0;
	}
}

/*
 * NumbersToArray returns numbers as a bigint[].
 */
ArrayType *
NumbersToArray(const int64 *numbers, int count)
{
	Datum *values = palloc(Max(1, count) * sizeof(Datum));

	for (int i = 0; i < count; i++)
		values[i] = Int64GetDatum(numbers[i]);
	return construct_array(values, count, INT8OID, sizeof(int64), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE);
}

/*
 * NumbersFromArray returns the numbers in a bigint[], in place.  Throws 22023 unless their
 * count is a multiple of "multiple", and none is NULL, which only an administrator can have
 * written.
 */
int64 *
NumbersFromArray(ArrayType *array, int multiple, int *count)
{
	*count = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	if (*count % multiple != 0 || ARR_HASNULL(array))
		ereport(ERROR, (errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						errmsg("list of events in flight in idempotency.position is malformed"),
						errhint("Restore the row from a backup.")));
	return (int64 *) ((char *) array + ARR_OVERHEAD_NONULLS(ARR_NDIM(array)));
}

/*
 * CursorToArray returns the list in its stored form.
 */
ArrayType *
CursorToArray(const OutboxCursor *cursor)
{
	int64 *numbers = palloc(Max(1, cursor->count) * TRIPLE * sizeof(int64));

	for (int i = 0; i < cursor->count; i++)
	{
		const InFlight *part = &cursor->inFlight[i];
		int64 owner = part->txid != 0 ? (int64) part->txid : -(int64) part->stamp;

		if (part->txid != 0 && part->ended)
			owner |= ENDED;
		numbers[i * TRIPLE] = owner;
		numbers[i * TRIPLE + 1] = part->from;
		numbers[i * TRIPLE + 2] = part->upto;
	}
	return NumbersToArray(numbers, cursor->count * TRIPLE);
}

/*
 * CursorFromArray fills a cursor from its stored form.  Throws as NumbersFromArray() does.
 */
void
CursorFromArray(OutboxCursor *cursor, int64 passed, ArrayType *array)
{
	int count;
	const int64 *numbers = NumbersFromArray(array, TRIPLE, &count);

	CursorInit(cursor, passed);
	for (int i = 0; i < count; i += TRIPLE)
	{
		InFlight part = {.from = numbers[i + 1], .upto = numbers[i + 2]};

		if (numbers[i] > 0)
		{
			part.txid = (uint64) numbers[i] & ~ENDED;
			part.ended = ((uint64) numbers[i] & ENDED) != 0;
		}
		else
			part.stamp = (uint64) -numbers[i];
		CursorAdd(cursor, &part);
	}
}
