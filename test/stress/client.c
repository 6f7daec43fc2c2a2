/*-------------------------------------------------------------------------
 *
 * client.c
 *	  The first step of a client's worker: the claim.
 *
 * Most workers claim with a lease, in a separate statement or in a transaction of some
 * isolation level, some of them after a rolled back claim. Some claim without a lease
 * and do all work in one transaction. A few send another request, which must be
 * rejected.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client.h"
#include "ledger.h"
#include "tally.h"
#include "work.h"

#define REQUEST_OF_OTHERS_PERCENT 4
#define WITHOUT_LEASE_PERCENT 12

/* Milliseconds that a claim waits for the owner. */
#define LONGEST_WAIT 80

static const char *const levels[] = {"READ COMMITTED", "READ COMMITTED", "READ COMMITTED",
									 "REPEATABLE READ", "SERIALIZABLE"};

/* ----------------------------------------------------------------
 * Claims
 * ----------------------------------------------------------------
 */

/*
 * CheckInProgress reports an operation that is in progress although it was
 * acknowledged.
 */
static void
CheckInProgress(Worker *worker, bool acknowledged)
{
	if (acknowledged)
		Violation("[progress] operation %d is in progress, although it was acknowledged (worker "
				  "%lld)",
				  worker->key, (long long) worker->number);
}

/*
 * ReadClaim reads the result of a claim. "acknowledged" is whether the operation was
 * acknowledged before the claim was sent. Returns whether the claim was granted.
 */
static bool
ReadClaim(Worker *worker, bool acknowledged)
{
	Session *session = worker->session;
	const char *outcome = Field(session, 0, "outcome");
	char *answer;

	if (strcmp(outcome, "claimed") == 0 || strcmp(outcome, "taken_over") == 0)
	{
		if (acknowledged)
			Violation(
				"[claims] operation %d was granted, although it was acknowledged (worker %lld)",
				worker->key, (long long) worker->number);
		WorkerGrant(worker, 0);
		return true;
	}
	if (strcmp(outcome, "in_progress") == 0)
	{
		Count(TALLY_IN_PROGRESS);
		CheckInProgress(worker, acknowledged);
		return false;
	}
	if (strcmp(outcome, "replayed") != 0)
	{
		Violation("[requests] operation %d: outcome %s for the same request (worker %lld)",
				  worker->key, outcome, (long long) worker->number);
		return false;
	}

	Count(TALLY_REPLAYED);
	answer = AnswerText(Field(session, 0, "status"), Field(session, 0, "failed"),
						Field(session, 0, "headers"), Field(session, 0, "response"));
	AcknowledgeAnswer(worker->key, answer, Field(session, 0, "expires_at"));
	free(answer);
	worker->answered = true;
	return false;
}

/*
 * Claim claims the operation, with the worker's lease or without one. Returns whether
 * it was granted.
 */
static bool
Claim(Worker *worker, bool withLease)
{
	Session *session = worker->session;
	bool acknowledged = Acknowledged(worker->key);
	bool try = RandomPercent(&worker->random, 40);
	char request[REQUEST_TEXT];
	char lease[32] = "NULL";
	char wait[32] = "NULL";

	RequestText(worker->key, false, &worker->random, request);
	if (withLease)
		snprintf(lease, sizeof(lease), "'%d ms'", worker->leaseMs);
	if (RandomPercent(&worker->random, 70))
		snprintf(wait, sizeof(wait), "'%d ms'", RandomBelow(&worker->random, LONGEST_WAIT));
	if (Ask(session, NULL,
			"SELECT *, idempotency.derive_key('" SCOPE "', '%s', 'charge') AS derived "
			"FROM stress.claim('%s', %lld, '%s', %s, %s, %s)",
			worker->name, worker->name, (long long) worker->number, request, lease, wait,
			try ? "true" : "false"))
		return ReadClaim(worker, acknowledged);

	if (strcmp(session->state, "IK409") == 0)
	{
		CheckInProgress(worker, acknowledged);
		if (try)
			Violation("[requests] operation %d: try_claim() raised IK409 (worker %lld)",
					  worker->key, (long long) worker->number);
	}
	return false;
}

/*
 * Begin begins a transaction. Above READ COMMITTED its snapshot can be old at the
 * claim.
 */
static bool
Begin(Worker *worker)
{
	Session *session = worker->session;
	int level = RandomBelow(&worker->random, 5);

	session->maySerialize = level >= 3;
	return Ask(session, NULL, "BEGIN ISOLATION LEVEL %s", levels[level]) &&
		   (!RandomPercent(&worker->random, 30) || Ask(session, NULL, "SELECT 'a snapshot'"));
}

/*
 * ClaimAndUndo claims in a savepoint and rolls back to it. Returns false if the
 * transaction failed.
 */
static bool
ClaimAndUndo(Worker *worker, bool withLease)
{
	Session *session = worker->session;

	if (!Ask(session, NULL, "SAVEPOINT claiming"))
		return false;
	(void) Claim(worker, withLease);
	worker->leased = false;
	worker->point[0] = '\0';
	worker->charge[0] = '\0';
	return Ask(session, NULL, "ROLLBACK TO claiming");
}

/* ----------------------------------------------------------------
 * Attempts
 * ----------------------------------------------------------------
 */

/*
 * AttemptLeased claims with a lease, commits, and does the work.
 */
static void
AttemptLeased(Worker *worker)
{
	bool granted;

	if (RandomPercent(&worker->random, 70))
		granted = Claim(worker, true);
	else
		granted = Begin(worker) &&
				  (!RandomPercent(&worker->random, 25) || ClaimAndUndo(worker, true)) &&
				  Claim(worker, true) && Ask(worker->session, NULL, "COMMIT");
	if (!granted)
		return;
	worker->session->maySerialize = false;
	Work(worker);
}

/*
 * AttemptInTransaction claims without a lease, and does all work in the claiming
 * transaction.
 */
static void
AttemptInTransaction(Worker *worker)
{
	if (Begin(worker) && (!RandomPercent(&worker->random, 25) || ClaimAndUndo(worker, false)) &&
		Claim(worker, false))
		WorkInTransaction(worker);
}

/*
 * AttemptAnotherRequest claims with a different request than all others. If the key is
 * stored, that is a mismatch. Otherwise it can be granted, but is not completed, and so
 * cannot commit.
 */
static void
AttemptAnotherRequest(Worker *worker)
{
	Session *session = worker->session;
	bool acknowledged = Acknowledged(worker->key);
	bool try = RandomPercent(&worker->random, 50);
	char request[REQUEST_TEXT];

	RequestText(worker->key, true, &worker->random, request);
	if (Ask(session, "IK422 IK428", "SELECT * FROM idempotency.%s('" SCOPE "', '%s', '%s')",
			try ? "try_claim" : "claim", worker->name, request))
	{
		if (strcmp(Field(session, 0, "outcome"), "mismatched") == 0)
			Count(TALLY_MISMATCHED);
		else if (strcmp(Field(session, 0, "outcome"), "in_progress") != 0 || acknowledged)
			Violation("[requests] operation %d: outcome %s for another request (worker %lld)",
					  worker->key, Field(session, 0, "outcome"), (long long) worker->number);
	}
	else if (acknowledged && !session->lost && strcmp(session->state, "57014") != 0 &&
			 (try || strcmp(session->state, "IK422") != 0))
		Violation("[requests] operation %d: %s for another request, although it was acknowledged "
				  "(worker %lld)",
				  worker->key, session->state, (long long) worker->number);
}

/*
 * Attempt runs the attempt of a client's worker.
 */
void
ClientServe(Worker *worker)
{
	int dice = RandomBelow(&worker->random, 100);

	if (worker->reliable || dice >= REQUEST_OF_OTHERS_PERCENT + WITHOUT_LEASE_PERCENT)
		AttemptLeased(worker);
	else if (dice < REQUEST_OF_OTHERS_PERCENT)
		AttemptAnotherRequest(worker);
	else
		AttemptInTransaction(worker);
}
