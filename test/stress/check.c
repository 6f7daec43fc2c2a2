/*-------------------------------------------------------------------------
 *
 * check.c
 *	  Compares keys, effects and responses.
 *
 * Reads all tables into memory, one entry for each operation, and compares them without
 * SQL. No other session may be connected.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ledger.h"
#include "plan.h"
#include "server.h"
#include "tally.h"

/* What the tables contain about one operation. */
typedef struct Truth
{
	bool stored;
	bool failed;
	char *answer; /* as peek() returns it */
	int effects;
	int64_t attempt; /* that made the last effect */
	int amount;
} Truth;

/*
 * ReadRecords reads the stored records through the view and peek().
 */
static void
ReadRecords(Session *session, Truth *truths)
{
	if (!Ask(session, NULL,
			 "SELECT p.*, r.state AS record, r.scope, r.key FROM idempotency.keys AS r "
			 "LEFT JOIN LATERAL idempotency.peek(r.scope, r.key) AS p ON true "
			 "WHERE r.state <> 'expired'"))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		const char *record = Field(session, row, "record");
		const char *scope = Field(session, row, "scope");
		const char *name = Field(session, row, "key");
		int key = KeyNumber(name);
		char *answer;

		if (key < 0 || strcmp(scope, ScopeOf(key)) != 0)
		{
			Violation("[records] key %s of scope %s belongs to no operation", name, scope);
			continue;
		}
		answer = AnswerText(Field(session, row, "status"), Field(session, row, "failed"),
							Field(session, row, "headers"), Field(session, row, "response"));
		if (truths[key].stored)
			Violation("[records] operation %d has two records", key);
		truths[key].stored = true;
		truths[key].failed = strcmp(record, "failed") == 0;
		truths[key].answer = answer;
		if (LedgerAnswer(key) != NULL || strcmp(record, "seen") != 0)
			AcknowledgeAnswer(key, answer, Field(session, row, "expires_at"));
	}
}

/*
 * ReadEffects reads a business table.
 */
static void
ReadEffects(Session *session, Truth *truths, const char *table)
{
	if (!Ask(session, NULL, "SELECT key, amount, attempt FROM %s", table))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Value(session, row, 0));

		if (key < 0 || strcmp(TableOf(key), table) != 0)
		{
			Violation("[effects] %s has key %s of no operation", table, Value(session, row, 0));
			continue;
		}
		truths[key].effects++;
		truths[key].amount = atoi(Value(session, row, 1));
		truths[key].attempt = strtoll(Value(session, row, 2), NULL, 10);
	}
}

/*
 * CheckOperation compares all that is known about one operation.
 */
static void
CheckOperation(int key, const Truth *truth, bool acknowledged, bool complete)
{
	int due = truth->stored && !truth->failed ? 1 : 0;

	if (acknowledged && !truth->stored)
		Violation("[records] operation %d was acknowledged and has no record", key);
	if (complete && !truth->stored)
		Violation("[records] operation %d has no record after the final pass", key);
	if (truth->effects != due)
		Violation("[effects] operation %d (%s) has %d effects, not %d", key,
				  !truth->stored  ? "no record"
				  : truth->failed ? "failed"
								  : "done",
				  truth->effects, due);
	if (truth->effects != 1 || due != 1)
		return;

	if (truth->amount != AmountOf(key))
		Violation("[effects] operation %d has amount %d, not %d", key, truth->amount,
				  AmountOf(key));
	if (AnswerAttempt(truth->answer) >= 0 && AnswerAttempt(truth->answer) != truth->attempt)
		Violation("[effects] operation %d was done by attempt %lld, with response: %.300s", key,
				  (long long) truth->attempt, truth->answer);
}

/*
 * Check compares the tables with the responses that the clients received. After the
 * final pass every operation must be done.
 */
void
Check(Session *session, bool complete)
{
	Truth *truths = calloc(config.operations, sizeof(Truth));
	bool *acknowledged = calloc(config.operations, sizeof(bool));
	int records = 0;
	int failures = 0;
	int effects = 0;
	int acknowledgedCount = 0;

	/* Reading the records records their responses, which acknowledges them. */
	for (int key = 0; key < config.operations; key++)
		acknowledgedCount += acknowledged[key] = Acknowledged(key);
	ReadRecords(session, truths);
	ReadEffects(session, truths, "stress.charges");
	ReadEffects(session, truths, "stress.deliveries");

	for (int key = 0; key < config.operations; key++)
	{
		CheckOperation(key, &truths[key], acknowledged[key], complete);
		records += truths[key].stored;
		failures += truths[key].failed;
		effects += truths[key].effects;
		free(truths[key].answer);
	}
	printf("  %s: %d operations acknowledged, %d recorded = %d effects + %d failures\n",
		   complete ? "after the final pass" : "before the final pass", acknowledgedCount, records,
		   effects, failures);
	if (records != effects + failures)
		Violation("[counts] %d records, but %d effects and %d failures", records, effects,
				  failures);
	if (complete && records != config.operations)
		Violation("[counts] %d records of %d operations", records, config.operations);
	free(truths);
	free(acknowledged);
}

/*
 * CheckServer checks that no locks or prepared transactions are left, and that the
 * index of the store is valid, as far as the server can check.
 */
void
CheckServer(Session *session)
{
	Expect(session, "locks left on keys", "0",
		   "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 18756 "
		   "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())");
	Expect(session, "prepared transactions left", "0",
		   "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()");
	Expect(session, "expired records left", "0",
		   "SELECT count(*) FROM idempotency.keys WHERE state = 'expired'");
	Expect(session, "records through the primary key", "t",
		   "SET enable_seqscan = off; SET enable_bitmapscan = off; "
		   "SELECT (SELECT count(*) FROM idempotency.key WHERE scope > '') = "
		   "(SELECT sum(n) FROM (SELECT count(*) AS n FROM stress.charges UNION ALL "
		   "SELECT count(*) FROM stress.deliveries UNION ALL "
		   "SELECT count(*) FROM idempotency.keys WHERE state = 'failed') AS parts)");
	CheckIndexes(session);
}
