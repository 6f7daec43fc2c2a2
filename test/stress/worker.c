/*-------------------------------------------------------------------------
 *
 * worker.c
 *	  The faults of a worker, and the calls that keep its lease.
 *
 * A worker dies, stalls, releases or survives; its connection is terminated, cancelled
 * or dropped. A worker that lost its connection can reconnect and continue, because it
 * still has its token. A rejected token must have a cause, and the log must contain it.
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

/* In percent of the workers: network faults. */
#define CANCEL_PERCENT 6
#define DROP_PERCENT 3
#define LONGEST_FAULT_DELAY 40000 /* microseconds */

/* Milliseconds; a worker without faults has a long lease. */
#define SHORTEST_LEASE 20
#define LONGEST_LEASE 160
#define RELIABLE_LEASE 5000

static Fault
PickFault(Random *random)
{
	int dice = RandomBelow(random, 100);

	if (dice < 12)
		return FAULT_DIE;
	if (dice < 19)
		return FAULT_TERMINATE;
	if (dice < 37)
		return FAULT_STALL;
	return dice < 41 ? FAULT_RELEASE : FAULT_LIVE;
}

/*
 * WorkerMake creates the worker of that number. A reliable worker has no faults and a
 * long lease; a client starts reliable workers after too many failures.
 */
void
WorkerMake(Worker *worker, Slot *slot, int64_t number, int key, bool reliable)
{
	Random *random = &worker->random;

	memset(worker, 0, sizeof(*worker));
	worker->session = &slot->session;
	worker->provider = &slot->provider;
	worker->number = number;
	worker->key = key;
	KeyText(key, worker->name);
	RandomSeed(random, config.seed, (uint64_t) number);
	Count(TALLY_ATTEMPTS);

	worker->leaseMs = SHORTEST_LEASE + RandomBelow(random, LONGEST_LEASE - SHORTEST_LEASE);
	worker->fault = PickFault(random);
	worker->when = (Phase) RandomBelow(random, PHASE_COUNT);
	worker->diligent = RandomPercent(random, 40);
	worker->persistent = RandomPercent(random, 60);
	worker->reliable = reliable;
	if (reliable)
	{
		worker->leaseMs = RELIABLE_LEASE;
		worker->fault = FAULT_LIVE;
		worker->persistent = true;
	}
	else if (RandomPercent(random, CANCEL_PERCENT))
		SessionSetFault(worker->session, NETWORK_CANCEL, RandomBelow(random, LONGEST_FAULT_DELAY));
	else if (RandomPercent(random, DROP_PERCENT))
		SessionSetFault(worker->session, NETWORK_DROP, RandomBelow(random, LONGEST_FAULT_DELAY));
}

/*
 * Grant reads the operation that was just granted from a row of the session's result.
 */
void
WorkerGrant(Worker *worker, int row)
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
 * Faults
 * ----------------------------------------------------------------
 */

/*
 * Stall sleeps past the end of the lease, by up to its length or only slightly, so that
 * another worker might take over.
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
 * Release releases the operation.
 */
static void
Release(Worker *worker)
{
	if (Ask(worker->session, "IK410", "SELECT stress.release('%s', %lld, %lld)", worker->name,
			(long long) worker->number, (long long) worker->token))
		Count(TALLY_RELEASED);
	else
		(void) Fenced(worker);
}

/*
 * InjectFault applies the worker's fault. Returns whether the worker continues.
 */
static bool
InjectFault(Worker *worker, Fault fault, Phase phase)
{
	switch (fault)
	{
		case FAULT_LIVE:
			break;
		case FAULT_DIE:
			Count(TALLY_DIED);
			worker->dead = true;
			if (RandomPercent(&worker->random, 50))
				SessionDrop(worker->session);
			return false;
		case FAULT_TERMINATE:
			Count(TALLY_TERMINATIONS);
			(void) Ask(worker->provider, NULL, "SELECT pg_terminate_backend(%d)",
					   atomic_load(&worker->session->pid));
			break;
		case FAULT_STALL:
			Stall(worker, phase);
			break;
		case FAULT_RELEASE:
			if (!worker->leased || phase >= PHASE_WRITTEN)
				break;
			/* Half of the workers that have released continue nevertheless. */
			Release(worker);
			worker->dead = RandomPercent(&worker->random, 50);
			return !worker->dead && !worker->fenced;
	}
	return true;
}

/*
 * WorkerAlive applies the worker's fault if this is its phase, and renews the lease
 * between phases. Returns whether the worker continues.
 */
bool
WorkerAlive(Worker *worker, Phase phase)
{
	if (worker->when == phase && worker->fault != FAULT_LIVE)
	{
		Fault fault = worker->fault;

		worker->fault = FAULT_LIVE;
		return InjectFault(worker, fault, phase);
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
 * Recover returns whether a worker continues after its last call failed: it keeps its
 * token, and reconnects if needed. The call might have been executed.
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
 * Fenced returns whether the worker's last call was rejected for its token. If so, the
 * log must have a cause. Ends the transaction.
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
	if (Ask(session, NULL, "SELECT stress.overtaken('%s', %lld)", worker->name,
			(long long) worker->token) &&
		strcmp(Value(session, 0, 0), "t") != 0)
		Violation("[fenced] operation %d: token %lld of worker %lld was rejected, although no "
				  "other step caused it",
				  worker->key, (long long) worker->token, (long long) worker->number);
	return true;
}

/*
 * Renew is the heartbeat. Returns false if the worker must stop.
 */
bool
Renew(Worker *worker)
{
	int64_t token = worker->token;

	if (WrongOnPurpose("fenced") && RandomPercent(&worker->random, 30))
		token += 1000000;
	do
	{
		if (Ask(worker->session, "IK410", "SELECT stress.renew('%s', %lld, %lld, '%d ms')",
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
 * Checkpoint stores the progress of the work. Returns false if the worker must stop.
 */
bool
Checkpoint(Worker *worker, const char *point, const char *state)
{
	if (!worker->leased)
		return true;
	do
	{
		if (Ask(worker->session, "IK410", "SELECT stress.checkpoint('%s', %lld, %lld, '%s', '%s')",
				worker->name, (long long) worker->number, (long long) worker->token, point, state))
		{
			Count(TALLY_CHECKPOINT);
			return true;
		}
	} while (Recover(worker));
	(void) Fenced(worker);
	return false;
}
