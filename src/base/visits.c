/*-------------------------------------------------------------------------
 *
 * base/visits.c
 *	  Requests of sessions that a background worker visit their database.
 *
 * A session requests a visit when it first finds the extension in its database,
 * after a change of the tables, and when its commit changed subscriptions that
 * got no slot in the registry.  The launcher takes the requests when its next cycle begins.
 *
 * Locks: an LWLock of its own, in each function.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "postmaster/bgworker.h"

#include "base/shmem.h"
#include "base/visits.h"

/* How many databases can request a visit at a time. */
#define REQUESTS_MOST 32

typedef struct VisitRequests
{
	LWLock *lock;
	Oid databases[REQUESTS_MOST]; /* 0 from the first free slot on */
} VisitRequests;

/* NULL unless the library is preloaded. */
static VisitRequests *requests = NULL;

/*
 * RequestVisit requests a visit to this session's database in the next cycle.  Does
 * nothing where the library is not preloaded, or too many databases have requested one:
 * then the visit is later.  A worker on a visit makes no request: it would be started
 * again, in every cycle, where it dies.
 */
void
RequestVisit(void)
{
	bool isReaper = MyBgworkerEntry != NULL && strcmp(MyBgworkerEntry->bgw_type, REAPER_TYPE) == 0;
	int slot = 0;

	if (requests == NULL || isReaper)
		return;

	LWLockAcquire(requests->lock, LW_EXCLUSIVE);
	while (slot < REQUESTS_MOST && OidIsValid(requests->databases[slot]) &&
		   requests->databases[slot] != MyDatabaseId)
		slot++;
	if (slot < REQUESTS_MOST)
		requests->databases[slot] = MyDatabaseId;
	LWLockRelease(requests->lock);
}

/*
 * TakeVisitRequests returns the databases that have requested a visit since the last call.
 */
List *
TakeVisitRequests(void)
{
	Oid taken[REQUESTS_MOST];
	List *databases = NIL;

	LWLockAcquire(requests->lock, LW_EXCLUSIVE);
	memcpy(taken, requests->databases, sizeof(taken));
	memset(requests->databases, 0, sizeof(taken));
	LWLockRelease(requests->lock);

	for (int slot = 0; slot < REQUESTS_MOST && OidIsValid(taken[slot]); slot++)
		databases = lappend_oid(databases, taken[slot]);
	return databases;
}

static void
InitializeRequests(void *memory, LWLock *lock)
{
	((VisitRequests *) memory)->lock = lock;
}

/*
 * VisitRequestsInit registers the shared memory; called from _PG_init().
 */
void
VisitRequestsInit(void)
{
	SharedMemoryRegister(
		&(SharedPart){(void **) &requests, sizeof(VisitRequests), InitializeRequests});
}
