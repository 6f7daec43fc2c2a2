/*-------------------------------------------------------------------------
 *
 * relay/survey.c
 *	  A survey: the subscriptions of a database that have handlers, and which are due.
 *
 * Locks, to the end of the transaction: ACCESS SHARE on the tables of delivery, not waited
 * for.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "base/compat.h"
#include "base/query.h"
#include "base/relation.h"
#include "relay/relay.h"

static ExtensionQuery surveyQuery = {
	.table = "subscription",
	.text = "SELECT v.subscription, v.owner, v.topics, v.partitions, v.is_due, v.due_at"
			" FROM idempotency_internal.survey() AS v",
	.results = {TEXTOID, NAMEOID, TEXTARRAYOID, INT4OID, BOOLOID, TIMESTAMPTZOID},
};

static const char *const tables[] = {"subscription", "partition", "position", "parked", "outbox"};

/*
 * LogUnlogged writes to the log how many dead letters of a subscription it does not have.
 */
static void
LogUnlogged(const char *name)
{
	int unlogged = RelayTakeUnlogged(name);

	if (unlogged > 0)
		ereport(LOG, (errmsg("%d more events of subscription \"%s\" are dead letters now", unlogged,
							 name),
					  errhint("See the view idempotency.dead_letters.")));
}

/*
 * RelaySurvey brings the slots of this database up to date.  Returns RUN_BUSY if the tables
 * are locked.
 */
RunState
RelaySurvey(void)
{
	RelationsLockResult lock = ExtensionRelationsLock(tables, lengthof(tables));
	RelayFound *found;
	uint64 rows;

	if (lock == RELATIONS_BUSY)
		return RUN_BUSY;
	if (lock == RELATIONS_MISSING)
	{
		RelayForgetDatabase(MyDatabaseId);
		return RUN_ENDED;
	}
	rows = ExtensionQueryRun(&surveyQuery, NULL, NULL);
	found = palloc0(Max(rows, 1) * sizeof(RelayFound));
	for (uint64 row = 0; row < rows; row++)
	{
		Datum owner = ExtensionQueryValue(&surveyQuery, row, 2, NULL);
		Datum topics = ExtensionQueryValue(&surveyQuery, row, 3, NULL);
		bool never;
		Datum dueAt = ExtensionQueryValue(&surveyQuery, row, 6, &never);

		CHECK_FOR_INTERRUPTS();
		found[row].name = TextDatumGetCString(ExtensionQueryValue(&surveyQuery, row, 1, NULL));
		found[row].owner = get_role_oid(NameStr(*DatumGetName(owner)), true);
		TopicSetFromPatterns(&found[row].topics, DatumGetArrayTypeP(topics));
		found[row].partitions = DatumGetInt32(ExtensionQueryValue(&surveyQuery, row, 4, NULL));
		found[row].due = DatumGetBool(ExtensionQueryValue(&surveyQuery, row, 5, NULL));
		found[row].dueAt = never ? 0 : DatumGetTimestampTz(dueAt);
	}
	RelayMerge(found, (int) rows);
	for (uint64 row = 0; row < rows; row++)
		LogUnlogged(found[row].name);
	ExtensionQueryEnd();
	return RUN_ENDED;
}
