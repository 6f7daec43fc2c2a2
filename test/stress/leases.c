/*-------------------------------------------------------------------------
 *
 * leases.c
 *	  The workload of workers that execute operations under leases while faults kill
 *	  them at random; the provider, the tables, the log and the responses are compared.
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
#include "leases.h"
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
LeasesAreOver(void)
{
	return atomic_load(&over);
}

/*
 * LeasesProgress returns the fraction of tasks that have begun, from 0 to 1.
 */
double
LeasesProgress(void)
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
		ClientServe(&worker);
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
 * Prepare makes the slots, and prepares deliberate mistakes.
 */
static void
Prepare(Session *session)
{
	if (WrongOnPurpose("fence") || WrongOnPurpose("guard"))
		(void) Ask(session, NULL, "ALTER TABLE stress.bookings DISABLE TRIGGER guard");

	/* No session waits long for a key: its owner might be stalled */
	(void) Ask(session, NULL,
			   "DO $$BEGIN EXECUTE format('ALTER DATABASE %%I SET idempotency.wait = %%L', "
			   "current_database(), '300ms'); END$$");
	if (getenv("PATIENCE") != NULL)
		patience = atoi(getenv("PATIENCE"));
	serverPatience = RESTART_SECONDS;
	slotCount = config.clients + COMPLETERS;
	slots = calloc(slotCount, sizeof(Slot));
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
RunTasks(Session *session)
{
	enum
	{
		TROUBLE,
		REAPER,
		JANITOR,
		OTHERS
	};
	static void *(*const mains[OTHERS])(void *) = {FaultMain, ReaperMain, JanitorMain};
	static const char *const names[OTHERS] = {"stress trouble", "stress reaper", "stress janitor"};
	Session others[OTHERS];
	pthread_t otherThreads[OTHERS];
	pthread_t *threads = calloc(slotCount, sizeof(pthread_t));

	for (int i = 0; i < slotCount; i++)
	{
		SessionOpen(&slots[i].session, "stress worker");
		SessionOpen(&slots[i].provider, "stress provider");
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

	/* the server has crashed meanwhile */
	SessionSettle(session);
	SessionClose(session);
	SessionOpen(session, "stress");
}

static void
CheckAll(Session *session)
{
	LoseRecord(session);
	CheckLeases(session);
	while (Ask(session, NULL, "SELECT idempotency.reap(NULL)") &&
		   strcmp(Value(session, 0, 0), "0") != 0)
		;
	CheckServer(session);
	printf("  longest time of a client without response: %.1f s\n",
		   (double) atomic_load(&longestTask) / 1e6);
}

const Workload leasesWorkload = {
	.name = "leases",
	.fullOperations = 1000,
	.fullClients = 8,
	.clients = 12,
	.operations = 500,
	.prepare = Prepare,
	.run = RunTasks,
	.check = CheckAll,
};
