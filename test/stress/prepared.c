/*-------------------------------------------------------------------------
 *
 * prepared.c
 *	  Prepared transactions, which another session finishes.
 *
 * Whether a transaction will be committed or rolled back is decided when it is
 * prepared. A session that loses its connection in COMMIT PREPARED can therefore
 * determine the result: the name no longer exists.
 *
 * One lock protects the queue, and is never held during a query.
 *
 *-------------------------------------------------------------------------
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "prepared.h"
#include "tally.h"

typedef struct Prepared
{
	struct Prepared *next;
	char name[64];
	bool commit;
	bool certain;	 /* the server said that it is prepared */
	int pid;		 /* of the backend that prepares it */
	Attempt attempt; /* with the responses that are valid after COMMIT PREPARED */
} Prepared;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Prepared *first = NULL;
static Prepared **last = &first;
static bool stopping = false;

/* The maximum and the current number; the server has space for so many. */
#define MOST_PREPARED 20
static int places = MOST_PREPARED;

/*
 * TakePlace reserves an entry for a prepared transaction, if one is free.
 */
static bool
TakePlace(void)
{
	bool taken;

	pthread_mutex_lock(&lock);
	taken = places > 0;
	places -= taken;
	pthread_mutex_unlock(&lock);
	return taken;
}

static void
GiveUpPlace(void)
{
	pthread_mutex_lock(&lock);
	places++;
	pthread_mutex_unlock(&lock);
}

/*
 * Prepare prepares the transaction of an attempt, which the resolver ends. Returns
 * false if the transaction has ended, or is unchanged because there are too many
 * already.
 */
bool
Prepare(Attempt *attempt)
{
	Session *session = attempt->session;
	Prepared *prepared;
	bool done;

	if (!TakePlace())
		return false;
	prepared = calloc(1, sizeof(Prepared));
	prepared->commit = RandomPercent(&attempt->random, 65);
	snprintf(prepared->name, sizeof(prepared->name), "stress %d %lld %s", (int) getpid(),
			 (long long) attempt->number, prepared->commit ? "commit" : "rollback");
	prepared->pid = session->pid;
	done = Ask(session, attempt->refusal, "PREPARE TRANSACTION '%s'", prepared->name);
	prepared->certain = done && strcmp(PQcmdStatus(session->result), "ROLLBACK") != 0;
	if (!prepared->certain && !session->lost)
	{
		GiveUpPlace();
		free(prepared);
		return false;
	}

	Count(TALLY_PREPARED);
	prepared->attempt = *attempt;
	attempt->pendings = 0;
	pthread_mutex_lock(&lock);
	*last = prepared;
	last = &prepared->next;
	pthread_cond_signal(&changed);
	pthread_mutex_unlock(&lock);
	return true;
}

/*
 * Alive returns whether the backend that prepares might still be active.
 */
static bool
Alive(Session *session, const Prepared *prepared)
{
	return !Ask(session, NULL, "SELECT 1 FROM pg_stat_activity WHERE pid = %d", prepared->pid) ||
		   PQntuples(session->result) > 0;
}

/*
 * Resolve ends one prepared transaction, and retries as often as needed. If the reply
 * to PREPARE TRANSACTION was lost, it waits until the backend exits, and acknowledges
 * nothing.
 */
static void
Resolve(Session *session, Prepared *prepared)
{
	bool lostBefore = false;
	bool mayCome;

	for (;;)
	{
		session->mayCancel = true;
		mayCome = !prepared->certain && Alive(session, prepared);
		if (Ask(session, "42704 55000", "%s PREPARED '%s'",
				prepared->commit ? "COMMIT" : "ROLLBACK", prepared->name))
			break;
		if (strcmp(session->state, "42704") == 0 && !mayCome)
		{
			if (prepared->certain && !lostBefore)
				Violation("[prepared] transaction \"%s\" vanished", prepared->name);
			if (!prepared->certain)
				return;
			break;
		}
		lostBefore |= session->lost;
		SessionSettle(session);
		SleepMicroseconds(1000);
	}

	Count(prepared->commit ? TALLY_PREPARED_COMMITTED : TALLY_PREPARED_ROLLED_BACK);
	if (prepared->commit)
		PendingHold(&prepared->attempt);
}

/*
 * ResolverMain is the thread that ends prepared transactions after some time, until it
 * is stopped and none is left. "argument" is its session.
 */
void *
ResolverMain(void *argument)
{
	Session *session = argument;
	Random random;

	RandomSeed(&random, config.seed, UINT64_MAX);
	pthread_mutex_lock(&lock);
	while (first != NULL || !stopping)
	{
		Prepared *prepared = first;

		if (prepared == NULL)
		{
			pthread_cond_wait(&changed, &lock);
			continue;
		}
		first = prepared->next;
		if (first == NULL)
			last = &first;
		pthread_mutex_unlock(&lock);

		SleepMicroseconds(RandomBelow(&random, 4000));
		Resolve(session, prepared);
		PendingForget(&prepared->attempt);
		free(prepared);
		SessionSettle(session);
		GiveUpPlace();

		pthread_mutex_lock(&lock);
	}
	pthread_mutex_unlock(&lock);
	return NULL;
}

/*
 * ResolverStop requests the end of the resolver. Needs that no client prepares any
 * more.
 */
void
ResolverStop(void)
{
	pthread_mutex_lock(&lock);
	stopping = true;
	pthread_cond_signal(&changed);
	pthread_mutex_unlock(&lock);
}
