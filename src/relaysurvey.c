/*-------------------------------------------------------------------------
 *
 * relaysurvey.c
 *	  Finding the subscriptions of a database that have a handler.
 *
 * The reaper does that whenever it visits a database, and so brings the registry
 * (relayregistry.c) up to date: after a start of the server, a restore, a copy of
 * the database, and a commit of two phases, of which nobody has told it.  It
 * also finds what there is to do that nobody rang for; and tells the subscriptions
 * what is wrong with them, if no worker could connect to do so.
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

#include "ownerquery.h"
#include "owntable.h"
#include "relayregistry.h"
#include "relaysurvey.h"
#include "shmem.h"
#include "subscription.h"

static const char *const tables[] = {"subscription", "position", "parked", "outbox"};

static OwnerQuery surveyQuery = {
	.table = "subscription",
	.text = "SELECT s.number, s.owner, p.batch IS NOT NULL"
			" OR p.inflight OPERATOR(pg_catalog.<>) '{}'"
			" OR p.passed OPERATOR(pg_catalog.<)"
			" (SELECT coalesce(pg_catalog.max(seq), 0) FROM idempotency.outbox) AS due,"
			" (SELECT pg_catalog.min(k.retry_at) FROM idempotency.parked AS k"
			" WHERE k.subscription OPERATOR(pg_catalog.=) s.subscription"
			" AND k.retry_at IS NOT NULL) AS retry_at,"
			" s.last_error"
			" FROM idempotency.subscription AS s, LATERAL (SELECT * FROM idempotency.position AS v"
			" WHERE v.subscription OPERATOR(pg_catalog.=) s.subscription"
			" ORDER BY v.version DESC LIMIT 1) AS p WHERE s.handler IS NOT NULL",
	.results = {INT8OID, NAMEOID, BOOLOID, TIMESTAMPTZOID, TEXTOID},
};

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
 * owner is gone is none for it.
 */
static void
Survey(uint64 row)
{
	bool noNext;
	bool noError;
	int64 number = DatumGetInt64(OwnerQueryValue(&surveyQuery, row, 1, NULL));
	const char *owner = NameStr(*DatumGetName(OwnerQueryValue(&surveyQuery, row, 2, NULL)));
	bool due = DatumGetBool(OwnerQueryValue(&surveyQuery, row, 3, NULL));
	Datum next = OwnerQueryValue(&surveyQuery, row, 4, &noNext);
	Datum error = OwnerQueryValue(&surveyQuery, row, 5, &noError);
	Oid role = get_role_oid(owner, true);

	if (OidIsValid(role))
		RegistryConfirm(MyDatabaseId, number, role, due, noNext ? 0 : DatumGetTimestampTz(next));
	else
	{
		char *problem = psprintf("role \"%s\" does not exist", owner);

		if (noError || strcmp(TextDatumGetCString(error), problem) != 0)
			(void) NoteProblem(number, problem);
	}
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

		for (uint64 row = 0; row < count; row++)
			Survey(row);
		OwnerQueryEnd();
		NoteProblems();
	}
	RegistryEndSurvey(MyDatabaseId, began);
	return RUN_ENDED;
}
