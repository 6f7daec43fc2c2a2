/*-------------------------------------------------------------------------
 *
 * step.c
 *	  The steps of a transaction, except claims.
 *
 * Every step returns whether the transaction can continue.
 *
 *-------------------------------------------------------------------------
 */
#include <string.h>

#include "prepared.h"
#include "step.h"
#include "tally.h"

/*
 * GivesUp returns whether the client gives up and rolls back.
 */
bool
GivesUp(Attempt *attempt)
{
	if (!RandomPercent(&attempt->random, 2))
		return false;
	Count(TALLY_ROLLED_BACK);
	return true;
}

/*
 * Begin begins a transaction. Above READ COMMITTED its snapshot can be old at the
 * claim.
 */
bool
Begin(Attempt *attempt)
{
	static const char *const levels[] = {"READ COMMITTED", "READ COMMITTED",  "READ COMMITTED",
										 "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"};
	const char *level = levels[RandomBelow(&attempt->random, 6)];

	attempt->plain &= level == levels[0];
	attempt->session->maySerialize = !attempt->plain;
	if (!Ask(attempt->session, NULL, "BEGIN ISOLATION LEVEL %s", level))
		return false;
	if (!Timeouts(attempt, "LOCAL"))
		return false;
	return !RandomPercent(&attempt->random, 30) ||
		   Ask(attempt->session, NULL, "SELECT 'a snapshot'");
}

bool
RollBackTo(Attempt *attempt, const char *savepoint)
{
	Count(TALLY_SAVEPOINT);
	return Ask(attempt->session, NULL, "ROLLBACK TO %s", savepoint);
}

bool
Insert(Attempt *attempt, const Part *part, int amount, const char *expected)
{
	return Ask(attempt->session, expected, "INSERT INTO %s VALUES ('%s', %d, %lld)",
			   TableOf(part->key), part->name, amount, (long long) attempt->number);
}

/*
 * Write writes the operation's effect, sometimes after a rolled back attempt.
 */
bool
Write(Attempt *attempt, const Part *part)
{
	int dice = RandomBelow(&attempt->random, 10);
	Session *session = attempt->session;
	int amount = AmountOf(part->key);

	if (dice < 7)
		return Insert(attempt, part, amount, NULL);
	if (!Ask(session, NULL, "SAVEPOINT writing") || !Insert(attempt, part, amount, NULL))
		return false;
	if (dice < 8)
		return Ask(session, NULL, "RELEASE writing");
	return RollBackTo(attempt, "writing") && Insert(attempt, part, amount, NULL);
}

/*
 * WriteAndFail writes the effect in a savepoint and rolls it back: because of an error,
 * or because the charge is declined.
 */
bool
WriteAndFail(Attempt *attempt, const Part *part)
{
	bool byError = RandomPercent(&attempt->random, 50);

	if (!Ask(attempt->session, NULL, "SAVEPOINT declining"))
		return false;
	if (!Insert(attempt, part, byError ? -1 : AmountOf(part->key), "23514") &&
		strcmp(attempt->session->state, "23514") != 0)
		return false;
	return RollBackTo(attempt, "declining");
}

/*
 * WriteWithoutGrant tries to write although the key was not granted, which must be
 * rejected. Returns GRANT_ERROR: the transaction failed.
 */
Grant
WriteWithoutGrant(Attempt *attempt, const Part *part)
{
	if (Insert(attempt, part, AmountOf(part->key), "IK403"))
		Violation("[guard] attempt %lld wrote operation %d without a claim",
				  (long long) attempt->number, part->key);
	return GRANT_ERROR;
}

/*
 * PartFill initializes the part of an operation.
 */
void
PartFill(Part *part, int key)
{
	memset(part, 0, sizeof(*part));
	part->key = key;
	KeyText(key, part->name);
}

/*
 * Commit commits and records the pending responses, unless the transaction must be
 * rejected. Returns whether it is known to have committed.
 */
static bool
Commit(Attempt *attempt)
{
	Session *session = attempt->session;

	if (!Ask(session, attempt->refusal, "COMMIT"))
		return false;
	if (strcmp(PQcmdStatus(session->result), "COMMIT") != 0)
		return false;
	if (attempt->refusal != NULL)
		Violation("[commit] attempt %lld should fail with %s, and committed",
				  (long long) attempt->number, attempt->refusal);
	PendingHold(attempt);
	return true;
}

/*
 * End ends the transaction in one of several ways. Returns whether it is known to have
 * committed.
 */
bool
End(Attempt *attempt)
{
	int dice = RandomBelow(&attempt->random, 100);

	if (dice < 78)
		return Commit(attempt);
	if (dice < 80)
	{
		Count(TALLY_UNREAD);
		SessionSetFault(attempt->session, NETWORK_DROP, 0);
		return Commit(attempt);
	}
	if (dice < 90)
	{
		if (Prepare(attempt) && attempt->refusal != NULL && !attempt->session->lost)
			Violation("[commit] attempt %lld should fail with %s, and was prepared",
					  (long long) attempt->number, attempt->refusal);
	}
	else if (Ask(attempt->session, NULL, "ROLLBACK"))
		Count(TALLY_ROLLED_BACK);
	return false;
}
