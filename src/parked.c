/*-------------------------------------------------------------------------
 *
 * parked.c
 *	  The table idempotency.parked: events that failed, and what there is of them.
 *
 * A parked event is a copy, so that the outbox may forget the original.  It is in
 * one of three states:
 *
 *	due		retry_at is set: it is given again from then on
 *	waiting	an earlier event of its aggregate is parked: it is given again when
 *			that one has left
 *	dead	dead_at is set: a dead letter, until somebody redrives it
 *
 * Within an aggregate the events that are due are earlier than those that wait,
 * and of two that are due the earlier is not due later; ORDER BY retry_at, seq
 * therefore gives those of an aggregate in the order of publishing.  Here they are
 * read; parkedwrite.c is where they come in, change state and leave.
 *
 * Locks: the caller holds the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "ownerquery.h"
#include "parked.h"

/* An event's attributes as they are in a parked row; the first is the batch. */
#define EVENT_SELECTION                                                                            \
	"SELECT $2, seq, id, aggregatetype, aggregateid, type, payload, headers, attempts" PLUS        \
	"1 AS attempts, published_at FROM idempotency.parked"

#define EVENT_RESULTS                                                                              \
	{                                                                                              \
		INT8OID, INT8OID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID, JSONOID, INT4OID,           \
			TIMESTAMPTZOID                                                                         \
	}

static OwnerQuery summaryQuery = {
	.table = "parked",
	.text =
		"SELECT (SELECT pg_catalog.min(retry_at) FROM idempotency.parked"
		" WHERE subscription" EQ "$1 AND retry_at IS NOT NULL) AS retry_at,"
		" EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND dead_at IS NULL),"
		" EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" GT
		"$2 AND seq" LE "$3)",
	.parameters = 3,
	.types = {TEXTOID, INT8OID, INT8OID},
	.results = {TIMESTAMPTZOID, BOOLOID, BOOLOID},
};

static OwnerQuery aheadQuery = {
	.table = "parked",
	.text = "SELECT seq FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" GT
			"$2 ORDER BY seq",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
	.results = {INT8OID},
};

static OwnerQuery dueQuery = {
	.table = "parked",
	.text = EVENT_SELECTION " WHERE subscription" EQ "$1 AND retry_at" LE "$3"
							" ORDER BY retry_at, seq LIMIT $4",
	.parameters = 4,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, INT4OID},
	.results = EVENT_RESULTS,
};

static OwnerQuery batchQuery = {
	.table = "parked",
	.text = EVENT_SELECTION OF_BATCH " ORDER BY retry_at, seq",
	.parameters = 5,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID, INT8OID, INT8OID},
	.results = EVENT_RESULTS,
};

static OwnerQuery hasQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" EQ "$2",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
};

static OwnerQuery blocksQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND aggregateid" EQ
			"$2 AND dead_at IS NULL LIMIT 1",
	.parameters = 2,
	.types = {TEXTOID, TEXTOID},
};

static OwnerQuery hasErrorQuery = {
	.table = "parked",
	.text = "SELECT EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" EQ
			"ANY ($2) AND error" EQ "$3)",
	.parameters = 3,
	.types = {TEXTOID, INT8ARRAYOID, TEXTOID},
	.results = {BOOLOID},
};

/*
 * ReadAhead reads the numbers of parked events above the position.
 */
static void
ReadAhead(const text *subscription, ParkedSummary *summary)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(summary->passed)};
	uint64 count = OwnerQueryRun(&aheadQuery, values, NULL);

	summary->ahead = MemoryContextAllocHuge(caller, Max(1, count) * sizeof(int64));
	summary->aheadCount = (int) count;
	for (uint64 row = 0; row < count; row++)
		summary->ahead[row] = DatumGetInt64(OwnerQueryValue(&aheadQuery, row, 1, NULL));
	OwnerQueryEnd();
}

/*
 * ParkedSummarize fills "summary" for reading the outbox from the cursor on, in the
 * current memory context.
 */
void
ParkedSummarize(const text *subscription, const OutboxCursor *cursor, ParkedSummary *summary)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(CursorSafe(cursor)),
					  Int64GetDatum(cursor->passed)};
	bool isnull;
	Datum next;

	summary->passed = cursor->passed;
	(void) OwnerQueryRun(&summaryQuery, values, NULL);
	next = OwnerQueryValue(&summaryQuery, 0, 1, &isnull);
	summary->next = isnull ? 0 : DatumGetTimestampTz(next);
	summary->live = DatumGetBool(OwnerQueryValue(&summaryQuery, 0, 2, NULL));
	summary->behind = DatumGetBool(OwnerQueryValue(&summaryQuery, 0, 3, NULL));
	OwnerQueryEnd();
	ReadAhead(subscription, summary);
}

/*
 * EventsOf returns the events that a query selects, in the current memory
 * context.
 */
static List *
EventsOf(OwnerQuery *query, Datum *values)
{
	MemoryContext caller = CurrentMemoryContext;
	uint64 count = OwnerQueryRun(query, values, NULL);
	MemoryContext spi = MemoryContextSwitchTo(caller);
	List *events = NIL;

	for (uint64 row = 0; row < count; row++)
	{
		Datum columns[EVENT_COLUMNS];
		bool isnull[EVENT_COLUMNS] = {false};

		for (int i = 0; i < EVENT_COLUMNS; i++)
			columns[i] = OwnerQueryValue(query, row, i + 1, EventMayLack(i) ? &isnull[i] : NULL);
		events = lappend(events, EventCopy(columns, isnull));
	}
	MemoryContextSwitchTo(spi);
	OwnerQueryEnd();
	return events;
}

/*
 * ParkedDue returns the events that are to be given again by now, "max" at most.
 */
List *
ParkedDue(const text *subscription, TimestampTz now, int max, int64 batch)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(batch), TimestampTzGetDatum(now),
					  Int32GetDatum(max)};

	return EventsOf(&dueQuery, values);
}

/*
 * ParkedBatchValues fills the parameters of a query with OF_BATCH, of which the
 * batch has to have some.
 */
void
ParkedBatchValues(const text *subscription, const Position *position, Datum *values)
{
	int64 first = PG_INT64_MAX;
	int64 last = PG_INT64_MIN;

	for (int i = 0; i < position->parkedCount; i++)
	{
		first = Min(first, position->parked[i]);
		last = Max(last, position->parked[i]);
	}
	values[0] = PointerGetDatum(subscription);
	values[1] = Int64GetDatum(position->batch);
	values[2] = PointerGetDatum(NumbersToArray(position->parked, position->parkedCount));
	values[3] = Int64GetDatum(first);
	values[4] = Int64GetDatum(last);
}

/*
 * ParkedInBatch returns the parked events that are in the batch that is out.
 */
List *
ParkedInBatch(const text *subscription, const Position *position)
{
	Datum values[5];

	if (position->parkedCount == 0)
		return NIL;
	ParkedBatchValues(subscription, position, values);
	return EventsOf(&batchQuery, values);
}

/*
 * ParkedHas tells whether an event of the outbox is parked.
 */
bool
ParkedHas(const text *subscription, const ParkedSummary *summary, int64 seq)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(seq)};

	if (seq > summary->passed)
		return NumbersFind(summary->ahead, summary->aheadCount, seq) >= 0;
	return summary->behind && OwnerQueryDo(&hasQuery, values, NULL) > 0;
}

/*
 * ParkedBlocks tells whether an event has to wait for another of its aggregate
 * that is parked.
 */
bool
ParkedBlocks(const text *subscription, const ParkedSummary *summary, const Event *event)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_AGGREGATE]};

	return summary->live && !event->isnull[EVENT_AGGREGATE] &&
		   OwnerQueryDo(&blocksQuery, values, NULL) > 0;
}

/*
 * ParkedHasError tells whether one of the events has failed before, and with that
 * error the last time.
 */
bool
ParkedHasError(const text *subscription, const List *events, const text *error)
{
	int64 *retried = palloc(Max(1, list_length(events)) * sizeof(int64));
	Datum values[] = {PointerGetDatum(subscription), 0, PointerGetDatum(error)};
	int count = 0;
	ListCell *cell;
	bool has;

	foreach (cell, events)
	{
		const Event *event = lfirst(cell);

		if (DatumGetInt32(event->values[EVENT_ATTEMPT]) > 1)
			retried[count++] = EventSeq(event);
	}
	if (count == 0)
		return false;
	values[1] = PointerGetDatum(NumbersToArray(retried, count));
	(void) OwnerQueryRun(&hasErrorQuery, values, NULL);
	has = DatumGetBool(OwnerQueryValue(&hasErrorQuery, 0, 1, NULL));
	OwnerQueryEnd();
	return has;
}
