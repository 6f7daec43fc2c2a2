/*-------------------------------------------------------------------------
 *
 * ledger.c
 *	  What the clients were told about each operation.
 *
 * An operation is acknowledged once any client has been told that it is done:
 * the owner by a successful COMMIT, others by a replayed answer or by a false
 * from once().  From then on every answer must be the same, byte by byte, to
 * the end of the run.
 *
 * Any thread may read and note; a lock for each few keys is held while one
 * compares.
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
	char *answer;  /* NULL: nobody was told one */
	char *expires; /* NULL: nobody was told when */
} Entry;

static Entry *entries;
static pthread_mutex_t locks[LOCKS];
static atomic_llong notes;

/*
 * LedgerMake makes an empty ledger for all operations of the run.
 */
void
LedgerMake(void)
{
	entries = calloc(config.operations, sizeof(Entry));
	for (int i = 0; i < LOCKS; i++)
		pthread_mutex_init(&locks[i], NULL);
}

/*
 * Acknowledged tells whether some client has been told that the operation is
 * done.
 */
bool
Acknowledged(int key)
{
	return atomic_load(&entries[key].acknowledged);
}

/*
 * Acknowledge notes that a client has been told so.
 */
void
Acknowledge(int key)
{
	atomic_store(&entries[key].acknowledged, true);
}

/*
 * Agree notes the first text that was told, and compares every later one.
 * Needs the entry's lock.
 */
static void
Agree(int key, const char *what, char **noted, const char *told)
{
	if (told == NULL)
		return;
	if (*noted == NULL)
		*noted = strdup(told);
	else if (strcmp(*noted, told) != 0)
		Violation("[answers] operation %d was told two different %s:\n  %.300s\n  %.300s", key,
				  what, *noted, told);
}

/*
 * AcknowledgeAnswer notes what a client was told: the answer, and when it is
 * to be forgotten, if it was told that.
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
 * LedgerAnswer returns the answer that was told, or NULL.  Needs that nobody
 * notes anything at the same time.
 */
const char *
LedgerAnswer(int key)
{
	return entries[key].answer;
}

/*
 * LedgerNotes returns how many answers were noted.
 */
long long
LedgerNotes(void)
{
	return atomic_load(&notes);
}
