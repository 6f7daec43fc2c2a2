/*-------------------------------------------------------------------------
 *
 * work.c
 *	  The work of an operation: charge the customer at the provider, write the
 *	  order, and finish.
 *
 *		claim | checkpoint | charge | checkpoint | write, finish
 *
 * Each bar is a commit, and a point where a worker can fail. The provider is called
 * through a separate connection, and its charges cannot be rolled back. It charges once
 * for the key that is derived from the operation's key. The second checkpoint stores
 * its response, from which the next owner continues. The order and the outcome are
 * written in one transaction with the token.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ledger.h"
#include "tally.h"
#include "work.h"

static bool
IsGuarded(int key)
{
	return key % 2 != 0;
}

/* ----------------------------------------------------------------
 * The provider
 * ----------------------------------------------------------------
 */

/*
 * Charge charges the customer. A worker without a response asks again, or gives up with
 * unknown outcome. Returns false if it gives up.
 */
static bool
Charge(Worker *worker)
{
	Session *provider = worker->provider;
	char key[64];

	snprintf(key, sizeof(key), "'%s'", worker->derived);
	if (WrongOnPurpose("derived"))
		snprintf(key, sizeof(key), "gen_random_uuid()");
	if (WrongOnPurpose("charge") && RandomPercent(&worker->random, 30))
	{
		strcpy(worker->charge, "0");
		return true;
	}

	while (!Ask(provider, NULL, "SELECT * FROM provider.charge(%s, '%s', %d)", key, worker->name,
				AmountOf(worker->key)))
	{
		if (!worker->persistent || worker->reconnects++ >= MOST_RECONNECTS)
			return false;
		SessionSettle(provider);
	}
	Count(strcmp(Field(provider, 0, "asked"), "1") == 0 ? TALLY_CHARGED : TALLY_CHARGED_AGAIN);
	snprintf(worker->charge, sizeof(worker->charge), "%s", Field(provider, 0, "id"));
	worker->declined = strcmp(Field(provider, 0, "declined"), "t") == 0;
	return true;
}

/*
 * ChargeAndStore charges unless a former owner has stored its charge. Sometimes it
 * charges nevertheless, which must have no effect.
 */
static bool
ChargeAndStore(Worker *worker)
{
	char state[96];

	if (strcmp(worker->point, "charged") == 0 && !RandomPercent(&worker->random, 20))
		return true;
	if (!Charge(worker) || !WorkerAlive(worker, PHASE_CHARGED))
		return false;
	snprintf(state, sizeof(state), "{\"charge\": %s,  \"declined\":%s}", worker->charge,
			 worker->declined ? "true" : "false");
	return Checkpoint(worker, "charged", state);
}

/* ----------------------------------------------------------------
 * The last transaction
 * ----------------------------------------------------------------
 */

static bool
Insert(Worker *worker, const char *expected)
{
	if (WrongOnPurpose("effect") && RandomPercent(&worker->random, 30))
		return true;
	return Ask(worker->session, expected, "INSERT INTO %s VALUES ('%s', %d, %lld, %s)",
			   TableOf(worker->key), worker->name, AmountOf(worker->key),
			   (long long) worker->number, worker->charge);
}

/*
 * BreakFence does what no worker is allowed to do: it writes the order although its
 * token was rejected.
 */
static void
BreakFence(Worker *worker)
{
	if (WrongOnPurpose("fence"))
		(void) Insert(worker, NULL);
}

/*
 * Write writes the order, unless the customer's card was declined.
 */
static bool
Write(Worker *worker)
{
	return worker->declined || Insert(worker, NULL);
}

static bool
Finish(Worker *worker, const Reply *reply)
{
	char token[32] = "NULL";

	if (worker->leased)
		snprintf(token, sizeof(token), "%lld", (long long) worker->token);
	return Ask(worker->session, "IK410",
			   "SELECT stress.finish('%s', %lld, %s, %s, %d, nullif('%s', ''), nullif('%s', ''))",
			   worker->name, (long long) worker->number, token, reply->failed ? "true" : "false",
			   reply->status, reply->headers ? reply->headers : "",
			   reply->response ? reply->response : "");
}

/*
 * FinishInSavepoint finishes in a savepoint, so that a rejected token can be rolled
 * back; the transaction must still fail to commit.
 */
static bool
FinishInSavepoint(Worker *worker, const Reply *reply)
{
	Session *session = worker->session;

	if (!Ask(session, NULL, "SAVEPOINT finishing"))
		return false;
	if (Finish(worker, reply))
		return Ask(session, NULL, "RELEASE finishing");
	if (strcmp(session->state, "IK410") != 0 || !Ask(session, NULL, "ROLLBACK TO finishing"))
		return false;
	if (Ask(session, "IK410", "COMMIT"))
		Violation("[commit] operation %d: worker %lld lost its lease and committed", worker->key,
				  (long long) worker->number);
	else if (strcmp(session->state, "IK410") == 0)
		Count(TALLY_REJECTED);
	return false;
}

/*
 * CanCatch tells whether a rejected token can be rolled back: in the portable edition, the
 * transaction could then commit.
 */
static bool
CanCatch(void)
{
	const char *edition = getenv("EDITION");

	return edition == NULL || strcmp(edition, "portable") != 0;
}

/*
 * WriteAndFinish writes and finishes, in either order. A guarded table needs an earlier
 * heartbeat, which counts as a claim.
 */
static bool
WriteAndFinish(Worker *worker, const Reply *reply)
{
	bool (*finish)(Worker *, const Reply *) =
		RandomPercent(&worker->random, 30) && CanCatch() ? FinishInSavepoint : Finish;

	if (worker->leased && IsGuarded(worker->key))
	{
		if (RandomPercent(&worker->random, 3))
		{
			if (Insert(worker, "IK403") && !WrongOnPurpose("effect"))
				Violation("[guard] operation %d: worker %lld wrote without a claim", worker->key,
						  (long long) worker->number);
			return false;
		}
		if (!Renew(worker))
			return false;
	}
	if (IsGuarded(worker->key) || RandomPercent(&worker->random, 50))
		return Write(worker) && WorkerAlive(worker, PHASE_WRITTEN) && finish(worker, reply);
	return finish(worker, reply) && WorkerAlive(worker, PHASE_WRITTEN) && Write(worker);
}

/*
 * Commit commits; sometimes the reply is not read.
 */
static bool
Commit(Worker *worker)
{
	if (!worker->reliable && RandomPercent(&worker->random, 3))
	{
		Count(TALLY_UNREAD);
		SessionSetFault(worker->session, NETWORK_DROP, 0);
	}
	return Ask(worker->session, "IK410", "COMMIT");
}

/*
 * Answer returns the committed response to the client.
 */
static void
Answer(Worker *worker, const Reply *reply)
{
	char *answer = ReplyAnswer(reply);

	AcknowledgeAnswer(worker->key, answer, NULL);
	free(answer);
	Count(reply->failed ? TALLY_FAILED : TALLY_COMPLETED);
	worker->answered = true;
}

/*
 * LastTransaction writes, finishes and commits. "begin" begins the transaction, or is
 * empty if it has begun.
 */
static bool
LastTransaction(Worker *worker, const char *begin, const Reply *reply)
{
	Session *session = worker->session;
	bool late;
	bool done;

	worker->inTransaction = true;
	done = (*begin == '\0' || Ask(session, NULL, "%s", begin)) && WriteAndFinish(worker, reply) &&
		   WorkerAlive(worker, PHASE_FINISHED);
	late = worker->leased && Microseconds() > worker->leaseEnd;
	done = done && Commit(worker);
	worker->inTransaction = false;
	if (done)
	{
		Answer(worker, reply);
		if (late)
			Count(TALLY_LATE);
	}
	else if (Fenced(worker))
		BreakFence(worker);
	return done;
}

/* ----------------------------------------------------------------
 * All steps
 * ----------------------------------------------------------------
 */

static Reply
ReplyOf(Worker *worker)
{
	return ReplyMake(worker->number, worker->declined, &worker->random);
}

/*
 * FinishLeased runs the last transaction under a lease, repeatedly if needed: after a
 * lost reply to COMMIT it might have committed or not. Some workers repeat it without
 * reason, which must be rejected.
 */
static void
FinishLeased(Worker *worker)
{
	static const char *const begins[] = {"BEGIN", "BEGIN", "BEGIN",
										 "BEGIN ISOLATION LEVEL REPEATABLE READ",
										 "BEGIN ISOLATION LEVEL SERIALIZABLE"};
	int level = RandomBelow(&worker->random, 5);
	bool twice = RandomPercent(&worker->random, 3);
	Reply reply = ReplyOf(worker);
	bool done;

	do
	{
		worker->session->maySerialize = level >= 3;
		done = LastTransaction(worker, begins[level], &reply);
	} while (!done && Recover(worker));
	if (done && twice && Recover(worker))
		(void) LastTransaction(worker, begins[0], &reply);
	ReplyFree(&reply);
}

/*
 * Work executes an operation under a lease.
 */
void
Work(Worker *worker)
{
	if (!WorkerAlive(worker, PHASE_CLAIMED))
		return;
	if (worker->point[0] == '\0' && RandomPercent(&worker->random, 50) &&
		!Checkpoint(worker, "prepared", "{}"))
		return;
	if (WorkerAlive(worker, PHASE_PREPARED) && ChargeAndStore(worker) &&
		WorkerAlive(worker, PHASE_NOTED))
		FinishLeased(worker);
}

/*
 * WorkInTransaction executes an operation under a claim without a lease, in the
 * claiming transaction; the provider is called outside of it.
 */
void
WorkInTransaction(Worker *worker)
{
	Reply reply;

	worker->inTransaction = true;
	if (!WorkerAlive(worker, PHASE_CLAIMED) || !ChargeAndStore(worker))
		return;
	reply = ReplyOf(worker);
	(void) LastTransaction(worker, "", &reply);
	ReplyFree(&reply);
}
