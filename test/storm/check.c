/*-------------------------------------------------------------------------
 *
 * check.c
 *	  Compares keys, orders, charges and responses.
 *
 * Reads all tables into memory, one entry for each operation, and compares them. No
 * other session may be connected.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "history.h"
#include "ledger.h"
#include "server.h"
#include "tally.h"
#include "work.h"

/* What the tables contain about one operation. */
typedef struct Truth
{
	bool stored;
	bool failed;
	char *answer; /* as peek() returns it */
	int orders;	  /* the effects in this database */
	int amount;	  /* of the last effect; likewise below */
	int64_t worker;
	int64_t paid;
	int charges; /* the effects at the provider */
	int64_t charge;
	int charged; /* the amount */
	bool declined;
	bool derived; /* under the key derived from the operation */
} Truth;

/* ----------------------------------------------------------------
 * Reading
 * ----------------------------------------------------------------
 */

static void
ReadRecords(Session *session, Truth *truths)
{
	if (!Ask(session, NULL,
			 "SELECT p.*, r.state AS record, r.key FROM idempotency.keys AS r "
			 "LEFT JOIN LATERAL idempotency.peek(r.scope, r.key) AS p ON true "
			 "WHERE r.scope = '" SCOPE "'"))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		const char *record = Field(session, row, "record");
		const char *name = Field(session, row, "key");
		int key = KeyNumber(name);

		if (key < 0 || truths[key].stored)
		{
			Violation("[records] key %s belongs to no operation, or has two records", name);
			continue;
		}
		if (strcmp(record, "completed") != 0 && strcmp(record, "failed") != 0)
		{
			Violation("[records] operation %d is %s", key, record);
			continue;
		}
		truths[key].stored = true;
		truths[key].failed = strcmp(record, "failed") == 0;
		truths[key].answer =
			AnswerText(Field(session, row, "status"), Field(session, row, "failed"),
					   Field(session, row, "headers"), Field(session, row, "response"));
		AcknowledgeAnswer(key, truths[key].answer, Field(session, row, "expires_at"));
	}
}

static void
ReadOrders(Session *session, Truth *truths, const char *table)
{
	if (!Ask(session, NULL, "SELECT * FROM %s", table))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Field(session, row, "key"));
		Truth *truth;

		if (key < 0 || strcmp(TableFor(key), table) != 0)
		{
			Violation("[effects] %s has key %s of no operation", table, Field(session, row, "key"));
			continue;
		}
		truth = &truths[key];
		truth->orders++;
		truth->amount = atoi(Field(session, row, "amount"));
		truth->worker = strtoll(Field(session, row, "worker"), NULL, 10);
		truth->paid = strtoll(Field(session, row, "charge"), NULL, 10);
	}
}

static void
ReadCharges(Session *session, Truth *truths)
{
	if (!Ask(session, NULL,
			 "SELECT *, idempotency.derive_key('" SCOPE "', memo, 'charge') = key AS derived "
			 "FROM provider.charges"))
		return;

	for (int row = 0; row < PQntuples(session->result); row++)
	{
		int key = KeyNumber(Field(session, row, "memo"));
		Truth *truth;

		if (key < 0)
		{
			Violation("[provider] charge %s belongs to no operation", Field(session, row, "id"));
			continue;
		}
		truth = &truths[key];
		truth->charges++;
		truth->charge = strtoll(Field(session, row, "id"), NULL, 10);
		truth->charged = atoi(Field(session, row, "amount"));
		truth->declined = strcmp(Field(session, row, "declined"), "t") == 0;
		truth->derived = strcmp(Field(session, row, "derived"), "t") == 0;
	}
}

/* ----------------------------------------------------------------
 * Comparing
 * ----------------------------------------------------------------
 */

/*
 * CheckProvider compares an operation with its charge: there is exactly one, under the
 * derived key, and it succeeded if and only if the operation did.
 */
static void
CheckProvider(int key, const Truth *truth)
{
	if (truth->charges != 1 || !truth->derived)
		Violation("[provider] operation %d was charged %d times%s", key, truth->charges,
				  truth->charges == 1 ? ", under another key than the derived one" : "");
	else if (truth->charged != AmountOf(key) || truth->declined != truth->failed)
		Violation("[provider] operation %d (%s) was charged %d%s, not %d", key,
				  truth->failed ? "failed" : "done", truth->charged,
				  truth->declined ? " (declined)" : "", AmountOf(key));
	else if (truth->orders == 1 && truth->paid != truth->charge)
		Violation("[provider] operation %d was paid by charge %lld, not %lld", key,
				  (long long) truth->paid, (long long) truth->charge);
}

/*
 * CheckOperation compares all that is known about one operation.
 */
static void
CheckOperation(int key, const Truth *truth, int64_t finisher)
{
	int due = truth->stored && !truth->failed ? 1 : 0;

	if (!truth->stored || !Acknowledged(key))
		Violation("[records] operation %d %s", key,
				  truth->stored ? "was never acknowledged" : "has no outcome");
	if (truth->orders != due)
		Violation("[effects] operation %d (%s) has %d orders, not %d", key,
				  !truth->stored  ? "no outcome"
				  : truth->failed ? "failed"
								  : "done",
				  truth->orders, due);
	CheckProvider(key, truth);
	if (truth->orders != 1 || due != 1)
		return;

	if (truth->amount != AmountOf(key))
		Violation("[effects] operation %d has amount %d, not %d", key, truth->amount,
				  AmountOf(key));
	if (truth->worker != finisher)
		Violation("[effects] operation %d was written by worker %lld and finished by %lld", key,
				  (long long) truth->worker, (long long) finisher);
	if (AnswerAttempt(truth->answer) >= 0 && AnswerAttempt(truth->answer) != truth->worker)
		Violation("[effects] operation %d was written by worker %lld, with response: %.300s", key,
				  (long long) truth->worker, truth->answer);
}

/*
 * Check compares the tables with the responses that the clients received.
 */
void
Check(Session *session)
{
	Truth *truths = calloc(config.operations, sizeof(Truth));
	int64_t *finishers = HistoryCheck(session);
	int records = 0;
	int failures = 0;
	int orders = 0;
	int charges = 0;

	ReadRecords(session, truths);
	ReadOrders(session, truths, "storm.orders");
	ReadOrders(session, truths, "storm.bookings");
	ReadCharges(session, truths);

	for (int key = 0; key < config.operations; key++)
	{
		CheckOperation(key, &truths[key], finishers[key]);
		records += truths[key].stored;
		failures += truths[key].failed;
		orders += truths[key].orders;
		charges += truths[key].charges;
		free(truths[key].answer);
	}
	printf("  %d operations finished = %d orders + %d declined; %d charges at the provider\n",
		   records, orders, failures, charges);
	free(truths);
	free(finishers);
}

/*
 * CheckServer checks that no locks are left, that the reaper has deleted all expired
 * rows and nothing else, and that the indexes of the store are valid.
 */
void
CheckServer(Session *session)
{
	char outcomes[32];

	Expect(session, "locks left on keys", "0",
		   "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 18756 "
		   "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())");
	while (Ask(session, NULL, "SELECT idempotency.reap(NULL)") &&
		   strcmp(Value(session, 0, 0), "0") != 0)
		;
	Expect(session, "expired rows", "0",
		   "SELECT count(*) FROM idempotency.keys WHERE scope = 'storm/prey' OR state = 'expired'");
	snprintf(outcomes, sizeof(outcomes), "%d", config.operations);
	Expect(session, "outcomes through the primary key", outcomes,
		   "SET enable_seqscan = off; SET enable_bitmapscan = off; "
		   "SELECT count(*) FROM idempotency.key WHERE scope > '' AND token IS NULL");
	Expect(session, "leases left", "0",
		   "SELECT count(*) FROM idempotency.key WHERE token IS NOT NULL");
	CheckIndexes(session);
}
