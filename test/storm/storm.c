/*-------------------------------------------------------------------------
 *
 * storm.c
 *	  Many workers execute operations under leases while faults kill them at
 *	  random; then the provider, the tables, the log and the responses are
 *	  compared.
 *
 * Needs its own database with schema.sql, and the right to kill a backend of its
 * server. Environment:
 *
 *	CLIENTS			how many clients, 12
 *	OPERATIONS		how many operations, each with its key, 1300
 *	SEED			determines the operations and faults of all workers, 1
 *	PATIENCE		after how many seconds a client without response is
 *					a violation, 60
 *	STRESS_BREAK	a deliberate mistake (see schema.sql and work.c)
 *
 * Exits with 0 for success, 1 for a violation, 2 if it could not run.
 *
 * COPIES clients request every operation at about the same time. Each of them starts
 * one worker after the other until it has the response. There is one thread for each
 * client, some for completers, and one each for faults, for the reaper, and for
 * maintenance.
 *
 *-------------------------------------------------------------------------
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "client.h"
#include "completer.h"
#include "janitor.h"
#include "ledger.h"
#include "storm.h"
#include "tally.h"
#include "trouble.h"

/*
 * How many clients request the same operation, and how many operations are concurrent.
 */
#define COPIES 3
#define WINDOW 4

#define COMPLETERS 2

/*
 * The number of a worker combines the number of its client's task with its own number.
 */
#define WORKERS_EACH 1024

/* From this worker on, workers of a client have no faults. */
#define RELIABLE_FROM 8

/* In percent of the operations: those that find an expired row. */
#define EXPIRED_PERCENT 10

/* Time limits: for a restart of the server, and between tasks of a client. */
#define RESTART_SECONDS 60
#define LONGEST_PAUSE 12000 /* microseconds */

Slot *slots;
int slotCount;

static atomic_llong nextTask;
static atomic_llong longestTask; /* in microseconds */
static atomic_bool over;
static int patience = 60;

bool
StormIsOver(void)
{
	return atomic_load(&over);
}

/*
 * StormProgress returns the fraction of tasks that have begun, from 0 to 1.
 */
double
StormProgress(void)
{
	double progress = (double) atomic_load(&nextTask) / (config.operations * COPIES);

	return progress > 1 ? 1 : progress;
}

/*
 * OperationOf returns the operation of a task: COPIES rounds through one WINDOW of
 * operations, then the next.
 */
static int
OperationOf(long long task)
{
	int window = (int) (task / (COPIES * WINDOW));
	int key = window * WINDOW + (int) (task % WINDOW);

	return key < config.operations ? key : config.operations - 1;
}

/* ----------------------------------------------------------------
 * Clients
 * ----------------------------------------------------------------
 */

/*
 * RecordLength records how long a client was without its response.
 */
static void
RecordLength(int64_t length)
{
	long long longest = atomic_load(&longestTask);

	while (length > longest && !atomic_compare_exchange_weak(&longestTask, &longest, length))
		;
}

/*
 * Serve starts workers until the client has its response.
 */
static void
Serve(Slot *slot, long long task)
{
	int64_t begin = Microseconds();
	int key = OperationOf(task);

	for (int i = 0;; i++)
	{
		Worker worker;

		WorkerMake(&worker, slot, task * WORKERS_EACH + 1 + i % (WORKERS_EACH - 1), key,
				   i >= RELIABLE_FROM);
		Attempt(&worker);
		SessionSettle(&slot->session);
		SessionSettle(&slot->provider);
		if (worker.answered)
		{
			RecordLength(Microseconds() - begin);
			return;
		}
		if (Microseconds() - begin > (int64_t) patience * 1000000)
		{
			Violation("[blocked] operation %d: no response for %d seconds, from %d workers", key,
					  patience, i + 1);
			atomic_store(&nextTask, (long long) config.operations * COPIES);
			return;
		}
		SleepMicroseconds(RandomBelow(&worker.random, LONGEST_PAUSE));
	}
}

/*
 * ClientMain is the thread of a client: it executes tasks until none is left.
 */
static void *
ClientMain(void *argument)
{
	Slot *slot = argument;
	long long task;

	while ((task = atomic_fetch_add(&nextTask, 1)) < (long long) config.operations * COPIES)
		Serve(slot, task);
	return NULL;
}

/* ----------------------------------------------------------------
 * The run
 * ----------------------------------------------------------------
 */

/*
 * PlantExpired stores expired rows under some of the keys, which must count as absent.
 */
static void
PlantExpired(Session *session)
{
	Random random;

	RandomSeed(&random, config.seed, UINT64_MAX - 2);
	for (int key = 0; key < config.operations; key++)
	{
		char name[KEY_TEXT];

		if (!RandomPercent(&random, EXPIRED_PERCENT))
			continue;
		KeyText(key, name);
		if (Ask(session, NULL, "SELECT storm.plant('" SCOPE "', '%s', %s)", name,
				RandomPercent(&random, 50) ? "true" : "false"))
			Count(TALLY_EXPIRED);
	}
}

/*
 * Prepare does the preparation of deliberate mistakes.
 */
static void
Prepare(Session *session)
{
	if (WrongOnPurpose("fence") || WrongOnPurpose("guard"))
		(void) Ask(session, NULL, "ALTER TABLE storm.bookings DISABLE TRIGGER guard");
	PlantExpired(session);
}

/*
 * LoseRecord removes one of the outcomes, as a lossy restore would.
 */
static void
LoseRecord(Session *session)
{
	if (WrongOnPurpose("record"))
		(void) Ask(session, NULL,
				   "DELETE FROM idempotency.key WHERE ctid = "
				   "(SELECT min(ctid) FROM idempotency.key WHERE scope = '" SCOPE "')");
}

/*
 * RunTasks lets the clients execute all tasks, and returns once all threads have ended.
 */
static void
RunTasks(void)
{
	enum
	{
		TROUBLE,
		REAPER,
		JANITOR,
		OTHERS
	};
	static void *(*const mains[OTHERS])(void *) = {FaultMain, ReaperMain, JanitorMain};
	static const char *const names[OTHERS] = {"storm trouble", "storm reaper", "storm janitor"};
	Session others[OTHERS];
	pthread_t otherThreads[OTHERS];
	pthread_t *threads = calloc(slotCount, sizeof(pthread_t));

	for (int i = 0; i < slotCount; i++)
	{
		SessionOpen(&slots[i].session, "storm worker");
		SessionOpen(&slots[i].provider, "storm provider");
	}
	for (int i = 0; i < OTHERS; i++)
	{
		SessionOpen(&others[i], names[i]);
		pthread_create(&otherThreads[i], NULL, mains[i], &others[i]);
	}
	for (int i = 0; i < slotCount; i++)
		pthread_create(&threads[i], NULL, i < config.clients ? ClientMain : CompleterMain,
					   &slots[i]);

	for (int i = 0; i < config.clients; i++)
		pthread_join(threads[i], NULL);
	atomic_store(&over, true);
	JanitorStop();
	for (int i = config.clients; i < slotCount; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < OTHERS; i++)
	{
		pthread_join(otherThreads[i], NULL);
		SessionClose(&others[i]);
	}
	for (int i = 0; i < slotCount; i++)
	{
		SessionClose(&slots[i].session);
		SessionClose(&slots[i].provider);
	}
	free(threads);
}

/*
 * Defaults sets the configuration before ConfigRead() reads the environment.
 */
static void
Defaults(void)
{
	setenv("CLIENTS", "12", 0);
	setenv("OPERATIONS", "1300", 0);
	if (getenv("PATIENCE") != NULL)
		patience = atoi(getenv("PATIENCE"));
	serverPatience = RESTART_SECONDS;
}

int
main(void)
{
	Session session;
	int64_t start;
	double stormSeconds;

	Defaults();
	ConfigRead();
	LedgerMake();
	slotCount = config.clients + COMPLETERS;
	slots = calloc(slotCount, sizeof(Slot));
	SessionOpen(&session, "storm");
	Prepare(&session);

	start = Microseconds();
	RunTasks();
	stormSeconds = (Microseconds() - start) / 1e6;
	SessionSettle(&session);
	SessionClose(&session);
	SessionOpen(&session, "storm");
	AwaitQuiet(&session);
	LoseRecord(&session);
	Check(&session);
	CheckServer(&session);
	TallyCheck();
	SessionClose(&session);

	TallyPrint();
	printf("  longest time of a client without response: %.1f s\n",
		   (double) atomic_load(&longestTask) / 1e6);
	printf("  seed %llu: %d operations, %lld workers of %d clients and %d completers in %.1f s, "
		   "%lld responses compared, %d violations\n",
		   (unsigned long long) config.seed, config.operations, Counted(TALLY_ATTEMPTS),
		   config.clients, COMPLETERS, stormSeconds, LedgerCount(), Violations());
	printf("counts: operations=%d faults=%lld violations=%d\n", config.operations,
		   Counted(TALLY_CANCELS) + Counted(TALLY_DROPPED) + Counted(TALLY_TERMINATIONS) +
			   Counted(TALLY_KILLED),
		   Violations());
	return Violations() == 0 ? 0 : 1;
}
