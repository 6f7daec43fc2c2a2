/*-------------------------------------------------------------------------
 *
 * relaysurvey.c
 *	  Finding the subscriptions of a database that have a handler.
 *
 * The reaper does that whenever it visits a database, and so brings the registry
 * (relayregistry.c) up to date: after a start of the server, a restore, a copy of
 * the database, and a commit of two phases, of which nobody has told it.  It
 * also finds what there is to do that nobody rang for: events that are wanted, those of
 * transactions that ended without ringing, and many or old ones that are passed; and tells the
 *subscriptions what is wrong with them, if no worker could connect to do so.
 *
 * Locks: ACCESS SHARE on the tables of delivery, to the end of the transaction;
 * not waited for.  To note a problem, the subscription's, if it is free.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "ownerquery.h"
#include "owntable.h"
#include "relayregistry.h"
#include "relaysurvey.h"
#include "shmem.h"
#include "subscription.h"

/* So many events are looked at; who has not passed those before them is due. */
#define EVENTS 1000

/* After how many seconds a subscription passes events that it does not want, if nothing that it
 * wants was published since: until then they cannot be removed. */
#define PASS_SECONDS 600

static const char *const tables[] = {"subscription", "position", "parked", "outbox"};

/* What is in flight is due if its transaction is over, or if it is a hole: the next look ends
 * it.  A transaction that is not over rings when it commits.  (The list: cursor.c.) */
static OwnerQuery surveyQuery = {
	.table = "subscription",
	.text =
		"SELECT s.number, s.owner, p.batch IS NOT NULL"
		" OR EXISTS (SELECT FROM pg_catalog.unnest(p.inflight) WITH ORDINALITY AS f (who, place)"
		" WHERE f.place OPERATOR(pg_catalog.%) 3 OPERATOR(pg_catalog.=) 1"
		" AND (f.who OPERATOR(pg_catalog.<=) 0"
		" OR f.who OPERATOR(pg_catalog.>=) 4611686018427387904"
		" OR pg_catalog.pg_visible_in_snapshot(f.who::pg_catalog.text::pg_catalog.xid8,"
		" pg_catalog.pg_current_snapshot()))) AS due,"
		" (SELECT pg_catalog.min(k.retry_at) FROM idempotency.parked AS k"
		" WHERE k.subscription OPERATOR(pg_catalog.=) s.subscription"
		" AND k.retry_at IS NOT NULL) AS retry_at,"
		" s.last_error, s.topics, p.passed"
		" FROM idempotency.subscription AS s, LATERAL (SELECT * FROM idempotency.position AS v"
		" WHERE v.subscription OPERATOR(pg_catalog.=) s.subscription"
		" ORDER BY v.version DESC LIMIT 1) AS p WHERE s.handler IS NOT NULL",
	.results = {INT8OID, NAMEOID, BOOLOID, TIMESTAMPTZOID, TEXTOID, TEXTARRAYOID, INT8OID},
};

static OwnerQuery lastQuery = {
	.table = "outbox",
	.text = "SELECT seq, aggregatetype, published_at FROM idempotency.outbox"
			" WHERE seq OPERATOR(pg_catalog.>) $1 ORDER BY seq DESC LIMIT 1000", /* EVENTS */
	.parameters = 1,
	.types = {INT8OID},
	.results = {INT8OID, TEXTOID, TIMESTAMPTZOID},
};

/* The last events, from the newest on: of each the topics from the newest to it, and when the
 * oldest of those was published. */
typedef struct Recent
{
	int64 seq;
	TopicSet topics;
	TimestampTz oldest;
} Recent;

static Recent *recent;
static int recentCount;

/*
 * ReadRecent reads the last of the events that one of the subscriptions in the result of
 * surveyQuery, "rows" of them, has not passed, in the current memory context.
 */
static void
ReadRecent(uint64 rows)
{
	MemoryContext caller = CurrentMemoryContext;
	Datum passed = Int64GetDatum(PG_INT64_MAX);
	uint64 count;

	for (uint64 row = 0; row < rows; row++)
	{
		int64 one = DatumGetInt64(OwnerQueryValue(&surveyQuery, row, 7, NULL));

		passed = Int64GetDatum(Min(DatumGetInt64(passed), one));
	}
	count = OwnerQueryRun(&lastQuery, &passed, NULL);
	recent = MemoryContextAllocZero(caller, Max(1, count) * sizeof(Recent));
	recentCount = (int) count;
	for (int i = 0; i < recentCount; i++)
	{
		TimestampTz at = DatumGetTimestampTz(OwnerQueryValue(&lastQuery, i, 3, NULL));

		recent[i].seq = DatumGetInt64(OwnerQueryValue(&lastQuery, i, 1, NULL));
		if (i > 0)
			recent[i].topics = recent[i - 1].topics;
		TopicSetAddTopic(&recent[i].topics,
						 DatumGetTextPP(OwnerQueryValue(&lastQuery, i, 2, NULL)));
		recent[i].oldest = i > 0 ? Min(at, recent[i - 1].oldest) : at;
	}
	OwnerQueryEnd();
}

/*
 * HasNews tells whether a subscription that has passed a number is to be served for the
 * events behind it.
 */
static bool
HasNews(int64 passed, const TopicSet *wants)
{
	int left = 0; /* so many have it behind them */
	int right = recentCount;

	while (left < right)
	{
		int middle = (left + right) / 2;

		if (recent[middle].seq > passed)
			left = middle + 1;
		else
			right = middle;
	}
	if (left == 0)
		return false;
	return left == EVENTS || TopicSetsMeet(wants, &recent[left - 1].topics) ||
		   TimestampDifferenceExceeds(recent[left - 1].oldest, GetCurrentTimestamp(),
									  PASS_SECONDS * 1000);
}

/*
 * NoteProblem writes down what is wrong with a subscription, unless somebody is
 * at it just now.  Returns whether it has, or there is no such subscription.
 */
static bool
NoteProblem(int64 number, const char *problem)
{
	Subscription *subscription = SubscriptionFindNumber(number);

	if (subscription == NULL)
		return true;
	if (!SubscriptionLock(subscription->name, 0))
		return false;
	SubscriptionNoteError(subscription->name, cstring_to_text(problem));
	return true;
}

/*
 * NoteProblems writes down what the registry has been told since it was asked
 * last.
 */
static void
NoteProblems(void)
{
	char problem[RELAY_PROBLEM_BYTES];
	RelayTask task;

	while (RegistryUntold(MyDatabaseId, &task, problem) && NoteProblem(task.number, problem))
		RegistryTold(&task);
}

/*
 * Survey tells the registry what is in the row of a result.  A subscription whose
 * owner is gone is none for it.  Such a one, and one without a place, is told so.
 */
static void
Survey(uint64 row)
{
	bool noNext;
	bool noError;
	int64 number = DatumGetInt64(OwnerQueryValue(&surveyQuery, row, 1, NULL));
	const char *owner = NameStr(*DatumGetName(OwnerQueryValue(&surveyQuery, row, 2, NULL)));
	bool due = DatumGetBool(OwnerQueryValue(&surveyQuery, row, 3, NULL));
	int64 passed = DatumGetInt64(OwnerQueryValue(&surveyQuery, row, 7, NULL));
	Datum next = OwnerQueryValue(&surveyQuery, row, 4, &noNext);
	Datum error = OwnerQueryValue(&surveyQuery, row, 5, &noError);
	Oid role = get_role_oid(owner, true);
	TopicPatterns patterns;
	TopicSet wants;
	char *problem = NULL;

	TopicPatternsFromArray(&patterns,
						   DatumGetArrayTypeP(OwnerQueryValue(&surveyQuery, row, 6, NULL)));
	TopicSetFromPatterns(&wants, &patterns);
	due = due || HasNews(passed, &wants);
	if (!OidIsValid(role))
		problem = psprintf("role \"%s\" does not exist", owner);
	else if (!RegistryConfirm(MyDatabaseId, number, role, &wants, due,
							  noNext ? 0 : DatumGetTimestampTz(next)))
		problem = psprintf("no place: idempotency.relay_subscriptions is %d", RelaySubscriptions);
	if (problem != NULL && (noError || strcmp(TextDatumGetCString(error), problem) != 0))
		(void) NoteProblem(number, problem);
}

/*
 * RelaySurvey brings the registry up to date about this database.  Returns
 * RUN_BUSY if it could not, since somebody else is at the tables.
 */
RunState
RelaySurvey(void)
{
	uint64 began = RegistryBeginSurvey();
	OwnLock lock = OwnRelationsLock(tables, lengthof(tables));

	if (lock == OWN_BUSY)
		return RUN_BUSY;
	if (lock == OWN_LOCKED)
	{
		uint64 count = OwnerQueryRun(&surveyQuery, NULL, NULL);

		ReadRecent(count);
		for (uint64 row = 0; row < count; row++)
		{
			CHECK_FOR_INTERRUPTS();
			Survey(row);
		}
		OwnerQueryEnd();
		NoteProblems();
	}
	RegistryEndSurvey(MyDatabaseId, began);
	return RUN_ENDED;
}
