/*-------------------------------------------------------------------------
 *
 * attempt.c
 *	  What all attempts have in common.
 *
 * An attempt may fail in any way; the next one finds out how things stand.
 * Only two things count: what a client was told (ledger.c), and what is in the
 * tables in the end (check.c).  Answers that an owner makes are pending until
 * its COMMIT has been confirmed.
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
 * How often something goes wrong on the way, in percent.  A new connection
 * costs the server as much as many attempts do.
 */
#define CANCEL_PERCENT 3
#define DROP_PERCENT 0.7
#define TIMEOUT_PERCENT 6

/* One call in three comes by the extended protocol. */
#define EXTENDED_PERCENT 33

/* Naps and fuses are up to this long; most are much shorter. */
#define LONGEST_NAP 5000

static int
SkewedMicroseconds(Random *random)
{
	double unit = RandomUnit(random);

	return (int) (unit * unit * LONGEST_NAP);
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
 * Endanger decides what the network will do to the attempt.
 */
void
Endanger(Attempt *attempt)
{
	Random *random = &attempt->random;

	if (RandomPercent(random, CANCEL_PERCENT))
		SessionLight(attempt->session, FUSE_CANCEL, SkewedMicroseconds(random));
	else if (RandomPercent(random, DROP_PERCENT))
		SessionLight(attempt->session, FUSE_DROP, SkewedMicroseconds(random));
}

/*
 * NapText writes how many seconds a function is to sleep.
 */
void
NapText(Attempt *attempt, char text[NAP_TEXT])
{
	int microseconds = 0;

	if (RandomPercent(&attempt->random, 40))
		microseconds = SkewedMicroseconds(&attempt->random);
	snprintf(text, NAP_TEXT, "%.6f", microseconds / 1e6);
}

/*
 * Nap lets some time pass, at times, in the server or on the way to it.
 * Returns false if the nap was disturbed.
 */
bool
Nap(Attempt *attempt)
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
 * Timeouts sets a statement_timeout or a lock_timeout, at times; "local" is
 * LOCAL in a transaction.  Returns false if that failed.
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
 * Frame surrounds a call with a transaction of another isolation level, at
 * times, all in one message.  "begin" and "commit" are set to what to put
 * before and behind it.
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
 * Answers
 * ----------------------------------------------------------------
 */

/*
 * Pend notes an answer that the owner will give when it has committed.  Takes
 * over "answer".
 */
void
Pend(Attempt *attempt, int key, char *answer)
{
	attempt->pending[attempt->pendings++] = (Pending){key, answer};
}

/*
 * PendingForget forgets the pending answers.
 */
void
PendingForget(Attempt *attempt)
{
	for (int i = 0; i < attempt->pendings; i++)
		free(attempt->pending[i].answer);
	attempt->pendings = 0;
}

/*
 * PendingHold makes the pending answers hold: they are committed.
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
 * ResultAnswer returns the answer in the session's result, which is an
 * operation.  The caller frees it.
 */
char *
ResultAnswer(Session *session)
{
	return AnswerText(Field(session, 0, "status"), Field(session, 0, "failed"),
					  Field(session, 0, "headers"), Field(session, 0, "response"));
}

/*
 * CheckInProgress reports a claim on a key that was acknowledged before, and
 * yet is said to be in progress.
 */
static void
CheckInProgress(Attempt *attempt, int key, bool acknowledged)
{
	if (acknowledged)
		Violation(
			"[progress] operation %d is in progress, though it was acknowledged (attempt %lld)",
			key, (long long) attempt->number);
}

/*
 * Refused handles a question for a key that failed: an acknowledged operation
 * cannot be in progress, and try_claim(), which "tried" stands for, says so in
 * its answer.
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
 * ReadGrant reads the operation that a claim returned.  "acknowledged" says
 * whether the key had been acknowledged before the question was sent, and
 * "another" that the claim was made with another request.  A replayed answer
 * is noted; it is committed, or else nobody else could have seen it.
 */
Grant
ReadGrant(Attempt *attempt, int key, bool acknowledged, bool another)
{
	Session *session = attempt->session;
	const char *outcome = Field(session, 0, "outcome");
	char *answer;

	/* without one, the claim was released again */
	if (outcome == NULL || strcmp(outcome, "claimed") == 0)
	{
		Count(TALLY_CLAIMED);
		if (acknowledged)
			Violation(
				"[claims] operation %d was claimed, though it was acknowledged (attempt %lld)", key,
				(long long) attempt->number);
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
 * ReadOnce reads what once() said about a message, and returns it.  False means
 * that the effect is committed; true holds when the transaction commits.
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
		Violation("[claims] message %d was new, though it was acknowledged (attempt %lld)", key,
				  (long long) attempt->number);
	return true;
}
