/*-------------------------------------------------------------------------
 *
 * check.c
 *	  Compares keys, effects and responses: what both workloads have in common.
 *
 * Reads all tables into memory, one entry for each operation, and compares them without
 * SQL. No client may be connected.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ledger.h"
#include "plan.h"
#include "tally.h"

/*
 * Expect reports a result other than the expected one.
 */
void
Expect(Session *session, const char *what, const char *expected, const char *sql)
{
	if (Ask(session, NULL, "%s", sql) && strcmp(Value(session, 0, 0), expected) != 0)
		Violation("[server] %s: %s, not %s", what, Value(session, 0, 0), expected);
}

/*
 * ReadRecords reads the stored records through the view and peek().
 */
void
ReadRecords(Session *session, Truth *truths)
{
	if (!Ask(session, NULL,
			 "SELECT p.*, r.state AS record, r.scope, r.key FROM idempotency.keys AS r "
			 "LEFT JOIN LATERAL idempotency.peek(r.scope, r.key) AS p ON true "
			 "WHERE r.state <> 'expired' AND r.scope <> 'stress/prey'"))
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
		if (strcmp(record, "completed") != 0 && strcmp(record, "failed") != 0 &&
			strcmp(record, "seen") != 0)
		{
			Violation("[records] operation %d is %s", key, record);
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
void
ReadEffects(Session *session, Truth *truths, const char *table)
{
	if (!Ask(session, NULL, "SELECT * FROM %s", table))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Field(session, row, "key"));

		if (key < 0 || strcmp(TableOf(key), table) != 0)
		{
			Violation("[effects] %s has key %s of no operation", table, Field(session, row, "key"));
			continue;
		}
		truths[key].effects++;
		truths[key].amount = atoi(Field(session, row, "amount"));
		truths[key].attempt = strtoll(Field(session, row, "attempt"), NULL, 10);
		if (IsLeased())
			truths[key].paid = strtoll(Field(session, row, "charge"), NULL, 10);
	}
}

/*
 * CheckEffect compares the effects of one operation with its outcome. Returns whether there is
 * one, which is due.
 */
bool
CheckEffect(int key, const Truth *truth)
{
	int due = truth->stored && !truth->failed ? 1 : 0;

	if (truth->effects != due)
		Violation("[effects] operation %d (%s) has %d effects, not %d", key,
				  !truth->stored  ? "no record"
				  : truth->failed ? "failed"
								  : "done",
				  truth->effects, due);
	if (truth->effects != 1 || due != 1)
		return false;

	if (truth->amount != AmountOf(key))
		Violation("[effects] operation %d has amount %d, not %d", key, truth->amount,
				  AmountOf(key));
	if (AnswerAttempt(truth->answer) >= 0 && AnswerAttempt(truth->answer) != truth->attempt)
		Violation("[effects] operation %d was done by attempt %lld, with response: %.300s", key,
				  (long long) truth->attempt, truth->answer);
	return true;
}

/*
 * CheckIndexes checks that the indexes of the store are valid, as far as the server can
 * check.
 */
static void
CheckIndexes(Session *session)
{
	if (!Ask(session, NULL, "SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'") ||
		PQntuples(session->result) == 0)
	{
		printf("  indexes not checked: the server has no amcheck\n");
		return;
	}
	if (Ask(session, NULL, "CREATE EXTENSION IF NOT EXISTS amcheck") &&
		Ask(session, NULL,
			"SELECT bt_index_parent_check(indexrelid, true, true) FROM pg_index "
			"WHERE indrelid = 'idempotency.key'::regclass AND indisvalid"))
		printf("  indexes checked: %d\n", PQntuples(session->result));
}

/*
 * CheckServer checks that no locks, prepared transactions, expired rows or leases are left, that
 * the primary key finds each outcome, and that the indexes of the store are valid.
 */
void
CheckServer(Session *session)
{
	char outcomes[32];

	snprintf(outcomes, sizeof(outcomes), "%d", config.operations);
	Expect(session, "locks left on keys", "0",
		   "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 18756 "
		   "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())");
	Expect(session, "prepared transactions left", "0",
		   "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()");
	Expect(session, "expired rows left", "0",
		   "SELECT count(*) FROM idempotency.keys WHERE scope = 'stress/prey' OR state = 'expired'");
	Expect(session, "outcomes through the primary key", outcomes,
		   "SET enable_seqscan = off; SET enable_bitmapscan = off; "
		   "SELECT count(*) FROM idempotency.key WHERE scope > '' AND token IS NULL");
	Expect(session, "leases left", "0",
		   "SELECT count(*) FROM idempotency.key WHERE token IS NOT NULL");
	CheckIndexes(session);
}
