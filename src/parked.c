/*-------------------------------------------------------------------------
 *
 * parked.c
 *	  The table idempotency.parked: events that failed.
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
 * therefore gives those of an aggregate in the order of publishing.
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

/* Qualified operators, for queries that run under any search path. */
#define EQ " OPERATOR(pg_catalog.=) "
#define LT " OPERATOR(pg_catalog.<) "
#define LE " OPERATOR(pg_catalog.<=) "
#define GT " OPERATOR(pg_catalog.>) "
#define PLUS " OPERATOR(pg_catalog.+) "

/* An event's attributes as they are in a parked row; the first is the batch. */
#define EVENT_SELECTION                                                                            \
	"SELECT $2, seq, id, aggregatetype, aggregateid, type, payload, headers, attempts" PLUS        \
	"1, published_at FROM idempotency.parked"
#define COPIED                                                                                     \
	"subscription, seq, published_at, id, aggregatetype, aggregateid, type, payload, headers"

static OwnerQuery summaryQuery = {
	.table = "parked",
	.text =
		"SELECT (SELECT pg_catalog.min(retry_at) FROM idempotency.parked"
		" WHERE subscription" EQ "$1 AND retry_at IS NOT NULL),"
		" EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND dead_at IS NULL)"
		" OR EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" GT "$2)",
	.parameters = 2,
	.types = {TEXTOID, INT8OID},
};

static OwnerQuery dueQuery = {
	.table = "parked",
	.text = EVENT_SELECTION " WHERE subscription" EQ "$1 AND retry_at" LE "$3"
							" ORDER BY retry_at, seq LIMIT $4",
	.parameters = 4,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, INT4OID},
};

static OwnerQuery batchQuery = {
	.table = "parked",
	.text =
		EVENT_SELECTION " WHERE subscription" EQ "$1 AND seq" EQ "ANY ($3) ORDER BY retry_at, seq",
	.parameters = 3,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID},
};

static OwnerQuery hasQuery = {
	.table = "parked",
	.text =
		"SELECT EXISTS (SELECT FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" EQ "$2),"
		" EXISTS (SELECT FROM idempotency.parked"
		" WHERE subscription" EQ "$1 AND aggregateid" EQ "$3 AND dead_at IS NULL)",
	.parameters = 3,
	.types = {TEXTOID, INT8OID, TEXTOID},
};

static OwnerQuery waitQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", attempts)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)"
			" ON CONFLICT (subscription, seq) DO UPDATE SET retry_at = NULL",
	.parameters = 9,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID},
};

static OwnerQuery failQuery = {
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

static OwnerQuery holdQuery = {
	.table = "parked",
	.text =
		"UPDATE idempotency.parked SET retry_at = NULL WHERE subscription" EQ
		"$1 AND aggregateid" EQ "$2 AND seq" GT "$3 AND dead_at IS NULL AND retry_at IS NOT NULL",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, INT8OID},
};

static OwnerQuery letGoQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET retry_at = $3"
			" WHERE subscription" EQ "$1 AND aggregateid" EQ "$2 AND dead_at IS NULL"
			" AND retry_at IS NULL AND NOT EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "$2"
			" AND earlier.dead_at IS NULL AND earlier.retry_at IS NOT NULL)",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, TIMESTAMPTZOID},
};

static OwnerQuery doneQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked WHERE subscription" EQ "$1 AND seq" EQ
			"ANY ($2) RETURNING aggregateid",
	.parameters = 2,
	.types = {TEXTOID, INT8ARRAYOID},
};

static OwnerQuery redriveQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET dead_at = NULL, attempts = 0, retry_at ="
			" CASE WHEN NOT EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "p.aggregateid"
			" AND earlier.dead_at IS NULL AND earlier.seq" LT "p.seq)"
			" THEN $3 END"
			" WHERE subscription" EQ "$1 AND dead_at IS NOT NULL AND ($2 IS NULL OR id" EQ "$2)",
	.parameters = 3,
	.types = {TEXTOID, UUIDOID, TIMESTAMPTZOID},
};

static OwnerQuery deleteQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked WHERE subscription" EQ "$1",
	.parameters = 1,
	.types = {TEXTOID},
};

/*
 * ParkedSummarize fills "summary" for a fetch; numbers up to "safe" are behind
 * the cursor.
 */
void
ParkedSummarize(const text *subscription, int64 safe, ParkedSummary *summary)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(safe)};
	bool isnull;
	Datum next;

	(void) OwnerQueryRun(&summaryQuery, values, NULL);
	next = OwnerQueryValue(0, 1, &isnull);
	summary->next = isnull ? 0 : DatumGetTimestampTz(next);
	summary->any = DatumGetBool(OwnerQueryValue(0, 2, &isnull));
	OwnerQueryEnd();
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
		bool isnull[EVENT_COLUMNS];

		for (int i = 0; i < EVENT_COLUMNS; i++)
			columns[i] = OwnerQueryValue(row, i + 1, &isnull[i]);
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
 * ParkedInBatch returns the parked events that are in the batch that is out.
 */
List *
ParkedInBatch(const text *subscription, const Position *position)
{
	Datum values[] = {PointerGetDatum(subscription), Int64GetDatum(position->batch),
					  PointerGetDatum(NumbersToArray(position->parked, position->parkedCount))};

	return position->parkedCount == 0 ? NIL : EventsOf(&batchQuery, values);
}

/*
 * ParkedHas tells whether an event of the outbox is parked, and sets "blocked"
 * to whether it has to wait for another of its aggregate that is.
 */
bool
ParkedHas(const text *subscription, const Event *event, bool *blocked)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_SEQ],
					  event->values[EVENT_AGGREGATE]};
	bool isnull[] = {false, false, event->isnull[EVENT_AGGREGATE]};
	bool ignored;
	bool has;

	(void) OwnerQueryRun(&hasQuery, values, isnull);
	has = DatumGetBool(OwnerQueryValue(0, 1, &ignored));
	*blocked = DatumGetBool(OwnerQueryValue(0, 2, &ignored));
	OwnerQueryEnd();
	return has;
}

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
	(void) OwnerQueryDo(&waitQuery, values, isnull);
}

/*
 * ParkedFail parks an event that failed, until "retryAt"; 0 means that it is a
 * dead letter.
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
	(void) OwnerQueryDo(&failQuery, values, isnull);
}

/*
 * ParkedHoldFollowers lets the later events of the same aggregate that are
 * parked wait behind this one.
 */
void
ParkedHoldFollowers(const text *subscription, const Event *event)
{
	Datum values[] = {PointerGetDatum(subscription), event->values[EVENT_AGGREGATE],
					  event->values[EVENT_SEQ]};

	(void) OwnerQueryDo(&holdQuery, values, NULL);
}

/*
 * ParkedLetGo lets the events of an aggregate go that wait for none any more.
 * They are all due at the same time, so that their numbers give the order.
 */
void
ParkedLetGo(const text *subscription, const text *aggregate)
{
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(aggregate),
					  TimestampTzGetDatum(GetCurrentTimestamp())};

	(void) OwnerQueryDo(&letGoQuery, values, NULL);
}

/*
 * ParkedDone removes the parked events of a batch that is done, and lets those
 * go that waited for them.
 */
void
ParkedDone(const text *subscription, const Position *position)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum values[] = {PointerGetDatum(subscription),
					  PointerGetDatum(NumbersToArray(position->parked, position->parkedCount))};
	List *aggregates = NIL;
	ListCell *cell;
	uint64 count;

	if (position->parkedCount == 0)
		return;
	count = OwnerQueryRun(&doneQuery, values, NULL);
	for (uint64 row = 0; row < count; row++)
	{
		bool isnull;
		Datum aggregate = OwnerQueryValue(row, 1, &isnull);
		MemoryContext spi = MemoryContextSwitchTo(caller);

		if (!isnull)
			aggregates = lappend(aggregates, DatumGetTextPCopy(aggregate));
		MemoryContextSwitchTo(spi);
	}
	OwnerQueryEnd();
	foreach (cell, aggregates)
		ParkedLetGo(subscription, lfirst(cell));
}

/*
 * ParkedRedrive gives a dead letter once more, or all of them if "id" is NULL,
 * as if it had never failed; all at the same time, for the order's sake.
 * Returns how many.
 */
int64
ParkedRedrive(const text *subscription, const pg_uuid_t *id)
{
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(id),
					  TimestampTzGetDatum(GetCurrentTimestamp())};
	bool isnull[] = {false, id == NULL, false};

	return (int64) OwnerQueryDo(&redriveQuery, values, isnull);
}

/*
 * ParkedDelete removes all that a subscription has parked.
 */
void
ParkedDelete(const text *subscription)
{
	Datum values[] = {PointerGetDatum(subscription)};

	(void) OwnerQueryDo(&deleteQuery, values, NULL);
}
