/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  The current batch, and the calls to PostgreSQL for it.
 *
 * A fetched batch belongs to this program until its lease ends, on any connection,
 * because the calls pass its number. It is acknowledged or returned, or its lease
 * expires and it is redelivered as a whole. The error IK408 means that the batch was
 * lost, which does no harm: its events are added to Redis again.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "relay.h"

/* Number of extensions in one lease: one or two can fail. */
#define EXTENSIONS_PER_LEASE 3

/* The sleep after a fetch that returned nothing at once. */
#define NOTHING_MS 200

/* Readers of the stream need UTC, whatever the session's DateStyle. */
static const char *const fetchSql =
	"SELECT batch, id, seq, aggregatetype, aggregateid, type, payload, headers,"
	" pg_catalog.to_char(published_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')"
	" AS published_at"
	" FROM idempotency.fetch($1, $2::pg_catalog.int4, $3::interval, $4::interval)";

typedef char IntervalText[40];

static const char *
Interval(int64_t milliseconds, IntervalText text)
{
	snprintf(text, sizeof(IntervalText), "%lld milliseconds", (long long) milliseconds);
	return text;
}

/*
 * LeaseStarted records that the lease starts now, or a moment ago.
 */
static void
LeaseStarted(Relay *relay, int64_t asked)
{
	relay->extendAt = asked + relay->lease / EXTENSIONS_PER_LEASE;
}

/*
 * Refused prints why the server refuses, and makes the program exit: a retry would not
 * find a missing subscription, or one of another owner.
 */
static void
Refused(Relay *relay, const char *what)
{
	LogInfo("%s: %s", what, relay->postgres.error);
	RequestExit(EXIT_REFUSED);
}

/* ----------------------------------------------------------------
 * Fetching
 * ----------------------------------------------------------------
 */

/*
 * StoreBatch stores the rows of a fetch as the current batch.
 */
static void
StoreBatch(Relay *relay, int64_t asked)
{
	relay->count = PQntuples(relay->postgres.result);
	if (relay->count == 0)
		return;
	relay->events = relay->postgres.result;
	relay->postgres.result = NULL;
	relay->left = calloc((size_t) relay->count, sizeof(bool));
	if (relay->left == NULL)
	{
		LogInfo("out of memory");
		exit(EXIT_REFUSED);
	}
	relay->owned = true;
	snprintf(relay->batch, sizeof(relay->batch), "%s", EventField(relay, 0, "batch"));
	LeaseStarted(relay, asked);
	LogDebug("batch %s: %d events", relay->batch, relay->count);
}

/*
 * FetchBatch waits for a batch. Needs that there is no current batch. Returns true, and
 * the number of events in relay->count, which can be 0; false if PostgreSQL did not
 * answer, or if the program must exit.
 */
bool
FetchBatch(Relay *relay)
{
	int64_t asked = Milliseconds();
	IntervalText wait;
	IntervalText lease;
	char most[16];
	const char *const parameters[] = {relay->subscription, most, Interval(relay->wait, wait),
									  Interval(relay->lease, lease)};

	snprintf(most, sizeof(most), "%d", relay->common.batch);
	switch (PostgresAskFor(&relay->postgres, relay->wait, fetchSql, 4, parameters))
	{
		case ANSWER_OK:
			/* The lease starts when the fetch ends, which is not before now. */
			StoreBatch(relay, Milliseconds());
			/* Another relay's batch is in flight, or the server does not wait. */
			if (relay->count == 0 && !relay->common.drain && Milliseconds() - asked < NOTHING_MS)
				(void) Await(-1, 0, asked + NOTHING_MS, true);
			return true;
		case ANSWER_AGAIN:
			LogInfo("fetch: %s", relay->postgres.error);
			(void) PostgresPause(&relay->postgres);
			return false;
		case ANSWER_REFUSED:
			Refused(relay, "fetch");
			return false;
		case ANSWER_LOST:
		case ANSWER_STOPPED:
			return false;
	}
	return false;
}

/*
 * EventField returns a field of an event of the batch, NULL for NULL.
 */
const char *
EventField(const Relay *relay, int row, const char *column)
{
	int number = PQfnumber(relay->events, column);

	return PQgetisnull(relay->events, row, number) ? NULL : PQgetvalue(relay->events, row, number);
}

/* ----------------------------------------------------------------
 * Extending and failing
 * ----------------------------------------------------------------
 */

/*
 * BatchLost returns whether the last error says that the batch was lost, and records
 * that.
 */
static bool
BatchLost(Relay *relay)
{
	if (strcmp(relay->postgres.state, "IK408") != 0)
		return false;
	LogInfo("batch %s: %s", relay->batch, relay->postgres.error);
	relay->owned = false;
	return true;
}

/*
 * ExtendBatch restarts the lease. If PostgreSQL does not answer, it reconnects for the
 * next attempt: the lease can outlast the outage. Returns false if the batch was lost,
 * or if the program must exit because of that.
 */
bool
ExtendBatch(Relay *relay)
{
	int64_t asked = Milliseconds();
	IntervalText lease;
	const char *const parameters[] = {relay->subscription, relay->batch,
									  Interval(relay->lease, lease)};

	switch (PostgresAsk(&relay->postgres,
						"SELECT idempotency.extend($1, $2::pg_catalog.int8, $3::interval)", 3,
						parameters))
	{
		case ANSWER_OK:
			LeaseStarted(relay, asked);
			LogDebug("batch %s: extended", relay->batch);
			return true;
		case ANSWER_REFUSED:
			if (!BatchLost(relay))
				Refused(relay, "extend");
			return false;
		case ANSWER_AGAIN:
			LogInfo("extend: %s", relay->postgres.error);
			break;
		case ANSWER_LOST:
		case ANSWER_STOPPED:
			(void) PostgresReady(&relay->postgres);
			break;
	}
	LeaseStarted(relay, Milliseconds());
	return true;
}

/*
 * MarkLeft records that an event has left the batch, and with it the later events of its
 * aggregate.
 */
static void
MarkLeft(Relay *relay, int row)
{
	const char *aggregate = EventField(relay, row, "aggregateid");

	relay->left[row] = true;
	while (aggregate != NULL && ++row < relay->count)
	{
		const char *other = EventField(relay, row, "aggregateid");

		if (other != NULL && strcmp(other, aggregate) == 0)
			relay->left[row] = true;
	}
}

/*
 * NackEvent calls nack for one event that Redis refuses. PostgreSQL redelivers the
 * event later, and the later events of its aggregate after it. Returns false if the
 * batch was lost, or if PostgreSQL did not answer.
 */
bool
NackEvent(Relay *relay, int row, const char *error)
{
	const char *const parameters[] = {relay->subscription, relay->batch,
									  EventField(relay, row, "id"), error};
	Answer answer =
		PostgresAsk(&relay->postgres,
					"SELECT idempotency.nack($1, $2::pg_catalog.int8, $3::uuid, $4) AS retry_at", 4,
					parameters);
	const char *when;

	if (answer == ANSWER_OK)
	{
		when = PostgresValue(&relay->postgres, 0, "retry_at");
		LogInfo("event %s: %s; %s%s", parameters[2], error,
				when ? "again at " : "a dead letter now", when ? when : "");
		MarkLeft(relay, row);
	}
	else if (answer == ANSWER_REFUSED && !BatchLost(relay))
		Refused(relay, "nack");
	return answer == ANSWER_OK;
}

/* ----------------------------------------------------------------
 * Acknowledging and returning
 * ----------------------------------------------------------------
 */

/*
 * AcknowledgeBatch acknowledges the whole batch, and repeats the call until it is
 * answered. Returns false if the result is not known.
 */
bool
AcknowledgeBatch(Relay *relay)
{
	const char *const parameters[] = {relay->subscription, relay->batch};

	do
	{
		switch (PostgresAsk(&relay->postgres, "SELECT idempotency.ack($1, $2::pg_catalog.int8)", 2,
							parameters))
		{
			case ANSWER_OK:
				LogDebug("batch %s: acknowledged", relay->batch);
				return true;
			case ANSWER_REFUSED:
				if (!BatchLost(relay))
					Refused(relay, "ack");
				return false;
			case ANSWER_AGAIN:
				LogInfo("ack: %s", relay->postgres.error);
				if (!PostgresPause(&relay->postgres))
					return false;
				break;
			case ANSWER_LOST:
			case ANSWER_STOPPED:
				break;
		}
	} while (PostgresReady(&relay->postgres));
	return false;
}

/*
 * ReturnBatch returns the whole batch, so that it is redelivered before the lease
 * ends. If PostgreSQL does not answer, the batch is redelivered after the lease.
 */
void
ReturnBatch(Relay *relay)
{
	const char *const parameters[] = {relay->subscription, relay->batch, "not delivered"};

	if (!relay->owned)
		return;
	if (PostgresAsk(&relay->postgres, "SELECT idempotency.nack($1, $2::pg_catalog.int8, NULL, $3)",
					3, parameters) == ANSWER_OK)
		LogInfo("batch %s: returned", relay->batch);
	else if (!BatchLost(relay))
		LogInfo("batch %s: not returned, redelivered after its lease", relay->batch);
}

/*
 * DiscardBatch discards the current batch in this program.
 */
void
DiscardBatch(Relay *relay)
{
	PQclear(relay->events);
	relay->events = NULL;
	free(relay->left);
	relay->left = NULL;
	relay->count = 0;
}
