/*-------------------------------------------------------------------------
 *
 * delivery/parked.c
 *	  The table idempotency.parked: events that failed, or wait for one that did.
 *
 * README.md describes the states and the order that they keep, which ParkedCheckOrder()
 * checks after each change.  A caller of ParkedAdd() with a time calls ParkedRestoreOrder(),
 * and one that removes events from the order calls ParkedRelease().
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

#include "base/compat.h"
#include "base/query.h"
#include "delivery/parked.h"

/* The parked events with these numbers.  The bounds of the numbers are there because a plan
 * without them can read all dead letters. */
#define OF_NUMBERS                                                                                 \
	" WHERE subscription" EQ "$1 AND seq" EQ "ANY ($2) AND seq" GE                                 \
	"(SELECT pg_catalog.min(n) FROM pg_catalog.unnest($2) AS n) AND seq" LE                        \
	"(SELECT pg_catalog.max(n) FROM pg_catalog.unnest($2) AS n)"

/* The attributes of an event, from a parked row; the first is the batch. */
#define EVENT_SELECTION                                                                            \
	"SELECT $3, seq, id, aggregatetype, aggregateid, type, payload, headers, attempts" PLUS        \
	"1 AS attempts, published_at FROM idempotency.parked"

/* Their types, without the first. */
#define EVENT_TYPES                                                                                \
	INT8OID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID, JSONOID, INT4OID, TIMESTAMPTZOID

static ExtensionQuery nextQuery = {
	.table = "parked",
	.text =
		"SELECT (SELECT pg_catalog.min(retry_at) FROM idempotency.parked"
		" WHERE subscription" EQ "$1 AND retry_at IS NOT NULL) AS retry_at,"
		" EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND dead_at IS NULL)",
	.parameters = 1,
	.types = {TEXTOID},
	.results = {TIMESTAMPTZOID, BOOLOID},
};

static ExtensionQuery readyQuery = {
	.table = "parked",
	.text = EVENT_SELECTION " WHERE subscription" EQ "$1 AND retry_at" LE "$2"
							" ORDER BY retry_at, seq LIMIT $4",
	.parameters = 4,
	.types = {TEXTOID, TIMESTAMPTZOID, INT8OID, INT4OID},
	.results = {INT8OID, EVENT_TYPES},
};

static ExtensionQuery batchQuery = {
	.table = "parked",
	.text = EVENT_SELECTION OF_NUMBERS " ORDER BY retry_at, seq",
	.parameters = 3,
	.types = {TEXTOID, INT8ARRAYOID, INT8OID},
	.results = {INT8OID, EVENT_TYPES},
};

static ExtensionQuery numbersQuery = {
	.table = "parked",
	.text = "SELECT seq FROM idempotency.parked" OF_NUMBERS " ORDER BY seq",
	.parameters = 2,
	.types = {TEXTOID, INT8ARRAYOID},
	.results = {INT8OID},
};

static ExtensionQuery blocksQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND aggregateid" EQ
			"$2 AND dead_at IS NULL AND seq" LT "$3 LIMIT 1",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, INT8OID},
};

static ExtensionQuery hasErrorQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked" OF_NUMBERS " AND error" EQ "$3 LIMIT 1",
	.parameters = 3,
	.types = {TEXTOID, INT8ARRAYOID, TEXTOID},
};

/*
 * ParkedNext returns when the first event is redelivered, or 0 if none is.  Sets "live":
 * some events are not dead, so that later ones can have to wait.
 */
TimestampTz
ParkedNext(const text *subscription, bool *live)
{
	Datum values[] = {PointerGetDatum(subscription)};
	bool isnull;
	TimestampTz next;

	(void) ExtensionQueryRun(&nextQuery, values, NULL);
	next = DatumGetTimestampTz(ExtensionQueryValue(&nextQuery, 0, 1, &isnull));
	*live = DatumGetBool(ExtensionQueryValue(&nextQuery, 0, 2, NULL));
	ExtensionQueryEnd();
	return isnull ? 0 : next;
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
		{
			bool mayLack = i >= EVENT_AGGREGATE && i <= EVENT_HEADERS;

			columns[i] = ExtensionQueryValue(query, row, i + 1, mayLack ? &isnull[i] : NULL);
		}
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
	Datum values[] = {PointerGetDatum(subscription), TimestampTzGetDatum(now), Int64GetDatum(batch),
					  Int32GetDatum(max)};

	return EventsOf(&readyQuery, values);
}

/*
 * ParkedInBatch returns the parked events of the batch that is out.
 */
List *
ParkedInBatch(const text *subscription, const Position *position)
{
	Datum values[] = {PointerGetDatum(subscription),
					  PointerGetDatum(NumbersToArray(position->parked, position->parkedCount)),
					  Int64GetDatum(position->batch)};

	return position->parkedCount == 0 ? NIL : EventsOf(&batchQuery, values);
}

static int64
NumberIn(uint64 row)
{
	return DatumGetInt64(ExtensionQueryValue(&numbersQuery, row, 1, NULL));
}

/*
 * NumbersOf returns the numbers of events as an array.
 */
static Datum
NumbersOf(const List *events)
{
	int64 *numbers = palloc(Max(1, list_length(events)) * sizeof(int64));
	ListCell *cell;

	foreach (cell, events)
		numbers[foreach_current_index(cell)] = EventSeq(lfirst(cell));
	return PointerGetDatum(NumbersToArray(numbers, list_length(events)));
}

/*
 * ParkedRemoveFrom removes the events that are parked from a list of events of the outbox,
 * which are in the order of their numbers.  Returns the list.
 */
List *
ParkedRemoveFrom(List *events, const text *subscription)
{
	Datum values[] = {PointerGetDatum(subscription), NumbersOf(events)};
	uint64 row = 0;
	uint64 count;
	ListCell *cell;

	if (events == NIL)
		return NIL;
	count = ExtensionQueryRun(&numbersQuery, values, NULL);
	foreach (cell, events)
	{
		while (row < count && NumberIn(row) < EventSeq(lfirst(cell)))
			row++;
		if (row < count && NumberIn(row) == EventSeq(lfirst(cell)))
			events = foreach_delete_current(events, cell);
	}
	ExtensionQueryEnd();
	return events;
}

/*
 * ParkedBlocks tells whether an event has to wait for an earlier one of its aggregate.  One
 * that committed late does not wait for later ones.
 */
bool
ParkedBlocks(const text *subscription, const Event *event)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_AGGREGATE],
					  event->values[EVENT_SEQ]};

	return !event->isnull[EVENT_AGGREGATE] && ExtensionQueryDo(&blocksQuery, values, NULL) > 0;
}

/*
 * ParkedHasError tells whether one of the events is parked with that error.
 */
bool
ParkedHasError(const text *subscription, const List *events, const text *error)
{
	Datum values[] = {PointerGetDatum(subscription), NumbersOf(events), PointerGetDatum(error)};

	return ExtensionQueryDo(&hasErrorQuery, values, NULL) > 0;
}

/* ----------------------------------------------------------------
 * Writing
 * ----------------------------------------------------------------
 */

/* A qualified operator, like those of base/query.h. */
#define NE " OPERATOR(pg_catalog.<>) "

/* The columns of the attributes of an event, and their parameters; the first is not the batch. */
#define COPIED                                                                                     \
	"subscription, seq, id, aggregatetype, aggregateid, type, payload, headers, attempts,"         \
	" published_at"

/*
 * An event without a time waits.  One that committed late, so that a later event of its
 * aggregate is scheduled, takes the time of that one.
 */
static ExtensionQuery addQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", retry_at)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9 OPERATOR(pg_catalog.-) 1, $10,"
			" coalesce($11, (SELECT pg_catalog.min(later.retry_at) FROM idempotency.parked AS later"
			" WHERE later.subscription" EQ "$1 AND later.aggregateid" EQ "$5"
			" AND later.retry_at IS NOT NULL AND later.seq" GT "$2)))"
			" ON CONFLICT (subscription, seq) DO NOTHING",
	.parameters = 11,
	.types = {TEXTOID, EVENT_TYPES, TIMESTAMPTZOID},
};

/*
 * The event is not scheduled before an earlier one of its aggregate: those that remain in
 * the batch, or that redrive() has scheduled meanwhile.
 */
static ExtensionQuery failQuery = {
	.table = "parked",
	.text =
		"INSERT INTO idempotency.parked AS p (" COPIED ","
		" error, first_failed_at, last_failed_at, retry_at, dead_at)"
		" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $12,"
		" (SELECT CASE WHEN $13 IS NULL OR pg_catalog.bool_or(earlier.retry_at IS NULL) THEN NULL"
		" ELSE greatest($13, pg_catalog.max(earlier.retry_at)) END"
		" FROM idempotency.parked AS earlier WHERE earlier.subscription" EQ
		"$1 AND earlier.aggregateid" EQ "$5 AND earlier.dead_at IS NULL AND earlier.seq" LT "$2),"
		" CASE WHEN $13 IS NULL THEN $12 END)"
		" ON CONFLICT (subscription, seq) DO UPDATE SET attempts = excluded.attempts,"
		" error = excluded.error, last_failed_at = excluded.last_failed_at,"
		" first_failed_at = coalesce(p.first_failed_at, excluded.first_failed_at),"
		" retry_at = excluded.retry_at, dead_at = excluded.dead_at",
	.parameters = 13,
	.types = {TEXTOID, EVENT_TYPES, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID},
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
			" WHERE p.subscription" EQ "$1 AND p.seq" EQ "ANY (ARRAY (SELECT first.seq"
			" FROM (SELECT DISTINCT id FROM pg_catalog.unnest($2) AS id) AS aggregate,"
			" LATERAL (SELECT waiting.seq FROM idempotency.parked AS waiting"
			" WHERE waiting.subscription" EQ "$1 AND waiting.aggregateid" EQ "aggregate.id"
			" AND waiting.dead_at IS NULL AND waiting.retry_at IS NULL"
			" AND NOT EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "aggregate.id"
			" AND earlier.retry_at IS NOT NULL)"
			" ORDER BY waiting.seq LIMIT 100) AS first))",
	.parameters = 3,
	.types = {TEXTOID, TEXTARRAYOID, TIMESTAMPTZOID},
};

static ExtensionQuery acknowledgeQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked" OF_NUMBERS " RETURNING aggregateid",
	.parameters = 2,
	.types = {TEXTOID, INT8ARRAYOID},
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
 * first one stays scheduled.  The events that are scheduled at $2 lead to the aggregates, so
 * that no others are read, however many there are.
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

/*
 * ToParameters fills the parameters for the columns in COPIED.
 */
static void
ToParameters(const text *subscription, const Event *event, Datum *values, bool *isnull)
{
	memcpy(values, event->values, sizeof(event->values));
	memcpy(isnull, event->isnull, sizeof(event->isnull));
	values[EVENT_BATCH] = PointerGetDatum(subscription);
}

/*
 * ParkedAdd parks an event that has not failed now, to be redelivered from "retryAt" on,
 * or with 0 behind an earlier one of its aggregate.  One that is parked stays as it is.
 */
void
ParkedAdd(const text *subscription, const Event *event, TimestampTz retryAt)
{
	Datum values[EVENT_COLUMNS + 1];
	bool isnull[EVENT_COLUMNS + 1];

	ToParameters(subscription, event, values, isnull);
	values[EVENT_COLUMNS] = TimestampTzGetDatum(retryAt);
	isnull[EVENT_COLUMNS] = retryAt == 0;
	InjectionPoint("parked-add");
	(void) ExtensionQueryDo(&addQuery, values, isnull);
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
	Datum values[EVENT_COLUMNS + 3];
	bool isnull[EVENT_COLUMNS + 3];

	ToParameters(subscription, event, values, isnull);
	values[EVENT_COLUMNS] = PointerGetDatum(error);
	isnull[EVENT_COLUMNS] = error == NULL;
	values[EVENT_COLUMNS + 1] = TimestampTzGetDatum(GetCurrentTimestamp());
	isnull[EVENT_COLUMNS + 1] = false;
	values[EVENT_COLUMNS + 2] = TimestampTzGetDatum(retryAt);
	isnull[EVENT_COLUMNS + 2] = retryAt == 0;
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
 * ParkedRelease schedules the waiting events of those aggregates of which none is scheduled.
 * All are scheduled at the same time, so that their numbers give the order.
 */
void
ParkedRelease(const text *subscription, Datum *aggregates, int count)
{
	ArrayType *array = construct_array(aggregates, count, TEXTOID, -1, false, TYPALIGN_INT);
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(array),
					  TimestampTzGetDatum(GetCurrentTimestamp())};

	InjectionPoint("parked-release");
	(void) ExtensionQueryDo(&releaseQuery, values, NULL);
}

/*
 * ParkedAcknowledge removes the parked events of an acknowledged batch, and releases
 * those that waited for them.
 */
void
ParkedAcknowledge(const text *subscription, const Position *position)
{
	Datum *aggregates = palloc(Max(1, position->parkedCount) * sizeof(Datum));
	Datum values[] = {PointerGetDatum(subscription),
					  PointerGetDatum(NumbersToArray(position->parked, position->parkedCount))};
	uint64 rows;
	int count = 0;

	if (position->parkedCount == 0)
		return;
	InjectionPoint("parked-acknowledge");
	rows = ExtensionQueryRun(&acknowledgeQuery, values, NULL);
	for (uint64 row = 0; row < rows; row++)
	{
		bool isnull;

		aggregates[count] = ExtensionQueryValue(&acknowledgeQuery, row, 1, &isnull);
		count += !isnull;
	}
	if (count > 0)
		ParkedRelease(subscription, aggregates, count);
	ExtensionQueryEnd();
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
	{
		ParkedRestoreOrder(subscription, now);
		ParkedCheckOrder(subscription);
	}
	return count;
}

/* ----------------------------------------------------------------
 * Checking
 * ----------------------------------------------------------------
 */

#ifdef USE_ASSERT_CHECKING
/*
 * An event that is scheduled although an earlier one of its aggregate waits or is scheduled
 * later, or that waits although nothing of its aggregate is scheduled.
 */
static ExtensionQuery disorderQuery = {
	.table = "parked",
	.text = "SELECT FROM idempotency.parked AS p WHERE p.subscription" EQ "$1"
			" AND p.dead_at IS NULL AND CASE WHEN p.retry_at IS NULL"
			" THEN NOT EXISTS (SELECT FROM idempotency.parked AS scheduled"
			" WHERE scheduled.subscription" EQ "$1 AND scheduled.aggregateid" EQ "p.aggregateid"
			" AND scheduled.retry_at IS NOT NULL)"
			" ELSE EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "p.aggregateid"
			" AND earlier.dead_at IS NULL AND earlier.seq" LT "p.seq"
			" AND (earlier.retry_at IS NULL OR earlier.retry_at" GT "p.retry_at)) END LIMIT 1",
	.parameters = 1,
	.types = {TEXTOID},
};

/*
 * ParkedCheckOrder asserts that the parked events keep the order.
 */
void
ParkedCheckOrder(const text *subscription)
{
	Datum values[] = {PointerGetDatum(subscription)};

	Assert(ExtensionQueryDo(&disorderQuery, values, NULL) == 0);
}
#endif
