/*-------------------------------------------------------------------------
 *
 * storm.c
 *	  Many workers do the work of many operations under leases while they die
 *	  at random; then the provider, the tables, the log and the answers are
 *	  compared.
 *
 * Needs a database with schema.sql in it, that nobody else uses, and the right
 * to kill a backend of its server.  Environment:
 *
 *	CLIENTS			how many clients, 12
 *	OPERATIONS		how many operations, each with its key, 1300
 *	SEED			determines what every worker wants, and its fate, 1
 *	PATIENCE		after how many seconds a client that has no answer yet is
 *					a violation, 60
 *	STRESS_BREAK	what to do wrong on purpose (see schema.sql and work.c)
 *
 * Exits with 0 if all is well, 1 for a violation, 2 if it could not run.
 *
 * Every operation is wanted by COPIES clients at about the same time, each of
 * which sends one worker after the other until it has the answer.  One thread
 * for each client, some for completers, and one each for trouble, for the
 * reaper, and for an administrator's work.
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

/* How many clients want the same operation, of how many at the same time. */
#define COPIES 3
#define WINDOW 4

#define COMPLETERS 2

/* The number of a worker is that of its client's errand, and which it is. */
#define WORKERS_EACH 1024

/* From this worker on, a client sends calm ones. */
#define CALM_FROM 8

/* In percent of the operations: those that find a row that has run out. */
#define EXPIRED_PERCENT 10

/* How long a restarting server may take, and a client may rest, at most. */
#define RESTART_SECONDS 60
#define LONGEST_REST 12000 /* microseconds */

Seat *seats;
int seatCount;

static atomic_llong nextErrand;
static atomic_llong longestErrand; /* in microseconds */
static atomic_bool over;
static int patience = 60;

bool
StormIsOver(void)
{
	return atomic_load(&over);
}

/*
 * StormProgress returns how much of the errands has begun, from 0 to 1.
 */
double
StormProgress(void)
{
	double progress = (double) atomic_load(&nextErrand) / (config.operations * COPIES);

	return progress > 1 ? 1 : progress;
}

/*
 * OperationOf returns the operation of an errand: COPIES rounds through one
 * WINDOW of operations, then the next.
 */
static int
OperationOf(long long errand)
{
	int window = (int) (errand / (COPIES * WINDOW));
	int key = window * WINDOW + (int) (errand % WINDOW);

	return key < config.operations ? key : config.operations - 1;
}

/* ----------------------------------------------------------------
 * Clients
 * ----------------------------------------------------------------
 */

/*
 * NoteLength notes how long a client went without its answer.
 */
static void
NoteLength(int64_t length)
{
	long long longest = atomic_load(&longestErrand);

	while (length > longest && !atomic_compare_exchange_weak(&longestErrand, &longest, length))
		;
}

/*
 * Serve sends workers until the client has its answer.
 */
static void
Serve(Seat *seat, long long errand)
{
	int64_t begin = Microseconds();
	int key = OperationOf(errand);

	for (int i = 0;; i++)
	{
		Worker worker;

		WorkerMake(&worker, seat, errand * WORKERS_EACH + 1 + i % (WORKERS_EACH - 1), key,
				   i >= CALM_FROM);
		Attempt(&worker);
		SessionSettle(&seat->session);
		SessionSettle(&seat->provider);
		if (worker.answered)
		{
			NoteLength(Microseconds() - begin);
			return;
		}
		if (Microseconds() - begin > (int64_t) patience * 1000000)
		{
			Violation("[blocked] operation %d: no answer for %d seconds, from %d workers", key,
					  patience, i + 1);
			atomic_store(&nextErrand, (long long) config.operations * COPIES);
			return;
		}
		SleepMicroseconds(RandomBelow(&worker.random, LONGEST_REST));
	}
}

/*
 * ClientMain is the thread of a client: it serves errands while there are any.
 */
static void *
ClientMain(void *argument)
{
	Seat *seat = argument;
	long long errand;

	while ((errand = atomic_fetch_add(&nextErrand, 1)) < (long long) config.operations * COPIES)
		Serve(seat, errand);
	return NULL;
}

/* ----------------------------------------------------------------
 * The run
 * ----------------------------------------------------------------
 */

/*
 * PlantExpired leaves rows that have run out under some of the keys, which must
 * count as absent.
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
 * Prepare does what the mistakes need that are made on purpose.
 */
static void
Prepare(Session *session)
{
	if (WrongOnPurpose("fence") || WrongOnPurpose("guard"))
		(void) Ask(session, NULL, "ALTER TABLE storm.bookings DISABLE TRIGGER guard");
	PlantExpired(session);
}

/*
 * LoseRecord removes one of the outcomes, as a restore that loses it would.
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
 * Storm lets the clients do all errands, and returns when everybody is gone.
 */
static void
Storm(void)
{
	enum
	{
		TROUBLE,
		REAPER,
		JANITOR,
		OTHERS
	};
	static void *(*const mains[OTHERS])(void *) = {TroubleMain, ReaperMain, JanitorMain};
	static const char *const names[OTHERS] = {"storm trouble", "storm reaper", "storm janitor"};
	Session others[OTHERS];
	pthread_t otherThreads[OTHERS];
	pthread_t *threads = calloc(seatCount, sizeof(pthread_t));

	for (int i = 0; i < seatCount; i++)
	{
		SessionOpen(&seats[i].session, "storm worker");
		SessionOpen(&seats[i].provider, "storm provider");
	}
	for (int i = 0; i < OTHERS; i++)
	{
		SessionOpen(&others[i], names[i]);
		pthread_create(&otherThreads[i], NULL, mains[i], &others[i]);
	}
	for (int i = 0; i < seatCount; i++)
		pthread_create(&threads[i], NULL, i < config.clients ? ClientMain : CompleterMain,
					   &seats[i]);

	for (int i = 0; i < config.clients; i++)
		pthread_join(threads[i], NULL);
	atomic_store(&over, true);
	JanitorStop();
	for (int i = config.clients; i < seatCount; i++)
		pthread_join(threads[i], NULL);
	for (int i = 0; i < OTHERS; i++)
	{
		pthread_join(otherThreads[i], NULL);
		SessionClose(&others[i]);
	}
	for (int i = 0; i < seatCount; i++)
	{
		SessionClose(&seats[i].session);
		SessionClose(&seats[i].provider);
	}
	free(threads);
}

/*
 * Defaults sets what ConfigRead() would set otherwise.
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
	seatCount = config.clients + COMPLETERS;
	seats = calloc(seatCount, sizeof(Seat));
	SessionOpen(&session, "storm");
	Prepare(&session);

	start = Microseconds();
	Storm();
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
	printf("  the longest that a client went without its answer: %.1f s\n",
		   (double) atomic_load(&longestErrand) / 1e6);
	printf("  seed %llu: %d operations, %lld workers of %d clients and %d completers in %.1f s, "
		   "%lld answers compared, %d violations\n",
		   (unsigned long long) config.seed, config.operations, Counted(TALLY_ATTEMPTS),
		   config.clients, COMPLETERS, stormSeconds, LedgerNotes(), Violations());
	return Violations() == 0 ? 0 : 1;
}
