/*-------------------------------------------------------------------------
 *
 * call.c
 *	  Attempts that are one call.
 *
 * The whole operation is a function in the server (schema.sql), which is the
 * recommended use of the extension: one statement, one transaction. This file also has
 * the calls that must be rejected, and that of the final pass.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "call.h"
#include "ledger.h"
#include "tally.h"

/*
 * Granted records the response of an owner that has committed. The session's result is
 * the operation.
 */
static void
Granted(Attempt *attempt, int key)
{
	Session *session = attempt->session;

	if (Field(session, 0, "outcome") == NULL)
		Count(TALLY_RELEASED);
	else if (Field(session, 0, "status") == NULL)
		Violation("[commit] attempt %lld claimed operation %d, did not complete it and committed",
				  (long long) attempt->number, key);
	else
	{
		Pend(attempt, key, ResultAnswer(session));
		PendingHold(attempt);
	}
}

/* ----------------------------------------------------------------
 * Charges
 * ----------------------------------------------------------------
 */

/*
 * AskCharge calls the stored procedure.
 */
static bool
AskCharge(Attempt *attempt, int key, const char *wait, const char *ending)
{
	bool declined = strcmp(ending, "decline") == 0;
	Reply reply = ReplyMake(attempt->number, declined, &attempt->random);
	const char *expected = NULL;
	const char *begin;
	const char *commit;
	char request[REQUEST_TEXT];
	char name[KEY_TEXT];
	char delay[DELAY_TEXT];
	bool done;

	if (strcmp(ending, "raise") == 0)
		expected = "ST001";
	else if (strcmp(ending, "forget") == 0)
		expected = "IK428";
	KeyText(key, name);
	RequestText(key, false, &attempt->random, request);
	DelayText(attempt, delay);
	Frame(attempt, &begin, &commit);
	done = Ask(attempt->session, expected,
			   "%s SELECT * FROM stress.charge('%s', '%s', %d, %lld, %s, '%s', %s, %d, "
			   "nullif('%s', ''), nullif('%s', '')) %s",
			   begin, name, request, AmountOf(key), (long long) attempt->number, wait, ending,
			   delay, reply.status, reply.headers ? reply.headers : "",
			   reply.response ? reply.response : "", commit);
	ReplyFree(&reply);
	return done;
}

/*
 * AttemptProcedure calls the stored procedure, which succeeds, fails in some way, or
 * does not complete its claim.
 */
void
AttemptProcedure(Attempt *attempt)
{
	static const char *const endings[] = {"succeed", "succeed", "succeed", "succeed", "undo",
										  "decline", "raise",	"raise",   "forget",  "release"};
	const char *ending = endings[RandomBelow(&attempt->random, 10)];
	int key = PickKey(attempt->number, &attempt->random);
	char wait[32] = "NULL";
	bool acknowledged;

	if (IsInbox(key))
		key--;
	if (RandomPercent(&attempt->random, 50))
		snprintf(wait, sizeof(wait), "'%d ms'", RandomBelow(&attempt->random, 15));
	if (!Timeouts(attempt, ""))
		return;
	acknowledged = Acknowledged(key);
	if (!AskCharge(attempt, key, wait, ending))
		Refused(attempt, key, acknowledged, false);
	else if (ReadGrant(attempt, key, acknowledged, false) == GRANT_CLAIMED)
		Granted(attempt, key);
}

/*
 * AttemptRun calls run(), whose handler succeeds, declines or fails.
 */
void
AttemptRun(Attempt *attempt)
{
	static const char *const endings[] = {"succeed", "succeed", "decline", "raise"};
	Session *session = attempt->session;
	const char *ending = endings[RandomBelow(&attempt->random, 4)];
	int key = PickKey(attempt->number, &attempt->random);
	char request[REQUEST_TEXT];
	char name[KEY_TEXT];
	char delay[DELAY_TEXT];
	bool acknowledged;
	char *answer;

	if (IsInbox(key))
		key--;
	KeyText(key, name);
	RequestText(key, false, &attempt->random, request);
	DelayText(attempt, delay);
	if (!Timeouts(attempt, ""))
		return;
	acknowledged = Acknowledged(key);
	if (!Ask(session, strcmp(ending, "raise") == 0 ? "ST001" : NULL,
			 "SELECT set_config('stress.attempt', '%lld', true), "
			 "set_config('stress.ending', '%s', true), set_config('stress.delay', '%s', true); "
			 "SELECT * FROM idempotency.run('stress/charge', '%s', '%s', "
			 "'stress.handle(idempotency.document)')",
			 (long long) attempt->number, ending, delay, name, request))
	{
		Refused(attempt, key, acknowledged, false);
		return;
	}
	if (ReadGrant(attempt, key, acknowledged, false) != GRANT_CLAIMED)
		return;

	answer = ResultAnswer(session);
	Count(strcmp(Field(session, 0, "failed"), "t") == 0 ? TALLY_FAILED : TALLY_COMPLETED);
	AcknowledgeAnswer(key, answer, Field(session, 0, "expires_at"));
	free(answer);
}

/*
 * AttemptEach calls the procedure that commits after each key.
 */
void
AttemptEach(Attempt *attempt)
{
	int keys[2];
	char names[2][KEY_TEXT];
	char requests[2][REQUEST_TEXT];

	for (int i = 0; i < 2; i++)
	{
		keys[i] = PickKey(attempt->number, &attempt->random);
		if (IsInbox(keys[i]))
			keys[i]--;
		KeyText(keys[i], names[i]);
		RequestText(keys[i], false, &attempt->random, requests[i]);
	}
	if (!Ask(attempt->session, NULL,
			 "CALL stress.charge_each(ARRAY['%s', '%s'], ARRAY['%s', '%s'], ARRAY[%d, %d], %lld)",
			 names[0], names[1], requests[0], requests[1], AmountOf(keys[0]), AmountOf(keys[1]),
			 (long long) attempt->number))
		return;
	Acknowledge(keys[0]);
	Acknowledge(keys[1]);
}

/* ----------------------------------------------------------------
 * Calls that must be rejected
 * ----------------------------------------------------------------
 */

/*
 * AttemptAnotherRequest claims with a different request than all others. If the key is
 * stored, that is a mismatch. Otherwise it can be granted, but is not completed, and so
 * cannot commit.
 */
void
AttemptAnotherRequest(Attempt *attempt)
{
	Session *session = attempt->session;
	int key = PickKey(attempt->number, &attempt->random);
	bool inTransaction = RandomPercent(&attempt->random, 50);
	bool try = RandomPercent(&attempt->random, 50);
	bool acknowledged;
	char request[REQUEST_TEXT];
	char name[KEY_TEXT];

	/* Behind the front, where keys are stored. */
	if (IsInbox(key))
		key--;
	if (key > 16 && RandomPercent(&attempt->random, 70))
		key -= 16;
	KeyText(key, name);
	RequestText(key, true, &attempt->random, request);
	acknowledged = Acknowledged(key);
	if (!Ask(session, try ? "IK428" : "IK422 IK428",
			 "%s SELECT * FROM idempotency.%s('stress/charge', '%s', '%s')",
			 inTransaction ? "BEGIN;" : "", try ? "try_claim" : "claim", name, request))
	{
		Refused(attempt, key, acknowledged, try);
		if (acknowledged && strcmp(session->state, "IK428") == 0)
			Violation("[claims] operation %d was claimed, although it was acknowledged", key);
	}
	else if (ReadGrant(attempt, key, acknowledged, true) == GRANT_CLAIMED && !inTransaction)
		Violation("[commit] attempt %lld claimed operation %d and nothing else, and committed",
				  (long long) attempt->number, key);
}

/*
 * AttemptWithoutClaim writes or completes an operation without a claim.
 */
void
AttemptWithoutClaim(Attempt *attempt)
{
	Session *session = attempt->session;
	int key = PickKey(attempt->number, &attempt->random);
	char name[KEY_TEXT];

	KeyText(key, name);
	if (RandomPercent(&attempt->random, 70))
	{
		if (Ask(session, "IK403", "INSERT INTO %s VALUES ('%s', %d, %lld)", TableOf(key), name,
				AmountOf(key), (long long) attempt->number))
			Violation("[guard] attempt %lld wrote operation %d without a claim",
					  (long long) attempt->number, key);
	}
	else if (Ask(session, "IK412", "SELECT idempotency.complete('%s', '%s', '{}')", ScopeOf(key),
				 name))
		Violation("[twice] attempt %lld completed operation %d without a claim",
				  (long long) attempt->number, key);
}

/* ----------------------------------------------------------------
 * The final pass
 * ----------------------------------------------------------------
 */

/*
 * AttemptFinal retries an operation with a plain call and no limit of the wait. Returns
 * whether the operation is done.
 */
bool
AttemptFinal(Attempt *attempt, int key)
{
	bool acknowledged = Acknowledged(key);
	char name[KEY_TEXT];

	if (!IsInbox(key))
	{
		if (!AskCharge(attempt, key, "'1 minute'", "succeed"))
			return false;
		if (ReadGrant(attempt, key, acknowledged, false) == GRANT_CLAIMED)
			Granted(attempt, key);
		return Acknowledged(key);
	}

	KeyText(key, name);
	if (!Ask(attempt->session, NULL, "SELECT stress.deliver('%s', %d, %lld, 'succeed', 0)", name,
			 AmountOf(key), (long long) attempt->number))
		return false;
	if (ReadOnce(attempt, key, acknowledged, Value(attempt->session, 0, 0)[0] == 't'))
		Pend(attempt, key, NULL);
	PendingHold(attempt);
	return true;
}
