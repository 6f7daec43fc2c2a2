/*-------------------------------------------------------------------------
 *
 * parkedwrite.c
 *	  The table idempotency.parked: how an event comes in, changes state and leaves.
 *
 * parked.c says what the states are and what order they keep.  Each function here
 * leaves that order as it ought to be, but for ParkedAgain(), which is followed by
 * ParkedHeadsOnly() when the last event of a batch is in.
 *
 * Locks: the caller holds the subscription's, to the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "compat.h"
#include "ownerquery.h"
#include "parked.h"

#define COPIED                                                                                     \
	"subscription, seq, published_at, id, aggregatetype, aggregateid, type, payload, headers"
static OwnerQuery waitQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", attempts)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0)"
			" ON CONFLICT (subscription, seq) DO UPDATE SET retry_at = NULL",
	.parameters = 9,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID},
};

static OwnerQuery againQuery = {
	.table = "parked",
	.text = "INSERT INTO idempotency.parked (" COPIED ", attempts, retry_at)"
			" VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, 0, $10)"
			" ON CONFLICT (subscription, seq) DO NOTHING",
	.parameters = 10,
	.types = {TEXTOID, INT8OID, TIMESTAMPTZOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, JSONOID,
			  JSONOID, TIMESTAMPTZOID},
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
	.text = "UPDATE idempotency.parked SET retry_at = NULL WHERE subscription" EQ
			"$1 AND aggregateid" EQ "$2 AND seq" GT "$3 AND retry_at IS NOT NULL",
	.parameters = 3,
	.types = {TEXTOID, TEXTOID, INT8OID},
};

/*
 * Not all of a busy aggregate at once: if the first fails, they are held again.  What is
 * due has an index of its own, in which those that wait are not met.
 */
static OwnerQuery letGoQuery = {
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

static OwnerQuery doneQuery = {
	.table = "parked",
	.text = "DELETE FROM idempotency.parked" OF_BATCH " RETURNING aggregateid",
	.parameters = 5,
	.types = {TEXTOID, INT8OID, INT8ARRAYOID, INT8OID, INT8OID},
	.results = {TEXTOID},
};

static OwnerQuery redriveQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET dead_at = NULL, attempts = 0, retry_at = $3"
			" WHERE subscription" EQ "$1 AND dead_at IS NOT NULL AND ($2 IS NULL OR id" EQ "$2)",
	.parameters = 3,
	.types = {TEXTOID, UUIDOID, TIMESTAMPTZOID},
};

/*
 * Where some events of an aggregate are due at $2 and others are not, nobody but the
 * first may be due.
 */
static OwnerQuery headsOnlyQuery = {
	.table = "parked",
	.text = "UPDATE idempotency.parked AS p SET retry_at = NULL WHERE p.subscription" EQ "$1"
			" AND p.dead_at IS NULL AND p.retry_at IS NOT NULL AND p.aggregateid" EQ
			"ANY (ARRAY (SELECT m.aggregateid FROM idempotency.parked AS m"
			" WHERE m.subscription" EQ "$1 AND m.dead_at IS NULL AND m.aggregateid IS NOT NULL"
			" GROUP BY m.aggregateid HAVING pg_catalog.bool_or(m.retry_at" EQ "$2)"
			" AND NOT pg_catalog.bool_and(coalesce(m.retry_at" EQ "$2, false))))"
			" AND EXISTS (SELECT FROM idempotency.parked AS earlier"
			" WHERE earlier.subscription" EQ "$1 AND earlier.aggregateid" EQ "p.aggregateid"
			" AND earlier.dead_at IS NULL AND earlier.seq" LT "p.seq)",
	.parameters = 2,
	.types = {TEXTOID, TIMESTAMPTZOID},
};

static OwnerQuery deleteQuery = {
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
	(void) OwnerQueryDo(&waitQuery, values, isnull);
}

/*
 * ParkedAgain parks an event that has not failed, to be given again from then on;
 * unless it is parked.
 */
void
ParkedAgain(const text *subscription, const Event *event, TimestampTz retryAt)
{
	Datum values[10];
	bool isnull[10] = {false};

	ToCopied(subscription, event, values, isnull);
	values[9] = TimestampTzGetDatum(retryAt);
	InjectionPoint("parked-again");
	(void) OwnerQueryDo(&againQuery, values, isnull);
}

/*
 * ParkedHeadsOnly restores the order within the aggregates of which some events
 * have just been parked until "retryAt", where others were parked before.
 */
void
ParkedHeadsOnly(const text *subscription, TimestampTz retryAt)
{
	Datum values[] = {PointerGetDatum(subscription), TimestampTzGetDatum(retryAt)};

	InjectionPoint("parked-order");
	(void) OwnerQueryDo(&headsOnlyQuery, values, NULL);
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
	InjectionPoint("parked-fail");
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

	InjectionPoint("parked-hold");
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

	InjectionPoint("parked-letgo");
	(void) OwnerQueryDo(&letGoQuery, values, NULL);
}

static int
CompareAggregates(const ListCell *a, const ListCell *b)
{
	return strcmp(lfirst(a), lfirst(b));
}

/*
 * ParkedDone removes the parked events of a batch that is done, and lets those
 * go that waited for them: aggregate by aggregate, however many events of it there
 * were.
 */
void
ParkedDone(const text *subscription, const Position *position)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum values[5];
	List *aggregates = NIL;
	const char *last = NULL;
	ListCell *cell;
	uint64 count;

	if (position->parkedCount == 0)
		return;
	ParkedBatchValues(subscription, position, values);
	InjectionPoint("parked-done");
	count = OwnerQueryRun(&doneQuery, values, NULL);
	for (uint64 row = 0; row < count; row++)
	{
		bool isnull;
		Datum aggregate = OwnerQueryValue(&doneQuery, row, 1, &isnull);
		MemoryContext spi = MemoryContextSwitchTo(caller);

		if (!isnull)
			aggregates = lappend(aggregates, TextDatumGetCString(aggregate));
		MemoryContextSwitchTo(spi);
	}
	OwnerQueryEnd();
	list_sort(aggregates, CompareAggregates);
	foreach (cell, aggregates)
	{
		if (last == NULL || strcmp(last, lfirst(cell)) != 0)
			ParkedLetGo(subscription, cstring_to_text(lfirst(cell)));
		last = lfirst(cell);
	}
}

/*
 * ParkedRedrive gives a dead letter once more, or all of them if "id" is NULL,
 * as if it had never failed; all at the same time, for the order's sake.  Later
 * events of the aggregate that are parked wait for it.  Returns how many.
 */
int64
ParkedRedrive(const text *subscription, const pg_uuid_t *id)
{
	TimestampTz now = GetCurrentTimestamp();
	Datum values[] = {PointerGetDatum(subscription), PointerGetDatum(id), TimestampTzGetDatum(now)};
	bool isnull[] = {false, id == NULL, false};
	int64 count = (int64) OwnerQueryDo(&redriveQuery, values, isnull);

	if (count > 0)
		ParkedHeadsOnly(subscription, now);
	return count;
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
