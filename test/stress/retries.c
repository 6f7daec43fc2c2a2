/*-------------------------------------------------------------------------
 *
 * retries.c
 *	  The workload of clients that retry operations without leases.
 *
 * There is one thread for each client, one that ends prepared transactions, and one for
 * maintenance. One counter distributes the attempts. A final pass retries each operation until
 * it is done.
 *
 *-------------------------------------------------------------------------
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "call.h"
#include "check.h"
#include "janitor.h"
#include "message.h"
#include "prepared.h"
#include "tally.h"
#include "transaction.h"

/* The clients' sessions, followed by the resolver's. */
static Session *sessions;
static atomic_llong nextAttempt;
static atomic_int nextKey;

/* ----------------------------------------------------------------
 * Clients
 * ----------------------------------------------------------------
 */

/*
 * AttemptTerminate terminates another session at any time.
 */
static void
AttemptTerminate(Attempt *attempt)
{
	Session *victim = &sessions[RandomBelow(&attempt->random, config.clients + 1)];
	int pid = atomic_load(&victim->pid);

	if (pid == 0 || victim == attempt->session)
		return;
	Count(TALLY_TERMINATIONS);
	(void) Ask(attempt->session, NULL, "SELECT pg_terminate_backend(%d)", pid);
}

typedef void (*Shape)(Attempt *attempt);

/*
 * PickShape returns the kind of this attempt.
 */
static Shape
PickShape(Attempt *attempt)
{
	static const struct
	{
		Shape shape;
		double percent;
	} shapes[] = {
		{AttemptTransaction, 36},	{AttemptProcedure, 24},		{AttemptRun, 8},
		{AttemptDeliver, 9},		{AttemptDeliverMany, 3},	{AttemptInboxTransaction, 8},
		{AttemptAnotherRequest, 5}, {AttemptWithoutClaim, 2.5}, {AttemptEach, 4},
		{AttemptTerminate, 0.5},
	};
	const int shapeCount = sizeof(shapes) / sizeof(shapes[0]);
	double dice = RandomUnit(&attempt->random) * 100;
	int i = 0;

	while (i < shapeCount - 1 && dice >= shapes[i].percent)
		dice -= shapes[i++].percent;
	return shapes[i].shape;
}

/*
 * ClientMain is the thread of a client: it runs attempts until none is left.
 */
static void *
ClientMain(void *argument)
{
	Session *session = argument;
	long long number;

	while ((number = atomic_fetch_add(&nextAttempt, 1)) < config.attempts)
	{
		Attempt attempt;
		Shape shape;

		Count(TALLY_ATTEMPTS);
		AttemptMake(&attempt, session, number);
		Endanger(&attempt);
		shape = PickShape(&attempt);
		shape(&attempt);
		PendingForget(&attempt);
		SessionSettle(session);
	}
	return NULL;
}

/*
 * FinalMain is the thread of a client in the final pass: it retries each
 * operation until that is done.
 */
static void *
FinalMain(void *argument)
{
	Session *session = argument;
	int key;

	while ((key = atomic_fetch_add(&nextKey, 1)) < config.operations)
	{
		bool done;

		do
		{
			Attempt attempt;

			AttemptMake(&attempt, session, config.attempts + key);
			done = AttemptFinal(&attempt, key);
			PendingForget(&attempt);
			SessionSettle(session);
		} while (!done && Violations() == 0);
	}
	return NULL;
}

/*
 * RunClients runs a thread of that kind for each client, and waits for all.
 */
static void
RunClients(void *(*clientMain)(void *) )
{
	pthread_t *threads = calloc(config.clients, sizeof(pthread_t));

	for (int i = 0; i < config.clients; i++)
		pthread_create(&threads[i], NULL, clientMain, &sessions[i]);
	for (int i = 0; i < config.clients; i++)
		pthread_join(threads[i], NULL);
	free(threads);
}

/* ----------------------------------------------------------------
 * The run
 * ----------------------------------------------------------------
 */

/*
 * Unguard drops the require_claim triggers, for mistakes that they would prevent.
 */
static void
Unguard(Session *session)
{
	if (!WrongOnPurpose("guard") && !WrongOnPurpose("claim") && !WrongOnPurpose("inbox"))
		return;
	(void) Ask(session, NULL, "ALTER TABLE stress.charges DISABLE TRIGGER guard");
	(void) Ask(session, NULL, "ALTER TABLE stress.deliveries DISABLE TRIGGER guard");
}

/*
 * LoseRecord removes one of the records, as a lossy restore would.
 */
static void
LoseRecord(Session *session)
{
	if (WrongOnPurpose("record"))
		(void) Ask(session, NULL, "DELETE FROM idempotency.key WHERE scope = 'stress/charge'");
}

/*
 * RunAttempts lets the clients run all attempts, and returns once they have ended.
 */
static void
RunAttempts(void)
{
	Session janitor;
	pthread_t resolverThread;
	pthread_t janitorThread;

	for (int i = 0; i <= config.clients; i++)
		SessionOpen(&sessions[i], i < config.clients ? "stress client" : "stress resolver");
	SessionOpen(&janitor, "stress janitor");
	pthread_create(&resolverThread, NULL, ResolverMain, &sessions[config.clients]);
	pthread_create(&janitorThread, NULL, JanitorMain, &janitor);

	RunClients(ClientMain);
	ResolverStop();
	JanitorStop();
	pthread_join(resolverThread, NULL);
	pthread_join(janitorThread, NULL);
	for (int i = 0; i <= config.clients; i++)
		SessionClose(&sessions[i]);
	SessionClose(&janitor);
}

/*
 * FinalPass lets the clients retry every operation until it is done.
 */
static void
FinalPass(void)
{
	for (int i = 0; i < config.clients; i++)
		SessionOpen(&sessions[i], "stress client");
	RunClients(FinalMain);
	for (int i = 0; i < config.clients; i++)
		SessionClose(&sessions[i]);
}

/*
 * Run runs all attempts, checks, and runs the final pass.
 */
static void
Run(Session *session)
{
	sessions = calloc(config.clients + 1, sizeof(Session));
	RunAttempts();
	AwaitQuiet(session);
	LoseRecord(session);
	CheckRetries(session, false);
	FinalPass();
}

static void
CheckAll(Session *session)
{
	CheckRetries(session, true);
	CheckServer(session);
	if (Counted(TALLY_TERMINATED) > Counted(TALLY_TERMINATIONS))
		Violation("[server] %lld connections were lost, but %lld were terminated",
				  Counted(TALLY_TERMINATED), Counted(TALLY_TERMINATIONS));
}

const Workload retriesWorkload = {
	.name = "retries",
	.fullOperations = 5000,
	.fullClients = 4,
	.clients = 8,
	.operations = 1500,
	.prepare = Unguard,
	.run = Run,
	.check = CheckAll,
};
