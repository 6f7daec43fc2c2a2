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
#include "base/stats.h"
#include "relay/relay.h"

static ExtensionQuery surveyQuery = {
	.table = "subscription",
	.text = "SELECT v.subscription, v.owner, v.topics, v.partitions, v.is_due, v.due_at"
			" FROM idempotency_internal.survey() AS v",
	.results = {TEXTOID, NAMEOID, TEXTARRAYOID, INT4OID, BOOLOID, TIMESTAMPTZOID},
};

static const char *const tables[] = {"subscription", "partition", "position", "parked", "outbox"};

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
	if (rows > 0)
		StatsAddDatabase(); /* so that the slots are freed when the database is gone */
	RelayMerge(found, (int) rows);
	ExtensionQueryEnd();
	return RUN_ENDED;
}
