/*-------------------------------------------------------------------------
 *
 * trouble.c
 *	  Faults of the workers, and the reaper.
 *
 * One thread terminates connections and evicts operations in progress. A few times in
 * a run it kills a backend with SIGKILL: the server terminates all sessions and
 * recovers. Another thread stores rows that expire at once, and reaps.
 *
 * A crash of the server truncates an unlogged table, which shows unexpected crashes.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "leases.h"
#include "tally.h"
#include "trouble.h"

/* How many times a backend is killed in a run, at equal intervals. */
#define KILLS 2

/* Maximum microseconds between two faults. */
#define LONGEST_PAUSE 40000

#define SHORT_LIVED_AT_ONCE 20

/* ----------------------------------------------------------------
 * Killing
 * ----------------------------------------------------------------
 */

/*
 * MarkAlive stores a row in the unlogged table.
 */
void
MarkAlive(Session *session)
{
	while (!Ask(session, NULL, "INSERT INTO stress.alive DEFAULT VALUES"))
		SessionSettle(session);
}

/*
 * CheckAlive reports a crash of the server without a killed backend.
 */
static void
CheckAlive(Session *session)
{
	if (Ask(session, NULL, "SELECT count(*) FROM stress.alive") &&
		strcmp(Value(session, 0, 0), "0") == 0)
	{
		Violation("[server] the server crashed, although no backend was killed");
		MarkAlive(session);
	}
}

/*
 * AwaitCrash waits until the server terminates the session because that backend was
 * killed. Returns false if the backend had exited before.
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
 * Kill kills the backend of a client or completer, and waits until the server has
 * recovered. The server lists the backends of this test, so that no other process is
 * killed. Returns whether the server crashed.
 */
static bool
Kill(Session *session, Random *random)
{
	int pid;

	if (!Ask(session, NULL,
			 "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
			 "AND application_name = 'stress worker' AND backend_type = 'client backend'") ||
		PQntuples(session->result) == 0)
		return false;
	pid = atoi(Value(session, RandomBelow(random, PQntuples(session->result)), 0));
	if (kill(pid, SIGKILL) != 0)
	{
		if (errno == EPERM)
			Violation("[coverage] killing a backend needs the server's user");
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
 * Other faults
 * ----------------------------------------------------------------
 */

/*
 * Terminate terminates one of the connections of a client or completer.
 */
static void
Terminate(Session *session, Random *random)
{
	Slot *slot = &slots[RandomBelow(random, slotCount)];
	Session *victim = RandomPercent(random, 75) ? &slot->session : &slot->provider;
	int pid = atomic_load(&victim->pid);

	if (pid == 0)
		return;
	Count(TALLY_TERMINATIONS);
	(void) Ask(session, NULL, "SELECT pg_terminate_backend(%d)", pid);
}

/*
 * Evict deletes an operation in progress, as an operator can.
 */
static void
Evict(Session *session, Random *random)
{
	int key = (int) (LeasesProgress() * config.operations) - RandomBelow(random, 8);
	char name[KEY_TEXT];

	if (key < 0 || key >= config.operations)
		return;
	KeyText(key, name);
	session->maySerialize = true;
	if (Ask(session, NULL, "BEGIN ISOLATION LEVEL REPEATABLE READ") &&
		Ask(session, NULL, "SELECT stress.evict('%s')", name) &&
		strcmp(Value(session, 0, 0), "t") == 0 && Ask(session, NULL, "COMMIT"))
		Count(TALLY_EVICTED);
}

/*
 * FaultMain is the thread that causes faults until all clients have ended. "argument"
 * is its session.
 */
void *
FaultMain(void *argument)
{
	Session *session = argument;
	Random random;
	int kills = 0;

	RandomSeed(&random, config.seed, UINT64_MAX - 3);
	MarkAlive(session);
	while (!LeasesAreOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_PAUSE));
		CheckAlive(session);
		if (config.operations >= config.workload->fullOperations && kills < KILLS &&
			LeasesProgress() > (kills + 1.0) / (KILLS + 1))
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
 * ReaperMain is the thread that stores rows that expire, and reaps, until all clients
 * have ended. "argument" is its session.
 */
void *
ReaperMain(void *argument)
{
	Session *session = argument;
	Random random;
	int prey = 0;

	RandomSeed(&random, config.seed, UINT64_MAX - 4);
	while (!LeasesAreOver())
	{
		SleepMicroseconds(RandomBelow(&random, LONGEST_PAUSE));
		if (Ask(session, NULL,
				"SELECT stress.plant('stress/prey', 'prey ' || i, i %% 3 = 0) "
				"FROM generate_series(%d, %d) AS i",
				prey, prey + SHORT_LIVED_AT_ONCE - 1))
		{
			for (int i = 0; i < SHORT_LIVED_AT_ONCE; i++)
				Count(TALLY_SHORT_LIVED);
		}
		prey += SHORT_LIVED_AT_ONCE;
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
