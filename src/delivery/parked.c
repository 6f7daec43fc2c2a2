/*-------------------------------------------------------------------------
 *
 * delivery/parked.c
 *	  The table idempotency.parked: events that failed, or wait for one that did.
 *
 * README.md describes the states and the order that they keep.  Every function here keeps
 * it, but for ParkedRequeue(), after which the caller calls ParkedRestoreOrder().
 *
 * Locks: the caller holds the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/query.h"
#include "delivery/parked.h"

/* The parked events of a batch, with the parameters of BatchValues().  The numbers come
 * with their bounds: a plan without them can read all dead letters. */
#define OF_BATCH " WHERE subscription" EQ "$1 AND seq" EQ "ANY ($3) AND seq" GE "$4 AND seq" LE "$5"

/* The attributes of an event, from a parked row; the first is the batch. */
#define EVENT_SELECTION                                                                            \
	"SELECT $2, seq, id, aggregatetype, aggregateid, type, payload, headers, attempts" PLUS        \
	"1 AS attempts, published_at FROM idempotency.parked"

#define EVENT_RESULTS                                                                              \
	{                                                                                              \
		INT8OID, INT8OID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID, JSONOID, INT4OID,           \
			TIMESTAMPTZOID                                                                         \
	}

static ExtensionQuery summaryQuery = {
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

static ExtensionQuery aheadQuery = {
	.table = "parked",
	.text = "SELECT seq FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" GT
			"$2 ORDER BY seq",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
	.results = {INT8OID},
};

static ExtensionQuery readyQuery = {
	.table = "parked",
	.text = EVENT_SELECTION " WHERE subscription" EQ "$1 AND retry_at" LE "$3"
							" ORDER BY retry_at, seq LIMIT $4",
	.parameters = 4,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, INT4OID},
	.results = EVENT_RESULTS,
};

static ExtensionQuery batchQuery = {
	.table = "parked",
	.text = EVENT_SELECTION OF_BATCH " ORDER BY retry_at, seq",
	.parameters = 5,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID, INT8OID, INT8OID},
	.results = EVENT_RESULTS,
};

static ExtensionQuery hasQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" EQ "$2",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
};

static ExtensionQuery blocksQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND aggregateid" EQ
			"$2 AND dead_at IS NULL LIMIT 1",
	.parameters = 2,
	.types = {TEXTOID, TEXTOID},
};

static ExtensionQuery hasErrorQuery = {
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
	uint64 count = ExtensionQueryRun(&aheadQuery, values, NULL);

	summary->ahead = MemoryContextAllocHuge(caller, Max(1, count) * sizeof(int64));
	summary->aheadCount = (int) count;
	for (uint64 row = 0; row < count; row++)
		summary->ahead[row] = DatumGetInt64(ExtensionQueryValue(&aheadQuery, row, 1, NULL));
	ExtensionQueryEnd();
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
	(void) ExtensionQueryRun(&summaryQuery, values, NULL);
	next = ExtensionQueryValue(&summaryQuery, 0, 1, &isnull);
	summary->next = isnull ? 0 : DatumGetTimestampTz(next);
	summary->live = DatumGetBool(ExtensionQueryValue(&summaryQuery, 0, 2, NULL));
	summary->behind = DatumGetBool(ExtensionQueryValue(&summaryQuery, 0, 3, NULL));
	ExtensionQueryEnd();
	ReadAhead(subscription, summary);
}

/*
 * EventsOf returns the events that a query selects, in the current memory context.
 */
static List *
EventsOf(ExtensionQuery *query, Datum *values)
{
	MemoryContext caller = CurrentMemoryContext;
	uint64 count = ExtensionQueryRun(query, values, NULL);
	MemoryContext spi = MemoryContextSwitchTo(caller);
	List *events = NIL;

	for (uint64 row = 0; row < count; row++)
	{
		Datum columns[EVENT_COLUMNS];
		bool isnull[EVENT_COLUMNS] = {false};

		for (int i = 0; i < EVENT_COLUMNS; i++)
			columns[i] =
				ExtensionQueryValue(query, row, i + 1, EventMayLack(i) ? &isnull[i] : NULL);
		events = lappend(events, EventCopy(columns, isnull));
	}
	MemoryContextSwitchTo(spi);
	ExtensionQueryEnd();
	return events;
}

/*
 * ParkedReady returns the events whose retry time has come, "max" at most.
 */
List *
ParkedReady(const text *subscription, TimestampTz now, int max, int64 batch)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(batch), TimestampTzGetDatum(now),
					  Int32GetDatum(max)};

	return EventsOf(&readyQuery, values);
}

/*
 * BatchValues fills the parameters of a query with OF_BATCH.  The batch has parked
 * events.
 */
static void
BatchValues(const text *subscription, const Position *position, Datum *values)
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
 * ParkedInBatch returns the parked events of the batch that is out.
 */
List *
ParkedInBatch(const text *subscription, const Position *position)
{
	Datum values[5];

	if (position->parkedCount == 0)
		return NIL;
	BatchValues(subscription, position, values);
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
	return summary->behind && ExtensionQueryDo(&hasQuery, values, NULL) > 0;
}

/*
 * ParkedBlocks tells whether an event has to wait for a parked one of its aggregate.
 */
bool
ParkedBlocks(const text *subscription, const ParkedSummary *summary, const Event *event)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_AGGREGATE]};

	return summary->live && !event->isnull[EVENT_AGGREGATE] &&
		   ExtensionQueryDo(&blocksQuery, values, NULL) > 0;
}

/*
 * ParkedHasError tells whether one of the events has failed before, the last time with
 * that error.
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
	(void) ExtensionQueryRun(&hasErrorQuery, values, NULL);
	has = DatumGetBool(ExtensionQueryValue(&hasErrorQuery, 0, 1, NULL));
	ExtensionQueryEnd();
	return has;
}

/* ----------------------------------------------------------------
 * Writing
 * ----------------------------------------------------------------
 */

/* A qualified operator, like those of base/query.h. */
#define NE " OPERATOR(pg_catalog.<>) "

#define COPIED                                                                                     \
	"subscription, seq, published_at, id, aggregatetype, aggregateid, type, payload, headers"
static ExtensionQuery waitQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", attempts)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)"
			" ON CONFLICT (subscription, seq) DO UPDATE SET retry_at = NULL",
	.parameters = 9,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID},
};

static ExtensionQuery requeueQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", attempts, retry_at)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10)"
			" ON CONFLICT (subscription, seq) DO NOTHING",
	.parameters = 10,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID, TIMESTAMPTZOID},
};

static ExtensionQuery failQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked AS p (" COPIED ", attempts,"
			" error, first_failed_at, last_failed_at, retry_at, dead_at)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $12, $13,"
			" CASE WHEN $13 IS NULL THEN $12 END)"
			" ON CONFLICT (subscription, seq) DO UPDATE SET attempts = excluded.attempts,"
			" error = excluded.error, last_failed_at = excluded.last_failed_at,"
			" first_failed_at = coalesce(p.first_failed_at, excluded.first_failed_at),"
			" retry_at = excluded.retry_at, dead_at = excluded.dead_at",
	.parameters = 13,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID, INT4OID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID},
};

static ExtensionQuery holdQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked SET retry_at = NULL WHERE subscription" EQ
			"$1 AND aggregateid" EQ "$2 AND seq" GT "$3 AND retry_at IS NOT NULL",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, INT8OID},
};

/*
 * At most 100 of an aggregate: if the first fails, the others are held again.  Scheduled
 * events have an index of their own, in which waiting ones are not met.
 */
static ExtensionQuery releaseQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET retry_at = $3"
			" WHERE subscription" EQ "$1 AND seq" EQ "ANY (ARRAY (SELECT waiting.seq"
			" FROM idempotency.parked AS waiting"
			" WHERE waiting.subscription" EQ "$1 AND waiting.aggregateid" EQ "$2"
			" AND waiting.dead_at IS NULL AND waiting.retry_at IS NULL"
			" ORDER BY waiting.seq LIMIT 100))"
			" AND NOT EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "$2"
			" AND earlier.retry_at IS NOT NULL)",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, TIMESTAMPTZOID},
};

static ExtensionQuery acknowledgeQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked" OF_BATCH " RETURNING aggregateid",
	.parameters = 5,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID, INT8OID, INT8OID},
	.results = {TEXTOID},
};

static ExtensionQuery redriveQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET dead_at = NULL, attempts = 0, retry_at = $3"
			" WHERE subscription" EQ "$1 AND dead_at IS NOT NULL AND ($2 IS NULL OR id" EQ "$2)",
	.parameters = 3,
	.types = {TEXTOID, UUIDOID, TIMESTAMPTZOID},
};

/*
 * Of an aggregate with events that are scheduled at $2 and others that are not, only the
 * first scheduled one stays so.  An event that committed late can wait below it: if it
 * counted as the first, nothing would be scheduled, and the aggregate would wait forever.
 * The events that are scheduled at $2 lead to the aggregates, so that no others are read,
 * however many there are.
 */
static ExtensionQuery orderQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET retry_at = NULL WHERE p.subscription" EQ "$1"
			" AND p.retry_at IS NOT NULL AND p.aggregateid" EQ
			"ANY (ARRAY (SELECT m.aggregateid FROM (SELECT DISTINCT aggregateid"
			" FROM idempotency.parked WHERE subscription" EQ "$1 AND retry_at" EQ
			"$2 AND aggregateid IS NOT NULL) AS m"
			" WHERE EXISTS (SELECT FROM idempotency.parked AS other"
			" WHERE other.subscription" EQ "$1 AND other.aggregateid" EQ "m.aggregateid"
			" AND other.dead_at IS NULL AND coalesce(other.retry_at" NE "$2, true))))"
			" AND EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "p.aggregateid"
			" AND earlier.retry_at IS NOT NULL AND earlier.seq" LT "p.seq)",
	.parameters = 2,
	.types = {TEXTOID, TIMESTAMPTZOID},
};

static ExtensionQuery deleteQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked WHERE subscription" EQ "$1",
	.parameters = 1,
	.types = {TEXTOID},
};

/*
 * ToCopied fills the parameters for the columns in COPIED.
 */
static void
ToCopied(const text *subscription, const Event *event, Datum *values, bool *isnull)
{
	static const int attributes[] = {EVENT_SEQ,		EVENT_PUBLISHED_AT, EVENT_ID,
									 EVENT_TOPIC,	EVENT_AGGREGATE,	EVENT_TYPE,
									 EVENT_PAYLOAD, EVENT_HEADERS};

	values[0] = PointerGetDatum(subscription);
	isnull[0] = false;
	for (size_t i = 0; i < lengthof(attributes); i++)
	{
		values[i + 1] = event->values[attributes[i]];
		isnull[i + 1] = event->isnull[attributes[i]];
	}
}

/*
 * ParkedWait parks an event behind an earlier one of its aggregate.
 */
void
ParkedWait(const text *subscription, const Event *event)
{
	Datum values[9];
	bool isnull[9];

	ToCopied(subscription, event, values, isnull);
	InjectionPoint("parked-wait");
	(void) ExtensionQueryDo(&waitQuery, values, isnull);
}

/*
 * ParkedRequeue parks an event that has not failed, to be redelivered from "retryAt" on,
 * unless it is parked.
 */
void
ParkedRequeue(const text *subscription, const Event *event, TimestampTz retryAt)
{
	Datum values[10];
	bool isnull[10] = {false};

	ToCopied(subscription, event, values, isnull);
	values[9] = TimestampTzGetDatum(retryAt);
	InjectionPoint("parked-requeue");
	(void) ExtensionQueryDo(&requeueQuery, values, isnull);
}

/*
 * ParkedRestoreOrder restores the order within the aggregates of which some events have
 * just been scheduled at "retryAt", where others were parked before.
 */
void
ParkedRestoreOrder(const text *subscription, TimestampTz retryAt)
{
	Datum values[] = {PointerGetDatum(subscription), TimestampTzGetDatum(retryAt)};

	InjectionPoint("parked-order");
	(void) ExtensionQueryDo(&orderQuery, values, NULL);
}

/*
 * ParkedFail parks an event that failed until "retryAt"; 0 makes it a dead letter.
 */
void
ParkedFail(const text *subscription, const Event *event, const text *error, TimestampTz retryAt)
{
	Datum values[13];
	bool isnull[13] = {false};

	ToCopied(subscription, event, values, isnull);
	values[9] = event->values[EVENT_ATTEMPT];
	values[10] = PointerGetDatum(error);
	isnull[10] = error == NULL;
	values[11] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[12] = TimestampTzGetDatum(retryAt);
	isnull[12] = retryAt == 0;
	InjectionPoint("parked-fail");
	(void) ExtensionQueryDo(&failQuery, values, isnull);
}

/*
 * ParkedHoldFollowers makes the later parked events of the same aggregate wait behind
 * this one.
 */
void
ParkedHoldFollowers(const text *subscription, const Event *event)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_AGGREGATE],
					  event->values[EVENT_SEQ]};

	InjectionPoint("parked-hold");
	(void) ExtensionQueryDo(&holdQuery, values, NULL);
}

/*
 * ParkedRelease schedules the waiting events of an aggregate of which none is scheduled.
 * All are scheduled at the same time, so that their numbers give the order.
 */
void
ParkedRelease(const text *subscription, const text *aggregate)
{
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(aggregate),
					  TimestampTzGetDatum(GetCurrentTimestamp())};

	InjectionPoint("parked-release");
	(void) ExtensionQueryDo(&releaseQuery, values, NULL);
}

static int
CompareAggregates(const ListCell *a, const ListCell *b)
{
	return strcmp(lfirst(a), lfirst(b));
}

/*
 * ParkedAcknowledge removes the parked events of an acknowledged batch, and releases
 * those that waited for them: aggregate by aggregate, however many events of it there
 * were.
 */
void
ParkedAcknowledge(const text *subscription, const Position *position)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum values[5];
	List *aggregates = NIL;
	const char *last = NULL;
	ListCell *cell;
	uint64 count;

	if (position->parkedCount == 0)
		return;
	BatchValues(subscription, position, values);
	InjectionPoint("parked-acknowledge");
	count = ExtensionQueryRun(&acknowledgeQuery, values, NULL);
	for (uint64 row = 0; row < count; row++)
	{
		bool isnull;
		Datum aggregate = ExtensionQueryValue(&acknowledgeQuery, row, 1, &isnull);
		MemoryContext spi = MemoryContextSwitchTo(caller);

		if (!isnull)
			aggregates = lappend(aggregates, TextDatumGetCString(aggregate));
		MemoryContextSwitchTo(spi);
	}
	ExtensionQueryEnd();
	list_sort(aggregates, CompareAggregates);
	foreach (cell, aggregates)
	{
		if (last == NULL || strcmp(last, lfirst(cell)) != 0)
			ParkedRelease(subscription, cstring_to_text(lfirst(cell)));
		last = lfirst(cell);
	}
}

/*
 * ParkedRedrive schedules a dead letter again, or all of them if "id" is NULL, with no
 * failures: all at the same time, which keeps their order.  Later parked events of the
 * aggregate wait for it.  Returns how many.
 */
int64
ParkedRedrive(const text *subscription, const pg_uuid_t *id)
{
	TimestampTz now = GetCurrentTimestamp();
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(id), TimestampTzGetDatum(now)};
	bool isnull[] = {false, id == NULL, false};
	int64 count = (int64) ExtensionQueryDo(&redriveQuery, values, isnull);

	if (count > 0)
		ParkedRestoreOrder(subscription, now);
	return count;
}

/*
 * ParkedDelete removes all parked events of a subscription.
 */
void
ParkedDelete(const text *subscription)
{
	Datum values[] = {PointerGetDatum(subscription)};

	(void) ExtensionQueryDo(&deleteQuery, values, NULL);
}
