/*-------------------------------------------------------------------------
 *
 * attempt.c
 *	  Functions that all attempts share.
 *
 * An attempt can fail in any way; the next one determines the state. Only two things
 * count: the responses that clients received (ledger.c), and the final contents of the
 * tables (check.c). Responses of an owner are pending until its COMMIT is confirmed.
 *
 * An attempt belongs to one thread.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attempt.h"
#include "ledger.h"
#include "tally.h"

/*
 * Probabilities of faults, in percent. A new connection costs the server as much as
 * many attempts.
 */
#define CANCEL_PERCENT 3
#define DROP_PERCENT 0.7
#define TIMEOUT_PERCENT 6

/* One call in three uses the extended protocol. */
#define EXTENDED_PERCENT 33

/* Maximum microseconds of delays and of fault timers; most are much shorter. */
#define LONGEST_DELAY 5000

static int
SkewedMicroseconds(Random *random)
{
	double unit = RandomUnit(random);

	return (int) (unit * unit * LONGEST_DELAY);
}

/*
 * AttemptMake begins an attempt.
 */
void
AttemptMake(Attempt *attempt, Session *session, int64_t number)
{
	memset(attempt, 0, sizeof(*attempt));
	attempt->session = session;
	attempt->number = number;
	attempt->plain = true;
	RandomSeed(&attempt->random, config.seed, (uint64_t) number);
}

/*
 * Endanger chooses the network fault of the attempt.
 */
void
Endanger(Attempt *attempt)
{
	Random *random = &attempt->random;

	if (RandomPercent(random, CANCEL_PERCENT))
		SessionSetFault(attempt->session, NETWORK_CANCEL, SkewedMicroseconds(random));
	else if (RandomPercent(random, DROP_PERCENT))
		SessionSetFault(attempt->session, NETWORK_DROP, SkewedMicroseconds(random));
}

/*
 * DelayText writes how many seconds a function must sleep.
 */
void
DelayText(Attempt *attempt, char text[DELAY_TEXT])
{
	int microseconds = 0;

	if (RandomPercent(&attempt->random, 40))
		microseconds = SkewedMicroseconds(&attempt->random);
	snprintf(text, DELAY_TEXT, "%.6f", microseconds / 1e6);
}

/*
 * Delay sometimes waits, in the server or in the client. Returns false if the delay was
 * interrupted.
 */
bool
Delay(Attempt *attempt)
{
	int dice = RandomBelow(&attempt->random, 100);
	int microseconds = SkewedMicroseconds(&attempt->random);

	if (dice < 20)
		return Ask(attempt->session, NULL, "SELECT pg_sleep(%g)", microseconds / 1e6);
	if (dice < 40)
		SleepMicroseconds(microseconds);
	return true;
}

/*
 * Timeouts sometimes sets a statement_timeout or a lock_timeout; "local" is LOCAL in a
 * transaction. Returns false if that failed.
 */
bool
Timeouts(Attempt *attempt, const char *local)
{
	Session *session = attempt->session;
	const char *name = "statement_timeout";

	if (!RandomPercent(&attempt->random, TIMEOUT_PERCENT))
		return true;
	if (RandomPercent(&attempt->random, 50))
		name = "lock_timeout";
	session->mayTimeOut = true;
	session->mayCancel = true;
	return Ask(session, NULL, "SET %s %s = %d", local, name, 1 + RandomBelow(&attempt->random, 5));
}

/*
 * Frame sometimes wraps a call in a transaction of another isolation level, all in one
 * message. "begin" and "commit" are set to the SQL before and after the call.
 */
void
Frame(Attempt *attempt, const char **begin, const char **commit)
{
	int dice = RandomBelow(&attempt->random, 100);

	*begin = *commit = "";
	attempt->session->maySerialize = !attempt->plain;
	if (dice < EXTENDED_PERCENT)
		attempt->session->extended = true;
	else if (dice < 50)
	{
		*begin = dice < 42 ? "BEGIN ISOLATION LEVEL REPEATABLE READ;"
						   : "BEGIN ISOLATION LEVEL SERIALIZABLE;";
		*commit = "; COMMIT";
		attempt->session->maySerialize = true;
	}
}

/* ----------------------------------------------------------------
 * Responses
 * ----------------------------------------------------------------
 */

/*
 * Pend stores a response that the owner will give after its commit. Takes ownership of
 * "answer".
 */
void
Pend(Attempt *attempt, int key, char *answer)
{
	attempt->pending[attempt->pendings++] = (Pending){key, answer};
}

/*
 * PendingForget discards the pending responses.
 */
void
PendingForget(Attempt *attempt)
{
	for (int i = 0; i < attempt->pendings; i++)
		free(attempt->pending[i].answer);
	attempt->pendings = 0;
}

/*
 * PendingHold records the pending responses as acknowledged, because they are
 * committed.
 */
void
PendingHold(Attempt *attempt)
{
	for (int i = 0; i < attempt->pendings; i++)
	{
		Pending *pending = &attempt->pending[i];

		if (pending->answer == NULL)
		{
			Count(TALLY_ONCE_NEW);
			Acknowledge(pending->key);
			continue;
		}
		Count(pending->answer[4] == 't' ? TALLY_FAILED : TALLY_COMPLETED);
		AcknowledgeAnswer(pending->key, pending->answer, NULL);
	}
	PendingForget(attempt);
}

/*
 * ResultAnswer returns the response in the session's result, which is an operation. The
 * caller frees it.
 */
char *
ResultAnswer(Session *session)
{
	return AnswerText(Field(session, 0, "status"), Field(session, 0, "failed"),
					  Field(session, 0, "headers"), Field(session, 0, "response"));
}

/*
 * CheckInProgress reports a claim that is in progress on a key that was acknowledged
 * before.
 */
static void
CheckInProgress(Attempt *attempt, int key, bool acknowledged)
{
	if (acknowledged)
		Violation(
			"[progress] operation %d is in progress, although it was acknowledged (attempt %lld)",
			key, (long long) attempt->number);
}

/*
 * Refused handles a claim that failed: an acknowledged operation cannot be in progress.
 * try_claim(), if "tried" is true, returns that as an outcome.
 */
void
Refused(Attempt *attempt, int key, bool acknowledged, bool tried)
{
	if (strcmp(attempt->session->state, "IK409") != 0)
		return;
	CheckInProgress(attempt, key, acknowledged);
	if (tried)
		Violation("[requests] operation %d: try_claim() raised IK409 (attempt %lld)", key,
				  (long long) attempt->number);
}

/*
 * ReadGrant reads the operation that a claim returned. "acknowledged" is whether the
 * key was acknowledged before the claim was sent, "another" whether the claim had a
 * different request. A replayed response is recorded: it is committed, because it is
 * visible.
 */
Grant
ReadGrant(Attempt *attempt, int key, bool acknowledged, bool another)
{
	Session *session = attempt->session;
	const char *outcome = Field(session, 0, "outcome");
	char *answer;

	/* Without a lease, the claim was released. */
	if (outcome == NULL || strcmp(outcome, "claimed") == 0)
	{
		Count(TALLY_CLAIMED);
		if (acknowledged)
			Violation(
				"[claims] operation %d was claimed, although it was acknowledged (attempt %lld)",
				key, (long long) attempt->number);
		return GRANT_CLAIMED;
	}
	if (strcmp(outcome, "in_progress") == 0)
	{
		Count(TALLY_IN_PROGRESS);
		CheckInProgress(attempt, key, acknowledged);
		return GRANT_NOT;
	}
	if (strcmp(outcome, "mismatched") == 0 && another)
	{
		Count(TALLY_MISMATCHED);
		return GRANT_NOT;
	}
	if (strcmp(outcome, "replayed") != 0 || another)
	{
		Violation("[requests] operation %d: outcome %s for %s request (attempt %lld)", key, outcome,
				  another ? "another" : "the same", (long long) attempt->number);
		return GRANT_NOT;
	}

	Count(TALLY_REPLAYED);
	answer = ResultAnswer(session);
	AcknowledgeAnswer(key, answer, Field(session, 0, "expires_at"));
	free(answer);
	return GRANT_NOT;
}

/*
 * ReadOnce reads and returns the result of once() for a message. False means that the
 * effect is committed; true is valid once the transaction commits.
 */
bool
ReadOnce(Attempt *attempt, int key, bool acknowledged, bool isNew)
{
	if (!isNew)
	{
		Count(TALLY_ONCE_SEEN);
		Acknowledge(key);
		return false;
	}
	Count(TALLY_CLAIMED);
	if (acknowledged)
		Violation("[claims] message %d was new, although it was acknowledged (attempt %lld)", key,
				  (long long) attempt->number);
	return true;
}
