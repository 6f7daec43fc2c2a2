/*-------------------------------------------------------------------------
 *
 * relay/survey.c
 *	  Finding the subscriptions of a database that have a handler.
 *
 * A visit of the reaper brings the registry up to date: after a start of the server, a
 * restore, a copy of the database, and COMMIT PREPARED.  It also finds what no wakeup
 * was requested for: wanted events, transactions that ended, and many or old events to
 * pass.  And it writes the problems of subscriptions that no worker could connect for.
 *
 * Locks: ACCESS SHARE on the tables of delivery, to the end of the transaction; not
 * waited for.  To write a problem, the subscription's, if it is free.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/guc.h"
#include "base/query.h"
#include "base/relation.h"
#include "delivery/subscription.h"
#include "relay/registry.h"

/* How many events are read; a subscription that has not passed those before is due. */
#define EVENTS 1000

/*
 * After how many seconds a subscription passes events that it does not want, if no event that
 * it wants was published since: until then they cannot be removed.
 */
#define PASS_SECONDS 600

static const char *const tables[] = {"subscription", "position", "parked", "outbox"};

/*
 * An event in flight makes the subscription due if its transaction is over, or if it is a hole,
 * which the next poll gives up.  A transaction that is not over requests a wakeup when it
 * commits.  (The list: outbox/cursor.c.)
 */
static ExtensionQuery surveyQuery = {
	.table = "subscription",
	.text =
		"SELECT s.number, s.owner, p.batch IS NOT NULL"
		" OR EXISTS (SELECT FROM pg_catalog.unnest(p.inflight) WITH ORDINALITY AS f (txid, position)"
		" WHERE f.position OPERATOR(pg_catalog.%) 3 OPERATOR(pg_catalog.=) 1"
		" AND (f.txid OPERATOR(pg_catalog.<=) 0"
		" OR f.txid OPERATOR(pg_catalog.>=) 4611686018427387904"
		" OR pg_catalog.pg_visible_in_snapshot(f.txid::pg_catalog.text::pg_catalog.xid8,"
		" pg_catalog.pg_current_snapshot()))) AS due,"
		" (SELECT pg_catalog.min(k.retry_at) FROM idempotency.parked AS k"
		" WHERE k.subscription OPERATOR(pg_catalog.=) s.subscription"
		" AND k.retry_at IS NOT NULL) AS retry_at,"
		" s.last_error, s.topics, p.passed"
		" FROM idempotency.subscription AS s, LATERAL (SELECT * FROM idempotency.position AS v"
		" WHERE v.subscription OPERATOR(pg_catalog.=) s.subscription"
		" ORDER BY v.version DESC LIMIT 1) AS p WHERE s.handler IS NOT NULL"
		" ORDER BY s.number",
	.results = {INT8OID, NAMEOID, BOOLOID, TIMESTAMPTZOID, TEXTOID, TEXTARRAYOID, INT8OID},
};

static ExtensionQuery lastQuery = {
	.table = "outbox",
	.text = "SELECT seq, aggregatetype, published_at FROM idempotency.outbox"
			" WHERE seq OPERATOR(pg_catalog.>) $1 ORDER BY seq DESC LIMIT 1000", /* EVENTS */
	.parameters = 1,
	.types = {INT8OID},
	.results = {INT8OID, TEXTOID, TIMESTAMPTZOID},
};

/* The last events, the newest first. */
typedef struct Recent
{
	int64 seq;
	TopicSet topic;
	TimestampTz publishedAt;
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

	for (uint64 row = 0; row < rows; row++)
	{
		int64 one = DatumGetInt64(ExtensionQueryValue(&surveyQuery, row, 7, NULL));

		passed = Int64GetDatum(Min(DatumGetInt64(passed), one));
	}
	recentCount = (int) ExtensionQueryRun(&lastQuery, &passed, NULL);
	recent = MemoryContextAllocZero(caller, Max(1, recentCount) * sizeof(Recent));
	for (int i = 0; i < recentCount; i++)
	{
		Datum topic = ExtensionQueryValue(&lastQuery, i, 2, NULL);

		recent[i].seq = DatumGetInt64(ExtensionQueryValue(&lastQuery, i, 1, NULL));
		TopicSetAddTopic(&recent[i].topic, DatumGetTextPP(topic));
		recent[i].publishedAt = DatumGetTimestampTz(ExtensionQueryValue(&lastQuery, i, 3, NULL));
	}
	ExtensionQueryEnd();
}

/*
 * HasNews tells whether a subscription that has passed a number is due for the events
 * after it: one that it wants, an old one, or many.
 */
static bool
HasNews(int64 passed, const TopicSet *wants)
{
	TimestampTz now = GetCurrentTimestamp();

	for (int i = 0; i < recentCount && recent[i].seq > passed; i++)
	{
		if (i == EVENTS - 1 || TopicSetsMeet(wants, &recent[i].topic) ||
			TimestampDifferenceExceeds(recent[i].publishedAt, now, PASS_SECONDS * 1000))
			return true;
	}
	return false;
}

/*
 * Find fills what the survey has found with a row of the result.
 */
static void
Find(uint64 row, RelayFound *found)
{
	bool noRetry;
	int64 passed = DatumGetInt64(ExtensionQueryValue(&surveyQuery, row, 7, NULL));
	Datum owner = ExtensionQueryValue(&surveyQuery, row, 2, NULL);
	Datum retryAt = ExtensionQueryValue(&surveyQuery, row, 4, &noRetry);
	Datum topics = ExtensionQueryValue(&surveyQuery, row, 6, NULL);
	TopicPatterns patterns;

	TopicPatternsFromArray(&patterns, DatumGetArrayTypeP(topics));
	TopicSetFromPatterns(&found->wants, &patterns);
	found->number = DatumGetInt64(ExtensionQueryValue(&surveyQuery, row, 1, NULL));
	found->owner = get_role_oid(NameStr(*DatumGetName(owner)), true);
	found->due = DatumGetBool(ExtensionQueryValue(&surveyQuery, row, 3, NULL)) ||
				 HasNews(passed, &found->wants);
	found->dueAt = noRetry ? 0 : DatumGetTimestampTz(retryAt);
}

/*
 * WriteProblem writes why a subscription cannot be run, if it cannot, to the log and to
 * last_error, unless that shows it or another session has locked the subscription.  A lack of
 * slots is not logged here: the launcher does, once for all.
 */
static void
WriteProblem(uint64 row, const RelayFound *found)
{
	const char *owner = NameStr(*DatumGetName(ExtensionQueryValue(&surveyQuery, row, 2, NULL)));
	const char *problem = found->problem;
	bool noError;
	Datum error = ExtensionQueryValue(&surveyQuery, row, 5, &noError);
	Subscription *subscription;

	if (!OidIsValid(found->owner))
		problem = psprintf("role \"%s\" does not exist", owner);
	else if (!found->hasSlot)
		problem =
			psprintf("no slot is free: idempotency.relay_subscriptions is %d", RelaySubscriptions);

	/* The registry has the beginning of a problem */
	if (problem[0] == '\0' ||
		(!noError && strncmp(TextDatumGetCString(error), problem, strlen(problem)) == 0))
		return;
	subscription = SubscriptionFindNumber(found->number);
	if (subscription == NULL || !SubscriptionLock(subscription->name, 0))
		return;
	if (SubscriptionSetError(subscription->name, cstring_to_text(problem)) &&
		(found->hasSlot || !OidIsValid(found->owner)))
		LogRelayProblem(subscription->name, problem);
}

/*
 * WriteUnlogged writes to the log how many dead letters it does not have.
 */
static void
WriteUnlogged(const RelayFound *found)
{
	Subscription *subscription =
		found->unlogged == 0 ? NULL : SubscriptionFindNumber(found->number);

	if (subscription != NULL)
		LogUnlogged(subscription->name, found->unlogged);
}

/*
 * Survey passes the subscriptions in the result, "rows" of them, to the registry.  "began" is
 * before the snapshot of the result.
 */
static void
Survey(uint64 rows, TimestampTz began)
{
	RelayFound *found = palloc0(Max(rows, 1) * sizeof(RelayFound));

	ReadRecent(rows);
	for (uint64 row = 0; row < rows; row++)
	{
		CHECK_FOR_INTERRUPTS();
		Find(row, &found[row]);
	}
	RegistryMerge(MyDatabaseId, found, (int) rows, began);
	for (uint64 row = 0; row < rows; row++)
	{
		WriteProblem(row, &found[row]);
		WriteUnlogged(&found[row]);
	}
}

/*
 * RelaySurvey brings the registry up to date about this database.  Returns RUN_BUSY if
 * the tables are locked.
 */
RunState
RelaySurvey(void)
{
	TimestampTz began = GetCurrentTimestamp();
	RelationsLockResult lock = ExtensionRelationsLock(tables, lengthof(tables));

	if (lock == RELATIONS_BUSY)
		return RUN_BUSY;
	if (lock != RELATIONS_LOCKED)
	{
		RegistryForgetDatabase(MyDatabaseId);
		return RUN_ENDED;
	}
	Survey(ExtensionQueryRun(&surveyQuery, NULL, NULL), began);
	ExtensionQueryEnd();
	return RUN_ENDED;
}
