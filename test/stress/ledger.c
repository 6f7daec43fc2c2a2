/*-------------------------------------------------------------------------
 *
 * ledger.c
 *	  The responses that the clients received for each operation.
 *
 * An operation is acknowledged once any client has received its result: the owner
 * through a successful COMMIT, others through a replay or through false from once().
 * From then on every response must be identical, byte by byte, to the end of the run.
 *
 * Any thread can read and record. One lock for every few keys is held during a
 * comparison.
 *
 *-------------------------------------------------------------------------
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ledger.h"
#include "plan.h"
#include "tally.h"

#define LOCKS 64

typedef struct Entry
{
	atomic_bool acknowledged;
	char *answer;  /* NULL: no response so far */
	char *expires; /* NULL: no expiry so far */
} Entry;

static Entry *entries;
static pthread_mutex_t locks[LOCKS];
static atomic_llong notes;

/*
 * LedgerMake creates an empty ledger for all operations of the run.
 */
void
LedgerMake(void)
{
	entries = calloc(config.operations, sizeof(Entry));
	for (int i = 0; i < LOCKS; i++)
		pthread_mutex_init(&locks[i], NULL);
}

/*
 * Acknowledged returns whether a client has received the result of the operation.
 */
bool
Acknowledged(int key)
{
	return atomic_load(&entries[key].acknowledged);
}

/*
 * Acknowledge records that a client has received the result.
 */
void
Acknowledge(int key)
{
	atomic_store(&entries[key].acknowledged, true);
}

/*
 * Agree records the first text, and compares every later one with it. Needs the entry's
 * lock.
 */
static void
Agree(int key, const char *what, char **noted, const char *acknowledged)
{
	if (acknowledged == NULL)
		return;
	if (*noted == NULL)
		*noted = strdup(acknowledged);
	else if (strcmp(*noted, acknowledged) != 0)
		Violation("[answers] operation %d has two different %s:\n  %.300s\n  %.300s", key, what,
				  *noted, acknowledged);
}

/*
 * AcknowledgeAnswer records the response of a client and, if known, its time of expiry.
 */
void
AcknowledgeAnswer(int key, const char *answer, const char *expires)
{
	Entry *entry = &entries[key];
	pthread_mutex_t *lock = &locks[key % LOCKS];

	pthread_mutex_lock(lock);
	Agree(key, "answers", &entry->answer, answer);
	Agree(key, "times of expiry", &entry->expires, expires);
	pthread_mutex_unlock(lock);
	atomic_fetch_add(&notes, 1);
	Acknowledge(key);
}

/*
 * LedgerAnswer returns the recorded response, or NULL. Needs that no other thread
 * records concurrently.
 */
const char *
LedgerAnswer(int key)
{
	return entries[key].answer;
}

/*
 * LedgerCount returns how many responses were recorded.
 */
long long
LedgerCount(void)
{
	return atomic_load(&notes);
}
