/*-------------------------------------------------------------------------
 *
 * trouble.c
 *	  Those who make trouble for the workers, and the reaper.
 *
 * One thread terminates connections, evicts operations under their owners'
 * hands and, few times in a run, kills a backend with SIGKILL, after which the
 * server throws everybody out and recovers.  Another leaves rows that run out
 * at once, and reaps.
 *
 * A server that crashes by itself empties an unlogged table.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "storm.h"
#include "tally.h"
#include "trouble.h"

/* How often in a run a backend is killed, at equal distances. */
#define KILLS 2

/* Microseconds between one trouble and the next, at most. */
#define LONGEST_PEACE 40000

#define PREY_AT_ONCE 20

/* ----------------------------------------------------------------
 * Killing
 * ----------------------------------------------------------------
 */

/*
 * MarkAlive notes that the server is running.
 */
void
MarkAlive(Session *session)
{
	while (!Ask(session, NULL, "INSERT INTO storm.alive DEFAULT VALUES"))
		SessionSettle(session);
}

/*
 * CheckAlive reports a server that crashed though nobody killed a backend.
 */
static void
CheckAlive(Session *session)
{
	if (Ask(session, NULL, "SELECT count(*) FROM storm.alive") &&
		strcmp(Value(session, 0, 0), "0") == 0)
	{
		Violation("[server] the server crashed, though nobody killed a backend");
		MarkAlive(session);
	}
}

/*
 * AwaitCrash waits until the server throws the session out because that backend
 * was killed.  Returns false if the backend had left by itself before.
 */
static bool
AwaitCrash(Session *session, int pid)
{
	while (Ask(session, NULL, "SELECT 1 FROM pg_stat_activity WHERE pid = %d", pid) &&
		   PQntuples(session->result) > 0)
		SleepMicroseconds(10000);
	return session->lost;
}

/*
 * Kill kills the backend of some client or completer, and waits until the
 * server is there again.  The server itself says who is a backend of ours, so
 * that nobody else is killed.  Returns whether the server crashed.
 */
static bool
Kill(Session *session, Random *random)
{
	int pid;

	if (!Ask(session, NULL,
			 "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
			 "AND application_name = 'storm worker' AND backend_type = 'client backend'") ||
		PQntuples(session->result) == 0)
		return false;
	pid = atoi(Value(session, RandomBelow(random, PQntuples(session->result)), 0));
	if (kill(pid, SIGKILL) != 0)
	{
		if (errno == EPERM)
			Violation("[coverage] killing a backend takes the server's user");
		return false;
	}
	if (!AwaitCrash(session, pid))
		return false;
	Count(TALLY_KILLED);
	SessionSettle(session);
	MarkAlive(session);
	return true;
}

/* ----------------------------------------------------------------
 * Lesser trouble
 * ----------------------------------------------------------------
 */

/*
 * Terminate terminates one of the connections of some client or completer.
 */
static void
Terminate(Session *session, Random *random)
{
	Seat *seat = &seats[RandomBelow(random, seatCount)];
	Session *victim = RandomPercent(random, 75) ? &seat->session : &seat->provider;
	int pid = atomic_load(&victim->pid);

	if (pid == 0)
		return;
	Count(TALLY_TERMINATIONS);
	(void) Ask(session, NULL, "SELECT pg_terminate_backend(%d)", pid);
}

/*
 * Evict forgets an operation that somebody works at, as an operator may.
 */
static void
Evict(Session *session, Random *random)
{
	int key = (int) (StormProgress() * config.operations) - RandomBelow(random, 8);
	char name[KEY_TEXT];

	if (key < 0 || key >= config.operations)
		return;
	KeyText(key, name);
	session->maySerialize = true;
	if (Ask(session, NULL, "BEGIN ISOLATION LEVEL REPEATABLE READ") &&
		Ask(session, NULL, "SELECT storm.evict('%s')", name) &&
		strcmp(Value(session, 0, 0), "t") == 0 && Ask(session, NULL, "COMMIT"))
		Count(TALLY_EVICTED);
}

/*
 * TroubleMain is the thread that makes trouble until the storm is over.
 * "argument" is its session.
 */
void *
TroubleMain(void *argument)
{
	Session *session = argument;
	Random random;
	int kills = 0;

	RandomSeed(&random, config.seed, UINT64_MAX - 3);
	MarkAlive(session);
	while (!StormIsOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_PEACE));
		CheckAlive(session);
		if (config.operations >= FULL_RUN && kills < KILLS &&
			StormProgress() > (kills + 1.0) / (KILLS + 1))
			kills += Kill(session, &random);
		else if (RandomPercent(&random, 60))
			Terminate(session, &random);
		else
			Evict(session, &random);
		SessionSettle(session);
	}
	CheckAlive(session);
	return NULL;
}

/* ----------------------------------------------------------------
 * The reaper
 * ----------------------------------------------------------------
 */

/*
 * ReaperMain is the thread that leaves rows that run out, and reaps, until the
 * storm is over.  "argument" is its session.
 */
void *
ReaperMain(void *argument)
{
	Session *session = argument;
	Random random;
	int prey = 0;

	RandomSeed(&random, config.seed, UINT64_MAX - 4);
	while (!StormIsOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_PEACE));
		if (Ask(session, NULL,
				"SELECT storm.plant('storm/prey', 'prey ' || i, i %% 3 = 0) "
				"FROM generate_series(%d, %d) AS i",
				prey, prey + PREY_AT_ONCE - 1))
		{
			for (int i = 0; i < PREY_AT_ONCE; i++)
				Count(TALLY_PREY);
		}
		prey += PREY_AT_ONCE;
		if (RandomPercent(&random, 30) &&
			Ask(session, NULL, "SELECT idempotency.reap(%d)", 1 + RandomBelow(&random, 200)))
		{
			for (int rows = atoi(Value(session, 0, 0)); rows > 0; rows--)
				Count(TALLY_REAPED);
		}
		SessionSettle(session);
	}
	return NULL;
}
