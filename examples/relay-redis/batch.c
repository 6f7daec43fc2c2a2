/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  The batch in hand, and what PostgreSQL is told about it.
 *
 * A batch is fetched, and then is ours until its lease ends, whatever becomes of
 * the connection: its number says so, on any connection.  It is acknowledged, or
 * given back, or its lease runs out and somebody gets it again, whole.  An answer
 * "not current" (IK408) means that it is not ours any more, and does no harm: what
 * was added to Redis will be added once more.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <string.h>

#include "relay.h"

/* So many extensions fall into one lease: one or two may fail. */
#define EXTENSIONS_PER_LEASE 3

/* How long to sleep when a fetch had nothing, and said so at once. */
#define NOTHING_MS 200

/* Redis' readers need UTC, and no session's DateStyle. */
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
 * Leased notes that the lease begins now, or a moment ago.
 */
static void
Leased(Relay *relay, int64_t asked)
{
	relay->extendAt = asked + relay->lease / EXTENSIONS_PER_LEASE;
}

/*
 * Refused says why the server refuses, and lets the program leave: a subscription
 * that is not there, or not ours, will be so at the next try.
 */
static void
Refused(Relay *relay, const char *what)
{
	Say("%s: %s", what, relay->postgres.error);
	Leave(EXIT_REFUSED);
}

/* ----------------------------------------------------------------
 * Fetching
 * ----------------------------------------------------------------
 */

/*
 * Keep takes the rows of a fetch as the batch in hand.
 */
static void
Keep(Relay *relay, int64_t asked)
{
	relay->count = PQntuples(relay->postgres.result);
	if (relay->count == 0)
		return;
	relay->events = relay->postgres.result;
	relay->postgres.result = NULL;
	relay->ours = true;
	snprintf(relay->batch, sizeof(relay->batch), "%s", EventField(relay, 0, "batch"));
	Leased(relay, asked);
	Note("batch %s: %d events", relay->batch, relay->count);
}

/*
 * FetchBatch waits for a batch.  Needs none in hand.  Returns true if relay->count
 * says what came, be it nothing; false if PostgreSQL did not answer, or if the
 * program is to leave.
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
			/* The lease begins when the fetch ends, which is hardly before now. */
			Keep(relay, Milliseconds());
			/* Somebody else's batch is out, or the server does not wait. */
			if (relay->count == 0 && !relay->common.drain && Milliseconds() - asked < NOTHING_MS)
				(void) Await(-1, 0, asked + NOTHING_MS, true);
			return true;
		case ANSWER_AGAIN:
			Say("fetch: %s", relay->postgres.error);
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
 * While it is ours
 * ----------------------------------------------------------------
 */

/*
 * NotOurs tells whether the last answer says that the batch is not ours any more, and
 * remembers it.
 */
static bool
NotOurs(Relay *relay)
{
	if (strcmp(relay->postgres.state, "IK408") != 0)
		return false;
	Say("batch %s: %s", relay->batch, relay->postgres.error);
	relay->ours = false;
	return true;
}

/*
 * ExtendBatch lets the lease begin anew.  Where PostgreSQL does not answer it
 * reconnects for the next time: the lease may last longer than the trouble.  Returns
 * false if the batch is not ours any more, or if the program is to leave for that.
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
			Leased(relay, asked);
			Note("batch %s: extended", relay->batch);
			return true;
		case ANSWER_REFUSED:
			if (!NotOurs(relay))
				Refused(relay, "extend");
			return false;
		case ANSWER_AGAIN:
			Say("extend: %s", relay->postgres.error);
			break;
		case ANSWER_LOST:
		case ANSWER_STOPPED:
			(void) PostgresReady(&relay->postgres);
			break;
	}
	Leased(relay, Milliseconds());
	return true;
}

/*
 * ParkEvent hands one event back that Redis will not take.  PostgreSQL gives it again
 * later, and those of its aggregate after it.  Returns false if the batch is not ours
 * any more, or if PostgreSQL did not answer.
 */
bool
ParkEvent(Relay *relay, int row, const char *error)
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
		Say("event %s: %s; %s%s", parameters[2], error, when ? "again at " : "a dead letter now",
			when ? when : "");
	}
	else if (answer == ANSWER_REFUSED && !NotOurs(relay))
		Refused(relay, "nack");
	return answer == ANSWER_OK;
}

/* ----------------------------------------------------------------
 * The end of it
 * ----------------------------------------------------------------
 */

/*
 * AcknowledgeBatch says that the whole batch is in Redis, and asks until it is
 * answered.  Returns false if it is not known to be.
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
				Note("batch %s: acknowledged", relay->batch);
				return true;
			case ANSWER_REFUSED:
				if (!NotOurs(relay))
					Refused(relay, "ack");
				return false;
			case ANSWER_AGAIN:
				Say("ack: %s", relay->postgres.error);
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
 * GiveBackBatch hands the whole batch back, so that somebody gets it before the lease
 * ends.  Where PostgreSQL does not answer, the lease must do.
 */
void
GiveBackBatch(Relay *relay)
{
	const char *const parameters[] = {relay->subscription, relay->batch, "not delivered"};

	if (!relay->ours)
		return;
	if (PostgresAsk(&relay->postgres, "SELECT idempotency.nack($1, $2::pg_catalog.int8, NULL, $3)",
					3, parameters) == ANSWER_OK)
		Say("batch %s: given back", relay->batch);
	else if (!NotOurs(relay))
		Say("batch %s: not given back, its lease has to run out", relay->batch);
}

/*
 * ForgetBatch ends the batch in hand here.
 */
void
ForgetBatch(Relay *relay)
{
	PQclear(relay->events);
	relay->events = NULL;
	relay->count = 0;
}
