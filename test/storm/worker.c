/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  What becomes of a worker, and the calls that keep its lease.
 *
 * A worker dies, stalls, gives up or lives; its connection is terminated,
 * cancelled or dropped under its hands.  One that lost its connection may make
 * another and go on: it still has its token, and that is all that counts.  A
 * token that is refused must have been overtaken by something, and the log
 * has to show what.
 *
 * A worker belongs to one thread.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tally.h"
#include "worker.h"

/* In percent of the workers: what the network does to them. */
#define CANCEL_PERCENT 6
#define DROP_PERCENT 3
#define LONGEST_FUSE 40000 /* microseconds */

/* Milliseconds; whoever is calm has all the time that there is. */
#define SHORTEST_LEASE 20
#define LONGEST_LEASE 160
#define CALM_LEASE 5000

static Fate
PickFate(Random *random)
{
	int dice = RandomBelow(random, 100);

	if (dice < 12)
		return FATE_DIE;
	if (dice < 19)
		return FATE_TERMINATE;
	if (dice < 37)
		return FATE_STALL;
	return dice < 41 ? FATE_RELEASE : FATE_LIVE;
}

/*
 * WorkerMake makes the worker of that number.  A calm one lives, and has time:
 * a client whose workers have failed too often sends such.
 */
void
WorkerMake(Worker *worker, Seat *seat, int64_t number, int key, bool calm)
{
	Random *random = &worker->random;

	memset(worker, 0, sizeof(*worker));
	worker->session = &seat->session;
	worker->provider = &seat->provider;
	worker->number = number;
	worker->key = key;
	KeyText(key, worker->name);
	RandomSeed(random, config.seed, (uint64_t) number);
	Count(TALLY_ATTEMPTS);

	worker->leaseMs = SHORTEST_LEASE + RandomBelow(random, LONGEST_LEASE - SHORTEST_LEASE);
	worker->fate = PickFate(random);
	worker->when = (Phase) RandomBelow(random, PHASE_COUNT);
	worker->diligent = RandomPercent(random, 40);
	worker->persistent = RandomPercent(random, 60);
	worker->calm = calm;
	if (calm)
	{
		worker->leaseMs = CALM_LEASE;
		worker->fate = FATE_LIVE;
		worker->persistent = true;
	}
	else if (RandomPercent(random, CANCEL_PERCENT))
		SessionLight(worker->session, FUSE_CANCEL, RandomBelow(random, LONGEST_FUSE));
	else if (RandomPercent(random, DROP_PERCENT))
		SessionLight(worker->session, FUSE_DROP, RandomBelow(random, LONGEST_FUSE));
}

/*
 * Grant reads the operation that was just granted from a row of the session's
 * result.
 */
void
Grant(Worker *worker, int row)
{
	Session *session = worker->session;
	const char *token = Field(session, row, "token");
	const char *point = Field(session, row, "recovery_point");
	const char *state = Field(session, row, "state");

	worker->leased = token != NULL;
	worker->token = token == NULL ? 0 : strtoll(token, NULL, 10);
	worker->leaseEnd = Microseconds() + (int64_t) worker->leaseMs * 1000;
	snprintf(worker->derived, sizeof(worker->derived), "%s", Field(session, row, "derived"));
	snprintf(worker->point, sizeof(worker->point), "%s", point == NULL ? "" : point);
	if (strcmp(Field(session, row, "outcome"), "claimed") == 0)
		Count(worker->leased ? TALLY_CLAIMED : TALLY_OPEN_CLAIMED);
	else
		Count(worker->leased ? TALLY_TAKEN_OVER : TALLY_OPEN_TAKEN_OVER);
	if (point == NULL)
		return;

	/* {"charge": 1, "declined": false}, or {} from the first checkpoint */
	Count(TALLY_RESUMED);
	if (strcmp(point, "charged") == 0 &&
		sscanf(state == NULL ? "" : state, "{\"charge\": %31[0-9]", worker->charge) != 1)
		Violation("[history] operation %d: recovery point %s comes with state %s", worker->key,
				  point, state == NULL ? "NULL" : state);
	worker->declined = state != NULL && strstr(state, "true") != NULL;
}

/* ----------------------------------------------------------------
 * Fates
 * ----------------------------------------------------------------
 */

/*
 * Stall sleeps past the end of the lease, by up to its length or by very
 * little, so that the worker may be overtaken or not.
 */
static void
Stall(Worker *worker, Phase phase)
{
	int64_t left = worker->leaseEnd - Microseconds();
	bool barely = phase == PHASE_NOTED || RandomPercent(&worker->random, 30);
	double longer = worker->leaseMs * (barely ? 30 : 1000);

	Count(TALLY_STALLED);
	if (left < 0 || !worker->leased)
		left = 0;
	SleepMicroseconds(left + (int64_t) (RandomUnit(&worker->random) * longer));
}

/*
 * Release gives the operation up.
 */
static void
Release(Worker *worker)
{
	if (Ask(worker->session, "IK410", "SELECT storm.release('%s', %lld, %lld)", worker->name,
			(long long) worker->number, (long long) worker->token))
		Count(TALLY_RELEASED);
	else
		(void) Fenced(worker);
}

/*
 * MeetFate does to the worker what it is fated to.  Returns whether it goes on.
 */
static bool
MeetFate(Worker *worker, Fate fate, Phase phase)
{
	switch (fate)
	{
		case FATE_LIVE:
			break;
		case FATE_DIE:
			Count(TALLY_DIED);
			worker->dead = true;
			if (RandomPercent(&worker->random, 50))
				SessionDrop(worker->session);
			return false;
		case FATE_TERMINATE:
			Count(TALLY_TERMINATIONS);
			(void) Ask(worker->provider, NULL, "SELECT pg_terminate_backend(%d)",
					   atomic_load(&worker->session->pid));
			break;
		case FATE_STALL:
			Stall(worker, phase);
			break;
		case FATE_RELEASE:
			if (!worker->leased || phase >= PHASE_WRITTEN)
				break;
			/* Half of those who have given up go on all the same. */
			Release(worker);
			worker->dead = RandomPercent(&worker->random, 50);
			return !worker->dead && !worker->fenced;
	}
	return true;
}

/*
 * WorkerAlive lets the worker's fate overtake it if this is the phase, and lets
 * it do its duty in between.  Returns whether it goes on.
 */
bool
WorkerAlive(Worker *worker, Phase phase)
{
	if (worker->when == phase && worker->fate != FATE_LIVE)
	{
		Fate fate = worker->fate;

		worker->fate = FATE_LIVE;
		return MeetFate(worker, fate, phase);
	}
	if (!worker->diligent || !worker->leased || worker->inTransaction)
		return true;
	return RandomPercent(&worker->random, 50) || Renew(worker);
}

/* ----------------------------------------------------------------
 * Keeping the lease
 * ----------------------------------------------------------------
 */

/*
 * Recover tells whether a worker goes on whose last call has failed: it has
 * its token, and makes another connection if need be.  The call may have been
 * carried out.
 */
bool
Recover(Worker *worker)
{
	if (worker->dead || worker->fenced || !worker->leased || worker->inTransaction)
		return false;
	if (!worker->persistent || strcmp(worker->session->state, "IK410") == 0 ||
		worker->reconnects++ >= MOST_RECONNECTS)
		return false;
	if (worker->session->lost)
		Count(TALLY_RECONNECTED);
	SessionSettle(worker->session);
	return true;
}

/*
 * Fenced tells whether the worker's last call was refused for its token.  If
 * so, something must have overtaken it.  Ends the transaction.
 */
bool
Fenced(Worker *worker)
{
	Session *session = worker->session;

	if (worker->fenced)
		return true;
	if (session->lost || strcmp(session->state, "IK410") != 0)
		return false;
	worker->fenced = true;
	if (Microseconds() > worker->leaseEnd)
		Count(TALLY_ZOMBIES);
	SessionSettle(session);
	if (Ask(session, NULL, "SELECT storm.overtaken('%s', %lld)", worker->name,
			(long long) worker->token) &&
		strcmp(Value(session, 0, 0), "t") != 0)
		Violation("[fenced] operation %d: token %lld of worker %lld was refused, though nothing "
				  "had overtaken it",
				  worker->key, (long long) worker->token, (long long) worker->number);
	return true;
}

/*
 * Renew is the heartbeat.  Returns false if the worker has to stop.
 */
bool
Renew(Worker *worker)
{
	int64_t token = worker->token;

	if (WrongOnPurpose("fenced") && RandomPercent(&worker->random, 30))
		token += 1000000;
	do
	{
		if (Ask(worker->session, "IK410", "SELECT storm.renew('%s', %lld, %lld, '%d ms')",
				worker->name, (long long) worker->number, (long long) token, worker->leaseMs))
		{
			Count(TALLY_RENEWED);
			worker->leaseEnd = Microseconds() + (int64_t) worker->leaseMs * 1000;
			return true;
		}
	} while (Recover(worker));
	(void) Fenced(worker);
	return false;
}

/*
 * Checkpoint notes how far the work has come.  Returns false if the worker has
 * to stop.
 */
bool
Checkpoint(Worker *worker, const char *point, const char *state)
{
	if (!worker->leased)
		return true;
	do
	{
		if (Ask(worker->session, "IK410", "SELECT storm.checkpoint('%s', %lld, %lld, '%s', '%s')",
				worker->name, (long long) worker->number, (long long) worker->token, point, state))
		{
			Count(TALLY_CHECKPOINT);
			return true;
		}
	} while (Recover(worker));
	(void) Fenced(worker);
	return false;
}
