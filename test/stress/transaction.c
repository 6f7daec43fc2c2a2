/*-------------------------------------------------------------------------
 *
 * transaction.c
 *	  Attempts that claim in one statement and complete in another.
 *
 * The client claims, writes and completes in separate statements, with delays between
 * them, at any isolation level, for one key or two. It uses savepoints and rolls back
 * to them, can give up at any step, and makes the mistakes that the extension must
 * reject. Every step can be its last.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ledger.h"
#include "step.h"
#include "tally.h"
#include "transaction.h"

/* ----------------------------------------------------------------
 * Claiming
 * ----------------------------------------------------------------
 */

/*
 * Claim claims the key in one of several ways.
 */
static Grant
Claim(Attempt *attempt, Part *part)
{
	static const char *const functions[] = {"claim", "claim", "try_claim", "try_claim"};
	Session *session = attempt->session;
	int way = attempt->patient ? 0 : RandomBelow(&attempt->random, 4);
	bool acknowledged = Acknowledged(part->key);
	char request[REQUEST_TEXT];
	char wait[32] = "";

	RequestText(part->key, false, &attempt->random, request);
	if (way % 2 == 1)
		snprintf(wait, sizeof(wait), ", wait => '%d ms'", RandomBelow(&attempt->random, 15));
	if (!Ask(session, NULL, "SELECT * FROM idempotency.%s('%s', '%s', '%s'%s)", functions[way],
			 ScopeOf(part->key), part->name, request, wait))
	{
		Refused(attempt, part->key, acknowledged, way >= 2);
		return GRANT_ERROR;
	}
	return ReadGrant(attempt, part->key, acknowledged, false);
}

/*
 * ClaimInSavepoint claims, sometimes writes and completes, and rolls all of it back;
 * then a write must fail, unless it owns another key. Returns false if the transaction
 * failed.
 */
static bool
ClaimInSavepoint(Attempt *attempt, Part *part)
{
	Session *session = attempt->session;

	if (!Ask(session, NULL, "SAVEPOINT claiming"))
		return false;
	if (Claim(attempt, part) == GRANT_CLAIMED && RandomPercent(&attempt->random, 60) &&
		Insert(attempt, part, 1, NULL) && RandomPercent(&attempt->random, 60))
		(void) Ask(session, NULL, "SELECT idempotency.complete('%s', '%s', '{\"undone\": true}')",
				   ScopeOf(part->key), part->name);
	if (session->lost || !RollBackTo(attempt, "claiming"))
		return false;
	if (!attempt->owner && RandomPercent(&attempt->random, 10))
		return WriteWithoutGrant(attempt, part) != GRANT_ERROR;
	return true;
}

/*
 * AskAgain claims a key that this transaction has already claimed, which must be in
 * progress, or, if "answer" is not NULL, has finished, which must replay it.
 */
static bool
AskAgain(Attempt *attempt, const Part *part, const char *answer)
{
	Session *session = attempt->session;
	const char *expected = answer == NULL ? "in_progress" : "replayed";
	char *acknowledged;

	if (!RandomPercent(&attempt->random, 5))
		return true;
	if (!Ask(session, NULL, "SELECT * FROM idempotency.try_claim('%s', '%s')", ScopeOf(part->key),
			 part->name))
		return false;

	acknowledged = ResultAnswer(session);
	if (strcmp(Field(session, 0, "outcome"), expected) != 0 ||
		(answer != NULL && strcmp(acknowledged, answer) != 0))
		Violation("[again] attempt %lld, which owns operation %d, received %s: %.300s",
				  (long long) attempt->number, part->key, Field(session, 0, "outcome"),
				  acknowledged);
	free(acknowledged);
	return true;
}

static Ending
PickEnd(Attempt *attempt)
{
	int dice = RandomBelow(&attempt->random, 100);

	if (dice < 70)
		return END_SUCCEED;
	if (dice < 85)
		return END_DECLINE;
	if (dice < 90)
		return END_RELEASE;
	return dice < 95 ? END_FORGET : END_TWICE;
}

/*
 * BeginPart claims an operation and, if it is granted, executes it.
 */
static Grant
BeginPart(Attempt *attempt, Part *part)
{
	bool done;

	if (RandomPercent(&attempt->random, 12) && !ClaimInSavepoint(attempt, part))
		return GRANT_ERROR;
	part->grant = Claim(attempt, part);
	if (part->grant == GRANT_NOT && RandomPercent(&attempt->random, 6))
		return WriteWithoutGrant(attempt, part);
	if (part->grant != GRANT_CLAIMED)
		return part->grant;

	attempt->owner = true;
	part->ending = PickEnd(attempt);
	done = Delay(attempt);
	if (done && part->ending == END_DECLINE)
		done = WriteAndFail(attempt, part);
	else if (done && part->ending != END_RELEASE)
		done = Write(attempt, part);
	return done && AskAgain(attempt, part, NULL) ? GRANT_CLAIMED : GRANT_ERROR;
}

/* ----------------------------------------------------------------
 * Finishing
 * ----------------------------------------------------------------
 */

static bool
Store(Attempt *attempt, const Part *part, const Reply *reply, const char *expected)
{
	const char *quote = reply->headers == NULL ? "" : "'";
	const char *quoteResponse = reply->response == NULL ? "" : "'";

	return Ask(attempt->session, expected, "SELECT idempotency.%s('%s', '%s', %s%s%s, %d, %s%s%s)",
			   reply->failed ? "fail" : "complete", ScopeOf(part->key), part->name, quoteResponse,
			   reply->response ? reply->response : "NULL", quoteResponse, reply->status, quote,
			   reply->headers ? reply->headers : "NULL", quote);
}

/*
 * StoreAndUndo stores the reply in a savepoint and rolls it back, so that the claim is
 * open again.
 */
static bool
StoreAndUndo(Attempt *attempt, const Part *part, const Reply *reply)
{
	if (!Ask(attempt->session, NULL, "SAVEPOINT storing"))
		return false;
	return Store(attempt, part, reply, NULL) && RollBackTo(attempt, "storing");
}

/*
 * StoreTwice stores a reply a second time, which must be rejected. The transaction must
 * then fail at commit, although the error is rolled back, except in the portable edition.
 */
static bool
StoreTwice(Attempt *attempt, const Part *part, const Reply *reply)
{
	const char *edition = getenv("EDITION");

	if (!Ask(attempt->session, NULL, "SAVEPOINT again"))
		return false;
	if (Store(attempt, part, reply, "IK412"))
		Violation("[twice] attempt %lld completed operation %d twice", (long long) attempt->number,
				  part->key);
	else if (strcmp(attempt->session->state, "IK412") != 0)
		return false;
	if (edition == NULL || strcmp(edition, "portable") != 0)
		attempt->refusal = "IK412";
	return RollBackTo(attempt, "again");
}

/*
 * FinishPart ends a claimed operation in the chosen way.
 */
static bool
FinishPart(Attempt *attempt, const Part *part)
{
	Reply reply;
	char *answer;
	bool done;

	if (part->ending == END_FORGET)
	{
		if (attempt->refusal == NULL)
			attempt->refusal = "IK428";
		return true;
	}
	if (part->ending == END_RELEASE)
		return Ask(attempt->session, NULL, "SELECT idempotency.release('%s', '%s')",
				   ScopeOf(part->key), part->name);

	reply = ReplyMake(attempt->number, part->ending == END_DECLINE, &attempt->random);
	answer = ReplyAnswer(&reply);
	done = !RandomPercent(&attempt->random, 10) || StoreAndUndo(attempt, part, &reply);
	done = done && Store(attempt, part, &reply, NULL) && AskAgain(attempt, part, answer);
	if (done && part->ending == END_TWICE)
		done = StoreTwice(attempt, part, &reply);
	ReplyFree(&reply);
	Pend(attempt, part->key, answer);
	return done;
}

/* ----------------------------------------------------------------
 * The transaction
 * ----------------------------------------------------------------
 */

/*
 * AttemptTransaction runs a transaction that claims one key or two, and ends them, in
 * any order.
 */
void
AttemptTransaction(Attempt *attempt)
{
	Part parts[2];
	int keys[2];
	int count = RandomPercent(&attempt->random, 25) ? 2 : 1;
	int first;

	if (count == 2)
		PickPair(attempt->number, &attempt->random, keys);
	else
		keys[0] = PickKey(attempt->number, &attempt->random);
	for (int i = 0; i < count; i++)
	{
		PartFill(&parts[i], keys[i]);
		attempt->plain &= !IsInbox(keys[i]);
	}
	attempt->patient = count == 2;

	if (!Begin(attempt))
		return;
	for (int i = 0; i < count; i++)
	{
		if (GivesUp(attempt) || BeginPart(attempt, &parts[i]) == GRANT_ERROR || !Delay(attempt))
			return;
	}

	first = RandomBelow(&attempt->random, count);
	for (int i = 0; i < count; i++)
	{
		Part *part = &parts[(first + i) % count];

		if (GivesUp(attempt) || (part->grant == GRANT_CLAIMED && !FinishPart(attempt, part)))
			return;
	}
	if (!Delay(attempt) || !End(attempt))
		return;
	for (int i = 0; i < count; i++)
	{
		if (parts[i].grant == GRANT_CLAIMED && parts[i].ending == END_RELEASE)
			Count(TALLY_RELEASED);
	}
}
